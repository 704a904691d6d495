//! Background evaluations.

use crate::client::{Server, call_err, call_ok, error_id, evaluate_err, last_error, short_limit};
use crate::processes::kill_worker;
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

/// Begins a background evaluation and returns its number.
fn begin(server: &mut Server, code: &str) -> u64 {
    let text = call_ok(server, "evaluate-lisp", json!({"code": code, "background": true}));
    number(&text)
}

/// Returns the evaluation number in the last sentence of an answer.
#[track_caller]
fn number(text: &str) -> u64 {
    let sentence = text.lines().last().unwrap_or_default();
    let number =
        sentence.strip_prefix("Evaluation ").and_then(|rest| rest.strip_suffix(" continues in the background."));
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("the evaluation is not in the background:\n{text}"))
}

fn status(server: &mut Server, id: u64) -> (String, bool) {
    server.call_tool("check-evaluation", json!({"id": id}))
}

fn wait(server: &mut Server, id: u64) -> (String, bool) {
    server.call_tool("check-evaluation", json!({"id": id, "wait": 25}))
}

fn abort(server: &mut Server, id: u64) -> (String, bool) {
    server.call_tool("abort-evaluation", json!({"id": id}))
}

/// Waits until an evaluation runs.
fn await_running(server: &mut Server, id: u64) {
    while !status(server, id).0.contains("running") {
        std::thread::yield_now();
    }
}

/// Defines the semaphore on which [`WAIT`] waits.
fn define_semaphore(server: &mut Server) {
    server.evaluate("(defvar *gate* (sb-thread:make-semaphore))");
}

const WAIT: &str = "(sb-thread:wait-on-semaphore *gate*)";

#[test]
fn background_call_is_answered_at_once_and_check_evaluation_returns_the_result() {
    let mut server = Server::ready();
    define_semaphore(&mut server);
    let id = begin(&mut server, &format!("(princ \"before\") (terpri) {WAIT} (list 1 2)"));
    assert_eq!(id, 2);
    // Further evaluations run on another thread.
    server.assert_works();
    while call_ok(&mut server, "check-evaluation", json!({"id": id, "part": "output"})).ends_with("none.") {}
    let (status, _) = status(&mut server, id);
    assert!(status.starts_with("Evaluation 2: running for ") && status.contains(", in the background\n"), "{status}");
    assert!(status.contains("Output so far: 7 characters"), "{status}");
    server.evaluate("(sb-thread:signal-semaphore *gate*)");
    assert_eq!(wait(&mut server, id), ("[stdout]\nbefore\n\n=> (1 2)".to_owned(), false));
    assert_eq!(wait(&mut server, id), ("[stdout]\nbefore\n\n=> (1 2)".to_owned(), false));
}

#[test]
fn check_evaluation_shows_the_result_of_a_finished_evaluation_even_if_it_must_not_wait() {
    let mut server = Server::ready();
    server.evaluate("42");
    for _ in 0..100 {
        assert_eq!(call_ok(&mut server, "check-evaluation", json!({"id": 1, "wait": 0})), "=> 42");
    }
}

#[test]
fn wait_argument_moves_a_longer_evaluation_to_the_background() {
    let mut server = Server::ready();
    define_semaphore(&mut server);
    // An evaluation that ends within `wait` is a foreground evaluation.
    let foreground = json!({"code": "(defpackage :p (:use :cl)) (in-package :p) (+ 20 1)", "wait": 60});
    assert_eq!(call_ok(&mut server, "evaluate-lisp", foreground), "=> 21");
    assert_eq!(server.evaluate("(list (package-name *package*) *)"), "=> (\"P\" 21)");
    server.evaluate("(in-package :cl-user)");
    let code =
        format!("(princ 'so-far) (terpri) (in-package :p) {} :passed", WAIT.replace("*gate*", "cl-user::*gate*"));
    let text = call_ok(&mut server, "evaluate-lisp", json!({"code": code, "wait": 0.3}));
    let id = number(&text);
    assert_eq!(text, format!("[stdout]\nSO-FAR\n\nEvaluation {id} continues in the background."));
    assert_eq!(
        server.evaluate("(list (package-name *package*) (sb-thread:thread-name sb-thread:*current-thread*))"),
        "=> (\"COMMON-LISP-USER\" \"main thread\")"
    );
    server.evaluate("(sb-thread:signal-semaphore *gate*)");
    assert_eq!(wait(&mut server, id), ("[stdout]\nSO-FAR\n\n=> :PASSED".to_owned(), false));
    // The background evaluation has not changed the session's variables.
    assert_eq!(server.evaluate("(package-name *package*)"), "=> \"COMMON-LISP-USER\"");
}

