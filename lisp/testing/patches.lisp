;;;; Changes to SBCL for tests.

(in-package "SBCL-HOST/TESTING")

;; Code that is loaded with coverage marks must not be compiled inline: its marks would count for the calling function.
(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (unless (and *marking* (inline-proclamation-p form))
      (funcall proclaim form location)))
  'coverage)
