;;;; What a test operation of no known framework prints: whether it says that a test failed, and, under coverage, what ran
;;;; before each report.

(in-package "SBCL-HOST/TESTING")

;;; Words

(defun line-words (line)
  "Return the words of LINE, of letters and digits."
  (loop with end = (length line)
        for start = (position-if #'alphanumericp line) then (position-if #'alphanumericp line :start stop)
        for stop = (and start (or (position-if-not #'alphanumericp line :start start) end))
        while start
        collect (subseq line start stop)))

(defun any-word-p (words beginnings)
  "True when one of WORDS begins with one of BEGINNINGS, and none of the two before it and the one after it denies it."
  (flet ((denies-p (word) (member word '("0" "no" "none" "zero" "without" "not") :test #'string-equal)))
    (loop for (before-last before word after) on (list* "" "" words)
          thereis (and word
                       (some (lambda (beginning) (eql 0 (search beginning word :test #'char-equal))) beginnings)
                       (notany #'denies-p (remove nil (list before-last before after)))))))

(defun tells-failure-p (line)
  "True when LINE says that something failed, and not that nothing did."
  (any-word-p (line-words line) '("fail")))

(defun tells-difference-p (line)
  "True when LINE says that something is not as it should be, in whatever words."
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

;;; The verdict

(defconstant +judged-output+ 4000
  "How many of the last characters that a test operation prints are looked at.")

(defconstant +noted-pieces+ 20000
  "Of how many pieces that a test operation prints it is noted what ran before them, which takes some time.")

(defun call-keeping-output (verdict function)
  "Return the values of FUNCTION, which runs the test operation of VERDICT, as a list, and the last characters that it
printed. Under coverage, VERDICT gets its reports."
  (declare (type function function))
  (let ((kept (make-array 0 :element-type 'character :adjustable t :fill-pointer t))
        (pieces 0))
    (flet ((keep (string start end)
             (when (and *coverage* (eq verdict *verdict*) (< pieces +noted-pieces+))
               (incf pieces)
               (note-printed verdict (subseq string start (min end (+ start +shown-value+)))))
             (let* ((start (max start (- end +judged-output+)))
                    (superfluous (- (+ (length kept) (- end start)) (* 2 +judged-output+))))
               (when (plusp superfluous)
                 (let ((dropped (max 0 (- (length kept) +judged-output+))))
                   (replace kept kept :start2 dropped)
                   (decf (fill-pointer kept) dropped)))
               (loop for index from start below end
                     do (vector-push-extend (char string index) kept)))))
      (flush-output)
      (let ((values (let ((*on-output* #'keep))
                      (multiple-value-prog1 (multiple-value-list (funcall function))
                        (flush-output)))))
        (values values kept)))))

(defun judge-returned (verdict values printed)
  "Have VERDICT, of a test operation that returned VALUES, say that it failed when those and the text PRINTED both do: ASDF
asks for an error, but many return false."
  (when (and values (null (first values)))
    (let ((line (find-if #'tells-failure-p (text-lines printed) :from-end t)))
      (when line
        (setf (verdict-status verdict) :failed
              (verdict-message verdict) (format nil "It returned NIL and printed: ~A" (string-trim " " line)))))))

;;; Reports: what ran before a text was printed stands for a test of its own, which passed unless the text tells of a
;;; difference.

(defconstant +reports+ 2000
  "How many reports are kept of a test operation.")

(defun note-printed (verdict text)
  "Have VERDICT say that its test operation printed TEXT: a report on what ran since the one before, which it goes on where
nothing did."
  (let* ((reports (verdict-reports verdict))
         (count (length reports))
         (marks (set-marks)))
    (forget-marks)
    (cond ((and (find 1 marks) (< count +reports+))
           (let ((report (make-verdict :framework "ASDF" :title (verdict-title verdict) :message (cut-text text)
                                       :marks marks)))
             (if (plusp count)
                 (vector-push-extend report reports)
                 (setf (verdict-reports verdict)
                       (make-array 1 :adjustable t :fill-pointer t :initial-element report)))))
          ((plusp count)
           (let* ((report (aref reports (1- count)))
                  (message (verdict-message report)))
             (when (<= (length message) +shown-value+)
               (setf (verdict-message report) (cut-text (concatenate 'string message text)))))))))

(defun judge-reports (verdict)
  "Have the reports of VERDICT, of a test operation, say which of them tell of a difference. What the last one says last may
be of all tests."
  (let* ((reports (verdict-reports verdict))
         (last (1- (length reports))))
    (flet ((judge (report lines)
             (setf (verdict-status report) (if (some #'tells-difference-p lines) :failed :passed))))
      (loop for report across reports
            for lines = (text-lines (verdict-message report))
            for index from 0
            do (judge report
                      (if (= index last)
                          (remove-if #'tells-failure-p lines :count 1 :from-end t)
                          lines)))
      (when (and (plusp last) (notany #'failed-p reports))
        (let ((report (aref reports last)))
          (judge report (text-lines (verdict-message report))))))))
