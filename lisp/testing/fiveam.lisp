;;;; Running the tests of FiveAM.

(in-package "SBCL-HOST/TESTING")

(define-framework "FiveAM" ("IT.BESE.FIVEAM")
  :entries (("RUN" . fiveam-selected-tests)) :streams (("*TEST-DRIBBLE*" . "IT.BESE.FIVEAM"))
  :tests fiveam-tests :name fiveam-name :home fiveam-home :groups fiveam-groups :runner run-fiveam)

(defun fiveam-tests ()
  "Return all tests."
  (loop for test being the hash-values of (symbol-value (framework-symbol "*TEST*"))
        when (framework-type-p test "TEST-CASE")
          collect test))

(defun fiveam-name (test)
  "Return the name of TEST."
  (framework-slot test "NAME"))

(defun fiveam-home (test)
  "Return the package of TEST, which is the home package of its name."
  (symbol-home (fiveam-name test)))

(defun fiveam-selected-tests (&optional (spec (symbol-value (framework-symbol "*SUITE*"))) &rest options)
  "Return the tests that FiveAM's RUN would run for SPEC, each once, in FiveAM's order."
  (declare (ignore options))
  (let ((tests '())
        (seen (make-hash-table :test 'eq)))
    (labels ((visit (spec)
               (let ((test (if (symbolp spec) (call-framework "GET-TEST" spec) spec)))
                 (cond ((null test))
                       ((consp test) (mapc #'visit test))
                       ((gethash test seen))
                       ((framework-type-p test "TEST-CASE")
                        (setf (gethash test seen) t)
                        (push test tests))
                       ((framework-type-p test "TEST-SUITE")
                        (setf (gethash test seen) t)
                        (loop for member being the hash-values of (framework-slot test "TESTS")
                              do (visit member)))))))
      (visit spec))
    (nreverse tests)))

(defun fiveam-groups (wanted-p)
  "Return the tests of the suites whose names satisfy WANTED-P."
  (declare (type function wanted-p))
  (loop for name being the hash-keys of (symbol-value (framework-symbol "*TEST*")) using (hash-value test)
        when (and name (framework-type-p test "TEST-SUITE") (funcall wanted-p name))
          append (fiveam-selected-tests name)))

(defun run-fiveam (tests)
  "Run TESTS and return their results as FiveAM's RUN does, the last result first."
  (let ((run (fdefinition (framework-symbol "RUN")))
        (all '()))
    (with-framework-variables (("*ON-ERROR*" nil) ("*ON-FAILURE*" nil) ("*DEBUG-ON-ERROR*" nil) ("*DEBUG-ON-FAILURE*" nil)
                               ("*PRINT-NAMES*" nil) ("*TEST-DRIBBLE*" (make-broadcast-stream))
                               ("*!*" nil) ("*!!*" nil) ("*!!!*" nil))
      (call-without-failure-marks
       (lambda ()
         (dolist (test tests)
           (let* ((verdict (new-verdict test))
                  ;; An earlier test may have redefined or removed this test.
                  (test (call-framework "GET-TEST" (fiveam-name test)))
                  ;; RUN also runs the tests on which this test depends. Those tests are reported separately.
                  (results (when test
                             (remove test (first (call-as-test verdict (lambda () (funcall run (fiveam-name test)))))
                                     :key (lambda (result) (framework-slot result "TEST-CASE")) :test-not #'eq))))
             (unless test
               (record-removed-test verdict))
             (setf all (append results all))
             (call-as-test verdict (lambda () (mapc (lambda (result) (add-fiveam-result verdict result))
                                                    (reverse results))))
             (record-verdict verdict))))))
    all))

(defun call-without-failure-marks (function)
  "Call FUNCTION, which runs tests. Meanwhile clear the coverage marks that are set when FiveAM prints the values of a failed
check. FiveAM is the only framework that prints these values while the test runs."
  (declare (type function function))
  (let ((symbol (framework-symbol "PROCESS-FAILURE")))
    (if *coverage*
        (unwind-protect
             (progn (encapsulate symbol 'coverage
                                 (lambda (original &rest arguments)
                                   (declare (type function original))
                                   (call-preserving-marks (lambda () (apply original arguments)))))
                    (funcall function))
          (sb-int:unencapsulate symbol 'coverage))
        (funcall function))))

(defun add-fiveam-result (verdict result)
  "Add RESULT, FiveAM's result of a check, to VERDICT."
  (cond ((framework-type-p result "TEST-PASSED")
         (incf (verdict-passed-checks verdict)))
        ((framework-type-p result "TEST-SKIPPED")
         (when (and (eq (verdict-status verdict) :passed) (zerop (verdict-passed-checks verdict)))
           (setf (verdict-status verdict) :skipped
                 (verdict-message verdict) (cut-text (princ-to-string (framework-slot result "REASON"))))))
        ((framework-type-p result "UNEXPECTED-TEST-FAILURE")
         (record-ending-condition verdict (framework-slot result "ACTUAL-CONDITION")))
        ((framework-type-p result "FOR-ALL-TEST-FAILED")
         (add-check verdict (make-check :message (format nil "Falsifiable with ~A"
                                                         (shown-text (framework-slot result "FAILURE-VALUES")))))
         (dolist (result (reverse (framework-slot result "RESULT-LIST")))
           (unless (framework-type-p result "TEST-PASSED")
             (add-fiveam-result verdict result))))
        (t
         (add-check verdict (fiveam-check (framework-slot result "TEST-EXPR") (framework-slot result "REASON"))))))

(defun split-at-separators (text separators)
  "Return the parts of TEXT before, between and after SEPARATORS, trimmed of whitespace. SEPARATORS are strings that must
occur in TEXT in this order. Return NIL if a separator is missing."
  (let ((start 0)
        (parts '()))
    (dolist (separator separators
                       (nreverse (cons (string-trim '(#\Space #\Newline) (subseq text start)) parts)))
      (let ((end (search separator text :start2 start)))
        (unless end (return nil))
        (push (string-trim '(#\Space #\Newline) (subseq text start end)) parts)
        (setf start (+ end (length separator)))))))

(defun fiveam-check (form reason)
  "Return a CHECK for FORM, the form of a failed check. REASON is the text that FiveAM's IS makes from FORM, its value and
the expected value."
  (let ((evaluated (format nil "~% evaluated to ~%"))
        ;; Instead of a form, FiveAM records a condition's name for SIGNALS, perhaps a variable for IS-TRUE, and nothing for
        ;; a FOR-ALL without a check. The reason says more.
        (shown (and (consp form) (shown-form form)))
        (reason (if (stringp reason) reason "")))
    (flet ((try (separators make)
             (let ((parts (split-at-separators reason (cons evaluated separators))))
               (when parts
                 (return-from fiveam-check (funcall make (mapcar #'cut-text parts)))))))
      (try (list (format nil "~% which is not ~%") (format nil "~% to ~%"))
           (lambda (parts) (make-check :form form :printed-form shown :expected (fourth parts) :actual (second parts))))
      (try (list (format nil "~% which is ~%") (format nil "~%to ~%") " (it should not be)")
           (lambda (parts) (make-check :form form :printed-form shown :expected (format nil "anything but ~A" (fourth parts))
                                       :actual (second parts))))
      (try (list (format nil "~% which does not satisfy ~%"))
           (lambda (parts) (make-check :form form :printed-form shown
                                       :expected (format nil "a value that satisfies ~A" (third parts))
                                       :actual (second parts))))
      (try (list (format nil "~% which satisfies ~%") " (it should not)")
           (lambda (parts) (make-check :form form :printed-form shown
                                       :expected (format nil "a value that does not satisfy ~A" (third parts))
                                       :actual (second parts)))))
    (make-check :form form :printed-form shown :message (cut-text (string-trim '(#\Space #\Newline) reason)))))
