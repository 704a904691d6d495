;;;; The interface to test frameworks. For each supported framework, a file of its own calls the framework's functions to run
;;;; tests. No framework is in the image when this file is compiled, so symbols are looked up when they are needed. If a
;;;; framework lacks a symbol, an error is signalled whose message names the symbol.

(in-package "SBCL-HOST/TESTING")

(defstruct (framework (:copier nil) (:predicate nil))
  "A test framework."
  (title "" :type string :read-only t)
  ;; The names of the framework's packages. The first package has its functions.
  (packages '() :type list :read-only t)
  ;; Conses of two function names. The car is the name of a function of the framework that a system's test-op calls to run
  ;; tests. The cdr is the name of our function that takes the same arguments and returns the tests that the framework's
  ;; function would run.
  (entries '() :type list :read-only t)
  ;; The variables that hold the framework's report streams: conses of a variable's name and its package's name.
  (streams '() :type list :read-only t)
  ;; The name of a function without arguments that returns all tests.
  (tests nil :type symbol :read-only t)
  ;; NAME names a function that returns the name of a test. HOME names a function that returns the package of a test.
  (name nil :type symbol :read-only t)
  (home nil :type symbol :read-only t)
  ;; The name of a function that takes a predicate on names. The function returns the tests of the groups, such as suites or
  ;; tags, whose names satisfy the predicate.
  (groups nil :type symbol :read-only t)
  ;; The name of a function that runs a list of tests by CALL-AS-TEST and RECORD-VERDICT. The function returns the values
  ;; that the framework's own function would return.
  (runner nil :type symbol :read-only t))

(defglobal **frameworks** '()
  "The supported frameworks. The framework that was defined last is first.")

(defmacro define-framework (title packages &rest slots)
  "Define the framework TITLE, whose functions are in the first of PACKAGES. SLOTS, a plist, gives the other slots of
the framework's FRAMEWORK structure."
  `(push (make-framework :title ,title :packages ',packages
                         ,@(loop for (slot value) on slots by #'cddr
                                 append (list slot (if (keywordp value) value `',value))))
         **frameworks**))

(defun framework-directories ()
  "Return a value for *MACHINERY-DIRECTORIES*: a list with a cons for each loaded framework whose source directory is known.
The car is the directory's native namestring, and the cdr is the framework's title."
  (loop for framework in (loaded-frameworks)
        for system = (asdf:registered-system (string-downcase (framework-title framework)))
        for directory = (and system (asdf:system-source-directory system))
        when directory
          collect (cons (sb-ext:native-namestring directory) (framework-title framework))))

(defvar *framework* nil
  "The current framework, in whose packages symbols are looked up.")

(defun framework-package (framework)
  "Return the main package of FRAMEWORK, or NIL if it does not exist."
  (find-package (first (framework-packages framework))))

(defun loaded-frameworks ()
  "Return the frameworks that are loaded."
  (remove-if-not #'framework-package **frameworks**))

(defun framework-symbol (name &optional (package (first (framework-packages *framework*))))
  "Return the symbol named NAME in the package named PACKAGE, by default the current framework's main package. Signal an
error if the symbol does not exist."
  (or (and (find-package package) (find-symbol name package))
      (error "The loaded version of ~A has no symbol ~A, which run-tests needs: load another version."
             (framework-title *framework*) name)))

(defun call-framework (name &rest arguments)
  "Call the current framework's function NAME with ARGUMENTS."
  (apply (fdefinition (framework-symbol name)) arguments))

(defun framework-slot (object name)
  "Return the value of the slot NAME of OBJECT, an object of the current framework, or NIL if the slot is unbound."
  (let ((slot (framework-symbol name)))
    (and (slot-boundp object slot) (slot-value object slot))))

(defun framework-type-p (object name)
  "Return true when OBJECT is an instance of the current framework's class NAME."
  (typep object (framework-symbol name)))

(defmacro with-framework-variables ((&rest bindings) &body body)
  "Evaluate BODY with the current framework's variables bound according to BINDINGS, lists of name and value. Skip variables
that do not exist or have no value."
  `(call-with-framework-variables (list ,@(loop for (name value) in bindings collect `(cons ,name ,value)))
                                  (lambda () ,@body)))

(defun call-with-framework-variables (bindings function)
  "Call FUNCTION with the current framework's variables bound according to BINDINGS, conses of name and value. Skip variables
that do not exist or have no value."
  (declare (type function function))
  (let ((bindings (loop for (name . value) in bindings
                        for symbol = (find-symbol name (framework-package *framework*))
                        when (and symbol (boundp symbol))
                          collect (cons symbol value))))
    (progv (mapcar #'car bindings) (mapcar #'cdr bindings)
      (funcall function))))

(defun report-stream-variables ()
  "Return the variables that hold the report streams of the loaded frameworks."
  (loop for framework in (loaded-frameworks)
        append (loop for (name . package) in (framework-streams framework)
                     for symbol = (and (find-package package) (find-symbol name package))
                     when (and symbol (boundp symbol))
                       collect symbol)))

(defun framework-condition-p (condition)
  "Return true when the class of CONDITION belongs to a framework's package. When a check fails, a framework signals
such a condition and handles it."
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
  "Run TESTS of FRAMEWORK in the current test run. Return the values that the framework's own function would return."
  (let ((*framework* framework))
    (funcall (framework-runner framework) tests)))
