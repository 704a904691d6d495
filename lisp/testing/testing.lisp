;;;; Running tests: each test runs under a time limit of its own, and its result becomes a verdict.

(in-package "SBCL-HOST/TESTING")

;;; Results of tests

(defstruct (check (:copier nil) (:predicate nil))
  "A failed check of a test."
  ;; The form of the check as an object, by which its source is found; or NIL.
  (form nil)
  ;; The form, the expected value and the actual value as text, and a message; or NIL for a part that is unknown.
  (printed-form nil :type (or null string))
  (expected nil :type (or null string))
  (actual nil :type (or null string))
  (message nil :type (or null string))
  ;; The file of the check, or NIL if the framework does not know the file; and the line, or NIL while it is unknown.
  (file nil :type (or null string))
  (line nil :type (or null index)))

(defstruct (verdict (:copier nil) (:predicate nil))
  "The result of a test."
  ;; The title of the framework, or `ASDF' for a test operation, or empty for code that is not a test.
  (framework "" :type string)
  ;; TITLE is the test's name as text. NAME is the name itself, such as a symbol or a string.
  (title "" :type string)
  (name nil)
  (status :passed :type (member :passed :failed :error :skipped))
  ;; CHECKS are the first failed checks, MORE-CHECKS is the number of further failed checks, and PASSED-CHECKS is the number
  ;; of passed checks.
  (checks '() :type list)
  (more-checks 0 :type index)
  (passed-checks 0 :type index)
  ;; A remark on the result, such as that the test timed out, or NIL.
  (message nil :type (or null string))
  ;; The condition that ended the test, or NIL.
  (condition nil)
  (milliseconds 0 :type real)
  ;; The index, from 0, of the test's error among the errors of this evaluation, once the error has been pushed; or NIL.
  (error nil :type (or null index))
  ;; MARKS are the coverage marks that the test set, a value of MARK-BITS, if coverage is recorded. FRAMES are the names of
  ;; the functions in the frames of the test's error.
  (marks nil :type (or null simple-bit-vector))
  (frames '() :type list)
  ;; For a test operation that counts as one test: a vector of its printed reports, each a verdict of its own.
  (reports #() :type vector)
  ;; The newest errors that were signalled in the test, as CAPTURED-ERRORs, newest first.
  (signalled '() :type list))

(defconstant +max-shown-checks+ 10
  "Maximum number of failed checks of a test that are reported.")

(defun add-check (verdict check)
  "Add CHECK, which failed, to VERDICT."
  (if (< (length (verdict-checks verdict)) +max-shown-checks+)
      (setf (verdict-checks verdict) (append (verdict-checks verdict) (list check)))
      (incf (verdict-more-checks verdict)))
  (unless (eq (verdict-status verdict) :error)
    (setf (verdict-status verdict) :failed)))

(defun record-ending-condition (verdict condition)
  "Record in VERDICT that CONDITION ended the test."
  (setf (verdict-status verdict) :error
        (verdict-condition verdict) condition))

(defconstant +max-shown-length+ 1000
  "Maximum number of characters of a value, form or message of a test that are shown.")

(defun cut-text (text)
  "Return TEXT. If TEXT is longer than +MAX-SHOWN-LENGTH+, return its beginning and the number of omitted characters
instead."
  (if (> (length text) +max-shown-length+)
      (format nil "~A[... ~D character~:P omitted]" (subseq text 0 +max-shown-length+) (- (length text) +max-shown-length+))
      text))

(defun shown-form (form)
  "Return FORM printed as source on one line, cut by CUT-TEXT."
  (shown-text form :downcase))

(defun shown-text (object &optional (case :upcase))
  "Return OBJECT, a value, printed on one line and cut by CUT-TEXT. Symbols are printed in CASE, a value of *PRINT-CASE*."
  (with-server-syntax (:length 50 :level 8)
    (setf *print-pretty* t
          *print-right-margin* most-positive-fixnum
          *print-case* case)
    ;; A print method of the user may run forever.
    (or (call-with-time-limit
         +report-time-limit+
         (lambda ()
           (guarded (cut-text (if (and (stringp object) (> (length object) (* 2 +max-shown-length+)))
                                  (format nil "~S… (~D characters)" (subseq object 0 +max-shown-length+) (length object))
                                  (prin1-to-string object)))
               (failure)
             nil)))
        (format nil "#<unprintable ~A>" (type-name-text (class-name-of object))))))

(defun report-text (condition)
  "Return CONDITION's report, cut by CUT-TEXT."
  (with-server-syntax (:length 50 :level 8)
    (or (call-with-time-limit
         +report-time-limit+
         (lambda ()
           (guarded (cut-text (let ((*print-escape* nil)) (princ-to-string condition)))
               (failure)
             "(the condition's report failed)")))
        "(the condition's report took too long to print)")))

(defun new-verdict (test)
  "Return a new verdict for TEST of the current framework."
  (let ((name (framework-test-name *framework* test)))
    (make-verdict :framework (framework-title *framework*)
                  :name name
                  :title (if (stringp name) name (type-name-text name)))))

(defun failed-p (verdict)
  "Return true when the test of VERDICT failed or ended with an error."
  (member (verdict-status verdict) '(:failed :error)))

(defun test-operation-p (verdict)
  "Return true when VERDICT is the verdict of a test operation that counts as one test."
  (string= "ASDF" (verdict-framework verdict)))

;;; Test runs

(defstruct (guard (:copier nil) (:predicate nil))
  "The time limit of a running test, and the functions that end the test."
  ;; The monotonic time, in milliseconds, after which WATCH-TESTS interrupts the test.
  (deadline 0 :type real)
  ;; A function that ends the test. The function's argument is the reason, such as :TIMEOUT.
  (end-test nil :type (or null function))
  ;; The function with which WATCH-TESTS interrupts the test's thread, or NIL before the first interruption.
  (interruption nil :type (or null function))
  ;; The verdict of the test.
  (verdict nil :read-only t))

(defstruct (test-run (:copier nil) (:predicate nil))
  "A run of tests: its options, the test that is running, and the verdicts so far."
  (thread sb-thread:*current-thread* :read-only t)
  ;; The package in which symbols are printed.
  (package (current-package) :read-only t)
  ;; The time limit of a test in milliseconds.
  (limit 60000 :type (integer 1) :read-only t)
  ;; Titles of tests that are known to exceed the limit.
  (endless '() :type list :read-only t)
  (verdicts (make-array 0 :adjustable t :fill-pointer t) :read-only t)
  ;; The GUARD of the innermost running test.
  (guard nil :type (or null guard))
  ;; If the client named several systems, the name of this run's system as the client gave it, else NIL.
  (system nil :type (or null string) :read-only t)
  ;; SYSTEMS are the systems that hold the tests, once they are known. MILLISECONDS is the duration of the run, or NIL before
  ;; the run is over.
  (systems '() :type list)
  (milliseconds nil :type (or null integer))
  ;; If coverage is recorded, COVERAGE is the COVERAGE structure of this image, and MARKED-SYSTEMS lists the systems
  ;; that were loaded with coverage marks.
  (coverage nil)
  (marked-systems '() :type list)
  ;; ERRORS is the number of errors that were pushed, and BEGUN is the monotonic time in milliseconds at which the run began.
  ;; OBSERVATION-MILLISECONDS is the CPU time that was spent on examining errors.
  (errors 0 :type index)
  (begun (monotonic-milliseconds) :read-only t)
  (observation-milliseconds 0 :type real)
  ;; A monotonic time in milliseconds. Until then, no further test is ended because the heap is nearly used up: a test that
  ;; was ended for this reason is still unwinding, or its garbage is being collected.
  (heap-grace-end 0 :type real))

(declaim (type (or null test-run) *test-run*))
(defvar *test-run* nil
  "The test run of this thread, or NIL.")

(defvar *verdict* nil
  "The verdict, still incomplete, of the innermost test that this thread runs; or NIL.")

(defconstant +watch-interval+ 1/20
  "The number of seconds between two checks of the running test's time limit.")
(defconstant +unwind-milliseconds+ 5000
  "The time in milliseconds that the cleanup forms of an interrupted test may take. After this time, the test is interrupted
again.")

(defconstant +endless-milliseconds+ 10000
  "The time limit in milliseconds of a test that is known to exceed the limit of its run.")

(defun test-limit (run verdict)
  "Return the time limit in milliseconds of the test of VERDICT in RUN."
  (if (member (verdict-title verdict) (test-run-endless run) :test #'equal)
      (min +endless-milliseconds+ (test-run-limit run))
      (test-run-limit run)))

(defun watch-tests (run)
  "Interrupt the running test of RUN if the test has exceeded its time limit. A timer calls this function regularly."
  (let ((guard (test-run-guard run))
        (now (monotonic-milliseconds)))
    (when (and guard (> now (guard-deadline guard)))
      (publish (guard-deadline guard) (+ now +unwind-milliseconds+))
      (interrupt-once (test-run-thread run)
                      (or (guard-interruption guard)
                          (setf (guard-interruption guard)
                                (lambda () (end-overdue-test run guard (frame-pointer-here)))))))))

(defun verdict-noun (verdict)
  "Return the noun by which messages call the code of VERDICT: `test', `test-op' or, for code outside of tests, `code'."
  (cond ((test-operation-p verdict) "test-op")
        ((string= "" (verdict-framework verdict)) "code")
        (t "test")))

(defun end-overdue-test (run guard hook)
  "End the test of GUARD if it is still the innermost test of RUN. The function that interrupted the test's thread calls this
function, and HOOK is the frame pointer of the caller. The test unwinds by a non-local exit rather than a condition, because
a handler of the test could swallow the condition."
  (when (eq guard (test-run-guard run))
    (let ((verdict (guard-verdict guard)))
      (unless (verdict-message verdict)
        (setf (verdict-message verdict)
              (let ((limit (/ (test-limit run verdict) 1000)))
                (format nil "The ~A did not end within ~:[~F~;~D~] second~:*~P and was interrupted."
                        (verdict-noun verdict) (integerp limit) (if (integerp limit) limit (float limit)))))
        (capture-test-error verdict nil "TIMEOUT" (guarded (interrupted-frame hook) (failure) nil))))
    (funcall (the function (guard-end-test guard)) :timeout)))

(defun end-test-for-heap (run guard hook)
  "End the test of GUARD in RUN because the heap is nearly used up. HOOK is the frame pointer of the caller. Return NIL if a
test is already being ended for this reason: a second non-local exit would lose the error of that test, or attribute the
error to the test around it."
  (let ((verdict (guard-verdict guard))
        (now (monotonic-milliseconds)))
    (when (< now (test-run-heap-grace-end run))
      (return-from end-test-for-heap nil))
    (setf (test-run-heap-grace-end run) (+ now +unwind-milliseconds+))
    (unless (verdict-message verdict)
      (setf (verdict-message verdict)
            (format nil "The heap was nearly used up (~A), so the ~A was ended. Keep fewer objects, or start with a larger heap."
                    (heap-use-text (heap-use)) (verdict-noun verdict)))
      (capture-test-error verdict nil "HEAP-EXHAUSTED" (guarded (interrupted-frame hook) (failure) nil)))
    (funcall (the function (guard-end-test guard)) :heap)))

(defun announce-step (step milliseconds)
  "Notify the host that this evaluation now performs STEP, a string. If STEP takes more than MILLISECONDS, the host
interrupts the evaluation. If the evaluation cannot be interrupted, the host abandons the image."
  (event *job-id* (event-code :step) (ceiling milliseconds) step))

(defun test-step-name (verdict)
  "Return the name that ANNOUNCE-STEP uses for the test of VERDICT, such as `the test FOO', or for other code, such as
`the test-op of FOO'."
  (concatenate 'text (if (string= "test" (verdict-noun verdict)) "the test " "the ") (verdict-title verdict)))

(defun announce-test (guard)
  "Notify the host that the test of GUARD runs or, if GUARD is NIL, that no test runs. WATCH-TESTS normally ends a test that
exceeds its time limit, so the host gets a longer limit."
  (if guard
      (announce-step (test-step-name (guard-verdict guard))
                     (max 0 (+ (- (guard-deadline guard) (monotonic-milliseconds)) (* 2 +unwind-milliseconds+))))
      (event *job-id* (event-code :step))))

(defun call-with-test-run (run function)
  "Return the values of FUNCTION, which runs tests in RUN."
  ;; The timer's function must not run in this thread, as it would without :THREAD NIL. SBCL reschedules a timer in the
  ;; thread in which the timer's function ran, so a test that disturbs this thread could stop the timer.
  (let ((timer (sb-ext:make-timer (lambda () (watch-tests run)) :name "test limits" :thread nil)))
    (unwind-protect
         (progn
           (sb-ext:schedule-timer timer +watch-interval+ :repeat-interval +watch-interval+)
           (let ((*test-run* run)
                 (*verdict* nil)
                 ;; The warnings of a test are part of the test's output.
                 (*recording-warnings* nil)
                 (*machinery-directories* (framework-directories)))
             (call-with-signal-observer #'observe-test-error function)))
      (sb-ext:unschedule-timer timer))))

(defun call-with-coverage (verdict function)
  "Return the values of FUNCTION, which runs the test of VERDICT. If coverage is recorded and VERDICT has no marks yet, store
in VERDICT the marks that FUNCTION sets."
  (declare (type function function))
  (cond ((or (null *coverage*) (verdict-marks verdict)) (funcall function))
        (t
         (clear-marks)
         (unwind-protect (funcall function)
           (setf (verdict-marks verdict) (mark-bits))))))

(defun call-as-test (verdict function)
  "Call FUNCTION, which runs a test. Return a list of the values of FUNCTION, or the empty list if the test ends abnormally.
Record in VERDICT an abnormal end: by the time limit, because the heap is nearly used up, in the debugger, by the restart
ABORT, or by another non-local exit, as when the thread is ended. If the evaluation itself is being ended, do not stop its
unwinding."
  (declare (type function function))
  (let* ((run *test-run*)
         (outer (test-run-guard run))
         (start (monotonic-milliseconds))
         (left (and outer (- (guard-deadline outer) start)))
         (how :left)
         (values '()))
    (block test
      (unwind-protect
           (flet ((leave (reason)
                    (setf how reason)
                    (return-from test)))
             (let* ((*verdict* verdict)
                    (*on-debugger* (lambda (condition)
                                     (record-debugger-entry verdict condition (frame-pointer-here))
                                     (leave :debugger)))
                    (abort (sb-kernel::make-restart 'abort (lambda () (leave :aborted))
                                                    (lambda (stream)
                                                      (format stream "End this ~A with an error." (verdict-noun verdict)))))
                    (sb-kernel:*restart-clusters* (cons (list abort) sb-kernel:*restart-clusters*)))
               (let* ((guard (make-guard :deadline (+ start (test-limit run verdict)) :end-test #'leave :verdict verdict))
                      (*end-part-for-heap* (lambda (hook) (end-test-for-heap run guard hook))))
                 ;; WATCH-TESTS reads the guard in a timer's thread.
                 (publish (test-run-guard run) guard)
                 (announce-test guard)
                 (with-user-code-boundary ()
                   (setf values (multiple-value-list (call-with-coverage verdict function)))))
               (setf how :returned)))
        (let ((end (monotonic-milliseconds)))
          (setf (test-run-guard run) outer
                (verdict-milliseconds verdict) (+ (verdict-milliseconds verdict) (- end start)))
          (when outer
            (publish (guard-deadline outer) (+ end left)))
          (announce-test outer))
        ;; Stop a non-local exit that would leave more than the test, such as the end of the thread or a throw to the caller
        ;; of the run, unless it ends the evaluation itself.
        (when (and (eq how :left) (not *failure-reason*))
          (return-from test))))
    (unless (eq how :returned)
      (record-abnormal-end verdict how))
    (when (eq how :heap)
      (setf (test-run-heap-grace-end run) (+ (monotonic-milliseconds) +unwind-milliseconds+))
      (collect-after-part (test-step-name verdict))
      (setf (test-run-heap-grace-end run) 0)
      ;; The collection may have announced steps of its own, which are over now. Announce the test around this test again.
      (announce-test outer))
    values))

(defun record-abnormal-end (verdict how)
  "Record in VERDICT that the test ended abnormally. HOW is the reason: :TIMEOUT, :HEAP, :DEBUGGER, :ABORTED or :LEFT."
  (ecase how
    (:timeout (setf (verdict-status verdict) :failed))
    (:heap (setf (verdict-status verdict) :error))
    (:debugger (setf (verdict-status verdict) :error))
    (:aborted (setf (verdict-status verdict) :error
                    (verdict-message verdict) (format nil "The ~A invoked the restart ABORT." (verdict-noun verdict))))
    (:left (setf (verdict-status verdict) :error
                 (verdict-message verdict) (format nil "A non-local exit, such as THROW or ABORT-THREAD, ended the ~A."
                                                   (verdict-noun verdict))))))

(defun record-removed-test (verdict)
  "Record in VERDICT that the test could not run, because it no longer existed."
  (setf (verdict-status verdict) :error
        (verdict-message verdict) "The test could not run: it was removed during the run."))

(defun record-verdict (verdict)
  "Add VERDICT, whose test is over, to the current test run. If an error ended the test, push the error."
  (when (member (verdict-status verdict) '(:failed :error))
    (push-test-error verdict))
  (when (and (eq :passed (verdict-status verdict))
             (zerop (verdict-passed-checks verdict))
             (not (test-operation-p verdict)))
    (setf (verdict-message verdict) "The test checked nothing."))
  (setf (verdict-signalled verdict) '()
        (verdict-condition verdict) nil)
  (vector-push-extend verdict (test-run-verdicts *test-run*))
  verdict)

;;; Errors in tests, captured when they are signalled

(defstruct (captured-error (:copier nil) (:predicate nil))
  "An error in a test, captured when the error was signalled, or the end of a test by a limit."
  ;; The condition, or NIL if a limit ended the test.
  (condition nil :read-only t)
  ;; The coverage marks that were set when the error was captured, a value of MARK-BITS, if coverage is recorded.
  (marks nil :type (or null simple-bit-vector) :read-only t)
  ;; The name of the condition's type or, if a limit ended the test, the name of the limit: TIMEOUT or HEAP-EXHAUSTED.
  (type "" :type string :read-only t)
  ;; CALLS are the frames that are shown, and TOTAL is the number of all frames.
  (calls '() :type list :read-only t)
  (total 0 :type index :read-only t))

(defconstant +max-kept-errors+ 4
  "Maximum number of signalled errors that are kept until a test is over. The newest errors are kept.")
(defconstant +observation-share+ 1/25
  "The fraction of a run's time that may be spent on examining errors, so that many handled errors do not slow the run
down.")
(defconstant +observation-milliseconds+ 10
  "The milliseconds that may be spent on examining errors in addition to +OBSERVATION-SHARE+. The CPU time of this thread is
counted, so that other threads do not use up the milliseconds.")
(defconstant +max-pushed-errors+ 50
  "Maximum number of errors of a run that are pushed for the error history.")

(defun may-observe-p (run)
  "Return true when RUN may spend time on examining another error."
  (<= (test-run-observation-milliseconds run)
      (+ +observation-milliseconds+
         (* +observation-share+ (- (monotonic-milliseconds) (test-run-begun run))))))

(defun capture-test-error (verdict condition type frame)
  "Record an error in VERDICT, with the frames from FRAME outwards. CONDITION is the error, or NIL if the test was ended by a
limit. TYPE, a string, is the name of the condition's type, or of the limit."
  (multiple-value-bind (frames total) (guarded (user-frames frame) (failure) (values '() 0))
    (let ((marks (and *coverage* (mark-bits)))
          (calls (call-preserving-marks (lambda ()
                                          (loop for (number . frame) in frames
                                                collect (capture-frame number frame condition :outlives t))))))
      (mark-machinery-frames calls)
      (let ((signalled (cons (make-captured-error :condition condition :marks marks :type type :calls calls :total total)
                             (verdict-signalled verdict))))
        (setf (verdict-signalled verdict)
              (subseq signalled 0 (min (length signalled) +max-kept-errors+)))))))

(defun observe-test-error (condition hook clusters)
  "Record CONDITION in the verdict of the running test, because the framework may handle CONDITION without a record of the
frames. This is a signal observer: HOOK is a frame pointer for ERROR-FRAME, and CLUSTERS are the active handlers."
  (declare (ignore clusters))
  (let ((verdict *verdict*)
        (run *test-run*))
    (when (and verdict run
               (not (framework-condition-p condition))
               (may-observe-p run))
      (let ((start (thread-cpu-milliseconds)))
        (capture-test-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (incf (test-run-observation-milliseconds run) (- (thread-cpu-milliseconds) start))))))

(defun record-debugger-entry (verdict condition hook)
  "Record in VERDICT that CONDITION entered the debugger through the function whose frame pointer is HOOK."
  (setf (verdict-condition verdict) condition)
  (unless (or (typep condition 'storage-condition)
              (find condition (verdict-signalled verdict) :key #'captured-error-condition))
    (guarded (capture-test-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (failure)
      nil)))

(defun test-ending-error (verdict)
  "Return the error that ended the test of VERDICT, as a CAPTURED-ERROR, or NIL."
  (let ((condition (verdict-condition verdict))
        (signalled (verdict-signalled verdict)))
    (cond (condition
           (or (find condition signalled :key #'captured-error-condition)
               (make-captured-error :condition condition :type (type-name-text (class-name-of condition)))))
          ((verdict-message verdict) (find nil signalled :key #'captured-error-condition))
          ((eq (verdict-status verdict) :error) (first signalled)))))

(defun outermost-function-name (name)
  "Return the symbol that names the outermost function around NAME, the function name of a frame, such as BAR for
the name (LABELS FOO :IN BAR); or NIL."
  (loop while (consp name)
        do (let ((in (and (list-length name) (member :in name))))
             (setf name (second (or in name)))))
  (and (symbolp name) name))

(defun push-test-error (verdict)
  "Push the error that ended the test of VERDICT, if there is one, for the error history."
  (let ((signalled (test-ending-error verdict)))
    ;; Use the marks from the time of the error: marks that were set later would be misleading.
    (when (and signalled (captured-error-marks signalled))
      (setf (verdict-marks verdict) (captured-error-marks signalled)))
    (when (and signalled (< (test-run-errors *test-run*) +max-pushed-errors+))
      (setf (verdict-error verdict) (test-run-errors *test-run*)
            (verdict-frames verdict)
            (loop for call in (captured-error-calls signalled)
                  for name = (outermost-function-name (reported-frame-name call))
                  when (and name (not (reported-frame-system call)))
                    collect (symbol-name name)))
      (incf (test-run-errors *test-run*))
      (when (and (captured-error-condition signalled) (null (verdict-message verdict))
                 (string/= "" (verdict-framework verdict)))
        (setf (verdict-message verdict)
              (format nil "~A: ~A" (captured-error-type signalled) (report-text (captured-error-condition signalled)))))
      (flush-output)
      (let ((*job-id* (logior *job-id* +job-signalled+))
            (*package* (test-run-package *test-run*))
            (condition (captured-error-condition signalled)))
        (with-quiet-debugger ()
          (event *job-id* (event-code :error) 0 (captured-error-type signalled))
          (cond ((null condition) (event *job-id* (event-code :error-text) 0 (or (verdict-message verdict) "")))
                (t (push-bounded-report condition)
                   ;; A verdict without a framework does not belong to a test. The error may come from loading a system for
                   ;; its tests.
                   (when (string= "" (verdict-framework verdict))
                     (push-error-details condition))))
          (event *job-id* (event-code :frames) (captured-error-total signalled))
          ;; If the slots or the frames take too long to push, the rest is left out.
          (call-with-time-limit
           +capture-time-limit+
           (lambda ()
             (when condition
               (guarded (push-slots condition) (failure) nil))
             (push-reported-frames (captured-error-calls signalled)))))))))

;;; Code outside of tests

(defun call-outside-tests (title function)
  "Call FUNCTION, which is not a test, but code such as the setup of a suite. TITLE is the name under which FUNCTION is
reported. Return a verdict on FUNCTION, and add the verdict to the current test run if FUNCTION fails."
  (let ((verdict (make-verdict :title title :name title)))
    (call-as-test verdict (lambda ()
                            (handler-case (funcall (the function function))
                              (error (condition) (record-ending-condition verdict condition)))))
    (unless (eq :passed (verdict-status verdict))
      (record-verdict verdict))
    verdict))

(defconstant +loading-milliseconds+ 600000
  "The time limit in milliseconds for loading a system for its tests, equal to the default limit of the tool load-system.")

(defun call-loading-for-tests (name function)
  "Call FUNCTION, which loads the system or file NAME for its tests."
  (declare (type function function))
  (announce-step (concatenate 'text "the load of " name) +loading-milliseconds+)
  (unwind-protect
       (let ((*recording-warnings* t))
         (funcall function))
    (announce-test (and *test-run* (test-run-guard *test-run*)))))

(defun load-for-tests (system &optional reload)
  "Load SYSTEM if it is not loaded. If SYSTEM is loaded and RELOAD is true, load its changed files."
  (when (or reload (not (asdf:component-loaded-p system)))
    (call-loading-for-tests (asdf:component-name system)
                            (lambda ()
                              (call-recompiling-fasls (lambda () (asdf:load-system system)))))))

;;; Files and packages of systems

(defun with-inferred-systems (systems)
  "Return SYSTEMS and the loaded systems that ASDF infers from source files for the package-inferred systems among SYSTEMS,
each system before those on which it depends."
  (let ((seen '())
        (sorted '()))
    (labels ((visit (system)
               (unless (or (null system) (member system seen))
                 (push system seen)
                 (when (typep system 'asdf:package-inferred-system)
                   (dolist (name (asdf:system-depends-on system))
                     (when (and (stringp name)
                                (string= (asdf:primary-system-name name) (asdf:primary-system-name system)))
                       (visit (asdf:registered-system name)))))
                 (push system sorted))))
      (mapc #'visit (reverse systems)))
    sorted))

(defun system-files (systems)
  "Return the native namestrings of the Lisp source files of SYSTEMS."
  (let ((files '()))
    (labels ((visit (component)
               (typecase component
                 (asdf:cl-source-file
                  (push (sb-ext:native-namestring (asdf:component-pathname component)) files))
                 (asdf:parent-component (mapc #'visit (asdf:component-children component))))))
      (mapc #'visit systems))
    (remove-duplicates (nreverse files) :test #'equal :from-end t)))

(defun packages-of-systems (systems)
  "Return the packages that are defined in files of SYSTEMS."
  (let ((files (system-files systems)))
    (remove-if-not (lambda (package)
                     (let* ((location (sb-impl::package-source-location package))
                            (file (and location (sb-c:definition-source-location-namestring location))))
                       (and file
                            (not (system-file-p file))
                            (member (sb-ext:native-namestring (parse-namestring file)) files :test #'string=))))
                   (list-all-packages))))
