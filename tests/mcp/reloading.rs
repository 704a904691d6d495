//! Reloading: which files count as changed, and which definitions the new version of a file lacks.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::json;

use crate::client::{Scratch, Server, binary, call_err, call_ok};
use crate::libraries::{INSTALLED, installed};
use crate::stalls::make_fifo;

/// A project directory with its own home and fasl cache.
struct Project {
    root: Scratch,
}

impl Project {
    fn new() -> Self {
        let root = Scratch::new();
        for directory in ["work", "cache", "home"] {
            root.directory(directory);
        }
        Self { root }
    }

    /// Creates a project whose system `app` has these files, loaded in this order.
    fn of(files: &[(&str, &str)]) -> Self {
        let project = Self::new();
        let components: Vec<_> = files.iter().map(|(file, _)| format!("(:file \"{file}\")")).collect();
        project.write("app.asd", &format!("(defsystem \"app\" :serial t :components ({}))", components.join(" ")));
        for (file, text) in files {
            project.write(&format!("{file}.lisp"), text);
        }
        project
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root.join("work").join(file)
    }

    /// Writes a file of the project.
    fn write(&self, file: &str, text: &str) {
        self.root.write(&format!("work/{file}"), text);
    }

    fn date(&self, file: &str) -> SystemTime {
        self.path(file).metadata().and_then(|metadata| metadata.modified()).expect("the file has a date")
    }

    fn set_date(&self, file: &str, date: SystemTime) {
        let file = File::options().append(true).open(self.path(file)).expect("the file is there");
        file.set_modified(date).expect("the file is ours");
    }

    /// Returns the fasl of a source file.
    fn fasl(&self, file: &str) -> PathBuf {
        fn find(directory: &Path, name: &str) -> Option<PathBuf> {
            std::fs::read_dir(directory)
                .ok()?
                .flatten()
                .map(|entry| entry.path())
                .find_map(|path| if path.is_dir() { find(&path, name) } else { path.ends_with(name).then_some(path) })
        }
        find(&self.root.join("cache"), &format!("{file}.fasl")).expect("the file was compiled")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments).current_dir(self.root.join("work"));
        command.env("XDG_CACHE_HOME", self.root.join("cache")).env("HOME", self.root.join("home"));
        command
    }

    fn server(&self) -> Server {
        self.server_with(&[])
    }

    fn server_with(&self, arguments: &[&str]) -> Server {
        let mut server = Server::start_command(&mut self.command(arguments));
        server.initialize("2025-11-25");
        server
    }
}

/// Loads the system `app` and returns the answer without its seconds and without the path of the .asd file.
#[track_caller]
fn load(server: &mut Server) -> String {
    load_with(server, json!({"system": "app", "directory": "."}))
}

#[track_caller]
fn load_with(server: &mut Server, arguments: serde_json::Value) -> String {
    let text = call_ok(server, "load-system", arguments);
    let lines = text.lines().filter(|line| !line.starts_with("Defined in "));
    lines
        .map(|line| match line.rsplit_once(", ") {
            Some((before, seconds)) if line.starts_with("Loaded ") && seconds.ends_with(" s") => before,
            _ => line,
        })
        .collect::<Vec<_>>()
        .join("\n")
}

#[track_caller]
fn assert_up_to_date(server: &mut Server) {
    let text = load(server);
    assert!(text.contains(" is up to date: "), "{text}");
}

const PACKAGE: &str = "(defpackage :app (:use :cl))";

/// Returns the text of a file with a macro and a function.
fn macro_file(value: u32) -> String {
    format!("(in-package :app)\n(defmacro value () {value})\n(defun expanded () (value))\n")
}

const MACRO_USER: &str = "(in-package :app)\n(defun used () (value))\n";

// ---- Restored sessions

/// Kills the worker and returns the answer to `code` in the next image.
#[cfg(target_os = "linux")]
fn evaluate_after_image_loss(server: &mut Server, code: &str) -> String {
    crate::processes::kill_worker(server);
    server.evaluate(code)
}

/// The next image loads the new version of a file even where the lost image loaded the old one, so ASDF considers the file up
/// to date where the lost image loaded it again.
#[cfg(target_os = "linux")]
#[test]
fn a_file_reloaded_over_definitions_of_the_session_is_reloaded_after_image_loss() {
    let text = "(in-package :app)\n(defun half () :file)\n(defparameter *p* :file)\n(defun late () :file)\n";
    for code in [None, Some("(asdf:load-system \"app\")")] {
        let project = Project::of(&[("package", PACKAGE), ("a", text), ("b", "(in-package :app)\n")]);
        let mut server = project.server();
        load(&mut server);
        server.evaluate("(defun app::half () :session) (defparameter app::*p* :session)");
        for edit in 1..3 {
            project.write("a.lisp", &format!("{text}; edit {edit}\n"));
            let answer = match code {
                Some(code) => server.evaluate(code),
                None => load(&mut server),
            };
            assert!(code.is_some() || answer.contains("Loaded app: 2 files, 2 compiled"), "{answer}");
        }
        server.evaluate("(defun app::late () :session)");
        let state = "(list (app::half) app::*p* (app::late))";
        let expected = "=> (:FILE :FILE :SESSION)";
        assert_eq!(server.evaluate(state), expected);
        let compiled_at = || project.fasl("a").metadata().and_then(|metadata| metadata.modified()).expect("a date");
        let before = compiled_at();
        for _ in 0..2 {
            let answer = evaluate_after_image_loss(&mut server, state);
            assert!(answer.ends_with(expected), "{answer}");
        }
        assert_eq!(compiled_at(), before, "an up-to-date file is not compiled");
        assert_up_to_date(&mut server);
    }
}

