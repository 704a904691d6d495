;;; With the declarations that one writes where speed counts: types are checked. Fixnums, the keys of the table, are EQ.

;; A recursive function is inlined in itself once, and again in what calls it.
(declaim (ftype (function (fixnum) fixnum) fib) (inline fib))
(defun fib (n)
  (declare (optimize speed))
  (if (< n 2) n (+ (fib (- n 1)) (fib (- n 2)))))

(defun run-fib (n) (fib n))

(defun run-mandelbrot (n)
  (declare (optimize speed) (type (integer 1 10000) n))
  (let ((total 0))
    (declare (type fixnum total))
    (dotimes (y n total)
      (let ((ci (- (/ (* 2d0 y) n) 1d0)))
        (dotimes (x n)
          (let ((cr (- (/ (* 2d0 x) n) 1.5d0)) (zr 0d0) (zi 0d0))
            (declare (type double-float zr zi))
            (incf total
                  (dotimes (i 100 100)
                    (let ((zr2 (* zr zr)) (zi2 (* zi zi)))
                      (when (>= (+ zr2 zi2) 4d0)
                        (return i))
                      (setf zi (+ (* 2d0 zr zi) ci)
                            zr (+ (- zr2 zi2) cr)))))))))))

(defun run-table (n)
  (declare (optimize speed) (type (unsigned-byte 32) n))
  (let ((table (make-hash-table :test 'eq)))
    (dotimes (i n)
      (incf (the fixnum (gethash (* 1009 (mod i 5000)) table 0)) i))
    (loop for value of-type fixnum being the hash-values of table
          sum value of-type fixnum)))

(defun run-host (n)
  (declare (optimize speed) (type fixnum n))
  (let ((sum 0))
    (declare (type fixnum sum))
    (dotimes (i n sum)
      (setf sum (host:add sum i)))))
