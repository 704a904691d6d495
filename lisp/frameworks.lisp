;;;; The test frameworks that are known, each through its own functions. None of them is in the image when this is compiled:
;;;; their symbols are looked up when they are needed, and one that a version lacks is an error that names it.

(in-package "SBCL-HOST")

(defstruct (framework (:copier nil) (:predicate nil))
  "A test framework."
  (title "" :type string :read-only t)
  ;; The names of its packages; the first one has its functions.
  (packages '() :type list :read-only t)
  ;; Its functions that run tests, by which a system's test-op does it: conses of a name and the name of a function of the
  ;; arguments that returns the tests meant.
  (entries '() :type list :read-only t)
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

(defun new-verdict (test)
  "Return a verdict for TEST of the framework."
  (let ((name (framework-test-name *framework* test)))
    (make-verdict :framework (framework-title *framework*)
                  :name name
                  :title (if (stringp name) name (type-name-text name)))))

(defun symbol-home (name)
  "Return the package of NAME, if that is a symbol."
  (and (symbolp name) (symbol-package name)))

(defun run-with (framework tests)
  "Run TESTS of FRAMEWORK in this run. Return what its own function would."
  (let ((*framework* framework))
    (funcall (framework-runner framework) tests)))

;;; FiveAM

(define-framework "FiveAM" ("IT.BESE.FIVEAM")
  :entries (("RUN" . fiveam-tests-of))
  :tests fiveam-tests :name fiveam-name :home fiveam-home :groups fiveam-groups :runner run-fiveam)

(defun fiveam-tests ()
  "Return all tests."
  (loop for test being the hash-values of (symbol-value (their-symbol "*TEST*"))
        when (their-type-p test "TEST-CASE")
          collect test))

(defun fiveam-name (test)
  "Return the name of TEST."
  (their-slot test "NAME"))

(defun fiveam-home (test)
  "Return the package of TEST."
  (symbol-home (fiveam-name test)))

(defun fiveam-tests-of (&optional (spec (symbol-value (their-symbol "*SUITE*"))) &rest options)
  "Return the tests that RUN runs for SPEC, each once, in that order."
  (declare (ignore options))
  (let ((tests '())
        (seen (make-hash-table :test 'eq)))
    (labels ((visit (spec)
               (let ((test (if (symbolp spec) (call-theirs "GET-TEST" spec) spec)))
                 (cond ((null test))
                       ((consp test) (mapc #'visit test))
                       ((gethash test seen))
                       ((their-type-p test "TEST-CASE")
                        (setf (gethash test seen) t)
                        (push test tests))
                       ((their-type-p test "TEST-SUITE")
                        (setf (gethash test seen) t)
                        (loop for member being the hash-values of (their-slot test "TESTS")
                              do (visit member)))))))
      (visit spec))
    (nreverse tests)))

(defun fiveam-groups (wanted-p)
  "Return the tests of the suites for whose names WANTED-P is true."
  (declare (type function wanted-p))
  (loop for name being the hash-keys of (symbol-value (their-symbol "*TEST*")) using (hash-value test)
        when (and name (their-type-p test "TEST-SUITE") (funcall wanted-p name))
          append (fiveam-tests-of name)))

(defun run-fiveam (tests)
  "Run TESTS and return their results as RUN does, the last one first."
  (let ((run (fdefinition (their-symbol "RUN")))
        (silence (make-broadcast-stream))
        (all '()))
    (with-their-variables (("*ON-ERROR*" nil) ("*ON-FAILURE*" nil) ("*DEBUG-ON-ERROR*" nil) ("*DEBUG-ON-FAILURE*" nil)
                           ("*PRINT-NAMES*" nil) ("*TEST-DRIBBLE*" silence)
                           ("*!*" nil) ("*!!*" nil) ("*!!!*" nil))
      (dolist (test tests)
        (let* ((verdict (new-verdict test))
               ;; Others that it depends on are run as well, and told of by themselves.
               (results (remove test (first (call-as-test verdict (lambda () (funcall run (fiveam-name test)))))
                                :key (lambda (result) (their-slot result "TEST-CASE")) :test-not #'eq)))
          (setf all (append results all))
          (call-as-test verdict (lambda () (mapc (lambda (result) (add-fiveam-result verdict result))
                                                 (reverse results))))
          (conclude verdict))))
    all))

(defun add-fiveam-result (verdict result)
  "Add RESULT of a check to VERDICT."
  (cond ((their-type-p result "TEST-PASSED")
         (incf (verdict-passed-checks verdict)))
        ((their-type-p result "TEST-SKIPPED")
         (when (and (eq (verdict-status verdict) :passed) (zerop (verdict-passed-checks verdict)))
           (setf (verdict-status verdict) :skipped
                 (verdict-message verdict) (cut-text (princ-to-string (their-slot result "REASON"))))))
        ((their-type-p result "UNEXPECTED-TEST-FAILURE")
         (end-with-condition verdict (their-slot result "ACTUAL-CONDITION")))
        (t
         (add-check verdict (fiveam-check (their-slot result "TEST-EXPR") (their-slot result "REASON"))))))

(defun split-at (text separators)
  "Return the parts of TEXT between SEPARATORS, strings that come in this order, without blanks around them; or NIL when
one is missing."
  (let ((start 0)
        (parts '()))
    (dolist (separator separators
                       (nreverse (cons (string-trim '(#\Space #\Newline) (subseq text start)) parts)))
      (let ((end (search separator text :start2 start)))
        (unless end (return nil))
        (push (string-trim '(#\Space #\Newline) (subseq text start end)) parts)
        (setf start (+ end (length separator)))))))

(defun fiveam-check (form reason)
  "Return the check of FORM that failed for REASON, a string that IS makes of the form, its value and the expected one."
  (let ((evaluated (format nil "~% evaluated to ~%"))
        (shown (shown-text form))
        (reason (if (stringp reason) reason "")))
    (flet ((try (separators make)
             (let ((parts (split-at reason (cons evaluated separators))))
               (when parts
                 (return-from fiveam-check (funcall make (mapcar #'cut-text parts)))))))
      (try (list (format nil "~% which is not ~%") (format nil "~% to ~%"))
           (lambda (parts) (make-check :form form :shown shown :expected (fourth parts) :actual (second parts))))
      (try (list (format nil "~% which is ~%") (format nil "~%to ~%") " (it should not be)")
           (lambda (parts) (make-check :form form :shown shown :expected (format nil "anything but ~A" (fourth parts))
                                       :actual (second parts))))
      (try (list (format nil "~% which does not satisfy ~%"))
           (lambda (parts) (make-check :form form :shown shown :expected (format nil "what satisfies ~A" (third parts))
                                       :actual (second parts))))
      (try (list (format nil "~% which satisfies ~%") " (it should not)")
           (lambda (parts) (make-check :form form :shown shown
                                       :expected (format nil "what does not satisfy ~A" (third parts))
                                       :actual (second parts)))))
    (make-check :form form :shown shown :message (cut-text (string-trim '(#\Space #\Newline) reason)))))

;;; sb-rt, and the RT that it comes from

(define-framework "sb-rt" ("SB-RT")
  :entries (("DO-TESTS" . rt-tests-of))
  :tests rt-tests :name rt-name :home rt-home :groups rt-groups :runner run-rt)

(define-framework "RT" ("REGRESSION-TEST")
  :entries (("DO-TESTS" . rt-tests-of))
  :tests rt-tests :name rt-name :home rt-home :groups rt-groups :runner run-rt)

(defun rt-tests ()
  "Return all tests: lists of name, form and values."
  (loop for (nil . test) in (rest (symbol-value (their-symbol "*ENTRIES*")))
        collect test))

(defun rt-tests-of (&rest arguments)
  "Return the tests that DO-TESTS runs."
  (declare (ignore arguments))
  (rt-tests))

(defun rt-name (test)
  "Return the name of TEST."
  (first test))

(defun rt-home (test)
  "Return the package of TEST: its name's, or the one that most symbols of its form belong to."
  (let ((home (symbol-home (first test))))
    (if (and home (not (eq home (find-package "KEYWORD"))))
        home
        (labels ((visit (object)
                   (cond ((consp object) (visit (car object)) (visit (cdr object)))
                         ((and object (symbolp object) (symbol-package object) (not (system-symbol-p object)))
                          (return-from rt-home (symbol-package object))))))
          (visit (second test))))))

(defun rt-groups (wanted-p)
  "There are none."
  (declare (ignore wanted-p))
  '())

(defun run-rt (tests)
  "Run TESTS. Return what DO-TESTS does: true when none failed unexpectedly, true when none failed, and those that did."
  (let ((expected (let ((variable (find-symbol "*EXPECTED-FAILURES*" (framework-package *framework*))))
                    (and variable (boundp variable) (symbol-value variable))))
        (failed '()))
    (dolist (test tests)
      (let* ((verdict (new-verdict test))
             (name (first test))
             (output (make-kept-output *standard-output*))
             (passed (first (call-as-test verdict (lambda ()
                                                    (let ((*standard-output* output))
                                                      (call-theirs "DO-TEST" name)))))))
        (call-as-test verdict (lambda () (add-rt-result verdict test passed output)))
        (unless passed
          (push name failed)
          (when (member name expected :test #'equal)
            (setf (verdict-status verdict) :skipped
                  (verdict-message verdict) "It fails, as is expected of it.")))
        (conclude verdict)))
    (let ((failed (nreverse failed)))
      (values (subsetp failed expected :test #'equal) (null failed) failed))))

(defun add-rt-result (verdict test passed output)
  "Add to VERDICT what TEST came to, which printed to OUTPUT, the framework's report included."
  (let* ((text (kept-text output))
         (report (and (not passed) (search "Test " text :from-end t)))
         (actual (and report (search "Actual value" text :start2 report)))
         (start (and actual (search ": " text :start2 actual))))
    (forget-kept output report)
    (when (and (eq (verdict-status verdict) :passed) (null (verdict-message verdict)))
      (if passed
          (incf (verdict-passed-checks verdict))
          (destructuring-bind (name form . values) test
            (declare (ignore name))
            (let* ((value (and start (string-trim '(#\Space #\Newline) (subseq text (+ start 2)))))
                   (condition (signalled-value value (verdict-signalled verdict))))
              (if condition
                  (end-with-condition verdict condition)
                  (add-check verdict
                             (make-check :form form :shown (shown-text form)
                                         :expected (format nil "~{~A~^, ~}" (mapcar #'shown-text values))
                                         :actual (and value (cut-text (string-right-trim "." value)))))))))))
  verdict)

(defun signalled-value (text signalled)
  "Return the condition of the newest of SIGNALLED that TEXT, of the values of a test, begins with as that prints; or NIL."
  (let ((condition (and signalled (signalled-condition (first signalled)))))
    (when (and text condition (eql 2 (mismatch "#<" text)))
      (let ((shown (guarded (prin1-to-string condition) (failure) nil)))
        (and shown
             ;; The address at its end may be another one.
             (let ((length (or (position #\{ shown) (length shown))))
               (eql length (or (mismatch shown text :end1 length) length)))
             condition)))))

(defconstant +kept-output+ 8000
  "Characters of the end of what a test prints that are kept back, for the framework's report is among them.")

(defclass kept-output (sb-gray:fundamental-character-output-stream)
  ((target :initarg :target :reader kept-target)
   (text :initform (make-string-output-stream) :reader kept-stream)
   (count :initform 0 :accessor kept-count)
   (column :initform 0 :accessor kept-column))
  (:documentation "A stream that hands on what is printed to it later, but for the last of it."))

(defun make-kept-output (target)
  "Return a stream that hands what is printed to it on to TARGET."
  (make-instance 'kept-output :target target))

(defun hand-on-kept (stream)
  "Have STREAM hand on all but the last of its text when it is long."
  (when (> (kept-count stream) (* 4 +kept-output+))
    (let* ((text (get-output-stream-string (kept-stream stream)))
           (end (- (length text) +kept-output+)))
      (write-string text (kept-target stream) :end end)
      (write-string text (kept-stream stream) :start end)
      (setf (kept-count stream) +kept-output+))))

(defmethod sb-gray:stream-write-char ((stream kept-output) character)
  (write-char character (kept-stream stream))
  (incf (kept-count stream))
  (setf (kept-column stream) (if (char= character #\Newline) 0 (1+ (kept-column stream))))
  (hand-on-kept stream)
  character)

(defmethod sb-gray:stream-write-string ((stream kept-output) string &optional (start 0) end)
  (let* ((end (or end (length string)))
         (newline (position #\Newline string :start start :end end :from-end t)))
    (write-string string (kept-stream stream) :start start :end end)
    (incf (kept-count stream) (- end start))
    (setf (kept-column stream) (if newline (- end newline 1) (+ (kept-column stream) (- end start))))
    (hand-on-kept stream)
    string))

(defmethod sb-gray:stream-line-column ((stream kept-output))
  (kept-column stream))

(defun kept-text (stream)
  "Return what STREAM keeps back."
  (let ((text (get-output-stream-string (kept-stream stream))))
    (write-string text (kept-stream stream))
    text))

(defun forget-kept (stream end)
  "Have STREAM hand on what it keeps back up to END, NIL for all of it, and forget the rest."
  (let ((text (get-output-stream-string (kept-stream stream))))
    (write-string text (kept-target stream) :end end)))

;;; Parachute: a report of our own, by which its tests are watched and collected, as its manual has it

(define-framework "Parachute" ("ORG.SHIRAKUMO.PARACHUTE" "PARACHUTE")
  :entries (("TEST" . parachute-tests-of))
  :tests parachute-tests :name parachute-name :home parachute-home :groups parachute-groups :runner run-parachute)

(defun parachute-tests ()
  "Return all tests."
  (loop for package in (call-theirs "TEST-PACKAGES")
        append (call-theirs "PACKAGE-TESTS" package)))

(defun parachute-name (test)
  "Return the name of TEST, a symbol or string."
  (their-slot test "NAME"))

(defun parachute-home (test)
  "Return the package of TEST."
  (their-slot test "HOME"))

(defun parachute-tests-of (designator &rest options)
  "Return the tests that TEST runs for DESIGNATOR."
  (declare (ignore options))
  (cond ((consp designator) (mapcan #'parachute-tests-of designator))
        ((their-type-p designator "TEST") (list designator))
        ((packagep designator) (copy-list (call-theirs "PACKAGE-TESTS" designator)))
        ((call-theirs "FIND-TEST" designator) (list (call-theirs "FIND-TEST" designator)))
        ((find-package designator) (copy-list (call-theirs "PACKAGE-TESTS" designator)))
        (t (error "No test or package found for ~S." designator))))

(defun parachute-groups (wanted-p)
  "There are none: a test that has others as its children is a test."
  (declare (ignore wanted-p))
  '())

(defglobal **parachute-report** nil
  "A cons of the package of Parachute and the name of the class of reports that was made for it; or NIL.")

(defun parachute-report ()
  "Return the name of a class of reports whose tests are run by CALL-AS-TEST."
  (let ((package (framework-package *framework*)))
    (unless (eq package (car **parachute-report**))
      (let ((name (make-symbol "REPORT"))
            (eval-in-context (their-symbol "EVAL-IN-CONTEXT"))
            (status (their-symbol "STATUS")))
        (handler-bind ((warning #'muffle-warning))
          (funcall
           (compile nil `(lambda ()
                           (defclass ,name (,(their-symbol "REPORT")) ())
                           (defmethod ,eval-in-context :around ((report ,name) (result ,(their-symbol "RESULT")))
                             (watch-parachute-result result
                                                     (lambda () (call-next-method))
                                                     (lambda (status) (setf (,status result) status))))))))
        (setf **parachute-report** (cons package name))))
    (cdr **parachute-report**)))

(defvar *parachute-conditions* '()
  "Conditions that results of the test that runs ended with: conses of result and condition.")

(defun watch-parachute-result (result function set-status)
  "Call FUNCTION, which evaluates RESULT, a test's as a test. SET-STATUS is a function that sets its status."
  (declare (type function function set-status))
  (unless (eq :unknown (their-slot result "STATUS"))
    (return-from watch-parachute-result (funcall function)))
  (flet ((evaluate ()
           (handler-case (funcall function)
             (error (condition)
               (push (cons result condition) *parachute-conditions*)
               (funcall set-status :failed)))))
    (if (their-type-p result "TEST-RESULT")
        (let ((verdict (new-verdict (their-slot result "EXPRESSION")))
              (*parachute-conditions* '()))
          (call-as-test verdict #'evaluate)
          (unless (eq :passed (verdict-status verdict))
            (funcall set-status :failed))
          (call-as-test verdict (lambda () (add-parachute-results verdict result)))
          ;; One that only holds others together is none.
          (unless (and (eq :passed (verdict-status verdict))
                       (zerop (verdict-passed-checks verdict))
                       (some (lambda (child) (their-type-p child "TEST-RESULT")) (their-slot result "RESULTS")))
            (conclude verdict)))
        (evaluate))))

(defun add-parachute-results (verdict result)
  "Add to VERDICT what RESULT, of its test, has come to, but for what its children have."
  (when (and (eq :skipped (their-slot result "STATUS")) (eq :passed (verdict-status verdict)))
    (setf (verdict-status verdict) :skipped))
  (let ((condition (cdr (assoc result *parachute-conditions*))))
    (when condition
      (end-with-condition verdict condition)))
  (let ((skipped 0))
    (labels ((visit (parent)
               (loop for child across (their-slot parent "RESULTS")
                     do (cond ((their-type-p child "TEST-RESULT"))
                              ((their-type-p child "CONTROLLING-RESULT")
                               (when (eq :skipped (their-slot child "CHILD-STATUS"))
                                 (incf skipped)))
                              ((their-type-p child "PARENT-RESULT") (visit child))
                              (t (case (their-slot child "STATUS")
                                   (:passed (incf (verdict-passed-checks verdict)))
                                   (:failed (add-parachute-check verdict child))))))))
      (visit result))
    (when (and (plusp skipped) (eq :passed (verdict-status verdict)) (zerop (verdict-passed-checks verdict)))
      (setf (verdict-status verdict) :skipped)))
  ;; A time limit of its own.
  (when (and (eq :failed (their-slot result "STATUS"))
             (eq :passed (verdict-status verdict))
             (notany (lambda (child) (eq :failed (their-slot child "STATUS"))) (their-slot result "RESULTS")))
    (setf (verdict-status verdict) :failed
          (verdict-message verdict) (cut-text (princ-to-string (their-slot result "DESCRIPTION"))))))

(defun add-parachute-check (verdict result)
  "Add RESULT of a check that failed to VERDICT."
  (let* ((form (their-slot result "EXPRESSION"))
         (condition (cdr (assoc result *parachute-conditions*)))
         (compares (their-type-p result "COMPARISON-RESULT"))
         (description (their-slot result "DESCRIPTION")))
    (when condition
      (end-with-condition verdict condition))
    (add-check verdict
               (make-check :form form :shown (shown-text form)
                           :expected (and compares (shown-text (their-slot result "EXPECTED")))
                           :actual (cond (condition (report-text condition))
                                         ((slot-boundp result (their-symbol "VALUE"))
                                          (shown-text (their-slot result "VALUE"))))
                           :message (and (stringp description) (cut-text description))))))

(defun run-parachute (tests)
  "Run TESTS, each with its children, and return the report."
  (let ((roots (remove-if (lambda (test)
                            (loop for parent = (their-slot test "PARENT") then (their-slot parent "PARENT")
                                  while parent
                                    thereis (member parent tests)))
                          tests)))
    (call-theirs "TEST" roots :report (parachute-report))))

;;; Rove

(define-framework "Rove" ("ROVE" "ROVE/CORE/RESULT" "ROVE/CORE/ASSERTION" "ROVE/CORE/TEST")
  :entries (("RUN" . rove-tests-of-systems) ("RUN-SUITE" . rove-tests-of-suite))
  :tests rove-tests :name rove-name :home rove-home :groups rove-groups :runner run-rove)

(defun rove-suites ()
  "Return all suites."
  (call-theirs "ALL-SUITES"))

(defun rove-suite-tests (suite)
  "Return the tests of SUITE: lists of name and suite."
  (loop for name in (funcall (their-symbol "SUITE-TESTS" "ROVE/CORE/SUITE/PACKAGE") suite)
        collect (list name suite)))

(defun rove-tests ()
  "Return all tests."
  (mapcan #'rove-suite-tests (rove-suites)))

(defun rove-name (test)
  "Return the name of TEST."
  (first test))

(defun rove-home (test)
  "Return the package of TEST."
  (slot-value (second test) (their-symbol "PACKAGE" "ROVE/CORE/SUITE/PACKAGE")))

(defun rove-groups (wanted-p)
  "There are none: a suite is a package."
  (declare (ignore wanted-p))
  '())

(defun rove-tests-of-suite (suite)
  "Return the tests that RUN-SUITE runs for SUITE, or a package."
  (rove-suite-tests (if (or (packagep suite) (stringp suite) (symbolp suite))
                        (call-theirs "FIND-SUITE" suite)
                        suite)))

(defun rove-tests-of-systems (systems &rest options)
  "Return the tests that RUN runs for SYSTEMS, designators of systems."
  (declare (ignore options))
  (loop for designator in (if (listp systems) systems (list systems))
        for system = (asdf:find-system designator)
        for package = (find-package (string-upcase (asdf:component-name system)))
        append (progn
                 (load-for-tests system)
                 (loop for suite in (remove-duplicates
                                     (append (funcall (their-symbol "SYSTEM-SUITES" "ROVE/CORE/SUITE/PACKAGE") system)
                                             (and package (list (call-theirs "FIND-SUITE" package)))))
                       when suite
                         append (rove-suite-tests suite)))))

(defun run-rove (tests)
  "Run TESTS with what their suites have done before and after. Return true when none failed, and the results."
  (let ((stats (make-instance (their-symbol "STATS" "ROVE/CORE/STATS")))
        (package "ROVE/CORE/SUITE/PACKAGE"))
    (funcall (their-symbol "INITIALIZE" "ROVE/CORE/STATS") stats)
    (progv (list (their-symbol "*STATS*" "ROVE/CORE/STATS") (their-symbol "*DEBUG-ON-ERROR*" "ROVE/CORE/ASSERTION"))
        (list stats nil)
      (dolist (suite (remove-duplicates (mapcar #'second tests) :from-end t))
        (flet ((of-suite (name) (funcall (their-symbol name package) suite))
               (call-hooks (hooks) (loop for (nil . hook) in (reverse hooks) do (funcall hook))))
          (let ((*package* (slot-value suite (their-symbol "PACKAGE" package))))
            (flet ((around (name)
                     (let ((function (of-suite name)))
                       (when function
                         (call-outside-tests (format nil "~A of ~A" name (of-suite "SUITE-NAME")) function)))))
              (around "SUITE-SETUP")
              (loop for test in tests
                    when (eq suite (second test))
                      do (let ((verdict (new-verdict test))
                               (before (length (their-results stats))))
                           (call-as-test verdict
                                         (lambda ()
                                           (unwind-protect
                                                (progn (call-hooks (of-suite "SUITE-BEFORE-HOOKS"))
                                                       (funcall (call-theirs "GET-TEST" (first test))))
                                             (call-hooks (of-suite "SUITE-AFTER-HOOKS")))))
                           (call-as-test verdict
                                         (lambda ()
                                           (dolist (result (ldiff (their-results stats)
                                                                  (last (their-results stats) before)))
                                             (add-rove-result verdict result))))
                           (conclude verdict)))
              (around "SUITE-TEARDOWN"))))))
    (values (funcall (their-symbol "PASSEDP" "ROVE/CORE/STATS") stats) (their-results stats))))

(defun their-results (stats)
  "Return what was recorded in STATS, newest first."
  (funcall (their-symbol "STATS-RESULTS" "ROVE/CORE/STATS") stats))

(defun add-rove-result (verdict result)
  "Add RESULT, of a test, a part of one, or an assertion, to VERDICT."
  (flet ((of-class-p (name) (typep result (their-symbol name "ROVE/CORE/RESULT")))
         (value (name) (funcall (their-symbol name "ROVE/CORE/RESULT") result)))
    (cond ((of-class-p "TEST")
           (dolist (name '("FAILED-TESTS" "PASSED-TESTS" "PENDING-TESTS"))
             (dolist (part (value name))
               (add-rove-result verdict part))))
          ((of-class-p "FAILED-ASSERTION")
           (let ((reason (value "ASSERTION-REASON")))
             (when (typep reason 'condition)
               (end-with-condition verdict reason))
             (add-check verdict (rove-check result reason))))
          ((of-class-p "PENDING-ASSERTION")
           (when (and (eq :passed (verdict-status verdict)) (zerop (verdict-passed-checks verdict)))
             (setf (verdict-status verdict) :skipped)))
          (t
           (when (eq :skipped (verdict-status verdict))
             (setf (verdict-status verdict) :passed))
           (incf (verdict-passed-checks verdict))))))

(defun rove-check (assertion reason)
  "Return the check of ASSERTION, which failed, for REASON if that is a condition."
  (flet ((value (name) (funcall (their-symbol name "ROVE/CORE/RESULT") assertion)))
    (let ((form (value "ASSERTION-FORM"))
          (place (and (find-symbol "ASSERTION-SOURCE-LOCATION" "ROVE/CORE/RESULT")
                      (value "ASSERTION-SOURCE-LOCATION"))))
      (make-check :form (and (consp form) form)
                  :shown (and (consp form) (shown-text form))
                  :expected (and (consp form)
                                 (if (slot-value assertion (their-symbol "NEGATIVE" "ROVE/CORE/RESULT")) "false" "true"))
                  :actual (if (typep reason 'condition)
                              (report-text reason)
                              (format nil "~{~A~^, ~}"
                                      (loop for argument in (value "ASSERTION-ARGS")
                                            for of in (value "ASSERTION-VALUES")
                                            unless (constantp argument)
                                              collect (format nil "~A = ~A" (shown-text argument) (shown-text of)))))
                  :message (let ((description (slot-value assertion (their-symbol "DESC" "ROVE/CORE/RESULT"))))
                             (and (stringp description) (cut-text description)))
                  :file (and (consp place) (stringp (car place)) (car place))
                  :line (and (consp place) (stringp (car place)) (consp (cdr place)) (integerp (second place))
                             (second place))))))

;;; lisp-unit2

(define-framework "lisp-unit2" ("LISP-UNIT2")
  :entries (("RUN-TESTS" . unit2-tests-of))
  :tests unit2-tests :name unit2-name :home unit2-home :groups unit2-groups :runner run-unit2)

(defun unit2-tests ()
  "Return all tests."
  (copy-list (call-theirs "LIST-TESTS")))

(defun unit2-name (test)
  "Return the name of TEST."
  (their-slot test "NAME"))

(defun unit2-home (test)
  "Return the package of TEST."
  (symbol-home (unit2-name test)))

(defun unit2-tests-of (&rest options &key &allow-other-keys)
  "Return the tests that RUN-TESTS runs for OPTIONS."
  (apply #'call-theirs "GET-TESTS"
         (loop for (key value) on options by #'cddr
               when (member key '(:tests :tags :package :reintern-package :exclude-tests :exclude-tags))
                 append (list key value))))

(defun unit2-groups (wanted-p)
  "Return the tests with those tags for which WANTED-P is true."
  (declare (type function wanted-p))
  (let ((tags (remove-if-not (lambda (tag) (and (symbolp tag) (funcall wanted-p tag))) (call-theirs "LIST-TAGS"))))
    (and tags (call-theirs "GET-TESTS" :tags tags))))

(defun run-unit2 (tests)
  "Run TESTS and return their results as RUN-TESTS does."
  (let ((all (make-instance (their-symbol "TEST-RESULTS-DB") :tests tests))
        (*debugger-hook* nil))
    (dolist (test tests all)
      (let* ((verdict (new-verdict test))
             (run (fdefinition (their-symbol "RUN-TESTS")))
             (results (first (call-as-test verdict (lambda () (funcall run :tests (list (unit2-name test))))))))
        (when results
          (call-as-test verdict
                        (lambda ()
                          (loop for result across (their-slot results "RESULTS")
                                do (call-theirs "RECORD-RESULT" result all)
                                   (add-unit2-result verdict result)))))
        (conclude verdict)))))

(defun unit2-list (result name)
  "Return what RESULT has collected under NAME."
  (let ((collected (call-theirs name result)))
    (if (listp collected) collected (call-theirs "HEAD" collected))))

(defun add-unit2-result (verdict result)
  "Add RESULT of a test to VERDICT."
  (incf (verdict-passed-checks verdict) (length (unit2-list result "PASSED")))
  (dolist (failure (unit2-list result "FAILED"))
    (let ((form (their-slot failure "FORM")))
      (flet ((values-text (name)
               (let ((values (their-slot failure name)))
                 (if (listp values) (format nil "~{~A~^, ~}" (mapcar #'shown-text values)) (shown-text values)))))
        (add-check verdict (make-check :form form :shown (shown-text form)
                                       :expected (values-text "EXPECTED") :actual (values-text "ACTUAL")
                                       :message (and (their-slot failure "EXTRAS")
                                                     (shown-text (their-slot failure "EXTRAS"))))))))
  (let ((condition (first (unit2-list result "ERRORS"))))
    (when condition
      (end-with-condition verdict condition))))
