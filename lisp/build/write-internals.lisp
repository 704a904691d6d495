;;;; Generates sbcl-internals.sexp (make sbcl-internals). Run this file with a plain SBCL of the version to pin.
;;;; Environment variables: SBCL_MCP_INTERNALS_OUTPUT names the file to write; SBCL_MCP_FASL_DIR names a directory for
;;;; compiled files.

(require :asdf)
(asdf:initialize-output-translations
 `(:output-translations (t ,(concatenate 'string (sb-ext:posix-getenv "SBCL_MCP_FASL_DIR") "/"))
                        :ignore-inherited-configuration))
(asdf:load-asd (merge-pathnames "../sbcl-host.asd" *load-truename*))
;; Load the systems first: the sources are read in the packages that these systems define.
(handler-bind ((sb-ext:compiler-note #'muffle-warning))
  (asdf:load-system "sbcl-host"))
(load (merge-pathnames "sbcl-internals.lisp" *load-truename*))

(in-package "SBCL-INTERNALS")

(defparameter *documented-packages*
  '("COMMON-LISP" "SB-EXT" "SB-THREAD" "SB-ALIEN" "SB-MOP" "SB-GRAY" "SB-POSIX" "SB-BSD-SOCKETS" "SB-CLTL2" "SB-COVER"
    "SB-SPROF" "SB-INTROSPECT" "SB-CONCURRENCY")
  "The packages whose exported symbols are documented by SBCL's manual or by a standard. SBCL does not change these
symbols without notice.")

(defvar *name-uses* nil
  "The internal names found so far: a hash table from lists of package and name to lists of feature expressions.")

(defvar *included-slots* nil
  "A hash table from the names of SBCL's structures to lists of slot names. Each of these
structures is included by a structure of the Lisp side, which gives the listed slots other initial values.")

(defconstant +conditional+ '+conditional+
  "The first element of a list that represents a form after #+ or #-. The other elements are the feature expression and
the form.")

(defun read-conditional (stream character argument)
  "Read the feature expression and the form after #+ or #-, and return a list that represents them (see +CONDITIONAL+). If
the expression does not hold in this SBCL and the form cannot be read, skip the form and return NIL."
  (declare (ignore argument))
  (let* ((features (let ((*package* (find-package "KEYWORD"))) (read stream t nil t)))
         (features (if (eql character #\-) `(:not ,features) features))
         (start (file-position stream)))
    (list +conditional+ features
          (handler-bind ((error (lambda (failure)
                                  (unless (uiop:featurep features)
                                    ;; The form cannot be read here, for example because it is for another processor, so
                                    ;; skip the form.
                                    (file-position stream start)
                                    (let ((*read-suppress* t)) (read stream t nil t))
                                    (return-from read-conditional nil))
                                  (error failure))))
            (read stream t nil t)))))

(defun documented-p (symbol)
  "Return true when SYMBOL is exported by one of *DOCUMENTED-PACKAGES*."
  (loop for package in *documented-packages*
        thereis (multiple-value-bind (found status) (find-symbol (symbol-name symbol) package)
                  (and (eq found symbol) (eq status :external)))))

(defun internal-p (symbol)
  "Return true when SYMBOL belongs to SBCL and is not part of a documented interface."
  (and (sbcl-symbol-p symbol) (not (documented-p symbol))))

