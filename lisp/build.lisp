;;;; Compiles and loads the Lisp side and saves the core. Run by the build with a plain SBCL; SBCL_MCP_CORE_OUTPUT
;;;; names the core to write, SBCL_MCP_FASL_DIR a directory for compiled files.

(in-package "COMMON-LISP-USER")

;;; Every contrib that was built: those left out are in contribs.lisp.
(mapc #'require '(:asdf :sb-introspect :sb-cltl2 :sb-posix :sb-bsd-sockets :sb-sprof :sb-concurrency :sb-queue
                  :sb-rotate-byte :sb-md5 :sb-cover :sb-rt :sb-grovel))

(let ((directory (make-pathname :name nil :type nil :version nil :defaults *load-truename*))
      (fasls (parse-namestring (concatenate 'string (sb-posix:getenv "SBCL_MCP_FASL_DIR") "/")))
      (clean t))
  (proclaim '(optimize (debug 1) (safety 1) (speed 1)))
  (handler-bind ((sb-kernel:redefinition-warning #'muffle-warning) ; compiled, then loaded
                 (sb-ext:compiler-note #'muffle-warning)
                 (warning (lambda (warning)
                            (setf clean nil)
                            (format *error-output* "~&~A: ~A~%" (type-of warning) warning))))
    (with-compilation-unit (:override t)
      (dolist (name '("package" "host" "streams" "printing" "source" "evaluation" "definitions" "debugger" "inspection"
                      "hints" "interrupts" "heap" "evaluator" "frame-functions" "hold" "threads" "contribs" "lanes"))
        (let* ((source (make-pathname :name name :type "lisp" :defaults directory))
               (fasl (make-pathname :name name :type "fasl" :defaults fasls))
               ;; A name under SYS: makes the frames of this code count as the system's.
               (sb-c::*source-namestring* (format nil "SYS:HOST;~:@(~A~).LISP" name)))
          (load (or (compile-file source :output-file fasl)
                    (error "~A does not compile." source)))))))
  (unless clean
    (format *error-output* "~&The Lisp side does not compile without a warning.~%")
    (sb-ext:exit :code 1 :abort t)))

(funcall (intern "PREPARE-CORE" "SBCL-HOST"))
(sb-ext:lock-package "SBCL-HOST")
(sb-ext:save-lisp-and-die (sb-posix:getenv "SBCL_MCP_CORE_OUTPUT") 
                           :callable-exports (list (intern "SBCL-HOST-START" "SBCL-HOST")
                                                   (intern "SBCL-HOST-STACK-LOST" "SBCL-HOST")))
