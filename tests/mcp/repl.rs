//! `sbcl-mcp repl`, in a terminal (tmux) and with pipes.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::client::{DEADLINE, Scratch, Server, binary, last_error};
use crate::processes::wait_until;
use serde_json::json;

/// A tmux terminal that runs a REPL.
pub(crate) struct Terminal {
    socket: String,
    state: Rc<Scratch>,
}

impl Terminal {
    /// Starts a REPL with these arguments and environment variables, and waits for its prompt.
    pub(crate) fn start(arguments: &str, variables: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let socket = format!("sbcl-mcp-repl-{}-{number}", std::process::id());
        let state = Rc::new(Scratch::new());
        let terminal = Self { socket, state };
        terminal.begin(arguments, variables);
        terminal
    }

    fn begin(&self, arguments: &str, variables: &[(&str, &str)]) {
        let mut command = self.tmux();
        command.args(["-f", "/dev/null", "new-session", "-d", "-x", "110", "-y", "45"]);
        command.args(["-e", &format!("XDG_STATE_HOME={}", self.state.display())]);
        for (name, value) in variables {
            command.args(["-e", &format!("{name}={value}")]);
        }
        // The last output stays visible after the exit.
        command.arg(format!("'{}' repl {arguments}; echo \"status $?\"; exec cat", binary()));
        assert!(command.status().unwrap().success(), "tmux starts");
        self.await_text("CL-USER>");
    }

    fn tmux(&self) -> Command {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.socket]).env_remove("NO_COLOR");
        command
    }

    /// Presses keys, given by their tmux names.
    fn keys(&self, keys: &[&str]) {
        assert!(self.tmux().arg("send-keys").args(keys).status().unwrap().success());
    }

    /// Types a line.
    fn line(&self, text: &str) {
        assert!(self.tmux().args(["send-keys", "-l", text]).status().unwrap().success());
        self.keys(&["Enter"]);
    }

    /// Returns the text of the terminal; with `-e`, colours are escape sequences.
    fn pane(&self, options: &[&str]) -> String {
        let output = self.tmux().args(["capture-pane", "-p"]).args(options).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
    }

    /// Waits until the text of the terminal satisfies `is`; `what` describes the condition.
    #[track_caller]
    fn wait_until(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + DEADLINE;
        loop {
            let pane = self.pane(&[]);
            if is(&pane) {
                return pane;
            }
            assert!(Instant::now() < end, "{what}:\n{pane}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the terminal shows `text`.
    #[track_caller]
    fn await_text(&self, text: &str) -> String {
        self.wait_until(text, |pane| pane.contains(text))
    }

    /// Waits until the last line is `prompt`.
    #[track_caller]
    fn await_prompt(&self, prompt: &str) -> String {
        self.wait_until(prompt, |pane| pane.lines().last() == Some(prompt))
    }

    /// Types a line, waits for the next prompt and returns the text in between.
    #[track_caller]
    pub(crate) fn evaluate(&self, text: &str, prompt: &str) -> String {
        let before = self.pane(&[]).lines().count();
        self.line(text);
        let pane = self.wait_until(&format!("{text}, then {prompt}"), |pane| {
            pane.lines().count() > before && pane.lines().last() == Some(prompt)
        });
        let lines: Vec<_> = pane.lines().skip(before).collect();
        lines[..lines.len() - 1].join("\n")
    }

    /// Presses Ctrl-C at the prompt and waits for the next prompt.
    fn press_ctrl_c(&self) {
        self.keys(&["C-c"]);
        self.await_prompt("CL-USER>");
    }

    /// Clears the terminal.
    fn clear(&self) {
        let prompt = self.pane(&[]).lines().last().unwrap_or_default().to_owned();
        self.keys(&["C-l"]);
        self.wait_until("a clear screen", |pane| pane == prompt);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.pane(&[]));
        }
        let _ = self.tmux().arg("kill-server").status();
    }
}

#[test]
fn multi_line_forms_are_evaluated_and_kept_in_the_history() {
    let terminal = Terminal::start("", &[]);
    terminal.line("(defun f (x) ; a ) in a comment");
    terminal.line("\"(\" #\\( #| ( |#");
    let shown = terminal.evaluate("(* x 2))", "CL-USER>");
    assert!(shown.ends_with("=> F"), "{shown}");
    assert_eq!(terminal.evaluate("(f 21)", "CL-USER>"), "=> 42");
    assert_eq!(terminal.evaluate("(values 1 (list \"a\" :b))", "CL-USER>"), "=> 1\n=> (\"a\" :B)");
    assert_eq!(terminal.evaluate("(values)", "CL-USER>"), "; No values");
    assert_eq!(terminal.evaluate("* **", "CL-USER>"), "=> NIL\n=> NIL");
    assert_eq!(terminal.evaluate("(progn (princ \"out\") 1)", "CL-USER>"), "out\n=> 1");
    let shown = terminal.evaluate("(defpackage foo (:use :cl)) (in-package foo)", "FOO>");
    assert_eq!(shown, "=> #<PACKAGE \"FOO\">\n=> #<PACKAGE \"FOO\">");
    // The history returns the complete form before the last.
    terminal.keys(&["C-d"]);
    terminal.await_text("status 0");
    let history = terminal.state.join("sbcl-mcp/history");
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&history), mode(history.parent().unwrap())), (0o600, 0o700));
    let terminal = Terminal { socket: format!("{}-again", terminal.socket), state: terminal.state.clone() };
    terminal.begin("", &[]);
    terminal.keys(&["Up", "Up", "Up", "Up", "Enter"]);
    terminal.wait_until("from the history", |pane| pane.ends_with("> (values)\n; No values\nCL-USER>"));
}

