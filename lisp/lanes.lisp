;;;; The Lisp threads that pull jobs from the host.

(in-package "SBCL-HOST")

(defglobal **lane-threads** (make-array 4 :initial-element nil)
  "The thread of each lane.")

(defun done (success)
  "Tell the host that this thread's job is over."
  (event *job-id* (event-code :done) (if success 0 1)))

(defun user-threads ()
  "Return the threads that are neither the server's nor the system's."
  (remove-if (lambda (thread)
               (or (eq thread (sb-thread:main-thread))
                   (sb-thread::thread-ephemeral-p thread)))
             (sb-thread:list-all-threads)))

(defglobal **boot-thread** nil
  "The thread that booted the image, which is the host's again and serves nothing.")

(defun hide-host-threads ()
  "Have LIST-ALL-THREADS leave out what is the host's: what the user's code sees is a main thread, which evaluates, and
the threads that it made."
  (encapsulate 'sb-thread:list-all-threads 'sbcl-host
               (lambda (list-all-threads)
                 (delete-if (lambda (thread)
                              (or (eq thread **boot-thread**)
                                  (and (find thread **lane-threads** :test #'eq)
                                       (not (eq thread (sb-thread:main-thread))))))
                            (funcall list-all-threads)))))

(defun run-reset ()
  "Do a :RESET job."
  (let ((threads (user-threads)))
    (dolist (thread threads)
      (ignore-errors (sb-thread:terminate-thread thread)))
    (await-threads threads))
  (setf * nil ** nil *** nil + nil ++ nil +++ nil / nil // nil /// nil - nil)
  (let ((left (remove-definitions)))
    (when left
      (event *job-id* (event-code :notice) 0
             (format nil "Could not be removed: ~{~A~^, ~}." left))))
  (restore-user-variables)
  (install-standard-streams)
  t)

(defglobal **user-variables** '()
  "Printer and reader variables with the values that a session begins with.")

(defun remember-user-variables ()
  "Take the present values of the printer and reader variables as those that a session begins with."
  (setf **user-variables**
        (mapcar (lambda (variable) (cons variable (symbol-value variable)))
                '(*print-array* *print-base* *print-case* *print-circle* *print-escape* *print-gensym* *print-length*
                  *print-level* *print-lines* *print-miser-width* *print-pprint-dispatch* *print-pretty* *print-radix*
                  *print-readably* *print-right-margin* *read-base* *read-default-float-format* *read-eval*
                  *read-suppress* *readtable* sb-ext:*evaluator-mode* sb-ext:*invoke-debugger-hook* *debugger-hook*
                  *break-on-signals* *macroexpand-hook* *gensym-counter* *features* sb-c::*policy*
                  *default-pathname-defaults*))))

(defun restore-user-variables ()
  "Give the printer and reader variables the values that a session begins with."
  (loop for (variable . value) in **user-variables**
        do (setf (symbol-value variable)
                 (case variable
                   (*readtable* (copy-readtable nil))
                   (*print-pprint-dispatch* (copy-pprint-dispatch nil))
                   (t value)))))

(defun run-guarded-inspection (function)
  "Call FUNCTION, a question, and return true; when it fails, push the error and return false."
  (nth-value 1 (call-until-abandoned
                (lambda ()
                  (with-interrupts
                    (with-boundary ()
                      (funcall (the function function))))))))

(defun run-interrupt (job)
  "Do an :INTERRUPT job: it is for whichever lane has the job that it names."
  (let ((target (job-argument job))
        (reason (job-flags job))
        (number (incf **interrupts-sent**)))
    (when (eql reason +interrupt-heap+)
      (end-threads-for-heap))
    (dolist (thread (list (svref **lane-threads** +evaluation-lane+) (svref **lane-threads** +inspection-lane+)))
      (ignore-errors
       (sb-thread:interrupt-thread
        thread
        (lambda ()
          (cond ((not (eql reason +interrupt-heap+)) (interrupt-evaluation target reason number))
                ;; A collection may have been quicker.
                ((and (eql target *job-id*) (/= target **ended-for-heap**)) (end-evaluation-for-heap)))))))))

(defun run-job (job)
  "Do JOB. Return true when it succeeded. What is the user's runs with interrupts, all else without."
  (case (job-kind job)
    (:evaluate (run-evaluation job))
    (:reset (with-interrupts (run-reset)))
    (:definitions
     (run-guarded-inspection (lambda () (push-definitions (job-flags job) (job-argument job) (job-name job)))))
    (:describe
     (run-guarded-inspection (lambda ()
                               (push-description (job-text job) (job-name job)
                                                 (logtest +describe-source+ (job-flags job))))))
    (:interrupt (run-interrupt job) t)
    (t (refuse "No evaluation is held."))))

(defun contain-interruption (function)
  "Call FUNCTION, which interrupts a thread of the server's that has nothing to do, as a timer does. Wherever it unwinds
to, it ends here; an error of it is reported as any thread's."
  (let ((sb-thread::*interrupt-handler* nil))
    (block interruption
      (unwind-protect
           (let ((*on-debugger* (lambda (condition)
                                  (report-thread-error condition (frame-pointer-here))
                                  (return-from interruption))))
             (with-boundary ()
               (funcall (the function function))))
        (return-from interruption)))))

(defun contain-short-interruption (function)
  "Call FUNCTION as CONTAIN-INTERRUPTION does, and have the next one wait until it is done: they do not nest."
  (without-interrupts (contain-interruption function)))

(defun next-lane-job (lane)
  "Wait for the next job of LANE and return it, or NIL when there will be none. What was to interrupt this thread
meanwhile does so before it returns: an interrupt on the way out of NEXT-JOB would lose the job."
  (without-interrupts
    (prog1 (next-job lane)
      (allow-with-interrupts (with-interrupts nil)))))

(defun run-lane (lane)
  "Do the jobs of LANE until the host ends it. Between them nothing interrupts this thread but where NEXT-LANE-JOB lets
it: the end of a job is told, and the next one asked for, whatever timers there are."
  (let ((*spare-buffer* nil)
        (*output* (when (eql lane +evaluation-lane+) (make-output)))
        (sb-thread::*interrupt-handler* #'contain-short-interruption))
    (without-interrupts
      (allow-with-interrupts
        (loop for job = (next-lane-job lane)
              while job
              do (let ((success nil)
                       (*job-id* (job-id job)))
                   ;; A job that was held ends as another one.
                   (unwind-protect (let ((sb-thread::*interrupt-handler* nil))
                                     (setf success (run-job job)))
                     (finish-output-of-job)
                     (done success))))))))

(defun await-signals ()
  "Have the host send SBCL's signals to this thread, which has interrupts enabled and nothing else to do. Timers that
ask for no thread run their functions here."
  (next-job +signal-lane+)
  (let ((sb-thread::*interrupt-handler* #'contain-interruption))
    (loop (sleep 86400))))

(defun start-lane (lane)
  "Start the thread of LANE. If the user's code ends it, another one takes its place."
  (let ((thread (sb-thread::%make-thread (svref #("main thread" "inspection" "control" "signals") lane)
                                         nil (sb-thread:make-semaphore))))
    (setf (svref **lane-threads** lane) thread)
    ;; To the user's code the thread that evaluates is the main one, as it is in SBCL's REPL.
    (when (eql lane +evaluation-lane+)
      (setf sb-thread::*initial-thread* thread))
    (sb-thread::start-thread thread
                             (lambda ()
                               (let ((ended nil))
                                 (unwind-protect
                                      (progn (if (eql lane +signal-lane+) (await-signals) (run-lane lane))
                                             (setf ended t))
                                   (unless ended
                                     (start-lane lane)))))
                             '())))

(defglobal **scratch** nil
  "The native namestring of a directory that the host removes at the end, and that need not exist until then; or NIL.")

(defun start-lanes (&key seed user-init scratch)
  "Start the Lisp threads."
  (setf *random-state* (sb-ext:seed-random-state seed)
        **boot-thread** (sb-thread:main-thread)
        **scratch** scratch)
  (limit-nursery)
  (prefer-large-pages)
  (install-standard-streams)
  (name-runtime)
  ;; UIOP would go on with the streams and directories of the process that built the core.
  (guarded (uiop:call-image-restore-hook) (failure) nil)
  (guarded (locate-compiled-files) (failure) nil)
  (remember-user-variables)
  (when user-init
    (guarded (load-user-init) (failure) nil))
  (mapc #'start-lane (list +evaluation-lane+ +inspection-lane+ +control-lane+ +signal-lane+)))

(defun start-lanes-or-refuse (&rest arguments)
  "Call START-LANES with ARGUMENTS and return true, or tell the host why that failed and return false. Nothing unwinds out
of here: the caller is foreign, and would take for the answer what happens to be in a register."
  (block start
    (let ((answer nil))
      (flet ((refuse (format &rest arguments)
               (event 0 (event-code :refused) 0 (apply #'format nil format arguments))
               (setf answer :refused)))
        (unwind-protect
             (guarded (progn (apply #'start-lanes arguments)
                             (setf answer :started))
                 (failure)
               (refuse "~A: ~A" (type-name-text (class-name-of failure)) failure))
          (unless answer
            (refuse "what starts them was left by a non-local exit."))
          (return-from start (eq answer :started)))))))

(defun substitute-home ()
  "Give a user who has no home directory **SCRATCH** for one: where SBCL has nothing but an error, ASDF cannot work."
  (encapsulate 'sb-impl::user-homedir-namestring 'sbcl-host
               (lambda (function &rest arguments)
                 (if (and **scratch** (null (first arguments)))
                     (handler-case (funcall function) (error () **scratch**))
                     (apply function arguments)))))

(defun locate-compiled-files ()
  "Have ASDF keep compiled files in the user's cache directory, or below **SCRATCH** if that cannot be written."
  (let ((cache (uiop/configuration::compute-user-cache)))
    (setf uiop:*user-cache*
          (if (and **scratch** (not (writable-p cache)))
              (uiop:subpathname (uiop:parse-native-namestring **scratch** :ensure-directory t) ".cache/common-lisp/")
              cache))))

(defun writable-p (directory)
  "True when this process may make files in DIRECTORY, or make DIRECTORY where it does not exist."
  (let ((name (sb-ext:native-namestring directory)))
    (handler-case (progn (sb-posix:access name sb-posix:w-ok) t)
      (sb-posix:syscall-error (failure)
        (and (eql (sb-posix:syscall-errno failure) sb-posix:enoent)
             (not (equal directory (uiop:pathname-parent-directory-pathname directory)))
             (writable-p (uiop:pathname-parent-directory-pathname directory)))))))

(defun name-runtime ()
  "Have SBCL's variables name the file of this program, which it was booted from by another name."
  (let ((program (and (equal sb-ext:*runtime-pathname* #P"/proc/self/exe")
                      (probe-file sb-ext:*runtime-pathname*))))
    (when program
      (setf sb-ext:*runtime-pathname* program
            sb-ext:*core-pathname* program
            (first sb-ext:*posix-argv*) (sb-ext:native-namestring program)))))

(defun load-user-init ()
  "Load the user's init file, if there is one."
  (let ((file (merge-pathnames ".sbclrc" (user-homedir-pathname))))
    (when (probe-file file)
      (load file))))

(defun prepare-core ()
  "Change SBCL in the few places where it must know of the host. Done once, before the core is saved."
  (preload-contribs)
  (forget-builder)
  (substitute-home)
  (setf **core-systems** (already-loaded-systems))
  ;; What ASDF found on the machine that built the core is not to be looked for on the one that runs it.
  (asdf:clear-configuration)
  (setf uiop:*user-cache* nil
        *compile-verbose* nil
        *compile-print* nil)
  (observe-definitions)
  (observe-systems)
  (keep-evaluations-out-of-files)
  (protect-user-package)
  (adopt-user-threads)
  (hide-host-threads)
  (encapsulate 'sb-kernel::post-gc 'sbcl-host #'watch-after-collection)
  (pushnew 'clear-up-after-threads sb-ext:*after-gc-hooks*)
  (encapsulate 'invoke-debugger 'sbcl-host #'enter-debugger)
  (watch-programs)
  (record-warnings)
  (encapsulate 'sb-c:compile-in-lexenv 'sbcl-host #'compile-in-unit)
  (encapsulate 'sb-di:debug-fun-closure-name 'sbcl-host #'closure-name)
  (encapsulate 'sb-c:compile-in-lexenv 'sbcl-host-closures #'mark-closures)
  (refuse-exit)
  (silence-exhaustion))
