//! A conversation with one client: how it is opened, and what its messages ask for.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rmcp::model::{
    CallToolRequestParams, ClientCapabilities, DiscoverResult, ErrorCode, ErrorData, Implementation,
    InitializeRequestParams, JsonObject, ListToolsResult, ProtocolVersion, RequestId, RequestMetaObject,
    ServerCapabilities, ServerConfig, ServerResult, ToolsCapability,
};
use serde_json::{Value, json};

use super::incoming::{Fault, Incoming, Message, decode};
use super::peer::{Peer, fitted};
use super::tools::{self, Call, Listener, ToolContext};
use crate::outcome::{Package, of_kind};
use crate::recovery::event::{MAX_HANDSHAKE_MESSAGE, SessionEvent};
use crate::rpc::attach;
use crate::rpc::framing::{Line, too_long};
use crate::rpc::inflight::{Batch, Inflight, Responder};
use crate::rpc::route::job_number;
use crate::session::Operation;

/// The revisions that are tested. The last one has no handshake.
const REVISIONS: &[ProtocolVersion] = &[
    ProtocolVersion::V_2024_11_05,
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// Their names.
pub(crate) fn revisions() -> Vec<String> {
    REVISIONS.iter().map(ToString::to_string).collect()
}

/// The last revision that has a handshake.
const LAST_WITH_HANDSHAKE: ProtocolVersion = ProtocolVersion::V_2025_11_25;

/// The session as one client's MCP server.
#[derive(Debug)]
pub(super) struct Conversation {
    tools: Arc<ToolContext>,
    /// The answer to `tools/list`, and the version of the registry that it was made for: making it takes time.
    listed: Mutex<(u64, ListToolsResult)>,
    opened: Mutex<Option<Opened>>,
}

/// How the conversation was opened.
#[derive(Debug, Clone)]
enum Opened {
    /// By a handshake.
    Handshake { version: ProtocolVersion, capabilities: ClientCapabilities },
    /// By a request that says all of itself, as all after it do.
    Request,
}

/// Where a message stands: its line, its place in that, how long the line is, and its batch.
#[derive(Clone, Copy)]
struct Place<'a> {
    line: u64,
    part: usize,
    bytes: usize,
    batch: Option<&'a Arc<Batch>>,
}

impl Conversation {
    /// Answers go to the context's `inflight`.
    pub(super) fn new(tools: Arc<ToolContext>) -> Arc<Self> {
        let version = tools.registry().version();
        let listed = ListToolsResult::with_all_items(tools.list());
        Self::with_list(tools, (version, listed))
    }

    /// With another client, by a connection of its own.
    pub(super) fn beside(&self, tools: Arc<ToolContext>) -> Arc<Self> {
        let listed = self.listed.lock().clone();
        Self::with_list(tools, listed)
    }

    fn with_list(tools: Arc<ToolContext>, listed: (u64, ListToolsResult)) -> Arc<Self> {
        let registry = tools.registry().clone();
        let conversation = Arc::new(Self { tools, listed: Mutex::new(listed), opened: Mutex::default() });
        let told: Weak<Self> = Arc::downgrade(&conversation);
        registry.tell(told);
        conversation
    }

    /// Returns the answer to `tools/list`.
    fn listed(&self) -> ListToolsResult {
        let version = self.tools.registry().version();
        let mut listed = self.listed.lock();
        if listed.0 != version {
            *listed = (version, ListToolsResult::with_all_items(self.tools.list()));
        }
        listed.1.clone()
    }

    pub(super) fn tools(&self) -> &Arc<ToolContext> {
        &self.tools
    }

    /// What waits for an answer.
    pub(super) fn inflight(&self) -> &Arc<Inflight> {
        self.tools.inflight()
    }

    /// Goes on where the lines of a handshake left it that was answered in another image, of which the client is told.
    pub(super) fn go_on(&self, handshake: &[String]) {
        for line in handshake {
            if let Incoming::One(Ok(Message::Request { params, .. })) = decode(line.as_bytes()) {
                // The client has the answer.
                let _ = self.initialize(params);
            }
        }
        // Not before it is known whether he listens.
        self.tools.tell_of_replacement();
    }