#[test]
fn output_is_shown_while_an_evaluation_runs() {
    let terminal = Terminal::start("", &[]);
    let marker = terminal.state.join("go-on");
    let code = format!("(progn (format t \"first~%\") (loop until (probe-file {marker:?})) (princ \"second\") 1)");
    terminal.line(&code);
    terminal.wait_until("the first line", |pane| pane.lines().last() == Some("first"));
    std::fs::write(&marker, "").unwrap();
    let pane = terminal.await_prompt("CL-USER>");
    assert!(pane.ends_with("first\nsecond\n=> 1\nCL-USER>"), "{pane}");
    assert_eq!(pane.matches("\nfirst").count(), 1);
}

/// The REPL shows the progress of a load, which does not belong to the load's output.
#[test]
fn output_of_a_load_is_complete_after_progress_was_shown() {
    let terminal = Terminal::start("", &[]);
    let [marker, file] = ["go-on", "slow.lisp"].map(|name| terminal.state.join(name));
    std::fs::write(&file, format!("(loop until (probe-file {marker:?})) (format t \"~D-~D~%\" 1 2)")).unwrap();
    terminal.line(&format!(":load {}", file.display()));
    terminal.await_text("\nloading ");
    std::fs::write(&marker, "").unwrap();
    let pane = terminal.await_prompt("CL-USER>");
    assert!(pane.contains("\n1-2\n"), "{pane}");
}

#[test]
fn tab_completes_names_and_shows_lambda_lists() {
    let terminal = Terminal::start("", &[]);
    terminal.evaluate(
        "(defpackage cafe (:export teapot)) (defun cafe:teapot (water &key leaves) (list water leaves))",
        "CL-USER>",
    );
    terminal.clear();
    terminal.keys(&["-l", "(cafe:t"]);
    terminal.keys(&["Tab"]);
    terminal.await_text("CL-USER> (cafe:teapot");
    terminal.keys(&["-l", " 1)"]);
    terminal.keys(&["Enter"]);
    terminal.await_text("=> (1 NIL)");
    terminal.await_prompt("CL-USER>");
    terminal.clear();
    // Several candidates open a menu.
    terminal.keys(&["-l", "(multiple-value-"]);
    terminal.keys(&["Tab"]);
    let menu = terminal.await_text("multiple-value-setq");
    for known in ["multiple-value-bind", "multiple-value-call", "multiple-value-list", "multiple-value-prog1"] {
        assert!(menu.contains(known), "{menu}");
    }
    assert!(menu.contains("(VARS VALUE-FORM &BODY BODY)"), "{menu}");
    terminal.press_ctrl_c();
    // Completes a package, and a variable with asterisks around its name.
    terminal.keys(&["-l", "caf"]);
    terminal.keys(&["Tab"]);
    terminal.await_text("CL-USER> cafe:");
    terminal.press_ctrl_c();
    terminal.keys(&["-l", "*print-readab"]);
    terminal.keys(&["Tab"]);
    terminal.await_text("CL-USER> *print-readably*");
    terminal.press_ctrl_c();
    terminal.keys(&["-l", ":che"]);
    terminal.keys(&["Tab"]);
    terminal.await_text("list checkpoints");
}

#[test]
fn error_opens_a_debugger_level_with_frames_and_restarts() {
    let terminal = Terminal::start("", &[]);
    terminal.evaluate("(defun total (prices) (reduce #'+ (mapcar #'price-of prices)))", "CL-USER>");
    let shown = terminal.evaluate("(total '((apple . 3) (pear . 4)))", "[1] CL-USER>");
    for known in [
        "[ERROR] UNDEFINED-FUNCTION\nThe function COMMON-LISP-USER::PRICE-OF is undefined.\n0: (PRICE-OF (APPLE . 3))",
        "\n  1. CONTINUE - Retry calling PRICE-OF.\n",
        "\n  6. ABORT - Return to top level.",
    ] {
        assert!(shown.contains(known), "{shown}");
    }
    assert!(!shown.contains("Tools: "), "{shown}");
    // Omitted parts are available through colon commands, not through the tools' arguments.
    let shown = terminal.evaluate(":bt 1", "[1] CL-USER>");
    assert!(shown.starts_with("Backtrace for UNDEFINED-FUNCTION (1 of "), "{shown}");
    assert!(shown.ends_with("\n3 more frames; :bt 4 shows all frames."), "{shown}");
    assert!(!terminal.evaluate(":frame 1", "[1] CL-USER>").contains("more frames"));
    terminal.clear();
    assert!(terminal.evaluate(":frame 1", "[1] CL-USER>").contains("1: (TOTAL "));
    assert_eq!(terminal.evaluate(":locals", "[1] CL-USER>"), "PRICES = ((APPLE . 3) (PEAR . 4))");
    assert_eq!(terminal.evaluate("(length prices)", "[1] CL-USER>"), "=> 2");
    // An error of code evaluated in the debugger keeps the level.
    assert!(terminal.evaluate("(/ (length prices) 0)", "[1] CL-USER>").contains("[ERROR] DIVISION-BY-ZERO"));
    terminal.clear();
    // A failed attempt to resume keeps the level and the frame.
    let shown = terminal.evaluate(":restart use-value (car 5)", "[1] CL-USER>");
    assert!(shown.contains("the restart was not invoked"), "{shown}");
    assert_eq!(terminal.evaluate("(length prices)", "[1] CL-USER>"), "=> 2");
    terminal.clear();
    assert!(terminal.evaluate("(defun price-of (item) (cdr item))", "[1] CL-USER>").ends_with("=> PRICE-OF"));
    assert_eq!(terminal.evaluate("1", "CL-USER>"), "=> 7");
    // A restart by name with a value, an abort, and a return from a frame.
    terminal.evaluate("(restart-case (error \"boo\") (take (x) x))", "[1] CL-USER>");
    assert_eq!(terminal.evaluate(":restart take (+ 40 2)", "CL-USER>"), "=> 42");
    terminal.evaluate("(error \"boo\")", "[1] CL-USER>");
    assert_eq!(terminal.evaluate(":abort", "CL-USER>"), "Evaluation aborted.");
    terminal.clear();
    terminal.evaluate("(progn (defun inner () (error \"boo\")) (defun outer () (list (inner))))", "CL-USER>");
    terminal.evaluate("(outer)", "[1] CL-USER>");
    terminal.evaluate(":frame 1", "[1] CL-USER>");
    assert_eq!(terminal.evaluate(":return :fine", "CL-USER>"), "=> (:FINE)");
    assert!(terminal.evaluate(":abort", "CL-USER>").starts_with("; No evaluation is held"));
    // Forms after the failing one are not evaluated.
    let shown = terminal.evaluate("(list 1) (error \"boo\") (setf *x* 1)", "[1] CL-USER>");
    assert!(shown.starts_with("=> (1)\n[ERROR] ") && shown.ends_with("; Not evaluated: (setf *x* 1)"), "{shown}");
    terminal.evaluate(":abort", "CL-USER>");
    // Outside the debugger a number is evaluated as a number.
    assert_eq!(terminal.evaluate("1", "CL-USER>"), "=> 1");
    terminal.line("(Quit)");
    terminal.await_text("status 0");
}

