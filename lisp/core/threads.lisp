;;;; Starting threads. Those that the user's code starts work for the evaluation that started them, and cannot end the
;;;; process.

(in-package "SBCL-HOST")

(defglobal **thread-variables** '()
  "This system's special variables, and SBCL's *INTERRUPT-HANDLER*: every thread binds them as it begins.")

(defun thread-variables ()
  "Return what **THREAD-VARIABLES** is in a core."
  (cons 'sb-thread::*interrupt-handler*
        (loop for package in (host-packages)
              append (loop for symbol being the present-symbols of package
                           when (and (eq package (symbol-package symbol))
                                     (eq :special (sb-int:info :variable :kind symbol))
                                     (boundp symbol))
                             collect symbol))))

(defun call-with-thread-variables (function)
  "Call FUNCTION, which is all that this thread does, with **THREAD-VARIABLES** bound to their global values. An
interruption that comes while the outermost binding of a variable begins or ends reads no object there, but SBCL's
marker: BIND and UNBIND-N (src/compiler/x86-64/tls.lisp) and UNWIND set two words, one after the other. It may read the
variables that have another binding around that."
  (declare (type function function))
  (progv **thread-variables** (mapcar #'sb-ext:symbol-global-value **thread-variables**)
    (funcall function)))

(defun call-as-thread-of-job (job-id evaluation observer function arguments)
  "Call FUNCTION with ARGUMENTS in a thread that EVALUATION, of JOB-ID, started where OBSERVER sees the errors."
  (let ((*job-id* job-id)
        (*evaluation* evaluation)
        (*signal-observer* observer)
        (*output* (make-output)))
    (unwind-protect (with-boundary ()
                      (apply (the function function) arguments))
      (flush-output))))

(defconstant +unblock+ #+linux 1 #-linux 2
  "SIG_UNBLOCK of the system's signal.h.")

(defun unblock-signals ()
  "Unblock SBCL's signals in this thread. SBCL starts its own threads with SIGALRM blocked, and those of timers with all
that its handler for that blocks: none of them could be interrupted (PUT_OFF in src/image/signals.rs)."
  (sb-unix::unblock-deferrable-signals)
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (declare (dynamic-extent set))
    (multiple-value-bind (octet bit) (floor (1- sb-unix:sigalrm) 8)
      (setf (ldb (byte 1 bit) (aref set octet)) 1))
    (with-pinned-objects (set)
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer system-area-pointer))
                     +unblock+ (vector-sap set) (int-sap 0)))))

(defun thread-limit ()
  "Return how many threads the user may have: SBCL dies of too many, for want of heap or of memory mappings."
  (min 1000 (floor (sb-ext:dynamic-space-size) (* 512 1024))))

(defun check-thread-limit ()
  "Signal an error when the user has as many threads as there may be."
  (let ((count (length (user-threads))))
    (when (zerop count)
      (setf **kept-before** (sb-kernel:dynamic-usage)))
    (when (>= count (thread-limit))
      (error "There are ~D threads already. Join or end some of them first~:[~;; reset-session ends them all~]."
             count **resets**))))

(defglobal **before-threads** '()
  "Functions that are called before another thread is started: of what only one may do.")

(defun start-thread-of-job (start thread function arguments)
  "What SBCL's START-THREAD, START, does. Threads that evaluations start work for the evaluation that started them, and
must not be too many. Those that the program's calls start print where it does; those of timers are nobody's."
  (let* ((job-id *job-id*)
         (evaluation *evaluation*)
         (observer *signal-observer*)
         (function (sb-kernel:%coerce-callable-to-fun function))
         (adopted (and evaluation (not (sb-thread::thread-ephemeral-p thread)))))
    (dolist (function **before-threads**)
      (funcall (the function function)))
    (when adopted
      (check-thread-limit)
      ;; What it prints comes after what was printed so far.
      (flush-output))
    (prog1 (funcall (the function start) thread
                    (lambda (&rest arguments)
                      (guard-stack-end)
                      (unblock-signals)
                      (call-with-thread-variables
                       (lambda ()
                         (if adopted
                             (call-as-thread-of-job job-id evaluation observer function arguments)
                             ;; The program, unlike a session's evaluation, is there for as long as they are.
                             (let ((*job-id* (if (eql job-id +program-job+) job-id 0)))
                               (with-boundary ()
                                 (apply function arguments)))))))
                    arguments)
      (when adopted
        (note-thread thread evaluation)))))

;;; Threads that have ended

(defglobal **unjoined-threads** '()
  "Threads that have ended for Lisp, but were still in C code when SBCL wanted their memory.")

(defconstant +exit-looks+ 40
  "How often it is looked, 50 microseconds apart, whether a thread that has ended for Lisp has done so for the system.")

(defun in-system-p (thread)
  "True while the operating system runs THREAD, which has ended for Lisp."
  #+linux
  (zerop (alien-funcall (extern-alien "tgkill" (function int int int int))
                        (sb-posix:getpid) (sb-thread::thread-os-tid thread) 0))
  #-linux
  (progn thread nil))

(defun join-ended-thread (join thread dispose)
  "What SBCL's PRIMITIVE-JOIN, JOIN, does: make the memory of THREAD, which has ended for Lisp, free, or return it unless
DISPOSE is true. SBCL waits for its last steps in C. These may take for ever where a program keeps something by thread,
and while it waits nobody can start a thread: so then its memory is made free some time after that."
  (declare (type function join))
  (let ((unjoined **unjoined-threads**))
    (loop until (eq unjoined (setf unjoined (sb-ext:cas (symbol-value '**unjoined-threads**) unjoined '()))))
    (dolist (other unjoined)
      (if (in-system-p other)
          (sb-ext:atomic-push other (symbol-value '**unjoined-threads**))
          (funcall join other t))))
  (loop repeat +exit-looks+
        while (in-system-p thread)
        do (sb-unix:nanosleep 0 50000))
  (cond ((in-system-p thread)
         (sb-ext:atomic-push thread (symbol-value '**unjoined-threads**))
         nil)
        (t (funcall join thread dispose))))

(define-condition exit-refused (error)
  ((embedded :initarg :embedded :reader embedded-p))
  (:report (lambda (condition stream)
             (write-string "EXIT was called: " stream)
             (write-string (cond ((embedded-p condition) "the program that this image is part of goes on.")
                                 (**resets**
                                  "the server goes on, and so does the session. Use the tool reset-session for a fresh one.")
                                 (t "the server goes on, and so does the session."))
                           stream)))
  (:documentation "User's code tried to end the process, which is a server's, or that of a program which embeds the image."))
