;;;; When the heap is nearly used up: what fills it is stopped, and its garbage collected. The host looks at it while
;;;; evaluations run; here it is looked at for threads that outlive them.

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

(defun collect-what-was-new ()
  "Collect the generations that hold what was allocated since the last evaluation began. Collecting all of them would
copy all that is kept several times, and there may be no room for that."
  (sb-ext:gc :gen 2))

(defun megabytes (bytes)
  "Return BYTES in millions."
  (ceiling bytes 1000000))

(defglobal **ending-threads** '()
  "The threads that END-THREADS-FOR-HEAP was the last to end.")

(defglobal **cleared-up-after** '()
  "The threads that CLEAR-UP-AFTER-THREADS was the last to clear up after.")

(defun end-threads-for-heap ()
  "End the user's threads, for the heap is nearly used up and nobody can tell which of them fills it. Say so."
  (let ((threads (set-difference (user-threads) **ending-threads**))
        (used (sb-kernel:dynamic-usage)))
    (when threads
      (setf **ending-threads** threads)
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
  "End the user's threads if they keep too much. Called after each collection in the thread that caused it, which may be
one of them: it ends last, and here."
  (when (> (sb-kernel:dynamic-usage) (heap-limit))
    (end-threads-for-heap)))

(defun clear-up-after-threads ()
  "Collect what the threads have left that END-THREADS-FOR-HEAP has ended. Called after each collection, in a thread of
SBCL's own."
  (when (and **ending-threads** (not (eq **ending-threads** **cleared-up-after**)))
    (setf **cleared-up-after** **ending-threads**)
    (await-threads **ending-threads**)
    (collect-what-was-new)))
