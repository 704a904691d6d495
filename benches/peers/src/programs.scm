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

;; The last use of TABLE is the one that changes it: else Steel copies it.
(define (fill table i n)
  (if (< i n)
      (let* ((key (* 1009 (modulo i 5000)))
             (value (+ i (or (hash-try-get table key) 0))))
        (fill (hash-insert table key value) (+ i 1) n))
      table))

(define (run-table n)
  (apply + (hash-values->list (fill (hash) 0 n))))

(define (call-host i n sum)
  (if (< i n) (call-host (+ i 1) n (host-add sum i)) sum))

(define (run-host n) (call-host 0 n 0))
