;;;; The package SBCL-HOST/DEBUGGER: error reports, held evaluations and inspection.

(defpackage "SBCL-HOST/DEBUGGER"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX")
  (:export
   ;; Exports of signalled-errors.lisp:
   "+CAPTURE-TIME-LIMIT+" "+REPORT-TIME-LIMIT+" "CALL-WITH-SIGNAL-OBSERVER" "PUSH-BOUNDED-REPORT"
   ;; Exports of inspection.lisp:
   "GLOBAL-NAME-TEXT" "LAMBDA-LIST-OF" "LOCATE-SYMBOL" "NAME-OPERATOR" "NOT-FOUND-TEXT" "PRINT-LAMBDA-LIST"
   ;; Exports of hints.lisp:
   "FILE-HINT" "SUGGESTION" "SYMBOL-TEXT")
  (:documentation "Reports of errors and frames, descriptions of the image, and held evaluations."))
