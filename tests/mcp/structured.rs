//! Structured content: it agrees with the text and with its schema.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::client::{NO_LOCALS, NO_LOCALS_IN_FRAMES, Server, outcome, server_arch};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use sbcl::report::{escape_markers, escape_output};
use serde_json::{Value, json};

/// A server with `--structured-content`, and its output schemas.
struct StructuredServer {
    server: Server,
    schemas: HashMap<String, Value>,
}

/// A tool result: text, structured content, and whether it is an error.
struct Answer {
    text: String,
    content: Value,
    is_error: bool,
}

impl StructuredServer {
    fn start(mode: Mode) -> Self {
        let mut server = mode.start_with(&["--structured-content"]);
        server.initialize("2025-06-18");
        let listed = server.request("tools/list", json!({}));
        let schemas = listed["result"]["tools"].as_array().unwrap().iter();
        let schemas = schemas.map(|tool| (tool["name"].as_str().unwrap().to_owned(), tool["outputSchema"].clone()));
        Self { server, schemas: schemas.collect() }
    }

    /// Calls a tool and checks the structured content against the tool's schema.
    #[track_caller]
    fn call(&mut self, tool: &str, arguments: Value) -> Answer {
        let answer = self.server.request("tools/call", json!({"name": tool, "arguments": arguments}));
        let (text, is_error) = outcome(&answer);
        let content = answer["result"]["structuredContent"].clone();
        if let Err(reason) = validate(&content, &self.schemas[tool], "it") {
            panic!("{tool}: {reason}\n{content:#}");
        }
        Answer { text, content, is_error }
    }

    /// Evaluates code and asserts that text and structured content agree.
    #[track_caller]
    fn evaluate(&mut self, arguments: Value) -> Answer {
        let answer = self.call("evaluate-lisp", arguments);
        assert_eq!(evaluation(&answer.content), answer.text);
        assert_eq!(answer.content.get("error").is_some(), answer.is_error);
        assert_eq!(answer.content.get("values").is_none(), answer.is_error);
        answer
    }
}

/// Validates a value against the subset of JSON Schema that the server's schemas use. Any other keyword is an error.
fn validate(value: &Value, schema: &Value, place: &str) -> Result<(), String> {
    let fail = |reason: &str| Err(format!("{place} {reason}: {value}"));
    for (keyword, rule) in schema.as_object().ok_or("the schema is not an object")? {
        match keyword.as_str() {
            "description" => {}
            "type" => {
                let is = |name: &Value| match name.as_str() {
                    Some("object") => value.is_object(),
                    Some("array") => value.is_array(),
                    Some("string") => value.is_string(),
                    Some("boolean") => value.is_boolean(),
                    Some("integer") => value.is_u64() || value.is_i64(),
                    Some("number") => value.is_number(),
                    _ => false,
                };
                // Some clients support only a single type name.
                if !is(rule) {
                    return fail(&format!("is not of type {rule}"));
                }
            }
            "enum" if rule.as_array().unwrap().contains(value) => {}
            "minimum" if value.as_f64().is_none_or(|number| number >= rule.as_f64().unwrap()) => {}
            "required" => {
                for name in rule.as_array().unwrap() {
                    if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
                        return fail(&format!("lacks {name}"));
                    }
                }
            }
            "properties" => {
                for (name, inner) in value.as_object().into_iter().flatten() {
                    let Some(schema) = rule.get(name) else { return fail(&format!("has an unknown {name}")) };
                    validate(inner, schema, &format!("{place}.{name}"))?;
                }
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    validate(item, rule, &format!("{place}[{index}]"))?;
                }
            }
            _ => return fail(&format!("breaks {keyword} {rule}")),
        }
    }
    Ok(())
}

// ---- The text, made from the structure alone

fn string<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}"))
}

fn items<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().unwrap_or_else(|| panic!("no {name} in {value}"))
}

fn line_end(text: &str) -> &str {
    text.strip_suffix('\n').unwrap_or(text)
}

fn message(error: &Value) -> String {
    escape_output(line_end(string(error, "message")))
}

