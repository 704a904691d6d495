;;;; The Lisp threads that pull jobs from the host. Each thread serves a lane (enum sbcl_lane): evaluation, inspection,
;;;; control or signals. When an inspection takes long, another thread takes over the inspection lane.

(in-package "SBCL-HOST/EMBEDDING")

(defglobal **lane-threads** (make-array 4 :initial-element nil)
  "A vector of the threads that serve the inspection, control and signal lanes, indexed by lane. The evaluation threads are in
**EVALUATION-THREADS**.")

(defglobal **inspection-threads** '()
  "The thread that serves the inspection lane, and the threads that no longer serve this lane, but still run an inspection.")

(defglobal **abandoned-threads** nil
  "Threads that no longer serve a lane because they did not react to an interruption. User code sees these threads
among its own threads.")

(defun host-thread-p (thread)
  "Return true when THREAD belongs to the host. Evaluated code sees only a main thread, which evaluates in the foreground, the
thread that it runs in, and the threads of user code. Code that runs in a call of the embedding program does not see its own
thread."
  (or (program-thread-p thread)
      (find thread **lane-threads** :test #'eq)
      (find thread **inspection-threads** :test #'eq)
      (and (find thread **evaluation-threads** :test #'eq)
           (not (eq thread (sb-thread:main-thread)))
           (not (eq thread sb-thread:*current-thread*)))))

(defun run-reset ()
  "Perform a :RESET job: end the user's threads, remove the session's definitions and reset its variables. Return true."
  (let ((threads (user-threads)))
    (end-threads threads)
    (await-threads threads))
  (setf * nil ** nil *** nil + nil ++ nil +++ nil / nil // nil /// nil - nil)
  (clrhash **connections**)
  (let ((left (remove-definitions)))
    (when left
      (event *job-id* (event-code :notice) 0
             (with-server-syntax ()
               (format nil "The reset could not remove ~:[these definitions~;this definition~], which will last until the ~
                            server ends: ~{~A~^, ~}."
                       (null (rest left)) left)))))
  (let ((count (count-if #'sb-thread:thread-alive-p **abandoned-threads**)))
    (when (plusp count)
      (event *job-id* (event-code :notice) 0
             (format nil "The reset could not end ~D interrupted evaluation~:P or inspection~:P. To end ~:[them~;it~], ~
                          restart the server."
                     count (= count 1)))))
  (reset-variable-values)
  (install-standard-streams)
  t)

(defun record-initial-variable-values ()
  "Record the current values of printer variables, reader variables and others as the values with which a session begins."
  (setf **initial-variable-values**
        (mapcar (lambda (variable) (cons variable (symbol-value variable)))
                '(*print-array* *print-base* *print-case* *print-circle* *print-escape* *print-gensym* *print-length*
                  *print-level* *print-lines* *print-miser-width* *print-pprint-dispatch* *print-pretty* *print-radix*
                  *print-readably* *print-right-margin* *read-base* *read-default-float-format* *read-eval*
                  *read-suppress* *readtable* sb-ext:*evaluator-mode* sb-ext:*invoke-debugger-hook* *debugger-hook*
                  *break-on-signals* *macroexpand-hook* *gensym-counter* *features* sb-c::*policy*
                  *default-pathname-defaults*))))

(defun reset-variable-values ()
  "Reset the variables in **INITIAL-VARIABLE-VALUES** to the values with which a session begins."
  (loop for (variable . value) in **initial-variable-values**
        do (publish (symbol-value variable)
                    (case variable
                      (*readtable* (copy-readtable nil))
                      (*print-pprint-dispatch* (copy-pprint-dispatch nil))
                      (t value)))))

(defun find-job-thread (job-id)
  "Return the thread that performs the job with the number JOB-ID, or NIL. Wait up to 10 ms for such a thread, because
the job may be about to begin."
  (loop repeat 10
        do (dolist (thread (append **inspection-threads** **evaluation-threads**))
             (when (eql job-id (logandc2 (or (ignore-errors (sb-thread:symbol-value-in-thread '*job-id* thread nil)) 0)
                                         +job-signalled+))
               (return-from find-job-thread thread)))
           (sleep 0.001)))

(defun run-interrupt (job)
  "Perform an :INTERRUPT job. JOB's argument is the number of the job to interrupt, or 0 for none. Notify the host when the
thread of that job takes the interruption, or at once if there is no such thread. JOB's flags are the reason for the
interruption. If the reason is a time limit, also notify the user of the lock for which that thread waits. If the reason is
that the heap is nearly full, also end threads of the user."
  (let ((target (job-argument job))
        (reason (job-flags job)))
    (when (eql reason +interrupt-heap+)
      (end-threads-for-heap))
    (unless (zerop target)
      (guarded (let ((thread (or (find-job-thread target) (error "Job ~D has no thread." target))))
                 (when (eql reason +interrupt-timeout+)
                   (guarded (notify-of-lock target thread) (failure) nil))
                 (interrupt-outside-foreign-code
                  thread
                  (lambda ()
                    (event target (event-code :interrupted))
                    (cond ((not (eql reason +interrupt-heap+)) (interrupt-evaluation target reason))
                          ;; The end of a garbage collection may already have ended this evaluation.
                          ((and (eql target *job-id*) (not *ended-for-heap*)) (end-evaluation-for-heap))))))
          (failure)
        (event target (event-code :interrupted))))))

(defun run-start-thread (job)
  "Perform a :START-THREAD job: start a thread for the lane whose number is JOB's flags. Notify the host if no thread can be
started. If no thread can take over the inspection lane, its present thread continues to serve it."
  (let ((lane (job-flags job)))
    (guarded (start-lane lane)
        (failure)
      (event 0 (event-code :thread-refused) lane
             (with-server-syntax ()
               (format nil "Lisp could not start another ~:[inspection~;evaluation~] thread: ~A"
                       (eql lane +evaluation-lane+) failure))))))

(defun run-abandon (job)
  "Perform an :ABANDON job. JOB's argument is the number of another job, whose thread no longer serves its lane from now on.
JOB's flags are the lane's number. If the lane is the inspection lane, and no other thread has taken it over, start another
thread for it."
  (let ((thread (find-job-thread (job-argument job)))
        (lane (job-flags job)))
    (when thread
      (setf (sb-thread:thread-name thread) "abandoned")
      (sb-ext:atomic-push thread **abandoned-threads**)
      (remove-job-thread thread))
    (when (and (eql lane +inspection-lane+)
               (or (null thread) (eq thread (svref **lane-threads** lane))))
      (guarded (start-lane lane)
          (failure)
        (event (job-argument job) (event-code :refused) 0
               (with-server-syntax () (format nil "Lisp could not start a new thread for inspections: ~A" failure)))))))

(defun essential-mutexes ()
  "Return the mutexes that threads need to compile code, to make definitions, to start threads, or to collect garbage."
  (list* sb-thread::*make-thread-lock* **collection-lock** (definition-mutexes)))

(defun report-blocking-mutex ()
  "Perform a :LOOK job: report one of ESSENTIAL-MUTEXES that an abandoned thread holds while other threads wait for the
mutex. Report the empty string if there is no such mutex."
  (sb-ext:atomic-update **abandoned-threads** (lambda (threads) (remove-if-not #'sb-thread:thread-alive-p threads)))
  (let ((mutex (find-if (lambda (mutex)
                          ;; State 2 means that another thread waits for the mutex.
                          (and (eql 2 (mutex-state mutex))
                               (member (sb-thread:mutex-owner mutex) **abandoned-threads** :test #'eq)))
                        (essential-mutexes))))
    (event 0 (event-code :blocked) 0
           (if mutex
               (with-server-syntax () (format nil "the lock ~S" (sb-thread:mutex-name mutex)))
               ""))))

(defun run-job (job)
  "Perform JOB for its connection. Return true when it succeeded."
  (let ((function (gethash (job-kind job) **job-functions**)))
    (declare (type (or null function) function))
    (call-for-connection (job-connection job)
                         (lambda ()
                           (if function
                               (funcall function job)
                               (refuse "No evaluation is held."))))))

(define-job :reset (job)
  "End the user's threads, remove the session's definitions, and reset its variables."
  (with-interrupts (run-reset)))

(define-job :interrupt (job)
  "Interrupt another job."
  (run-interrupt job)
  t)

(define-job :start-thread (job)
  "Start another thread for a lane."
  (run-start-thread job)
  t)

(define-job :abandon (job)
  "Abandon the thread of a job."
  (run-abandon job)
  t)

(define-job :look (job)
  "Report a mutex that an abandoned thread holds while other threads wait for the mutex."
  (report-blocking-mutex)
  t)

(defun contain-interruption (function)
  "Call FUNCTION, with which a timer or another thread interrupts this idle thread of the host. A non-local exit out of
FUNCTION ends here, and an error is reported as an error of a thread."
  (let ((sb-thread::*interrupt-handler* nil))
    (block interruption
      (unwind-protect
           (let ((*on-debugger* (lambda (condition)
                                  (report-thread-error condition (frame-pointer-here))
                                  (return-from interruption))))
             (with-user-code-boundary ()
               (funcall (the function function))))
        (return-from interruption)))))

(defun contain-single-interruption (function)
  "Call FUNCTION as CONTAIN-INTERRUPTION does. Another interruption waits until FUNCTION has returned, so that
interruptions do not nest."
  (without-interrupts (contain-interruption function)))

(defun next-lane-job (lane)
  "Wait for the next job of LANE and return it, or NIL when this thread must end. Pending interruptions of this thread run
just before this function returns: an interruption while NEXT-JOB returns the job could lose the job."
  (without-interrupts
    (prog1 (next-job lane)
      (allow-with-interrupts (with-interrupts nil)))))

(defvar *thread-abandoned* nil
  "True when the host has abandoned this thread, which must end.")

(defun run-and-report-job (job &optional interrupt-handler)
  "Perform JOB. Then notify the host that the job is over, and whether it succeeded. INTERRUPT-HANDLER is called with the
function of an interruption that arrives meanwhile; if it is NIL, the interruption may unwind."
  (let ((success nil)
        (*job-id* (job-id job)))
    ;; If JOB is an evaluation that was held and resumed, the job that is reported here as over is the job that resumed the
    ;; evaluation: see CHANGE-JOB.
    (unwind-protect (let ((sb-thread::*interrupt-handler* interrupt-handler))
                      (setf success (run-job job)))
      (finish-job-output)
      (setf *thread-abandoned* (push-done success)))))

(defun begins-in-background-p (job)
  "Return true when JOB runs in the background from the start."
  (and (eq :evaluate (job-kind job)) (logtest +evaluate-background+ (job-flags job))))

(defun serves-lane-p (lane)
  "Return false once another thread has taken over LANE from this thread."
  (or (eql lane +evaluation-lane+)
      (eq sb-thread:*current-thread* (svref **lane-threads** lane))))

(defun run-lane (lane)
  "Perform the jobs of LANE until the host ends the thread, or another thread has taken over the lane. Between jobs, this
thread can be interrupted only inside NEXT-LANE-JOB, so that no timer keeps it from reporting the end of a job and asking for
the next."
  (let ((*thread-output* (when (eql lane +evaluation-lane+) (make-thread-output)))
        (sb-thread::*interrupt-handler* #'contain-single-interruption))
    (without-interrupts
      (allow-with-interrupts
        (loop until (or *thread-abandoned* (not (serves-lane-p lane)))
              do (let ((job (next-lane-job lane)))
                   (unless job (return))
                   (when (eql lane +evaluation-lane+)
                     (if (begins-in-background-p job)
                         (setf (sb-thread:thread-name sb-thread:*current-thread*) "background")
                         (become-main-thread)))
                   ;; The jobs of the control lane call no user code, and their end must not be lost.
                   (run-and-report-job job (and (eql lane +control-lane+) #'contain-single-interruption))))))))

(defun await-signals ()
  "Make the host forward SBCL's signals to this thread, which has interrupts enabled and nothing else to do. The functions
of timers that were made for no particular thread run in this thread. Never return."
  (next-job +signal-lane+)
  (let ((sb-thread::*interrupt-handler* #'contain-interruption))
    (with-interrupts (loop (sleep 86400)))))

(defun remove-job-thread (thread)
  "Remove THREAD from the threads that evaluate or inspect."
  (sb-ext:atomic-update **evaluation-threads** (lambda (threads) (remove thread threads)))
  (sb-ext:atomic-update **inspection-threads** (lambda (threads) (remove thread threads))))

(defun call-with-replacement (function threads number replace)
  "Call FUNCTION, the work of this thread, which is element NUMBER of the vector THREADS. If user code ends the thread
before FUNCTION has returned, call REPLACE, which starts another thread for the work. If no thread can be started, this
thread does not end, but calls FUNCTION again. Interrupts are off outside FUNCTION: a second interruption that ends the thread
must not keep REPLACE from starting the other thread. FUNCTION turns interrupts on when it has set *INTERRUPT-HANDLER*:
otherwise, user code that ends each new thread at once would keep all of them from working."
  (declare (type function function replace) (type simple-vector threads) (type index number))
  (without-interrupts
    (loop
      (block work
        (let ((finished nil))
          (unwind-protect
               (progn (allow-with-interrupts (funcall function))
                      (setf finished t))
            (unless finished
              (guarded (funcall replace)
                  (failure)
                (setf (svref threads number) sb-thread:*current-thread*)
                (return-from work)))))
        (return)))))

(defun run-lane-thread (lane)
  "Serve LANE in this thread, which START-LANE started with interrupts off. If user code ends the thread, start another
thread for LANE; but an evaluation thread is replaced only when the host asks for another thread."
  (if (eql lane +evaluation-lane+)
      (unwind-protect (run-lane lane)
        (remove-job-thread sb-thread:*current-thread*)
        (event 0 (event-code :thread-ended)))
      (unwind-protect
           (progn
             (setf (svref **lane-threads** lane) sb-thread:*current-thread*)
             (call-with-replacement (lambda () (if (eql lane +signal-lane+) (await-signals) (run-lane lane)))
                                    **lane-threads**
                                    lane
                                    (lambda ()
                                      (when (and (serves-lane-p lane) (not *thread-abandoned*))
                                        (start-lane lane)))))
        (remove-job-thread sb-thread:*current-thread*))))

(defun start-lane (lane)
  "Start a thread for LANE and return it. The thread takes over the inspection lane from the thread that serves it."
  (let ((thread (sb-thread::%make-thread (svref #("evaluation" "inspection" "control" "signals") lane)
                                         nil (sb-thread:make-semaphore))))
    (cond ((eql lane +evaluation-lane+)
           (sb-ext:atomic-push thread **evaluation-threads**))
          ((eql lane +inspection-lane+)
           (sb-ext:atomic-push thread **inspection-threads**))
          (t
           (publish (svref **lane-threads** lane) thread)))
    (handler-bind ((error (lambda (failure)
                            (declare (ignore failure))
                            (remove-job-thread thread))))
      (start-host-thread thread #'run-lane-thread (list lane)))))

(defun start-lanes ()
  "Start the threads of all lanes."
  ;; The threads of a saved image do not exist in this process.
  (setf **evaluation-threads** '()
        **inspection-threads** '())
  (let ((thread (start-lane +evaluation-lane+)))
    ;; Name the thread and make it the main thread before any user code can ask for the main thread.
    (setf (sb-thread:thread-name thread) "main thread"
          sb-thread::*initial-thread* thread))
  (mapc #'start-lane (list +inspection-lane+ +control-lane+ +signal-lane+)))
