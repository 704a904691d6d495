;;;; Errors at the point where they are signalled, before any handler runs. The evaluated code may handle these
;;;; errors itself, so that they never reach the debugger.

(in-package "SBCL-HOST/DEBUGGER")

(defun observe-signal (signal condition)
  "Call SIGNAL, SBCL's %SIGNAL (src/code/cold-error.lisp), with CONDITION. If CONDITION is an error
other than a storage condition, call the thread's observer first."
  (let ((observer *signal-observer*))
    (when (and observer
               (typep condition '(and error (not storage-condition)))
               (not sb-kernel:*gc-inhibit*))
      (call-observer observer condition (frame-pointer-here)))
    (funcall (the function signal) condition)))

(defun system-function-p (function)
  "Return true when FUNCTION was compiled from a file of SBCL or of the server's Lisp side."
  (let* ((code (sb-kernel:fun-code-header (sb-kernel:%fun-fun function)))
         (file (sb-di:debug-source-namestring (sb-c::debug-info-source (sb-kernel:%code-debug-info code)))))
    (and file (system-file-p file))))

(defun system-handles-p (condition clusters)
  "Return true when the first handler for CONDITION in CLUSTERS, a value of *HANDLER-CLUSTERS*, is a function of SBCL or
of the server's Lisp side."
  (loop for cluster in clusters
        do (loop for (test . handler) in cluster
                 when (if (typep test 'sb-kernel::classoid-cell)
                          (sb-kernel::classoid-cell-typep test condition)
                          (funcall (the function test) condition))
                   do (return-from system-handles-p (system-function-p (sb-kernel:%coerce-callable-to-fun handler))))))

(defun call-observer (observer condition hook)
  "Call OBSERVER with CONDITION, HOOK (a frame pointer for ERROR-FRAME) and the active handlers. The code that signals
CONDITION must not notice the call: its handlers do not run for conditions that OBSERVER signals, no observer is called
for these conditions, and an error in OBSERVER only ends OBSERVER."
  (declare (type function observer))
  (let* ((clusters sb-kernel:*handler-clusters*)
         (sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**)
         (sb-debug:*stack-top-hint* (or sb-debug:*stack-top-hint* 'signal))
         (sb-impl::*deadline* nil))
    (guarded (funcall observer condition hook clusters) (failure) nil)))

(defun call-with-signal-observer (observer function)
  "Return the values of FUNCTION. Before any handler runs, call OBSERVER for each error that is signalled meanwhile in
this thread, or in a thread that the evaluation starts. Storage conditions are not observed. OBSERVER receives the
condition, a frame pointer for ERROR-FRAME, and the active handlers, a value of *HANDLER-CLUSTERS*. Several threads may
call OBSERVER at once. Errors in OBSERVER are discarded."
  (declare (type function observer function))
  (let ((*signal-observer* observer))
    (funcall function)))

;;; The code location of a signal

(defun signalling-location (hook)
  "Return an object that identifies the code location where an error was signalled, for comparison by EQUAL. HOOK is the
frame pointer with which the observer was called. The object holds the code component and program counter of a frame: the
innermost frame of user code among the first 50 frames, or else the innermost frame. Return NIL if the frame has no Lisp
code."
  (let* ((start (error-frame hook))
         (frame (or (loop for frame = start then (sb-di:frame-down frame)
                          repeat 50
                          while (and frame (user-frame-p frame))
                          unless (or (system-frame-p frame) (host-frame-p frame))
                            return frame)
                    start)))
    (unless (or (null frame) (bogus-frame-p frame))
      (cons (sb-di::compiled-debug-fun-component (sb-di:frame-debug-fun frame))
            (sb-di::compiled-code-location-pc (sb-di:frame-code-location frame))))))

;;; Recording handled errors

(defconstant +max-recorded-errors+ 20
  "Maximum number of handled errors that are recorded for one evaluation.")
(defconstant +max-observed-errors+ 10000
  "Maximum number of errors of one evaluation that are examined. Examining an error takes some 50 microseconds.")
(defconstant +report-time-limit+ 1/2
  "The time limit, in seconds, for the report of one error: a user's print method might never return.")
(defconstant +capture-time-limit+ 1
  "The time limit, in seconds, for capturing one error with its frames.")

(defstruct (error-recorder (:copier nil) (:predicate nil))
  "The errors that were recorded and the number that were examined for one evaluation."
  (lock (sb-thread:make-mutex :name "recorded errors") :read-only t)
  ;; ENTRIES contains the recorded errors, newest first, as lists of condition, class and code location (a value of
  ;; SIGNALLING-LOCATION). COUNT is the number of entries.
  (entries '() :type list)
  (count 0 :type index)
  ;; The number of errors that were examined, recorded or not.
  (observed-count 0 :type sb-ext:word)
  ;; True once the client was notified that no more errors are recorded.
  (limit-reported nil))

(defun known-error-p (recorder condition location)
  "Return true when RECORDER holds CONDITION itself, or another condition of its class that was signalled at LOCATION, a
value of SIGNALLING-LOCATION."
  (find-if (lambda (entry)
             (destructuring-bind (known class known-location) entry
               (or (eq known condition)
                   (and (eq class (class-of condition)) (equal known-location location)))))
           (error-recorder-entries recorder)))

(defun record-signalled-error (recorder condition hook)
  "Record CONDITION in RECORDER and push it, unless RECORDER holds an error of the same class from the same code location,
or a limit is reached. The first time that a limit is reached, push a notice. HOOK is the frame pointer with which the
observer was called."
  (cond ((error-recorder-limit-reported recorder))
        ((or (= (error-recorder-count recorder) +max-recorded-errors+)
             (= (error-recorder-observed-count recorder) +max-observed-errors+))
         (setf (error-recorder-limit-reported recorder) t)
         (push-notice "Only some of the signalled errors were recorded: recording stops after ~D errors that differ in type ~
                       or location, or after ~D errors in all."
                      +max-recorded-errors+ +max-observed-errors+))
        (t
         (incf (error-recorder-observed-count recorder))
         (let ((location (signalling-location hook)))
           (unless (known-error-p recorder condition location)
             ;; PUSH-UNHANDLED-ERROR reads the entries without the lock.
             (sb-ext:atomic-push (list condition (class-of condition) location) (error-recorder-entries recorder))
             (incf (error-recorder-count recorder))
             (push-signalled-error condition hook))))))

(defun push-bounded-report (condition)
  "Push the report of CONDITION as PUSH-REPORT does, under a time limit: a user's print method might never return."
  (unless (call-with-time-limit +report-time-limit+ (lambda () (push-report (event-code :error-text) condition) t))
    (event *job-id* (event-code :error-text) 0 "(the condition's report took too long to print)")))

(defun push-signalled-error (condition hook)
  "Push CONDITION as an error that the evaluated code may still handle. HOOK is the frame pointer with which the
observer was called."
  ;; The output that precedes the error must reach the host first.
  (flush-output)
  (let ((*job-id* (logior *job-id* +job-signalled+)))
    (call-with-time-limit
     +capture-time-limit+
     (lambda ()
       (capture-error (type-name-text (class-name-of condition))
                      (lambda () (push-bounded-report condition))
                      condition
                      (lambda () (error-frame hook)))))))

(defvar *error-recorder* nil
  "The ERROR-RECORDER of this evaluation, or NIL when handled errors are not recorded.")

(defun call-with-recorded-errors (function)
  "Return the values of FUNCTION. Push the errors that FUNCTION signals, each before any handler runs. Only the
first error of each class and code location is pushed. Errors that SBCL, a contrib such as ASDF, or the server's Lisp side
handles itself are not pushed."
  (let* ((recorder (make-error-recorder))
         (*error-recorder* recorder))
    (call-with-signal-observer
     (lambda (condition hook clusters)
       (unless (or (error-recorder-limit-reported recorder) (system-handles-p condition clusters))
         (sb-thread:with-recursive-lock ((error-recorder-lock recorder))
           (record-signalled-error recorder condition hook))))
     function)))

(defun push-unhandled-error (condition)
  "If CONDITION was recorded, push an event that marks it as unhandled, because CONDITION is reported separately as the
error that ended the evaluation."
  (when *error-recorder*
    (let ((position (position condition (reverse (error-recorder-entries *error-recorder*)) :key #'first :test #'eq)))
      (when position
        (event *job-id* (event-code :unhandled) position)))))

(provide-hook call-recording-errors #'call-with-recorded-errors)
(provide-hook push-unhandled-condition #'push-unhandled-error)