fn evaluation(content: &Value) -> String {
    let mut sections = Vec::new();
    let notices: String =
        items(content, "notices").iter().map(|text| format!("\n{}", escape_markers(text.as_str().unwrap()))).collect();
    if !notices.is_empty() {
        sections.push(format!("[notice]{notices}"));
    }
    for name in ["background", "stdout", "stderr"] {
        let text = string(content, name);
        if !text.is_empty() {
            sections.push(format!("[{name}]\n{}", escape_output(line_end(text))));
        }
    }
    let mut warnings = String::new();
    for warning in items(content, "warnings") {
        _ = write!(warnings, "\n{}: {}", escape_markers(string(warning, "type")), message(warning));
        if let Some(line) = warning["line"].as_u64() {
            _ = write!(warnings, " (line {line})");
        }
    }
    if content["warningsOmitted"] != 0 {
        _ = write!(warnings, "\n[... {} warnings omitted]", content["warningsOmitted"]);
    }
    if !warnings.is_empty() {
        sections.push(format!("[warnings]{warnings}"));
    }
    let Some(error) = content.get("error") else {
        let values: Vec<_> =
            items(content, "values").iter().map(|value| format!("=> {}", value.as_str().unwrap())).collect();
        let mut text = if values.is_empty() { "; No values".to_owned() } else { values.join("\n") };
        if let Some(timing) = content.get("timing") {
            _ = write!(
                text,
                "\n; Timing: {}ms real, {}ms run, {}ms GC, {} bytes consed",
                timing["realMs"], timing["runMs"], timing["gcMs"], timing["bytesConsed"]
            );
        }
        sections.push(text);
        return sections.join("\n\n");
    };
    sections.push(format!("[ERROR] {}\n{}", escape_markers(string(error, "type")), message(error)));
    let mut backtrace = "[Backtrace]".to_owned();
    let frames = items(error, "frames");
    let total = error["totalFrames"].as_u64().unwrap();
    let number = |index: usize| frames.get(index).map_or(total, |frame| frame["number"].as_u64().unwrap());
    let mut more = total;
    for (index, frame) in frames.iter().enumerate() {
        let call = escape_markers(string(frame, "call"));
        // Where internal frames are folded, the frame numbers have a gap.
        let machinery = frame["machinery"].as_str();
        let end =
            (index..).find(|index| frames.get(*index).is_none_or(|other| other["machinery"] != frame["machinery"]));
        let end = end.unwrap();
        let folded = machinery.is_some() && number(end) > number(end - 1) + 1;
        let cut = call.chars().count() > 60 && folded;
        let call = if cut { call.chars().take(60).chain(['…']).collect() } else { call };
        _ = write!(backtrace, "\n{}: {call}", frame["number"]);
        more = total - number(index) - 1;
        if let Some(machinery) = machinery.filter(|_| folded && end == index + 1) {
            _ = write!(backtrace, "\n... {} frames of {machinery}", number(end) - number(index) - 1);
            more = total - number(end);
        }
    }
    if frames.is_empty() {
        backtrace += "\n0: (no frames available)";
    }
    if more > 0 {
        _ = write!(backtrace, "\n... {more} more frames (get-backtrace shows them)");
    }
    sections.push(backtrace);
    if content["held"] == true {
        let tools = "get-backtrace with locals, invoke-restart, eval-in-frame, resume-from-frame, abort-evaluation.";
        sections.push(format!(
            "[Debugger]\nHeld. Restarts:{}\nTools: {tools} The next evaluation, load or test run ends the hold.",
            restarts(error)
        ));
    }
    sections.join("\n\n")
}

fn restarts(error: &Value) -> String {
    let line = |restart: &Value| {
        let description = escape_markers(string(restart, "description")).replace('\n', "\n     ");
        format!("\n  {}. {} - {description}", restart["number"], escape_markers(string(restart, "name")))
    };
    items(error, "restarts").iter().map(line).collect()
}

