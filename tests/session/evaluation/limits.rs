//! Time limits and cancellation.

use super::*;

#[test]
fn endless_loop_fails_with_timeout() {
    let lisp = fresh();
    let started = Instant::now();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(defun spin () (loop)) (spin)");
    assert!(started.elapsed() < DEADLINE / 4, "{:?}", started.elapsed());
    let failure = error("loop", &outcome);
    assert_eq!(failure.kind, "TIMEOUT");
    assert!(failure.message.text.contains("configure-limits"), "{}", failure.message.text);
    assert!(failure.message.text.contains("0.3") || failure.message.text.contains("300"), "{}", failure.message.text);
    assert_eq!(missing_frame(&failure, &["SPIN", "EVAL"]), None, "{:#?}", failure.frames);
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn timeout_backtrace_starts_at_the_interrupted_function() {
    let outcome = fresh().eval_for(Duration::from_millis(300), "(defun spin () (loop)) (spin)");
    let failure = error("loop", &outcome);
    assert!(calls(&failure.frames[0].call, "SPIN"), "{:#?}", failure.frames);
}

#[test]
fn long_sleep_fails_with_timeout() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(200), "(defun naps () (list (sleep 100))) (naps)");
    let failure = error("sleep", &outcome);
    assert_eq!(failure.kind, "TIMEOUT");
    assert_eq!(missing_frame(&failure, &["NAPS", "EVAL"]), None, "{:#?}", failure.frames);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn partial_output_is_kept_at_a_time_limit() {
    let outcome = fresh().eval_for(Duration::from_millis(300), "(write-string \"partial\") (warn \"early\") (loop)");
    assert_eq!(outcome.stdout.text, "partial");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: early"]);
    assert_eq!(error("loop", &outcome).kind, "TIMEOUT");
}

#[test]
fn handlers_cannot_swallow_a_time_limit() {
    let lisp = fresh();
    for code in [
        "(loop (ignore-errors (loop)))",
        "(loop (handler-case (sleep 1) (serious-condition () nil) (condition () nil)))",
        "(handler-bind ((condition (lambda (c) (declare (ignore c)) (loop)))) (loop (sleep 1)))",
        "(loop (catch 'top (restart-case (loop) (abort () 1) (retry () 2))))",
        "(loop (block nil (unwind-protect (sleep 1) (ignore-errors (sleep 0.01)))))",
    ] {
        let outcome = lisp.eval_for(Duration::from_millis(300), code);
        assert_eq!(error(code, &outcome).kind, "TIMEOUT", "{code}");
        assert_eq!(lisp.value("(+ 1 2)"), "3", "after {code}");
    }
}

