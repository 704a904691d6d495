//! Random bytes as protocol and random text as code: the server must answer and keep working.
//!
//! `SBCL_MCP_FUZZ_CASES` sets the number of cases of each test.

#![cfg(unix)]

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::client::Server;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use serde_json::{Value, json};

/// Returns the number of cases of a test: `usual`, unless the environment sets it.
fn cases(usual: u32) -> u32 {
    match std::env::var("SBCL_MCP_FUZZ_CASES") {
        Ok(text) => text.parse().expect("SBCL_MCP_FUZZ_CASES is a number"),
        Err(_) => usual,
    }
}

/// Runs `check` on random input. All cases share one server until one fails; each step of shrinking that case starts
/// its own.
fn fuzz<S: Strategy>(usual: u32, input: S, check: impl Fn(&mut Server, &S::Value))
where
    S::Value: std::fmt::Debug,
{
    let server = Mutex::new(None);
    let config = Config {
        cases: cases(usual),
        // A step may take a second if its code does.
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let outcome = TestRunner::new(config).run(&input, |input| {
        let mut slot = server.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut server = slot.take().unwrap_or_else(prepared);
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            check(&mut server, &input);
            server
        }));
        *slot = Some(checked.map_err(|reason| TestCaseError::fail(panic_text(&*reason)))?);
        Ok(())
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(reason, input)) => panic!("{reason}\ninput: {input:?}"),
        Err(error) => panic!("{error}"),
    }
}

fn panic_text(reason: &(dyn std::any::Any + Send)) -> String {
    let text = reason.downcast_ref::<String>().cloned();
    text.or_else(|| reason.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

fn prepared() -> Server {
    let mut server = Server::start_with(&["--timeout", "1"]);
    server.initialize("2025-06-18");
    server.evaluate("(defun f () 7)");
    server
}

// ---- The protocol

/// Returns lines that a client may send.
fn messages() -> Vec<Value> {
    let meta = json!({"progressToken": 7, "io.modelcontextprotocol/protocolVersion": "2026-07-28"});
    vec![
        json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}),
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}),
        json!({"jsonrpc": "2.0", "id": "three", "method": "tools/call",
            "params": {"name": "evaluate-lisp", "arguments": {"code": "(list 1 \"two\")", "timeout": 1}, "_meta": meta}}),
        json!({"jsonrpc": "2.0", "id": 4, "method": "tools/call",
            "params": {"name": "get-backtrace", "arguments": {"max-frames": 3}}}),
        json!({"jsonrpc": "2.0", "id": 5, "method": "tools/call",
            "params": {"name": "configure-limits", "arguments": {"max-output": 100_000}}}),
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3, "reason": "x"}}),
        json!({"jsonrpc": "2.0", "id": 6, "result": {}}),
        json!({"jsonrpc": "2.0", "id": 7, "error": {"code": -32601, "message": "no"}}),
        json!([{"jsonrpc": "2.0", "id": 8, "method": "ping"}, {"jsonrpc": "2.0", "method": "notifications/initialized"}]),
    ]
}

/// Byte sequences that are inserted into a line or replace a part of it.
const PIECES: [&[u8]; 24] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b",",
    b":",
    b"null",
    b"-1",
    b"1e999",
    b"0.5",
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n",
    b"\n\n",
    b"\"id\":",
    b"99999999999999999999",
    b"[[[[[[[[",
];

/// A change of a line: the relative position (0 to 1), the number of bytes to remove, and the bytes to insert.
type Change = (f64, usize, &'static [u8]);

fn changed(line: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = line.to_vec();
    for (place, gone, piece) in changes {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index"
        )]
        let start = (place * bytes.len() as f64) as usize;
        let end = (start + gone).min(bytes.len());
        bytes.splice(start..end, piece.iter().copied());
    }
    bytes
}

fn mutated_line() -> impl Strategy<Value = Vec<u8>> {
    let change = (0.0..1.0, 0_usize..12, select(PIECES.to_vec()));
    (select(messages()), prop::collection::vec(change, 0..4))
        .prop_map(|(message, changes)| changed(message.to_string().as_bytes(), &changes))
}

fn protocol_input() -> impl Strategy<Value = Vec<u8>> {
    let bytes = prop::collection::vec(any::<u8>(), 0..200);
    let nested =
        (1_usize..3000, select(vec!["[", "{\"a\":"])).prop_map(|(depth, open)| open.repeat(depth).into_bytes());
    prop_oneof![6 => mutated_line(), 2 => bytes, 1 => nested]
}

