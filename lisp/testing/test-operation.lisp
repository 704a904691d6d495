;;;; The operation RUN-TESTS: it selects and runs tests, and pushes their results as records.

(in-package "SBCL-HOST/TESTING")

;;; Systems that hold tests

(defun dependency-name (dependency)
  "Return the name of the system that DEPENDENCY, a dependency in a system definition, designates, or NIL."
  (typecase dependency
    (asdf:component (asdf:component-name dependency))
    ((cons (eql :version)) (dependency-name (second dependency)))
    ((cons (eql :feature)) (and (uiop:featurep (second dependency)) (dependency-name (third dependency))))
    ((or string symbol) dependency)))

(defun test-operation-dependencies (system operation)
  "Return the systems on which SYSTEM's test operation depends by an operation of the class OPERATION, such as ASDF:LOAD-OP."
  (loop for (performed . dependencies) in (asdf:component-depends-on (asdf:make-operation 'asdf:test-op) system)
        when (typep (ignore-errors (asdf:make-operation (if (symbolp performed) performed (type-of performed)))) operation)
          append (loop for dependency in dependencies
                       for name = (dependency-name dependency)
                       for named = (and name (asdf:find-system name nil))
                       when named
                         collect named)))

(defun test-systems (system)
  "Return a list of the other systems whose tests SYSTEM's test operation runs, followed by SYSTEM."
  (let ((found '()))
    (labels ((visit (system)
               (unless (member system found)
                 (push system found)
                 (mapc #'visit (test-operation-dependencies system 'asdf:test-op)))))
      (visit system))
    found))

(defun systems-to-load (system)
  "Return the systems that must be loaded before SYSTEM's test operation runs: the systems that the operation would load, and
then the TEST-SYSTEMS of SYSTEM."
  (let ((tests (test-systems system)))
    (remove-duplicates (append (loop for test in tests
                                     append (test-operation-dependencies test 'asdf:load-op))
                               tests))))

(defun find-secondary-system (name)
  "Return the system named NAME, or NIL if it is unknown. NAME contains a slash. Such a system is defined in an .asd file
that is already loaded, or a package-inferred system makes it from a source file. ASDF's own search would load the .asd file
again, and would then treat the systems of that file as not loaded."
  (or (asdf:registered-system name)
      (let* ((primary (asdf:registered-system (asdf:primary-system-name name)))
             (file (subseq name (1+ (position #\/ name)))))
        (and (typep primary 'asdf:package-inferred-system)
             (probe-file (uiop:subpathname (asdf:component-pathname primary) file :type "lisp"))
             (asdf:find-system name nil)))))

(defun sibling-test-systems (system)
  "Return a list of one system whose name suggests that it holds SYSTEM's tests, such as foo/tests for foo, or NIL. The
list is for use when SYSTEM's own test operation runs no tests."
  (loop for ending in '("/tests" "/test" "-tests" "-test" ".tests" ".test" "/t")
        for name = (concatenate 'string (asdf:component-name system) ending)
        for sibling = (ignore-errors (if (find #\/ name) (find-secondary-system name) (asdf:find-system name nil)))
        when sibling
          return (list sibling)))

(defun performs-tests-p (system)
  "Return true when SYSTEM's test operation has a method other than ASDF's own."
  (let ((method (first (compute-applicable-methods #'asdf:perform (list (asdf:make-operation 'asdf:test-op) system)))))
    (and method
         (let ((specializer (second (sb-mop:method-specializers method))))
           (or (typep specializer 'sb-mop:eql-specializer)
               ;; ASDF's own method, for COMPONENT, does nothing.
               (not (eql 0 (search "ASDF" (package-name (symbol-package (class-name specializer)))))))))))

(defvar *redirecting-frameworks* nil
  "True while this thread's calls of frameworks are redirected: if the thread calls a framework's function that runs tests,
the thread's own test run runs the tests instead.")

(defvar *framework-called* nil
  "True once a call of a framework was redirected to this thread's test run, even if the call selected no tests.")

(defvar *redirect-loaded-frameworks* nil
  "While this thread's calls of frameworks are redirected, the function that redirects also the calls of frameworks that have
been loaded meanwhile; else NIL. A test operation may load the tests, and so their framework.")

(defglobal **redirection-lock** (sb-thread:make-mutex :name "redirection of test frameworks")
  "Protects the encapsulations of the frameworks' functions, which SBCL changes without a lock.")

(defvar *framework-reports* (make-synonym-stream '*standard-output*)
  "The stream of **FRAMEWORK-REPORTS**: in a thread that redirects its calls of frameworks, a stream that discards the reports;
in other threads, standard output.")

(defglobal **framework-reports** (make-synonym-stream '*framework-reports*)
  "The report stream of a framework that was loaded while calls of frameworks are redirected: it is too late to bind the
framework's own variable.")

(defun redirect-function (name type framework tests-of)
  "Encapsulate the function NAME of FRAMEWORK, with an encapsulation of TYPE, so that this thread's test run runs the tests
instead. TESTS-OF names a function that takes the same arguments and returns the tests."
  (encapsulate name type
               (lambda (original &rest arguments)
                 (declare (type function original))
                 (cond (*redirecting-frameworks*
                        (setf *framework-called* t)
                        (let ((*redirecting-frameworks* nil)
                              (*framework* framework))
                          (run-framework-tests framework (apply tests-of arguments))))
                       (t (apply original arguments))))))

(defun call-redirecting-frameworks (function)
  "Return the values of FUNCTION. Meanwhile, if this thread calls a framework's function that runs tests, run the selected
tests in this test run instead, set *FRAMEWORK-CALLED*, and return to the caller the values that the framework's function
would return. Discard the reports that the frameworks print."
  (declare (type function function))
  (let* (;; Another run in the background has encapsulations of its own, and may end earlier or later.
         (type (make-symbol "RUN-TESTS"))
         (redirected '())
         (discarded (make-broadcast-stream))
         (bound (report-stream-variables))
         ;; Conses of variables that are not in BOUND and their previous values.
         (silenced '()))
    (flet ((redirect ()
             (setf *machinery-directories* (framework-directories))
             (sb-thread:with-mutex (**redirection-lock**)
               (dolist (framework (loaded-frameworks))
                 (loop for (name . tests-of) in (framework-entries framework)
                       for symbol = (find-symbol name (framework-package framework))
                       when (and symbol (fboundp symbol) (not (member symbol redirected)))
                         do (push symbol redirected)
                            (redirect-function symbol type framework tests-of)))
               (dolist (variable (set-difference (report-stream-variables) bound))
                 (let ((value (sb-ext:symbol-global-value variable)))
                   (unless (or (eq **framework-reports** value) (typep value '(or null broadcast-stream)))
                     (push (cons variable value) silenced)
                     (setf (sb-ext:symbol-global-value variable) **framework-reports**)))))))
      (unwind-protect
           (let ((*redirecting-frameworks* t)
                 (*redirect-loaded-frameworks* #'redirect)
                 (*framework-reports* discarded))
             (redirect)
             (progv bound (make-list (length bound) :initial-element discarded)
               (funcall function)))
        (sb-thread:with-mutex (**redirection-lock**)
          (loop for (variable . value) in silenced
                do (when (eq **framework-reports** (sb-ext:symbol-global-value variable))
                     (setf (sb-ext:symbol-global-value variable) value)))
          (dolist (symbol redirected)
            (sb-int:unencapsulate symbol type)))))))

;;; Test operations

(defun reload-for-tests (systems &optional files)
  "Load the changed files of SYSTEMS and then FILES, native namestrings of files that belong to no system. Report the values
and definitions that remain from old versions of the files, and from files that their systems no longer contain."
  (let ((*reloaded-files* (list '())))
    (unwind-protect
         (progn
           (dolist (system systems)
             (load-for-tests system t))
           (dolist (file files)
             (call-loading-for-tests (shown-path file) (lambda () (load-separate-file file)))))
      (report-stale-definitions (car *reloaded-files*)))
    (report-removed-files)))

(defun perform-test-operation (system)
  "Perform SYSTEM's test operation. Tests that the operation runs with a known framework become tests of this test run. If
there are none, the operation itself counts as one test, which fails if the operation signals an error, is ended early, or
returns false and prints a failure. The operation does not count as a passed test if it called a framework that ran no tests,
or if it does nothing."
  (let* ((verdicts (test-run-verdicts *test-run*))
         (before (length verdicts))
         (*framework-called* nil)
         (verdict (make-verdict :framework "ASDF" :name (asdf:component-name system)
                                :title (format nil "test-op of ~A" (asdf:component-name system)))))
    (call-as-test verdict
                  (lambda ()
                    (block perform
                      (handler-bind ((error (lambda (condition)
                                              ;; An error in a framework's test is left to that test. If nothing handles
                                              ;; the error, only the test ends.
                                              (when (eq verdict *verdict*)
                                                ;; If tests have failed, the error only reports these failures.
                                                (unless (find-if #'failed-p verdicts :start before)
                                                  (record-ending-condition verdict condition))
                                                (return-from perform)))))
                        (multiple-value-bind (values printed)
                            (call-keeping-output
                             verdict
                             (lambda ()
                               (call-redirecting-frameworks
                                (lambda ()
                                  (asdf:perform (asdf:make-operation 'asdf:test-op) system)))))
                          (when (= before (length verdicts))
                            (judge-returned-values verdict values printed)))))))
    (if (= before (length verdicts))
        (judge-reports verdict)
        (setf (verdict-reports verdict) #()))
    (when (or (not (eq :passed (verdict-status verdict)))
              (and (= before (length verdicts)) (not *framework-called*) (performs-tests-p system)))
      (record-verdict verdict))))

(defun run-system-tests (system reload)
  "Run the tests of SYSTEM and of the systems that SYSTEM's test operation names. If there are none, run the tests of the
system whose name suggests that it holds SYSTEM's tests; if RELOAD is true, load the changed files of that system first. If
there are still no tests, run the tests in the packages of all these systems and of the systems that ASDF infers for them.
Return the systems."
  (let* ((systems (test-systems system))
         (verdicts (test-run-verdicts *test-run*)))
    (mapc #'load-for-tests systems)
    (mapc #'perform-test-operation systems)
    (when (zerop (length verdicts))
      (let ((siblings (set-difference (sibling-test-systems system) systems)))
        (when reload
          (reload-for-tests siblings))
        (mapc #'load-for-tests siblings)
        (mapc #'perform-test-operation siblings)
        (setf systems (append siblings systems)))
      (when (zerop (length verdicts))
        (run-package-tests (packages-of-systems (with-inferred-systems systems)))))
    systems))

(defun run-package-tests (packages)
  "Run the tests that belong to one of PACKAGES."
  (run-matching-tests (lambda (framework test)
                        (member (funcall (framework-home framework) test) packages))))

(defun run-matching-tests (wanted-p)
  "Run the tests that satisfy WANTED-P, a predicate that takes a framework and a test. Consider all loaded frameworks."
  (declare (type function wanted-p))
  (dolist (framework (reverse (loaded-frameworks)))
    (let* ((*framework* framework)
           (tests (remove-if-not (lambda (test) (funcall wanted-p framework test))
                                 (funcall (framework-tests framework)))))
      (when tests
        (run-framework-tests framework tests)))))

;;; Tests by name

(defun split-name (text)
  "Return the name of the symbol that TEXT spells in reader syntax, or TEXT itself if it ends inside a name. The second value
is the name of the package in TEXT's package prefix, or NIL if TEXT has no prefix. The third value is READ-NAME's."
  (let* ((text (string-left-trim "'" (string-trim " " text)))
         (colon (position #\: text :end (position #\| text) :from-end t))
         (package (and colon (string-right-trim ":" (subseq text 0 colon))))
         (problem (nth-value 2 (read-name text))))
    (values (if problem text (token-name (coerce text 'source-text) 0))
            (cond ((null colon) nil)
                  ((string= package "") "KEYWORD")
                  (t package))
            problem)))

(defun run-tests-named (text)
  "Run the tests that TEXT names: a test, or the tests of a group such as a suite. If TEXT has no package prefix, prefer
tests of the current package to tests with the same name in other packages. If TEXT names no tests, signal an error that
suggests similar names or, if no tests are loaded or TEXT names an empty suite, says so."
  (multiple-value-bind (name package-name problem) (split-name text)
    (let ((package (and package-name (find-package-or-suggest package-name)))
          (names '())
          (found nil))
      (labels ((same-p (candidate)
                 (and (typep candidate '(or symbol string))
                      (progn (push (string candidate) names) t)
                      (if (stringp candidate)
                          (or (string= candidate text) (string-equal candidate name))
                          (and (string= name (symbol-name candidate))
                               (or (null package) (eq candidate (find-symbol name package)))))))
               (run (home)
                 (dolist (framework (reverse (loaded-frameworks)))
                   (let* ((*framework* framework)
                          (tests (remove-if-not
                                  (lambda (test)
                                    (let ((candidate (funcall (framework-name framework) test)))
                                      (and (same-p candidate)
                                           (or (null home)
                                               (eq home (funcall (framework-home framework) test))
                                               (and (symbolp candidate) (eq candidate (find-symbol name home)))))))
                                  (funcall (framework-tests framework))))
                          (all (remove-duplicates
                                (append tests
                                        (funcall (framework-groups framework)
                                                 (lambda (group)
                                                   (and (same-p group)
                                                        (or (null home) (eq home (symbol-home group)))
                                                        (setf found t)))))
                                :from-end t)))
                     (when all
                       (setf found t)
                       (run-framework-tests framework all))))))
        (run (and (null package) (current-package)))
        (when (zerop (length (test-run-verdicts *test-run*)))
          (run nil))
        (when (zerop (length (test-run-verdicts *test-run*)))
          (when found
            (signal-no-tests "Nothing ran: the suite ~A contains no tests." text))
          (when problem
            (signal-no-tests "There is no test or suite named ~A. This name does not spell a symbol: ~A. In a name, \\| ~
                              spells a vertical bar, and \\\\ a backslash."
                             text problem))
          (unless (some (lambda (framework)
                          (let ((*framework* framework))
                            (funcall (framework-tests framework))))
                        (loaded-frameworks))
            (signal-no-tests "There is no test or suite named ~A: no tests of a supported framework are loaded. Load the ~
                              tests first, or name their system~:[~; (`system`)~]."
                             text (eq :agent (audience))))
          (signal-no-tests "There is no test or suite named ~A. Loaded frameworks: ~{~A~^, ~}.~
                            ~@[ Did you mean ~{~A~^, ~}?~]"
                           text (mapcar #'framework-title (loaded-frameworks))
                           (similar-names name (remove-duplicates names :test #'string=))))))))

(defun signal-no-tests (control &rest arguments)
  "Signal an error that says why there are no tests. The message is made from the format control CONTROL and ARGUMENTS."
  (error "~A" (with-server-syntax () (apply #'format nil control arguments))))

;;; Source locations of tests

(defun form-matches-p (object map text)
  "Return true when OBJECT was probably read from the form of TEXT whose map is MAP (see FORM-MAP)."
  (cond ((consp object)
         (and (consp map)
              (if (and (eql (first map) (second map)) (find (char text (first map)) "'#`,"))
                  ;; Here the form of TEXT is an abbreviation such as 'X or #'X.
                  (and (member (car object) '(quote function sb-int:quasiquote))
                       (consp (cdr object))
                       (form-matches-p (second object) (third map) text))
                  (loop for rest = object then (cdr rest)
                        for maps = (rest map) then (rest maps)
                        do (when (atom rest)
                             (return (or rest (null maps))))
                           (unless (and maps (form-matches-p (car rest) (first maps) text))
                             (return nil))))))
        ((consp map) (typep object '(not (or symbol number string character))))
        ((symbolp object)
         (if (null object)
             (or (char= #\( (char text map)) (string= "NIL" (token-name text map)))
             (string= (symbol-name object) (token-name text map))))
        ((stringp object)
         (and (char= #\" (char text map))
              (or (find #\" object)
                  (find #\\ object)
                  (eql (+ 1 map) (search (format nil "~A\"" object) text
                                         :start2 (1+ map) :end2 (min (length text) (+ 2 map (length object))))))))
        ((integerp object)
         (let ((written (ignore-errors (parse-integer text :start map :end (token-end text map)))))
           (or (null written) (= written object))))
        ((characterp object)
         (let ((token (subseq text map (token-end text map))))
           (or (/= 3 (length token)) (char= object (char token 2)))))
        (t t)))

(defun find-check-position (form map text)
  "Return the position in TEXT of the check that contains FORM, such as (is FORM). If there is no check, return the position
of FORM itself, or NIL if FORM does not occur. MAP is the position map (see lisp/core/source.lisp) of the form in TEXT that
defines the test."
  (let ((found nil))
    (labels ((visit (part around depth)
               (when (and (consp part) (< depth 30))
                 (when (form-matches-p form part text)
                   (when (and around (not (eq around map)) (eq part (third around)))
                     (return-from find-check-position (first around)))
                   (setf found (or found (first part))))
                 (dolist (inner (rest part))
                   (visit inner part (1+ depth))))))
      (and (consp form) (visit map nil 0))
      found)))

(defconstant +max-check-length+ 300
  "Maximum number of characters of a check whose source text is shown. A longer check is printed as an object instead.")

(defun source-of-check (text position)
  "Return the form of TEXT at POSITION on one line, or NIL if it is longer than +MAX-CHECK-LENGTH+ or cannot be parsed."
  (let ((end (nth-value 1 (form-map text position))))
    (when (and end (<= (- end position) +max-check-length+))
      (with-output-to-string (line)
        (loop with blank = nil
              for character across (subseq text position end)
              do (cond ((member character '(#\Newline #\Return)) (setf blank t))
                       ((and blank (whitespace-p character)))
                       (t (when blank (write-char #\Space line))
                          (setf blank nil)
                          (write-char character line))))))))

(defun test-name-position (map text name)
  "Return the position of NAME, a string, in the form of TEXT with the map MAP (see FORM-MAP) if the form may define the test
NAME, else NIL."
  (let ((named (third map)))
    (flet ((text-position (form)
             (and (integerp form)
                  (or (string= name (token-name text form))
                      (and (char= #\" (char text form))
                           (eql (1+ form) (search name text :start2 form
                                                            :end2 (min (length text) (+ form 1 (length name)))))))
                  form)))
      (or (text-position named)
          (and (consp named) (or (text-position (second named))
                                 (and (rest (rest named)) (text-position (third named)))))))))

(defun designated-package (text position)
  "Return the package that the string or symbol at POSITION in TEXT designates, or NIL if there is none."
  (find-package (if (char= #\" (char text position))
                    (subseq text (1+ position) (position #\" text :start (1+ position)))
                    (token-name text position))))

(defun test-name-match (text position package test)
  "Compare the name at POSITION in TEXT, from which the name of a test was made, with TEST, the test's name. PACKAGE is the
current package there, or NIL if it is unknown. Return :EXACT if TEST is accessible in the name's package, or if TEST is not a
symbol with a home package; :POSSIBLE if the name's package is unknown; else NIL."
  (let ((prefix (and (char/= #\" (char text position))
                     (nth-value 1 (split-name (subseq text position (token-end text position)))))))
    (when prefix
      ;; A macro may make a symbol of the current package from a keyword.
      (setf package (and (or (string/= "KEYWORD" prefix) (keywordp test))
                         (find-package-leniently prefix))))
    (cond ((null (symbol-home test)) :exact)
          ((null package) :possible)
          ((eq test (find-symbol (symbol-name test) package)) :exact))))

(defun toplevel-maps (text end)
  "Return the maps (see FORM-MAP) of the top-level forms of TEXT. Where TEXT cannot be parsed, continue at the next line that
begins a form. At END, a value of MONOTONIC-MILLISECONDS, stop."
  (let ((position 0)
        (maps '()))
    (loop
      (when (> (monotonic-milliseconds) end)
        (return (nreverse maps)))
      (multiple-value-bind (map map-end) (form-map text position)
        (cond (map
               (push map maps)
               (setf position map-end))
              (t
               (let ((next (search (format nil "~%(") text :start2 (min (length text) (1+ position)))))
                 (unless next (return (nreverse maps)))
                 (setf position (1+ next)))))))))

(defun test-form-map (name text maps test)
  "Return the map (see FORM-MAP) of the form of TEXT that defines TEST, the name of a test, from the string NAME; or NIL. The
form is a top-level form whose operator is not a standard one. If several forms with the same operator define the test,
return the map of the last form, whose definition is in effect. MAPS are the TOPLEVEL-MAPS of TEXT. The second value is
TEST-NAME-MATCH's."
  (let ((package nil)
        (found nil)
        (found-operator nil)
        (found-match nil))
    (labels ((visit (form)
               (when (and (consp form) (integerp (second form)))
                 (let ((operator (token-name text (second form))))
                   (cond ((string= "IN-PACKAGE" operator)
                          (setf package (and (integerp (third form)) (designated-package text (third form)))))
                         ((member operator '("EVAL-WHEN" "LOCALLY" "MACROLET" "PROGN") :test #'string=)
                          (mapc #'visit (rest (rest form))))
                         ((not (find-symbol operator "COMMON-LISP"))
                          (let* ((position (test-name-position form text name))
                                 (match (and position (test-name-match text position package test))))
                            (when (and match
                                       (or (null found)
                                           (and (eq :exact match) (eq :possible found-match))
                                           (and (eq match found-match) (string= operator found-operator))))
                              (setf found form
                                    found-operator operator
                                    found-match match)))))))))
      (mapc #'visit maps))
    (values found found-match)))

(defun test-names (test)
  "Return a list of strings from which the name TEST may have been made: the name itself, and then shorter names, longest
first. A macro that defines several tests derives their names from one name, such as PARSE.COMPILED from PARSE."
  (let ((whole (string test)))
    (cons whole (loop for end = (position #\. whole :from-end t) then (position #\. whole :from-end t :end end)
                      while (and end (plusp end))
                      collect (subseq whole 0 end)))))

(defun map-source-words (function text)
  "Call FUNCTION with each word of TEXT, a longest substring of constituents other than `:', `#' and `|'. If TOKEN-POSITION
finds a token in TEXT, then each word of the token is a word of TEXT."
  (declare (type function function) (type source-text text))
  (let ((start nil))
    (dotimes (position (1+ (length text)))
      (let ((character (if (< position (length text)) (schar text position) #\Space)))
        (cond ((and (constituent-p character) (not (find character ":#|")))
               (unless start
                 (setf start position)))
              (start
               (funcall function (subseq text start position))
               (setf start nil)))))))

(defun longest-word (name)
  "Return the longest word of NAME, or an empty string if there is none."
  (let ((longest ""))
    (map-source-words (lambda (word) (when (> (length word) (length longest)) (setf longest word)))
                      (coerce name 'source-text))
    longest))

(defconstant +max-search-milliseconds+ 5000
  "Maximum time for which the files are searched for the sources of failed tests.")

(defun find-test-forms (tests files limit)
  "Search FILES, native namestrings, for the forms that define TESTS, names of tests, for at most about LIMIT milliseconds.
Return an EQUAL hash table with the names of the tests that were found as keys. The value is a list of the rank of the form,
where less is better; the file; its text; and the map of the form (see FORM-MAP)."
  (let ((end (+ limit (monotonic-milliseconds)))
        (forms (make-hash-table :test 'equal))
        ;; The keys are words. The values are lists of lists of a test, one of its TEST-NAMES, and the ranks of an exact and
        ;; of a possible match.
        (words (make-hash-table :test 'equalp)))
    (flet ((best-rank (test)
             (or (first (gethash test forms)) most-positive-fixnum)))
      (dolist (test tests)
        (loop with names = (test-names test)
              for name in names
              for rank from 0
              do (push (list test name rank (+ rank (length names))) (gethash (longest-word name) words))))
      (dolist (file files)
        (when (or (every (lambda (test) (zerop (best-rank test))) tests)
                  (> (monotonic-milliseconds) end))
          (return))
        (let* ((octets (guarded (read-octets file) (failure) nil))
               (text (and octets (octets-text octets 0 (length octets))))
               (mentioned (make-hash-table :test 'eq)))
          (when text
            (map-source-words (lambda (word)
                                (let ((names (gethash word words)))
                                  (when names
                                    (setf (gethash names mentioned) t))))
                              text))
          (loop with maps = (and (plusp (hash-table-count mentioned)) (guarded (toplevel-maps text end) (failure) '()))
                for names being the hash-keys of mentioned
                do (loop for (test name exact possible) in names
                         until (> (monotonic-milliseconds) end)
                         do (when (< exact (best-rank test))
                              (multiple-value-bind (map match)
                                  (guarded (test-form-map name text maps test) (failure) nil)
                                (let ((rank (if (eq :exact match) exact possible)))
                                  (when (and map (< rank (best-rank test)))
                                    (setf (gethash test forms) (list rank file text map))))))))))
      forms)))

(defun test-location (verdict file text map)
  "Return the source location of the test of VERDICT, which the form with the map MAP in TEXT, the text of FILE, defines. The
location is a list of three elements: the file, as SHOWN-PATH returns it, and the number and the text of a line. The line is
that of the first failed check whose source is found, or else the first line of the test. Also store the lines and the source
of the failed checks in VERDICT."
  (let ((position (first map)))
    (dolist (check (reverse (verdict-checks verdict)))
      (let ((check-position (and (check-form check)
                                 (guarded (find-check-position (check-form check) map text) (failure) nil))))
        (when check-position
          (setf position check-position
                (check-line check) (values (line-and-column text check-position))
                (check-printed-form check) (or (source-of-check text check-position)
                                               (check-printed-form check))))))
    (list (shown-path file)
          (values (line-and-column text position))
          (line-at text position))))

;;; Records of the results

(defconstant +max-reported-failures+ 500
  "Maximum number of failed tests that are reported with their source locations.")
(defconstant +max-reported-tests+ 5000
  "Maximum number of tests that are reported by name.")

(defun count-status (status verdicts)
  "Return the number of verdicts with STATUS in VERDICTS."
  (count status verdicts :key #'verdict-status))

(defun push-verdict (verdict location system)
  "Push records of VERDICT and its failed checks. LOCATION is a value of TEST-LOCATION. SYSTEM is the name of the tested
system if several systems are tested, else NIL."
  (destructuring-bind (&optional file line code) location
    (push-record "test"
                 :system system
                 :name (verdict-title verdict)
                 :framework (verdict-framework verdict)
                 :status (verdict-status verdict)
                 :milliseconds (values (round (verdict-milliseconds verdict)))
                 :checks (verdict-passed-checks verdict)
                 :message (verdict-message verdict)
                 :error (verdict-error verdict)
                 :file file :line line :code code))
  (when (failed-p verdict)
    (dolist (check (verdict-checks verdict))
      (push-record "check"
                   :form (check-printed-form check)
                   :expected (check-expected check)
                   :actual (check-actual check)
                   :message (check-message check)
                   :file (and (check-file check) (shown-path (check-file check)))
                   :line (check-line check)))
    (when (plusp (verdict-more-checks verdict))
      (push-record "more-checks" :count (verdict-more-checks verdict)))))

(defun push-counts (run)
  "Push a record of the duration of RUN and the number of its tests for each status."
  (let ((verdicts (test-run-verdicts run)))
    (push-record "run"
                 :system (test-run-system run)
                 :passed (count-status :passed verdicts)
                 :failed (count-status :failed verdicts)
                 :errors (count-status :error verdicts)
                 :skipped (count-status :skipped verdicts)
                 :milliseconds (test-run-milliseconds run))))

(defun push-verdicts (run share)
  "Push the verdict of each test of RUN, failed tests first. SHARE is the fraction of the maximum number of reported tests
that RUN may use, because the runs of several systems share the maximum."
  (let* ((verdicts (test-run-verdicts run))
         (failed (remove-if-not #'failed-p verdicts))
         (systems (test-run-systems run))
         (searched (loop for verdict across failed
                         repeat (floor (* share +max-reported-failures+))
                         unless (or (some #'check-file (verdict-checks verdict))
                                    (not (typep (verdict-name verdict) '(or symbol string))))
                           collect (verdict-name verdict)))
         ;; A test operation may load further systems, which hold the tests.
         (files (and searched
                     (system-files (append (with-inferred-systems systems)
                                           (mapcar #'asdf:registered-system (user-systems))))))
         (forms (find-test-forms searched files (* share +max-search-milliseconds+)))
         (count 0))
    (flet ((report (verdict)
             (when (< count (* share +max-reported-tests+))
               (incf count)
               (push-verdict verdict (and (failed-p verdict)
                                          (<= count (* share +max-reported-failures+))
                                          (guarded (or (find-check-location verdict)
                                                       (let ((form (gethash (verdict-name verdict) forms)))
                                                         (and form (apply #'test-location verdict (rest form)))))
                                              (failure)
                                            nil))
                             (test-run-system run)))))
      (map nil #'report failed)
      (map nil (lambda (verdict) (unless (failed-p verdict) (report verdict))) verdicts))))

(defun find-check-location (verdict)
  "Return the source location of the first failed check of VERDICT whose file the framework knows, or NIL if there is no such
check. Like a value of TEST-LOCATION, the location is a list of the file, the line number, and the text of the line. Here the
text is always NIL."
  (let ((check (find-if #'check-file (verdict-checks verdict))))
    (and check
         (list (shown-path (check-file check)) (check-line check) nil))))

(defun user-systems ()
  "Return the names of the loaded systems that were not in the core when the image started."
  (remove-if (lambda (name) (member name **core-systems** :test #'string=)) (asdf:already-loaded-systems)))

(defun run-selected-tests (run system package name reload)
  "Run the tests of SYSTEM, or else of the package named PACKAGE, or else the tests that NAME names, as part of RUN. If
RELOAD is true, load the changed files of a test system that is found by its name. Signal an error if there are no tests."
  (let ((start 0))
    (call-with-test-run run
                        (lambda ()
                          (setf start (monotonic-milliseconds))
                          (cond (system (setf (test-run-systems run) (run-system-tests system reload)))
                                (package (run-package-tests (list (find-package-or-suggest package))))
                                (t (run-tests-named name)))))
    (setf (test-run-milliseconds run) (round (- (monotonic-milliseconds) start))))
  (when (zerop (length (test-run-verdicts run)))
    (signal-no-tests "Nothing ran: there are no tests of ~:[the package ~A~;the system ~:*~A~*, and its test-op runs ~
                      none~]. Loaded frameworks: ~:[none~;~:*~{~A~^, ~}~]. If another system or package has the tests, name it."
                     (and system (asdf:component-name system)) package (mapcar #'framework-title (loaded-frameworks)))))

(defun call-reporting-system-errors (run function)
  "Return the values of FUNCTION, which finds and runs the tests of RUN's system. If an error ends FUNCTION, report the error
like the error of a test with the system's name, so that the tests of other systems still run."
  (declare (type function function))
  (let ((verdict (make-verdict :title (test-run-system run) :name (test-run-system run) :status :error)))
    (block one
      (let ((*on-debugger* (lambda (condition)
                             (let ((*test-run* run))
                               (record-debugger-entry verdict condition (frame-pointer-here))
                               ;; Record the verdict before the non-local exit: the report names the file that is being
                               ;; loaded, which is unknown afterwards.
                               (record-verdict verdict))
                             (setf (test-run-milliseconds run) (or (test-run-milliseconds run) 0))
                             (return-from one))))
        (with-user-code-boundary ()
          (funcall function))))))

;;; Tests in another image

(defun push-system-locations (run)
  "Push records by which another image can load the tests of RUN: a record `directory' for each directory of .asd files, and
a record `load' for each system that defines a package of RUN's tests. If an entry of ASDF:*CENTRAL-REGISTRY* is for
SEARCH-DEFINITION-ENTRIES, its record also has the primary system and the .asd file."
  (loop for (directory primary file)
          in (remove-duplicates
              (append (loop for entry in asdf:*central-registry*
                            for directory = (ignore-errors (eval entry))
                            when (typep directory '(or string pathname))
                              collect (cons (sb-ext:native-namestring (merge-pathnames directory))
                                            (and (typep entry '(cons (eql values) (cons t (cons string (cons pathname)))))
                                                 (list (third entry) (sb-ext:native-namestring (fourth entry))))))
                      (loop for name in (asdf:registered-systems)
                            for directory = (asdf:system-source-directory name)
                            when (and directory (not (typep directory 'logical-pathname)))
                              collect (list (sb-ext:native-namestring directory))))
              :test #'equal :from-end t)
        do (push-record "directory" :system (test-run-system run) :name directory :primary primary :file file))
  (let ((packages (remove nil (remove-duplicates (map 'list (lambda (verdict) (symbol-home (verdict-name verdict)))
                                                      (test-run-verdicts run))))))
    (dolist (name (user-systems))
      (when (intersection packages (packages-of-systems (list (asdf:find-system name))))
        (push-record "load" :system (test-run-system run) :name name)))))

(defun run-requested-tests (run &key system directory definition fallback looked package name reload load beside covering)
  "Run the tests of SYSTEM, of PACKAGE, or the tests that NAME names, as part of RUN. DIRECTORY, DEFINITION, FALLBACK and
LOOKED are as for the operation LOAD, and the other arguments are as for the operation RUN-TESTS. If COVERING is true, record
coverage."
  (let* ((*searched-locations* looked)
         (system (and system
                      (progn (register-definition system directory definition fallback)
                             (asdf:find-system (known-system-name system)))))
         (systems (and system (systems-to-load system)))
         (covered (and covering
                       (load-with-coverage (or systems (mapcar #'asdf:find-system load))
                                           (uiop:subpathname (uiop:parse-native-namestring **scratch-directory**
                                                                                           :ensure-directory t)
                                                             "coverage/")))))
    (dolist (name load)
      (load-for-tests (asdf:find-system name)))
    (cond ((not reload))
          (systems (reload-for-tests (reverse systems)))
          (t (reload-for-tests (mapcar #'asdf:find-system (user-systems)) (changed-separate-files))))
    (unless (and beside (notevery #'asdf:component-loaded-p systems))
      (mapc #'load-for-tests systems)
      (let ((*coverage* (and covering (current-coverage))))
        (setf (test-run-marked-systems run) covered
              (test-run-coverage run) *coverage*)
        (run-selected-tests run system package name reload)))))

(define-operation :run-tests (evaluate &key systems package name (timeout 60000) reload registry load way beside
                                       (suspects 0) endless)
  "Run the tests of SYSTEMS, or else of PACKAGE, or else the test or group of tests NAME. Each of SYSTEMS is a cons of the
keyword :SYSTEM and a plist. In this plist, the property :SYSTEM is the system's name, and the other properties are arguments
of the operation LOAD that help to find the system. Each test may take TIMEOUT milliseconds. If RELOAD is true, first load
changed files.

Push a record `run' with the counts, and for each test a record `test', failed tests first, followed by its failed checks,
`check'. If there are several systems, these records name their system, and a record `system' precedes the output of each
system's tests. If the tests of a system cannot be run, the results of the other systems are still reported.

In an image other than the session's, REGISTRY lists where to find .asd files: each element is a cons of the keyword
:DIRECTORY and a plist with the fields of a record `directory'. LOAD lists systems to load first. If
SUSPECTS is not 0, find up to SUSPECTS suspects by coverage for each failed test. ENDLESS lists the names of tests that are
known to exceed their time limit, and get less time. If WAY is true, push the records of PUSH-SYSTEM-LOCATIONS. If BESIDE is
true, another image runs the tests, too: run only the tests of systems that are already loaded."
  (setf asdf:*central-registry*
        (append asdf:*central-registry*
                (loop for (nil . location) in registry
                      for directory = (uiop:parse-native-namestring (getf location :name) :ensure-directory t)
                      for file = (getf location :file)
                      collect (if file
                                  (list 'values directory (getf location :primary) (sb-ext:parse-native-namestring file))
                                  directory))))
  (let* ((several (rest systems))
         (errors 0)
         (runs (loop for (nil . arguments) in (or systems '((nil)))
                     for title = (and several (getf arguments :system))
                     for run = (make-test-run :limit timeout :endless endless :system title :errors errors)
                     do (flet ((run ()
                                 (apply #'run-requested-tests run
                                        :package package :name name :reload reload :load load :beside beside
                                        :covering (plusp suspects) arguments)))
                          (cond (several
                                 ;; Flush earlier output: output after the record belongs to this system.
                                 (flush-output)
                                 (push-record "system" :name title)
                                 (call-reporting-system-errors run #'run))
                                (t (run))))
                        (setf errors (test-run-errors run))
                     collect run))
         (over (remove nil runs :key #'test-run-milliseconds)))
    (mapc #'push-counts over)
    (dolist (run over)
      (push-verdicts run (/ (length over)))
      (let ((*coverage* (test-run-coverage run)))
        (when *coverage*
          (push-suspects run (test-run-marked-systems run) suspects))))
    (when way
      (mapc #'push-system-locations runs))
    '()))
