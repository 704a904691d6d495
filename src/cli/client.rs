//! An MCP client, for the commands that a person types: it speaks to a server as an agent would, one request at a time.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::mcp::{FOR_PERSON, PACKAGE};
use crate::recovery::checkpoint::store::this_program;
use crate::rpc::attach::NOTICE;
use crate::rpc::framing::MAX_LINE;

/// The revision that it speaks.
const REVISION: &str = "2025-11-25";
/// How long a server may take to start, with what it has to restore.
pub(super) const START: Duration = Duration::from_secs(60);
/// How long a server may take to end once nobody asks it any more.
const END: Duration = Duration::from_secs(3);
/// What is kept of what a server says on stderr, in bytes.
const MAX_STDERR: u64 = 64 << 10;

/// What a client waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// The server said something.
    Message(Value),
    /// It will say no more.
    Closed,
    /// The user wants what runs to end, since this moment.
    Interrupted(Instant),
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server is gone.
    Closed,
    /// It did not answer in time.
    Late,
    /// It refused the request, with these words.
    Refused(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Closed => "the server ended before it answered",
            Self::Late => "the server does not answer",
            Self::Refused(reason) => reason,
        })
    }
}

/// What a tool answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) is_error: bool,
    /// What the text says, as JSON, where that was asked for.
    pub(super) content: Value,
    /// The name of the package that the session is in, where that was asked for.
    pub(super) package: Option<String>,
}

/// Takes the parameters of a [`NOTICE`].
type Hears = Box<dyn Fn(&Value) + Send + Sync>;

/// One end of a conversation with a server.
pub(super) struct Client {
    hears: Arc<OnceLock<Hears>>,
    output: Option<Box<dyn Write + Send>>,
    events: Receiver<Event>,
    interrupts: Sender<Event>,
    server: Option<Server>,
    closed: bool,
    last: u64,
}

/// A server that this process started.
struct Server {
    process: Child,
    stderr: Option<std::thread::JoinHandle<String>>,
}

impl Client {
    /// Starts a server of its own with these arguments. What it says on stderr is kept for [`end`](Self::end).
    ///
    /// # Errors
    /// Those of starting a process.
    pub(super) fn start(arguments: impl IntoIterator<Item = OsString>) -> io::Result<Self> {
        Self::start_with(arguments, Stdio::piped())
    }

    /// The same, with its stderr as it is told.
    pub(super) fn start_with(arguments: impl IntoIterator<Item = OsString>, stderr: Stdio) -> io::Result<Self> {
        let mut command = Command::new(this_program()?);
        command.arg0("sbcl-mcp").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        // What the terminal sends to everybody is for this process.
        let mut process = command.process_group(0).spawn()?;
        let stderr = process.stderr.take().map(|stderr| std::thread::spawn(move || kept(stderr)));
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let mut client = Self::over(from, to);
        client.server = Some(Server { process, stderr });
        Ok(client)
    }

    /// A client of whoever is at the other end of these.
    pub(super) fn over(from: impl Read + Send + 'static, to: impl Write + Send + 'static) -> Self {
        let (sender, events) = channel();
        let interrupts = sender.clone();
        let hears: Arc<OnceLock<Hears>> = Arc::default();
        let heard = hears.clone();
        std::thread::spawn(move || read(from, &sender, &heard));
        Self { hears, interrupts, output: Some(Box::new(to)), events, server: None, closed: false, last: 0 }
    }

    /// Has `hears` called, on a thread of its own, with what the server's other clients do, from the handshake on: the
    /// parameters of each [`NOTICE`].
    pub(super) fn hear(&self, hears: impl Fn(&Value) + Send + Sync + 'static) {
        let _ = self.hears.set(Box::new(hears));
    }

    /// Shakes hands, for no longer than `time`; returns what the server says of itself.
    pub(super) fn initialize(&mut self, time: Duration) -> Result<Value, Failure> {
        let client = json!({"name": "sbcl-mcp", "version": crate::VERSION});
        let capabilities = if self.hears.get().is_some() { json!({"experimental": {NOTICE: {}}}) } else { json!({}) };
        let params = json!({"protocolVersion": REVISION, "capabilities": capabilities, "clientInfo": client});
        // One that takes nobody more says why without having read anything.
        let _ = self.send("initialize", &params);
        let result = self.answer(self.last, Some(time))?;
        self.notify("notifications/initialized", &json!({}))?;
        Ok(result)
    }

