//! The command line.

mod check;
mod client;
mod doctor;
mod editor;
mod pages;
mod repl;
mod replay;
mod sessions;
mod tools;

use std::ffi::OsString;
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::builder::styling::Styles;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use once_cell::sync::Lazy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::EnvFilter;

use crate::attach::Listener;
use crate::checkpoints::{Checkpoints, Tried, remove_directory};
use crate::confinement::Confinement;
use crate::durable::Durable;
use crate::handover::shared_status::SharedStatus;
use crate::mcp::stdio::Stdio;
use crate::rpc::descriptors::out_of_the_way;
use crate::rpc::recorder::{Header, Recorder};
use crate::rpc::signals::survive_accidents;
use crate::scratch::Scratch;
use crate::supervisor::alone::{Alone, Beginning, Inheritance, Origin};
use crate::supervisor::log::Log;
use crate::{Evaluation, ImageConfig, Limits, Session, report};
use crate::{handover, mcp, supervisor};
use client::Client;

/// How long a worker may take to end after its supervisor has.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The same where it is to save a session that lasts.
const LAST_SAVE: Duration = Duration::from_secs(15);

/// The exit status of `eval` when it could not start, read the code or write the report: nothing is said of the code.
/// It is 1 when the code failed, and 2 for a wrong command line.
const EVAL_IMPOSSIBLE: i32 = 3;

/// The exit status of `load` and `test` when there is no answer.
const CALL_IMPOSSIBLE: i32 = 2;

/// What the command `sbcl` understands and this one does not. A program that starts another Lisp by the name of the one
/// it runs in (`sb-ext:*runtime-pathname*`) passes these.
const SBCL_OPTIONS: [&str; 22] = [
    "--noinform",
    "--dynamic-space-size",
    "--control-stack-size",
    "--tls-limit",
    "--merge-core-pages",
    "--no-merge-core-pages",
    "--disable-ldb",
    "--lose-on-corruption",
    "--end-runtime-options",
    "--script",
    "--debug-environment",
    "--sysinit",
    "--userinit",
    "--no-sysinit",
    "--no-userinit",
    "--eval",
    "--load",
    "--quit",
    "--non-interactive",
    "--disable-debugger",
    "--noprint",
    "--end-toplevel-options",
];

