;;;; Checkpoints: a forked child saves the running image as a core, while this process continues.

(in-package "SBCL-HOST")

(defvar *saving-image* nil
  "True in the process that saves the image. That process has a single thread and serves no host.")

(defglobal **saved-repl-state** '()
  "A list of the values of * ** *** + ++ +++ / // /// - and *SAVE-HOOKS*, which saving removes from the image and booting
restores.")

(defglobal **missing-shared-objects** '()
  "The names of the shared objects that could not be reopened when this image was booted.")

(defglobal **start-directories** '()
  "A list of the working directory (a native namestring or NIL) and *DEFAULT-PATHNAME-DEFAULTS* at the time when this
image started.")

(defglobal **saved-settings** '()
  "The process settings that the session had changed when this image was saved: a property list of :DIRECTORY and
:DEFAULTS, values as in **START-DIRECTORIES**, and :NURSERY, the number of bytes between two garbage collections.")

(defglobal **checkpoint-name** nil
  "The name of the checkpoint that was saved last, or that this image was booted from; or NIL.")

(defglobal **save-functions** '()
  "The names of functions to call before the image is saved. Packages that build on this package add their functions.")

;;; Functions of ffi/shim.c

(defglobal **c-functions** '()
  "The functions that DEFINE-C-FUNCTION has defined: lists of the symbol of the global variable that holds the
function's address, and the function's name in C.")

(defmacro define-c-function (name (c-name result &rest parameters) documentation)
  "Define NAME as a function that calls C-NAME of ffi/shim.c. RESULT is the alien type of the result, and each of
PARAMETERS is a list of a name and an alien type. NAME may be called only after FIND-C-FUNCTIONS has run."
  (let ((address (intern (format nil "**~A-ADDRESS**" name))))
    `(progn
       (declaim (type (unsigned-byte 64) ,address))
       (defglobal ,address 0
         ,(format nil "The address of ~A." c-name))
       (pushnew '(,address ,c-name) **c-functions** :test #'equal)
       (defun ,name ,(mapcar #'first parameters)
         ,documentation
         (alien-funcall (sap-alien (int-sap ,address) (function ,result ,@(mapcar #'second parameters)))
                        ,@(mapcar #'first parameters))))))

(defun find-c-functions ()
  "Look up the addresses of the functions that DEFINE-C-FUNCTION has defined. This must happen before a fork, because
the lock of the dynamic loader may be held in the child by a thread that does not exist there."
  (loop for (address name) in **c-functions**
        do (setf (symbol-value address)
                 (or (sb-sys:find-foreign-symbol-address name)
                     (error "The image cannot be saved: libsbcl has no function ~A. Use the files of this program's build."
                            name)))))

(defun definition-mutexes ()
  "Return the mutexes that threads hold while they define or update classes, intern symbols, or change packages. While one
of these mutexes is held, the data that it protects may be inconsistent."
  (list sb-kernel::**world-lock** sb-impl::*package-graph-lock*))

(define-c-function fork-process ("sbcl_host_fork" (signed 32))
  "Fork. Return the child's process number, 0 in the child, or a negated error number.")

(define-c-function fork-stopped-process ("sbcl_host_fork_stopped" (signed 32) (wait-for-c (signed 32))
                                                                  (threads system-area-pointer)
                                                                  (count (unsigned 32)))
  "Fork while the world is stopped, if every other thread can be cut off at its current position. Otherwise return
+FORK-BLOCKED+ and store words at THREADS, an array of COUNT words: the threads that block the fork, a 0, the threads that
can be interrupted, and a 0. If WAIT-FOR-C is 1, a thread in C code that was called with interrupts enabled blocks the fork,
too.")

(define-c-function begin-pause ("sbcl_host_begin_pause" (unsigned 32))
  "Begin a pause, during which threads wait for a fork, and return the number of the pause.")

(define-c-function end-pause ("sbcl_host_end_pause" void)
  "End the current pause.")

(define-c-function join-pause ("sbcl_host_pause" (signed 32) (pause (unsigned 32)))
  "Wait for the end of pause number PAUSE and return 1. Return 0 at once if this thread was interrupted in C code or in
WITHOUT-GCING.")

(define-c-function take-c-locks ("sbcl_host_take_c_locks" void)
  "Take and release the locks of C code that saving needs. Never return if one of the locks is held by a thread that
does not exist in this process. A process that saves needs no other locks.")

(define-c-function close-descriptors ("sbcl_host_close_from" void (first (unsigned 32)))
  "Close all descriptors from FIRST on: the client's connection and everything else that belongs to the parent.")

;;; Forking

(defconstant +fork-blocked+ (- #x10000)
  "The result of FORK-STOPPED-PROCESS when a thread must not be cut off at its current position. Equal to
SBCL_HOST_FORK_BLOCKED of ffi/shim.c.")

(defun fork-image (mutexes &optional wait-for-c)
  "Stop all other threads and fork. The fork is blocked if one of MUTEXES is held or if a thread must not be cut off at
its current position. With WAIT-FOR-C, threads in C code that was called with interrupts enabled must not be cut off
either. Return the child's process number; 0 in the child, which has only this thread; or a negated error number. When
the fork is blocked, return NIL, the mutex or a thread that blocks it and, for a thread, a list of the threads that can
be interrupted. Interrupts must be off."
  (let ((words (make-array 1024 :element-type '(unsigned-byte 64) :initial-element 0))
        (process nil)
        (obstacle nil)
        (threads '()))
    (loop
      ;; Stop the world as SUB-GC does (src/code/gc.lisp). Objects do not move meanwhile, so the words that the call
      ;; stores stay valid.
      (without-gcing
        (when (eql 1 (alien-funcall (extern-alien "try_acquire_gc_lock" (function int))))
          (alien-funcall (extern-alien "gc_stop_the_world" (function void)))
          (unwind-protect
               (unless (setf obstacle (find-if (lambda (mutex) (/= 0 (mutex-state mutex))) mutexes))
                 (setf process (fork-stopped-process (if wait-for-c 1 0) (vector-sap words) (length words))))
            (alien-funcall (extern-alien "release_gc_lock" (function void)))
            (alien-funcall (extern-alien "gc_start_the_world" (function void))))
          (when (eql process +fork-blocked+)
            (setf process nil
                  obstacle (sb-kernel:%make-lisp-obj (aref words 0))
                  threads (loop for index from (1+ (position 0 words))
                                for word = (aref words index)
                                until (zerop word)
                                collect (sb-kernel:%make-lisp-obj word))))))
      (when (or process obstacle)
        (return (values process obstacle threads))))))

(defconstant +pause-milliseconds+ 2000
  "The maximum duration of a pause, which must be smaller than SBCL_HOST_PAUSE_MILLISECONDS of ffi/shim.c.")

(defun fork-paused-image (mutexes wait-for-c threads)
  "Fork as FORK-IMAGE does, and return its first two values. Meanwhile THREADS pause, each at a point where an
interruption finds it in Lisp code that may be interrupted. With WAIT-FOR-C, wait during twelve attempts for a thread
that stays in C code; then cut the thread off there. Stop early, with the obstacle :INTERRUPTION, when an interruption of
this thread is pending: it must not run while THREADS pause, because they may hold a lock that it needs."
  (let ((end (+ (monotonic-milliseconds) +pause-milliseconds+))
        (pause (begin-pause))
        (requests '()))
    (flet ((request-pause (thread)
             (let ((entry (or (assoc thread requests :test #'eq)
                              (first (push (cons thread nil) requests)))))
               ;; Interrupt the thread again if the last interruption found it in C code.
               (unless (cdr entry)
                 (setf (cdr entry) t)
                 (handler-case (sb-thread:interrupt-thread thread
                                                           (lambda ()
                                                             (setf (cdr entry) (and (pausable-p)
                                                                                    (eql 1 (join-pause pause))))))
                   ;; The thread has ended.
                   (sb-thread:interrupt-thread-error ()))))))
      (unwind-protect
           (loop for attempt from 1
                 ;; Stopping the world takes long when there are many threads, so request the pauses several times before
                 ;; each attempt.
                 do (loop repeat 8
                          do (mapc #'request-pause threads)
                             (sb-unix:nanosleep 0 300000))
                    (multiple-value-bind (process obstacle others) (fork-image mutexes (and wait-for-c (<= attempt 12)))
                      (when (or process (null others) (> (monotonic-milliseconds) end))
                        (return (values process obstacle)))
                      (when *interrupt-pending*
                        (return (values nil :interruption)))
                      (setf threads others)))
        (end-pause)))))

(defun process-sleeping-p (process)
  "Return true when the kernel reports the child PROCESS as sleeping, and false otherwise or when the state cannot be read."
  (handler-case
      (with-open-file (file (sb-ext:parse-native-namestring (format nil "/proc/~D/stat" process)))
        ;; The program's name, in parentheses, precedes the state and may itself contain parentheses.
        (let ((line (read-line file)))
          (eql #\S (char line (+ 2 (position #\) line :from-end t))))))
    (error ())))

(defun child-obstacle (descriptor process)
  "Return NIL once an octet can be read from DESCRIPTOR, to which the child PROCESS writes. Return :C-LOCK when PROCESS
sleeps at two checks in succession, because it then waits for a lock whose holder does not exist in it; or when it has
written nothing for five seconds. Return :INTERRUPTION when an interruption of this thread is pending meanwhile."
  (loop repeat 250
        for slept = nil then sleeps
        for ready = (sb-unix:unix-simple-poll descriptor :input 20)
        for sleeps = (and (not ready) (process-sleeping-p process))
        when ready
          return (let ((octet (make-array 1 :element-type '(unsigned-byte 8))))
                   (if (with-pinned-objects (octet)
                         (eql 1 (sb-unix:unix-read descriptor (vector-sap octet) 1)))
                       nil
                       :c-lock))
        when (and slept sleeps)
          return :c-lock
        when *interrupt-pending*
          return :interruption
        finally (return :c-lock)))

(defun kill-child (process)
  "Kill the child PROCESS and wait for it."
  (alien-funcall (extern-alien "kill" (function int int int)) process 9)
  (alien-funcall (extern-alien "waitpid" (function int int system-area-pointer int)) process (int-sap 0) 0))

(defun start-finalizers ()
  "Start SBCL's finalizer thread, unless another thread, for example in SB-POSIX:FORK, has started it."
  (handler-case (sb-impl::finalizer-thread-start)
    (sb-int:bug (problem)
      (unless sb-impl::*finalizer-thread*
        (error problem)))))

(defun stop-finalizers (seconds wait)
  "Stop SBCL's finalizer thread. Call WAIT until the finalizer or after-GC hook that runs now returns. If SECONDS pass, or if
WAIT exits non-locally, the thread continues; after SECONDS, signal an error. Interrupts must be off."
  (declare (type function wait))
  (let* ((end (+ (monotonic-milliseconds) (* 1000 seconds)))
         (thread (loop for thread = sb-impl::*finalizer-thread*
                       ;; Another thread, for example in SB-POSIX:FORK, may be starting the finalizer thread.
                       while (and (eq thread :start) (< (monotonic-milliseconds) end))
                       do (funcall wait)
                       finally (return (and (sb-thread::thread-p thread) thread))))
         (stopped nil))
    (flet ((alive-p ()
             ;; A thread that has ended by itself is no longer in SBCL's variable.
             (and thread (sb-thread:thread-alive-p thread)))
           (join ()
             ;; SBCL's function would fail if a finalizer had aborted the thread.
             (when thread
               (sb-thread:join-thread thread :default nil))
             (setf sb-impl::*finalizer-thread* nil)
             (let ((signals (shiftf sb-unix::*sighandler-thread* nil)))
               (when signals
                 (sb-unix:pthread-kill (sb-thread::thread-os-thread signals) sb-unix:sigterm)
                 (sb-thread:join-thread signals)))
             (sb-thread::%dispose-thread-structs)))
      (alien-funcall (extern-alien "finalizer_thread_stop" (function void)))
      (unwind-protect
           (progn
             (loop while (alive-p)
                   do (when (> (monotonic-milliseconds) end)
                        (error "The process cannot be copied: a finalizer or an after-GC hook did not return within ~D ~
                                seconds. A save is possible once the finalizer or hook has returned."
                               seconds))
                      (funcall wait))
             (join)
             (setf stopped t))
        (unless stopped
          (setf (extern-alien "finalizer_thread_runflag" int) 1)
          ;; The thread may have ended before it could see the flag.
          (unless (alive-p)
            (join)
            (start-finalizers)))))))

(defun fork-when-unblocked (mutexes seconds wait)
  "Call TRY-FORK until it succeeds or fails with an error, but not after SECONDS have passed. Call WAIT between
attempts; a pending interruption ends an attempt early, so that WAIT can let the interruption run. Return the child's
process number, 0 in the child, a negated error number, or NIL if each attempt was blocked; the milliseconds for which
the last attempt stopped the other threads; and, after NIL, the obstacle. The obstacle is a mutex; a thread; :C-LOCK if
the child waits for a lock of the C library whose holder does not exist in the child; or :INTERRUPTION if a pending
interruption of this thread ended the last attempt. Interrupts must be off."
  (declare (type function wait))
  (find-c-functions)
  (loop with end = (+ (monotonic-milliseconds) (* 1000 seconds))
        for wait-for-c = nil then (or wait-for-c (eq obstacle :c-lock))
        for (process stopped obstacle) = (multiple-value-list (try-fork mutexes wait-for-c))
        when (or process (> (monotonic-milliseconds) end))
          return (values process stopped obstacle)
        do (funcall wait)))

(defun try-fork (mutexes wait-for-c)
  "Make one attempt to fork for FORK-WHEN-UNBLOCKED, and return the three values that FORK-WHEN-UNBLOCKED returns. MUTEXES
and WAIT-FOR-C are as for FORK-IMAGE."
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (unless in
      (return-from try-fork (values (- out) 0)))
    (let ((begin (monotonic-milliseconds)))
      (multiple-value-bind (process obstacle threads) (fork-image mutexes wait-for-c)
        (when threads
          (setf (values process obstacle) (fork-paused-image mutexes wait-for-c threads)))
        (when (eql 0 process)
          (take-c-locks)
          (let ((octet (make-array 1 :element-type '(unsigned-byte 8) :initial-element 0)))
            (with-pinned-objects (octet)
              (sb-unix:unix-write out octet 0 1)))
          (return-from try-fork (values 0 0)))
        (let ((stopped (- (monotonic-milliseconds) begin)))
          (sb-unix:unix-close out)
          (when (and process (plusp process) (setf obstacle (child-obstacle in process)))
            (kill-child process)
            (setf process nil))
          (sb-unix:unix-close in)
          (values process stopped obstacle))))))

(defun check-fork-result (process obstacle seconds)
  "If the fork failed, signal an error that says why. PROCESS and OBSTACLE are the first and third value that
FORK-WHEN-UNBLOCKED returned after SECONDS."
  (flet ((title (thread)
           (if thread (thread-title thread) "a thread")))
    (cond ((and process (minusp process))
           (error "The process cannot be copied: ~A." (sb-int:strerror (- process))))
          (process)
          ((typep obstacle 'sb-thread:mutex)
           (error "The process cannot be copied: every attempt in ~D seconds was blocked, the last by ~A, which was ~
                   ~:[defining or updating a class~;interning symbols or changing packages~]. A save is possible once ~
                   this work has ended."
                  seconds (title (sb-thread:mutex-owner obstacle)) (eq obstacle sb-impl::*package-graph-lock*)))
          ((eq obstacle :c-lock)
           (error "The process cannot be copied: every attempt in ~D seconds was blocked, the last by a thread in C code ~
                   that held a lock of malloc, stdio or the loader. A save is possible once no thread holds such a lock."
                  seconds))
          ((eq obstacle :interruption)
           (error "The process cannot be copied: every attempt in ~D seconds was blocked, the last by an interruption of ~
                   the thread that saves, for example by a timer. A save is possible once such interruptions are less ~
                   frequent."
                  seconds))
          (t
           (error "The process cannot be copied: every attempt in ~D seconds was blocked, the last by ~A in code that ~
                   must not be interrupted (WITHOUT-INTERRUPTS). A save is possible once this code has ended."
                  seconds (title obstacle))))))

(defun mark-missing-threads-dead ()
  "Mark the threads that do not exist in this process as dead, and free all mutexes, because a missing thread would
never release a mutex that it holds."
  (dolist (thread (sb-thread::avltree-filter #'sb-thread::avlnode-data sb-thread::*all-threads*))
    (unless (eq thread sb-thread:*current-thread*)
      (setf (sb-thread::thread-%visible thread) -1
            (sb-thread::thread-primitive-thread thread) 0
            (sb-thread::thread-semaphore thread) nil)))
  (setf sb-thread::*all-threads* (sb-thread::avl-insert nil (sb-thread::thread-primitive-thread
                                                             sb-thread:*current-thread*)
                                                        sb-thread:*current-thread*)
        sb-thread::*joinable-threads* '()
        sb-impl::*finalizer-thread* nil
        **unjoined-threads** '()
        sb-thread::*starting-threads* '())
  (let ((allocator sb-vm::*allocator-mutex*)
        (held '()))
    ;; MAP-ALLOCATED-OBJECTS takes this mutex. A thread may have been cut off in C code that it had called during its own
    ;; call of MAP-ALLOCATED-OBJECTS.
    (free-mutex allocator)
    (sb-vm:map-allocated-objects
     (lambda (object type size)
       (declare (ignore size))
       (when (and (eql type sb-vm:instance-widetag)
                  (typep object 'sb-thread:mutex)
                  (/= 0 (mutex-state object)))
         (push object held)))
     :all)
    (dolist (mutex held)
      (free-mutex mutex))))

(defglobal **saving-seconds** 300
  "The maximum number of seconds that saving an image may take.")

(defun set-save-alarm ()
  "Make the kernel end this process after **SAVING-SECONDS**. This process may hang in C code that waits for a thread that
was not forked, and no other process may be left to end it."
  (let ((signals (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    ;; 14 is SIGALRM. The action of the signal becomes SIG_DFL (0), and SIG_UNBLOCK (1) unblocks the signal.
    (setf (aref signals 1) #x20)
    (alien-funcall (extern-alien "signal" (function unsigned-long int unsigned-long)) 14 0)
    (with-pinned-objects (signals)
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer unsigned-long))
                     1 (vector-sap signals) 0))
    (alien-funcall (extern-alien "alarm" (function unsigned-int unsigned-int)) **saving-seconds**)))

;;; Settings of the process

(defun current-directories ()
  "Return a list of the working directory (a native namestring or NIL) and *DEFAULT-PATHNAME-DEFAULTS*."
  (list (guarded (sb-posix:getcwd) (failure) nil) *default-pathname-defaults*))

(defun changed-settings ()
  "Return the settings that the session has changed, in the form of **SAVED-SETTINGS**. A directory that the session did
not change is not saved, because the next image may run in another directory and must keep the directory of its own
process."
  (loop for (key now before) in (append (mapcar #'list '(:directory :defaults) (current-directories) **start-directories**)
                                        (list (list :nursery (nursery-set-by-user) nil)))
        unless (equal now before)
          collect key and collect now))

(defun restore-settings ()
  "Restore the settings that the session had changed when this image was saved. Notify the user of a working directory
that cannot be restored."
  (destructuring-bind (&key directory defaults nursery) (shiftf **saved-settings** '())
    (when directory
      (handler-case (sb-posix:chdir directory)
        (sb-posix:syscall-error (failure)
          (event 0 (event-code :notice) 0
                 (with-server-syntax ()
                   (format nil "The working directory ~A could not be restored (~A)~@[: the working directory is now ~A~]."
                           directory (sb-int:strerror (sb-posix:syscall-errno failure))
                           (first **start-directories**)))))))
    (when defaults
      (setf *default-pathname-defaults* defaults))
    (when nursery
      (setf (sb-ext:bytes-consed-between-gcs) nursery))))

(defun save-image (path)
  "Save this image to the file PATH, a native namestring, and end the process, with status 0. If saving fails, report
the reason on the process's standard error and end with status 9. Only a forked child may call this."
  (setf *saving-image* t
        **event-function-address** 0
        **next-job-function-address** 0)
  (mapc #'funcall **save-functions**)
  (close-descriptors 3)
  (set-save-alarm)
  ;; The core contains everything in memory, so only its owner may read it.
  (alien-funcall (extern-alien "umask" (function unsigned-int unsigned-int)) #o077)
  (let ((failure "a non-local exit ended the save, for instance (abort) in a save hook"))
    (unwind-protect
         (handler-case
             (progn
               (mark-missing-threads-dead)
               (mapc #'sb-ext:unschedule-timer (sb-ext:list-all-timers))
               ;; SBCL's timers and alarm(2) share a timer of the kernel, which unscheduling has stopped.
               (set-save-alarm)
               ;; A failing user hook must not prevent saving.
               (dolist (hook sb-ext:*save-hooks*)
                 (guarded (funcall hook) (failure) nil))
               (setf **saved-repl-state** (list * ** *** + ++ +++ / // /// - sb-ext:*save-hooks*)
                     sb-ext:*save-hooks* '()
                     ;; An image without a checkpoint name is saved for a program rather than a session, and the program sets
                     ;; its own directories.
                     **saved-settings** (and **checkpoint-name** (changed-settings)))
               (sb-ext:save-lisp-and-die (sb-ext:parse-native-namestring path)
                                         :callable-exports *exported-functions*))
           (serious-condition (condition)
             (setf failure (guarded (princ-to-string condition) (failure) "an error occurred that could not be printed"))))
      (let ((octets (sb-ext:string-to-octets (format nil "The image was not saved: ~A.~%"
                                                       (string-right-trim "." failure)))))
        (with-pinned-objects (octets)
          (sb-unix:unix-write 2 octets 0 (length octets))))
      (alien-funcall (extern-alien "_exit" (function void int)) 9))))

(defun exec-finisher (arguments lock errors)
  "Replace this process by the program in ARGUMENTS, the address of a C array of strings. The descriptor LOCK becomes
number 3, and ERRORS becomes standard output and standard error. Return only in a new child of this process. The kernel
kills the child when this process ends."
  (flet ((put (descriptor number)
           (alien-funcall (extern-alien "dup2" (function int int int)) descriptor number)))
    (put errors 1)
    (put errors 2)
    (alien-funcall (extern-alien "setsid" (function int)))
    (let ((parent (alien-funcall (extern-alien "getpid" (function int)))))
      ;; If the fork fails, the program that replaces this process finds no child and reports the failure.
      (unless (eql 0 (fork-process))
        (put lock 3)
        (close-descriptors 4)
        (alien-funcall (extern-alien "execv" (function int unsigned-long unsigned-long))
                       (sap-ref-word (int-sap arguments) 0)
                       arguments)
        (alien-funcall (extern-alien "_exit" (function void int)) 9))
      (end-with-parent parent))))

(defun end-with-parent (parent)
  "Have the kernel kill this process when its parent, the process PARENT, ends. End this process if PARENT has ended."
  ;; 1 is PR_SET_PDEATHSIG, 9 is SIGKILL. The call has no effect if the parent has already ended.
  (alien-funcall (extern-alien "prctl" (function int int unsigned-long)) 1 9)
  (unless (eql parent (alien-funcall (extern-alien "getppid" (function int))))
    (alien-funcall (extern-alien "_exit" (function void int)) 9)))

(defglobal **session-fork-wait-seconds** 10
  "The maximum number of seconds to wait until nothing blocks a fork of the session's image. The session evaluates
nothing meanwhile.")

(defconstant +shutdown-fork-wait-seconds+ 5
  "The maximum number of seconds to wait until nothing blocks a fork of the session's image when the server shuts down.
FORK_WAIT of src/recovery/checkpoint/save.rs, after which the server stops waiting for the fork, depends on this
number.")

(define-query :save-image (&key path name finisher lock errors)
  "Make a child process save the image to the file PATH, which must not exist. The child ends with status 0 once the
file is complete. If the fork succeeds, the image counts as the checkpoint NAME. Push a record `saving` with the child's
`process`, the microseconds for which this process was `stopped`, and the number of `timers` that the core will lack;
and, for each thread that the core will lack, a record `thread` with its `name`. The evaluating thread runs this query
while it evaluates nothing. With FINISHER, the child outlives this process: it becomes the program in FINISHER
(EXEC-FINISHER explains FINISHER, LOCK and ERRORS), and a child of that program saves the image. Undoing the query kills
the child."
  (let* ((threads (user-threads))
         (timers (length (sb-ext:list-all-timers)))
         (before **checkpoint-name**)
         (process nil)
         (stopped 0)
         (obstacle nil)
         (seconds (if finisher +shutdown-fork-wait-seconds+ **session-fork-wait-seconds**)))
    (setf *undo-query* (lambda ()
                         (setf **checkpoint-name** before)
                         (when (typep process '(integer 1))
                           (kill-child process)))
          **checkpoint-name** name)
    ;; Stop the finalizer thread before the fork, which would otherwise cut it off at an arbitrary point.
    (without-interrupts
      (flet ((wait () (sb-sys:with-local-interrupts (sleep 0.001))))
        (stop-finalizers seconds #'wait)
        (unwind-protect
             (progn
               (setf (values process stopped obstacle)
                     (fork-when-unblocked (definition-mutexes) seconds #'wait))
               (when (eql 0 process)
                 (when finisher
                   (exec-finisher finisher lock errors))
                 (save-image path)))
          (start-finalizers))))
    (check-fork-result process obstacle seconds)
    (push-record "saving" :process process
                          :stopped (values (round (* 1000 stopped)))
                          ;; Timers may run or be scheduled between the first count and the fork, and after it.
                          :timers (let ((timers (max timers (length (sb-ext:list-all-timers)))))
                                    (and (plusp timers) timers)))
    (dolist (thread threads)
      (push-record "thread" :name (thread-title thread)))))

;;; Saving the image for a program that embeds it

(defglobal **saving-lock** (sb-thread:make-mutex :name "saving")
  "The lock that is held while the process is forked for saving, so that only one fork runs at a time.")

(defconstant +program-fork-wait-seconds+ 30
  "The maximum number of seconds to wait until nothing blocks a fork of the program's image.")

(defun reset-signals ()
  "In a forked child, which must not run the program's signal handlers, reset signals to their default actions and unblock
all signals. Keep the actions of the signals that SBCL needs: SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGUSR2
and SIGURG."
  (loop for number from 1 to 64
        unless (member number '(4 5 6 7 8 11 12 23))
          ;; 0 is SIG_DFL. The call fails for some signals, such as SIGKILL, whose action cannot be set.
          do (alien-funcall (extern-alien "signal" (function unsigned-long int unsigned-long)) number 0))
  (let ((none (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (with-pinned-objects (none)
      ;; 2 is SIG_SETMASK.
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer unsigned-long))
                     2 (vector-sap none) 0))))

(defun save-for-parent (path parent)
  "In a child of the process PARENT, save the image to PATH and end; end without saving if PARENT ends."
  (end-with-parent parent)
  (setf **checkpoint-name** nil)
  (save-image path))

(defun save-and-report (path report)
  "In a forked child, fork a second process, which saves the image to PATH; wait for this saving process, and end. The
descriptor REPORT receives the output of the saving process, followed by four zero octets and by its wait status
(waitpid(2)) in four octets. The program cannot rely on waitpid(2) itself, because it may wait for all its children
elsewhere. Killing the child, which SIGALRM does after **SAVING-SECONDS**, kills the saving process too."
  (unwind-protect
       (let ((end (make-array 2 :element-type '(signed-byte 32) :initial-contents '(0 -1))))
         (reset-signals)
         (dotimes (number 3)
           (alien-funcall (extern-alien "dup2" (function int int int)) report number))
         (close-descriptors 3)
         (alien-funcall (extern-alien "alarm" (function unsigned-int unsigned-int)) **saving-seconds**)
         (let* ((process (alien-funcall (extern-alien "getpid" (function int))))
                (saver (fork-process)))
           (when (eql 0 saver)
             (save-for-parent path process))
           (with-pinned-objects (end)
             (alien-funcall (extern-alien "waitpid" (function int int system-area-pointer int))
                            saver (sap+ (vector-sap end) 4) 0)
             (sb-unix:unix-write 2 end 0 8))))
    ;; Nothing depends on this status. If the saving process gets here, by a non-local exit out of SAVE-FOR-PARENT, it has
    ;; saved nothing.
    (alien-funcall (extern-alien "_exit" (function void int)) 9)))

(defun save-for-program (path report)
  "Make a child process save the image to the file PATH, a native namestring, and report to the descriptor REPORT as
SAVE-AND-REPORT does. Return the child's process number. If the caller is interrupted before the return, kill the child.
Any thread of the program may call this while other threads run; in the child, their work is cut off. Signal an error if
the fork fails, or if it is still blocked after +PROGRAM-FORK-WAIT-SECONDS+, for example because other threads intern
symbols or define classes. Also signal an error in SBCL's finalizer thread, which must be stopped for the fork."
  (when (eq sb-thread:*current-thread* sb-impl::*finalizer-thread*)
    (error "A finalizer or an after-GC hook cannot save the image: save it in another thread."))
  (let ((process nil)
        (obstacle nil)
        (returned nil))
    (unwind-protect
         (progn
           (sb-thread:with-mutex (**saving-lock**)
             (without-interrupts
               (flet ((wait () (sb-sys:with-local-interrupts (sleep 0.001))))
                 (stop-finalizers +program-fork-wait-seconds+ #'wait)
                 (unwind-protect
                      (progn
                        ;; The fork waits until these mutexes are free instead of taking them: a thread that interns symbols
                        ;; in a loop would take them again before this thread.
                        (multiple-value-bind (child stopped reason)
                            (fork-when-unblocked (definition-mutexes) +program-fork-wait-seconds+ #'wait)
                          (declare (ignore stopped))
                          (setf process child
                                obstacle reason))
                        (when (eql 0 process)
                          (save-and-report path report)))
                   (start-finalizers)))))
           (check-fork-result process obstacle +program-fork-wait-seconds+)
           (setf returned t)
           process)
      (when (and (not returned) (typep process '(integer 1)))
        (kill-child process)))))

(define-query :image-name (&key collect)
  "Push a record `image` with the `name` of the checkpoint that this image was booted from, if any, and the session's
`package`; then a record `definitions` with `count` and `kind` for each kind of definition of the session. With COLLECT,
collect all garbage first, because damage from threads that were cut off for saving might only appear in a collection."
  (when collect
    (sb-ext:gc :full t))
  (push-record "image" :name **checkpoint-name** :package (package-name (current-package)))
  (let ((counts '())
        (systems '()))
    (map-definitions (lambda (kind name system)
                       (declare (ignore name))
                       (if system
                           (pushnew system systems :test #'equal)
                           (incf (getf counts kind 0)))))
    (loop for (kind text) in '((:function "function") (:macro "macro") (:variable "variable") (:class "class")
                               (:type "type") (:setf-expander "setf expander") (:method-combination "method combination")
                               (:package "package"))
          for count = (getf counts kind)
          when count
            do (push-record "definitions" :count count :kind text))
    (when systems
      (push-record "definitions" :count (length systems) :kind "system"))))

(defun reopen-shared-object-or-skip (reopen object)
  "Call REOPEN to reopen OBJECT, a shared object that was open when the image was saved. If REOPEN fails, record OBJECT
and skip it, because otherwise the image could not be booted."
  (handler-bind ((error (lambda (failure)
                          (declare (ignore failure))
                          (push (sb-alien::shared-object-namestring object) **missing-shared-objects**)
                          (continue))))
    (funcall (the function reopen) object)))

(defun report-missing-shared-objects ()
  "Notify the user of the shared objects that could not be reopened when this image was booted."
  (dolist (name (reverse (shiftf **missing-shared-objects** '())))
    (event 0 (event-code :notice) 0
           (with-server-syntax ()
             (format nil "The shared object ~A could not be loaded again, so its functions cannot be called. ~
                          To try again: (sb-alien:load-shared-object ~:*~S)"
                     name)))))

(defun resume-from-checkpoint ()
  "Restore the state that saving removed from this image, which was booted from a checkpoint, and notify the user of
shared objects and directories that are missing."
  (destructuring-bind (a b c d e f g h i j hooks) **saved-repl-state**
    (setf * a ** b *** c + d ++ e +++ f / g // h /// i - j
          sb-ext:*save-hooks* hooks))
  ;; The clients of the saved connections no longer exist.
  (clrhash **connections**)
  (setf *saving-image* nil
        **saved-repl-state** '())
  (report-missing-shared-objects)
  (restore-settings))
