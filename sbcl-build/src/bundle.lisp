;;;; Compiles an application's Lisp, loads it beside the host's compiled Lisp side, and saves the core. Run by a build script
;;;; with a plain SBCL; SBCL_BUILD_APPLICATION names a file with a property list:
;;;;
;;;;   :host         the compiled Lisp side of the host, a fasl
;;;;   :systems      lists of a system's name and the directory of its definition
;;;;   :directories  directories whose files are compiled and loaded
;;;;   :search       directories below which there are libraries
;;;;   :fasls        the directory for compiled files
;;;;   :diagnostics  the file for what is wrong with the Lisp
;;;;   :core         the core to write
;;;;
;;;; All names are native; directories end with a slash.

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

;;; What is wrong

(defvar *told* '()
  "The lines that were written to the file of diagnostics.")

(defvar *errors* 0
  "How many errors there were.")

(defun directory-pathname (namestring)
  "Return the pathname of the directory with this native namestring."
  (sb-ext:parse-native-namestring namestring nil *default-pathname-defaults* :as-directory t))

(defun own-file-p (namestring)
  "True when the file NAMESTRING, absolute or relative to the working directory, is the application's and no library's."
  (let ((name (sb-ext:native-namestring (merge-pathnames (sb-ext:parse-native-namestring namestring)))))
    (flet ((below-p (directory)
             (eql (mismatch directory name) (length directory))))
      (and (notany #'below-p (getf *application* :search))
           (or (some #'below-p (getf *application* :directories))
               (some #'below-p (mapcar #'second (getf *application* :systems))))))))

(defun one-line (text)
  "Return TEXT with a space for each stretch of white space."
  (format nil "~{~A~^ ~}"
          (remove "" (uiop:split-string text :separator '(#\Space #\Tab #\Newline #\Return #\Page)) :test #'string=)))

(defun entry (what condition file line column form)
  "Return a line about CONDITION, which is WHAT, ERROR or WARNING, at the place that the others are."
  (format nil "~A: ~@[~A:~]~@[~D:~]~@[~D:~]~:[~; ~]~A: ~A~@[ (in ~A)~]"
          what file (and (plusp line) line) (and (plusp column) column) file
          (cond ((typep condition 'style-warning) "STYLE-WARNING")
                ((typep condition 'warning) "WARNING")
                (t (sbcl-host::type-name-text (sbcl-host::class-name-of condition))))
          (with-standard-io-syntax
            (let ((*print-readably* nil)
                  (*print-escape* nil))
              (or (ignore-errors (one-line (princ-to-string condition))) "it cannot be printed")))
          form))

(defun place (condition)
  "Return file, line, column and form of CONDITION, as SBCL-HOST::WARNING-PLACE does, but none in this file."
  (multiple-value-bind (file line column form) (sbcl-host::warning-place condition)
    (if (and file (equal (probe-file file) *load-truename*))
        (values nil 0 0 nil)
        (values file line column form))))

(defun tell (severity condition)
  "Write a line about CONDITION, an error or a warning by SEVERITY, which is :ERROR, :WARNING, or :OWN for what is an error
in the application's own files alone."
  (multiple-value-bind (file line column form) (place condition)
    (let* ((errorp (or (eq severity :error)
                       (and (eq severity :own) (or (null file) (own-file-p file)))))
           (entry (entry (if errorp "error" "warning") condition file line column form)))
      (unless (member entry *told* :test #'string=)
        (push entry *told*)
        (when errorp
          (incf *errors*))
        (with-open-file (out (sb-ext:parse-native-namestring (getf *application* :diagnostics))
                             :direction :output :if-exists :append :external-format :utf-8)
          (write-line entry out))))))

(defun note-warning (condition)
  "Tell CONDITION, unless SBCL muffles it, or it says no more than others did."
  (typecase condition
    ((or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p)
         uiop:compile-warned-warning uiop:compile-failed-warning))
    (style-warning (tell :warning condition))
    (t (tell :own condition))))

(defun note-compiler-error (condition)
  "Tell what CONDITION, which the compiler makes of an error in a form, is about."
  (tell :error (sb-int:encapsulated-condition condition)))

(defun give-up (condition hook)
  "Tell CONDITION, which nothing handles, unless it follows from what was told, and leave WITH-DIAGNOSTICS."
  (declare (ignore hook))
  (when (zerop *errors*)
    (tell :error condition))
  (throw 'given-up nil))

(defun call-with-diagnostics (function)
  "Call FUNCTION with its warnings and errors told, and return when it does, or at what nothing handles. If there was an
error, SBCL ends."
  (catch 'given-up
    (handler-bind ((sb-c:compiler-error #'note-compiler-error)
                   (warning #'note-warning))
      (let ((sb-ext:*invoke-debugger-hook* #'give-up))
        (funcall function))))
  (when (plusp *errors*)
    (finish-output)
    (sb-ext:exit :code 1 :abort t)))

;;; What is done

(defun directory-system (directory number)
  "Define a system of the Lisp files in DIRECTORY, a native namestring, in the order of their names; return its name."
  (let ((name (format nil "sbcl-build-directory-~D" number))
        (files (sort (mapcar #'pathname-name
                             (directory (merge-pathnames "*.lisp" (directory-pathname directory)) :resolve-symlinks nil))
                     #'string<))
        ;; Else ASDF takes this file for the one that defines the system, and loads it.
        (*load-pathname* nil)
        (*load-truename* nil))
    (eval `(asdf:defsystem ,name
             :pathname ,(directory-pathname directory)
             :serial t
             :components ,(mapcar (lambda (file) `(:file ,file)) files)))
    name))

(defun load-application ()
  "Compile and load everything."
  (asdf:initialize-source-registry
   `(:source-registry ,@(loop for (nil directory) in (getf *application* :systems)
                              collect `(:tree ,directory))
                      ,@(loop for directory in (getf *application* :search)
                              collect `(:tree ,directory))
                      :ignore-inherited-configuration))
  (asdf:initialize-output-translations
   `(:output-translations (t (,(directory-pathname (getf *application* :fasls)) :implementation :**/ :*.*.*))
                          :ignore-inherited-configuration))
  ;; Which warning is an error is said above. Nothing that was compiled before is used: ASDF goes by times, in seconds.
  (uiop:delete-directory-tree (directory-pathname (getf *application* :fasls)) :validate t :if-does-not-exist :ignore)
  (setf uiop:*compile-file-warnings-behaviour* :warn
        uiop:*compile-file-failure-behaviour* :warn)
  (loop for (system) in (getf *application* :systems)
        do (asdf:load-system system))
  (loop for directory in (getf *application* :directories)
        for number from 1
        do (let ((name (directory-system directory number)))
             (asdf:load-system name)
             (asdf:clear-system name))))

(sbcl-host::note-core-contents)
(call-with-diagnostics #'load-application)
;;; Their sources need not be where the program runs.
(mapc #'asdf:register-immutable-system (asdf:already-loaded-systems))
(let ((core (getf *application* :core)))
  (in-package "COMMON-LISP-USER")
  (delete-package "SBCL-BUILD")
  (sbcl-host::save-core core))