/// A living Common Lisp session (SBCL) for AI agents: an MCP server on stdin and stdout.
#[derive(Debug, Parser)]
#[command(name = "sbcl-mcp", version = version(), styles = Styles::plain(), args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    serve: Serve,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a session to an MCP client on stdin and stdout (what happens without a command).
    Serve(Serve),
    /// Evaluate code and print the report.
    ///
    /// Exits with status 0 when that went well, 1 if it failed, 2 for a wrong command line, and 3 when Lisp could not start
    /// or the report could not be written.
    Eval {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        /// Lisp code; several pieces are read as one text, a line each. `-` reads it from stdin.
        #[arg(required = true, allow_negative_numbers = true)]
        code: Vec<String>,
    },
    /// Load a system through ASDF, or a file, and print what `load` says.
    ///
    /// Without --attach in an image of its own, which ends with it: that is how to see whether it loads, with no time limit
    /// unless --timeout is given. Exits with status 0 when it is loaded, 1 when it is not, and 2 when that could not be
    /// tried: no server, or a wrong command line.
    Load {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        /// A system's name, or a file.
        what: String,
    },
    /// Run tests and print what `run-tests` says.
    ///
    /// Exits with status 0 when all pass, 1 when some fail, and 2 when they could not be run: nothing to run, a system that
    /// does not load, no server, or a wrong command line.
    Test {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        /// A system's name; a test's or suite's, with its package (`my-tests::parsing`); or a package's, with a colon
        /// behind it.
        what: String,
    },
    /// A REPL for people, on an image of its own or that of a server that runs.
    ///
    /// Forms of several lines, history, completion (Tab), the debugger when something fails; `:help` lists commands.
    /// Ctrl-C interrupts what runs; twice within a second, it replaces the image and restores it. A person has time:
    /// --timeout is 0 unless it is given, --hold a day, --max-answer 1000000, whatever stands below. From a pipe or a
    /// file, without prompts: each form's values are printed, and it exits with status 1 when something failed, 2 for a
    /// wrong command line, and 3 when there is no server.
    Repl {
        /// Join a server that runs (`serve --socket`), by its name or the only one, and work on its image.
        #[arg(long, value_name = "NAME", num_args = 0..=1)]
        attach: Option<Option<String>>,
        #[command(flatten)]
        serve: Box<Serve>,
    },
    /// List the sessions that last, and the servers that can be joined; delete a session, or write its definitions.
    ///
    /// Of a session (`--session`): what it takes, how old it is, what it defines, and who has it. Of a server that runs
    /// (`--socket`): its name, for --attach, its process, and its clients.
    Sessions {
        #[command(subcommand)]
        action: Option<sessions::Action>,
    },
    /// Wait for the child that saves a session, and make a checkpoint of that: what goes on when a server has ended.
    #[command(hide = true)]
    FinishSaving {
        /// Where the session is.
        #[arg(long)]
        directory: PathBuf,
        /// The core that is being saved there.
        #[arg(long)]
        file: String,
        /// What the image calls itself.
        #[arg(long)]
        name: String,
        /// The number of its last evaluation.
        #[arg(long)]
        evaluation: u64,
        /// The heap that it is booted with, in bytes.
        #[arg(long)]
        heap: u64,
        /// Its control stack, in bytes.
        #[arg(long)]
        control_stack: u64,
    },
    /// Look whether everything is there that the server needs, and say what to do where it is not.
    ///
    /// Versions, paths, limits, memory, directories, a start and an evaluation, under the options that the server is to
    /// have. Exits with status 0 when everything works, 1 when something does not, 2 for a wrong command line, and 3 when
    /// that cannot be said.
    Doctor {
        #[command(flatten)]
        options: Options,
    },
    /// Play a recorded session (`--record`) against a new server, and show where answers differ.
    ///
    /// The requests in their order, each awaiting the answers that were there before it; times, addresses, process ids
    /// and scratch files may differ. What was evaluated then is evaluated again, whatever it does. Exits with status 0
    /// when all answers are the same, 1 when some are not, 2 for a wrong command line, and 3 when it cannot be played.
    Replay {
        /// What `--record` wrote.
        file: PathBuf,
        /// Options of the new server; default: those of the recorded one.
        #[arg(last = true)]
        options: Vec<OsString>,
    },
    /// Boot an image and print what it calls itself: how a checkpoint is tried.
    #[command(hide = true)]
    Probe {
        #[command(flatten)]
        options: Options,
    },
    /// Say what the reader would refuse in Lisp source, without evaluating it.
    ///
    /// Parentheses, by what the indentation says of where they went wrong, strings, comments, syntax; a line each,
    /// `file:line:column: error: message`, or `note` for what depends on what else is loaded. Exits with status 0 when
    /// the reader gets through (there may be notes), 1 when it does not, 2 for a wrong command line, and 3 when a file
    /// cannot be read or written.
    Check {
        /// Know the packages of a server that runs (`serve --socket`), by its name or the only one.
        #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
        attach: Option<Option<String>>,
        /// Put parentheses, quotes and comment marks where the indentation suggests, if the reader then gets through: files
        /// are changed in place, `-` is written to stdout. What is repaired counts as fine.
        #[arg(long)]
        fix: bool,
        /// Files, directories with Lisp source in them, or `-` for stdin.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Print what completes the command line in a shell, for that shell to read.
    #[command(hide = true)]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages, of the program and of each command, into a directory, which need not exist.
    #[command(hide = true)]
    Man {
        /// The directory.
        directory: PathBuf,
    },
    /// Run tests for a session, in an image beside it: what is asked comes on stdin, what came of it goes to stdout.
    #[command(hide = true)]
    Beside {
        #[command(flatten)]
        serve: Serve,
        /// As of the worker that asks: not for this one.
        #[arg(long)]
        status_fd: Option<i32>,
        /// As of the worker that asks: not for this one.
        #[arg(long)]
        scratch: Option<PathBuf>,
        /// As of the worker that asks: not for this one.
        #[arg(long)]
        checkpoint_directory: Option<PathBuf>,
        /// As of the worker that asks: not for this one.
        #[arg(long)]
        lock_fd: Option<i32>,
    },
    /// Serve Lisp to a supervisor: what `serve` starts, and starts again when Lisp dies.
    #[command(hide = true)]
    Worker {
        #[command(flatten)]
        serve: Serve,
        /// The number of the open file of what is shared with the supervisor.
        #[arg(long)]
        status_fd: i32,
        /// What the supervisor removes at the end.
        #[arg(long)]
        scratch: PathBuf,
        /// Where checkpoints are.
        #[arg(long)]
        checkpoint_directory: PathBuf,
        /// The number of the open file that a session that lasts is locked by.
        #[arg(long)]
        lock_fd: Option<i32>,
    },
}

