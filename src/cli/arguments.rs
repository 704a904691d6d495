//! The definition of the command line, and its parsing.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::styling::Styles;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tracing_subscriber::EnvFilter;

use super::{print_to_stderr, sessions, version};
use crate::environment;
use crate::os::temporary::ScratchDirectory;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::sandbox::Confinement;
use crate::{ImageConfig, Limits, Session, mcp};

/// Options of the command `sbcl` that `sbcl-mcp` does not have. Lisp code that starts another Lisp with
/// `sb-ext:*runtime-pathname*` passes such options to `sbcl-mcp`, since the variable names this program.
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

/// The id of the option with the time limit of an evaluation.
const TIMEOUT_OPTION: &str = "timeout";

/// A long-running Common Lisp session (SBCL) for AI agents: an MCP server on stdin and stdout.
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
    /// Serve a session to an MCP client on stdin and stdout (the default command).
    Serve(Serve),
    /// Evaluate code and print the report.
    ///
    /// Exit status: 0 if the evaluation succeeded, 1 if it failed, 2 for a wrong command line or a refused request, 3
    /// if Lisp could not start, there is no server to attach to, the server ended, or stdin or stdout failed. Without
    /// --attach, 86 or 87 if Lisp crashed.
    Eval {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        /// Lisp code; several arguments are joined with newlines. `-` alone reads stdin.
        #[arg(required = true, allow_negative_numbers = true)]
        code: Vec<String>,
    },
    /// Load an ASDF system or a file, and print the report of the tool load-system.
    ///
    /// Without --attach, a new image loads the system or file and then ends: this tests whether the load succeeds. The
    /// time limit is 600 seconds unless --timeout is given. Exit status: 0 if the load succeeded, 1 if it failed, 2
    /// otherwise: no server, a server that ended, a refused request, a wrong command line, or a failure of stdout.
    Load {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        /// Name of a system, or a file.
        what: String,
    },
    /// Run tests and print the report of the tool run-tests.
    ///
    /// Exit status: 0 if no test fails, 1 if some fail, 2 if the tests could not be run: no tests or only skipped
    /// tests, a system that does not load, a crash of Lisp, no server, a server that ended, a refused request, a wrong
    /// command line, or a failure of stdout. With several systems, 2 also if one system does not load or has no tests,
    /// or if no test fails and one system has only skipped tests.
    Test {
        #[command(flatten)]
        attach: Attach,
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        tests: TestOptions,
    },
    /// Start a REPL for people, in an image of its own or in the image of a running server.
    ///
    /// The REPL has multi-line editing, history, completion (Tab) and the debugger; `:help` lists its commands. Ctrl-C
    /// interrupts an evaluation; Ctrl-C twice within a second replaces the image and restores the session as --restore
    /// says (not with --attach or --no-supervisor). Without --attach, the defaults suit a person: --timeout 0 (600 for
    /// `:load`), --hold a day, --max-answer 1000000. Unless stdin and stdout are terminals, there are no prompts, and
    /// the exit status is 1 if a form or command failed. Other exit statuses: 1 if the reader of stdout has ended, 2
    /// for a wrong command line, 3 if there is no server, the server ended, or stdin or stdout failed.
    Repl {
        /// Attach to a running server (started with --socket or --session): the only running server, or the server NAME.
        #[arg(long, value_name = "NAME", num_args = 0..=1)]
        attach: Option<Option<String>>,
        #[command(flatten)]
        serve: Box<Serve>,
    },
    /// List persistent sessions and running servers; delete or export a session.
    ///
    /// For a session (`--session`): its size, age, definitions and holder. For a running server (`--socket` or
    /// `--session`): its name (for --attach), process and clients.
    Sessions {
        #[command(subcommand)]
        action: Option<sessions::Action>,
    },
    /// Wait for the child process that saves a session, and make a checkpoint of the core. Runs when a server has ended.
    #[command(hide = true)]
    FinishSaving {
        /// Directory of the session.
        #[arg(long)]
        directory: PathBuf,
        /// File name of the core that is being saved in this directory.
        #[arg(long)]
        file: String,
        /// Name by which the image identifies itself.
        #[arg(long)]
        name: String,
        /// Number of the image's last evaluation.
        #[arg(long)]
        evaluation: u64,
        /// Heap size to boot the image with, in bytes.
        #[arg(long)]
        heap: u64,
        /// Control stack size to boot the image with, in bytes.
        #[arg(long)]
        control_stack: u64,
    },
    /// Check that the server has everything it needs, and say how to fix each problem.
    ///
    /// The checks cover versions, paths, limits, memory and directories; the command also starts a server with the given
    /// options and evaluates a form. Exit status: 0 if everything works, 1 if something does not, 2 for a wrong command
    /// line, 3 if the findings could not be written.
    Doctor {
        #[command(flatten)]
        options: Options,
    },
    /// Replay a recorded session (`--record`) against a new server, and show which answers differ.
    ///
    /// The requests are sent in order, each after the answers that came before it. Times, addresses, process ids and
    /// temporary files may differ. The recorded code is evaluated again, with its effects. Exit status: 0 if all
    /// compared answers are equal, 1 if some differ or are missing, 2 for a wrong command line, 3 if the recording
    /// cannot be replayed.
    Replay {
        /// File written by `--record`.
        file: PathBuf,
        /// Options of the new server; default: the options of the recorded server, except --record, --session and
        /// --socket.
        #[arg(last = true)]
        options: Vec<OsString>,
    },
    /// Boot an image and print its name and definitions, to test a checkpoint.
    #[command(hide = true)]
    Probe {
        #[command(flatten)]
        options: Options,
    },
    /// Report syntax errors in source files, without evaluating them.
    ///
    /// The findings are unbalanced parentheses (located by the indentation), unclosed strings and comments, and some other
    /// text that the Lisp reader would reject. Numbers, character names and the existence of symbols are not checked. Each
    /// finding is a line, `file:line:column: error: message`, with `note` instead of `error` if it depends on other code.
    /// Exit status: 0 if no errors were found (there may be notes), 1 if errors were found, 2 for a wrong command line, 3
    /// if a file, stdin or stdout cannot be read or written, there is no server to attach to, or the server ended.
    Check {
        /// Treat the packages of a running server (started with --socket or --session) as known: the only running server, or
        /// the server NAME (--attach=NAME).
        #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
        attach: Option<Option<String>>,
        /// Insert or remove parentheses, quotes and comment marks as the indentation suggests, if no errors are then
        /// found. Files are changed in place; for `-`, the text is written to stdout. A repaired file counts as correct.
        #[arg(long)]
        fix: bool,
        /// Files, directories with Lisp source, or `-` for stdin.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Print a shell's completion script for the command line.
    #[command(hide = true)]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages of the program and of each command into a directory, which is created if necessary.
    #[command(hide = true)]
    Man {
        /// The directory.
        directory: PathBuf,
    },
    /// Run tests for a server in a fresh image. Reads the request from stdin and writes the outcome to stdout.
    #[command(name = "beside", hide = true)]
    FreshImage {
        #[command(flatten)]
        serve: Serve,
        /// Accepted because the worker's arguments are passed on; ignored.
        #[arg(long)]
        status_fd: Option<i32>,
        /// Accepted because the worker's arguments are passed on; ignored.
        #[arg(long)]
        scratch: Option<PathBuf>,
        /// Accepted because the worker's arguments are passed on; ignored.
        #[arg(long)]
        checkpoint_directory: Option<PathBuf>,
        /// Accepted because the worker's arguments are passed on; ignored.
        #[arg(long)]
        lock_fd: Option<i32>,
    },
    /// Serve Lisp to a supervisor. `serve` runs this command at the start, and again to replace each Lisp process that
    /// has ended.
    #[command(hide = true)]
    Worker {
        #[command(flatten)]
        serve: Serve,
        /// File descriptor of the status page shared with the supervisor.
        #[arg(long)]
        status_fd: i32,
        /// Directory for temporary files, which the supervisor removes at the end.
        #[arg(long)]
        scratch: PathBuf,
        /// Directory of the checkpoints.
        #[arg(long)]
        checkpoint_directory: PathBuf,
        /// File descriptor that holds the lock of a persistent session.
        #[arg(long)]
        lock_fd: Option<i32>,
    },
}

