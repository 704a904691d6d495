//! `--record` writes a session to a file; `replay` plays it back.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::client::{Scratch, Server, binary, short_limit};
use crate::processes::{kill_worker, wait_until};
use crate::server_mode::{Mode, both_modes};
use rstest_reuse::apply;
use serde_json::{Value, json};

/// A recording of the test, which need not exist yet.
struct Recording {
    mode: Mode,
    file: PathBuf,
    _directory: Scratch,
}

impl Recording {
    fn new(mode: Mode, name: &str) -> Self {
        let directory = Scratch::new();
        Self { mode, file: directory.join(name), _directory: directory }
    }

    fn path(&self) -> &str {
        self.file.to_str().unwrap()
    }

    /// Returns the header and the records.
    fn read(&self) -> (Value, Vec<Value>) {
        let text = std::fs::read_to_string(&self.file).unwrap();
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        (lines.next().unwrap(), lines.collect())
    }

    fn replay(&self) -> Output {
        Command::new(binary()).args(["replay", self.path()]).stdin(Stdio::null()).output().unwrap()
    }

    /// Replays the recording, which must find no difference in `answers` answers.
    #[track_caller]
    fn assert_replays(&self, answers: usize) {
        let output = self.replay();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(
            text.starts_with("Recorded 20")
                && text.ends_with(&format!("\nAnswers compared: {answers}; no differences.\n")),
            "{text}"
        );
    }
}

fn recorded(recording: &Recording) -> Server {
    let mut server = recording.mode.start_with(&["--record", recording.path(), "--timeout", "60"]);
    server.initialize("2025-06-18");
    server
}

