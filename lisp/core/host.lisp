;;;; The functions of the host that Lisp calls, as struct sbcl_host in ffi/sbcl_host.h declares them. The functions that
;;;; the host calls are in embedding/start.lisp. The interface to embedding programs, struct sbcl_library, is in
;;;; embedding/calls.lisp and embedding/embedding.lisp.

(in-package "SBCL-HOST")

(defconstant +contract-version+ (declared-number "SBCL_HOST_CONTRACT")
  "The version of the contract between Lisp and the host, ffi/sbcl_host.h.")

(defconstant +evaluation-lane+ (declared-number "SBCL_LANE_EVALUATION"))
(defconstant +inspection-lane+ (declared-number "SBCL_LANE_INSPECTION"))
(defconstant +control-lane+ (declared-number "SBCL_LANE_CONTROL"))
(defconstant +signal-lane+ (declared-number "SBCL_LANE_SIGNALS"))

(macrolet ((define-codes (name enum prefix documentation)
             (let ((codes (enum-codes enum prefix)))
               `(progn
                  (eval-when (:compile-toplevel :load-toplevel :execute)
                    (defun ,name (name)
                      ,documentation
                      (or (getf ',codes name) (error "~S is not a member of the enum ~A in ffi/sbcl_host.h." name ,enum))))
                  (define-compiler-macro ,name (&whole form name)
                    (if (keywordp name) (getf ',codes name) form))))))
  (define-codes event-code "sbcl_event" "SBCL_EVENT_"
    "Return the number of the event NAME, a keyword such as :DONE, in the C enum sbcl_event.")
  (define-codes item-code "sbcl_item" "SBCL_ITEM_"
    "Return the number of the item NAME, a keyword such as :CLASS, in the C enum sbcl_item."))

(declaim (type simple-vector *job-kinds*))
(defparameter *job-kinds*
  (let* ((codes (enum-codes "sbcl_job_kind" "SBCL_JOB_"))
         (kinds (make-array (1+ (loop for (nil number) on codes by #'cddr maximize number)) :initial-element nil)))
    (loop for (kind number) on codes by #'cddr do (setf (svref kinds number) kind))
    kinds)
  "A vector of the job kinds, keywords, indexed by their numbers in the C enum sbcl_job_kind.")

(declaim (type simple-vector *audiences*))
(defparameter *audiences*
  (coerce (loop for (audience) on (enum-codes "sbcl_audience" "SBCL_AUDIENCE_") by #'cddr
                collect audience)
          'simple-vector)
  "A vector of the audiences, keywords, indexed by their numbers in the C enum sbcl_audience.")

(defconstant +evaluate-timing+ (declared-number "SBCL_EVALUATE_TIMING")
  "The flag of an :EVALUATE job that must measure time and allocation.")
(defconstant +evaluate-hold+ (declared-number "SBCL_EVALUATE_HOLD")
  "The flag of an :EVALUATE job whose evaluation must be held where it fails.")
(defconstant +evaluate-record-errors+ (declared-number "SBCL_EVALUATE_RECORD_ERRORS")
  "The flag of an :EVALUATE job that must record all errors that are signalled, including errors that the code handles.")
(defconstant +evaluate-detached+ (declared-number "SBCL_EVALUATE_DETACHED")
  "The flag of an :EVALUATE job whose evaluation may be in the background when it ends.")
(defconstant +evaluate-background+ (declared-number "SBCL_EVALUATE_BACKGROUND")
  "The flag of an :EVALUATE job whose evaluation starts in the background.")
(defconstant +describe-source+ (declared-number "SBCL_DESCRIBE_SOURCE")
  "The flag of a :DESCRIBE job that must include the text of definitions.")
(defconstant +interrupt-timeout+ (declared-number "SBCL_INTERRUPT_TIMEOUT")
  "The reason in an :INTERRUPT job when the time limit of the job to interrupt has passed.")
(defconstant +interrupt-cancel+ (declared-number "SBCL_INTERRUPT_CANCEL")
  "The reason in an :INTERRUPT job when the job to interrupt was cancelled, for example by its client or because the
client has disconnected.")
(defconstant +interrupt-heap+ (declared-number "SBCL_INTERRUPT_HEAP")
  "The reason in an :INTERRUPT job when the heap is nearly full.")

(defconstant +job-signalled+ (declared-number "SBCL_JOB_SIGNALLED")
  "The flag added to the job number of an event about a signalled error that the code may still handle.")

(defparameter *exported-functions* (exported-functions)
  "The names of the functions that a core exports to the host. start.lisp defines the functions.")

(deftype text ()
  "A string in UTF-32, the representation that Lisp and the host share."
  '(simple-array character (*)))

(declaim (type (unsigned-byte 64) **next-job-function-address** **event-function-address**))
(defglobal **next-job-function-address** 0
  "The address of the host's function next_job.")
(defglobal **event-function-address** 0
  "The address of the host's function event.")

(defun host-started-p ()
  "Return true once this image serves a host."
  (plusp **event-function-address**))

(defconstant +host-stack-bytes+ (* 16 1024)
  "Number of bytes of the control stack that must be free when the host is called. Smaller than a guard page.")

(defun exhaust-control-stack ()
  "Recurse without end, so that SBCL signals that the control stack is exhausted."
  (1+ (the fixnum (exhaust-control-stack))))

(defun check-stack-end ()
  "Perform CHECK-HOST-STACK near the guard pages of the control stack. From the end of the stack inwards, there are the
hard guard page; the guard page, whose space SBCL uses to handle exhaustion; and the return guard page, which SBCL
protects after an exhaustion until code writes to it."
  (let ((room (control-stack-room))
        (guard-end (* 2 sb-c:+backend-page-bytes+)))
    (declare (type index room))
    (cond ((>= room (+ guard-end +host-stack-bytes+))
           ;; Write below the stack pointer, where nothing is stored. If the return guard page is protected, the write
           ;; makes SBCL remove the protection.
           (setf (sap-ref-8 (sb-vm::current-sp) (- +host-stack-bytes+)) 0))
          ;; A write below the stack pointer that hits the guard page would leave SBCL too little space to handle exhaustion.
          ((>= room guard-end)
           (exhaust-control-stack))
          ;; Exhaustion is being handled. Leave most of the guard page to handlers, which may print.
          ((< room (+ sb-c:+backend-page-bytes+ (floor +host-stack-bytes+ 2)))
           (exhaust-control-stack)))))

(declaim (inline check-host-stack))
(defun check-host-stack ()
  "Signal that the control stack is exhausted unless the host can be called. Where the host's functions run on this stack, a
fault in them ends the process."
  (unless +c-code-on-alien-stack+
    (when (< (control-stack-room) (+ (* 3 sb-c:+backend-page-bytes+) +host-stack-bytes+))
      (check-stack-end))))

(defmacro calling-host (form)
  "Evaluate FORM, a call of the host, with enough stack, and without interrupts, as the contract requires: an interrupt that
unwound through the host's frames would be undefined behaviour. The host masks float traps itself, because SBCL's macro for
this purpose takes longer than the rest of a call."
  `(progn (check-host-stack)
          (without-interrupts ,form)))

(defun push-event-at-address (job kind number address length)
  "Push an event of KIND, an event code, for the job numbered JOB, with NUMBER and a text: the LENGTH characters at
ADDRESS. Return true when the host replies 1. The reply to a text means that the host wants no more of the text; the reply
to a question (see sbcl_event) means yes. When this image serves no host, do nothing and return NIL."
  (declare (type (unsigned-byte 64) job length) (type (unsigned-byte 32) kind)
           (type (signed-byte 64) number) (type system-area-pointer address))
  (and (plusp **event-function-address**)
       (eql 1 (calling-host
               (alien-funcall (sap-alien (int-sap **event-function-address**)
                                         (function (signed 32) (unsigned 64) (unsigned 32) (signed 64)
                                                   system-area-pointer (unsigned 64)))
                              job kind number address length)))))

(defun push-event-text (job kind number text start end)
  "Push an event of KIND with the characters of TEXT, any string, from START below END. JOB, KIND, NUMBER and the value are
as in PUSH-EVENT-AT-ADDRESS."
  (declare (type string text) (type index start end))
  (if (typep text 'text)
      (with-pinned-objects (text)
        (push-event-at-address job kind number (sap+ (vector-sap text) (* 4 start)) (- end start)))
      (let ((copy (make-string (- end start))))
        (replace copy text :start2 start :end2 end)
        (push-event-text job kind number copy 0 (length copy)))))

(defun event (job kind &optional (number 0) (text ""))
  "Push an event of KIND, an event code, with NUMBER and TEXT for the job numbered JOB. Return true when the host replies 1,
as PUSH-EVENT-AT-ADDRESS does."
  (declare (type string text))
  (if (zerop (length text))
      (push-event-at-address job kind number (int-sap 0) 0)
      (push-event-text job kind number text 0 (length text))))

(defstruct (job (:copier nil) (:predicate nil))
  "A job, copied from the host's struct sbcl_job, which describes the slots. KIND is an element of *JOB-KINDS*, and AUDIENCE
of *AUDIENCES*."
  (id 0 :type (unsigned-byte 64))
  (kind nil :type symbol)
  (flags 0 :type (unsigned-byte 32))
  (argument 0 :type (unsigned-byte 64))
  (text "" :type text)
  (name "" :type text)
  (operation "" :type text)
  (evaluation 0 :type (unsigned-byte 64))
  (connection 0 :type (unsigned-byte 64))
  (audience :agent :type symbol))

(defun copy-text (address length)
  "Return the LENGTH characters at the integer ADDRESS as a fresh string."
  (declare (type (unsigned-byte 64) address) (type index length))
  (let ((text (make-string length)))
    (unless (zerop length)
      (with-pinned-objects (text)
        (sb-kernel:%byte-blt (int-sap address) 0 (vector-sap text) 0 (* 4 length))))
    text))

(defun next-job (lane &optional (held 0))
  "Wait for the next job of LANE, a lane's number, and return it. Return NIL when the host wants this thread to end. HELD is
the number of this thread's last job if the thread holds an evaluation, else 0."
  (let ((words (make-array (/ (structure-size "sbcl_job") 8) :element-type '(unsigned-byte 64) :initial-element 0)))
    (macrolet ((word (field)
                 `(aref words (/ (field-offset "sbcl_job" ,field) 8)))
               (half (field)
                 `(multiple-value-bind (word octets) (floor (field-offset "sbcl_job" ,field) 8)
                    (ldb (byte 32 (* 8 octets)) (aref words word)))))
      (setf (word "id") held)
      (when (eql 1 (with-pinned-objects (words)
                     (calling-host
                      (alien-funcall (sap-alien (int-sap **next-job-function-address**)
                                                (function (signed 32) (unsigned 32) system-area-pointer))
                                     lane (vector-sap words)))))
        (make-job :id (word "id")
                  :kind (svref *job-kinds* (half "kind"))
                  :flags (half "flags")
                  :argument (word "argument")
                  :text (copy-text (word "text") (word "text_length"))
                  :name (copy-text (word "name") (word "name_length"))
                  :evaluation (word "evaluation")
                  :operation (copy-text (word "operation") (word "operation_length"))
                  :connection (word "connection")
                  :audience (svref *audiences* (half "audience")))))))

(defun prefer-large-pages ()
  "Ask the kernel to back the heap with large pages (madvise(2), MADV_HUGEPAGE): page faults are a large part of the cost
of a small evaluation. A kernel without large pages ignores the request. Do nothing where a large page may be too large
(see +LARGE-PAGE-BYTES+)."
  #+linux
  (when +large-page-bytes+
    (alien-funcall (extern-alien "madvise" (function int unsigned-long unsigned-long int))
                   sb-vm:dynamic-space-start (sb-ext:dynamic-space-size) 14)))

(defun guard-stack-ends ()
  "Protect the last pages of this thread's control stack, binding stack and alien stack. SBCL does so for its first thread
only. Without these pages, a stack overflow would write into the next stack, or into another thread's memory."
  (let ((thread (int-sap (sb-thread::thread-primitive-thread sb-thread:*current-thread*))))
    (macrolet ((protect (function)
                 `(alien-funcall ,function 1 thread)))
      (protect (extern-alien "protect_control_stack_hard_guard_page" (function void int system-area-pointer)))
      (protect (extern-alien "protect_binding_stack_hard_guard_page" (function void int system-area-pointer)))
      (protect (extern-alien "protect_alien_stack_hard_guard_page" (function void int system-area-pointer))))))

(defglobal **resets-available** t
  "True when the server lists the tool reset-session; NIL in the image of an embedding program.")

(defglobal **supervised** t
  "True when a supervisor replaces a lost image and evaluates the session's definitions again; NIL in the image of an
embedding program, and when the server has no supervisor.")
