//! Source locations: lines of frames and warnings, definitions with their source text, folded internal frames, similar
//! names.

use std::path::{Path, PathBuf};

use crate::client::{Scratch, Server, call_err, call_ok, evaluate_err, frame_locals, server_arch};
use crate::processes::kill_worker;
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::json;

/// Returns a path as the server shows it: relative to its working directory.
fn shown(path: &Path) -> String {
    let directory = std::env::current_dir().unwrap();
    path.strip_prefix(directory).unwrap_or(path).display().to_string()
}

fn backtrace(server: &mut Server) -> String {
    call_ok(server, "get-backtrace", json!({"locals": true}))
}

/// Returns the location line under the frame of `call`.
#[track_caller]
fn location<'a>(backtrace: &'a str, call: &str) -> &'a str {
    let mut lines = backtrace.lines().skip_while(|line| !line.contains(call));
    lines.nth(1).unwrap_or_else(|| panic!("no {call} in:\n{backtrace}")).trim()
}

// ---- Evaluated code

#[test]
fn lines_of_restored_definitions_are_those_of_their_evaluation() {
    let mut server = Server::ready();
    server.evaluate("(defun first-one () 1)\n\n(defun fails (x)\n  (car x)\n  (error \"x ~A\" x))");
    let place = |server: &mut Server| {
        evaluate_err(server, "(fails '(1))");
        location(&backtrace(server), "(FAILS (1))").to_owned()
    };
    let before = place(&mut server);
    assert!(before.starts_with("at evaluation 1, line 5: "), "{before}");
    kill_worker(&server);
    assert_eq!(place(&mut server), before);
}

#[apply(both_modes)]
fn backtrace_names_the_line_of_the_failing_subform(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defmacro twice (&body body) `(progn ,@body ,@body))");
    server.evaluate(
        "(list 1)\n(progn ; (a comment\n  (defun area (w h) \"a (string \\\" \"\n    #| (a #| nested |# block |#\n    \
         (list #\\( #\\) '|a (b| `(,w . ,h) #'list #+sbcl 1 #-sbcl (no\n no) #(1 2))\n    (twice\n      \
         (* w\n         (length h)))))\n(defun caller (x)\n  (list\n    (area x 2)))",
    );
    server.evaluate("(list 1 2 3)");
    evaluate_err(&mut server, "(caller 1)");
    let text = backtrace(&mut server);
    assert_eq!(location(&text, "(CALLER 1)"), "at evaluation 2, line 12: (area x 2)))", "{text}");
    assert_eq!(location(&text, "(AREA 1 2)"), "at evaluation 2, line 9: (length h)))))", "{text}");
    // The source text is kept as long as the function.
    for _ in 0..100 {
        server.evaluate("(defun other () 1)");
    }
    server.evaluate("(sb-ext:gc :full t)");
    evaluate_err(&mut server, "(caller 1)");
    assert_eq!(location(&backtrace(&mut server), "(AREA 1 2)"), "at evaluation 2, line 9: (length h)))))");
}

