//! What may stand on the command line.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::styling::Styles;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tracing_subscriber::EnvFilter;

use super::{say, sessions, version};
use crate::confinement::Confinement;
use crate::environment;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::scratch::Scratch;
use crate::{ImageConfig, Limits, Session, mcp};

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

/// What the limit of an evaluation is called.
const TIMEOUT: &str = "timeout";

/// A living Common Lisp session (SBCL) for AI agents: an MCP server on stdin and stdout.
#[derive(Debug, Parser)]
#[command(name = "sbcl-mcp", version = version(), styles = Styles::plain(), args_conflicts_with_subcommands = true)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) serve: Serve,
    #[command(subcommand)]
    pub(super) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
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
    /// Without --attach in an image of its own, which ends with it: that is how to see whether it loads. It may take 600
    /// seconds unless --timeout says otherwise, whatever stands below. Exits with status 0 when it is loaded, 1 when it is
    /// not, and 2 when that could not be tried: no server, or a wrong command line.
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
    /// Exits with status 0 when all pass, 1 when some fail, and 2 when they could not be run: nothing to run, or nothing but
    /// tests that are skipped, a system that does not load, no server, or a wrong command line. Of several systems each
    /// counts: 2 when one of them cannot be run, though the others are.
    Test {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        tests: Tests,
    },
    /// A REPL for people, on an image of its own or that of a server that runs.
    ///
    /// Forms of several lines, history, completion (Tab), the debugger when something fails; `:help` lists commands.
    /// Ctrl-C interrupts what runs; twice within a second, it replaces the image and restores it. A person has time:
    /// --timeout is 0 unless it is given (600 of `:load`), --hold a day, --max-answer 1000000, whatever stands below. From
    /// a pipe or a file, without prompts: each form's values are printed, and it exits with status 1 when something
    /// failed, 2 for a wrong command line, and 3 when there is no server.
    Repl {
        /// Join a server that runs (`serve --socket`), by its name or the only one, and work on its image.
        #[arg(long, value_name = "NAME", num_args = 0..=1)]
        attach: Option<Option<String>>,
        #[command(flatten)]
        serve: Box<Serve>,
    },
    /// List the persistent sessions, and the servers that can be joined; delete a session, or write its definitions.
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
        /// Know the packages of a server that runs (`serve --socket`): the only one, or the one of a name (--attach=NAME).
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
        /// The number of the open file that a persistent session is locked by.
        #[arg(long)]
        lock_fd: Option<i32>,
    },
}

/// Whose image.
#[derive(Debug, Args)]
pub(super) struct Attach {
    /// Use the image of a server that runs (`serve --socket`): the only one, or the one of a name (--attach=NAME; without =
    /// the name is none of its).
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
    pub(super) attach: Option<Option<String>>,
}

/// Which tests to run, and how.
#[derive(Debug, Args)]
pub(super) struct Tests {
    /// First load what has changed on disk: for --attach, whose image may have loaded it before.
    #[arg(long)]
    pub(super) reload: bool,
    /// Run them in a new image that loads the files alone, and name those that end otherwise in that of --attach.
    #[arg(long)]
    pub(super) fresh: bool,
    /// Show so many functions for each failing test that few passing ones ran, with the lines. Runs the tests once more.
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = clap::value_parser!(u64).range(
        ..=mcp::MAX_SUSPECTS
    ))]
    pub(super) suspects: u64,
    /// Time limit of each test, which then fails. An evaluation's, --timeout, is not for tests.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = test_timeout)]
    pub(super) test_timeout: f64,
    /// A system's name, or several; with --attach also a test's or suite's, with its package (`my-tests::parsing`), or a
    /// package's, with a colon behind it.
    #[arg(required = true)]
    pub(super) what: Vec<String>,
}

