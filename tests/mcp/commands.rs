//! The commands `eval`, `load` and `test` as a shell's user has them: in an image of their own, or in one that runs.
#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::client::{BINARY, Scratch, Server};
use crate::processes::{children, is_alive, signal, until};

/// A directory of a test's own: where commands are given, and where servers have their sockets.
struct Place(Scratch);

/// What a command said, on stdout and stderr, and its status.
#[derive(Debug)]
struct Said {
    text: String,
    complaint: String,
    status: Option<i32>,
}

impl Place {
    fn new() -> Self {
        let directory = Scratch::new();
        std::fs::set_permissions(&*directory, PermissionsExt::from_mode(0o700)).unwrap();
        Self(directory)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    /// A server that can be joined.
    fn server(&self) -> Server {
        let mut server = Server::start_with_environment(&["serve", "--socket"], &[("XDG_RUNTIME_DIR", &*self.0)]);
        server.initialize("2025-11-25");
        server
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // What hangs fails.
        let mut command = Command::new("timeout");
        command
            .args(["-s", "KILL", "100", BINARY])
            .args(arguments)
            .env("XDG_RUNTIME_DIR", &*self.0)
            .current_dir(&*self.0)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Said {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Said { text: text(output.stdout), complaint: text(output.stderr), status: output.status.code() }
    }
}

#[test]
fn timeout_applies_to_each_eval_load_and_repl_request() {
    let place = Place::new();
    place.write("endless.lisp", "(loop)");
    let said = place.run(&["load", "--timeout", "0.5", "endless.lisp"]);
    assert!(said.text.starts_with("[ERROR] TIMEOUT\n") && said.status == Some(1), "{said:?}");
    let server = place.server();
    for (arguments, status) in [
        (&["eval", "--attach", "--timeout", "0.5", "(loop)"][..], 1),
        (&["load", "--attach", "--timeout=0.5", "endless.lisp"], 1),
    ] {
        let said = place.run(arguments);
        assert!(said.text.starts_with("[ERROR] TIMEOUT\n") && said.status == Some(status), "{said:?}");
        assert!(said.text.contains(" 0.5 s"), "{said:?}");
    }
    let mut repl = place.command(&["repl", "--attach", "--timeout", "0.5"]);
    place.write("forms", "(loop)\n:load endless.lisp\n(list 1)");
    let output = repl.stdin(std::fs::File::open(place.0.join("forms")).unwrap()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.matches("[ERROR] TIMEOUT\n").count() == 2 && text.ends_with("=> (1)\n"), "{text}");
    assert!(server.finish().status.success());
}

#[test]
fn attach_refuses_options_of_a_new_image() {
    let place = Place::new();
    let server = place.server();
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
        let said = place.run(arguments);
        assert!(said.text.is_empty() && said.status == Some(2), "{arguments:?}: {said:?}");
        assert!(said.complaint.lines().count() == 1 && said.complaint.contains(option), "{arguments:?}: {said:?}");
    }
    let said = place.run(&["test", "--attach", "--timeout", "5", "asdf"]);
    assert!(said.complaint.contains("--test-timeout"), "{said:?}");
    assert!(server.finish().status.success());
}

/// A file of tests of sb-rt in a package of this name.
fn rt(package: &str, tests: &str) -> String {
    format!("(defpackage {package} (:use :cl :sb-rt)) (in-package {package}) {tests}")
}

/// Systems whose tests pass, fail, and are skipped; one that cannot be loaded.
fn systems(place: &Place) {
    for (name, tests) in
        [("passes", "(deftest one 1 1)"), ("fails", "(deftest one 1 2)"), ("breaks", "(error \"no luck\")")]
    {
        place.write(
            &format!("{name}.asd"),
            &format!("(defsystem {name} :depends-on (sb-rt) :components ((:file {name})))"),
        );
        place.write(&format!("{name}.lisp"), &rt(name, tests));
    }
    place.write("skips.asd", "(defsystem skips :depends-on (fiveam) :components ((:file skips)))");
    place.write("skips.lisp", "(defpackage skips (:use :cl :fiveam)) (in-package skips) (test one (skip \"no time\"))");
}

#[test]
fn test_exit_status_is_the_worst_of_all_systems() {
    let place = Place::new();
    systems(&place);
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
        let said = place.run(&[&["test"], &*names].concat());
        assert!(said.text.contains(text) && said.status == Some(status), "{names:?}: {said:?}");
    }
}

#[test]
fn load_and_test_find_systems_in_any_letter_case() {
    let place = Place::new();
    place.write("Mixed.asd", "(defsystem \"Mixed\" :depends-on (\"sb-rt\") :components ((:file \"mixed\")))");
    place.write("mixed.lisp", &rt("mixed", "(deftest one 1 1)"));
    place.write("plain.asd", "(defsystem \"plain\" :depends-on (\"sb-rt\") :components ((:file \"mixed\")))");
    // Found by this program, and by ASDF.
    let registry = format!("(:source-registry (:directory {:?}) :ignore-inherited-configuration)", place.0.join(""));
    for directory in [&*place.0, &*std::env::temp_dir()] {
        for name in ["Mixed", "mixed", "MIXED", "plain", "Plain", "PLAIN"] {
            for command in ["test", "load"] {
                let mut run = place.command(&[command, name]);
                let output = run.current_dir(directory).env("CL_SOURCE_REGISTRY", &registry).output().unwrap();
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success(), "{command} {name} in {directory:?}: {text}");
            }
        }
    }
}