#[apply(both_modes)]
fn frames_of_methods_local_functions_and_quoted_code_have_lines(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defgeneric run (x)\n  (:method ((x integer))\n    (list\n      (car x))))\n\
         (defun outer (x)\n  (labels ((inner (y)\n             (list (run y))))\n    (mapcar\n      #'inner x)))\n\
         (eval '(defun quoted (x)\n         (list\n           (outer x))))",
    );
    evaluate_err(&mut server, "(quoted '(1))");
    let text = backtrace(&mut server);
    assert_eq!(location(&text, "(:METHOD RUN (INTEGER))"), "at evaluation 1, line 4: (car x))))", "{text}");
    assert_eq!(location(&text, "(LABELS INNER"), "at evaluation 1, line 7: (list (run y))))", "{text}");
    assert_eq!(location(&text, "(QUOTED (1))"), "at evaluation 1, line 12: (outer x))))", "{text}");
}

#[apply(both_modes)]
fn long_source_line_is_shown_from_the_failing_form_and_cut(mode: Mode) {
    let mut server = mode.ready();
    let padding = "x".repeat(90);
    server.evaluate(&format!("(defun f (x) (list :{padding}) (list (/ x 0) \"{padding}\"))"));
    evaluate_err(&mut server, "(f 1)");
    let text = backtrace(&mut server);
    let line = location(&text, "(F 1)").strip_prefix("at evaluation 1, line 1: ").expect("a location");
    assert!(line.starts_with("(/ x 0)") && line.ends_with('…') && line.chars().count() == 100, "{line}");
}

#[apply(both_modes)]
fn frame_in_code_with_user_reader_macros_still_has_a_line(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(set-macro-character #\\[ (lambda (s c) (declare (ignore c)) (read-delimited-list #\\] s t)))\n\
         (set-macro-character #\\] (get-macro-character #\\)))",
    );
    server.evaluate("(list 1)\n(defun f (x)\n  (list 'a [list #| ] \"( |# x]\n    (car x)))");
    evaluate_err(&mut server, "(f 1)");
    let text = backtrace(&mut server);
    let at = location(&text, "(F 1)");
    assert!(at.starts_with("at evaluation 2, line "), "{text}");
}

#[apply(both_modes)]
fn definitions_after_user_reader_macros_have_exact_lines(mode: Mode) {
    let directory = Scratch::below_target();
    let file = directory.join("own.lisp");
    let text = "(eval-when (:compile-toplevel :load-toplevel :execute)\n  \
                (set-dispatch-macro-character #\\# #\\L (lambda (s c n) (declare (ignore c n)) `(lambda (!1) ,(read s))))\n  \
                (set-dispatch-macro-character #\\# #\\? (lambda (s c n) (declare (ignore c n)) (read s))))\n\
                (defun own (list)\n  (list #?\"(\"\n        (mapcar #L(list !1) list)\n        (car list)))\n\
                (defun after (list)\n  (list (own list)\n        (car (first list))))\n";
    std::fs::write(&file, text).expect("a file");
    let mut server = mode.ready();
    server.evaluate(&format!("(let ((*readtable* (copy-readtable))) (load (compile-file {:?})))", file.display()));
    evaluate_err(&mut server, "(after '(1))");
    let text = backtrace(&mut server);
    let at = location(&text, "(AFTER (1))");
    assert!(at.ends_with("own.lisp:10: (car (first list))))"), "{text}");
    // The number of forms that such a macro reads is unknown, so the function's line may be shown.
    evaluate_err(&mut server, "(own 1)");
    let text = backtrace(&mut server);
    let at = location(&text, "(OWN 1)");
    assert!(at.contains("own.lisp:4: (defun own (list)") || at.contains("own.lisp:5: "), "{text}");
}

#[apply(both_modes)]
fn compile_file_in_an_evaluation_records_no_evaluation_source(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("a.lisp");
    std::fs::write(&path, "(defun from-fasl (x) x) (defclass from-fasl () ())").unwrap();
    let text = server.evaluate(&format!(
        "(load (compile-file {path:?}))\n(list (sb-introspect:definition-source-plist (sb-introspect:find-definition-source #'from-fasl))
           (sb-introspect:definition-source-plist (sb-introspect:find-definition-source (find-class 'from-fasl))))"
    ));
    assert_eq!(text, "=> (NIL NIL)");
}

// ---- Files

#[apply(both_modes)]
fn frame_in_a_changed_or_deleted_file_has_no_line(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("a.lisp");
    std::fs::write(&path, "; ünïcödé — λ\n\n(defun f (x)\n  (let ((y x))\n    (car y)))\n").unwrap();
    // The modification times must differ by at least a second for file systems with that resolution.
    let earlier = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(earlier).unwrap();
    server.evaluate(&format!("(load (compile-file {path:?}))"));
    evaluate_err(&mut server, "(f 1)");
    let place = shown(&path);
    assert_eq!(location(&backtrace(&mut server), "(F 1)"), format!("at {place}:5: (car y)))"));
    std::fs::write(&path, "(defun f (x)\n  (let ((y x))\n    (car y)))\n").unwrap();
    evaluate_err(&mut server, "(f 1)");
    assert_eq!(location(&backtrace(&mut server), "(F 1)"), format!("at {place} (file has changed)"));
    std::fs::remove_file(&path).unwrap();
    evaluate_err(&mut server, "(f 1)");
    assert_eq!(location(&backtrace(&mut server), "(F 1)"), format!("at {place}"));
    // A file that is not regular is not opened.
    server.evaluate(&format!("(sb-posix:mkfifo {path:?} #o600)"));
    evaluate_err(&mut server, "(f 1)");
    assert!(location(&backtrace(&mut server), "(F 1)").starts_with(&format!("at {place}")));
}

/// Sets the file's modification time to `seconds` before now.
fn set_age(path: &Path, seconds: u64) {
    let time = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[apply(both_modes)]
fn describe_symbol_source_shows_no_text_from_a_changed_file(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("s.lisp");
    let text = "(defun s1 (x)\n (list x 1))\n(defvar *s2* 2)\n(defun s2 (x) x)\n(defstruct s3 a)\n";
    let place = shown(&path);
    for (loading, seconds) in
        [("(load {})", 100), ("(load (compile-file {}))", 100), ("(load {})", 50), ("(load (compile-file {}))", 50)]
    {
        std::fs::write(&path, text).unwrap();
        set_age(&path, 50);
        server.evaluate(&loading.replace("{}", &format!("{path:?}")));
        for (name, line) in [("s1", 1), ("*s2*", 3), ("s2", 4), ("s3", 5), ("make-s3", 5)] {
            let answer = call_ok(&mut server, "describe-symbol", json!({"name": name, "source": true}));
            assert!(answer.contains(&format!("\n  Source: {place}:{line}\n  Text:\n    (def")), "{loading}: {answer}");
        }
        std::fs::write(&path, format!("(defun s0 () 0)\n{text}")).unwrap();
        set_age(&path, seconds);
        for name in ["s1", "s2"] {
            let answer = call_ok(&mut server, "describe-symbol", json!({"name": name, "source": true}));
            let expected = format!("\n  Source: {place} (file has changed)\n  Text: not available");
            assert!(answer.ends_with(&expected), "{loading} {seconds}: {answer}");
        }
        for name in ["*s2*", "s3"] {
            let answer = call_ok(&mut server, "describe-symbol", json!({"name": name, "source": true}));
            assert!(answer.contains("\n  Text: not available"), "{loading} {seconds}: {answer}");
        }
    }
}

#[apply(both_modes)]
fn frame_in_a_file_changed_with_equal_mtime_has_no_line(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("c.lisp");
    let text = "(in-package :cl-user)\n\n(defun f (x)\n  (error \"~a ~a\" (car x)))\n\n(defun g (x)\n  (list (f x)))\n";
    let place = shown(&path);
    for code in ["(load {})", "(load (compile-file {}))"] {
        std::fs::write(&path, text).unwrap();
        set_age(&path, 50);
        server.evaluate(&code.replace("{}", &format!("{path:?}")));
        evaluate_err(&mut server, "(g 1)");
        let trace = backtrace(&mut server);
        assert_eq!(location(&trace, "(F 1)"), format!("at {place}:4: (error \"~a ~a\" (car x)))"), "{code}");
        assert_eq!(location(&trace, "(G 1)"), format!("at {place}:7: (list (f x)))"), "{code}");
        for inserted in 1..text.len() {
            let more: String = (0..inserted).map(|n| if n % 7 == 6 { '\n' } else { ';' }).collect();
            std::fs::write(&path, format!("{more}\n{text}")).unwrap();
            set_age(&path, 50);
            evaluate_err(&mut server, "(g 1)");
            let trace = backtrace(&mut server);
            for call in ["(F 1)", "(G 1)"] {
                assert_eq!(location(&trace, call), format!("at {place} (file has changed)"), "{code} {inserted}");
            }
        }
    }
}

#[apply(both_modes)]
fn load_compile_file_and_asdf_warnings_name_file_line_and_form(mode: Mode) {
    let mut server = mode.start_with_environment(&["--structured-content"], &[]);
    server.initialize("2025-11-25");
    let directory = Scratch::below_target();
    let path = directory.join("a.lisp");
    std::fs::write(
        &path,
        "(in-package :cl-user)\n\n(defun idle (x)\n  (list\n    (not-there 1)))\n(defmethod also ((x list))\n  (let ((unused 1))\n    x))\n",
    )
    .unwrap();
    std::fs::write(directory.join("warned.asd"), "(defsystem \"warned\" :components ((:file \"a\")))").unwrap();
    let place = shown(&path);
    let expected = [
        format!("The variable X is defined but never used. ({place}:3, in (DEFUN IDLE))"),
        format!("undefined function: COMMON-LISP-USER::NOT-THERE ({place}:5, in (DEFUN IDLE))"),
        format!("({place}:7, in (DEFMETHOD ALSO (LIST)))"),
    ];
    for code in [
        format!("(load {path:?})"),
        format!("(compile-file {path:?})"),
        format!("(asdf:load-asd {:?}) (asdf:load-system \"warned\")", directory.join("warned.asd")),
    ] {
        let (text, _) = server.call_tool("evaluate-lisp", json!({"code": code}));
        for warning in &expected {
            assert!(text.contains(warning), "{code}: {warning}\n{text}");
        }
        let warnings = server.transcript.last().unwrap()["result"]["structuredContent"]["warnings"].clone();
        let undefined =
            warnings.as_array().unwrap().iter().find(|w| w["message"].as_str().unwrap().contains("NOT-THERE"));
        let undefined = undefined.expect("the warning");
        assert_eq!(
            (&undefined["file"], &undefined["line"], &undefined["column"], &undefined["form"]),
            (&json!(place), &json!(5), &json!(5), &json!("(DEFUN IDLE)")),
            "{code}"
        );
    }
}

#[apply(both_modes)]
fn undefined_function_and_variable_warnings_name_the_line(mode: Mode) {
    let mut server = mode.ready();
    let text = server.evaluate("(list 1)\n(defun f (x)\n  (list x\n    (nowhere x)))\n(list 2)");
    assert!(text.contains("undefined function: COMMON-LISP-USER::NOWHERE (line 4)"), "{text}");
    let text = server.evaluate("(list 1)\n(defun g ()\n  (list\n    nowhere))");
    assert!(text.contains("undefined variable: COMMON-LISP-USER::NOWHERE (line 4)"), "{text}");
    // The forms around these variables are made by DEFUN and DEFMETHOD.
    let text = server.evaluate("(defun h (x)\n  (print x)\n  elsewhere)\n(defmethod m ((x list))\n  unknown)");
    assert!(text.contains("undefined variable: COMMON-LISP-USER::ELSEWHERE (line 3)"), "{text}");
    assert!(text.contains("undefined variable: COMMON-LISP-USER::UNKNOWN (line 5)"), "{text}");
}

#[apply(both_modes)]
fn syntax_error_in_a_system_file_is_reported_briefly_with_its_place(mode: Mode) {
    let mut server = mode.ready();
    let directory = Scratch::below_target();
    std::fs::write(directory.join("broken.asd"), "(defsystem \"broken\" :components ((:file \"bad\")))").unwrap();
    std::fs::write(
        directory.join("bad.lisp"),
        "(in-package :cl-user)\n\n(defun bad (x)\n  (list x)\n\n(defun worse (x) x)\n",
    )
    .unwrap();
    server.evaluate(&format!("(asdf:load-asd {:?})", directory.join("broken.asd")));
    let text = evaluate_err(&mut server, "(asdf:load-system \"broken\")");
    let place = format!("{}:3, in (DEFUN BAD)", shown(&directory.join("bad.lisp")));
    assert!(text.contains(&format!(" ({place})\n")), "{text}");
    // SBCL's own message contains the absolute path once more.
    let path = directory.display().to_string();
    assert!(text.chars().count() - path.len() < 800, "{}\n{text}", text.chars().count());
    assert!(text.contains(" frames of ASDF\n") && !text.contains("PERFORM-PLAN"), "{text}");
    assert!(backtrace_of(&mut server).contains("PERFORM-PLAN"));
    let text = evaluate_err(&mut server, &format!("(load {:?})", directory.join("bad.lisp")));
    assert!(text.contains(&format!("\nIn {place}.\n")), "{text}");
    assert!(text.contains(" frames of the loader\n"), "{text}");
}

fn backtrace_of(server: &mut Server) -> String {
    call_ok(server, "get-backtrace", json!({"max-frames": 1000}))
}

#[apply(both_modes)]
fn warnings_and_errors_of_top_level_forms_name_file_and_line(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("w.lisp");
    std::fs::write(
        &path,
        "(in-package :cl-user)\n\n(defun late ()\n  (warn \"called\"))\n(progn\n  (warn \"top\"))\n(late)\n",
    )
    .unwrap();
    let place = shown(&path);
    let text = server.evaluate(&format!("(load {path:?})"));
    assert!(text.contains(&format!("SIMPLE-WARNING: top ({place}:5, in (PROGN)")), "{text}");
    assert!(text.contains(&format!("SIMPLE-WARNING: called ({place}:7, in (LATE))")), "{text}");
    assert!(server.evaluate("(late)").contains("SIMPLE-WARNING: called\n"));
    std::fs::write(&path, "(in-package :cl-user)\n\n(eval-when (:compile-toplevel)\n  (error \"early\"))\n").unwrap();
    let text = evaluate_err(&mut server, &format!("(compile-file {path:?})"));
    assert!(text.contains(&format!("early\nIn {place}:")), "{text}");
}

#[apply(both_modes)]
fn syntax_error_in_an_asd_file_is_reported_briefly_with_its_place(mode: Mode) {
    let mut server = mode.ready();
    let directory = Scratch::below_target();
    let asd = directory.join("unended.asd");
    std::fs::write(&asd, "; a comment\n(asdf:defsystem \"unended\"\n  :components ((:file \"a\"))\n").unwrap();
    std::fs::write(directory.join("names.asd"), "(defsystem \"names\" :components ((:file \"names\")))").unwrap();
    let path = directory.join("names.lisp");
    std::fs::write(&path, "(in-package :cl-user)\n\n(defun quits ()\n  (sb-ext:qiut))\n").unwrap();
    server.evaluate(&format!("(push {:?} asdf:*central-registry*)", format!("{}/", directory.display())));
    for code in ["(asdf:load-system \"unended\")", "(asdf:find-system \"unended\")"] {
        let text = evaluate_err(&mut server, code);
        assert!(text.contains(&format!("\nIn {}:2, in (ASDF:DEFSYSTEM \"unended\").\n", shown(&asd))), "{text}");
        assert_eq!(text.matches(" frames of ").count(), 1, "{text}");
        let hint = "\nBy the indentation, line 3: the form that begins at line 2 is probably not closed: one ) missing \
                    at 3:28\n";
        assert!(text.contains(hint), "{text}");
        assert!(text.chars().count() - hint.len() - 2 * directory.display().to_string().len() < 800, "{text}");
    }
    // A warning about an undefined name suggests similar names, too.
    let text = evaluate_err(&mut server, "(asdf:load-system \"names\")");
    assert!(text.contains(&format!(" Did you mean QUIT? ({}:3, in (DEFUN QUITS))\n", shown(&path))), "{text}");
}

#[apply(both_modes)]
fn warnings_of_compile_and_eval_in_a_loaded_file_name_the_file(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("n.lisp");
    std::fs::write(
        &path,
        "(in-package :cl-user)\n; é\n(defun make-it ()\n  (compile nil '(lambda (x) x\n     (car 1 2))))\n\
         (defparameter *made* (make-it))\n\n(progn\n  (eval '(defun evaluated (y)\n           (let ((z 1)) (+ \"a\" y)))))\n\
         (eval '(defun again (z) 1))\n(warn \"loading\")\n",
    )
    .unwrap();
    let place = shown(&path);
    let expected = [
        format!("CAR is called with two arguments, but wants exactly one. ({place}:6, in (DEFPARAMETER *MADE*))\n"),
        format!("The variable Z is defined but never used. ({place}:"),
        format!("Constant \"a\" conflicts with its asserted type NUMBER. ({place}:"),
        format!("({place}:11, in (EVAL '(DEFUN AGAIN)))\n"),
        format!("SIMPLE-WARNING: loading ({place}:12, in (WARN \"loading\"))"),
    ];
    for code in ["(load {})", "(load (compile-file {}))", "(list 1)\n(load {})", "(list 1)\n(load (compile-file {}))"] {
        let text = server.evaluate(&code.replace("{}", &format!("{path:?}")));
        for warning in &expected {
            assert!(text.contains(warning), "{code}: {warning}\n{text}");
        }
        let (_, warnings) = text.split_once("[warnings]\n").unwrap();
        let (warnings, _) = warnings.split_once("\n\n=> ").unwrap();
        for warning in warnings.lines() {
            assert!(warning.contains(&format!(" ({place}:")), "{code}: {text}");
        }
    }
    // A later warning does not name the file.
    let text = server.evaluate("(list 1)\n(eval '(defun later (x) 1))");
    assert!(text.contains("never used. (line 2)") || text.ends_with("never used.\n\n=> LATER"), "{text}");
}

#[apply(both_modes)]
fn an_error_while_a_file_is_loaded_names_file_line_and_form(mode: Mode) {
    let mut server = mode.ready();
    let directory = Scratch::below_target();
    let path = directory.join("late.lisp");
    std::fs::write(directory.join("late.asd"), "(defsystem \"late\" :components ((:file \"late\")))").unwrap();
    server.evaluate(&format!("(asdf:load-asd {:?})", directory.join("late.asd")));
    let place = shown(&path);
    // The failing form; the line reported for the source file and for the compiled file; and the form's heading.
    for (form, source, compiled, heading) in [
        ("(error \"at top\")", 4, 4, "(ERROR \"at top\")"),
        ("(let ((é (read-from-string \"nowhere\")))\n  (list é\n    (symbol-value é)))", 4, 6, "(LET)"),
        ("(defvar *v*\n  (symbol-value 'unbound-here))", 4, 5, "(DEFVAR *V*)"),
        ("(defun deep (x) (list (car x)))\n(progn\n  (list\n    (deep 5)))", 5, 7, "(PROGN)"),
        ("#+no-such (error \"not this\")\n(no-such-function 5)", 5, 5, "(NO-SUCH-FUNCTION 5)"),
    ] {
        std::fs::write(&path, format!("(in-package :cl-user) ; ünïcödé\n\n#| (error |#\n{form}\n(print :after)\n"))
            .unwrap();
        for (code, line) in [
            ("(load {})", source),
            ("(load (compile-file {}))", compiled),
            ("(progn {} (asdf:load-system \"late\" :force t))", compiled),
        ] {
            let text = evaluate_err(&mut server, &code.replace("{}", &format!("{path:?}")));
            assert!(text.contains(&format!("\nIn {place}:{line}, in {heading}.\n")), "{code}: {form}\n{text}");
            assert!(text.contains("[ERROR] ") && text.chars().count() < 1_500, "{code}: {form}\n{text}");
            if line == compiled && code != "(load {})" {
                let text = backtrace_of(&mut server);
                let line = form.lines().nth(compiled - 4).unwrap().trim();
                assert!(
                    location(&text, "(\"top level form\")").ends_with(&format!(": {line}")),
                    "{form}: {line}\n{text}"
                );
            }
        }
    }
    // The innermost file is named, and none once all files are loaded.
    let outer = directory.join("outer.lisp");
    std::fs::write(&outer, format!("(in-package :cl-user)\n(load (compile-file {path:?}))\n")).unwrap();
    let text = evaluate_err(&mut server, &format!("(load {outer:?})"));
    assert!(text.contains(&format!("\nIn {place}:5, in (NO-SUCH-FUNCTION 5).\n")), "{text}");
    std::fs::write(&path, "(in-package :cl-user)\n(defun fine () (error \"x\"))").unwrap();
    std::fs::write(&outer, format!("(in-package :cl-user)\n(progn (load (compile-file {path:?}))\n (fine))\n"))
        .unwrap();
    let text = evaluate_err(&mut server, &format!("(load (compile-file {outer:?}))"));
    assert!(text.contains(&format!("\nIn {}:3, in (PROGN).\n", shown(&outer))), "{text}");
    assert!(!evaluate_err(&mut server, "(fine)").contains("\nIn "));
    // The source text of another version is not shown.
    std::fs::write(&path, "(in-package :cl-user)\n\n(error \"old\")").unwrap();
    set_age(&path, 50);
    server.evaluate(&format!("(compile-file {path:?}) nil"));
    std::fs::write(&path, "(in-package :cl-user)\n; changed\n\n(error \"new\")").unwrap();
    let text = evaluate_err(&mut server, &format!("(load {:?})", path.with_extension("fasl")));
    assert!(text.contains(&format!("\nIn {place} (file has changed).\n")), "{text}");
}

#[apply(both_modes)]
fn reader_errors_have_line_and_column(mode: Mode) {
    let mut server = mode.ready();
    // Without a trap for overflow, which aarch64 need not have, SBCL reads 1e999 as an infinity.
    let overflow = (server_arch() == "x86_64").then_some("(list 1\n  1e999)");
    for code in
        ["(list 1\n  #2A((1 2) (3)))", "(list 1\n  #.(car 5))", "(list 1\n  cl::zork)"].into_iter().chain(overflow)
    {
        let text = evaluate_err(&mut server, code);
        let position = "\nThe reader stopped at line 2, column ";
        assert!(text.contains(position) && text.contains("begins at line 1, column 1."), "{code}: {text}");
    }
    let text = evaluate_err(&mut server, "(list 1\n  (no-such:thing))");
    assert!(text.contains("Line: 2, Column: ") && !text.contains("reader stopped"), "{text}");
}

// ---- Internal frames

#[apply(both_modes)]
fn frames_of_the_reader_are_folded(mode: Mode) {
    let mut server = mode.ready();
    let text = evaluate_err(&mut server, "(list\n (list (sb-ext:no-such-thing 1)))");
    let (_, frames) = text.split_once("[Backtrace]\n").expect("frames");
    let lines: Vec<_> = frames.lines().collect();
    assert!(lines[0].starts_with("0: (ERROR ") && lines[1].starts_with("1: (") && lines.len() == 3, "{text}");
    assert!(lines[2].starts_with("... ") && lines[2].ends_with(" frames of the reader"), "{text}");
    assert!(text.contains("Line: 2, Column: "), "{text}");
    let whole = backtrace_of(&mut server);
    assert!(whole.contains("READ-LIST") && !whole.contains("frames of"), "{whole}");
    // Frames of the user's code are not frames of the reader.
    let text = evaluate_err(&mut server, "(defun mine () (error \"x\")) (list #.(mine))");
    assert!(text.contains("0: (ERROR \"x\")\n1: (MINE)\n") && text.contains("(EVAL (MINE))\n"), "{text}");
    assert!(text.contains(" frames of the reader"), "{text}");
}

#[apply(both_modes)]
fn frames_of_signal_handling_are_folded(mode: Mode) {
    let mut server = mode.ready();
    let within = "(handler-bind ((error (lambda (c) (error \"second ~A\" (type-of c))))) ";
    let interrupted = "(let ((thread sb-thread:*current-thread*) (ready nil))
                         (sb-thread:make-thread
                          (lambda ()
                            (loop until ready do (sb-thread:thread-yield))
                            (sb-thread:interrupt-thread thread (lambda () (error \"in it\")))))
                         (setf ready t)
                         (loop))";
    let mut cases =
        vec![(interrupted.to_owned(), "(LAMBDA ())"), ("(sb-ext:with-timeout 0.5 (loop))".to_owned(), "TIMEOUT-BODY")];
    // On aarch64, the handler of a memory fault has too few frames to fold, and a division by zero need not trap.
    if server_arch() == "x86_64" {
        cases.push((format!("{within} (sb-sys:sap-ref-8 (sb-sys:int-sap 8) 0))"), "(LAMBDA ())"));
        cases.push((format!("{within} (/ 1d0 (eval 0d0)))"), "TWO-ARG-/"));
    }
    for (code, own) in cases {
        let text = evaluate_err(&mut server, &code);
        assert_eq!(text.matches(" frames of signal handling\n").count(), 1, "{text}");
        // Two internal frames are shown; the frames of the interrupted code follow, up to the last one.
        let (before, after) = text.split_once(" frames of signal handling\n").unwrap();
        assert!(!before.contains("funcall") && !before.contains("RUN-HANDLER"), "{text}");
        assert!(after.contains(own) && after.contains("(EVAL "), "{text}");
        assert!(!after.contains("interrupt_handle") && !after.contains("RUN-HANDLER"), "{text}");
        let whole = backtrace_of(&mut server);
        assert!(whole.contains("foreign function: call_into_lisp") && !whole.contains("frames of"), "{whole}");
    }
}

#[apply(both_modes)]
fn internal_frames_of_reader_loader_and_asdf_are_folded_into_one_line(mode: Mode) {
    let mut server = mode.ready();
    for code in ["(list #'", "(list #+(and", "(list (quote #(1 #.(error \"x\"))))"] {
        let text = evaluate_err(&mut server, code);
        assert_eq!(text.matches(" frames of the reader").count(), 1, "{text}");
        let (_, frames) = text.split_once(" frames of the reader").unwrap();
        assert!(frames.is_empty(), "{text}");
    }
    let directory = Scratch::below_target();
    let asd = directory.join("broken-asd.asd");
    std::fs::write(&asd, "(defsystem \"broken-asd\" :components (").unwrap();
    let file = directory.join("late.lisp");
    for (code, form) in [
        ("(defun late (x) (car x))\n(late 5)\n", "1: (\"top level form\")\n2: (SB-FASL::LOAD-FASL-GROUP "),
        ("(eval-when (:compile-toplevel)\n  (error \"early\"))", "4: ((FLET SB-C::FROB "),
    ] {
        std::fs::write(&file, code).unwrap();
        let text = evaluate_err(&mut server, &format!("(load (compile-file {file:?}))"));
        assert!(text.contains(form) && text.matches("\n... ").count() == 1, "{text}");
        assert!(text.chars().count() < 1_000, "{text}");
    }
    let text =
        evaluate_err(&mut server, &format!("(push {directory:?} asdf:*central-registry*) (asdf:load-asd {asd:?})"));
    assert_eq!(text.matches(" frames of ").count(), 1, "{text}");
}

// ---- Locals

#[apply(both_modes)]
fn backtrace_locals_come_once_in_source_order(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defstruct item name)\n\
         (defun zeta (order item)\n  (let* ((beta (list order))\n         (alpha (make-string 500 :initial-element #\\a)))\n    \
         (loop for count below 2\n          do (let ((gamma item)) (cerror \"go\" \"x\") (print (list count gamma beta alpha item))))))\n\
         (defun eta (item) (list (zeta 1 item) item))",
    );
    evaluate_err(&mut server, "(eta (make-item :name \"the name of the item is long enough\"))");
    let text = backtrace(&mut server);
    let frame = text.split("\n  ").find(|frame| frame.starts_with("1: (ZETA")).expect("a frame");
    let locals: Vec<_> = text
        .lines()
        .skip_while(|line| !line.contains("1: (ZETA"))
        .skip(2)
        .take_while(|line| line.starts_with("     "))
        .map(|line| line.trim().split([' ', ':']).next().unwrap())
        .collect();
    assert_eq!(locals, ["ORDER", "ITEM", "BETA", "ALPHA", "COUNT", "GAMMA"], "{frame}\n{text}");
    assert!(text.contains("     GAMMA = <as ITEM in frame 1>\n"), "{text}");
    assert!(text.contains("     ITEM = <as ITEM in frame 1>\n"), "{text}");
    let alpha = text.lines().find(|line| line.contains("ALPHA = ")).unwrap();
    assert!(alpha.contains("aaa[... 302 characters omitted]"), "{alpha}");
}

// ---- Similar names

#[apply(both_modes)]
fn misspelled_names_get_did_you_mean_hints(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defun frobnicate (x) x) (defvar *settings* 1) (defclass rectangle () ())
                     (defpackage :my-app (:export #:public)) (intern \"INTERNAL\" :my-app)",
    );
    for (code, hint) in [
        ("(frobnicat 1)", "Did you mean FROBNICATE?"),
        ("(list *setting*)", "Did you mean *SETTINGS*?"),
        ("(make-instance 'rectangel)", "Did you mean RECTANGLE?"),
        ("(in-package :my-ap)", "Did you mean MY-APP?"),
        ("(sb-ext:qiut)", "Did you mean QUIT?"),
        ("(sb-ext::qiut)", "Did you mean QUIT?"),
        ("cl::defunn", "Did you mean DEFUN?"),
        ("(my-app:internal 1)", "Did you mean MY-APP::INTERNAL?"),
        ("(my-app:publik 1)", "Did you mean MY-APP:PUBLIC?"),
        ("(my-ap:public 1)", "Did you mean MY-APP?"),
        ("(use-package :my-ap)", "Did you mean MY-APP?"),
    ] {
        let text = evaluate_err(&mut server, code);
        assert!(text.contains(&format!("\n{hint}\n\n[Backtrace]")), "{code}:\n{text}");
    }
    let text = evaluate_err(&mut server, "(wholly-unlike-anything 1)");
    assert!(!text.contains("Did you mean"), "{text}");
    let text = evaluate_err(&mut server, "(ql:quickload :alexandria)");
    assert!(text.contains("\nQuicklisp is not loaded"), "{text}");
}

#[apply(both_modes)]
fn keywords_are_not_suggested_for_variables(mode: Mode) {
    let mut server = mode.ready();
    for code in ["size", "(print test)", "(progn name)"] {
        let text = evaluate_err(&mut server, code);
        assert!(text.starts_with("[ERROR] UNBOUND-VARIABLE") && !text.contains(" :"), "{text}");
    }
}

#[apply(both_modes)]
fn near_name_search_is_bounded_for_long_names_and_large_packages(mode: Mode) {
    let mut server = mode.ready();
    server.call_tool("configure-limits", json!({"timeout": 10}));
    // Comparing these names would take minutes.
    server.evaluate(
        "(dotimes (i 20) (setf (fdefinition (intern (format nil \"~V,,,'X<~D~>\" (+ 20000 i) i))) #'list))
         (make-package (make-string 30000 :initial-element #\\P) :use nil) nil",
    );
    let name = "Y".repeat(20_005);
    let text = evaluate_err(&mut server, &format!("(funcall (quote {name}))"));
    assert!(text.starts_with("[ERROR] UNDEFINED-FUNCTION") && !text.contains("Did you mean"), "{text:.100}");
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": "1", "package": "Q".repeat(30_000)}));
    assert!(text.starts_with("[ERROR] SB-KERNEL:SIMPLE-PACKAGE-ERROR"), "{text:.100}");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "Z".repeat(20_005)}));
    assert!(text.starts_with("Symbol ZZZ"), "{text:.100}");
    // In a large package, only symbols that begin with the name are suggested.
    server.evaluate("(defpackage :large (:use :cl)) (defun large::frobnicate () 1)");
    assert!(
        evaluate_err(&mut server, "(funcall (quote large::frobnciate))")
            .contains("\nDid you mean LARGE::FROBNICATE?\n")
    );
    server.evaluate("(dotimes (i 30000) (intern (format nil \"SYMBOL-~D\" i) :large))");
    assert!(!evaluate_err(&mut server, "(funcall (quote large::frobnciate))").contains("Did you mean"));
    assert!(
        evaluate_err(&mut server, "(funcall (quote large::frobnicat))").contains("\nDid you mean LARGE::FROBNICATE?\n")
    );
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "large::frobnica"}));
    assert!(text.ends_with("\nSimilar names: FROBNICAT, FROBNICATE."), "{text}");
}

#[apply(both_modes)]
fn redefined_structure_errors_mention_the_earlier_definition(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(defstruct m a) (defvar *m* (make-m)) (defun use (x) (declare (type m x)) (m-a x))");
    let text = evaluate_err(&mut server, "(defstruct m a b)");
    assert!(text.contains("use the old definition, with the slot A.\nThe restart CONTINUE installs the new"), "{text}");
    server.evaluate("(handler-bind ((error #'continue)) (eval '(defstruct m a b)))");
    for code in ["(m-b *m*)", "(progn (defmethod area ((x m)) x) (area *m*))"] {
        let text = evaluate_err(&mut server, code);
        assert!(
            text.contains("an earlier definition of M, which had another layout: create the object again."),
            "{text}"
        );
    }
}

// ---- Definitions

/// Writes a system of `functions` functions in a package of its own and returns the path of its `.asd` file.
fn system(directory: &Scratch, name: &str, functions: usize) -> PathBuf {
    let mut text =
        format!("(defpackage :{name} (:use :cl) (:export #:f0))\n(in-package :{name})\n(defstruct part size)\n");
    for number in 0..functions {
        text += &format!("(defun f{number} (x) x)\n");
    }
    std::fs::write(directory.join("all.lisp"), text).unwrap();
    let asd = directory.join(format!("{name}.asd"));
    std::fs::write(&asd, format!("(defsystem \"{name}\" :components ((:file \"all\")))")).unwrap();
    asd
}

#[apply(both_modes)]
fn list_definitions_shows_types_with_the_classes(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate("(deftype small () '(integer 0 9)) (defclass part () ())");
    let listed = "[Classes]\n- PART\n- SMALL (type)";
    assert_eq!(call_ok(&mut server, "list-definitions", json!({})), listed);
    assert_eq!(call_ok(&mut server, "list-definitions", json!({"type": "classes"})), listed);
}

#[apply(both_modes)]
fn list_definitions_shows_a_loaded_system_on_a_single_line(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let asd = system(&scratch, "many-things", 120);
    let own = scratch.join("own.lisp");
    std::fs::write(&own, "(defun from-own-file (x) x)").unwrap();
    server.evaluate(&format!(
        "(asdf:load-asd {asd:?}) (asdf:load-system \"many-things\") (load {own:?}) (defun mine () 1) (defvar *mine* 2)"
    ));
    let text = call_ok(&mut server, "list-definitions", json!({}));
    insta::allow_duplicates! { insta::assert_snapshot!(text, @r"
    [Functions]
    - FROM-OWN-FILE (X)
    - MINE ()

    [Variables]
    - *MINE* = 2

    [Loaded Systems]
    - many-things (127 definitions in 1 package)
    "); }
    let text = call_ok(&mut server, "list-definitions", json!({"package": "many-things"}));
    assert!(text.starts_with("[Functions]\n- MANY-THINGS::F1 (X)\n- MANY-THINGS::F10 (X)\n"), "{text}");
    assert!(text.ends_with("\n\n... 22 more; pass limit 122 to see them all."), "{text}");
    let text = call_ok(&mut server, "list-definitions", json!({"package": "many-things", "type": "classes"}));
    assert_eq!(
        text,
        "[Classes]\n- MANY-THINGS::PART (MANY-THINGS::COPY-PART, MANY-THINGS::MAKE-PART, MANY-THINGS::PART-P, \
         MANY-THINGS::PART-SIZE)"
    );
    // A redefinition by the session is listed as the session's own.
    server.evaluate("(defun many-things:f0 (x y) (list x y))");
    let text = call_ok(&mut server, "list-definitions", json!({"limit": 1}));
    insta::allow_duplicates! { insta::assert_snapshot!(text, @r"
    [Functions]
    - FROM-OWN-FILE (X)

    ... 3 more; pass limit 4 to see them all.

    [Loaded Systems]
    - many-things (126 definitions in 1 package)
    "); }
    let text = call_err(&mut server, "list-definitions", json!({"limit": 0}));
    assert!(text.contains("a whole number from 1"), "{text}");
    let text = call_err(&mut server, "list-definitions", json!({"package": "many-thing"}));
    assert!(text.contains("MANY-THINGS"), "{text}");
}

#[apply(both_modes)]
fn describe_symbol_lists_methods_slots_and_packages(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass shape () ((name :initarg :name :type string :accessor shape-name) (id :reader shape-id)))\n\
         (defclass circle (shape) (r))\n(defgeneric area (s &optional k))\n(defmethod area ((s circle) &optional k) k)\n\
         (progn\n  (defmethod area :around ((s (eql 3)) &optional k) k))",
    );
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "area"}));
    assert!(text.contains("\n  Methods: 2\n"), "{text}");
    assert!(text.contains("\n    (CIRCLE)  evaluation 1, line 4"), "{text}");
    assert!(text.contains("\n    :AROUND ((EQL 3))  evaluation 1, line 6"), "{text}");
    assert!(text.contains("\n  Source: evaluation 1, line 3"), "{text}");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "shape"}));
    assert!(
        text.contains("\n    NAME, type STRING, initarg :NAME, accessor SHAPE-NAME\n    ID, reader SHAPE-ID\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  Superclasses: STANDARD-OBJECT\n") && text.contains("\n  Direct subclasses: CIRCLE\n"),
        "{text}"
    );
    server.evaluate("(defpackage :only-a-package (:nicknames :oap) (:use :cl) (:export #:a #:b))");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "oap"}));
    assert!(
        text.starts_with("ONLY-A-PACKAGE [PACKAGE]\n  Nicknames: OAP\n  Uses: COMMON-LISP\n  Exports: 2 symbols"),
        "{text}"
    );
}

#[apply(both_modes)]
fn describe_symbol_lists_inherited_slots_writers_and_setf_functions(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass shape () ((name :initarg :name :accessor shape-name) (id :reader shape-id :writer set-id)))\n\
         (defclass circle (shape) ((r :type real)))\n(defstruct base (a nil :read-only t))\n\
         (defstruct (derived (:include base)) (b 1 :type fixnum))\n\
         (define-condition failed (error) ((code :initarg :code :reader failed-code)))\n\
         (defun side (x) x)\n(defun (setf side) (v x) (list v x))\n(defsetf edge set-edge)",
    );
    for (name, details) in [
        (
            "circle",
            "\n  Slots: 3\n    NAME, initarg :NAME, accessor SHAPE-NAME, from SHAPE\n    \
             ID, reader SHAPE-ID, writer SET-ID, from SHAPE\n    R, type REAL\n",
        ),
        ("derived", "\n  Slots: 2\n    A, reader DERIVED-A, from BASE\n    B, type FIXNUM, accessor DERIVED-B\n"),
        ("failed", "\n  Slots: 1\n    CODE, initarg :CODE, reader FAILED-CODE\n"),
        ("side", "\n\n(SETF COMMON-LISP-USER::SIDE) [FUNCTION]\n  Arglist: (V X)\n"),
        ("(setf side)", "\n\n(SETF COMMON-LISP-USER::SIDE) [FUNCTION]\n  Arglist: (V X)\n"),
        ("#'side", "COMMON-LISP-USER::SIDE [FUNCTION]\n  Arglist: (X)\n"),
        ("edge", "(SETF COMMON-LISP-USER::EDGE) [SETF EXPANDER]"),
    ] {
        let text = call_ok(&mut server, "describe-symbol", json!({"name": name}));
        assert!(text.contains(details), "{name}: {text}");
    }
    // The descriptions of standard symbols stay short.
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "car"}));
    assert!(text.starts_with("COMMON-LISP:CAR [FUNCTION]\n") && !text.contains("SETF"), "{text}");
    assert!(!call_ok(&mut server, "describe-symbol", json!({"name": "t"})).contains("Superclasses"));
    // A condition's accessors are listed with it, and symbol macros and compiler macros are labelled.
    server.evaluate("(define-symbol-macro here 1) (define-compiler-macro side (x) x)");
    server.evaluate("(define-method-combination joined :operator list :documentation \"Joins.\")");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "side"}));
    assert!(text.contains("\n\nCOMMON-LISP-USER::SIDE [COMPILER MACRO]\n  Source: evaluation 2, line 1\n"), "{text}");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "joined"}));
    assert!(
        text.starts_with(
            "COMMON-LISP-USER::JOINED [METHOD COMBINATION]\n  Documentation: Joins.\n  Source: evaluation 3"
        ),
        "{text}"
    );
    let text = call_ok(&mut server, "list-definitions", json!({}));
    assert!(text.contains("\n- FAILED (FAILED-CODE)\n") && !text.contains("\n- FAILED-CODE"), "{text}");
    assert!(
        text.contains("[Macros]\n- EDGE (setf expander)\n- HERE (symbol macro)\n- SIDE (compiler macro)\n"),
        "{text}"
    );
}

