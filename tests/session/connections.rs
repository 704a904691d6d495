//! Multiple connections to one image: the state that each has to itself, and the order of their evaluations.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::{error, fresh};
use sbcl::{
    Background, EndedHold, Evaluation, HoldEnd, HoldError, Outcome, RestartDesignator, Resumed, Session, report,
};

/// The time after which a missing reply fails the test.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts an operation with `begin` and waits for the value that it passes to its reply.
fn wait<T: Send + 'static>(begin: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> T {
    let (sender, receiver) = mpsc::channel();
    begin(Box::new(move |value| drop(sender.send(value))));
    receiver.recv_timeout(REPLY_TIMEOUT).expect("an answer")
}

fn eval(session: &Session, code: &str) -> Outcome {
    Arc::unwrap_or_clone(wait(|reply| _ = session.submit(Evaluation::new(code), reply)))
}

/// Evaluates `code`, which must succeed, and returns its values.
fn values(session: &Session, code: &str) -> Vec<String> {
    let outcome = eval(session, code);
    let values = outcome.result.unwrap_or_else(|error| panic!("{code}: {error:?}"));
    values.into_iter().map(|value| value.text).collect()
}

/// Evaluates `code`, which must fail, and holds it in the debugger.
fn hold(session: &Session, code: &str) -> Arc<Outcome> {
    let evaluation = Evaluation { hold: true, ..Evaluation::new(code) };
    let outcome = wait(|reply| _ = session.submit(evaluation, reply));
    assert!(outcome.held, "{outcome:?}");
    outcome
}

fn invoke_restart(session: &Session, restart: &str, values: &str) -> Result<Resumed, HoldError> {
    wait(|reply| _ = session.invoke_restart(&RestartDesignator::Name(restart.to_owned()), values, reply))
}

/// Resumes the held evaluation with a restart, and returns its outcome.
fn resume(session: &Session, restart: &str, values: &str) -> Outcome {
    match invoke_restart(session, restart, values) {
        Ok(Resumed::Outcome(outcome)) => Arc::unwrap_or_clone(outcome),
        other => panic!("{other:?}"),
    }
}

#[test]
fn last_error_and_history_are_separate_per_connection() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    let first = error("agent", &eval(&agent, "(error \"agent's\")")).id;
    assert!(person.last_error().is_none() && person.error_history().is_empty());
    assert_eq!(values(&person, "(+ 1 2)"), ["3"]);
    assert_eq!(agent.last_error().unwrap().id, first, "another's success clears nothing");
    let second = error("person", &eval(&person, "(error \"person's\")")).id;
    assert!(second > first, "numbers never mean two things");
    assert_eq!(values(&agent, "(+ 1 2)"), ["3"]);
    assert!(agent.last_error().is_none());
    assert_eq!(person.last_error().unwrap().message.text, "person's");
    assert_eq!((agent.error(second), person.error(first)), (None, None));
    person.disconnect();
}

#[test]
fn package_repl_and_printer_variables_are_separate_per_connection() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    values(&agent, "(defpackage :p1 (:use :cl)) (in-package :p1) (setf *print-base* 16) (defvar *x* 255) *x*");
    assert_eq!(
        values(&person, "(list * + (package-name *package*) *print-base* 255)"),
        ["(NIL NIL \"COMMON-LISP-USER\" 10 255)"]
    );
    assert_eq!(values(&person, "*"), ["(NIL NIL \"COMMON-LISP-USER\" 10 255)"]);
    values(&person, "(defpackage :p2 (:use :cl)) (in-package :p2) (setf *print-case* :downcase *read-base* 2)");
    assert_eq!(values(&agent, "*"), ["FF"]);
    assert_eq!(values(&agent, "(list 'foo (package-name *package*) *read-base*)"), ["(FOO \"P1\" A)"]);
    assert_eq!(values(&person, "(list 'foo 11 (package-name *package*))"), ["(foo 3 \"P2\")"]);
    // Each connection has its own readtable.
    values(&person, "(set-macro-character #\\! (lambda (s c) (declare (ignore s c)) 111))");
    assert_eq!(values(&person, "!"), ["7"]);
    assert_eq!(values(&agent, "'a!"), ["A!"]);
    // A new connection starts with the default values.
    person.disconnect();
    let another = lisp.session().connect();
    assert_eq!(values(&another, "(list 'foo 11 (package-name *package*))"), ["(FOO 11 \"COMMON-LISP-USER\")"]);
    another.disconnect();
}