/// Sends the bytes as lines and asserts that the server still answers.
fn assert_survives_bytes(server: &mut Server, bytes: &[u8]) {
    server.send_raw(bytes);
    server.send_raw(b"\n");
    let pong = server.request("ping", json!({}));
    assert_eq!(pong["result"], json!({}), "{pong}");
    server.assert_works();
}

#[test]
fn random_bytes_leave_the_protocol_working() {
    fuzz(800, prop::collection::vec(protocol_input(), 1..4), |server, lines| {
        assert_survives_bytes(server, &lines.join(&b'\n'));
    });
}

// ---- The code

/// Seeds for random code: every corner of the reader and much of the language.
const SEEDS: [&str; 24] = [
    "(defun g (x &optional (y 2) &key z) (list x y z))",
    "(let ((x 1)) (declare (type fixnum x)) (setf x (+ x 1)) (values x 'a :b))",
    "(loop for i from 0 below 10 collect (* i i))",
    "(handler-case (error \"x ~a\" 1) (error (c) (princ c)))",
    "`(a ,(+ 1 2) ,@(list 1 2) #(1 ,x))",
    "#(1 2 3) #*1010 #c(1 2) #\\Space #'car #:sym #p\"/tmp/x\"",
    "#1=(a . #1#)",
    "#.(+ 1 2) #+sbcl 1 #-sbcl 2 #b101 #o17 #xFF #36rZZ",
    "\"a string with \\\" and \\\\ in it\" |a symbol| a\\ b",
    "#| a comment #| nested |# |# ; line\n 1",
    "(defmacro m (&body body) `(progn ,@body)) (m 1 2)",
    "(defclass c () ((slot :initarg :slot :accessor slot))) (make-instance 'c :slot 1)",
    "(defmethod print-object ((c c) stream) (write-string \"c\" stream))",
    "(format t \"~a ~s ~d ~{~a~^,~} ~v@t~%\" 1 \"two\" 3 '(4 5) 6)",
    "(unwind-protect (throw 'tag 1) (print 2))",
    "(block b (return-from b (catch 'x (throw 'x 3))))",
    "(flet ((f (x) x)) (mapcar #'f '(1 2)))",
    "(labels ((r (n) (if (zerop n) 0 (r (1- n))))) (r 100))",
    "(multiple-value-bind (a b) (floor 7 2) (list a b))",
    "(setf *print-base* 2 *print-circle* t *print-case* :downcase)",
    "(declaim (optimize (speed 3) (safety 0)))",
    "(make-array '(2 2) :initial-contents '((1 2) (3 4)))",
    "(with-output-to-string (s) (write 1.0d0 :stream s))",
    "(sb-thread:join-thread (sb-thread:make-thread (lambda () (print 1))))",
];

/// Tokens that are inserted into code or replace a part of it.
const TOKENS: [&[u8]; 40] = [
    b"(",
    b")",
    b"'",
    b"`",
    b",",
    b",@",
    b"#",
    b"#'",
    b"#.",
    b"#(",
    b"#1=",
    b"#1#",
    b"#+",
    b"#-",
    b"#|",
    b"|#",
    b"|",
    b"\"",
    b"\\",
    b";",
    b"\n",
    b".",
    b" . ",
    b":",
    b"::",
    b"#:",
    b"#\\",
    b"#c",
    b"#s(",
    b"#p",
    b"#*",
    b"#2a",
    b"#36r",
    b"1/0",
    b"1e99999",
    b"nil",
    b"t",
    b"(loop)",
    b"(error \"x\")",
    b"\xce\xbb",
];

fn mutated_code() -> impl Strategy<Value = String> {
    let change = (0.0..1.0, 0_usize..6, select(TOKENS.to_vec()));
    (prop::collection::vec(select(SEEDS.to_vec()), 1..3), prop::collection::vec(change, 0..5)).prop_map(
        |(seeds, changes)| String::from_utf8_lossy(&changed(seeds.join(" ").as_bytes(), &changes)).into_owned(),
    )
}

fn reader_syntax() -> impl Strategy<Value = String> {
    prop::collection::vec(select(TOKENS.to_vec()), 1..25)
        .prop_map(|tokens| String::from_utf8_lossy(&tokens.concat()).into_owned())
}

fn dispatches() -> impl Strategy<Value = String> {
    ("[!-~]", 0_u64..100_000, any::<bool>(), "[ -~]{0,12}").prop_map(|(character, number, numbered, rest)| {
        match numbered {
            true => format!("#{number}{character}{rest}"),
            false => format!("#{character}{rest}"),
        }
    })
}

