;;;; What the session defines, learnt where SBCL makes definitions: no form is ever read for it.

(in-package "SBCL-HOST")

(defglobal **definitions** (make-hash-table :test 'equal :synchronized t)
  "What the session defined: keys are lists of a kind and a name; values are the name of the system that defined it, or
NIL when the session itself did.")

(defglobal **system-packages** '()
  "The packages of the core but COMMON-LISP-USER: what is named by their symbols is the system's.")

(defglobal **core-systems** '()
  "Names of the systems that are part of the core.")

(defun already-loaded-systems ()
  "Return the names of the systems that ASDF has loaded."
  (guarded (copy-list (asdf:already-loaded-systems)) (failure) '()))

(defglobal **debug-declaimed** nil
  "True once the user has declaimed a debug quality of his own.")

(defun system-symbol-p (symbol)
  "True when SYMBOL belongs to a package of the system's, or to none."
  (let ((package (symbol-package symbol)))
    (or (null package)
        (and (member package **system-packages** :test #'eq) t)
        (eql 3 (mismatch "SB-" (package-name package))))))

(defun function-name-symbol (name)
  "Return the symbol in NAME, a function name; NIL when it is one of SBCL's own making, as of a method's function."
  (cond ((atom name) name)
        ((member (first name) '(setf sb-ext:cas)) (second name))))

(defun definition-name (kind name)
  "Return the name of what is defined as KIND, when the function that defines it is told NAME, or what has that name."
  (cond ((typep name 'sb-kernel:defstruct-description) (sb-kernel:dd-name name))
        ((and (eq kind :package) (packagep name)) (or (package-name name) ""))
        ((eq kind :package) (string name))
        (t name)))

(defconstant +told-definitions+ 20
  "How many definitions of an evaluation other connections are told.")

(defun note-definition-for-others (kind name)
  "Take note that this evaluation defines NAME as KIND, as far as others are to be told."
  (let* ((told (or *loading-system* name))
         (entry (if *loading-system*
                    (list :system told nil)
                    (list kind told (nth-value 1 (gethash (list kind name) **definitions**))))))
    ;; The threads of an evaluation may define at once.
    (sb-ext:atomic-update (evaluation-defined *evaluation*)
                          (lambda (defined)
                            (if (or (>= (length defined) +told-definitions+)
                                    (member told defined :key #'second :test #'equal))
                                defined
                                (cons entry defined))))))

(defun note-definition (kind name &optional (file-kind (and (not (eq kind :other)) kind)))
  "Record that the session defined NAME, a symbol, function name or package name, as KIND; and the file that is being
loaded, as FILE-KIND, unless that is NIL."
  (when *evaluation*
    (sb-ext:atomic-incf (evaluation-definitions *evaluation*)))
  (unless (or (and (eq kind :other) (null file-kind))
              (and (not (eq kind :package))
                   (let ((symbol (function-name-symbol name)))
                     (or (not (symbolp symbol)) (system-symbol-p symbol)))))
    (when file-kind
      (note-file-definition file-kind name))
    (unless (eq kind :other)
      (when (recording-changes-p)
        (note-change (change-line #\+ kind name)))
      (when *evaluation*
        (note-definition-for-others kind name))
      (setf (gethash (list kind name) **definitions**) *loading-system*))))

(defun removal-lines (kinds name)
  "Return the lines that describe the removal of NAME as each of KINDS; NIL when changes are not recorded."
  (and (recording-changes-p)
       (mapcar (lambda (kind) (change-line #\- kind (definition-name kind name))) kinds)))

(defun note-removal (lines)
  "Record the removals that LINES describe."
  (when *evaluation*
    (sb-ext:atomic-incf (evaluation-definitions *evaluation*))
    (mapc #'note-change lines)))

(defun note-proclamation (form)
  "Take note of FORM, a declaration specifier that was proclaimed: of variables, for the file that is being loaded, and of a
debug quality that the user has declaimed."
  (note-file-proclamation form)
  (when (and (eq (car form) 'optimize)
             (null *load-truename*)
             (find 'debug (cdr form) :key (lambda (quality) (if (consp quality) (car quality) quality))))
    (setf **debug-declaimed** t)))

(declaim (type list **methods**))
(defglobal **methods** '()
  "The methods that the session defined, on whatever generic function.")

(defun defined-p (kind name)
  "True when NAME is still defined as KIND."
  (ecase kind
    (:function (and (fboundp name)
                    (not (and (symbolp name) (macro-function name)))))
    (:macro (or (and (symbolp name) (macro-function name))
                (compiler-macro-function name)
                (and (symbolp name) (eq :macro (sb-int:info :variable :kind name)))))
    (:variable (member (sb-int:info :variable :kind name) '(:special :constant :global)))
    (:class (find-class name nil))
    (:type (sb-int:info :type :kind name))
    (:package (find-package name))))

(defun map-definitions (function)
  "Call FUNCTION with kind, name and system (or NIL) of each thing that the session defined and that is still there."
  (let ((entries '()))
    ;; Other threads may define something meanwhile.
    (sb-ext:with-locked-hash-table (**definitions**)
      (maphash (lambda (entry system) (push (cons system entry) entries)) **definitions**))
    (loop for (system kind name) in entries
          when (and (let ((symbol (function-name-symbol name)))
                      (or (stringp symbol) (symbol-package symbol)))
                    (defined-p kind name))
            do (funcall function kind name system))))

;;; Removing them

(defun remove-methods-of-session (generic-function)
  "Remove from GENERIC-FUNCTION the methods that specialise on classes of the session."
  (dolist (method (sb-mop:generic-function-methods generic-function))
    (when (some (lambda (specializer)
                  (and (typep specializer 'class)
                       (class-name specializer)
                       (nth-value 1 (gethash (list :class (class-name specializer)) **definitions**))))
                (sb-mop:method-specializers method))
      (remove-method generic-function method))))

(defun remove-class (name)
  "Forget the class NAME and its methods."
  (let ((class (find-class name nil)))
    (when class
      (when (typep class 'standard-class)
        (ignore-errors
         (mapc #'remove-methods-of-session
               (remove-duplicates
                (mapcan (lambda (method)
                          (let ((generic-function (sb-mop:method-generic-function method)))
                            (and generic-function (list generic-function))))
                        (copy-list (sb-mop:specializer-direct-methods class)))))))
      (setf (find-class name) nil))))

(defun remove-definition (kind name)
  "Undo the definition of NAME as KIND."
  (ecase kind
    (:function (fmakunbound name))
    (:macro (when (and (symbolp name) (macro-function name))
              (fmakunbound name))
     (when (compiler-macro-function name)
       (setf (compiler-macro-function name) nil))
     (when (and (symbolp name) (eq :macro (sb-int:info :variable :kind name)))
       (unintern name (symbol-package name))))
    ;; A symbol that was proclaimed special stays so: another one takes its place.
    (:variable (unintern name (symbol-package name)))
    (:class (remove-class name))
    (:type (sb-int:clear-info :type :expander name)
     (sb-int:clear-info :type :kind name))
    (:package (let ((package (find-package name)))
                (when package
                  (dolist (user (package-used-by-list package))
                    (unuse-package package user))
                  (delete-package package))))))

(defun remove-definitions ()
  "Undo all that the session defined, packages last, and return what could not be undone as a list of names."
  (setf *package* **user-package**
        **debug-declaimed** nil)
  (sb-ext:without-package-locks
    (let ((left '()))
      (loop for method = (sb-ext:atomic-pop **methods**)
            while method
            do (guarded (let ((generic-function (sb-mop:method-generic-function method)))
                          (when generic-function
                            (remove-method generic-function method)))
                   (failure)
                 (push method left)))
      (flet ((remove-kinds (kinds)
               (map-definitions (lambda (kind name system)
                                  (declare (ignore system))
                                  (when (member kind kinds)
                                    (guarded (remove-definition kind name) (failure) (push name left)))))))
        (remove-kinds '(:function :macro :type))
        (remove-kinds '(:class))
        (remove-kinds '(:variable))
        (remove-kinds '(:package)))
      (do-symbols (symbol **user-package**)
        (when (and (eq (symbol-package symbol) **user-package**)
                   (boundp symbol)
                   (not (constantp symbol)))
          (guarded (unintern symbol **user-package**) (failure) (push symbol left))))
      (clrhash **definitions**)
      (clrhash **loaded-files**)
      (clrhash **last-definers**)
      (clrhash **loaded-states**)
      left)))
