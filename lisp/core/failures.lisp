;;;; Failing evaluations: by an error that reaches the debugger, or by an interruption.

(in-package "SBCL-HOST")

(defglobal **error-details** '()
  "The names of the functions that push further details of an error report, in order. Each function is called with the
condition.")

(defun add-error-details (function)
  "Make error reports include what FUNCTION, a symbol, pushes. Called by packages that build on this one."
  (setf **error-details** (append (remove function **error-details**) (list function))))

(defun push-error-details (condition)
  "Push the further details of the report of CONDITION."
  (dolist (function **error-details**)
    (funcall (the symbol function) condition)))

(define-hook push-unhandled (condition)
  "Report to the host that no handler handled CONDITION, if CONDITION was recorded when it was signalled.")

(define-hook hold (condition frames)
  "Report to the host that this evaluation failed with CONDITION and is held, and run the host's jobs for it. Return when
the host releases it.")

(define-hook hold-interruption (reason hook)
  "Hold this evaluation, interrupted for REASON below the function with frame pointer HOOK. Return true if it should
continue, and NIL if it cannot be held.")

(defun report-thread-error (condition hook)
  "Print CONDITION, which no handler in this thread handled and which entered the debugger through the function with frame
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

(defun end-failed-thread (condition hook)
  "Report CONDITION with REPORT-THREAD-ERROR, and end the thread."
  (report-thread-error condition hook)
  (sb-thread:abort-thread))

(defun report-cleanup-error (condition)
  "Print CONDITION, which ended a cleanup form of an interrupted evaluation."
  (with-quiet-debugger ()
    (let ((stream *error-output*))
      (guarded (with-server-syntax ()
                 (let ((*print-escape* nil))
                   (format stream "~&Error in a cleanup form: ~A~%~A~%"
                           (type-name-text (class-name-of condition)) condition)))
          (failure)
        nil))))

(defun fail-evaluation (condition hook)
  "Push CONDITION, which entered the debugger through the function with frame pointer HOOK, and end the evaluation or hold
it here. An interrupted evaluation remains interrupted."
  (when (eq *failure-reason* :interrupted)
    (report-cleanup-error condition)
    (check-failure))
  (push-unhandled condition)
  ;; A held evaluation answers here, before the end of the compilation unit; the error may be due to something undefined.
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
                                  **resets-available**))))
               condition
               (lambda () (error-frame hook)))
    (when (and *hold-errors* (not finish) (not sb-kernel:*gc-inhibit*))
      (hold condition frames))
    (abandon-evaluation :error finish)))

(defun call-user-hook (variable condition)
  "Call the function in VARIABLE, one of the two debugger hooks, as INVOKE-DEBUGGER does (RUN-HOOK in
src/code/debug.lisp). When the hook itself fails, notify the user and continue with the original error."
  (let ((hook (symbol-value variable)))
    ;; DISABLE-DEBUGGER's hook would end the process.
    (unless (or (null hook) (eq hook 'sb-debug::debugger-disabled-hook))
      (progv (list variable) '(nil)
        (block contained
          (let ((*on-debugger* (lambda (failure)
                                 (push-notice "The function in ~A failed with ~A."
                                                      variable (type-name-text (class-name-of failure)))
                                 (return-from contained))))
            (funcall hook condition hook)))))))

(defun enter-debugger (invoke-debugger condition)
  "Handle CONDITION in place of INVOKE-DEBUGGER: call the user's hooks, then fail the evaluation or end the thread."
  (declare (optimize (debug 2)))
  ;; This frame represents the call of INVOKE-DEBUGGER. The binding keeps the calls that follow from being tail calls.
  (let ((sb-impl::*deadline* nil))
    (cond (*on-debugger* (funcall (the function *on-debugger*) condition))
          ((not (host-started-p)) (funcall invoke-debugger condition))
          (t
           (call-user-hook 'sb-ext:*invoke-debugger-hook* condition)
           (call-user-hook '*debugger-hook* condition)
           (if *abandon*
               (fail-evaluation condition (frame-pointer-here))
               (end-failed-thread condition (frame-pointer-here)))))))

(defun interrupt-evaluation (job-id reason)
  "End or hold the evaluation of JOB-ID, if this thread still runs it, for REASON, an sbcl_interrupt. Called in the
thread by an interruption. Unwind without signalling a condition, because the user's handlers might handle it."
  (when (and *abandon* (eql job-id *job-id*))
    (let ((hook (frame-pointer-here)))
      ;; A second interruption abandons the capture that the first one began.
      (when (or *capturing-interruption* (not (hold-interruption reason hook)))
        (unless *capturing-interruption*
          (capture-interruption reason hook))
        (event job-id (event-code :unwinding))
        (abandon-evaluation :interrupted #'end-programs)))))
