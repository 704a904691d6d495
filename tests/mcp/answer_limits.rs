//! Answer sizes: `max-answer`, the output that is kept, and paging through the rest with check-evaluation.

use crate::client::{DEADLINE, NO_LOCALS, Server, call_err, call_ok, error_id, evaluate_err, frame_locals};
use crate::processes::kill_worker;
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

const RESET: &str = "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER";

/// The default of `max-answer`, in characters.
const DEFAULT_MAX_ANSWER: usize = 9_500;

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Returns the arguments of the check-evaluation call that the first marker in `text` names.
fn next_call(text: &str) -> Option<Value> {
    let (_, rest) = text.split_once(" omitted; check-evaluation ")?;
    let (call, _) = rest.split_once(" shows ")?;
    Some(serde_json::from_str(call).expect("JSON"))
}

/// Makes the calls that the markers name, from the first one on, and returns the concatenated pages.
fn pages(server: &mut Server, text: &str) -> String {
    let (mut call, mut all) = (next_call(text), String::new());
    while let Some(arguments) = call {
        let page = call_ok(server, "check-evaluation", arguments);
        assert!(length(&page) <= DEFAULT_MAX_ANSWER, "{}", length(&page));
        call = next_call(&page);
        let (_, shown) = page.split_once(":\n").expect("a heading");
        all += shown.rsplit_once("[... ").filter(|_| call.is_some()).map_or(shown, |(shown, _)| shown);
    }
    all
}

/// Waits until the evaluation has printed `words`.
fn await_printed(server: &mut Server, words: &str) {
    let end = std::time::Instant::now() + DEADLINE;
    while !server.call_tool("check-evaluation", json!({"part": "output"})).0.contains(words) {
        assert!(std::time::Instant::now() < end, "{words} is not printed");
    }
}

#[apply(both_modes)]
fn long_output_is_cut_in_the_middle_and_paged_by_check_evaluation(mode: Mode) {
    let mut server = mode.ready();
    let text = server.evaluate("(dotimes (i 30000) (format t \"line ~5,'0D~%\" i)) (list :done)");
    assert!(length(&text) <= DEFAULT_MAX_ANSWER && length(&text) > DEFAULT_MAX_ANSWER - 1_000, "{}", length(&text));
    assert!(text.starts_with("[stdout]\nline 00000\n"), "{text}");
    assert!(text.ends_with("\nline 29999\n\n=> (:DONE)"), "{text}");
    let (_, rest) = text.split_once("[... ").expect("a marker");
    let omitted: usize = rest.split(' ').next().unwrap().parse().unwrap();
    // The text after the marker begins in the middle of a line.
    assert_eq!(text.matches("line ").count() * 11 + omitted + 1, 30_000 * 11);
    let rest = pages(&mut server, &text);
    let from = next_call(&text).unwrap()["from"].as_u64().unwrap() as usize;
    let all: String = (0..30_000).map(|line| format!("line {line:05}\n")).collect();
    assert!(rest == all[from..], "{} of {}", rest.len(), all.len() - from);
}

#[apply(both_modes)]
fn evaluation_output_merges_streams_and_escapes_markers(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(format t \"out~%\") (format *error-output* \"[ERROR]~%\") (write-string \"=> 3\") (terpri *error-output*)",
    );
    assert_eq!(
        call_ok(&mut server, "check-evaluation", json!({"part": "output"})),
        "Evaluation 1, output, characters 0 to 16 of 17:\nout\n[ERROR\\]\n\\=> 3\n"
    );
    // Positions count characters as printed, without the escaping backslashes.
    assert_eq!(
        call_ok(&mut server, "check-evaluation", json!({"part": "output", "from": 4, "limit": 7})),
        "Evaluation 1, output, characters 4 to 10 of 17:\n[ERROR\\][... 6 characters omitted; check-evaluation {\"id\": 1, \
         \"part\": \"output\", \"from\": 11} shows them]"
    );
    assert_eq!(
        call_ok(&mut server, "check-evaluation", json!({"part": "output", "from": 17})),
        "Evaluation 1, output: no characters from 17 on; the total is 17."
    );
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({"part": "error"})), "Evaluation 1, error: none.");
}

