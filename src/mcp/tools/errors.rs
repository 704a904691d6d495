//! The tools describe-last-error and get-backtrace. Calls are answered while an evaluation runs.

use std::sync::Arc;

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::arguments::{Count, Flag, FrameNumber, PositiveNumber, Text, quoted_excerpt};
use super::debugger::submit_job;
use super::{Call, CallHandler, CallPolicy, Fault, Reply, ToolResult, ToolSpec, handle_with, inspection_hints};
use crate::report::{self, FrameRange};
use crate::schema::{ErrorDetails, ErrorSummary, json};
use crate::tool_names;
use crate::{ErrorRecord, HoldError, Session};

/// Number of frames shown by default.
const DEFAULT_FRAMES: u64 = 20;
/// Maximum number of errors in a list.
const MAX_LISTED: u64 = 200;
/// Default number of errors in a list, as for the former tool error-history.
pub(super) const DEFAULT_LISTED: u64 = 20;

const POLICY: CallPolicy = CallPolicy { during_restore: true, reads_error_state: true, ..CallPolicy::INSPECTION };

/// Returns a handler that answers with the result of `find`. If the client's evaluation was cancelled and has not ended, the
/// handler first waits a short time, so that the error state can include the cancellation.
fn handle_when_settled(
    find: impl FnOnce(&Session) -> Result<Reply, Fault> + Send + 'static,
) -> Result<CallHandler, Fault> {
    handle_with(move |call| answer_when_settled(call, find))
}

fn answer_when_settled(call: Call, find: impl FnOnce(&Session) -> Result<Reply, Fault> + Send + 'static) {
    let session = call.session().clone();
    session.when_settled(move |unended| {
        let found = find(call.session());
        call.answer(found.map(|reply| match unended {
            Some(evaluation) => PendingCancellationReply { evaluation, reply }.into(),
            None => reply,
        }));
    });
}

/// Returns the error with the identifier `id`, or the last error if there is no `id`.
fn find_error(session: &Session, id: Option<Text>) -> Result<Option<Arc<ErrorRecord>>, Fault> {
    let Some(Text(id)) = id else { return Ok(session.last_error()) };
    let number = id.trim().trim_start_matches(['E', 'e']).parse().unwrap_or(0);
    session.error(number).map(Some).ok_or_else(|| {
        let known = session.error_history();
        Fault::Refusal(if known.is_empty() {
            format!("There is no error {}: this client has no recorded errors.", quoted_excerpt(&id))
        } else {
            let see = tool_names::if_usable(
                &[DescribeLastError::NAME],
                " (describe-last-error with `list` shows the history)",
            );
            format!("There is no error {}. The history has {}{see}.", quoted_excerpt(&id), id_range(&known))
        })
    })
}

/// Describes the range of the identifiers of `errors`. Identifiers in the range may belong to other clients' errors.
fn id_range(errors: &[Arc<ErrorRecord>]) -> String {
    let ids = || errors.iter().map(|error| error.id);
    match (ids().min(), ids().max(), errors.len() as u64) {
        (Some(only), _, 1) => format!("E{only}"),
        (Some(first), Some(last), count) if last - first < count => format!("E{first} to E{last}"),
        (Some(first), Some(last), count) => format!("{count} errors from E{first} to E{last}"),
        _ => "none".to_owned(),
    }
}

/// Structured content about one error, if there is one.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct ErrorContent {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorDetails>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(extend("says" = "The evaluation is held, and the local variables have their current values."))]
    live: bool,
    /// The number of a cancelled evaluation that has not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    unended: Option<u64>,
}

/// The tool describe-last-error.
pub(super) struct DescribeLastError;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct DescribeArguments {
    /// Identifier of the error, such as `E17`. Default: the last error.
    error_id: Option<Text>,
    /// List up to this many errors instead, newest first, with identifiers.
    #[serde(alias = "limit")]
    list: Option<Count<MAX_LISTED, DEFAULT_LISTED>>,
}

