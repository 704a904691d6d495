//! The tools: one small file a family, each with its definitions and its calls.

mod arguments;
mod ask;
mod background;
mod call;
mod checkpoint;
mod debugger;
mod definitions;
mod errors;
mod evaluate;
mod evaluation;
mod find_references;
mod find_symbols;
mod limits;
mod load;
mod macroexpand;
mod profile;
mod reset;
mod run_tests;
mod schema;
mod symbol;
mod system;
mod tool_set;
mod tracing;

use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::model::{CallToolRequestParams, ErrorData, JsonObject, MetaObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::Offer;
use super::recovery_context::RecoveryContext;
use super::reply::Reply;
use super::structured;
use crate::Session;
use crate::outcome::{Image, Record, of_kind};
use crate::recovery::checkpoint::save::Saver;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::recovery::messages::replaced;
use crate::recovery::restore::Restoration;
use crate::rpc::inflight::Inflight;
use crate::rpc::route::call_of_job;
use crate::session::Operation;
use arguments::Arguments;
pub(crate) use arguments::parted;
pub(super) use call::Call;
pub(super) use checkpoint::CheckpointReply;
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
        offer.tools.list();
        if !offer.tools.has(reset::NAME) {
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
        self.offer.tools.instructions(self.offer.joinable)
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
        let mut tools = self.offer.tools.tools();
        if self.offer.structured {
            for tool in &mut tools {
                tool.output_schema = structured::schema(&tool.name).map(Arc::new);
            }
        }
        tools
    }

    /// Why a call of this tool is none.
    fn no_such_tool(&self, name: &str) -> Fault {
        Fault::Protocol(ErrorData::invalid_params(no_such_tool(name, &self.offer.tools.tools()), None))
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

type Answer = Result<Reply, Fault>;

/// What is done with a call once its arguments are found right: it is answered then, or later.
type Step = Box<dyn FnOnce(Call) + Send>;

/// What is done with a call, which answers it some time.
fn later(work: impl FnOnce(Call) + Send + 'static) -> Result<Step, Fault> {
    Ok(Box::new(work))
}

/// Answers a call at once.
fn now(reply: Reply) -> Result<Step, Fault> {
    later(move |call| call.reply(reply))
}

/// Answers a call with what this query finds.
fn query<T: From<Vec<Record>> + 'static>(operation: Operation, reply: fn(T) -> Reply) -> Result<Step, Fault> {
    later(move |call| {
        let session = call.session().clone();
        session.query(&operation, move |found| call.answer(found.map(|records| reply(records.into()))));
    })
}

/// Calls `then` with the name of the package that the session is in, should that be to be had.
fn with_package(session: &Session, then: impl FnOnce(Option<String>) + Send + 'static) {
    session.query(&Operation::new("image-name"), move |records| {
        then(records.ok().and_then(|records| Some(of_kind::<Image>(&records).next()?.package.clone())));
    });
}

/// The tools, in this order.
fn all() -> Vec<Tool> {
    let mut evaluate = evaluate::tool();
    // Clients that show tools only on demand show this one at once.
    evaluate.meta = Some(MetaObject(JsonObject::from_iter([("anthropic/alwaysLoad".to_owned(), json!(true))])));
    let mut tools = vec![evaluate, load::tool()];
    tools.extend(errors::tools());
    tools.extend(debugger::tools());
    tools.extend([run_tests::tool(), evaluation::tool(), definitions::tool(), symbol::tool()]);
    tools.extend([find_symbols::tool(), find_references::tool(), macroexpand::tool()]);
    tools.extend([tracing::tool(), profile::tool()]);
    tools.extend([checkpoint::tool(), reset::tool(), limits::tool()]);
    tools
}

/// How similar a name is, from 0 to 1, that may be what was meant.
const NEAR: f64 = 0.8;
/// Characters of a name that are compared.
const LONG: usize = 100;

/// Tools that may be called again when the image was lost before they answered.
const REPEATABLE: [&str; 11] = [
    errors::DESCRIBE_NAME,
    errors::BACKTRACE_NAME,
    errors::HISTORY_NAME,
    evaluation::NAME,
    definitions::NAME,
    symbol::NAME,
    find_symbols::NAME,
    find_references::NAME,
    macroexpand::NAME,
    reset::NAME,
    limits::NAME,
];

/// Returns true for a tool that searches directories before it waits for Lisp, which may take seconds.
pub(super) fn searches_directories(tool: &str) -> bool {
    matches!(tool, load::NAME | run_tests::NAME)
}

/// Tools that answer while an image is being restored; those about errors not when it is yet to be told what became of an
/// evaluation that was cancelled.
const MEANWHILE: [&str; 5] =
    [errors::DESCRIBE_NAME, errors::BACKTRACE_NAME, errors::HISTORY_NAME, reset::NAME, limits::NAME];

fn is_about_errors(tool: &str) -> bool {
    matches!(tool, errors::DESCRIBE_NAME | errors::BACKTRACE_NAME | errors::HISTORY_NAME)
}

/// Calls a tool, as soon as the image is as it was.
pub(super) fn call(call: Call, request: CallToolRequestParams) {
    match call.context.recovery.clone() {
        Some(recovery)
            if recovery.is_restoring()
                && (!MEANWHILE.contains(&&*request.name)
                    || is_about_errors(&request.name) && recovery.has_cancelled(call.session())) =>
        {
            let progress = recovery.clone();
            call.waiting().report_waiting(move || progress.progress());
            recovery.when_restored(move |restoration| match restoration {
                // Its client wants no answer any more.
                _ if !call.is_awaited() => {}
                Restoration::Over => call_now(call, request),
                // Another image answers.
                Restoration::GivenUp if REPEATABLE.contains(&&*request.name) => call.leave(),
                Restoration::GivenUp => call.reply(replaced()),
            });
        }
        _ => call_now(call, request),
    }
}

fn call_now(call: Call, request: CallToolRequestParams) {
    let CallToolRequestParams { name, arguments, request_state, input_responses, .. } = request;
    let session = call.session().clone();
    if let Some(recovery) = &call.context.recovery {
        if let Some(lost) = recovery.lost_question(call.number) {
            return call.refuse(Fault::Value(lost));
        }
        let returns = name == checkpoint::NAME && recovery.returned_for(call_of_job(call.number)).is_some();
        if !REPEATABLE.contains(&&*name) && !returns && recovery.has_begun(call.number) {
            let lost = recovery.lost_outcome(&session);
            return call.reply(lost);
        }
        session.number_from(call.number);
    }
    let arguments = arguments.unwrap_or_default();
    let step = match &*name {
        hidden if !call.context.offer.tools.has(hidden) => Err(call.context.no_such_tool(hidden)),
        evaluate::NAME => match request_state {
            None => evaluate::call(&call, arguments),
            Some(state) => ask::go_on(&call, &arguments, &state, input_responses),
        },
        load::NAME => match request_state {
            None => load::call(&call, arguments),
            Some(state) => ask::go_on(&call, &arguments, &state, input_responses),
        },
        errors::DESCRIBE_NAME | errors::BACKTRACE_NAME | errors::HISTORY_NAME => {
            let name = name.into_owned();
            later(move |call| session.when_settled(move |unended| errors::answer(call, &name, arguments, unended)))
        }
        debugger::RESTART
        | debugger::LOCALS
        | debugger::EVAL
        | debugger::RETURN
        | debugger::AGAIN
        | debugger::ABORT => debugger::call(&name, arguments),
        evaluation::NAME => evaluation::call(&session, arguments),
        definitions::NAME => definitions::call(arguments),
        run_tests::NAME => run_tests::call(arguments),
        symbol::NAME => symbol::call(arguments),
        find_symbols::NAME => find_symbols::call(arguments),
        find_references::NAME => find_references::call(arguments),
        macroexpand::NAME => macroexpand::call(arguments),
        tracing::NAME => tracing::call(&call, arguments),
        profile::NAME => profile::call(arguments),
        checkpoint::NAME => checkpoint::call(&call, arguments),
        reset::NAME => reset::call(arguments),
        limits::NAME => limits::call(&session, arguments).and_then(now),
        unknown => Err(call.context.no_such_tool(unknown)),
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

/// A tool's definition. `properties` is a JSON object of schemas, one an argument.
fn define(
    name: &'static str,
    title: &str,
    description: &'static str,
    properties: Value,
    required: &[&str],
    hints: ToolAnnotations,
) -> Tool {
    let mut schema = JsonObject::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), properties);
    if !required.is_empty() {
        schema.insert("required".to_owned(), json!(required));
    }
    // What is so by default (MCP 2025-11-25, ToolAnnotations) takes room in every list.
    let mut hints = hints;
    hints.idempotent_hint = hints.idempotent_hint.filter(|idempotent| *idempotent);
    hints.open_world_hint = hints.open_world_hint.filter(|open| !open);
    Tool::new(name, description, schema).with_title(title).with_annotations(hints)
}

/// Hints of a tool that evaluates whatever it is given.
fn evaluation_hints() -> ToolAnnotations {
    ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true)
}

/// Hints of a tool that only looks.
fn inspection() -> ToolAnnotations {
    ToolAnnotations::new().read_only(true).open_world(false)
}
