;;;; The package SBCL-HOST/DEBUGGER.

(defpackage "SBCL-HOST/DEBUGGER"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX" "WITH-FLOAT-TRAPS-MASKED")
  (:export
   ;; signalled-errors
   "+CAPTURE-SECONDS+" "+REPORT-SECONDS+" "CALL-WITH-SIGNAL-OBSERVER" "CALL-WITH-TIME-LIMIT" "PUSH-BOUNDED-REPORT"
   ;; inspection
   "LAMBDA-LIST-OF" "LOCATE-SYMBOL" "NOT-FOUND-TEXT" "PRINT-LAMBDA-LIST"
   ;; hints
   "FILE-HINT" "SUGGESTION" "SYMBOL-TEXT")
  (:documentation "What is told of errors and frames, and evaluations that are held where they failed."))
