//! A client of `sbcl::mcp::spawn`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sbcl::Lisp;
use sbcl::mcp::Served;
use serde_json::{Value, json};

pub(crate) struct Agent {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    last: i64,
}

impl Agent {
    pub(crate) fn join(lisp: &Lisp) -> (Self, Served) {
        let (agent, served, _) = Self::join_with_instructions(lisp);
        (agent, served)
    }

    /// Connects like `join`, and also returns the server's instructions.
    pub(crate) fn join_with_instructions(lisp: &Lisp) -> (Self, Served, String) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let served = sbcl::mcp::spawn(lisp, ours).unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut agent = Self { lines: BufReader::new(theirs.try_clone().unwrap()), stream: theirs, last: 0 };
        let client = json!({"name": "test", "version": "1"});
        agent.post("initialize", &json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}));
        let answer = agent.answer();
        assert_eq!(answer["result"]["protocolVersion"], "2025-11-25");
        assert_eq!(answer["result"]["capabilities"], json!({"tools": {"listChanged": true}}));
        agent.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        let instructions = answer["result"]["instructions"].as_str().expect("instructions");
        (agent, served, instructions.to_owned())
    }

    fn send(&mut self, message: &Value) {
        self.stream.write_all(format!("{message}\n").as_bytes()).unwrap();
    }

    pub(crate) fn post(&mut self, method: &str, params: &Value) {
        self.last += 1;
        self.send(&json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}));
    }

    /// Returns the answer to the last request.
    pub(crate) fn answer(&mut self) -> Value {
        loop {
            let message = self.next().expect("an answer");
            if message["id"] == self.last {
                return message;
            }
        }
    }

    /// Returns the next message, or `None` at the end of the stream.
    pub(crate) fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            // The server closed its end before it had read the last request.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
            read => _ = read.expect("it is not silent"),
        }
        (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
    }

    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> String {
        self.post("tools/call", &json!({"name": tool, "arguments": arguments}));
        self.answer()["result"]["content"][0]["text"].as_str().expect("text").to_owned()
    }

    pub(crate) fn evaluate(&mut self, code: &str) -> String {
        self.call("evaluate-lisp", json!({"code": code}))
    }

    pub(crate) fn tools(&mut self) -> Vec<String> {
        self.post("tools/list", &json!({}));
        let answer = self.answer();
        let tools = answer["result"]["tools"].as_array().expect("tools").iter();
        tools.map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
    }
}
