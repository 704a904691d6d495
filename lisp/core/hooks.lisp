;;;; Functions of this package that packages above it provide: those are not loaded into every image.

(in-package "SBCL-HOST")

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun hook-variable (name)
    "Return the symbol of the variable that has the function which provides NAME."
    (intern (format nil "**~A-PROVIDER**" name) (symbol-package name))))

(defmacro define-hook (name lambda-list documentation &body default)
  "Define NAME, a function of LAMBDA-LIST, required parameters all, that a package above this one provides by PROVIDE-HOOK.
Where none does, it evaluates DEFAULT."
  (let ((variable (hook-variable name)))
    `(progn
       (declaim (type (or null function) ,variable))
       (defglobal ,variable nil
         ,(format nil "The function that provides ~A, or NIL." name))
       (defun ,name ,lambda-list
         ,documentation
         (declare (ignorable ,@lambda-list))
         (let ((provider ,variable))
           (if provider
               (funcall provider ,@lambda-list)
               (progn ,@default)))))))

(defmacro provide-hook (name function)
  "Have FUNCTION do what NAME, a function that DEFINE-HOOK defined, is for."
  `(setf ,(hook-variable name) ,function))
