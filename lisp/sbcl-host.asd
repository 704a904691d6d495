;;;; The Lisp side as a system: it loads into a stock SBCL of the pinned version, from an editor or a REPL. There it serves
;;;; no host and changes nothing; (asdf:test-system "sbcl-host") runs its tests. Each file serves those after it only.

(asdf:defsystem "sbcl-host"
  :description "The Lisp side of sbcl-mcp: evaluates code for a host program and tells it all that comes of that."
  :licence "MIT OR Apache-2.0"
  :depends-on ("sb-bsd-sockets" "sb-cltl2" "sb-concurrency" "sb-cover" "sb-grovel" "sb-introspect" "sb-md5" "sb-posix"
               "sb-queue" "sb-rotate-byte" "sb-rt" "sb-sprof")
  :serial t
  :components ((:file "package")
               (:file "host") (:file "streams") (:file "printing")
               (:file "evaluation") (:file "changed-files") (:file "source") (:file "loaded-files") (:file "changes")
               (:file "definitions")
               (:file "debugger") (:file "signalled-errors") (:file "inspection") (:file "hints")
               (:file "programs") (:file "interrupts") (:file "heap")
               (:file "compiler") (:file "operations") (:file "connections") (:file "find-symbols") (:file "find-references")
               (:file "macroexpand") (:file "evaluator") (:file "loading")
               (:file "frame-functions") (:file "hold") (:file "failures")
               (:file "coverage") (:file "frameworks") (:file "testing") (:file "fiveam") (:file "rt")
               (:file "parachute") (:file "rove") (:file "lisp-unit2") (:file "suspects")
               (:file "test-reports") (:file "test-operation")
               (:file "threads") (:file "values") (:file "calls") (:file "lanes") (:file "embedding")
               (:file "tracing") (:file "traced-functions") (:file "profiling") (:file "contribs")
               (:file "checkpoint") (:file "patches") (:file "probes") (:file "start"))
  :in-order-to ((asdf:test-op (asdf:test-op "sbcl-host/tests"))))

(asdf:defsystem "sbcl-host/tests"
  :depends-on ("sbcl-host")
  :components ((:file "tests"))
  :perform (asdf:test-op (operation system)
             (unless (uiop:symbol-call "SBCL-HOST" "RUN-TESTS")
               (error "Tests of the Lisp side failed."))))
