//! A conversation with one client: its handshake, and the dispatch of its messages.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rmcp::model::{
    CallToolRequestParams, DiscoverResult, ElicitationCapability, ErrorCode, ErrorData, Implementation,
    InitializeRequestParams, JsonObject, ListToolsResult, ProtocolVersion, RequestId, RequestMetaObject,
    ServerCapabilities, ServerConfig, ServerResult, ToolsCapability,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Client, adapt_to_revision};
use super::incoming::{CANCELLATION, DecodedLine, InvalidMessage, Message, decode, refuse};
use super::slow_lines::SlowLines;
use super::tools::{self, Call, ToolContext, ToolListObserver, excerpt, quoted_excerpt};
use crate::audience::Audience;
use crate::outcome::{Package, of_kind};
use crate::recovery::event::{MAX_HANDSHAKE_MESSAGE, SessionEvent};
use crate::rpc::attach;
use crate::rpc::framing::too_long_message;
use crate::rpc::id_scanner::ScannedMessage;
use crate::rpc::inflight::{Batch, Inflight, Responder, ServerRequests};
use crate::rpc::route::job_number;
use crate::session::Operation;

/// The supported protocol revisions, oldest first. The newest revision has no handshake.
const REVISIONS: &[ProtocolVersion] = &[
    ProtocolVersion::V_2024_11_05,
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// Returns the names of the supported protocol revisions.
pub(crate) fn revisions() -> Vec<String> {
    REVISIONS.iter().map(ToString::to_string).collect()
}

/// The newest revision with a handshake.
const LAST_REVISION_WITH_HANDSHAKE: ProtocolVersion = ProtocolVersion::V_2025_11_25;

/// The server's side of the MCP conversation with one client.
#[derive(Debug)]
pub(super) struct Conversation {
    tools: Arc<ToolContext>,
    /// The registry's version, and the answer to `tools/list` for this version. The answer is cached because it is slow to
    /// create.
    listed: Mutex<(u64, ListToolsResult)>,
    /// The way in which the conversation was opened; `None` until a request opens it.
    opened: Mutex<Option<OpeningKind>>,
    /// The client's slow lines, and the lines that wait for them.
    pub(super) slow_lines: SlowLines,
    /// True once a line was left to the image that replaces this one.
    pub(super) has_left_lines: AtomicBool,
}

/// The way in which the conversation was opened.
#[derive(Debug, Clone)]
enum OpeningKind {
    /// An `initialize` request. Its protocol version and its capability to ask the user apply to later requests that carry
    /// no version and no capabilities.
    Handshake { version: ProtocolVersion, elicitation: Option<ElicitationCapability> },
    /// A request without a handshake (MCP 2026-07-28): each request carries a description of the client.
    Request,
}

/// The position of a message: its call number, its index in a batch, its share of the line's bytes, and its batch.
#[derive(Clone, Copy)]
struct MessagePosition<'a> {
    call: u64,
    part: usize,
    bytes: usize,
    batch: Option<&'a Arc<Batch>>,
}

impl Conversation {
    /// Creates the conversation with the first client.
    pub(super) fn new(tools: Arc<ToolContext>) -> Arc<Self> {
        let version = tools.registry().version();
        let listed = ListToolsResult::with_all_items(tools.list());
        Self::with_list(tools, (version, listed))
    }

    /// Creates the conversation with an attached client, which has a connection of its own.
    pub(super) fn for_attached(&self, tools: Arc<ToolContext>) -> Arc<Self> {
        let listed = self.listed.lock().clone();
        Self::with_list(tools, listed)
    }

    fn with_list(tools: Arc<ToolContext>, listed: (u64, ListToolsResult)) -> Arc<Self> {
        let registry = tools.registry().clone();
        let conversation = Arc::new(Self {
            tools,
            listed: Mutex::new(listed),
            opened: Mutex::default(),
            slow_lines: SlowLines::default(),
            has_left_lines: AtomicBool::new(false),
        });
        let observer: Weak<Self> = Arc::downgrade(&conversation);
        registry.subscribe(observer);
        conversation
    }

