//! The command `serve`, with and without a supervisor, and the worker that a supervisor starts.

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::arguments::{CheckpointTiming, RestoreMode, Serve};
use super::{print_to_stderr, report_failure, sessions, start_logging, version};
use crate::mcp;
use crate::mcp::stdio::Stdio;
use crate::os::poll_set::PollSet;
use crate::os::temporary::ScratchDirectory;
use crate::os::{helper_threads, processes};
use crate::recovery::checkpoint::save::{FORK_WAIT, SavePolicy, UNWINDING_WAIT};
use crate::recovery::checkpoint::store::{
    Checkpoints, remove_abandoned_directories, remove_directory, state_directory,
};
use crate::recovery::event::WorkerEvent;
use crate::recovery::status_page::StatusPage;
use crate::rpc::attach::{self, Listener};
use crate::rpc::descriptors::to_private_number;
use crate::rpc::frame;
use crate::rpc::recorder::{Recorder, RecordingHeader};
use crate::rpc::signals::survive_stray_signals;
use crate::supervisor;

/// Time that a worker has to exit by itself after its supervisor is gone.
pub(super) const EXIT_GRACE_PERIOD: Duration = Duration::from_secs(1);
/// The [`EXIT_GRACE_PERIOD`] of a worker that saves a persistent session: one second longer than the maximum time before the
/// save begins.
const SAVE_GRACE_PERIOD: Duration = UNWINDING_WAIT.saturating_add(FORK_WAIT).saturating_add(Duration::from_secs(1));
/// Maximum time at the end of the server to write the rest of the recording and to delete cores.
const FINAL_WORK_TIME: Duration = Duration::from_secs(1);

impl Serve {
    /// Returns the options of the tools that the server offers.
    fn tool_options(&self) -> mcp::ToolOptions {
        let attachable = self.socket || self.session.as_deref().and_then(OsStr::to_str).is_some_and(can_name_socket);
        mcp::ToolOptions {
            structured: self.structured_content,
            registry: mcp::Registry::fixed(self.tools.clone()),
            attachable,
        }
    }

    /// Starts the recording, if `--record` was given.
    ///
    /// # Errors
    /// Returns a sentence if the file cannot be used.
    fn start_recording(&self) -> Result<Option<Recorder>, String> {
        let Some(path) = &self.record else { return Ok(None) };
        let header = RecordingHeader {
            sbcl_mcp: crate::VERSION.to_owned(),
            sbcl: crate::SBCL_VERSION.to_owned(),
            recorded: jiff::Timestamp::now().to_string(),
            arguments: std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect(),
        };
        Recorder::begin(path, &header).map(Some)
    }

    /// Opens the socket where other clients can attach, if `--socket` was given or the session is persistent. The socket's
    /// name is `session`, the persistent session's name, or else the id of this process. A session whose name cannot be the
    /// name of a socket, such as a path, has a socket only if `--socket` was given, which is then an error.
    ///
    /// # Errors
    /// Returns a sentence if the socket was requested and cannot be opened.
    fn open_listener(&self, session: Option<&str>) -> Result<Option<Listener>, String> {
        if !self.socket && !session.is_some_and(can_name_socket) {
            return Ok(None);
        }
        let name = session.map_or_else(|| std::process::id().to_string(), str::to_owned);
        match Listener::bind(&name).map_err(|error| format!("other clients cannot attach: {error}")) {
            Ok(listener) => Ok(Some(listener)),
            Err(reason) if self.socket => Err(reason),
            // The socket was not requested but is a convenience of persistent sessions, so the server runs without it.
            Err(reason) => {
                print_to_stderr(&format!("sbcl-mcp: {reason}"));
                Ok(None)
            }
        }
    }
}

/// Returns true if a socket can have the name of this session.
fn can_name_socket(session: &str) -> bool {
    attach::socket_path(session).is_ok()
}

/// Serves as the supervisor, which relays messages between clients and a worker process. Returns the exit status.
pub(super) fn supervise(serve: Serve, stdio: Stdio) -> i32 {
    print_terminal_help(&stdio);
    let recorder = match serve.start_recording() {
        Ok(recorder) => recorder,
        Err(reason) => return report_failure(&format!("sbcl-mcp: {reason}")),
    };
    let persistent = match serve.session.as_deref().map(|name| sessions::open(name, serve.restore, &stdio.input)) {
        None => None,
        Some(Ok(persistent)) => Some(persistent),
        Some(Err(reason)) => return refuse(stdio, &reason),
    };
    let listener = match serve.open_listener(persistent.as_ref().map(|(persistent, _)| &*persistent.name)) {
        Ok(listener) => listener,
        Err(reason) => return refuse(stdio, &reason),
    };
    let scratch = ScratchDirectory::new();
    let directory = match &persistent {
        Some((persistent, _)) => persistent.directory().to_owned(),
        None => Checkpoints::choose_directory(scratch.path()),
    };
    let checkpoints = serve.options.checkpoints(directory.clone());
    start_logging(serve.options.log);
    let is_persistent = persistent.is_some();
    let recording = recorder.clone();
    let options = supervisor::SupervisorOptions {
        arguments: worker_arguments(std::env::args_os().skip(1), &scratch, &directory),
        restore: serve.restore != RestoreMode::None,
        checkpoints: checkpoints.clone(),
        boots_last_checkpoint: serve.restore == RestoreMode::Checkpoint,
        session: persistent,
        listener,
        watch_interval: Duration::from_millis(serve.watch_interval),
        recorder,
    };
    let supervisor = match supervisor::Supervisor::new(options) {
        Ok(supervisor) => supervisor,
        Err(reason) => return refuse(stdio, &reason),
    };
    remove_abandoned_checkpoints();
    let Stdio { input, output, .. } = stdio;
    let status = supervisor
        .serve(input, output)
        .unwrap_or_else(|error| report_failure(&format!("sbcl-mcp cannot serve: {error}")));
    if !is_persistent {
        checkpoints.remove_all();
    }
    scratch.remove();
    finish_recording(recording.as_ref());
    // The cores of deleted checkpoints.
    helper_threads::wait_until_idle(Instant::now() + FINAL_WORK_TIME);
    status
}

