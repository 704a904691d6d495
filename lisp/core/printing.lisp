;;;; Printing for the host. Printing any object may fail, loop, or produce text without end, because the user's methods may
;;;; do so.

(in-package "SBCL-HOST")

(defmacro with-server-syntax ((&key (length 20) (level 6)) &body body)
  "Evaluate BODY with known values of the printer and reader variables, whatever the user has set. LENGTH and LEVEL are the
values of *PRINT-LENGTH* and *PRINT-LEVEL*. *PACKAGE* keeps its value, unless that package has been deleted."
  `(let ((*package* (current-package)) (*print-array* t) (*print-base* 10) (*print-case* :upcase)
         (*print-circle* nil) (*print-escape* t) (*print-gensym* t) (*print-length* ,length) (*print-level* ,level) (*print-lines* nil)
         (*print-miser-width* nil) (*print-pprint-dispatch* sb-pretty::*standard-pprint-dispatch-table*)
         (*print-pretty* nil) (*print-radix* nil) (*print-readably* nil) (*print-right-margin* nil)
         (*read-base* 10) (*read-default-float-format* 'single-float) (*read-eval* t) (*read-suppress* nil)
         (*readtable* sb-impl::*standard-readtable*)
         (sb-ext:*evaluator-mode* :compile)
         (sb-ext:*print-vector-length* nil)
         (sb-ext:*suppress-print-errors* nil)
         (sb-int:*print-condition-references* nil))
     ,@body))

(defun push-notice (control &rest arguments)
  "Push a notice to the user, the text of the format string CONTROL applied to ARGUMENTS."
  (event *job-id* (event-code :notice) 0
         (with-server-syntax ()
           (let ((*print-escape* nil))
             (apply #'format nil control arguments)))))

(defun refuse (control &rest arguments)
  "Push the reason why a request cannot be fulfilled, and return NIL. The reason is the text of the format string CONTROL
applied to ARGUMENTS."
  (event *job-id* (event-code :refused) 0
         (with-server-syntax () (let ((*print-escape* nil)) (apply #'format nil control arguments))))
  nil)

(defvar *signal-observer* nil
  "A function that is called for each error that this thread signals, before any handler runs; or NIL. The arguments are
the condition, a frame pointer and the current handlers.")

(defvar *on-debugger* nil
  "A function that is called in place of the debugger in this thread, or NIL. The argument is the condition. The function
must not return.")

(declaim (type fixnum *nested-interruptions*))
(defvar *nested-interruptions* 0
  "The number of interruptions that run in this thread.")

(defvar *interruptions-pass-guards* nil
  "True when a condition that an interruption signals passes the calls of CALL-GUARDED that the interruption has interrupted:
the condition goes to the handlers outside these calls, and then to the outer value of *ON-DEBUGGER*, if it is not NIL.")

(defun call-guarded (function failure)
  "Call FUNCTION and return its values. Muffle its warnings. When FUNCTION signals a serious condition or enters the
debugger, unwind, call the function FAILURE with the condition, and return the values of FAILURE. See
*INTERRUPTIONS-PASS-GUARDS* for the conditions of interruptions."
  (declare (type function function failure) (dynamic-extent function failure))
  (let ((condition
          (block guard
            (return-from call-guarded
              (let ((outer *on-debugger*)
                    (interruptions *nested-interruptions*))
                (flet ((passes-p ()
                         (and outer *interruptions-pass-guards* (/= interruptions *nested-interruptions*))))
                  (let ((*on-debugger* (lambda (condition)
                                         (when (passes-p)
                                           (funcall (the function outer) condition))
                                         (return-from guard condition)))
                        (*signal-observer* nil)
                        (*debugger-hook* nil)
                        (*break-on-signals* nil))
                    (handler-bind ((serious-condition (lambda (condition)
                                                        (unless (passes-p)
                                                          (return-from guard condition))))
                                   (warning (lambda (warning)
                                              (let ((restart (find-restart 'muffle-warning warning)))
                                                (when restart (invoke-restart restart))))))
                      (funcall function)))))))))
    (funcall failure condition)))

(defmacro guarded (form (condition) &body failure)
  "Evaluate FORM and return its values. When FORM signals a serious condition or enters the debugger, evaluate the forms
FAILURE with the variable CONDITION bound to the condition, and return their values."
  `(call-guarded (lambda () ,form)
                 (lambda (,condition) (declare (ignorable ,condition)) ,@failure)))

(defun class-name-of (object)
  "Return the name of OBJECT's class, or T if the class has none."
  (or (guarded (class-name (class-of object)) (c) nil) t))