    /// Returns the answer to `tools/list`, rebuilt if the registry has changed.
    fn tool_list(&self) -> ListToolsResult {
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

    /// Returns the client's pending requests.
    pub(super) fn inflight(&self) -> &Arc<Inflight> {
        self.tools.inflight()
    }

    /// Resumes a conversation from its last handshake, an `initialize` request that an earlier image has answered, and
    /// withdraws the requests that earlier images have sent to the client. Then reports the replacement of the last image to
    /// the client.
    pub(super) fn resume(&self, handshake: Option<&str>, server_requests: &ServerRequests) {
        self.inflight().withdraw_earlier(server_requests);
        if let Some(DecodedLine::Single(Ok(Message::Request { params, .. }))) =
            handshake.map(|line| decode(line.as_bytes()))
        {
            // The result is dropped, since the client has had the answer from an earlier image.
            let _ = self.initialize(params);
        }
        // The report follows the handshake, which determines whether the client receives notices.
        self.tools.report_replacement();
    }

    /// Cancels the requests of a client that is gone, and ends its connection.
    pub(super) fn end(&self) {
        self.cancel_requests();
        self.tools.session().disconnect();
    }

    /// Cancels the requests of a client that is gone. The jobs that wait are cancelled first: none of them must begin
    /// because the job before it was cancelled.
    pub(super) fn cancel_requests(&self) {
        self.inflight().close();
        self.tools.session().withdraw_waiting();
        self.inflight().cancel_all();
    }

    /// Refuses a line that is too long. `number` is the call number.
    pub(super) fn refuse_too_long(&self, message: ScannedMessage, number: u64) {
        let refused = refuse(message, ErrorData::invalid_request(too_long_message(), None));
        self.handle_message(refused, MessagePosition { call: number, part: 0, bytes: 0, batch: None });
    }

    /// Handles the content of a line of `bytes` bytes. `number` is the call number.
    pub(super) fn handle_decoded(&self, incoming: DecodedLine, bytes: usize, number: u64) {
        match incoming {
            DecodedLine::Empty => self.inflight().output.send_done(number),
            DecodedLine::Single(message) => {
                self.handle_message(message, MessagePosition { call: number, part: 0, bytes, batch: None });
            }
            DecodedLine::Batch(messages) => {
                let batch = Inflight::new_batch(number);
                let bytes = bytes / messages.len();
                for (part, message) in messages.into_iter().enumerate() {
                    if self.tools.is_being_replaced() {
                        // The next image handles the whole batch.
                        return self.leave_line();
                    }
                    self.handle_message(message, MessagePosition { call: number, part, bytes, batch: Some(&batch) });
                }
                self.inflight().mark_batch_read(&batch);
            }
        }
    }

    fn handle_message(&self, message: Result<Message, InvalidMessage>, position: MessagePosition<'_>) {
        match message {
            Ok(Message::Request { id, method, params }) => self.handle_request(id, &method, params, position),
            Ok(Message::Notification { method, params }) => {
                self.handle_notification(&method, params);
                self.report_unanswered(position);
            }
            Ok(Message::Response { id, result }) => {
                self.report_unanswered(position);
                self.inflight().deliver_reply(id, result);
            }
            Ok(Message::StrayResponse) => self.report_unanswered(position),
            Err((id, error)) => self.inflight().refuse(id, error, position.call, position.batch),
        }
    }

    /// Reports to the supervisor that a message gets no answer. A message in a batch is not reported, since the batch is
    /// answered or reported as a whole.
    fn report_unanswered(&self, position: MessagePosition<'_>) {
        if position.batch.is_none() {
            self.inflight().output.send_done(position.call);
        }
    }

    fn handle_notification(&self, method: &str, mut params: JsonObject) {
        if method == CANCELLATION
            && let Some(Ok(id)) = params.remove("requestId").map(serde_json::from_value::<RequestId>)
        {
            self.inflight().cancel(&id);
        }
    }

    /// Reports an `initialize` request to the supervisor, so that the next worker can resume the conversation.
    fn report_handshake(&self, call: u64, message: String) {
        if let Some(recovery) = &self.tools.recovery {
            recovery.reporter.report_change(SessionEvent::Handshake { call, message });
        }
    }

    fn handle_request(&self, id: RequestId, method: &str, params: JsonObject, position: MessagePosition<'_>) {
        if self.slow_lines.has_cancellation(&id, position.call) {
            return self.report_unanswered(position);
        }
        match self.inflight().admit(id.clone(), position.call, position.batch, position.bytes) {
            Ok(responder) => self.perform(responder, id, method, params, position),
            Err(error) => self.inflight().refuse(Some(id.into_json_value()), error, position.call, position.batch),
        }
    }

    /// Performs a request, or answers with an error.
    fn perform(
        &self,
        responder: Responder,
        id: RequestId,
        method: &str,
        mut params: JsonObject,
        position: MessagePosition<'_>,
    ) {
        let result = if method == "initialize" {
            let id = id.into_json_value();
            let kept = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": &params}).to_string();
            if kept.len() > MAX_HANDSHAKE_MESSAGE {
                Err(too_large_handshake(kept.len()))
            } else {
                let result = self.initialize(params);
                if result.is_ok() {
                    self.report_handshake(position.call, kept);
                }
                result.map(ServerResult::InitializeResult)
            }
        } else if method == attach::STATUS_METHOD {
            return responder.answer(json!({"clients": self.tools.session().connection_names()}));
        } else if method == attach::PACKAGES_METHOD {
            return self.send_packages(responder);
        } else {
            match self.identify_client(method, params.remove("_meta")) {
                Err(error) => Err(error),
                // Before the handshake, a client may send a ping.
                Ok(None) => Ok(ServerResult::empty(())),
                Ok(Some(client)) if method == "tools/call" => match parse_tool_call(params) {
                    Ok(call) => {
                        let number = job_number(position.call, position.part);
                        return tools::call(Call::new(self.tools.clone(), responder, client, number), call);
                    }
                    Err(reason) => Err(ErrorData::invalid_params(reason, None)),
                },
                Ok(Some(client)) if method == attach::ADOPT_HELD_METHOD => {
                    let number = job_number(position.call, position.part);
                    let call = Call::new(self.tools.clone(), responder, client, number);
                    return tools::adopt_held(call, params.get("id").and_then(Value::as_u64));
                }
                Ok(Some(client)) => {
                    self.result_without_lisp(method, &params, &client).map(|result| adapt_to_revision(result, &client))
                }
            }
        };
        match result {
            Ok(result) => responder.answer(result),
            Err(error) => responder.fail(error),
        }
    }

    /// Answers with the names of the image's packages.
    fn send_packages(&self, responder: Responder) {
        self.tools.session().query(&Operation::new("packages"), move |records| match records {
            Ok(records) => {
                let names: Vec<_> = of_kind(&records).map(|package: &Package| &package.name).collect();
                responder.answer(json!({"packages": names}));
            }
            Err(error) => responder.fail(ErrorData::internal_error(error.to_string(), None)),
        });
    }

    /// Returns the result of a request that needs no Lisp.
    fn result_without_lisp(
        &self,
        method: &str,
        params: &JsonObject,
        client: &Client,
    ) -> Result<ServerResult, ErrorData> {
        match method {
            "ping" if !client.has_no_handshake() => Ok(ServerResult::empty(())),
            "tools/list" if params.get("cursor").is_none_or(Value::is_null) => Ok(self.tool_list().into()),
            "tools/list" => Err(ErrorData::invalid_params("unknown cursor: tools/list has only one page", None)),
            "server/discover" => Ok(DiscoverResult::from_server_info(REVISIONS.to_vec(), self.server_info()).into()),
            _ => {
                let method = quoted_excerpt(method);
                let reason = format!("unknown method {method}: this server offers tools (tools/list, tools/call)");
                Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, reason, None))
            }
        }
    }

    /// Returns the server's name, version, capabilities and instructions.
    fn server_info(&self) -> ServerConfig {
        let name = Implementation::new("sbcl-mcp", crate::VERSION).with_title("SBCL (Common Lisp)");
        let mut capabilities = ServerCapabilities::default();
        let mut tools = ToolsCapability::default();
        tools.list_changed = self.tools.registry().may_change().then_some(true);
        capabilities.tools = Some(tools);
        ServerConfig::new(capabilities).with_server_info(name).with_instructions(self.tools.instructions())
    }

    /// Handles `initialize`. A second handshake replaces the first.
    fn initialize(&self, params: JsonObject) -> Result<ServerConfig, ErrorData> {
        let params: InitializeRequestParams = serde_json::from_value(Value::Object(params))
            .map_err(|error| ErrorData::invalid_params(format!("invalid params of initialize: {error}"), None))?;
        let requested = params.protocol_version;
        let version = if requested.has_initialize() && REVISIONS.contains(&requested) {
            requested
        } else {
            LAST_REVISION_WITH_HANDSHAKE
        };
        let mut result = self.server_info();
        result.protocol_version = version.clone();
        self.tools.session().set_name(&params.client_info.name);
        let experimental = params.capabilities.experimental.as_ref();
        if experimental.is_some_and(|capabilities| capabilities.contains_key(attach::NOTICE_METHOD)) {
            let output = self.inflight().output.clone();
            self.tools.session().set_listener(move |text, held| {
                let params = json!({"text": text, "held": held});
                output.send(&json!({"jsonrpc": "2.0", "method": attach::NOTICE_METHOD, "params": params}));
            });
        }
        let audience = experimental.and_then(|capabilities| capabilities.get(attach::AUDIENCE_CAPABILITY)?.get("name"));
        if let Some(Ok(audience)) = audience.map(Audience::deserialize) {
            self.tools.session().set_audience(audience);
        }
        *self.opened.lock() = Some(OpeningKind::Handshake { version, elicitation: params.capabilities.elicitation });
        Ok(result)
    }

    /// Returns a description of the client that made a request, or `None` for a ping before the conversation is opened.
    fn identify_client(&self, method: &str, meta: Option<Value>) -> Result<Option<Client>, ErrorData> {
        let meta = match meta {
            None | Some(Value::Null) => RequestMetaObject::default(),
            Some(Value::Object(meta)) => RequestMetaObject::from(meta),
            Some(_) => {
                let method = excerpt(method);
                return Err(ErrorData::invalid_params(format!("the _meta of {method} must be an object"), None));
            }
        };
        let mut opened = self.opened.lock();
        let requested = meta.protocol_version();
        let handshake = match &*opened {
            None if method == "ping" && requested.is_none() => return Ok(None),
            Some(OpeningKind::Handshake { version, elicitation }) => Some((version.clone(), elicitation.clone())),
            Some(OpeningKind::Request) | None => None,
        };
        let is_self_contained =
            method == "server/discover" || requested.as_ref().is_some_and(|version| !version.has_initialize());
        if handshake.is_none() || is_self_contained {
            let missing = meta.missing_required_keys(&ProtocolVersion::V_2026_07_28);
            if !missing.is_empty() {
                let missing = missing.join(", ");
                let reason = format!(
                    "required fields of the request's _meta are missing or malformed: {missing} (a client of MCP before \
                     2026-07-28 must first send initialize)"
                );
                return Err(ErrorData::invalid_params(reason, None));
            }
        }
        if let Some(version) = requested.as_ref().filter(|version| !REVISIONS.contains(version)) {
            return Err(ErrorData::unsupported_protocol_version(version.clone(), REVISIONS));
        }
        if opened.is_none() && method != "server/discover" {
            *opened = Some(OpeningKind::Request);
        }
        let (negotiated, elicitation) = handshake.unzip();
        let version = requested.or(negotiated).unwrap_or(ProtocolVersion::V_2026_07_28);
        Ok(Some(Client::new(version, &meta, elicitation.flatten())))
    }
}