#[test]
fn failed_evaluations_are_aborted_in_a_server_without_the_tools_of_the_debugger() {
    let terminal = Terminal::start("--tools core", &[]);
    assert_eq!(terminal.evaluate("(list 1)", "CL-USER>"), "=> (1)");
    let shown = terminal.evaluate("(error \"boo\")", "CL-USER>");
    assert!(shown.starts_with("[ERROR] SIMPLE-ERROR\nboo\n") && !shown.contains("Restarts"), "{shown}");
}

#[test]
fn ctrl_c_returns_to_the_prompt_in_a_server_without_get_backtrace() {
    let terminal = Terminal::start("--tools evaluate-lisp", &[]);
    terminal.line("(progn (write-line \"go\") (loop))");
    terminal.wait_until("the evaluation runs", |pane| pane.lines().last() == Some("go"));
    terminal.keys(&["C-c"]);
    let pane = terminal.await_prompt("CL-USER>");
    assert!(
        pane.contains("; Interrupting the evaluation. No backtrace: There is no tool \"get-backtrace\"."),
        "{pane}"
    );
    assert!(terminal.evaluate("(+ 1 1)", "CL-USER>").ends_with("=> 2"));
}

#[test]
fn a_server_without_evaluate_lisp_is_refused_with_the_name_of_the_tool() {
    let output = piped(&["--tools", "load-system,run-tests"], "1\n");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(3) && text.contains("does not offer the tool evaluate-lisp"), "{text}");
}

#[test]
fn ctrl_c_interrupts_and_pressed_twice_replaces_the_image() {
    let terminal = Terminal::start("", &[]);
    terminal.evaluate("(defun f () 1) (defun spin () (loop))", "CL-USER>");
    terminal.line("(progn (write-line \"go\") (spin))");
    terminal.wait_until("the evaluation runs", |pane| pane.lines().last() == Some("go"));
    terminal.keys(&["C-c"]);
    let pane = terminal.await_prompt("CL-USER>");
    assert!(pane.contains("; Interrupted.") && pane.contains("(SPIN)"), "{pane}");
    assert_eq!(terminal.evaluate("(f)", "CL-USER>"), "=> 1");
    // Code that cannot be interrupted costs the image and no definition.
    terminal.clear();
    terminal.line("(progn (write-line \"go\") (sb-sys:without-interrupts (spin)))");
    terminal.wait_until("the evaluation runs", |pane| pane.lines().last() == Some("go"));
    terminal.keys(&["C-c"]);
    terminal.await_text("; Interrupting the evaluation. Ctrl-C twice within a second replaces the image.");
    // A second later Ctrl-C counts as a single press; the server replaces an image that does not react within two
    // seconds.
    std::thread::sleep(Duration::from_millis(1_001));
    terminal.keys(&["C-c"]);
    let pane = terminal.await_prompt("CL-USER>");
    assert!(
        pane.contains("; Interrupted.\n; The evaluation was cancelled.\n; The Lisp image did not respond"),
        "{pane}"
    );
    assert!(!pane.contains("; The image was terminated."), "{pane}");
    let notice = "; The image was terminated.\n; The Lisp image was killed by signal 9";
    let end = Instant::now() + DEADLINE;
    let pane = loop {
        terminal.clear();
        terminal.line("(progn (write-line \"go\") (sb-sys:without-interrupts (spin)))");
        terminal.wait_until("the evaluation runs", |pane| pane.lines().last() == Some("go"));
        terminal.keys(&["C-c"]);
        terminal.keys(&["C-c"]);
        let pane = terminal.await_prompt("CL-USER>");
        // Under load, the second press may come too late, or both may arrive at once.
        if pane.contains(notice) {
            break pane;
        }
        assert!(Instant::now() < end, "{pane}");
    };
    assert!(pane.contains("Restored: all 2 defining forms") && pane.contains("; Not kept: threads"), "{pane}");
    assert_eq!(terminal.evaluate("(f)", "CL-USER>"), "=> 1");
    // At the prompt, Ctrl-C discards the typed text.
    terminal.keys(&["-l", "(list"]);
    terminal.await_text("> (list");
    terminal.press_ctrl_c();
    assert_eq!(terminal.evaluate("2", "CL-USER>"), "=> 2");
}

