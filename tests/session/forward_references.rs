//! Warnings about undefined functions, and method definitions, under concurrency.

use std::sync::mpsc;
use std::time::Duration;

use crate::support::fresh;
use sbcl::{Background, Evaluation};

#[test]
fn forward_reference_gives_no_warning_while_another_connection_declaims() {
    let lisp = fresh();
    let (one, other) = (lisp.session().clone(), lisp.session().connect());
    let ready = "(defvar *go* (sb-thread:make-semaphore)) (defvar *declaimed* (sb-thread:make-semaphore))";
    assert!(one.evaluate(Evaluation::new(ready)).result.is_ok());
    let (sender, receiver) = mpsc::channel();
    // The other connection evaluates while the first one is inside a form.
    let declaiming = "(sb-thread:wait-on-semaphore *go*)
                      (declaim (optimize (speed 2)))
                      (defun of-the-other () 1)
                      (sb-thread:signal-semaphore *declaimed*)";
    let declaiming = Evaluation { background: Background::AtOnce, ..Evaluation::new(declaiming) };
    other.submit(declaiming, move |outcome| drop(sender.send(outcome)));
    let code = "(progn (sb-thread:signal-semaphore *go*)
                       (sb-thread:wait-on-semaphore *declaimed*)
                       (defun first-of-all (x) (defined-later x))
                       (defun second-of-all (x) (defined-nowhere x)))
                (defun defined-later (x) x)";
    let outcome = one.evaluate(Evaluation::new(code));
    let warnings: Vec<_> = outcome.warnings.iter().map(|warning| warning.message.text.as_str()).collect();
    // Only the function that is never defined is reported, as in a compilation unit in bare SBCL.
    assert_eq!(warnings, ["undefined function: COMMON-LISP-USER::DEFINED-NOWHERE"]);
    assert!(receiver.recv_timeout(Duration::from_secs(60)).expect("it ends").result.is_ok());
    other.disconnect();
}

#[test]
fn reset_removes_methods_defined_concurrently_by_multiple_threads() {
    let lisp = fresh();
    let code = "(defgeneric of-threads (x) (:method (x) x))
                (mapc #'sb-thread:join-thread
                      (loop for thread below 4
                            collect (let ((thread thread))
                                      (sb-thread:make-thread
                                       (lambda ()
                                         (dotimes (n 50)
                                           (eval `(defmethod print-object :after ((x (eql ',(cons thread n))) stream)
                                                    stream))))))))
                (length (sb-mop:generic-function-methods #'print-object))";
    let before = lisp.session().evaluate(Evaluation::new("(length (sb-mop:generic-function-methods #'print-object))"));
    assert!(lisp.session().evaluate(Evaluation::new(code)).result.is_ok());
    let (sender, receiver) = mpsc::channel();
    lisp.session().reset(move |result| drop(sender.send(result)));
    receiver.recv_timeout(Duration::from_secs(60)).expect("an answer").expect("a reset");
    let after = lisp.session().evaluate(Evaluation::new("(length (sb-mop:generic-function-methods #'print-object))"));
    assert_eq!(after.result.as_ref().ok(), before.result.as_ref().ok());
}
