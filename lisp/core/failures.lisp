;;;; How an evaluation fails: by what reaches the debugger, or by an interruption.

(in-package "SBCL-HOST")

(defglobal **error-details** '()
  "The names of functions of a condition that push what its report adds to the condition's own, in their order.")

(defun add-error-details (function)
  "Have the reports of errors add what FUNCTION, a symbol, pushes: a package above this one defines it."
  (setf **error-details** (append (remove function **error-details**) (list function))))

(defun push-error-details (condition)
  "Push what the report of CONDITION adds to the condition's own."
  (dolist (function **error-details**)
    (funcall (the symbol function) condition)))

(define-hook push-unhandled (condition)
  "Push that nothing handled CONDITION, if it was recorded where it was signalled.")

(define-hook hold (condition frames)
  "Answer that this evaluation failed with CONDITION and is held; do what the host asks of it. Return to release it.")

(define-hook hold-interruption (reason hook)
  "Hold this evaluation, which was interrupted for REASON below the function with frame pointer HOOK. Return true when it is to
go on, and NIL when it cannot be held.")

(defun report-thread-error (condition hook)
  "Print CONDITION, which nothing in this thread handled and which entered the debugger through the function with frame
pointer HOOK."
  (let ((frame (error-frame hook))
        (stream *error-output*))
    (with-quiet-debugger ()
      (guarded (with-server-syntax ()
                 (format stream "~&Error in ~A: ~A~%"
                         (thread-title sb-thread:*current-thread*)
                         (type-name-text (class-name-of condition)))
                 (let ((*print-escape* nil))
                   (princ condition stream))
                 (terpri stream)
                 (unless (typep condition 'storage-condition)
                   (loop for (number . frame) in (user-frames frame)
                         for call = (frame-call number frame condition)
                         repeat 20
                         do (format stream "~D: (~S~{ ~S~})~%" number (call-name call)
                                    (sb-int:ensure-list (call-arguments call))))))
          (failure)
        (format stream "~&(the condition's report failed)~%")))))

(defun contain-thread (condition hook)
  "Report CONDITION, as REPORT-THREAD-ERROR does, and end the thread."
  (report-thread-error condition hook)
  (sb-thread:abort-thread))

(defun push-failure-after-interruption (condition)
  "Say that CONDITION ended a cleanup form of an evaluation that is being unwound because it was interrupted."
  (with-quiet-debugger ()
    (let ((stream *error-output*))
      (guarded (with-server-syntax ()
                 (let ((*print-escape* nil))
                   (format stream "~&Error in a cleanup form: ~A~%~A~%"
                           (type-name-text (class-name-of condition)) condition)))
          (failure)
        nil))))

(defun fail-with (condition hook)
  "Push CONDITION, which entered the debugger through the function with frame pointer HOOK, and end the evaluation, or
hold it here. What has been interrupted stays so."
  (when (eq *failed* :interrupted)
    (push-failure-after-interruption condition)
    (check-failure))
  (push-unhandled condition)
  ;; The answer may be given here, and the error be of something that is undefined.
  (unless (typep condition 'storage-condition)
    (with-quiet-debugger ()
      (finish-unit)))
  (multiple-value-bind (frames finish)
      (capture (type-name-text (class-name-of condition))
               (lambda ()
                 (push-report (event-code :error-text) condition)
                 (push-error-details condition)
                 (when (typep condition 'sb-sys:memory-fault-error)
                   (event *job-id* (event-code :notice) 0
                          (format nil "A memory fault: the image may be damaged.~:[~; reset-session gives a fresh one.~]"
                                  **resets**))))
               condition
               (lambda () (error-frame hook)))
    (when (and *hold-errors* (not finish) (not sb-kernel:*gc-inhibit*))
      (hold condition frames))
    (abandon-evaluation :error finish)))

(defun call-user-hook (variable condition)
  "Call the function that VARIABLE, one of the two debugger hooks, holds, as INVOKE-DEBUGGER does (RUN-HOOK in
src/code/debug.lisp). A hook that fails itself is told of, and the error that it was called for goes on."
  (let ((hook (symbol-value variable)))
    ;; DISABLE-DEBUGGER's hook would end the process.
    (unless (or (null hook) (eq hook 'sb-debug::debugger-disabled-hook))
      (progv (list variable) '(nil)
        (block contained
          (let ((*on-debugger* (lambda (failure)
                                 (say "The function in ~A failed with ~A."
                                              variable (type-name-text (class-name-of failure)))
                                 (return-from contained))))
            (funcall hook condition hook)))))))

(defun enter-debugger (invoke-debugger condition)
  "What INVOKE-DEBUGGER does: the user's hooks come first, then what the thread is bound to."
  (declare (optimize (debug 2)))
  ;; The binding keeps what follows from being a tail call: this frame stands for the call of INVOKE-DEBUGGER.
  (let ((sb-impl::*deadline* nil))
    (cond (*on-debugger* (funcall (the function *on-debugger*) condition))
          ((not (host-started-p)) (funcall invoke-debugger condition))
          (t
           (call-user-hook 'sb-ext:*invoke-debugger-hook* condition)
           (call-user-hook '*debugger-hook* condition)
           (if *abandon*
               (fail-with condition (frame-pointer-here))
               (contain-thread condition (frame-pointer-here)))))))

(defun interrupt-evaluation (job-id reason)
  "End the evaluation of JOB-ID, if it is still this thread's, for REASON, an sbcl_interrupt, or hold it. Called in the
thread by an interruption. Unwinds without a condition, which the user's handlers would swallow."
  (when (and *abandon* (eql job-id *job-id*))
    (let ((hook (frame-pointer-here)))
      ;; A second interruption abandons the capture that the first one began.
      (when (or *interrupted* (not (hold-interruption reason hook)))
        (unless *interrupted*
          (capture-interruption reason hook))
        (event job-id (event-code :unwinding))
        (abandon-evaluation :interrupted #'end-programs)))))
