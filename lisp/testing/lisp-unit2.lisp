;;;; Running the tests of lisp-unit2.

(in-package "SBCL-HOST/TESTING")

(define-framework "lisp-unit2" ("LISP-UNIT2")
  :entries (("RUN-TESTS" . unit2-selected-tests)) :streams (("*TEST-STREAM*" . "LISP-UNIT2"))
  :tests unit2-tests :name unit2-name :home unit2-home :groups unit2-groups :runner run-unit2)

(defun unit2-tests ()
  "Return all tests."
  (copy-list (call-framework "LIST-TESTS")))

(defun unit2-name (test)
  "Return the name of TEST."
  (framework-slot test "NAME"))

(defun unit2-home (test)
  "Return the package of TEST, which is the home package of its name."
  (symbol-home (unit2-name test)))

(defun unit2-selected-tests (&rest options &key &allow-other-keys)
  "Return the tests that lisp-unit2's RUN-TESTS would run for OPTIONS, its keyword arguments."
  (apply #'call-framework "GET-TESTS"
         (loop for (key value) on options by #'cddr
               when (member key '(:tests :tags :package :reintern-package :exclude-tests :exclude-tags))
                 append (list key value))))

(defun unit2-groups (wanted-p)
  "Return the tests with a tag that satisfies WANTED-P."
  (declare (type function wanted-p))
  (let ((tags (remove-if-not (lambda (tag) (and (symbolp tag) (funcall wanted-p tag))) (call-framework "LIST-TAGS"))))
    (and tags (call-framework "GET-TESTS" :tags tags))))

(defun run-unit2 (tests)
  "Run TESTS and return their results as lisp-unit2's RUN-TESTS does."
  (let ((all (make-instance (framework-symbol "TEST-RESULTS-DB") :tests tests))
        (*debugger-hook* nil))
    (dolist (test tests all)
      (let* ((verdict (new-verdict test))
             (run (fdefinition (framework-symbol "RUN-TESTS")))
             (results (first (call-as-test verdict (lambda () (funcall run :tests (list (unit2-name test))))))))
        (when results
          (when (zerop (length (framework-slot results "RESULTS")))
            (record-removed-test verdict))
          (call-as-test verdict
                        (lambda ()
                          (loop for result across (framework-slot results "RESULTS")
                                do (call-framework "RECORD-RESULT" result all)
                                   (add-unit2-result verdict result)))))
        (record-verdict verdict)))))

(defun unit2-outcomes (result name)
  "Return a list of the outcomes that RESULT, the result of a test, has collected under NAME, such as PASSED or FAILED."
  (let ((collected (call-framework name result)))
    (if (listp collected) collected (call-framework "HEAD" collected))))

(defun add-unit2-result (verdict result)
  "Add RESULT, lisp-unit2's result of a test, to VERDICT."
  (incf (verdict-passed-checks verdict) (length (unit2-outcomes result "PASSED")))
  (dolist (failure (unit2-outcomes result "FAILED"))
    (let ((form (framework-slot failure "FORM")))
      (flet ((values-text (name)
               (let ((values (framework-slot failure name)))
                 (if (listp values) (format nil "~{~A~^, ~}" (mapcar #'shown-text values)) (shown-text values)))))
        (add-check verdict (make-check :form form :printed-form (shown-form form)
                                       :expected (values-text "EXPECTED") :actual (values-text "ACTUAL")
                                       ;; EXTRAS is a list of forms, each followed by its value.
                                       :message (let ((extras (framework-slot failure "EXTRAS")))
                                                  (and (consp extras)
                                                       (format nil "~{~*~A~^, ~}" (mapcar #'shown-text extras)))))))))
  (let ((condition (first (unit2-outcomes result "ERRORS"))))
    (when condition
      (record-ending-condition verdict condition))))
