;;;; Threads that the user's code starts: they work for the evaluation that started them, and cannot end the process.

(in-package "SBCL-HOST")

(defun thread-title (thread)
  "Return what to call THREAD in a sentence."
  (format nil "thread ~A" (or (sb-thread:thread-name thread) "(unnamed)")))

(defun thread-list (threads)
  "Return what to call THREADS in a sentence; of many, the first ones and how many more."
  (let ((shown (min 10 (length threads))))
    (format nil "~{~A~^, ~}~@[ and ~D more~]"
            (mapcar #'thread-title (subseq threads 0 shown))
            (and (< shown (length threads)) (- (length threads) shown)))))

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

(defun call-as-thread-of-job (job-id evaluation function arguments)
  "Call FUNCTION with ARGUMENTS in a thread that EVALUATION, of JOB-ID, started."
  (let ((*job-id* job-id)
        (*evaluation* evaluation)
        (*spare-buffer* nil)
        (*output* (make-output)))
    (unwind-protect (with-boundary ()
                      (apply (the function function) arguments))
      (flush-output))))

(defun thread-limit ()
  "Return how many threads the user may have: SBCL dies of too many, for want of heap or of memory mappings."
  (min 1000 (floor (sb-ext:dynamic-space-size) (* 512 1024))))

(defun check-thread-limit ()
  "Signal an error when the user has as many threads as there may be."
  (let ((count (length (user-threads))))
    (when (zerop count)
      (setf **kept-before** (sb-kernel:dynamic-usage)))
    (when (>= count (thread-limit))
      (error "There are ~D threads already. Join or end some of them first; reset-session ends them all." count))))

(defun start-thread-of-job (start thread function arguments)
  "What SBCL's START-THREAD, START, does. Threads that evaluations start work for the evaluation that started them, and
must not be too many. Those of timers are nobody's."
  (let* ((job-id *job-id*)
         (evaluation *evaluation*)
         (function (sb-kernel:%coerce-callable-to-fun function))
         (adopted (and evaluation (not (sb-thread::thread-ephemeral-p thread)))))
    (when adopted
      (check-thread-limit))
    (prog1 (funcall (the function start) thread
                    (lambda (&rest arguments)
                      (guard-stack-end)
                      (if adopted
                          (call-as-thread-of-job job-id evaluation function arguments)
                          (with-boundary ()
                            (apply function arguments))))
                    arguments)
      (when adopted
        (note-thread thread evaluation)))))

(defun adopt-user-threads ()
  "Have all threads start as START-THREAD-OF-JOB has it."
  (encapsulate 'sb-thread::start-thread 'sbcl-host #'start-thread-of-job))

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
