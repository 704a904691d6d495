;;;; Lisp objects as the host's programs see them: handles in a table, and messages of 64-bit words that Lisp and the
;;;; program exchange. A message is a sequence of tokens. Each token begins with a word that holds a tag in its low byte
;;;; and a number in the other bytes. The tag and the number determine which words and tokens follow as parts of the
;;;; token. src/image/message.rs is the Rust side of the format.

(in-package "SBCL-HOST/EMBEDDING")

;;; Handles: indices of a table. Each entry keeps an object alive until the host releases the handle.

(declaim (type simple-vector **handle-table**) (type (or null (unsigned-byte 32)) **free-handle**))
(defglobal **handle-table** (make-array 0)
  "The objects that the host refers to, indexed by handle. A free entry holds the index of the next free entry, or NIL.")
(defglobal **free-handle** nil
  "The index of the first free entry of **HANDLE-TABLE**, or NIL.")
(defglobal **handle-table-lock** (sb-thread:make-mutex :name "handle table")
  "The mutex that is held while **HANDLE-TABLE** and **FREE-HANDLE** change. Reading the object of a handle needs no lock.")

(defmacro with-handle-table (() &body body)
  "Evaluate BODY while no other thread can change the handle table. No deadline of user code ends the wait for the table: an
error there would lose handles, and the deadline is for the user's own code."
  `(let ((sb-impl::*deadline* nil))
     (sb-thread::with-system-mutex (**handle-table-lock**)
       ,@body)))

(defun grow-handle-table ()
  "Double the size of the handle table, unless it has a free entry by now. Existing handles stay valid."
  ;; The heap may be exhausted here. Handlers of the error may need handles, so the table is not locked yet.
  (let* ((old **handle-table**)
         (size (length old))
         (new (make-array (max 1024 (* 2 size)) :initial-element nil)))
    (loop for place from size below (1- (length new))
          do (setf (svref new place) (1+ place)))
    (with-handle-table ()
      (unless (or **free-handle** (not (eq old **handle-table**)))
        (replace new old)
        ;; Other threads read the table without the lock.
        (publish **handle-table** new)
        (setf **free-handle** size)))))

(defun make-handle (object)
  "Return a handle that keeps OBJECT alive."
  (loop thereis (with-handle-table ()
                  (let ((place **free-handle**))
                    (when place
                      (setf **free-handle** (svref **handle-table** place)
                            (svref **handle-table** place) object))
                    place))
        do (grow-handle-table)))

(declaim (inline handle-object))
(defun handle-object (handle)
  "Return the object that HANDLE refers to."
  (svref **handle-table** handle))

(defun release-handles (&rest handles)
  "Release HANDLES: their objects may be collected, and their entries reused."
  (declare (dynamic-extent handles))
  (with-handle-table ()
    (dolist (handle handles)
      (setf (svref **handle-table** handle) **free-handle**
            **free-handle** handle)))
  (values))

;;; Message buffers: foreign memory for messages, which no garbage collection moves

(declaim (inline make-message-buffer))
(defstruct (message-buffer (:conc-name buffer-) (:copier nil) (:predicate nil))
  "A buffer in which a thread writes its messages. ADDRESS is the buffer's address, CAPACITY its size in words, FILL the
number of words written, and HANDLES the number of handles in the current message."
  (address 0 :type (unsigned-byte 64))
  (capacity 0 :type (unsigned-byte 62))
  (fill 0 :type (unsigned-byte 62))
  (handles 0 :type (unsigned-byte 32)))

(defconstant +kept-capacity+ (ash 1 20)
  "The capacity, in words, to which a larger message buffer shrinks after a message that filled less than a quarter of it.")

(declaim (inline begin-message))
(defun begin-message (buffer)
  "Start a new message in BUFFER."
  (declare (type message-buffer buffer))
  (unless (and (zerop (buffer-handles buffer)) (<= (buffer-capacity buffer) +kept-capacity+))
    (reset-message-buffer buffer))
  (setf (buffer-fill buffer) 0))

(declaim (inline finish-message))
(defun finish-message (buffer)
  "Record that the message in BUFFER is complete. From here on, the program owns the handles in the message."
  (declare (type message-buffer buffer))
  (setf (buffer-handles buffer) 0))

(declaim (type (or null message-buffer) *message-buffer*))
(defvar *message-buffer* nil
  "The buffer in which this thread writes its next message to the host's program. NIL if the thread has no buffer, or while
its buffer holds an unfinished message: a call of the program then acquires another buffer.")

(defvar *caller-interruptible* nil
  "True when the code that called the program may be interrupted. If the program then calls Lisp, that Lisp code may be
interrupted, too.")

(defglobal **free-message-buffers** '()
  "The message buffers that no thread uses.")

(defconstant +max-message-words+ (ash 1 27)
  "Maximum number of words in a message. Without a limit, the message for a circular object would grow without end.")

(defconstant +max-message-handles+ (ash 1 22)
  "Maximum number of handles in a message. Each handle occupies an entry of **HANDLE-TABLE** and keeps an object alive.")

(defun resize-message-buffer (buffer capacity)
  "Set the capacity of BUFFER to CAPACITY words, and keep the words in BUFFER. If no memory is available, discard the
message and signal that the heap is exhausted."
  (let ((address (alien-funcall (extern-alien "realloc" (function (unsigned 64) (unsigned 64) (unsigned 64)))
                                (buffer-address buffer) (* 8 capacity))))
    (when (zerop address)
      (discard-message buffer)
      (error 'sb-kernel::heap-exhausted-error))
    (setf (buffer-address buffer) address
          (buffer-capacity buffer) capacity)))

(defun acquire-message-buffer ()
  "Return a message buffer that no other thread uses."
  (or (sb-ext:atomic-pop **free-message-buffers**)
      (let ((buffer (make-message-buffer)))
        (resize-message-buffer buffer 512)
        buffer)))

(defun discard-unfinished-message (buffer)
  "Discard the message in BUFFER if it is unfinished and holds handles."
  (unless (zerop (buffer-handles buffer))
    (discard-message buffer)))

(defun reset-message-buffer (buffer)
  "Discard the unfinished message in BUFFER, if there is one, and shrink BUFFER if its capacity is more than four times
the size of its last message."
  (discard-unfinished-message buffer)
  (when (< (* 4 (buffer-fill buffer)) (buffer-capacity buffer))
    (resize-message-buffer buffer (min (buffer-capacity buffer) +kept-capacity+))))

(defun release-message-buffer (buffer)
  "Make BUFFER available to other threads, after freeing the memory that a large message took."
  (begin-message buffer)
  (when (> (buffer-capacity buffer) 65536)
    (resize-message-buffer buffer 512))
  (sb-ext:atomic-push buffer **free-message-buffers**))

(defun return-message-buffer ()
  "Make this thread's message buffer available to other threads, and set *MESSAGE-BUFFER* to NIL. From here on, an interruption
that calls the program acquires another buffer."
  (without-interrupts
    (release-message-buffer (shiftf *message-buffer* nil))))

(define-condition unwritable-object (error)
  ()
  (:documentation "An error for an object that cannot be written into a message. Code that interrupts the writing signals
errors of other classes."))

(define-condition message-too-large (unwritable-object)
  ()
  (:report "The object is too large to be converted, or contains itself. In Rust, use a Value for the object instead.")
  (:documentation "The error that is signalled for a message of more than +MAX-MESSAGE-WORDS+ words or
+MAX-MESSAGE-HANDLES+ handles, and for a circular list."))

(defun signal-message-too-large (buffer)
  "Signal that the message in BUFFER is too large."
  ;; Discard the message before the error: handlers may write their own messages into BUFFER.
  (discard-message buffer)
  (error 'message-too-large))

(defun grow-message-buffer (buffer words)
  "Make room for WORDS more words in BUFFER. Signal an error if the message would be too large."
  (let ((needed (+ (buffer-fill buffer) words)))
    (when (> needed +max-message-words+)
      (signal-message-too-large buffer))
    (resize-message-buffer buffer (max needed (min (* 2 (buffer-capacity buffer)) +max-message-words+)))))

(declaim (inline reserve-words put-word))
(defun reserve-words (buffer words)
  "Reserve the next WORDS words of BUFFER and return their address. The caller must write these words."
  (declare (type message-buffer buffer) (type index words))
  (let ((fill (buffer-fill buffer)))
    (when (> (+ fill words) (buffer-capacity buffer))
      (grow-message-buffer buffer words))
    (setf (buffer-fill buffer) (+ fill words))
    (int-sap (ldb (byte 64 0) (+ (buffer-address buffer) (* 8 fill))))))

(defun put-word (buffer word)
  "Write WORD into BUFFER."
  (declare (type (unsigned-byte 64) word))
  (setf (sap-ref-64 (reserve-words buffer 1) 0) word))

;;; Tokens

(macrolet ((define-tags (&rest names)
             `(progn
                (eval-when (:compile-toplevel :load-toplevel :execute)
                  (defun tag-number (name)
                    "Return the number of the tag NAME."
                    (or (position name ',names) (error "no tag ~S" name))))
                (define-compiler-macro tag-number (&whole form name)
                  (if (keywordp name) (position name ',names) form)))))
  (define-tags :nil :true :integer :bignum :single :double :character :string :symbol :keyword :ratio :complex
    :list :dotted :vector :octets :table :handle :doubles :values))

(deftype depth ()
  "The number of levels of lists, vectors and tables that are written out. A table takes two levels. Containers at deeper
levels are written as handles."
  '(unsigned-byte 8))

(defconstant +opaque+ 256
  "A flag that is added to a depth to make a shape. With this flag, each object below the depth is written as a handle, so
that the program can return the identical object. NIL, T, fixnums, floats and characters are never written as handles.")

(defconstant +truth+ 512
  "A flag that is added to a depth to make a shape. With this flag, each object below the depth is written as T unless it is
NIL, a fixnum, a float or a character: the program only wants to know whether the object is NIL.")

(declaim (inline token-word))
(defun token-word (tag &optional (number 0))
  "Return the first word of a token with TAG and NUMBER. The meaning of NUMBER depends on TAG."
  (declare (type (unsigned-byte 8) tag) (type (unsigned-byte 56) number))
  (logior tag (ash number 8)))

(defun put-bignum (buffer integer)
  "Write INTEGER into BUFFER in two's complement, least significant word first."
  (declare (type bignum integer))
  (let ((words (sb-bignum:%bignum-length integer)))
    (put-word buffer (token-word (tag-number :bignum) words))
    (dotimes (index words)
      (put-word buffer (sb-bignum:%bignum-ref integer index)))))

(declaim (inline put-integer))
(defun put-integer (buffer integer)
  "Write INTEGER, of any size, into BUFFER."
  (typecase integer
    ((signed-byte 64)
     (let ((sap (reserve-words buffer 2)))
       (setf (sap-ref-64 sap 0) (token-word (tag-number :integer))
             (signed-sap-ref-64 sap 8) integer)))
    (t (put-bignum buffer integer))))

(declaim (notinline simple-vector-length))
(defun simple-vector-length (data)
  "Return the length in the header of DATA, a simple vector. This function is not inline: WITH-ARRAY-DATA promises the
compiler that its END is within DATA, so the compiler would fold an inline comparison with LENGTH to true."
  (length (the (simple-array * (*)) data)))

(define-condition elements-outside-vector (unwritable-object)
  ()
  (:report (lambda (condition stream)
             (declare (ignore condition))
             (format stream "The elements of a vector lie outside its memory: either another thread adjusted the vector ~
                             while it was being read, so guard the vector with a lock; or it is displaced to a vector that ~
                             became shorter.")))
  (:documentation "The error that is signalled for a vector whose bounds do not lie within its simple vector."))

(defmacro with-vector-data ((data start end) vector &body body)
  "Evaluate BODY with DATA bound to the simple vector that holds the elements of VECTOR, and START and END to the bounds of
the elements in DATA. DATA is pinned meanwhile. Signal an error unless the bounds lie within DATA: another thread may adjust
VECTOR at any time, even between two reads of its header, and a vector to which VECTOR is displaced may have become shorter."
  `(sb-kernel:with-array-data ((,data ,vector) (,start) (,end) :check-fill-pointer t)
     (with-pinned-objects (,data)
       (unless (<= ,start ,end (simple-vector-length ,data))
         (error 'elements-outside-vector))
       ,@body)))

(defun put-string (buffer string)
  "Write STRING into BUFFER."
  (declare (type string string))
  (with-vector-data (data start end) string
    (let* ((length (- end start))
           (sap (progn
                  (put-word buffer (token-word (tag-number :string) length))
                  (reserve-words buffer (ceiling length 2)))))
      (typecase data
        ((simple-array character (*))
         (sb-kernel:%byte-blt (vector-sap data) (* 4 start) sap 0 (* 4 length)))
        (t
         (loop for index of-type index from start below end
               for offset of-type index from 0 by 4
               do (setf (sap-ref-32 sap offset) (char-code (char data index)))))))))

(defun put-symbol (buffer symbol)
  "Write SYMBOL into BUFFER: its name and, unless SYMBOL is a keyword or has no package, the name of its package."
  (let ((package (symbol-package symbol)))
    (cond ((keywordp symbol)
           (put-word buffer (token-word (tag-number :keyword))))
          (t
           (put-word buffer (token-word (tag-number :symbol) (if package 1 0)))
           (when package
             (put-string buffer (package-name package)))))
    (put-string buffer (symbol-name symbol))))

(defun put-octets (buffer vector)
  "Write VECTOR, whose elements are octets, into BUFFER."
  (declare (type (vector (unsigned-byte 8)) vector))
  (with-vector-data (data start end) vector
    (let* ((length (- end start))
           (sap (progn
                  (put-word buffer (token-word (tag-number :octets) length))
                  (reserve-words buffer (ceiling length 8)))))
      (declare (type (simple-array (unsigned-byte 8) (*)) data))
      (sb-kernel:%byte-blt (vector-sap data) start sap 0 length))))

(defun put-doubles (buffer vector)
  "Write VECTOR, whose elements are double floats, into BUFFER."
  (declare (type (vector double-float) vector))
  (with-vector-data (data start end) vector
    (let* ((length (- end start))
           (sap (progn
                  (put-word buffer (token-word (tag-number :doubles) length))
                  (reserve-words buffer length))))
      (declare (type (simple-array double-float (*)) data))
      (sb-kernel:%byte-blt (vector-sap data) (* 8 start) sap 0 (* 8 length)))))

(defun list-extent (list)
  "Return the number of conses of LIST and the tail after the last cons, or NIL if LIST is circular."
  (let ((slow list))
    (loop for rest = list then (cdr rest)
          for count of-type index from 0
          while (consp rest)
          do (when (oddp count)
               (setf slow (cdr slow))
               (when (eq slow (cdr rest))
                 (return nil)))
          finally (return (values count rest)))))

(defun put-list (buffer list shape)
  "Write LIST, which is not empty, into BUFFER, with its elements and the tail of a dotted list in SHAPE. Signal an
error if LIST is circular."
  (multiple-value-bind (count tail) (list-extent list)
    (unless count
      (signal-message-too-large buffer))
    (put-word buffer (if tail (token-word (tag-number :dotted) count) (token-word (tag-number :list) count)))
    (loop for rest = list then (cdr rest)
          repeat count
          do (put-object buffer (car rest) shape))
    (when tail
      (put-object buffer tail shape))))

(defun put-table (buffer table shape)
  "Write the entries of TABLE, a hash table, into BUFFER, with keys and values in SHAPE."
  ;; Take a snapshot first: another thread may add entries.
  (let ((entries (loop for key being the hash-keys of table using (hash-value value) collect (cons key value))))
    (put-word buffer (token-word (tag-number :table) (length entries)))
    (loop for (key . value) in entries
          do (put-object buffer key shape)
             (put-object buffer value shape))))

(defun stack-allocated-p (object)
  "Return true when OBJECT is on the control stack of a thread (DYNAMIC-EXTENT), so that no handle can keep it alive."
  (and (not (sb-kernel:dynamic-space-obj-p object))
       (sb-ext:stack-allocated-p object t)))

(define-condition object-on-stack (unwritable-object)
  ()
  (:report "An object with dynamic extent cannot be passed to Rust, because its memory is soon reused: copy the object first.")
  (:documentation "The error that is signalled when a handle for an object on a control stack is required."))

(defun put-handle (buffer object)
  "Make a handle for OBJECT and write it into BUFFER. Signal an error if OBJECT is on a control stack."
  (when (stack-allocated-p object)
    ;; Discard the message before the error: handlers may write their own messages into BUFFER.
    (discard-message buffer)
    (error 'object-on-stack))
  (when (> (incf (buffer-handles buffer)) +max-message-handles+)
    (signal-message-too-large buffer))
  (let ((place (reserve-words buffer 1)))
    ;; MAKE-HANDLE may signal an error. DISCARD-MESSAGE must not find a word of an earlier message here.
    (setf (sap-ref-64 place 0) (token-word (tag-number :nil))
          (sap-ref-64 place 0) (token-word (tag-number :handle) (make-handle object)))))

(defun put-container (buffer object shape)
  "Write OBJECT into BUFFER in SHAPE, whose depth is not 0. An object that is not a list, vector or hash table becomes a
handle."
  (declare (type (unsigned-byte 16) shape))
  (let ((inner (1- shape)))
    (typecase object
      (cons (put-list buffer object inner))
      ((vector (unsigned-byte 8)) (put-octets buffer object))
      ((vector double-float) (put-doubles buffer object))
      (vector
       (with-vector-data (data start end) object
         (put-word buffer (token-word (tag-number :vector) (- end start)))
         (loop for index of-type index from start below end
               do (put-object buffer (aref data index) inner))))
      ;; For the program, an entry is a level of its own, as the pairs of an association list are.
      (hash-table (put-table buffer object (if (zerop (logand inner 255)) inner (1- inner))))
      (t (put-handle buffer object)))))

(defun put-number (buffer number)
  "Write NUMBER, which is a bignum, a ratio or a complex, into BUFFER."
  (etypecase number
    (integer (put-integer buffer number))
    (ratio
     (put-word buffer (token-word (tag-number :ratio)))
     (put-integer buffer (numerator number))
     (put-integer buffer (denominator number)))
    (complex
     (put-word buffer (token-word (tag-number :complex)))
     (put-object buffer (realpart number) 0)
     (put-object buffer (imagpart number) 0))))

(defun run-pending-interruptions ()
  "Run the interruptions that wait for this thread."
  (let ((*allow-with-interrupts* t))
    (with-interrupts nil)))

(declaim (inline allow-interruption))
(defun allow-interruption ()
  "Between two objects of a message, run the interruptions that wait for this thread, if the code that sends the message may be
interrupted. An interruption that calls the program needs a message buffer of its own, and so must wait while the message is
written into *MESSAGE-BUFFER*. An interruption that unwinds leaves an unfinished message, which BEGIN-MESSAGE discards."
  (when (and *interrupt-pending* *caller-interruptible* (null *message-buffer*))
    (run-pending-interruptions)))

(declaim (inline put-argument))
(defun put-argument (buffer object shape)
  "Write OBJECT as PUT-OBJECT does, with fixnums handled inline."
  (if (typep object 'fixnum)
      (put-integer buffer object)
      (put-object buffer object shape)))

(defun put-object (buffer object shape)
  "Write OBJECT into BUFFER in SHAPE, which is a depth, possibly with one of the flags +OPAQUE+ and +TRUTH+. NIL, T, fixnums,
floats and characters are written in full whatever the shape."
  (declare (type (unsigned-byte 16) shape) (optimize speed) (sb-ext:muffle-conditions sb-ext:compiler-note))
  (typecase object
    (fixnum (put-integer buffer object))
    (null (put-word buffer (token-word (tag-number :nil))))
    ((eql t) (put-word buffer (token-word (tag-number :true))))
    (single-float
     (put-word buffer (token-word (tag-number :single) (ldb (byte 32 0) (sb-kernel:single-float-bits object)))))
    (double-float
     (put-word buffer (token-word (tag-number :double)))
     (put-word buffer (ldb (byte 64 0) (sb-kernel:double-float-bits object))))
    (character (put-word buffer (token-word (tag-number :character) (char-code object))))
    (t
     (allow-interruption)
     (cond ((eql shape +opaque+) (put-handle buffer object))
           ((eql shape +truth+) (put-word buffer (token-word (tag-number :true))))
           ((numberp object) (put-number buffer object))
           ((symbolp object) (put-symbol buffer object))
           ((stringp object) (put-string buffer object))
           ((zerop (logand shape 255))
            ;; For the host, vectors of octets are atoms and have no levels, so they are written whatever the depth.
            (typecase object
              ((vector (unsigned-byte 8)) (put-octets buffer object))
              (t (put-handle buffer object))))
           (t (put-container buffer object shape))))))

;;; Reading

(defstruct (multiple-values (:constructor make-multiple-values (elements)) (:copier nil) (:predicate nil))
  "The multiple values that a message contained."
  (elements '() :type list))

(declaim (inline word-at))
(defun word-at (address)
  "Return the word at ADDRESS, an integer."
  (sap-ref-64 (int-sap address) 0))

(defun discard-message (buffer)
  "Discard the unfinished message in BUFFER. Release the handles in the message, because the program will not receive them."
  (declare (type message-buffer buffer))
  (let* ((address (buffer-address buffer))
         (end (+ address (* 8 (buffer-fill buffer)))))
    (declare (type (unsigned-byte 62) address end))
    (loop while (< address end)
          do (let* ((word (word-at address))
                    (number (ash word -8)))
               (flet ((tag-p (&rest tags)
                        (declare (dynamic-extent tags))
                        (member (ldb (byte 8 0) word) tags)))
                 (when (tag-p (tag-number :handle))
                   ;; If an error ends this function, the next call must not release the handle again.
                   (setf (sap-ref-64 (int-sap address) 0) (token-word (tag-number :nil)))
                   (release-handles number))
                 (incf address (* 8 (cond ((tag-p (tag-number :integer) (tag-number :double)) 2)
                                          ((tag-p (tag-number :bignum) (tag-number :doubles)) (1+ number))
                                          ((tag-p (tag-number :string)) (1+ (ceiling number 2)))
                                          ((tag-p (tag-number :octets)) (1+ (ceiling number 8)))
                                          (t 1)))))))
    (setf (buffer-fill buffer) 0)
    (finish-message buffer)))

;;; The decoder checks each read against the end of the message, and signals an error for malformed words.

(define-condition malformed-message (error)
  ()
  (:report "The program sent Lisp a malformed message: please report this bug.")
  (:documentation "The error that is signalled for a message whose words are not in the expected format."))

(declaim (inline end-of-words))
(defun end-of-words (address words end)
  "Return the address after WORDS words at ADDRESS. Signal an error if the words extend beyond END."
  (declare (type (unsigned-byte 62) address end) (type (unsigned-byte 58) words))
  (let ((next (+ address (* 8 words))))
    (when (> next end)
      (error 'malformed-message))
    next))

(defun check-characters (address length)
  "Signal an error unless the LENGTH words of 32 bits at ADDRESS are all character codes."
  (declare (type (unsigned-byte 62) address) (type index length) (optimize speed))
  (let ((sap (int-sap address))
        (seen 0))
    (declare (type (unsigned-byte 32) seen))
    (dotimes (index length)
      (setf seen (logior seen (sap-ref-32 sap (* 4 index)))))
    (unless (or (< seen char-code-limit)
                ;; The codes combined by LOGIOR may exceed the limit although no single code does.
                (loop for index of-type index below length
                      always (< (sap-ref-32 sap (* 4 index)) char-code-limit)))
      (error 'malformed-message))))

(defun read-string-token (address length end)
  "Return a fresh string of the LENGTH characters at ADDRESS, and the address after them. Signal an error if the
characters extend beyond END or are not valid character codes."
  (declare (type (unsigned-byte 62) address length end))
  (let ((next (end-of-words address (ceiling length 2) end)))
    (check-characters address length)
    (values (copy-text address length) next)))

(defun read-names (address count end)
  "Return a list of the COUNT strings whose tokens are at ADDRESS, and the address after them."
  (declare (type (unsigned-byte 62) address end))
  (let ((names (loop repeat count
                     collect (let* ((next (end-of-words address 1 end))
                                    (word (word-at address)))
                               (unless (eql (ldb (byte 8 0) word) (tag-number :string))
                                 (error 'malformed-message))
                               (multiple-value-bind (name next) (read-string-token next (ash word -8) end)
                                 (setf address next)
                                 name)))))
    (values names address)))

(defun read-bignum (address words)
  "Return the integer in the WORDS words at ADDRESS. WORDS is not 0."
  (declare (type (unsigned-byte 62) address) (type (integer 1 #.sb-bignum:maximum-bignum-length) words))
  (let ((integer (sb-bignum:%allocate-bignum words)))
    (dotimes (index words)
      (sb-bignum:%bignum-set integer index (word-at (+ address (* 8 index)))))
    (sb-bignum::%normalize-bignum integer words)))

(defun read-elements (address count end)
  "Return a list of the COUNT objects whose tokens are at ADDRESS, and the address after them."
  (let ((elements (loop repeat count
                        collect (multiple-value-bind (element next) (read-object address end)
                                  (setf address next)
                                  element))))
    (values elements address)))

(defun read-objects (address end)
  "Return a list of the objects between ADDRESS and END."
  (declare (type (unsigned-byte 62) address end))
  (loop while (< address end)
        collect (multiple-value-bind (object next) (read-object address end)
                  (setf address next)
                  object)))

(defun copy-octets (address vector octets)
  "Copy OCTETS octets from ADDRESS into VECTOR and return VECTOR."
  (with-pinned-objects (vector)
    (sb-kernel:%byte-blt (int-sap address) 0 (vector-sap vector) 0 octets))
  vector)

(defun read-handle (number)
  "Return the object to which the handle NUMBER refers. Signal an error if there is no such handle."
  (let ((object (and (< number (length **handle-table**)) (handle-object number))))
    ;; An entry that holds NIL or a fixnum is free, because no handle is made for such an object.
    (when (typep object '(or null fixnum))
      (error 'malformed-message))
    object))

(defun package-of-symbol (name)
  "Return the package called NAME. The name of a package takes precedence over a local nickname in *PACKAGE*, so that the
program's symbols stay the same in any current package."
  (or (let ((*package* (load-time-value (find-package "KEYWORD"))))
        (find-package name))
      (find-package-or-suggest name)))

(defun read-object (address end)
  "Return the object whose token is at ADDRESS, and the address after the token. Signal an error if the token is
malformed or extends beyond END."
  (declare (type (unsigned-byte 62) address end))
  (let* ((next (end-of-words address 1 end))
         (word (word-at address))
         (number (ash word -8)))
    (declare (type (unsigned-byte 62) next))
    (macrolet ((reading ((elements count) &body body)
                 `(multiple-value-bind (,elements after) (read-elements next ,count end)
                    (values (progn ,@body) after)))
               (checking ((test) &body body)
                 `(if ,test (progn ,@body) (error 'malformed-message))))
      (case (ldb (byte 8 0) word)
        (#.(tag-number :nil) (checking ((zerop number)) (values nil next)))
        (#.(tag-number :true) (checking ((zerop number)) (values t next)))
        (#.(tag-number :integer)
         (let ((after (end-of-words next 1 end)))
           (checking ((zerop number)) (values (signed-sap-ref-64 (int-sap next) 0) after))))
        (#.(tag-number :bignum)
         (let ((after (end-of-words next number end)))
           (checking ((plusp number)) (values (read-bignum next number) after))))
        (#.(tag-number :single)
         (checking ((typep number '(unsigned-byte 32))) (values (sap-ref-single (int-sap address) 1) next)))
        (#.(tag-number :double)
         (let ((after (end-of-words next 1 end)))
           (checking ((zerop number)) (values (sap-ref-double (int-sap next) 0) after))))
        (#.(tag-number :character) (checking ((< number char-code-limit)) (values (code-char number) next)))
        (#.(tag-number :string) (read-string-token next number end))
        (#.(tag-number :symbol)
         (checking ((<= number 1))
           (multiple-value-bind (names after) (read-names next (1+ number) end)
             (values (if (eql number 1)
                         (intern (second names) (package-of-symbol (first names)))
                         (make-symbol (first names)))
                     after))))
        (#.(tag-number :keyword)
         (checking ((zerop number))
           (multiple-value-bind (names after) (read-names next 1 end)
             (values (intern (first names) "KEYWORD") after))))
        (#.(tag-number :ratio)
         (reading (parts 2)
           (destructuring-bind (numerator denominator) parts
             (checking ((and (zerop number) (integerp numerator) (integerp denominator) (not (eql denominator 0))))
               (/ numerator denominator)))))
        (#.(tag-number :complex)
         (reading (parts 2)
           (destructuring-bind (re im) parts
             (checking ((and (zerop number) (realp re) (realp im)))
               (complex re im)))))
        (#.(tag-number :list) (read-elements next number end))
        (#.(tag-number :dotted)
         (reading (elements (1+ number))
           (let ((last (last elements 2)))
             (checking ((plusp number))
               (setf (cdr last) (cadr last))
               elements))))
        (#.(tag-number :vector) (reading (elements number) (coerce elements 'simple-vector)))
        (#.(tag-number :octets)
         (let ((after (end-of-words next (ceiling number 8) end)))
           (values (copy-octets next (make-array number :element-type '(unsigned-byte 8)) number) after)))
        (#.(tag-number :doubles)
         (let ((after (end-of-words next number end)))
           (values (copy-octets next (make-array number :element-type 'double-float) (* 8 number)) after)))
        (#.(tag-number :table)
         (reading (entries (* 2 number))
           (let ((table (make-hash-table :test 'equal :size (max 7 number))))
             (loop for (key value) on entries by #'cddr
                   do (setf (gethash key table) value))
             ;; Keys that differ in the program, such as None and Some(false), can become the same object.
             (unless (eql (hash-table-count table) number)
               (error "Some keys of a map become the same Lisp object: the hash table would have only ~D of ~D entries."
                      (hash-table-count table) number))
             table)))
        (#.(tag-number :handle) (values (read-handle number) next))
        (t (error 'malformed-message))))))

(declaim (inline read-argument))
(defun read-argument (address end)
  "Return the values of READ-OBJECT, with integers of one word handled inline. ADDRESS must be below END."
  (declare (type (unsigned-byte 62) address end))
  (if (and (eql (word-at address) (token-word (tag-number :integer)))
           (<= (+ address 16) end))
      (values (signed-sap-ref-64 (int-sap address) 8) (the (unsigned-byte 62) (+ address 16)))
      (read-object address end)))

(declaim (type index *answers-being-read*))
(defvar *answers-being-read* 0
  "The number of the program's answers that this thread is reading. Reading may run code that calls the program again,
such as the handler of an error that INTERN signals, so several answers may be in use. The program keeps all of them
valid until they are read.")

(defun read-answer (address count)
  "Return the program's answer in the COUNT words at ADDRESS, where COUNT is not 0. The answer is an object or a
MULTIPLE-VALUES. The caller has counted the answer in *ANSWERS-BEING-READ*."
  (declare (type (unsigned-byte 62) address) (type (unsigned-byte 48) count))
  (let ((word (word-at address))
        (end (+ address (* 8 count))))
    (declare (type (unsigned-byte 62) end))
    (if (eql (ldb (byte 8 0) word) (tag-number :values))
        (make-multiple-values (values (read-elements (end-of-words address 1 end) (ash word -8) end)))
        (values (read-object address end)))))

(declaim (inline integer-answer-p read-integer-answer))
(defun integer-answer-p (address count)
  "Return true when the program's answer, the COUNT words at ADDRESS, is an integer of one word. Reading such an answer runs
no other code."
  (declare (type (unsigned-byte 62) address count))
  (and (eql count 2) (eql (word-at address) (token-word (tag-number :integer)))))

(defun read-integer-answer (address)
  "Return the integer that the program's answer at ADDRESS holds."
  (declare (type (unsigned-byte 62) address))
  (signed-sap-ref-64 (int-sap address) 8))
