//! The MCP tools. Each family of tools has a file with its definitions and calls.

mod abort_evaluation;
mod arguments;
mod ask;
mod background;
mod call;
mod check_evaluation;
mod checkpoint;
mod debugger;
mod definitions;
mod errors;
mod evaluate;
mod find_references;
mod find_symbols;
mod former_names;
mod limits;
mod load_system;
mod macroexpand;
mod profile;
mod registry;
mod reset;
mod run_tests;
mod symbol;
mod system;
mod tool_set;
mod tracing;

use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use rmcp::model::{CallToolRequestParams, ErrorData, JsonObject, MetaObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;

use super::ToolOptions;
use super::recovery_context::RecoveryContext;
use super::reply::{CallRefusal, Reply, ToolResult};
use crate::os::helper_threads;
use crate::outcome::{Image, Record, of_kind};
use crate::recovery::checkpoint::save::Saver;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::messages::{lost_checkpoint_call, outcome_after_reset};
use crate::recovery::replay::ReplayEnd;
use crate::rpc::inflight::Inflight;
use crate::schema::{schema_of_arguments, schema_of_result};
use crate::session::Operation;
use crate::{JobId, Outcome, Session};
pub(crate) use arguments::split_names;
pub(super) use arguments::{excerpt, quoted_excerpt};
pub(super) use call::Call;
pub(super) use former_names::translate_former_call;
pub(crate) use registry::Registry;
pub(in crate::mcp) use registry::ToolListObserver;
pub(crate) use run_tests::{MAX_SUSPECTS, TEST_TIMEOUT_RANGE};
pub(super) use system::System;
pub(crate) use tool_set::ToolSet;

/// The context of one client's tool calls: its session, pending requests, recovery, checkpoints and options.
#[derive(Debug)]
pub(super) struct ToolContext {
    session: Session,
    inflight: Arc<Inflight>,
    /// The recovery context; `None` without a supervisor that replaces a lost image.
    pub(super) recovery: Option<RecoveryContext>,
    /// The checkpoint store; `None` in a program that keeps no checkpoints.
    checkpoints: Option<Checkpoints>,
    options: ToolOptions,
    /// Questions to the user that wait for a repeated call with the answer.
    questions: Mutex<ask::Questions>,
}

impl ToolContext {
    /// Creates the context of the first client.
    pub(super) fn new(
        session: Session,
        inflight: Arc<Inflight>,
        recovery: Option<RecoveryContext>,
        checkpoints: Option<Checkpoints>,
        options: ToolOptions,
    ) -> Arc<Self> {
        options.registry.publish_tool_names();
        if !options.registry.tools().has(reset::ResetSession::NAME) {
            session.query(&Operation::new("forbid-resets"), |_| ());
        }
        match &recovery {
            Some(recovery) => recovery.report_server_requests(&inflight),
            None => _ = session.query(&Operation::new("no-supervisor"), |_| ()),
        }
        Arc::new(Self { session, inflight, recovery, checkpoints, options, questions: Mutex::default() })
    }

    /// Creates the context of an attached client, which has a connection of its own.
    pub(super) fn for_attached(&self, session: Session, inflight: Arc<Inflight>) -> Arc<Self> {
        let recovery = self.recovery.as_ref().map(|recovery| recovery.for_attached(&session));
        Self::new(session, inflight, recovery, self.checkpoints.clone(), self.options.clone())
    }

    /// Returns the server's instructions for a model.
    pub(super) fn instructions(&self) -> String {
        self.options.registry.tools().instructions(self.options.attachable, self.recovery.is_some())
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.options.registry
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    pub(super) fn inflight(&self) -> &Arc<Inflight> {
        &self.inflight
    }

    /// Reports the replacement of the last image to the client.
    pub(super) fn report_replacement(&self) {
        if let Some(recovery) = &self.recovery {
            recovery.report_replacement(&self.session);
        }
    }

    /// Counts one more or one fewer answer that the supervisor's watchdog must wait for.
    pub(super) fn count_pending_answer(&self, more: bool) {
        if let Some(recovery) = &self.recovery {
            recovery.count_pending_answer(more);
        }
    }

    /// Records that the decoding of a slow line begins or has ended. If the image is lost in between, the line may be
    /// the cause.
    pub(super) fn record_decoding(&self, call: u64, begins: bool) {
        if let Some(recovery) = &self.recovery {
            recovery.record_decoding(call, begins);
        }
    }

    /// Returns true once a call has requested another image.
    pub(super) fn is_being_replaced(&self) -> bool {
        self.recovery.as_ref().is_some_and(RecoveryContext::is_being_replaced)
    }

    /// Returns true once calls of other clients, but no call of this client, have requested another image.
    pub(super) fn is_replaced_for_others(&self) -> bool {
        self.recovery.as_ref().is_some_and(RecoveryContext::is_replaced_for_others)
    }

    /// Returns a saver of checkpoints, or `None` if this program keeps no checkpoints.
    fn saver(&self) -> Option<Saver> {
        let checkpoints = self.checkpoints.clone()?;
        let reports = self.recovery.as_ref().map(|recovery| recovery.saves.clone());
        Some(Saver { session: self.session.clone(), checkpoints, reports })
    }

    /// Returns the maximum number of characters in an answer.
    fn max_answer(&self) -> usize {
        usize::try_from(self.session.limits().max_answer).unwrap_or(usize::MAX)
    }

    /// Returns the tools for `tools/list`.
    pub(super) fn list(&self) -> Vec<Tool> {
        let mut tools = self.options.registry.tools().tools();
        if !self.options.structured {
            tools.iter_mut().for_each(|tool| tool.output_schema = None);
        }
        tools
    }

    /// Returns the error for a call of an unknown tool.
    fn unknown_tool_fault(&self, name: &str) -> Fault {
        Fault::Protocol(ErrorData::invalid_params(
            unknown_tool_message(name, &self.options.registry.tools().tools()),
            None,
        ))
    }
}

/// The reason why a tool has no result.
#[derive(Debug)]
enum Fault {
    /// The request is malformed or names an unknown tool: a protocol error.
    Protocol(ErrorData),
    /// The call is refused, for instance because an argument has a wrong value. The text is a sentence for the model, which
    /// sees results, but often no protocol errors.
    Refusal(String),
}

impl<T: std::error::Error> From<T> for Fault {
    fn from(error: T) -> Self {
        Self::Refusal(error.to_string())
    }
}

/// A function that answers a call, now or later. The arguments of the call have been validated.
type CallHandler = Box<dyn FnOnce(Call) + Send>;

/// Wraps `work`, which answers a call now or later, as a handler.
fn handle_with(work: impl FnOnce(Call) + Send + 'static) -> Result<CallHandler, Fault> {
    Ok(Box::new(work))
}

/// Returns a handler that answers with `reply` at once.
fn reply_with(reply: impl Into<Reply>) -> Result<CallHandler, Fault> {
    let reply = reply.into();
    handle_with(move |call| call.reply(reply))
}

/// Returns a handler that submits an inspection. Cancelling the call cancels the inspection.
fn inspect(submit: impl FnOnce(&Session, Call) -> JobId + Send + 'static) -> Result<CallHandler, Fault> {
    handle_with(move |call| {
        let (session, pending) = (call.session().clone(), call.pending());
        pending.submit(&session, || submit(&session, call));
    })
}

/// Returns a handler that answers with the result of a query to Lisp.
fn query<F: From<Vec<Record>> + ToolResult + 'static>(operation: Operation) -> Result<CallHandler, Fault> {
    inspect(move |session, call| session.query(&operation, move |found| call.answer_inspection(found.map(F::from))))
}

/// Calls `then` with the name of the session's package, or with `None` if the query fails or is cancelled. Returns the query.
fn with_package(session: &Session, then: impl FnOnce(Option<String>) + Send + 'static) -> JobId {
    session.query(&Operation::new("image-name"), move |records| {
        then(records.ok().and_then(|records| Some(of_kind::<Image>(&records).next()?.package.clone())));
    })
}

/// A tool: its definition and its calls.
trait ToolSpec {
    /// The tool's name in calls.
    const NAME: &'static str;
    /// The tool's name for people.
    const TITLE: &'static str;
    /// The description: what the tool does, and when to use it. Text within `[[tool|...]]` is included only if that
    /// tool is listed.
    const DESCRIPTION: &'static str;
    /// The rules for calls of the tool.
    const POLICY: CallPolicy = CallPolicy::NONE;
    /// The arguments of a call. Their doc comments are the descriptions that clients read.
    type Arguments: DeserializeOwned + JsonSchema;
    /// The structured content of a result.
    type Content: JsonSchema;

    /// Returns the hints about the tool's effects.
    fn hints() -> ToolAnnotations;

    /// Validates a call and returns its handler.
    fn call(call: &Call, arguments: Self::Arguments) -> Result<CallHandler, Fault>;
}

/// The rules for calls of one tool.
#[derive(Debug, Clone, Copy)]
struct CallPolicy {
    /// True if a new image may repeat a call that a lost image has not answered.
    repeatable: bool,
    /// True if calls are answered while an image is being restored.
    during_restore: bool,
    /// True if the answer depends on the error state, which a cancelled evaluation may still change.
    reads_error_state: bool,
    /// Returns true for the arguments of a call that changes nothing. An image that will be replaced at another client's
    /// request still answers such a call.
    only_reads: fn(&JsonObject) -> bool,
    /// Returns true for the arguments of a call that may take long before it waits for Lisp: it searches directories, reads
    /// checkpoints, or renders a large output, a backtrace or many errors.
    is_slow: fn(&JsonObject) -> bool,
    /// True if the client may have to repeat a call with the user's answer to a question.
    asks_user: bool,
    /// True if the tool is part of the working loop (`--tools core`).
    core: bool,
    /// True if clients that load tools on demand should load this tool at once.
    always_loaded: bool,
}

impl CallPolicy {
    const NONE: Self = Self {
        repeatable: false,
        during_restore: false,
        reads_error_state: false,
        only_reads: |_| false,
        is_slow: |_| false,
        asks_user: false,
        core: false,
        always_loaded: false,
    };
    /// The policy of a tool that changes nothing.
    const INSPECTION: Self = Self { repeatable: true, only_reads: |_| true, ..Self::NONE };
    /// The policy of an unknown tool, whose calls are answered with an error.
    const UNKNOWN: Self = Self { during_restore: true, ..Self::INSPECTION };
}

/// A row in the table of tools.
struct ToolEntry {
    name: &'static str,
    policy: CallPolicy,
    define: fn() -> Tool,
    call: fn(&Call, &Tool, JsonObject) -> Result<CallHandler, Fault>,
}

const fn tool_entry<T: ToolSpec>() -> ToolEntry {
    ToolEntry {
        name: T::NAME,
        policy: T::POLICY,
        define: define::<T>,
        call: |call, tool, map| T::call(call, arguments::read(tool, map)?),
    }
}

/// Creates a tool's definition.
fn define<T: ToolSpec>() -> Tool {
    // Hints with the default value are left out to keep the list short (MCP 2025-11-25, ToolAnnotations).
    let mut hints = T::hints();
    hints.idempotent_hint = hints.idempotent_hint.filter(|idempotent| *idempotent);
    hints.open_world_hint = hints.open_world_hint.filter(|open| !open);
    let mut tool = Tool::new(T::NAME, T::DESCRIPTION, schema_of_arguments::<T::Arguments>())
        .with_title(T::TITLE)
        .with_annotations(hints);
    tool.output_schema = Some(Arc::new(schema_of_result::<T::Content>()));
    if T::POLICY.always_loaded {
        tool.meta = Some(MetaObject(JsonObject::from_iter([("anthropic/alwaysLoad".to_owned(), true.into())])));
    }
    tool
}

/// All tools in the order of the list: evaluation, loading, tests, lookup, errors, debugger, others.
static TOOLS: [ToolEntry; 20] = [
    tool_entry::<evaluate::EvaluateLisp>(),
    tool_entry::<load_system::LoadSystem>(),
    tool_entry::<run_tests::RunTests>(),
    tool_entry::<definitions::ListDefinitions>(),
    tool_entry::<symbol::DescribeSymbol>(),
    tool_entry::<find_symbols::FindSymbols>(),
    tool_entry::<find_references::FindReferences>(),
    tool_entry::<macroexpand::MacroExpand>(),
    tool_entry::<errors::DescribeLastError>(),
    tool_entry::<errors::GetBacktrace>(),
    tool_entry::<debugger::InvokeRestart>(),
    tool_entry::<debugger::EvalInFrame>(),
    tool_entry::<debugger::ResumeFromFrame>(),
    tool_entry::<abort_evaluation::AbortEvaluation>(),
    tool_entry::<check_evaluation::CheckEvaluation>(),
    tool_entry::<tracing::TraceCalls>(),
    tool_entry::<profile::ProfileCode>(),
    tool_entry::<checkpoint::CheckpointTool>(),
    tool_entry::<reset::ResetSession>(),
    tool_entry::<limits::ConfigureLimits>(),
];

/// The definitions of [`TOOLS`], in the same order.
static TOOL_DEFINITIONS: LazyLock<Vec<Tool>> = LazyLock::new(|| TOOLS.iter().map(|tool| (tool.define)()).collect());

/// Returns the definitions of all tools.
fn all_tool_definitions() -> Vec<Tool> {
    TOOL_DEFINITIONS.clone()
}

/// Finds a tool and its definition by name.
fn find_tool(name: &str) -> Option<(&'static ToolEntry, &'static Tool)> {
    TOOLS.iter().zip(&*TOOL_DEFINITIONS).find(|(tool, _)| tool.name == name)
}

fn policy(name: &str) -> CallPolicy {
    find_tool(name).map_or(CallPolicy::UNKNOWN, |(tool, _)| tool.policy)
}

/// Returns the reply for an outcome, chosen by the kinds of its records.
pub(super) fn reply_of(outcome: Arc<Outcome>) -> Reply {
    match () {
        () if tracing::has_traced_calls(&outcome) => tracing::TraceResult(outcome).into(),
        () if profile::has_profile(&outcome) => profile::ProfileResult(outcome).into(),
        () if run_tests::has_test_results(&outcome) => run_tests::TestRunResult(outcome).into(),
        () => evaluate::EvaluationResult(outcome).into(),
    }
}

/// Similarity, from 0 to 1, above which a known name is suggested for an unknown name.
const MIN_SIMILARITY: f64 = 0.8;
/// Maximum number of characters of an unknown name that are compared.
const MAX_COMPARED: usize = 100;

/// Returns true for a call that may take long before it waits for Lisp.
pub(super) fn is_slow(tool: &str, arguments: &JsonObject) -> bool {
    former_names::successors(tool).into_iter().any(|tool| (policy(tool).is_slow)(arguments))
}

/// Returns true for a call that changes nothing, such as a call of an unknown tool.
pub(super) fn only_reads(tool: &str, arguments: &JsonObject) -> bool {
    former_names::successors(tool).into_iter().all(|tool| (policy(tool).only_reads)(arguments))
}

/// Calls a tool: once the image is restored, or at once if the tool's policy allows.
pub(super) fn call(call: Call, request: CallToolRequestParams) {
    let policy = policy(&request.name);
    match call.context.recovery.clone() {
        // Even a tool that can answer during the restore waits, if it reads the error state and a cancelled evaluation
        // of its client is not recorded in that state yet.
        Some(recovery)
            if recovery.is_restoring()
                && (!policy.during_restore
                    || policy.reads_error_state && recovery.has_unended_cancellation(call.session())) =>
        {
            let progress = recovery.clone();
            call.pending().report_waiting(move || progress.progress());
            let is_slow = request.arguments.as_ref().is_some_and(policy.is_slow);
            let is_repeatable = policy.repeatable || request.arguments.as_ref().is_some_and(policy.only_reads);
            recovery.when_replay_ended(is_slow, move |end| {
                // Another image would handle a whole batch again, of which other calls may have begun.
                let may_begin = call.line().is_none() || !call.context.is_being_replaced();
                match end {
                    // The call was cancelled meanwhile.
                    _ if !call.is_awaited() => {}
                    ReplayEnd::Complete if may_begin => call_now(call, request),
                    ReplayEnd::Abandoned if !is_repeatable => call.reply(outcome_after_reset()),
                    // The next image answers the call.
                    ReplayEnd::Complete | ReplayEnd::Abandoned => _ = call.leave_unanswered(),
                }
            });
        }
        _ => call_now(call, request),
    }
}

fn call_now(call: Call, request: CallToolRequestParams) {
    call.session().audience().address(|| begin(call, request));
}

/// Begins a call: validates it, and answers it now or later.
fn begin(mut call: Call, request: CallToolRequestParams) {
    let CallToolRequestParams { name, arguments, request_state, input_responses, .. } = request;
    let session = call.session().clone();
    if let Some(recovery) = &call.context.recovery {
        if let Some(lost) = recovery.lost_inspection(call.first_job) {
            return call.refuse(Fault::Refusal(lost));
        }
        let evaluates = name != checkpoint::CheckpointTool::NAME;
        let returns = !evaluates && recovery.restore_outcome(call.first_job).is_some();
        if !policy(&name).repeatable && !returns && recovery.began_in_earlier_image(call.first_job) {
            let lost = recovery.lost_outcome(&session, call.first_job, evaluates);
            return call.reply(if evaluates { lost } else { lost_checkpoint_call(lost) });
        }
    }
    let arguments = arguments.unwrap_or_default();
    let handler = match find_tool(&name).filter(|_| call.context.options.registry.tools().has(&name)) {
        None => Err(call.context.unknown_tool_fault(&name)),
        Some((tool, definition)) => {
            call.ask_state = tool.policy.asks_user.then(|| ask::AskState::new(&call.context, &arguments));
            match request_state.zip(call.ask_state) {
                None => (tool.call)(&call, definition, arguments),
                Some((state, ask_state)) => ask::resume(&call, ask_state, &state, input_responses),
            }
        }
    };
    session.handle_call(call.first_job, || match handler {
        Ok(handler) => handler(call),
        Err(fault) => call.refuse(fault),
    });
}

/// Transfers a held evaluation from another client to this client: evaluation `id`, or the only held evaluation.
pub(super) fn adopt_held(call: Call, id: Option<u64>) {
    let adopted = call.session().take_over(id);
    // Rendering a large output on the event loop would delay other clients.
    helper_threads::run(move || call.answer(adopted));
}

/// Returns the message about an unknown tool, with similar names and all names.
fn unknown_tool_message(name: &str, all: &[Tool]) -> String {
    let all: Vec<_> = all.iter().map(|tool| &*tool.name).collect();
    let written: String = name.chars().take(MAX_COMPARED).collect::<String>().to_ascii_lowercase().replace('_', "-");
    let mut near: Vec<_> = all
        .iter()
        .map(|known| (strsim::jaro_winkler(&written, known), *known))
        .filter(|(similarity, _)| *similarity > MIN_SIMILARITY)
        .collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let near: Vec<_> = near.into_iter().take(3).map(|(_, name)| name).collect();
    let near = match &near[..] {
        [] => String::new(),
        [one] => format!(" Did you mean {one}?"),
        [first @ .., last] => format!(" Did you mean {} or {last}?", first.join(", ")),
    };
    format!("There is no tool {}.{near} Tools: {}.", quoted_excerpt(name), all.join(", "))
}

/// Returns the hints of a tool that evaluates arbitrary code.
fn evaluation_hints() -> ToolAnnotations {
    ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true)
}

/// Returns the hints of a tool that changes nothing.
fn inspection_hints() -> ToolAnnotations {
    ToolAnnotations::new().read_only(true).open_world(false)
}