/// The first form of the restore already loads the new file, because the system definition has the file by then.
#[cfg(target_os = "linux")]
#[test]
fn a_definition_moved_to_a_new_file_is_loaded_from_this_file_after_image_loss() {
    for order in [["a", "b"], ["b", "a"]] {
        let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)\n(defun old () :file)\n")]);
        let mut server = project.server();
        load(&mut server);
        server.evaluate("(defun app::moved () :session)");
        project.write("b.lisp", "(in-package :app)\n(defun moved () :file)\n");
        let [first, second] = order;
        let files = format!("(:file \"package\") (:file \"{first}\") (:file \"{second}\")");
        project.write("app.asd", &format!("(defsystem \"app\" :serial t :components ({files}))"));
        load(&mut server);
        server.evaluate("(defun app::old () :session)");
        let state = "(list (app::old) (app::moved))";
        assert_eq!(server.evaluate(state), "=> (:SESSION :FILE)");
        let text = evaluate_after_image_loss(&mut server, state);
        assert!(text.ends_with("=> (:SESSION :FILE)"), "{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn files_of_two_systems_replace_each_others_definitions_in_the_original_order_after_image_loss() {
    let text = "(in-package :app)\n(defun both () :app)\n";
    let patch = "(in-package :app)\n(defun both () :patch)\n";
    let project = Project::of(&[("package", PACKAGE), ("a", text)]);
    project.write("patch.asd", "(defsystem \"patch\" :components ((:file \"patch\")))");
    project.write("patch.lisp", patch);
    let mut server = project.server();
    let load_patch = |server: &mut Server| load_with(server, json!({"system": "patch", "directory": "."}));
    load(&mut server);
    load_patch(&mut server);
    project.write("a.lisp", &format!("{text}; edit 1\n"));
    load(&mut server);
    project.write("patch.lisp", &format!("{patch}; edit 1\n"));
    load_patch(&mut server);
    project.write("a.lisp", &format!("{text}; edit 2\n"));
    load(&mut server);
    assert_eq!(server.evaluate("(app::both)"), "=> :APP");
    let answer = evaluate_after_image_loss(&mut server, "(app::both)");
    assert!(answer.ends_with("=> :APP"), "{answer}");
}

/// A failed load is not repeated, but the files that it reloaded are.
#[cfg(target_os = "linux")]
#[test]
fn files_that_a_failed_load_reloaded_are_reloaded_after_image_loss() {
    for is_held in [false, true] {
        let half = |value: &str| format!("(in-package :app)\n(defun half () {value})\n");
        let project = Project::of(&[("package", PACKAGE), ("a", &half(":file")), ("b", "(in-package :app)\n")]);
        let mut server = project.server();
        load(&mut server);
        server.evaluate("(defun app::half () :session)");
        project.write("a.lisp", &half(":edited"));
        project.write("b.lisp", "(in-package :app)\n(error \"unfinished\")\n");
        let finish = || project.write("b.lisp", "(in-package :app)\n(defun b () 1)\n");
        if is_held {
            let code = json!({"code": "(asdf:load-system \"app\")", "on-error": "debug"});
            let report = call_err(&mut server, "evaluate-lisp", code);
            let retry = report.lines().find_map(|line| line.strip_suffix(". RETRY - Evaluate this form again."));
            let retry: u64 = retry.expect("the form's restart").trim().parse().expect("its number");
            finish();
            call_ok(&mut server, "invoke-restart", json!({"restart": retry}));
        } else {
            call_err(&mut server, "load-system", json!({"system": "app"}));
            finish();
            assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
        }
        let state = "(list (app::half) (app::b))";
        assert_eq!(server.evaluate(state), "=> (:EDITED 1)");
        let answer = evaluate_after_image_loss(&mut server, state);
        assert!(answer.ends_with("=> (:EDITED 1)"), "{answer}");
    }
}

/// The files of the failed load are restored at its place, before the fix, although the next load comes after the fix.
#[cfg(target_os = "linux")]
#[test]
fn a_fix_after_a_failed_load_is_kept_after_image_loss() {
    let half = |value: &str| format!("(in-package :app)\n(defun half () {value})\n");
    let project = Project::of(&[("package", PACKAGE), ("a", &half(":file")), ("b", "(in-package :app)\n")]);
    let mut server = project.server();
    load(&mut server);
    project.write("a.lisp", &half(":edited"));
    project.write("b.lisp", "(in-package :app)\n(error \"unfinished\")\n");
    call_err(&mut server, "load-system", json!({"system": "app"}));
    server.evaluate("(defun app::half () :fix)");
    project.write("b.lisp", "(in-package :app)\n(defun b () 1)\n");
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    let answer = evaluate_after_image_loss(&mut server, "(list (app::half) (app::b))");
    assert!(answer.ends_with("=> (:FIX 1)"), "{answer}");
}

/// The code that is recorded for a test run loads at most the system that was tested.
#[cfg(target_os = "linux")]
#[test]
fn files_that_a_test_run_reloaded_are_reloaded_after_image_loss() {
    for arguments in [
        json!({"system": "app", "directory": ".", "reload": true}),
        json!({"test-package": "app", "reload": true}),
        json!({"name": "app::adds", "reload": true}),
    ] {
        let tests = "(in-package :app)\n(sb-rt:deftest adds (+ 1 1) 2)\n(defun helper () :file)\n";
        let project = Project::of(&[("package", PACKAGE)]);
        project.write(
            "app.asd",
            "(defsystem \"app\" :components ((:file \"package\")) :in-order-to ((test-op (test-op \"app/tests\"))))
             (defsystem \"app/tests\" :depends-on (\"app\" \"sb-rt\") :components ((:file \"tests\"))
               :perform (test-op (o c) (symbol-call :sb-rt :do-tests)))",
        );
        project.write("tests.lisp", tests);
        let mut server = project.server();
        load_with(&mut server, json!({"system": "app/tests", "directory": "."}));
        server.evaluate("(defun app::helper () :session)");
        project.write("tests.lisp", &format!("{tests}; edit\n"));
        let text = call_ok(&mut server, "run-tests", arguments);
        assert!(text.contains("=> all pass  1 passed"), "{text}");
        assert_eq!(server.evaluate("(app::helper)"), "=> :FILE");
        let answer = evaluate_after_image_loss(&mut server, "(app::helper)");
        assert!(answer.ends_with("=> :FILE"), "{answer}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_changed_file_without_a_system_is_reloaded_by_a_test_run_and_after_image_loss() {
    for arguments in [json!({"test-package": "app", "reload": true}), json!({"name": "app::adds", "reload": true})] {
        // The file is loaded by its path, or by another file.
        for loaded in ["tests.lisp", "all.lisp"] {
            let tests = |sum: u8| {
                format!(
                    "(require :sb-rt)\n{PACKAGE}\n(in-package :app)\n(sb-rt:deftest adds (+ 1 1) {sum})\n\
                     (defun helper () :file)\n"
                )
            };
            let project = Project::new();
            project.write("tests.lisp", &tests(2));
            project.write("all.lisp", "(load \"tests.lisp\")\n");
            let mut server = project.server();
            call_ok(&mut server, "load-system", json!({"path": loaded}));
            server.evaluate("(defun app::helper () :session)");
            let text = call_ok(&mut server, "run-tests", arguments.clone());
            assert!(text.contains("=> all pass  1 passed"), "{text}");
            assert_eq!(server.evaluate("(app::helper)"), "=> :SESSION");
            project.write("tests.lisp", &tests(3));
            let text = call_ok(&mut server, "run-tests", arguments.clone());
            assert!(text.contains("FAILED  0 passed, 1 failed"), "{text}");
            assert_eq!(server.evaluate("(app::helper)"), "=> :FILE");
            let answer = evaluate_after_image_loss(&mut server, "(app::helper)");
            assert!(answer.ends_with("=> :FILE"), "{answer}");
        }
    }
}

#[test]
fn a_file_whose_reload_failed_is_loaded_again_by_the_next_test_run() {
    let project = Project::new();
    project.write("tests.lisp", "(require :sb-rt)\n(sb-rt:deftest gives (f) 1)\n");
    project.write("f.lisp", "(defun f () 1)\n");
    let mut server = project.server();
    for path in ["tests.lisp", "f.lisp"] {
        call_ok(&mut server, "load-system", json!({"path": path}));
    }
    let arguments = json!({"name": "gives", "reload": true});
    project.write("f.lisp", "(error \"broken\")\n");
    for _ in 0..2 {
        let text = call_err(&mut server, "run-tests", arguments.clone());
        assert!(text.contains("broken"), "{text}");
    }
    project.write("f.lisp", "(defun f () 2)\n");
    let text = call_ok(&mut server, "run-tests", arguments.clone());
    assert!(text.contains("FAILED  0 passed, 1 failed"), "{text}");
    // The file was loaded completely, so it is not loaded again.
    server.evaluate("(defun f () 1)");
    let text = call_ok(&mut server, "run-tests", arguments);
    assert!(text.contains("=> all pass  1 passed"), "{text}");
}

#[test]
fn a_test_run_reloads_a_file_in_its_external_format_and_skips_a_file_whose_package_was_deleted() {
    let project = Project::new();
    let write_latin = |value: &str| {
        let text = [&b"(defvar *accent* \"\xe9\")\n(defun latin () "[..], value.as_bytes(), b")\n"].concat();
        std::fs::write(project.path("latin.lisp"), text).expect("a file");
    };
    project.write("tests.lisp", "(require :sb-rt)\n(sb-rt:deftest gives 1 1)\n");
    project.write("scratch.lisp", "(defun scratch () 1)\n");
    write_latin("1");
    let mut server = project.server();
    call_ok(&mut server, "load-system", json!({"path": "tests.lisp"}));
    server.evaluate("(load \"latin.lisp\" :external-format :latin-1)");
    server.evaluate("(defpackage :tmp (:use :cl)) (let ((*package* (find-package :tmp))) (load \"scratch.lisp\"))");
    server.evaluate("(delete-package :tmp)");
    write_latin("2");
    project.write("scratch.lisp", "(defun scratch () 2)\n");
    let text = call_ok(&mut server, "run-tests", json!({"name": "gives", "reload": true}));
    let notice = "scratch.lisp was not loaded again: the package TMP, in which it was loaded, does not exist.";
    assert!(text.contains(notice) && text.contains("=> all pass  1 passed"), "{text}");
    assert_eq!(server.evaluate("(list (latin) (char-code (char *accent* 0)))"), "=> (2 233)");
}

#[test]
fn a_test_run_does_not_load_a_file_that_was_replaced_by_a_fifo() {
    let project = Project::new();
    project.write("tests.lisp", "(require :sb-rt)\n(sb-rt:deftest gives 1 1)\n");
    project.write("f.lisp", "(defun f () 1)\n");
    let mut server = project.server();
    for path in ["tests.lisp", "f.lisp"] {
        call_ok(&mut server, "load-system", json!({"path": path}));
    }
    let file = project.path("f.lisp");
    std::fs::remove_file(&file).expect("the file is there");
    make_fifo(&file);
    let text = call_ok(&mut server, "run-tests", json!({"name": "gives", "reload": true}));
    let notice = "f.lisp was not loaded again: it is not a regular file.";
    assert!(text.contains(notice) && text.contains("=> all pass  1 passed"), "{text}");
}

/// A replayed load of a system that depends on a file does not load the file again unless the lost image did.
#[cfg(target_os = "linux")]
#[test]
fn a_load_that_did_not_reload_a_file_keeps_definitions_of_the_session_after_image_loss() {
    let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)\n(defun half () :file)\n")]);
    project.write("user.asd", "(defsystem \"user\" :depends-on (\"app\") :components ((:file \"user\")))");
    project.write("user.lisp", "(defun user () 1)\n");
    let mut server = project.server();
    load(&mut server);
    server.evaluate("(defun app::half () :session)");
    load_with(&mut server, json!({"system": "user", "directory": "."}));
    project.write("user.lisp", "(defun user () 2)\n");
    load_with(&mut server, json!({"system": "user", "directory": "."}));
    let state = "(list (app::half) (user))";
    assert_eq!(server.evaluate(state), "=> (:SESSION 2)");
    let text = evaluate_after_image_loss(&mut server, state);
    assert!(text.ends_with("=> (:SESSION 2)"), "{text}");
}

// ---- Changes on disk

#[test]
fn an_edit_within_the_second_of_the_fasl_is_loaded() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(100)), ("b", MACRO_USER)]);
    let mut server = project.server();
    assert_eq!(load(&mut server), "Loaded app: 3 files, 3 compiled");
    for value in 101..106 {
        project.write("a.lisp", &macro_file(value));
        // Files that depend on the changed file are compiled again, too.
        assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
        assert_eq!(server.evaluate("(list (app::expanded) (app::used))"), format!("=> ({value} {value})"));
        assert_up_to_date(&mut server);
    }
    // An image that did not make the fasl notices the edit as well.
    project.write("a.lisp", &macro_file(200));
    let mut other = project.server();
    assert_eq!(load(&mut other), "Loaded app: 3 files, 2 compiled");
    assert_eq!(other.evaluate("(app::used)"), "=> 200");
    assert_up_to_date(&mut other);
    // The other image's fasl is newer than the one that this image loaded.
    let text = load(&mut server);
    assert!(text.starts_with("Loaded app: 2 files"), "{text}");
    assert_eq!(server.evaluate("(app::used)"), "=> 200");
    assert_up_to_date(&mut server);
}

