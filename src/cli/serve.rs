//! The command `serve`, and the worker that it starts.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::arguments::{Restore, Serve, When};
use super::{complain, say, sessions, start_logging, version};
use crate::mcp;
use crate::mcp::stdio::Stdio;
use crate::os::poll_set::PollSet;
use crate::os::processes;
use crate::os::temporary::Scratch;
use crate::recovery::checkpoint::save::Saves;
use crate::recovery::checkpoint::store::{Checkpoints, remove_directory};
use crate::recovery::event::WorkerEvent;
use crate::recovery::status_page::StatusPage;
use crate::rpc::attach::Listener;
use crate::rpc::descriptors::out_of_the_way;
use crate::rpc::frame;
use crate::rpc::recorder::{Header, Recorder};
use crate::rpc::signals::survive_accidents;
use crate::supervisor;

/// Time in which a worker must end after its supervisor.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// Time in which a worker that saves a persistent session must end.
const LAST_SAVE: Duration = Duration::from_secs(15);

impl Serve {
    /// How tools are offered.
    fn offer(&self) -> mcp::Offer {
        let joinable = self.socket || self.session.is_some();
        mcp::Offer { structured: self.structured_content, registry: mcp::Registry::fixed(self.tools.clone()), joinable }
    }

    /// Begins the recording that was asked for, if one was; or a sentence that says why not.
    fn recorder(&self) -> Result<Option<Recorder>, String> {
        let Some(path) = &self.record else { return Ok(None) };
        let header = Header {
            sbcl_mcp: crate::VERSION.to_owned(),
            sbcl: crate::SBCL_VERSION.to_owned(),
            recorded: jiff::Timestamp::now().to_string(),
            arguments: std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect(),
        };
        Recorder::begin(path, &header).map(Some)
    }

    /// Opens the socket at which clients may attach, if there is to be one: it has the name of the persistent session, or the
    /// id of this process.
    ///
    /// # Errors
    /// A sentence: the socket cannot be opened.
    fn listener(&self, session: Option<&str>) -> Result<Option<Listener>, String> {
        if !self.socket && session.is_none() {
            return Ok(None);
        }
        let name = session.map_or_else(|| std::process::id().to_string(), str::to_owned);
        match Listener::bind(&name).map_err(|error| format!("others cannot join: {error}")) {
            Ok(listener) => Ok(Some(listener)),
            Err(reason) if self.socket => Err(reason),
            // It was not asked for.
            Err(reason) => {
                say(&format!("sbcl-mcp: {reason}"));
                Ok(None)
            }
        }
    }
}

/// The whole server: a worker in a process of its own, and this one in front of it.
pub(super) fn supervise(serve: Serve, stdio: Stdio) -> i32 {
    greet(&stdio);
    let recorder = match serve.recorder() {
        Ok(recorder) => recorder,
        Err(reason) => return complain(&format!("sbcl-mcp: {reason}")),
    };
    let durable = match serve.session.as_deref().map(|name| sessions::open(name, serve.restore, &stdio.input)) {
        None => None,
        Some(Ok(durable)) => Some(durable),
        Some(Err(reason)) => return refuse(stdio, &reason),
    };
    let listener = match serve.listener(durable.as_ref().map(|(durable, _)| &*durable.name)) {
        Ok(listener) => listener,
        Err(reason) => return complain(&format!("sbcl-mcp: {reason}")),
    };
    let scratch = Scratch::new();
    let directory = match &durable {
        Some((durable, _)) => durable.directory().to_owned(),
        None => Checkpoints::choose_directory(scratch.path()),
    };
    let checkpoints = serve.options.checkpoints(directory.clone());
    start_logging(serve.options.log);
    let is_durable = durable.is_some();
    let options = supervisor::Options {
        arguments: worker_arguments(std::env::args_os().skip(1), &scratch, &directory),
        restore: serve.restore != Restore::None,
        checkpoints: checkpoints.clone(),
        begins_with_checkpoints: serve.restore == Restore::Checkpoint,
        durable,
        listener,
        watch_interval: Duration::from_millis(serve.watch_interval),
        recorder,
    };
    let supervisor = match supervisor::Supervisor::new(options) {
        Ok(supervisor) => supervisor,
        Err(reason) => return refuse(stdio, &reason),
    };
    let Stdio { input, output, .. } = stdio;
    let status =
        supervisor.serve(input, output).unwrap_or_else(|error| complain(&format!("sbcl-mcp cannot serve: {error}")));
    if !is_durable {
        checkpoints.remove();
    }
    scratch.remove();
    status
}