#[apply(both_modes)]
fn describe_symbol_merges_the_definitions_of_a_slot(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defclass parent () ((a :initarg :a :type integer :accessor parent-a :initform 1)\n  \
         (shared :allocation :class :initform 2)))\n\
         (defclass child (parent) ((own) (a :initform 4 :initarg :other-a :reader child-a) (shared :initform 3)))\n\
         (defclass waiting (child not-yet-defined) ((late)))\n\
         (defstruct base a (b 3 :type fixnum))\n(defstruct (derived (:include base (b 9))) c)",
    );
    for (name, slots) in [
        ("parent", "Slots: 2\n    A, type INTEGER, initarg :A, accessor PARENT-A\n    SHARED, allocation :CLASS\n"),
        (
            "child",
            "Slots: 3\n    A, type INTEGER, initarg :OTHER-A :A, accessor PARENT-A, reader CHILD-A\n    SHARED\n    OWN\n",
        ),
        (
            "waiting",
            "Slots: 4\n    A, type INTEGER, initarg :OTHER-A :A, accessor PARENT-A, reader CHILD-A, from CHILD\n    \
             SHARED, from CHILD\n    OWN, from CHILD\n    LATE\n",
        ),
        (
            "derived",
            "Slots: 3\n    A, accessor DERIVED-A, from BASE\n    B, type FIXNUM, accessor DERIVED-B\n    \
             C, accessor DERIVED-C\n",
        ),
    ] {
        let text = call_ok(&mut server, "describe-symbol", json!({"name": name}));
        assert!(text.contains(&format!("\n  {slots}")), "{name}: {text}");
    }
}

