//! The line editor of the REPL: multi-line forms, history, completion, colours.

use std::borrow::Cow;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nu_ansi_term::{Color, Style};
use reedline::{
    ColumnarMenu, Completer, DefaultHinter, Emacs, ExternalPrinter, FileBackedHistory, Highlighter, KeyCode,
    KeyModifiers, MenuBuilder, Prompt, PromptEditMode, PromptHistorySearch, Reedline, ReedlineEvent, ReedlineMenu,
    Signal, Span, StyledText, Suggestion, ValidationResult, Validator, default_emacs_keybindings,
};
use serde_json::json;

use super::client::Client;
use super::repl::COMMANDS;
use crate::recovery::checkpoint::store::state_directory;
use lisp_syntax::{HighlightKind, highlights, is_unfinished};

/// Maximum number of history entries.
const MAX_HISTORY: usize = 2_000;
/// Maximum length of text that is coloured, in bytes; also used to bound the history file.
const MAX_HIGHLIGHTED_BYTES: usize = 64 << 10;
/// Maximum time to wait for completions. The editor does not react to keys meanwhile.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of completions shown.
const MAX_COMPLETIONS: usize = 100;
/// Maximum length of a completion's description, in columns.
const DESCRIPTION_COLUMNS: usize = 70;

/// Input typed by a person.
pub(super) enum Input {
    Text(String),
    /// Input that was abandoned with Ctrl-C.
    Cancelled,
    End,
}

/// A line editor at the terminal.
pub(super) struct Editor(Reedline);

impl Editor {
    /// Creates an editor that completes by asking `client`, with colours if `colours` is true. Shows `notices` above
    /// the prompt as they arrive. Without a usable history file, history is kept in memory.
    pub(super) fn new(client: Arc<Mutex<Client>>, colours: bool, notices: Option<ExternalPrinter<String>>) -> Self {
        let mut keybindings = default_emacs_keybindings();
        let menu = ["completions", "next"];
        keybindings.add_binding(
            KeyModifiers::NONE,
            KeyCode::Tab,
            ReedlineEvent::UntilFound(vec![ReedlineEvent::Menu(menu[0].to_owned()), ReedlineEvent::MenuNext]),
        );
        let plain = Style::new();
        let completions = ColumnarMenu::default()
            .with_name(menu[0])
            .with_columns(1)
            // The marker takes the place of the prompt's indicator.
            .with_marker(" ")
            .with_text_style(plain)
            .with_selected_text_style(Style::new().reverse())
            .with_description_text_style(if colours { Style::new().dimmed() } else { plain });
        let hint = if colours { Style::new().dimmed() } else { plain };
        let editor = Reedline::create()
            .with_validator(Box::new(FormValidator))
            .with_highlighter(Box::new(SyntaxHighlighter(colours)))
            .with_completer(Box::new(ReplCompleter(client)))
            .with_menu(ReedlineMenu::EngineCompleter(Box::new(completions)))
            .with_quick_completions(true)
            .with_partial_completions(true)
            .with_ansi_colors(colours)
            .use_bracketed_paste(true)
            .with_history_exclusion_prefix(Some(" ".to_owned()))
            .with_edit_mode(Box::new(Emacs::new(keybindings)));
        // Without colours, a hint would look like typed text.
        let editor =
            if colours { editor.with_hinter(Box::new(DefaultHinter::default().with_style(hint))) } else { editor };
        // reedline polls the external printer ten times a second, and prints new notices above the prompt.
        let editor = if let Some(notices) = notices { editor.with_external_printer(notices) } else { editor };
        let history = history_file().ok().and_then(|file| FileBackedHistory::with_file(MAX_HISTORY, file).ok());
        Self(match history {
            Some(history) => editor.with_history(Box::new(history)),
            None => editor,
        })
    }

    /// Reads a form or a command.
    ///
    /// # Errors
    /// Returns an error if the terminal cannot be read.
    pub(super) fn read(&mut self, prompt: &str) -> io::Result<Input> {
        let typed = match self.0.read_line(&PromptText(prompt.to_owned()))? {
            Signal::Success(text) => Input::Text(text),
            Signal::CtrlD => Input::End,
            _ => Input::Cancelled,
        };
        // The history is written after each line, so that the history survives if the process is killed.
        let _ = self.0.sync_history();
        Ok(typed)
    }
}

/// Creates the history file, if missing, and its directory, both accessible to their owner only. Returns the path.
fn history_file() -> io::Result<PathBuf> {
    let directory = state_directory().ok_or(io::ErrorKind::NotFound)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    let path = directory.join("history");
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    // The number of entries is limited, but not their length: an excessively large file is emptied.
    if file.metadata()?.len() > (MAX_HISTORY * MAX_HIGHLIGHTED_BYTES / 16) as u64 {
        file.set_len(0)?;
    }
    Ok(path)
}

