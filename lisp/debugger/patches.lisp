;;;; Changes to SBCL for reporting errors and frames, and the assumptions about SBCL on which these changes rest.

(in-package "SBCL-HOST/DEBUGGER")

(define-patch sb-kernel::%signal (condition)
  #'observe-signal)

;; Mark submitted code: a frame of such code keeps the closure that was called.
(define-patch sb-c:compile-in-lexenv (form *lexenv* name source-info tlf ephemeral errorp)
  (lambda (compile form lexenv &rest arguments)
    (declare (type function compile))
    (flet ((compile-form () (apply compile form lexenv arguments)))
      (declare (dynamic-extent #'compile-form))
      (call-with-closures-marked lexenv #'compile-form)))
  'closures)

;; Code that was evaluated in a held frame must not access the stack memory of the frame after the hold.
(define-patch sb-di:debug-var-value (debug-var frame)
  (lambda (value variable frame)
    (check-variable-frame variable frame)
    (funcall (the function value) variable frame)))

(define-patch (setf sb-di:debug-var-value) (new-value debug-var frame)
  (lambda (set value variable frame)
    (check-variable-frame variable frame)
    (funcall (the function set) value variable frame)))

(define-patch sb-di:debug-fun-closure-name (debug-fun frame)
  #'closure-name)

(define-assumption "the handlers in *HANDLER-CLUSTERS*, which show whether a handler of SBCL handles an error"
  (let ((condition (make-condition 'simple-error)))
    (flet ((handled-by-system-p () (system-handles-p condition (butlast sb-kernel:*handler-clusters*))))
      (and (handler-bind ((warning #'muffle-warning) (simple-error #'princ-to-string)) (handled-by-system-p))
           (handler-bind ((simple-error (compile nil '(lambda (condition) condition)))) (not (handled-by-system-p)))
           (not (system-handles-p condition sb-kernel::**initial-handler-clusters**))))))

(define-assumption "the function of a standard method is a %METHOD-FUNCTION"
  (let ((method (find-method #'print-object '() (list (find-class 'restart) (find-class t)))))
    (typep (sb-mop:method-function method) 'sb-pcl::%method-function)))

(defun evaluate-as-submitted (form)
  "Compile FORM like submitted code, and return its value."
  (let* ((*evaluation-lexenv* nil)
         (lexenv (cached-lexenv-lexenv (evaluation-lexenv))))
    (call-with-closures-marked lexenv (lambda () (sb-impl::eval-tlf form 0 lexenv)))))

(define-assumption "code compiled like submitted code keeps its closures in its frames, and *SOURCE-PLIST* in its debug source"
  (let* ((sb-c::*source-plist* '(:probe 1))
         (closure (evaluate-as-submitted '(flet ((make (n) (lambda () (incf n) (error "probe ~D" n))))
                                           (declare (notinline make))
                                           (make 1)))))
    (and (sb-kernel:closurep closure)
         (eql 1 (getf (sb-c::debug-source-plist (code-source (sb-kernel:fun-code-header (sb-kernel:%closure-fun closure))))
                      :probe))
         (member closure (frames-at-error closure #'frame-closure) :test #'eq))))

(define-assumption "the names of the frames of methods"
  (flet ((name-of (function) (sb-kernel:%fun-name (sb-kernel:%fun-fun function))))
    (let ((method (find-method #'print-object '() (list (find-class 'restart) (find-class t)))))
      (and (method-frame-name-p (name-of (method-fast-function method)))
           (eq 'sb-pcl::fast-method (first (name-of (sb-pcl::safe-method-fast-function method))))
           (eq method (frame-method (name-of (method-fast-function method))))))))

(define-assumption "an effective method function, called with a list of arguments, returns the generic function's values"
  (let* ((function #'make-load-form)
         (arguments (list (find-class 'restart)))
         (methods (compute-applicable-methods function arguments)))
    (equal (multiple-value-list (apply function arguments))
           (multiple-value-list (call-effective-method function methods arguments)))))
