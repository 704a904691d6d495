//! The structured content of a tool's result: what its text says, as JSON, and the schemas of that.
//!
//! Text is as Lisp wrote it: nothing is escaped here, since nothing can pass for a marker. What was cut ends as in the
//! text, with the number of characters that were left out.

use std::time::Duration;

use rmcp::model::JsonObject;
use serde_json::{Value, json};

use super::reply::Reply;
use super::tools::CheckpointReply;
use crate::outcome::{
    CallTree, Clipped, Definition, Expansion, Frame, Loaded, Local, LocalValue, Profile, ProfileSummary, ReadUpTo,
    Role, SuspectList, SymbolDescription, Test, TestCounts, TestRun, Warning, of_kind,
};
use crate::recovery::checkpoint::store::Checkpoint;
use crate::{ErrorRecord, EvaluationStatus, Limits, OnError, Outcome, Progress, report};

/// The structured content of a reply whose text has at most `max` characters. Where there is nothing to tell of, the
/// property is missing.
pub(super) fn content(reply: &Reply, max: usize) -> Value {
    match reply {
        Reply::Outcome(outcome) => evaluation(outcome),
        Reply::Calls(outcome) => calls(outcome),
        Reply::Profile(outcome) => profile(outcome),
        Reply::Tests(outcome) => tests(outcome),
        Reply::Error(known) => {
            let preview = |known| error(known, first(known, report::PREVIEW_FRAMES), true);
            present(json!({"error": known.as_deref().map(preview)}))
        }
        Reply::Backtrace(known, range) => {
            let frames = |known| error(known, range.within(known, max), range.locals);
            present(json!({"error": known.as_deref().map(frames)}))
        }
        Reply::History(errors, older) => {
            json!({"errors": errors.iter().map(|known| summary(known)).collect::<Vec<_>>(), "older": older})
        }
        Reply::Unsettled(evaluation, reply) => {
            let mut content = content(reply, max);
            content["unended"] = json!(evaluation);
            content
        }
        Reply::Locals(locals) => json!({"locals": locals.iter().map(local).collect::<Vec<_>>()}),
        Reply::Aborted => json!({"aborted": true}),
        Reply::Definitions(definitions) => json!({
            "definitions": definitions.shown.iter().map(definition).collect::<Vec<_>>(),
            "more": definitions.more,
            "notRestored": definitions.unrestored,
        }),
        Reply::Symbol(SymbolDescription::Found(roles)) => json!({"roles": roles.iter().map(role).collect::<Vec<_>>()}),
        Reply::Symbol(SymbolDescription::NotFound(sentence)) => json!({"roles": [], "notFound": sentence}),
        Reply::Symbols(found) => json!(found),
        Reply::References(found) => json!(found),
        Reply::Expansion(found) => expansion(found, max),
        Reply::Status(known) => json!({"evaluation": status(known)}),
        Reply::Page(page) => json!({
            "page": {
                "evaluation": page.evaluation,
                "part": page.part.name(),
                "text": page.text,
                "from": page.from,
                "total": page.total,
                "omitted": page.omitted,
            },
        }),
        Reply::NoEvaluations(_) => json!({}),
        Reply::Checkpoint(reply) => checkpoint(reply),
        Reply::Reset(notices) => json!({"reset": true, "package": "COMMON-LISP-USER", "notices": notices}),
        Reply::Limits(limits) => self::limits(limits),
        Reply::Refused(sentence) => json!({"refused": sentence}),
    }
}

/// What an evaluation did, with the calls that were recorded.
fn calls(outcome: &Outcome) -> Value {
    let mut map = evaluation(outcome);
    let tree = CallTree::of(&outcome.records);
    map["calls"] = json!(tree.as_ref().map(|tree| &tree.calls).unwrap_or(&Vec::new()));
    map["omittedCalls"] = tree.map_or(0, |tree| tree.trace.omitted).into();
    map
}

/// What an evaluation did, with the functions it was seen in.
fn profile(outcome: &Outcome) -> Value {
    let mut map = evaluation(outcome);
    if let Some(Profile { summary, functions }) = Profile::of(&outcome.records) {
        let ProfileSummary { mode, samples, threads, milliseconds, .. } = summary;
        map["profile"] = json!({"mode": mode, "samples": samples, "threads": threads, "milliseconds": milliseconds});
        map["functions"] = json!(functions);
    }
    map
}

