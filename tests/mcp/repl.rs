//! `sbcl-mcp repl`: in a real terminal (tmux), and from pipes.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::client::{BINARY, DEADLINE, Scratch, Server, last_error};
use serde_json::json;

/// A terminal with a REPL in it.
pub(crate) struct Terminal {
    socket: String,
    state: Rc<Scratch>,
}

impl Terminal {
    /// Starts a REPL with these arguments and variables of the environment, and waits for its prompt.
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
        // What it ends with stays to be seen.
        command.arg(format!("'{BINARY}' repl {arguments}; echo \"status $?\"; exec cat"));
        assert!(command.status().unwrap().success(), "tmux starts");
        self.shows("CL-USER>");
    }

    fn tmux(&self) -> Command {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.socket]).env_remove("NO_COLOR");
        command
    }

    /// Presses keys, as tmux calls them.
    fn keys(&self, keys: &[&str]) {
        assert!(self.tmux().arg("send-keys").args(keys).status().unwrap().success());
    }

    /// Types a line.
    fn line(&self, text: &str) {
        assert!(self.tmux().args(["send-keys", "-l", text]).status().unwrap().success());
        self.keys(&["Enter"]);
    }

    /// What the terminal shows; with `-e`, colours as escape sequences.
    fn pane(&self, options: &[&str]) -> String {
        let output = self.tmux().args(["capture-pane", "-p"]).args(options).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
    }

    /// Waits until it is as it should be.
    #[track_caller]
    fn until(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
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

    /// Waits until this can be seen.
    #[track_caller]
    fn shows(&self, text: &str) -> String {
        self.until(text, |pane| pane.contains(text))
    }

    /// Waits until the last line is this.
    #[track_caller]
    fn asks(&self, prompt: &str) -> String {
        self.until(prompt, |pane| pane.lines().last() == Some(prompt))
    }

    /// Types a line, and waits for the next prompt; what was shown in between.
    #[track_caller]
    pub(crate) fn answers(&self, text: &str, prompt: &str) -> String {
        let before = self.pane(&[]).lines().count();
        self.line(text);
        let pane = self.until(&format!("{text}, then {prompt}"), |pane| {
            pane.lines().count() > before && pane.lines().last() == Some(prompt)
        });
        let lines: Vec<_> = pane.lines().skip(before).collect();
        lines[..lines.len() - 1].join("\n")
    }

    /// Presses Ctrl-C at the prompt.
    fn gives_up(&self) {
        self.keys(&["C-c"]);
        self.asks("CL-USER>");
    }

    /// Clears what can be seen.
    fn clear(&self) {
        let prompt = self.pane(&[]).lines().last().unwrap_or_default().to_owned();
        self.keys(&["C-l"]);
        self.until("a clear screen", |pane| pane == prompt);
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
    let shown = terminal.answers("(* x 2))", "CL-USER>");
    assert!(shown.ends_with("=> F"), "{shown}");
    assert_eq!(terminal.answers("(f 21)", "CL-USER>"), "=> 42");
    assert_eq!(terminal.answers("(values 1 (list \"a\" :b))", "CL-USER>"), "=> 1\n=> (\"a\" :B)");
    assert_eq!(terminal.answers("(values)", "CL-USER>"), "; No values");
    assert_eq!(terminal.answers("* **", "CL-USER>"), "=> NIL\n=> NIL");
    assert_eq!(terminal.answers("(progn (princ \"out\") 1)", "CL-USER>"), "out\n=> 1");
    let shown = terminal.answers("(defpackage foo (:use :cl)) (in-package foo)", "FOO>");
    assert_eq!(shown, "=> #<PACKAGE \"FOO\">\n=> #<PACKAGE \"FOO\">");
    // The one before the last, as a whole.
    terminal.keys(&["C-d"]);
    terminal.shows("status 0");
    let history = terminal.state.join("sbcl-mcp/history");
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&history), mode(history.parent().unwrap())), (0o600, 0o700));
    let terminal = Terminal { socket: format!("{}-again", terminal.socket), state: terminal.state.clone() };
    terminal.begin("", &[]);
    terminal.keys(&["Up", "Up", "Up", "Up", "Enter"]);
    terminal.until("from the history", |pane| pane.ends_with("> (values)\n; No values\nCL-USER>"));
}

