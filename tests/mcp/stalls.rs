//! Requests that need no Lisp must be answered at once, whatever else the server does.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::attach::{Client, RuntimeDirectory};
use crate::client::{DEADLINE, Scratch, Server, call_err, call_ok, evaluate_err, outcome};
use crate::hostile_code::resident;
use crate::processes::{is_alive, kill_worker, processes, wait_until, worker};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

/// The time limit for a ping, a cancellation or a question on an idle machine.
const IDLE_LIMIT: Duration = Duration::from_millis(250);
/// The factor by which a busy server may be slower than an idle server on the same machine.
const BUSY_FACTOR: u32 = 10;
/// The time limit in tests that cause a delay of several seconds if requests have to wait.
pub(crate) const BUSY_LIMIT: Duration = Duration::from_secs(1);
/// The number of requests to time.
const REQUESTS: usize = 200;

/// Returns a form of some 370 KB that lacks a parenthesis.
fn broken_form() -> String {
    let calls: String = (0..4_900)
        .map(|n| format!("    (print (list x {n} (+ x {n}) \"this is text number {n}\" 'symbol-{n}))\n"))
        .collect();
    format!("(defun broken (x)\n  (progn\n{calls}    )\n")
}

/// A busy server, an idle one for comparison, and the slowest answer of each.
struct Stopwatch {
    server: Server,
    idle: Server,
    slowest: Duration,
    slowest_idle: Duration,
    slowest_request: String,
    timed: usize,
}

impl Stopwatch {
    fn new() -> Self {
        Self {
            server: Server::ready(),
            idle: Server::ready(),
            slowest: Duration::ZERO,
            slowest_idle: Duration::ZERO,
            slowest_request: String::new(),
            timed: 0,
        }
    }

    /// Records the time of a request that was sent at `begin`.
    fn record(&mut self, begin: Instant, what: &str) {
        self.timed += 1;
        if begin.elapsed() > self.slowest {
            self.slowest = begin.elapsed();
            self.slowest_request = what.to_owned();
        }
    }

    /// Times one request of each kind. `work` describes what the server does meanwhile.
    fn time_requests(&mut self, work: &str) {
        let begin = Instant::now();
        self.idle.request("ping", json!({}));
        self.slowest_idle = self.slowest_idle.max(begin.elapsed());

        let begin = Instant::now();
        self.server.request("ping", json!({}));
        self.record(begin, &format!("a ping during {work}"));

        let begin = Instant::now();
        let waiting = self.server.post_call("evaluate-lisp", json!({"code": ":cancelled"}));
        self.server.notify("notifications/cancelled", json!({"requestId": waiting}));
        self.server.request("ping", json!({}));
        self.record(begin, &format!("a cancellation during {work}"));

        for (tool, arguments) in [
            ("describe-last-error", json!({})),
            ("get-backtrace", json!({"locals": true, "max-frames": 1000})),
            ("check-evaluation", json!({})),
            ("configure-limits", json!({})),
        ] {
            let begin = Instant::now();
            self.server.call_tool(tool, arguments);
            self.record(begin, &format!("{tool} during {work}"));
        }
    }

    /// Sends the call that `work` describes and times requests until it is answered.
    fn during(&mut self, work: &str, tool: &str, arguments: serde_json::Value) {
        let id = self.server.post_call(tool, arguments);
        loop {
            self.time_requests(work);
            if self.server.has_answered(id) {
                self.server.outcome(id);
                return;
            }
        }
    }
}

#[test]
fn pings_cancellations_and_questions_are_answered_at_once_whatever_else_runs() {
    let directory = Scratch::new();
    let broken = broken_form();
    let broken_file = directory.write("broken.lisp", &broken);
    let functions: String =
        (0..400).map(|n| format!("(defun function-{n} (x)\n  (loop for y below x collect (+ y {n})))\n")).collect();
    let loaded = directory.write("functions.lisp", &functions);
    let deep = directory
        .write("deep.lisp", "(defun deep (n)\n  (if (zerop n)\n      (error \"deep\")\n      (1+ (deep (1- n)))))\n");
    let systems = directory.join("systems");
    std::fs::create_dir_all(&systems).expect("a directory");
    for n in 0..2_000 {
        let definition = format!("(defsystem \"system-{n}\")\n{}", "; a comment of some length\n".repeat(400));
        std::fs::write(systems.join(format!("file-{n}.asd")), definition).expect("a file");
    }
    let mut stopwatch = Stopwatch::new();
    stopwatch.server.call_tool("load-system", json!({"path": deep}));
    stopwatch.server.call_tool("configure-limits", json!({"max-answer": 1_000_000}));
    let million = "(dotimes (i 20000) (format t \"~50,'0d~%\" i) (format *error-output* \"e\"))";
    let errors = "(loop repeat 300 do (handler-case (read-from-string \"(a (b\") (error ())))";
    for _ in 0..4 {
        stopwatch.during("the evaluation of a broken form", "evaluate-lisp", json!({"code": broken}));
        stopwatch.during("the loading of a broken file", "load-system", json!({"path": broken_file}));
        stopwatch.during("a record of errors", "evaluate-lisp", json!({"code": errors, "record-errors": true}));
        stopwatch.during("a large output", "evaluate-lisp", json!({"code": million}));
        stopwatch.during("a page of a large output", "check-evaluation", json!({"part": "output", "limit": 1_000_000}));
        let comment = format!("{}\n1", "; a comment\n".repeat(100_000));
        stopwatch.during("a large request", "evaluate-lisp", json!({"code": comment}));
        stopwatch.during(
            "a search for a system",
            "load-system",
            json!({"system": "no-such-system", "directory": systems}),
        );
        stopwatch.during(
            "a large value",
            "evaluate-lisp",
            json!({"code": "(make-string 1000000 :initial-element #\\x)"}),
        );
        stopwatch.during("a deep backtrace", "evaluate-lisp", json!({"code": "(deep 5000)"}));
        stopwatch.during("a compilation", "evaluate-lisp", json!({"code": functions}));
        stopwatch.during("the loading of a file", "load-system", json!({"path": loaded, "force": "all"}));
        stopwatch.during(
            "a collection",
            "evaluate-lisp",
            json!({"code": "(progn (loop repeat 20 collect (make-array 1000000)) (gc :full t))"}),
        );
    }
    stopwatch.during("a checkpoint", "checkpoint", json!({"action": "save", "name": "a"}));
    while stopwatch.timed < REQUESTS {
        stopwatch.time_requests("nothing");
    }
    let Stopwatch { slowest, slowest_idle, slowest_request, timed, .. } = stopwatch;
    println!(
        "{timed} requests; the slowest, {slowest_request}, took {slowest:?}; an idle server's ping {slowest_idle:?}"
    );
    let allowed = IDLE_LIMIT.max(slowest_idle * BUSY_FACTOR);
    assert!(slowest <= allowed, "{slowest_request} took {slowest:?}, more than {allowed:?}");
}

/// Prints characters that take six bytes each in an answer.
const PRINT_SIX_MB: &str = "(progn (write-string (make-string 990000 :initial-element (code-char 1))) 1)";

impl Client {
    /// Asserts that a ping is answered within [`BUSY_LIMIT`].
    #[track_caller]
    fn assert_ping_is_fast(&mut self, when: &str) {
        let begin = Instant::now();
        self.request("ping", &json!({}));
        assert!(begin.elapsed() <= BUSY_LIMIT, "a ping {when} took {:?}", begin.elapsed());
    }

    /// Sends calls of `evaluate-lisp` as a batch and returns the answers.
    fn evaluate_all(&mut self, calls: usize, code: &str) -> Vec<Value> {
        let call = |id: usize| {
            let params = json!({"name": "evaluate-lisp", "arguments": {"code": code}});
            json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
        };
        self.send(&(0..calls).map(call).collect());
        let answers = self.read().expect("an answer before the end");
        let Value::Array(answers) = answers else { panic!("{answers}") };
        let mut ids: Vec<_> = answers.iter().map(|answer| answer["id"].as_u64().expect("a number")).collect();
        ids.sort_unstable();
        assert!(ids.into_iter().eq(0..calls as u64), "one answer each");
        answers
    }

    /// Sends calls of `evaluate-lisp`, one per line.
    fn post_calls(&mut self, calls: usize, code: &str) {
        let params = json!({"name": "evaluate-lisp", "arguments": {"code": code}}).to_string();
        for id in 0..calls {
            self.send_line(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#));
        }
    }

    /// Returns the answers to `requests` requests, in order of arrival.
    fn answers(&mut self, requests: usize) -> Vec<Value> {
        (0..requests).map(|_| self.read().expect("an answer before the end")).collect()
    }

    fn cancel(&mut self, id: i64) {
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
    }
}

/// Starts a server whose own client does not read yet, and attaches another client.
fn unread_server_and_client(mode: Mode) -> (Server, Client) {
    let mut server = mode.start_unread(&["serve", "--socket"]);
    let socket = server.home().join(format!("XDG_RUNTIME_DIR/sbcl-mcp/{}.sock", server.pid()));
    // The socket file exists a moment before the server listens.
    wait_until("a client can attach", || UnixStream::connect(&socket).is_ok());
    let info = json!({"name": "raw", "version": "1"});
    server.post("initialize", json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}));
    let mut client = Client::connect(&socket);
    client.initialize("person");
    (server, client)
}

#[apply(both_modes)]
fn client_that_reads_nothing_delays_no_other_client(mode: Mode) {
    const CALLS: usize = 400;
    let (mut server, mut client) = unread_server_and_client(mode);
    client.evaluate("(defvar *calls* 0)");
    let code = "(progn (incf *calls*) (make-string 9000 :initial-element #\\x))";
    let ids: Vec<_> = (0..CALLS).map(|_| server.post_call("evaluate-lisp", json!({"code": code}))).collect();
    wait_until("all calls are evaluated", || {
        client.assert_ping_is_fast("beside a client that does not read");
        client.evaluate("*calls*").ends_with(&format!("=> {CALLS}"))
    });
    server.start_reading();
    for id in ids {
        assert!(!server.outcome(id).1);
    }
    server.assert_works();
}

/// Asserts that the supervisor has never used more than 160 MiB of memory.
#[track_caller]
fn assert_peak_below_160_mib(server: &Server) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("a process");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its memory");
    let kibibytes: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(kibibytes < 160 << 10, "the supervisor took {kibibytes} KiB");
}

