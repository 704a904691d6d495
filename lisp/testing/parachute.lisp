;;;; Parachute, by a report of our own that watches and collects its tests, as its manual has it.

(in-package "SBCL-HOST/TESTING")

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
               (make-check :form form :shown (shown-form form)
                           :expected (and compares (not condition) (shown-text (their-slot result "EXPECTED")))
                           :actual (cond (condition nil)
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
