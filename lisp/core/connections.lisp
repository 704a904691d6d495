;;;; What each connection to the session has of its own: *PACKAGE*, and the variables of the REPL, the printer and the
;;;; reader. Those of the session's own connection are the global values; those of the others are bound while a thread
;;;; works for one of them.

(in-package "SBCL-HOST")

(defparameter *repl-variables* '(*package* * ** *** + ++ +++ / // /// -)
  "What an evaluation that may be in the background has of its own, too.")

(defparameter *connection-variables*
  (append *repl-variables*
          '(*print-array* *print-base* *print-case* *print-circle* *print-escape* *print-gensym* *print-length*
            *print-level* *print-lines* *print-miser-width* *print-pprint-dispatch* *print-pretty* *print-radix*
            *print-readably* *print-right-margin* *read-base* *read-default-float-format* *read-eval* *read-suppress*
            *readtable*))
  "What a connection has of its own.")

(defglobal **user-variables** '()
  "Printer and reader variables with the values that a session begins with.")

(defglobal **connections** (make-hash-table :synchronized t)
  "The values of *CONNECTION-VARIABLES*, a vector, of each connection but the session's own, by its number.")

(declaim (type (or null simple-vector) *connection*))
(defvar *connection* nil
  "The vector of the connection that this thread works for, or NIL: it is the session's own.")

(defun first-value (variable)
  "Return what VARIABLE, one of *CONNECTION-VARIABLES*, is for a connection that begins."
  (case variable
    (*package* **user-package**)
    (*readtable* (copy-readtable nil))
    (*print-pprint-dispatch* (copy-pprint-dispatch nil))
    (t (cdr (assoc variable **user-variables**)))))

(defun connection-values (number)
  "Return the vector of the connection NUMBER, which may be new."
  (or (gethash number **connections**)
      (setf (gethash number **connections**)
            (map 'simple-vector #'first-value *connection-variables*))))

(defun call-for-connection (number function)
  "Call FUNCTION with the variables of the connection NUMBER."
  (declare (type function function))
  (if (eql number 0)
      (funcall function)
      (let ((*connection* (connection-values number)))
        (progv *connection-variables* (coerce *connection* 'list)
          (funcall function)))))

(defun keep-variables ()
  "Make the present values of the variables those of the connection that this thread works for."
  (when *connection*
    (map-into *connection* #'symbol-value *connection-variables*)))

(define-query :forbid-resets (&key)
  "Have no text name the tool reset-session, which is not listed."
  (setf **resets** nil))

(define-query :forget-connection (&key connection)
  "Forget the variables of the connection with the number CONNECTION, which has ended."
  (remhash connection **connections**))

;;; What one defines, for the others

(defun definition-text (entry)
  "Return what to call ENTRY, an element of EVALUATION-DEFINED."
  (destructuring-bind (kind name before) entry
    (declare (ignore before))
    (if (eq kind :system)
        (format nil "the system ~A" name)
        (guarded (format nil "~:[~S~;~A~]" (eq kind :package) name) (failure) "(unprintable name)"))))

(defun tell-definitions ()
  "Have the other connections told, if there are any, what this evaluation has defined since it was told last."
  (let ((defined (reverse (evaluation-defined *evaluation*))))
    (when defined
      (setf (evaluation-defined *evaluation*) '())
      (when (event *job-id* (event-code :definitions))
        (let ((old (remove nil defined :key #'third))
              (new (remove-if #'third defined)))
          (event *job-id* (event-code :definitions) 0
                 (with-server-syntax ()
                   (let ((*package* **user-package**))
                     (format nil "~@[defined ~{~A~^, ~}~]~:[~;; ~]~@[redefined ~{~A~^, ~}~]~:[~; and more~]"
                             (mapcar #'definition-text new)
                             (and new old)
                             (mapcar #'definition-text old)
                             (>= (length defined) +told-definitions+))))))))))

;;; Whoever checks source wants to know what there is

(define-query :packages (&key)
  "Push a record `package` with a `name` for each package and each of its nicknames."
  (dolist (package (list-all-packages))
    (dolist (name (cons (package-name package) (package-nicknames package)))
      (push-record "package" :name (coerce name 'text)))))
