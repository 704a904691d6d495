//! profile: where an evaluation spends its time, or what allocates.

use std::path::{Path, PathBuf};

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::{Arguments, Call, Fault, Reply, Step, define, later};
use crate::session::operation::Operation;
use crate::{Evaluation, Outcome};

pub(super) const NAME: &str = "profile";

/// Functions shown unless asked otherwise, and at most.
const TOP: u64 = 20;
const MAX_TOP: u64 = 500;

const MODES: [(&str, &str); 3] = [("cpu", "cpu"), ("alloc", "alloc"), ("time", "time")];

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Profile",
        "Evaluate Common Lisp code under SBCL's statistical profiler: the functions that took time or memory, with \
        places, in all threads; then the code's own answer. Samples are 10 ms apart: let it run for a second or more.",
        json!({
            "code": {
                "type": "string",
                "description": "Common Lisp source.",
            },
            "mode": {
                "type": "string",
                "enum": MODES.map(|(name, _)| name),
                "default": "cpu",
                "description": "`cpu`: processor time; `time`: also where threads wait; `alloc`: what allocates memory.",
            },
            "top": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TOP,
                "default": TOP,
                "description": "How many functions are shown.",
            },
            "save-to": {
                "type": "string",
                "description": "A file for a flame graph (SVG), from the server's directory if relative.",
            },
            "timeout": super::limits::timeout_schema(),
        }),
        &["code"],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let mut arguments = Arguments::new(NAME, &["code", "mode", "top", "save-to", "timeout"], 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    let mode = arguments.choice("mode", &MODES)?.unwrap_or("cpu");
    let top = arguments.whole("top", 1..=MAX_TOP, &format!("a whole number from 1 to {MAX_TOP}"))?.unwrap_or(TOP);
    let path = arguments.optional_text("save-to")?.map(PathBuf::from);
    evaluation.timeout = super::limits::timeout(&mut arguments)?;
    let operation = Operation::new("profile").with("mode", mode).with("top", top).with("stacks", path.is_some());
    later(move |call: Call| {
        super::evaluate_as(call, &operation, evaluation, move |mut outcome| {
            if let Some(path) = path {
                let notice = match flame_graph(&outcome, mode, &path) {
                    Ok(()) => format!("Flame graph: {}", path.display()),
                    Err(reason) => format!("No flame graph in {}: {reason}", path.display()),
                };
                outcome.notices.push(notice);
            }
            Reply::Profile(Box::new(outcome))
        })
    })
}

/// Writes the flame graph of a profile; or says why not.
fn flame_graph(outcome: &Outcome, mode: &str, path: &Path) -> Result<(), String> {
    use inferno::flamegraph::{Options, from_lines};
    let stacks: Vec<String> = outcome
        .records
        .iter()
        .filter(|record| record.kind == "stack")
        .filter_map(|record| Some(format!("{} {}", record.text("frames")?.replace('\n', " "), record.number("count")?)))
        .collect();
    if stacks.is_empty() {
        return Err("there are no samples".to_owned());
    }
    let mut options = Options::default();
    options.title = format!("SBCL profile ({mode})");
    options.count_name = "samples".to_owned();
    options.no_javascript = false;
    let mut graph = Vec::new();
    from_lines(&mut options, stacks.iter().map(String::as_str), &mut graph).map_err(|error| error.to_string())?;
    std::fs::write(path, graph).map_err(|error| error.to_string())
}
