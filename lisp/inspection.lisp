;;;; Questions about the image: what the session defined, what a symbol means.

(in-package "SBCL-HOST")

(defun edit-distance (a b limit)
  "Return the Levenshtein distance of the strings A and B, or NIL when it is over LIMIT."
  (when (<= (abs (- (length a) (length b))) limit)
    (let ((row (make-array (1+ (length b)))))
      (dotimes (index (length row)) (setf (svref row index) index))
      (loop for i from 1 to (length a)
            do (let ((diagonal (svref row 0)))
                 (setf (svref row 0) i)
                 (loop for j from 1 to (length b)
                       do (let ((above (svref row j)))
                            (setf (svref row j)
                                  (min (1+ above) (1+ (svref row (1- j)))
                                       (+ diagonal (if (char= (char a (1- i)) (char b (1- j))) 0 1)))
                                  diagonal above)))))
      (let ((distance (svref row (length b))))
        (and (<= distance limit) distance)))))

(defun near-names (name candidates)
  "Return up to five of the strings CANDIDATES that are near to NAME, nearest first."
  (let* ((limit (case (length name) ((0 1 2) 0) ((3 4 5) 1) (t 2)))
         (near (loop for candidate in candidates
                     for distance = (edit-distance name candidate limit)
                     when distance collect (cons distance candidate))))
    (loop for (nil . candidate) in (sort (remove-duplicates near :key #'cdr :test #'string=)
                                         (lambda (a b)
                                           (if (= (car a) (car b))
                                               (string< (cdr a) (cdr b))
                                               (< (car a) (car b)))))
          repeat 5
          collect candidate)))

(defmacro with-inspection-syntax (() &body body)
  "Evaluate BODY so that symbols outside CL-USER print with their package."
  `(with-server-syntax (:length 20 :level 4)
     (let ((*package* **user-package**)
           (*print-circle* t))
       ,@body)))

(defun push-item (kind label function)
  "Push an item of KIND, an item code, with LABEL and the text that FUNCTION prints to its argument."
  (event *job-id* (event-code :item) kind label)
  (push-text (event-code :item-text) function))

;;; list-definitions

(defun lambda-list-of (name)
  "Return the lambda list of the function or macro NAME, and whether it is known."
  (guarded (sb-introspect:function-lambda-list
            (if (and (symbolp name) (macro-function name)) (macro-function name) (fdefinition name)))
      (failure)
    (values nil t)))

(defun print-definition (kind name stream)
  "Print the line for NAME, defined as KIND."
  (if (stringp name)
      (write-string name stream)
      (prin1 name stream))
  (case kind
    ((:function :macro)
     (when (or (eq kind :function) (and (symbolp name) (macro-function name)))
       (multiple-value-bind (lambda-list unknown) (lambda-list-of name)
         (unless (eq unknown t)
           (write-char #\Space stream)
           (if lambda-list (print-lambda-list lambda-list stream) (write-string "()" stream))))))
    (:variable
     (when (boundp name)
       (write-string " = " stream)
       (let ((value (symbol-value name)))
         (when (push-argument value stream)))))))

(defun print-lambda-list (lambda-list stream)
  "Print LAMBDA-LIST without packages: they say nothing to its reader."
  (labels ((bare (object)
             (typecase object
               (cons (cons (bare (car object)) (bare (cdr object))))
               ((and symbol (not null)) (make-symbol (symbol-name object)))
               (t object))))
    (let ((*print-gensym* nil) (*print-length* nil) (*print-level* nil) (*print-circle* nil))
      (prin1 (bare lambda-list) stream))))

(defun push-argument (value stream)
  "Print VALUE to STREAM as an argument of a frame would be."
  (print-argument value stream)
  nil)

(defun push-definitions ()
  "Push what the session defined."
  (with-inspection-syntax ()
    (map-definitions
     (lambda (kind name)
       (let ((code (case kind
                     (:function (item-code :function))
                     (:variable (item-code :variable))
                     (:macro (item-code :macro))
                     (:class (item-code :class))
                     (:package (item-code :package)))))
         (when code
           (push-item code "" (lambda (stream) (print-definition kind name stream)))))))
    (dolist (system (loaded-systems))
      (push-item (item-code :system) "" (lambda (stream) (write-string system stream))))))

(defglobal **core-systems** '()
  "Names of the systems that are part of the core.")

(defun already-loaded-systems ()
  "Return the names of the systems that ASDF has loaded."
  (guarded (copy-list (asdf:already-loaded-systems)) (failure) '()))

(defun loaded-systems ()
  "Return the names of the systems that the session loaded."
  (set-difference (already-loaded-systems) **core-systems** :test #'equal))

;;; describe-symbol

(defun locate-symbol (text package-name)
  "Find the symbol that TEXT means to a reader in the package named PACKAGE-NAME, or in *PACKAGE* when that is empty,
without interning it. Return the symbol, whether there is one, the name and the package that were looked at."
  (let* ((text (string-trim '(#\Space #\Tab #\Newline #\') text))
         (colon (position #\: text))
         (package (cond ((null colon)
                         (if (string= package-name "")
                             (current-package)
                             (find-user-package package-name)))
                        ((eql colon 0) (find-package "KEYWORD"))
                        (t (find-user-package (string-left-trim "#" (subseq text 0 colon))))))
         (name (if colon (string-left-trim ":" (subseq text colon)) text))
         (upcase (if (find #\| name) (remove #\| name) (string-upcase name))))
    (multiple-value-bind (symbol status) (find-symbol upcase package)
      (if status
          (values symbol t upcase package)
          (multiple-value-bind (symbol status) (find-symbol name package)
            (values symbol (and status t) upcase package))))))

(defun push-detail (label function)
  "Push a detail of the role before it."
  (push-item (item-code :detail) label function))

(defun push-text-detail (label text)
  "Push TEXT as a detail, unless it is NIL."
  (when text
    (push-detail label (lambda (stream) (write-string text stream)))))

(defun push-role (symbol role)
  "Push that SYMBOL has ROLE, a string."
  (push-item (item-code :role) ""
             (lambda (stream)
               (let ((package (symbol-package symbol)))
                 (format stream "~A~A [~A]"
                         (cond ((null package) "#:")
                               ((eq package (find-package "KEYWORD")) ":")
                               ((eq :external (nth-value 1 (find-symbol (symbol-name symbol) package)))
                                (format nil "~A:" (package-name package)))
                               (t (format nil "~A::" (package-name package))))
                         (let ((*package* (or package *package*)))
                           (string-left-trim "#:" (prin1-to-string symbol)))
                         role)))))

(defun push-source (name type)
  "Push where NAME, defined as TYPE, was defined, if that is known and of any use."
  (let ((source (guarded (first (sb-introspect:find-definition-sources-by-name name type)) (failure) nil)))
    (when source
      (let ((file (sb-introspect:definition-source-pathname source))
            (position (sb-introspect:definition-source-character-offset source)))
        (when file
          (let* ((namestring (namestring file))
                 (line (and position (not (eql 4 (mismatch "SYS:" namestring)))
                            (guarded (file-line namestring position) (failure) nil))))
            (push-text-detail "Source" (format nil "~A~@[:~D~]" namestring line))))))))

(defun push-documentation (name type)
  "Push NAME's documentation string of TYPE, if it has one."
  (push-text-detail "Documentation" (guarded (documentation name type) (failure) nil)))

(defun push-arglist (name)
  "Push the lambda list of NAME."
  (multiple-value-bind (lambda-list unknown) (lambda-list-of name)
    (unless (eq unknown t)
      (push-detail "Arglist" (lambda (stream)
                               (if lambda-list
                                   (print-lambda-list lambda-list stream)
                                   (write-string "()" stream)))))))

(defun push-function-roles (symbol)
  "Push what SYMBOL means as an operator, and return true when it means something as one."
  (cond ((special-operator-p symbol)
         (push-role symbol "SPECIAL OPERATOR")
         (push-documentation symbol 'function)
         t)
        ((macro-function symbol)
         (push-role symbol "MACRO")
         (push-arglist symbol)
         (push-documentation symbol 'function)
         (push-source symbol :macro)
         t)
        ((fboundp symbol)
         (let ((generic (typep (fdefinition symbol) 'generic-function)))
           (push-role symbol (if generic "GENERIC FUNCTION" "FUNCTION"))
           (push-arglist symbol)
           (let ((type (guarded (sb-introspect:function-type symbol) (failure) nil)))
             (when (consp type)
               (push-detail "Type" (lambda (stream)
                                     (let ((*print-length* nil) (*print-level* nil)
                                           (*package* (find-package "COMMON-LISP")))
                                       (prin1 type stream))))))
           (push-documentation symbol 'function)
           (when generic
             (push-text-detail "Methods" (princ-to-string
                                          (length (sb-mop:generic-function-methods (fdefinition symbol))))))
           (push-source symbol (if generic :generic-function :function))
           t))))

(defun push-variable-roles (symbol)
  "Push what SYMBOL means as a variable, and return true when it means something as one."
  (let ((kind (sb-int:info :variable :kind symbol)))
    (when (or (member kind '(:special :constant :global :macro)) (boundp symbol))
      (push-role symbol (case kind
                          (:constant "CONSTANT")
                          (:global "GLOBAL VARIABLE")
                          (:macro "SYMBOL MACRO")
                          (t "VARIABLE")))
      (cond ((eq kind :macro)
             (push-detail "Expansion" (lambda (stream) (prin1 (macroexpand-1 symbol) stream))))
            ((boundp symbol)
             (push-detail "Value" (lambda (stream) (push-argument (symbol-value symbol) stream))))
            (t (push-text-detail "Value" "unbound")))
      (push-documentation symbol 'variable)
      (push-source symbol (if (eq kind :constant) :constant :variable))
      t)))

(defun push-type-roles (symbol)
  "Push what SYMBOL means as a type, and return true when it means something as one."
  (let ((class (find-class symbol nil)))
    (cond (class
           (push-role symbol (typecase class
                               (sb-pcl::condition-class "CONDITION TYPE")
                               (structure-class "STRUCTURE CLASS")
                               (built-in-class "BUILT-IN CLASS")
                               (t "CLASS")))
           (push-detail "Superclasses"
                        (lambda (stream)
                          (format stream "~{~S~^ ~}"
                                  (mapcar #'class-name (sb-mop:class-direct-superclasses class)))))
           (let ((slots (guarded (mapcar #'sb-mop:slot-definition-name (sb-mop:class-direct-slots class))
                            (failure) '())))
             (when slots
               (push-detail "Slots" (lambda (stream) (format stream "~{~S~^ ~}" slots)))))
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

(defun push-not-found (name package)
  "Push that PACKAGE has no symbol NAME, with near ones."
  (let ((near (let ((names '()))
                (do-symbols (symbol package) (push (symbol-name symbol) names))
                (near-names name names)))
        (elsewhere (let ((packages '()))
                     (dolist (other (remove (find-package "KEYWORD") (list-all-packages)) (sort packages #'string<))
                       (when (eq :external (nth-value 1 (find-symbol name other)))
                         (pushnew (package-name (symbol-package (find-symbol name other))) packages
                                  :test #'string=))))))
    (push-item (item-code :not-found) ""
               (lambda (stream)
                 (format stream "Symbol ~A not found in package ~A (nor in the packages it uses)."
                         name (package-name package))
                 (when elsewhere
                   (format stream "~%Other packages have it: ~{~A~^, ~}."
                           (subseq elsewhere 0 (min 5 (length elsewhere)))))
                 (when near
                   (format stream "~%Near names: ~{~A~^, ~}." near))))))

(defun push-description (text package-name)
  "Push what the symbol that TEXT means in the package named PACKAGE-NAME means."
  (multiple-value-bind (symbol found name package) (locate-symbol text package-name)
    (with-inspection-syntax ()
      (cond (found
             (unless (some #'identity (list (push-function-roles symbol)
                                            (push-variable-roles symbol)
                                            (push-type-roles symbol)))
               (push-role symbol "SYMBOL")
               (push-text-detail "Note" "it names nothing yet")))
            (t (push-not-found name package))))))