#[test]
fn output_is_shown_while_an_evaluation_runs() {
    let terminal = Terminal::start("", &[]);
    let marker = terminal.state.join("go-on");
    let code = format!("(progn (format t \"first~%\") (loop until (probe-file {marker:?})) (princ \"second\") 1)");
    terminal.line(&code);
    terminal.until("the first line", |pane| pane.lines().last() == Some("first"));
    std::fs::write(&marker, "").unwrap();
    let pane = terminal.asks("CL-USER>");
    assert!(pane.ends_with("first\nsecond\n=> 1\nCL-USER>"), "{pane}");
    assert_eq!(pane.matches("\nfirst").count(), 1);
}

#[test]
fn tab_completes_names_and_shows_lambda_lists() {
    let terminal = Terminal::start("", &[]);
    terminal.answers(
        "(defpackage cafe (:export teapot)) (defun cafe:teapot (water &key leaves) (list water leaves))",
        "CL-USER>",
    );
    terminal.clear();
    terminal.keys(&["-l", "(cafe:t"]);
    terminal.keys(&["Tab"]);
    terminal.shows("CL-USER> (cafe:teapot");
    terminal.keys(&["-l", " 1)"]);
    terminal.keys(&["Enter"]);
    terminal.shows("=> (1 NIL)");
    terminal.asks("CL-USER>");
    terminal.clear();
    // Several: a menu.
    terminal.keys(&["-l", "(multiple-value-"]);
    terminal.keys(&["Tab"]);
    let menu = terminal.shows("multiple-value-setq");
    for known in ["multiple-value-bind", "multiple-value-call", "multiple-value-list", "multiple-value-prog1"] {
        assert!(menu.contains(known), "{menu}");
    }
    assert!(menu.contains("(VARS VALUE-FORM &BODY BODY)"), "{menu}");
    terminal.gives_up();
    // A package, and a variable with its earmuffs.
    terminal.keys(&["-l", "caf"]);
    terminal.keys(&["Tab"]);
    terminal.shows("CL-USER> cafe:");
    terminal.gives_up();
    terminal.keys(&["-l", "*print-readab"]);
    terminal.keys(&["Tab"]);
    terminal.shows("CL-USER> *print-readably*");
    terminal.gives_up();
    terminal.keys(&["-l", ":che"]);
    terminal.keys(&["Tab"]);
    terminal.shows("list checkpoints");
}

#[test]
fn error_opens_a_debugger_level_with_frames_and_restarts() {
    let terminal = Terminal::start("", &[]);
    terminal.answers("(defun total (prices) (reduce #'+ (mapcar #'price-of prices)))", "CL-USER>");
    let shown = terminal.answers("(total '((apple . 3) (pear . 4)))", "[1] CL-USER>");
    for known in [
        "[ERROR] UNDEFINED-FUNCTION\nThe function COMMON-LISP-USER::PRICE-OF is undefined.\n0: (PRICE-OF (APPLE . 3))",
        "\n  1. CONTINUE - Retry calling PRICE-OF.\n",
        "\n  6. ABORT - Return to top level.",
    ] {
        assert!(shown.contains(known), "{shown}");
    }
    assert!(!shown.contains("Tools: "), "{shown}");
    // What is left out is asked for by commands, not by the tools' arguments.
    let shown = terminal.answers(":bt 1", "[1] CL-USER>");
    assert!(shown.starts_with("Backtrace for UNDEFINED-FUNCTION (1 of "), "{shown}");
    assert!(shown.ends_with("\n3 more frames; :bt 4 shows them all."), "{shown}");
    assert!(!terminal.answers(":frame 1", "[1] CL-USER>").contains("more frames"));
    terminal.clear();
    assert!(terminal.answers(":frame 1", "[1] CL-USER>").contains("1: (TOTAL "));
    assert_eq!(terminal.answers(":locals", "[1] CL-USER>"), "PRICES = ((APPLE . 3) (PEAR . 4))");
    assert_eq!(terminal.answers("(length prices)", "[1] CL-USER>"), "=> 2");
    // An error of the debugger's own code leaves the level alone.
    assert!(terminal.answers("(/ (length prices) 0)", "[1] CL-USER>").contains("[ERROR] DIVISION-BY-ZERO"));
    terminal.clear();
    assert!(terminal.answers("(defun price-of (item) (cdr item))", "[1] CL-USER>").ends_with("=> PRICE-OF"));
    assert_eq!(terminal.answers("1", "CL-USER>"), "=> 7");
    // By name, with a value; given up; returned from.
    terminal.answers("(restart-case (error \"boo\") (take (x) x))", "[1] CL-USER>");
    assert_eq!(terminal.answers(":restart take (+ 40 2)", "CL-USER>"), "=> 42");
    terminal.answers("(error \"boo\")", "[1] CL-USER>");
    assert_eq!(terminal.answers(":abort", "CL-USER>"), "Evaluation aborted.");
    terminal.clear();
    terminal.answers("(progn (defun inner () (error \"boo\")) (defun outer () (list (inner))))", "CL-USER>");
    terminal.answers("(outer)", "[1] CL-USER>");
    terminal.answers(":frame 1", "[1] CL-USER>");
    assert_eq!(terminal.answers(":return :fine", "CL-USER>"), "=> (:FINE)");
    assert!(terminal.answers(":abort", "CL-USER>").starts_with("; No evaluation is held"));
    // What stands behind what failed is not evaluated, least of all in the debugger.
    let shown = terminal.answers("(list 1) (error \"boo\") (setf *x* 1)", "[1] CL-USER>");
    assert!(shown.starts_with("=> (1)\n[ERROR] ") && shown.ends_with("; Not evaluated: (setf *x* 1)"), "{shown}");
    terminal.answers(":abort", "CL-USER>");
    // A number is a number again.
    assert_eq!(terminal.answers("1", "CL-USER>"), "=> 1");
    terminal.line("(Quit)");
    terminal.shows("status 0");
}