    /// Calls a tool and waits, no longer than `time`.
    pub(super) fn call(&mut self, tool: &str, arguments: &Value, time: Option<Duration>) -> Result<Answer, Failure> {
        let id = self.send("tools/call", &json!({"name": tool, "arguments": arguments}))?;
        let result = self.answer(id, time)?;
        Ok(Answer::of(&result))
    }

    /// Calls a tool as a person's client does: with structured content, the package, and reports of progress, whose
    /// tokens are the requests' ids. Returns the request's id.
    pub(super) fn begin_call(&mut self, tool: &str, arguments: &Value) -> Result<u64, Failure> {
        self.begin("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// The same of any request that is answered as a tool's call.
    pub(super) fn begin(&mut self, method: &str, mut params: Value) -> Result<u64, Failure> {
        params["_meta"]["progressToken"] = (self.last + 1).into();
        params["_meta"][FOR_PERSON] = true.into();
        self.send(method, &params)
    }

    /// Sends a request and waits for its result, no longer than `time`.
    pub(super) fn request(&mut self, method: &str, params: &Value, time: Duration) -> Result<Value, Failure> {
        let id = self.send(method, params)?;
        self.answer(id, Some(time))
    }

    /// The same, and waits for the answer, no longer than `time`.
    pub(super) fn call_for_person(&mut self, tool: &str, arguments: &Value, time: Duration) -> Result<Answer, Failure> {
        let id = self.begin_call(tool, arguments)?;
        Ok(Answer::of(&self.answer(id, Some(time))?))
    }

    /// Where it is said that the user wants what runs to end.
    pub(super) fn interrupts(&self) -> Sender<Event> {
        self.interrupts.clone()
    }

    /// The process of the server that it started.
    pub(super) fn server(&self) -> Option<u32> {
        self.server.as_ref().map(|server| server.process.id())
    }

    /// Sends a request and returns its id.
    pub(super) fn send(&mut self, method: &str, params: &Value) -> Result<u64, Failure> {
        self.last += 1;
        self.write(&json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}))?;
        Ok(self.last)
    }

    /// Sends a notification.
    pub(super) fn notify(&mut self, method: &str, params: &Value) -> Result<(), Failure> {
        self.write(&json!({"jsonrpc": "2.0", "method": method, "params": params}))
    }

    fn write(&mut self, message: &Value) -> Result<(), Failure> {
        self.send_line(message.to_string().as_bytes())
    }

    /// Sends a line, whatever it is.
    pub(super) fn send_line(&mut self, line: &[u8]) -> Result<(), Failure> {
        let output = self.output.as_mut().ok_or(Failure::Closed)?;
        output.write_all(&[line, b"\n"].concat()).and_then(|()| output.flush()).map_err(|_| Failure::Closed)
    }

    /// The next thing that happens, within `time`; `None` when nothing does.
    pub(super) fn next(&mut self, time: Option<Duration>) -> Option<Event> {
        let event = match time {
            None => self.events.recv().unwrap_or(Event::Closed),
            Some(time) => match self.events.recv_timeout(time) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => Event::Closed,
                Err(RecvTimeoutError::Timeout) => return None,
            },
        };
        self.closed |= matches!(event, Event::Closed);
        Some(event)
    }

    /// True once the server was seen to be gone.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The result of request `id`, within `time`. What else is said meanwhile is passed over.
    fn answer(&mut self, id: u64, time: Option<Duration>) -> Result<Value, Failure> {
        let end = time.map(|time| Instant::now() + time);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match self.next(left) {
                Some(Event::Message(message)) => {
                    if let Some(result) = answered(message, id) {
                        return result;
                    }
                }
                Some(Event::Interrupted(_)) => {}
                Some(Event::Closed) => return Err(Failure::Closed),
                None => return Err(Failure::Late),
            }
        }
    }

    /// Says good-bye, and returns what the server that it started said on stderr.
    pub(super) fn end(mut self) -> String {
        self.end_server()
    }

    fn end_server(&mut self) -> String {
        self.output = None;
        let Some(Server { mut process, stderr }) = self.server.take() else { return String::new() };
        let end = Instant::now() + END;
        while matches!(process.try_wait(), Ok(None)) {
            // Its stdout ends with it.
            match self.next(Some(end.saturating_duration_since(Instant::now()))) {
                Some(Event::Message(_) | Event::Interrupted(_)) => {}
                Some(Event::Closed) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                _ => {
                    let _ = process.kill();
                    let _ = process.wait();
                    // What it started may hold its stderr.
                    return String::new();
                }
            }
        }
        stderr.and_then(|reader| reader.join().ok()).unwrap_or_default()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.end_server();
    }
}

