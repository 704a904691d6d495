;;;; The functions that an embedding program calls by handle, and the threads that work for the program.

(in-package "SBCL-HOST/EMBEDDING")

;;; The threads

(defglobal **program-input** nil
  "The *STANDARD-INPUT* of the threads that work for the program.")

(defun call-as-program-thread (function)
  "Call FUNCTION with the variable bindings of a thread that works for the program."
  (declare (type function function))
  (let ((*job-id* +program-job+)
        (*message-buffer* (acquire-message-buffer))
        (*thread-output* (make-thread-output))
        (*thread-restarts* sb-kernel:*restart-clusters*)
        (*standard-input* **program-input**)
        (*package* **user-package**)
        ;; All threads of the program use the same readtable object, because any of these threads may serve a call.
        (*readtable* *readtable*)
        (*caller-interruptible* t)
        (* nil) (** nil) (*** nil) (+ nil) (++ nil) (+++ nil) (/ nil) (// nil) (/// nil) (- nil)
        (sb-thread::*interrupt-handler* #'contain-single-interruption))
    (unwind-protect (with-interrupts (funcall function))
      (flush-output)
      (return-message-buffer))))

(defun serve-program (serve number)
  "Let the program use this thread, whose number is NUMBER, until the program no longer needs the thread. SERVE is the
address of the program's function `serve'. This function returns 0 when the program no longer needs the thread, and 1 when
a non-local exit is pending."
  (declare (type (unsigned-byte 64) serve) (type (unsigned-byte 32) number))
  (loop while (plusp (the (signed-byte 32)
                          (calling-host
                           (alien-funcall (sap-alien (int-sap serve) (function (signed 32) (unsigned 32))) number))))
        do (when *pending-exit*
             (resume-unwinding))))

(defun start-program-thread (serve number)
  "Start the program's thread NUMBER, which calls SERVE-PROGRAM with SERVE, the address of the program's function `serve'.
If user code ends the thread, a new thread replaces it (see CALL-WITH-REPLACEMENT)."
  (let ((thread (sb-thread::%make-thread (format nil "program ~D" number) nil (sb-thread:make-semaphore))))
    (publish (svref **program-threads** number) thread)
    (start-host-thread thread
                       (lambda ()
                         (call-with-replacement
                          (lambda () (call-as-program-thread (lambda () (serve-program serve number))))
                          **program-threads**
                          number
                          (lambda () (start-program-thread serve number))))
                       '())))

(defconstant +max-program-threads+ 512
  "Maximum number of threads that work for the program. Equal to MAX_THREADS of src/image/program.rs.")

(declaim (type (unsigned-byte 64) **serve-program-address**))
(defglobal **serve-program-address** 0
  "The address of the program's function `serve'.")

(defun start-spare-thread (number)
  "Start another thread for the program, with the number NUMBER."
  (start-program-thread **serve-program-address** number)
  nil)

(defun start-program-threads (count serve)
  "Start COUNT threads that work for the program, and the thread that interrupts them, number 0. SERVE is the address of
the program's function `serve'."
  (setf **program-threads** (make-array (1+ +max-program-threads+) :initial-element nil)
        **serve-program-address** serve)
  (dotimes (number (1+ count))
    (start-program-thread serve number)))

;;; Input

(defstruct (program-input (:include sb-kernel:ansi-stream
                           (in #'read-program-character)
                           (misc #'operate-program-input))
                          (:constructor make-program-input ())
                          (:copier nil)
                          (:predicate nil))
  "A stream for the program's standard input, which all threads of the program share. TEXT is the part of the input that
was read last, and POSITION is the index of the next character in TEXT. ENDED is true once the end of the input has been
reached."
  (text "" :type text)
  (position 0 :type index)
  (ended nil))

(defun fill-program-input (stream &optional (wait t))
  "Read the next part of STREAM's text from the program, and return true if there is text. If WAIT is NIL and no text has
arrived, return NIL and let the program read in the background; otherwise wait for text or the end of STREAM."
  (declare (type program-input stream))
  (loop
    ;; An interruption between the call and the assignment would lose the text.
    (without-interrupts
      (let ((text (and (not (program-input-ended stream))
                       (allow-with-interrupts
                         (call-program +program-read-input+ (lambda (buffer) (put-object buffer wait 0)))))))
        (cond ((null text)
               (setf (program-input-ended stream) t)
               (return nil))
              ((not (equal text ""))
               ;; Keep the last character, because LISTEN may be called between READ-CHAR and UNREAD-CHAR.
               (let* ((old (program-input-text stream))
                      (end (min (program-input-position stream) (length old)))
                      (last (subseq old (max 0 (1- end)) end)))
                 (setf (program-input-text stream) (concatenate 'text last text)
                       (program-input-position stream) (length last)))
               (return t)))))
    (unless wait
      (return nil))
    ;; This call is being interrupted, but may need the input: cleanup forms run, or interrupts are disabled.
    (sleep 0.001)))

(defun read-program-character (stream end-of-file-error end-of-file-value)
  "Perform READ-CHAR on STREAM."
  (declare (type program-input stream))
  (flet ((next ()
           (let ((position (program-input-position stream)))
             (when (< position (length (program-input-text stream)))
               (setf (program-input-position stream) (1+ position))
               (schar (program-input-text stream) position)))))
    (or (next)
        (and (fill-program-input stream) (next))
        (sb-impl::eof-or-lose stream end-of-file-error end-of-file-value))))

(defun operate-program-input (stream operation argument)
  "Perform a stream operation on STREAM. OPERATION is the code of the operation: LISTEN, UNREAD-CHAR (1), CLOSE, or a
query for the element type or the external format. Other operations do nothing."
  (declare (type program-input stream) (ignorable argument))
  (case operation
    (#.+listen+ (cond ((or (< (program-input-position stream) (length (program-input-text stream)))
                           (fill-program-input stream nil))
                       t)
                      ((program-input-ended stream) :eof)))
    (1 (setf (program-input-position stream) (max 0 (1- (program-input-position stream)))) nil)
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+external-format+ :utf-8)
    (#.+close+ t)))

;;; Calls with a package, a handler or variable bindings

(defvar *program-calls* '()
  "The interruptible calls that this thread is in, innermost first: conses of a call's number and a function that ends
the call. The function's argument is the reason that RUN-PROGRAM-CLOSURE returns for the call.")

(defun idle-program-thread-p (thread)
  "Return true when THREAD works for the program and is in no call."
  (and (typep thread 'sb-thread:thread)
       (program-thread-p thread)
       (null (sb-thread:symbol-value-in-thread '*program-calls* thread nil))))

(defun run-program-closure (number closure &optional (package nil options-p) ask variables values)
  "Make the program run CLOSURE, the number of one of its closures. Bind *PACKAGE* to the package named PACKAGE, or to
COMMON-LISP-USER if PACKAGE is T, unless PACKAGE is NIL. If the caller gives these options, pass errors to the program's
handler only if ASK is true. Bind VARIABLES, a list of symbols, to VALUES.
NUMBER is the number by which INTERRUPT-PROGRAM-CALL finds the call. Return NIL if the call was not ended early. Otherwise
return the reason: the integer REASON of INTERRUPT-PROGRAM-CALL, or 0 if the restart ABORT was invoked."
  (block call
    (flet ((end (reason)
             (return-from call reason))
           (run ()
             (unwind-protect (call-program +program-run+ (lambda (buffer) (put-integer buffer closure)))
               (finish-job-output))))
      (declare (dynamic-extent #'end #'run))
      (let ((*kept-bytes-before-call* (kept-bytes))
            (*program-calls* (acons number #'end *program-calls*))
            ;; If the call changes *PACKAGE*, the change must not affect other calls that this thread serves.
            (*package* *package*)
            (sb-thread::*interrupt-handler* nil))
        (restart-case (if options-p
                          (let ((*handler-available* ask))
                            (when package
                              (setf *package* (if (eq package t) **user-package** (find-package-or-suggest package))))
                            (progv variables values
                              (run)))
                          (run))
          (abort ()
            :report "Return to the program."
            (return-from call 0)))
        nil))))

(defun interrupt-program-call (thread call reason)
  "Interrupt THREAD, a thread or the number of one of the program's threads. If THREAD is still in the call whose number is
CALL, end this call, so that RUN-PROGRAM-CLOSURE returns the integer REASON. Notify the program when THREAD takes the
interruption or turns out to have ended, and when the call begins to unwind."
  (let ((thread (if (integerp thread) (svref **program-threads** thread) thread)))
    (guarded (interrupt-outside-foreign-code
              thread
              (lambda ()
                (event +program-job+ (event-code :interrupted) call)
                (let ((known (assoc call *program-calls*)))
                  (when known
                    (event +program-job+ (event-code :unwinding) call)
                    (funcall (the function (cdr known)) reason)))))
        (failure)
      ;; A thread that has ended cannot be interrupted, so notify the program here.
      (event +program-job+ (event-code :interrupted) call))
    nil))

;;; Evaluating and loading

(defun call-reporting-warnings (function)
  "Return the values of FUNCTION, which compiles code. Report warnings that are signalled meanwhile to the program, as
REPORT-WARNING does. Muffle compiler notes."
  (declare (type function function))
  (handler-bind ((warning #'report-warning)
                 (sb-ext:compiler-note #'muffle-warning))
    (let ((sb-ext:*evaluator-mode* :compile))
      (funcall function))))

(defun report-warning (warning)
  "Report WARNING to the program, unless outer handlers or SBCL would muffle it or WARNING is about a redefinition. Then
muffle WARNING, so that it is not printed."
  (let ((restart (find-restart 'muffle-warning warning)))
    ;; Without the restart, SIGNAL calls the outer handlers after this one.
    (when restart
      (signal warning))
    (unless (typep warning '(or sb-kernel:redefinition-warning (satisfies sb-kernel::muffle-warning-p)))
      ;; The report may print, and may itself report warnings.
      (let ((class (type-name-text (class-name-of warning)))
            (text (with-quiet-debugger () (condition-message warning))))
        (flush-output)
        (event +program-job+ (event-code :warning) 0 class)
        (event +program-job+ (event-code :warning-text) 0 text)))
    (when restart
      (invoke-restart restart))))

(defun evaluate-text (text)
  "Evaluate the forms in TEXT in order and return the values of the last form."
  (let ((*package* *package*)
        (*readtable* *readtable*)
        (stream (make-string-input-stream text))
        (values '()))
    (call-reporting-warnings
     (lambda ()
       (loop for form = (read stream nil stream)
             until (eq form stream)
             do (setf values (multiple-value-list (eval form))))))
    (values-list values)))

(defun load-text (text)
  "Load the forms in TEXT as LOAD loads the forms of a source file."
  (call-reporting-warnings (lambda () (load (make-string-input-stream text))))
  (values))

(defun load-program-file (name)
  "Load the source or fasl file whose native namestring is NAME."
  (call-reporting-warnings (lambda () (load (sb-ext:parse-native-namestring name))))
  (values))

;;; Names as programs spell them

(defun parse-symbol (text)
  "Return the name of the symbol that TEXT spells as in source text: in any case, or between vertical bars. Also return the
package prefix, which is the empty string for a keyword, or NIL if TEXT has no prefix. Signal an error if TEXT does not spell
a symbol."
  (flet ((fail ()
           (error "~S does not spell a symbol: write NAME or PACKAGE:NAME, with vertical bars around spaces, parentheses and ~
                   other characters that cannot be part of a name, as in |a b|."
                  text)))
    (multiple-value-bind (whole colon problem) (read-name text)
      (declare (ignore whole))
      (when problem
        (fail-unfinished-name text problem))
      (let ((start (if colon
                       ;; The name begins after one or two colons.
                       (position #\: text :start colon :test #'char/=)
                       0)))
        (unless (and start
                     (plusp (length text))
                     ;; The reader takes # at the start for reader syntax, as in #:NAME.
                     (char/= #\# (char text 0))
                     (<= start (+ 2 (or colon 0)))
                     (eql (length text) (catch 'scan-failed (token-end text 0))))
          (fail))
        (multiple-value-bind (name second-colon) (read-name (subseq text start))
          (when second-colon
            (fail))
          (values name (and colon (subseq text 0 colon))))))))

(defun prefix-package (prefix)
  "Return the package that PREFIX, the second value of PARSE-SYMBOL, designates, or NIL if there is no such package."
  (cond ((null prefix) *package*)
        ((string= prefix "") (find-package "KEYWORD"))
        (t (or (find-package-leniently prefix)
               (find-package (read-name prefix))))))

(defun symbol-named (text)
  "Return the symbol that TEXT spells (see PARSE-SYMBOL). If TEXT has no package prefix, look in *PACKAGE*. Signal an error if
there is no such symbol."
  (multiple-value-bind (name prefix) (parse-symbol text)
    (let ((package (or (prefix-package prefix) (find-package-or-suggest prefix))))
      (multiple-value-bind (symbol status) (find-symbol name package)
        (if status
            symbol
            (error 'sb-kernel:simple-package-error
                   :package package
                   :format-control "There is no symbol ~A in package ~A."
                   :format-arguments (list name (package-name package))))))))

(defun split-function-name (text)
  "Return the part of TEXT, the text of a function name, that spells a symbol. Return T as the second value if the function
name is a list (SETF symbol)."
  (flet ((trim (text)
           (string-trim '(#\Space #\Newline #\Tab) text)))
    (let* ((text (trim text))
           (last (1- (length text))))
      (if (and (eql 5 (mismatch "(setf" text :test #'char-equal))
               (< 5 last)
               (whitespace-p (char text 5))
               (char= #\) (char text last)))
          (values (trim (subseq text 6 last)) t)
          (values text nil)))))

(defun parse-function-name (text)
  "Return the function name that TEXT spells: a symbol, or a list (SETF symbol)."
  (multiple-value-bind (symbol-text setf) (split-function-name text)
    (let ((symbol (symbol-named symbol-text)))
      (if setf (list 'setf symbol) symbol))))

;;; Functions by name

(defun find-named-function (text)
  "Return a function designator for the function that TEXT names. Calls through the designator follow redefinitions of
the function. Signal an error if TEXT names no function."
  (let ((name (parse-function-name text)))
    (cond ((and (symbolp name) (or (macro-function name) (special-operator-p name)))
           (error "~A is ~:[a special operator~;a macro~], not a function." text (macro-function name)))
          ((not (fboundp name)) (error 'undefined-function :name name))
          ((symbolp name) name)
          (t (make-function-caller name)))))

(defun make-function-caller (name)
  "Return a function that passes its arguments to the function named NAME, a list such as (SETF FOO). The function named
NAME is looked up at each call."
  (lambda (&rest arguments)
    (apply (fdefinition name) arguments)))

(defun current-thread ()
  "Return the current thread."
  sb-thread:*current-thread*)

(defun resolve-callee (object)
  "Return T when OBJECT is a function or a symbol, which can be called as it is. When OBJECT is a function name of the
form (SETF symbol), return a function that calls the function with this name. Return NIL for any other object."
  (typecase object
    ((or function symbol) t)
    ((cons (eql setf) (cons symbol null)) (make-function-caller object))))

;;; Functions that the program defines

(defun larger-tree-p (tree limit)
  "Return true when TREE has more than LIMIT conses. A tree that contains itself has no end."
  (declare (type fixnum limit))
  (labels ((walk (tree)
             (loop while (consp tree)
                   do (when (minusp (decf limit))
                        (return-from larger-tree-p t))
                      (walk (pop tree)))))
    (walk tree)
    nil))

(defun read-single-form (text package)
  "Return the only form in TEXT, read in PACKAGE. Signal an error if TEXT has another form, or the form contains itself."
  (let ((form (with-standard-io-syntax
                (let ((*package* package)
                      (*read-eval* nil))
                  (with-input-from-string (stream text)
                    (prog1 (read stream)
                      (unless (eq stream (read stream nil stream))
                        (error "more text follows the closing parenthesis."))))))))
    ;; A character of TEXT makes at most two conses: 'X is (QUOTE X).
    (when (larger-tree-p form (* 2 (length text)))
      (error "it contains itself. Write it without #n= and #n#."))
    form))

(defun read-lambda-list (text package name)
  "Return the lambda list in TEXT with its variables interned in PACKAGE. A symbol that is not a variable is replaced by
the symbol of COMMON-LISP with the same name, if there is one. NAME, the name of the function, is for error messages."
  (handler-bind ((error (lambda (failure)
                          (error "~A cannot be defined: ~A is not a lambda list: ~A"
                                 name text
                                 (if (typep failure 'end-of-file)
                                     "a parenthesis, quotation mark or vertical bar in it is not closed."
                                     ;; Print FAILURE now: it may refer to a stream with dynamic extent.
                                     (princ-to-string failure))))))
    (let ((lambda-list (read-single-form text package))
          (variables '()))
      (labels ((standard (symbol)
                 (or (find-symbol (symbol-name symbol) "COMMON-LISP") symbol))
               (resolve (form)
                 (cond ((consp form) (cons (resolve (car form)) (resolve (cdr form))))
                       ((or (null form) (not (symbolp form)) (member form variables)) form)
                       (t (standard form))))
               (parameter (parameter)
                 (cond ((consp parameter)
                        (push (if (consp (first parameter)) (second (first parameter)) (first parameter)) variables)
                        (cons (first parameter) (resolve (rest parameter))))
                       ((eql 0 (position #\& (symbol-name parameter))) (standard parameter))
                       (t (push parameter variables)
                          parameter))))
        (mapcar #'parameter lambda-list)))))

(defun parameter-variables (lambda-list)
  "Return the variables of LAMBDA-LIST's parameters, in order."
  (loop for parameter in (ldiff lambda-list (member '&aux lambda-list))
        unless (member parameter lambda-list-keywords)
          collect (let ((name (if (consp parameter) (first parameter) parameter)))
                    (if (consp name) (second name) name))))

(defstruct (program-function (:copier nil) (:predicate nil))
  "A definition of one of the program's functions. NUMBER is the number of the function in the program, and becomes NIL
when the function is redefined, and when an image that contains the definition is booted. FUNCTION is the function that
Lisp calls."
  (number nil :type (or null (unsigned-byte 62)))
  (function #'identity :type function))

(defstruct (newest-definition (:copier nil) (:predicate nil))
  "The newest definition of a function name: FUNCTION, or NIL before the first definition. The functions of all definitions
of the name refer to this object."
  (function nil :type (or null program-function)))

(defglobal **program-functions** (make-hash-table :test 'equal :synchronized t :weakness :value)
  "A table from function names to their NEWEST-DEFINITIONs. An entry disappears when Lisp can call no definition of the name,
for example after the name's package was deleted.")

(declaim (type list **program-function-numbers**))
(defglobal **program-function-numbers** '()
  "For each of the program's functions that Lisp may call, a cons of its number and a weak pointer to its PROGRAM-FUNCTION.
Changed under the lock of **PROGRAM-FUNCTIONS**.")

(defun ensure-newest-definition (function-name)
  "Return the NEWEST-DEFINITION of FUNCTION-NAME. If there is none, make it."
  (without-interrupts
    (sb-ext:with-locked-hash-table (**program-functions**)
      (or (gethash function-name **program-functions**)
          (setf (gethash function-name **program-functions**) (make-newest-definition))))))

(defun unused-program-functions (replaced)
  "Return the elements of **PROGRAM-FUNCTION-NUMBERS** for REPLACED, a PROGRAM-FUNCTION or NIL, and for the functions that a
garbage collection has found to be unreachable."
  (remove-if (lambda (known)
               (let ((function (sb-ext:weak-pointer-value (cdr known))))
                 (and function (not (eq function replaced)))))
             **program-function-numbers**))

(defglobal **boot-token** nil
  "An object that identifies this boot of the image.")

(defun fail-missing-function (name)
  "Signal that the program that booted this image does not have the function NAME, a string, although the program that
saved the image had it."
  (fail-program-call 'rust:host-error
                     (list name "the program that saved this image defined this function, but this program does not")))

(defun forget-program-functions ()
  "Clear the numbers of all program functions that were defined before this boot: in the current program, these numbers
may belong to other functions. Set a new **BOOT-TOKEN**, so that local functions of earlier boots fail, too."
  (loop for newest being the hash-values of **program-functions**
        for function = (newest-definition-function newest)
        when function
          do (setf (program-function-number function) nil))
  (setf **program-function-numbers** '()
        **boot-token** (list nil)))

(defun define-program-function (number name lambda-list documentation shapes)
  "Define a Lisp function that calls the program's function NUMBER. NAME, a string, spells the name of the Lisp function: a
symbol, or a list (SETF symbol). LAMBDA-LIST is a string with the lambda list, and DOCUMENTATION is the documentation string.
SHAPES is a list with a shape (see PUT-OBJECT) for each variable of the lambda list. Create the package that NAME mentions if
it does not exist, and export the symbol unless its package is COMMON-LISP-USER. Notify the program when the function is
defined. If the definition fails, new symbols and a new package remain, as after a DEFUN that fails."
  (multiple-value-bind (symbol-text setf) (split-function-name name)
    (multiple-value-bind (bare-name prefix) (parse-symbol symbol-text)
      (let* ((package (or (prefix-package prefix) (make-package (read-name prefix) :use '())))
             ;; A keyword cannot be a variable, and a locked package accepts no new symbols.
             (variable-package (if (or (eq package (find-package "KEYWORD")) (sb-ext:package-locked-p package))
                                   **user-package**
                                   package))
             (symbol (intern bare-name package))
             (function-name (if setf (list 'setf symbol) symbol))
             (lambda-list (read-lambda-list lambda-list variable-package name))
             (variables (parameter-variables lambda-list))
             (newest (ensure-newest-definition function-name))
             (cell (make-program-function :number number)))
        (unless (= (length variables) (length shapes))
          (error "~A has ~D parameter~:P in its lambda list, ~:S, but ~D in Rust." name (length variables) lambda-list
                 (length shapes)))
        (setf (program-function-function cell)
              (compile-program-function function-name lambda-list documentation cell newest variables shapes name))
        (unless (eq package **user-package**)
          (export symbol package))
        ;; CALL-PROGRAM needs this room, and must not fail after the function has been replaced.
        (check-stack-room 16384 16384)
        ;; Signal an error for a locked package here: while the table is locked, a handler that waits for another definition
        ;; would wait forever.
        (sb-kernel::with-single-package-locked-error (:symbol symbol "setting fdefinition of ~A")
          (without-interrupts
            (sb-ext:with-locked-hash-table (**program-functions**)
              (let* ((before (newest-definition-function newest))
                     (unused (unused-program-functions before))
                     (numbers (acons number (sb-ext:make-weak-pointer cell)
                                     (set-difference **program-function-numbers** unused :test #'eq))))
                (setf (fdefinition function-name) (program-function-function cell)
                      (newest-definition-function newest) cell
                      **program-function-numbers** numbers)
                (call-program +program-defined+
                              (lambda (buffer)
                                (put-integer buffer number)
                                (loop for (unused-number) in unused
                                      do (put-integer buffer unused-number))))
                (when before
                  (setf (program-function-number before) nil))))))
        (setf (documentation function-name 'function) documentation)
        nil))))

(defun add-supplied-p-variables (lambda-list)
  "Return LAMBDA-LIST with a supplied-p variable for each optional and keyword parameter, and a list of forms. Each form
evaluates to a list; the concatenation of these lists contains the arguments with which the function was called."
  (let ((kind '&required)
        (forms '()))
    (flet ((parameter (parameter)
             (cond ((member parameter lambda-list-keywords)
                    (setf kind parameter))
                   ((eq kind '&required)
                    (push `(list ,parameter) forms)
                    parameter)
                   ((eq kind '&rest)
                    (push parameter forms)
                    parameter)
                   ((member kind '(&optional &key))
                    (destructuring-bind (variable &optional default (given (gensym "GIVEN")))
                        (if (consp parameter) parameter (list parameter))
                      (let ((name (if (consp variable) (second variable) variable)))
                        (cond ((eq kind '&optional)
                               (push `(and ,given (list ,name)) forms))
                              ((not (member '&rest lambda-list))
                               (let ((keyword (if (consp variable) (first variable) (sb-int:keywordicate variable))))
                                 (push `(and ,given (list ',keyword ,name)) forms)))))
                      (list variable default given)))
                   (t parameter))))
      (values (mapcar #'parameter lambda-list) (reverse forms)))))

(defun call-newest-definition (cell newest name arguments)
  "Call the function of NEWEST, a NEWEST-DEFINITION, with ARGUMENTS. The program no longer has the function of CELL, a
definition of the same name. If no newer definition exists, signal an error that mentions NAME."
  (let ((function (without-interrupts
                    (sb-ext:with-locked-hash-table (**program-functions**)
                      (newest-definition-function newest)))))
    (if (or (null function) (eq function cell))
        (fail-missing-function name)
        (apply (program-function-function function) arguments))))

(defun compile-program-function (function-name lambda-list documentation cell newest variables shapes name)
  "Return a function called FUNCTION-NAME, with LAMBDA-LIST and DOCUMENTATION, that calls the program's function whose number
is in CELL, a PROGRAM-FUNCTION. The returned function sends the values of VARIABLES, each in its shape from SHAPES. If the
program no longer has the function, the function of NEWEST, a NEWEST-DEFINITION, is called. NAME is for the error message
if there is none."
  (multiple-value-bind (full-lambda-list arguments) (add-supplied-p-variables lambda-list)
    (multiple-value-bind (function warnings failure)
        (handler-bind ((warning #'muffle-warning)
                       (sb-ext:compiler-note #'muffle-warning))
          (let ((*error-output* (make-broadcast-stream)))
            (compile nil
                     `(sb-int:named-lambda ,function-name ,full-lambda-list
                        ,documentation
                        (declare (optimize speed (debug 1) (safety 1)))
                        (flet ((call-newest ()
                                 (call-newest-definition ',cell ',newest ,name (append ,@arguments))))
                          (declare (dynamic-extent #'call-newest))
                          (let ((number (program-function-number ',cell)))
                            (if number
                                (call-program number
                                              (lambda (buffer)
                                                ,@(loop for variable in variables
                                                        for shape in shapes
                                                        collect `(put-argument buffer ,variable ,shape)))
                                              #'call-newest)
                                (call-newest))))))))
      (declare (ignore warnings))
      (when failure
        (error "~A cannot be defined: its lambda list ~:S does not compile." name lambda-list))
      (setf (sb-kernel:%fun-lambda-list function) lambda-list)
      function)))

(defun make-local-function (number required shapes)
  "Return a function that calls the program's function NUMBER with its arguments, each in its shape from SHAPES. The
function takes at least REQUIRED arguments and at most as many as there are shapes. If the image is saved and booted again,
later calls of the function signal an error."
  (declare (type index required) (type list shapes))
  (let ((boot **boot-token**))
    (lambda (&rest arguments)
      (unless (<= required (length arguments) (length shapes))
        (error 'sb-int:simple-program-error
               :format-control "invalid number of arguments: ~D"
               :format-arguments (list (length arguments))))
      (if (eq boot **boot-token**)
          (call-program number
                        (lambda (buffer)
                          (loop for shape in shapes
                                do (put-object buffer (pop arguments) shape))))
          (fail-program-call 'rust:host-error
                             '("a local function"
                               "its closure is in the program that saved this image, and this program does not have it"))))))

;;; Operations on objects that the program refers to by handle

(defun same-by-test-p (test one other)
  "Return true when ONE and OTHER are the same by TEST, which is EQUAL or EQUALP. Two circular lists, which EQUAL and EQUALP
would compare forever, are the same when all their elements are the same."
  (declare (type function test))
  (let ((slow-one one)
        (slow-other other))
    (loop for count of-type index from 0
          while (and (consp one) (consp other) (not (eq one other)))
          do (unless (same-by-test-p test (pop one) (pop other))
               (return nil))
             (when (oddp count)
               (setf slow-one (cdr slow-one)
                     slow-other (cdr slow-other)))
             ;; Both lists are circular, and all pairs of their elements have been compared.
             (when (and (consp one) (eq one slow-one) (eq other slow-other))
               (return t))
          finally (return (funcall test one other)))))

(defun same-objects-p (kind one other)
  "Return true when ONE and OTHER are EQL (KIND 0), EQUAL (KIND 1) or EQUALP (KIND 2)."
  (ecase kind
    (0 (eql one other))
    (1 (same-by-test-p #'equal one other))
    (2 (same-by-test-p #'equalp one other))))

(defun print-for-program (object limit escape)
  "Return OBJECT printed as by PRIN1 if ESCAPE is true, else as by PRINC, and cut at LIMIT characters."
  (with-server-syntax (:length nil :level nil)
    (multiple-value-bind (text result)
        (if escape
            (bounded-prin1-text object limit)
            (let ((*print-escape* nil))
              (bounded-text limit (lambda (stream) (princ object stream)))))
      ;; Otherwise the next garbage collection could find the heap nearly full and end the program's call.
      (when (typep result 'heap-nearly-exhausted)
        (collect-after-call))
      text)))

(defun type-of-object (object)
  "Return the type of OBJECT as source text in lower case."
  (string-downcase (type-name-text (type-of object))))

(defun octet-count (object)
  "Return the number of octets in OBJECT, a vector of octets."
  (length (the (array (unsigned-byte 8) (*)) object)))

(defmacro with-octets ((sap length) object &body body)
  "Evaluate BODY with SAP bound to the address of the octets of OBJECT, a vector, and LENGTH to their number. Garbage
collections do not move the octets meanwhile."
  (let ((data (gensym "DATA")) (start (gensym "START")) (end (gensym "END")) (vector (gensym "VECTOR")))
    `(let ((,vector ,object))
       (unless (typep ,vector '(vector (unsigned-byte 8)))
         (error 'type-error :datum ,vector :expected-type '(vector (unsigned-byte 8))))
       (with-vector-data (,data ,start ,end) ,vector
         (let ((,sap (sap+ (vector-sap (the (simple-array (unsigned-byte 8) (*)) ,data)) ,start))
               (,length (- ,end ,start)))
           ,@body)))))

(defun copy-octets-out (object address length)
  "Copy the octets of OBJECT, a vector, to ADDRESS. Signal an error if their number is not LENGTH."
  (declare (type (unsigned-byte 62) address length))
  (with-octets (octets count) object
    (unless (= length count)
      (error "The vector has ~D octet~:P, but the buffer for the copy has ~D: pass a buffer of the vector's length."
             count length))
    (sb-kernel:%byte-blt octets 0 (int-sap address) 0 length))
  (values))

(defun borrow-octets (closure object place)
  "Store the address and the number of the octets of OBJECT, a vector, in the two words at the address PLACE. Then make
the program run CLOSURE, the number of one of its closures, while the octets stay in place."
  (declare (type (unsigned-byte 62) place))
  (with-octets (octets count) object
    (setf (sap-ref-64 (int-sap place) 0) (sap-int octets)
          (sap-ref-64 (int-sap place) 8) count)
    (call-program +program-run+ (lambda (buffer) (put-integer buffer closure))))
  (values))

(defun size-of-object (object)
  "Return the number of elements of OBJECT, a sequence or a hash table."
  (typecase object
    (hash-table (hash-table-count object))
    (list (proper-list-length object))
    (sequence (length object))
    (t (error 'type-error :datum object :expected-type '(or sequence hash-table)))))

(defun proper-list-length (list)
  "Return the length of LIST. Signal an error if LIST is dotted or circular; for a circular list, LENGTH would never
return."
  (or (list-length list)
      (error 'type-error :datum list :expected-type '(satisfies list-length))))

(defun slot-of-object (object name)
  "Return the value of the slot of OBJECT whose name is the string NAME. Ignore the case and the package of slot names.
Signal an error if there is no such slot."
  (let ((slot (find name (sb-mop:class-slots (class-of object))
                    :key #'sb-mop:slot-definition-name :test #'string-equal)))
    (unless slot
      (error "The class ~A has no slot ~A." (string-downcase (type-name-text (class-name-of object))) name))
    (slot-value object (sb-mop:slot-definition-name slot))))

(defun slots-of-object (object)
  "Return the name and the printed value of each bound slot among the first 100 slots of OBJECT, as lists of two
strings."
  (loop for slot in (sb-mop:class-slots (class-of object))
        for name = (sb-mop:slot-definition-name slot)
        repeat 100
        when (slot-boundp object name)
          collect (list (string-downcase (symbol-name name))
                        (with-server-syntax () (bounded-prin1-text (slot-value object name) 1000)))))

(defun slots-as-list (object)
  "Return a property list of the bound slots of OBJECT, an instance, structure or condition. The indicators are keywords
with the names of the slots."
  (unless (typep object '(or standard-object structure-object condition))
    (error 'type-error :datum object :expected-type 'standard-object))
  (loop for slot in (sb-mop:class-slots (class-of object))
        for name = (sb-mop:slot-definition-name slot)
        when (slot-boundp object name)
          collect (intern (symbol-name name) "KEYWORD") and collect (slot-value object name)))

(defconstant +max-key-conses+ 1000000
  "Maximum number of conses in a key that is compared by EQUAL or EQUALP: following as many takes some 10 ms.")

(defun check-key (key)
  "Signal an error if KEY contains itself or has too many conses. EQUAL would compare two circular lists forever."
  (when (larger-tree-p key +max-key-conses+)
    (error "The key is too large to be compared with other keys, or contains itself.")))

(defun element-of-object (object key)
  "Return the element of OBJECT under KEY and true, or NIL and NIL if there is no such element. If OBJECT is a vector, KEY
is an index. If OBJECT is a list, KEY is an index, a key of an association list, or an indicator of a property list: the
first element other than NIL is a cons in an association list. OBJECT can also be a hash table. Signal an error for any
other object."
  (typecase object
    (hash-table
     (when (member (hash-table-test object) '(equal equalp))
       (check-key key))
     (gethash key object))
    (vector (if (and (typep key 'index) (< key (length object)))
                (values (aref object key) t)
                (values nil nil)))
    (list
     ;; In a circular list, a search for a key would never end, and counting to a large index would take too long.
     (let ((limit (if (typep key '(integer 0 10000)) key (list-extent object))))
       (unless limit
         (error "The list is circular: its elements can be found only by an index up to 10000."))
       (cond ((typep key 'unsigned-byte)
              ;; NTHCDR or CAR signals an error for an index beyond a dotted list.
              (let ((rest (nthcdr (min key limit) object)))
                (values (car rest) (and rest t))))
             ;; An integer is never a key.
             ((integerp key)
              (values nil nil))
             ((consp (find-if-not #'null object))
              (check-key key)
              (let ((entry (assoc key object :test #'equal)))
                (values (cdr entry) (and entry t))))
             (t
              (multiple-value-bind (indicator value tail) (get-properties object (list key))
                (declare (ignore indicator))
                (values value (and tail t)))))))
    (t (error 'type-error :datum object :expected-type '(or list vector hash-table)))))

(defun objects-as-values (&rest objects)
  "Return OBJECTS as values. The program calls this function with handles to receive their objects in the shape that the
call requests (see PUT-OBJECT)."
  (values-list objects))

(defparameter *program-entries*
  (macrolet ((entries (&rest functions)
               (let ((codes (enum-codes "sbcl_entry" "SBCL_ENTRY_")))
                 (loop for (entry) on functions by #'cddr
                       unless (getf codes entry) do (error "The enum sbcl_entry in ffi/sbcl_host.h has no member ~A." entry))
                 `'(nil ,@(loop for (entry number) on codes by #'cddr
                                for expected from 1
                                unless (eql number expected) do
                                  (error "In enum sbcl_entry, ~A is not number ~D." entry expected)
                                collect (or (getf functions entry)
                                            (error "No function is listed for ~A of enum sbcl_entry." entry)))))))
    (entries :run-under-conditions run-program-closure
             :evaluate-text evaluate-text
             :load-text load-text
             :load-file load-program-file
             :find-function find-named-function
             :release release-handles
             :interrupt interrupt-program-call
             :define-function define-program-function
             :print print-for-program
             :type-of type-of-object
             :same same-objects-p
             :octet-count octet-count
             :copy-octets copy-octets-out
             :size size-of-object
             :slot slot-of-object
             :slots slots-of-object
             :element element-of-object
             :objects objects-as-values
             :symbol symbol-named
             :start-thread start-spare-thread
             :local-function make-local-function
             :borrow-octets borrow-octets
             :save save-for-program
             :callee resolve-callee
             :current-thread current-thread))
  "The functions that the program calls through the first handles, in the order of enum sbcl_entry. Handle 0 is not
used.")

(define-alien-callable sbcl-host-gate (signed 32)
    ((function (unsigned 64)) (shape (unsigned 64)) (address (unsigned 64)) (count (unsigned 64)) (reply (unsigned 64)))
  "Call FUNCTION, a handle, with the arguments in the COUNT words at ADDRESS: see CALL-FROM-PROGRAM."
  (macrolet ((word (variable)
               `(ldb (byte 62 0) ,variable)))
    (call-from-program (word function) (word shape) (word address) (word count) (word reply))))

(defun forget-program ()
  "Discard the state that belongs to an embedding program. This function is called when the image is started, and before
the image is saved."
  (setf **program-call-address** 0
        **program-threads** (vector)
        **handle-table** (vector)
        **free-handle** nil
        **free-message-buffers** '()))

(pushnew 'forget-program **save-functions**)

(defun start-for-program (library)
  "Prepare this image for the program that LIBRARY, a struct sbcl_library, describes, and start the threads that work
for the program."
  (declare (type system-area-pointer library))
  (setf **resets-available** nil
        **supervised** nil)
  (forget-program-functions)
  (grow-handle-table)
  (dolist (entry *program-entries*)
    (make-handle entry))
  (setf **program-input** (make-program-input)
        **program-call-address** (sap-ref-64 library (field-offset "sbcl_library" "call"))
        (sap-ref-64 library (field-offset "sbcl_library" "gate"))
        (sap-int (alien-sap (sb-alien:alien-callable-function 'sbcl-host-gate))))
  (start-program-threads (sap-ref-32 library (field-offset "sbcl_library" "threads"))
                         (sap-ref-64 library (field-offset "sbcl_library" "serve"))))