#[test]
fn package_and_history_variables_are_local_to_the_evaluation() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :p (:use :cl)) (in-package :p) (+ 20 1)");
    let id = begin(&mut server, "(defvar *seen* (list (package-name *package*) *)) (in-package :cl-user) p::*seen*");
    assert_eq!(wait(&mut server, id).0, "=> (\"P\" 21)");
    assert_eq!(server.evaluate("(list (package-name *package*) *)"), "=> (\"P\" 21)");
}

#[test]
fn failure_enters_the_history_at_once_and_check_evaluation_changes_no_error_state() {
    let mut server = Server::ready();
    evaluate_err(&mut server, "(error \"first\")");
    let before = last_error(&mut server);
    let marker = server.home().join("second");
    // The evaluation fails after its call is answered: the answer would name the failure.
    let id = begin(&mut server, &format!("(loop until (probe-file {marker:?}) do (sleep 0.01)) (error \"second\")"));
    assert_eq!(last_error(&mut server), before);
    std::fs::write(&marker, "").unwrap();
    while !call_ok(&mut server, "describe-last-error", json!({"list": 20})).contains("second") {}
    std::fs::remove_file(&marker).unwrap();
    assert_eq!(last_error(&mut server), before);
    let text = server.evaluate("(+ 1 2)");
    assert_eq!(text, format!("[notice]\nBackground evaluation {id} failed with SIMPLE-ERROR (E2).\n\n=> 3"));
    assert!(last_error(&mut server).starts_with("No error information"));
    let (text, is_error) = wait(&mut server, id);
    assert!(is_error && text.starts_with("[ERROR] SIMPLE-ERROR\nsecond\n\n[Backtrace]\n"), "{text}");
    assert!(text.ends_with(&error_id(2)), "{text}");
    assert!(last_error(&mut server).starts_with("No error information"));
    assert_eq!(wait(&mut server, id), (text, true));
    // A client that has seen the outcome gets no notice of it.
    let id = begin(&mut server, "(error \"unheard\")");
    while !call_ok(&mut server, "describe-last-error", json!({"list": 20})).contains("unheard") {}
    assert!(wait(&mut server, id).0.contains("unheard"));
    server.assert_works();
    // Nor does a client that waits for it.
    let marker = server.home().join("third");
    let id = begin(&mut server, &format!("(loop until (probe-file {marker:?}) do (sleep 0.01)) (error \"third\")"));
    let waiting = server.post_call("check-evaluation", json!({"id": id, "wait": 25}));
    std::fs::write(&marker, "").unwrap();
    let (text, is_error) = server.outcome(waiting);
    std::fs::remove_file(&marker).unwrap();
    assert!(is_error && text.contains("third") && text.ends_with(&error_id(4)), "{text}");
    assert!(last_error(&mut server).starts_with("No error information"));
    server.assert_works();
}

#[test]
fn cancelling_by_abort_evaluation_or_notification_ends_the_evaluation() {
    let mut server = Server::ready();
    let id = begin(&mut server, "(unwind-protect (loop) (print 'cleaned))");
    await_running(&mut server, id);
    let (text, is_error) = abort(&mut server, id);
    assert!(!is_error && text.contains("failed") && text.contains("CANCELLED (E1)"), "{text}");
    server.assert_works();
    // Cancelling a call that waits ends its evaluation.
    let call = server.post_call("evaluate-lisp", json!({"code": "(loop)", "wait": 60}));
    await_running(&mut server, id + 2);
    server.notify("notifications/cancelled", json!({"requestId": call}));
    let (text, _) = wait(&mut server, id + 2);
    assert!(text.starts_with("[ERROR] CANCELLED"), "{text}");
    server.assert_works();
}

#[test]
fn sixteen_evaluations_run_at_once_and_one_more_is_refused() {
    let mut server = Server::ready();
    define_semaphore(&mut server);
    let ids: Vec<_> = (0..16)
        .map(|n| {
            begin(&mut server, &format!("(defun made-by-{n} () {n}) (format t \"out ~D\" {n}) {WAIT} (made-by-{n})"))
        })
        .collect();
    server.assert_works();
    let text = call_err(&mut server, "evaluate-lisp", json!({"code": "1", "background": true}));
    assert!(text.starts_with("Background limit reached: 16 evaluations. Wait for an evaluation"), "{text}");
    call_err(&mut server, "evaluate-lisp", json!({"code": "1", "wait": 1}));
    server.evaluate("(sb-thread:signal-semaphore *gate* 16)");
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(wait(&mut server, *id), (format!("[stdout]\nout {n}\n\n=> {n}"), false));
    }
    assert_eq!(begin(&mut server, "1"), ids[15] + 3);
}

