;;;; Changes to SBCL for tests.

(in-package "SBCL-HOST/TESTING")

;; Code that is loaded with marks is not compiled inline: its marks would be another function's.
(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (unless (and *marking* (inline-proclamation-p form))
      (funcall proclaim form location)))
  'coverage)
