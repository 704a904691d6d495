;;;; Writes sbcl-internals.sexp: make sbcl-internals. Run by a plain SBCL that is to be pinned; SBCL_MCP_INTERNALS_OUTPUT
;;;; names the file to write, SBCL_MCP_FASL_DIR a directory for compiled files.

(require :asdf)
(asdf:initialize-output-translations
 `(:output-translations (t ,(concatenate 'string (sb-ext:posix-getenv "SBCL_MCP_FASL_DIR") "/"))
                        :ignore-inherited-configuration))
(asdf:load-asd (merge-pathnames "../sbcl-host.asd" *load-truename*))
;; The sources are read in the packages that they define.
(handler-bind ((sb-ext:compiler-note #'muffle-warning))
  (asdf:load-system "sbcl-host"))
(load (merge-pathnames "sbcl-internals.lisp" *load-truename*))

(in-package "SBCL-INTERNALS")

(defparameter *documented-packages*
  '("COMMON-LISP" "SB-EXT" "SB-THREAD" "SB-ALIEN" "SB-MOP" "SB-GRAY" "SB-POSIX" "SB-BSD-SOCKETS" "SB-CLTL2" "SB-COVER"
    "SB-SPROF" "SB-INTROSPECT" "SB-CONCURRENCY")
  "Packages whose exported symbols SBCL's manual or a standard describes: they do not change without notice.")

(defvar *uses* nil
  "The internal names found so far: a hash table of lists of a package and a name to feature expressions.")

(defvar *included* nil
  "A hash table of structures of SBCL's to the names of slots that structures of ours have other initial values for.")

(defconstant +conditional+ '+conditional+
  "What a list begins with that stands for a form after #+ or #-: the feature expression and the form follow.")

(defun read-conditional (stream character argument)
  "Read what follows #+ or #-, whether or not the expression holds here."
  (declare (ignore argument))
  (let* ((features (let ((*package* (find-package "KEYWORD"))) (read stream t nil t)))
         (features (if (eql character #\-) `(:not ,features) features))
         (start (file-position stream)))
    (list +conditional+ features
          (handler-bind ((error (lambda (failure)
                                  (unless (uiop:featurep features)
                                    ;; Entries for another processor stay as they were written there.
                                    (file-position stream start)
                                    (let ((*read-suppress* t)) (read stream t nil t))
                                    (return-from read-conditional nil))
                                  (error failure))))
            (read stream t nil t)))))

(defun documented-p (symbol)
  "True when SYMBOL is exported by a package that SBCL's manual or a standard describes."
  (loop for package in *documented-packages*
        thereis (multiple-value-bind (found status) (find-symbol (symbol-name symbol) package)
                  (and (eq found symbol) (eq status :external)))))

(defun internal-p (symbol)
  "True when SYMBOL is SBCL's and no documented interface."
  (and (sbcl-symbol-p symbol) (not (documented-p symbol))))

(defun runtime-symbol-p (name)
  "True when NAME is defined by SBCL's own C code rather than by a library."
  (let ((address (sb-sys:find-foreign-symbol-address name))
        (information (make-array 4 :element-type '(unsigned-byte 64) :initial-element 0)))
    (and address
         (sb-sys:with-pinned-objects (information)
           (/= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "dladdr" (function sb-alien:int sb-alien:unsigned-long sb-sys:system-area-pointer))
                  address (sb-sys:vector-sap information))))
         (let ((file (sb-alien:cast (sb-alien:sap-alien (sb-sys:int-sap (aref information 0)) (* char)) sb-alien:c-string)))
           (equal (probe-file (sb-ext:parse-native-namestring file)) (probe-file sb-ext:*runtime-pathname*))))))

(defun note-use (package name features)
  "Note that NAME of PACKAGE is used where FEATURES holds."
  (pushnew features (gethash (list package name) *uses*) :test #'equal))

(defun note-included (form)
  "Note which slots FORM, perhaps an :INCLUDE option of DEFSTRUCT, has other initial values for."
  (when (and (eq :include (car form)) (consp (cdr form)) (symbolp (second form)) (internal-p (second form)))
    (dolist (slot (cddr form))
      (pushnew (string (if (consp slot) (first slot) slot)) (gethash (second form) *included*) :test #'string=))))

(defun note-foreign (form features)
  "Note the symbol of SBCL's C runtime that FORM names, if it does, where FEATURES holds."
  (when (and (member (car form) '(sb-alien:extern-alien sb-sys:find-foreign-symbol-address sb-sys:foreign-symbol-sap))
             (consp (cdr form))
             (stringp (second form))
             (runtime-symbol-p (second form)))
    (note-use "C" (second form) features)))

(defun walk (form features)
  "Note the internal names in FORM, which the sources have where FEATURES, a feature expression, holds."
  (typecase form
    (cons
     (cond ((eq +conditional+ (car form))
            (destructuring-bind (condition form) (rest form)
              (walk form (if (eq features t) condition `(:and ,features ,condition)))))
           (t
            (note-included form)
            (note-foreign form features)
            (loop for rest = form then (cdr rest)
                  while (consp rest)
                  do (walk (car rest) features)
                  finally (when rest (walk rest features))))))
    (symbol (when (internal-p form)
              (note-use (package-name (symbol-package form)) (symbol-name form) features)))
    (simple-vector (map nil (lambda (element) (walk element features)) form))
    (sb-impl::comma (walk (sb-int:comma-expr form) features))))

(defun scan-file (file)
  "Note the internal names that the source FILE uses."
  (with-input-from-string (stream (uiop:read-file-string file))
    (let ((*package* (find-package "COMMON-LISP-USER"))
          (*readtable* (copy-readtable nil)))
      (set-dispatch-macro-character #\# #\+ #'read-conditional)
      (set-dispatch-macro-character #\# #\- #'read-conditional)
      (loop for form = (read stream nil stream)
            until (eq form stream)
            do (when (and (consp form) (eq 'in-package (first form)))
                 (setf *package* (find-package (second form))))
               (walk form t)))))

(defun condition-of-use (features)
  "Return the feature expression under which a name is used that is used under each of FEATURES."
  (cond ((member t features) t)
        ((rest features) `(:or ,@(sort (copy-list features) #'string< :key #'prin1-to-string)))
        (t (first features))))

(defun table-entries (directory)
  "Return the table's entries for the sources of the Lisp side below DIRECTORY, which is loaded."
  (let ((*uses* (make-hash-table :test #'equal))
        (*included* (make-hash-table))
        (*condition-slots* (condition-slots)))
    (dolist (file (directory (merge-pathnames "**/*.lisp" directory)))
      (unless (member (pathname-name file) '("tests" "write-internals") :test #'string=)
        (scan-file file)))
    (sort (loop for (package name) being the hash-keys of *uses* using (hash-value features)
                for included = (sort (copy-list (gethash (find-internal package name) *included*)) #'string<)
                collect `(,package ,name ,(condition-of-use features) ,@(describe-name package name included)))
          (lambda (one other)
            (or (string< (first one) (first other))
                (and (string= (first one) (first other)) (string< (second one) (second other))))))))

(defun write-table (directory file)
  "Write to FILE the table of the internal names that the sources below DIRECTORY use, described as this SBCL has them."
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
