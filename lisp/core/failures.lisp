;;;; Ends or holds an evaluation that fails because an error reaches the debugger or because it is interrupted.

(in-package "SBCL-HOST")

(defglobal **error-details** '()
  "The names of the functions that push additional details of an error report, in the order of the details. Each function is
called with the condition.")

(defun add-error-details (function)
  "Make error reports include the details that FUNCTION, a symbol, pushes. Called by packages that build on SBCL-HOST."
  (setf **error-details** (append (remove function **error-details**) (list function))))

(defun push-error-details (condition)
  "Push the additional details of the report of CONDITION."
  (dolist (function **error-details**)
    (funcall (the symbol function) condition)))

(define-hook push-unhandled-condition (condition)
  "Report to the host that no handler handled CONDITION. Do nothing if CONDITION was not recorded when it was signalled.")

(define-hook hold-failed-evaluation (condition frames)
  "Report to the host that this evaluation failed with CONDITION and is held, and run the host's jobs for the held
evaluation. FRAMES are the frames that CAPTURE-ERROR returned. Return when the host releases the evaluation.")

(define-hook hold-interruption (reason hook)
  "Hold this evaluation, which was interrupted for REASON, a value of the C enum sbcl_interrupt. HOOK is the frame pointer
of the function that the interruption called. Return true if the evaluation should continue, and NIL if it cannot be held.
If the host releases the evaluation, unwind it instead of returning.")

(defun report-thread-error (condition hook)
  "Print CONDITION, an error that no handler in this thread handled, and up to 20 frames to *ERROR-OUTPUT*. For a
STORAGE-CONDITION, print no frames. HOOK is the frame pointer of the function that was called to enter the debugger."
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
                         for call = (capture-frame number frame condition)
                         repeat 20
                         do (format stream "~D: (~S~{ ~S~})~%" number (reported-frame-name call)
                                    (sb-int:ensure-list (reported-frame-arguments call))))))
          (failure)
        (format stream "~&(printing this report failed: ~A)~%" (type-name-text (class-name-of failure)))))))

(defun end-failed-thread (condition hook)
  "Report CONDITION by REPORT-THREAD-ERROR, and end this thread. HOOK is as in REPORT-THREAD-ERROR."
  (report-thread-error condition hook)
  (sb-thread:abort-thread))

(defun report-cleanup-error (condition)
  "Print CONDITION, an error in a cleanup form that ran while an interrupted evaluation unwound."
  (with-quiet-debugger ()
    (let ((stream *error-output*))
      (guarded (with-server-syntax ()
                 (let ((*print-escape* nil))
                   (format stream "~&Error in a cleanup form of the interrupted evaluation: ~A~%~A~%"
                           (type-name-text (class-name-of condition)) condition)))
          (failure)
        nil))))

(defun fail-evaluation (condition hook)
  "Push the description of CONDITION, an error that was not handled, and end the evaluation or hold it here. HOOK is the
frame pointer of the function that was called to enter the debugger. If the evaluation is already unwinding after an
interruption, only print CONDITION and continue the unwinding."
  (when (eq *failure-reason* :interrupted)
    (report-cleanup-error condition)
    (resume-failure-unwinding))
  (push-unhandled-condition condition)
  ;; Report undefined names now, because they may explain the error. If the evaluation is held, the client gets its answer
  ;; before the compilation unit ends.
  (unless (typep condition 'storage-condition)
    (with-quiet-debugger ()
      (finish-compilation-unit)))
  (multiple-value-bind (frames finish)
      (capture-error (type-name-text (class-name-of condition))
                     (lambda ()
                       (push-report (event-code :error-text) condition)
                       (push-error-details condition)
                       (when (typep condition 'sb-sys:memory-fault-error)
                         (event *job-id* (event-code :notice) 0
                                (format nil "A memory fault occurred: the image may be damaged.~[~; ~A starts a new ~
                                             image.~; To start a new image, restart the server.~]"
                                        (cond ((and **resets-available** (not **supervised**))
                                               (if (eq :shell (audience)) 0 2))
                                              ((reset-command) 1)
                                              (t 0))
                                        (reset-command)))))
                     condition
                     (lambda () (error-frame hook)))
    (when (and *hold-errors* (not finish) (not sb-kernel:*gc-inhibit*)
               ;; Code that is evaluated in the held evaluation must be interruptible, and may fail in turn.
               (not (few-interrupt-contexts-left-p)))
      (hold-failed-evaluation condition frames))
    (abandon-evaluation :error finish)))

(defun call-user-hook (variable condition)
  "Call the function that is the value of VARIABLE, *DEBUGGER-HOOK* or SB-EXT:*INVOKE-DEBUGGER-HOOK*, as INVOKE-DEBUGGER
does (RUN-HOOK in src/code/debug.lisp). If the called function fails in turn, notify the user and return."
  (let ((hook (symbol-value variable)))
    ;; The hook that SB-EXT:DISABLE-DEBUGGER installs would end the process.
    (unless (or (null hook) (eq hook 'sb-debug::debugger-disabled-hook))
      (progv (list variable) '(nil)
        (block contained
          (let ((*on-debugger* (lambda (failure)
                                 (push-notice "The function in the variable ~S failed with ~A. ~
                                               To remove the function: (setf ~2:*~S nil)"
                                                      variable (type-name-text (class-name-of failure)))
                                 (return-from contained))))
            (funcall hook condition hook)))))))

(defun enter-debugger (invoke-debugger condition)
  "Handle CONDITION in place of INVOKE-DEBUGGER, SBCL's function: call the user's hooks, then fail the evaluation or end the
thread. If *ON-DEBUGGER* holds a function, call only this function. If this image serves no host, call INVOKE-DEBUGGER."
  (declare (optimize (debug 2)))
  ;; Backtraces show this function's frame as the call of INVOKE-DEBUGGER. The binding prevents tail calls below, which
  ;; would remove the frame.
  (let ((sb-impl::*deadline* nil))
    (cond (*on-debugger* (funcall (the function *on-debugger*) condition))
          ((not (host-started-p)) (funcall invoke-debugger condition))
          (t
           (call-user-hook 'sb-ext:*invoke-debugger-hook* condition)
           (call-user-hook '*debugger-hook* condition)
           (if *unwind-evaluation*
               (fail-evaluation condition (frame-pointer-here))
               (end-failed-thread condition (frame-pointer-here)))))))

(defun interrupt-evaluation (job-id reason)
  "End or hold the evaluation of the job JOB-ID, if this thread still runs it. REASON is a value of the C enum
sbcl_interrupt. An interruption calls this function in the thread of the evaluation. Unwind without signalling a
condition, because the user's handlers might handle it."
  (when (and *unwind-evaluation* (eql job-id *job-id*))
    (let ((hook (frame-pointer-here)))
      ;; If the first interruption is still capturing frames, this one unwinds at once.
      (when (or *capturing-interruption* (not (hold-interruption reason hook)))
        (unless *capturing-interruption*
          (capture-interruption reason hook))
        (event job-id (event-code :unwinding))
        (abandon-evaluation :interrupted #'end-programs)))))
