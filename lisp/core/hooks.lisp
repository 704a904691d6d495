;;;; Hooks: functions of this package whose implementation is in a package that builds on it. Not every image loads such a
;;;; package, so a hook also has a default.

(in-package "SBCL-HOST")

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun hook-variable (name)
    "Return the name of the global variable that holds the implementation of the hook NAME."
    (intern (format nil "**~A-PROVIDER**" name) (symbol-package name))))

(defmacro define-hook (name lambda-list documentation &body default)
  "Define the function NAME with LAMBDA-LIST (required parameters only). A package that is loaded later may implement
the function with PROVIDE-HOOK. Without an implementation, the function evaluates DEFAULT."
  (let ((variable (hook-variable name)))
    `(progn
       (declaim (type (or null function) ,variable))
       (defglobal ,variable nil
         ,(format nil "The function that implements ~A, or NIL." name))
       (defun ,name ,lambda-list
         ,documentation
         (declare (ignorable ,@lambda-list))
         (let ((provider ,variable))
           (if provider
               (funcall provider ,@lambda-list)
               (progn ,@default)))))))

(defmacro provide-hook (name function)
  "Make FUNCTION the implementation of the hook NAME, which DEFINE-HOOK defined."
  `(setf ,(hook-variable name) ,function))
