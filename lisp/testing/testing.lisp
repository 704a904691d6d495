;;;; Running tests: each test runs under a time limit of its own, whatever it does, and its result becomes a verdict.

(in-package "SBCL-HOST/TESTING")

;;; Results

(defstruct (check (:copier nil) (:predicate nil))
  "A failed check of a test, as text except for FORM."
  ;; The form as it is in the test, by which its source is found; or NIL.
  (form nil)
  (shown nil :type (or null string))
  (expected nil :type (or null string))
  (actual nil :type (or null string))
  (message nil :type (or null string))
  ;; File and line, if the framework knows them.
  (file nil :type (or null string))
  (line nil :type (or null index)))

(defstruct (verdict (:copier nil) (:predicate nil))
  "The result of a test."
  (framework "" :type string)
  ;; The test's name as text, and as the symbol or string that it is.
  (title "" :type string)
  (name nil)
  (status :passed :type (member :passed :failed :error :skipped))
  ;; The first failed checks, and the number of the others.
  (checks '() :type list)
  (more-checks 0 :type index)
  (passed-checks 0 :type index)
  ;; Another remark, such as that the test timed out.
  (message nil :type (or null string))
  ;; The condition that ended the test, or NIL.
  (condition nil)
  (milliseconds 0 :type real)
  ;; The index, from 0, of the test's error among those of this evaluation, once it was pushed.
  (error nil :type (or null index))
  ;; The coverage marks that the test set, if coverage is recorded; and the names of functions in the frames of its error.
  (marks nil :type (or null simple-bit-vector))
  (frames '() :type list)
  ;; If a test operation counts as one test: a vector of its printed reports, each a verdict of its own.
  (reports #() :type vector)
  ;; The errors that were signalled in the test, newest first.
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

(defun end-with-condition (verdict condition)
  "Record in VERDICT that CONDITION ended the test."
  (setf (verdict-status verdict) :error
        (verdict-condition verdict) condition))

(defconstant +max-shown-length+ 1000
  "Maximum number of characters of a value, form or message of a test that are shown.")

(defun cut-text (text)
  "Return TEXT, cut to the length that is shown."
  (if (> (length text) +max-shown-length+)
      (format nil "~A[... ~D characters omitted]" (subseq text 0 +max-shown-length+) (- (length text) +max-shown-length+))
      text))

(defun shown-form (form)
  "Return FORM printed as source on one line, cut to the length that is shown."
  (shown-text form :downcase))

(defun shown-text (object &optional (case :upcase))
  "Return OBJECT, a value, printed on one line, cut to the length that is shown. Symbols are printed in CASE."
  (with-server-syntax (:length 50 :level 8)
    (setf *print-pretty* t
          *print-right-margin* most-positive-fixnum
          *print-case* case)
    ;; A user's print method may not return.
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
  "Return CONDITION's report, cut to the length that is shown."
  (with-server-syntax (:length 50 :level 8)
    (or (call-with-time-limit
         +report-time-limit+
         (lambda ()
           (guarded (cut-text (let ((*print-escape* nil)) (princ-to-string condition)))
               (failure)
             "(the condition's report failed)")))
        "(the condition's report does not end)")))

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
  ;; The time at which the test is to be ended, in milliseconds.
  (deadline 0 :type real)
  ;; A function that ends the test. Its argument is the reason, such as :TIMEOUT.
  (leave nil :type (or null function))
  ;; The function that interrupts the test's thread, once it was made.
  (interruption nil :type (or null function))
  (verdict nil :read-only t))

(defstruct (test-run (:copier nil) (:predicate nil))
  "A run of tests."
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
  ;; The name of the tested system, as the client gave it, if the client gave several systems.
  (system nil :type (or null string) :read-only t)
  ;; The systems that hold the tests, once they are known; and the duration of the run, once it is over.
  (systems '() :type list)
  (milliseconds nil :type (or null integer))
  ;; A COVERAGE, and the systems that were loaded with marks, if coverage is recorded.
  (coverage nil)
  (covered '() :type list)
  ;; The number of errors that were pushed, the start of the run, and the milliseconds spent on examining errors.
  (errors 0 :type index)
  (begun (monotonic-milliseconds) :read-only t)
  (observation-milliseconds 0 :type real)
  ;; The time, in milliseconds, until which a test is being ended for the heap, including the collection of its garbage.
  (ending-for-heap 0 :type real))

(declaim (type (or null test-run) *test-run*))
(defvar *test-run* nil
  "The test run of this thread, or NIL.")

(defvar *verdict* nil
  "The verdict, so far, of the test that this thread runs, or NIL.")

(defconstant +watch-interval+ 1/20
  "The seconds between two checks whether a test takes too long.")
(defconstant +unwind-milliseconds+ 5000
  "The grace period for cleanup forms of a test that is being ended, before it is interrupted again.")

(defconstant +endless-milliseconds+ 10000
  "The time limit of a test that is known to exceed its limit.")

(defun test-limit (run verdict)
  "Return the time limit in milliseconds of the test of VERDICT in RUN."
  (if (member (verdict-title verdict) (test-run-endless run) :test #'equal)
      (min +endless-milliseconds+ (test-run-limit run))
      (test-run-limit run)))

(defun watch-tests (run)
  "End the running test of RUN if it takes too long. A timer calls this."
  (let ((guard (test-run-guard run))
        (now (monotonic-milliseconds)))
    (when (and guard (> now (guard-deadline guard)))
      (setf (guard-deadline guard) (+ now +unwind-milliseconds+))
      (interrupt-once (test-run-thread run)
                      (or (guard-interruption guard)
                          (setf (guard-interruption guard)
                                (lambda () (end-overdue-test run guard (frame-pointer-here)))))))))

(defun end-overdue-test (run guard hook)
  "End the test that GUARD watches, if it still runs. An interruption calls this, in the function whose frame pointer is
HOOK. The test unwinds without a condition, which handlers would swallow."
  (when (eq guard (test-run-guard run))
    (let ((verdict (guard-verdict guard)))
      (unless (verdict-message verdict)
        (setf (verdict-message verdict)
              (let ((limit (/ (test-limit run verdict) 1000)))
                (format nil "It did not end within ~:[~,1F~;~D~] second~:*~P and was interrupted."
                        (integerp limit) limit)))
        (note-signalled-error verdict nil "TIMEOUT" (guarded (interrupted-frame hook) (failure) nil))))
    (funcall (the function (guard-leave guard)) :timeout)))

(defun end-test-for-heap (run guard hook)
  "End the test of RUN that GUARD watches, because the heap is nearly used up. Called in the function whose frame pointer is
HOOK. Return if a test is already being ended for the heap: a second exit would lose the error of that test, or blame the
test around it."
  (let ((verdict (guard-verdict guard))
        (now (monotonic-milliseconds)))
    (when (< now (test-run-ending-for-heap run))
      (return-from end-test-for-heap nil))
    (setf (test-run-ending-for-heap run) (+ now +unwind-milliseconds+))
    (unless (verdict-message verdict)
      (setf (verdict-message verdict)
            (format nil "The heap was nearly used up (~D of ~D MB), so it was ended."
                    (megabytes (sb-kernel:dynamic-usage)) (megabytes (sb-ext:dynamic-space-size))))
      (note-signalled-error verdict nil "HEAP-EXHAUSTED" (guarded (interrupted-frame hook) (failure) nil)))
    (funcall (the function (guard-leave guard)) :heap)))

(defun announce-step (step milliseconds)
  "Notify the host that this evaluation now performs STEP, a string. After MILLISECONDS the host interrupts it, and if it
cannot be interrupted, the image is abandoned."
  (event *job-id* (event-code :step) (ceiling milliseconds) step))

(defun test-step (verdict)
  "Return the name of the test of VERDICT as a step of an evaluation."
  (concatenate 'text (if (test-operation-p verdict) "the " "the test ") (verdict-title verdict)))

(defun announce-test (guard)
  "Notify the host that the test that GUARD watches runs, or with NIL that none does. A test whose time is over is normally
ended here, so the host gets a later limit."
  (if guard
      (announce-step (test-step (guard-verdict guard))
                     (max 0 (+ (- (guard-deadline guard) (monotonic-milliseconds)) (* 2 +unwind-milliseconds+))))
      (event *job-id* (event-code :step))))

(defun call-with-test-run (run function)
  "Return the values of FUNCTION, which runs tests in RUN."
  ;; The timer's function must not run in this thread, as it would without :THREAD. A timer is rescheduled where its
  ;; function ran, and what a test does to its thread must not stop the timer.
  (let ((timer (sb-ext:make-timer (lambda () (watch-tests run)) :name "test limits" :thread nil)))
    (unwind-protect
         (progn
           (sb-ext:schedule-timer timer +watch-interval+ :repeat-interval +watch-interval+)
           (let ((*test-run* run)
                 (*verdict* nil)
                 ;; Warnings of tests are part of their output.
                 (*recording-warnings* nil)
                 (*machinery-directories* (framework-directories)))
             (call-with-signal-observer #'observe-test-error function)))
      (sb-ext:unschedule-timer timer))))

(defun call-with-coverage (verdict function)
  "Return the values of FUNCTION, which runs the test of VERDICT. If coverage is recorded and this is the test's first run,
store the marks that it sets in VERDICT."
  (declare (type function function))
  (cond ((or (null *coverage*) (verdict-marks verdict)) (funcall function))
        (t
         (clear-marks)
         (unwind-protect (funcall function)
           (setf (verdict-marks verdict) (set-marks))))))

(defun call-as-test (verdict function)
  "Call FUNCTION, which runs a test, and return a list of its values. VERDICT records how the test ends: normally, by its
time limit, in the debugger, or by a non-local exit, as when its thread is ended. An evaluation that is interrupted stays
interrupted."
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
                                     (note-debugger verdict condition (frame-pointer-here))
                                     (leave :debugger)))
                    (abort (sb-kernel::make-restart 'abort (lambda () (leave :aborted))
                                                    (lambda (stream) (write-string "Abandon this test." stream))))
                    (sb-kernel:*restart-clusters* (cons (list abort) sb-kernel:*restart-clusters*)))
               (let* ((guard (make-guard :deadline (+ start (test-limit run verdict)) :leave #'leave :verdict verdict))
                      (*end-part-for-heap* (lambda (hook) (end-test-for-heap run guard hook))))
                 (setf (test-run-guard run) guard)
                 (announce-test guard)
                 (with-boundary ()
                   (setf values (multiple-value-list (call-with-coverage verdict function)))))
               (setf how :returned)))
        (let ((end (monotonic-milliseconds)))
          (setf (test-run-guard run) outer
                (verdict-milliseconds verdict) (+ (verdict-milliseconds verdict) (- end start)))
          (when outer
            (setf (guard-deadline outer) (+ end left)))
          (announce-test outer))
        ;; Stop a non-local exit that would leave more than the test, such as the end of the thread or a throw to the caller
        ;; of the run.
        (when (and (eq how :left) (not *failure-reason*))
          (return-from test))))
    (unless (eq how :returned)
      (end-abnormally verdict how))
    (when (eq how :heap)
      (setf (test-run-ending-for-heap run) (+ (monotonic-milliseconds) +unwind-milliseconds+))
      (collect-after-part (test-step verdict))
      (setf (test-run-ending-for-heap run) 0)
      ;; The steps that were announced meanwhile are over.
      (announce-test outer))
    values))

(defun end-abnormally (verdict how)
  "Record in VERDICT that the test ended abnormally. HOW is the reason: :TIMEOUT, :HEAP, :DEBUGGER, :ABORTED or :LEFT."
  (ecase how
    (:timeout (setf (verdict-status verdict) :failed))
    (:heap (setf (verdict-status verdict) :error))
    (:debugger (setf (verdict-status verdict) :error))
    (:aborted (setf (verdict-status verdict) :error
                    (verdict-message verdict) "It invoked the restart ABORT."))
    (:left (setf (verdict-status verdict) :error
                 (verdict-message verdict) "It was left by a non-local exit, as when a thread is ended."))))

(defun note-removed (verdict)
  "Record in VERDICT that the test no longer existed when it was to run."
  (setf (verdict-status verdict) :error
        (verdict-message verdict) "It could not run: an earlier test removed it."))

(defun record-verdict (verdict)
  "Add VERDICT, of a test that is over, to the run, and push the error that ended the test."
  (when (member (verdict-status verdict) '(:failed :error))
    (push-test-error verdict))
  (when (and (eq :passed (verdict-status verdict))
             (zerop (verdict-passed-checks verdict))
             (not (test-operation-p verdict)))
    (setf (verdict-message verdict) "It made no check."))
  (setf (verdict-signalled verdict) '()
        (verdict-condition verdict) nil)
  (vector-push-extend verdict (test-run-verdicts *test-run*))
  verdict)

;;; Errors of tests, at the point where they are signalled

(defstruct (signalled (:copier nil) (:predicate nil))
  "An error, captured where it was signalled."
  (condition nil :read-only t)
  ;; The coverage marks that were set by then, as from SET-MARKS, if coverage is recorded.
  (marks nil :type (or null simple-bit-vector) :read-only t)
  (type "" :type string :read-only t)
  ;; The frames that are shown, and the total number of frames.
  (calls '() :type list :read-only t)
  (total 0 :type index :read-only t))

(defconstant +max-kept-errors+ 4
  "Maximum number of handled errors that are kept until a test is over; the last errors are kept.")
(defconstant +observation-share+ 1/25
  "The share of a run's time that may be spent on examining errors, so that many handled errors do not slow the run down.")
(defconstant +observation-milliseconds+ 10
  "Milliseconds that may be spent on examining errors in any case. They are CPU time of this thread, so that other threads
do not use them up.")
(defconstant +max-pushed-errors+ 50
  "Maximum number of errors of a run that go into the history.")

(defun may-observe-p (run)
  "Return true when RUN may spend time on examining another error."
  (<= (test-run-observation-milliseconds run)
      (+ +observation-milliseconds+
         (* +observation-share+ (- (monotonic-milliseconds) (test-run-begun run))))))

(defun note-signalled-error (verdict condition type frame)
  "Record in VERDICT the error CONDITION, of TYPE, a string, and the frames from FRAME outwards."
  (multiple-value-bind (frames total) (guarded (user-frames frame) (failure) (values '() 0))
    (let ((marks (and *coverage* (set-marks)))
          (calls (call-preserving-marks (lambda ()
                                          (loop for (number . frame) in frames
                                                collect (frame-call number frame condition :outlives t))))))
      (extend-machinery calls)
      (let ((signalled (cons (make-signalled :condition condition :marks marks :type type :calls calls :total total)
                             (verdict-signalled verdict))))
        (setf (verdict-signalled verdict)
              (subseq signalled 0 (min (length signalled) +max-kept-errors+)))))))

(defun observe-test-error (condition hook clusters)
  "Record CONDITION in the verdict of the running test: a framework may handle it. A signal observer, called with HOOK and
CLUSTERS."
  (declare (ignore clusters))
  (let ((verdict *verdict*)
        (run *test-run*))
    (when (and verdict run
               (not (framework-condition-p condition))
               (may-observe-p run))
      (let ((start (thread-milliseconds)))
        (note-signalled-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (incf (test-run-observation-milliseconds run) (- (thread-milliseconds) start))))))

(defun note-debugger (verdict condition hook)
  "Record in VERDICT that CONDITION entered the debugger through the function whose frame pointer is HOOK."
  (setf (verdict-condition verdict) condition)
  (unless (or (typep condition 'storage-condition)
              (find condition (verdict-signalled verdict) :key #'signalled-condition))
    (guarded (note-signalled-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (failure)
      nil)))

(defun error-of-test (verdict)
  "Return the error that ended the test of VERDICT, a SIGNALLED, or NIL."
  (let ((condition (verdict-condition verdict))
        (signalled (verdict-signalled verdict)))
    (cond (condition
           (or (find condition signalled :key #'signalled-condition)
               (make-signalled :condition condition :type (type-name-text (class-name-of condition)))))
          ((verdict-message verdict) (find nil signalled :key #'signalled-condition))
          ((eq (verdict-status verdict) :error) (first signalled)))))

(defun outermost-name (name)
  "Return the symbol that the source form around the frame named NAME defines, BAR for (LABELS FOO :IN BAR), or NIL."
  (loop while (consp name)
        do (let ((in (and (list-length name) (member :in name))))
             (setf name (second (or in name)))))
  (and (symbolp name) name))

(defun push-test-error (verdict)
  "Push the error that ended the test of VERDICT, if there is one, for the history."
  (let ((signalled (error-of-test verdict)))
    ;; Marks that were set after the error would be misleading.
    (when (and signalled (signalled-marks signalled))
      (setf (verdict-marks verdict) (signalled-marks signalled)))
    (when (and signalled (< (test-run-errors *test-run*) +max-pushed-errors+))
      (setf (verdict-error verdict) (test-run-errors *test-run*)
            (verdict-frames verdict)
            (loop for call in (signalled-calls signalled)
                  for name = (outermost-name (call-name call))
                  when (and name (not (call-system call)))
                    collect (symbol-name name)))
      (incf (test-run-errors *test-run*))
      (when (and (signalled-condition signalled) (null (verdict-message verdict))
                 (string/= "" (verdict-framework verdict)))
        (setf (verdict-message verdict)
              (format nil "~A: ~A" (signalled-type signalled) (report-text (signalled-condition signalled)))))
      (flush-output)
      (let ((*job-id* (logior *job-id* +job-signalled+))
            (*package* (test-run-package *test-run*))
            (condition (signalled-condition signalled)))
        (with-quiet-debugger ()
          (event *job-id* (event-code :error) 0 (signalled-type signalled))
          (cond ((null condition) (event *job-id* (event-code :error-text) 0 (or (verdict-message verdict) "")))
                (t (push-bounded-report condition)
                   ;; This is not a test, but may be an error in loading what a test needs.
                   (when (string= "" (verdict-framework verdict))
                     (push-error-details condition))))
          (event *job-id* (event-code :frames) (signalled-total signalled))
          ;; If a part takes too long, it and the parts after it are left out.
          (call-with-time-limit
           +capture-time-limit+
           (lambda ()
             (when condition
               (guarded (push-slots condition) (failure) nil))
             (push-calls (signalled-calls signalled)))))))))

;;; Code outside of tests

(defun call-outside-tests (title function)
  "Call FUNCTION, named TITLE, which is not a test. Its verdict is added to the run only if it fails."
  (let ((verdict (make-verdict :title title :name title)))
    (call-as-test verdict (lambda ()
                            (handler-case (funcall (the function function))
                              (error (condition) (end-with-condition verdict condition)))))
    (unless (eq :passed (verdict-status verdict))
      (record-verdict verdict))
    verdict))

(defconstant +loading-milliseconds+ 600000
  "The time limit in milliseconds for loading a system for its tests, equal to the limit of the tool load.")

(defun load-for-tests (system &optional reload)
  "Load SYSTEM if it is not loaded. If RELOAD is true, also load its changed files."
  (when (or reload (not (asdf:component-loaded-p system)))
    (announce-step (concatenate 'text "the loading of " (asdf:component-name system)) +loading-milliseconds+)
    (unwind-protect
         (let ((*recording-warnings* t))
           (call-recompiling-fasls (lambda () (asdf:load-system system))))
      (announce-test (and *test-run* (test-run-guard *test-run*))))))

;;; The files of systems

(defun system-files (systems)
  "Return the native namestrings of the Lisp files of SYSTEMS."
  (let ((files '()))
    (labels ((visit (component)
               (typecase component
                 (asdf:cl-source-file
                  (pushnew (sb-ext:native-namestring (asdf:component-pathname component)) files :test #'string=))
                 (asdf:parent-component (mapc #'visit (asdf:component-children component))))))
      (mapc #'visit systems))
    (nreverse files)))

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

(defun relative-file (file directories)
  "Return the namestring FILE relative to the first of DIRECTORIES, native namestrings, that contains it, or else to the
working directory."
  (loop for directory in directories
        when (and (> (length file) (length directory)) (string= directory file :end2 (length directory)))
          return (subseq file (length directory))
        finally (return (shown-path file))))