/// Structured content of describe-last-error: an error, or a list of errors.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "the type only describes the schema of two kinds of content")]
pub(super) struct DescribedContent {
    #[schemars(flatten)]
    error: ErrorContent,
    #[schemars(extend("says" = "Present only with `list`."))]
    errors: Option<Vec<ErrorSummary>>,
    #[schemars(extend("says" = "Number of errors that are not listed."))]
    older: Option<usize>,
}

impl ToolSpec for DescribeLastError {
    const NAME: &'static str = "describe-last-error";
    const TITLE: &'static str = "Describe last error";
    const DESCRIPTION: &'static str = "Explain the last error: type, message, time, restarts and top 5 frames. \
        Use after an [ERROR]. The error is kept until an evaluation succeeds; `list` shows earlier errors, too.";
    const POLICY: CallPolicy = CallPolicy {
        core: true,
        // Without `list`, the answer is short.
        is_slow: |arguments| arguments.keys().any(|name| name != "error-id"),
        ..POLICY
    };
    type Arguments = DescribeArguments;
    type Content = DescribedContent;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: DescribeArguments) -> Result<CallHandler, Fault> {
        let DescribeArguments { error_id, list } = arguments;
        match (error_id, list) {
            (Some(_), Some(_)) => Err(Fault::Refusal(format!("{} takes error-id or list, not both.", Self::NAME))),
            (None, Some(Count(count))) => handle_when_settled(move |session| {
                let mut errors = session.error_history();
                let shown = errors.len().min(usize::try_from(count).unwrap_or(usize::MAX));
                let older = errors.split_off(shown).len();
                Ok(ErrorList { errors, older }.into())
            }),
            (error_id, None) => {
                handle_when_settled(|session| Ok(ErrorDescription(find_error(session, error_id)?).into()))
            }
        }
    }
}

/// The result of describe-last-error for one error.
#[derive(Debug)]
struct ErrorDescription(Option<Arc<ErrorRecord>>);

impl ToolResult for ErrorDescription {
    fn text(&self, _: usize) -> String {
        report::last_error(self.0.as_deref())
    }

    fn fit(&mut self, max: usize) {
        self.0 = self.0.take().map(|error| Arc::new(report::fitted_error(&error, max)));
    }

    fn structured_content(&self, _: usize) -> Value {
        let first =
            |error: &ErrorRecord| ErrorDetails::new(error, error.frames.iter().take(report::PREVIEW_FRAMES), true);
        json(&ErrorContent { error: self.0.as_deref().map(first), ..ErrorContent::default() })
    }
}

/// The tool get-backtrace.
pub(super) struct GetBacktrace;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct BacktraceArguments {
    /// Maximum number of frames.
    #[serde(default = "default_frames")]
    max_frames: PositiveNumber,
    /// The first frame to show.
    #[serde(default)]
    from: FrameNumber,
    /// Show the local variables of each frame.
    #[serde(default)]
    locals: Flag,
    /// Identifier of the error, such as `E17`. Default: the last error.
    error_id: Option<Text>,
}

fn default_frames() -> PositiveNumber {
    PositiveNumber(DEFAULT_FRAMES)
}

impl ToolSpec for GetBacktrace {
    const NAME: &'static str = "get-backtrace";
    const TITLE: &'static str = "Get backtrace";
    const DESCRIPTION: &'static str = "Show the call stack of the last error, innermost frame first, with the \
        arguments of each call and source locations.[[debugger| While an evaluation is held (on-error `debug`), \
        `locals` shows the values that its variables have now, marked (live).]] Example: {\"from\": 3, \"max-frames\": \
        1, \"locals\": true}.";
    const POLICY: CallPolicy = CallPolicy { core: true, is_slow: |_| true, ..POLICY };
    type Arguments = BacktraceArguments;
    type Content = ErrorContent;

    fn hints() -> ToolAnnotations {
        inspection_hints()
    }

