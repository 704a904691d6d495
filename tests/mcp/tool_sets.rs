//! `--tools`: with every set of tools, the server's texts name only the listed tools.

use crate::client::Server;
use serde_json::{Value, json};

/// The tools for a held evaluation; without any of them, no evaluation is held.
const DEBUGGER_TOOLS: [&str; 3] = ["invoke-restart", "eval-in-frame", "resume-from-frame"];

/// Returns the tools of a server with this set, and all its texts: instructions, descriptions and answers to failing
/// calls.
fn tools_and_texts(set: &str) -> (Vec<String>, String) {
    let mut server = Server::start_with(&["--tools", set]);
    let instructions = server.initialize("2025-11-25")["instructions"].as_str().expect("instructions").to_owned();
    assert!(instructions.len() <= 2_000, "{set}: {} bytes", instructions.len());
    let list = server.request("tools/list", json!({}))["result"]["tools"].clone();
    let names: Vec<String> =
        list.as_array().expect("a list").iter().map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect();
    let mut said = instructions;
    for tool in list.as_array().expect("a list") {
        said = format!("{said}\n{}\n{}", tool["description"], tool["inputSchema"]["properties"]);
        if let Some(properties) = tool["inputSchema"]["properties"].as_object() {
            let on_error = properties.get("on-error").map(|property| property["enum"].to_string());
            let has_debugger = names.iter().any(|name| DEBUGGER_TOOLS.contains(&name.as_str()));
            assert!(on_error.is_none_or(|choices| choices.contains("debug") == has_debugger), "{set}: {tool}");
        }
    }
    let deep =
        "(defun deep (n) (if (zerop n) (error \"~a\" (make-string 9000 :initial-element #\\x)) (1+ (deep (1- n)))))";
    let calls = [
        ("configure-limits", json!({"on-error": "debug"})),
        ("evaluate-lisp", json!({"code": deep})),
        ("evaluate-lisp", json!({"code": "(deep 500)"})),
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({"locals": true})),
        ("describe-last-error", json!({"list": 20})),
        ("describe-last-error", json!({"error-id": "E99"})),
        ("evaluate-lisp", json!({"code": "(deep 500)", "on-error": "debug"})),
        ("checkpoint", json!({"action": "save", "name": "held"})),
        ("invoke-restart", json!({"restart": "99"})),
        ("resume-from-frame", json!({"frame": 9999})),
        ("get-backtrace", json!({"locals": true})),
        ("evaluate-lisp", json!({"code": "(handler-case (car 1) (error ()))", "record-errors": true})),
        ("evaluate-lisp", json!({"code": "(loop)", "timeout": 0.1})),
        ("evaluate-lisp", json!({"code": "(make-string 20000 :initial-element #\\x)"})),
        ("evaluate-lisp", json!({"code": "(dotimes (i 3000) (print i))"})),
        (
            "evaluate-lisp",
            json!({"code": "(sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore (sb-thread:make-semaphore))))"}),
        ),
        ("evaluate-lisp", json!({"code": "(sb-ext:exit)"})),
        ("evaluate-lisp", json!({"code": "(defstruct a b)"})),
        ("evaluate-lisp", json!({"code": "(defstruct a b c)"})),
        ("check-evaluation", json!({"id": 99})),
        ("check-evaluation", json!({"part": "output"})),
        ("find-symbols", json!({"query": "a", "limit": 1000})),
        ("invoke-restart", json!({"restart": "1"})),
        ("reset-session", json!({})),
        (
            "evaluate-lisp",
            json!({"code": "(sb-alien:alien-funcall (sb-alien:extern-alien \"abort\" (function sb-alien:void)))"}),
        ),
    ];
    for (tool, arguments) in calls {
        if names.iter().any(|name| name == tool) {
            let answer = server.request("tools/call", json!({"name": tool, "arguments": arguments}));
            said = format!("{said}\n{}", answer["result"]["content"][0]["text"].as_str().unwrap_or_default());
        }
    }
    (names, said)
}

/// Returns true if a text names the tool. A name without a hyphen is also an ordinary word and counts only where the
/// text marks it as a tool.
fn names_tool(text: &str, tool: &str) -> bool {
    if tool.contains('-') {
        return text.match_indices(tool).any(|(at, _)| {
            let bounded = |character: Option<char>| character.is_none_or(|c| !c.is_alphanumeric() && c != '-');
            bounded(text[..at].chars().next_back()) && bounded(text[at + tool.len()..].chars().next())
        });
    }
    [
        format!("tool {tool}"),
        format!("`{tool}`"),
        format!("see {tool}"),
        format!("{tool} {{"),
        format!("{tool} shows"),
        format!("{tool} saves"),
        format!("{tool}: "),
    ]
    .iter()
    .any(|phrase| text.contains(phrase))
}

