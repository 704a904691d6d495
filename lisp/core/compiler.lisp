;;;; How evaluated code is compiled, and what the compiler has to say of it.

(in-package "SBCL-HOST")

;;; The policy of evaluated code: callers are not lost to tail calls and locals stay visible, at no cost in speed (the
;;; step conditions of debug 3 are what would cost), and a frame keeps the closure that it is a call of. It applies
;;; lexically, so that it does not leak into a nested COMPILE-FILE or LOAD. Where the user asks for more speed than
;;; debugging it would cost: SBCL makes calls of a function in its own definition local then, but not under debug 3.

(defstruct (cached-lexenv (:copier nil) (:predicate nil))
  "The lexical environment for evaluating, and what it was made from: it is good while these are the same."
  (policy nil :read-only t)
  (handled-conditions nil :read-only t)
  (disabled-package-locks nil :read-only t)
  (lexenv nil :read-only t))

(declaim (type (or null cached-lexenv) *evaluation-lexenv*))
(defvar *evaluation-lexenv* nil
  "The lexical environment of the form that this thread evaluates. The global value is a cache: the environment that was
made last, by whichever thread.")

(defun speed-matters-p (policy debug)
  "True when POLICY, under which the user's own code has DEBUG for the debug quality, asks for more speed than that."
  (> (sb-c::policy-quality policy 'speed) debug))

(defun make-evaluation-lexenv ()
  "Make the lexical environment in which the user's forms are evaluated. Its policy is an object of its own, by which
EVALUATED-FORM-P knows it and those made from it."
  (let* ((policy sb-c::*policy*)
         (own (or **debug-declaimed** (speed-matters-p policy (sb-c::policy-quality policy 'debug)))))
    (sb-c::make-lexenv :default (sb-kernel:make-null-lexenv)
                       :policy (values (sb-c::process-optimize-decl
                                        (if own
                                            '(optimize (sb-c::store-closure-debug-pointer 3))
                                            '(optimize (debug 3) (sb-c:insert-step-conditions 0)
                                              ;; As good as 3: by this POLICY-AS-DECLARED knows it.
                                              (sb-c::store-closure-debug-pointer 2)))
                                        policy)))))

(defun policy-as-declared (process declaration policy)
  "Return what PROCESS, which is SB-C::PROCESS-OPTIMIZE-DECL, makes of DECLARATION, of the user's code, and POLICY. Where
that has the debug quality from MAKE-EVALUATION-LEXENV, and asks for more speed than the user for debugging, it is what it
would be under bare SBCL."
  (declare (type function process))
  (flet ((quality (name) (sb-c::policy-quality policy name)))
    (multiple-value-bind (declared qualities) (funcall process declaration policy)
      (let* ((cached *evaluation-lexenv*)
             ;; The compiler binds *POLICY* to that of the form.
             (debug (and cached (sb-c::policy-quality (cached-lexenv-policy cached) 'debug))))
        (values (cond ((not (and debug policy
                                 (eql 3 (quality 'debug)) (eql 2 (quality 'sb-c::store-closure-debug-pointer))))
                       declared)
                      ((assoc 'debug qualities)
                       (values (funcall process '(optimize (sb-c::store-closure-debug-pointer 3)) declared)))
                      ((speed-matters-p declared debug)
                       (values (funcall process `(optimize (debug ,debug)) declared)))
                      (t declared))
                qualities)))))

(defun evaluation-lexenv ()
  "Return the CACHED-LEXENV for the next form of the user's."
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

;; Inline: no frame of its own between the form and what it is called by.
(declaim (inline evaluate-in-lexenv))
(defun evaluate-in-lexenv (form)
  "Evaluate FORM of the user's. Until it is done, what this thread compiles belongs to the same lexical environment, whatever
other threads declaim meanwhile."
  (let ((*evaluation-lexenv* (evaluation-lexenv)))
    (sb-impl::eval-tlf form 0 (cached-lexenv-lexenv *evaluation-lexenv*))))

;;; Warnings

(defvar *recording* nil
  "True in a thread whose warnings are recorded.")

(defvar *recorded* nil
  "The warning or compiler error that was recorded last: handlers may signal it again.")

(defvar *warned* nil
  "The condition that WARN-RECORDED signals.")

(defvar *severities* nil
  "True when warnings are told by how severe they are, and not by the names of SBCL's own classes; what ASDF says of files
that had warnings, which are told of already, is left out then.")

(defvar *compile-failures* nil
  "A list of what makes the compilation of a file fail that is being compiled, newest first, with a NIL at its end: lists of
the condition's type as told, the condition or what it reports, file, line, column and form. NIL when nobody asks.")

(defconstant +compile-failures+ 5
  "How many of them are kept.")

(defun warning-type (condition)
  "Return what type CONDITION, a warning, is told to be of."
  (let ((name (class-name-of condition)))
    (cond ((not (and *severities* (system-symbol-p name))) (type-name-text name))
          ((typep condition 'style-warning) "STYLE-WARNING")
          (t "WARNING"))))

(defun reader-report (condition)
  "Return what CONDITION reports if it is one of SBCL's reader: later it would say where else the stream is by then."
  (and (typep condition 'sb-c::input-error-in-compile-file)
       (system-symbol-p (class-name-of (sb-int:encapsulated-condition condition)))
       (guarded (with-server-syntax () (let ((*print-escape* nil)) (princ-to-string condition))) (failure) nil)))

(defun note-compile-failure (type condition place)
  "Note that CONDITION, which is told to be of TYPE and to be at PLACE, makes the compilation of a file fail."
  (when (and *compile-failures*
             (not (typep condition 'style-warning))
             (<= (length *compile-failures*) +compile-failures+))
    (push (list* type (or (reader-report condition) condition) place) *compile-failures*)))

(defun record-warning (condition)
  "Push a warning that no handler of the user's has handled, the first time that it comes here, unless it is one that
SBCL muffles or a redefinition alone. What comes of it is left to whoever signalled it: SBCL's own handlers signal again
what they see before they count it, and the compiler's verdict is theirs."
  (unless (or (not *recording*)
              (eq condition *recorded*)
              (typep condition '(or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p)))
              (and *severities* (typep condition '(or uiop:compile-warned-warning uiop:compile-failed-warning))))
    (setf *recorded* condition)
    (push-warning (warning-type condition) condition))
  (unless (or (not *recording*) (eq condition *warned*))
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

(defun push-warning (type condition)
  "Push CONDITION as a warning of TYPE, a string, with where it is."
  (with-quiet-debugger ()
    (multiple-value-bind (file line column form) (warning-place condition)
      (note-compile-failure type condition (list file line column form))
      (event *job-id* (event-code :warning) line type)
      (event *job-id* (event-code :warning-place) column (or file ""))
      (when (and file form)
        (event *job-id* (event-code :warning-form) 0 form)))
    (push-report (event-code :warning-text) condition)))

(define-hook hint (condition)
  "Return what the report of CONDITION adds to the condition's own, or NIL.")

(defun record-compiler-error (condition)
  "Push what the compiler will turn into a run-time error, the first time that it comes here."
  (let ((cause (sb-int:encapsulated-condition condition)))
    (when (and *recording* (boundp 'sb-c::*compiler-error-bailout*) (not (eq cause *recorded*)))
      (setf *recorded* cause)
      (push-warning "COMPILE-TIME-ERROR" cause)
      (when (typep cause 'sb-int:encapsulated-condition)
        (let ((hint (guarded (hint (sb-int:encapsulated-condition cause)) (failure) nil)))
          (when hint
            (event *job-id* (event-code :warning-text) 0 (format nil " ~A" hint))))))))

;;; The compilation unit

(defvar *unit* nil
  "What the forms of this evaluation are compiled in, once one is.")

(defun evaluated-form-p (lexenv)
  "True when LEXENV is that of a form of the submitted code, or of a part of one."
  (let ((cached *evaluation-lexenv*))
    (and cached
         (eq (sb-c::lexenv-policy lexenv) (sb-c::lexenv-policy (cached-lexenv-lexenv cached))))))

(defun call-in-unit (lexenv compile)
  "Call COMPILE, which compiles a form in LEXENV: if that is of the submitted code, in one compilation unit. What that
calls when it runs, COMPILE or ASDF, has its own, and so the verdict that it has under bare SBCL."
  (declare (type function compile))
  (if (and *recording* (null sb-c::*compilation-unit*) (evaluated-form-p lexenv))
      (let ((sb-c::*compilation-unit* (or *unit* (setf *unit* (sb-c::make-compilation-unit)))))
        (handler-bind ((sb-kernel:parse-unknown-type
                         (lambda (condition)
                           (sb-c::note-undefined-reference (sb-kernel:parse-unknown-type-specifier condition) :type))))
          (funcall compile)))
      (funcall compile)))

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
