//! The MCP protocol line by line, against the binary.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::{DEADLINE, Scratch, Server, binary, outcome};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

const REVISIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

const TOOLS: [&str; 20] = [
    "evaluate-lisp",
    "load-system",
    "run-tests",
    "list-definitions",
    "describe-symbol",
    "find-symbols",
    "find-references",
    "macroexpand",
    "describe-last-error",
    "get-backtrace",
    "invoke-restart",
    "eval-in-frame",
    "resume-from-frame",
    "abort-evaluation",
    "check-evaluation",
    "trace-calls",
    "profile",
    "checkpoint",
    "reset-session",
    "configure-limits",
];

const NO_ERROR: &str = "No error information available.\n(No error has occurred since the last successful evaluation)";

// ---- Revisions and tool descriptions

#[apply(both_modes)]
fn initialize_accepts_every_supported_revision(mode: Mode) {
    for revision in REVISIONS {
        let mut server = mode.start();
        let result = server.initialize(revision);
        assert_eq!(result["protocolVersion"], revision);
        assert_eq!(result["serverInfo"]["name"], "sbcl-mcp");
        assert_eq!(result["serverInfo"]["version"], env!("CARGO_PKG_VERSION"));
        assert!(result["serverInfo"]["title"].is_string());
        assert!(result["capabilities"]["tools"].is_object());
        let instructions = result["instructions"].as_str().unwrap();
        assert!(instructions.contains("describe-last-error") && instructions.len() <= 2_000, "{}", instructions.len());
        server.assert_works();
        assert_eq!(server.request("ping", json!({}))["result"], json!({}));
        assert!(server.finish().status.success());
    }
}

#[apply(both_modes)]
fn initialize_offers_2025_11_25_for_an_unsupported_revision(mode: Mode) {
    for revision in ["1999-01-01", "2026-07-28", "3000-01-01", "?"] {
        let mut server = mode.start();
        assert_eq!(server.initialize(revision)["protocolVersion"], "2025-11-25", "{revision}");
        server.assert_works();
    }
}

/// A larger `initialize` could not be handed to the next worker.
#[apply(both_modes)]
fn initialize_of_more_than_a_mebibyte_is_refused(mode: Mode) {
    let mut server = mode.start();
    let capabilities = json!({"experimental": {"x": {"y": "x".repeat(1 << 20)}}});
    let client = json!({"name": "test", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": client});
    let error = &server.request("initialize", params)["error"];
    assert_eq!(error["code"], -32602);
    let message = error["message"].as_str().unwrap();
    assert!(message.ends_with("the limit is 1048576 bytes: shorten the capabilities and clientInfo"), "{message}");
    server.initialize("2025-11-25");
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
}

#[apply(both_modes)]
fn revision_2026_07_28_works_without_initialize(mode: Mode) {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let mut server = mode.start();
    let discovered = server.request("server/discover", json!({"_meta": meta}));
    let result = &discovered["result"];
    assert!(result["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")), "{discovered}");
    assert!(result["instructions"].is_string(), "{discovered}");

    let listed = server.request("tools/list", json!({"_meta": meta}));
    assert_eq!(listed["result"]["tools"].as_array().unwrap().len(), TOOLS.len(), "{listed}");
    for (code, expected) in [("(+ 1 2)", "=> 3"), ("; nothing", "; No values")] {
        let call = json!({"name": "evaluate-lisp", "arguments": {"code": code}, "_meta": meta});
        let answer = server.request("tools/call", call);
        assert_eq!(outcome(&answer), (expected.to_owned(), false));
        assert_eq!(answer["result"]["resultType"], "complete");
    }
    // A call as the first message, and one without a protocol version.
    let mut direct = mode.start();
    let call = json!({"name": "describe-last-error", "arguments": {}, "_meta": meta});
    assert_eq!(outcome(&direct.request("tools/call", call)).0, NO_ERROR);
    let unsaid = direct.request("tools/call", json!({"name": "describe-last-error", "arguments": {}}));
    assert_eq!(unsaid["error"]["code"], -32602, "{unsaid}");
}

#[apply(both_modes)]
fn tools_list_has_schema_and_annotations_of_every_tool(mode: Mode) {
    let mut server = mode.ready();
    let first = server.request("tools/list", json!({}));
    let tools = first["result"]["tools"].as_array().unwrap();
    let names: Vec<_> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, TOOLS);
    for tool in tools {
        assert!(tool["description"].as_str().unwrap().len() > 80, "{tool}");
        assert_eq!(tool["inputSchema"]["type"], "object");
        assert!(tool["inputSchema"].get("additionalProperties").is_none(), "{tool}");
        for (name, schema) in tool["inputSchema"]["properties"].as_object().unwrap() {
            assert!(schema["type"].is_string() && schema["description"].is_string(), "{name}: {schema}");
        }
        let debugs = ["invoke-restart", "eval-in-frame", "resume-from-frame", "abort-evaluation"];
        let name = tool["name"].as_str().unwrap();
        let evaluates = ["evaluate-lisp", "load-system", "run-tests", "trace-calls", "profile"];
        let changes =
            ["checkpoint", "reset-session"].contains(&name) || evaluates.contains(&name) || debugs.contains(&name);
        let configures = name == "configure-limits";
        assert_eq!(tool["annotations"]["readOnlyHint"], !changes && !configures, "{tool}");
        assert_eq!(tool["annotations"]["destructiveHint"] == true, changes, "{tool}");
    }
    assert_eq!(tools[0]["inputSchema"]["required"], json!(["code"]));
    assert_eq!(tools[0]["_meta"]["anthropic/alwaysLoad"], true);
    assert_eq!(server.request("tools/list", json!({}))["result"], first["result"]);
    // Clients may omit `params`.
    server.send(&json!({"jsonrpc": "2.0", "id": "list", "method": "tools/list"}));
    assert_eq!(server.answer("list")["result"], first["result"]);
    assert_eq!(server.request("tools/list", json!({"cursor": "x"}))["error"]["code"], -32602);
}

