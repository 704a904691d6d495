//! `on-error: "ask"`: the user chooses a restart, by elicitation or by repeated calls.

use crate::attach::RuntimeDirectory;
use crate::client::{Server, outcome};
use crate::processes::kill_worker;
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

const CODE: &str =
    "(format t \"before~%\")\n(list (restart-case (error \"boo\") (take (x) :report \"Take it\" x)) :end)";

/// Starts a server whose client supports elicitation.
fn elicitation_server(mode: Mode, capabilities: &Value) -> Server {
    elicitation_server_with(mode, &[], capabilities)
}

fn elicitation_server_with(mode: Mode, arguments: &[&str], capabilities: &Value) -> Server {
    let mut server = mode.start_with(arguments);
    let client = json!({"name": "raw", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": client});
    assert_eq!(server.request("initialize", params)["result"]["protocolVersion"], "2025-11-25");
    server.notify("notifications/initialized", json!({}));
    server
}

fn post_asking(server: &mut Server, code: &str) -> i64 {
    server.post_call("evaluate-lisp", json!({"code": code, "on-error": "ask"}))
}

/// Returns the id and the params of the next elicitation.
#[track_caller]
fn next_question(server: &mut Server) -> (Value, Value) {
    let request = server.receive().expect("a question");
    assert_eq!(request["method"], "elicitation/create", "{request}");
    (request["id"].clone(), request["params"].clone())
}

fn reply(server: &mut Server, id: &Value, result: &Value) {
    server.send(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
}

/// Returns the offered choice that begins with `name`.
#[track_caller]
fn offered_choice(params: &Value, name: &str) -> Value {
    let choices = params["requestedSchema"]["properties"]["restart"]["enum"].as_array().expect("choices");
    let fits = |choice: &&Value| choice.as_str().unwrap().contains(name);
    choices.iter().find(fits).unwrap_or_else(|| panic!("no {name} in {choices:?}")).clone()
}

fn accept(restart: &Value, values: &str) -> Value {
    json!({"action": "accept", "content": {"restart": restart, "values": values}})
}

#[apply(both_modes)]
fn elicitation_lets_the_user_choose_a_restart(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let call = post_asking(&mut server, CODE);
    let (id, params) = next_question(&mut server);
    insta::allow_duplicates! { insta::assert_snapshot!(params["message"].as_str().unwrap(), @r"
    The Lisp evaluation failed with SIMPLE-ERROR:
    boo
    How should the evaluation continue?
    "); }
    let schema = &params["requestedSchema"];
    assert_eq!(
        schema["properties"]["restart"]["enum"],
        json!(["1. TAKE - Take it", "2. RETRY - Evaluate this form again.", "3. ABORT - Return to top level."])
    );
    let values = &schema["properties"]["values"];
    assert_eq!(values["type"], "string");
    let description =
        "Lisp expressions for the restart's arguments: `41`, or `1 (list 2)`; empty if the restart takes none.";
    assert_eq!(values["description"], description);
    assert_eq!(schema["required"], json!(["restart"]));
    reply(&mut server, &id, &accept(&offered_choice(&params, "TAKE"), "(+ 40 2)"));
    let expected = "[notice]\nThe evaluation failed with SIMPLE-ERROR. The user chose restart 1 (TAKE), and the \
                    evaluation continued.\n\n[stdout]\nbefore\n\n=> (42 :END)";
    assert_eq!(server.outcome(call), (expected.to_owned(), false));
    server.assert_works();
    assert!(server.finish().status.success());
}

#[apply(both_modes)]
fn further_errors_and_failing_restart_values_ask_the_user_again(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {"form": {}}}));
    let call = post_asking(
        &mut server,
        "(list (restart-case (error \"one\") (take (x) x)) (restart-case (error \"two\") (take (x) x)))",
    );
    for (message, values) in [("one", "1"), ("two", "(/ 1 0)"), ("two", "2")] {
        let (id, params) = next_question(&mut server);
        assert!(params["message"].as_str().unwrap().contains(message), "{params}");
        reply(&mut server, &id, &accept(&offered_choice(&params, "TAKE"), values));
    }
    let (text, is_error) = server.outcome(call);
    assert!(!is_error && text.ends_with("\n\n=> (1 2)"), "{text}");
    let failed = "An expression for a value failed: the restart was not invoked, and the evaluation is still held.\n\
                  Resuming the evaluation failed with DIVISION-BY-ZERO: ";
    assert!(text.contains(failed), "{text}");
}

#[apply(both_modes)]
fn declined_elicitation_aborts_the_evaluation_with_a_notice(mode: Mode) {
    for action in ["decline", "cancel"] {
        let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
        server.evaluate("(defvar *cleaned* nil)");
        let call = post_asking(&mut server, "(unwind-protect (error \"boo\") (setf *cleaned* t))");
        let (id, _) = next_question(&mut server);
        reply(&mut server, &id, &json!({"action": action}));
        let (text, is_error) = server.outcome(call);
        let said = "[notice]\nThe user chose no restart: the evaluation was aborted.\n\n[ERROR] SIMPLE-ERROR\nboo\n";
        assert!(is_error && text.starts_with(said) && !text.contains("[Debugger]"), "{text}");
        assert_eq!(server.evaluate("*cleaned*"), "=> T");
    }
}

#[apply(both_modes)]
fn choosing_abort_aborts_the_evaluation_with_a_notice(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let call = post_asking(&mut server, "(error \"boo\")");
    let (id, params) = next_question(&mut server);
    reply(&mut server, &id, &accept(&offered_choice(&params, "ABORT"), ""));
    let (text, is_error) = server.outcome(call);
    let said = "[notice]\nThe user chose restart 2 (ABORT): the evaluation was aborted.\n\n[ERROR] SIMPLE-ERROR\nboo\n";
    assert!(is_error && text.starts_with(said) && !text.contains("[Debugger]"), "{text}");
    let (text, _) = server.call_tool("describe-last-error", json!({}));
    assert!(text.starts_with("Error: SIMPLE-ERROR\n"), "{text}");
}

#[apply(both_modes)]
fn invalid_elicitation_answer_leaves_the_evaluation_held(mode: Mode) {
    for answer in [
        json!({"result": {"action": "accept"}}),
        json!({"result": {"action": "accept", "content": {"restart": "whichever"}}}),
        json!({"result": {"action": "accept", "content": {"restart": "9. NONE - such"}}}),
        json!({"error": {"code": -32601, "message": "not today"}}),
    ] {
        let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
        let call = post_asking(&mut server, CODE);
        let (id, _) = next_question(&mut server);
        let mut message = json!({"jsonrpc": "2.0", "id": id});
        message.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
        server.send(&message);
        let (text, is_error) = server.outcome(call);
        assert!(is_error && text.starts_with("[notice]\nThe ") && text.contains("\n\n[Debugger]\nHeld. "), "{text}");
        let (text, _) = server.call_tool("invoke-restart", json!({"restart": "TAKE", "values": "1"}));
        assert_eq!(text, "=> (1 :END)");
    }
}

#[apply(both_modes)]
fn answer_that_is_too_large_ends_its_question_and_gets_no_error(mode: Mode) {
    let values = format!("[0{}]", ",0".repeat(1_000_000));
    let long = format!("\"{}\"", "x".repeat(64 << 20));
    for (content, reason) in [(values, "more than 1000000 JSON values"), (long, "longer than 64 MiB")] {
        let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
        let call = post_asking(&mut server, CODE);
        let (id, _) = next_question(&mut server);
        let result = format!("{{\"action\":\"accept\",\"content\":{content}}}");
        server.send_raw(format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{result}}}\n").as_bytes());
        let message = server.receive().expect("the answer to the call");
        assert_eq!(message["id"], call, "{message}");
        let (text, is_error) = outcome(&message);
        assert!(is_error && text.contains(reason) && text.contains("\n\n[Debugger]\nHeld. "), "{text}");
        let (text, _) = server.call_tool("invoke-restart", json!({"restart": "TAKE", "values": "1"}));
        assert_eq!(text, "=> (1 :END)");
    }
}

#[apply(both_modes)]
fn client_without_form_elicitation_gets_a_held_evaluation(mode: Mode) {
    for capabilities in [json!({}), json!({"elicitation": {"url": {}}})] {
        let mut server = elicitation_server(mode, &capabilities);
        let call = post_asking(&mut server, CODE);
        let (text, is_error) = server.outcome(call);
        assert!(is_error && text.contains("\n\n[Debugger]\nHeld. Restarts:\n  1. TAKE - Take it\n"), "{text}");
        let (text, _) = server.call_tool("invoke-restart", json!({"restart": 1, "values": "1"}));
        assert_eq!(text, "=> (1 :END)");
    }
}

#[apply(both_modes)]
fn successful_evaluation_asks_the_user_nothing(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let call = post_asking(&mut server, "(+ 1 2)");
    assert_eq!(server.outcome(call), ("=> 3".to_owned(), false));
}

#[apply(both_modes)]
fn timeout_asks_the_user_and_continue_resumes_the_evaluation(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let code = "(unwind-protect (loop) (print :ended))";
    let call = server.post_call("evaluate-lisp", json!({"code": code, "on-error": "ask", "timeout": 0.2}));
    for name in ["1. CONTINUE - Continue the evaluation.", "3. ABORT - Return to top level."] {
        let (id, params) = next_question(&mut server);
        reply(&mut server, &id, &accept(&offered_choice(&params, name), ""));
    }
    let (text, is_error) = server.outcome(call);
    assert!(is_error && text.contains("[ERROR] TIMEOUT\n"), "{text}");
}

#[apply(both_modes)]
fn cancelled_call_withdraws_its_elicitation(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let call = post_asking(&mut server, CODE);
    let (id, _) = next_question(&mut server);
    server.notify("notifications/cancelled", json!({"requestId": call}));
    let withdrawn = server.receive().expect("a message");
    assert_eq!(withdrawn["method"], "notifications/cancelled", "{withdrawn}");
    assert_eq!(withdrawn["params"]["requestId"], id);
    server.assert_works();
    let (text, is_error) = server.call_tool("eval-in-frame", json!({"frame": 0, "code": "1"}));
    assert!(is_error && text.starts_with("No evaluation is held"), "{text}");
    // An answer to a withdrawn elicitation is ignored.
    reply(&mut server, &id, &json!({"action": "decline"}));
    server.assert_works();
    assert!(server.finish().status.success());
}

/// Asserts that the next message withdraws the question with this id.
#[track_caller]
fn assert_withdrawn(server: &mut Server, question: &Value) {
    let withdrawn = server.receive().expect("a message");
    assert_eq!(withdrawn["method"], "notifications/cancelled", "{withdrawn}");
    assert_eq!(withdrawn["params"]["requestId"], *question);
}

/// Evaluates code that is held and that has a restart `OTHER`, which must not run.
const OTHER: &str = "(restart-case (error \"other\") (other () (setf *ran* t)))";

/// Posts an evaluation of [`OTHER`] that waits behind an aborted evaluation.
fn post_other(server: &mut Server) -> i64 {
    server.post_call("evaluate-lisp", json!({"code": OTHER, "on-error": "debug"}))
}

/// Asserts that [`OTHER`], evaluated by `call`, is held as when it failed.
#[track_caller]
fn assert_other_is_untouched(server: &mut Server, call: i64) {
    let (text, is_error) = server.outcome(call);
    assert!(is_error && text.contains("\n\n[Debugger]\nHeld. "), "{text}");
    let (text, _) = server.call_tool("eval-in-frame", json!({"frame": 0, "code": "*ran*"}));
    assert!(text.ends_with("=> NIL"), "{text}");
    assert_eq!(server.call_tool("abort-evaluation", json!({})).0, "Evaluation aborted.");
}

#[apply(both_modes)]
fn question_is_withdrawn_and_its_call_answered_when_another_request_ends_the_hold(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    let code = "(list (restart-case (error \"boo\") (take (x) x)) (restart-case (error \"more\") (take (x) x)))";
    let resumed = "[notice]\nThe user chose no restart: another request resumed the evaluation.\n\n";
    let aborted = "[notice]\nThe user chose no restart: another request aborted the evaluation.\n\n";
    for (tool, arguments, notice, end) in [
        ("abort-evaluation", json!({}), aborted, "[ERROR] SIMPLE-ERROR\nboo\n"),
        ("invoke-restart", json!({"restart": "ABORT"}), aborted, "[ERROR] SIMPLE-ERROR\nboo\n"),
        ("invoke-restart", json!({"restart": "TAKE", "values": "1"}), resumed, "[ERROR] SIMPLE-ERROR\nmore\n"),
    ] {
        let call = post_asking(&mut server, code);
        let (question, _) = next_question(&mut server);
        let other = server.post_call(tool, arguments);
        assert_withdrawn(&mut server, &question);
        let (text, is_error) = server.outcome(call);
        assert!(is_error && text.starts_with(&format!("{notice}{end}")), "{tool}: {text}");
        // The evaluation is held again only by the second error.
        assert_eq!(text.contains("[Debugger]"), notice == resumed, "{text}");
        server.outcome(other);
    }
    assert_eq!(server.call_tool("invoke-restart", json!({"restart": "TAKE", "values": "2"})).0, "=> (1 2)");

    let call = post_asking(&mut server, CODE);
    let (question, _) = next_question(&mut server);
    // A request that leaves the evaluation held does not end the question.
    let (text, is_error) = server.call_tool("invoke-restart", json!({"restart": "NONE"}));
    assert!(is_error, "{text}");
    let other = server.post_call("invoke-restart", json!({"restart": "TAKE", "values": "1"}));
    assert_withdrawn(&mut server, &question);
    assert_eq!(server.outcome(call), (format!("{resumed}[stdout]\nbefore\n\n=> (1 :END)"), false));
    assert_eq!(server.outcome(other), ("=> (1 :END)".to_owned(), false));
    server.assert_works();
}

#[apply(both_modes)]
fn late_answer_or_cancellation_of_a_question_acts_on_no_other_evaluation(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    server.evaluate("(defvar *ran* nil)");
    for late in ["accept", "decline", "cancelled"] {
        // The answer arrives while the evaluation unwinds, and after its question has ended.
        let marker = server.home().join(late);
        let code = format!(
            "(unwind-protect (restart-case (error \"boo\") (take () :harmless))
               (loop until (probe-file {marker:?}) do (sleep 0.01)))"
        );
        let call = post_asking(&mut server, &code);
        let (question, params) = next_question(&mut server);
        let abort = server.post_call("abort-evaluation", json!({}));
        let other = post_other(&mut server);
        let answers = [accept(&offered_choice(&params, "TAKE"), ""), json!({"action": "decline"})];
        match late {
            "accept" => reply(&mut server, &question, &answers[0]),
            "decline" => reply(&mut server, &question, &answers[1]),
            _ => server.notify("notifications/cancelled", json!({"requestId": call})),
        }
        server.request("ping", json!({}));
        std::fs::write(&marker, "").unwrap();
        assert_eq!(server.outcome(abort).0, "Evaluation aborted.");
        if late != "cancelled" {
            let (text, is_error) = server.outcome(call);
            assert!(is_error && text.contains("The evaluation was no longer held.\n"), "{text}");
            assert!(!text.contains("[Debugger]"), "{text}");
        }
        for answer in &answers {
            reply(&mut server, &question, answer);
        }
        server.notify("notifications/cancelled", json!({"requestId": call}));
        assert_other_is_untouched(&mut server, other);
    }
    server.assert_works();
}

