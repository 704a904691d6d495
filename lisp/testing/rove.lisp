;;;; Running the tests of Rove.

(in-package "SBCL-HOST/TESTING")

(define-framework "Rove" ("ROVE" "ROVE/CORE/RESULT" "ROVE/CORE/ASSERTION" "ROVE/CORE/TEST")
  :entries (("RUN" . rove-selected-system-tests) ("RUN-SUITE" . rove-selected-suite-tests))
  :streams (("*REPORT-STREAM*" . "ROVE/REPORTER"))
  :tests rove-tests :name rove-name :home rove-home :groups rove-groups :runner run-rove)

(defun rove-suites ()
  "Return all suites."
  (call-framework "ALL-SUITES"))

(defun rove-suite-tests (suite)
  "Return the tests of SUITE as lists of a test's name and SUITE."
  (loop for name in (funcall (framework-symbol "SUITE-TESTS" "ROVE/CORE/SUITE/PACKAGE") suite)
        collect (list name suite)))

(defun rove-tests ()
  "Return all tests."
  (mapcan #'rove-suite-tests (rove-suites)))

(defun rove-name (test)
  "Return the name of TEST."
  (first test))

(defun rove-home (test)
  "Return the package of TEST, which is its suite's package."
  (slot-value (second test) (framework-symbol "PACKAGE" "ROVE/CORE/SUITE/PACKAGE")))

(defun rove-groups (wanted-p)
  "Return no tests: Rove's suites are packages rather than named groups."
  (declare (ignore wanted-p))
  '())

(defun rove-selected-suite-tests (suite)
  "Return the tests that Rove's RUN-SUITE would run for SUITE, a suite or the designator of its package."
  (rove-suite-tests (if (or (packagep suite) (stringp suite) (symbolp suite))
                        (call-framework "FIND-SUITE" suite)
                        suite)))

(defun rove-selected-system-tests (systems &rest options)
  "Load SYSTEMS, a system designator or a list of designators, and return the tests that Rove's RUN would run for them."
  (declare (ignore options))
  (loop for designator in (if (listp systems) systems (list systems))
        for system = (asdf:find-system designator)
        for package = (find-package (string-upcase (asdf:component-name system)))
        append (progn
                 (load-for-tests system)
                 (loop for suite in (remove-duplicates
                                     (append (funcall (framework-symbol "SYSTEM-SUITES" "ROVE/CORE/SUITE/PACKAGE") system)
                                             (and package (list (call-framework "FIND-SUITE" package)))))
                       when suite
                         append (rove-suite-tests suite)))))

(defun run-rove (tests)
  "Run TESTS, with the setup, hooks and teardown of their suites. Return two values: true if
no test failed, and the results."
  (let ((stats (make-instance (framework-symbol "STATS" "ROVE/CORE/STATS")))
        (package "ROVE/CORE/SUITE/PACKAGE"))
    (funcall (framework-symbol "INITIALIZE" "ROVE/CORE/STATS") stats)
    (progv (list (framework-symbol "*STATS*" "ROVE/CORE/STATS") (framework-symbol "*DEBUG-ON-ERROR*" "ROVE/CORE/ASSERTION"))
        (list stats nil)
      (dolist (suite (remove-duplicates (mapcar #'second tests) :from-end t))
        (flet ((suite-value (name) (funcall (framework-symbol name package) suite))
               (call-hooks (hooks) (loop for (nil . hook) in (reverse hooks) do (funcall hook))))
          (let ((*package* (slot-value suite (framework-symbol "PACKAGE" package))))
            (flet ((run-fixture (name)
                     (let ((function (suite-value name)))
                       (when function
                         (call-outside-tests (format nil "~A of ~A" name (suite-value "SUITE-NAME")) function)))))
              (run-fixture "SUITE-SETUP")
              (loop for test in tests
                    when (eq suite (second test))
                      do (let ((verdict (new-verdict test))
                               (before (length (rove-results stats))))
                           (call-as-test verdict
                                         (lambda ()
                                           (unwind-protect
                                                (let ((function (call-framework "GET-TEST" (first test))))
                                                  (call-hooks (suite-value "SUITE-BEFORE-HOOKS"))
                                                  (if function
                                                      (funcall function)
                                                      (record-removed-test verdict)))
                                             (call-hooks (suite-value "SUITE-AFTER-HOOKS")))))
                           (call-as-test verdict
                                         (lambda ()
                                           (dolist (result (ldiff (rove-results stats)
                                                                  (last (rove-results stats) before)))
                                             (add-rove-result verdict result))))
                           (record-verdict verdict)))
              (run-fixture "SUITE-TEARDOWN"))))))
    (values (funcall (framework-symbol "PASSEDP" "ROVE/CORE/STATS") stats) (rove-results stats))))

(defun rove-results (stats)
  "Return the results that Rove has recorded in STATS, newest first."
  (funcall (framework-symbol "STATS-RESULTS" "ROVE/CORE/STATS") stats))

(defun add-rove-result (verdict result)
  "Add RESULT, Rove's result of a test, of a part of a test or of an assertion, to VERDICT."
  (flet ((result-class-p (name) (typep result (framework-symbol name "ROVE/CORE/RESULT")))
         (value (name) (funcall (framework-symbol name "ROVE/CORE/RESULT") result)))
    (cond ((result-class-p "TEST")
           (dolist (name '("FAILED-TESTS" "PASSED-TESTS" "PENDING-TESTS"))
             (dolist (part (value name))
               (add-rove-result verdict part))))
          ((result-class-p "FAILED-ASSERTION")
           (let ((reason (value "ASSERTION-REASON")))
             (when (typep reason 'condition)
               (record-ending-condition verdict reason))
             ;; Rove records an error outside of assertions as an assertion without a form.
             (unless (and (typep reason 'condition) (atom (value "ASSERTION-FORM")))
               (add-check verdict (rove-check result reason)))))
          ((result-class-p "PENDING-ASSERTION")
           (when (and (eq :passed (verdict-status verdict)) (zerop (verdict-passed-checks verdict)))
             (setf (verdict-status verdict) :skipped)))
          (t
           (when (eq :skipped (verdict-status verdict))
             (setf (verdict-status verdict) :passed))
           (incf (verdict-passed-checks verdict))))))

(defun rove-check (assertion reason)
  "Return a CHECK for ASSERTION, a failed assertion. REASON is the reason that Rove recorded: the condition that ended the
assertion, or another object."
  (flet ((value (name) (funcall (framework-symbol name "ROVE/CORE/RESULT") assertion)))
    (let ((form (value "ASSERTION-FORM"))
          (negative (slot-value assertion (framework-symbol "NEGATIVE" "ROVE/CORE/RESULT")))
          (location (and (find-symbol "ASSERTION-SOURCE-LOCATION" "ROVE/CORE/RESULT")
                         (value "ASSERTION-SOURCE-LOCATION")))
          (values (loop for argument in (value "ASSERTION-ARGS")
                        for argument-value in (value "ASSERTION-VALUES")
                        unless (if (consp argument) (eq 'quote (car argument)) (constantp argument))
                          collect (format nil "~A = ~A" (shown-text argument) (shown-text argument-value)))))
      (make-check :form (and (consp form) form)
                  :printed-form (and (consp form) (shown-form form))
                  :expected (and (consp form)
                                 (not (typep reason 'condition))
                                 (if negative "false" "true"))
                  :actual (cond ((typep reason 'condition) nil)
                                (values (format nil "~{~A~^, ~}" values))
                                ;; Rove does not record the value of an assertion. A failed positive assertion had the value
                                ;; NIL.
                                ((not negative) "NIL"))
                  :message (let ((description (slot-value assertion (framework-symbol "DESC" "ROVE/CORE/RESULT"))))
                             (and (stringp description) (cut-text description)))
                  :file (and (consp location) (stringp (car location)) (car location))
                  :line (and (consp location) (stringp (car location)) (consp (cdr location)) (integerp (second location))
                             (second location))))))