/// Returns a line for each variable with a value, and one line for all others.
fn locals(locals: &[Value]) -> Vec<String> {
    let (known, unknown): (Vec<_>, Vec<_>) = locals.iter().partition(|local| local.get("value").is_some());
    let name = |local: &Value| escape_markers(string(local, "name"));
    let mut lines: Vec<_> =
        known.iter().map(|local| format!("{} = {}", name(local), escape_markers(string(local, "value")))).collect();
    if !unknown.is_empty() {
        let names: Vec<_> = unknown.iter().map(|local| name(local)).collect();
        lines.push(format!("not available: {}", names.join(", ")));
    }
    lines
}

/// Returns the text that get-backtrace must show for `content`, which reflects its arguments already.
fn backtrace(content: &Value) -> String {
    let error = &content["error"];
    let frames = items(error, "frames");
    let total = error["totalFrames"].as_u64().unwrap();
    let live = content["live"] == true;
    let title = if live { "Backtrace (live)" } else { "Backtrace" };
    let plural = if total == 1 { "" } else { "s" };
    let mut text =
        format!("{title} for {} ({} of {total} frame{plural}):", escape_markers(string(error, "type")), frames.len());
    for frame in frames {
        _ = write!(text, "\n  {}: {}", frame["number"], escape_markers(string(frame, "call")));
        if let Some(source) = frame["source"].as_str() {
            _ = write!(text, "\n     at {}", escape_markers(source));
            if let Some(code) = frame["code"].as_str() {
                _ = write!(text, ": {}", escape_markers(code));
            }
        }
        for line in locals(frame["locals"].as_array().map_or(&[], Vec::as_slice)) {
            _ = write!(text, "\n     {line}");
        }
    }
    let more = total - frames.len() as u64;
    if more > 0 {
        let (s, all) = if more == 1 { ("", "it") } else { ("s", "them all") };
        _ = write!(text, "\n{more} more frame{s}; pass max-frames {total} to see {all}.");
    }
    if live && frames.iter().all(|frame| items(frame, "locals").is_empty()) {
        _ = write!(text, "\n{}", if frames.len() == 1 { NO_LOCALS } else { NO_LOCALS_IN_FRAMES });
    }
    text
}

/// Asserts that text and structured content of describe-last-error agree.
#[track_caller]
fn check_description(answer: &Answer) {
    let error = &answer.content["error"];
    let text = &answer.text;
    assert!(text.starts_with(&format!("Error: {}\n", escape_markers(string(error, "type")))), "{text}");
    for line in message(error).lines() {
        assert!(
            text.contains(&format!("\n{}", if line.is_empty() { String::new() } else { format!("  {line}") })),
            "{line}\n{text}"
        );
    }
    assert!(text.contains(&format!("\nTime: {}\nId: {}\n", string(error, "time"), string(error, "id"))), "{text}");
    match error.get("form") {
        None => assert!(!text.contains("\nForm: "), "{text}"),
        Some(form) => {
            let line = format!(
                "\nForm: {} (line {}): {}\n",
                form["number"],
                form["line"],
                escape_markers(string(form, "text"))
            );
            assert!(text.contains(&line), "{line}\n{text}");
        }
    }
    assert!(text.contains(&format!("\nAvailable Restarts:{}\n\n", restarts(error))), "{text}");
    for frame in items(error, "frames") {
        assert!(
            text.contains(&format!("\n  {}: {}", frame["number"], escape_markers(string(frame, "call")))),
            "{text}"
        );
    }
    if let Some((_, slots)) = text.split_once("\n\nSlots:") {
        for line in slots.split_once("\n\n").unwrap().0.lines().filter(|line| line.starts_with("  ")) {
            let told = |slot: &Value| {
                format!("  {}: {}", string(slot, "name"), escape_markers(string(slot, "value"))).starts_with(line)
            };
            assert!(items(error, "slots").iter().any(told), "{line}\n{error:#}");
        }
    }
}

/// Returns the programs of the corpus.
fn corpus() -> Vec<String> {
    let mut programs = Vec::new();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files {
        // Programs that exhaust the storage are left out.
        if file.ends_with("storage.txt") {
            continue;
        }
        for program in std::fs::read_to_string(file).unwrap().split("\n== ") {
            let code = program.lines().skip(1).filter(|line| !line.starts_with("#;"));
            let code: Vec<_> = code.take_while(|line| !line.starts_with("type:")).collect();
            programs.push(code.join("\n"));
        }
    }
    assert!(programs.len() > 200, "{}", programs.len());
    programs
}

