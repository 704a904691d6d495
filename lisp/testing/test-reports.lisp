;;;; The output of a test operation that uses no known framework. The output is searched for signs that a test failed. If
;;;; coverage is recorded, each printed report is recorded with the marks of the code that ran before it.

(in-package "SBCL-HOST/TESTING")

;;; Words that report a failure

(defun line-words (line)
  "Return the words of LINE, which consist of letters and digits."
  (loop with end = (length line)
        for start = (position-if #'alphanumericp line) then (position-if #'alphanumericp line :start stop)
        for stop = (and start (or (position-if-not #'alphanumericp line :start start) end))
        while start
        collect (subseq line start stop)))

(defun any-word-p (words beginnings)
  "Return true when one of WORDS begins with one of BEGINNINGS and is not negated by either of the two words before it or
the word after it."
  (flet ((denies-p (word) (member word '("0" "no" "none" "zero" "without" "not") :test #'string-equal)))
    (loop for (before-last before word after) on (list* "" "" words)
          thereis (and word
                       (some (lambda (beginning) (eql 0 (search beginning word :test #'char-equal))) beginnings)
                       (notany #'denies-p (remove nil (list before-last before after)))))))

(defun failure-line-p (line)
  "Return true when LINE says that something failed. A line such as `0 failed' does not say so."
  (any-word-p (line-words line) '("fail")))

(defun discrepancy-line-p (line)
  "Return true when LINE says, in one of several wordings, that a result is wrong or that something failed."
  (let ((words (line-words line)))
    (or (any-word-p words '("fail"))
        (loop for (word next) on words
              thereis (or (and (string-equal word "not") next (string-equal next "ok"))
                          (and (string-equal word "returned") next (string-equal next "nil"))))
        (and (not (any-word-p words '("ok" "pass" "succe")))
             (any-word-p words '("expect" "unexpect" "wrong" "mismatch" "error" "assert"))))))

(defun text-lines (text)
  "Return the lines of TEXT."
  (with-input-from-string (stream text)
    (loop for line = (read-line stream nil)
          while line
          collect line)))

;;; The verdict on a test operation

(defconstant +examined-output-length+ 4000
  "The number of characters at the end of a test operation's output that are examined.")

(defconstant +max-observed-pieces+ 20000
  "Maximum number of pieces of a test operation's output for which coverage is recorded. The recording takes some time for
each piece.")

(defun call-keeping-output (verdict function)
  "Call FUNCTION, which runs the test operation of VERDICT. Return a list of its values and, as a second value, the text that
FUNCTION printed, or at least the last +EXAMINED-OUTPUT-LENGTH+ characters of that text. If coverage is recorded, store
the printed reports in VERDICT."
  (declare (type function function))
  (let ((kept (make-array 0 :element-type 'character :adjustable t :fill-pointer t))
        (pieces 0))
    (flet ((keep (string start end)
             (when (and *coverage* (eq verdict *verdict*) (< pieces +max-observed-pieces+))
               (incf pieces)
               (record-printed-text verdict (subseq string start (min end (+ start +max-shown-length+)))))
             (let* ((start (max start (- end +examined-output-length+)))
                    (superfluous (- (+ (length kept) (- end start)) (* 2 +examined-output-length+))))
               (when (plusp superfluous)
                 (let ((dropped (max 0 (- (length kept) +examined-output-length+))))
                   (replace kept kept :start2 dropped)
                   (decf (fill-pointer kept) dropped)))
               (loop for index from start below end
                     do (vector-push-extend (char string index) kept)))))
      (flush-output)
      (let ((values (let ((*on-output* #'keep))
                      (multiple-value-prog1 (multiple-value-list (funcall function))
                        (flush-output)))))
        (values values kept)))))

(defun judge-returned-values (verdict values printed)
  "Record in VERDICT that a test operation failed if it returned false and printed a line that reports a failure. VALUES are
the values that it returned, and PRINTED is the text that it printed. ASDF expects a failing test operation to signal an
error, but many test operations return false instead."
  (when (and values (null (first values)))
    (let ((line (find-if #'failure-line-p (text-lines printed) :from-end t)))
      (when line
        (setf (verdict-status verdict) :failed
              (verdict-message verdict) (format nil "The test-op returned NIL and printed: ~A" (string-trim " " line)))))))

;;; Reports. The code that ran before a piece of text was printed counts as a test of its own, which passed unless the text
;;; reports a discrepancy.

(defconstant +max-reports+ 2000
  "Maximum number of reports of a test operation that are kept.")

(defun record-printed-text (verdict text)
  "Record in VERDICT that its test operation printed TEXT. Add a new report on the marked code that ran since the last
report. If no marked code ran, or VERDICT has +MAX-REPORTS+ reports, append TEXT to the last report."
  (let* ((reports (verdict-reports verdict))
         (count (length reports))
         (marks (mark-bits)))
    (clear-marks)
    (cond ((and (find 1 marks) (< count +max-reports+))
           (let ((report (make-verdict :framework "ASDF" :title (verdict-title verdict) :message (cut-text text)
                                       :marks marks)))
             (if (plusp count)
                 (vector-push-extend report reports)
                 (setf (verdict-reports verdict)
                       (make-array 1 :adjustable t :fill-pointer t :initial-element report)))))
          ((plusp count)
           (let* ((report (aref reports (1- count)))
                  (message (verdict-message report)))
             (when (<= (length message) +max-shown-length+)
               (setf (verdict-message report) (cut-text (concatenate 'string message text)))))))))

(defun judge-reports (verdict)
  "Set the status of each report of VERDICT, the verdict of a test operation. In the last report, the last line that reports
a failure may be a summary of all tests. That line is ignored, unless there are several reports and no report failed
otherwise."
  (let* ((reports (verdict-reports verdict))
         (last (1- (length reports))))
    (flet ((judge (report lines)
             (setf (verdict-status report) (if (some #'discrepancy-line-p lines) :failed :passed))))
      (loop for report across reports
            for lines = (text-lines (verdict-message report))
            for index from 0
            do (judge report
                      (if (= index last)
                          (remove-if #'failure-line-p lines :count 1 :from-end t)
                          lines)))
      (when (and (plusp last) (notany #'failed-p reports))
        (let ((report (aref reports last)))
          (judge report (text-lines (verdict-message report))))))))
