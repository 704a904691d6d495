//! Failed evaluations: conditions, reader errors, unusual text, and attempts to forge a report.

use super::*;

#[test]
fn division_by_zero_report_has_condition_operation_and_backtrace() {
    let text = fresh().text("(/ 1 0)");
    let start = "[ERROR] DIVISION-BY-ZERO\narithmetic error DIVISION-BY-ZERO signalled\nOperation was (/ 1 0).\n\n[Backtrace]\n0: (ERROR DIVISION-BY-ZERO ";
    assert!(text.starts_with(start), "{text}");
    let end = "\n1: (SB-KERNEL::INTEGER-/-INTEGER 1 0)\n2: (/ 1 0)\n3: (SB-INT:SIMPLE-EVAL-IN-LEXENV (/ 1 0) #<NULL-LEXENV>)\n4: (EVAL (/ 1 0))";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn frame_of_an_undefined_function_has_the_called_name() {
    let failure = fresh().error("(nonexistent-func 42)");
    assert_eq!(failure.kind, "UNDEFINED-FUNCTION");
    assert_eq!(failure.frames[0].call, "(NONEXISTENT-FUNC 42)");
    assert!(restarts(&failure).ends_with(&["RETRY", "ABORT"]), "{:?}", failure.restarts);
}

#[test]
fn undefined_function_called_twice_offers_retry_and_abort_both_times() {
    let lisp = fresh();
    let first = lisp.error("(undefined-twice 1)");
    let second = lisp.error("(undefined-twice 1)");
    assert_eq!(restarts(&first), ["CONTINUE", "USE-VALUE", "RETURN-VALUE", "RETURN-NOTHING", "RETRY", "ABORT"]);
    assert_eq!(second.kind, first.kind);
    assert!(restarts(&second).ends_with(&["RETRY", "ABORT"]), "{:?}", second.restarts);
}

#[test]
fn error_message_is_printed_without_pretty_printer_line_breaks() {
    let lisp = fresh();
    assert_eq!(lisp.error("(+ 1 \"x\")").message.text, "The value \"x\" is not of type NUMBER");
    let long = lisp.error("(error \"about ~S\" (loop for i below 60 collect (list i :a-rather-long-keyword)))");
    assert_eq!(long.message.text.lines().count(), 1, "{}", long.message.text);
}

#[test]
fn frames_are_one_line_each() {
    let lisp = fresh();
    let failure = lisp.error("(defun f (s l) (error \"x\" s l)) (f (format nil \"a~%b\") (loop for i below 60 collect :a-rather-long-keyword))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "F")).expect("a frame of F");
    assert!(frame.call.starts_with("(F \"a\\nb\" (:A-RATHER-LONG-KEYWORD"), "{}", frame.call);
    assert!(failure.frames.iter().all(|frame| !frame.call.contains('\n')));
}

#[test]
fn long_frame_is_cut_and_says_how_many_characters_were_omitted() {
    let lisp = fresh();
    let failure = lisp.error("(defun f (s) (error \"x\" s)) (f (make-string 100000 :initial-element #\\z))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "F")).expect("a frame of F");
    assert!(frame.call.chars().count() < 360, "{} characters", frame.call.chars().count());
    assert!(frame.call.contains("characters omitted]"), "{}", frame.call);
}

#[test]
fn error_message_is_cut_at_10_000_characters_with_an_exact_omitted_count() {
    let failure = fresh().error("(error \"~A\" (make-string 25000 :initial-element #\\m))");
    assert_eq!(failure.message.text.chars().count(), 10_000);
    assert_eq!(failure.message.omitted, 15_000);
}

#[test]
fn at_most_20_frames_are_in_the_report() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun deep (n) (if (zerop n) (error \"deep\") (list (deep (1- n))))) (deep 50)");
    let failure = error("deep", &outcome);
    let text = report::evaluation(&outcome);
    let last = format!("\n... {} more frames (get-backtrace shows them)", failure.total_frames - 20);
    assert!(text.ends_with(&last), "{text}");
    assert!(text.contains("\n19: (DEEP 18)\n..."), "{text}");
    check_error_response(&text).expect("a well-formed report");
    // Not all frames of a deeper stack are kept.
    let outcome = lisp.eval("(deep 5000)");
    let failure = error("deep", &outcome);
    let text = report::evaluation(&outcome);
    let last = format!(
        "\n... {} more frames (get-backtrace shows the innermost 500 and the outermost 500 frames)",
        failure.total_frames - 20
    );
    assert!(text.ends_with(&last), "{text}");
    check_error_response(&text).expect("a well-formed report");
}

#[test]
fn a_frame_of_a_function_shows_its_arguments() {
    let lisp = fresh();
    let failure =
        lisp.error("(defun shows (a b &optional c &key d) (error \"x\" a b c d)) (shows 1 \"two\" :three :d '(4))");
    let frame = failure.frames.iter().find(|frame| calls(&frame.call, "SHOWS")).expect("a frame of SHOWS");
    assert_eq!(frame.call, "(SHOWS 1 \"two\" :THREE :D (4))");
}

#[test]
fn retry_and_abort_restarts_have_descriptions() {
    let failure = fresh().error("(error \"x\")");
    let described: Vec<(&str, &str)> =
        failure.restarts.iter().map(|restart| (restart.name.as_str(), restart.description.as_str())).collect();
    assert_eq!(described, [("RETRY", "Evaluate this form again."), ("ABORT", "Return to top level.")]);
}

#[test]
fn invoking_abort_ends_the_evaluation_and_not_the_process() {
    let lisp = fresh();
    _ = lisp.eval("(write-string \"before\") (invoke-restart 'abort) (write-string \"after\")");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
    _ = lisp.eval("(abort)");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn compute_restarts_returns_retry_and_abort() {
    let lisp = fresh();
    let names = "(loop for restart in (compute-restarts) repeat 2 collect (symbol-name (restart-name restart)))";
    assert_eq!(lisp.value(names), "(\"RETRY\" \"ABORT\")");
    let shown = lisp.value("(compute-restarts)");
    assert!(shown.matches("#<RESTART").count() >= 2, "{shown}");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn invoking_retry_evaluates_the_form_again() {
    let lisp = fresh();
    lisp.values("(defvar *tries* 0)");
    assert_eq!(lisp.value("(if (< (incf *tries*) 3) (invoke-restart (find \"RETRY\" (compute-restarts) :key #'restart-name :test #'string=)) (list :tries *tries*))"), "(:TRIES 3)");
}

#[test]
fn describe_last_error_shows_message_time_id_form_restarts_and_5_frames() {
    let lisp = fresh();
    lisp.error("(restart-case (/ 1 0) (use-zero () :report \"Use zero\" 0))");
    let text = lisp.last_error_text();
    let (head, tail) = text.split_once("\n\nTime: ").expect("a time");
    insta::assert_snapshot!(head, @r"
    Error: DIVISION-BY-ZERO
      arithmetic error DIVISION-BY-ZERO signalled
      Operation was (/ 1 0).
    ");
    let (time, rest) = tail.split_once('\n').expect("something after the time");
    assert!(time.len() == 20 && time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    let (id, rest) = rest.split_once('\n').expect("something after the identifier");
    assert!(id.strip_prefix("Id: E").is_some_and(|number| number.parse::<u64>().is_ok()), "{id}");
    let (form, rest) = rest.split_once('\n').expect("something after the form");
    assert_eq!(form, "Form: 1 (line 1): (restart-case (/ 1 0) (use-zero () :report \"Use zero\" 0))");
    let start = "\nAvailable Restarts:\n  1. USE-ZERO - Use zero\n  2. RETRY - Evaluate this form again.\n  3. ABORT - Return to top level.\n\nBacktrace (top 5 frames):\n  0: (ERROR DIVISION-BY-ZERO ";
    assert!(rest.starts_with(start), "{text}");
    assert!(rest.ends_with("\n\nFor the full backtrace, use get-backtrace."), "{text}");
}

#[test]
fn describe_last_error_and_get_backtrace_say_when_there_is_no_error() {
    let lisp = fresh();
    let none = "No error information available.\n(No error has occurred since the last successful evaluation)";
    assert_eq!(lisp.last_error_text(), none);
    assert_eq!(lisp.backtrace_text(20), none);
}

#[test]
fn get_backtrace_shows_max_frames_and_counts_the_remaining_frames() {
    let lisp = fresh();
    lisp.error("(defun deep (n) (if (zerop n) (error \"deep\") (list (deep (1- n))))) (deep 50)");
    let total = lisp.session().last_error().expect("an error").total_frames;
    let text = lisp.backtrace_text(10);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("Backtrace for SIMPLE-ERROR (10 of {total} frames):"));
    assert_eq!(lines[1], "  0: (ERROR \"deep\")");
    assert_eq!(lines[lines.len() - 1], format!("{} more frames; pass max-frames {total} to see them all.", total - 10));
    let whole = lisp.backtrace_text(total);
    assert!(whole.starts_with(&format!("Backtrace for SIMPLE-ERROR ({total} of {total} frames):")), "{whole}");
    assert!(!whole.contains("more frames"), "{whole}");
}

// Reader errors.

#[test]
fn a_reader_error_says_line_and_column() {
    let lisp = fresh();
    for (code, line) in [
        ("(list 1)\n(foo #<bar>)", 2),
        (")", 1),
        ("(+ 1 2)\n\n   )", 3),
        ("(progn\n  (print 1)\n  (no-such-package:sym))", 3),
        ("(defun f ()\n  (list 1 2)", 2),
        ("\"never closed\nstring", 2),
        ("#| never closed\n\n", 3),
        ("(list 1)\n\n(list . )", 3),
    ] {
        let failure = lisp.error(code);
        let message = failure.message.text.to_lowercase();
        assert!(
            message.contains(&format!("line {line}")) || message.contains(&format!("line: {line}")),
            "{code:?}: {message}"
        );
        assert!(message.contains("column"), "{code:?}: {message}");
        assert!(restarts(&failure).ends_with(&["RETRY", "ABORT"]), "{code:?}: {:?}", failure.restarts);
    }
}

#[test]
fn forms_before_a_reader_error_are_evaluated() {
    let lisp = fresh();
    let outcome = lisp.eval("(defvar *before* :evaluated) (write-string \"out\") (list 1");
    assert_eq!(outcome.stdout.text, "out");
    assert_eq!(error("list", &outcome).kind, "END-OF-FILE");
    assert_eq!(lisp.value("*before*"), ":EVALUATED");
}

#[test]
fn read_from_string_error_is_not_reported_as_a_syntax_error_of_the_code() {
    let failure = fresh().error("(defun parse (s) (read-from-string s)) (parse \"(1 2\")");
    assert_eq!(failure.kind, "END-OF-FILE");
    assert_eq!(missing_frame(&failure, &["PARSE", "EVAL"]), None, "{:#?}", failure.frames);
    assert!(!failure.message.text.contains("The code ends"), "{}", failure.message.text);
}

// Unusual text.

#[test]
fn non_ascii_text_is_preserved_in_output_warnings_and_values() {
    let lisp = fresh();
    let outcome = lisp.eval("(write-string \"日本語 λ é 😀\") (warn \"предупреждение\") \"ß\"");
    assert_eq!(outcome.stdout.text, "日本語 λ é 😀");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: предупреждение"]);
    assert_eq!(values("utf8", &outcome), ["\"ß\""]);
    assert_eq!(lisp.value("(defun λ (ж) (* ж 2)) (λ 21)"), "42");
    assert_eq!(lisp.value("(length \"😀\")"), "1");
}

#[test]
fn surrogates_become_replacement_characters() {
    let outcome = fresh().eval("(write-char (code-char #xd800)) (string (code-char #xdfff))");
    assert_eq!(outcome.stdout.text, "\u{fffd}");
    assert_eq!(values("surrogate", &outcome), ["\"\u{fffd}\""]);
}

#[test]
fn null_and_control_characters_are_preserved_in_output_and_values() {
    let lisp = fresh();
    let outcome = lisp.eval("(dotimes (i 32) (write-char (code-char i))) (write-char (code-char 127)) nil");
    let expected: String = (0..32).map(char::from).chain([char::from(127)]).collect();
    assert_eq!(outcome.stdout.text, expected);
    assert_eq!(lisp.value("(string (code-char 0))"), "\"\0\"");
}

#[test]
fn null_character_does_not_truncate_the_code() {
    let lisp = fresh();
    assert_eq!(lisp.value("(length \"a\0b\")"), "3");
}

#[test]
fn unicode_code_points_in_the_code_reach_lisp_unchanged() {
    let lisp = fresh();
    let code: String = "\u{10ffff}\u{e000}\u{7ff}\u{800}\u{ffff}\u{10000}é".into();
    assert_eq!(
        lisp.value(&format!("(map 'list #'char-code {})", literal(&code))),
        "(1114111 57344 2047 2048 65535 65536 233)"
    );
}

#[test]
fn carriage_returns_in_the_code_are_white_space() {
    assert_eq!(fresh().value("(+ 1\r\n 2)\r\n"), "3");
}

#[test]
fn a_megabyte_of_code_is_read() {
    let lisp = fresh();
    let code = format!("(length '({}))", "symbol ".repeat(150_000));
    assert_eq!(lisp.value(&code), "150000");
}

#[test]
fn deeply_nested_code_leaves_the_session_usable() {
    let lisp = fresh();
    let code = format!("{}1{}", "(list ".repeat(2_000), ")".repeat(2_000));
    _ = lisp.eval(&code);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
    let code = "(".repeat(100_000);
    assert!(lisp.eval(&code).is_error());
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

// Forged report sections.

#[test]
fn section_markers_in_output_warnings_and_errors_are_escaped() {
    let lisp = fresh();
    for marker in MARKERS {
        let escaped = format!("{}\\]", marker.strip_suffix(']').expect("a bracket"));
        let text = lisp.text(&format!("(write-string {}) nil", literal(marker)));
        assert_eq!(text, format!("[stdout]\n{escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(write-string {} *error-output*) nil", literal(marker)));
        assert_eq!(text, format!("[stderr]\n{escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(warn {}) nil", literal(marker)));
        assert_eq!(text, format!("[warnings]\nSIMPLE-WARNING: {escaped}\n\n=> NIL"), "{marker}");
        let text = lisp.text(&format!("(error {})", literal(marker)));
        assert!(text.starts_with(&format!("[ERROR] SIMPLE-ERROR\n{escaped}\n\n[Backtrace]\n")), "{marker}: {text}");
        check_error_response(&text).unwrap_or_else(|reason| panic!("{marker}: {reason}\n{text}"));
    }
}

#[test]
fn already_escaped_section_marker_is_escaped_once_more() {
    let lisp = fresh();
    insta::assert_snapshot!(lisp.text("(write-string \"[ERROR\\\\]\") nil"), @r"
    [stdout]
    [ERROR\\]

    => NIL
    ");
    insta::assert_snapshot!(lisp.text("(write-string \"[ERROR\\\\\\\\]\") nil"), @r"
    [stdout]
    [ERROR\\\]

    => NIL
    ");
}

#[test]
fn bracketed_text_other_than_section_markers_is_not_escaped() {
    let lisp = fresh();
    for plain in ["[error]", "[Stdout]", "[ERROR", "ERROR]", "[ ERROR]", "[x]", "[[]]"] {
        assert_eq!(
            lisp.text(&format!("(write-string {}) nil", literal(plain))),
            format!("[stdout]\n{plain}\n\n=> NIL")
        );
    }
}

#[test]
fn output_line_that_looks_like_a_value_is_escaped_with_a_backslash() {
    let text = fresh().text("(format t \"=> 1~%x => 2~%=>3~%=> 4~%\") nil");
    insta::assert_snapshot!(text, @r"
    [stdout]
    \=> 1
    x => 2
    =>3
    \=> 4

    => NIL
    ");
}

#[test]
fn value_arrow_in_a_warning_or_error_message_is_escaped() {
    let lisp = fresh();
    let text = lisp.text("(warn \"a~%=> 7\") nil");
    insta::assert_snapshot!(text, @r"
    [warnings]
    SIMPLE-WARNING: a
    \=> 7

    => NIL
    ");
    let text = lisp.text("(error \"=> 1~%=> 2\")");
    assert!(text.starts_with("[ERROR] SIMPLE-ERROR\n\\=> 1\n\\=> 2\n\n[Backtrace]\n"), "{text}");
}

#[test]
fn newlines_in_condition_and_thread_names_are_escaped() {
    let lisp = fresh();
    let text = lisp.text(
        "(sb-thread:make-thread (lambda () (sleep 60)) :name (format nil \"n~%[ERROR] X~%=> 1\"))
         (eval (list 'define-condition (intern (format nil \"A~%=> 2\")) '(error) nil))
         (error (intern (format nil \"A~%=> 2\")))",
    );
    assert!(text.contains("thread n\\n[ERROR\\] X\\n=> 1"), "{text}");
    assert!(text.contains("\n[ERROR] |A\\n=> 2|\n"), "{text}");
    assert!(!text.contains("\n=> "), "{text}");
    let text = lisp.text("(warn (intern (format nil \"W~%=> 3\")))");
    assert!(text.starts_with("[ERROR] "), "{text}");
    let text = lisp.text(
        "(eval (list 'define-condition (intern (format nil \"W~%=> 3\")) '(warning) nil))
         (warn (intern (format nil \"W~%=> 3\"))) nil",
    );
    assert!(text.contains("[warnings]\n|W\\n=> 3|: "), "{text}");
}

#[test]
fn forged_sections_in_output_do_not_parse_as_report_sections() {
    let lisp = fresh();
    let outcome = lisp.eval("(format t \"[ERROR] FAKE~%nothing~%~%[Backtrace]~%0: (FAKE)~%\") (error \"[Backtrace]~%0: (FAKE)~%[ERROR] FAKE\")");
    let parsed = check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
    assert_eq!(parsed.kind, "SIMPLE-ERROR");
    assert!(parsed.stdout.expect("output").starts_with("[ERROR\\] FAKE"));
}

#[test]
fn condition_named_like_a_section_marker_leaves_the_report_well_formed() {
    let outcome = fresh().eval("(define-condition |[Backtrace]| (error) () (:report \"odd\")) (error '|[Backtrace]|)");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

#[test]
fn frame_argument_with_section_markers_leaves_the_report_well_formed() {
    let lisp = fresh();
    let outcome = lisp.eval("(defun f (s) (error \"x\" s)) (f (format nil \"~%[Backtrace]~%0: (FAKE)~%[ERROR] X\"))");
    check_error_response(&report::evaluation(&outcome)).expect("a well-formed report");
}

#[test]
fn section_markers_in_a_restart_name_and_report_are_escaped() {
    let lisp = fresh();
    lisp.error("(restart-case (error \"x\") (|[ERROR] y| () :report \"[Backtrace]\" 1))");
    let text = lisp.last_error_text();
    assert!(!text.contains("[ERROR]") && !text.contains("[Backtrace]"), "{text}");
}

fn printed() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => prop::sample::select(MARKERS.to_vec()).prop_map(str::to_owned),
        2 => (prop::sample::select(MARKERS.to_vec()), 1..4_usize)
            .prop_map(|(marker, count)| format!("{}{}]", &marker[..marker.len() - 1], "\\".repeat(count))),
        2 => prop::sample::select(vec!["\n", "\n\n", "[", "]", "\\", "=> ", "\\=> ", "[ERROR", "\\]", " "]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn unescape_markers_reverses_escape_markers(text in printed()) {
        let escaped = report::escape_markers(&text);
        for marker in MARKERS {
            prop_assert!(!escaped.contains(marker), "{escaped:?} holds {marker}");
        }
        prop_assert_eq!(unescape_markers(&escaped), text);
    }
}

/// Runs `check` on 300 random texts, all in one session that no other test uses meanwhile.
fn check(texts: &impl Strategy<Value = String>, check: impl Fn(&TestSession, String) -> Result<(), TestCaseError>) {
    let lisp = fresh();
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let result = TestRunner::new(config).run(texts, |text| check(&lisp, text));
    assert!(result.is_ok(), "{}", result.unwrap_err());
}

#[test]
fn printed_output_can_be_recovered_from_the_escaped_report() {
    check(&printed(), |lisp, text| {
        prop_assume!(!text.is_empty());
        let outcome = lisp.eval(&format!("(write-string {}) (error \"end\")", literal(&text)));
        prop_assert_eq!(&outcome.stdout.text, &text);
        let report = report::evaluation(&outcome);
        for marker in ["[stdout]", "[ERROR]", "[Backtrace]"] {
            prop_assert_eq!(report.matches(marker).count(), 1, "{} in {}", marker, report);
        }
        for marker in ["[stderr]", "[warnings]", "[background]", "[notice]", "[Debugger]"] {
            prop_assert!(!report.contains(marker), "{} in {}", marker, report);
        }
        let section =
            report.strip_prefix("[stdout]\n").and_then(|rest| rest.split_once("[ERROR] ")).map(|(section, _)| section);
        let section = section.and_then(|section| section.strip_suffix("\n\n")).expect("a section of its own");
        let undone: Vec<String> = unescape_markers(section)
            .split('\n')
            .map(|line| match line.strip_prefix('\\') {
                Some(rest) if rest.trim_start_matches('\\').starts_with("=> ") => rest.to_owned(),
                _ => line.to_owned(),
            })
            .collect();
        prop_assert_eq!(undone.join("\n"), text.strip_suffix('\n').unwrap_or(&text));
        Ok(())
    });
}

#[test]
fn arbitrary_error_message_leaves_the_report_well_formed() {
    check(&printed(), |lisp, text| {
        let outcome = lisp.eval(&format!("(error \"~A\" {})", literal(&text)));
        let report = report::evaluation(&outcome);
        let checked = check_error_response(&report);
        prop_assert!(checked.is_ok(), "{:?}\n{}", checked, report);
        let failure = outcome.result.expect_err("an error");
        if text.trim().is_empty() {
            prop_assert!(!failure.message.text.is_empty());
        } else {
            prop_assert_eq!(&failure.message.text, &text);
        }
        Ok(())
    });
}

#[test]
fn arbitrary_code_gets_a_well_formed_report_and_keeps_the_session() {
    check(&any::<String>(), |lisp, code| {
        let outcome = lisp.eval_for(Duration::from_secs(20), &code);
        if outcome.is_error() {
            let report = report::evaluation(&outcome);
            let checked = check_error_response(&report);
            prop_assert!(checked.is_ok(), "{:?}\n{}", checked, report);
        }
        prop_assert_eq!(lisp.text("(cl:+ 1 2)"), "=> 3");
        Ok(())
    });
}