#[test]
fn ctrl_c_interrupts_and_pressed_twice_replaces_the_image() {
    let terminal = Terminal::start("", &[]);
    terminal.answers("(defun f () 1) (defun spin () (loop))", "CL-USER>");
    terminal.line("(progn (write-line \"go\") (spin))");
    terminal.until("it runs", |pane| pane.lines().last() == Some("go"));
    terminal.keys(&["C-c"]);
    let pane = terminal.asks("CL-USER>");
    assert!(pane.contains("; Interrupted.") && pane.contains("(SPIN)"), "{pane}");
    assert_eq!(terminal.answers("(f)", "CL-USER>"), "=> 1");
    // What cannot be interrupted costs the image, but no definition.
    terminal.clear();
    terminal.line("(progn (write-line \"go\") (sb-sys:without-interrupts (spin)))");
    terminal.until("it runs", |pane| pane.lines().last() == Some("go"));
    terminal.keys(&["C-c"]);
    terminal.shows("; It is being interrupted. Ctrl-C twice within a second replaces the image.");
    // This late, it is no more than another one: what does not end within two seconds, the server replaces.
    std::thread::sleep(Duration::from_millis(1_001));
    terminal.keys(&["C-c"]);
    let pane = terminal.asks("CL-USER>");
    assert!(pane.contains("; Interrupted.\n; The evaluation was cancelled.\n; The Lisp image did not react"), "{pane}");
    assert!(!pane.contains("; The image was replaced."), "{pane}");
    let told = "; The image was replaced.\n; The Lisp image was killed by signal 9";
    let end = Instant::now() + DEADLINE;
    let pane = loop {
        terminal.clear();
        terminal.line("(progn (write-line \"go\") (sb-sys:without-interrupts (spin)))");
        terminal.until("it runs", |pane| pane.lines().last() == Some("go"));
        terminal.keys(&["C-c"]);
        terminal.keys(&["C-c"]);
        let pane = terminal.asks("CL-USER>");
        // Under load, the second one may have come too late, or both at once.
        if pane.contains(told) {
            break pane;
        }
        assert!(Instant::now() < end, "{pane}");
    };
    assert!(pane.contains("Restored: all 2 forms") && pane.contains("; Not kept: values"), "{pane}");
    assert_eq!(terminal.answers("(f)", "CL-USER>"), "=> 1");
    // At the prompt it gives up what was typed.
    terminal.keys(&["-l", "(list"]);
    terminal.shows("> (list");
    terminal.gives_up();
    assert_eq!(terminal.answers("2", "CL-USER>"), "=> 2");
}