/// The object without those of its properties that are null: where there is nothing to tell of, one is missing.
fn present(mut object: Value) -> Value {
    if let Value::Object(properties) = &mut object {
        properties.retain(|_, value| !value.is_null());
    }
    object
}

fn status(status: &EvaluationStatus) -> Value {
    let (state, took, outcome) = match &status.progress {
        Progress::Queued => ("queued", None, None),
        Progress::Running { time, background: false } => ("running", Some(time), None),
        Progress::Running { time, background: true } => ("background", Some(time), None),
        Progress::Held(outcome) => ("held", None, Some(outcome)),
        Progress::Over(outcome, time) => ("over", Some(time), Some(outcome)),
    };
    present(json!({
        "id": status.id,
        "state": state,
        "code": status.code,
        "printed": status.printed,
        "seconds": took.map(Duration::as_secs_f64),
        "failed": outcome.map(|outcome| outcome.is_error()),
    }))
}

fn clipped(text: &Clipped) -> String {
    let mut result = text.text.clone();
    if text.omitted > 0 {
        result.push_str(&report::omission(text.omitted));
    }
    result
}

fn evaluation(outcome: &Outcome) -> Value {
    let timing = outcome.timing.filter(|_| !outcome.is_error());
    let mut map = present(json!({
        "notices": outcome.notices,
        "background": clipped(&outcome.background),
        "stdout": clipped(&outcome.stdout),
        "stderr": clipped(&outcome.stderr),
        "warnings": outcome.warnings.iter().map(warning).collect::<Vec<_>>(),
        "warningsOmitted": outcome.warnings_omitted,
        "held": outcome.held,
        "loaded": outcome.loaded().map(loaded),
        "read": of_kind(&outcome.records).next().map(|read: &ReadUpTo| read.end),
        "timing": timing.map(|timing| json!({
            "realMs": timing.real_ms,
            "runMs": timing.run_ms,
            "gcMs": timing.gc_ms,
            "bytesConsed": timing.bytes_consed,
        })),
    }));
    match &outcome.result {
        _ if outcome.in_background => map["inBackground"] = outcome.evaluation.into(),
        Ok(values) => map["values"] = values.iter().map(clipped).collect(),
        Err(failure) => map["error"] = error(failure, report::report_frames(failure).map(|(frame, _)| frame), true),
    }
    map
}

/// What was loaded.
fn loaded(loaded: &Loaded) -> Value {
    present(json!({
        "name": loaded.name,
        "files": loaded.files,
        "compiled": loaded.compiled,
        "upToDate": loaded.present.is_some(),
        "seconds": Duration::from_millis(loaded.milliseconds).as_secs_f64(),
        "systems": loaded.systems.as_ref().map(|names| names.split(", ").collect::<Vec<_>>()).unwrap_or_default(),
        "definition": loaded.definition,
    }))
}

/// What tests came to, one record a test.
fn tests(outcome: &Outcome) -> Value {
    let counts = TestCounts::of(outcome).unwrap_or_default();
    let mut map = evaluation(outcome);
    map["passed"] = counts.passed.into();
    map["failed"] = counts.failed.into();
    map["errors"] = counts.errors.into();
    map["skipped"] = counts.skipped.into();
    map["seconds"] = seconds(counts.milliseconds);
    let systems = outcome.by_system();
    let tests: Vec<_> = systems.iter().flat_map(|(_, outcome)| each_test(outcome)).collect();
    map["tests"] = if systems.is_empty() { each_test(outcome) } else { tests }.into();
    let differences = TestRun::of(&outcome.records).differences;
    map["differs"] = differences.iter().map(|it| json!({"name": it.name, "passes": it.passes})).collect();
    map
}

/// One record a test, of one system.
fn each_test(outcome: &Outcome) -> Vec<Value> {
    TestRun::of(&outcome.records).tests.iter().map(|known| test(known, outcome)).collect()
}

