;;;; Evaluates code form by form and reports the results to the host.

(in-package "SBCL-HOST")

;;; The end of an evaluation

(defvar *hold-errors* nil
  "True when an error that reaches the debugger should hold this evaluation instead of ending it.")

(defun abort-evaluation ()
  "End the evaluation as failed, because the code invoked the restart ABORT."
  (let ((hook (frame-pointer-here)))
    (capture-error "ABORTED"
                   (lambda ()
                     (event *job-id* (event-code :error-text) 0
                            "The code invoked the restart ABORT: the rest of the code was not evaluated."))
                   nil
                   (lambda () (error-frame hook)))
    (abandon-evaluation :error nil)))

;;; Reading forms
(defun skip-to-next-form (stream)
  "Skip whitespace and comments in STREAM, and return the position after them."
  (skip-whitespace-and-comments stream)
  (file-position stream))

(defun read-form (stream end start)
  "Read the form that begins at START in STREAM, and return it. At the end of STREAM, return the object END instead. Make
*PACKAGE* valid first, because the user's code may have deleted the current package."
  (current-package)
  (let ((*form-stream* stream))
    (setf *form-start* start)
    (with-user-code-boundary ()
      (read stream nil end))))

;;; Evaluating forms
(defun evaluate-form (form end)
  "Evaluate FORM and return a list of its values. END is the end of FORM's text in the submitted code. Definitions that
FORM makes record this evaluation as their source."
  (let ((sb-c::*source-plist* (note-evaluated-form form (evaluation-number *evaluation*) *submitted-code* *form-start* end)))
    (multiple-value-list
     (with-user-code-boundary ()
       (evaluate-in-lexenv form)))))

(defun call-with-form-restarts (function &optional (retry-report "Evaluate this form again."))
  "Call FUNCTION, which reads and evaluates a form, with exactly two restarts, RETRY and ABORT. RETRY calls FUNCTION again, and
its report is the string RETRY-REPORT. The restarts are allocated on the heap, because the form may return them as values. The
name RETRY is a symbol of this package: bare SBCL has no such restart here, so user code that looks for a restart RETRY must
not find this one."
  (declare (type function function) (type string retry-report))
  (loop
    (block retry
      (let* ((retry (sb-kernel::make-restart
                     'retry (lambda () (return-from retry))
                     (lambda (stream) (write-string retry-report stream))))
             (abort (sb-kernel::make-restart
                     'abort #'abort-evaluation
                     (lambda (stream) (write-string "Return to top level." stream))))
             (sb-kernel:*restart-clusters* (list (list retry abort))))
        (return (funcall function))))))

(defun push-defining-form (form code start end package-name &optional (role (form-role form (subseq code start end))))
  "Push an event with FORM, which a restored image must evaluate again. FORM extends from START to END in CODE.
PACKAGE-NAME is the name that the current package had before FORM was read, because FORM may rename or delete this package.
ROLE is a string that FORM-ROLE returns, or \"failed\"."
  (unless (string= role "failed")
    (forget-restored-systems))
  (event *job-id* (event-code :defined) start
         (with-server-syntax (:length nil)
           (format nil "~D~%~A~%@~A" end (changes-text form role) package-name))))

(defvar *first-form-only* nil
  "True when only the first form of the submitted code is evaluated.")

