;;;; Abandoning and interrupting evaluations, and the bookkeeping of an evaluation that ends early.

(in-package "SBCL-HOST")

;;; Abandoning an evaluation
(defvar *unwind-evaluation* nil
  "A function without arguments that unwinds to the end of the evaluation; NIL when this thread runs no evaluation that
could be abandoned.")

(defvar *after-unwinding* nil
  "A function without arguments to call once a failed evaluation has unwound, or NIL.")

(declaim (type fixnum *collection-count*))
(defvar *collection-count* 0
  "The number of garbage collections that this thread has caused during its evaluation, apart from the collections of
COLLECT-RECENT-GARBAGE.")

(declaim (ftype (function () (values (unsigned-byte 62) &optional)) heap-use))
(defun heap-use ()
  "Return the number of bytes of the heap's pages that contain objects, including garbage. SBCL's DYNAMIC-USAGE counts the
objects alone, but an object that is larger than a page leaves a part of its last page empty, up to almost half of its
pages. Pages that a thread has reserved do not count while they are empty."
  (let ((pages (extern-alien "page_table" (* (struct sb-vm::page)))))
    (* sb-c:+backend-page-bytes+
       (the (unsigned-byte 31)
            (loop for index of-type (signed-byte 32) below (extern-alien "next_free_page" (signed 32))
                  ;; The lowest bit is a flag.
                  count (< 1 (slot (deref pages index) 'sb-vm::words-used*)))))))

(declaim (type (unsigned-byte 61) **page-waste**))
(defglobal **page-waste** 0
  "The number of bytes that HEAP-USE counted in addition to DYNAMIC-USAGE when MEASURE-PAGE-WASTE was last called.")

(defun measure-page-waste ()
  "Set **PAGE-WASTE**. Call this function after each collection."
  (setf **page-waste** (max 0 (- (heap-use) (sb-kernel:dynamic-usage)))))

(defun kept-bytes ()
  "Return the number of bytes of the pages that contained what survived the last collection. Like the host, compute the bytes
of the objects from the trigger of the next collection."
  (let* (;; ADAPT-NURSERY stores the trigger after the step.
         (trigger (sb-thread:barrier (:read) (extern-alien "auto_gc_trigger" (unsigned 64))))
         (step (extern-alien "bytes_consed_between_gcs" (unsigned 64))))
    (+ **page-waste** (if (< step trigger (ash 1 61)) (- trigger step) 0))))

(declaim (type (unsigned-byte 64) *kept-bytes-before-evaluation*))
(defvar *kept-bytes-before-evaluation* 0
  "The number of bytes that survived the last collection before this evaluation.")

(defvar *ended-for-heap* nil
  "True once this evaluation was ended because the heap was nearly full.")

(defun abandon-evaluation (reason finish)
  "Unwind to the end of the evaluation, and make the evaluation fail for REASON, a value of *FAILURE-REASON*. FINISH is a
function to call after the unwinding, or NIL."
  (setf *failure-reason* reason
        *after-unwinding* finish)
  (funcall (the function *unwind-evaluation*)))

(defun resume-failure-unwinding ()
  "If the evaluation has failed, but a cleanup form has stopped its unwinding, continue the unwinding."
  (when *failure-reason*
    (funcall (the function *unwind-evaluation*))))

(defun call-until-abandoned (function)
  "Call FUNCTION, which evaluates user code. Return its value and true; or NIL and NIL when it failed."
  (declare (type function function))
  (let ((*on-debugger* nil)
        (*failure-reason* nil)
        (*after-unwinding* nil)
        (*collection-count* 0)
        (*kept-bytes-before-evaluation* (kept-bytes))
        (*capturing-interruption* nil)
        (*ended-for-heap* nil))
    (block evaluation
      (flet ((abandon () (return-from evaluation)))
        (declare (dynamic-extent #'abandon))
        (let* ((*unwind-evaluation* #'abandon)
               (value (funcall function)))
          (unless *failure-reason*
            (return-from call-until-abandoned (values value t))))))
    (let ((finish *after-unwinding*))
      (when finish
        ;; Clear the unused part of the stack. FINISH may collect garbage, and stale references in the stack area that its
        ;; frames will occupy would keep the evaluation's garbage alive.
        (sb-sys:scrub-control-stack)
        (funcall (the function finish)))))
  (values nil nil))

(defun unwind-from-stack-end (stack)
  "End this thread's evaluation, or the thread itself if it runs no evaluation. Called when STACK, a value of the C enum
sbcl_stack, is exhausted again while the first exhaustion is being handled. Little room is left on the stack. If the
cleanup forms use up this room, too, this function is called again."
  (unless *unwind-evaluation*
    (sb-thread:abort-thread))
  (if *failure-reason*
      (funcall (the function *unwind-evaluation*))
      (abandon-evaluation
       :error
       (let ((name (ecase stack
                     (#.(declared-number "SBCL_STACK_CONTROL") "Control")
                     (#.(declared-number "SBCL_STACK_BINDING") "Binding")
                     (#.(declared-number "SBCL_STACK_ALIEN") "Alien"))))
         (lambda ()
           (event *job-id* (event-code :error) 0 (format nil "SB-KERNEL::~:@(~A~)-STACK-EXHAUSTED" name))
           (event *job-id* (event-code :error-text) 0
                  (format nil "The ~(~A~) stack was exhausted again while the first exhaustion was being handled: ~
                               handlers and cleanup forms must not use much stack." name)))))))

;;; Locks for which an evaluation waits
(defun lock-owner (owner)
  "Return the phrase that names OWNER, a value of MUTEX-OWNER, in a sentence: an evaluation or a thread. The second value is
the number of the evaluation that is held in OWNER, or NIL."
  (flet ((value (variable)
           (sb-thread:symbol-value-in-thread variable owner nil)))
    (if (typep owner 'sb-thread:thread)
        (let* ((held (value '*held-evaluation*))
               (evaluation (value '*evaluation*))
               (number (or held (and evaluation (evaluation-number evaluation)))))
          (values (format nil "~:[~A~@[ of evaluation ~D~]~;~*evaluation ~D~]"
                          (and number (find owner **evaluation-threads** :test #'eq)) (thread-title owner) number)
                  held))
        "a thread that has ended")))

(defun notify-of-lock (job-id thread)
  "If THREAD, which performs the evaluation job JOB-ID, waits for a lock, notify the user of the lock and its owner. Another
thread calls this function before it interrupts THREAD at a time limit, because SBCL hides the lock from THREAD's own
interruptions (WITHOUT-THREAD-WAITING-FOR in src/code/thread.lisp). A wait with a time limit of its own is not found: SBCL
keeps its lock in a list on the stack of THREAD."
  (let* ((lock (sb-thread::thread-waiting-for thread))
         (owner (and (typep lock 'sb-thread:mutex)
                     (find thread **evaluation-threads** :test #'eq)
                     ;; An earlier interruption may wait for a lock, too, to print the frames.
                     (not (sb-thread:symbol-value-in-thread '*capturing-interruption* thread nil))
                     (sb-thread:mutex-owner lock))))
    (when owner
      (multiple-value-bind (title held) (lock-owner owner)
        (let ((*job-id* job-id))
          (push-notice "At the time limit, this evaluation was waiting for ~:[a lock without a name~;the lock ~:*~S~], ~
                        which ~A owns.~@[ Evaluation ~D is held for debugging: to free the lock, the client that holds the ~
                        evaluation must choose one of its restarts, or abort it.~]"
                       (sb-thread:mutex-name lock) title held))))))

;;; Interrupting an evaluation
(defun capture-interruption (reason hook)
  "Push an error for the interruption of this evaluation, with the frames of the interrupted code, and return the values of
CAPTURE-ERROR. REASON is a value of the C enum sbcl_interrupt, such as +INTERRUPT-TIMEOUT+. HOOK is the frame pointer of the
function that the interruption called."
  (let ((*on-debugger* nil)
        (*capturing-interruption* t))
    ;; Allow interrupts, because printing an argument might never end. An interruption that arrives here unwinds without
    ;; capturing frames again.
    (with-interrupts
      (capture-error (cond ((eql reason +interrupt-timeout+) "TIMEOUT")
                           ((eql reason +interrupt-cancel+) "CANCELLED")
                           (t "HEAP-EXHAUSTED"))
                     (lambda ())
                     nil
                     (lambda () (interrupted-frame hook))))))

(defconstant +max-interrupt-contexts+ 5
  "The number of a thread's interrupt contexts beyond which no further user code is called in handlers. Each trap, collection
and interruption whose handler runs has a context. SBCL ends the process when a thread has more than SB-VM:MAX-INTERRUPTS
contexts; the remaining contexts are for collections, faults and interruptions in the code that still runs.")

(declaim (inline few-interrupt-contexts-left-p))
(defun few-interrupt-contexts-left-p (&optional (contexts sb-kernel:*free-interrupt-context-index*))
  "Return true when so many handlers run in this thread that they must call no further user code. CONTEXTS is the number of
interrupt contexts in use."
  (> contexts +max-interrupt-contexts+))

(define-condition interrupt-contexts-exhausted (storage-condition) ()
  (:report "Handlers of errors, garbage collections or interruptions are nested too deeply in this thread.")
  (:documentation "The error with which code fails that signals an error while few interrupt contexts are left."))

(defun count-nested-error (infinite-error-protector)
  "Call INFINITE-ERROR-PROTECTOR, SBCL's function, which returns the number of errors that are being signalled. Errors that
are nested in handlers may use up the interrupt contexts before they reach SBCL's limit: while few contexts are left, enter
the debugger without calling handlers. The code that reports an error handles its own errors, and may use one more context.
At SBCL's limit, enter the debugger, too. SBCL's function would print a backtrace first, and replace the standard streams of
the image if an error occurs in the debugger."
  (declare (type function infinite-error-protector))
  ;; Handlers would run in the contexts that are in use now, and an interruption of the handlers needs one more.
  (cond ((few-interrupt-contexts-left-p (- sb-kernel:*free-interrupt-context-index* (if *quiet-debugger* 1 0)))
         (invoke-debugger (make-condition 'interrupt-contexts-exhausted)))
        ((and (host-started-p) (> sb-kernel::*current-error-depth* sb-kernel:*maximum-error-depth*))
         (invoke-debugger (make-condition 'simple-error :format-control "Maximum error nesting depth exceeded")))
        (t (funcall infinite-error-protector))))

(defconstant +max-nested-interruptions+ 4
  "The maximum number of interruptions that interrupt each other in a thread.")

(defvar *interruption-waits* nil
  "True when an interruption waits until the innermost running interruption has ended.")

(defvar *interruption-timer* nil
  "The number of the timer that makes this thread look for queued interruptions again, or NIL.")

(defun run-interruption-unless-nested (run-interruption)
  "Call RUN-INTERRUPTION, SBCL's function, which runs this thread's next interruption. When interruptions that enable
interrupts have interrupted each other too often, leave the next one queued until the innermost one has ended. When few
interrupt contexts are left for another reason, leave the next one queued for a millisecond: an interruption that unwinds,
such as TERMINATE-THREAD's, receives the next one while its own context is still in use."
  (declare (type function run-interruption))
  (when *interruption-timer*
    (end-interruption-timer (shiftf *interruption-timer* nil)))
  (cond ((and (< *nested-interruptions* +max-nested-interruptions+)
              ;; This interruption's own context does not count.
              (not (few-interrupt-contexts-left-p (1- sb-kernel:*free-interrupt-context-index*))))
         (let ((*nested-interruptions* (1+ *nested-interruptions*))
               (*interruption-waits* nil))
           (unwind-protect (funcall run-interruption)
             (when *interruption-waits*
               (sb-unix:raise sb-unix:sigurg)))))
        ((plusp *nested-interruptions*)
         (setf *interruption-waits* t))
        (#+linux (setf *interruption-timer* (start-interruption-timer))
         #-linux nil)
        ;; Without a timer, the thread might never look for the interruption again.
        (t (funcall run-interruption))))
