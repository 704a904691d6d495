//! The parts of the clients' messages that the supervisor reads, and the errors that the supervisor itself sends as answers.
//!
//! In each line, the supervisor finds the ids of requests and cancellations, to know whether the line requires an
//! answer, to answer the line, or to apply a cancellation. The rest of the line is skipped.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::rpc::framing::{self, Line};
use crate::rpc::id_scanner::{IdScanner, ScannedMessage, is_exact};
use crate::rpc::inflight;

/// Size of a line, in bytes, above which the line is not parsed while clients wait: parsing would delay their
/// answers too long.
pub(super) const MAX_PARSED_LINE: usize = 1 << 20;
/// Size of a line, in bytes, above which [`as_notifications`] is not called while clients wait. Unlike the search for
/// ids, this function builds a tree of all values.
pub(super) const MAX_REWRITTEN_LINE: usize = 64 << 10;
/// JSON-RPC's error code for a message that is not a valid request.
const INVALID_REQUEST: i32 = -32600;
/// JSON-RPC's error code for an error of the server.
const INTERNAL_ERROR: i32 = -32603;

/// The ids in a line, which may be a batch. The rest of the line is skipped: a tree of all values may take a hundred
/// times the memory of the line, and clients would wait while it is built.
#[derive(Debug, Default)]
pub(super) struct LineIds {
    /// The ids of the messages that require an answer.
    pub(super) requests: Vec<Value>,
    /// The ids of the requests that the messages cancel.
    pub(super) cancelled: Vec<Value>,
}

impl LineIds {
    /// Finds the ids in a line. A line that is not JSON has no ids.
    pub(super) fn find(line: &[u8]) -> Self {
        serde_json::from_slice(line).unwrap_or_default()
    }

    fn add(&mut self, message: Outline) {
        self.requests.extend(message.id.filter(|_| message.has_method));
        self.cancelled.extend(message.params_request_id.filter(|_| message.is_cancellation));
    }
}

impl<'de> Deserialize<'de> for LineIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LineVisitor)
    }
}

struct LineVisitor;

impl<'de> Visitor<'de> for LineVisitor {
    type Value = LineIds;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a message or a batch")
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<LineIds, A::Error> {
        let mut ids = LineIds::default();
        ids.add(OutlineVisitor.visit_map(members)?);
        Ok(ids)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<LineIds, A::Error> {
        let mut ids = LineIds::default();
        while let Some(message) = messages.next_element()? {
            ids.add(message);
        }
        Ok(ids)
    }
}

/// The parts of a JSON value from which [`LineIds`] are found: the value itself if it is a number or a string, and
/// members of an object. Members that are neither numbers nor strings count as missing.
#[derive(Debug, Default)]
struct Outline {
    scalar: Option<Value>,
    id: Option<Value>,
    request_id: Option<Value>,
    /// The `requestId` of the member `params`.
    params_request_id: Option<Value>,
    /// True if there is a member `method`, of any type.
    has_method: bool,
    /// True if the member `method` is the method of cancellations.
    is_cancellation: bool,
}

impl Outline {
    fn of_scalar(value: impl Into<Value>) -> Self {
        Self { scalar: Some(value.into()), ..Self::default() }
    }
}

impl<'de> Deserialize<'de> for Outline {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OutlineVisitor)
    }
}

/// A key of an object.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum Key {
    Id,
    Method,
    Params,
    RequestId,
    #[serde(other)]
    Other,
}

struct OutlineVisitor;

impl<'de> Visitor<'de> for OutlineVisitor {
    type Value = Outline;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Outline, E> {
        Ok(Outline::default())
    }