    /// The client is gone: what it has asked for is cancelled, and its connection ends.
    pub(super) fn end(&self) {
        self.inflight().cancel_all();
        self.tools.session().disconnect();
    }

    /// Takes a line of the client's, which is the one of this number.
    pub(super) fn line(&self, line: Line<'_>, number: u64) {
        let text = match line {
            Line::Text(text) => text,
            Line::TooLong(id) => {
                return self.inflight().refuse(id, ErrorData::invalid_request(too_long(), None), number, None);
            }
        };
        self.decoded(decode(text), text.len(), number);
    }

    /// Takes the content of a line of `bytes` bytes, which has this number.
    pub(super) fn decoded(&self, incoming: Incoming, bytes: usize, number: u64) {
        match incoming {
            Incoming::Nothing => self.inflight().output.done(number),
            Incoming::One(message) => {
                self.take(message, Place { line: number, part: 0, bytes, batch: None });
            }
            Incoming::Batch(messages) => {
                let batch = Inflight::batch(number);
                let bytes = bytes / messages.len();
                for (part, message) in messages.into_iter().enumerate() {
                    self.take(message, Place { line: number, part, bytes, batch: Some(&batch) });
                }
                self.inflight().batch_read(&batch);
            }
        }
    }

    fn take(&self, message: Result<Message, Fault>, place: Place<'_>) {
        match message {
            Ok(Message::Request { id, method, params }) => self.request(id, &method, params, place),
            Ok(Message::Notification { method, params }) => {
                self.notification(&method, params, place);
                self.unanswered(place);
            }
            Ok(Message::Response { id, result }) => {
                self.unanswered(place);
                self.inflight().answered(id, result);
            }
            Ok(Message::Nothing) => self.unanswered(place),
            Err((id, error)) => self.inflight().refuse(id, error, place.line, place.batch),
        }
    }

    /// Notes that a message gets no answer.
    fn unanswered(&self, place: Place<'_>) {
        if place.batch.is_none() {
            self.inflight().output.done(place.line);
        }
    }

    fn notification(&self, method: &str, mut params: JsonObject, place: Place<'_>) {
        match method {
            "notifications/cancelled" => {
                if let Some(Ok(id)) = params.remove("requestId").map(serde_json::from_value::<RequestId>) {
                    self.inflight().cancel(&id);
                }
            }
            "notifications/initialized" if self.opened.lock().is_some() => {
                self.keep(place.line, json!({"jsonrpc": "2.0", "method": method}).to_string());
            }
            _ => {}
        }
    }

    /// Reports a message of the handshake, which opens the conversation with the next worker, too.
    fn keep(&self, call: u64, message: String) {
        if let Some(recovery) = &self.tools.recovery {
            recovery.reporter.changed(SessionEvent::Handshake { call, message });
        }
    }

    fn request(&self, id: RequestId, method: &str, params: JsonObject, place: Place<'_>) {
        match self.inflight().admit(id.clone(), place.line, place.batch, place.bytes) {
            Ok(responder) => self.perform(responder, id, method, params, place),
            Err(error) => self.inflight().refuse(Some(id.into_json_value()), error, place.line, place.batch),
        }
    }

