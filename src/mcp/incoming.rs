//! What a line of the client's says.

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientJsonRpcMessage, ClientRequest, ErrorCode, InitializeRequestParams,
    JsonObject, JsonRpcMessage, RequestId, RequestMetaObject,
};
use serde::Serialize;
use serde_json::Value;

use crate::id_scanner::IdScanner;

/// What is to be done about a line.
#[derive(Debug)]
pub(super) enum Incoming {
    /// Something for the protocol.
    Message(Box<ClientJsonRpcMessage>),
    /// Not a message: the answer to it.
    Refused(Refusal),
    /// Several messages in one line, as revision 2025-03-26 has it.
    Batch(Vec<Incoming>),
    /// Nothing: a blank line, or a notification or an answer that makes no sense.
    Nothing,
}

/// An error response that never comes near the protocol's own types: its id is whatever the client sent.
#[derive(Debug, Serialize)]
pub(super) struct Refusal {
    jsonrpc: &'static str,
    id: Value,
    error: Error,
}

#[derive(Debug, Serialize)]
struct Error {
    code: i32,
    message: String,
}

impl Refusal {
    pub(super) fn new(id: Option<Value>, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { jsonrpc: "2.0", id: id.unwrap_or_default(), error: Error { code: code.0, message: message.into() } }
    }
}

/// Makes sense of a line.
pub(super) fn decode(line: &[u8]) -> Incoming {
    let line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return Incoming::Nothing;
    }
    match serde_json::from_slice(line) {
        Ok(Value::Array(messages)) if !messages.is_empty() => {
            Incoming::Batch(messages.into_iter().map(message).collect())
        }
        Ok(value) => message(value),
        Err(error) => {
            let reason = match std::str::from_utf8(line) {
                Ok(_) => format!("the message is not valid JSON: {error}"),
                Err(error) => format!("the message is not valid UTF-8: {error}"),
            };
            Incoming::Refused(Refusal::new(IdScanner::scan(line), ErrorCode::PARSE_ERROR, reason))
        }
    }
}

fn message(value: Value) -> Incoming {
    let Value::Object(map) = value else {
        return refused(None, ErrorCode::INVALID_REQUEST, "a message is a JSON object");
    };
    let id = map.get("id").filter(|id| id.is_number() || id.is_string()).cloned();
    object(map).unwrap_or_else(|(code, reason)| refused(id, code, reason))
}

fn refused(id: Option<Value>, code: ErrorCode, reason: impl Into<String>) -> Incoming {
    Incoming::Refused(Refusal::new(id, code, reason))
}

type Fault = (ErrorCode, String);

fn invalid<T>(reason: &str) -> Result<T, Fault> {
    Err((ErrorCode::INVALID_REQUEST, format!("not a valid request: {reason}")))
}

fn misfit<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err((ErrorCode::INVALID_PARAMS, reason.into()))
}

fn object(mut map: JsonObject) -> Result<Incoming, Fault> {
    let is_call = match map.get("method") {
        Some(Value::String(method)) => method == "tools/call",
        Some(_) => return invalid("the method must be a string"),
        None if map.contains_key("result") || map.contains_key("error") => return Ok(silent(map)),
        None => return invalid("it has no method"),
    };
    if map.get("jsonrpc").is_none_or(|version| version != "2.0") {
        return invalid("jsonrpc must be \"2.0\"");
    }
    let id = match map.get("id") {
        None => return Ok(silent(map)),
        Some(Value::String(id)) => RequestId::String(id.as_str().into()),
        Some(id) => match id.as_i64() {
            Some(id) => RequestId::Number(id),
            None => return invalid("the id must be a string or an integer"),
        },
    };
    if is_call {
        let request = ClientRequest::CallToolRequest(tool_call(map.remove("params").unwrap_or_default())?);
        return Ok(Incoming::Message(Box::new(JsonRpcMessage::request(request, id))));
    }
    match map.get("params") {
        None | Some(Value::Object(_)) => {}
        Some(Value::Null) => drop(map.remove("params")),
        Some(_) => return misfit("the params must be an object"),
    }
    match serde_json::from_value::<ClientJsonRpcMessage>(Value::Object(map)) {
        Ok(message) => known(message),
        Err(error) => invalid(&error.to_string()),
    }
}

/// Notifications and answers are taken if they can be, and never answered.
fn silent(map: JsonObject) -> Incoming {
    serde_json::from_value(Value::Object(map)).map_or(Incoming::Nothing, |message| Incoming::Message(Box::new(message)))
}

/// A request of ours whose params do not fit comes out of rmcp's types as one with an unknown method.
fn known(message: ClientJsonRpcMessage) -> Result<Incoming, Fault> {
    if let JsonRpcMessage::Request(request) = &message
        && let ClientRequest::CustomRequest(custom) = &request.request
    {
        let params = custom.params.clone().unwrap_or_default();
        match custom.method.as_str() {
            "initialize" => {
                let error = serde_json::from_value::<InitializeRequestParams>(params).err();
                let reason = error.map_or_else(|| "they do not fit".to_owned(), |error| error.to_string());
                return misfit(format!("the params of initialize: {reason}"));
            }
            method @ ("ping" | "server/discover" | "tools/list") => {
                return misfit(format!("the params of {method} do not fit"));
            }
            _ => {}
        }
    }
    Ok(Incoming::Message(Box::new(message)))
}

/// A call is taken apart here: it says what is wrong with it, it is faster, and a large argument is not copied.
fn tool_call(params: Value) -> Result<CallToolRequest, Fault> {
    let Value::Object(mut params) = params else {
        return misfit("the params of tools/call must be an object with a name and arguments");
    };
    let Some(Value::String(name)) = params.remove("name") else {
        return misfit("the params of tools/call must have the name of a tool, a string");
    };
    let mut call = CallToolRequestParams::new(name);
    call.arguments = match params.remove("arguments") {
        None | Some(Value::Null) => None,
        Some(Value::Object(arguments)) => Some(arguments),
        Some(_) => return misfit("the arguments of tools/call must be an object"),
    };
    call.input_responses = match params.remove("inputResponses").map(serde_json::from_value).transpose() {
        Ok(responses) => responses.flatten(),
        Err(error) => return misfit(format!("the inputResponses of tools/call: {error}")),
    };
    call.request_state = match params.remove("requestState") {
        None | Some(Value::Null) => None,
        Some(Value::String(state)) => Some(state),
        Some(_) => return misfit("the requestState of tools/call must be a string"),
    };
    let meta = params.remove("_meta");
    let mut request = CallToolRequest::new(call);
    match meta {
        None | Some(Value::Null) => {}
        Some(Value::Object(meta)) => {
            request.extensions.insert(RequestMetaObject::from(meta));
        }
        Some(_) => return misfit("the _meta of tools/call must be an object"),
    }
    Ok(request)
}
