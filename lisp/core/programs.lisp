;;;; Programs that evaluations start with RUN-PROGRAM.

(in-package "SBCL-HOST")

(defun process-group-p (group)
  "Return true when the process group GROUP, a number, still has a process."
  (zerop (sb-unix:unix-killpg group 0)))

(defun record-process-group (process-id)
  "Record the process group of a program that this evaluation started, and drop groups that no longer exist. PROCESS-ID is
the process ID of the program and also the number of its group."
  (when *evaluation*
    (sb-ext:atomic-update (evaluation-process-groups *evaluation*)
                          (lambda (groups)
                            (cons process-id (remove-if-not #'process-group-p groups))))))

(defun child-process-p (process-id)
  "Return true when the process PROCESS-ID is a child of this process, running or ended, that has not been waited for."
  (with-alien ((information (array char 128)))
    ;; 1 is P_PID. The options are WEXITED, WNOHANG and WNOWAIT: the call neither blocks nor removes a child that has ended.
    (zerop (alien-funcall (extern-alien "waitid" (function int int unsigned-int (* t) int))
                          1 process-id (addr information) (logior 4 1 #x1000000)))))

(defun end-programs ()
  "Kill the programs that this evaluation started, and all other processes in their process groups."
  (when *evaluation*
    ;; Increment the count before looking for programs. If a program that is being started is not found here, SPAWN-IN-GROUP
    ;; sees the new count and kills the program.
    (sb-ext:atomic-incf (evaluation-program-kills *evaluation*))
    (dolist (group (evaluation-process-groups *evaluation*))
      ;; A group's number is the process ID of its first process, and the group may outlive its first process. If the ID
      ;; now belongs to a process that this process did not start, the group has ended and its number was reused.
      (when (or (child-process-p group) (minusp (sb-unix:unix-kill group 0)))
        (kill-group group)))))

(defun kill-group (group)
  "Kill the processes of the process group numbered GROUP, and the process whose ID is GROUP, because this process may not
have created its group yet."
  (sb-unix:unix-kill group 9)
  (sb-unix:unix-killpg group 9))

(defun shared-outputs (options)
  "Return a list of :OUTPUT, :ERROR or both: the keywords by which OPTIONS, keyword arguments of RUN-PROGRAM, make the program
share stdout or stderr of this process."
  (loop for output in '(:output :error)
        ;; If a keyword occurs twice, as in calls by UIOP, the first occurrence counts.
        when (loop for (key value) on options by #'cddr
                   when (eq key output)
                     return (eq value t))
          collect output))

(defun spawn-in-group (spawn program arguments stdin &rest more)
  "Start PROGRAM with SPAWN, SBCL's function, and record the program's process group. SBCL makes a process group
(src/runtime/run-program.c) unless STDIN is negative, which means that the program shares this process's standard input.
If the standard input is not a terminal, pass it as descriptor 0 instead: the program reads the same input, but gets a
process group of its own.
ARGUMENTS, STDIN and MORE are SPAWN's further arguments."
  (let* ((kills (and *evaluation* (evaluation-program-kills *evaluation*)))
         (process-id (apply (the function spawn) program arguments
                            (if (and (minusp stdin) (zerop (sb-unix:unix-isatty 0))) 0 stdin)
                            more)))
    (when (plusp process-id)
      (record-process-group process-id)
      ;; If the evaluation's programs were killed meanwhile, END-PROGRAMS may have missed this program.
      (unless (eql kills (and *evaluation* (evaluation-program-kills *evaluation*)))
        (kill-group process-id)))
    process-id))

(defun notify-shared-output (options)
  "Notify the user, once per evaluation, that the output of a program is not captured. OPTIONS are the keyword arguments of
RUN-PROGRAM. Do nothing if the program does not share this process's output."
  (let ((shared (and *evaluation* (shared-outputs options))))
    (when (and shared (not (shiftf (evaluation-output-warning-given *evaluation*) t)))
      (push-notice "Output of a program run with ~{~(~S~) t~^ and ~} is not captured: it goes to this process's own output, ~
                    in the server to stderr. To capture the output, pass *standard-output* instead of t (or of UIOP's ~
                    :interactive)."
                   shared))))