/// Says why there is no server, on stderr and to the client.
fn refuse(stdio: Stdio, reason: &str) -> i32 {
    let reason = format!("sbcl-mcp cannot start: {reason}");
    let status = complain(&reason);
    let _ = mcp::refuse(stdio, &reason);
    status
}

/// The arguments of a worker, from those of the server.
fn worker_arguments(given: impl Iterator<Item = OsString>, scratch: &Scratch, checkpoints: &Path) -> Vec<OsString> {
    let mut given = given.peekable();
    given.next_if(|first| first == "serve");
    let ours = ["--scratch".into(), scratch.path().into(), "--checkpoint-directory".into(), checkpoints.into()];
    std::iter::once("worker".into()).chain(given).chain(ours).collect()
}

/// A worker, on its supervisor's pipes.
pub(super) fn work(
    serve: Serve,
    stdio: Stdio,
    status_fd: i32,
    scratch: Scratch,
    checkpoints: PathBuf,
    lock_fd: Option<i32>,
) -> i32 {
    let at_end = sessions::at_end(lock_fd, &checkpoints);
    let last_words = if at_end.is_some() { LAST_SAVE } else { LAST_WORDS };
    let scratch = Arc::new(scratch);
    // Where there is no supervisor any more, nobody else does it.
    let remove = {
        let (scratch, checkpoints) = (scratch.clone(), at_end.is_none().then(|| checkpoints.clone()));
        move || {
            scratch.remove();
            checkpoints.iter().for_each(|directory| remove_directory(directory));
        }
    };
    let checkpoints = serve.options.checkpoints(checkpoints);
    let automatic = (serve.checkpoints == When::Auto || at_end.is_some()).then_some(serve.checkpoint_space);
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_name(c"sbcl-mcp-worker");
    let supervisor = out_of_the_way(&stdio.input);
    let shared = match StatusPage::take(status_fd) {
        Ok(shared) => shared,
        Err(error) => return complain(&format!("sbcl-mcp worker is started by sbcl-mcp serve: {error}")),
    };
    let started = outlive_nobody(&stdio, last_words, remove.clone())
        .and_then(|()| survive_accidents())
        .map_err(|error| error.to_string())
        .and_then(|()| serve.options.session(&scratch, Some(&checkpoints)));
    mcp::beside::allow(std::env::args_os().skip(1), &scratch);
    let session = match started {
        Ok(session) => session,
        Err(error) => {
            let reason = format!("sbcl-mcp cannot start: {error}");
            let status = complain(&reason);
            let leaving = WorkerEvent::leaving(status, Some(&reason)).encode().unwrap_or_default();
            let _ = std::fs::File::from(stdio.output).write_all(&frame::event(&leaving));
            return status;
        }
    };
    let offer = serve.offer();
    start_logging(serve.options.log);
    let saves = Saves { automatic, at_end };
    let (status, saver) = mcp::serve(stdio, &session, checkpoints, saves, shared, offer)
        .unwrap_or_else(|error| (complain(&format!("sbcl-mcp cannot serve: {error}")), None));
    processes::end_all_but(&saver.into_iter().collect::<Vec<_>>());
    // There will be no other worker.
    if supervisor.is_ok_and(|input| has_hung_up(&input, Some(Duration::ZERO))) {
        remove();
    }
    status
}