#[test]
fn ctrl_c_in_the_values_of_a_restart_or_a_return_keeps_the_debugger_level() {
    let terminal = Terminal::start("", &[]);
    terminal.evaluate("(defun boo () (error \"boo\"))", "CL-USER>");
    terminal.evaluate("(defun fetch () (restart-case (boo) (take (x) x)))", "CL-USER>");
    let [restart, returned, resumed] = ["restart", "return", "resumed"].map(|name| terminal.state.join(name));
    let endless = |marker: &std::path::Path| format!("(with-open-file (s {marker:?} :direction :output)) (loop)");
    let interrupt = |line: &str, marker: &std::path::Path, prompt: &str| {
        terminal.clear();
        terminal.line(line);
        wait_until("the code runs", || marker.exists());
        terminal.keys(&["C-c"]);
        let pane = terminal.await_prompt(prompt);
        assert!(pane.contains("; Interrupted."), "{pane}");
        terminal.clear();
    };
    terminal.evaluate("(list (fetch))", "[1] CL-USER>");
    assert!(terminal.evaluate(":frame 1", "[1] CL-USER>").contains("1: (BOO)"));
    // Code that is evaluated in a frame is an evaluation of its own.
    assert!(terminal.evaluate("*print-base*", "[1] CL-USER>").ends_with("=> 10"));
    interrupt(&format!(":restart take (progn {})", endless(&restart)), &restart, "[1] CL-USER>");
    interrupt(&format!(":return (progn {})", endless(&returned)), &returned, "[1] CL-USER>");
    let shown = terminal.evaluate(":restart take 5", "CL-USER>");
    assert!(shown.ends_with("=> (5)"), "{shown}");
    // An interruption of the resumed evaluation ends the evaluation.
    terminal.evaluate(&format!("(progn (fetch) {})", endless(&resumed)), "[1] CL-USER>");
    interrupt(":restart take 5", &resumed, "CL-USER>");
}

#[test]
fn ctrl_c_shows_output_that_was_not_shown_while_the_evaluation_ran() {
    let terminal = Terminal::start("", &[]);
    let marker = terminal.state.join("running");
    let interrupt = |prompt: &str| {
        terminal.clear();
        let _ = std::fs::remove_file(&marker);
        // Lisp keeps a short text without a newline in a buffer.
        terminal.line(&format!(
            "(unwind-protect (progn (format t \"~D, \" 1) (with-open-file (s {marker:?} :direction :output)) (loop)) \
             (format t \"~D\" 2) (format *error-output* \"~D\" 3))"
        ));
        wait_until("the evaluation runs", || marker.exists());
        terminal.keys(&["C-c"]);
        let pane = terminal.await_prompt(prompt);
        assert!(pane.contains("1, 2\n3\n; Interrupted.\n"), "{pane}");
    };
    interrupt("CL-USER>");
    interrupt("CL-USER>");
    terminal.evaluate("(error \"boo\")", "[1] CL-USER>");
    interrupt("[1] CL-USER>");
}

#[test]
fn colon_commands_load_describe_checkpoint_reset_and_quit() {
    let terminal = Terminal::start("", &[]);
    let file = terminal.state.join("square.lisp");
    std::fs::write(&file, "(defun square (x) (* x x))\n").unwrap();
    let shown = terminal.evaluate(&format!(":load {}", file.display()), "CL-USER>");
    assert!(shown.contains("Loaded ") && !shown.contains("; No values"), "{shown}");
    assert_eq!(terminal.evaluate("(square 5)", "CL-USER>"), "=> 25");
    let shown = terminal.evaluate(":describe square", "CL-USER>");
    assert!(shown.contains("SQUARE [FUNCTION]") && shown.contains("(defun square"), "{shown}");
    terminal.evaluate("(defvar *x* 1)", "CL-USER>");
    assert!(terminal.evaluate(":checkpoint", "CL-USER>").contains("repl"));
    terminal.evaluate("(setf *x* 2)", "CL-USER>");
    assert!(terminal.evaluate(":checkpoints", "CL-USER>").contains("repl"));
    assert!(terminal.evaluate(":restore", "CL-USER>").contains("Restored \"repl\""));
    assert_eq!(terminal.evaluate("*x*", "CL-USER>"), "=> 1");
    assert!(terminal.evaluate(":lod square", "CL-USER>").contains("There is no command :lod. Did you mean :load?"));
    assert_eq!(
        terminal.evaluate(":tset", "CL-USER>"),
        "=> :TSET\n; :tset is a keyword, not a command. Did you mean :test?"
    );
    assert_eq!(terminal.evaluate(":something", "CL-USER>"), "=> :SOMETHING");
    terminal.clear();
    assert!(terminal.evaluate(":help", "CL-USER>").contains(":checkpoint [NAME]"));
    assert!(terminal.evaluate(":reset", "CL-USER>").contains("Session reset."));
    terminal.line(":quit");
    terminal.await_text("status 0");
}

