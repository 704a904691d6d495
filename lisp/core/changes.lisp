;;;; The changes that a form makes: the names of the definitions that SBCL makes or removes while it evaluates the form.
;;;; The changes are reported with the form's role and the modules that its symbols belong to. The host records the changes
;;;; with the form, to determine later which forms replace others.

(in-package "SBCL-HOST")

(defconstant +max-reported-changes+ 50
  "The maximum number of names in the report of a form. The report of a form that defines or removes more names contains
no names.")

(defconstant +max-change-line-length+ 1000
  "The maximum length, in characters, of a line that reports a change. Symbol names may be longer.")

(defun format-change-line (sign kind name)
  "Return the line that reports that NAME was defined (SIGN is #\\+) or removed (SIGN is #\\-) as KIND, a keyword such
as :FUNCTION; or that the generic function NAME got a method, or a part of the system NAME was loaded (SIGN is #\\*). A
system that was loaded as a dependency of another loaded system counts as removed."
  (with-server-syntax (:length nil)
    (let* ((*package* (load-time-value (find-package "KEYWORD")))
           (line (format nil "~A~A ~:[~S~;~A~]" sign kind (member kind '(:package :system)) name)))
      (substitute #\Space #\Newline (subseq line 0 (min (length line) +max-change-line-length+))))))

(defun recording-changes-p ()
  "Return true when the changes of a form are recorded. Definitions that are made while a system is loaded are not
recorded: the form that loads the system stands for all of them."
  (and *evaluation*
       (not *loading-system*)
       (<= (length (evaluation-changes *evaluation*)) +max-reported-changes+)))

(defun note-change (line)
  "Record LINE, a value of FORMAT-CHANGE-LINE, as a change that the form that is being evaluated makes."
  ;; Several threads of an evaluation may define something at the same time.
  (sb-ext:atomic-update (evaluation-changes *evaluation*)
                        (lambda (changes)
                          (if (member line changes :test #'equal)
                              changes
                              (cons line changes)))))

(defun note-reloaded-file (file)
  "Record that ASDF is about to load FILE, a native namestring, if this image has loaded files before. A restored image, in
which an earlier form may have loaded FILE already, must then load FILE again, because FILE replaces the definitions that
other files and forms have made since. Record at most +MAX-REPORTED-CHANGES+ files. ASDF also loads again the files
that depend on these files."
  (when (and *evaluation*
             (plusp (hash-table-count **loaded-files**))
             (< (length (evaluation-reloaded-files *evaluation*)) +max-reported-changes+)
             (<= (length file) +max-change-line-length+)
             (not (find #\Newline file)))
    (let ((entry (cons file (and (gethash file **loaded-files**) t))))
      (sb-ext:atomic-update (evaluation-reloaded-files *evaluation*)
                            (lambda (files) (adjoin entry files :key #'car :test #'equal))))))

(defun note-loaded-system (system complete)
  "Record that ASDF is about to load a part of SYSTEM or, if COMPLETE is true, has loaded all of it."
  (when *evaluation*
    (let ((name (asdf:component-name system)))
      (sb-ext:atomic-update (evaluation-loaded-systems *evaluation*)
                            (lambda (systems)
                              (acons name complete (remove name systems :key #'car :test #'string=)))))))

(declaim (type list **unrestored-systems**))
(defglobal **unrestored-systems** '()
  "The names of the systems that were loaded completely, but not since then by a form that has ended without an error. A
restored image evaluates neither a form that failed nor a form that was still running.")

(defun forget-restored-systems ()
  "Remove the systems that the form has loaded completely from **UNRESTORED-SYSTEMS**. A restored image evaluates the form
again."
  (let ((names (loop for (name . complete) in (evaluation-loaded-systems *evaluation*)
                     when complete
                       collect name)))
    (when names
      (sb-ext:atomic-update **unrestored-systems**
                            (lambda (systems) (set-difference systems names :test #'string=))))))

(defun note-finished-action (operation component just-done)
  "If OPERATION on COMPONENT, an ASDF action, loads a system, record that the form has loaded the system. If JUST-DONE is
false, ASDF has found the system up to date: record the system only if no other form restores it."
  (when (and *evaluation*
             (typep operation 'asdf/lisp-action:basic-load-op)
             (typep component 'asdf:system))
    (let ((name (asdf:component-name component)))
      (cond (just-done
             ;; ASDF performs this action even for systems that the core contains, such as contribs.
             (unless (nth-value 1 (gethash name asdf/system-registry:*preloaded-systems*))
               (sb-ext:atomic-update **unrestored-systems** (lambda (systems) (adjoin name systems :test #'string=))))
             (note-loaded-system component t))
            ((member name **unrestored-systems** :test #'string=)
             (sb-ext:atomic-incf (evaluation-change-count *evaluation*))
             (note-loaded-system component t))))))

(defun forget-changes ()
  "Discard the recorded changes, because the next form is about to be evaluated."
  (setf (evaluation-changes *evaluation*) '()
        (evaluation-loaded-systems *evaluation*) '()
        (evaluation-reloaded-files *evaluation*) '()))

;;; Roles of forms

(defconstant +max-visited-objects+ 10000
  "The maximum number of conses and atoms that are visited in a form. Visiting a circular form would never end otherwise.")

(defun map-symbols (function form)
  "Call FUNCTION with each symbol in FORM, including those within lists and backquotes. Return true if all of FORM was
visited, within the limit of +MAX-VISITED-OBJECTS+."
  (declare (type function function))
  (let ((pending (list form)))
    (loop repeat +max-visited-objects+
          while pending
          do (let ((object (pop pending)))
               (cond ((symbolp object) (funcall function object))
                     ((consp object)
                      (push (cdr object) pending)
                      (push (car object) pending))
                     ((sb-int:comma-p object) (push (sb-int:comma-expr object) pending)))))
    (null pending)))

(defun runs-only-when-called-p (form text)
  "Return true when no code in FORM, a function's definition that was read from TEXT, runs before the function is called.
The code of macros that are defined elsewhere does not count."
  (let ((early nil))
    (and (map-symbols (lambda (symbol)
                        (when (member symbol '(eval-when load-time-value macrolet symbol-macrolet))
                          (setf early t)))
                      form)
         (not early)
         (not (search "#." (the text text))))))

(defun form-role (form text)
  "Return the role of FORM, which was read from TEXT, as a string: \"in-package\"; \"defun\" or \"defmethod\" if none of
the form's code runs before the function is called; or \"other\"."
  (let ((role (case (and (consp form) (first form))
                (in-package "in-package")
                (defun "defun")
                ((defgeneric defmethod) "defmethod"))))
    (cond ((null role) "other")
          ((or (string= role "in-package") (runs-only-when-called-p form text)) role)
          (t "other"))))

;;; Modules

(defparameter *module-packages*
  '(("ASDF" . "asdf") ("UIOP" . "asdf") ("SB-BSD-SOCKETS" . "sb-bsd-sockets") ("SB-CLTL2" . "sb-cltl2")
    ("SB-CONCURRENCY" . "sb-concurrency") ("SB-COVER" . "sb-cover") ("SB-GRAPH" . "sb-graph") ("SB-GROVEL" . "sb-grovel")
    ("SB-INTROSPECT" . "sb-introspect") ("SB-MANUAL" . "sb-manual") ("SB-MD5" . "sb-md5") ("SB-POSIX" . "sb-posix")
    ("SB-ROTATE-BYTE" . "sb-rotate-byte") ("SB-RT" . "sb-rt") ("SB-SPROF" . "sb-sprof"))
  "An alist from package names to names of modules. A plain SBCL has these packages only after it has loaded the module
with REQUIRE. ASDF's other packages have names such as ASDF/PLAN, with one of these names before the slash.")

(defun symbol-module (symbol)
  "Return the module that defines SYMBOL's package or, if SYMBOL is a keyword, the package that SYMBOL names. Return NIL
if there is no such module."
  (let ((package (symbol-package symbol)))
    (unless (or (null package) (eq package (load-time-value (find-package "COMMON-LISP"))))
      (let ((name (if (keywordp symbol) (symbol-name symbol) (package-name package))))
        (cdr (assoc (subseq name 0 (position #\/ name)) *module-packages* :test #'string=))))))

(defun form-modules (form)
  "Return the modules of the symbols in FORM."
  (let ((modules '()))
    (map-symbols (lambda (symbol)
                   (let ((module (symbol-module symbol)))
                     (when module
                       (pushnew module modules :test #'string=))))
                 form)
    modules))

(defun loaded-system-lines (failed)
  "Return the lines that report the systems that the form has loaded, newest first. If FAILED is true, the form failed: include
systems that were loaded in part, and omit dependencies of other systems, because a load of these systems loads them, too.
Otherwise, report a dependency as removed: it is no longer missing without an earlier form, and not missing without this
form."
  (let* ((systems (evaluation-loaded-systems *evaluation*))
         (dependencies (loop for (name . complete) in systems
                             for system = (asdf:registered-system name)
                             when (and system (or failed complete))
                               append (asdf:system-depends-on system)
                               and append (asdf:system-defsystem-depends-on system))))
    (loop for (name . complete) in (remove "asdf" systems :key #'car :test #'string=)
          for dependency = (member name dependencies :test #'equal)
          when (if failed (not dependency) complete)
            collect (format-change-line (cond ((not complete) #\*) (dependency #\-) (t #\+)) :system name))))

(defun changes-text (form role)
  "Return a string of lines that describe the changes that FORM has just made. The first line is = and ROLE, which is a
value of FORM-ROLE, or \"failed\" if FORM failed after it had defined something. Each other line begins with + for a
defined name or a loaded system, * for a generic function that got a method or a system that was loaded in part, - for a
removed name or a loaded dependency, ? for a module of FORM's symbols, or ! for a file that NOTE-RELOADED-FILE recorded."
  (let ((changes (evaluation-changes *evaluation*)))
    (format nil "=~A~{~%~A~}~{~%~A~}~{~%?~A~}~{~%!~A~}"
            role
            (and (<= (length changes) +max-reported-changes+) (reverse changes))
            (loop for line in (loaded-system-lines (string= role "failed"))
                  repeat (max 0 (- +max-reported-changes+ (length changes)))
                  collect line)
            (form-modules form)
            ;; A restored image does not load what a failed form loaded for the first time.
            (loop for (file . known) in (reverse (evaluation-reloaded-files *evaluation*))
                  when (or known (string/= role "failed"))
                    collect file))))

(defun perform-recording-definitions (perform operation component)
  "Call PERFORM, ASDF's PERFORM-WITH-RESTARTS, to perform OPERATION on COMPONENT, and record the definitions that a load
makes."
  (declare (type function perform))
  (let ((*loading-system* (component-system-name component))
        (file (component-file component))
        (system (asdf:component-system component)))
    (flet ((perform () (funcall perform operation component)))
      (when file
        (note-loaded-system system nil))
      (cond ((and file (typep operation 'asdf:load-op))
             (note-reloaded-file file)
             (call-recording-definitions file #'perform :system (asdf:component-name system)))
            (t (perform))))))
