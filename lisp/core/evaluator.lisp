;;;; Evaluating code form by form, and telling the host all that comes of it.

(in-package "SBCL-HOST")

;;; The end of an evaluation

(defvar *hold-errors* nil
  "True when an error of this evaluation is to be held where it happened.")

(defun abort-evaluation ()
  "What the restart ABORT does."
  (let ((hook (frame-pointer-here)))
    (capture "ABORTED"
             (lambda ()
               (event *job-id* (event-code :error-text) 0
                      "The code invoked the restart ABORT: the rest of it was not evaluated."))
             nil
             (lambda () (error-frame hook)))
    (abandon-evaluation :error nil)))

;;; Reading

(defun whitespace-end (stream)
  "Skip whitespace and comments of STREAM and return its position."
  (skip-blank stream)
  (file-position stream))

(defun read-form (stream end start)
  "Read the form from STREAM that begins at START, or return END. What *PACKAGE* was may be deleted by now."
  (current-package)
  (let ((*reading* stream))
    (setf *form-start* start)
    (with-boundary ()
      (read stream nil end))))

;;; Evaluating

(defun evaluate-form (form end)
  "Return a list of the values of FORM, whose text ends at END. What it defines remembers this evaluation."
  (let ((sb-c::*source-plist* (note-evaluated-form form (evaluation-number *evaluation*) *code* *form-start* end)))
    (multiple-value-list
     (with-boundary ()
       (evaluate-in-lexenv form)))))

(defun call-with-form-restarts (function)
  "Call FUNCTION, which reads and evaluates a form, with the two restarts that code evaluated here always has, and no
others. The restarts are kept on the heap, for code may return them. RETRY's name is a symbol that no code comes upon:
under bare SBCL there is no restart of that name to find."
  (declare (type function function))
  (loop
    (block retry
      (let* ((retry (sb-kernel::make-restart
                     'retry (lambda () (return-from retry))
                     (lambda (stream) (write-string "Evaluate this form again." stream))))
             (abort (sb-kernel::make-restart
                     'abort #'abort-evaluation
                     (lambda (stream) (write-string "Return to top level." stream))))
             (sb-kernel:*restart-clusters* (list (list retry abort))))
        (return (funcall function))))))

