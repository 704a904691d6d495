//! The tools: one small file a family, each with its definitions and its calls.

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
mod former;
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

use super::Offer;
use super::recovery_context::RecoveryContext;
use super::reply::{Finding, Refused, Reply};
use crate::outcome::{Image, Record, of_kind};
use crate::recovery::checkpoint::save::Saver;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::messages::replaced;
use crate::recovery::restore::Restoration;
use crate::rpc::inflight::Inflight;
use crate::rpc::route::call_of_job;
use crate::schema::{schema_of_arguments, schema_of_result};
use crate::session::Operation;
use crate::{Outcome, Session};
pub(crate) use arguments::parted;
pub(super) use call::Call;
pub(super) use former::translated;
pub(in crate::mcp) use registry::Listener;
pub(crate) use registry::Registry;
pub(crate) use run_tests::{MAX_SUSPECTS, TEST_TIMEOUT_RANGE};
pub(super) use system::System;
pub(crate) use tool_set::ToolSet;

/// What the tools work with.
#[derive(Debug)]
pub(super) struct ToolContext {
    session: Session,
    inflight: Arc<Inflight>,
    /// Present where a supervisor replaces the image when it is lost.
    pub(super) recovery: Option<RecoveryContext>,
    /// Absent where none are kept.
    checkpoints: Option<Checkpoints>,
    offer: Offer,
    /// What users are asked between two calls.
    questions: Mutex<ask::Questions>,
}

impl ToolContext {
    /// What serves one client.
    pub(super) fn new(
        session: Session,
        inflight: Arc<Inflight>,
        recovery: Option<RecoveryContext>,
        checkpoints: Option<Checkpoints>,
        offer: Offer,
    ) -> Arc<Self> {
        offer.registry.name_listed_tools();
        if !offer.registry.tools().has(reset::ResetSession::NAME) {
            session.query(&Operation::new("forbid-resets"), |_| ());
        }
        Arc::new(Self { session, inflight, recovery, checkpoints, offer, questions: Mutex::default() })
    }

    /// The same for another client, by a connection of its own.
    pub(super) fn beside(&self, session: Session, inflight: Arc<Inflight>) -> Arc<Self> {
        let recovery = self.recovery.as_ref().map(|recovery| recovery.beside(&session));
        Self::new(session, inflight, recovery, self.checkpoints.clone(), self.offer.clone())
    }

    /// What the server tells a model of itself.
    pub(super) fn instructions(&self) -> String {
        self.offer.registry.tools().instructions(self.offer.joinable)
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.offer.registry
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    pub(super) fn inflight(&self) -> &Arc<Inflight> {
        &self.inflight
    }

    /// Has the client be told what became of the image before.
    pub(super) fn tell_of_replacement(&self) {
        if let Some(recovery) = &self.recovery {
            recovery.tell_of_replacement(&self.session);
        }
    }

    /// Has the thread that reads look what is due.
    pub(super) fn look_again(&self) {
        if let Some(recovery) = &self.recovery {
            recovery.look_again();
        }
    }

    /// What saves checkpoints, where there are any.
    fn saver(&self) -> Option<Saver> {
        let checkpoints = self.checkpoints.clone()?;
        let reports = self.recovery.as_ref().map(|recovery| recovery.saves.clone());
        Some(Saver { session: self.session.clone(), checkpoints, reports })
    }

    /// Characters that an answer may have.
    fn max_answer(&self) -> usize {
        usize::try_from(self.session.limits().max_answer).unwrap_or(usize::MAX)
    }

    /// What `tools/list` shows.
    pub(super) fn list(&self) -> Vec<Tool> {
        let mut tools = self.offer.registry.tools().tools();
        if !self.offer.structured {
            tools.iter_mut().for_each(|tool| tool.output_schema = None);
        }
        tools
    }

    /// Why a call of this tool is none.
    fn no_such_tool(&self, name: &str) -> Fault {
        Fault::Protocol(ErrorData::invalid_params(no_such_tool(name, &self.offer.registry.tools().tools()), None))
    }
}

/// Why a tool has nothing to say.
#[derive(Debug)]
enum Fault {
    /// The request is not one for this tool: the client's fault.
    Protocol(ErrorData),
    /// A wrong value, in a sentence for whoever chose it: the model sees results, but often no protocol errors.
    Value(String),
}

impl<T: std::error::Error> From<T> for Fault {
    fn from(error: T) -> Self {
        Self::Value(error.to_string())
    }
}

/// What is done with a call once its arguments are found right: it is answered then, or later.
type Step = Box<dyn FnOnce(Call) + Send>;

/// What is done with a call, which answers it some time.
fn later(work: impl FnOnce(Call) + Send + 'static) -> Result<Step, Fault> {
    Ok(Box::new(work))
}

/// Answers a call at once.
fn now(reply: impl Into<Reply>) -> Result<Step, Fault> {
    let reply = reply.into();
    later(move |call| call.reply(reply))
}

/// Answers a call with what this query finds.
fn query<F: From<Vec<Record>> + Finding + 'static>(operation: Operation) -> Result<Step, Fault> {
    later(move |call| {
        let session = call.session().clone();
        session.query(&operation, move |found| call.answer(found.map(F::from)));
    })
}

