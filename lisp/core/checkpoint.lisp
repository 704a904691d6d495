;;;; Checkpoints: the running image saved as a core by a forked child, while this process goes on.

(in-package "SBCL-HOST")

(defvar *saving* nil
  "True in the process that saves the image, which has one thread and serves no host.")

(defglobal **emptied** '()
  "What saving takes away of the image that is saved, and it gets back when it is booted: the values of * ** *** + ++ +++
/ // /// - and of *SAVE-HOOKS*.")

(defglobal **missing-objects** '()
  "The names of the shared objects that could not be opened again as this image was booted.")

(defglobal **start-directories** '()
  "The working directory, a native namestring or NIL, and *DEFAULT-PATHNAME-DEFAULTS* as they were when this image started.")

(defglobal **settings** '()
  "The settings of the process that the session had changed when this image was saved: a list of :DIRECTORY, :DEFAULTS and
:NURSERY and their values.")

(defglobal **checkpoint** nil
  "What the image that was saved last is called, which is the one that was booted if this one was; or NIL.")

(defglobal **save-functions** '()
  "The names of functions to call before the image is saved: packages above this one define them.")

;;; Functions of ffi/shim.c

(defglobal **c-functions** '()
  "The functions that DEFINE-C-FUNCTION has defined: lists of a global variable, which has its address, and its name in C.")

(defmacro define-c-function (name (c-name result &rest parameters) documentation)
  "Define NAME as the function C-NAME of ffi/shim.c, with RESULT and PARAMETERS, lists of a name and an alien type. To be
called once FIND-C-FUNCTIONS has been."
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
  "Find the functions that DEFINE-C-FUNCTION has defined. In a child process it would be too late: its loader's lock may be
held by a thread that it does not have."
  (loop for (address name) in **c-functions**
        do (setf (symbol-value address)
                 (or (sb-sys:find-foreign-symbol-address name)
                     (error "The function ~A is not in this program." name)))))

(defun definition-mutexes ()
  "Return the mutexes that threads hold which compile, intern, or define classes: what those change is not whole meanwhile."
  (list sb-kernel::**world-lock** sb-impl::*package-graph-lock*))

(define-c-function fork-process ("sbcl_host_fork" (signed 32))
  "Fork. Return the child's process number, 0 in the child, or a negative error number.")

(define-c-function fork-stopped-process ("sbcl_host_fork_stopped" (signed 32) (calm (signed 32))
                                                                  (threads system-area-pointer)
                                                                  (count (unsigned 32)))
  "Fork while the world is stopped, if each thread is where it may be cut off; else return +IN-THE-WAY+ and fill THREADS.")

(define-c-function begin-pause ("sbcl_host_begin_pause" (unsigned 32))
  "Begin a pause and return its number.")

(define-c-function end-pause ("sbcl_host_end_pause" void)
  "End the pause.")

(define-c-function join-pause ("sbcl_host_pause" (signed 32) (pause (unsigned 32)))
  "Wait for the end of PAUSE and return 1, or return 0 at once where C code was interrupted.")

(define-c-function take-c-locks ("sbcl_host_take_c_locks" void)
  "Take the locks of the C library that saving needs, and release them. Never return when a thread holds one that is not
there. Other locks than these are of no use to a process that saves.")

(define-c-function close-descriptors ("sbcl_host_close_from" void (first (unsigned 32)))
  "Close all files from number FIRST on: the client's connection and whatever else is the parent's.")

;;; Forking

(defconstant +in-the-way+ (- #x10000)
  "SBCL_HOST_IN_THE_WAY of ffi/shim.c: a thread is where it must not be cut off.")

(defun fork-image (mutexes &optional calm)
  "Stop all other threads and fork, unless one of MUTEXES is held or a thread is where it must not be cut off; with CALM, a
thread in C code that was called with interrupts enabled must not be cut off either. Return the child's process number, 0
in the child, which has this thread only, or a negative error number; else NIL, the mutex or a thread in the way, and, in
the latter case, a list of the threads that can be interrupted. Without interrupts."
  (let ((words (make-array 1024 :element-type '(unsigned-byte 64) :initial-element 0))
        (process nil)
        (obstacle nil)
        (threads '()))
    (loop
      ;; As SUB-GC does it (src/code/gc.lisp). Nothing moves meanwhile.
      (without-gcing
        (when (eql 1 (alien-funcall (extern-alien "try_acquire_gc_lock" (function int))))
          (alien-funcall (extern-alien "gc_stop_the_world" (function void)))
          (unwind-protect
               (unless (setf obstacle (find 0 mutexes :key #'sb-thread::mutex-state :test #'/=))
                 (setf process (fork-stopped-process (if calm 1 0) (vector-sap words) (length words))))
            (alien-funcall (extern-alien "release_gc_lock" (function void)))
            (alien-funcall (extern-alien "gc_start_the_world" (function void))))
          (when (eql process +in-the-way+)
            (setf process nil
                  obstacle (sb-kernel:%make-lisp-obj (aref words 0))
                  threads (loop for index from (1+ (position 0 words))
                                for word = (aref words index)
                                until (zerop word)
                                collect (sb-kernel:%make-lisp-obj word))))))
      (when (or process obstacle)
        (return (values process obstacle threads))))))

(defconstant +pause-milliseconds+ 2000
  "How long threads pause at most. SBCL_HOST_PAUSE_MILLISECONDS of ffi/shim.c is more.")

(defun fork-paused-image (mutexes calm threads)
  "Do as FORK-IMAGE does while THREADS pause, each from where an interruption finds it in Lisp code: that is never in code
that must not be interrupted. With CALM, one that stays in C code is waited for during twelve attempts; then it is cut off
there."
  (let ((end (+ (monotonic-milliseconds) +pause-milliseconds+))
        (pause (begin-pause))
        (asked '()))
    (flet ((ask (thread)
             (let ((entry (or (assoc thread asked :test #'eq)
                              (first (push (cons thread nil) asked)))))
               ;; Once more where C code was interrupted.
               (unless (cdr entry)
                 (setf (cdr entry) t)
                 (handler-case (sb-thread:interrupt-thread thread
                                                           (lambda ()
                                                             (setf (cdr entry) (eql 1 (join-pause pause)))))
                   ;; The thread has ended.
                   (sb-thread:interrupt-thread-error ()))))))
      (unwind-protect
           (loop for attempt from 1
                 ;; To stop the world takes long where there are many threads.
                 do (loop repeat 8
                          do (mapc #'ask threads)
                             (sb-unix:nanosleep 0 300000))
                    (multiple-value-bind (process obstacle others) (fork-image mutexes (and calm (<= attempt 12)))
                      (when (or process (null others) (> (monotonic-milliseconds) end))
                        (return (values process obstacle)))
                      (setf threads others)))
        (end-pause)))))

(defun sleeping-p (process)
  "True when the child PROCESS waits for something."
  (handler-case
      (with-open-file (file (sb-ext:parse-native-namestring (format nil "/proc/~D/stat" process)))
        ;; The name before the state may have anything in it.
        (let ((line (read-line file)))
          (eql #\S (char line (+ 2 (position #\) line :from-end t))))))
    (error ())))

(defun answered-p (descriptor process)
  "True once an octet can be read from DESCRIPTOR; false when the child PROCESS, which is to write it, waits for something,
which can only be a lock that no thread of it holds, or has not answered within five seconds."
  (loop repeat 250
        for slept = nil then sleeps
        for ready = (sb-unix:unix-simple-poll descriptor :input 20)
        for sleeps = (and (not ready) (sleeping-p process))
        when ready
          return (let ((octet (make-array 1 :element-type '(unsigned-byte 8))))
                   (with-pinned-objects (octet)
                     (eql 1 (sb-unix:unix-read descriptor (vector-sap octet) 1))))
        until (and slept sleeps)))

(defun end-child (process)
  "Kill the child PROCESS, and wait for its end."
  (alien-funcall (extern-alien "kill" (function int int int)) process 9)
  (alien-funcall (extern-alien "waitpid" (function int int system-area-pointer int)) process (int-sap 0) 0))

(defun fork-free-image (mutexes seconds wait)
  "Do as FORK-IMAGE does until nothing is in the way, and no lock of the C library is held in the child by a thread that it
does not have; for SECONDS at most. Return the child's process number, 0 in the child, a negative error number, or NIL;
how long the last attempt has stopped the others, in milliseconds; and, after NIL, what was in the way: a mutex, a thread,
or :C-LOCK. Without interrupts; WAIT is called between attempts."
  (declare (type function wait))
  (find-c-functions)
  (loop with end = (+ (monotonic-milliseconds) (* 1000 seconds))
        for calm = nil then (or calm (eq obstacle :c-lock))
        for (process stopped obstacle) = (multiple-value-list (fork-once mutexes calm))
        when (or process (> (monotonic-milliseconds) end))
          return (values process stopped obstacle)
        do (funcall wait)))

(defun fork-once (mutexes calm)
  "Make one attempt for FORK-FREE-IMAGE, as which it returns."
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (unless in
      (return-from fork-once (values (- out) 0)))
    (let ((begin (monotonic-milliseconds)))
      (multiple-value-bind (process obstacle threads) (fork-image mutexes calm)
        (when threads
          (setf (values process obstacle) (fork-paused-image mutexes calm threads)))
        (when (eql 0 process)
          (take-c-locks)
          (let ((octet (make-array 1 :element-type '(unsigned-byte 8) :initial-element 0)))
            (with-pinned-objects (octet)
              (sb-unix:unix-write out octet 0 1)))
          (return-from fork-once (values 0 0)))
        (let ((stopped (- (monotonic-milliseconds) begin)))
          (sb-unix:unix-close out)
          (when (and process (plusp process) (not (answered-p in process)))
            (end-child process)
            (setf process nil
                  obstacle :c-lock))
          (sb-unix:unix-close in)
          (values process stopped obstacle))))))

(defun check-copied (process obstacle seconds)
  "Signal an error that says why this process could not be copied, if it was not. PROCESS and OBSTACLE are the values
that FORK-FREE-IMAGE returned after SECONDS."
  (flet ((title (thread)
           (if thread (thread-title thread) "a thread")))
    (cond ((and process (minusp process))
           (error "The process cannot be copied: ~A." (sb-int:strerror (- process))))
          (process)
          ((typep obstacle 'sb-thread:mutex)
           (error "Other threads have compiled, interned symbols, or defined classes, for ~D seconds without a ~
                   pause; the last was ~A."
                  seconds (title (sb-thread:mutex-owner obstacle))))
          ((eq obstacle :c-lock)
           (error "The process cannot be copied: for ~D seconds, threads that are in C code have held locks of malloc, ~
                   stdio or the loader at each attempt."
                  seconds))
          (t
           (error "The process cannot be copied: for ~D seconds, ~A has not left code that must not be interrupted ~
                   (WITHOUT-INTERRUPTS)."
                  seconds (title obstacle))))))

(defun forget-threads ()
  "Make threads that are not in this process dead ones, and free the mutexes, which nobody will."
  (dolist (thread (sb-thread::avltree-filter #'sb-thread::avlnode-data sb-thread::*all-threads*))
    (unless (eq thread sb-thread:*current-thread*)
      (setf (sb-thread::thread-%visible thread) -1
            (sb-thread::thread-primitive-thread thread) 0
            (sb-thread::thread-semaphore thread) nil)))
  (setf sb-thread::*all-threads* (sb-thread::avl-insert nil (sb-thread::thread-primitive-thread
                                                             sb-thread:*current-thread*)
                                                        sb-thread:*current-thread*)
        sb-thread::*joinable-threads* '()
        **unjoined-threads** '()
        sb-thread::*starting-threads* '())
  (let ((held '()))
    (sb-vm:map-allocated-objects
     (lambda (object type size)
       (declare (ignore size))
       (when (and (eql type sb-vm:instance-widetag)
                  (typep object 'sb-thread:mutex)
                  (/= 0 (sb-thread::mutex-state object)))
         (push object held)))
     :all)
    (dolist (mutex held)
      (setf (sb-thread::mutex-state mutex) 0
            (sb-thread::mutex-%owner mutex) 0))))

(defun leave-exit-to-kernel ()
  "Have exit(3), by which SBCL ends when it has saved, do nothing of what the host's process does at its end: what
on_exit(3) has added last is called first."
  (alien-funcall (extern-alien "on_exit" (function int system-area-pointer unsigned-long))
                 (sb-sys:foreign-symbol-sap "_exit") 0))

(defglobal **saving-seconds** 300
  "How long it may take to save an image.")

(defun end-in-time ()
  "Have the kernel end this process after **SAVING-SECONDS**: nobody may be left to do that when it hangs, in C code that waits
for a thread which is not there."
  (let ((signals (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    ;; SIGALRM, 14, as SIG_DFL and not blocked: SIG_UNBLOCK.
    (setf (aref signals 1) #x20)
    (alien-funcall (extern-alien "signal" (function unsigned-long int unsigned-long)) 14 0)
    (with-pinned-objects (signals)
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer unsigned-long))
                     1 (vector-sap signals) 0))
    (alien-funcall (extern-alien "alarm" (function unsigned-int unsigned-int)) **saving-seconds**)))

;;; Settings of the process

(defun current-directories ()
  "Return the working directory, a native namestring or NIL, and *DEFAULT-PATHNAME-DEFAULTS*, as a list."
  (list (guarded (sb-posix:getcwd) (failure) nil) *default-pathname-defaults*))

(defun changed-settings ()
  "Return the settings that the session has changed, as **SETTINGS** has them. Where the session has left a directory as it
was, the next image takes that of its own process: a persistent session may be continued elsewhere."
  (loop for (key now before) in (append (mapcar #'list '(:directory :defaults) (current-directories) **start-directories**)
                                        (list (list :nursery (nursery-set-by-user) nil)))
        unless (equal now before)
          collect key and collect now))

(defun restore-settings ()
  "Restore the settings that the session had changed when this image was saved, and notify the user of a directory that is
gone."
  (destructuring-bind (&key directory defaults nursery) (shiftf **settings** '())
    (when directory
      (handler-case (sb-posix:chdir directory)
        (sb-posix:syscall-error (failure)
          (event 0 (event-code :notice) 0
                 (with-server-syntax ()
                   (format nil "The working directory ~A could not be restored (~A)~@[: it is ~A now~]."
                           directory (sb-int:strerror (sb-posix:syscall-errno failure))
                           (first **start-directories**)))))))
    (when defaults
      (setf *default-pathname-defaults* defaults))
    (when nursery
      (setf (sb-ext:bytes-consed-between-gcs) nursery))))

(defun save-image (path)
  "Save this image in the file PATH, a native namestring, and end the process: with status 0 when that is done. What fails is
said on the process' standard error. Called in the child."
  (setf *saving* t
        **event** 0
        **next-job** 0)
  (mapc #'funcall **save-functions**)
  (close-descriptors 3)
  (end-in-time)
  ;; What was in memory is for nobody but the owner.
  (alien-funcall (extern-alien "umask" (function unsigned-int unsigned-int)) #o077)
  (leave-exit-to-kernel)
  (let ((failure "something left it"))
    (unwind-protect
         (handler-case
             (progn
               (forget-threads)
               (mapc #'sb-ext:unschedule-timer (sb-ext:list-all-timers))
               ;; That the user's hooks fail is no reason not to save.
               (dolist (hook sb-ext:*save-hooks*)
                 (guarded (funcall hook) (failure) nil))
               (setf **emptied** (list * ** *** + ++ +++ / // /// - sb-ext:*save-hooks*)
                     sb-ext:*save-hooks* '()
                     ;; A program's image belongs to no session: its directories are the program's.
                     **settings** (and **checkpoint** (changed-settings)))
               (sb-ext:save-lisp-and-die (sb-ext:parse-native-namestring path)
                                         :callable-exports *exported-functions*))
           (serious-condition (condition)
             (setf failure (guarded (princ-to-string condition) (failure) "its report failed"))))
      (let ((octets (sb-ext:string-to-octets (format nil "The image was not saved: ~A.~%" failure))))
        (with-pinned-objects (octets)
          (sb-unix:unix-write 2 octets 0 (length octets))))
      (alien-funcall (extern-alien "_exit" (function void int)) 9))))

(defun leave-to-finisher (arguments lock errors)
  "Make of this process the program that ARGUMENTS, the address of a C array of strings, names, with the descriptor LOCK as
number 3 and ERRORS for its standard error; return in a child that it has, which ends with it."
  (flet ((put (descriptor number)
           (alien-funcall (extern-alien "dup2" (function int int int)) descriptor number)))
    (put errors 1)
    (put errors 2)
    (alien-funcall (extern-alien "setsid" (function int)))
    ;; What cannot be made a copy of finds no child, and says so.
    (unless (eql 0 (fork-process))
      (put lock 3)
      (close-descriptors 4)
      (alien-funcall (extern-alien "execv" (function int unsigned-long unsigned-long))
                     (sap-ref-word (int-sap arguments) 0)
                     arguments)
      (alien-funcall (extern-alien "_exit" (function void int)) 9))
    ;; PR_SET_PDEATHSIG, SIGKILL.
    (alien-funcall (extern-alien "prctl" (function int int unsigned-long)) 1 9)))

(defconstant +session-pause-seconds+ 10
  "How long it is waited until no thread is in the way of a copy of the session's image. It evaluates nothing meanwhile.")

(defconstant +last-pause-seconds+ 5
  "The same at the end of the server, which does not wait longer than LAST_SAVE of src/recovery/checkpoint/save.rs.")

(define-query :save-image (&key path name finisher lock errors)
  "Have a child process save the image in the file PATH, which must not exist; it ends with status 0 once that is complete.
The image calls itself NAME from then on. Push a record `saving` with the child's `process`, the microseconds that this
one was `stopped`, and what will not be in it: a record `thread` with its `name` for each, and the number of `timers`. For
the thread that evaluates, while it has nothing else to do.
With FINISHER, the child outlives this process: it becomes the program of these arguments, as LEAVE-TO-FINISHER has them
with LOCK and ERRORS, and a child of its own saves the image."
  (let* ((threads (user-threads))
         (before **checkpoint**)
         (process nil)
         (stopped 0)
         (obstacle nil)
         (seconds (if finisher +last-pause-seconds+ +session-pause-seconds+)))
    (setf **checkpoint** name)
    (unwind-protect
         ;; Before that, with the finalizer thread in its loop, it would not be stopped for a fork but joined.
         (without-interrupts
           (sb-impl::finalizer-thread-stop)
           (unwind-protect
                (progn
                  (setf (values process stopped obstacle)
                        (fork-free-image (definition-mutexes) seconds
                                         (lambda () (sb-sys:with-local-interrupts (sleep 0.001)))))
                  (when (eql 0 process)
                    (when finisher
                      (leave-to-finisher finisher lock errors))
                    (save-image path)))
             (sb-impl::finalizer-thread-start)))
      (unless (typep process '(integer 1))
        (setf **checkpoint** before)))
    (check-copied process obstacle seconds)
    (push-record "saving" :process process
                          :stopped (values (round (* 1000 stopped)))
                          :timers (let ((timers (length (sb-ext:list-all-timers))))
                                    (and (plusp timers) timers)))
    (dolist (thread threads)
      (push-record "thread" :name (thread-title thread)))))

;;; For a program that embeds the image

(defglobal **saving-lock** (sb-thread:make-mutex :name "saving")
  "Held while the process is copied: once at a time.")

(defconstant +pause-seconds+ 30
  "How long it is waited until no thread is in the way of a copy of the program's image.")

(defun take-default-signals ()
  "In the child, where the program's handlers have nothing to do, have its signals do what they do by default, and none
of them blocked. Those that SBCL needs stay: SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGUSR2 and SIGURG."
  (loop for number from 1 to 64
        unless (member number '(4 5 6 7 8 11 12 23))
          ;; SIG_DFL. SIGKILL and others refuse it.
          do (alien-funcall (extern-alien "signal" (function unsigned-long int unsigned-long)) number 0))
  (let ((none (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (with-pinned-objects (none)
      ;; SIG_SETMASK.
      (alien-funcall (extern-alien "pthread_sigmask" (function int int system-area-pointer unsigned-long))
                     2 (vector-sap none) 0))))

(defun save-for-parent (path parent)
  "In the child of the process PARENT, save the image in PATH, and end: at once when that one does."
  ;; PR_SET_PDEATHSIG, SIGKILL: of no use if it is gone already.
  (alien-funcall (extern-alien "prctl" (function int int unsigned-long)) 1 9)
  (unless (eql parent (alien-funcall (extern-alien "getppid" (function int))))
    (alien-funcall (extern-alien "_exit" (function void int)) 9))
  (setf **checkpoint** nil)
  (save-image path))

(defun save-and-report (path report)
  "In the child, have a child of its own save the image in PATH, and end. The descriptor REPORT gets what that one says,
and then how it ended, as waitpid(2) has it, in four octets: the program may wait for all its children itself. Whoever
kills this process kills that one, too, as does SIGALRM after **SAVING-SECONDS**."
  (unwind-protect
       (let ((status (make-array 1 :element-type '(signed-byte 32) :initial-element -1)))
         (take-default-signals)
         (dotimes (number 3)
           (alien-funcall (extern-alien "dup2" (function int int int)) report number))
         (close-descriptors 3)
         (alien-funcall (extern-alien "alarm" (function unsigned-int unsigned-int)) **saving-seconds**)
         (let* ((process (alien-funcall (extern-alien "getpid" (function int))))
                (saver (fork-process)))
           (when (eql 0 saver)
             (save-for-parent path process))
           (with-pinned-objects (status)
             (alien-funcall (extern-alien "waitpid" (function int int system-area-pointer int))
                            saver (vector-sap status) 0)
             (sb-unix:unix-write 2 status 0 4))))
    ;; Nobody looks at this; in a child of its own that gets here nothing was saved.
    (alien-funcall (extern-alien "_exit" (function void int)) 9)))

(defun save-for-program (path report)
  "Have a child process save the image in the file PATH, a native namestring, and tell the descriptor REPORT what becomes
of it, as SAVE-AND-REPORT does. Return the child's process number; who is interrupted before that has no child. For any
thread of the program's, while others go on: what those are doing is cut off in the child. None of them compiles, interns
or defines a class then, or it is an error: that one does not stop is waited for +PAUSE-SECONDS+."
  (let ((process nil)
        (obstacle nil)
        (given nil))
    (unwind-protect
         (progn
           (sb-thread:with-mutex (**saving-lock**)
             (without-interrupts
               (sb-impl::finalizer-thread-stop)
               (unwind-protect
                    (progn
                      ;; To ask for the locks would be no use: whoever compiles again at once gets them first.
                      (multiple-value-bind (child stopped reason)
                          (fork-free-image (definition-mutexes) +pause-seconds+
                                           (lambda () (sb-sys:with-local-interrupts (sleep 0.001))))
                        (declare (ignore stopped))
                        (setf process child
                              obstacle reason))
                      (when (eql 0 process)
                        (save-and-report path report)))
                 (sb-impl::finalizer-thread-start))))
           (check-copied process obstacle +pause-seconds+)
           (setf given t)
           process)
      (when (and (not given) (typep process '(integer 1)))
        (end-child process)))))

(define-query :image-name (&key collect)
  "With COLLECT, collect all garbage first: what was saved of threads in the middle of something may only fail then. Push a
record `image` with the `name` of the checkpoint that this image was booted from, if it was, and the session's
`package`; then a record `definitions` with `count` and `kind` for each kind of what the session has defined."
  (when collect
    (sb-ext:gc :full t))
  (push-record "image" :name **checkpoint** :package (package-name (current-package)))
  (let ((counts '())
        (systems '()))
    (map-definitions (lambda (kind name system)
                       (declare (ignore name))
                       (if system
                           (pushnew system systems :test #'equal)
                           (incf (getf counts kind 0)))))
    (loop for (kind text) in '((:function "function") (:macro "macro") (:variable "variable") (:class "class")
                               (:type "type") (:package "package"))
          for count = (getf counts kind)
          when count
            do (push-record "definitions" :count count :kind text))
    (when systems
      (push-record "definitions" :count (length systems) :kind "system"))))

(defun reopen-or-skip (reopen object)
  "Call REOPEN with OBJECT, a shared object that this image had open when it was saved. One that cannot be opened is noted
and left out, or the image could not be booted."
  (handler-bind ((error (lambda (failure)
                          (declare (ignore failure))
                          (push (sb-alien::shared-object-namestring object) **missing-objects**)
                          (continue))))
    (funcall (the function reopen) object)))

(defun tell-missing-objects ()
  "Have the user told of the shared objects that this image was booted without."
  (dolist (name (reverse (shiftf **missing-objects** '())))
    (event 0 (event-code :notice) 0
           (with-server-syntax ()
             (format nil "The shared object ~A is not there any more: what the image called in it cannot be called."
                     name)))))

(defun begin-after-checkpoint ()
  "Give this image, which was booted from a checkpoint, what saving it took away, and say what is missing."
  (destructuring-bind (a b c d e f g h i j hooks) **emptied**
    (setf * a ** b *** c + d ++ e +++ f / g // h /// i - j
          sb-ext:*save-hooks* hooks))
  ;; Nobody of those is there.
  (clrhash **connections**)
  (setf *saving* nil
        **emptied** '())
  (tell-missing-objects)
  (restore-settings))
