;;;; Limits on heap use. Threads and evaluations that fill the heap are ended, and their garbage is collected. After each
;;;; garbage collection, the thread that caused it checks the heap. While evaluations run, the host checks the heap, too,
;;;; because a thread may fill the heap between collections or accept no interrupts.

(in-package "SBCL-HOST")

(defconstant +small-nursery-size+ (* 64 1024 1024)
  "The number of bytes allocated between two collections while few bytes survive them. By default, SBCL allocates a
twentieth of the heap between collections. Most of this memory was never touched before, and its page faults cost more
than frequent collections.")

(declaim (type (unsigned-byte 64) **nursery-size** **default-nursery-size**))
(defglobal **nursery-size** 0
  "The number of bytes to allocate between two collections, as LIMIT-NURSERY or ADAPT-NURSERY last set it.")
(defglobal **default-nursery-size** 0
  "SBCL's default number of bytes between two collections, a twentieth of the heap.")

(defun limit-nursery ()
  "Make SBCL collect garbage after every +SMALL-NURSERY-SIZE+ bytes, or after its default number of bytes, if less.
ADAPT-NURSERY may change the number of bytes after each collection."
  (measure-page-waste)
  (setf **default-nursery-size** (sb-ext:bytes-consed-between-gcs)
        **nursery-size** (min +small-nursery-size+ **default-nursery-size**)
        (sb-ext:bytes-consed-between-gcs) **nursery-size**))

(defconstant +minimum-nursery-size+ (* 1024 1024)
  "The minimum number of bytes between two collections, even if the user requests fewer. SBCL uses the same minimum in
coreparse.c. With fewer bytes, the code that handles an exhausted stack would trigger a collection at every step, on the
little stack that is left.")

(declaim (type (or null (unsigned-byte 62)) **requested-nursery-size**))
(defglobal **requested-nursery-size** nil
  "The number of bytes between two collections that the user requested, if less than +MINIMUM-NURSERY-SIZE+; else NIL.")

(defun read-nursery (read)
  "Call READ, SBCL's BYTES-CONSED-BETWEEN-GCS, and return its value, the number of bytes between two collections. If
SET-NURSERY raised the number that the user requested, return the requested number instead."
  (let ((bytes (funcall (the function read))))
    (or (and (eql bytes +minimum-nursery-size+) **requested-nursery-size**)
        bytes)))

(defun set-nursery (set bytes)
  "Set the number of bytes between two collections to BYTES, or to +MINIMUM-NURSERY-SIZE+ if BYTES is less, and return BYTES.
SET is SBCL's function (SETF BYTES-CONSED-BETWEEN-GCS)."
  (let ((few (and (typep bytes 'index) (< bytes +minimum-nursery-size+))))
    (funcall (the function set) (if few +minimum-nursery-size+ bytes))
    (setf **requested-nursery-size** (and few bytes))
    bytes))

(defun nursery-set-by-user ()
  "Return the number of bytes between two collections if the user has set it, else NIL."
  (let ((bytes (sb-ext:bytes-consed-between-gcs)))
    (and (/= bytes **nursery-size**) bytes)))

(defglobal **kept-bytes-before-user-threads** 0
  "The number of bytes in use when a user thread was last started while no other user thread existed.")

(defun heap-limit (&optional (kept **kept-bytes-before-user-threads**))
  "Return the maximum number of bytes that may be in use while an evaluation, a call or the user's threads run. KEPT is the
number of bytes that were in use when they began; the default is for the user's threads. The host computes the limit of an
evaluation by the same formula."
  (let ((size (sb-ext:dynamic-space-size)))
    (max (* 2 (floor size 5)) (+ kept (floor size 6)))))

(defglobal **collection-lock** (sb-thread:make-mutex :name "collecting")
  "The lock that COLLECT-RECENT-GARBAGE holds, so that only one thread runs it: SBCL's GC does nothing when another thread
has just finished a collection.")

(defun collect-generations (oldest)
  "Collect the garbage of the generations up to OLDEST (0 to 5). Survivors are not promoted beyond OLDEST."
  (symbol-macrolet ((limit (extern-alien "gencgc_oldest_gen_to_gc" (signed 8))))
    (let ((before limit))
      (unwind-protect
           (progn
             (setf limit oldest)
             (sb-ext:gc :gen (1+ oldest)))
        (setf limit before)))))

(defun collect-recent-garbage (kept)
  "Collect the garbage that was allocated since KEPT bytes were in use. Always collect the two youngest generations, which
contain most garbage. Earlier collections may have promoted garbage to older generations. Collect these generations one by
one while the bytes in use exceed KEPT by more than a twentieth of the heap. Stop when half of the heap is in use, because
such a collection needs room to copy everything that the session keeps."
  (sb-thread:with-mutex (**collection-lock**)
    (sb-ext:gc :gen 2)
    (let ((size (sb-ext:dynamic-space-size)))
      (loop for oldest from 2 to 5
            while (< (+ kept (floor size 20)) (heap-use) (floor size 2))
            do (collect-generations oldest)))))

(defun megabytes (bytes)
  "Return BYTES in megabytes of 1024 * 1024 bytes, as in the option --heap, rounded up."
  (ceiling bytes (* 1024 1024)))

(defglobal **ending-threads** '()
  "The threads that END-THREADS-FOR-HEAP has interrupted. These threads may still be unwinding, or their garbage may still
be in the heap.")

(defglobal **collected-ending-threads** '()
  "The value of **ENDING-THREADS** for which COLLECT-AFTER-THREADS last ran, so that it runs once for each value.")

(defun next-nursery-size (kept)
  "Return the number of bytes to allocate before the next collection, after a collection that left objects of KEPT bytes. If
KEPT is less than +SMALL-NURSERY-SIZE+, the number is +SMALL-NURSERY-SIZE+ or SBCL's default, whichever is less. Otherwise
the number is SBCL's default, because with fewer bytes the kept objects would be copied too often. While threads are being
ended and the pages of the objects exceed HEAP-LIMIT, the number is the whole rest of the heap: until these threads have
unwound, there may be no room to copy their objects, and a collection without room ends the process."
  (cond ((and **ending-threads** (> (+ kept **page-waste**) (heap-limit)))
         (max +minimum-nursery-size+ (- (sb-ext:dynamic-space-size) kept)))
        ((< kept +small-nursery-size+) (min +small-nursery-size+ **default-nursery-size**))
        (t **default-nursery-size**)))

(defglobal **nursery-lock** (sb-thread:make-mutex :name "nursery")
  "The lock that ADAPT-NURSERY holds, because several threads may run it at the same time. Interrupts are off meanwhile,
because an interruption may end a thread at any time.")

(defun adapt-nursery ()
  "Set the number of bytes to allocate before the next collection according to the bytes in use now. Do nothing if the user
has set the number."
  (sb-thread::with-system-mutex (**nursery-lock**)
    (measure-page-waste)
    (let* ((kept (sb-kernel:dynamic-usage))
           (size (next-nursery-size kept)))
      (unless (or (= size **nursery-size**) (nursery-set-by-user))
        (setf **nursery-size** size
              (sb-ext:bytes-consed-between-gcs) size)
        ;; The host reads the trigger first, and must not combine the new trigger with the old size.
        (sb-thread:barrier (:write))
        ;; Without the new trigger, SIZE would take effect only after the next collection. The trigger minus SIZE must be
        ;; KEPT, because the host computes the kept bytes as this difference.
        (setf (extern-alien "auto_gc_trigger" (unsigned 64)) (+ kept size))))))

(defun heap-use-text (used &optional part)
  "Return a text, for parentheses, that says that USED bytes of the heap are in use, and why these are too many although the
heap is larger. PART is the name of the part of the evaluation that was ended in vain, a string, or NIL."
  (format nil "~D of ~D MB~@[, even after ~A ended~]; a garbage collection needs room for copies"
          (megabytes used) (megabytes (sb-ext:dynamic-space-size)) part))

(defun end-threads-for-heap ()
  "End the user's threads because the heap is nearly full and the thread that fills it cannot be identified. Notify the
user."
  (let ((threads (set-difference (user-threads) **ending-threads**))
        (used (heap-use)))
    (when threads
      (sb-ext:atomic-update **ending-threads** (lambda (ending) (append threads ending)))
      (adapt-nursery)
      (event (if (eql *job-id* +program-job+) *job-id* 0) (event-code :notice) 0
             (with-server-syntax ()
               (format nil "The heap was nearly used up (~A), so Lisp ended ~A. Keep fewer objects, or start with a ~
                            larger heap."
                       (heap-use-text used) (thread-list-text threads))))
      (let ((self sb-thread:*current-thread*))
        (end-threads (remove self threads))
        ;; The finalizer thread runs COLLECT-AFTER-THREADS. Notify the finalizer thread again, because it may have
        ;; checked before these threads were ended, and the next collection is far off.
        (sb-impl::finalizer-thread-notify 1)
        (when (find self threads)
          (sb-thread:abort-thread))))))

(defun heap-full-p ()
  "Return true if the evaluation of this thread, according to the host, keeps more bytes than its heap limit."
  (event *job-id* (event-code :heap)))

(defun heap-cleared-p ()
  "Return true when this thread's evaluation need not end to free heap: it keeps no more than its heap limit, or collecting
the garbage of ended threads here brings it below the limit. From the evaluation's third collection on, do not collect
here: an evaluation that fills the heap itself must end before its garbage is collected, because there may be no room to
copy its objects."
  (or (not (heap-full-p))
      (and **ending-threads**
           (< *collection-count* 3)
           (progn
             (await-threads **ending-threads**)
             (collect-recent-garbage **kept-bytes-before-user-threads**)
             (not (heap-full-p))))))

(defun collect-and-report (kept part)
  "Collect the garbage of an evaluation that was filling the heap, and push the error message, which says how much of the
heap was and still is in use. KEPT is the number of bytes in use before the evaluation. PART is the name of the part of
the evaluation that filled the heap, a string, or NIL."
  (let ((used (heap-use)))
    (await-threads **ending-threads**)
    (collect-recent-garbage kept)
    (event *job-id* (event-code :error-text) 0
           (with-server-syntax ()
             (format nil "The heap was nearly used up (~A), so the evaluation was stopped. ~D MB are still in use, ~
                          including SBCL's own objects. Keep fewer objects, or start with a larger heap."
                     (heap-use-text used part) (megabytes (heap-use)))))))

(defvar *end-part-for-heap* nil
  "A function that ends the current part of the evaluation, such as a test, when the heap is nearly full. The function's
argument is the frame pointer of its caller. The function returns only if the part is already being ended. NIL if a full
heap ends the whole evaluation.")

(defvar *ended-part* nil
  "The name, a string, of the part of the evaluation that was ended because the heap was nearly full, if ending the part did
not free enough memory; otherwise NIL.")

(defun collect-after-part (part)
  "Collect the garbage of a part of the evaluation that was ended because the heap was nearly full. PART is the name of
this part, a string. End the evaluation if the heap is still full."
  (sb-sys:scrub-control-stack)
  (collect-recent-garbage *kept-bytes-before-evaluation*)
  (let ((*ended-part* part)
        (*end-part-for-heap* nil))
    (end-evaluation-for-heap)))

(defun end-evaluation-for-heap ()
  "End the evaluation of this thread, as INTERRUPT-EVALUATION does, or only its current part (see *END-PART-FOR-HEAP*). Do
nothing if the heap is no longer full. This function is called when the host interrupts the thread because the heap is
nearly full, and by WATCH-HEAP after each collection."
  (let ((kept *kept-bytes-before-evaluation*)
        (part *ended-part*))
    (when (and *unwind-evaluation* (not (heap-cleared-p)))
      (when (and *end-part-for-heap* (not *failure-reason*))
        (funcall (the function *end-part-for-heap*) (frame-pointer-here))
        ;; The function returns only if the part is already being ended.
        (return-from end-evaluation-for-heap nil))
      (unless (or *capturing-interruption* (shiftf *ended-for-heap* t))
        (capture-interruption +interrupt-heap+ (frame-pointer-here)))
      (abandon-evaluation :interrupted
                          (lambda ()
                            (end-programs)
                            (collect-and-report kept part))))))

(define-condition heap-nearly-exhausted (storage-condition)
  ((used :initarg :used :reader heap-nearly-exhausted-used)
   (size :initarg :size :reader heap-nearly-exhausted-size))
  (:report (lambda (condition stream)
             (format stream "The heap is nearly used up during a call of the program: ~D of ~D MB are in use, and a ~
                             garbage collection needs room for copies. Keep fewer objects, or start with a larger heap."
                     (megabytes (heap-nearly-exhausted-used condition))
                     (megabytes (heap-nearly-exhausted-size condition)))))
  (:documentation "The error that is signalled when a program's call keeps so many objects that garbage collections have
too little room."))

(defvar *watching-heap* nil
  "True while this thread runs WATCH-HEAP, which must not run again inside itself: its allocations may trigger further
collections, each in a signal handler nested in the previous one, and SBCL supports only eight nested handlers.")

(declaim (type (or null (unsigned-byte 62)) *kept-bytes-before-call*))
(defvar *kept-bytes-before-call* nil
  "The number of bytes that survived the last collection before the embedding program's current call on this thread; NIL
outside a call.")

(defun fail-call-for-heap ()
  "Signal HEAP-NEARLY-EXHAUSTED if this thread runs a call of the embedding program and more bytes are in use than
HEAP-LIMIT allows for the call. The user's handlers run in the signal handler of the collection. When they keep filling the
heap, each collection nests in the previous one: before the interrupt contexts run out, end the call without handlers."
  (let ((kept *kept-bytes-before-call*)
        (used (heap-use)))
    (when (and kept (> used (heap-limit kept)))
      (let ((condition (make-condition 'heap-nearly-exhausted :used used :size (sb-ext:dynamic-space-size))))
        (if (few-interrupt-contexts-left-p)
            (invoke-debugger condition)
            (let ((*watching-heap* nil))
              (error condition)))))))

(defun collect-after-call ()
  "Collect the garbage of a call of the embedding program that was ended because the heap was nearly full."
  (sb-sys:scrub-control-stack)
  (collect-recent-garbage (or *kept-bytes-before-call* 0)))

(defun watch-heap ()
  "If the heap is nearly full, end the user's threads, this thread's evaluation, and the program's call on this thread.
Called after each collection, in the thread that caused the collection. If this thread is a user thread, it ends last, in
this function."
  (adapt-nursery)
  ;; COLLECT-RECENT-GARBAGE may need more than one collection. Do not check the heap before this function has finished.
  (unless (sb-thread:holding-mutex-p **collection-lock**)
    (when (> (heap-use) (heap-limit))
      (end-threads-for-heap))
    (when *unwind-evaluation*
      (incf *collection-count*)
      (end-evaluation-for-heap))
    (fail-call-for-heap)))

(defun watch-after-collection (post-gc)
  "Call POST-GC, SBCL's function, and then WATCH-HEAP, unless WATCH-HEAP is already running in this thread."
  (funcall (the function post-gc))
  (unless *watching-heap*
    (let ((*watching-heap* t))
      (watch-heap))))

(defun collect-after-threads ()
  "Collect the garbage of threads that END-THREADS-FOR-HEAP has ended. SBCL calls this function after each collection, in
its finalizer thread."
  (let ((ending **ending-threads**))
    (when (and ending (not (eq ending **collected-ending-threads**)))
      (setf **collected-ending-threads** ending)
      (await-threads ending)
      (collect-recent-garbage **kept-bytes-before-user-threads**)
      ;; END-THREADS-FOR-HEAP may add threads meanwhile.
      (setf **collected-ending-threads**
            (sb-ext:atomic-update **ending-threads**
                                  (lambda (ending) (remove-if-not #'sb-thread:thread-alive-p ending)))))))
