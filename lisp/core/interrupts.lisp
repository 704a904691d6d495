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

(defun kept-bytes ()
  "Return how many bytes the last collection has left, as the host reckons."
  (let ((trigger (extern-alien "auto_gc_trigger" (unsigned 64)))
        (step (extern-alien "bytes_consed_between_gcs" (unsigned 64))))
    (if (< step trigger (ash 1 62)) (- trigger step) 0)))

(declaim (type (unsigned-byte 64) *kept*))
(defvar *kept* 0
  "Bytes that the last collection before this evaluation left.")

(defvar *interrupted* nil
  "True while what ran is being captured because it was interrupted.")

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
        (*kept* (kept-bytes))
        (*interrupted* nil))
    (block evaluation
      (flet ((abandon () (return-from evaluation)))
        (declare (dynamic-extent #'abandon))
        (let* ((*abandon* #'abandon)
               (value (funcall function)))
          (unless *failed*
            (return-from call-until-abandoned (values value t))))))
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
        (*interrupted* t))
    ;; Printing arguments may be what does not end: then the next interrupt does without.
    (with-interrupts
      (capture (cond ((eql reason +interrupt-timeout+) "TIMEOUT")
                     ((eql reason +interrupt-cancel+) "CANCELLED")
                     (t "HEAP-EXHAUSTED"))
               (lambda ())
               nil
               (lambda () (interrupted-frame hook))))))
