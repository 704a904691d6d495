//! An MCP client for the commands that a person types. The client sends one request at a time, as an agent would.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde_json::{Value, json};

use crate::audience::Audience;
use crate::environment;
use crate::mcp::{FOR_PERSON_KEY, PACKAGE_KEY};
use crate::os::processes::wait_for_child;
use crate::recovery::checkpoint::store::this_program;
use crate::rpc::attach::{AUDIENCE_CAPABILITY, NOTICE_METHOD};
use crate::rpc::framing::MAX_LINE;

/// The MCP revision that the client speaks.
const REVISION: &str = "2025-11-25";
/// Maximum time for a server to start and to restore its session.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for a server to end after its input was closed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of bytes kept of a server's stderr.
const MAX_STDERR: u64 = 64 << 10;

/// An event that a client waits for.
#[derive(Debug)]
pub(super) enum ClientEvent {
    /// A message from the server.
    Message(Value),
    /// The end of the server's output.
    Closed,
    /// Ctrl-C, pressed at this time.
    Interrupted(Instant),
}

/// The reason why a request has no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallError {
    /// The server has ended.
    Closed,
    /// The server did not answer in time.
    TimedOut,
    /// The server refused the request, for this reason.
    Refused(String),
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Closed => {
                "the server ended before it answered; `sbcl-mcp doctor` checks whether a new server works, and \
                 `sbcl-mcp sessions` lists the running servers"
            }
            Self::TimedOut => {
                "the server did not answer in time; `sbcl-mcp doctor` checks whether a new server works, and \
                 `sbcl-mcp sessions` lists the running servers"
            }
            Self::Refused(reason) => reason,
        })
    }
}

/// A tool's answer.
#[derive(Debug)]
pub(super) struct ToolAnswer {
    pub(super) text: String,
    pub(super) is_error: bool,
    /// The structured content, if it was requested.
    pub(super) content: Value,
    /// The name of the session's current package, if it was requested.
    pub(super) package: Option<String>,
}

/// A function that takes the parameters of a [`NOTICE_METHOD`] notification.
type NoticeHandler = Box<dyn Fn(&Value) + Send + Sync>;

/// A connection to a server, as its client.
pub(super) struct Client {
    notice_handler: Arc<OnceLock<NoticeHandler>>,
    output: Option<Box<dyn Write + Send>>,
    events: Receiver<ClientEvent>,
    interrupts: Sender<ClientEvent>,
    server: Option<ServerProcess>,
    closed: bool,
    last_id: u64,
}

/// A server process that this client started.
struct ServerProcess {
    process: Child,
    stderr: Option<std::thread::JoinHandle<String>>,
}

impl Client {
    /// Starts a server with these arguments. The server's stderr is collected for [`end`](Self::end).
    ///
    /// # Errors
    /// Returns an error if the process cannot be started.
    pub(super) fn start(arguments: impl IntoIterator<Item = OsString>) -> io::Result<Self> {
        Self::start_with(arguments, Stdio::piped())
    }

    /// Starts a server with the given arguments and stderr.
    pub(super) fn start_with(arguments: impl IntoIterator<Item = OsString>, stderr: Stdio) -> io::Result<Self> {
        let mut command = Command::new(this_program()?);
        command.arg0("sbcl-mcp").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        // In its own process group, the server gets no signals from the terminal: Ctrl-C is for this process alone.
        let mut process = command.process_group(0).spawn()?;
        let stderr = process.stderr.take().map(|stderr| std::thread::spawn(move || read_beginning(stderr)));
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let mut client = Self::from_streams(from, to);
        client.server = Some(ServerProcess { process, stderr });
        Ok(client)
    }

    /// Creates a client of the server at the other end of these streams.
    pub(super) fn from_streams(from: impl Read + Send + 'static, to: impl Write + Send + 'static) -> Self {
        let (sender, events) = channel();
        let interrupts = sender.clone();
        let notice_handler: Arc<OnceLock<NoticeHandler>> = Arc::default();
        let handler = notice_handler.clone();
        std::thread::spawn(move || read_messages(from, &sender, &handler));
        Self { notice_handler, interrupts, output: Some(Box::new(to)), events, server: None, closed: false, last_id: 0 }
    }

    /// Sets the function that the reading thread calls with the parameters of each [`NOTICE_METHOD`] notification, which
    /// is about the server's other clients. Must be called before the handshake.
    pub(super) fn on_notice(&self, notice_handler: impl Fn(&Value) + Send + Sync + 'static) {
        let _ = self.notice_handler.set(Box::new(notice_handler));
    }

