;;;; The definitions of each loaded file, so that a file that is loaded again can be compared with its previous version.

(in-package "SBCL-HOST")

(defstruct (loaded-file (:copier nil) (:predicate nil))
  "The definitions that a source file, or its fasl, made when it was last loaded."
  ;; An alist from keys, (kind . name), to details: the method; a CLASS-PART; :IMPLIED for a function that is generic
  ;; because it has a method; :PROCLAIMED for a variable that is only proclaimed; else T.
  (definitions '() :type list)
  ;; An alist from variables to the text of the initial value form in their DEFVAR or DEFGLOBAL.
  (variables '() :type list))

(defglobal **loaded-files** (make-hash-table :test 'equal :synchronized t)
  "The LOADED-FILE of each file, by native namestring.")

(defvar *file-definitions* nil
  "The definitions that the file being loaded has made so far, an EQUAL hash table; or NIL.")

(defvar *loaded-file* nil
  "The native namestring of the source file being loaded, or NIL.")

(defvar *reloaded-files* nil
  "A cons whose car is the list of files that were loaded again, each a list of namestring, previous LOADED-FILE, new
LOADED-FILE, and the variables of the previous LOADED-FILE that were bound before the load; or NIL when reloads are not
recorded.")

(defstruct (class-part (:copier nil))
  "A function or method that a class definition makes, such as an accessor."
  ;; The name of the class.
  (class nil :read-only t)
  ;; The method, or NIL for a function.
  (method nil :read-only t))

(defglobal **last-definers** (make-hash-table :test 'equal :synchronized t)
  "The latest definer of each key of a LOADED-FILE: the native namestring of a file, or :EVALUATION for evaluated code in
no file.")

(defun note-file-definition (kind name &optional (value t))
  "Record that the file being loaded has defined NAME as KIND, with VALUE as its details in the LOADED-FILE. When no file
is being loaded or compiled, record evaluated code as the definer."
  (let ((key (cons kind name)))
    (cond (*file-definitions*
           (setf (gethash key *file-definitions*) value
                 (gethash key **last-definers**) *loaded-file*))
          ((not (or *loaded-file* *compile-file-truename*))
           (setf (gethash key **last-definers**) :evaluation)))))

(defun note-file-proclamation (form)
  "Record the variables in FORM, a declaration specifier that the file being loaded has proclaimed."
  (when (and *file-definitions*
             (member (first form) '(special sb-ext:global sb-ext:always-bound)))
    (dolist (name (rest form))
      (unless (gethash (cons :variable name) *file-definitions*)
        (note-file-definition :variable name :proclaimed)))))

(defun note-file-method (method)
  "Record that the file being loaded has defined METHOD."
  (when *file-definitions*
    (let ((key (method-key method)))
      (note-file-definition :method key method)
      (unless (gethash (cons :function (first key)) *file-definitions*)
        (note-file-definition :function (first key) :implied)))))

(defun method-key (method)
  "Return the key of METHOD: the name of its generic function, its qualifiers, and the names of its specializers."
  (list (sb-mop:generic-function-name (sb-mop:method-generic-function method))
        (method-qualifiers method)
        (mapcar (lambda (specializer)
                  (typecase specializer
                    (class (class-name specializer))
                    (sb-mop:eql-specializer (list 'eql (sb-mop:eql-specializer-object specializer)))
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
  "Return the names of the reader functions of CLASS's direct slots, and as a second value the names of the writer
functions."
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
  "Record the parts of the classes that the file being loaded has defined."
  (loop for (kind . name) in (loop for key being the hash-keys of *file-definitions* collect key)
        when (eq kind :class)
          do (guarded (map-class-parts (lambda (key part)
                                         (note-file-definition (car key) (cdr key) part))
                                       name)
                 (failure)
               nil)))

;;; DEFVAR and DEFGLOBAL, which do not reassign a bound variable

(defun defvar-forms (text)
  "Return an alist from the names of the variables that DEFVAR and DEFGLOBAL forms define in TEXT, a file's, to the text
of their initial value forms. Only forms that begin a line are found."
  (let ((forms '()))
    (loop for start = 0 then (1+ position)
          for position = (search "(def" text :start2 start :test #'char-equal)
          while position
          do (let ((line (position #\Newline text :end position :from-end t)))
               (when (and (not (find-if-not #'whitespace-p text :start (if line (1+ line) 0) :end position))
                          (member (catch 'scan-failed (token-name text (1+ position))) '("DEFVAR" "DEFGLOBAL")
                                  :test #'equal))
                 (let ((map (map-form text position)))
                   (when (and (consp map) (integerp (third map)) (fourth map))
                     (let* ((begin (form-position (fourth map)))
                            (end (nth-value 1 (map-form text begin))))
                       (when end
                         (push (cons (token-name text (third map)) (subseq text begin end)) forms))))))))
    forms))

(defun variable-forms (namestring definitions)
  "Return the alist of initial value forms, from the file NAMESTRING, for the DEFVAR and DEFGLOBAL variables among
DEFINITIONS."
  (when (find :variable definitions :key #'caar)
    (let* ((octets (file-octets namestring))
           (forms (and octets (guarded (defvar-forms (octets-text octets 0 (length octets))) (failure) '()))))
      (and forms
           (loop for ((kind . name)) in definitions
                 for form = (and (eq kind :variable)
                                 (symbolp name)
                                 (assoc (symbol-name name) forms :test #'string=))
                 when form collect (cons name (cdr form)))))))

;;; Loading

(defun current-loaded-file (namestring)
  "Return a LOADED-FILE with the definitions so far of the file being loaded, whose native namestring is NAMESTRING."
  (note-class-parts)
  (let ((definitions (loop for key being the hash-keys of *file-definitions* using (hash-value value)
                           collect (cons key value))))
    (make-loaded-file :definitions definitions :variables (variable-forms namestring definitions))))

(defun merge-loaded-files (now before)
  "Return a LOADED-FILE with the definitions of NOW, the part of a file that was loaded, and the definitions of BEFORE,
its previous version or NIL, that NOW does not contain."
  (flet ((merged (now before)
           (let ((known (make-hash-table :test 'equal)))
             (loop for (key) in now do (setf (gethash key known) t))
             (append now (remove-if (lambda (entry) (gethash (car entry) known)) before)))))
    (if before
        (make-loaded-file :definitions (merged (loaded-file-definitions now) (loaded-file-definitions before))
                          :variables (merged (loaded-file-variables now) (loaded-file-variables before)))
        now)))

(defun call-noting-definitions (namestring function)
  "Call FUNCTION, which loads the source file NAMESTRING (native) or its fasl, record the file's definitions, and return
the values of FUNCTION. If FUNCTION does not return, record the definitions made so far."
  (declare (type function function))
  (let* ((*loaded-file* namestring)
         (*file-definitions* (make-hash-table :test 'equal))
         (before (gethash namestring **loaded-files**))
         (bound (and before (remove-if-not #'boundp (mapcar #'car (loaded-file-variables before)))))
         (now nil))
    (unwind-protect
         (multiple-value-prog1 (funcall function)
           (setf now (current-loaded-file namestring)
                 (gethash namestring **loaded-files**) now)
           (when (and before *reloaded-files*)
             (push (list namestring before now bound) (car *reloaded-files*))))
      (unless now
        (guarded (setf (gethash namestring **loaded-files**) (merge-loaded-files (current-loaded-file namestring) before))
            (failure)
          nil)))))

(defun load-noting-definitions (load stream arguments)
  "Call LOAD, SBCL's LOAD-AS-SOURCE, with STREAM and ARGUMENTS, and record the definitions of the file."
  (declare (type function load))
  (let ((file (guarded (and (typep stream 'file-stream) (sb-ext:native-namestring (truename stream))) (failure) nil)))
    (flet ((load-stream () (apply load stream arguments)))
      (when file
        (note-loaded-state file (guarded (file-state file) (failure) nil)))
      (if file
          (call-noting-definitions file #'load-stream)
          (load-stream)))))

(defun component-system-name (component)
  "Return the name of the system to which COMPONENT, of ASDF, belongs, or NIL."
  (guarded (asdf:primary-system-name component) (failure) nil))

(defun component-file (component)
  "Return the native namestring of COMPONENT, of ASDF, if it is a source file, or NIL."
  (and (typep component 'asdf:cl-source-file)
       (guarded (sb-ext:native-namestring (asdf:component-pathname component)) (failure) nil)))
