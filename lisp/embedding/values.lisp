;;;; Lisp objects as the host's programs see them: handles in a table, and messages of words that both sides write and
;;;; read. A message is a sequence of tokens, each a word (its tag in the low byte, a number in the others) and the words
;;;; and tokens that this one announces. src/image/message.rs has the same.

(in-package "SBCL-HOST/EMBEDDING")

;;; Handles: places in a table, each of which keeps an object alive until the host gives it back.

(declaim (type simple-vector **values**) (type (or null (unsigned-byte 32)) **free-value**))
(defglobal **values** (make-array 0)
  "What the host holds on to, by handle. A free place has the number of the next one, or NIL.")
(defglobal **free-value** nil
  "The first free place of **VALUES**, or NIL.")
(defglobal **values-lock** (sb-thread:make-mutex :name "values of the host")
  "Held while the two above are changed. An object is read without it, by who has its handle.")

(defun grow-values ()
  "Make twice as many places. Those there are keep their numbers."
  (let* ((old **values**)
         (size (length old))
         (new (make-array (max 1024 (* 2 size)) :initial-element nil)))
    (replace new old)
    (loop for place from size below (1- (length new))
          do (setf (svref new place) (1+ place)))
    (setf **values** new
          **free-value** size)))

(defun make-handle (object)
  "Return a handle that keeps OBJECT alive."
  (sb-thread::with-system-mutex (**values-lock**)
    (let ((place (or **free-value** (grow-values))))
      (setf **free-value** (svref **values** place)
            (svref **values** place) object)
      place)))

(declaim (inline handle-object))
(defun handle-object (handle)
  "Return the object that HANDLE keeps alive."
  (svref **values** handle))

(defun release-handles (&rest handles)
  "Let go of what HANDLES keep alive, and have others take their places."
  (declare (dynamic-extent handles))
  (sb-thread::with-system-mutex (**values-lock**)
    (dolist (handle handles)
      (setf (svref **values** handle) **free-value**
            **free-value** handle)))
  (values))

;;; Memory to write messages into. It is not Lisp's: no collection moves it.

(declaim (inline make-scratch))
(defstruct (scratch (:copier nil) (:predicate nil))
  "Where a thread writes its messages."
  (address 0 :type (unsigned-byte 64))
  (capacity 0 :type (unsigned-byte 62))
  (fill 0 :type (unsigned-byte 62))
  (handles 0 :type (unsigned-byte 32)))

(defconstant +kept-capacity+ (ash 1 20)
  "Words that a scratch keeps when a message that took more is followed by a small one.")

(declaim (inline begin-message))
(defun begin-message (scratch)
  "Have the next token be the first one of a message in SCRATCH."
  (declare (type scratch scratch))
  (unless (and (zerop (scratch-handles scratch)) (<= (scratch-capacity scratch) +kept-capacity+))
    (tidy-scratch scratch))
  (setf (scratch-fill scratch) 0))

(declaim (inline finish-message))
(defun finish-message (scratch)
  "Note that the program gets the message in SCRATCH, and with it the handles."
  (declare (type scratch scratch))
  (setf (scratch-handles scratch) 0))

(declaim (type (or null scratch) *scratch*))
(defvar *scratch* nil
  "What this thread writes messages into, while it talks with the host's program.")

(defglobal **scratches** '()
  "Those that no thread uses now.")

(defconstant +largest-message+ (ash 1 27)
  "Words that a message may have: what an object with circles would make grows for ever.")

(defconstant +most-handles+ (ash 1 22)
  "Handles that a message may have: each takes room in Lisp, too.")

