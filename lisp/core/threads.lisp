;;;; Starting and joining threads. A thread that an evaluation starts belongs to this evaluation. This file also defines
;;;; EXIT-REFUSED, the error for attempts of the user's code to end the process.

(in-package "SBCL-HOST")

(defglobal **thread-variables** '()
  "The variables that every thread binds when it starts: the special variables of the Lisp side, and SBCL's
*INTERRUPT-HANDLER*.")

(defun thread-variables ()
  "Return the value for **THREAD-VARIABLES** in the core to save."
  (cons 'sb-thread::*interrupt-handler*
        (loop for package in (host-packages)
              append (loop for symbol being the present-symbols of package
                           when (and (eq package (symbol-package symbol))
                                     (eq :special (sb-int:info :variable :kind symbol))
                                     (boundp symbol))
                             collect symbol))))

(defun call-with-thread-variables (function)
  "Call FUNCTION, which does all the work of this thread, with **THREAD-VARIABLES** bound to their global values, so that
interruptions can read these variables at any time. When a binding begins or ends, SBCL writes two words (in the VOPs BIND
and UNBIND-N, and in UNWIND). Between the two writes for a thread's outermost binding of a variable, an
interruption would read SBCL's marker for no value. Bindings that FUNCTION makes are never the outermost."
  (declare (type function function))
  (progv **thread-variables** (mapcar #'sb-ext:symbol-global-value **thread-variables**)
    (funcall function)))

(defun call-as-job-thread (job-id evaluation observer function arguments)
  "Call FUNCTION with ARGUMENTS as the work of a thread that an evaluation started. JOB-ID is the number of the evaluation's
job, EVALUATION is the EVALUATION structure, and OBSERVER is the value of *SIGNAL-OBSERVER* in the starting thread."
  (let ((*job-id* job-id)
        (*evaluation* evaluation)
        (*signal-observer* observer)
        (*thread-output* (make-thread-output)))
    (unwind-protect (with-user-code-boundary ()
                      (apply (the function function) arguments))
      (flush-output))))

(defconstant +sig-unblock+ #+linux 1 #-linux 2
  "The value of the constant SIG_UNBLOCK in the C header signal.h.")

(defun unblock-signals ()
  "Unblock SBCL's deferrable signals and SIGALRM in this thread. SBCL starts its own threads with SIGALRM blocked. SBCL
starts the threads of timers from its SIGALRM handler, so they inherit all signals that the handler blocks. A thread
with these signals blocked could not be interrupted (see DEFERRABLE_SIGNALS in src/image/signals.rs)."
  (sb-unix::unblock-deferrable-signals)
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (declare (dynamic-extent set))
    (multiple-value-bind (octet bit) (floor (1- sb-unix:sigalrm) 8)
      (setf (ldb (byte 1 bit) (aref set octet)) 1))
    (with-pinned-objects (set)
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer system-area-pointer))
                     +sig-unblock+ (vector-sap set) (int-sap 0)))))

(defun thread-limit ()
  "Return the maximum number of user threads: one for every 512 KiB of heap, at most 1000. With too many threads, SBCL runs
out of heap or memory mappings and ends the process."
  (min 1000 (floor (sb-ext:dynamic-space-size) (* 512 1024))))

(defun check-thread-limit ()
  "Signal an error when the number of user threads has reached the limit. If there are no user threads yet, record the bytes
in use in **KEPT-BYTES-BEFORE-USER-THREADS**."
  (let ((count (length (user-threads))))
    (when (zerop count)
      (setf **kept-bytes-before-user-threads** (heap-use)))
    (when (>= count (thread-limit))
      (error "Thread limit reached: ~D threads. Join or end some threads first~@[; ~A ends all threads~]."
             count (reset-command)))))

