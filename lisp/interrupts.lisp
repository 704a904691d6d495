;;;; Evaluations that end before their time: what abandons one, what interrupts it, and what it leaves behind then.

(in-package "SBCL-HOST")

;;; Abandoning

(defvar *abandon* nil
  "A function of one argument, or NIL when this thread evaluates nothing that could be abandoned: unwinds to the end of
the evaluation. The argument is a function to call there, or NIL.")

(defvar *failed* nil
  "True once this evaluation has failed and is being unwound.")

(declaim (type fixnum *collections*))
(defvar *collections* 0
  "How often this evaluation has allocated so much that garbage was collected.")

(declaim (type (unsigned-byte 64) *kept*))
(defvar *kept* 0
  "Bytes in use after the first of these collections, 0 before it.")

(defvar *interrupted* nil
  "True while what ran is being captured because it was interrupted.")

(defun abandon-evaluation (finish)
  "Unwind to the end of the evaluation, call FINISH there unless it is NIL, and fail."
  (setf *failed* t)
  (funcall (the function *abandon*) finish))

(defun call-until-abandoned (function)
  "Call FUNCTION, which evaluates user's code. Return its value and true; or NIL and NIL when it was abandoned."
  (declare (type function function))
  (let ((finish
          (block evaluation
            (let ((*abandon* (lambda (finish) (return-from evaluation finish)))
                  (*on-debugger* nil)
                  (*debugger-hook* nil)
                  (*failed* nil)
                  (*collections* 0)
                  (*kept* 0)
                  (*interrupted* nil))
              (return-from call-until-abandoned (values (funcall function) t))))))
    (when finish
      ;; What the evaluation left on the stack would lie in the frames of what is called here, where a collection takes
      ;; it for something in use.
      (sb-sys:scrub-control-stack)
      (funcall (the function finish)))
    (values nil nil)))

(defun unwind-from-stack-end ()
  "End what this thread does: its control stack is used up for the second time, by what handles the first. There is
little room, and cleanup forms may use that up as well: then this is called once more."
  (unless *abandon*
    (sb-thread:abort-thread))
  (let ((told (eq *failed* t)))
    (setf *failed* :without-stack)
    (funcall (the function *abandon*)
             (lambda ()
               (unless told
                 (event *job-id* (event-code :error) 0 "SB-KERNEL::CONTROL-STACK-EXHAUSTED")
                 (event *job-id* (event-code :error-text) 0
                        "Control stack exhausted while that was being handled: there is little room for handlers."))))))

;;; Interrupting

(declaim (type (unsigned-byte 64) **ended-for-heap**))
(defglobal **ended-for-heap** 0
  "The evaluation that was the last to be ended for the heap.")

(defun capture-interruption (reason hook)
  "Capture what runs, which REASON ends, below the function with frame pointer HOOK."
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

(defun interrupt-evaluation (job-id reason)
  "End the evaluation of JOB-ID, if it is still this thread's, for REASON, an sbcl_interrupt. Called in the thread by
an interrupt. Unwinds without a condition, which the user's handlers would swallow."
  (when (and *abandon* (eql job-id *job-id*))
    (unless *interrupted*
      (capture-interruption reason (frame-pointer-here)))
    (abandon-evaluation #'end-children)))

(defun end-evaluation-for-heap ()
  "End the evaluation of this thread, as INTERRUPT-EVALUATION does, unless what filled the heap is gone. Called by an
interrupt, and after each collection."
  (let ((job-id *job-id*)
        (kept *kept*))
    (when (and *abandon* (not (heap-cleared-p)))
      (unless (or *interrupted* (eql job-id **ended-for-heap**))
        (setf **ended-for-heap** job-id)
        (capture-interruption +interrupt-heap+ (frame-pointer-here)))
      (abandon-evaluation (lambda ()
                            (end-children)
                            (collect-and-report kept))))))

;;; Clearing up

(defvar *earlier-children* '()
  "The processes that were running when this evaluation began.")

(defun end-children ()
  "End the processes that this evaluation started."
  (dolist (process (set-difference sb-impl::*active-processes* *earlier-children*))
    (ignore-errors (sb-ext:process-kill process 9))))
