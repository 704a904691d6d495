//! Decoding of lines from the client into messages.

use rmcp::model::{ErrorCode, ErrorData, JsonObject, RequestId};
use serde_json::Value;

use super::tools;
use crate::rpc::attach::{ADOPT_HELD_METHOD, PACKAGES_METHOD};
use crate::rpc::id_scanner::{IdScanner, ScannedMessage, is_exact};
use crate::rpc::inflight::MAX_REQUESTS;

/// Maximum number of messages in a batch that the event loop handles itself. A larger batch is slow.
const MAX_FAST_BATCH: usize = 16;
/// Maximum number of JSON values in a line. A decoded object takes several hundred bytes, however short its text is.
const MAX_VALUES: usize = 1_000_000;

/// The notification that cancels a request.
pub(super) const CANCELLATION: &str = "notifications/cancelled";

/// A message from the client.
#[derive(Debug)]
pub(super) enum Message {
    /// A request, which must be answered.
    Request { id: RequestId, method: String, params: JsonObject },
    /// A notification, which gets no answer.
    Notification { method: String, params: JsonObject },
    /// The client's answer to the server's question `id`: a result or a refusal.
    Response { id: u64, result: Result<Value, String> },
    /// A response whose id is missing or not an unsigned integer, so that it answers no question of the server.
    StrayResponse,
}

/// An invalid message: its id, if it has one, and the error to answer with.
pub(super) type InvalidMessage = (Option<Value>, ErrorData);

/// The content of a line.
#[derive(Debug)]
pub(super) enum DecodedLine {
    Empty,
    Single(Result<Message, InvalidMessage>),
    /// A batch: an array of messages in one line (MCP 2025-03-26).
    Batch(Vec<Result<Message, InvalidMessage>>),
}

impl DecodedLine {
    /// Returns true for a batch of many messages, and if a message calls a tool with arguments for which the call may
    /// take long before it waits for Lisp.
    pub(super) fn is_slow(&self) -> bool {
        let none = JsonObject::new();
        let is_slow = |message: &Result<Message, InvalidMessage>| match message {
            Ok(Message::Request { method, params, .. }) if method == "tools/call" => {
                let arguments = params.get("arguments").and_then(Value::as_object).unwrap_or(&none);
                params.get("name").and_then(Value::as_str).is_some_and(|name| tools::is_slow(name, arguments))
            }
            _ => false,
        };
        match self {
            Self::Empty => false,
            Self::Single(message) => is_slow(message),
            Self::Batch(messages) => messages.len() > MAX_FAST_BATCH || messages.iter().any(is_slow),
        }
    }

    /// Returns true for a message that is handled ahead of the client's slow lines: a ping, or the answer to a question
    /// of the server.
    pub(super) fn overtakes_slow_lines(&self) -> bool {
        match self {
            Self::Single(Ok(Message::Request { method, .. })) => method == "ping",
            Self::Single(Ok(Message::Response { .. } | Message::StrayResponse)) => true,
            _ => false,
        }
    }

    /// Returns true for a message whose answer, if it gets one, depends on no other line than the client's handshake, and on
    /// no Lisp: for instance the list of the tools, or the error for an unknown method.
    pub(super) fn needs_no_lisp(&self) -> bool {
        match self {
            Self::Empty | Self::Single(Err(_) | Ok(Message::Notification { .. })) => true,
            Self::Single(Ok(Message::Request { method, .. })) => {
                !matches!(method.as_str(), "initialize" | "tools/call" | ADOPT_HELD_METHOD | PACKAGES_METHOD)
            }
            Self::Single(Ok(Message::Response { .. } | Message::StrayResponse)) | Self::Batch(_) => false,
        }
    }

    /// Returns true for a request that may need Lisp, but changes nothing.
    pub(super) fn only_reads(&self) -> bool {
        let Self::Single(Ok(Message::Request { method, params, .. })) = self else { return false };
        let none = JsonObject::new();
        let arguments = params.get("arguments").and_then(Value::as_object).unwrap_or(&none);
        match (method.as_str(), params.get("name").and_then(Value::as_str)) {
            ("tools/call", Some(tool)) => tools::only_reads(tool, arguments),
            // The call is refused.
            ("tools/call", None) => true,
            (method, _) => method == PACKAGES_METHOD,
        }
    }

