;;;; Suspects: the functions that a failing test ran and few passing tests did, with the lines that make the difference.

(in-package "SBCL-HOST")

(defstruct (suspect (:copier nil) (:predicate nil))
  "A top-level form of which a failing test ran a part that few passing tests ran."
  (file "" :type string :read-only t)
  (number 0 :type index :read-only t)
  ;; How many passing tests ran that part, and the paths in the form to it.
  (passing 0 :type index)
  (paths '() :type list)
  ;; How many marks of the form the failing test has set.
  (size 0 :type index)
  ;; What is added to its place among those that as many passing tests ran.
  (weight 0 :type real)
  (text nil)
  (map nil)
  (line 0 :type index))

(defun count-passing (verdicts)
  "Return a vector of how many of the tests of VERDICTS that passed set each mark."
  (let ((counts (make-array (coverage-count *coverage*) :element-type 'fixnum :initial-element 0)))
    (loop for verdict across verdicts
          for marks = (verdict-marks verdict)
          when (and marks (eq :passed (verdict-status verdict)))
            do (loop for position = (position 1 marks) then (position 1 marks :start (1+ position))
                     while position
                     do (incf (aref counts position))))
    counts))

(defun code-file (code)
  "Return the native namestring of the file of CODE, or NIL."
  (let ((name (sb-c::debug-source-namestring (sb-c::debug-info-source (sb-kernel:%code-debug-info code)))))
    (and name (sb-ext:native-namestring (parse-namestring name)))))

(defun collect-suspects (marks counts)
  "Return the suspects for a failing test that set MARKS, when COUNTS of the passing ones did."
  (let ((table (make-hash-table :test 'equal)))
    (loop for code across (coverage-codes *coverage*)
          for start across (coverage-starts *coverage*)
          for file = (code-file code)
          for map = (sb-c::code-coverage-map code)
          when file
            do (loop for paths across map
                     for mark from start
                     when (eql 1 (sbit marks mark))
                       do (dolist (path paths)
                            (let* ((branch (when (symbolp (first path)) (first path)))
                                   (steps (reverse (if branch (rest path) path)))
                                   (key (cons file (first steps)))
                                   (passing (aref counts mark))
                                   (suspect (or (gethash key table)
                                                (setf (gethash key table)
                                                      (make-suspect :file file :number (first steps)
                                                                    :passing passing)))))
                              (incf (suspect-size suspect))
                              (when (< passing (suspect-passing suspect))
                                (setf (suspect-passing suspect) passing
                                      (suspect-paths suspect) '()))
                              (when (= passing (suspect-passing suspect))
                                (pushnew (cons branch (rest steps)) (suspect-paths suspect) :test #'equal))))))
    (loop for suspect being the hash-values of table collect suspect)))

(defun locate-suspect (suspect)
  "Find the text of SUSPECT. Return true unless it runs only so that something is printed."
  (let* ((octets (file-octets (suspect-file suspect)))
         (text (and octets (octets-text octets 0 (length octets))))
         (start (and text (toplevel-start text (suspect-number suspect))))
         (map (and start (< start (length text)) (map-form text start))))
    (when (consp map)
      (setf (suspect-text suspect) text
            (suspect-map suspect) map
            (suspect-line suspect) (values (line-and-column text start)))
      (let ((heading (form-heading text start)))
        (not (and heading
                  (or (search "(DEFMETHOD PRINT-OBJECT" heading)
                      (search "(DEFINE-CONDITION" heading)
                      (search "(DEFPACKAGE" heading)
                      (search "(IN-PACKAGE" heading))))))))

(defun suspect-name (suspect)
  "Return what SUSPECT is called: what the form defines."
  (let* ((text (suspect-text suspect))
         (named (third (suspect-map suspect))))
    (cond ((null named) "top-level form")
          ((integerp named) (string-upcase (subseq text named (or (catch 'confused (token-end text named)) named))))
          (t (let ((end (nth-value 1 (map-form text (first named)))))
               (string-upcase (subseq text (first named) (min end (+ 60 (first named))))))))))

(defun suspect-lines (suspect)
  "Return lists of number and text of the lines of SUSPECT that make the difference, in order."
  (let* ((text (suspect-text suspect))
         (map (suspect-map suspect))
         (whole (first map))
         (lines '()))
    (dolist (entry (suspect-paths suspect))
      (destructuring-bind (branch . path) entry
        (let* ((inner (or (and (member branch '(:then :else))
                               (branch-position map text path branch))
                          (position-at-path map path)))
               (line (values (line-and-column text inner))))
          (when (or (/= inner whole) (null (rest (suspect-paths suspect))))
            (pushnew (list line (line-at text inner)) lines :key #'first)))))
    (sort lines #'< :key #'first)))

(defun branch-position (map text path branch)
  "Return the position of the BRANCH, :THEN or :ELSE, of the form at PATH in MAP, of TEXT, if that is an IF; or NIL."
  (let ((form map))
    (dolist (index path)
      (setf form (and (consp form) (nth index (rest form)))))
    (when (and (consp form) (integerp (second form)) (string= "IF" (token-name text (second form))))
      (let ((part (nth (if (eq branch :then) 2 3) (rest form))))
        (and part (form-position part))))))

(defun macros-in (suspect packages)
  "Return the names of the macros of PACKAGES that SUSPECT's form calls."
  (let ((text (suspect-text suspect))
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
      (visit (suspect-map suspect) 0))
    (nreverse names)))

(defun words-of (verdict)
  "Return the words, in upper case, of what VERDICT says."
  (let ((words '()))
    (flet ((add (text)
             (when text
               (let ((start nil))
                 (loop for index from 0 to (length text)
                       for character = (and (< index (length text)) (char text index))
                       do (cond ((and character (or (alphanumericp character) (find character "-*+_")))
                                 (unless start (setf start index)))
                                (start
                                 (when (> (- index start) 3)
                                   (pushnew (string-upcase (subseq text start index)) words :test #'string=))
                                 (setf start nil))))))))
      (add (verdict-message verdict))
      (dolist (check (verdict-checks verdict))
        (add (check-shown check)) (add (check-expected check)) (add (check-actual check)) (add (check-message check))))
    words))

(defun weigh (suspect words frames)
  "Set the weight of SUSPECT: small functions come first, those that have one of FRAMES, names of functions, and those that
WORDS stand in."
  (let* ((name (suspect-name suspect))
         (end (nth-value 1 (map-form (suspect-text suspect) (first (suspect-map suspect)))))
         (text (subseq (suspect-text suspect) (first (suspect-map suspect)) end)))
    (setf (suspect-weight suspect)
          (- (log (1+ (suspect-size suspect)) 2)
             (if (member name frames :test #'string=) 2 0)
             (min 2 (* 1/2 (count-if (lambda (word) (token-position word text)) words)))))))

(defun before-p (a b)
  "True when the suspect A comes before B."
  (if (= (suspect-passing a) (suspect-passing b))
      (< (suspect-weight a) (suspect-weight b))
      (< (suspect-passing a) (suspect-passing b))))

(defconstant +weighed-suspects+ 200
  "Of how many suspects of a test the source is looked at.")

(defun suspects-of (verdict counts number)
  "Return the first NUMBER suspects for VERDICT."
  (let* ((all (sort (collect-suspects (verdict-marks verdict) counts) #'< :key #'suspect-passing))
         (some (subseq all 0 (min (length all) +weighed-suspects+)))
         (located (remove-if-not (lambda (suspect) (guarded (locate-suspect suspect) (failure) nil)) some))
         (words (words-of verdict)))
    (dolist (suspect located)
      (guarded (weigh suspect words (verdict-frames verdict)) (failure) nil))
    (let ((sorted (stable-sort located #'before-p)))
      (subseq sorted 0 (min number (length sorted))))))

(defun push-suspects (run systems number)
  "Push the first NUMBER suspects for each test of RUN that failed, of SYSTEMS' code, as records `suspects', with the name of
the test, and `suspect', with its lines after it, `line'."
  (let* ((verdicts (test-run-verdicts run))
         (counts (count-passing verdicts))
         (packages (packages-of-systems systems))
         (directories (loop for system in systems
                            for directory = (asdf:system-source-directory system)
                            when directory
                              collect (sb-ext:native-namestring directory))))
    (with-source-files ()
      (loop for verdict across verdicts
            when (and (failed-p verdict) (verdict-marks verdict))
              do (push-record "suspects" :name (verdict-title verdict))
                 (dolist (suspect (suspects-of verdict counts number))
                   (push-record "suspect"
                                :name (suspect-name suspect)
                                :file (relative-file (suspect-file suspect) directories)
                                :line (suspect-line suspect)
                                :passing (suspect-passing suspect)
                                :macros (let ((macros (guarded (macros-in suspect packages) (failure) nil)))
                                          (and macros (format nil "~{~A~^, ~}" macros))))
                   (loop for (line code) in (guarded (suspect-lines suspect) (failure) nil)
                         repeat 6
                         do (push-record "line" :line line :code code)))))))
