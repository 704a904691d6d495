;;;; Probes of SBCL's behaviour. The build checks that the internal names of SBCL in sbcl-internals.sexp are unchanged. The
;;;; probes check further behaviour on which the Lisp side relies. The build runs these probes and the probes in each
;;;; patches.lisp.

(in-package "SBCL-HOST")

;;; Streams: how SBCL calls a stream's functions

(define-assumption "the byte reader of a stream (N-BIN) is called with the arguments for which DEFINE-BYTE-READER is written"
  (let ((stream (make-empty-stream))
        (octets (make-array 4 :element-type '(unsigned-byte 8))))
    (and (eql 0 (read-sequence octets stream))
         (eql 0 (sb-sys:read-n-bytes stream octets 0 4 nil))
         (handler-case (progn (sb-sys:read-n-bytes stream octets 0 4) nil)
           (end-of-file () t)))))

(define-assumption "the character and byte readers of a stream (IN and BIN) are called with EOF-ERROR-P and a value"
  (let ((stream (make-empty-stream)))
    (and (eq :end (read-char stream nil :end))
         (eq :end (read-byte stream nil :end))
         (eq :end (peek-char nil stream nil :end))
         (eq :end (read-line stream nil :end))
         (eq :end (read-char-no-hang stream nil :end))
         (handler-case (progn (read-char stream) nil)
           (end-of-file () t)))))

(define-assumption "the writers of a stream (COUT, SOUT and BOUT) are called with a character, with a string and bounds, and with a byte"
  (let* ((text "")
         (*thread-output* (make-thread-output))
         (*on-output* (lambda (string start end)
                        (setf text (concatenate 'string text (subseq string start end)))))
         (stream (make-standard-stream (event-code :stdout) 0)))
    (write-char #\a stream)
    (write-string "xbcx" stream :start 1 :end 3)
    (write-string (make-array 3 :element-type 'character :fill-pointer 2 :initial-contents "dex") stream)
    (write-byte #xC3 stream)
    (write-sequence (coerce '(#xA9 #x66) '(vector (unsigned-byte 8))) stream)
    (finish-output stream)
    (equal (format nil "abcde~Cf" (code-char #xE9)) text)))

;;; Threads, mutexes, interruptions

(define-assumption "a mutex is free after FREE-MUTEX"
  (let ((mutex (sb-thread:make-mutex)))
    (sb-thread:grab-mutex mutex)
    (and (/= 0 (mutex-state mutex))
         (sb-thread:holding-mutex-p mutex)
         (progn (free-mutex mutex)
                (not (sb-thread:holding-mutex-p mutex)))
         (null (sb-thread:mutex-owner mutex))
         (sb-thread:grab-mutex mutex :waitp nil)
         (progn (sb-thread:release-mutex mutex)
                (eql 0 (mutex-state mutex))))))

(define-assumption "the slot of a thread that contains the mutex for which the thread waits"
  (let* ((mutex (sb-thread:make-mutex))
         (thread nil))
    (prog1 (sb-thread:with-mutex (mutex)
             (setf thread (sb-thread:make-thread (lambda () (sb-thread:grab-mutex mutex)) :name "probe"))
             (loop repeat 10000
                   thereis (eq mutex (sb-thread::thread-waiting-for thread))
                   do (sleep 0.001)))
      (sb-thread:join-thread thread))))

(define-assumption "the slots of an ended thread that MARK-MISSING-THREADS-DEAD sets"
  (let ((thread (sb-thread:make-thread (lambda ()) :name "probe")))
    (sb-thread:join-thread thread)
    (and (eql -1 (sb-thread::thread-%visible thread))
         (not (sb-thread:thread-alive-p thread))
         (eql 0 (sb-thread::thread-primitive-thread thread)))))

(define-assumption "AVLTREE-FILTER returns the data of the nodes of a tree of threads"
  (equal '(probe) (sb-thread::avltree-filter #'sb-thread::avlnode-data (sb-thread::avl-insert nil 16 'probe))))

(define-assumption "an interruption is called, or is passed to the function in *INTERRUPT-HANDLER* if there is one"
  (let ((calls '()))
    (flet ((interrupt (mark)
             (sb-thread:interrupt-thread sb-thread:*current-thread* (lambda () (push mark calls)))))
      (let ((sb-thread::*interrupt-handler* (lambda (function)
                                              (push :handler calls)
                                              (funcall (the function function)))))
        (interrupt :handed))
      (let ((sb-thread::*interrupt-handler* nil))
        (interrupt :called)))
    (equal '(:called :handed :handler) calls)))

(define-assumption "a binding of *DEADLINE* to NIL suspends the outer deadline"
  (handler-case (sb-sys:with-deadline (:seconds 0)
                  (let ((sb-impl::*deadline* nil))
                    (not (sb-thread:wait-on-semaphore (sb-thread:make-semaphore) :timeout 0.001))))
    (sb-sys:deadline-timeout () nil)))

(define-assumption "the bounds of the control stack, with the stack pointer between them"
  (< (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-start*)
     (sap-int (sb-vm::current-sp))
     (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-end*)))

;;; The heap

(define-assumption "HEAP-USE counts the pages of a vector"
  (without-gcing
    (let* ((before (heap-use))
           (vector (make-array (* 20 sb-c:+backend-page-bytes+) :element-type '(unsigned-byte 8)))
           (bytes (- (heap-use) before)))
      ;; Without a use of VECTOR, the compiler would omit the allocation.
      (with-pinned-objects (vector)
        (and (<= (length vector) bytes (* 2 (length vector)))
             (<= (sb-kernel:dynamic-usage) (heap-use)))))))

;;; Handlers and restarts

(define-assumption "a binding of *HANDLER-CLUSTERS* to the initial handlers hides the outer handlers"
  (handler-case (let ((sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**))
                  (signal 'simple-condition)
                  t)
    (simple-condition () nil)))

(define-assumption "a restart made by MAKE-RESTART and bound in *RESTART-CLUSTERS* is found, reported and invoked"
  (let* ((restart (sb-kernel::make-restart 'probe (lambda (value) (list :invoked value))
                                           (lambda (stream) (write-string "Probe." stream))))
         (sb-kernel:*restart-clusters* (list (list restart))))
    (and (equal (list restart) (compute-restarts))
         (string= "Probe." (princ-to-string restart))
         (equal '(:invoked 1) (invoke-restart 'probe 1)))))

(define-assumption "RESTART-INTERACTIVE-FUNCTION and RESTART-TEST-FUNCTION return the functions that RESTART-CASE was given"
  (restart-case (let ((restart (find-restart 'probe)))
                  (and (equal '(1 2) (funcall (the function (sb-kernel::restart-interactive-function restart))))
                       (funcall (the function (sb-kernel::restart-test-function restart)) nil)))
    (probe (&rest arguments)
      :interactive (lambda () (list 1 2))
      arguments)))

;;; Frames

(define-assumption "the offsets of the caller's frame pointer and return address in a frame"
  (let* ((frame (sb-di:top-frame))
         (caller (sb-di:frame-down frame)))
    (and (= (frame-address caller) (sap-ref-word (sb-di::frame-pointer frame) +caller-offset+))
         (inner-frame-p (frame-address frame) (frame-address caller))
         (equal (frame-name caller) (frame-name (caller-frame (frame-address frame)))))))

(define-assumption "the context of a compiler warning contains the form that the warning is about"
  (let ((forms '()))
    (handler-bind ((warning (lambda (condition)
                              (let ((context (sb-c::find-error-context nil)))
                                (when context
                                  (push (sb-c::compiler-error-context-original-form context) forms)))
                              (muffle-warning condition))))
      (compile nil '(lambda () (list (car 1 2)))))
    (member '(car 1 2) forms :test #'equal)))

;;; The probe of unwinding, which may corrupt memory if SBCL's behaviour has changed, is in lisp/embedding/patches.lisp.
