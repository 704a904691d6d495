;;;; Evaluations that end before their time: what abandons one, what interrupts it, and what it leaves behind then.

(in-package "SBCL-HOST")

;;; Abandoning

(defvar *abandon* nil
  "A function that unwinds to the end of the evaluation, or NIL when this thread evaluates nothing that could be
abandoned.")

(declaim (type (member nil :error :interrupted) *failed*))
(defvar *failed* nil
  "Whether this evaluation has failed: by an error that reached the debugger, or by an interruption. It stays so, whatever
cleanup forms do to stop the unwinding.")

(defvar *finish* nil
  "What is to be called once a failed evaluation is unwound, or NIL.")

(declaim (type fixnum *collections*))
(defvar *collections* 0
  "How often this evaluation has allocated so much that garbage was collected.")

(declaim (type (unsigned-byte 64) *kept*))
(defvar *kept* 0
  "Bytes in use after the first of these collections, 0 before it.")

(declaim (type (unsigned-byte 62) **interrupts-sent**))
(defglobal **interrupts-sent** 0
  "How often the control lane has interrupted a thread.")

(declaim (type (or null (unsigned-byte 62)) *interrupted*))
(defvar *interrupted* nil
  "While what ran is being captured because it was interrupted, how many interrupts had been sent by then; else NIL.")

(defun abandon-evaluation (reason finish)
  "Unwind to the end of the evaluation, call FINISH there unless it is NIL, and fail, for REASON, a value of *FAILED*."
  (setf *failed* reason
        *finish* finish)
  (funcall (the function *abandon*)))

(defun check-failure ()
  "Go on unwinding if this evaluation has failed and a cleanup form has stopped that."
  (when *failed*
    (funcall (the function *abandon*))))

(defun call-until-abandoned (function)
  "Call FUNCTION, which evaluates user's code. Return its value and true; or NIL and NIL when it failed."
  (declare (type function function))
  (let ((*on-debugger* nil)
        (*failed* nil)
        (*finish* nil)
        (*collections* 0)
        (*kept* 0)
        (*interrupted* nil))
    (block evaluation
      (let* ((*abandon* (lambda () (return-from evaluation)))
             (value (funcall function)))
        (unless *failed*
          (return-from call-until-abandoned (values value t)))))
    (let ((finish *finish*))
      (when finish
        ;; What the evaluation left on the stack would lie in the frames of what is called here, where a collection
        ;; takes it for something in use.
        (sb-sys:scrub-control-stack)
        (funcall (the function finish)))))
  (values nil nil))

(defun unwind-from-stack-end ()
  "End what this thread does: its control stack is used up for the second time, by what handles the first. There is
little room, and cleanup forms may use that up as well: then this is called once more."
  (unless *abandon*
    (sb-thread:abort-thread))
  (if *failed*
      (funcall (the function *abandon*))
      (abandon-evaluation
       :error
       (lambda ()
         (event *job-id* (event-code :error) 0 "SB-KERNEL::CONTROL-STACK-EXHAUSTED")
         (event *job-id* (event-code :error-text) 0
                "Control stack exhausted while that was being handled: there is little room for handlers.")))))

;;; Interrupting

(declaim (type (unsigned-byte 64) **ended-for-heap**))
(defglobal **ended-for-heap** 0
  "The evaluation that was the last to be ended for the heap.")

(defun capture-interruption (reason hook)
  "Capture what runs, which REASON ends, below the function with frame pointer HOOK. Return what CAPTURE does."
  (let ((*on-debugger* nil)
        (*interrupted* **interrupts-sent**))
    ;; Printing arguments may be what does not end: then the next interrupt does without.
    (with-interrupts
      (capture (cond ((eql reason +interrupt-timeout+) "TIMEOUT")
                     ((eql reason +interrupt-cancel+) "CANCELLED")
                     (t "HEAP-EXHAUSTED"))
               (lambda ())
               nil
               (lambda () (interrupted-frame hook))))))

(defun interrupt-evaluation (job-id reason number)
  "End the evaluation of JOB-ID, if it is still this thread's, for REASON, an sbcl_interrupt, or hold it. Called in the
thread by the interrupt with this NUMBER. Unwinds without a condition, which the user's handlers would swallow."
  (when (and *abandon* (eql job-id *job-id*)
             ;; Several wait when the code has had interrupts disabled: they are one.
             (or (null *interrupted*) (> number *interrupted*)))
    (let ((hook (frame-pointer-here)))
      (when (or *interrupted* (not (hold-interruption reason hook)))
        (unless *interrupted*
          (capture-interruption reason hook))
        (abandon-evaluation :interrupted #'end-programs)))))

(defun end-evaluation-for-heap ()
  "End the evaluation of this thread, as INTERRUPT-EVALUATION does, unless what filled the heap is gone. Called by an
interrupt, and after each collection."
  (let ((job-id *job-id*)
        (kept *kept*))
    (when (and *abandon* (not (heap-cleared-p)))
      (unless (or *interrupted* (eql job-id **ended-for-heap**))
        (setf **ended-for-heap** job-id)
        (capture-interruption +interrupt-heap+ (frame-pointer-here)))
      (abandon-evaluation :interrupted
                          (lambda ()
                            (end-programs)
                            (collect-and-report kept))))))

;;; Clearing up

(defun process-group-p (group)
  "True when a process of GROUP, a number, is still there."
  (zerop (sb-unix:unix-killpg group 0)))

(defun note-program (process-id)
  "Record that this evaluation started a program as the process PROCESS-ID, and forget those of which nothing is left."
  (when *evaluation*
    (sb-ext:atomic-update (evaluation-groups *evaluation*)
                          (lambda (groups)
                            (cons process-id (remove-if-not #'process-group-p groups))))))

(defun end-programs ()
  "End the programs that this evaluation started, with all that they started in their process groups."
  (dolist (group (and *evaluation* (evaluation-groups *evaluation*)))
    ;; A group outlives its first process. Where there is a process of that number which is not SBCL's any more, the
    ;; group was gone and the number has been given to another one.
    (when (or (find group sb-impl::*active-processes* :key #'sb-ext:process-pid)
              (minusp (sb-unix:unix-kill group 0)))
      (sb-unix:unix-killpg group 9))))

(defun shared-output-p (options)
  "True when OPTIONS, keyword arguments of RUN-PROGRAM, give the program this process' own output."
  (loop for (key value) on options by #'cddr
          thereis (and (member key '(:output :error)) (eq value t))))

(defun watch-programs ()
  "Give each program that is started a process group of its own, remember it, and say where it prints to when that is
not to Lisp. SBCL does the first (src/runtime/run-program.c) but for a program that shares its standard input: unless
that is a terminal, nothing is lost by passing it as a descriptor like any other."
  (encapsulate 'sb-impl::spawn 'sbcl-host
               (lambda (spawn program arguments stdin &rest more)
                 (let ((process-id (apply spawn program arguments
                                          (if (and (minusp stdin) (zerop (sb-unix:unix-isatty 0))) 0 stdin)
                                          more)))
                   (when (plusp process-id)
                     (note-program process-id))
                   process-id)))
  (encapsulate 'sb-ext:run-program 'sbcl-host
               (lambda (run-program program arguments &rest options)
                 (when (and *evaluation* (shared-output-p options)
                            (not (shiftf (evaluation-output-told *evaluation*) t)))
                   (event *job-id* (event-code :notice) 0
                          (format nil "What a program run with :output t or :error t prints is not captured: it goes to ~
                                       the server's stderr. With :output *standard-output* it comes here.")))
                 (apply run-program program arguments options))))