#[apply(both_modes)]
fn output_beyond_max_output_is_reported_as_omitted(mode: Mode) {
    let mut server = mode.start_with(&["--max-output", "20000"]);
    server.initialize("2025-06-18");
    let text = server.evaluate("(dotimes (i 50000) (write-char #\\x)) (values)");
    assert!(text.ends_with("x[... 30000 characters omitted]\n\n; No values"), "{}", &text[text.len() - 200..]);
    assert!(length(&text) <= DEFAULT_MAX_ANSWER && next_call(&text).is_some(), "{text}");
    assert!(pages(&mut server, &text).ends_with("x[... 30000 characters omitted]"));
}

#[apply(both_modes)]
fn long_values_are_cut_in_the_middle_and_short_output_is_complete(mode: Mode) {
    let mut server = mode.ready();
    let text =
        server.evaluate("(write-string \"short\") (values :first (make-string 40000 :initial-element #\\v) :last)");
    assert!(length(&text) <= DEFAULT_MAX_ANSWER, "{}", length(&text));
    assert!(text.starts_with("[stdout]\nshort\n\n=> :FIRST\n=> \"vvv") && text.ends_with("vvv\"\n=> :LAST"), "{text}");
    assert_eq!(next_call(&text).unwrap()["part"], "values");
    let rest = pages(&mut server, &text);
    assert!(rest.starts_with("vvv") && rest.ends_with("\"\n=> :LAST"), "{rest}");
    let all = call_ok(&mut server, "check-evaluation", json!({"part": "values", "from": 40_000}));
    assert!(all.starts_with("Evaluation 1, values, characters 40000 to "), "{all}");
}

