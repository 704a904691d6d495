;;;; Checks that each internal name of SBCL that the Lisp side uses is unchanged. sbcl-internals.sexp contains the
;;;; names, each with a description taken from the pinned SBCL; write-internals.lisp generates that file from the
;;;; sources. build.lisp runs the check before it compiles anything, and deletes this package before it saves the core.

(defpackage "SBCL-INTERNALS"
  (:use "COMMON-LISP")
  (:export "CHECK-TABLE" "CHANGED-NAMES" "READ-TABLE"))

(in-package "SBCL-INTERNALS")

;;; The description of a name is a list of facets. Each facet describes one use of the name, such as a function or a type,
;;; and is a list of a kind and details. Most details are strings rather than symbols, because reading a string interns
;;; nothing. For the kinds in *PROCESSOR-DEPENDENT-FACETS*, the last detail, a type or a number of values, depends on the
;;; processor.

(defparameter *processor-dependent-facets* '(:function :open-coded :slot :special :global :constant :type)
  "The kinds of facets whose last element is compared only on the kind of processor on which the table was written.
COMPARABLE-PART treats :READ-ONLY-SLOT likewise.")

(defun specifier-text (object)
  "Return the text of OBJECT, a lambda list or type specifier, without package prefixes."
  (labels ((bare (object)
             (typecase object
               (cons (cons (bare (car object)) (bare (cdr object))))
               (keyword object)
               (null object)
               (symbol (make-symbol (symbol-name object)))
               ((or number string character) object)
               (t (make-symbol (string (type-of object)))))))
    (with-standard-io-syntax
      (let ((*print-gensym* nil) (*print-readably* nil))
        (prin1-to-string (bare object))))))

(defun full-name (name)
  "Return the text of NAME, a symbol or a list. A symbol is printed with its package, a list without packages."
  (if (symbolp name)
      (format nil "~A::~A" (package-name (symbol-package name)) (symbol-name name))
      (specifier-text name)))

(defun value-count (type)
  "Return the number of values that functions of TYPE return; :ANY when the number varies or is unknown, and :NONE when
the functions do not return."
  (let ((returns (if (typep type 'sb-kernel:fun-type) (sb-kernel:fun-type-returns type) sb-kernel:*wild-type*)))
    (cond ((eq returns sb-kernel:*wild-type*) :any)
          ((eq returns sb-kernel:*empty-type*) :none)
          ((not (sb-kernel:values-type-p returns)) 1)
          ((or (sb-kernel:values-type-optional returns) (sb-kernel:values-type-rest returns)) :any)
          (t (length (sb-kernel:values-type-required returns))))))

(defun function-facets (name)
  "Return the facets of NAME, a function name, as an operator: function, macro, special operator or structure accessor."
  (let ((kind (sb-int:info :function :kind name))
        (structure (and (symbolp name) (sb-int:info :function :source-transform name)))
        (type (sb-int:global-ftype name)))
    (cond ((eq kind :special-form) '((:special-operator)))
          ((and (symbolp name) (macro-function name))
           `((:macro ,(specifier-text (sb-introspect:function-lambda-list name)))))
          ((and (consp structure) (typep (cdr structure) 'sb-kernel:defstruct-slot-description))
           (destructuring-bind (description . slot) structure
             `((,(if (sb-kernel:dsd-read-only slot) :read-only-slot :slot)
                ,(full-name (sb-kernel:dd-name description)) ,(string (sb-kernel:dsd-name slot))
                ,(specifier-text (sb-kernel:dsd-type slot))))))
          ((consp structure) `((:structure-function ,(full-name (sb-kernel:dd-name (car structure)))
                                                    ,(specifier-text (cdr structure)))))
          ((fboundp name)
           `((:function ,(specifier-text (sb-introspect:function-lambda-list (fdefinition name))) ,(value-count type))))
          ;; For a function without a definition, the compiler generates code at each call.
          ((and (sb-int:info :function :info name) (typep type 'sb-kernel:fun-type))
           `((:open-coded ,(specifier-text (length (sb-kernel:fun-type-required type))) ,(value-count type)))))))

(defun setf-facets (symbol)
  "Return the facets of SYMBOL as a place for SETF. If SYMBOL is a structure accessor, FUNCTION-FACETS describes it instead."
  (append (when (sb-int:info :setf :expander symbol) '((:setf-expander)))
          (when (and (fboundp `(setf ,symbol)) (not (consp (sb-int:info :function :source-transform symbol))))
            `((:setf-function ,(specifier-text (sb-introspect:function-lambda-list (fdefinition `(setf ,symbol)))))))))

(defun variable-facets (symbol)
  "Return the facets of SYMBOL as a variable."
  (let ((kind (sb-int:info :variable :kind symbol)))
    (case kind
      (:unknown '())
      (:macro '((:symbol-macro)))
      (:alien '((:alien-variable)))
      (:constant `((:constant ,(specifier-text (let ((type (type-of (symbol-value symbol))))
                                                 (if (consp type) (first type) type))))))
      ((:special :global :always-bound)
       `((,(if (eq kind :special) :special :global)
          ,(specifier-text (sb-kernel:type-specifier (sb-int:info :variable :type symbol)))))))))

(defun slot-names (class)
  "Return the names of the slots of CLASS, sorted."
  (unless (sb-mop:class-finalized-p class)
    (sb-mop:finalize-inheritance class))
  (sort (mapcar (lambda (slot) (string (sb-mop:slot-definition-name slot))) (sb-mop:class-slots class)) #'string<))

(defun class-facets (class)
  "Return the facets of CLASS: its kind with its direct superclasses and, for a condition class, its slots."
  (let ((parents (mapcar (lambda (parent) (full-name (class-name parent))) (sb-mop:class-direct-superclasses class))))
    (typecase class
      (structure-class `((:structure ,@parents)))
      (built-in-class '((:built-in-class)))
      (sb-pcl::condition-class `((:condition ,parents ,(slot-names class))))
      (t `((:class ,@parents))))))

(defun type-facets (symbol)
  "Return the facets of SYMBOL as a type."
  (let ((class (find-class symbol nil)))
    (append (cond (class (class-facets class))
                  ((sb-int:info :type :expander symbol)
                   (let ((parameters (sb-introspect:deftype-lambda-list symbol)))
                     `((:type ,(specifier-text parameters)
                              ,(specifier-text (if parameters '* (sb-ext:typexpand-1 symbol))))))))
            (unless (eq :unknown (sb-int:info :alien-type :kind symbol)) '((:alien-type))))))

(defun included-slot-facets (symbol slots)
  "Return the facets of those slots of the structure SYMBOL whose names are in SLOTS. A structure of the Lisp side includes
the structure SYMBOL, and gives these slots other initial values."
  (let ((description (sb-kernel:find-defstruct-description symbol nil)))
    (loop for name in slots
          for slot = (and description
                          (find name (sb-kernel:dd-slots description) :key #'sb-kernel:dsd-name :test #'string=))
          when slot
            collect `(:included-slot ,name ,(specifier-text (sb-kernel:dsd-type slot))))))

(defun sbcl-symbol-p (symbol)
  "Return true when SYMBOL belongs to one of SBCL's packages."
  (let ((package (symbol-package symbol)))
    (and package
         (or (eq package (find-package "COMMON-LISP"))
             (eql 0 (search "SB-" (package-name package)))))))

(defun condition-slots ()
  "Return a hash table from slot names of SBCL's conditions to the names of the conditions that have them."
  (let ((slots (make-hash-table :test #'eq))
        (seen (make-hash-table :test #'eq)))
    (labels ((visit (class)
               (unless (gethash class seen)
                 (setf (gethash class seen) t)
                 (when (sbcl-symbol-p (class-name class))
                   (dolist (slot (sb-mop:class-direct-slots class))
                     (push (full-name (class-name class)) (gethash (sb-mop:slot-definition-name slot) slots))))
                 (mapc #'visit (sb-mop:class-direct-subclasses class)))))
      (visit (find-class 'condition)))
    slots))

(defvar *condition-slots* nil
  "The value of the function CONDITION-SLOTS, cached while many names are described.")

(defun other-facets (symbol)
  "Return the facets of SYMBOL that are neither an operator, a variable nor a type: a policy quality, a lambda list
keyword, or a slot name of conditions."
  (let ((conditions (gethash symbol *condition-slots*)))
    (append (when (sb-c::policy-quality-name-p symbol) '((:policy-quality)))
            (when (member symbol lambda-list-keywords) '((:lambda-list-keyword)))
            (when conditions `((:slot-name ,@(sort (copy-list conditions) #'string<)))))))

(defun describe-symbol (symbol included)
  "Return the facets of SYMBOL. If a structure of the Lisp side includes the structure SYMBOL, INCLUDED lists the names of
the slots to which the including structure gives other initial values."
  (or (append (function-facets symbol) (setf-facets symbol) (variable-facets symbol) (type-facets symbol)
              (included-slot-facets symbol included) (other-facets symbol))
      '((:symbol))))

(defun find-named-symbol (package name)
  "Return the symbol called NAME in PACKAGE, and true if there is such a symbol. NAME and PACKAGE are strings."
  (if (find-package package)
      (multiple-value-bind (symbol status) (find-symbol name package)
        (values symbol (and status t)))
      (values nil nil)))

(defun describe-name (package name &optional included)
  "Return the facets of the symbol NAME in PACKAGE. If PACKAGE is \"C\", NAME is a name of the C runtime. Return NIL if
there is no such name. INCLUDED is as for DESCRIBE-SYMBOL."
  (if (string= package "C")
      (when (sb-sys:find-foreign-symbol-address name) '((:foreign)))
      (multiple-value-bind (symbol found) (find-named-symbol package name)
        (when found
          (describe-symbol symbol included)))))

;;; The check

(defun read-table (file)
  "Return the entries of FILE, the table, and the type of machine on which the table was written. Entries are lists of a
package, a name, the feature expression under which the sources use the name, and the name's facets."
  (with-open-file (stream file)
    (with-standard-io-syntax
      (let ((*read-eval* nil))
        (destructuring-bind ((&key machine) &rest entries) (read stream)
          (values entries machine))))))

(defun facet-text (facet)
  "Return the phrase that describes FACET, or the absence of a facet if FACET is NIL."
  (if (null facet)
      "nothing of that kind"
      (destructuring-bind (kind &rest details) facet
        (case kind
          (:function (format nil "a function with the lambda list ~A that ~A" (first details)
                             (case (second details)
                               (:any "returns any number of values")
                               (:none "never returns")
                               (t (format nil "returns ~D value~:P" (second details))))))
          (:open-coded (format nil "a function of ~A argument~:P that the compiler open-codes" (first details)))
          (:macro (format nil "a macro with the lambda list ~A" (first details)))
          ((:slot :read-only-slot)
           (format nil "the~@[ ~A~] slot ~A of ~A, of type ~A" (when (eq kind :read-only-slot) "read-only")
                   (second details) (first details) (third details)))
          (:foreign "a symbol of the C runtime")
          (:symbol "a symbol that names nothing")
          (:included-slot (format nil "the included slot ~A, of type ~A" (first details) (second details)))
          (t (format nil "~(~A~)~@[ (~{~A~^, ~})~]" (substitute #\Space #\- (string kind)) details))))))

(defun facet-category (facet)
  "Return the category of FACET, such as :OPERATOR. NAME-PROBLEMS compares a facet in the table with the facet of the same
category that the name has in this SBCL."
  (case (first facet)
    ((:function :open-coded :macro :special-operator :slot :read-only-slot :structure-function) :operator)
    ((:special :global :constant :symbol-macro) :variable)
    ((:structure :condition :class :built-in-class :type) :type)
    (:included-slot (list :included-slot (second facet)))
    (t (first facet))))

(defun comparable-part (facet same-machine)
  "Return the part of FACET to compare with another facet. SAME-MACHINE is false if the table was written on another kind of
processor. In this case, omit the last element of FACET if it depends on the processor (see *PROCESSOR-DEPENDENT-FACETS*)."
  (if (and (not same-machine) (or (member (first facet) *processor-dependent-facets*) (eq :read-only-slot (first facet))))
      (butlast facet)
      facet))

(defun name-problems (entry same-machine)
  "Return a list of phrases that describe how a name differs from ENTRY, its entry in the table. SAME-MACHINE is true
when this machine is of the kind on which the table was written."
  (destructuring-bind (package name features &rest facets) entry
    (declare (ignore features))
    (handler-case
        (let ((found (describe-name package name (loop for facet in facets
                                                       when (eq :included-slot (first facet))
                                                         collect (second facet)))))
          (if (null found)
              (list (format nil "no longer exists~:[~; in the C runtime~]" (string= package "C")))
              (loop for facet in facets
                    for now = (find (facet-category facet) found :key #'facet-category :test #'equal)
                    unless (or (eq :symbol (first facet))
                               (equal (comparable-part facet same-machine) (comparable-part now same-machine)))
                      collect (format nil "was ~A; is now ~A" (facet-text facet) (facet-text now)))))
      (error (failure) (list (format nil "cannot be described: ~A" failure))))))

(defun changed-names (entries machine)
  "Return a list that contains, for each name that differs from its entry in ENTRIES, a list of the name and the phrases
that describe the differences. MACHINE is the type of machine on which the table of ENTRIES was written."
  (loop with same-machine = (string= machine (machine-type))
        with *condition-slots* = (condition-slots)
        for entry in entries
        for (package name features) = entry
        for problems = (when (or (eq features t) (uiop:featurep features)) (name-problems entry same-machine))
        when problems
          collect (cons (if (string= package "C") name (format nil "~A::~A" package name)) problems)))

(defun check-table (file)
  "If internal names in FILE, the table, have changed, signal an error that lists them and their changes."
  (let ((moved (multiple-value-call #'changed-names (read-table file))))
    (when moved
      (error "In SBCL ~A, internal names that the Lisp side uses differ from ~
              the table of names:~%~:{  ~A ~@{~A~^~%    and ~}~%~}~
              Adapt the sources to each change, then run make sbcl-internals (docs/upgrading-sbcl.md)."
             (lisp-implementation-version) moved))))