// ---- Before initialize

#[apply(both_modes)]
fn messages_before_initialize_do_not_end_the_server(mode: Mode) {
    let mut server = mode.start();
    server.notify("notifications/initialized", json!({}));
    server.notify("notifications/cancelled", json!({"requestId": 1}));
    server.notify("no/such/thing", json!({}));
    server.send(&json!({"jsonrpc": "2.0", "id": 5, "result": {}}));
    server.send(&json!({"jsonrpc": "2.0", "id": 5, "error": {"code": 1, "message": "x"}}));
    server.send_raw(b"\nrubbish\n");
    assert_eq!(server.receive().unwrap()["error"]["code"], -32700);
    assert_eq!(server.request("ping", json!({}))["result"], json!({}));
    let early = server.request("tools/call", json!({"name": "describe-last-error"}));
    assert_eq!(early["error"]["code"], -32602, "{early}");
    for params in [json!({}), json!([]), json!("x"), json!({"protocolVersion": 1}), Value::Null] {
        let answer = server.request("initialize", params);
        assert_eq!(answer["error"]["code"], -32602, "{answer}");
    }
    assert_eq!(server.initialize("2025-06-18")["protocolVersion"], "2025-06-18");
    server.assert_works();
    assert!(server.finish().status.success());
}

// ---- Invalid lines