#[apply(both_modes)]
fn question_that_expires_while_another_request_resumes_the_evaluation_reports_the_result(mode: Mode) {
    let arguments = ["--hold", "2", "--watch-interval", "100"];
    let mut server = elicitation_server_with(mode, &arguments, &json!({"elicitation": {}}));
    let call = post_asking(&mut server, "(restart-case (error \"boo\") (take () (sleep 3) :resumed))");
    next_question(&mut server);
    let other = server.post_call("invoke-restart", json!({"restart": "TAKE"}));
    let (text, is_error) = server.outcome(call);
    assert!(!is_error && text.ends_with("\n\n=> :RESUMED"), "{text}");
    assert_eq!(server.outcome(other), ("=> :RESUMED".to_owned(), false));
}

#[apply(both_modes)]
fn reset_by_another_client_cancels_a_call_with_an_open_elicitation(mode: Mode) {
    let directory = RuntimeDirectory::new(mode);
    let mut server = directory.server(&[]);
    let mut client = directory.attach_with(&server, json!({"elicitation": {}}));
    let call = client.post_call("evaluate-lisp", json!({"code": CODE, "on-error": "ask"}));
    assert_eq!(client.read().expect("a question")["method"], "elicitation/create");
    assert!(server.call_tool("reset-session", json!({})).0.contains("Session reset."));
    let (text, is_error) = outcome(&client.answer(call));
    assert!(is_error && text.contains("[ERROR] CANCELLED\n"), "{text}");
}