/// Whose image.
#[derive(Debug, Args)]
struct Attach {
    /// Use the image of a server that runs (`serve --socket`), by its name or the only one.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
    attach: Option<Option<String>>,
}

/// How to serve.
#[derive(Debug, Args)]
struct Serve {
    #[command(flatten)]
    options: Options,
    /// Go on with the session of this name (or in this directory, when there is a slash in it), or begin it. Its image is
    /// saved when the server ends, and now and then. `sbcl-mcp sessions` lists them.
    #[arg(long, value_name = "NAME")]
    session: Option<OsString>,
    /// What comes back when the Lisp process dies and is replaced.
    #[arg(long, value_enum, default_value_t = Restore::Checkpoint)]
    restore: Restore,
    /// Save checkpoints of the server's own accord when the session is idle after work. What is in memory may be secret,
    /// and disks are small: hence not unless asked for.
    #[arg(long, value_enum, default_value_t = When::Asked)]
    checkpoints: When,
    /// How much disk checkpoints may take before the oldest automatic ones go, such as 4G.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G")]
    checkpoint_space: u64,
    /// Give results as structured content, too, with a schema for each tool. Some clients then hide the text.
    #[arg(long)]
    structured_content: bool,
    /// Which tools there are: `all`, `core` (evaluate or load, test, look at failures), or names with commas between. The
    /// others are not listed and cannot be called.
    #[arg(long, value_name = "TOOLS", value_parser = mcp::ToolSet::parse, default_value = "all")]
    tools: mcp::ToolSet,
    /// Have others join this session by a Unix socket of the user's, in XDG_RUNTIME_DIR: a person beside the agent.
    #[arg(long)]
    socket: bool,
    /// Run Lisp in this very process: what ends Lisp ends the server.
    #[arg(long)]
    no_supervisor: bool,
    /// Write every line of the session to this file, with times, both what the client says and what is answered: for bug
    /// reports, and for `sbcl-mcp replay`. It is its owner's alone, and may have 256 MiB.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The number of the open file with what this process takes over from the one that it was.
    #[arg(long, hide = true)]
    handover_fd: Option<i32>,
    /// Milliseconds between two looks at what the Lisp process does. Tests have no time for a second.
    #[arg(long, hide = true, value_name = "MS", default_value = "1000")]
    watch_interval: u64,
}

impl Serve {
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

    /// Where others may join, if they may: under the name of a session that lasts, else under the number of this process;
    /// or a sentence that says why they cannot.
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

/// When checkpoints are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum When {
    /// When the client asks.
    Asked,
    /// Also when the session is idle.
    Auto,
}

/// What comes back after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Restore {
    /// The last checkpoint, and the forms that defined something since are evaluated again.
    Checkpoint,
    /// All forms that defined something are evaluated again.
    Definitions,
    /// Nothing.
    None,
}

/// Sizes, limits, logging and what Lisp may not do.
#[derive(Debug, Args)]
struct Options {
    /// Time limit of an evaluation, 0 for none.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    timeout: Timeout,
    /// Characters of captured output an evaluation may keep.
    #[arg(long, value_name = "CHARS", default_value = "1000000", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_OUTPUT_RANGE.start()..=*Limits::MAX_OUTPUT_RANGE.end()
    ))]
    max_output: u64,
    /// Characters of one answer; the middle of longer output is left out, and can be asked for. No limit of `eval`.
    #[arg(long, value_name = "CHARS", default_value = "9500", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_ANSWER_RANGE.start()..=*Limits::MAX_ANSWER_RANGE.end()
    ))]
    max_answer: u64,
    /// How long a failed evaluation is held for debugging before it is released.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = hold)]
    hold: Duration,
    /// The Lisp heap, such as 8G or 512M. It is address space, not memory, until it is used.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "8G")]
    heap: u64,
    /// The control stack of an evaluation, such as 256M.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256M")]
    control_stack: u64,
    /// A directory with libsbcl.so and sbcl.core to use in place of the built-in ones.
    #[arg(long, value_name = "DIR")]
    core: Option<PathBuf>,
    /// A core that an image of this program has saved.
    #[arg(long, hide = true, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Load ~/.sbclrc at the start.
    #[arg(long)]
    user_init: bool,
    /// What to log on stderr, such as "debug".
    #[arg(long, value_name = "FILTER", env = "SBCL_MCP_LOG", default_value = "warn", value_parser = filter)]
    log: EnvFilter,
    #[command(flatten)]
    confinement: Confinement,
}