/// Decoded JSON may take a hundred times the memory of its text.
#[test]
fn capabilities_and_metadata_of_waiting_calls_take_little_memory() {
    const CALLS: usize = 50;
    let objects = |count| vec![json!({"": 0}); count];
    let mut server = Server::start();
    let capabilities = json!({"experimental": {"x": {"y": objects(20_000)}}});
    let info = json!({"name": "raw", "version": "1"});
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": info});
    assert!(server.request("initialize", params)["result"].is_object());
    server.assert_works();
    let running = server.post_call("evaluate-lisp", json!({"code": "(sleep 100)", "timeout": 200}));
    let worker = worker(&server);
    let before = resident(worker);
    let call = json!({"name": "evaluate-lisp", "arguments": {"code": "1"}, "_meta": {"x": objects(4_000)}});
    let waiting = [(); CALLS].map(|()| server.post("tools/call", call.clone()));
    // The ping is answered after all calls before it have been read.
    server.request("ping", json!({}));
    let grown = resident(worker).saturating_sub(before);
    assert!(grown < 64 << 20, "the worker grew by {grown} bytes");
    server.notify("notifications/cancelled", json!({"requestId": running}));
    for id in waiting {
        assert_eq!(server.outcome(id), ("=> 1".to_owned(), false));
    }
    server.assert_works();
}

/// The backlog that the server keeps for a client is bounded.
#[apply(both_modes)]
fn answers_that_a_client_leaves_unread_become_errors_beyond_64_mib(mode: Mode) {
    const CALLS: usize = 40;
    let (mut server, mut client) = unread_server_and_client(mode);
    client.evaluate("(defvar *calls* 0)");
    client.call_ok("configure-limits", json!({"max-answer": 1_000_000}));
    let code = format!("(incf *calls*) {PRINT_SIX_MB}");
    let ids: Vec<_> = (0..CALLS).map(|_| server.post_call("evaluate-lisp", json!({"code": code}))).collect();
    wait_until("all calls are evaluated", || {
        client.assert_ping_is_fast("beside a client that does not read");
        client.evaluate("*calls*").ends_with(&format!("=> {CALLS}"))
    });
    // Another client's large answer arrives although large ones are queued before it.
    assert!(client.evaluate(PRINT_SIX_MB).len() > 900_000);
    if mode == Mode::Supervised {
        assert_peak_below_160_mib(&server);
    }
    server.start_reading();
    let answers: Vec<_> = ids.into_iter().map(|id| server.answer(id)).collect();
    let is_error = |answer: &&Value| answer.get("error").is_some();
    let errors = answers.iter().filter(is_error).count();
    assert!((20..35).contains(&errors), "{errors} errors");
    let error = answers.iter().find(is_error).expect("an error");
    let message = error["error"]["message"].as_str().expect("a message");
    assert!(message.contains("64 MiB of earlier answers have not reached the client"), "{message}");
    server.assert_works();
}

#[apply(both_modes)]
fn large_requests_that_wait_delay_neither_other_clients_nor_their_own_cancellations(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let (mut busy, mut client) = (runtime.attach(&server), runtime.attach(&server));
    let marker = runtime.directory.join("marker");
    let run = format!("(progn (with-open-file (s {marker:?} :direction :output)) (sleep 20))");
    let running = busy.post_call("evaluate-lisp", json!({"code": run, "timeout": 60}));
    wait_until("the evaluation runs", || marker.exists());
    let long = format!("; {}\n(+ 1 2)", "x".repeat(30_000_000));
    let waiting = [(); 3].map(|()| busy.post_call("evaluate-lisp", json!({"code": long})));
    // The ping is answered after all requests before it have been read.
    busy.request("ping", &json!({}));
    assert!(busy.unclaimed.is_empty(), "the request was not read before the evaluation ended");
    client.assert_ping_is_fast("beside large requests that wait");
    busy.assert_ping_is_fast("behind its own requests");
    busy.cancel(waiting[0]);
    busy.cancel(running);
    for id in &waiting[1..] {
        assert_eq!(outcome(&busy.answer(*id)).0, "=> 3");
    }
    client.evaluate("1");
    server.assert_works();
}

#[apply(both_modes)]
fn answer_of_more_than_64_mib_reaches_a_client_that_reads(mode: Mode) {
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    client.call_ok("configure-limits", json!({"max-answer": 1_000_000}));
    let answers = client.evaluate_all(15, PRINT_SIX_MB);
    assert!(answers.iter().all(|answer| !outcome(answer).1));
    assert_eq!(client.evaluate("1"), "=> 1");
    server.assert_works();
}

#[apply(both_modes)]
fn batch_whose_answers_are_too_large_gets_errors_and_keeps_the_image(mode: Mode) {
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    server.evaluate("(defvar *kept* (list 1))");
    server.evaluate("(setf *kept* (list 2))");
    client.call_ok("configure-limits", json!({"max-answer": 1_000_000}));
    let answers = client.evaluate_all(50, PRINT_SIX_MB);
    let errors: Vec<_> = answers.iter().filter_map(|answer| answer["error"]["message"].as_str()).collect();
    assert!((20..35).contains(&errors.len()), "{} errors", errors.len());
    assert!(errors[0].contains("128 MiB"), "{}", errors[0]);
    assert_eq!(server.evaluate("*kept*"), "=> (2)");
    assert_eq!(client.evaluate("1"), "=> 1");
}

#[apply(both_modes)]
fn large_batch_of_one_client_does_not_delay_another(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let (mut busy, mut client) = (runtime.attach(&server), runtime.attach(&server));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut slowest = Duration::ZERO;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            busy.evaluate_all(9_000, "(make-string 4000 :initial-element #\\x)");
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            let begin = Instant::now();
            client.request("ping", &json!({}));
            slowest = slowest.max(begin.elapsed());
        }
    });
    println!("the slowest ping took {slowest:?}");
    assert!(slowest <= BUSY_LIMIT, "a ping took {slowest:?}");
    server.assert_works();
}

/// More than 64 MiB then wait for the supervisor.
#[apply(both_modes)]
fn large_batches_of_four_clients_delay_no_other_client(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let mut clients: Vec<_> = (0..4).map(|_| runtime.attach(&server)).collect();
    let client = runtime.attach(&server);
    let pings = Pings::during(&runtime, client, |_| {
        let batch = (0..6_000).map(|id| json!({"jsonrpc": "2.0", "id": id, "method": "tools/list"})).collect();
        for client in &mut clients {
            client.send(&batch);
        }
        for client in &mut clients {
            assert_eq!(client.read().expect("an answer").as_array().expect("the answers to a batch").len(), 6_000);
        }
    });
    pings.assert_fast();
    server.assert_works();
}

/// Creates nested directories with `files` system definitions each, and returns the innermost.
fn nested_system_definitions(directory: &Scratch, files: usize) -> PathBuf {
    let innermost = directory.directory("a/b/c/d/e");
    for place in innermost.ancestors().take(5) {
        for n in 0..files {
            let text = format!("(defsystem \"system-{n}\")\n{}", "; a comment\n".repeat(20));
            std::fs::write(place.join(format!("file-{n}.asd")), text).expect("a file");
        }
    }
    innermost
}

#[apply(both_modes)]
fn searches_for_systems_delay_no_other_client(mode: Mode) {
    const LOADS: usize = 300;
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let (runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    let names = |count: usize| (0..count).map(|n| format!("s{n}")).collect::<Vec<_>>().join(", ");
    let batch = batch_of_searches(LOADS, &innermost);
    assert!(batch.to_string().len() < 64 << 10, "the line is sent in one piece");
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        let text = client.call_err("run-tests", json!({"system": names(600), "directory": innermost}));
        assert!(text.contains("at most 20 systems"), "{text}");
        let text = client.call_ok("run-tests", json!({"system": names(20), "directory": innermost}));
        assert!(text.contains("s19"), "{text}");
        client.send(&batch);
        assert_eq!(client.read().expect("an answer").as_array().expect("the answers to a batch").len(), LOADS);
    });
    pings.assert_fast();
    server.assert_works();
}

#[apply(both_modes)]
fn requests_behind_a_load_run_after_it(mode: Mode) {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 50);
    directory.write("a/b/last.asd", "(defsystem \"last\" :components ((:file \"last\")))");
    directory.write("a/b/last.lisp", "(defvar cl-user::*loaded* 7)");
    let mut server = mode.ready();
    let loading = server.post_call("load-system", json!({"system": "last", "directory": innermost}));
    let after = server.post_call("evaluate-lisp", json!({"code": "*loaded*"}));
    assert_eq!(server.outcome(after), ("=> 7".to_owned(), false));
    assert!(!server.outcome(loading).1);
}

/// Sets the flag when dropped, so that threads that watch the flag also end after a failed assertion.
struct StopOnDrop<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Returns a batch of calls of load-system with ids from 0, each of which searches `directory` for a system in vain.
fn batch_of_searches(calls: usize, directory: &Path) -> Value {
    let load = |id: usize| {
        let arguments = json!({"system": format!("s{id}"), "directory": directory});
        let params = json!({"name": "load-system", "arguments": arguments});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
    };
    (0..calls).map(load).collect()
}

