//! Error responses of the supervisor's own, for when there is no worker to answer.

use serde_json::{Value, json};

/// JSON-RPC's code for what is no request.
pub(super) const INVALID_REQUEST: i32 = -32600;
/// JSON-RPC's code for what is the server's fault.
pub(super) const INTERNAL_ERROR: i32 = -32603;

/// An error response as a line.
pub(super) fn line(id: Option<Value>, code: i32, message: &str) -> Vec<u8> {
    let mut line = response(id.unwrap_or_default(), code, message).to_string().into_bytes();
    line.push(b'\n');
    line
}

/// The answer to a line that no worker will answer any more, as a line; `None` when it asks for none.
pub(super) fn of_line(line: &[u8], message: &str) -> Option<Vec<u8>> {
    let answer = match serde_json::from_slice(line).ok()? {
        Value::Array(parts) => {
            let answers: Vec<_> = parts.iter().filter_map(|part| of_message(part, message)).collect();
            (!answers.is_empty()).then_some(Value::Array(answers))?
        }
        one => of_message(&one, message)?,
    };
    let mut line = answer.to_string().into_bytes();
    line.push(b'\n');
    Some(line)
}

fn of_message(request: &Value, message: &str) -> Option<Value> {
    request.get("method")?;
    let id = request.get("id").filter(|id| id.is_number() || id.is_string())?;
    Some(response(id.clone(), INTERNAL_ERROR, message))
}

fn response(id: Value, code: i32, message: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_are_answered() {
        let answer = |line: &str| of_line(line.as_bytes(), "no").map(|line| String::from_utf8(line).unwrap());
        let one = r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32603,"message":"no"}}"#;
        let parse = |text: Option<String>| text.map(|text| serde_json::from_str::<Value>(&text).unwrap());
        let expected: Value = serde_json::from_str(one).unwrap();
        assert_eq!(parse(answer(r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#)), Some(expected.clone()));
        assert_eq!(parse(answer(r#"[{"id":7,"method":"ping"},{"method":"x"}]"#)), Some(json!([expected])));
        for silent in [r#"{"method":"x"}"#, r#"{"id":1,"result":{}}"#, r#"[{"method":"x"}]"#, "", "rubbish"] {
            assert_eq!(answer(silent), None);
        }
    }
}