fn test(test: &Test<'_>, outcome: &Outcome) -> Value {
    let Test { result, checks, suspects, .. } = test;
    let checks = checks.iter().map(|check| {
        present(json!({
            "form": check.form,
            "expected": check.expected,
            "actual": check.actual,
            "message": check.message,
        }))
    });
    let suspects: Vec<_> = suspects.iter().flat_map(suspects_of).collect();
    present(json!({
        "system": result.system,
        "name": result.name,
        "framework": result.framework,
        "status": result.status,
        "message": result.message,
        "file": result.file,
        "line": result.line,
        "code": result.code,
        "seconds": seconds(result.milliseconds),
        "checks": checks.collect::<Vec<_>>(),
        "error": result.error_among(&outcome.errors).map(|known| summary(known)),
        "suspects": (!suspects.is_empty()).then_some(suspects),
    }))
}

fn suspects_of(list: &SuspectList<'_>) -> Vec<Value> {
    let of = |(suspect, lines): &(_, _)| {
        let mut map = json!(suspect);
        map["lines"] = json!(lines);
        map
    };
    list.functions.iter().map(of).collect()
}

fn seconds(milliseconds: u64) -> Value {
    // Some days at most: nothing is lost.
    (milliseconds as f64 / 1000.0).into()
}

fn warning(warning: &Warning) -> Value {
    present(json!({
        "type": warning.kind,
        "message": clipped(&warning.message),
        "file": warning.file,
        "line": warning.line,
        "column": warning.column,
        "form": warning.form,
    }))
}

/// What error-history says of an error.
fn summary(record: &ErrorRecord) -> Value {
    present(json!({
        "type": record.kind,
        "message": clipped(&record.message),
        "time": report::time(record).to_string(),
        "id": (record.id > 0).then(|| format!("E{}", record.id)),
        "form": record.form,
    }))
}

/// The innermost frames of an error.
fn first(record: &ErrorRecord, count: usize) -> &[Frame] {
    &record.frames[..record.frames.len().min(count)]
}

/// An error with these of its frames.
fn error<'a>(record: &ErrorRecord, frames: impl IntoIterator<Item = &'a Frame>, locals: bool) -> Value {
    let mut map = summary(record);
    map["slots"] = json!(record.slots);
    map["restarts"] = json!(record.restarts);
    map["frames"] = frames.into_iter().map(|known| frame(known, locals)).collect();
    map["totalFrames"] = record.total_frames.into();
    map
}

fn frame(frame: &Frame, locals: bool) -> Value {
    let (function, arguments) = parts(&frame.call);
    present(json!({
        "number": frame.number,
        "call": frame.call,
        "function": function,
        "arguments": arguments,
        "source": frame.source,
        "code": frame.code,
        "machinery": frame.machinery,
        "locals": locals.then(|| frame.locals.iter().map(local).collect::<Vec<_>>()),
    }))
}

/// The function and the arguments of a call as printed.
fn parts(call: &str) -> (&str, &str) {
    let inner = call.strip_prefix('(').unwrap_or(call);
    let inner = inner.strip_suffix(')').unwrap_or(inner);
    let (mut depth, mut quote, mut escaped) = (0, None, false);
    for (index, character) in inner.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' | '|' if quote.is_none() => quote = Some(character),
            _ if quote == Some(character) => quote = None,
            _ if quote.is_some() => {}
            '(' => depth += 1,
            ')' => depth -= 1,
            ' ' if depth == 0 => return (&inner[..index], &inner[index + 1..]),
            _ => {}
        }
    }
    (inner, "")
}

fn local(local: &Local) -> Value {
    let mut map = json!({"name": local.name});
    match &local.value {
        LocalValue::Value(value) => map["value"] = value.as_str().into(),
        LocalValue::Dead => map["unknown"] = "dead here".into(),
        LocalValue::Unavailable => map["unknown"] = "unavailable".into(),
    }
    map
}

fn definition(definition: &Definition) -> Value {
    json!({"kind": definition.kind, "text": definition.text})
}

fn role(role: &Role) -> Value {
    let details = role.details.iter().map(|(label, text)| json!({"label": label, "text": text}));
    json!({"title": role.title, "details": details.collect::<Vec<_>>()})
}

