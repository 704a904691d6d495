//! The tool profile, which finds the functions in which an evaluation spends time or allocates memory.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Flag, Text, Timeout, text};
use super::background::{self, Job, Wait};
use super::{Call, CallHandler, Fault, ToolResult, ToolSpec, evaluation_hints, handle_with};
use crate::os::files;
use crate::outcome::{Profile, ProfileSummary, ProfiledFunction, Stack, of_kind};
use crate::report::{self, MAX_PROFILED_FUNCTIONS};
use crate::schema::{self, json};
use crate::session::Operation;
use crate::session::PostProcessing;
use crate::{Evaluation, Outcome};

/// The tool profile.
pub(super) struct ProfileCode;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Arguments {
    /// Common Lisp source.
    code: Text,
    /// `cpu`: processor time; `time`: also time spent waiting; `alloc`: memory allocation.
    #[serde(default)]
    mode: Mode,
    /// Maximum number of functions.
    #[serde(default, alias = "top")]
    limit: Count<MAX_PROFILED_FUNCTIONS, 20>,
    /// File for a flame graph (SVG).
    save_to: Option<Text>,
    /// Package to read the code in.
    package: Option<Text>,
    /// Seconds until TIMEOUT; 0: no limit.
    #[serde(default)]
    timeout: Timeout,
    /// Answer at once; evaluate in the background (no default timeout).
    #[serde(default)]
    background: Flag,
    /// Wait this many seconds, then continue in the background.
    wait: Option<Wait>,
}

/// The profiler's modes, named as in lisp/tools/profiling.lisp.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
    Cpu,
    Alloc,
    Time,
}

impl Mode {
    /// Returns the name by which Lisp knows the mode.
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Alloc => "alloc",
            Self::Time => "time",
        }
    }
}

/// Structured content: the result of the evaluation, and the functions in which the profiler took samples.
#[derive(Serialize, JsonSchema)]
pub(super) struct Content {
    #[serde(flatten)]
    evaluation: schema::Evaluation,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<Summary>,
    functions: Vec<ProfiledFunction>,
}

#[derive(Serialize, JsonSchema)]
struct Summary {
    mode: String,
    samples: u64,
    threads: u64,
    milliseconds: u64,
}

impl ToolSpec for ProfileCode {
    const NAME: &'static str = "profile";
    const TITLE: &'static str = "Profile";
    const DESCRIPTION: &'static str = "Evaluate Common Lisp code under SBCL's statistical profiler. \
        Returns the functions that used time or memory, in all threads, with source locations; then the code's result.";
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        evaluation_hints()
    }

    fn call(_: &Call, arguments: Arguments) -> Result<CallHandler, Fault> {
        let mut evaluation = Evaluation::new(arguments.code.0);
        let mode = arguments.mode.name();
        let path = text(arguments.save_to).map(PathBuf::from);
        evaluation.package = text(arguments.package);
        evaluation.timeout = arguments.timeout.0;
        let wait_limit = background::wait_limit(arguments.background, arguments.wait);
        let operation =
            Operation::new("profile").with("mode", mode).with("top", arguments.limit.0).with("stacks", path.is_some());
        let mut job = Job::operation(evaluation, operation);
        if let Some(path) = path {
            let work = move |mut outcome: Outcome| {
                outcome.notices.push(match write_flame_graph(&outcome, mode, &path) {
                    Ok(()) => format!("Flame graph: {}", path.display()),
                    Err(reason) => format!("No flame graph was written to {}: {reason}.", path.display()),
                });
                Ok(outcome)
            };
            job = job.with_post_processing(PostProcessing::new(work, || ()));
        }
        handle_with(move |call| background::evaluate(call, job, wait_limit, |call, outcome| call.reply(outcome)))
    }
}

/// Returns true for an outcome that has a profile.
pub(super) fn has_profile(outcome: &Outcome) -> bool {
    Profile::of(&outcome.records).is_some()
}

/// The result of an evaluation, with its profile.
#[derive(Debug)]
pub(super) struct ProfileResult(pub(super) Arc<Outcome>);

impl ToolResult for ProfileResult {
    fn text(&self, max: usize) -> String {
        report::profile(&self.0, max)
    }

    fn structured_content(&self, max: usize) -> Value {
        // The rest of the outcome is truncated as in the text.
        let outcome = report::fitted(&self.0, max);
        let (profile, functions) = Profile::of(&outcome.records).map_or((None, Vec::new()), |profile| {
            let ProfileSummary { mode, samples, threads, milliseconds, .. } = profile.summary.clone();
            let functions = profile.functions.into_iter().cloned().collect();
            (Some(Summary { mode, samples, threads, milliseconds }), functions)
        });
        json(&Content { evaluation: schema::Evaluation::new(&outcome), profile, functions })
    }

    fn is_error(&self) -> bool {
        self.0.is_error()
    }
}

/// Writes the flame graph of a profile. Returns the reason if no graph was written.
fn write_flame_graph(outcome: &Outcome, mode: &str, path: &Path) -> Result<(), String> {
    use inferno::flamegraph::{Options, from_lines};
    let stacks =
        of_kind(&outcome.records).map(|stack: &Stack| format!("{} {}", stack.frames.replace('\n', " "), stack.count));
    let stacks: Vec<String> = stacks.collect();
    if stacks.is_empty() {
        // The report says why a profile has no samples. There is no profile if the profiler did not start.
        let reason = if has_profile(outcome) { "the profile has no samples" } else { "the code was not profiled" };
        return Err(reason.to_owned());
    }
    let mut options = Options::default();
    options.title = format!("SBCL profile ({mode})");
    options.count_name = "samples".to_owned();
    options.no_javascript = false;
    let mut graph = Vec::new();
    from_lines(&mut options, stacks.iter().map(String::as_str), &mut graph).map_err(|error| error.to_string())?;
    // A write to a FIFO might never end.
    let file = files::open_regular(OpenOptions::new().write(true).create(true).truncate(true), path);
    file.and_then(|mut file| file.write_all(&graph)).map_err(|error| error.to_string())
}