/// Waits, no longer than this, until nobody holds the other end of `input`, and returns whether that is so.
pub(super) fn has_hung_up(input: &OwnedFd, wait: Option<Duration>) -> bool {
    loop {
        let mut set = PollSet::new();
        set.close((), input);
        match set.wait(wait) {
            // Waited for without end, nothing is ready only after a signal.
            Ok(ready) if wait.is_none() && !ready.has(()) => {}
            Ok(ready) => return ready.is_closed(()),
            Err(_) => return false,
        }
    }
}

/// Ends this process when its supervisor is gone, whatever became of that, and it has not ended by itself: it may be
/// stuck. What it leaves for nobody is removed by `remove`.
pub(super) fn outlive_nobody(
    stdio: &Stdio,
    last_words: Duration,
    remove: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let input = out_of_the_way(&stdio.input)?;
    let wait = move || {
        has_hung_up(&input, None);
        std::thread::sleep(last_words);
        processes::end_all();
        remove();
        crate::exit_now(1);
    };
    std::thread::Builder::new().name("sbcl-mcp-end".to_owned()).spawn(wait).map(drop)
}

fn greet(stdio: &Stdio) {
    if stdio.input.is_terminal() {
        let binary = std::env::current_exe().unwrap_or_else(|_| "sbcl-mcp".into());
        let binary = binary.to_string_lossy();
        let is_plain = binary.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
        let word = if is_plain { binary.to_string() } else { format!("'{}'", binary.replace('\'', r"'\''")) };
        let text = include_str!("terminal.txt").replace("{version}", version());
        let text = text.replace("{json}", &serde_json::json!(binary).to_string()).replace("{word}", &word);
        say(text.trim_end());
    }
}

/// Serves from this very process, which ends with Lisp.
pub(super) fn plain(serve: Serve, stdio: Stdio) -> i32 {
    greet(&stdio);
    match begin_plain(serve, stdio) {
        Ok(status) => status,
        Err((stdio, reason)) => refuse(stdio, &reason),
    }
}

/// Why there is no server, and the client that is to be told.
type Refusal = (Stdio, String);

fn begin_plain(serve: Serve, mut stdio: Stdio) -> Result<i32, Refusal> {
    if serve.session.is_some() {
        return Err((stdio, "--session needs the supervisor: leave --no-supervisor out.".to_owned()));
    }
    stdio.recorder = match serve.recorder() {
        Ok(recorder) => recorder,
        Err(reason) => return Ok(complain(&format!("sbcl-mcp: {reason}"))),
    };
    let listener = match serve.listener(None) {
        Ok(listener) => listener,
        Err(reason) => return Err((stdio, reason)),
    };
    let scratch = Arc::new(Scratch::new());
    let checkpoints = serve.options.checkpoints(Checkpoints::choose_directory(scratch.path()));
    mcp::beside::allow(std::env::args_os().skip(1), &scratch);
    let session = match serve.options.session(&scratch, Some(&checkpoints)) {
        Ok(session) => session,
        Err(reason) => return Err((stdio, reason)),
    };
    let offer = serve.offer();
    start_logging(serve.options.log);
    let clear_up = {
        let (scratch, checkpoints) = (scratch.clone(), checkpoints.clone());
        move || {
            checkpoints.remove();
            clear_up(&scratch);
        }
    };
    let status = mcp::serve_plain(stdio, &session, checkpoints, listener, offer, clear_up.clone())
        .unwrap_or_else(|error| complain(&format!("sbcl-mcp cannot serve: {error}")));
    clear_up();
    Ok(status)
}

/// What a process that ends with its image leaves behind for nobody.
pub(super) fn clear_up(scratch: &Scratch) {
    // What a program starts while it is ended.
    processes::adopt_orphans();
    processes::end_all();
    scratch.remove();
}