#[apply(both_modes)]
fn pings_and_cancellations_overtake_the_slow_lines_of_their_own_client(mode: Mode) {
    const LOADS: usize = 300;
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    client.evaluate("(defvar *done* nil)");
    client.send(&batch_of_searches(LOADS, &innermost));
    let waiting = client.post_call("evaluate-lisp", json!({"code": "(push :waiting *done*)"}));
    let cancelled = client.post_call("evaluate-lisp", json!({"code": "(push :cancelled *done*)"}));
    let long = format!("; {}\n(push :long *done*)", "x".repeat(1_000_000));
    let cancelled_long = client.post_call("evaluate-lisp", json!({"code": long}));
    client.cancel(LOADS as i64 - 1);
    client.cancel(cancelled);
    client.cancel(cancelled_long);
    client.assert_ping_is_fast("behind slow lines of its client");
    assert!(client.unclaimed.is_empty(), "the slow line was answered before the ping");
    // The answer to a batch may come after that to the next line.
    let answers = loop {
        match client.read().expect("an answer to the batch") {
            Value::Array(answers) => break answers,
            other => client.unclaimed.push_back(other),
        }
    };
    assert_eq!(answers.len(), LOADS - 1, "one request of the batch is cancelled");
    assert_eq!(outcome(&client.answer(waiting)).0, "=> (:WAITING)");
    assert_eq!(client.evaluate("*done*"), "=> (:WAITING)");
    assert!(client.unclaimed.is_empty(), "a cancelled request was answered");
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

/// The other client's evaluation has a higher number than the call that waits.
#[test]
fn call_behind_a_slow_line_runs_after_another_client_resets() {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(Mode::Supervised);
    client.send(&batch_of_searches(1_000, &innermost));
    let waiting = client.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    // The ping is answered after both lines have been read.
    client.request("ping", &json!({}));
    server.evaluate("1");
    call_ok(&mut server, "reset-session", json!({}));
    let (text, is_error) = outcome(&client.answer(waiting));
    assert!(!is_error && text.ends_with("=> 3"), "{text}");
}

#[apply(both_modes)]
fn server_ends_while_it_handles_a_slow_line(mode: Mode) {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let mut server = mode.ready();
    server.send(&batch_of_searches(1_000, &innermost));
    server.request("ping", json!({}));
    let begin = Instant::now();
    assert!(server.finish().status.success());
    assert!(begin.elapsed() < Duration::from_secs(5), "the end took {:?}", begin.elapsed());
}

/// Without a supervisor, nothing else answers the lines that the process has read.
#[apply(both_modes)]
fn requests_behind_a_slow_line_are_answered_when_the_server_ends(mode: Mode) {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    let batch = batch_of_searches(1_000, &innermost);
    server.send(&batch);
    client.send(&batch);
    let own = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    let attached = client.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    // The pings are answered after the lines before them have been read.
    server.request("ping", json!({}));
    client.request("ping", &json!({}));
    server.close();
    for answer in [client.answer(attached), server.answer(own)] {
        assert_eq!(answer["error"]["message"], "the server is shutting down; the request was not finished", "{answer}");
    }
    server.finish();
}

/// To decode these lines takes longer than the time that is left at the end.
#[apply(both_modes)]
fn long_requests_behind_a_slow_line_are_answered_when_the_server_ends(mode: Mode) {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let mut server = mode.ready();
    server.send(&batch_of_searches(1_000, &innermost));
    let values = "0,".repeat(900_000);
    let ids = 10_001..10_010;
    for id in ids.clone() {
        let arguments = format!(r#"{{"code":"1","values":[{values}0]}}"#);
        let params = format!(r#"{{"name":"evaluate-lisp","arguments":{arguments}}}"#);
        let request = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#);
        server.send_raw(format!("{request}\n").as_bytes());
    }
    let last = server.post_call("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    server.request("ping", json!({}));
    server.close();
    for id in ids.chain([last]) {
        let answer = server.answer(id);
        assert_eq!(answer["error"]["message"], "the server is shutting down; the request was not finished", "{answer}");
    }
    server.finish();
}

#[apply(both_modes)]
fn long_names_and_lists_are_refused_at_once_with_their_limits(mode: Mode) {
    let directory = Scratch::new();
    let innermost = nested_system_definitions(&directory, 300);
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    let (name, list) = ("A".repeat(8 << 20), "a,".repeat(4 << 20));
    let keys: serde_json::Map<_, _> = (0..300_000).map(|n| (format!("key-{n}"), json!(1))).collect();
    for (tool, arguments, limit) in [
        ("load-system", json!({"system": name, "directory": innermost}), "a string of at most 4096 bytes"),
        ("load-system", json!({"path": name}), "a string of at most 4096 bytes"),
        ("run-tests", json!({"name": name}), "a string of at most 4096 bytes"),
        ("run-tests", json!({"system": list}), "an array of at most 1000 strings"),
        ("trace-calls", json!({"code": "1", "functions": list}), "an array of at most 1000 strings"),
        ("trace-calls", json!({"code": "1", "functions": vec!["a"; 1 << 19]}), "an array of at most 1000 strings"),
        ("evaluate-lisp", Value::Object(keys), "at most 100 arguments"),
    ] {
        let call = client.post_call(tool, arguments);
        let begin = Instant::now();
        client.assert_ping_is_fast(&format!("behind a long call of {tool}"));
        let (text, is_error) = outcome(&client.answer(call));
        assert!(is_error && text.contains(limit) && text.len() < 400, "{tool}: {text}");
        // The line itself must be parsed.
        assert!(begin.elapsed() < Duration::from_secs(3), "{tool} took {:?}", begin.elapsed());
    }
    let answer = client.request(&name, &json!({}));
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.starts_with("unknown method \"AAA") && message.len() < 200, "{message}");
    server.assert_works();
}

/// The slowest ping of a client while other clients keep the server busy, and that of a client of an idle server.
struct Pings {
    slowest: Duration,
    slowest_idle: Duration,
}

impl Pings {
    /// Lets `client` ping its server, and another client an idle server, until `work` is done. `work` gets the idle
    /// server, to kill its worker whenever it kills the busy server's.
    fn during(runtime: &RuntimeDirectory, client: Client, work: impl FnOnce(&Server)) -> Self {
        let idle = runtime.server(&[]);
        let mut clients = [client, runtime.attach(&idle)];
        let stop = std::sync::atomic::AtomicBool::new(false);
        let [slowest, slowest_idle] = std::thread::scope(|scope| {
            let pinging = clients.each_mut().map(|client| {
                let stop = &stop;
                scope.spawn(move || {
                    let mut slowest = Duration::ZERO;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let begin = Instant::now();
                        client.request("ping", &json!({}));
                        slowest = slowest.max(begin.elapsed());
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    slowest
                })
            });
            let stop_pings = StopOnDrop(&stop);
            work(&idle);
            drop(stop_pings);
            pinging.map(|pinging| pinging.join().expect("all are answered"))
        });
        println!("the slowest ping took {slowest:?}, that of an idle server {slowest_idle:?}");
        Self { slowest, slowest_idle }
    }

    /// Asserts that no ping waited for the other clients' work. On a slow machine, the idle server's pings raise the
    /// limit.
    #[track_caller]
    fn assert_fast(&self) {
        self.assert_within(BUSY_LIMIT);
    }

    /// Asserts that no ping took longer than `limit` because of the other clients' work.
    #[track_caller]
    fn assert_within(&self, limit: Duration) {
        let Self { slowest, slowest_idle } = *self;
        assert!(slowest <= limit.max(slowest_idle * 5), "a ping took {slowest:?}, and {slowest_idle:?} elsewhere");
    }
}

/// Attaches a client and starts an evaluation that runs for `seconds`.
fn busy_client(runtime: &RuntimeDirectory, server: &Server, seconds: u32) -> Client {
    let mut busy = runtime.attach(server);
    let marker = runtime.directory.join("marker");
    let code = format!("(progn (with-open-file (s {marker:?} :direction :output)) (sleep {seconds}))");
    busy.post_call("evaluate-lisp", json!({"code": code, "timeout": 60}));
    wait_until("the evaluation runs", || marker.exists());
    busy
}

#[apply(both_modes)]
fn tools_for_a_held_evaluation_are_refused_at_once_while_another_client_evaluates(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let _busy = busy_client(&runtime, &server, 60);
    let begin = Instant::now();
    for (tool, arguments) in [
        ("abort-evaluation", json!({})),
        ("invoke-restart", json!({"restart": 1})),
        ("resume-from-frame", json!({"frame": 0})),
        ("eval-in-frame", json!({"frame": 0, "code": "1"})),
    ] {
        let text = call_err(&mut server, tool, arguments);
        assert!(text.starts_with("No evaluation is held"), "{tool}: {text}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "they waited {:?}", begin.elapsed());
}

/// A reset gives the cleanup form 700 ms. On a slow machine, several attempts may be needed to ping within this time.
#[test]
fn pings_are_answered_while_a_reset_waits_for_cleanup_forms() {
    let (runtime, mut server, mut other) = RuntimeDirectory::with_client(Mode::Supervised);
    let unwinding = runtime.directory.join("unwinding");
    let cleanup = format!("(loop)) (with-open-file (s {unwinding:?} :direction :output)) (sleep 5))");
    let answered_by_the_same_worker = (0..5).any(|_| {
        let before = worker(&server);
        server.post_running("(unwind-protect (progn", &cleanup, 60.0);
        let reset = server.post_call("reset-session", json!({}));
        wait_until("the cleanup form runs", || std::fs::remove_file(&unwinding).is_ok());
        // The next image handles these lines in their order.
        let cancelled = other.post_call("evaluate-lisp", json!({"code": "(defvar *cancelled* nil)"}));
        let kept = other.post_call("evaluate-lisp", json!({"code": "(boundp '*cancelled*)"}));
        other.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": cancelled}}));
        other.request("ping", &json!({}));
        let is_same = is_alive(before);
        let (text, is_error) = outcome(&other.answer(kept));
        assert!(!is_error && text.ends_with("=> NIL"), "{text}");
        assert!(server.outcome(reset).0.contains("Session reset."));
        is_same
    });
    assert!(answered_by_the_same_worker, "pings wait for the next image");
}

/// Returns requests that change nothing, as methods with their parameters.
fn reading_requests() -> Vec<(&'static str, Value)> {
    let calls = [
        ("describe-last-error", json!({})),
        ("describe-last-error", json!({"list": 5})),
        ("get-backtrace", json!({})),
        ("check-evaluation", json!({})),
        ("check-evaluation", json!({"part": "output"})),
        ("check-evaluation", json!({"id": "none"})),
        ("list-definitions", json!({"limit": 5})),
        ("describe-symbol", json!({"name": "car"})),
        ("checkpoint", json!({})),
        ("no-such-tool", json!({})),
    ];
    let calls = calls.map(|(tool, arguments)| ("tools/call", json!({"name": tool, "arguments": arguments})));
    calls.into_iter().chain([("resources/list", json!({}))]).collect()
}

/// Calls a tool that replaces the image. Meanwhile, `client` sends requests that change nothing. Returns the time of the
/// call, and the time of the slowest of these requests.
fn slowest_read_during(
    server: &mut Server,
    client: &mut Client,
    tool: &str,
    arguments: &Value,
) -> (Duration, Duration) {
    let begin = Instant::now();
    let replacing = server.post_call(tool, arguments.clone());
    let own = server.post_call("describe-last-error", json!({}));
    let mut slowest = Duration::ZERO;
    while !server.has_answered(replacing) {
        for (method, params) in reading_requests() {
            let sent = Instant::now();
            let answer = client.request(method, &params);
            let time = sent.elapsed();
            if time > slowest {
                slowest = time;
                println!("{method} {params} took {time:?}");
            }
            if params["name"] == "describe-last-error" {
                assert!(outcome(&answer).0.contains("other"), "{answer}");
            }
        }
    }
    let time = begin.elapsed();
    let (text, is_error) = server.outcome(replacing);
    assert!(!is_error, "{text}");
    let (text, _) = server.outcome(own);
    assert!(
        text.starts_with("No error information"),
        "the client that replaced the image reads from the old one: {text}"
    );
    (time, slowest)
}

/// The evaluation does not end within the 700 ms that the server waits before it replaces the image. On a busy machine,
/// several attempts may be needed.
#[rstest::rstest]
#[case::cleanup_form_and_reset("(unwind-protect (progn", "(sleep 60)) (sleep 5))", "reset-session", json!({}))]
#[case::without_interrupts_and_reset("(sb-sys:without-interrupts", "(sleep 5))", "reset-session", json!({}))]
#[case::cleanup_form_and_restore(
    "(unwind-protect (progn",
    "(sleep 60)) (sleep 5))",
    "checkpoint",
    json!({"action": "restore", "name": "x"})
)]
fn requests_that_change_nothing_do_not_wait_for_the_evaluation_that_a_reset_ends(
    #[case] before: &str,
    #[case] after: &str,
    #[case] tool: &str,
    #[case] arguments: Value,
) {
    let (_runtime, mut server, mut client) = RuntimeDirectory::with_client(Mode::Supervised);
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    client.call_err("evaluate-lisp", json!({"code": "(error \"other\")"}));
    let is_fast = (0..3).any(|_| {
        evaluate_err(&mut server, "(error \"own\")");
        let (_, slowest_idle) = slowest_read_during(&mut server, &mut client, tool, &arguments);
        evaluate_err(&mut server, "(error \"own\")");
        server.post_running(before, after, 60.0);
        let (time, slowest) = slowest_read_during(&mut server, &mut client, tool, &arguments);
        assert!(time >= Duration::from_millis(700), "the server waited only {time:?} for the evaluation");
        slowest <= IDLE_LIMIT.max(slowest_idle * 3)
    });
    assert!(is_fast, "requests wait for the next image");
}

/// The answers to calls that wait for the same evaluation are rendered one after the other on a helper thread. On a slow
/// machine, several attempts may be needed to ping meanwhile.
#[test]
fn ping_is_answered_while_a_reset_waits_for_the_rendering_of_large_answers() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let marker = runtime.directory.join("marker");
    call_ok(&mut server, "configure-limits", json!({"max-output": 10_000_000}));
    let print = "(write-string (make-string 9000000 :initial-element #\\[))";
    let code = format!("(progn {print} (loop until (probe-file {marker:?}) do (sleep 0.001)))");
    let answered_by_the_same_worker = (0..5).any(|_| {
        call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
        let waiting: Vec<_> = (0..20).map(|_| server.post_call("check-evaluation", json!({"wait": 60}))).collect();
        // This call is answered once all calls before it wait.
        call_ok(&mut server, "configure-limits", json!({}));
        std::fs::write(&marker, "").expect("a file");
        server.answer(waiting[0]);
        let reset = server.post_call("reset-session", json!({}));
        server.request("ping", json!({}));
        let is_same = !server.has_answered(reset);
        assert!(server.outcome(reset).0.contains("Session reset."));
        std::fs::remove_file(&marker).expect("the file exists");
        is_same
    });
    assert!(answered_by_the_same_worker, "pings wait for the next image");
}

#[test]
fn large_requests_that_wait_when_the_image_is_lost_delay_no_other_client() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let _busy = busy_client(&runtime, &server, 60);
    let mut clients = [(); 4].map(|()| runtime.attach(&server));
    let code = format!("#| {} |# 7", "a\\\"".repeat(10_000_000));
    let waiting = clients.each_mut().map(|client| client.post_call("evaluate-lisp", json!({"code": code})));
    // The pings are answered after all requests before them have been read.
    clients.iter_mut().for_each(|client| drop(client.request("ping", &json!({}))));
    let pings = Pings::during(&runtime, runtime.attach(&server), |idle| {
        kill_worker(idle);
        kill_worker(&server);
        for (client, id) in clients.iter_mut().zip(waiting) {
            assert_eq!(outcome(&client.answer(id)).0.lines().last(), Some("=> 7"));
        }
    });
    pings.assert_fast();
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

/// The supervisor must learn whether these lines require an answer, and whether they cancel a request.
#[test]
fn large_notifications_that_mention_ids_and_cancellations_delay_no_other_client() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let mut clients = [(); 2].map(|()| runtime.attach(&server));
    let objects = vec![r#"{"":0}"#; 140_000].join(",");
    let params = format!(r#"{{"id":[{objects}],"reason":"cancelled"}}"#);
    let line = format!(r#"{{"jsonrpc":"2.0","method":"notifications/x","params":{params}}}"#);
    assert!(line.len() < 1 << 20, "the supervisor does not parse longer lines");
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        for client in &mut clients {
            (0..50).for_each(|_| client.send_line(&line));
        }
        // The calls are answered after all notifications before them have been handled.
        clients.iter_mut().for_each(|client| drop(client.evaluate("1")));
    });
    pings.assert_fast();
    server.assert_works();
}

#[rstest::rstest]
#[case::while_they_wait(false)]
#[case::when_the_image_is_lost(true)]
fn many_requests_of_some_clients_delay_no_other_client(#[case] lost: bool) {
    const REQUESTS: usize = 1_500;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let _busy = busy_client(&runtime, &server, if lost { 60 } else { 2 });
    let mut clients = [(); 8].map(|()| runtime.attach(&server));
    let code = format!("(length \"{}\")", "a".repeat(60_000));
    let pings = Pings::during(&runtime, runtime.attach(&server), |idle| {
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| client.post_calls(REQUESTS, &code));
            }
        });
        if lost {
            kill_worker(idle);
            kill_worker(&server);
        }
        for client in &mut clients {
            for answer in client.answers(REQUESTS) {
                assert_eq!(outcome(&answer).0.lines().last(), Some("=> 60000"));
            }
        }
    });
    pings.assert_fast();
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

