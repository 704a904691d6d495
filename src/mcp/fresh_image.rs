//! Test runs in a fresh image: a child process of this program loads the files, runs the tests, writes the outcome to
//! stdout, and exits. The child also exits when this process does.

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
use crate::audience::Audience;
use crate::os::poll_set::PollSet;
use crate::os::processes::kill_tree;
use crate::os::temporary::ScratchDirectory;
use crate::outcome::Directory;
use crate::recovery::checkpoint::store::this_program;
use crate::session::Operation;
use crate::{Evaluation, Outcome, TimeLimit};

/// Time limit of a run, including loading.
const TIME_LIMIT: Duration = Duration::from_secs(1800);
/// Maximum number of bytes that are read from the child.
const MAX_OUTPUT: u64 = 64 << 20;

/// This program's arguments, without the subcommand, and its directory for temporary files. A program that embeds the
/// library never sets these options, and so cannot run tests in a fresh image.
static SERVER_OPTIONS: OnceLock<(Vec<OsString>, PathBuf)> = OnceLock::new();

/// Enables test runs in child processes, which get the options of this process. The children's temporary files are in
/// the directory of `scratch`, so the removal of this directory removes them too.
pub(crate) fn enable(arguments: impl Iterator<Item = OsString>, scratch: &ScratchDirectory) {
    let mut arguments = arguments.peekable();
    arguments.next_if(|first| first == "serve" || first == "worker");
    let _ = SERVER_OPTIONS.set((arguments.collect(), scratch.path().to_owned()));
}

/// Returns true if tests can run in child processes.
pub(crate) fn is_enabled() -> bool {
    SERVER_OPTIONS.get().is_some()
}

/// The tests to run, and the information that a fresh image needs to find them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct TestSelection {
    /// The systems to test. Empty if `package` or `name` is given.
    pub(super) systems: Vec<System>,
    pub(crate) package: Option<String>,
    pub(crate) name: Option<String>,
    /// Time limit for each test, in milliseconds.
    pub(crate) timeout: u64,
    /// True to load changed files before the tests run.
    pub(crate) reload: bool,
    /// Directories with `.asd` files, in the order in which the fresh image searches them.
    pub(crate) registry: Vec<Directory>,
    /// Systems to load before the tests.
    pub(crate) load: Vec<String>,
    /// Maximum number of suspects for each failing test: functions that the failing test ran, but few passing tests did.
    /// 0 to look for none.
    pub(crate) suspects: u64,
    /// Names of tests known to exceed the time limit. These tests are stopped earlier: a short run suffices to see
    /// which functions they call.
    pub(crate) endless: Vec<String>,
    /// The audience of the results.
    pub(crate) audience: Audience,
}

impl TestSelection {
    /// Returns the operation that runs the tests.
    pub(crate) fn operation(&self) -> Operation {
        let systems: Vec<_> = self.systems.iter().map(|system| system.add_to(Operation::new("system"))).collect();
        let registry = self.registry.iter().map(|directory| {
            Operation::new("directory")
                .with("name", directory.name.as_str())
                .with_optional("primary", directory.primary.clone())
                .with_optional("file", directory.file.clone())
        });
        Operation::new("run-tests")
            .with("systems", systems)
            .with_optional("package", self.package.clone())
            .with_optional("name", self.name.clone())
            .with("timeout", self.timeout)
            .with("reload", self.reload)
            .with("registry", registry.collect::<Vec<_>>())
            .with("load", self.load.clone())
            .with("suspects", self.suspects)
            .with("endless", self.endless.clone())
    }

    /// Returns the evaluation that is logged for the run. Its code loads the systems, so that a later image can run the
    /// tests, but does not run the tests.
    pub(crate) fn evaluation(&self) -> Evaluation {
        let code = match &self.systems[..] {
            [system] => format!("{} ; and run-tests", system.code(None)),
            // A system that cannot be loaded must not keep the other systems from loading.
            [_, ..] => {
                let loaded = self.systems.iter().map(|system| format!("(cl:ignore-errors {})\n", system.code(None)));
                format!("{}; and run-tests", loaded.collect::<String>())
            }
            [] => {
                let name = self.package.as_ref().or(self.name.as_ref()).map_or("", String::as_str);
                format!("(cl:values) ; run-tests {}", name.replace('\n', " "))
            }
        };
        // The run as a whole has no time limit, since each test has a limit of its own.
        Evaluation { timeout: TimeLimit::None, ..Evaluation::new(code) }
    }
}

/// The request that the child process reads from stdin.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TestRequest {
    pub(crate) tests: TestSelection,
    /// The child's directory for temporary files. The child removes the directory, and so does the parent in case the
    /// child is killed.
    pub(crate) scratch: PathBuf,
}

/// A test run in a child process. Clones share the run.
#[derive(Debug, Clone, Default)]
pub(crate) struct FreshRun(Arc<Mutex<RunState>>);

