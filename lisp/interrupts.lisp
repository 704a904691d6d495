;;;; Evaluations that end before their time: what abandons one, what interrupts it, and what it leaves behind then.

(in-package "SBCL-HOST")

;;; Abandoning

(defvar *abandon* nil
  "A function of one argument, or NIL when this thread evaluates nothing that could be abandoned: unwinds to the end of
the evaluation. The argument is a function to call there, or NIL.")

(defvar *failed* nil
  "True once this evaluation has failed and is being unwound.")

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
                  (*interrupted* nil))
              (return-from call-until-abandoned (values (funcall function) t))))))
    (when finish
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

(defun interrupt-evaluation (job-id reason)
  "End the evaluation of JOB-ID, if it is still this thread's, for REASON, an sbcl_interrupt. Called in the thread by
an interrupt. Unwinds without a condition, which the user's handlers would swallow."
  (when (and *abandon* (eql job-id *job-id*))
    (unless *interrupted*
      (let ((hook (frame-pointer-here))
            (*on-debugger* nil)
            (*interrupted* t))
        ;; Printing arguments may be what does not end: then the next interrupt does without.
        (with-interrupts
          (capture (cond ((eql reason +interrupt-timeout+) "TIMEOUT")
                         ((eql reason +interrupt-cancel+) "CANCELLED")
                         (t "HEAP-EXHAUSTED"))
                   (lambda ())
                   nil
                   (lambda () (interrupted-frame hook))))))
    (abandon-evaluation (lambda ()
                          (end-children)
                          (when (eql reason +interrupt-heap+)
                            (collect-and-report))))))

;;; Clearing up

(defvar *earlier-children* '()
  "The processes that were running when this evaluation began.")

(defun end-children ()
  "End the processes that this evaluation started."
  (dolist (process (set-difference sb-impl::*active-processes* *earlier-children*))
    (ignore-errors (sb-ext:process-kill process 9))))