    /// Performs the handshake within `time`, as a client whose messages are for `audience`; returns the server's result.
    pub(super) fn initialize(&mut self, audience: Audience, time: Duration) -> Result<Value, CallError> {
        let client = json!({"name": "sbcl-mcp", "version": crate::VERSION});
        let mut capabilities = json!({"experimental": {AUDIENCE_CAPABILITY: {"name": audience}}});
        if self.notice_handler.get().is_some() {
            capabilities["experimental"][NOTICE_METHOD] = json!({});
        }
        let params = json!({"protocolVersion": REVISION, "capabilities": capabilities, "clientInfo": client});
        // At its client limit, a server sends an error and closes the connection without reading, so writing may fail.
        let _ = self.send("initialize", &params);
        let result = self.wait_for_result(self.last_id, Some(time))?;
        self.notify("notifications/initialized", &json!({}))?;
        Ok(result)
    }

    /// Calls a tool and waits at most `time` for the answer.
    pub(super) fn call(
        &mut self,
        tool: &str,
        arguments: &Value,
        time: Option<Duration>,
    ) -> Result<ToolAnswer, CallError> {
        let id = self.send("tools/call", &json!({"name": tool, "arguments": arguments}))?;
        let result = self.wait_for_result(id, time)?;
        Ok(ToolAnswer::from_result(&result))
    }

    /// Sends a tool call as a person's client: asks for structured content, the package, and progress. The progress
    /// token is the id of the request, which is returned.
    pub(super) fn begin_call(&mut self, tool: &str, arguments: &Value) -> Result<u64, CallError> {
        self.send_for_person("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// Sends any request that is answered like a tool call, with the same metadata as [`begin_call`](Self::begin_call).
    pub(super) fn send_for_person(&mut self, method: &str, mut params: Value) -> Result<u64, CallError> {
        params["_meta"]["progressToken"] = (self.last_id + 1).into();
        params["_meta"][FOR_PERSON_KEY] = true.into();
        self.send(method, &params)
    }

    /// Sends a request and waits at most `time` for its result.
    pub(super) fn request(&mut self, method: &str, params: &Value, time: Duration) -> Result<Value, CallError> {
        let id = self.send(method, params)?;
        self.wait_for_result(id, Some(time))
    }

    /// Calls a tool as [`begin_call`](Self::begin_call) does, and waits at most `time` for the answer.
    pub(super) fn call_for_person(
        &mut self,
        tool: &str,
        arguments: &Value,
        time: Duration,
    ) -> Result<ToolAnswer, CallError> {
        let id = self.begin_call(tool, arguments)?;
        Ok(ToolAnswer::from_result(&self.wait_for_result(id, Some(time))?))
    }

    /// Returns a sender for [`ClientEvent::Interrupted`].
    pub(super) fn interrupt_sender(&self) -> Sender<ClientEvent> {
        self.interrupts.clone()
    }

    /// Returns the process id of the server, if this client started the server.
    pub(super) fn server_pid(&self) -> Option<u32> {
        self.server.as_ref().map(|server| server.process.id())
    }

    /// Sends a request and returns its id.
    pub(super) fn send(&mut self, method: &str, params: &Value) -> Result<u64, CallError> {
        self.last_id += 1;
        self.write(&json!({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params}))?;
        Ok(self.last_id)
    }

    /// Sends a notification.
    pub(super) fn notify(&mut self, method: &str, params: &Value) -> Result<(), CallError> {
        self.write(&json!({"jsonrpc": "2.0", "method": method, "params": params}))
    }

    fn write(&mut self, message: &Value) -> Result<(), CallError> {
        self.send_line(message.to_string().as_bytes())
    }

    /// Sends a line, with a newline added, without checking the line.
    pub(super) fn send_line(&mut self, line: &[u8]) -> Result<(), CallError> {
        let output = self.output.as_mut().ok_or(CallError::Closed)?;
        output.write_all(&[line, b"\n"].concat()).and_then(|()| output.flush()).map_err(|_| CallError::Closed)
    }

    /// Returns the next event, or `None` if there is none within `time`.
    pub(super) fn next_event(&mut self, time: Option<Duration>) -> Option<ClientEvent> {
        let event = match time {
            None => self.events.recv().unwrap_or(ClientEvent::Closed),
            Some(time) => match self.events.recv_timeout(time) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => ClientEvent::Closed,
                Err(RecvTimeoutError::Timeout) => return None,
            },
        };
        self.closed |= matches!(event, ClientEvent::Closed);
        Some(event)
    }

    /// Returns true once the end of the server's output was received.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Waits at most `time` for the result of request `id`. Other messages are dropped.
    fn wait_for_result(&mut self, id: u64, time: Option<Duration>) -> Result<Value, CallError> {
        let end = time.map(|time| Instant::now() + time);
        loop {
            let remaining = end.map(|end| end.saturating_duration_since(Instant::now()));
            match self.next_event(remaining) {
                Some(ClientEvent::Message(message)) => {
                    if let Some(result) = response_to(message, id) {
                        return result;
                    }
                }
                Some(ClientEvent::Interrupted(_)) => {}
                Some(ClientEvent::Closed) => return Err(CallError::Closed),
                None => return Err(CallError::TimedOut),
            }
        }
    }

    /// Closes the connection. If this client started the server, waits until the server ends, or kills it after
    /// [`SHUTDOWN_TIMEOUT`]. Returns the stderr of a server that ended by itself, otherwise an empty string.
    pub(super) fn end(mut self) -> String {
        self.end_server()
    }

    fn end_server(&mut self) -> String {
        self.output = None;
        let Some(ServerProcess { mut process, stderr }) = self.server.take() else { return String::new() };
        let has_ended = wait_for_child(Pid::from_child(&process), SHUTDOWN_TIMEOUT);
        if !has_ended {
            let _ = process.kill();
        }
        let _ = process.wait();
        if !has_ended {
            // The reading thread is not joined: processes that the server started may keep stderr open.
            return String::new();
        }
        stderr.and_then(|reader| reader.join().ok()).unwrap_or_default()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.end_server();
    }
}

impl ToolAnswer {
    /// Reads the result of a tool call.
    pub(super) fn from_result(result: &Value) -> Self {
        Self {
            text: result["content"][0]["text"].as_str().unwrap_or_default().to_owned(),
            is_error: result["isError"].as_bool().unwrap_or(false),
            content: result["structuredContent"].clone(),
            package: result["_meta"][PACKAGE_KEY].as_str().map(str::to_owned),
        }
    }
}

/// Returns the result of request `id` if `message` is its response, otherwise `None`. An error without an id also
/// counts, since a server that refuses the client or the line does not know the id.
pub(super) fn response_to(mut message: Value, id: u64) -> Option<Result<Value, CallError>> {
    let is_refusal = message["id"].is_null() && message.get("error").is_some();
    if message["id"] != id && !is_refusal || message.get("method").is_some() {
        return None;
    }
    Some(match message["error"]["message"].as_str() {
        Some(reason) => Err(CallError::Refused(reason.to_owned())),
        None => Ok(message["result"].take()),
    })
}

/// Reads messages until the stream ends or the client is gone. Passes notices to `notice_handler`, if it is set, and other
/// messages to `events`. Lines that are not JSON are skipped.
fn read_messages(from: impl Read, events: &Sender<ClientEvent>, notice_handler: &OnceLock<NoticeHandler>) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match (&mut from).take(MAX_LINE as u64).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            _ => break,
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line) else { continue };
        match notice_handler.get().filter(|_| message["method"] == NOTICE_METHOD) {
            Some(notice_handler) => notice_handler(&message["params"]),
            None if events.send(ClientEvent::Message(message)).is_err() => return,
            None => {}
        }
    }
    let _ = events.send(ClientEvent::Closed);
}