#[test]
fn background_evaluation_does_not_change_package_or_repl_variables() {
    let lisp = fresh();
    let person = lisp.session().connect();
    values(&person, "(defpackage :p3 (:use :cl))");
    let later = |code: &str| Evaluation { background: Background::Later, ..Evaluation::new(code) };
    // This evaluation stays in the foreground, so its variables persist.
    let outcome = wait(|reply| _ = person.submit(later("(in-package :p3) 5"), reply));
    assert!(!outcome.is_error());
    assert_eq!(values(&person, "(list * (package-name *package*))"), ["(5 \"P3\")"]);
    let at_once = Evaluation { background: Background::AtOnce, ..Evaluation::new("(in-package :cl-user) 6") };
    let outcome = wait(|reply| _ = person.submit(at_once, reply));
    assert!(!outcome.is_error());
    assert_eq!(values(&person, "(package-name *package*)"), ["\"P3\""]);
    person.disconnect();
}

#[test]
fn held_evaluation_stays_held_while_other_connections_evaluate() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    for (holder, other) in [(&agent, &person), (&person, &agent)] {
        hold(holder, "(let ((a 41)) (+ a (restart-case (error \"held\") (use-value (v) v))))");
        assert!(holder.is_held() && !other.is_held());
        assert_eq!(values(other, "(+ 1 2)"), ["3"]);
        let failed = hold(other, "(+ 5 (restart-case (error \"too\") (use-value (v) v)))");
        assert_eq!(error("too", &failed).message.text, "too");
        assert!(holder.is_held() && other.is_held());
        assert_eq!(holder.last_error().unwrap().message.text, "held");
        let locals = wait(|reply| _ = holder.held_locals(0, 1, reply));
        assert!(locals.is_ok(), "{locals:?}");
        assert_eq!(resume(holder, "use-value", "1").result.unwrap()[0].text, "42");
        assert_eq!(values(holder, "*"), ["42"]);
        assert!(other.is_held() && other.last_error().is_some() && holder.last_error().is_none());
        assert_eq!(resume(other, "use-value", "2").result.unwrap()[0].text, "7");
        assert!(matches!(invoke_restart(other, "abort", ""), Err(HoldError::NothingHeld { .. })));
        // Only the next evaluation of the same connection releases the held one, with a notice.
        hold(holder, "(error \"again\")");
        let text = report::evaluation(&eval(other, "1"));
        assert_eq!(text, "=> 1");
        let text = report::evaluation(&eval(holder, "2"));
        assert!(text.starts_with("[notice]\nThe evaluation held for debugging was ended."), "{text}");
        assert!(!holder.is_held());
    }
    person.disconnect();
}

#[test]
fn held_variables_are_read_while_another_connection_evaluates() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    let directory = tempfile::tempdir().unwrap();
    let [begun, end] = ["begun", "end"].map(|name| directory.path().join(name));
    hold(&agent, "(let ((a 41)) (+ a (restart-case (error \"held\") (use-value (v) v))))");
    let (send, ended) = mpsc::channel();
    let code = format!(
        "(with-open-file (s {begun:?} :direction :output)) (loop until (probe-file {end:?}) do (sleep 0.01)) \
         (sb-thread:main-thread-p)"
    );
    person.submit(Evaluation::new(code), move |outcome| send.send(outcome).expect("somebody waits"));
    let deadline = Instant::now() + REPLY_TIMEOUT;
    while !begun.exists() {
        assert!(Instant::now() < deadline, "the evaluation does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    let locals = wait(|reply| _ = agent.held_locals(0, 1, reply));
    assert!(locals.is_ok(), "{locals:?}");
    assert!(ended.try_recv().is_err(), "the other evaluation has ended");
    std::fs::write(end, "").unwrap();
    let outcome = ended.recv_timeout(REPLY_TIMEOUT).expect("an answer");
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "T", "the foreground is the main thread");
    assert_eq!(resume(&agent, "use-value", "1").result.unwrap()[0].text, "42");
    person.disconnect();
}