/// Waits until the rest of the recording is written, but not longer than [`FINAL_WORK_TIME`].
fn finish_recording(recorder: Option<&Recorder>) {
    if let Some(recorder) = recorder {
        recorder.finish(Instant::now() + FINAL_WORK_TIME);
    }
}

/// Starts a thread that deletes the checkpoint directories of servers that were killed.
fn remove_abandoned_checkpoints() {
    if let Some(state) = state_directory() {
        // If no thread can be started, the next server deletes the directories.
        let remove = move || remove_abandoned_directories(&state);
        let _ = std::thread::Builder::new().name("sbcl-mcp-clean".to_owned()).spawn(remove);
    }
}

/// Reports, on stderr and to the client, why the server cannot start. Returns the exit status.
fn refuse(stdio: Stdio, reason: &str) -> i32 {
    let reason = format!("sbcl-mcp cannot start: {reason}");
    let status = report_failure(&reason);
    let recorder = stdio.recorder.clone();
    let _ = mcp::refuse(stdio, &reason);
    finish_recording(recorder.as_ref());
    status
}

/// Returns the arguments of a worker, derived from the server's arguments.
fn worker_arguments(
    given: impl Iterator<Item = OsString>,
    scratch: &ScratchDirectory,
    checkpoints: &Path,
) -> Vec<OsString> {
    let mut given = given.peekable();
    given.next_if(|first| first == "serve");
    let ours = ["--scratch".into(), scratch.path().into(), "--checkpoint-directory".into(), checkpoints.into()];
    std::iter::once("worker".into()).chain(given).chain(ours).collect()
}

/// Serves as the worker of a supervisor. Returns the exit status.
pub(super) fn serve_as_worker(
    serve: Serve,
    stdio: Stdio,
    status_fd: i32,
    scratch: ScratchDirectory,
    checkpoints: PathBuf,
    lock_fd: Option<i32>,
) -> i32 {
    let at_end = sessions::final_save(lock_fd, &checkpoints);
    let grace_period = if at_end.is_some() { SAVE_GRACE_PERIOD } else { EXIT_GRACE_PERIOD };
    let scratch = Arc::new(scratch);
    // Once the supervisor is gone, no other process removes these directories.
    let remove = {
        let (scratch, checkpoints) = (scratch.clone(), at_end.is_none().then(|| checkpoints.clone()));
        move || {
            scratch.remove();
            checkpoints.iter().for_each(|directory| remove_directory(directory));
        }
    };
    let checkpoints = serve.options.checkpoints(checkpoints);
    let automatic_space =
        (serve.checkpoints == CheckpointTiming::Auto || at_end.is_some()).then_some(serve.checkpoint_space);
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_name(c"sbcl-mcp-worker");
    let supervisor = to_private_number(&stdio.input);
    let shared = match StatusPage::map(status_fd) {
        Ok(shared) => shared,
        Err(error) => return report_failure(&format!("sbcl-mcp worker must be started by sbcl-mcp serve: {error}")),
    };
    let saver = move || shared.saver().into_iter().collect();
    let started = exit_after_supervisor(&stdio, grace_period, saver, remove.clone())
        .and_then(|()| survive_stray_signals())
        .map_err(|error| error.to_string())
        .and_then(|()| serve.options.boot_session(&scratch, Some(&checkpoints)));
    mcp::fresh_image::enable(std::env::args_os().skip(1), &scratch);
    let session = match started {
        Ok(session) => session,
        Err(error) => {
            let reason = format!("sbcl-mcp cannot start: {error}");
            let status = report_failure(&reason);
            let leaving = WorkerEvent::exiting(status, Some(&reason)).encode().unwrap_or_default();
            let _ = std::fs::File::from(stdio.output).write_all(&frame::encode_event(&leaving));
            return status;
        }
    };
    let tool_options = serve.tool_options();
    start_logging(serve.options.log);
    let saves = SavePolicy { automatic_space, at_end };
    let status = mcp::serve(stdio, &session, checkpoints, saves, shared, tool_options)
        .unwrap_or_else(|error| report_failure(&format!("sbcl-mcp cannot serve: {error}")));
    processes::kill_all_descendants_except(saver);
    // If the supervisor is gone, no other worker will use the scratch directory and the checkpoints.
    if supervisor.is_ok_and(|input| wait_for_hang_up(&input, Some(Duration::ZERO))) {
        remove();
    }
    status
}