/// Calls `then` with the name of the package that the session is in, should that be to be had.
fn with_package(session: &Session, then: impl FnOnce(Option<String>) + Send + 'static) {
    session.query(&Operation::new("image-name"), move |records| {
        then(records.ok().and_then(|records| Some(of_kind::<Image>(&records).next()?.package.clone())));
    });
}

/// A tool.
trait Offered {
    /// What it is called.
    const NAME: &'static str;
    /// What people read in its place.
    const TITLE: &'static str;
    /// What it does, and when to use it. What is within `[[tool|...]]` is said where that tool is listed.
    const DESCRIPTION: &'static str;
    /// What is promised of its calls, beside what they are asked.
    const TRAITS: Traits = Traits::NONE;
    /// The arguments of a call. Their documentation is their description.
    type Arguments: DeserializeOwned + JsonSchema;
    /// The structured content of a result.
    type Content: JsonSchema;

    /// What clients may expect of a call.
    fn hints() -> ToolAnnotations;

    /// Begins a call.
    fn call(call: &Call, arguments: Self::Arguments) -> Result<Step, Fault>;
}

/// How calls of a tool are treated.
#[derive(Debug, Clone, Copy)]
struct Traits {
    /// It may be called again when the image was lost before it answered.
    repeatable: bool,
    /// It answers while an image is being restored.
    meanwhile: bool,
    /// It tells of the error state, which a cancelled evaluation may be yet to become part of.
    about_errors: bool,
    /// It searches directories before it waits for Lisp, which may take seconds.
    searches: bool,
    /// A call may have to be repeated with what a person answered.
    asks: bool,
    /// It is part of the working loop: `--tools core`.
    core: bool,
    /// Clients that show tools only on demand show it at once.
    shown_at_once: bool,
}

impl Traits {
    const NONE: Self = Self {
        repeatable: false,
        meanwhile: false,
        about_errors: false,
        searches: false,
        asks: false,
        core: false,
        shown_at_once: false,
    };
    /// Those of a tool that only looks.
    const LOOKS: Self = Self { repeatable: true, ..Self::NONE };
}

/// A tool in the table of all.
struct Entry {
    name: &'static str,
    traits: Traits,
    define: fn() -> Tool,
    call: fn(&Call, &Tool, JsonObject) -> Result<Step, Fault>,
}

const fn entry<T: Offered>() -> Entry {
    Entry {
        name: T::NAME,
        traits: T::TRAITS,
        define: define::<T>,
        call: |call, tool, map| T::call(call, arguments::read(tool, map)?),
    }
}

/// Makes a tool's definition.
fn define<T: Offered>() -> Tool {
    // What is so by default (MCP 2025-11-25, ToolAnnotations) takes room in every list.
    let mut hints = T::hints();
    hints.idempotent_hint = hints.idempotent_hint.filter(|idempotent| *idempotent);
    hints.open_world_hint = hints.open_world_hint.filter(|open| !open);
    let mut tool = Tool::new(T::NAME, T::DESCRIPTION, schema_of_arguments::<T::Arguments>())
        .with_title(T::TITLE)
        .with_annotations(hints);
    tool.output_schema = Some(Arc::new(schema_of_result::<T::Content>()));
    if T::TRAITS.shown_at_once {
        tool.meta = Some(MetaObject(JsonObject::from_iter([("anthropic/alwaysLoad".to_owned(), true.into())])));
    }
    tool
}

/// The tools, in the order of the list: evaluate, load, test, look up, errors, debugger, all else.
static TOOLS: [Entry; 20] = [
    entry::<evaluate::EvaluateLisp>(),
    entry::<load_system::LoadSystem>(),
    entry::<run_tests::RunTests>(),
    entry::<definitions::ListDefinitions>(),
    entry::<symbol::DescribeSymbol>(),
    entry::<find_symbols::FindSymbols>(),
    entry::<find_references::FindReferences>(),
    entry::<macroexpand::MacroExpand>(),
    entry::<errors::DescribeLastError>(),
    entry::<errors::GetBacktrace>(),
    entry::<debugger::InvokeRestart>(),
    entry::<debugger::EvalInFrame>(),
    entry::<debugger::ResumeFromFrame>(),
    entry::<abort_evaluation::AbortEvaluation>(),
    entry::<check_evaluation::CheckEvaluation>(),
    entry::<tracing::TraceCalls>(),
    entry::<profile::ProfileCode>(),
    entry::<checkpoint::Checkpoint>(),
    entry::<reset::ResetSession>(),
    entry::<limits::ConfigureLimits>(),
];

/// Their definitions, in the same order.
static DEFINITIONS: LazyLock<Vec<Tool>> = LazyLock::new(|| TOOLS.iter().map(|tool| (tool.define)()).collect());

