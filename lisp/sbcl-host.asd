;;;; The Lisp side as a system: it loads into a stock SBCL of the pinned version, from an editor or a REPL. There it serves
;;;; no host and changes nothing; (asdf:test-system "sbcl-host") runs its tests. Each file serves those after it only.

(asdf:defsystem "sbcl-host"
  :description "The Lisp side of sbcl-mcp: evaluates code for a host program and tells it all that comes of that."
  :licence "MIT OR Apache-2.0"
  :depends-on ("sb-bsd-sockets" "sb-cltl2" "sb-concurrency" "sb-cover" "sb-grovel" "sb-introspect" "sb-md5" "sb-posix"
               "sb-queue" "sb-rotate-byte" "sb-rt" "sb-sprof")
  :serial t
  :components ((:file "core/package") (:file "core/host") (:file "core/streams") (:file "core/printing")
               (:file "core/evaluation") (:file "core/changed-files") (:file "core/source")
               (:file "core/loaded-files") (:file "core/changes") (:file "core/definitions") (:file "core/frames")
               (:file "debugger/signalled-errors") (:file "debugger/inspection") (:file "debugger/hints")
               (:file "core/programs") (:file "core/interrupts") (:file "core/heap") (:file "core/compiler")
               (:file "core/operations") (:file "core/connections") (:file "tools/find-symbols")
               (:file "tools/find-references") (:file "tools/macroexpand") (:file "core/evaluator")
               (:file "tools/loading") (:file "debugger/frame-functions") (:file "debugger/hold")
               (:file "core/failures") (:file "testing/coverage") (:file "testing/frameworks")
               (:file "testing/testing") (:file "testing/fiveam") (:file "testing/rt") (:file "testing/parachute")
               (:file "testing/rove") (:file "testing/lisp-unit2") (:file "testing/suspects")
               (:file "testing/test-reports") (:file "testing/test-operation") (:file "core/threads")
               (:file "embedding/values") (:file "embedding/calls") (:file "embedding/lanes")
               (:file "embedding/embedding") (:file "tools/tracing") (:file "tools/traced-functions")
               (:file "tools/profiling") (:file "core/contribs") (:file "core/checkpoint") (:file "core/patches")
               (:file "core/probes") (:file "embedding/start"))
  :in-order-to ((asdf:test-op (asdf:test-op "sbcl-host/tests"))))

(asdf:defsystem "sbcl-host/tests"
  :depends-on ("sbcl-host")
  :components ((:file "tests"))
  :perform (asdf:test-op (operation system)
             (unless (uiop:symbol-call "SBCL-HOST" "RUN-TESTS")
               (error "Tests of the Lisp side failed."))))