#[test]
fn colon_commands_load_describe_checkpoint_reset_and_quit() {
    let terminal = Terminal::start("", &[]);
    let file = terminal.state.join("square.lisp");
    std::fs::write(&file, "(defun square (x) (* x x))\n").unwrap();
    let shown = terminal.answers(&format!(":load {}", file.display()), "CL-USER>");
    assert!(shown.contains("Loaded ") && !shown.contains("; No values"), "{shown}");
    assert_eq!(terminal.answers("(square 5)", "CL-USER>"), "=> 25");
    let shown = terminal.answers(":describe square", "CL-USER>");
    assert!(shown.contains("SQUARE [FUNCTION]") && shown.contains("(defun square"), "{shown}");
    terminal.answers("(defvar *x* 1)", "CL-USER>");
    assert!(terminal.answers(":checkpoint", "CL-USER>").contains("repl"));
    terminal.answers("(setf *x* 2)", "CL-USER>");
    assert!(terminal.answers(":checkpoints", "CL-USER>").contains("repl"));
    assert!(terminal.answers(":restore", "CL-USER>").contains("Restored \"repl\""));
    assert_eq!(terminal.answers("*x*", "CL-USER>"), "=> 1");
    assert!(terminal.answers(":lod square", "CL-USER>").contains("There is no command :lod. Did you mean :load?"));
    assert_eq!(terminal.answers(":tset", "CL-USER>"), "=> :TSET\n; That is a keyword. The command is :test.");
    assert_eq!(terminal.answers(":something", "CL-USER>"), "=> :SOMETHING");
    terminal.clear();
    assert!(terminal.answers(":help", "CL-USER>").contains(":checkpoint [NAME]"));
    assert!(terminal.answers(":reset", "CL-USER>").contains("Session reset."));
    terminal.line(":quit");
    terminal.shows("status 0");
}

#[test]
fn no_color_and_dumb_terminals_get_no_escape_sequences() {
    let with = Terminal::start("", &[]);
    with.answers("(error \"boo\")", "[1] CL-USER>");
    assert!(with.pane(&["-e"]).contains("\x1b[31m"));
    let without = Terminal::start("", &[("NO_COLOR", "1")]);
    without.answers("(error \"boo \" :key)", "[1] CL-USER>");
    let pane = without.pane(&["-e"]);
    assert!(pane.contains("[ERROR] SIMPLE-ERROR") && !pane.contains("\x1b[3"), "{pane}");
    // A terminal that can do nothing gets lines.
    let script = format!("TERM=dumb '{BINARY}' repl");
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
    let mut command = Command::new(BINARY);
    command.arg("repl").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
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
    // Each form has its values, in what order ever they are printed; a reader macro is the image's matter.
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
    let failed = piped(&[], "(+ 1 1) (error \"boo\") (+ 1 2)\n(+ 2 2) ) (+ 2 3)\n(+ 3 3)\n");
    let stdout = String::from_utf8(failed.stdout).unwrap();
    let values: Vec<_> = stdout.lines().filter(|line| line.starts_with("=> ")).collect();
    assert_eq!(values, ["=> 2", "=> 3", "=> 4", "=> 6"], "{stdout}");
    // An error is told, the rest is evaluated, and the status says so.
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
    // The server's options are the REPL's.
    let limited = piped(&["--timeout", "0.2"], "(loop)\n");
    assert!(String::from_utf8(limited.stdout).unwrap().starts_with("[ERROR] TIMEOUT\n"));
    let lost =
        piped(&[], "(sb-alien:alien-funcall (sb-alien:extern-alien \"abort\" (function sb-alien:void)))\n(+ 1 2)\n");
    let stdout = String::from_utf8(lost.stdout).unwrap();
    assert!(stdout.contains("[ERROR] IMAGE-LOST") && stdout.ends_with("=> 3\n"), "{stdout}");
    let unstarted = piped(&["--heap", "5"], "1\n");
    let said = String::from_utf8(unstarted.stderr).unwrap();
    assert!(unstarted.status.code() == Some(3) && said.contains("heap 5 is out of range"), "{said}");
}

