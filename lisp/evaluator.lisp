;;;; Evaluating code form by form, and telling the host all that comes of it.

(in-package "SBCL-HOST")

;;; The policy of evaluated code: callers are not lost to tail calls and locals stay visible, at no cost in speed (the
;;; step conditions of debug 3 are what would cost), and a frame keeps the closure that it is a call of. It applies
;;; lexically, so that it does not leak into a nested COMPILE-FILE or LOAD.

(defstruct (cached-lexenv (:copier nil) (:predicate nil))
  "The lexical environment for evaluating, and what it was made from: it is good while these are the same."
  (policy nil :read-only t)
  (handled-conditions nil :read-only t)
  (disabled-package-locks nil :read-only t)
  (lexenv nil :read-only t))

(declaim (type (or null cached-lexenv) **evaluation-lexenv**))
(defglobal **evaluation-lexenv** nil
  "The lexical environment that was made last.")

(defun make-evaluation-lexenv ()
  "Make the lexical environment in which the user's forms are evaluated. Its policy is an object of its own, by which
EVALUATED-FORM-P knows it and those made from it."
  (let ((policy (values (sb-c::process-optimize-decl
                         (if **debug-declaimed**
                             '(optimize (sb-c::store-closure-debug-pointer 2))
                             '(optimize (debug 3) (sb-c:insert-step-conditions 0)
                               (sb-c::store-closure-debug-pointer 2)))
                         sb-c::*policy*))))
    (sb-c::make-lexenv :default (sb-kernel:make-null-lexenv) :policy policy)))

(defun evaluation-lexenv ()
  "Return the lexical environment in which the user's forms are evaluated."
  (let ((cached **evaluation-lexenv**))
    (if (and cached
             (eq (cached-lexenv-policy cached) sb-c::*policy*)
             (eq (cached-lexenv-handled-conditions cached) sb-c::*handled-conditions*)
             (eq (cached-lexenv-disabled-package-locks cached) sb-c::*disabled-package-locks*))
        (cached-lexenv-lexenv cached)
        (let ((lexenv (make-evaluation-lexenv)))
          (setf **evaluation-lexenv** (make-cached-lexenv :policy sb-c::*policy*
                                                          :handled-conditions sb-c::*handled-conditions*
                                                          :disabled-package-locks sb-c::*disabled-package-locks*
                                                          :lexenv lexenv))
          lexenv))))

(defvar *reading* nil
  "The stream of the submitted code while a form is read from it.")
;;; Warnings

(defvar *recording* nil
  "True in a thread whose warnings are recorded.")

(defvar *recorded* nil
  "The warning or compiler error that was recorded last: handlers may signal it again.")

(defvar *warned* nil
  "The condition that WARN-RECORDED signals.")

