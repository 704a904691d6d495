;;;; Changes to SBCL for running tests with coverage.

(in-package "SBCL-HOST/TESTING")

;; A function with coverage marks must not be expanded inline: its marks would count for the calling function.
(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (unless (and *loading-with-marks* (inline-proclamation-p form))
      (funcall proclaim form location)))
  'coverage)
