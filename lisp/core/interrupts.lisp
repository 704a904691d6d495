;;;; Abandoning and interrupting evaluations, and the bookkeeping of an evaluation that ends early.

(in-package "SBCL-HOST")

;;; Abandoning

(defvar *abandon* nil
  "A function that unwinds to the end of the evaluation; NIL when this thread runs no evaluation that could be abandoned.")

(declaim (type (member nil :error :interrupted) *failure-reason*))
(defvar *failure-reason* nil
  "The reason for this evaluation's failure: :ERROR for an error that reached the debugger, :INTERRUPTED, or NIL if the
evaluation has not failed. Cleanup forms that stop the unwinding do not reset it.")

(defvar *after-unwinding* nil
  "A function to call once a failed evaluation has unwound, or NIL.")

(declaim (type fixnum *collections*))
(defvar *collections* 0
  "The number of garbage collections that this evaluation has triggered by allocating.")

(defun kept-bytes ()
  "Return the number of bytes that survived the last collection, computed as the host does."
  (let ((trigger (extern-alien "auto_gc_trigger" (unsigned 64)))
        (step (extern-alien "bytes_consed_between_gcs" (unsigned 64))))
    (if (< step trigger (ash 1 62)) (- trigger step) 0)))

(declaim (type (unsigned-byte 64) *kept-before-evaluation*))
(defvar *kept-before-evaluation* 0
  "The number of bytes that survived the last collection before this evaluation.")

(defvar *capturing-interruption* nil
  "True while the frames of an interrupted evaluation are captured.")

(defun abandon-evaluation (reason finish)
  "Unwind to the end of the evaluation and make it fail for REASON, a value of *FAILURE-REASON*. After the unwinding call
FINISH, unless it is NIL."
  (setf *failure-reason* reason
        *after-unwinding* finish)
  (funcall (the function *abandon*)))

(defun check-failure ()
  "Continue the unwinding of a failed evaluation that a cleanup form has stopped."
  (when *failure-reason*
    (funcall (the function *abandon*))))

(defun call-until-abandoned (function)
  "Call FUNCTION, which evaluates user code. Return its value and true; or NIL and NIL when it failed."
  (declare (type function function))
  (let ((*on-debugger* nil)
        (*failure-reason* nil)
        (*after-unwinding* nil)
        (*collections* 0)
        (*kept-before-evaluation* (kept-bytes))
        (*capturing-interruption* nil))
    (block evaluation
      (flet ((abandon () (return-from evaluation)))
        (declare (dynamic-extent #'abandon))
        (let* ((*abandon* #'abandon)
               (value (funcall function)))
          (unless *failure-reason*
            (return-from call-until-abandoned (values value t))))))
    (let ((finish *after-unwinding*))
      (when finish
        ;; Stale references on the stack, within the frames of FINISH, would keep the evaluation's garbage alive in a
        ;; collection.
        (sb-sys:scrub-control-stack)
        (funcall (the function finish)))))
  (values nil nil))

(defun unwind-from-stack-end ()
  "End the evaluation, or the thread if it runs none, because the control stack is exhausted again while the first
exhaustion is being handled. The room on the stack is small. If cleanup forms use it up too, this function is called
again."
  (unless *abandon*
    (sb-thread:abort-thread))
  (if *failure-reason*
      (funcall (the function *abandon*))
      (abandon-evaluation
       :error
       (lambda ()
         (event *job-id* (event-code :error) 0 "SB-KERNEL::CONTROL-STACK-EXHAUSTED")
         (event *job-id* (event-code :error-text) 0
                "Control stack exhausted again while the first exhaustion was being handled: handlers have little room.")))))

;;; Interrupting

(declaim (type (unsigned-byte 64) **ended-for-heap**))
(defglobal **ended-for-heap** 0
  "The job whose evaluation was most recently ended because the heap was nearly full.")

(defun capture-interruption (reason hook)
  "Capture the interrupted evaluation, below the function with frame pointer HOOK. REASON is the flag that the host gave
for the interruption. Return the values of CAPTURE."
  (let ((*on-debugger* nil)
        (*capturing-interruption* t))
    ;; Printing an argument might never end. The next interruption then captures nothing.
    (with-interrupts
      (capture (cond ((eql reason +interrupt-timeout+) "TIMEOUT")
                     ((eql reason +interrupt-cancel+) "CANCELLED")
                     (t "HEAP-EXHAUSTED"))
               (lambda ())
               nil
               (lambda () (interrupted-frame hook))))))
