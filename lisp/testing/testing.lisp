;;;; Running tests: every test under a limit of its own, whatever it does, with what it came to as a verdict.

(in-package "SBCL-HOST/TESTING")

;;; What a test comes to

(defstruct (check (:copier nil) (:predicate nil))
  "A check of a test that failed, all of it as text but for FORM."
  ;; The form as the test has it, for which to look in its source; or NIL.
  (form nil)
  (shown nil :type (or null string))
  (expected nil :type (or null string))
  (actual nil :type (or null string))
  (message nil :type (or null string))
  ;; File and line, where the framework knows them.
  (file nil :type (or null string))
  (line nil :type (or null index)))

(defstruct (verdict (:copier nil) (:predicate nil))
  "What a test came to."
  (framework "" :type string)
  ;; What it is called, as text and as the symbol or string that it is.
  (title "" :type string)
  (name nil)
  (status :passed :type (member :passed :failed :error :skipped))
  ;; The first checks that failed, and how many more there are.
  (checks '() :type list)
  (more-checks 0 :type index)
  (passed-checks 0 :type index)
  ;; What else there is to say, as that it timed out.
  (message nil :type (or null string))
  ;; The condition that it ended with, or NIL.
  (condition nil)
  (milliseconds 0 :type real)
  ;; Which of the errors of this evaluation it is, from 0, once that was pushed.
  (error nil :type (or null index))
  ;; What it ran, a bit vector, where that is asked for; and the names of functions in the frames of the error.
  (marks nil :type (or null simple-bit-vector))
  (frames '() :type list)
  ;; Of a test operation that is one test: what it printed, each a verdict of its own, in a vector.
  (reports #() :type vector)
  ;; Errors that were signalled in it, newest first.
  (signalled '() :type list))

(defconstant +shown-checks+ 10
  "Of how many failed checks of a test is told.")

(defun add-check (verdict check)
  "Add CHECK, which failed, to VERDICT."
  (if (< (length (verdict-checks verdict)) +shown-checks+)
      (setf (verdict-checks verdict) (append (verdict-checks verdict) (list check)))
      (incf (verdict-more-checks verdict)))
  (unless (eq (verdict-status verdict) :error)
    (setf (verdict-status verdict) :failed)))

(defun end-with-condition (verdict condition)
  "Have VERDICT say that the test ended with CONDITION."
  (setf (verdict-status verdict) :error
        (verdict-condition verdict) condition))

(defconstant +shown-value+ 1000
  "Characters of a value, form or message of a test.")

(defun cut-text (text)
  "Return TEXT, of which not too much is shown."
  (if (> (length text) +shown-value+)
      (format nil "~A[... ~D characters omitted]" (subseq text 0 +shown-value+) (- (length text) +shown-value+))
      text))

(defun shown-form (form)
  "Return how FORM is shown, as a string of bounded length: as one would write it, in one line."
  (shown-text form :downcase))

(defun shown-text (object &optional (case :upcase))
  "Return how OBJECT, a value, is shown, as a string of bounded length; symbols in CASE."
  (with-server-syntax (:length 50 :level 8)
    (setf *print-pretty* t
          *print-right-margin* most-positive-fixnum
          *print-case* case)
    ;; Print methods of the user's may not end.
    (or (call-with-time-limit
         +report-seconds+
         (lambda ()
           (guarded (cut-text (if (and (stringp object) (> (length object) (* 2 +shown-value+)))
                                  (format nil "~S… (~D characters)" (subseq object 0 +shown-value+) (length object))
                                  (prin1-to-string object)))
               (failure)
             nil)))
        (format nil "#<unprintable ~A>" (type-name-text (class-name-of object))))))

(defun report-text (condition)
  "Return what CONDITION reports, as a string of bounded length."
  (with-server-syntax (:length 50 :level 8)
    (or (call-with-time-limit
         +report-seconds+
         (lambda ()
           (guarded (cut-text (let ((*print-escape* nil)) (princ-to-string condition)))
               (failure)
             "(the condition's report failed)")))
        "(the condition's report does not end)")))

(defun new-verdict (test)
  "Return a verdict for TEST of the framework."
  (let ((name (framework-test-name *framework* test)))
    (make-verdict :framework (framework-title *framework*)
                  :name name
                  :title (if (stringp name) name (type-name-text name)))))

(defun failed-p (verdict)
  "True when VERDICT is that of a test that failed."
  (member (verdict-status verdict) '(:failed :error)))

(defun test-operation-p (verdict)
  "True when VERDICT is that of a test operation that is one test."
  (string= "ASDF" (verdict-framework verdict)))

;;; A run of tests

(defstruct (guard (:copier nil) (:predicate nil))
  "What watches over a test while it runs."
  ;; When it is to be ended, in milliseconds.
  (deadline 0 :type real)
  ;; A function that ends it, for a reason.
  (leave nil :type (or null function))
  ;; The function by which the test's thread is interrupted, once it was.
  (interruption nil :type (or null function))
  (verdict nil :read-only t))

(defstruct (test-run (:copier nil) (:predicate nil))
  "A run of tests."
  (thread sb-thread:*current-thread* :read-only t)
  ;; The one that symbols are printed in.
  (package (current-package) :read-only t)
  ;; Milliseconds that a test may take.
  (limit 60000 :type (integer 1) :read-only t)
  ;; Titles of tests that are known to take longer.
  (endless '() :type list :read-only t)
  (verdicts (make-array 0 :adjustable t :fill-pointer t) :read-only t)
  ;; The innermost one that is on the stack.
  (guard nil :type (or null guard))
  ;; The system whose tests these are, as it was asked for, where there are several.
  (system nil :type (or null string) :read-only t)
  ;; The systems that the tests are in, once they are known; and how long all of it took, once it is over.
  (systems '() :type list)
  (milliseconds nil :type (or null integer))
  ;; A COVERAGE, and the systems that are compiled for it, where that is asked for.
  (coverage nil)
  (covered '() :type list)
  ;; How many errors were pushed, when the run began, and the milliseconds that went into looking at them.
  (errors 0 :type index)
  (begun (monotonic-milliseconds) :read-only t)
  (looking 0 :type real)
  ;; Until when, in milliseconds, a test is being ended for the heap, its garbage included.
  (ending-for-heap 0 :type real))

(declaim (type (or null test-run) *test-run*))
(defvar *test-run* nil
  "The run of tests that this thread does, or NIL.")

(defvar *verdict* nil
  "What is known so far of the test that this thread runs, or NIL.")

(defconstant +watch-interval+ 1/20
  "Seconds between two looks at whether a test takes too long.")
(defconstant +unwind-milliseconds+ 5000
  "How long a test that is ended may take for its cleanup forms, before it is ended once more.")

(defconstant +endless-milliseconds+ 10000
  "How long a test may take that is known to take longer than it may.")

(defun test-limit (run verdict)
  "Return the milliseconds that the test of VERDICT may take in RUN."
  (if (member (verdict-title verdict) (test-run-endless run) :test #'equal)
      (min +endless-milliseconds+ (test-run-limit run))
      (test-run-limit run)))

(defun watch-tests (run)
  "End the test of RUN that is on the stack if it takes too long. Called by a timer."
  (let ((guard (test-run-guard run))
        (now (monotonic-milliseconds)))
    (when (and guard (> now (guard-deadline guard)))
      (setf (guard-deadline guard) (+ now +unwind-milliseconds+))
      (interrupt-once (test-run-thread run)
                      (or (guard-interruption guard)
                          (setf (guard-interruption guard)
                                (lambda () (end-overdue-test run guard (frame-pointer-here)))))))))

(defun end-overdue-test (run guard hook)
  "End the test that GUARD watches over, if it still runs. Called by an interruption, in the function with frame pointer
HOOK. It unwinds without a condition, which handlers would swallow."
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
  "End the test of RUN that GUARD watches over: the heap is nearly used up. Called in the function with frame pointer HOOK.
Return when a test is being ended for that already: its error would be lost, or the test around it be taken for the one
that fills the heap."
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
  "Tell the host that this evaluation does STEP, a string, from here on: after MILLISECONDS it is interrupted, and if it lets
nothing interrupt it, the image is given up."
  (event *job-id* (event-code :step) (ceiling milliseconds) step))

(defun test-step (verdict)
  "Return what the test of VERDICT is called among all that an evaluation does."
  (concatenate 'text (if (test-operation-p verdict) "the " "the test ") (verdict-title verdict)))

(defun announce-test (guard)
  "Tell the host that the test that GUARD watches over runs, which is ended here when its time is over, if it can be; with
NIL, that there is none."
  (if guard
      (announce-step (test-step (guard-verdict guard))
                     (max 0 (+ (- (guard-deadline guard) (monotonic-milliseconds)) (* 2 +unwind-milliseconds+))))
      (event *job-id* (event-code :step))))

(defun call-with-test-run (run function)
  "Return the values of FUNCTION, which runs tests in RUN."
  ;; Not in this thread, as without THREAD: what a test does to that is not to stop the timer, which is scheduled anew where
  ;; its function has run.
  (let ((timer (sb-ext:make-timer (lambda () (watch-tests run)) :name "test limits" :thread nil)))
    (unwind-protect
         (progn
           (sb-ext:schedule-timer timer +watch-interval+ :repeat-interval +watch-interval+)
           (let ((*test-run* run)
                 (*verdict* nil)
                 ;; What tests warn of is output of theirs.
                 (*recording* nil)
                 (*machinery-directories* (framework-directories)))
             (call-with-signal-observer #'observe-test-error function)))
      (sb-ext:unschedule-timer timer))))

(defun call-covered (verdict function)
  "Return the values of FUNCTION, which runs the test of VERDICT for the first time; that gets the marks set by it."
  (declare (type function function))
  (cond ((or (null *coverage*) (verdict-marks verdict)) (funcall function))
        (t
         (forget-marks)
         (unwind-protect (funcall function)
           (setf (verdict-marks verdict) (set-marks))))))

(defun call-as-test (verdict function)
  "Call FUNCTION, which runs a test, and return a list of its values. However it ends, VERDICT says so and belongs to the
run: by itself, after too long, in the debugger, or by a non-local exit, as of a thread that is ended. An evaluation that is
interrupted stays so."
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
                                                    (lambda (stream) (write-string "Give up this test." stream))))
                    (sb-kernel:*restart-clusters* (cons (list abort) sb-kernel:*restart-clusters*)))
               (let* ((guard (make-guard :deadline (+ start (test-limit run verdict)) :leave #'leave :verdict verdict))
                      (*end-part-for-heap* (lambda (hook) (end-test-for-heap run guard hook))))
                 (setf (test-run-guard run) guard)
                 (announce-test guard)
                 (with-boundary ()
                   (setf values (multiple-value-list (call-covered verdict function)))))
               (setf how :returned)))
        (let ((end (monotonic-milliseconds)))
          (setf (test-run-guard run) outer
                (verdict-milliseconds verdict) (+ (verdict-milliseconds verdict) (- end start)))
          (when outer
            (setf (guard-deadline outer) (+ end left)))
          (announce-test outer))
        ;; What would leave more than the test: the end of the thread, a throw to whoever ran the run.
        (when (and (eq how :left) (not *failed*))
          (return-from test))))
    (unless (eq how :returned)
      (end-abnormally verdict how))
    (when (eq how :heap)
      (setf (test-run-ending-for-heap run) (+ (monotonic-milliseconds) +unwind-milliseconds+))
      (clear-up-after-part (test-step verdict))
      (setf (test-run-ending-for-heap run) 0)
      ;; What was said meanwhile does not count.
      (announce-test outer))
    values))

(defun end-abnormally (verdict how)
  "Have VERDICT say that the test ended, HOW, by something else than itself."
  (ecase how
    (:timeout (setf (verdict-status verdict) :failed))
    (:heap (setf (verdict-status verdict) :error))
    (:debugger (setf (verdict-status verdict) :error))
    (:aborted (setf (verdict-status verdict) :error
                    (verdict-message verdict) "It invoked the restart ABORT."))
    (:left (setf (verdict-status verdict) :error
                 (verdict-message verdict) "It was left by a non-local exit, as when a thread is ended."))))

(defun note-removed (verdict)
  "Have VERDICT say that its test was no longer there when it was to be run."
  (setf (verdict-status verdict) :error
        (verdict-message verdict) "It could not run: a test before it has removed it."))

(defun conclude (verdict)
  "Have VERDICT, of a test that is over, belong to the run, and push the error that it ended with."
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

;;; Errors of tests, where they are signalled

(defstruct (signalled (:copier nil) (:predicate nil))
  "An error where it was signalled."
  (condition nil :read-only t)
  ;; What the test had run by then, as SET-MARKS returns it, where that is asked for.
  (marks nil :type (or null simple-bit-vector) :read-only t)
  (type "" :type string :read-only t)
  ;; What is to be shown of the frames, and how many there are.
  (calls '() :type list :read-only t)
  (total 0 :type index :read-only t))

(defconstant +signalled-errors+ 4
  "How many errors that a test handles are kept until it is over: the last ones.")
(defconstant +looking-share+ 1/25
  "The share of a run's time that may go into looking at errors, so that many that are handled do not slow it down.")
(defconstant +looking-milliseconds+ 10
  "The time that may in any case, as this thread uses it: others are not to use it up.")
(defconstant +pushed-errors+ 50
  "The errors of a run that go into the history.")

(defun may-look-p (run)
  "True when RUN may take the time to look at another error."
  (<= (test-run-looking run)
      (+ +looking-milliseconds+
         (* +looking-share+ (- (monotonic-milliseconds) (test-run-begun run))))))

(defun note-signalled-error (verdict condition type frame)
  "Keep CONDITION, of TYPE, a string, and what is on the stack from FRAME out, with VERDICT."
  (multiple-value-bind (frames total) (guarded (user-frames frame) (failure) (values '() 0))
    (let ((marks (and *coverage* (set-marks)))
          (calls (call-unmarked (lambda ()
                                  (loop for (number . frame) in frames
                                        collect (frame-call number frame condition :outlives t))))))
      (extend-machinery calls)
      (let ((signalled (cons (make-signalled :condition condition :marks marks :type type :calls calls :total total)
                             (verdict-signalled verdict))))
        (setf (verdict-signalled verdict)
              (subseq signalled 0 (min (length signalled) +signalled-errors+)))))))

(defun observe-test-error (condition hook clusters)
  "Keep CONDITION, which an observer is called for with HOOK and CLUSTERS, with the test that runs: a framework may handle
it."
  (declare (ignore clusters))
  (let ((verdict *verdict*)
        (run *test-run*))
    (when (and verdict run
               (not (framework-condition-p condition))
               (may-look-p run))
      (let ((start (thread-milliseconds)))
        (note-signalled-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (incf (test-run-looking run) (- (thread-milliseconds) start))))))

(defun note-debugger (verdict condition hook)
  "Note that CONDITION, of the test of VERDICT, entered the debugger through the function with frame pointer HOOK."
  (setf (verdict-condition verdict) condition)
  (unless (or (typep condition 'storage-condition)
              (find condition (verdict-signalled verdict) :key #'signalled-condition))
    (guarded (note-signalled-error verdict condition (type-name-text (class-name-of condition)) (error-frame hook))
        (failure)
      nil)))

(defun error-of-test (verdict)
  "Return the error that the test of VERDICT ended with, a SIGNALLED, or NIL."
  (let ((condition (verdict-condition verdict))
        (signalled (verdict-signalled verdict)))
    (cond (condition
           (or (find condition signalled :key #'signalled-condition)
               (make-signalled :condition condition :type (type-name-text (class-name-of condition)))))
          ((verdict-message verdict) (find nil signalled :key #'signalled-condition))
          ((eq (verdict-status verdict) :error) (first signalled)))))

(defun outermost-name (name)
  "Return the symbol that the form of the source defines that NAME, a frame's, is a part of: BAR for (LABELS FOO :IN BAR). Or
NIL."
  (loop while (consp name)
        do (let ((in (and (list-length name) (member :in name))))
             (setf name (second (or in name)))))
  (and (symbolp name) name))

(defun push-test-error (verdict)
  "Push the error that the test of VERDICT ended with, if there is one, for the history."
  (let ((signalled (error-of-test verdict)))
    ;; What it ran after that told of the error.
    (when (and signalled (signalled-marks signalled))
      (setf (verdict-marks verdict) (signalled-marks signalled)))
    (when (and signalled (< (test-run-errors *test-run*) +pushed-errors+))
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
                   ;; It is no test, and may be about what was loaded for one.
                   (when (string= "" (verdict-framework verdict))
                     (push-error-details condition))))
          (event *job-id* (event-code :frames) (signalled-total signalled))
          ;; What takes too long is left out, and so is what comes after it.
          (call-with-time-limit
           +capture-seconds+
           (lambda ()
             (when condition
               (guarded (push-slots condition) (failure) nil))
             (push-calls (signalled-calls signalled)))))))))

;;; What is no test

(defun call-outside-tests (title function)
  "Call FUNCTION, TITLE, which is no test. It has a verdict only if it fails."
  (let ((verdict (make-verdict :title title :name title)))
    (call-as-test verdict (lambda ()
                            (handler-case (funcall (the function function))
                              (error (condition) (end-with-condition verdict condition)))))
    (unless (eq :passed (verdict-status verdict))
      (conclude verdict))
    verdict))

(defconstant +loading-milliseconds+ 600000
  "How long a system may take that is loaded for its tests, as the tool load has it.")

(defun load-for-tests (system &optional reload)
  "Load SYSTEM if it is not loaded; with RELOAD, what has changed of it too."
  (when (or reload (not (asdf:component-loaded-p system)))
    (announce-step (concatenate 'text "the loading of " (asdf:component-name system)) +loading-milliseconds+)
    (unwind-protect
         (let ((*recording* t))
           (call-compiling-anew (lambda () (asdf:load-system system))))
      (announce-test (and *test-run* (test-run-guard *test-run*))))))

;;; Files of systems

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
  "Return the packages that files of SYSTEMS define."
  (let ((files (system-files systems)))
    (remove-if-not (lambda (package)
                     (let* ((location (sb-impl::package-source-location package))
                            (file (and location (sb-c:definition-source-location-namestring location))))
                       (and file
                            (not (system-file-p file))
                            (member (sb-ext:native-namestring (parse-namestring file)) files :test #'string=))))
                   (list-all-packages))))

(defun relative-file (file directories)
  "Return the namestring FILE relative to the one of DIRECTORIES, native namestrings, that it is in, or to the working
directory."
  (loop for directory in directories
        when (and (> (length file) (length directory)) (string= directory file :end2 (length directory)))
          return (subseq file (length directory))
        finally (return (shown-path file))))
