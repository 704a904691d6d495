;;;; Starting threads. A thread that the user's code starts belongs to the evaluation that started it, and cannot end
;;;; the process.

(in-package "SBCL-HOST")

(defglobal **thread-variables** '()
  "The special variables that every thread binds when it starts: the special variables of the Lisp side, and SBCL's
*INTERRUPT-HANDLER*.")

(defun thread-variables ()
  "Return the value that **THREAD-VARIABLES** has in a core."
  (cons 'sb-thread::*interrupt-handler*
        (loop for package in (host-packages)
              append (loop for symbol being the present-symbols of package
                           when (and (eq package (symbol-package symbol))
                                     (eq :special (sb-int:info :variable :kind symbol))
                                     (boundp symbol))
                             collect symbol))))

(defun call-with-thread-variables (function)
  "Call FUNCTION, the whole work of this thread, with **THREAD-VARIABLES** bound to their global values. SBCL writes two
words, one after the other, when a binding begins or ends (BIND and UNBIND-N in src/compiler/x86-64/tls.lisp, and
UNWIND). Between the two writes for the outermost binding of a variable, an interruption would read SBCL's marker for no
value. Within FUNCTION all bindings are inner ones, so interruptions can read the variables at any time."
  (declare (type function function))
  (progv **thread-variables** (mapcar #'sb-ext:symbol-global-value **thread-variables**)
    (funcall function)))

(defun call-as-thread-of-job (job-id evaluation observer function arguments)
  "Call FUNCTION with ARGUMENTS in a thread that EVALUATION, of the job JOB-ID, started. OBSERVER is the signal observer
of the starting thread."
  (let ((*job-id* job-id)
        (*evaluation* evaluation)
        (*signal-observer* observer)
        (*output* (make-thread-output)))
    (unwind-protect (with-boundary ()
                      (apply (the function function) arguments))
      (flush-output))))

(defconstant +sig-unblock+ #+linux 1 #-linux 2
  "The value of SIG_UNBLOCK in the system's signal.h.")

(defun unblock-signals ()
  "Unblock SBCL's signals in this thread. SBCL starts its own threads with SIGALRM blocked, and the threads of timers
with all signals blocked that its SIGALRM handler blocks. Such threads could not be interrupted (see DEFERRABLE in
src/image/signals.rs)."
  (sb-unix::unblock-deferrable-signals)
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (declare (dynamic-extent set))
    (multiple-value-bind (octet bit) (floor (1- sb-unix:sigalrm) 8)
      (setf (ldb (byte 1 bit) (aref set octet)) 1))
    (with-pinned-objects (set)
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer system-area-pointer))
                     +sig-unblock+ (vector-sap set) (int-sap 0)))))

(defun thread-limit ()
  "Return the maximum number of user threads. With too many threads, SBCL runs out of heap or memory mappings and ends
the process."
  (min 1000 (floor (sb-ext:dynamic-space-size) (* 512 1024))))

(defun check-thread-limit ()
  "Signal an error when the user has reached the thread limit."
  (let ((count (length (user-threads))))
    (when (zerop count)
      (setf **kept-before-user-threads** (sb-kernel:dynamic-usage)))
    (when (>= count (thread-limit))
      (error "There are ~D threads already. Join or end some of them first~:[~;; reset-session ends them all~]."
             count **resets-available**))))

(defglobal **thread-start-hooks** '()
  "Functions to call before another thread starts, for work that requires a single thread.")

(defun start-thread-of-job (start thread function arguments)
  "Start THREAD, which calls FUNCTION with ARGUMENTS, by START, SBCL's START-THREAD. A thread that an evaluation starts
belongs to the evaluation and counts towards the thread limit. The output of a thread that a program's call starts is
the program's. A timer's thread belongs to no evaluation."
  (let* ((job-id *job-id*)
         (evaluation *evaluation*)
         (observer *signal-observer*)
         (function (sb-kernel:%coerce-callable-to-fun function))
         (adopted (and evaluation (not (sb-thread::thread-ephemeral-p thread)))))
    (dolist (function **thread-start-hooks**)
      (funcall (the function function)))
    (when adopted
      (check-thread-limit)
      ;; The new thread's output must come after the output so far.
      (flush-output))
    (prog1 (funcall (the function start) thread
                    (lambda (&rest arguments)
                      (guard-stack-end)
                      (unblock-signals)
                      (call-with-thread-variables
                       (lambda ()
                         (if adopted
                             (call-as-thread-of-job job-id evaluation observer function arguments)
                             ;; A thread can always print for the program, which outlives the thread. An evaluation's
                             ;; job may have ended.
                             (let ((*job-id* (if (eql job-id +program-job+) job-id 0)))
                               (with-boundary ()
                                 (apply function arguments)))))))
                    arguments)
      (when adopted
        (note-thread thread evaluation)))))

;;; Threads that have ended

(defglobal **unjoined-threads** '()
  "Threads that have ended for Lisp, but were still in C code when SBCL wanted to free their memory.")

(defconstant +exit-polls+ 40
  "The maximum number of times that JOIN-ENDED-THREAD checks, 50 microseconds apart, whether a thread that has ended for
Lisp has also ended for the operating system.")

(defun os-thread-alive-p (thread)
  "Return true while the operating system still runs THREAD, which has ended for Lisp."
  #+linux
  (zerop (alien-funcall (extern-alien "tgkill" (function int int int int))
                        (sb-posix:getpid) (sb-thread::thread-os-tid thread) 0))
  #-linux
  (progn thread nil))

(defun join-ended-thread (join thread dispose)
  "Join THREAD, which has ended for Lisp, by JOIN, SBCL's PRIMITIVE-JOIN: free its memory if DISPOSE is true, else
return the memory. SBCL waits for the thread's last steps in C, and no thread can be started meanwhile. Thread-local
destructors of a program can make these steps endless, so a thread that takes too long is joined later."
  (declare (type function join))
  (let ((unjoined **unjoined-threads**))
    (loop until (eq unjoined (setf unjoined (sb-ext:cas (symbol-value '**unjoined-threads**) unjoined '()))))
    (dolist (other unjoined)
      (if (os-thread-alive-p other)
          (sb-ext:atomic-push other (symbol-value '**unjoined-threads**))
          (funcall join other t))))
  (loop repeat +exit-polls+
        while (os-thread-alive-p thread)
        do (sb-unix:nanosleep 0 50000))
  (cond ((os-thread-alive-p thread)
         (sb-ext:atomic-push thread (symbol-value '**unjoined-threads**))
         nil)
        (t (funcall join thread dispose))))

(define-condition exit-refused (error)
  ((embedded :initarg :embedded :reader embedded-p))
  (:report (lambda (condition stream)
             (write-string "EXIT was called: " stream)
             (write-string (cond ((embedded-p condition) "the program that this image is part of goes on.")
                                 (**resets-available**
                                  "the server goes on, and so does the session. Use the tool reset-session for a fresh one.")
                                 (t "the server goes on, and so does the session."))
                           stream)))
  (:documentation "User code tried to end the process, which belongs to a server or to a program that embeds the image."))
