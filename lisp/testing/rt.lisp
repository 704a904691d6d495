;;;; Running the tests of sb-rt and of the original RT.

(in-package "SBCL-HOST/TESTING")

(define-framework "sb-rt" ("SB-RT")
  :entries (("DO-TESTS" . rt-selected-tests))
  :tests rt-tests :name rt-name :home rt-home :groups rt-groups :runner run-rt)

(define-framework "RT" ("REGRESSION-TEST")
  :entries (("DO-TESTS" . rt-selected-tests))
  :tests rt-tests :name rt-name :home rt-home :groups rt-groups :runner run-rt)

(defun rt-tests ()
  "Return all tests that are not disabled by a note of RT, as lists of a name, a form and the expected values."
  (loop for entry in (rest (symbol-value (framework-symbol "*ENTRIES*")))
        ;; An entry is a list in sb-rt, and a structure in Debian's RT.
        if (consp entry)
          collect (rest entry)
        else unless (call-framework "HAS-DISABLED-NOTE" entry)
          collect (list* (call-framework "NAME" entry) (call-framework "FORM" entry) (call-framework "VALS" entry))))

(defun rt-selected-tests (&rest arguments)
  "Return the tests that the framework's DO-TESTS would run."
  (declare (ignore arguments))
  (rt-tests))

(defun rt-name (test)
  "Return the name of TEST."
  (first test))

(defun rt-home (test)
  "Return the package of TEST, which is the home package of its name. If the name is a keyword or has no home package, return
the package of the first symbol in TEST's form that does not belong to the system, or NIL."
  (let ((home (symbol-home (first test))))
    (if (and home (not (eq home (find-package "KEYWORD"))))
        home
        (labels ((visit (object)
                   (cond ((consp object) (visit (car object)) (visit (cdr object)))
                         ((and object (symbolp object) (symbol-package object) (not (system-symbol-p object)))
                          (return-from rt-home (symbol-package object))))))
          (visit (second test))))))

