//! The text of docs/reference/options.md, generated from the command line's definition.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::RangeInclusive;

use clap::builder::StyledStr;
use clap::{Arg, Command};

use super::manual::visible_command;
use crate::ImageConfig;
use crate::error::format_size;

/// Values that are too large or too small for an option with a range. The parser's error message for such a value names
/// the range.
const OUT_OF_RANGE: [&str; 2] = ["99999999999999", "0"];

/// Returns the description of all options and commands in Markdown.
#[must_use]
pub fn options() -> String {
    let program = visible_command();
    let server = program.find_subcommand("serve").expect("the command serve");
    let shared: BTreeSet<String> = server.get_arguments().map(argument_key).collect();
    let mut text = String::from(
        "## Options of the server\n\n`sbcl-mcp` and `sbcl-mcp serve` do the same and have these options:\n\n",
    );
    push_table(&mut text, "serve", server.get_arguments());
    for command in program.get_subcommands().filter(|command| command.get_name() != "serve") {
        push_description(&mut text, command, "sbcl-mcp", &shared);
    }
    text
}

/// Appends the description of a command and its subcommands. `shared` has the [`argument_key`] of each server option.
fn push_description(text: &mut String, command: &Command, parent: &str, shared: &BTreeSet<String>) {
    let name = format!("{parent} {}", command.get_name());
    let about = command.get_long_about().or_else(|| command.get_about()).map(plain_text).unwrap_or_default();
    _ = write!(text, "\n## {name}\n\n{}\n", with_full_stop(&about));
    let (of_server, own): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().partition(|argument| shared.contains(&argument_key(argument)));
    if !own.is_empty() {
        text.push('\n');
        push_table(text, command.get_name(), own.into_iter());
    }
    if of_server.len() == shared.len() {
        text.push_str("\nThis command also has all [options of the server](#options-of-the-server).\n");
    } else if !of_server.is_empty() {
        let names: Vec<_> = of_server.into_iter().map(|argument| format!("`{}`", usage(argument, false))).collect();
        _ = writeln!(
            text,
            "\nThis command also has these [options of the server](#options-of-the-server): {}.",
            names.join(", ")
        );
    }
    for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
        push_description(text, command, &name, shared);
    }
}

/// Appends a table of `arguments`, which belong to `command`.
fn push_table<'a>(text: &mut String, command: &str, arguments: impl Iterator<Item = &'a Arg>) {
    text.push_str("| option | default | range | meaning |\n|---|---|---|---|\n");
    for argument in arguments.filter(|argument| !matches!(argument.get_id().as_str(), "help" | "version")) {
        let defaults: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = if argument.get_action().takes_values() && !defaults.is_empty() {
            format!("`{}`", defaults.join(" "))
        } else {
            String::new()
        };
        let help = argument.get_long_help().or_else(|| argument.get_help()).map(plain_text).unwrap_or_default();
        let mut meaning = with_full_stop(&help);
        if let Some(variable) = argument.get_env() {
            _ = write!(meaning, " Environment variable: `{}`.", variable.to_string_lossy());
        }
        let range = accepted_values(command, argument);
        _ = writeln!(
            text,
            "| `{}` | {default} | {} | {} |",
            usage(argument, true),
            escape_cell(&range),
            escape_cell(&meaning)
        );
    }
}

/// Returns the values that an option accepts: its choices, its range, or an empty string if no range is known. Unless the
/// range is a constant of [`ImageConfig`], it is taken from the parser's error message.
fn accepted_values(command: &str, argument: &Arg) -> String {
    let choices: Vec<_> = argument.get_possible_values();
    if argument.get_action().takes_values() && !choices.is_empty() {
        let choice = |choice: &clap::builder::PossibleValue| {
            let help = choice.get_help().map(plain_text).unwrap_or_default();
            format!("`{}`: {help}", choice.get_name())
        };
        return choices.iter().map(choice).collect::<Vec<_>>().join("<br>");
    }
    let Some(long) = argument.get_long().filter(|_| argument.get_action().takes_values()) else { return String::new() };
    let bytes =
        |range: RangeInclusive<u64>| format!("{} to {}", format_size(*range.start()), format_size(*range.end()));
    match long {
        "heap" => return bytes(ImageConfig::HEAP_RANGE),
        "control-stack" => return bytes(ImageConfig::CONTROL_STACK_RANGE),
        _ => {}
    }
    let refusal = |value: &&str| {
        let line = ["sbcl-mcp", command, &format!("--{long}={value}"), "x"];
        let error = visible_command().try_get_matches_from(line).err()?.to_string();
        let range = error.lines().next()?.split_once(" not in ")?.1.to_owned();
        let range = range.strip_prefix("..=").map_or_else(|| range.clone(), |most| format!("0 to {most}"));
        Some(range.replacen("..=", " to ", 1))
    };
    OUT_OF_RANGE.iter().find_map(refusal).unwrap_or_default()
}

/// Returns an argument as a user writes it, with the name of its value if `with_value`.
fn usage(argument: &Arg, with_value: bool) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    let value = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
    match argument.get_long() {
        None => {
            format!("{}{}", value, if argument.get_num_args().is_some_and(|n| n.max_values() > 1) { "..." } else { "" })
        }
        Some(long) if !with_value || !argument.get_action().takes_values() => format!("--{long}"),
        Some(long) if argument.is_require_equals_set() => format!("--{long}[={value}]"),
        Some(long) if argument.get_num_args().is_some_and(|n| n.min_values() == 0) => format!("--{long} [{value}]"),
        Some(long) => format!("--{long} {value}"),
    }
}

/// Returns a key that is equal for options that several commands share.
fn argument_key(argument: &Arg) -> String {
    format!("{} {}", argument.get_id(), argument.get_help().map(plain_text).unwrap_or_default())
}

fn plain_text(text: &StyledStr) -> String {
    text.to_string()
}

/// Restores the full stop that clap removes from the end of help texts.
fn with_full_stop(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() || text.ends_with(['.', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}

/// Escapes text for a cell of a table.
fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
