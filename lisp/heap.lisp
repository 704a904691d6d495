;;;; When the heap is nearly used up: what fills it is stopped, and its garbage collected. It is looked at after each
;;;; collection, in the thread that caused it; by the host as well while evaluations run, for what is between collections
;;;; and for threads that let nothing interrupt them.

(in-package "SBCL-HOST")

(defconstant +nursery+ (* 64 1024 1024)
  "Bytes that are allocated between two collections, at most. SBCL's own choice is a twentieth of the heap: most of it
would be memory that was never touched before, which costs more to get than it costs to collect more often.")

(defun limit-nursery ()
  "Have garbage collected whenever so much was allocated, the first time as well."
  (setf (sb-ext:bytes-consed-between-gcs) (min +nursery+ (sb-ext:bytes-consed-between-gcs))))

(defglobal **kept-before** 0
  "Bytes in use when the first of the user's threads began that there are.")

(defun heap-limit ()
  "Return how many bytes the user's threads may keep, as the host reckons for evaluations."
  (let ((size (sb-ext:dynamic-space-size)))
    (max (* 2 (floor size 5)) (+ **kept-before** (floor size 6)))))

(defglobal **collecting** (sb-thread:make-mutex :name "collecting")
  "Held while COLLECT-WHAT-WAS-NEW does: SBCL's GC does nothing when another thread has just finished one.")

(defun collect-what-was-new ()
  "Collect what was allocated since the last evaluation began: in the first two generations without regard to room,
since that goes before more is copied; in the third, where a collection in the meantime has put it, if what is left in
use can be copied. The later ones would copy all that is kept again and again."
  (sb-thread:with-mutex (**collecting**)
    (sb-ext:gc :gen 2)
    (let ((size (sb-ext:dynamic-space-size)))
      (when (< (floor size 5) (sb-kernel:dynamic-usage) (floor size 2))
        (let ((oldest (extern-alien "gencgc_oldest_gen_to_gc" (signed 8))))
          (unwind-protect
               (progn
                 (setf (extern-alien "gencgc_oldest_gen_to_gc" (signed 8)) 2)
                 (sb-ext:gc :gen 3))
            (setf (extern-alien "gencgc_oldest_gen_to_gc" (signed 8)) oldest)))))))

(defun megabytes (bytes)
  "Return BYTES in millions."
  (ceiling bytes 1000000))

(defglobal **ending-threads** '()
  "The threads that END-THREADS-FOR-HEAP has ended, until they are gone and so is what they have left.")

(defglobal **cleared-up-after** '()
  "The value of **ENDING-THREADS** that CLEAR-UP-AFTER-THREADS was the last to clear up after.")

(defun end-threads-for-heap ()
  "End the user's threads, for the heap is nearly used up and nobody can tell which of them fills it. Say so."
  (let ((threads (set-difference (user-threads) **ending-threads**))
        (used (sb-kernel:dynamic-usage)))
    (when threads
      (setf **ending-threads** (append threads **ending-threads**))
      (event 0 (event-code :notice) 0
             (with-server-syntax ()
               (format nil "The heap was nearly used up (~D of ~D MB), so these were ended: ~A."
                       (megabytes used) (megabytes (sb-ext:dynamic-space-size)) (thread-list threads))))
      (let ((self sb-thread:*current-thread*))
        (dolist (thread (remove self threads))
          (ignore-errors (sb-thread:terminate-thread thread)))
        (when (find self threads)
          (sb-thread:abort-thread))))))

(defun await-threads (threads)
  "Give THREADS, which are being ended, one second to unwind."
  (let ((end (+ (get-internal-real-time) internal-time-units-per-second)))
    (dolist (thread threads)
      (let ((left (/ (- end (get-internal-real-time)) internal-time-units-per-second)))
        (ignore-errors (sb-thread:join-thread thread :default nil :timeout (max 0 left)))))))

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
             (collect-what-was-new)
             (not (heap-full-p))))))

(defun collect-and-report ()
  "Collect the garbage of an evaluation that was filling the heap, and push what is left."
  (let ((used (sb-kernel:dynamic-usage)))
    (await-threads **ending-threads**)
    (collect-what-was-new)
    (event *job-id* (event-code :error-text) 0
           (with-server-syntax ()
             (format nil "The heap was nearly used up (~D of ~D MB), so the evaluation was stopped. ~D MB are still ~
                          in use now, by what the session holds on to."
                     (megabytes used) (megabytes (sb-ext:dynamic-space-size))
                     (megabytes (sb-kernel:dynamic-usage)))))))

(defun watch-heap ()
  "End what fills the heap: the user's threads, and the evaluation if this is its thread. Called after each collection in
the thread that caused it, which may be one of them: it ends last, and here."
  ;; What is collected because something has ended may take more than one collection.
  (unless (sb-thread:holding-mutex-p **collecting**)
    (when (> (sb-kernel:dynamic-usage) (heap-limit))
      (end-threads-for-heap))
    (when *abandon*
      (incf *collections*)
      (end-evaluation-for-heap))))

(defun clear-up-after-threads ()
  "Collect what the threads have left that END-THREADS-FOR-HEAP has ended. Called after each collection, in a thread of
SBCL's own."
  (when (and **ending-threads** (not (eq **ending-threads** **cleared-up-after**)))
    (setf **cleared-up-after** **ending-threads**)
    (await-threads **ending-threads**)
    (collect-what-was-new)
    (setf **ending-threads** (remove-if-not #'sb-thread:thread-alive-p **ending-threads**)
          **cleared-up-after** **ending-threads**)))
