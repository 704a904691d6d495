//! The commands `eval`, `load` and `test` from a shell: in an image of their own, or attached to a running server.
#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::client::{Scratch, Server, binary};
use crate::processes::{children, is_alive, signal, wait_until};

/// The directory of a test: the working directory of its commands, which also holds the servers' sockets.
struct Workspace(Scratch);

/// The output and the exit status of a command.
#[derive(Debug)]
struct CommandResult {
    stdout: String,
    stderr: String,
    status: Option<i32>,
}

impl Workspace {
    fn new() -> Self {
        let directory = Scratch::new();
        std::fs::set_permissions(&*directory, PermissionsExt::from_mode(0o700)).unwrap();
        Self(directory)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    /// Starts a server that clients can attach to.
    fn server(&self) -> Server {
        let mut server = Server::start_with_environment(&["serve", "--socket"], &[("XDG_RUNTIME_DIR", &*self.0)]);
        server.initialize("2025-11-25");
        server
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // `timeout` makes a hanging command fail.
        let mut command = Command::new("timeout");
        command
            .args(["-s", "KILL", "100", binary()])
            .args(arguments)
            .env("XDG_RUNTIME_DIR", &*self.0)
            .current_dir(&*self.0)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandResult {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        CommandResult { stdout: text(output.stdout), stderr: text(output.stderr), status: output.status.code() }
    }
}

#[test]
fn load_and_test_without_a_working_directory_are_refused_with_advice() {
    let workspace = Workspace::new();
    for command in ["load", "test"] {
        let output = Command::new("sh")
            .args(["-c", "mkdir gone && cd gone && rmdir ../gone && exec \"$0\" \"$@\"", binary(), command, "x"])
            .current_dir(&*workspace.0)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with(&format!("sbcl-mcp {command}: the working directory cannot be found: ")), "{text}");
        assert!(text.ends_with("; run sbcl-mcp in an existing directory\n"), "{text}");
        assert!(!output.status.success());
    }
}

#[test]
fn timeout_applies_to_each_eval_load_and_repl_request() {
    let workspace = Workspace::new();
    workspace.write("endless.lisp", "(loop)");
    let result = workspace.run(&["load", "--timeout", "0.5", "endless.lisp"]);
    assert!(result.stdout.starts_with("[ERROR] TIMEOUT\n") && result.status == Some(1), "{result:?}");
    let server = workspace.server();
    for (arguments, status) in [
        (&["eval", "--attach", "--timeout", "0.5", "(loop)"][..], 1),
        (&["load", "--attach", "--timeout=0.5", "endless.lisp"], 1),
    ] {
        let result = workspace.run(arguments);
        assert!(result.stdout.starts_with("[ERROR] TIMEOUT\n") && result.status == Some(status), "{result:?}");
        assert!(result.stdout.contains(" 0.5 s"), "{result:?}");
    }
    let mut repl = workspace.command(&["repl", "--attach", "--timeout", "0.5"]);
    workspace.write("forms", "(loop)\n:load endless.lisp\n(list 1)");
    let output = repl.stdin(std::fs::File::open(workspace.0.join("forms")).unwrap()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.matches("[ERROR] TIMEOUT\n").count() == 2 && text.ends_with("=> (1)\n"), "{text}");
    assert!(server.finish().status.success());
}

#[test]
fn attach_refuses_options_of_a_new_image() {
    let workspace = Workspace::new();
    let server = workspace.server();
    for (arguments, option) in [
        (&["eval", "--attach", "--heap", "1G", "1"][..], "--heap"),
        (&["eval", "--max-output", "3", "--attach", "1"], "--max-output"),
        (&["eval", "--attach", "--read-only", "1"], "--read-only"),
        (&["load", "--attach", "--max-answer=6000", "asdf"], "--max-answer"),
        (&["load", "--attach", "--user-init", "asdf"], "--user-init"),
        (&["test", "--attach", "--hold", "5", "asdf"], "--hold"),
        (&["test", "--attach", "--timeout", "5", "asdf"], "--timeout"),
        (&["repl", "--attach", "--tools", "core"], "--tools"),
        (&["repl", "--session=x", "--attach"], "--session"),
    ] {
        let result = workspace.run(arguments);
        assert!(result.stdout.is_empty() && result.status == Some(2), "{arguments:?}: {result:?}");
        assert!(result.stderr.lines().count() == 1 && result.stderr.contains(option), "{arguments:?}: {result:?}");
    }
    let result = workspace.run(&["test", "--attach", "--timeout", "5", "asdf"]);
    assert!(result.stderr.contains("--test-timeout"), "{result:?}");
    assert!(server.finish().status.success());
}

/// Returns the text of a file of sb-rt tests in `package`.
fn rt(package: &str, tests: &str) -> String {
    format!("(defpackage {package} (:use :cl :sb-rt)) (in-package {package}) {tests}")
}

/// Writes systems whose tests pass, fail or are skipped, and one that cannot be loaded.
fn systems(workspace: &Workspace) {
    for (name, tests) in
        [("passes", "(deftest one 1 1)"), ("fails", "(deftest one 1 2)"), ("breaks", "(error \"no luck\")")]
    {
        workspace.write(
            &format!("{name}.asd"),
            &format!("(defsystem {name} :depends-on (sb-rt) :components ((:file {name})))"),
        );
        workspace.write(&format!("{name}.lisp"), &rt(name, tests));
    }
    workspace.write("skips.asd", "(defsystem skips :depends-on (fiveam) :components ((:file skips)))");
    workspace
        .write("skips.lisp", "(defpackage skips (:use :cl :fiveam)) (in-package skips) (test one (skip \"no time\"))");
}

#[test]
fn test_exit_status_is_the_worst_of_all_systems() {
    let workspace = Workspace::new();
    systems(&workspace);
    let mut cases = vec![
        (vec!["passes"], 0, "=> all pass  1 passed"),
        (vec!["fails"], 1, "FAILED  0 passed, 1 failed"),
        (vec!["passes", "fails"], 1, "2 systems: FAILED  1 passed, 1 failed"),
        (vec!["breaks"], 2, "no luck"),
        (vec!["nowhere"], 2, "nowhere"),
        (vec!["passes", "nowhere"], 2, "passes:\n=> all pass  1 passed"),
        (vec!["nowhere", "fails"], 2, "fails:\nFAILED  0 passed, 1 failed"),
        (vec!["breaks", "passes"], 2, "passes:\n=> all pass  1 passed"),
        (vec!["--fresh", "passes", "nowhere"], 2, "passes:\n=> all pass  1 passed"),
    ];
    if std::path::Path::new("/usr/share/common-lisp/source/fiveam").exists() {
        cases.extend([
            (vec!["skips"], 2, "NOTHING RAN  0 passed, 0 failed, 0 errors, 1 skipped"),
            (vec!["skips", "passes"], 2, "2 systems: NOT ALL RAN  1 passed"),
            (vec!["skips", "fails"], 1, "2 systems: FAILED  0 passed, 1 failed, 0 errors, 1 skipped"),
        ]);
    } else {
        println!("left out: FiveAM is not installed (Debian: cl-fiveam)");
        assert!(std::env::var_os("CI").is_none(), "not left out in CI");
    }
    for (names, status, text) in cases {
        let result = workspace.run(&[&["test"], &*names].concat());
        assert!(result.stdout.contains(text) && result.status == Some(status), "{names:?}: {result:?}");
    }
}

#[test]
fn load_and_test_find_systems_in_any_letter_case() {
    let workspace = Workspace::new();
    workspace.write("Mixed.asd", "(defsystem \"Mixed\" :depends-on (\"sb-rt\") :components ((:file \"mixed\")))");
    workspace.write("mixed.lisp", &rt("mixed", "(deftest one 1 1)"));
    workspace.write("plain.asd", "(defsystem \"plain\" :depends-on (\"sb-rt\") :components ((:file \"mixed\")))");
    // By this program's own search, and by ASDF's.
    let registry =
        format!("(:source-registry (:directory {:?}) :ignore-inherited-configuration)", workspace.0.join(""));
    for directory in [&*workspace.0, &*std::env::temp_dir()] {
        for name in ["Mixed", "mixed", "MIXED", "plain", "Plain", "PLAIN"] {
            for command in ["test", "load"] {
                let mut run = workspace.command(&[command, name]);
                let output = run.current_dir(directory).env("CL_SOURCE_REGISTRY", &registry).output().unwrap();
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success(), "{command} {name} in {directory:?}: {text}");
            }
        }
    }
}

