;;;; Compiles an application's Lisp, loads it on top of the host's compiled Lisp side, and saves the core. A build script
;;;; runs this file with a plain SBCL; SBCL_BUILD_APPLICATION names a file with a property list:
;;;;
;;;;   :host         the compiled Lisp side of the host, a fasl
;;;;   :systems      lists of a system's name and the directory of its definition
;;;;   :directories  directories whose files are compiled and loaded
;;;;   :search       directories that contain libraries at any depth
;;;;   :fasls        the directory for compiled files
;;;;   :diagnostics  the file for errors and warnings
;;;;   :core         the core to write
;;;;
;;;; File names are native namestrings. The names of directories end with a slash.

(in-package "COMMON-LISP-USER")

(require :asdf)

(defpackage "SBCL-BUILD"
  (:use "COMMON-LISP"))

(in-package "SBCL-BUILD")

(defvar *application*
  (with-open-file (file (sb-ext:parse-native-namestring (sb-ext:posix-getenv "SBCL_BUILD_APPLICATION"))
                        :external-format :utf-8)
    (with-standard-io-syntax
      (let ((*read-eval* nil))
        (read file)))))

(load (sb-ext:parse-native-namestring (getf *application* :host)))

;;; Diagnostics

(defvar *reported-lines* '()
  "The lines written to the diagnostics file so far.")

(defvar *error-count* 0
  "The number of reported errors.")

(defun directory-pathname (namestring)
  "Return the pathname of the directory that NAMESTRING, a native namestring, names."
  (sb-ext:parse-native-namestring namestring nil *default-pathname-defaults* :as-directory t))

