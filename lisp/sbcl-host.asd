;;;; The systems of the Lisp side. Loaded from an editor or a REPL into a stock SBCL of the pinned version, the systems
;;;; serve no host and change nothing. (asdf:test-system "sbcl-host") runs the tests. Within a system, each file depends
;;;; only on the files before it. Except for "sbcl-host", which combines the other systems, no system depends on a
;;;; system that is defined below it.

(asdf:defsystem "sbcl-host"
  :description "The Lisp side of sbcl-mcp."
  :licence "MIT OR Apache-2.0"
  ;; The image contains every contrib, for its users.
  :depends-on ("sb-bsd-sockets" "sb-cltl2" "sb-concurrency" "sb-cover" "sb-grovel" "sb-introspect" "sb-md5" "sb-posix"
               "sb-queue" "sb-rotate-byte" "sb-rt" "sb-sprof"
               "sbcl-host/core" "sbcl-host/embedding" "sbcl-host/debugger" "sbcl-host/tools" "sbcl-host/testing")
  :in-order-to ((asdf:test-op (asdf:test-op "sbcl-host/tests"))))

(asdf:defsystem "sbcl-host/core"
  :description "The part that every image contains: evaluates code for a host program and reports the results to it."
  :depends-on ("sb-introspect" "sb-posix")
  :pathname "core/"
  :serial t
  :components ((:file "package") (:file "machine") (:file "compatibility") (:file "contract") (:file "host") (:file "hooks")
               (:file "foreign-code") (:file "streams") (:file "printing") (:file "names") (:file "evaluation")
               (:file "changed-files") (:file "source") (:file "loaded-files") (:file "changes") (:file "definitions")
               (:file "frames") (:file "programs") (:file "interrupts") (:file "heap") (:file "compiler")
               (:file "operations") (:file "connections") (:file "evaluator") (:file "failures") (:file "threads")
               (:file "contribs") (:file "checkpoint") (:file "patches") (:file "probes") (:file "image")))

(asdf:defsystem "sbcl-host/embedding"
  :description "The threads that work for the host, and the interface through which programs call Lisp."
  :depends-on ("sbcl-host/core")
  :pathname "embedding/"
  :serial t
  :components ((:file "package") (:file "values") (:file "calls") (:file "lanes") (:file "embedding") (:file "start")
               (:file "patches")))

(asdf:defsystem "sbcl-host/debugger"
  :description "Reports of errors and frames, and held evaluations."
  :depends-on ("sbcl-host/embedding")
  :pathname "debugger/"
  :serial t
  :components ((:file "package") (:file "signalled-errors") (:file "inspection") (:file "hints") (:file "frame-functions")
               (:file "hold") (:file "patches")))

(asdf:defsystem "sbcl-host/tools"
  :description "The Lisp side of MCP tools: symbols, references, expansions; loading, tracing and profiling."
  :depends-on ("sb-cltl2" "sb-introspect" "sb-sprof" "sbcl-host/debugger")
  :pathname "tools/"
  :serial t
  :components ((:file "package") (:file "find-symbols") (:file "find-references") (:file "macroexpand") (:file "loading")
               (:file "tracing") (:file "traced-functions") (:file "profiling") (:file "patches")))

(asdf:defsystem "sbcl-host/testing"
  :description "Running the tests of any framework, and finding the code that may be at fault when they fail."
  :depends-on ("sb-cover" "sb-rt" "sbcl-host/tools")
  :pathname "testing/"
  :serial t
  :components ((:file "package") (:file "coverage") (:file "frameworks") (:file "testing") (:file "fiveam") (:file "rt")
               (:file "parachute") (:file "rove") (:file "lisp-unit2") (:file "suspects") (:file "test-reports")
               (:file "test-operation") (:file "patches")))

(asdf:defsystem "sbcl-host/tests"
  :depends-on ("sbcl-host")
  :components ((:file "tests"))
  :perform (asdf:test-op (operation system)
             (unless (uiop:symbol-call "SBCL-HOST/TESTS" "RUN-TESTS")
               (error "Tests of the Lisp side failed."))))
