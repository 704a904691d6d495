;;;; find-references: the code that calls, reads, sets, binds, expands, specialises on or tests a name. The references come
;;;; from SBCL's own records.
;;;;
;;;; SBCL keeps three kinds of records with compiled code. Cross-references (src/compiler/xref.lisp) contain the number of
;;;; the form that refers to a name, but there are none for names in COMMON-LISP or in SBCL's own packages. Linkage cells
;;;; show full calls of any name. Constants show names that the code uses as data. Each request scans all code, which takes
;;;; some milliseconds, so there is no index that could be out of date, retain garbage, or grow.

(in-package "SBCL-HOST/TOOLS")

;;; Code components

(declaim (type index **code-count**))
(defglobal **code-count** 30000
  "The number of code components that the last scan found, at first an estimate.")

(defun image-code ()
  "Return a vector of all code components, including garbage."
  (loop
    ;; Make the vector first: garbage collection is inhibited during the scan, so nothing may be allocated then.
    (let ((all (make-array (+ **code-count** 1000) :initial-element nil))
          (end 0))
      (declare (type index end))
      (sb-vm:map-code-objects (lambda (code)
                                (when (< end (length all))
                                  (setf (svref all end) code))
                                (incf end)))
      (setf **code-count** end)
      (when (<= end (length all))
        (return (sb-kernel:%shrink-vector all end))))))

(defun code-functions (code)
  "Return the simple functions of the component CODE."
  (loop for index below (sb-kernel:code-n-entries code)
        collect (sb-kernel:%code-entry-point code index)))

(defun system-code-p (code)
  "Return true when the component CODE belongs to SBCL or to the server, or when its source is unknown."
  (let ((source (code-source code)))
    (or (null source)
        (let ((file (sb-c::debug-source-namestring source)))
          (and (stringp file) (system-file-p file))))))