/// The option that selects the image of a running server.
#[derive(Debug, Args)]
pub(super) struct Attach {
    /// Use the image of a running server (started with --socket or --session): the only running server, or the server NAME
    /// (--attach=NAME, with the =).
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true)]
    pub(super) attach: Option<Option<String>>,
}

/// The options and arguments of `test`.
#[derive(Debug, Args)]
pub(super) struct TestOptions {
    /// First load files that changed on disk; useful with --attach, since the attached image may have older versions.
    #[arg(long)]
    pub(super) reload: bool,
    /// Run the tests in a fresh image that only loads the files. With --attach, list the tests whose result differs in
    /// the attached image.
    #[arg(long)]
    pub(super) fresh: bool,
    /// For each failing test, list up to this many functions that few passing tests ran, with the lines. Runs the
    /// tests again.
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = clap::value_parser!(u64).range(
        ..=mcp::MAX_SUSPECTS
    ))]
    pub(super) suspects: u64,
    /// Time limit of each test, after which it fails. --timeout does not apply to tests.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_test_timeout)]
    pub(super) test_timeout: f64,
    /// Names of systems. With --attach, --core or --user-init, instead one test or suite with its package
    /// (`my-tests::parsing`), or one package followed by a colon.
    #[arg(required = true)]
    pub(super) what: Vec<String>,
}

