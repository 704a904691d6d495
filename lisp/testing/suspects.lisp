;;;; Suspects: the top-level forms with code that a failing test ran but few passing tests ran. A suspect is reported with
;;;; lines of this code.

(in-package "SBCL-HOST/TESTING")

(defstruct (marked-form (:copier nil) (:predicate nil))
  "A top-level form with coverage marks."
  ;; The native namestring of the form's file, and the number of the form in that file, from 0.
  (file "" :type string :read-only t)
  (number 0 :type index :read-only t)
  ;; A list with an element (number branch . path) for each mark. PATH is a list of indices that leads to the subform with
  ;; the mark. BRANCH is :THEN or :ELSE if the mark belongs to a branch of that subform, else NIL. If the form defines a
  ;; macro, the list also has an element (number :EXPANSION) for each mark of a call of the macro.
  (marks '() :type list)
  ;; SEARCHED is true once LOCATE-FORM has searched for the form. If the form was found, TEXT is the text of its file,
  ;; MAP is the form's map (see FORM-MAP), LINE is the line on which the form begins, and WORDS is what WORD-TABLE
  ;; returns for its text.
  (searched nil)
  (text nil)
  (map nil)
  (line 0 :type index)
  (words nil :type (or null hash-table)))

(defstruct (suspect (:copier nil) (:predicate nil))
  "A form with a part that a failing test ran but few passing tests ran."
  (form nil :type marked-form :read-only t)
  ;; The number of passing tests that ran that part.
  (passing 0 :type index :read-only t)
  ;; The sort key: the most likely suspect has the lowest score.
  (score 0 :type real))

(defun count-tests-per-mark (verdicts wanted-p)
  "Return a vector with a number for each mark: the number of VERDICTS that satisfy WANTED-P and whose tests set the mark."
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
  "Return the native namestring of the source file of CODE, a code component, or NIL if the file is unknown."
  (let ((name (sb-c::debug-source-namestring (sb-c::debug-info-source (sb-kernel:%code-debug-info code)))))
    (and name (sb-ext:native-namestring (parse-namestring name)))))

(defun marked-forms ()
  "Return a MARKED-FORM for each top-level form that has coverage marks and whose file is known."
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

(defun suspect-for-form (form marks passing failing)
  "Return FORM as a suspect for a failing test, or NIL if the test ran no part of FORM. MARKS are the test's marks, a value
of MARK-BITS. PASSING and FAILING are values of COUNT-TESTS-PER-MARK for the passing and the failing tests."
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
                    ;; The score is lower if few passing tests ran the part, if the test ran few subforms of the form, and if
                    ;; more failing tests ran the part. The weights were tuned with scripts/mutants.py. A macro comes after
                    ;; the function in which it was expanded.
                    :score (+ (log (1+ fewest) 2) (/ (log (1+ ran) 2) 2) (- (log (max 1 alike) 2))
                              (if expansion 1 0))))))

