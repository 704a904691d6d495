//! The line editor of the REPL: forms of several lines, history, completion, colours.

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
use lisp_syntax::{Part, is_unfinished, parts};

/// Entries of the history.
const HISTORY: usize = 2_000;
/// Longer texts are not kept in it, and not coloured: in bytes.
const LONGEST: usize = 64 << 10;
/// How long a completion may take: somebody waits for the key to do something.
const COMPLETION: Duration = Duration::from_secs(1);
/// How many completions are shown.
const MOST: usize = 100;
/// Columns of a completion's description.
const DESCRIPTION: usize = 70;

/// What a person typed.
pub(super) enum Typed {
    Text(String),
    /// Nothing: what was begun is given up.
    Nothing,
    End,
}

/// Reads what a person types.
pub(super) struct Editor(Reedline);

impl Editor {
    /// An editor that completes by asking `client`; with `colours`, if they are wanted. What cannot be kept as history is
    /// forgotten.
    /// With `notices`, it shows those above what is typed, as they come.
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
            // In the place of the prompt's indicator.
            .with_marker(" ")
            .with_text_style(plain)
            .with_selected_text_style(Style::new().reverse())
            .with_description_text_style(if colours { Style::new().dimmed() } else { plain });
        let hint = if colours { Style::new().dimmed() } else { plain };
        let editor = Reedline::create()
            .with_validator(Box::new(Parentheses))
            .with_highlighter(Box::new(Colours(colours)))
            .with_completer(Box::new(Symbols(client)))
            .with_menu(ReedlineMenu::EngineCompleter(Box::new(completions)))
            .with_quick_completions(true)
            .with_partial_completions(true)
            .with_ansi_colors(colours)
            .use_bracketed_paste(true)
            .with_history_exclusion_prefix(Some(" ".to_owned()))
            .with_edit_mode(Box::new(Emacs::new(keybindings)));
        // Without colours a hint looks as if it were typed.
        let editor =
            if colours { editor.with_hinter(Box::new(DefaultHinter::default().with_style(hint))) } else { editor };
        // It looks for them ten times a second.
        let editor = if let Some(notices) = notices { editor.with_external_printer(notices) } else { editor };
        let history = history_file().ok().and_then(|file| FileBackedHistory::with_file(HISTORY, file).ok());
        Self(match history {
            Some(history) => editor.with_history(Box::new(history)),
            None => editor,
        })
    }

    /// Reads a form, or a command.
    ///
    /// # Errors
    /// Those of the terminal.
    pub(super) fn read(&mut self, prompt: &str) -> io::Result<Typed> {
        let typed = match self.0.read_line(&Words(prompt.to_owned()))? {
            Signal::Success(text) => Typed::Text(text),
            Signal::CtrlD => Typed::End,
            _ => Typed::Nothing,
        };
        // A process that is killed leaves a history, too.
        let _ = self.0.sync_history();
        Ok(typed)
    }
}

/// The history's file, which is its owner's alone, and so is its directory.
fn history_file() -> io::Result<PathBuf> {
    let directory = state_directory().ok_or(io::ErrorKind::NotFound)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    let path = directory.join("history");
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    // Lines have no bound of their own.
    if file.metadata()?.len() > (HISTORY * LONGEST / 16) as u64 {
        file.set_len(0)?;
    }
    Ok(path)
}

/// A prompt of these words.
struct Words(String);

impl Prompt for Words {
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
        // What is copied from the terminal is Lisp.
        " ".repeat(self.0.chars().count() + 1).into()
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        format!(" (search: {}) ", search.term).into()
    }
}

/// Enter ends what is a whole, or a command.
struct Parentheses;

impl Validator for Parentheses {
    fn validate(&self, text: &str) -> ValidationResult {
        let is_command = text.trim_start().starts_with(':') && !text.contains('\n') && !text.contains('(');
        if !is_command && is_unfinished(text) { ValidationResult::Incomplete } else { ValidationResult::Complete }
    }
}

/// Colours strings and keywords, and the partner of the parenthesis at the cursor.
struct Colours(bool);

impl Highlighter for Colours {
    fn highlight(&self, text: &str, cursor: usize) -> StyledText {
        let mut styled = StyledText::new();
        let mut done = 0;
        if self.0 && text.len() <= LONGEST {
            for (range, part) in parts(text) {
                // Where the cursor is, or right behind it.
                let is_at = |at: usize| at == cursor || at + 1 == cursor;
                let style = match part {
                    Part::Text => Style::new().fg(Color::Green),
                    Part::Keyword => Style::new().fg(Color::Cyan),
                    Part::Parenthesis { partner } if is_at(range.start) || is_at(partner) => Style::new().bold(),
                    Part::Parenthesis { .. } => continue,
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

/// Completes names with what find-symbols finds, and commands.
struct Symbols(Arc<Mutex<Client>>);

impl Completer for Symbols {
    fn complete(&mut self, text: &str, cursor: usize) -> Vec<Suggestion> {
        let before = &text[..cursor];
        let ends = |c: char| c.is_whitespace() || "()'`,\"|;".contains(c);
        let start = before.rfind(ends).map_or(0, |at| at + 1);
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
            let of_line = before[..start].trim().is_empty();
            let commands = COMMANDS.iter().filter(|command| of_line && command.name.starts_with(typed));
            return commands
                .map(|command| suggest(command.name.to_owned(), Some(command.summary.to_owned())))
                .collect();
        }
        // What the tool takes for a pattern, or what would list everything.
        if typed.is_empty() || typed.contains(['*', '?']) && !typed.starts_with('*') {
            return Vec::new();
        }
        // Earmuffs are part of a name.
        let query = format!("{}*", typed.replace('*', "?"));
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let arguments = json!({"query": query, "limit": 200});
        let Ok(found) = client.call_for_person("find-symbols", &arguments, COMPLETION) else { return Vec::new() };
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
                let words = [symbol["lambdaList"].as_str(), symbol["documentation"].as_str()];
                let words: Vec<_> = words.into_iter().flatten().collect();
                let words = if words.is_empty() { kind.to_owned() } else { words.join("  ") };
                Some(suggest(name.to_owned(), Some(words.chars().take(DESCRIPTION).collect())))
            })
            .collect();
        // What is inherited or home first, then the shortest.
        suggestions.sort_by_key(|suggestion| (suggestion.value.contains(':'), suggestion.value.len()));
        suggestions.dedup_by(|one, other| one.value == other.value);
        suggestions.truncate(MOST);
        suggestions
    }
}
