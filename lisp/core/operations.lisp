;;;; What the host asks of the image: jobs, by their kind; and by name, in the order it likes: queries, which the inspection
;;;; lane answers while the user's code may run, and operations, each of which is an evaluation of its own. They answer with
;;;; records of named fields. src/session/operation.rs has the other half.

(in-package "SBCL-HOST")

(defglobal **queries** (make-hash-table :test 'eq)
  "The functions of queries by name, a keyword.")

(defglobal **operations** (make-hash-table :test 'eq)
  "The functions of operations by name, a keyword.")

(defglobal **job-functions** (make-hash-table :test 'eq)
  "The functions that do jobs, by kind.")

(defmacro define-job (kind (job) documentation &body body)
  "Define how JOB, of KIND, is done: BODY returns true when that succeeded. What is the user's runs with interrupts, all else
without."
  `(setf (gethash ,kind **job-functions**)
         (sb-int:named-lambda (job ,kind) (,job)
           ,documentation
           (declare (ignorable ,job))
           ,@body)))

(defun run-guarded-inspection (function)
  "Call FUNCTION, a question, and return true; when it fails, push the error and return false."
  (nth-value 1 (call-until-abandoned
                (lambda ()
                  (with-interrupts
                    (with-boundary ()
                      (funcall (the function function))))))))

(defmacro define-query (name lambda-list documentation &body body)
  "Define the query NAME, a keyword: a function of LAMBDA-LIST, keyword parameters all, that pushes records."
  `(setf (gethash ,name **queries**)
         (sb-int:named-lambda (query ,name) ,lambda-list ,documentation ,@body)))

(defmacro define-operation (name (evaluate &rest lambda-list) documentation &body body)
  "Define the operation NAME, a keyword: a function of LAMBDA-LIST, keyword parameters all, that is done as an evaluation
and may push records. EVALUATE is the name of a local function without arguments that reads and evaluates the code sent
along and returns a list of the last form's values. The operation returns the list of values that are to be printed."
  `(setf (gethash ,name **operations**)
         (sb-int:named-lambda (operation ,name) (,evaluate ,@lambda-list)
           ,documentation
           (declare (type function ,evaluate))
           (flet ((,evaluate () (funcall ,evaluate)))
             (declare (ignorable #',evaluate))
             ,@body))))

(defun read-operation (text)
  "Return the name and the list of arguments of the query or operation in TEXT. It is the host's, not the user's."
  (declare (type text text))
  (destructuring-bind (name &rest arguments)
      (with-standard-io-syntax
        (let ((*package* (find-package "COMMON-LISP"))
              (*read-eval* nil))
          (read-from-string text)))
    (values name arguments)))

(defun push-field (name value)
  "Push that the record pushed last has VALUE under NAME, a keyword: an integer of 64 bits, a string, a function that
prints to its argument, a keyword for its name in lower case, T for 1; nothing for NIL."
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
  "Push a record of KIND, a string, with FIELDS: names, keywords, each with its value as PUSH-FIELD takes it. records.sexp
has the names of both."
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
  "Evaluate a form that was read in PACKAGE, a name, when it was evaluated first, which is the session's from then on. In
an image without that package it is not evaluated at all: elsewhere its names would be others."
  (setf *package* (or (find-package package)
                      (error 'sb-kernel:simple-package-error
                             :package package
                             :format-control "The package ~A, in which it was read, is not there."
                             :format-arguments (list package))))
  (evaluate))

(defun run-query (text)
  "Answer the query in TEXT."
  (multiple-value-bind (name arguments) (read-operation text)
    (apply (the function (gethash name **queries**)) arguments)))

(define-job :query (job)
  "Answer a query."
  (run-guarded-inspection (lambda () (run-query (job-operation job)))))
