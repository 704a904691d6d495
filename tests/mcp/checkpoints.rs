//! Checkpoints: saving the image while the session continues, and restoring it.

#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::{Scratch, Server, call_err, call_ok, evaluate_err};
use crate::processes::{
    NO_FORK, NO_SIGXFSZ, children, is_alive, kill_worker, limit_file_size, signal, wait_until, worker,
};
use crate::server_mode::{Mode, both_modes};
use proptest::prelude::*;
use rstest_reuse::apply;
use serde_json::json;

/// A state directory for servers of one mode.
struct StateDirectory {
    mode: Mode,
    directory: Scratch,
}

impl StateDirectory {
    fn new(mode: Mode) -> Self {
        Self { mode, directory: Scratch::new() }
    }

    fn serve(&self, arguments: &[&str]) -> Server {
        let mut server = self.mode.start_with_environment(arguments, &[("XDG_STATE_HOME", &self.directory)]);
        server.initialize("2025-11-25");
        server
    }

    /// Returns the checkpoint directory of the only server.
    fn checkpoints(&self) -> PathBuf {
        let mut found = std::fs::read_dir(self.directory.join("sbcl-mcp")).unwrap();
        found.next().expect("a directory").unwrap().path()
    }

    /// Returns the files in the checkpoint directory except its lock, optionally only those with an extension.
    fn files(&self, extension: Option<&str>) -> Vec<PathBuf> {
        let all = std::fs::read_dir(self.checkpoints()).unwrap().map(|entry| entry.unwrap().path());
        let all = all.filter(|path| !path.ends_with("lock"));
        all.filter(|path| extension.is_none_or(|name| path.extension().is_some_and(|found| found == name))).collect()
    }
}

fn save(server: &mut Server, name: &str) -> String {
    call_ok(server, "checkpoint", json!({"action": "save", "name": name}))
}

fn restore(server: &mut Server, name: &str) -> String {
    call_ok(server, "checkpoint", json!({"action": "restore", "name": name}))
}

fn list(server: &mut Server) -> String {
    call_ok(server, "checkpoint", json!({}))
}