/// The text of a prompt.
struct PromptText(String);

impl Prompt for PromptText {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        self.0.as_str().into()
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        "".into()
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        " ".into()
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        // Continuation lines begin with spaces, so that text copied from the terminal is valid Lisp.
        " ".repeat(self.0.chars().count() + 1).into()
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        format!(" (search: {}) ", search.term).into()
    }
}

/// A validator that lets Enter submit only a complete form or a command.
struct FormValidator;

impl Validator for FormValidator {
    fn validate(&self, text: &str) -> ValidationResult {
        let is_command = text.trim_start().starts_with(':') && !text.contains('\n') && !text.contains('(');
        if !is_command && is_unfinished(text) { ValidationResult::Incomplete } else { ValidationResult::Complete }
    }
}

/// A highlighter of strings, keywords, and the pair of parentheses at the cursor. The field is true if colours are shown.
struct SyntaxHighlighter(bool);

impl Highlighter for SyntaxHighlighter {
    fn highlight(&self, text: &str, cursor: usize) -> StyledText {
        let mut styled = StyledText::new();
        let mut done = 0;
        if self.0 && text.len() <= MAX_HIGHLIGHTED_BYTES {
            for (range, part) in highlights(text) {
                // The cursor is on the parenthesis or just after it.
                let is_at_cursor = |at: usize| at == cursor || at + 1 == cursor;
                let style = match part {
                    HighlightKind::Text => Style::new().fg(Color::Green),
                    HighlightKind::Keyword => Style::new().fg(Color::Cyan),
                    HighlightKind::Parenthesis { partner } if is_at_cursor(range.start) || is_at_cursor(partner) => {
                        Style::new().bold()
                    }
                    HighlightKind::Parenthesis { .. } => continue,
                };
                if range.start >= done {
                    styled.push((Style::new(), text[done..range.start].to_owned()));
                    styled.push((style, text[range.clone()].to_owned()));
                    done = range.end;
                }
            }
        }
        styled.push((Style::new(), text[done..].to_owned()));
        styled
    }
}

/// A completer for commands and symbols. Finds symbols with the server's tool `find-symbols`.
struct ReplCompleter(Arc<Mutex<Client>>);

impl Completer for ReplCompleter {
    fn complete(&mut self, text: &str, cursor: usize) -> Vec<Suggestion> {
        let before = &text[..cursor];
        let is_delimiter = |c: char| c.is_whitespace() || "()'`,\"|;".contains(c);
        let start = before.rfind(is_delimiter).map_or(0, |at| at + 1);
        let start = if before[start..].starts_with("#'") { start + 2 } else { start };
        let typed = &before[start..];
        let span = Span::new(start, cursor);
        let suggest = |value: String, description: Option<String>| Suggestion {
            value,
            description,
            span,
            append_whitespace: false,
            ..Suggestion::default()
        };
        if typed.starts_with(':') {
            let at_line_start = before[..start].trim().is_empty();
            let commands = COMMANDS.iter().filter(|command| at_line_start && command.name.starts_with(typed));
            return commands
                .map(|command| suggest(command.name.to_owned(), Some(command.summary.to_owned())))
                .collect();
        }
        // For empty text `find-symbols` would list all symbols, and in other text it would take `*` and `?` as
        // wildcards.
        if typed.is_empty() || typed.contains(['*', '?']) && !typed.starts_with('*') {
            return Vec::new();
        }
        // The asterisks around a special variable are part of its name. In the query, `?` matches each of them.
        let query = format!("{}*", typed.replace('*', "?"));
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let arguments = json!({"query": query, "limit": 200});
        let Ok(found) = client.call_for_person("find-symbols", &arguments, COMPLETION_TIMEOUT) else {
            return Vec::new();
        };
        let lower = typed.to_lowercase();
        let mut suggestions: Vec<_> = found.content["symbols"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|symbol| {
                let name = symbol["name"].as_str()?;
                name.to_lowercase().starts_with(&lower).then_some(())?;
                let kind = symbol["kind"].as_str().unwrap_or_default();
                if kind == "package" {
                    return Some(suggest(format!("{}:", name.trim_end_matches(':')), Some(kind.to_owned())));
                }
                let description = [symbol["lambdaList"].as_str(), symbol["documentation"].as_str()];
                let description: Vec<_> = description.into_iter().flatten().collect();
                let description = if description.is_empty() { kind.to_owned() } else { description.join("  ") };
                Some(suggest(name.to_owned(), Some(description.chars().take(DESCRIPTION_COLUMNS).collect())))
            })
            .collect();
        // Symbols without a package prefix come first, and shorter names come before longer names.
        suggestions.sort_by_key(|suggestion| (suggestion.value.contains(':'), suggestion.value.len()));
        suggestions.dedup_by(|one, other| one.value == other.value);
        suggestions.truncate(MAX_COMPLETIONS);
        suggestions
    }
}