#[apply(both_modes)]
fn reset_ends_running_evaluations_with_a_notice(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-06-18");
    let (first, second) = (begin(&mut server, "(loop)"), begin(&mut server, "(loop)"));
    await_running(&mut server, first);
    await_running(&mut server, second);
    let text = call_ok(&mut server, "reset-session", json!({}));
    let ended = format!("[notice]\nBackground evaluations {first} and {second} were ended.\n\n");
    assert_eq!(text, format!("{ended}Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER"));
    // Without a supervisor, a thread may still be ending after its evaluation has ended.
    let code = "(loop repeat 1000 until (null (rest (sb-thread:list-all-threads))) do (sleep 0.01)
                      finally (return (length (sb-thread:list-all-threads))))";
    assert_eq!(server.evaluate(code), "=> 1");
    let (text, is_error) = status(&mut server, first);
    assert!(is_error && text.contains("no longer kept"), "{text}");
}

/// The call was answered before the evaluation began, so only the reset or the loss report can name it.
#[apply(both_modes)]
fn background_evaluation_that_has_not_begun_is_named_by_a_reset_and_an_image_loss(mode: Mode) {
    let mut server = mode.ready();
    server.post_running("", "(sleep 600)", 600.0);
    let id = begin(&mut server, "1");
    let text = call_ok(&mut server, "reset-session", json!({}));
    assert!(text.contains(&format!("Background evaluation {id} was ended.")), "{text}");
    if mode == Mode::Supervised {
        server.post_running("", "(sleep 600)", 600.0);
        let id = begin(&mut server, "1");
        kill_worker(&server);
        let text = server.evaluate("(+ 1 2)");
        assert!(text.contains(&format!("Background evaluation {id} was lost with the image.")), "{text}");
    }
}

#[test]
fn replay_of_a_background_evaluation_leaves_the_sessions_package() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :background (:use :cl))");
    let id = begin(&mut server, "(in-package :background) (defun f () 1)");
    call_ok(&mut server, "check-evaluation", json!({"id": id, "wait": 25}));
    kill_worker(&server);
    let text = server.evaluate("(list (package-name *package*) (background::f))");
    assert!(text.ends_with("=> (\"COMMON-LISP-USER\" 1)"), "{text}");
}

#[test]
fn replay_of_an_evaluation_that_moved_to_the_background_leaves_the_sessions_package() {
    let mut server = Server::ready();
    server.evaluate("(defpackage :moved (:use :cl))");
    let code = "(in-package :moved) (defun f () 1) (sleep 600)";
    let text = call_ok(&mut server, "evaluate-lisp", json!({"code": code, "wait": 0.3}));
    assert!(text.ends_with(" continues in the background."), "{text}");
    kill_worker(&server);
    let text = server.evaluate("(list (package-name *package*) (moved::f))");
    assert!(text.ends_with("=> (\"COMMON-LISP-USER\" 1)"), "{text}");
}

#[test]
fn image_loss_names_the_lost_evaluations() {
    let mut server = Server::ready();
    let id = begin(&mut server, "(loop)");
    await_running(&mut server, id);
    let text = evaluate_err(&mut server, "(sb-posix:kill (sb-posix:getpid) 9)");
    assert!(text.contains("IMAGE-LOST"), "{text}");
    let text = server.evaluate("(+ 1 2)");
    assert_eq!(text, format!("[notice]\nBackground evaluation {id} was lost with the image.\n\n=> 3"));
}

