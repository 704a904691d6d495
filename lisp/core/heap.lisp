;;;; When the heap is nearly used up: what fills it is stopped, and its garbage collected. It is looked at after each
;;;; collection, in the thread that caused it; by the host as well while evaluations run, for what is between collections
;;;; and for threads that let nothing interrupt them.

(in-package "SBCL-HOST")

(defconstant +nursery+ (* 64 1024 1024)
  "Bytes that are allocated between two collections while little is kept. SBCL's own choice is a twentieth of the heap:
most of it would be memory that was never touched before, which costs more to get than it costs to collect more often.")

(declaim (type (unsigned-byte 64) **nursery** **largest-nursery**))
(defglobal **nursery** 0
  "The bytes between two collections that were last decided on here.")
(defglobal **largest-nursery** 0
  "SBCL's own choice of them.")

(defun limit-nursery ()
  "Have garbage collected after +NURSERY+ bytes, the first time as well."
  (setf **largest-nursery** (sb-ext:bytes-consed-between-gcs)
        **nursery** (min +nursery+ **largest-nursery**)
        (sb-ext:bytes-consed-between-gcs) **nursery**))

(defconstant +least-nursery+ (* 1024 1024)
  "Bytes that are allocated between two collections at least, whatever the user sets: as many as in the smallest heap of
SBCL's own (coreparse.c). With fewer, what handles an error collects at each turn, on what little is left of the stack.")

(declaim (type (or null (unsigned-byte 62)) **asked-nursery**))
(defglobal **asked-nursery** nil
  "The bytes between two collections that the user has set, when they are fewer than +LEAST-NURSERY+; else NIL.")

(defun read-nursery (read)
  "What READ, SBCL's BYTES-CONSED-BETWEEN-GCS, does: return what was set."
  (let ((bytes (funcall (the function read))))
    (or (and (eql bytes +least-nursery+) **asked-nursery**)
        bytes)))

(defun set-nursery (set bytes)
  "What SET, SBCL's (SETF BYTES-CONSED-BETWEEN-GCS), does with BYTES, or with +LEAST-NURSERY+ if that is more."
  (let ((few (and (typep bytes 'index) (< bytes +least-nursery+))))
    (funcall (the function set) (if few +least-nursery+ bytes))
    (setf **asked-nursery** (and few bytes))
    bytes))

(defun nursery-set-by-user ()
  "Return the bytes between two collections if the user has set them, else NIL."
  (let ((bytes (sb-ext:bytes-consed-between-gcs)))
    (and (/= bytes **nursery**) bytes)))

(defglobal **kept-before** 0
  "Bytes in use when the first of the user's threads began that there are.")

(defun heap-limit (&optional (kept **kept-before**))
  "Return how many bytes the user's threads may keep, as the host reckons for evaluations; or what has begun with KEPT
bytes in use."
  (let ((size (sb-ext:dynamic-space-size)))
    (max (* 2 (floor size 5)) (+ kept (floor size 6)))))

(defglobal **collecting** (sb-thread:make-mutex :name "collecting")
  "Held while COLLECT-WHAT-WAS-NEW does: SBCL's GC does nothing when another thread has just finished one.")

(defun collect-generations (oldest)
  "Collect the generations up to OLDEST (0 to 5), which nothing leaves for the next one."
  (symbol-macrolet ((limit (extern-alien "gencgc_oldest_gen_to_gc" (signed 8))))
    (let ((before limit))
      (unwind-protect
           (progn
             (setf limit oldest)
             (sb-ext:gc :gen (1+ oldest)))
        (setf limit before)))))

(defun collect-what-was-new (kept)
  "Collect what was allocated since KEPT bytes were in use: in the first two generations without regard to room, since
that goes before more is copied; then in as many more as collections in the meantime have put it in, as long as what is
in use can be copied. Each of them copies what the session keeps once more."
  (sb-thread:with-mutex (**collecting**)
    (sb-ext:gc :gen 2)
    (let ((size (sb-ext:dynamic-space-size)))
      (loop for oldest from 2 to 5
            while (< (+ kept (floor size 20)) (sb-kernel:dynamic-usage) (floor size 2))
            do (collect-generations oldest)))))

(defun megabytes (bytes)
  "Return BYTES in millions."
  (ceiling bytes 1000000))

(defglobal **ending-threads** '()
  "The threads that END-THREADS-FOR-HEAP has ended, until they are gone and so is what they have left.")

(defglobal **cleared-up-after** '()
  "The value of **ENDING-THREADS** that CLEAR-UP-AFTER-THREADS was the last to clear up after.")

(defun nursery-for (kept)
  "Return the bytes between two collections that are right where the last one has left KEPT bytes. They are few at first.
Once as much as +NURSERY+ is kept they are SBCL's own choice: what is kept would be copied too often. While threads are
being ended that fill the heap, they are what is left of it: there may be no room to copy what those keep until they
have unwound, and a collection that finds none ends the process."
  (cond ((and **ending-threads** (> kept (heap-limit))) (max +least-nursery+ (- (sb-ext:dynamic-space-size) kept)))
        ((< kept +nursery+) (min +nursery+ **largest-nursery**))
        (t **largest-nursery**)))

(defglobal **adapting-nursery** (sb-thread:make-mutex :name "nursery")
  "Held, with interrupts off, while ADAPT-NURSERY looks and sets: several threads may, and each of them may be ended.")

(defun adapt-nursery ()
  "Have garbage collected the next time when that is right where the last collection has left what is in use now. What
the user sets stays."
  (sb-thread::with-system-mutex (**adapting-nursery**)
    (let* ((kept (sb-kernel:dynamic-usage))
           (size (nursery-for kept)))
      (unless (or (= size **nursery**) (nursery-set-by-user))
        (setf **nursery** size
              (sb-ext:bytes-consed-between-gcs) size
              ;; For this time already. The host takes the difference of the two for what is kept.
              (extern-alien "auto_gc_trigger" (unsigned 64)) (+ kept size))))))

(defun end-threads-for-heap ()
  "End the user's threads, for the heap is nearly used up and nobody can tell which of them fills it. Say so."
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
        ;; Once more: it may have looked already, and the next collection is far.
        (sb-impl::finalizer-thread-notify 1)
        (when (find self threads)
          (sb-thread:abort-thread))))))

(defun heap-full-p ()
  "True when more is kept than the evaluation of this thread may keep."
  (event *job-id* (event-code :heap)))

(defun heap-cleared-p ()
  "True when the evaluation of this thread, which is to end for the heap, may go on: threads had filled that, and what
they have left is collected by now. There may be no room to collect with what an evaluation keeps that fills the heap
itself, so its end comes first."
  (or (not (heap-full-p))
      (and **ending-threads**
           (< *collections* 3)
           (progn
             (await-threads **ending-threads**)
             (collect-what-was-new **kept-before**)
             (not (heap-full-p))))))

(defun collect-and-report (kept part)
  "Collect the garbage of an evaluation that was filling the heap, where KEPT bytes were in use before it, and push what
is left. PART: which part of it did so, a string, or NIL."
  (let ((used (sb-kernel:dynamic-usage)))
    (await-threads **ending-threads**)
    (collect-what-was-new kept)
    (event *job-id* (event-code :error-text) 0
           (with-server-syntax ()
             (format nil "The heap was nearly used up (~D of ~D MB~@[, most of it by ~A~]), so the evaluation was ~
                          stopped. ~D MB are still in use now, by what the session holds on to."
                     (megabytes used) (megabytes (sb-ext:dynamic-space-size)) part
                     (megabytes (sb-kernel:dynamic-usage)))))))

(defvar *end-part-for-heap* nil
  "A function that unwinds from the part of the evaluation that runs, such as a test, when the heap is nearly used up, of the
frame pointer of whoever calls it; or NIL: all of it ends. It returns while that part is being ended already.")

(defvar *ended-part* nil
  "What part of the evaluation was ended for the heap without success, a string, or NIL.")

(defun clear-up-after-part (part)
  "Collect what PART of the evaluation, a string, has left that was ended for the heap; end the evaluation if that is still
full."
  (sb-sys:scrub-control-stack)
  (collect-what-was-new *kept*)
  (let ((*ended-part* part)
        (*end-part-for-heap* nil))
    (end-evaluation-for-heap)))

(defun end-evaluation-for-heap ()
  "End the evaluation of this thread, as INTERRUPT-EVALUATION does, or the part of it that runs, unless what filled the heap
is gone. Called by an interrupt, and after each collection."
  (let ((job-id *job-id*)
        (kept *kept*)
        (part *ended-part*))
    (when (and *abandon* (not (heap-cleared-p)))
      (when (and *end-part-for-heap* (not *failed*))
        (funcall (the function *end-part-for-heap*) (frame-pointer-here))
        ;; It is being ended.
        (return-from end-evaluation-for-heap nil))
      (unless (or *interrupted* (eql job-id **ended-for-heap**))
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
  (:documentation "What a thread that works for the program keeps leaves too little room for collections."))

(defvar *watching-heap* nil
  "True while this thread does what WATCH-HEAP does. What that allocates may have garbage collected once more, each time
in a signal handler within the one before: of these SBCL takes eight.")

(declaim (type (or null (unsigned-byte 62)) *kept-before-call*))
(defvar *kept-before-call* nil
  "Bytes in use when the call began by which a program that embeds the image uses this thread; NIL outside of one.")

(defun fail-call-for-heap ()
  "Signal that the heap is nearly used up if a program's call of this thread keeps more than it may."
  (let ((kept *kept-before-call*)
        (used (sb-kernel:dynamic-usage)))
    (when (and kept (> used (heap-limit kept)))
      (let ((*watching-heap* nil))
        (error 'heap-nearly-exhausted :used used :size (sb-ext:dynamic-space-size))))))

(defun clear-up-after-call ()
  "Collect what a call has left that was ended for the heap."
  (sb-sys:scrub-control-stack)
  (collect-what-was-new (or *kept-before-call* 0)))

(defun watch-heap ()
  "End what fills the heap: the user's threads, and the evaluation if this is its thread. Called after each collection in
the thread that caused it, which may be one of them: it ends last, and here."
  (adapt-nursery)
  ;; What is collected because something has ended may take more than one collection.
  (unless (sb-thread:holding-mutex-p **collecting**)
    (when (> (sb-kernel:dynamic-usage) (heap-limit))
      (end-threads-for-heap))
    (when *abandon*
      (incf *collections*)
      (end-evaluation-for-heap))
    (fail-call-for-heap)))

(defun watch-after-collection (post-gc)
  "What SBCL's POST-GC does, and then WATCH-HEAP."
  (funcall (the function post-gc))
  (unless *watching-heap*
    (let ((*watching-heap* t))
      (watch-heap))))

(defun clear-up-after-threads ()
  "Collect what the threads have left that END-THREADS-FOR-HEAP has ended. Called after each collection, in a thread of
SBCL's own."
  (when (and **ending-threads** (not (eq **ending-threads** **cleared-up-after**)))
    (setf **cleared-up-after** **ending-threads**)
    (await-threads **ending-threads**)
    (collect-what-was-new **kept-before**)
    (setf **ending-threads** (remove-if-not #'sb-thread:thread-alive-p **ending-threads**)
          **cleared-up-after** **ending-threads**)))