(defmacro with-settings ((&rest settings) &body body)
  "Evaluate BODY with each of SETTINGS, names of local variables, bound to what forms are read by now, or names of files are
found by."
  `(let ,(mapcar #'list settings
                 '(*package* *readtable* *read-base* *read-default-float-format* *features* *default-pathname-defaults*
                   asdf:*central-registry*))
     ,@body))

(defun push-defining-form (form code start end package &optional (role (form-role form (subseq code start end))))
  "Push FORM, which changed what another image must have: it stands from START to END in CODE and was read in PACKAGE. ROLE is
as CHANGES-TEXT has it."
  (event *job-id* (event-code :defined) start
         (with-server-syntax (:length nil)
           (format nil "~D~%~A~%@~A" end (changes-text form role) (package-name package)))))

(defvar *one-form* nil
  "True when only the first form of the submitted code is evaluated.")

(defvar *push-unfinished* nil
  "A function that pushes the form being evaluated as one that failed, if it has defined something since it was pushed last;
NIL while no form is evaluated.")

(defun evaluate-next-form (stream start)
  "Read a form from STREAM, which is at START, and evaluate it. Return a list of its values and true, or NIL and NIL at
the end. Push the form if it defined something, or changed how the next one is read or where files are: another image must
have that. A form that failed is pushed, too, if it had defined something by then."
  (let* ((definitions (evaluation-definitions *evaluation*))
         (pushed definitions)
         (end 0)
         (evaluated nil)
         (form stream))
    (with-settings (package readtable base float-format features directory registry)
      (flet ((push-unfinished ()
               (unless (or (eq form stream) (eql pushed (evaluation-definitions *evaluation*)))
                 (setf pushed (evaluation-definitions *evaluation*))
                 (push-defining-form form *code* start end package "failed")))
             (evaluate ()
               (when (eq form stream)
                 (file-position stream start)
                 (setf form (read-form stream stream start))
                 (when (eq form stream)
                   (return-from evaluate-next-form (values '() nil)))
                 (when *one-form*
                   (push-record "read" :end (file-position stream))))
               (forget-changes)
               (setf end (file-position stream)
                     - form)
               (let ((values (evaluate-form form end)))
                 (check-failure)
                 (setf evaluated t)
                 (shiftf /// // / values)
                 (shiftf *** ** * (first values))
                 (unless (and (eql definitions (evaluation-definitions *evaluation*))
                              (eq package *package*) (eq readtable *readtable*)
                              (eql base *read-base*) (eq float-format *read-default-float-format*)
                              (eq features *features*) (eq directory *default-pathname-defaults*)
                              (eq registry asdf:*central-registry*))
                   (push-defining-form form *code* start end package))
                 (values values t))))
        (declare (dynamic-extent #'push-unfinished #'evaluate))
        (unwind-protect (let ((*push-unfinished* #'push-unfinished))
                          (call-with-form-restarts #'evaluate))
          ;; As in SBCL's own REPL (INTERACTIVE-EVAL in src/code/toplevel.lisp), whether it failed or not.
          (unless (eq form stream)
            (shiftf +++ ++ + form)
            (unless evaluated
              (push-unfinished))))))))

(defun evaluate-forms (code)
  "Read and evaluate the forms in CODE one by one and return a list of the last one's values."
  (declare (type text code))
  (let ((stream (make-string-input-stream code))
        (result '())
        (*form-number* 0)
        (*form-start* 0))
    (loop
      (let ((start (whitespace-end stream)))
        (when (= start (length code))
          (return result))
        (incf *form-number*)
        (multiple-value-bind (values more) (evaluate-next-form stream start)
          (unless more
            (return result))
          (setf result values)
          (when *one-form*
            (return result)))))))

(define-operation :evaluate-form (evaluate)
  "Evaluate the first form, as a REPL does. Push a record `read` with its `end`, in characters, once it is read."
  (let ((*one-form* t))
    (evaluate)))

(defun run-operation (text code)
  "Do the operation in TEXT, CODE being what was sent along. Return the list of values that are to be printed. What it
defined is made again by evaluating CODE."
  (declare (type text text code))
  (multiple-value-bind (name arguments) (read-operation text)
    (let ((function (gethash name **operations**))
          (definitions (evaluation-definitions *evaluation*))
          (evaluated nil)
          (done nil)
          (*form-number* 1)
          (*form-start* 0))
      (declare (type function function))
      (with-settings (package)
        (unwind-protect
             (multiple-value-prog1 (call-with-form-restarts
                                    (lambda ()
                                      (prog1 (with-boundary ()
                                               (apply function
                                                      (lambda ()
                                                        (setf evaluated t)
                                                        (evaluate-forms code))
                                                      arguments))
                                        (check-failure))))
               (setf done t))
          (unless (or evaluated (eql definitions (evaluation-definitions *evaluation*)))
            (let* ((*package* package)
                   (form (guarded (read-from-string code) (failure) nil)))
              (push-defining-form form code 0 (length code) package (if done (form-role form code) "failed")))))))))

(defun call-with-user-package (name function)
  "Call FUNCTION with *PACKAGE* bound to the package NAME, or not bound at all when NAME is empty."
  (declare (type text name) (type function function))
  (current-package)
  (if (zerop (length name))
      (funcall function)
      (let ((*package* (call-with-form-restarts
                        (lambda ()
                          (with-boundary () (find-user-package name))))))
        (funcall function))))

(defun usable-stream-p (symbol target)
  "True when what SYMBOL holds is an open stream that can do what the one in TARGET, a variable of SBCL's, is for."
  (let ((stream (symbol-value symbol)))
    (guarded (and (streamp stream)
                  (open-stream-p stream)
                  (or (not (member target '(sb-sys:*stdin* sb-sys:*tty*))) (input-stream-p stream))
                  (or (eq 'sb-sys:*stdin* target) (output-stream-p stream)))
        (failure)
      nil)))

(defun leads-home-p (variable)
  "True when VARIABLE, a STANDARD-VARIABLE, leads where it does at first, by whatever stream; or DRIBBLE holds it."
  (let ((stream (symbol-value (standard-variable-symbol variable)))
        (target (standard-variable-target variable)))
    (or (eq stream (symbol-value target))
        (and (typep stream 'synonym-stream) (eq target (synonym-stream-symbol stream)))
        sb-impl::*dribble-stream*)))

(defun say-no-open-stream (symbol)
  "Say that SYMBOL, which was set to what it was at first, held no stream that can be used."
  (say "~A held no open stream any more: it is what it was at first again." symbol))

(defun check-own-streams ()
  "What CHECK-STANDARD-STREAMS does of the variables that SBCL's own standard streams are in: what the others lead to."
  (dolist (own **own-streams**)
    (destructuring-bind (symbol stream told) own
      (let ((held (symbol-value symbol)))
        (cond ((eq held stream))
              ((not (usable-stream-p symbol symbol))
               (setf (symbol-value symbol) stream)
               (say-no-open-stream symbol))
              ((not (eq held told))
               (setf (third own) held)
               (say "~S stays set to another stream, ~:[so that answers do not show what is printed~;from which is read~]. ~
                     To undo that: (sbcl-host::install-standard-streams)"
                    symbol (eq 'sb-sys:*stdin* symbol))))))))

(defun check-standard-streams ()
  "Say, once, which standard stream variables the user's code has set to something else, which stays so; and have those
lead where they did at first that hold no open stream."
  (check-own-streams)
  (dolist (variable **standard-variables**)
    (unless (unchanged-p variable)
      (let* ((symbol (standard-variable-symbol variable))
             (stream (symbol-value symbol)))
        (cond ((not (usable-stream-p symbol (standard-variable-target variable)))
               (reset-standard-variable variable)
               (say-no-open-stream symbol))
              ((or (eq stream (standard-variable-told variable))
                   (leads-home-p variable)))
              (t
               (setf (standard-variable-told variable) stream)
               (say "~A stays set to another stream. To undo that: (setf ~:*~(~A~) ~(~S~))"
                    symbol (standard-variable-target variable))))))))

(defun evaluate-and-print (code package operation)
  "Evaluate CODE in PACKAGE, a name or empty, and push its values. Return true when nothing failed. OPERATION, if not empty,
says what does it."
  (labels ((values-of-code ()
             (let ((values (if (zerop (length operation))
                               (evaluate-forms code)
                               (run-operation operation code))))
               (current-package)
               (with-boundary ()
                 (mapc #'push-value values))))
           (in-its-package ()
             (call-with-user-package package #'values-of-code))
           (evaluate ()
             (let ((*code* code)
                   (*evaluated-forms* '())
                   (*placed-warnings* 0)
                   (*source-files* '())
                   (*known-places* :none))
               ;; Not before there is where to unwind to.
               (with-interrupts
                 (check-standard-streams)
                 (call-with-recorded-warnings #'in-its-package)))))
    (declare (dynamic-extent #'values-of-code #'in-its-package #'evaluate))
    (nth-value 1 (call-until-abandoned #'evaluate))))

(defun monotonic-milliseconds ()
  "Return the time since some moment in the past. GET-INTERNAL-REAL-TIME is the kernel's coarse clock: 4 ms a tick."
  #+linux
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (+ (* 1000 seconds) (/ nanoseconds 1000000)))
  #-linux
  (/ (* 1000 (get-internal-real-time)) internal-time-units-per-second))

(defun thread-milliseconds ()
  "Return for how long this thread has used a processor, or where that is not to be had, the time."
  #+linux
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-thread-cputime-id)
    (+ (* 1000 seconds) (/ nanoseconds 1000000)))
  #-linux
  (monotonic-milliseconds))

(defun run-timed (function)
  "Return the value of FUNCTION and push what it took."
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

(defvar *answers* '()
  "The objects that ANSWER is to return, one after another.")

(defvar *own-tty* nil
  "What SB-SYS:*TTY* held before something was typed there for a restart, while it is.")

(defun forget-answers ()
  "Have nothing be typed on *QUERY-IO* that was not read."
  (when *own-tty*
    (setf *answers* '()
          sb-sys:*tty* (shiftf *own-tty* nil))))

(define-hook call-recording-errors (function)
  "Return the values of FUNCTION, and record the errors that it signals."
  (funcall (the function function)))

(defun call-detached (function)
  "Return the value of FUNCTION, called under copies of the connection's variables, which become the connection's if the
host says that this evaluation has stayed in the foreground."
  (declare (type function function))
  (current-package)
  (progv *repl-variables* (mapcar #'symbol-value *repl-variables*)
    (prog1 (funcall function)
      (when (event *job-id* (event-code :foreground))
        (if *connection*
            (keep-variables)
            (dolist (variable *repl-variables*)
              (setf (sb-ext:symbol-global-value variable) (symbol-value variable))))))))

(defun run-evaluation (job)
  "Do an :EVALUATE job. Return true when it succeeded."
  (let ((*evaluation* (make-evaluation :number (job-evaluation job)))
        (*hold-errors* (logtest +evaluate-hold+ (job-flags job)))
        (*answers* '())
        (*own-tty* nil)
        ;; What is typed for a restart is for this evaluation alone.
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
                   (keep-variables)))
        (forget-answers)
        ;; What the user's code has set it to stays, as under bare SBCL.
        (unless (eq sb-sys:*tty* tty)
          (setf (sb-ext:symbol-global-value 'sb-sys:*tty*) sb-sys:*tty*))
        (tell-definitions)
        (when (evaluation-threads *evaluation*)
          (push-running-threads))))))

(defun push-running-threads ()
  "Say which threads of this evaluation go on after it."
  (let ((running (live-threads *evaluation*)))
    (when running
      (event *job-id* (event-code :notice) 0
             (with-server-syntax ()
               (format nil "Still running: ~A. What ~:[they print~;it prints~] comes with later answers~
                            ~:[~*~;; reset-session ends ~:[them~;it~]~]."
                       (thread-list running) (null (rest running)) **resets** (null (rest running))))))))

(define-job :evaluate (job)
  "Evaluate code, or do an operation."
  (run-evaluation job))