#[test]
fn server_texts_name_only_tools_that_it_lists() {
    let (all, said_by_all) = tools_and_texts("all");
    // The check itself finds the names.
    for tool in &all {
        assert!(names_tool(&said_by_all, tool) || ["list-definitions", "profile"].contains(&tool.as_str()), "{tool}");
    }
    let without =
        |left_out: &String| all.iter().filter(|tool| *tool != left_out).cloned().collect::<Vec<_>>().join(",");
    let mut sets = vec!["core".to_owned(), "evaluate-lisp,load-system".to_owned()];
    sets.extend(all.iter().cloned());
    sets.extend(all.iter().map(without));
    let mut wrong = Vec::new();
    for set in sets {
        let (names, said) = tools_and_texts(&set);
        for tool in all.iter().filter(|tool| !names.contains(tool)) {
            if names_tool(&said, tool) {
                let lines =
                    said.lines().filter(|line| names_tool(line, tool)).map(|line| line.chars().take(200).collect());
                wrong.push(format!("--tools {set}: {tool} in {:?}", lines.collect::<Vec<String>>()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn core_tool_set_has_the_tools_of_the_specification_and_of_the_edit_loop() {
    let (names, _) = tools_and_texts("core");
    let core: Value = json!([
        "evaluate-lisp",
        "load-system",
        "run-tests",
        "list-definitions",
        "describe-last-error",
        "get-backtrace",
        "abort-evaluation",
        "check-evaluation",
        "reset-session",
        "configure-limits"
    ]);
    assert_eq!(json!(names), core);
}

/// The names and arguments of builds before version 0.1.
#[test]
fn former_names_and_arguments_are_accepted_and_not_listed() {
    let mut server = Server::ready();
    let mut call = |tool: &str, arguments: Value| server.call_tool(tool, arguments).0;
    assert_eq!(call("error-history", json!({})), "This client has no recorded errors.");
    call(
        "evaluate-lisp",
        json!({"code": "(defpackage :p) (defun p::f (x) (declare (optimize debug)) (list (/ x 0)))"}),
    );
    let held = call("evaluate-lisp", json!({"code": "(p::f 7)", "on-error": "debug"}));
    assert!(held.contains("\n2: (P::F 7)\n"), "{held}");
    assert!(call("frame-locals", json!({"frame": "2"})).contains("\n     X = 7\n"), "frame-locals");
    assert!(call("restart-frame", json!({"frame": 2})).contains("[ERROR] DIVISION-BY-ZERO"), "restart-frame");
    assert_eq!(call("return-from-frame", json!({"frame": 2, "code": ":back"})), "=> :BACK");
    let history = call("error-history", json!({"limit": 1}));
    assert!(history.ends_with("... 1 older error (raise `list` to see it)"), "{history}");
    assert!(call("evaluation", json!({"id": 2})).starts_with("Evaluation 2: succeeded"), "evaluation");
    assert_eq!(call("evaluation", json!({"id": 2, "action": "wait"})), "=> :BACK");
    let page = call("evaluation", json!({"id": 2, "action": "output", "part": "values", "characters": 4}));
    assert!(page.contains("\n=> :[... 4 characters omitted; check-evaluation {"), "{page}");
    let begun = call("evaluate-lisp", json!({"code": "(loop)", "background": true}));
    let number = begun.split(' ').nth(1).expect("its number").to_owned();
    assert!(call("evaluation", json!({"id": number, "action": "cancel"})).contains(" with CANCELLED"), "{begun}");
    call("evaluate-lisp", json!({"code": "(loop)", "background": true}));
    assert!(call("evaluation", json!({"action": "cancel"})).contains(" with CANCELLED"), "the newest");
    let refused = call("return-from-frame", json!({"frame": 1}));
    assert!(refused.starts_with("resume-from-frame has no argument \"code\"."), "{refused}");
    let traced = call("trace-calls", json!({"code": "(p::f 1)", "package": "p"}));
    assert!(traced.contains("(P::F 1)"), "{traced}");
    let refused = call("load", json!({}));
    assert!(refused.starts_with("load-system needs system, path or directory."), "{refused}");
    assert!(call("run-tests", json!({"package": "p"})).contains("there are no tests of the package p."), "run-tests");
    assert!(call("profile", json!({"code": "1", "top": 3})).ends_with("=> 1"), "profile");
    assert!(
        call("find-symbols", json!({"query": "car", "kind": "function", "limit": 1})).starts_with("car  function"),
        "symbols"
    );
    assert!(call("evaluation", json!({"x": 1})).starts_with("check-evaluation has no argument \"x\"."), "unknown");

    let (names, _) = tools_and_texts("evaluation,load");
    assert_eq!(names, ["load-system", "abort-evaluation", "check-evaluation"]);
}