/// Asserts that the code is answered and the session still works. Settings of reader and printer are restored first.
fn assert_survives_code(server: &mut Server, code: &str) {
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": 1}));
    assert_eq!(is_error, text.contains("[ERROR] "), "{code}: {text}");
    let undo = "(cl:setf cl:*print-base* 10. cl:*print-circle* cl:nil cl:*print-case* :upcase cl:*read-eval* cl:t)";
    server.evaluate(undo);
    let text = server.evaluate("(+ 1 2)");
    assert!(text.ends_with("=> 3"), "{text}");
    let text = server.evaluate("(f)");
    assert!(text.ends_with("=> 7"), "{text}");
}

#[test]
fn random_code_is_answered_and_leaves_the_session_working() {
    let code = prop_oneof![4 => mutated_code(), 2 => reader_syntax(), 2 => dispatches(), 1 => any::<String>()];
    fuzz(500, code, |server, code| assert_survives_code(server, code));
}

// ---- Schedules of requests

/// An action of a client, or of somebody who kills the image.
#[derive(Debug, Clone)]
enum Step {
    /// Sends the program with this index under a new id.
    Send(usize),
    /// Cancels the request sent this number of requests ago.
    Cancel(usize),
    /// Cancels such a request and at once sends another program under the same id.
    Reuse(usize, usize),
    /// Sends the noise line with this index.
    SendNoise(usize),
    /// Waits this number of milliseconds.
    Wait(u64),
    /// Kills the process that holds Lisp.
    Kill,
}

/// Programs with their time limits. `@` stands for a number, which is the value of each program that succeeds.
const PROGRAMS: [(&str, f64); 7] = [
    ("@", 30.0),
    ("(progn (sleep 0.02) @)", 30.0),
    ("(progn (dotimes (i 3000) (print i)) @)", 30.0),
    ("(let ((x @)) (error \"failed ~a\" x))", 30.0),
    ("(loop)", 0.2),
    ("(list (loop))", 600.0),
    ("; <2 MiB>\n@", 30.0),
];
/// The index of the program that runs until it is cancelled.
const ENDLESS: usize = 5;

