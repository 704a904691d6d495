;;;; The package SBCL-HOST/EMBEDDING: threads for the host, values and calls.

(defpackage "SBCL-HOST/EMBEDDING"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS" "SBCL-HOST")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX")
  (:export
   ;; lanes
   "HOST-THREAD-P")
  (:documentation "The threads that work for the host, and the interface through which programs call Lisp."))
