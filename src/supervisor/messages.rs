//! The parts of the clients' messages that the supervisor reads, and the errors that the supervisor itself sends as answers.
//!
//! The supervisor parses a line to answer it, to know whether it requires an answer, or to apply a cancellation, but
//! not to relay it.

use serde_json::{Value, json};

use crate::rpc::framing;
use crate::rpc::id_scanner::{IdScanner, is_exact};
use crate::rpc::inflight;

/// Size of a line, in bytes, above which the line is not parsed while clients wait: parsing would delay their
/// answers too long.
pub(super) const MAX_PARSED_LINE: usize = 1 << 20;
/// JSON-RPC's error code for a message that is not a valid request.
const INVALID_REQUEST: i32 = -32600;
/// JSON-RPC's error code for an error of the server.
const INTERNAL_ERROR: i32 = -32603;

/// Returns the messages of a line, which may be a batch. Returns no messages when the line is not JSON.
pub(super) fn parse_messages(line: &[u8]) -> Vec<Value> {
    match serde_json::from_slice(line) {
        Ok(Value::Array(messages)) => messages,
        Ok(message) => vec![message],
        Err(_) => Vec::new(),
    }
}

/// Returns the id of a message that requires an answer; `None` for a notification or a response.
pub(super) fn request_id(message: &Value) -> Option<&Value> {
    message.get("method")?;
    message.get("id").filter(|id| id.is_number() || id.is_string())
}

/// Returns the id of the request that a message cancels; `None` for a message that cancels nothing.
pub(super) fn cancelled_id(message: &Value) -> Option<&Value> {
    (message.get("method")? == "notifications/cancelled").then_some(message.get("params")?.get("requestId")?)
}

/// Returns the line with its cancelled requests turned into notifications, which are never answered; `None` when the line
/// has no cancelled request. `is_cancelled` returns true for the id of a cancelled request.
pub(super) fn as_notifications(line: &[u8], is_cancelled: impl Fn(&Value) -> bool) -> Option<Vec<u8>> {
    let mut content = serde_json::from_slice(line).ok()?;
    let mut found = false;
    let mut silence = |message: &mut Value| {
        if request_id(message).is_some_and(&is_cancelled) {
            found = true;
            message.as_object_mut().map(|message| message.remove("id"));
        }
    };
    match &mut content {
        Value::Array(messages) => messages.iter_mut().for_each(silence),
        message => silence(message),
    }
    found.then(|| as_line(&content))
}

/// Returns the error for a line that exceeds the size limit.
pub(super) fn too_long_error(id: Option<Value>) -> Vec<u8> {
    as_line(&response(&id.unwrap_or_default(), INVALID_REQUEST, &framing::too_long_message()))
}

/// Returns the error for a line that no worker will answer; `None` when the line requires no answer.
pub(super) fn refusal(line: &[u8], reason: &str) -> Option<Vec<u8>> {
    let messages = parse_messages(line);
    let mut answers: Vec<_> =
        messages.iter().filter_map(request_id).map(|id| response(id, INTERNAL_ERROR, reason)).collect();
    match line.trim_ascii_start().first() {
        Some(b'[') if !answers.is_empty() => Some(as_line(&Value::Array(answers))),
        _ => answers.pop().map(|answer| as_line(&answer)),
    }
}

/// Returns the error that replaces the worker's answer to a line when its client has too much unread output; `None`
/// when the line requires no answer.
pub(super) fn backlog_error(line: &[u8]) -> Option<Vec<u8>> {
    quick_refusal(line, &inflight::unread_error().message)
}

/// Returns the error for a line at which two workers have stalled; `None` when the line requires no answer.
pub(super) fn stall_error(line: &[u8]) -> Option<Vec<u8>> {
    let reason = "The Lisp process was replaced twice before it answered this request: the process stopped responding, or \
        evaluated code had read the request. The request will not be retried. Change or split up the request before you \
        send it again.";
    quick_refusal(line, reason)
}

/// Returns the [`refusal`] of a line. A line over [`MAX_PARSED_LINE`] is only scanned for its id, since clients would wait
/// while it is parsed.
fn quick_refusal(line: &[u8], reason: &str) -> Option<Vec<u8>> {
    if line.len() <= MAX_PARSED_LINE {
        return refusal(line, reason);
    }
    Some(as_line(&response(&IdScanner::scan(line).unwrap_or_default(), INTERNAL_ERROR, reason)))
}

fn response(id: &Value, code: i32, reason: &str) -> Value {
    let id = Some(id).filter(|id| is_exact(id));
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": reason}})
}

fn as_line(content: &Value) -> Vec<u8> {
    format!("{content}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: Option<Vec<u8>>) -> Option<Value> {
        line.map(|line| serde_json::from_slice(&line).unwrap())
    }

    #[test]
    fn only_requests_are_refused_and_not_notifications_or_responses() {
        let answer = |line: &str| parsed(refusal(line.as_bytes(), "no"));
        let expected = json!({"jsonrpc": "2.0", "id": 7, "error": {"code": -32603, "message": "no"}});
        assert_eq!(answer(r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#), Some(expected.clone()));
        assert_eq!(answer(r#" [{"id":7,"method":"ping"},{"method":"x"}]"#), Some(json!([expected])));
        for silent in [r#"{"method":"x"}"#, r#"{"id":1,"result":{}}"#, r#"[{"method":"x"}]"#, "", "rubbish"] {
            assert_eq!(answer(silent), None);
        }
    }

    #[test]
    fn an_id_that_cannot_be_echoed_is_null() {
        let answer = |id: &str| parsed(refusal(format!(r#"{{"id":{id},"method":"ping"}}"#).as_bytes(), "no"));
        let id = |id: &str| answer(id).expect("a request is answered")["id"].clone();
        assert_eq!(["18446744073709551615", "1.5"].map(id), [json!(u64::MAX), json!(1.5)]);
        assert_eq!(["18446744073709551616", "1e300"].map(id), [Value::Null, Value::Null]);
    }

    #[test]
    fn a_request_turned_into_a_notification_has_no_id() {
        let silence = |line: &str| parsed(as_notifications(line.as_bytes(), |id| id == "a"));
        assert_eq!(silence(r#"{"id":"a","method":"x"}"#), Some(json!({"method": "x"})));
        let batch = json!([{"method": "x"}, {"id": 1, "method": "x"}]);
        assert_eq!(silence(r#"[{"id":"a","method":"x"},{"id":1,"method":"x"}]"#), Some(batch));
        assert_eq!(silence(r#"[{"id":"b","method":"x"},{"id":"a","result":1}]"#), None);
        assert_eq!(cancelled_id(&json!({"method": "notifications/cancelled", "params": {}})), None);
    }
}