#[test]
fn restore_brings_back_definitions_objects_and_variables() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    assert_eq!(list(&mut server), "No checkpoints.");
    server.evaluate(
        "(defpackage :app (:use :cl) (:nicknames :ap) (:local-nicknames (:x :sb-ext))) (in-package :app)
         (defvar *count* 1) (setf *count* 41)
         (defun next () (incf *count*))
         (defclass point () ((x :initarg :x :accessor x)))
         (defvar *point* (make-instance 'point :x 7))
         (defgeneric area (p)) (defmethod area ((p point)) (* 2 (x p)))
         (defvar *eq* (let ((table (make-hash-table :test 'eq))) (setf (gethash *point* table) :found) table))
         (defvar *weak* (let ((table (make-hash-table :weakness :key))) (setf (gethash *point* table) :kept) table))
         (defvar *adder* (let ((n 10)) (lambda () (incf n))))
         (defvar *lock* (sb-thread:make-mutex))
         (defvar *thread* (sb-thread:make-thread (lambda () (sb-thread:with-mutex (*lock*) (sleep 1000))) :name \"holder\"))
         (push :my-feature *features*)
         (setf *print-base* 16)
         (sb-ext:lock-package :app)
         (sb-ext:schedule-timer (sb-ext:make-timer (lambda ())) 1000)
         (funcall *adder*)",
    );
    let text = save(&mut server, "all of it");
    assert!(text.starts_with("Saved \"all of it\" (evaluation 1): "), "{text}");
    assert!(text.ends_with("\nNot included: thread holder, 1 timer, sockets, open files, foreign memory, environment variables and the umask."), "{text}");

    // Changes after the save are not part of the checkpoint.
    assert_eq!(server.evaluate("(prog1 (list (next) (funcall *adder*) *) (setf *print-base* 10))"), "=> (42 12 11)");
    server.evaluate("(sb-ext:unlock-package :app) (defun later () 1) (setf (x *point*) 8) (fmakunbound 'next)");
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(/ 1 0)"}));

    let text = restore(&mut server, "all of it");
    assert!(text.starts_with("Restored \"all of it\" (evaluation 1, "), "{text}");
    let discarded = " ago). Discarded: the 3 evaluations since then.";
    let expected = format!("{discarded}\nNot restored: thread holder, 1 timer.\nCurrent package: APP");
    assert!(text.ends_with(&expected), "{text}");
    let text = server.evaluate("(list * *print-base* *count*)");
    assert_eq!(text, "=> (B 10 29)");
    let text = server.evaluate(
        "(setf *print-base* 10)
         (list (next) (funcall *adder*) (x *point*) (area *point*) (gethash *point* *eq*) (gethash *point* *weak*)
               (fboundp 'later) (sb-ext:package-locked-p :app) (and (find-package :ap) t) x:*evaluator-mode*
               (and (member :my-feature *features*) t)
               (sb-thread:thread-alive-p *thread*) (sb-thread:join-thread *thread* :default :gone)
               (sb-thread:with-mutex (*lock* :timeout 10) :free)
               (length (sb-thread:list-all-threads)) (sb-ext:list-all-timers))",
    );
    let expected = "=> (42 12 7 14 :FOUND :KEPT NIL T T :COMPILE T NIL :GONE :FREE 1 NIL)";
    assert_eq!(text.split_whitespace().collect::<Vec<_>>().join(" "), expected);
    // The last error is cleared as by a reset, but the error history is kept.
    assert!(call_ok(&mut server, "describe-last-error", json!({})).starts_with("No error information"));
    assert!(call_ok(&mut server, "describe-last-error", json!({"list": 20})).contains("DIVISION-BY-ZERO"));
    let definitions = call_ok(&mut server, "list-definitions", json!({}));
    assert!(definitions.contains("- APP::NEXT ()") && !definitions.contains("LATER"), "{definitions}");
    // A report still shows source lines of code that was evaluated before the save.
    let frames = call_err(&mut server, "evaluate-lisp", json!({"code": "(setf *count* :no) (next)"}));
    assert!(frames.contains("1: (NEXT)"), "{frames}");
    let frames = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(frames.contains("at evaluation 1, line 3: (defun next () (incf *count*))"), "{frames}");

    // Only the owner can read the files, and the server removes them when it ends.
    let directory = state.checkpoints();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    let files = state.files(None);
    assert!(files.len() >= 3 && files.iter().all(|file| mode(file) == 0o600), "{files:?}");
    assert!(server.finish().status.success());
    assert!(!directory.exists());
}

#[test]
fn restore_brings_back_shared_objects_readtable_traces_and_policy() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    // Any shared object serves: this one is copied from the server, whose processor may differ from that of the test.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.pid())).unwrap();
    let lent = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libgcc_s"));
    let library = state.directory.join("lent.so");
    std::fs::copy(lent.expect("what unwinds in Rust"), &library).unwrap();
    server.evaluate(&format!(
        "(sb-alien:load-shared-object {library:?})
         (declaim (optimize (safety 3)))
         (sb-alien:define-alien-type small (sb-alien:signed 16))
         (set-pprint-dispatch '(cons (eql shown)) (lambda (stream form) (format stream \"<~a>\" (second form))))
         (defun f (x) x) (trace f)
         (setf *readtable* (copy-readtable))
         (set-macro-character #\\! (lambda (stream char) (declare (ignore stream char)) :bang))"
    ));
    save(&mut server, "one");
    let about = "(list ! (trace) (sb-alien:alien-size small) (write-to-string '(shown 1) :pretty t)
                       (second (assoc 'safety (sb-cltl2:declaration-information 'optimize)))
                       (loop for object in sb-alien::*shared-objects*
                             count (search \"lent.so\" (sb-alien::shared-object-namestring object))))";
    let program = "(list sb-ext:*runtime-pathname* sb-ext:*core-pathname* sb-ext:*posix-argv*)";
    let before = server.evaluate(program);
    let random = "(random (expt 10 60))";
    let mut numbers = vec![server.evaluate(random)];
    for _ in 0..2 {
        restore(&mut server, "one");
        assert_eq!(server.evaluate(about), "=> (:BANG (F) 16 \"<1>\" 3 1)");
        assert_eq!(server.evaluate(program), before);
        numbers.push(server.evaluate(random));
        assert!(server.evaluate("(f 1)").contains("(F 1)"));
    }
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), 3);
    // A restore without the library reports it as missing and restores everything else.
    std::fs::remove_file(&library).unwrap();
    let text = restore(&mut server, "one");
    assert!(text.contains("The shared object ") && text.contains("/lent.so could not be loaded again"), "{text}");
    assert_eq!(server.evaluate(about), "=> (:BANG (F) 16 \"<1>\" 3 0)");
}

#[test]
fn restore_brings_back_directories_and_the_collection_interval() {
    let state = StateDirectory::new(Mode::Supervised);
    let directory = state.directory.directory("here").canonicalize().unwrap();
    let (directory, gone) = (directory.to_str().unwrap(), state.directory.directory("gone").canonicalize().unwrap());
    let about = "(list (sb-posix:getcwd) (namestring *default-pathname-defaults*) (sb-ext:bytes-consed-between-gcs))";
    let mut server = state.serve(&[]);
    // Settings that the session has not changed are those of the process after a restore.
    let untouched = server.evaluate(about);
    save(&mut server, "untouched");
    server.evaluate(&format!("(sb-posix:chdir {directory:?}) (setf *default-pathname-defaults* #p\"{directory}/\")"));
    server.evaluate("(setf (sb-ext:bytes-consed-between-gcs) 12345678)");
    let changed = format!("=> ({directory:?} \"{directory}/\" 12345678)");
    let values = |text: String| text[text.find("=> ").unwrap()..].split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(values(server.evaluate(about)), changed);
    save(&mut server, "changed");
    restore(&mut server, "untouched");
    assert_eq!(server.evaluate(about), untouched);
    restore(&mut server, "changed");
    assert_eq!(values(server.evaluate(about)), changed);
    // A checkpoint of a restored image keeps the settings, too.
    save(&mut server, "again");
    kill_worker(&server);
    let text = server.evaluate(about);
    assert!(text.contains("Restored: the checkpoint \"again\""), "{text}");
    assert_eq!(values(text), changed);

    server.evaluate(&format!("(sb-posix:chdir {:?})", gone.to_str().unwrap()));
    save(&mut server, "in a directory that goes");
    std::fs::remove_dir(&gone).unwrap();
    let text = restore(&mut server, "in a directory that goes");
    let notice = format!(
        "The working directory {} could not be restored (No such file or directory): the working directory is now ",
        gone.display()
    );
    assert!(text.contains(&notice), "{text}");
    let text = server.evaluate("(sb-posix:getcwd)");
    assert_eq!(text, untouched.split_whitespace().nth(1).unwrap().replace('(', "=> "));
}

#[test]
fn lost_image_starts_from_the_last_checkpoint() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1) (setf *x* 2) (defun before () *x*)");
    save(&mut server, "a");
    server.evaluate("(setf *x* 3)");
    save(&mut server, "b");
    server.evaluate("(defun after () (list :after *x*)) (setf *x* 4)");
    let id = server.post_running("(format t \"on its way~%\")", "(sleep 100)", 60.0);
    kill_worker(&server);
    let (text, is_error) = server.outcome(id);
    assert!(is_error);
    assert!(text.contains("Restored: the checkpoint \"b\" from "), "{text}");
    assert!(text.contains(" ago (evaluation 2) and the one defining form since then."), "{text}");
    let lost = "Lost: threads, open files, values assigned to variables since the checkpoint, and other effects";
    assert!(text.contains(lost), "{text}");
    assert_eq!(server.evaluate("(after)"), "=> (:AFTER 3)");

    // After a restore, later checkpoints still exist, but a lost image does not boot from them.
    restore(&mut server, "a");
    kill_worker(&server);
    assert!(server.evaluate("(list *x* (fboundp 'after))").ends_with("=> (2 NIL)"));
    assert_eq!(list(&mut server).lines().count(), 2);
    // After a reset, a lost image boots from no checkpoint until one is restored.
    call_ok(&mut server, "reset-session", json!({}));
    kill_worker(&server);
    assert!(server.evaluate("(boundp '*x*)").ends_with("=> NIL"));
    restore(&mut server, "b");
    assert_eq!(server.evaluate("*x*"), "=> 3");
}

/// Of a form that is evaluated many times, the recovery state keeps only the first and the last occurrence.
#[test]
fn restored_checkpoint_is_replayed_with_the_forms_that_were_repeated_after_its_save() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--restore", "definitions"]);
    let define = |server: &mut Server, value: u32| server.evaluate(&format!("(defun f () {value})"));
    for value in [1, 2, 1] {
        define(&mut server, value);
    }
    save(&mut server, "a");
    for value in [2, 1] {
        define(&mut server, value);
    }
    server.evaluate(&"(declaim (special *x*))\n".repeat(2500));
    restore(&mut server, "a");
    assert_eq!(server.evaluate("(f)"), "=> 1");
    kill_worker(&server);
    let text = server.evaluate("(f)");
    assert!(text.contains("Restored: all 3 defining forms.") && text.ends_with("=> 1"), "{text}");
}

#[test]
fn damaged_checkpoint_falls_back_to_the_previous_and_then_to_replay() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defun f () 1) (defvar *x* 1) (setf *x* 2)");
    save(&mut server, "first");
    server.evaluate("(defun g () 2) (setf *x* 3)");
    save(&mut server, "second");
    let mut cores = state.files(Some("core"));
    cores.sort_by_key(|path| std::fs::metadata(path).unwrap().modified().unwrap());
    damage(&cores[1]);
    kill_worker(&server);
    assert!(server.evaluate("(list (f) (g) *x*)").ends_with("=> (1 2 2)"));
    damage(&cores[0]);
    kill_worker(&server);
    assert!(server.evaluate("(list (f) (g) *x*)").ends_with("=> (1 2 1)"));
}

/// Overwrites the beginning of a core and keeps its length and modification time.
pub(crate) fn damage(core: &Path) {
    let mut bytes = std::fs::read(core).unwrap();
    bytes[..1 << 20].fill(0xff);
    let written = std::fs::metadata(core).unwrap().modified().unwrap();
    std::fs::write(core, bytes).unwrap();
    // The core's checksum is computed again only after a change of its modification time.
    std::fs::File::options().write(true).open(core).unwrap().set_modified(written).unwrap();
}

/// The damage is noticed only when the image boots.
#[test]
fn restore_of_a_checkpoint_that_does_not_boot_loses_no_definitions() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1) (defun f () 1)");
    save(&mut server, "first");
    let core = state.files(Some("core")).remove(0);
    server.evaluate("(defun g () 2) (setf *x* 2)");
    save(&mut server, "second");
    server.evaluate("(defun h () 3)");
    let _ = evaluate_err(&mut server, "(/ 1 0)");
    damage(&core);
    let text = call_err(&mut server, "checkpoint", json!({"action": "restore", "name": "first"}));
    assert!(text.starts_with("The checkpoint \"first\" was not restored: its image could not be started: "), "{text}");
    let continued = " A new image continues the session, and no definition was discarded.\nRestored: the checkpoint \
                     \"second\" from ";
    assert!(text.contains(continued) && text.contains(" and the one defining form since then."), "{text}");
    assert!(call_ok(&mut server, "describe-last-error", json!({})).contains("DIVISION-BY-ZERO"));
    assert_eq!(server.evaluate("(list (f) (g) (h) *x*)"), "=> (1 2 3 2)");
    // The failed restore has discarded no evaluations.
    let text = restore(&mut server, "second");
    assert!(text.contains("Discarded: the 3 evaluations since then."), "{text}");
    assert_eq!(server.evaluate("(list (f) (g) (fboundp 'h) *x*)"), "=> (1 2 NIL 2)");
}

/// Restores the checkpoint `x`, and cancels the call when the restore can no longer be stopped. Returns the call's id.
fn cancel_restore_too_late(state: &StateDirectory, server: &mut Server) -> i64 {
    let [unwinding, cancelled] = ["unwinding", "cancelled"].map(|name| state.directory.join(name));
    // The restore waits until this evaluation has unwound.
    let code = format!(
        "(sleep 60))
           (with-open-file (file {unwinding:?} :direction :output))
           (loop until (probe-file {cancelled:?}) do (sleep 0.01)))"
    );
    let running = server.post_running("(unwind-protect (progn", &code, 60.0);
    let restoring = server.post_call("checkpoint", json!({"action": "restore", "name": "x"}));
    wait_until("the evaluation unwinds", || unwinding.exists());
    server.notify("notifications/cancelled", json!({"requestId": restoring}));
    std::fs::write(&cancelled, "").unwrap();
    assert!(server.outcome(running).1);
    restoring
}

/// The cancelled call gets no answer.
#[test]
fn completion_of_a_cancelled_restore_is_reported_in_the_next_answer() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defun f () 1)");
    save(&mut server, "x");
    server.evaluate("(defun f () 2)");
    let restoring = cancel_restore_too_late(&state, &mut server);
    let text = server.evaluate("(f)");
    let notice = "The checkpoint \"x\" (evaluation 1) was restored: the call was cancelled too late. Discarded: the 2 \
                  evaluations since then.\n";
    assert!(text.contains(notice) && text.ends_with("=> 1") && !server.has_answered(restoring), "{text}");
    assert_eq!(server.evaluate("(f)"), "=> 1");
    // The answer to a restore is not accompanied by the notice.
    assert!(restore(&mut server, "x").starts_with("Restored \"x\""));
    assert_eq!(server.evaluate("(f)"), "=> 1");
}

