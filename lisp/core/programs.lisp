;;;; Programs that evaluations start.

(in-package "SBCL-HOST")

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

(defun spawned (spawn program arguments stdin &rest more)
  "What SBCL's SPAWN does, for a program that this evaluation will have started. It gets a process group of its own, as
SBCL has it (src/runtime/run-program.c) but for one that shares the standard input: unless that is a terminal, nothing
is lost by passing it as a descriptor like any other."
  (let ((process-id (apply (the function spawn) program arguments
                           (if (and (minusp stdin) (zerop (sb-unix:unix-isatty 0))) 0 stdin)
                           more)))
    (when (plusp process-id)
      (note-program process-id))
    process-id))

(defun note-shared-output (options)
  "Say, once an evaluation, where a program prints to that RUN-PROGRAM starts with OPTIONS, when that is not to Lisp."
  (when (and *evaluation* (shared-output-p options)
             (not (shiftf (evaluation-output-told *evaluation*) t)))
    (say "What a program run with :output t or :error t prints is not captured: it goes to the server's stderr. With ~
          :output *standard-output* it comes here.")))