(defun rt-groups (wanted-p)
  "Return no tests: RT has no groups."
  (declare (ignore wanted-p))
  '())

(defun run-rt (tests)
  "Run TESTS. Return the values that the framework's DO-TESTS would return: true if no test failed unexpectedly; true if no
test failed; and the names of the failed tests."
  (let ((expected (let ((variable (find-symbol "*EXPECTED-FAILURES*" (framework-package *framework*))))
                    (and variable (boundp variable) (symbol-value variable))))
        (failed '()))
    (dolist (test tests)
      (let* ((verdict (new-verdict test))
             (name (first test))
             (output (make-kept-output *standard-output*))
             (passed (first (call-as-test verdict (lambda ()
                                                    (let ((*standard-output* output))
                                                      (call-framework "DO-TEST" name)))))))
        (call-as-test verdict (lambda () (add-rt-result verdict test passed output)))
        (unless passed
          (push name failed)
          (when (member name expected :test #'equal)
            (setf (verdict-status verdict) :skipped
                  (verdict-message verdict) "The test failed, as expected.")))
        (record-verdict verdict)))
    (let ((failed (nreverse failed)))
      (values (subsetp failed expected :test #'equal) (null failed) failed))))

(defun add-rt-result (verdict test passed output)
  "Add the result of TEST to VERDICT. PASSED is true if TEST passed. OUTPUT is the KEPT-OUTPUT to which the test, and
then the framework, printed. The framework's report is dropped from OUTPUT."
  (let* ((text (kept-text output))
         ;; The test may have printed the words of a report, and its form may contain them.
         (heading (and (not passed) (search (format nil " failed~%Form: ") text :from-end t)))
         (report (and heading (search "Test " text :end2 heading :from-end t)))
         (actual (and report (search (format nil "~%Actual value") text :start2 report :from-end t)))
         (start (and actual (search ": " text :start2 actual))))
    (drop-kept-text output report)
    (when (and (eq (verdict-status verdict) :passed) (null (verdict-message verdict)))
      (if passed
          (incf (verdict-passed-checks verdict))
          (destructuring-bind (name form . values) test
            (declare (ignore name))
            (let* ((value (and start (rt-value (string-trim '(#\Space #\Newline) (subseq text (+ start 2))))))
                   (condition (rt-ending-condition value (verdict-signalled verdict))))
              (if condition
                  (record-ending-condition verdict condition)
                  (add-check verdict
                             (make-check :form form :printed-form (shown-form form)
                                         :expected (format nil "~{~A~^, ~}" (mapcar #'shown-text values))
                                         :actual (and value (cut-text (rt-value-text (string-right-trim "." value))))))))))))
  verdict)

(defun rt-value (text)
  "Return TEXT, the end of a report, without the memory that sb-rt prints after a condition and a period."
  (let ((end (and (eql 2 (mismatch "#<" text)) (search (format nil ">.~%") text))))
    (subseq text 0 (and end (1+ end)))))

(defun rt-value-text (text)
  "Return TEXT with commas between its values. In TEXT the framework printed each value after the first on a line of its own,
indented by 15 columns."
  (let ((separator (format nil "~%~15,1@T")))
    (with-output-to-string (out)
      (loop for start = 0 then (+ end (length separator))
            for end = (loop for found = (search separator text :start2 start)
                              then (search separator text :start2 (1+ found))
                            ;; A line that is indented further continues a value.
                            for next = (and found (+ found (length separator)))
                            while (and next (< next (length text)) (char= #\Space (char text next)))
                            finally (return found))
            do (write-string text out :start start :end end)
            while end
            do (write-string ", " out)))))

(defun rt-ending-condition (text signalled)
  "Return the condition that ended a test, or NIL. TEXT is the value of the test as the framework printed it: if an error
ended the test, the framework printed the condition. SIGNALLED is a list of the CAPTURED-ERRORs of the test, newest first.
The newest error ended the test if TEXT looks like the printed condition of this error."
  (let* ((condition (and signalled (captured-error-condition (first signalled))))
         (name (and condition (string (class-name-of condition))))
         (found (and name text (search name text :test #'char-equal))))
    (and found
         (eql 2 (mismatch "#<" text))
         (null (position-if #'whitespace-p text :end found))
         condition)))

(defconstant +kept-output-length+ 8000
  "The number of characters at the end of a test's output that are held back, because they may include the framework's
report.")

(defstruct (kept-output (:include sb-kernel:ansi-stream
                         (cout #'keep-character)
                         (sout #'keep-string)
                         (misc #'operate-kept-output))
                        (:constructor make-kept-output (target))
                        (:copier nil)
                        (:predicate nil))
  "A stream that forwards its output to TARGET, but holds back the end of the output. The stream is not a Gray stream,
because the methods of a Gray stream would show in SBCL's descriptions of the generic functions for streams."
  (target nil :type stream :read-only t)
  ;; TEXT holds the output that is held back, and COUNT is the number of its characters.
  (text (make-string-output-stream) :type stream :read-only t)
  (count 0 :type index)
  (column 0 :type index))

(defun forward-kept-text (stream)
  "If STREAM holds back more than four times +KEPT-OUTPUT-LENGTH+ characters, forward all but the last +KEPT-OUTPUT-LENGTH+."
  (when (> (kept-output-count stream) (* 4 +kept-output-length+))
    (let* ((text (get-output-stream-string (kept-output-text stream)))
           (end (- (length text) +kept-output-length+)))
      (write-string text (kept-output-target stream) :end end)
      (write-string text (kept-output-text stream) :start end)
      (setf (kept-output-count stream) +kept-output-length+))))

(defun keep-character (stream character)
  "Perform WRITE-CHAR on STREAM."
  (declare (type kept-output stream) (type character character))
  (write-char character (kept-output-text stream))
  (incf (kept-output-count stream))
  (setf (kept-output-column stream) (if (char= character #\Newline) 0 (1+ (kept-output-column stream))))
  (forward-kept-text stream)
  character)

(defun keep-string (stream string start end)
  "Perform WRITE-STRING on STREAM."
  (declare (type kept-output stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (write-string string (kept-output-text stream) :start start :end end)
    (incf (kept-output-count stream) (- end start))
    (setf (kept-output-column stream) (column-after (kept-output-column stream) string start end))
    (forward-kept-text stream))
  string)

(defun operate-kept-output (stream operation argument)
  "Perform OPERATION, the code of a stream operation other than output, on STREAM."
  (declare (type kept-output stream) (ignore argument))
  (case operation
    (#.+charpos+ (kept-output-column stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+external-format+ :utf-8)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defun kept-text (stream)
  "Return the text that STREAM holds back."
  (let ((text (get-output-stream-string (kept-output-text stream))))
    (write-string text (kept-output-text stream))
    text))

(defun drop-kept-text (stream end)
  "Of the text that STREAM holds back, forward the part before position END, and drop the rest. If END is NIL, forward all
of the text."
  (let ((text (get-output-stream-string (kept-output-text stream))))
    (write-string text (kept-output-target stream) :end end)))