impl Answer {
    /// What the result of a call says.
    pub(super) fn of(result: &Value) -> Self {
        Self {
            text: result["content"][0]["text"].as_str().unwrap_or_default().to_owned(),
            is_error: result["isError"].as_bool().unwrap_or(false),
            content: result["structuredContent"].clone(),
            package: result["_meta"][PACKAGE].as_str().map(str::to_owned),
        }
    }
}

/// The result that `message` brings, if it answers request `id`, or none in particular: that is refused which is asked.
pub(super) fn answered(mut message: Value, id: u64) -> Option<Result<Value, Failure>> {
    let is_refusal = message["id"].is_null() && message.get("error").is_some();
    if message["id"] != id && !is_refusal || message.get("method").is_some() {
        return None;
    }
    Some(match message["error"]["message"].as_str() {
        Some(reason) => Err(Failure::Refused(reason.to_owned())),
        None => Ok(message["result"].take()),
    })
}

/// Reads messages until there are no more, or nobody wants them. A line that is no message is none.
fn read(from: impl Read, events: &Sender<Event>, hears: &OnceLock<Hears>) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match (&mut from).take(MAX_LINE as u64).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            _ => break,
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line) else { continue };
        match hears.get().filter(|_| message["method"] == NOTICE) {
            Some(hears) => hears(&message["params"]),
            None if events.send(Event::Message(message)).is_err() => return,
            None => {}
        }
    }
    let _ = events.send(Event::Closed);
}

/// The beginning of what comes, once there is no more.
fn kept(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = (&mut from).take(MAX_STDERR).read_to_end(&mut bytes);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A client of a server that runs, or else of a new one with these arguments.
pub(super) fn client_of(attach: Option<Option<String>>, arguments: Vec<OsString>) -> Result<Client, String> {
    match attach {
        None => Client::start_with(for_person(arguments), Stdio::inherit())
            .map_err(|error| format!("no server can be started: {error}")),
        Some(name) => {
            let stream = crate::rpc::attach::connect(name.as_deref()).map_err(|error| error.to_string())?;
            let to = stream.try_clone().map_err(|error| error.to_string())?;
            Ok(Client::over(stream, to))
        }
    }
}

/// The packages of a server that runs, in upper case as a reader has them.
pub(super) fn packages_of(name: Option<&str>) -> Result<Vec<String>, String> {
    let mut client = client_of(Some(name.map(str::to_owned)), Vec::new())?;
    let asked = client.initialize(START);
    let asked = asked.and_then(|_| client.request(crate::rpc::attach::PACKAGES, &json!({}), START));
    let answer = asked.map_err(|failure| failure.to_string())?;
    let names = answer["packages"].as_array().into_iter().flatten();
    Ok(names.filter_map(|name| name.as_str().map(str::to_owned)).collect())
}

/// The arguments of a server for a person, who has time, a terminal that is not cut, and Ctrl-C; unless told otherwise.
fn for_person(given: Vec<OsString>) -> Vec<OsString> {
    let mut arguments = Vec::new();
    for (option, value) in [("--timeout", "0"), ("--hold", "86400"), ("--max-answer", "1000000"), ("--log", "error")] {
        let is_it = |argument: &OsString| {
            let argument = argument.to_string_lossy();
            argument.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        if !given.iter().any(is_it) {
            arguments.extend([OsString::from(option), OsString::from(value)]);
        }
    }
    arguments.extend(given);
    arguments
}