    /// Does what a request asks for, or says why not.
    fn perform(&self, responder: Responder, id: RequestId, method: &str, mut params: JsonObject, place: Place<'_>) {
        let result = if method == "initialize" {
            let id = id.into_json_value();
            let kept = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": &params}).to_string();
            if kept.len() > MAX_HANDSHAKE_MESSAGE {
                Err(too_large_handshake(kept.len()))
            } else {
                let result = self.initialize(params);
                if result.is_ok() {
                    self.keep(place.line, kept);
                }
                result.map(ServerResult::InitializeResult)
            }
        } else if method == attach::STATUS {
            return responder.answer(json!({"clients": self.tools.session().connection_names()}));
        } else if method == attach::PACKAGES {
            return self.packages(responder);
        } else {
            match self.peer(method, params.remove("_meta")) {
                Err(error) => Err(error),
                // A ping before all else.
                Ok(None) => Ok(ServerResult::empty(())),
                Ok(Some(peer)) if method == "tools/call" => match tool_call(params) {
                    Ok(call) => {
                        let number = job_number(place.line, place.part);
                        return tools::call(Call::new(self.tools.clone(), responder, peer, number), call);
                    }
                    Err(reason) => Err(ErrorData::invalid_params(reason, None)),
                },
                Ok(Some(peer)) if method == attach::TAKE_OVER => {
                    let number = job_number(place.line, place.part);
                    let call = Call::new(self.tools.clone(), responder, peer, number);
                    return tools::take_over(call, params.get("id").and_then(Value::as_u64));
                }
                Ok(Some(peer)) => self.answer(method, &params, &peer).map(|result| fitted(result, &peer)),
            }
        };
        match result {
            Ok(result) => responder.answer(result),
            Err(error) => responder.fail(error),
        }
    }

    /// Names the packages of the image.
    fn packages(&self, responder: Responder) {
        self.tools.session().query(&Operation::new("packages"), move |records| match records {
            Ok(records) => {
                let names: Vec<_> = of_kind(&records).map(|package: &Package| &package.name).collect();
                responder.answer(json!({"packages": names}));
            }
            Err(error) => responder.fail(ErrorData::internal_error(error.to_string(), None)),
        });
    }

    /// What is answered at once.
    fn answer(&self, method: &str, params: &JsonObject, peer: &Peer) -> Result<ServerResult, ErrorData> {
        match method {
            "ping" if !peer.is_modern() => Ok(ServerResult::empty(())),
            "tools/list" if params.get("cursor").is_none_or(Value::is_null) => Ok(self.listed().into()),
            "tools/list" => Err(ErrorData::invalid_params("unknown cursor: tools/list has one page", None)),
            "server/discover" => Ok(DiscoverResult::from_server_info(REVISIONS.to_vec(), self.info()).into()),
            _ => {
                let reason =
                    format!("there is no method {method:?} here: this server has tools (tools/list, tools/call)");
                Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, reason, None))
            }
        }
    }

    /// What the server says of itself.
    fn info(&self) -> ServerConfig {
        let name = Implementation::new("sbcl-mcp", crate::VERSION).with_title("SBCL (Common Lisp)");
        let mut capabilities = ServerCapabilities::default();
        let mut tools = ToolsCapability::default();
        tools.list_changed = self.tools.registry().may_change().then_some(true);
        capabilities.tools = Some(tools);
        ServerConfig::new(capabilities).with_server_info(name).with_instructions(self.tools.instructions())
    }

    /// Opens the conversation by a handshake; also once more, in place of the first.
    fn initialize(&self, params: JsonObject) -> Result<ServerConfig, ErrorData> {
        let params: InitializeRequestParams = serde_json::from_value(Value::Object(params))
            .map_err(|error| ErrorData::invalid_params(format!("the params of initialize: {error}"), None))?;
        let asked = params.protocol_version;
        let version = if asked.has_initialize() && REVISIONS.contains(&asked) { asked } else { LAST_WITH_HANDSHAKE };
        let mut result = self.info();
        result.protocol_version = version.clone();
        self.tools.session().set_name(&params.client_info.name);
        let experimental = params.capabilities.experimental.as_ref();
        if experimental.is_some_and(|capabilities| capabilities.contains_key(attach::NOTICE)) {
            let output = self.inflight().output.clone();
            self.tools.session().listen(move |text, held| {
                let params = json!({"text": text, "held": held});
                output.send(&json!({"jsonrpc": "2.0", "method": attach::NOTICE, "params": params}));
            });
        }
        *self.opened.lock() = Some(Opened::Handshake { version, capabilities: params.capabilities });
        Ok(result)
    }

    /// Who asks; `None` for a ping before the conversation is opened.
    fn peer(&self, method: &str, meta: Option<Value>) -> Result<Option<Peer>, ErrorData> {
        let meta = match meta {
            None | Some(Value::Null) => RequestMetaObject::default(),
            Some(Value::Object(meta)) => RequestMetaObject::from(meta),
            Some(_) => {
                return Err(ErrorData::invalid_params(format!("the _meta of {method} must be an object"), None));
            }
        };
        let mut opened = self.opened.lock();
        let asked = meta.protocol_version();
        let handshake = match &*opened {
            None if method == "ping" && asked.is_none() => return Ok(None),
            Some(Opened::Handshake { version, capabilities }) => Some((version.clone(), capabilities.clone())),
            Some(Opened::Request) | None => None,
        };
        let says_all = method == "server/discover" || asked.as_ref().is_some_and(|version| !version.has_initialize());
        if handshake.is_none() || says_all {
            let missing = meta.missing_required_keys(&ProtocolVersion::V_2026_07_28);
            if !missing.is_empty() {
                let missing = missing.join(", ");
                let reason = format!("request _meta is missing or has malformed required fields: {missing}");
                return Err(ErrorData::invalid_params(reason, None));
            }
        }
        if let Some(version) = asked.as_ref().filter(|version| !REVISIONS.contains(version)) {
            return Err(ErrorData::unsupported_protocol_version(version.clone(), REVISIONS));
        }
        if opened.is_none() && method != "server/discover" {
            *opened = Some(Opened::Request);
        }
        let (shaken, capabilities) = handshake.unzip();
        let version = asked.or(shaken).unwrap_or(ProtocolVersion::V_2026_07_28);
        Ok(Some(Peer { version, meta, capabilities }))
    }
}

