;;;; The package SBCL-HOST/TOOLS.

(defpackage "SBCL-HOST/TOOLS"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING" "SBCL-HOST/DEBUGGER")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX" "WITH-FLOAT-TRAPS-MASKED")
  (:export
   ;; find-references
   "MENTIONED"
   ;; loading
   "*LOOKED-IN*" "CALL-COMPILING-ANEW" "FIND-DEFINITION" "SYSTEM-IN-ANY-CASE" "TELL-STALE")
  (:documentation "What MCP tools ask: symbols, references, expansions; loading, tracing and profiling."))
