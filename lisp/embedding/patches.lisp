;;;; Changes to SBCL for programs that embed the image, and the assumptions about SBCL on which these changes rest.

(in-package "SBCL-HOST/EMBEDDING")

(macrolet ((define (function)
             `(define-patch ,function *
                (lambda (exit &rest arguments)
                  (if (host-started-p)
                      (error 'exit-refused :operator ',function :embedded (plusp **program-call-address**))
                      (apply (the function exit) arguments))))))
  (define sb-ext:exit)
  (define sb-ext:quit))

;; SBCL itself would begin to save, and reset streams and signal handlers: it looks for other threads with LIST-ALL-THREADS,
;; which hides the host's threads.
(define-patch sb-ext:save-lisp-and-die *
  (lambda (save &rest arguments)
    (if (host-started-p)
        (error "SAVE-LISP-AND-DIE was called, but ~:[~:[the server and the session continue~;cannot end the process~]. To ~
                build a core, start another SBCL.~;the program that this image is part of continues. To save the image, ~
                use Lisp::save in Rust.~]"
               (plusp **program-call-address**)
               (member (audience) '(:shell :attached-shell)))
        (apply (the function save) arguments))))

;; A timer interrupts the thread for which it was made. A thread that works for the program is usually in no call, and
;; would handle the interruption only during its next call, which may have nothing to do with the timer. Therefore a new
;; thread runs the timer's function if the timer's thread is in no call.
(define-patch sb-impl::run-timer (timer)
  (lambda (run timer)
    (if (idle-program-thread-p (sb-impl::%timer-thread timer))
        (sb-thread:make-thread (sb-impl::%timer-interrupt-function timer) :name "timer")
        (funcall (the function run) timer))))

(define-patch sb-thread:list-all-threads ()
  (lambda (list-all-threads)
    (delete-if #'host-thread-p (funcall list-all-threads))))

;;; Unwinding

(defun stop-and-resume (function)
  "Call FUNCTION and return its values. If a non-local exit unwinds FUNCTION, stop the exit, as CALL-FROM-PROGRAM does
before the exit reaches the program's frames, and then resume the exit."
  (let ((*pending-exit* nil))
    (stopping-unwind (funcall (the function function))
        ((frame-pointer-here))
      (resume-unwinding))))

(define-dangerous-assumption
    "UNWIND: a non-local exit that STOPPING-UNWIND stops can be resumed with its values"
  (loop for values in '(() (1) (nil) (1 2) (1 2 3 4 5 6 7))
        always (equal values (multiple-value-list
                              (catch 'probe (stop-and-resume (lambda () (throw 'probe (values-list values)))))))
        always (equal values (multiple-value-list
                              (block probe (stop-and-resume (lambda () (return-from probe (values-list values)))))))
        always (equal values (multiple-value-list (stop-and-resume (lambda () (values-list values)))))))