#[test]
fn answer_to_a_question_of_a_lost_image_acts_on_no_question_of_the_next() {
    let mut server = elicitation_server(Mode::Supervised, &json!({"elicitation": {}}));
    let mut answered = Vec::new();
    for round in 0..4 {
        let call = post_asking(&mut server, "(restart-case (error \"boo\") (take () :taken))");
        let (question, params) = next_question(&mut server);
        let chosen = accept(&offered_choice(&params, "TAKE"), "");
        // Answers to the questions of earlier images.
        for former in &answered {
            assert_ne!(question, *former);
            reply(&mut server, former, &chosen);
        }
        if round % 2 == 0 {
            kill_worker(&server);
            assert_withdrawn(&mut server, &question);
        } else {
            let reset = server.post_call("reset-session", json!({}));
            assert_withdrawn(&mut server, &question);
            server.outcome(reset);
        }
        let (text, is_error) = server.outcome(call);
        assert!(is_error && !text.contains(":TAKEN"), "{text}");
        answered.push(question);
    }
}

#[test]
fn question_to_an_attached_client_is_withdrawn_when_the_image_is_lost() {
    let directory = RuntimeDirectory::new(Mode::Supervised);
    let mut server = directory.server(&[]);
    let mut client = directory.attach_with(&server, json!({"elicitation": {}}));
    let call = client.post_call("evaluate-lisp", json!({"code": CODE, "on-error": "ask"}));
    let question = client.read().expect("a question");
    assert_eq!(question["method"], "elicitation/create");
    kill_worker(&server);
    let withdrawn = client.read().expect("a message");
    assert_eq!(withdrawn["method"], "notifications/cancelled", "{withdrawn}");
    assert_eq!(withdrawn["params"]["requestId"], question["id"]);
    let (text, is_error) = outcome(&client.answer(call));
    assert!(is_error && text.contains("[ERROR] IMAGE-LOST\n"), "{text}");
    // The first answer has the notice about the lost image.
    server.evaluate("1");
    server.assert_works();
}

