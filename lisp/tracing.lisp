;;;; trace-calls: which calls of some functions an evaluation comes to, as a tree.
;;;;
;;;; The functions are encapsulated, as TRACE does it, under a type of this file's own: what the user traces stays as it is.
;;;; Encapsulations are global, so calls in all threads are seen.

(in-package "SBCL-HOST")

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
(defconstant +traced-functions+ 2000
  "How many functions are traced at once, at most.")

(defstruct (traced-call (:conc-name call-of-) (:copier nil) (:predicate nil)
                        (:constructor make-traced-call (number depth thread)))
  "A call that was recorded."
  (number 0 :type sb-ext:word :read-only t)
  (depth 0 :type index :read-only t)
  (thread nil :read-only t)
  (text "" :type string)
  ;; How it ended: :RETURNED, :FAILED, :LEFT by a non-local exit; NIL while it goes on.
  (end nil :type symbol)
  ;; Its values, or the error.
  (result "" :type string)
  (nanoseconds 0 :type (unsigned-byte 62))
  ;; Nanoseconds of that which went into the recording of calls in it.
  (overhead 0 :type (unsigned-byte 62))
  ;; Calls within it that were too deep to be recorded.
  (deeper 0 :type sb-ext:word))

(defstruct (tracer (:copier nil) (:predicate nil) (:constructor make-tracer (depth limit)))
  "What is recorded of the calls of some functions."
  (depth 5 :type index :read-only t)
  (limit 200 :type index :read-only t)
  (active t :type boolean)
  ;; The recorded ones, in no order.
  (calls '() :type list)
  ;; How many there were, but those too deep.
  (count 0 :type sb-ext:word)
  ;; The condition that was printed last, with what came of that.
  (failure '() :type list))

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

(defun record-call (tracer name function arguments number depth)
  "Call FUNCTION, which is NAME's, with ARGUMENTS and record that as call NUMBER of TRACER, DEPTH recorded ones deep."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (let* ((parent *traced-call*)
         ;; What is done here may call functions that are traced; FUNCTION is called with this being NIL.
         (*recording-call* t)
         (begun (nanoseconds))
         (call (make-traced-call number depth sb-thread:*current-thread*))
         (start begun)
         (failure nil))
    (setf (call-of-text call)
          (or (short-text +call-text+ (lambda (stream)
                                        (format stream "(~S~{ ~S~})" name arguments)))
              (value-short-text (list name (make-symbol "…")) +call-text+)))
    (sb-ext:atomic-push call (tracer-calls tracer))
    (flet ((finish (end result)
             (declare (type (unsigned-byte 62) end))
             (setf (call-of-nanoseconds call) (max 0 (- end start (call-of-overhead call)))
                   (call-of-result call) (funcall (the function result)))
             (when parent
               (incf (call-of-overhead parent)
                     (max 0 (- (nanoseconds) begun (call-of-nanoseconds call)))))))
      (unwind-protect
           (let ((values (handler-bind ((serious-condition (lambda (condition)
                                                             (unless *recording-call*
                                                               (setf failure (failure-text tracer condition))))))
                           (setf start (nanoseconds))
                           (let ((*traced-call* call) (*recording-call* nil))
                             (multiple-value-list (apply function arguments))))))
             (finish (nanoseconds) (lambda ()
                                     (or (short-text +call-text+ (lambda (stream) (format stream "~{~S~^, ~}" values)))
                                         "#<unprintable>")))
             (setf (call-of-end call) :returned)
             (values-list values))
        (unless (call-of-end call)
          (finish (nanoseconds) (lambda () (or failure "")))
          (setf (call-of-end call) (if failure :failed :left)))))))

(defun call-traced (tracer name function arguments)
  "Call FUNCTION, which is NAME's, with ARGUMENTS, and record that if it is to be."
  (declare (type tracer tracer) (type function function) (type list arguments))
  (let ((parent *traced-call*))
    (if (or *recording-call* (not (tracer-active tracer)))
        (apply function arguments)
        (let ((depth (if parent (1+ (call-of-depth parent)) 0)))
          (cond ((and parent (>= depth (tracer-depth tracer)))
                 (sb-ext:atomic-incf (call-of-deeper parent))
                 (apply function arguments))
                (t
                 (let ((number (sb-ext:atomic-incf (tracer-count tracer))))
                   (if (>= number (tracer-limit tracer))
                       (apply function arguments)
                       (record-call tracer name function arguments number depth)))))))))

;;; Which functions

(defun traceable-p (name)
  "True when NAME, a function name, has a function that can be traced."
  (and (fboundp name)
       (not (and (symbolp name) (or (macro-function name) (special-operator-p name))))))

(defun function-name-to-trace (text package)
  "Return the function name that TEXT means in the package named PACKAGE: foo, pkg::foo or (setf foo). Signal an error when it
has no function."
  (let* ((trimmed (string-trim '(#\Space #\Tab #\Newline #\') text))
         (setf (and (eql 6 (mismatch "(setf " trimmed :test #'char-equal))
                    (char= #\) (char trimmed (1- (length trimmed))))))
         (symbol-text (if setf (subseq trimmed 6 (1- (length trimmed))) trimmed)))
    (multiple-value-bind (symbol found name looked-in) (locate-symbol symbol-text package)
      (let ((name-of (if setf (list 'setf symbol) symbol)))
        (cond ((and found (traceable-p name-of)) name-of)
              ((and found (symbolp name-of) (fboundp name-of))
               (error "~A is a ~:[macro~;special operator~]: only functions can be traced." trimmed
                      (special-operator-p name-of)))
              (t
               (error "There is no function ~A in package ~A.~@[ Near names: ~{~A~^, ~}.~] Local functions (FLET, LABELS) ~
                       are not traced: trace the function around them."
                      (if setf trimmed name) (package-name looked-in)
                      (near-symbol-names name looked-in #'traceable-p))))))))

(defun functions-of-package (package)
  "Return the names of the functions in PACKAGE that are its own."
  (let ((names '()))
    (do-symbols (symbol package)
      (when (eq package (symbol-package symbol))
        (dolist (name (list symbol (list 'setf symbol)))
          (when (traceable-p name)
            (pushnew name names :test #'equal)))))
    names))

(defun names-to-trace (functions package)
  "Return the names of FUNCTIONS, a list of texts in *PACKAGE*, or else of the functions in PACKAGE."
  (if functions
      (remove-duplicates (mapcar (lambda (text) (function-name-to-trace text "")) functions) :test #'equal)
      (let ((found (find-user-package package)))
        (when (or (sb-ext:package-locked-p found) (eq found (find-package "SBCL-HOST")))
          (error "Package ~A is SBCL's own (it is locked): name the functions of it that are to be traced."
                 (package-name found)))
        (let ((names (functions-of-package found)))
          (cond ((null names)
                 (error "Package ~A has no functions of its own." (package-name found)))
                ((> (length names) +traced-functions+)
                 (error "Package ~A has ~D functions, and ~D are traced at most: name those that matter."
                        (package-name found) (length names) +traced-functions+)))
          names))))

(defun call-with-traced-functions (tracer names function)
  "Call FUNCTION with the functions of NAMES traced by TRACER."
  (declare (type function function))
  (let ((encapsulated '()))
    (unwind-protect
         (progn
           (sb-ext:without-package-locks
             (dolist (name names)
               (let ((name name))
                 (push name encapsulated)
                 (encapsulate name 'trace-calls
                              (lambda (function &rest arguments)
                                (call-traced tracer name function arguments))))))
           (funcall function))
      (setf (tracer-active tracer) nil)
      (without-interrupts
        (sb-ext:without-package-locks
          (dolist (name encapsulated)
            (guarded (sb-int:unencapsulate name 'trace-calls) (failure) nil)))))))

(defun push-traced-calls (tracer names)
  "Push what TRACER has recorded of the functions of NAMES: those of this thread first, each thread's in order."
  (let* ((calls (sort (copy-list (tracer-calls tracer)) #'< :key #'call-of-number))
         (threads (remove-duplicates (mapcar #'call-of-thread calls) :from-end t)))
    (push-record "trace" :functions (length names) :calls (tracer-count tracer)
                         :omitted (max 0 (- (tracer-count tracer) (length calls))))
    (dolist (thread (cons sb-thread:*current-thread* (remove sb-thread:*current-thread* threads)))
      (dolist (call calls)
        (when (eq thread (call-of-thread call))
          (push-record "call"
                       :thread (unless (eq thread sb-thread:*current-thread*)
                                 (let ((name (sb-thread:thread-name thread)))
                                   (if (stringp name) name "unnamed")))
                       :depth (call-of-depth call)
                       :text (call-of-text call)
                       :end (string-downcase (or (call-of-end call) :running))
                       :result (call-of-result call)
                       :nanoseconds (call-of-nanoseconds call)
                       :deeper (call-of-deeper call)))))))

(define-operation :trace-calls (evaluate &key functions package depth limit)
  "Evaluate the code with FUNCTIONS traced, a list of texts, or else those of PACKAGE; record calls less than DEPTH recorded
ones deep, LIMIT at most."
  (let* ((names (names-to-trace functions package))
         (tracer (make-tracer depth limit)))
    (unwind-protect
         (call-with-traced-functions tracer names #'evaluate)
      (push-traced-calls tracer names))))
