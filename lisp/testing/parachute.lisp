;;;; Running the tests of Parachute. A report class of our own observes and collects the tests, as Parachute's manual
;;;; describes.

(in-package "SBCL-HOST/TESTING")

(define-framework "Parachute" ("ORG.SHIRAKUMO.PARACHUTE" "PARACHUTE")
  :entries (("TEST" . parachute-selected-tests))
  :tests parachute-tests :name parachute-name :home parachute-home :groups parachute-groups :runner run-parachute)

(defun parachute-tests ()
  "Return all tests."
  (loop for package in (call-framework "TEST-PACKAGES")
        append (call-framework "PACKAGE-TESTS" package)))

(defun parachute-name (test)
  "Return the name of TEST. The name is a symbol or a string."
  (framework-slot test "NAME"))

(defun parachute-home (test)
  "Return the package of TEST."
  (framework-slot test "HOME"))

(defun parachute-selected-tests (designator &rest options)
  "Return the tests that Parachute's TEST would run for DESIGNATOR: a test, a package, the name of a test or package,
or a list of designators. Signal an error if DESIGNATOR names neither a test nor a package."
  (declare (ignore options))
  (cond ((consp designator) (mapcan #'parachute-selected-tests designator))
        ((framework-type-p designator "TEST") (list designator))
        ((packagep designator) (copy-list (call-framework "PACKAGE-TESTS" designator)))
        ((call-framework "FIND-TEST" designator) (list (call-framework "FIND-TEST" designator)))
        ((find-package designator) (copy-list (call-framework "PACKAGE-TESTS" designator)))
        (t (error "~S names neither a Parachute test nor a package." designator))))

(defun parachute-groups (wanted-p)
  "Return no tests: a parent of tests is itself a test."
  (declare (ignore wanted-p))
  '())

(defglobal **parachute-report** nil
  "A cons of Parachute's package and the name of the report class that was made for that package; or NIL before the class is
made.")

(defun parachute-report ()
  "Return the name of a report class that runs its tests by CALL-AS-TEST. Make the class if necessary."
  (let ((package (framework-package *framework*)))
    (unless (eq package (car **parachute-report**))
      (let ((name (make-symbol "REPORT"))
            (eval-in-context (framework-symbol "EVAL-IN-CONTEXT"))
            (status (framework-symbol "STATUS")))
        (handler-bind ((warning #'muffle-warning))
          (funcall
           (compile nil `(lambda ()
                           (defclass ,name (,(framework-symbol "REPORT")) ())
                           (defmethod ,eval-in-context :around ((report ,name) (result ,(framework-symbol "RESULT")))
                             (evaluate-parachute-result result
                                                        (lambda () (call-next-method))
                                                        (lambda (status) (setf (,status result) status))))))))
        (publish **parachute-report** (cons package name))))
    (cdr **parachute-report**)))

(defvar *parachute-conditions* '()
  "An alist for the running test. A key is a Parachute result whose evaluation was ended by an error, and its value is the
error.")

(defun evaluate-parachute-result (result function set-status)
  "Call FUNCTION, which evaluates RESULT. If RESULT is the result of a test that has not been evaluated before, run FUNCTION
as a test and record a verdict. SET-STATUS is a function that sets RESULT's status."
  (declare (type function function set-status))
  (unless (eq :unknown (framework-slot result "STATUS"))
    (return-from evaluate-parachute-result (funcall function)))
  (flet ((evaluate ()
           (handler-case (funcall function)
             (error (condition)
               (push (cons result condition) *parachute-conditions*)
               (funcall set-status :failed)))))
    (if (framework-type-p result "TEST-RESULT")
        (let ((verdict (new-verdict (framework-slot result "EXPRESSION")))
              (*parachute-conditions* '()))
          (call-as-test verdict #'evaluate)
          (unless (eq :passed (verdict-status verdict))
            (funcall set-status :failed))
          (call-as-test verdict (lambda () (add-parachute-results verdict result)))
          ;; Do not report a test that passed, made no check, and only groups other tests.
          (unless (and (eq :passed (verdict-status verdict))
                       (zerop (verdict-passed-checks verdict))
                       (some (lambda (child) (framework-type-p child "TEST-RESULT")) (framework-slot result "RESULTS")))
            (record-verdict verdict)))
        (evaluate))))

(defun add-parachute-results (verdict result)
  "Add the checks of RESULT, Parachute's result of a test, to VERDICT, but not the checks of child tests."
  (when (and (eq :skipped (framework-slot result "STATUS")) (eq :passed (verdict-status verdict)))
    (setf (verdict-status verdict) :skipped))
  (let ((condition (cdr (assoc result *parachute-conditions*))))
    (when condition
      (record-ending-condition verdict condition)))
  (let ((skipped 0))
    (labels ((visit (parent)
               (loop for child across (framework-slot parent "RESULTS")
                     do (cond ((framework-type-p child "TEST-RESULT"))
                              ((framework-type-p child "CONTROLLING-RESULT")
                               (when (eq :skipped (framework-slot child "CHILD-STATUS"))
                                 (incf skipped)))
                              ((framework-type-p child "PARENT-RESULT") (visit child))
                              (t (case (framework-slot child "STATUS")
                                   (:passed (incf (verdict-passed-checks verdict)))
                                   (:failed (add-parachute-check verdict child))))))))
      (visit result))
    (when (and (plusp skipped) (eq :passed (verdict-status verdict)) (zerop (verdict-passed-checks verdict)))
      (setf (verdict-status verdict) :skipped)))
  ;; If the test failed, but no error ended it and none of its children failed, it exceeded Parachute's own time limit.
  (when (and (eq :failed (framework-slot result "STATUS"))
             (eq :passed (verdict-status verdict))
             (notany (lambda (child) (eq :failed (framework-slot child "STATUS"))) (framework-slot result "RESULTS")))
    (setf (verdict-status verdict) :failed
          (verdict-message verdict) (cut-text (princ-to-string (framework-slot result "DESCRIPTION"))))))

(defun add-parachute-check (verdict result)
  "Add to VERDICT the check that RESULT, a failed Parachute result, describes."
  (let* ((form (framework-slot result "EXPRESSION"))
         (condition (cdr (assoc result *parachute-conditions*)))
         (compares (framework-type-p result "COMPARISON-RESULT"))
         (description (framework-slot result "DESCRIPTION")))
    (when condition
      (record-ending-condition verdict condition))
    (add-check verdict
               (make-check :form form :printed-form (shown-form form)
                           :expected (and compares (not condition) (shown-text (framework-slot result "EXPECTED")))
                           :actual (cond (condition nil)
                                         ((slot-boundp result (framework-symbol "VALUE"))
                                          (shown-text (framework-slot result "VALUE"))))
                           :message (and (stringp description) (cut-text description))))))

(defun run-parachute (tests)
  "Run TESTS, each with its children, and return Parachute's report."
  (let ((roots (remove-if (lambda (test)
                            (loop for parent = (framework-slot test "PARENT") then (framework-slot parent "PARENT")
                                  while parent
                                    thereis (member parent tests)))
                          tests)))
    (call-framework "TEST" roots :report (parachute-report))))