#[test]
fn late_answer_to_a_question_of_a_lost_image_acts_on_no_question_of_the_same_batch() {
    let mut server = elicitation_server(Mode::Supervised, &json!({"elicitation": {}}));
    let call = |id: i64| {
        let arguments = json!({"code": CODE, "on-error": "ask"});
        let params = json!({"name": "evaluate-lisp", "arguments": arguments});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
    };
    server.send(&json!([call(1001), call(1002)]));
    let (lost, _) = next_question(&mut server);
    kill_worker(&server);
    assert_withdrawn(&mut server, &lost);
    // The next image evaluates the second call of the batch for the first time.
    let (question, params) = next_question(&mut server);
    assert_ne!(question, lost);
    reply(&mut server, &lost, &json!({"action": "decline"}));
    reply(&mut server, &question, &accept(&offered_choice(&params, "TAKE"), "1"));
    let answers = server.receive().expect("the answers to the batch");
    let of = |id: i64| answers.as_array().unwrap().iter().find(|answer| answer["id"] == id).expect("an answer");
    let (text, is_error) = outcome(of(1001));
    assert!(is_error && text.contains("[ERROR] IMAGE-LOST\n"), "{text}");
    let (text, is_error) = outcome(of(1002));
    assert!(!is_error && text.ends_with("=> (1 :END)"), "{text}");
}

