(in-package "SHOP")

(defparameter *prices*
  '(("apple" . 50) ("pear" . 60))
  "The price of each article, in cents.")

(defun price (article)
  "Return the price of ARTICLE, a string, in cents."
  (or (cdr (assoc article *prices* :test #'string=))
      (error "There is no ~A." article)))

(defun total (order)
  "Return the price of ORDER in cents. ORDER is a list of lists (ARTICLE COUNT). Every third piece of an article is free."
  (loop for (article count) in order
        sum (* (price article) (- count (floor count 3)))))