/// Reads a stream to its end and returns its first [`MAX_STDERR`] bytes.
fn read_beginning(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = (&mut from).take(MAX_STDERR).read_to_end(&mut bytes);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Connects to a running server if `attach` is given. Otherwise starts a server with `arguments` and defaults for a
/// person.
pub(super) fn connect_or_start(attach: Option<Option<String>>, arguments: Vec<OsString>) -> Result<Client, String> {
    match attach {
        None => Client::start_with(with_interactive_defaults(arguments), Stdio::inherit())
            .map_err(|error| format!("cannot start a server: {error}")),
        Some(name) => {
            let stream = crate::rpc::attach::connect(name.as_deref()).map_err(|error| error.to_string())?;
            let to = stream.try_clone().map_err(|error| error.to_string())?;
            Ok(Client::from_streams(stream, to))
        }
    }
}

/// Returns the names of the packages in a running server, spelled as the reader knows them: usually in upper case.
pub(super) fn packages_of(name: Option<&str>) -> Result<Vec<String>, String> {
    let mut client = connect_or_start(Some(name.map(str::to_owned)), Vec::new())?;
    let result = client.initialize(Audience::AttachedShell, START_TIMEOUT);
    let result = result.and_then(|_| client.request(crate::rpc::attach::PACKAGES_METHOD, &json!({}), START_TIMEOUT));
    let answer = result.map_err(|failure| failure.to_string())?;
    let names = answer["packages"].as_array().into_iter().flatten();
    Ok(names.filter_map(|name| name.as_str().map(str::to_owned)).collect())
}

/// Adds defaults that suit a person at a terminal: no time limit, since Ctrl-C interrupts, a day to debug a held evaluation,
/// long answers, and a log of errors only. Options in `given` and the environment take precedence.
fn with_interactive_defaults(given: Vec<OsString>) -> Vec<OsString> {
    let mut arguments = Vec::new();
    for (option, value) in [("--timeout", "0"), ("--hold", "86400"), ("--max-answer", "1000000"), ("--log", "error")] {
        let is_given = |argument: &OsString| {
            let argument = argument.to_string_lossy();
            argument.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        let is_in_environment = option == "--log" && std::env::var_os(environment::LOG_FILTER).is_some();
        if !is_in_environment && !given.iter().any(is_given) {
            arguments.extend([OsString::from(option), OsString::from(value)]);
        }
    }
    arguments.extend(given);
    arguments
}
