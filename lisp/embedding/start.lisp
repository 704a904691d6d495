;;;; Starting the image for a host.

(in-package "SBCL-HOST/EMBEDDING")

(defun hide-initial-thread ()
  "Hide SBCL's initial thread from code that signals all threads, such as SB-SPROF's mode :TIME. This thread has initialised
SBCL and has ended, but SBCL still counts it as running."
  (setf (sb-thread::thread-%visible (sb-thread:main-thread)) -1))

(defun start-image (&key seed user-init scratch library)
  "Prepare the image and start the Lisp threads. SEED is the seed of *RANDOM-STATE*. If USER-INIT is true, load the
user's init file. SCRATCH is the value for **SCRATCH-DIRECTORY**, a native namestring or NIL. If LIBRARY, a pointer to a
struct sbcl_library, is given, also start the threads of the program that embeds the image."
  (hide-initial-thread)
  (setf *random-state* (sb-ext:seed-random-state seed)
        **resets-available** t
        **supervised** t
        **scratch-directory** scratch)
  (limit-nursery)
  (prefer-large-pages)
  (install-standard-streams)
  (set-runtime-pathnames)
  ;; Without this call, UIOP would use the streams and directories of the process that built the core.
  (guarded (uiop:call-image-restore-hook) (failure) nil)
  (guarded (configure-asdf-cache) (failure) nil)
  (setf **start-directories** (current-directories))
  (cond (**saved-repl-state**
         (resume-from-checkpoint))
        (t
         (record-initial-variable-values)
         (when user-init
           (guarded (load-user-init) (failure) nil))))
  (start-lanes)
  (forget-program)
  (when library
    (start-for-program library)))

(defun start-image-or-refuse (&rest arguments)
  "Call START-IMAGE with ARGUMENTS and return true. If START-IMAGE fails, report the reason to the host and return false.
No non-local exit may leave this function: the caller is foreign code, which would take an arbitrary register value for
the result."
  (block start
    (let ((answer nil))
      (flet ((refuse (format &rest arguments)
               (event 0 (event-code :refused) 0 (apply #'format nil format arguments))
               (setf answer :refused)))
        (unwind-protect
             (guarded (progn (apply #'start-image arguments)
                             (setf answer :started))
                 (failure)
               (refuse "~A: ~A" (type-name-text (class-name-of failure)) failure))
          (unless answer
            (refuse "a non-local exit ended the start, for instance (sb-thread:abort-thread) in ~
                     ~:[an image restore hook of UIOP~;~~/.sbclrc~]"
                    (getf arguments :user-init)))
          (return-from start (eq answer :started)))))))

(defun configure-asdf-cache ()
  "Make ASDF keep compiled files in the user's cache directory or, if that directory is not writable, below
**SCRATCH-DIRECTORY**."
  (let ((cache (uiop/configuration::compute-user-cache)))
    (setf uiop:*user-cache*
          (if (and **scratch-directory** (not (writable-p cache)))
              (uiop:subpathname (uiop:parse-native-namestring **scratch-directory** :ensure-directory t)
                                ".cache/common-lisp/")
              cache))))

(defun writable-p (directory)
  "Return true when this process may create files in DIRECTORY, or create DIRECTORY if it does not exist."
  (let ((name (sb-ext:native-namestring directory)))
    (handler-case (progn (sb-posix:access name sb-posix:w-ok) t)
      (sb-posix:syscall-error (failure)
        (and (eql (sb-posix:syscall-errno failure) sb-posix:enoent)
             (not (equal directory (uiop:pathname-parent-directory-pathname directory)))
             (writable-p (uiop:pathname-parent-directory-pathname directory)))))))

(defun set-runtime-pathnames ()
  "If the image was booted as /proc/self/exe or from a checkpoint, store the file of this program in SBCL's variables for
the files of the runtime and the core, and as the first command-line argument."
  (let ((program (and (or **saved-repl-state** (equal sb-ext:*runtime-pathname* #P"/proc/self/exe"))
                      (probe-file #P"/proc/self/exe"))))
    (when program
      (setf sb-ext:*runtime-pathname* program
            sb-ext:*core-pathname* program
            (first sb-ext:*posix-argv*) (sb-ext:native-namestring program)))))

(defun load-user-init ()
  "Load the user's init file, if there is one."
  (let ((file (merge-pathnames ".sbclrc" (user-homedir-pathname))))
    (when (probe-file file)
      (load file))))

(define-alien-callable sbcl-host-stack-lost void ((stack (unsigned 32)))
  "End this thread's evaluation, or the thread itself if it runs no evaluation, because one of the thread's stacks is
exhausted. STACK, a value of the C enum sbcl_stack, tells which stack."
  (unwind-from-stack-end stack))

(define-alien-callable sbcl-host-start (unsigned 32) ((host system-area-pointer))
  "Start the Lisp threads for HOST, a struct sbcl_host, unless its contract version differs from the core's. Return the
core's contract version, or 0 if the start failed."
  (macrolet ((field (reader name)
               `(,reader host (field-offset "sbcl_host" ,name))))
    (cond ((eql +contract-version+ (field sap-ref-32 "contract"))
           (setf **next-job-function-address** (field sap-ref-64 "next_job")
                 **event-function-address** (field sap-ref-64 "event"))
           (if (start-image-or-refuse
                :seed (field sap-ref-64 "seed")
                :user-init (eql 1 (field sap-ref-64 "user_init"))
                :scratch (let ((length (field sap-ref-64 "scratch_length")))
                           (and (plusp length) (copy-text (field sap-ref-64 "scratch") length)))
                :library (let ((library (field sap-ref-sap "library")))
                           (and (plusp (sap-int library)) library)))
               +contract-version+
               0))
          (t +contract-version+))))
