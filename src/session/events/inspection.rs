//! The inspection builder, which makes the answer to an inspection from events.

use super::JobEnd;
use super::error::build_local;
use super::text::{ClippedBuffer, clip_line, clip_name, escape_line_breaks, with_omission};
use crate::error::InspectError;
use crate::image::{Event, ItemKind};
use crate::outcome::{Definition, DefinitionKind, Definitions, FrameLocals, Role, SymbolDescription};

/// A local variable: its name, its validity code (see [`build_local`]), and its value.
type LocalParts = (String, u64, ClippedBuffer);

/// A builder that makes the answer to an inspection from events.
#[derive(Debug, Default)]
pub(crate) struct InspectionBuilder {
    items: Vec<(ItemKind, String, ClippedBuffer)>,
    /// Frame numbers, each with the frame's local variables.
    locals: Vec<(u64, Vec<LocalParts>)>,
    error: Option<(String, String)>,
}

/// The maximum number of characters that are kept of the text of an item without a smaller limit, and of the value of a
/// local variable.
const MAX_ITEM: u64 = 10_000;

/// The maximum number of characters that are kept of an item's label.
const MAX_LABEL: usize = 1_000;

/// The maximum number of characters that are kept of a definition in the list of definitions, and of a variable's value
/// in this list.
const MAX_DEFINITION: u64 = 1_000;
const MAX_VARIABLE: u64 = 200;

/// Returns the maximum number of characters that are kept of the text of an item of this kind.
fn item_limit(kind: ItemKind) -> u64 {
    match kind {
        ItemKind::Variable => MAX_VARIABLE,
        ItemKind::Function | ItemKind::Macro | ItemKind::Class => MAX_DEFINITION,
        _ => MAX_ITEM,
    }
}

impl InspectionBuilder {
    /// Handles an event. Returns true if Lisp may stop printing the text begun last.
    pub(crate) fn handle_event(&mut self, event: Event<'_>) -> bool {
        match event {
            Event::Item(kind, label) => {
                self.items.push((kind, clip_line(label, MAX_LABEL), ClippedBuffer::new(item_limit(kind))));
            }
            Event::ItemText(text) => {
                if let Some((_, _, item)) = self.items.last_mut() {
                    item.push(text);
                    return item.has_enough();
                }
            }
            Event::Frame(number) => self.locals.push((number, Vec::new())),
            Event::Local(name, validity) => {
                if let Some((_, locals)) = self.locals.last_mut() {
                    locals.push((clip_name(name), validity, ClippedBuffer::new(MAX_ITEM)));
                }
            }
            Event::LocalText(text) => {
                if let Some((.., value)) = self.locals.last_mut().and_then(|(_, locals)| locals.last_mut()) {
                    value.push(text);
                    return value.has_enough();
                }
            }
            Event::Error { kind, .. } => self.error = Some((clip_name(kind), String::new())),
            Event::ErrorText { text, replaces } => {
                if let Some((_, message)) = &mut self.error {
                    if replaces {
                        message.clear();
                    }
                    text.append_to(message, 10_000_usize.saturating_sub(message.len()));
                }
            }
            _ => {}
        }
        false
    }

    fn into_items(self, end: JobEnd) -> Result<Vec<(ItemKind, String, String)>, InspectError> {
        if end != JobEnd::Succeeded {
            return Err(end.inspection_error(self.error));
        }
        Ok(self.items.into_iter().map(|(kind, label, text)| (kind, label, with_omission(text))).collect())
    }

    /// Returns the definitions for the tool list-definitions, sorted by kind and text.
    pub(crate) fn definitions(self, end: JobEnd) -> Result<Definitions, InspectError> {
        let mut more = 0;
        let mut shown: Vec<_> = self
            .into_items(end)?
            .into_iter()
            .filter_map(|(item, label, text)| {
                let kind = match item {
                    ItemKind::Function => DefinitionKind::Function,
                    ItemKind::Variable => DefinitionKind::Variable,
                    ItemKind::Macro => DefinitionKind::Macro,
                    ItemKind::Class => DefinitionKind::Class,
                    ItemKind::Package => DefinitionKind::Package,
                    ItemKind::System => DefinitionKind::System,
                    ItemKind::More => {
                        more = label.parse().unwrap_or(0);
                        return None;
                    }
                    ItemKind::Role | ItemKind::Detail | ItemKind::NotFound => return None,
                };
                Some(Definition { kind, text: escape_line_breaks(&(label + &text)) })
            })
            .collect();
        shown.sort_by(|a, b| (a.kind, &a.text).cmp(&(b.kind, &b.text)));
        shown.dedup();
        Ok(Definitions { shown, more, ..Definitions::default() })
    }

    /// Returns the description for the tool describe-symbol.
    pub(crate) fn symbol_description(self, end: JobEnd) -> Result<SymbolDescription, InspectError> {
        let mut roles: Vec<Role> = Vec::new();
        for (item, label, text) in self.into_items(end)? {
            match item {
                ItemKind::NotFound => return Ok(SymbolDescription::NotFound(text)),
                ItemKind::Role => roles.push(Role { title: text, details: Vec::new() }),
                ItemKind::Detail if !label.is_empty() => {
                    if let Some(role) = roles.last_mut() {
                        role.details.push((label, text));
                    }
                }
                _ => {}
            }
        }
        Ok(SymbolDescription::Found(roles))
    }

    /// Returns the local variables of the requested frames.
    pub(crate) fn locals(self) -> Vec<FrameLocals> {
        let frames = self.locals.into_iter();
        frames
            .map(|(frame, locals)| FrameLocals { frame, locals: locals.into_iter().map(build_local).collect() })
            .collect()
    }

    /// Returns the result of a reset, for `Session::reset`.
    pub(crate) fn reset_result(self, end: JobEnd) -> Result<(), InspectError> {
        self.into_items(end).map(drop)
    }
}