#[test]
fn clients_that_send_many_blank_lines_delay_no_other_client() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let mut clients = [(); 8].map(|()| runtime.attach(&server));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| {
                    // After a long line, the supervisor reads more bytes at a time.
                    client.send_line(&" ".repeat(900_000));
                    (0..24).for_each(|_| client.send_line(&"\n".repeat(1 << 17)));
                    client.request("ping", &json!({}));
                });
            }
        });
    });
    pings.assert_within(IDLE_LIMIT);
    assert_peak_below_160_mib(&server);
    server.assert_works();
}

/// The supervisor has the lines, except for their ends, before the pings begin.
#[rstest::rstest]
#[case::over_the_limit((64 << 20) - 200, 300)]
#[case::below_the_limit(60 << 20, 0)]
fn long_lines_that_end_at_the_same_time_delay_no_other_client(#[case] begun: usize, #[case] rest: usize) {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let mut clients = [(); 8].map(|()| runtime.attach(&server));
    let mut beginning = br#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":""#.to_vec();
    beginning.resize(begun, b'x');
    clients.iter_mut().for_each(|client| client.send_raw(&beginning));
    let end = format!("{}\"}}}}\n", "x".repeat(rest));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        clients.iter_mut().for_each(|client| client.send_raw(end.as_bytes()));
        for client in &mut clients {
            assert_eq!(client.answer(1)["error"].is_object(), begun + rest > 64 << 20);
        }
    });
    pings.assert_within(IDLE_LIMIT);
    server.assert_works();
}

/// Attaches 14 clients, each of which sends 9,900 calls with this `_meta` that wait for another client's evaluation.
fn clients_with_waiting_calls(runtime: &RuntimeDirectory, server: &Server, meta: &Value) -> Vec<Client> {
    let mut clients: Vec<_> = (0..14).map(|_| runtime.attach(server)).collect();
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": "1"}, "_meta": meta});
    let call = |id: usize| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
    // The client numbers its other requests from 1.
    let batch = (1_000_000..1_009_900).map(call).collect::<Value>().to_string();
    for client in &mut clients {
        client.send_line(&batch);
    }
    // A call behind the batch is answered once all calls of the batch wait.
    for client in &mut clients {
        client.call_ok("configure-limits", json!({}));
    }
    clients
}

/// Each of the calls has a timer for its progress.
#[test]
fn progress_of_many_waiting_calls_delays_no_other_client() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let server = runtime.server(&[]);
    let _busy = busy_client(&runtime, &server, 60);
    let mut clients = clients_with_waiting_calls(&runtime, &server, &json!({"progressToken": 1}));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        for client in &mut clients {
            client.request("ping", &json!({}));
        }
    });
    pings.assert_within(IDLE_LIMIT);
}

#[test]
fn clients_that_leave_many_waiting_calls_delay_no_other_client() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let _busy = busy_client(&runtime, &server, 60);
    let clients = clients_with_waiting_calls(&runtime, &server, &json!({}));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        drop(clients);
        wait_until("their connections have ended", || {
            let status = server.request("sbcl-mcp/status", json!({}));
            // The server's own client, the busy client and the client that pings are left.
            status["result"]["clients"].as_array().expect("names").len() == 3
        });
    });
    pings.assert_within(IDLE_LIMIT);
}

/// The threads that hold evaluations look for requests of their clients, and each call is one more request to search.
#[test]
fn waiting_calls_beside_held_evaluations_delay_no_other_client() {
    const CALLS: usize = 5_000;
    const CALLS_PER_LINE: usize = 16;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let server = runtime.server(&[]);
    let mut holders = [(); 7].map(|()| runtime.attach(&server));
    for holder in &mut holders {
        holder.call_err("evaluate-lisp", json!({"code": "(error \"held\")", "on-error": "debug"}));
    }
    let _busy = busy_client(&runtime, &server, 60);
    let mut clients = [(); 7].map(|()| runtime.attach(&server));
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": "1"}});
    let call = |id: usize| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
    // The client's other requests have lower numbers.
    let lines = (1_000_000..1_000_000 + CALLS).step_by(CALLS_PER_LINE);
    let batches: Vec<Value> = lines.map(|first| (first..first + CALLS_PER_LINE).map(call).collect()).collect();
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| {
                    for batch in &batches {
                        client.send(batch);
                    }
                    // This call is answered once all calls before it wait.
                    client.call_ok("configure-limits", json!({}));
                });
            }
        });
    });
    pings.assert_within(IDLE_LIMIT);
}

