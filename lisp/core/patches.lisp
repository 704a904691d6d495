;;;; Changes to SBCL itself, and what is taken for granted of it: how both are declared, and those that this package needs.
;;;; Those of the packages above it are in their own patches.lisp. All of this is looked at when the core is built: an SBCL in
;;;; which something has moved fails the build, with the name of that.

(in-package "SBCL-HOST")

;;; What is taken for granted

(defvar *assumptions* '()
  "What is taken for granted of SBCL, newest first: lists of a name, a function that returns true where it holds, and true if
memory that is anybody's may be written where it does not.")

(defmacro define-assumption (name &body body)
  "Have the build look whether BODY returns true. NAME, a string, says of what."
  `(push (list ,name (lambda () ,@body) nil) *assumptions*))

(defmacro define-dangerous-assumption (name &body body)
  "Do what DEFINE-ASSUMPTION does. The build looks at it after all others: where it does not hold, memory that is anybody's
may be written."
  `(push (list ,name (lambda () ,@body) t) *assumptions*))

(defun assumption-problem (name holds-p)
  "Return why the assumption NAME, for which HOLDS-P is to return true, does not hold, or NIL when it does."
  ;; A probe that fails may also end this process: then the build's log ends with its name.
  (format t "~&Probing: ~A~%" name)
  (finish-output)
  (handler-case (if (funcall (the function holds-p)) nil "it does not hold")
    (error (condition) (princ-to-string condition))))

(defun broken-assumptions ()
  "Return the names of the assumptions that do not hold in this SBCL, with the reason where there is one."
  (loop for (name holds-p) in (append (reverse (remove-if #'third *assumptions*))
                                      (reverse (remove-if-not #'third *assumptions*)))
        for problem = (assumption-problem name holds-p)
        when problem
          collect (format nil "~A: ~A" name problem)))

(defun check-assumptions ()
  "Signal an error that names all that has moved in SBCL."
  (let ((broken (broken-assumptions)))
    (when broken
      (error "This is SBCL ~A, in which something has moved that the Lisp side relies on:~{~%  ~A~}~%"
             (lisp-implementation-version) broken))))

(defun parameters (function)
  "Return the names of the parameters of the function named FUNCTION, as strings, in their order."
  (loop for parameter in (sb-introspect:function-lambda-list (fdefinition function))
        unless (member parameter lambda-list-keywords)
          collect (string (loop while (consp parameter) do (setf parameter (first parameter))
                                finally (return parameter)))))

;;; Patches

(defvar *patches* '()
  "What is encapsulated, newest first: lists of a function's name, a tag and the function that takes its place.")

(defmacro define-patch (function parameters wrapper &optional (tag ''sbcl-host))
  "Have WRAPPER take the place of FUNCTION, a function name of SBCL's: it is called with the function and its arguments.
PARAMETERS are the names of FUNCTION's parameters, which WRAPPER was written for, or * where it passes them on as they
come."
  `(progn
     ,(if (eq parameters '*)
          `(define-assumption ,(format nil "the function ~S" function)
             (fboundp ',function))
          `(define-assumption ,(format nil "the parameters of ~S" function)
             (equal ',(mapcar #'string parameters) (parameters ',function))))
     (push (list ',function ,tag ,wrapper) *patches*)))

(defun install-patches ()
  "Change SBCL in the places where it must know of the host."
  (loop for (function tag wrapper) in (reverse *patches*)
        do (encapsulate function tag wrapper)))

(defun remove-patches ()
  "Undo what INSTALL-PATCHES did, in an SBCL that is to serve no host any more."
  (loop for (function tag) in *patches*
        do (sb-int:unencapsulate function tag)))

;;; Definitions

(defmacro define-definers (&rest definers)
  "Have the functions by which SBCL makes definitions tell of them. DEFINERS are lists of a function's name, the kind of
what it defines (or a list of the kinds that it removes), the name of its parameter that says which, and the kind of that in
a file where it is another. What SBCL defines on the way counts as no definition of the file's: it is not made each time."
  `(progn
     ,@(loop for (function kind parameter . file-kind) in definers
             collect `(define-assumption ,(format nil "the parameter ~A of ~S" parameter function)
                        (member ,(string parameter) (parameters ',function) :test #'string=))
             collect `(push (list ',function 'definitions
                                  (let ((place (position ,(string parameter) (parameters ',function) :test #'string=)))
                                    ,(if (consp kind)
                                         `(lambda (undefine &rest arguments)
                                            (let ((lines (removal-lines ',kind (nth place arguments)))
                                                  (*file-definitions* nil))
                                              (multiple-value-prog1 (apply (the function undefine) arguments)
                                                (note-removal lines))))
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
  (sb-pcl::load-defmethod :function name nil)
  (sb-c::%defmacro :macro name)
  ((setf macro-function) :macro symbol)
  (sb-c::%define-symbol-macro :macro name :symbol-macro)
  (sb-c::%define-compiler-macro :macro name :compiler-macro)
  (sb-impl::%defvar :variable var)
  (sb-impl::%defparameter :variable var)
  (sb-impl::%defconstant :variable name :constant)
  (sb-impl::%defglobal :variable name)
  (sb-kernel::%defstruct :class dd)
  (sb-kernel::%define-condition :class name)
  (sb-pcl::load-defclass :class name)
  ((setf find-class) :class name)
  (sb-impl::%deftype :type name)
  (sb-impl::%defpackage :package name)
  (make-package :package name)
  ;; Not listed, but to be repeated when the image is restored.
  (fmakunbound (:function :macro) name)
  (delete-package (:package) package-designator)
  (unintern (:function :macro :variable :class :type) symbol)
  (unexport :other symbols)
  (unuse-package :other packages-to-unuse)
  (set-pprint-dispatch :other type)
  (sb-alien::%define-alien-type :other name)
  (load-shared-object :other pathname)
  (sb-impl::%defsetf :other name :setf-expander)
  (rename-package :other package-designator)
  (use-package :other packages-to-use)
  (export :other symbols)
  (import :other symbols)
  (shadow :other symbols)
  (shadowing-import :other symbols)
  (require :other module-name)
  (asdf:load-asd :other pathname)
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
  ((setf readtable-case) :other case)
  (sb-pcl::load-short-defcombin :other type-name)
  (sb-pcl::load-long-defcombin :other type-name)
  (sb-ext:add-package-local-nickname :other local-nickname)
  (sb-ext:remove-package-local-nickname :other old-nickname)
  (sb-ext:lock-package :other package)
  (sb-ext:unlock-package :other package)
  (makunbound :other symbol))

;; The methods themselves, for a reset.
(define-patch sb-pcl::load-defmethod (class name quals specls ll initargs source-location)
  (lambda (load-defmethod &rest arguments)
    (let ((method (apply load-defmethod arguments)))
      (sb-ext:atomic-push method **methods**)
      (note-file-method method)
      method))
  'methods)

(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (multiple-value-prog1 (funcall proclaim form location)
      (note-proclamation form))))

(define-patch asdf:perform-with-restarts (operation component)
  #'perform-for-system)

;;; Changes on disk

(define-patch asdf:perform (operation component)
  #'perform-noting-files)

(define-patch asdf/action:compute-action-stamp (plan- operation component just-done)
  (lambda (compute plan operation component &key just-done)
    (compute-exact-stamp compute plan operation component just-done)))

(define-patch asdf/session:compute-file-stamp (normalized-namestring)
  (lambda (compute namestring)
    (or (exact-file-stamp namestring)
        (funcall compute namestring))))

(define-assumption "the dates and sizes of files, to the nanosecond"
  (let* ((file sb-ext:*core-pathname*)
         (state (file-state (sb-ext:native-namestring file))))
    (and (eql (file-write-date file) (floor (file-state-written state) 1000000000))
         (eql (with-open-file (in file :element-type '(unsigned-byte 8)) (file-length in))
              (file-state-size state))
         (>= (file-state-changed state) (content-date state)))))

;; SBCL itself holds on to it, and would fall back to a deleted package.
(define-patch delete-package (package-designator)
  (lambda (delete-package package)
    (when (eq (find-package package) **user-package**)
      (error 'sb-kernel:simple-package-error
             :package package
             :format-control "COMMON-LISP-USER cannot be deleted: the session needs it."))
    (funcall delete-package package)))

;;; SAVE-LISP-AND-DIE, in a child process that has no such thread

(define-patch sb-alien::try-reopen-shared-object (obj)
  #'reopen-or-skip)

(define-patch sb-impl::finalizer-thread-stop ()
  (lambda (stop)
    (unless *saving*
      (funcall stop))))

(define-assumption "the threads and mutexes that a child process has to forget"
  (and (member sb-thread:*current-thread*
               (sb-thread::avltree-filter #'sb-thread::avlnode-data sb-thread::*all-threads*))
       (eql 0 (sb-thread::mutex-state (sb-thread:make-mutex)))))

;;; The compiler and its warnings: where *ERROR-OUTPUT* is the user's own stream, that gets the text; else the host does

(defun told-by-host-p ()
  "True when a warning is recorded for the host, so that nothing is to be printed of it."
  (and *recording* (error-output-is-stderr-p)))

(define-patch warn (datum arguments)
  (lambda (warn &rest arguments)
    (if arguments
        (warn-recorded warn 'warning 'simple-warning (first arguments) (rest arguments))
        (funcall warn))))

(define-patch sb-int:style-warn (datum arguments)
  (lambda (style-warn datum &rest arguments)
    (warn-recorded style-warn 'style-warning 'sb-int:simple-style-warning datum arguments)))

(define-patch sb-c::print-compiler-message (stream format-string format-args)
  (lambda (print stream control arguments)
    (unless (told-by-host-p)
      (funcall print stream control arguments))))

(define-patch sb-c::summarize-compilation-unit (abort-p)
  (lambda (summarize aborted)
    (cond ((not (told-by-host-p)) (funcall summarize aborted))
          (aborted nil)
          (t
           (let ((*error-output* (make-broadcast-stream)))
             (funcall summarize nil))))))

(define-patch sb-c:compile-in-lexenv (form *lexenv* name source-info tlf ephemeral errorp)
  (lambda (compile form lexenv &rest arguments)
    (declare (type function compile))
    (flet ((compile-form () (apply compile form lexenv arguments)))
      (declare (dynamic-extent #'compile-form))
      (call-in-unit lexenv #'compile-form))))

;; What they make is from a file, and not of the evaluation that called them.
(macrolet ((define (function)
             `(define-patch ,function *
                (lambda (function &rest arguments)
                  (let ((sb-c::*source-plist* (without-evaluation sb-c::*source-plist*)))
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
    (load-noting-definitions load stream arguments)))

(define-patch sb-debug::frame-call (frame method-frame-style argument-limit replace-dynamic-extent-objects)
  (lambda (frame-call frame &rest options)
    (multiple-value-bind (name arguments info) (apply (the function frame-call) frame options)
      (multiple-value-call #'values (stood-for name arguments) info))))

(define-patch sb-debug:map-backtrace (function start from count)
  #'map-user-backtrace)

;;; Errors, the end of the process and of the stack

(define-patch invoke-debugger (condition)
  #'enter-debugger)

;; SBCL would also print a line on *ERROR-OUTPUT*.
(macrolet ((define (function condition)
             `(define-patch ,function ()
                (lambda (function)
                  (declare (ignore function))
                  (let ((sb-debug:*stack-top-hint* nil))
                    (error ',condition))))))
  (define sb-kernel::control-stack-exhausted-error sb-kernel::control-stack-exhausted)
  (define sb-kernel::binding-stack-exhausted-error sb-kernel::binding-stack-exhausted))

;;; Threads, the heap, programs, the user's home

(define-patch sb-thread::start-thread (thread function arguments)
  #'start-thread-of-job)

(define-patch sb-thread::primitive-join (thread dispose)
  #'join-ended-thread)

(define-patch sb-ext:bytes-consed-between-gcs ()
  #'read-nursery)

(define-patch (setf sb-ext:bytes-consed-between-gcs) (val)
  #'set-nursery)

(define-patch sb-kernel::post-gc ()
  #'watch-after-collection)

(define-patch sb-impl::spawn (program argv stdin stdout stderr search envp pty-name channel dir preserve-fds)
  #'spawned)

(define-patch sb-ext:run-program *
  (lambda (run-program program arguments &rest options)
    (note-shared-output options)
    (apply run-program program arguments options)))

;; Where SBCL has nothing but an error, ASDF cannot work.
(define-patch sb-impl::user-homedir-namestring (username)
  (lambda (function &rest arguments)
    (if (and **scratch** (null (first arguments)))
        (handler-case (funcall function) (error () **scratch**))
        (apply function arguments))))

;;; What is not a function's parameters

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

(define-assumption "the variables that the standard streams lead to"
  (every (lambda (variable)
           (let ((stream (symbol-value (standard-variable-symbol variable))))
             (or (member (standard-variable-symbol variable) '(*debug-io* *trace-output*))
                 (and (typep stream 'synonym-stream)
                      (eq (standard-variable-target variable) (synonym-stream-symbol stream))))))
         **standard-variables**))

(define-assumption "the function by which a readtable reads"
  (eq #'sb-impl::read-object? (sb-impl::%readtable-read (copy-readtable nil))))

(define-assumption "the compiler's handlers signal again what they see, and then count it"
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

(define-assumption "what takes a new lexical environment's muffled conditions and package locks from where"
  (let ((sb-c::*handled-conditions* (list 'probe))
        (sb-c::*disabled-package-locks* (list 'probe)))
    (let ((lexenv (sb-kernel:make-null-lexenv)))
      (and (eq sb-c::*handled-conditions* (sb-c::lexenv-handled-conditions lexenv))
           (eq sb-c::*disabled-package-locks* (sb-c::lexenv-disabled-package-locks lexenv))))))

(define-patch sb-c::process-optimize-decl (spec policy)
  #'policy-as-declared)


(define-assumption "the slots of the compiler's record of what is undefined"
  (let* ((sb-c::*undefined-warnings* '())
         (sb-c::*compilation-unit* (sb-c::make-compilation-unit)))
    (handler-bind ((warning #'muffle-warning))
      (compile nil '(lambda () (no-such-function-for-the-probe))))
    (let ((undefined (first sb-c::*undefined-warnings*)))
      (and (eq :function (sb-c::undefined-warning-kind undefined))
           (eq 'no-such-function-for-the-probe (sb-c::undefined-warning-name undefined))))))

(defun frame-name (frame)
  "Return the name of the function that FRAME is a call of."
  (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))

(defun frames-at-error (function &optional (key #'frame-name))
  "Return what KEY, a function of a frame, returns for the innermost frames at the error that FUNCTION ends with; and the
stack top hint there."
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

(define-assumption "what the frame of an undefined function is called"
  (member "undefined function" (frames-at-error (lambda () (funcall 'no-such-function-for-the-probe)))
          :test #'equal))

(define-assumption "how an argument is shown that a function makes no use of"
  (flet ((unused-argument-p (frame)
           (let ((arguments (nth-value 1 (sb-debug::frame-call frame))))
             (and (consp arguments)
                  (sb-debug::unprintable-object-p (first arguments))
                  (equal "unused argument" (sb-debug::unprintable-object-string (first arguments)))))))
    (let ((function (compile nil '(lambda (x) (declare (ignore x) (optimize (debug 2))) (error "probe")))))
      (some #'identity (frames-at-error (lambda () (funcall function 1)) #'unused-argument-p)))))

(define-assumption "the frame that is named as the one of an error"
  (let ((hint (nth-value 1 (frames-at-error (lambda () (error "probe"))))))
    (or (sb-di:frame-p hint) (symbolp hint))))

(define-assumption "the frames of EVAL"
  (let ((names (frames-at-error (lambda () (sb-impl::eval-tlf '(error "probe") 0)))))
    (and (member 'sb-impl::eval-tlf names) (member 'sb-impl::simple-eval-in-lexenv names))))

(define-assumption "what DISABLE-DEBUGGER sets"
  (let ((hook sb-ext:*invoke-debugger-hook*))
    (unwind-protect (progn (sb-ext:disable-debugger)
                           (eq 'sb-debug::debugger-disabled-hook sb-ext:*invoke-debugger-hook*))
      (setf sb-ext:*invoke-debugger-hook* hook))))

(define-assumption "the interruptions that a thread has not taken"
  (let* ((taken nil)
         (take (lambda () (setf taken t))))
    (and (without-interrupts
           (sb-thread:interrupt-thread sb-thread:*current-thread* take)
           (and (find take (sb-thread::thread-interruptions sb-thread:*current-thread*))
                (not taken)))
         taken)))

(define-assumption "the main thread"
  (eq (sb-thread:main-thread) sb-thread::*initial-thread*))

(define-assumption "how the restart of a failed ASSERT says what it asks for"
  (let ((report (block probe
                  (handler-bind ((error (lambda (condition)
                                          (return-from probe
                                            (princ-to-string (find-restart 'continue condition))))))
                    (let ((a 1) (b (list 1)))
                      (assert (eql a 2) (a (car b))))))))
    (and (eql 0 (search "Retry assertion with new values for " report))
         (search ", (" report)
         (eql (1- (length report)) (position #\. report :from-end t)))))