#[test]
fn a_source_as_new_as_its_fasl_is_compiled() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", MACRO_USER)]);
    load(&mut project.server());
    let fasl = project.fasl("a").metadata().unwrap().modified().unwrap();
    let tick = Duration::from_nanos(1);
    for (value, date) in [(2, fasl), (3, fasl + tick)] {
        project.write("a.lisp", &macro_file(value));
        project.set_date("a.lisp", date);
        File::options().append(true).open(project.fasl("a")).unwrap().set_modified(fasl).unwrap();
        let mut server = project.server();
        assert_eq!(load(&mut server), "Loaded app: 3 files, 2 compiled");
        assert_eq!(server.evaluate("(app::used)"), format!("=> {value}"));
    }
    // A source that is older by one tick is not compiled.
    project.set_date("a.lisp", project.fasl("a").metadata().unwrap().modified().unwrap() - tick);
    assert_eq!(load(&mut project.server()), "Loaded app: 3 files");
}

#[test]
fn unchanged_files_are_neither_compiled_nor_loaded() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", MACRO_USER)]);
    let mut server = project.server();
    load(&mut server);
    for _ in 0..3 {
        assert_up_to_date(&mut server);
        assert_eq!(load(&mut project.server()), "Loaded app: 3 files");
    }
    // A source from a machine whose clock is ahead is compiled once.
    project.set_date("a.lisp", SystemTime::now() + Duration::from_secs(3600));
    assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
    assert_up_to_date(&mut server);
    assert_eq!(load(&mut project.server()), "Loaded app: 3 files");
    // An edit of that file is loaded, although its date is earlier.
    project.write("a.lisp", &macro_file(2));
    assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
    assert_eq!(server.evaluate("(app::used)"), "=> 2");
    // A file that was touched counts as changed.
    project.set_date("b.lisp", SystemTime::now());
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    assert_up_to_date(&mut server);
}