#[apply(both_modes)]
fn evaluations_queue_while_an_elicitation_is_open(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    // The second call is sent before or after the first one fails.
    let first = post_asking(&mut server, CODE);
    let second = post_asking(&mut server, "(list (restart-case (error \"second\") (take (x) x)))");
    let (id, params) = next_question(&mut server);
    let third = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    // No other call is answered meanwhile, except those that need no evaluation.
    assert_eq!(server.request("ping", json!({}))["result"], json!({}));
    let (text, _) = server.call_tool("get-backtrace", json!({"locals": true}));
    assert!(text.starts_with("Backtrace (live) for "), "{text}");
    let (text, _) = server.call_tool("check-evaluation", json!({"id": 3}));
    assert!(text.starts_with("Evaluation 3: waiting"), "{text}");
    reply(&mut server, &id, &accept(&offered_choice(&params, "TAKE"), "1"));
    let (text, is_error) = server.outcome(first);
    assert!(!is_error && text.ends_with("=> (1 :END)"), "{text}");
    let (id, params) = next_question(&mut server);
    assert!(params["message"].as_str().unwrap().contains("second"), "{params}");
    reply(&mut server, &id, &accept(&offered_choice(&params, "TAKE"), "2"));
    let (text, is_error) = server.outcome(second);
    assert!(!is_error && text.ends_with("=> (2)"), "{text}");
    assert_eq!(server.outcome(third), ("=> 3".to_owned(), false));
    server.assert_works();
}

