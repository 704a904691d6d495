;;;; Calls between Lisp and the host's program. A call sends a message with the arguments and receives a message with
;;;; the result. The program calls Lisp through CALL-FROM-PROGRAM, and Lisp calls the program through CALL-PROGRAM. Calls in
;;;; both directions nest. A non-local exit in Lisp never crosses the program's frames: CALL-FROM-PROGRAM stops the exit
;;;; and reports it to the program, the program returns, and CALL-PROGRAM resumes the unwinding.

(in-package "SBCL-HOST/EMBEDDING")

(defpackage "RUST"
  (:use)
  (:export "HOST-ERROR" "HOST-PANIC" "HOST-ERROR-FUNCTION" "HOST-ERROR-MESSAGE")
  (:documentation "The conditions that functions written in Rust signal."))

(define-condition rust:host-error (error)
  ((function :initarg :function :reader rust:host-error-function)
   (message :initarg :message :reader rust:host-error-message))
  (:report (lambda (condition stream)
             (format stream "~A: ~A" (rust:host-error-function condition) (rust:host-error-message condition))))
  (:documentation "An error that a function written in Rust returned, or the error for a call of a function that the program
does not have."))

(define-condition rust:host-panic (rust:host-error)
  ()
  (:report (lambda (condition stream)
             (format stream "~A panicked: ~A"
                     (rust:host-error-function condition) (rust:host-error-message condition))))
  (:documentation "A panic of a function written in Rust."))

;;; Functions that every program has
(defconstant +program-run+ (declared-number "SBCL_PROGRAM_RUN")
  "The number of the program's function that runs a closure. The function's argument is the closure's number.")
(defconstant +program-ask+ (declared-number "SBCL_PROGRAM_ASK")
  "The number of the program's function that passes a condition to the handler of this thread's current call and returns
the restart that the handler chooses.")
(defconstant +program-read-input+ (declared-number "SBCL_PROGRAM_READ_INPUT")
  "The number of the program's function that returns the next characters of standard input, or NIL at its end.")
(defconstant +program-defined+ (declared-number "SBCL_PROGRAM_DEFINED")
  "The number of the program's function that records a definition. The arguments are the number of the new function, and
the number of the function that it replaces, or 0.")

(declaim (type (unsigned-byte 64) **program-call-address**))
(defglobal **program-call-address** 0
  "The address of the program's function `call'; 0 when no program embeds this image.")

(declaim (type simple-vector **program-threads**))
(defglobal **program-threads** (make-array 0)
  "The threads that work for the program. The first thread only interrupts the others.")

(defun program-thread-p (thread)
  "Return true when THREAD works for the program."
  (find thread (the simple-vector **program-threads**) :test #'eq))

;;; Stopping a non-local exit, and resuming it

(defvar *pending-exit* nil
  "The non-local exit that is pending while the program's frames return: a list of the block to unwind to, the number of
values that it gets, and the values. :LOST if the exit cannot be resumed; NIL if no exit is pending.")

(defconstant +program-stack-bytes+ (+ (* 288 1024) (* 3 sb-c:+backend-page-bytes+))
  "Number of bytes of control stack that must be free when the program is called: the program does not handle exhaustion of
the stack. The three guard pages at the end of the stack are not usable (see CHECK-STACK-END), and the library's own frames
need some 30 KiB. The rest, 256 KiB, is the program's. If C code runs on the alien stack, the same number of bytes must be
free there.")
(defconstant +program-other-stack-bytes+ (* 4 sb-c:+backend-page-bytes+)
  "Number of bytes of binding stack, and of an alien stack that C code does not use, that must be free when the program is
called. SBCL reserves the last three pages of each stack for handling exhaustion. When code exhausts these pages, too,
ffi/shim.c abandons all code that runs in them. This number is one page larger, so that the program is not called there.")

(declaim (inline check-stack-room))
(defun check-stack-room (&optional (more 0) (binding-bytes 0))
  "Signal that a stack is exhausted unless these bytes are free: +PROGRAM-STACK-BYTES+ and MORE of the control stack,
+PROGRAM-STACK-BYTES+ of the stack on which C code runs, and +PROGRAM-OTHER-STACK-BYTES+ of the other stacks, plus
BINDING-BYTES of the binding stack. Calls in both directions check this, because Lisp and the program may call each other
recursively."
  (declare (type index more binding-bytes))
  ;; The binding stack grows upwards to the start of the alien stack, which grows downwards.
  (when (< (sap- (sb-vm::current-thread-offset-sap sb-vm::thread-alien-stack-start-slot)
                 (sb-kernel:binding-stack-pointer-sap))
           (+ +program-other-stack-bytes+ binding-bytes))
    (error 'sb-kernel::binding-stack-exhausted))
  (if +c-code-on-alien-stack+
      ;; For the user, the frames of C code are on the control stack.
      (when (< (alien-stack-room) +program-stack-bytes+)
        (error 'sb-kernel::control-stack-exhausted))
      (when (< (alien-stack-room) +program-other-stack-bytes+)
        (error 'sb-kernel::alien-stack-exhausted)))
  (when (< (control-stack-room) (+ +program-stack-bytes+ more))
    (error 'sb-kernel::control-stack-exhausted)))

(defconstant +few-arguments+ 10000
  "The number of arguments below which CHECK-ROOM-FOR-ARGUMENTS does not count the pages of the heap, which would take longer
than the call.")

(defun check-room-for-arguments (arguments)
  "Signal that the control stack is exhausted, or the heap nearly so, if a call with the list ARGUMENTS would exhaust it.
Arguments that a caller pushes run into the guard pages, but a long list that the callee allocates on the stack can skip the
guard pages. Some of SBCL's functions allocate such a list and pass it on. A list of &REST arguments in the heap is allocated
without a garbage collection, and if there is no room for it, or the next collection has no room for copies of it and of
ARGUMENTS, SBCL ends the process."
  (let* ((count (length arguments))
         (list-bytes (* 16 count))
         (used (if (< count +few-arguments+) (sb-kernel:dynamic-usage) (heap-use)))
         (size (sb-ext:dynamic-space-size)))
    (check-stack-room (* 64 count))
    (when (> (+ used (* 3 list-bytes)) size)
      (error 'heap-nearly-exhausted :used used :size size))))

(defmacro stopping-unwind (form (frame) &body body)
  "Return the values of FORM. If a non-local exit unwinds FORM, stop the exit, set *PENDING-EXIT*, and return the values of
BODY. FRAME is the frame pointer of the enclosing function. The expansion is that of UNWIND-PROTECT in SBCL's
src/compiler/ir1-translators.lisp, except that the cleanup code does not return to its caller, the assembly routine UNWIND.
Instead the cleanup code reads the words that UNWIND pushed on the stack."
  (let ((drop-through (gensym "DROP-THROUGH")) (exit (gensym "EXIT")) (next (gensym "NEXT")) (stack (gensym "STACK")))
    `(block ,drop-through
       (let ((,next (block ,exit
                      (sb-c::%within-cleanup
                       :unwind-protect
                       (sb-c::%unwind-protect (sb-c::%escape-fun ,exit) nil)
                       (return-from ,drop-through ,form)))))
         (declare (optimize (sb-c::insert-debug-catch 0)))
         (let ((,stack (sb-vm::current-sp)))
           (setf *pending-exit* (read-pending-exit ,next
                                                   (sap+ ,stack +exit-count-offset+)
                                                   (sap+ ,stack +exit-start-offset+)
                                                   ,frame)))
         ,@body))))

(defun read-pending-exit (next count start frame)
  "Return the value of *PENDING-EXIT* for an exit to the block NEXT. COUNT is the address of the number of values. A
single value has the count 0 and is at the address START. For any other number, the word at START is the start of the values
(see EXIT-VALUES). FRAME is the frame pointer of the function that stops the exit."
  (let ((count (sap-ref-lispobj count 0)))
    (declare (type index count))
    (cond ((inner-frame-p (sb-kernel:get-lisp-obj-address next) frame)
           ;; The block to unwind to belongs to a frame that is being unwound.
           :lost)
          ((zerop count) (list next 0 (sap-ref-lispobj start 0)))
          (t (list* next count (exit-values (sap-ref-word start 0) count))))))

(defun resume-unwinding ()
  "Resume the pending non-local exit, after the program's frames have returned. Signal an error if the exit is :LOST."
  (let ((unwinding (shiftf *pending-exit* nil)))
    (when (atom unwinding)
      (error "The debugger cannot unwind through a function of the embedding program: choose a restart or a frame inside ~
              that function's call."))
    (destructuring-bind (next count &rest values) unwinding
      (declare (type index count))
      (unless (zerop count)
        (check-stack-room (* 8 count)))
      (resume-exit next count values))))

;;; Conditions as the program receives them

(defun condition-message (condition)
  "Return the report of CONDITION as a string of up to 10,000 characters."
  (with-server-syntax (:length 100 :level 10)
    (let ((*print-escape* nil))
      (multiple-value-bind (text result) (bounded-text 10000 (lambda (stream) (princ condition stream)))
        (if (typep result 'condition)
            (format nil "~@[~A ~](the condition's report failed: ~A)" (and (string/= text "") text)
                    (type-name-text (class-name-of result)))
            text)))))

(defun class-name-text (name)
  "Return NAME, the name of a class, as source text in lower case."
  (string-downcase
   ;; This is a shortcut: printing is the slowest step here, and most classes of conditions are standard classes.
   (if (and (symbolp name)
            (eq (symbol-package name) (load-time-value (find-package "COMMON-LISP")))
            (eq name (find-symbol (symbol-name name) **user-package**)))
       (symbol-name name)
       (type-name-text name))))

(defun condition-classes (condition)
  "Return the names of CONDITION's class and its superclasses, most specific first, as CLASS-NAME-TEXT returns them."
  (loop for class in (sb-mop:class-precedence-list (class-of condition))
        for name = (class-name class)
        until (eq name 'sb-pcl::slot-object)
        collect (class-name-text name)))

(defun frame-text (frame condition)
  "Return FRAME's call as source text. CONDITION, the reported error, supplies the name if FRAME is a call of an
undefined function."
  (multiple-value-bind (name arguments)
      (guarded (sb-debug::frame-call frame :argument-limit 20)
          (failure)
        (values (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '()))
    (multiple-value-setq (name arguments) (displayed-call name arguments))
    (when (and (undefined-function-frame-p frame) (typep condition 'undefined-function))
      (setf name (cell-error-name condition)))
    (with-server-syntax (:length 10 :level 3)
      (values (bounded-text 300 (lambda (stream)
                                  (write-char #\( stream)
                                  (prin1 name stream)
                                  (loop while (consp arguments)
                                        do (write-char #\Space stream)
                                           (print-argument (pop arguments) stream))
                                  (when arguments
                                    (write-char #\Space stream)
                                    (print-argument arguments stream))
                                  (write-char #\) stream)))))))

(defun frame-location-text (frame)
  "Return the file and line of FRAME, or the empty string if FRAME is a system frame or its source location is unknown."
  (if (system-frame-p frame)
      ""
      (guarded (let ((location (code-location-source-location (sb-di:frame-code-location frame))))
                 (if location
                     (format nil "~A:~D" (source-location-source-name location) (source-location-line location))
                     ""))
          (failure)
        "")))

(defvar *thread-restarts* '()
  "The restart clusters that were active when this thread began to work for the program. The program does not see the
restarts in these clusters, because each of these restarts would end the thread.")

(defun restart-descriptions (condition)
  "Return the restarts for CONDITION that the program may invoke, innermost first and up to 20, as lists of a name and a
description. The list ends before the first restart that has no name or is among *THREAD-RESTARTS*."
  (let ((*print-escape* nil))
    (loop for restart in (applicable-restarts condition)
          repeat 20
          while (restart-name restart)
          until (find-if (lambda (cluster) (member restart (the list cluster) :test #'eq)) *thread-restarts*)
          collect (list (string (restart-name restart))
                        (values (bounded-text 300 (lambda (stream) (princ restart stream))))))))

(defconstant +max-examined-references+ 100000
  "Maximum number of references that HEAP-VALUE follows from the value of a slot: following as many takes some 10 ms.")
(defconstant +max-copied-elements+ 1000
  "Maximum number of elements of a list that HEAP-VALUE copies.")

(deftype shared-object ()
  "An object of which REFERENCES-STACK-P does not examine the references. Numbers and strings have none to other kinds of
objects. The others belong to the whole image, and code would not make them refer to objects of a single call."
  '(or number string symbol package sb-kernel:layout sb-kernel:classoid sb-mop:metaobject sb-thread:thread))

(defun references-stack-p (object limit)
  "Return false if neither OBJECT nor any object to which it refers, directly or through other objects, is on a control stack.
Return true otherwise, and when more than LIMIT references would have to be followed. Also return the number of references
that were followed."
  (declare (type fixnum limit))
  (let ((count 0)
        (seen nil)
        (pending '()))
    (declare (type index count))
    (flet ((examine (object)
             (incf count)
             (when (or (stack-allocated-p object) (and seen (> count limit)))
               (return-from references-stack-p (values t count)))
             ;; Other objects outside dynamic space are immediate, or belong to SBCL.
             (when (and (sb-kernel:dynamic-space-obj-p object)
                        (not (typep object 'shared-object)))
               (let ((seen (or seen (setf seen (make-hash-table :test 'eq)))))
                 (unless (gethash object seen)
                   (setf (gethash object seen) t)
                   (push object pending))))))
      (declare (dynamic-extent #'examine))
      (examine object)
      (loop while pending
            do (let ((object (pop pending)))
                 (sb-vm::do-referenced-object (object examine)
                   (symbol :delete)
                   ;; The variables that a closure assigns are in objects without a type of their own.
                   (t :extend
                      (when (eql (sb-kernel:widetag-of object) sb-vm:value-cell-widetag)
                        (examine (sb-kernel:value-cell-ref object)))))))
      (values nil count))))

(defun heap-value (value)
  "Return VALUE, the value of a condition's slot, or a replacement that the program can keep. VALUE is replaced unless neither
VALUE nor any object to which it refers is on a control stack, as far as +MAX-EXAMINED-REFERENCES+ references show. The
replacement of a proper list is a copy with the replacements of the elements, and so on for a few levels of lists. The
replacement of any other object is its printed text."
  (let ((left +max-examined-references+))
    (labels ((keep (object levels)
               (multiple-value-bind (replace count) (references-stack-p object left)
                 (decf left count)
                 (cond ((not replace) object)
                       ((and (consp object) (plusp levels) (copied-p object))
                        (loop for element in object
                              collect (keep element (1- levels))))
                       (t (with-server-syntax () (bounded-prin1-text object 1000))))))
             (copied-p (list)
               (multiple-value-bind (count tail) (list-extent list)
                 (and count (null tail) (<= count +max-copied-elements+)))))
      (keep value 4))))

(defun detach-from-stack (condition)
  "Replace each slot value of CONDITION by what HEAP-VALUE returns for it: the program may keep CONDITION, but objects on a
control stack do not outlive their frames."
  (flet ((detached (value)
           (guarded (heap-value value)
               (failure)
             "a value that could not be examined")))
    ;; The words of a condition are an alist of assigned slots, then the names and values of the initialization arguments.
    (dolist (assigned (sb-kernel::condition-assigned-slots condition))
      (setf (cdr assigned) (detached (cdr assigned))))
    (loop for index from (1+ sb-vm:instance-data-start) below (sb-kernel:%instance-length condition)
          do (setf (sb-kernel:%instance-ref condition index) (detached (sb-kernel:%instance-ref condition index))))))

(defconstant +max-reported-frames+ 30
  "Maximum number of frames of an error that the program receives.")

(defun condition-report (condition hook)
  "Return the report of CONDITION for the program: a list of the condition, its classes, its message, its restarts as
lists of name and description, and its frames as lists of call and source location. HOOK is the frame pointer of the
function that was called in place of the debugger. After a storage condition, the restarts and frames are NIL."
  (let ((exhausted (typep condition 'storage-condition))
        (frame (error-frame hook)))
    (with-quiet-debugger ()
      (detach-from-stack condition)
      (list condition
            (guarded (condition-classes condition) (failure) '("t"))
            (condition-message condition)
            (unless exhausted
              (guarded (restart-descriptions condition) (failure) '()))
            ;; After a storage condition, too little stack may be left to print the frames.
            (unless exhausted
              (guarded (let ((*known-source-locations* nil))
                         (loop for (nil . frame) in (user-frames frame)
                               repeat +max-reported-frames+
                               collect (list (frame-text frame condition) (frame-location-text frame))))
                  (failure) '()))))))

(defun put-report (buffer report)
  "Write REPORT, a list that CONDITION-REPORT returned, into BUFFER. The condition itself is written as a handle."
  (put-object buffer (first report) +opaque+)
  (dolist (part (rest report))
    (put-object buffer part 2)))

;;; From Lisp to the program

(defvar *handler-available* nil
  "True when the program has a handler to which errors are passed at the point where they are signalled.")

(declaim (inline call-program-function exchange-messages))
(defun call-program-function (function buffer reply)
  "Call the program's FUNCTION, a number, with the message in BUFFER, and return the status that FUNCTION returns. REPLY
is the address of two words. The caller sets the second word to *ANSWERS-BEING-READ*. The call stores the address of the
answer in the first word and the answer's number of words in the second. Interrupts must be off."
  (declare (type (unsigned-byte 64) function) (type message-buffer buffer) (type system-area-pointer reply))
  (alien-funcall (sap-alien (int-sap **program-call-address**)
                            (function (signed 32) (unsigned 64) (unsigned 64) (unsigned 64) system-area-pointer))
                 function (buffer-address buffer) (buffer-fill buffer) reply))

(defun exchange-messages (function write)
  "Call WRITE with a message buffer, into which WRITE writes a message. Then call the program's FUNCTION, a number, with this
message. Return the call's status (an sbcl_call_status: 0 for an answer, 1 for an error, 2 for a panic, 3 if a non-local
exit is pending, 4 if the function no longer exists), and the answer, or NIL if there is none."
  (declare (type function write))
  (let ((buffer *message-buffer*)
        (interruptible *interrupts-enabled*)
        ;; SBCL calls timer functions under ALLOW-WITH-INTERRUPTS. A call from a timer function may also be interrupted, as
        ;; SBCL's own blocking functions may be.
        (allowed (or *interrupts-enabled* *allow-with-interrupts*))
        (reply (make-array 2 :element-type '(unsigned-byte 64))))
    (declare (dynamic-extent reply) (type message-buffer buffer))
    (without-interrupts
      (let ((*caller-interruptible* allowed))
        (begin-message buffer)
        ;; Handlers of errors in WRITE may call the program, and need a message buffer of their own.
        (let ((*message-buffer* nil))
          (funcall write buffer))
        (finish-message buffer)
        (setf (aref reply 0) 0
              (aref reply 1) *answers-being-read*)
        (with-pinned-objects (reply)
          (let* ((status (flet ((perform ()
                                  (call-program-function function buffer (vector-sap reply))))
                           (if (eql function +program-ask+)
                               ;; An error in the handler goes only to handlers of the calls that the handler itself makes.
                               ;; Before and after this call, the handler is asked about errors of interruptions.
                               (let ((*handler-available* nil))
                                 (perform))
                               (perform))))
                 (address (ldb (byte 62 0) (aref reply 0)))
                 (count (ldb (byte 48 0) (aref reply 1))))
            (cond ((or (> status (declared-number "SBCL_CALL_PANICKED")) (zerop count)) (values status nil))
                  ((integer-answer-p address count) (values status (read-integer-answer address)))
                  (t
                   ;; Count the answer before interrupts are enabled: an interruption may call the program again.
                   (let ((*answers-being-read* (1+ *answers-being-read*)))
                     (values status
                             ;; Reading stays interruptible because WATCH-HEAP interrupts an evaluation that fills the heap.
                             (if interruptible
                                 (with-local-interrupts (read-answer address count))
                                 (read-answer address count))))))))))))

(defun fail-program-call (class answer)
  "Signal the error of a call of the program, with a restart USE-VALUE that returns a value instead. If ANSWER is a
condition, signal it. Otherwise ANSWER is a list of the function's name and a message, from which a condition of CLASS
is made."
  (restart-case (if (typep answer 'condition)
                    (error answer)
                    (error class :function (first answer) :message (second answer)))
    (use-value (value)
      :report "Use a value as the function's result."
      :interactive (lambda () (list (progn (write-string "Value: " *query-io*) (eval (read *query-io*)))))
      value)))

(defun fail-unknown-function ()
  "Signal that the program does not have the called function."
  (fail-program-call 'rust:host-error '("a function of the program" "the running program does not define this function")))

(defun perform-program-call (function write missing)
  "Call the program's FUNCTION as EXCHANGE-MESSAGES does. Then return its values, signal its error, or resume the pending
non-local exit. If the program no longer has FUNCTION, return the values of the function MISSING."
  (declare (type (unsigned-byte 62) function) (type function write missing))
  (let ((*pending-exit* nil))
    (multiple-value-bind (status answer) (exchange-messages function write)
      (when *pending-exit*
        (resume-unwinding))
      (ecase status
        (#.(declared-number "SBCL_CALL_VALUES")
         (if (typep answer 'multiple-values) (values-list (multiple-values-elements answer)) answer))
        (#.(declared-number "SBCL_CALL_FAILED") (fail-program-call 'rust:host-error answer))
        (#.(declared-number "SBCL_CALL_PANICKED") (fail-program-call 'rust:host-panic answer))
        (#.(declared-number "SBCL_CALL_MISSING") (funcall missing))))))

(defun call-program (function write &optional (missing #'fail-unknown-function))
  "Call the program's FUNCTION, a number, and return its values. WRITE is a function that writes the message with the
arguments into the message buffer that it receives. If the program no longer has FUNCTION, return the values of the function
MISSING."
  (declare (type function write missing) (dynamic-extent write missing))
  (check-stack-room)
  (when (zerop **program-call-address**)
    (error "A function of an embedding program was called, but no embedding program is running."))
  (if *message-buffer*
      (perform-program-call function write missing)
      (let ((*message-buffer* nil)
            (interruptible *interrupts-enabled*))
        ;; An interruption that unwinds while the buffer is acquired or returned would lose the buffer, or leave a
        ;; lock of malloc held.
        (without-interrupts
          (flet ((perform () (perform-program-call function write missing)))
            (declare (dynamic-extent #'perform))
            (unwind-protect
                 (progn
                   (setf *message-buffer* (acquire-message-buffer))
                   (if interruptible
                       (with-local-interrupts (perform))
                       (allow-with-interrupts (perform))))
              (when *message-buffer*
                (return-message-buffer))))))))

;;; From the program to Lisp

(defmacro with-outer-handlers-for-signals (() &body body)
  "Evaluate BODY so that handlers outside the program's frames see only conditions that are not serious. Serious
conditions go to the program instead, which may pass them on."
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
  "Evaluate BODY, hiding its errors from outer handlers. If BODY fails, return the condition; else NIL. If an
interruption signals an error meanwhile, call the outer value of *ON-DEBUGGER* where the error is signalled."
  `(block failed
     (let ((on-debugger *on-debugger*)
           (interruptions *nested-interruptions*))
       (flet ((fail (condition)
                (unless (= interruptions *nested-interruptions*)
                  (funcall (the function on-debugger) condition))
                (return-from failed condition)))
         (declare (dynamic-extent #'fail))
         (let ((*on-debugger* #'fail))
           (with-outer-handlers-for-signals () ,@body))))
     nil))

(declaim (inline call-with-message))
(defun call-with-message (function address end)
  "Call FUNCTION, a function or a function's name, with the arguments in the message between the addresses ADDRESS and
END."
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
                            (check-room-for-arguments more)
                            (apply function first second third more)))))))))))

(declaim (type index *handler-depth*))
(defvar *handler-depth* 0
  "The number of nested calls of the program's handlers in this thread. Each handler is called for an error in the previous
handler.")

(defconstant +max-handler-depth+ 4
  "Maximum value of *HANDLER-DEPTH*. Without this limit, a handler that itself causes an error of the kind that it
handles would be called forever.")

(defun ask-handler (report)
  "Pass the condition in REPORT, a list that CONDITION-REPORT returned, to the program's handler, and invoke the restart that
the handler chooses, if any. If the handler returned an error, or a restart that Lisp cannot read, return the error; else
return NIL."
  (let* ((*handler-depth* (1+ *handler-depth*))
         (asked nil)
         ;; The limit of nested errors does not count the errors that led to this one.
         (sb-kernel::*current-error-depth* 0)
         (choice (guarded (call-program +program-ask+ (lambda (buffer)
                                                        (put-report buffer report)
                                                        (setf asked t)))
                     (failure)
                   (return-from ask-handler
                     (typecase failure
                       (rust:host-panic nil)
                       (rust:host-error failure)
                       ;; Once the handler was asked, other errors are those of reading its answer.
                       (error (and asked
                                   (make-condition 'rust:host-error
                                                   :function "the program"
                                                   :message (format nil "the restart that the handler chose cannot be read: ~A"
                                                                    (condition-message failure)))))))))
         (restart (and choice (find-restart-named (first choice) (first report)))))
    (when restart
      (let ((*handler-available* nil))
        (check-room-for-arguments (rest choice))
        (apply #'invoke-restart restart (rest choice)))
      ;; A restart of RESTART-BIND may return. Its value is no error.
      nil)))

(defun find-restart-named (name condition)
  "Return the innermost restart for CONDITION whose name is the string NAME, or NIL. Ignore the case and the package of
restart names."
  (find name (applicable-restarts condition)
        :test (lambda (name restart) (and (restart-name restart) (string-equal name (restart-name restart))))))

(defconstant +release-entry+ (declared-number "SBCL_ENTRY_RELEASE")
  "The handle of the function RELEASE-HANDLES.")

(declaim (inline call-and-write-reply call-from-program))
(defun call-and-write-reply (function shape address end)
  "Call FUNCTION, a handle, with the arguments in the message between the addresses ADDRESS and END. On success write
the values into *MESSAGE-BUFFER* in SHAPE (see PUT-OBJECT) and return SBCL_CALL_VALUES. Otherwise write the report of
the condition and return SBCL_CALL_FAILED."
  (declare (type (unsigned-byte 32) function) (type (unsigned-byte 16) shape) (type (unsigned-byte 62) address end))
  (let ((report
          (block failed
            (flet ((fail (condition)
                     (let* ((hook (frame-pointer-here))
                            ;; An error of an interruption is no failure to describe CONDITION or to ask the handler.
                            (*interruptions-pass-guards* t)
                            (report (condition-report condition hook))
                            (failure (and *handler-available*
                                          (< *handler-depth* +max-handler-depth+)
                                          ;; The handler's calls may need more contexts.
                                          (not (few-interrupt-contexts-left-p))
                                          (ask-handler report))))
                       (return-from failed (if failure (condition-report failure hook) report)))))
              (declare (dynamic-extent #'fail))
              (let ((*on-debugger* #'fail)
                    (*user-code-boundary* (frame-pointer-here)))
                (multiple-value-call
                    ;; MORE is allocated in the heap. A long list on the stack would be allocated in one step and could
                    ;; extend past the guard pages.
                    (lambda (&optional (value nil one) &rest more)
                      (when more
                        (check-stack-room))
                      (let ((unwritable
                              (let ((buffer *message-buffer*))
                                (declare (type message-buffer buffer))
                                (begin-message buffer)
                                (put-word buffer (token-word (tag-number :values) (if one (1+ (length more)) 0)))
                                (cond ((and (null more) (typep value '(or null fixnum)))
                                       (when one
                                         (put-argument buffer value shape))
                                       nil)
                                      (t
                                       (let ((*message-buffer* nil))
                                         (catching-error ()
                                           (put-argument buffer value shape)
                                           (dolist (value more)
                                             (put-object buffer value shape)))))))))
                        (when unwritable
                          ;; Treat the condition as an error of FUNCTION. If interruption is allowed, the program's
                          ;; handler must be interruptible too.
                          (if *caller-interruptible*
                              (let ((*allow-with-interrupts* t))
                                (with-interrupts (fail unwritable)))
                              (fail unwritable)))))
                  (with-outer-handlers-for-signals ()
                    ;; The program may have used much of the stack since Lisp called it. The functions that are called
                    ;; below may hold one of the host's mutexes, so the stack must not be exhausted there.
                    (check-stack-room)
                    ;; An interrupted release would leak handles that the program no longer uses.
                    (if (and *caller-interruptible* (/= function +release-entry+))
                        ;; Interrupts are off again while the values are written (see ALLOW-INTERRUPTION): an interruption could
                        ;; write a message into the same buffer.
                        (let ((*allow-with-interrupts* t))
                          (with-interrupts (call-with-message (handle-object function) address end)))
                        (call-with-message (handle-object function) address end)))))))))
    (cond (report
           (when (typep (first report) 'heap-nearly-exhausted)
             (collect-after-call))
           (begin-message *message-buffer*)
           (put-report *message-buffer* report)
           (declared-number "SBCL_CALL_FAILED"))
          (t (declared-number "SBCL_CALL_VALUES")))))

(defun call-from-program (function shape address count reply)
  "Call FUNCTION, a handle, with the arguments in the COUNT words at ADDRESS. Write the values in SHAPE, or a condition,
as CALL-AND-WRITE-REPLY does. Store the answer's address and number of words in the struct sbcl_message at the address
REPLY. Return an sbcl_call_status. SBCL_CALL_UNWINDING means that a non-local exit through the program's frames is pending,
so that the program must return."
  (declare (type (unsigned-byte 62) function shape address count reply))
  (cond (*pending-exit* (declared-number "SBCL_CALL_UNWINDING"))
        (t
         (let ((status (stopping-unwind (call-and-write-reply function shape address
                                                              (+ address (* 8 (ldb (byte 48 0) count))))
                           ((frame-pointer-here))
                         ;; An interruption may have unwound the code that wrote a message.
                         (discard-unfinished-message *message-buffer*)
                         (declared-number "SBCL_CALL_UNWINDING")))
               (buffer *message-buffer*)
               (reply (int-sap reply)))
           (declare (type message-buffer buffer))
           (finish-message buffer)
           (setf (sap-ref-64 reply (field-offset "sbcl_message" "words")) (buffer-address buffer)
                 (sap-ref-64 reply (field-offset "sbcl_message" "count")) (buffer-fill buffer))
           status))))
