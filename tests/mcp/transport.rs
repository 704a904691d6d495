//! Answers to requests: reused ids, cancellations, resets, unknown methods, too many requests; with and without a
//! supervisor.

use crate::client::{Scratch, Server, call_ok, last_error, outcome};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

fn call(id: i64, tool: &str, arguments: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
}

fn cancel(id: i64) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}})
}

/// Sends messages in one write.
fn send_all(server: &mut Server, messages: &[Value]) {
    server.send_raw(messages.iter().map(|message| format!("{message}\n")).collect::<String>().as_bytes());
}

/// Starts an endless evaluation, waits until it runs and returns the request's id.
fn loop_for_ever(server: &mut Server) -> i64 {
    let id = server.post_call("evaluate-lisp", json!({"code": "(loop)", "timeout": 0}));
    loop {
        let (status, _) = server.call_tool("check-evaluation", json!({}));
        if status.contains("running for") {
            return id;
        }
    }
}

#[apply(both_modes)]
fn request_id_reused_after_cancellation_gets_its_own_answer(mode: Mode) {
    let mut server = mode.ready();
    for round in 100..160 {
        // The call has ended, runs, or is queued when it is cancelled.
        let code = ["1", "(progn (sleep 0.001) 1)", "(progn (sleep 0.003) 1)", "(loop)"][round % 4];
        let expected = format!("=> {round}");
        send_all(
            &mut server,
            &[
                call(7, "evaluate-lisp", &json!({"code": code, "timeout": 0})),
                cancel(7),
                call(7, "evaluate-lisp", &json!({"code": round.to_string()})),
            ],
        );
        // The first call may have been answered before its cancellation.
        let mut text = outcome(&server.answer(7)).0;
        if text == "=> 1" {
            text = outcome(&server.answer(7)).0;
        }
        assert_eq!(text, expected, "{code}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn cancelling_right_after_a_request_sends_no_error_answer(mode: Mode) {
    let mut server = mode.ready();
    for _ in 0..150 {
        let id = server.post_call("evaluate-lisp", json!({"code": "(loop)", "timeout": 0}));
        server.send(&cancel(id));
    }
    server.assert_works();
    for first in [10_000, 20_000] {
        let loops = (first..first + 50).map(|id| call(id, "evaluate-lisp", &json!({"code": "(loop)", "timeout": 0})));
        let messages: Vec<_> = loops.chain((first..first + 50).map(cancel)).collect();
        send_all(&mut server, &messages);
        server.assert_works();
    }
    let end = server.finish();
    // The remaining answers are those to the handshake and to later evaluations.
    assert!(end.transcript.iter().all(|message| message["result"]["isError"] != true), "{:?}", end.transcript);
}

#[apply(both_modes)]
fn describe_last_error_right_after_a_cancellation_says_cancelled(mode: Mode) {
    let mut server = mode.ready();
    for round in 0..15 {
        let id = loop_for_ever(&mut server);
        let question = 100_000 + round;
        send_all(&mut server, &[cancel(id), call(question, "describe-last-error", &json!({}))]);
        let (text, _) = server.outcome(question);
        // On a busy machine the evaluation may not have ended yet.
        let text = if text.starts_with("[notice]\n") { last_error(&mut server) } else { text };
        assert!(text.starts_with("Error: CANCELLED\n"), "{text}");
        server.assert_works();
    }
}

#[apply(both_modes)]
fn questions_about_errors_do_not_wait_for_cleanup_forms(mode: Mode) {
    let scratch = Scratch::new();
    let gate = scratch.join("gate");
    let mut server = mode.ready();
    server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"}));
    let cleanup = format!("(loop)) (loop until (probe-file {gate:?}) do (sleep 0.01)))");
    let id = server.post_running("(unwind-protect (progn", &cleanup, 0.0);
    server.send(&cancel(id));
    let notice = "[notice]\nEvaluation 2 was cancelled and has not ended yet: try again later to see its error.\n\n";
    for (tool, arguments, known) in [
        ("describe-last-error", json!({}), "Error: DIVISION-BY-ZERO\n"),
        ("get-backtrace", json!({}), "Backtrace for DIVISION-BY-ZERO"),
        ("describe-last-error", json!({"list": 20}), "E1"),
    ] {
        let text = call_ok(&mut server, tool, arguments);
        assert!(text.starts_with(&format!("{notice}{known}")), "{text}");
    }
    std::fs::write(&gate, "").unwrap();
    let text = last_error(&mut server);
    assert!(text.starts_with("Error: CANCELLED\n"), "{text}");
    server.assert_works();
}

#[apply(both_modes)]
fn cancelling_a_queued_call_keeps_the_last_error(mode: Mode) {
    let mut server = mode.ready();
    server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"}));
    let running = loop_for_ever(&mut server);
    let queued = server.post_call("evaluate-lisp", json!({"code": "(error \"never\")"}));
    server.send(&cancel(queued));
    assert!(last_error(&mut server).starts_with("Error: DIVISION-BY-ZERO\n"));
    server.send(&cancel(running));
    server.assert_works();
}

#[apply(both_modes)]
fn reset_cancels_running_and_queued_evaluations(mode: Mode) {
    const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";
    let mut server = mode.ready();
    server.evaluate("(defun f () 1)");
    let running = loop_for_ever(&mut server);
    let queued = server.post_call("evaluate-lisp", json!({"code": "(defun g () 1)"}));
    let reset = server.post_call("reset-session", json!({}));
    let behind = server.post_call("evaluate-lisp", json!({"code": "(or (fboundp 'f) (fboundp 'g))"}));
    for id in [running, queued] {
        let (text, is_error) = server.outcome(id);
        assert!(is_error && text.contains("[ERROR] CANCELLED\n"), "{text}");
    }
    let said = format!("[notice]\nThe running evaluation was ended.\n\n{RESET}");
    assert_eq!(server.outcome(reset), (said, false));
    assert_eq!(server.outcome(behind), ("=> NIL".to_owned(), false));
    assert!(last_error(&mut server).starts_with("No error information"));

    server.call_tool("evaluate-lisp", json!({"code": "(error \"held\")", "on-error": "debug"}));
    let said = format!("[notice]\nThe evaluation held for debugging was ended.\n\n{RESET}");
    assert_eq!(server.call_tool("reset-session", json!({})), (said, false));
    assert_eq!(server.call_tool("reset-session", json!({})), (RESET.to_owned(), false));
    server.assert_works();
    assert!(server.finish().status.success());
}

#[apply(both_modes)]
fn reset_cancels_a_call_with_an_open_elicitation(mode: Mode) {
    let mut server = mode.start();
    let client = json!({"name": "raw", "version": "1"});
    let capabilities = json!({"elicitation": {}});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": client});
    server.request("initialize", params);
    let asking = server.post_call("evaluate-lisp", json!({"code": "(error \"boo\")", "on-error": "ask"}));
    assert_eq!(server.receive().expect("a question")["method"], "elicitation/create");
    let reset = server.post_call("reset-session", json!({}));
    let (text, is_error) = server.outcome(asking);
    assert!(is_error && text.contains("[ERROR] CANCELLED\n"), "{text}");
    assert!(server.outcome(reset).0.contains("Session reset."));
    server.assert_works();
}

#[apply(both_modes)]
fn methods_of_undeclared_capabilities_are_unknown(mode: Mode) {
    let mut server = mode.ready();
    for method in [
        "prompts/list",
        "prompts/get",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "resources/subscribe",
        "completion/complete",
        "logging/setLevel",
        "tasks/list",
    ] {
        let answer = server.request(method, json!({}));
        assert_eq!(answer["error"]["code"], -32601, "{method}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(method), "{answer}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn tampered_request_state_or_other_arguments_are_refused(mode: Mode) {
    let ask = |server: &mut Server, code: &str, state: &Value| {
        let mut params = json!({
            "name": "evaluate-lisp",
            "arguments": {"code": code, "on-error": "ask"},
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}},
            },
        });
        if !state.is_null() {
            params["requestState"] = state.clone();
            params["inputResponses"] = json!({"restart": {"action": "decline"}});
        }
        server.request("tools/call", params)
    };
    let mut server = mode.start();
    let first = ask(&mut server, "(error \"boo\")", &Value::Null);
    let state = &first["result"]["requestState"];
    let text = state.as_str().expect("a state");
    let (begin, end) = text.split_at(text.len() - 1);
    let other = if end == "0" { "1" } else { "0" };
    for tampered in [format!("{begin}{other}"), begin.to_owned(), format!("1{text}"), String::new(), "x".to_owned()] {
        let answer = ask(&mut server, "(error \"boo\")", &json!(tampered));
        assert_eq!(answer["error"]["code"], -32602, "{tampered}: {answer}");
    }
    let answer = ask(&mut server, "(error \"other\")", state);
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
    // The state is still valid for its own call.
    let (text, is_error) = outcome(&ask(&mut server, "(error \"boo\")", state));
    assert!(is_error && text.contains("The user chose no restart"), "{text}");
}

#[test]
fn requests_beyond_10000_are_refused_individually() {
    let mut server = Mode::Plain.start();
    server.initialize("2025-11-25");
    let running = loop_for_ever(&mut server);
    let (first, most) = (100_000, 10_000);
    let lines: Vec<_> = (first..first + most).map(|id| call(id, "evaluate-lisp", &json!({"code": "1"}))).collect();
    send_all(&mut server, &lines);
    // The running request counts as well.
    let refused = server.answer(first + most - 1);
    assert_eq!(refused["error"]["code"], -32603, "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("10000 pending"), "{refused}");
    let batch: Vec<_> = (0..=most).map(|id| json!({"jsonrpc": "2.0", "id": -id, "method": "ping"})).collect();
    server.send(&json!(batch));
    let refused = server.receive().unwrap();
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&Value::Null, &json!(-32600)), "{refused}");
    server.send(&cancel(running));
    for id in first..first + most - 1 {
        assert_eq!(server.outcome(id).0, "=> 1");
    }
    server.assert_works();
}

#[test]
fn ignored_notifications_do_not_keep_the_server_from_exiting() {
    let mut server = Mode::Plain.start();
    server.initialize("2025-11-25");
    for method in ["notifications/roots/list_changed", "notifications/nothing/known", "notifications/cancelled"] {
        server.notify(method, json!({}));
    }
    server.assert_works();
    // No ignored notification delays the exit.
    assert!(server.finish().status.success());
}