#[apply(both_modes)]
fn describe_symbol_source_shows_method_and_package_text(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("m.lisp");
    std::fs::write(
        &path,
        "(in-package :cl-user)\n(defgeneric run (x) (:method ((x list)) x))\n\n(defmethod run ((x integer))\n  (list x))\n\
         (progn\n  (defmethod run ((x string)) 1)\n  (defmethod run ((x symbol)) 2))\n",
    )
    .unwrap();
    let place = shown(&path);
    for code in ["(load {})", "(load (compile-file {}))"] {
        server.evaluate(&code.replace("{}", &format!("{path:?}")));
        let text = call_ok(&mut server, "describe-symbol", json!({"name": "run", "source": true}));
        let expected = format!("\n    (INTEGER)  {place}:4\n      (defmethod run ((x integer))\n        (list x))\n");
        assert!(text.contains(&expected), "{text}");
        for (method, line) in [("((x string)) 1)", 7), ("((x symbol)) 2)", 8)] {
            let class = method[4..10].to_uppercase();
            let expected = format!("\n    ({class})  {place}:{line}\n      (defmethod run {method}\n");
            assert!(text.contains(&expected), "{expected}{text}");
        }
        assert!(text.ends_with("\n  Text:\n    (defgeneric run (x) (:method ((x list)) x))"), "{text}");
        assert!(!call_ok(&mut server, "describe-symbol", json!({"name": "run"})).contains("defmethod"));
    }
    server.evaluate("(defmethod alone ((x integer)) x)\n(defpackage :texts (:use :cl)\n  (:export #:a))");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "alone", "source": true}));
    assert!(text.ends_with(", line 1\n      (defmethod alone ((x integer)) x)"), "{text}");
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "texts", "source": true}));
    assert!(text.ends_with("\n  Text:\n    (defpackage :texts (:use :cl)\n      (:export #:a))"), "{text}");
}