    /// Returns the id of the request that the line cancels, if the line is a cancellation.
    pub(super) fn cancelled_request(&self) -> Option<RequestId> {
        match self {
            Self::Single(Ok(Message::Notification { method, params })) if method == CANCELLATION => {
                serde_json::from_value(params.get("requestId")?.clone()).ok()
            }
            _ => None,
        }
    }
}

/// Decodes a line.
pub(super) fn decode(line: &[u8]) -> DecodedLine {
    let line = line.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return DecodedLine::Empty;
    }
    if line.len() > MAX_VALUES && count_values(line) > MAX_VALUES {
        let reason = format!("the message has more than {MAX_VALUES} JSON values: send less at once");
        return DecodedLine::Single(refuse(IdScanner::scan(line), ErrorData::invalid_request(reason, None)));
    }
    match serde_json::from_slice(line) {
        Ok(Value::Array(messages)) if messages.len() > MAX_REQUESTS => {
            let reason = format!("a batch may have at most {MAX_REQUESTS} messages, not {}", messages.len());
            DecodedLine::Single(Err((None, ErrorData::invalid_request(reason, None))))
        }
        Ok(Value::Array(messages)) if !messages.is_empty() => {
            DecodedLine::Batch(messages.into_iter().map(parse_message).collect())
        }
        Ok(value) => DecodedLine::Single(parse_message(value)),
        Err(error) => {
            let reason = match std::str::from_utf8(line) {
                Ok(_) => format!("the message is not valid JSON: {error}"),
                Err(error) => format!("the message is not valid UTF-8: {error}"),
            };
            let id = IdScanner::scan(line).request_id();
            DecodedLine::Single(Err((id, ErrorData::new(ErrorCode::PARSE_ERROR, reason, None))))
        }
    }
}

/// Refuses a message that is too large to be decoded. The client's answer to a question of the server gets no error as its
/// answer, but counts as a refusal, so that the question ends.
pub(super) fn refuse(message: ScannedMessage, error: ErrorData) -> Result<Message, InvalidMessage> {
    match message {
        ScannedMessage::Request(id) => Err((id, error)),
        ScannedMessage::Response(id) => Ok(match id.and_then(|id| id.as_u64()) {
            Some(id) => Message::Response { id, result: Err(error.message.into_owned()) },
            None => Message::StrayResponse,
        }),
    }
}

