;;;; trace-calls: which calls of some functions an evaluation comes to, as a tree.
;;;;
;;;; What traced-functions.lisp knows how to trace has its calls recorded here, in all threads.

(in-package "SBCL-HOST/TOOLS")

;;; Short texts

(defstruct (short-stream (:include sb-kernel:ansi-stream
                          (cout #'send-short-character)
                          (sout #'send-short-string)
                          (misc #'operate-short-stream))
                         (:constructor make-short-stream (limit &aux (buffer (make-string limit))))
                         (:copier nil)
                         (:predicate nil))
  "A character output stream that throws to SHORT when it is full. Line breaks are blanks there."
  (buffer "" :type text)
  (fill 0 :type index))

(defun send-short-character (stream character)
  "The stream's WRITE-CHAR."
  (declare (type short-stream stream) (type character character))
  (let ((buffer (short-stream-buffer stream))
        (fill (short-stream-fill stream)))
    (when (= fill (length buffer))
      (throw 'short nil))
    (setf (schar buffer fill) (if (member character '(#\Newline #\Return)) #\Space character)
          (short-stream-fill stream) (1+ fill)))
  character)

(defun send-short-string (stream string start end)
  "The stream's WRITE-STRING."
  (declare (type short-stream stream) (type string string) (type index start) (type (or index null) end))
  (loop for index from start below (or end (length string))
        do (send-short-character stream (char string index)))
  string)

(defun operate-short-stream (stream operation argument)
  "The stream's other operations."
  (declare (type short-stream stream) (ignore argument))
  (case operation
    (#.+charpos+ (short-stream-fill stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defun short-text (limit function)
  "Return what FUNCTION prints to its argument under the server's syntax, on one line, at most LIMIT characters and then an
ellipsis; NIL when it fails."
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
  "Return OBJECT as printed, at most LIMIT characters of it."
  (or (short-text limit (lambda (stream) (prin1 object stream)))
      (format nil "#<unprintable ~A>" (type-name-text (class-name-of object)))))

;;; Calls

(defconstant +call-text+ 200
  "Characters of a call with its arguments, of its values, and of an error's report.")
(defstruct (traced-call (:conc-name call-of-) (:copier nil) (:predicate nil)
                        (:constructor make-traced-call (number depth thread name)))
  "A call that was recorded."
  (number 0 :type sb-ext:word :read-only t)
  (depth 0 :type index :read-only t)
  (thread nil :read-only t)
  ;; The function's name; and the arguments as they are shown, or a list of them as KEPT-OBJECTS returns it.
  (name nil :read-only t)
  (arguments '() :type (or list string))
  ;; The *PACKAGE* of its thread.
  (package *package* :read-only t)
  ;; How it ended: :RETURNED, :FAILED, :LEFT by a non-local exit; NIL while it goes on.
  (end nil :type symbol)
  ;; Its values, as the arguments are kept, or the error.
  (result "" :type (or list string))
  (nanoseconds 0 :type (unsigned-byte 62))
  ;; Nanoseconds of that which went into the recording of calls in it.
  (overhead 0 :type (unsigned-byte 62))
  ;; Calls within it that were too deep to be recorded.
  (deeper 0 :type sb-ext:word)
  ;; When it began, in nanoseconds.
  (start 0 :type (unsigned-byte 62)))

(defstruct (tracer (:copier nil) (:predicate nil) 
                   (:constructor make-tracer (depth limit locals
                                              &aux (openings (and locals
                                                                  (make-hash-table :synchronized t :weakness :key))))))
  "What is recorded of the calls of some functions."
  (depth 5 :type index :read-only t)
  (limit 200 :type index :read-only t)
  (active t :type boolean)
  ;; The recorded ones, in no order.
  (calls '() :type list)
  ;; How many there were, but those too deep.
  (count 0 :type sb-ext:word)
  ;; The condition that was printed last, with what came of that.
  (failure '() :type list)
  ;; When local functions are traced: a table from threads to their OPENINGs, the innermost first.
  (openings nil :type (or null hash-table))
  ;; These are no longer traced, since another thread was started.
  (stopped nil :type boolean))

(defvar *traced-call* nil
  "The innermost recorded call that this thread is in.")

(defvar *recording-call* nil
  "True while a call is being recorded: what printing calls is not.")

(declaim (inline nanoseconds))
(defun nanoseconds ()
  "Return the time since some moment in the past."
  (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (declare (type (unsigned-byte 32) seconds nanoseconds))
    (the (unsigned-byte 62) (+ (* 1000000000 seconds) nanoseconds))))

(defun failure-text (tracer condition)
  "Return CONDITION's type and report. It is printed once, however many calls it ends."
  (let ((known (tracer-failure tracer)))
    (if (eq (car known) condition)
        (cdr known)
        (let* ((*recording-call* t)
               (type (type-name-text (class-name-of condition)))
               ;; There is no stack left for more.
               (report (unless (typep condition 'storage-condition)
                         (short-text +call-text+ (lambda (stream)
                                                   (let ((*print-escape* nil)) (princ condition stream))))))
               (text (format nil "~A~@[: ~A~]" type report)))
          (setf (tracer-failure tracer) (cons condition text))
          text))))

(defun call-text (name arguments)
  "Return the call of NAME, a function name, with ARGUMENTS, as it is shown."
  (or (short-text +call-text+ (lambda (stream) (format stream "(~S~{ ~S~})" name arguments)))
      (value-short-text (list name (make-symbol "…")) +call-text+)))

(defun values-text (values)
  "Return the list VALUES as it is shown."
  (or (short-text +call-text+ (lambda (stream) (format stream "~{~S~^, ~}" values)))
      "#<unprintable>"))

;;; Printing takes longer than all the rest of recording a call: what prints later as it does now is printed later.

(defconstant +kept-objects+ 10
  "Of how many arguments or values that is tried.")

(defun kept-objects (objects)
  "Return a list that prints later as the list OBJECTS does now; second value false when there is none."
  (declare (type list objects) (optimize speed))
  (let ((kept '()))
    (dotimes (count +kept-objects+ (values '() nil))
      (when (null objects)
        (return (values (nreverse kept) t)))
      (let ((object (pop objects)))
        (typecase object
          ((or fixnum symbol character number) (push object kept))
          (simple-string
           (when (> (length object) +call-text+)
             (return (values '() nil)))
           (push (copy-seq object) kept))
          (t (return (values '() nil))))))))

(defun kept-arguments (name arguments)
  "Return ARGUMENTS of a call of NAME as TRACED-CALLs keep them."
  (multiple-value-bind (kept whole) (kept-objects arguments)
    (if whole kept (call-text name arguments))))

(defun kept-values (values)
  "Return the list VALUES as TRACED-CALLs keep them."
  (multiple-value-bind (kept whole) (kept-objects values)
    (if whole kept (values-text values))))

(defun shown-call (call)
  "Return CALL with its arguments, as it is shown."
  (let ((arguments (call-of-arguments call)))
    (if (stringp arguments)
        arguments
        (let ((*package* (call-of-package call)))
          (call-text (call-of-name call) arguments)))))

(defun shown-result (call)
  "Return the values of CALL, or its error, as they are shown."
  (let ((result (call-of-result call)))
    (if (stringp result)
        result
        (let ((*package* (call-of-package call)))
          (values-text result)))))

(defun end-call (call end now result)
  "Note that CALL ended by END at NOW, in nanoseconds, with RESULT, a text or what KEPT-VALUES returns."
  (declare (type (unsigned-byte 62) now))
  (setf (call-of-nanoseconds call) (max 0 (- now (call-of-start call) (call-of-overhead call)))
        (call-of-result call) result
        (call-of-end call) end))

(defun note-overhead (parent call begun)
  "Note in PARENT, a call or NIL, what the recording of CALL took, which began at BEGUN."
  (declare (type (unsigned-byte 62) begun))
  (when parent
    (incf (call-of-overhead parent) (max 0 (- (nanoseconds) begun (call-of-nanoseconds call))))))

(defun record-call (tracer name function arguments number depth parent)
  "Call FUNCTION, which is NAME's, with ARGUMENTS and record that as call NUMBER of TRACER, DEPTH recorded ones deep, in the
call PARENT, if there is one."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (let* (;; What is done here may call functions that are traced; FUNCTION is called with this being NIL.
         (*recording-call* t)
         (begun (nanoseconds))
         (call (make-traced-call number depth sb-thread:*current-thread* name))
         (failure nil))
    (setf (call-of-arguments call) (kept-arguments name arguments))
    (sb-ext:atomic-push call (tracer-calls tracer))
    (flet ((finish (end now result)
             (end-call call end now result)
             (note-overhead parent call begun)))
      (unwind-protect
           (let ((values (handler-bind ((serious-condition (lambda (condition)
                                                             (unless *recording-call*
                                                               (setf failure (failure-text tracer condition))))))
                           (setf (call-of-start call) (nanoseconds))
                           (let ((*traced-call* call) (*recording-call* nil))
                             (multiple-value-list (apply function arguments))))))
             (finish :returned (nanoseconds) (kept-values values))
             (values-list values))
        (unless (call-of-end call)
          (finish (if failure :failed :left) (nanoseconds) (or failure "")))))))

(defun number-call (tracer parent)
  "Count a call in the call PARENT, or NIL. Return its number and depth, or NIL when it is not to be recorded."
  (declare (type tracer tracer))
  (let ((depth (if parent (1+ (call-of-depth parent)) 0)))
    (if (and parent (>= depth (tracer-depth tracer)))
        (progn (sb-ext:atomic-incf (call-of-deeper parent)) nil)
        (let ((number (sb-ext:atomic-incf (tracer-count tracer))))
          (and (< number (tracer-limit tracer))
               (values number depth))))))

(defun call-traced (tracer name function arguments)
  "Call FUNCTION, which is NAME's, with ARGUMENTS, and record that if it is to be."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (if (or *recording-call* (not (tracer-active tracer)))
      (apply function arguments)
      (let ((parent (innermost-call tracer)))
        (multiple-value-bind (number depth) (number-call tracer parent)
          (if number
              (record-call tracer name function arguments number depth parent)
              (apply function arguments))))))

;;; Calls of local functions: they begin and end at breakpoints, and nothing can be bound in between.

(defstruct (opening (:copier nil) (:predicate nil) (:constructor make-opening (call recorded parent within begun)))
  "A call of a local function that goes on."
  ;; The call that calls in it are in: itself, or where it is not recorded the one that it is in.
  (call nil :read-only t)
  (recorded nil :read-only t)
  (parent nil :read-only t)
  ;; What *TRACED-CALL* was.
  (within nil :read-only t)
  (begun 0 :type (unsigned-byte 62) :read-only t)
  ;; What SBCL knows the call by.
  (cookie nil))

(defmacro openings (tracer)
  "The calls of local functions that this thread is in, the innermost first."
  `(the list (gethash sb-thread:*current-thread* (tracer-openings ,tracer))))

(defun close-opening (opening end now result)
  "Note that OPENING's call ended by END at NOW with RESULT, as END-CALL takes it."
  (let ((call (opening-call opening)))
    (when (opening-recorded opening)
      (end-call call end now result)
      (note-overhead (opening-parent opening) call (opening-begun opening)))))

(defun close-left (tracer frame)
  "Note the end of those calls of local functions that are no longer on the stack from FRAME down: they were left."
  (loop for opening = (first (openings tracer))
        while (and opening
                   (not (and (opening-cookie opening)
                             (sb-di:fun-end-cookie-valid-p frame (opening-cookie opening)))))
        do (pop (openings tracer))
           (close-opening opening :left (nanoseconds) "")))

(defun innermost-call (tracer)
  "Return the recorded call that this thread is in, or NIL."
  (when (and (tracer-openings tracer) (openings tracer))
    (let ((*recording-call* t))
      (close-left tracer (sb-di:top-frame)))
    (let ((opening (first (openings tracer))))
      (when (and opening (eq (opening-within opening) *traced-call*))
        (return-from innermost-call (opening-call opening)))))
  *traced-call*)

(defun open-local-call (tracer name frame)
  "A call of the local function NAME begins in FRAME."
  (let ((begun (nanoseconds)))
    (close-left tracer frame)
    (let ((parent (innermost-call tracer)))
      (multiple-value-bind (number depth) (number-call tracer parent)
        (let ((call (if number
                        (make-traced-call number depth sb-thread:*current-thread* name)
                        parent)))
          (when number
            (setf (call-of-arguments call)
                  (kept-arguments name (guarded (nth-value 1 (sb-debug::frame-call frame)) (failure) '()))
                  (call-of-start call) begun)
            (sb-ext:atomic-push call (tracer-calls tracer)))
          (push (make-opening call (and number t) parent *traced-call* begun) (openings tracer)))))))

(defun begin-local-call (tracer cookie)
  "The call that was opened last is known by COOKIE, and its body begins."
  (let ((opening (first (openings tracer))))
    (when (and opening (null (opening-cookie opening)))
      (setf (opening-cookie opening) cookie)
      (when (opening-recorded opening)
        (setf (call-of-start (opening-call opening)) (nanoseconds))))))

(defun end-local-call (tracer cookie values)
  "The call that is known by COOKIE returns the list VALUES."
  (let ((now (nanoseconds)))
    (when (find cookie (openings tracer) :key #'opening-cookie)
      (loop for opening = (pop (openings tracer))
            until (eq cookie (opening-cookie opening))
            do (close-opening opening :left now "")
            finally (close-opening opening :returned now (kept-values values))))))

(defun close-all (tracer)
  "The code that was traced is over: so are this thread's calls of local functions."
  (when (tracer-openings tracer)
    (loop while (openings tracer)
          do (close-opening (pop (openings tracer)) :left (nanoseconds) ""))))

;;; What came of it

(defun push-traced-calls (tracer functions shown)
  "Push what TRACER has recorded of so many FUNCTIONS: those of this thread first, each thread's in order, SHOWN calls at
most. To print and push one takes several times as long as to record it."
  (let* ((calls (sort (copy-list (tracer-calls tracer)) #'< :key #'call-of-number))
         (threads (remove-duplicates (mapcar #'call-of-thread calls) :from-end t)))
    (push-record "trace" :functions functions :calls (tracer-count tracer)
                         :recorded (length calls)
                         :omitted (max 0 (- (tracer-count tracer) (length calls)))
                         :stopped (tracer-stopped tracer))
    (dolist (thread (cons sb-thread:*current-thread* (remove sb-thread:*current-thread* threads)))
      (dolist (call calls)
        (when (eq thread (call-of-thread call))
          (when (minusp (decf shown))
            (return-from push-traced-calls))
          (push-record "call"
                       :thread (unless (eq thread sb-thread:*current-thread*)
                                 (let ((name (sb-thread:thread-name thread)))
                                   (if (stringp name) name "unnamed")))
                       :depth (call-of-depth call)
                       :text (shown-call call)
                       :end (string-downcase (or (call-of-end call) :running))
                       :result (shown-result call)
                       :nanoseconds (call-of-nanoseconds call)
                       :deeper (and (plusp (call-of-deeper call)) (call-of-deeper call))))))))
