;;;; Calls between Lisp and the host's program, each with a message there and one back: GATE is how the program calls Lisp,
;;;; CALL-PROGRAM how Lisp calls the program. Both nest. What unwinds in Lisp never crosses the program's frames: GATE stops
;;;; it and says so, the program returns, and CALL-PROGRAM goes on unwinding.

(in-package "SBCL-HOST/EMBEDDING")

(defpackage "RUST"
  (:use)
  (:export "HOST-ERROR" "HOST-PANIC" "HOST-ERROR-FUNCTION" "HOST-ERROR-MESSAGE")
  (:documentation "Conditions of functions that are written in Rust."))

(define-condition rust:host-error (error)
  ((function :initarg :function :reader rust:host-error-function)
   (message :initarg :message :reader rust:host-error-message))
  (:report (lambda (condition stream)
             (format stream "~A: ~A" (rust:host-error-function condition) (rust:host-error-message condition))))
  (:documentation "A function written in Rust returned an error."))

(define-condition rust:host-panic (rust:host-error)
  ()
  (:report (lambda (condition stream)
             (format stream "~A panicked: ~A"
                     (rust:host-error-function condition) (rust:host-error-message condition))))
  (:documentation "A function written in Rust panicked."))

;;; Functions of the program's that are there from the beginning.
(defconstant +run+ (declared-number "SBCL_PROGRAM_RUN")
  "Run the closure that the argument, an integer, stands for.")
(defconstant +ask+ (declared-number "SBCL_PROGRAM_ASK")
  "Ask the handler of this thread's call about a condition.")
(defconstant +read-input+ (declared-number "SBCL_PROGRAM_READ_INPUT")
  "Return the next characters of the program's standard input, or NIL at its end.")