#[test]
fn uninterruptible_evaluation_is_ended_by_replacing_the_image() {
    let code = "(sb-sys:without-interrupts (write-line \"beyond recall\") (finish-output) (loop (sleep 0.01)))";
    let mut server = Server::ready();
    let id = begin(&mut server, code);
    while !server.call_tool("check-evaluation", json!({"id": id, "part": "output"})).0.contains("beyond recall") {
        std::thread::yield_now();
    }
    let text = call_err(&mut server, "abort-evaluation", json!({"id": id}));
    let lost = format!("Background evaluation {id} was lost with the image.");
    assert_eq!(text, format!("{lost} The first evaluation answered after the loss shows the cause."));
    assert_eq!(call_err(&mut server, "check-evaluation", json!({})), text);
    let text = server.evaluate("(list 1)");
    assert!(text.contains("A new image has replaced the lost image."), "{text}");
    let text = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    assert!(text.contains("CANCELLED"), "{text}");
    let text = call_ok(&mut server, "describe-last-error", json!({"error-id": 1}));
    assert!(text.contains("cancelled. The evaluation did not end, so its image was replaced."), "{text}");
    // A time limit replaces the image in the same way.
    let limit = short_limit();
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true, "timeout": limit}));
    call_err(&mut server, "check-evaluation", json!({"wait": 25}));
    let text = call_ok(&mut server, "describe-last-error", json!({"list": 20}));
    assert!(text.contains("TIMEOUT"), "{text}");
    let text = call_ok(&mut server, "describe-last-error", json!({"error-id": 2}));
    let reason = format!(" {limit} seconds");
    assert!(text.contains(&reason) && text.contains(". The evaluation did not end, so its image was"), "{text}");
}

#[test]
fn failed_background_evaluation_is_not_held_for_debugging() {
    let mut server = Server::ready();
    for choice in ["debug", "ask"] {
        let text = call_err(&mut server, "evaluate-lisp", json!({"code": "1", "background": true, "on-error": choice}));
        assert!(text.starts_with("A background evaluation is not held when it fails"), "{text}");
    }
    call_ok(&mut server, "configure-limits", json!({"on-error": "debug"}));
    let id = begin(&mut server, "(error \"not held\")");
    let (text, is_error) = wait(&mut server, id);
    assert!(is_error && !text.contains("[Debugger]"), "{text}");
    // A new background evaluation releases the held one and reports that.
    assert!(evaluate_err(&mut server, "(error \"held\")").contains("[Debugger]"));
    let text = call_ok(&mut server, "evaluate-lisp", json!({"code": "(+ 1 2)", "background": true}));
    assert!(text.starts_with("[notice]\nThe evaluation held for debugging was ended.\n\n"), "{text}");
    let id = number(&text);
    assert_eq!(wait(&mut server, id).0, "=> 3");
}

#[test]
fn progress_names_the_evaluation_a_queued_call_waits_for() {
    let mut server = Server::ready();
    define_semaphore(&mut server);
    let first = server.post_call("evaluate-lisp", json!({"code": WAIT, "timeout": 0}));
    let call = json!({"name": "evaluate-lisp", "arguments": {"code": "(+ 1 2)"}, "_meta": {"progressToken": 7}});
    let second = server.post("tools/call", call);
    let message = loop {
        let message = server.receive().expect("it says something");
        if message["method"] == "notifications/progress" {
            break message["params"]["message"].as_str().expect("a text").to_owned();
        }
    };
    assert!(message.starts_with("waiting for evaluation 2, which has been running for "), "{message}");
    abort(&mut server, 2);
    assert!(server.outcome(first).1);
    assert_eq!(server.outcome(second), ("=> 3".to_owned(), false));
}

#[test]
fn timeout_names_the_running_evaluation_or_the_thread_that_owns_the_lock() {
    let mut server = Server::ready();
    define_semaphore(&mut server);
    server.evaluate("(defvar *lock* (sb-thread:make-mutex)) (defvar *owned* (sb-thread:make-semaphore))");
    let own = format!("(sb-thread:with-mutex (*lock*) (sb-thread:signal-semaphore *owned*) {WAIT})");
    let await_owned = "(sb-thread:wait-on-semaphore *owned*)";
    let time_out = |server: &mut Server, owner: &str| {
        let arguments = json!({"code": "(sb-thread:with-mutex (*lock*) 7)", "timeout": short_limit()});
        let text = call_err(server, "evaluate-lisp", arguments);
        let notice = format!("was waiting for a lock without a name, which {owner} owns.\n");
        assert!(text.contains("[ERROR] TIMEOUT\n") && text.contains(&notice), "{text}");
    };
    let id = begin(&mut server, &own);
    server.evaluate(await_owned);
    time_out(&mut server, &format!("evaluation {id}"));
    server.evaluate("(sb-thread:signal-semaphore *gate*)");
    // Before this evaluation: `id` and three others.
    server.evaluate(&format!("(sb-thread:make-thread (lambda () {own}) :name \"owner\") {await_owned}"));
    time_out(&mut server, &format!("thread owner of evaluation {}", id + 4));
    server.evaluate("(sb-thread:signal-semaphore *gate*)");
}

