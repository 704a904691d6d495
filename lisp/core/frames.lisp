;;;; Where an error happened: the condition, its restarts and its frames, taken on top of the failing frames.

(in-package "SBCL-HOST")

(declaim (type (unsigned-byte 64) *boundary*))
(defvar *boundary* 0
  "Frame pointer of the function that called the user's code: frames at or above this address are the server's.")

(defconstant +all-frames+ 1000
  "A stack of up to this many frames is kept whole; of a deeper one, half as many at either end.")

(defmacro frame-pointer-here ()
  "Return the frame pointer of the function that this stands in."
  '(sap-int (sb-vm::current-fp)))

(defmacro with-boundary (() &body body)
  "Evaluate BODY, so that its frames and nothing below them count as the user's."
  `(let ((*boundary* (frame-pointer-here)))
     ,@body))

(defun frame-address (frame)
  "Return FRAME's frame pointer."
  (sap-int (sb-di::frame-pointer frame)))

;;; Which frames

(defun frame-file (frame)
  "Return the namestring of the file that FRAME's code was compiled from, or NIL for code that was evaluated."
  (sb-di:debug-source-namestring
   (sb-di:code-location-debug-source (sb-di:frame-code-location frame))))

(defun begins-with-p (prefix text)
  "True when the string TEXT begins with the string PREFIX. MISMATCH and STRING= take ten times as long, and this is asked
of every frame."
  (declare (type simple-string prefix text))
  (let ((end (length prefix)))
    (macrolet ((compare ()
                 '(loop for index of-type index from 0 below end
                        always (char= (schar prefix index) (schar text index))))
               (with-kind-of (string &body body)
                 `(etypecase ,string
                    (simple-base-string ,@body)
                    ((simple-array character (*)) ,@body))))
      (and (<= end (length text))
           (with-kind-of text (with-kind-of prefix (compare)))))))

