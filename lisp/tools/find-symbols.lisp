;;;; find-symbols: the symbols and packages whose names match a query, best match first.

(in-package "SBCL-HOST/TOOLS")

;;; Patterns
;;;
;;; A query consists of words separated by whitespace. A name must match all words, and case is ignored. A word
;;; matches the whole name, the beginning of the name, the beginning of a word in the name, or any other part of the name. A
;;; word that contains * or ? is a glob, which must match the whole name. A word such as *PRINT-CASE* is also compared with
;;; the name literally.

(defconstant +exact+ 0
  "The kind of match when a name equals the word of the query.")
(defconstant +prefix+ 1
  "The kind of match when a name begins with the word of the query.")
(defconstant +word+ 2
  "The kind of match when a word in a name begins with the word of the query.")
(defconstant +substring+ 3
  "The kind of match when a name contains the word of the query inside one of its words, or matches the word as a glob.")

(defconstant +max-query-words+ 8
  "Maximum number of words of a query that are used.")

(declaim (inline fold-case))
(defun fold-case (character)
  "Return CHARACTER in upper case."
  (declare (type character character))
  (if (char< character (code-char 128))
      (if (char<= #\a character #\z) (code-char (- (char-code character) 32)) character)
      (char-upcase character)))

(defmacro with-specialized-string ((name) &body body)
  "Evaluate BODY with NAME, a variable, declared as a simple string. BODY is compiled once for each representation of symbol
names."
  `(if (typep ,name 'simple-base-string)
       (let ((,name ,name)) (declare (type simple-base-string ,name)) ,@body)
       (let ((,name ,name)) (declare (type (simple-array character (*)) ,name)) ,@body)))

(defun match-word (word name)
  "Return the kind of match between NAME and WORD, which is in upper case: +EXACT+, +PREFIX+, +WORD+ or +SUBSTRING+; or
NIL."
  (declare (type text word) (type simple-string name)
           (optimize speed (safety 0) (sb-ext:inhibit-warnings 3)))
  (with-specialized-string (name)
            (let ((last (- (length name) (length word)))
                  (best nil))
              (declare (type fixnum last))
              (cond ((minusp last) nil)
                    ((zerop (length word)) +prefix+)
                    (t
                     (loop with first of-type character = (schar word 0)
                           for start of-type fixnum from 0 to last
                           when (and (char= first (fold-case (schar name start)))
                                     (loop for index of-type fixnum from 1 below (length word)
                                           always (char= (schar word index) (fold-case (schar name (+ start index))))))
                             do (cond ((zerop start)
                                       (return-from match-word (if (zerop last) +exact+ +prefix+)))
                                      ((not (alphanumericp (schar name (1- start))))
                                       (return-from match-word +word+))
                                      (t (setf best +substring+))))
                     best)))))

(defun match-glob (glob name)
  "Return +SUBSTRING+ if NAME matches GLOB, which is in upper case, or NIL. In GLOB, * matches any number of characters, and
? matches one character."
  (declare (type text glob) (type simple-string name)
           (optimize speed (safety 0) (sb-ext:inhibit-warnings 3)))
  (with-specialized-string (name)
    (let ((at 0) (position 0) (star -1) (resume 0))
      (declare (type fixnum at position star resume))
      (loop
        (cond ((and (< at (length glob)) (char= (schar glob at) #\*))
               (setf star at resume position)
               (incf at))
              ((>= position (length name))
               (return (and (= at (length glob)) +substring+)))
              ((and (< at (length glob))
                    (or (char= (schar glob at) #\?)
                        (char= (schar glob at) (fold-case (schar name position)))))
               (incf at)
               (incf position))
              ((minusp star) (return nil))
              (t
               ;; Let the last star match one more character.
               (setf position (incf resume)
                     at (1+ star))))))))

(defun glob-literal (word)
  "Return the longest part of WORD without * or ?, or NIL if WORD is not a glob, that is, contains neither of them."
  (let ((longest nil)
        (start 0))
    (loop for end = (position-if (lambda (character) (find character "*?")) word :start start)
          while (or end longest)
          do (let ((part (subseq word start end)))
               (when (or (null longest) (> (length part) (length longest)))
                 (setf longest part))
               (if end
                   (setf start (1+ end))
                   (return (coerce longest 'text)))))))

(defun query-words (query)
  "Return the first +MAX-QUERY-WORDS+ words of QUERY in upper case. Text between bars is part of one word."
  (let ((words '()) (start nil) (barred nil))
    (flet ((end (position)
             (when start
               (push (coerce (map 'string #'fold-case (remove #\| (subseq query start position))) 'text) words)
               (setf start nil))))
      (loop for character across query
            for position from 0
            do (cond ((and (whitespace-p character) (not barred)) (end position))
                     (t (when (char= character #\|) (setf barred (not barred)))
                        (unless start (setf start position)))))
      (end (length query)))
    (let ((words (nreverse words)))
      (subseq words 0 (min +max-query-words+ (length words))))))

(defun query-matcher (query)
  "Return a function that returns the kind of match between a name and QUERY: +EXACT+, +PREFIX+, +WORD+ or +SUBSTRING+, from
best to worst, or NIL. If QUERY has several words, the worst match counts."
  (let ((words (loop for word in (query-words query) collect (cons word (glob-literal word)))))
    (lambda (name)
      (declare (type simple-string name) (optimize speed))
      (let ((worst (if words +exact+ +prefix+)))
        (declare (type fixnum worst))
        (loop for (word . literal) in words
              for match = (cond ((null literal) (match-word word name))
                                ((match-word literal name)
                                 (if (string-equal word name) +exact+ (match-glob word name))))
              do (if match
                     (setf worst (max worst (the fixnum match)))
                     (return nil))
              finally (return worst))))))

;;; Meanings of symbols

(defun symbol-kinds (symbol)
  "Return the meanings of SYMBOL, a list of keywords: :FUNCTION, :GENERIC-FUNCTION, :MACRO, :SPECIAL-OPERATOR, :VARIABLE,
:CONSTANT, :SYMBOL-MACRO, :CLASS, :STRUCTURE, :CONDITION, :TYPE. If SYMBOL has none of these, return its OTHER-KINDS."
  (let ((kinds '())
        (class (find-class symbol nil)))
    (cond (class (push (typecase class
                         (sb-pcl::condition-class :condition)
                         (structure-class :structure)
                         (t :class))
                       kinds))
          ((eq :defined (sb-int:info :type :kind symbol)) (push :type kinds)))
    (case (sb-int:info :variable :kind symbol)
      ((:special :global) (push :variable kinds))
      (:constant (push :constant kinds))
      (:macro (push :symbol-macro kinds))
      (t (when (boundp symbol) (push :variable kinds))))
    (when (fboundp symbol)
      (push (cond ((special-operator-p symbol) :special-operator)
                  ((macro-function symbol) :macro)
                  ((typep (fdefinition symbol) 'generic-function) :generic-function)
                  (t :function))
            kinds))
    (or kinds (other-kinds symbol))))

(defun other-kinds (symbol)
  "Return the less usual meanings of SYMBOL, a list of keywords: :COMPILER-MACRO, :SETF-EXPANDER, :METHOD-COMBINATION,
:ALIEN-VARIABLE, :ALIEN-TYPE."
  (flet ((alien-type-p (kind) (sb-int:info :alien-type kind symbol)))
    (loop for (kind . meant) in (list (cons :compiler-macro (compiler-macro-function symbol))
                                      (cons :setf-expander (sb-int:info :setf :expander symbol))
                                      (cons :method-combination (defined-p :method-combination symbol))
                                      (cons :alien-variable (eq :alien (sb-int:info :variable :kind symbol)))
                                      (cons :alien-type (some #'alien-type-p '(:definition :struct :union :enum))))
          when meant collect kind)))

(defun kinds-for-filter (kind)
  "Return the symbol kinds, keywords as in SYMBOL-KINDS, that KIND selects. KIND is the client's string, such as `function'."
  (cond ((string= kind "function") '(:function :generic-function))
        ((string= kind "macro") '(:macro :special-operator :compiler-macro :setf-expander))
        ((string= kind "variable") '(:variable :constant :symbol-macro :alien-variable))
        ((string= kind "class") '(:class :structure :condition :type :method-combination :alien-type))
        (t '())))

;;; Names as a user types them

(defun package-name-text (name)
  "Return NAME, the name of a package, as a user would type it."
  (let ((*package* (find-package "KEYWORD"))
        (*print-case* :downcase))
    (string-left-trim "#:" (prin1-to-string (make-symbol name)))))

(defun short-package-name (package)
  "Return the name that a user would type for PACKAGE in the current package: the shortest local nickname or, if there is
none, the package's name. If the package's name contains a slash or a dot, such as UIOP/DRIVER or ALEXANDRIA.1.0.0, prefer
the shortest nickname without these characters."
  (flet ((shortest (names) (first (sort (copy-list names) #'< :key #'length)))
         (word-p (name)
           (and (plusp (length name))
                (alpha-char-p (char name 0))
                (notany (lambda (character) (find character "/.")) name))))
    (let ((name (package-name package)))
      (package-name-text (or (shortest (loop for (nickname . named) in (sb-ext:package-local-nicknames *package*)
                                      when (eq named package) collect nickname))
                      (and (not (word-p name))
                           (shortest (remove-if-not #'word-p (package-nicknames package))))
                      name)))))

(defun qualifying-package (symbol)
  "Return the package with which a user would qualify SYMBOL, or NIL for an uninterned symbol. Return the home package if it
does not export SYMBOL, or if it is KEYWORD or one of SBCL's packages. Otherwise return the package with the shortest name
among the packages that export SYMBOL."
  (let* ((home (symbol-package symbol))
         (name (symbol-name symbol))
         (best home))
    (when (and home (not (eq home (find-package "KEYWORD")))
               (eq :external (nth-value 1 (find-symbol name home)))
               (not (eql 3 (mismatch "SB-" (package-name home)))))
      (let ((length (length (short-package-name home))))
        (dolist (package (list-all-packages))
          (multiple-value-bind (found status) (find-symbol name package)
            (when (and (eq status :external) (eq found symbol))
              (let ((typed (short-package-name package)))
                (when (< (length typed) length)
                  (setf best package
                        length (length typed)))))))))
    best))

(defun qualified-symbol-text (symbol &optional package)
  "Return SYMBOL as a user would type it in the current package. If SYMBOL needs a package prefix, prefer the name of
PACKAGE, provided that SYMBOL is accessible in PACKAGE."
  (let* ((name (symbol-name symbol))
         (package (if (and package (eq symbol (find-symbol name package))) package (qualifying-package symbol)))
         (bare (let ((*package* (or package *package*))
                     (*print-case* :downcase)
                     (*print-gensym* nil))
                 (prin1-to-string symbol))))
    (multiple-value-bind (here status) (find-symbol name *package*)
      (cond ((and status (eq here symbol)) bare)
            ((null package) (concatenate 'string "#:" bare))
            ((eq package (find-package "KEYWORD"))
             (if (char= #\: (char bare 0)) bare (concatenate 'string ":" bare)))
            (t (format nil "~A~:[::~;:~]~A" (short-package-name package)
                       (eq :external (nth-value 1 (find-symbol name package))) bare))))))

(defconstant +max-documentation-length+ 120
  "Maximum number of shown characters of the first line of a documentation string.")

(defun first-line (documentation)
  "Return the first line with text of DOCUMENTATION, cut at +MAX-DOCUMENTATION-LENGTH+ characters. Return NIL if there is no
such line, or if DOCUMENTATION is not a string."
  (let* ((start (and (stringp documentation) (position-if-not #'whitespace-p documentation)))
         (line (and start (subseq documentation start (position #\Newline documentation :start start)))))
    (and line
         (if (> (length line) +max-documentation-length+)
             (concatenate 'string (subseq line 0 (1- +max-documentation-length+)) "…")
             (string-right-trim '(#\Space #\Tab #\Return) line)))))

(defun kind-documentation (symbol kind)
  "Return the documentation string of SYMBOL as KIND, one of SYMBOL-KINDS, or NIL."
  (guarded (documentation symbol (case kind
                                   ((:variable :constant :symbol-macro) 'variable)
                                   ((:class :structure :condition :type) 'type)
                                   (:compiler-macro 'compiler-macro)
                                   (:setf-expander 'setf)
                                   (:method-combination 'method-combination)
                                   (t 'function)))
      (failure)
    nil))

(defconstant +max-lambda-list-length+ 200
  "Maximum number of characters of a lambda list that are shown.")

(defun lambda-list-text (symbol)
  "Return the lambda list of the function or macro SYMBOL as text, cut at +MAX-LAMBDA-LIST-LENGTH+ characters. Return NIL if
the lambda list is unknown or cannot be printed."
  (multiple-value-bind (lambda-list unknown) (lambda-list-of symbol)
    (unless (eq unknown t)
      (if lambda-list
          (multiple-value-bind (text result)
              (bounded-text +max-lambda-list-length+ (lambda (stream) (print-lambda-list lambda-list stream)))
            (cond ((null result) text)
                  ((eq result :enough) (concatenate 'string text "…"))))
          "()"))))

;;; Searching

(defstruct (search-result (:copier nil) (:predicate nil))
  "The results of a search so far."
  ;; The best results as conses of a rank, which is lower for better results, and a symbol or package. Once there are LIMIT
  ;; results, the worst result is first; before that, the order is arbitrary. COUNT is the number of these results.
  (best '() :type list)
  (count 0 :type index)
  (limit 30 :type index)
  ;; FOUND is the number of matches that passed the filters on kind and on exported symbols. EXCLUDED is the number of
  ;; matches that these filters excluded.
  (found 0 :type index)
  (excluded 0 :type index))

(defun rank< (a b)
  "Return true when A comes before B. A and B are conses of a rank and a symbol or package, ordered by rank, then by name,
then by package."
  (flet ((name (object) (if (packagep object) (package-name object) (symbol-name object)))
         (home (object) (let ((package (if (packagep object) nil (symbol-package object))))
                          (if package (package-name package) ""))))
    (let ((x (car a)) (y (car b)))
      (declare (type fixnum x y))
      (cond ((/= x y) (< x y))
            ((string/= (name (cdr a)) (name (cdr b))) (and (string< (name (cdr a)) (name (cdr b))) t))
            (t (and (string< (home (cdr a)) (home (cdr b))) t))))))

(defun record-match (result rank object)
  "Record in RESULT that OBJECT, a symbol or package, was found with RANK."
  (let ((entry (cons rank object)))
    (incf (search-result-found result))
    (cond ((< (search-result-count result) (search-result-limit result))
           (push entry (search-result-best result))
           (when (= (incf (search-result-count result)) (search-result-limit result))
             (setf (search-result-best result) (sort (search-result-best result) (lambda (a b) (rank< b a))))))
          ((rank< entry (first (search-result-best result)))
           (setf (search-result-best result)
                 (merge 'list (list entry) (rest (search-result-best result)) (lambda (a b) (rank< b a))))))))

(defun system-package-p (package)
  "Return true when PACKAGE came with the image and is not COMMON-LISP."
  (and (not (eq package (find-package "COMMON-LISP")))
       (member package **system-packages** :test #'eq)
       t))

(defun search-rank (match symbol package external system meaning)
  "Return the rank of SYMBOL in PACKAGE; lower ranks are better. MATCH is the kind of match between SYMBOL's name and the
query, and counts most. Next, symbols with a meaning rank before others. Then symbols of the current package come first,
followed by exported symbols of the user, of COMMON-LISP and of the system, and by internal symbols. Among equals, shorter
names come first. EXTERNAL is true if PACKAGE exports SYMBOL, SYSTEM is true if SYSTEM-PACKAGE-P is true of PACKAGE, and
MEANING is true if SYMBOL has a meaning."
  (declare (type fixnum match))
  (+ (* 100000 (+ (* 10 match)
                  (if meaning 0 6)
                  (cond ((eq package *package*) 0)
                        ((and external (not system)) (if (eq package (find-package "COMMON-LISP")) 2 1))
                        (external 3)
                        ((not system) 4)
                        (t 5))))
     (min 10000 (length (symbol-name symbol)))))

(defun search-package (package matcher kinds external wanted result)
  "Record in RESULT the symbols of PACKAGE whose names satisfy MATCHER, a value of QUERY-MATCHER. The symbols must have one
of KINDS. If KINDS is :ANY, they must have a meaning, or be exported and match exactly or be in a package that the client
named. If EXTERNAL is true, consider exported symbols only. WANTED is true if the client named PACKAGE; otherwise consider
only symbols whose home package is PACKAGE."
  (declare (type function matcher))
  (let ((system (system-package-p package)))
    (with-package-iterator (next (list package) :internal :external)
      (loop
        (multiple-value-bind (more symbol status) (next)
          (unless more (return))
          (let ((match (and (or wanted (eq package (symbol-package symbol)))
                            (funcall matcher (symbol-name symbol))))
                (exported (eq status :external)))
            (when match
              (let ((meanings (if (eq kinds :any)
                                  (or (fboundp symbol) (boundp symbol) (symbol-kinds symbol))
                                  (symbol-kinds symbol))))
                (cond ((if (eq kinds :any)
                           ;; A symbol without a meaning is of interest only if it is exported, and only if the client named
                           ;; its package or its whole name.
                           (not (or meanings (and exported (or wanted (= match +exact+)))))
                           (not (intersection kinds meanings)))
                       (when meanings (incf (search-result-excluded result))))
                      ((and external (not exported)) (incf (search-result-excluded result)))
                      (t (record-match result
                                       (search-rank match symbol package exported system meanings)
                                       symbol)))))))))))

(defun search-packages (matcher result)
  "Record in RESULT the packages with a name or nickname that satisfies MATCHER, a value of QUERY-MATCHER."
  (declare (type function matcher))
  (dolist (package (list-all-packages))
    (let ((match (loop with best = nil
                       for name in (cons (package-name package) (package-nicknames package))
                       for match = (funcall matcher (coerce name 'simple-string))
                       do (when (and match (or (null best) (< (the fixnum match) (the fixnum best))))
                            (setf best match))
                       finally (return best))))
      (when match
        (record-match result (+ (* 100000 (+ (* 10 (the fixnum match)) (if (system-package-p package) 3 1)))
                                (length (package-name package)))
                      package)))))

(defun kind-text (kinds)
  "Return KINDS, a value of SYMBOL-KINDS, as text."
  (if kinds
      (format nil "~{~A~^, ~}"
              (loop for kind in kinds collect (substitute #\Space #\- (string-downcase kind))))
      "symbol"))

(defun push-found-symbol (symbol package first)
  "Push a record of SYMBOL. PACKAGE is the package in which the client searched, or NIL for all packages. Those
kinds of SYMBOL that are in FIRST, a list of kinds, are listed first."
  (let* ((kinds (stable-sort (symbol-kinds symbol) (lambda (a b) (and (member a first) (not (member b first))))))
         (operator (first (intersection kinds '(:function :generic-function :macro :special-operator))))
         (home (or package (symbol-package symbol))))
    (push-record "symbol"
                 :name (qualified-symbol-text symbol package)
                 :kind (kind-text kinds)
                 :lambda-list (and operator (not (eq operator :special-operator)) (lambda-list-text symbol))
                 :documentation (loop for kind in kinds
                                      thereis (first-line (kind-documentation symbol kind)))
                 :exported (if (and home (eq :external (nth-value 1 (find-symbol (symbol-name symbol) home)))) 1 0))))

(defun push-found-package (package)
  "Push a record of PACKAGE, with its nicknames and the number of its exported symbols."
  (let ((count 0))
    (declare (type fixnum count))
    (with-package-iterator (next (list package) :external)
      (loop while (next) do (incf count)))
    (push-record "symbol"
                 :name (package-name-text (package-name package))
                 :kind "package"
                 :lambda-list (format nil "~@[~{~A~^, ~}: ~]~D exported"
                                      (mapcar #'package-name-text (package-nicknames package)) count)
                 :documentation (first-line (documentation package t))
                 :exported 1)))

;;; Similar names when nothing matches

(defun near-query-names (query package kinds)
  "Return symbols with names similar to QUERY, as a user would type them: up to five strings. The symbols are in PACKAGE, or
in any package if PACKAGE is NIL, and have one of KINDS, or any meaning if KINDS is :ANY."
  (let ((name (map 'string #'fold-case query))
        (symbols (make-hash-table :test 'equal)))
    (when (<= (length name) +max-compared-name-length+)
      (dolist (package (if package (list package) (list-all-packages)))
        (unless (or (eq package (find-package "KEYWORD")) (host-package-p package))
          (with-package-iterator (next (list package) :internal :external)
            (loop
              (multiple-value-bind (more symbol status) (next)
                (unless more (return))
                (when (and (<= (abs (- (length (symbol-name symbol)) (length name))) 2)
                           (or (eq status :external) (not (system-package-p package)))
                           (let ((meanings (symbol-kinds symbol)))
                             (if (eq kinds :any) meanings (intersection kinds meanings))))
                  (setf (gethash (symbol-name symbol) symbols) symbol)))))))
      (mapcar (lambda (near) (qualified-symbol-text (gethash near symbols)))
              (similar-names name (loop for near being the hash-keys of symbols collect near))))))

(defun push-nothing-found (query package kinds kind external excluded)
  "Push a record that says that nothing matches QUERY in PACKAGE, or in any package if PACKAGE is NIL, and that suggests
similar names. KINDS and EXTERNAL are the filters; KIND is the client's string for the kind, or NIL. EXCLUDED is the number
of matches that the filters excluded."
  (push-record
   "nothing"
   :text (format nil "Nothing matches ~S~@[ in package ~A~]~@[ (~{~A~^, ~})~].~
                      ~@[~%Filtered out: ~D match~:*~[es~;~:;es~].~]~@[~%Similar names: ~{~A~^, ~}.~]"
                 (if (> (length query) 100) (concatenate 'string (subseq query 0 100) "…") query)
                 (and package (package-name package))
                 (append (and kind (list (format nil "only kind ~A" kind)))
                         (and external '("only exported symbols")))
                 (and (plusp excluded) excluded)
                 (if (equal kind "package")
                     (mapcar #'package-name-text (similar-names (map 'string #'fold-case query) (package-names)))
                     (near-query-names query package kinds)))))

(defun split-query (query)
  "Return QUERY without quotes and package prefix. The second value is the name of the package in the prefix, or NIL."
  (let* ((query (string-left-trim "#'" (string-trim '(#\Space #\Tab #\Newline #\Return) query)))
         (colon (position #\: query)))
    (cond ((null colon) (values query nil))
          ((zerop colon) (values (string-left-trim ":" query) "KEYWORD"))
          (t (values (string-left-trim ":" (subseq query colon)) (subseq query 0 colon))))))

(defun push-search-results (query package-name kind external limit)
  "Push records of up to LIMIT symbols and packages whose names match QUERY, best first, and of the number of further
matches. If nothing matches, push similar names. Unless they are NIL, PACKAGE-NAME restricts the search to a package, KIND to
a kind of symbols, and EXTERNAL to exported symbols. A package prefix in QUERY takes precedence over PACKAGE-NAME."
  (multiple-value-bind (name qualifier) (split-query query)
    (let* ((package-name (or qualifier package-name))
           (package (and package-name (find-package-or-suggest package-name)))
           (kinds (if kind (kinds-for-filter kind) :any))
           (result (make-search-result :limit limit))
           (matcher (query-matcher name)))
      (cond ((equal kind "package"))
            (package (search-package package matcher kinds external t result))
            (t (dolist (package (list-all-packages))
                 (unless (or (eq package (find-package "KEYWORD")) (host-package-p package))
                   (search-package package matcher kinds external nil result)))))
      (when (and (null package) (or (eq kinds :any) (equal kind "package")))
        (search-packages matcher result))
      (with-server-syntax ()
        (loop for (nil . object) in (sort (search-result-best result) #'rank<)
              do (if (packagep object)
                     (push-found-package object)
                     (push-found-symbol object package (if (eq kinds :any) '() kinds)))))
      (cond ((zerop (search-result-found result))
             (with-server-syntax ()
               (push-nothing-found name package kinds kind external (search-result-excluded result))))
            ((> (search-result-found result) limit)
             (push-record "more" :count (- (search-result-found result) limit)))))))

(define-query :find-symbols (&key query package kind external limit)
  "Push records of up to LIMIT symbols and packages that match QUERY. The arguments are as for PUSH-SEARCH-RESULTS."
  (push-search-results query package kind external limit))