#[test]
fn held_evaluation_can_be_taken_over_by_another_connection() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    person.set_name("sbcl-mcp repl");
    person.submit(Evaluation::new("(sleep 0.2)"), |_| ());
    assert!(matches!(person.take_over(None), Err(HoldError::NothingHeld { .. })));
    let held = hold(&agent, "(+ 1 (restart-case (error \"mine\") (use-value (v) v)))");
    let taken = person.take_over(None).unwrap();
    assert!(taken.held && taken.evaluation == held.evaluation);
    assert!(person.is_held() && !agent.is_held());
    assert_eq!(person.last_error(), agent.last_error(), "it is both's last error");
    let refused = invoke_restart(&agent, "use-value", "1");
    let Err(HoldError::NothingHeld { last: Some(EndedHold { evaluation, end, .. }) }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((evaluation, end), (held.evaluation, HoldEnd::TakenOver));
    let text = report::evaluation(&eval(&agent, "1"));
    let number = held.evaluation;
    assert_eq!(
        text,
        format!(
            "[notice]\nAnother client (sbcl-mcp repl) took over evaluation {number}, which was held for debugging.\n\n=> 1"
        )
    );
    assert_eq!(person.evaluation(None).unwrap().id, number);
    assert_eq!(resume(&person, "use-value", "9").result.unwrap()[0].text, "10");
    assert!(person.last_error().is_none());
    // With multiple held evaluations the caller must name one, and a connection that holds one cannot take over another.
    let third = lisp.session().connect();
    let first = hold(&agent, "(error \"a\")").evaluation;
    let second = hold(&third, "(error \"b\")").evaluation;
    let refusal = person.take_over(None).unwrap_err().to_string();
    assert!(refusal.contains(&format!("{first}, {second}")), "{refusal}");
    let refusal = person.take_over(Some(999)).unwrap_err().to_string();
    assert_eq!(refusal, format!("Evaluation 999 is not held. Held evaluations: {first}, {second}."));
    person.take_over(Some(second)).unwrap();
    assert!(person.take_over(Some(first)).unwrap_err().to_string().contains("already holds an evaluation"));
    third.disconnect();
    assert!(person.is_held());
    person.disconnect();
    // A disconnect returns before its cleanup forms have run.
    assert_eq!(values(&agent, "3"), ["3"]);
}

#[test]
fn connection_whose_own_evaluation_may_be_held_cannot_take_over_another() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    let held = hold(&agent, "(error \"theirs\")").evaluation;
    let directory = tempfile::tempdir().unwrap();
    let end = directory.path().join("end");
    let await_end = format!("(loop until (probe-file {end:?}) do (sleep 0.01))");
    let (send, ended) = mpsc::channel();
    let evaluation = Evaluation { hold: true, ..Evaluation::new(format!("{await_end} (error \"mine\")")) };
    person.submit(evaluation, move |outcome| send.send(outcome).expect("somebody waits"));
    assert!(person.take_over(Some(held)).unwrap_err().to_string().contains("runs or waits"));
    std::fs::write(&end, "").unwrap();
    let own = ended.recv_timeout(REPLY_TIMEOUT).expect("an answer").evaluation;
    assert!(person.take_over(Some(held)).unwrap_err().to_string().contains("already holds an evaluation"));
    assert_eq!((agent.held_evaluation(), person.held_evaluation()), (Some(held), Some(own)));
    wait(|reply| _ = person.abort_held(reply)).unwrap();
    // An evaluation in the background is never held.
    std::fs::remove_file(&end).unwrap();
    let evaluation = Evaluation { background: Background::AtOnce, ..Evaluation::new(await_end) };
    person.submit(evaluation, |_| ());
    person.take_over(Some(held)).unwrap();
    assert_eq!((agent.held_evaluation(), person.held_evaluation()), (None, Some(held)));
    std::fs::write(&end, "").unwrap();
    person.disconnect();
    assert_eq!(values(&agent, "3"), ["3"]);
}