#[apply(both_modes)]
fn record_writes_every_line_and_replay_compares_every_answer(mode: Mode) {
    let recording = Recording::new(mode, "all");
    let mut server = recorded(&recording);
    server.evaluate("(defun f (x) (/ x 0))");
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": "(f 1) ; ünïcode", "capture-time": true}));
    assert!(is_error, "{text}");
    server.call_tool("describe-last-error", json!({}));
    // Measured times, addresses of new objects and the scratch directory differ each time.
    server.call_tool("evaluate-lisp", json!({"code": "(values (make-hash-table) (lambda ()))", "capture-time": true}));
    server.call_tool("check-evaluation", json!({}));
    // Two concurrent calls, and a line that is no message.
    let (first, second) = (
        server.post_call("evaluate-lisp", json!({"code": "(sleep 0.2) (princ 1)"})),
        server.post_call("evaluate-lisp", json!({"code": "(princ 2)"})),
    );
    insta::allow_duplicates! { insta::assert_snapshot!(server.outcome(second).0, @r"
    [stdout]
    2

    => 2
    "); }
    insta::allow_duplicates! { insta::assert_snapshot!(server.outcome(first).0, @r"
    [stdout]
    1

    => 1
    "); }
    server.send_raw(b"what\xFF\n");
    assert!(server.receive().unwrap()["error"]["message"].as_str().unwrap().contains("not valid UTF-8"));
    server.send(&json!([
        {"jsonrpc": "2.0", "id": 1, "method": "ping"}, {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    ]));
    server.receive().unwrap();
    let end = server.finish();
    assert!(end.status.success());

    let mode = std::fs::metadata(&recording.file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (header, records) = recording.read();
    assert_eq!((&header["sbcl-mcp"], &header["sbcl"]), (&json!(sbcl::VERSION), &json!(sbcl::SBCL_VERSION)));
    assert!(header["arguments"].as_array().unwrap().contains(&json!("--record")));
    let from = |side: &str| {
        let lines = records.iter().filter(move |record| record["from"] == side);
        lines.map(|record| record["line"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let said: Vec<Value> = from("server").iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(said, end.transcript);
    let asked = from("client");
    assert!(asked[1].contains("notifications/initialized") && asked[3].contains("ünïcode"), "{asked:?}");
    assert!(asked.contains(&"what\u{FFFD}".to_owned()));
    let times: Vec<f64> = records.iter().map(|record| record["at"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] >= 0.0);
    recording.assert_replays(10);

    // Differences are shown.
    let text = std::fs::read_to_string(&recording.file).unwrap();
    let changed = text.replace(r#"(princ 2)"#, r#"(princ 3)"#);
    assert_ne!(text, changed);
    std::fs::write(&recording.file, &changed).unwrap();
    let output = recording.replay();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let expected = "evaluate-lisp: the answer differs\n  - 2\n  - \n  - => 2\n  + 3\n  + \n  + => 3\n\
                    Answers compared: 10; 1 difference.\n";
    assert!(text.ends_with(expected), "{text}");

    // A truncated recording is replayed up to its end.
    std::fs::write(&recording.file, &changed[..changed.find("(princ 3)").unwrap()]).unwrap();
    let output = recording.replay();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains(
            " is incomplete or damaged: the replay ends before this line\nAnswers compared: 6; no differences.\n"
        ),
        "{text}"
    );

    // A line that is not a record ends the replay, too, even if it has its end.
    let mut lines: Vec<_> = changed.lines().collect();
    *lines.last_mut().unwrap() = "{}";
    std::fs::write(&recording.file, lines.join("\n") + "\n").unwrap();
    let text = String::from_utf8(recording.replay().stdout).unwrap();
    assert!(text.contains(" is incomplete or damaged: the replay ends before this line\n"), "{text}");
}

#[apply(both_modes)]
fn server_ends_only_after_its_recording_is_complete(mode: Mode) {
    let recording = Recording::new(mode, "large");
    let mut server = recorded(&recording);
    // Characters that are escaped in the message, and again in the recording.
    let code = format!("; {}\n(+ 1 2)", r#""\"#.repeat(2_000_000));
    assert_eq!(server.evaluate(&code), "=> 3");
    assert!(server.finish().status.success());
    let (_, records) = recording.read();
    let [.., request, answer] = &records[..] else { panic!("{} records", records.len()) };
    let [request, answer] = [request, answer].map(|record| {
        let line = record["line"].as_str().expect("a line");
        serde_json::from_str::<Value>(line).expect("JSON")
    });
    assert!(request["params"]["arguments"]["code"] == code, "the request is recorded differently");
    assert_eq!(answer["id"], request["id"]);
}

#[apply(both_modes)]
fn replay_repeats_elicitations_and_cancellations(mode: Mode) {
    let recording = Recording::new(mode, "questions");
    let mut server = mode.start_with(&["--record", recording.path()]);
    let params = json!({
        "protocolVersion": "2025-11-25",
        "capabilities": {"elicitation": {}},
        "clientInfo": {"name": "raw", "version": "1"},
    });
    server.request("initialize", params);
    server.notify("notifications/initialized", json!({}));
    let code = "(restart-case (error \"boo\") (take (x) :report \"Take it\" x))";
    let call = server.post_call("evaluate-lisp", json!({"code": code, "on-error": "ask"}));
    let question = server.receive().unwrap();
    let choice = question["params"]["requestedSchema"]["properties"]["restart"]["enum"][0].clone();
    let result = json!({"action": "accept", "content": {"restart": choice, "values": "42"}});
    server.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": result}));
    assert!(server.outcome(call).0.ends_with("=> 42"));
    // The evaluation must be looping when it is cancelled, in the recording and in the replay: another thread observes
    // the loop and announces it. The replay cancels after the same time, long enough for the loop to begin on a busy
    // machine.
    let marker = server.home().join("loops");
    server.evaluate(
        "(defvar *loops* nil)
         (defun announce (file) (loop until *loops* do (sleep 0.001)) (sleep 2)
           (with-open-file (s file :direction :output :if-exists :supersede)))
         (defun spin (file) (sb-thread:make-thread #'announce :arguments file) (setf *loops* t) (loop))",
    );
    let call = server.post_call("evaluate-lisp", json!({"code": format!("(spin {marker:?})")}));
    wait_until("the evaluation loops", || marker.exists());
    server.notify("notifications/cancelled", json!({"requestId": call}));
    assert!(crate::client::last_error(&mut server).contains("CANCELLED"));
    server.assert_works();
    // The replay writes the same file, so its directory must still exist.
    let end = server.finish();
    recording.assert_replays(5);
    drop(end);
}

#[test]
fn a_lost_image_does_not_end_the_recording() {
    let recording = Recording::new(Mode::Supervised, "lost");
    let mut server = recorded(&recording);
    server.evaluate("(defvar *x* 1)");
    kill_worker(&server);
    assert!(server.evaluate("*x*").ends_with("=> 1"));
    server.finish();
    let (_, records) = recording.read();
    assert!(records.last().unwrap()["line"].as_str().unwrap().contains("=> 1"));
}

/// Without a supervisor, the recording continues after the execve(2) that starts another image.
#[test]
fn restore_reset_and_image_replacement_do_not_end_the_recording() {
    let recording = Recording::new(Mode::Supervised, "another");
    let mut server = recorded(&recording);
    server.evaluate("(defvar *x* 1)");
    server.call_tool("checkpoint", json!({"action": "save", "name": "one"}));
    server.evaluate("(setf *x* 2)");
    assert!(server.call_tool("checkpoint", json!({"action": "restore", "name": "one"})).0.contains("Restored"));
    assert_eq!(server.evaluate("*x*"), "=> 1");
    server.call_tool("reset-session", json!({}));
    assert!(crate::client::evaluate_err(&mut server, "*x*").contains("UNBOUND-VARIABLE"));
    // An evaluation that cannot be interrupted costs the image.
    let code = "(sb-sys:without-interrupts (loop))";
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": code, "timeout": short_limit()}));
    assert!(text.contains("[ERROR] TIMEOUT"), "{text}");
    server.assert_works();
    let end = server.finish();
    let (header, records) = recording.read();
    assert_eq!(header["sbcl-mcp"], sbcl::VERSION);
    let said = records.iter().filter(|record| record["from"] == "server");
    let said: Vec<Value> = said.map(|record| serde_json::from_str(record["line"].as_str().unwrap()).unwrap()).collect();
    assert_eq!(said, end.transcript);
    // Each request is recorded once. A request that was read but not answered before the image was lost is not recorded
    // again.
    let asked = records.iter().filter(|record| record["from"] == "client").count();
    assert_eq!(asked, said.len() + 1, "one of them is a notification");
    let times: Vec<f64> = records.iter().map(|record| record["at"].as_f64().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    recording.assert_replays(said.len());
}

#[apply(both_modes)]
fn record_option_overwrites_only_earlier_recordings(mode: Mode) {
    let recording = Recording::new(mode, "replaced");
    let refused = |path: &str, reason: &str| {
        let mut command = Command::new(binary());
        command.args(["--record", path]).args(mode.options());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with(&format!("sbcl-mcp: cannot record to {path}: ")) && said.contains(reason), "{said}");
    };
    std::fs::write(&recording.file, "(defun precious ())\n").unwrap();
    refused(recording.path(), "it contains something other than a recording; name another file");
    assert_eq!(std::fs::read_to_string(&recording.file).unwrap(), "(defun precious ())\n");
    std::fs::remove_file(&recording.file).unwrap();
    assert!(Command::new("mkfifo").arg(&recording.file).status().unwrap().success());
    refused(recording.path(), "not a regular file");
    std::fs::remove_file(&recording.file).unwrap();
    refused("/dev/full", "not a regular file");
    refused("/nonexistent/file", "No such file");
    // An earlier recording is replaced, and its mode excludes other users.
    for _ in 0..2 {
        let mut server = recorded(&recording);
        server.assert_works();
        server.finish();
        assert_eq!(recording.read().1.len(), 5);
        std::fs::set_permissions(&recording.file, PermissionsExt::from_mode(0o644)).unwrap();
    }
    recording.assert_replays(2);
}

#[apply(both_modes)]
fn replay_of_an_unreadable_recording_exits_with_3(mode: Mode) {
    let recording = Recording::new(mode, "unplayable");
    let run = |path: &Path| {
        let output = Command::new(binary()).arg("replay").arg(path).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, said) = run(&recording.file);
    assert!(status == Some(3) && said.contains("cannot be read: No such file"), "{said}");
    std::fs::write(&recording.file, "{}\n").unwrap();
    let (status, said) = run(&recording.file);
    assert!(status == Some(3) && said.contains("is not a recording made by sbcl-mcp"), "{said}");
    // A server that does not start answers nothing.
    std::fs::remove_file(&recording.file).unwrap();
    let mut server = recorded(&recording);
    server.assert_works();
    server.finish();
    let output = Command::new(binary()).args(["replay", recording.path(), "--", "--heap", "5"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("heap 5 is out of range") || text.contains("the server has ended"), "{text}");
}