(defglobal **thread-start-hooks** '()
  "Functions without arguments to call before a thread starts. The functions end work that is only correct while no other
thread starts, such as a trace with breakpoints.")

(defconstant +sig-setmask+ #+linux 2 #-linux 3
  "The value of the constant SIG_SETMASK in the C header signal.h.")

(defconstant +start-lock-time+ 1/2
  "The maximum number of seconds for which START-HOST-THREAD waits for SBCL's lock for starting threads.")

(defun free-unstarted-thread (thread)
  "Free the memory of THREAD if START-THREAD has unwound before the operating system started THREAD."
  (let ((address (sb-thread::thread-primitive-thread thread)))
    (unless (zerop address)
      (setf (sb-thread::thread-primitive-thread thread) 0)
      (sb-thread::delete-from-all-threads address)
      (alien-funcall (extern-alien "free_thread_struct" (function void system-area-pointer)) (int-sap address)))))

(defun start-with-blocked-signals (start thread function arguments)
  "Start THREAD, which calls FUNCTION with ARGUMENTS and with SBCL's deferrable signals blocked. START is SBCL's
START-THREAD. Signal an error if another thread keeps SBCL's lock for starting threads."
  (declare (type function start))
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (declare (dynamic-extent set))
    (with-pinned-objects (set)
      ;; A new thread inherits the blocked signals.
      (alien-funcall (extern-alien "block_deferrable_signals" (function void system-area-pointer)) (vector-sap set))
      (unwind-protect
           (handler-case (with-deadline (:seconds +start-lock-time+ :override t)
                           (funcall start thread function arguments))
             (deadline-timeout ()
               (free-unstarted-thread thread)
               (error "Another thread holds a lock that is needed to start a thread.")))
        (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer system-area-pointer))
                       +sig-setmask+ (vector-sap set) (int-sap 0))))))

(defvar *starting-host-thread* nil
  "True while START-HOST-THREAD starts a thread.")