/// The options of `serve`.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    pub(super) options: Options,
    /// Resume or create the persistent session NAME; if NAME contains a slash, it is the path of the session's directory.
    /// The session's image is saved when the server ends, and when the session is idle after work. `sbcl-mcp sessions`
    /// lists the sessions whose names contain no slash.
    #[arg(long, value_name = "NAME")]
    pub(super) session: Option<OsString>,
    /// State to restore after the Lisp process dies.
    #[arg(long, value_enum, default_value_t = RestoreMode::Checkpoint)]
    pub(super) restore: RestoreMode,
    /// When to save checkpoints; with --session always `auto`. Checkpoints contain everything in Lisp's memory, secrets
    /// included, and take disk space.
    #[arg(long, value_enum, default_value_t = CheckpointTiming::Asked)]
    pub(super) checkpoints: CheckpointTiming,
    /// Disk space for checkpoints, such as 4G, beyond which the oldest automatic checkpoints are deleted.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "4G")]
    pub(super) checkpoint_space: u64,
    /// Also send results as structured content, with a schema for each tool. Some clients then hide the text.
    #[arg(long)]
    pub(super) structured_content: bool,
    /// Tools to offer: `all`, `core` (evaluate, load, test, inspect failures), or names separated by commas. Other
    /// tools are not listed and cannot be called.
    #[arg(long, value_name = "TOOLS", value_parser = mcp::ToolSet::parse, default_value = "all")]
    pub(super) tools: mcp::ToolSet,
    /// Let other clients of this user, for example a person's REPL alongside the agent, attach through a Unix socket.
    /// The socket is below XDG_RUNTIME_DIR or, if this variable is not an absolute path, below the directory for
    /// temporary files.
    #[arg(long)]
    pub(super) socket: bool,
    /// Run Lisp in the server's own process, so that a crash of Lisp ends the server. Cannot be combined with
    /// --session; checkpoints are saved only when the client asks, and cannot be restored.
    #[arg(long)]
    pub(super) no_supervisor: bool,
    /// Record every message from and to the client on stdin and stdout, with times, in this file: for bug reports and
    /// `sbcl-mcp replay`. Only the file's owner can read the file; its size is at most 256 MiB.
    #[arg(long, value_name = "FILE")]
    pub(super) record: Option<PathBuf>,
    /// Milliseconds between two checks of the Lisp process.
    #[arg(long, hide = true, value_name = "MS", default_value = "1000")]
    pub(super) watch_interval: u64,
}

/// The occasions on which checkpoints are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CheckpointTiming {
    /// Only when the client asks.
    Asked,
    /// When the client asks, and when the session is idle after work.
    Auto,
}

/// The state that is restored after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RestoreMode {
    /// The last checkpoint, if any; forms that defined something since are evaluated again.
    Checkpoint,
    /// All forms that defined something are evaluated again.
    Definitions,
    /// Nothing.
    None,
}