#[test]
fn a_changed_file_with_an_older_date_is_loaded() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", MACRO_USER)]);
    load(&mut project.server());
    // An image that compiled nothing still records what it loaded.
    let mut server = project.server();
    assert_eq!(load(&mut server), "Loaded app: 3 files");
    let hour = Duration::from_secs(3600);
    for (value, hours) in [(2, 5), (3, 4), (4, 6)] {
        project.write("a.lisp", &macro_file(value));
        project.set_date("a.lisp", SystemTime::now() - hours * hour);
        assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
        assert_eq!(server.evaluate("(app::used)"), format!("=> {value}"));
        assert_up_to_date(&mut server);
    }
    // A file of another size with the same date.
    let date = project.date("b.lisp");
    project.write("b.lisp", "(in-package :app)\n(defun used () (* 10 (value)))\n");
    project.set_date("b.lisp", date);
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    assert_eq!(server.evaluate("(app::used)"), "=> 40");
}

#[test]
fn a_changed_file_with_equal_date_and_size_is_loaded() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", MACRO_USER)]);
    let mut server = project.server();
    load(&mut server);
    let date = project.date("a.lisp");
    // The file is written in place, then replaced by another file.
    for (value, file) in [(2, "a.lisp"), (3, "a.new")] {
        project.write(file, &macro_file(value));
        project.set_date(file, date);
        std::fs::rename(project.path(file), project.path("a.lisp")).expect("the directory is ours");
        assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
        assert_eq!(server.evaluate("(list (app::expanded) (app::used))"), format!("=> ({value} {value})"));
        assert_up_to_date(&mut server);
    }
    // After a restore the files count as unchanged.
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "loaded"}));
    call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "loaded"}));
    assert_up_to_date(&mut server);
    let date = project.date("b.lisp");
    project.write("b.lisp", &MACRO_USER.replace("used", "uses"));
    project.set_date("b.lisp", date);
    load(&mut server);
    assert_eq!(server.evaluate("(app::uses)"), "=> 3");
    assert_up_to_date(&mut server);
}

#[test]
fn systems_that_depend_on_a_changed_system_are_compiled() {
    let project = Project::of(&[("package", PACKAGE), ("b", MACRO_USER)]);
    project.write("base.asd", "(defsystem \"base\" :components ((:file \"base\")))");
    project.write(
        "app.asd",
        "(defsystem \"app\" :depends-on (\"base\") :components ((:file \"b\") (:file \"alone\")))
         (defsystem \"app/tests\" :depends-on (\"app\") :components ((:file \"tests\"))
           :perform (test-op (o c) (symbol-call :app :check)))",
    );
    project.write("alone.lisp", "(defun cl-user::alone () 1)");
    let base = |value| project.write("base.lisp", &format!("{PACKAGE}\n{}", macro_file(value)));
    base(1);
    project.write("tests.lisp", "(in-package :app)\n(defun check () (unless (eql 2 (used)) (error \"~a\" (used))))");
    let mut server = project.server();
    assert_eq!(load(&mut server), "Loaded app: 3 files, 3 compiled\nWith base");
    let tests = json!({"system": "app/tests", "directory": ".", "reload": true});
    let text = call_ok(&mut server, "run-tests", tests.clone());
    assert!(text.starts_with("FAILED  0 passed"), "{text}");
    base(2);
    let text = call_ok(&mut server, "run-tests", tests.clone());
    assert!(text.starts_with("=> all pass  1 passed"), "{text}");
    base(3);
    let text = call_ok(&mut server, "run-tests", tests);
    assert!(text.starts_with("FAILED  0 passed"), "{text}");
    let run = |directory: &Project| {
        directory.command(&["test", "--reload", "app/tests"]).output().expect("the command starts").status.success()
    };
    assert!(!run(&project));
    base(2);
    assert!(run(&project));
}