#[test]
fn definitions_by_another_connection_are_announced_in_a_notice() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    person.set_name("repl");
    values(&person, "(defun area (w h) (* w h)) (defvar *rate* 2)");
    let text = report::evaluation(&eval(&agent, "(area 2 3)"));
    insta::assert_snapshot!(text, @r"
    [notice]
    Another client (repl) defined AREA, *RATE*.

    => 6
    ");
    values(&person, "(defun area (w h) (+ w h)) (defpackage :mine) 1");
    let text = report::evaluation(&eval(&agent, "(area 2 3)"));
    insta::assert_snapshot!(text, @r"
    [notice]
    Another client (repl) defined MINE; redefined AREA.

    => 5
    ");
    values(&agent, "(defun one () 1)");
    insta::assert_snapshot!(report::evaluation(&eval(&person, "(one)")), @r"
    [notice]
    Another client defined ONE.

    => 1
    ");
    // The notice has a bounded length, and a connection gets none for its own definitions.
    values(&person, "(dotimes (i 500) (eval `(defun ,(intern (format nil \"F~D\" i)) () ,i)))");
    let text = report::evaluation(&eval(&agent, "1"));
    assert!(text.contains("defined F0, F1, ") && text.contains("F19 and possibly more.") && text.len() < 400, "{text}");
    assert_eq!(report::evaluation(&eval(&person, "1")), "=> 1");
    person.disconnect();
    values(&agent, "(defun two () 2)");
}

#[test]
fn notices_for_one_test_are_not_in_the_answers_of_the_next_test() {
    let lisp = fresh();
    let person = lisp.session().connect();
    values(&person, "(defun earlier () 1)");
    person.disconnect();
    drop(lisp);
    assert_eq!(fresh().text("1"), "=> 1");
}

#[test]
fn function_defined_after_fmakunbound_is_announced_as_defined() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    values(&person, "(defun area (w h) (* w h))");
    values(&agent, "1");
    values(&person, "(fmakunbound 'area)");
    values(&person, "(defun area (w h) (+ w h))");
    insta::assert_snapshot!(report::evaluation(&eval(&agent, "1")), @r"
    [notice]
    Another client defined AREA.

    => 1
    ");
    person.disconnect();
}

#[test]
fn disconnect_cancels_and_releases_only_its_own_evaluations() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    values(&agent, "(defvar *unwound* nil) (defvar *begun* (sb-thread:make-semaphore))");
    hold(&agent, "(error \"stays\")");
    let (sender, receiver) = mpsc::channel();
    for code in ["(unwind-protect (progn (sb-thread:signal-semaphore *begun*) (sleep 600)) (setf *unwound* t))", "1"] {
        let sender = sender.clone();
        person.submit(Evaluation { timeout: sbcl::TimeLimit::None, ..Evaluation::new(code) }, move |outcome| {
            drop(sender.send(outcome.result.clone().map_err(|error| error.kind.clone())));
        });
    }
    let began = wait(|reply| {
        let evaluation = Evaluation { background: Background::AtOnce, ..Evaluation::new("(sleep 600)") };
        let job = person.submit(evaluation, reply);
        assert!(person.so_far(job).evaluation > 0);
        // Waits until the first of them runs.
        while !person
            .evaluation(Some(person.so_far(job).evaluation - 2))
            .is_ok_and(|status| matches!(status.progress, sbcl::Progress::Running { .. }))
        {
            std::thread::yield_now();
        }
        person.disconnect();
    });
    assert_eq!(error("in the background", &began).kind, "CANCELLED");
    for _ in 0..2 {
        let ended = receiver.recv_timeout(REPLY_TIMEOUT).unwrap();
        assert_eq!(ended, Err("CANCELLED".to_owned()));
    }
    assert!(agent.is_held() && agent.last_error().unwrap().message.text == "stays");
    let inside = wait(|reply| _ = agent.eval_in_frame(0, "*unwound*", sbcl::TimeLimit::Default, reply));
    let inside = inside.unwrap();
    assert!(matches!(inside.result.as_deref(), Ok([value]) if value.text != "?"), "{inside:?}");
    assert_eq!(values(&agent, "1"), ["1"]);
    // A disconnect releases its held evaluation, which runs its cleanup forms.
    let person = lisp.session().connect();
    values(&agent, "(defvar *released* (sb-thread:make-semaphore))");
    hold(&person, "(unwind-protect (error \"goes\") (sb-thread:signal-semaphore *released*))");
    person.disconnect();
    assert_eq!(values(&agent, "(sb-thread:wait-on-semaphore *released* :timeout 30)"), ["0"]);
}

#[test]
fn inspections_of_a_connection_that_has_ended_create_no_variables() {
    let lisp = fresh();
    let agent = lisp.session().clone();
    let describe = |session: &Session| wait(|reply| _ = session.describe_symbol("car", None, false, reply)).is_ok();
    let count = "(hash-table-count sbcl-host::**connections**)";
    assert!(describe(&agent));
    let before = values(&agent, count);
    let person = lisp.session().connect();
    values(&person, "1");
    person.disconnect();
    assert!(describe(&agent) && describe(&person) && describe(&agent));
    assert_eq!(values(&agent, count), before);
}

#[test]
fn concurrent_connections_evaluate_one_at_a_time() {
    let lisp = fresh();
    let sessions: Vec<_> =
        (0..4).map(|n| if n == 0 { lisp.session().clone() } else { lisp.session().connect() }).collect();
    values(&sessions[0], "(defvar *inside* 0) (defvar *most* 0)");
    std::thread::scope(|scope| {
        for (n, session) in sessions.iter().enumerate() {
            scope.spawn(move || {
                let mut seed = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(n as u64 + 1);
                let mut last = None;
                for round in 0..120_u64 {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    match seed % 5 {
                        0 => {
                            let text = format!("{n}-{round}");
                            let outcome = eval(session, &format!("(error \"{text}\")"));
                            assert_eq!(error(&text, &outcome).message.text, text);
                            last = Some(text);
                        }
                        1 => {
                            let text = format!("held {n}-{round}");
                            hold(session, &format!("(* 2 (restart-case (error \"{text}\") (use-value (v) v)))"));
                            last = Some(text);
                        }
                        2 if session.is_held() => {
                            let outcome = resume(session, "use-value", &round.to_string());
                            assert_eq!(outcome.result.unwrap()[0].text, (2 * round).to_string());
                            last = None;
                        }
                        3 if session.is_held() => {
                            wait(|reply| _ = session.abort_held(reply)).unwrap();
                        }
                        _ => {
                            // The maximum of concurrent evaluations, over all connections, must be 1.
                            let code = "(setf *most* (max *most* (incf *inside*))) (sleep 0.0005) (decf *inside*)";
                            assert_eq!(values(session, code), ["0"]);
                            assert_eq!(values(session, &format!("(list {n} {round})")), [format!("({n} {round})")]);
                            assert_eq!(values(session, "(second *)"), [round.to_string()]);
                            last = None;
                        }
                    }
                    assert_eq!(session.last_error().map(|error| error.message.text.clone()), last);
                }
            });
        }
    });
    assert_eq!(values(&sessions[0], "*most*"), ["1"]);
    for session in &sessions[1..] {
        session.disconnect();
    }
    // Only the main evaluation thread is left.
    let threads = "(length sb-host::**evaluation-threads**)".replace("sb-host", "sbcl-host");
    let until = std::time::Instant::now() + REPLY_TIMEOUT;
    while values(&sessions[0], &threads) != ["1"] {
        assert!(std::time::Instant::now() < until, "{:?}", values(&sessions[0], &threads));
    }
}

/// Asserts that consecutive evaluations of `session` run on Lisp's main thread, as in bare SBCL, so that thread-owned
/// state such as a held mutex is still there in the next one.
#[track_caller]
fn assert_runs_on_main_thread(session: &Session, after: &str) {
    let thread = "(list (sb-thread::thread-os-tid sb-thread:*current-thread*) (sb-thread:main-thread-p))";
    eval(session, "(defvar *mutex* (sb-thread:make-mutex))");
    let first = values(session, thread);
    assert!(first[0].ends_with(" T)"), "{after}: {first:?}");
    assert_eq!(values(session, "(sb-thread:grab-mutex *mutex*)"), ["T"], "{after}");
    assert_eq!(values(session, "(sb-thread:holding-mutex-p *mutex*)"), ["T"], "{after}");
    assert_eq!(values(session, thread), first, "{after}");
    assert_eq!(values(session, "(progn (sb-thread:release-mutex *mutex*) (sb-thread:mutex-owner *mutex*))"), ["NIL"]);
}

#[test]
fn consecutive_evaluations_share_the_main_thread_after_holds_and_background_evaluations() {
    let lisp = fresh();
    let (agent, person) = (lisp.session().clone(), lisp.session().connect());
    assert_runs_on_main_thread(&agent, "at first");
    hold(&agent, "(error \"held\")");
    assert_runs_on_main_thread(&person, "while an evaluation is held");
    wait(|reply| _ = agent.abort_held(reply)).expect("it is released");
    // A held evaluation continues on the main thread.
    hold(&agent, "(list (restart-case (error \"held\") (go-on () 1)) (sb-thread:main-thread-p))");
    assert_runs_on_main_thread(&person, "while an evaluation is held that will be resumed");
    let go_on = RestartDesignator::Name("go-on".to_owned());
    let resumed = wait(|reply| _ = agent.invoke_restart(&go_on, "", reply)).expect("the evaluation resumes");
    let Resumed::Outcome(outcome) = resumed else { panic!("{resumed:?}") };
    assert_eq!(outcome.result.as_ref().expect("a value")[0].text, "(1 T)");
    assert_runs_on_main_thread(&person, "after the resumed evaluation");
    hold(&agent, "(error \"held\")");
    assert_runs_on_main_thread(&agent, "after a held evaluation was released");
    let in_background = |code: &str, background| Evaluation { background, ..Evaluation::new(code) };
    let (sender, ended) = mpsc::channel();
    agent.submit(in_background("(loop until (boundp '*go*))", Background::AtOnce), move |it| sender.send(it).unwrap());
    assert_runs_on_main_thread(&agent, "during an evaluation that began in the background");
    eval(&agent, "(defvar *go* t)");
    ended.recv().unwrap();
    assert_runs_on_main_thread(&agent, "after the background evaluation");
    let (sender, ended) = mpsc::channel();
    let id = agent
        .submit(in_background("(loop until (boundp '*go-on*))", Background::Later), move |it| sender.send(it).unwrap());
    agent.leave_foreground(id).expect("it leaves");
    assert_runs_on_main_thread(&agent, "during an evaluation that left the foreground");
    eval(&agent, "(defvar *go-on* t)");
    ended.recv().unwrap();
    assert_runs_on_main_thread(&agent, "after the evaluation that left the foreground");
    person.disconnect();
}

/// An evaluation with `Background::Never` stays in the foreground.
#[test]
fn leave_foreground_is_refused_without_background_permission() {
    let lisp = fresh();
    let session = lisp.session();
    let (sender, ended) = mpsc::channel();
    let id = session.submit(Evaluation::new("(sleep 0.2)"), move |outcome| sender.send(outcome).unwrap());
    assert_eq!(session.leave_foreground(id), None);
    assert!(!ended.recv().unwrap().is_error());
}