(defun application-file-p (namestring)
  "Return true if the file NAMESTRING, absolute or relative to the working directory, belongs to the application, not to a
library."
  (let ((name (sb-ext:native-namestring (merge-pathnames (sb-ext:parse-native-namestring namestring)))))
    (flet ((below-p (directory)
             (eql (mismatch directory name) (length directory))))
      (and (notany #'below-p (getf *application* :search))
           (or (some #'below-p (getf *application* :directories))
               (some #'below-p (mapcar #'second (getf *application* :systems))))))))

(defun one-line (text)
  "Return TEXT with each run of white space replaced by a space."
  (format nil "~{~A~^ ~}"
          (remove "" (uiop:split-string text :separator '(#\Space #\Tab #\Newline #\Return #\Page)) :test #'string=)))

(defun diagnostic-line (what condition file line column form)
  "Return the line that reports CONDITION. WHAT is the string `error' or `warning'. FILE is the name of the file in which
CONDITION arose, or NIL if it is unknown. LINE and COLUMN are the position in FILE, or 0 if it is unknown. FORM is a
description of the top-level form at the position, or NIL."
  (format nil "~A: ~@[~A:~]~@[~D:~]~@[~D:~]~:[~; ~]~A: ~A~@[ (in ~A)~]"
          what file (and (plusp line) line) (and (plusp column) column) file
          (cond ((typep condition 'style-warning) "STYLE-WARNING")
                ((typep condition 'warning) "WARNING")
                (t (sbcl-host::type-name-text (sbcl-host::class-name-of condition))))
          (with-standard-io-syntax
            (let ((*print-readably* nil)
                  (*print-escape* nil))
              (or (ignore-errors (one-line (princ-to-string condition))) "the message cannot be printed")))
          form))

(defun source-position (condition)
  "Return the file, line, column and form of CONDITION, as SBCL-HOST::WARNING-LOCATION does. If the position is in
bundle.lisp itself, return NIL, 0, 0 and NIL."
  (multiple-value-bind (file line column form) (sbcl-host::warning-location condition)
    (if (and file (equal (probe-file file) *load-truename*))
        (values nil 0 0 nil)
        (values file line column form))))

(defun report-condition (severity condition)
  "Append a line about CONDITION to the diagnostics file, unless the line was written before. SEVERITY is :ERROR,
:WARNING, or :OWN, which means a warning if CONDITION arose in a file outside of the application, and otherwise an error."
  (multiple-value-bind (file line column form) (source-position condition)
    (let* ((errorp (or (eq severity :error)
                       (and (eq severity :own) (or (null file) (application-file-p file)))))
           (text (diagnostic-line (if errorp "error" "warning") condition file line column form)))
      (unless (member text *reported-lines* :test #'string=)
        (push text *reported-lines*)
        (when errorp
          (incf *error-count*))
        (with-open-file (out (sb-ext:parse-native-namestring (getf *application* :diagnostics))
                             :direction :output :if-exists :append :external-format :utf-8)
          (write-line text out))))))

(defun report-warning (condition)
  "Report the warning CONDITION, unless it is a redefinition warning, is muffled by SBCL, or only summarizes other
warnings."
  (typecase condition
    ((or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p)
         uiop:compile-warned-warning uiop:compile-failed-warning))
    (style-warning (report-condition :warning condition))
    (t (report-condition :own condition))))

(defun report-compiler-error (condition)
  "Report the original error that the compiler error CONDITION wraps."
  (report-condition :error (sb-int:encapsulated-condition condition)))

(defun abort-compilation (condition hook)
  "Leave CALL-WITH-DIAGNOSTICS because of the unhandled CONDITION. Report CONDITION if no error was reported
before."
  (declare (ignore hook))
  (when (zerop *error-count*)
    (report-condition :error condition))
  (throw 'aborted nil))

(defun call-with-diagnostics (function)
  "Call FUNCTION and report its warnings and errors. An unhandled error ends the call. After any error, exit with status 1."
  (catch 'aborted
    (handler-bind ((sb-c:compiler-error #'report-compiler-error)
                   (warning #'report-warning))
      (let ((sb-ext:*invoke-debugger-hook* #'abort-compilation))
        (funcall function))))
  (when (plusp *error-count*)
    (finish-output)
    (sb-ext:exit :code 1 :abort t)))

;;; Loading and saving

(defun define-directory-system (directory number)
  "Define an ASDF system of the Lisp files in DIRECTORY, a native namestring, in the order of their names. Return the name
of the system, which ends with NUMBER."
  (let ((name (format nil "sbcl-build-directory-~D" number))
        (files (sort (mapcar #'pathname-name
                             (directory (merge-pathnames "*.lisp" (directory-pathname directory)) :resolve-symlinks nil))
                     #'string<))
        ;; Without these bindings, ASDF would assume that bundle.lisp defines the system, and would load it again.
        (*load-pathname* nil)
        (*load-truename* nil))
    (eval `(asdf:defsystem ,name
             :pathname ,(directory-pathname directory)
             :serial t
             :components ,(mapcar (lambda (file) `(:file ,file)) files)))
    name))

(defun load-application ()
  "Compile and load the application's systems, then its directories."
  (asdf:initialize-source-registry
   `(:source-registry ,@(loop for (nil directory) in (getf *application* :systems)
                              collect `(:tree ,directory))
                      ,@(loop for directory in (getf *application* :search)
                              collect `(:tree ,directory))
                      :ignore-inherited-configuration))
  (asdf:initialize-output-translations
   `(:output-translations (t (,(directory-pathname (getf *application* :fasls)) :implementation :**/ :*.*.*))
                          :ignore-inherited-configuration))
  ;; ASDF only warns, and REPORT-CONDITION decides which warnings are errors. Old fasls are deleted, since ASDF compares
  ;; modification times in whole seconds and could load an outdated fasl.
  (uiop:delete-directory-tree (directory-pathname (getf *application* :fasls)) :validate t :if-does-not-exist :ignore)
  (setf uiop:*compile-file-warnings-behaviour* :warn
        uiop:*compile-file-failure-behaviour* :warn)
  (loop for (system) in (getf *application* :systems)
        do (asdf:load-system system))
  (loop for directory in (getf *application* :directories)
        for number from 1
        do (let ((name (define-directory-system directory number)))
             (asdf:load-system name)
             (asdf:clear-system name))))

(sbcl-host::note-core-contents)
(call-with-diagnostics #'load-application)
;;; ASDF does not look for the files of an immutable system, so the machine that runs the program need not have them.
(mapc #'asdf:register-immutable-system (asdf:already-loaded-systems))
(let ((core (getf *application* :core)))
  (in-package "COMMON-LISP-USER")
  (delete-package "SBCL-BUILD")
  (sbcl-host::save-core core))
