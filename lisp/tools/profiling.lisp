;;;; profile: the functions in which an evaluation spends its time or allocates memory, as sampled by SBCL's statistical
;;;; profiler (contrib/sb-sprof).

(in-package "SBCL-HOST/TOOLS")

(defconstant +max-profile-stacks+ 5000
  "Maximum number of distinct stacks that are reported for a flame graph. The rarest stacks are dropped first.")
(defconstant +max-profile-frames+ 80
  "Maximum number of frames of one stack that are reported, counted from the innermost frame.")
(defconstant +max-profile-name-length+ 100
  "Maximum number of characters of a function's name that are reported.")

(defun info-function-name (info)
  "Return the name of the function that INFO describes, or NIL if the function has no name. Compare names by EQUAL. The
second value is true if the function is the server's own. INFO is an object that SB-SPROF::MAP-TRACE-PC-LOCS passes to its
function."
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

(defun definition-symbol-name (name)
  "Return the name of the symbol whose definition contains the function NAME: the symbol in a name such as (SETF F), or the
symbol in the name of the function that contains a local function. Return NIL if there is no such symbol."
  (loop while (consp name)
        do (let ((outer (member :in name)))
             (setf name (cond (outer (second outer))
                              ((eq (first name) 'lambda) nil)
                              (t (second name))))))
  (and name (symbolp name) (symbol-name name)))

(defun info-function-location (info)
  "Return the source location of the definition of the function that INFO describes, as text, or NIL if the location is
unknown or SBCL's."
  (when (typep info 'sb-di::compiled-debug-fun)
    (guarded (let* ((component (sb-di::compiled-debug-fun-component info))
                    (function (loop for index below (sb-kernel:code-n-entries component)
                                    for entry = (sb-kernel:%code-entry-point component index)
                                    when (equal (sb-kernel:%simple-fun-name entry) (info-function-name info))
                                      return entry
                                    finally (return (sb-kernel:%code-entry-point component 0))))
                    (location (definition-location (sb-introspect:find-definition-source function)
                                                   (definition-symbol-name (sb-kernel:%simple-fun-name function)))))
               (and location
                    (not (eql 4 (mismatch "SYS:" (source-location-source-name location))))
                    (source-location-label location)))
        (failure)
      nil)))

;;; Samples of SB-SPROF: see MAP-TRACES in contrib/sb-sprof/record.lisp.

(defstruct (sampled-function (:copier nil) (:predicate nil) (:constructor make-sampled-function (name info)))
  "A function that occurs in samples."
  ;; NAME and INFO are the function's name and SB-SPROF's description of the function. SELF is the number of samples whose
  ;; innermost frame is the function's, and TOTAL is the number of samples with any frame of the function.
  name
  info
  (self 0 :type index)
  (total 0 :type index)
  ;; The number of the last sample that was counted in TOTAL, so that a sample with a recursive function counts once.
  (seen -1 :type fixnum)
  ;; The printed name, or NIL before SAMPLED-TEXT has made it.
  (printed nil :type (or null string)))

(defun sampled-text (sampled)
  "Return the printed name of SAMPLED, a SAMPLED-FUNCTION."
  (or (sampled-function-printed sampled)
      (setf (sampled-function-printed sampled)
            (let ((name (sampled-function-name sampled)))
              (if (stringp name) name (value-short-text name +max-profile-name-length+))))))

(defun map-samples (function)
  "Call FUNCTION with the thread and the stack of each sample of SB-SPROF:*SAMPLES*. A stack is a list of frames, innermost
first. Each frame is a cons of the function's name and SB-SPROF's description of the function. The server's own frames
are omitted, and so are all frames outside the call by which the server starts the user's code."
  (declare (type function function))
  (sb-sprof:map-traces
   (lambda (thread trace)
     (let ((frames '()))
       (sb-sprof::map-trace-pc-locs
        ;; SB-SPROF visits the outermost frame first.
        (lambda (info offset)
          (declare (ignore offset))
          (multiple-value-bind (name host) (info-function-name info)
            (cond ((not host) (when name (push (cons name info) frames)))
                  ((member name '(evaluate-form call-as-job-thread)) (setf frames '())))))
        trace)
       (when frames
         (funcall function thread frames))))
   sb-sprof::*samples*))

(defun sampled-thread-p (thread)
  "Return true when THREAD runs user code: it belongs neither to the host nor to SBCL, and is not the profiler's timer."
  (not (or (host-thread-p thread)
           (eq thread sb-impl::*finalizer-thread*)
           (equal (sb-thread:thread-name thread) "SPROF timer"))))

(defun fold-samples ()
  "Return four values: the number of samples; the number of threads; a list of SAMPLED-FUNCTIONs; and an
EQUAL hash table from stacks to numbers of samples. A stack is a list of SAMPLED-FUNCTIONs, outermost first."
  (let ((functions (make-hash-table :test 'equal))
        (stacks (make-hash-table :test 'equal))
        (threads '())
        (count 0))
    (map-samples
     (lambda (thread frames)
       (when (sampled-thread-p thread)
         (let ((stack (loop for (name . info) in frames
                            collect (or (gethash name functions)
                                        (setf (gethash name functions) (make-sampled-function name info))))))
           (pushnew thread threads)
           (incf (sampled-function-self (first stack)))
           (dolist (sampled stack)
             (unless (eql count (sampled-function-seen sampled))
               (setf (sampled-function-seen sampled) count)
               (incf (sampled-function-total sampled))))
           (incf (gethash (reverse (subseq stack 0 (min +max-profile-frames+ (length stack)))) stacks 0))
           (incf count)))))
    (values count (length threads)
            (loop for sampled being the hash-values of functions collect sampled)
            stacks)))

(defun push-stacks (stacks)
  "Push the most frequent of STACKS, a table that FOLD-SAMPLES returned, in the format of flame graph tools: names separated
by semicolons."
  (let ((sorted (sort (loop for stack being the hash-keys of stacks using (hash-value count)
                            collect (cons count stack))
                      #'> :key #'car)))
    (loop for (count . stack) in sorted
          repeat +max-profile-stacks+
          do (push-record "stack" :count count
                                  :frames (format nil "~{~A~^;~}"
                                                  (mapcar (lambda (sampled) (substitute #\, #\; (sampled-text sampled)))
                                                          stack))))))

(defun push-profile (mode top stacks milliseconds)
  "Push the results of the profiler, which ran in MODE for MILLISECONDS: the TOP functions with the most samples and, if
STACKS is true, the stacks for a flame graph."
  (multiple-value-bind (count threads functions folded) (fold-samples)
    (push-record "profile" :mode mode :samples count :threads threads :milliseconds milliseconds
                           :functions (length functions))
    (loop for sampled in (sort functions (lambda (one other)
                                           (let ((self (sampled-function-self one)) (others (sampled-function-self other)))
                                             (if (= self others)
                                                 (> (sampled-function-total one) (sampled-function-total other))
                                                 (> self others)))))
          repeat top
          do (push-record "function" :own (sampled-function-self sampled) :total (sampled-function-total sampled)
                                     :name (sampled-text sampled)
                                     :location (info-function-location (sampled-function-info sampled))))
    (when stacks
      (push-stacks folded))))

(defun collect-samples ()
  "Convert the raw data of the profiler, which must have stopped, to samples, and store them in SB-SPROF:*SAMPLES*."
  (setf (sb-sprof::samples-vector sb-sprof::*samples*) (values (sb-sprof::convert-raw-data))))

(defglobal **profiling-lock** (sb-thread:make-mutex :name "profiling")
  "The lock that the operation :PROFILE holds until it has reported its samples, because SB-SPROF keeps the samples of only
one profile.")

(defun call-with-profiling (function mode top stacks)
  "Call FUNCTION under the profiler and return its values. Push the profile. MODE, TOP and STACKS are as in :PROFILE."
  (declare (type function function))
  (let ((users sb-sprof::*samples*)
        (begun (monotonic-milliseconds)))
    (unwind-protect
         (progn
           (sb-sprof:start-profiling :mode (cond ((string= mode "alloc") :alloc) ((string= mode "time") :time) (t :cpu))
                                     :threads :all)
           (funcall function))
      (let ((milliseconds (round (- (monotonic-milliseconds) begun))))
        (unwind-protect
             (progn
               (without-interrupts (sb-sprof:stop-profiling))
               (when sb-sprof::*samples*
                 (collect-samples)
                 (push-profile mode top stacks milliseconds)))
          (setf sb-sprof::*samples* users))))))

(define-operation :profile (evaluate &key mode top stacks)
  "Evaluate the code under the statistical profiler in MODE: \"cpu\", \"alloc\" or \"time\". Push the TOP functions with the
most samples and, if STACKS is true, the stacks for a flame graph."
  (block profile
    (sb-thread:with-mutex (**profiling-lock** :wait-p nil)
      (unless sb-sprof::*profiling*
        (return-from profile (call-with-profiling #'evaluate mode top stacks))))
    (let ((mode sb-sprof::*profiling*))
      (error "SB-SPROF is already profiling~@[, in mode ~S~]. If another evaluation profiles, wait until the evaluation has ~
              ended.~:[~; Otherwise, stop the profiler: (sb-sprof:stop-profiling)~]"
             mode mode))))
