;;;; Compiles and loads the Lisp side and saves the core. The build runs this file with a plain SBCL. Environment
;;;; variables: SBCL_MCP_CORE_OUTPUT names the core to write; SBCL_MCP_HOST_OUTPUT names the file that will contain all
;;;; compiled code, from which cores with additional code are made; SBCL_MCP_FASL_DIR names a directory for compiled
;;;; files.

(in-package "COMMON-LISP-USER")

;;; SBCL derives hash codes from the addresses of objects. The finalizer thread allocates memory after each collection, at
;;; unpredictable times, so without it the addresses, and the core, are the same in each build.
(sb-impl::finalizer-thread-stop)

(require :asdf)
(asdf:load-asd (merge-pathnames "../sbcl-host.asd" *load-truename*))

(defvar *systems* (remove-if-not (lambda (name) (eql 0 (search "sbcl-host/" name)))
                                 (asdf:system-depends-on (asdf:find-system "sbcl-host")))
  "The names of the Lisp side's systems, each after the systems on which it depends.")

(defvar *contribs* (set-difference (asdf:system-depends-on (asdf:find-system "sbcl-host")) *systems* :test #'string=)
  "The contribs in the core. core/contribs.lisp lists the contribs that are omitted.")

(mapc #'require *contribs*)

;;; Check the table of SBCL's internal names before anything is compiled, so that the build reports each name that has
;;; changed, instead of failing in code that relies on the name.
(load (merge-pathnames "sbcl-internals.lisp" *load-truename*))
(handler-case (funcall (intern "CHECK-TABLE" "SBCL-INTERNALS") (merge-pathnames "sbcl-internals.sexp" *load-truename*))
  (error (failure)
    ;; The table describes the pinned SBCL. The differences of another SBCL do not end the build, because
    ;; core/compatibility.lisp may provide for them.
    (unless (sb-ext:posix-getenv "SBCL_MCP_NEXT")
      (format *error-output* "~&~A~%" failure)
      (sb-ext:exit :code 1 :abort t))
    ;; The build shows lines that begin with // as progress.
    (format t "~{~&// ~A~%~}" (uiop:split-string (princ-to-string failure) :separator '(#\Newline)))))
(delete-package "SBCL-INTERNALS")

(let ((compiled '())
      (fasls (parse-namestring (concatenate 'string (sb-posix:getenv "SBCL_MCP_FASL_DIR") "/")))
      (clean t))
  (proclaim '(optimize (debug 1) (safety 1) (speed 1)))
  (handler-bind ((sb-kernel:redefinition-warning #'muffle-warning) ; Loading redefines macros that compilation defined.
                 (sb-ext:compiler-note #'muffle-warning)
                 (warning (lambda (warning)
                            (setf clean nil)
                            (format *error-output* "~&~A: ~A~%" (type-of warning) warning))))
    ;; The compiled code can also be loaded into an SBCL that has not loaded the contribs, so it begins with a file that
    ;; loads them.
    (let ((source (make-pathname :name "build-requirements" :type "lisp" :defaults fasls)))
      (with-open-file (file source :direction :output)
        (format file "(in-package \"COMMON-LISP-USER\")~%(mapc #'require '~S)~%" *contribs*))
      (push (compile-file source) compiled))
    ;; Compile without ASDF, and compile each file as a compilation unit of its own, so that the compiler warns of a
    ;; name that is defined only in a later file.
    (dolist (system *systems*)
      (dolist (component (asdf:component-children (asdf:find-system system)))
        (let* ((folder (subseq system (length "sbcl-host/")))
               (name (asdf:component-name component))
               (fasl (make-pathname :name (format nil "~A-~A" folder name) :type "fasl" :defaults fasls))
               ;; A name under SYS: makes the frames of this code count as system frames.
               (sb-c::*source-namestring* (format nil "SYS:HOST;~:@(~A;~A~).LISP" folder name)))
          ;; COMPILE-FILE turns a form that it cannot compile into a run-time error, without a warning.
          (multiple-value-bind (output warned failed)
              (compile-file (asdf:component-pathname component) :output-file fasl)
            (declare (ignore warned))
            (when (or failed (null output))
              (error "lisp/~A/~A.lisp does not compile: correct the errors above." folder name)))
          (load fasl)
          (push fasl compiled)))))
  (unless clean
    (format *error-output* "~&The Lisp side compiled with warnings: correct the warnings above.~%")
    (sb-ext:exit :code 1 :abort t))
  ;; A concatenation of fasls is itself a fasl.
  (uiop:concatenate-files (reverse compiled)
                          (sb-ext:parse-native-namestring (sb-posix:getenv "SBCL_MCP_HOST_OUTPUT"))))

;;; The saved image must not contain ASDF's records of the systems, because they contain the paths of the sources.
(mapc #'asdf:clear-system (list* "sbcl-host" "sbcl-host/tests" *systems*))
(mapc #'unintern '(*systems* *contribs*))
(funcall (intern "PREPARE-INSPECTIONS" "SBCL-HOST/DEBUGGER"))
(funcall (intern "NOTE-CORE-CONTENTS" "SBCL-HOST"))
(funcall (intern "SAVE-CORE" "SBCL-HOST") (sb-posix:getenv "SBCL_MCP_CORE_OUTPUT"))
