(define (fib n)
  (if (< n 2) n (+ (fib (- n 1)) (fib (- n 2)))))

(define (run-fib n) (fib n))

(define (point cr ci zr zi i)
  (if (and (< i 100) (< (+ (* zr zr) (* zi zi)) 4.0))
      (point cr ci (+ (- (* zr zr) (* zi zi)) cr) (+ (* 2.0 zr zi) ci) (+ i 1))
      i))

(define (row n ci x total)
  (if (< x n)
      (row n ci (+ x 1) (+ total (point (- (/ (* 2.0 x) n) 1.5) ci 0.0 0.0 0)))
      total))

(define (rows n y total)
  (if (< y n)
      (rows n (+ y 1) (row n (- (/ (* 2.0 y) n) 1.0) 0 total))
      total))

(define (run-mandelbrot n) (rows n 0 0))

;; A fold hands the table over, which is then changed in place. The variable of a loop would still hold it, and each change
;; be one of a copy.
(define (add-to i table)
  (let ((key (* 1009 (modulo i 5000))))
    (hash-insert table key (+ i (or (hash-try-get table key) 0)))))

(define (run-table n)
  (apply + (hash-values->list (foldl add-to (hash) (range 0 n)))))

(define (call-host i n sum)
  (if (< i n) (call-host (+ i 1) n (host-add sum i)) sum))

(define (run-host n) (call-host 0 n 0))