    fn call(_: &Call, arguments: BacktraceArguments) -> Result<CallHandler, Fault> {
        let BacktraceArguments { max_frames, from, locals, error_id } = arguments;
        let range = FrameRange { from: from.0, max_frames: max_frames.0, locals: locals.0 };
        let is_last = error_id.is_none();
        let snapshot = move |session: &Session| Ok(Backtrace { error: find_error(session, error_id)?, range }.into());
        if !(is_last && range.locals) {
            return handle_when_settled(snapshot);
        }
        handle_with(move |call| match call.session().held_error() {
            Some(error) => answer_with_live_frames(call, error, range, snapshot),
            None => answer_when_settled(call, snapshot),
        })
    }
}

/// Answers a call with frames of the held error and the present values of the frames' variables, or with the result of
/// `snapshot` if the evaluation is no longer held.
fn answer_with_live_frames(
    call: Call,
    held: Arc<ErrorRecord>,
    range: FrameRange,
    snapshot: impl FnOnce(&Session) -> Result<Reply, Fault> + Send + 'static,
) {
    submit_job(call, move |session, call| {
        session.held_locals(range.from, range.max_frames, move |locals| match locals {
            Ok(locals) => call.reply(LiveBacktrace { error: held.with_locals(locals), range }),
            Err(HoldError::NothingHeld { .. }) => answer_when_settled(call, snapshot),
            Err(error) => call.refuse(error),
        })
    });
}

/// Frames of a recorded error, if there is one.
#[derive(Debug)]
struct Backtrace {
    error: Option<Arc<ErrorRecord>>,
    range: FrameRange,
}

impl ToolResult for Backtrace {
    fn text(&self, max: usize) -> String {
        report::frames(self.error.as_deref(), &self.range, max)
    }

    fn structured_content(&self, max: usize) -> Value {
        let frames =
            |error: &ErrorRecord| ErrorDetails::new(error, self.range.fitting_frames(error, max), self.range.locals);
        json(&ErrorContent { error: self.error.as_deref().map(frames), ..ErrorContent::default() })
    }
}

/// Frames of the held error, with the present values of their variables.
#[derive(Debug)]
struct LiveBacktrace {
    error: ErrorRecord,
    range: FrameRange,
}

impl ToolResult for LiveBacktrace {
    fn text(&self, max: usize) -> String {
        report::live_frames(&self.error, &self.range, max)
    }

    fn structured_content(&self, max: usize) -> Value {
        let failure = ErrorDetails::new(&self.error, self.range.fitting_frames(&self.error, max), true);
        json(&ErrorContent { error: Some(failure), live: true, ..ErrorContent::default() })
    }
}

/// A list of errors, newest first, and the number of older errors that are not listed.
#[derive(Debug)]
struct ErrorList {
    errors: Vec<Arc<ErrorRecord>>,
    older: usize,
}

#[derive(Serialize)]
struct ErrorListContent {
    errors: Vec<ErrorSummary>,
    older: usize,
}

impl ToolResult for ErrorList {
    fn text(&self, max: usize) -> String {
        report::error_list(&self.errors, self.older, max)
    }

    fn structured_content(&self, _: usize) -> Value {
        let errors = self.errors.iter().map(|error| ErrorSummary::new(error)).collect();
        json(&ErrorListContent { errors, older: self.older })
    }
}

/// A reply about errors, with a notice that a cancelled evaluation has not ended.
#[derive(Debug)]
struct PendingCancellationReply {
    evaluation: u64,
    reply: Reply,
}

impl ToolResult for PendingCancellationReply {
    fn text(&self, max: usize) -> String {
        let notice = report::pending_cancellation(self.evaluation);
        format!("{notice}\n\n{}", self.reply.untruncated_text(max.saturating_sub(notice.len() + 2)))
    }

    fn structured_content(&self, max: usize) -> Value {
        let mut content = self.reply.structured_content(max);
        let own = json(&ErrorContent { unended: Some(self.evaluation), ..ErrorContent::default() });
        if let (Value::Object(content), Value::Object(own)) = (&mut content, own) {
            content.extend(own);
        }
        content
    }

    fn is_error(&self) -> bool {
        self.reply.is_error()
    }
}