#[rstest::rstest]
#[case::during_an_evaluation(false)]
#[case::during_a_restore(true)]
fn reset_that_ends_many_waiting_calls_delays_no_other_client(#[case] is_restoring: bool) {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let [unwinding, defined] = ["unwinding", "defined"].map(|name| runtime.directory.join(name));
    // The image is not replaced until the cleanup form has had 700 ms.
    let run = format!("(unwind-protect (sleep 60) (with-open-file (s {unwinding:?} :direction :output)) (sleep 5))");
    if is_restoring {
        let define = format!("(close (open {defined:?} :direction :output))");
        server.evaluate(&format!("(defvar *slow* (if (probe-file {defined:?}) {run} {define}))"));
        kill_worker(&server);
    } else {
        server.post_running("", &run, 60.0);
    }
    let mut clients = clients_with_waiting_calls(&runtime, &server, &json!({}));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        clients[0].post_call("reset-session", json!({}));
        wait_until("the evaluation unwinds", || unwinding.exists());
        clients[1].request("ping", &json!({}));
    });
    pings.assert_within(IDLE_LIMIT);
    // The reset is answered after the calls that it has ended.
    let ended = clients[0].read().expect("the answers to the batch");
    assert_eq!(ended.as_array().map(Vec::len), Some(9_900));
    let reset = clients[0].read().expect("the answer to the reset");
    assert!(outcome(&reset).0.contains("Session reset."), "{reset}");
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

/// Each request is a line of 60 bytes, and each answer takes 30 KB.
#[apply(both_modes)]
fn many_small_requests_with_large_answers_delay_no_other_client(mode: Mode) {
    const REQUESTS: usize = 2_000;
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let mut clients = [(); 6].map(|()| runtime.attach(&server));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        for client in &mut clients {
            for _ in 0..REQUESTS {
                client.post("tools/list", &json!({}));
            }
        }
        for client in &mut clients {
            client.answers(REQUESTS);
        }
    });
    pings.assert_fast();
    server.assert_works();
}

/// Showing the output takes time for each of its characters, each of which could begin a marker.
#[apply(both_modes)]
fn large_outputs_that_are_shown_again_delay_no_other_client(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    call_ok(&mut server, "configure-limits", json!({"max-output": 10_000_000}));
    server.evaluate("(progn (write-string (make-string 9000000 :initial-element #\\[)) nil)");
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        for arguments in [json!({"wait": 1}), json!({"part": "output", "from": 8_000_000})] {
            let calls: Vec<_> = (0..20).map(|_| server.post_call("check-evaluation", arguments.clone())).collect();
            for call in calls {
                assert!(!server.outcome(call).1);
            }
        }
    });
    pings.assert_fast();
}

/// Each answer shows the output that a thread has printed since the answer before.
#[apply(both_modes)]
fn output_of_a_thread_in_answers_to_background_calls_delays_no_other_client(mode: Mode) {
    // More answers of 6 MB than fit into 64 MiB would be dropped if the client read them too slowly.
    const CALLS: usize = 8;
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    call_ok(&mut server, "configure-limits", json!({"max-output": 10_000_000, "max-answer": 1_000_000}));
    server.evaluate(
        "(defvar *text* (make-string 1000000 :initial-element (code-char 1)))
         (defvar *printer* (sb-thread:make-thread (lambda () (loop (write-string *text*) (sleep 0.001)))))",
    );
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        let arguments = json!({"code": "(sb-thread:thread-alive-p *printer*)", "background": true});
        let calls = [(); CALLS].map(|()| server.post_call("evaluate-lisp", arguments.clone()));
        for call in calls {
            let answer = server.answer(call);
            assert!(answer.get("error").is_none() && !outcome(&answer).1, "{}", answer["error"]);
        }
    });
    pings.assert_fast();
    // The answer may also contain output of the thread.
    assert!(server.evaluate("(+ 1 2)").contains("=> 3"));
}

#[apply(both_modes)]
fn batches_that_show_a_large_error_delay_no_ping(mode: Mode) {
    let (runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    client.call_err("evaluate-lisp", json!({"code": LARGE_ERROR}));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        for (tool, arguments, calls, max_answer) in [
            ("describe-last-error", json!({}), 600, 9_500),
            ("get-backtrace", json!({"locals": true, "max-frames": 1000}), 300, 1_000_000),
        ] {
            client.call_ok("configure-limits", json!({"max-answer": max_answer}));
            let params = json!({"name": tool, "arguments": arguments});
            let call = |id: usize| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
            let batch: Value = (0..calls).map(call).collect();
            assert!(batch.to_string().len() < 64 << 10, "the line is sent in one piece");
            client.send(&batch);
            client.assert_ping_is_fast(&format!("behind a batch of {calls} calls of {tool}"));
            let answers = client.unclaimed.pop_front().unwrap_or_else(|| client.read().expect("an answer"));
            assert_eq!(answers.as_array().expect("the answers to a batch").len(), calls);
        }
    });
    pings.assert_fast();
    server.assert_works();
}

/// The answers, and the reports to the supervisor, are too short to be sent in parts.
#[apply(both_modes)]
fn thousands_of_errors_delay_no_other_client(mode: Mode) {
    const CALLS: usize = 3_000;
    let (runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        client.post_calls(CALLS, "(error (make-string 9000 :initial-element (code-char 1)))");
        client.answers(CALLS);
    });
    pings.assert_fast();
    server.assert_works();
}

/// All waits end at the same time. The answers of 54 KB are too short to be sent in parts.
#[apply(both_modes)]
fn thousands_of_waits_for_an_evaluation_delay_no_other_client(mode: Mode) {
    const CALLS: usize = 600;
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let end = server.home().join("end");
    let code =
        format!("(loop until (probe-file {end:?}) do (sleep 0.01)) (make-string 9000 :initial-element (code-char 1))");
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
    let mut clients = [(); 12].map(|()| runtime.attach(&server));
    for client in &mut clients {
        for _ in 0..CALLS {
            client.post_call("check-evaluation", json!({"id": 1, "wait": 600}));
        }
        // This call is handled after the calls before it.
        client.call_ok("check-evaluation", json!({"id": 1, "part": "output"}));
    }
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        std::fs::write(&end, "").unwrap();
        for client in &mut clients {
            client.answers(CALLS);
        }
    });
    pings.assert_fast();
    server.assert_works();
}

/// A client's calls are handled in order, so the answers do not depend on the evaluation behind them.
#[test]
fn many_calls_of_get_backtrace_delay_no_ping() {
    const CALLS: usize = 60;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    call_ok(&mut server, "configure-limits", json!({"max-answer": 1_000_000}));
    let mut clients = [(); 4].map(|()| runtime.attach(&server));
    for client in &mut clients {
        client.call_err("evaluate-lisp", json!({"code": LARGE_ERROR}));
    }
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        let requests = clients.each_mut().map(|client| {
            let arguments = json!({"locals": true, "max-frames": 1000});
            let calls = [(); CALLS].map(|()| client.post_call("get-backtrace", arguments.clone()));
            (calls, client.post_call("evaluate-lisp", json!({"code": "1"})))
        });
        for client in &mut clients {
            client.assert_ping_is_fast("behind calls of get-backtrace");
        }
        for (client, (calls, evaluation)) in clients.iter_mut().zip(requests) {
            for call in calls {
                let answer = client.answer(call);
                // While a client leaves too many answers unread, its answers become errors.
                assert!(answer.get("error").is_some() || outcome(&answer).0.contains("SIMPLE-ERROR"));
            }
            client.answer(evaluation);
        }
    });
    pings.assert_fast();
    server.assert_works();
}

/// The progress of an evaluation of a person has all of its output, here as 59 MB of JSON.
#[apply(both_modes)]
fn large_output_of_a_person_is_reported_in_parts_and_delays_no_other_client(mode: Mode) {
    const CHARACTERS: usize = 9_900_000;
    let (runtime, mut server, mut client) = RuntimeDirectory::with_client(mode);
    client.call_ok("configure-limits", json!({"max-output": 10_000_000}));
    let end = runtime.directory.join("end");
    let print = format!("(write-string (make-string {CHARACTERS} :initial-element (code-char 1)))");
    let code = format!("(progn {print} (finish-output) (loop until (probe-file {end:?}) do (sleep 0.01)))");
    let params = json!({
        "name": "evaluate-lisp",
        "arguments": {"code": code, "timeout": 60},
        "_meta": {"sbcl-mcp/person": true, "progressToken": 1},
    });
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        let evaluation = client.post("tools/call", &params);
        let mut reported = 0;
        while reported < CHARACTERS {
            let report = client.read().expect("a report");
            let message = report["params"]["message"].as_str().expect("a message");
            assert_eq!(report["params"]["_meta"]["sbcl-mcp/output-from"], reported);
            assert!(message.len() <= 64 << 10 && message.chars().all(|character| character == '\u{1}'));
            reported += message.len();
        }
        std::fs::write(&end, "").expect("a file");
        assert!(!outcome(&client.answer(evaluation)).1);
    });
    pings.assert_within(IDLE_LIMIT);
    server.assert_works();
}

/// The time for a defining form does not depend on the length of the text before it.
#[test]
fn long_comment_before_many_definitions_is_not_read_for_each_of_them() {
    let mut server = Server::ready();
    let mut time = |forms: usize| {
        let forms: String = (0..forms).map(|form| format!("(declaim (special *v{form}*))\n")).collect();
        let code = format!("#|{}|#\n{forms}", "x".repeat(10_000_000));
        let begin = Instant::now();
        call_ok(&mut server, "evaluate-lisp", json!({"code": code, "timeout": 120}));
        begin.elapsed()
    };
    let (one, many) = (time(1), time(1_000));
    assert!(many < one * 3 + Duration::from_secs(3), "one form: {one:?}, many forms: {many:?}");
}

/// The form is copied for the session's definitions.
#[apply(both_modes)]
fn long_defining_form_delays_no_other_client(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let server = runtime.server(&["--heap", "4G"]);
    let mut client = runtime.attach(&server);
    let code = format!("(defun long-text () \"{}\")", "x".repeat(40 << 20));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        client.call_ok("evaluate-lisp", json!({"code": code, "timeout": 120}));
    });
    pings.assert_within(IDLE_LIMIT);
}

