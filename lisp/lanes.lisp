;;;; The Lisp threads that pull jobs from the host.

(in-package "SBCL-HOST")

(defglobal **lane-threads** (make-array 4 :initial-element nil)
  "The thread of each lane.")

(defglobal **boot-thread** nil
  "The thread that booted the image, which is the host's again and serves nothing.")

(defun host-thread-p (thread)
  "True when THREAD is the host's: what the user's code sees is a main thread, which evaluates, and the threads that it
made."
  (or (eq thread **boot-thread**)
      (and (find thread **lane-threads** :test #'eq)
           (not (eq thread (sb-thread:main-thread))))))

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
    (:query (run-guarded-inspection (lambda () (run-query (job-operation job)))))
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

(defun do-job (job)
  "Do JOB and tell the host that it is over. Return true when it succeeded."
  (let ((success nil)
        (*job-id* (job-id job)))
    ;; A job that was held ends as another one.
    (unwind-protect (let ((sb-thread::*interrupt-handler* nil))
                      (setf success (run-job job)))
      (finish-output-of-job)
      (done success))))

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
              do (do-job job))))))

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