/// The cancelled call gets no answer.
#[test]
fn failure_of_a_cancelled_restore_is_reported_in_the_next_answer() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defun f () 1)");
    save(&mut server, "x");
    damage(&state.files(Some("core"))[0]);
    let restoring = cancel_restore_too_late(&state, &mut server);
    let text = server.evaluate("(f)");
    assert!(text.contains("The checkpoint \"x\" was not restored: its image could not be started: "), "{text}");
    assert!(text.ends_with("=> 1") && !server.has_answered(restoring), "{text}");
    assert_eq!(server.evaluate("(f)"), "=> 1");
}

#[test]
fn damaged_checkpoint_is_refused_on_restore_and_can_be_deleted() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "one");
    let core = state.files(Some("core")).remove(0);
    let bytes = std::fs::read(&core).unwrap();
    std::fs::write(&core, &bytes[..bytes.len() - 1]).unwrap();
    let text = call_err(&mut server, "checkpoint", json!({"action": "restore", "name": "one"}));
    assert_eq!(
        text,
        "The checkpoint \"one\" is damaged: its file is missing or differs from the saved core. The checkpoint can only \
        be deleted or replaced."
    );
    // A core with its old content and a new modification time is accepted.
    std::fs::write(&core, &bytes).unwrap();
    assert!(
        call_ok(&mut server, "checkpoint", json!({"action": "restore", "name": "one"})).starts_with("Restored \"one\"")
    );
    std::fs::remove_file(&core).unwrap();
    call_ok(&mut server, "checkpoint", json!({"action": "delete", "name": "one"}));
    assert_eq!(state.files(None), Vec::<std::path::PathBuf>::new());
    let text = call_err(&mut server, "checkpoint", json!({"action": "delete", "name": "one"}));
    assert!(text.starts_with("There is no checkpoint \"one\"."), "{text}");
}

#[test]
fn checkpoints_of_another_build_or_heap_size_are_listed_and_refused_on_restore_and_can_be_deleted() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--structured-content"]);
    for (name, key, value, reason) in [
        (
            "old",
            "build",
            json!("0.0.1 2.0.0 x y"),
            "saved by another build of sbcl-mcp (0.0.1, with SBCL 2.0.0), and cannot be restored by this build",
        ),
        ("small", "heap", json!(1 << 30), "saved with another heap size, and can only be restored with --heap 1G"),
    ] {
        save(&mut server, name);
        let manifest = state.files(Some("json")).remove(0);
        let mut checkpoint: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&manifest).unwrap()).unwrap();
        checkpoint[key] = value;
        std::fs::write(manifest, checkpoint.to_string()).unwrap();
        let listed = list(&mut server);
        assert!(listed.starts_with(&format!("{name:?}  evaluation ")), "{listed}");
        assert!(listed.ends_with(&format!("; {reason}")), "{listed}");
        let listed = server.request("tools/call", json!({"name": "checkpoint", "arguments": {"action": "list"}}));
        let foreign = &listed["result"]["structuredContent"]["foreign"];
        assert_eq!((&foreign[0]["name"], &foreign[0]["reason"]), (&json!(name), &json!(reason)), "{listed}");
        let text = call_err(&mut server, "checkpoint", json!({"action": "restore", "name": name}));
        assert_eq!(text, format!("The checkpoint {name:?} was {reason}."));
        call_ok(&mut server, "checkpoint", json!({"action": "delete", "name": name}));
        assert_eq!(list(&mut server), "No checkpoints.");
    }
}

/// A save queries the image on the evaluation thread, and an automatic save may do so at any time.
#[apply(both_modes)]
fn save_is_not_refused_while_another_save_begins(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *large* (loop repeat 300000 collect (list 1 2 3)))");
    let save = |name| json!({"action": "save", "name": name});
    let saves = ["a", "b", "c", "d"].map(|name| server.post_call("checkpoint", save(name)));
    for id in saves {
        let (text, is_error) = server.outcome(id);
        assert!(!is_error, "{text}");
    }
}

#[apply(both_modes)]
fn save_is_refused_for_bad_arguments_and_held_or_running_evaluations(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    for (arguments, reason) in [
        (json!({"action": "save"}), "needs the argument name"),
        (json!({"action": "restore", "name": "x"}), "There is no checkpoint \"x\". Existing checkpoints: none."),
        (json!({"action": "delete", "name": "x"}), "There is no checkpoint \"x\""),
        (json!({"action": "save", "name": "a\nb"}), "no control characters"),
        (json!({"action": "save", "name": "auto-3"}), "is a name for automatic checkpoints"),
        (json!({"action": "forget", "name": "x"}), "list, save, restore, delete"),
    ] {
        let text = call_err(&mut server, "checkpoint", arguments);
        assert!(text.contains(reason), "{text}");
    }
    let _ = call_err(&mut server, "evaluate-lisp", json!({"code": "(/ 1 0)", "on-error": "debug"}));
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(text.starts_with("Nothing was saved: an evaluation is held"), "{text}");
    // The refused save affects neither the held evaluation nor the last error.
    assert!(call_ok(&mut server, "describe-last-error", json!({})).contains("DIVISION-BY-ZERO"));
    call_ok(&mut server, "abort-evaluation", json!({}));
    let id = server.post_running("(format t \"on its way~%\")", "(sleep 1)", 60.0);
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(text.starts_with("Nothing was saved: an evaluation is running"), "{text}");
    assert!(!server.outcome(id).1);
    save(&mut server, "x");
    save(&mut server, "x");
    assert_eq!(list(&mut server).lines().count(), 1);
    assert_eq!(call_ok(&mut server, "checkpoint", json!({"action": "delete", "name": "x"})), "Deleted \"x\".");
    assert_eq!(list(&mut server), "No checkpoints.");
}