#[test]
fn no_color_and_dumb_terminals_get_no_escape_sequences() {
    let with = Terminal::start("", &[]);
    with.evaluate("(error \"boo\")", "[1] CL-USER>");
    assert!(with.pane(&["-e"]).contains("\x1b[31m"));
    let without = Terminal::start("", &[("NO_COLOR", "1")]);
    without.evaluate("(error \"boo \" :key)", "[1] CL-USER>");
    let pane = without.pane(&["-e"]);
    assert!(pane.contains("[ERROR] SIMPLE-ERROR") && !pane.contains("\x1b[3"), "{pane}");
    // A dumb terminal gets plain lines.
    let script = format!("TERM=dumb '{}' repl", binary());
    let mut child = Command::new("script")
        .args(["-qec", &script, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"(+ 1\n2)\n\x04").unwrap();
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(text.contains("CL-USER> ") && text.contains("=> 3") && !text.contains('\x1b'), "{text}");
}

fn piped(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(binary());
    command.arg("repl").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn log_filter_in_the_environment_overrides_the_default_of_the_repl() {
    let messages = |filter: Option<&str>| {
        let mut command = Command::new(binary());
        command.arg("repl").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.envs(filter.map(|filter| ("SBCL_MCP_LOG", filter)));
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"(sb-posix:kill (sb-posix:getpid) 9)\n").unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap()
    };
    assert_eq!(messages(None), "");
    let text = messages(Some("warn"));
    assert!(text.contains("the Lisp image was killed by signal 9"), "{text}");
}

#[test]
fn piped_input_prints_values_and_sets_the_exit_status() {
    let fine = piped(
        &[],
        "(+ 1 2)\n(defun f (x)\n  \"(\" ; (\n  (* x 2))\n(progn (princ 7)\n  (f 21))\n\n(format *error-output* \"err~%\")\n:foo\n(values)",
    );
    let (stdout, stderr) = (String::from_utf8(fine.stdout).unwrap(), String::from_utf8(fine.stderr).unwrap());
    assert_eq!(stdout, "=> 3\n=> F\n7\n=> 42\n=> NIL\n=> :FOO\n; No values\n");
    assert_eq!((stderr.as_str(), fine.status.code()), ("err\n", Some(0)));
    // The values of each form are printed, with any printer settings, and reader macros are read by the image.
    let forms = "(princ 1) (values 2 3) (values) ; four\n#| five |# #+sbcl :yes #-no :no 'a #(1)\n; nothing\n\
                 (defpackage p (:use :cl)) (in-package p) *\n\
                 (progn (set-macro-character #\\} (get-macro-character #\\))) (set-macro-character #\\{ \
                 (lambda (s c) (declare (ignore c)) (cons 'list (read-delimited-list #\\} s t))))) {1 2} {3 4}\n";
    let stdout = String::from_utf8(piped(&[], forms).stdout).unwrap();
    let package = "=> #<PACKAGE \"P\">\n".repeat(3);
    let expected = format!(
        "1\n=> 1\n=> 2\n=> 3\n; No values\n=> :YES\n=> :NO\n=> A\n=> #(1)\n{package}=> T\n=> (1 2)\n=> (3 4)\n"
    );
    assert_eq!(stdout, expected);
    // A feature conditional and its form may be on different lines.
    let conditional = piped(&[], "#-sbcl\n(princ 1)\n#+(and sbcl\n  (not no))\n(princ 2)\n#-sbcl :no :yes\n");
    assert_eq!(String::from_utf8(conditional.stdout).unwrap(), "2\n=> 2\n=> :YES\n");
    let failed = piped(&[], "(+ 1 1) (error \"boo\") (+ 1 2)\n(+ 2 2) ) (+ 2 3)\n(+ 3 3)\n");
    let stdout = String::from_utf8(failed.stdout).unwrap();
    let values: Vec<_> = stdout.lines().filter(|line| line.starts_with("=> ")).collect();
    assert_eq!(values, ["=> 2", "=> 3", "=> 4", "=> 6"], "{stdout}");
    // An error is reported, the remaining forms are evaluated, and the exit status reports the error.
    let failed = piped(&[], "(error \"boo\")\n(+ 1 2)\n");
    let stdout = String::from_utf8(failed.stdout).unwrap();
    assert!(
        stdout.starts_with("[ERROR] SIMPLE-ERROR\nboo\n0: (ERROR \"boo\")\n") && stdout.ends_with("\n=> 3\n"),
        "{stdout}"
    );
    assert_eq!(failed.status.code(), Some(1));
    let unfinished = piped(&[], "(+ 1\n");
    assert!(String::from_utf8(unfinished.stdout).unwrap().starts_with("[ERROR] END-OF-FILE\n"));
    assert_eq!(unfinished.status.code(), Some(1));
    assert_eq!(piped(&[], "").status.code(), Some(0));
    // The REPL accepts the server's options.
    let limited = String::from_utf8(piped(&["--timeout", "0.2"], "(loop)\n").stdout).unwrap();
    assert!(limited.starts_with("[ERROR] TIMEOUT\n"), "{limited}");
    assert!(limited.contains(" For more time, start the REPL with a larger --timeout.\n"), "{limited}");
    let lost =
        piped(&[], "(sb-alien:alien-funcall (sb-alien:extern-alien \"abort\" (function sb-alien:void)))\n(+ 1 2)\n");
    let stdout = String::from_utf8(lost.stdout).unwrap();
    assert!(stdout.contains("[ERROR] IMAGE-LOST") && stdout.ends_with("=> 3\n"), "{stdout}");
    let unstarted = piped(&["--heap", "5"], "1\n");
    let said = String::from_utf8(unstarted.stderr).unwrap();
    assert!(unstarted.status.code() == Some(3) && said.contains("heap 5 is out of range"), "{said}");
}

/// The progress reports have the beginning of the output, and the structured content has the rest.
#[test]
fn output_that_is_longer_than_an_answer_is_shown_in_full() {
    let print = |from: u32| format!("(loop for i from {from} repeat 1000 do (format t \"~9D~%\" i))");
    let code = format!("(progn {} (finish-output) (sleep 1) {} (princ \"end\") 7)\n", print(0), print(1000));
    let lines: Vec<_> = (0..2000).map(|i| format!("{i:9}\n")).collect();
    let shown = String::from_utf8(piped(&["--max-answer", "6000"], &code).stdout).unwrap();
    assert_eq!(shown, lines.concat() + "end\n=> 7\n");
    // The end of output that is not kept is reported.
    let shown = String::from_utf8(piped(&["--max-output", "15000", "--max-answer", "6000"], &code).stdout).unwrap();
    let kept = lines[..1500].concat();
    assert_eq!(shown, kept + "[... 5003 characters omitted]\n=> 7\n");
}

/// Reading the whole form again after each of its lines would take minutes.
#[test]
fn form_of_many_lines_from_a_pipe_is_evaluated_in_seconds() {
    let begin = Instant::now();
    let form = format!("(length '(\n{}))\n", "  (1 2 3 \"a string\" :keyword #\\( ; )\n   )\n".repeat(30_000));
    assert_eq!(String::from_utf8(piped(&[], &form).stdout).unwrap(), "=> 30000\n");
    assert!(begin.elapsed() < DEADLINE, "{:?}", begin.elapsed());
}

#[test]
fn advice_names_commands_of_the_repl_instead_of_tools() {
    let deep = "(defun deep (n) (if (zerop n) (error \"deep\") (1+ (deep (1- n)))))\n(deep 100)\n:bt 2\n";
    let thread = "(progn (sb-thread:make-thread #'sleep :arguments '(600)) 1)\n";
    let output = piped(&[], &format!("(sb-ext:exit)\n:abort\n{deep}{thread}"));
    let text = String::from_utf8(output.stdout).unwrap();
    for advice in [
        "\nEXIT was called, but the server and the session continue. To leave the REPL, use :quit. For a new session, \
         use :reset.\n",
        "\n; No evaluation is held: an evaluation that fails at the prompt is held until it is resumed or aborted, ",
        " more frames (:bt shows them)\n",
        " shows all frames.\n",
        " Later answers show the output of this thread; :reset ends it.\n",
    ] {
        assert!(text.contains(advice), "{advice}: {text}");
    }
    for tool in ["get-backtrace", "reset-session", "on-error"] {
        assert!(!text.contains(tool), "{text}");
    }
}

#[test]
fn closed_or_full_output_pipes_set_the_exit_status() {
    let start = |stdout: Stdio, stderr: Stdio| {
        Command::new(binary()).arg("repl").stdin(Stdio::piped()).stdout(stdout).stderr(stderr).spawn().unwrap()
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    // The reader of the output closes it, as `head` does.
    let mut child = start(Stdio::piped(), Stdio::piped());
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"(list 1)\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "=> (1)\n");
    let _ = input.write_all("(list 2)\n".repeat(300).as_bytes());
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(1), &b""[..]));
    let mut child = start(full(), Stdio::piped());
    child.stdin.take().unwrap().write_all(b"(list 1)\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(3) && said.contains("write to stdout: No space left on device"), "{said}");
    let mut child = start(Stdio::piped(), full());
    child.stdin.take().unwrap().write_all(b"(progn (format *error-output* \"x\") 5)\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"=> 5\n"[..]));
    // Evaluated code cannot read the REPL's input.
    let read = piped(&[], "(read-line)\n5\n");
    let stdout = String::from_utf8(read.stdout).unwrap();
    assert!(stdout.starts_with("[ERROR] END-OF-FILE\n") && stdout.ends_with("\n=> 5\n"), "{stdout}");
    assert_eq!(piped(&[], "(list 1)\r\n\"a\0b\"\r\n:quit\r\n5\r\n").stdout, b"=> (1)\n=> \"a\0b\"\n");
}

/// Runs a command in `runtime`, the directory of the sockets.
fn run_in(runtime: &std::path::Path, arguments: &[&str], input: &str) -> (String, String, Option<i32>) {
    let mut command = Command::new(binary());
    command.args(arguments).env("XDG_RUNTIME_DIR", runtime).current_dir(runtime);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Writing fails if the command exits without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code())
}

#[test]
fn attach_runs_eval_check_load_test_and_repl_in_a_running_server() {
    let runtime = Scratch::new();
    std::fs::set_permissions(&*runtime, PermissionsExt::from_mode(0o700)).unwrap();
    let none = run_in(&runtime, &["eval", "--attach", "1"], "");
    assert!(none.2 == Some(3) && none.1.contains("no server to attach to is running"), "{none:?}");
    assert_eq!(run_in(&runtime, &["repl", "--attach"], "1\n").2, Some(3));
    assert_eq!(run_in(&runtime, &["test", "--attach", "x"], "").2, Some(2));

    let mut server = Server::start_with_environment(&["serve", "--socket"], &[("XDG_RUNTIME_DIR", &runtime)]);
    let initialized = server.initialize("2025-11-25");
    let instructions = initialized["instructions"].as_str().unwrap();
    assert!(
        instructions.contains("&& sbcl-mcp test --attach --reload") && instructions.len() <= 2_000,
        "{instructions}"
    );
    server.evaluate("(defpackage agent (:use :cl)) (in-package agent) (defun cl-user::f (x) (* 2 x))");
    server.evaluate("(defpackage cl-user::nowhere-else (:nicknames cl-user::elsewhere))");
    crate::client::evaluate_err(&mut server, "(error \"the agent's own\")");
    let fine = |arguments: &[&str], input: &str, expected: &str| {
        let answer = run_in(&runtime, arguments, input);
        assert!(answer.0.ends_with(expected) && answer.2 == Some(0), "{arguments:?}: {answer:?}");
    };
    fine(&["eval", "--attach", "(f 21)"], "", "=> 42\n");
    fine(&["eval", "--attach", "(f 1) (f 2)"], "", "=> 4\n");
    // `--attach` takes the known packages from the image.
    let source = "(nowhere-else::f 1) (elsewhere::f)\n";
    let without = run_in(&runtime, &["check", "-"], source);
    assert!(without.0.matches(": note: ").count() == 2 && without.2 == Some(0), "{without:?}");
    assert_eq!(run_in(&runtime, &["check", "--attach", "-"], source), (String::new(), String::new(), Some(0)));
    assert_eq!(run_in(&runtime, &["check", "--attach=nobody", "-"], source).2, Some(3));
    fine(&["eval", "--attach", "-"], "(f 4)", "=> 8\n");
    let name = format!("--attach={}", server.pid());
    fine(&["eval", &name, "(f 1)"], "", "=> 2\n");
    let failed = run_in(&runtime, &["eval", "--attach", "(error \"boo\")"], "");
    assert!(failed.0.starts_with("[ERROR] SIMPLE-ERROR\nboo\n") && failed.2 == Some(1), "{failed:?}");
    // Each REPL client has its own package, errors and values.
    fine(&["repl", "--attach"], "(defpackage person)\n(defvar cl-user::*x* (f 2))\n*x*\n", "=> 4\n");
    fine(&["repl", "--attach", &server.pid().to_string()], "*x*\n", "=> 4\n");
    assert!(last_error(&mut server).contains("the agent's own"));
    assert!(server.evaluate("(list (package-name *package*) cl-user::*x*)").ends_with("=> (\"AGENT\" 4)"));
    let file = runtime.join("file.lisp");
    std::fs::write(&file, "(in-package :cl-user) (defun loaded () :loaded)").unwrap();
    let loaded = run_in(&runtime, &["load", "--attach", file.to_str().unwrap()], "");
    assert!(loaded.0.contains("Loaded ") && loaded.2 == Some(0), "{loaded:?}");
    assert!(server.evaluate("(cl-user::loaded)").ends_with("=> :LOADED"));
    // A system is searched in the command's working directory, not in the server's.
    std::fs::write(runtime.join("few.asd"), "(defsystem few :depends-on (sb-rt) :components ((:file file)))").unwrap();
    std::fs::write(&file, "(defpackage few (:use :cl :sb-rt)) (in-package few) (deftest one 1 1)").unwrap();
    for (arguments, input) in [(&["test", "--attach", "few"][..], ""), (&["repl", "--attach"], ":test few\n")] {
        let tested = run_in(&runtime, arguments, input);
        assert!(tested.0.contains("=> all pass  1 passed") && tested.2 == Some(0), "{tested:?}");
    }
    // `--reload` loads edited files, and `test` accepts all options of run-tests.
    let test = |arguments: &[&str]| run_in(&runtime, &[&["test", "--attach"], arguments].concat(), "");
    let write = |name: &str, text: &str| std::fs::write(runtime.join(name), text).unwrap();
    write(
        "sums.asd",
        "(defsystem sums :components ((:file sums)))
         (defsystem sums/tests :depends-on (sums sb-rt) :components ((:file tests)))",
    );
    write("sums.lisp", "(defpackage sums (:use :cl)) (in-package sums) (defun once (x) x) (defun twice (x) (* 2 x))");
    let tests = "(defpackage sums/tests (:use :cl :sb-rt)) (in-package sums/tests)
                 (deftest one (sums::once 1) 1) (deftest two (sums::twice 1) 2) (deftest slow (sleep SECONDS) nil)";
    write("tests.lisp", &tests.replace("SECONDS", "0"));
    let (text, _, status) = test(&["sums"]);
    assert!(text.contains("=> all pass  3 passed") && status == Some(0), "{text}");
    write("sums.lisp", "(defpackage sums (:use :cl)) (in-package sums) (defun once (x) x) (defun twice (x) (* 3 x))");
    assert!(test(&["sums/tests:"]).0.contains("=> all pass  3 passed"));
    let (text, _, status) = test(&["--reload", "--suspects", "2", "sums/tests:"]);
    assert!(text.contains("2 passed, 1 failed") && text.contains("TWICE") && status == Some(1), "{text}");
    server.evaluate("(defun sums::twice (x) (+ x x))");
    assert!(test(&["sums", "few"]).0.contains("=> all pass  4 passed"));
    let (text, _, status) = test(&["--fresh", "few", "sums"]);
    assert!(text.contains("3 passed, 1 failed") && text.contains("fresh image") && status == Some(1), "{text}");
    write("tests.lisp", &tests.replace("SECONDS", "600"));
    let (text, _, status) = test(&["--test-timeout=0.1", "--reload", "sums"]);
    assert!(text.contains("0.1 s") && status == Some(1), "{text}");
    let (_, reason, status) = test(&["few", "few::one"]);
    assert!(
        reason.contains("few::one is not a system. A test or package must be named alone") && status == Some(2),
        "{reason}"
    );
    let terminal = Terminal::start("--attach", &[("XDG_RUNTIME_DIR", runtime.to_str().unwrap())]);
    assert_eq!(
        terminal.evaluate(":test few few::one", "CL-USER>"),
        "; few::one is not a system. A test or package must be named alone; several names must be systems."
    );
    server.evaluate("(sb-rt:deftest few::|two words| 1 1)");
    for (name, count) in [("few::|two words|", 1), ("FEW::one", 1), ("few:", 2), ("few, few", 2)] {
        let shown = terminal.evaluate(&format!(":test {name}"), "CL-USER>");
        assert!(shown.starts_with(&format!("=> all pass  {count} passed, 0 failed")), "{name}: {shown}");
    }
    assert_eq!(terminal.evaluate("(f 3)", "CL-USER>"), "=> 6");
    assert!(terminal.evaluate("(/ (f 3) 0)", "[1] CL-USER>").contains("[ERROR] DIVISION-BY-ZERO"));
    assert!(server.evaluate("1").ends_with("=> 1"));
    assert_eq!(terminal.evaluate(":abort", "CL-USER>"), "Evaluation aborted.");
    // The agent's actions are reported above the line that the person is typing.
    terminal.clear();
    terminal.keys(&["-l", "(f 4"]);
    terminal.await_text("> (f 4");
    server.evaluate("(defun cl-user::g () 1)");
    let notice = "; The server's first client (raw) defined G.";
    terminal.wait_until("the notice, and what was typed", |pane| pane == format!("{notice}\nCL-USER> (f 4"));
    terminal.keys(&["-l", ")"]);
    terminal.keys(&["Enter"]);
    terminal.wait_until("once", |pane| pane == format!("{notice}\nCL-USER> (f 4)\n=> 8\nCL-USER>"));
    // The agent's held evaluation can be taken over, which is reported to both.
    terminal.clear();
    crate::client::call_err(
        &mut server,
        "evaluate-lisp",
        json!({
            "code": "(restart-case (+ 1 (error \"boo\")) (use (x) (list x)))", "on-error": "debug"
        }),
    );
    let pane = terminal.await_text("To take over: ");
    let (said, number) = pane.lines().next().unwrap().split_once(": SIMPLE-ERROR. To take over: :take ").unwrap();
    let number = number.strip_suffix('.').unwrap();
    assert_eq!(said, format!("; The server's first client (raw) holds evaluation {number} for debugging"));
    let shown = terminal.evaluate(&format!(":take {number}"), "[1] CL-USER>");
    assert!(shown.starts_with("[ERROR] SIMPLE-ERROR\nboo\n") && shown.contains("  1. USE - USE"), "{shown}");
    assert_eq!(terminal.evaluate(":restart use 5", "CL-USER>"), "=> (5)");
    let notice = format!("Another client (sbcl-mcp) took over evaluation {number}, which was held for debugging.");
    assert!(server.evaluate("1").contains(&notice));
    assert!(terminal.evaluate(":take", "CL-USER>").starts_with("; No evaluation is held"));
    assert_eq!(terminal.evaluate(":take it", "CL-USER>"), "; :take takes a number.");
    server.finish();
    terminal.line("1");
    terminal.await_text("status 3");
    std::fs::remove_dir_all(&runtime).unwrap();
}

#[test]
fn the_end_of_an_attached_server_is_reported_with_advice_to_list_the_servers() {
    let runtime = Scratch::new();
    std::fs::set_permissions(&*runtime, PermissionsExt::from_mode(0o700)).unwrap();
    let mut server = Server::start_with_environment(&["serve", "--socket"], &[("XDG_RUNTIME_DIR", &runtime)]);
    server.initialize("2025-11-25");
    let mut command = Command::new(binary());
    command.args(["repl", "--attach"]).env("XDG_RUNTIME_DIR", &*runtime);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    input.write_all(b"(list 1)\n").unwrap();
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "=> (1)\n");
    server.finish();
    input.write_all(b"(list 2)\n").unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "; The server has ended. `sbcl-mcp sessions` lists the running servers.\n");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn load_and_test_commands_set_the_exit_status() {
    let directory = Scratch::new();
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    let test = |plus: &str| {
        format!(
            "(defpackage sums (:use :cl :sb-rt)) (in-package :sums) (deftest one (+ 1 1) 2) (deftest two (+ 1 {plus}) 3)"
        )
    };
    write("sums.asd", "(defsystem \"sums\" :depends-on (\"sb-rt\") :components ((:file \"sums\")))");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(binary());
        command.args(arguments).current_dir(&*directory);
        let output = command.stdin(Stdio::null()).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    };
    write("sums.lisp", &test("2"));
    // Both commands search the definition from the working directory.
    let (text, status) = run(&["test", "sums"]);
    assert!(text.contains("2 passed, 0 failed") && status == Some(0), "{text}");
    let (text, status) = run(&["load", "sums", "--heap", "1G"]);
    assert!(text.starts_with("Loaded sums: ") && status == Some(0), "{text}");
    let (text, status) = run(&["test", "sums"]);
    assert!(text.contains("2 passed, 0 failed") && status == Some(0), "{text}");
    write("wrong.asd", "(defsystem \"wrong\" :depends-on (\"sb-rt\") :components ((:file \"wrong\")))");
    write("wrong.lisp", &test("3"));
    let (text, status) = run(&["test", "--timeout", "60", "wrong"]);
    assert!(text.contains("1 passed, 1 failed") && status == Some(1), "{text}");
    for (arguments, expected) in [
        (&["test", "no-such-system"][..], 2),
        (&["test"], 2),
        (&["test", "sums", "--heap", "5"], 2),
        (&["load", "no-such-system"], 1),
        (&["load", "no-such-file.lisp"], 1),
        (&["load"], 2),
    ] {
        let (text, status) = run(arguments);
        assert_eq!(status, Some(expected), "{arguments:?}: {text}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