(defun start-job-thread (start thread function arguments)
  "Start THREAD, which calls FUNCTION with ARGUMENTS. START is SBCL's START-THREAD. A thread that an evaluation starts
belongs to the evaluation, unless it is ephemeral, as a timer's thread is. When a call of the embedding program starts a
thread, the thread's output is the program's output. The threads of evaluations and calls count towards the thread limit."
  (let* ((job-id *job-id*)
         (evaluation *evaluation*)
         (observer *signal-observer*)
         (function (sb-kernel:%coerce-callable-to-fun function))
         (host *starting-host-thread*)
         (ephemeral (sb-thread::thread-ephemeral-p thread))
         (adopted (and evaluation (not ephemeral))))
    (dolist (function **thread-start-hooks**)
      (funcall (the function function)))
    (when (or adopted (and (eql job-id +program-job+) (not ephemeral)))
      (check-thread-limit))
    (when adopted
      ;; The output that this thread has printed so far must come before the new thread's output.
      (flush-output))
    (labels ((work (arguments)
               (call-with-thread-variables
                (lambda ()
                  (if adopted
                      (call-as-job-thread job-id evaluation observer function arguments)
                      ;; Keep only the program's job number: the program outlives the thread, but the job of an
                      ;; evaluation may have ended.
                      (let ((*job-id* (if (eql job-id +program-job+) job-id 0)))
                        (with-user-code-boundary ()
                          (apply function arguments)))))))
             (begin (&rest arguments)
               (guard-stack-ends)
               (unblock-signals)
               (work arguments))
             (begin-host-thread (&rest arguments)
               (without-interrupts
                 (guard-stack-ends)
                 ;; Unblock all signals in one step: a signal that arrives now is deferred, and while SBCL has a deferred
                 ;; signal, the others must stay blocked.
                 (sb-unix::unblock-deferrable-signals)
                 (allow-with-interrupts (work arguments)))))
      (if host
          (start-with-blocked-signals start thread #'begin-host-thread arguments)
          (funcall (the function start) thread #'begin arguments)))
    (when adopted
      (note-started-thread thread evaluation))
    thread))

(defun interrupt-started-thread (original thread function)
  "Call ORIGINAL, SBCL's %INTERRUPT-THREAD, with THREAD and FUNCTION. Return NIL, as for a thread that has ended, if the
operating system has not started THREAD yet: SBCL would send the signal to an invalid thread, which ends the process."
  (declare (type function original))
  (and (plusp (sb-thread::thread-os-thread thread))
       (/= 0 (sb-thread::thread-%visible thread))
       (funcall original thread function)))

(defun start-host-thread (thread function arguments)
  "Start THREAD, a thread of the host, and return it. THREAD calls FUNCTION with ARGUMENTS and with interrupts off, so that
user code cannot end THREAD before FUNCTION turns interrupts on. Signal an error if another thread keeps SBCL's lock for
starting threads."
  (let ((*starting-host-thread* t)
        ;; With the job number of a call, START-JOB-THREAD would apply the limit of user threads to the new thread.
        (*job-id* 0))
    (without-interrupts
      (sb-thread::start-thread thread function arguments))))

;;; Threads that have ended

(defglobal **unjoined-threads** '()
  "Threads that have ended for Lisp, but were still in C code when SBCL wanted to join them and free their memory.")

(defconstant +max-exit-polls+ 40
  "The maximum number of times that JOIN-ENDED-THREAD checks, 50 microseconds apart, whether a thread that has ended for
Lisp has also ended for the operating system.")

(defun os-thread-alive-p (thread)
  "Return true while the operating system still runs THREAD, which has ended for Lisp. On systems other than Linux, return
NIL, so that SBCL waits for the thread."
  #+linux
  (zerop (alien-funcall (extern-alien "tgkill" (function int int int int))
                        (sb-posix:getpid) (sb-thread::thread-os-tid thread) 0))
  #-linux
  (progn thread nil))

(defun join-ended-thread (join thread dispose)
  "Join THREAD, whose Lisp code has finished, and the threads that earlier calls have left unjoined. JOIN is SBCL's
PRIMITIVE-JOIN: it frees the thread's memory if DISPOSE is true, and otherwise returns the memory, which another thread then
uses. JOIN waits for the thread to exit in C, and no thread can be started meanwhile. Thread-local destructors of a program
may keep the thread from ever exiting. So if THREAD takes too long, return NIL and leave the join to a later call of this
function. If SBCL would clear the stack in memory that is used again, always free the memory."
  (declare (type function join))
  (let ((unjoined **unjoined-threads**))
    (loop until (eq unjoined (setf unjoined (sb-ext:cas (symbol-value '**unjoined-threads**) unjoined '()))))
    (dolist (other unjoined)
      (if (os-thread-alive-p other)
          (sb-ext:atomic-push other (symbol-value '**unjoined-threads**))
          (funcall join other t))))
  (loop repeat +max-exit-polls+
        while (os-thread-alive-p thread)
        do (sb-unix:nanosleep 0 50000))
  (cond ((os-thread-alive-p thread)
         (sb-ext:atomic-push thread (symbol-value '**unjoined-threads**))
         nil)
        (t (funcall join thread (or dispose +recycled-stacks-cleared+)))))

(define-condition exit-refused (error)
  ((operator :initarg :operator :reader refused-operator)
   (embedded :initarg :embedded :reader embedded-p))
  (:report (lambda (condition stream)
             (format stream "~A was called, but " (symbol-name (refused-operator condition)))
             (case (if (embedded-p condition) :program (audience))
               (:program (write-string "the program that this image is part of continues." stream))
               ((:shell :attached-shell) (write-string "cannot end the process." stream))
               (t (format stream "the server and the session continue.~:[~; To leave the REPL, use :quit.~]~
                                  ~:[~; For a new session, use ~:[~;the tool ~]~A.~]"
                          (eq :repl (audience)) (reset-command) (eq :agent (audience)) (reset-command))))))
  (:documentation "The error that is signalled when user code tries to end the process of a server or embedding program."))
