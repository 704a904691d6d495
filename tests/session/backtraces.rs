//! Backtraces: the calls of generated chains, compared with the frames that are reported.

use std::fmt::Write as _;

use crate::support::{calls, fresh, missing_frame};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sbcl::{ErrorRecord, Evaluation};

/// The way in which one function of a chain calls the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// A call in tail position.
    Tail,
    /// A call inside an argument.
    Plain,
    /// A funcall of a symbol.
    Funcall,
    /// A call by apply.
    Apply,
    /// A call by mapcar.
    Mapcar,
    /// A call from a lambda that is bound to a variable.
    Lambda,
    /// A call from a local function.
    Flet,
    /// A call from a local recursive function.
    Labels,
    /// A call from the expansion of a macro.
    Macro,
    /// A call inside unwind-protect.
    Protected,
    /// A call under a dynamic binding.
    Dynamic,
    /// A call under a handler that declines.
    Handled,
    /// A call whose values are arguments of multiple-value-call.
    MultipleValues,
    /// A call from a generic function with an :around method.
    Generic,
    /// A call inside a catch.
    Catch,
}

const LINKS: [Link; 15] = [
    Link::Tail,
    Link::Plain,
    Link::Funcall,
    Link::Apply,
    Link::Mapcar,
    Link::Lambda,
    Link::Flet,
    Link::Labels,
    Link::Macro,
    Link::Protected,
    Link::Dynamic,
    Link::Handled,
    Link::MultipleValues,
    Link::Generic,
    Link::Catch,
];

/// Appends the definition of function number `index` of a chain, which calls `next`. Returns the functions of its
/// frames, innermost first.
fn define(code: &mut String, prefix: &str, index: usize, link: Link, next: &str) -> Vec<String> {
    let name = format!("{prefix}{index}");
    let upper = name.to_uppercase();
    let body = match link {
        Link::Tail => format!("({next} x)"),
        Link::Plain => format!("(list ({next} x))"),
        Link::Funcall => format!("(list (funcall '{next} x))"),
        Link::Apply => format!("(list (apply #'{next} x nil))"),
        Link::Mapcar => format!("(mapcar #'{next} (list x))"),
        Link::Lambda => format!(
            "(let ((f (lambda (y) (list ({next} y))))) (declare (notinline funcall)) (list (funcall (identity f) x)))"
        ),
        Link::Flet => format!("(flet ((inner (y) (list ({next} y)))) (declare (notinline inner)) (list (inner x)))"),
        Link::Labels => {
            format!("(labels ((walk (n) (if (zerop n) (list ({next} x)) (list (walk (1- n)))))) (list (walk 2)))")
        }
        Link::Macro => {
            _ = writeln!(code, "(defmacro via-{name} (form) `(list ,form))");
            format!("(via-{name} ({next} x))")
        }
        Link::Protected => format!("(unwind-protect ({next} x) (list x))"),
        Link::Dynamic => format!("(let ((*print-base* 10)) ({next} x))"),
        Link::Handled => format!("(handler-bind ((error (lambda (c) (declare (ignore c)) nil))) ({next} x))"),
        Link::MultipleValues => format!("(multiple-value-call #'list ({next} x) 1)"),
        Link::Generic => {
            _ = writeln!(code, "(defgeneric {name} (x))");
            _ = writeln!(code, "(defmethod {name} ((x integer)) (list ({next} x)))");
            _ = writeln!(code, "(defmethod {name} :around ((x integer)) (list (call-next-method)))");
            return vec![format!("(:METHOD {upper} (INTEGER))"), format!("(:METHOD {upper} :AROUND (INTEGER))")];
        }
        Link::Catch => format!("(catch 'tag-{name} ({next} x))"),
    };
    _ = writeln!(code, "(defun {name} (x) {body})");
    match link {
        Link::Flet => vec!["(FLET INNER".to_owned(), upper],
        Link::Labels => vec!["(LABELS WALK".to_owned(), "(LABELS WALK".to_owned(), "(LABELS WALK".to_owned(), upper],
        Link::Lambda => vec!["(LAMBDA (Y)".to_owned(), upper],
        _ => vec![upper],
    }
}