(defconstant +defined+ (declared-number "SBCL_PROGRAM_DEFINED")
  "Note that the function of the first argument, a number, is called from now on, and that of the second, unless it is 0,
no more.")

(declaim (type (unsigned-byte 64) **program**))
(defglobal **program** 0
  "Address of the program's function `call'; 0 when there is no program that embeds this image.")

(declaim (type simple-vector **program-threads**))
(defglobal **program-threads** (make-array 0)
  "The threads that work for the program. The first one does nothing but interrupt others.")

(defun program-thread-p (thread)
  "True when THREAD works for the program."
  (find thread (the simple-vector **program-threads**) :test #'eq))

;;; Stopping what unwinds, and going on with it

(defvar *unwinding* nil
  "What is being unwound while the program's frames are left: a list of the block to unwind to, how many values it is
given, and these; :LOST when that cannot be gone on with; or NIL.")

(defconstant +room-for-program+ (* 256 1024)
  "Bytes of control stack that must be left when the program is called: it has no handler for the stack's end.")

(declaim (inline check-stack-room))
(defun check-stack-room (&optional (more 0))
  "Signal that the control stack is used up if it will be, by MORE bytes and what the program needs. Where Lisp and the
program call each other, both check."
  (declare (type index more))
  (when (< (- (sap-int (sb-vm::current-sp)) (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-start*))
           (+ +room-for-program+ more))
    (error 'sb-kernel::control-stack-exhausted)))

(defun check-stack-room-for-arguments (arguments)
  "Signal that the control stack is used up if a call with the list ARGUMENTS would use it up. What the caller pushes finds
the guard pages, but not a list of it that the callee has on the stack, as functions of SBCL's do, some of which hand such a
list on."
  (check-stack-room (* 64 (length arguments))))

#+x86-64
(defmacro stopping-unwind (form (frame) &body body)
  "Return the values of FORM. When something unwinds it, stop that, with *UNWINDING* set, and return those of BODY. As
UNWIND-PROTECT does (src/compiler/ir1-translators.lisp), but that UNWIND (src/assembly/x86-64/assem-rtns.lisp), which has
called this, is not returned to. What it has pushed is read from the stack. FRAME is the function's own frame pointer."
  (let ((drop-through (gensym "DROP-THROUGH")) (exit (gensym "EXIT")) (next (gensym "NEXT")) (stack (gensym "STACK")))
    `(block ,drop-through
       (let ((,next (block ,exit
                      (sb-c::%within-cleanup
                       :unwind-protect
                       (sb-c::%unwind-protect (sb-c::%escape-fun ,exit) nil)
                       (return-from ,drop-through ,form)))))
         (declare (optimize (sb-c::insert-debug-catch 0)))
         (let ((,stack (sb-vm::current-sp)))
           (setf *unwinding* (stopped-unwinding ,next (sap+ ,stack 8) (sap+ ,stack 16) ,frame)))
         ,@body))))

#-x86-64
(defmacro stopping-unwind (form (frame) &body body)
  "Return the values of FORM; those of BODY when something unwinds it, which is then not gone on with."
  (declare (ignore frame))
  (let ((finished (gensym "FINISHED")) (stop (gensym "STOP")))
    `(block ,stop
       (let ((,finished nil))
         (unwind-protect (multiple-value-prog1 ,form (setf ,finished t))
           (unless ,finished
             (setf *unwinding* :lost)
             (return-from ,stop (progn ,@body))))))))

#+x86-64
(defun stopped-unwinding (next count start frame)
  "Return what *UNWINDING* is for the block NEXT, and the number of values and the place of the last one that are at COUNT
and START. A single value is itself where START is, and counts as none."
  (let ((count (sap-ref-lispobj count 0)))
    (declare (type index count))
    (cond ((< (sb-kernel:get-lisp-obj-address next) frame)
           ;; The block is itself in what is left.
           :lost)
          ((zerop count) (list next 0 (sap-ref-lispobj start 0)))
          (t
           (let ((values (int-sap (sap-ref-word start 0))))
             (list* next count
                    (loop for index from 1 to count
                          collect (sap-ref-lispobj values (- (* 8 index))))))))))

(defun go-on-unwinding ()
  "Go on with what was stopped, on the other side of the program's frames."
  (let ((unwinding (shiftf *unwinding* nil)))
    (when (atom unwinding)
      (error "A jump of the debugger's cannot cross functions of the program."))
    #+x86-64
    (destructuring-bind (next count &rest values) unwinding
      (declare (type index count))
      (when (zerop count)
        (sb-c::%unwind next (first values) 0))
      (check-stack-room (* 8 count))
      (let ((block (make-array count)))
        (declare (dynamic-extent block))
        ;; As they are on the stack: the first one at the highest address.
        (loop for value in values
              for place from (1- count) downto 0
              do (setf (svref block place) value))
        (sb-c::%unwind next
                       ;; An address as the fixnum that looks like it.
                       (ash (+ (sb-kernel:get-lisp-obj-address block)
                               (- (* 8 (+ sb-vm:vector-data-offset count)) sb-vm:other-pointer-lowtag))
                            (- sb-vm:n-fixnum-tag-bits))
                       count)))))

;;; Conditions as the program gets them

(defun condition-message (condition)
  "Return what CONDITION reports of itself."
  (with-server-syntax (:length 100 :level 10)
    (let ((*print-escape* nil))
      (multiple-value-bind (text result) (bounded-text 10000 (lambda (stream) (princ condition stream)))
        (if (typep result 'condition)
            (format nil "~A(the condition's report failed: ~A)" text (type-name-text (class-name-of result)))
            text)))))

(defun class-text (name)
  "Return NAME, that of a class, as one writes it, in lower case."
  (string-downcase
   ;; Printing takes longer than all else here, and most classes of conditions are the standard's.
   (if (and (symbolp name)
            (eq (symbol-package name) (load-time-value (find-package "COMMON-LISP")))
            (eq name (find-symbol (symbol-name name) **user-package**)))
       (symbol-name name)
       (type-name-text name))))

(defun condition-classes (condition)
  "Return the names of CONDITION's class and those above it, the nearest first, as one writes them."
  (loop for class in (sb-mop:class-precedence-list (class-of condition))
        for name = (class-name class)
        until (eq name 'sb-pcl::slot-object)
        collect (class-text name)))

(defun frame-text (frame condition)
  "Return the call that FRAME is, as one writes it."
  (multiple-value-bind (name arguments)
      (guarded (sb-debug::frame-call frame :argument-limit 20)
          (failure)
        (values (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '()))
    (multiple-value-setq (name arguments) (stood-for name arguments))
    (when (and (undefined-function-frame-p frame) (typep condition 'undefined-function))
      (setf name (cell-error-name condition)))
    (with-server-syntax (:length 10 :level 3)
      (values (bounded-text 300 (lambda (stream)
                                  (write-char #\( stream)
                                  (prin1 name stream)
                                  (loop while (consp arguments)
                                        do (write-char #\Space stream)
                                           (print-argument (pop arguments) stream))
                                  (write-char #\) stream)))))))

(defun frame-place-text (frame)
  "Return where in the source FRAME is, or the empty string."
  (if (system-frame-p frame)
      ""
      (guarded (let ((place (location-place (sb-di:frame-code-location frame))))
                 (if place (format nil "~A:~D" (place-in place) (place-line place)) ""))
          (failure)
        "")))

(defvar *thread-restarts* '()
  "The restart clusters of this thread when it began to work for the program: they end the thread, and are not the
program's business.")

(defun restart-offers (condition)
  "Return the restarts for CONDITION that the program is told of, as lists of a name and a description."
  (let ((*print-escape* nil))
    (loop for restart in (restarts-for condition)
          repeat 20
          while (restart-name restart)
          until (find-if (lambda (cluster) (member restart (the list cluster) :test #'eq)) *thread-restarts*)
          collect (list (string (restart-name restart))
                        (values (bounded-text 300 (lambda (stream) (princ restart stream))))))))

(defconstant +reported-frames+ 30
  "Frames of an error that the program gets.")

(defun condition-report (condition hook)
  "Return what the program is told of CONDITION, which entered the debugger through the function with frame pointer HOOK:
a list of it, its classes, its message, the restarts (lists of name and description) and the frames (lists of call and
place)."
  (let ((exhausted (typep condition 'storage-condition))
        (frame (error-frame hook)))
    (with-quiet-debugger ()
      (list condition
            (guarded (condition-classes condition) (failure) '("t"))
            (condition-message condition)
            (unless exhausted
              (guarded (restart-offers condition) (failure) '()))
            ;; There is little stack left then.
            (unless exhausted
              (guarded (let ((*known-places* nil))
                         (loop for (nil . frame) in (user-frames frame)
                               repeat +reported-frames+
                               collect (list (frame-text frame condition) (frame-place-text frame))))
                  (failure) '()))))))

(defun put-report (scratch report)
  "Write REPORT, as CONDITION-REPORT returns it. The condition is a handle."
  (put-object scratch (first report) +opaque+)
  (dolist (part (rest report))
    (put-object scratch part 2)))

;;; From Lisp to the program

(defvar *interruptible* nil
  "True when the code that called the program may be interrupted, and so may what that calls.")

(declaim (inline call-address talk))
(defun call-address (function scratch reply)
  "Call the program's FUNCTION, a number, with the message in SCRATCH. Return what it returns; REPLY, two words, gets the
address and the number of words of its answer. Its second word is how many answers are being read. Interrupts are off."
  (declare (type (unsigned-byte 64) function) (type scratch scratch) (type system-area-pointer reply))
  (with-host-float-modes
    (alien-funcall (sap-alien (int-sap **program**)
                              (function (signed 32) (unsigned 64) (unsigned 64) (unsigned 64) system-area-pointer))
                   function (scratch-address scratch) (scratch-fill scratch) reply)))

(defun talk (function write)
  "Call the program's FUNCTION with what WRITE, a function of a scratch, writes. Return what becomes of it (0: an answer,
1: an error, 2: a panic, 3: what is to be unwound further, 4: there is no such function any more) and its answer."
  (declare (type function write))
  (let ((scratch *scratch*)
        (interruptible *interrupts-enabled*)
        ;; As in SBCL's own functions that may take long. A timer's function is called so.
        (allowed (or *interrupts-enabled* *allow-with-interrupts*))
        (reply (make-array 2 :element-type '(unsigned-byte 64))))
    (declare (dynamic-extent reply) (type scratch scratch))
    (without-interrupts
      (let ((*interruptible* allowed))
        (begin-message scratch)
        ;; Handlers of its errors may call the program, and need a scratch of their own.
        (let ((*scratch* nil))
          (funcall write scratch))
        (finish-message scratch)
        (setf (aref reply 0) 0
              (aref reply 1) *answers-being-read*)
        (with-pinned-objects (reply)
          (let* ((status (call-address function scratch (vector-sap reply)))
                 (address (ldb (byte 62 0) (aref reply 0)))
                 (count (ldb (byte 48 0) (aref reply 1))))
            (cond ((or (> status (declared-number "SBCL_CALL_PANICKED")) (zerop count)) (values status nil))
                  ((integer-answer-p address count) (values status (read-integer-answer address)))
                  (t
                   ;; Bound before interrupts are enabled: an interruption may call the program again.
                   (let ((*answers-being-read* (1+ *answers-being-read*)))
                     (values status
                             ;; WATCH-HEAP interrupts an evaluation that fills the heap.
                             (if interruptible
                                 (with-local-interrupts (read-answer address count))
                                 (read-answer address count))))))))))))

(defun fail-program-call (class answer)
  "Signal ANSWER, a condition, or one of CLASS with the function's name and a message in the list ANSWER."
  (restart-case (if (typep answer 'condition)
                    (error answer)
                    (error class :function (first answer) :message (second answer)))
    (use-value (value)
      :report "Return a value in place of the function's."
      :interactive (lambda () (list (progn (write-string "Value: " *query-io*) (eval (read *query-io*)))))
      value)))

(defun fail-without-function ()
  "Signal that the program has no function that it is called for."
  (fail-program-call 'rust:host-error '("the program" "there is no such function")))

(defun talk-and-settle (function write missing)
  "Call the program's FUNCTION as TALK does, and return its values, signal its error, or go on unwinding. Return what
MISSING, a function, returns where the program has no such function any more."
  (declare (type (unsigned-byte 62) function) (type function write missing))
  (let ((*unwinding* nil))
    (multiple-value-bind (status answer) (talk function write)
      (when *unwinding*
        (go-on-unwinding))
      (ecase status
        (#.(declared-number "SBCL_CALL_VALUES")
         (if (typep answer 'several) (values-list (several-values answer)) answer))
        (#.(declared-number "SBCL_CALL_FAILED") (fail-program-call 'rust:host-error answer))
        (#.(declared-number "SBCL_CALL_PANICKED") (fail-program-call 'rust:host-panic answer))
        (#.(declared-number "SBCL_CALL_MISSING") (funcall missing))))))

(defun call-program (function write &optional (missing #'fail-without-function))
  "Call the program's FUNCTION with what WRITE, a function of a scratch, writes, and return its values; what MISSING, a
function, returns where the program has no such function any more."
  (declare (type function write missing) (dynamic-extent write missing))
  (check-stack-room)
  (when (zerop **program**)
    (error "The program that this function was of is not there."))
  (if *scratch*
      (talk-and-settle function write missing)
      (let ((*scratch* (take-scratch)))
        (unwind-protect (talk-and-settle function write missing)
          (give-back-scratch *scratch*)))))

;;; From the program to Lisp

(defmacro with-outer-handlers-for-signals (() &body body)
  "Evaluate BODY so that the handlers outside the program's frames see only what is not serious: errors are the
program's, which may pass them on."
  `(let ((outer sb-kernel:*handler-clusters*))
     (flet ((body () ,@body))
       (declare (dynamic-extent #'body))
       (if (eq outer sb-kernel::**initial-handler-clusters**)
           (body)
           (let ((sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**))
             (handler-bind ((condition (lambda (condition)
                                         (unless (typep condition 'serious-condition)
                                           (let ((sb-kernel:*handler-clusters* outer))
                                             (signal condition))))))
               (body)))))))

(defmacro catching-error (() &body body)
  "Evaluate BODY, whose errors no handler outside sees. Return the condition if it fails, else NIL."
  `(block failed
     (flet ((fail (condition) (return-from failed condition)))
       (declare (dynamic-extent #'fail))
       (let ((*on-debugger* #'fail))
         (with-outer-handlers-for-signals () ,@body)))
     nil))

(declaim (inline call-with-message))
(defun call-with-message (function address end)
  "Call FUNCTION, a function or its name, with the arguments from ADDRESS up to END."
  (declare (type (unsigned-byte 62) address end))
  (let ((function (if (functionp function) function (sb-kernel:%coerce-callable-to-fun function))))
    (if (>= address end)
        (funcall function)
        (multiple-value-bind (first next) (read-argument address end)
          (if (>= next end)
              (funcall function first)
              (multiple-value-bind (second next) (read-argument next end)
                (if (>= next end)
                    (funcall function first second)
                    (multiple-value-bind (third next) (read-argument next end)
                      (if (>= next end)
                          (funcall function first second third)
                          (let ((more (read-objects next end)))
                            (check-stack-room-for-arguments more)
                            (apply function first second third more)))))))))))

(defvar *ask-program* nil
  "True when the program has a handler that is asked about errors where they happen.")

(declaim (type index *asking*))
(defvar *asking* 0
  "How many of the program's handlers this thread is in, each asked about what the one before it failed with.")

(defconstant +most-asking+ 4
  "How many those may be: one that calls Lisp by the handle that it handles the errors of would be asked for ever.")

(defun decide (report)
  "Ask the program's handler about the condition in REPORT, and invoke the restart that it names, if it does. What
that fails with itself only another handler is asked about, of a call that it makes. Return the error of a handler whose
choice cannot be had, or NIL."
  (let* ((*ask-program* nil)
         (*asking* (1+ *asking*))
         (choice (guarded (call-program +ask+ (lambda (scratch) (put-report scratch report)))
                     (failure)
                   (return-from decide (and (typep failure '(and rust:host-error (not rust:host-panic))) failure))))
         (restart (and choice (find-restart-named (first choice) (first report)))))
    (when restart
      (check-stack-room-for-arguments (rest choice))
      (apply #'invoke-restart restart (rest choice)))))

(defun find-restart-named (name condition)
  "Return the innermost restart for CONDITION whose name is the string NAME, in whatever package, or NIL."
  (find name (restarts-for condition)
        :test (lambda (name restart) (and (restart-name restart) (string-equal name (restart-name restart))))))

(defconstant +release-entry+ (declared-number "SBCL_ENTRY_RELEASE")
  "The handle of RELEASE-HANDLES.")

(declaim (inline enter-gate gate))
(defun enter-gate (function shape address end)
  "Call FUNCTION, a handle, with the arguments from ADDRESS up to END, and write its values in SHAPE, or the condition that
it fails with. Return SBCL_CALL_VALUES or SBCL_CALL_FAILED."
  (declare (type (unsigned-byte 32) function) (type (unsigned-byte 16) shape) (type (unsigned-byte 62) address end))
  (let ((report
          (block failed
            (flet ((fail (condition)
                     (let* ((hook (frame-pointer-here))
                            (report (condition-report condition hook))
                            (failure (and *ask-program* (< *asking* +most-asking+) (decide report))))
                       (return-from failed (if failure (condition-report failure hook) report)))))
              (declare (dynamic-extent #'fail))
              (let ((*on-debugger* #'fail)
                    (*boundary* (frame-pointer-here)))
                (multiple-value-call
                    ;; MORE is in the heap: a list on the stack is made at once, past its guard pages where it is long.
                    (lambda (&optional (value nil one) &rest more)
                      (when more
                        (check-stack-room))
                      (let ((unwritable
                              (let ((scratch *scratch*))
                                (declare (type scratch scratch))
                                (begin-message scratch)
                                (put scratch (token (tag-number :values) (if one (1+ (length more)) 0)))
                                (cond ((and (null more) (typep value '(or null fixnum)))
                                       (when one
                                         (put-argument scratch value shape))
                                       nil)
                                      (t
                                       (let ((*scratch* nil))
                                         (catching-error ()
                                           (put-argument scratch value shape)
                                           (dolist (value more)
                                             (put-object scratch value shape)))))))))
                        (when unwritable
                          ;; As an error of FUNCTION's: what the program does about it can be interrupted.
                          (if *interruptible*
                              (let ((*allow-with-interrupts* t))
                                (with-interrupts (fail unwritable)))
                              (fail unwritable)))))
                  (with-outer-handlers-for-signals ()
                    ;; The program may have come here without Lisp in between. What follows may hold a mutex of the
                    ;; host's, which must not be left by the end of the stack.
                    (check-stack-room)
                    ;; Handles that the program has given up are not to be lost.
                    (if (and *interruptible* (/= function +release-entry+))
                        ;; Not while the values are written: what interrupts that could write a message there itself.
                        (let ((*allow-with-interrupts* t))
                          (with-interrupts (call-with-message (handle-object function) address end)))
                        (call-with-message (handle-object function) address end)))))))))
    (cond (report
           (when (typep (first report) 'heap-nearly-exhausted)
             (clear-up-after-call))
           (begin-message *scratch*)
           (put-report *scratch* report)
           (declared-number "SBCL_CALL_FAILED"))
          (t (declared-number "SBCL_CALL_VALUES")))))

(defun gate (function shape address count reply)
  "Call FUNCTION, a handle, as ENTER-GATE does, with the arguments in the COUNT words at ADDRESS, and store where its answer
is at the address REPLY, a struct sbcl_message. Return an sbcl_call_status. SBCL_CALL_UNWINDING: something unwinds further out,
and the program is to return."
  (declare (type (unsigned-byte 62) function shape address count reply))
  (cond (*unwinding* (declared-number "SBCL_CALL_UNWINDING"))
        (t
         (let ((status (stopping-unwind (enter-gate function shape address (+ address (* 8 (ldb (byte 48 0) count))))
                           ((frame-pointer-here))
                         (declared-number "SBCL_CALL_UNWINDING")))
               (scratch *scratch*)
               (reply (int-sap reply)))
           (declare (type scratch scratch))
           (finish-message scratch)
           (setf (sap-ref-64 reply (field-offset "sbcl_message" "words")) (scratch-address scratch)
                 (sap-ref-64 reply (field-offset "sbcl_message" "count")) (scratch-fill scratch))
           status))))