/// The job of the chosen restart has a higher number than the job of the call that waits.
#[test]
fn a_long_evaluation_that_waited_for_the_users_choice_keeps_its_image() {
    let capabilities = json!({"elicitation": {}});
    // The supervisor ends a worker that runs nothing for 20 checks, here two seconds, although a client waits.
    let mut server = elicitation_server_with(Mode::Supervised, &["--watch-interval", "100"], &capabilities);
    let asking = post_asking(&mut server, CODE);
    let (id, params) = next_question(&mut server);
    let waiting = server.post_call("evaluate-lisp", json!({"code": "(loop repeat 30 do (sleep 0.1))"}));
    server.request("ping", json!({}));
    reply(&mut server, &id, &accept(&offered_choice(&params, "TAKE"), "1"));
    assert!(server.outcome(asking).0.ends_with("=> (1 :END)"));
    assert_eq!(server.outcome(waiting), ("=> NIL".to_owned(), false));
}

#[test]
fn a_call_that_waits_for_the_users_choice_runs_when_the_choice_ends_the_image() {
    let mut server = elicitation_server(Mode::Supervised, &json!({"elicitation": {}}));
    let code = "(restart-case (error \"boo\") (die () (sb-posix:kill (sb-posix:getpid) 9) (sleep 10)))";
    let asking = post_asking(&mut server, code);
    let (id, params) = next_question(&mut server);
    let waiting = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    server.request("ping", json!({}));
    reply(&mut server, &id, &accept(&offered_choice(&params, "DIE"), ""));
    let (text, is_error) = server.outcome(asking);
    assert!(is_error && text.starts_with("[ERROR] IMAGE-LOST\n"), "{text}");
    let (text, is_error) = server.outcome(waiting);
    assert!(!is_error && text.ends_with("=> 3"), "{text}");
}

#[apply(both_modes)]
fn unanswered_elicitation_expires_with_hold_and_the_queue_continues(mode: Mode) {
    let mut server =
        elicitation_server_with(mode, &["--hold", "0.3", "--watch-interval", "100"], &json!({"elicitation": {}}));
    let first = post_asking(&mut server, CODE);
    let second = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    next_question(&mut server);
    assert!(server.outcome(first).1);
    let (text, is_error) = server.outcome(second);
    assert!(!is_error && text.contains("was ended") && text.ends_with("=> 3"), "{text}");
}

#[apply(both_modes)]
fn reset_does_not_wait_for_an_open_elicitation(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    for _ in 0..20 {
        // The reset arrives before the first call fails, during its elicitation, or afterwards.
        let first = post_asking(&mut server, CODE);
        let second = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
        let reset = server.post_call("reset-session", json!({}));
        // Both calls are answered; the first one may report its own error instead of the reset.
        assert!(server.outcome(first).1);
        server.outcome(second);
        assert!(server.outcome(reset).0.contains("Session reset."));
        let (text, _) = server.call_tool("describe-last-error", json!({}));
        assert!(text.starts_with("No error"), "{text}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn server_exits_at_end_of_input_during_an_open_elicitation(mode: Mode) {
    let mut server = elicitation_server(mode, &json!({"elicitation": {}}));
    post_asking(&mut server, CODE);
    next_question(&mut server);
    assert!(server.finish().status.success());
}

// ---- Revision 2026-07-28: the call is repeated with the input

/// Returns the `_meta` of a request without a handshake.
fn meta(capabilities: &Value) -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    })
}