#[test]
fn changed_data_files_and_asd_files_are_noticed() {
    let project = Project::of(&[]);
    let system = |components: &str| {
        project.write("app.asd", &format!("(defsystem \"app\" :serial t :components ({components}))"));
    };
    let parts = "(:file \"package\") (:static-file \"value.txt\") (:module \"more\" :components ((:file \"a\")))";
    system(parts);
    project.write("package.lisp", PACKAGE);
    project.write("value.txt", "11");
    project.write(
        "more/a.lisp",
        "(in-package :app)\n(defun included () #.(with-open-file (in (asdf:system-relative-pathname \"app\" \"value.txt\"))
                                                   (read in)))",
    );
    let mut server = project.server();
    assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
    project.write("value.txt", "12");
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    assert_eq!(server.evaluate("(app::included)"), "=> 12");
    project.write("value.txt", "13");
    project.set_date("value.txt", SystemTime::now() - Duration::from_secs(3600));
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    assert_eq!(server.evaluate("(app::included)"), "=> 13");
    assert_up_to_date(&mut server);
    // The same rule applies to the .asd file.
    project.write("new.lisp", "(in-package :app)\n(defun new () :new)");
    for (components, date) in [
        (format!("{parts} (:file \"new\")"), SystemTime::now()),
        (format!("{parts} (:file \"newer\")"), SystemTime::now() - Duration::from_secs(3600)),
    ] {
        project.write("newer.lisp", "(in-package :app)\n(defun newer () :newer)");
        system(&components);
        project.set_date("app.asd", date);
        let text = load_with(&mut server, json!({"system": "app"}));
        assert!(text.contains("Loaded app: "), "{text}");
        assert!(load_with(&mut server, json!({"system": "app"})).contains("up to date"));
    }
    assert_eq!(server.evaluate("(list (app::new) (app::newer))"), "=> (:NEW :NEWER)");
}

#[test]
fn load_after_a_failed_load_compiles_all_files_affected_by_the_change() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", ""), ("c", MACRO_USER)]);
    // C does not depend on the failing file B, but must still be compiled with the new macro.
    project.write(
        "app.asd",
        "(defsystem \"app\" :components ((:file \"package\") (:file \"a\" :depends-on (\"package\"))
           (:file \"b\" :depends-on (\"a\")) (:file \"c\" :depends-on (\"a\"))))",
    );
    let mut server = project.server();
    load(&mut server);
    for (value, broken) in [(2, "(in-package :app)\n(defun f (x)"), (3, "(in-package :app)\n(error \"at load\")")] {
        project.write("a.lisp", &macro_file(value));
        project.write("b.lisp", broken);
        for _ in 0..2 {
            call_err(&mut server, "load-system", json!({"system": "app"}));
        }
        project.write("b.lisp", "(in-package :app)");
        load(&mut server);
        assert_eq!(server.evaluate("(app::used)"), format!("=> {value}"));
        assert_up_to_date(&mut server);
    }
    // A truncated fasl is compiled again, and its source is recorded.
    let fasl = project.fasl("c");
    let octets = std::fs::read(&fasl).unwrap();
    std::fs::write(&fasl, &octets[..octets.len() / 2]).unwrap();
    let mut server = project.server();
    assert_eq!(load(&mut server), "Loaded app: 4 files, 1 compiled");
    assert_up_to_date(&mut server);
    project.write("c.lisp", "(in-package :app)\n(defun used () :again)");
    assert_eq!(load(&mut server), "Loaded app: 1 file, 1 compiled");
    assert_eq!(server.evaluate("(app::used)"), "=> :AGAIN");
}

#[test]
fn edits_of_files_loaded_by_an_init_file_or_an_evaluation_are_noticed() {
    let project = Project::of(&[("package", PACKAGE), ("a", &macro_file(1)), ("b", MACRO_USER)]);
    let form = format!("(progn (asdf:load-asd #p{:?}) (asdf:load-system \"app\"))", project.path("app.asd"));
    project.root.write("home/.sbclrc", &form);
    let mut server = project.server_with(&["--user-init"]);
    assert_eq!(server.evaluate("(app::used)"), "=> 1");
    assert_up_to_date(&mut server);
    project.write("a.lisp", &macro_file(2));
    assert_eq!(load(&mut server), "Loaded app: 2 files, 2 compiled");
    assert_eq!(server.evaluate("(app::used)"), "=> 2");
    // ASDF itself notices the edit, too.
    project.write("a.lisp", &macro_file(3));
    server.evaluate("(asdf:load-system \"app\")");
    assert_eq!(server.evaluate("(app::used)"), "=> 3");
    assert_up_to_date(&mut server);
}

#[test]
fn source_text_is_not_shown_for_code_compiled_from_another_version() {
    let project = Project::of(&[("package", PACKAGE), ("a", "")]);
    let write = |value: &str| {
        project.write("a.lisp", &format!("(in-package :app)\n(defun pick (x)\n  (list x {value}))\n"));
    };
    let mut server = project.server();
    let described =
        |server: &mut Server| call_ok(server, "describe-symbol", json!({"name": "app::pick", "source": true}));
    for (value, next) in [("1", "#\\a"), ("2", "'b"), ("3", "\"c\"")] {
        write(value);
        load(&mut server);
        let text = described(&mut server);
        assert!(text.contains(&format!("(list x {value})")) && text.contains("a.lisp:2"), "{text}");
        write(next);
        let text = described(&mut server);
        assert!(!text.contains(next) && text.contains("a.lisp (file has changed)"), "{text}");
        load(&mut server);
        let text = described(&mut server);
        assert!(text.contains(&format!("(list x {next})")), "{text}");
    }
}

// ---- Definitions that the new version lacks

