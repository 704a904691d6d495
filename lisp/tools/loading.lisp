;;;; Loading systems and files: the operation LOAD, and what the report of an error adds that happened while something was
;;;; loaded.

(in-package "SBCL-HOST/TOOLS")

;;; What is done

(defstruct (load-report (:conc-name report-) (:copier nil) (:predicate nil))
  "What a load has done so far."
  (files 0 :type index)
  (compiled 0 :type index)
  ;; How often it was told how far it is.
  (told 0 :type index)
  ;; The names of the systems that files were loaded of, newest first.
  (systems '() :type list))

(declaim (type (or null load-report) *load-report*))
(defvar *load-report* nil
  "What the operation LOAD has done so far; NIL outside of it.")

(defconstant +told-progress+ 4000
  "How often a load tells how far it is, so that there is room for what it comes to.")

(defun push-progress (verb what)
  "Push that WHAT, a string, is now being worked at, VERB saying how."
  (when (<= (incf (report-told *load-report*)) +told-progress+)
    (push-record "progress" :message (format nil "~A ~A" verb what))))

(defun note-action (operation component namestring)
  "Note that ASDF is about to perform OPERATION with COMPONENT, the source file NAMESTRING."
  (let ((report *load-report*))
    (when report
      (typecase operation
        (asdf:compile-op
         (incf (report-compiled report))
         (push-progress "compiling" (shown-path namestring)))
        ((or asdf:load-op asdf:load-source-op)
         (incf (report-files report))
         (pushnew (component-system-name component) (report-systems report) :test #'equal)
         (push-progress "loading" (shown-path namestring)))))))

(defvar *action* nil
  "What ASDF is doing: a cons of an operation and a component; or NIL.")

(defun perform-action (perform operation component)
  "What ASDF's PERFORM-WITH-RESTARTS, PERFORM, does, and notes how far it is."
  (declare (type function perform))
  (let ((file (component-file component))
        (*action* (cons operation component))
        ;; In other answers they are told as warnings alone.
        (*compile-failures* (and *load-report* (list nil))))
    (when file
      (note-action operation component file))
    (funcall perform operation component)))

;;; What was loaded before and is no more as it was

(defconstant +stale-names+ 10
  "How many names are told of one file.")

(defun there-p (kind name value)
  "True when what KIND and NAME are the key of, as in a LOADED-FILE, and VALUE is known of, is still there."
  (ecase kind
    (:method (let* ((method (if (part-p value) (part-method value) value))
                    (generic (sb-mop:method-generic-function method)))
               (and generic (fboundp (first name)) (eq generic (fdefinition (first name))))))
    (:function (defined-p :function name))
    (:macro (and (symbolp name) (macro-function name)))
    (:compiler-macro (compiler-macro-function name))
    (:symbol-macro (eq :macro (sb-int:info :variable :kind name)))
    (:setf-expander (sb-int:info :setf :expander name))
    (:variable (member (sb-int:info :variable :kind name) '(:special :global)))
    (:constant (eq :constant (sb-int:info :variable :kind name)))
    (:class (find-class name nil))
    (:type (eq :defined (sb-int:info :type :kind name)))
    (:package (find-package name))))

(defun without-methods-p (name)
  "True when NAME is not that of a generic function that has methods."
  (let ((function (fdefinition name)))
    (not (and (typep function 'generic-function) (sb-mop:generic-function-methods function)))))

(defun defined-keys (file)
  "Return an EQUAL hash table of the keys of what FILE, a LOADED-FILE, defines."
  (let ((keys (make-hash-table :test 'equal)))
    (loop for (key) in (loaded-file-definitions file)
          do (setf (gethash key keys) t))
    keys))

(defparameter *definers*
  '((:function "DEFUN" "DEFGENERIC") (:macro "DEFMACRO") (:compiler-macro "DEFINE-COMPILER-MACRO")
    (:symbol-macro "DEFINE-SYMBOL-MACRO") (:setf-expander "DEFSETF" "DEFINE-SETF-EXPANDER")
    (:variable "DEFVAR" "DEFPARAMETER" "DEFGLOBAL") (:constant "DEFCONSTANT")
    (:class "DEFCLASS" "DEFSTRUCT" "DEFINE-CONDITION") (:type "DEFTYPE") (:package "DEFPACKAGE"))
  "The names of the standard macros that define by kind, as in a LOADED-FILE.")

(defun standard-definer-p (operator)
  "True when OPERATOR, a name, is that of a standard macro that defines."
  (loop for (nil . operators) in *definers*
          thereis (member operator operators :test #'string=)))

(defun conditional-definitions (text)
  "Return the maps of those forms in TEXT, a file's, that may define something only where it is not defined already: within
another form, or by a macro that is not standard."
  (let ((definitions '()))
    (labels ((visit (form depth)
               (when (and (consp form) (< depth 20))
                 (when (and (definition-form-p form text)
                            (or (plusp depth)
                                (not (standard-definer-p (token-name text (second form))))))
                   (push form definitions))
                 (dolist (element (rest form))
                   (visit element (1+ depth))))))
      (loop for start across (toplevel-starts text)
            do (visit (map-form text start) 0)))
    definitions))

(defun key-name (key)
  "Return the name of the symbol or package that KEY names, or NIL for a method's."
  (destructuring-bind (kind . name) key
    (typecase name
      (string name)
      (symbol (symbol-name name))
      (cons (and (not (eq kind :method)) (symbolp (second name)) (symbol-name (second name)))))))

(defun conditionally-defined-p (key definitions text)
  "True when one of DEFINITIONS, as CONDITIONAL-DEFINITIONS finds them in TEXT, is of what KEY names."
  (destructuring-bind (kind . name) key
    (declare (ignore name))
    (let ((name (key-name key)))
      (and name
           (loop for form in definitions
                   thereis (let ((operator (token-name text (second form))))
                             (and (or (not (standard-definer-p operator))
                                      (member operator (rest (assoc kind *definers*)) :test #'string=))
                                  (defines-p form text name))))))))

(defun numbered-again-p (key before now text)
  "True when KEY names what a file defined BEFORE, a LOADED-FILE, under a name with a number that a macro has made up, and
which has got another number NOW: one that TEXT, the file's, does not have."
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

(defun left-definitions (namestring before now)
  "Return the keys of what the file NAMESTRING, native, defined BEFORE, a LOADED-FILE, and does not NOW, where it was the
last to define it and that is still there. What a class brings along goes with it, and a function that was defined by its
methods alone with those."
  (flet ((defined-here-p (key) (equal namestring (gethash key **last-definers**))))
    (let* ((known (defined-keys now))
           (left (remove-if-not (lambda (definition)
                                  (destructuring-bind ((kind . name) . value) definition
                                    (and (not (gethash (car definition) known))
                                         (not (member value '(:implied :proclaimed)))
                                         (defined-here-p (car definition))
                                         (or (not (part-p value)) (defined-here-p (cons :class (part-of value))))
                                         (guarded (there-p kind name value) (failure) nil))))
                                (loaded-file-definitions before)))
           (octets (and left (file-octets namestring)))
           (text (and octets (octets-text octets 0 (length octets))))
           (conditional (and text (guarded (conditional-definitions text) (failure) '()))))
      (loop for (key . value) in left
            unless (or (and (part-p value)
                            (or (assoc (cons :class (part-of value)) left :test #'equal)
                                (and (eq :function (car key)) (not (without-methods-p (cdr key))))))
                       (conditionally-defined-p key conditional text)
                       (and text (numbered-again-p key before now text)))
              collect key))))

(defun key-text (key)
  "Return what to call what KEY names."
  (destructuring-bind (kind . name) key
    (with-server-syntax ()
      (format nil "~A ~A" (substitute #\Space #\- (string-downcase kind))
              (if (eq kind :method)
                  (destructuring-bind (function qualifiers specializers) name
                    (format nil "~S~{ ~S~} ~S" function qualifiers specializers))
                  (prin1-to-string name))))))

(defun first-names (names)
  "Return a text with the first NAMES and the number of the others."
  (let ((more (- (length names) +stale-names+)))
    (format nil "~{~A~^, ~}~@[ and ~D more~]" (subseq names 0 (min +stale-names+ (length names)))
            (and (plusp more) more))))

(defun tell-left-definitions (namestring before now)
  "Say what the file NAMESTRING defined BEFORE, a LOADED-FILE, and does not NOW."
  (let ((left (left-definitions namestring before now)))
    (when left
      (say "~A no longer defines what is still there from before: ~A." (shown-path namestring)
           (first-names (mapcar #'key-text left))))))

(defun tell-kept-values (namestring before now bound)
  "Say which of the variables BOUND before the file NAMESTRING was loaded again keep their values though the forms have
changed that give them."
  (loop for (name . form) in (loaded-file-variables now)
        for old = (cdr (assoc name (loaded-file-variables before)))
        for told from 0
        when (and old (string/= old form) (member name bound) (boundp name))
          do (when (= told +stale-names+)
               (return))
             (say "~A keeps the value that it had: its DEFVAR in ~A has changed, and gives none to a variable that has one. ~
                   (setf ~:*~:*~A ~*~A) does."
                  (symbol-text name) (shown-path namestring)
                  (let ((line (substitute #\Space #\Newline form)))
                    (if (> (length line) +shown-line+) "…" line)))))

(defun tell-stale (reloaded)
  "Say what is left of the old versions of the files RELOADED, as in *RELOADED-FILES*."
  (loop for (namestring before now bound) in (reverse reloaded)
        do (guarded (tell-kept-values namestring before now bound) (failure) nil)
           (guarded (tell-left-definitions namestring before now) (failure) nil)))

;;; Systems

(defun source-files (component)
  "Return how many source files of Lisp COMPONENT, of ASDF's, consists of."
  (typecase component
    (asdf:cl-source-file 1)
    (asdf:parent-component (loop for child in (asdf:component-children component) sum (source-files child)))
    (t 0)))

(defconstant +fetched-systems+ 100
  "How many systems Quicklisp is asked for on behalf of one.")

(defun quicklisp-p ()
  "True when Quicklisp is loaded."
  (let ((package (find-package "QL")))
    (and package (find-symbol "QUICKLOAD" package) t)))

(defun call-fetching (function)
  "Return the values of FUNCTION, which has ASDF do something. What ASDF does not find Quicklisp is asked for, if the user
has loaded that; then FUNCTION is called again."
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
                             (when (and (quicklisp-p)
                                        (typep name '(or string symbol))
                                        (< (length asked) +fetched-systems+)
                                        (not (member name asked :test #'string-equal)))
                               (return-from attempt name))))))
                    (funcall function))))))
        (push missing asked)
        (push-progress "fetching" (string-downcase missing))
        (uiop:symbol-call "QL" "QUICKLOAD" missing :silent t)))))

(defun fasl-stream-p (stream)
  "True when STREAM reads a fasl."
  (and (typep stream 'file-stream)
       (equal "fasl" (guarded (pathname-type (pathname stream)) (failure) nil))))

(defun cut-fasl-p (condition)
  "True when CONDITION is that a fasl ends too early: in its code, or in its header, without which it is read as source."
  (typecase condition
    ((or end-of-file sb-c::input-error-in-load) (fasl-stream-p (stream-error-stream condition)))
    (simple-error (let ((control (simple-condition-format-control condition)))
                    (and (stringp control) (eql 0 (search "attempt to load an empty FASL" control)))))))

(defun unusable-fasl-p (condition)
  "True when CONDITION is that a fasl is not of this SBCL, or not whole."
  (or (typep condition 'sb-ext:invalid-fasl) (cut-fasl-p condition)))

(defun call-compiling-anew (function)
  "Return the values of FUNCTION, which has ASDF load something. A fasl that is not of this SBCL, or not whole, is made
anew, once."
  (declare (type function function))
  (let ((seen '()))
    (handler-bind
        ((error
           (lambda (condition)
             (let ((restart (and *loaded-file* (unusable-fasl-p condition)
                                 (find-restart 'asdf:try-recompiling condition))))
               (when (and restart (not (member *loaded-file* seen :test #'equal)))
                 (push *loaded-file* seen)
                 (when *load-report*
                   (incf (report-compiled *load-report*))
                   (push-progress "compiling" (shown-path *loaded-file*)))
                 (invoke-restart restart))))))
      (funcall function))))

(defun load-system (name force)
  "Have ASDF load the system NAME, and return it."
  (call-fetching
   (lambda ()
     (call-compiling-anew
      (lambda ()
        (apply #'asdf:load-system name
               (and force (list :force (if (equal force "all") :all t))))))))
  (asdf:registered-system name))

;;; Files

(defun native-pathname (namestring)
  "Return the pathname of the file with this native namestring, in the current directory if it is relative."
  (merge-pathnames (sb-ext:parse-native-namestring namestring)))

(defun load-source (file)
  "Load the source file FILE, a pathname, as one compilation unit."
  (with-compilation-unit ()
    (load file)))

(defun load-file (namestring)
  "Load the source file or fasl NAMESTRING, native. In place of a fasl of another SBCL, or of a part of one, its source
is loaded."
  (let* ((file (native-pathname namestring))
         (source (make-pathname :type "lisp" :defaults file)))
    (push-progress "loading" (shown-path (sb-ext:native-namestring file)))
    (block done
      (handler-bind ((error
                       (lambda (condition)
                         (when (and (equal "fasl" (pathname-type file)) (unusable-fasl-p condition)
                                    (probe-file source))
                           (say "~A ~:[was made by another SBCL~;is not whole~]: its source was loaded in its place."
                                (shown-path (sb-ext:native-namestring file)) (cut-fasl-p condition))
                           (return-from done (load-source source))))))
        (load-source file)))))

;;; The operation

(defun find-definition (system directory definition fallback)
  "Have ASDF look for SYSTEM in DIRECTORY first, a native namestring, or NIL; and know what the .asd file DEFINITION
defines, or NIL; with FALLBACK only if it knows no such system. Return true if that was done."
  (when (and (or directory definition)
             (not (and fallback (asdf:find-system system nil))))
    (when directory
      (pushnew (sb-ext:parse-native-namestring directory nil *default-pathname-defaults* :as-directory t)
               asdf:*central-registry* :test #'equal))
    (when definition
      ;; Otherwise ASDF takes the file for the definition of a system of its own name, and would load it again.
      (asdf:load-asd (sb-ext:parse-native-namestring definition) :name (asdf:primary-system-name system)))
    t))

(defun system-in-any-case (name)
  "Return the name of the system that ASDF finds by NAME, or by that in lower case, as of a symbol; else of the only one that
it knows by it in another case; else NAME."
  (let ((lower (string-downcase name)))
    (flet ((found-p (name)
             (or (asdf:registered-system name)
                 ;; What it depends on may still have to be fetched: it is not loaded for this.
                 (and (asdf:locate-system (asdf:primary-system-name name))
                      (or (string= name lower) (not (find #\/ name)) (asdf:find-system name nil))))))
      (cond ((found-p name) name)
            ((and (string/= name lower) (found-p lower)) lower)
            (t (let ((alike (remove-duplicates (remove name (known-systems) :test-not #'string-equal) :test #'string=)))
                 (if (= 1 (length alike)) (first alike) name)))))))

(defvar *looked-in* '()
  "Where the host has looked for a system besides: a list of strings.")

(define-operation :load (evaluate &key system path force directory definition fallback looked)
  "Load SYSTEM, by FORCE (self or all, or NIL), after the .asd files in DIRECTORY were made known or the .asd file
DEFINITION was loaded, if any, and with FALLBACK only if there is no such system otherwise; or the file PATH. LOOKED says
where else SYSTEM was looked for."
  (let ((*load-report* (make-load-report))
        (*reloaded-files* (list '()))
        (*severities* t)
        (*looked-in* looked)
        (begin (monotonic-milliseconds)))
    (push-record "loading" :name (or system (shown-path path)))
    (let* ((found (and system (find-definition system directory definition fallback)))
           (system (and system (system-in-any-case system)))
           (loaded (if system (load-system system force) (progn (load-file path) nil)))
           (report *load-report*)
           (others (remove (and loaded (asdf:primary-system-name loaded)) (reverse (report-systems report))
                           :test #'equal)))
      (tell-stale (car *reloaded-files*))
      (push-record "loaded" :name (or system (shown-path path))
                            :files (if system (report-files report) 1)
                            :compiled (and system (report-compiled report))
                            :present (and loaded (zerop (report-files report)) (zerop (report-compiled report))
                                          (source-files loaded))
                            :definition (and found
                                             (shown-path (sb-ext:native-namestring (asdf:system-source-file loaded))))
                            :systems (and others (format nil "~{~A~^, ~}" others))
                            :milliseconds (values (round (- (monotonic-milliseconds) begin)))))
    '()))

;;; What the report of an error adds

(defun searched-directories ()
  "Return the native namestrings of those directories that exist and ASDF looks for systems in."
  (remove-duplicates
   (loop for directory in (append (mapcar (lambda (entry) (ignore-errors (pathname (if (symbolp entry) (eval entry) entry))))
                                          asdf:*central-registry*)
                                  (mapcar #'first (ignore-errors (asdf/source-registry::flatten-source-registry))))
         when (and directory (ignore-errors (probe-file directory)))
           collect (sb-ext:native-namestring directory))
   :test #'equal :from-end t))

(defun known-systems ()
  "Return the names of the systems that ASDF knows of."
  (append (asdf:registered-systems)
          (and (hash-table-p asdf/source-registry:*source-registry*)
               (loop for name being the hash-keys of asdf/source-registry:*source-registry* collect name))))

(defun fetching-advice ()
  "Return a sentence that says how a system that is not on this machine is fetched."
  (flet ((home-file (name) (guarded (probe-file (merge-pathnames name (user-homedir-pathname))) (failure) nil)))
    (let ((quicklisp (home-file "quicklisp/setup.lisp"))
          (ocicl (home-file ".local/share/ocicl/ocicl-runtime.lisp")))
      (cond ((or (quicklisp-p) (find-package "OCICL-RUNTIME"))
             "It could not be fetched either.")
            ((or quicklisp ocicl)
             (with-server-syntax ()
               (format nil "(load ~S) loads ~:[OCICL~;Quicklisp~], which fetches it."
                       (sb-ext:native-namestring (or quicklisp ocicl)) quicklisp)))
            (t "Neither Quicklisp nor OCICL is installed for this user, to fetch it.")))))

(defun missing-system-hint (condition)
  "Return what helps with CONDITION, that ASDF does not find a system, or NIL if it is about something else."
  (let ((name (asdf/find-component:missing-requires condition)))
    (when (and (typep name '(or string symbol))
               (null (asdf/find-component:missing-parent condition))
               (not (asdf:registered-system name)))
      (let ((near (near-names (string-downcase name) (known-systems)))
            (directories (append *looked-in* (searched-directories))))
        (format nil "~@[~A~%~]~:[ASDF looks nowhere: it has no directories.~;~:*Not found in ~{~A~^, ~}~@[ and ~D more~].~]~
                     ~%~A"
                (suggestion near)
                (subseq directories 0 (min 8 (length directories)))
                (and (> (length directories) 8) (- (length directories) 8))
                (fetching-advice))))))

(defun definitions-so-far ()
  "Return the definitions so far of the file that is being loaded, as texts. Accessors and the like of classes are left out."
  (when *file-definitions*
    (note-parts)
    (loop for key being the hash-keys of *file-definitions* using (hash-value value)
          unless (or (part-p value) (member value '(:implied :proclaimed)))
            collect (key-text key))))

(defun push-load-failure (condition)
  "Push what the report of CONDITION adds that happened while something was loaded, as lines of their own."
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
       (when (and *action* (null (guarded (file-hint condition) (failure) nil)))
         (push-line "ASDF was ~A." (asdf:action-description (car *action*) (cdr *action*))))))
    (let ((defined (and *load-report* (guarded (definitions-so-far) (failure) '()))))
      (when defined
        (push-line "What ~A had defined before stays: ~A." (shown-path *loaded-file*) (first-names defined))))))

(add-error-details 'push-load-failure)
