;;;; Changes to SBCL for running tests.

(in-package "SBCL-HOST/TESTING")

;; A function with coverage marks must not be expanded inline: its marks would count for the calling function.
(define-patch sb-c::%proclaim (raw-form location)
  (lambda (proclaim form location)
    (unless (and *loading-with-marks* (inline-proclamation-p form))
      (funcall proclaim form location)))
  'coverage)

;; A test operation may load a framework, and then call it. Each file of a system is loaded by LOAD.
(define-patch load *
  (lambda (load &rest arguments)
    (declare (type function load))
    (multiple-value-prog1 (apply load arguments)
      (when *redirect-loaded-frameworks*
        (funcall (the function *redirect-loaded-frameworks*)))))
  'frameworks)
