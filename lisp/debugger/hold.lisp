;;;; Held evaluations. An evaluation that failed or timed out stays where it stopped while the client inspects its frames,
;;;; evaluates code in them, and then resumes or releases the evaluation.

(in-package "SBCL-HOST/DEBUGGER")

(defvar *held-condition* nil
  "The condition with which the held evaluation failed, or NIL if the evaluation was interrupted.")
(defvar *held-frames* '()
  "The frames of the held evaluation, as USER-FRAMES returns them: an alist from numbers to frames.")

(defmacro with-protected-hold (() &body body)
  "Evaluate BODY so that no handler, debugger hook or deadline of the held evaluation can end the hold. Handlers of the
evaluation do not run. If a condition reaches the debugger, invoke its CONTINUE restart; if it has no such restart, end
BODY and return NIL."
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
  "Call FUNCTION, with which a timer or another thread interrupts this thread while an evaluation is held and no command
runs. Stop a non-local exit out of FUNCTION."
  (let ((sb-thread::*interrupt-handler* nil))
    (block contained
      (unwind-protect (with-protected-hold () (funcall (the function function)))
        (return-from contained)))))

(defun next-held-job ()
  "Wait for the next job and return it, or NIL when there will be no more jobs. The held evaluation's messages are from then
on for the audience of the job: another client may have taken the evaluation over. Make this thread the main thread again
for a job other than :FRAME-LOCALS and :RELEASE, because these jobs may run while another thread is in the foreground.
Run pending interruptions of this thread before this function returns, because an interruption on the way out of NEXT-JOB
would lose the job."
  (without-interrupts
    (let ((job (next-job +evaluation-lane+ *job-id*)))
      (when job
        (unless (member (job-kind job) '(:frame-locals :release))
          (become-main-thread))
        (setf (evaluation-audience *evaluation*) (job-audience job))
        (change-job (job-id job)))
      (allow-with-interrupts
        (call-until-abandoned
         (lambda () (with-protected-hold () (with-interrupts nil)))))
      job)))

(defun report-stopped-exit (job)
  "Report that JOB failed because a non-local exit would have left the held evaluation. The exit was made by JOB's own
code, or by code that interrupted JOB, such as a timer's function."
  (cond ((eq (job-kind job) :frame-locals)
         (refuse "A non-local exit, such as a throw, out of the held evaluation was stopped: the variables cannot be shown, and ~
                  the evaluation is still held. A print method, a timer or another thread made the exit."))
        (t
         (event *job-id* (event-code :error) 0 "ABORTED")
         (event *job-id* (event-code :error-text) 0
                (format nil "A non-local exit, such as a throw, out of the held evaluation was stopped: the rest of the code ~
                             was not evaluated, and the evaluation is still held. To leave a frame, invoke a restart or ~
                             resume from the frame. If the code makes no such exit, a timer or another thread made the ~
                             exit.")))))

;;; Variables of held frames

(defstruct (variable-frame (:include sb-di::compiled-frame)
                           (:constructor make-variable-frame (pointer debug-fun code-location number escaped))
                           (:copier nil)
                           (:predicate nil))
  "A held frame, as code that EVAL-IN-FRAME evaluates refers to it to access the frame's variables. The code may contain
functions that outlive the frame. ENDED is true once the evaluation is no longer held: the stack memory of the frame may then
have other contents."
  (ended nil))

(defvar *variable-frames* '()
  "An alist from the frames of the held evaluation in which code was evaluated to their VARIABLE-FRAMEs.")

(defun ensure-variable-frame (frame)
  "Return the VARIABLE-FRAME of FRAME, a frame of the held evaluation. If there is none, make it."
  (or (cdr (assoc frame *variable-frames* :test #'eq))
      (let ((new (make-variable-frame (sb-di::frame-pointer frame) (sb-di:frame-debug-fun frame)
                                      (sb-di:frame-code-location frame) (sb-di:frame-number frame)
                                      (sb-di::compiled-frame-escaped frame))))
        (push (cons frame new) *variable-frames*)
        new)))

(defun check-variable-frame (variable frame)
  "Signal an error if FRAME, in which the SB-DI:DEBUG-VAR VARIABLE is accessed, is a VARIABLE-FRAME that has ended."
  (when (and (typep frame 'variable-frame) (variable-frame-ended frame))
    (let ((name (sb-di:debug-var-symbol variable)))
      (error "~S is the variable of a frame that was held for debugging when this code was evaluated in it. The evaluation is ~
              no longer held, so the variable's value is unknown. Code that is to be called later must bind the variable ~
              itself, as in (let ((~:*~S ~:*~S)) (lambda () ~:*~S))."
             name))))

(defun hold-evaluation (condition frames)
  "Report that the evaluation is held because it failed with CONDITION or, if CONDITION is NIL, was interrupted. Perform
the host's commands until one of them resumes or releases the evaluation. FRAMES is a value of USER-FRAMES. Return only
if the evaluation is released. Stop any non-local exit that does not come from a command that resumes the evaluation, for
example an exit from a timer's function."
  (let ((*held-condition* condition)
        (*held-frames* frames)
        (*held-evaluation* (evaluation-number *evaluation*))
        (*variable-frames* '())
        (sb-thread::*interrupt-handler* #'contain-held-interruption)
        (job nil)
        (leaving nil))
    (forget-restart-answers)
    (store-connection-variables)
    (announce-definitions)
    ;; The evaluation's own changes must be counted now: settings that change during the hold are not counted for it.
    (count-changes)
    (when *push-unfinished-form*
      (funcall (the function *push-unfinished-form*)))
    (event *job-id* (event-code :held))
    (flush-output)
    (push-done nil)
    (unwind-protect
         (loop
           (catch 'still-held
             (unwind-protect
                  (progn
                    (setf job (next-held-job))
                    (when (or (null job) (eq (job-kind job) :release))
                      (forget-setting-changes)
                      (setf leaving t)
                      (return))
                    (let ((sb-thread::*interrupt-handler* nil))
                      (multiple-value-bind (success resume) (run-held-command job)
                        ;; The function that resumes the evaluation runs under the evaluation's own handlers.
                        (when resume
                          (forget-setting-changes)
                          (setf leaving t)
                          (when (eq resume :release)
                            (event *job-id* (event-code :released))
                            (return))
                          (funcall (the function resume))
                          (count-changes)
                          (setf leaving nil))
                        (end-held-job success)
                        (setf job nil))))
               (unless leaving
                 (when job
                   (report-stopped-exit job)
                   (end-held-job nil)
                   (setf job nil))
                 (throw 'still-held nil)))))
      (loop for (nil . frame) in *variable-frames*
            do (setf (variable-frame-ended frame) t))))
  ;; Errors in the evaluation's cleanup forms do not hold the evaluation again.
  (setf *hold-errors* nil))

(defun in-system-call-p (frame)
  "Return true when FRAME belongs to one of SBCL's own functions for system calls, which expect interruptions at any time."
  (member (ignore-errors (frame-file frame))
          '("SYS:SRC;CODE;UNIX.LISP" "SYS:SRC;CODE;TARGET-THREAD.LISP" "SYS:SRC;CODE;SERVE-EVENT.LISP"
            "SYS:SRC;CODE;FD-STREAM.LISP")
          :test #'equal))

(defun in-foreign-code-p (frame)
  "Return true when this thread was interrupted while FRAME, the innermost Lisp frame, called foreign code other than a
system call. Foreign code may hold locks of its own, such as malloc's."
  (let ((context (interrupted-context)))
    (and context
         (null (sb-di::code-header-from-pc (sb-vm:context-pc context)))
         (not (in-system-call-p frame)))))

(defun holdable-frame-p (frame)
  "Return true when the evaluation can be held in FRAME, its innermost frame. FRAME must belong to one of the submitted
forms rather than to the server's code between forms, and neither foreign code nor code with garbage collection
inhibited may have been interrupted."
  (and (plusp *form-number*)
       (user-frame-p frame)
       (not sb-kernel:*gc-inhibit*)
       (not (in-foreign-code-p frame))))

(defun hold-interrupted-evaluation (reason hook)
  "Hold the evaluation, which was interrupted for REASON, with a restart that continues it. Only an interruption for a
timeout leads to a hold. HOOK is the frame pointer of the function that was called for the interruption. Return true if
the evaluation is to continue, or NIL if it cannot be held, in which case nothing was pushed. If the evaluation is
released, unwind it."
  (when (and (eql reason +interrupt-timeout+)
             *hold-errors*
             (not *failure-reason*)
             (holdable-frame-p (interrupted-frame hook)))
    (block continued
      (let* ((continue (sb-kernel::make-restart
                        'continue (lambda () (return-from continued t))
                        (lambda (stream) (write-string "Continue the evaluation." stream))))
             (sb-kernel:*restart-clusters* (cons (list continue) sb-kernel:*restart-clusters*)))
        (hold-evaluation nil (capture-interruption reason hook))
        (abandon-evaluation :interrupted #'end-programs)))))

(defun end-held-job (success)
  "Notify the host that a job is done, successfully if SUCCESS is true, and that the evaluation is still held."
  (finish-job-output)
  (event *job-id* (event-code :held) 1)
  (push-done success))

(defun run-held-command (job)
  "Perform JOB so that an interruption ends only JOB, not the held evaluation. Return the values of DISPATCH-HELD-COMMAND."
  (let* ((resume nil)
         (success (call-until-abandoned
                   (lambda ()
                     (with-protected-hold ()
                       (with-interrupts
                         (multiple-value-bind (success next) (dispatch-held-command job)
                           (setf resume next)
                           success)))))))
    (values success resume)))

(defun dispatch-held-command (job)
  "Perform JOB. Return true if JOB succeeded. The second value says how to proceed: it is a function that resumes the
evaluation, or :RELEASE, or NIL to keep the evaluation held."
  (case (job-kind job)
    (:invoke-restart (invoke-restart-command job))
    (:frame-locals (frame-locals-command job))
    (:eval-in-frame (eval-in-frame-command job))
    (:return-from-frame (return-from-frame-command job))
    (:restart-frame (restart-frame-command job))
    (t (refuse "A held evaluation does not accept this request: resume or abort the evaluation first."))))

(defmacro do-forms-in-hold ((form text result &optional (end (gensym "END")) (package-name (gensym "PACKAGE-NAME"))) &body body)
  "Evaluate BODY for each form in TEXT, with FORM bound to the form, END to the form's end position, and PACKAGE-NAME to the
name that the current package had before the form was read. Return RESULT. An error in a form does not hold the evaluation a
second time."
  (let ((stream (gensym "STREAM")))
    `(let* ((*hold-errors* nil)
            (*submitted-code* ,text)
            (*evaluated-forms* '())
            (*form-number* 0)
            (*form-start* 0)
            (,stream (make-string-input-stream *submitted-code*)))
       (loop for ,package-name = (package-name (current-package))
             for ,form = (read-form ,stream ,stream (skip-to-next-form ,stream))
             for ,end = (file-position ,stream)
             until (eq ,form ,stream)
             do (progn ,@body)
             finally (return ,result)))))

;;; Restarts

(defun find-held-restart (number name)
  "Return the restart with NUMBER, counted from 1, or the first restart called NAME if NUMBER is 0. Refuse if there is
no such restart."
  (let ((restarts (applicable-restarts *held-condition*)))
    (or (if (plusp number)
            (nth (1- number) restarts)
            (find name restarts :key (lambda (restart) (string (restart-name restart))) :test #'string-equal))
        (refuse "There is no restart ~A. Available restarts: ~{~A~^, ~}."
                (if (plusp number) number name)
                (loop for (number . restart) in (numbered-restarts restarts)
                      collect (format nil "~D ~A" number (restart-name restart)))))))

(defun call-as-value-code (function)
  "Call FUNCTION, which evaluates code whose values resume the held evaluation, and return its values. The code is an
evaluation of its own: its definitions do not count as definitions of the held evaluation. If the code defines
something and a supervisor would replace a lost image, notify the user that these definitions are not restored."
  (declare (type function function))
  (let ((*evaluation* (make-evaluation :number (evaluation-number *evaluation*)
                                       :audience (evaluation-audience *evaluation*))))
    (unwind-protect (funcall function)
      (announce-definitions)
      (when (and **supervised** (plusp (count-changes)))
        (push-notice "If the image is lost, the definitions that the code for the values made can be restored only ~
                      from a checkpoint. To keep these definitions without a checkpoint, evaluate them again on their ~
                      own."))
      (when (evaluation-threads *evaluation*)
        (notify-running-threads)))))

(defun evaluate-arguments (text)
  "Return a list of the values of the expressions in TEXT, and true. If an expression fails, push its error and make the
second value false."
  (multiple-value-bind (arguments success)
      (call-as-value-code
       (lambda ()
         (call-until-abandoned
          (lambda ()
            (let ((arguments '()))
              (do-forms-in-hold (form text (nreverse arguments))
                (push (with-user-code-boundary () (eval form)) arguments)))))))
    (unless success
      (push-notice "An expression for a value failed: the restart was not invoked, and the evaluation is still held."))
    (values arguments success)))

(defun argument-count-range (function)
  "Return the smallest and the largest number of arguments that FUNCTION takes. The largest is NIL if there is no limit,
or if the lambda list is unknown."
  (let ((minimum 0)
        (maximum 0)
        (lambda-list (if (or (sb-kernel:simple-fun-p function) (sb-kernel:closurep function)
                             (typep function 'sb-kernel:interpreted-function))
                         (sb-kernel:%fun-lambda-list function)
                         :unknown)))
    (unless (sb-int:proper-list-p lambda-list)
      (return-from argument-count-range (values 0 nil)))
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
  "Return a list whose only element is the argument list that RESTART's interactive function returns when it gets no
input. Return NIL if the function fails or returns no proper list."
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
  "Refuse to invoke RESTART with the COUNT arguments that the client gave. RESTART takes MINIMUM to MAXIMUM arguments. If
MAXIMUM is NIL, the number has no upper limit."
  (refuse "The restart ~A takes ~A~A."
          (restart-name restart)
          (cond ((eql maximum 0) "no values")
                ((eql minimum maximum) (format nil "~D value~:P" minimum))
                (maximum (format nil "~:[~D to ~D~;up to ~*~D~] value~:P" (zerop minimum) minimum maximum))
                ((zerop minimum) "values")
                (t (format nil "at least ~D value~:P" minimum)))
          (cond ((plusp count) (format nil "; ~D ~:[were~;was~] given" count (= count 1)))
                ((eql maximum 0) "")
                (t (format nil ": pass ~:[them as Lisp expressions~;it as a Lisp expression~]" (eql maximum 1))))))

(defun restart-arguments (restart text)
  "Return the arguments for RESTART, and true if they are valid. The arguments are the values of the expressions in TEXT
or, if TEXT has no expressions, the list that the interactive function of RESTART returns. If the arguments are not
valid, push the reason."
  (multiple-value-bind (minimum maximum) (argument-count-range (sb-kernel::restart-function restart))
    (multiple-value-bind (arguments success) (evaluate-arguments text)
      (let ((given (length arguments)))
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
                      (refuse-arguments restart minimum maximum given))))))))

(defun assertion-place-count (restart)
  "If RESTART is the CONTINUE restart of a failed ASSERT, return the number of places for which it asks new values; else
NIL. Only the restart's report shows the places: `Retry assertion with new values for A, (CAR B).'"
  (let* ((report (with-server-syntax ()
                   (let ((*print-escape* nil)) (guarded (princ-to-string restart) (failure) ""))))
         (places (search " for " report)))
    (when (and (string= "CONTINUE" (restart-name restart))
               (eql (mismatch "Retry assertion" report) 15))
      (if places
          (with-input-from-string (stream report :start (+ places 5) :end (1- (length report)))
            ;; With *READ-SUPPRESS*, READ creates no objects, interns no symbols, and ignores the commas.
            (with-standard-io-syntax
              (let ((*read-suppress* t))
                (loop until (eq stream (read stream nil stream)) count t))))
          0))))

(defun next-restart-answer ()
  "Return the next value for a restart that asks for values. The input that PROVIDE-RESTART-ANSWERS supplies contains
calls of this function."
  (pop *restart-answers*))

(defun provide-restart-answers (answers count)
  "Provide input on *QUERY-IO* for the COUNT places for which ASSERT asks new values. The first places get the values in
ANSWERS, a list, and the other places keep their values."
  (setf *restart-answers* answers
        *saved-tty* sb-sys:*tty*
        sb-sys:*tty* (make-two-way-stream
                      (make-string-input-stream
                       (format nil "~{~:[n~;y~%(|SBCL-HOST/DEBUGGER|::|NEXT-RESTART-ANSWER|)~]~%~}"
                               (loop repeat count collect (and answers (progn (pop answers) t)))))
                      sb-sys:*tty*)))

(defun continue-assertion (restart places text)
  "Return true and a function that invokes RESTART, the CONTINUE restart of a failed ASSERT. PLACES is the number of
places for which ASSERT asks new values; the first places get the values of the expressions in TEXT. If an expression
fails, or if there are more values than places, push the reason and return NIL."
  (multiple-value-bind (new success) (evaluate-arguments text)
    (cond ((not success) nil)
          ((> (length new) places)
           (refuse-arguments restart 0 places (length new)))
          (t
           (values t
                   (lambda ()
                     (provide-restart-answers new places)
                     (invoke-restart restart)))))))

(defun invoke-restart-command (job)
  "Return true and a function, for HOLD-EVALUATION to call, that invokes the restart that JOB names. If the restart
aborts the evaluation, the second value is :RELEASE instead. If there is no such restart or its arguments are not
valid, push the reason; the first value is NIL."
  (let ((restart (find-held-restart (job-argument job) (job-name job))))
    (when restart
      (let ((places (assertion-place-count restart)))
        (if places
            (continue-assertion restart places (job-text job))
            (multiple-value-bind (arguments success) (restart-arguments restart (job-text job))
              (values success
                      (cond ((not success) nil)
                            ((eq (sb-kernel::restart-function restart) #'abort-evaluation) :release)
                            (t
                             (lambda ()
                               (apply #'invoke-restart restart arguments)
                               (push-notice "The restart returned instead of resuming the evaluation, so the evaluation is still held. Invoke ~
another restart, or abort the evaluation.")))))))))))

;;; Frames

(defun find-held-frame (number)
  "Return frame NUMBER of the held evaluation. Refuse if there is no such frame."
  (or (cdr (assoc number *held-frames*))
      (refuse "There is no frame ~D~:[: the held evaluation has no frames~;. Frames are numbered from 0 to ~:*~D~]~
               ~:[~;; the middle of this deep stack was not captured~]."
              number (car (car (last *held-frames*))) (assoc number *held-frames* :test #'<))))

(defun frame-locals-command (job)
  "Push the local variables of several frames, beginning with the frame whose number is JOB's argument. JOB's flags
contain the number of frames, which +FRAMES-WITH-LOCALS+ limits."
  (with-inspection-syntax ()
    (with-value-time-limits ()
      (let ((*package* (current-package)))
        (loop repeat (min (job-flags job) +frames-with-locals+)
              for (number . frame) in (member (job-argument job) *held-frames* :key #'car :test #'<=)
              do (event *job-id* (event-code :frame) number)
                 (loop for (symbol validity value id) in (guarded (ordered-locals frame) (failure) '())
                       do (push-local (event-code :local) (event-code :local-text) (local-label symbol id) validity
                                      value))))))
  t)

(defun frame-has-variables-p (frame)
  "Return true when code can be evaluated in FRAME with its local variables visible."
  (and (not (bogus-frame-p frame))
       (guarded (sb-debug::frame-has-debug-vars-p frame) (failure) nil)
       (guarded (locals frame) (failure) nil)
       t))

(defvar *code-frame* nil
  "The frame in whose scope code is being evaluated while an evaluation is held, else NIL.")

(defun frames-with-variable (symbol)
  "Return the numbers of the frames of the held evaluation in which SYMBOL names a local variable with a value. Search only
the innermost +FRAMES-WITH-LOCALS+ frames."
  (loop for (number . frame) in *held-frames*
        repeat +frames-with-locals+
        when (eq :valid (second (assoc symbol (guarded (locals frame) (failure) '()))))
          collect number))

(defun frame-variable-hint (condition)
  "If CONDITION reports an unbound variable that occurs in the code being evaluated in a frame, return a hint that lists
the frame's local variables, and other frames with a local variable of this name; else NIL."
  (let ((symbol (and *code-frame* (typep condition 'unbound-variable) (cell-error-name condition))))
    (when (and symbol (token-position (symbol-name symbol) (coerce *submitted-code* 'source-text)))
      (let* ((locals (ordered-locals *code-frame*))
             (validity (second (assoc symbol locals)))
             (frames (frames-with-variable symbol)))
        (unless (or (eq :valid validity) (not (or locals frames)))
          (format nil "SBCL knows no ~:[~;value of the ~]local variable ~A of frame ~D.~
                       ~@[ Local variables with values: ~{~A~^, ~}.~]~
                       ~:[ In code compiled with a debug quality below 3, variables may be missing.~;~
                       ~:* Frames with a local variable of this name: ~{~D~^, ~}.~]"
                  validity (symbol-text symbol) (car (rassoc *code-frame* *held-frames*))
                  (loop for (other other-validity nil id) in locals
                        when (eq :valid other-validity)
                          collect (with-server-syntax () (local-label other id)))
                  frames))))))

(defun shared-name-hint (condition)
  "If the code being evaluated in a frame contains the name of several of the frame's variables, and CONDITION may be SBCL's
report on that, return a hint that lists these variables and says how to access each of them; else NIL."
  (when (and *code-frame* (typep condition '(or sb-di:unhandled-debug-condition sb-int:compiled-program-error)))
    (let* ((code (coerce *submitted-code* 'source-text))
           (shared (remove-if-not (lambda (local) (and (fourth local) (token-position (symbol-name (first local)) code)))
                                  (ordered-locals *code-frame*))))
      (when shared
        (destructuring-bind (symbol validity value id) (first shared)
          (declare (ignore validity value))
          (with-server-syntax ()
            (format nil "Several variables of frame ~D have the same name: ~{~A~^, ~}. In this frame, (sb-debug:var '~A ~D) ~
                         is ~A, and SETF can set it."
                    (car (rassoc *code-frame* *held-frames*))
                    (loop for (name nil nil number) in shared collect (local-label name number))
                    (prin1-to-string symbol) id (local-label symbol id))))))))

(defun push-frame-variable-hint (condition)
  "Push the FRAME-VARIABLE-HINT or the SHARED-NAME-HINT for CONDITION, if there is one."
  (let ((hint (guarded (or (frame-variable-hint condition) (shared-name-hint condition)) (failure) nil)))
    (when hint
      (event *job-id* (event-code :error-text) 0 (format nil "~%~A" hint)))))

(defun evaluate-in-frame (text frame &optional (defined (constantly nil)))
  "Evaluate the forms in TEXT in FRAME, or globally if FRAME has no variables. After each form, call DEFINED with the
form, its start and end positions, the name that the current package had before the form was read, and true unless the form
failed. Return a list of the values of the last form, and true unless a form failed."
  (declare (type function defined))
  (call-with-recorded-warnings
   (lambda ()
     (call-until-abandoned
      (lambda ()
        (let ((values '()))
          (do-forms-in-hold (form text values end package-name)
            (incf *form-number*)
            (let ((done nil)
                  (sb-c::*source-plist* (note-evaluated-form form (evaluation-number *evaluation*) *submitted-code*
                                                             *form-start* end)))
              (unwind-protect
                   (setf values
                         (multiple-value-list
                          (let ((*code-frame* frame)
                                ;; For SB-DEBUG:VAR.
                                (sb-debug::*current-frame* frame))
                            (with-user-code-boundary ()
                              (if (frame-has-variables-p frame)
                                  (sb-di:eval-in-frame (ensure-variable-frame frame) form)
                                  (evaluate-in-lexenv form)))))
                         done t)
                (funcall defined form *form-start* end package-name done))))))))))

(defun eval-in-frame-command (job)
  "Evaluate JOB's code in its frame and push the values. The code is an evaluation of its own: its definitions do not
count as definitions of the held evaluation."
  (let ((frame (find-held-frame (job-argument job)))
        (*evaluation* (make-evaluation :number (job-evaluation job) :audience (evaluation-audience *evaluation*)))
        (definitions 0))
    (when frame
      (unless (frame-has-variables-p frame)
        (push-notice "SBCL knows no variables of frame ~D, so the code was evaluated outside the frame." (job-argument job)))
      (multiple-value-bind (values success)
          (evaluate-in-frame (job-text job) frame
                             (lambda (form start end package-name done)
                               (when (/= definitions (count-changes))
                                 (setf definitions (count-changes))
                                 (if done
                                     (push-defining-form form (job-text job) start end package-name)
                                     (push-defining-form form (job-text job) start end package-name "failed")))
                               (forget-changes)))
        (announce-definitions)
        (when (evaluation-threads *evaluation*)
          (notify-running-threads))
        (prog1 (and success
                    (nth-value 1 (call-until-abandoned (lambda () (mapc #'push-value values)))))
          ;; Code in #. may define something before the reader fails, and so may a method that prints a value.
          (when (/= definitions (count-changes))
            (push-defining-form nil (job-text job) 0 (length (job-text job)) (package-name (current-package)) "failed")))))))

(defun unwindable-p (frame number)
  "Return true when evaluation can continue from FRAME, whose number is NUMBER. Otherwise push the reason and return
NIL."
  (let ((why-not (unwind-refusal-reason frame)))
    (or (not why-not)
        (refuse "SBCL cannot unwind to frame ~D, because ~@?.~@[ The next outer frame to which SBCL can unwind is ~D.~]"
                number why-not
                (car (find-if (lambda (entry)
                                (and (> (car entry) number) (not (unwind-refusal-reason (cdr entry)))))
                              *held-frames*))))))

(defun return-from-frame-command (job)
  "Evaluate JOB's code in its frame. Return true and a function that returns the values from the frame. If the code
fails, SBCL cannot unwind to the frame, or the values contradict the declared type of the frame's function, push the
reason and return NIL."
  (let ((frame (find-held-frame (job-argument job))))
    (when (and frame (unwindable-p frame (job-argument job)))
      (multiple-value-bind (values success) (call-as-value-code (lambda () (evaluate-in-frame (job-text job) frame)))
        (cond ((not success)
               (push-notice "The code failed: frame ~D did not return, and the evaluation is still held." (job-argument job)))
              ((not (declared-to-return-p frame values))
               (refuse "Frame ~D cannot return these values: its function is declaimed to return values of other types."
                       (job-argument job)))
              (t
               (values t
                       (lambda ()
                         (sb-debug:unwind-to-frame-and-call frame (lambda () (values-list values)))))))))))

(defun restart-frame-command (job)
  "Return true and a function that calls the function of JOB's frame again with its arguments. If SBCL cannot unwind to
the frame, or if the function or an argument is unknown, push the reason and return NIL."
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

(add-error-details 'push-frame-variable-hint)
(provide-hook hold-failed-evaluation #'hold-evaluation)
(provide-hook hold-interruption #'hold-interrupted-evaluation)
