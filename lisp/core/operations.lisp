;;;; Requests of the host: jobs, found by kind, and queries and operations, found by name. The inspection lane answers
;;;; queries, even while the user's code runs. Operations run as evaluations. Queries and operations answer with records
;;;; of named fields. The Rust side of both is src/session/operation.rs.

(in-package "SBCL-HOST")

(defglobal **queries** (make-hash-table :test 'eq)
  "The functions that answer queries, by name, a keyword.")

(defglobal **operations** (make-hash-table :test 'eq)
  "The functions that run operations, by name, a keyword.")

(defglobal **job-functions** (make-hash-table :test 'eq)
  "The functions that run jobs, by kind, a keyword.")

(defmacro define-job (kind (job) documentation &body body)
  "Define how JOB, of KIND, is run. BODY returns true on success. It must enable interrupts around user code, and run
everything else without interrupts."
  `(setf (gethash ,kind **job-functions**)
         (sb-int:named-lambda (job ,kind) (,job)
           ,documentation
           (declare (ignorable ,job))
           ,@body)))

(defun run-guarded-inspection (function)
  "Call FUNCTION, which answers a query, and return true. When FUNCTION fails, push the error and return false."
  (nth-value 1 (call-until-abandoned
                (lambda ()
                  (with-interrupts
                    (with-boundary ()
                      (funcall (the function function))))))))

(defmacro define-query (name lambda-list documentation &body body)
  "Define the query NAME, a keyword: a function of LAMBDA-LIST (keyword parameters only) that pushes records."
  `(setf (gethash ,name **queries**)
         (sb-int:named-lambda (query ,name) ,lambda-list ,documentation ,@body)))

(defmacro define-operation (name (evaluate &rest lambda-list) documentation &body body)
  "Define the operation NAME, a keyword: a function of LAMBDA-LIST (keyword parameters only) that runs as an evaluation
and may push records. EVALUATE is the name of a local function without parameters that reads and evaluates the code sent
with the operation and returns a list of the values of its last form. The operation returns a list of the values to
print."
  `(setf (gethash ,name **operations**)
         (sb-int:named-lambda (operation ,name) (,evaluate ,@lambda-list)
           ,documentation
           (declare (type function ,evaluate))
           (flet ((,evaluate () (funcall ,evaluate)))
             (declare (ignorable #',evaluate))
             ,@body))))

(defun read-operation (text)
  "Return the name and the list of arguments of the query or operation in TEXT. The text comes from the host, not from
the user."
  (declare (type text text))
  (destructuring-bind (name &rest arguments)
      (with-standard-io-syntax
        (let ((*package* (find-package "COMMON-LISP"))
              (*read-eval* nil))
          (read-from-string text)))
    (values name arguments)))

(defun push-field (name value)
  "Push a field of the last record: VALUE under NAME, a keyword. VALUE is a 64-bit integer; a string; a function that
prints to its argument; a keyword, which stands for its name in lower case; T, which stands for 1; or NIL, for which
nothing is pushed."
  (flet ((begin (number)
           (event *job-id* (event-code :field) number (symbol-name name))))
    (etypecase value
      (null)
      ((signed-byte 64) (begin value))
      ((eql t) (begin 1))
      (string (begin 0) (event *job-id* (event-code :field-text) 0 value))
      (keyword (begin 0) (event *job-id* (event-code :field-text) 0 (string-downcase value)))
      (function (begin 0) (push-text (event-code :field-text) value)))))

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defparameter *record-table*
    (macrolet ((table ()
                 (with-open-file (stream (merge-pathnames "../build/records.sexp" (or *compile-file-truename* *load-truename*)))
                   `'(,@(loop for entry = (read stream nil nil)
                              while entry
                              collect (destructuring-bind (kind name says . fields) entry
                                        (declare (ignore name says))
                                        (cons kind (mapcar #'first fields))))))))
      (table))
    "The kinds of records, symbols, each with the names of its fields."))

(defmacro push-record (kind &rest fields)
  "Push a record of KIND, a string, with FIELDS: keywords, each followed by a value for PUSH-FIELD. records.sexp lists the
kinds and their fields; other names do not compile."
  (flet ((check (name names)
           (or (assoc name names :test #'string-equal)
               (error "There is no ~A in records.sexp; there are: ~{~(~A~)~^, ~}." name (mapcar #'first names)))))
    (let ((known (mapcar #'list (rest (check kind *record-table*)))))
      `(progn
         (event *job-id* (event-code :record) 0 ,kind)
         ,@(loop for (name value) on fields by #'cddr
                 do (check name known)
                 collect `(push-field ,name ,value))))))

(define-operation :restore-form (evaluate &key package)
  "Evaluate again a form that was first read in PACKAGE, a name. PACKAGE becomes the session's package. If PACKAGE does
not exist, signal an error: in any other package, the form's names would be different symbols."
  (setf *package* (or (find-package package)
                      (error 'sb-kernel:simple-package-error
                             :package package
                             :format-control "The package ~A, in which the form was read, does not exist."
                             :format-arguments (list package))))
  (evaluate))

(defun run-query (text)
  "Answer the query in TEXT."
  (multiple-value-bind (name arguments) (read-operation text)
    (apply (the function (gethash name **queries**)) arguments)))

(define-job :query (job)
  "Answer the query in JOB."
  (run-guarded-inspection (lambda () (run-query (job-operation job)))))