/// Waits until no process holds the other end of `input`, or until the time `wait`, if given, has passed. Returns true if
/// no process holds the other end.
pub(super) fn wait_for_hang_up(input: &OwnedFd, wait: Option<Duration>) -> bool {
    loop {
        let mut set = PollSet::new();
        set.add_hangup((), input);
        match set.wait(wait) {
            // If an unlimited wait ends without a ready descriptor, a signal has interrupted it.
            Ok(ready) if wait.is_none() && !ready.has(()) => {}
            Ok(ready) => return ready.is_closed(()),
            Err(_) => return false,
        }
    }
}

/// Starts a thread that waits until the supervisor is gone, and then for `grace_period`. If this process still runs then,
/// it may be stuck: the thread kills the process's descendants, except the processes that `except` returns, calls
/// `remove` to delete files, and ends the process.
pub(super) fn exit_after_supervisor(
    stdio: &Stdio,
    grace_period: Duration,
    except: impl Fn() -> Vec<Pid> + Send + 'static,
    remove: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let input = to_private_number(&stdio.input)?;
    let wait = move || {
        wait_for_hang_up(&input, None);
        // From now on, orphans become children of this process. Earlier orphans, which the supervisor had adopted, can no
        // longer be found.
        processes::adopt_orphans();
        std::thread::sleep(grace_period);
        processes::kill_all_descendants_except(except);
        remove();
        crate::exit_now(1);
    };
    std::thread::Builder::new().name("sbcl-mcp-end".to_owned()).spawn(wait).map(drop)
}

fn print_terminal_help(stdio: &Stdio) {
    if stdio.input.is_terminal() {
        let binary = std::env::current_exe().unwrap_or_else(|_| "sbcl-mcp".into());
        let binary = binary.to_string_lossy();
        let is_plain = binary.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
        let word = if is_plain { binary.to_string() } else { format!("'{}'", binary.replace('\'', r"'\''")) };
        let text = include_str!("terminal.txt").replace("{version}", version());
        let text = text.replace("{json}", &serde_json::json!(binary).to_string()).replace("{word}", &word);
        print_to_stderr(text.trim_end());
    }
}

/// Serves without a supervisor: this process holds Lisp and dies with it. Returns the exit status.
pub(super) fn serve_without_supervisor(serve: Serve, stdio: Stdio) -> i32 {
    print_terminal_help(&stdio);
    match serve_in_process(serve, stdio) {
        Ok(status) => status,
        Err((stdio, reason)) => refuse(stdio, &reason),
    }
}

/// The connection of the client to notify, and the reason why the server cannot start.
type StartFailure = (Stdio, String);

fn serve_in_process(serve: Serve, mut stdio: Stdio) -> Result<i32, StartFailure> {
    if serve.session.is_some() {
        return Err((stdio, "--session needs the supervisor: omit --no-supervisor.".to_owned()));
    }
    stdio.recorder = match serve.start_recording() {
        Ok(recorder) => recorder,
        Err(reason) => return Ok(report_failure(&format!("sbcl-mcp: {reason}"))),
    };
    let listener = match serve.open_listener(None) {
        Ok(listener) => listener,
        Err(reason) => return Err((stdio, reason)),
    };
    let scratch = Arc::new(ScratchDirectory::new());
    let checkpoints = serve.options.checkpoints(Checkpoints::choose_directory(scratch.path()));
    mcp::fresh_image::enable(std::env::args_os().skip(1), &scratch);
    let session = match serve.options.boot_session(&scratch, Some(&checkpoints)) {
        Ok(session) => session,
        Err(reason) => return Err((stdio, reason)),
    };
    remove_abandoned_checkpoints();
    let tool_options = serve.tool_options();
    start_logging(serve.options.log);
    let clean_up = {
        let (scratch, checkpoints, recorder) = (scratch.clone(), checkpoints.clone(), stdio.recorder.clone());
        move || {
            // A child that saves a checkpoint must not outlive the directory.
            kill_descendants();
            checkpoints.remove_all();
            scratch.remove();
            finish_recording(recorder.as_ref());
        }
    };
    let status = mcp::serve_unsupervised(stdio, &session, checkpoints, listener, tool_options, clean_up.clone())
        .unwrap_or_else(|error| report_failure(&format!("sbcl-mcp cannot serve: {error}")));
    clean_up();
    Ok(status)
}

/// Kills the descendants of this process and removes its scratch directory. Called just before the process exits.
pub(super) fn clean_up(scratch: &ScratchDirectory) {
    kill_descendants();
    scratch.remove();
}

/// Kills the descendants of this process.
fn kill_descendants() {
    // A process that is being killed may start another process, which is then adopted and killed too.
    processes::adopt_orphans();
    processes::kill_all_descendants();
}