#[apply(both_modes)]
fn malformed_json_is_answered_with_a_parse_error(mode: Mode) {
    let mut server = mode.ready();
    for (line, id) in [
        ("rubbish", Value::Null),
        ("{", Value::Null),
        ("\"", Value::Null),
        ("\u{1}\u{2}", Value::Null),
        (r#"{"jsonrpc":"2.0","id":17,"method":"tools/call","params":{"#, json!(17)),
        (r#"{"jsonrpc":"2.0","method":"ping","params":{"id":3},,"id":"seven"}"#, json!("seven")),
        (r#"{"jsonrpc":"2.0","id":18,"method":"ping"} trailing"#, json!(18)),
        (r#"{"jsonrpc":"2.0","id":19,"method":"tools/call","params":{"name":"\ud800"}}"#, json!(19)),
        (&format!(r#"{{"jsonrpc":"2.0","id":20,"method":"x","params":{}"#, "[".repeat(100_000)), json!(20)),
    ] {
        server.send_raw(format!("{line}\n").as_bytes());
        let answer = server.receive().unwrap();
        assert_eq!(answer["error"]["code"], -32700, "{answer}");
        assert_eq!(answer["id"], id, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("not valid JSON"), "{answer}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn invalid_utf8_is_answered_with_a_parse_error(mode: Mode) {
    let mut server = mode.ready();
    let mut line = br#"{"jsonrpc":"2.0","id":31,"method":"tools/call","params":{"name":"evaluate-lisp","arguments":{"code":"(print \""#.to_vec();
    line.extend([0xff, 0xfe, 0x80]);
    line.extend(b"\\\")\"}}}\n");
    server.send_raw(&line);
    let answer = server.answer(31);
    assert_eq!(answer["error"]["code"], -32700, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("not valid UTF-8"), "{answer}");
    server.assert_works();
}

#[apply(both_modes)]
fn id_is_echoed_unchanged_or_refused_with_null(mode: Mode) {
    let mut server = mode.ready();
    for id in ["9223372036854775807", "-9223372036854775808", r#""\u00e9""#] {
        server.send_raw(format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"ping\"}}\n").as_bytes());
        let id: Value = serde_json::from_str(id).unwrap();
        assert_eq!(server.receive().unwrap(), json!({"jsonrpc": "2.0", "id": id, "result": {}}));
    }
    for (id, echoed) in [
        ("9223372036854775808", json!(1_u64 << 63)),
        ("18446744073709551615", json!(u64::MAX)),
        ("18446744073709551616", Value::Null),
        ("-9223372036854775809", Value::Null),
        ("1000000000000000000000000000000", Value::Null),
        ("1e30", Value::Null),
    ] {
        for rest in ["\"method\":\"ping\"}", "\"method\":\"ping\",}"] {
            server.send_raw(format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{rest}\n").as_bytes());
            let answer = server.receive().unwrap();
            assert_eq!(answer["id"], echoed, "{id}: {answer}");
            let message = answer["error"]["message"].as_str().unwrap();
            let expected = if rest.ends_with(",}") { "not valid JSON" } else { "an integer from -2^63 to 2^63-1" };
            assert!(message.contains(expected), "{id}: {answer}");
        }
    }
    server.assert_works();
}

#[apply(both_modes)]
fn json_other_than_a_request_is_answered_as_invalid_request(mode: Mode) {
    let mut server = mode.ready();
    for (message, id) in [
        (json!(null), Value::Null),
        (json!(7), Value::Null),
        (json!("ping"), Value::Null),
        (json!([]), Value::Null),
        (json!({}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": 1}), json!(1)),
        (json!({"jsonrpc": "2.0", "id": 2, "method": 3}), json!(2)),
        (json!({"jsonrpc": "1.0", "id": 3, "method": "ping"}), json!(3)),
        (json!({"id": "4", "method": "ping"}), json!("4")),
        (json!({"jsonrpc": "2.0", "id": null, "method": "ping"}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": {}, "method": "ping"}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": 1.5, "method": "ping"}), json!(1.5)),
        (json!({"jsonrpc": "2.0", "id": 5, "method": "ping", "result": {}}), json!(5)),
    ] {
        server.send(&message);
        let answer = server.receive().unwrap();
        assert_eq!(answer["error"]["code"], -32600, "{message}: {answer}");
        assert_eq!(answer["id"], id, "{message}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().len() > 10, "{answer}");
    }
    let unknown = server.request("no/such/method", json!({}));
    assert_eq!(unknown["error"]["code"], -32601, "{unknown}");
    server.assert_works();
}

#[apply(both_modes)]
fn unsolicited_responses_and_unknown_notifications_are_ignored(mode: Mode) {
    let mut server = mode.ready();
    server.send(&json!({"jsonrpc": "2.0", "id": 99, "result": {}}));
    server.send(&json!({"jsonrpc": "2.0", "id": 99, "result": 5}));
    server.send(&json!({"jsonrpc": "2.0", "id": [], "error": 5}));
    server.send(&json!({"jsonrpc": "2.0", "id": 99, "error": {"code": -1, "message": "no"}}));
    server.notify("no/such/notification", json!({"x": 1}));
    server.notify("notifications/progress", json!({"wrong": true}));
    server.notify("notifications/cancelled", json!({"requestId": 12345}));
    server.notify("notifications/cancelled", json!({"requestId": {}}));
    server.notify("notifications/cancelled", json!({}));
    server.notify("notifications/roots/list_changed", json!({}));
    server.assert_works();
    let end = server.finish();
    assert_eq!(end.transcript.len(), 2, "{:?}", end.transcript);
}

#[apply(both_modes)]
fn blank_lines_crlf_bom_and_split_lines_are_accepted(mode: Mode) {
    let mut server = mode.ready();
    server.send_raw(b"\n\r\n  \t \n");
    server.send_raw(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\r\n");
    server.send_raw(b"\xEF\xBB\xBF {\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"ping\"} \n");
    server.send_raw(b"{\"jsonrpc\":\"2.0\",\"id\":3,\"met");
    server.send_raw(b"hod\":\"ping\"}\n{\"jsonrpc\":\"2.0\",\"id\":4,\"method\":\"ping\"}\n{\"json");
    for id in 1..=4 {
        assert_eq!(server.receive().unwrap(), json!({"jsonrpc": "2.0", "id": id, "result": {}}));
    }
    server.send_raw(b"rpc\":\"2.0\",\"id\":5,\"method\":\"ping\"}\n");
    assert_eq!(server.answer(5)["result"], json!({}));
    server.assert_works();
}

// ---- Long lines

#[apply(both_modes)]
fn line_of_20_mebibytes_is_answered(mode: Mode) {
    let mut server = mode.ready();
    let long = "x".repeat(20 << 20);
    assert_eq!(server.evaluate(&format!("(length \"{long}\")")), format!("=> {}", long.len()));
    server.assert_works();
}

#[apply(both_modes)]
fn line_over_64_mebibytes_is_refused_with_its_request_id(mode: Mode) {
    let mut server = mode.ready();
    let chunk = "x".repeat(1 << 20);
    // First the id at the end, as some clients write it, then at the beginning, then nowhere.
    for (begin, end, id) in [
        (r#"{"method":"ping","params":{"id":1,"text":""#, r#""},"jsonrpc":"2.0","id":"late"}"#, json!("late")),
        (r#"{"jsonrpc":"2.0","id":52,"method":"ping","params":{"text":""#, r#""}}"#, json!(52)),
        ("", "", Value::Null),
    ] {
        server.send_raw(begin.as_bytes());
        for _ in 0..70 {
            server.send_raw(chunk.as_bytes());
        }
        server.send_raw(end.as_bytes());
        server.send_raw(b"\n");
        let answer = server.receive().unwrap();
        assert_eq!(answer["error"]["code"], -32600, "{answer}");
        assert_eq!(answer["id"], id, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("64 MiB"), "{answer}");
    }
    server.assert_works();
}

/// The decoded line would take gigabytes.
#[apply(both_modes)]
fn line_of_more_than_a_million_values_is_refused_with_its_request_id(mode: Mode) {
    let mut server = mode.ready();
    let objects = vec![r#"{"":0}"#; 600_000].join(",");
    let line = format!(r#"{{"jsonrpc":"2.0","id":52,"method":"tools/list","params":{{"x":[{objects}]}}}}"#);
    server.send_raw(format!("{line}\n").as_bytes());
    let answer = server.receive().unwrap();
    assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32600), &json!(52)), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("1000000 JSON values"), "{answer}");
    server.assert_works();
}

/// The id is in the part that the lost image reads or in the part that the next image reads; other requests wait
/// meanwhile.
#[test]
fn line_over_64_mebibytes_is_refused_across_an_image_replacement() {
    let mut server = Mode::Plain.start();
    server.initialize("2025-11-25");
    let chunk = "x".repeat(1 << 20);
    for (begin, end, id) in [
        (r#"{"jsonrpc":"2.0","id":52,"method":"ping","params":{"text":""#, r#""}}"#, json!(52)),
        (r#"{"method":"ping","params":{"id":1,"text":""#, r#""},"jsonrpc":"2.0","id":"late"}"#, json!("late")),
    ] {
        let code = "(sb-sys:without-interrupts (loop))";
        let stuck = server.post_call("evaluate-lisp", json!({"code": code, "timeout": 2}));
        let queued = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
        server.send_raw(begin.as_bytes());
        for _ in 0..66 {
            server.send_raw(chunk.as_bytes());
        }
        let text = outcome(&server.answer(stuck)).0;
        assert!(text.contains("did not respond to an interrupt"), "{text}");
        assert!(outcome(&server.answer(queued)).0.ends_with("=> 3"));
        server.send_raw(format!("{end}\n").as_bytes());
        let answer = server.receive().unwrap();
        assert_eq!(answer["error"]["code"], -32600, "{answer}");
        assert_eq!(answer["id"], id, "{answer}");
    }
    server.assert_works();
}

// ---- Calls with wrong arguments

#[apply(both_modes)]
fn malformed_tool_calls_and_unknown_tools_are_invalid_params(mode: Mode) {
    let mut server = mode.ready();
    for params in [
        Value::Null,
        json!([]),
        json!("evaluate-lisp"),
        json!({}),
        json!({"name": 5}),
        json!({"name": null, "arguments": {}}),
        json!({"name": "evaluate-lisp", "arguments": "(+ 1 2)"}),
        json!({"name": "evaluate-lisp", "arguments": ["(+ 1 2)"]}),
        json!({"name": "evaluate-lisp", "arguments": {"code": "1"}, "_meta": 5}),
        json!({"name": "no-such-tool", "arguments": {}}),
    ] {
        let answer = server.request("tools/call", params.clone());
        assert_eq!(answer["error"]["code"], -32602, "{params}: {answer}");
    }
    // The error for an unknown tool names similar tools and all tools.
    for (name, near) in [
        ("evaluate-lips", " Did you mean evaluate-lisp"),
        ("Evaluate_Lisp", " Did you mean evaluate-lisp"),
        ("get_backtrace", " Did you mean get-backtrace? "),
        ("describe-sybmol", " Did you mean describe-symbol"),
        ("frobnicate", " Tools: "),
    ] {
        let answer = server.request("tools/call", json!({"name": name, "arguments": {}}));
        let message = answer["error"]["message"].as_str().expect("a sentence");
        assert!(message.starts_with(&format!("There is no tool \"{name}\".{near}")), "{message}");
        assert!(message.contains(" Tools: evaluate-lisp, load-system, run-tests, "), "{message}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn invalid_tool_arguments_are_refused_with_the_allowed_values(mode: Mode) {
    let mut server = mode.ready();
    for (tool, arguments, words) in [
        ("evaluate-lisp", json!({}), vec!["needs the argument code", "code, package, timeout, capture-time"]),
        ("evaluate-lisp", json!({"code": null}), vec!["needs the argument code"]),
        ("evaluate-lisp", json!({"cod": "1"}), vec!["needs the argument code", "\"cod\""]),
        ("describe-symbol", json!({"package": "CL"}), vec!["needs the argument name"]),
        ("evaluate-lisp", json!({"code": true}), vec!["code must be a string", "not true"]),
        ("evaluate-lisp", json!({"code": ["(+ 1 2)"]}), vec!["code must be a string"]),
        ("evaluate-lisp", json!({"code": "1", "package": []}), vec!["package must be a string"]),
        ("evaluate-lisp", json!({"code": "1", "timeout": -1}), vec!["timeout", "-1", "0 (no limit)", "86400"]),
        ("evaluate-lisp", json!({"code": "1", "timeout": 1e9}), vec!["timeout", "86400"]),
        ("evaluate-lisp", json!({"code": "1", "timeout": "soon"}), vec!["timeout must be a number", "86400", "soon"]),
        ("evaluate-lisp", json!({"code": "1", "capture-time": "yes"}), vec!["capture-time must be true or false"]),
        ("evaluate-lisp", json!({"code": "1", "tiemout": 1}), vec!["\"tiemout\"", "takes: code, package, timeout"]),
        ("get-backtrace", json!({"max-frames": 0}), vec!["max-frames must be a whole number, 1 or greater", "not 0"]),
        ("get-backtrace", json!({"max-frames": -3}), vec!["whole number, 1 or greater"]),
        ("get-backtrace", json!({"max-frames": 1.5}), vec!["whole number, 1 or greater"]),
        ("get-backtrace", json!({"max-frames": "five"}), vec!["whole number, 1 or greater"]),
        ("get-backtrace", json!({"frames": 5}), vec!["\"frames\"", "takes: max-frames, from, locals, error-id."]),
        ("list-definitions", json!({"type": "methods"}), vec!["one of all, functions, variables, macros, classes"]),
        ("list-definitions", json!({"type": 1}), vec!["one of all"]),
        ("describe-symbol", json!({"name": {}}), vec!["name must be a string"]),
        ("describe-last-error", json!({"x": 1}), vec!["\"x\"", "takes: error-id, list."]),
        ("describe-last-error", json!({"error-id": "E9"}), vec!["no error \"E9\"", "client has no recorded errors"]),
        ("describe-last-error", json!({"list": 201}), vec!["list must be a whole number from 1 to 200", "not 201"]),
        ("describe-last-error", json!({"list": 2, "error-id": "E1"}), vec!["takes error-id or list, not both"]),
        ("check-evaluation", json!({"part": "all"}), vec!["part must be one of output, values, error"]),
        ("check-evaluation", json!({"part": "output", "wait": 1}), vec!["takes wait or part, not both"]),
        ("check-evaluation", json!({"action": "stop"}), vec!["\"action\"", "takes: id, wait, part, from, limit."]),
        ("check-evaluation", json!({"id": 12}), vec!["No evaluations of this client yet."]),
        ("invoke-restart", json!({"restart": 0}), vec!["a number, 1 or greater, or a name"]),
        ("resume-from-frame", json!({"frame": -1}), vec!["a frame number, 0 or greater"]),
        ("resume-from-frame", json!({"frame": 1}), vec!["No evaluation is held"]),
        ("abort-evaluation", json!({"id": 12}), vec!["No evaluations of this client yet."]),
        ("reset-session", json!({"really": true}), vec!["\"really\"", "The tool takes no arguments."]),
        ("configure-limits", json!({"timeout": -0.5}), vec!["timeout", "86400"]),
        ("configure-limits", json!({"timeout": 90_000}), vec!["timeout", "86400"]),
        ("configure-limits", json!({"max-output": 0}), vec!["max-output", "1 to 10000000"]),
        ("configure-limits", json!({"max-output": -1}), vec!["max-output", "1 to 10000000"]),
        ("configure-limits", json!({"max-output": 2.5}), vec!["max-output", "1 to 10000000"]),
        ("configure-limits", json!({"max-output": 1e12}), vec!["max-output", "1 to 10000000"]),
        ("configure-limits", json!({"max-answer": 5_999}), vec!["max-answer", "6000 to 1000000"]),
        ("configure-limits", json!({"max-answer": 1_000_001}), vec!["max-answer", "6000 to 1000000"]),
        ("configure-limits", json!({"on-error": "explode"}), vec!["one of abort, debug, ask"]),
    ] {
        let (text, is_error) = server.call_tool(tool, arguments.clone());
        assert!(is_error, "{tool} {arguments}: {text}");
        for word in words {
            assert!(text.contains(word), "{tool} {arguments}: {text}");
        }
    }
    let (text, _) = server.call_tool("get-backtrace", json!({"max_frames": "5.0", "locals": "false", "error-id": ""}));
    assert_eq!(text, NO_ERROR);
    assert_eq!(server.evaluate("\u{feff}(+ 1 2)"), "=> 3");
    assert_eq!(server.call_tool("evaluate-lisp", json!({"code": 7, "package": ""})), ("=> 7".to_owned(), false));
    let (limits, is_error) = server.call_tool("configure-limits", json!({}));
    insta::allow_duplicates! { insta::assert_snapshot!(limits, @r"
    Current limits:
      timeout: 30 seconds
      max-output: 1000000 characters
      max-answer: 9500 characters
      on-error: abort
    "); }
    assert!(!is_error);
    server.assert_works();
}

#[apply(both_modes)]
fn optional_arguments_may_be_null(mode: Mode) {
    let mut server = mode.ready();
    let arguments = json!({"code": "(+ 1 2)", "package": null, "timeout": null, "capture-time": null});
    assert_eq!(server.call_tool("evaluate-lisp", arguments), ("=> 3".to_owned(), false));
    assert_eq!(server.call_tool("get-backtrace", json!({"max-frames": null})), (NO_ERROR.to_owned(), false));
    let id = server.post("tools/call", json!({"name": "describe-last-error", "arguments": null}));
    assert_eq!(server.outcome(id), (NO_ERROR.to_owned(), false));
    assert!(!server.call_tool("list-definitions", json!({"type": null})).1);
}

#[apply(both_modes)]
fn empty_code_has_no_values_and_an_unknown_package_is_an_error(mode: Mode) {
    let mut server = mode.ready();
    for code in ["", "   \n", "; only a comment"] {
        assert_eq!(server.evaluate(code), "; No values");
    }
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": "1", "package": "NO-SUCH-PACKAGE"}));
    assert!(is_error && text.starts_with("[ERROR] ") && text.contains("PACKAGE"), "{text}");
    server.assert_works();
}

// ---- Order, concurrency, cancellation

#[apply(both_modes)]
fn evaluations_run_in_request_order(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *n* 0)");
    let mut lines = String::new();
    for id in 1..=500 {
        let params = json!({"name": "evaluate-lisp", "arguments": {"code": "(incf *n*)"}});
        lines += &format!("{}\n", json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    }
    server.send_raw(lines.as_bytes());
    for id in 1..=500 {
        assert_eq!(outcome(&server.answer(id)).0, format!("=> {id}"));
    }
}

#[apply(both_modes)]
fn other_tools_answer_while_an_evaluation_runs(mode: Mode) {
    let mut server = mode.ready();
    let (_, failed) = server.call_tool("evaluate-lisp", json!({"code": "(/ 1 0)"}));
    assert!(failed);
    let long = server.post_running("", "(loop)", 600.0);
    assert_eq!(server.request("ping", json!({}))["result"], json!({}));
    assert!(server.request("tools/list", json!({}))["result"]["tools"].is_array());
    assert!(server.call_tool("describe-last-error", json!({})).0.starts_with("Error: DIVISION-BY-ZERO"));
    assert!(server.call_tool("get-backtrace", json!({})).0.starts_with("Backtrace for DIVISION-BY-ZERO"));
    assert!(server.call_tool("configure-limits", json!({"timeout": 5})).0.contains("timeout: 5 seconds"));
    assert!(!server.call_tool("list-definitions", json!({})).1);
    assert!(server.call_tool("describe-symbol", json!({"name": "car"})).0.starts_with("COMMON-LISP:CAR [FUNCTION]"));
    server.notify("notifications/cancelled", json!({"requestId": long}));
    server.assert_works();
}

#[apply(both_modes)]
fn a_cancelled_request_gets_no_answer(mode: Mode) {
    let mut server = mode.ready();
    let running = server.post_running("", "(loop)", 600.0);
    let queued = server.post_call("evaluate-lisp", json!({"code": "(loop)", "timeout": 600}));
    let last = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    server.request("ping", json!({}));
    server.notify("notifications/cancelled", json!({"requestId": queued, "reason": "changed my mind"}));
    server.notify("notifications/cancelled", json!({"requestId": running}));
    server.notify("notifications/cancelled", json!({"requestId": running}));
    assert_eq!(server.outcome(last), ("=> 3".to_owned(), false));

    let alone = server.post_running("", "(loop)", 600.0);
    server.notify("notifications/cancelled", json!({"requestId": alone}));
    // The error state changes once the code has been stopped.
    let is_cancelled =
        |server: &mut Server| server.call_tool("describe-last-error", json!({})).0.starts_with("Error: CANCELLED");
    let end = Instant::now() + DEADLINE;
    while !is_cancelled(&mut server) {
        assert!(Instant::now() < end, "the code still runs");
    }
    server.assert_works();
    let end = server.finish();
    for id in [running, queued, alone] {
        assert!(end.transcript.iter().all(|message| message["id"] != id), "{id} was answered");
    }
}

#[apply(both_modes)]
fn duplicate_id_of_a_pending_request_is_refused(mode: Mode) {
    let mut server = mode.ready();
    let ping = json!({"jsonrpc": "2.0", "id": "same", "method": "ping"});
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": "(loop)", "timeout": 600}});
    server.send(&json!({"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": params}));
    server.send(&ping);
    assert_eq!(server.answer("same")["error"]["code"], -32600);
    server.notify("notifications/cancelled", json!({"requestId": "same"}));
    server.assert_works();
    server.send(&ping);
    assert_eq!(server.answer("same")["result"], json!({}));
    // A number and a string of its digits are different ids.
    server.send_raw(
        b"{\"jsonrpc\":\"2.0\",\"id\":\"7\",\"method\":\"ping\"}\n{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"ping\"}\n",
    );
    assert_eq!(server.answer(7)["result"], json!({}));
    assert_eq!(server.answer("7")["result"], json!({}));
}

/// Evaluations that end at once, and evaluations that outlast the event loop's busy polling.
const SHORT_AND_LONG: [&str; 4] =
    ["(+ 1 2)", "(progn (sleep 0.001) 3)", "(progn (sleep 0.002) 3)", "(progn (sleep 0.004) 3)"];

#[apply(both_modes)]
fn request_id_can_be_reused_once_answered(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-11-25");
    for code in SHORT_AND_LONG.iter().cycle().take(400) {
        let params = json!({"name": "evaluate-lisp", "arguments": {"code": code}});
        server.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}));
        assert_eq!(outcome(&server.answer(1)).0, "=> 3", "{code}");
        let params = json!({"name": "describe-last-error", "arguments": {}});
        server.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}));
        assert_eq!(outcome(&server.answer(1)).0, NO_ERROR, "after {code}");
    }
}

#[apply(both_modes)]
fn cancellation_racing_with_the_answer_is_harmless(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-11-25");
    let step = Duration::from_micros(100);
    let (mut answered, mut wait) = (0, 30 * step);
    for _ in 0..200 {
        let call = server.post_call("evaluate-lisp", json!({"code": "(progn (sleep 0.003) :slept)"}));
        std::thread::sleep(wait);
        server.notify("notifications/cancelled", json!({"requestId": call}));
        let ping = server.post("ping", json!({}));
        let first = server.receive().expect("an answer");
        if first["id"] == call {
            assert_eq!(outcome(&first).0, "=> :SLEPT");
            assert_eq!(server.answer(ping)["result"], json!({}));
            answered += 1;
            wait = wait.saturating_sub(step);
        } else {
            assert_eq!(first["id"], ping);
            wait += step;
        }
    }
    // Both outcomes occur, because the cancellation is sent close to the answer.
    assert!((1..200).contains(&answered), "{answered} of 200 were answered");
    server.assert_works();
}

#[apply(both_modes)]
fn progress_notification_never_follows_the_answer(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-11-25");
    for round in 0..20 {
        // The evaluation ends about when its output is reported.
        let seconds = 0.245 + f64::from(round) * 0.0005;
        let arguments = json!({"code": format!("(progn (print :here) (sleep {seconds}) 3)")});
        let call = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": {"progressToken": round}});
        let id = server.post("tools/call", call);
        while server.receive().expect("an answer")["id"] != id {}
        let ping = server.post("ping", json!({}));
        assert_eq!(server.receive().expect("an answer")["id"], ping, "round {round}");
    }
}

#[apply(both_modes)]
fn progress_token_receives_increasing_progress_notifications(mode: Mode) {
    let mut server = mode.ready();
    let arguments = json!({"code": "(sleep 5.5)"});
    let call = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": {"progressToken": "tell me"}});
    let id = server.post("tools/call", call);
    let mut reports = Vec::new();
    let answer = loop {
        let message = server.receive().unwrap();
        if message["id"] == id {
            break message;
        }
        assert_eq!(message["method"], "notifications/progress", "{message}");
        assert_eq!(message["params"]["progressToken"], "tell me", "{message}");
        reports.push(message["params"]["progress"].as_f64().unwrap());
    };
    assert_eq!(outcome(&answer).0, "=> NIL");
    assert!(!reports.is_empty() && reports.is_sorted(), "{reports:?}");
    server.assert_works();
}

#[apply(both_modes)]
fn progress_notifications_carry_output_as_printed(mode: Mode) {
    let mut server = mode.ready();
    let arguments = json!({"code": "(format t \"begun~%\") (sleep 1.2) (format t \"ended~%\") (sleep 1.2)"});
    let call = json!({"name": "evaluate-lisp", "arguments": arguments, "_meta": {"progressToken": 7}});
    let id = server.post("tools/call", call);
    let mut messages = Vec::new();
    let answer = loop {
        let message = server.receive().unwrap();
        if message["id"] == id {
            break message;
        }
        assert_eq!(message["params"]["progressToken"], 7, "{message}");
        messages.push(message["params"]["message"].as_str().unwrap().trim().to_owned());
    };
    assert_eq!(messages, ["begun", "ended"]);
    assert!(outcome(&answer).0.contains("[stdout]"), "{answer}");
    server.assert_works();
}

// ---- Batches

#[apply(both_modes)]
fn a_batch_is_answered_in_one_line(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-03-26");
    let call = |id: i64, code: &str| {
        let params = json!({"name": "evaluate-lisp", "arguments": {"code": code}});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
    };
    server.send(&json!([
        call(1, "(+ 1 2)"),
        {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"},
        {"jsonrpc": "2.0", "id": 2, "method": "ping"},
        7,
        [],
        {"jsonrpc": "2.0", "id": 2, "method": "ping"},
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {}},
        call(4, "(/ 1 0)"),
        call(5, "(loop)"),
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}},
    ]));
    let line = server.receive().unwrap();
    let answers = line.as_array().unwrap();
    assert_eq!(answers.len(), 7, "{line}");
    let of = |id: Value| answers.iter().filter(move |answer| answer["id"] == id).collect::<Vec<_>>();
    assert_eq!(outcome(of(json!(1))[0]), ("=> 3".to_owned(), false));
    assert_eq!(of(json!(2)).len(), 2);
    assert!(of(json!(2)).iter().any(|answer| answer["result"] == json!({})));
    assert!(of(json!(2)).iter().any(|answer| answer["error"]["code"] == -32600));
    assert_eq!(of(Value::Null).len(), 2);
    assert_eq!(of(json!(3))[0]["error"]["code"], -32602);
    assert!(outcome(of(json!(4))[0]).1);

    // A batch of notifications gets no answer.
    server.send(&json!([{"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}]));
    server.assert_works();
    server.finish();
}

// ---- Shutdown

#[apply(both_modes)]
fn requests_before_end_of_input_are_answered(mode: Mode) {
    let mut server = mode.start();
    server.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
        {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}}));
    let call = json!({"name": "evaluate-lisp", "arguments": {"code": "(+ 1 2)"}});
    server.send(&json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}));
    // The last line has no newline.
    let last = json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call});
    server.send_raw(last.to_string().as_bytes());
    server.close();
    assert_eq!(server.answer(1)["result"]["protocolVersion"], "2025-06-18");
    assert_eq!(outcome(&server.answer(2)).0, "=> 3");
    assert_eq!(outcome(&server.answer(3)).0, "=> 3");
    let end = server.end();
    assert!(end.status.success());
    assert_eq!(end.stderr, "");
}

#[apply(both_modes)]
fn stdin_and_stdout_may_be_files_or_dev_null(mode: Mode) {
    let directory = Scratch::new();
    let (input, output) = (directory.join("in"), directory.join("out"));
    let client =
        json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "r", "version": "1"}});
    let call = json!({"name": "evaluate-lisp", "arguments": {"code": "(+ 1 2)"}});
    let lines = [
        json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}),
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}),
    ];
    std::fs::write(&input, lines.map(|line| format!("{line}\n")).concat()).unwrap();
    let run = |stdin: Stdio, stdout: Stdio| {
        let status = Command::new(binary())
            .args(mode.options())
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
    };
    run(File::open(&input).unwrap().into(), File::create(&output).unwrap().into());
    let answers: Vec<Value> =
        std::fs::read_to_string(&output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(outcome(&answers[1]).0, "=> 3");

    run(File::open(&input).unwrap().into(), Stdio::null());
    run(Stdio::null(), Stdio::null());
    run(Stdio::null(), File::create(&output).unwrap().into());
    assert_eq!(std::fs::read(&output).unwrap(), b"");
}

#[apply(both_modes)]
fn end_of_input_ends_the_server_during_evaluations(mode: Mode) {
    let mut server = mode.ready();
    let long = server.post_call("evaluate-lisp", json!({"code": "(loop)", "timeout": 0}));
    let queued = server.post_call("evaluate-lisp", json!({"code": "(loop)", "timeout": 0}));
    assert_eq!(server.request("ping", json!({}))["result"], json!({}));
    server.close();
    // A missing answer would be worse than this error.
    for id in [long, queued] {
        let answer = server.answer(id);
        assert!(answer["error"]["message"].as_str().unwrap().contains("shutting down"), "{answer}");
    }
    assert_eq!(server.end().status.code(), Some(0));
}

#[apply(both_modes)]
fn sigterm_sigint_and_sighup_end_the_server_during_evaluations(mode: Mode) {
    for (signal, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
        for code in [None, Some("(loop)")] {
            let mut server = mode.ready();
            if let Some(code) = code {
                server.post_call("evaluate-lisp", json!({"code": code, "timeout": 0}));
            }
            assert_eq!(server.request("ping", json!({}))["result"], json!({}));
            let kill = format!("kill -{signal} {}", server.pid());
            assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
            assert_eq!(server.end().status.code(), Some(128 + number), "{signal}");
        }
    }
}

#[apply(both_modes)]
fn closed_stdout_ends_the_server(mode: Mode) {
    let mut server = mode.start_unread(&[]);
    server.stop_reading();
    server.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}));
    let end = server.end();
    assert_eq!(end.status.code(), Some(0), "{}", end.stderr);
}