#[apply(both_modes)]
fn describe_symbol_names_the_macro_call_that_made_a_definition(mode: Mode) {
    let mut server = mode.ready();
    let scratch = Scratch::below_target();
    let path = scratch.join("macros.lisp");
    std::fs::write(
        &path,
        "(in-package :cl-user)\n(defgeneric size (x))\n(defmacro with-maker (name class)\n  \
         `(progn (defun ,(intern (format nil \"MAKE-~a\" name)) () ',name)\n          \
         (defmethod size ((x ,class)) 1)))\n\n(with-maker box\n  integer)\n",
    )
    .unwrap();
    let place = shown(&path);
    for code in ["(load {})", "(load (compile-file {}))"] {
        server.evaluate(&code.replace("{}", &format!("{path:?}")));
        let text = call_ok(&mut server, "describe-symbol", json!({"name": "make-box", "source": true}));
        let expected = format!("\n  Source: {place}:7\n  Text:\n    (with-maker box\n      integer)");
        assert!(text.ends_with(&expected), "{code}: {text}");
        // SBCL does not record of which version of the file a method is, so the line of the call may be wrong.
        let text = call_ok(&mut server, "describe-symbol", json!({"name": "size", "source": true}));
        assert!(text.contains(&format!("\n    (INTEGER)  {place}\n  Source: {place}:2\n")), "{code}: {text}");
    }
    // If the file changes, the line is unknown.
    std::fs::write(&path, "(in-package :cl-user)\n").unwrap();
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "make-box", "source": true}));
    assert!(text.contains("\n  Text: not available"), "{text}");
}

