//! The MCP client of the tests and benchmarks: runs the binary as a child process, exchanges lines of JSON, and records
//! every message from the server.

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
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The time limit for each wait; the test fails after it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);

/// Returns the path of the program under test: the program that the environment variable `SBCL_MCP_BIN` names, or else
/// the binary that cargo has built.
pub(crate) fn binary() -> &'static str {
    static BINARY: LazyLock<String> = LazyLock::new(|| {
        let named = std::env::var("SBCL_MCP_BIN");
        named.unwrap_or_else(|_| env!("CARGO_BIN_EXE_sbcl-mcp").to_owned())
    });
    &BINARY
}

/// Returns true if the program under test is for another processor, so that QEMU runs it (`.ci/arm64`).
pub(crate) fn is_emulated() -> bool {
    // The machine is in bytes 18 and 19 of an ELF file.
    let machine = |path: &str| {
        let mut header = [0; 20];
        std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header)).expect("the program can be read");
        [header[18], header[19]]
    };
    cfg!(target_os = "linux") && machine(binary()) != machine("/proc/self/exe")
}

/// Returns the processor that the program under test is for, as in [`std::env::consts::ARCH`]. QEMU only runs programs for
/// aarch64 here.
pub(crate) fn server_arch() -> &'static str {
    if is_emulated() { "aarch64" } else { std::env::consts::ARCH }
}

/// Returns a time limit, in seconds, for code that does not end by itself. Before the limit, Lisp compiles the code and begins
/// to run it, which takes seconds in QEMU.
pub(crate) fn short_limit() -> f64 {
    if is_emulated() { 5.0 } else { 0.5 }
}

/// A directory of one test, removed when dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates the directory. Its path is short enough for a Unix socket in it.
    pub(crate) fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Creates the directory below the target directory and hence below the tests' working directory, which affects how
    /// the server shows the paths of its files.
    pub(crate) fn below_target() -> Self {
        Self::below(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    fn below(parent: &Path) -> Self {
        Self(tempfile::Builder::new().prefix("sm-").tempdir_in(parent).expect("a directory can be made").keep())
    }

    /// Writes the file `name`, creates missing parent directories, and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory can be made");
        std::fs::write(&path, text).expect("a file can be written");
        path
    }

    /// Creates the subdirectory `name` and returns its path.
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
    /// Removes the directory, with retries: a process that outlives its server, such as one that saves a session, may
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

/// The variables that name the directories a server writes to. Each server gets its own directories unless the test
/// names others.
const DIRECTORIES: [&str; 5] = ["HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"];

/// The way in which the server's stdout is read.
enum Output {
    /// Stdout is not read yet.
    Unread(ChildStdout),
    /// A thread reads, so that the server never blocks on a full pipe.
    Lines(Receiver<Vec<u8>>),
    /// The calling thread reads, so that a round trip wakes no other thread.
    Direct(BufReader<ChildStdout>),
    /// Stdout is closed.
    Closed,
}

/// A server process and the messages it has sent.
pub(crate) struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    output: Output,
    /// Chunks of the server's stderr.
    stderr: Receiver<Vec<u8>>,
    /// Every line read from the server's stdout, in order.
    pub(crate) transcript: Vec<Value>,
    /// Messages that were read while waiting for another one.
    unclaimed: VecDeque<Value>,
    next_id: i64,
    /// The directory that contains all directories the server writes to.
    home: Rc<Scratch>,
}

/// The exit status and the output of a server that has ended.
pub(crate) struct ServerExit {
    pub(crate) status: ExitStatus,
    pub(crate) stderr: String,
    pub(crate) transcript: Vec<Value>,
    /// The directory that the server wrote to, removed when dropped.
    pub(crate) home: Rc<Scratch>,
}

