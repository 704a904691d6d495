;;;; The Lisp threads that pull jobs from the host.

(in-package "SBCL-HOST/EMBEDDING")

(defglobal **lane-threads** (make-array 4 :initial-element nil)
  "The threads of the lanes for inspection, control and signals; those that evaluate are **EVALUATION-THREADS**.")

(defglobal **boot-thread** nil
  "The thread that booted the image, which is the host's again and serves nothing.")

(defglobal **abandoned-threads** nil
  "The threads that serve no lane any more, since what they do did not react to being interrupted. To the user's code they
are threads of its own.")

(defun host-thread-p (thread)
  "True when THREAD is the host's: what the user's code sees is a main thread, which evaluates in the foreground, the
thread that it runs in, and those that it made."
  (or (eq thread **boot-thread**)
      (program-thread-p thread)
      (find thread **lane-threads** :test #'eq)
      (and (find thread **evaluation-threads** :test #'eq)
           (not (eq thread (sb-thread:main-thread)))
           (not (eq thread sb-thread:*current-thread*)))))

(defun run-reset ()
  "Do a :RESET job."
  (let ((threads (user-threads)))
    (end-threads threads)
    (await-threads threads))
  (setf * nil ** nil *** nil + nil ++ nil +++ nil / nil // nil /// nil - nil)
  (clrhash **connections**)
  (let ((left (remove-definitions)))
    (when left
      (event *job-id* (event-code :notice) 0
             (format nil "Could not be removed: ~{~A~^, ~}." left))))
  (let ((count (count-if #'sb-thread:thread-alive-p **abandoned-threads**)))
    (when (plusp count)
      (event *job-id* (event-code :notice) 0
             (format nil "Could not be ended: ~D evaluation~:P that did not react to being interrupted." count))))
  (restore-user-variables)
  (install-standard-streams)
  t)

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

(defun thread-of-job (job-id)
  "Return the thread that does JOB-ID, or NIL when there is none within 10 ms: it may be about to begin."
  (loop repeat 10
        do (dolist (thread (cons (svref **lane-threads** +inspection-lane+) **evaluation-threads**))
             (when (eql job-id (logandc2 (or (ignore-errors (sb-thread:symbol-value-in-thread '*job-id* thread nil)) 0)
                                         +job-signalled+))
               (return-from thread-of-job thread)))
           (sleep 0.001)))

(defun run-interrupt (job)
  "Do an :INTERRUPT job: it is for the thread that does the job that it names, if it names one. The host is told when
that thread takes the interruption, or that there is none."
  (let ((target (job-argument job))
        (reason (job-flags job)))
    (when (eql reason +interrupt-heap+)
      (end-threads-for-heap))
    (unless (zerop target)
      (guarded (sb-thread:interrupt-thread
                (or (thread-of-job target) (error "Job ~D has no thread." target))
                (lambda ()
                  (event target (event-code :interrupted))
                  (cond ((not (eql reason +interrupt-heap+)) (interrupt-evaluation target reason))
                        ;; A collection may have been quicker.
                        ((and (eql target *job-id*) (/= target **ended-for-heap**)) (end-evaluation-for-heap)))))
          (failure)
        (event target (event-code :interrupted))))))

(defun run-start-thread ()
  "Do a :START-THREAD job."
  (guarded (start-lane +evaluation-lane+)
      (failure)
    (event 0 (event-code :thread-refused) 0
           (with-server-syntax () (format nil "No thread could be started for it: ~A" failure)))))

(defun run-abandon (job)
  "Do an :ABANDON job."
  (let ((thread (thread-of-job (job-argument job)))
        (lane (job-flags job)))
    (when thread
      (setf (sb-thread:thread-name thread) "abandoned")
      (sb-ext:atomic-push thread **abandoned-threads**)
      (remove-evaluation-thread thread))
    (when (eql lane +inspection-lane+)
      (guarded (start-lane lane)
          (failure)
        (event (job-argument job) (event-code :refused) 0
               (with-server-syntax () (format nil "No thread could be started in its place: ~A" failure)))))))

(defun world-mutexes ()
  "Return the mutexes of SBCL's own without which nothing can be compiled or defined, and no thread started."
  (list* sb-thread::*make-thread-lock* **collecting** (definition-mutexes)))

(defun run-look ()
  "Do a :LOOK job: tell which mutex of SBCL's own an abandoned thread holds that others wait for."
  (sb-ext:atomic-update **abandoned-threads** (lambda (threads) (remove-if-not #'sb-thread:thread-alive-p threads)))
  (let ((mutex (find-if (lambda (mutex)
                          ;; 2: somebody waits for it.
                          (and (eql 2 (sb-thread::mutex-state mutex))
                               (member (sb-thread:mutex-owner mutex) **abandoned-threads** :test #'eq)))
                        (world-mutexes))))
    (event 0 (event-code :blocked) 0
           (if mutex
               (with-server-syntax () (format nil "the lock ~S" (sb-thread:mutex-name mutex)))
               ""))))

(defun run-job (job)
  "Do JOB for its connection. Return true when it succeeded."
  (let ((function (gethash (job-kind job) **job-functions**)))
    (declare (type (or null function) function))
    (call-for-connection (job-connection job)
                         (lambda ()
                           (if function
                               (funcall function job)
                               (refuse "No evaluation is held."))))))

(define-job :reset (job)
  "Remove what the session defined."
  (with-interrupts (run-reset)))

(define-job :interrupt (job)
  "Interrupt another job."
  (run-interrupt job)
  t)

(define-job :start-thread (job)
  "Start a thread that evaluates."
  (run-start-thread)
  t)

(define-job :abandon (job)
  "Give up the thread of a job."
  (run-abandon job)
  t)

(define-job :look (job)
  "Look whether an abandoned thread holds a lock of SBCL's."
  (run-look)
  t)

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

(defvar *leaving* nil
  "True when this thread is to end: it was abandoned.")

(defun do-job (job)
  "Do JOB and tell the host that it is over."
  (let ((success nil)
        (*job-id* (job-id job)))
    ;; Of an evaluation that was held, this tells the end of the job that made it go on: CHANGE-JOB.
    (unwind-protect (let ((sb-thread::*interrupt-handler* nil))
                      (setf success (run-job job)))
      (finish-output-of-job)
      (setf *leaving* (done success)))))

(defun begins-in-background-p (job)
  "True when JOB is done in the background from its beginning."
  (and (eq :evaluate (job-kind job)) (logtest +evaluate-background+ (job-flags job))))

(defun run-lane (lane)
  "Do the jobs of LANE until the host ends it. Between them nothing interrupts this thread but where NEXT-LANE-JOB lets
it: the end of a job is told, and the next one asked for, whatever timers there are."
  (let ((*output* (when (eql lane +evaluation-lane+) (make-output)))
        (sb-thread::*interrupt-handler* #'contain-short-interruption))
    (without-interrupts
      (allow-with-interrupts
        (loop until *leaving*
              do (let ((job (next-lane-job lane)))
                   (unless job (return))
                   (when (eql lane +evaluation-lane+)
                     (if (begins-in-background-p job)
                         (setf (sb-thread:thread-name sb-thread:*current-thread*) "background")
                         (become-main-thread)))
                   (do-job job)))))))

(defun await-signals ()
  "Have the host send SBCL's signals to this thread, which has interrupts enabled and nothing else to do. Timers that
ask for no thread run their functions here."
  (next-job +signal-lane+)
  (let ((sb-thread::*interrupt-handler* #'contain-interruption))
    (loop (sleep 86400))))

(defun remove-evaluation-thread (thread)
  "Have THREAD count as one that evaluates no more."
  (sb-ext:atomic-update **evaluation-threads** (lambda (threads) (remove thread threads))))

(defun run-lane-thread (lane)
  "What a thread of LANE does. If the user's code ends it, another one takes its place: of those that evaluate, when the
host asks for one."
  (let ((ended nil))
    (unwind-protect
         (progn (if (eql lane +signal-lane+) (await-signals) (run-lane lane))
                (setf ended t))
      (cond ((eql lane +evaluation-lane+)
             (remove-evaluation-thread sb-thread:*current-thread*)
             (event 0 (event-code :thread-ended)))
            ((not (or ended *leaving*))
             (start-lane lane))))))

(defun start-lane (lane)
  "Start a thread of LANE and return it."
  (let ((thread (sb-thread::%make-thread (svref #("evaluation" "inspection" "control" "signals") lane)
                                         nil (sb-thread:make-semaphore))))
    (if (eql lane +evaluation-lane+)
        (sb-ext:atomic-push thread **evaluation-threads**)
        (setf (svref **lane-threads** lane) thread))
    (handler-bind ((error (lambda (failure)
                            (declare (ignore failure))
                            (remove-evaluation-thread thread))))
      (sb-thread::start-thread thread #'run-lane-thread (list lane)))))

(defun start-lanes ()
  "Start the threads of all lanes."
  (let ((thread (start-lane +evaluation-lane+)))
    ;; Before anything of the user's can ask for it.
    (setf (sb-thread:thread-name thread) "main thread"
          sb-thread::*initial-thread* thread))
  (mapc #'start-lane (list +inspection-lane+ +control-lane+ +signal-lane+)))