fn expansion(found: &Expansion, max: usize) -> Value {
    let Expansion { steps, text, error, notes, .. } = found;
    present(json!({
        "steps": steps,
        "notes": notes,
        "expansion": (!text.is_empty()).then(|| report::cut(text.clone(), max)),
        "error": error,
    }))
}

fn limits(limits: &Limits) -> Value {
    json!({
        "timeout": limits.timeout.map_or(0.0, |timeout| timeout.as_secs_f64()),
        "maxOutput": limits.max_output,
        "maxAnswer": limits.max_answer,
        "onError": limits.on_error.name(),
    })
}

/// The schema of what [`content`] makes of this tool's replies. `None` for a tool that there is none of. No property is
/// required, since each may be missing where the call was refused; and only what every client understands is said.
pub(super) fn schema(tool: &str) -> Option<JsonObject> {
    let mut properties = match tool {
        "evaluate-lisp" | "eval-in-frame" | "return-from-frame" | "restart-frame" => evaluation_properties(),
        "trace-calls" => {
            let ends = json!({"type": "string", "enum": ["returned", "failed", "left", "running"]});
            let call = json!({
                "depth": count(),
                "text": text(),
                "end": ends,
                "result": text(),
                "nanoseconds": count(),
                "deeper": count(),
                "thread": text(),
            });
            let mut properties = evaluation_properties();
            properties["calls"] = list(&object(call, &["depth", "text", "end"]));
            properties["omittedCalls"] = count();
            properties
        }
        "profile" => {
            let profile = json!({"mode": text(), "samples": count(), "threads": count(), "milliseconds": count()});
            let function = json!({"name": text(), "place": text(), "self": count(), "total": count()});
            let mut properties = evaluation_properties();
            properties["profile"] = object(profile, &["samples"]);
            properties["functions"] = list(&object(function, &["name", "self", "total"]));
            properties
        }
        "invoke-restart" => {
            let mut properties = evaluation_properties();
            properties["aborted"] =
                json!({"type": "boolean", "description": "In place of all else: the restart was ABORT."});
            properties
        }
        "load" => {
            let mut properties = evaluation_properties();
            properties["loaded"] = loaded_schema();
            properties
        }
        "run-tests" => tests_properties(),
        "evaluation" => {
            // As evaluate-lisp for one that was waited for.
            let mut properties = tests_properties();
            properties["evaluation"] = status_schema();
            properties["page"] = page_schema();
            properties
        }
        "describe-last-error" | "get-backtrace" => json!({"error": error_schema(), "unended": count()}),
        "error-history" => {
            let errors = list(&object(summary_properties(), &["type", "message", "time"]));
            json!({"errors": errors, "older": count(), "unended": count()})
        }
        "frame-locals" => json!({"locals": list(&local_schema())}),
        "abort-evaluation" => json!({"aborted": {"type": "boolean"}}),
        "list-definitions" => {
            let kinds =
                json!({"type": "string", "enum": ["function", "variable", "macro", "class", "package", "system"]});
            let definition = object(json!({"kind": kinds, "text": text()}), &["kind", "text"]);
            json!({"definitions": list(&definition), "more": count(), "notRestored": list(&text())})
        }
        "describe-symbol" => {
            let detail = object(json!({"label": text(), "text": text()}), &["label", "text"]);
            let role = object(json!({"title": text(), "details": list(&detail)}), &["title", "details"]);
            json!({"roles": list(&role), "notFound": text()})
        }
        "checkpoint" => {
            let one = object(checkpoint_properties(), &["name", "evaluation", "saved", "bytes"]);
            json!({
                "checkpoints": list(&one),
                "saved": one,
                "stoppedMicroseconds": count(),
                "threads": list(&text()),
                "timers": count(),
                "restored": one,
                "forgotten": count(),
                "package": text(),
                "notices": list(&text()),
                "deleted": text(),
            })
        }
        "find-symbols" => {
            let properties = json!({
                "name": text(),
                "kind": text(),
                "lambdaList": text(),
                "documentation": text(),
                "exported": {"type": "boolean"},
            });
            let symbol = object(properties, &["name", "kind", "exported"]);
            json!({"symbols": list(&symbol), "more": count(), "nothing": text()})
        }
        "find-references" => {
            let properties = json!({"name": text(), "where": text(), "code": text(), "how": text()});
            let reference = object(properties, &["name", "where"]);
            json!({"relation": text(), "references": list(&reference), "more": count(), "notes": list(&text())})
        }
        "macroexpand" => {
            let step =
                object(json!({"macro": text(), "result": text(), "count": count()}), &["macro", "result", "count"]);
            let error =
                object(json!({"type": text(), "message": text(), "while": text()}), &["type", "message", "while"]);
            json!({"steps": list(&step), "expansion": text(), "error": error, "notes": list(&text())})
        }
        "reset-session" => json!({"reset": {"type": "boolean"}, "package": text(), "notices": list(&text())}),
        "configure-limits" => json!({
            "timeout": {"type": "number", "minimum": 0, "description": "0: none."},
            "maxOutput": count(),
            "maxAnswer": count(),
            "onError": {"type": "string", "enum": (OnError::ALL.map(OnError::name))},
        }),
        _ => return None,
    };
    properties["refused"] =
        json!({"type": "string", "description": "In place of all else: what was wrong with the call."});
    let Value::Object(schema) = object(properties, &[]) else { return None };
    Some(schema)
}

