;;;; What the files define that are loaded, so that one that is loaded again can be compared with what it was.

(in-package "SBCL-HOST")

(defstruct (loaded-file (:copier nil) (:predicate nil))
  "A source file when it, or the fasl that was made of it, was loaded last."
  ;; Conses of a key, (kind . name), and what is known of it: the method; a PART; :IMPLIED for a function that is generic because
  ;; it has a method; :PROCLAIMED for a variable that is only proclaimed to be one; else T.
  (definitions '() :type list)
  ;; Conses of the name of a variable and the text of the form that DEFVAR gives it.
  (variables '() :type list))

(defglobal **loaded-files** (make-hash-table :test 'equal :synchronized t)
  "The LOADED-FILEs by native namestring.")

(defvar *file-definitions* nil
  "What the file that is being loaded has defined so far: an EQUAL hash table; or NIL.")

(defvar *loaded-file* nil
  "The native namestring of the source file that is being loaded, or NIL.")

(defvar *reloaded-files* nil
  "A cons whose car is a list of those that have been loaded again: lists of namestring, the LOADED-FILE before, the one
now, and the variables that were bound before; or NIL when nobody asks for them.")

(defstruct (part (:copier nil))
  "What a class brings along: a function or a method."
  ;; The name of the class.
  (of nil :read-only t)
  ;; The method, or NIL for a function.
  (method nil :read-only t))

(defglobal **last-definers** (make-hash-table :test 'equal :synchronized t)
  "By key, as in a LOADED-FILE, what defined that last: the native namestring of a file, or :EVALUATION for evaluated code that
is in no file.")

(defun note-file-definition (kind name &optional (value t))
  "Record that the file that is being loaded has defined NAME as KIND, with VALUE, as in a LOADED-FILE; or that evaluated code
has, when no file is loaded or compiled."
  (let ((key (cons kind name)))
    (cond (*file-definitions*
           (setf (gethash key *file-definitions*) value
                 (gethash key **last-definers**) *loaded-file*))
          ((not (or *loaded-file* *compile-file-truename*))
           (setf (gethash key **last-definers**) :evaluation)))))

(defun note-file-proclamation (form)
  "Record the variables that FORM, a declaration specifier which the file that is being loaded has proclaimed, is about."
  (when (and *file-definitions*
             (member (first form) '(special sb-ext:global sb-ext:always-bound)))
    (dolist (name (rest form))
      (unless (gethash (cons :variable name) *file-definitions*)
        (note-file-definition :variable name :proclaimed)))))

(defun note-file-method (method)
  "Record that the file that is being loaded has defined METHOD."
  (when *file-definitions*
    (let ((key (method-key method)))
      (note-file-definition :method key method)
      (unless (gethash (cons :function (first key)) *file-definitions*)
        (note-file-definition :function (first key) :implied)))))

(defun method-key (method)
  "Return what names METHOD: its generic function's name, its qualifiers, and the names of its specializers."
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
  "Return the names of the generic functions that read the slots of CLASS, and of those that write them; those that its
definition names."
  (typecase class
    (sb-pcl::condition-class
     (let ((slots (sb-kernel::condition-classoid-slots (sb-kernel:find-classoid (class-name class)))))
       (values (mapcan (lambda (slot) (copy-list (sb-kernel::condition-slot-readers slot))) slots)
               (mapcan (lambda (slot) (copy-list (sb-kernel::condition-slot-writers slot))) slots))))
    (sb-pcl::std-class
     (let ((slots (sb-mop:class-direct-slots class)))
       (values (mapcan (lambda (slot) (copy-list (sb-mop:slot-definition-readers slot))) slots)
               (mapcan (lambda (slot) (copy-list (sb-mop:slot-definition-writers slot))) slots))))))

(defun map-parts (function name)
  "Call FUNCTION with the key of each function and method that the class NAME brings along, and what is known of it, as in a
LOADED-FILE."
  (declare (type function function))
  (let ((class (find-class name nil)))
    (labels ((call (kind key &optional method)
               (funcall function (cons kind key) (make-part :of name :method method)))
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

(defun note-parts ()
  "Record what the classes bring along that the file that is being loaded has defined."
  (loop for (kind . name) in (loop for key being the hash-keys of *file-definitions* collect key)
        when (eq kind :class)
          do (guarded (map-parts (lambda (key part)
                                   (note-file-definition (car key) (cdr key) part))
                                 name)
                 (failure)
               nil)))

;;; The forms of variables that keep their values

(defun keeping-forms (text)
  "Return conses of the names of the variables that DEFVAR and its like define in TEXT, a file's, and the text of the forms
that give their values. Only what begins a line counts."
  (let ((forms '()))
    (loop for start = 0 then (1+ position)
          for position = (search "(def" text :start2 start :test #'char-equal)
          while position
          do (let ((line (position #\Newline text :end position :from-end t)))
               (when (and (not (find-if-not #'whitespace-p text :start (if line (1+ line) 0) :end position))
                          (member (catch 'confused (token-name text (1+ position))) '("DEFVAR" "DEFGLOBAL")
                                  :test #'equal))
                 (let ((map (map-form text position)))
                   (when (and (consp map) (integerp (third map)) (fourth map))
                     (let* ((begin (form-position (fourth map)))
                            (end (nth-value 1 (map-form text begin))))
                       (when end
                         (push (cons (token-name text (third map)) (subseq text begin end)) forms))))))))
    forms))

(defun variable-forms (namestring definitions)
  "Return the forms of those variables among DEFINITIONS, as in a LOADED-FILE, that keep a value which they have."
  (when (find :variable definitions :key #'caar)
    (let* ((octets (file-octets namestring))
           (forms (and octets (guarded (keeping-forms (octets-text octets 0 (length octets))) (failure) '()))))
      (and forms
           (loop for ((kind . name)) in definitions
                 for form = (and (eq kind :variable)
                                 (symbolp name)
                                 (assoc (symbol-name name) forms :test #'string=))
                 when form collect (cons name (cdr form)))))))

;;; Loading

(defun noted-file (namestring)
  "Return a LOADED-FILE with the definitions so far of the file with this native namestring, which is being loaded."
  (note-parts)
  (let ((definitions (loop for key being the hash-keys of *file-definitions* using (hash-value value)
                           collect (cons key value))))
    (make-loaded-file :definitions definitions :variables (variable-forms namestring definitions))))

(defun merge-loaded-files (now before)
  "Return a LOADED-FILE with the definitions of NOW, the part of a file that was loaded, and those of BEFORE, the last time or
NIL, that NOW does not have."
  (flet ((merged (now before)
           (let ((known (make-hash-table :test 'equal)))
             (loop for (key) in now do (setf (gethash key known) t))
             (append now (remove-if (lambda (entry) (gethash (car entry) known)) before)))))
    (if before
        (make-loaded-file :definitions (merged (loaded-file-definitions now) (loaded-file-definitions before))
                          :variables (merged (loaded-file-variables now) (loaded-file-variables before)))
        now)))

(defun call-noting-definitions (namestring function)
  "Return the values of FUNCTION, which loads the source file with this native namestring or its fasl. Record the definitions
of the file; if FUNCTION does not return, those that it made."
  (declare (type function function))
  (let* ((*loaded-file* namestring)
         (*file-definitions* (make-hash-table :test 'equal))
         (before (gethash namestring **loaded-files**))
         (bound (and before (remove-if-not #'boundp (mapcar #'car (loaded-file-variables before)))))
         (now nil))
    (unwind-protect
         (multiple-value-prog1 (funcall function)
           (setf now (noted-file namestring)
                 (gethash namestring **loaded-files**) now)
           (when (and before *reloaded-files*)
             (push (list namestring before now bound) (car *reloaded-files*))))
      (unless now
        (guarded (setf (gethash namestring **loaded-files**) (merge-loaded-files (noted-file namestring) before))
            (failure)
          nil)))))

(defun load-noting-definitions (load stream arguments)
  "What SBCL's LOAD-AS-SOURCE, LOAD, does with STREAM and ARGUMENTS, and notes what a file defines."
  (declare (type function load))
  (let ((file (guarded (and (typep stream 'file-stream) (sb-ext:native-namestring (truename stream))) (failure) nil)))
    (flet ((load-stream () (apply load stream arguments)))
      (when file
        (note-loaded-state file (guarded (file-state file) (failure) nil)))
      (if file
          (call-noting-definitions file #'load-stream)
          (load-stream)))))

(defun component-system-name (component)
  "Return the name of the system that COMPONENT of ASDF's belongs to, or NIL."
  (guarded (asdf:primary-system-name component) (failure) nil))

(defun component-file (component)
  "Return the native namestring of COMPONENT of ASDF's if it is a source file, or NIL."
  (and (typep component 'asdf:cl-source-file)
       (guarded (sb-ext:native-namestring (asdf:component-pathname component)) (failure) nil)))