/// Each kind of definition: the form, and its name in the notice after its removal.
const KINDS: &[(&str, &str)] = &[
    ("(defun plain () 1)", "function PLAIN"),
    ("(defun (setf plain-place) (value) value)", "function (SETF PLAIN-PLACE)"),
    ("(declaim (inline inlined))\n(defun inlined () 1)", "function INLINED"),
    ("(setf (fdefinition 'aliased) #'car)", "function ALIASED"),
    ("(defmacro a-macro () 1)", "macro A-MACRO"),
    ("(define-compiler-macro plain-two () 2)\n(defun plain-two () 2)", "compiler macro PLAIN-TWO, function PLAIN-TWO"),
    ("(define-symbol-macro symbol-macro 1)", "symbol macro SYMBOL-MACRO"),
    ("(defsetf place-one place-two)", "setf expander PLACE-ONE"),
    ("(define-setf-expander place-three () (values '() '() '() nil nil))", "setf expander PLACE-THREE"),
    ("(defvar *variable* 1)", "variable *VARIABLE*"),
    ("(defparameter *parameter* 1)", "variable *PARAMETER*"),
    ("(sb-ext:defglobal **global** 1)", "variable **GLOBAL**"),
    ("(defconstant +constant+ 1)", "constant +CONSTANT+"),
    ("(deftype a-type () 'integer)", "type A-TYPE"),
    ("(defpackage :another (:use :cl))", "package \"ANOTHER\""),
    ("(defgeneric generic (x) (:method ((x integer)) 1))", "function GENERIC, method GENERIC (INTEGER)"),
    (
        "(defmethod implicit ((x integer)) 1)\n(defmethod implicit :around ((x t)) 2)",
        "method IMPLICIT (INTEGER), method IMPLICIT :AROUND (T)",
    ),
    ("(defmethod (setf implicit) (value (x integer)) value)", "method (SETF IMPLICIT) (T INTEGER)"),
    (
        "(defclass shape () ((edges :reader edges :initarg :edges) (color :accessor color) (size :writer set-size)))",
        "class SHAPE",
    ),
    (
        "(define-condition trouble (error) ((code :reader trouble-code :initarg :code) (note :accessor trouble-note)))",
        "class TROUBLE",
    ),
    ("(defstruct point (x 0) (y 0 :read-only t))", "class POINT"),
    (
        "(defstruct (circle (:include point) (:conc-name c-) (:constructor circle (r)) (:copier nil)
                            (:predicate round-p)) r)",
        "class CIRCLE",
    ),
    (
        "(defstruct (listed (:type list)) one two)",
        "function (SETF LISTED-ONE), function (SETF LISTED-TWO), function COPY-LISTED, function LISTED-ONE, function LISTED-TWO, \
         function MAKE-LISTED",
    ),
    ("(defmethod print-object ((x hash-table) stream) (call-next-method))", "method PRINT-OBJECT (HASH-TABLE T)"),
    ("(define-method-combination combined :operator +)", "method combination COMBINED"),
];

fn all_kinds() -> String {
    KINDS.iter().fold("(in-package :app)\n".to_owned(), |text, (form, _)| text + form + "\n")
}

/// Returns the sorted names in the notice of a load.
fn names_in_notice(text: &str) -> Vec<String> {
    let Some((_, names)) = text.split_once(" no longer contains: ") else {
        assert!(!text.contains("[notice]"), "{text}");
        return Vec::new();
    };
    let names = names.split(".\n").next().unwrap_or_default();
    let mut names: Vec<_> = names.split(", ").map(|name| name.replace("APP::", "")).collect();
    names.sort();
    names
}

#[test]
fn reload_of_a_file_that_still_defines_everything_gives_no_notice() {
    let project = Project::of(&[("package", PACKAGE), ("a", &all_kinds())]);
    let mut server = project.server();
    load(&mut server);
    for number in 0..3 {
        // The image compiles the file, or loads the fasl that another image made.
        project.write("a.lisp", &format!("{};; {number}\n", all_kinds()));
        if number == 1 {
            load(&mut project.server());
        }
        let text = load(&mut server);
        assert!(text.starts_with("Loaded app: 1 file"), "{text}");
    }
    // Files loaded without ASDF.
    for _ in 0..2 {
        let text = load_with(&mut server, json!({"path": "a.lisp"}));
        assert_eq!(names_in_notice(&text), [""; 0], "{text}");
    }
}

#[test]
fn reload_names_each_definition_removed_from_a_file() {
    let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)")]);
    let mut server = project.server();
    load(&mut server);
    for (form, expected) in KINDS {
        project.write("a.lisp", &format!("(in-package :app)\n(defun kept () 1)\n{form}\n"));
        load(&mut server);
        project.write("a.lisp", &format!("(in-package :app)\n(defun kept () 1)\n{form}\n;; The same.\n"));
        let text = load(&mut server);
        assert_eq!(names_in_notice(&text), [""; 0], "{form}: {text}");
        project.write("a.lisp", "(in-package :app)\n(defun kept () 1)\n");
        let text = load(&mut server);
        let expected: Vec<_> = expected.split(", ").filter(|name| !name.is_empty()).collect();
        assert_eq!(names_in_notice(&text), expected, "{form}: {text}");
        let text = load(&mut server);
        assert!(text.contains("up to date"), "told once: {text}");
    }
}

#[test]
fn definitions_of_a_failed_load_are_compared_with_the_versions_before_and_after() {
    let failing = "(in-package :app)\n(defun kept () 1)\n(defvar *early* 1)\n(defstruct point x)\n(error \"at load\")\n\
                   (defun late () 1)\n";
    let project = Project::of(&[("package", PACKAGE), ("a", failing)]);
    let mut server = project.server();
    for arguments in [json!({"system": "app", "directory": "."}), json!({"path": "a.lisp"})] {
        project.write("a.lisp", failing);
        let text = call_err(&mut server, "load-system", arguments.clone());
        let stays = "In a.lisp:5, in (ERROR \"at load\").\n\
                     Definitions that a.lisp made before the error remain: function KEPT, variable *EARLY*, class POINT.\n";
        assert!(text.contains(stays), "{text}");
        project.write("a.lisp", "(in-package :app)\n(defun kept () 2)\n(defun late () 1)\n");
        let text = load_with(&mut server, arguments.clone());
        assert_eq!(names_in_notice(&text), ["class POINT", "variable *EARLY*"], "{text}");
        // Definitions after the point of failure are still compared with.
        project.write("a.lisp", "(in-package :app)\n(defun early () 2)\n(error \"at load\")\n");
        call_err(&mut server, "load-system", arguments.clone());
        project.write("a.lisp", "(in-package :app)\n(defun kept () 3)\n");
        let text = load_with(&mut server, arguments);
        assert_eq!(names_in_notice(&text), ["function EARLY", "function LATE"], "{text}");
        server.evaluate("(mapc #'fmakunbound '(app::early app::late))");
    }
}