#[test]
fn cleanup_forms_run_at_a_time_limit() {
    let lisp = fresh();
    lisp.values("(defvar *cleaned* nil)");
    let outcome = lisp.eval_for(Duration::from_millis(200), "(unwind-protect (loop) (setf *cleaned* :yes))");
    assert_eq!(error("loop", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("*cleaned*"), ":YES");
}

#[test]
fn the_time_limit_holds_while_a_value_is_printed() {
    let lisp = fresh();
    lisp.values("(defclass sleepy () ()) (defmethod print-object ((o sleepy) s) (declare (ignore s)) (loop))");
    let started = Instant::now();
    _ = lisp.eval_for(Duration::from_millis(300), "(make-instance 'sleepy)");
    assert!(started.elapsed() < DEADLINE / 4, "{:?}", started.elapsed());
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_while_an_error_is_printed() {
    let lisp = fresh();
    lisp.values("(define-condition endless (error) () (:report (lambda (c s) (declare (ignore c s)) (loop))))");
    let outcome = lisp.eval_for(Duration::from_millis(300), "(error 'endless)");
    assert!(outcome.is_error());
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_in_the_reader() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(list #.(loop))");
    assert_eq!(error("reader", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn the_time_limit_holds_during_macro_expansion() {
    let lisp = fresh();
    let outcome = lisp.eval_for(Duration::from_millis(300), "(defmacro endless () (loop)) (defun f () (endless))");
    assert_eq!(error("macro", &outcome).kind, "TIMEOUT");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn evaluation_timeout_overrides_the_session_time_limit() {
    let lisp = fresh();
    let mut limits = Limits::default();
    limits.set_timeout(Some(Duration::from_millis(200))).expect("it is allowed");
    lisp.session().set_limits(limits);
    assert_eq!(lisp.error("(loop)").kind, "TIMEOUT");
    let unlimited = lisp.run(Evaluation { timeout: sbcl::TimeLimit::None, ..Evaluation::new("(sleep 0.5) :slept") });
    assert_eq!(values("sleep", &unlimited), [":SLEPT"]);
    let longer = lisp.eval_for(Duration::from_secs(20), "(sleep 0.5) :slept");
    assert_eq!(values("sleep", &longer), [":SLEPT"]);
}

#[test]
fn expired_time_limit_does_not_interrupt_the_next_evaluation() {
    let lisp = fresh();
    for _ in 0..20 {
        _ = lisp.eval_for(Duration::from_millis(10), "(sleep 0.01)");
        assert_eq!(lisp.value("(dotimes (i 1000) (list i)) :fine"), ":FINE");
    }
}

#[test]
fn a_running_evaluation_can_be_cancelled() {
    let lisp = fresh();
    let (id, outcome) =
        lisp.start("(write-string \"begun\") (force-output) (defun runs () (loop (sleep 0.01))) (runs)");
    lisp.await_running();
    while lisp.session().output_so_far(id, 0).is_none() {
        std::thread::yield_now();
    }
    lisp.session().cancel(id);
    let outcome = outcome.recv_timeout(DEADLINE).expect("a cancelled evaluation is answered");
    let failure = error("cancelled", &outcome);
    assert_eq!(failure.kind, "CANCELLED");
    assert_eq!(outcome.stdout.text, "begun");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn a_queued_evaluation_can_be_cancelled() {
    let lisp = fresh();
    let (_, first) = lisp.start("(sleep 0.3) :first");
    let (id, second) = lisp.start("(defvar *ran* t)");
    lisp.session().cancel(id);
    assert_eq!(error("second", &second.recv_timeout(DEADLINE).expect("an answer")).kind, "CANCELLED");
    assert!(lisp.session().last_error().is_none() && lisp.session().error_history().is_empty(), "it never began");
    assert_eq!(values("first", &first.recv_timeout(DEADLINE).expect("an answer")), [":FIRST"]);
    assert_eq!(lisp.value("(boundp '*ran*)"), "NIL");
}

#[test]
fn cancelling_a_finished_evaluation_does_nothing() {
    let lisp = fresh();
    let (id, outcome) = lisp.start(":over");
    assert_eq!(values("over", &outcome.recv_timeout(DEADLINE).expect("an answer")), [":OVER"]);
    lisp.session().cancel(id);
    lisp.session().cancel(id);
    assert!(lisp.session().last_error().is_none());
    assert_eq!(lisp.value("(sleep 0.05) (+ 1 2)"), "3");
}

#[test]
fn evaluations_run_in_order_of_arrival() {
    let lisp = fresh();
    lisp.values("(defvar *order* nil)");
    let (sender, receiver) = mpsc::channel();
    for number in 0..50 {
        let sender = sender.clone();
        lisp.session().submit(Evaluation::new(format!("(push {number} *order*)")), move |_| _ = sender.send(number));
    }
    let answered: Vec<i32> = (0..50).map(|_| receiver.recv_timeout(DEADLINE).expect("an answer")).collect();
    assert_eq!(answered, (0..50).collect::<Vec<i32>>());
    assert_eq!(lisp.value("(equal (reverse *order*) (loop for i below 50 collect i))"), "T");
}

#[test]
fn evaluate_can_be_called_from_many_threads_at_once() {
    let lisp = fresh();
    lisp.values("(defvar *count* 0)");
    let session = lisp.session();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                for _ in 0..25 {
                    assert!(!session.evaluate(Evaluation::new("(incf *count*)")).is_error());
                }
            });
        }
    });
    assert_eq!(lisp.value("*count*"), "200");
}