/// Lines that are no request, and whether the server answers them with an error without an id.
const NOISE_LINES: [(&[u8], bool); 10] = [
    (br#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#, false),
    (br#"{"jsonrpc":"2.0","method":"notifications/nothing/known","params":{"x":[1,2]}}"#, false),
    (br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"nobody's"}}"#, false),
    (br#"{"jsonrpc":"2.0","method":"notifications/cancelled"}"#, false),
    (br#"{"jsonrpc":"2.0","id":3,"result":{}}"#, false),
    (b"", false),
    (b"{", true),
    (b"no JSON \xff", true),
    (b"[]", true),
    (br#"{"jsonrpc":"2.0"}"#, true),
];

fn schedule() -> impl Strategy<Value = (bool, Vec<Step>)> {
    let step = prop_oneof![
        // Endless programs are rare.
        16 => select(vec![0, 0, 0, 1, 1, 2, 3, 4, 5, 6]).prop_map(Step::Send),
        6 => (0_usize..4).prop_map(Step::Cancel),
        4 => (0_usize..4, select(vec![0, 1, 3])).prop_map(|(back, program)| Step::Reuse(back, program)),
        8 => (0..NOISE_LINES.len()).prop_map(Step::SendNoise),
        4 => (0_u64..40).prop_map(Step::Wait),
        1 => (500_u64..3000).prop_map(Step::Wait),
        1 => Just(Step::Kill),
    ];
    (any::<bool>(), prop::collection::vec(step, 1..25))
}

/// A request that was sent, as the client knows it.
#[derive(Debug)]
struct Request {
    id: i64,
    /// The index of its program.
    program: usize,
    number: usize,
    cancelled: bool,
    /// True if the image was killed before the request was cancelled.
    killed: bool,
}

fn send_program(server: &mut Server, requests: &mut Vec<Request>, id: i64, program: usize) {
    let number = requests.len();
    let (code, timeout) = PROGRAMS[program];
    let code = code.replace('@', &number.to_string()).replace("<2 MiB>", &"x".repeat(2 << 20));
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": code, "timeout": timeout}});
    server.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    requests.push(Request { id, program, number, cancelled: false, killed: false });
}

/// Runs a schedule and asserts that every request that was not cancelled has exactly one answer, its own; that the
/// server sent nothing else; and that the image is the same unless it was killed.
fn run_schedule(without_supervisor: bool, steps: &[Step]) {
    let mode: &[&str] = if without_supervisor { &["serve", "--no-supervisor"] } else { &["serve"] };
    let mut server = Server::start_with(mode);
    server.initialize("2025-11-25");
    server.evaluate("(defvar *image* 1)");
    server.evaluate("(setf *image* 2)");
    let mut requests: Vec<Request> = Vec::new();
    let (mut errors, mut killed) = (0, false);
    for step in steps {
        match *step {
            Step::Send(program) => {
                let id = i64::try_from(requests.len()).unwrap();
                send_program(&mut server, &mut requests, id, program);
            }
            Step::Cancel(back) | Step::Reuse(back, _) => {
                let Some(place) = requests.len().checked_sub(back + 1) else { continue };
                let id = requests[place].id;
                // The cancellation applies to the last request with this id.
                let Some(last) = requests.iter_mut().rev().find(|last| last.id == id) else { continue };
                last.cancelled = true;
                server.notify("notifications/cancelled", json!({"requestId": id}));
                if let Step::Reuse(_, program) = *step {
                    send_program(&mut server, &mut requests, id, program);
                }
            }
            Step::SendNoise(which) => {
                let (line, refused) = NOISE_LINES[which];
                server.send_raw(&[line, b"\n"].concat());
                errors += usize::from(refused);
            }
            Step::Wait(time) => std::thread::sleep(Duration::from_millis(time)),
            Step::Kill =>
            {
                #[cfg(target_os = "linux")]
                if !without_supervisor {
                    crate::processes::signal(crate::processes::worker(&server), "-KILL");
                    killed = true;
                    requests.iter_mut().filter(|request| !request.cancelled).for_each(|request| request.killed = true);
                }
            }
        }
    }
    for endless in requests.iter_mut().filter(|request| request.program == ENDLESS && !request.cancelled) {
        endless.cancelled = true;
        server.notify("notifications/cancelled", json!({"requestId": endless.id}));
    }
    let image = server.call_tool("evaluate-lisp", json!({"code": "*image*"})).0;
    server.assert_works();
    let crate::client::ServerExit { stderr, transcript, .. } = server.finish();
    // A kill during the replay of the definition may be blamed on it.
    assert!(killed || image.ends_with("=> 2"), "{image}\n{stderr}");
    let mut answers: HashMap<i64, Vec<&Value>> = HashMap::new();
    for message in &transcript {
        assert!(message.get("method").is_none(), "{message}");
        match message["id"].as_i64() {
            Some(id) => answers.entry(id).or_default().push(message),
            None => errors -= 1,
        }
    }
    assert_eq!(errors, 0, "errors without a request");
    for request in &requests {
        let of_id = answers.get(&request.id).map_or(&[][..], Vec::as_slice);
        let is_its = |answer: &&&Value| {
            let (text, is_error) = crate::client::outcome(answer);
            if is_error {
                text.contains(&format!("failed {}\n", request.number))
            } else {
                text.ends_with(&format!("=> {}", request.number))
            }
        };
        if request.cancelled && request.program == ENDLESS && !request.killed {
            let uses = requests.iter().filter(|other| other.id == request.id).count();
            assert!(of_id.len() < uses, "{request:?} was answered: {of_id:?}");
        } else if !request.cancelled && matches!(request.program, 0..=3 | 6) && !request.killed {
            assert_eq!(of_id.iter().filter(is_its).count(), 1, "{request:?}: {of_id:?}");
        }
    }
    for (id, of_id) in &answers {
        let uses: Vec<_> = requests.iter().filter(|request| request.id == *id).collect();
        if !uses.is_empty() {
            let owed = uses.iter().filter(|request| !request.cancelled).count();
            assert!((owed..=uses.len()).contains(&of_id.len()), "{uses:?}: {of_id:?}");
        }
    }
    let unanswered = requests.iter().find(|request| !request.cancelled && !answers.contains_key(&request.id));
    assert!(unanswered.is_none(), "{unanswered:?}");
}

#[test]
fn random_calls_cancellations_noise_and_kills_get_one_answer_per_call() {
    let config = Config { cases: cases(40), max_shrink_iters: 30, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&schedule(), |(without_supervisor, steps)| {
        std::panic::catch_unwind(|| run_schedule(without_supervisor, &steps))
            .map_err(|reason| TestCaseError::fail(panic_text(&*reason)))
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
