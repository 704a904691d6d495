//! The tools: one small file a family, each with its definitions and its calls.

mod ahead;
mod arguments;
mod ask;
mod debugger;
mod definitions;
mod errors;
mod evaluate;
mod evaluation;
mod limits;
mod reply;
mod reset;
mod symbol;
mod wait;

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData, InputRequiredResult, JsonObject,
    MetaObject, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use serde_json::{Value, json};

use super::link::Link;
use super::structured;
use super::wire::Ticket;
use super::worker::Worker;
use crate::Session;
use arguments::Arguments;
pub(super) use reply::Reply;

/// What the tools work with.
#[derive(Debug)]
pub(super) struct Desk {
    session: Session,
    link: Arc<Link>,
    /// Present where a supervisor replaces the image when it is lost.
    worker: Option<Worker>,
    /// Results have structured content, too.
    structured: bool,
    /// A failed evaluation that a person is asked about between two calls.
    pending: Mutex<Option<ask::Pending>>,
}

impl Desk {
    /// `structured`: results have structured content, too.
    pub(super) fn new(session: Session, link: Arc<Link>, structured: bool) -> Self {
        Self { session, link, worker: None, structured, pending: Mutex::default() }
    }

    /// The same in a worker process.
    pub(super) fn of_worker(self, worker: Worker) -> Self {
        Self { worker: Some(worker), ..self }
    }

    /// Characters that an answer may have.
    fn max_answer(&self) -> usize {
        usize::try_from(self.session.limits().max_answer).unwrap_or(usize::MAX)
    }

    /// What `tools/list` shows.
    pub(super) fn tools(&self) -> Vec<Tool> {
        let mut tools = all();
        if self.structured {
            for tool in &mut tools {
                tool.output_schema = structured::schema(&tool.name).map(Arc::new);
            }
        }
        tools
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

/// The tools, in this order.
fn all() -> Vec<Tool> {
    let mut evaluate = evaluate::tool();
    // Clients that show tools only on demand show this one at once.
    evaluate.meta = Some(MetaObject(JsonObject::from_iter([("anthropic/alwaysLoad".to_owned(), json!(true))])));
    let mut tools = vec![evaluate];
    tools.extend(errors::tools());
    tools.extend(debugger::tools());
    tools.extend([evaluation::tool(), definitions::tool(), symbol::tool(), reset::tool(), limits::tool()]);
    tools
}

/// Tools that may be called again when the image was lost before they answered.
const REPEATABLE: [&str; 8] = [
    errors::DESCRIBE_NAME,
    errors::BACKTRACE_NAME,
    errors::HISTORY_NAME,
    evaluation::NAME,
    definitions::NAME,
    symbol::NAME,
    reset::NAME,
    limits::NAME,
];

/// What a call comes to.
enum Step {
    Answer(Reply),
    /// The answer has left.
    Answered,
    /// The client asks the person behind it and calls again.
    Ask(Box<InputRequiredResult>),
}

impl From<Reply> for Step {
    fn from(reply: Reply) -> Self {
        Self::Answer(reply)
    }
}

pub(super) type Response = Result<CallToolResponse, ErrorData>;

/// Calls a tool. The future is small: rmcp moves the one that holds it around.
pub(super) fn call<'a>(
    desk: &'a Desk,
    request: CallToolRequestParams,
    context: &'a RequestContext<RoleServer>,
) -> Pin<Box<dyn Future<Output = Response> + Send + 'a>> {
    let session = &desk.session;
    let CallToolRequestParams { name, arguments, request_state, input_responses, .. } = request;
    if let Some(worker) = &desk.worker
        && let Some(Ticket(number)) = context.extensions.get()
    {
        if !REPEATABLE.contains(&&*name) && worker.has_begun(*number) {
            return now(desk, Ok(worker.lost(session).into()));
        }
        session.number_from(*number);
    }
    let arguments = arguments.unwrap_or_default();
    match &*name {
        evaluate::NAME => match request_state {
            None => Box::pin(async { respond(desk, evaluate::call(desk, arguments, context).await) }),
            Some(state) => Box::pin(async move {
                respond(desk, ask::go_on(session, &desk.pending, &state, input_responses, context).await)
            }),
        },
        errors::DESCRIBE_NAME => now(desk, errors::describe(session, arguments)),
        errors::BACKTRACE_NAME => now(desk, errors::backtrace(session, arguments)),
        errors::HISTORY_NAME => now(desk, errors::history(session, arguments)),
        debugger::RESTART
        | debugger::LOCALS
        | debugger::EVAL
        | debugger::RETURN
        | debugger::AGAIN
        | debugger::ABORT => {
            Box::pin(async move { respond(desk, debugger::call(session, &name, arguments, context).await) })
        }
        evaluation::NAME => Box::pin(async { respond(desk, evaluation::call(session, arguments, context).await) }),
        definitions::NAME => Box::pin(async { respond(desk, definitions::call(session, arguments, context).await) }),
        symbol::NAME => Box::pin(async { respond(desk, symbol::call(session, arguments, context).await) }),
        reset::NAME => Box::pin(async { respond(desk, reset::call(desk, arguments, context).await) }),
        limits::NAME => now(desk, limits::call(session, arguments)),
        unknown => {
            let names: Vec<_> = all().into_iter().map(|tool| tool.name).collect();
            let reason = format!("There is no tool {}. There are: {}.", arguments::shown(unknown), names.join(", "));
            Box::pin(ready(Err(ErrorData::invalid_params(reason, None))))
        }
    }
}

/// What need not be waited for.
fn now<'a>(desk: &Desk, answer: Answer) -> Pin<Box<dyn Future<Output = Response> + Send + 'a>> {
    Box::pin(ready(respond(desk, answer)))
}

/// What rmcp gets.
fn respond(desk: &Desk, step: Result<impl Into<Step>, Fault>) -> Response {
    let reply = match step.map(Into::into) {
        Ok(Step::Answer(reply)) => reply,
        // It drops this.
        Ok(Step::Answered) => return Ok(CallToolResult::success(Vec::new()).into()),
        Ok(Step::Ask(question)) => return Ok((*question).into()),
        Err(Fault::Value(sentence)) => Reply::Refused(sentence),
        Err(Fault::Protocol(error)) => return Err(error),
    };
    Ok(result(reply, desk.structured, desk.max_answer()).into())
}

fn result(mut reply: Reply, structured: bool, max: usize) -> CallToolResult {
    // One block, always: clients are known to show only the first one of an error.
    let content = vec![ContentBlock::text(reply.text(max))];
    let mut result = if reply.is_error() { CallToolResult::error(content) } else { CallToolResult::success(content) };
    result.structured_content = structured.then(|| structured::content(&reply, max));
    result
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
    Tool::new(name, description, schema).with_title(title).with_annotations(hints)
}

/// Hints of a tool that only looks.
fn inspection() -> ToolAnnotations {
    ToolAnnotations::new().read_only(true).idempotent(true).open_world(false)
}