(defun resize-scratch (scratch capacity)
  "Give SCRATCH room for CAPACITY words."
  (let ((address (alien-funcall (extern-alien "realloc" (function (unsigned 64) (unsigned 64) (unsigned 64)))
                                (scratch-address scratch) (* 8 capacity))))
    (when (zerop address)
      (give-up-message scratch)
      (error 'sb-kernel::heap-exhausted-error))
    (setf (scratch-address scratch) address
          (scratch-capacity scratch) capacity)))

(defun take-scratch ()
  "Return a scratch that no thread uses."
  (or (sb-ext:atomic-pop **scratches**)
      (let ((scratch (make-scratch)))
        (resize-scratch scratch 512)
        scratch)))

(defun tidy-scratch (scratch)
  "Let go of what the message in SCRATCH keeps alive, which was begun and not finished, and of room for a larger one."
  (unless (zerop (scratch-handles scratch))
    (give-up-message scratch))
  (when (< (* 4 (scratch-fill scratch)) (scratch-capacity scratch))
    (resize-scratch scratch (min (scratch-capacity scratch) +kept-capacity+))))

(defun give-back-scratch (scratch)
  "Let other threads use SCRATCH; what a large message took is the system's again."
  (begin-message scratch)
  (when (> (scratch-capacity scratch) 65536)
    (resize-scratch scratch 512))
  (sb-ext:atomic-push scratch **scratches**))

(define-condition message-too-large (error)
  ()
  (:report "The object is too large to be converted, or holds itself.")
  (:documentation "A message would have more than +LARGEST-MESSAGE+ words, or +MOST-HANDLES+ handles."))

(defun refuse-message (scratch)
  "Signal that what is being written in SCRATCH is too large."
  ;; Before handlers run, which may write messages of their own there.
  (give-up-message scratch)
  (error 'message-too-large))

(defun grow-scratch (scratch words)
  "Make room for as many WORDS more in SCRATCH."
  (let ((capacity (max (+ (scratch-fill scratch) words) (* 2 (scratch-capacity scratch)))))
    (when (> capacity +largest-message+)
      (refuse-message scratch))
    (resize-scratch scratch capacity)))

(declaim (inline reserve put))
(defun reserve (scratch words)
  "Return the address of the next WORDS of SCRATCH, which are written by the caller."
  (declare (type scratch scratch) (type index words))
  (let ((fill (scratch-fill scratch)))
    (when (> (+ fill words) (scratch-capacity scratch))
      (grow-scratch scratch words))
    (setf (scratch-fill scratch) (+ fill words))
    (int-sap (ldb (byte 64 0) (+ (scratch-address scratch) (* 8 fill))))))

(defun put (scratch word)
  "Write WORD."
  (declare (type (unsigned-byte 64) word))
  (setf (sap-ref-64 (reserve scratch 1) 0) word))

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
  "How many levels of lists, vectors and tables are written out; what is deeper is a handle."
  '(unsigned-byte 8))

(defconstant +opaque+ 256
  "Of a shape: what is below its depth is a handle, whatever it is, so that it is the same object when it comes back. A
shape is this or 0, and a depth.")

(declaim (inline token))
(defun token (tag &optional (number 0))
  "Return the word that begins a token."
  (declare (type (unsigned-byte 8) tag) (type (unsigned-byte 56) number))
  (logior tag (ash number 8)))

(defun put-bignum (scratch integer)
  "Write INTEGER in two's complement, the lowest word first."
  (declare (type bignum integer))
  (let ((words (sb-bignum:%bignum-length integer)))
    (put scratch (token (tag-number :bignum) words))
    (dotimes (index words)
      (put scratch (sb-bignum:%bignum-ref integer index)))))

(declaim (inline put-integer))
(defun put-integer (scratch integer)
  "Write INTEGER, of any size."
  (typecase integer
    ((signed-byte 64)
     (let ((sap (reserve scratch 2)))
       (setf (sap-ref-64 sap 0) (token (tag-number :integer))
             (signed-sap-ref-64 sap 8) integer)))
    (t (put-bignum scratch integer))))

(declaim (notinline simple-vector-length))
(defun simple-vector-length (data)
  "Return the length of DATA, a simple vector, as it is in memory. WITH-ARRAY-DATA promises the compiler that its END is not
beyond it, so that a comparison with LENGTH would be taken for true."
  (length (the (simple-array * (*)) data)))

(defmacro with-vector-data ((data start end) vector &body body)
  "Evaluate BODY with DATA the simple vector, pinned, that has the elements of VECTOR, from START below END. Another thread
may adjust VECTOR at any time, and between two looks at it: what counts is that DATA has all of these elements."
  `(sb-kernel:with-array-data ((,data ,vector) (,start) (,end) :check-fill-pointer t)
     (with-pinned-objects (,data)
       (unless (<= ,start ,end (simple-vector-length ,data))
         (error "A vector was adjusted while it was read."))
       ,@body)))

(defun put-string (scratch string)
  "Write the characters of STRING."
  (declare (type string string))
  (with-vector-data (data start end) string
    (let* ((length (- end start))
           (sap (progn
                  (put scratch (token (tag-number :string) length))
                  (reserve scratch (ceiling length 2)))))
      (typecase data
        ((simple-array character (*))
         (sb-kernel:%byte-blt (vector-sap data) (* 4 start) sap 0 (* 4 length)))
        (t
         (loop for index of-type index from start below end
               for offset of-type index from 0 by 4
               do (setf (sap-ref-32 sap offset) (char-code (char data index)))))))))

(defun put-symbol (scratch symbol)
  "Write SYMBOL by its names, as one of no package when it has none."
  (let ((package (symbol-package symbol)))
    (cond ((keywordp symbol)
           (put scratch (token (tag-number :keyword))))
          (t
           (put scratch (token (tag-number :symbol) (if package 1 0)))
           (when package
             (put-string scratch (package-name package)))))
    (put-string scratch (symbol-name symbol))))

(defun put-octets (scratch vector)
  "Write VECTOR, of octets."
  (declare (type (vector (unsigned-byte 8)) vector))
  (with-vector-data (data start end) vector
    (let* ((length (- end start))
           (sap (progn
                  (put scratch (token (tag-number :octets) length))
                  (reserve scratch (ceiling length 8)))))
      (declare (type (simple-array (unsigned-byte 8) (*)) data))
      (sb-kernel:%byte-blt (vector-sap data) start sap 0 length))))

(defun put-doubles (scratch vector)
  "Write VECTOR, of double floats."
  (declare (type (vector double-float) vector))
  (with-vector-data (data start end) vector
    (let* ((length (- end start))
           (sap (progn
                  (put scratch (token (tag-number :doubles) length))
                  (reserve scratch length))))
      (declare (type (simple-array double-float (*)) data))
      (sb-kernel:%byte-blt (vector-sap data) (* 8 start) sap 0 (* 8 length)))))

(defun list-extent (list)
  "Return how many conses LIST has, and what comes after the last one; or NIL if it has no end."
  (let ((slow list))
    (loop for rest = list then (cdr rest)
          for count of-type index from 0
          while (consp rest)
          do (when (oddp count)
               (setf slow (cdr slow))
               (when (eq slow (cdr rest))
                 (return nil)))
          finally (return (values count rest)))))

(defun put-list (scratch list shape)
  "Write the elements of LIST, which has some, in SHAPE."
  (multiple-value-bind (count tail) (list-extent list)
    (unless count
      (refuse-message scratch))
    (put scratch (if tail (token (tag-number :dotted) count) (token (tag-number :list) count)))
    (loop for rest = list then (cdr rest)
          repeat count
          do (put-object scratch (car rest) shape))
    (when tail
      (put-object scratch tail shape))))

(defun put-table (scratch table shape)
  "Write the entries of TABLE in SHAPE."
  ;; Another thread may add entries: those there are now count.
  (let ((entries (loop for key being the hash-keys of table using (hash-value value) collect (cons key value))))
    (put scratch (token (tag-number :table) (length entries)))
    (loop for (key . value) in entries
          do (put-object scratch key shape)
             (put-object scratch value shape))))

(defun put-handle (scratch object)
  "Write a new handle of OBJECT."
  (when (> (incf (scratch-handles scratch)) +most-handles+)
    (refuse-message scratch))
  (let ((place (reserve scratch 1)))
    (setf (sap-ref-64 place 0) (token (tag-number :handle) (make-handle object)))))

(defun put-container (scratch object shape)
  "Write OBJECT, of whatever type, in SHAPE, whose depth is not 0."
  (declare (type (unsigned-byte 16) shape))
  (let ((inner (1- shape)))
    (typecase object
      (cons (put-list scratch object inner))
      ((vector (unsigned-byte 8)) (put-octets scratch object))
      ((vector double-float) (put-doubles scratch object))
      (vector
       (with-vector-data (data start end) object
         (put scratch (token (tag-number :vector) (- end start)))
         (loop for index of-type index from start below end
               do (put-object scratch (aref data index) inner))))
      (hash-table (put-table scratch object inner))
      (t (put-handle scratch object)))))

(defun put-number (scratch number)
  "Write NUMBER, a large integer, a ratio or complex."
  (etypecase number
    (integer (put-integer scratch number))
    (ratio
     (put scratch (token (tag-number :ratio)))
     (put-integer scratch (numerator number))
     (put-integer scratch (denominator number)))
    (complex
     (put scratch (token (tag-number :complex)))
     (put-object scratch (realpart number) 0)
     (put-object scratch (imagpart number) 0))))

(declaim (inline put-argument))
(defun put-argument (scratch object shape)
  "Write OBJECT as PUT-OBJECT does, fixnums in place."
  (if (typep object 'fixnum)
      (put-integer scratch object)
      (put-object scratch object shape)))

(defun put-object (scratch object shape)
  "Write OBJECT in SHAPE. What EQL cannot tell from a copy is written as it is in any."
  (declare (type (unsigned-byte 16) shape) (optimize speed) (sb-ext:muffle-conditions sb-ext:compiler-note))
  (typecase object
    (fixnum (put-integer scratch object))
    (null (put scratch (token (tag-number :nil))))
    ((eql t) (put scratch (token (tag-number :true))))
    (single-float
     (put scratch (token (tag-number :single) (ldb (byte 32 0) (sb-kernel:single-float-bits object)))))
    (double-float
     (put scratch (token (tag-number :double)))
     (put scratch (ldb (byte 64 0) (sb-kernel:double-float-bits object))))
    (character (put scratch (token (tag-number :character) (char-code object))))
    (t
     (cond ((eql shape +opaque+) (put-handle scratch object))
           ((numberp object) (put-number scratch object))
           ((symbolp object) (put-symbol scratch object))
           ((stringp object) (put-string scratch object))
           ((zerop (logand shape 255))
            ;; These two are atoms to the host.
            (typecase object
              ((vector (unsigned-byte 8)) (put-octets scratch object))
              (t (put-handle scratch object))))
           (t (put-container scratch object shape))))))

;;; Reading

(defstruct (several (:constructor make-several (values)) (:copier nil) (:predicate nil))
  "What a message of several values is read as."
  (values '() :type list))

(declaim (inline word-at))
(defun word-at (address)
  "Return the word at ADDRESS, an integer."
  (sap-ref-64 (int-sap address) 0))

(defun give-up-message (scratch)
  "Let go of what the handles in the message in SCRATCH keep alive: nobody gets it."
  (declare (type scratch scratch))
  (let* ((address (scratch-address scratch))
         (end (+ address (* 8 (scratch-fill scratch)))))
    (declare (type (unsigned-byte 62) address end))
    (loop while (< address end)
          do (let* ((word (word-at address))
                    (number (ash word -8)))
               (flet ((is (&rest tags)
                        (declare (dynamic-extent tags))
                        (member (ldb (byte 8 0) word) tags)))
                 (when (is (tag-number :handle))
                   (release-handles number))
                 (incf address (* 8 (cond ((is (tag-number :integer) (tag-number :double)) 2)
                                          ((is (tag-number :bignum) (tag-number :doubles)) (1+ number))
                                          ((is (tag-number :string)) (1+ (ceiling number 2)))
                                          ((is (tag-number :octets)) (1+ (ceiling number 8)))
                                          (t 1)))))))
    (setf (scratch-fill scratch) 0)
    (finish-message scratch)))

;;; The decoder checks each read against the message's end. Malformed words signal an error.

(define-condition malformed-message (error)
  ()
  (:report "The program's message is malformed.")
  (:documentation "The words of a message are not what the program's side writes."))

(declaim (inline end-of-words))
(defun end-of-words (address words end)
  "Return the address after so many WORDS at ADDRESS. All of them must be below END."
  (declare (type (unsigned-byte 62) address end) (type (unsigned-byte 58) words))
  (let ((next (+ address (* 8 words))))
    (when (> next end)
      (error 'malformed-message))
    next))

(defun check-characters (address length)
  "Signal an error unless the LENGTH characters at ADDRESS have codes of characters."
  (declare (type (unsigned-byte 62) address) (type index length) (optimize speed))
  (let ((sap (int-sap address))
        (seen 0))
    (declare (type (unsigned-byte 32) seen))
    (dotimes (index length)
      (setf seen (logior seen (sap-ref-32 sap (* 4 index)))))
    (unless (or (< seen char-code-limit)
                ;; Together they may have bits that none of them has.
                (loop for index of-type index below length
                      always (< (sap-ref-32 sap (* 4 index)) char-code-limit)))
      (error 'malformed-message))))

(defun read-string-token (address length end)
  "Return a fresh string of the LENGTH characters at ADDRESS, and the address after it."
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
  "Return the integer in the WORDS, at least one, at ADDRESS."
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
  "Return a list of the objects from ADDRESS up to END."
  (declare (type (unsigned-byte 62) address end))
  (loop while (< address end)
        collect (multiple-value-bind (object next) (read-object address end)
                  (setf address next)
                  object)))

(defun copy-octets (address vector octets)
  "Copy so many OCTETS from ADDRESS into VECTOR, and return that."
  (with-pinned-objects (vector)
    (sb-kernel:%byte-blt (int-sap address) 0 (vector-sap vector) 0 octets))
  vector)

(defun read-handle (number)
  "Return the object that the handle NUMBER keeps alive."
  (let ((object (and (< number (length **values**)) (handle-object number))))
    ;; No handle is made for these: it is a free place.
    (when (typep object '(or null fixnum))
      (error 'malformed-message))
    object))

(defun read-object (address end)
  "Return the object whose token is at ADDRESS, and the address after it. All of it must be below END."
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
                         (intern (second names) (find-user-package (first names)))
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
             table)))
        (#.(tag-number :handle) (values (read-handle number) next))
        (t (error 'malformed-message))))))

(declaim (inline read-argument))
(defun read-argument (address end)
  "Return what READ-OBJECT does, integers of a word in place. There is a word at ADDRESS."
  (declare (type (unsigned-byte 62) address end))
  (if (and (eql (word-at address) (token (tag-number :integer)))
           (<= (+ address 16) end))
      (values (signed-sap-ref-64 (int-sap address) 8) (the (unsigned-byte 62) (+ address 16)))
      (read-object address end)))

(declaim (type index *answers-being-read*))
(defvar *answers-being-read* 0
  "How many of the program's answers this thread is reading. What that calls, such as the handler of an error that INTERN
signals, may call the program again, and the program keeps these answers meanwhile.")

(defun read-answer (address count)
  "Return what the program answered in the COUNT words, at least one, at ADDRESS: an object, or several values. The answer
counts among those being read."
  (declare (type (unsigned-byte 62) address) (type (unsigned-byte 48) count))
  (let ((word (word-at address))
        (end (+ address (* 8 count))))
    (declare (type (unsigned-byte 62) end))
    (if (eql (ldb (byte 8 0) word) (tag-number :values))
        (make-several (values (read-elements (end-of-words address 1 end) (ash word -8) end)))
        (values (read-object address end)))))

(declaim (inline integer-answer-p read-integer-answer))
(defun integer-answer-p (address count)
  "True when the program's answer, the COUNT words at ADDRESS, is an integer of one word: nothing else runs while it is read."
  (declare (type (unsigned-byte 62) address count))
  (and (eql count 2) (eql (word-at address) (token (tag-number :integer)))))

(defun read-integer-answer (address)
  "Return the integer of the program's answer at ADDRESS."
  (declare (type (unsigned-byte 62) address))
  (signed-sap-ref-64 (int-sap address) 8))
