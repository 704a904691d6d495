;;;; Output streams that push their text to the host as events. The standard streams are permanent and push for the job of
;;;; the thread that prints to them. A text stream is for one text, such as a printed value.

(in-package "SBCL-HOST")

;;; The numbers of operations of a stream's MISC function. SBCL's macro %STREAM-OPCODE (src/code/ansi-stream.lisp) does not
;;; exist in the finished SBCL, so the numbers are repeated here. An assumption in patches.lisp checks these numbers.
(eval-when (:compile-toplevel :load-toplevel :execute)
  (defconstant +listen+ 0)
  (defconstant +force-output+ 2)
  (defconstant +finish-output+ 3)
  (defconstant +charpos+ 4)
  (defconstant +element-type+ 7)
  (defconstant +element-mode+ 8)
  (defconstant +external-format+ 9)
  (defconstant +line-length+ 10)
  (defconstant +close+ 15))

(defconstant +buffer-size+ 1024
  "The number of characters that a stream buffers before it pushes them.")

(defconstant +program-job+ (declared-number "SBCL_JOB_PROGRAM")
  "The job number for output of the embedding program's own threads and of the threads that they start.")

(declaim (type (unsigned-byte 64) *job-id*))
(defvar *job-id* 0
  "The number of the job that this thread works for, or 0. A thread that an evaluation starts inherits the number, unless
the thread is ephemeral, as a timer's thread is.")

(declaim (inline column-after))
(defun column-after (column string start end)
  "Return the column that output reaches when the characters of STRING from START below END are written from COLUMN on."
  (declare (type index column start end) (type (simple-array * (*)) string))
  (let ((newline (position #\Newline string :start start :end end :from-end t)))
    (if newline
        (- end newline 1)
        (+ column (- end start)))))

;;; The standard streams

(defstruct (thread-output (:copier nil) (:predicate nil))
  "The output that a thread has printed to the standard streams and not pushed yet. Both standard streams share one buffer,
so their output is pushed in the order in which it was printed."
  (buffer nil :type (or null text))
  (fill 0 :type index)
  ;; The standard stream to which all text in the buffer was printed.
  (stream nil :type (or null standard-stream))
  ;; The octets of a character that WRITE-BYTE has written only in part, newest first.
  (octets '() :type list)
  ;; The column of each standard stream, indexed by STANDARD-STREAM-COLUMN-INDEX.
  (columns (make-array 2 :element-type 'index :initial-element 0) :type (simple-array index (2)))
  ;; A buffer, allocated earlier, that this thread's next text stream can use; or NIL.
  (spare-buffer nil :type (or null text)))

(declaim (type (or null thread-output) *thread-output*))
(defvar *thread-output* nil
  "The THREAD-OUTPUT of this thread, or NIL. Without a THREAD-OUTPUT, the output of the thread is not buffered. The global
value must be NIL: new threads begin with the global value, and foreign threads use it.")

(defstruct (standard-stream (:include sb-kernel:ansi-stream
                             (cout #'print-character)
                             (sout #'print-string)
                             (bout #'print-octet)
                             (misc #'operate-standard-stream))
                            (:constructor make-standard-stream (event-kind column-index))
                            (:copier nil)
                            (:predicate nil))
  "An output stream that pushes events of EVENT-KIND for the job of the thread that prints. As SBCL's own standard streams
do, the stream accepts octets as well as characters."
  (event-kind 0 :type (unsigned-byte 32) :read-only t)
  ;; The index of this stream's column in the slot COLUMNS of a THREAD-OUTPUT.
  (column-index 0 :type (integer 0 1) :read-only t)
  ;; The column of this stream for all threads without a THREAD-OUTPUT.
  (column 0 :type index))

(declaim (type (or null function) *on-output*))
(defvar *on-output* nil
  "A function that also receives the output of this thread to the standard streams; or NIL. The function's arguments
are a string, and the start and end of the output in the string.")

(declaim (inline push-output))
(defun push-output (stream string start end)
  "Push the characters of STRING from START below END, which were printed to STREAM."
  (declare (type standard-stream stream) (type string string) (type index start end))
  (push-event-text *job-id* (standard-stream-event-kind stream) 0 string start end)
  (when *on-output*
    (funcall *on-output* string start end)))

(defun flush-output ()
  "Push the buffered output of this thread."
  (let ((output *thread-output*))
    (when output
      (without-interrupts
        (let ((fill (thread-output-fill output)))
          (unless (zerop fill)
            (setf (thread-output-fill output) 0)
            (push-output (thread-output-stream output) (the text (thread-output-buffer output)) 0 fill)))))))

(defun finish-job-output ()
  "Push the buffered output of this thread, discard an incomplete character, and set the columns to 0, because the next
job's output starts a new line."
  (let ((output *thread-output*))
    (when output
      (flush-output)
      (setf (thread-output-octets output) '())
      (fill (thread-output-columns output) 0))))

(declaim (inline column))
(defun column (output stream)
  "Return the column at which the thread of OUTPUT, a THREAD-OUTPUT, prints to STREAM."
  (aref (thread-output-columns output) (standard-stream-column-index stream)))

(defun (setf column) (column output stream)
  (setf (aref (thread-output-columns output) (standard-stream-column-index stream)) column))

(declaim (inline prepare-output))
(defun prepare-output (output stream count)
  "Make room in the buffer of OUTPUT for COUNT characters that are printed to STREAM, and return the buffer. If the buffer
is too full or contains text of another stream, push its text first. COUNT must not exceed +BUFFER-SIZE+."
  (declare (type thread-output output) (type standard-stream stream) (type index count))
  (unless (and (eq stream (thread-output-stream output))
               (<= (+ (thread-output-fill output) count) +buffer-size+))
    (flush-output)
    (setf (thread-output-stream output) stream))
  (or (thread-output-buffer output)
      (setf (thread-output-buffer output) (make-string +buffer-size+))))

(defun print-character (stream character)
  "Implement WRITE-CHAR for the standard streams."
  (declare (type standard-stream stream) (type character character))
  (let ((output *thread-output*))
    (if output
        (without-interrupts
          (when (thread-output-octets output)
            (print-unfinished-character stream output))
          (let ((buffer (prepare-output output stream 1)))
            (setf (schar buffer (thread-output-fill output)) character)
            (incf (thread-output-fill output))
            (cond ((char= character #\Newline)
                   (setf (column output stream) 0)
                   (flush-output))
                  (t (incf (column output stream))))))
        (print-string stream (string character) 0 1)))
  character)

(defun print-string (stream string start end)
  "Implement WRITE-STRING for the standard streams."
  (declare (type standard-stream stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (let ((output *thread-output*)
          (length (- end start)))
      (cond ((zerop length))
            ((null output)
             (setf (standard-stream-column stream)
                   (column-after (standard-stream-column stream) string start end))
             ;; Push the program's output for +PROGRAM-JOB+. Push other output for no job (0), because the thread's job may
             ;; have ended.
             (push-event-text (if (eql *job-id* +program-job+) *job-id* 0)
                              (standard-stream-event-kind stream) 0 string start end))
            (t
             (without-interrupts
               (when (thread-output-octets output)
                 (print-unfinished-character stream output))
               (setf (column output stream) (column-after (column output stream) string start end))
               (cond ((> length +buffer-size+)
                      (flush-output)
                      (push-output stream string start end))
                     (t
                      (replace (prepare-output output stream length) string
                               :start1 (thread-output-fill output) :start2 start :end2 end)
                      (incf (thread-output-fill output) length)
                      (when (find #\Newline string :start start :end end)
                        (flush-output)))))))))
  string)

(defun utf-8-sequence-length (octet)
  "Return the number of octets of a UTF-8 character whose first octet is OCTET; 1 if no character begins with OCTET."
  (declare (type (unsigned-byte 8) octet))
  (cond ((<= #xC2 octet #xDF) 2)
        ((<= #xE0 octet #xEF) 3)
        ((<= #xF0 octet #xF4) 4)
        (t 1)))

(defun print-octets (stream octets)
  "Decode OCTETS, a list, as UTF-8 and print the characters to STREAM, with U+FFFD for invalid octets."
  (loop for character across (sb-ext:octets-to-string (coerce octets '(vector (unsigned-byte 8)))
                                                      :external-format '(:utf-8 :replacement #\ufffd))
        do (print-character stream character)))

(defun print-unfinished-character (stream output)
  "Print the incomplete character in OUTPUT to STREAM as U+FFFD, because its remaining octets will not follow."
  (print-octets stream (nreverse (shiftf (thread-output-octets output) '()))))

(defun print-octet (stream octet)
  "Implement WRITE-BYTE for the standard streams."
  (declare (type standard-stream stream))
  (unless (typep octet '(unsigned-byte 8))
    (error 'type-error :datum octet :expected-type '(unsigned-byte 8)))
  (let ((output *thread-output*))
    (if output
        (without-interrupts
          (unless (eql 2 (ash octet -6))
            (when (thread-output-octets output)
              (print-unfinished-character stream output)))
          (push octet (thread-output-octets output))
          (let ((octets (thread-output-octets output)))
            (when (= (length octets) (utf-8-sequence-length (car (last octets))))
              (setf (thread-output-octets output) '())
              (print-octets stream (reverse octets)))))
        (print-octets stream (list octet))))
  octet)

(defun operate-standard-stream (stream operation argument)
  "Implement OPERATION, a number such as +CHARPOS+, for the standard streams. Closing a standard stream does nothing,
because the next evaluation needs it."
  (declare (type standard-stream stream) (ignore argument))
  (case operation
    ((#.+force-output+ #.+finish-output+) (flush-output) nil)
    (#.+charpos+ (let ((output *thread-output*))
                   (if output
                       (column output stream)
                       (standard-stream-column stream))))
    (#.+element-type+ 'character)
    (#.+element-mode+ :bivalent)
    (#.+external-format+ '(:utf-8 :replacement #\ufffd))
    (#.+line-length+ 80)
    (#.+close+ t)))

(defstruct (empty-stream (:include sb-kernel:ansi-stream
                          (in #'signal-end-of-file)
                          (bin #'signal-end-of-file)
                          (n-bin #'read-no-octets)
                          (misc #'operate-empty-stream))
                         (:copier nil)
                         (:predicate nil))
  "An input stream that is always at its end, because the image has no source of input.")

(defun signal-end-of-file (stream eof-error-p eof-value)
  "Implement READ-CHAR and READ-BYTE for the empty stream."
  (sb-impl::eof-or-lose stream eof-error-p eof-value))

(define-byte-reader read-no-octets (stream eof-error-p)
  "Implement READ-N-BYTES for the empty stream."
  (if eof-error-p (error 'end-of-file :stream stream) 0))

(defun operate-empty-stream (stream operation argument)
  "Implement OPERATION, a number such as +LISTEN+, for the empty stream."
  (declare (ignore stream argument))
  (case operation
    (#.+listen+ :eof)
    (#.+element-type+ 'character)
    (#.+element-mode+ :bivalent)
    (#.+external-format+ '(:utf-8 :replacement #\ufffd))
    (#.+close+ t)))

(sb-ext:define-load-time-global **stdout** (make-standard-stream (event-code :stdout) 0)
  "The stream behind *STANDARD-OUTPUT*.")
(sb-ext:define-load-time-global **stderr** (make-standard-stream (event-code :stderr) 1)
  "The stream behind *ERROR-OUTPUT* and *TRACE-OUTPUT*.")
(declaim (type standard-stream **stdout** **stderr**))

(defstruct (standard-variable (:constructor make-standard-variable (symbol target))
                              (:copier nil) (:predicate nil))
  "The state of one standard stream variable."
  (symbol nil :type symbol :read-only t)
  ;; The stream variable to which the variable's initial synonym stream leads, such as SB-SYS:*STDOUT*.
  (target nil :type symbol :read-only t)
  ;; The variable's initial synonym stream, and the stream's initial MISC function. Closing the stream replaces the
  ;; function, so the function shows whether the stream is open.
  (stream nil)
  (misc nil)
  ;; The user's stream that was last reported as the variable's value, or NIL.
  (reported nil))

(sb-ext:define-load-time-global **standard-variables**
    (loop for (symbol target) in '((*terminal-io* sb-sys:*tty*) (*query-io* *terminal-io*) (*debug-io* *terminal-io*)
                                   (*standard-input* sb-sys:*stdin*) (*standard-output* sb-sys:*stdout*)
                                   (*error-output* sb-sys:*stderr*) (*trace-output* sb-sys:*stderr*))
          collect (make-standard-variable symbol target))
  "The standard stream variables, a list of STANDARD-VARIABLE structures. The variables lead to the same targets as in bare
SBCL (STREAM-COLD-INIT-OR-RESET in src/code/stream.lisp), except for *TRACE-OUTPUT*, which leads to stderr.")

(defun reset-standard-variable (variable)
  "Set VARIABLE to a fresh synonym stream for its initial target."
  (let ((stream (make-synonym-stream (standard-variable-target variable))))
    (publish (standard-variable-stream variable) stream)
    (setf (standard-variable-misc variable) (sb-kernel:ansi-stream-misc stream)
          (standard-variable-reported variable) nil
          (symbol-value (standard-variable-symbol variable)) stream)))

(defun standard-variable-unchanged-p (variable)
  "Return true when VARIABLE still holds its initial stream and that stream is open."
  (declare (type standard-variable variable))
  (let ((stream (symbol-value (standard-variable-symbol variable))))
    (and (eq stream (standard-variable-stream variable))
         (eq (sb-kernel:ansi-stream-misc (the synonym-stream stream)) (standard-variable-misc variable)))))

(declaim (type list **system-streams**))
(sb-ext:define-load-time-global **system-streams** '()
  "The variables that hold SBCL's own standard streams, as lists of three elements: the variable, the stream to which
INSTALL-STANDARD-STREAMS set it, and the user's stream that was last reported as its value, or NIL.")

(defun install-standard-streams ()
  "Redirect SBCL's standard streams and its terminal stream to the host. Every read from these streams finds the end of
the file."
  (when (sb-sys:fd-stream-p sb-sys:*tty*)
    (close sb-sys:*tty*))
  (let ((stdin (make-empty-stream)))
    (publish sb-sys:*stdin* stdin)
    (setf sb-sys:*stdout* **stdout**
          sb-sys:*stderr* **stderr**)
    (publish sb-sys:*tty* (make-two-way-stream stdin **stdout**))
    (publish **system-streams** (loop for symbol in '(sb-sys:*stdin* sb-sys:*stdout* sb-sys:*stderr* sb-sys:*tty*)
                                      collect (list symbol (symbol-value symbol) nil))))
  (mapc #'reset-standard-variable **standard-variables**))

(defun error-output-is-stderr-p ()
  "Return true when output to *ERROR-OUTPUT* goes to the host's stderr, because the user has not redirected it."
  (loop for stream = *error-output* then (symbol-value (synonym-stream-symbol stream))
        repeat 10
        while (typep stream 'synonym-stream)
        finally (return (eq stream **stderr**))))

;;; Text streams

(declaim (inline take-buffer))
(defun take-buffer ()
  "Return this thread's spare buffer, or a new one."
  (let ((output *thread-output*))
    (the text (or (and output (shiftf (thread-output-spare-buffer output) nil))
                  (make-string +buffer-size+)))))

(defstruct (text-stream (:include sb-kernel:ansi-stream
                         (cout #'send-character)
                         (sout #'send-string)
                         (misc #'operate-text-stream))
                        (:constructor make-text-stream (event-kind limited &aux (buffer (take-buffer))))
                        (:copier nil)
                        (:predicate nil))
  "A character output stream, used by one thread, that pushes events of EVENT-KIND for the thread's job."
  (event-kind 0 :type (unsigned-byte 32) :read-only t)
  ;; True when the stream throws to the catch tag ENOUGH once the host wants no more text.
  (limited nil :read-only t)
  ;; The text not pushed yet, or NIL once the text is complete. Output that is printed later is discarded.
  (buffer nil :type (or null text))
  (fill 0 :type index)
  (column 0 :type index))

(declaim (type (or null function) *text-sink*))
(defvar *text-sink* nil
  "A function that receives the text of this thread's text streams instead of the host; or NIL. The function's arguments
are a string, and the start and end of the text in the string. The function returns true when it wants no more text.")

(defun push-stream-text (stream string start end)
  "Push the characters of STRING from START below END, which were printed to STREAM. If STREAM is limited and the receiver
wants no more text, throw to ENOUGH."
  (when (and (if *text-sink*
                 (funcall *text-sink* string start end)
                 (push-event-text *job-id* (text-stream-event-kind stream) 0 string start end))
             (text-stream-limited stream))
    (throw 'enough nil)))

(defun flush-text-stream (stream)
  "Push the buffered text of STREAM."
  (declare (type text-stream stream))
  (let ((fill (text-stream-fill stream)))
    (unless (zerop fill)
      (setf (text-stream-fill stream) 0)
      (push-stream-text stream (the text (text-stream-buffer stream)) 0 fill))))

(defun finish-text-stream (stream)
  "Push the buffered text of STREAM. If this thread has a THREAD-OUTPUT, make the buffer of STREAM its spare buffer."
  (flush-text-stream stream)
  (let ((buffer (shiftf (text-stream-buffer stream) nil))
        (output *thread-output*))
    (when output
      (setf (thread-output-spare-buffer output) buffer))))

(defun send-character (stream character)
  "Implement WRITE-CHAR for text streams."
  (declare (type text-stream stream) (type character character))
  (let ((buffer (text-stream-buffer stream)))
    (when buffer
      (when (= (text-stream-fill stream) +buffer-size+)
        (flush-text-stream stream))
      (setf (schar buffer (text-stream-fill stream)) character)
      (incf (text-stream-fill stream))
      (setf (text-stream-column stream)
            (if (char= character #\Newline) 0 (1+ (text-stream-column stream))))))
  character)

(defun send-string (stream string start end)
  "Implement WRITE-STRING for text streams."
  (declare (type text-stream stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (let ((buffer (text-stream-buffer stream))
          (length (- end start)))
      (when buffer
        (setf (text-stream-column stream) (column-after (text-stream-column stream) string start end))
        (when (> (+ (text-stream-fill stream) length) +buffer-size+)
          (flush-text-stream stream))
        (cond ((> length +buffer-size+)
               (push-stream-text stream string start end))
              (t
               (replace buffer string :start1 (text-stream-fill stream) :start2 start :end2 end)
               (incf (text-stream-fill stream) length))))))
  string)

(defun operate-text-stream (stream operation argument)
  "Implement OPERATION, a number such as +CHARPOS+, for text streams."
  (declare (type text-stream stream) (ignore argument))
  (case operation
    ((#.+force-output+ #.+finish-output+) (flush-text-stream stream) nil)
    (#.+charpos+ (text-stream-column stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+external-format+ :utf-8)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defun change-job (job-id)
  "Push the output of this thread's current job, and make the thread work for JOB-ID from now on."
  (finish-job-output)
  (setf *job-id* job-id))

(defun push-done (success)
  "Push the event that ends this thread's job. SUCCESS is true when the job succeeded. Return true when the thread must end,
because the host has abandoned it."
  (event *job-id* (event-code :done) (if success 0 1)))
