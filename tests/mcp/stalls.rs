//! What needs no Lisp is answered at once, whatever else the server does.

use std::time::{Duration, Instant};

use crate::client::{Scratch, Server};
use serde_json::json;

/// How long a ping, a cancellation or a question may take on an idle machine.
const SLOWEST: Duration = Duration::from_millis(250);
/// How much slower than an idle server on the same machine a busy server may be.
const FACTOR: u32 = 10;
/// Requests that are timed in all.
const REQUESTS: usize = 200;

/// A form of some 370 KB that lacks a parenthesis.
fn broken_form() -> String {
    let calls: String = (0..4_900)
        .map(|n| format!("    (print (list x {n} (+ x {n}) \"this is text number {n}\" 'symbol-{n}))\n"))
        .collect();
    format!("(defun broken (x)\n  (progn\n{calls}    )\n")
}

/// A server that does the work, an idle one that shows how busy the machine is, and how long each took to answer.
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

    /// Notes what a request has taken that began at `begin`.
    fn note(&mut self, begin: Instant, what: &str) {
        self.timed += 1;
        if begin.elapsed() > self.slowest {
            self.slowest = begin.elapsed();
            self.slowest_request = what.to_owned();
        }
    }

    /// Times one request of each kind. `work` is what the server does meanwhile.
    fn look(&mut self, work: &str) {
        let begin = Instant::now();
        self.idle.request("ping", json!({}));
        self.slowest_idle = self.slowest_idle.max(begin.elapsed());

        let begin = Instant::now();
        self.server.request("ping", json!({}));
        self.note(begin, &format!("a ping during {work}"));

        let begin = Instant::now();
        let waiting = self.server.post_call("evaluate-lisp", json!({"code": ":cancelled"}));
        self.server.notify("notifications/cancelled", json!({"requestId": waiting}));
        self.server.request("ping", json!({}));
        self.note(begin, &format!("a cancellation during {work}"));

        for (tool, arguments) in [
            ("describe-last-error", json!({})),
            ("get-backtrace", json!({"locals": true, "max-frames": 1000})),
            ("evaluation", json!({})),
            ("configure-limits", json!({})),
        ] {
            let begin = Instant::now();
            self.server.call_tool(tool, arguments);
            self.note(begin, &format!("{tool} during {work}"));
        }
    }

    /// Has the server do `work` and times requests until that is answered.
    fn during(&mut self, work: &str, tool: &str, arguments: serde_json::Value) {
        let id = self.server.post_call(tool, arguments);
        loop {
            self.look(work);
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
    stopwatch.server.call_tool("load", json!({"path": deep}));
    stopwatch.server.call_tool("configure-limits", json!({"max-answer": 1_000_000}));
    let million = "(dotimes (i 20000) (format t \"~50,'0d~%\" i) (format *error-output* \"e\"))";
    let errors = "(loop repeat 300 do (handler-case (read-from-string \"(a (b\") (error ())))";
    for _ in 0..4 {
        stopwatch.during("the evaluation of a broken form", "evaluate-lisp", json!({"code": broken}));
        stopwatch.during("the loading of a broken file", "load", json!({"path": broken_file}));
        stopwatch.during("a record of errors", "evaluate-lisp", json!({"code": errors, "record-errors": true}));
        stopwatch.during("a large output", "evaluate-lisp", json!({"code": million}));
        stopwatch.during(
            "a page of a large output",
            "evaluation",
            json!({"action": "output", "characters": 1_000_000}),
        );
        let comment = format!("{}\n1", "; a comment\n".repeat(100_000));
        stopwatch.during("a large request", "evaluate-lisp", json!({"code": comment}));
        stopwatch.during("a search for a system", "load", json!({"system": "no-such-system", "directory": systems}));
        stopwatch.during(
            "a large value",
            "evaluate-lisp",
            json!({"code": "(make-string 1000000 :initial-element #\\x)"}),
        );
        stopwatch.during("a deep backtrace", "evaluate-lisp", json!({"code": "(deep 5000)"}));
        stopwatch.during("a compilation", "evaluate-lisp", json!({"code": functions}));
        stopwatch.during("the loading of a file", "load", json!({"path": loaded, "force": "all"}));
        stopwatch.during(
            "a collection",
            "evaluate-lisp",
            json!({"code": "(progn (loop repeat 20 collect (make-array 1000000)) (gc :full t))"}),
        );
    }
    stopwatch.during("a checkpoint", "checkpoint", json!({"action": "save", "name": "a"}));
    while stopwatch.timed < REQUESTS {
        stopwatch.look("nothing");
    }
    let Stopwatch { slowest, slowest_idle, slowest_request, timed, .. } = stopwatch;
    println!(
        "{timed} requests; the slowest, {slowest_request}, took {slowest:?}; an idle server's ping {slowest_idle:?}"
    );
    let allowed = SLOWEST.max(slowest_idle * FACTOR);
    assert!(slowest <= allowed, "{slowest_request} took {slowest:?}, more than {allowed:?}");
}
