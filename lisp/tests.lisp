;;;; Tests of the Lisp side alone, without the Rust host: Lisp code takes the host's place and records the events of a
;;;; job. The tests need only a stock SBCL of the pinned version: (asdf:test-system "sbcl-host").

(defpackage "SBCL-HOST/TESTS"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING" "SBCL-HOST/DEBUGGER" "SBCL-HOST/TOOLS"
        "SBCL-HOST/TESTING")
  (:import-from "SB-INT" "ENCAPSULATE")
  (:import-from "SBCL-HOST" "**THREAD-VARIABLES**" "*ASSUMPTIONS*" "*JOB-KINDS*" "*UNDO-QUERY*" "ASSUMPTION-PROBLEM"
                 "CALL-WITH-THREAD-VARIABLES" "CHECK-ASSUMPTIONS" "CHECK-FORK-RESULT" "CHILD-OBSTACLE" "GUARD-STACK-ENDS"
                 "INSTALL-PATCHES" "MAKE-JOB" "READ-NO-OCTETS" "REMOVE-PATCHES" "RUN-QUERY" "TAKE-BUFFER" "THREAD-VARIABLES")
  (:import-from "SBCL-HOST/EMBEDDING" "*MESSAGE-BUFFER*" "**PROGRAM-CALL-ADDRESS**" "+MAX-MESSAGE-WORDS+"
                 "ACQUIRE-MESSAGE-BUFFER" "BEGIN-MESSAGE" "BUFFER-CAPACITY" "CALL-PROGRAM" "CALL-WITH-REPLACEMENT"
                 "FINISH-MESSAGE" "HANDLE-OBJECT" "MAKE-HANDLE" "MESSAGE-TOO-LARGE" "PERFORM-PROGRAM-CALL" "PUT-HANDLE"
                 "PUT-WORD" "READ-PENDING-EXIT" "RELEASE-HANDLES" "RELEASE-MESSAGE-BUFFER" "RESERVE-WORDS"
                 "RESIZE-MESSAGE-BUFFER" "RETURN-MESSAGE-BUFFER" "RUN-AND-REPORT-JOB" "START-LANE" "TAG-NUMBER"
                 "TOKEN-WORD" "WITH-HANDLE-TABLE")
  (:import-from "SBCL-HOST/TESTING" "MAKE-TEST-RUN" "MAKE-VERDICT" "TEST-LIMIT")
  (:import-from "SBCL-HOST/TOOLS" "METHOD-CODE"))

(in-package "SBCL-HOST/TESTS")

(defvar *events* '()
  "The events of the running job, newest first: lists of kind, number and text.")

(sb-alien:define-alien-callable record-event (signed 32)
    ((job (unsigned 64)) (kind (unsigned 32)) (number (signed 64)) (text system-area-pointer) (length (unsigned 64)))
  (push (list kind number (copy-text (sap-int text) length)) *events*)
  0)

