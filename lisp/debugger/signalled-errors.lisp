;;;; Errors where they are signalled, before any handler runs: those that the code handles itself, too, which never reach
;;;; the debugger.

(in-package "SBCL-HOST/DEBUGGER")

(defun observe-signal (signal condition)
  "What SBCL's %SIGNAL does (src/code/cold-error.lisp), after the thread's observer has seen CONDITION, if it is an error."
  (let ((observer *signal-observer*))
    (when (and observer
               (typep condition '(and error (not storage-condition)))
               (not sb-kernel:*gc-inhibit*))
      (call-observer observer condition (frame-pointer-here)))
    (funcall (the function signal) condition)))

(defun system-function-p (function)
  "True when FUNCTION was compiled from a file of SBCL's own, or of the Lisp side."
  (let* ((code (sb-kernel:fun-code-header (sb-kernel:%fun-fun function)))
         (file (sb-di:debug-source-namestring (sb-c::debug-info-source (sb-kernel:%code-debug-info code)))))
    (and file (system-file-p file))))

(defun system-handles-p (condition clusters)
  "True when the first handler in CLUSTERS, a value of *HANDLER-CLUSTERS*, that is for CONDITION is SBCL's own."
  (loop for cluster in clusters
        do (loop for (test . handler) in cluster
                 when (if (typep test 'sb-kernel::classoid-cell)
                          (sb-kernel::classoid-cell-typep test condition)
                          (funcall (the function test) condition))
                   do (return-from system-handles-p (system-function-p (sb-kernel:%coerce-callable-to-fun handler))))))

(defun call-observer (observer condition hook)
  "Call OBSERVER with CONDITION, HOOK and the present handlers so that the code that signals CONDITION does not notice: none
of its handlers runs for what OBSERVER signals, that is not observed, and what it fails with ends it."
  (declare (type function observer))
  (let* ((clusters sb-kernel:*handler-clusters*)
         (sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**)
         (sb-debug:*stack-top-hint* (or sb-debug:*stack-top-hint* 'signal))
         (sb-impl::*deadline* nil))
    (guarded (funcall observer condition hook clusters) (failure) nil)))

(defun call-with-signal-observer (observer function)
  "Return the values of FUNCTION. Meanwhile OBSERVER is called with each error that this thread, or a thread of an
evaluation that it starts, signals, where that is signalled and before any handler runs; with a frame pointer, for
ERROR-FRAME; and with the handlers there, a value of *HANDLER-CLUSTERS*. It may be called by several threads at once. Errors of its own are dropped. It costs about as much as a call."
  (declare (type function observer function))
  (let ((*signal-observer* observer))
    (funcall function)))

(defun call-with-time-limit (seconds function)
  "Return the values of FUNCTION, or NIL if it takes more than SECONDS, a real: then it is unwound."
  (declare (type function function))
  (let* ((tag (list nil))
         (running t)
         ;; It may come late: this thread alone sets RUNNING.
         (timer (sb-ext:make-timer (lambda () (when running (throw tag nil)))
                                   :thread sb-thread:*current-thread*)))
    (catch tag
      (unwind-protect (progn (sb-ext:schedule-timer timer seconds)
                             (funcall function))
        (setf running nil)
        (sb-ext:unschedule-timer timer)))))

;;; Where one is signalled

(defun signalling-place (hook)
  "Return what tells the place from others where the error is signalled that an observer was called for with HOOK: the
code and the program counter in it of the innermost frame that is not SBCL's own, if there is one among the first 50."
  (let* ((start (error-frame hook))
         (frame (or (loop for frame = start then (sb-di:frame-down frame)
                          repeat 50
                          while (and frame (< (frame-address frame) *boundary*))
                          unless (or (system-frame-p frame) (host-frame-p frame))
                            return frame)
                    start)))
    (unless (or (null frame) (bogus-frame-p frame))
      (cons (sb-di::compiled-debug-fun-component (sb-di:frame-debug-fun frame))
            (sb-di::compiled-code-location-pc (sb-di:frame-code-location frame))))))

;;; Recording them

(defconstant +recorded-errors+ 20
  "How many errors of an evaluation are recorded that its code handles.")
(defconstant +observed-errors+ 10000
  "How many are looked at. A look takes some 50 microseconds.")
(defconstant +report-seconds+ 1/2
  "How long the report of one may take: print methods of the user's may not end.")
(defconstant +capture-seconds+ 1
  "How long all of it may take.")

(defstruct (recorder (:copier nil) (:predicate nil))
  "What was recorded of the errors that an evaluation signals."
  (lock (sb-thread:make-mutex :name "recorded errors") :read-only t)
  ;; Lists of condition, class and place, newest first.
  (entries '() :type list)
  (count 0 :type index)
  ;; How many were looked at.
  (looks 0 :type sb-ext:word)
  ;; True once it was told that no more are recorded.
  (told nil))

(defun known-error-p (recorder condition place)
  "True when RECORDER has CONDITION, or another one of its class from PLACE."
  (find-if (lambda (entry)
             (destructuring-bind (known class known-place) entry
               (or (eq known condition)
                   (and (eq class (class-of condition)) (equal known-place place)))))
           (recorder-entries recorder)))

(defun record-signalled-error (recorder condition hook)
  "Push CONDITION, which an observer was called for with HOOK, unless RECORDER has one of its class and place."
  (cond ((recorder-told recorder))
        ((or (= (recorder-count recorder) +recorded-errors+)
             (= (recorder-looks recorder) +observed-errors+))
         (setf (recorder-told recorder) t)
         (say "More errors were signalled than are recorded: the first ~D kinds and places among the first ~D errors."
              +recorded-errors+ +observed-errors+))
        (t
         (incf (recorder-looks recorder))
         (let ((place (signalling-place hook)))
           (unless (known-error-p recorder condition place)
             (push (list condition (class-of condition) place) (recorder-entries recorder))
             (incf (recorder-count recorder))
             (push-signalled-error condition hook))))))

(defun push-bounded-report (condition)
  "Push what CONDITION reports, as PUSH-REPORT does, if it ends: print methods of the user's may not."
  (unless (call-with-time-limit +report-seconds+ (lambda () (push-report (event-code :error-text) condition) t))
    (event *job-id* (event-code :error-text) 0 "(the condition's report does not end)")))

(defun push-signalled-error (condition hook)
  "Push CONDITION, which an observer was called for with HOOK, as one that the code may handle."
  ;; What this thread has printed so far keeps its place.
  (flush-output)
  (let ((*job-id* (logior *job-id* +job-signalled+)))
    (call-with-time-limit
     +capture-seconds+
     (lambda ()
       (capture (type-name-text (class-name-of condition))
                (lambda () (push-bounded-report condition))
                condition
                (lambda () (error-frame hook)))))))

(defvar *recorder* nil
  "The RECORDER of this evaluation, or NIL when the errors that it handles are not recorded.")

(defun call-with-recorded-errors (function)
  "Return the values of FUNCTION and push the errors that it signals where they are signalled: the first one of each class
and place, but for what is SBCL's or ASDF's own business."
  (let* ((recorder (make-recorder))
         (*recorder* recorder))
    (call-with-signal-observer
     (lambda (condition hook clusters)
       (unless (or (recorder-told recorder) (system-handles-p condition clusters))
         (sb-thread:with-recursive-lock ((recorder-lock recorder))
           (record-signalled-error recorder condition hook))))
     function)))

(defun push-unhandled-error (condition)
  "Push that nothing handled CONDITION, which is told of as what the evaluation fails with."
  (when *recorder*
    (let ((position (position condition (reverse (recorder-entries *recorder*)) :key #'first :test #'eq)))
      (when position
        (event *job-id* (event-code :unhandled) position)))))

(provide-hook call-recording-errors #'call-with-recorded-errors)
(provide-hook push-unhandled #'push-unhandled-error)
