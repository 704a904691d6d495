;;;; Limits on heap use. What fills the heap is stopped and its garbage collected. The thread that caused a collection
;;;; checks the heap after it. The host checks the heap too while evaluations run: between collections, and when threads
;;;; do not accept interrupts.

(in-package "SBCL-HOST")

(defconstant +nursery+ (* 64 1024 1024)
  "The number of bytes allocated between two collections while little is kept. SBCL's own choice is a twentieth of the
heap: most of that is memory never touched before, and page faults cost more than more frequent collections.")

(declaim (type (unsigned-byte 64) **nursery** **largest-nursery**))
(defglobal **nursery** 0
  "The bytes between two collections that this file set last.")
(defglobal **largest-nursery** 0
  "SBCL's own choice of the bytes between two collections.")

(defun limit-nursery ()
  "Collect garbage after +NURSERY+ bytes, from the first collection on."
  (setf **largest-nursery** (sb-ext:bytes-consed-between-gcs)
        **nursery** (min +nursery+ **largest-nursery**)
        (sb-ext:bytes-consed-between-gcs) **nursery**))

(defconstant +minimum-nursery+ (* 1024 1024)
  "The minimum number of bytes between two collections, whatever the user sets: as in the smallest heap of SBCL's own
(coreparse.c). With fewer, error handling would collect at every step, on the little stack that is left.")

(declaim (type (or null (unsigned-byte 62)) **requested-nursery**))
(defglobal **requested-nursery** nil
  "The bytes between two collections that the user requested, if fewer than +MINIMUM-NURSERY+; else NIL.")

(defun read-nursery (read)
  "Return the value of READ, SBCL's BYTES-CONSED-BETWEEN-GCS; or the value that the user requested, if SET-NURSERY
raised it."
  (let ((bytes (funcall (the function read))))
    (or (and (eql bytes +minimum-nursery+) **requested-nursery**)
        bytes)))

(defun set-nursery (set bytes)
  "Set the bytes between two collections to BYTES by SET, SBCL's (SETF BYTES-CONSED-BETWEEN-GCS), but at least to
+MINIMUM-NURSERY+."
  (let ((few (and (typep bytes 'index) (< bytes +minimum-nursery+))))
    (funcall (the function set) (if few +minimum-nursery+ bytes))
    (setf **requested-nursery** (and few bytes))
    bytes))

(defun nursery-set-by-user ()
  "Return the bytes between two collections if the user has set them, else NIL."
  (let ((bytes (sb-ext:bytes-consed-between-gcs)))
    (and (/= bytes **nursery**) bytes)))

(defglobal **kept-before-user-threads** 0
  "The number of bytes in use when a user thread last started while there were no others.")

(defun heap-limit (&optional (kept **kept-before-user-threads**))
  "Return the maximum number of bytes in use while the user's threads run, or work that started with KEPT bytes in use.
The host computes the limit of an evaluation by the same formula."
  (let ((size (sb-ext:dynamic-space-size)))
    (max (* 2 (floor size 5)) (+ kept (floor size 6)))))

(defglobal **collection-lock** (sb-thread:make-mutex :name "collecting")
  "The lock held by COLLECT-RECENT-GARBAGE, because SBCL's GC does nothing when another thread has just finished a
collection.")

(defun collect-generations (oldest)
  "Collect the generations up to OLDEST (0 to 5) without promoting survivors."
  (symbol-macrolet ((limit (extern-alien "gencgc_oldest_gen_to_gc" (signed 8))))
    (let ((before limit))
      (unwind-protect
           (progn
             (setf limit oldest)
             (sb-ext:gc :gen (1+ oldest)))
        (setf limit before)))))

(defun collect-recent-garbage (kept)
  "Collect what was allocated since KEPT bytes were in use. The first two generations are collected unconditionally,
since most garbage is there and goes before more is copied. Older generations, into which earlier collections may have
promoted garbage, follow as long as there is room to copy what is in use. Each collection of older generations copies
everything that the session keeps."
  (sb-thread:with-mutex (**collection-lock**)
    (sb-ext:gc :gen 2)
    (let ((size (sb-ext:dynamic-space-size)))
      (loop for oldest from 2 to 5
            while (< (+ kept (floor size 20)) (sb-kernel:dynamic-usage) (floor size 2))
            do (collect-generations oldest)))))

(defun megabytes (bytes)
  "Return BYTES in megabytes of a million bytes, rounded up."
  (ceiling bytes 1000000))

(defglobal **ending-threads** '()
  "The threads that END-THREADS-FOR-HEAP has ended and whose garbage might not have been collected yet.")

(defglobal **collected-after-threads** '()
  "The value of **ENDING-THREADS** for which COLLECT-AFTER-THREADS last ran.")

(defun nursery-for (kept)
  "Return the number of bytes to allocate before the next collection, after a collection that left KEPT bytes. The
number is small while KEPT is less than +NURSERY+; above, it is SBCL's own choice, because kept objects would otherwise
be copied too often. While threads that fill the heap are being ended, it is the whole rest of the heap: there may be no
room to copy what these threads keep until they have unwound, and a collection without room ends the process."
  (cond ((and **ending-threads** (> kept (heap-limit))) (max +minimum-nursery+ (- (sb-ext:dynamic-space-size) kept)))
        ((< kept +nursery+) (min +nursery+ **largest-nursery**))
        (t **largest-nursery**)))

(defglobal **nursery-lock** (sb-thread:make-mutex :name "nursery")
  "The lock that ADAPT-NURSERY holds, with interrupts off: several threads may run that function, and each may be ended
at any time.")

(defun adapt-nursery ()
  "Set the trigger of the next collection to suit the bytes in use now. Leave a value that the user has set."
  (sb-thread::with-system-mutex (**nursery-lock**)
    (let* ((kept (sb-kernel:dynamic-usage))
           (size (nursery-for kept)))
      (unless (or (= size **nursery**) (nursery-set-by-user))
        (setf **nursery** size
              (sb-ext:bytes-consed-between-gcs) size
              ;; Takes effect for the next collection. The host computes the kept bytes from the difference of the two
              ;; variables.
              (extern-alien "auto_gc_trigger" (unsigned 64)) (+ kept size))))))

(defun end-threads-for-heap ()
  "End the user's threads because the heap is nearly full and the thread that fills it cannot be identified. Notify the
user."
  (let ((threads (set-difference (user-threads) **ending-threads**))
        (used (sb-kernel:dynamic-usage)))
    (when threads
      (setf **ending-threads** (append threads **ending-threads**))
      (adapt-nursery)
      (event 0 (event-code :notice) 0
             (with-server-syntax ()
               (format nil "The heap was nearly used up (~D of ~D MB), so these were ended: ~A."
                       (megabytes used) (megabytes (sb-ext:dynamic-space-size)) (thread-list threads))))
      (let ((self sb-thread:*current-thread*))
        (end-threads (remove self threads))
        ;; The finalizer thread runs COLLECT-AFTER-THREADS. Notify it again, because it may have checked before these
        ;; threads were ended, and the next collection is far off.
        (sb-impl::finalizer-thread-notify 1)
        (when (find self threads)
          (sb-thread:abort-thread))))))

(defun heap-full-p ()
  "Ask the host whether the evaluation of this thread keeps more than its heap limit. Return true if it does."
  (event *job-id* (event-code :heap)))

(defun heap-cleared-p ()
  "Return true when the evaluation of this thread need not be ended for the heap after all, because ended threads had
filled it and their garbage is collected now. An evaluation that fills the heap itself is ended before its garbage is
collected, since there may be no room to copy what it keeps."
  (or (not (heap-full-p))
      (and **ending-threads**
           (< *collections* 3)
           (progn
             (await-threads **ending-threads**)
             (collect-recent-garbage **kept-before-user-threads**)
             (not (heap-full-p))))))

(defun collect-and-report (kept part)
  "Collect the garbage of an evaluation that was filling the heap and before which KEPT bytes were in use; push the
amount that is still in use. PART is the name of the part of the evaluation that filled the heap, a string, or NIL."
  (let ((used (sb-kernel:dynamic-usage)))
    (await-threads **ending-threads**)
    (collect-recent-garbage kept)
    (event *job-id* (event-code :error-text) 0
           (with-server-syntax ()
             (format nil "The heap was nearly used up (~D of ~D MB~@[, most of it by ~A~]), so the evaluation was ~
                          stopped. ~D MB are still in use now, by what the session holds on to."
                     (megabytes used) (megabytes (sb-ext:dynamic-space-size)) part
                     (megabytes (sb-kernel:dynamic-usage)))))))

(defvar *end-part-for-heap* nil
  "A function of the caller's frame pointer that ends the current part of the evaluation, such as a test, when the heap
is nearly full. It returns only if that part is already being ended. NIL when the whole evaluation is to be ended.")

(defvar *ended-part* nil
  "The name of the part of the evaluation that was ended without freeing the heap, a string, or NIL.")

(defun collect-after-part (part)
  "Collect the garbage of PART, the name of a part of the evaluation that was ended for the heap. End the evaluation if
the heap is still full."
  (sb-sys:scrub-control-stack)
  (collect-recent-garbage *kept-before-evaluation*)
  (let ((*ended-part* part)
        (*end-part-for-heap* nil))
    (end-evaluation-for-heap)))

(defun end-evaluation-for-heap ()
  "End the evaluation of this thread, as INTERRUPT-EVALUATION does, or the current part of it, unless the heap is no
longer full. Called by an interruption and after each collection."
  (let ((job-id *job-id*)
        (kept *kept-before-evaluation*)
        (part *ended-part*))
    (when (and *abandon* (not (heap-cleared-p)))
      (when (and *end-part-for-heap* (not *failure-reason*))
        (funcall (the function *end-part-for-heap*) (frame-pointer-here))
        ;; The part is already being ended.
        (return-from end-evaluation-for-heap nil))
      (unless (or *capturing-interruption* (eql job-id **ended-for-heap**))
        (setf **ended-for-heap** job-id)
        (capture-interruption +interrupt-heap+ (frame-pointer-here)))
      (abandon-evaluation :interrupted
                          (lambda ()
                            (end-programs)
                            (collect-and-report kept part))))))

(define-condition heap-nearly-exhausted (storage-condition)
  ((used :initarg :used :reader heap-nearly-exhausted-used)
   (size :initarg :size :reader heap-nearly-exhausted-size))
  (:report (lambda (condition stream)
             (format stream "The heap is nearly used up: ~D of ~D MB."
                     (megabytes (heap-nearly-exhausted-used condition))
                     (megabytes (heap-nearly-exhausted-size condition)))))
  (:documentation "A thread that works for the program keeps so much that collections have too little room."))

(defvar *watching-heap* nil
  "True while this thread runs WATCH-HEAP. Its allocations may trigger further collections, each in a signal handler
nested in the previous one, and SBCL supports eight of these.")

(declaim (type (or null (unsigned-byte 62)) *kept-before-call*))
(defvar *kept-before-call* nil
  "The number of bytes in use when the embedding program's current call on this thread started; NIL outside a call.")

(defun fail-call-for-heap ()
  "Signal HEAP-NEARLY-EXHAUSTED if the program's current call on this thread keeps more than it may."
  (let ((kept *kept-before-call*)
        (used (sb-kernel:dynamic-usage)))
    (when (and kept (> used (heap-limit kept)))
      (let ((*watching-heap* nil))
        (error 'heap-nearly-exhausted :used used :size (sb-ext:dynamic-space-size))))))

(defun collect-after-call ()
  "Collect the garbage of a call that was ended for the heap."
  (sb-sys:scrub-control-stack)
  (collect-recent-garbage (or *kept-before-call* 0)))

(defun watch-heap ()
  "End what fills the heap: the user's threads, and this thread's evaluation. Called after each collection, in the
thread that caused the collection. If this thread is a user thread, it ends last, in this function."
  (adapt-nursery)
  ;; COLLECT-RECENT-GARBAGE may need more than one collection; do not check between them.
  (unless (sb-thread:holding-mutex-p **collection-lock**)
    (when (> (sb-kernel:dynamic-usage) (heap-limit))
      (end-threads-for-heap))
    (when *abandon*
      (incf *collections*)
      (end-evaluation-for-heap))
    (fail-call-for-heap)))

(defun watch-after-collection (post-gc)
  "Call POST-GC, SBCL's function, and then WATCH-HEAP."
  (funcall (the function post-gc))
  (unless *watching-heap*
    (let ((*watching-heap* t))
      (watch-heap))))

(defun collect-after-threads ()
  "Collect the garbage of threads that END-THREADS-FOR-HEAP has ended. Called after each collection in a thread of SBCL's
own."
  (when (and **ending-threads** (not (eq **ending-threads** **collected-after-threads**)))
    (setf **collected-after-threads** **ending-threads**)
    (await-threads **ending-threads**)
    (collect-recent-garbage **kept-before-user-threads**)
    (setf **ending-threads** (remove-if-not #'sb-thread:thread-alive-p **ending-threads**)
          **collected-after-threads** **ending-threads**)))
