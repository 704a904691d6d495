;;;; The differences between the pinned SBCL and newer ones (docs/upgrading-sbcl.md). This file detects each difference when
;;;; it is compiled, so that all other files are the same for every SBCL. After the pin has moved, delete the code for older
;;;; SBCLs.

(in-package "SBCL-HOST")

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun slot-accessors (structure names)
    "Return the accessors of those slots of STRUCTURE, the name of a structure, whose names are in NAMES, a list of strings."
    (loop for slot in (sb-kernel:dd-slots (sb-kernel:find-defstruct-description structure))
          when (member (sb-kernel:dsd-name slot) names :test #'string=)
            collect (sb-kernel:dsd-accessor-name slot))))

;;; Since SBCL 2.6.5, a single slot contains both the state and the owner of a mutex, and has another name.
(defmacro mutex-state (mutex)
  "Return the state of MUTEX: 0 if it is free, 1 if a thread holds it, 2 if other threads also wait for it."
  `(logand 3 (,@(slot-accessors 'sb-thread:mutex '("STATE" "%STATE")) ,mutex)))

(defmacro free-mutex (mutex)
  "Make MUTEX, a variable, free, even if another thread holds it."
  `(setf ,@(loop for accessor in (slot-accessors 'sb-thread:mutex '("STATE" "%STATE" "%OWNER"))
                 append `((,accessor ,mutex) 0))))

;;; Since SBCL 2.6.8, the byte reader of a stream (N-BIN) has no parameter for a buffer of character sizes.
(defmacro define-byte-reader (name (stream eof-error-p) &body body)
  "Define the function NAME as the byte reader of streams without data. The body ignores the buffer and its bounds."
  (let ((ignored (if (slot-accessors 'sb-kernel:ansi-stream '("CSIZE-BUFFER"))
                     '(buffer sizes start count)
                     '(buffer start count))))
    `(defun ,name (,stream ,@ignored &optional (,eof-error-p t))
       (declare (ignore ,@ignored))
       ,@body)))

;;; Since SBCL 2.6.6, FDEFINITION returns the outermost encapsulation, as SYMBOL-FUNCTION does.
(defmacro global-function (name)
  "Return the function that is globally named NAME, without encapsulations."
  `(,(or (find-symbol "UNENCAPSULATED-FUNCTION" "SB-EXT") 'fdefinition) ,name))

;;; Since SBCL 2.6.5, EVAL calls the code that it has compiled inside the dynamic extent of the compiler, and no longer calls
;;; COMPILE-IN-LEXENV. The patches of COMPILE-IN-LEXENV must see the compilation of submitted code, but not its evaluation.
(defmacro define-eval-patch ()
  "Define the patch that separates the compilation of evaluated code from its evaluation, where SBCL combines them."
  (let ((eval (find-symbol "EVAL-WITH-COMPILE-IN-LEXENV" "SB-C")))
    (when eval
      `(define-patch ,eval (form *lexenv* source-info tlf ephemeral)
         (lambda (eval form &rest environment)
           (declare (ignore eval))
           (apply #'compile-and-call form environment))))))

(defun compile-and-call (form lexenv source-info toplevel-form-number ephemeral)
  "Compile FORM in LEXENV, then call the compiled code. The other parameters are those of COMPILE-IN-LEXENV."
  ;; A declaration is not a form, and must be refused.
  (let ((lambda `(lambda () ,(if (typep form '(cons (eql declare))) `(progn ,form) form))))
    (funcall (the function
                  (handler-bind ((sb-ext:compiler-note #'muffle-warning))
                    (let ((sb-c::*source-form-context-alist*
                            (acons lambda sb-impl::*eval-source-context* sb-c::*source-form-context-alist*)))
                      (sb-c:compile-in-lexenv lambda lexenv nil source-info toplevel-form-number ephemeral nil)))))))

;;; Since SBCL 2.6.5, COMPILE and EVAL bind *COMPILER-ERROR-BAILOUT* only while they convert a form.
(declaim (inline compiling-p))
(defun compiling-p ()
  "Return true while the compiler works in this thread."
  (or (boundp 'sb-c::*compiler-error-bailout*) (boundp 'sb-c:*compilation*)))

;;; Since SBCL 2.6.5, reading a variable of an interrupted frame asks for the kind of the frame's code location. That signals
;;; an error unless the code was interrupted exactly at a location that the compiler has recorded.
(defmacro define-code-location-patch ()
  "Define the patch without which an interrupted frame has neither arguments nor local variables, where SBCL needs it."
  (let ((kind (find-symbol "CODE-LOCATION-KIND" "SB-DI"))
        (reader (find-symbol "ACCESS-COMPILED-DEBUG-VAR-SLOT" "SB-DI")))
    (when (and reader
               (member (fdefinition kind) (sb-introspect:find-function-callees (fdefinition reader))))
      `(define-patch ,kind (code-location)
         (lambda (kind location)
           (declare (type function kind))
           ;; The reader compares the kind with the kinds of locations after calls.
           (if (sb-di:code-location-unknown-p location) :unknown (funcall kind location)))))))