#[apply(both_modes)]
fn text_and_structured_content_agree_for_errors_of_the_corpus(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    let mut untrapped = 0;
    for (index, code) in corpus().into_iter().enumerate() {
        let on_error = if index % 3 == 0 { "debug" } else { "abort" };
        let answer = structured.evaluate(json!({"code": code, "on-error": on_error}));
        // aarch64 processors need not trap the errors of float arithmetic, of which the corpus has fewer than ten.
        if !answer.is_error && server_arch() == "aarch64" {
            untrapped += 1;
            assert!(untrapped < 10, "{code}");
            continue;
        }
        assert!(answer.is_error, "{code}");
        let described = structured.call("describe-last-error", json!({}));
        check_description(&described);
        assert_eq!(described.content["error"]["id"], answer.content["error"]["id"]);
        assert_eq!(described.content["error"]["slots"], answer.content["error"]["slots"]);
        let locals = index % 2 == 0;
        let shown = structured.call("get-backtrace", json!({"max-frames": 7, "locals": locals}));
        assert_eq!(backtrace(&shown.content), shown.text, "{code}");
        for frame in items(&shown.content["error"], "frames") {
            let (function, arguments) = (string(frame, "function"), string(frame, "arguments"));
            let joined = if arguments.is_empty() { function.to_owned() } else { format!("{function} {arguments}") };
            assert!(string(frame, "call").trim_end_matches(')').contains(joined.trim_end_matches(')')), "{frame}");
        }
    }
}

#[apply(both_modes)]
fn text_and_structured_content_agree_for_values_output_and_warnings(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    for arguments in [
        json!({"code": "(+ 1 2)"}),
        json!({"code": "(values 1 \"two\" :three)"}),
        json!({"code": "(values)"}),
        json!({"code": "; nothing"}),
        json!({"code": "(list 1)", "capture-time": true}),
        json!({"code": "(format t \"a~%=> 3~%[ERROR] x~%\") (format *error-output* \"b\") (warn \"w [stdout]\") 1"}),
        json!({"code": "(defun f (x)\n  (let ((y 1)) (g x)))"}),
        json!({"code": "(make-string 60000 :initial-element #\\x)"}),
        json!({"code": "(dotimes (i 300) (warn \"w~A\" i))"}),
        json!({"code": "(dotimes (i 20000) (format t \"line ~A~%\" i))"}),
        json!({"code": "(error \"~A\" (make-string 20000 :initial-element #\\y))"}),
        json!({"code": "(format t \"~%\")"}),
        json!({"code": "(string (code-char 0))"}),
        json!({"code": "1", "package": "NO-SUCH-PACKAGE"}),
        json!({"code": "(loop)", "timeout": 0.2}),
        json!({"code": "(sb-thread:make-thread (lambda () (sleep 0.1) (format t \"later~%\")))"}),
        json!({"code": "(sleep 0.3)"}),
        json!({"code": "1"}),
    ] {
        structured.evaluate(arguments);
    }
}

