;;;; Tests of the Lisp side alone: a host that is written in Lisp records the events of a job. They need a stock SBCL of
;;;; the pinned version and nothing else: (asdf:test-system "sbcl-host").

(in-package "SBCL-HOST")

(defvar *events* '()
  "The events of the job that runs, newest first: lists of kind, number and text.")

(sb-alien:define-alien-callable recorded-event (signed 32)
    ((job (unsigned 64)) (kind (unsigned 32)) (number (signed 64)) (text system-area-pointer) (length (unsigned 64)))
  (declare (ignore job))
  (push (list kind number (copy-text (sap-int text) length)) *events*)
  0)

(defun perform (kind text &key (name "") (flags 0) (argument 0))
  "Do a job of this KIND as a lane does, and return its events, oldest first, and whether it succeeded."
  (let ((*events* '())
        (job (make-job :id 1 :kind kind :flags flags :argument argument
                       :text (coerce text 'text) :name (coerce name 'text))))
    (let ((success (do-job job)))
      (values (reverse *events*) success))))

(defun texts (kind events)
  "Return the texts of those EVENTS that are of KIND, an event code; what is pushed in pieces is one."
  (loop for (code nil text) in events
        when (eql code kind)
          collect text))

(defun evaluation-of (code &rest options)
  "Return a plist of what evaluating CODE comes to: the values, the error, stdout, stderr and the warnings, as text."
  (multiple-value-bind (events success) (apply #'perform :evaluate code options)
    (list :success success
          :value (format nil "~{~A~}" (texts (event-code :value-text) events))
          :error (first (last (texts (event-code :error) events)))
          :message (format nil "~{~A~}" (texts (event-code :error-text) events))
          :stdout (format nil "~{~A~}" (texts (event-code :stdout) events))
          :stderr (format nil "~{~A~}" (texts (event-code :stderr) events))
          :warnings (texts (event-code :warning-text) events)
          :defined (length (texts (event-code :defined) events)))))

(defvar *tests* '()
  "The tests, newest first: lists of a name and a function that signals an error when it fails.")

(defmacro define-test (name &body body)
  "Have RUN-TESTS evaluate BODY, which signals an error when what NAME says does not hold."
  `(push (list ',name (lambda () ,@body)) *tests*))

(defun expect (expected actual)
  "Signal an error unless EXPECTED and ACTUAL are EQUAL."
  (unless (equal expected actual)
    (error "expected ~S, got ~S" expected actual)))

(define-test a-value-is-pushed
  (expect "3" (getf (evaluation-of "(+ 1 2)") :value)))

(define-test output-keeps-its-stream
  (let ((result (evaluation-of "(progn (princ :out) (princ :err *error-output*) (terpri) 1)")))
    (expect (format nil "OUT~%") (getf result :stdout))
    (expect "ERR" (getf result :stderr))))

(define-test an-error-fails-the-evaluation
  (let ((result (evaluation-of "(error \"boom ~A\" 1)")))
    (expect nil (getf result :success))
    (expect "SIMPLE-ERROR" (getf result :error))
    (expect "boom 1" (getf result :message))))

(define-test a-cleanup-form-does-not-undo-it
  (expect nil (getf (evaluation-of "(block nil (unwind-protect (error \"x\") (return)))") :success)))

(define-test warnings-are-recorded-once
  (expect '("The variable X is defined but never used.")
          (getf (evaluation-of "(defun unused-parameter (x) 1)") :warnings)))

(define-test the-compilers-verdict-is-its-own
  (expect "(T T)" (getf (evaluation-of "(rest (multiple-value-list (compile nil '(lambda () (car 1 2)))))") :value)))

(define-test what-defines-is-told
  (expect 1 (getf (evaluation-of "(+ 1 2) (defun defined-by-test () 1)") :defined))
  (expect 0 (getf (evaluation-of "(defined-by-test)") :defined)))

(define-test an-unknown-package-is-an-error
  (expect "SB-KERNEL:SIMPLE-PACKAGE-ERROR" (getf (evaluation-of "1" :name "NO-SUCH-PACKAGE") :error)))

(define-test a-kept-stream-prints-into-the-evaluation-that-uses-it
  (evaluation-of "(defvar *kept-stream* *standard-output*)")
  (expect "kept" (getf (evaluation-of "(write-string \"kept\" *kept-stream*)") :stdout)))

(define-test a-timeout-in-the-code-is-told
  (let ((result (evaluation-of "(sb-ext:with-timeout 0.01 (loop))")))
    (expect nil (getf result :success))
    (expect "SB-EXT:TIMEOUT" (getf result :error))))

(defun run-tests ()
  "Run all tests, print those that fail and how many there were, and return true when none did."
  (check-assumptions)
  (install-patches)
  (install-standard-streams)
  (setf **event** (sap-int (alien-sap (alien-callable-function 'recorded-event))))
  (let ((failed 0)
        (tests (reverse *tests*))
        (*output* (make-output))
        (terminal (sb-sys:make-fd-stream 1 :output t :buffering :line)))
    (loop for (name function) in tests
          do (handler-case (funcall function)
               (error (condition)
                 (incf failed)
                 (format terminal "~&FAILED ~(~A~): ~A~%" name condition))))
    (format terminal "~&~D passed, ~D failed~%" (- (length tests) failed) failed)
    (zerop failed)))
