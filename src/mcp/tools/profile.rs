//! profile: where an evaluation spends its time, or what allocates.

use std::path::{Path, PathBuf};

use rmcp::model::{JsonObject, Tool};
use serde_json::json;

use super::background::{self, Job};
use super::limits::{timeout, timeout_schema};
use super::schema::{choice, text, whole};
use super::{Arguments, Fault, Step, define, evaluation_hints, later};
use crate::outcome::{Stack, of_kind};
use crate::session::Aftermath;
use crate::session::Operation;
use crate::{Evaluation, Outcome};

pub(super) const NAME: &str = "profile";

/// Functions shown unless asked otherwise, and at most.
const TOP: u64 = 20;
const MAX_TOP: u64 = 500;

const MODES: [(&str, &str); 3] = [("cpu", "cpu"), ("alloc", "alloc"), ("time", "time")];

const DESCRIPTION: &str = "Evaluate Common Lisp code under SBCL's statistical profiler: the functions that took time or \
    memory, with places, in all threads; then the code's own answer.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "code": text("Common Lisp source."),
        "mode": choice(
            &MODES,
            Some("cpu"),
            "`time`: also where threads wait; `alloc`: what allocates memory.",
        ),
        "top": whole(1..=MAX_TOP, TOP, "How many functions to show."),
        "save-to": text("A file for a flame graph (SVG)."),
        "package": text("To read in."),
        "timeout": timeout_schema(),
    });
    background::add_properties(&mut properties);
    define(NAME, "Profile", DESCRIPTION, properties, &["code"], evaluation_hints())
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["code", "mode", "top", "save-to", "package", "timeout", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 1, arguments)?;
    let mut evaluation = Evaluation::new(arguments.text("code")?);
    let mode = arguments.choice("mode", &MODES)?.unwrap_or("cpu");
    let top = arguments.count("top", MAX_TOP, TOP)?;
    let path = arguments.optional_text("save-to")?.map(PathBuf::from);
    evaluation.package = arguments.optional_text("package")?;
    evaluation.timeout = timeout(&mut arguments)?;
    let patience = background::patience(&mut arguments)?;
    let operation = Operation::new("profile").with("mode", mode).with("top", top).with("stacks", path.is_some());
    let mut job = Job::operation(evaluation, operation);
    if let Some(path) = path {
        let work = move |mut outcome: Outcome| {
            outcome.notices.push(match flame_graph(&outcome, mode, &path) {
                Ok(()) => format!("Flame graph: {}", path.display()),
                Err(reason) => format!("No flame graph in {}: {reason}", path.display()),
            });
            Ok(outcome)
        };
        job = job.before_end(Aftermath::new(work, || ()));
    }
    later(move |call| background::evaluate(call, job, patience, |call, outcome| call.reply(outcome)))
}

/// Writes the flame graph of a profile; or says why not.
fn flame_graph(outcome: &Outcome, mode: &str, path: &Path) -> Result<(), String> {
    use inferno::flamegraph::{Options, from_lines};
    let stacks =
        of_kind(&outcome.records).map(|stack: &Stack| format!("{} {}", stack.frames.replace('\n', " "), stack.count));
    let stacks: Vec<String> = stacks.collect();
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