(defvar *push-unfinished-form* nil
  "A function without arguments. If the current form has made changes since it was last pushed, the function pushes the
form as a failed form. NIL while no form is evaluated.")

(defvar *unpushed-form* '()
  "The arguments for PUSH-DEFINING-FORM with the last form that was evaluated; NIL if that form was pushed already.")

(defun evaluate-next-form (stream start)
  "Read a form from STREAM, which is at position START, and evaluate it. Return two values: a list of the form's values,
and true; or NIL and NIL at the end of the stream. Push the form if it defined something or changed how the session reads forms
or finds files, because a restored image must evaluate the form again. Push a failed form, too, if it defined something or
changed the shared settings before the failure, even while it was read."
  (let* ((definitions (count-changes))
         (pushed definitions)
         (end 0)
         (evaluated nil)
         (form stream))
    (let ((package (current-package))
          (package-name (package-name *package*))
          (readtable *readtable*)
          (base *read-base*)
          (float-format *read-default-float-format*))
      (flet ((push-unfinished ()
               (without-interrupts
                 (let ((changes (count-changes)))
                   (unless (eql pushed changes)
                     (when (eq form stream)
                       ;; Code in #. defined something, and then the reader failed. The user's code may have closed the stream.
                       (setf end (guarded (file-position stream) (failure) (length *submitted-code*))))
                     (push-defining-form form *submitted-code* start end package-name "failed")
                     (setf pushed changes)))))
             (evaluate ()
               (forget-changes)
               (when (eq form stream)
                 (file-position stream start)
                 (setf form (read-form stream stream start))
                 (when (eq form stream)
                   (return-from evaluate-next-form (values '() nil)))
                 (when *first-form-only*
                   (push-record "read" :end (file-position stream))))
               (setf end (file-position stream)
                     - form)
               (let ((values (evaluate-form form end)))
                 (resume-failure-unwinding)
                 (shiftf /// // / values)
                 (shiftf *** ** * (first values))
                 (without-interrupts
                   (setf *unpushed-form* (list form *submitted-code* start end package-name))
                   (unless (and (eql definitions (count-changes))
                                ;; A restored image has no values of attached connections.
                                (or *connection-values*
                                    (and (eq package *package*) (eq readtable *readtable*)
                                         (eql base *read-base*) (eq float-format *read-default-float-format*))))
                     (apply #'push-defining-form (shiftf *unpushed-form* '())))
                   (setf evaluated t))
                 (values values t))))
        (declare (dynamic-extent #'push-unfinished #'evaluate))
        ;; The form is pushed exactly once, even if an interruption comes when the form has just been evaluated.
        (without-interrupts
          (unwind-protect (with-local-interrupts
                            (let ((*push-unfinished-form* #'push-unfinished))
                              (call-with-form-restarts #'evaluate)))
            ;; SBCL's own REPL sets +, ++ and +++ even when the form failed (INTERACTIVE-EVAL in src/code/toplevel.lisp).
            (unless (eq form stream)
              (shiftf +++ ++ + form))
            (unless evaluated
              (push-unfinished))))))))

(defun evaluate-forms (code)
  "Read and evaluate the forms in CODE one by one, and return a list of the values of the last form. If *FIRST-FORM-ONLY*
is true, stop after the first form."
  (declare (type text code))
  (let ((stream (make-string-input-stream code))
        (result '())
        (*form-number* 0)
        (*form-start* 0))
    (loop
      (let ((start (skip-to-next-form stream)))
        (when (= start (length code))
          (return result))
        (incf *form-number*)
        (multiple-value-bind (values more) (evaluate-next-form stream start)
          (unless more
            (return result))
          (setf result values)
          (when *first-form-only*
            (return result)))))))

(define-operation :evaluate-form (evaluate)
  "Evaluate only the first form of the code, as a REPL does. Once the form is read, push a record `read` whose field `end`
is the number of characters read."
  (let ((*first-form-only* t))
    (evaluate)))

(defun run-operation (text code)
  "Run the operation in TEXT, and return a list of the values to print. CODE is the code that the client sent with the
operation. If the operation defined something or changed the shared settings without evaluating CODE, push CODE as the form
that makes these changes again."
  (declare (type text text code))
  (multiple-value-bind (name arguments) (read-operation text)
    (let ((function (gethash name **operations**))
          (definitions (count-changes))
          (package *package*)
          (package-name (package-name *package*))
          (evaluated nil)
          (done nil)
          (*form-number* 1)
          (*form-start* 0))
      (declare (type function function))
      (without-interrupts
        (unwind-protect
             (with-local-interrupts
               (multiple-value-prog1 (call-with-form-restarts
                                      (lambda ()
                                        (prog1 (with-user-code-boundary ()
                                                 (apply function
                                                        (lambda ()
                                                          (setf evaluated t)
                                                          (evaluate-forms code))
                                                        arguments))
                                          (resume-failure-unwinding)))
                                      "Run this call again from the start.")
                 (setf done t)))
          (unless (or evaluated (eql definitions (count-changes)))
            (let ((*package* package)
                  (form nil))
              ;; Reading the code may run reader macros of the user.
              (unwind-protect (with-local-interrupts
                                (setf form (guarded (read-from-string code) (failure) nil)))
                (push-defining-form form code 0 (length code) package-name (if done (form-role form code) "failed"))))))))))

(defun call-with-user-package (name function)
  "Call FUNCTION with *PACKAGE* bound to the package that NAME designates, or unchanged if NAME is empty. Signal an error if
there is no such package."
  (declare (type text name) (type function function))
  (current-package)
  (if (zerop (length name))
      (funcall function)
      (let ((*package* (call-with-form-restarts
                        (lambda ()
                          (with-user-code-boundary () (find-package-or-suggest name)))
                        "Look for the package again.")))
        (funcall function))))

(defun usable-stream-p (symbol target)
  "Return true when SYMBOL holds an open stream that can replace the value of TARGET, one of SBCL's own stream variables:
an input stream for SB-SYS:*STDIN*, a bidirectional stream for SB-SYS:*TTY*, else an output stream."
  (let ((stream (symbol-value symbol)))
    (guarded (and (streamp stream)
                  (open-stream-p stream)
                  (or (not (member target '(sb-sys:*stdin* sb-sys:*tty*))) (input-stream-p stream))
                  (or (eq 'sb-sys:*stdin* target) (output-stream-p stream)))
        (failure)
      nil)))

(defun default-target-p (variable)
  "Return true when the stream in VARIABLE, a STANDARD-VARIABLE, leads to the initial target of VARIABLE, or when DRIBBLE,
which redirects the standard streams, is active."
  (let ((stream (symbol-value (standard-variable-symbol variable)))
        (target (standard-variable-target variable)))
    (or (eq stream (symbol-value target))
        (and (typep stream 'synonym-stream) (eq target (synonym-stream-symbol stream)))
        sb-impl::*dribble-stream*)))

(defun notify-stream-reset (symbol)
  "Notify the user that the variable SYMBOL held no usable stream and was reset."
  (push-notice "~S held no usable stream and was reset to its initial value." symbol))

(defun check-system-streams ()
  "Check SBCL's own stream variables, such as SB-SYS:*STDOUT*, to which the standard stream variables lead. Reset the
variables that hold no usable stream. Notify the user once of each variable that the user's code has set to another
stream."
  (dolist (own **system-streams**)
    (destructuring-bind (symbol stream reported) own
      (let ((held (symbol-value symbol)))
        (cond ((eq held stream))
              ((not (usable-stream-p symbol symbol))
               (setf (symbol-value symbol) stream)
               (notify-stream-reset symbol))
              ((not (eq held reported))
               (setf (third own) held)
               (push-notice "~S stays set to another stream, ~
                             ~:[so answers may not show its output~;so input is read from there~]. ~
                             To reset the standard streams: (sbcl-host::install-standard-streams)"
                            symbol (eq 'sb-sys:*stdin* symbol))))))))

(defun check-standard-streams ()
  "Check SBCL's own stream variables with CHECK-SYSTEM-STREAMS, and then the standard stream variables. Reset the variables
that hold no usable stream. Notify the user once of each variable that the user's code has redirected, and leave the
variable redirected."
  (check-system-streams)
  (dolist (variable **standard-variables**)
    (unless (standard-variable-unchanged-p variable)
      (let* ((symbol (standard-variable-symbol variable))
             (stream (symbol-value symbol)))
        (cond ((not (usable-stream-p symbol (standard-variable-target variable)))
               (reset-standard-variable variable)
               (notify-stream-reset symbol))
              ((or (eq stream (standard-variable-reported variable))
                   (default-target-p variable)))
              (t
               (setf (standard-variable-reported variable) stream)
               (push-notice "~A stays set to another stream, ~
                             ~:[so answers may not show its output~;so input is read from there~]. ~
                             To reset the variable: (setf ~2:*~(~A~) ~*~(~S~))"
                            symbol (eq '*standard-input* symbol) (standard-variable-target variable))))))))

(defun push-values (values)
  "Push VALUES, the values of the last form that was evaluated. If a method that prints them defines something, push the form,
unless it was pushed already: a restored image prints the values of each form that it evaluates again."
  (let ((definitions (count-changes))
        (done nil))
    (without-interrupts
      (unwind-protect (with-local-interrupts
                        (with-user-code-boundary ()
                          (mapc #'push-value values))
                        (setf done t))
        (unless (or (null *unpushed-form*) (eql definitions (count-changes)))
          (apply #'push-defining-form (append *unpushed-form* (if done '() '("failed")))))))))

(defun evaluate-and-print (code package operation)
  "Evaluate CODE and push its values. Return true when nothing failed. PACKAGE is the name of the package to evaluate in;
if it is empty, use the current package. OPERATION, if not empty, is the text of the operation to run with CODE."
  (labels ((push-code-values ()
             (let ((values (if (zerop (length operation))
                               (evaluate-forms code)
                               (run-operation operation code))))
               (current-package)
               (push-values values)))
           (push-values-in-package ()
             (call-with-user-package package #'push-code-values))
           (evaluate ()
             (let ((*submitted-code* code)
                   (*unpushed-form* '())
                   (*evaluated-forms* '())
                   (*located-warning-count* 0)
                   (*source-files* '())
                   (*known-source-locations* :none))
               ;; Enable interrupts only inside CALL-UNTIL-ABANDONED: an interrupt needs a point to unwind to.
               (with-interrupts
                 (check-standard-streams)
                 (call-with-recorded-warnings #'push-values-in-package)))))
    (declare (dynamic-extent #'push-code-values #'push-values-in-package #'evaluate))
    (nth-value 1 (call-until-abandoned #'evaluate))))

(defun monotonic-milliseconds ()
  "Return the number of milliseconds since a fixed moment in the past. On Linux, read the precise clock:
GET-INTERNAL-REAL-TIME uses the kernel's coarse clock, which advances only at the kernel's ticks, some milliseconds apart."
  #+linux
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (+ (* 1000 seconds) (/ nanoseconds 1000000)))
  #-linux
  (/ (* 1000 (get-internal-real-time)) internal-time-units-per-second))

(defun thread-cpu-milliseconds ()
  "Return the processor time of this thread in milliseconds. On systems other than Linux, return the real time instead."
  #+linux
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-thread-cputime-id)
    (+ (* 1000 seconds) (/ nanoseconds 1000000)))
  #-linux
  (monotonic-milliseconds))

(defun run-timed (function)
  "Call FUNCTION and return its value. Push the bytes allocated meanwhile, and the real time, processor time and GC time in
milliseconds."
  (declare (type function function))
  (let ((real (monotonic-milliseconds))
        (run (get-internal-run-time))
        (gc sb-ext:*gc-run-time*)
        (bytes (sb-ext:get-bytes-consed)))
    (flet ((milliseconds (units)
             (round (* 1000 units) internal-time-units-per-second)))
      (prog1 (funcall function)
        (event *job-id* (event-code :bytes-consed) (- (sb-ext:get-bytes-consed) bytes))
        (event *job-id* (event-code :time-real) (values (round (- (monotonic-milliseconds) real))))
        (event *job-id* (event-code :time-run) (milliseconds (- (get-internal-run-time) run)))
        (event *job-id* (event-code :time-gc) (milliseconds (- sb-ext:*gc-run-time* gc)))))))

(defvar *restart-answers* '()
  "The objects that the next calls of NEXT-RESTART-ANSWER return, in order. The restart CONTINUE of ASSERT, which asks for
new values, reads such calls from *QUERY-IO* and evaluates them.")

(defvar *saved-tty* nil
  "The original value of SB-SYS:*TTY* while that variable holds a stream with input for a restart; else NIL.")

(defun forget-restart-answers ()
  "Discard input that was provided on *QUERY-IO* for a restart and that the restart did not read. Restore SB-SYS:*TTY*."
  (when *saved-tty*
    (setf *restart-answers* '()
          sb-sys:*tty* (shiftf *saved-tty* nil))))

(define-hook call-recording-errors (function)
  "Call FUNCTION, record the errors that it signals, and return its values."
  (funcall (the function function)))

(defun call-detached (function)
  "Call FUNCTION with new bindings of the variables in *REPL-VARIABLES* to their current values, and return its value.
Afterwards, ask the host whether this evaluation is still in the foreground. If so, store the values of the variables for
the connection, or as the global values if this thread has no connection."
  (declare (type function function))
  (current-package)
  (progv *repl-variables* (mapcar #'symbol-value *repl-variables*)
    (prog1 (funcall function)
      (when (event *job-id* (event-code :foreground))
        (if *connection-values*
            (store-connection-variables)
            (dolist (variable *repl-variables*)
              (setf (sb-ext:symbol-global-value variable) (symbol-value variable))))))))

(defun run-evaluation (job)
  "Run JOB, an :EVALUATE job. Return true when it succeeded."
  (let ((*evaluation* (make-evaluation :number (job-evaluation job) :audience (job-audience job)))
        (*hold-errors* (logtest +evaluate-hold+ (job-flags job)))
        (*restart-answers* '())
        (*saved-tty* nil)
        ;; This variable may be set to a stream with input for a restart. The variable is bound here, so that only this
        ;; evaluation reads that input.
        (sb-sys:*tty* sb-sys:*tty*)
        (tty sb-sys:*tty*))
    (labels ((evaluate ()
               (evaluate-and-print (job-text job) (job-name job) (job-operation job)))
             (record ()
               (if (logtest +evaluate-record-errors+ (job-flags job))
                   (call-recording-errors #'evaluate)
                   (evaluate)))
             (measure ()
               (if (logtest +evaluate-timing+ (job-flags job))
                   (run-timed #'record)
                   (record))))
      (declare (dynamic-extent #'evaluate #'record #'measure))
      (prog1 (if (logtest +evaluate-detached+ (job-flags job))
                 (call-detached #'measure)
                 (prog1 (measure)
                   (store-connection-variables)))
        (forget-restart-answers)
        ;; A value of SB-SYS:*TTY* that the user's code has set persists, as under bare SBCL.
        (unless (eq sb-sys:*tty* tty)
          (setf (sb-ext:symbol-global-value 'sb-sys:*tty*) sb-sys:*tty*))
        (announce-definitions)
        (when (evaluation-threads *evaluation*)
          (notify-running-threads))))))

(defun notify-running-threads ()
  "Notify the user of threads that this evaluation started and that are still running."
  (let* ((running (live-threads *evaluation*))
         (single (null (rest running)))
         (ends (eq :shell (audience))))
    (when running
      (event *job-id* (event-code :notice) 0
             (with-server-syntax ()
               (format nil "Still running~:[~; at the end~]: ~A.~:[ Later answers show the output of ~
                            ~:[these threads~;this thread~]~@[; ~A ends ~:[them~;it~]~].~;~]"
                       ends (thread-list-text running) ends single (reset-command) single))))))

(define-job :evaluate (job)
  "Evaluate the code of JOB, or run its operation."
  (run-evaluation job))
