;;;; Loading systems and files: the operation LOAD, and details for the report of an error during a load.

(in-package "SBCL-HOST/TOOLS")

;;; The progress of a load

(defstruct (load-progress (:conc-name progress-) (:copier nil) (:predicate nil))
  "The progress of a load."
  ;; FILES is the number of files that were loaded, and COMPILED is the number of files that were compiled.
  (files 0 :type index)
  (compiled 0 :type index)
  ;; The number of progress records that were pushed.
  (records 0 :type index)
  ;; The names of the systems whose files were loaded, newest first.
  (systems '() :type list))

(declaim (type (or null load-progress) *load-progress*))
(defvar *load-progress* nil
  "The progress of the current LOAD operation, or NIL if no LOAD operation is running.")

(defconstant +max-progress-records+ 4000
  "Maximum number of progress records of a load, so that there is room for the record of its result.")

(defun push-progress (verb what)
  "Push a progress record, unless the maximum is reached. VERB is a string such as `compiling'; WHAT names a file or system."
  (when (<= (incf (progress-records *load-progress*)) +max-progress-records+)
    (push-record "progress" :message (format nil "~A ~A" verb what))))

(defun record-asdf-action (operation component namestring)
  "Record that ASDF is about to perform OPERATION on COMPONENT, whose source file has the native namestring NAMESTRING."
  (let ((progress *load-progress*))
    (when progress
      (typecase operation
        (asdf:compile-op
         (incf (progress-compiled progress))
         (push-progress "compiling" (shown-path namestring)))
        ((or asdf:load-op asdf:load-source-op)
         (incf (progress-files progress))
         (pushnew (component-system-name component) (progress-systems progress) :test #'equal)
         (push-progress "loading" (shown-path namestring)))))))

(defvar *asdf-action* nil
  "The current action of ASDF, a cons of operation and component, or NIL.")

(defun perform-asdf-action (perform operation component)
  "Record that OPERATION on COMPONENT begins, and call PERFORM, which is ASDF's PERFORM-WITH-RESTARTS."
  (declare (type function perform))
  (let ((file (component-file component))
        (*asdf-action* (cons operation component))
        ;; Outside of LOAD, compile failures are reported as warnings only.
        (*compile-failures* (and *load-progress* (list nil))))
    (when file
      (record-asdf-action operation component file))
    (funcall perform operation component)))

;;; Definitions and values that remain after a reload

(defconstant +max-kept-value-notices+ 10
  "Maximum number of variables of one file that get notices of their own because they keep their values.")

(defconstant +max-names-length+ 1500
  "Maximum length of a list of definitions or variables, in characters. A notice has at most 2,000 characters.")

(defconstant +max-error-names-length+ 300
  "Maximum length of a list of definitions in the report of an error, in characters.")

(defun still-defined-p (kind name value)
  "Return true when a definition that a LOADED-FILE records still exists. KIND and NAME are the parts of the definition's
key. VALUE is the value that LOADED-FILE-DEFINITIONS has for the key, such as a method object."
  (ecase kind
    (:method (let* ((method (if (class-part-p value) (class-part-method value) value))
                    (generic (sb-mop:method-generic-function method)))
               (and generic (fboundp (first name)) (eq generic (fdefinition (first name))))))
    (:function (defined-p :function name))
    (:macro (and (symbolp name) (macro-function name)))
    (:compiler-macro (compiler-macro-function name))
    (:symbol-macro (eq :macro (sb-int:info :variable :kind name)))
    (:setf-expander (sb-int:info :setf :expander name))
    (:method-combination (defined-p :method-combination name))
    (:variable (member (sb-int:info :variable :kind name) '(:special :global)))
    (:constant (eq :constant (sb-int:info :variable :kind name)))
    (:class (find-class name nil))
    (:type (eq :defined (sb-int:info :type :kind name)))
    (:package (find-package name))))

(defun without-methods-p (name)
  "Return true unless NAME names a generic function that has methods."
  (let ((function (fdefinition name)))
    (not (and (typep function 'generic-function) (sb-mop:generic-function-methods function)))))

(defun defined-keys (file)
  "Return an EQUAL hash table of the keys of the definitions in FILE, a LOADED-FILE."
  (let ((keys (make-hash-table :test 'equal)))
    (loop for (key) in (loaded-file-definitions file)
          do (setf (gethash key keys) t))
    keys))

(defparameter *standard-defining-macros*
  '((:function "DEFUN" "DEFGENERIC") (:macro "DEFMACRO") (:compiler-macro "DEFINE-COMPILER-MACRO")
    (:symbol-macro "DEFINE-SYMBOL-MACRO") (:setf-expander "DEFSETF" "DEFINE-SETF-EXPANDER")
    (:method-combination "DEFINE-METHOD-COMBINATION")
    (:variable "DEFVAR" "DEFPARAMETER" "DEFGLOBAL" "DEFINE-LOAD-TIME-GLOBAL") (:constant "DEFCONSTANT")
    (:class "DEFCLASS" "DEFSTRUCT" "DEFINE-CONDITION") (:type "DEFTYPE") (:package "DEFPACKAGE"))
  "The names of the standard defining macros, by the kind of definition as in the keys of a LOADED-FILE.")

(defun standard-defining-macro-p (operator)
  "Return true when OPERATOR, a string, is the name of a standard defining macro."
  (loop for (nil . operators) in *standard-defining-macros*
          thereis (member operator operators :test #'string=)))

(defun conditional-definitions (text)
  "Return the maps (see FORM-MAP) of the forms in TEXT, a file's text, that may make a definition only under some condition:
defining forms within another form, and forms of defining macros that are not standard."
  (let ((definitions '()))
    (labels ((visit (form depth)
               (when (and (consp form) (< depth 20))
                 (when (and (definition-form-p form text)
                            (or (plusp depth)
                                (not (standard-defining-macro-p (token-name text (second form))))))
                   (push form definitions))
                 (dolist (element (rest form))
                   (visit element (1+ depth))))))
      (loop for start across (toplevel-starts text)
            do (visit (form-map text start) 0)))
    definitions))

(defun key-name (key)
  "Return the name of the symbol or package whose definition has KEY, a cons of kind and name; or NIL for a method."
  (destructuring-bind (kind . name) key
    (typecase name
      (string name)
      (symbol (symbol-name name))
      (cons (and (not (eq kind :method)) (symbolp (second name)) (symbol-name (second name)))))))

(defun conditionally-defined-p (key definitions text)
  "Return true when one of DEFINITIONS, which CONDITIONAL-DEFINITIONS found in TEXT, may make the definition with KEY."
  (destructuring-bind (kind . name) key
    (declare (ignore name))
    (let ((name (key-name key)))
      (and name
           (loop for form in definitions
                   thereis (let ((operator (token-name text (second form))))
                             (and (or (not (standard-defining-macro-p operator))
                                      (member operator (rest (assoc kind *standard-defining-macros*)) :test #'string=))
                                  (defines-p form text name))))))))

(defun renumbered-name-p (key before now text)
  "Return true when the name in KEY seems to contain a number that a macro generates in each load: the new load made a new
definition whose name differs from the name in KEY only in its digits, and does not occur in TEXT, the file's text.
BEFORE and NOW are the LOADED-FILEs of the previous and the new load."
  (flet ((stem (key) (remove-if #'digit-char-p (key-name key)))
         (home (key) (let ((symbol (function-name-symbol (cdr key))))
                       (and (symbolp symbol) (symbol-package symbol)))))
    (and (key-name key)
         (some #'digit-char-p (key-name key))
         (loop for (other) in (loaded-file-definitions now)
                 thereis (and (eq (car key) (car other))
                              (key-name other)
                              (eq (home key) (home other))
                              (string= (stem key) (stem other))
                              (not (assoc other (loaded-file-definitions before) :test #'equal))
                              (not (search (key-name other) text :test #'char-equal)))))))

(defun obsolete-definitions (namestring before now)
  "Return the keys of obsolete definitions, which the file NAMESTRING made in its previous load but not in its new load.
BEFORE and NOW are the LOADED-FILEs of these loads; NOW is NIL if the file's system no longer contains the file. A definition is
obsolete only if it still exists and the file was the last to make it. Omit the accessors of a class that is itself returned,
accessor functions that still have methods, and definitions that the file may make under some condition or with another number
in the name."
  (flet ((defined-here-p (key) (equal namestring (gethash key **last-definers**))))
    (let* ((known (if now (defined-keys now) (make-hash-table)))
           (left (remove-if-not (lambda (definition)
                                  (destructuring-bind ((kind . name) . value) definition
                                    (and (not (gethash (car definition) known))
                                         (not (member value '(:implied :proclaimed)))
                                         (defined-here-p (car definition))
                                         (or (not (class-part-p value))
                                             (defined-here-p (cons :class (class-part-class value))))
                                         (guarded (still-defined-p kind name value) (failure) nil))))
                                (loaded-file-definitions before)))
           (octets (and left now (file-octets namestring)))
           (text (and octets (octets-text octets 0 (length octets))))
           (conditional (and text (guarded (conditional-definitions text) (failure) '()))))
      (loop for (key . value) in left
            unless (or (and (class-part-p value)
                            (or (assoc (cons :class (class-part-class value)) left :test #'equal)
                                (and (eq :function (car key)) (not (without-methods-p (cdr key))))))
                       (conditionally-defined-p key conditional text)
                       (and text (renumbered-name-p key before now text)))
              collect key))))

(defun key-text (key)
  "Return a description of the definition with KEY, such as `function FOO'."
  (destructuring-bind (kind . name) key
    (with-server-syntax ()
      (format nil "~A ~A" (substitute #\Space #\- (string-downcase kind))
              (if (eq kind :method)
                  (destructuring-bind (function qualifiers specializers) name
                    (let ((*print-circle* t))
                      (format nil "~S~{ ~S~} ~S" function qualifiers
                              (mapcar (lambda (specializer)
                                        (if (typep specializer 'sb-mop:eql-specializer)
                                            (list 'eql (sb-mop:eql-specializer-object specializer))
                                            specializer))
                                      specializers))))
                  (prin1-to-string name))))))

(defun names-text (names &optional (max-length +max-names-length+))
  "Return a string that contains the first of NAMES, at least one and as many as fit in MAX-LENGTH characters, and the number
of further names."
  (let* ((left (+ max-length 2))
         (shown (max 1 (loop for name in names
                             while (<= 0 (decf left (+ 2 (length name))))
                             count t)))
         (more (- (length names) shown)))
    (format nil "~{~A~^, ~}~@[ and ~D more~]" (subseq names 0 shown) (and (plusp more) more))))

(defun report-obsolete-definitions (namestring before now)
  "Push a notice of the obsolete definitions of the file NAMESTRING, if there are any. BEFORE and NOW are as for
OBSOLETE-DEFINITIONS."
  (let ((left (obsolete-definitions namestring before now)))
    (when left
      (push-notice "The image still has definitions that ~A no longer contains: ~A." (shown-path namestring)
                   (names-text (mapcar #'key-text left))))))

(defun literal-value-p (form value)
  "Return true if FORM, the text of a form, is a literal number, string, keyword or boolean, and VALUE is equal to it."
  (and (typep value '(or fixnum float string keyword boolean))
       (string= form (with-server-syntax () (let ((*print-case* :downcase)) (prin1-to-string value))))))

(defun report-kept-values (namestring before now bound &optional earlier)
  "Push notices of variables that keep their values although their initial value forms in the file NAMESTRING have changed:
one for each of the first +MAX-KEPT-VALUE-NOTICES+, and one for all others. BEFORE and NOW are the LOADED-FILEs of the
previous and the new load. BOUND lists the variables that had values before the new load. If EARLIER, a native namestring,
is given, BEFORE is the LOADED-FILE of that file, and the variables may have values from other files."
  (let* ((kept (loop for (name operator . form) in (loaded-file-variables now)
                     for old = (cddr (assoc name (loaded-file-variables before)))
                     when (and old (string/= old form) (string/= operator "DEFPARAMETER") (member name bound) (boundp name)
                               (not (and earlier (literal-value-p form (symbol-value name)))))
                       collect (list* name operator form)))
         (others (nthcdr +max-kept-value-notices+ kept)))
    (loop for (name operator . form) in kept
          repeat +max-kept-value-notices+
          do (push-notice "~A ~4@*~:[keeps its value~;may keep an earlier value~]: its ~1@*~A in ~A ~4@*~:[has changed~;~
                           ~:*differs from that in ~A~], but ~1@*~A does not reassign a bound variable. To assign the ~
                           new value, in the file's package: (setf ~0@*~A ~3@*~A)."
                          (symbol-text name)
                          operator
                          (shown-path namestring)
                          (let ((line (substitute #\Space #\Newline form)))
                            (if (or (> (length line) +max-shown-line-length+)
                                    ;; On a single line, a comment would hide the rest of the form.
                                    (and (find #\; form) (find #\Newline form)))
                                "…"
                                line))
                          (and earlier (shown-path earlier))))
    (when others
      (push-notice "The same applies to ~:[these variables~;this variable~]: ~A."
                   (null (rest others)) (names-text (mapcar (lambda (variable) (symbol-text (car variable))) others))))))

(defun report-stale-definitions (reloaded)
  "Push notices of the values and definitions that remain from the old versions of the files in RELOADED. Each element of
RELOADED is a list as in *RELOADED-FILES*: a namestring, the previous and the new LOADED-FILE, and the bound variables."
  (flet ((same-text-p (file)
           (destructuring-bind (before now &rest bound) (rest file)
             (declare (ignore bound))
             (and (loaded-file-text-hash now)
                  (eql (loaded-file-text-hash before) (loaded-file-text-hash now))))))
    ;; If none of the texts has changed, definitions are missing only because the files make them under some condition. If one
    ;; has changed, another file may make other definitions with the macros of this file.
    (let ((changed (notevery #'same-text-p reloaded)))
      (loop for (namestring before now bound) in (reverse reloaded)
            do (guarded (report-kept-values namestring before now bound) (failure) nil)
               (when changed
                 (guarded (report-obsolete-definitions namestring before now) (failure) nil))))))

(defun removed-files ()
  "Return an alist of the files that were loaded as parts of systems that no longer contain them. Keys are native namestrings;
values are LOADED-FILEs. Omit files of systems that are not loaded, as after ASDF has forgotten a system."
  (let ((present (make-hash-table :test 'equal))
        (files (sb-ext:with-locked-hash-table (**loaded-files**)
                 (loop for namestring being the hash-keys of **loaded-files** using (hash-value file)
                       for name = (loaded-file-system file)
                       for system = (and name (asdf:registered-system name))
                       when system
                         collect (list namestring file system)))))
    (labels ((visit (component)
               (if (typep component 'asdf:parent-component)
                   (mapc #'visit (asdf:component-children component))
                   (let ((file (component-file component)))
                     ;; When the file from which ASDF inferred a system is deleted, ASDF keeps the system.
                     (when (and file
                                (or (not (typep (asdf:component-system component) 'asdf:package-inferred-system))
                                    (file-state file)))
                       (setf (gethash file present) t))))))
      ;; Another system may contain the file, too.
      (mapc #'visit (remove-duplicates (append (mapcar #'third files)
                                               (mapcar #'asdf:registered-system (already-loaded-systems))))))
    (loop for (namestring file system) in files
          unless (or (gethash namestring present) (not (asdf:component-loaded-p system)))
            collect (cons namestring file))))

(defun report-moved-variables (namestring file)
  "Push notices of variables that may keep earlier values because their initial value forms differ from those in the file
NAMESTRING, whose LOADED-FILE is FILE, and which its system no longer contains. Other files, as in another checkout of the
system, now define these variables."
  (let* ((names (mapcar #'car (loaded-file-variables file)))
         (definers (loop for name in names collect (gethash (cons :variable name) **last-definers**))))
    (dolist (definer (remove-duplicates definers :test #'equal))
      (let ((now (gethash definer **loaded-files**)))
        (when now
          (report-kept-values definer file now names namestring))))))

(defun containing-system-name (file)
  "Return the name of the system that contained FILE, a LOADED-FILE. If ASDF inferred a system from the file alone, return the
name of that system's primary system."
  (let ((name (loaded-file-system file)))
    (if (typep (asdf:registered-system name) 'asdf:package-inferred-system)
        (asdf:primary-system-name name)
        name)))

(defun report-removed-files ()
  "Push notices of the values and definitions that remain from each file that its system no longer contains, unless the
notices have been pushed before."
  (loop for (namestring . file) in (guarded (removed-files) (failure) '())
        do (let ((left (guarded (obsolete-definitions namestring file nil) (failure) '())))
             (guarded (report-moved-variables namestring file) (failure) nil)
             (when left
               (push-notice "The image still has definitions of ~A, a file that the system ~A no longer contains: ~A."
                            (shown-path namestring) (containing-system-name file) (names-text (mapcar #'key-text left))))
             (setf (loaded-file-system file) nil))))

;;; Loading systems

(defun source-file-count (component)
  "Return the number of Lisp source files in COMPONENT, an ASDF component."
  (typecase component
    (asdf:cl-source-file 1)
    (asdf:parent-component (loop for child in (asdf:component-children component) sum (source-file-count child)))
    (t 0)))

(defconstant +max-fetched-systems+ 100
  "Maximum number of systems that are requested from Quicklisp during one load.")

(defun quicklisp-loaded-p ()
  "Return true when Quicklisp is loaded."
  (let ((package (find-package "QL")))
    (and package (find-symbol "QUICKLOAD" package) t)))

(defun call-fetching-systems (function)
  "Return the values of FUNCTION, which performs an ASDF operation. If ASDF does not find a system and the user has loaded
Quicklisp, have Quicklisp load the system, and call FUNCTION again. Do so for up to +MAX-FETCHED-SYSTEMS+ systems."
  (declare (type function function))
  (let ((asked '()))
    (loop
      (let ((missing
              (block attempt
                (return
                  (handler-bind
                      ((asdf:missing-component
                         (lambda (condition)
                           (let ((name (asdf/find-component:missing-requires condition)))
                             (when (and (quicklisp-loaded-p)
                                        (typep name '(or string symbol))
                                        (< (length asked) +max-fetched-systems+)
                                        (not (member name asked :test #'string-equal)))
                               (return-from attempt name))))))
                    (funcall function))))))
        (push missing asked)
        (push-progress "fetching" (string-downcase missing))
        (uiop:symbol-call "QL" "QUICKLOAD" missing :silent t)))))

(defun fasl-stream-p (stream)
  "Return true when STREAM is open to a file of type fasl."
  (and (typep stream 'file-stream)
       (equal "fasl" (guarded (pathname-type (pathname stream)) (failure) nil))))

(defun truncated-fasl-p (condition)
  "Return true when CONDITION says that a fasl is truncated. SBCL reads a fasl with a truncated header as source, so
CONDITION may be a reader error in source."
  (typecase condition
    ((or end-of-file sb-c::input-error-in-load) (fasl-stream-p (stream-error-stream condition)))
    (simple-error (let ((control (simple-condition-format-control condition)))
                    (and (stringp control) (eql 0 (search "attempt to load an empty FASL" control)))))))

(defun unusable-fasl-p (condition)
  "Return true when CONDITION says that a fasl was made by another SBCL, or is incomplete."
  (or (typep condition 'sb-ext:invalid-fasl) (truncated-fasl-p condition)))

(defun call-recompiling-fasls (function)
  "Return the values of FUNCTION, which performs an ASDF operation. If a fasl was made by another SBCL or is incomplete,
compile its source again, at most once for each file."
  (declare (type function function))
  (let ((seen '()))
    (handler-bind
        ((error
           (lambda (condition)
             (let ((restart (and *loaded-file* (unusable-fasl-p condition)
                                 (find-restart 'asdf:try-recompiling condition))))
               (when (and restart (not (member *loaded-file* seen :test #'equal)))
                 (push *loaded-file* seen)
                 (when *load-progress*
                   (incf (progress-compiled *load-progress*))
                   (push-progress "compiling" (shown-path *loaded-file*)))
                 (invoke-restart restart))))))
      (funcall function))))

(defun load-system (name force)
  "Have ASDF load the system NAME, and return the system. If FORCE is true, load the system again even if it has not changed;
if FORCE is \"all\", load also its dependencies again."
  (call-fetching-systems
   (lambda ()
     (call-recompiling-fasls
      (lambda ()
        (apply #'asdf:load-system name
               (and force (list :force (if (equal force "all") :all t))))))))
  (asdf:registered-system name))

;;; Loading files

(defun native-pathname (namestring)
  "Return the pathname for the native namestring NAMESTRING, merged with *DEFAULT-PATHNAME-DEFAULTS*."
  (merge-pathnames (sb-ext:parse-native-namestring namestring)))

(defun load-source (file)
  "Load the source file FILE, a pathname, as one compilation unit."
  (with-compilation-unit ()
    (load file)))

(defun load-file (namestring)
  "Load the source file or fasl with the native namestring NAMESTRING. If a fasl was made by another SBCL, or is incomplete,
load its source, if there is one, instead."
  (let* ((file (native-pathname namestring))
         (source (make-pathname :type "lisp" :defaults file)))
    (push-progress "loading" (shown-path (sb-ext:native-namestring file)))
    (block done
      (handler-bind ((error
                       (lambda (condition)
                         (when (and (equal "fasl" (pathname-type file)) (unusable-fasl-p condition)
                                    (probe-file source))
                           (push-notice "~A ~:[was made by another SBCL~;is incomplete~]: its source is loaded instead."
                                        (shown-path (sb-ext:native-namestring file)) (truncated-fasl-p condition))
                           (return-from done (load-source source))))))
        (load-source file)))))

;;; The operation LOAD

(defun search-definition-entries (search system)
  "Call SEARCH, ASDF's function that searches ASDF:*CENTRAL-REGISTRY* for the .asd file of SYSTEM, and return its value. If an
entry (VALUES directory primary-system file) is for SYSTEM, return FILE unless ASDF finds a file in a directory before this
entry. For ASDF, the entry is only a directory, in which it does not find files that are not named like their systems."
  (declare (type function search))
  (let* ((primary (asdf:primary-system-name system))
         (place (member-if (lambda (entry)
                             (and (typep entry '(cons (eql values))) (equal primary (third entry))
                                  (probe-file (fourth entry))))
                           asdf:*central-registry*)))
    (or (and place
             (or (let ((asdf:*central-registry* (ldiff asdf:*central-registry* place)))
                   (funcall search system))
                 (probe-file (fourth (first place)))))
        (funcall search system))))

(defun register-definition (system directory definition fallback)
  "Have ASDF search DIRECTORY first, or have SEARCH-DEFINITION-ENTRIES find the .asd file DEFINITION first. DIRECTORY and
DEFINITION are native namestrings, or NIL. If FALLBACK is true, do nothing if ASDF already finds SYSTEM. Return true if
DIRECTORY or DEFINITION was used."
  (when (and (or directory definition)
             (not (and fallback (asdf:find-system system nil))))
    (let ((entry (if directory
                     (sb-ext:parse-native-namestring directory nil *default-pathname-defaults* :as-directory t)
                     (let ((file (sb-ext:parse-native-namestring definition)))
                       (list 'values
                             (make-pathname :name nil :type nil :version nil :defaults file)
                             (asdf:primary-system-name system)
                             file)))))
      (setf asdf:*central-registry* (cons entry (remove entry asdf:*central-registry* :test #'equal))))
    t))

(defun known-system-name (name)
  "Return the name by which ASDF knows the system that a user calls NAME. Return NAME if ASDF finds a system with this name.
Otherwise try NAME in lower case, to which ASDF also converts symbols, and then the only known system whose name differs from
NAME only in case. If there is no such system, return NAME."
  (let ((lower (string-downcase name)))
    (flet ((found-p (name)
             (or (asdf:registered-system name)
                 ;; Do not load the .asd file yet, because it may depend on systems that must be fetched first.
                 (and (asdf:locate-system (asdf:primary-system-name name))
                      (or (string= name lower) (not (find #\/ name)) (asdf:find-system name nil))))))
      (cond ((found-p name) name)
            ((and (string/= name lower) (found-p lower)) lower)
            (t (let ((alike (remove-duplicates (remove name (known-systems) :test-not #'string-equal) :test #'string=)))
                 (if (= 1 (length alike)) (first alike) name)))))))

(defun asd-file (system)
  "Return the native namestring of the .asd file that defines SYSTEM, or NIL if there is none. The systems that ASDF infers
from the source files of a package-inferred system have no source file of their own, but their primary system has."
  (let ((file (or (asdf:system-source-file system)
                  (let ((primary (asdf:registered-system (asdf:primary-system-name system))))
                    (and primary (asdf:system-source-file primary))))))
    (and file (sb-ext:native-namestring file))))

(defvar *searched-locations* '()
  "The locations, besides ASDF's, in which the host has searched for the system: a list of strings.")

(define-operation :load (evaluate &key system path force directory definition fallback looked)
  "Load SYSTEM or the file PATH. FORCE is \"self\" to load SYSTEM again even if it has not changed, \"all\" to load also its
dependencies again, or NIL. DIRECTORY, DEFINITION and FALLBACK are as for REGISTER-DEFINITION, which is called first. LOOKED
lists the locations, besides ASDF's, in which the host has searched for SYSTEM."
  (let ((*load-progress* (make-load-progress))
        (*reloaded-files* (list '()))
        (*report-severities* t)
        (*searched-locations* looked)
        (begin (monotonic-milliseconds)))
    (push-record "loading" :name (or system (shown-path path)))
    (let* ((found (and system (register-definition system directory definition fallback)))
           (system (and system (known-system-name system)))
           ;; Report even if the load fails: the next load does not report on files that this load has loaded.
           (loaded (unwind-protect (if system (load-system system force) (progn (load-file path) nil))
                     (report-stale-definitions (car *reloaded-files*))))
           (progress *load-progress*)
           (others (remove (and loaded (asdf:primary-system-name loaded)) (reverse (progress-systems progress))
                           :test #'equal)))
      (when loaded
        (report-removed-files))
      (push-record "loaded" :name (or system (shown-path path))
                            :files (if system (progress-files progress) 1)
                            :compiled (and system (progress-compiled progress))
                            :present (and loaded (zerop (progress-files progress)) (zerop (progress-compiled progress))
                                          (source-file-count loaded))
                            :definition (let ((file (and found loaded (asd-file loaded))))
                                          (and file (shown-path file)))
                            :systems (and others (format nil "~{~A~^, ~}" others))
                            :milliseconds (values (round (- (monotonic-milliseconds) begin)))))
    '()))

;;; Details for reports of errors during a load

(defun searched-directories ()
  "Return the native namestrings of the existing directories in which ASDF searches for systems."
  (remove-duplicates
   (loop for directory in (append (mapcar (lambda (entry) (ignore-errors (pathname (eval entry))))
                                          asdf:*central-registry*)
                                  (mapcar #'first (ignore-errors (asdf/source-registry::flatten-source-registry))))
         when (and directory (ignore-errors (probe-file directory)))
           collect (sb-ext:native-namestring directory))
   :test #'equal :from-end t))

(defun known-systems ()
  "Return the names of the systems that ASDF knows."
  (append (asdf:registered-systems)
          (and (hash-table-p asdf/source-registry:*source-registry*)
               (loop for name being the hash-keys of asdf/source-registry:*source-registry* collect name))))

(defun fetching-advice (name)
  "Return advice on how to fetch the system NAME, which is not on this machine, or a sentence that says that the system cannot
be fetched."
  (flet ((home-file (name) (guarded (probe-file (merge-pathnames name (user-homedir-pathname))) (failure) nil)))
    (let ((quicklisp (home-file "quicklisp/setup.lisp"))
          (ocicl (home-file ".local/share/ocicl/ocicl-runtime.lisp")))
      (cond ((quicklisp-loaded-p)
             (with-server-syntax ()
               (format nil "Check the system's name. To fetch the system with Quicklisp: (ql:quickload ~S)" name)))
            ((find-package "OCICL-RUNTIME")
             "Check the system's name: OCICL, which is loaded in this image, did not find the system either.")
            (quicklisp
             (with-server-syntax ()
               (format nil "To fetch the system, evaluate (load ~S), which loads Quicklisp, and then ~
                            ~:[(ql:quickload ~S)~;load the system again~]."
                       (sb-ext:native-namestring quicklisp)
                       ;; Only the operation LOAD makes Quicklisp fetch systems: ASDF:LOAD-SYSTEM does not.
                       *load-progress*
                       name)))
            (ocicl
             (with-server-syntax ()
               (format nil "To fetch the system, evaluate (load ~S), which loads OCICL, and then load the system again."
                       (sb-ext:native-namestring ocicl))))
            (t
             (format nil "Check the system's name and the directory of its .asd file. The system cannot be fetched, because ~
                          neither Quicklisp nor OCICL is loaded in this image or found in the user's home directory."))))))

(defun missing-system-hint (condition)
  "Return a hint for CONDITION, an ASDF:MISSING-COMPONENT condition, that says where the system was searched and how to fetch
it. Return NIL unless the missing component is a system that ASDF does not know."
  (let ((name (asdf/find-component:missing-requires condition)))
    (when (and (typep name '(or string symbol))
               (null (asdf/find-component:missing-parent condition))
               (not (asdf:registered-system name)))
      (let ((near (similar-names (string-downcase name) (known-systems)))
            (directories (append *searched-locations* (searched-directories))))
        (format nil "~@[~A~%~]~:[ASDF has no directories to search.~*~;~:*Not found in ~{~A~^, ~}~@[ and ~D more~].~]~
                     ~%~A"
                (suggestion near)
                (subseq directories 0 (min 8 (length directories)))
                (and (> (length directories) 8) (- (length directories) 8))
                (fetching-advice (string-downcase name)))))))

(defun definitions-so-far ()
  "Return descriptions, as from KEY-TEXT, of the definitions that the file being loaded has made so far. Omit accessors and
other parts of classes."
  (when *file-definitions*
    (note-class-parts)
    (loop for key being the hash-keys of *file-definitions* using (hash-value value)
          unless (or (class-part-p value) (member value '(:implied :proclaimed)))
            collect (key-text key))))

(defun push-load-failure (condition)
  "Push details of a load for the report of CONDITION, each on a line of its own: missing systems, compile failures, ASDF's
current action, and definitions made before the error."
  (flet ((push-line (control &rest arguments)
           (event *job-id* (event-code :error-text) 0
                  (with-server-syntax () (format nil "~%~?" control arguments)))))
    (typecase condition
      (asdf:missing-component
       (let ((hint (guarded (missing-system-hint condition) (failure) nil)))
         (when hint
           (push-line "~A" hint))))
      (uiop:compile-file-error
       (loop for (type cause file line column form) in (rest (reverse *compile-failures*))
             do (push-line "~@[~A~]~:[:~D~;~*~]~:[:~D~;~*~]~@[ in ~A~]: ~A: "
                           file (eql 0 line) line (eql 0 column) column form type)
                (if (stringp cause)
                    (event *job-id* (event-code :error-text) 0 cause)
                    (push-report (event-code :error-text) cause))))
      (t
       (when (and *asdf-action* (null (guarded (file-hint condition) (failure) nil)))
         (push-line "ASDF was ~A." (asdf:action-description (car *asdf-action*) (cdr *asdf-action*))))))
    (let ((defined (and *load-progress* (guarded (definitions-so-far) (failure) '()))))
      (when defined
        (push-line "Definitions that ~A made before the error remain: ~A."
                   (shown-path *loaded-file*) (names-text defined +max-error-names-length+))))))

(add-error-details 'push-load-failure)
