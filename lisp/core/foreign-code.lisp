;;;; Interruptions that spare foreign code.

(in-package "SBCL-HOST")

(defconstant +max-interruption-attempts+ 200
  "The number of times that OUTSIDE-FOREIGN-CODE tries to interrupt a thread outside foreign code.")

(defun in-interruptible-code-p ()
  "Return true unless this thread was interrupted in foreign code other than a system call. Such code may hold locks of its
own, such as malloc's, which a non-local exit would leave held, and for which a function called now could wait forever."
  (let ((context (interrupted-context)))
    (or (null context)
        (sb-di::code-header-from-pc (sb-vm:context-pc context))
        #+linux (in-system-call-context-p context)
        #-linux t)))

#+linux
(defun system-call (number &optional (first 0) (second 0) (third 0) (fourth 0))
  "Make the Linux system call NUMBER with these integer arguments. Return its result, or -1 if it failed."
  (alien-funcall (extern-alien "syscall" (function long long long long long long)) number first second third fourth))

#+linux
(defun start-interruption-timer ()
  "Start a timer that sends this thread the signal of INTERRUPT-THREAD in a millisecond. Return the timer's number, or NIL if
the kernel provides none. Make system calls, because the C library's functions for timers could allocate memory
(timer_create(2))."
  (let ((sigevent (make-array 8 :element-type '(unsigned-byte 64) :initial-element 0))
        (timer (make-array 1 :element-type '(unsigned-byte 64) :initial-element 0))
        (time (make-array 4 :element-type '(unsigned-byte 64) :initial-contents '(0 0 0 1000000))))
    (with-pinned-objects (sigevent timer time)
      (flet ((address (vector) (sap-int (vector-sap vector))))
        ;; sigev_signo and sigev_notify, which is SIGEV_THREAD_ID, and sigev_notify_thread_id
        (setf (aref sigevent 1) (logior sb-unix:sigurg (ash 4 32))
              (aref sigevent 2) (sb-thread::thread-os-tid sb-thread:*current-thread*))
        ;; 1 is CLOCK_MONOTONIC.
        (when (zerop (system-call +timer-create-call+ 1 (address sigevent) (address timer)))
          (let ((number (ldb (byte 32 0) (aref timer 0))))
            (system-call +timer-settime-call+ number 0 (address time) 0)
            number))))))

#+linux
(defun interrupt-this-thread-soon (function)
  "Make INTERRUPT-THREAD's signal handler call FUNCTION on this thread in a millisecond. Return the number of the timer for
END-INTERRUPTION-TIMER, or NIL if no timer could be started. Call this function in an interruption."
  (let ((timer (start-interruption-timer)))
    (when timer
      (sb-thread::with-tls-lock (sb-thread:*current-thread*)
        ;; INTERRUPT-ONCE reads the list without the lock.
        (publish (sb-thread::thread-interruptions sb-thread:*current-thread*)
                 (append (sb-thread::thread-interruptions sb-thread:*current-thread*) (list function)))))
    timer))

(defun end-interruption-timer (timer)
  "Delete TIMER, the number of a timer."
  #+linux (system-call +timer-delete-call+ timer)
  #-linux timer)

(defun outside-foreign-code (function)
  "Return a function of no arguments for one interruption of a thread. The function calls FUNCTION. While the thread runs
foreign code other than a system call, the thread interrupts itself again after a millisecond; after
+MAX-INTERRUPTION-ATTEMPTS+ attempts, FUNCTION interrupts that code, too."
  (declare (type function function))
  (let ((attempts 0)
        (timer nil))
    (declare (type fixnum attempts))
    (labels ((interrupt ()
               (when timer
                 (end-interruption-timer (shiftf timer nil)))
               (unless (and (not (in-interruptible-code-p))
                            (< (incf attempts) +max-interruption-attempts+)
                            #+linux (setf timer (interrupt-this-thread-soon #'interrupt)))
                 (funcall function))))
      #'interrupt)))

(defun interrupt-outside-foreign-code (thread function)
  "Interrupt THREAD with FUNCTION, a function of no arguments, as OUTSIDE-FOREIGN-CODE describes."
  (sb-thread:interrupt-thread thread (outside-foreign-code function)))