#[test]
fn a_failed_load_names_what_remains_from_old_versions_of_the_files_it_loaded() {
    let before = "(in-package :app)\n(defvar *v* 1)\n(defun gone () 1)\n";
    let project = Project::of(&[("package", PACKAGE), ("a", before), ("b", "(in-package :app)")]);
    for (tool, arguments) in [
        ("load-system", json!({"system": "app", "directory": "."})),
        ("run-tests", json!({"system": "app", "directory": ".", "reload": true})),
    ] {
        project.write("a.lisp", before);
        project.write("b.lisp", "(in-package :app)\n");
        let mut server = project.server();
        load(&mut server);
        project.write("a.lisp", "(in-package :app)\n(defvar *v* 2)\n");
        project.write("b.lisp", "(in-package :app)\n(error \"at load\")\n");
        let text = call_err(&mut server, tool, arguments);
        assert!(text.contains("APP::*V* keeps its value: ") && text.contains("at load"), "{text}");
        assert_eq!(names_in_notice(&text), ["function GONE"], "{text}");
        project.write("b.lisp", "(in-package :app)\n");
        let text = load(&mut server);
        assert!(text.starts_with("Loaded app: "), "reported twice: {text}");
    }
}

#[test]
fn a_file_that_fails_names_the_variables_before_the_error_that_keep_old_values() {
    let project = Project::new();
    let file = |value: u8, error: &str| {
        project.write(
            "f.lisp",
            &format!("(defvar *early* {value})\n{error}\n(defvar *late* {value})\n(defun late () 1)\n"),
        );
    };
    let arguments = json!({"path": "f.lisp"});
    let kept = |text: &str| ["*EARLY*", "*LATE*"].map(|name| text.contains(&format!("{name} keeps its value: ")));
    for on_error in ["abort", "debug"] {
        let mut server = project.server();
        file(1, "");
        load_with(&mut server, arguments.clone());
        file(2, "(error \"at load\")");
        let failed = call_err(&mut server, "load-system", json!({"path": "f.lisp", "on-error": on_error}));
        // If the load is held, it unwinds when the next evaluation begins.
        let text = if on_error == "abort" { failed } else { server.evaluate("(list *early* *late*)") };
        assert_eq!(kept(&text), [true, false], "{on_error}: {text}");
        assert!(!text.contains("no longer contains"), "{on_error}: {text}");
        file(2, "");
        let text = load_with(&mut server, arguments.clone());
        assert_eq!(kept(&text), [false, true], "{on_error}: {text}");
        assert!(!text.contains("no longer contains"), "{on_error}: {text}");
    }
}

#[test]
fn a_variable_proclaimed_special_instead_of_defined_is_not_named() {
    let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)")]);
    let mut server = project.server();
    load(&mut server);
    for proclamation in ["(declaim (special *proclaimed*))", "(proclaim '(special *other* *proclaimed*))"] {
        project.write("a.lisp", "(in-package :app)\n(defvar *proclaimed* 1)\n(defvar *gone* 1)\n");
        load(&mut server);
        project.write("a.lisp", &format!("(in-package :app)\n{proclamation}\n(setf *proclaimed* 1)\n"));
        let text = load(&mut server);
        assert_eq!(names_in_notice(&text), ["variable *GONE*"], "{proclamation}: {text}");
        // A proclamation defines nothing, so its removal is not named.
        project.write("a.lisp", "(in-package :app)\n");
        let text = load(&mut server);
        assert_eq!(names_in_notice(&text), [""; 0], "{proclamation}: {text}");
    }
}

#[test]
fn definitions_evaluated_since_the_load_are_not_named() {
    let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)")]);
    let mut server = project.server();
    load(&mut server);
    let forms = "(defun typed () 1)\n(defun file () 1)\n(defmacro typed-macro () 1)\n(defstruct typed-point x)\n\
                 (defstruct file-point x)\n";
    project.write("a.lisp", &format!("(in-package :app)\n{forms}"));
    load(&mut server);
    let typed = "(in-package :app) (defun typed () 2) (defmacro typed-macro () 2) (defstruct typed-point x)";
    server.call_tool("evaluate-lisp", json!({"code": typed, "on-error": "abort"}));
    project.write("a.lisp", "(in-package :app)\n");
    let text = load(&mut server);
    assert_eq!(names_in_notice(&text), ["class FILE-POINT", "function FILE"], "{text}");
    // The file defines all of them again, after the evaluation.
    project.write("a.lisp", &format!("(in-package :app)\n{forms}"));
    load(&mut server);
    project.write("a.lisp", "(in-package :app)\n");
    let text = load(&mut server);
    let all = ["class FILE-POINT", "class TYPED-POINT", "function FILE", "function TYPED", "macro TYPED-MACRO"];
    assert_eq!(names_in_notice(&text), all, "{text}");
}

#[test]
fn definitions_removed_from_an_included_file_are_named() {
    let project = Project::new();
    let mut server = project.server();
    let include = "(load (merge-pathnames \"included.lisp\" *load-truename*))\n";
    project.write("included.lisp", "(defun both () 1)\n(defun included () 1)\n");
    project.write("main.lisp", &format!("{include}(defun both () 2)\n"));
    load_with(&mut server, json!({"path": "main.lisp"}));
    // The included file is not loaded again, so its definitions are not named.
    project.write("included.lisp", "(defun other () 1)\n");
    project.write("main.lisp", "(defun another () 1)\n");
    let text = load_with(&mut server, json!({"path": "main.lisp"}));
    assert!(text.contains("main.lisp no longer contains"), "{text}");
    assert_eq!(names_in_notice(&text), ["function BOTH"], "{text}");
    let text = load_with(&mut server, json!({"path": "included.lisp"}));
    assert!(text.contains("included.lisp no longer contains"), "{text}");
    assert_eq!(names_in_notice(&text), ["function INCLUDED"], "{text}");
}

