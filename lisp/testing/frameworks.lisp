;;;; Test frameworks: the interface through which the tests of a framework are run. Each framework has a file of its own and
;;;; is used through its own functions. No framework is in the image when this file is compiled: symbols are looked up when
;;;; they are needed, and a missing one is an error that names it.

(in-package "SBCL-HOST/TESTING")

(defstruct (framework (:copier nil) (:predicate nil))
  "A test framework."
  (title "" :type string :read-only t)
  ;; The names of its packages. The first one has its functions.
  (packages '() :type list :read-only t)
  ;; The framework's functions that run tests, as a system's test-op calls them: conses of such a function's name and the
  ;; name of our function that takes the same arguments and returns the tests that they select.
  (entries '() :type list :read-only t)
  ;; The variables that hold its report streams: conses of a name and a package.
  (streams '() :type list :read-only t)
  ;; The name of a function without arguments that returns all tests.
  (tests nil :type symbol :read-only t)
  ;; The names of functions that return the name of a test, and the package to which a test belongs.
  (name nil :type symbol :read-only t)
  (home nil :type symbol :read-only t)
  ;; The name of a function that takes a predicate on names, and returns the tests of the groups whose names satisfy it.
  (groups nil :type symbol :read-only t)
  ;; The name of a function that runs a list of tests, by CALL-AS-TEST and RECORD-VERDICT, and returns what the framework's
  ;; own function would.
  (runner nil :type symbol :read-only t))

(defglobal **frameworks** '()
  "The supported frameworks, newest first.")

(defmacro define-framework (title packages &rest slots)
  "Define the framework TITLE, whose functions are in the first of PACKAGES. SLOTS, a plist, are the other slots of its
FRAMEWORK structure."
  `(push (make-framework :title ,title :packages ',packages
                         ,@(loop for (slot value) on slots by #'cddr
                                 append (list slot (if (keywordp value) value `',value))))
         **frameworks**))

(defun framework-directories ()
  "Return the source directories of the loaded frameworks, in the format of *MACHINERY-DIRECTORIES*."
  (loop for framework in (present-frameworks)
        for system = (asdf:registered-system (string-downcase (framework-title framework)))
        for directory = (and system (asdf:system-source-directory system))
        when directory
          collect (cons (sb-ext:native-namestring directory) (framework-title framework))))

(defvar *framework* nil
  "The framework in whose packages symbols are looked up.")

(defun framework-package (framework)
  "Return the main package of FRAMEWORK, or NIL if it does not exist."
  (find-package (first (framework-packages framework))))

(defun present-frameworks ()
  "Return the frameworks that are loaded."
  (remove-if-not #'framework-package **frameworks**))

(defun framework-symbol (name &optional (package (first (framework-packages *framework*))))
  "Return the symbol NAME of the current framework, in its main package or in PACKAGE."
  (or (and (find-package package) (find-symbol name package))
      (error "This version of ~A has no ~A, which run-tests needs." (framework-title *framework*) name)))

(defun call-framework (name &rest arguments)
  "Call the current framework's function NAME with ARGUMENTS."
  (apply (fdefinition (framework-symbol name)) arguments))

(defun framework-slot (object name)
  "Return the value of the slot NAME of OBJECT, an object of the framework, or NIL if it is unbound."
  (let ((slot (framework-symbol name)))
    (and (slot-boundp object slot) (slot-value object slot))))

(defun framework-type-p (object name)
  "Return true when OBJECT is an instance of the framework's class NAME."
  (typep object (framework-symbol name)))

(defmacro with-framework-variables ((&rest bindings) &body body)
  "Evaluate BODY with the framework's variables bound according to BINDINGS, lists of name and value. Variables that do not
exist are skipped."
  `(call-with-framework-variables (list ,@(loop for (name value) in bindings collect `(cons ,name ,value)))
                                  (lambda () ,@body)))

(defun call-with-framework-variables (bindings function)
  "Call FUNCTION with the framework's variables bound according to BINDINGS, conses of name and value. Variables that do not
exist are skipped."
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
  "Return true when CONDITION is of a class that a framework defines in order to signal a failed check to itself."
  (let ((package (ignore-errors (symbol-package (class-name (class-of condition))))))
    (and package
         (some (lambda (framework) (member (package-name package) (framework-packages framework) :test #'string=))
               **frameworks**))))

(defun framework-test-name (framework test)
  "Return the name of TEST of FRAMEWORK."
  (let ((*framework* framework))
    (funcall (framework-name framework) test)))

(defun symbol-home (name)
  "Return the home package of NAME if it is a symbol, else NIL."
  (and (symbolp name) (symbol-package name)))

(defun run-framework-tests (framework tests)
  "Run TESTS of FRAMEWORK in the current test run. Return what the framework's own function would."
  (let ((*framework* framework))
    (funcall (framework-runner framework) tests)))
