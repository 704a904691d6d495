//! Tests in an image of their own, beside the session: a child process of this very program that loads the files, runs the
//! tests, says what they came to, and ends. It ends, too, when this process does.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use super::tools::System;
use crate::os::poll_set::PollSet;
use crate::os::processes::end_tree;
use crate::os::temporary::Scratch;
use crate::recovery::checkpoint::store::this_program;
use crate::session::Operation;
use crate::{Evaluation, Outcome, TimeLimit};

/// How long all of it may take, the loading included.
const LIMIT: Duration = Duration::from_secs(1800);
/// Bytes that the child may say.
const MAX_OUTCOME: u64 = 64 << 20;

/// The command line of this program, without the command, and its directory for temporary files, if it can run tests: it is
/// not another's library.
static PROGRAM: OnceLock<(Vec<OsString>, PathBuf)> = OnceLock::new();

/// Has tests run in processes with the options of this one, from its arguments. Their temporary files are in the directory of
/// its own: whoever removes that when this process is gone, and has ended them, removes those.
pub(crate) fn allow(arguments: impl Iterator<Item = OsString>, scratch: &Scratch) {
    let mut arguments = arguments.peekable();
    arguments.next_if(|first| first == "serve" || first == "worker");
    let _ = PROGRAM.set((arguments.collect(), scratch.path().to_owned()));
}

/// Which tests to run, and how the other image finds them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Tests {
    /// Systems, or one of the other two.
    pub(super) systems: Vec<System>,
    pub(crate) package: Option<String>,
    pub(crate) name: Option<String>,
    /// Milliseconds a test may take.
    pub(crate) timeout: u64,
    /// Load what changed on disk first.
    pub(crate) reload: bool,
    /// Directories with `.asd` files, and systems to load.
    pub(crate) registry: Vec<String>,
    pub(crate) load: Vec<String>,
    /// How many suspects to look for by coverage, for each test that fails.
    pub(crate) suspects: u64,
    /// The tests that are known to take longer than they may: what they ran in a part of that time tells as much.
    pub(crate) endless: Vec<String>,
}

impl Tests {
    /// What the Lisp side is asked to do.
    pub(crate) fn operation(&self) -> Operation {
        let systems: Vec<_> = self.systems.iter().map(|system| system.of(Operation::new("system"))).collect();
        Operation::new("run-tests")
            .with("systems", systems)
            .maybe("package", self.package.clone())
            .maybe("name", self.name.clone())
            .with("timeout", self.timeout)
            .with("reload", self.reload)
            .with("registry", self.registry.clone())
            .with("load", self.load.clone())
            .with("suspects", self.suspects)
            .with("endless", self.endless.clone())
    }

    /// What makes another image that the same can be run in, as code: tests need not be run again for that.
    pub(crate) fn evaluation(&self) -> Evaluation {
        let code = match &self.systems[..] {
            [system] => format!("{} ; and run-tests", system.code(None)),
            // One that cannot be loaded is no reason to load none.
            [_, ..] => {
                let loaded = self.systems.iter().map(|system| format!("(cl:ignore-errors {})\n", system.code(None)));
                format!("{}; and run-tests", loaded.collect::<String>())
            }
            [] => {
                let name = self.package.as_ref().or(self.name.as_ref()).map_or("", String::as_str);
                format!("(cl:values) ; run-tests {}", name.replace('\n', " "))
            }
        };
        // Each test has a limit of its own.
        Evaluation { timeout: TimeLimit::None, ..Evaluation::new(code) }
    }
}

/// What that process is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) tests: Tests,
    /// Where it has its temporary files, which are removed by whoever outlives the others.
    pub(crate) scratch: PathBuf,
}

/// A run in another process that can be ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Handle(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    child: Option<Child>,
    ended: bool,
}

impl Handle {
    /// Ends it, whatever it does and has started.
    pub(crate) fn end(&self) {
        let mut state = self.0.lock();
        state.ended = true;
        if let Some(child) = &state.child {
            end_tree(Pid::from_child(child));
        }
    }

    /// Runs the tests and waits for what they come to.
    ///
    /// # Errors
    /// A sentence that says why there is no outcome.
    pub(crate) fn run(&self, tests: &Tests) -> Result<Outcome, String> {
        let Some((arguments, directory)) = PROGRAM.get() else {
            return Err("Tests can be run in an image of their own where the program sbcl-mcp serves.".to_owned());
        };
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("The image for the tests {what}: {error}.");
        let mut child = Command::new(this_program().map_err(|error| failed("has no program", &error))?)
            .arg0("sbcl-mcp")
            .arg("beside")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| failed("cannot be started", &error))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let process = Pid::from_child(&child);
        // Where there is none, the pipe tells.
        let descriptor = pidfd_open(process, PidfdFlags::empty()).ok();
        self.0.lock().child = Some(child);
        if self.0.lock().ended {
            self.end();
        }
        let (Some(mut stdin), Some(mut stdout)) = (stdin, stdout) else { return Err("No pipes.".to_owned()) };
        let scratch = Scratch::in_directory(directory);
        let request = Request { tests: tests.clone(), scratch: scratch.path().to_owned() };
        let request = serde_json::to_string(&request).map_err(|error| failed("cannot be asked", &error))?;
        // Should it not read, what follows has an end nevertheless. The child ends when nobody holds the pipe.
        let ask = move || (stdin.write_all(format!("{request}\n").as_bytes()), stdin);
        let ask = std::thread::Builder::new().name("sbcl-mcp-beside".to_owned()).spawn(ask);
        let limit = Instant::now() + LIMIT;
        let mut said = Vec::new();
        let read = read(&mut stdout, descriptor.as_ref(), &mut said, limit);
        let child = self.0.lock().child.take();
        let status = child.map(|mut child| {
            end_tree(process);
            child.wait()
        });
        scratch.remove();
        let asked = ask.and_then(|ask| ask.join().map_or(Ok(()), |(asked, _)| asked));
        asked.and(read).map_err(|error| failed("does not answer", &error))?;
        serde_json::from_slice(&said).map_err(|_| {
            let how = match status {
                _ if Instant::now() >= limit => format!("did not come to an end within {} s", LIMIT.as_secs()),
                Some(Ok(status)) => format!("died: {status}"),
                _ => "died".to_owned(),
            };
            format!("The image for the tests {how}: a test, or loading its system, may have ended it.")
        })
    }
}

/// The descriptors that [`read`] waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    Output,
    Process,
}

/// Reads what a process says, until that ends or it does: what it has forked may hold its end open for longer.
fn read(stdout: &mut ChildStdout, process: Option<&OwnedFd>, said: &mut Vec<u8>, limit: Instant) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&*stdout, true)?;
    loop {
        let left = limit.saturating_duration_since(Instant::now());
        let mut set = PollSet::new();
        set.read(Watched::Output, &*stdout);
        if let Some(process) = process {
            set.read(Watched::Process, process);
        }
        let ready = set.wait(Some(left))?;
        if left.is_zero() && ready.names().next().is_none() {
            return Ok(());
        }
        let is_over = ready.has(Watched::Process);
        // At the end of the process all that it has said is there.
        match stdout.take(MAX_OUTCOME.saturating_sub(said.len() as u64)).read_to_end(said) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !is_over => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            read => return read.map(drop),
        }
    }
}
