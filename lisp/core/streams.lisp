;;;; Streams whose output goes to the host as it is printed: the standard ones, which are there for ever and print into
;;;; the job of whoever uses them, and those that carry one text, such as a value's.

(in-package "SBCL-HOST")

;;; Operations of a stream's MISC function: %STREAM-OPCODE in SBCL's src/code/ansi-stream.lisp, which the finished
;;; image no longer has. A probe in patches.lisp shows that they are still these.
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
  "Characters that a stream keeps back before it hands them over.")

(defconstant +program-job+ (declared-number "SBCL_JOB_PROGRAM")
  "The job that threads of the program's, and those that they make, print into.")

(declaim (type (unsigned-byte 64) *job-id*))
(defvar *job-id* 0
  "The job that this thread works for; 0 for none. Threads made by the user's code inherit it.")

(defvar *spare-buffer* nil
  "A buffer of this thread's that no stream uses just now, or NIL.")

(declaim (inline take-buffer))
(defun take-buffer ()
  "Return this thread's spare buffer, or a new one."
  (the text (or (shiftf *spare-buffer* nil) (make-string +buffer-size+))))

(declaim (inline column-after))
(defun column-after (column string start end)
  "Return the column after the characters of STRING from START below END are written at COLUMN."
  (declare (type index column start end) (type (simple-array * (*)) string))
  (let ((newline (position #\Newline string :start start :end end :from-end t)))
    (if newline
        (- end newline 1)
        (+ column (- end start)))))

;;; The standard streams

(defstruct (output (:copier nil) (:predicate nil))
  "What a thread has printed to the standard streams and not handed over yet. One buffer for both keeps their order."
  (buffer nil :type (or null text))
  (fill 0 :type index)
  ;; The stream that the buffer's text was printed to.
  (stream nil :type (or null standard-stream))
  ;; An unfinished character, of a program that writes octets.
  (octets '() :type list)
  ;; One for each stream, by its place.
  (columns (make-array 2 :element-type 'index :initial-element 0) :type (simple-array index (2))))

(declaim (type (or null output) *output*))
(defvar *output* nil
  "What this thread keeps back of what it prints; NIL for one of nobody in particular, which keeps nothing back.")

(defstruct (standard-stream (:include sb-kernel:ansi-stream
                             (cout #'print-character)
                             (sout #'print-string)
                             (bout #'print-octet)
                             (misc #'operate-standard-stream))
                            (:constructor make-standard-stream (event-kind place))
                            (:copier nil)
                            (:predicate nil))
  "An output stream that pushes EVENT-KIND events of the job that the thread which prints works for. It takes octets,
too, as SBCL's own standard streams do."
  (event-kind 0 :type (unsigned-byte 32) :read-only t)
  (place 0 :type (integer 0 1) :read-only t)
  ;; The column of those threads that keep nothing back.
  (column 0 :type index))

(declaim (type (or null function) *on-output*))
(defvar *on-output* nil
  "A function of a string, a start and an end that is called with what this thread prints to the standard streams, too; or
NIL.")

(declaim (inline push-output))
(defun push-output (stream string start end)
  "Push the characters of STRING from START below END, which were printed to STREAM."
  (declare (type standard-stream stream) (type string string) (type index start end))
  (event-text *job-id* (standard-stream-event-kind stream) 0 string start end)
  (when *on-output*
    (funcall *on-output* string start end)))

(defun flush-output ()
  "Hand over what this thread has printed to the standard streams and kept back."
  (let ((output *output*))
    (when output
      (without-interrupts
        (let ((fill (output-fill output)))
          (unless (zerop fill)
            (setf (output-fill output) 0)
            (push-output (output-stream output) (the text (output-buffer output)) 0 fill)))))))

(defun finish-output-of-job ()
  "Hand over what this thread has printed, and begin anew: what the next job prints begins a line."
  (let ((output *output*))
    (when output
      (flush-output)
      (setf (output-octets output) '())
      (fill (output-columns output) 0))))

(declaim (inline column))
(defun column (output stream)
  "Return the column that STREAM is at in the thread that OUTPUT belongs to."
  (aref (output-columns output) (standard-stream-place stream)))

(defun (setf column) (column output stream)
  (setf (aref (output-columns output) (standard-stream-place stream)) column))

(declaim (inline prepare-output))
(defun prepare-output (output stream count)
  "Make room for COUNT characters in OUTPUT's buffer for what is printed to STREAM, and return the buffer."
  (declare (type output output) (type standard-stream stream) (type index count))
  (unless (and (eq stream (output-stream output))
               (<= (+ (output-fill output) count) +buffer-size+))
    (flush-output)
    (setf (output-stream output) stream))
  (or (output-buffer output)
      (setf (output-buffer output) (make-string +buffer-size+))))

(defun print-character (stream character)
  "The standard streams' WRITE-CHAR."
  (declare (type standard-stream stream) (type character character))
  (let ((output *output*))
    (if output
        (without-interrupts
          (when (output-octets output)
            (print-unfinished-character stream output))
          (let ((buffer (prepare-output output stream 1)))
            (setf (schar buffer (output-fill output)) character)
            (incf (output-fill output))
            (cond ((char= character #\Newline)
                   (setf (column output stream) 0)
                   (flush-output))
                  (t (incf (column output stream))))))
        (print-string stream (string character) 0 1)))
  character)

(defun print-string (stream string start end)
  "The standard streams' WRITE-STRING."
  (declare (type standard-stream stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (let ((output *output*)
          (length (- end start)))
      (cond ((zerop length))
            ((null output)
             (setf (standard-stream-column stream)
                   (column-after (standard-stream-column stream) string start end))
             ;; Whose job is over has nobody that it prints for; the program stays.
             (event-text (if (eql *job-id* +program-job+) *job-id* 0)
                         (standard-stream-event-kind stream) 0 string start end))
            (t
             (without-interrupts
               (when (output-octets output)
                 (print-unfinished-character stream output))
               (setf (column output stream) (column-after (column output stream) string start end))
               (cond ((> length +buffer-size+)
                      (flush-output)
                      (push-output stream string start end))
                     (t
                      (replace (prepare-output output stream length) string
                               :start1 (output-fill output) :start2 start :end2 end)
                      (incf (output-fill output) length)
                      (when (find #\Newline string :start start :end end)
                        (flush-output)))))))))
  string)

(defun character-octets (octet)
  "Return how many octets the character has in UTF-8 that begins with OCTET, 1 for what begins none."
  (declare (type (unsigned-byte 8) octet))
  (cond ((<= #xC2 octet #xDF) 2)
        ((<= #xE0 octet #xEF) 3)
        ((<= #xF0 octet #xF4) 4)
        (t 1)))

(defun print-octets (stream octets)
  "Print to STREAM the characters that OCTETS, a list, are in UTF-8, with U+FFFD for what is none."
  (loop for character across (sb-ext:octets-to-string (coerce octets '(vector (unsigned-byte 8)))
                                                      :external-format '(:utf-8 :replacement #\ufffd))
        do (print-character stream character)))

(defun print-unfinished-character (stream output)
  "Print to STREAM what stands for the character that OUTPUT has some octets of: no more will come."
  (print-octets stream (nreverse (shiftf (output-octets output) '()))))

(defun print-octet (stream octet)
  "The standard streams' WRITE-BYTE."
  (declare (type standard-stream stream))
  (unless (typep octet '(unsigned-byte 8))
    (error 'type-error :datum octet :expected-type '(unsigned-byte 8)))
  (let ((output *output*))
    (if output
        (without-interrupts
          (unless (eql 2 (ash octet -6))
            (when (output-octets output)
              (print-unfinished-character stream output)))
          (push octet (output-octets output))
          (let ((octets (output-octets output)))
            (when (= (length octets) (character-octets (car (last octets))))
              (setf (output-octets output) '())
              (print-octets stream (reverse octets)))))
        (print-octets stream (list octet))))
  octet)

(defun operate-standard-stream (stream operation argument)
  "The standard streams' other operations. Closing one does nothing: the next evaluation needs it as much as this one."
  (declare (type standard-stream stream) (ignore argument))
  (case operation
    ((#.+force-output+ #.+finish-output+) (flush-output) nil)
    (#.+charpos+ (let ((output *output*))
                   (if output
                       (column output stream)
                       (standard-stream-column stream))))
    (#.+element-type+ 'character)
    (#.+element-mode+ :bivalent)
    (#.+external-format+ '(:utf-8 :replacement #\ufffd))
    (#.+line-length+ 80)
    (#.+close+ t)))

(defstruct (empty-stream (:include sb-kernel:ansi-stream
                          (in #'meet-end-of-file)
                          (bin #'meet-end-of-file)
                          (n-bin #'read-no-octets)
                          (misc #'operate-empty-stream))
                         (:copier nil)
                         (:predicate nil))
  "An input stream that is at its end: there is nobody to ask.")

(defun meet-end-of-file (stream eof-error-p eof-value)
  "The empty stream's READ-CHAR and READ-BYTE."
  (sb-impl::eof-or-lose stream eof-error-p eof-value))

(defun read-no-octets (stream buffer sizes start count &optional (eof-error-p t))
  "The empty stream's READ-N-BYTES."
  (declare (ignore buffer sizes start count))
  (if eof-error-p (error 'end-of-file :stream stream) 0))

(defun operate-empty-stream (stream operation argument)
  "The empty stream's other operations."
  (declare (ignore stream argument))
  (case operation
    (#.+listen+ :eof)
    (#.+element-type+ 'character)
    (#.+element-mode+ :bivalent)
    (#.+external-format+ '(:utf-8 :replacement #\ufffd))
    (#.+close+ t)))

(sb-ext:define-load-time-global **stdout** (make-standard-stream (event-code :stdout) 0)
  "Where *STANDARD-OUTPUT* leads.")
(sb-ext:define-load-time-global **stderr** (make-standard-stream (event-code :stderr) 1)
  "Where *ERROR-OUTPUT* and *TRACE-OUTPUT* lead.")
(declaim (type standard-stream **stdout** **stderr**))

(defstruct (standard-variable (:constructor make-standard-variable (symbol target))
                              (:copier nil) (:predicate nil))
  "One of the variables that hold the standard streams."
  (symbol nil :type symbol :read-only t)
  ;; The variable of SBCL's that it leads to at first.
  (target nil :type symbol :read-only t)
  ;; The stream by which it does, and that one's MISC function: closing it changes that.
  (stream nil)
  (misc nil)
  ;; What else it was last told to hold.
  (told nil))

(sb-ext:define-load-time-global **standard-variables**
    (loop for (symbol target) in '((*terminal-io* sb-sys:*tty*) (*query-io* *terminal-io*) (*debug-io* *terminal-io*)
                                   (*standard-input* sb-sys:*stdin*) (*standard-output* sb-sys:*stdout*)
                                   (*error-output* sb-sys:*stderr*) (*trace-output* sb-sys:*stderr*))
          collect (make-standard-variable symbol target))
  "The standard stream variables. They hold what they hold under bare SBCL (STREAM-COLD-INIT-OR-RESET in
src/code/stream.lisp), but for *TRACE-OUTPUT*, which goes to stderr.")

(defun reset-standard-variable (variable)
  "Have VARIABLE lead where it does at first."
  (let ((stream (make-synonym-stream (standard-variable-target variable))))
    (setf (standard-variable-stream variable) stream
          (standard-variable-misc variable) (sb-kernel:ansi-stream-misc stream)
          (standard-variable-told variable) nil
          (symbol-value (standard-variable-symbol variable)) stream)))

(defun unchanged-p (variable)
  "True when VARIABLE leads where it does at first, by a stream that is open."
  (declare (type standard-variable variable))
  (let ((stream (symbol-value (standard-variable-symbol variable))))
    (and (eq stream (standard-variable-stream variable))
         (eq (sb-kernel:ansi-stream-misc (the synonym-stream stream)) (standard-variable-misc variable)))))

(declaim (type list **own-streams**))
(sb-ext:define-load-time-global **own-streams** '()
  "What the variables that SBCL's standard streams are in were set to here, and what else they were last told to hold:
lists of a symbol and two streams, or NIL.")

(defun install-standard-streams ()
  "Have SBCL's standard streams lead to the host, and let nobody read from the terminal."
  (when (sb-sys:fd-stream-p sb-sys:*tty*)
    (close sb-sys:*tty*))
  (let ((stdin (make-empty-stream)))
    (setf sb-sys:*stdin* stdin
          sb-sys:*stdout* **stdout**
          sb-sys:*stderr* **stderr**
          sb-sys:*tty* (make-two-way-stream stdin **stdout**)
          **own-streams** (loop for symbol in '(sb-sys:*stdin* sb-sys:*stdout* sb-sys:*stderr* sb-sys:*tty*)
                                collect (list symbol (symbol-value symbol) nil))))
  (mapc #'reset-standard-variable **standard-variables**))

(defun error-output-is-stderr-p ()
  "True when what is printed to *ERROR-OUTPUT* goes to the host's stderr: the user has bound it to nothing else."
  (loop for stream = *error-output* then (symbol-value (synonym-stream-symbol stream))
        repeat 10
        while (typep stream 'synonym-stream)
        finally (return (eq stream **stderr**))))

;;; Texts

(defstruct (text-stream (:include sb-kernel:ansi-stream
                         (cout #'send-character)
                         (sout #'send-string)
                         (misc #'operate-text-stream))
                        (:constructor make-text-stream (event-kind limited &aux (buffer (take-buffer))))
                        (:copier nil)
                        (:predicate nil))
  "A character output stream of one thread's that pushes EVENT-KIND events of its job."
  (event-kind 0 :type (unsigned-byte 32) :read-only t)
  ;; True: throw to ENOUGH when the host keeps no more.
  (limited nil :read-only t)
  ;; NIL once the text is complete: what is printed then goes nowhere.
  (buffer nil :type (or null text))
  (fill 0 :type index)
  (column 0 :type index))

(declaim (type (or null function) *text-sink*))
(defvar *text-sink* nil
  "A function that takes a string, a start and an end in place of the host, and returns as EVENT-TEXT does; or NIL.")

(defun hand-over (stream string start end)
  "Push the characters of STRING from START below END."
  (when (and (if *text-sink*
                 (funcall *text-sink* string start end)
                 (event-text *job-id* (text-stream-event-kind stream) 0 string start end))
             (text-stream-limited stream))
    (throw 'enough nil)))

(defun flush-text-stream (stream)
  "Hand over what STREAM has kept back."
  (declare (type text-stream stream))
  (let ((fill (text-stream-fill stream)))
    (unless (zerop fill)
      (setf (text-stream-fill stream) 0)
      (hand-over stream (the text (text-stream-buffer stream)) 0 fill))))

(defun finish-text-stream (stream)
  "Hand over what STREAM has kept back, and its buffer to the next stream."
  (flush-text-stream stream)
  (shiftf *spare-buffer* (text-stream-buffer stream) nil))

(defun send-character (stream character)
  "The stream's WRITE-CHAR."
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
  "The stream's WRITE-STRING."
  (declare (type text-stream stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (let ((buffer (text-stream-buffer stream))
          (length (- end start)))
      (when buffer
        (setf (text-stream-column stream) (column-after (text-stream-column stream) string start end))
        (when (> (+ (text-stream-fill stream) length) +buffer-size+)
          (flush-text-stream stream))
        (cond ((> length +buffer-size+)
               (hand-over stream string start end))
              (t
               (replace buffer string :start1 (text-stream-fill stream) :start2 start :end2 end)
               (incf (text-stream-fill stream) length))))))
  string)

(defun operate-text-stream (stream operation argument)
  "The stream's other operations."
  (declare (type text-stream stream) (ignore argument))
  (case operation
    ((#.+force-output+ #.+finish-output+) (flush-text-stream stream) nil)
    (#.+charpos+ (text-stream-column stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+external-format+ :utf-8)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defun change-job (job-id)
  "Have this thread work for JOB-ID from now on."
  (finish-output-of-job)
  (setf *job-id* job-id))

(defun done (success)
  "Tell the host that this thread's job is over. Return true when the thread is to end."
  (event *job-id* (event-code :done) (if success 0 1)))