impl Server {
    /// Starts the server without sending anything.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts the server with arguments.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        Self::start_with_environment(arguments, &[])
    }

    /// Starts the server with arguments and environment variables.
    pub(crate) fn start_with_environment(arguments: &[&str], variables: &[(&str, &Path)]) -> Self {
        let mut server = Self::spawn(arguments, variables, Path::new("."));
        server.start_reading();
        server
    }

    /// Starts the server in a working directory, with arguments.
    pub(crate) fn start_in(directory: &Path, arguments: &[&str]) -> Self {
        let mut server = Self::spawn(arguments, &[], directory);
        server.start_reading();
        server
    }

    /// Starts the server; its output is not read before [`Self::start_reading`].
    pub(crate) fn start_unread(arguments: &[&str]) -> Self {
        Self::spawn(arguments, &[], Path::new("."))
    }

    /// Starts the program `command` without changing its environment.
    pub(crate) fn start_command(command: &mut Command) -> Self {
        let mut server = Self::spawn_command(command, Scratch::new());
        server.start_reading();
        server
    }

    /// Starts the program `command`; the thread that waits for a line reads its output.
    pub(crate) fn start_direct(command: &mut Command) -> Self {
        let mut server = Self::spawn_command(command, Scratch::new());
        let Output::Unread(stdout) = std::mem::replace(&mut server.output, Output::Closed) else { unreachable!() };
        server.output = Output::Direct(BufReader::new(stdout));
        server
    }

    fn spawn(arguments: &[&str], variables: &[(&str, &Path)], directory: &Path) -> Self {
        let home = Scratch::new();
        let mut command = Command::new(binary());
        for name in DIRECTORIES {
            command.env(name, home.directory(name));
        }
        std::fs::set_permissions(home.join("XDG_RUNTIME_DIR"), Permissions::from_mode(0o700))
            .expect("a mode can be set");
        command.args(arguments).envs(variables.iter().copied()).current_dir(directory);
        Self::spawn_command(&mut command, home)
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

    /// Starts and initializes the server.
    pub(crate) fn ready() -> Self {
        let mut server = Self::start();
        server.initialize("2025-06-18");
        server
    }

    /// Starts the thread that reads the server's output.
    pub(crate) fn start_reading(&mut self) {
        let Output::Unread(stdout) = std::mem::replace(&mut self.output, Output::Closed) else {
            panic!("stdout is read already")
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

    /// Closes the pipe for the server's output.
    pub(crate) fn stop_reading(&mut self) {
        self.output = Output::Closed;
    }

    /// Returns the directory that the server writes to by default.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// Returns the server's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &Value) {
        self.send_raw(format!("{message}\n").as_bytes());
    }

    /// Sends bytes unchanged.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(bytes).expect("the server reads");
    }

    /// Closes the server's stdin.
    pub(crate) fn close(&mut self) {
        self.stdin = None;
    }

    /// Returns the next message of any kind, or `None` at the end of the output.
    pub(crate) fn receive(&mut self) -> Option<Value> {
        self.unclaimed.pop_front().or_else(|| self.read())
    }

    /// Waits for the answer to a request. Other messages are kept in `unclaimed`.
    pub(crate) fn answer(&mut self, id: impl Into<Value>) -> Value {
        let id = id.into();
        let is_it = |message: &Value| message.get("method").is_none() && message["id"] == id;
        if let Some(index) = self.unclaimed.iter().position(is_it) {
            return self.unclaimed.remove(index).expect("the index is valid");
        }
        loop {
            let Some(message) = self.read() else { self.panic_at_end_of_output(&id) };
            if is_it(&message) {
                return message;
            }
            self.unclaimed.push_back(message);
        }
    }

    /// Returns true if the answer to a request has arrived.
    pub(crate) fn has_answered(&mut self, id: i64) -> bool {
        let is_it = |message: &Value| message.get("method").is_none() && message["id"] == id;
        if self.unclaimed.iter().any(is_it) {
            return true;
        }
        loop {
            let Output::Lines(lines) = &self.output else { panic!("nothing reads stdout") };
            let Ok(line) = lines.try_recv() else { return false };
            let message = self.parsed(line);
            let found = is_it(&message);
            self.unclaimed.push_back(message);
            if found {
                return true;
            }
        }
    }

    /// Panics with the exit status and the stderr of the server.
    fn panic_at_end_of_output(&mut self, id: &Value) -> ! {
        let status = self.status();
        panic!("the stream ended before the answer to {id}: {status:?}\n{}", self.rest_of_stderr())
    }

    /// Waits for the server to exit and returns its status, or `None` after [`DEADLINE`].
    fn status(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.child.try_wait().expect("a child") {
                None if Instant::now() <= deadline => std::thread::sleep(Duration::from_millis(5)),
                status => return status,
            }
        }
    }

    /// Returns the unread stderr: up to its end, unless a process that the server started keeps the pipe open until
    /// [`DEADLINE`].
    fn rest_of_stderr(&mut self) -> String {
        let deadline = Instant::now() + DEADLINE;
        let mut bytes = Vec::new();
        while let Ok(more) = self.stderr.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            bytes.extend(more);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends a request under a new id and returns the complete message.
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

    /// Sends `initialize` and `notifications/initialized`; returns the result of the first.
    pub(crate) fn initialize(&mut self, revision: &str) -> Value {
        let client = json!({"name": "raw", "version": "1"});
        let params = json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": client});
        let answer = self.request("initialize", params);
        assert!(answer["result"].is_object(), "{answer}");
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        answer["result"].clone()
    }

    /// Calls a tool and returns its text and whether it is an error.
    pub(crate) fn call_tool(&mut self, name: &str, arguments: Value) -> (String, bool) {
        let id = self.post_call(name, arguments);
        self.outcome(id)
    }

    /// Sends a tool call and returns the request's id.
    pub(crate) fn post_call(&mut self, name: &str, arguments: Value) -> i64 {
        self.post("tools/call", json!({"name": name, "arguments": arguments}))
    }

    /// Sends an evaluation of `before` and `after` with a time limit, and returns the request's id once `before` has
    /// been evaluated.
    pub(crate) fn post_running(&mut self, before: &str, after: &str, timeout: f64) -> i64 {
        let marker = self.home.join(format!("running-{}", self.next_id));
        let code = format!("{before} (with-open-file (s {marker:?} :direction :output)) {after}");
        let id = self.post_call("evaluate-lisp", json!({"code": code, "timeout": timeout}));
        let deadline = Instant::now() + DEADLINE;
        while std::fs::remove_file(&marker).is_err() {
            assert!(Instant::now() < deadline, "the evaluation does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        id
    }

    /// Waits for the answer to a tool call and returns its text and whether it is an error.
    pub(crate) fn outcome(&mut self, id: i64) -> (String, bool) {
        outcome(&self.answer(id))
    }

    /// Evaluates code that must succeed and returns the answer.
    pub(crate) fn evaluate(&mut self, code: &str) -> String {
        let (text, is_error) = self.call_tool("evaluate-lisp", json!({"code": code}));
        assert!(!is_error, "{code} failed:\n{text}");
        text
    }

    /// Asserts that the server sends nothing for this time.
    pub(crate) fn assert_silent_for(&mut self, time: Duration) {
        let Output::Lines(lines) = &self.output else { panic!("no thread reads stdout") };
        assert_eq!(lines.recv_timeout(time), Err(RecvTimeoutError::Timeout), "the server sent a message");
    }

    /// Asserts that the server still evaluates; every test of bad input ends with this.
    pub(crate) fn assert_works(&mut self) {
        assert_eq!(self.evaluate("(+ 1 2)"), "=> 3");
    }

    /// Closes stdin, waits for the exit and checks the remaining output.
    pub(crate) fn finish(mut self) -> ServerExit {
        self.close();
        self.end()
    }

    /// Waits for the exit and checks the remaining output.
    pub(crate) fn end(mut self) -> ServerExit {
        while !matches!(self.output, Output::Closed | Output::Unread(_)) && self.read().is_some() {}
        let status = self.status().expect("the server ends");
        let stderr = self.rest_of_stderr();
        ServerExit { status, stderr, transcript: std::mem::take(&mut self.transcript), home: self.home.clone() }
    }

    /// Sends a line and returns the server's next line unparsed.
    pub(crate) fn round_trip(&mut self, line: &str) -> String {
        self.send_raw(line.as_bytes());
        String::from_utf8(self.read_line().expect("the server answers")).expect("stdout is UTF-8")
    }

    /// Reads a line, or returns `None` at the end of the output.
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
            Output::Unread(_) | Output::Closed => panic!("nothing reads stdout"),
        }
    }

    /// Reads a line, which must be a JSON-RPC message, or returns `None` at the end of the output.
    fn read(&mut self) -> Option<Value> {
        let line = self.read_line()?;
        Some(self.parsed(line))
    }

    /// Parses a line, asserts that it is a JSON-RPC message or batch, and adds it to the transcript.
    fn parsed(&mut self, line: Vec<u8>) -> Value {
        let text = String::from_utf8(line).expect("stdout is UTF-8");
        assert!(text.ends_with('\n'), "an incomplete line: {text}");
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

/// Calls a tool that must succeed and returns its text.
#[track_caller]
pub(crate) fn call_ok(server: &mut Server, tool: &str, arguments: Value) -> String {
    let (text, is_error) = server.call_tool(tool, arguments);
    assert!(!is_error, "{tool}:\n{text}");
    text
}

/// The answer for a frame without local variables.
pub(crate) const NO_LOCALS: &str =
    "No local variables: the frame has none, or its code lacks debug information, as SBCL's own code does.";
/// The answer for other numbers of frames without local variables.
pub(crate) const NO_LOCALS_IN_FRAMES: &str =
    "No local variables: the frames have none, or their code lacks debug information, as SBCL's own code does.";

/// Returns the local variables of a frame of the held evaluation, one per line, and the notes after them.
#[track_caller]
pub(crate) fn frame_locals(server: &mut Server, frame: u64) -> String {
    let text = call_ok(server, "get-backtrace", json!({"from": frame, "max-frames": 1, "locals": true}));
    let is_about_frame =
        |line: &str| line.starts_with("Backtrace (live) for ") || line.starts_with(&format!("  {frame}: "));
    assert!(text.lines().take(2).all(is_about_frame), "{text}");
    let lines = text.lines().skip(2).filter(|line| !line.starts_with("     at ") && !line.contains(" more frame"));
    lines.map(|line| line.strip_prefix("     ").unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// Aborts the newest evaluation, which must be running.
#[track_caller]
pub(crate) fn abort_newest(server: &mut Server) {
    let text = call_ok(server, "check-evaluation", json!({}));
    let number = text.strip_prefix("Evaluation ").and_then(|rest| rest.split(':').next()).expect("its number");
    call_ok(server, "abort-evaluation", json!({"id": number}));
}

/// Returns the end of check-evaluation's answer about an evaluation that failed with error `number`.
pub(crate) fn error_id(number: u64) -> String {
    format!("\n\nError id: E{number} (argument error-id of describe-last-error and get-backtrace)")
}

/// Calls a tool that must fail and returns its text.
#[track_caller]
pub(crate) fn call_err(server: &mut Server, tool: &str, arguments: Value) -> String {
    let (text, is_error) = server.call_tool(tool, arguments);
    assert!(is_error, "{tool} succeeds:\n{text}");
    text
}

/// Evaluates code that must fail and returns the report.
#[track_caller]
pub(crate) fn evaluate_err(server: &mut Server, code: &str) -> String {
    call_err(server, "evaluate-lisp", json!({"code": code}))
}

/// Returns the answer of describe-last-error once no cancelled evaluation is still running.
#[track_caller]
pub(crate) fn last_error(server: &mut Server) -> String {
    let end = Instant::now() + DEADLINE;
    loop {
        let text = call_ok(server, "describe-last-error", json!({}));
        if !text.contains(" was cancelled and has not ended yet: ") {
            return text;
        }
        assert!(Instant::now() < end, "{text}");
    }
}

/// Returns the text of a tool result, which must be one block, and whether it is an error.
pub(crate) fn outcome(answer: &Value) -> (String, bool) {
    let result = &answer["result"];
    let content = result["content"].as_array().unwrap_or_else(|| panic!("not a tool's result: {answer}"));
    assert_eq!(content.len(), 1, "{answer}");
    assert_eq!(content[0]["type"], "text", "{answer}");
    let text = content[0]["text"].as_str().expect("a text").to_owned();
    (text, result["isError"].as_bool().expect("always said"))
}
