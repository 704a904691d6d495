;;;; A failed evaluation held where it failed: looking at its frames, changing things, and going on.

(in-package "SBCL-HOST/DEBUGGER")

(defvar *held-condition* nil
  "The condition of the evaluation that is held.")
(defvar *held-frames* '()
  "Its frames, as USER-FRAMES returns them.")

(defmacro with-hold (() &body body)
  "Evaluate BODY so that nothing of the held evaluation's can end the hold: not its handlers, and no condition that its
timers signal: that is continued, or ends BODY with NIL."
  `(catch 'contained
     (let ((sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**)
           (*signal-observer* nil)
           (*debugger-hook* nil)
           (sb-debug:*stack-top-hint* nil)
           (sb-kernel::*current-error-depth* 0)
           (*break-on-signals* nil)
           (sb-impl::*deadline* nil)
           (*on-debugger* (lambda (condition)
                            (let ((restart (find-restart 'continue condition)))
                              (if restart
                                  (invoke-restart restart)
                                  (throw 'contained nil))))))
       ,@body)))

(defun contain-held-interruption (function)
  "Call FUNCTION, which interrupts this thread while an evaluation is held and nothing is being done with it, as a timer
does. Wherever it unwinds to, it ends here."
  (let ((sb-thread::*interrupt-handler* nil))
    (block contained
      (unwind-protect (with-hold () (funcall (the function function)))
        (return-from contained)))))

(defun next-held-job ()
  "Wait for the next job, by which this thread is in the foreground again, and return it, or NIL when there will be none.
What was to interrupt this thread meanwhile does so before it returns: an interrupt on the way out of NEXT-JOB would lose
the job."
  (without-interrupts
    (let ((job (next-job +evaluation-lane+ *job-id*)))
      (when job
        (become-main-thread)
        (change-job (job-id job)))
      (allow-with-interrupts
        (call-until-abandoned
         (lambda () (with-hold () (with-interrupts nil)))))
      job)))

(defun hold-evaluation (condition frames)
  "Answer the failed evaluation and do what the host asks of it, until that makes it go on or releases it. Return to
release it. Nothing else leaves the hold: what would, as a timer's function that throws, comes back to it."
  (let ((*held-condition* condition)
        (*held-frames* frames)
        (sb-thread::*interrupt-handler* #'contain-held-interruption)
        (job nil)
        (leaving nil))
    (forget-answers)
    (keep-variables)
    (tell-definitions)
    (when *push-unfinished*
      (funcall (the function *push-unfinished*)))
    (event *job-id* (event-code :held))
    (flush-output)
    (done nil)
    (loop
      (catch 'still-held
        (unwind-protect
             (progn
               (setf job (next-held-job))
               (when (or (null job) (eq (job-kind job) :release))
                 (setf leaving t)
                 (return))
               (let ((sb-thread::*interrupt-handler* nil))
                 (multiple-value-bind (success resume) (run-held-command job)
                   ;; What makes the evaluation go on does so under its own handlers again.
                   (when resume
                     (setf leaving t)
                     (when (eq resume :release)
                       (event *job-id* (event-code :released))
                       (return))
                     (funcall (the function resume))
                     (setf leaving nil))
                   (end-held-job success)
                   (setf job nil))))
          (unless leaving
            (when job
              (refuse "Something of the session's interrupted this, such as a timer.")
              (end-held-job nil)
              (setf job nil))
            (throw 'still-held nil))))))
  ;; Its cleanup forms are not held again.
  (setf *hold-errors* nil))

(defun waiting-p (frame)
  "True when FRAME is of one of SBCL's own system calls, in which interrupts are expected at any time."
  (member (ignore-errors (frame-file frame))
          '("SYS:SRC;CODE;UNIX.LISP" "SYS:SRC;CODE;TARGET-THREAD.LISP" "SYS:SRC;CODE;SERVE-EVENT.LISP"
            "SYS:SRC;CODE;FD-STREAM.LISP")
          :test #'equal))

(defun in-foreign-code-p (frame)
  "True when this thread was interrupted while FRAME, the innermost of Lisp, called foreign code other than a system
call: it may hold locks of its own, such as malloc's."
  (and (plusp sb-kernel:*free-interrupt-context-index*)
       (null (sb-di::code-header-from-pc
              (sb-vm:context-pc (sb-di::nth-interrupt-context (1- sb-kernel:*free-interrupt-context-index*)))))
       (not (waiting-p frame))))

(defun holdable-frame-p (frame)
  "True when the evaluation can be held while it is in FRAME, its innermost: in one of its forms, not in what the server
does between them."
  (and (plusp *form-number*)
       (< (frame-address frame) *boundary*)
       (not sb-kernel:*gc-inhibit*)
       (not (in-foreign-code-p frame))))

(defun hold-interrupted-evaluation (reason hook)
  "Hold the evaluation that was interrupted for REASON where it was, below the function with frame pointer HOOK, with a
restart that has it go on from there. Return true when it is to go on, and NIL when it cannot be held, and nothing has
been pushed. Does not return when it is released."
  (when (and (eql reason +interrupt-timeout+)
             *hold-errors*
             (not *failed*)
             (holdable-frame-p (interrupted-frame hook)))
    (block go-on
      (let* ((continue (sb-kernel::make-restart
                        'continue (lambda () (return-from go-on t))
                        (lambda (stream) (write-string "Go on." stream))))
             (sb-kernel:*restart-clusters* (cons (list continue) sb-kernel:*restart-clusters*)))
        (hold-evaluation nil (capture-interruption reason hook))
        (abandon-evaluation :interrupted #'end-programs)))))

(defun end-held-job (success)
  "Tell the host that a job is over that leaves the evaluation held."
  (finish-output-of-job)
  (event *job-id* (event-code :held) 1)
  (done success))

(defun run-held-command (job)
  "Do JOB so that what interrupts it abandons nothing else. Return what HELD-COMMAND does."
  (let* ((resume nil)
         (success (call-until-abandoned
                   (lambda ()
                     (with-hold ()
                       (with-interrupts
                         (multiple-value-bind (success next) (held-command job)
                           (setf resume next)
                           success)))))))
    (values success resume)))

(defun held-command (job)
  "Do JOB. Return whether that was possible; and a function, if it is one to make the evaluation go on, or :RELEASE."
  (case (job-kind job)
    (:invoke-restart (restart-command job))
    (:frame-locals (locals-command job))
    (:eval-in-frame (eval-command job))
    (:return-from-frame (return-command job))
    (:restart-frame (restart-frame-command job))
    (t (refuse "This cannot be asked of a held evaluation."))))

(defmacro do-held-forms ((form text result &optional (end (gensym "END"))) &body body)
  "Evaluate BODY with FORM bound to each form in TEXT in turn, and END to where it ends, and return RESULT. An error in
this is not held."
  (let ((stream (gensym "STREAM")))
    `(let* ((*hold-errors* nil)
            (*code* ,text)
            (*evaluated-forms* '())
            (*form-number* 0)
            (*form-start* 0)
            (,stream (make-string-input-stream *code*)))
       (loop for ,form = (read-form ,stream ,stream (whitespace-end ,stream))
             for ,end = (file-position ,stream)
             until (eq ,form ,stream)
             do (progn ,@body)
             finally (return ,result)))))

