//! Runs programs, either with a log and visible progress or with a time limit.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::error::{Error, IoContext};
use crate::progress::Progress;
use crate::settings;

/// Number of lines, from the end of a failed program's output, that an error shows.
const LINES_SHOWN: usize = 120;

/// Interval at which a program without output is reported as still running.
const REPORT_INTERVAL: Duration = Duration::from_secs(20);

/// Environment variables that the programs of a step may see. Other environment variables are removed, since they could
/// change a stage without changing its key.
const KEPT_VARIABLES: [&str; 11] = [
    settings::NEXT,
    settings::SYSROOT,
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "SDKROOT",
    "DEVELOPER_DIR",
];

/// Returns a command with a minimal environment and no input.
pub(crate) fn clean_command(program: &str) -> Command {
    cleaned(Command::new(program))
}

/// Gives the command a minimal environment and no input.
pub(crate) fn cleaned(mut command: Command) -> Command {
    command.env_clear().stdin(Stdio::null());
    for name in KEPT_VARIABLES {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.env("LC_ALL", "C.UTF-8");
    command
}

/// The log of a stage: a file with the output of its programs.
pub(crate) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Creates the log, or empties an existing one.
    pub(crate) fn create(path: PathBuf) -> Result<Self, Error> {
        let file = File::create(&path).context("creating", &path)?;
        Ok(Self { path, file })
    }

    /// Returns the log's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a command to its end with all output in the log. Lines that start with `//`, with which SBCL's build marks
    /// its phases, are shown as progress. The error of a failed command contains the last lines of its output.
    pub(crate) fn run(&self, step: &str, command: &mut Command, progress: &Progress) -> Result<(), Error> {
        let path = self.path();
        let failed = |status: String, output: String| Error::Step {
            step: step.to_owned(),
            status,
            output,
            log: path.to_owned(),
        };
        let started = Instant::now();
        writeln!(&self.file, "$ {command:?}").context("writing", path)?;
        let (reader, writer) = std::io::pipe().context("creating a pipe for", path)?;
        command.stdout(writer.try_clone().context("creating a pipe for", path)?);
        command.stderr(writer);
        let spawned = command.spawn();
        // `command` still holds write ends of the pipe. Unless these ends are closed, the reader never reaches the end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let program = Path::new(command.get_program()).display();
        let mut child = spawned.map_err(|error| failed(format!("{program}: {error}"), String::new()))?;

        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        let mut last = VecDeque::new();
        loop {
            match lines.recv_timeout(REPORT_INTERVAL) {
                Ok(line) => {
                    writeln!(&self.file, "{line}").context("writing", path)?;
                    if let Some(phase) = line.strip_prefix("//") {
                        progress.say(format_args!("  {}", phase.trim()));
                    }
                    if last.len() == LINES_SHOWN {
                        last.pop_front();
                    }
                    last.push_back(line);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = started.elapsed().as_secs();
                    progress.say(format_args!("  {step}: {seconds} s so far"));
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = child.wait().context("waiting for a program that writes to", path)?;
        if status.success() { Ok(()) } else { Err(failed(status.to_string(), Vec::from(last).join("\n"))) }
    }
}

/// Runs a command for at most `limit` and returns its output, including stderr. If the command fails, the error is its
/// output, or its exit status if it printed nothing. Otherwise the error is the reason why the command could not run, or
/// says that the time limit was exceeded.
pub(crate) fn run_with_timeout(limit: Duration, command: &mut Command) -> Result<String, String> {
    let (mut reader, writer) = std::io::pipe().map_err(|error| error.to_string())?;
    let errors = writer.try_clone().map_err(|error| error.to_string())?;
    let spawned = command.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn();
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned.map_err(|error| error.to_string())?;
    let (sender, text) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = reader.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).trim().to_owned());
    });
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                let program = Path::new(command.get_program()).display();
                return Err(format!("{program} did not finish within {limit:?}"));
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    // A background process of the command may still hold the pipe open, so the wait for more output is short.
    let text = text.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    if status.success() {
        Ok(text)
    } else if text.is_empty() {
        Err(status.to_string())
    } else {
        Err(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn shell(script: &str) -> Command {
        let mut command = clean_command("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn failed_step_reports_stdout_stderr_status_and_log_path() {
        let directory = Scratch::new("log");
        let log = Log::create(directory.join("log")).unwrap();
        let result = log.run("a step", &mut shell("echo out; echo err >&2; exit 3"), &Progress::silent());
        let message = result.unwrap_err().to_string();
        for part in ["a step", "out\nerr", "3", &log.path().display().to_string()] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
        assert!(std::fs::read_to_string(log.path()).unwrap().ends_with("out\nerr\n"));
    }

    #[test]
    fn command_runs_in_a_bare_environment_without_cargo_variables() {
        let output = run_with_timeout(Duration::from_secs(5), &mut shell("env")).unwrap();
        assert!(output.contains("PATH="));
        // Cargo sets this variable for tests.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        assert!(!output.contains("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn a_time_limit_ends_a_command() {
        let started = Instant::now();
        let outcome = run_with_timeout(Duration::from_millis(100), &mut shell("exec sleep 30"));
        assert_eq!(outcome, Err("sh did not finish within 100ms".to_owned()));
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn missing_program_is_an_error() {
        let outcome = run_with_timeout(Duration::from_secs(1), &mut clean_command("no-such-program-anywhere"));
        assert!(outcome.unwrap_err().contains("No such file"));
    }
}