#[derive(Debug, Default)]
struct RunState {
    child: Option<Child>,
    ended: bool,
}

impl FreshRun {
    /// Ends the run, by killing the child and its descendants.
    pub(crate) fn end(&self) {
        let mut state = self.0.lock();
        state.ended = true;
        if let Some(child) = &state.child {
            kill_tree(Pid::from_child(child));
        }
    }

    /// Runs the tests and returns their outcome.
    ///
    /// # Errors
    /// Returns the reason, as a sentence, if this process is not a server of the program sbcl-mcp, if the child cannot be
    /// started or given the request, or if the child exits or reaches the time limit without an outcome.
    pub(crate) fn run(&self, tests: &TestSelection) -> Result<Outcome, String> {
        let Some((arguments, directory)) = SERVER_OPTIONS.get() else {
            return Err("This server is part of another program and cannot run tests in a fresh image: omit the \
                arguments `fresh` and `suspects`."
                .to_owned());
        };
        let failed =
            |what: &str, error: &dyn std::fmt::Display| format!("The fresh image for the tests {what}: {error}.");
        let mut child = Command::new(this_program().map_err(|error| {
            failed("could not be started, because the server cannot find its own program file", &error)
        })?)
        .arg0("sbcl-mcp")
        .arg("beside")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| failed("could not be started", &error))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let process = Pid::from_child(&child);
        // Without a pidfd, the end of the pipe shows that the child has exited.
        let descriptor = pidfd_open(process, PidfdFlags::empty()).ok();
        self.0.lock().child = Some(child);
        if self.0.lock().ended {
            self.end();
        }
        let (Some(mut stdin), Some(mut stdout)) = (stdin, stdout) else {
            return Err("The fresh image for the tests cannot be used: its process has no pipes.".to_owned());
        };
        let scratch = ScratchDirectory::in_directory(directory);
        let request = TestRequest { tests: tests.clone(), scratch: scratch.path().to_owned() };
        let request = serde_json::to_string(&request)
            .map_err(|error| format!("The tests could not be encoded as JSON: {error}."))?;
        // The request is written on a thread, because a write to a child that does not read would block past the time
        // limit. The thread returns the pipe, since the child exits when the pipe is closed.
        let write_request = move || (stdin.write_all(format!("{request}\n").as_bytes()), stdin);
        let writer = std::thread::Builder::new().name("sbcl-mcp-beside".to_owned()).spawn(write_request);
        let deadline = Instant::now() + TIME_LIMIT;
        let mut output = Vec::new();
        let read = read_output(&mut stdout, descriptor.as_ref(), &mut output, deadline);
        let child = self.0.lock().child.take();
        let status = child.map(|mut child| {
            kill_tree(process);
            child.wait()
        });
        scratch.remove();
        let written = writer.and_then(|writer| writer.join().map_or(Ok(()), |(written, _)| written));
        // If the child has died before it read the request, its exit status, which is reported below, says more.
        let written = written.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        });
        written.and(read).map_err(|error| failed("could not communicate with the server", &error))?;
        serde_json::from_slice(&output).map_err(|_| {
            let how = match status {
                _ if Instant::now() >= deadline => {
                    return format!(
                        "The fresh image for the tests did not finish within {} s and was ended: a test, or loading a \
                         system, may hang; if not, run fewer tests at once.",
                        TIME_LIMIT.as_secs()
                    );
                }
                _ if output.len() as u64 >= MAX_OUTPUT => {
                    return format!(
                        "The results of the tests in the fresh image exceed {} MiB: run fewer tests at once.",
                        MAX_OUTPUT >> 20
                    );
                }
                Some(Ok(status)) => format!("died ({status})"),
                _ => "died".to_owned(),
            };
            format!(
                "The fresh image for the tests {how}: a test, or loading its system, may have killed the image, or the \
                 image had too little memory."
            )
        })
    }
}

/// The descriptors that [`read_output`] polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChildSource {
    Output,
    Process,
}

/// Reads a process's output until the output ends, the process exits, or `deadline` passes. The process's own children may
/// keep the pipe open after the process has exited.
fn read_output(
    stdout: &mut ChildStdout,
    process: Option<&OwnedFd>,
    output: &mut Vec<u8>,
    deadline: Instant,
) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&*stdout, true)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut set = PollSet::new();
        set.add_read(ChildSource::Output, &*stdout);
        if let Some(process) = process {
            set.add_read(ChildSource::Process, process);
        }
        let ready = set.wait(Some(left))?;
        if left.is_zero() && ready.names().next().is_none() {
            return Ok(());
        }
        let is_over = ready.has(ChildSource::Process);
        // All output of a process that has exited is in the pipe.
        match stdout.take(MAX_OUTPUT.saturating_sub(output.len() as u64)).read_to_end(output) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !is_over => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            read => return read.map(drop),
        }
    }
}