#[apply(both_modes)]
fn describe_symbol_source_shows_the_definition_text(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(
        "(defmacro with-it (&body body) `(progn ,@body))\n(progn\n  (defvar *a* 1)\n  (defun f (x)\n    (list x)))",
    );
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "f", "source": true}));
    assert!(text.ends_with("\n  Source: evaluation 1, line 4\n  Text:\n    (defun f (x)\n        (list x))"), "{text}");
    assert!(!call_ok(&mut server, "describe-symbol", json!({"name": "f"})).contains("Text:"));
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "*a*", "source": true}));
    assert!(text.ends_with("\n  Source: evaluation 1, line 3\n  Text:\n    (defvar *a* 1)"), "{text}");
    let scratch = Scratch::below_target();
    let path = scratch.join("a.lisp");
    std::fs::write(&path, "; é\n(defvar *b* 2)\n\n(defun g (x)\n  x)\n(defclass h () ())\n").unwrap();
    server.evaluate(&format!("(load {path:?})"));
    for (name, line, definition) in
        [("g", 4, "(defun g (x)\n      x)"), ("h", 6, "(defclass h () ())"), ("*b*", 2, "(defvar *b* 2)")]
    {
        let text = call_ok(&mut server, "describe-symbol", json!({"name": name, "source": true}));
        let expected = format!("\n  Source: {}:{line}\n  Text:\n    {definition}", shown(&path));
        assert!(text.ends_with(&expected), "{expected}\n{text}");
    }
    let text = call_ok(&mut server, "describe-symbol", json!({"name": "car", "source": true}));
    assert!(text.ends_with("\n  Text: not available"), "{text}");
}

#[apply(both_modes)]
fn frame_locals_lists_variables_in_source_order(mode: Mode) {
    let mut server = mode.ready();
    let text = server.call_tool(
        "evaluate-lisp",
        json!({"on-error": "debug", "code": "(defun f (z) (let* ((y (list z)) (a (list y))) (cerror \"go\" \"x\") (list z y a)))\n(f 1)"}),
    );
    assert!(text.1, "{text:?}");
    insta::allow_duplicates! { insta::assert_snapshot!(frame_locals(&mut server, 1), @r"
    Z = 1
    Y = (1)
    A = ((1))
    "); }
    call_ok(&mut server, "abort-evaluation", json!({}));
}