(defun bogus-frame-p (frame)
  "True when FRAME is not a call of a Lisp function."
  (typep (sb-di:frame-debug-fun frame) 'sb-di::bogus-debug-fun))

(defun system-frame-p (frame)
  "True when FRAME is SBCL's own, or foreign."
  (or (bogus-frame-p frame)
      (let ((file (ignore-errors (frame-file frame))))
        (and file (begins-with-p "SYS:" file)))))

(defun host-frame-p (frame)
  "True when FRAME is of the Lisp side of the host."
  (let ((file (and (not (bogus-frame-p frame)) (ignore-errors (frame-file frame)))))
    (and file (begins-with-p "SYS:HOST;" file))))

(defun stand-in-frame-p (frame)
  "True when FRAME is of a function that stands in for one of SBCL's: see STOOD-FOR."
  (member (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '(enter-debugger warn-recorded)))

(defun shown-frame-p (frame)
  "True when FRAME is not the host's own, or stands in for one of SBCL's."
  (or (not (host-frame-p frame))
      (stand-in-frame-p frame)))

(defglobal **null-lexenv** (sb-kernel:make-null-lexenv)
  "What stands for the lexical environment of evaluated forms in their frames: bare SBCL has this there.")

(defun empty-lexenv-p (object)
  "True when OBJECT is a lexical environment in which nothing is bound."
  (and (typep object 'sb-kernel:lexenv)
       (not (or (sb-c::lexenv-funs object) (sb-c::lexenv-vars object)
                (sb-c::lexenv-blocks object) (sb-c::lexenv-tags object)))))

(defun stood-for (name arguments)
  "Return the name and the arguments of the call that a frame stands for which has this NAME and these ARGUMENTS."
  (case name
    (sb-impl::eval-tlf (values 'eval (list (first arguments))))
    (sb-int:simple-eval-in-lexenv
     (values name (substitute-if **null-lexenv** #'empty-lexenv-p arguments)))
    (enter-debugger (values 'invoke-debugger (rest arguments)))
    (warn-recorded
     (destructuring-bind (warn class default datum more) arguments
       (declare (ignore warn default))
       (values (if (eq class 'warning) 'warn 'sb-int:style-warn)
               (cons datum (if (listp more) more '())))))
    (t (values name arguments))))

(defun frame-at (address)
  "Return the frame at ADDRESS, one of this thread's frame pointers."
  (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
        while (and frame (< (frame-address frame) address))
        finally (return frame)))

(defun frame-below (address)
  "Return the frame that called the one at ADDRESS, which is of Lisp and was called by Lisp."
  (let ((frame (int-sap address)))
    ;; As TOP-FRAME does (src/code/debug-int.lisp), which would have to be followed out to there.
    (sb-di::compute-calling-frame (sap-ref-sap frame 0) (sap-ref-sap frame 8) nil)))

(defun named-frame (name frame)
  "Return the frame of the function NAME at FRAME or a few calls out, or NIL."
  (loop for candidate = frame then (sb-di:frame-down candidate)
        repeat 50
        while (and candidate (< (frame-address candidate) *boundary*))
        when (eq name (sb-di:debug-fun-name (sb-di:frame-debug-fun candidate)))
          return candidate))

(defun resolve-hint (frame)
  "Return the frame that SBCL names as the one where the error happened, at FRAME or older, or NIL. The hint is that
frame, or the name of the function that was called to report the error, such as ERROR: a call that counts."
  (let ((hint sb-debug:*stack-top-hint*))
    (cond ((sb-di:frame-p hint) hint)
          ;; Code that ERROR is compiled to within RESTART-CASE.
          ((eq hint 'sb-kernel:with-simple-condition-restarts)
           (or (named-frame 'error frame) (named-frame hint frame)))
          ((and hint (symbolp hint)) (named-frame hint frame)))))

(defun error-frame (hook)
  "Return the frame where the error happened that was reported to the function with frame pointer HOOK. An error in a
handler inherits the hint of the outer one, hence the user's own frames above the hint count as well."
  (let* ((frame (if sb-debug:*stack-top-hint*
                    (frame-below hook)
                    ;; Called by the code itself: the hook's frame stands for that call.
                    (return-from error-frame (frame-at hook))))
         (hint (and frame (resolve-hint frame)))
         (limit (and hint (frame-address hint)))
         (skipped nil))
    (loop while (and frame
                     (< (frame-address frame) *boundary*)
                     (or (host-frame-p frame)
                         (foreign-frame-p frame)
                         (and limit
                              (< (frame-address frame) limit)
                              (system-frame-p frame))))
          do (shiftf skipped frame (sb-di:frame-down frame)))
    ;; What interrupts a thread inherits a hint, too: then the call that reports the error is nearer than that says.
    (if (and skipped frame limit
             (< (frame-address frame) limit)
             (member (sb-di:debug-fun-name (sb-di:frame-debug-fun skipped)) '(error cerror break)))
        skipped
        (below-trap frame))))

(defun foreign-frame-p (frame)
  "True when FRAME is not of Lisp."
  (and (bogus-frame-p frame)
       (not (undefined-function-frame-p frame))))

(defun below-trap (frame)
  "Return the frame that trapped when FRAME is of what the runtime calls for a trap (a signal, an exhausted stack or
heap): there are only the system's frames between it and a foreign one. Else return FRAME."
  (let ((foreign (loop with last = nil
                       for candidate = frame then (sb-di:frame-down candidate)
                       repeat 40
                       while (and candidate
                                  (< (frame-address candidate) *boundary*)
                                  (system-frame-p candidate))
                       when (foreign-frame-p candidate) do (setf last candidate)
                       finally (return last))))
    (if foreign
        (sb-di:frame-down foreign)
        frame)))

(defun interrupted-frame (hook)
  "Return the frame that was running when the thread was interrupted and called the function with frame pointer HOOK."
  (let ((frame (or (let ((frame (ignore-errors (sb-di::find-interrupted-frame))))
                     (and frame (> (frame-address frame) hook) frame))
                   (frame-below hook))))
    ;; In a foreign call SBCL finds no more of the innermost frame than that there is one.
    (loop while (and frame (bogus-frame-p frame) (< (frame-address frame) *boundary*))
          do (setf frame (sb-di:frame-down frame)))
    ;; It may be what the runtime calls after a collection.
    (below-trap frame)))

(defun saved-frame-pointers (address)
  "Walk the saved frame pointers from the frame at ADDRESS, which is not counted, to the boundary. Return how many
there are, and the last half of +ALL-FRAMES+ of them as a list of conses of frame pointer and return address."
  (declare (type (unsigned-byte 64) address))
  (let* ((size (floor +all-frames+ 2))
         ;; Nothing is allocated for a frame: there may be millions.
         (callers (make-array size :element-type '(unsigned-byte 64)))
         (return-addresses (make-array size :element-type '(unsigned-byte 64)))
         (end (min *boundary* (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-end*)))
         (count 0))
    (declare (type index count))
    (loop
      (let ((caller (sap-ref-word (int-sap address) 0))
            (return-address (sap-ref-word (int-sap address) 8)))
        (unless (and (< address caller end) (zerop (logand caller 7)))
          (return))
        (setf (aref callers (mod count size)) caller
              (aref return-addresses (mod count size)) return-address
              address caller)
        (incf count)))
    (values count
            (loop for number from (max 0 (- count size)) below count
                  for place = (mod number size)
                  collect (cons (aref callers place) (aref return-addresses place))))))

(defun map-user-backtrace (map-backtrace function &rest options
                           &key (start 0) (from :debugger-frame) (count sb-debug:*backtrace-frame-count*))
  "What MAP-BACKTRACE, SBCL's function, does with FUNCTION and the other arguments: for the frames of the user's code
alone, where that is called by the host."
  (declare (type function function))
  (if (zerop *boundary*)
      (apply (the function map-backtrace) function options)
      (loop with index = -1
            with result = nil
            for frame = (if (sb-di:frame-p from) from (sb-debug::backtrace-start-frame from))
              then (sb-di:frame-down frame)
            while (and frame (< (frame-address frame) *boundary*))
            do (when (and (shown-frame-p frame)
                          (>= (incf index) start))
                 (when (= index (+ start count))
                   (return result))
                 (setf result (funcall function frame)))
            finally (return result))))

(defvar *half-made-frames* nil
  "True when the stack was exhausted while a frame was being made, which SBCL then takes for a foreign one.")

(defun user-frames (frame)
  "Return the frames from FRAME out to the boundary, innermost first, as a list of conses of number and frame, and how
many there are. Of a stack deeper than +ALL-FRAMES+ the middle is missing from the list."
  (let ((frames '())
        (count 0)
        (half (floor +all-frames+ 2)))
    (loop while (and frame (< count +all-frames+) (< (frame-address frame) *boundary*))
          do (unless (or (not (shown-frame-p frame))
                         (and *half-made-frames* (foreign-frame-p frame)))
               (push (cons count frame) frames)
               (incf count))
             (setf frame (sb-di:frame-down frame)))
    (if (or (null frame) (>= (frame-address frame) *boundary*))
        (values (nreverse frames) count)
        (multiple-value-bind (more last) (saved-frame-pointers (frame-address (cdr (first frames))))
          (let ((total (+ count more)))
            (loop with up = (cdr (first frames))
                  for (address . return-address) in last
                  for number from (- total (length last))
                  do (setf up (sb-di::compute-calling-frame (int-sap address) (int-sap return-address) up))
                     (unless up (return))
                     (push (cons number up) frames))
            (values (delete-if (lambda (entry) (<= half (car entry) (- total half 1)))
                               (nreverse frames))
                    total))))))

;;; What a frame says

(defstruct (call (:copier nil) (:predicate nil))
  "What is shown of a frame."
  (number 0 :type index)
  name
  arguments
  location
  ;; True when the function is SBCL's own.
  (system nil)
  ;; Whose machinery it belongs to, a string; or NIL.
  (machinery nil :type (or null string))
  ;; What LOCALS returns.
  (locals '() :type list))

(defconstant +frames-with-locals+ 50
  "Of how many frames the local variables are kept.")

(defun of-the-user-p (symbol)
  "True when SYMBOL is a name that the user gave to a variable."
  (let ((package (symbol-package symbol)))
    (and package
         (plusp (length (symbol-name symbol)))
         (not (eql 3 (mismatch "SB-" (package-name package)))))))

(defun locals (frame)
  "Return the local variables of FRAME, a list of lists of symbol, validity (:VALID, :INVALID when it is dead here, or
:UNKNOWN) and value; none of one of SBCL's own. What SBCL keeps as several variables of one name is one: the innermost that
has a value."
  (let ((function (sb-di:frame-debug-fun frame))
        (location (sb-di:frame-code-location frame))
        (locals '()))
    (when (and (not (system-frame-p frame))
               (sb-di:debug-var-info-available function))
      (dolist (variable (sb-di:ambiguous-debug-vars function "") (nreverse locals))
        (let* ((symbol (sb-di:debug-var-symbol variable))
               (validity (sb-di:debug-var-validity variable location))
               (known (find symbol locals :key #'first)))
          (when (and (of-the-user-p symbol)
                     (or (null known) (eq validity :valid)))
            (setf locals
                  (cons (list symbol validity
                              (when (eq validity :valid)
                                (let ((value (sb-di:debug-var-value variable frame)))
                                  ;; What is on the stack does not outlive it.
                                  (if (sb-debug::stack-allocated-p value)
                                      (sb-debug::replace-dynamic-extent-object value)
                                      value))))
                        (remove known locals :test #'eq)))))))))

(defun in-order-of-code (locals place)
  "Return LOCALS in the order in which their names first occur in the top-level form at PLACE, which may be NIL."
  (let ((text (and (rest locals) place (place-text place))))
    (if text
        (stable-sort (copy-list locals) #'<
                     :key (lambda (local)
                            (or (token-position (symbol-name (first local)) text) most-positive-fixnum)))
        locals)))

(defun ordered-locals (frame)
  "Return what LOCALS does of FRAME, in the order of the code."
  (let ((locals (locals frame)))
    (and locals
         (in-order-of-code locals (guarded (location-place (sb-di:frame-code-location frame)) (failure) nil)))))

(defun undefined-function-frame-p (frame)
  "True when FRAME is the one that SBCL puts in place of a call of an undefined function."
  (equal "undefined function" (sb-di:debug-fun-name (sb-di:frame-debug-fun frame))))

(defun standard-syntax-p (character &optional sub-character)
  "True when the readtable has CHARACTER, or CHARACTER and SUB-CHARACTER, mean what they do in the standard one."
  (flet ((meaning (readtable)
           (if sub-character
               (get-dispatch-macro-character character sub-character readtable)
               (get-macro-character character readtable))))
    ;; CHARACTER may dispatch no more.
    (eq (ignore-errors (meaning *readtable*)) (meaning sb-impl::*standard-readtable*))))

(defun skip-blank (stream)
  "Skip whitespace and comments of STREAM, but none that does not end, or whose syntax is the user's own."
  (loop
    (case (peek-char t stream nil)
      (#\; (if (standard-syntax-p #\;)
               (read-line stream nil)
               (return)))
      (#\# (let ((start (file-position stream)))
             (unless (and (standard-syntax-p #\# #\|) (skip-block-comment stream))
               (file-position stream start)
               (return))))
      (t (return)))))

(defun skip-block-comment (stream)
  "Skip the block comment of STREAM that begins here. Return true when one did, and ended."
  (read-char stream)
  (when (eql #\| (peek-char nil stream nil))
    (let ((depth 0)
          (last #\#))
      (loop for character = (read-char stream nil)
            while character
            do (cond ((and (char= last #\#) (char= character #\|))
                      (incf depth)
                      (setf last #\Space))
                     ((and (char= last #\|) (char= character #\#))
                      (setf last #\Space)
                      (when (zerop (decf depth))
                        (return t)))
                     (t (setf last character)))))))

(defvar *machinery-directories* '()
  "Directories with files of other machinery: conses of a native namestring and a phrase, as FRAME-MACHINERY returns it.")

(defun local-function-of (name)
  "Return the name of the function that one of this NAME, as frames have it, is a local one of; else NAME."
  (if (consp name) (second (member :in name)) name))

(defun frame-machinery (frame)
  "Return whose machinery FRAME is a part of that brings code to be run, as a phrase; or NIL."
  (let ((file (and (not (bogus-frame-p frame)) (frame-file frame))))
    (flet ((of-p (prefix) (and file (begins-with-p prefix file))))
      (cond ((assoc-if #'of-p *machinery-directories*)
             (cdr (assoc-if #'of-p *machinery-directories*)))
            ((not (of-p "SYS:")) nil)
            ((or (of-p "SYS:SRC;CODE;TARGET-SIGNAL") (of-p "SYS:SRC;CODE;FLOAT-TRAP.") (of-p "SYS:SRC;CODE;INTERR.")
                 (of-p "SYS:SRC;CODE;TIMER.")
                 (eq 'sb-thread::run-interruption
                     (local-function-of (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))))
             "signal handling")
            ((or (of-p "SYS:SRC;CODE;READER.") (of-p "SYS:SRC;CODE;SHARPM.")) "the reader")
            ((or (of-p "SYS:SRC;CODE;TARGET-LOAD.") (of-p "SYS:SRC;CODE;LOAD.")) "the loader")
            ((of-p "SYS:SRC;COMPILER;") "the compiler")
            ((of-p "SYS:CONTRIB;ASDF;") "ASDF")))))

(defun reporting-p (call machinery)
  "True when all that CALL does, in front of MACHINERY's frames, is to report its error."
  (or (member (call-name call) '(error cerror sb-kernel:with-simple-condition-restarts sb-c:compiler-error))
      ;; The reader's streams.
      (and (string= machinery "the reader")
           (call-system call)
           (not (member (call-name call) '(eval sb-int:simple-eval-in-lexenv))))))

(defun dispatching-p (call)
  "True when CALL is of what SBCL puts between two functions."
  (or (member (call-name call)
              '(funcall apply sb-int:simple-eval-in-lexenv sb-impl::call-with-loader-package-names
                sb-impl::%with-standard-io-syntax error sb-kernel::%signal))
      (eq 'sb-thread::call-with-recursive-lock (local-function-of (call-name call)))
      (and (consp (call-name call))
           (or (member (first (call-name call)) '(sb-pcl::emf sb-pcl::fast-method sb-pcl::ctor))
               (find-if (lambda (part) (and (symbolp part) (member (symbol-package part)
                                                                   '#.(mapcar #'find-package '("SB-C" "SB-PCL")))))
                        (call-name call))))))

(defun extend-signal-handling (calls)
  "Count as signal handling what the C runtime does of it: the foreign frames further out, as far as where the kernel
called the first of them, which has no name."
  (loop with within = nil
        for call in calls
        for name = (call-name call)
        do (cond ((equal "signal handling" (call-machinery call))
                  (setf within t))
                 ((and within (stringp name))
                  (setf (call-machinery call) "signal handling"
                        within (begins-with-p "foreign function: " name))
                  (when (begins-with-p "foreign function: #x" name)
                    (setf within nil)))
                 (t (setf within nil)))))

(defun extend-machinery (calls)
  "Count as a machinery's what stands between its frames, and what reports its error."
  (extend-signal-handling calls)
  (let* ((front (or (position-if #'call-machinery calls) 0))
         (machinery (and calls (call-machinery (nth front calls)))))
    (when (and machinery (every (lambda (call) (reporting-p call machinery)) (subseq calls 0 front)))
      (loop for call in calls
            repeat front
            do (setf (call-machinery call) machinery))))
  (loop for (call . rest) on calls
        when (call-machinery call)
          do (let ((next (member-if-not (lambda (call) (and (null (call-machinery call)) (dispatching-p call))) rest)))
               (when (and next (call-machinery (first next)))
                 (loop for between on rest
                       until (eq between next)
                       do (setf (call-machinery (first between)) (call-machinery (first next)))))))
  ;; The reader that the loader calls is a part of that, and so is the loader, or the compiler, of ASDF.
  (let ((order '("the reader" "the compiler" "the loader" "ASDF")))
    (loop for (caller call) on (reverse calls)
          while call
          do (when (and (call-machinery call) (call-machinery caller)
                        (< (or (position (call-machinery call) order :test #'string=) (length order))
                           (or (position (call-machinery caller) order :test #'string=) 0)))
               (setf (call-machinery call) (call-machinery caller))))))

(defun outliving-argument (argument)
  "Return ARGUMENT of a call, or what says of what class it was if it is on the stack and gone with that."
  (if (sb-debug::stack-allocated-p argument)
      (sb-debug::make-unprintable-object
       (format nil "dynamic-extent ~A" (type-name-text (class-name-of argument))))
      argument))

(defun frame-call (number frame condition &key outlives)
  "Return what is to be shown of FRAME, number NUMBER of the backtrace of CONDITION. OUTLIVES: also when FRAME is gone."
  (multiple-value-bind (name arguments)
      (guarded (sb-debug::frame-call frame :argument-limit 100)
          (failure)
        (values (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)) '()))
    (make-call :number number
               :name (if (and (undefined-function-frame-p frame) (typep condition 'undefined-function))
                         (cell-error-name condition)
                         name)
               :arguments (if (and outlives (listp arguments))
                              (mapcar #'outliving-argument arguments)
                              arguments)
               :location (and (not (bogus-frame-p frame)) (sb-di:frame-code-location frame))
               :system (system-frame-p frame)
               :machinery (guarded (frame-machinery frame) (failure) nil)
               :locals (when (< number +frames-with-locals+)
                         (guarded (locals frame) (failure) '())))))

(defun print-argument (argument stream)
  "Print ARGUMENT of a call to STREAM."
  (typecase argument
    (sb-kernel:lexenv (write-string (if (empty-lexenv-p argument) "#<NULL-LEXENV>" "#<LEXENV>") stream))
    ;; No method prints these: nothing can fail.
    ((or symbol number character) (prin1 argument stream))
    (t
     (let ((fill (text-stream-fill stream)))
       (guarded (prin1 argument stream)
           (failure)
         ;; Take back what was printed of it, if it is still here.
         (setf (text-stream-fill stream) (min fill (text-stream-fill stream)))
         (write-string "#<unprintable " stream)
         (write-string (type-name-text (class-name-of argument)) stream)
         (write-string ">" stream))))))

(defun push-call (call)
  "Push what is to be shown of a frame."
  (event *job-id* (event-code :frame) (call-number call))
  (with-server-syntax (:length 20 :level 5)
    (push-text (event-code :frame-text)
               (lambda (stream)
                 (write-char #\( stream)
                 (let ((*print-length* nil) (*print-level* nil))
                   (write (call-name call) :stream stream :pretty (equal '(lambda ()) (call-name call))))
                 (let ((arguments (call-arguments call)))
                   (loop while (consp arguments)
                         do (write-char #\Space stream)
                            (print-argument (pop arguments) stream))
                   (when arguments
                     (write-char #\Space stream)
                     (print-argument arguments stream)))
                 (write-char #\) stream))))
  (when (call-machinery call)
    (event *job-id* (event-code :frame-machinery) 0 (call-machinery call)))
  (let ((place (and (call-location call) (guarded (location-place (call-location call)) (failure) nil))))
    (when place
      (event *job-id* (event-code :frame-source) (place-line place) (place-in place))
      (when (place-code place)
        (event *job-id* (event-code :frame-code) 0 (place-code place))))
    (with-server-syntax (:length 20 :level 5)
      (loop for (symbol validity value) in (guarded (in-order-of-code (call-locals call) place)
                                               (failure) (call-locals call))
            do (let ((known (and (eq validity :valid) (shown-before value (call-number call) symbol))))
                 (if known
                     (push-local (event-code :local) (event-code :local-text) symbol :same known)
                     (push-local (event-code :local) (event-code :local-text) symbol validity value)))))))

(defvar *shown-values* nil
  "A hash table from large values that were shown as locals of a frame to frame number and name; :NONE before there is
any; NIL outside a report.")

(defun large-p (value)
  "True when VALUE is likely to take long to be shown."
  (typecase value
    (cons (and (consp (cdr value)) (nthcdr 8 value) t))
    (string nil)
    (vector (> (length value) 8))
    (structure-object (not (system-symbol-p (class-name (class-of value)))))))

(defun shown-before (value frame symbol)
  "Return the sentence that stands for VALUE, of SYMBOL in FRAME, a number, when it was shown in full before. Note that it
is shown now otherwise."
  (when (and *shown-values* (guarded (large-p value) (failure) nil))
    (when (eq *shown-values* :none)
      (setf *shown-values* (make-hash-table :test 'eq)))
    (let ((known (gethash value *shown-values*)))
      (cond (known (format nil "<as ~A in frame ~D>" (cdr known) (car known)))
            (t (setf (gethash value *shown-values*)
                     (cons frame (guarded (prin1-to-string symbol) (failure) (symbol-name symbol))))
               nil)))))

(defun push-calls (calls)
  "Push what is to be shown of frames."
  (with-source-files ()
    (let ((*shown-values* :none))
      (mapc #'push-call calls))))

(defun push-local (begin continue symbol validity value)
  "Push a local variable by events of the kinds BEGIN and CONTINUE. With the validity :SAME, VALUE is what to say of it."
  (event *job-id* begin
         (ecase validity ((:valid :same) 0) (:invalid 1) (:unknown 2))
         (guarded (prin1-to-string symbol) (failure) (symbol-name symbol)))
  (case validity
    (:valid (push-text continue (lambda (stream) (print-argument value stream))))
    (:same (event *job-id* continue 0 value))))

;;; Restarts

(defun restarts-for (condition)
  "Return the restarts that apply to CONDITION. One whose test fails does not."
  (guarded (compute-restarts condition)
      (failure)
    (loop for cluster in sb-kernel:*restart-clusters*
          append (loop for restart in cluster
                       when (guarded (funcall (sb-kernel::restart-test-function restart) condition) (failure) nil)
                         collect restart))))

(defconstant +restarts+ 100
  "Of more restarts than this only the first ones are shown, and the last two: RETRY and ABORT.")

(defun numbered-restarts (restarts)
  "Return those of RESTARTS that are shown, as a list of conses of number, from 1, and restart."
  (loop with last = (- (length restarts) 2)
        for restart in restarts
        for number from 1
        when (or (<= number (- +restarts+ 2)) (> number last))
          collect (cons number restart)))

(defun push-restarts (condition)
  "Push the restarts that apply to CONDITION."
  (loop for (number . restart) in (numbered-restarts (restarts-for condition))
        do (event *job-id* (event-code :restart) number (string (restart-name restart)))
           (with-server-syntax ()
             (let ((*print-escape* nil))
               (push-text (event-code :restart-text) (lambda (stream) (princ restart stream)))))))

;;; The whole of it

(defun push-slots (condition)
  "Push the slots of CONDITION, but those that make up its report."
  (with-server-syntax (:length 20 :level 5)
    (dolist (slot (sb-mop:class-slots (class-of condition)))
      (let ((name (sb-mop:slot-definition-name slot)))
        (when (and (not (member name '(sb-kernel::format-control sb-kernel::format-arguments sb-kernel::references)))
                   (slot-boundp condition name))
          (let ((value (slot-value condition name)))
            ;; A slot of the system's own that holds nothing says nothing.
            (unless (and (null value) (system-symbol-p name))
              (event *job-id* (event-code :slot) 0 (symbol-name name))
              (push-text (event-code :slot-text) (lambda (stream) (print-argument value stream))))))))))

(defmacro with-quiet-debugger (() &body body)
  "Evaluate BODY in the middle of an error as if there were none."
  `(let ((*debugger-hook* nil)
         (sb-debug:*stack-top-hint* nil)
         (sb-kernel::*current-error-depth* 0)
         (*break-on-signals* nil))
     ,@body))

(defvar *form-number* 0
  "The number, from 1, of the form of the submitted code that is read or evaluated; 0 outside an evaluation.")
(defvar *form-start* 0
  "The position in the submitted code where that form begins.")
(defvar *reading* nil
  "The stream of the submitted code while that form is read from it, else NIL.")

(defun report-package ()
  "Return the package in which reports are printed: *PACKAGE*, but for KEYWORD, which the reader binds it to while it reads
the feature expression of #+."
  (let ((package (current-package)))
    (if (eq package (find-package "KEYWORD")) **user-package** package)))

(defvar *capturing* nil
  "True while an error is described: its message, restarts, slots and frames, for which the user's methods are called.")

(defun capture (type report condition find-frame)
  "Push an error of TYPE, a string: what REPORT, a function, pushes of its message, the restarts for CONDITION, and the
frames from the one that FIND-FRAME returns. Return the frames as USER-FRAMES does; and a function that pushes them when
that must wait until the stack is unwound, else NIL."
  (declare (type function report find-frame) (dynamic-extent report find-frame))
  (let ((frame (funcall find-frame))
        (*package* (report-package)))
    (with-quiet-debugger ()
      (event *job-id* (event-code :error) (if *capturing* 1 0) type)
      (let ((*capturing* t))
        (when (plusp *form-number*)
          (event *job-id* (event-code :form) *form-number* (with-server-syntax () (princ-to-string *form-start*))))
        (funcall report)
        (guarded (push-restarts condition) (failure) nil)
        (when condition
          (guarded (push-slots condition) (failure) nil))
        (multiple-value-bind (frames total)
            (let ((*half-made-frames* (typep condition 'storage-condition)))
              (guarded (user-frames frame) (failure) (values '() 0)))
          (event *job-id* (event-code :frames) total)
          (let ((calls (loop for (number . frame) in frames collect (frame-call number frame condition))))
            (extend-machinery calls)
            ;; Printing calls the user's methods, and there may be little stack left for them.
            (cond ((typep condition 'storage-condition)
                   (values frames (lambda ()
                                    (let ((*capturing* t))
                                      (push-calls calls))
                                    nil)))
                  (t (push-calls calls)
                     (values frames nil)))))))))