/// Options that concern the image: sizes, limits, logging and confinement.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Time limit of an evaluation, 0 for none.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_timeout)]
    pub(super) timeout: Timeout,
    /// Maximum characters of output kept for each evaluation.
    #[arg(long, value_name = "CHARS", default_value = "1000000", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_OUTPUT_RANGE.start()..=*Limits::MAX_OUTPUT_RANGE.end()
    ))]
    pub(super) max_output: u64,
    /// Maximum characters of one answer; the middle of longer output is left out and can be requested. The default of
    /// `load`, `test` and `repl` is 1000000. `eval` without --attach ignores this limit.
    #[arg(long, value_name = "CHARS", default_value = "9500", value_parser = clap::value_parser!(u64).range(
        *Limits::MAX_ANSWER_RANGE.start()..=*Limits::MAX_ANSWER_RANGE.end()
    ))]
    pub(super) max_answer: u64,
    /// Maximum time for which a failed evaluation is held for debugging.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = parse_positive_duration)]
    pub(super) hold: Duration,
    /// Grace period for the cleanup forms of an interrupted evaluation, after which the forms are interrupted, too.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_positive_duration)]
    pub(super) cleanup: Duration,
    /// Size of the Lisp heap, such as 8G or 512M: address space, which takes memory only as it is used.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "8G")]
    pub(super) heap: u64,
    /// Size of each evaluation's control stack, such as 256M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256M")]
    pub(super) control_stack: u64,
    /// Directory with an sbcl.core to boot in place of the built-in core. A directory with another libsbcl.so is
    /// refused.
    #[arg(long, value_name = "DIR")]
    pub(super) core: Option<PathBuf>,
    /// A core that an image of this program has saved.
    #[arg(long, hide = true, value_name = "FILE")]
    pub(super) image: Option<PathBuf>,
    /// Load ~/.sbclrc into each new image, except an image that continues from a checkpoint.
    #[arg(long)]
    pub(super) user_init: bool,
    /// Log filter for stderr, such as "debug". The default of `load`, `test` and `repl` is "error".
    #[arg(long, value_name = "FILTER", env = environment::LOG_FILTER, default_value = "warn", value_parser = parse_log_filter)]
    pub(super) log: EnvFilter,
    #[command(flatten)]
    pub(super) confinement: Confinement,
}

/// A time limit from the command line; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeout(pub(super) Option<Duration>);

impl Options {
    /// Returns the checkpoints in `directory`, for images with this heap and control stack.
    pub(super) fn checkpoints(&self, directory: PathBuf) -> Checkpoints {
        Checkpoints::new(directory, self.heap, self.control_stack)
    }

    /// Returns the configuration to boot the image with.
    pub(super) fn image_config(&self, scratch: &ScratchDirectory) -> ImageConfig {
        ImageConfig {
            heap: self.heap,
            control_stack: self.control_stack,
            core_dir: self.core.clone(),
            image: self.image.clone(),
            user_init: self.user_init,
            scratch: Some(scratch.path().to_owned()),
        }
    }

    /// Boots Lisp, confined as requested. The directory of `checkpoints` stays writable.
    ///
    /// # Errors
    /// Returns a sentence if the process cannot be confined or Lisp cannot be booted.
    pub(super) fn boot_session(
        &self,
        scratch: &ScratchDirectory,
        checkpoints: Option<&Checkpoints>,
    ) -> Result<Session, String> {
        self.confinement.apply(checkpoints)?;
        let limits = Limits {
            timeout: self.timeout.0,
            max_output: self.max_output,
            max_answer: self.max_answer,
            hold: self.hold,
            cleanup: self.cleanup,
            ..Limits::default()
        };
        Session::start(&self.image_config(scratch), limits).map_err(|error| error.to_string())
    }
}