#[test]
fn parts_removed_from_a_definition_are_named_and_replaced_ones_are_not() {
    let project = Project::of(&[("package", PACKAGE), ("a", "(in-package :app)")]);
    let mut server = project.server();
    load(&mut server);
    for (before, after, expected) in [
        (
            "(defclass shape () ((edges :reader edges) (color :accessor color)))",
            "(defclass shape () ((edges :reader edges) (color)))",
            "function (SETF COLOR), function COLOR",
        ),
        // A method replaces the slot's reader.
        (
            "(defclass shape2 () ((edges :reader edges2)))",
            "(defclass shape2 () ((edges)))\n(defmethod edges2 ((shape shape2)) 1)",
            "",
        ),
        ("(defclass shape3 () ((edges :reader edges3)))", "(defclass shape3 () ())\n(defun edges3 (x) x)", ""),
        (
            "(defgeneric edges4 (shape))\n(defclass shape4 () ())\n(defmethod edges4 ((shape shape4)) 1)",
            "(defclass shape4 () ((edges :reader edges4)))",
            "",
        ),
        (
            "(define-condition trouble (error) ((code :reader trouble-code) (note :reader trouble-note)))",
            "(define-condition trouble (error) ((code :reader trouble-code) (note)))",
            "function TROUBLE-NOTE",
        ),
        (
            "(defstruct point x y)",
            "(defstruct (point (:constructor new-point) (:copier nil) (:predicate nil)) x y)",
            "function COPY-POINT, function MAKE-POINT, function POINT-P",
        ),
        ("(defun turned () 1)", "(defmacro turned () 1)", ""),
        ("(defmacro turned2 () 1)", "(defun turned2 () 1)", ""),
        ("(defvar *turned3* 1)", "(defparameter *turned3* 1)", ""),
        ("(defun turned4 () 1)", "(fmakunbound 'turned4)\n(defgeneric turned4 ())", ""),
        ("(defmethod both ((x integer)) 1)", "(defmethod both ((x string)) 1)", "method BOTH (INTEGER)"),
        ("(defgeneric both2 (x))\n(defmethod both2 ((x integer)) 1)", "(defmethod both2 ((x integer)) 1)", ""),
        ("(defun later () 1)", "(unless (fboundp 'later) (defun later () 1))", ""),
        // Definitions made only if there is none yet, by a macro or directly.
        (
            "(defmacro define-once (name) `(unless (boundp ',name) (defconstant ,name 1)))\n(define-once +once+)",
            "(defmacro define-once (name) `(unless (boundp ',name) (defconstant ,name 1)))\n(define-once +once+) ",
            "",
        ),
        (
            "(unless (find-class 'once nil) (defclass once () ((a :reader once-a))))",
            "(unless (find-class 'once nil) (defclass once () ((a :reader once-a)))) ",
            "",
        ),
        (
            "(unless (fboundp 'commented) (defun commented () 1))",
            "; (unless (fboundp 'commented) (defun commented () 1))",
            "function COMMENTED",
        ),
        ("(defun left-out () 1)", "#+(or) (defun left-out () 1)", "function LEFT-OUT"),
        (
            "(eval-when (:load-toplevel) (defun nested () 1))",
            "(eval-when (:load-toplevel) (defun nested2 () 1))",
            "function NESTED",
        ),
        // A macro generates the function's name.
        (
            "(defmacro number-it () `(defun ,(gentemp \"NUMBERED-\") () 1))\n(number-it)",
            "(defmacro number-it () `(defun ,(gentemp \"NUMBERED-\") () 1))\n(number-it) ",
            "",
        ),
        ("(defun number-1 () 1)", "(defun number-2 () 1)", "function NUMBER-1"),
    ] {
        project.write("a.lisp", &format!("(in-package :app)\n{before}\n"));
        load(&mut server);
        project.write("a.lisp", &format!("(in-package :app)\n{after}\n"));
        let text = load(&mut server);
        let expected: Vec<_> = expected.split(", ").filter(|name| !name.is_empty()).collect();
        assert_eq!(names_in_notice(&text), expected, "{before} → {after}: {text}");
    }
}

/// Libraries with many kinds of definitions: classes, conditions and structures; conditional constants; functions whose
/// names macros generate.
const LIBRARIES: [&str; 6] = ["alexandria", "chipz", "esrap", "fiveam", "iterate", "puri"];

#[test]
fn reload_of_unchanged_libraries_gives_no_notice() {
    let project = Project::new();
    let sources = project.root.directory("work/libraries");
    let libraries: Vec<_> = LIBRARIES.into_iter().filter(|library| installed(library)).collect();
    // FiveAM's dependencies are copied as well.
    for directory in libraries.iter().copied().chain(["asdf-flv", "trivial-backtrace"]) {
        let copied = Command::new("cp").arg("-r").arg(Path::new(INSTALLED).join(directory)).arg(&sources).status();
        assert!(copied.expect("cp starts").success() || !libraries.contains(&"fiveam"), "{directory} can be copied");
    }
    let registry =
        format!("(:source-registry (:tree {:?}) :ignore-inherited-configuration)", sources.display().to_string());
    let mut server = Server::start_command(project.command(&[]).env("CL_SOURCE_REGISTRY", registry));
    server.initialize("2025-11-25");
    for again in [false, true] {
        for library in &libraries {
            let text = call_ok(&mut server, "load-system", json!({"system": library, "timeout": 600}));
            assert!(text.contains(" compiled, ") && !text.contains("[notice]"), "{again}: {text}");
        }
        add_comments(&sources);
    }
}

/// Appends a comment to every Lisp file in a directory.
fn add_comments(directory: &Path) {
    for path in std::fs::read_dir(directory).expect("a directory").flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            add_comments(&path);
        } else if path.extension().is_some_and(|extension| extension == "lisp") {
            let mut text = std::fs::read(&path).expect("the file can be read");
            text.extend(b"\n;; The same.\n");
            std::fs::write(&path, text).expect("the file is ours");
        }
    }
}