(defun runtime-symbol-p (name)
  "Return true when SBCL's own C code, rather than a library, defines the foreign symbol NAME."
  (let ((address (sb-sys:find-foreign-symbol-address name))
        (information (make-array 4 :element-type '(unsigned-byte 64) :initial-element 0)))
    (and address
         (sb-sys:with-pinned-objects (information)
           (/= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "dladdr" (function sb-alien:int sb-alien:unsigned-long sb-sys:system-area-pointer))
                  address (sb-sys:vector-sap information))))
         (let ((file (sb-alien:cast (sb-alien:sap-alien (sb-sys:int-sap (aref information 0)) (* char)) sb-alien:c-string)))
           (equal (probe-file (sb-ext:parse-native-namestring file)) (probe-file sb-ext:*runtime-pathname*))))))

(defun note-name-use (package name features)
  "Record that the sources use a name under the feature expression FEATURES. NAME is the name, and PACKAGE is the name of its
package, or \"C\" for a symbol of the C runtime."
  (pushnew features (gethash (list package name) *name-uses*) :test #'equal))

(defun note-included-slots (form)
  "If FORM is an :INCLUDE option of DEFSTRUCT for one of SBCL's structures, record the slots to which FORM gives other
initial values."
  (when (and (eq :include (car form)) (consp (cdr form)) (symbolp (second form)) (internal-p (second form)))
    (dolist (slot (cddr form))
      (pushnew (string (if (consp slot) (first slot) slot)) (gethash (second form) *included-slots*) :test #'string=))))

(defun note-foreign-symbol (form features)
  "If FORM names a symbol of SBCL's C runtime, record its use under the feature expression FEATURES."
  (when (and (member (car form) '(sb-alien:extern-alien sb-sys:find-foreign-symbol-address sb-sys:foreign-symbol-sap))
             (consp (cdr form))
             (stringp (second form))
             (runtime-symbol-p (second form)))
    (note-name-use "C" (second form) features)))

(defun record-names (form features)
  "Record the internal names in FORM, which the sources contain under the feature expression FEATURES."
  (typecase form
    (cons
     (cond ((eq +conditional+ (car form))
            (destructuring-bind (condition form) (rest form)
              (record-names form (if (eq features t) condition `(:and ,features ,condition)))))
           (t
            (note-included-slots form)
            (note-foreign-symbol form features)
            (loop for rest = form then (cdr rest)
                  while (consp rest)
                  do (record-names (car rest) features)
                  finally (when rest (record-names rest features))))))
    (symbol (when (internal-p form)
              (note-name-use (package-name (symbol-package form)) (symbol-name form) features)))
    (simple-vector (map nil (lambda (element) (record-names element features)) form))
    (sb-impl::comma (record-names (sb-int:comma-expr form) features))))

(defun scan-file (file)
  "Record the internal names that the source FILE uses."
  (with-input-from-string (stream (uiop:read-file-string file))
    (let ((*package* (find-package "COMMON-LISP-USER"))
          (*readtable* (copy-readtable nil)))
      (set-dispatch-macro-character #\# #\+ #'read-conditional)
      (set-dispatch-macro-character #\# #\- #'read-conditional)
      (loop for form = (read stream nil stream)
            until (eq form stream)
            do (when (and (consp form) (eq 'in-package (first form)))
                 (setf *package* (find-package (second form))))
               (record-names form t)))))

(defun features-disjunction (features)
  "Return the feature expression that holds when any expression of the list FEATURES holds."
  (cond ((member t features) t)
        ((rest features) `(:or ,@(sort (copy-list features) #'string< :key #'prin1-to-string)))
        (t (first features))))

(defun table-entries (directory)
  "Return the entries of the table (see READ-TABLE) for the sources below DIRECTORY, which must be loaded."
  (let ((*name-uses* (make-hash-table :test #'equal))
        (*included-slots* (make-hash-table))
        (*condition-slots* (condition-slots)))
    (dolist (file (directory (merge-pathnames "**/*.lisp" directory)))
      (unless (member (pathname-name file) '("tests" "write-internals") :test #'string=)
        (scan-file file)))
    (sort (loop for (package name) being the hash-keys of *name-uses* using (hash-value features)
                for included = (sort (copy-list (gethash (find-named-symbol package name) *included-slots*)) #'string<)
                collect `(,package ,name ,(features-disjunction features) ,@(describe-name package name included)))
          (lambda (one other)
            (or (string< (first one) (first other))
                (and (string= (first one) (first other)) (string< (second one) (second other))))))))

(defun write-table (directory file)
  "Write to FILE a table that describes the internal names that the sources below DIRECTORY use. The descriptions hold for
the SBCL that runs this function."
  (with-open-file (stream file :direction :output :if-exists :supersede)
    (let ((entries (table-entries directory)))
      (with-standard-io-syntax
        (let ((*print-readably* nil) (*print-right-margin* 120) (*print-pretty* t))
          (format stream ";;;; Internal names of SBCL that the Lisp side uses, and what each is: written by make sbcl-internals. ~
                          An entry~%;;;; is a package (or \"C\"), a name, the features under which it is used (T: always), ~
                          and what it is.~%~%((:machine ~S)~%~{ ~S~^~%~})~%"
                  (machine-type) entries))))))

(write-table (merge-pathnames "../" *load-truename*)
             (sb-ext:parse-native-namestring (sb-ext:posix-getenv "SBCL_MCP_INTERNALS_OUTPUT")))