#[apply(both_modes)]
fn long_error_report_keeps_its_message_and_ten_frames(mode: Mode) {
    let mut server = mode.ready();
    let text = evaluate_err(
        &mut server,
        "(defun deep (n) (if (zerop n) (error \"~A\" (make-string 9000 :initial-element #\\m)) (list (deep (1- n)))))
         (dotimes (i 20000) (write-char #\\x))
         (deep 30)",
    );
    assert!(length(&text) <= DEFAULT_MAX_ANSWER, "{}", length(&text));
    assert!(text.contains(&"m".repeat(2_000)) && text.contains("\n9: (DEEP 8)\n"), "{text}");
    let described = crate::client::last_error(&mut server);
    assert!(length(&described) <= DEFAULT_MAX_ANSWER && described.contains("\n  4: (DEEP 3)\n"), "{described}");
    let shown = call_ok(&mut server, "check-evaluation", json!({"part": "error", "from": 8_990}));
    assert_eq!(shown, "Evaluation 1, error, characters 8990 to 8999 of 9000:\nmmmmmmmmmm");
}

#[apply(both_modes)]
fn every_tool_answer_stays_within_max_answer(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(dotimes (i 3000) (eval `(defun ,(intern (format nil \"FUNCTION-~D\" i)) () nil))) (values)");
    let locals: String = (0..60).map(|n| format!("(v{n} (make-string 250 :initial-element #\\l)) ")).collect();
    server.evaluate(&format!(
        "(defun f (n) (let ({locals}) (if (zerop n) (error \"x\") (list (f (1- n)) {})))) :ok",
        (0..60).map(|n| format!("v{n} ")).collect::<String>()
    ));
    for number in 0..200 {
        evaluate_err(&mut server, &format!("(error \"error number {number} of the history\")"));
    }
    evaluate_err(&mut server, "(f 30)");
    for (tool, arguments) in [
        ("list-definitions", json!({})),
        ("describe-last-error", json!({})),
        ("get-backtrace", json!({"locals": true})),
        ("get-backtrace", json!({"locals": true, "max-frames": 1000})),
        ("describe-last-error", json!({"list": 200})),
    ] {
        let text = call_ok(&mut server, tool, arguments.clone());
        assert!(length(&text) <= DEFAULT_MAX_ANSWER, "{tool} {arguments}: {}", length(&text));
    }
    // Each page of a backtrace begins where the one before ended.
    let (mut from, mut numbers) = (0, Vec::new());
    loop {
        let text = call_ok(&mut server, "get-backtrace", json!({"locals": true, "max-frames": 1000, "from": from}));
        assert!(length(&text) <= DEFAULT_MAX_ANSWER, "{}", length(&text));
        let frames = text.lines().filter_map(|line| line.strip_prefix("  ")?.split_once(": (")?.0.parse::<u64>().ok());
        numbers.extend(frames);
        let Some((_, next)) = text.split_once("pass `from` ") else { break };
        from = next.split(' ').next().unwrap().parse().unwrap();
    }
    assert!(numbers.len() > 30 && numbers.iter().copied().eq(0..numbers.len() as u64), "{numbers:?}");
    call_ok(&mut server, "configure-limits", json!({"max-answer": 100_000}));
    assert!(length(&call_ok(&mut server, "get-backtrace", json!({"locals": true}))) > DEFAULT_MAX_ANSWER);
}

#[apply(both_modes)]
fn truncated_lists_count_the_omitted_entries_and_say_how_to_narrow_down(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defvar *long* (make-string 200000 :initial-element #\\l)) (defmacro mine () 1) (defclass k () ())
         (defpackage :of-mine) (dotimes (i 1000) (eval `(defun ,(intern (format nil \"FUNCTION-~D\" i)) () nil))) nil",
    );
    let text = call_ok(&mut server, "list-definitions", json!({}));
    assert!(text.contains("\n\n... 904 more. Narrow the list by `type` or `package`, or raise max-answer"), "{text}");
    let text = call_ok(&mut server, "list-definitions", json!({"type": "functions"}));
    assert!(text.contains(" more. Narrow the list by `package`, or raise max-answer"), "{text}");
    let text = call_ok(&mut server, "list-definitions", json!({"type": "functions", "package": "cl-user"}));
    assert!(text.ends_with(" more. To see more, raise max-answer (configure-limits) and `limit`."), "{text}");
    let text = call_ok(&mut server, "list-definitions", json!({"limit": 2000}));
    assert!(length(&text) <= DEFAULT_MAX_ANSWER && length(&text) > DEFAULT_MAX_ANSWER - 2_000, "{}", length(&text));
    for part in [
        " more do not fit here. Narrow the list by `type` or `package`, or raise max-answer (conf",
        &format!("[Variables]\n- *LONG* = \"{}[... 199801 characters omitted]\n", "l".repeat(199)),
        "[Macros]\n- MINE ()\n",
        "[Classes]\n- K\n",
        "[Packages]\n- OF-MINE",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let locals: String = (0..60).map(|n| format!("(v{n} (make-string 900 :initial-element #\\l)) ")).collect();
    let uses: String = (0..60).map(|n| format!("v{n} ")).collect();
    let code = format!("(defun f () (let ({locals}) (cerror \"go\" \"x\") (list {uses})))\n(f)");
    call_err(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    let text = frame_locals(&mut server, 1);
    assert!(
        length(&text) <= DEFAULT_MAX_ANSWER && text.starts_with("V0 = \"lll") && text.contains("\nV59 = "),
        "{text}"
    );
    assert!(text.ends_with("\nLong values are shortened: eval-in-frame shows a variable in full."), "{text}");
    assert_eq!(frame_locals(&mut server, 0), NO_LOCALS);
    call_ok(&mut server, "abort-evaluation", json!({}));
    for number in 0..150 {
        evaluate_err(
            &mut server,
            &format!("(error \"error number {number}, and so on, and so on, and so on, and so on\")"),
        );
    }
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 200}));
    let (shown, rest) = history.rsplit_once("\n... ").unwrap();
    let last: u64 = shown.lines().last().unwrap()[1..].split(' ').next().unwrap().parse().unwrap();
    assert!(rest.contains(&format!(" older errors (E{} and before) ", last - 1)), "{rest}");
}

#[apply(both_modes)]
fn error_history_keeps_the_last_200_errors(mode: Mode) {
    let mut server = mode.ready();
    for number in 1..=205 {
        evaluate_err(&mut server, &format!("(error \"n{number}\")"));
    }
    call_ok(&mut server, "configure-limits", json!({"max-answer": 50_000}));
    let history = call_ok(&mut server, "describe-last-error", json!({"list": 200}));
    assert_eq!(history.lines().count(), 200, "{history}");
    assert!(history.starts_with("E205  ") && history.lines().last().unwrap().starts_with("E6  "), "{history}");
}

#[test]
fn configured_limits_survive_reset_and_image_loss() {
    let mut server = Server::start_with(&["--max-answer", "7000"]);
    server.initialize("2025-06-18");
    let shown = "Current limits:\n  timeout: 30 seconds\n  max-output: 1000000 characters\n  max-answer: 7000 \
                 characters\n  \
                 on-error: abort";
    assert_eq!(call_ok(&mut server, "configure-limits", json!({})), shown);
    let changed = shown.replace("7000", "6500").replace("abort", "debug");
    assert_eq!(call_ok(&mut server, "configure-limits", json!({"max-answer": "6500", "on-error": "debug"})), changed);
    // The configured default applies to an evaluation without `on-error`.
    assert!(evaluate_err(&mut server, "(error \"x\")").contains("\n[Debugger]\nHeld."));
    let arguments = json!({"code": "(error \"x\")", "on-error": "abort"});
    assert!(!call_err(&mut server, "evaluate-lisp", arguments).contains("[Debugger]"));
    assert!(length(&server.evaluate("(make-string 20000 :initial-element #\\x)")) <= 6_500);
    call_ok(&mut server, "reset-session", json!({}));
    assert_eq!(call_ok(&mut server, "configure-limits", json!({})), changed);
    let (lost, _) = server.call_tool(
        "evaluate-lisp",
        json!({"code": "(sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void \
                        sb-alien:int)) 1)"}),
    );
    assert!(lost.contains("[ERROR] IMAGE-LOST"), "{lost}");
    assert_eq!(call_ok(&mut server, "configure-limits", json!({})), changed);
}

#[apply(both_modes)]
fn last_20_evaluations_are_kept_in_at_most_16_megabytes(mode: Mode) {
    let mut server = mode.ready();
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({})), "No evaluations of this client yet.");
    for number in 1..=22 {
        server.evaluate(&format!("(print {number})"));
    }
    let gone = "is no longer kept: the session keeps the last 20, up to 16 MB, until it is reset, or its image is \
                replaced or lost.";
    for id in [1, 2] {
        assert_eq!(call_err(&mut server, "check-evaluation", json!({"id": id})), format!("Evaluation {id} {gone}"));
    }
    let third = call_ok(&mut server, "check-evaluation", json!({"id": 3}));
    assert!(third.starts_with("Evaluation 3: succeeded after 0.0 s\n(print 3)\n"), "{third}");
    assert!(third.ends_with("\nOutput: 3 characters\nValues: 4 characters"), "{third}");
    assert_eq!(
        call_err(&mut server, "check-evaluation", json!({"id": 23})),
        "There is no evaluation 23: the newest is 22."
    );
    // Waiting for a finished evaluation returns the answer that evaluate-lisp gave.
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({"id": 22, "wait": 25})), "[stdout]\n\n22 \n\n=> 22");
    // Large evaluations displace older ones, and an evaluation above the limit is dropped at once.
    call_ok(&mut server, "configure-limits", json!({"max-output": 10_000_000}));
    let large = |characters: u64| {
        format!("(let ((s (make-string 1000 :initial-element #\\😀))) (dotimes (i {characters}) (write-string s)) nil)")
    };
    for _ in 0..3 {
        server.evaluate(&large(2_000));
    }
    assert!(call_err(&mut server, "check-evaluation", json!({"id": 23})).ends_with(gone));
    call_ok(&mut server, "check-evaluation", json!({"id": 24}));
    let text = server.evaluate(&large(5_000));
    assert!(text.contains(" characters omitted]") && next_call(&text).is_none(), "{text}");
    assert!(call_err(&mut server, "check-evaluation", json!({"id": 26})).ends_with(gone));
}

const NO_EVALUATIONS_SINCE_2: &str = "No evaluations of this client since the session was reset, or the image was \
    replaced or lost; evaluations up to 2 are no longer kept.";

#[apply(both_modes)]
fn evaluation_numbers_are_not_reused_after_reset_or_image_loss(mode: Mode) {
    let mut server = mode.start();
    server.initialize("2025-06-18");
    server.evaluate("(defun place () (error \"here\"))");
    server.evaluate("2");
    assert_eq!(call_ok(&mut server, "reset-session", json!({})), RESET);
    for arguments in [json!({}), json!({"wait": 1}), json!({"part": "output"})] {
        assert_eq!(call_ok(&mut server, "check-evaluation", arguments), NO_EVALUATIONS_SINCE_2);
    }
    server.evaluate("(defun place () (error \"there\"))");
    assert!(call_ok(&mut server, "check-evaluation", json!({})).starts_with("Evaluation 3: succeeded"));
    assert!(call_err(&mut server, "check-evaluation", json!({"id": 2})).contains("no longer kept"));
    evaluate_err(&mut server, "(place)");
    let trace = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(trace.contains(": (PLACE)\n     at evaluation 3, line 1"), "{trace}");
    // A restored function still belongs to the evaluation that defined it.
    let mut server = Server::ready();
    server.evaluate("1");
    server.evaluate("(defun place () (error \"here\"))");
    kill_worker(&server);
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({})), NO_EVALUATIONS_SINCE_2);
    let (lost, _) = server.call_tool(
        "evaluate-lisp",
        json!({"code": "(sb-alien:alien-funcall (sb-alien:extern-alien \"abort\" (function sb-alien:void)))"}),
    );
    assert!(lost.contains("[ERROR] IMAGE-LOST"), "{lost}");
    let first = call_err(&mut server, "check-evaluation", json!({"id": 2}));
    assert!(first.contains("no longer kept"), "{first}");
    evaluate_err(&mut server, "(place)");
    assert!(call_ok(&mut server, "check-evaluation", json!({})).starts_with("Evaluation 4: failed"));
    let trace = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(trace.contains(": (PLACE)\n     at evaluation 2, line 1"), "{trace}");
}

