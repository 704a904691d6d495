;;;; Records the definitions of each loaded file, so that a file that is loaded again can be compared with its previous
;;;; version.

(in-package "SBCL-HOST")

(defstruct (loaded-file (:copier nil) (:predicate nil))
  "The definitions that a source file, or its fasl, made when it was last loaded."
  ;; An alist from keys, (kind . name), to details: the method object for a method; a CLASS-PART for a function or method
  ;; that a class definition made; :IMPLIED for a generic function that the file defined only by defining a method;
  ;; :PROCLAIMED for a variable that is only proclaimed; else T.
  (definitions '() :type list)
  ;; An alist from each variable that a form such as DEFVAR defines to a cons of the name of the form's operator and the text
  ;; of the initial value form.
  (variables '() :type list)
  ;; The hash code of the file's text; or NIL if the text could not be read, or if different texts made the definitions.
  (text-hash nil :type (or null fixnum))
  ;; The name of the system that contains the file, or NIL if ASDF has not loaded the file as a part of a system, or if the
  ;; system no longer contains the file and this has been reported.
  (system nil :type (or null string))
  ;; The name of the current package when LOAD was called; or NIL if ASDF has loaded the file.
  (package nil :type (or null string))
  ;; The external format in which LOAD read the file; or :DEFAULT if ASDF has loaded the file.
  (external-format :default)
  ;; True if the last load unwound although the file had been loaded before.
  (incomplete nil))

(defglobal **loaded-files** (make-hash-table :test 'equal :synchronized t)
  "The LOADED-FILE of each source file that was loaded, by native namestring.")

(defvar *file-definitions* nil
  "The definitions that the file being loaded has made so far, an EQUAL hash table from keys to details as in LOADED-FILE;
or NIL.")

(defvar *loaded-file* nil
  "The native namestring of the source file being loaded, or NIL.")

(defvar *loading-system* nil
  "The name of the system that ASDF is compiling or loading, or NIL.")

(defvar *reloaded-files* nil
  "A cons whose car is a list of the files that were loaded again, or NIL when reloads are not recorded. Each file is a list
of four elements: its namestring, the previous LOADED-FILE, the new LOADED-FILE, and the variables of the previous
LOADED-FILE that were bound before the load.")

(defstruct (class-part (:copier nil))
  "The details of a function or method, such as an accessor, that a class definition made."
  ;; The name of the class.
  (class nil :read-only t)
  ;; The method, or NIL for a function.
  (method nil :read-only t))

(defglobal **last-definers** (make-hash-table :test 'equal :synchronized t)
  "The latest definer of each definition, by its key as in LOADED-FILE. A definer is the native namestring of a file, or
:EVALUATION for code that was evaluated outside any file.")

(defun note-file-definition (kind name &optional (value t))
  "Record that the file being loaded has defined NAME as KIND. VALUE is the definition's details, as in LOADED-FILE. When no
file is being loaded or compiled, record evaluated code as the definer."
  (let ((key (cons kind name)))
    (cond (*file-definitions*
           (setf (gethash key *file-definitions*) value
                 (gethash key **last-definers**) *loaded-file*))
          ((not (or *loaded-file* *compile-file-truename*))
           (setf (gethash key **last-definers**) :evaluation)))))

(defun note-file-proclamation (form)
  "Record the variables that FORM makes special, global or always bound. FORM is a declaration specifier that the file being
loaded has proclaimed."
  (when (and *file-definitions*
             (member (first form) '(special sb-ext:global sb-ext:always-bound)))
    (dolist (name (rest form))
      (unless (gethash (cons :variable name) *file-definitions*)
        (note-file-definition :variable name :proclaimed)))))

(defun note-file-method (method)
  "Record that the file being loaded has defined METHOD, a method object, and implicitly its generic function."
  (when *file-definitions*
    (let ((key (method-key method)))
      (note-file-definition :method key method)
      (unless (gethash (cons :function (first key)) *file-definitions*)
        (note-file-definition :function (first key) :implied)))))

(defun method-key (method)
  "Return the name by which METHOD is recorded, a key of EQUAL hash tables: a list of the name of its generic function, a list
of its qualifiers, and a list of the names of its specializers. An EQL specializer has the name (EQL object); but if the
object is a list, which may be circular, the name is the specializer itself, of which SBCL makes only one for an object."
  (list (sb-mop:generic-function-name (sb-mop:method-generic-function method))
        (method-qualifiers method)
        (mapcar (lambda (specializer)
                  (cond ((typep specializer 'class) (class-name specializer))
                        ((and (typep specializer 'sb-mop:eql-specializer)
                              (atom (sb-mop:eql-specializer-object specializer)))
                         (list 'eql (sb-mop:eql-specializer-object specializer)))
                        (t specializer)))
                (sb-mop:method-specializers method))))

;;; Definitions that come with a class

(defun structure-functions (name)
  "Return the names of the functions that DEFSTRUCT has made for the structure class NAME."
  (let ((dd (sb-kernel:find-defstruct-description name nil)))
    (and dd
         (remove nil
                 (append (list (sb-kernel::dd-predicate-name dd) (sb-kernel::dd-copier-name dd))
                         (mapcar (lambda (constructor) (if (consp constructor) (car constructor) constructor))
                                 (sb-kernel::dd-constructors dd))
                         (loop for slot in (sb-kernel:dd-slots dd)
                               for accessor = (sb-kernel:dsd-accessor-name slot)
                               when accessor
                                 collect accessor
                                 and collect `(setf ,accessor)))))))

(defun slot-functions (class)
  "Return the names of the reader functions of CLASS's direct slots; and as a second value the names of the writer
functions. For a class that is neither a standard class nor a condition class, return NIL."
  (typecase class
    (sb-pcl::condition-class
     (let ((slots (sb-kernel::condition-classoid-slots (sb-kernel:find-classoid (class-name class)))))
       (values (mapcan (lambda (slot) (copy-list (sb-kernel::condition-slot-readers slot))) slots)
               (mapcan (lambda (slot) (copy-list (sb-kernel::condition-slot-writers slot))) slots))))
    (sb-pcl::std-class
     (let ((slots (sb-mop:class-direct-slots class)))
       (values (mapcan (lambda (slot) (copy-list (sb-mop:slot-definition-readers slot))) slots)
               (mapcan (lambda (slot) (copy-list (sb-mop:slot-definition-writers slot))) slots))))))

(defun map-class-parts (function name)
  "Call FUNCTION with the key and the CLASS-PART of each function and method that the definition of the class NAME
makes."
  (declare (type function function))
  (let ((class (find-class name nil)))
    (labels ((call (kind key &optional method)
               (funcall function (cons kind key) (make-class-part :class name :method method)))
             (call-accessors (names specializers)
               (dolist (accessor names)
                 (call :function accessor)
                 (let* ((generic (and (fboundp accessor) (fdefinition accessor)))
                        (method (and (typep generic 'generic-function)
                                     (find-method generic '() specializers nil))))
                   (when method
                     (call :method (method-key method) method))))))
      (typecase class
        (structure-class
         (dolist (defined (structure-functions name))
           (call :function defined)))
        (t
         (multiple-value-bind (readers writers) (slot-functions class)
           (call-accessors readers (list class))
           (call-accessors writers (list (find-class t) class))))))))

(defun note-class-parts ()
  "Record the functions and methods, such as slot accessors, that the class definitions of the file being loaded created."
  (loop for (kind . name) in (loop for key being the hash-keys of *file-definitions* collect key)
        when (eq kind :class)
          do (guarded (map-class-parts (lambda (key part)
                                         (note-file-definition (car key) (cdr key) part))
                                       name)
                 (failure)
               nil)))

;;; Forms that define variables

(defun defvar-forms (text)
  "Return an alist of the variables that DEFVAR, DEFPARAMETER, DEFGLOBAL and DEFINE-LOAD-TIME-GLOBAL forms in TEXT, the text
of a file, define. Keys are the names of the variables, strings; values are conses of the name of the form's operator and the
text of the initial value form. Only forms with nothing but whitespace or other such forms before them in their line are
found."
  (declare (type source-text text))
  (let ((forms '())
        (position 0))
    (loop
      (setf position (or (position-if-not #'whitespace-p text :start position) (return forms)))
      (let ((operator (and (char= #\( (char text position))
                           (catch 'scan-failed (token-name text (form-start text (1+ position) 0)))))
            (form-end nil))
        (when (member operator '("DEFVAR" "DEFPARAMETER" "DEFGLOBAL" "DEFINE-LOAD-TIME-GLOBAL") :test #'equal)
          (multiple-value-bind (map end) (form-map text position)
            (setf form-end end)
            (when (and (consp map) (integerp (third map)) (fourth map))
              (let* ((begin (form-position (fourth map)))
                     (end (nth-value 1 (form-map text begin))))
                (when end
                  (push (list* (token-name text (third map)) operator (subseq text begin end)) forms))))))
        (setf position (or form-end (position #\Newline text :start position) (return forms)))))))

(defun variable-forms (text definitions)
  "Return an alist of the variables among DEFINITIONS, an alist as in LOADED-FILE, that forms as in DEFVAR-FORMS in TEXT,
a source file's text, define. Keys are symbols; values are as in DEFVAR-FORMS. If the file has several such forms, or
defines several variables, with the same symbol name, omit them: the forms are found by this name alone."
  (when (find :variable definitions :key #'caar)
    (let ((forms (guarded (defvar-forms text) (failure) '())))
      (and forms
           (let ((variables (loop for ((kind . name)) in definitions
                                  when (and (eq kind :variable) (symbolp name)) collect name)))
             (loop for name in variables
                   for form = (assoc name forms :test #'string=)
                   when (and form
                             (= 1 (count name forms :key #'car :test #'string=))
                             (= 1 (count name variables :test #'string=)))
                     collect (cons name (cdr form))))))))

;;; Recording the definitions while a file is loaded
(defun current-loaded-file (namestring)
  "Return a LOADED-FILE with the definitions that the file being loaded has made so far. NAMESTRING is the native namestring
of the file."
  (note-class-parts)
  (let ((definitions (loop for key being the hash-keys of *file-definitions* using (hash-value value)
                           collect (cons key value))))
    (let* ((octets (file-octets namestring))
           (text (and octets (guarded (octets-text octets 0 (length octets)) (failure) nil))))
      (make-loaded-file :definitions definitions
                        :variables (and text (variable-forms text definitions))
                        :text-hash (and text (sxhash text))))))

(defun merge-loaded-files (now before)
  "Return the LOADED-FILE of a file of which only a part was loaded. NOW is the LOADED-FILE of this part. BEFORE is the
LOADED-FILE of the previous version, or NIL; its definitions that NOW does not contain are added."
  (flet ((merged (now before)
           (let ((known (make-hash-table :test 'equal)))
             (loop for (key) in now do (setf (gethash key known) t))
             (append now (remove-if (lambda (entry) (gethash (car entry) known)) before)))))
    (if before
        (make-loaded-file :definitions (merged (loaded-file-definitions now) (loaded-file-definitions before))
                          :variables (merged (loaded-file-variables now) (loaded-file-variables before))
                          :text-hash (and (eql (loaded-file-text-hash now) (loaded-file-text-hash before))
                                          (loaded-file-text-hash now))
                          :incomplete t)
        now)))

(defun call-recording-definitions (namestring function &key system (external-format :default))
  "Call FUNCTION, which loads a source file or its fasl, and return its values. Record the definitions that FUNCTION makes
as the definitions of the source file with the native namestring NAMESTRING, and add the file to *RELOADED-FILES* if it was
loaded before. If FUNCTION unwinds, keep the recorded definitions of the previous load, and add those made so far. SYSTEM is
the name of the system as a part of which ASDF loads the file, or NIL. EXTERNAL-FORMAT is the external format in which LOAD
reads the file, or :DEFAULT."
  (declare (type function function))
  (let* ((*loaded-file* namestring)
         (*file-definitions* (make-hash-table :test 'equal))
         (before (gethash namestring **loaded-files**))
         (bound (and before (remove-if-not #'boundp (mapcar #'car (loaded-file-variables before)))))
         (package (and (not *loading-system*) (package-name *package*)))
         (now nil))
    (unwind-protect
         (multiple-value-prog1 (funcall function)
           (setf now (current-loaded-file namestring)))
      (unless now
        (setf now (guarded (merge-loaded-files (current-loaded-file namestring) before) (failure) nil)))
      (when now
        (setf (loaded-file-system now) (or system (and before (loaded-file-system before)))
              (loaded-file-package now) package
              (loaded-file-external-format now) external-format
              (gethash namestring **loaded-files**) now)
        (when (and before *reloaded-files*)
          (push (list namestring before now bound) (car *reloaded-files*)))))))

(defun load-recording-definitions (load stream arguments)
  "Call LOAD, SBCL's LOAD-AS-SOURCE, with STREAM and ARGUMENTS. If STREAM reads a file, record the file's state and its
definitions."
  (declare (type function load))
  (let ((file (guarded (and (typep stream 'file-stream) (sb-ext:native-namestring (truename stream))) (failure) nil)))
    (flet ((load-stream () (apply load stream arguments)))
      (when file
        (note-loaded-file-state file (guarded (file-state file) (failure) nil)))
      (if file
          (call-recording-definitions file #'load-stream :external-format (stream-external-format stream))
          (load-stream)))))

(defun loaded-separately-p (file)
  "Return true when FILE, a LOADED-FILE or NIL, was loaded by LOAD and not as a part of a system."
  (and file (loaded-file-package file) (null (loaded-file-system file))))

(defun changed-separate-files ()
  "Return the native namestrings of the files that were loaded by LOAD, not as parts of systems, and have changed since or
were loaded again only in part. Omit files that no longer exist."
  (loop for (namestring . file) in (sb-ext:with-locked-hash-table (**loaded-files**)
                                     (loop for namestring being the hash-keys of **loaded-files** using (hash-value file)
                                           collect (cons namestring file)))
        for state = (gethash namestring **loaded-file-states**)
        when (and state
                  (loaded-separately-p file)
                  (file-state namestring)
                  (or (loaded-file-incomplete file) (file-changed-p state namestring)))
          collect namestring))

(defun component-system-name (component)
  "Return the name of the primary system to which COMPONENT, an ASDF component, belongs; or NIL if it cannot be determined."
  (guarded (asdf:primary-system-name component) (failure) nil))