;;; Restarts

(defun find-held-restart (number name)
  "Return the restart NUMBER, or when that is 0 the first one called NAME; or refuse."
  (let ((restarts (restarts-for *held-condition*)))
    (or (if (plusp number)
            (nth (1- number) restarts)
            (find name restarts :key (lambda (restart) (string (restart-name restart))) :test #'string-equal))
        (refuse "There is no restart ~A. There are: ~{~A~^, ~}."
                (if (plusp number) number name)
                (loop for (number . restart) in (numbered-restarts restarts)
                      collect (format nil "~D ~A" number (restart-name restart)))))))

(defun evaluate-arguments (text)
  "Return a list of the values of the expressions in TEXT. The second value is true unless one failed, which has been
pushed as an error."
  (multiple-value-bind (arguments success)
      (call-until-abandoned
       (lambda ()
         (let ((arguments '()))
           (do-held-forms (form text (nreverse arguments))
             (push (with-boundary () (eval form)) arguments)))))
    (unless success
      (say "`values` failed: the restart was not invoked, and the evaluation is still held."))
    (values arguments success)))

(defun argument-count (function)
  "Return how many arguments FUNCTION takes at least and, or NIL, at most, as far as SBCL knows."
  (let ((minimum 0)
        (maximum 0)
        (lambda-list (if (or (sb-kernel:simple-fun-p function) (sb-kernel:closurep function)
                             (typep function 'sb-kernel:interpreted-function))
                         (sb-kernel:%fun-lambda-list function)
                         :unknown)))
    (unless (sb-int:proper-list-p lambda-list)
      (return-from argument-count (values 0 nil)))
    (loop with optional = nil
          for parameter in lambda-list
          do (case parameter
               (&optional (setf optional t))
               (&aux (return))
               ((&rest &key &allow-other-keys sb-int:&more) (return (setf maximum nil)))
               (t (incf maximum)
                  (unless optional (incf minimum)))))
    (values minimum maximum)))

(defun interactive-arguments (restart)
  "Return a list whose one element is the list of arguments that RESTART's interactive function comes to when there is
nobody to ask; or NIL when it does not."
  (let* ((in (make-concatenated-stream))
         (nobody (make-two-way-stream in (make-broadcast-stream)))
         (*standard-input* in)
         (*query-io* nobody)
         (*debug-io* nobody)
         (*terminal-io* nobody))
    (values
     (call-until-abandoned
      (lambda ()
        (let ((*hold-errors* nil))
          (guarded (let ((arguments (funcall (sb-kernel::restart-interactive-function restart))))
                     (and (sb-int:proper-list-p arguments) (list arguments)))
              (failure)
            nil)))))))

(defun refuse-arguments (restart minimum maximum count)
  "Refuse to invoke RESTART, which takes MINIMUM to MAXIMUM arguments, with COUNT of them."
  (refuse "The restart ~A takes ~A~A~A."
          (restart-name restart)
          (cond ((eql maximum 0) "no values")
                ((eql minimum maximum) (format nil "~D value~:P" minimum))
                (maximum (format nil "~:[~D to ~D~;up to ~*~D~] value~:P" (zerop minimum) minimum maximum))
                ((zerop minimum) "values")
                (t (format nil "at least ~D value~:P" minimum)))
          (if (zerop count) "" (format nil "; ~D ~:[were~;was~] given" count (= count 1)))
          (if (eql maximum 0) "" ": give them in `values`, as Lisp expressions")))

(defun restart-arguments (restart text)
  "Return the arguments to invoke RESTART with, and true unless there is something wrong with them, which has been
pushed: the values of the expressions in TEXT or, without any, what its interactive function returns."
  (multiple-value-bind (minimum maximum) (argument-count (sb-kernel::restart-function restart))
    (multiple-value-bind (arguments success) (evaluate-arguments text)
      (cond ((not success)
             (return-from restart-arguments (values '() nil)))
            ((and (null arguments) (sb-kernel::restart-interactive-function restart))
             (let ((found (interactive-arguments restart)))
               (unless found
                 (return-from restart-arguments
                   (values '() (refuse-arguments restart minimum maximum 0))))
               (setf arguments (first found)))))
      (let ((count (length arguments)))
        (values arguments
                (or (<= minimum count (or maximum count))
                    (refuse-arguments restart minimum maximum count)))))))

(defun assertion-places (restart)
  "Return how many places RESTART asks new values for when it is the CONTINUE of a failed ASSERT, else NIL. What it says
of itself is all that tells: `Retry assertion with new values for A, (CAR B).'"
  (let* ((report (with-server-syntax ()
                   (let ((*print-escape* nil)) (guarded (princ-to-string restart) (failure) ""))))
         (places (search " for " report)))
    (when (and (string= "CONTINUE" (restart-name restart))
               (eql (mismatch "Retry assertion" report) 15))
      (if places
          (with-input-from-string (stream report :start (+ places 5) :end (1- (length report)))
            ;; Reads without making anything of it, symbols least of all, and takes the commas for nothing.
            (with-standard-io-syntax
              (let ((*read-suppress* t))
                (loop until (eq stream (read stream nil stream)) count t))))
          0))))

(defun answer ()
  "Return the next of what was given to a restart that asks for it. Called by what TYPE-ANSWERS types."
  (pop *answers*))

(defun type-answers (answers count)
  "Have the COUNT next places that ASSERT asks for on *QUERY-IO* get new values, those in ANSWERS, or keep their own."
  (setf *answers* answers
        *own-tty* sb-sys:*tty*
        sb-sys:*tty* (make-two-way-stream
                      (make-string-input-stream
                       (format nil "~{~:[n~;y~%(|SBCL-HOST/DEBUGGER|::|ANSWER|)~]~%~}"
                               (loop repeat count collect (and answers (progn (pop answers) t)))))
                      sb-sys:*tty*)))

(defun continue-assertion (restart places text)
  "Return true and a function that goes on with RESTART, of an assertion, which asks for as many PLACES as that. They
get the values of the expressions in TEXT."
  (multiple-value-bind (new success) (evaluate-arguments text)
    (cond ((not success) nil)
          ((> (length new) places)
           (refuse-arguments restart 0 places (length new)))
          (t
           (values t
                   (lambda ()
                     (type-answers new places)
                     (invoke-restart restart)))))))

(defun restart-command (job)
  "Return true and a function that invokes a restart, which HOLD calls."
  (let ((restart (find-held-restart (job-argument job) (job-name job))))
    (when restart
      (let ((places (assertion-places restart)))
        (if places
            (continue-assertion restart places (job-text job))
            (multiple-value-bind (arguments success) (restart-arguments restart (job-text job))
              (values success
                      (cond ((not success) nil)
                            ((eq (sb-kernel::restart-function restart) #'abort-evaluation) :release)
                            (t
                             (lambda ()
                               (apply #'invoke-restart restart arguments)
                               (say "The restart returned: the evaluation is still held.")))))))))))

;;; Frames

(defun find-held-frame (number)
  "Return the frame NUMBER of the held evaluation, or refuse."
  (or (cdr (assoc number *held-frames*))
      (refuse "There is no frame ~D. Frames are numbered from 0 to ~D."
              number (or (car (car (last *held-frames*))) 0))))

(defun locals-command (job)
  "Push the local variables of as many frames as the job's flags say, +FRAMES-WITH-LOCALS+ at most, from the frame on whose
number is the job's argument."
  (with-inspection-syntax ()
    (let ((*package* (current-package)))
      (loop repeat (min (job-flags job) +frames-with-locals+)
            for (number . frame) in (member (job-argument job) *held-frames* :key #'car :test #'<=)
            do (event *job-id* (event-code :frame) number)
               (loop for (symbol validity value) in (guarded (ordered-locals frame) (failure) '())
                     do (push-local (event-code :local) (event-code :local-text) symbol validity value)))))
  t)

(defun frame-has-variables-p (frame)
  "True when code can be evaluated with variables of FRAME's own visible."
  (and (not (bogus-frame-p frame))
       (guarded (sb-debug::frame-has-debug-vars-p frame) (failure) nil)
       (guarded (locals frame) (failure) nil)
       t))

(defun evaluate-in-frame (text frame &optional (defined (constantly nil)))
  "Evaluate the forms in TEXT in FRAME, or globally when it has no variables. Call DEFINED with each form, where it begins
and ends, and the package it was read in. Return a list of the last one's values, and true unless it failed."
  (declare (type function defined))
  (call-with-recorded-warnings
   (lambda ()
     (call-until-abandoned
      (lambda ()
        (let ((values '()))
          (do-held-forms (form text values end)
            (incf *form-number*)
            (let ((package *package*)
                  (sb-c::*source-plist* (note-evaluated-form form (evaluation-number *evaluation*) *code*
                                                             *form-start* end)))
              (setf values
                    (multiple-value-list
                     (with-boundary ()
                       (if (frame-has-variables-p frame)
                           (sb-di:eval-in-frame frame form)
                           (evaluate-in-lexenv form)))))
              (funcall defined form *form-start* end package)))))))))

(defun eval-command (job)
  "Evaluate code in a frame and push its values. It is an evaluation of its own: what it defines is not the held one's."
  (let ((frame (find-held-frame (job-argument job)))
        (*evaluation* (make-evaluation :number (job-evaluation job)))
        (definitions 0))
    (when frame
      (unless (frame-has-variables-p frame)
        (say "The frame has no variables that SBCL knows of: the code was evaluated globally."))
      (multiple-value-bind (values success)
          (evaluate-in-frame (job-text job) frame
                             (lambda (form start end package)
                               (when (/= definitions (evaluation-definitions *evaluation*))
                                 (setf definitions (evaluation-definitions *evaluation*))
                                 (push-defining-form form (job-text job) start end package))
                               (forget-changes)))
        (tell-definitions)
        (when (evaluation-threads *evaluation*)
          (push-running-threads))
        (and success
             (nth-value 1 (call-until-abandoned (lambda () (mapc #'push-value values)))))))))

(defun unwindable-p (frame number)
  "True when the evaluation can go on from FRAME; else refuse."
  (let ((why-not (why-not-unwindable frame)))
    (or (not why-not)
        (refuse "SBCL cannot unwind to frame ~D: ~@?.~@[ The next one out to which it can is ~D.~]" number why-not
                (car (find-if (lambda (entry)
                                (and (> (car entry) number) (not (why-not-unwindable (cdr entry)))))
                              *held-frames*))))))

(defun return-command (job)
  "Return values from a frame."
  (let ((frame (find-held-frame (job-argument job))))
    (when (and frame (unwindable-p frame (job-argument job)))
      (multiple-value-bind (values success) (evaluate-in-frame (job-text job) frame)
        (cond ((not success)
               (say "The code failed: the frame did not return, and the evaluation is still held."))
              ((not (declared-to-return-p frame values))
               (refuse "Frame ~D cannot return this: its function is declaimed to return something else."
                       (job-argument job)))
              (t
               (values t
                       (lambda ()
                         (sb-debug:unwind-to-frame-and-call frame (lambda () (values-list values)))))))))))

(defun restart-frame-command (job)
  "Call a frame's function again with the same arguments."
  (let ((frame (find-held-frame (job-argument job))))
    (when (and frame (unwindable-p frame (job-argument job)))
      (multiple-value-bind (function arguments) (frame-function frame (job-argument job))
        (when function
          (values t
                  (lambda ()
                    (sb-debug:unwind-to-frame-and-call frame
                                                       (lambda ()
                                                         (declare (optimize (debug 0)))
                                                         (apply (the function function) arguments))))))))))

(provide-hook hold #'hold-evaluation)
(provide-hook hold-interruption #'hold-interrupted-evaluation)
