//! The command line of `sbcl-mcp`.

mod arguments;
mod check;
mod client;
mod doctor;
mod editor;
mod evaluate;
pub mod exit_status;
mod fresh_image;
mod manual;
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
use crate::os::temporary::ScratchDirectory;
use crate::recovery::checkpoint::store::Checkpoints;
use crate::supervisor::log::{self, StderrLog};
use arguments::{Cli, Command};
use exit_status::{CANNOT_RUN, FAILED};

/// Runs the program `sbcl-mcp`.
pub fn main() -> ! {
    // The server learns from signals that a process has ended, and when to end itself.
    crate::image::signals::unblock_all();
    // Only argument parsing runs before stdin and stdout are taken, so that clap still writes help and version to
    // stdout.
    let command_line = Cli::command().try_get_matches().unwrap_or_else(|error| arguments::exit_with_error(&error));
    let cli = Cli::from_arg_matches(&command_line).unwrap_or_else(|error| arguments::exit_with_error(&error));
    arguments::refuse_server_options_with_attach(&command_line);
    let options = || arguments::server_options(&command_line);
    let timeout = || arguments::given_timeout(&command_line);
    let status = match Stdio::take() {
        Ok(stdio) => match cli.command.unwrap_or(Command::Serve(cli.serve)) {
            Command::Serve(serve) if serve.no_supervisor => serve::serve_without_supervisor(serve, stdio),
            Command::Serve(serve) => serve::supervise(serve, stdio),
            Command::Worker { serve, status_fd, scratch, checkpoint_directory, lock_fd } => serve::serve_as_worker(
                serve,
                stdio,
                status_fd,
                ScratchDirectory::inherited(scratch),
                checkpoint_directory,
                lock_fd,
            ),
            Command::Sessions { action } => {
                sessions::run(action, stdio.output).unwrap_or_else(|reason| report_failure(&reason))
            }
            Command::FinishSaving { directory, file, name, evaluation, heap, control_stack } => {
                let draft = Checkpoints::new(directory, heap, control_stack).draft(file);
                sessions::finish_saving(draft, name, evaluation).map_or_else(|reason| report_failure(&reason), |()| 0)
            }
            Command::Probe { options } => fresh_image::probe(options, stdio),
            Command::Check { attach, fix, files } => {
                let known = attach.map_or_else(|| Ok(Vec::new()), |name| client::packages_of(name.as_deref()));
                let checked = known.and_then(|known| check::run(&files, fix, known, stdio.input, stdio.output));
                checked.unwrap_or_else(|reason| {
                    print_to_stderr(&format!("sbcl-mcp check: {reason}"));
                    CANNOT_RUN
                })
            }
            Command::Repl { attach, serve } => {
                let shared = serve.socket || serve.session.is_some();
                repl::start(attach, options(), shared, timeout(), stdio)
            }
            Command::Load { attach, what, .. } => tools::connect_and_call(
                attach.attach,
                options(),
                &tools::ToolRequest::Load { what, timeout: timeout() },
                stdio,
            ),
            Command::Test { attach, tests, .. } => {
                tools::connect_and_call(attach.attach, options(), &tools::ToolRequest::Test(tests), stdio)
            }
            Command::Doctor { options: given } => {
                let config = given.image_config(&ScratchDirectory::new());
                doctor::run(&config, options(), stdio.output).unwrap_or_else(|reason| {
                    print_to_stderr(&reason);
                    CANNOT_RUN
                })
            }
            Command::Replay { file, options } => replay::run(&file, options, stdio.output).unwrap_or_else(|reason| {
                print_to_stderr(&format!("sbcl-mcp replay: {reason}"));
                CANNOT_RUN
            }),
            Command::Completions { shell } => manual::print_completions(shell, stdio.output),
            Command::Man { directory } => manual::write_manual(&directory),
            Command::FreshImage { serve, .. } => fresh_image::run(serve.options, stdio),
            Command::Eval { attach, options, code } => match attach.attach {
                Some(name) => evaluate::evaluate_in_attached_image(name, &code, timeout(), stdio),
                None => evaluate::evaluate_in_own_image(options, &code, stdio),
            },
        },
        Err(error) => report_failure(&format!("sbcl-mcp cannot set up stdin and stdout: {error}")),
    };
    // `exit_now` runs no exit handlers, since these handlers must not run while Lisp threads are running.
    crate::exit_now(status)
}

fn report_failure(reason: &str) -> i32 {
    print_to_stderr(reason);
    FAILED
}

/// Writes a line to stderr. Unlike `eprintln!`, the write neither fails nor blocks if nobody reads stderr.
fn print_to_stderr(text: &str) {
    let _ = StderrLog.write_all(format!("{text}\n").as_bytes());
}

fn start_logging(filter: EnvFilter) {
    log::redirect_c_code();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| StderrLog).log_internal_errors(false).init();
}

fn version() -> &'static str {
    static VERSION: Lazy<String> = Lazy::new(|| format!("{} (SBCL {})", crate::VERSION, crate::SBCL_VERSION));
    &VERSION
}
