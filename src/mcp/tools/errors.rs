//! describe-last-error, get-backtrace and error-history: the error state, which answers while an evaluation runs.

use std::sync::Arc;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Flag, FrameNumber, Most, Text, shown};
use super::{Call, Fault, Finding, Offered, Reply, Step, Traits, inspection, later};
use crate::listed;
use crate::mcp::content::{Failure, Summary, json};
use crate::report::{self, FrameRange};
use crate::{ErrorRecord, Session};

/// Frames shown unless asked otherwise.
const DEFAULT_FRAMES: u64 = 20;
/// Errors listed unless asked otherwise, and at most.
const DEFAULT_HISTORY: u64 = 20;
const MAX_HISTORY: u64 = 200;

const TRAITS: Traits = Traits { repeatable: true, meanwhile: true, about_errors: true, ..Traits::NONE };

/// Answers a call with what `find` finds in the error state, once a cancelled evaluation is part of it, or is overdue.
fn settled(find: impl FnOnce(&Session) -> Result<Reply, Fault> + Send + 'static) -> Result<Step, Fault> {
    later(move |call| {
        let session = call.session().clone();
        session.when_settled(move |unended| {
            let found = find(call.session());
            call.answer(found.map(|reply| match unended {
                Some(evaluation) => Unsettled { evaluation, reply }.into(),
                None => reply,
            }));
        });
    })
}

/// The error that the argument error-id names, or the last one.
fn error(session: &Session, id: Option<Text>) -> Result<Option<Arc<ErrorRecord>>, Fault> {
    let Some(Text(id)) = id else { return Ok(session.last_error()) };
    let number = id.trim().trim_start_matches(['E', 'e']).parse().unwrap_or(0);
    session.error(number).map(Some).ok_or_else(|| {
        let known = session.error_history();
        Fault::Value(if known.is_empty() {
            format!("There is no error {}: no errors in this session.", shown(&id))
        } else {
            let see = listed::with(&[ErrorHistory::NAME], " (see error-history)");
            format!("There is no error {}. The history has {}{see}.", shown(&id), range(&known))
        })
    })
}

/// The identifiers of errors, which come newest first.
fn range(errors: &[Arc<ErrorRecord>]) -> String {
    match errors {
        [newest, .., oldest] => format!("E{} to E{}", oldest.id, newest.id),
        [one] => format!("E{}", one.id),
        [] => "none".to_owned(),
    }
}

/// An error, where there is one.
#[derive(Serialize, JsonSchema)]
pub(super) struct ErrorContent {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
    /// The cancelled evaluation that has not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    unended: Option<u64>,
}

/// describe-last-error.
pub(super) struct DescribeLastError;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct DescribeArguments {
    /// Which error, as `E17`. Default: the last one.
    error_id: Option<Text>,
}

impl Offered for DescribeLastError {
    const NAME: &'static str = "describe-last-error";
    const TITLE: &'static str = "Describe last error";
    const DESCRIPTION: &'static str = "Explain the last error: type, message, time, restarts, and the top 5 frames. Use it after an [ERROR]. It stays until an evaluation succeeds.[[error-history| error-history has older ones.]]";
    const TRAITS: Traits = Traits { core: true, ..TRAITS };
    type Arguments = DescribeArguments;
    type Content = ErrorContent;

    fn hints() -> ToolAnnotations {
        inspection()
    }

    fn call(_: &Call, arguments: DescribeArguments) -> Result<Step, Fault> {
        settled(|session| Ok(Described(error(session, arguments.error_id)?).into()))
    }
}

/// An error to describe, if there is one.
#[derive(Debug)]
struct Described(Option<Arc<ErrorRecord>>);

impl Finding for Described {
    fn text(&self, _: usize) -> String {
        report::last_error(self.0.as_deref())
    }

    fn fit(&mut self, max: usize) {
        self.0 = self.0.take().map(|error| Arc::new(report::fitted_error(&error, max)));
    }

    fn content(&self, _: usize) -> Value {
        let first = |error: &ErrorRecord| Failure::new(error, error.frames.iter().take(report::PREVIEW_FRAMES), true);
        json(&ErrorContent { error: self.0.as_deref().map(first), unended: None })
    }
}

/// get-backtrace.
pub(super) struct GetBacktrace;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct BacktraceArguments {
    /// How many frames to show.
    #[serde(default = "default_frames")]
    max_frames: Most,
    /// The first frame to show.
    #[serde(default)]
    from: FrameNumber,
    /// Show the local variables under each frame.
    #[serde(default)]
    locals: Flag,
    /// Which error, as `E17`. Default: the last one.
    error_id: Option<Text>,
}

