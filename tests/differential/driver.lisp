;;;; The bare SBCL side of the comparison: evaluates code as SBCL's own REPL does, and prints the result in the layout of
;;;; evaluate-lisp's answers.
;;;;
;;;; Standard input has Lisp strings, each the code of one call. Each answer ends with a line that has only the character
;;;; US. The code's output goes to two files that environment variables name. After loading, (differential::serve)
;;;; starts the loop.

(require "SB-POSIX")
(require "SB-BSD-SOCKETS")

(defpackage "DIFFERENTIAL"
  (:use "COMMON-LISP"))
(in-package "DIFFERENTIAL")

(defvar *protocol-in* (sb-sys:make-fd-stream 0 :input t :buffering :full :external-format :utf-8))
(defvar *protocol-out* (sb-sys:make-fd-stream 1 :output t :buffering :full
                                                  :external-format '(:utf-8 :replacement #\ufffd)))

(defvar *warnings* '()
  "The warnings of this call, newest first: conses of a condition and its line in the answer.")
(defvar *error* nil
  "The text of the last error of this call that reached the debugger, or NIL.")
(defvar *on-debugger* nil
  "The function to call instead of the debugger while values and messages are printed, or NIL.")

;;; Streams: like SBCL's own, on other descriptors

(defun open-capture (variable name)
  "Return a stream like SBCL's own standard output, called NAME, that appends to the file named by the environment
  variable VARIABLE, and the name of this file."
  (let* ((file (sb-posix:getenv variable))
         (fd (sb-posix:open file (logior sb-posix:o-wronly sb-posix:o-creat sb-posix:o-append) #o600)))
    (values (sb-sys:make-fd-stream fd :name name :output t :buffering :line :element-type :default
                                      :external-format '(:utf-8 :replacement #\ufffd))
            file)))

(defun captured (stream file)
  "Return the text that STREAM has written to FILE, and truncate FILE."
  (when (open-stream-p stream)
    (finish-output stream))
  (prog1 (with-open-file (in file :external-format '(:utf-8 :replacement #\ufffd))
           (let* ((text (make-string (file-length in)))
                  (end (read-sequence text in)))
             (subseq text 0 end)))
    (sb-posix:truncate file 0)
    (setf (sb-impl::fd-stream-output-column stream) 0)))

;;; Printing, by the same rules as the server

(defun call-guarded (function failure)
  "Return the value of FUNCTION, or of FAILURE called with the serious condition that ended it."
  (let ((condition (block guard
                     (let ((*on-debugger* (lambda (condition) (return-from guard condition))))
                       (handler-bind ((serious-condition (lambda (condition) (return-from guard condition)))
                                      (warning #'muffle-warning))
                         (return-from call-guarded (funcall function)))))))
    (funcall failure condition)))

(defmacro with-server-syntax (&body body)
  "Evaluate BODY under the printer variables for messages. *PACKAGE* stays as it is."
  `(let ((package (if (package-name *package*) *package* (find-package "CL-USER"))))
     (with-standard-io-syntax
       (let ((*package* package) (*print-readably* nil) (*print-length* 1000) (*print-level* 50)
             (*print-pretty* nil) (*print-escape* nil) (sb-ext:*suppress-print-errors* nil)
             (sb-int:*print-condition-references* nil))
         ,@body))))

(defun type-name-text (object)
  "Return the name of OBJECT's class as printed in CL-USER."
  (with-server-syntax
    (let ((*package* (find-package "CL-USER")))
      (prin1-to-string (class-name (class-of object))))))

(defun report-text (condition)
  "Return the report of CONDITION."
  (let* ((text (with-output-to-string (stream)
                 (call-guarded
                  (lambda () (with-server-syntax (princ condition stream)))
                  (lambda (failure)
                    (format stream "(the condition's report failed: ~A)" (type-name-text failure))))))
         (end (length text)))
    (cond ((zerop end) "(no message)")
          ((char= (char text (1- end)) #\Newline) (subseq text 0 (1- end)))
          (t text))))

(defun restart-text (restart)
  "Return RESTART as describe-last-error shows it, without a description if printing that fails."
  (format nil "~A - ~A" (restart-name restart)
          (call-guarded (lambda () (with-server-syntax (princ-to-string restart))) (constantly ""))))

(defun value-text (value)
  "Return VALUE as an answer prints it."
  (let ((*print-readably* nil)
        (*print-escape* t)
        (*print-length* (or *print-length* 100))
        (*print-level* (or *print-level* 10))
        (*print-circle* (not (typep value '(or number symbol character string pathname package function))))
        (sb-ext:*suppress-print-errors* nil))
    (call-guarded (lambda () (write-to-string value))
                  (lambda (condition)
                    (declare (ignore condition))
                    (format nil "#<unprintable ~A>" (type-name-text value))))))

;;; Conditions

(defun push-warning (type condition)
  (unless (member condition *warnings* :key #'first)
    (push (cons condition (format nil "~A: ~A" type (report-text condition))) *warnings*)))

(defun compiling-p ()
  ;; Since SBCL 2.6.5, COMPILE and EVAL bind *COMPILER-ERROR-BAILOUT* only while they convert a form.
  (or (boundp 'sb-c::*compiler-error-bailout*) (boundp 'sb-c:*compilation*)))

(defvar *warn-texts* '()
  "The texts that WARN prints to standard error in this call, which the server's answers leave out.")

(defvar *undefined* '()
  "The warnings about undefined names in the forms of this call, like *WARNINGS*.")

(defvar *eval* #'eval
  "The original function EVAL, without the encapsulation below.")

(defvar *called* nil
  "True inside a compiling function that the code calls; its warnings are recorded as bare SBCL signals them.")

(defvar *compiling-form* nil
  "True while SBCL compiles a top-level form of the code itself.")

(dolist (function '(eval compile compile-file load))
  (sb-int:encapsulate function 'differential
                      (lambda (function &rest arguments)
                        (let ((*called* t))
                          (apply function arguments)))))

(sb-int:encapsulate 'sb-c:compile-in-lexenv 'differential
                    (lambda (function &rest arguments)
                      (let ((*compiling-form* (not *called*)))
                        (apply function arguments))))

;;; Since SBCL 2.6.5, EVAL calls the code that it has compiled inside the compiler. If that code signals a
;;; COMPILED-PROGRAM-ERROR, EVAL unwinds and signals another error. The server compiles the form first, as EVAL of SBCL 2.6.4
;;; does (DEFINE-EVAL-PATCH in lisp/core/compatibility.lisp), so bare SBCL has to do the same here.
(let ((name (find-symbol "EVAL-WITH-COMPILE-IN-LEXENV" "SB-C")))
  (when name
    (sb-int:encapsulate name 'differential
                        (lambda (eval form lexenv source-info toplevel-form-number ephemeral)
                          (declare (ignore eval))
                          (let ((lambda `(lambda () ,(if (typep form '(cons (eql declare))) `(progn ,form) form))))
                            (funcall
                             (handler-bind ((sb-ext:compiler-note #'muffle-warning))
                               (let ((sb-c::*source-form-context-alist*
                                       (acons lambda sb-impl::*eval-source-context* sb-c::*source-form-context-alist*)))
                                 (sb-c:compile-in-lexenv lambda lexenv nil source-info toplevel-form-number ephemeral
                                                         nil)))))))))

(defun undefined-kind-and-name (condition)
  "If CONDITION warns about an undefined name, return :FUNCTION, :VARIABLE or :TYPE and the name, else NIL."
  ;; "undefined function: FOO": SUMMARIZE-COMPILATION-UNIT in src/compiler/main.lisp.
  (when (and (typep condition 'simple-condition)
             (eql 0 (search "undefined " (report-text condition))))
    (values-list (simple-condition-format-arguments condition))))

(defun defined-by-now-p (condition)
  "True if CONDITION warns about a function or type that the same call has defined since."
  (multiple-value-bind (kind name) (undefined-kind-and-name condition)
    (case kind
      (:function (fboundp name))
      (:type (sb-int:info :type :kind name)))))

(defun note-warning (condition)
  "Record a warning without handling it. A call is one compilation unit, so warnings about undefined names come at its end."
  (cond ((or (typep condition sb-ext:*muffled-warnings*)
             (typep condition 'sb-kernel:redefinition-warning)))
        ((and *compiling-form* (undefined-kind-and-name condition))
         (let ((*warnings* *undefined*))
           (push-warning (type-name-text condition) condition)
           (setf *undefined* *warnings*)))
        (t (push-warning (type-name-text condition) condition)))
  (let ((stream *error-output*))
    (loop while (typep stream 'synonym-stream)
          do (setf stream (symbol-value (synonym-stream-symbol stream))))
    (when (and (eq stream sb-sys:*stderr*) (not (compiling-p)))
      (dolist (class '(warning style-warning))
        ;; The same format as in WARN, src/code/warm-error.lisp.
        (call-guarded (lambda () (push (format nil "~@<~S: ~3i~:_~A~:>~%" class condition) *warn-texts*))
                      #'identity)))))

(defun without-warn-texts (text)
  "Return TEXT, the output to standard error, without the text that WARN printed."
  (dolist (said *warn-texts* text)
    (let ((start (search said text)))
      (when start
        (setf text (concatenate 'string (subseq text 0 start) (subseq text (+ start (length said)))))))))

(defun note-compiler-error (condition)
  "Record an error that the compiler turns into a run-time error."
  (when (compiling-p)
    (let ((original (sb-int:encapsulated-condition condition)))
      (push-warning "COMPILE-TIME-ERROR" original))))

(defun note-error (condition restarts)
  "Record CONDITION as the error of the call, with its available RESTARTS."
  (setf *error* (format nil "[ERROR] ~A~%~A~%~%[Restarts]~{~%~A~}"
                        (type-name-text condition) (report-text condition) (mapcar #'restart-text restarts))))

(defvar *answering* nil
  "True while a call's code runs.")

;;; The function in which SBCL would enter its interactive debugger, after the user's hooks.
(sb-int:encapsulate
 'sb-debug::%invoke-debugger 'differential
 (lambda (function condition)
   (declare (ignore function))
   (cond (*on-debugger* (funcall *on-debugger* condition))
         (*answering*
          (note-error condition (compute-restarts condition))
          (throw 'top-level nil))
         ;; An error in this file: exit, because the other side waits for an answer.
         (t (format sb-sys:*stderr* "~A~%" condition)
            (sb-ext:exit :code 70 :abort t)))))

;;; Calls

(defun evaluate-next-form (stream)
  "Read a form from STREAM and evaluate it. Return a list of its values and true, or NIL and NIL at the end."
  (let ((form stream))
    (loop
      (block again
        (restart-case
            (progn
              (when (eq form stream)
                (setf form (read stream nil stream)))
              (return (if (eq form stream)
                          (values '() nil)
                          (values (multiple-value-list (sb-impl::interactive-eval form :eval *eval*)) t))))
          (retry () :report "Evaluate this form again."
            (return-from again))
          (abort () :report "Return to top level."
            (setf *error* "[ERROR] ABORTED")
            (throw 'top-level nil)))))))

(defun evaluate-forms (code)
  "Read and evaluate the forms of CODE one by one, and return a list of the last form's values."
  (let ((stream (make-string-input-stream code))
        (result '()))
    (loop
      (multiple-value-bind (values more) (evaluate-next-form stream)
        (unless more
          (return result))
        (setf result values)))))

(defun answer (code)
  "Return the answer to a call with CODE."
  (let* ((*warnings* '())
         (*undefined* '())
         (*called* nil)
         (*error* nil)
         ;; Hides the restarts of SBCL's own top level.
         (sb-kernel:*restart-clusters* '())
         (*answering* t)
         (values '()))
    (handler-bind ((warning #'note-warning)
                   (sb-c:compiler-error #'note-compiler-error))
      (catch 'top-level
        (setf values (evaluate-forms code))))
    ;; The server falls back to CL-USER in the same way.
    (unless (package-name *package*)
      (setf *package* (find-package "CL-USER")))
    (values (mapcar #'value-text values)
            (mapcar #'cdr (append (reverse *warnings*)
                                  (remove-if #'defined-by-now-p (reverse *undefined*) :key #'car)))
            *error*)))

(defun serve ()
  "Answer calls until the input ends."
  (multiple-value-bind (out out-file) (open-capture "DIFFERENTIAL_STDOUT" "standard output")
    (multiple-value-bind (err err-file) (open-capture "DIFFERENTIAL_STDERR" "standard error")
      (let ((in (sb-sys:make-fd-stream (sb-posix:open "/dev/null" sb-posix:o-rdonly) :name "standard input" :input t
                                       :buffering :line :element-type :default :serve-events t)))
        (setf sb-sys:*stdin* in
              sb-sys:*stdout* out
              sb-sys:*stderr* err
              sb-sys:*tty* (make-two-way-stream in out)
              *trace-output* (make-synonym-stream 'sb-sys:*stderr*)
              ;; The server's output does not include the compiler's progress.
              *compile-verbose* nil
              *package* (find-package "CL-USER")))
      (loop
        (let ((code (with-standard-io-syntax (read *protocol-in* nil nil))))
          (unless code
            (return))
          (setf *warn-texts* '())
          (multiple-value-bind (values warnings error) (answer code)
            (let ((stdout (captured out out-file))
                  (stderr (without-warn-texts (captured err err-file))))
              (with-standard-io-syntax
                (flet ((section (name text)
                         (unless (string= text "")
                           (format *protocol-out* "[~A]~%~A~:[~%~;~]~%" name text
                                   (char= (char text (1- (length text))) #\Newline)))))
                  (section "stdout" stdout)
                  (section "stderr" stderr)
                  (section "warnings" (format nil "~{~A~^~%~}" warnings))
                  (cond (error (write-string error *protocol-out*))
                        (values (format *protocol-out* "~{=> ~A~^~%~}" values))
                        (t (write-string "; No values" *protocol-out*)))
                  (format *protocol-out* "~%~C~%" (code-char 31))
                  (finish-output *protocol-out*))))))))))
