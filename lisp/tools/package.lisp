;;;; The package SBCL-HOST/TOOLS: the Lisp side of MCP tools.

(defpackage "SBCL-HOST/TOOLS"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING" "SBCL-HOST/DEBUGGER")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX")
  (:export
   ;; Exports of find-references.lisp:
   "FIND-MENTIONED-SYMBOL"
   ;; Exports of loading.lisp:
   "*SEARCHED-LOCATIONS*" "ASD-FILE" "CALL-RECOMPILING-FASLS" "REGISTER-DEFINITION" "KNOWN-SYSTEM-NAME"
   "REPORT-REMOVED-FILES" "REPORT-STALE-DEFINITIONS")
  (:documentation "The Lisp side of MCP tools: symbols, references, expansions; loading, tracing and profiling."))
