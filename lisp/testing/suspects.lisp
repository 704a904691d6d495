;;;; Suspects: the functions that a failing test ran and few passing tests ran, with the lines that differ.

(in-package "SBCL-HOST/TESTING")

(defstruct (marked-form (:copier nil) (:predicate nil))
  "A top-level form with coverage marks."
  (file "" :type string :read-only t)
  (number 0 :type index :read-only t)
  ;; Lists of a mark, :THEN, :ELSE or NIL, and the path in the form to the subform that the mark stands for. If the form
  ;; defines a macro, also lists of a mark in an expansion of the macro and :EXPANSION.
  (marks '() :type list)
  ;; True once LOCATE-FORM has searched for the form; then, if the form was found, the text of its file, the map of the
  ;; form, the line on which it begins, and its words.
  (looked-for nil)
  (text nil)
  (map nil)
  (line 0 :type index)
  (words nil :type (or null hash-table)))

(defstruct (suspect (:copier nil) (:predicate nil))
  "A form of which a failing test ran a part that few passing tests ran."
  (form nil :type marked-form :read-only t)
  ;; The number of passing tests that ran that part.
  (passing 0 :type index :read-only t)
  ;; The sort key: the most likely suspect has the lowest score.
  (score 0 :type real))

(defun count-tests (verdicts wanted-p)
  "Return a vector with, for each mark, the number of tests among VERDICTS that satisfy WANTED-P and set the mark."
  (declare (type function wanted-p))
  (let ((counts (make-array (coverage-count *coverage*) :element-type 'fixnum :initial-element 0)))
    (loop for verdict across verdicts
          for marks = (verdict-marks verdict)
          when (and marks (funcall wanted-p verdict))
            do (loop for position = (position 1 marks) then (position 1 marks :start (1+ position))
                     while position
                     do (incf (aref counts position))))
    counts))

(defun passed-p (verdict)
  "Return true when the test of VERDICT passed."
  (eq :passed (verdict-status verdict)))

(defun code-file (code)
  "Return the native namestring of the file of CODE, or NIL."
  (let ((name (sb-c::debug-source-namestring (sb-c::debug-info-source (sb-kernel:%code-debug-info code)))))
    (and name (sb-ext:native-namestring (parse-namestring name)))))

(defun marked-forms ()
  "Return all forms with marks."
  (let ((table (make-hash-table :test 'equal)))
    (loop for code across (coverage-codes *coverage*)
          for start across (coverage-starts *coverage*)
          for file = (code-file code)
          when file
            do (loop for paths across (sb-c::code-coverage-map code)
                     for mark from start
                     do (dolist (path paths)
                          (let* ((branch (when (symbolp (first path)) (first path)))
                                 (steps (reverse (if branch (rest path) path)))
                                 (key (cons file (first steps)))
                                 (form (or (gethash key table)
                                           (setf (gethash key table)
                                                 (make-marked-form :file file :number (first steps))))))
                            (push (list* mark branch (rest steps)) (marked-form-marks form))))))
    (loop for form being the hash-values of table collect form)))

(defun find-suspect (form marks passing failing)
  "Return FORM as a suspect for a failing test that set MARKS, or NIL if the test ran no part of FORM. PASSING and FAILING
are the numbers of passing and failing tests that set each mark."
  (let ((fewest nil)
        (alike 0)
        (ran 0)
        (expansion (eq :expansion (second (first (marked-form-marks form))))))
    (loop for (mark) in (marked-form-marks form)
          when (eql 1 (sbit marks mark))
            do (let ((count (aref passing mark)))
                 (incf ran)
                 (when (or (null fewest) (< count fewest))
                   (setf fewest count
                         alike 0))
                 (when (= count fewest)
                   (setf alike (max alike (aref failing mark))))))
    (when fewest
      (make-suspect :form form :passing fewest
                    ;; Lower for few passing tests, a small part of the code, and other tests that also fail. Measured with
                    ;; scripts/mutants.py. A macro comes after the function in which it was expanded.
                    :score (+ (log (1+ fewest) 2) (/ (log (1+ ran) 2) 2) (- (log (max 1 alike) 2))
                              (if expansion 1 0))))))

(defvar *marked-files* (make-hash-table :test 'equal)
  "A table from native namestrings to conses of a file's text and a vector of the start positions of its top-level forms. It
is filled while forms are being located.")

(defun marked-file (file)
  "Return the text of FILE, a native namestring, and a vector of the start positions of its top-level forms; or NIL."
  (let ((known (or (gethash file *marked-files*)
                   (setf (gethash file *marked-files*)
                         (let* ((octets (file-octets file))
                                (text (and octets (octets-text octets 0 (length octets)))))
                           (cons text (and text (toplevel-starts text))))))))
    (values (car known) (cdr known))))

(defun locate-form (form)
  "Find the text of FORM, unless this was attempted before. Return true if the text is known."
  (unless (marked-form-looked-for form)
    (setf (marked-form-looked-for form) t)
    (multiple-value-bind (text starts) (marked-file (marked-form-file form))
      (when (< (marked-form-number form) (length starts))
        (let ((start (aref starts (marked-form-number form))))
          (multiple-value-bind (map end) (map-form text start)
            (when (and (consp map) (rest map))
              (setf (marked-form-text form) text
                    (marked-form-map form) map
                    (marked-form-line form) (values (line-and-column text start))
                    (marked-form-words form) (word-table (subseq text start end)))))))))
  (and (marked-form-map form) t))

;;; Macros. The expansion of a macro runs in the functions that call it, whose marks stand for the whole call.

(defun defined-macro (form)
  "Return the name of the macro that FORM, which is located, defines, or NIL."
  (let ((map (marked-form-map form))
        (text (marked-form-text form)))
    (and (integerp (second map))
         (string= "DEFMACRO" (token-name text (second map)))
         (integerp (third map))
         (token-name text (third map)))))

(defun subform-at (map path)
  "Return the subform at PATH in MAP, or NIL."
  (dolist (index path map)
    (setf map (and (consp map) (nth index (rest map))))))

(defun mark-expansions (forms)
  "For each of FORMS that defines a macro, add the marks of the calls of the macro in FORMS. Ignore forms that cannot be
parsed."
  (let ((macros (make-hash-table :test 'equal)))
    (dolist (form forms)
      (let ((name (and (guarded (locate-form form) (failure) nil) (defined-macro form))))
        (when name (setf (gethash name macros) form))))
    (dolist (form forms)
      (let ((text (marked-form-text form)))
        (when (and text (not (defined-macro form)))
          (loop for (mark nil . path) in (marked-form-marks form)
                for call = (subform-at (marked-form-map form) path)
                for macro = (and (consp call) (integerp (second call))
                                 (gethash (token-name text (second call)) macros))
                when macro
                  do (push (list mark :expansion) (marked-form-marks macro))))))))

(defun conditional-lines (form)
  "Return the positions of the conditionals of FORM in the text of its file."
  (let ((text (marked-form-text form))
        (positions '()))
    (labels ((visit (part depth)
               (when (and (consp part) (< depth 50))
                 (when (and (integerp (second part)) (conditional-p (token-name text (second part))))
                   (push (first part) positions))
                 (dolist (inner (rest part))
                   (visit inner (1+ depth))))))
      (visit (marked-form-map form) 0))
    positions))

(defun form-of-p (form &rest operators)
  "Return true when FORM is a form of one of OPERATORS, names."
  (let ((operator (second (marked-form-map form))))
    (and (integerp operator)
         (member (token-name (marked-form-text form) operator) operators :test #'equal))))

(defun excluded-form-p (form)
  "Return true when FORM is not code under test: it defines a package, or a test of a known framework."
  (form-of-p form "DEFPACKAGE" "DEFINE-PACKAGE" "IN-PACKAGE" "TEST" "DEF-TEST" "DEFTEST" "DEFINE-TEST"))

(defun form-name (form)
  "Return the name of what FORM defines."
  (let* ((text (marked-form-text form))
         (named (third (marked-form-map form))))
    (cond ((null named) "top-level form")
          ((integerp named) (string-upcase (subseq text named (or (catch 'scan-failed (token-end text named)) named))))
          (t (let ((end (nth-value 1 (map-form text (first named)))))
               (string-upcase (subseq text (first named) (min end (+ 60 (first named))))))))))

(defun symbol-of-form (form)
  "Return the name of the symbol for which FORM defines something, BAR for (SETF BAR), or NIL."
  (let ((named (third (marked-form-map form))))
    (when (consp named)
      (setf named (third named)))
    (and (integerp named) (token-name (marked-form-text form) named))))

;;; Lines

(defun conditional-p (name)
  "Return true when NAME is the name of an operator that may evaluate only some parts of its form."
  (member name '("IF" "WHEN" "UNLESS" "COND" "AND" "OR" "CASE" "ECASE" "TYPECASE" "ETYPECASE" "IF-LET" "WHEN-LET")
          :test #'string=))

(defun condition-position (map text path)
  "Return the position in MAP, the map of a form of TEXT, of the innermost conditional, or clause of one, that decides
whether the subform at PATH is evaluated; or NIL."
  (let ((form map)
        (found nil))
    (dolist (index path found)
      (when (and (consp form) (integerp (second form)))
        (let ((name (token-name text (second form))))
          (when (conditional-p name)
            (let ((part (nth index (rest form))))
              (setf found (if (and part (or (string= name "COND") (search "CASE" name)))
                              (form-position part)
                              (first form)))))))
      (setf form (and (consp form) (nth index (rest form)))))))

(defun suspect-lines (suspect marks passing words number &optional (least 0))
  "Return the lines of SUSPECT that differ between failing and passing tests, at most NUMBER, in order, as lists of line
number, text, and number of passing tests that ran the line. MARKS are the marks of the failing test, and PASSING the number
of passing tests that set each mark. If there are more lines, prefer lines with conditionals, and lines that contain WORDS,
a value of WEIGH-WORDS. Include lines that contain WORDS even if more passing tests ran them, and other lines until there
are LEAST lines."
  (let* ((form (suspect-form suspect))
         (text (marked-form-text form))
         (map (marked-form-map form))
         (fewest (suspect-passing suspect))
         (lines '()))
    (flet ((note (position weight count)
             (let* ((line (values (line-and-column text position)))
                    (weight (- weight (- (log (1+ count) 2) (log (1+ fewest) 2))))
                    (known (find line lines :key #'first)))
               (if known
                   (setf (third known) (min count (third known))
                         (fourth known) (max weight (fourth known)))
                   (push (list line (line-at text position) count weight) lines)))))
      (loop for (mark branch . path) in (marked-form-marks form)
            for count = (aref passing mark)
            when (eql 1 (sbit marks mark))
              do (let ((condition (condition-position map text path)))
                   (when condition (note condition 1/2 count)))
                 (case branch
                   ((:then :else)
                    (note (or (branch-position map text path branch) (position-at-path map path)) 1/2 count))
                   (:expansion
                    (dolist (position (conditional-lines form))
                      (note position 0 count)))
                   (t (note (position-at-path map path) 0 count)))))
    (dolist (line lines)
      (incf (fourth line) (shared-words words (word-table (second line)))))
    ;; The first line of the form says nothing: it always runs.
    (setf lines (or (remove (marked-form-line form) lines :key #'first) lines)
          lines (sort (sort lines #'< :key #'first) #'> :key #'fourth))
    (let ((telling (count-if (lambda (line)
                               (destructuring-bind (count weight) (rest (rest line))
                                 (or (= count fewest) (plusp weight))))
                             lines)))
      (sort (mapcar #'butlast (subseq lines 0 (min number (length lines) (max telling least))))
            #'< :key #'first))))

(defun branch-position (map text path branch)
  "Return the position of BRANCH, :THEN or :ELSE, of the form at PATH in MAP, the map of a form of TEXT, if that form is an
IF; or NIL."
  (let ((form map))
    (dolist (index path)
      (setf form (and (consp form) (nth index (rest form)))))
    (when (and (consp form) (integerp (second form)) (string= "IF" (token-name text (second form))))
      (let ((part (nth (if (eq branch :then) 2 3) (rest form))))
        (and part (form-position part))))))

(defun macros-in (form packages)
  "Return the names of the macros of PACKAGES that FORM calls."
  (let ((text (marked-form-text form))
        (names '()))
    (labels ((visit (form depth)
               (when (and (consp form) (< depth 50))
                 (when (integerp (second form))
                   (let ((name (token-name text (second form))))
                     (when (some (lambda (package)
                                   (multiple-value-bind (symbol found) (find-symbol name package)
                                     (and found (macro-function symbol) (member (symbol-package symbol) packages))))
                                 packages)
                       (pushnew name names :test #'string=))))
                 (dolist (part (rest form))
                   (visit part (1+ depth))))))
      (visit (marked-form-map form) 0))
    (nreverse names)))

;;; Words

(defun map-words (function text)
  "Call FUNCTION with each word of TEXT, in upper case. A word has at least three characters of which a name may consist,
and is not a number."
  (declare (type function function) (type string text))
  (let ((start nil))
    (loop for index from 0 to (length text)
          for character = (and (< index (length text)) (char text index))
          do (cond ((and character (or (alphanumericp character) (find character "-*+_%/<>=!?")))
                    (unless start (setf start index)))
                   (start
                    (when (and (> (- index start) 2)
                               (notevery #'digit-char-p (subseq text start index)))
                      (funcall function (string-upcase (subseq text start index))))
                    (setf start nil))))))

(defun word-table (text)
  "Return a hash table whose keys are the words of TEXT."
  (let ((table (make-hash-table :test 'equal)))
    (map-words (lambda (word) (setf (gethash word table) t)) text)
    table))

(defun verdict-words (verdict)
  "Return the distinct words of the messages in VERDICT, without the name of the condition's type, which would only lead to
the forms that define and signal the condition."
  (let* ((table (make-hash-table :test 'equal))
         (message (or (verdict-message verdict) ""))
         (report (if (test-operation-p verdict) 0 (or (search ": " message) 0))))
    (flet ((add (text)
             (when text
               (map-words (lambda (word) (setf (gethash word table) t)) text))))
      (add (subseq message report))
      (map-words (lambda (word) (remhash word table)) (subseq message 0 report))
      (dolist (check (verdict-checks verdict))
        (add (check-shown check)) (add (check-expected check)) (add (check-actual check)) (add (check-message check))))
    (loop for word being the hash-keys of table collect word)))

(defun weigh-words (words forms)
  "Return conses of a word and its weight for those of WORDS that occur in FORMS. The weight is 1 for a word in a single
form, and nears 0 the more forms contain the word."
  (loop with all = (log (1+ (length forms)) 2)
        for word in words
        for among = (count-if (lambda (form) (gethash word (marked-form-words form))) forms)
        when (plusp among)
          collect (cons word (- 1 (/ (log among 2) all)))))

(defun shared-words (words table)
  "Return the total weight of those of WORDS, conses of word and weight, that are keys of TABLE."
  (loop for (word . weight) in words
        when (gethash word table)
          sum weight))

;;; Order

(defun adjust-score (suspect words frames)
  "Adjust the score of SUSPECT if it is one of FRAMES, the names of functions from the error outwards, and if WORDS, as from
WEIGH-WORDS, occur in it. Type definitions score worse: they contain few forms that may be wrong, and a condition often
shares its name with the function that signals it and contains the words of its report."
  (let* ((form (suspect-form suspect))
         (frame (position (symbol-of-form form) frames :test #'equal)))
    (if (form-of-p form "DEFINE-CONDITION" "DEFSTRUCT" "DEFCLASS")
        (incf (suspect-score suspect))
        (decf (suspect-score suspect)
              (+ (if frame (/ 2 (1+ (/ frame 2))) 0)
                 (min 4 (shared-words words (marked-form-words form))))))))

(defconstant +max-weighed-suspects+ 200
  "Maximum number of suspects of a test whose source is examined.")

(defun find-suspects (verdict forms passing failing number)
  "Return the first NUMBER suspects for VERDICT among FORMS, and the weighed words. PASSING and FAILING are the numbers of
passing and failing tests that set each mark."
  (let* ((marks (verdict-marks verdict))
         (all (sort (loop for form in forms
                          for suspect = (find-suspect form marks passing failing)
                          when suspect
                            collect suspect)
                    #'< :key #'suspect-score))
         (located (remove-if-not (lambda (suspect)
                                   (guarded (let ((form (suspect-form suspect)))
                                              (and (locate-form form)
                                                   (not (excluded-form-p form))))
                                       (failure)
                                     nil))
                                 (subseq all 0 (min (length all) +max-weighed-suspects+))))
         (words (weigh-words (verdict-words verdict) (mapcar #'suspect-form located))))
    (dolist (suspect located)
      (guarded (adjust-score suspect words (verdict-frames verdict)) (failure) nil))
    (let ((sorted (stable-sort located #'< :key #'suspect-score)))
      (values (subseq sorted 0 (min number (length sorted))) words))))

(defun shown-lines (place)
  "Return the maximum number of lines that are shown of the suspect at PLACE, counted from 0. More lines are shown of likely
suspects."
  (case place
    (0 12)
    ((1 2) 6)
    (t 3)))

(defun minimum-lines (place)
  "Return the minimum number of lines that are shown of the suspect at PLACE, counted from 0, to include the context of the
lines that differ."
  (if (zerop place) 9 0))

(defun push-suspects-of (verdict suspects words passing packages directories)
  "Push SUSPECTS for VERDICT as records `suspect', each followed by its lines, `line'. WORDS and PASSING are as for
SUSPECT-LINES. PACKAGES are those of the code, and file names are given relative to DIRECTORIES."
  (loop for suspect in suspects
        for form = (suspect-form suspect)
        for place from 0
        do (push-record "suspect"
                        :name (form-name form)
                        :file (relative-file (marked-form-file form) directories)
                        :line (marked-form-line form)
                        :passing (suspect-passing suspect)
                        :macros (let ((macros (guarded (macros-in form packages) (failure) nil)))
                                  (and macros (format nil "~{~A~^, ~}" macros))))
           (loop for (line code count) in (guarded (suspect-lines suspect (verdict-marks verdict) passing words
                                                                  (shown-lines place) (minimum-lines place))
                                              (failure)
                                            nil)
                 do (push-record "line" :line line :code code
                                        :passing (and (> count (suspect-passing suspect)) count)))))

;;; Reports of a test operation that counts as one test. There are many reports, and reports of one fault share their first
;;; suspect.

(defconstant +max-weighed-reports+ 300
  "Maximum number of reports for which suspects are searched.")
(defconstant +max-reported-groups+ 3
  "Maximum number of groups of reports that are pushed.")

(defstruct (report-group (:copier nil) (:predicate nil))
  "A group of reports that have their first suspect in common."
  (count 0 :type index)
  ;; The report that ran the least code, with its suspects and the weighed words.
  (report nil :type (or null verdict))
  (suspects '() :type list)
  (words '() :type list))

(defun group-reports (reports forms passing failing number)
  "Return groups of the failed REPORTS, the largest group first. The other arguments are as for FIND-SUSPECTS."
  (let ((groups '()))
    (loop for report across (remove-if-not #'failed-p reports)
          repeat +max-weighed-reports+
          do (multiple-value-bind (suspects words) (find-suspects report forms passing failing number)
               (when suspects
                 (let ((group (find (suspect-form (first suspects)) groups
                                    :key (lambda (group) (suspect-form (first (report-group-suspects group)))))))
                   (unless group
                     (setf group (make-report-group))
                     (push group groups))
                   (incf (report-group-count group))
                   (when (or (null (report-group-report group))
                             (< (count 1 (verdict-marks report)) (count 1 (verdict-marks (report-group-report group)))))
                     (setf (report-group-report group) report
                           (report-group-suspects group) suspects
                           (report-group-words group) words))))))
    (stable-sort (nreverse groups) #'> :key #'report-group-count)))

(defun tests-with-marks (verdicts)
  "Return the tests of VERDICTS with coverage marks. Reports replace the test operation that printed them."
  (coerce (loop for verdict across verdicts
                append (cond ((plusp (length (verdict-reports verdict))) (coerce (verdict-reports verdict) 'list))
                             ((verdict-marks verdict) (list verdict))))
          'vector))

(defun push-suspects (run systems number)
  "Push the first NUMBER suspects in the code of SYSTEMS for each failed test of RUN: a record `suspects' with the name of
the test, then records `suspect', each followed by its lines, `line'. A test operation with reports has a record `suspects'
for each of the largest groups of reports, which says what was PRINTED and how many MORE reports are like it. If no test or
report passed, test operations have no records, because there is nothing to compare them with."
  (let* ((verdicts (test-run-verdicts run))
         (units (tests-with-marks verdicts))
         (forms (marked-forms))
         (passing (count-tests units #'passed-p))
         (failing (count-tests units #'failed-p))
         (compared (some #'passed-p units))
         (packages (packages-of-systems systems))
         (directories (loop for system in systems
                            for directory = (asdf:system-source-directory system)
                            when directory
                              collect (sb-ext:native-namestring directory))))
    (flet ((push-for (verdict suspects words)
             (push-suspects-of verdict suspects words passing packages directories)))
      (with-source-files ()
        (loop with *marked-files* = (make-hash-table :test 'equal)
                initially (mark-expansions forms)
              for verdict across verdicts
              do (cond ((or (not (failed-p verdict))
                            (and (test-operation-p verdict) (not compared))))
                       ((some #'failed-p (verdict-reports verdict))
                        (loop for group in (group-reports (verdict-reports verdict) forms passing failing number)
                              for report = (report-group-report group)
                              repeat +max-reported-groups+
                              do (push-record "suspects" :name (verdict-title verdict)
                                                         :printed (verdict-message report)
                                                         :more (1- (report-group-count group)))
                                 (push-for report (report-group-suspects group) (report-group-words group))))
                       ((verdict-marks verdict)
                        (push-record "suspects" :name (verdict-title verdict))
                        (multiple-value-call #'push-for verdict
                          (find-suspects verdict forms passing failing number)))))))))