fn default_frames() -> Most {
    Most(DEFAULT_FRAMES)
}

impl Offered for GetBacktrace {
    const NAME: &'static str = "get-backtrace";
    const TITLE: &'static str = "Get backtrace";
    const DESCRIPTION: &'static str = "Show the call stack of the last error, innermost frame first, with the arguments of each \
        call and source locations.";
    const TRAITS: Traits = Traits { core: true, ..TRAITS };
    type Arguments = BacktraceArguments;
    type Content = ErrorContent;

    fn hints() -> ToolAnnotations {
        inspection()
    }

    fn call(_: &Call, arguments: BacktraceArguments) -> Result<Step, Fault> {
        let BacktraceArguments { max_frames, from, locals, error_id } = arguments;
        let range = FrameRange { from: from.0, max_frames: max_frames.0, locals: locals.0 };
        settled(move |session| Ok(Backtrace { error: error(session, error_id)?, range }.into()))
    }
}

/// Frames of an error, if there is one.
#[derive(Debug)]
struct Backtrace {
    error: Option<Arc<ErrorRecord>>,
    range: FrameRange,
}

impl Finding for Backtrace {
    fn text(&self, max: usize) -> String {
        report::frames(self.error.as_deref(), &self.range, max)
    }

    fn content(&self, max: usize) -> Value {
        let frames = |error: &ErrorRecord| Failure::new(error, self.range.within(error, max), self.range.locals);
        json(&ErrorContent { error: self.error.as_deref().map(frames), unended: None })
    }
}

/// error-history.
pub(super) struct ErrorHistory;

#[derive(Deserialize, JsonSchema)]
pub(super) struct HistoryArguments {
    /// How many errors to list.
    #[serde(default)]
    limit: Count<MAX_HISTORY, DEFAULT_HISTORY>,
}

/// The errors, newest first, and how many older ones there are.
#[derive(Serialize, JsonSchema)]
pub(super) struct HistoryContent {
    errors: Vec<Summary>,
    older: usize,
    /// The cancelled evaluation that has not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    unended: Option<u64>,
}

impl Offered for ErrorHistory {
    const NAME: &'static str = "error-history";
    const TITLE: &'static str = "Error history";
    const DESCRIPTION: &'static str = "List the session's errors, newest first, with their identifiers[[describe-last-error| for \
        describe-last-error]]. A success clears the last error, not the history.";
    const TRAITS: Traits = TRAITS;
    type Arguments = HistoryArguments;
    type Content = HistoryContent;

    fn hints() -> ToolAnnotations {
        inspection()
    }

    fn call(_: &Call, arguments: HistoryArguments) -> Result<Step, Fault> {
        settled(move |session| {
            let mut errors = session.error_history();
            let shown = errors.len().min(usize::try_from(arguments.limit.0).unwrap_or(usize::MAX));
            let older = errors.split_off(shown).len();
            Ok(History { errors, older }.into())
        })
    }
}

/// Errors, newest first, and how many older ones there are.
#[derive(Debug)]
struct History {
    errors: Vec<Arc<ErrorRecord>>,
    older: usize,
}

impl Finding for History {
    fn text(&self, max: usize) -> String {
        report::error_history(&self.errors, self.older, max)
    }

    fn content(&self, _: usize) -> Value {
        let errors = self.errors.iter().map(|error| Summary::new(error)).collect();
        json(&HistoryContent { errors, older: self.older, unended: None })
    }
}

/// A reply about errors, while this cancelled evaluation has not ended.
#[derive(Debug)]
struct Unsettled {
    evaluation: u64,
    reply: Reply,
}

impl Finding for Unsettled {
    fn text(&self, max: usize) -> String {
        let notice = report::unsettled(self.evaluation);
        format!("{notice}\n\n{}", self.reply.part(max.saturating_sub(notice.len() + 2)))
    }

    fn content(&self, max: usize) -> Value {
        let mut content = self.reply.content(max);
        let own = json(&ErrorContent { error: None, unended: Some(self.evaluation) });
        if let (Value::Object(content), Value::Object(own)) = (&mut content, own) {
            content.extend(own);
        }
        content
    }

    fn is_error(&self) -> bool {
        self.reply.is_error()
    }
}