#[apply(both_modes)]
fn failed_attempts_to_resume_report_that_the_evaluation_is_held(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    let work = "(defun work () (declare (optimize debug))
                  (list (restart-bind ((stay (lambda () 1))) (restart-case (error \"x\") (take (v) v)))))";
    structured.evaluate(json!({"code": work}));
    let held = structured.evaluate(json!({"code": "(work)", "on-error": "debug"}));
    let frames = held.content["error"]["frames"].as_array().unwrap();
    let frame = frames.iter().find(|frame| frame["function"] == "WORK").unwrap()["number"].clone();
    for (tool, arguments) in [
        ("invoke-restart", json!({"restart": "take", "values": "(car 5)"})),
        ("invoke-restart", json!({"restart": "stay"})),
        ("resume-from-frame", json!({"frame": frame, "return": "(car 5)"})),
    ] {
        let answer = structured.call(tool, arguments);
        assert_eq!(answer.content["held"], true, "{}", answer.text);
        // The restarts are those of the failed attempt's error.
        assert!(!answer.text.contains("[Debugger]"), "{}", answer.text);
    }
    let resumed = structured.call("invoke-restart", json!({"restart": "take", "values": "4"}));
    assert_eq!((&resumed.content["held"], &resumed.content["values"]), (&json!(false), &json!(["(4)"])));
}

#[apply(both_modes)]
fn debugger_tools_answer_with_structured_content(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    structured.evaluate(json!({"code": "(defun work (x) (declare (optimize debug)) (list x (missing x)))"}));
    let held = structured.evaluate(json!({"code": "(work 5)", "on-error": "debug"}));
    assert_eq!(held.content["held"], true);
    assert_eq!(held.content["error"]["restarts"][0]["name"], "CONTINUE");
    assert_eq!(held.content["error"]["frames"][1]["function"], "WORK");
    assert_eq!(held.content["error"]["frames"][1]["arguments"], "5");
    assert_eq!(held.content["error"]["frames"][1]["source"], "evaluation 1, line 1");
    let live = structured.call("get-backtrace", json!({"from": 1, "max-frames": 1, "locals": true}));
    assert_eq!(live.content["live"], true);
    assert_eq!(live.content["error"]["frames"][0]["locals"], json!([{"name": "X", "value": "5"}]));
    let refused = structured.call("resume-from-frame", json!({"frame": 99}));
    assert_eq!((refused.content, refused.is_error), (json!({"refused": refused.text}), true));
    for (tool, arguments) in [
        ("eval-in-frame", json!({"frame": 1, "code": "(error \"inside\")"})),
        ("eval-in-frame", json!({"frame": 0, "code": "(defun missing (x) (values (* 2 x) 1))"})),
        ("resume-from-frame", json!({"frame": 1})),
    ] {
        let answer = structured.call(tool, arguments);
        assert_eq!(evaluation(&answer.content), answer.text);
    }
    for (tool, arguments) in [
        ("invoke-restart", json!({"restart": "TAKE", "values": "1"})),
        ("resume-from-frame", json!({"frame": 2, "return": "2"})),
    ] {
        let code =
            "(defun stop () (declare (optimize debug)) (restart-case (error \"x\") (take (x) x)))\n(list (stop))";
        structured.evaluate(json!({"code": code, "on-error": "debug"}));
        let answer = structured.call(tool, arguments);
        assert_eq!(evaluation(&answer.content), answer.text);
    }
    structured.evaluate(json!({"code": "(error \"x\")", "on-error": "debug"}));
    assert_eq!(structured.call("abort-evaluation", json!({})).content, json!({"aborted": true}));
    structured.evaluate(json!({"code": "(error \"x\")", "on-error": "debug"}));
    assert_eq!(structured.call("invoke-restart", json!({"restart": "ABORT"})).content, json!({"aborted": true}));
}

#[apply(both_modes)]
fn inspection_tools_answer_with_structured_content(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    for tool in ["describe-last-error", "get-backtrace"] {
        assert_eq!(structured.call(tool, json!({})).content, json!({}));
    }
    assert_eq!(structured.call("describe-last-error", json!({"list": 20})).content, json!({"errors": [], "older": 0}));
    structured.evaluate(json!({"code": "(defun square (x) (* x x)) (defvar *n* 3) (defclass point () ())"}));
    structured.evaluate(json!({"code": "\n(error \"one\")"}));
    structured.evaluate(json!({"code": "(/ 1 0)"}));
    let history = structured.call("describe-last-error", json!({"list": 20}));
    let lines = items(&history.content, "errors").iter().map(|error| {
        let summary = string(error, "message").split_whitespace().collect::<Vec<_>>().join(" ");
        let form = &error["form"];
        let id = string(error, "id");
        format!(
            "{id}  {}  {}  {summary}  form {} (line {})",
            string(error, "time"),
            string(error, "type"),
            form["number"],
            form["line"]
        )
    });
    assert_eq!(lines.collect::<Vec<_>>().join("\n"), history.text);

    let listed = structured.call("list-definitions", json!({}));
    for definition in items(&listed.content, "definitions") {
        assert!(listed.text.contains(&format!("\n- {}", string(definition, "text"))), "{definition}");
    }
    assert_eq!(listed.text.matches("\n- ").count(), items(&listed.content, "definitions").len());
    let functions = structured.call("list-definitions", json!({"type": "functions"}));
    assert_eq!(functions.content["definitions"], json!([{"kind": "function", "text": "SQUARE (X)"}]));

    let car = structured.call("describe-symbol", json!({"name": "car"}));
    let roles = items(&car.content, "roles").iter().map(|role| {
        let details = items(role, "details").iter();
        let details = details.map(|detail| {
            format!("\n  {}: {}", string(detail, "label"), string(detail, "text").replace('\n', "\n    "))
        });
        format!("{}{}", string(role, "title"), details.collect::<String>())
    });
    assert_eq!(roles.collect::<Vec<_>>().join("\n\n"), car.text);
    let found = structured.call("find-symbols", json!({"query": "with-open-*", "external": true}));
    let line = |symbol: &Value| {
        format!("{}  {} {}", string(symbol, "name"), string(symbol, "kind"), string(symbol, "lambdaList"))
    };
    let symbols: Vec<_> = items(&found.content, "symbols").iter().map(line).collect();
    assert_eq!(symbols.len(), 2);
    assert!(found.text.lines().zip(&symbols).all(|(text, line)| text.starts_with(line)), "{symbols:?}\n{}", found.text);
    let nothing = structured.call("find-symbols", json!({"query": "no-such-symbol"}));
    assert_eq!(string(&nothing.content, "nothing"), nothing.text);

    structured.evaluate(json!({"code": "(defun cube (x) (* x (square x)))"}));
    let callers = structured.call("find-references", json!({"name": "square"}));
    let line = |one: &Value| format!("{}  {}: {}", string(one, "name"), string(one, "where"), string(one, "code"));
    let lines: Vec<_> = items(&callers.content, "references").iter().map(line).collect();
    assert_eq!(string(&callers.content, "relation"), "callers");
    assert_eq!(
        callers.text,
        format!("{}\n{}", lines.join("\n"), items(&callers.content, "notes")[0].as_str().unwrap())
    );

    let expansion = structured.call("macroexpand", json!({"form": "(unless a b)"}));
    assert_eq!(expansion.content["steps"], json!([{"macro": "UNLESS", "result": "IF", "count": 1}]));
    assert!(expansion.text.ends_with(string(&expansion.content, "expansion")), "{}", expansion.text);
    let failed = structured.call("macroexpand", json!({"form": "(unless"}));
    assert!(failed.is_error && failed.content["error"]["type"] == "END-OF-FILE", "{}", failed.content);

    let unknown = structured.call("describe-symbol", json!({"name": "no-such-symbol"}));
    assert_eq!(unknown.content, json!({"roles": [], "notFound": unknown.text}));

    let limits = structured.call("configure-limits", json!({"timeout": 12.5, "max-output": 5000}));
    assert_eq!(limits.content, json!({"timeout": 12.5, "maxOutput": 5000, "maxAnswer": 9500, "onError": "abort"}));
    insta::allow_duplicates! { insta::assert_snapshot!(limits.text, @r"
    Current limits:
      timeout: 12.5 seconds
      max-output: 5000 characters
      max-answer: 9500 characters
      on-error: abort
    "); }
    assert_eq!(structured.call("configure-limits", json!({"timeout": 0})).content["timeout"], 0.0);
    let refused = structured.call("configure-limits", json!({"timeout": -1}));
    assert_eq!((refused.content, refused.is_error), (json!({"refused": refused.text}), true));
    let reset = structured.call("reset-session", json!({}));
    assert_eq!(reset.content, json!({"reset": true, "package": "COMMON-LISP-USER", "notices": []}));
}

#[apply(both_modes)]
fn evaluation_tool_answers_with_structured_content(mode: Mode) {
    let mut structured = StructuredServer::start(mode);
    assert_eq!(structured.call("check-evaluation", json!({})).content, json!({}));
    let long = structured.evaluate(json!({"code": "(dotimes (i 20000) (write-char #\\x)) 7"}));
    assert_eq!(evaluation(&long.content), long.text);
    let stdout = string(&long.content, "stdout");
    assert!(
        stdout.len() < 10_000 && stdout.contains("check-evaluation {\"id\": 1, \"part\": \"output\", "),
        "{stdout}"
    );
    let page = structured.call("check-evaluation", json!({"part": "output", "from": 19_998}));
    assert_eq!(
        page.content["page"],
        json!({"evaluation": 1, "part": "output", "text": "xx", "from": 19_998, "total": 20_000, "omitted": 0})
    );
    let status = structured.call("check-evaluation", json!({})).content["evaluation"].clone();
    assert_eq!((&status["id"], &status["state"], &status["printed"]), (&json!(1), &json!("over"), &json!(20_000)));
    let waited = structured.call("check-evaluation", json!({"wait": 25}));
    assert_eq!((waited.content, waited.text), (long.content, long.text));
}

#[apply(both_modes)]
fn answers_without_the_structured_content_option_are_text_only(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-06-18");
    let listed = server.request("tools/list", json!({}));
    assert!(listed["result"]["tools"].as_array().unwrap().iter().all(|tool| tool.get("outputSchema").is_none()));
    let answer = server.request("tools/call", json!({"name": "evaluate-lisp", "arguments": {"code": "1"}}));
    assert!(answer["result"].get("structuredContent").is_none(), "{answer}");
    let mut server = mode.start_with(&["--structured-content"]);
    server.initialize("2025-06-18");
    let answer = server.request("tools/call", json!({"name": "evaluate-lisp", "arguments": {"code": "1"}}));
    assert_eq!(answer["result"]["structuredContent"]["values"], json!(["1"]));
}

#[test]
fn image_loss_answers_with_structured_content() {
    let mut structured = StructuredServer::start(Mode::Supervised);
    let code = "(sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void sb-alien:int)) 1)";
    let lost = structured.evaluate(json!({"code": code}));
    assert_eq!(lost.content["error"]["type"], "IMAGE-LOST");
}

#[apply(both_modes)]
fn trace_calls_and_profile_answer_with_structured_content(mode: Mode) {
    let mut server = StructuredServer::start(mode);
    server.evaluate(json!({"code": "(defun halve (n) (/ n 2)) (defvar *kept*) (defun waste () (dotimes (i 300) (setf *kept* (make-list 10000))))"}));
    let answer = server.call("trace-calls", json!({"code": "(values (halve 3) 4)", "functions": ["halve"]}));
    assert_eq!(answer.content["values"], json!(["3/2", "4"]));
    let call = &answer.content["calls"][0];
    assert_eq!(
        (&call["text"], &call["end"], &call["result"]),
        (&json!("(HALVE 3)"), &json!("returned"), &json!("3/2"))
    );
    assert_eq!((&call["depth"], &answer.content["omittedCalls"]), (&json!(0), &json!(0)));
    let answer = server.call("trace-calls", json!({"code": "(halve :x)", "functions": ["halve"]}));
    assert!(answer.is_error && answer.content["error"]["type"] == "TYPE-ERROR", "{}", answer.content);
    assert_eq!(answer.content["calls"][0]["end"], "failed");
    let answer = server.call("profile", json!({"code": "(waste)", "mode": "alloc"}));
    assert_eq!((&answer.content["profile"]["mode"], &answer.content["values"]), (&json!("alloc"), &json!(["NIL"])));
    let functions = answer.content["functions"].as_array().unwrap();
    // On aarch64, SBCL leaves out the function that allocates.
    let innermost = if server_arch() == "aarch64" { "SB-INT:SIMPLE-EVAL-IN-LEXENV" } else { "WASTE" };
    assert!(functions.iter().any(|function| function["name"] == innermost), "{}", answer.content);
}
