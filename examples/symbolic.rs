//! A task that suits Lisp better than Rust: derivatives are simplified by rewriting and compiled to native code, which
//! Rust calls. Run the example with `cargo run --example symbolic`.

use sbcl::{Error, Function, Lisp};

const ALGEBRA: &str = r"
(defpackage :algebra (:use :cl) (:export #:derive #:compiled))
(in-package :algebra)

(defun simplify (form)
  (if (atom form)
      form
      (destructuring-bind (operator a b) (cons (first form) (mapcar #'simplify (rest form)))
        (cond ((and (numberp a) (numberp b)) (funcall operator a b))
              ((and (eq operator '+) (eql a 0)) b)
              ((and (eq operator '+) (eql b 0)) a)
              ((and (eq operator '*) (or (eql a 0) (eql b 0))) 0)
              ((and (eq operator '*) (eql a 1)) b)
              ((and (eq operator '*) (eql b 1)) a)
              (t (list operator a b))))))

(defun d (form x)
  (cond ((eq form x) 1)
        ((atom form) 0)
        (t (destructuring-bind (operator a b) form
             (ecase operator
               (+ (list '+ (d a x) (d b x)))
               (* (list '+ (list '* (d a x) b) (list '* a (d b x)))))))))

(defun derive (text)
  (let ((*package* (find-package :algebra)))
    (string-downcase (prin1-to-string (simplify (d (read-from-string text) 'x))))))

(defun compiled (text)
  (let ((*package* (find-package :algebra)))
    (compile nil `(lambda (x) (declare (double-float x) (optimize speed (sb-ext:inhibit-warnings 3)))
                    ,(read-from-string text)))))
";

fn main() -> Result<(), Error> {
    let lisp = Lisp::builder().boot()?;
    lisp.load_str(ALGEBRA)?;
    let formula = "(+ (* x (* x x)) (* 3 x))";
    let derivative: String = lisp.call("algebra:derive", (formula,))?;
    println!("d/dx {formula} = {derivative}");
    let slope: Function = lisp.call("algebra:compiled", (&derivative,))?;
    // Newton's method finds where the slope is 15; each step calls native code.
    let x = lisp.enter(|_| {
        let mut x = 1.0_f64;
        for _ in 0..50 {
            let y: f64 = slope.call((x,))?;
            x -= (y - 15.0) / (6.0 * x);
        }
        Ok(x)
    })?;
    println!("the slope is 15 at {x}");
    assert!((x - 2.0).abs() < 1e-9);
    Ok(())
}