/// A time limit on the command line; `None` for none.
#[derive(Debug, Clone, Copy)]
struct Timeout(Option<Duration>);

impl Options {
    /// The checkpoints in `directory`, of images of this size.
    fn checkpoints(&self, directory: PathBuf) -> Checkpoints {
        Checkpoints::new(directory, self.heap, self.control_stack)
    }

    /// How the image is booted.
    fn image(&self, scratch: &Scratch) -> ImageConfig {
        ImageConfig {
            heap: self.heap,
            control_stack: self.control_stack,
            core_dir: self.core.clone(),
            image: self.image.clone(),
            user_init: self.user_init,
            scratch: Some(scratch.path().to_owned()),
        }
    }

    /// Boots Lisp, confined as was asked; or a sentence that says why not.
    fn session(&self, scratch: &Scratch, checkpoints: Option<&Checkpoints>) -> Result<Session, String> {
        self.confinement.apply(checkpoints)?;
        let limits = Limits {
            timeout: self.timeout.0,
            max_output: self.max_output,
            max_answer: self.max_answer,
            hold: self.hold,
            ..Limits::default()
        };
        Session::start(&self.image(scratch), limits).map_err(|error| error.to_string())
    }
}

/// The program `sbcl-mcp`.
pub fn main() -> ! {
    // Nothing but argument parsing runs before stdin and stdout are taken: help and version still go to stdout.
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse_arguments(&error));
    let status = match Stdio::take() {
        Ok(stdio) => match cli.command.unwrap_or(Command::Serve(cli.serve)) {
            Command::Serve(serve) if serve.no_supervisor => serve_alone(serve, stdio),
            Command::Serve(serve) => supervise(serve, stdio),
            Command::Worker { serve, status_fd, scratch, checkpoint_directory, lock_fd } => {
                work(serve, stdio, status_fd, Scratch::inherited(scratch), checkpoint_directory, lock_fd)
            }
            Command::Sessions { action } => {
                sessions::run(action, stdio.output).unwrap_or_else(|reason| complain(&reason))
            }
            Command::FinishSaving { directory, file, name, evaluation, heap, control_stack } => {
                let draft = Checkpoints::new(directory, heap, control_stack).draft(file);
                sessions::finish_saving(draft, name, evaluation).map_or_else(|reason| complain(&reason), |()| 0)
            }
            Command::Probe { options } => probe(options, stdio),
            Command::Check { attach, fix, files } => {
                let known = attach.map_or_else(|| Ok(Vec::new()), |name| packages_of(name.as_deref()));
                let checked = known.and_then(|known| check::run(&files, fix, known, stdio.input, stdio.output));
                checked.unwrap_or_else(|reason| {
                    say(&format!("sbcl-mcp check: {reason}"));
                    EVAL_IMPOSSIBLE
                })
            }
            Command::Repl { attach, serve } => repl(attach, serve.socket || serve.session.is_some(), stdio),
            Command::Load { attach, what, .. } => call_tool(attach, &tools::Request::Load(what), stdio),
            Command::Test { attach, what, .. } => call_tool(attach, &tools::Request::Test(what), stdio),
            Command::Doctor { options } => {
                let arguments = std::env::args_os().skip(1).skip_while(|argument| argument == "doctor").collect();
                doctor::run(&options.image(&Scratch::new()), arguments, stdio.output).unwrap_or_else(|reason| {
                    say(&reason);
                    EVAL_IMPOSSIBLE
                })
            }
            Command::Replay { file, options } => replay::run(&file, options, stdio.output).unwrap_or_else(|reason| {
                say(&format!("sbcl-mcp replay: {reason}"));
                EVAL_IMPOSSIBLE
            }),
            Command::Completions { shell } => pages::print_completions(shell, stdio.output),
            Command::Man { directory } => pages::write_manual(&directory),
            Command::Beside { serve, .. } => beside(serve.options, stdio),
            Command::Eval { attach, options, code } => match attach.attach {
                Some(name) => eval_attached(name, &code, stdio),
                None => eval(options, &code, stdio),
            },
        },
        Err(error) => complain(&format!("sbcl-mcp cannot take over stdin and stdout: {error}")),
    };
    // No exit handlers: they would run while Lisp's threads do.
    crate::exit_now(status)
}

