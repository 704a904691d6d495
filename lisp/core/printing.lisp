;;;; Printing for the host. Every object is hostile: its methods may fail, loop, and print without end.

(in-package "SBCL-HOST")

(defmacro with-server-syntax ((&key (length 20) (level 6)) &body body)
  "Evaluate BODY under known printer and reader variables, whatever the user's are; *PACKAGE* stays."
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

(defun say (control &rest arguments)
  "Have the host tell what CONTROL, a format control, makes of ARGUMENTS."
  (event *job-id* (event-code :notice) 0
         (with-server-syntax ()
           (let ((*print-escape* nil))
             (apply #'format nil control arguments)))))

(defun refuse (control &rest arguments)
  "Push why what was asked cannot be done, a format CONTROL with ARGUMENTS, and return NIL."
  (event *job-id* (event-code :refused) 0
         (with-server-syntax () (let ((*print-escape* nil)) (apply #'format nil control arguments))))
  nil)

(defvar *signal-observer* nil
  "A function of a condition, a frame pointer and the present handlers that sees each error which this thread signals,
before any handler does; or NIL.")

(defvar *on-debugger* nil
  "A function of a condition that does not return: what an entry into the debugger comes to in this thread now.")

(defun call-guarded (function failure)
  "Return the values of FUNCTION, or of FAILURE called with the condition when FUNCTION signals something serious or
enters the debugger."
  (declare (type function function failure) (dynamic-extent function failure))
  (let ((condition
          (block guard
            (return-from call-guarded
              (let ((*on-debugger* (lambda (condition) (return-from guard condition)))
                    (*signal-observer* nil)
                    (*debugger-hook* nil)
                    (*break-on-signals* nil))
                (handler-bind ((serious-condition (lambda (condition) (return-from guard condition)))
                               (warning (lambda (warning)
                                          (let ((restart (find-restart 'muffle-warning warning)))
                                            (when restart (invoke-restart restart))))))
                  (funcall function)))))))
    (funcall failure condition)))

(defmacro guarded (form (condition) &body failure)
  "Return the values of FORM; when it fails, of FAILURE with CONDITION bound."
  `(call-guarded (lambda () ,form)
                 (lambda (,condition) (declare (ignorable ,condition)) ,@failure)))

(defun class-name-of (object)
  "Return the name of OBJECT's class, or T."
  (or (guarded (class-name (class-of object)) (c) nil) t))

(defglobal **user-package** (find-package "COMMON-LISP-USER")
  "COMMON-LISP-USER: what *PACKAGE* is at first, and where a reader is taken to read type names.")

(defun current-package ()
  "Return *PACKAGE*, which becomes COMMON-LISP-USER if the user deleted what it was."
  (if (package-name *package*)
      *package*
      (setf *package* **user-package**)))

(defun type-name-text (name)
  "Return NAME, a type name, as a reader in CL-USER would have to write it."
  (with-server-syntax ()
    (let ((*package* **user-package**))
      (guarded (prin1-to-string name) (c) "UNPRINTABLE"))))

(defun push-text (kind function &optional (limited t))
  "Call FUNCTION with a stream whose text goes to the host as events of KIND, when LIMITED only as much of it as the
host wants. Return NIL; the condition when FUNCTION fails; :ENOUGH when the host wanted no more."
  (declare (type function function) (dynamic-extent function))
  (let ((stream (make-text-stream kind limited))
        ;; What prints is not to leave by a restart of whoever asked for it.
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
  "Return what FUNCTION, of a stream, prints, at most LIMIT characters of it; and what PUSH-TEXT returns."
  (declare (type function function))
  (let* ((parts '())
         (left limit)
         (result (let ((*text-sink* (lambda (string start end)
                                      (let ((end (min end (+ start left))))
                                        (decf left (- end start))
                                        (push (subseq string start end) parts)
                                        (zerop left)))))
                   (push-text 0 function))))
    (values (if (and parts (null (rest parts)))
                (first parts)
                (apply #'concatenate 'string (nreverse parts)))
            result)))

(defun printed (object limit)
  "Return OBJECT as PRIN1 has it now, at most LIMIT characters and a mark where some are missing; what stands for it
when it cannot be printed."
  (multiple-value-bind (text result) (bounded-text limit (lambda (stream) (prin1 object stream)))
    (cond ((null result) text)
          ((eq result :enough) (concatenate 'string text "…"))
          (t (format nil "#<unprintable ~A>" (type-name-text (class-name-of object)))))))

(defun push-unprintable (kind object)
  "Push the text that stands for OBJECT, which cannot be printed."
  (event *job-id* kind 0 (format nil "#<unprintable ~A>" (type-name-text (class-name-of object)))))

(defun atomic-p (object)
  "True when OBJECT prints without printing other objects, so that it needs no search for circles."
  (typep object '(or number symbol character string pathname package function)))

(defun push-value (value)
  "Push VALUE as the user's printer variables have it, pretty and safe from circles."
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
  "Push what CONDITION reports of itself as events of KIND, without pretty line breaks."
  (with-server-syntax (:length 1000 :level 50)
    (let ((*print-escape* nil))
      (flet ((report (stream) (princ condition stream)))
        (let ((result (push-text kind #'report)))
          ;; Very long, and perhaps for a circle in it: once more, so that it ends and what is left out is counted.
          (when (eq result :enough)
            (event *job-id* kind 1)
            (setf result (let ((*print-circle* t)) (push-text kind #'report nil))))
          (when result
            (event *job-id* kind 0 (format nil "(the condition's report failed: ~A)"
                                           (type-name-text (class-name-of result))))))))))
