;;;; The state of each connection: *PACKAGE* and the variables of the REPL, the printer and the reader. The session's own
;;;; connection uses the global values. While a thread works for another connection, it binds the variables to the values
;;;; of that connection.

(in-package "SBCL-HOST")

(defparameter *repl-variables* '(*package* * ** *** + ++ +++ / // /// -)
  "The variables that an evaluation binds to their current values if it may move to the background.")

(defparameter *connection-variables*
  (append *repl-variables*
          '(*print-array* *print-base* *print-case* *print-circle* *print-escape* *print-gensym* *print-length*
            *print-level* *print-lines* *print-miser-width* *print-pprint-dispatch* *print-pretty* *print-radix*
            *print-readably* *print-right-margin* *read-base* *read-default-float-format* *read-eval* *read-suppress*
            *readtable*))
  "The variables that have separate values in each connection.")

(defglobal **initial-variable-values** '()
  "An alist from printer and reader variables to their values at the start of a session.")

(defglobal **connections** (make-hash-table :synchronized t)
  "A table from connection numbers to vectors of the values of *CONNECTION-VARIABLES*. The session's own connection has
no entry.")

(declaim (type (or null simple-vector) *connection-values*))
(defvar *connection-values* nil
  "The vector of values of the connection that this thread works for, or NIL for the session's own connection.")

(defun initial-connection-value (variable)
  "Return the value of VARIABLE, one of *CONNECTION-VARIABLES*, in a new connection."
  (case variable
    (*package* **user-package**)
    (*readtable* (copy-readtable nil))
    (*print-pprint-dispatch* (copy-pprint-dispatch nil))
    (t (cdr (assoc variable **initial-variable-values**)))))

(defun connection-values (number)
  "Return the vector of values of the connection NUMBER. Create the vector if the connection is new."
  (sb-ext:with-locked-hash-table (**connections**)
    (or (gethash number **connections**)
        (setf (gethash number **connections**)
              (map 'simple-vector #'initial-connection-value *connection-variables*)))))

(defun call-for-connection (number function)
  "Call FUNCTION with *CONNECTION-VARIABLES* bound to the values of the connection NUMBER. Number 0, the session's own
connection, has the global values."
  (declare (type function function))
  (if (eql number 0)
      (funcall function)
      (let ((*connection-values* (connection-values number)))
        (progv *connection-variables* (coerce *connection-values* 'list)
          (funcall function)))))

(defun store-connection-variables ()
  "Store the current values of *CONNECTION-VARIABLES* as the values of this thread's connection. Do nothing for the session's
own connection, which uses the global values."
  (when *connection-values*
    ;; An inspection may read the vector meanwhile, and must not see a new object before the object's contents.
    (sb-thread:barrier (:write))
    (map-into *connection-values* #'symbol-value *connection-variables*)))

(define-query :forbid-resets (&key)
  "Stop messages from mentioning the tool reset-session, because the server does not list it."
  (setf **resets-available** nil))

(define-query :no-supervisor (&key)
  "Stop messages from saying that a new image replaces this image, because the server has no supervisor."
  (setf **supervised** nil))

(define-query :forget-connection (&key connection)
  "Forget the variables of the connection with the number CONNECTION, which has ended."
  (remhash connection **connections**))

(define-operation :restore-attached-form (evaluate &key package reloaded)
  "Evaluate again a form that an attached client evaluated and that was first read in the package named PACKAGE. Leave the
variables of the session's own connection unchanged, and read the form with the values of a new connection. RELOADED is as for
the operation RESTORE-FORM."
  (progv *connection-variables* (mapcar #'initial-connection-value *connection-variables*)
    (setf *package* (form-package package))
    (call-reloading-files reloaded #'evaluate)))

;;; Announcing definitions to other connections

(defun definition-text (entry)
  "Return the phrase that names the definition of ENTRY, an element of EVALUATION-UNANNOUNCED-DEFINITIONS: a list of a kind,
a name, and whether the name was defined before."
  (destructuring-bind (kind name before) entry
    (declare (ignore before))
    (if (eq kind :system)
        (format nil "the system ~A" name)
        (guarded (format nil "~:[~S~;~A~]" (eq kind :package) name) (failure) "(unprintable name)"))))

(defun announce-definitions ()
  "Send other connections, if there are any, a message about the definitions that this evaluation has made since its
last announcement."
  (when (evaluation-unannounced-definitions *evaluation*)
    (let ((defined '()))
      ;; Other threads of the evaluation may record definitions at the same time.
      (sb-ext:atomic-update (evaluation-unannounced-definitions *evaluation*)
                            (lambda (entries)
                              (setf defined (reverse entries))
                              '()))
      (when (event *job-id* (event-code :definitions))
        (let ((old (remove nil defined :key #'third))
              (new (remove-if #'third defined)))
          (event *job-id* (event-code :definitions) 0
                 (with-server-syntax ()
                   (let ((*package* **user-package**))
                     (format nil "~@[defined ~{~A~^, ~}~]~:[~;; ~]~@[redefined ~{~A~^, ~}~]~:[~; and possibly more~]"
                             (mapcar #'definition-text new)
                             (and new old)
                             (mapcar #'definition-text old)
                             (>= (length defined) +max-announced-definitions+))))))))))

;;; Package names, for the checker of source text

(define-query :packages (&key)
  "Push a record `package` with a `name` for each package and each of its nicknames."
  (dolist (package (list-all-packages))
    (dolist (name (cons (package-name package) (package-nicknames package)))
      (push-record "package" :name (coerce name 'text)))))
