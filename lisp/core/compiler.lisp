;;;; Compiling evaluated code, and recording the compiler's warnings.

(in-package "SBCL-HOST")

;;; The policy of evaluated code keeps callers in backtraces despite tail calls, keeps locals visible, and makes a frame
;;; keep its closure. Step conditions, which are a part of debug 3 and make code slow, are off. The policy applies
;;; lexically, so that it does not leak into a nested COMPILE-FILE or LOAD. If the user asks for
;;; more speed than debugging, the user's own policy applies instead: SBCL then compiles a function's calls to itself as
;;; local calls, which debug 3 would prevent.

(defstruct (cached-lexenv (:copier nil) (:predicate nil))
  "A lexical environment for evaluation, and the values that it was made from. The environment is valid while these
values are current."
  (policy nil :read-only t)
  (handled-conditions nil :read-only t)
  (disabled-package-locks nil :read-only t)
  (lexenv nil :read-only t))

(declaim (type (or null cached-lexenv) *evaluation-lexenv*))
(defvar *evaluation-lexenv* nil
  "The CACHED-LEXENV of the form that this thread evaluates. The global value is a cache: the last CACHED-LEXENV that
any thread made.")

(defun speed-exceeds-debug-p (policy debug)
  "Return true when the speed quality of POLICY is higher than DEBUG, the debug quality that the user's own declarations
request."
  (> (sb-c::policy-quality policy 'speed) debug))

(defun make-evaluation-lexenv ()
  "Return a new lexical environment for evaluating the user's forms. The environment's policy is a fresh object, by
which SUBMITTED-CODE-LEXENV-P recognises this environment and environments derived from it."
  (let* ((policy sb-c::*policy*)
         (own (or **debug-declaimed** (speed-exceeds-debug-p policy (sb-c::policy-quality policy 'debug)))))
    (sb-c::make-lexenv :default (sb-kernel:make-null-lexenv)
                       :policy (values (sb-c::process-optimize-decl
                                        (if own
                                            '(optimize (sb-c::store-closure-debug-pointer 3))
                                            '(optimize (debug 3) (sb-c:insert-step-conditions 0)
                                              ;; The value 2 has the same effect as 3, and lets POLICY-AS-DECLARED
                                              ;; recognise this policy.
                                              (sb-c::store-closure-debug-pointer 2)))
                                        policy)))))

(defun policy-as-declared (process declaration policy)
  "Call PROCESS, SBCL's PROCESS-OPTIMIZE-DECL, with DECLARATION and POLICY, and return its two values: the new policy and
the declared qualities. DECLARATION is a declaration in the user's code. If POLICY has the debug quality that
MAKE-EVALUATION-LEXENV set, and DECLARATION asks for more speed than debugging, the new policy has the debug quality that
it would have under bare SBCL. If DECLARATION sets the debug quality itself, later declarations do not change it here."
  (declare (type function process))
  (flet ((quality (name) (sb-c::policy-quality policy name)))
    (multiple-value-bind (declared qualities) (funcall process declaration policy)
      (let* ((cached *evaluation-lexenv*)
             ;; The compiler binds *POLICY* to the form's policy, so the user's own debug quality comes from the cache.
             (debug (and cached (sb-c::policy-quality (cached-lexenv-policy cached) 'debug))))
        (values (cond ((not (and debug policy
                                 (eql 3 (quality 'debug)) (eql 2 (quality 'sb-c::store-closure-debug-pointer))))
                       declared)
                      ((assoc 'debug qualities)
                       (values (funcall process '(optimize (sb-c::store-closure-debug-pointer 3)) declared)))
                      ((speed-exceeds-debug-p declared debug)
                       (values (funcall process `(optimize (debug ,debug)) declared)))
                      (t declared))
                qualities)))))

(defun evaluation-lexenv ()
  "Return the CACHED-LEXENV for the user's next form."
  (let ((cached *evaluation-lexenv*))
    (if (and cached
             (eq (cached-lexenv-policy cached) sb-c::*policy*)
             (eq (cached-lexenv-handled-conditions cached) sb-c::*handled-conditions*)
             (eq (cached-lexenv-disabled-package-locks cached) sb-c::*disabled-package-locks*))
        cached
        (setf *evaluation-lexenv* (make-cached-lexenv :policy sb-c::*policy*
                                                      :handled-conditions sb-c::*handled-conditions*
                                                      :disabled-package-locks sb-c::*disabled-package-locks*
                                                      :lexenv (make-evaluation-lexenv))))))

;; The function is inline, so that it adds no frame between the form and its caller.
(declaim (inline evaluate-in-lexenv))
(defun evaluate-in-lexenv (form)
  "Evaluate FORM, which the user submitted. Everything that this thread compiles meanwhile belongs to one lexical
environment, even if other threads change the global policy."
  (let ((*evaluation-lexenv* (evaluation-lexenv)))
    (sb-impl::eval-tlf form 0 (cached-lexenv-lexenv *evaluation-lexenv*))))

;;; Warnings

(defvar *recording-warnings* nil
  "True in a thread whose warnings are pushed to the host.")

(defvar *last-recorded-condition* nil
  "The warning or compiler error that was recorded last. The same condition is not recorded again if it is signalled again,
for example by a handler.")

(defvar *condition-from-warn* nil
  "The condition that SIGNAL-RECORDED-WARNING is signalling.")

(defvar *report-severities* nil
  "True when warnings of SBCL's own classes are reported as WARNING or STYLE-WARNING instead of their class names.
ASDF's summaries of the files with warnings are then omitted, because the warnings themselves have been reported.")

(defvar *compile-failures* nil
  "The conditions that make the compilation of the current file fail, newest first: lists of the reported type, the
condition or its report, file, line, column and form. While such conditions are recorded, the list has NIL as an
additional last element, so that it is never empty. When no conditions are recorded, the value is NIL.")

(defconstant +max-compile-failures+ 5
  "The maximum number of conditions in *COMPILE-FAILURES*.")

(defun warning-type (condition)
  "Return the type under which CONDITION, a warning, is reported."
  (let ((name (class-name-of condition)))
    (cond ((not (and *report-severities* (system-symbol-p name))) (type-name-text name))
          ((typep condition 'style-warning) "STYLE-WARNING")
          (t "WARNING"))))

(defun reader-error-report (condition)
  "Return the report of CONDITION if it is a reader error of SBCL's; else NIL. The report must be made at once: it
contains the position of the stream, which changes when reading continues."
  (and (typep condition 'sb-c::input-error-in-compile-file)
       (system-symbol-p (class-name-of (sb-int:encapsulated-condition condition)))
       (guarded (with-server-syntax () (let ((*print-escape* nil)) (princ-to-string condition))) (failure) nil)))

(defun note-compile-failure (type condition location)
  "Record that CONDITION, reported as TYPE, makes the compilation of a file fail. LOCATION is a list of file, line,
column and form. Style warnings do not count."
  (when (and *compile-failures*
             (not (typep condition 'style-warning))
             (<= (length *compile-failures*) +max-compile-failures+))
    (push (list* type (or (reader-error-report condition) condition) location) *compile-failures*)))

(defun record-warning (condition)
  "Push CONDITION, a warning that the user's handlers have declined, while warnings are recorded. Do not push a warning
that was pushed before, that SBCL muffles, that only reports a redefinition, or that is one of the ASDF summaries that
are omitted (see *REPORT-SEVERITIES*). Muffle only direct warnings (see MUFFLE-DIRECT-WARNING): SBCL's handlers signal
other warnings again before they count them, and the compiler's verdict is based on that count."
  (unless (or (not *recording-warnings*)
              (eq condition *last-recorded-condition*)
              (typep condition '(or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p)))
              (and *report-severities* (typep condition '(or uiop:compile-warned-warning uiop:compile-failed-warning))))
    (setf *last-recorded-condition* condition)
    (push-warning (warning-type condition) condition))
  (unless (or (not *recording-warnings*) (eq condition *condition-from-warn*))
    (muffle-direct-warning condition)))

(defun muffle-direct-warning (condition)
  "Muffle CONDITION if SBCL's original function WARN signalled it, so that WARN does not print it to *ERROR-OUTPUT*. Some
of SBCL's own calls of WARN are direct: they bypass the patch of WARN, which calls SIGNAL-RECORDED-WARNING."
  (let ((restart (and (error-output-is-stderr-p)
                      ;; While compiling, the compiler signals the warning again and muffles it itself.
                      (not (compiling-p))
                      (find-restart 'muffle-warning condition))))
    (when (and restart
               (equal '(lambda () :in sb-kernel::%warn)
                      (sb-kernel:%fun-name (sb-kernel::restart-function restart))))
      (invoke-restart restart))))

(defun signal-recorded-warning (warn class default datum arguments)
  "Signal the warning that DATUM and ARGUMENTS designate. WARN is SBCL's function WARN or STYLE-WARN
(src/code/warm-error.lisp). When warnings are recorded and *ERROR-OUTPUT* is the host's stderr, do not print the warning;
otherwise call WARN. CLASS is the class of the warnings that WARN signals, and DEFAULT the class used if DATUM is a format
control."
  ;; Debug 2 keeps this function's arguments: its frame represents the call of WARN in backtraces.
  (declare (optimize (debug 2)))
  (let ((condition (when (and *recording-warnings* (error-output-is-stderr-p))
                     (apply #'sb-kernel::coerce-to-condition datum default 'warn arguments))))
    (if (typep condition class)
        (let ((*last-recorded-condition* nil)
              (*condition-from-warn* condition))
          (restart-case (sb-kernel::%signal condition)
            (muffle-warning () :report "Skip warning."))
          nil)
        (apply (the function warn) datum arguments))))

(defun push-warning (type condition)
  "Push CONDITION, a warning or an error of the compiler, as a warning of TYPE, a string, with its source location."
  (with-quiet-debugger ()
    (multiple-value-bind (file line column form) (warning-location condition)
      (note-compile-failure type condition (list file line column form))
      (event *job-id* (event-code :warning) line type)
      (event *job-id* (event-code :warning-place) column (or file ""))
      (when (and file form)
        (event *job-id* (event-code :warning-form) 0 form)))
    (push-report (event-code :warning-text) condition)))

(define-hook compiler-error-hint (condition)
  "Return the hint that the report of CONDITION adds to the condition's own text, or NIL.")

(defun record-compiler-error (condition)
  "Push CONDITION, an error that the compiler turns into a run-time error, unless it was pushed before."
  (let ((cause (sb-int:encapsulated-condition condition)))
    (when (and *recording-warnings* (compiling-p) (not (eq cause *last-recorded-condition*)))
      (setf *last-recorded-condition* cause)
      (push-warning "COMPILE-TIME-ERROR" cause)
      (when (typep cause 'sb-int:encapsulated-condition)
        (let ((hint (guarded (compiler-error-hint (sb-int:encapsulated-condition cause)) (failure) nil)))
          (when hint
            (event *job-id* (event-code :warning-text) 0 (format nil " ~A" hint))))))))

;;; The compilation unit

(defvar *evaluation-unit* nil
  "The compilation unit of this evaluation's forms; NIL until the first form is compiled.")

(defun submitted-code-lexenv-p (lexenv)
  "Return true when LEXENV is the environment of a submitted form or of a subform."
  (let ((cached *evaluation-lexenv*))
    (and cached
         (eq (sb-c::lexenv-policy lexenv) (sb-c::lexenv-policy (cached-lexenv-lexenv cached))))))

(defun call-in-compilation-unit (lexenv thunk)
  "Call THUNK, a function that compiles a form in LEXENV. If the form is part of the submitted code, compile it in the
evaluation's single compilation unit. Calls of COMPILE or ASDF at run time have units of their own, and give the same
verdict as under bare SBCL."
  (declare (type function thunk))
  (if (and *recording-warnings* (null sb-c::*compilation-unit*) (submitted-code-lexenv-p lexenv))
      (let ((sb-c::*compilation-unit* (or *evaluation-unit* (setf *evaluation-unit* (sb-c::make-compilation-unit)))))
        (handler-bind ((sb-kernel:parse-unknown-type
                         (lambda (condition)
                           (sb-c::note-undefined-reference (sb-kernel:parse-unknown-type-specifier condition) :type))))
          (funcall thunk)))
      (funcall thunk)))

(defun defined-since-p (undefined)
  "Return true when UNDEFINED, an SB-C::UNDEFINED-WARNING, names a function or type that has been defined in the meantime."
  (let ((name (sb-c::undefined-warning-name undefined)))
    (ecase (sb-c::undefined-warning-kind undefined)
      (:function (and (sb-int:legal-fun-name-p name) (fboundp name)))
      ;; The code was compiled with an undefined variable; defining it later does not change that code.
      (:variable nil)
      (:type (and (symbolp name) (sb-int:info :type :kind name))))))

(defun finish-compilation-unit ()
  "Warn about the functions, variables and types that the forms of this evaluation use and that are still undefined, and
about calls whose arguments do not match the function."
  (when *evaluation-unit*
    (setf sb-c::*undefined-warnings* (delete-if #'defined-since-p sb-c::*undefined-warnings*))
    (when (or sb-c::*undefined-warnings* sb-c::*argument-mismatch-warnings*)
      (let ((sb-c::*compilation-unit* *evaluation-unit*))
        (sb-c::summarize-compilation-unit nil)
        (setf sb-c::*undefined-warnings* '()
              sb-c::*argument-mismatch-warnings* '())))))

(defun call-with-recorded-warnings (function)
  "Call FUNCTION, which evaluates submitted code, and push its warnings. At the end push the warnings about undefined
names, as FINISH-COMPILATION-UNIT does."
  (declare (type function function))
  (let ((*recording-warnings* t)
        (*last-recorded-condition* nil)
        (*evaluation-unit* nil)
        (sb-c::*undefined-warnings* '())
        (sb-c::*argument-mismatch-warnings* '()))
    (handler-bind ((warning #'record-warning)
                   (sb-c:compiler-error #'record-compiler-error))
      (unwind-protect (funcall function)
        (finish-compilation-unit)))))
