;;;; The changes that a form makes: the names that the form defines and removes, as SBCL makes the definitions; the
;;;; form's role; and the modules that its symbols belong to. The host records the changes with the form, to determine
;;;; later which forms replace others.

(in-package "SBCL-HOST")

(defvar *loading-system* nil
  "The name of the system that ASDF is compiling or loading, or NIL.")

(defconstant +max-changes+ 50
  "The maximum number of names that a form reports. A form that defines or removes more names reports none.")

(defconstant +max-change-line+ 1000
  "The maximum length of a line: symbols may have names of any length.")

(defun change-line (sign kind name)
  "Return the line for NAME, which is defined (SIGN is #\\+) or removed (#\\-) as KIND."
  (with-server-syntax (:length nil)
    (let* ((*package* (load-time-value (find-package "KEYWORD")))
           (line (format nil "~A~A ~:[~S~;~A~]" sign kind (eq kind :package) name)))
      (substitute #\Space #\Newline (subseq line 0 (min (length line) +max-change-line+))))))

(defun recording-changes-p ()
  "Return true when the changes of a form are recorded. A system's definitions are not: the form that loads the system
stands for all of them."
  (and *evaluation*
       (not *loading-system*)
       (<= (length (evaluation-changes *evaluation*)) +max-changes+)))

(defun note-change (line)
  "Record LINE with the form that is being evaluated."
  ;; Several threads of an evaluation may define something at the same time.
  (sb-ext:atomic-update (evaluation-changes *evaluation*)
                        (lambda (changes)
                          (if (member line changes :test #'equal)
                              changes
                              (cons line changes)))))

(defun forget-changes ()
  "Begin to record the changes of the next form."
  (setf (evaluation-changes *evaluation*) '()))

;;; Roles of forms

(defconstant +max-visited+ 10000
  "The maximum number of conses and atoms that are visited in a form, which may be circular.")

(defun map-symbols (function form)
  "Call FUNCTION with the symbols in FORM, within lists and backquotes. Return true if all of FORM was visited."
  (declare (type function function))
  (let ((pending (list form)))
    (loop repeat +max-visited+
          while pending
          do (let ((object (pop pending)))
               (cond ((symbolp object) (funcall function object))
                     ((consp object)
                      (push (cdr object) pending)
                      (push (car object) pending))
                     ((sb-int:comma-p object) (push (sb-int:comma-expr object) pending)))))
    (null pending)))

(defun runs-when-called-p (form text)
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
  "Return the role of FORM, which was read from TEXT: \"in-package\"; \"defun\" or \"defmethod\" when all its code runs
when the function is called; or \"other\"."
  (let ((role (case (and (consp form) (first form))
                (in-package "in-package")
                (defun "defun")
                ((defgeneric defmethod) "defmethod"))))
    (cond ((null role) "other")
          ((or (string= role "in-package") (runs-when-called-p form text)) role)
          (t "other"))))

;;; Modules

(defparameter *module-packages*
  '(("ASDF" . "asdf") ("UIOP" . "asdf") ("SB-BSD-SOCKETS" . "sb-bsd-sockets") ("SB-CLTL2" . "sb-cltl2")
    ("SB-CONCURRENCY" . "sb-concurrency") ("SB-COVER" . "sb-cover") ("SB-GRAPH" . "sb-graph") ("SB-GROVEL" . "sb-grovel")
    ("SB-INTROSPECT" . "sb-introspect") ("SB-MANUAL" . "sb-manual") ("SB-MD5" . "sb-md5") ("SB-POSIX" . "sb-posix")
    ("SB-ROTATE-BYTE" . "sb-rotate-byte") ("SB-RT" . "sb-rt") ("SB-SPROF" . "sb-sprof"))
  "The packages of this image that a plain SBCL has only after REQUIRE, each with its module. ASDF's other packages have
names with a slash after one of these names.")

(defun symbol-module (symbol)
  "Return the module of SYMBOL's package, or of the package that SYMBOL names if it is a keyword; NIL for none."
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

(defun changes-text (form role)
  "Return the lines that describe the changes that FORM has just made: = and ROLE (a value of FORM-ROLE, or \"failed\" for
a form that failed after it had defined something), + and a defined name, - and a removed name, ? and a module."
  (let ((changes (evaluation-changes *evaluation*)))
    (format nil "=~A~{~%~A~}~{~%?~A~}"
            role
            (and (<= (length changes) +max-changes+) (reverse changes))
            (form-modules form))))

(defun perform-for-system (perform operation component)
  "Perform OPERATION on COMPONENT by PERFORM, ASDF's PERFORM-WITH-RESTARTS, and record the definitions that a load makes."
  (declare (type function perform))
  (let ((*loading-system* (component-system-name component))
        (file (component-file component)))
    (flet ((perform () (funcall perform operation component)))
      (if (and file (typep operation 'asdf:load-op))
          (call-noting-definitions file #'perform)
          (perform)))))