#[test]
fn closed_or_full_output_pipes_set_the_exit_status() {
    let start = |stdout: Stdio, stderr: Stdio| {
        Command::new(BINARY).arg("repl").stdin(Stdio::piped()).stdout(stdout).stderr(stderr).spawn().unwrap()
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    // Nobody reads on, as with `head`.
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
    assert!(output.status.code() == Some(3) && said.contains("it cannot write: No space left on device"), "{said}");
    let mut child = start(Stdio::piped(), full());
    child.stdin.take().unwrap().write_all(b"(progn (format *error-output* \"x\") 5)\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"=> 5\n"[..]));
    // The code has no share in the REPL's input.
    let read = piped(&[], "(read-line)\n5\n");
    let stdout = String::from_utf8(read.stdout).unwrap();
    assert!(stdout.starts_with("[ERROR] END-OF-FILE\n") && stdout.ends_with("\n=> 5\n"), "{stdout}");
    assert_eq!(piped(&[], "(list 1)\r\n\"a\0b\"\r\n:quit\r\n5\r\n").stdout, b"=> (1)\n=> \"a\0b\"\n");
}

/// Runs a command with a directory for sockets, in that.
fn joined(runtime: &std::path::Path, arguments: &[&str], input: &str) -> (String, String, Option<i32>) {
    let mut command = Command::new(BINARY);
    command.args(arguments).env("XDG_RUNTIME_DIR", runtime).current_dir(runtime);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that does not read is free not to.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code())
}

#[test]
fn attach_runs_eval_check_load_test_and_repl_in_a_running_server() {
    let runtime = Scratch::new();
    std::fs::set_permissions(&*runtime, PermissionsExt::from_mode(0o700)).unwrap();
    let none = joined(&runtime, &["eval", "--attach", "1"], "");
    assert!(none.2 == Some(3) && none.1.contains("no session runs that can be joined"), "{none:?}");
    assert_eq!(joined(&runtime, &["repl", "--attach"], "1\n").2, Some(3));
    assert_eq!(joined(&runtime, &["test", "--attach", "x"], "").2, Some(2));

    let mut server = Server::start_with_environment(&["serve", "--socket"], &[("XDG_RUNTIME_DIR", &runtime)]);
    let initialized = server.initialize("2025-11-25");
    let instructions = initialized["instructions"].as_str().unwrap();
    assert!(
        instructions.contains("&& sbcl-mcp test --attach --reload") && instructions.len() <= 2_000,
        "{instructions}"
    );
    server.evaluate("(defpackage agent (:use :cl)) (in-package agent) (defun cl-user::f (x) (* 2 x))");
    server.evaluate("(defpackage cl-user::nowhere-else (:nicknames cl-user::elsewhere))");
    crate::client::fail(&mut server, "(error \"the agent's own\")");
    let fine = |arguments: &[&str], input: &str, expected: &str| {
        let answer = joined(&runtime, arguments, input);
        assert!(answer.0.ends_with(expected) && answer.2 == Some(0), "{arguments:?}: {answer:?}");
    };
    fine(&["eval", "--attach", "(f 21)"], "", "=> 42\n");
    fine(&["eval", "--attach", "(f 1) (f 2)"], "", "=> 4\n");
    // Which packages there are is known of the image.
    let source = "(nowhere-else::f 1) (elsewhere::f)\n";
    let without = joined(&runtime, &["check", "-"], source);
    assert!(without.0.matches(": note: ").count() == 2 && without.2 == Some(0), "{without:?}");
    assert_eq!(joined(&runtime, &["check", "--attach", "-"], source), (String::new(), String::new(), Some(0)));
    assert_eq!(joined(&runtime, &["check", "--attach=nobody", "-"], source).2, Some(3));
    fine(&["eval", "--attach", "-"], "(f 4)", "=> 8\n");
    let name = format!("--attach={}", server.pid());
    fine(&["eval", &name, "(f 1)"], "", "=> 2\n");
    let failed = joined(&runtime, &["eval", "--attach", "(error \"boo\")"], "");
    assert!(failed.0.starts_with("[ERROR] SIMPLE-ERROR\nboo\n") && failed.2 == Some(1), "{failed:?}");
    // A person's package, errors and values are his own.
    fine(&["repl", "--attach"], "(defpackage person)\n(defvar cl-user::*x* (f 2))\n*x*\n", "=> 4\n");
    fine(&["repl", "--attach", &server.pid().to_string()], "*x*\n", "=> 4\n");
    assert!(last_error(&mut server).contains("the agent's own"));
    assert!(server.evaluate("(list (package-name *package*) cl-user::*x*)").ends_with("=> (\"AGENT\" 4)"));
    let file = runtime.join("file.lisp");
    std::fs::write(&file, "(in-package :cl-user) (defun loaded () :loaded)").unwrap();
    let loaded = joined(&runtime, &["load", "--attach", file.to_str().unwrap()], "");
    assert!(loaded.0.contains("Loaded ") && loaded.2 == Some(0), "{loaded:?}");
    assert!(server.evaluate("(cl-user::loaded)").ends_with("=> :LOADED"));
    // A system is looked for where the person is, not where the server is.
    std::fs::write(runtime.join("few.asd"), "(defsystem few :depends-on (sb-rt) :components ((:file file)))").unwrap();
    std::fs::write(&file, "(defpackage few (:use :cl :sb-rt)) (in-package few) (deftest one 1 1)").unwrap();
    for (arguments, input) in [(&["test", "--attach", "few"][..], ""), (&["repl", "--attach"], ":test few\n")] {
        let tested = joined(&runtime, arguments, input);
        assert!(tested.0.contains("=> all pass  1 passed") && tested.2 == Some(0), "{tested:?}");
    }
    // What was edited since is run where that is asked for, with all that run-tests can tell.
    let test = |arguments: &[&str]| joined(&runtime, &[&["test", "--attach"], arguments].concat(), "");
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
    assert!(reason.contains("few::one is no system: several at once must be") && status == Some(2), "{reason}");
    let terminal = Terminal::start("--attach", &[("XDG_RUNTIME_DIR", runtime.to_str().unwrap())]);
    assert_eq!(
        terminal.answers(":test few few::one", "CL-USER>"),
        "; few::one is no system: several at once must be, a test or a package stands alone."
    );
    server.evaluate("(sb-rt:deftest few::|two words| 1 1)");
    for (name, count) in [("few::|two words|", 1), ("FEW::one", 1), ("few:", 2), ("few, few", 2)] {
        let shown = terminal.answers(&format!(":test {name}"), "CL-USER>");
        assert!(shown.starts_with(&format!("=> all pass  {count} passed, 0 failed")), "{name}: {shown}");
    }
    assert_eq!(terminal.answers("(f 3)", "CL-USER>"), "=> 6");
    assert!(terminal.answers("(/ (f 3) 0)", "[1] CL-USER>").contains("[ERROR] DIVISION-BY-ZERO"));
    assert!(server.evaluate("1").ends_with("=> 1"));
    assert_eq!(terminal.answers(":abort", "CL-USER>"), "Evaluation aborted.");
    // What the agent does is told while somebody types, above that.
    terminal.clear();
    terminal.keys(&["-l", "(f 4"]);
    terminal.shows("> (f 4");
    server.evaluate("(defun cl-user::g () 1)");
    let told = "; The session's own connection (raw) defined G.";
    terminal.until("the notice, and what was typed", |pane| pane == format!("{told}\nCL-USER> (f 4"));
    terminal.keys(&["-l", ")"]);
    terminal.keys(&["Enter"]);
    terminal.until("once", |pane| pane == format!("{told}\nCL-USER> (f 4)\n=> 8\nCL-USER>"));
    // What it holds can be taken over, and that is told to both.
    terminal.clear();
    crate::client::bad(
        &mut server,
        "evaluate-lisp",
        json!({
            "code": "(restart-case (+ 1 (error \"boo\")) (use (x) (list x)))", "on-error": "debug"
        }),
    );
    let pane = terminal.shows("takes it over.");
    let (said, number) = pane.lines().next().unwrap().split_once(": SIMPLE-ERROR. :take ").unwrap();
    let number = number.strip_suffix(" takes it over.").unwrap();
    assert_eq!(said, format!("; The session's own connection (raw) holds evaluation {number} for debugging"));
    let shown = terminal.answers(&format!(":take {number}"), "[1] CL-USER>");
    assert!(shown.starts_with("[ERROR] SIMPLE-ERROR\nboo\n") && shown.contains("  1. USE - USE"), "{shown}");
    assert_eq!(terminal.answers(":restart use 5", "CL-USER>"), "=> (5)");
    let told = format!("Another connection (sbcl-mcp) took over evaluation {number}, which was held for debugging.");
    assert!(server.evaluate("1").contains(&told));
    assert!(terminal.answers(":take", "CL-USER>").starts_with("; No evaluation is held"));
    assert_eq!(terminal.answers(":take it", "CL-USER>"), "; :take takes a number.");
    server.finish();
    terminal.line("1");
    terminal.shows("status 3");
    std::fs::remove_dir_all(&runtime).unwrap();
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
        let mut command = Command::new(BINARY);
        command.args(arguments).current_dir(&*directory);
        let output = command.stdin(Stdio::null()).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    };
    write("sums.lisp", &test("2"));
    // The definition is looked for where the person is, by both.
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
