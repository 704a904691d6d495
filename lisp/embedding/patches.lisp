;;;; Changes to SBCL for a program that embeds the image, and what is taken for granted of it for that.

(in-package "SBCL-HOST/EMBEDDING")

(macrolet ((define (function)
             `(define-patch ,function *
                (lambda (exit &rest arguments)
                  (if (host-started-p)
                      (error 'exit-refused :embedded (plusp **program**))
                      (apply (the function exit) arguments))))))
  (define sb-ext:exit)
  (define sb-ext:quit))

;; A timer belongs to the thread that made it. Where that is the program's, it is in no call most of the time, and could take
;; an interruption only in the next one, which may be about anything.
(define-patch sb-impl::run-timer (timer)
  (lambda (run timer)
    (if (idle-p (sb-impl::%timer-thread timer))
        (sb-thread:make-thread (sb-impl::%timer-interrupt-function timer) :name "timer")
        (funcall (the function run) timer))))

(define-patch sb-thread:list-all-threads ()
  (lambda (list-all-threads)
    (delete-if #'host-thread-p (funcall list-all-threads))))

;;; Unwinding

#+x86-64
(defun stop-and-resume (function)
  "Return the values of FUNCTION. What unwinds it is stopped here, as where the program's frames are left, and resumed."
  (let ((*unwinding* nil))
    (stopping-unwind (funcall (the function function))
        ((frame-pointer-here))
      (go-on-unwinding))))

#+x86-64
(define-dangerous-assumption "UNWIND as STOPPING-UNWIND relies on it: how a non-local exit is stopped, and resumed with its values"
  (loop for values in '(() (1) (nil) (1 2) (1 2 3 4 5 6 7))
        always (equal values (multiple-value-list
                              (catch 'probe (stop-and-resume (lambda () (throw 'probe (values-list values)))))))
        always (equal values (multiple-value-list
                              (block probe (stop-and-resume (lambda () (return-from probe (values-list values)))))))
        always (equal values (multiple-value-list (stop-and-resume (lambda () (values-list values)))))))