(defmacro do-code ((code &key system) &body body)
  "Evaluate BODY with CODE bound to each component whose source is known. Components for which SYSTEM-CODE-P is true are
included only if SYSTEM is true."
  (let ((last (gensym "LAST")) (skip (gensym "SKIP")) (all (gensym "ALL")) (source (gensym "SOURCE")))
    ;; Consecutive components mostly have the same source, so SYSTEM-CODE-P is called only when the source changes.
    `(let ((,all ,system) (,last nil) (,skip t))
       (loop for ,code across (the simple-vector (image-code))
             for ,source = (code-source ,code)
             do (unless (eq ,source ,last)
                  (setf ,last ,source
                        ,skip (or (null ,source) (and (not ,all) (system-code-p ,code)))))
                (unless (or ,skip (null ,source))
                  ,@body)))))

(defun toplevel-code-p (function)
  "Return true when FUNCTION, a simple function, is the code of a top-level form, which has run and will not run again."
  (let ((name (sb-kernel:%simple-fun-name function))
        (code (sb-kernel:fun-code-header function)))
    (or (equal name "top level form")
        (and (equal name '(lambda ()))
             (eq function (sb-kernel:%code-entry-point code 0))
             (let ((source (code-source code)))
               (and (null (sb-c::debug-source-namestring source))
                    ;; EVAL compiles (LAMBDA () FORM). A lambda expression that the user wrote may be called later.
                    (not (submitted-lambda-p source))))))))

(defun function-code (function)
  "Return the code component of FUNCTION, which may be a simple function, a closure or a funcallable instance."
  (sb-kernel:fun-code-header (sb-kernel:%fun-fun function)))

(defun method-code (method)
  "Return the code component of METHOD's body, or NIL if it cannot be determined."
  (let ((function (guarded (or (sb-pcl::safe-method-fast-function method) (sb-mop:method-function method))
                      (failure)
                    nil)))
    (and (functionp function) (function-code function))))

(defvar *method-codes* nil
  "The results of METHOD-CODES for this request, an EQ hash table, so that the methods of a generic function are visited
once.")

(defun method-codes (generic-function)
  "Return an EQ hash table whose keys are the code components of the bodies of GENERIC-FUNCTION's methods."
  (or (gethash generic-function *method-codes*)
      (let ((codes (make-hash-table :test 'eq)))
        (dolist (method (sb-mop:generic-function-methods generic-function))
          (setf (gethash (method-code method) codes) t))
        (setf (gethash generic-function *method-codes*) codes))))

(defun method-body-name-p (name)
  "Return true when NAME, the name of a simple function, names a method's body."
  (typep name '(cons (member sb-pcl::fast-method sb-pcl::slow-method) cons)))

(defun defined-name (name)
  "Return the function name through which code calls the simple function named NAME, and true. Return NIL if there is no such
function name. A method is called through the name of its generic function."
  (cond ((method-body-name-p name) (values (second name) t))
        ((typep name '(cons (eql macro-function) (cons symbol null))) (values (second name) t))
        ((and name (sb-int:valid-function-name-p name)) (values name t))))

(defun current-definition-p (function)
  "Return true when FUNCTION, a simple function, is the current definition of its name. Return :UNKNOWN if FUNCTION has no
global name."
  (let* ((name (sb-kernel:%simple-fun-name function))
         (code (sb-kernel:fun-code-header function)))
    (multiple-value-bind (defined found) (defined-name name)
      (cond ((not found) :unknown)
            ((method-body-name-p name)
             (let ((generic (and (sb-int:valid-function-name-p defined) (fboundp defined) (fdefinition defined))))
               (and (typep generic 'generic-function)
                    (gethash code (method-codes generic)))))
            ((consp name)
             (let ((definition (if (eq (first name) 'macro-function)
                                   (macro-function defined)
                                   (and (fboundp defined) (global-function defined)))))
               (and definition (eq code (function-code definition)))))
            ((macro-function name) (eq code (function-code (macro-function name))))
            (t (and (fboundp name) (eq code (function-code (global-function name)))))))))

(defun live-functions (code)
  "Return the simple functions of the component CODE, without top-level forms. Return NIL if these functions can no longer be
called, because all functions with global names have been redefined, or if CODE has only top-level forms."
  (let* ((functions (remove-if #'toplevel-code-p (code-functions code)))
         (current (mapcar #'current-definition-p functions)))
    (and functions
         ;; A function without a global name may be called as long as some named function of its component is current.
         (or (member t current) (every (lambda (current) (eq current :unknown)) current))
         functions)))

;;; The references of code

(defun code-constant-p (object code)
  "Return true when OBJECT is a constant of the component CODE."
  (loop for index from sb-vm:code-constants-offset below (sb-kernel:code-header-words code)
          thereis (eq object (sb-kernel:code-header-ref code index))))

(defun map-xrefs (visit function)
  "Call VISIT with the kind, the name and the form number of each cross-reference of FUNCTION, a simple function."
  (let ((data (sb-kernel:%simple-fun-xrefs function)))
    (when data
      (sb-c:map-packed-xref-data visit data))))

(defstruct (reference (:copier nil) (:predicate nil))
  "A form in code that refers to a name."
  ;; The simple function that contains the reference.
  (function nil :type (or null function))
  ;; The number of the referring form within the top-level form, or NIL if SBCL does not know it.
  (number nil :type (or null index))
  ;; A phrase for the kind of the reference, such as `sets', or NIL if the kind is obvious.
  (how nil :type (or null string)))

(defun code-references (code name kinds cell)
  "Return the references to NAME in the component CODE, or NIL if the functions of CODE can no longer be called. The
references are the cross-references whose kind is in KINDS. Each element of KINDS is a list of two elements: SBCL's keyword
for a kind, and a phrase for the kind or NIL. If CODE has no cross-reference of any kind to NAME, return one reference if
CODE calls NAME through the linkage CELL, or else if NAME is a constant of CODE. CELL is 0 if NAME has no linkage cell, or
NIL to consider only cross-references."
  (let ((references '())
        (recorded nil))
    (loop for entry below (sb-kernel:code-n-entries code)
          for function = (sb-kernel:%code-entry-point code entry)
          do (map-xrefs (lambda (kind what number)
                          (when (if (symbolp name) (eq what name) (equal what name))
                            (let ((wanted (assoc kind kinds)))
                              (setf recorded t)
                              (when wanted
                                (push (make-reference :function function :number number :how (second wanted))
                                      references)))))
                        function))
    (flet ((somewhere (how)
             (let ((functions (live-functions code)))
               (when functions
                 (list (make-reference :function (or (find t functions :key #'current-definition-p) (first (last functions)))
                                       :how how))))))
      (cond (references
             (let ((live (live-functions code)))
               (loop for reference in references
                     for function = (reference-function reference)
                     ;; Attribute a top-level form's reference to a live function in the form.
                     do (when (and live (not (member function live)))
                          (setf (reference-function reference) (first (last live))))
                     when live collect reference)))
            ((or recorded (null cell)) '())
            ((and (not (eql cell 0)) (member cell (linkage-cells code))) (somewhere nil))
            ((and (symbolp name) name (code-constant-p name code)
                  (notany (lambda (function)
                            (equal name (defined-name (sb-kernel:%simple-fun-name function))))
                          (code-functions code)))
             (somewhere "as data"))))))

(defun core-name-p (name)
  "Return true when NAME, a function name or symbol, belongs to a package that came with the image."
  (let ((package (symbol-package (if (consp name) (second name) name))))
    (and (member package **system-packages** :test #'eq) t)))

(defun all-references (name kinds cell)
  "Return the references to NAME in all code, as CODE-REFERENCES does for one component."
  (let ((references '()))
    ;; System code does not refer to the user's names.
    (do-code (code :system (core-name-p name))
      (setf references (nconc (code-references code name kinds cell) references)))
    references))

;;; Source locations of references

(defun source-name (name)
  "Return the name of the symbol in NAME, a function name: a string, without a package."
  (symbol-name (if (consp name) (second name) name)))

(defun toplevel-form-number (function)
  "Return the number, within its file, of the top-level form from which FUNCTION, a simple function, was compiled; or NIL if
the number is unknown. The second value is the number of FUNCTION's own form within the top-level form, or 0 if unknown."
  (guarded (let ((debug-fun (sb-di::fun-debug-fun function)))
             (values (sb-c::compiled-debug-fun-tlf-number (sb-di::compiled-debug-fun-compiler-debug-fun debug-fun))
                     (or (guarded (sb-di:code-location-form-number (sb-di:debug-fun-start-location debug-fun))
                             (failure)
                           nil)
                         0)))
      (failure)
    (values nil 0)))

(defun named-position (map text name)
  "Search a form in TEXT for symbols with the name NAME, a string. Return the position of the first such symbol, or NIL. MAP
gives the positions in the form, as FORM-MAP returns them."
  (labels ((visit (form)
             (cond ((consp form) (mapc #'visit (rest form)))
                   ((and (constituent-p (schar text form))
                         (string= name (token-name text form)))
                    (return-from named-position form)))))
    (visit map)
    nil))

(defun move-location (location name)
  "Move LOCATION, a SOURCE-LOCATION, to the first occurrence of NAME, a string, in the form at LOCATION, if NAME occurs in
the form. Return LOCATION."
  (let* ((text (source-location-text location))
         (start (source-location-position location))
         (found (and text (let ((map (form-map text start)))
                            (and map (named-position map text name))))))
    (when found
      (incf (source-location-line location) (count #\Newline text :start start :end found))
      (setf (source-location-position location) found
            (source-location-column location) 0
            (source-location-line-text location) (line-at text (line-start text found))))
    location))

(defun line-start (text position)
  "Return the position of the first character that is not whitespace on the line of TEXT that contains POSITION."
  (let ((newline (position #\Newline text :end position :from-end t)))
    (or (position-if-not #'whitespace-p text :start (if newline (1+ newline) 0)) position)))

(defun function-location (function number name)
  "Return the source location of the form with NUMBER in the top-level form that contains FUNCTION, a simple function. If
NUMBER is NIL, return the location where NAME, a string, first occurs in FUNCTION. If NAME is NIL or does not occur, return
the location of FUNCTION. Return NIL if no source location is known."
  (let ((source (code-source (sb-kernel:fun-code-header function))))
    (multiple-value-bind (toplevel own) (toplevel-form-number function)
      (let ((location (guarded (source-form-location source toplevel (or number own)
                                                     (sb-kernel:%simple-fun-name function))
                          (failure)
                        nil)))
        (if (and location (null number) name)
            (move-location location name)
            location)))))

(defun function-title (function)
  "Return the title by which a list of references shows FUNCTION, a simple function."
  (let ((name (sb-kernel:%simple-fun-name function)))
    (if (method-body-name-p name)
        `(:method ,@(rest name))
        name)))

(defun source-sort-key (function number)
  "Return a sort key, to be compared by LIST<, for the form with NUMBER in FUNCTION, a simple function. Evaluated code comes
first, from the newest evaluation to the oldest. Files follow in the order of their names, SBCL's own files last. Forms of
one file are in the order of their positions."
  (let* ((source (code-source (sb-kernel:fun-code-header function)))
         (file (sb-c::debug-source-namestring source))
         (evaluated (plist-evaluated-form (sb-c::debug-source-plist source))))
    (list (cond (evaluated 0)
                ((and (stringp file) (system-file-p file)) 2)
                (t 1))
          (if evaluated (- (evaluated-evaluation evaluated)) 0)
          (if (stringp file) file "")
          (if evaluated (evaluated-line evaluated) (or (toplevel-form-number function) 0))
          (or number 0))))

(defun list< (a b)
  "Return true when A comes before B. A and B are lists of strings and numbers, which are compared element by element."
  (loop for x in a
        for y in b
        do (cond ((stringp x)
                  (cond ((string< x y) (return t))
                        ((string> x y) (return nil))))
                 ((< x y) (return t))
                 ((> x y) (return nil)))))

(defun sorted-references (references)
  "Return REFERENCES in the order that SOURCE-SORT-KEY defines."
  (mapcar #'cdr
          (sort (mapcar (lambda (reference)
                          (cons (source-sort-key (reference-function reference) (reference-number reference)) reference))
                        references)
                #'list< :key #'car)))

;;; Records of references

(defconstant +max-title-length+ 200
  "Maximum number of shown characters of a reference's title.")

(defun printed-name (name)
  "Return NAME, a function name or symbol, as text."
  (bounded-prin1-text name +max-title-length+))

(defvar *pushed-references* nil
  "The references that were pushed for this request, so that none is pushed twice. Each reference is a list of title,
location, code and kind.")

(defun push-reference-record (title location how &key (if-unknown "source unknown"))
  "Push a record of a reference, unless an equal record was pushed before. Return true if the record was pushed. TITLE, a
string or a name to be printed, says which definition contains the reference. LOCATION is the reference's source location; if
it is NIL, the string IF-UNKNOWN is pushed instead. HOW is a phrase for the kind of the reference, or NIL."
  (let* ((title (if (stringp title)
                    title
                    (bounded-prin1-text title +max-title-length+)))
         (where (if location (source-location-label location) if-unknown))
         (entry (list title where (and location (source-location-line-text location)) how)))
    (unless (member entry *pushed-references* :test #'equal)
      (push entry *pushed-references*)
      (push-record "reference"
                   :name title
                   :location where
                   :code (and location (source-location-line-text location))
                   :how how)
      t)))

(defun function-file-label (function)
  "Return the name of the source file of FUNCTION, a simple function whose source location is unknown. If the file is
unknown, too, return a phrase that says so."
  (let ((file (sb-c::debug-source-namestring (code-source (sb-kernel:fun-code-header function)))))
    (if (stringp file) file "source unknown")))

(defun push-references (references name limit)
  "Push records of the first LIMIT of REFERENCES, as sorted by SORTED-REFERENCES, and of the number of further references.
NAME, a string, is the name to which REFERENCES refer. Return the number of references that were pushed."
  (let ((count 0) (more 0))
    (declare (type index count more))
    (dolist (reference (sorted-references references))
      (if (< count limit)
          (let ((function (reference-function reference)))
            (when (push-reference-record (function-title function)
                                         (function-location function (reference-number reference) name)
                                         (reference-how reference)
                                         :if-unknown (function-file-label function))
              (incf count)))
          (incf more)))
    (when (plusp more)
      (push-record "more" :count more))
    count))

(defun push-note (control &rest arguments)
  "Push a record of a note, which is shown below the list of references. The note's text is made from the format control
CONTROL and ARGUMENTS."
  (push-record "note" :text (let ((*print-pretty* nil)) (apply #'format nil control arguments))))

;;; The relations that a client can request
(defun xrefs-recorded-p (name)
  "Return true when SBCL records cross-references of NAME, a function name or symbol."
  (not (sb-c::xref-internal-name-p name)))

(defun push-callers (name limit)
  "Push up to LIMIT callers of the function NAME or, if NAME names a macro, up to LIMIT forms that expand the macro. Push a
note on code that was not examined."
  (let* ((macro (and (symbolp name) (macro-function name) t))
         (count (push-references (all-references name
                                                 (if macro
                                                     '((:macroexpands nil) (:calls nil))
                                                     '((:calls nil) (:macroexpands "expands the former macro")))
                                                 (linkage-cell name))
                                 (source-name name) limit)))
    (when (and (zerop count) (or (not macro) (xrefs-recorded-p name)))
      (push-note "No loaded code ~:[calls~;expands~] ~A." macro (printed-name name)))
    (cond ((and macro (not (xrefs-recorded-p name)))
           (push-note "SBCL keeps no records of where its own macros, such as ~A, are expanded." (printed-name name)))
          (macro
           (push-note "Not searched: top-level code outside functions, files that are not loaded, and code compiled with ~
                    (space 3)."))
          ((xrefs-recorded-p name)
           (push-note "Not searched: ~A in quoted lists, names computed for FUNCALL, recursive calls, top-level code outside ~
                       functions~:[ and~;,~] files that are not loaded~:*~@[, and inlined calls in code compiled with ~
                       (space 3)~]."
                      (printed-name name)
                      (eq 'inline (sb-int:info :function :inlinep name))))
          (t
           (push-note "Not searched: calls of ~A that the compiler inlines or transforms, because SBCL keeps no ~
                       cross-references to its own functions." (printed-name name))))))

(defun function-components (name)
  "Return a list of code components: the component of the function or macro NAME or, if NAME names a generic function, the
components of its methods."
  (let ((definition (if (and (symbolp name) (macro-function name))
                        (macro-function name)
                        (global-function name))))
    (if (typep definition 'generic-function)
        (remove nil (mapcar #'method-code (sb-mop:generic-function-methods definition)))
        (list (function-code definition)))))

(defun callee-sort-key (name)
  "Return the sort key, for LIST<, of the callee NAME. The user's functions come first, then standard functions, then other
functions that came with the image."
  (let ((package (symbol-package (if (consp name) (second name) name))))
    (list (cond ((or (null package) (not (system-package-p package)))
                 (if (eq package (find-package "COMMON-LISP")) 1 0))
                (t 2))
          (source-name name))))

(defun internal-name-p (name)
  "Return true when NAME, a function name, belongs to one of SBCL's internal packages."
  (let* ((symbol (cond ((symbolp name) name)
                       ((eq (first name) 'setf) (second name))
                       (t (first name))))
         (package (symbol-package symbol)))
    (and package
         (member (package-name package)
                 '("SB-C" "SB-FORMAT" "SB-IMPL" "SB-INT" "SB-KERNEL" "SB-LOOP" "SB-PCL" "SB-PRETTY" "SB-VM")
                 :test #'string=)
         t)))

(defun name-in-source-p (name function)
  "Return true when NAME, a function name, occurs in the source of FUNCTION, a simple function, or when the source is
unknown."
  (let* ((location (function-location function nil nil))
         (text (and location (source-location-text location)))
         (map (and text (form-map text (source-location-position location)))))
    (or (null map)
        (and (symbolp (if (consp name) (second name) name))
             (named-position map text (source-name name))
             t))))

(defun push-callees (name limit)
  "Push up to LIMIT names: the functions that the function NAME calls and the macros that it expands. Each name has the
source location of the first reference."
  (let ((callees (make-hash-table :test 'equal))
        (count 0))
    (dolist (code (function-components name))
      (let ((functions (remove-if #'toplevel-code-p (code-functions code))))
        (flet ((note (callee function number how)
                 (when (and callee (symbolp (if (consp callee) (second callee) callee)))
                   (let ((known (gethash callee callees)))
                     (when (or (null known)
                               (and number (reference-number known) (< number (reference-number known))
                                    (eq code (sb-kernel:fun-code-header (reference-function known)))))
                       (setf (gethash callee callees)
                             (make-reference :function function :number number :how how)))))))
          (dolist (function functions)
            (map-xrefs (lambda (kind what number)
                         (case kind
                           (:calls (note what function number nil))
                           (:macroexpands (note what function number "macro"))))
                       function))
          (dolist (cell (linkage-cells code))
            (let ((callee (linkage-cell-name cell)))
              (when (and callee functions)
                (note callee (or (find t functions :key #'current-definition-p) (first functions)) nil nil)))))))
    (let ((names (sort (loop for callee being the hash-keys of callees
                               using (hash-value reference)
                             unless (or (equal callee name) (method-body-name-p callee)
                                        ;; An internal name that is not in the source comes from the expansion of one of
                                        ;; SBCL's macros.
                                        (and (internal-name-p callee)
                                             (not (name-in-source-p callee (reference-function reference)))))
                               collect callee)
                       #'list< :key #'callee-sort-key)))
      (dolist (callee names)
        (when (< count limit)
          (let ((reference (gethash callee callees)))
            (incf count)
            (push-reference-record callee
                                   (function-location (reference-function reference) (reference-number reference)
                                                      (source-name callee))
                                   (reference-how reference)
                                   :if-unknown (function-file-label (reference-function reference))))))
      (cond ((null names) (push-note "The compiled code of ~A calls nothing by name." (printed-name name)))
            ((> (length names) limit) (push-record "more" :count (- (length names) limit))))
      (push-note "Not searched: inlined calls, and functions that are called through a variable or a list."))))

(defun variable-name-p (symbol)
  "Return true when SYMBOL names a variable."
  (or (boundp symbol) (not (eq :unknown (sb-int:info :variable :kind symbol)))))

(defun push-variable-references (symbol relation limit)
  "Push up to LIMIT references to the variable SYMBOL. RELATION is \"sets\" or \"binds\", another string for the references
that read SYMBOL, or NIL for all three kinds of references. Unless RELATION is \"sets\" or \"binds\", push also code that has
no cross-reference to SYMBOL but contains SYMBOL as data."
  (let ((count (push-references (all-references symbol
                                                (cond ((null relation)
                                                       '((:references nil) (:sets "sets") (:binds "binds")))
                                                      ((string= relation "sets") '((:sets nil)))
                                                      ((string= relation "binds") '((:binds nil)))
                                                      (t '((:references nil))))
                                                (if (member relation '("sets" "binds") :test #'equal) nil 0))
                                (symbol-name symbol) limit)))
    (when (and (zerop count)
               (or (xrefs-recorded-p symbol) (not (member relation '("sets" "binds") :test #'equal))))
      (push-note "No loaded code ~A ~A."
                 (cond ((member relation '("sets" "binds") :test #'equal) relation)
                       ;; Code that only sets or binds the variable is not listed.
                       ((and relation (variable-name-p symbol)) "reads")
                       (t "refers to"))
                 (printed-name symbol)))
    (if (xrefs-recorded-p symbol)
        (push-note "Not searched: SET, PROGV and SYMBOL-VALUE of a computed symbol, quoted lists, ~
                    top-level code outside functions, ~:[~;code compiled with (space 3), ~]and files that are not loaded."
                   (member relation '("sets" "binds") :test #'equal))
        (push-note "SBCL keeps no cross-references to its own names, such as ~A~:[: only code that contains the symbol as ~
                    data can be found~;~]."
                   (printed-name symbol)
                   (member relation '("sets" "binds") :test #'equal)))))

(defun push-expansions (name limit)
  "Push up to LIMIT forms that expand the macro NAME. If NAME has a compiler macro, push also the calls of NAME, because SBCL
records an expansion of a compiler macro as a call."
  (let* ((compiler-macro (compiler-macro-function name))
         (kinds `((:macroexpands nil) ,@(and compiler-macro '((:calls nil))))))
    (when (and (zerop (push-references (all-references name kinds nil) (source-name name) limit))
               (xrefs-recorded-p name))
      (push-note "No loaded code expands ~A." (printed-name name)))
    (when compiler-macro
      (push-note "SBCL records the expansions of a compiler macro as calls: the list may have calls that are not expanded."))
    (if (xrefs-recorded-p name)
        (push-note "Not searched: top-level code outside functions, files that are not loaded, and code compiled with ~
                    (space 3).")
        (push-note "SBCL keeps no records of where its own macros, such as ~A, are expanded." (printed-name name)))))

(defun object-location (object name)
  "Return the source location where OBJECT, a method or class, is defined; or NIL if it cannot be found. NAME is the string
that names OBJECT in source."
  (guarded (definition-location (sb-introspect:find-definition-source object)
                                (if (typep object 'sb-mop:standard-accessor-method)
                                    ;; The class definition defines an accessor method, so search for the class name.
                                    (symbol-name (class-name (first (last (sb-mop:method-specializers object)))))
                                    name))
      (failure)
    nil))

(defun method-title (method)
  "Return the title by which a list of references shows METHOD."
  (let ((generic (sb-mop:method-generic-function method)))
    `(:method ,(if generic (sb-mop:generic-function-name generic) nil)
       ,@(method-qualifiers method)
       ,(if generic
            (sb-pcl::unparse-specializers generic (sb-mop:method-specializers method))
            '()))))

(defun push-object-references (objects title name limit nothing)
  "Push records of the first LIMIT of OBJECTS, methods or classes, and of the number of further objects. TITLE is a function
that returns an object's title, and NAME is a function that returns an object's name, a string. If there are no objects, push
the note NOTHING."
  (declare (type function title name))
  (loop for object in objects
        repeat limit
        do (push-reference-record (funcall title object)
                                  (object-location object (funcall name object)) nil))
  (cond ((null objects) (push-note "~A" nothing))
        ((> (length objects) limit) (push-record "more" :count (- (length objects) limit)))))

(defun push-specializing-methods (symbol limit)
  "Push up to LIMIT methods: the methods of the generic function SYMBOL, and the methods that specialise on the class SYMBOL
or on a direct instance of that class."
  (let ((generic (and (fboundp symbol) (fdefinition symbol)))
        (class (and (symbolp symbol) (find-class symbol nil))))
    (push-object-references (append (and (typep generic 'generic-function) (sb-mop:generic-function-methods generic))
                                    (and class
                                         (remove-duplicates
                                          (append (sb-mop:specializer-direct-methods class)
                                                  (loop for specializer in (class-eql-specializers class)
                                                        append (sb-mop:specializer-direct-methods specializer))))))
                            #'method-title
                            (lambda (method)
                              (let ((generic (sb-mop:method-generic-function method)))
                                (source-name (if generic (sb-mop:generic-function-name generic) 'nil))))
                            limit
                            (format nil "~:[No method specialises on ~A~;~A has no methods~:[~;, and no method specialises ~
                                         on it~]~].~:[~; Not searched: other code that names the class. The relation ~
                                         `references` finds some of that code.~]"
                                    (typep generic 'generic-function) (printed-name symbol) class class))))

(defun class-eql-specializers (class)
  "Return the EQL specializers whose objects are direct instances of CLASS."
  (let ((specializers '()))
    (sb-pcl::map-specializers
     (lambda (specializer)
       (when (and (typep specializer 'sb-mop:eql-specializer)
                  (eq class (class-of (sb-mop:eql-specializer-object specializer))))
         (push specializer specializers))))
    specializers))

(defun push-subclasses (symbol limit)
  "Push up to LIMIT subclasses of the class SYMBOL, direct subclasses first."
  (let* ((class (find-class symbol))
         (found '()))
    (loop for level = (list class)
            then (remove-duplicates
                  (loop for above in level
                        append (remove-if (lambda (below) (or (eq below class) (member below found)))
                                          (reverse (sb-mop:class-direct-subclasses above)))))
          while level
          do (unless (eq (first level) class)
               (setf found (append found level))))
    (push-object-references found #'class-name (lambda (class) (symbol-name (or (class-name class) '#:nil))) limit
                            (format nil "~A has no subclasses." (printed-name symbol)))))

;;; Tests that call a function

(defun test-operator-p (operator)
  "Return true when forms with OPERATOR, a name in upper case, define tests in FiveAM, Parachute, Rove, lisp-unit,
lisp-unit2, RT or a similar framework."
  (let ((bare (subseq operator (let ((colon (position #\: operator :from-end t))) (if colon (1+ colon) 0)))))
    (or (member bare '("TEST" "DEF-TEST" "DEFTEST" "DEFINE-TEST" "DEF-FIXTURE-TEST" "ADD-TEST" "DEFINE-TEST-CASE")
                :test #'string=)
        (and (eql 7 (mismatch "DEFTEST" bare)) t))))

(defun test-heading (location)
  "Return the heading of the top-level form at LOCATION if that form defines a test, or NIL."
  (let* ((text (and location (source-location-text location)))
         (heading (and text (form-heading text)))
         (end (and heading (position-if #'whitespace-p heading))))
    (and end (test-operator-p (subseq heading 1 end)) heading)))

(defun find-package-symbol (name package)
  "Return the symbol NAME of the package named PACKAGE, or NIL if the symbol or the package does not exist."
  (let ((package (find-package package)))
    (and package (find-symbol name package))))

(defun find-mentioned-symbol (form names)
  "Return the first symbol in FORM that is a key of NAMES, a hash table of function names, or NIL. Examine at most 20,000
conses."
  (let ((left 20000))
    (declare (type fixnum left))
    (labels ((visit (form)
               (loop while (consp form)
                     do (when (minusp (decf left)) (return nil))
                        (let ((element (pop form)))
                          (cond ((consp element)
                                 (let ((found (visit element)))
                                   (when found (return found))))
                                ((and element (symbolp element) (gethash element names))
                                 (return element)))))))
      (visit form))))

(defun tests-kept-as-data ()
  "Return the tests that FiveAM and RT keep as data. Each test is a list of its name, of the list of the forms that it
evaluates and, only for FiveAM, of the simple function that contains these forms as constants."
  (append
   ;; FiveAM compiles the body of a test when the test runs. The function that does so contains the body as a constant.
   (let* ((bundle (find-package-symbol "*TEST*" "IT.BESE.FIVEAM"))
          (reader (find-package-symbol "TEST-LAMBDA" "IT.BESE.FIVEAM"))
          (bundle (and bundle (boundp bundle) (symbol-value bundle)))
          (table (cond ((hash-table-p bundle) bundle)
                       ((typep bundle 'standard-object)
                        (loop for slot in (sb-mop:class-slots (class-of bundle))
                              for name = (sb-mop:slot-definition-name slot)
                              when (and (slot-boundp bundle name) (hash-table-p (slot-value bundle name)))
                                return (slot-value bundle name))))))
     (and table reader (fboundp reader)
          (loop for name being the hash-keys of table using (hash-value test)
                for function = (guarded (funcall reader test) (failure) nil)
                when (functionp function)
                  collect (list name
                                (let ((code (function-code function)))
                                  (loop for index from sb-vm:code-constants-offset
                                          below (sb-kernel:code-header-words code)
                                        for constant = (sb-kernel:code-header-ref code index)
                                        when (consp constant) collect constant))
                                (sb-kernel:%fun-fun function)))))
   ;; RT keeps a test's form and evaluates it when the test runs.
   (loop for package in '("SB-RT" "RT" "REGRESSION-TEST")
         for entries = (find-package-symbol "*ENTRIES*" package)
         for form = (find-package-symbol "FORM" package)
         for name = (find-package-symbol "NAME" package)
         when (and entries (boundp entries) (listp (symbol-value entries)) form name (fboundp form) (fboundp name))
           append (loop for entry in (symbol-value entries)
                        for known = (guarded (list (funcall name entry) (list (funcall form entry))) (failure) nil)
                        when known collect known))))

(defconstant +max-caller-depth+ 30
  "Maximum length of a chain of calls from a test to the function whose tests the client requests.")

(defun caller-table ()
  "Return a hash table from the names of functions and macros to lists of the simple functions that call or expand them. Code
of SBCL and of the server is not included."
  (let ((table (make-hash-table :test 'equal)))
    (do-code (code)
      (let ((functions '()) (looked nil))
        (flet ((note (name function)
                 (unless looked
                   (setf functions (live-functions code)
                         looked t))
                 (when functions
                   (pushnew (if (member function functions) function (first (last functions)))
                            (gethash name table)
                            :test #'eq))))
          (dolist (function (code-functions code))
            (map-xrefs (lambda (kind what number)
                         (declare (ignore number))
                         (when (member kind '(:calls :macroexpands))
                           (note what function)))
                       function))
          (dolist (cell (linkage-cells code))
            (let ((name (linkage-cell-name cell)))
              (when (and name (xrefs-recorded-p name))
                (note name nil)))))))
    table))

(defun push-tests (name limit)
  "Push up to LIMIT tests that call the function NAME, directly or indirectly. Tests with a shorter chain of calls come
first."
  (let ((table (caller-table))
        ;; The keys are the names of the functions that call NAME, directly or indirectly. The value is the name of the next
        ;; function in the chain of calls to NAME. For NAME itself, the value is T.
        (leading (make-hash-table :test 'equal))
        ;; The keys are the simple functions that call NAME, directly or indirectly. The value is the name of the next
        ;; function in the chain of calls to NAME.
        (seen (make-hash-table :test 'eq))
        (found '()))
    (setf (gethash name leading) t)
    (labels ((via (name)
               (loop for step = name then (gethash step leading)
                     repeat +max-caller-depth+
                     until (eq step t)
                     collect step))
             (note-test (title location way)
               (unless (find-if (lambda (known)
                                  (or (equal title (first known))
                                      (and location (second known) (plusp (source-location-line location))
                                           (string= (source-location-label location)
                                                    (source-location-label (second known))))))
                                found)
                 (push (list title location way) found))))
      (loop repeat +max-caller-depth+
            for level = (list name) then next
            for next = '()
            while level
            do (dolist (called level)
                 (dolist (function (gethash called table))
                   (unless (gethash function seen)
                     (setf (gethash function seen) called)
                     (let ((caller (defined-name (sb-kernel:%simple-fun-name function))))
                       (when (and caller (not (gethash caller leading)))
                         (setf (gethash caller leading) called)
                         (push caller next))))))
               (setf next (nreverse next)))
      (loop for (test forms function) in (tests-kept-as-data)
            for called = (or (and function (gethash function seen)) (find-mentioned-symbol forms leading))
            when called
              do (note-test test (and function (function-location function nil nil)) (via called)))
      (loop for function being the hash-keys of seen using (hash-value called)
            for caller = (defined-name (sb-kernel:%simple-fun-name function))
            ;; Frameworks do not call a test by name, so a function that some code calls by name is not a test.
            do (when (or (null caller) (null (gethash caller table)))
                 (let* ((location (function-location function nil nil))
                        (test (test-heading location)))
                   (when test
                     (note-test test location (via called)))))))
    (setf found (stable-sort (reverse found) #'< :key (lambda (entry) (length (third entry)))))
    (loop for (test location way) in found
          repeat limit
          do (push-reference-record test location
                                    (and way (not (equal way (list name)))
                                         (format nil "via ~{~A~^, ~}"
                                                 (mapcar #'printed-name (remove name way :test #'equal))))))
    (when (> (length found) limit)
      (push-record "more" :count (- (length found) limit)))
    (when (null found)
      (push-note "No loaded test is known to call ~A." (printed-name name)))
    (push-note "Not searched: calls through variables, data or computed names, and tests that are not defined by a form ~
                like DEFTEST or TEST.")))

;;; The query FIND-REFERENCES

(defun locate-function-name (text package-name)
  "Return the symbol that TEXT names, or a list (SETF SYMBOL) or (CAS SYMBOL) if the GLOBAL-NAME-TEXT of TEXT has this form.
The further values are those of LOCATE-SYMBOL."
  (multiple-value-bind (symbol found name package) (locate-symbol text package-name)
    (let ((operator (name-operator (global-name-text text))))
      (values (if operator (list operator symbol) symbol) found name package))))

(defun default-relation (name)
  "Return the relation to report for NAME, a function name or symbol, when the client does not name a relation."
  (cond ((or (consp name) (fboundp name) (sb-int:info :function :inlinep name)) "callers")
        ((member (sb-int:info :variable :kind name) '(:special :global :constant :macro :alien)) "references")
        ((find-class name nil) "methods")
        (t "callers")))

(defun unrecorded-meaning (name relation)
  "Return the meaning of NAME, a function name or symbol, as a phrase such as \"a type\", if SBCL keeps no records of the
uses that RELATION asks for; or NIL if SBCL keeps records."
  (let* ((symbol (function-name-symbol name))
         (plain (symbolp name))
         (kind (and plain (sb-int:info :variable :kind symbol)))
         (of-variable (member relation '("references" "sets" "binds") :test #'string=)))
    (cond ((and plain (special-operator-p symbol)) "a special operator")
          ((and of-variable (eq kind :macro)) "a symbol macro")
          ((and of-variable plain (not (eq kind :alien)) (variable-name-p symbol)) nil)
          ;; A function that is called but not defined has a linkage cell.
          ((or (fboundp name) (not (eql 0 (linkage-cell name)))) (and of-variable (eq kind :alien) "an alien variable"))
          ((and (not (typep name '(cons (eql sb-ext:cas)))) (sb-int:info :setf :expander symbol)) "a setf expander")
          ((not plain) nil)
          ((eq kind :alien) "an alien variable")
          ((sb-int:info :type :expander symbol) "a type")
          ((sb-int:info :alien-type :definition symbol) "an alien type")
          ((defined-p :method-combination symbol) "a method combination"))))

(defun relation-problem (name relation)
  "Return a sentence that says why RELATION does not apply to NAME, a function name or symbol; or NIL if RELATION applies."
  (flet ((is (control) (format nil control (printed-name name))))
    (let ((symbol (if (consp name) nil name))
          (unrecorded (unrecorded-meaning name relation)))
      (cond ((string= relation "callees")
             (cond ((and symbol (special-operator-p symbol)) (is "~A is a special operator: it calls nothing."))
                   ((not (fboundp name)) (is "~A names no function."))))
            ((and (member relation '("sets" "binds") :test #'string=)
                  (not (and symbol (variable-name-p symbol))))
             (is "~A names no variable."))
            ((string= relation "expansions")
             (unless (or (and symbol (macro-function symbol)) (compiler-macro-function name))
               (is "~A names no macro or compiler macro.")))
            ((string= relation "methods")
             (unless (or (and symbol (find-class symbol nil))
                         (and (fboundp name) (typep (fdefinition name) 'generic-function)))
               (is "~A names no generic function or class.")))
            ((string= relation "subclasses")
             (unless (and symbol (find-class symbol nil))
               (is "~A names no class.")))
            (unrecorded
             (format nil "~A is ~A: SBCL keeps no records of where it is used." (printed-name name) unrecorded))))))

(defun push-relation (text package-name relation limit)
  "Push records of up to LIMIT references to the function, variable or class that TEXT names in the package PACKAGE-NAME, and
notes on code that was not examined. RELATION is a string such as \"callers\", or NIL for the default relation of the name."
  (multiple-value-bind (name found looked-for package) (locate-function-name text package-name)
    (let ((*pushed-references* '())
          (*method-codes* (make-hash-table :test 'eq)))
      (with-source-files ()
        (with-inspection-syntax ()
          (let* ((asked relation)
                 (relation (or relation (if found (default-relation name) "callers")))
                 (problem (and found (relation-problem name relation))))
            (cond ((not found)
                   (push-note "~A" (not-found-text looked-for package)))
                  (problem (push-note "~A" problem))
                  (t
                   (push-record "relation" :name relation)
                   (when (nth-value 1 (global-name-text text))
                     (push-note "References are recorded for global names only: the list is for ~A." (printed-name name)))
                   (cond ((string= relation "callers") (push-callers name limit))
                         ((string= relation "callees") (push-callees name limit))
                         ((string= relation "expansions") (push-expansions name limit))
                         ((string= relation "methods") (push-specializing-methods name limit))
                         ((string= relation "subclasses") (push-subclasses name limit))
                         ((string= relation "tests") (push-tests name limit))
                         ((consp name) (push-callers name limit))
                         (t (push-variable-references name (and asked relation) limit)))))))))))

(define-query :find-references (&key name package relation limit)
  "Push records of up to LIMIT references of the kind RELATION to the function, variable or class NAME of PACKAGE, as
PUSH-RELATION does."
  (push-relation name (or package "") relation limit))