/// Returns code that defines and calls a chain, and the functions that its backtrace must show.
fn chain(prefix: &str, links: &[Link]) -> (String, Vec<String>) {
    let mut code = String::new();
    let last = links.len();
    _ = writeln!(code, "(defun {prefix}{last} (x) (error \"the end of ~A\" x))");
    let mut frames = vec!["ERROR".to_owned(), format!("{prefix}{last}").to_uppercase()];
    for index in (0..last).rev() {
        frames.extend(define(&mut code, prefix, index, links[index], &format!("{prefix}{}", index + 1)));
    }
    _ = writeln!(code, "({prefix}0 7)");
    frames.push("EVAL".to_owned());
    (code, frames)
}

/// Describes the first expected frame that is missing, or a wrong number of frames of the chain's own functions.
fn difference(error: &ErrorRecord, prefix: &str, expected: &[String]) -> Option<String> {
    let matches = |frame: &str, name: &str| {
        // The name of a local function includes its enclosing function: (FLET INNER :IN F3).
        if name.starts_with("(FLET") || name.starts_with("(LABELS") || name.starts_with("(LAMBDA") {
            frame.strip_prefix('(').is_some_and(|call| call.starts_with(name))
        } else if name.starts_with("(:METHOD") {
            let fast = name.replacen("(:METHOD", "(SB-PCL::FAST-METHOD", 1);
            calls(frame, name) || calls(frame, &fast)
        } else {
            calls(frame, name)
        }
    };
    let mut frames = error.frames.iter();
    for name in expected {
        if !frames.any(|frame| matches(&frame.call, name)) {
            return Some(format!("no frame of {name} in its place"));
        }
    }
    let upper = prefix.to_uppercase();
    let own = |name: &str| name.starts_with(&upper);
    let counted = error.frames.iter().filter(|frame| frame.call.strip_prefix('(').is_some_and(&own)).count();
    let called = expected.iter().filter(|name| own(name)).count();
    (counted != called).then(|| format!("{counted} frames of the chain's functions, {called} were called"))
}

fn listing(error: &ErrorRecord) -> String {
    error.frames.iter().map(|frame| format!("{}: {}\n", frame.number, frame.call)).collect()
}

#[test]
fn every_kind_of_call_is_shown_with_all_frames() {
    let lisp = fresh();
    for link in LINKS {
        lisp.reset();
        let (code, expected) = chain("single-", &[link, link]);
        let error = lisp.error(&code);
        assert_eq!(difference(&error, "single-", &expected), None, "{link:?}\n{code}\n{}", listing(&error));
        assert!(calls(&error.frames[0].call, "ERROR"), "{link:?}\n{}", listing(&error));
    }
}

#[test]
fn every_pair_of_call_kinds_is_shown_with_all_frames() {
    let lisp = fresh();
    for first in LINKS {
        for second in LINKS {
            lisp.reset();
            let (code, expected) = chain("pair-", &[first, second]);
            let error = lisp.error(&code);
            assert_eq!(
                difference(&error, "pair-", &expected),
                None,
                "{first:?} {second:?}\n{code}\n{}",
                listing(&error)
            );
        }
    }
}

