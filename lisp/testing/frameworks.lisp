;;;; Test frameworks: what is to be known of one so that its tests can be run. Each has a file of its own and is used through
;;;; its own functions. None of them is in the image when this is compiled: their symbols are looked up when they are
;;;; needed, and one that a version lacks is an error that names it.

(in-package "SBCL-HOST/TESTING")

(defstruct (framework (:copier nil) (:predicate nil))
  "A test framework."
  (title "" :type string :read-only t)
  ;; The names of its packages; the first one has its functions.
  (packages '() :type list :read-only t)
  ;; Its functions that run tests, by which a system's test-op does it: conses of a name and the name of a function of the
  ;; arguments that returns the tests meant.
  (entries '() :type list :read-only t)
  ;; Its variables with the streams that it reports to: conses of a name and a package.
  (streams '() :type list :read-only t)
  ;; The name of a function without arguments that returns all its tests.
  (tests nil :type symbol :read-only t)
  ;; The name of a function of a test that returns its name, and that of one that returns the package it belongs to.
  (name nil :type symbol :read-only t)
  (home nil :type symbol :read-only t)
  ;; The name of a function of a function of a group's name that returns the tests of the groups for whose names that one
  ;; is true.
  (groups nil :type symbol :read-only t)
  ;; The name of a function of tests that runs them, with CALL-AS-TEST and CONCLUDE, and returns what its own would.
  (runner nil :type symbol :read-only t))

(defglobal **frameworks** '()
  "The frameworks that are known, newest first.")

(defmacro define-framework (title packages &rest slots)
  "Define the framework TITLE whose functions are in the first of PACKAGES."
  `(push (make-framework :title ,title :packages ',packages
                         ,@(loop for (slot value) on slots by #'cddr
                                 append (list slot (if (keywordp value) value `',value))))
         **frameworks**))

(defun framework-directories ()
  "Return the directories of the frameworks that are loaded, as *MACHINERY-DIRECTORIES* has them."
  (loop for framework in (present-frameworks)
        for system = (asdf:registered-system (string-downcase (framework-title framework)))
        for directory = (and system (asdf:system-source-directory system))
        when directory
          collect (cons (sb-ext:native-namestring directory) (framework-title framework))))

(defvar *framework* nil
  "The framework whose symbols are looked up.")

(defun framework-package (framework)
  "Return the package of FRAMEWORK, or NIL when it is not there."
  (find-package (first (framework-packages framework))))

(defun present-frameworks ()
  "Return the frameworks that are loaded."
  (remove-if-not #'framework-package **frameworks**))

(defun their-symbol (name &optional (package (first (framework-packages *framework*))))
  "Return the symbol NAME of the framework, in its package or this one."
  (or (and (find-package package) (find-symbol name package))
      (error "This version of ~A has no ~A, which run-tests needs." (framework-title *framework*) name)))

(defun call-theirs (name &rest arguments)
  "Call the framework's function NAME with ARGUMENTS."
  (apply (fdefinition (their-symbol name)) arguments))

(defun their-slot (object name)
  "Return the value of the slot NAME of OBJECT, the framework's, or NIL when it is unbound."
  (let ((slot (their-symbol name)))
    (and (slot-boundp object slot) (slot-value object slot))))

(defun their-type-p (object name)
  "True when OBJECT is of the framework's class NAME."
  (typep object (their-symbol name)))

(defmacro with-their-variables ((&rest bindings) &body body)
  "Evaluate BODY with those of the framework's variables bound that there are: BINDINGS are lists of name and value."
  `(call-with-their-variables (list ,@(loop for (name value) in bindings collect `(cons ,name ,value)))
                              (lambda () ,@body)))

(defun call-with-their-variables (bindings function)
  "Call FUNCTION with those variables of the framework bound that BINDINGS, conses of name and value, name."
  (declare (type function function))
  (let ((bindings (loop for (name . value) in bindings
                        for symbol = (find-symbol name (framework-package *framework*))
                        when (and symbol (boundp symbol))
                          collect (cons symbol value))))
    (progv (mapcar #'car bindings) (mapcar #'cdr bindings)
      (funcall function))))

(defun call-silencing-frameworks (function)
  "Return the values of FUNCTION. Meanwhile the frameworks print no reports of their own."
  (declare (type function function))
  (let ((variables (loop for framework in (present-frameworks)
                         append (loop for (name . package) in (framework-streams framework)
                                      for symbol = (and (find-package package) (find-symbol name package))
                                      when (and symbol (boundp symbol))
                                        collect symbol))))
    (progv variables (make-list (length variables) :initial-element (make-broadcast-stream))
      (funcall function))))

(defun framework-condition-p (condition)
  "True when CONDITION is of a class of a framework's own: how it tells itself of a failed check."
  (let ((package (ignore-errors (symbol-package (class-name (class-of condition))))))
    (and package
         (some (lambda (framework) (member (package-name package) (framework-packages framework) :test #'string=))
               **frameworks**))))

(defun framework-test-name (framework test)
  "Return the name of TEST of FRAMEWORK."
  (let ((*framework* framework))
    (funcall (framework-name framework) test)))

(defun symbol-home (name)
  "Return the package of NAME, if that is a symbol."
  (and (symbolp name) (symbol-package name)))

(defun run-with (framework tests)
  "Run TESTS of FRAMEWORK in this run. Return what its own function would."
  (let ((*framework* framework))
    (funcall (framework-runner framework) tests)))