/// Returns the params of a tool call without a handshake, with `more` added.
fn params(capabilities: &Value, code: &str, more: Value) -> Value {
    let arguments = json!({"code": code, "on-error": "ask"});
    let mut params = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": meta(capabilities)});
    if let Value::Object(more) = more {
        params.as_object_mut().unwrap().extend(more);
    }
    params
}

fn call(server: &mut Server, capabilities: &Value, code: &str, more: Value) -> Value {
    server.request("tools/call", params(capabilities, code, more))
}

#[apply(both_modes)]
fn input_required_call_is_repeated_with_the_chosen_restart(mode: Mode) {
    let can = json!({"elicitation": {"form": {}}});
    let mut server = mode.start();
    let code = "(format t \"once~%\") (list (restart-case (error \"one\") (take (x) x)) (restart-case (error \"two\") (take (x) x)))";
    let mut answer = call(&mut server, &can, code, Value::Null);
    let mut states = Vec::new();
    for (message, values) in [("one", "1"), ("two", "2")] {
        let result = &answer["result"];
        assert_eq!(result["resultType"], "input_required", "{answer}");
        let request = &result["inputRequests"]["restart"];
        assert_eq!(request["method"], "elicitation/create", "{answer}");
        assert!(request["params"]["message"].as_str().unwrap().contains(message), "{answer}");
        let chosen = accept(&offered_choice(&request["params"], "TAKE"), values);
        let state = result["requestState"].clone();
        assert!(state.is_string() && !states.contains(&state), "{answer}");
        states.push(state.clone());
        answer = call(&mut server, &can, code, json!({"inputResponses": {"restart": chosen}, "requestState": state}));
    }
    assert_eq!(answer["result"]["resultType"], "complete", "{answer}");
    let (text, is_error) = outcome(&answer);
    assert!(!is_error && text.ends_with("\n\n[stdout]\nonce\n\n=> (1 2)"), "{text}");
    // A late repetition of the call evaluates nothing.
    let late = json!({"inputResponses": {"restart": {"action": "decline"}}, "requestState": states[0]});
    let (text, is_error) = outcome(&call(&mut server, &can, code, late));
    assert!(is_error && text.contains("belongs to no open question"), "{text}");
}

#[apply(both_modes)]
fn repeated_call_may_decline_or_omit_its_input_response(mode: Mode) {
    let can = json!({"elicitation": {}});
    let mut server = mode.start();
    let first = call(&mut server, &can, CODE, Value::Null);
    let state = first["result"]["requestState"].clone();
    // A repetition without an input response repeats the question.
    let again = call(&mut server, &can, CODE, json!({"requestState": state}));
    assert_eq!(again["result"]["inputRequests"], first["result"]["inputRequests"]);
    let state = again["result"]["requestState"].clone();
    let no = json!({"inputResponses": {"restart": {"action": "decline"}}, "requestState": state});
    let (text, is_error) = outcome(&call(&mut server, &can, CODE, no));
    assert!(
        is_error && text.starts_with("[notice]\nThe user chose no restart: the evaluation was aborted.\n\n"),
        "{text}"
    );
    // A restart of an aborted evaluation can no longer be chosen.
    let first = call(&mut server, &can, CODE, Value::Null);
    let aborted = server.request("tools/call", json!({"name": "abort-evaluation", "_meta": meta(&can)}));
    assert!(!outcome(&aborted).1, "{aborted}");
    let late =
        json!({"inputResponses": {"restart": {"action": "decline"}}, "requestState": first["result"]["requestState"]});
    let (text, is_error) = outcome(&call(&mut server, &can, CODE, late));
    assert!(is_error && text.contains("belongs to no open question"), "{text}");
}

#[rstest::rstest]
#[case::reset(false)]
#[case::loss(true)]
fn answer_to_a_question_of_an_earlier_image_is_refused_with_the_reason(#[case] is_lost: bool) {
    let can = json!({"elicitation": {}});
    let mut server = Mode::Supervised.start();
    let first = call(&mut server, &can, CODE, Value::Null);
    let state = &first["result"]["requestState"];
    if is_lost {
        kill_worker(&server);
    } else {
        server.request("tools/call", json!({"name": "reset-session", "_meta": meta(&can)}));
    }
    let late = json!({"inputResponses": {"restart": {"action": "decline"}}, "requestState": state});
    let (text, is_error) = outcome(&call(&mut server, &can, CODE, late));
    assert!(is_error && text.contains("belongs to no open question"), "{text}");
    let reason = if is_lost { ", the image was lost, or " } else { ", the session was reset or restored, " };
    assert!(text.contains(reason), "{text}");
}