impl ToolListObserver for Conversation {
    fn tools_changed(&self) {
        // Without a handshake (MCP 2026-07-28), a client must subscribe to notifications, and this server has no
        // subscriptions.
        if matches!(&*self.opened.lock(), Some(OpeningKind::Handshake { .. })) {
            let notification = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
            self.inflight().output.send(&notification);
        }
    }
}

/// Returns the error for an `initialize` that is too large to pass to the next worker.
fn too_large_handshake(bytes: usize) -> ErrorData {
    let limit = MAX_HANDSHAKE_MESSAGE;
    let reason = format!(
        "the initialize request is {bytes} bytes long; the limit is {limit} bytes: shorten the capabilities and \
         clientInfo"
    );
    ErrorData::invalid_params(reason, None)
}

/// Parses the parameters of `tools/call` by hand, for better errors, for speed, and to avoid copying large arguments.
fn parse_tool_call(mut params: JsonObject) -> Result<CallToolRequestParams, String> {
    let Some(Value::String(name)) = params.remove("name") else {
        return Err("the params of tools/call must have a name that is a string".to_owned());
    };
    let arguments = match params.remove("arguments") {
        None | Some(Value::Null) => JsonObject::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return Err("the arguments of tools/call must be an object".to_owned()),
    };
    let (name, arguments) = tools::translate_former_call(name, arguments);
    let mut call = CallToolRequestParams::new(name);
    call.arguments = Some(arguments);
    call.input_responses = match params.remove("inputResponses").map(serde_json::from_value).transpose() {
        Ok(responses) => responses.flatten(),
        Err(error) => return Err(format!("invalid inputResponses of tools/call: {error}")),
    };
    call.request_state = match params.remove("requestState") {
        None | Some(Value::Null) => None,
        Some(Value::String(state)) => Some(state),
        Some(_) => return Err("the requestState of tools/call must be a string".to_owned()),
    };
    Ok(call)
}

/// Returns the id of the first request in a line, which may be a batch.
pub(super) fn first_request_id(line: &[u8]) -> Option<RequestId> {
    match decode(line) {
        DecodedLine::Single(Ok(Message::Request { id, .. })) => Some(id),
        DecodedLine::Batch(messages) => messages.into_iter().find_map(|message| match message {
            Ok(Message::Request { id, .. }) => Some(id),
            _ => None,
        }),
        _ => None,
    }
}
