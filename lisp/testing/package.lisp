;;;; The package SBCL-HOST/TESTING: test frameworks, coverage and suspects.

(defpackage "SBCL-HOST/TESTING"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST" "SBCL-HOST/EMBEDDING" "SBCL-HOST/DEBUGGER" "SBCL-HOST/TOOLS")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX")
  (:documentation "Running the tests of any framework, and finding the code that may be at fault when they fail."))