/// Returns the server options given to a command, each as `--name=value` or, for a flag, `--name`. A command passes these
/// options to the server that it starts.
pub(super) fn server_options(command_line: &ArgMatches) -> Vec<OsString> {
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

/// Returns the time limit given for an evaluation, in seconds, 0 for none; `None` if no limit was given.
pub(super) fn given_timeout(command_line: &ArgMatches) -> Option<f64> {
    let (_, given) = command_line.subcommand()?;
    let Timeout(limit) = given.get_one::<Timeout>(TIMEOUT_OPTION)?;
    let is_given = given.value_source(TIMEOUT_OPTION) == Some(ValueSource::CommandLine);
    is_given.then(|| limit.map_or(0.0, |limit| limit.as_secs_f64()))
}

/// Ends the process with an error if --attach is combined with server options, which have no effect on a running server.
/// A time limit is allowed, since it belongs to the request, except for `test`: each test has its own limit.
pub(super) fn refuse_server_options_with_attach(command_line: &ArgMatches) {
    let Some((command, given)) = command_line.subcommand() else { return };
    if !matches!(given.try_contains_id("attach"), Ok(true)) {
        return;
    }
    let passed_on = format!("--{TIMEOUT_OPTION}=");
    let tests = command == "test";
    for option in server_options(command_line) {
        let option = option.to_string_lossy();
        let for_tests =
            if option.starts_with(&passed_on) { " For a test's time limit use --test-timeout." } else { "" };
        if for_tests.is_empty() || tests {
            let name = option.split('=').next().unwrap_or_default();
            print_to_stderr(&format!(
                "sbcl-mcp {command}: {name} is a server option and cannot be combined with --attach, since the \
                 running server has its own options.{for_tests}"
            ));
            std::process::exit(2);
        }
    }
}

/// Reports an error of the command line, or prints the requested help or version, and ends the process.
pub(super) fn exit_with_error(error: &clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
        && SBCL_OPTIONS.contains(&option.as_str())
    {
        print_to_stderr(&format!(
            "sbcl-mcp serves SBCL to MCP clients and is not a replacement for sbcl: it has no option {option}. To \
             evaluate code: `sbcl-mcp eval CODE`, or `sbcl-mcp eval - <FILE`; to load a file: `sbcl-mcp load FILE`; to \
             set the sizes of the heap and the stacks: `--heap` and `--control-stack`; for sbcl's other options, \
             install and run sbcl."
        ));
        std::process::exit(2);
    }
    error.exit()
}

fn parse_timeout(text: &str) -> Result<Timeout, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Limits::timeout_from_seconds(seconds).map(Timeout).map_err(|error| error.to_string())
}

fn parse_test_timeout(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    let allowed = mcp::TEST_TIMEOUT_RANGE;
    let is_allowed = allowed.contains(&seconds);
    is_allowed
        .then_some(seconds)
        .ok_or_else(|| format!("not between {} and {} seconds", allowed.start(), allowed.end()))
}

fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    let duration = Limits::timeout_from_seconds(seconds).ok().flatten();
    duration.ok_or_else(|| format!("not a number of seconds above 0, up to {}", Limits::MAX_TIMEOUT_SECONDS))
}

fn parse_log_filter(text: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(text).map_err(|error| error.to_string())
}

/// Parses a number of bytes, optionally followed by K, M, G or T (binary: 1K is 1024).
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err("not a size: write a whole number and a unit, such as 512M".to_owned()),
    };
    let number: u64 =
        digits.parse().map_err(|_| "not a size: write a whole number and a unit, such as 512M".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_defaults_are_the_library_defaults() {
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
    fn server_options_given_to_a_command_are_passed_on() {
        let of = |line: &[&str]| server_options(&Cli::command().try_get_matches_from(line).expect("a command line"));
        let line =
            ["sbcl-mcp", "test", "--heap", "1G", "--attach=x", "--suspects", "3", "--no-network", "--log=debug", "x"];
        assert_eq!(
            of(&line).into_iter().collect::<std::collections::BTreeSet<_>>(),
            ["--heap=1G", "--log=debug", "--no-network"].map(OsString::from).into()
        );
        assert_eq!(of(&["sbcl-mcp", "test", "a", "b"]), [] as [OsString; 0]);
    }

    #[test]
    fn sizes_have_binary_suffixes() {
        assert_eq!(parse_size("8G"), Ok(8 << 30));
        assert_eq!(parse_size("512m"), Ok(512 << 20));
        assert_eq!(parse_size("4096"), Ok(4096));
        for wrong in ["", "G", "8X", "-1G", "1.5G", "99999999999T"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