/// Forms that could not be restored, or were dropped to save space, are listed until other forms define their names.
#[rstest::rstest]
#[case::that_were_dropped_to_save_space(true)]
#[case::that_failed_in_a_restore(false)]
fn missing_names_delay_neither_further_definitions_nor_pings(#[case] are_dropped: bool) {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let file = runtime.directory.join("fail");
    // The dropped forms that are kept take at most 1 MiB.
    let length = if are_dropped { 180 } else { 950 };
    let form = |form: usize| {
        format!(
            "(progn (when (probe-file {file:?}) (error \"not again\"))
                    (dotimes (n 50) (eval (list 'defvar (intern (format nil \"{form}-~{length},'0d\" n)) 1))))\n"
        )
    };
    let forms: String = (0..102).map(form).collect();
    call_ok(&mut server, "evaluate-lisp", json!({"code": forms, "timeout": 60}));
    if are_dropped {
        // The definitions may take 16 MiB.
        for number in 0..4 {
            let code = format!("(progn #|{}|# (defvar *large-{number}* 1))", "x".repeat(5_000_000));
            call_ok(&mut server, "evaluate-lisp", json!({"code": code, "timeout": 60}));
        }
    } else {
        std::fs::write(&file, "").expect("a file");
        kill_worker(&server);
        let restored = server.evaluate("1");
        assert!(restored.contains("SIMPLE-ERROR: not again"), "{restored}");
    }
    let further: String = (0..5_000).map(|number| format!("(defvar x{number} 1)\n")).collect();
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        call_ok(&mut server, "evaluate-lisp", json!({"code": further, "timeout": 10}));
    });
    // Searching all names for each definition would take seconds.
    assert!(pings.slowest <= BUSY_LIMIT, "a ping took {:?}", pings.slowest);
}

/// The output changes between stdout and stderr after each character, so that its order takes four times as many bytes as
/// its text.
#[test]
fn pages_of_the_output_of_a_running_evaluation_delay_no_other_client() {
    const CHARACTERS: usize = 10_000_000;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    call_ok(&mut server, "configure-limits", json!({"max-output": CHARACTERS}));
    let print = "(write-char #\\X out) (write-char #\\Y err)";
    server.evaluate(&format!(
        "(progn (defun print-both (&aux (out *standard-output*) (err *error-output*))
                  (dotimes (i {}) {print})
                  (finish-output))
                (compile 'print-both))",
        CHARACTERS / 2
    ));
    let arguments = json!({"code": "(progn (print-both) (sleep 60))", "background": true});
    let started = call_ok(&mut server, "evaluate-lisp", arguments);
    let (_, id) = started.split_once("Evaluation ").expect("a number");
    let id: u64 = id.split_whitespace().next().and_then(|id| id.parse().ok()).expect("a number");
    wait_until("all is printed", || {
        call_ok(&mut server, "check-evaluation", json!({"id": id})).contains(&CHARACTERS.to_string())
    });
    let mut clients = [(); 12].map(|()| runtime.attach(&server));
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        let page = json!({"id": id, "part": "output", "from": CHARACTERS - 2, "limit": 2});
        let calls =
            clients.each_mut().map(|client| [(); 2].map(|()| client.post_call("check-evaluation", page.clone())));
        for (client, calls) in clients.iter_mut().zip(calls) {
            for call in calls {
                let (text, is_error) = outcome(&client.answer(call));
                assert!(!is_error && text.contains("XY"), "{text}");
            }
        }
    });
    pings.assert_within(IDLE_LIMIT);
}

/// Each of the other clients gets a notice about the definition.
#[apply(both_modes)]
fn definition_of_a_symbol_with_a_very_long_name_delays_no_other_client(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let mut clients = [(); 12].map(|()| runtime.attach(&server));
    let name = "(make-string 20000000 :initial-element #\\A :element-type 'base-char)";
    let code = format!("(progn (eval (list 'defvar (intern {name}) 1)) nil)");
    let pings = Pings::during(&runtime, runtime.attach(&server), |_| {
        call_ok(&mut server, "evaluate-lisp", json!({"code": code, "timeout": 120}));
    });
    pings.assert_within(IDLE_LIMIT);
    for client in &mut clients {
        let text = client.evaluate("1");
        assert!(text.starts_with("[notice]\n") && text.contains(" defined AAAA"), "{} bytes", text.len());
        assert!(text.chars().count() < 3_000, "{} bytes", text.len());
    }
}

/// Signals an error of some 3 MB as JSON: its message and the arguments of its frames are control characters.
const LARGE_ERROR: &str = r#"
(labels ((f (n a b c d e g h)
           (if (= n 0)
               (error "~a" (make-string 9000 :initial-element (code-char 1)))
               (list (f (1- n) a b c d e g h)))))
  (let ((s (make-string 150 :initial-element (code-char 1))))
    (f 900 s s s s s s s)))"#;

#[test]
fn large_errors_of_a_persistent_session_delay_no_other_client() {
    const ERRORS: usize = 20;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&["--session", "large"]);
    let join = || {
        let mut client = Client::connect(&runtime.directory.join("sbcl-mcp/large.sock"));
        client.initialize("person");
        client
    };
    let mut clients: Vec<_> = (0..15).map(|_| join()).collect();
    let pings = Pings::during(&runtime, join(), |_| {
        for client in &mut clients {
            client.post_calls(ERRORS, LARGE_ERROR);
        }
        for client in &mut clients {
            assert!(client.answers(ERRORS).iter().all(|answer| outcome(answer).1));
        }
    });
    pings.assert_fast();
    kill_worker(&server);
    // The next image gets only part of the errors.
    let history = clients[7].call_ok("describe-last-error", json!({"list": 200}));
    assert!((10..=ERRORS).contains(&history.matches("SIMPLE-ERROR").count()), "{history}");
    let error = clients[7].call_ok("get-backtrace", json!({}));
    assert!(error.contains("LABELS F"), "{error}");
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

