(defsystem "shop"
  :description "Prices."
  :serial t
  :components ((:file "package") (:file "prices")))