#[apply(both_modes)]
fn save_reports_an_unwritable_state_directory(mode: Mode) {
    let state = StateDirectory::new(mode);
    std::fs::write(state.directory.join("file"), "").unwrap();
    let mut server = mode.start_with_environment(&[], &[("XDG_STATE_HOME", &state.directory.join("file"))]);
    server.initialize("2025-11-25");
    server.evaluate("(defvar *x* 5)");
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert!(text.starts_with("The checkpoint directory "), "{text}");
    assert_eq!(server.evaluate("*x*"), "=> 5");
}

#[test]
fn save_hooks_run_in_the_child_and_a_killed_child_only_fails_the_save() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate(
        "(defvar *hooked* nil)
         (push (lambda () (setf *hooked* t) (error \"no\")) sb-ext:*save-hooks*)
         (push (lambda () (print 1) (format *error-output* \"x\")) sb-ext:*save-hooks*)",
    );
    save(&mut server, "hooked");
    assert_eq!(server.evaluate("(list *hooked* (length sb-ext:*save-hooks*))"), "=> (NIL 2)");
    restore(&mut server, "hooked");
    assert_eq!(server.evaluate("(list *hooked* (length sb-ext:*save-hooks*))"), "=> (T 2)");
    server.evaluate("(setf sb-ext:*save-hooks* (list (lambda () (sleep 1000))))");
    let id = server.post_call("checkpoint", json!({"action": "save", "name": "killed"}));
    let lisp = state.mode.lisp_process(&server);
    wait_until("the saving process exists", || !children(lisp).is_empty());
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
    for child in children(lisp) {
        // The child has only the three standard descriptors, none of them the client's.
        let directory = format!("/proc/{child}/fd");
        let open = |number: &str| std::fs::read_link(format!("{directory}/{number}")).unwrap();
        wait_until("other descriptors are closed", || std::fs::read_dir(&directory).unwrap().count() == 3);
        assert_eq!((open("0"), open("1")), ("/dev/null".into(), open("2")));
        signal(child, "-KILL");
    }
    let (text, is_error) = server.outcome(id);
    let reason = "the saving process was killed by signal 9 (SIGKILL: by a user, or by the system for lack of memory)";
    assert!(is_error && text == format!("Nothing was saved: {reason}."), "{text}");
    assert_eq!(list(&mut server).lines().count(), 1);
    // A save hook that exits makes only the save fail.
    server.evaluate("(setf sb-ext:*save-hooks* (list (lambda () (sb-ext:exit :code 0 :abort t))))");
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "left"}));
    assert!(text.starts_with("Nothing was saved: "), "{text}");
    assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
}

/// The copy of the process limits its own time, because no other process may be left to end it.
#[test]
fn save_of_an_image_with_a_timer_ends_after_its_maximum_time() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate(
        "(sb-ext:unlock-package :sbcl-host)
         (setf sbcl-host::**saving-seconds** 1)
         (sb-ext:schedule-timer (sb-ext:make-timer #'list) 1000)
         (push (lambda () (loop)) sb-ext:*save-hooks*)",
    );
    // The message names the server's own limit, for which this client does not wait.
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert_eq!(text, "Nothing was saved: the saving process did not end within 300 seconds.");
    server.evaluate("(setf sbcl-host::**saving-seconds** 300) (pop sb-ext:*save-hooks*)");
    save(&mut server, "x");
}

#[apply(both_modes)]
fn save_is_refused_when_the_saved_image_does_not_boot(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    server.evaluate(
        "(defvar *x* 5)
         (push (lambda ()
                 (sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void sb-alien:int)) 0))
               sb-ext:*init-hooks*)",
    );
    let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
    assert_eq!(text, "Nothing was saved: the saved image does not boot; the server's stderr may say why.");
    assert!(state.files(None).is_empty());
    assert_eq!(server.evaluate("*x*"), "=> 5");
}

/// Evaluates to the state of all parts that must survive a failed save: variable, function, thread, stream, finalizer,
/// timer.
const SESSION_PARTS: &str = "(list *x* (f) (sb-thread:thread-alive-p *thread*) (open-stream-p *stream*)
                               (typep sb-impl::*finalizer-thread* 'sb-thread:thread)
                               (length (sb-ext:list-all-timers)))";

/// Starts a session with all of [`SESSION_PARTS`].
fn session_with_all_parts(state: &StateDirectory) -> Server {
    let mut server = state.serve(&[]);
    server.evaluate(&format!(
        "(defvar *x* 1) (setf *x* 5) (defun f () :f)
         (defvar *thread* (sb-thread:make-thread (lambda () (loop (sleep 1)))))
         (defvar *stream* (open {:?} :direction :output))
         (sb-ext:schedule-timer (sb-ext:make-timer (lambda ())) 1000)",
        state.directory.join("open")
    ));
    assert_eq!(server.evaluate(SESSION_PARTS), "=> (5 :F T T T 1)");
    server
}

#[apply(both_modes)]
fn save_reports_a_failed_fork_and_the_session_is_unchanged(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = session_with_all_parts(&state);
    assert_eq!(server.evaluate(NO_FORK), "=> (0 0)");
    for _ in 0..2 {
        let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "x"}));
        assert_eq!(text, "Nothing was saved: The process cannot be copied: Cannot allocate memory.");
        assert!(state.files(None).is_empty());
        assert_eq!(server.evaluate(SESSION_PARTS), "=> (5 :F T T T 1)");
    }
    assert_eq!(list(&mut server), "No checkpoints.");
}

#[test]
fn full_disk_fails_the_save_and_keeps_the_previous_checkpoint() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = session_with_all_parts(&state);
    save(&mut server, "before");
    let before = state.files(None).len();
    for (code, how) in [("(values)", "was killed by signal 25"), (NO_SIGXFSZ, "exited with status ")] {
        server.evaluate(code);
        limit_file_size(state.mode.lisp_process(&server), Some(1 << 20));
        let text = call_err(&mut server, "checkpoint", json!({"action": "save", "name": "before"}));
        limit_file_size(state.mode.lisp_process(&server), None);
        assert!(text.starts_with("Nothing was saved: the saving process ") && text.contains(how), "{text}");
        assert_eq!(state.files(None).len(), before);
        assert_eq!(server.evaluate(SESSION_PARTS), "=> (5 :F T T T 1)");
    }
    // The previous checkpoint is unchanged.
    server.evaluate("(setf *x* 6)");
    restore(&mut server, "before");
    assert_eq!(server.evaluate("(list *x* (f))"), "=> (5 :F)");
    save(&mut server, "before");
    wait_until("the replaced core is deleted", || state.files(None).len() == before);
}

#[test]
fn worker_killed_during_save_leaves_no_incomplete_checkpoint() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "whole");
    let waits = server.post_call("checkpoint", json!({"action": "save", "name": "torn"}));
    wait_until("the image is being saved", || state.files(Some("core")).len() == 2);
    kill_worker(&server);
    let _ = server.outcome(waits);
    assert!(server.evaluate("*x*").ends_with("=> 1"));
    assert_eq!(state.files(Some("core")).len(), state.files(Some("json")).len());
}

#[test]
fn checkpoint_directory_is_removed_when_the_supervisor_is_killed() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "x");
    let (directory, worker) = (state.checkpoints(), worker(&server));
    signal(server.pid(), "-KILL");
    wait_until("the worker is gone", || !is_alive(worker));
    assert!(!directory.exists());
}

