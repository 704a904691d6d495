;;;; Describing an error: the condition, its restarts and its frames, all captured before the stack unwinds.

(in-package "SBCL-HOST")

(declaim (type (unsigned-byte 64) *user-code-boundary*))
(defvar *user-code-boundary* +no-boundary+
  "The frame pointer of the function that called the user's code, or +NO-BOUNDARY+ if no user code was called on this thread.
The frame at this address, and all frames outside it, are the server's.")

(defconstant +max-full-stack-depth+ 1000
  "The maximum depth of a stack that is captured in full. For a deeper stack, only the innermost and the outermost frames
are captured, half of this number of each.")

(defmacro frame-pointer-here ()
  "Return the frame pointer of the function that contains this form."
  '(sap-int (sb-vm::current-fp)))

(defmacro with-user-code-boundary (() &body body)
  "Evaluate BODY with *USER-CODE-BOUNDARY* bound to the frame pointer of the function that contains this form: frames of
calls in BODY count as the user's, all outer frames as the server's."
  `(let ((*user-code-boundary* (frame-pointer-here)))
     ,@body))

(defun frame-address (frame)
  "Return FRAME's frame pointer."
  (sap-int (sb-di::frame-pointer frame)))

(declaim (inline user-frame-p))
(defun user-frame-p (frame)
  "Return true when FRAME is inside *USER-CODE-BOUNDARY*."
  (inner-frame-p (frame-address frame) *user-code-boundary*))

;;; Selecting frames

(defun frame-file (frame)
  "Return the namestring of the source file of FRAME's code, or NIL for evaluated code."
  (sb-di:debug-source-namestring
   (sb-di:code-location-debug-source (sb-di:frame-code-location frame))))

(defun begins-with-p (prefix text)
  "Return true when the string TEXT begins with the string PREFIX. MISMATCH and STRING= take ten times as long, and this
function is called for every frame."
  (declare (type simple-string prefix text))
  (let ((end (length prefix)))
    (macrolet ((compare ()
                 '(loop for index of-type index from 0 below end
                        always (char= (schar prefix index) (schar text index))))
               (with-kind-of (string &body body)
                 `(etypecase ,string
                    (simple-base-string ,@body)
                    ((simple-array character (*)) ,@body))))
      (and (<= end (length text))
           (with-kind-of text (with-kind-of prefix (compare)))))))

