//! Random bytes as protocol, random text as code: whatever comes, the server answers and goes on.
//!
//! `SBCL_MCP_FUZZ_CASES` sets how many cases each test tries.

#![cfg(unix)]

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::client::Server;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use serde_json::{Value, json};

/// Cases of a test, unless the environment says otherwise.
fn cases(usual: u32) -> u32 {
    match std::env::var("SBCL_MCP_FUZZ_CASES") {
        Ok(text) => text.parse().expect("SBCL_MCP_FUZZ_CASES is a number"),
        Err(_) => usual,
    }
}

/// Tries `check` on random input, with one server for all cases until one fails, and a fresh one while that is made
/// smaller.
fn fuzz<S: Strategy>(usual: u32, input: S, check: impl Fn(&mut Server, &S::Value))
where
    S::Value: std::fmt::Debug,
{
    let server = Mutex::new(None);
    let config = Config {
        cases: cases(usual),
        // Each step may take a second, where the code does.
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

/// The lines that a client may send.
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

/// Pieces that are put into a line, or in the place of a part of it.
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

/// What is done to a line: at a place (as a part of the whole), so many bytes go and a piece comes.
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

/// Sends the bytes as lines, and asks for a sign of life.
fn survives_bytes(server: &mut Server, bytes: &[u8]) {
    server.send_raw(bytes);
    server.send_raw(b"\n");
    let pong = server.request("ping", json!({}));
    assert_eq!(pong["result"], json!({}), "{pong}");
    server.goes_on();
}

#[test]
fn random_bytes_leave_the_protocol_working() {
    fuzz(800, prop::collection::vec(protocol_input(), 1..4), |server, lines| {
        survives_bytes(server, &lines.join(&b'\n'));
    });
}

// ---- The code

/// Code to begin with: every corner of the reader and much of the language.
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

/// Tokens that are put into code, or in the place of a part of it.
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

/// An answer, and the session works. What changes how code is read or printed is undone first.
fn survives_code(server: &mut Server, code: &str) {
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
    fuzz(500, code, |server, code| survives_code(server, code));
}

// ---- The order of things

/// What a client, or somebody else, does.
#[derive(Debug, Clone)]
enum Act {
    /// Asks for something, under an id of its own.
    Ask(usize),
    /// Cancels what was asked so many requests ago.
    Cancel(usize),
    /// The same, and asks for something else under that id at once.
    Reuse(usize, usize),
    /// Says something that wants no answer.
    Say(usize),
    /// Says nothing for so many milliseconds.
    Wait(u64),
    /// Kills the process that holds Lisp.
    Kill,
}

/// Code, `@` standing for a number, and its time limit. What succeeds has the number for its value.
const CODES: [(&str, f64); 7] = [
    ("@", 30.0),
    ("(progn (sleep 0.02) @)", 30.0),
    ("(progn (dotimes (i 3000) (print i)) @)", 30.0),
    ("(let ((x @)) (error \"failed ~a\" x))", 30.0),
    ("(loop)", 0.2),
    ("(list (loop))", 600.0),
    ("; <2 MiB>\n@", 30.0),
];
/// Of these, one that runs until it is cancelled.
const ENDLESS: usize = 5;

/// Lines that ask for nothing, and whether they are answered with an error about nobody's request.
const SAYINGS: [(&[u8], bool); 10] = [
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

fn schedule() -> impl Strategy<Value = (bool, Vec<Act>)> {
    let act = prop_oneof![
        // Of what does not end, little.
        16 => select(vec![0, 0, 0, 1, 1, 2, 3, 4, 5, 6]).prop_map(Act::Ask),
        6 => (0_usize..4).prop_map(Act::Cancel),
        4 => (0_usize..4, select(vec![0, 1, 3])).prop_map(|(back, what)| Act::Reuse(back, what)),
        8 => (0..SAYINGS.len()).prop_map(Act::Say),
        4 => (0_u64..40).prop_map(Act::Wait),
        1 => (500_u64..3000).prop_map(Act::Wait),
        1 => Just(Act::Kill),
    ];
    (any::<bool>(), prop::collection::vec(act, 1..25))
}

/// A request, as the client knows it.
#[derive(Debug)]
struct Asked {
    id: i64,
    /// What its code was, and its number.
    what: usize,
    number: usize,
    cancelled: bool,
    /// The image was killed before it was cancelled.
    killed: bool,
}

fn ask(server: &mut Server, asked: &mut Vec<Asked>, id: i64, what: usize) {
    let number = asked.len();
    let (code, timeout) = CODES[what];
    let code = code.replace('@', &number.to_string()).replace("<2 MiB>", &"x".repeat(2 << 20));
    let params = json!({"name": "evaluate-lisp", "arguments": {"code": code, "timeout": timeout}});
    server.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    asked.push(Asked { id, what, number, cancelled: false, killed: false });
}

/// Plays a schedule; then everything that was asked and not cancelled has one answer, its own, nothing else was said, and
/// the image is the same unless it was killed.
fn plays(alone: bool, acts: &[Act]) {
    let mode: &[&str] = if alone { &["serve", "--no-supervisor"] } else { &["serve"] };
    let mut server = Server::start_with(mode);
    server.initialize("2025-11-25");
    server.evaluate("(defvar *image* 1)");
    server.evaluate("(setf *image* 2)");
    let mut asked: Vec<Asked> = Vec::new();
    let (mut errors, mut killed) = (0, false);
    for act in acts {
        match *act {
            Act::Ask(what) => {
                let id = i64::try_from(asked.len()).unwrap();
                ask(&mut server, &mut asked, id, what);
            }
            Act::Cancel(back) | Act::Reuse(back, _) => {
                let Some(place) = asked.len().checked_sub(back + 1) else { continue };
                let id = asked[place].id;
                // The id is the last one's that was asked under it.
                let Some(last) = asked.iter_mut().rev().find(|last| last.id == id) else { continue };
                last.cancelled = true;
                server.notify("notifications/cancelled", json!({"requestId": id}));
                if let Act::Reuse(_, what) = *act {
                    ask(&mut server, &mut asked, id, what);
                }
            }
            Act::Say(which) => {
                let (line, refused) = SAYINGS[which];
                server.send_raw(&[line, b"\n"].concat());
                errors += usize::from(refused);
            }
            Act::Wait(time) => std::thread::sleep(Duration::from_millis(time)),
            Act::Kill =>
            {
                #[cfg(target_os = "linux")]
                if !alone {
                    crate::processes::signal(crate::processes::worker(&server), "-KILL");
                    killed = true;
                    asked.iter_mut().filter(|one| !one.cancelled).for_each(|one| one.killed = true);
                }
            }
        }
    }
    for endless in asked.iter_mut().filter(|one| one.what == ENDLESS && !one.cancelled) {
        endless.cancelled = true;
        server.notify("notifications/cancelled", json!({"requestId": endless.id}));
    }
    let image = server.call_tool("evaluate-lisp", json!({"code": "*image*"})).0;
    server.goes_on();
    let crate::client::End { stderr, transcript, .. } = server.finish();
    // A kill while the definition is restored is taken for its fault.
    assert!(killed || image.ends_with("=> 2"), "{image}\n{stderr}");
    let mut answers: HashMap<i64, Vec<&Value>> = HashMap::new();
    for message in &transcript {
        assert!(message.get("method").is_none(), "{message}");
        match message["id"].as_i64() {
            Some(id) => answers.entry(id).or_default().push(message),
            None => errors -= 1,
        }
    }
    assert_eq!(errors, 0, "answers to what was nobody's request");
    for one in &asked {
        let of_id = answers.get(&one.id).map_or(&[][..], Vec::as_slice);
        let is_its = |answer: &&&Value| {
            let (text, is_error) = crate::client::outcome(answer);
            if is_error {
                text.contains(&format!("failed {}\n", one.number))
            } else {
                text.ends_with(&format!("=> {}", one.number))
            }
        };
        if one.cancelled && one.what == ENDLESS && !one.killed {
            let uses = asked.iter().filter(|other| other.id == one.id).count();
            assert!(of_id.len() < uses, "{one:?} was answered: {of_id:?}");
        } else if !one.cancelled && matches!(one.what, 0..=3 | 6) && !one.killed {
            assert_eq!(of_id.iter().filter(is_its).count(), 1, "{one:?}: {of_id:?}");
        }
    }
    for (id, of_id) in &answers {
        let uses: Vec<_> = asked.iter().filter(|one| one.id == *id).collect();
        if !uses.is_empty() {
            let owed = uses.iter().filter(|one| !one.cancelled).count();
            assert!((owed..=uses.len()).contains(&of_id.len()), "{uses:?}: {of_id:?}");
        }
    }
    let unanswered = asked.iter().find(|one| !one.cancelled && !answers.contains_key(&one.id));
    assert!(unanswered.is_none(), "{unanswered:?}");
}

#[test]
fn random_calls_cancellations_noise_and_kills_get_one_answer_per_call() {
    let config = Config { cases: cases(40), max_shrink_iters: 30, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&schedule(), |(alone, acts)| {
        std::panic::catch_unwind(|| plays(alone, &acts)).map_err(|reason| TestCaseError::fail(panic_text(&*reason)))
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
