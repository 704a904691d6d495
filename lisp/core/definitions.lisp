;;;; The session's definitions, recorded when SBCL makes them. Forms are not parsed for this purpose.

(in-package "SBCL-HOST")

(defglobal **definitions** (make-hash-table :test 'equal :synchronized t)
  "A table of the session's definitions. Keys are lists of a kind and a name. Values are the name of the system that
made the definition, or NIL if the session itself made it.")

(defglobal **system-packages** '()
  "The packages of the core except COMMON-LISP-USER. Definitions of symbols of these packages count as the system's, not
as the session's.")

(defglobal **core-systems** '()
  "The names of the systems that are part of the core.")

(defun already-loaded-systems ()
  "Return the names of the systems that ASDF has loaded. ASDF's function of this name looks up the class of the operation
for each system, and for that waits while other code holds **WORLD-LOCK**."
  (guarded (let ((operation (or (gethash (find-class 'asdf:load-op) asdf/operation:*operations*)
                                (asdf:make-operation 'asdf:load-op))))
             (loop for system in (asdf/system-registry:registered-systems*)
                   when (nth-value 1 (asdf/action:component-operation-time operation system))
                     collect (asdf:component-name system)))
      (failure)
    '()))

(defglobal **debug-declaimed** nil
  "True once the user has proclaimed a debug quality outside a file.")

(defun system-symbol-p (symbol)
  "Return true when SYMBOL belongs to one of **SYSTEM-PACKAGES** or to a package whose name begins with SB-, or to no
package."
  (let ((package (symbol-package symbol)))
    (or (null package)
        (and (member package **system-packages** :test #'eq) t)
        (eql 3 (mismatch "SB-" (package-name package))))))

(defun function-name-symbol (name)
  "Return the symbol in NAME, a function name: NAME itself, or SYMBOL in (SETF SYMBOL) or (CAS SYMBOL). If NAME is a
string, return it. Return NIL for the lists with which SBCL names functions itself, such as method functions."
  (cond ((atom name) name)
        ((member (first name) '(setf sb-ext:cas)) (second name))))

(defun definition-name (kind name)
  "Return the name of a definition of KIND. NAME, an argument of SBCL's defining function, is this name or an object
that has this name."
  (cond ((typep name 'sb-kernel:defstruct-description) (sb-kernel:dd-name name))
        ((and (eq kind :package) (packagep name)) (or (package-name name) ""))
        ((eq kind :package) (string name))
        (t name)))

(defconstant +max-announced-definitions+ 20
  "The maximum number of definitions of one evaluation that are announced to other connections.")

(defun note-definition-to-announce (kind name)
  "Record that this evaluation defines NAME as KIND, to announce the definition to other connections. While a system is
being loaded, record the system instead, once for all its definitions."
  (let* ((announced-name (or *loading-system* name))
         (entry (if *loading-system*
                    (list :system announced-name nil)
                    (list kind announced-name (nth-value 1 (gethash (list kind name) **definitions**))))))
    ;; Several threads of an evaluation may make definitions at the same time.
    (sb-ext:atomic-update (evaluation-unannounced-definitions *evaluation*)
                          (lambda (defined)
                            (if (or (>= (length defined) +max-announced-definitions+)
                                    (member announced-name defined :key #'second :test #'equal))
                                defined
                                (cons entry defined))))))

(defun listed-kind (kind)
  "Return the kind under which **DEFINITIONS** contains a definition that was made as KIND."
  (case kind
    (:method :function)
    ((:symbol-macro :compiler-macro) :macro)
    (t kind)))

(defun note-definition (kind name &optional (file-kind (and (not (eq kind :other)) kind)))
  "Record that the session defined NAME (a symbol, function name or package name) as KIND. If KIND is :METHOD, NAME names
the generic function that got a method. Unless FILE-KIND is NIL, also record that the file being loaded defined NAME as
FILE-KIND. If KIND is :OTHER, record only the file's definition. Names whose symbols belong to the system are not
recorded."
  (when *evaluation*
    (sb-ext:atomic-incf (evaluation-change-count *evaluation*)))
  (unless (or (and (eq kind :other) (null file-kind))
              (and (not (eq kind :package))
                   (let ((symbol (function-name-symbol name)))
                     (or (not (symbolp symbol)) (system-symbol-p symbol)))))
    (when file-kind
      (note-file-definition file-kind name))
    (unless (eq kind :other)
      (when (recording-changes-p)
        (note-change (format-change-line (if (eq kind :method) #\* #\+) kind name)))
      (when *evaluation*
        (note-definition-to-announce (listed-kind kind) name))
      (setf (gethash (list (listed-kind kind) name) **definitions**) *loading-system*))))

(defun removal-lines (kinds name)
  "Return a list of the lines that describe the removal of NAME as each of KINDS, a list; NIL when changes are not
recorded."
  (and (recording-changes-p)
       (mapcar (lambda (kind) (format-change-line #\- kind name)) kinds)))

(defun note-removal (kinds name lines)
  "Record that NAME was removed as each of KINDS, a list, or was left as it was. LINES, a value of REMOVAL-LINES, describe
the removals."
  (when *evaluation*
    (sb-ext:atomic-incf (evaluation-change-count *evaluation*))
    (mapc #'note-change lines))
  (dolist (kind (mapcar #'listed-kind kinds))
    (unless (existing-definition-p kind name)
      (remhash (list kind name) **definitions**)))
  (when (member :package kinds)
    (forget-homeless-definitions)))

(defun forget-homeless-definitions ()
  "Forget the definitions and definers of names without a package, as after DELETE-PACKAGE. The tables would keep the names,
and all that they name, for ever."
  (labels ((homeless-p (name)
             (let ((symbol (function-name-symbol name)))
               (and symbol (symbolp symbol) (null (symbol-package symbol)))))
           (forget (table key-name)
             (declare (type function key-name))
             (sb-ext:with-locked-hash-table (table)
               (loop for key being the hash-keys of table
                     when (homeless-p (funcall key-name key))
                       do (remhash key table)))))
    (forget **definitions** #'second)
    (forget **last-definers** (lambda (key)
                                (destructuring-bind (kind . name) key
                                  (if (eq kind :method) (first name) name))))))

(defun note-renamed-package (package old)
  "Record that RENAME-PACKAGE has renamed PACKAGE, or only changed its nicknames. OLD is the package's former name, or NIL if it
is not known. If the session or a system has defined the package, it remains their definition under the new name."
  (multiple-value-bind (system recorded) (gethash (list :package old) **definitions**)
    (let ((new (package-name package)))
      (cond ((and recorded (string/= old new))
             (note-removal '(:package) old (removal-lines '(:package) old))
             ;; OLD may have become a nickname of PACKAGE.
             (remhash (list :package old) **definitions**)
             (note-definition :package new nil)
             (setf (gethash (list :package new) **definitions**) system))
            (t (note-definition :other package))))))

(defun note-proclamation (form)
  "Record FORM, a declaration specifier that was proclaimed. Variables that it declares count as definitions of the file
being loaded, if any. Outside a file, a debug quality sets **DEBUG-DECLAIMED**."
  (note-file-proclamation form)
  (when (and (eq (car form) 'optimize)
             (null *load-truename*)
             (find 'debug (cdr form) :key (lambda (quality) (if (consp quality) (car quality) quality))))
    (setf **debug-declaimed** t)))

(declaim (type hash-table **session-methods**))
(defglobal **session-methods** (make-hash-table :test 'eq :weakness :key :synchronized t)
  "A table whose keys are the methods that the session has defined, including methods of the system's generic functions.
Methods that were replaced or removed can be collected as garbage.")

(defun defined-p (kind name)
  "Return true when NAME is still defined as KIND."
  (ecase kind
    (:function (and (fboundp name)
                    (not (and (symbolp name) (macro-function name)))))
    (:macro (or (and (symbolp name) (macro-function name))
                (compiler-macro-function name)
                (and (symbolp name) (eq :macro (sb-int:info :variable :kind name)))))
    (:variable (member (sb-int:info :variable :kind name) '(:special :constant :global)))
    (:class (find-class name nil))
    (:type (sb-int:info :type :kind name))
    (:setf-expander (sb-int:info :setf :expander name))
    (:method-combination (gethash name sb-pcl::**method-combinations**))
    (:package (find-package name))))

(defun existing-definition-p (kind name)
  "Return true when NAME is still defined as KIND, and its symbol still has a package."
  (and (let ((symbol (function-name-symbol name)))
         (or (stringp symbol) (symbol-package symbol)))
       (defined-p kind name)))

(defun map-definitions (function)
  "Call FUNCTION with the kind, name and system (or NIL) of each definition of the session that still exists."
  (let ((entries '()))
    ;; The lock is held only for the copy. Other threads may make definitions meanwhile.
    (sb-ext:with-locked-hash-table (**definitions**)
      (maphash (lambda (entry system) (push (cons system entry) entries)) **definitions**))
    (loop for (system kind name) in entries
          when (existing-definition-p kind name)
            do (funcall function kind name system))))

;;; Removing definitions

(defun remove-session-methods (generic-function)
  "Remove the methods of GENERIC-FUNCTION that specialise on classes of the session."
  (dolist (method (sb-mop:generic-function-methods generic-function))
    (when (some (lambda (specializer)
                  (and (typep specializer 'class)
                       (class-name specializer)
                       (nth-value 1 (gethash (list :class (class-name specializer)) **definitions**))))
                (sb-mop:method-specializers method))
      (remove-method generic-function method))))

(defun remove-class (name)
  "Remove the class NAME. Some generic functions have methods that specialise on this class: from each of them, remove
all methods that specialise on classes of the session."
  (let ((class (find-class name nil)))
    (when class
      (when (typep class 'standard-class)
        (ignore-errors
         (mapc #'remove-session-methods
               (remove-duplicates
                (mapcan (lambda (method)
                          (let ((generic-function (sb-mop:method-generic-function method)))
                            (and generic-function (list generic-function))))
                        (copy-list (sb-mop:specializer-direct-methods class)))))))
      (setf (find-class name) nil))))

(defun accessor-names (class-name)
  "Return the names of the reader and writer functions of the direct slots of the class CLASS-NAME, without functions of the
system."
  (remove-if (lambda (name) (system-symbol-p (function-name-symbol name)))
             (multiple-value-call #'append (slot-functions (find-class class-name nil)))))

(defun remove-accessor (name)
  "Remove the function NAME, a slot accessor of a removed class, unless it is a generic function that still has methods."
  (when (fboundp name)
    (let ((function (fdefinition name)))
      (unless (and (typep function 'generic-function) (sb-mop:generic-function-methods function))
        (fmakunbound name)))))

(defun remove-definition (kind name)
  "Remove the definition of NAME as KIND."
  (ecase kind
    (:function (fmakunbound name))
    (:macro (when (and (symbolp name) (macro-function name))
              (fmakunbound name))
     (when (compiler-macro-function name)
       (setf (compiler-macro-function name) nil))
     (when (and (symbolp name) (eq :macro (sb-int:info :variable :kind name)))
       (unintern name (symbol-package name))))
    ;; A special proclamation cannot be undone, so the symbol is uninterned and a new symbol will replace it.
    (:variable (unintern name (symbol-package name)))
    (:class (remove-class name))
    (:type (sb-int:clear-info :type :expander name)
     (sb-int:clear-info :type :kind name))
    (:setf-expander (sb-int:clear-info :setf :expander name))
    (:method-combination (remhash name sb-pcl::**method-combinations**))
    (:package (let ((package (find-package name)))
                (when package
                  (dolist (user (package-used-by-list package))
                    (unuse-package package user))
                  (delete-package package))))))

(defun remove-definitions ()
  "Untrace all functions. Remove the recorded definitions of the session, packages last, and unintern the symbols of
COMMON-LISP-USER that have a value and are not constants. Return a list of the names and methods whose removal failed."
  (setf *package* **user-package**
        **debug-declaimed** nil)
  ;; SBCL can untrace a function only while it is defined.
  (guarded (untrace) (failure) nil)
  (sb-ext:without-package-locks
    (let ((left '())
          (accessors '()))
      (loop for method in (sb-ext:with-locked-hash-table (**session-methods**)
                            (loop for method being the hash-keys of **session-methods**
                                  collect method))
            do (remhash method **session-methods**)
               (guarded (let ((generic-function (sb-mop:method-generic-function method)))
                          (when generic-function
                            (remove-method generic-function method)))
                   (failure)
                 (push method left)))
      (flet ((remove-kinds (kinds)
               (map-definitions (lambda (kind name system)
                                  (declare (ignore system))
                                  (when (member kind kinds)
                                    (guarded (remove-definition kind name) (failure) (push name left)))))))
        (remove-kinds '(:function :macro :type :setf-expander :method-combination))
        (map-definitions (lambda (kind name system)
                           (declare (ignore system))
                           (when (eq kind :class)
                             (guarded (setf accessors (append (accessor-names name) accessors)) (failure) nil))))
        (remove-kinds '(:class))
        (dolist (accessor accessors)
          (guarded (remove-accessor accessor) (failure) (push accessor left)))
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
      (clrhash **loaded-file-states**)
      left)))
