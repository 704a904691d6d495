;;;; The function that was called in a frame, and the arguments of the call, so that the function can be called again; and
;;;; whether evaluation can continue from a frame.

(in-package "SBCL-HOST/DEBUGGER")

(defun same-code-p (function frame)
  "Return true when FRAME runs the code of FUNCTION. If FUNCTION is the current definition of its name, the name has then
not been redefined since the call."
  (and (typep function '(or sb-kernel:simple-fun sb-kernel:closure))
       (eq (sb-kernel:fun-code-header (sb-kernel:%fun-fun function)) (frame-code frame))))

;;; Whether evaluation can continue from a frame

(defun called-directly-p (frame)
  "Return true when FRAME's function was called by code of the same component, as a local function rather than through a
function object. The calling code relies on everything that the compiler derived about the function, such as that it
never returns."
  (let ((code (frame-code frame))
        (caller (sb-di:frame-down frame)))
    (and caller
         (eq code (frame-code caller))
         (let ((target (direct-call-target (sap-ref-word (sb-di::frame-pointer frame) +return-address-offset+)))
               (start (sap-int (sb-kernel:code-instructions code))))
           (and target
                (<= start target (+ start (sb-kernel:%code-text-size code))))))))

(defun unwind-refusal-reason (frame)
  "Return a format control for the reason, worded as the end of a sentence, why evaluation cannot continue from FRAME.
Return NIL if evaluation can continue."
  (cond ((undefined-function-frame-p frame)
         "the frame is a call of an undefined function: define the function, then invoke the restart CONTINUE")
        ((bogus-frame-p frame) "the frame is not a call of a Lisp function")
        ((not (guarded (sb-debug::frame-has-debug-tag-p frame) (failure) nil))
         (if (system-frame-p frame)
             "the frame's code is SBCL's own, which is compiled without the needed debug information"
             "the frame's code was compiled without the needed debug information: declare (optimize (debug 3)) in its ~
              definition and reload the definition"))
        ((not (stable-frame-p frame))
         "the frame was interrupted while its function was starting, returning or calling another function")
        ((called-directly-p frame)
         "the frame's function was called directly, as a local function, by code that relies on the return ~
          types that the compiler derived")))

(defun declared-to-return-p (frame values)
  "Return false when VALUES, a list, do not have the types that FRAME's function is declaimed to return. The function's
callers may rely on the declaration."
  (let* ((name (sb-debug::frame-call frame :argument-limit 0))
         (type (and (sb-int:legal-fun-name-p name)
                    (eq :declared (sb-int:info :function :where-from name))
                    (sb-int:global-ftype name)))
         (returns (and (typep type 'sb-kernel:fun-type) (sb-kernel:fun-type-returns type))))
    (or (null returns)
        (loop for type in (if (sb-kernel:values-type-p returns)
                              (sb-kernel:values-type-required returns)
                              (list returns))
              for rest = values then (rest rest)
              always (sb-kernel:%%typep (first rest) type)))))

;;; Arguments

(defun known-unsupplied-p (variable frame)
  "Return true when VARIABLE, an SB-DI:DEBUG-VAR or NIL, is the supplied-p parameter of an argument that was not supplied in
FRAME's call."
  (and (typep variable 'sb-di:debug-var)
       (eq :valid (sb-di:debug-var-validity variable (sb-di:frame-code-location frame)))
       (null (sb-di:debug-var-value variable frame))))

(defun supplied-arguments (frame arguments)
  "Return ARGUMENTS, the arguments that SB-DEBUG::FRAME-CALL returned for FRAME, without the default values of arguments
that are known not to have been supplied."
  (if (or (sb-di:debug-fun-kind (sb-di:frame-debug-fun frame))
          (sb-di::all-args-available-p frame))
      arguments
      (loop for element in (sb-di:debug-fun-lambda-list (sb-di:frame-debug-fun frame))
            for rest = arguments then (if (eq kind :keyword) (cddr rest) (rest rest))
            for kind = (if (consp element) (first element) :required)
            append (case kind
                     (:optional (if (known-unsupplied-p (third element) frame)
                                    (loop-finish)
                                    (list (first rest))))
                     (:keyword (unless (known-unsupplied-p (fourth element) frame)
                                 (list (first rest) (second rest))))
                     (:required (list (first rest)))
                     (t rest))
            until (member kind '(:rest :more)))))

(defun frame-arguments (frame unused)
  "Return the arguments of FRAME's call and true, or NIL and NIL if SBCL no longer has all of them. SBCL does not keep
an argument that the function does not use. Such an argument counts as NIL if UNUSED is true, else as missing."
  (multiple-value-bind (name arguments) (sb-debug::frame-call frame :method-frame-style :full)
    (if (listp arguments)
        (loop for argument in (let ((supplied (supplied-arguments frame arguments)))
                                ;; Omit the first two arguments of a method function, which PCL adds to those of the caller.
                                (if (typep name '(cons (eql sb-pcl::fast-method))) (cddr supplied) supplied))
              collect (cond ((not (sb-debug::unprintable-object-p argument)) argument)
                            ((and unused
                                  (equal "unused argument" (sb-debug::unprintable-object-string argument)))
                             nil)
                            (t (return (values '() nil))))
                into all
              finally (return (values all t)))
        (values '() nil))))

;;; Closures

(defun stack-closure-p (address)
  "Return true when ADDRESS, a word tagged as a function, refers to a closure on this thread's stack."
  (and (on-stack-p address)
       (eql sb-vm:closure-widetag
            (sb-sys:sap-ref-8 (int-sap (- address sb-vm:fun-pointer-lowtag)) 0))))

(defun closure-at (address)
  "Return the closure to which ADDRESS refers, or NIL if ADDRESS does not refer to a closure. ADDRESS may be any word."
  (declare (type sb-ext:word address))
  (when (eql sb-vm:fun-pointer-lowtag (logand address sb-vm:lowtag-mask))
    ;; Close the thread's allocation region first: MAKE-LISP-OBJ does not recognise objects in an open region.
    (sb-vm::close-thread-alloc-region)
    (let ((object (if (stack-closure-p address)
                      (sb-kernel:%make-lisp-obj address)
                      (sb-kernel:make-lisp-obj address nil))))
      (and (sb-kernel:closurep object) object))))

(defun closure-place (entry)
  "Return the stack location where frames of ENTRY, a simple function, keep the closure that was called. Return NIL
if they keep no closure."
  (sb-c::compiled-debug-fun-closure-save
   (compiler-debug-fun
    (sb-di::debug-fun-from-pc (sb-kernel:fun-code-header entry) (sb-di::function-start-pc-offset entry)))))

(defun entry-point (frame)
  "Return the simple function of which FRAME is a call. Return NIL if FRAME has no code, or if the function cannot be
distinguished from other functions of its code component."
  (let* ((code (frame-code frame))
         (function (and code (sb-di:frame-debug-fun frame)))
         (place (and code (sb-c::compiled-debug-fun-closure-save (compiler-debug-fun function))))
         (entries (and code
                       (loop for index below (sb-kernel:code-n-entries code)
                             for entry = (sb-kernel:%code-entry-point code index)
                             when (and (equal (sb-di:debug-fun-name function) (sb-kernel:%simple-fun-name entry))
                                       (or (null place) (eql place (closure-place entry))))
                               collect entry))))
    (and (null (rest entries))
         (first entries))))

(defun call-with-closures-marked (lexenv compile)
  "Call COMPILE, a function that compiles a form in LEXENV. If LEXENV is the environment of a submitted form, mark the code
in *SOURCE-PLIST*, because a frame of submitted code keeps the closure that was called. Code that a macro compiles
meanwhile is not marked."
  (declare (type function compile))
  (let* ((marked (getf sb-c::*source-plist* :closures-kept))
         (mark (submitted-code-lexenv-p lexenv))
         (sb-c::*source-plist* (cond ((eq marked mark) sb-c::*source-plist*)
                                     (t (list* :closures-kept mark sb-c::*source-plist*)))))
    (funcall compile)))

(defun closures-kept-p (frame)
  "Return true when FRAME runs submitted code, whose frames keep the closure that was called."
  (let ((source (sb-di:code-location-debug-source (sb-di:frame-code-location frame))))
    (and (null (sb-di:debug-source-namestring source))
         (getf (sb-c::debug-source-plist source) :closures-kept))))

(defun frame-closure (frame)
  "Return the function object that was called in FRAME, or NIL if that object is unknown. Only a frame of submitted code
keeps its function object, and only if the function was not called as a local function."
  (let ((entry (and (not (called-directly-p frame)) (entry-point frame))))
    (when entry
      (let ((place (closure-place entry)))
        (cond (place
               ;; On arm64, a collection may move the closure after its address was read.
               (let ((closure (without-gcing
                                (closure-at (sap-ref-word (sb-di::frame-pointer frame) (stack-place-offset place))))))
                 (and closure
                      (eq entry (sb-kernel:%closure-fun closure))
                      closure)))
              ;; If the code keeps closures but has no place for this one, the function closes over nothing.
              ((closures-kept-p frame) entry))))))

(defun closure-name (debug-fun-closure-name function frame)
  "Return the name of the closure that was called in FRAME, a frame of FUNCTION, or NIL if the closure is unknown.
DEBUG-FUN-CLOSURE-NAME is SBCL's function for this purpose. SBCL's function does not check that the word which it reads
from the stack is the closure, so it is called only when this is certain. Otherwise FRAME-CLOSURE finds the closure."
  (cond ((or (not (typep function 'sb-di::compiled-debug-fun))
             (null (sb-c::compiled-debug-fun-closure-save (compiler-debug-fun function)))
             (sb-di::all-args-available-p frame))
         (funcall debug-fun-closure-name function frame))
        (t
         (let ((closure (frame-closure frame)))
           (and closure (sb-kernel:%fun-name closure))))))

;;; Methods

(defun method-fast-function (method)
  "Return the function that runs in the frames of METHOD's calls."
  (let ((function (sb-mop:method-function method)))
    (if (typep function 'sb-pcl::%method-function)
        (or (sb-pcl::%method-function-fast-function function) function)
        function)))

(defun method-frame-name-p (name)
  "Return true when NAME is a name that SBCL gives to the frames of a method."
  (typep name '(cons (member sb-pcl::fast-method sb-pcl::slow-method) cons)))

(defun frame-method (name)
  "Return the currently defined method whose frames are named NAME, and its generic function. The first value is NIL if
there is no such method. Both values are NIL if NAME is not the name of a method of an existing generic function."
  (let ((function (and (method-frame-name-p name)
                       (sb-int:legal-fun-name-p (second name))
                       (fboundp (second name))
                       (fdefinition (second name)))))
    (when (typep function 'standard-generic-function)
      (values (find (rest name) (sb-mop:generic-function-methods function)
                    :key (lambda (method)
                           (let ((name (sb-kernel:%fun-name (method-fast-function method))))
                             (and (consp name) (rest name))))
                    :test #'equal)
              function))))

(defun call-effective-method (function methods arguments)
  "Combine METHODS, in the given order, into an effective method of FUNCTION, a generic function, and call it with
ARGUMENTS."
  (sb-pcl::invoke-emf (sb-pcl::get-effective-method-function function methods) arguments))

(defun next-methods (method function arguments)
  "Return the list of METHOD's next methods in a call of the generic FUNCTION with ARGUMENTS, as METHOD's function
expects the list, and true. Return NIL and NIL if the next methods are unknown."
  (let* ((applicable (compute-applicable-methods function arguments))
         (place (member method applicable)))
    (flet ((aroundp (method) (equal '(:around) (method-qualifiers method))))
      (cond ((typep (sb-mop:generic-function-method-combination function) 'sb-pcl::long-method-combination)
             (values '() nil))
            ;; The only method has no next methods, so it does not matter that SBCL may have lost some arguments.
            ((and (null (method-qualifiers method))
                  (null (rest (sb-mop:generic-function-methods function))))
             (values '() t))
            ((null place) (values '() nil))
            ((aroundp method)
             (let ((inner (remove-if #'aroundp applicable)))
               (values (append (remove-if-not #'aroundp (rest place))
                               (list (lambda (arguments next-methods)
                                       (declare (ignore next-methods))
                                       (call-effective-method function inner arguments))))
                       t)))
            ((method-qualifiers method) (values '() t))
            (t (values (remove-if #'method-qualifiers (rest place)) t))))))

;;; Calling the function again

(defun refuse-to-restart (number control &rest arguments)
  "Refuse to restart frame NUMBER, for the reason that CONTROL, a format control, and ARGUMENTS give."
  (refuse "The function of frame ~D cannot be called again: ~? To continue without the call, pass `return` with code ~
           for the frame's values."
          number control arguments))

(defun frame-function (frame number)
  "Return a function and a list of arguments with which FRAME, whose number is NUMBER, can be restarted. The function is
the current definition of FRAME's function or, if the function has no global name, the closure that was called in FRAME.
Refuse if the function or an argument is unknown."
  (let* ((full-name (sb-debug::frame-call frame :method-frame-style :full :argument-limit 0))
         (methodp (method-frame-name-p full-name))
         ;; Backtraces show this name.
         (shown-name (if methodp (cons :method (rest full-name)) full-name))
         (global (and (not methodp)
                      (sb-int:legal-fun-name-p full-name)
                      (fboundp full-name)
                      (global-function full-name)))
         (closure (and (not methodp) (not global) (frame-closure frame))))
    (multiple-value-bind (method generic-function) (frame-method full-name)
      (let ((function (or global (and method (method-fast-function method)) closure)))
        (cond ((null function)
               (refuse-to-restart number "~A" (missing-function-reason shown-name methodp)))
              (t
               (multiple-value-bind (arguments all) (frame-arguments frame (same-code-p function frame))
                 (cond ((not all)
                        (refuse-to-restart number "SBCL no longer has all the arguments of ~S." shown-name))
                       ((null method) (values function arguments))
                       (t
                        (multiple-value-bind (next-methods known)
                            (next-methods method generic-function arguments)
                          (if known
                              (values (sb-mop:method-function method) (list arguments next-methods))
                              (refuse-to-restart
                               number "the next methods of ~S cannot be determined~:[ without arguments that SBCL no longer ~
                                       has~; for a long-form method combination~]."
                               shown-name
                               (typep (sb-mop:generic-function-method-combination generic-function)
                                      'sb-pcl::long-method-combination)))))))))))))

(defun missing-function-reason (name methodp)
  "Return a sentence that says why the function of a frame named NAME is unknown. METHODP is true for the frame of a method."
  (format nil "~S ~@?" name
          (cond (methodp "is no longer defined.")
                ((sb-int:legal-fun-name-p name) "has no global definition.")
                (t "has no global name, and its frame does not keep the function object, unlike most frames of code that was ~
                    evaluated rather than loaded."))))