#[apply(both_modes)]
fn checkpoint_directory_of_a_server_whose_processes_were_killed_is_removed_by_the_next_server(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "x");
    let (directory, lisp) = (state.checkpoints(), mode.lisp_process(&server));
    // A running supervisor would replace its worker.
    signal(server.pid(), "-STOP");
    for pid in [lisp, server.pid()] {
        signal(pid, "-KILL");
    }
    wait_until("the processes are gone", || !is_alive(lisp) && !is_alive(server.pid()));
    assert!(directory.exists());
    let _next = state.serve(&[]);
    wait_until("the directory is removed", || !directory.exists());
}

/// The garbage collector must find no holes in the allocation regions of other threads.
#[test]
fn save_works_while_threads_allocate_lisp_objects() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate(
        "(defvar *stop* nil)
         (defvar *kept* (make-array 10 :initial-element nil))
         (dotimes (i 10)
           (let ((i i))
             (sb-thread:make-thread
              (lambda ()
                (loop until *stop*
                      do (setf (aref *kept* i)
                               (loop for n below 200
                                     collect (make-array (random 50) :initial-element (list n (format nil \"~a\" n)))))))
              :name \"allocates\")))",
    );
    for round in 0..3 {
        save(&mut server, &format!("round {round}"));
        server.evaluate("(sb-ext:gc)");
    }
    restore(&mut server, "round 1");
    let text = server.evaluate(
        "(sb-ext:gc :full t)
         (list (every #'listp *kept*)
               (loop for list across *kept*
                     always (loop for array in list
                                  always (every (lambda (x) (equal (second x) (format nil \"~a\" (first x)))) array)))
               (length (sb-thread:list-all-threads)))",
    );
    assert_eq!(text, "=> (T T 1)");
}

/// A thread stopped inside malloc(3) holds one of its locks.
#[test]
fn save_works_while_threads_are_in_malloc() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate(
        "(defvar *stop* nil)
         (dotimes (i 4)
           (sb-thread:make-thread
            (lambda ()
              (loop until *stop* do (sb-alien:free-alien (sb-alien:make-alien sb-alien:int 3000))))
            :name \"allocates\"))",
    );
    for round in 0..3 {
        save(&mut server, &format!("round {round}"));
    }
    restore(&mut server, "round 2");
    assert_eq!(server.evaluate("*stop*"), "=> NIL");
}

#[test]
fn pending_signals_do_not_kill_the_restored_image() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(require :sb-posix)");
    save(&mut server, "quiet");
    for sent in [
        "(sb-posix:kill (sb-posix:getpid) sb-posix:sigusr1)",
        // A timer keeps running across execve(2).
        "(sb-alien:alien-funcall
           (sb-alien:extern-alien \"setitimer\" (function sb-alien:int sb-alien:int sb-sys:system-area-pointer
                                                          sb-alien:unsigned-long))
           0 (sb-sys:vector-sap times) 0)",
        // Writing to a pipe without a reader sends SIGPIPE.
        "(ignore-errors (sb-posix:write (second pipe) (sb-sys:vector-sap times) 1))",
    ] {
        for round in 0..6 {
            let microseconds = 6000 + 1500 * round;
            server.evaluate(&format!(
                "(dotimes (i 3)
                   (let ((pipe (multiple-value-list (sb-posix:pipe)))
                         ;; Seconds and microseconds, twice.
                         (times (coerce #(0 0 0 {microseconds}) '(vector (signed-byte 64)))))
                     (sb-posix:close (first pipe))
                     (sb-thread:make-thread
                      (lambda () (sb-sys:with-pinned-objects (times) (loop {sent}))))))"
            ));
            restore(&mut server, "quiet");
            assert_eq!(server.evaluate("(length (sb-thread:list-all-threads))"), "=> 1");
        }
    }
}

/// The resources that a server uses: memory in kilobytes, threads and descriptors of each of its processes, and disk
/// space in bytes.
#[derive(Debug, PartialEq)]
struct ResourceUse {
    memory: Vec<u64>,
    threads: Vec<usize>,
    descriptors: Vec<usize>,
    disk: u64,
}

impl ResourceUse {
    fn by(server: &Server, state: &StateDirectory) -> Self {
        let pids = [server.pid(), worker(server)];
        let count = |pid: &u32, what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        let memory = |pid: &u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let files = std::fs::read_dir(state.checkpoints()).unwrap();
        Self {
            memory: pids.iter().map(memory).collect(),
            threads: pids.iter().map(|pid| count(pid, "task")).collect(),
            descriptors: pids.iter().map(|pid| count(pid, "fd")).collect(),
            disk: files.map(|file| file.unwrap().metadata().unwrap().len()).sum(),
        }
    }
}

/// Returns true if Debian's packages of these systems are installed, and prints the missing one otherwise.
fn are_installed(systems: &[&str]) -> bool {
    let missing = systems.iter().find(|system| !Path::new(&format!("/usr/share/common-lisp/source/{system}")).exists());
    if let Some(missing) = missing {
        eprintln!("skipped: {missing} is not installed");
    }
    missing.is_none()
}

fn load(server: &mut Server, system: &str) {
    let text = call_ok(server, "load-system", json!({"system": system, "timeout": 1800}));
    assert!(text.starts_with("Loaded ") || text.contains(" is up to date: "), "{text}");
}

/// Restores a checkpoint, kills the worker and checks that the next image boots from that checkpoint.
fn restore_and_lose(server: &mut Server, name: &str) {
    restore(server, name);
    kill_worker(server);
    let text = server.evaluate("(+ 1 2)");
    assert!(text.ends_with("=> 3") && text.contains(&format!("Restored: the checkpoint {name:?} from ")), "{text}");
}

#[test]
fn loaded_libraries_and_run_tests_work_after_a_restore() {
    if !are_installed(&["alexandria", "rt"]) {
        return;
    }
    let state = StateDirectory::new(Mode::Supervised);
    // In a shared cache, fasls that another server compiles meanwhile would be newer than the loaded ones.
    let cache = state.directory.join("cache");
    let mut server =
        Server::start_with_environment(&[], &[("XDG_STATE_HOME", &state.directory), ("XDG_CACHE_HOME", &cache)]);
    server.initialize("2025-11-25");
    load(&mut server, "alexandria-tests");
    save(&mut server, "loaded");
    restore_and_lose(&mut server, "loaded");
    assert_eq!(server.evaluate("(alexandria:flatten '(1 (2)))"), "=> (1 2)");
    let text = call_ok(&mut server, "load-system", json!({"system": "alexandria-tests"}));
    assert!(text.starts_with("alexandria-tests is up to date: "), "{text}");
    let text = call_ok(&mut server, "run-tests", json!({"system": "alexandria", "timeout": 600}));
    assert!(text.lines().next().unwrap().contains(" passed"), "{text}");
    assert!(!text.contains("is up to date") && !text.contains(" compiled"), "{text}");
}

/// The libraries' tests are loaded before the checkpoint, except those of Hunchentoot, which Debian does not package.
#[test]
#[ignore = "minutes, most of them in Ironclad's tests: make checkpoint-model"]
fn large_libraries_and_run_tests_work_after_a_restore() {
    if !are_installed(&["cl-ppcre", "ironclad", "hunchentoot"]) {
        return;
    }
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    for system in ["cl-ppcre/test", "ironclad/tests", "hunchentoot"] {
        load(&mut server, system);
    }
    server.evaluate(
        "(hunchentoot:define-easy-handler (hello :uri \"/hello\") (name) (format nil \"hello ~a\" name))
         (defvar *acceptor* (make-instance 'hunchentoot:easy-acceptor :address \"127.0.0.1\" :port 0
                              :access-log-destination nil :message-log-destination nil))
         (defun fetch (path)
           (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
             (sb-bsd-sockets:socket-connect socket #(127 0 0 1) (hunchentoot:acceptor-port *acceptor*))
             (with-open-stream (stream (sb-bsd-sockets:socket-make-stream socket :input t :output t))
               (format stream \"GET ~a HTTP/1.0~c~c~c~c\" path #\\return #\\newline #\\return #\\newline)
               (finish-output stream)
               (loop for line = (read-line stream nil) while line finally (return last) for last = line))))
         (defun digest (text)
           (ironclad:byte-array-to-hex-string
            (ironclad:digest-sequence :sha256 (ironclad:ascii-string-to-byte-array text))))",
    );
    let used = |server: &mut Server| {
        let text = server.evaluate(
            "(hunchentoot:start *acceptor*) (prog1 (fetch \"/hello?name=you\") (hunchentoot:stop *acceptor*))",
        );
        assert!(text.ends_with("=> \"hello you\""), "{text}");
        let digest = "=> \"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"";
        assert_eq!(server.evaluate("(digest \"abc\")"), digest);
        let code = "(cl-ppcre:regex-replace-all \"(a+)(b)\" \"xaabyab\" \"\\\\2\\\\1\")";
        assert_eq!(server.evaluate(code), "=> \"xbaayba\"\n=> T");
    };
    // The saved image contains a web server that was started and stopped, and its handlers.
    used(&mut server);
    let saved = save(&mut server, "loaded");
    assert!(!saved.contains("thread"), "{saved}");
    restore_and_lose(&mut server, "loaded");
    used(&mut server);
    for system in ["cl-ppcre", "ironclad"] {
        let begin = Instant::now();
        let text = call_ok(&mut server, "run-tests", json!({"system": system, "timeout": 3000}));
        println!("{system}: {} in {:?}", text.lines().next().unwrap(), begin.elapsed());
        assert!(text.lines().next().unwrap().contains(" passed"), "{text}");
        assert!(!text.contains(" compiled"), "{text}");
    }
    used(&mut server);
}

/// A core that was changed is read before it is restored, which takes a while.
#[test]
fn cancelled_restore_leaves_the_image_and_its_values() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "x");
    server.evaluate("(setf *x* 2)");
    for _ in 0..3 {
        let core = std::fs::File::options().write(true).open(&state.files(Some("core"))[0]).unwrap();
        core.set_modified(std::time::SystemTime::now()).unwrap();
        let id = server.post_call("checkpoint", json!({"action": "restore", "name": "x"}));
        server.notify("notifications/cancelled", json!({"requestId": id}));
        assert_eq!(server.evaluate("*x*"), "=> 2");
    }
    restore(&mut server, "x");
    assert_eq!(server.evaluate("*x*"), "=> 1");
}

#[test]
fn calls_queued_behind_a_restore_run_in_the_restored_image() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "x");
    for _ in 0..5 {
        server.evaluate("(setf *x* 2)");
        let restoring = server.post_call("checkpoint", json!({"action": "restore", "name": "x"}));
        let behind = server.post_call("evaluate-lisp", json!({"code": "(list *x* (setf *x* 3))"}));
        let last = server.post_call("evaluate-lisp", json!({"code": "*x*"}));
        let (text, is_error) = server.outcome(restoring);
        assert!(!is_error, "{text}");
        assert_eq!(server.outcome(behind), ("=> (1 3)".to_owned(), false));
        assert_eq!(server.outcome(last), ("=> 3".to_owned(), false));
    }
}

/// The calls wait until the next image has replayed a definition, and then for the restore.
#[test]
fn calls_queued_behind_a_restore_after_a_loss_run_in_the_restored_image() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    let gate = state.directory.join("gate");
    std::fs::write(&gate, "").unwrap();
    save(&mut server, "x");
    server.evaluate(&format!("(progn (loop until (probe-file {gate:?}) do (sleep 0.01)) (defun f () 2))"));
    std::fs::remove_file(&gate).unwrap();
    kill_worker(&server);
    let restoring = server.post_call("checkpoint", json!({"action": "restore", "name": "x"}));
    let behind = server.post_call("evaluate-lisp", json!({"code": "(fboundp 'f)"}));
    // The ping is answered after both calls have been read.
    server.request("ping", json!({}));
    std::fs::write(&gate, "").unwrap();
    let (text, is_error) = server.outcome(restoring);
    assert!(!is_error && text.contains("Restored \"x\""), "{text}");
    let (text, is_error) = server.outcome(behind);
    assert!(!is_error && text.ends_with("=> NIL"), "{text}");
}

#[test]
fn restores_that_are_requested_at_once_name_the_package_or_leave_it_out() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defpackage :app (:use :cl)) (in-package :app)");
    save(&mut server, "x");
    for _ in 0..5 {
        let restores = [(); 3].map(|()| server.post_call("checkpoint", json!({"action": "restore", "name": "x"})));
        let texts = restores.map(|id| server.outcome(id).0);
        assert!(texts[2].ends_with("\nCurrent package: APP"), "{texts:?}");
        let mut names = texts.iter().filter_map(|text| text.split_once("Current package: "));
        assert!(names.all(|(_, name)| name == "APP"), "{texts:?}");
    }
}

/// `length` is the length to which the core is truncated; `None` to delete all files of the checkpoint.
#[rstest::rstest]
#[case::deleted(None)]
#[case::truncated(Some(4096))]
fn restore_of_a_checkpoint_that_is_deleted_or_truncated_meanwhile_loses_no_definitions(#[case] length: Option<u64>) {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defun f () 1)");
    save(&mut server, "x");
    server.evaluate("(defun g () 2)");
    let core = state.files(Some("core")).remove(0);
    let [unwinding, changed] = ["unwinding", "changed"].map(|name| state.directory.join(name));
    // The restore waits until this evaluation has unwound.
    let code = format!(
        "(sleep 60))
           (with-open-file (file {unwinding:?} :direction :output))
           (loop until (probe-file {changed:?}) do (sleep 0.01)))"
    );
    let running = server.post_running("(unwind-protect (progn", &code, 60.0);
    let restoring = server.post_call("checkpoint", json!({"action": "restore", "name": "x"}));
    wait_until("the evaluation unwinds", || unwinding.exists());
    match length {
        Some(length) => std::fs::File::options().write(true).open(&core).unwrap().set_len(length).unwrap(),
        // The draft of a description may have got its name meanwhile.
        None => state.files(None).iter().for_each(|file| drop(std::fs::remove_file(file))),
    }
    std::fs::write(&changed, "").unwrap();
    assert!(server.outcome(running).1);
    let (text, is_error) = server.outcome(restoring);
    assert!(is_error && text.starts_with("The checkpoint \"x\" was not restored: its "), "{text}");
    let continued =
        ". A new image continues the session, and no definition was discarded.\nRestored: all 2 defining forms.";
    assert!(text.contains(continued), "{text}");
    let text = server.evaluate("(list (f) (g))");
    assert!(text.ends_with("=> (1 2)"), "{text}");
}

fn restore_repeatedly(times: u32) {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *n* 0) (defun up () (incf *n*))");
    save(&mut server, "zero");
    restore(&mut server, "zero");
    let before = ResourceUse::by(&server, &state);
    for _ in 0..times {
        assert_eq!(server.evaluate("(up)"), "=> 1");
        restore(&mut server, "zero");
    }
    let mut after = ResourceUse::by(&server, &state);
    println!("before: {before:?}\nafter {times} restores: {after:?}");
    // A thread of the new image may be about to end.
    let no_more = |after: &[usize], before: &[usize]| after.iter().zip(before).all(|(after, before)| after <= before);
    wait_until("there are no more threads, descriptors and files than before", || {
        after = ResourceUse::by(&server, &state);
        no_more(&after.threads, &before.threads)
            && no_more(&after.descriptors, &before.descriptors)
            && after.disk == before.disk
    });
    for (after, before) in after.memory.iter().zip(&before.memory) {
        assert!(*after < before + before / 4 + 4096, "{after} KB after {before} KB");
    }
    save(&mut server, "of one that was restored");
    restore(&mut server, "of one that was restored");
    assert_eq!(server.evaluate("(list (up) (up))"), "=> (1 2)");
    assert_eq!(children(server.pid()).len(), 1);
}

#[test]
fn eight_restores_leak_no_threads_descriptors_memory_or_files() {
    restore_repeatedly(8);
}

#[test]
#[ignore = "minutes; a shorter one runs every time"]
fn two_hundred_restores_leak_no_threads_descriptors_memory_or_files() {
    restore_repeatedly(200);
}

#[test]
fn read_only_and_no_network_servers_can_save_and_restore() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--read-only", "--no-network"]);
    server.evaluate("(defvar *x* 1)");
    save(&mut server, "x");
    server.evaluate("(setf *x* 2)");
    restore(&mut server, "x");
    assert_eq!(server.evaluate("*x*"), "=> 1");
}

/// Posts a save, a call of `evaluate-lisp` with `arguments`, and another save. A thread keeps the first save from forking until
/// all calls are queued. Returns the outcomes of the evaluation and of the second save.
fn save_after_queued_evaluation(
    state: &StateDirectory,
    server: &mut Server,
    arguments: serde_json::Value,
) -> [(String, bool); 2] {
    let gate = state.directory.join("fork");
    server.evaluate(&format!(
        "(defvar *spins* nil)
         (sb-thread:make-thread
          (lambda () (sb-sys:without-interrupts (setf *spins* t) (loop until (probe-file {gate:?})))))
         (loop until *spins*)"
    ));
    let [first, second] = ["first", "second"].map(|name| json!({"action": "save", "name": name}));
    let first = server.post_call("checkpoint", first);
    let evaluation = server.post_call("evaluate-lisp", arguments);
    let second = server.post_call("checkpoint", second);
    // A call is answered after all earlier calls are queued.
    list(server);
    std::fs::write(&gate, "").unwrap();
    let (text, is_error) = server.outcome(first);
    assert!(!is_error, "{text}");
    [evaluation, second].map(|id| server.outcome(id))
}

/// A save keeps evaluations from beginning while it waits until the process can be copied.
#[apply(both_modes)]
fn cancelling_a_save_that_cannot_copy_the_process_lets_evaluations_begin(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    let copying = state.directory.join("copying");
    server.evaluate(&format!(
        "(sb-ext:unlock-package :sbcl-host)
         (setf sbcl-host::**session-fork-wait-seconds** 120)
         (defvar *spins* nil)
         (defvar *stop* nil)
         (sb-thread:make-thread
          (lambda ()
            (sb-sys:without-interrupts
              (setf *spins* t)
              ;; A save stops the finalizer thread before it copies the process.
              (loop until (null sb-impl::*finalizer-thread*))
              (with-open-file (file {copying:?} :direction :output))
              (loop until *stop*))))
         (loop until *spins*)"
    ));
    let id = server.post_call("checkpoint", json!({"action": "save", "name": "x"}));
    wait_until("the save copies the process", || copying.exists());
    let begin = Instant::now();
    server.notify("notifications/cancelled", json!({"requestId": id}));
    assert_eq!(server.evaluate("*spins*"), "=> T");
    // Without the cancellation, the save would wait for two minutes.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    assert_eq!(list(&mut server), "No checkpoints.");
    assert!(state.files(Some("core")).is_empty());
    server.evaluate("(setf *stop* t)");
    save(&mut server, "x");
    assert_eq!(list(&mut server).lines().count(), 1);
}

/// The save is cancelled while the image is being written, and while the saved image is being booted as a test.
#[apply(both_modes)]
fn cancelled_save_is_discarded_and_keeps_the_checkpoint_of_the_same_name(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    let lisp = mode.lisp_process(&server);
    save(&mut server, "x");
    let files = || {
        let mut files = state.files(None);
        files.sort();
        files
    };
    let before = files();
    for (hooks, directory) in [("sb-ext:*save-hooks*", "saving"), ("sb-ext:*init-hooks*", "booting")] {
        let directory = state.directory.directory(directory);
        let [begun, gate] = ["begun", "gate"].map(|name| directory.join(name));
        server.evaluate(&format!(
            "(push (lambda ()
                     (with-open-file (file {begun:?} :direction :output))
                     (loop until (probe-file {gate:?}) do (sleep 0.01)))
                   {hooks})"
        ));
        let id = server.post_call("checkpoint", json!({"action": "save", "name": "x"}));
        wait_until("the hook runs", || begun.exists());
        server.notify("notifications/cancelled", json!({"requestId": id}));
        // This call is answered after the cancellation.
        assert_eq!(server.evaluate(&format!("(null (pop {hooks}))")), "=> NIL");
        std::fs::write(&gate, "").unwrap();
        wait_until("the processes of the save have ended", || children(lisp).is_empty());
        wait_until("the files of the save are deleted", || files() == before);
        assert_eq!(server.evaluate("(+ 1 2)"), "=> 3");
        assert!(!server.has_answered(id));
    }
    save(&mut server, "x");
}

/// Listing many files takes time between the completion of the checkpoint and the answer, so the cancellation usually
/// precedes the answer.
#[test]
fn completion_of_a_save_that_is_cancelled_too_late_is_reported_in_a_later_answer() {
    let state = StateDirectory::new(Mode::Plain);
    let mut server = state.serve(&[]);
    save(&mut server, "first");
    for number in 0..1900 {
        std::fs::write(state.checkpoints().join(format!("{number:016x}.json")), "").unwrap();
    }
    let id = server.post_call("checkpoint", json!({"action": "save", "name": "x"}));
    wait_until("the checkpoint is complete", || state.files(Some("json")).len() == 1902);
    server.notify("notifications/cancelled", json!({"requestId": id}));
    let notice = "The checkpoint \"x\" (evaluation 0) was saved: the call was cancelled too late.";
    wait_until("the save is reported", || server.evaluate("1").contains(notice) || server.has_answered(id));
    assert!(list(&mut server).contains("\"x\""));
}

#[apply(both_modes)]
fn save_is_refused_when_an_evaluation_queued_before_it_runs_in_the_background(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    let gate = state.directory.join("evaluation");
    let code = format!("(loop until (probe-file {gate:?}) do (sleep 0.01))");
    let [evaluation, save_again] =
        save_after_queued_evaluation(&state, &mut server, json!({"code": code, "wait": 0.1}));
    assert!(evaluation.0.contains("continues in the background"), "{}", evaluation.0);
    assert!(save_again.0.starts_with("Nothing was saved: an evaluation is running"), "{}", save_again.0);
    assert!(save_again.1);
    std::fs::write(&gate, "").unwrap();
    assert_eq!(call_ok(&mut server, "check-evaluation", json!({"wait": 25})), "=> NIL");
    save(&mut server, "second");
}

#[apply(both_modes)]
fn save_is_refused_and_keeps_the_hold_when_an_evaluation_queued_before_it_is_held(mode: Mode) {
    let state = StateDirectory::new(mode);
    let mut server = state.serve(&[]);
    let arguments = json!({"code": "(/ 1 0)", "on-error": "debug"});
    let [evaluation, save_again] = save_after_queued_evaluation(&state, &mut server, arguments);
    assert!(evaluation.1, "{}", evaluation.0);
    assert!(save_again.0.starts_with("Nothing was saved: an evaluation is held"), "{}", save_again.0);
    assert!(save_again.1);
    call_ok(&mut server, "abort-evaluation", json!({}));
    save(&mut server, "second");
}

#[test]
fn automatic_checkpoint_restores_assigned_values_after_a_crash() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--checkpoints", "auto"]);
    server.evaluate("(defvar *x* 1)");
    server.evaluate("(setf *x* 2)");
    // If the second evaluation was late, there may also be a checkpoint of evaluation 1.
    wait_until("a checkpoint is there", || list(&mut server).contains("evaluation 2, "));
    kill_worker(&server);
    let answer = server.evaluate("*x*");
    assert!(answer.ends_with("=> 2"), "{answer}");
    call_ok(&mut server, "reset-session", json!({}));
    assert_eq!(list(&mut server), "No checkpoints.");
}

#[test]
fn automatic_checkpoint_waits_for_background_evaluations() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--checkpoints", "auto"]);
    let gate = state.directory.join("gate");
    let code = format!("(loop until (probe-file {gate:?}) do (sleep 0.01))");
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
    server.evaluate("(defvar *x* 1)");
    // The test is about this time, after which an idle server would save.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(list(&mut server), "No checkpoints.");
    std::fs::write(&gate, "").unwrap();
    wait_until("a checkpoint is there", || list(&mut server).contains("evaluation 2, "));
}

#[test]
fn automatic_checkpoint_waits_until_the_session_is_idle() {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&["--checkpoints", "auto"]);
    // The idle time between two evaluations is at most the time from before the first one to after the second.
    let mut last = Instant::now();
    let (begin, mut longest) = (last, Duration::ZERO);
    while begin.elapsed() < Duration::from_secs(4) {
        let now = Instant::now();
        server.evaluate("(loop for i below 100000 sum (isqrt i))");
        longest = longest.max(last.elapsed());
        last = now;
    }
    // After two seconds without an evaluation the server may have saved.
    if longest < Duration::from_secs(2) {
        assert_eq!(list(&mut server), "No checkpoints.");
    }
    wait_until("a checkpoint is there", || list(&mut server).contains("\"auto-1\""));
}

/// A step that a test applies to a session and to the model of it.
#[derive(Debug, Clone)]
enum Step {
    Define(usize, i64),
    /// Defines a class with this number of slots and an instance that is kept when the class is redefined.
    Classify(usize, i64),
    Assign(usize, i64),
    Save(usize),
    Restore(usize),
    Kill,
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3_usize, 0..100_i64).prop_map(|(name, value)| Step::Define(name, value)),
        2 => (0..3_usize, 0..4_i64).prop_map(|(name, slots)| Step::Classify(name, slots)),
        4 => (0..3_usize, 0..100_i64).prop_map(|(name, value)| Step::Assign(name, value)),
        2 => (0..2_usize).prop_map(Step::Save),
        2 => (0..2_usize).prop_map(Step::Restore),
        1 => Just(Step::Kill),
        1 => Just(Step::Reset),
    ]
}

/// The definitions of an image: the functions' values, the classes' slot counts, and the variables' values.
#[derive(Debug, Clone, Default, PartialEq)]
struct Definitions {
    functions: [Option<i64>; 3],
    classes: [Option<i64>; 3],
    values: [Option<i64>; 3],
}

/// The expected session: the image's definitions, the checkpoints, and the definitions that a lost image would restore.
#[derive(Debug, Default)]
struct Model {
    world: Definitions,
    saved: [Option<Definitions>; 2],
    /// The last restorable checkpoint, if there is one, plus the definitions since.
    base: Definitions,
}

fn shown(values: &[Option<i64>; 3]) -> String {
    let shown: Vec<_> = values.iter().map(|value| value.map_or("NIL".to_owned(), |value| value.to_string())).collect();
    format!("({})", shown.join(" "))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("SBCL_MCP_CHECKPOINT_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3),
        max_shrink_iters: 20,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_saves_restores_crashes_and_resets_agree_with_the_model(
        steps in prop::collection::vec(step(), 1..12),
    ) {
        let state = StateDirectory::new(Mode::Supervised);
        let mut server = state.serve(&[]);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Define(name, value) => {
                    server.evaluate(&format!("(defun f{name} () {value})"));
                    model.world.functions[name] = Some(value);
                    model.base.functions[name] = Some(value);
                }
                Step::Classify(name, slots) => {
                    let names: Vec<_> = (0..slots).map(|slot| format!("s{slot}")).collect();
                    let names = names.join(" ");
                    server.evaluate(&format!(
                        "(progn (defclass c{name} () ({names})) (defvar i{name} (make-instance 'c{name})))"
                    ));
                    model.world.classes[name] = Some(slots);
                    model.base.classes[name] = Some(slots);
                }
                Step::Assign(name, value) => {
                    server.evaluate(&format!("(setf (symbol-value 'v{name}) {value})"));
                    model.world.values[name] = Some(value);
                }
                Step::Save(name) => {
                    save(&mut server, &format!("c{name}"));
                    model.saved[name] = Some(model.world.clone());
                    model.base = model.world.clone();
                }
                Step::Restore(name) => {
                    if let Some(world) = model.saved[name].clone() {
                        restore(&mut server, &format!("c{name}"));
                        model.base = world.clone();
                        model.world = world;
                    }
                }
                // Only a supervised server survives this.
                Step::Kill => {
                    kill_worker(&server);
                    model.world = model.base.clone();
                }
                Step::Reset => {
                    call_ok(&mut server, "reset-session", json!({}));
                    model.world = Definitions::default();
                    model.base = Definitions::default();
                }
            }
            let text = server.evaluate(
                "(values (loop for f in '(f0 f1 f2) collect (and (fboundp f) (funcall f)))
                         (loop for (c i) in '((c0 i0) (c1 i1) (c2 i2))
                               collect (and (find-class c nil) (typep (symbol-value i) c)
                                            (loop for s in '(s0 s1 s2 s3)
                                                  count (slot-exists-p (symbol-value i) s))))
                         (loop for v in '(v0 v1 v2) collect (and (boundp v) (symbol-value v))))",
            );
            let Definitions { functions, classes, values } = &model.world;
            let expected = format!("=> {}\n=> {}\n=> {}", shown(functions), shown(classes), shown(values));
            prop_assert!(text.ends_with(&expected), "{text}\n{expected}");
        }
    }
}

#[rstest::rstest]
#[case::reset(false)]
#[case::loss(true)]
fn save_that_ends_with_its_image_is_not_reported_as_an_evaluation(#[case] is_lost: bool) {
    let state = StateDirectory::new(Mode::Supervised);
    let mut server = state.serve(&[]);
    server.evaluate("(defvar *begun* nil)");
    server.evaluate("(defmacro saving () (if (equal sbcl-host::**checkpoint-name** \"kept\") :saves :waits))");
    // The save waits for the finalizer.
    server.evaluate(
        "(dotimes (i 100) (sb-ext:finalize (list i) (lambda () (setf *begun* t) (loop)) :dont-save t)) (gc :full t) \
         (loop until *begun*)",
    );
    let save = server.post_call("checkpoint", json!({"action": "save", "name": "kept"}));
    wait_until("the save begins", || {
        call_ok(&mut server, "macroexpand", json!({"form": "(saving)"})).contains(":SAVES")
    });
    if is_lost {
        kill_worker(&server);
        let (text, is_error) = server.outcome(save);
        assert!(is_error && text.contains("IMAGE-LOST") && !text.contains("unfinished evaluation"), "{text}");
        let hint = "If this call was to save or delete a checkpoint, it may have done so: list the checkpoints.";
        assert!(text.contains(hint), "{text}");
        let text = call_ok(&mut server, "describe-last-error", json!({}));
        assert!(text.contains("No error information available."), "{text}");
    } else {
        let text = call_ok(&mut server, "reset-session", json!({}));
        assert!(!text.contains("evaluation was ended"), "{text}");
        let refusal = "Nothing was saved: the session was reset or restored before the save had begun.";
        assert_eq!(server.outcome(save), (refusal.to_owned(), true));
    }
}
