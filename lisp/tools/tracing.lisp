;;;; trace-calls: the tree of calls of traced functions during an evaluation.
;;;;
;;;; This file records the calls, in all threads; traced-functions.lisp finds the functions and traces them.

(in-package "SBCL-HOST/TOOLS")

;;; Short texts

(defstruct (short-stream (:include sb-kernel:ansi-stream
                          (cout #'send-short-character)
                          (sout #'send-short-string)
                          (misc #'operate-short-stream))
                         (:constructor make-short-stream (limit &aux (buffer (make-string limit))))
                         (:copier nil)
                         (:predicate nil))
  "A character output stream of limited capacity. The stream throws to the tag SHORT when it is full, and turns line breaks
into spaces."
  (buffer "" :type text)
  (fill 0 :type index))

(defun send-short-character (stream character)
  "Perform WRITE-CHAR on STREAM."
  (declare (type short-stream stream) (type character character))
  (let ((buffer (short-stream-buffer stream))
        (fill (short-stream-fill stream)))
    (when (= fill (length buffer))
      (throw 'short nil))
    (setf (schar buffer fill) (if (member character '(#\Newline #\Return)) #\Space character)
          (short-stream-fill stream) (1+ fill)))
  character)

(defun send-short-string (stream string start end)
  "Perform WRITE-STRING on STREAM."
  (declare (type short-stream stream) (type string string) (type index start) (type (or index null) end))
  (loop for index from start below (or end (length string))
        do (send-short-character stream (char string index)))
  string)

(defun operate-short-stream (stream operation argument)
  "Perform OPERATION, the code of a stream operation other than output, on STREAM."
  (declare (type short-stream stream) (ignore argument))
  (case operation
    (#.+charpos+ (short-stream-fill stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defun short-text (limit function)
  "Call FUNCTION with a stream, and return the text that FUNCTION prints. The text is in server syntax and on one line. An
ellipsis replaces any text after LIMIT characters. Return NIL if FUNCTION fails."
  (declare (type function function) (dynamic-extent function))
  (let* ((stream (make-short-stream limit))
         (sb-kernel:*restart-clusters* '())
         (whole nil))
    (with-server-syntax (:length 10 :level 4)
      (catch 'short
        (unless (guarded (progn (funcall function stream) t) (failure) nil)
          (return-from short-text nil))
        (setf whole t)))
    (let ((text (subseq (short-stream-buffer stream) 0 (short-stream-fill stream))))
      (if whole text (concatenate 'string text "…")))))

(defun value-short-text (object limit)
  "Return OBJECT printed on one line by SHORT-TEXT, cut at LIMIT characters."
  (or (short-text limit (lambda (stream) (prin1 object stream)))
      (format nil "#<unprintable ~A>" (type-name-text (class-name-of object)))))

;;; Recorded calls

(defconstant +max-call-text-length+ 200
  "Maximum number of characters of a call with its arguments, of its values, or of an error's report.")
(defstruct (traced-call (:copier nil) (:predicate nil)
                        (:constructor make-traced-call (number depth thread name)))
  "A recorded call."
  ;; NUMBER is the number of calls that the tracer counted before this call. DEPTH is the number of recorded calls
  ;; around this call.
  (number 0 :type sb-ext:word :read-only t)
  (depth 0 :type index :read-only t)
  (thread nil :read-only t)
  ;; NAME is the function's name. ARGUMENTS is a list of the arguments, which KEPT-OBJECTS returned, or the text of the call.
  (name nil :read-only t)
  (arguments '() :type (or list string))
  ;; The value of *PACKAGE* when the call began. The call is printed in this package.
  (package *package* :read-only t)
  ;; The end of the call: :RETURNED, :FAILED for an error, or :LEFT for another non-local exit; NIL while the call runs.
  (end nil :type symbol)
  ;; A list of the values, which KEPT-OBJECTS returned, or the text of the values or of the error.
  (result "" :type (or list string))
  ;; The duration of the call.
  (nanoseconds 0 :type (unsigned-byte 62))
  ;; The nanoseconds that were spent on recording the calls within this call. The call's duration excludes this time.
  (overhead 0 :type (unsigned-byte 62))
  ;; The number of calls within this call that were too deep to be recorded.
  (deeper 0 :type sb-ext:word)
  ;; The start time in nanoseconds.
  (start 0 :type (unsigned-byte 62)))

(defstruct (tracer (:copier nil) (:predicate nil) 
                   (:constructor make-tracer (depth limit locals
                                              &aux (activations (and locals
                                                                     (make-hash-table :synchronized t :weakness :key))))))
  "The limits of a trace, and the calls that it has recorded."
  ;; Up to LIMIT calls are recorded, each within fewer than DEPTH recorded calls, while ACTIVE is true.
  (depth 5 :type index :read-only t)
  (limit 200 :type index :read-only t)
  (active t :type boolean)
  ;; The recorded calls, in no particular order.
  (calls '() :type list)
  ;; The number of calls, recorded or not, except calls that were too deep.
  (count 0 :type sb-ext:word)
  ;; A cons of the condition that was printed last and its text, or NIL.
  (failure '() :type list)
  ;; A table from threads to lists of ACTIVATIONs, innermost first; or NIL if no local functions are traced.
  (activations nil :type (or null hash-table))
  ;; True once local functions are no longer traced, because another thread was started.
  (stopped nil :type boolean))

(defvar *traced-call* nil
  "The innermost recorded call of a global function or method in this thread, or NIL.")

(defvar *recording-call* nil
  "True while a call is being recorded. Calls that the printing of arguments makes are not recorded.")

(declaim (inline monotonic-nanoseconds))
(defun monotonic-nanoseconds ()
  "Return the time of the monotonic clock in nanoseconds."
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (declare (type (unsigned-byte 32) seconds nanoseconds))
    (the (unsigned-byte 62) (+ (* 1000000000 seconds) nanoseconds))))

(defun failure-text (tracer condition)
  "Return the text of CONDITION's type and report. TRACER keeps the text of the last condition, so that a condition is
printed only once although it may end many calls."
  (let ((known (tracer-failure tracer)))
    (if (eq (car known) condition)
        (cdr known)
        (let* ((*recording-call* t)
               (type (type-name-text (class-name-of condition)))
               ;; When a STORAGE-CONDITION is signalled, too little stack may be left to print its report.
               (report (unless (typep condition 'storage-condition)
                         (short-text +max-call-text-length+ (lambda (stream)
                                                              (let ((*print-escape* nil)) (princ condition stream))))))
               (text (format nil "~A~@[: ~A~]" type report)))
          (publish (tracer-failure tracer) (cons condition text))
          text))))

(defun call-text (name arguments)
  "Return the text of the call of NAME, a function name, with ARGUMENTS."
  (or (short-text +max-call-text-length+ (lambda (stream) (format stream "(~S~{ ~S~})" name arguments)))
      (value-short-text (list name (make-symbol "…")) +max-call-text-length+)))

(defun values-text (values)
  "Return VALUES, a list, as text: the printed values, separated by commas."
  (or (short-text +max-call-text-length+ (lambda (stream) (format stream "~{~S~^, ~}" values)))
      "#<unprintable>"))

;;; Printing is the slowest part of recording a call. Objects that will still print the same way later, such as numbers and
;;; copies of strings, are therefore kept, and printed when the recorded calls are pushed.

(defconstant +max-kept-objects+ 10
  "The length from which a list of arguments or values is printed when the call is recorded. A shorter list is kept, if
possible, and printed later.")

(defun kept-objects (objects)
  "Return a copy of the list OBJECTS that will print later as OBJECTS prints now, and true. If OBJECTS contains a long string
or an object that may change, or has at least +MAX-KEPT-OBJECTS+ elements, return NIL and false."
  (declare (type list objects) (optimize speed))
  (let ((kept '()))
    (dotimes (count +max-kept-objects+ (values '() nil))
      (when (null objects)
        (return (values (nreverse kept) t)))
      (let ((object (pop objects)))
        (typecase object
          ((or fixnum symbol character number) (push object kept))
          (simple-string
           (when (> (length object) +max-call-text-length+)
             (return (values '() nil)))
           (push (copy-seq object) kept))
          (t (return (values '() nil))))))))

(defun kept-arguments (name arguments)
  "Return ARGUMENTS, a list of the arguments of a call of NAME, in the form that a TRACED-CALL keeps: a copy, or the text of
the call."
  (multiple-value-bind (kept whole) (kept-objects arguments)
    (if whole kept (call-text name arguments))))

(defun kept-values (values)
  "Return the list VALUES in the form that a TRACED-CALL keeps: a copy, or the text of the values."
  (multiple-value-bind (kept whole) (kept-objects values)
    (if whole kept (values-text values))))

(defun recorded-call-text (call)
  "Return the text of CALL with its arguments."
  (let ((arguments (traced-call-arguments call)))
    (if (stringp arguments)
        arguments
        (let ((*package* (traced-call-package call)))
          (call-text (traced-call-name call) arguments)))))

(defun recorded-result-text (call)
  "Return the text of CALL's values, or of its error."
  (let ((result (traced-call-result call)))
    (if (stringp result)
        result
        (let ((*package* (traced-call-package call)))
          (values-text result)))))

(defun end-call (call end now result)
  "Record that CALL ended at NOW, in nanoseconds. END says how CALL ended: :RETURNED, :FAILED or :LEFT. RESULT is a value of
KEPT-VALUES, or the text of the error that ended CALL, which may be empty."
  (declare (type (unsigned-byte 62) now))
  (setf (traced-call-nanoseconds call) (max 0 (- now (traced-call-start call) (traced-call-overhead call))))
  ;; The evaluation's thread may read the call meanwhile. If this thread sees END, it must also see RESULT.
  (publish (traced-call-result call) result)
  (publish (traced-call-end call) end))

(defun add-overhead (parent call begun)
  "Add the time spent on recording CALL to the overhead of PARENT, the recorded call around CALL or NIL. The recording began
at BEGUN and ends now; the duration of CALL itself is not included."
  (declare (type (unsigned-byte 62) begun))
  (when parent
    (incf (traced-call-overhead parent) (max 0 (- (monotonic-nanoseconds) begun (traced-call-nanoseconds call))))))

(defun record-call (tracer name function arguments number depth parent)
  "Call FUNCTION, the definition of NAME, with ARGUMENTS, and return its values. Record the call as number NUMBER of
TRACER. DEPTH is the number of recorded calls around this call, and PARENT is the innermost of them, or NIL."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (let* (;; Recording may itself call traced functions. While FUNCTION runs, *RECORDING-CALL* is NIL again.
         (*recording-call* t)
         (begun (monotonic-nanoseconds))
         (call (make-traced-call number depth sb-thread:*current-thread* name))
         (failure nil))
    (setf (traced-call-arguments call) (kept-arguments name arguments))
    (sb-ext:atomic-push call (tracer-calls tracer))
    (flet ((finish (end now result)
             (end-call call end now result)
             (add-overhead parent call begun)))
      (unwind-protect
           (let ((values (handler-bind ((serious-condition (lambda (condition)
                                                             (unless *recording-call*
                                                               (setf failure (failure-text tracer condition))))))
                           (setf (traced-call-start call) (monotonic-nanoseconds))
                           (let ((*traced-call* call) (*recording-call* nil))
                             (multiple-value-list (apply function arguments))))))
             (finish :returned (monotonic-nanoseconds) (kept-values values))
             (values-list values))
        (unless (traced-call-end call)
          (finish (if failure :failed :left) (monotonic-nanoseconds) (or failure "")))))))

(defun number-call (tracer parent)
  "Count a call within the call PARENT, or outside of any call if PARENT is NIL. Return the number and depth of the new
call, or NIL if the call is not recorded: it is too deep, or TRACER has reached its limit."
  (declare (type tracer tracer))
  (let ((depth (if parent (1+ (traced-call-depth parent)) 0)))
    (if (and parent (>= depth (tracer-depth tracer)))
        (progn (sb-ext:atomic-incf (traced-call-deeper parent)) nil)
        (let ((number (sb-ext:atomic-incf (tracer-count tracer))))
          (and (< number (tracer-limit tracer))
               (values number depth))))))

(defun call-traced (tracer name function arguments)
  "Call FUNCTION, the definition of NAME, with ARGUMENTS, and return its values. Record the call unless TRACER is inactive or
at one of its limits, or the call is part of recording another call."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (if (or *recording-call* (not (tracer-active tracer)))
      (apply function arguments)
      (let ((parent (innermost-call tracer)))
        (multiple-value-bind (number depth) (number-call tracer parent)
          (if number
              (record-call tracer name function arguments number depth parent)
              (apply function arguments))))))

;;; Calls of local functions. Such calls begin and end at breakpoints, so variables such as *TRACED-CALL* cannot be bound
;;; around them.

(defstruct (activation (:copier nil) (:predicate nil) (:constructor make-activation (call recorded parent outer-call begun)))
  "An activation of a local function that has not ended."
  ;; CALL is the parent of the calls that this activation makes: the activation's own call if RECORDED is true, else PARENT.
  ;; PARENT is the innermost recorded call around the activation, or NIL.
  (call nil :read-only t)
  (recorded nil :read-only t)
  (parent nil :read-only t)
  ;; The value of *TRACED-CALL* when the activation began.
  (outer-call nil :read-only t)
  ;; The time in nanoseconds at which the recording of the call began.
  (begun 0 :type (unsigned-byte 62) :read-only t)
  ;; The cookie by which SBCL identifies the call when it returns, or NIL before the cookie is known.
  (cookie nil))

(defmacro activations (tracer)
  "Access the list that TRACER has of this thread's ACTIVATIONs, innermost first."
  `(the list (gethash sb-thread:*current-thread* (tracer-activations ,tracer))))

(defun close-activation (activation end now result)
  "Record the end of ACTIVATION's call, if that call is recorded. END, NOW and RESULT are as for END-CALL."
  (let ((call (activation-call activation)))
    (when (activation-recorded activation)
      (end-call call end now result)
      (add-overhead (activation-parent activation) call (activation-begun activation)))))

(defun close-exited-calls (tracer frame)
  "Record the end of calls of local functions that ended by a non-local exit. Such calls are recorded as running, but are no
longer on the stack at FRAME."
  (loop for activation = (first (activations tracer))
        while (and activation
                   (not (and (activation-cookie activation)
                             (sb-di:fun-end-cookie-valid-p frame (activation-cookie activation)))))
        do (pop (activations tracer))
           (close-activation activation :left (monotonic-nanoseconds) "")))

(defun innermost-call (tracer)
  "Return the innermost recorded call in this thread, whether of a local function or of another function; or NIL."
  (when (and (tracer-activations tracer) (activations tracer))
    (let ((*recording-call* t))
      (close-exited-calls tracer (sb-di:top-frame)))
    (let ((activation (first (activations tracer))))
      (when (and activation (eq (activation-outer-call activation) *traced-call*))
        (return-from innermost-call (activation-call activation)))))
  *traced-call*)

(defun open-local-call (tracer name frame)
  "Record that a call of the local function NAME begins in FRAME."
  (let ((begun (monotonic-nanoseconds)))
    (close-exited-calls tracer frame)
    (let ((parent (innermost-call tracer)))
      (multiple-value-bind (number depth) (number-call tracer parent)
        (let ((call (if number
                        (make-traced-call number depth sb-thread:*current-thread* name)
                        parent)))
          (when number
            (setf (traced-call-arguments call)
                  (kept-arguments name (guarded (nth-value 1 (sb-debug::frame-call frame)) (failure) '()))
                  (traced-call-start call) begun)
            (sb-ext:atomic-push call (tracer-calls tracer)))
          (push (make-activation call (and number t) parent *traced-call* begun) (activations tracer)))))))

(defun begin-local-call (tracer cookie)
  "Record that COOKIE identifies the call that was opened last, and that its body begins."
  (let ((activation (first (activations tracer))))
    (when (and activation (null (activation-cookie activation)))
      (setf (activation-cookie activation) cookie)
      (when (activation-recorded activation)
        (setf (traced-call-start (activation-call activation)) (monotonic-nanoseconds))))))

(defun end-local-call (tracer cookie values)
  "Record that the call that COOKIE identifies returns VALUES, a list. Unfinished calls within this call must have
ended by a non-local exit, and are recorded with the end :LEFT."
  (let ((now (monotonic-nanoseconds)))
    (when (find cookie (activations tracer) :key #'activation-cookie)
      (loop for activation = (pop (activations tracer))
            until (eq cookie (activation-cookie activation))
            do (close-activation activation :left now "")
            finally (close-activation activation :returned now (kept-values values))))))

(defun close-thread-activations (tracer)
  "Record the end of this thread's unfinished calls of local functions, after the traced code has ended."
  (when (tracer-activations tracer)
    (loop while (activations tracer)
          do (close-activation (pop (activations tracer)) :left (monotonic-nanoseconds) ""))))

;;; Pushing the recorded calls

(defun push-traced-calls (tracer functions shown)
  "Push a record of the counts, then up to SHOWN of the calls that TRACER has recorded: this thread's calls first, and each
thread's calls in order. FUNCTIONS is the number of traced functions. SHOWN is separate from the limit on recorded calls,
because printing and pushing a call takes several times as long as recording it."
  (let* ((calls (sort (copy-list (tracer-calls tracer)) #'< :key #'traced-call-number))
         (threads (remove-duplicates (mapcar #'traced-call-thread calls) :from-end t)))
    (push-record "trace" :functions functions :calls (tracer-count tracer)
                         :recorded (length calls)
                         :omitted (max 0 (- (tracer-count tracer) (length calls)))
                         :stopped (tracer-stopped tracer))
    (dolist (thread (cons sb-thread:*current-thread* (remove sb-thread:*current-thread* threads)))
      (dolist (call calls)
        (when (eq thread (traced-call-thread call))
          (when (minusp (decf shown))
            (return-from push-traced-calls))
          (let ((end (traced-call-end call)))
            (sb-thread:barrier (:read))
            (push-record "call"
                         :thread (unless (eq thread sb-thread:*current-thread*)
                                   (let ((name (sb-thread:thread-name thread)))
                                     (if (stringp name) name "unnamed")))
                         :depth (traced-call-depth call)
                         :text (recorded-call-text call)
                         :end (string-downcase (or end :running))
                         :result (recorded-result-text call)
                         :nanoseconds (traced-call-nanoseconds call)
                         :deeper (and (plusp (traced-call-deeper call)) (traced-call-deeper call)))))))))