#[test]
fn random_call_chains_are_shown_with_all_frames() {
    let lisp = fresh();
    let config = Config { cases: 60, max_shrink_iters: 200, failure_persistence: None, ..Config::default() };
    let links = prop::collection::vec(prop::sample::select(LINKS.to_vec()), 1..25);
    let result = TestRunner::new(config).run(&links, |links| {
        lisp.reset();
        let (code, expected) = chain("random-", &links);
        let outcome = lisp.eval(&code);
        let error = outcome.result.expect_err("the chain ends in an error");
        let difference = difference(&error, "random-", &expected);
        prop_assert!(difference.is_none(), "{}\n{}\n{}", difference.unwrap_or_default(), code, listing(&error));
        prop_assert!(calls(&error.frames[0].call, "ERROR"));
        prop_assert_eq!(error.total_frames, error.frames.len() as u64);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn call_chain_has_no_internal_frames_between_the_calls() {
    let lisp = fresh();
    let (code, _) = chain("plain-", &[Link::Plain; 30]);
    let error = lisp.error(&code);
    let found: Vec<&str> = error.frames.iter().map(|frame| frame.call.as_str()).collect();
    let mut expected = vec!["(ERROR \"the end of ~A\" 7)".to_owned()];
    expected.extend((0..=30).rev().map(|index| format!("(PLAIN-{index} 7)")));
    expected.push("(SB-INT:SIMPLE-EVAL-IN-LEXENV (PLAIN-0 7) #<NULL-LEXENV>)".to_owned());
    expected.push("(EVAL (PLAIN-0 7))".to_owned());
    assert_eq!(found, expected);
}

#[test]
fn tail_calls_keep_the_frames_of_their_callers() {
    let lisp = fresh();
    let (code, _) = chain("tail-", &[Link::Tail; 200]);
    let error = lisp.error(&code);
    let found: Vec<String> = error.frames.iter().skip(1).take(201).map(|frame| frame.call.clone()).collect();
    let expected: Vec<String> = (0..=200).rev().map(|index| format!("(TAIL-{index} 7)")).collect();
    assert_eq!(found, expected);
}

#[test]
fn callers_are_shown_from_the_error_out_to_eval() {
    let error = fresh().error("(defun a () (/ 1 0)) (defun b () (a)) (defun c () (b)) (c)");
    assert_eq!(missing_frame(&error, &["ERROR", "A", "B", "C", "EVAL"]), None, "{}", listing(&error));
    assert_eq!(error.frames.last().expect("frames").call, "(EVAL (C))");
}

/// Returns code that recurses to `depth`, each call with a different argument.
fn recursion(name: &str, depth: u64) -> String {
    format!("(defun {name} (n) (if (zerop n) (error \"bottom\") (list ({name} (1- n))))) ({name} {depth})")
}

#[test]
fn recursion_to_depth_5000_is_counted_and_1000_frames_are_kept() {
    let lisp = fresh();
    for depth in [1, 2, 3, 5, 10, 50, 100, 500, 990, 995, 996, 997, 998, 999, 1000, 1001, 1500, 2000, 3500, 5000] {
        let error = lisp.error(&recursion("recurse", depth));
        let upper = |n: u64| format!("(RECURSE {n})");
        // The frames are ERROR, the calls from 0 to the depth, SIMPLE-EVAL-IN-LEXENV and EVAL.
        let total = depth + 4;
        assert_eq!(error.total_frames, total, "depth {depth}");
        let kept = error.frames.len() as u64;
        assert_eq!(kept, total.min(1000), "depth {depth}");
        for (index, frame) in error.frames.iter().enumerate() {
            let index = index as u64;
            let number = if total > 1000 && index >= 500 { total - 1000 + index } else { index };
            assert_eq!(frame.number, number, "depth {depth}");
            if number >= 1 && number <= depth + 1 {
                assert_eq!(frame.call, upper(number - 1), "depth {depth}");
            }
        }
        assert_eq!(error.frames[0].call, "(ERROR \"bottom\")");
        assert_eq!(error.frames.last().expect("frames").call, format!("(EVAL {})", upper(depth)));
    }
}

#[test]
fn deep_backtrace_says_how_many_middle_frames_are_missing() {
    let lisp = fresh();
    lisp.error(&recursion("recurse", 5000));
    let text = lisp.backtrace_text(1_000_000);
    assert!(text.starts_with("Backtrace for SIMPLE-ERROR ("), "{}", &text[..80]);
    assert!(text.contains("5004"), "{}", &text[..80]);
    let gap = text.lines().find(|line| line.contains("4004")).expect("a line with the number between");
    assert!(!gap.trim_start().starts_with("4004: "), "{gap}");
    let at = text.find(gap).expect("it is there");
    assert!(text[..at].contains("\n  499: (RECURSE 498)") && !text[..at].contains("\n  500: "), "{gap}");
    assert!(text[at..].contains("\n  4504: (RECURSE 4503)"), "{gap}");
}

#[test]
fn frames_through_a_nested_eval_are_shown() {
    let lisp = fresh();
    let error = lisp.error(
        "(defun inner-eval () (error \"x\")) (defun outer-eval () (list (eval '(list (inner-eval))))) (outer-eval)",
    );
    let chain = ["ERROR", "INNER-EVAL", "EVAL", "OUTER-EVAL", "EVAL"];
    assert_eq!(missing_frame(&error, &chain), None, "{}", listing(&error));
}

#[test]
fn frames_through_load_are_shown() {
    let lisp = fresh();
    let error = lisp.error("(defun loaded () (error \"x\")) (defun loads () (list (load (make-string-input-stream \"(loaded)\")))) (loads)");
    let chain = ["ERROR", "LOADED", "EVAL", "LOAD", "LOADS", "EVAL"];
    assert_eq!(missing_frame(&error, &chain), None, "{}", listing(&error));
}

#[test]
fn frames_through_sort_mapcar_and_other_system_functions_are_shown() {
    let lisp = fresh();
    for (code, chain) in [
        ("(defun cmp (a b) (error \"~A ~A\" a b)) (defun run () (list (sort (list 1 2) 'cmp))) (run)", ["CMP", "RUN"]),
        ("(defun bad (x) (error \"~A\" x)) (defun run () (list (mapcar 'bad '(1)))) (run)", ["BAD", "RUN"]),
        (
            "(defun bad (k v) (error \"~A~A\" k v)) (defun run () (let ((h (make-hash-table))) (setf (gethash 1 h) 1) (maphash 'bad h) h)) (run)",
            ["BAD", "RUN"],
        ),
        ("(defun bad (x) (error \"~A\" x)) (defun run () (list (find-if 'bad '(1)))) (run)", ["BAD", "RUN"]),
        ("(defun bad (x y) (error \"~A~A\" x y)) (defun run () (list (reduce 'bad '(1 2 3)))) (run)", ["BAD", "RUN"]),
        (
            "(defun bad (s x &rest r) (error \"~A~A~A\" s x r)) (defun run () (list (format nil \"~/bad/\" 1))) (run)",
            ["BAD", "RUN"],
        ),
    ] {
        let error = lisp.error(code);
        let [inner, outer] = chain;
        assert_eq!(missing_frame(&error, &["ERROR", inner, outer, "EVAL"]), None, "{code}\n{}", listing(&error));
    }
}

#[test]
fn a_handlers_own_frames_are_shown() {
    let lisp = fresh();
    let error = lisp.error(
        "(defun in-handler (c) (error \"because of ~A\" c)) (defun fails () (error \"first\")) \
         (defun guarded () (handler-bind ((error #'in-handler)) (list (fails)))) (guarded)",
    );
    let chain = ["ERROR", "IN-HANDLER", "ERROR", "FAILS", "GUARDED", "EVAL"];
    assert_eq!(missing_frame(&error, &chain), None, "{}", listing(&error));
}

#[test]
fn frame_0_is_the_point_of_the_error() {
    let lisp = fresh();
    lisp.values("(defun point-error () (list (error \"x\"))) (defun point-type (x) (declare (type fixnum x)) x) (defun point-undefined () (list (not-defined-anywhere 1 2)))");
    lisp.values("(defun point-break () (list (break \"here\"))) (defun point-unbound () (list *not-bound-anywhere*)) (defun point-stack (x) (list (point-stack x)))");
    lisp.values("(defun point-trap (x) (declare (double-float x)) (* x x)) (defun point-memory (x) (sb-sys:sap-ref-8 (sb-sys:int-sap x) 0)) (defun point-car (x) (car x))");
    lisp.values("(defun point-count (a b) (list a b)) (defun point-cerror () (list (cerror \"on\" \"x\"))) (defun point-heap (n) (make-array n))");
    for (code, first) in [
        ("(point-error)", "ERROR"),
        ("(point-type \"x\")", "POINT-TYPE"),
        ("(point-undefined)", "NOT-DEFINED-ANYWHERE"),
        ("(point-break)", "BREAK"),
        ("(point-unbound)", "POINT-UNBOUND"),
        ("(point-stack 1)", "POINT-STACK"),
        ("(point-trap 1d300)", "POINT-TRAP"),
        ("(point-memory 8)", "POINT-MEMORY"),
        ("(point-car 5)", "POINT-CAR"),
        ("(point-count 1)", "POINT-COUNT"),
        ("(point-cerror)", "CERROR"),
        ("(invoke-debugger (make-condition 'simple-error :format-control \"x\"))", "INVOKE-DEBUGGER"),
    ] {
        let error = lisp.error(code);
        let top: String =
            error.frames.iter().take(4).map(|frame| format!("{}: {}\n", frame.number, frame.call)).collect();
        assert!(calls(&error.frames[0].call, first), "{code}: expected {first}\n{top}");
    }
}

/// SBCL would also read values from frames that do not yet contain them, where the words may not be references to objects.
#[test]
fn arguments_of_interrupted_frames_are_shown_only_where_they_are_certain() {
    let lisp = fresh();
    lisp.values(
        "(defun exhaust (x) (declare (optimize debug)) (list (exhaust (list x)))) \
         (defun peek (x) (declare (optimize debug)) (sb-sys:sap-ref-8 (sb-sys:int-sap x) 0)) \
         (defun spin (x) (declare (optimize debug)) (let ((n 0)) (loop (setf n (+ n x))))) \
         (defun with-limit (x) (sb-ext:with-timeout 0.05 (spin x)))",
    );
    for (code, call) in [
        ("(exhaust 1)", "(EXHAUST #<unavailable arguments>)"),
        ("(peek 8)", "(PEEK 8)"),
        ("(with-limit 5)", "(SPIN 5)"),
    ] {
        let error = lisp.error(code);
        assert!(error.frames.iter().any(|frame| frame.call == call), "{code}: {}", listing(&error));
    }
}

#[test]
fn frame_shows_the_arguments_of_the_call() {
    let lisp = fresh();
    let error = lisp.error(
        "(defun args (a &optional (b 2) &rest r &key k &allow-other-keys) (error \"x\" a b r k)) (args 1 :two :k 3)",
    );
    let frame = error.frames.iter().find(|frame| calls(&frame.call, "ARGS")).expect("a frame of ARGS");
    assert_eq!(frame.call, "(ARGS 1 :TWO :K 3)");
    let error = lisp.error("(defun changes (x) (setf x (list x x)) (error \"~A\" x)) (changes 5)");
    assert!(error.frames.iter().any(|frame| calls(&frame.call, "CHANGES")), "{}", listing(&error));
}

#[test]
fn declaim_debug_0_drops_tail_call_frames_until_a_reset() {
    let lisp = fresh();
    let error = lisp
        .error("(declaim (optimize (debug 0))) (defun gone-a () (error \"x\")) (defun gone-b () (gone-a)) (gone-b)");
    assert!(!error.frames.iter().any(|frame| calls(&frame.call, "GONE-B")), "{}", listing(&error));
    lisp.reset();
    let (code, expected) = chain("again-", &[Link::Tail, Link::Tail]);
    let error = lisp.error(&code);
    assert_eq!(difference(&error, "again-", &expected), None, "a reset restores the policy\n{}", listing(&error));
}

#[test]
fn server_frames_are_never_shown() {
    let lisp = fresh();
    for code in [
        "(error \"x\")",
        "(/ 1 0)",
        "(car 5)",
        "nowhere",
        "(no-such 1)",
        "(break)",
        "(list 1",
        "#.(error \"x\")",
        "(let ((1 2)) 3)",
    ] {
        let error = lisp.error(code);
        for frame in &error.frames {
            let upper = frame.call.to_uppercase();
            assert!(!upper.contains("MCP") && !upper.contains("WORKER"), "{code}: {}", listing(&error));
        }
        let last = &error.frames.last().expect("frames").call;
        assert!(calls(last, "EVAL") || calls(last, "READ"), "{code}: {}", listing(&error));
    }
}

#[test]
fn frames_within_a_feature_expression_have_no_package_prefixes() {
    let lisp = fresh();
    for code in ["#+(", "(list #-(and", "#+#.(cl:error \"x\") 1", "#+(and #.(cl:error 'cl:end-of-file)) 1"] {
        let error = lisp.error(code);
        for frame in &error.frames {
            assert!(!frame.call.contains("COMMON-LISP:"), "{code}: {}", listing(&error));
        }
        assert!(error.frames[0].call.starts_with("(ERROR "), "{code}: {}", listing(&error));
    }
}

#[test]
fn print_backtrace_called_by_user_code_shows_no_server_frames() {
    let lisp = fresh();
    let lambda = "(EVAL (LIST (MINE)))";
    let code = "(defun mine () (sb-debug:print-backtrace) 1)\n(list (mine))";
    let printed = lisp.eval(code).stdout.text.clone();
    let frames: Vec<_> = printed.lines().skip(1).collect();
    assert_eq!(
        frames,
        [
            "0: (MINE)",
            "1: (SB-INT:SIMPLE-EVAL-IN-LEXENV (MINE) #<NULL-LEXENV>)",
            "2: (SB-INT:SIMPLE-EVAL-IN-LEXENV (LIST (MINE)) #<NULL-LEXENV>)",
            &format!("3: {lambda}")
        ],
        "{printed}"
    );
    // The same holds for every backtrace function, in handlers and hooks, and in other threads.
    for code in [
        "(sb-debug:backtrace)",
        "(princ (sb-debug:list-backtrace))",
        "(princ (sb-debug:backtrace-as-list))",
        "(sb-debug:map-backtrace #'print)",
        "(sb-debug:print-backtrace :from :interrupted-frame)",
        "(sb-debug:print-backtrace :from (sb-di:top-frame))",
        "(handler-bind ((warning (lambda (c) c (sb-debug:print-backtrace)))) (warn \"x\"))",
        "(handler-bind ((error (lambda (c) c (sb-debug:print-backtrace)))) (error \"x\"))",
        "(let ((*debugger-hook* (lambda (c h) c h (sb-debug:print-backtrace)))) (error \"x\"))",
        "(sb-thread:join-thread (sb-thread:make-thread (lambda () (sb-debug:print-backtrace))))",
        "(print-object (make-instance 'shown) *standard-output*)",
    ] {
        lisp.eval("(defclass shown () ()) (defmethod print-object ((s shown) o) (sb-debug:print-backtrace :stream o))");
        let printed = lisp.run(Evaluation::new(code)).stdout.text.clone();
        assert!(printed.contains("LAMBDA") || printed.contains("EVAL"), "{code}: {printed}");
        assert!(!printed.contains("SBCL-HOST") && !printed.contains("foreign function"), "{code}: {printed}");
    }
    // :START and :COUNT select frames of the caller, however deep the stack is.
    let deep =
        "(labels ((f (n) (if (zerop n) (sb-debug:print-backtrace :start 2 :count 2) (list (f (1- n)))))) (f 9999))";
    let printed = lisp.eval(deep).stdout.text.clone();
    assert_eq!(printed.lines().skip(1).collect::<Vec<_>>(), ["2: ((LABELS F) 2)", "3: ((LABELS F) 3)"], "{printed}");
}

#[test]
fn error_in_another_thread_prints_its_frames_to_stderr() {
    let lisp = fresh();
    let outcome = lisp.eval(
        "(defun in-thread () (error \"in a thread\")) (defun starts () (sb-thread:make-thread (lambda () (list (in-thread))) :name \"failing\")) \
         (sb-thread:join-thread (starts))",
    );
    let error = crate::support::error("join", &outcome);
    assert_eq!(error.kind, "SB-THREAD:JOIN-THREAD-ERROR");
    assert_eq!(missing_frame(&error, &["ERROR", "SB-THREAD:JOIN-THREAD", "EVAL"]), None, "{}", listing(&error));
    // The thread's own error appears in its output stream, with its frames in order.
    let stderr = &outcome.stderr.text;
    let at = |part: &str| stderr.find(part).unwrap_or_else(|| panic!("{part} is missing from stderr:\n{stderr}"));
    assert!(at("SIMPLE-ERROR") < at("in a thread"));
    assert!(at("(ERROR \"in a thread\")") < at("(IN-THREAD)"), "{stderr}");
}
