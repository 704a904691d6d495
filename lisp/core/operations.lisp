;;;; Dispatches the host's requests. Jobs are found by kind, queries and operations by name. The threads of the inspection
;;;; lane answer queries, even while the user's code runs. Operations run as evaluations. The answers to queries and
;;;; operations are records of named fields; src/session/operation.rs is the Rust side of queries and operations.

(in-package "SBCL-HOST")

(defglobal **queries** (make-hash-table :test 'eq)
  "A table from the names of queries, keywords, to the functions that answer the queries.")

(defglobal **operations** (make-hash-table :test 'eq)
  "A table from the names of operations, keywords, to the functions that run the operations.")

(defglobal **job-functions** (make-hash-table :test 'eq)
  "A table from the kinds of jobs, keywords, to the functions that run jobs of the kind.")

(defmacro define-job (kind (job) documentation &body body)
  "Define the function that runs jobs of KIND. JOB is the name of the function's parameter. BODY returns true on
success. BODY runs with interrupts disabled, and must enable them only around user code."
  `(setf (gethash ,kind **job-functions**)
         (sb-int:named-lambda (job ,kind) (,job)
           ,documentation
           (declare (ignorable ,job))
           ,@body)))

(defun run-guarded-inspection (function)
  "Call FUNCTION, which inspects the image and pushes the result, and return true. When FUNCTION fails, push the error and
return NIL."
  (nth-value 1 (call-until-abandoned
                (lambda ()
                  (with-interrupts
                    (with-user-code-boundary ()
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
  "Read TEXT, a query or operation, and return its name and the list of its arguments. Read in standard syntax, whatever the
user has set, because the host wrote TEXT."
  (declare (type text text))
  (destructuring-bind (name &rest arguments)
      (with-standard-io-syntax
        (let ((*package* (find-package "COMMON-LISP"))
              (*read-eval* nil))
          (read-from-string text)))
    (values name arguments)))

(defun push-field (name value)
  "Push a field of the record that was begun last. NAME is the field's name, a keyword. VALUE is a 64-bit integer; a string;
a function that prints the field's text to its argument, a stream; a keyword, whose name in lower case is pushed; T, for
which 1 is pushed; or NIL, for which nothing is pushed."
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
                              collect (destructuring-bind (kind name description . fields) entry
                                        (declare (ignore name description))
                                        (cons kind (mapcar #'first fields))))))))
      (table))
    "The kinds of records: lists of a kind and the names of its fields, all symbols."))

(defmacro push-record (kind &rest fields)
  "Push a record of KIND, a literal string. FIELDS are keywords, the names of fields, each followed by a value for
PUSH-FIELD. A kind or field that records.sexp does not list is an error at compile time."
  (flet ((check (name names)
           (or (assoc name names :test #'string-equal)
               (error "lisp/build/records.sexp has no kind or field ~A, only ~{~(~A~)~^, ~}." name (mapcar #'first names)))))
    (let ((known (mapcar #'list (rest (check kind *record-table*)))))
      `(progn
         (event *job-id* (event-code :record) 0 ,kind)
         ,@(loop for (name value) on fields by #'cddr
                 do (check name known)
                 collect `(push-field ,name ,value))))))

(defun form-package (name)
  "Return the package named NAME, in which a form was first read. If there is no such package, signal an error: in any
other package, the form's names would be different symbols."
  (or (find-package name)
      (error 'sb-kernel:simple-package-error
             :package name
             :format-control "The package ~A, in which the form was read, does not exist."
             :format-arguments (list name))))

(defun load-separate-file (namestring)
  "Load again the file NAMESTRING, which LOAD has loaded before, in the package and external format in which the file was
loaded. If the package does not exist any more, or the file is now a FIFO or a device, push a notice instead."
  (let* ((file (gethash namestring **loaded-files**))
         (package (find-package (loaded-file-package file))))
    (cond ((eq :special (sb-impl::native-file-kind namestring t))
           ;; LOAD would block until another process opens the FIFO, too.
           (push-notice "~A was not loaded again: it is not a regular file." (shown-path namestring)))
          (package
           (note-reloaded-file namestring)
           (let ((*package* package))
             (with-compilation-unit ()
               (load (sb-ext:parse-native-namestring namestring) :external-format (loaded-file-external-format file)))))
          (t (push-notice "~A was not loaded again: the package ~A, in which it was loaded, does not exist."
                          (shown-path namestring) (loaded-file-package file))))))

(defun load-due-files (component)
  "Load again the files of COMPONENT, an ASDF component, that are in *FILES-TO-RELOAD*."
  (cond ((typep component 'asdf:parent-component)
         (mapc #'load-due-files (asdf:component-children component)))
        ((reload-due-p (asdf:make-operation 'asdf:load-op) component)
         (asdf:operate 'asdf:load-op component))))

(defun call-reloading-files (files function)
  "Call FUNCTION, which evaluates a restored form, and return its value. Meanwhile, have ASDF load FILES, native namestrings,
again although they are up to date. Afterwards, load those of FILES that the form has not loaded: the form that is recorded for
a test run or for a failed form does not load all files that were loaded again."
  (declare (type function function))
  (let ((*files-to-reload* files))
    (prog1 (funcall function)
      (when *files-to-reload*
        ;; In one session, ASDF computes the state of each file once, and not again for each of FILES.
        (asdf/session:with-asdf-session ()
          ;; Systems that are not loaded come last, because they may contain a file of a loaded system, too.
          (loop for name in (remove-duplicates (append (already-loaded-systems) (asdf:registered-systems))
                                               :test #'string= :from-end t)
                while *files-to-reload*
                do (load-due-files (asdf:registered-system name)))))
      (dolist (file *files-to-reload*)
        (when (loaded-separately-p (gethash file **loaded-files**))
          (load-separate-file file))))))

(define-operation :restore-form (evaluate &key package reloaded)
  "Evaluate again a form that was first read in the package named PACKAGE, and make this package the session's current
package. RELOADED is a list of the native namestrings of the files that are loaded again although they are up to date."
  (setf *package* (form-package package))
  (call-reloading-files reloaded #'evaluate))

(defvar *undo-query* nil
  "A function without arguments that undoes what the running query has done, or NIL. It is called unless the query's job
succeeds.")

(defun run-query (text)
  "Answer the query in TEXT."
  (multiple-value-bind (name arguments) (read-operation text)
    (apply (the function (gethash name **queries**)) arguments)))

(define-job :query (job)
  "Answer the query in JOB. Undo the query unless it is answered by the time when interrupts are disabled again. From then on,
no interruption can keep the host from learning of the success."
  (let ((*undo-query* nil)
        (answered nil))
    (unwind-protect (setf answered (run-guarded-inspection (lambda () (run-query (job-operation job)))))
      (unless (or answered (null *undo-query*))
        (funcall (the function *undo-query*))))))
