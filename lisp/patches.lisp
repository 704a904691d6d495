;;;; Every change to SBCL itself, and what is taken for granted of it. All of this is looked at when the core is built: an
;;;; SBCL in which something has moved fails the build, with the name of that.

(in-package "SBCL-HOST")

;;; What is taken for granted

(defvar *assumptions* '()
  "What is taken for granted of SBCL, newest first: lists of a name and a function that returns true where it holds.")

(defmacro define-assumption (name &body body)
  "Have the build look whether BODY returns true. NAME, a string, says of what."
  `(push (list ,name (lambda () ,@body)) *assumptions*))

(defun broken-assumptions ()
  "Return the names of the assumptions that do not hold in this SBCL, with the reason where there is one."
  (loop for (name holds-p) in (reverse *assumptions*)
        for problem = (handler-case (if (funcall (the function holds-p)) nil "it does not hold")
                        (error (condition) (princ-to-string condition)))
        when problem
          collect (format nil "~A: ~A" name problem)))

(defun check-assumptions ()
  "Signal an error that names all that has moved in SBCL."
  (let ((broken (broken-assumptions)))
    (when broken
      (error "This is SBCL ~A, in which something has moved that the Lisp side relies on:~{~%  ~A~}~%"
             (lisp-implementation-version) broken))))

(defun parameters (function)
  "Return the names of the parameters of the function named FUNCTION, as strings, in their order."
  (loop for parameter in (sb-introspect:function-lambda-list (fdefinition function))
        unless (member parameter lambda-list-keywords)
          collect (string (loop while (consp parameter) do (setf parameter (first parameter))
                                finally (return parameter)))))

;;; Patches

(defvar *patches* '()
  "What is encapsulated, newest first: lists of a function's name, a tag and the function that takes its place.")

(defmacro define-patch (function parameters wrapper &optional (tag ''sbcl-host))
  "Have WRAPPER take the place of FUNCTION, a function name of SBCL's: it is called with the function and its arguments.
PARAMETERS are the names of FUNCTION's parameters, which WRAPPER was written for."
  `(progn
     (define-assumption ,(format nil "the parameters of ~S" function)
       (equal ',(mapcar #'string parameters) (parameters ',function)))
     (push (list ',function ,tag ,wrapper) *patches*)))

(defun install-patches ()
  "Change SBCL in the places where it must know of the host."
  (loop for (function tag wrapper) in (reverse *patches*)
        do (encapsulate function tag wrapper)))