#[apply(both_modes)]
fn running_evaluation_can_be_inspected_waited_for_and_cancelled(mode: Mode) {
    let mut server = mode.ready();
    let running = server.post_call("evaluate-lisp", json!({"code": "(format t \"begun~%\")\n(loop (sleep 0.01))"}));
    await_printed(&mut server, "begun");
    let queued = server.post_call("evaluate-lisp", json!({"code": "(defvar *ran* t)"}));
    let status = call_ok(&mut server, "check-evaluation", json!({"id": 1}));
    assert!(status.starts_with("Evaluation 1: running for "), "{status}");
    assert!(status.ends_with(" s\n(format t \"begun~%\") …\nOutput so far: 6 characters"), "{status}");
    insta::allow_duplicates! { insta::assert_snapshot!(call_ok(&mut server, "check-evaluation", json!({})), @r"
    Evaluation 2: waiting for earlier evaluations
    (defvar *ran* t)
    Output so far: 0 characters
    "); }
    // The evaluation still runs when the wait has elapsed.
    let waited = call_ok(&mut server, "check-evaluation", json!({"id": 1, "wait": 0.05}));
    assert!(waited.starts_with("Evaluation 1: running for "), "{waited}");
    let waiting = server.post_call("check-evaluation", json!({"id": 1, "wait": 25}));
    let cancelled = call_ok(&mut server, "abort-evaluation", json!({"id": 2}));
    assert!(cancelled.starts_with("Evaluation 2: failed after 0.0 s with CANCELLED\n"), "{cancelled}");
    assert!(server.outcome(queued).0.starts_with("[ERROR] CANCELLED\n"));
    assert_eq!(crate::client::last_error(&mut server).lines().next(), Some("No error information available."));
    let cancelled = call_ok(&mut server, "abort-evaluation", json!({"id": 1}));
    assert!(cancelled.starts_with("Evaluation 1: failed after "), "{cancelled}");
    assert!(cancelled.contains(" s with CANCELLED (E1)\n"), "{cancelled}");
    let (text, is_error) = server.outcome(running);
    assert!(
        is_error && text.starts_with("[stdout]\nbegun\n\n[ERROR] CANCELLED\nThe evaluation was cancelled; "),
        "{text}"
    );
    assert_eq!(server.outcome(waiting), (format!("{text}{}", error_id(1)), true));
    // The evaluation must not have reached its last form.
    call_ok(&mut server, "abort-evaluation", json!({"id": 1}));
    assert_eq!(server.evaluate("(boundp '*ran*)"), "=> NIL");
}

#[apply(both_modes)]
fn held_evaluation_keeps_its_number_when_resumed_by_a_restart(mode: Mode) {
    let mut server = mode.ready();
    let code = "(progn (write-line \"before\") (cerror \"Go on.\" \"stop\") (write-line \"after\") :done)";
    call_err(&mut server, "evaluate-lisp", json!({"code": code, "on-error": "debug"}));
    let status = call_ok(&mut server, "check-evaluation", json!({}));
    assert!(status.starts_with("Evaluation 1: held in the debugger with SIMPLE-ERROR (E1)\n"), "{status}");
    // An evaluation in a frame has its own number.
    call_ok(
        &mut server,
        "eval-in-frame",
        json!({"frame": 0, "code": "(write-line \"inside\")\n(defun h () (error \"h\"))"}),
    );
    let output = call_ok(&mut server, "check-evaluation", json!({"part": "output"}));
    assert_eq!(output, "Evaluation 2, output, characters 0 to 6 of 7:\ninside\n");
    let (slow, is_error) = server.call_tool("eval-in-frame", json!({"frame": 0, "code": "(loop)", "timeout": 0.2}));
    assert!(is_error && slow.contains("[ERROR] TIMEOUT\n") && slow.contains("0.2 seconds"), "{slow}");
    insta::allow_duplicates! { insta::assert_snapshot!(call_ok(&mut server, "invoke-restart", json!({"restart": "CONTINUE"})), @r"
    [stdout]
    after

    => :DONE
    "); }
    let output = call_ok(&mut server, "check-evaluation", json!({"id": 1, "part": "output"}));
    assert_eq!(output, "Evaluation 1, output, characters 0 to 12 of 13:\nbefore\nafter\n");
    assert!(call_ok(&mut server, "check-evaluation", json!({"id": 1})).starts_with("Evaluation 1: succeeded"));
    evaluate_err(&mut server, "(h)");
    let trace = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(trace.contains(": (H)\n     at evaluation 2, line 2"), "{trace}");
    // After the release the answer no longer offers the debugger.
    call_err(&mut server, "evaluate-lisp", json!({"code": "(error \"x\")", "on-error": "debug"}));
    assert_eq!(call_ok(&mut server, "abort-evaluation", json!({"id": 5})), "Evaluation aborted.");
    let status = call_ok(&mut server, "check-evaluation", json!({}));
    assert!(status.starts_with("Evaluation 5: failed after ") && status.contains(" with SIMPLE-ERROR (E"), "{status}");
    call_ok(&mut server, "reset-session", json!({}));
}

#[apply(both_modes)]
fn hundred_thousand_values_are_truncated_to_max_answer(mode: Mode) {
    let mut server = mode.ready();
    for value in ["nil", "(make-string 1000)"] {
        let code = format!("(values-list (make-list 100000 :initial-element {value}))");
        let text = server.evaluate(&code);
        assert!(text.starts_with("=> ") && text.ends_with(" characters omitted]"), "{text}");
        assert!(text.chars().count() <= 9_500, "{}", text.len());
    }
}