(defun bogus-frame-p (frame)
  "Return true when FRAME is not a call of a Lisp function: a foreign frame, or SBCL's frame for an undefined function."
  (typep (sb-di:frame-debug-fun frame) 'sb-di::bogus-debug-fun))

(defun system-frame-p (frame)
  "Return true when BOGUS-FRAME-P is true of FRAME, or when FRAME is a call of a function of SBCL's own or of the Lisp
side, whose source files all have names that begin with SYS:."
  (or (bogus-frame-p frame)
      (let ((file (ignore-errors (frame-file frame))))
        (and file (begins-with-p "SYS:" file)))))

(defun host-frame-p (frame)
  "Return true when FRAME belongs to the Lisp side of the host."
  (let ((file (and (not (bogus-frame-p frame)) (ignore-errors (frame-file frame)))))
    (and file (begins-with-p "SYS:HOST;" file))))

(defun stand-in-frame-p (frame)
  "Return true when FRAME is a call of ENTER-DEBUGGER or SIGNAL-RECORDED-WARNING, functions of the Lisp side that replace
functions of SBCL's. DISPLAYED-CALL returns the call to show instead."
  (member (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '(enter-debugger signal-recorded-warning)))

(defun shown-frame-p (frame)
  "Return true when backtraces show FRAME: it does not belong to the Lisp side, or it is a STAND-IN-FRAME-P, shown as a call
of the SBCL function that its function replaces."
  (or (not (host-frame-p frame))
      (stand-in-frame-p frame)))

(defglobal **null-lexenv** (sb-kernel:make-null-lexenv)
  "The null lexical environment. Frames of evaluated forms show this object as the environment, as in bare SBCL.")

(defun empty-lexenv-p (object)
  "Return true when OBJECT is a lexical environment without bindings."
  (and (typep object 'sb-kernel:lexenv)
       (not (or (sb-c::lexenv-funs object) (sb-c::lexenv-vars object)
                (sb-c::lexenv-blocks object) (sb-c::lexenv-tags object)))))

(defun displayed-call (name arguments)
  "Return the function name and the arguments to show for a frame that calls the function NAME with ARGUMENTS. ARGUMENTS is not
a list if the arguments are unavailable."
  (case (and (listp arguments) name)
    (sb-impl::eval-tlf (values 'eval (list (first arguments))))
    (sb-int:simple-eval-in-lexenv
     (values name (substitute-if **null-lexenv** #'empty-lexenv-p arguments)))
    (enter-debugger (values 'invoke-debugger (rest arguments)))
    (signal-recorded-warning
     (destructuring-bind (warn class default datum more) arguments
       (declare (ignore warn default))
       (values (if (eq class 'warning) 'warn 'sb-int:style-warn)
               (cons datum (if (listp more) more '())))))
    (t (values name arguments))))

(defun frame-at (address)
  "Return the frame of this thread whose frame pointer is ADDRESS. Return NIL if ADDRESS is beyond the outermost frame."
  (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
        while (and frame (inner-frame-p (frame-address frame) address))
        finally (return frame)))

(defun caller-frame (address)
  "Return the frame of the caller of the frame whose frame pointer is ADDRESS. Both frames must be Lisp frames."
  (let ((frame (int-sap address)))
    ;; TOP-FRAME computes its result in the same way (src/code/debug-int.lisp), without walking the stack from its top.
    (sb-di::compute-calling-frame (sap-ref-sap frame +caller-offset+) (sap-ref-sap frame +return-address-offset+) nil)))

(defun named-frame (name frame)
  "Return the innermost frame of the function NAME among FRAME and its next 49 callers, up to *USER-CODE-BOUNDARY*; or NIL."
  (loop for candidate = frame then (sb-di:frame-down candidate)
        repeat 50
        while (and candidate (user-frame-p candidate))
        when (eq name (sb-di:debug-fun-name (sb-di:frame-debug-fun candidate)))
          return candidate))

(defun resolve-stack-top-hint (frame)
  "Return the frame of the error according to SBCL's stack top hint, or NIL. The hint is a frame, or the name of the
function that was called to report the error, such as ERROR. If the hint is a name, return the frame of this function,
found among FRAME and its callers."
  (let ((hint sb-debug:*stack-top-hint*))
    (cond ((sb-di:frame-p hint) hint)
          ;; ERROR within RESTART-CASE compiles to a call of this function.
          ((eq hint 'sb-kernel:with-simple-condition-restarts)
           (or (named-frame 'error frame) (named-frame hint frame)))
          ((and hint (symbolp hint)) (named-frame hint frame)))))

(defun error-frame (hook)
  "Return the frame of the error that was reported to the function with frame pointer HOOK. Prefer a user frame inside the
frame of SBCL's stack top hint, because an error in a handler inherits the hint of the error that is being handled."
  (let* ((frame (if sb-debug:*stack-top-hint*
                    (caller-frame hook)
                    ;; Without a hint, the code called the debugger itself, and the frame at HOOK represents this call.
                    (return-from error-frame (frame-at hook))))
         (hint (and frame (resolve-stack-top-hint frame)))
         (limit (and hint (frame-address hint)))
         (skipped nil))
    (loop while (and frame
                     (user-frame-p frame)
                     (or (host-frame-p frame)
                         (foreign-frame-p frame)
                         (and limit
                              (inner-frame-p (frame-address frame) limit)
                              (system-frame-p frame))))
          do (shiftf skipped frame (sb-di:frame-down frame)))
    ;; An error in an interruption inherits the hint of the interrupted code. The call that reports the error, such as
    ;; ERROR, is then the last skipped frame, inside the hinted frame.
    (if (and skipped frame limit
             (inner-frame-p (frame-address frame) limit)
             (member (sb-di:debug-fun-name (sb-di:frame-debug-fun skipped)) '(error cerror break)))
        skipped
        (skip-trap-frames frame))))

(defun foreign-frame-p (frame)
  "Return true when FRAME belongs to C code."
  (and (bogus-frame-p frame)
       (not (undefined-function-frame-p frame))))

(defun skip-trap-frames (frame)
  "Return the frame that trapped if FRAME belongs to the code that the runtime calls to handle a trap, such as a signal or
an exhausted stack or heap. Else return FRAME. FRAME belongs to such code if only system frames lie between FRAME and a
foreign frame outside it."
  (let ((foreign (loop with last = nil
                       for candidate = frame then (sb-di:frame-down candidate)
                       repeat 40
                       while (and candidate
                                  (user-frame-p candidate)
                                  (system-frame-p candidate))
                       when (foreign-frame-p candidate) do (setf last candidate)
                       finally (return last))))
    (if foreign
        (sb-di:frame-down foreign)
        frame)))

(defun interrupted-frame (hook)
  "Return the frame that was running when this thread was interrupted. HOOK is the frame pointer of the function that the
interruption called."
  (let ((frame (or (let ((frame (interrupted-lisp-frame)))
                     (and frame (inner-frame-p hook (frame-address frame)) frame))
                   (caller-frame hook))))
    ;; If the thread was in a foreign call, the innermost frames are bogus, so skip them.
    (loop while (and frame (bogus-frame-p frame) (user-frame-p frame))
          do (setf frame (sb-di:frame-down frame)))
    ;; The frame may belong to the code that the runtime calls after a garbage collection.
    (skip-trap-frames frame)))

(defun saved-frame-pointers (address)
  "Follow the saved frame pointers from the frame at ADDRESS outwards to *USER-CODE-BOUNDARY*. Return two values: the number
of frames between ADDRESS and the boundary, and a list of the outermost of these frames, at most half of
+MAX-FULL-STACK-DEPTH+. Each element is a cons of a frame pointer and the return address into that frame's function."
  (declare (type (unsigned-byte 64) address))
  (let* ((size (floor +max-full-stack-depth+ 2))
         ;; Use fixed arrays as ring buffers instead of allocating for each frame: there may be millions of frames.
         (callers (make-array size :element-type '(unsigned-byte 64)))
         (return-addresses (make-array size :element-type '(unsigned-byte 64)))
         (count 0))
    (declare (type index count))
    (loop
      (let ((caller (sap-ref-word (int-sap address) +caller-offset+))
            (return-address (sap-ref-word (int-sap address) +return-address-offset+)))
        (unless (and (inner-frame-p address caller)
                     (inner-frame-p caller *user-code-boundary*)
                     (zerop (logand caller 7)))
          (return))
        (setf (aref callers (mod count size)) caller
              (aref return-addresses (mod count size)) return-address
              address caller)
        (incf count)))
    (values count
            (loop for number from (max 0 (- count size)) below count
                  for place = (mod number size)
                  collect (cons (aref callers place) (aref return-addresses place))))))

(defun map-user-backtrace (map-backtrace function &rest options
                           &key (start 0) (from :debugger-frame) (count sb-debug:*backtrace-frame-count*))
  "Call FUNCTION with each frame of a backtrace, as MAP-BACKTRACE, SBCL's function, does with the same keyword arguments.
If the host called the user's code, call FUNCTION with the frames of that code only."
  (declare (type function function))
  (if (eql +no-boundary+ *user-code-boundary*)
      (apply (the function map-backtrace) function options)
      (loop with index = -1
            with result = nil
            for frame = (if (sb-di:frame-p from) from (sb-debug::backtrace-start-frame from))
              then (sb-di:frame-down frame)
            while (and frame (user-frame-p frame))
            do (when (and (shown-frame-p frame)
                          (>= (incf index) start))
                 (when (= index (+ start count))
                   (return result))
                 (setf result (funcall function frame)))
            finally (return result))))

(defvar *incomplete-frames* nil
  "True when the stack may have been exhausted while a frame was being built. SBCL takes such an incomplete frame for a
foreign frame, so foreign frames are then left out of reports.")

(defun user-frames (frame)
  "Return two values: the shown frames from FRAME to *USER-CODE-BOUNDARY*, innermost first, as a list of conses of number and
frame; and the total number of frames. The middle of a stack deeper than +MAX-FULL-STACK-DEPTH+ is omitted from the list."
  (let ((frames '())
        (count 0)
        (half (floor +max-full-stack-depth+ 2)))
    (loop while (and frame (< count +max-full-stack-depth+) (user-frame-p frame))
          do (unless (or (not (shown-frame-p frame))
                         (and *incomplete-frames* (foreign-frame-p frame)))
               (push (cons count frame) frames)
               (incf count))
             (setf frame (sb-di:frame-down frame)))
    (if (or (null frame) (not (user-frame-p frame)))
        (values (nreverse frames) count)
        (multiple-value-bind (more last) (saved-frame-pointers (frame-address (cdr (first frames))))
          (let ((total (+ count more)))
            (loop with up = (cdr (first frames))
                  for (address . return-address) in last
                  for number from (- total (length last))
                  do (setf up (sb-di::compute-calling-frame (int-sap address) (int-sap return-address) up))
                     (unless up (return))
                     (push (cons number up) frames))
            (values (delete-if (lambda (entry) (<= half (car entry) (- total half 1)))
                               (nreverse frames))
                    total))))))

;;; Describing frames

(defstruct (reported-frame (:copier nil) (:predicate nil))
  "The description of a frame as reports show it: a call with its arguments, its source location and its local variables."
  (number 0 :type index)
  name
  arguments
  code-location
  ;; True when SYSTEM-FRAME-P was true of the frame.
  (system nil)
  ;; The value of FRAME-MACHINERY: the phrase that names the machinery (the reader, the compiler and so on) to which the
  ;; frame belongs; or NIL.
  (machinery nil :type (or null string))
  ;; The local variables, as LOCALS returns them.
  (locals '() :type list))

(defconstant +frames-with-locals+ 50
  "The number of innermost frames whose local variables are captured.")

(defun user-variable-name-p (symbol)
  "Return true when SYMBOL, the name of a local variable, looks as if a user chose it: it is not empty, and it has a home
package that is not one of SBCL's."
  (let ((package (symbol-package symbol)))
    (and package
         (plusp (length (symbol-name symbol)))
         (not (eql 3 (mismatch "SB-" (package-name package)))))))

(defun frame-code (frame)
  "Return the code component of FRAME's function, or NIL if FRAME is not a call of a compiled Lisp function."
  (let ((function (sb-di:frame-debug-fun frame)))
    (and (typep function 'sb-di::compiled-debug-fun)
         (sb-di::compiled-debug-fun-component function))))

(defun compiler-debug-fun (function)
  "Return the SB-C::COMPILED-DEBUG-FUN, which is the compiler's record, for FUNCTION, an SB-DI::COMPILED-DEBUG-FUN."
  (sb-di::compiled-debug-fun-compiler-debug-fun function))

(defun interrupt-context (frame)
  "Return the context in which FRAME was interrupted or trapped; or NIL if there is none, or if SBCL does not know it."
  (let ((context (sb-di::compiled-frame-escaped frame)))
    ;; SBCL may store T: a context was found for C code that does not keep the frame pointer.
    (and (not (eq t context))
         (frame-code frame)
         context)))

(defun interrupted-offset (frame context)
  "Return the offset, in FRAME's code, of the instruction at which FRAME was interrupted in CONTEXT. Return NIL in code that
FRAME's code had called and that has no frame, such as an assembly routine."
  (let ((offset (- (sap-int (sb-vm:context-pc context)) (sap-int (sb-kernel:code-instructions (frame-code frame))))))
    (and (< -1 offset (sb-kernel:%code-text-size (frame-code frame)))
         offset)))

(defun stable-frame-p (frame)
  "Return false when FRAME may have been interrupted while its function was being entered or left, or was about to call
another function. At such points the frame pointer may belong to another frame, and FRAME may not yet contain the values
that its code keeps there."
  (let ((context (interrupt-context frame)))
    (if (null context)
        (not (sb-di::compiled-frame-escaped frame))
        (let* ((pc (sap-int (sb-vm:context-pc context)))
               (offset (interrupted-offset frame context))
               (frame-pointer (sb-di::frame-pointer frame))
               (function (compiler-debug-fun (sb-di:frame-debug-fun frame)))
               (place (sb-c::compiled-debug-fun-bsp-save function)))
          (or (trapped-p pc)
              (and offset
                   (>= offset (sb-c::compiled-debug-fun-start-pc function))
                   (not (changing-frames-p pc frame-pointer))
                   ;; The stack of a call that has not begun ends at the call's arguments.
                   (or (null place)
                       (stack-contains-p context (+ (sap-int frame-pointer) (stack-place-offset place))))))))))

(defvar *breakpoint-context* nil
  "The address of the context in which this thread has stopped at a breakpoint, a SAP, or NIL.")

(defun at-breakpoint-p (frame)
  "Return true when FRAME has stopped at a breakpoint, where its values are in their places."
  (let ((context (interrupt-context frame)))
    (and context
         *breakpoint-context*
         (sap= *breakpoint-context* (alien-sap context)))))

(defun changing-frame-p (frame)
  "Return true when FRAME was interrupted in its own code while its frame was being made or left."
  (let ((context (interrupt-context frame)))
    (and context
         (not (at-breakpoint-p frame))
         (interrupted-offset frame context)
         (not (stable-frame-p frame)))))

(defun signal-trampoline-p (frame)
  "Return true when FRAME is the frame of the code through which SBCL's runtime calls Lisp after an access to memory."
  (equal "foreign function: post_signal_tramp" (sb-di:debug-fun-name (sb-di:frame-debug-fun frame))))

(defun exhausted-frame-p (frame)
  "Return true when the stack was exhausted in FRAME, so that FRAME may not contain its values."
  (let* ((trampoline (sb-di:frame-up frame))
         (handler (and trampoline
                       (signal-trampoline-p trampoline)
                       (sb-di:frame-up trampoline)
                       (sb-di:frame-up (sb-di:frame-up trampoline)))))
    (and handler
         (not (eq 'sb-kernel::memory-fault-error (sb-di:debug-fun-name (sb-di:frame-debug-fun handler)))))))

(defun interrupted-frame-p (frame)
  "Return true when FRAME was interrupted at an arbitrary instruction, rather than by a trap: by a signal, or by an access to
memory that made SBCL's runtime call Lisp."
  (let ((context (interrupt-context frame))
        (called (sb-di:frame-up frame)))
    (if context
        (not (trapped-p (sap-int (sb-vm:context-pc context))))
        (or (sb-di::compiled-frame-escaped frame)
            (and called (signal-trampoline-p called))))))

(defun readable-frame-p (frame)
  "Return false when a variable's place in FRAME may contain something else than the variable's value: where FRAME was
interrupted, and its code does not keep its arguments everywhere, as SBCL's own code; or where FRAME, or the function that it
was calling, was interrupted while its frame was being made or left."
  (let ((called (sb-di:frame-up frame)))
    (or (null (frame-code frame))
        (at-breakpoint-p frame)
        (and (not (changing-frame-p frame))
             (or (null called) (not (changing-frame-p called)))
             (or (not (interrupted-frame-p frame))
                 (let ((function (compiler-debug-fun (sb-di:frame-debug-fun frame))))
                   (not (or (eq t (sb-di::compiled-frame-escaped frame))
                            (exhausted-frame-p frame)
                            (system-frame-p frame)
                            (eq :minimal (sb-c::compiled-debug-fun-arguments function))
                            (< (sb-di::compiled-code-location-pc (sb-di:frame-code-location frame))
                               (sb-c::compiled-debug-fun-start-pc function))))))))))

(defun unavailable-value (kind)
  "Return an object that stands for the values of KIND, a string, in a frame for which READABLE-FRAME-P is false."
  (sb-debug::make-unprintable-object (concatenate 'string "unavailable " kind)))

(defun locals (frame)
  "Return the local variables of FRAME as lists of four elements: symbol, validity, value and ID. The validity is :VALID;
:INVALID when the variable is dead at this point; or :UNKNOWN. The value is NIL unless the validity is :VALID. Return NIL
if SYSTEM-FRAME-P is true of FRAME, or if its code was compiled without debug information about variables. If several
variables of one name have values, return all of these, with SBCL's numbers for them as IDs: SBCL does not say which is the
innermost. All other IDs are NIL, and of variables of one name that have no values only the first is returned."
  (let ((function (sb-di:frame-debug-fun frame))
        (location (sb-di:frame-code-location frame))
        (variables '()))
    (when (and (not (system-frame-p frame))
               (sb-di:debug-var-info-available function))
      (setf variables (remove-if-not #'user-variable-name-p (sb-di:ambiguous-debug-vars function "")
                                     :key #'sb-di:debug-var-symbol))
      (loop for variable in variables
            for symbol = (sb-di:debug-var-symbol variable)
            for validity = (sb-di:debug-var-validity variable location)
            for same = (remove symbol variables :key #'sb-di:debug-var-symbol :test-not #'eq)
            for valid = (remove :valid same :key (lambda (other) (sb-di:debug-var-validity other location)) :test-not #'eq)
            when (if valid (eq validity :valid) (eq variable (first same)))
              collect (list symbol validity
                            (when (eq validity :valid)
                              (let ((value (sb-di:debug-var-value variable frame)))
                                ;; Replace an object on the stack: it does not outlive the frame.
                                (if (sb-debug::stack-allocated-p value)
                                    (sb-debug::replace-dynamic-extent-object value)
                                    value)))
                            (and (rest valid) (sb-di:debug-var-id variable)))))))

(defun local-label (symbol id)
  "Return the text that names the local variable SYMBOL in reports. Append ID, the variable's number, unless ID is NIL."
  (format nil "~A~@[#~D~]" (guarded (prin1-to-string symbol) (failure) (symbol-name symbol)) id))

(defun sort-locals (locals location)
  "Sort LOCALS, a value of the function LOCALS, by the first occurrence of their names in the top-level form at LOCATION, a
SOURCE-LOCATION. If LOCATION is NIL or has no text, return LOCALS unchanged."
  (let ((text (and (rest locals) location (source-location-text location))))
    (if text
        (stable-sort (copy-list locals) #'<
                     :key (lambda (local)
                            (or (token-position (symbol-name (first local)) text) most-positive-fixnum)))
        locals)))

(defun ordered-locals (frame)
  "Return the local variables of FRAME as LOCALS does, in the order in which they occur in the source code."
  (let ((locals (locals frame)))
    (and locals
         (sort-locals locals (guarded (code-location-source-location (sb-di:frame-code-location frame)) (failure) nil)))))

(defun undefined-function-frame-p (frame)
  "Return true when FRAME is the frame that SBCL shows in place of a call of an undefined function."
  (equal "undefined function" (sb-di:debug-fun-name (sb-di:frame-debug-fun frame))))

(defun standard-syntax-p (character &optional sub-character)
  "Return true when CHARACTER, or CHARACTER followed by SUB-CHARACTER, has its standard syntax in the current readtable."
  (flet ((meaning (readtable)
           (if sub-character
               (get-dispatch-macro-character character sub-character readtable)
               (get-macro-character character readtable))))
    ;; If CHARACTER is no longer a dispatching macro character, GET-DISPATCH-MACRO-CHARACTER signals an error.
    (eq (ignore-errors (meaning *readtable*)) (meaning sb-impl::*standard-readtable*))))

(defun skip-whitespace-and-comments (stream)
  "Skip whitespace and comments in STREAM. Stop at a comment that does not end or whose syntax the user has changed."
  (loop
    (case (peek-char t stream nil)
      (#\; (if (standard-syntax-p #\;)
               (read-line stream nil)
               (return)))
      (#\# (let ((start (file-position stream)))
             (unless (and (standard-syntax-p #\# #\|) (skip-block-comment stream))
               (file-position stream start)
               (return))))
      (t (return)))))

(defun skip-block-comment (stream)
  "Skip the block comment that begins at the current position of STREAM, a #. Return true; or NIL if no block comment begins
there or if the comment does not end."
  (read-char stream)
  (when (eql #\| (peek-char nil stream nil))
    (let ((depth 0)
          (last #\#))
      (loop for character = (read-char stream nil)
            while character
            do (cond ((and (char= last #\#) (char= character #\|))
                      (incf depth)
                      (setf last #\Space))
                     ((and (char= last #\|) (char= character #\#))
                      (setf last #\Space)
                      (when (zerop (decf depth))
                        (return t)))
                     (t (setf last character)))))))

(defvar *machinery-directories* '()
  "The directories of machinery that is not part of SBCL, such as a test framework: conses of a directory's native
namestring and the phrase that FRAME-MACHINERY returns for code from that directory.")

(defun containing-function-name (name)
  "Return the name of the function that contains the local function NAME, as in (FLET F :IN G). If NAME, the function name
of a frame, names no local function, return NAME if it is a symbol and NIL if it is a list."
  (if (consp name) (second (member :in name)) name))

(defun frame-machinery (frame)
  "Return the phrase that names the machinery to which FRAME belongs, such as the reader, the compiler or the loader; or
NIL."
  (let ((file (and (not (bogus-frame-p frame)) (frame-file frame))))
    (flet ((under-p (prefix) (and file (begins-with-p prefix file))))
      (cond ((assoc-if #'under-p *machinery-directories*)
             (cdr (assoc-if #'under-p *machinery-directories*)))
            ((not (under-p "SYS:")) nil)
            ((or (under-p "SYS:SRC;CODE;TARGET-SIGNAL") (under-p "SYS:SRC;CODE;FLOAT-TRAP.") (under-p "SYS:SRC;CODE;INTERR.")
                 (under-p "SYS:SRC;CODE;TIMER.")
                 (eq 'sb-thread::run-interruption
                     (containing-function-name (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))))
             "signal handling")
            ((or (under-p "SYS:SRC;CODE;READER.") (under-p "SYS:SRC;CODE;SHARPM.")) "the reader")
            ((or (under-p "SYS:SRC;CODE;TARGET-LOAD.") (under-p "SYS:SRC;CODE;LOAD.")) "the loader")
            ((under-p "SYS:SRC;COMPILER;") "the compiler")
            ((under-p "SYS:CONTRIB;ASDF;") "ASDF")))))

(defun reporting-call-p (call machinery)
  "Return true when CALL only reports an error that MACHINERY found. MACHINERY is a value of FRAME-MACHINERY, such as \"the
reader\", and CALL is inside the innermost frame of this machinery."
  (or (member (reported-frame-name call) '(error cerror sb-kernel:with-simple-condition-restarts sb-c:compiler-error))
      ;; The reader calls functions of the stream from which it reads. Errors in these functions count as the reader's.
      (and (string= machinery "the reader")
           (reported-frame-system call)
           (not (member (reported-frame-name call) '(eval sb-int:simple-eval-in-lexenv))))))

(defun dispatching-call-p (call)
  "Return true when CALL is a call that SBCL inserts between two functions, such as FUNCALL or the dispatch to a method."
  (or (member (reported-frame-name call)
              '(funcall apply sb-int:simple-eval-in-lexenv sb-impl::call-with-loader-package-names
                sb-impl::%with-standard-io-syntax error sb-kernel::%signal))
      (eq 'sb-thread::call-with-recursive-lock (containing-function-name (reported-frame-name call)))
      (and (consp (reported-frame-name call))
           (or (member (first (reported-frame-name call)) '(sb-pcl::emf sb-pcl::fast-method sb-pcl::ctor))
               (find-if (lambda (part) (and (symbolp part) (member (symbol-package part)
                                                                   '#.(mapcar #'find-package '("SB-C" "SB-PCL")))))
                        (reported-frame-name call))))))

(defun mark-signal-handling-frames (calls)
  "Mark further frames in CALLS as signal handling: the foreign frames in which the C runtime handles a signal. These
frames lie just outside SBCL's own frames that are marked so already, and end with a frame without a name, which the kernel
called."
  (loop with within = nil
        for call in calls
        for name = (reported-frame-name call)
        do (cond ((equal "signal handling" (reported-frame-machinery call))
                  (setf within t))
                 ((and within (stringp name))
                  (setf (reported-frame-machinery call) "signal handling"
                        within (begins-with-p "foreign function: " name))
                  (when (begins-with-p "foreign function: #x" name)
                    (setf within nil)))
                 (t (setf within nil)))))

(defun mark-machinery-frames (calls)
  "Mark two more kinds of frames in CALLS as machinery, such as the reader or the compiler: frames between two frames that
are marked already, if they only dispatch calls; and the innermost frames, if they only report an error that the
machinery outside them found."
  (mark-signal-handling-frames calls)
  (let* ((front (or (position-if #'reported-frame-machinery calls) 0))
         (machinery (and calls (reported-frame-machinery (nth front calls)))))
    (when (and machinery (every (lambda (call) (reporting-call-p call machinery)) (subseq calls 0 front)))
      (loop for call in calls
            repeat front
            do (setf (reported-frame-machinery call) machinery))))
  (loop for (call . rest) on calls
        when (reported-frame-machinery call)
          do (let ((next (member-if-not (lambda (call)
                                          (and (null (reported-frame-machinery call)) (dispatching-call-p call)))
                                        rest)))
               (when (and next (reported-frame-machinery (first next)))
                 (loop for between on rest
                       until (eq between next)
                       do (setf (reported-frame-machinery (first between)) (reported-frame-machinery (first next)))))))
  ;; If the loader or the compiler calls the reader, the reader's frames count as the caller's. If ASDF calls the loader or
  ;; the compiler, their frames count as ASDF's.
  (let ((order '("the reader" "the compiler" "the loader" "ASDF")))
    (loop for (caller call) on (reverse calls)
          while call
          do (when (and (reported-frame-machinery call) (reported-frame-machinery caller)
                        (< (or (position (reported-frame-machinery call) order :test #'string=) (length order))
                           (or (position (reported-frame-machinery caller) order :test #'string=) 0)))
               (setf (reported-frame-machinery call) (reported-frame-machinery caller))))))

(defun replace-stack-argument (argument)
  "Return ARGUMENT, an argument of a call. If ARGUMENT is allocated on the stack and so does not outlive the call, return a
placeholder that names its class instead."
  (if (sb-debug::stack-allocated-p argument)
      (sb-debug::make-unprintable-object
       (format nil "dynamic-extent ~A" (type-name-text (class-name-of argument))))
      argument))

(defun capture-frame (number frame condition &key outlives)
  "Return the REPORTED-FRAME for FRAME, which has NUMBER in the backtrace of CONDITION. If OUTLIVES is true, the arguments in
the structure stay valid when FRAME no longer exists."
  (multiple-value-bind (name arguments)
      (guarded (sb-debug::frame-call frame :argument-limit 100)
          (failure)
        (values (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '()))
    (make-reported-frame :number number
                         :name (if (and (undefined-function-frame-p frame) (typep condition 'undefined-function))
                                   (cell-error-name condition)
                                   name)
                         :arguments (if (and outlives (listp arguments))
                                        (mapcar #'replace-stack-argument arguments)
                                        arguments)
                         :code-location (and (not (bogus-frame-p frame)) (sb-di:frame-code-location frame))
                         :system (system-frame-p frame)
                         :machinery (guarded (frame-machinery frame) (failure) nil)
                         :locals (when (< number +frames-with-locals+)
                                   (guarded (locals frame) (failure) '())))))

(defun print-argument (argument stream)
  "Print ARGUMENT, an argument of a call, to STREAM."
  (typecase argument
    (sb-kernel:lexenv (write-string (if (empty-lexenv-p argument) "#<NULL-LEXENV>" "#<LEXENV>") stream))
    ;; No user-defined method prints these types, so printing them neither fails nor takes long.
    ((or symbol fixnum float character) (prin1 argument stream))
    (t
     (let ((fill (text-stream-fill stream)))
       (guarded (prin1-in-time argument stream)
           (failure)
         ;; Remove the incomplete output if it is still in the buffer.
         (setf (text-stream-fill stream) (min fill (text-stream-fill stream)))
         (write-string (unprintable-text argument failure) stream))))))

(defun push-reported-frame (call)
  "Push CALL, the description of a frame: the text of the call, the machinery, the source location and the local variables."
  (event *job-id* (event-code :frame) (reported-frame-number call))
  (with-server-syntax (:length 20 :level 5)
    (push-text (event-code :frame-text)
               (lambda (stream)
                 (write-char #\( stream)
                 (let ((*print-length* nil) (*print-level* nil))
                   (write (reported-frame-name call) :stream stream :pretty (equal '(lambda ()) (reported-frame-name call))))
                 (let ((arguments (reported-frame-arguments call)))
                   (loop while (consp arguments)
                         do (write-char #\Space stream)
                            (print-argument (pop arguments) stream))
                   (when arguments
                     (write-char #\Space stream)
                     (print-argument arguments stream)))
                 (write-char #\) stream))))
  (when (reported-frame-machinery call)
    (event *job-id* (event-code :frame-machinery) 0 (reported-frame-machinery call)))
  (let ((location (and (reported-frame-code-location call)
                       (guarded (code-location-source-location (reported-frame-code-location call)) (failure) nil))))
    (when location
      (event *job-id* (event-code :frame-source) (source-location-line location) (source-location-source-name location))
      (when (source-location-line-text location)
        (event *job-id* (event-code :frame-code) 0 (source-location-line-text location))))
    (with-server-syntax (:length 20 :level 5)
      (loop for (symbol validity value id) in (guarded (sort-locals (reported-frame-locals call) location)
                                                  (failure) (reported-frame-locals call))
            for label = (local-label symbol id)
            do (let ((known (and (eq validity :valid) (shown-value-reference value (reported-frame-number call) label))))
                 (if known
                     (push-local (event-code :local) (event-code :local-text) label :same known)
                     (push-local (event-code :local) (event-code :local-text) label validity value)))))))

(defvar *shown-values* nil
  "The large values that were shown as local variables: a hash table from the values to conses of frame number and printed
variable label. :NONE before the first such value; NIL outside a report.")

(defun large-value-p (value)
  "Return true when VALUE is likely to be long when printed."
  (typecase value
    (cons (and (consp (cdr value)) (nthcdr 8 value) t))
    (string nil)
    (vector (> (length value) 8))
    (structure-object (not (system-symbol-p (class-name (class-of value)))))))

(defun shown-value-reference (value frame label)
  "Return the text that replaces VALUE if VALUE is large and was shown before, else NIL. Record a large VALUE when it is
shown for the first time. LABEL names the variable that holds VALUE, and FRAME is the number of the variable's frame."
  (when (and *shown-values* (guarded (large-value-p value) (failure) nil))
    (when (eq *shown-values* :none)
      (setf *shown-values* (make-hash-table :test 'eq)))
    (let ((known (gethash value *shown-values*)))
      (cond (known (format nil "<as ~A in frame ~D>" (cdr known) (car known)))
            (t (setf (gethash value *shown-values*) (cons frame label))
               nil)))))

(defun push-reported-frames (calls)
  "Push CALLS, the descriptions of frames."
  (with-source-files ()
    (let ((*shown-values* :none))
      (mapc #'push-reported-frame calls))))

(defun push-local (begin continue label validity value)
  "Push the local variable that LABEL names, with VALUE. BEGIN is the kind of the event with the name, and CONTINUE the kind
of the events with the text of the value. VALIDITY is as in LOCALS, or :SAME, for which VALUE is the text to push."
  (event *job-id* begin
         (ecase validity ((:valid :same) 0) (:invalid 1) (:unknown 2))
         label)
  (case validity
    (:valid (push-text continue (lambda (stream) (print-argument value stream))))
    (:same (event *job-id* continue 0 value))))

;;; Describing restarts
(defun applicable-restarts (condition)
  "Return the restarts that apply to CONDITION. A restart whose test fails with an error does not apply."
  (guarded (compute-restarts condition)
      (failure)
    (loop for cluster in sb-kernel:*restart-clusters*
          append (loop for restart in cluster
                       when (guarded (funcall (sb-kernel::restart-test-function restart) condition) (failure) nil)
                         collect restart))))

(defconstant +max-restarts+ 100
  "The maximum number of restarts that are shown. If there are more, the first 98 and the last two, RETRY and ABORT, are
shown.")

(defun numbered-restarts (restarts)
  "Return a list of conses of number and restart for those of RESTARTS that are shown. Numbers begin at 1."
  (loop with last = (- (length restarts) 2)
        for restart in restarts
        for number from 1
        when (or (<= number (- +max-restarts+ 2)) (> number last))
          collect (cons number restart)))

(defun push-restarts (condition)
  "Push the restarts that apply to CONDITION."
  (loop for (number . restart) in (numbered-restarts (applicable-restarts condition))
        do (event *job-id* (event-code :restart) number (string (restart-name restart)))
           (with-server-syntax ()
             (let ((*print-escape* nil))
               (push-text (event-code :restart-text) (lambda (stream) (princ restart stream)))))))

;;; Capturing an error

(defun push-slots (condition)
  "Push the slots of CONDITION, except the slots that make up its report."
  (with-server-syntax (:length 20 :level 5)
    (dolist (slot (sb-mop:class-slots (class-of condition)))
      (let ((name (sb-mop:slot-definition-name slot)))
        (when (and (not (member name '(sb-kernel::format-control sb-kernel::format-arguments sb-kernel::references)))
                   (slot-boundp condition name))
          (let ((value (slot-value condition name)))
            ;; A slot of SBCL's own whose value is NIL carries no information.
            (unless (and (null value) (system-symbol-p name))
              (event *job-id* (event-code :slot) 0 (symbol-name name))
              (push-text (event-code :slot-text) (lambda (stream) (print-argument value stream))))))))))

(defvar *quiet-debugger* nil
  "True within WITH-QUIET-DEBUGGER.")

(defmacro with-quiet-debugger (() &body body)
  "Evaluate BODY with the variables of SBCL's debugger bound as if no error were being handled."
  `(let ((*quiet-debugger* t)
         (*debugger-hook* nil)
         (sb-debug:*stack-top-hint* nil)
         (sb-kernel::*current-error-depth* 0)
         (*break-on-signals* nil))
     ,@body))

(defvar *form-number* 0
  "The number, from 1, of the submitted form being read or evaluated; 0 outside an evaluation.")
(defvar *form-start* 0
  "The position in the submitted code at which the form being read or evaluated begins.")
(defvar *form-stream* nil
  "The stream of the submitted code while a form is read from it, else NIL.")

(defun report-package ()
  "Return the package in which reports are printed: *PACKAGE*; or COMMON-LISP-USER if *PACKAGE* is KEYWORD, because the
reader binds it to KEYWORD while it reads the feature expression of #+."
  (let ((package (current-package)))
    (if (eq package (find-package "KEYWORD")) **user-package** package)))

(defvar *capturing-error* nil
  "True while this thread describes an error: its message, restarts, slots and frames. The description calls the user's
printing methods, which may fail in turn.")

(defun capture-error (type report condition find-frame)
  "Push the description of an error. TYPE is the name of its type, a string. REPORT is a function that pushes its message.
Push the restarts for CONDITION and, if CONDITION is not NIL, its slots. FIND-FRAME is a function that returns the
innermost frame to push. Return two values: the list of frames that USER-FRAMES returns; and, if the frames must not be
pushed before the stack has been unwound, a function that pushes them, else NIL."
  (declare (type function report find-frame) (dynamic-extent report find-frame))
  (let ((frame (funcall find-frame))
        (*package* (report-package)))
    (with-quiet-debugger ()
      (event *job-id* (event-code :error) (if *capturing-error* 1 0) type)
      (let ((*capturing-error* t))
        (when (plusp *form-number*)
          (event *job-id* (event-code :form) *form-number* (with-server-syntax () (princ-to-string *form-start*))))
        (funcall report)
        (guarded (push-restarts condition) (failure) nil)
        (when condition
          (guarded (push-slots condition) (failure) nil))
        (multiple-value-bind (frames total)
            (let ((*incomplete-frames* (typep condition 'storage-condition)))
              (guarded (user-frames frame) (failure) (values '() 0)))
          (event *job-id* (event-code :frames) total)
          (let ((calls (loop for (number . frame) in frames collect (capture-frame number frame condition))))
            (mark-machinery-frames calls)
            ;; Printing calls the user's methods, which may need more stack than is left.
            (cond ((typep condition 'storage-condition)
                   (values frames (lambda ()
                                    (let ((*capturing-error* t))
                                      (push-reported-frames calls))
                                    nil)))
                  (t (push-reported-frames calls)
                     (values frames nil)))))))))