#[apply(both_modes)]
fn late_repetition_of_an_input_required_call_acts_on_no_other_evaluation(mode: Mode) {
    let can = json!({"elicitation": {}});
    let mut server = mode.start();
    let evaluated = server.request("tools/call", params(&can, "(defvar *ran* nil)", Value::Null));
    assert!(!outcome(&evaluated).1, "{evaluated}");
    let code = "(unwind-protect (restart-case (error \"boo\") (take () :harmless)) (sleep 0.3))";
    for late in ["accept", "decline"] {
        let first = call(&mut server, &can, code, Value::Null);
        let result = &first["result"];
        let answer = match late {
            "accept" => accept(&offered_choice(&result["inputRequests"]["restart"]["params"], "TAKE"), ""),
            _ => json!({"action": "decline"}),
        };
        let more = json!({"inputResponses": {"restart": answer}, "requestState": result["requestState"]});
        let call_of = |name: &str, arguments: Value| json!({"name": name, "arguments": arguments, "_meta": meta(&can)});
        let abort = server.post("tools/call", call_of("abort-evaluation", json!({})));
        let arguments = json!({"code": OTHER, "on-error": "debug"});
        let other = server.post("tools/call", call_of("evaluate-lisp", arguments));
        let (text, is_error) = outcome(&call(&mut server, &can, code, more));
        // The answer may arrive before the evaluation has been aborted.
        let is_refused =
            text.contains("belongs to no open question") || text.contains("The evaluation was no longer held.");
        assert!(is_error && is_refused, "{text}");
        assert_eq!(server.outcome(abort).0, "Evaluation aborted.");
        let (text, _) = server.outcome(other);
        assert!(text.contains("\n\n[Debugger]\nHeld. "), "{text}");
        let ran = server.request("tools/call", call_of("eval-in-frame", json!({"frame": 0, "code": "*ran*"})));
        let (text, _) = outcome(&ran);
        assert!(text.ends_with("=> NIL"), "{text}");
        let aborted = server.request("tools/call", call_of("abort-evaluation", json!({})));
        assert_eq!(outcome(&aborted).0, "Evaluation aborted.");
    }
}

#[apply(both_modes)]
fn evaluations_queue_until_the_input_required_call_is_repeated(mode: Mode) {
    let can = json!({"elicitation": {}});
    let mut server = mode.start();
    let first = call(&mut server, &can, CODE, Value::Null);
    let between = server.post("tools/call", params(&can, "(+ 1 2)", Value::Null));
    let result = &first["result"];
    let chosen = accept(&offered_choice(&result["inputRequests"]["restart"]["params"], "TAKE"), "1");
    let more = json!({"inputResponses": {"restart": chosen}, "requestState": result["requestState"]});
    let (text, is_error) = outcome(&call(&mut server, &can, CODE, more));
    assert!(!is_error && text.ends_with("=> (1 :END)"), "{text}");
    assert_eq!(server.outcome(between), ("=> 3".to_owned(), false));

    // A reset does not wait for an answer, nor does an elicitation wait for an earlier one.
    call(&mut server, &can, CODE, Value::Null);
    let between = server.post("tools/call", params(&can, "(+ 1 2)", Value::Null));
    let reset = server.post("tools/call", json!({"name": "reset-session", "_meta": meta(&can)}));
    let (text, is_error) = server.outcome(between);
    assert!(is_error && text.contains("[ERROR] CANCELLED\n"), "{text}");
    assert!(server.outcome(reset).0.contains("Session reset."));
    let after = call(&mut server, &can, "(+ 1 2)", Value::Null);
    assert_eq!(outcome(&after).0, "=> 3");
}

#[apply(both_modes)]
fn input_required_is_not_used_without_the_elicitation_capability(mode: Mode) {
    let mut server = mode.start();
    let (text, is_error) = outcome(&call(&mut server, &json!({}), CODE, Value::Null));
    assert!(is_error && text.contains("\n\n[Debugger]\nHeld. "), "{text}");
}
