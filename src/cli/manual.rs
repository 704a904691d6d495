//! Manual pages and shell completions, generated from the command line's definition.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::arguments::Cli;
use super::report_failure;

/// Returns the command line without hidden commands and options, which clap's generators would include.
pub(super) fn visible_command() -> Command {
    without_hidden(&Cli::command()).version(super::version())
}

fn without_hidden(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let mut visible =
        Command::new(command.get_name().to_owned()).args(arguments).subcommands(commands.map(without_hidden));
    if let Some(about) = command.get_about() {
        visible = visible.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        visible = visible.long_about(about.clone());
    }
    visible
}

/// Prints the completions for a shell and returns the exit status.
pub(super) fn print_completions(shell: Shell, output: OwnedFd) -> i32 {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut visible_command(), "sbcl-mcp", &mut text);
    exit_status_of_write(File::from(output).write_all(&text), "the completions to stdout")
}

/// Writes one manual page per command, such as `sbcl-mcp.1` and `sbcl-mcp-eval.1`, and returns the exit status.
pub(super) fn write_manual(directory: &Path) -> i32 {
    let written = fs::create_dir_all(directory).and_then(|()| clap_mangen::generate_to(visible_command(), directory));
    exit_status_of_write(written, &format!("the manual pages to {}", directory.display()))
}

fn exit_status_of_write(written: io::Result<()>, what: &str) -> i32 {
    written.map_or_else(|error| report_failure(&format!("sbcl-mcp cannot write {what}: {error}")), |()| 0)
}