(defvar *marked-files* nil
  "A table from native namestrings to conses of a file's text and a vector of the start positions of its top-level
forms. The table is filled while forms are being located; NIL at other times.")

(defun marked-file (file)
  "Return the text of FILE, a native namestring, and a vector of the start positions of its top-level forms; or NIL if FILE
cannot be read."
  (let ((known (or (gethash file *marked-files*)
                   (setf (gethash file *marked-files*)
                         (let* ((octets (file-octets file))
                                (text (and octets (octets-text octets 0 (length octets)))))
                           (cons text (and text (toplevel-starts text))))))))
    (values (car known) (cdr known))))

(defun locate-form (form)
  "Find the source of FORM, unless this was attempted before. Return true if the source is known."
  (unless (marked-form-searched form)
    (setf (marked-form-searched form) t)
    (multiple-value-bind (text starts) (marked-file (marked-form-file form))
      (when (< (marked-form-number form) (length starts))
        (let ((start (aref starts (marked-form-number form))))
          (multiple-value-bind (map end) (form-map text start)
            (when (and (consp map) (rest map))
              (setf (marked-form-text form) text
                    (marked-form-map form) map
                    (marked-form-line form) (values (line-and-column text start))
                    (marked-form-words form) (word-table (subseq text start end)))))))))
  (and (marked-form-map form) t))

;;; Macros. The expansion of a macro runs in the functions that call the macro. The coverage mark of such a call stands for
;;; the whole expansion.

(defun defined-macro (form)
  "Return the name of the macro that FORM defines, or NIL. LOCATE-FORM must have found FORM."
  (let ((map (marked-form-map form))
        (text (marked-form-text form)))
    (and (integerp (second map))
         (string= "DEFMACRO" (token-name text (second map)))
         (integerp (third map))
         (token-name text (third map)))))

(defun subform-at (map path)
  "Return the map of the subform to which PATH, a list of indices, leads in a form; or NIL if there is none. MAP is the
form's map (see FORM-MAP)."
  (dolist (index path map)
    (setf map (and (consp map) (nth index (rest map))))))

(defun mark-expansions (forms)
  "For each of FORMS that defines a macro, add the marks of the macro's calls in FORMS to the marks of the defining form.
Ignore forms that cannot be parsed."
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

(defun conditional-positions (form)
  "Return the positions of the forms in FORM whose operators satisfy CONDITIONAL-OPERATOR-P. The positions are in the text of
FORM's file."
  (let ((text (marked-form-text form))
        (positions '()))
    (labels ((visit (part depth)
               (when (and (consp part) (< depth 50))
                 (when (and (integerp (second part)) (conditional-operator-p (token-name text (second part))))
                   (push (first part) positions))
                 (dolist (inner (rest part))
                   (visit inner (1+ depth))))))
      (visit (marked-form-map form) 0))
    positions))

(defun form-has-operator-p (form &rest operators)
  "Return true when the operator of FORM is one of OPERATORS, strings in upper case."
  (let ((operator (second (marked-form-map form))))
    (and (integerp operator)
         (member (token-name (marked-form-text form) operator) operators :test #'equal))))

(defun excluded-form-p (form)
  "Return true when FORM is not code under test: it defines or selects a package, or defines a test of a known framework."
  (form-has-operator-p form "DEFPACKAGE" "DEFINE-PACKAGE" "IN-PACKAGE" "TEST" "DEF-TEST" "DEFTEST" "DEFINE-TEST"))

(defun form-name (form)
  "Return the text by which FORM is shown: the name of its definition in upper case, or `top-level form'."
  (let* ((text (marked-form-text form))
         (named (third (marked-form-map form))))
    (cond ((null named) "top-level form")
          ((integerp named) (string-upcase (subseq text named (or (catch 'scan-failed (token-end text named)) named))))
          (t (let ((end (nth-value 1 (form-map text (first named)))))
               (string-upcase (subseq text (first named) (min end (+ 60 (first named))))))))))

(defun definition-symbol-name (form)
  "Return the name of the symbol that FORM defines, or NIL. If FORM defines the function (SETF BAR), the symbol is BAR."
  (let ((named (third (marked-form-map form))))
    (when (consp named)
      (setf named (third named)))
    (and (integerp named) (token-name (marked-form-text form) named))))

;;; The lines of a suspect

(defun conditional-operator-p (name)
  "Return true when NAME is the name of an operator that may evaluate only some parts of its form."
  (member name '("IF" "WHEN" "UNLESS" "COND" "AND" "OR" "CASE" "ECASE" "TYPECASE" "ETYPECASE" "IF-LET" "WHEN-LET")
          :test #'string=))

(defun enclosing-conditional-position (map text path)
  "Return the position in TEXT of the innermost conditional, or clause of a conditional, that decides whether the subform at
PATH of a form is evaluated; or NIL. MAP is the form's map (see FORM-MAP), and PATH is a list of indices."
  (let ((form map)
        (found nil))
    (dolist (index path found)
      (when (and (consp form) (integerp (second form)))
        (let ((name (token-name text (second form))))
          (when (conditional-operator-p name)
            (let ((part (nth index (rest form))))
              (setf found (if (and part (or (string= name "COND") (search "CASE" name)))
                              (form-position part)
                              (first form)))))))
      (setf form (and (consp form) (nth index (rest form)))))))

(defun suspect-lines (suspect marks passing words number &optional (least 0))
  "Return up to NUMBER lines of SUSPECT, in order, that the failing test ran but few passing tests ran. Each element is a
list of the line number, the text, and the number of passing tests that ran the line. MARKS are the marks of the failing
test. PASSING is a value of COUNT-TESTS-PER-MARK for the passing tests, and WORDS is a value of WEIGH-WORDS. If more lines
qualify, prefer lines with conditionals and lines that contain WORDS. Lines that contain WORDS qualify even if more passing
tests ran them. If fewer than LEAST lines qualify, add other lines that the failing test ran."
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
              do (let ((condition (enclosing-conditional-position map text path)))
                   (when condition (note condition 1/2 count)))
                 (case branch
                   ((:then :else)
                    (note (or (branch-position map text path branch) (position-at-path map path)) 1/2 count))
                   (:expansion
                    (dolist (position (conditional-positions form))
                      (note position 0 count)))
                   (t (note (position-at-path map path) 0 count)))))
    (dolist (line lines)
      (incf (fourth line) (shared-word-weight words (word-table (second line)))))
    ;; The first line of the form always runs, so it tells the reader nothing, unless it is the only line.
    (setf lines (or (remove (marked-form-line form) lines :key #'first) lines)
          lines (sort (sort lines #'< :key #'first) #'> :key #'fourth))
    (let ((telling (count-if (lambda (line)
                               (destructuring-bind (count weight) (rest (rest line))
                                 (or (= count fewest) (plusp weight))))
                             lines)))
      (sort (mapcar #'butlast (subseq lines 0 (min number (length lines) (max telling least))))
            #'< :key #'first))))

(defun branch-position (map text path branch)
  "If the subform at PATH of a form in TEXT is an IF, return the position of its BRANCH, which is :THEN or :ELSE; else return
NIL. MAP is the form's map (see FORM-MAP), and PATH is a list of indices."
  (let ((form map))
    (dolist (index path)
      (setf form (and (consp form) (nth index (rest form)))))
    (when (and (consp form) (integerp (second form)) (string= "IF" (token-name text (second form))))
      (let ((part (nth (if (eq branch :then) 2 3) (rest form))))
        (and part (form-position part))))))

(defun called-macros (form packages)
  "Return the names of the macros that FORM calls and whose home package is one of PACKAGES."
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

;;; The words of failures

(defun map-words (function text)
  "Call FUNCTION with each word of TEXT, in upper case. A word is a sequence of at least three letters, digits or
other characters of Lisp names such as hyphens. A sequence of digits alone is not a word."
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
  "Return the distinct words of the message and the failed checks of VERDICT. Omit the words of the condition's type, which
would only lead to the forms that define and signal the condition."
  (let* ((table (make-hash-table :test 'equal))
         (message (or (verdict-message verdict) ""))
         (report (if (test-operation-p verdict) 0 (or (search ": " message) 0))))
    (flet ((add (text)
             (when text
               (map-words (lambda (word) (setf (gethash word table) t)) text))))
      (add (subseq message report))
      (map-words (lambda (word) (remhash word table)) (subseq message 0 report))
      (dolist (check (verdict-checks verdict))
        (add (check-printed-form check))
        (add (check-expected check)) (add (check-actual check)) (add (check-message check))))
    (loop for word being the hash-keys of table collect word)))

(defun weigh-words (words forms)
  "Return a list with a cons of the word and its weight for each of WORDS that occurs in FORMS. The weight is 1 for a word in
a single form, and falls towards 0 for a word in all forms."
  (loop with all = (log (1+ (length forms)) 2)
        for word in words
        for among = (count-if (lambda (form) (gethash word (marked-form-words form))) forms)
        when (plusp among)
          collect (cons word (- 1 (/ (log among 2) all)))))

(defun shared-word-weight (words table)
  "Return the total weight of the words that are keys of TABLE. WORDS is a list of conses of a word and its weight."
  (loop for (word . weight) in words
        when (gethash word table)
          sum weight))

;;; The order of suspects

(defun adjust-score (suspect words frames)
  "Improve the score of SUSPECT if its name is among FRAMES, the names of functions from the error outwards. Improve the
score further for each of WORDS, a value of WEIGH-WORDS, that occurs in its form. For a type definition, make the score worse
instead: such a definition contains few forms that may be wrong. Otherwise the definition of a condition would often come
first, because it has the same name as a function that signals the condition, and contains the words of the report."
  (let* ((form (suspect-form suspect))
         (frame (position (definition-symbol-name form) frames :test #'equal)))
    (if (form-has-operator-p form "DEFINE-CONDITION" "DEFSTRUCT" "DEFCLASS")
        (incf (suspect-score suspect))
        (decf (suspect-score suspect)
              (+ (if frame (/ 2 (1+ (/ frame 2))) 0)
                 (min 4 (shared-word-weight words (marked-form-words form))))))))

(defconstant +max-weighed-suspects+ 200
  "Maximum number of a test's suspects whose source is examined.")

(defun find-suspects (verdict forms passing failing number)
  "Return the NUMBER most likely suspects for VERDICT among FORMS. The second value is what WEIGH-WORDS returns for
the words of VERDICT. PASSING and FAILING are values of COUNT-TESTS-PER-MARK for the passing and the failing tests."
  (let* ((marks (verdict-marks verdict))
         (all (sort (loop for form in forms
                          for suspect = (suspect-for-form form marks passing failing)
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

(defun max-suspect-lines (place)
  "Return the maximum number of lines that are shown of a suspect. PLACE is the suspect's rank, which is 0 for the most
likely suspect. Fewer lines are shown of less likely suspects."
  (case place
    (0 12)
    ((1 2) 6)
    (t 3)))

(defun min-suspect-lines (place)
  "Return the minimum number of lines that are shown of a suspect. PLACE is the suspect's rank, as for MAX-SUSPECT-LINES. If
few lines of the most likely suspect qualify for SUSPECT-LINES, its other lines are shown as context."
  (if (zerop place) 9 0))

(defun push-test-suspects (verdict suspects words passing packages)
  "Push a record `suspect' for each of SUSPECTS for VERDICT, followed by a record `line' for each of the suspect's lines.
WORDS and PASSING are as for SUSPECT-LINES. PACKAGES are the packages of the code under test."
  (loop for suspect in suspects
        for form = (suspect-form suspect)
        for place from 0
        do (push-record "suspect"
                        :name (form-name form)
                        :file (shown-path (marked-form-file form))
                        :line (marked-form-line form)
                        :passing (suspect-passing suspect)
                        :macros (let ((macros (guarded (called-macros form packages) (failure) nil)))
                                  (and macros (format nil "~{~A~^, ~}" macros))))
           (loop for (line code count) in (guarded (suspect-lines suspect (verdict-marks verdict) passing words
                                                                  (max-suspect-lines place) (min-suspect-lines place))
                                              (failure)
                                            nil)
                 do (push-record "line" :line line :code code
                                        :passing (and (> count (suspect-passing suspect)) count)))))

;;; Reports of a test operation that counts as one test. A report is a piece of the operation's output (see
;;; test-reports.lisp). There may be many reports, but reports of the same fault usually have the same first suspect.

(defconstant +max-weighed-reports+ 300
  "Maximum number of a test operation's failed reports that are examined for suspects.")
(defconstant +max-reported-groups+ 3
  "Maximum number of groups of a test operation's reports that are pushed.")

(defstruct (report-group (:copier nil) (:predicate nil))
  "A group of reports that have their first suspect in common."
  (count 0 :type index)
  ;; REPORT is the report of the group that has the fewest marks set. SUSPECTS are the suspects for REPORT, and WORDS are the
  ;; words of REPORT as WEIGH-WORDS returns them.
  (report nil :type (or null verdict))
  (suspects '() :type list)
  (words '() :type list))

(defun group-reports (reports forms passing failing number)
  "Group the failed reports among REPORTS by their first suspect. Return a list of REPORT-GROUPs, the largest first. Consider
only the first +MAX-WEIGHED-REPORTS+ failed reports, and skip reports without suspects. FORMS, PASSING, FAILING and NUMBER
are as for FIND-SUSPECTS."
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
  "Return a vector of the verdicts among VERDICTS that have coverage marks. A verdict of a test operation that has reports is
replaced by the reports."
  (coerce (loop for verdict across verdicts
                append (cond ((plusp (length (verdict-reports verdict))) (coerce (verdict-reports verdict) 'list))
                             ((verdict-marks verdict) (list verdict))))
          'vector))

(defun push-suspects (run systems number)
  "Push the NUMBER most likely suspects in the code of SYSTEMS for each failed test of RUN: a record `suspects' with the name
of the test, then the records of PUSH-TEST-SUSPECTS. For a test operation with failed reports, push a record `suspects' for
each of the largest groups of reports. The record has the text of one report as PRINTED, and the number of further reports in
the group as MORE. If no test or report passed, push no records for test operations, because there is nothing to compare them
with."
  (let* ((verdicts (test-run-verdicts run))
         (units (tests-with-marks verdicts))
         (forms (marked-forms))
         (passing (count-tests-per-mark units #'passed-p))
         (failing (count-tests-per-mark units #'failed-p))
         (compared (some #'passed-p units))
         (packages (packages-of-systems systems)))
    (flet ((push-for (verdict suspects words)
             (push-test-suspects verdict suspects words passing packages)))
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
