;;;; The state of one evaluation, which all of its threads share.

(in-package "SBCL-HOST")

(defun shared-settings ()
  "Return copies of the global values of the variables that all connections share and that affect how forms are read and
files are found. A restored image evaluates the forms that changed these values again. Bindings do not count: a form that
fails within a binding has changed nothing."
  (mapcar (lambda (variable)
            (let ((value (and (boundp variable) (sb-ext:symbol-global-value variable))))
              ;; Functions such as DELETE change the list itself.
              (if (and (consp value) (ignore-errors (list-length value)))
                  (copy-list value)
                  value)))
          '(*features* *default-pathname-defaults* asdf:*central-registry*)))

(declaim (inline make-evaluation))
(defstruct (evaluation (:copier nil) (:predicate nil))
  "The state of one evaluation, shared by its threads."
  ;; The host's number for the evaluation, which is recorded with the functions that the evaluation defines.
  (number 0 :type sb-ext:word)
  ;; The audience of the evaluation's messages, an element of *AUDIENCES*.
  (audience :agent :type symbol)
  ;; The number of changes that the evaluation has made: definitions, removals, and others such as exports. COUNT-CHANGES
  ;; adds the changes of the shared settings.
  (change-count 0 :type sb-ext:word)
  ;; The value of SHARED-SETTINGS after the last change that was counted.
  (settings (shared-settings) :type list)
  ;; The changes that the current form has made, newest first, as lines that FORMAT-CHANGE-LINE returned.
  (changes '() :type list)
  ;; The files that NOTE-RELOADED-FILE has recorded for the current form, newest first: conses of the native namestring and
  ;; true if the image had loaded the file before.
  (reloaded-files '() :type list)
  ;; The systems of which the current form has loaded files, newest first: conses of the name and true if the system was loaded
  ;; completely.
  (loaded-systems '() :type list)
  ;; The definitions to report to other connections, newest first, as lists of three elements: the kind, the name, and
  ;; true if the name was defined before. A system that is loaded has one list for all its definitions: :SYSTEM, its
  ;; name and NIL.
  (unannounced-definitions '() :type list)
  ;; Weak pointers to the threads that the evaluation started, newest first. After every 100 threads, pointers to threads
  ;; that have ended are dropped.
  (threads '() :type list)
  (thread-count 0 :type index)
  ;; The process groups of the programs that the evaluation started. Groups without processes are dropped when the next
  ;; program starts.
  (process-groups '() :type list)
  ;; The number of times that END-PROGRAMS has killed the programs.
  (program-kills 0 :type sb-ext:word)
  ;; True once the user has been notified that a program's output is not captured.
  (output-warning-given nil))

(declaim (type (or null evaluation) *evaluation*))
(defvar *evaluation* nil
  "The evaluation to which this thread belongs, or NIL.")

(defvar *held-evaluation* nil
  "The number of the evaluation that is held in this thread, or NIL.")

(defun forget-setting-changes ()
  "Have COUNT-CHANGES ignore the changes of the shared settings that it has not counted yet."
  (setf (evaluation-settings *evaluation*) (shared-settings)))

(defun count-changes ()
  "Return the number of changes that this evaluation has made. If the shared settings have changed since the last call, first
count one change, which another evaluation may have made: a variable does not show which form assigned it."
  (unless (equal (evaluation-settings *evaluation*) (shared-settings))
    (forget-setting-changes)
    (sb-ext:atomic-incf (evaluation-change-count *evaluation*)))
  (evaluation-change-count *evaluation*))

(defun audience ()
  "Return the audience of this thread's messages, an element of *AUDIENCES*."
  (if *evaluation* (evaluation-audience *evaluation*) :agent))

(defun reset-command ()
  "Return the name of the tool or command with which the audience of this thread's messages can reset the session, or NIL if
there is none."
  (and **resets-available**
       (case (audience)
         (:agent "reset-session")
         (:repl ":reset"))))

(defglobal **started-threads-lock** (sb-thread:make-mutex :name "threads of an evaluation")
  "The lock held while the list of an evaluation's threads is changed.")

(defun live-threads (evaluation)
  "Return the threads of EVALUATION that have not ended, newest first."
  (loop for pointer in (evaluation-threads evaluation)
        for thread = (sb-ext:weak-pointer-value pointer)
        when (and thread (sb-thread:thread-alive-p thread))
          collect thread))

(defun note-started-thread (thread evaluation)
  "Record that EVALUATION started THREAD. Keep only a weak pointer to THREAD, because the result of a thread that has ended
may be large."
  (sb-thread:with-mutex (**started-threads-lock**)
    (when (= (evaluation-thread-count evaluation) 100)
      ;; LIVE-THREADS reads the list without the lock.
      (publish (evaluation-threads evaluation) (mapcar #'sb-ext:make-weak-pointer (live-threads evaluation)))
      (setf (evaluation-thread-count evaluation) 0))
    (incf (evaluation-thread-count evaluation))
    (sb-ext:atomic-push (sb-ext:make-weak-pointer thread) (evaluation-threads evaluation))))

;;; The user's threads, whether or not an evaluation started them

(defglobal **evaluation-threads** '()
  "The server's threads that run evaluations, in the foreground and in the background.")

(defun user-threads ()
  "Return the user's threads: all except the threads in **EVALUATION-THREADS** and ephemeral threads such as SBCL's own."
  (remove-if (lambda (thread)
               (or (find thread **evaluation-threads** :test #'eq)
                   (sb-thread::thread-ephemeral-p thread)))
             (sb-thread:list-all-threads)))

(defun interrupt-once (thread function)
  "Make THREAD call FUNCTION, unless THREAD has not yet handled an earlier interruption with FUNCTION. SBCL ends the
process when nine interruptions are pending for one thread."
  (unless (find function (sb-thread::thread-interruptions thread) :test #'eq)
    (ignore-errors (sb-thread:interrupt-thread thread function))))

(defun abort-current-thread ()
  "Abort this thread, as TERMINATE-THREAD does."
  (sb-thread:abort-thread :allow-exit t))

(defun become-main-thread ()
  "Make this thread the main thread (SB-THREAD:MAIN-THREAD), because SBCL's REPL, too, evaluates code in the main thread."
  (unless (eq sb-thread::*initial-thread* sb-thread:*current-thread*)
    (setf sb-thread::*initial-thread* sb-thread:*current-thread*
          (sb-thread:thread-name sb-thread:*current-thread*) "main thread")))

(defun end-threads (threads)
  "Interrupt THREADS so that they unwind and end."
  (dolist (thread threads)
    (interrupt-once thread #'abort-current-thread)))

(defun thread-title (thread)
  "Return the phrase that names THREAD in a sentence."
  (format nil "thread ~A" (or (sb-thread:thread-name thread) "(unnamed)")))

(defun thread-list-text (threads)
  "Return the phrase that names THREADS in a sentence: the first ten threads, and the number of the remaining threads."
  (let ((shown (min 10 (length threads))))
    (format nil "~{~A~^, ~}~@[ and ~D more~]"
            (mapcar #'thread-title (subseq threads 0 shown))
            (and (< shown (length threads)) (- (length threads) shown)))))

(defun await-threads (threads)
  "Wait until THREADS, which END-THREADS has interrupted, have unwound, but no longer than one second."
  (let ((end (+ (get-internal-real-time) internal-time-units-per-second)))
    (dolist (thread threads)
      (let ((left (/ (- end (get-internal-real-time)) internal-time-units-per-second)))
        (ignore-errors (sb-thread:join-thread thread :default nil :timeout (max 0 left)))))))

;;; Temporary files
(defglobal **scratch-directory** nil
  "The native namestring of a directory for temporary files, or NIL. The directory might not exist yet. The host removes
the directory when it ends.")
