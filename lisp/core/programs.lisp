;;;; Programs that evaluations start with RUN-PROGRAM.

(in-package "SBCL-HOST")

(defun process-group-p (group)
  "Return true when the process group GROUP, a number, still has a process."
  (zerop (sb-unix:unix-killpg group 0)))

(defun record-process-group (process-id)
  "Record the process group of PROCESS-ID, a program that this evaluation started, and drop groups that no longer exist."
  (when *evaluation*
    (sb-ext:atomic-update (evaluation-groups *evaluation*)
                          (lambda (groups)
                            (cons process-id (remove-if-not #'process-group-p groups))))))

(defun end-programs ()
  "Kill the programs that this evaluation started, with everything in their process groups."
  (dolist (group (and *evaluation* (evaluation-groups *evaluation*)))
    ;; A group may outlive its first process. If a process with the group's number exists that SBCL does not know as its
    ;; child, the group has ended and the number was reused.
    (when (or (find group sb-impl::*active-processes* :key #'sb-ext:process-pid)
              (minusp (sb-unix:unix-kill group 0)))
      (sb-unix:unix-killpg group 9))))

(defun shared-output-p (options)
  "Return true when OPTIONS, keyword arguments of RUN-PROGRAM, give the program the output of this process."
  (loop for (key value) on options by #'cddr
          thereis (and (member key '(:output :error)) (eq value t))))

(defun spawn-in-group (spawn program arguments stdin &rest more)
  "Start a program by SPAWN, SBCL's function, and record its process group. SBCL makes a process group
(src/runtime/run-program.c) except for a program that shares the standard input. Unless that is a terminal, passing the
standard input as an ordinary descriptor makes no difference to the program, and gives the program a group. ARGUMENTS,
STDIN and MORE are SPAWN's further arguments."
  (let ((process-id (apply (the function spawn) program arguments
                           (if (and (minusp stdin) (zerop (sb-unix:unix-isatty 0))) 0 stdin)
                           more)))
    (when (plusp process-id)
      (record-process-group process-id))
    process-id))

(defun note-shared-output (options)
  "Notify the user, once per evaluation, when a program that RUN-PROGRAM starts with OPTIONS prints to a place that Lisp
does not capture."
  (when (and *evaluation* (shared-output-p options)
             (not (shiftf (evaluation-output-warning-given *evaluation*) t)))
    (push-notice "What a program run with :output t or :error t prints is not captured: it goes to the server's stderr. ~
                  With ~
                  :output *standard-output* it comes here.")))