/// Stops all Lisp threads for three seconds, as the collection of a large heap does, and creates a directory once they
/// have stopped. `lisp/core/checkpoint.lisp` stops threads in the same way.
const STOP_THE_WORLD: &str = r#"
(defun stop-the-world (begun after)
  (let ((path (sb-ext:string-to-octets begun :null-terminate t)))
    (sb-sys:with-pinned-objects (path)
      (symbol-macrolet ((collecting (sb-alien:extern-alien "gc_active_p" (sb-alien:boolean 8))))
        (sb-sys:without-gcing
          (sb-alien:alien-funcall (sb-alien:extern-alien "try_acquire_gc_lock" (function sb-alien:int)))
          (sb-alien:alien-funcall (sb-alien:extern-alien "gc_stop_the_world" (function sb-alien:void)))
          (setf collecting t)
          (sb-alien:alien-funcall
           (sb-alien:extern-alien "mkdir" (function sb-alien:int sb-sys:system-area-pointer sb-alien:int))
           (sb-sys:vector-sap path) #o700)
          (sb-alien:alien-funcall (sb-alien:extern-alien "sleep" (function sb-alien:int sb-alien:int)) 3)
          (setf collecting nil)
          (sb-alien:alien-funcall (sb-alien:extern-alien "release_gc_lock" (function sb-alien:void)))
          (sb-alien:alien-funcall (sb-alien:extern-alien "gc_start_the_world" (function sb-alien:void)))))))
  (with-open-file (s after :direction :output)))
(defun other-threads-sleep-p ()
  (= 1 (count-if-not (lambda (task)
                       (with-open-file (s (merge-pathnames "stat" task) :if-does-not-exist nil)
                         (or (null s)
                             (let ((line (read-line s)))
                               (char= #\S (char line (+ 2 (position #\) line :from-end t))))))))
                     (directory "/proc/self/task/*/"))))
"#;

#[apply(both_modes)]
fn garbage_collection_by_another_thread_delays_no_request(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut stopwatch = Stopwatch::new();
    stopwatch.server = runtime.server(&[]);
    stopwatch.server.evaluate(STOP_THE_WORLD);
    stopwatch.server.evaluate("(compile 'stop-the-world)");
    // The threads of held evaluations wait for work, too, and all are notified of new work.
    let mut holders = [(); 2].map(|()| runtime.attach(&stopwatch.server));
    for holder in &mut holders {
        let held = holder.call("evaluate-lisp", json!({"code": "(error \"held\")", "on-error": "debug"}));
        assert!(held.0.contains("Held."), "{held:?}");
    }
    let (begun, after) = (stopwatch.server.home().join("begun"), stopwatch.server.home().join("after"));
    // The collection must not stop a thread that holds one of the host's locks. A sleeping thread holds none.
    let stop =
        format!("(progn (loop until (other-threads-sleep-p) do (sleep 0.01)) (stop-the-world {begun:?} {after:?}))");
    for (who, code, background) in [
        ("a collection in the background", stop.clone(), true),
        ("a collection of another thread", format!("(progn (sb-thread:make-thread (lambda () {stop})) 1)"), false),
    ] {
        let begin = Instant::now();
        call_ok(&mut stopwatch.server, "evaluate-lisp", json!({"code": code, "background": background}));
        wait_until("all threads have stopped", || begun.exists());
        while !after.exists() {
            stopwatch.time_requests(who);
            assert!(begin.elapsed() < DEADLINE / 6, "{who} has no end: {}", stopwatch.server.evaluate("1"));
        }
        assert!(begin.elapsed() >= Duration::from_secs(3));
        std::fs::remove_file(&after).expect("a file");
        std::fs::remove_dir(&begun).expect("a directory");
    }
    let Stopwatch { slowest, slowest_request, .. } = stopwatch;
    println!("the slowest, {slowest_request}, took {slowest:?}");
    assert!(slowest <= BUSY_LIMIT, "{slowest_request} took {slowest:?}");
}

/// The watchdog must not take the deadline of a query for the deadline of the evaluation that runs beside it.
#[test]
fn query_that_times_out_does_not_end_a_running_evaluation() {
    let mut server = Server::start_with(&["--watch-interval", "100", "--cleanup", "0.5"]);
    server.initialize("2025-11-25");
    server.evaluate("(defmacro stuck () (loop))");
    let end = server.home().join("end");
    let code = format!("(loop until (probe-file {end:?}) do (sleep 0.01)) (sleep 2) :done");
    let running = server.post_running("", &code, 120.0);
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(stuck)"}));
    assert!(failed.contains("did not finish within 10 seconds"), "{failed}");
    std::fs::write(end, "").unwrap();
    assert_eq!(server.outcome(running), ("=> :DONE".to_owned(), false));
}

/// Defines `(endless)`, a macro whose expansion creates the file `begun` and does not end.
fn define_endless_macro(server: &mut Server, begun: &Path) {
    server.evaluate(&format!("(defmacro endless () (with-open-file (s {begun:?} :direction :output)) (loop))"));
}

/// SBCL needs the lock to define classes and to compile the dispatch of generic functions. Without an answer, an inspection
/// fails after 10 seconds.
#[apply(both_modes)]
fn inspections_do_not_wait_for_user_code_that_holds_the_lock_for_classes(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass point () ((x :accessor point-x))) (defstruct box a) (define-condition full (error) ()) \
         (defgeneric area (shape)) (defmacro twice (x) `(progn ,x ,x)) (defvar *point* (make-instance 'point)) \
         (deftype id () 'integer) (defun (setf size) (new thing) (list new thing))",
    );
    let begun = server.home().join("begun");
    let code =
        format!("(sb-kernel::with-world-lock () (with-open-file (s {begun:?} :direction :output)) (loop (sleep 1)))");
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
    wait_until("the lock is held", || begun.exists());
    let definitions = call_ok(&mut server, "list-definitions", json!({}));
    assert!(definitions.contains("POINT"), "{definitions}");
    for name in ["point", "box", "full", "area", "twice", "*point*", "id", "size", "car", "stream", "cl-user"] {
        call_ok(&mut server, "describe-symbol", json!({"name": name}));
    }
}

/// The limit for a request behind cancelled inspections. Each of them would take 10 seconds.
const CANCELLATION_LIMIT: Duration = Duration::from_secs(8);

#[apply(both_modes)]
fn cancelled_inspections_delay_no_other_inspection(mode: Mode) {
    let mut server = mode.ready();
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    server.evaluate("(defvar *kept* 1) (setf *kept* 2)");
    let inspections = [(); 3].map(|()| server.post_call("macroexpand", json!({"form": "(endless)"})));
    wait_until("the first inspection runs", || begun.exists());
    for id in inspections.into_iter().rev() {
        server.notify("notifications/cancelled", json!({"requestId": id}));
    }
    let begin = Instant::now();
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < CANCELLATION_LIMIT, "{:?}", begin.elapsed());
    assert_eq!(server.evaluate("*kept*"), "=> 2");
}

#[apply(both_modes)]
fn inspections_of_a_client_that_disconnects_end(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    let mut client = runtime.attach(&server);
    for _ in 0..3 {
        client.post_call("macroexpand", json!({"form": "(endless)"}));
    }
    wait_until("the first inspection runs", || begun.exists());
    drop(client);
    let begin = Instant::now();
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < CANCELLATION_LIMIT, "{:?}", begin.elapsed());
}

/// The package for the prompt comes from a query, which waits for the other client's inspection.
#[apply(both_modes)]
fn inspection_of_a_client_does_not_delay_the_evaluations_of_a_person(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    let mut other = runtime.attach(&server);
    let person = json!({"sbcl-mcp/person": true});
    let call = |code: &str| json!({"name": "evaluate-lisp", "arguments": {"code": code}, "_meta": person});
    other.post_call("macroexpand", json!({"form": "(endless)"}));
    wait_until("the inspection runs", || begun.exists());
    let begin = Instant::now();
    let answer = server.request("tools/call", call("(+ 1 2)"));
    assert!(begin.elapsed() < CANCELLATION_LIMIT, "{:?}", begin.elapsed());
    assert_eq!(outcome(&answer), ("=> 3".to_owned(), false));
    drop(other);
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    let answer = server.request("tools/call", call("(+ 1 3)"));
    assert_eq!(answer["result"]["_meta"]["sbcl-mcp/package"], "COMMON-LISP-USER", "{answer}");
}

/// The clients' inspections take turns: without turns, the other client's request could wait for all of this client's
/// inspections.
#[apply(both_modes)]
fn slow_inspections_of_a_client_do_not_all_come_before_another_clients(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    let mut other = runtime.attach(&server);
    for _ in 0..60 {
        server.post_call("macroexpand", json!({"form": "(endless)"}));
    }
    server.request("ping", json!({}));
    wait_until("the first inspection runs", || begun.exists());
    let begin = Instant::now();
    // The answer to this client needs a second inspection, which reads the package.
    other.call_ok("describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

/// A slow inspection runs on when another client's inspection waits. The other inspection gets another thread, which evaluated
/// code does not see.
#[apply(both_modes)]
fn slow_inspections_of_two_clients_delay_a_third_client_by_less_than_two_seconds(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let [first_begun, second_begun, end] = ["first", "second", "end"].map(|name| server.home().join(name));
    server.evaluate(&format!(
        "(defmacro slow (file) (with-open-file (s file :direction :output)) \
           (sb-sys:without-interrupts (loop until (probe-file {end:?}) do (sleep 0.01))) ''done)"
    ));
    let mut clients = [&first_begun, &second_begun].map(|begun| (runtime.attach(&server), begun, 0));
    let begin = Instant::now();
    for (client, begun, expansion) in &mut clients {
        *expansion = client.post_call("macroexpand", json!({"form": format!("(slow {begun:?})")}));
        wait_until("the expansion runs", || begun.exists());
    }
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < 2 * BUSY_LIMIT, "{:?}", begin.elapsed());
    let threads = server.evaluate("(mapcar #'sb-thread:thread-name (sb-thread:list-all-threads))");
    assert_eq!(threads, "=> (\"main thread\")");
    std::fs::write(end, "").unwrap();
    for (mut client, _, expansion) in clients {
        let (text, is_error) = outcome(&client.answer(expansion));
        assert!(!is_error && text.contains("'done"), "{text}");
        client.call_ok("describe-symbol", json!({"name": "cdr"}));
    }
    call_ok(&mut server, "describe-symbol", json!({"name": "cdr"}));
}

/// The thread of an inspection that another thread has taken over from is abandoned, too, if it cannot be interrupted.
#[test]
fn stuck_inspection_is_abandoned_after_another_thread_took_over() {
    let runtime = RuntimeDirectory::new(Mode::Plain);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    server.evaluate(&format!(
        "(defmacro stuck () (with-open-file (s {begun:?} :direction :output)) (sb-sys:without-interrupts (loop)))"
    ));
    let mut other = runtime.attach(&server);
    let expansion = server.post_call("macroexpand", json!({"form": "(stuck)"}));
    wait_until("the expansion runs", || begun.exists());
    other.call_ok("describe-symbol", json!({"name": "car"}));
    let (text, is_error) = server.outcome(expansion);
    assert!(is_error && text.contains("did not finish within 10 seconds"), "{text}");
    call_ok(&mut server, "describe-symbol", json!({"name": "cdr"}));
    other.call_ok("describe-symbol", json!({"name": "cdr"}));
}

/// User code that finds the server's threads through SBCL's internals may end them as they start.
#[apply(both_modes)]
fn requests_are_answered_although_user_code_ends_each_thread_that_starts(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    server.evaluate(
        "(defvar *kept* 1) (setf *kept* 2)
         (sb-int:encapsulate 'sb-thread::start-thread 'end
           (lambda (start thread function arguments)
             (funcall start thread
                      (lambda (&rest arguments)
                        (sb-thread:terminate-thread sb-thread:*current-thread*)
                        (apply function arguments))
                      arguments)))",
    );
    let mut other = runtime.attach(&server);
    other.post_call("macroexpand", json!({"form": "(endless)"}));
    wait_until("the expansion runs", || begun.exists());
    // A new thread takes over the inspections.
    let begin = Instant::now();
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < CANCELLATION_LIMIT, "{:?}", begin.elapsed());
    // A background evaluation needs a new thread, too.
    let text = call_ok(&mut server, "evaluate-lisp", json!({"code": "(+ 20 22)", "background": true}));
    assert!(text.ends_with("Evaluation 3 continues in the background."), "{text}");
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({"id": 3, "wait": 25})), "=> 42");
    assert!(server.evaluate("*kept*").ends_with("=> 2"));
}

/// Without a second attempt, the inspection would wait for the other client's inspection.
#[apply(both_modes)]
fn inspections_get_another_thread_although_the_first_attempt_to_start_it_fails(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    server.evaluate(
        "(defvar *refused* nil)
         (sb-int:encapsulate 'sb-thread::start-thread 'refuse
           (lambda (start thread function arguments)
             (when (and (not *refused*) (equal (sb-thread:thread-name thread) \"inspection\"))
               (setf *refused* t)
               (error \"no thread for now\"))
             (funcall start thread function arguments)))",
    );
    let mut other = runtime.attach(&server);
    other.post_call("macroexpand", json!({"form": "(endless)"}));
    wait_until("the expansion runs", || begun.exists());
    let begin = Instant::now();
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < CANCELLATION_LIMIT, "{:?}", begin.elapsed());
    assert!(server.evaluate("*refused*").ends_with("=> T"));
}

/// SBCL needs the lock to start a thread. The Lisp thread that starts the server's other threads also interrupts evaluations.
#[apply(both_modes)]
fn background_evaluation_that_holds_the_lock_for_starting_threads_can_be_aborted(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defvar *kept* 1) (setf *kept* 2)");
    let begun = server.home().join("begun");
    let holder = format!(
        "(sb-thread:with-mutex (sb-thread::*make-thread-lock*) \
           (with-open-file (s {begun:?} :direction :output)) (loop (sleep 1)))"
    );
    call_ok(&mut server, "evaluate-lisp", json!({"code": holder, "background": true}));
    wait_until("the lock is held", || begun.exists());
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(+ 1 2)", "background": true}));
    let failed = call_err(&mut server, "check-evaluation", json!({"id": 3, "wait": 25}));
    assert!(failed.contains("Another thread holds a lock that is needed to start a thread."), "{failed}");
    call_ok(&mut server, "abort-evaluation", json!({"id": 2}));
    let aborted = call_err(&mut server, "check-evaluation", json!({"id": 2, "wait": 25}));
    assert!(aborted.contains("[ERROR] CANCELLED"), "{aborted}");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(+ 20 22)", "background": true}));
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({"id": 4, "wait": 25})), "=> 42");
    assert!(server.evaluate("*kept*").ends_with("=> 2"));
}

/// The watchdog must not take an inspection within its time limit for a stall.
#[test]
fn inspection_that_times_out_loses_no_data() {
    let mut server = Server::start_with(&["--watch-interval", "100"]);
    server.initialize("2025-11-25");
    server.evaluate("(defmacro stuck () (loop)) (defvar *kept* 1) (setf *kept* 2)");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(stuck)"}));
    assert!(failed.contains("did not finish within 10 seconds"), "{failed}");
    assert_eq!(server.evaluate("*kept*"), "=> 2");
}

#[apply(both_modes)]
fn inspection_that_fills_the_heap_loses_no_data(mode: Mode) {
    let mut server = mode.start_with(&["--heap", "1G"]);
    server.initialize("2025-11-25");
    server.evaluate(
        "(defmacro fill-heap () (let (kept) (loop (push (make-array 10000) kept)))) (defvar *kept* 1) (setf *kept* 2)",
    );
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(fill-heap)"}));
    assert!(failed.contains("HEAP-EXHAUSTED"), "{failed}");
    assert_eq!(server.evaluate("*kept*"), "=> 2");
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
}

#[apply(both_modes)]
fn inspection_that_ends_its_thread_is_answered_with_the_reason(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defmacro ends () (sb-thread:abort-thread)) (defmacro throws () (throw 'sb-impl::toplevel-catcher 1))",
    );
    for form in ["(ends)", "(throws)"] {
        let failed = call_err(&mut server, "macroexpand", json!({"form": form}));
        assert!(failed.contains("ended the inspection's thread"), "{form}: {failed}");
    }
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
}

/// The next image repeats an inspection that a reset or a restore ends.
#[test]
fn inspections_are_repeated_after_another_client_resets() {
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    let mut client = runtime.attach(&server);
    let running = client.post_call("macroexpand", json!({"form": "(endless)"}));
    let waiting = client.post_call("describe-symbol", json!({"name": "car"}));
    wait_until("the first inspection runs", || begun.exists());
    call_ok(&mut server, "reset-session", json!({}));
    let repeated = outcome(&client.answer(running));
    assert!(repeated.0.contains("ENDLESS names no function or macro") && !repeated.1, "{repeated:?}");
    let described = outcome(&client.answer(waiting));
    assert!(described.0.starts_with("COMMON-LISP:CAR [FUNCTION]"), "{described:?}");
}

/// Without a supervisor, no other image repeats a waiting inspection that a reset ends.
#[test]
fn inspection_that_a_reset_ends_is_answered_with_the_reason() {
    let runtime = RuntimeDirectory::new(Mode::Plain);
    let mut server = runtime.server(&[]);
    let begun = server.home().join("begun");
    define_endless_macro(&mut server, &begun);
    let mut client = runtime.attach(&server);
    client.post_call("macroexpand", json!({"form": "(endless)"}));
    let waiting = client.post_call("describe-symbol", json!({"name": "car"}));
    wait_until("the first inspection runs", || begun.exists());
    server.post_call("reset-session", json!({}));
    // The second inspection may also run, between the end of the first and the reset.
    let (text, is_error) = outcome(&client.answer(waiting));
    assert!(if is_error { text.contains("the session was reset") } else { text.contains("Arglist: (LIST)") }, "{text}");
}

#[test]
fn killing_thousands_of_child_processes_delays_no_other_client() {
    const CHILDREN: usize = 2_500;
    let runtime = RuntimeDirectory::new(Mode::Supervised);
    let mut server = runtime.server(&[]);
    let script = format!("i=0; while [ $i -lt {CHILDREN} ]; do sleep 1000 & i=$((i+1)); done; wait");
    let start = format!("(sb-ext:process-pid (sb-ext:run-program \"/bin/sh\" '(\"-c\" {script:?}) :wait nil))");
    let shell = server.evaluate(&start);
    let shell = shell.strip_prefix("=> ").expect("a process id");
    let children = || std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).unwrap_or_default();
    wait_until("the processes run", || children().split_ascii_whitespace().count() == CHILDREN);
    let started: Vec<u32> = children().split_ascii_whitespace().map(|pid| pid.parse().expect("a number")).collect();
    let client = runtime.attach(&server);
    let pings = Pings::during(&runtime, client, |_| drop(call_ok(&mut server, "reset-session", json!({}))));
    wait_until("the processes are gone", || {
        let running = processes();
        !started.iter().any(|pid| running.contains_key(pid))
    });
    // The next worker starts only after the system has ended the processes, which compete with the server for the processors
    // as they end. Quadratic work would take 14 s.
    assert!(pings.slowest <= 2 * BUSY_LIMIT, "a ping took {:?}", pings.slowest);
    server.assert_works();
}

/// Returns the directory of a server's checkpoints.
fn checkpoint_directory(server: &Server) -> PathBuf {
    let state = std::fs::read_dir(server.home().join("XDG_STATE_HOME/sbcl-mcp")).expect("a directory");
    state.flatten().next().expect("a directory of checkpoints").path()
}

/// Creates a FIFO that no process opens.
pub(crate) fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).expect("a FIFO");
}

/// Adds checkpoints with cores of 2 GiB, sparse files, that differ from the saved cores. Returns the cores.
fn add_damaged_checkpoints(server: &Server, names: &[&str]) -> Vec<PathBuf> {
    let directory = checkpoint_directory(server);
    let mut files = std::fs::read_dir(&directory).expect("a directory").flatten().map(|entry| entry.path());
    let manifest = files.find(|path| path.extension() == Some("json".as_ref())).expect("a manifest");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(manifest).expect("a file")).expect("JSON");
    let add = |(number, name)| {
        let (file, bytes) = (format!("{number:016x}.core"), 2_u64 << 30);
        let core = directory.join(&file);
        std::fs::File::create(&core).and_then(|core| core.set_len(bytes)).expect("a sparse file");
        manifest["name"] = json!(name);
        manifest["file"] = json!(file);
        manifest["bytes"] = json!(bytes);
        manifest["automatic"] = json!(true);
        std::fs::write(core.with_extension("json"), manifest.to_string()).expect("a manifest");
        core
    };
    names.iter().enumerate().map(add).collect()
}

#[apply(both_modes)]
fn damaged_checkpoints_are_listed_and_delay_no_other_client(mode: Mode) {
    let runtime = RuntimeDirectory::new(mode);
    let mut server = runtime.server(&[]);
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "intact"}));
    let cores = add_damaged_checkpoints(&server, &["damaged-1", "damaged-2"]);
    let state = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("{name:?}"))).expect("a line");
        line.ends_with("; damaged: can only be deleted or replaced")
    };
    let client = runtime.attach(&server);
    let pings = Pings::during(&runtime, client, |_| {
        let text = call_ok(&mut server, "checkpoint", json!({}));
        assert_eq!(["intact", "damaged-1", "damaged-2"].map(|name| state(&text, name)), [false, true, true], "{text}");
        // The cores are not read again.
        let begin = Instant::now();
        assert_eq!(call_ok(&mut server, "checkpoint", json!({})), text);
        let text = call_err(&mut server, "checkpoint", json!({"action": "restore", "name": "damaged-1"}));
        assert!(text.contains("is damaged"), "{text}");
        assert!(begin.elapsed() <= BUSY_LIMIT, "it took {:?}", begin.elapsed());
        for core in &cores {
            let core = std::fs::File::options().write(true).open(core).expect("a file");
            core.set_modified(std::time::SystemTime::now()).expect("a time");
        }
        call_ok(&mut server, "reset-session", json!({}));
    });
    pings.assert_fast();
    server.assert_works();
}

/// Code in the image can create files in the directory of the checkpoints, which the supervisor reads during a reset.
#[test]
fn fifo_among_the_checkpoints_delays_no_reset() {
    for name in ["x.json", "0000000000000001.json"] {
        let mut server = Server::ready();
        call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "a"}));
        make_fifo(&checkpoint_directory(&server).join(name));
        let reset = server.post_call("reset-session", json!({}));
        // The first ping may be answered before the supervisor reads the directory.
        for _ in 0..20 {
            let begin = Instant::now();
            server.request("ping", json!({}));
            assert!(begin.elapsed() <= BUSY_LIMIT, "{name}: {:?}", begin.elapsed());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(server.outcome(reset).0.contains("Session reset."));
        server.assert_works();
    }
}

/// These files are named like descriptions of checkpoints.
#[test]
fn thousands_of_large_files_among_the_checkpoints_delay_no_reset() {
    let mut server = Server::ready();
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "a"}));
    let directory = checkpoint_directory(&server);
    let file = |number: usize| directory.join(format!("{number:016x}.json"));
    std::fs::write(file(0), json!({"name": "x".repeat(1_000_000)}).to_string()).expect("a file");
    for number in 1..5_000 {
        std::fs::hard_link(file(0), file(number)).expect("a link");
    }
    let begin = Instant::now();
    assert!(call_ok(&mut server, "reset-session", json!({})).contains("Session reset."));
    assert!(begin.elapsed() <= BUSY_LIMIT, "it took {:?}", begin.elapsed());
    server.assert_works();
}

/// Code in the image can write to the file with a checkpoint's definitions, which the supervisor reads during a restore.
#[test]
fn lines_added_to_the_definitions_of_a_checkpoint_delay_no_restore() {
    let mut server = Server::ready();
    server.evaluate("(defun f () 7)");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "a"}));
    let mut files = std::fs::read_dir(checkpoint_directory(&server)).expect("a directory").flatten();
    let forms = files.find(|file| file.path().extension() == Some("forms".as_ref())).expect("the definitions").path();
    let content = std::fs::read_to_string(&forms).expect("text");
    std::fs::write(&forms, content + &"x\n".repeat(1_000_000)).expect("a file");
    let begin = Instant::now();
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "a"}));
    assert!(begin.elapsed() <= BUSY_LIMIT, "it took {:?}", begin.elapsed());
    assert!(server.evaluate("(f)").ends_with("=> 7"));
}

/// While a shared object is being loaded, the dynamic loader's lock is held. The first query of an image needs no such lock.
#[apply(both_modes)]
fn slow_load_of_a_shared_object_delays_no_query(mode: Mode) {
    let mut server = mode.ready();
    let pipe = server.home().join("library.so");
    make_fifo(&pipe);
    let begun = server.home().join("begun");
    let load = format!(
        "(progn (with-open-file (out {begun:?} :direction :output))
                (handler-case (load-shared-object {pipe:?}) (error (error) (princ-to-string error))))"
    );
    let loading = server.post_call("evaluate-lisp", json!({"code": load, "background": true}));
    server.answer(loading);
    wait_until("the load has begun", || begun.exists());
    // The loader waits until the pipe is opened for writing.
    let begin = Instant::now();
    call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // Without NONBLOCK, opening the pipe would block forever if the load had ended without opening it.
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
    let end = Instant::now() + DEADLINE;
    while rustix::fs::open(pipe.as_path(), flags, rustix::fs::Mode::empty()).is_err() {
        if Instant::now() > end {
            panic!("the loader has not opened the pipe: {}", call_ok(&mut server, "check-evaluation", json!({})));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let ended = call_ok(&mut server, "check-evaluation", json!({"wait": 60}));
    assert!(!ended.contains("IMAGE-LOST"), "{ended}");
}
