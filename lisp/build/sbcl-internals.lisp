;;;; Checks that each internal name of SBCL's which the Lisp side uses is still what it was. sbcl-internals.sexp has the
;;;; names, each with a description from the pinned SBCL; write-internals.lisp makes that file from the sources.
;;;; build.lisp runs the check before it compiles anything, and the saved core has none of this.

(defpackage "SBCL-INTERNALS"
  (:use "COMMON-LISP")
  (:export "CHECK-TABLE" "MOVED-NAMES" "READ-TABLE"))

(in-package "SBCL-INTERNALS")

;;; The description of a name is a list of facets, each a list of a kind and strings, so that the table interns nothing. A facet's last
;;; element is a detail where *DETAILED* says so: a type or a number of values, which depends on the processor.

(defparameter *detailed* '(:function :open-coded :slot :special :global :constant :type)
  "The kinds of facets whose last element is compared on the processor that the table was written on only.")

(defun plain (object)
  "Return OBJECT, a lambda list or type specifier, as text without package prefixes."
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
  "Return NAME, a symbol or a list, with its package, as text."
  (if (symbolp name)
      (format nil "~A::~A" (package-name (symbol-package name)) (symbol-name name))
      (plain name)))

(defun value-count (type)
  "Return how many values a function of TYPE returns, :ANY when that is not known, :NONE when it does not return."
  (let ((returns (if (typep type 'sb-kernel:fun-type) (sb-kernel:fun-type-returns type) sb-kernel:*wild-type*)))
    (cond ((eq returns sb-kernel:*wild-type*) :any)
          ((eq returns sb-kernel:*empty-type*) :none)
          ((not (sb-kernel:values-type-p returns)) 1)
          ((or (sb-kernel:values-type-optional returns) (sb-kernel:values-type-rest returns)) :any)
          (t (length (sb-kernel:values-type-required returns))))))

(defun function-facets (name)
  "Return the facets of NAME, a function name, as an operator."
  (let ((kind (sb-int:info :function :kind name))
        (structure (and (symbolp name) (sb-int:info :function :source-transform name)))
        (type (sb-int:global-ftype name)))
    (cond ((eq kind :special-form) '((:special-operator)))
          ((and (symbolp name) (macro-function name))
           `((:macro ,(plain (sb-introspect:function-lambda-list name)))))
          ((and (consp structure) (typep (cdr structure) 'sb-kernel:defstruct-slot-description))
           (destructuring-bind (description . slot) structure
             `((,(if (sb-kernel:dsd-read-only slot) :read-only-slot :slot)
                ,(full-name (sb-kernel:dd-name description)) ,(string (sb-kernel:dsd-name slot))
                ,(plain (sb-kernel:dsd-type slot))))))
          ((consp structure) `((:structure-function ,(full-name (sb-kernel:dd-name (car structure)))
                                                    ,(plain (cdr structure)))))
          ((fboundp name)
           `((:function ,(plain (sb-introspect:function-lambda-list (fdefinition name))) ,(value-count type))))
          ;; The compiler knows it, and only the compiler.
          ((and (sb-int:info :function :info name) (typep type 'sb-kernel:fun-type))
           `((:open-coded ,(plain (length (sb-kernel:fun-type-required type))) ,(value-count type)))))))

(defun setf-facets (symbol)
  "Return the facets of SYMBOL as a place, except those of a structure slot."
  (append (when (sb-int:info :setf :expander symbol) '((:setf-expander)))
          (when (and (fboundp `(setf ,symbol)) (not (consp (sb-int:info :function :source-transform symbol))))
            `((:setf-function ,(plain (sb-introspect:function-lambda-list (fdefinition `(setf ,symbol)))))))))

