;;;; Programs that evaluations start with RUN-PROGRAM.

(in-package "SBCL-HOST")

(defun process-group-p (group)
  "Return true when the process group GROUP, a number, still has a process."
  (zerop (sb-unix:unix-killpg group 0)))

(defun record-process-group (process-id)
  "Record the process group of a program that this evaluation started, and drop groups that no longer exist. PROCESS-ID is
the process ID of the program and also the number of its group."
  (when *evaluation*
    (sb-ext:atomic-update (evaluation-groups *evaluation*)
                          (lambda (groups)
                            (cons process-id (remove-if-not #'process-group-p groups))))))

(defun end-programs ()
  "Kill the programs that this evaluation started, and all other processes in their process groups."
  (dolist (group (and *evaluation* (evaluation-groups *evaluation*)))
    ;; A group has the process ID of its first process as its number, and may outlive this process. If a process with this
    ;; ID exists and is not a child that SBCL knows, then the group has ended and its number was reused.
    (when (or (find group sb-impl::*active-processes* :key #'sb-ext:process-pid)
              (minusp (sb-unix:unix-kill group 0)))
      (sb-unix:unix-killpg group 9))))

(defun shared-output-p (options)
  "Return true when OPTIONS, keyword arguments of RUN-PROGRAM, make the program share stdout or stderr of this process."
  (loop for (key value) on options by #'cddr
          thereis (and (member key '(:output :error)) (eq value t))))

(defun spawn-in-group (spawn program arguments stdin &rest more)
  "Start PROGRAM by SPAWN, SBCL's function, and record the process group of the program. SBCL makes a process group
(src/runtime/run-program.c) unless STDIN is negative, which means that the program shares this process's standard input.
If the standard input is not a terminal, pass it as descriptor 0 instead: the program sees no difference, but gets a group.
ARGUMENTS, STDIN and MORE are SPAWN's further arguments."
  (let ((process-id (apply (the function spawn) program arguments
                           (if (and (minusp stdin) (zerop (sb-unix:unix-isatty 0))) 0 stdin)
                           more)))
    (when (plusp process-id)
      (record-process-group process-id))
    process-id))

(defun note-shared-output (options)
  "Notify the user, once per evaluation, that the output of a program is not captured. OPTIONS are the keyword arguments of
RUN-PROGRAM. Do nothing if they do not share this process's output."
  (when (and *evaluation* (shared-output-p options)
             (not (shiftf (evaluation-output-warning-given *evaluation*) t)))
    (push-notice "Output of a program run with :output t or :error t is not captured: it goes to the server's stderr. To ~
                  capture it, pass :output *standard-output*.")))