/// Says what is wrong with the command line and ends the process, or prints what was asked for, as of `--help`.
fn refuse_arguments(error: &clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
        && SBCL_OPTIONS.contains(&option.as_str())
    {
        say(&format!(
            "sbcl-mcp serves SBCL to MCP clients and is no sbcl command: it has no option {option}. To evaluate code: \
             sbcl-mcp eval CODE, or `sbcl-mcp eval - <FILE`; for sbcl's own options, install and run sbcl."
        ));
        std::process::exit(2);
    }
    error.exit()
}

/// The whole server: a worker in a process of its own, and this one in front of it.
fn supervise(serve: Serve, stdio: Stdio) -> i32 {
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
fn work(
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
    let shared = match SharedStatus::take(status_fd) {
        Ok(shared) => shared,
        Err(error) => return complain(&format!("sbcl-mcp worker is started by sbcl-mcp serve: {error}")),
    };
    let started = outlive_nobody(&stdio, last_words, remove.clone())
        .and_then(|()| survive_accidents())
        .map_err(|error| error.to_string())
        .and_then(|()| serve.options.session(&scratch, Some(&checkpoints)));
    mcp::beside::allow(std::env::args_os().skip(1));
    let session = match started {
        Ok(session) => session,
        Err(error) => {
            let reason = format!("sbcl-mcp cannot start: {error}");
            let status = complain(&reason);
            let bye = handover::farewell(status, &reason);
            let _ = std::fs::File::from(stdio.output).write_all(&bye);
            return status;
        }
    };
    start_logging(serve.options.log);
    let offer = mcp::Offer { structured: serve.structured_content, tools: serve.tools };
    let saves = mcp::Saves { automatic, at_end };
    let (status, saver) = mcp::serve(stdio, &session, checkpoints, saves, shared, None, offer)
        .unwrap_or_else(|error| (complain(&format!("sbcl-mcp cannot serve: {error}")), None));
    supervisor::processes::end_all_but(&saver.into_iter().collect::<Vec<_>>());
    // There will be no other worker.
    if supervisor.is_ok_and(|input| has_hung_up(&input, Some(Timespec::default()))) {
        remove();
    }
    status
}

/// Waits, no longer than this, until nobody holds the other end of `input`, and returns whether that is so.
fn has_hung_up(input: &OwnedFd, wait: Option<Timespec>) -> bool {
    let mut descriptors = [PollFd::new(input, PollFlags::empty())];
    while poll(&mut descriptors, wait.as_ref()) == Err(rustix::io::Errno::INTR) {}
    descriptors[0].revents().contains(PollFlags::HUP)
}

/// Ends this process when its supervisor is gone, whatever became of that, and it has not ended by itself: it may be
/// stuck. What it leaves for nobody is removed by `remove`.
fn outlive_nobody(stdio: &Stdio, last_words: Duration, remove: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let input = out_of_the_way(&stdio.input)?;
    let wait = move || {
        has_hung_up(&input, None);
        std::thread::sleep(last_words);
        supervisor::processes::end_all();
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
        let text = include_str!("cli/terminal.txt").replace("{version}", version());
        let text = text.replace("{json}", &serde_json::json!(binary).to_string()).replace("{word}", &word);
        say(text.trim_end());
    }
}

/// Lisp in this very process, which takes its place with another image by becoming another one.
fn serve_alone(serve: Serve, stdio: Stdio) -> i32 {
    let origin = Origin::here();
    match begin_alone(serve, stdio, origin) {
        Ok(status) => status,
        Err((stdio, reason)) => refuse(stdio, &reason),
    }
}

/// Why there is no server, and the client that is to be told.
type Refusal = (Stdio, String);

fn begin_alone(mut serve: Serve, mut stdio: Stdio, origin: Origin) -> Result<i32, Refusal> {
    let inheritance = match serve.handover_fd.map(Inheritance::take).transpose() {
        Ok(inheritance) => inheritance,
        // There is no client to be told.
        Err(error) => return Ok(complain(&format!("sbcl-mcp cannot go on where it was: {error}"))),
    };
    let is_first = inheritance.is_none();
    let mut lock = None;
    let (scratch, mut directory) = match inheritance {
        None => (Scratch::new(), None),
        Some(ref inheritance) => {
            (Scratch::inherited(inheritance.scratch.clone()), Some(inheritance.checkpoints.clone()))
        }
    };
    let mut inheritance = inheritance;
    if let Some(inheritance) = &mut inheritance {
        lock = inheritance.lock.take();
        let duplicate = |fd: &OwnedFd| out_of_the_way(fd);
        match (duplicate(&inheritance.input), duplicate(&inheritance.output)) {
            (Ok(input), Ok(output)) => stdio = Stdio { input, output, recorder: None },
            _ => return Ok(complain("sbcl-mcp cannot go on where it was: no descriptor is left")),
        }
    }
    if is_first {
        greet(&stdio);
    }
    stdio.recorder = match (is_first, &serve.record) {
        (true, _) => match serve.recorder() {
            Ok(recorder) => recorder,
            Err(reason) => return Ok(complain(&format!("sbcl-mcp: {reason}"))),
        },
        (false, path) => path.as_deref().and_then(Recorder::go_on),
    };
    let durable = match (&serve.session, lock) {
        (None, _) => None,
        (Some(name), Some(lock)) => match Durable::named(name) {
            Ok(durable) => Some((durable, lock)),
            Err(reason) => return Err((stdio, reason)),
        },
        (Some(name), None) => match sessions::open(name, serve.restore, &stdio.input) {
            Ok(durable) => Some(durable),
            Err(reason) => return Err((stdio, reason)),
        },
    };
    let is_durable = durable.is_some();
    let directory = directory.take().unwrap_or_else(|| match &durable {
        Some((durable, _)) => durable.directory().to_owned(),
        None => Checkpoints::choose_directory(scratch.path()),
    });
    let at_end = match durable.as_ref().map(|(_, lock)| out_of_the_way(lock)) {
        None => None,
        Some(Ok(lock)) => Some(sessions::at_end_with(lock, &directory)),
        Some(Err(error)) => return Err((stdio, error.to_string())),
    };
    let listener = match serve.listener(durable.as_ref().map(|(durable, _)| &*durable.name)) {
        Ok(listener) => listener,
        Err(reason) => return Err((stdio, reason)),
    };
    mcp::beside::allow(std::env::args_os().skip(1));
    let checkpoints = serve.options.checkpoints(directory.clone());
    let options = supervisor::Options {
        arguments: Vec::new(),
        restore: serve.restore != Restore::None,
        checkpoints: checkpoints.clone(),
        begins_with_checkpoints: serve.restore == Restore::Checkpoint,
        durable,
        watch_interval: Duration::ZERO,
        recorder: None,
        listener: None,
    };
    let (alone, beginning) = match Alone::new(options, origin, scratch.path(), &directory, inheritance) {
        Ok(begun) => begun,
        Err(reason) => return Err((stdio, reason)),
    };
    serve.options.image = serve.options.image.or_else(|| alone.image());
    if !is_first {
        // What was taken away stays so.
        serve.options.confinement = Confinement::default();
    }
    let started = alone.status().map_err(|error| error.to_string());
    let started = started.and_then(|status| Ok((status, serve.options.session(&scratch, Some(&checkpoints))?)));
    let (shared, session) = match started {
        Ok(started) => started,
        Err(reason) => return Err((stdio, reason)),
    };
    start_logging(serve.options.log);
    let automatic = (serve.checkpoints == When::Auto || is_durable).then_some(serve.checkpoint_space);
    let saves = mcp::Saves { automatic, at_end };
    let Beginning { init, unread, unsent } = beginning;
    let begin = mcp::Begin { memory: Arc::new(alone), init, unread, unsent, listener };
    let offer = mcp::Offer { structured: serve.structured_content, tools: serve.tools };
    let (status, saver) = mcp::serve(stdio, &session, checkpoints.clone(), saves, shared, Some(begin), offer)
        .unwrap_or_else(|error| (complain(&format!("sbcl-mcp cannot serve: {error}")), None));
    if !is_durable {
        checkpoints.remove();
    }
    // What a program starts while it is ended.
    supervisor::processes::adopt_orphans();
    supervisor::processes::end_all_but(&saver.into_iter().collect::<Vec<_>>());
    scratch.remove();
    Ok(status)
}

/// What a process that ends with its image leaves behind for nobody.
fn clear_up(scratch: &Scratch) {
    // What a program starts while it is ended.
    supervisor::processes::adopt_orphans();
    supervisor::processes::end_all();
    scratch.remove();
}

/// Runs tests for the process that started this one, and ends when that does.
fn beside(options: Options, stdio: Stdio) -> i32 {
    let done = run_beside(options, stdio);
    done.map_or_else(|reason| complain(&format!("sbcl-mcp cannot run tests: {reason}")), |()| 0)
}

fn run_beside(options: Options, stdio: Stdio) -> Result<(), String> {
    // Its end is held open: there may be no more in it than the line.
    let input = stdio.input.try_clone().map_err(|error| error.to_string())?;
    let mut request = String::new();
    io::BufReader::new(std::fs::File::from(input)).read_line(&mut request).map_err(|error| error.to_string())?;
    let request: mcp::beside::Request = serde_json::from_str(&request).map_err(|error| error.to_string())?;
    let (tests, scratch) = (request.tests, Arc::new(Scratch::inherited(request.scratch)));
    let left = scratch.clone();
    outlive_nobody(&stdio, LAST_WORDS, move || left.remove()).map_err(|error| error.to_string())?;
    // Files, and no checkpoint.
    let options = Options { image: None, ..options };
    let session = options.session(&scratch, None)?;
    start_logging(options.log);
    let outcome = session.evaluate_operation(&tests.operation().with_errors(), tests.evaluation());
    clear_up(&scratch);
    let text = serde_json::to_vec(&outcome).map_err(|error| error.to_string())?;
    std::fs::File::from(stdio.output).write_all(&text).map_err(|error| error.to_string())
}

/// Boots and says what the image calls itself.
fn probe(options: Options, stdio: Stdio) -> i32 {
    let scratch = Scratch::new();
    let session = match options.session(&scratch, None) {
        Ok(session) => session,
        Err(error) => return complain(&format!("sbcl-mcp cannot start: {error}")),
    };
    let (name, defines) = session.image_name();
    let tried = serde_json::to_vec(&Tried { name, defines }).unwrap_or_default();
    let written = std::fs::File::from(stdio.output).write_all(&tried);
    clear_up(&scratch);
    i32::from(written.is_err())
}

/// A person's REPL, on an image of its own or that of a server that runs.
fn repl(attach: Option<Option<String>>, shared: bool, stdio: Stdio) -> i32 {
    let given = std::env::args_os().skip_while(|argument| argument != "repl").skip(1).collect();
    let talk = || {
        give_back(stdio).map_err(|error| format!("stdin and stdout cannot be used: {error}"))?;
        let joined = attach.clone().map(Option::unwrap_or_default);
        repl::run(client_of(attach, given)?, &repl::Options { joined, shared })
    };
    talk().unwrap_or_else(|reason| {
        say(&format!("sbcl-mcp repl: {reason}"));
        EVAL_IMPOSSIBLE
    })
}

/// A client of a server that runs, or else of a new one with these arguments.
fn client_of(attach: Option<Option<String>>, arguments: Vec<OsString>) -> Result<Client, String> {
    match attach {
        None => Client::start_with(for_person(arguments), std::process::Stdio::inherit())
            .map_err(|error| format!("no server can be started: {error}")),
        Some(name) => {
            let stream = crate::attach::connect(name.as_deref()).map_err(|error| error.to_string())?;
            let to = stream.try_clone().map_err(|error| error.to_string())?;
            Ok(Client::over(stream, to))
        }
    }
}

/// The packages of a server that runs, in upper case as a reader has them.
fn packages_of(name: Option<&str>) -> Result<Vec<String>, String> {
    let mut client = client_of(Some(name.map(str::to_owned)), Vec::new())?;
    let asked = client.initialize(client::START);
    let asked = asked.and_then(|_| client.request(crate::attach::PACKAGES, &serde_json::json!({}), client::START));
    let answer = asked.map_err(|failure| failure.to_string())?;
    let names = answer["packages"].as_array().into_iter().flatten();
    Ok(names.filter_map(|name| name.as_str().map(str::to_owned)).collect())
}

/// Calls a tool of a server that runs, or of one for this alone.
fn call_tool(attach: Attach, request: &tools::Request, stdio: Stdio) -> i32 {
    let (command, what) = match request {
        tools::Request::Load(what) => ("load", what),
        tools::Request::Test(what) => ("test", what),
        tools::Request::Evaluate(code) => ("eval", code),
    };
    let mut given: Vec<_> = std::env::args_os().skip_while(|argument| argument != command).skip(1).collect();
    // The rest is a server's.
    if let Some(at) = given.iter().rposition(|argument| *argument == **what) {
        given.remove(at);
    }
    given.retain(|argument| argument != "--");
    let done = client_of(attach.attach, given).and_then(|client| tools::run(client, request, stdio.output));
    done.unwrap_or_else(|reason| {
        say(&format!("sbcl-mcp {command}: {reason}"));
        CALL_IMPOSSIBLE
    })
}

/// Evaluates code in the image of a server that runs.
fn eval_attached(name: Option<String>, code: &[String], stdio: Stdio) -> i32 {
    let evaluated = || {
        let text = code_of(code, stdio.input)?;
        let client = client_of(Some(name), Vec::new())?;
        tools::run(client, &tools::Request::Evaluate(text), stdio.output)
    };
    evaluated().unwrap_or_else(|reason| {
        say(&format!("sbcl-mcp eval: {reason}"));
        EVAL_IMPOSSIBLE
    })
}

/// The code that arguments are, or stdin has.
fn code_of(code: &[String], input: OwnedFd) -> Result<String, String> {
    if code != ["-"] {
        return Ok(code.join("\n"));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::from(input).read_to_end(&mut bytes);
    read.map_err(|error| format!("sbcl-mcp cannot read stdin: {error}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Makes stdin and stdout what they were: Lisp is in another process.
fn give_back(stdio: Stdio) -> io::Result<()> {
    rustix::stdio::dup2_stdin(&stdio.input)?;
    rustix::stdio::dup2_stdout(&stdio.output)?;
    Ok(())
}

/// The arguments of a server for a person, who has time, a terminal that is not cut, and Ctrl-C; unless told otherwise.
fn for_person(given: Vec<OsString>) -> Vec<OsString> {
    let mut arguments = Vec::new();
    for (option, value) in [("--timeout", "0"), ("--hold", "86400"), ("--max-answer", "1000000"), ("--log", "error")] {
        let is_it = |argument: &OsString| {
            let argument = argument.to_string_lossy();
            argument.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        if !given.iter().any(is_it) {
            arguments.extend([OsString::from(option), OsString::from(value)]);
        }
    }
    arguments.extend(given);
    arguments
}

fn eval(options: Options, code: &[String], stdio: Stdio) -> i32 {
    eval_to_the_end(options, code, stdio).unwrap_or_else(|reason| {
        say(&reason);
        EVAL_IMPOSSIBLE
    })
}

/// Evaluates code; returns the exit status, or a sentence that says why there is no report.
fn eval_to_the_end(options: Options, code: &[String], stdio: Stdio) -> Result<i32, String> {
    let Stdio { input, output, .. } = stdio;
    let text = code_of(code, input)?;
    let scratch = Scratch::new();
    let session = options.session(&scratch, None).map_err(|error| format!("sbcl-mcp cannot start: {error}"))?;
    start_logging(options.log);
    let outcome = session.evaluate(Evaluation::new(text));
    let mut report = report::evaluation(&outcome);
    if !report.ends_with('\n') {
        report.push('\n');
    }
    let written = std::fs::File::from(output).write_all(report.as_bytes());
    clear_up(&scratch);
    written.map_err(|error| format!("sbcl-mcp cannot write the report: {error}"))?;
    Ok(i32::from(outcome.is_error()))
}

fn complain(reason: &str) -> i32 {
    say(reason);
    1
}

/// A line on stderr; that nobody may read it is no reason to fail, as `eprintln!` would, or to wait.
fn say(text: &str) {
    let _ = Log.write_all(format!("{text}\n").as_bytes());
}

fn start_logging(filter: EnvFilter) {
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Log).log_internal_errors(false).init();
}

fn version() -> &'static str {
    static VERSION: Lazy<String> = Lazy::new(|| format!("{} (SBCL {})", crate::VERSION, crate::SBCL_VERSION));
    &VERSION
}

fn timeout(text: &str) -> Result<Timeout, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Limits::timeout_from_seconds(seconds).map(Timeout).map_err(|error| error.to_string())
}

fn hold(text: &str) -> Result<Duration, String> {
    timeout(text)?.0.ok_or_else(|| "it needs an end".to_owned())
}

fn filter(text: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(text).map_err(|error| error.to_string())
}

/// Bytes, or a number with K, M, G or T behind it (binary: 1K is 1024).
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err("not a size: write 512M or 8G".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "not a size: write 512M or 8G".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
        let options = Cli::parse_from(["sbcl-mcp"]).serve.options;
        let image = ImageConfig::default();
        assert_eq!((options.heap, options.control_stack), (image.heap, image.control_stack));
        let limits = Limits::default();
        assert_eq!((options.timeout.0, options.max_output), (limits.timeout, limits.max_output));
        assert_eq!((options.max_answer, options.hold), (limits.max_answer, limits.hold));
    }

    #[test]
    fn sizes() {
        assert_eq!(size("8G"), Ok(8 << 30));
        assert_eq!(size("512m"), Ok(512 << 20));
        assert_eq!(size("4096"), Ok(4096));
        for wrong in ["", "G", "8X", "-1G", "1.5G", "99999999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