(defun variable-facets (symbol)
  "Return the facets of SYMBOL as a variable."
  (let ((kind (sb-int:info :variable :kind symbol)))
    (case kind
      (:unknown '())
      (:macro '((:symbol-macro)))
      (:alien '((:alien-variable)))
      (:constant `((:constant ,(plain (let ((type (type-of (symbol-value symbol)))) (if (consp type) (first type) type))))))
      ((:special :global :always-bound)
       `((,(if (eq kind :special) :special :global)
          ,(plain (sb-kernel:type-specifier (sb-int:info :variable :type symbol)))))))))

(defun slot-names (class)
  "Return the names of the slots of CLASS, sorted."
  (unless (sb-mop:class-finalized-p class)
    (sb-mop:finalize-inheritance class))
  (sort (mapcar (lambda (slot) (string (sb-mop:slot-definition-name slot))) (sb-mop:class-slots class)) #'string<))

(defun class-facets (class)
  "Return the facets of CLASS."
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
                     `((:type ,(plain parameters) ,(plain (if parameters '* (sb-ext:typexpand-1 symbol))))))))
            (unless (eq :unknown (sb-int:info :alien-type :kind symbol)) '((:alien-type))))))

(defun included-slot-facets (symbol slots)
  "Return facets for SLOTS, names of slots of the structure SYMBOL that a structure of ours has other initial values for."
  (let ((description (sb-kernel:find-defstruct-description symbol nil)))
    (loop for name in slots
          for slot = (and description
                          (find name (sb-kernel:dd-slots description) :key #'sb-kernel:dsd-name :test #'string=))
          when slot
            collect `(:included-slot ,name ,(plain (sb-kernel:dsd-type slot))))))

(defun sbcl-symbol-p (symbol)
  "True when SYMBOL is of one of SBCL's packages."
  (let ((package (symbol-package symbol)))
    (and package
         (or (eq package (find-package "COMMON-LISP"))
             (eql 0 (search "SB-" (package-name package)))))))

(defun condition-slots ()
  "Return a table of the names of slots of SBCL's conditions to the names of the conditions that they are slots of."
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
  "What CONDITION-SLOTS returns, while many names are described.")

(defun word-facets (symbol)
  "Return the facets of SYMBOL as a word of a language: of OPTIMIZE, of lambda lists, or a name of slots."
  (let ((conditions (gethash symbol *condition-slots*)))
    (append (when (sb-c::policy-quality-name-p symbol) '((:policy-quality)))
            (when (member symbol lambda-list-keywords) '((:lambda-list-keyword)))
            (when conditions `((:slot-name ,@(sort (copy-list conditions) #'string<)))))))

(defun describe-symbol (symbol included)
  "Return the facets of SYMBOL. INCLUDED are names of its slots, where a structure of ours includes it."
  (or (append (function-facets symbol) (setf-facets symbol) (variable-facets symbol) (type-facets symbol)
              (included-slot-facets symbol included) (word-facets symbol))
      '((:symbol))))

(defun find-internal (package name)
  "Return the symbol that NAME is in PACKAGE, both strings, and whether there is one."
  (if (find-package package)
      (multiple-value-bind (symbol status) (find-symbol name package)
        (values symbol (and status t)))
      (values nil nil)))

(defun describe-name (package name &optional included)
  "Return the facets of what NAME is in PACKAGE, or in the C runtime where PACKAGE is \"C\"; NIL where it is nothing."
  (if (string= package "C")
      (when (sb-sys:find-foreign-symbol-address name) '((:foreign)))
      (multiple-value-bind (symbol found) (find-internal package name)
        (when found
          (describe-symbol symbol included)))))

;;; The check

(defun read-table (file)
  "Return the machine that FILE, the table, was written on, and its entries: lists of a package, a name, the feature
expression under which the sources use that, and its facets."
  (with-open-file (stream file)
    (with-standard-io-syntax
      (let ((*read-eval* nil))
        (destructuring-bind ((&key machine) &rest entries) (read stream)
          (values entries machine))))))

(defun facet-text (facet)
  "Return FACET in words."
  (if (null facet)
      "nothing of that kind"
      (destructuring-bind (kind &rest details) facet
        (case kind
          (:function (format nil "a function of ~A that returns ~A" (first details)
                             (case (second details)
                               (:any "any number of values")
                               (:none "nowhere")
                               (t (format nil "~D value~:P" (second details))))))
          (:open-coded (format nil "a function of ~A argument~:P that only the compiler knows" (first details)))
          (:macro (format nil "a macro of ~A" (first details)))
          ((:slot :read-only-slot)
           (format nil "the~@[ ~A~] slot ~A of ~A, a ~A" (when (eq kind :read-only-slot) "read-only")
                   (second details) (first details) (third details)))
          (:foreign "a symbol of the C runtime")
          (:symbol "a symbol with no meaning of its own")
          (:included-slot (format nil "the included slot ~A, a ~A" (first details) (second details)))
          (t (format nil "~(~A~)~@[ (~{~A~^, ~})~]" (substitute #\Space #\- (string kind)) details))))))

(defun category (facet)
  "Return which part of a name's meaning FACET is about: one of another kind may have taken its place."
  (case (first facet)
    ((:function :open-coded :macro :special-operator :slot :read-only-slot :structure-function) :operator)
    ((:special :global :constant :symbol-macro) :variable)
    ((:structure :condition :class :built-in-class :type) :type)
    (:included-slot (list :included-slot (second facet)))
    (t (first facet))))

(defun comparable (facet same-machine)
  "Return what has to be equal of FACET: all of it on SAME-MACHINE, else not the detail."
  (if (and (not same-machine) (or (member (first facet) *detailed*) (eq :read-only-slot (first facet))))
      (butlast facet)
      facet))

(defun name-problems (entry same-machine)
  "Return what is no longer as ENTRY of the table says, as texts."
  (destructuring-bind (package name features &rest facets) entry
    (declare (ignore features))
    (handler-case
        (let ((found (describe-name package name (loop for facet in facets
                                                       when (eq :included-slot (first facet))
                                                         collect (second facet)))))
          (if (null found)
              (list (format nil "there is no such ~:[symbol~;symbol in the C runtime~]" (string= package "C")))
              (loop for facet in facets
                    for now = (find (category facet) found :key #'category :test #'equal)
                    unless (or (eq :symbol (first facet))
                               (equal (comparable facet same-machine) (comparable now same-machine)))
                      collect (format nil "was ~A; is ~A" (facet-text facet) (facet-text now)))))
      (error (failure) (list (format nil "cannot be described: ~A" failure))))))

(defun moved-names (entries machine)
  "Return what is no longer as ENTRIES of a table say that was written on MACHINE: lists of a name and the problems."
  (loop with same-machine = (string= machine (machine-type))
        with *condition-slots* = (condition-slots)
        for entry in entries
        for (package name features) = entry
        for problems = (when (or (eq features t) (uiop:featurep features)) (name-problems entry same-machine))
        when problems
          collect (cons (if (string= package "C") name (format nil "~A::~A" package name)) problems)))

(defun check-table (file)
  "Signal an error that names all of SBCL's internals in FILE, the table, that are no longer what they were."
  (let ((moved (multiple-value-call #'moved-names (read-table file))))
    (when moved
      (error "This is SBCL ~A, in which internal names have moved that the Lisp side uses:~%~:{  ~A ~@{~A~^~%    and ~}~%~}~
              Adapt the sources to each and write the table anew: CONTRIBUTING.md, Moving the pin."
             (lisp-implementation-version) moved))))