    fn visit_bool<E>(self, _: bool) -> Result<Outline, E> {
        Ok(Outline::default())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Outline, E> {
        Ok(Outline::of_scalar(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Outline, E> {
        Ok(Outline::of_scalar(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Outline, E> {
        Ok(Outline::of_scalar(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Outline, E> {
        Ok(Outline::of_scalar(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, elements: A) -> Result<Outline, A::Error> {
        IgnoredAny.visit_seq(elements)?;
        Ok(Outline::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Outline, A::Error> {
        let mut outline = Outline::default();
        while let Some(key) = members.next_key()? {
            match key {
                Key::Id => outline.id = members.next_value::<Outline>()?.scalar,
                Key::RequestId => outline.request_id = members.next_value::<Outline>()?.scalar,
                Key::Params => outline.params_request_id = members.next_value::<Outline>()?.request_id,
                Key::Method => {
                    let method = members.next_value::<Outline>()?.scalar;
                    outline.has_method = true;
                    outline.is_cancellation = method.is_some_and(|method| method == "notifications/cancelled");
                }
                Key::Other => _ = members.next_value::<IgnoredAny>()?,
            }
        }
        Ok(outline)
    }
}

/// Returns the id of a message that requires an answer; `None` for a notification or a response.
fn request_id(message: &Value) -> Option<&Value> {
    message.get("method")?;
    message.get("id").filter(|id| id.is_number() || id.is_string())
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

/// Returns the error for a line that exceeds the size limit: the answer to a request, or the replacement of a response that
/// the worker gets.
pub(super) fn too_long_error(id: Option<Value>) -> Vec<u8> {
    as_line(&response(&id.unwrap_or_default(), INVALID_REQUEST, &framing::too_long_message()))
}

/// Returns the error for a line that no worker will answer; `None` when the line requires no answer.
pub(super) fn refusal(line: &[u8], reason: &str) -> Option<Vec<u8>> {
    let ids = LineIds::find(line).requests;
    let mut answers: Vec<_> = ids.iter().map(|id| response(id, INTERNAL_ERROR, reason)).collect();
    match line.trim_ascii_start().first() {
        Some(b'[') if !answers.is_empty() => Some(as_line(&Value::Array(answers))),
        _ => answers.pop().map(|answer| as_line(&answer)),
    }
}

/// Returns the error for a line that was read and not handled when the server ends; `None` when the line requires no
/// answer.
pub(super) fn unhandled_refusal(line: Line<'_>, reason: &str) -> Option<Vec<u8>> {
    match line {
        Line::Text(line) => refusal(&line, reason),
        Line::TooLong(ScannedMessage::Request(id)) => Some(too_long_error(id)),
        Line::TooLong(ScannedMessage::Response(_)) => None,
    }
}

/// Returns the error that replaces the worker's answer to a line when its client has too much unread output; `None`
/// when the line requires no answer.
pub(super) fn backlog_error(line: &[u8]) -> Option<Vec<u8>> {
    quick_refusal(line, &inflight::unread_error().message)
}

/// Returns the error for a line at which two workers have stalled, or which they were decoding when they were lost;
/// `None` when the line requires no answer.
pub(super) fn stall_error(line: &[u8]) -> Option<Vec<u8>> {
    let reason = "The Lisp process was replaced twice before it answered this request: the process stopped responding, \
        died while it decoded the request, or evaluated code had read the request. The request will not be retried. \
        Change or split up the request before you send it again.";
    quick_refusal(line, reason)
}

/// Returns the [`refusal`] of a line. A line over [`MAX_PARSED_LINE`] is only scanned for its id, since clients would wait
/// while it is parsed.
fn quick_refusal(line: &[u8], reason: &str) -> Option<Vec<u8>> {
    if line.len() <= MAX_PARSED_LINE {
        return refusal(line, reason);
    }
    match IdScanner::scan(line) {
        ScannedMessage::Request(id) => Some(as_line(&response(&id.unwrap_or_default(), INTERNAL_ERROR, reason))),
        ScannedMessage::Response(_) => None,
    }
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
    fn long_requests_are_refused_and_not_long_responses() {
        let answer = |key: &str| {
            parsed(backlog_error(format!(r#"{{"id":7,"{key}":"{}"}}"#, "x".repeat(MAX_PARSED_LINE)).as_bytes()))
        };
        assert_eq!(answer("method").expect("a request is answered")["id"], 7);
        assert_eq!(answer("result"), None);
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
    }

    #[test]
    fn ids_are_found_in_messages_and_batches_and_not_in_other_objects() {
        let found = |line: &str| {
            let LineIds { requests, cancelled } = LineIds::find(line.as_bytes());
            (json!(requests), json!(cancelled))
        };
        for (line, requests, cancelled) in [
            (r#"{"\u0069d":7,"method":"x","params":{"id":8}}"#, json!([7]), json!([])),
            (r#"{"id":7,"method":null,"id":"a"}"#, json!(["a"]), json!([])),
            (r#"{"id":[{"id":1}],"method":"x"}"#, json!([]), json!([])),
            (r#"{"method":"x","params":[{"id":1,"method":"y"}]}"#, json!([]), json!([])),
            (r#"{"method":"notifications/cancelled","params":{"requestId":-7,"reason":"x"}}"#, json!([]), json!([-7])),
            (r#"{"params":{"requestId":"a"},"method":"notifications/cancelled"}"#, json!([]), json!(["a"])),
            (r#"{"method":"notifications/cancelled","params":{}}"#, json!([]), json!([])),
            (r#"{"method":"x","params":{"requestId":7}}"#, json!([]), json!([])),
            (
                r#" [1,null,[{"id":5,"method":"x"}],{"id":1.5,"method":"x"},{"id":2,"result":{"id":3}},
                {"id":4,"method":"notifications/cancelled","params":{"requestId":7}},{"id":6,"method":"y"}]"#,
                json!([1.5, 4, 6]),
                json!([7]),
            ),
        ] {
            assert_eq!(found(line), (requests, cancelled), "{line}");
        }
    }
}