/// The definition of each tool.
fn all() -> Vec<Tool> {
    DEFINITIONS.clone()
}

/// Finds a tool and its definition.
fn find(name: &str) -> Option<(&'static Entry, &'static Tool)> {
    TOOLS.iter().zip(&*DEFINITIONS).find(|(tool, _)| tool.name == name)
}

fn traits(name: &str) -> Traits {
    find(name).map_or(Traits::NONE, |(tool, _)| tool.traits)
}

/// What an outcome is told as: by what it has in it.
pub(super) fn reply_of(outcome: Arc<Outcome>) -> Reply {
    match () {
        () if tracing::is_traced(&outcome) => tracing::Traced(outcome).into(),
        () if profile::is_profiled(&outcome) => profile::Profiled(outcome).into(),
        () if run_tests::is_tested(&outcome) => run_tests::Tested(outcome).into(),
        () => evaluate::Evaluated(outcome).into(),
    }
}

/// How similar a name is, from 0 to 1, that may be what was meant.
const NEAR: f64 = 0.8;
/// Characters of a name that are compared.
const LONG: usize = 100;

/// Returns true for a tool that searches directories before it waits for Lisp, which may take seconds.
pub(super) fn searches_directories(tool: &str) -> bool {
    former::successors(tool).into_iter().any(|tool| traits(tool).searches)
}

/// Calls a tool, as soon as the image is as it was.
pub(super) fn call(call: Call, request: CallToolRequestParams) {
    let traits = traits(&request.name);
    match call.context.recovery.clone() {
        // One about errors does not answer when it is yet to be told what became of an evaluation that was cancelled.
        Some(recovery)
            if recovery.is_restoring()
                && (!traits.meanwhile || traits.about_errors && recovery.has_cancelled(call.session())) =>
        {
            let progress = recovery.clone();
            call.waiting().report_waiting(move || progress.progress());
            recovery.when_restored(move |restoration| match restoration {
                // Its client wants no answer any more.
                _ if !call.is_awaited() => {}
                Restoration::Over => call_now(call, request),
                // Another image answers.
                Restoration::GivenUp if traits.repeatable => call.leave(),
                Restoration::GivenUp => call.reply(replaced()),
            });
        }
        _ => call_now(call, request),
    }
}

fn call_now(mut call: Call, request: CallToolRequestParams) {
    let CallToolRequestParams { name, arguments, request_state, input_responses, .. } = request;
    let session = call.session().clone();
    if let Some(recovery) = &call.context.recovery {
        if let Some(lost) = recovery.lost_question(call.number) {
            return call.refuse(Fault::Value(lost));
        }
        let returns = name == checkpoint::Checkpoint::NAME && recovery.returned_for(call_of_job(call.number)).is_some();
        if !traits(&name).repeatable && !returns && recovery.has_begun(call.number) {
            let lost = recovery.lost_outcome(&session);
            return call.reply(lost);
        }
        session.number_from(call.number);
    }
    let arguments = arguments.unwrap_or_default();
    let step = match find(&name).filter(|_| call.context.offer.registry.tools().has(&name)) {
        None => Err(call.context.no_such_tool(&name)),
        Some((tool, definition)) => {
            if tool.traits.asks {
                call.asked = Some(ask::Asked::new(&call.context, &arguments));
            }
            match request_state.filter(|_| tool.traits.asks) {
                None => (tool.call)(&call, definition, arguments),
                Some(state) => ask::go_on(&call, &state, input_responses),
            }
        }
    };
    match step {
        Ok(step) => step(call),
        Err(fault) => call.refuse(fault),
    }
}

/// Takes over what another client holds for debugging: evaluation `id`, or the one that there is.
pub(super) fn take_over(call: Call, id: Option<u64>) {
    let taken = call.session().take_over(id);
    call.answer(taken);
}

/// What to say of a tool that there is not: near names, and all there are.
fn no_such_tool(name: &str, all: &[Tool]) -> String {
    let all: Vec<_> = all.iter().map(|tool| &*tool.name).collect();
    let written: String = name.chars().take(LONG).collect::<String>().to_ascii_lowercase().replace('_', "-");
    let mut near: Vec<_> = all
        .iter()
        .map(|known| (strsim::jaro_winkler(&written, known), *known))
        .filter(|(similarity, _)| *similarity > NEAR)
        .collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let near: Vec<_> = near.into_iter().take(3).map(|(_, name)| name).collect();
    let near = if near.is_empty() { String::new() } else { format!(" Did you mean {}?", near.join(", ")) };
    format!("There is no tool {}.{near} There are: {}.", arguments::shown(name), all.join(", "))
}

/// Hints of a tool that evaluates whatever it is given.
fn evaluation_hints() -> ToolAnnotations {
    ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true)
}

/// Hints of a tool that only looks.
fn inspection() -> ToolAnnotations {
    ToolAnnotations::new().read_only(true).open_world(false)
}