#[test]
fn test_of_an_unloaded_package_is_refused_without_attach_or_user_init() {
    let place = Place::new();
    systems(&place);
    for name in ["passes:", "passes::one"] {
        let said = place.run(&["test", name]);
        let expected =
            "sbcl-mcp test: an image of its own has loaded nothing, and knows no package passes: name the system";
        assert!(said.complaint.starts_with(expected) && said.status == Some(2), "{said:?}");
        assert_eq!((said.text.as_str(), said.complaint.lines().count()), ("", 1));
    }
    // Unless something is loaded at its start.
    place.write(".sbclrc", "(require :sb-rt) (load (merge-pathnames \"passes.lisp\" (user-homedir-pathname)))");
    for name in ["passes:", "passes::one"] {
        let output = place.command(&["test", "--user-init", name]).env("HOME", &*place.0).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
}

#[test]
fn test_with_several_names_requires_systems_before_attaching() {
    let place = Place::new();
    let said = place.run(&["test", "--attach=nobody", "passes", "few::one"]);
    let expected = "sbcl-mcp test: few::one is no system: several at once must be, a test or a package stands alone.\n";
    assert_eq!((said.complaint.as_str(), said.status), (expected, Some(2)), "{said:?}");
}

#[test]
fn attach_followed_by_a_server_name_hints_at_attach_equals_name() {
    let place = Place::new();
    systems(&place);
    let server = place.server();
    let name = server.pid().to_string();
    let hint = |command: &str| format!("sbcl-mcp {command}: {name} is a server that runs: --attach={name} joins it.\n");
    let said = place.run(&["test", "--attach", &name, "passes"]);
    assert!(said.complaint == hint("test") && said.status == Some(2), "{said:?}");
    assert!(said.text.contains("passes:\n=> all pass"), "{said:?}");
    let said = place.run(&["load", "--attach", &name]);
    assert!(said.complaint == hint("load") && said.status == Some(1), "{said:?}");
    let said = place.run(&["eval", "--attach", &name, "(error \"so\")"]);
    assert!(said.complaint == hint("eval") && said.status == Some(1), "{said:?}");
    for arguments in [&["test", "--attach", "passes"][..], &["test", "--attach", "nowhere"]] {
        assert_eq!(place.run(arguments).complaint, "");
    }
    assert!(server.finish().status.success());
}

#[test]
fn advice_names_command_line_options_instead_of_tools() {
    let place = Place::new();
    let tests = "(defun deep (n) (if (zerop n) (error \"deep\") (1+ (deep (1- n))))) (deftest one (deep 100) 1) \
                 (deftest other (list (deep 100)) 1) (deftest another (progn (princ \"some\") 2) 1)";
    place.write("advised.asd", "(defsystem advised :depends-on (sb-rt) :components ((:file advised)))");
    place.write("advised.lisp", &rt("advised", tests));
    place.write("deep.lisp", "(defun deep (n) (if (zerop n) (error \"deep\") (1+ (deep (1- n))))) (deep 100)");
    place.write("endless.lisp", "(loop)");
    let server = place.server();
    for attach in [&[][..], &["--attach"]] {
        let run = |command: &str, arguments: &[&str]| place.run(&[&[command], attach, arguments].concat()).text;
        let tested = run("test", &["advised"]);
        assert!(tested.starts_with("FAILED  0 passed, 1 failed, 2 errors"), "{tested}");
        assert!(tested.contains("\n--suspects 3 also says which code"), "{tested}");
        let printed = if attach.is_empty() {
            "The tests printed 5 characters.\n"
        } else {
            "The tests printed 5 characters: check-evaluation {"
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

/// The first of the processes that a process has started, and so on: the server, its worker, and the one that looks for
/// suspects.
fn descendants(of: u32) -> Vec<u32> {
    std::iter::successors(Some(of), |pid| children(*pid).first().copied()).skip(1).collect()
}

#[test]
fn killed_test_suspects_run_leaves_no_processes_or_files() {
    // SIGINT is ignored by whoever is begun in the background by a shell.
    for (ended, by) in [(0, "-TERM"), (0, "-KILL"), (1, "-KILL"), (2, "-KILL"), (3, "-KILL")] {
        let place = Place::new();
        let temporary = place.0.join("tmp");
        std::fs::create_dir(&temporary).unwrap();
        // The second time it is there for its coverage.
        let test = "(deftest one (progn (when (probe-file \"once\") (open \"twice\" :direction :output) (sleep 600))
                                        (open \"once\" :direction :output) 1) 2)";
        place.write("slow.asd", "(defsystem slow :depends-on (sb-rt) :components ((:file slow)))");
        place.write("slow.lisp", &rt("slow", test));
        let mut command = Command::new(BINARY);
        command.args(["test", "--suspects", "3", "--test-timeout", "600", "slow"]).env("TMPDIR", &temporary);
        let null = [Stdio::null(), Stdio::null(), Stdio::null()];
        let [input, output, error] = null;
        let mut run = command.current_dir(&*place.0).stdin(input).stdout(output).stderr(error).spawn().unwrap();
        until("it runs for its coverage", || place.0.join("twice").exists());
        let pids: Vec<_> = std::iter::once(run.id()).chain(descendants(run.id())).collect();
        assert_eq!(pids.len(), 4, "{pids:?}");
        assert_ne!(std::fs::read_dir(&temporary).unwrap().count(), 0);
        signal(pids[ended], by);
        until(&format!("{by} of {ended}: it has ended"), || run.try_wait().unwrap().is_some());
        until(&format!("{by} of {ended}: all have ended"), || !pids.iter().any(|pid| is_alive(*pid)));
        let left: Vec<_> = std::fs::read_dir(&temporary).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "{by} of {ended}: {left:?}");
    }
}
