;;;; Hints that are added to the report of an error: similar names, and explanations for errors whose own message does
;;;; not name the cause.

(in-package "SBCL-HOST/DEBUGGER")

(defun symbol-text (symbol)
  "Return SYMBOL as source text, with a package prefix if it needs one in the current package."
  (with-server-syntax () (prin1-to-string symbol)))

(defun near-symbols (name package test)
  "Return up to five symbols that satisfy TEST, as source text: first the symbols that other packages export as NAME, a
string, then symbols with similar names that are accessible in PACKAGE."
  (declare (type function test))
  (let ((elsewhere '()))
    ;; A keyword is external and bound, but never what the user meant.
    (dolist (other (remove (find-package "KEYWORD") (list-all-packages)))
      (multiple-value-bind (symbol status) (find-symbol name other)
        (when (and (eq status :external) (funcall test symbol))
          (pushnew symbol elsewhere))))
    (let ((near (remove-duplicates
                 (append (sort (mapcar #'symbol-text elsewhere) #'string<)
                         (mapcar (lambda (name) (symbol-text (find-symbol name package)))
                                 (similar-symbol-names name package test)))
                 :test #'string= :from-end t)))
      (subseq near 0 (min 5 (length near))))))

(defun suggestion (near)
  "Return a question that suggests the names in NEAR, a list of strings. Return NIL if NEAR is empty."
  (and near (format nil "Did you mean ~{~A~^, ~}?" near)))

(defun symbol-suggestion (symbol test)
  "Return a question that suggests symbols that satisfy TEST and have names similar to that of SYMBOL. Return NIL if there
are no such symbols, or if SYMBOL is not a symbol."
  (and (symbolp symbol)
       (suggestion (remove (symbol-text symbol)
                           (near-symbols (symbol-name symbol) (or (symbol-package symbol) (current-package)) test)
                           :test #'string=))))

(defun class-suggestion (name)
  "Return a question that suggests classes with names similar to NAME, or NIL if there are none."
  (symbol-suggestion name (lambda (symbol) (find-class symbol nil))))

(defun package-error-hint (condition)
  "Return a question that suggests similar symbols or packages for CONDITION, a package error, or NIL."
  (let ((package (package-error-package condition))
        (arguments (and (typep condition 'simple-condition) (simple-condition-format-arguments condition)))
        (control (and (typep condition 'simple-condition) (simple-condition-format-control condition))))
    (cond ((and (packagep package) (typep condition '(or reader-error sb-ext:package-lock-violation))
                (stringp (first arguments)))
           ;; The name is the first argument. The package is locked, or has no symbol or only an internal one with this name.
           (let ((near (remove (format nil "~A:~A" (package-name package) (first arguments))
                               (near-symbols (first arguments) package
                                             (lambda (symbol)
                                               (eq :external
                                                   (nth-value 1 (find-symbol (symbol-name symbol) package)))))
                               :test #'string=)))
             (multiple-value-bind (symbol internal) (find-symbol (first arguments) package)
               (suggestion (if internal (adjoin (symbol-text symbol) near :test #'string=) near)))))
          ((and (typep package '(or string symbol character))
                (not (find-package package))
                (not (and (stringp control) (search "Did you mean" control))))
           (suggestion (similar-names (string package) (package-names)))))))

(defun old-layout-p (object)
  "Return true when OBJECT is an instance of a structure class that was redefined after OBJECT was made."
  (and (sb-kernel:%instancep object)
       (not (typep object 'standard-object))
       (sb-kernel::layout-invalid (sb-kernel:%instance-layout object))
       t))

(defun old-layout-hint (object)
  "Return advice on OBJECT, a structure instance whose layout is obsolete."
  (format nil "The object was made with an earlier definition of ~A, which had another layout: create the object again."
          (symbol-text (sb-kernel:classoid-name
                        (sb-kernel:layout-classoid (sb-kernel:%instance-layout object))))))

(defun redefined-structure (condition)
  "If CONDITION reports an attempt to redefine a structure class incompatibly, return the name of the class; else NIL."
  (and (typep condition 'simple-error)
       (let ((control (simple-condition-format-control condition)))
         (and (stringp control)
              (search "attempt to redefine the ~S class ~S incompatibly" control)
              (second (simple-condition-format-arguments condition))))))

(defun condition-hint (condition)
  "Return a hint that explains CONDITION or suggests similar names, or NIL."
  (typecase condition
    (undefined-function
     (let ((name (cell-error-name condition)))
       (if (consp name)
           (symbol-suggestion (second name) (lambda (symbol) (fboundp (list 'setf symbol))))
           (symbol-suggestion name (lambda (symbol) (fboundp symbol))))))
    (unbound-variable
     (symbol-suggestion (cell-error-name condition)
                        (lambda (symbol)
                          (or (boundp symbol) (member (sb-int:info :variable :kind symbol) '(:special :macro))))))
    (sb-pcl:class-not-found-error (class-suggestion (cell-error-name condition)))
    (package-error (package-error-hint condition))
    (sb-c::input-error-in-load
     (multiple-value-bind (file line column form) (unreadable-file-location condition)
       (declare (ignore column))
       (format nil "In ~A~:[:~D~;~*~]~@[, in ~A~].~@[~%~A~]"
               file (zerop line) line form (condition-hint (sb-int:encapsulated-condition condition)))))
    ;; The cause may be a system definition that cannot be read. For other causes, FILE-HINT names the source location.
    (asdf:load-system-definition-error
     (let ((cause (asdf/find-system:error-condition condition)))
       (and (typep cause 'sb-c::input-error-in-load) (condition-hint cause))))
    (sb-pcl::obsolete-structure (old-layout-hint (sb-pcl::obsolete-structure-datum condition)))
    (type-error
     (cond ((old-layout-p (type-error-datum condition)) (old-layout-hint (type-error-datum condition)))
           ((eq (type-error-expected-type condition) 'sb-pcl::condition-class)
            (class-suggestion (type-error-datum condition)))))
    (simple-error
     (let ((name (redefined-structure condition)))
       (when name
         (let ((slots (mapcar #'sb-kernel:dsd-name (sb-kernel:dd-slots (sb-kernel:find-defstruct-description name)))))
           (format nil "Existing instances of ~A, and code compiled for them, use the old definition, with ~
                        ~[no slots~*~:;the slot~:*~P ~{~A~^, ~}~].~@
                        The restart CONTINUE installs the new definition: these instances and this code become invalid.~
                        ~:[~;~@
                        The restart RECKLESSLY-CONTINUE installs the new definition as if both definitions were ~
                        compatible.~]"
                   (symbol-text name) (length slots) (mapcar #'symbol-text slots)
                   ;; SBCL does not offer this restart if the new definition has other raw slots, for example.
                   (find "RECKLESSLY-CONTINUE" (applicable-restarts condition)
                         :key (lambda (restart) (string (restart-name restart))) :test #'string=))))))))

(defun file-hint (condition)
  "Return a hint that names the file, line and form in which CONDITION was signalled while a file was being compiled or
loaded. Return NIL if there is no file, or if CONDITION-HINT names the source location."
  (unless (typep condition 'sb-c::input-error-in-load)
    (destructuring-bind (&optional file (line 0) column form) (or (compiler-location) (loading-location))
      (declare (ignore column))
      (and file (format nil "In ~A~:[:~D~;~*~]~@[, in ~A~]." file (zerop line) line form)))))

(defun reader-position-hint (condition)
  "Return a hint with the position in the submitted code at which the reader signalled CONDITION. Return NIL if
CONDITION reports the position itself, or if no form of the code is being read."
  ;; SBCL's simple reader errors report the position themselves (%REPORT-READER-ERROR in src/code/target-error.lisp).
  (when (and *form-stream*
             (typep condition '(not (and sb-int:simple-reader-error (not sb-kernel:reader-impossible-number-error)))))
    (multiple-value-bind (line column) (line-and-column *submitted-code* (or (file-position *form-stream*) 0))
      (multiple-value-bind (start-line start-column) (line-and-column *submitted-code* *form-start*)
        (format nil "~:[The reader stopped at line ~D, column ~D of the code, in the form that begins at ~
                     line ~D, column ~D.~;~
                     The code ends at line ~D, column ~D, within the form that begins at line ~D, column ~D: ~
                     probably a closing parenthesis, double quote, | or |# is missing.~]"
                (and (typep condition 'end-of-file)
                     (eq *form-stream* (ignore-errors (stream-error-stream condition))))
                line column start-line start-column)))))

(defun quicklisp-hint (condition)
  "Return advice on loading Quicklisp if Quicklisp is not loaded and CONDITION is an error about one of its packages; else
NIL."
  (when (and (typep condition 'package-error)
             (member (package-error-package condition) '("QL" "QL-DIST" "QL-UTIL" "QUICKLISP" "QUICKLISP-CLIENT")
                     :test #'equal)
             (not (find-package "QUICKLISP-CLIENT")))
    (let ((setup (guarded (merge-pathnames "quicklisp/setup.lisp" (user-homedir-pathname)) (failure) nil)))
      (with-server-syntax ()
        (format nil "Quicklisp is not loaded~:[, and ~A does not exist. ~
                     To load a system that ASDF finds on this machine: (asdf:load-system ...)~;. ~
                     To load Quicklisp: (load ~S)~]"
                (and setup (probe-file setup))
                (if setup (sb-ext:native-namestring setup) "~/quicklisp/setup.lisp"))))))

(defun push-hints (condition)
  "Push the hints for CONDITION, each on a line of its own."
  (dolist (function '(reader-position-hint quicklisp-hint condition-hint file-hint))
    (let ((hint (guarded (funcall function condition) (failure) nil)))
      (when hint
        (event *job-id* (event-code :error-text) 0 (format nil "~%~A" hint))))))

(provide-hook compiler-error-hint #'condition-hint)
(add-error-details 'push-hints)
