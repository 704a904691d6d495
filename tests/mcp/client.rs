//! The MCP client of the tests and the benchmarks: the binary as a child process, lines of JSON both ways, and a record of
//! everything that the server said.

#![allow(dead_code, reason = "tests and benchmarks use a part each")]

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long anything may take before a test gives up.
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_sbcl-mcp");

/// A directory of a test's own, removed when this is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates the directory. Its path is short enough for a socket in it.
    pub(crate) fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Creates the directory below the build's, which is below the working directory of the tests: how its files are shown
    /// depends on that.
    pub(crate) fn below_target() -> Self {
        Self::below(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    fn below(parent: &Path) -> Self {
        Self(tempfile::Builder::new().prefix("sm-").tempdir_in(parent).expect("a directory can be made").keep())
    }

    /// Writes the file `name`, and the directories above it, and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory can be made");
        std::fs::write(&path, text).expect("a file can be written");
        path
    }

    /// Creates the directory `name` in this one and returns its path.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(&path).expect("a directory can be made");
        path
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    /// Removes the directory, again if need be: a process that outlives its server, as one that saves a session does, may
    /// still be writing to it.
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::remove_dir_all(&self.0).is_err() && self.0.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl AsRef<Path> for Scratch {
    fn as_ref(&self) -> &Path {
        self
    }
}

impl AsRef<OsStr> for Scratch {
    fn as_ref(&self) -> &OsStr {
        self.as_os_str()
    }
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// The directories that a server writes to, by the variable that names each. A test that names none gets its own.
const DIRECTORIES: [&str; 5] = ["HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"];

/// How the server's standard output is read.
enum Output {
    /// Not yet.
    Unread(ChildStdout),
    /// By a thread, so that the server is never kept waiting.
    Lines(Receiver<Vec<u8>>),
    /// By whoever asks for a line: a round trip costs no other thread's wake-up.
    Direct(BufReader<ChildStdout>),
    /// Not any more.
    Closed,
}

/// A server process, and what it has said so far.
pub(crate) struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    output: Output,
    /// Pieces of its standard error.
    stderr: Receiver<Vec<u8>>,
    /// Every line of its standard output that was read, in order.
    pub(crate) transcript: Vec<Value>,
    /// Lines that were read while another one was waited for.
    unclaimed: VecDeque<Value>,
    next_id: i64,
    /// The directory that this server writes to.
    home: Rc<Scratch>,
}

/// How a server ended.
pub(crate) struct End {
    pub(crate) status: ExitStatus,
    pub(crate) stderr: String,
    pub(crate) transcript: Vec<Value>,
    /// The directory that it wrote to, which is removed with this.
    pub(crate) home: Rc<Scratch>,
}

impl Server {
    /// Starts the server; nothing has been said yet.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts the server with arguments.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        Self::start_with_environment(arguments, &[])
    }

    /// Starts the server with arguments and environment variables.
    pub(crate) fn start_with_environment(arguments: &[&str], variables: &[(&str, &Path)]) -> Self {
        let mut server = Self::spawn(arguments, variables);
        server.read_on();
        server
    }

    /// Starts the server without reading from it until [`Self::read_on`].
    pub(crate) fn start_unread(arguments: &[&str]) -> Self {
        Self::spawn(arguments, &[])
    }

    /// Starts the program `command` in its environment, whatever that is.
    pub(crate) fn start_command(command: &mut Command) -> Self {
        let mut server = Self::spawn_command(command, Scratch::new());
        server.read_on();
        server
    }

    /// Starts the program `command`, whose output is read when a line is asked for.
    pub(crate) fn start_direct(command: &mut Command) -> Self {
        let mut server = Self::spawn_command(command, Scratch::new());
        let Output::Unread(stdout) = std::mem::replace(&mut server.output, Output::Closed) else { unreachable!() };
        server.output = Output::Direct(BufReader::new(stdout));
        server
    }

    fn spawn(arguments: &[&str], variables: &[(&str, &Path)]) -> Self {
        let home = Scratch::new();
        let mut command = Command::new(BINARY);
        for name in DIRECTORIES {
            command.env(name, home.directory(name));
        }
        std::fs::set_permissions(home.join("XDG_RUNTIME_DIR"), Permissions::from_mode(0o700))
            .expect("a mode can be set");
        Self::spawn_command(command.args(arguments).envs(variables.iter().copied()), home)
    }

    fn spawn_command(command: &mut Command, home: Scratch) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut pipe = child.stderr.take().expect("a pipe");
        let (sender, stderr) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = pipe.read(&mut bytes) {
                let _ = sender.send(bytes[..read].to_vec());
            }
        });
        Self {
            stdin: child.stdin.take(),
            output: Output::Unread(child.stdout.take().expect("a pipe")),
            child,
            stderr,
            transcript: Vec::new(),
            unclaimed: VecDeque::new(),
            next_id: 1000,
            home: Rc::new(home),
        }
    }

    /// Starts the server and shakes hands.
    pub(crate) fn ready() -> Self {
        let mut server = Self::start();
        server.initialize("2025-06-18");
        server
    }

    /// Begins to read what the server writes.
    pub(crate) fn read_on(&mut self) {
        let Output::Unread(stdout) = std::mem::replace(&mut self.output, Output::Closed) else {
            panic!("read already")
        };
        let (sender, lines) = channel();
        let mut stdout = BufReader::new(stdout);
        std::thread::spawn(move || {
            loop {
                let mut line = Vec::new();
                match stdout.read_until(b'\n', &mut line) {
                    Ok(1..) if sender.send(line).is_ok() => {}
                    _ => break,
                }
            }
        });
        self.output = Output::Lines(lines);
    }

    /// Closes the end that the server writes to, which is not read yet.
    pub(crate) fn stop_reading(&mut self) {
        self.output = Output::Closed;
    }

    /// The directory that this server writes to, where a test has named no other.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// The server's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &Value) {
        self.send_raw(format!("{message}\n").as_bytes());
    }

    /// Sends bytes as they are.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(bytes).expect("the server reads");
    }

    /// Closes the server's stdin.
    pub(crate) fn close(&mut self) {
        self.stdin = None;
    }

    /// The next message, whatever it is. `None` at the end.
    pub(crate) fn receive(&mut self) -> Option<Value> {
        self.unclaimed.pop_front().or_else(|| self.read())
    }

    /// The answer to a request; what else comes before it stays for later.
    pub(crate) fn answer(&mut self, id: impl Into<Value>) -> Value {
        let id = id.into();
        let is_it = |message: &Value| message.get("method").is_none() && message["id"] == id;
        if let Some(index) = self.unclaimed.iter().position(is_it) {
            return self.unclaimed.remove(index).expect("it is there");
        }
        loop {
            let Some(message) = self.read() else { self.ended_before(&id) };
            if is_it(&message) {
                return message;
            }
            self.unclaimed.push_back(message);
        }
    }

    /// True when the answer to a request has been read, or can be without waiting.
    pub(crate) fn has_answered(&mut self, id: i64) -> bool {
        let is_it = |message: &Value| message.get("method").is_none() && message["id"] == id;
        if self.unclaimed.iter().any(is_it) {
            return true;
        }
        loop {
            let Output::Lines(lines) = &self.output else { panic!("nobody reads what the server writes") };
            let Ok(line) = lines.try_recv() else { return false };
            let message = self.parsed(line);
            let found = is_it(&message);
            self.unclaimed.push_back(message);
            if found {
                return true;
            }
        }
    }

    /// Fails with what the server said at its end.
    fn ended_before(&mut self, id: &Value) -> ! {
        let status = self.status();
        panic!("the stream ended before the answer to {id}: {status:?}\n{}", self.rest_of_stderr())
    }

    /// How it ended, if it does.
    fn status(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.child.try_wait().expect("a child") {
                None if Instant::now() <= deadline => std::thread::sleep(Duration::from_millis(5)),
                status => return status,
            }
        }
    }

    /// What it said on stderr; to the end, if a process that it has started does not hold that open.
    fn rest_of_stderr(&mut self) -> String {
        let deadline = Instant::now() + DEADLINE;
        let mut bytes = Vec::new();
        while let Ok(more) = self.stderr.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            bytes.extend(more);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends a request under an id of its own and returns the whole answer.
    pub(crate) fn request(&mut self, method: &str, params: Value) -> Value {
        let id = self.post(method, params);
        self.answer(id)
    }

    /// Sends a request and returns its id.
    pub(crate) fn post(&mut self, method: &str, params: Value) -> i64 {
        self.next_id += 1;
        let id = self.next_id;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    /// Sends a notification.
    pub(crate) fn notify(&mut self, method: &str, params: Value) {
        self.send(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    /// Shakes hands; returns the result.
    pub(crate) fn initialize(&mut self, revision: &str) -> Value {
        let client = json!({"name": "raw", "version": "1"});
        let params = json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": client});
        let answer = self.request("initialize", params);
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        answer["result"].clone()
    }

    /// Calls a tool: its text, and whether it is an error.
    pub(crate) fn call_tool(&mut self, name: &str, arguments: Value) -> (String, bool) {
        let id = self.post_call(name, arguments);
        self.outcome(id)
    }

    /// Asks for a call of a tool and returns the request's id.
    pub(crate) fn post_call(&mut self, name: &str, arguments: Value) -> i64 {
        self.post("tools/call", json!({"name": name, "arguments": arguments}))
    }

    /// Asks for the evaluation of `before` and `after` with a time limit, and returns the request's id once what comes
    /// before `after` is over.
    pub(crate) fn post_running(&mut self, before: &str, after: &str, timeout: f64) -> i64 {
        let marker = self.home.join(format!("running-{}", self.next_id));
        let code = format!("{before} (with-open-file (s {marker:?} :direction :output)) {after}");
        let id = self.post_call("evaluate-lisp", json!({"code": code, "timeout": timeout}));
        let deadline = Instant::now() + DEADLINE;
        while std::fs::remove_file(&marker).is_err() {
            assert!(Instant::now() < deadline, "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        id
    }

    /// What a call of a tool answered.
    pub(crate) fn outcome(&mut self, id: i64) -> (String, bool) {
        outcome(&self.answer(id))
    }

    /// Evaluates code that must succeed.
    pub(crate) fn evaluate(&mut self, code: &str) -> String {
        let (text, is_error) = self.call_tool("evaluate-lisp", json!({"code": code}));
        assert!(!is_error, "{code} failed:\n{text}");
        text
    }

    /// Waits for so long, in which the server must say nothing.
    pub(crate) fn is_silent_for(&mut self, time: Duration) {
        let Output::Lines(lines) = &self.output else { panic!("not read by a thread") };
        assert_eq!(lines.recv_timeout(time), Err(RecvTimeoutError::Timeout), "the server said something");
    }

    /// True when the server still works; every test of bad input ends with this.
    pub(crate) fn goes_on(&mut self) {
        assert_eq!(self.evaluate("(+ 1 2)"), "=> 3");
    }

    /// Closes stdin, waits for the end and checks what was left on stdout.
    pub(crate) fn finish(mut self) -> End {
        self.close();
        self.end()
    }

    /// Waits for the end and checks what was left on stdout.
    pub(crate) fn end(mut self) -> End {
        while !matches!(self.output, Output::Closed | Output::Unread(_)) && self.read().is_some() {}
        let status = self.status().expect("the server ends");
        let stderr = self.rest_of_stderr();
        End { status, stderr, transcript: std::mem::take(&mut self.transcript), home: self.home.clone() }
    }

    /// Sends a line and returns the next one that the server writes, as it is.
    pub(crate) fn round_trip(&mut self, line: &str) -> String {
        self.send_raw(line.as_bytes());
        String::from_utf8(self.read_line().expect("the server answers")).expect("stdout is UTF-8")
    }

    /// Reads a line, or `None` at the end.
    fn read_line(&mut self) -> Option<Vec<u8>> {
        match &mut self.output {
            Output::Lines(lines) => match lines.recv_timeout(DEADLINE) {
                Ok(line) => Some(line),
                Err(RecvTimeoutError::Disconnected) => None,
                Err(RecvTimeoutError::Timeout) => panic!("no answer within {DEADLINE:?}"),
            },
            Output::Direct(stdout) => {
                let mut line = Vec::new();
                (stdout.read_until(b'\n', &mut line).expect("the pipe can be read") > 0).then_some(line)
            }
            Output::Unread(_) | Output::Closed => panic!("nobody reads what the server writes"),
        }
    }

    /// Reads a line, which must be JSON-RPC.
    fn read(&mut self) -> Option<Value> {
        let line = self.read_line()?;
        Some(self.parsed(line))
    }

    /// Returns a line as the message that it must be, which the record gets, too.
    fn parsed(&mut self, line: Vec<u8>) -> Value {
        let text = String::from_utf8(line).expect("stdout is UTF-8");
        assert!(text.ends_with('\n'), "a torn line: {text}");
        let message: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        for message in message.as_array().unwrap_or(&vec![message.clone()]) {
            assert_eq!(message["jsonrpc"], "2.0", "{message}");
            let parts = ["method", "result", "error"].iter().filter(|part| message.get(part).is_some()).count();
            assert_eq!(parts, 1, "{message}");
            assert!(message.get("method").is_some() || message.get("id").is_some(), "{message}");
        }
        self.transcript.push(message.clone());
        message
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls a tool that must succeed.
#[track_caller]
pub(crate) fn good(server: &mut Server, tool: &str, arguments: Value) -> String {
    let (text, is_error) = server.call_tool(tool, arguments);
    assert!(!is_error, "{tool}:\n{text}");
    text
}

/// The text for a frame without local variables.
pub(crate) const NO_LOCALS: &str = "No local variables: the code is SBCL's own, or SBCL kept none of them.";

/// The local variables of a frame of the held evaluation, a line each, and what is said after them.
#[track_caller]
pub(crate) fn frame_locals(server: &mut Server, frame: u64) -> String {
    let text = good(server, "get-backtrace", json!({"from": frame, "max-frames": 1, "locals": true}));
    let is_about_frame =
        |line: &str| line.starts_with("Backtrace (live) for ") || line.starts_with(&format!("  {frame}: "));
    assert!(text.lines().take(2).all(is_about_frame), "{text}");
    let lines = text.lines().skip(2).filter(|line| !line.starts_with("     at ") && !line.contains(" more frame"));
    lines.map(|line| line.strip_prefix("     ").unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// Ends the newest evaluation, which runs.
#[track_caller]
pub(crate) fn abort_newest(server: &mut Server) {
    let text = good(server, "check-evaluation", json!({}));
    let number = text.strip_prefix("Evaluation ").and_then(|rest| rest.split(':').next()).expect("its number");
    good(server, "abort-evaluation", json!({"id": number}));
}

/// The end of an answer of check-evaluation about an evaluation that failed with this error.
pub(crate) fn error_id(number: u64) -> String {
    format!("\n\nError id: E{number} (describe-last-error and get-backtrace take it as error-id)")
}

/// Calls a tool that must fail.
#[track_caller]
pub(crate) fn bad(server: &mut Server, tool: &str, arguments: Value) -> String {
    let (text, is_error) = server.call_tool(tool, arguments);
    assert!(is_error, "{tool} succeeds:\n{text}");
    text
}

/// Evaluates code that must fail.
#[track_caller]
pub(crate) fn fail(server: &mut Server, code: &str) -> String {
    bad(server, "evaluate-lisp", json!({"code": code}))
}

/// What describe-last-error says once no cancelled evaluation is still to end.
#[track_caller]
pub(crate) fn last_error(server: &mut Server) -> String {
    let end = Instant::now() + DEADLINE;
    loop {
        let text = good(server, "describe-last-error", json!({}));
        if !text.contains(" was cancelled and has not ended yet: ") {
            return text;
        }
        assert!(Instant::now() < end, "{text}");
    }
}

/// The text of a tool's result, which is one block, and whether it is an error.
pub(crate) fn outcome(answer: &Value) -> (String, bool) {
    let result = &answer["result"];
    let content = result["content"].as_array().unwrap_or_else(|| panic!("not a tool's result: {answer}"));
    assert_eq!(content.len(), 1, "{answer}");
    assert_eq!(content[0]["type"], "text", "{answer}");
    let text = content[0]["text"].as_str().expect("a text").to_owned();
    (text, result["isError"].as_bool().expect("always said"))
}