fn loaded_schema() -> Value {
    let properties = json!({
        "name": text(),
        "files": count(),
        "compiled": count(),
        "upToDate": {"type": "boolean"},
        "seconds": {"type": "number"},
        "systems": list(&text()),
        "definition": text(),
    });
    object(properties, &["name", "files", "compiled", "upToDate", "seconds", "systems"])
}

fn status_schema() -> Value {
    let properties = json!({
        "id": count(),
        "state": {"type": "string", "enum": ["queued", "running", "background", "held", "over"]},
        "code": text(),
        "printed": count(),
        "seconds": {"type": "number"},
        "failed": {"type": "boolean"},
    });
    object(properties, &["id", "state", "code", "printed"])
}

fn page_schema() -> Value {
    let properties = json!({
        "evaluation": count(),
        "part": text(),
        "text": text(),
        "from": count(),
        "total": count(),
        "omitted": count(),
    });
    object(properties, &["evaluation", "part", "text", "from", "total", "omitted"])
}

fn evaluation_properties() -> Value {
    let warning = json!({
        "type": text(),
        "message": text(),
        "file": text(),
        "line": count(),
        "column": count(),
        "form": text(),
    });
    let timing = json!({"realMs": count(), "runMs": count(), "gcMs": count(), "bytesConsed": count()});
    json!({
        "notices": list(&text()),
        "background": text(),
        "stdout": text(),
        "stderr": text(),
        "warnings": list(&object(warning, &["type", "message"])),
        "warningsOmitted": count(),
        "held": {"type": "boolean"},
        "inBackground": {"type": "integer", "description": "The evaluation's number, when it goes on in the background."},
        "values": {"type": "array", "items": text(), "description": "Of the last form, if it did not fail."},
        "error": error_schema(),
        "timing": object(timing, &["realMs", "runMs", "gcMs", "bytesConsed"]),
    })
}

/// Those of a run of tests, and of an evaluation.
fn tests_properties() -> Value {
    let status = json!({"type": "string", "enum": ["passed", "failed", "error", "skipped"]});
    let error = object(summary_properties(), &["type", "message", "time"]);
    let line = object(json!({"line": count(), "code": text(), "passing": count()}), &["line", "code"]);
    let suspect = json!({
        "name": text(),
        "file": text(),
        "line": count(),
        "passing": {"type": "integer", "minimum": 0, "description": "How many passing tests ran these lines."},
        "macros": text(),
        "lines": list(&line),
    });
    let check = json!({"form": text(), "expected": text(), "actual": text(), "message": text()});
    let test = json!({
        "system": {"type": "string", "description": "Where there are several."},
        "name": text(),
        "framework": text(),
        "status": status,
        "message": text(),
        "file": text(),
        "line": count(),
        "code": text(),
        "seconds": {"type": "number"},
        "checks": {"type": "array", "items": object(check, &[]), "description": "Those that failed, the first ones."},
        "error": error,
        "suspects": list(&object(suspect, &["name", "line", "passing", "lines"])),
    });
    let mut properties = evaluation_properties();
    for name in ["passed", "failed", "errors", "skipped"] {
        properties[name] = count();
    }
    properties["seconds"] = json!({"type": "number"});
    let passes = json!({"type": "string", "enum": ["session", "fresh"], "description": "Where alone it passes."});
    properties["differs"] = list(&object(json!({"name": text(), "passes": passes}), &["name", "passes"]));
    properties["tests"] = list(&object(test, &["name", "framework", "status", "seconds", "checks"]));
    properties
}

