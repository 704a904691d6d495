;;;; Patches of SBCL and assumptions about it: the macros that declare them, and the declarations that this package needs.
;;;; Packages that build on this one have a patches.lisp of their own. The build checks all assumptions. If an
;;;; assumption does not hold in the SBCL at hand, the build fails and names the assumption.

(in-package "SBCL-HOST")

;;; Declaring and checking assumptions
(defvar *assumptions* '()
  "The assumptions about SBCL, newest first, as lists of three elements: a name; a function that returns true if the
assumption holds; and true if the function may corrupt memory when the assumption does not hold.")

(defmacro define-assumption (name &body body)
  "Make the build check that BODY returns true. NAME is a string that describes the assumption."
  `(push (list ,name (lambda () ,@body) nil) *assumptions*))

(defmacro define-dangerous-assumption (name &body body)
  "Make the build check that BODY returns true, as DEFINE-ASSUMPTION does. BODY may corrupt memory if the assumption does
not hold, so the build tests dangerous assumptions after all others."
  `(push (list ,name (lambda () ,@body) t) *assumptions*))

(defun assumption-problem (name holds-p)
  "Return the reason why the assumption NAME does not hold, or NIL if it holds. HOLDS-P is the function that tests the
assumption."
  ;; A failing probe may even end the process. The last line of the build's log is then the name of the probe.
  (format t "~&Probing: ~A~%" name)
  (finish-output)
  (handler-case (if (funcall (the function holds-p)) nil "the test of the assumption returned NIL")
    (error (condition) (princ-to-string condition))))

(defun broken-assumptions ()
  "Return a description of each assumption that does not hold in this SBCL."
  (loop for (name holds-p) in (append (reverse (remove-if #'third *assumptions*))
                                      (reverse (remove-if-not #'third *assumptions*)))
        for problem = (assumption-problem name holds-p)
        when problem
          collect (format nil "~A: ~A" name problem)))

(defun check-assumptions ()
  "Signal an error that lists the assumptions that do not hold, if there are any."
  (let ((broken (broken-assumptions)))
    (when broken
      (error "SBCL ~A does not meet all assumptions of the Lisp side (docs/upgrading-sbcl.md). Not met:~{~%  ~A~}~%"
             (lisp-implementation-version) broken))))

(defun parameter-names (function)
  "Return the names of the parameters of FUNCTION, a function name, as a list of strings in the order of the lambda list."
  (loop for parameter in (sb-introspect:function-lambda-list (fdefinition function))
        unless (member parameter lambda-list-keywords)
          collect (string (loop while (consp parameter) do (setf parameter (first parameter))
                                finally (return parameter)))))

;;; Declaring and installing patches
(defvar *patches* '()
  "The patches, newest first: lists of a function's name, an encapsulation tag and the wrapper.")

(defmacro define-patch (function parameters wrapper &optional (tag ''sbcl-host))
  "Define a patch that encapsulates FUNCTION, the name of a function of SBCL or ASDF. WRAPPER is a function that is called
with the original function and its arguments. PARAMETERS are the names that FUNCTION's parameters must have, because WRAPPER
was written for them, or * if WRAPPER passes all arguments on unchanged. TAG names the encapsulation; patches of the same
function need different tags."
  `(progn
     ,(if (eq parameters '*)
          `(define-assumption ,(format nil "the function ~S" function)
             (fboundp ',function))
          `(define-assumption ,(format nil "the parameters of ~S" function)
             (equal ',(mapcar #'string parameters) (parameter-names ',function))))
     (push (list ',function ,tag ,wrapper) *patches*)))

(defun install-patches ()
  "Install the patches, oldest first."
  (loop for patch in (reverse *patches*)
        do (apply #'install-patch patch)))

(defun remove-patches ()
  "Remove the patches. Called by the tests, which continue without a host."
  (loop for patch in *patches*
        do (apply #'remove-patch patch)))

;;; Recording definitions
(defmacro define-definers (&rest definers)
  "Patch functions that make or remove definitions, so that the session's definitions are recorded. Each of DEFINERS is a
list of a function's name; the kind of definition that the function makes, or a list of the kinds that it removes; the
name of the parameter that holds the definition's name; and optionally a different kind under which a loaded file records
the definition, or NIL if the file does not record it. Definitions that the function itself makes while it runs do not
count as the file's, because SBCL does not make them every time."
  `(progn
     ,@(loop for (function kind parameter . file-kind) in definers
             collect `(define-assumption ,(format nil "the parameter ~A of ~S" parameter function)
                        (member ,(string parameter) (parameter-names ',function) :test #'string=))
             collect `(push (list ',function 'definitions
                                  (let ((place (position ,(string parameter) (parameter-names ',function) :test #'string=)))
                                    ,(if (consp kind)
                                         `(lambda (undefine &rest arguments)
                                            ;; A removal can change how a name is printed, and the name of a package.
                                            (let* ((name (definition-name ',(first kind) (nth place arguments)))
                                                   (lines (removal-lines ',kind name))
                                                   (*file-definitions* nil))
                                              (multiple-value-prog1 (apply (the function undefine) arguments)
                                                (note-removal ',kind name lines))))
                                         `(lambda (define &rest arguments)
                                            (multiple-value-prog1 (let ((*file-definitions* nil))
                                                                    (apply (the function define) arguments))
                                              (note-definition ,kind (definition-name ,kind (nth place arguments))
                                                               ,@file-kind))))))
                            *patches*))))

(define-definers
  (sb-impl::%defun :function name)
  ((setf fdefinition) :function name)
  ((setf symbol-function) :function symbol)
  (sb-pcl::load-defgeneric :function fun-name)
  (sb-pcl::load-defmethod :method name nil)
  (sb-c::%defmacro :macro name)
  ((setf macro-function) :macro symbol)
  (sb-c::%define-symbol-macro :symbol-macro name)
  (sb-c::%define-compiler-macro :compiler-macro name)
  (sb-impl::%defvar :variable var)
  (sb-impl::%defparameter :variable var)
  (sb-impl::%defconstant :variable name :constant)
  (sb-impl::%defglobal :variable name)
  (sb-kernel::%defstruct :class dd)
  (sb-kernel::%define-condition :class name)
  (sb-pcl::load-defclass :class name)
  (sb-impl::%deftype :type name)
  (sb-impl::%defsetf :setf-expander name)
  (sb-pcl::load-short-defcombin :method-combination type-name)
  (sb-pcl::load-long-defcombin :method-combination type-name)
  (sb-impl::%defpackage :package name)
  (make-package :package name)
  ;; The functions below make removals, and changes of kind :OTHER. Lists of definitions do not contain these changes, but
  ;; the forms that make them are evaluated again when the image is restored.
  (fmakunbound (:function :macro :method) name)
  (delete-package (:package) package-designator)
  (unintern (:function :macro :method :symbol-macro :compiler-macro :variable :class :type :setf-expander :method-combination)
            symbol)
  (unexport :other symbols)
  (unuse-package :other packages-to-unuse)
  (set-pprint-dispatch :other type)
  (sb-alien::%define-alien-type :other name)
  (sb-alien::%define-alien-variable :other lisp-name)
  (sb-alien::%define-alien-callable :other name)
  (sb-impl::register-hash-table-test :other name)
  (load-shared-object :other pathname)
  (unload-shared-object :other pathname)
  (use-package :other packages-to-use)
  (export :other symbols)
  (import :other symbols)
  (shadow :other symbols)
  (shadowing-import :other symbols)
  (require :other module-name)
  (asdf:require-system :other system)
  (asdf:load-asd :other pathname)
  (asdf/parse-defsystem:register-system-definition :other name)
  (sb-posix:chdir :other pathname)
  ((setf logical-pathname-translations) :other host)
  (add-method :other method)
  (remove-method :other method)
  ((setf documentation) :other object)
  (sb-c::%proclaim :other raw-form)
  (set-macro-character :other char)
  (set-dispatch-macro-character :other disp-char)
  (make-dispatch-macro-character :other char)
  (set-syntax-from-char :other to-char)
  (sb-ext:add-package-local-nickname :other local-nickname)
  (sb-ext:remove-package-local-nickname :other old-nickname)
  (sb-ext:lock-package :other package)
  (sb-ext:unlock-package :other package)
  (sb-ext:add-implementation-package :other packages-to-add)
  (sb-ext:remove-implementation-package :other packages-to-remove)
  (makunbound :other symbol))

;; These functions remove a definition if the new value is NIL.
(macrolet ((define (function kind)
             `(define-patch ,function *
                (lambda (set value name &rest arguments)
                  (declare (type function set))
                  (let ((lines (if value '() (removal-lines '(,kind) name))))
                    (multiple-value-prog1 (let ((*file-definitions* nil))
                                            (apply set value name arguments))
                      (if value
                          (note-definition ,kind name)
                          (note-removal '(,kind) name lines)))))
                'definitions)))
  (define (setf find-class) :class)
  (define (setf compiler-macro-function) :compiler-macro))

;; A renamed package remains a definition of the session, or of the system that defined it.
(define-patch rename-package (package-designator name nicknames)
  (lambda (rename designator &rest names)
    (let* ((package (find-package designator))
           (old (and package (package-name package)))
           (renamed (apply (the function rename) designator names)))
      (note-renamed-package renamed old)
      renamed))
  'definitions)

;; Settings of a readtable. COPY-READTABLE sets them in the copy, usually to the values that they have there already, so only a
;; different value counts as a change.
(macrolet ((define (setting)
             `(define-patch (setf ,setting) *
                (lambda (set value readtable)
                  (declare (type function set))
                  (flet ((setting () (and (readtablep readtable) (,setting readtable))))
                    (let ((before (setting)))
                      (multiple-value-prog1 (funcall set value readtable)
                        (unless (eq before (setting))
                          (note-definition :other readtable))))))
                'definitions)))
  (define readtable-case)
  (define sb-ext:readtable-normalization)
  (define sb-ext:readtable-base-char-preference))

;; Without arguments, this function only returns the restrictions.
(define-patch sb-ext:restrict-compiler-policy *
  (lambda (restrict &rest arguments)
    (multiple-value-prog1 (apply (the function restrict) arguments)
      (when arguments
        (note-definition :other (first arguments)))))
  'definitions)

;; Record the method objects, because a reset removes these methods.
(define-patch sb-pcl::load-defmethod (class name quals specls ll initargs source-location)
  (lambda (load-defmethod &rest arguments)
    (let ((method (apply load-defmethod arguments)))
      (setf (gethash method **session-methods**) t)
      (note-file-method method)
      method))
  'methods)

;; Redefined classes and generic functions, and classes and generic functions that get another name. Without initargs, SBCL
;; calls this function only to recompute a generic function, for example to trace it.
(define-patch reinitialize-instance *
  (lambda (reinitialize instance &rest initargs)
    (declare (type function reinitialize))
    (if (and initargs (typep instance '(or class generic-function)))
        (multiple-value-prog1 (apply reinitialize instance initargs)
          (note-definition :other instance))
        (apply reinitialize instance initargs)))
  'definitions)

(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (multiple-value-prog1 (funcall proclaim form location)
      (note-proclamation form))))

(define-patch asdf:perform-with-restarts (operation component)
  #'perform-recording-definitions)

;;; Detecting changed source files
(define-patch asdf:perform (operation component)
  #'perform-recording-file-states)

(define-patch asdf/action:compute-action-stamp (plan- operation component just-done)
  (lambda (compute plan operation component &key just-done)
    (multiple-value-bind (stamp done) (compute-exact-stamp compute plan operation component just-done)
      ;; ASDF calls this function after each action and, for each action that a plan needs, before it performs the plan.
      (when done
        (note-finished-action operation component just-done))
      (values stamp done))))

(define-patch asdf/session:compute-file-stamp (normalized-namestring)
  (lambda (compute namestring)
    (or (exact-file-stamp namestring)
        (funcall compute namestring))))

(define-assumption "the sizes of files, and their dates to the nanosecond"
  (let* ((file sb-ext:*core-pathname*)
         (state (file-state (sb-ext:native-namestring file))))
    (and (eql (file-write-date file) (floor (file-state-mtime state) 1000000000))
         (eql (with-open-file (in file :element-type '(unsigned-byte 8)) (file-length in))
              (file-state-size state))
         (>= (file-state-ctime state) (content-date state)))))

;; Refuse to delete COMMON-LISP-USER. SBCL itself keeps a reference to this package, and would make it the current package
;; again after the deletion.
(define-patch delete-package (package-designator)
  (lambda (delete-package package)
    (when (eq (find-package package) **user-package**)
      (error 'sb-kernel:simple-package-error
             :package package
             :format-control "The package COMMON-LISP-USER cannot be deleted: the image needs it."))
    (funcall delete-package package)))

;;; Saving a core in a child process that has only one thread
(define-patch sb-alien::try-reopen-shared-object (obj)
  #'reopen-shared-object-or-skip)

(define-patch sb-impl::finalizer-thread-stop ()
  (lambda (stop)
    (unless *saving-image*
      (funcall stop))))

;;; Measured times, and the number of collections after which no hooks have run, would make each core different. A new image
;;; needs none of these values.
(define-patch sb-impl::deinit ()
  (lambda (deinit)
    (multiple-value-prog1 (funcall (the function deinit))
      (setf sb-ext:*gc-run-time* 0
            sb-ext:*gc-real-time* 0
            sb-impl::*run-gc-hooks* 0))))

(define-assumption "the threads and mutexes that a child process has to reset"
  (and (member sb-thread:*current-thread*
               (sb-thread::avltree-filter #'sb-thread::avlnode-data sb-thread::*all-threads*))
       (eql 0 (mutex-state (sb-thread:make-mutex)))))

;;; Threads
(define-patch sb-thread::%interrupt-thread (thread function)
  #'interrupt-started-thread)

;;; The compiler and its warnings. When the user has redirected *ERROR-OUTPUT*, the compiler prints the text of warnings
;;; there. Otherwise warnings are only recorded for the host.

(defun suppress-warning-text-p ()
  "Return true when warnings are recorded for the host, so that nothing needs to be printed."
  (and *recording-warnings* (error-output-is-stderr-p)))

(define-patch warn (datum arguments)
  (lambda (warn &rest arguments)
    (if arguments
        (signal-recorded-warning warn 'warning 'simple-warning (first arguments) (rest arguments))
        (funcall warn))))

(define-patch sb-int:style-warn (datum arguments)
  (lambda (style-warn datum &rest arguments)
    (signal-recorded-warning style-warn 'style-warning 'sb-int:simple-style-warning datum arguments)))

(define-patch sb-c::print-compiler-message (stream format-string format-args)
  (lambda (print stream control arguments)
    (unless (suppress-warning-text-p)
      (funcall print stream control arguments))))

(define-patch sb-c::summarize-compilation-unit (abort-p)
  (lambda (summarize aborted)
    (cond ((not (suppress-warning-text-p)) (funcall summarize aborted))
          (aborted nil)
          (t
           (let ((*error-output* (make-broadcast-stream)))
             (funcall summarize nil))))))

(define-patch sb-c:compile-in-lexenv (form *lexenv* name source-info tlf ephemeral errorp)
  (lambda (compile form lexenv &rest arguments)
    (declare (type function compile))
    (flet ((compile-form () (apply compile form lexenv arguments)))
      (declare (dynamic-extent #'compile-form))
      (call-in-compilation-unit lexenv #'compile-form))))

(define-eval-patch)

;; Definitions made during COMPILE-FILE or LOAD come from a file, so the evaluated form that called COMPILE-FILE or LOAD is
;; not their source.
(macrolet ((define (function)
             `(define-patch ,function *
                (lambda (function &rest arguments)
                  (let ((sb-c::*source-plist* (plist-without-evaluated-form sb-c::*source-plist*)))
                    (apply (the function function) arguments))))))
  (define compile-file)
  (define load))

(define-patch compile-file *
  (lambda (compile input &rest options)
    (note-source-state input)
    (apply compile input options))
  'changed-files)

(define-patch sb-fasl::load-as-source (stream verbose print context)
  (lambda (load stream &rest arguments)
    (load-recording-definitions load stream arguments)))

(define-patch sb-debug::frame-call (frame method-frame-style argument-limit replace-dynamic-extent-objects)
  (lambda (frame-call frame &rest options)
    (multiple-value-bind (name arguments info) (apply (the function frame-call) frame options)
      (multiple-value-call #'values (displayed-call name arguments) info))))

(define-patch sb-di::handle-breakpoint (offset component signal-context)
  (lambda (handle offset component context)
    (declare (type function handle))
    (let ((*breakpoint-context* context))
      (funcall handle offset component context))))

;; SBCL also reads the places of an interrupted frame's variables before they contain the values. Words there may be no
;; references to objects, and the collector would then fail.
(define-patch sb-di:debug-var-value (debug-var frame)
  (lambda (value variable frame)
    (declare (type function value))
    (if (readable-frame-p frame)
        (funcall value variable frame)
        (unavailable-value "value"))))

(define-patch sb-debug::frame-args-as-list (frame limit)
  (lambda (list-arguments frame limit)
    (declare (type function list-arguments))
    (if (readable-frame-p frame)
        (funcall list-arguments frame limit)
        ;; As where a function's lambda list is unavailable, the value is no list.
        (unavailable-value "arguments"))))

(define-patch sb-debug:map-backtrace (function start from count)
  #'map-user-backtrace)

(define-code-location-patch)

;;; Errors and exhausted stacks

(define-patch invoke-debugger (condition)
  #'enter-debugger)

(define-machine-patches)

(define-exhaustion-patch sb-kernel::control-stack-exhausted-error sb-kernel::control-stack-exhausted)
(define-exhaustion-patch sb-kernel::binding-stack-exhausted-error sb-kernel::binding-stack-exhausted)

(define-patch sb-kernel::infinite-error-protector ()
  #'count-nested-error)

;;; Threads, the heap, programs, the user's home

;; Without SBCL's own handlers of these signals, no thread could be interrupted, and a timer could end the process.
(define-patch sb-sys:enable-interrupt *
  (lambda (enable signal &rest arguments)
    (multiple-value-bind (name use)
        (case signal
          (#.sb-unix:sigurg (values "SIGURG" "to interrupt threads"))
          (#.sb-unix:sigalrm (values "SIGALRM" "for timers")))
      (when (and name (host-started-p))
        (error "The handler of ~A cannot be replaced, because SBCL needs the signal ~A: use another signal." name use)))
    (apply (the function enable) signal arguments)))

(define-patch sb-thread::run-interruption ()
  #'run-interruption-unless-nested)

(define-patch sb-thread::start-thread (thread function arguments)
  #'start-job-thread)

(define-patch sb-thread::primitive-join (thread dispose)
  #'join-ended-thread)

(define-patch sb-ext:bytes-consed-between-gcs ()
  #'read-nursery)

(define-patch (setf sb-ext:bytes-consed-between-gcs) (val)
  #'set-nursery)

(define-patch sb-kernel::post-gc ()
  #'watch-after-collection)

(define-patch sb-impl::spawn (program argv stdin stdout stderr search envp pty-name channel dir preserve-fds)
  #'spawn-in-group)

(define-patch sb-ext:run-program *
  (lambda (run-program program arguments &rest options)
    (notify-shared-output options)
    (apply run-program program arguments options)))

;; ASDF does not work without a home directory. When SBCL finds no home directory and signals an error, return
;; **SCRATCH-DIRECTORY** instead.
(define-patch sb-impl::user-homedir-namestring (username)
  (lambda (function &rest arguments)
    (if (and **scratch-directory** (null (first arguments)))
        (handler-case (funcall function) (error () **scratch-directory**))
        (apply function arguments))))

;;; Further assumptions, and the functions that test them

(define-assumption "the operations of a stream's MISC function (%STREAM-OPCODE in src/code/ansi-stream.lisp)"
  (flet ((operate (stream operation)
           (funcall (sb-kernel:ansi-stream-misc stream) stream operation nil)))
    (with-input-from-string (in "abc")
      (with-open-stream (out (make-string-output-stream))
        (write-string "abc" out)
        (and (eql 3 (operate out +charpos+))
             (subtypep (operate out +element-type+) 'character)
             (eq 'character (operate out +element-mode+))
             (eq t (operate in +listen+))
             (progn (read-line in) (eq :eof (operate in +listen+)))
             (null (operate out +force-output+))
             (null (operate out +finish-output+))
             (equal '(:utf-8 :replacement #\ufffd) (stream-external-format **stdout**))
             (eql 80 (sb-impl::line-length **stdout**)))))))

(define-assumption "the targets of the standard stream variables"
  (every (lambda (variable)
           (let ((stream (symbol-value (standard-variable-symbol variable))))
             (or (member (standard-variable-symbol variable) '(*debug-io* *trace-output*))
                 (and (typep stream 'synonym-stream)
                      (eq (standard-variable-target variable) (synonym-stream-symbol stream))))))
         **standard-variables**))

(define-assumption "the reader function of a readtable"
  (eq #'sb-impl::read-object? (sb-impl::%readtable-read (copy-readtable nil))))

(define-assumption "the compiler's handlers signal a condition again and then count it"
  (let ((seen 0))
    (handler-bind ((warning (lambda (condition) (declare (ignore condition)) (incf seen))))
      (let ((*error-output* (make-broadcast-stream)))
        (multiple-value-bind (function warned failed) (compile nil '(lambda () (car 1 2)))
          (declare (ignore function))
          (and warned failed (plusp seen)))))))

(define-assumption "the name of the function of WARN's restart"
  (handler-bind ((warning (lambda (condition)
                            (let ((restart (find-restart 'muffle-warning condition)))
                              (when (equal '(lambda () :in sb-kernel::%warn)
                                           (sb-kernel:%fun-name (sb-kernel::restart-function restart)))
                                (invoke-restart restart))))))
    (let ((text (with-output-to-string (*error-output*) (warn "x"))))
      (string= "" text))))

(define-assumption "the sources of a new lexical environment's muffled conditions and package locks"
  (let ((sb-c::*handled-conditions* (list 'probe))
        (sb-c::*disabled-package-locks* (list 'probe)))
    (let ((lexenv (sb-kernel:make-null-lexenv)))
      (and (eq sb-c::*handled-conditions* (sb-c::lexenv-handled-conditions lexenv))
           (eq sb-c::*disabled-package-locks* (sb-c::lexenv-disabled-package-locks lexenv))))))

(define-patch sb-c::process-optimize-decl (spec policy)
  #'policy-as-declared)


(define-assumption "the slots of the compiler's record of an undefined name"
  (let* ((sb-c::*undefined-warnings* '())
         (sb-c::*compilation-unit* (sb-c::make-compilation-unit)))
    (handler-bind ((warning #'muffle-warning))
      (compile nil '(lambda () (no-such-function-for-the-probe))))
    (let ((undefined (first sb-c::*undefined-warnings*)))
      (and (eq :function (sb-c::undefined-warning-kind undefined))
           (eq 'no-such-function-for-the-probe (sb-c::undefined-warning-name undefined))))))

(defun frame-name (frame)
  "Return the name of the function of which FRAME is a call."
  (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))

(defun frames-at-error (function &optional (key #'frame-name))
  "Call FUNCTION, which must signal an error. Return a list of the values of KEY, a function of a frame, for the 30 innermost
frames at the error; and the value of the stack top hint there."
  (declare (type function function key))
  (block probe
    (let ((sb-kernel:*handler-clusters* sb-kernel::**initial-handler-clusters**)
          (sb-ext:*invoke-debugger-hook*
            (lambda (condition hook)
              (declare (ignore condition hook))
              (return-from probe
                (values (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
                              repeat 30
                              while frame
                              collect (funcall key frame))
                        sb-debug:*stack-top-hint*)))))
      (funcall function))))

(define-assumption "the name of the frame of an undefined function"
  (member "undefined function" (frames-at-error (lambda () (funcall 'no-such-function-for-the-probe)))
          :test #'equal))

(define-assumption "the representation of an argument that a function does not use"
  (flet ((unused-argument-p (frame)
           (let ((arguments (nth-value 1 (sb-debug::frame-call frame))))
             (and (consp arguments)
                  (sb-debug::unprintable-object-p (first arguments))
                  (equal "unused argument" (sb-debug::unprintable-object-string (first arguments)))))))
    (let ((function (compile nil '(lambda (x) (declare (ignore x) (optimize (debug 2))) (error "probe")))))
      (some #'identity (frames-at-error (lambda () (funcall function 1)) #'unused-argument-p)))))

(define-assumption "the stack top hint at an error"
  (let ((hint (nth-value 1 (frames-at-error (lambda () (error "probe"))))))
    (or (sb-di:frame-p hint) (symbolp hint))))

(define-assumption "the frames of EVAL"
  (let ((names (frames-at-error (lambda () (sb-impl::eval-tlf '(error "probe") 0)))))
    (and (member 'sb-impl::eval-tlf names) (member 'sb-impl::simple-eval-in-lexenv names))))

(define-assumption "the variable that DISABLE-DEBUGGER sets"
  (let ((hook sb-ext:*invoke-debugger-hook*))
    (unwind-protect (progn (sb-ext:disable-debugger)
                           (eq 'sb-debug::debugger-disabled-hook sb-ext:*invoke-debugger-hook*))
      (setf sb-ext:*invoke-debugger-hook* hook))))

(define-assumption "the pending interruptions of a thread"
  (let* ((taken nil)
         (take (lambda () (setf taken t))))
    (and (without-interrupts
           (sb-thread:interrupt-thread sb-thread:*current-thread* take)
           (and (find take (sb-thread::thread-interruptions sb-thread:*current-thread*))
                (not taken)))
         taken)))

(define-assumption "the variable that holds the main thread"
  (eq (sb-thread:main-thread) sb-thread::*initial-thread*))

(define-assumption "the report of the restart CONTINUE of a failed ASSERT with places"
  (let ((report (block probe
                  (handler-bind ((error (lambda (condition)
                                          (return-from probe
                                            (princ-to-string (find-restart 'continue condition))))))
                    (let ((a 1) (b (list 1)))
                      (assert (eql a 2) (a (car b))))))))
    (and (eql 0 (search "Retry assertion with new values for " report))
         (search ", (" report)
         (eql (1- (length report)) (position #\. report :from-end t)))))
