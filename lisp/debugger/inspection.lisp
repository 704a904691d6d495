;;;; Queries about the image: the session's definitions, and the meanings of a symbol.

(in-package "SBCL-HOST/DEBUGGER")

(defun push-item (kind label function)
  "Push an item of KIND, an item code, with LABEL and a text. FUNCTION prints the text to the stream with which it is
called."
  (event *job-id* (event-code :item) kind label)
  (push-text (event-code :item-text) function))

;;; The list of definitions, for the tool list-definitions

(defun lambda-list-of (name)
  "Return the lambda list of the function or macro NAME. The second value is true if the lambda list is unknown."
  (guarded (sb-introspect:function-lambda-list
            (if (and (symbolp name) (macro-function name)) (macro-function name) (fdefinition name)))
      (failure)
    (values nil t)))

(defun variable-label (name)
  "Return the text that precedes the value in the line for the variable NAME."
  (format nil "~S~:[~; = ~]" name (boundp name)))

(defun print-definition (kind name stream)
  "Print the line for NAME, defined as KIND, to STREAM. For a variable, print only the value: VARIABLE-LABEL returns the
text before it."
  (cond ((stringp name) (write-string name stream))
        ((not (eq kind :variable)) (prin1 name stream)))
  (case kind
    ((:function :macro)
     (when (or (eq kind :function) (and (symbolp name) (macro-function name)))
       (multiple-value-bind (lambda-list unknown) (lambda-list-of name)
         (unless (eq unknown t)
           (write-char #\Space stream)
           (if lambda-list (print-lambda-list lambda-list stream) (write-string "()" stream)))))
     (unless (or (eq kind :function) (and (symbolp name) (macro-function name)))
       (write-string (if (compiler-macro-function name) " (compiler macro)" " (symbol macro)") stream)))
    (:type (write-string " (type)" stream))
    (:setf-expander (write-string " (setf expander)" stream))
    (:method-combination (write-string " (method combination)" stream))
    (:variable
     (when (boundp name)
       (print-value-as-argument (symbol-value name) stream)))))

(defun print-lambda-list (lambda-list stream)
  "Print LAMBDA-LIST to STREAM without package prefixes, which would only make it longer. Keywords keep their colons."
  (labels ((bare (object)
             (typecase object
               (cons (cons (bare (car object)) (bare (cdr object))))
               ((and symbol (not (or null keyword))) (make-symbol (symbol-name object)))
               (t object))))
    (let ((*print-gensym* nil) (*print-length* nil) (*print-level* nil) (*print-circle* nil))
      (prin1 (bare lambda-list) stream))))

(defun print-value-as-argument (value stream)
  "Print VALUE to STREAM in the way that arguments of frames are printed, and return NIL."
  (print-argument value stream)
  nil)

(defun class-function-names (name)
  "Return the names of the functions that the definition of the class NAME defines: accessors and, for a structure, also
the constructors, copier and predicate."
  (let ((class (find-class name nil)))
    (if (typep class 'structure-class)
        (let ((description (sb-kernel:find-defstruct-description name nil)))
          (when description
            (remove nil
                    (append (mapcar (lambda (constructor) (if (consp constructor) (first constructor) constructor))
                                    (sb-kernel:dd-constructors description))
                            (list (sb-kernel::dd-copier-name description)
                                  (sb-kernel::dd-predicate-name description))
                            (loop for slot in (sb-kernel:dd-slots description)
                                  for accessor = (sb-kernel:dsd-accessor-name slot)
                                  when accessor collect accessor and collect (list 'setf accessor))))))
        (loop for slot in (guarded (sb-mop:class-direct-slots class) (failure) '())
              append (remove-if-not #'accessors-only-p (sb-mop:slot-definition-readers slot))
              append (remove-if-not #'accessors-only-p (sb-mop:slot-definition-writers slot))))))

(defun accessor-method-p (method name)
  "Return true when METHOD of the function NAME only reads or writes a slot. The accessors of a condition class are ordinary
methods."
  (let ((class (first (last (sb-mop:method-specializers method)))))
    (or (typep method 'sb-mop:standard-accessor-method)
        (and (typep class 'sb-pcl::condition-class)
             (find-if (lambda (slot)
                        (or (member name (sb-mop:slot-definition-readers slot) :test #'equal)
                            (member name (sb-mop:slot-definition-writers slot) :test #'equal)))
                      (sb-mop:class-direct-slots class))))))

(defun accessors-only-p (name)
  "Return true when each method of the generic function NAME only reads or writes a slot, or when NAME is not a generic
function."
  (let ((function (and (fboundp name) (fdefinition name))))
    (or (not (typep function 'generic-function))
        (every (lambda (method) (accessor-method-p method name))
               (sb-mop:generic-function-methods function)))))

(defun print-class-definition (name accessors stream)
  "Print the line for the class NAME to STREAM. The line ends with a list in parentheses of the symbols among ACCESSORS,
which are function names. Names such as (SETF FOO) are omitted."
  (prin1 name stream)
  (let ((names (remove-if #'consp accessors)))
    (when names
      (let ((*print-length* nil))
        (format stream " (~{~S~^, ~})" (sort (remove-duplicates names) #'string< :key #'symbol-name))))))

(defun definition-item-code (kind)
  "Return the item code for definitions of KIND, or NIL for kinds that are not listed."
  (case kind
    (:function (item-code :function))
    (:variable (item-code :variable))
    ((:macro :setf-expander) (item-code :macro))
    ((:class :type :method-combination) (item-code :class))
    (:package (item-code :package))))

(defun definition-package (kind name)
  "Return the package to which the definition of NAME as KIND belongs: the package of the name's symbol, or the package
called NAME if KIND is :PACKAGE."
  (if (eq kind :package)
      (find-package name)
      (symbol-package (function-name-symbol name))))

(defun definition-sort-key (kind name)
  "Return the key by which the definition of NAME as KIND is sorted: a cons of the item code and the printed name."
  (cons (definition-item-code kind) (if (stringp name) name (prin1-to-string name))))

(defun listed-definitions (package)
  "Return a list of the session's definitions, each a list of kind and name: the definitions in PACKAGE or, if
PACKAGE is NIL, all definitions except those that loading a system made. If PACKAGE is NIL, the second value has an entry for
each system that made definitions: a list of the system's name, the number of its definitions, and the number of packages
that contain them."
  (let ((wanted '())
        (systems (make-hash-table :test 'equal)))
    (map-definitions
     (lambda (kind name system)
       (cond ((not (definition-item-code kind)))
             (package
              (when (eq package (definition-package kind name))
                (push (list kind name) wanted)))
             (system
              (let ((counted (or (gethash system systems)
                                 (setf (gethash system systems) (list 0)))))
                (incf (first counted))
                (pushnew (definition-package kind name) (rest counted))))
             (t (push (list kind name) wanted)))))
    (values wanted
            (loop for system being the hash-keys of systems using (hash-value counted)
                  collect (list system (first counted) (length (rest counted)))))))

(defun push-definitions (item limit package-name)
  "Push the session's definitions whose item code is ITEM, or definitions of all kinds if ITEM is 0. Unless PACKAGE-NAME
is empty, push only definitions in that package. Push no more than LIMIT definitions, and then the number of
omitted definitions. Accessors are listed with their class. If ITEM is 0 and PACKAGE-NAME is empty, push also the loaded
systems, each with the number of its definitions."
  (let* ((package (and (plusp (length package-name)) (find-package-or-suggest package-name)))
         (accessors (make-hash-table :test 'equal)))
    (with-inspection-syntax ()
      (multiple-value-bind (definitions counted) (listed-definitions package)
        (loop for (kind name) in definitions
              when (eq kind :class)
                do (dolist (accessor (class-function-names name))
                     (setf (gethash accessor accessors) name)))
        (let* ((own (remove-if (lambda (entry)
                                 (or (and (eq (first entry) :function) (gethash (second entry) accessors))
                                     (not (or (zerop item) (eql item (definition-item-code (first entry)))))))
                               definitions))
               (sorted (sort (mapcar (lambda (entry)
                                       (cons (definition-sort-key (first entry) (second entry)) entry))
                                     own)
                             (lambda (a b)
                               (if (eql (car a) (car b)) (string< (cdr a) (cdr b)) (< (car a) (car b))))
                             :key #'car)))
          (loop for (nil kind name) in sorted
                repeat limit
                do (let ((kind kind) (name name))
                     (push-item (definition-item-code kind) (if (eq kind :variable) (variable-label name) "")
                                (lambda (stream)
                                  (if (eq kind :class)
                                      (print-class-definition
                                       name
                                       (remove-if-not (lambda (accessor)
                                                        (nth-value 1 (gethash (list :function accessor) **definitions**)))
                                                      (class-function-names name))
                                       stream)
                                      (print-definition kind name stream))))))
          (when (> (length sorted) limit)
            (push-item (item-code :more) (princ-to-string (- (length sorted) limit)) #'identity)))
        (when (and (zerop item) (null package))
          (dolist (system (union (mapcar #'first counted) (loaded-systems) :test #'string=))
            (push-item (item-code :system) ""
                       (lambda (stream)
                         (destructuring-bind (&optional (count 0) (packages 0))
                             (rest (assoc system counted :test #'string=))
                           (format stream "~A~[~:;~:* (~:D definition~:P in ~:D package~:P)~]"
                                   system count packages))))))))))

(defun loaded-systems ()
  "Return the names of the systems that the session loaded. The systems of one .asd file have a single entry, the name
of the primary system."
  (remove-duplicates (mapcar #'asdf:primary-system-name
                             (set-difference (already-loaded-systems) **core-systems** :test #'equal))
                     :test #'string=))

;;; Descriptions of symbols and packages, for the tool describe-symbol

(defun global-name-text (text)
  "Return the text of the global name in TEXT, which may be a name from a list of references or a backtrace: 'F, #'F,
(:METHOD F (T)), (MACRO-FUNCTION F) and (FLET G :IN F) all become F. The second value is true if TEXT is such a list."
  (let* ((text (coerce (string-left-trim "#'" (string-trim '(#\Space #\Tab #\Newline #\') text)) 'text))
         (map (and (plusp (length text)) (char= #\( (char text 0)) (form-map text)))
         (elements (and (consp map) (rest map)))
         (ending (last elements 2)))
    (flet ((token-p (element tokens)
             (and (integerp element) (member (token-name text element) tokens :test #'string=))))
      (let ((named (cond ((and (rest (rest elements))
                               (token-p (first ending) '("IN"))
                               (char= #\: (char text (first ending))))
                          (second ending))
                         ((token-p (first elements)
                                   '("METHOD" "FAST-METHOD" "SLOW-METHOD" "MACRO-FUNCTION" "COMPILER-MACRO"
                                     "SETF-EXPANDER" "%DEFSETF" "TYPE-EXPANDER" "CONDITION-REPORT"))
                          (second elements)))))
        ;; A lambda expression outside any definition is named (LAMBDA () :IN "file").
        (if (and named (char/= #\" (char text (form-position named))))
            (let ((start (form-position named)))
              (values (global-name-text (subseq text start (nth-value 1 (form-map text start)))) t))
            (values text nil))))))

(defun name-operator (text)
  "Return SETF or CAS if TEXT, a GLOBAL-NAME-TEXT, has the form (SETF F) or (CAS F), or else NIL. The second value is the
position in TEXT after the operator."
  (loop for (start . operator) in '(("(setf " . setf) ("(cas " . sb-ext:cas) ("(sb-ext:cas " . sb-ext:cas))
        for length = (length start)
        when (and (> (1- (length text)) length) (string-equal start text :end2 length))
          return (values operator length)))

(defun bare-name (text)
  "Return the name of the symbol in TEXT: the GLOBAL-NAME-TEXT of TEXT, or F if that is (SETF F) or (CAS F)."
  (let* ((text (global-name-text text))
         (start (nth-value 1 (name-operator text)))
         (end (1- (length text))))
    (if (and start (char= (char text end) #\)))
        (string-trim " " (subseq text start end))
        text)))

(defun locate-symbol (text package-name)
  "Find the symbol that TEXT names in the package named PACKAGE-NAME, or in the current package if PACKAGE-NAME is
empty, without interning it. A package prefix in TEXT takes precedence. Return the symbol, true if it exists, and the
name and package that were searched. Signal a package error if the package does not exist, and a simple error if TEXT ends
inside a name or is a list that contains no name."
  (let ((text (bare-name text)))
    (when (eql 0 (position #\( text))
      (error "~A is not a name. Names have the form foo, (setf foo), (:method foo (integer)) or (flet bar :in foo)." text))
    (multiple-value-bind (name colon problem) (read-name text)
      (let ((package (cond ((null colon)
                            (if (string= package-name "")
                                (current-package)
                                (find-package-or-suggest package-name)))
                           ((eql colon 0) (find-package "KEYWORD"))
                           (t (find-package-or-suggest (string-left-trim "#" (subseq text 0 colon))))))
            (as-written (if colon (string-left-trim ":" (subseq text colon)) text)))
        (multiple-value-bind (symbol status) (if problem (values nil nil) (find-symbol name package))
          (if status
              (values symbol t name package)
              (multiple-value-bind (symbol status) (find-symbol as-written package)
                (when (and problem (not status))
                  (fail-unfinished-name text problem))
                (values symbol (and status t) name package))))))))

(defun push-detail (label function)
  "Push a detail of the meaning that PUSH-ROLE pushed last. LABEL and FUNCTION are as for PUSH-ITEM."
  (push-item (item-code :detail) label function))

(defun push-text-detail (label text)
  "Push TEXT as a detail called LABEL, unless TEXT is NIL."
  (when text
    (push-detail label (lambda (stream) (write-string text stream)))))

(defun push-role (name role)
  "Push the title of the details that follow. The title says what NAME, a symbol or function name, means. ROLE is the
meaning, a string such as \"MACRO\"."
  (push-item (item-code :role) ""
             (lambda (stream)
               (let* ((symbol (function-name-symbol name))
                      (package (symbol-package symbol)))
                 (format stream "~:[~A~A~;(~:*~A ~A~A)~] [~A]" (and (consp name) (symbol-name (first name)))
                         (cond ((null package) "#:")
                               ((eq package (find-package "KEYWORD")) ":")
                               ((eq :external (nth-value 1 (find-symbol (symbol-name symbol) package)))
                                (format nil "~A:" (package-name package)))
                               (t (format nil "~A::" (package-name package))))
                         (let ((*package* (or package *package*)))
                           (string-left-trim "#:" (prin1-to-string symbol)))
                         role)))))

(defvar *include-source* nil
  "True when the client asked for the source text of definitions.")

(defun push-source (name type)
  "Push the source location of NAME's definition, if it is known, and the source text if the client asked for it. TYPE is a
definition type of SB-INTROSPECT, such as :MACRO."
  (let ((location (guarded (let ((source (first (sb-introspect:find-definition-sources-by-name name type))))
                             (and source (definition-location source (symbol-name (function-name-symbol name)))))
                      (failure)
                    nil)))
    (when location
      (push-source-location location))))

(defun location-form-text (location)
  "Return the text of the form at LOCATION, or NIL if the text cannot be read."
  (guarded (form-text (source-location-text location) (source-location-position location)) (failure) nil))

(defun push-source-location (location)
  "Push LOCATION, the source location of a definition, and the source text of the definition if the client asked for it."
  (push-text-detail "Source" (source-location-label location))
  (when *include-source*
    (push-text-detail "Text" (let ((text (location-form-text location)))
                               (if text (format nil "~%~A" text) "not available")))))

(defun push-documentation (name type)
  "Push NAME's documentation string of TYPE, a doc-type of DOCUMENTATION, if there is one."
  (push-text-detail "Documentation" (guarded (documentation name type) (failure) nil)))

(defun push-lambda-list (name)
  "Push the lambda list of the function or macro NAME, if it is known."
  (multiple-value-bind (lambda-list unknown) (lambda-list-of name)
    (unless (eq unknown t)
      (push-detail "Arglist" (lambda (stream)
                               (if lambda-list
                                   (print-lambda-list lambda-list stream)
                                   (write-string "()" stream)))))))

(defconstant +max-listed-items+ 30
  "Maximum number of methods of a generic function, or slots or subclasses of a class, that are listed.")

(defun push-list (label items print)
  "Push a detail called LABEL. The detail contains the number of ITEMS, followed by one line for each of the first
+MAX-LISTED-ITEMS+ items. PRINT, a function of an item and a stream, prints the line for an item."
  (let ((count (length items)))
    (push-detail label
                 (lambda (stream)
                   (format stream "~D" count)
                   (loop for item in items
                         repeat +max-listed-items+
                         do (terpri stream)
                            (guarded (funcall (the function print) item stream) (failure) nil))
                   (when (> count +max-listed-items+)
                     (format stream "~%... ~D more" (- count +max-listed-items+)))))))

(defun push-methods (generic-function)
  "Push the methods of GENERIC-FUNCTION with their source locations and, if the client asked for it, their source text."
  (let ((name (function-name-symbol (sb-mop:generic-function-name generic-function))))
    (push-list "Methods" (sb-mop:generic-function-methods generic-function)
               (lambda (method stream)
                 (format stream "~{~S ~}~S" (method-qualifiers method)
                         (sb-pcl::unparse-specializers generic-function (sb-mop:method-specializers method)))
                 (let* ((key (method-signature (method-qualifiers method) (sb-mop:method-specializers method)))
                        (location (guarded (definition-location (sb-introspect:find-definition-source method)
                                                                (symbol-name name) key)
                                      (failure)
                                    nil))
                        (text (and location *include-source* (method-text location key))))
                   (when location
                     (format stream "  ~A" (source-location-label location)))
                   (when text
                     (format stream "~%  ~A" (indent-lines text))))))))

(defun method-text (location key)
  "Return the text of the DEFMETHOD form at LOCATION if it defines the method whose METHOD-SIGNATURE is KEY, else NIL."
  (let ((text (location-form-text location)))
    (and text
         (guarded (equal key (form-signature (form-map text) text)) (failure) nil)
         text)))

(defun indent-lines (text)
  "Return TEXT with all lines after the first indented by two more characters."
  (with-output-to-string (stream)
    (loop for character across text
          do (write-char character stream)
             (when (char= character #\Newline)
               (write-string "  " stream)))))

(defun class-and-superclasses (class)
  "Return a list of CLASS and all its superclasses, CLASS first, in the order of precedence if that order is known."
  (if (guarded (sb-mop:class-finalized-p class) (failure) nil)
      (sb-mop:class-precedence-list class)
      (let ((classes '()))
        (labels ((visit (class)
                   (unless (member class classes)
                     (push class classes)
                     (mapc #'visit (sb-mop:class-direct-superclasses class)))))
          (visit class))
        (nreverse classes))))

(defun all-slots (class)
  "Return the slots of CLASS in the order of CLASS-SLOTS, which begins with the slots of superclasses. Each slot is a list:
the most specific class that defines the slot, then the direct slot definitions with the slot's name, most specific first."
  (let ((slots '()))
    (dolist (owner (reverse (class-and-superclasses class)))
      (dolist (slot (guarded (sb-mop:class-direct-slots owner) (failure) '()))
        (let ((known (find (sb-mop:slot-definition-name slot) slots
                           :key (lambda (entry) (sb-mop:slot-definition-name (second entry))))))
          (if known
              (setf (first known) owner
                    (rest known) (cons slot (rest known)))
              (push (list owner slot) slots)))))
    (nreverse slots)))

(defun slot-description (class slots)
  "Return a list of the type, allocation, initargs, accessors, other readers and other writers of a slot of CLASS. The type
is NIL for type T, and the allocation is NIL for :INSTANCE. SLOTS is a list of the direct slot definitions with the slot's
name, most specific first. An accessor both reads and, as the place of SETF, writes the slot."
  (let* ((name (sb-mop:slot-definition-name (first slots)))
         (type (first (remove t (mapcar #'sb-mop:slot-definition-type slots))))
         (part (and (typep class 'structure-class)
                    (find name (sb-kernel:dd-slots (sb-kernel:find-defstruct-description (class-name class)))
                          :key #'sb-kernel:dsd-name))))
    (flet ((all (function)
             (remove-duplicates (loop for slot in slots append (funcall (the function function) slot))
                                :test #'equal :from-end t)))
      (if part
          (let ((names (remove nil (list (sb-kernel:dsd-accessor-name part)))))
            (if (sb-kernel:dsd-read-only part)
                (list type nil '() '() names '())
                (list type nil '() names '() '())))
          (let ((readers (all #'sb-mop:slot-definition-readers))
                (writers (all #'sb-mop:slot-definition-writers))
                (allocation (sb-mop:slot-definition-allocation (first slots))))
            (flet ((accessor-p (reader) (member `(setf ,reader) writers :test #'equal)))
              (list type
                    (if (eq allocation :instance) nil allocation)
                    (all #'sb-mop:slot-definition-initargs)
                    (remove-if-not #'accessor-p readers)
                    (remove-if #'accessor-p readers)
                    (set-difference writers (mapcar (lambda (reader) `(setf ,reader)) readers) :test #'equal))))))))

(defun print-slot (class slots owner stream)
  "Print the line for a slot of CLASS to STREAM. SLOTS is a list of the direct slot definitions with the slot's name. OWNER
is the class that defines the slot: CLASS itself or a superclass."
  (destructuring-bind (type allocation initargs accessors readers writers) (slot-description class slots)
    (format stream "~S~@[, type ~S~]~@[, allocation ~S~]~@[, initarg~{ ~S~}~]~@[, accessor~{ ~S~}~]~@[, reader~{ ~S~}~]~
                    ~@[, writer~{ ~S~}~]~@[, from ~S~]"
            (sb-mop:slot-definition-name (first slots))
            type allocation initargs accessors readers writers
            (if (eq owner class) nil (class-name owner)))))

(defun push-function-roles (symbol)
  "Push the meaning of SYMBOL as an operator. Return true if SYMBOL names an operator."
  (cond ((special-operator-p symbol)
         (push-role symbol "SPECIAL OPERATOR")
         (push-documentation symbol 'function)
         t)
        ((macro-function symbol)
         (push-role symbol "MACRO")
         (push-lambda-list symbol)
         (push-documentation symbol 'function)
         (push-source symbol :macro)
         t)
        ((fboundp symbol)
         (push-function symbol)
         t)))

(defun push-function (name)
  "Push a description of the function NAME."
  (let ((generic (typep (fdefinition name) 'generic-function)))
    (push-role name (if generic "GENERIC FUNCTION" "FUNCTION"))
    (push-lambda-list name)
    (let ((type (guarded (sb-introspect:function-type name) (failure) nil)))
      (when (consp type)
        (push-detail "Type" (lambda (stream)
                              (let ((*print-length* nil) (*print-level* nil)
                                    (*package* (find-package "COMMON-LISP")))
                                (prin1 type stream))))))
    (push-documentation name 'function)
    (when generic
      (push-methods (fdefinition name)))
    (push-source name (if generic :generic-function :function))))

(defun push-accessor-roles (name)
  "Push the meanings of NAME, a list (SETF SYMBOL) or (CAS SYMBOL), unless SYMBOL belongs to the system. Return true if a
meaning was pushed."
  (let* ((symbol (function-name-symbol name))
         (pushed (cond ((system-symbol-p symbol) nil)
                       ((fboundp name)
                        (push-function name)
                        t)
                       ((and (eq (first name) 'setf) (sb-int:info :setf :expander symbol))
                        (push-role name "SETF EXPANDER")
                        (push-documentation symbol 'setf)
                        (push-source symbol :setf-expander)
                        t))))
    (or (push-compiler-macro-role name) pushed)))

(defun push-compiler-macro-role (name)
  "Push the meaning of the function name NAME as a compiler macro, unless NAME belongs to the system. Return true if a
meaning was pushed."
  (when (and (not (system-symbol-p (function-name-symbol name))) (compiler-macro-function name))
    (push-role name "COMPILER MACRO")
    (push-documentation name 'compiler-macro)
    (push-source name :compiler-macro)
    t))

(defun push-method-combination-role (symbol)
  "Push the meaning of SYMBOL as a method combination, unless SYMBOL belongs to the system. Return true if a meaning was
pushed."
  (when (and (not (system-symbol-p symbol))
             (guarded (sb-introspect:find-definition-sources-by-name symbol :method-combination) (failure) nil))
    (push-role symbol "METHOD COMBINATION")
    (push-documentation symbol 'method-combination)
    (push-source symbol :method-combination)
    t))

(defconstant +max-previewed-parts+ 10
  "Maximum number of shown entries or slots of a value whose printed representation omits them.")

(defun value-parts (value)
  "Return the first +MAX-PREVIEWED-PARTS+ parts of VALUE, their total number, and a format control that prints the noun
for that number. The parts of a hash table are its entries, as lists of key and value. The parts of an instance of a
class that is not the system's are its slots, as lists of name and value, or of the name alone if the slot is unbound.
Return NIL for other values."
  (typecase value
    (hash-table
     (values (block entries
               (let ((entries '()) (count 0))
                 (maphash (lambda (key value)
                            (when (> (incf count) +max-previewed-parts+)
                              (return-from entries (nreverse entries)))
                            (push (list key value) entries))
                          value)
                 (nreverse entries)))
             (hash-table-count value) "entr~:@p"))
    ((or standard-object condition structure-object)
     (unless (system-symbol-p (class-name-of value))
       (let ((slots (sb-mop:class-slots (class-of value))))
         (values (loop for slot in slots
                       for name = (sb-mop:slot-definition-name slot)
                       repeat +max-previewed-parts+
                       collect (if (slot-boundp value name) (list name (slot-value value name)) (list name)))
                 (length slots) "slot~:p"))))))

(defun push-contents (value)
  "Push the first parts of VALUE if its printed representation, such as #<HASH-TABLE>, does not show them."
  (when (eql 2 (mismatch "#<" (bounded-prin1-text value 2)))
    (multiple-value-bind (parts count called) (guarded (value-parts value) (failure) nil)
      (when parts
        (push-detail "Contents"
                     (lambda (stream)
                       (format stream "~D ~@?" count called count)
                       (loop for (label . rest) in parts
                             do (format stream "~%~A: ~A" (bounded-prin1-text label 60)
                                        (if rest (bounded-prin1-text (first rest) 100) "unbound")))
                       (when (> count +max-previewed-parts+)
                         (format stream "~%... ~D more" (- count +max-previewed-parts+)))))))))

(defun push-alien-type (label type)
  "Push a detail called LABEL: the specifier of the alien type TYPE."
  (push-detail label (lambda (stream)
                       (let ((*print-length* nil) (*print-level* nil))
                         (prin1 (sb-alien-internals:unparse-alien-type type) stream)))))

(defun push-alien-type-roles (symbol)
  "Push the meanings of SYMBOL as the name of an alien type, structure, union or enumeration. Return true if a meaning was
pushed."
  (loop with pushed = nil
        for (kind role) in '((:definition "ALIEN TYPE") (:struct "ALIEN STRUCTURE") (:union "ALIEN UNION")
                             (:enum "ALIEN ENUMERATION"))
        for type = (sb-int:info :alien-type kind symbol)
        do (when type
             (push-role symbol role)
             (push-alien-type "Definition" type)
             (when (eq kind :definition)
               (push-source symbol :alien-type))
             (setf pushed t))
        finally (return pushed)))

(defun push-variable-roles (symbol)
  "Push the meaning of SYMBOL as a variable. Return true if SYMBOL names a variable."
  (let ((kind (sb-int:info :variable :kind symbol)))
    (when (or (member kind '(:special :constant :global :macro :alien)) (boundp symbol))
      (push-role symbol (case kind
                          (:constant "CONSTANT")
                          (:global "GLOBAL VARIABLE")
                          (:macro "SYMBOL MACRO")
                          (:alien "ALIEN VARIABLE")
                          (t "VARIABLE")))
      (cond ((eq kind :macro)
             (push-detail "Expansion" (lambda (stream) (prin1 (macroexpand-1 symbol) stream))))
            ;; The value is not shown: a wrong type or address would make reading the value fault.
            ((eq kind :alien)
             (let ((alien (sb-int:info :variable :alien-info symbol)))
               (push-alien-type "Type" (sb-alien::heap-alien-info-type alien))
               (push-text-detail "Foreign name" (sb-alien::heap-alien-info-alien-name alien))))
            ((boundp symbol)
             (push-detail "Value" (lambda (stream) (print-value-as-argument (symbol-value symbol) stream)))
             (push-contents (symbol-value symbol)))
            (t (push-text-detail "Value" "unbound")))
      (push-documentation symbol 'variable)
      (push-source symbol (if (eq kind :constant) :constant :variable))
      t)))

(defun push-type-roles (symbol)
  "Push the meaning of SYMBOL as a type. Return true if SYMBOL names a type."
  (let ((class (find-class symbol nil)))
    (cond (class
           (push-role symbol (typecase class
                               (sb-pcl::condition-class "CONDITION TYPE")
                               (structure-class "STRUCTURE CLASS")
                               (built-in-class "BUILT-IN CLASS")
                               (t "CLASS")))
           (let ((superclasses (mapcar #'class-name (sb-mop:class-direct-superclasses class))))
             (when superclasses
               (push-detail "Superclasses" (lambda (stream) (format stream "~{~S~^ ~}" superclasses)))))
           (let ((slots (guarded (all-slots class) (failure) '())))
             (when slots
               (push-list "Slots" slots
                          (lambda (entry stream) (print-slot class (rest entry) (first entry) stream)))))
           (let ((subclasses (remove nil (mapcar #'class-name (sb-mop:class-direct-subclasses class)))))
             (when subclasses
               (push-detail "Direct subclasses"
                            (lambda (stream)
                              (format stream "~{~S~^ ~}~@[ ... ~D more~]"
                                      (subseq subclasses 0 (min +max-listed-items+ (length subclasses)))
                                      (and (> (length subclasses) +max-listed-items+)
                                           (- (length subclasses) +max-listed-items+)))))))
           (push-documentation symbol 'type)
           (push-source symbol (typecase class
                                 (sb-pcl::condition-class :condition)
                                 (structure-class :structure)
                                 (t :class)))
           t)
          ((eq :defined (sb-int:info :type :kind symbol))
           (push-role symbol "TYPE")
           (push-documentation symbol 'type)
           (push-source symbol :type)
           t))))

(defun not-found-text (name package)
  "Return the text that says that PACKAGE has no symbol NAME. The text lists other packages that export a symbol of this name,
similar names in PACKAGE, and packages with similar names."
  (let ((near (similar-symbol-names name package #'symbolp))
        (packages (similar-names name (package-names)))
        (elsewhere (let ((packages '()))
                     (dolist (other (remove (find-package "KEYWORD") (list-all-packages)) (sort packages #'string<))
                       (when (eq :external (nth-value 1 (find-symbol name other)))
                         (pushnew (package-name (symbol-package (find-symbol name other))) packages
                                  :test #'string=))))))
    (format nil "Symbol ~A not found in package ~A~:[~; (nor in the packages that it uses)~].~
                 ~@[~%Packages with a symbol of this name: ~{~A~^, ~}.~]~
                 ~@[~%Similar names: ~{~A~^, ~}.~]~
                 ~@[~%Packages with similar names: ~{~A~^, ~}.~]"
            name (package-name package) (package-use-list package)
            (subseq elsewhere 0 (min 5 (length elsewhere)))
            near packages)))

(defun push-not-found (name package)
  "Push the NOT-FOUND-TEXT for NAME and PACKAGE."
  (push-item (item-code :not-found) "" (lambda (stream) (write-string (not-found-text name package) stream))))

(defun push-package-role (package)
  "Push a description of PACKAGE: its nicknames, the packages that it uses, the number of its external symbols, its
documentation and the location of its definition."
  (push-item (item-code :role) "" (lambda (stream) (format stream "~A [PACKAGE]" (package-name package))))
  (flet ((names (label packages)
           (when packages
             (push-text-detail label (format nil "~{~A~^, ~}" packages)))))
    (names "Nicknames" (package-nicknames package))
    (names "Uses" (mapcar #'package-name (package-use-list package)))
    (push-text-detail "Exports" (let ((count 0))
                                  (do-external-symbols (symbol package) (incf count))
                                  (format nil "~D symbol~:P" count)))
    (push-text-detail "Documentation" (documentation package t))
    (let ((location (guarded (definition-location (sb-introspect:find-definition-source package) (package-name package))
                        (failure)
                      nil)))
      (when location
        (push-source-location location)))))

(defun find-package-by-text (text)
  "Return the package that TEXT, a name with or without quotes and in any case, designates; or NIL."
  (let ((name (string-left-trim ":#'" (string-trim '(#\Space #\Tab #\Newline) text))))
    (or (find-package name)
        (find-package (string-upcase name)))))

(defun push-description (text package-name with-source)
  "Push the meanings of the symbol that TEXT names in the package PACKAGE-NAME, or a description of the package that TEXT
names. If WITH-SOURCE is true, include the source text of definitions."
  (let ((*include-source* with-source)
        (called (find-package-by-text text)))
    (multiple-value-bind (symbol found name package)
        (flet ((fail (condition)
                 (push-item (item-code :not-found) "" (lambda (stream) (princ condition stream)))
                 (return-from push-description)))
          (handler-case (locate-symbol text package-name)
            (sb-kernel:simple-package-error (condition) (fail condition))
            ;; TEXT ends inside a name, but a package may be called TEXT as it is.
            (simple-error (condition) (unless called (fail condition)))))
      (with-source-files ()
        (with-inspection-syntax ()
          (cond (found
                 (unless (some #'identity (list (push-function-roles symbol)
                                                (push-compiler-macro-role symbol)
                                                (push-accessor-roles (list 'setf symbol))
                                                (push-accessor-roles (list 'sb-ext:cas symbol))
                                                (push-method-combination-role symbol)
                                                (push-variable-roles symbol)
                                                (push-type-roles symbol)
                                                (push-alien-type-roles symbol)))
                   (cond (called (push-package-role called))
                         (t (push-role symbol "SYMBOL")
                            (push-text-detail "Note" "the symbol names no function, variable or type")))))
                (called (push-package-role called))
                (t (push-not-found name package))))))))

(define-job :definitions (job)
  "List the session's definitions."
  (run-guarded-inspection (lambda ()
                            (with-value-time-limits ()
                              (push-definitions (job-flags job) (job-argument job) (job-name job))))))

(define-job :describe (job)
  "Describe a symbol or a package."
  (run-guarded-inspection (lambda ()
                            (with-value-time-limits ()
                              (push-description (job-text job) (job-name job)
                                                (logtest +describe-source+ (job-flags job)))))))

;;; Preparing the core

(defun prepare-inspections ()
  "Inspect a definition of each kind, as part of building the core. SBCL compiles the dispatch of a generic function such as
DOCUMENTATION when the function is first called with arguments of certain classes, and for that needs **WORLD-LOCK**. An
inspection in a session must not need the lock, because the user's code may hold it for long."
  (let ((samples '((:class asdf:system) (:class random-state) (:class simple-error) (:class string) (:class stream)
                   (:class generic-function) (:type boolean) (:function car) (:function getf) (:function print-object)
                   (:macro when) (:variable *features*) (:package "ASDF"))))
    (dolist (sample samples)
      (setf (gethash sample **definitions**) nil))
    (push-definitions 0 (length samples) "")
    (loop for (nil name) in samples
          do (push-description (if (stringp name) name (format nil "~(~A~)" (symbol-name name))) "ASDF" nil))
    (dolist (sample samples)
      (remhash sample **definitions**))))