#[test]
fn test_of_an_unloaded_package_is_refused_without_attach_or_user_init() {
    let workspace = Workspace::new();
    systems(&workspace);
    for name in ["passes:", "passes::one"] {
        let result = workspace.run(&["test", name]);
        let expected = format!("sbcl-mcp test: {name} is not in a new image: name the system");
        assert!(result.stderr.starts_with(&expected) && result.status == Some(2), "{result:?}");
        assert_eq!((result.stdout.as_str(), result.stderr.lines().count()), ("", 1));
    }
    // The init file may load the package at start-up.
    workspace.write(".sbclrc", "(require :sb-rt) (load (merge-pathnames \"passes.lisp\" (user-homedir-pathname)))");
    for name in ["passes:", "passes::one"] {
        let output = workspace.command(&["test", "--user-init", name]).env("HOME", &*workspace.0).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
}

#[test]
fn test_with_several_names_requires_systems_before_attaching() {
    let workspace = Workspace::new();
    let result = workspace.run(&["test", "--attach=nobody", "passes", "few::one"]);
    let expected = "sbcl-mcp test: few::one is not a system. A test or package must be named alone; several names must be \
         systems.\n";
    assert_eq!((result.stderr.as_str(), result.status), (expected, Some(2)), "{result:?}");
}

#[test]
fn attach_followed_by_a_server_name_hints_at_attach_equals_name() {
    let workspace = Workspace::new();
    systems(&workspace);
    let server = workspace.server();
    let name = server.pid().to_string();
    let hint =
        |command: &str| format!("sbcl-mcp {command}: {name} is a running server: attach to it with --attach={name}.\n");
    let result = workspace.run(&["test", "--attach", &name, "passes"]);
    assert!(result.stderr == hint("test") && result.status == Some(2), "{result:?}");
    assert!(result.stdout.contains("passes:\n=> all pass"), "{result:?}");
    let result = workspace.run(&["load", "--attach", &name]);
    assert!(result.stderr == hint("load") && result.status == Some(1), "{result:?}");
    let result = workspace.run(&["eval", "--attach", &name, "(error \"so\")"]);
    assert!(result.stderr == hint("eval") && result.status == Some(1), "{result:?}");
    for arguments in [&["test", "--attach", "passes"][..], &["test", "--attach", "nowhere"]] {
        assert_eq!(workspace.run(arguments).stderr, "");
    }
    assert!(server.finish().status.success());
}

#[test]
fn advice_names_command_line_options_instead_of_tools() {
    let workspace = Workspace::new();
    let tests = "(defun deep (n) (if (zerop n) (error \"deep\") (1+ (deep (1- n))))) (deftest one (deep 100) 1) \
                 (deftest other (list (deep 100)) 1) (deftest another (progn (princ \"some\") 2) 1)";
    workspace.write("advised.asd", "(defsystem advised :depends-on (sb-rt) :components ((:file advised)))");
    workspace.write("advised.lisp", &rt("advised", tests));
    workspace.write("deep.lisp", "(defun deep (n) (if (zerop n) (error \"deep\") (1+ (deep (1- n))))) (deep 100)");
    workspace.write("endless.lisp", "(loop)");
    let server = workspace.server();
    let missing = workspace.run(&["test", "--attach", "cl-user::nothing"]).stdout;
    assert!(
        missing.contains("no tests of a supported framework are loaded. Load the tests first, or name their system.\n"),
        "{missing}"
    );
    for attach in [&[][..], &["--attach"]] {
        let run = |command: &str, arguments: &[&str]| workspace.run(&[&[command], attach, arguments].concat()).stdout;
        let tested = run("test", &["advised"]);
        assert!(tested.starts_with("FAILED  0 passed, 1 failed, 2 errors"), "{tested}");
        assert!(tested.contains("\n--suspects 3 also lists code"), "{tested}");
        let printed = if attach.is_empty() {
            "The test run printed 5 characters.\n"
        } else {
            "The test run printed 5 characters: check-evaluation {"
        };
        assert!(tested.contains(printed), "{tested}");
        let deep = run("load", &["deep.lisp"]);
        assert!(deep.contains(" more frames\n"), "{deep}");
        let limited =
            run("load", &["--timeout", "0.2", "endless.lisp"]) + &run("eval", &["--timeout", "0.2", "(loop)"]);
        assert_eq!(limited.matches(" For more time, pass a larger --timeout.\n").count(), 2, "{limited}");
        for tool in ["get-backtrace", "run-tests", "configure-limits"] {
            assert!(!(tested.clone() + &deep + &limited).contains(tool), "{tested}\n{deep}\n{limited}");
        }
    }
    assert!(server.finish().status.success());
}

/// Returns the chain of first children of a process: the server, its worker, and the image that looks for suspects.
fn descendants(of: u32) -> Vec<u32> {
    std::iter::successors(Some(of), |pid| children(*pid).first().copied()).skip(1).collect()
}

#[test]
fn killed_test_suspects_run_leaves_no_processes_or_files() {
    // SIGINT is left out: a shell's background processes ignore it.
    for (ended, by) in [(0, "-TERM"), (0, "-KILL"), (1, "-KILL"), (2, "-KILL"), (3, "-KILL")] {
        let workspace = Workspace::new();
        let temporary = workspace.0.join("tmp");
        std::fs::create_dir(&temporary).unwrap();
        // The second run of the test is the one that records coverage.
        let test = "(deftest one (progn (when (probe-file \"once\") (open \"twice\" :direction :output) (sleep 600))
                                        (open \"once\" :direction :output) 1) 2)";
        workspace.write("slow.asd", "(defsystem slow :depends-on (sb-rt) :components ((:file slow)))");
        workspace.write("slow.lisp", &rt("slow", test));
        let mut command = Command::new(binary());
        command.args(["test", "--suspects", "3", "--test-timeout", "600", "slow"]).env("TMPDIR", &temporary);
        let null = [Stdio::null(), Stdio::null(), Stdio::null()];
        let [input, output, error] = null;
        let mut run = command.current_dir(&*workspace.0).stdin(input).stdout(output).stderr(error).spawn().unwrap();
        wait_until("the test runs for its coverage", || workspace.0.join("twice").exists());
        let pids: Vec<_> = std::iter::once(run.id()).chain(descendants(run.id())).collect();
        assert_eq!(pids.len(), 4, "{pids:?}");
        assert_ne!(std::fs::read_dir(&temporary).unwrap().count(), 0);
        signal(pids[ended], by);
        wait_until(&format!("{by} of {ended}: it has ended"), || run.try_wait().unwrap().is_some());
        wait_until(&format!("{by} of {ended}: all have ended"), || !pids.iter().any(|pid| is_alive(*pid)));
        let left: Vec<_> = std::fs::read_dir(&temporary).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "{by} of {ended}: {left:?}");
    }
}
