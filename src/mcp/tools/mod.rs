//! The tools: one small file a family, each with its definitions and its calls.

mod ahead;
mod arguments;
mod ask;
mod debugger;
mod definitions;
mod errors;
mod evaluate;
mod limits;
mod reply;
mod reset;
mod symbol;
mod wait;

use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData, JsonObject, Tool, ToolAnnotations,
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
    let mut tools = vec![evaluate::tool()];
    tools.extend(errors::tools());
    tools.extend(debugger::tools());
    tools.extend([definitions::tool(), symbol::tool(), reset::tool(), limits::tool()]);
    tools
}

/// Tools that may be called again when the image was lost before they answered.
const REPEATABLE: [&str; 7] = [
    errors::DESCRIBE_NAME,
    errors::BACKTRACE_NAME,
    errors::HISTORY_NAME,
    definitions::NAME,
    symbol::NAME,
    reset::NAME,
    limits::NAME,
];

/// Calls a tool.
pub(super) async fn call(
    desk: &Desk,
    request: CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let session = &desk.session;
    let name = &*request.name;
    if let Some(worker) = &desk.worker
        && let Some(Ticket(number)) = context.extensions.get()
    {
        if !REPEATABLE.contains(&name) && worker.has_begun(*number) {
            return Ok(result(&worker.lost(session).into(), desk.structured).into());
        }
        session.number_from(*number);
    }
    let arguments = request.arguments.unwrap_or_default();
    // What waits is boxed: rmcp moves this future around, and an answer at hand need not carry the room of the others.
    let answer = match name {
        evaluate::NAME => {
            let step = match &request.request_state {
                Some(state) => {
                    Box::pin(ask::go_on(session, &desk.pending, state, request.input_responses, context)).await
                }
                None => Box::pin(evaluate::call(desk, arguments, context)).await,
            };
            match step {
                Ok(ask::Step::Ask(question)) => return Ok(question.into()),
                Ok(ask::Step::Answer(reply)) => Ok(reply),
                // What rmcp gets is dropped.
                Ok(ask::Step::Answered) => return Ok(CallToolResult::success(Vec::new()).into()),
                Err(fault) => Err(fault),
            }
        }
        errors::DESCRIBE_NAME => errors::describe(session, arguments),
        errors::BACKTRACE_NAME => errors::backtrace(session, arguments),
        errors::HISTORY_NAME => errors::history(session, arguments),
        debugger::RESTART
        | debugger::LOCALS
        | debugger::EVAL
        | debugger::RETURN
        | debugger::AGAIN
        | debugger::ABORT => Box::pin(debugger::call(session, name, arguments, context)).await,
        definitions::NAME => Box::pin(definitions::call(session, arguments, context)).await,
        symbol::NAME => Box::pin(symbol::call(session, arguments, context)).await,
        reset::NAME => Box::pin(reset::call(desk, arguments, context)).await,
        limits::NAME => limits::call(session, arguments),
        unknown => return Err(ErrorData::invalid_params(format!("unknown tool: {unknown}"), None)),
    };
    let reply = match answer {
        Ok(reply) => reply,
        Err(Fault::Value(sentence)) => Reply::Refused(sentence),
        Err(Fault::Protocol(error)) => return Err(error),
    };
    Ok(result(&reply, desk.structured).into())
}

fn result(reply: &Reply, structured: bool) -> CallToolResult {
    // One block, always: clients are known to show only the first one of an error.
    let content = vec![ContentBlock::text(reply.text())];
    let mut result = if reply.is_error() { CallToolResult::error(content) } else { CallToolResult::success(content) };
    result.structured_content = structured.then(|| structured::content(reply));
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
    schema.insert("additionalProperties".to_owned(), json!(false));
    Tool::new(name, description, schema).with_title(title).with_annotations(hints)
}

/// Hints of a tool that only looks.
fn inspection() -> ToolAnnotations {
    ToolAnnotations::new().read_only(true).idempotent(true).open_world(false)
}