fn summary_properties() -> Value {
    let form = json!({"number": count(), "line": count(), "text": text()});
    json!({
        "id": text(),
        "type": text(),
        "message": text(),
        "time": text(),
        "form": object(form, &["number", "line", "text"]),
    })
}

fn error_schema() -> Value {
    let restart = json!({"number": count(), "name": text(), "description": text()});
    let frame = json!({
        "number": count(),
        "call": text(),
        "function": text(),
        "arguments": text(),
        "source": text(),
        "code": text(),
        "machinery": text(),
        "locals": list(&local_schema()),
    });
    let mut properties = summary_properties();
    properties["slots"] = list(&object(json!({"name": text(), "value": text()}), &["name", "value"]));
    properties["restarts"] = list(&object(restart, &["number", "name", "description"]));
    properties["frames"] = list(&object(frame, &["number", "call", "function", "arguments"]));
    properties["totalFrames"] = count();
    object(properties, &["type", "message", "time", "slots", "restarts", "frames", "totalFrames"])
}

fn local_schema() -> Value {
    let unknown = json!({"type": "string", "enum": ["dead here", "unavailable"]});
    object(json!({"name": text(), "value": text(), "unknown": unknown}), &["name"])
}

fn text() -> Value {
    json!({"type": "string"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn list(items: &Value) -> Value {
    json!({"type": "array", "items": items})
}

fn object(properties: Value, required: &[&str]) -> Value {
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// What is told of a checkpoint.
fn checkpoint_properties() -> Value {
    json!({"name": text(), "evaluation": count(), "saved": text(), "bytes": count()})
}

fn told(checkpoint: &Checkpoint) -> Value {
    let Checkpoint { name, evaluation, saved, bytes, .. } = checkpoint;
    json!({"name": name, "evaluation": evaluation, "saved": saved.strftime("%FT%TZ").to_string(), "bytes": bytes})
}

fn checkpoint(reply: &CheckpointReply) -> Value {
    match reply {
        CheckpointReply::List(all) => json!({"checkpoints": all.iter().map(told).collect::<Vec<_>>()}),
        CheckpointReply::Saved(saved) => json!({
            "saved": told(&saved.checkpoint),
            "stoppedMicroseconds": saved.stopped,
            "threads": saved.threads,
            "timers": saved.timers,
        }),
        CheckpointReply::Restored { checkpoint, forgotten, package, notices } => json!({
            "restored": told(checkpoint), "forgotten": forgotten, "package": package, "notices": notices,
        }),
        CheckpointReply::Deleted(name) => json!({"deleted": name}),
    }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn calls_are_taken_apart() {
        for (call, function, arguments) in [
            ("(FOO 1 \"x y\")", "FOO", "1 \"x y\""),
            ("(FOO)", "FOO", ""),
            ("((LAMBDA (X) :IN BAR) 3)", "(LAMBDA (X) :IN BAR)", "3"),
            ("((SETF |a b|) 1 2)", "(SETF |a b|)", "1 2"),
            ("(|a b| 1)", "|a b|", "1"),
            ("(\"foreign function: read\")", "\"foreign function: read\"", ""),
            ("((FLET \"BODY (1\" :IN A\\ B))", "(FLET \"BODY (1\" :IN A\\ B)", ""),
            ("", "", ""),
        ] {
            assert_eq!(parts(call), (function, arguments), "{call}");
        }
    }
}
