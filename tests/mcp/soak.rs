//! A long session: code that works, that fails, that prints much and that starts threads. What the server holds at the
//! end is what it held after the first evaluations.
//!
//! `SBCL_MCP_SOAK_EVALUATIONS` sets how many evaluations there are.

#![cfg(target_os = "linux")]

use crate::client::Server;
use serde_json::json;

/// After so many the first look is taken: buffers, caches and the heap have their size by then.
const WARM: usize = 1000;
/// Bytes the worker may have grown by since. SBCL keeps some of what it freed, and no two collections are alike.
const WORKER_TOLERANCE: u64 = 24 << 20;
/// Bytes the supervisor may have grown by.
const SUPERVISOR_TOLERANCE: u64 = 2 << 20;

/// What a process holds.
#[derive(Debug)]
struct Holdings {
    resident: u64,
    threads: u64,
    descriptors: usize,
}

fn holdings(pid: u32) -> Holdings {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let number = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("there is such a line");
        line.split_ascii_whitespace().next().expect("a number").parse().expect("a number")
    };
    Holdings {
        resident: number("VmRSS:") * 1024,
        threads: number("Threads:"),
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it lives").count(),
    }
}

fn worker(server: &Server) -> u32 {
    let pid = server.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it lives");
    children.split_ascii_whitespace().next().expect("a worker").parse().expect("a number")
}

/// Both processes, after the garbage is collected.
fn look(server: &mut Server) -> [Holdings; 2] {
    assert_eq!(server.evaluate("(progn (sb-ext:gc :full t) (sb-ext:gc :full t) 1)"), "=> 1");
    [holdings(server.pid()), holdings(worker(server))]
}

/// The code of evaluation `n`, what its answer must contain, and whether it fails.
fn task(n: usize) -> (String, String, bool) {
    match n % 20 {
        0 => ("(defun g (x) (* x 2)) (g 21)".to_owned(), "=> 42".to_owned(), false),
        1 => ("(/ 1 0)".to_owned(), "[ERROR] DIVISION-BY-ZERO".to_owned(), true),
        2 => (format!("(progn (format t \"line ~d~%\" {n}) {n})"), format!("[stdout]\nline {n}\n\n=> {n}"), false),
        3 => ("(nonexistent 1)".to_owned(), "[ERROR] UNDEFINED-FUNCTION".to_owned(), true),
        4 => ("(warn \"careful\")".to_owned(), "SIMPLE-WARNING: careful".to_owned(), false),
        5 => ("(list 1 2".to_owned(), "[ERROR] END-OF-FILE".to_owned(), true),
        6 => (
            "(dotimes (i 500) (write-line \"some output that is not short\"))".to_owned(),
            "some output".to_owned(),
            false,
        ),
        7 => ("(defparameter *v* (make-list 1000))".to_owned(), "=> *V*".to_owned(), false),
        8 => ("(handler-case (error \"x\") (error (c) (princ-to-string c)))".to_owned(), "=> \"x\"".to_owned(), false),
        9 => (
            "(sb-thread:join-thread (sb-thread:make-thread (lambda () (princ 1) 2)))".to_owned(),
            "=> 2".to_owned(),
            false,
        ),
        10 => ("(defclass point () ((x :initarg :x)))".to_owned(), "POINT".to_owned(), false),
        11 => ("(make-instance 'point :x 1)".to_owned(), "POINT".to_owned(), false),
        12 => ("(make-string 200000 :initial-element #\\y)".to_owned(), "characters omitted]".to_owned(), false),
        13 => (
            "(labels ((r (n) (if (zerop n) (error \"deep\") (+ 1 (r (1- n)))))) (r 300))".to_owned(),
            "deep".to_owned(),
            true,
        ),
        14 => ("(with-output-to-string (s) (print (list 1 2) s))".to_owned(), "(1 2)".to_owned(), false),
        15 => ("(funcall (compile nil '(lambda (x) (+ x 1))) 2)".to_owned(), "=> 3".to_owned(), false),
        16 => ("(with-open-file (s \"/dev/null\") (read-line s nil :end))".to_owned(), "=> :END".to_owned(), false),
        17 => ("(exit)".to_owned(), "[ERROR] SBCL-HOST::EXIT-REFUSED".to_owned(), true),
        18 => ("(break)".to_owned(), "[ERROR] SIMPLE-CONDITION".to_owned(), true),
        _ => (format!("(+ {n} 1)"), format!("=> {}", n + 1), false),
    }
}

fn work(server: &mut Server, range: std::ops::Range<usize>) {
    for n in range {
        let (code, expected, fails) = task(n);
        let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code}));
        assert_eq!(is_error, fails, "{code}: {text}");
        assert!(text.contains(&expected), "{code}: {text}");
        if fails {
            let described = server.call_tool("describe-last-error", json!({})).0;
            assert!(described.starts_with("Error: "), "{described}");
        }
        // What was said is not needed again; a long run would fill the client's memory with it.
        server.transcript.clear();
    }
}

#[test]
fn thousands_of_evaluations_leak_no_memory_threads_or_descriptors() {
    let evaluations = match std::env::var("SBCL_MCP_SOAK_EVALUATIONS") {
        Ok(text) => text.parse().expect("SBCL_MCP_SOAK_EVALUATIONS is a number"),
        Err(_) => 2000,
    };
    assert!(evaluations > WARM, "at least {}", WARM + 1);
    let mut server = Server::ready();
    server.evaluate("(defun earlier () 7)");
    work(&mut server, 0..WARM);
    let before = look(&mut server);
    work(&mut server, WARM..evaluations);
    let after = look(&mut server);
    let tolerances = [SUPERVISOR_TOLERANCE, WORKER_TOLERANCE];
    for ((before, after), tolerance) in before.iter().zip(&after).zip(tolerances) {
        assert!(after.resident <= before.resident + tolerance, "{before:?} became {after:?}");
        assert_eq!(after.threads, before.threads, "{before:?} became {after:?}");
        assert_eq!(after.descriptors, before.descriptors, "{before:?} became {after:?}");
    }
    println!("{evaluations} evaluations: {before:?} became {after:?}");
    assert_eq!(server.evaluate("(earlier)"), "=> 7");
    server.goes_on();
    assert!(server.finish().status.success());
}