(defglobal **user-package** (find-package "COMMON-LISP-USER")
  "The package COMMON-LISP-USER, the initial value of *PACKAGE*. Type names are printed with *PACKAGE* bound to this
package.")

(defun current-package ()
  "Return *PACKAGE*. If the user has deleted that package, set *PACKAGE* to COMMON-LISP-USER first."
  (if (package-name *package*)
      *package*
      (setf *package* **user-package**)))

(defun type-name-text (name)
  "Return the printed representation of NAME, a type name, with COMMON-LISP-USER as the current package."
  (with-server-syntax ()
    (let ((*package* **user-package**))
      (guarded (prin1-to-string name) (c) "UNPRINTABLE"))))

(defun push-text (kind function &optional (limited t))
  "Call FUNCTION with a stream that pushes the text printed to it as events of KIND. If LIMITED is true, unwind from
FUNCTION once the host wants no more text. Return NIL if FUNCTION returns, the condition if it fails, or :ENOUGH if it was
stopped because the host wants no more text."
  (declare (type function function) (dynamic-extent function))
  (let ((stream (make-text-stream kind limited))
        ;; Hide the caller's restarts, so that printing cannot transfer control to one of them.
        (sb-kernel:*restart-clusters* '()))
    (catch 'enough
      (return-from push-text
        (guarded (progn (funcall function stream)
                        (finish-text-stream stream)
                        nil)
            (condition)
          (finish-text-stream stream)
          condition)))
    (setf (text-stream-buffer stream) nil)
    :enough))

(defun bounded-text (limit function)
  "Call FUNCTION with a stream. Return the text that FUNCTION prints to the stream, at most LIMIT characters; and the value
of PUSH-TEXT, which is :ENOUGH when FUNCTION printed more. If the heap or the stack is exhausted, return only the first part
of the text."
  (declare (type function function))
  (let* ((parts '())
         (left limit)
         (result (let ((*text-sink* (lambda (string start end)
                                      (let ((kept (min left (- end start))))
                                        (decf left kept)
                                        (push (subseq string start (+ start kept)) parts)
                                        (< kept (- end start))))))
                   (push-text 0 function))))
    ;; The parts may fill the heap, which then has no room to join them.
    (when (typep result 'storage-condition)
      (setf parts (last parts)))
    (values (if (and parts (null (rest parts)))
                (first parts)
                ;; There may be more parts than the stack has room for as arguments of CONCATENATE.
                (let ((text (make-string (- limit left)))
                      (start 0))
                  (declare (type index start))
                  (dolist (part (nreverse parts) text)
                    (declare (type simple-string part))
                    (replace text part :start1 start)
                    (incf start (length part)))))
            result)))

;;; Time limits for values

(declaim (type (member nil :error :interrupted) *failure-reason*))
(defvar *failure-reason* nil
  "The reason for this evaluation's failure: :ERROR for an error that reached the debugger, :INTERRUPTED, or NIL if the
evaluation has not failed. Cleanup forms that stop the unwinding do not reset this variable.")

(defvar *capturing-interruption* nil
  "True while this thread captures the frames of its interrupted evaluation.")

(defun call-with-time-limit (seconds function)
  "Return the values of FUNCTION. If FUNCTION has not returned after SECONDS, a real number, unwind it and return NIL. While
FUNCTION runs foreign code, the unwinding waits as OUTSIDE-FOREIGN-CODE describes. If an interruption is capturing the
frames of FUNCTION, do not unwind: the interruption itself ends or holds the evaluation. If the evaluation has failed
meanwhile, do not unwind either: a cleanup form in FUNCTION is running, and the evaluation would continue."
  (declare (type function function))
  (let* ((tag (list nil))
         (running t)
         (capturing *capturing-interruption*)
         (failure *failure-reason*)
         ;; The timer may fire after FUNCTION has returned. The timer's function, which runs in this thread,
         ;; then finds that RUNNING is NIL.
         (timer (sb-ext:make-timer (outside-foreign-code
                                    (lambda ()
                                      (when (and running
                                                 (eq capturing *capturing-interruption*)
                                                 (eq failure *failure-reason*))
                                        (throw tag nil))))
                                   :thread sb-thread:*current-thread*)))
    (catch tag
      (unwind-protect (progn (sb-ext:schedule-timer timer seconds)
                             (funcall function))
        (setf running nil)
        (sb-ext:unschedule-timer timer)))))

(defconstant +values-time-limit+ 6
  "The time, in seconds, that PRIN1-IN-TIME divides among the values of an inspection. The host's default time limit for the
inspection is higher.")

(defvar *value-time* nil
  "The number of seconds that this inspection may still spend on printing values; NIL while values may take any time.")

(defmacro with-value-time-limits (() &body body)
  "Evaluate BODY, an inspection. A value that takes too long to print is replaced by a text that says so, because a user's
print method might never return."
  `(let ((*value-time* +values-time-limit+))
     ,@body))

(define-condition printing-timeout (error)
  ()
  (:documentation "The error that is signalled when a value takes too long to print.")
  (:report "Printing took too long."))

(defun prin1-in-time (object stream)
  "Print OBJECT to STREAM as PRIN1 does. Within WITH-VALUE-TIME-LIMITS, signal PRINTING-TIMEOUT if this takes more than a
twelfth of the time that is left, at first half a second, and more than 0.02 seconds. So some time is left for the next value
even if dozens of values take too long."
  (if (null *value-time*)
      (prin1 object stream)
      (let ((begin (get-internal-real-time)))
        (unwind-protect (unless (call-with-time-limit (max 1/50 (/ *value-time* 12)) (lambda () (prin1 object stream) t))
                          (error 'printing-timeout))
          (setf *value-time* (max 0 (- *value-time*
                                       (/ (- (get-internal-real-time) begin) internal-time-units-per-second))))))))

(defun unprintable-text (object &optional failure)
  "Return the text that stands for OBJECT, which cannot be printed. FAILURE is the condition that printing OBJECT
signalled, or NIL if the condition is not known."
  (format nil "#<unprintable ~A~:[~;: printing took too long~]>"
          (type-name-text (class-name-of object)) (typep failure 'printing-timeout)))

(defconstant +max-cut-integer-bits+ 100000
  "Maximum number of bits of an integer whose digits are computed although not all of them are returned. The time grows with
the square of the number of bits: for as many, it is some 10 ms.")

(defun bounded-prin1-text (object limit)
  "Return OBJECT as PRIN1 prints it under the current settings: at most LIMIT characters, with an ellipsis if there are
more; or a substitute when OBJECT cannot be printed, or is a huge integer with more than LIMIT digits. If printing OBJECT
signalled a condition, return the condition as the second value."
  (if (and (integerp object)
           ;; A decimal digit has less than four bits.
           (> (integer-length object) (max +max-cut-integer-bits+ (* 4 limit))))
      (format nil "#<~:[positive~;negative~] integer of ~D bits>" (minusp object) (integer-length object))
      (multiple-value-bind (text result) (bounded-text limit (lambda (stream) (prin1-in-time object stream)))
        (cond ((null result) text)
              ((eq result :enough) (concatenate 'string text "…"))
              (t (values (unprintable-text object result) result))))))

(defun push-unprintable (kind object)
  "Push, as an event of KIND, a text that stands for OBJECT, which cannot be printed."
  (event *job-id* kind 0 (unprintable-text object)))

(defun atomic-p (object)
  "Return true when OBJECT prints without printing other objects, so that it cannot contain circles."
  (typep object '(or number symbol character string pathname package function)))

(defun push-value (value)
  "Push VALUE, printed under the user's printer variables, with circle detection and bounded length and depth. If VALUE
cannot be printed, push a substitute."
  (event *job-id* (event-code :value))
  (let ((*print-readably* nil)
        (*print-escape* t)
        (*print-length* (or *print-length* 100))
        (*print-level* (or *print-level* 10))
        (*print-circle* (not (atomic-p value)))
        (sb-ext:*suppress-print-errors* nil))
    (when (push-text (event-code :value-text) (lambda (stream) (write value :stream stream)) nil)
      (event *job-id* (event-code :value) 1)
      (push-unprintable (event-code :value-text) value))))

(defun push-report (kind condition)
  "Push the report of CONDITION as events of KIND, without pretty-printing."
  (with-server-syntax (:length 1000 :level 50)
    (let ((*print-escape* nil))
      (flet ((report (stream) (princ condition stream)))
        (let ((result (push-text kind #'report)))
          ;; If the report is very long, perhaps because of a circle, print it again from the beginning: with circle
          ;; detection, so that it ends, and without a limit, so that the host can count the omitted characters.
          (when (eq result :enough)
            (event *job-id* kind 1)
            (setf result (let ((*print-circle* t)) (push-text kind #'report nil))))
          (when result
            (event *job-id* kind 0 (format nil "(the condition's report failed: ~A)"
                                           (type-name-text (class-name-of result))))))))))