/// Counts the values in JSON text without decoding it. An empty array or object counts twice.
fn count_values(text: &[u8]) -> usize {
    let (mut values, mut in_string, mut escaped) = (1, false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            // The first value of an array or object follows, or the next value.
            b'[' | b'{' | b',' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

fn parse_message(value: Value) -> Result<Message, InvalidMessage> {
    let Value::Object(map) = value else {
        return Err((None, ErrorData::invalid_request("a message must be a JSON object", None)));
    };
    let id = map.get("id").filter(|id| is_exact(id)).cloned();
    parse_object(map).map_err(|error| (id, error))
}

fn invalid<T>(reason: &str) -> Result<T, ErrorData> {
    Err(ErrorData::invalid_request(format!("not a valid request: {reason}"), None))
}

fn parse_object(mut map: JsonObject) -> Result<Message, ErrorData> {
    let id = map.remove("id");
    let is_response = map.contains_key("result") || map.contains_key("error");
    let method = match map.remove("method") {
        Some(Value::String(method)) => method,
        Some(_) => return invalid("the method must be a string"),
        None if is_response => return Ok(parse_response(id, map)),
        None => return invalid("the method is missing"),
    };
    if map.get("jsonrpc").is_none_or(|version| version != "2.0") {
        return invalid("jsonrpc must be \"2.0\"");
    }
    let params = map.remove("params");
    let Some(id) = id else {
        // A notification is never answered, even if its parameters are wrong.
        let params = if let Some(Value::Object(params)) = params { params } else { JsonObject::new() };
        return Ok(Message::Notification { method, params });
    };
    let id = match id {
        Value::String(id) => RequestId::String(id.into()),
        id => match id.as_i64() {
            Some(id) => RequestId::Number(id),
            None => return invalid("the id must be a string or an integer from -2^63 to 2^63-1"),
        },
    };
    if is_response {
        return invalid("a message has either a method, or a result or error");
    }
    match params {
        None | Some(Value::Null) => Ok(Message::Request { id, method, params: JsonObject::new() }),
        Some(Value::Object(params)) => Ok(Message::Request { id, method, params }),
        Some(_) => {
            let method = tools::excerpt(&method);
            Err(ErrorData::invalid_params(format!("the params of {method} must be an object"), None))
        }
    }
}

fn parse_response(id: Option<Value>, mut map: JsonObject) -> Message {
    let Some(id) = id.and_then(|id| id.as_u64()) else { return Message::StrayResponse };
    let result = match map.remove("result") {
        Some(result) => Ok(result),
        None => Err(map["error"]["message"].as_str().unwrap_or("the client refused and gave no reason").to_owned()),
    };
    Message::Response { id, result }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ping(values: &str) -> DecodedLine {
        decode(format!(r#"{{"jsonrpc":"2.0","id":7,"method":"ping","params":{{"x":[{values}]}}}}"#).as_bytes())
    }

    #[test]
    fn a_line_of_too_many_values_is_refused_with_its_id() {
        for values in ["0,".repeat(MAX_VALUES), r#"{"":0},"#.repeat(MAX_VALUES / 2)] {
            let DecodedLine::Single(Err((id, error))) = ping(&format!("{values}0")) else {
                panic!("the line is accepted")
            };
            assert_eq!((id, error.code), (Some(Value::from(7)), ErrorCode::INVALID_REQUEST));
            assert!(error.message.contains("more than 1000000 JSON values"), "{}", error.message);
        }
    }

    #[test]
    fn an_answer_of_too_many_values_is_a_refusal() {
        let answer = |id: &str| decode(format!(r#"{{"id":{id},"result":[{}0]}}"#, "0,".repeat(MAX_VALUES)).as_bytes());
        let DecodedLine::Single(Ok(Message::Response { id: 7, result: Err(reason) })) = answer("7") else {
            panic!("the question does not end")
        };
        assert!(reason.contains("more than 1000000 JSON values"), "{reason}");
        assert!(matches!(answer("\"x\""), DecodedLine::Single(Ok(Message::StrayResponse))));
    }

    #[test]
    fn only_messages_that_change_nothing_are_handled_in_an_image_that_will_be_replaced() {
        let call = |tool: &str, arguments: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":{tool},"arguments":{arguments}}}}}"#
            )
        };
        let request = |method: &str| format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}"}}"#);
        for (line, needs_no_lisp, only_reads) in [
            (request("tools/list"), true, false),
            (request("resources/list"), true, false),
            ("{".to_owned(), true, false),
            (r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.to_owned(), true, false),
            (request("initialize"), false, false),
            (request(ADOPT_HELD_METHOD), false, false),
            (request(PACKAGES_METHOD), false, true),
            (call(r#""describe-symbol""#, r#"{"name":"car"}"#), false, true),
            (call(r#""describe-last-error""#, "{}"), false, true),
            (call(r#""error-history""#, "{}"), false, true),
            (call(r#""no-such-tool""#, "{}"), false, true),
            (call("5", "{}"), false, true),
            (call(r#""checkpoint""#, "{}"), false, true),
            (call(r#""checkpoint""#, r#"{"action":"delete","name":"x"}"#), false, false),
            (call(r#""configure-limits""#, "{}"), false, false),
            (call(r#""evaluation""#, r#"{"action":"cancel"}"#), false, false),
            (call(r#""evaluate-lisp""#, "{}"), false, false),
            (format!("[{}]", request("ping")), false, false),
        ] {
            let decoded = decode(line.as_bytes());
            assert_eq!((decoded.needs_no_lisp(), decoded.only_reads()), (needs_no_lisp, only_reads), "{line}");
        }
    }

    #[test]
    fn text_and_values_within_the_limit_are_accepted() {
        let text = Value::from(r#"[{,\","#.repeat(MAX_VALUES)).to_string();
        for values in [text, "0,".repeat(MAX_VALUES / 2) + "0"] {
            assert!(matches!(ping(&values), DecodedLine::Single(Ok(Message::Request { .. }))));
        }
        assert_eq!(count_values(br#"{"a":[1,{"b":"[,{"}],"c":null}"#), 6);
    }
}