#[apply(both_modes)]
fn client_that_does_not_read_does_not_block_the_server(mode: Mode) {
    let mut server = mode.start_unread(&["--max-answer", "1000000"]);
    let client =
        json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "r", "version": "1"}});
    server.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": client}));
    // The answers are far larger than a pipe. If the last line is accepted, the server still reads.
    let code = r#"(progn (write-string (make-string 90000 :initial-element #\x)) (values))"#;
    for id in 1..=200 {
        let params = json!({"name": "evaluate-lisp", "arguments": {"code": code}});
        server.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    }
    server.send_raw(&vec![b' '; 1 << 20]);
    server.send_raw(b"\n");
    server.start_reading();
    for id in 0..=200 {
        let answer = server.answer(id);
        assert!(id == 0 || outcome(&answer).0.contains(&"x".repeat(90_000)), "{id}");
    }
    server.assert_works();
}

#[apply(both_modes)]
fn stray_writes_to_stdout_do_not_reach_the_client(mode: Mode) {
    let mut server = mode.ready();
    for code in [
        r#"(progn (sb-alien:alien-funcall (sb-alien:extern-alien "write" (function sb-alien:long sb-alien:int sb-alien:c-string sb-alien:long)) 1 (format nil "stray~%") 6) 3)"#,
        r#"(progn (sb-ext:run-program "/bin/echo" '("stray") :output t) 3)"#,
        r#"(progn (with-open-file (out "/dev/stdout" :direction :output :if-exists :append) (write-line "stray" out)) 3)"#,
    ] {
        assert!(server.evaluate(code).ends_with("=> 3"), "{code}");
    }
    server.assert_works();
    let end = server.finish();
    assert!(end.status.success());
}

#[apply(both_modes)]
fn failed_start_answers_requests_with_the_reason(mode: Mode) {
    let mut server = mode.start_with(&["--heap", "1M"]);
    let answer = server.request("ping", json!({}));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("cannot start") && message.contains("heap"), "{answer}");
    let end = server.end();
    assert_eq!(end.status.code(), Some(1));
    assert!(end.stderr.contains("heap"), "{}", end.stderr);
}