(defun record-warning (condition)
  "Push a warning that no handler of the user's has handled, the first time that it comes here, unless it is one that
SBCL muffles or a redefinition alone. What comes of it is left to whoever signalled it: SBCL's own handlers signal again
what they see before they count it, and the compiler's verdict is theirs."
  (unless (or (eq condition *recorded*)
              (typep condition '(or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p))))
    (setf *recorded* condition)
    (push-warning (type-name-text (class-name-of condition)) condition))
  (unless (eq condition *warned*)
    (muffle-direct-warning condition)))

(defun muffle-direct-warning (condition)
  "Muffle CONDITION if it is signalled by a call of WARN that does not go by its name, of which SBCL has some: those do
not come to WARN-RECORDED."
  (let ((restart (and (error-output-is-stderr-p)
                      ;; The compiler signals it again, and muffles it itself.
                      (not (boundp 'sb-c::*compiler-error-bailout*))
                      (find-restart 'muffle-warning condition))))
    (when (and restart
               (equal '(lambda () :in sb-kernel::%warn)
                      (sb-kernel:%fun-name (sb-kernel::restart-function restart))))
      (invoke-restart restart))))

(defun warn-recorded (warn class default datum arguments)
  "What WARN does (src/code/warm-error.lisp), but for its text on *ERROR-OUTPUT* when that is the host's stderr and the
warning is recorded."
  ;; This frame stands for the call of WARN: its arguments are shown.
  (declare (optimize (debug 2)))
  (let ((condition (when (and *recording* (error-output-is-stderr-p))
                     (apply #'sb-kernel::coerce-to-condition datum default 'warn arguments))))
    (if (typep condition class)
        (let ((*recorded* nil)
              (*warned* condition))
          (restart-case (sb-kernel::%signal condition)
            (muffle-warning () :report "Skip warning."))
          nil)
        (apply (the function warn) datum arguments))))

(defun record-warnings ()
  "Have WARN and the compiler leave what they have to say of a recorded warning to the host: where *ERROR-OUTPUT* is the
user's own stream, it gets the text."
  (encapsulate 'warn 'sbcl-host
               (lambda (warn &rest arguments)
                 (if arguments
                     (warn-recorded warn 'warning 'simple-warning (first arguments) (rest arguments))
                     (funcall warn))))
  (encapsulate 'sb-int:style-warn 'sbcl-host
               (lambda (style-warn datum &rest arguments)
                 (warn-recorded style-warn 'style-warning 'sb-int:simple-style-warning datum arguments)))
  (encapsulate 'sb-c::print-compiler-message 'sbcl-host
               (lambda (print stream control arguments)
                 (unless (and *recording* (error-output-is-stderr-p))
                   (funcall print stream control arguments))))
  (encapsulate 'sb-c::summarize-compilation-unit 'sbcl-host
               (lambda (summarize aborted)
                 (if (and *recording* (error-output-is-stderr-p))
                     (unless aborted
                       (let ((*error-output* (make-broadcast-stream)))
                         (funcall summarize nil)))
                     (funcall summarize aborted)))))

(defun push-warning (type condition)
  "Push CONDITION as a warning of TYPE, a string, with where it is."
  (with-quiet-debugger ()
    (multiple-value-bind (file line column form) (warning-place condition)
      (event *job-id* (event-code :warning) line type)
      (event *job-id* (event-code :warning-place) column (or file ""))
      (when (and file form)
        (event *job-id* (event-code :warning-form) 0 form)))
    (push-report (event-code :warning-text) condition)))

(defun record-compiler-error (condition)
  "Push what the compiler will turn into a run-time error, the first time that it comes here."
  (let ((cause (sb-int:encapsulated-condition condition)))
    (when (and (boundp 'sb-c::*compiler-error-bailout*) (not (eq cause *recorded*)))
      (setf *recorded* cause)
      (push-warning "COMPILE-TIME-ERROR" cause))))

;;; The compilation unit

(defvar *unit* nil
  "What the forms of this evaluation are compiled in, once one is.")

(defun evaluated-form-p (lexenv)
  "True when LEXENV is that of a form of the submitted code, or of a part of one."
  (let ((cached **evaluation-lexenv**))
    (and cached
         (eq (sb-c::lexenv-policy lexenv) (sb-c::lexenv-policy (cached-lexenv-lexenv cached))))))

(defun compile-in-unit (compile form lexenv &rest arguments)
  "What COMPILE, SBCL's COMPILE-IN-LEXENV, does: for the forms of the submitted code, in one compilation unit. What they
call when they run, COMPILE or ASDF, has its own, and so the verdict that it has under bare SBCL."
  (declare (type function compile))
  (if (and *recording* (null sb-c::*compilation-unit*) (evaluated-form-p lexenv))
      (let ((sb-c::*compilation-unit* (or *unit* (setf *unit* (sb-c::make-compilation-unit)))))
        (handler-bind ((sb-kernel:parse-unknown-type
                         (lambda (condition)
                           (sb-c::note-undefined-reference (sb-kernel:parse-unknown-type-specifier condition) :type))))
          (apply compile form lexenv arguments)))
      (apply compile form lexenv arguments)))

(defun defined-by-now-p (undefined)
  "True when UNDEFINED, an UNDEFINED-WARNING of the compiler's, is of something that has been defined since."
  (let ((name (sb-c::undefined-warning-name undefined)))
    (ecase (sb-c::undefined-warning-kind undefined)
      (:function (and (sb-int:legal-fun-name-p name) (fboundp name)))
      ;; Where it was compiled it was undefined all the same.
      (:variable nil)
      (:type (and (symbolp name) (sb-int:info :type :kind name))))))

(defun finish-unit ()
  "Warn of what the forms of this evaluation use and nothing has defined so far."
  (when *unit*
    (setf sb-c::*undefined-warnings* (delete-if #'defined-by-now-p sb-c::*undefined-warnings*))
    (when (or sb-c::*undefined-warnings* sb-c::*argument-mismatch-warnings*)
      (let ((sb-c::*compilation-unit* *unit*))
        (sb-c::summarize-compilation-unit nil)
        (setf sb-c::*undefined-warnings* '()
              sb-c::*argument-mismatch-warnings* '())))))

(defun call-with-recorded-warnings (function)
  "Call FUNCTION, which evaluates submitted code, and push its warnings; at the end those of what its forms use and is still
undefined."
  (declare (type function function))
  (let ((*recording* t)
        (*recorded* nil)
        (*unit* nil)
        (sb-c::*undefined-warnings* '())
        (sb-c::*argument-mismatch-warnings* '()))
    (handler-bind ((warning #'record-warning)
                   (sb-c:compiler-error #'record-compiler-error))
      (unwind-protect (funcall function)
        (finish-unit)))))

;;; The end of an evaluation

(defvar *hold-errors* nil
  "True when an error of this evaluation is to be held where it happened.")

(defun push-failure-after-interruption (condition)
  "Say that CONDITION ended a cleanup form of an evaluation that is being unwound because it was interrupted."
  (with-quiet-debugger ()
    (let ((stream *error-output*))
      (guarded (with-server-syntax ()
                 (let ((*print-escape* nil))
                   (format stream "~&Error in a cleanup form: ~A~%~A~%"
                           (type-name-text (class-name-of condition)) condition)))
          (failure)
        nil))))

(defun fail-with (condition hook)
  "Push CONDITION, which entered the debugger through the function with frame pointer HOOK, and end the evaluation, or
hold it here. What has been interrupted stays so."
  (when (eq *failed* :interrupted)
    (push-failure-after-interruption condition)
    (check-failure))
  ;; The answer may be given here, and the error be of something that is undefined.
  (unless (typep condition 'storage-condition)
    (with-quiet-debugger ()
      (finish-unit)))
  (multiple-value-bind (frames finish)
      (capture (type-name-text (class-name-of condition))
               (lambda ()
                 (push-report (event-code :error-text) condition)
                 (push-reader-position condition)
                 (push-quicklisp-advice condition)
                 (push-hint condition)
                 (when (typep condition 'sb-sys:memory-fault-error)
                   (event *job-id* (event-code :notice) 0
                          "A memory fault: the image may be damaged. reset-session gives a fresh one.")))
               condition
               (lambda () (error-frame hook)))
    (when (and *hold-errors* (not finish) (not sb-kernel:*gc-inhibit*))
      (hold condition frames))
    (abandon-evaluation :error finish)))

(defun call-user-hook (variable condition)
  "Call the function that VARIABLE, one of the two debugger hooks, holds, as INVOKE-DEBUGGER does (RUN-HOOK in
src/code/debug.lisp). A hook that fails itself is told of, and the error that it was called for goes on."
  (let ((hook (symbol-value variable)))
    ;; DISABLE-DEBUGGER's hook would end the process.
    (unless (or (null hook) (eq hook 'sb-debug::debugger-disabled-hook))
      (progv (list variable) '(nil)
        (block contained
          (let ((*on-debugger* (lambda (failure)
                                 (say "The function in ~A failed with ~A."
                                              variable (type-name-text (class-name-of failure)))
                                 (return-from contained))))
            (funcall hook condition hook)))))))

(defun enter-debugger (invoke-debugger condition)
  "What INVOKE-DEBUGGER does: the user's hooks come first, then what the thread is bound to."
  (declare (optimize (debug 2)))
  ;; The binding keeps what follows from being a tail call: this frame stands for the call of INVOKE-DEBUGGER.
  (let ((sb-impl::*deadline* nil))
    (cond (*on-debugger* (funcall (the function *on-debugger*) condition))
          ((not (host-started-p)) (funcall invoke-debugger condition))
          (t
           (call-user-hook 'sb-ext:*invoke-debugger-hook* condition)
           (call-user-hook '*debugger-hook* condition)
           (if *abandon*
               (fail-with condition (frame-pointer-here))
               (contain-thread condition (frame-pointer-here)))))))

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

(defun push-reader-position (condition)
  "When CONDITION is that the submitted code ends too early, push where. Other reader errors say it themselves."
  (when (and *reading* (typep condition 'end-of-file)
             (eq *reading* (ignore-errors (stream-error-stream condition))))
    (multiple-value-bind (line column) (line-and-column *code* (or (file-position *reading*) 0))
      (multiple-value-bind (start-line start-column) (line-and-column *code* *form-start*)
        (event *job-id* (event-code :error-text) 0
               (format nil "~%The code ends at line ~D, column ~D, within the form that begins at line ~D, column ~D: ~
                            a closing parenthesis or quote is missing."
                       line column start-line start-column))))))

(defun push-quicklisp-advice (condition)
  "When CONDITION is that a package of Quicklisp's does not exist, push what to do about that."
  (when (and (typep condition 'package-error)
             (member (package-error-package condition) '("QL" "QL-DIST" "QL-UTIL" "QUICKLISP" "QUICKLISP-CLIENT")
                     :test #'equal)
             (not (find-package "QUICKLISP-CLIENT")))
    (let ((setup (guarded (merge-pathnames "quicklisp/setup.lisp" (user-homedir-pathname)) (failure) nil)))
      (event *job-id* (event-code :error-text) 0
             (with-server-syntax ()
               (format nil "~%Quicklisp is not loaded. ~:[It is not installed for this user (no ~A): ~
                            (asdf:load-system ...) loads the systems that are on this machine.~;~
                            (load ~S) loads it.~]"
                       (and setup (probe-file setup))
                       (if setup (sb-ext:native-namestring setup) "~/quicklisp/setup.lisp")))))))

(defun whitespace-end (stream)
  "Skip whitespace and comments of STREAM and return its position."
  (skip-blank stream)
  (file-position stream))

(defun read-form (stream end start)
  "Read the form from STREAM that begins at START, or return END."
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
       (sb-impl::eval-tlf form 0 (evaluation-lexenv))))))

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

(defmacro with-reader-settings ((&rest settings) &body body)
  "Evaluate BODY with each of SETTINGS, names of local variables, bound to what the reader goes by now."
  `(let ,(mapcar #'list settings
                 '(*package* *readtable* *read-base* *read-default-float-format*))
     ,@body))

(defun push-defining-form (start end package)
  "Push that what makes another image like this one is the form from START to END of the submitted code, read in PACKAGE."
  (event *job-id* (event-code :defined) start
         (with-server-syntax () (format nil "~D ~A" end (package-name package)))))

(defun evaluate-next-form (stream start)
  "Read a form from STREAM, which is at START, and evaluate it. Return a list of its values and true, or NIL and NIL at
the end. Push whether it defined something, or changed how the next one is read: that is what makes another image like
this one."
  (let ((definitions (evaluation-definitions *evaluation*))
        (form stream))
    (with-reader-settings (package readtable base float-format)
      (unwind-protect
           (call-with-form-restarts
            (lambda ()
              (when (eq form stream)
                (file-position stream start)
                (setf form (read-form stream stream start))
                (when (eq form stream)
                  (return-from evaluate-next-form (values '() nil))))
              (let* ((end (file-position stream))
                     (values (progn (setf - form) (evaluate-form form end))))
                (check-failure)
                (shiftf /// // / values)
                (shiftf *** ** * (first values))
                (unless (and (eql definitions (evaluation-definitions *evaluation*))
                             (eq package *package*) (eq readtable *readtable*)
                             (eql base *read-base*) (eq float-format *read-default-float-format*))
                  (push-defining-form start end package))
                (values values t))))
        ;; As in SBCL's own REPL (INTERACTIVE-EVAL in src/code/toplevel.lisp), whether it failed or not.
        (unless (eq form stream)
          (shiftf +++ ++ + form))))))

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
          (setf result values))))))

(defun find-user-package (name)
  "Return the package NAME as a user writes it: `foo` means FOO. Signal an error that suggests near names otherwise."
  (or (find-package name)
      (let* ((bare (string-left-trim "#:" (string-trim " " name)))
             (end (1- (length bare))))
        (find-package (if (and (plusp end) (char= (char bare 0) (char bare end) #\|))
                          (subseq bare 1 end)
                          (string-upcase bare))))
      (let ((near (near-names (string-upcase name) (loop for package in (list-all-packages)
                                                              collect (package-name package)
                                                              append (package-nicknames package)))))
        (error 'sb-kernel:simple-package-error
               :package name
               :format-control "There is no package named ~S.~@[ Did you mean ~{~A~^, ~}?~]"
               :format-arguments (list name near)))))

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

(defun usable-stream-p (variable)
  "True when what VARIABLE, a STANDARD-VARIABLE, holds is an open stream of its direction."
  (let ((stream (symbol-value (standard-variable-symbol variable))))
    (guarded (and (streamp stream)
                  (open-stream-p stream)
                  (if (eq 'sb-sys:*stdin* (standard-variable-target variable))
                      (input-stream-p stream)
                      (output-stream-p stream)))
        (failure)
      nil)))

(defun check-standard-streams ()
  "Say, once, which standard stream variables the user's code has set to something else, which stays so; and have those
lead where they did at first that hold no open stream."
  (dolist (variable **standard-variables**)
    (unless (unchanged-p variable)
      (let* ((symbol (standard-variable-symbol variable))
             (stream (symbol-value symbol)))
        (cond ((not (usable-stream-p variable))
               (reset-standard-variable variable)
               (say "~A held no open stream any more; it is what it was at first." symbol))
              ((not (eq stream (standard-variable-told variable)))
               (setf (standard-variable-told variable) stream)
               (say "~A stays set to another stream. To undo that: (setf ~:*~(~A~) ~(~S~))"
                            symbol (standard-variable-target variable))))))))

(defun evaluate-and-print (code package)
  "Evaluate CODE in PACKAGE, a name or empty, and push its values. Return true when nothing failed."
  (nth-value
   1 (call-until-abandoned
      (lambda ()
        (let ((*code* code)
              (*evaluated-forms* '())
              (*source-files* '())
              (*known-places* :none))
          ;; Not before there is where to unwind to.
          (with-interrupts
            (check-standard-streams)
            (call-with-recorded-warnings
             (lambda ()
               (call-with-user-package
                package
                (lambda ()
                  (let ((values (evaluate-forms code)))
                    (current-package)
                    (with-boundary ()
                      (mapc #'push-value values)))))))))))))

(defun monotonic-milliseconds ()
  "Return the time since some moment in the past. GET-INTERNAL-REAL-TIME is the kernel's coarse clock: 4 ms a tick."
  #+linux
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (+ (* 1000 seconds) (/ nanoseconds 1000000)))
  #-linux
  (/ (* 1000 (get-internal-real-time)) internal-time-units-per-second))

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

(defun run-evaluation (job)
  "Do an :EVALUATE job. Return true when it succeeded."
  (let ((*evaluation* (make-evaluation :number (job-evaluation job)))
        (*hold-errors* (logtest +evaluate-hold+ (job-flags job)))
        (*answers* '())
        ;; What is typed for a restart is for this evaluation alone.
        (sb-sys:*tty* sb-sys:*tty*))
    (flet ((run () (evaluate-and-print (job-text job) (job-name job))))
      (prog1 (if (logtest +evaluate-timing+ (job-flags job))
                 (run-timed #'run)
                 (run))
        (when (evaluation-threads *evaluation*)
          (push-running-threads))))))

(defun push-running-threads ()
  "Say which threads of this evaluation go on after it."
  (let ((running (live-threads *evaluation*)))
    (when running
      (event *job-id* (event-code :notice) 0
             (with-server-syntax ()
               (format nil "Still running: ~A. What ~:[they print~;it prints~] comes with later answers; ~
                            reset-session ends ~:*~:[them~;it~]."
                       (thread-list running) (null (rest running))))))))
