//! The command line.

mod arguments;
mod beside;
mod check;
mod client;
mod doctor;
mod editor;
mod evaluate;
pub mod exit_status;
mod pages;
pub mod reference;
mod repl;
mod replay;
mod serve;
mod sessions;
mod tools;

use std::io::Write;

use clap::{CommandFactory, FromArgMatches};
use once_cell::sync::Lazy;
use tracing_subscriber::EnvFilter;

use crate::mcp::stdio::Stdio;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::scratch::Scratch;
use crate::supervisor::log::Log;
use arguments::{Cli, Command};
use exit_status::{FAILED, IMPOSSIBLE};

/// The program `sbcl-mcp`.
pub fn main() -> ! {
    // Nothing but argument parsing runs before stdin and stdout are taken: help and version still go to stdout.
    let command_line = Cli::command().try_get_matches().unwrap_or_else(|error| arguments::refuse(&error));
    let cli = Cli::from_arg_matches(&command_line).unwrap_or_else(|error| arguments::refuse(&error));
    arguments::refuse_options_of_another_server(&command_line);
    let options = || arguments::of_server(&command_line);
    let timeout = || arguments::given_timeout(&command_line);
    let status = match Stdio::take() {
        Ok(stdio) => match cli.command.unwrap_or(Command::Serve(cli.serve)) {
            Command::Serve(serve) if serve.no_supervisor => serve::plain(serve, stdio),
            Command::Serve(serve) => serve::supervise(serve, stdio),
            Command::Worker { serve, status_fd, scratch, checkpoint_directory, lock_fd } => {
                serve::work(serve, stdio, status_fd, Scratch::inherited(scratch), checkpoint_directory, lock_fd)
            }
            Command::Sessions { action } => {
                sessions::run(action, stdio.output).unwrap_or_else(|reason| complain(&reason))
            }
            Command::FinishSaving { directory, file, name, evaluation, heap, control_stack } => {
                let draft = Checkpoints::new(directory, heap, control_stack).draft(file);
                sessions::finish_saving(draft, name, evaluation).map_or_else(|reason| complain(&reason), |()| 0)
            }
            Command::Probe { options } => beside::probe(options, stdio),
            Command::Check { attach, fix, files } => {
                let known = attach.map_or_else(|| Ok(Vec::new()), |name| client::packages_of(name.as_deref()));
                let checked = known.and_then(|known| check::run(&files, fix, known, stdio.input, stdio.output));
                checked.unwrap_or_else(|reason| {
                    say(&format!("sbcl-mcp check: {reason}"));
                    IMPOSSIBLE
                })
            }
            Command::Repl { attach, serve } => {
                let shared = serve.socket || serve.session.is_some();
                repl::start(attach, options(), shared, timeout(), stdio)
            }
            Command::Load { attach, what, .. } => {
                tools::call(attach.attach, options(), &tools::Request::Load { what, timeout: timeout() }, stdio)
            }
            Command::Test { attach, tests, .. } => {
                tools::call(attach.attach, options(), &tools::Request::Test(tests), stdio)
            }
            Command::Doctor { options: given } => {
                let config = given.image(&Scratch::new());
                doctor::run(&config, options(), stdio.output).unwrap_or_else(|reason| {
                    say(&reason);
                    IMPOSSIBLE
                })
            }
            Command::Replay { file, options } => replay::run(&file, options, stdio.output).unwrap_or_else(|reason| {
                say(&format!("sbcl-mcp replay: {reason}"));
                IMPOSSIBLE
            }),
            Command::Completions { shell } => pages::print_completions(shell, stdio.output),
            Command::Man { directory } => pages::write_manual(&directory),
            Command::Beside { serve, .. } => beside::run(serve.options, stdio),
            Command::Eval { attach, options, code } => match attach.attach {
                Some(name) => evaluate::attached(name, &code, timeout(), stdio),
                None => evaluate::here(options, &code, stdio),
            },
        },
        Err(error) => complain(&format!("sbcl-mcp cannot take over stdin and stdout: {error}")),
    };
    // No exit handlers: they would run while Lisp's threads do.
    crate::exit_now(status)
}

fn complain(reason: &str) -> i32 {
    say(reason);
    FAILED
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
