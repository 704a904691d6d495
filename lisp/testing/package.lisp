;;;; The package SBCL-HOST/TESTING.

(defpackage "SBCL-HOST/TESTING"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING" "SBCL-HOST/DEBUGGER" "SBCL-HOST/TOOLS")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX" "WITH-FLOAT-TRAPS-MASKED")
  (:documentation "Running tests of any framework, and what may be at fault where they fail."))