(defun perform (kind text &key (name "") (flags 0) (operation "") (audience :agent))
  "Perform a job of KIND with TEXT in a new thread, as a thread of a lane would perform it. Return the job's events, oldest
first."
  (let ((job (make-job :id 1 :kind kind :flags flags :audience audience
                       :text (coerce text 'text) :name (coerce name 'text) :operation (coerce operation 'text))))
    (sb-thread:join-thread
     (sb-thread:make-thread (lambda ()
                              (let ((*events* '())
                                    (*thread-output* (make-thread-output)))
                                (without-interrupts
                                  (allow-with-interrupts
                                    (run-and-report-job job)))
                                (reverse *events*)))))))

(defun event-texts (kind events)
  "Return the texts of the events in EVENTS whose kind is KIND, an event code."
  (loop for (code nil text) in events
        when (eql code kind)
          collect text))

(defun evaluation-results (code &rest options)
  "Return a plist of the results of evaluating CODE: the success, value, error, message, standard output and error
output as text, the warnings, and the number of forms that defined something. OPTIONS are further arguments for PERFORM."
  (let ((events (apply #'perform :evaluate code options)))
    (flet ((text (kind) (format nil "~{~A~}" (event-texts kind events))))
      (list :success (equal '(0) (loop for (kind number) in events
                                       when (eql kind (event-code :done)) collect number))
            :value (text (event-code :value-text))
            :error (first (last (event-texts (event-code :error) events)))
            :message (text (event-code :error-text))
            :stdout (text (event-code :stdout))
            :stderr (text (event-code :stderr))
            :warnings (event-texts (event-code :warning-text) events)
            :defined (length (event-texts (event-code :defined) events))))))

(defvar *tests* '()
  "The tests, newest first: lists of a name and a function that signals an error if the test fails.")

(defmacro define-test (name &body body)
  "Define a test for RUN-TESTS. BODY signals an error unless the behaviour that NAME states holds."
  `(push (list ',name (lambda () ,@body)) *tests*))

(defun expect (expected actual)
  "Signal an error unless EXPECTED and ACTUAL are EQUAL."
  (unless (equal expected actual)
    (error "expected ~S, got ~S" expected actual)))

(defun reported-changes (code)
  "Return the lines that tell the host what was changed by the last form in CODE that defined something."
  (let ((text (first (last (event-texts (event-code :defined) (perform :evaluate code))))))
    (rest (uiop:split-string (subseq text 0 (search (format nil "~%@") text)) :separator '(#\Newline)))))

(define-test a-form-is-reported-with-what-it-defines-and-removes
  (expect '("=defun" "+FUNCTION COMMON-LISP-USER::CHANGED") (reported-changes "(defun changed (x) `(1 ,x))"))
  (expect '("=defun" "+FUNCTION (COMMON-LISP:SETF COMMON-LISP-USER::CHANGED)")
          (reported-changes "(defun (setf changed) (x) x)"))
  (expect '("=other" "+MACRO COMMON-LISP-USER::CHANGED-MACRO") (reported-changes "(defmacro changed-macro () 1)"))
  (expect '("=other" "+FUNCTION COMMON-LISP-USER::|a b|" "+VARIABLE COMMON-LISP-USER::*CHANGED*")
          (reported-changes "(progn (defun |a
b| ()) (defvar *changed* 1))"))
  (expect '("=other" "-FUNCTION COMMON-LISP-USER::CHANGED" "-MACRO COMMON-LISP-USER::CHANGED"
            "-METHOD COMMON-LISP-USER::CHANGED")
          (reported-changes "(fmakunbound 'changed)"))
  (expect '("=other" "+PACKAGE CHANGED-PACKAGE") (reported-changes "(defpackage :changed-package (:use :cl))"))
  (expect '("=other" "-PACKAGE CHANGED-PACKAGE" "+PACKAGE RENAMED-PACKAGE")
          (reported-changes "(rename-package :changed-package :renamed-package)"))
  (expect '("=in-package") (reported-changes "(in-package :renamed-package)"))
  (expect '("=other" "-PACKAGE RENAMED-PACKAGE")
          (reported-changes "(in-package :cl-user) (delete-package :renamed-package)"))
  (expect '("=other" "-FUNCTION COMMON-LISP-USER::CHANGED" "-MACRO COMMON-LISP-USER::CHANGED"
            "-METHOD COMMON-LISP-USER::CHANGED" "-SYMBOL-MACRO COMMON-LISP-USER::CHANGED"
            "-COMPILER-MACRO COMMON-LISP-USER::CHANGED" "-VARIABLE COMMON-LISP-USER::CHANGED"
            "-CLASS COMMON-LISP-USER::CHANGED" "-TYPE COMMON-LISP-USER::CHANGED"
            "-SETF-EXPANDER COMMON-LISP-USER::CHANGED" "-METHOD-COMBINATION COMMON-LISP-USER::CHANGED")
          (reported-changes "(unintern 'changed)")))

(define-test a-class-or-compiler-macro-that-is-set-to-nil-is-reported-as-removed
  (reported-changes "(defclass changed-class () ()) (define-compiler-macro changed-function (x) x)")
  (expect '("=other" "-CLASS COMMON-LISP-USER::CHANGED-CLASS")
          (reported-changes "(setf (find-class 'changed-class) nil)"))
  (expect '("=other" "-COMPILER-MACRO COMMON-LISP-USER::CHANGED-FUNCTION")
          (reported-changes "(setf (compiler-macro-function 'changed-function) nil)")))

(define-test methods-and-each-kind-of-macro-are-reported-as-such
  (reported-changes "(defgeneric changed-generic (x))")
  (let ((changes (reported-changes "(defmethod changed-generic ((x string)) x)")))
    (expect "=defmethod" (first changes))
    (expect '("*METHOD COMMON-LISP-USER::CHANGED-GENERIC")
            (remove-if-not (lambda (change) (eql #\* (char change 0))) changes)))
  (expect '("=other" "+SYMBOL-MACRO COMMON-LISP-USER::CHANGED-SYMBOL")
          (reported-changes "(define-symbol-macro changed-symbol 1)"))
  (expect '("=other" "+COMPILER-MACRO COMMON-LISP-USER::CHANGED-GENERIC")
          (reported-changes "(define-compiler-macro changed-generic (x) x)"))
  (expect '("=other" "+SETF-EXPANDER COMMON-LISP-USER::CHANGED-PLACE")
          (reported-changes "(defsetf changed-place set-changed-place)"))
  (expect '("=other" "+METHOD-COMBINATION COMMON-LISP-USER::CHANGED-COMBINATION")
          (reported-changes "(define-method-combination changed-combination :operator list)")))

(define-test a-form-with-too-many-changes-is-reported-without-names
  (expect '("=other") (reported-changes (format nil "(progn ~{(defun changed-~D ())~})" (loop for i below 60 collect i))))
  (expect 1000 (length (second (reported-changes (format nil "(defun ~A ())" (make-string 5000 :initial-element #\x)))))))

(define-test a-defun-that-runs-code-at-load-time-is-not-a-plain-function
  (dolist (body '("(load-time-value 1)" "(macrolet ((m () 1)) (m))" "#.(+ 1 2)" "\"#.\""))
    (expect "=other" (first (reported-changes (format nil "(defun changed () ~A)" body))))))

(define-test a-form-is-reported-with-the-modules-that-its-symbols-need
  (expect '("=defun" "+FUNCTION COMMON-LISP-USER::CHANGED" "?sb-posix" "?asdf")
          (reported-changes "(defun changed () `(,(uiop:getcwd) ,(sb-posix:getpid) asdf:load-system))"))
  (expect '("=other" "+VARIABLE COMMON-LISP-USER::*CHANGED*") (reported-changes "(defvar *changed* '#1=(a . #1#))")))

(define-test evaluating-a-form-pushes-its-value
  (expect "3" (getf (evaluation-results "(+ 1 2)") :value)))

(define-test a-text-of-exactly-the-limit-has-no-ellipsis
  (expect '("(1 2)" "(1 2…") (list (bounded-prin1-text '(1 2) 5) (bounded-prin1-text '(1 2) 4)))
  (flet ((bounded (limit)
           (multiple-value-list (bounded-text limit (lambda (stream) (write-string "text" stream))))))
    (expect '(("text" nil) ("tex" :enough)) (list (bounded 4) (bounded 3)))))

(define-test a-huge-integer-is-printed-in-full-or-as-its-size
  (let ((huge (1- (ash 1 200000))))
    (expect '("#<positive integer of 200000 bits>" "#<negative integer of 200000 bits>")
            (list (bounded-prin1-text huge 1000) (bounded-prin1-text (- huge) 1000)))
    (expect 60206 (length (bounded-prin1-text huge 60206))))
  (expect "1000…" (bounded-prin1-text (expt 10 1000) 4)))

(defstruct endless-object
  "An object whose print method does not end.")

(defmethod print-object ((object endless-object) stream)
  (write-string "begun" stream)
  (loop (sleep 0.01)))

(define-test values-that-take-too-long-to-print-leave-time-for-the-next-value
  (with-value-time-limits ()
    (loop repeat 3
          do (expect "#<unprintable SBCL-HOST/TESTS::ENDLESS-OBJECT: printing took too long>"
                     (bounded-prin1-text (make-endless-object) 100)))
    (expect "(1 2)" (bounded-prin1-text '(1 2) 100))
    (expect "(#<unprintable SBCL-HOST/TESTS::ENDLESS-OBJECT: printing took too long>"
            (bounded-text 100 (lambda (stream)
                                (write-char #\( stream)
                                (print-argument (make-endless-object) stream))))))

(define-test a-time-limit-does-not-end-the-unwinding-of-an-abandoned-evaluation
  (let ((continued nil))
    (call-until-abandoned
     (lambda ()
       (call-with-time-limit 0.01
                             (lambda ()
                               (unwind-protect (abandon-evaluation :interrupted nil)
                                 ;; This timeout comes after the time limit.
                                 (handler-case (sb-ext:with-timeout 0.1 (loop))
                                   (sb-ext:timeout () nil)))))
       (setf continued t)))
    (expect nil continued)))

(define-test a-text-of-very-many-parts-is-returned-whole
  (multiple-value-bind (text result)
      (bounded-text 1000000 (lambda (stream)
                              (loop repeat 200000
                                    do (write-char #\x stream)
                                       (finish-output stream))))
    (expect '(200000 nil) (list (length text) result))))

(define-test threads-do-not-share-a-buffer-that-a-foreign-thread-has-used
  ;; A foreign thread, like this thread, does not bind the variables in **THREAD-VARIABLES**.
  (bounded-text 10 (lambda (stream) (write-string "text" stream)))
  (let ((before **thread-variables**))
    (setf **thread-variables** (thread-variables))
    (unwind-protect
         (flet ((buffer ()
                  (sb-thread:join-thread
                   (sb-thread:make-thread #'call-with-thread-variables :arguments (list #'take-buffer)))))
           (expect nil (eq (buffer) (buffer))))
      (setf **thread-variables** before))))

(define-test standard-output-and-error-output-are-reported-separately
  (let ((result (evaluation-results "(progn (princ :out) (princ :err *error-output*) (terpri) 1)")))
    (expect (format nil "OUT~%") (getf result :stdout))
    (expect "ERR" (getf result :stderr))))

(define-test an-error-fails-the-evaluation
  (let ((result (evaluation-results "(error \"boom ~A\" 1)")))
    (expect nil (getf result :success))
    (expect "SIMPLE-ERROR" (getf result :error))
    (expect "boom 1" (getf result :message))))

(define-test a-refused-exit-names-the-reset-command-of-its-audience
  (flet ((message (audience)
           (getf (evaluation-results "(error 'sbcl-host::exit-refused :operator 'exit :embedded nil)" :audience audience)
                 :message)))
    (expect (list "EXIT was called, but the server and the session continue. For a new session, use the tool reset-session."
                  "EXIT was called, but cannot end the process."
                  "EXIT was called, but cannot end the process."
                  (format nil "EXIT was called, but the server and the session continue. To leave the REPL, use :quit. ~
                               For a new session, use :reset."))
            (mapcar #'message '(:agent :shell :attached-shell :repl)))))

(define-test a-non-local-exit-from-a-cleanup-form-does-not-hide-the-error
  (expect nil (getf (evaluation-results "(block nil (unwind-protect (error \"x\") (return)))") :success)))

(define-test warnings-are-recorded-once
  (expect '("The variable X is defined but never used.")
          (getf (evaluation-results "(defun unused-parameter (x) 1)") :warnings)))

(define-test a-test-that-never-ends-gets-less-time-than-others
  (flet ((limit (milliseconds title)
           (test-limit (make-test-run :limit milliseconds :endless '("spins")) (make-verdict :title title))))
    (expect '(10000 60000 500) (list (limit 60000 "spins") (limit 60000 "returns") (limit 500 "spins")))))

(define-test compile-returns-its-own-warning-and-failure-flags
  (expect "(T T)" (getf (evaluation-results "(rest (multiple-value-list (compile nil '(lambda () (car 1 2)))))") :value)))

(define-test only-defining-forms-are-reported
  (expect 1 (getf (evaluation-results "(+ 1 2) (defun defined-by-test () 1)") :defined))
  (expect 0 (getf (evaluation-results "(defined-by-test)") :defined)))

(define-test an-unknown-package-is-an-error
  (expect "SB-KERNEL:SIMPLE-PACKAGE-ERROR" (getf (evaluation-results "1" :name "NO-SUCH-PACKAGE") :error)))

(define-test a-kept-stream-prints-into-the-evaluation-that-uses-it
  (evaluation-results "(defvar *kept-stream* *standard-output*)")
  (expect "kept" (getf (evaluation-results "(write-string \"kept\" *kept-stream*)") :stdout)))

(define-test a-timeout-in-the-code-fails-the-evaluation
  (let ((result (evaluation-results "(sb-ext:with-timeout 0.01 (loop))")))
    (expect nil (getf result :success))
    (expect "TIMEOUT" (getf result :error))))

(define-test a-query-that-is-interrupted-after-its-last-record-is-undone
  (let ((undone nil))
    (define-query :undoable (&key)
      "Do nothing."
      (setf *undo-query* (lambda () (setf undone t))))
    (perform :query "" :operation "(:undoable)")
    (expect nil undone)
    (encapsulate 'run-query 'interrupt (lambda (run text)
                                         (funcall (the function run) text)
                                         (abandon-evaluation :interrupted nil)))
    (unwind-protect (perform :query "" :operation "(:undoable)")
      (sb-int:unencapsulate 'run-query 'interrupt))
    (expect t undone)))

(define-test find-references-visits-each-method-of-a-generic-function-once
  (perform :evaluate "(defun counted (x) x)
                      (defgeneric counting (x))
                      (defmethod counting ((x integer)) (counted x))
                      (defmethod counting ((x string)) (counted x))
                      (defmethod counting ((x symbol)) (counted x))")
  (let ((visits 0))
    (encapsulate 'method-code 'count (lambda (code method)
                                       (incf visits)
                                       (funcall (the function code) method)))
    (unwind-protect
         (perform :query "" :operation "(:find-references :name \"COUNTED\" :package \"COMMON-LISP-USER\"
                                                          :relation \"callers\" :limit 10)")
      (sb-int:unencapsulate 'method-code 'count))
    (expect 3 visits)))

(define-test a-pending-interruption-that-ends-a-fork-is-named-in-the-error
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (unwind-protect
         (without-interrupts
           (sb-thread:join-thread (sb-thread:make-thread #'sb-thread:interrupt-thread
                                                         :arguments (list sb-thread:*current-thread* #'list)))
           (loop until *interrupt-pending*)
           ;; Nothing is written to the pipe, as by a child that is not ready yet.
           (expect :interruption (child-obstacle in (sb-posix:getpid))))
      (sb-unix:unix-close in)
      (sb-unix:unix-close out)))
  (let ((message (handler-case (check-fork-result nil :interruption 10)
                   (error (failure) (princ-to-string failure)))))
    (expect t (and (search "the last by an interruption of the thread that saves" message) t))))

;;; The assumptions about SBCL: each test violates one assumption, and passes if the check detects the violation

(defun named-assumption-problem (beginning)
  "Check the assumption whose name begins with BEGINNING. Return NIL if the assumption holds, or a string that describes the
problem."
  (loop for (name holds-p) in *assumptions*
        when (eql 0 (search beginning name))
          return (assumption-problem name holds-p)
        finally (error "no assumption ~S" beginning)))

(defun violation-detected-p (beginning function wrapper)
  "Return true when an assumption holds as long as FUNCTION is unchanged, and fails while WRAPPER encapsulates FUNCTION.
BEGINNING is the beginning of the assumption's name."
  (and (null (named-assumption-problem beginning))
       (unwind-protect (progn (encapsulate function 'probe wrapper)
                              (stringp (named-assumption-problem beginning)))
         (sb-int:unencapsulate function 'probe))))

(define-test a-changed-lambda-list-of-byte-readers-is-detected
  ;; The byte readers of SBCL after 2.6.7 have no parameter for a size buffer.
  (expect t (violation-detected-p "the byte reader" 'read-no-octets
                                  (lambda (read stream buffer sizes start count &optional (eof-error-p t))
                                    (declare (type function read) (ignore sizes))
                                    (funcall read stream buffer start count eof-error-p)))))

(define-test mutexes-that-are-not-released-are-detected
  (expect t (violation-detected-p "a mutex" 'sb-thread:grab-mutex
                                  (lambda (grab mutex &key (waitp t) timeout)
                                    (declare (type function grab) (ignore timeout))
                                    (and waitp (funcall grab mutex))))))

;; On arm64, the word that is read instead of the number of values is the address of an instruction: a list of so many values
;; would exhaust the heap.
#+x86-64
(define-test a-changed-stack-layout-of-unwind-is-detected
  (expect t (violation-detected-p "UNWIND" 'read-pending-exit
                                  (lambda (stopped next count start frame)
                                    (declare (type function stopped))
                                    (funcall stopped next (sap+ count 8) (sap+ start 8) frame)))))

(define-test interruptions-that-bypass-the-handler-are-detected
  (expect t (violation-detected-p "an interruption" 'sb-thread:interrupt-thread
                                  (lambda (interrupt thread function)
                                    (declare (ignore interrupt thread))
                                    (funcall (the function function))))))

(define-test a-message-buffer-grows-up-to-the-limit
  (let ((buffer (acquire-message-buffer))
        (octets (* 8 (- +max-message-words+ 9))))
    (flet ((reserve (words)
             (handler-case (progn (reserve-words buffer words) t)
               (message-too-large () nil))))
      (resize-message-buffer buffer (- +max-message-words+ 8))
      ;; The octets are not written, so they take no memory.
      (put-word buffer (token-word (tag-number :octets) octets))
      (expect t (reserve (/ octets 8)))
      (expect t (reserve 1))
      (expect +max-message-words+ (buffer-capacity buffer))
      (expect t (reserve 7))
      (expect nil (reserve 1)))
    (release-message-buffer buffer)))

(defun failing-call-p (name function)
  "Return true when FUNCTION signals an error while the function NAME does nothing but signal an error."
  (encapsulate name 'fail (lambda (&rest arguments) (declare (ignore arguments)) (error "This call fails.")))
  (unwind-protect (handler-case (progn (funcall (the function function)) nil)
                    (error () t))
    (sb-int:unencapsulate name 'fail)))

(define-test a-message-that-fails-releases-no-handle-of-an-earlier-message
  (let ((buffer (acquire-message-buffer))
        (object (list 1)))
    (let ((handle (make-handle object)))
      (begin-message buffer)
      (put-word buffer (token-word (tag-number :handle) handle))
      (finish-message buffer)
      (begin-message buffer)
      (expect t (failing-call-p 'make-handle (lambda () (put-handle buffer (list 2)))))
      (begin-message buffer)
      (expect t (eq object (handle-object handle)))
      (release-handles handle))
    (release-message-buffer buffer)))

(define-test a-handle-is-released-once-although-an-error-ends-the-release
  (let ((buffer (acquire-message-buffer)))
    (begin-message buffer)
    (put-handle buffer (list 1))
    (put-handle buffer (list 2))
    (expect t (failing-call-p 'release-handles (lambda () (begin-message buffer))))
    (let ((released 0))
      (encapsulate 'release-handles 'count (lambda (release &rest handles)
                                             (incf released)
                                             (apply (the function release) handles)))
      (unwind-protect (begin-message buffer)
        (sb-int:unencapsulate 'release-handles 'count))
      (expect 1 released))
    (release-message-buffer buffer)))

(define-test a-thread-no-longer-uses-a-message-buffer-that-it-returns
  (let ((*message-buffer* (acquire-message-buffer))
        (seen :nothing))
    (encapsulate 'release-message-buffer 'look (lambda (release buffer)
                                                 (setf seen (list *message-buffer* *interrupts-enabled*))
                                                 (funcall (the function release) buffer)))
    (unwind-protect (return-message-buffer)
      (sb-int:unencapsulate 'release-message-buffer 'look))
    (expect '(nil nil) seen)))

(define-test a-call-of-the-program-is-interruptible-but-the-return-of-its-message-buffer-is-not
  (let ((*message-buffer* nil)
        (seen '()))
    (encapsulate 'perform-program-call 'look (lambda (perform &rest arguments)
                                               (declare (ignore perform arguments))
                                               (push (list (null *message-buffer*) *interrupts-enabled*) seen)
                                               7))
    (encapsulate 'return-message-buffer 'look (lambda (return)
                                                (push *interrupts-enabled* seen)
                                                (funcall (the function return))))
    (unwind-protect
         (progn
           (setf **program-call-address** 1)
           (expect 7 (call-program 0 (lambda (buffer) (declare (ignore buffer))))))
      (setf **program-call-address** 0)
      (sb-int:unencapsulate 'perform-program-call 'look)
      (sb-int:unencapsulate 'return-message-buffer 'look))
    (expect '(nil (nil t)) seen)))

(define-test a-deadline-does-not-end-the-wait-for-the-handle-table
  (let* ((locked (sb-thread:make-semaphore))
         (holder (sb-thread:make-thread (lambda ()
                                          (with-handle-table ()
                                            (sb-thread:signal-semaphore locked)
                                            (sleep 0.2))))))
    (sb-thread:wait-on-semaphore locked)
    (release-handles (sb-sys:with-deadline (:seconds 0.01) (make-handle (list 1))))
    (sb-thread:join-thread holder)))

(define-test a-thread-of-the-host-that-is-ended-twice-is-replaced
  (let ((replacements 0))
    (flet ((end-twice ()
             (let ((thread sb-thread:*current-thread*))
               (call-with-replacement #'sb-thread:abort-thread (vector thread) 0
                                      (lambda ()
                                        (sb-thread:join-thread
                                         (sb-thread:make-thread #'sb-thread:terminate-thread :arguments (list thread)))
                                        (incf replacements))))))
      (sb-thread:join-thread (sb-thread:make-thread #'end-twice) :default nil))
    (expect 1 replacements)))

(defun make-unstarted-thread ()
  "Return a thread that has not been started."
  (sb-thread::%make-thread "host" nil (sb-thread:make-semaphore)))

(define-test a-thread-of-the-host-that-is-ended-as-it-starts-still-begins-its-work
  (flet ((begins-p (end)
           (let* ((begun nil)
                  (thread (start-host-thread (make-unstarted-thread) (lambda () (setf begun t)) '())))
             (funcall (the function end) thread)
             (sb-thread:join-thread thread :default nil)
             begun)))
    (loop repeat 200
          do (expect t (begins-p (lambda (thread) (ignore-errors (sb-thread:terminate-thread thread))))))
    ;; A new thread calls GUARD-STACK-ENDS first.
    (encapsulate 'guard-stack-ends 'end (lambda (guard)
                                          (funcall (the function guard))
                                          (sb-thread:terminate-thread sb-thread:*current-thread*)))
    (unwind-protect (expect t (begins-p #'identity))
      (sb-int:unencapsulate 'guard-stack-ends 'end))))

(defvar *job-offered* (sb-thread:make-semaphore)
  "The semaphore on which OFFER-JOB waits.")

(defvar *lanes-ended* nil
  "True when OFFER-JOB makes the threads of lanes end.")

(define-alien-callable offer-job (signed 32) ((lane (unsigned 32)) (job system-area-pointer))
  (sb-thread:wait-on-semaphore *job-offered*)
  (setf (sap-ref-64 job (field-offset "sbcl_job" "id")) (1+ lane)
        (sap-ref-32 job (field-offset "sbcl_job" "kind")) (position :look *job-kinds*))
  (if *lanes-ended* 0 1))

(define-test a-lane-is-served-although-each-thread-is-ended-as-it-starts
  (setf **next-job-function-address** (sap-int (alien-sap (alien-callable-function 'offer-job))))
  (encapsulate 'sb-thread::start-thread 'end
               (lambda (start thread function arguments)
                 (funcall (the function start) thread
                          (lambda (&rest arguments)
                            (sb-thread:terminate-thread sb-thread:*current-thread*)
                            (apply (the function function) arguments))
                          arguments)))
  (unwind-protect
       (dolist (lane (list +inspection-lane+ +control-lane+))
         (setf *events* '()
               *lanes-ended* nil)
         (let ((thread (start-lane lane))
               (end (+ (get-internal-real-time) (* 60 internal-time-units-per-second))))
           (sb-thread:signal-semaphore *job-offered*)
           (loop until (or (find (event-code :done) *events* :key #'first) (> (get-internal-real-time) end))
                 do (sleep 0.01))
           (setf *lanes-ended* t)
           (sb-thread:signal-semaphore *job-offered*)
           (sb-thread:join-thread thread :default nil)
           (expect 0 (second (find (event-code :done) *events* :key #'first)))))
    (sb-int:unencapsulate 'sb-thread::start-thread 'end)
    (setf **next-job-function-address** 0)))

(define-test a-thread-of-the-host-is-not-started-while-another-thread-keeps-sbcls-lock
  (let* ((thread (make-unstarted-thread))
         (held (sb-thread:make-semaphore))
         (release (sb-thread:make-semaphore))
         (holder (sb-thread:make-thread (lambda ()
                                          (sb-thread:with-mutex (sb-thread::*make-thread-lock*)
                                            (sb-thread:signal-semaphore held)
                                            (sb-thread:wait-on-semaphore release))))))
    (sb-thread:wait-on-semaphore held)
    (unwind-protect
         (expect "Another thread holds a lock that is needed to start a thread."
                 (handler-case (start-host-thread thread (lambda ()) '())
                   (error (condition) (princ-to-string condition))))
      (sb-thread:signal-semaphore release)
      (sb-thread:join-thread holder))
    (expect nil (find thread (sb-thread::avltree-filter #'sb-thread::avlnode-data sb-thread::*all-threads*)))
    (expect :done (sb-thread:join-thread (start-host-thread (make-unstarted-thread) (lambda () :done) '())))))

(defun spin (x)
  "Loop, but use X."
  (declare (optimize (debug 2)))
  (loop (when (eq x :stop) (return x))))

(defun arguments-of-spin ()
  "Return the arguments of the frame of SPIN in this thread, or NIL."
  (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
        while frame
        do (multiple-value-bind (name arguments) (ignore-errors (sb-debug::frame-call frame))
             (when (eq name 'spin)
               (return arguments)))))

(define-test an-interrupted-frame-has-its-arguments
  (let ((thread (sb-thread:make-thread #'spin :arguments '(1)))
        (interrupted (sb-thread:make-semaphore))
        (arguments '())
        (end (+ (get-internal-real-time) (* 60 internal-time-units-per-second))))
    (unwind-protect
         ;; On a busy machine, many interruptions may come before the loop begins.
         (loop until (or (equal '(1) arguments) (> (get-internal-real-time) end))
               do (sb-thread:interrupt-thread thread (lambda ()
                                                       (setf arguments (arguments-of-spin))
                                                       (sb-thread:signal-semaphore interrupted)))
                  (sb-thread:wait-on-semaphore interrupted :timeout 60))
      (sb-thread:terminate-thread thread))
    (expect '(1) arguments)))

(defun run-test (function)
  "Call FUNCTION, a test. Return NIL if the test passes, or the error that it signalled."
  (handler-case (progn (funcall (the function function)) nil)
    (error (condition) condition)))

(defun run-tests ()
  "Run all tests, with the patches and the recording host installed in this SBCL meanwhile. Print the failed tests and
the numbers of passed and failed tests, and return true if none failed."
  (check-assumptions)
  (let ((failed 0)
        (tests (reverse *tests*))
        (streams (list sb-sys:*stdin* sb-sys:*stdout* sb-sys:*stderr* sb-sys:*tty*)))
    (unwind-protect
         (progn
           (install-patches)
           (install-standard-streams)
           (setf **event-function-address** (sap-int (alien-sap (alien-callable-function 'record-event))))
           (loop for (name function) in tests
                 for condition = (run-test function)
                 when condition
                   do (incf failed)
                      (format (second streams) "~&FAILED ~(~A~): ~A~%" name condition)))
      (setf **event-function-address** 0)
      (remove-patches)
      (setf (values sb-sys:*stdin* sb-sys:*stdout* sb-sys:*stderr* sb-sys:*tty*) (values-list streams)))
    (format t "~&~D passed, ~D failed~%" (- (length tests) failed) failed)
    (zerop failed)))
