;;;; The package of the Lisp side. Nothing is exported: users of the image never need to name it.

(defpackage "SBCL-HOST"
  (:use "COMMON-LISP" "SB-ALIEN" "SB-SYS")
  (:import-from "SB-EXT" "DEFGLOBAL")
  (:import-from "SB-INT" "ENCAPSULATE" "INDEX" "WITH-FLOAT-TRAPS-MASKED")
  (:documentation "Runs jobs for the host program: see ffi/sbcl_host.h."))
