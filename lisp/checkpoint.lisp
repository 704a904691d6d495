;;;; Checkpoints: the running image saved as a core by a forked child, while this process goes on.

(in-package "SBCL-HOST")

(defvar *saving* nil
  "True in the process that saves the image, which has one thread and serves no host.")

(defglobal **emptied** '()
  "What saving takes away of the image that is saved, and it gets back when it is booted: the values of * ** *** + ++ +++
/ // /// - and of *SAVE-HOOKS*.")

(defglobal **missing-objects** '()
  "The names of the shared objects that could not be opened again as this image was booted.")

(defglobal **checkpoint** nil
  "What the image that was saved last is called, which is the one that was booted if this one was; or NIL.")

(declaim (inline thread-word))
(defun thread-word (thread slot)
  "Return the word in SLOT of the C struct of a thread that the SAP THREAD points to."
  (sap-ref-word thread (ash slot sb-vm:word-shift)))

(defun cut-off-threads ()
  "In the child, where no other thread has come along, have the runtime know of this one alone. What the others were about
to allocate is closed first, or the collector would find holes in it. The world is stopped."
  (let ((self (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot)))
    (loop for thread = (extern-alien "all_threads" system-area-pointer)
            then (int-sap (thread-word thread sb-vm::thread-next-slot))
          until (zerop (sap-int thread))
          unless (sap= thread self)
            do (alien-funcall (extern-alien "gc_close_thread_regions" (function void system-area-pointer int)) thread 0))
    (setf (extern-alien "all_threads" system-area-pointer) self
          (sap-ref-word self (ash sb-vm::thread-next-slot sb-vm:word-shift)) 0
          (sap-ref-word self (ash sb-vm::thread-prev-slot sb-vm:word-shift)) 0)))

(defun fork-image (&optional mutexes)
  "Fork, all other threads being stopped where they may be. Return the child's process number, 0 in the child, which has
this thread only, a negative error number, or :BUSY when one of the MUTEXES is held. Without interrupts.
fork(3) would wait for the locks of malloc(3) and stdio(3), which a thread may hold that is stopped in C code, for ever."
  (let ((process nil))
    (loop
      ;; As SUB-GC does it (src/code/gc.lisp).
      (without-gcing
        (when (eql 1 (alien-funcall (extern-alien "try_acquire_gc_lock" (function int))))
          (alien-funcall (extern-alien "gc_stop_the_world" (function void)))
          (cond ((loop for mutex in mutexes thereis (/= 0 (sb-thread::mutex-state mutex)))
                 (setf process :busy))
                ((eql 0 (setf process (alien-funcall (extern-alien "_Fork" (function int)))))
                 (cut-off-threads))
                ((minusp process)
                 (setf process (- (sb-alien:get-errno)))))
          (alien-funcall (extern-alien "release_gc_lock" (function void)))
          (alien-funcall (extern-alien "gc_start_the_world" (function void)))))
      (when process
        (return process)))))

(defun take-c-locks ()
  "Take the locks that malloc and stdio have for this thread, and let go of them: that never returns when a thread holds one
that is not there. Others than these are of no use to a process that saves."
  ;; As much as malloc has no cache for, and fopen wants some, too.
  (let ((memory (alien-funcall (extern-alien "malloc" (function unsigned-long unsigned-long)) 10000))
        (file (alien-funcall (extern-alien "fopen" (function unsigned-long c-string c-string)) "/dev/null" "r")))
    (alien-funcall (extern-alien "free" (function void unsigned-long)) memory)
    ;; Another thread has allocated what is freed at the end (save.c, unwind_binding_stack): malloc has another lock for
    ;; that. As large as it is, it stays where it is.
    (let ((map (extern-alien "tlsindex_to_symbol_map" unsigned-long)))
      (alien-funcall (extern-alien "realloc" (function unsigned-long unsigned-long unsigned-long))
                     map
                     (alien-funcall (extern-alien "malloc_usable_size" (function unsigned-long unsigned-long)) map)))
    (unless (eql 0 file)
      (alien-funcall (extern-alien "fclose" (function int unsigned-long)) file))))

(defun answered-p (descriptor)
  "True when an octet can be read from DESCRIPTOR within two seconds."
  (and (sb-unix:unix-simple-poll descriptor :input 2000)
       (let ((octet (make-array 1 :element-type '(unsigned-byte 8))))
         (with-pinned-objects (octet)
           (eql 1 (sb-unix:unix-read descriptor (vector-sap octet) 1))))))

(defun end-child (process)
  "Kill the child PROCESS, and wait for its end."
  (alien-funcall (extern-alien "kill" (function int int int)) process 9)
  (alien-funcall (extern-alien "waitpid" (function int int system-area-pointer int)) process (int-sap 0) 0))

(defun fork-free-image (&optional mutexes)
  "Do as FORK-IMAGE does until no lock is held in the child by a thread that it does not have, which is rare but where C code
allocates all the time; 20 times at most, and then it is an error as if the system had refused it (EDEADLK). The second value
is how long the last one has stopped the others, in milliseconds."
  (loop for attempt from 1
        do (multiple-value-bind (in out) (sb-unix:unix-pipe)
             (unless in
               (return (values (- out) 0)))
             (let* ((begin (monotonic-milliseconds))
                    (process (fork-image mutexes))
                    (stopped (- (monotonic-milliseconds) begin)))
               (when (eql 0 process)
                 (take-c-locks)
                 (let ((octet (make-array 1 :element-type '(unsigned-byte 8) :initial-element 0)))
                   (with-pinned-objects (octet)
                     (sb-unix:unix-write out octet 0 1)))
                 (return (values 0 0)))
               (sb-unix:unix-close out)
               (let ((free (or (eq process :busy) (minusp process) (answered-p in))))
                 (sb-unix:unix-close in)
                 (when free
                   (return (values process stopped)))
                 (end-child process)
                 (when (= attempt 20)
                   (return (values -35 stopped))))))))

(defun close-descriptors (first)
  "Close all files from number FIRST on: the client's connection and whatever else is the parent's. Linux, close_range(2)."
  (alien-funcall (extern-alien "close_range" (function int unsigned-int unsigned-int int)) first #xFFFFFFFF 0))

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

(defun save-image (path)
  "Save this image in the file PATH, a native namestring, and end the process: with status 0 when that is done. What fails is
said on the process' standard error. Called in the child."
  (setf *saving* t
        **event** 0
        **next-job** 0)
  (forget-program)
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
                     sb-ext:*save-hooks* '())
               (sb-ext:save-lisp-and-die (sb-ext:parse-native-namestring path)
                                         :callable-exports '(sbcl-host-start sbcl-host-stack-lost)))
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
    (unless (eql 0 (alien-funcall (extern-alien "_Fork" (function int))))
      (put lock 3)
      (close-descriptors 4)
      (alien-funcall (extern-alien "execv" (function int unsigned-long unsigned-long))
                     (sap-ref-word (int-sap arguments) 0)
                     arguments)
      (alien-funcall (extern-alien "_exit" (function void int)) 9))
    ;; PR_SET_PDEATHSIG, SIGKILL.
    (alien-funcall (extern-alien "prctl" (function int int unsigned-long)) 1 9)))

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
         (stopped 0))
    (setf **checkpoint** name)
    ;; Before that, with the finalizer thread in its loop, it would not be stopped for a fork but joined.
    (without-interrupts
      (sb-impl::finalizer-thread-stop)
      (unwind-protect
           (progn
             (setf (values process stopped) (fork-free-image))
             (when (eql 0 process)
               (when finisher
                 (leave-to-finisher finisher lock errors))
               (save-image path)))
        (sb-impl::finalizer-thread-start)))
    (when (minusp process)
      (setf **checkpoint** before)
      (error "The process cannot be copied: ~A." (sb-int:strerror (- process))))
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
  "How long it is waited until no thread compiles, interns, or defines a class.")

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
                (saver (alien-funcall (extern-alien "_Fork" (function int)))))
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
        (given nil)
        (end (+ (get-internal-real-time) (* +pause-seconds+ internal-time-units-per-second)))
        (mutexes (list sb-kernel::**world-lock** sb-impl::*package-graph-lock*)))
    (unwind-protect
         (progn
           (sb-thread:with-mutex (**saving-lock**)
             (without-interrupts
               (sb-impl::finalizer-thread-stop)
               (unwind-protect
                    ;; To ask for the locks would be no use: whoever compiles again at once gets them first.
                    (loop
                      (setf process (fork-free-image mutexes))
                      (cond ((eql 0 process)
                             (save-and-report path report))
                            ((or (integerp process) (> (get-internal-real-time) end))
                             (return)))
                      (sb-sys:with-local-interrupts (sleep 0.001)))
                 (sb-impl::finalizer-thread-start))))
           (cond ((eq process :busy)
                  (error "Other threads have compiled, interned symbols, or defined classes, for ~D seconds without a ~
                          pause." +pause-seconds+))
                 ((minusp process)
                  (error "The process cannot be copied: ~A." (sb-int:strerror (- process)))))
           (setf given t)
           process)
      (when (and (not given) (typep process '(integer 1)))
        (end-child process)))))

(define-query :image-name (&key)
  "Push a record `image` with the `name` of the checkpoint that this image was booted from, if it was, and the session's
`package`; then a record `definitions` with `count` and `kind` for each kind of what the session has defined."
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
  (tell-missing-objects))