/// How to serve.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    pub(super) options: Options,
    /// Go on with the session of this name (or in this directory, when there is a slash in it), or begin it. Its image is
    /// saved when the server ends, and now and then. `sbcl-mcp sessions` lists them.
    #[arg(long, value_name = "NAME")]
    pub(super) session: Option<OsString>,
    /// What comes back when the Lisp process dies and is replaced.
    #[arg(long, value_enum, default_value_t = Restore::Checkpoint)]
    pub(super) restore: Restore,
    /// Save checkpoints of the server's own accord when the session is idle after work. What is in memory may be secret,
    /// and disks are small: hence not unless asked for.
    #[arg(long, value_enum, default_value_t = When::Asked)]
    pub(super) checkpoints: When,
    /// How much disk checkpoints may take before the oldest automatic ones go, such as 4G.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G")]
    pub(super) checkpoint_space: u64,
    /// Give results as structured content, too, with a schema for each tool. Some clients then hide the text.
    #[arg(long)]
    pub(super) structured_content: bool,
    /// Which tools there are: `all`, `core` (evaluate or load, test, look at failures), or names with commas between. The
    /// others are not listed and cannot be called.
    #[arg(long, value_name = "TOOLS", value_parser = mcp::ToolSet::parse, default_value = "all")]
    pub(super) tools: mcp::ToolSet,
    /// Have others join this session by a Unix socket of the user's, in XDG_RUNTIME_DIR: a person beside the agent.
    #[arg(long)]
    pub(super) socket: bool,
    /// Run Lisp in this very process: what ends Lisp ends the server. Neither --session nor restoring a checkpoint works then.
    #[arg(long)]
    pub(super) no_supervisor: bool,
    /// Write every line of the session to this file, with times, both what the client says and what is answered: for bug
    /// reports, and for `sbcl-mcp replay`. It is its owner's alone, and may have 256 MiB.
    #[arg(long, value_name = "FILE")]
    pub(super) record: Option<PathBuf>,
    /// Milliseconds between two looks at what the Lisp process does. Tests have no time for a second.
    #[arg(long, hide = true, value_name = "MS", default_value = "1000")]
    pub(super) watch_interval: u64,
}

/// When checkpoints are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum When {
    /// When the client asks.
    Asked,
    /// Also when the session is idle.
    Auto,
}

/// What comes back after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Restore {
    /// The last checkpoint, and the forms that defined something since are evaluated again.
    Checkpoint,
    /// All forms that defined something are evaluated again.
    Definitions,
    /// Nothing.
    None,
}

/// Sizes, limits, logging and what Lisp may not do.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Time limit of an evaluation, 0 for none.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(super) timeout: Timeout,
    /// Characters of captured output an evaluation may keep.
    #[arg(long, value_name = "CHARS", default_value = "1000000", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_OUTPUT_RANGE.start()..=*Limits::MAX_OUTPUT_RANGE.end()
    ))]
    pub(super) max_output: u64,
    /// Characters of one answer; the middle of longer output is left out, and can be asked for. No limit of `eval`.
    #[arg(long, value_name = "CHARS", default_value = "9500", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_ANSWER_RANGE.start()..=*Limits::MAX_ANSWER_RANGE.end()
    ))]
    pub(super) max_answer: u64,
    /// How long a failed evaluation is held for debugging before it is released.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = positive)]
    pub(super) hold: Duration,
    /// How long the cleanup forms of an interrupted evaluation may take before they are interrupted, too.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = positive)]
    pub(super) cleanup: Duration,
    /// The Lisp heap, such as 8G or 512M. It is address space, not memory, until it is used.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "8G")]
    pub(super) heap: u64,
    /// The control stack of an evaluation, such as 256M.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256M")]
    pub(super) control_stack: u64,
    /// A directory with the sbcl.core to use in place of the built-in one. It is used with the built-in libsbcl.so: another
    /// one in the directory is refused.
    #[arg(long, value_name = "DIR")]
    pub(super) core: Option<PathBuf>,
    /// A core that an image of this program has saved.
    #[arg(long, hide = true, value_name = "FILE")]
    pub(super) image: Option<PathBuf>,
    /// Load ~/.sbclrc at the start.
    #[arg(long)]
    pub(super) user_init: bool,
    /// What to log on stderr, such as "debug".
    #[arg(long, value_name = "FILTER", env = environment::LOG, default_value = "warn", value_parser = filter)]
    pub(super) log: EnvFilter,
    #[command(flatten)]
    pub(super) confinement: Confinement,
}

/// A time limit on the command line; `None` for none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeout(pub(super) Option<Duration>);

impl Options {
    /// The checkpoints in `directory`, of images of this size.
    pub(super) fn checkpoints(&self, directory: PathBuf) -> Checkpoints {
        Checkpoints::new(directory, self.heap, self.control_stack)
    }

