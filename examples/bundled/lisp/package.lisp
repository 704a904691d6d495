(defpackage "SHOP"
  (:use "COMMON-LISP")
  (:export "TOTAL"))
