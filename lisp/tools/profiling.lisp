;;;; profile: where an evaluation spends its time, or allocates, by SBCL's statistical profiler (contrib/sb-sprof).

(in-package "SBCL-HOST/TOOLS")

(defconstant +profile-stacks+ 5000
  "How many different stacks are told of for a flame graph; the rarest go first.")
(defconstant +profile-frames+ 80
  "How many frames of one, the innermost ones.")
(defconstant +profile-name+ 100
  "Characters of a function's name.")

(defun function-name-of (info)
  "Return what names the function of INFO, as MAP-TRACE-PC-LOCS has it, an object for EQUAL; NIL when nothing does; and
whether it is the host's own."
  (typecase info
    (sb-di::compiled-debug-fun
     (let ((name (sb-di:debug-fun-name info))
           (file (ignore-errors (sb-c::debug-source-namestring
                                 (sb-c::debug-info-source
                                  (sb-kernel:%code-debug-info (sb-di::compiled-debug-fun-component info)))))))
       (values name
               (and (stringp file) (eql 9 (or (mismatch "SYS:HOST;" file) 9))))))
    (sb-kernel:code-component "code without a name")
    ((or string symbol) (and info (string info)))))

(defun sampled-place (info)
  "Return where the function of INFO is defined, as text, or NIL."
  (when (typep info 'sb-di::compiled-debug-fun)
    (guarded (let* ((component (sb-di::compiled-debug-fun-component info))
                    (function (loop for index below (sb-kernel:code-n-entries component)
                                    for entry = (sb-kernel:%code-entry-point component index)
                                    when (equal (sb-kernel:%simple-fun-name entry) (function-name-of info))
                                      return entry
                                    finally (return (sb-kernel:%code-entry-point component 0))))
                    (name (sb-kernel:%simple-fun-name function))
                    (place (definition-place (sb-introspect:find-definition-source function)
                                             (if (symbolp name) (symbol-name name) ""))))
               (and place
                    (not (eql 4 (mismatch "SYS:" (place-in place))))
                    (written-place place)))
        (failure)
      nil)))

;;; What a sample of SB-SPROF is: see MAP-TRACES in contrib/sb-sprof/record.lisp.

(defstruct (sampled (:copier nil) (:predicate nil) (:constructor make-sampled (name info)))
  "A function that was seen."
  name
  info
  (self 0 :type index)
  (total 0 :type index)
  ;; The sample that it was counted in last: recursion counts once.
  (seen -1 :type fixnum)
  ;; The name as printed, once it was.
  (printed nil :type (or null string)))

(defun sampled-text (sampled)
  "Return the name of SAMPLED as printed."
  (or (sampled-printed sampled)
      (setf (sampled-printed sampled)
            (let ((name (sampled-name sampled)))
              (if (stringp name) name (value-short-text name +profile-name+))))))

(defun map-samples (function)
  "Call FUNCTION with each sample of SB-SPROF:*SAMPLES*: the thread, and names and debug information of the functions on its
stack, each a cons, the innermost one first; those that only bring the user's code to run are left out."
  (declare (type function function))
  (sb-sprof:map-traces
   (lambda (thread trace)
     (let ((frames '()))
       (sb-sprof::map-trace-pc-locs
        ;; The outermost frame comes first.
        (lambda (info offset)
          (declare (ignore offset))
          (multiple-value-bind (name host) (function-name-of info)
            (cond ((not host) (when name (push (cons name info) frames)))
                  ((member name '(evaluate-form call-as-thread-of-job)) (setf frames '())))))
        trace)
       (when frames
         (funcall function thread frames))))
   sb-sprof::*samples*))

(defun sampled-thread-p (thread)
  "True when samples of THREAD are of the user's code."
  (not (or (host-thread-p thread)
           (eq thread sb-impl::*finalizer-thread*)
           (equal (sb-thread:thread-name thread) "SPROF timer"))))

(defun fold-samples ()
  "Return of the samples how many there are, in how many threads, a list of the functions, and an EQUAL hash table from
stacks, lists of functions from the outermost on, to counts."
  (let ((functions (make-hash-table :test 'equal))
        (stacks (make-hash-table :test 'equal))
        (threads '())
        (count 0))
    (map-samples
     (lambda (thread frames)
       (when (sampled-thread-p thread)
         (let ((stack (loop for (name . info) in frames
                            collect (or (gethash name functions)
                                        (setf (gethash name functions) (make-sampled name info))))))
           (pushnew thread threads)
           (incf (sampled-self (first stack)))
           (dolist (sampled stack)
             (unless (eql count (sampled-seen sampled))
               (setf (sampled-seen sampled) count)
               (incf (sampled-total sampled))))
           (incf (gethash (reverse (subseq stack 0 (min +profile-frames+ (length stack)))) stacks 0))
           (incf count)))))
    (values count (length threads)
            (loop for sampled being the hash-values of functions collect sampled)
            stacks)))

(defun push-stacks (stacks)
  "Push the commonest of STACKS, from FOLD-SAMPLES, as what makes flame graphs takes them: names with semicolons between."
  (let ((sorted (sort (loop for stack being the hash-keys of stacks using (hash-value count)
                            collect (cons count stack))
                      #'> :key #'car)))
    (loop for (count . stack) in sorted
          repeat +profile-stacks+
          do (push-record "stack" :count count
                                  :frames (format nil "~{~A~^;~}"
                                                  (mapcar (lambda (sampled) (substitute #\, #\; (sampled-text sampled)))
                                                          stack))))))

(defun push-profile (mode top stacks milliseconds)
  "Push what the samples of SB-SPROF come to: the TOP functions, and when STACKS is true what makes a flame graph."
  (multiple-value-bind (count threads functions folded) (fold-samples)
    (push-record "profile" :mode mode :samples count :threads threads :milliseconds milliseconds
                           :functions (length functions))
    (loop for sampled in (sort functions (lambda (one other)
                                           (let ((self (sampled-self one)) (others (sampled-self other)))
                                             (if (= self others)
                                                 (> (sampled-total one) (sampled-total other))
                                                 (> self others)))))
          repeat top
          do (push-record "function" :own (sampled-self sampled) :total (sampled-total sampled)
                                     :name (sampled-text sampled)
                                     :place (sampled-place (sampled-info sampled))))
    (when stacks
      (push-stacks folded))))

(defun collect-samples ()
  "Have SB-SPROF:*SAMPLES* hold what the profiler, which has stopped, has seen."
  (setf (sb-sprof::samples-vector sb-sprof::*samples*) (values (sb-sprof::convert-raw-data))))

(define-operation :profile (evaluate &key mode top stacks)
  "Evaluate the code under the statistical profiler in MODE, the text cpu, alloc or time. STACKS: what makes a flame graph is
wanted, too."
  (when sb-sprof::*profiling*
    (error "SB-SPROF is profiling already, in mode ~S: (sb-sprof:stop-profiling) ends that." sb-sprof::*profiling*))
  (let ((users sb-sprof::*samples*)
        (begun (monotonic-milliseconds)))
    (unwind-protect
         (progn
           (sb-sprof:start-profiling :mode (cond ((string= mode "alloc") :alloc) ((string= mode "time") :time) (t :cpu))
                                     :threads :all)
           (evaluate))
      (let ((milliseconds (round (- (monotonic-milliseconds) begun))))
        (unwind-protect
             (progn
               (without-interrupts (sb-sprof:stop-profiling))
               (when sb-sprof::*samples*
                 (collect-samples)
                 (push-profile mode top stacks milliseconds)))
          (setf sb-sprof::*samples* users))))))