impl Listener for Conversation {
    fn tools_changed(&self) {
        // Clients without a handshake ask for what they want to hear of (MCP 2026-07-28).
        if matches!(&*self.opened.lock(), Some(Opened::Handshake { .. })) {
            let notification = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
            self.inflight().output.send(&notification);
        }
    }
}

/// The error for an `initialize` that is too large to be handed to the next worker.
fn too_large_handshake(bytes: usize) -> ErrorData {
    let limit = MAX_HANDSHAKE_MESSAGE;
    let reason = format!("initialize takes {bytes} bytes, and {limit} is the limit: send smaller capabilities");
    ErrorData::invalid_params(reason, None)
}

/// A call is taken apart here: it says what is wrong with it, it is faster, and a large argument is not copied.
fn tool_call(mut params: JsonObject) -> Result<CallToolRequestParams, String> {
    let Some(Value::String(name)) = params.remove("name") else {
        return Err("the params of tools/call must have the name of a tool, a string".to_owned());
    };
    let arguments = match params.remove("arguments") {
        None | Some(Value::Null) => JsonObject::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return Err("the arguments of tools/call must be an object".to_owned()),
    };
    let (name, arguments) = tools::translated(name, arguments);
    let mut call = CallToolRequestParams::new(name);
    call.arguments = Some(arguments);
    call.input_responses = match params.remove("inputResponses").map(serde_json::from_value).transpose() {
        Ok(responses) => responses.flatten(),
        Err(error) => return Err(format!("the inputResponses of tools/call: {error}")),
    };
    call.request_state = match params.remove("requestState") {
        None | Some(Value::Null) => None,
        Some(Value::String(state)) => Some(state),
        Some(_) => return Err("the requestState of tools/call must be a string".to_owned()),
    };
    Ok(call)
}

/// The id of the first request in a line.
pub(super) fn first_request(line: &[u8]) -> Option<RequestId> {
    match decode(line) {
        Incoming::One(Ok(Message::Request { id, .. })) => Some(id),
        Incoming::Batch(messages) => messages.into_iter().find_map(|message| match message {
            Ok(Message::Request { id, .. }) => Some(id),
            _ => None,
        }),
        _ => None,
    }
}
