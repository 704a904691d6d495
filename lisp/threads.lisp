;;;; Threads that the user's code starts: they work for the evaluation that started them, and cannot end the process.

(in-package "SBCL-HOST")

(defun report-thread-error (condition hook)
  "Print CONDITION, which nothing in this thread handled and which entered the debugger through the function with frame
pointer HOOK."
  (let ((frame (error-frame hook))
        (stream *error-output*))
    (with-quiet-debugger ()
      (guarded (with-server-syntax ()
                 (format stream "~&Error in thread ~A: ~A~%"
                         (or (sb-thread:thread-name sb-thread:*current-thread*) "(unnamed)")
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

(defun call-as-thread-of-job (job-id function arguments)
  "Call FUNCTION with ARGUMENTS in a thread that an evaluation of JOB-ID started."
  (let ((*job-id* job-id)
        (*spare-buffer* nil))
    (call-with-job-streams
     (lambda ()
       (with-boundary ()
         (apply function arguments))))))

(defun adopt-user-threads ()
  "Make the threads that evaluations start work for the evaluation that started them. Those of timers are nobody's."
  (encapsulate 'sb-thread::start-thread 'sbcl-host
               (lambda (start thread function arguments)
                 (let ((job-id *job-id*)
                       (function (sb-kernel:%coerce-callable-to-fun function)))
                   (when (plusp job-id)
                     (push thread *job-threads*))
                   (funcall start thread
                            (lambda (&rest arguments)
                              (if (plusp job-id)
                                  (call-as-thread-of-job job-id function arguments)
                                  (with-boundary ()
                                    (apply function arguments))))
                            arguments)))))

(define-condition exit-refused (error)
  ()
  (:report "EXIT was called: the server goes on, and so does the session. Use the tool reset-session for a fresh one.")
  (:documentation "User's code tried to end the process."))

(defun refuse-exit ()
  "Make EXIT and its like an error."
  (dolist (function '(sb-ext:exit sb-ext:quit))
    (encapsulate function 'sbcl-host
                 (lambda (exit &rest arguments)
                   (if (host-started-p)
                       (error 'exit-refused)
                       (apply exit arguments))))))

(defun silence-exhaustion ()
  "Have SBCL report an exhausted stack by its condition alone, not by a line on *ERROR-OUTPUT* as well."
  (loop for (function condition) in '((sb-kernel::control-stack-exhausted-error sb-kernel::control-stack-exhausted)
                                      (sb-kernel::binding-stack-exhausted-error sb-kernel::binding-stack-exhausted))
        do (let ((condition condition))
             (encapsulate function 'sbcl-host
                          (lambda (function)
                            (declare (ignore function))
                            (let ((sb-debug:*stack-top-hint* nil))
                              (error condition)))))))