#[test]
fn abort_thread_fails_the_evaluation_and_the_session_continues() {
    let mut server = Server::ready();
    let id = begin(&mut server, "(sb-thread:abort-thread)");
    let (text, is_error) = wait(&mut server, id);
    assert!(is_error && text.starts_with("[ERROR] THREAD-TERMINATED"), "{text}");
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
    let id = begin(
        &mut server,
        "(list (eq sb-thread:*current-thread* (sb-thread:main-thread)) (length (sb-thread:list-all-threads)))",
    );
    assert_eq!(wait(&mut server, id).0, "=> (NIL 2)");
}

mod schedules {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Begin { wait: Option<f64>, loops: bool },
        Wait(usize),
        Cancel(usize),
        Output(usize),
        Plain,
        Reset,
    }

    fn step() -> impl Strategy<Value = Step> {
        let wait = prop_oneof![Just(None), Just(Some(0.0)), Just(Some(0.002)), Just(Some(0.02))];
        prop_oneof![
            4 => (wait, any::<bool>()).prop_map(|(wait, loops)| Step::Begin { wait, loops }),
            3 => (0..8_usize).prop_map(Step::Wait),
            3 => (0..8_usize).prop_map(Step::Cancel),
            2 => (0..8_usize).prop_map(Step::Output),
            2 => Just(Step::Plain),
            1 => Just(Step::Reset),
        ]
    }

    /// Sends the request of one step and returns its id.
    fn post(server: &mut Server, step: &Step, begun: &mut u64) -> Option<i64> {
        let of = |which: usize, begun: u64| begun.saturating_sub(which as u64).max(1);
        let (name, arguments): (_, Value) = match step {
            Step::Begin { wait, loops } => {
                *begun += 1;
                let n = *begun;
                let code = if *loops {
                    format!("(princ {n}) (loop (sleep 0.001))")
                } else {
                    format!("(princ {n}) (+ {n} 1000)")
                };
                let patience = wait.map_or(json!({"background": true}), |wait| json!({"wait": wait}));
                let mut arguments = json!({"code": code});
                arguments.as_object_mut().expect("an object").extend(patience.as_object().expect("an object").clone());
                ("evaluate-lisp", arguments)
            }
            Step::Wait(which) => ("check-evaluation", json!({"id": of(*which, *begun), "wait": 0.01})),
            Step::Cancel(which) => ("abort-evaluation", json!({"id": of(*which, *begun)})),
            Step::Output(which) => ("check-evaluation", json!({"id": of(*which, *begun), "part": "output"})),
            Step::Plain => {
                *begun += 1;
                ("evaluate-lisp", json!({"code": "(+ 1 2)"}))
            }
            Step::Reset => ("reset-session", json!({})),
        };
        Some(server.post_call(name, arguments))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

        /// Starts, waits, cancellations and resets in any order, without waiting for answers: each call has exactly one
        /// answer, no evaluation's output or value appears in another's answer, and the session still works.
        #[test]
        fn random_schedules_answer_every_call_with_its_own_output(
            steps in prop::collection::vec(step(), 1..25), mode in prop_oneof![Just(Mode::Supervised), Just(Mode::Plain)]
        ) {
            let mut server = mode.start();
            server.initialize("2025-06-18");
            let mut begun = 0;
            let mut asked = Vec::new();
            for step in &steps {
                let refused = begun;
                let id = post(&mut server, step, &mut begun).expect("asked");
                asked.push((id, step.clone(), refused));
            }
            let mut last = 0;
            for (id, step, _) in asked {
                let (text, _) = server.outcome(id);
                // An evaluation beyond the limit is refused and has no number.
                if matches!(step, Step::Begin { .. }) {
                    if let Some(line) = text.lines().last().filter(|line| line.ends_with("continues in the background.")) {
                        let number: u64 = line.split(' ').nth(1).unwrap().parse().unwrap();
                        prop_assert!(number > last, "{text}");
                        last = number;
                    }
                    for value in text.lines().filter_map(|line| line.strip_prefix("=> ")) {
                        let value: u64 = value.parse().unwrap();
                        prop_assert!(text.contains(&format!("[stdout]\n{}\n", value - 1000)), "{text}");
                    }
                }
            }
            call_ok(&mut server, "reset-session", json!({}));
            // A background evaluation's thread ends soon after its evaluation.
            let text = server.evaluate(
                "(list (+ 1 2) (loop repeat 1000 for threads = (length (sb-thread:list-all-threads))
                                     until (= 1 threads) do (sleep 0.01) finally (return threads)))",
            );
            prop_assert!(text.ends_with("=> (3 1)"), "{text}");
            let end = server.finish();
            prop_assert!(end.status.success());
        }
    }
}
