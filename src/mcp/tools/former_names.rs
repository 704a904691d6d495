//! Names and arguments that tools had in builds before version 0.1. Version 0.1 accepts them, but does not list them; the
//! next version will refuse them.

use rmcp::model::JsonObject;
use serde_json::{Value, json};

use super::abort_evaluation::AbortEvaluation;
use super::check_evaluation::CheckEvaluation;
use super::debugger::ResumeFromFrame;
use super::errors::{DEFAULT_LISTED, DescribeLastError, GetBacktrace};
use super::load_system::LoadSystem;
use super::{ToolSpec, find_tool};

/// The former names of tools, each with its successors.
const FORMER_NAMES: [(&str, &[&str]); 6] = [
    ("load", &[LoadSystem::NAME]),
    ("error-history", &[DescribeLastError::NAME]),
    ("frame-locals", &[GetBacktrace::NAME]),
    ("return-from-frame", &[ResumeFromFrame::NAME]),
    ("restart-frame", &[ResumeFromFrame::NAME]),
    ("evaluation", &[CheckEvaluation::NAME, AbortEvaluation::NAME]),
];

/// Returns the present tools for a name, which may be a former name.
pub(super) fn successors(name: &str) -> Vec<&str> {
    match FORMER_NAMES.iter().find(|(former, _)| *former == name) {
        Some((_, successors)) => successors.to_vec(),
        None => vec![name],
    }
}

/// Translates a call that may use a former name to the present name and arguments. Unknown arguments are kept, so that
/// the present tool refuses them.
pub(in crate::mcp) fn translate_former_call(name: String, mut arguments: JsonObject) -> (String, JsonObject) {
    if find_tool(&name).is_some() {
        return (name, arguments);
    }
    let arguments = &mut arguments;
    let (tool, arguments) = match &*name {
        "error-history" => {
            let list = take_argument(arguments, "limit").unwrap_or_else(|| json!(DEFAULT_LISTED));
            (DescribeLastError::NAME, extend_arguments(arguments, [("list", Some(list))]))
        }
        "frame-locals" => match take_argument(arguments, "frame") {
            None => return (name, std::mem::take(arguments)),
            frame => {
                let shown = [("from", frame), ("max-frames", Some(json!(1))), ("locals", Some(json!(true)))];
                (GetBacktrace::NAME, extend_arguments(arguments, shown))
            }
        },
        // Without `code`, the translated call would have no `return` and so restart the frame. The call gets the unknown
        // argument `code` instead, and is refused.
        "return-from-frame" => match take_argument(arguments, "code") {
            None => {
                return (ResumeFromFrame::NAME.to_owned(), extend_arguments(arguments, [("code", Some(Value::Null))]));
            }
            code => (ResumeFromFrame::NAME, extend_arguments(arguments, [("return", code)])),
        },
        "evaluation" => {
            let action = take_argument(arguments, "action");
            let [seconds, part, characters] =
                ["seconds", "part", "characters"].map(|name| take_argument(arguments, name));
            match action.as_ref().map_or("status", |action| action.as_str().unwrap_or_default()) {
                "status" => (CheckEvaluation::NAME, extend_arguments(arguments, [])),
                "wait" => {
                    let wait = seconds.unwrap_or_else(|| json!(25));
                    (CheckEvaluation::NAME, extend_arguments(arguments, [("wait", Some(wait))]))
                }
                "output" => {
                    let part = part.unwrap_or_else(|| json!("output"));
                    (CheckEvaluation::NAME, extend_arguments(arguments, [("part", Some(part)), ("limit", characters)]))
                }
                "cancel" => {
                    arguments.remove("from");
                    (AbortEvaluation::NAME, extend_arguments(arguments, [("newest", Some(json!(true)))]))
                }
                _ => (CheckEvaluation::NAME, extend_arguments(arguments, [("action", action)])),
            }
        }
        other => (successors(other)[0], std::mem::take(arguments)),
    };
    (tool.to_owned(), arguments)
}

/// Removes and returns an argument. Null and the empty string count as absent.
fn take_argument(arguments: &mut JsonObject, name: &str) -> Option<Value> {
    arguments.remove(name).filter(|value| !value.is_null() && value != "")
}

/// Moves all entries out of `arguments` and returns them with the entries of `more` that have a value.
fn extend_arguments<const N: usize>(arguments: &mut JsonObject, more: [(&str, Option<Value>); N]) -> JsonObject {
    let mut arguments = std::mem::take(arguments);
    arguments.extend(more.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_by_former_names_become_calls_of_their_successors() {
        for (name, arguments, expected_name, expected) in [
            ("load", json!({"path": "a.lisp"}), "load-system", json!({"path": "a.lisp"})),
            ("error-history", json!({}), "describe-last-error", json!({"list": 20})),
            ("error-history", json!({"limit": "5"}), "describe-last-error", json!({"list": "5"})),
            ("frame-locals", json!({"frame": 3}), "get-backtrace", json!({"from": 3, "max-frames": 1, "locals": true})),
            (
                "return-from-frame",
                json!({"frame": 1, "code": "2"}),
                "resume-from-frame",
                json!({"frame": 1, "return": "2"}),
            ),
            ("restart-frame", json!({"frame": 1}), "resume-from-frame", json!({"frame": 1})),
            ("evaluation", json!({"id": 7}), "check-evaluation", json!({"id": 7})),
            ("evaluation", json!({"id": 7, "action": "wait"}), "check-evaluation", json!({"id": 7, "wait": 25})),
            ("evaluation", json!({"action": "wait", "seconds": 3}), "check-evaluation", json!({"wait": 3})),
            (
                "evaluation",
                json!({"id": 7, "action": "output", "from": 9, "characters": 5}),
                "check-evaluation",
                json!({"id": 7, "part": "output", "from": 9, "limit": 5}),
            ),
            ("evaluation", json!({"id": 7, "action": "cancel"}), "abort-evaluation", json!({"id": 7, "newest": true})),
            ("evaluation", json!({"action": 5}), "check-evaluation", json!({"action": 5})),
            ("return-from-frame", json!({"frame": 1}), "resume-from-frame", json!({"frame": 1, "code": null})),
            ("evaluate-lisp", json!({"limit": 1}), "evaluate-lisp", json!({"limit": 1})),
            ("nonsense", json!({"limit": 1}), "nonsense", json!({"limit": 1})),
        ] {
            let Value::Object(arguments) = arguments else { panic!("not an object") };
            let (tool, arguments) = translate_former_call(name.to_owned(), arguments);
            assert_eq!((&*tool, Value::Object(arguments)), (expected_name, expected), "{name}");
        }
    }

    #[test]
    fn former_names_are_not_tools_and_their_successors_are() {
        for (former, successors) in FORMER_NAMES {
            assert!(find_tool(former).is_none(), "{former}");
            assert!(successors.iter().all(|name| find_tool(name).is_some()), "{former}");
        }
    }
}