    /// How the image is booted.
    pub(super) fn image(&self, scratch: &Scratch) -> ImageConfig {
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
    pub(super) fn session(&self, scratch: &Scratch, checkpoints: Option<&Checkpoints>) -> Result<Session, String> {
        self.confinement.apply(checkpoints)?;
        let limits = Limits {
            timeout: self.timeout.0,
            max_output: self.max_output,
            max_answer: self.max_answer,
            hold: self.hold,
            cleanup: self.cleanup,
            ..Limits::default()
        };
        Session::start(&self.image(scratch), limits).map_err(|error| error.to_string())
    }
}

/// The options of a server that the command line gives to a command, for a server that this process starts.
pub(super) fn of_server(command_line: &ArgMatches) -> Vec<OsString> {
    let Some((_, given)) = command_line.subcommand() else { return Vec::new() };
    let server = Serve::augment_args(clap::Command::new("serve"));
    let options = given.ids().filter_map(|id| {
        let option = server.get_arguments().find(|option| option.get_id() == id)?;
        let name = option.get_long().filter(|_| given.value_source(id.as_str()) == Some(ValueSource::CommandLine))?;
        Some((option, format!("--{name}"), given.get_raw(id.as_str())?))
    });
    let argument = |(option, name, values): (&clap::Arg, String, clap::parser::RawValues<'_>)| {
        if !option.get_action().takes_values() {
            return vec![OsString::from(name)];
        }
        values.map(|value| [OsStr::new(&name), value].join(OsStr::new("="))).collect()
    };
    options.flat_map(argument).collect()
}

/// The time limit that the command line gives to what a command has evaluated, in seconds, 0 for none.
pub(super) fn given_timeout(command_line: &ArgMatches) -> Option<f64> {
    let (_, given) = command_line.subcommand()?;
    let Timeout(limit) = given.get_one::<Timeout>(TIMEOUT)?;
    let is_given = given.value_source(TIMEOUT) == Some(ValueSource::CommandLine);
    is_given.then(|| limit.map_or(0.0, |limit| limit.as_secs_f64()))
}

/// Ends the process where a command is to join a server that runs, and gets options of one that it would start: they would
/// do nothing. A time limit is one of what is asked, unless those are tests, which have each its own.
pub(super) fn refuse_options_of_another_server(command_line: &ArgMatches) {
    let Some((command, given)) = command_line.subcommand() else { return };
    if !matches!(given.try_contains_id("attach"), Ok(true)) {
        return;
    }
    let passed_on = format!("--{TIMEOUT}=");
    let tests = command == "test";
    for option in of_server(command_line) {
        let option = option.to_string_lossy();
        let for_tests = if option.starts_with(&passed_on) { " A test's limit is --test-timeout." } else { "" };
        if for_tests.is_empty() || tests {
            let name = option.split('=').next().unwrap_or_default();
            say(&format!(
                "sbcl-mcp {command}: {name} is an option of a server, and with --attach that is one which runs, with \
                 options of its own.{for_tests}"
            ));
            std::process::exit(2);
        }
    }
}

/// Says what is wrong with the command line and ends the process, or prints what was asked for, as of `--help`.
pub(super) fn refuse(error: &clap::Error) -> ! {
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

fn timeout(text: &str) -> Result<Timeout, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Limits::timeout_from_seconds(seconds).map(Timeout).map_err(|error| error.to_string())
}

fn test_timeout(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    let allowed = mcp::TEST_TIMEOUT_RANGE;
    let is_one = allowed.contains(&seconds);
    is_one.then_some(seconds).ok_or_else(|| format!("not in {} to {}", allowed.start(), allowed.end()))
}

fn positive(text: &str) -> Result<Duration, String> {
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
        assert_eq!(options.cleanup, limits.cleanup);
    }

    #[test]
    fn options_of_a_server_are_handed_on() {
        let of = |line: &[&str]| of_server(&Cli::command().try_get_matches_from(line).expect("a command line"));
        let line =
            ["sbcl-mcp", "test", "--heap", "1G", "--attach=x", "--suspects", "3", "--no-network", "--log=debug", "x"];
        assert_eq!(
            of(&line).into_iter().collect::<std::collections::BTreeSet<_>>(),
            ["--heap=1G", "--log=debug", "--no-network"].map(OsString::from).into()
        );
        assert_eq!(of(&["sbcl-mcp", "test", "a", "b"]), [] as [OsString; 0]);
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
