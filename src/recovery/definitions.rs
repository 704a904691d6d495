//! The definitions of a session: forms whose replay gives the next image the definitions of the lost image.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::outcome::{Changes, DefiningForm, FormRole, json_size};

/// The number of forms up to which every form is kept, repetitions included.
const EXACT: usize = 2_000;
/// Maximum size of all forms together, in bytes of JSON.
const MAX_BYTES: usize = 16 << 20;
/// Maximum size of one form, in bytes of JSON: the capacity of a frame, less room for the rest of the event.
const MAX_FORM: usize = crate::rpc::frame::MAX_EVENT - (64 << 10);
/// Number of characters that are kept of a form over [`MAX_FORM`].
const BEGINNING: usize = 200;
/// Maximum number of names that a message lists for a form that failed after it had defined them.
const MAX_NAMED: usize = 3;
/// Maximum size of a form's JSON without its texts, in bytes: names of fields, and numbers.
const OVERHEAD: usize = 256;

/// A form that defined something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    /// The form and the package it was read in.
    pub(crate) form: DefiningForm,
    /// The changes that the form made, as Lisp reported them.
    #[serde(default)]
    pub(crate) changes: Changes,
    /// True when the package was bound for this evaluation only.
    pub(crate) local: bool,
    /// The number of the evaluation that contained the form.
    pub(crate) evaluation: u64,
    /// An upper bound of the form's first run time, in milliseconds.
    #[serde(default)]
    pub(crate) took: u64,
    /// The size of a form over [`MAX_FORM`], in bytes of JSON: `form` has only its beginning then, and cannot be replayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) too_long: Option<usize>,
}

impl Definition {
    /// Returns the definition; a form over [`MAX_FORM`] is cut to its beginning.
    pub(crate) fn bounded(mut self) -> Self {
        let size = json_size(&self.form.code);
        if size > MAX_FORM {
            self.too_long = Some(size);
            self.form.code = self.form.code.chars().take(BEGINNING).collect();
        }
        self
    }

    /// Returns the reason why the form cannot be replayed, as a clause; `None` when it can.
    pub(crate) fn obstacle(&self) -> Option<String> {
        if let Some(bytes) = self.too_long {
            return Some(format!("it takes {bytes} bytes as JSON, more than the {MAX_FORM} that are kept"));
        }
        if self.changes.role != FormRole::Failed {
            return None;
        }
        let names = &self.changes.defined;
        Some(match names.len() {
            0 => "it failed after it had defined something".to_owned(),
            1..=MAX_NAMED => format!("it failed, but had defined {}", names.join(", ")),
            many => {
                format!("it failed, but had defined {} and {} more", names[..MAX_NAMED].join(", "), many - MAX_NAMED)
            }
        })
    }

    /// Returns true when `before` is the same evaluation of the same form, reported as failed.
    fn continues(&self, before: &Self) -> bool {
        before.changes.role == FormRole::Failed && (before.evaluation, before.key()) == (self.evaluation, self.key())
    }

    /// Returns the key that repetitions of a form share.
    fn key(&self) -> (&DefiningForm, bool) {
        (&self.form, self.local)
    }

    /// Returns an upper bound of the definition's size, in bytes of JSON.
    fn size(&self) -> usize {
        let changes = self.changes.defined.iter().chain(&self.changes.removed).chain(&self.changes.modules);
        let changes: usize = changes.map(|name| json_size(name) + 3).sum();
        OVERHEAD + json_size(&self.form.code) + json_size(&self.form.package) + changes
    }
}

/// A form that could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unrestored {
    pub(crate) form: DefiningForm,
    /// The names that are missing without the form, in the format of [`Changes::defined`].
    #[serde(default)]
    pub(super) missing: Vec<String>,
    /// The reason, as one line.
    pub(crate) reason: String,
}

impl Unrestored {
    pub(crate) fn new(definition: &Definition, reason: &str) -> Self {
        let Definition { form, changes, .. } = definition;
        Self { form: form.clone(), missing: changes.defined.clone(), reason: reason.to_owned() }
    }

    /// Returns an upper bound of the size, in bytes of JSON.
    pub(crate) fn size(&self) -> usize {
        let texts = [&self.form.code, &self.form.package, &self.reason];
        OVERHEAD + texts.into_iter().chain(&self.missing).map(|text| json_size(text) + 3).sum::<usize>()
    }

    /// Records that `form` was evaluated. Returns true when nothing is missing any more: `form` is the unrestored form and
    /// did not fail, or every missing name has been defined or removed since.
    pub(crate) fn is_resolved_by(&mut self, form: &DefiningForm, changes: &Changes) -> bool {
        let had_names = !self.missing.is_empty();
        self.missing.retain(|name| !changes.defined.contains(name) && !changes.removed.contains(name));
        self.form == *form && changes.role != FormRole::Failed || had_names && self.missing.is_empty()
    }
}

/// Definitions in the order of their evaluation, within bounds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "Stored")]
pub(crate) struct Definitions {
    /// The definitions, each with its position: the number of definitions that were added before it.
    entries: Vec<(u64, Definition)>,
    /// The number of definitions that were ever added.
    count: u64,
    /// The number of definitions that were dropped for lack of room.
    dropped: usize,
    #[serde(skip)]
    bytes: usize,
    /// The number of entries above which repetitions are removed again.
    #[serde(skip)]
    limit: usize,
}

/// The serialized part of [`Definitions`].
#[derive(Deserialize)]
struct Stored {
    entries: Vec<(u64, Definition)>,
    count: u64,
    dropped: usize,
}

impl From<Stored> for Definitions {
    fn from(Stored { entries, count, dropped }: Stored) -> Self {
        let bytes = entries.iter().map(|(_, definition)| definition.size()).sum();
        let limit = entries.len();
        Self { entries, count, dropped, bytes, limit }
    }
}

impl Definitions {
    /// Adds a definition. Returns the positions of the definitions that were dropped to make room.
    pub(crate) fn add(&mut self, definition: Definition) -> Vec<u64> {
        // It was held where it failed, and went on.
        if let Some((_, failed)) = self.entries.pop_if(|(_, last)| definition.continues(last)) {
            self.bytes -= failed.size();
        }
        self.bytes += definition.size();
        self.entries.push((self.count, definition));
        self.count += 1;
        if self.entries.len() <= self.limit.max(EXACT) && self.bytes <= MAX_BYTES {
            return Vec::new();
        }
        let dropped = self.compact();
        self.limit = self.entries.len() * 2;
        dropped
    }

    /// Removes repetitions of each form except the first and the last: other forms may depend on the first one. If the rest
    /// still takes too much room, drops the oldest forms and returns their positions.
    fn compact(&mut self) -> Vec<u64> {
        let mut last: HashMap<(&DefiningForm, bool), usize> = HashMap::new();
        for (index, (_, definition)) in self.entries.iter().enumerate() {
            last.insert(definition.key(), index);
        }
        let mut seen: HashSet<(&DefiningForm, bool)> = HashSet::new();
        let keep: Vec<bool> = self
            .entries
            .iter()
            .enumerate()
            .map(|(index, (_, entry))| seen.insert(entry.key()) || last[&entry.key()] == index)
            .collect();
        let mut keep = keep.into_iter();
        self.entries.retain(|_| keep.next().unwrap_or(true));
        self.bytes = self.entries.iter().map(|(_, definition)| definition.size()).sum();
        let mut excess = 0;
        // Leave room, or every further form would need another round.
        let room = if self.bytes > MAX_BYTES { MAX_BYTES / 4 * 3 } else { MAX_BYTES };
        while self.bytes > room && excess < self.entries.len() {
            self.bytes -= self.entries[excess].1.size();
            excess += 1;
        }
        self.dropped += excess;
        self.entries.drain(..excess).map(|(position, _)| position).collect()
    }

    /// Records that `count` more definitions were dropped.
    pub(crate) fn count_dropped(&mut self, count: usize) {
        self.dropped += count;
    }

    /// Removes the definitions at these indices from `position` on.
    pub(crate) fn remove(&mut self, position: u64, indices: &HashSet<usize>) {
        let first = self.first_since(position);
        let indices: HashSet<usize> = indices.iter().map(|index| index.saturating_add(first)).collect();
        let mut index = 0;
        self.entries.retain(|(_, definition)| {
            let stays = !indices.contains(&index);
            index += 1;
            if !stays {
                self.bytes -= definition.size();
            }
            stays
        });
    }

    /// Removes and returns the definition at an index from `position` on.
    pub(crate) fn take(&mut self, position: u64, index: usize) -> Option<Definition> {
        let index = self.first_since(position).saturating_add(index);
        let (_, definition) = (index < self.entries.len()).then(|| self.entries.remove(index))?;
        self.bytes -= definition.size();
        Some(definition)
    }

    /// Returns the number of definitions that were dropped for lack of room.
    pub(crate) fn dropped(&self) -> usize {
        self.dropped
    }

    /// Returns the position of the next definition.
    pub(crate) fn end(&self) -> u64 {
        self.count
    }

    fn first_since(&self, position: u64) -> usize {
        self.entries.partition_point(|(place, _)| *place < position)
    }

    /// Returns the definitions from `position` on, in order.
    pub(crate) fn iter_from(&self, position: u64) -> impl Iterator<Item = &Definition> {
        self.entries[self.first_since(position)..].iter().map(|(_, definition)| definition)
    }

    /// Returns a copy of the definitions from `position` on.
    pub(crate) fn since(&self, position: u64) -> Self {
        let entries = self.entries[self.first_since(position)..].to_vec();
        Stored { entries, count: self.count, dropped: self.dropped }.into()
    }

    /// Removes the definitions from `position` on, of which `dropped` have been dropped already.
    pub(crate) fn truncate(&mut self, position: u64, dropped: usize) {
        self.dropped = self.dropped.saturating_sub(dropped);
        for (_, definition) in self.entries.drain(self.first_since(position)..) {
            self.bytes -= definition.size();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(code: String) -> Definition {
        Definition {
            form: DefiningForm { code, package: "COMMON-LISP-USER".to_owned() },
            changes: Changes::default(),
            local: false,
            evaluation: 1,
            took: 0,
            too_long: None,
        }
    }

    fn codes(definitions: &Definitions) -> Vec<&str> {
        definitions.iter_from(0).map(|definition| &*definition.form.code).collect()
    }

    fn bytes(definitions: &Definitions) -> usize {
        definitions.iter_from(0).map(Definition::size).sum()
    }

    #[test]
    fn repeated_definitions_do_not_accumulate() {
        let mut definitions = Definitions::default();
        for round in 0..100_000 {
            definitions.add(definition(format!("(defun f{} ())", round % 10)));
        }
        assert!(definitions.entries.len() <= 2 * EXACT);
        definitions.compact();
        assert_eq!(definitions.entries.len(), 20);
        assert_eq!(codes(&definitions)[19], "(defun f9 ())");
        definitions.remove(0, &HashSet::from([0, 18]));
        assert_eq!(definitions.take(0, 16).unwrap().form.code, "(defun f7 ())");
        assert_eq!(definitions.take(0, 17), None);
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn definitions_since_a_position_can_be_taken_and_forgotten() {
        let mut definitions = Definitions::default();
        (0..5).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        let position = definitions.end();
        (5..8).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        assert_eq!(definitions.since(position).entries.len(), 3);
        assert_eq!(definitions.take(position, 1).unwrap().form.code, "(defun f6 ())");
        definitions.remove(position, &HashSet::from([0]));
        assert_eq!(codes(&definitions.since(position)), ["(defun f7 ())"]);
        assert_eq!(definitions.entries.len(), 6);
        definitions.truncate(position, 0);
        assert_eq!((definitions.entries.len(), definitions.since(position).entries.len()), (5, 0));
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn the_oldest_definitions_are_dropped_when_all_together_are_too_large() {
        let mut definitions = Definitions::default();
        let mut dropped = Vec::new();
        for round in 0..40 {
            dropped.extend(definitions.add(definition(format!("(defvar *v{round}* \"{}\")", "x".repeat(1 << 20)))));
        }
        assert!(dropped.iter().copied().eq(0..definitions.dropped() as u64));
        assert!(definitions.bytes <= MAX_BYTES);
        assert_eq!(definitions.dropped() + definitions.entries.len(), 40);
        assert!(codes(&definitions).last().unwrap().contains("*v39*"));
        // Six bytes a character, as JSON.
        definitions.add(definition("\u{1}".repeat(4 << 20)));
        assert!(serde_json::to_vec(&definitions).unwrap().len() <= MAX_BYTES);
        // Mostly names of fields.
        for round in 0..200_000 {
            definitions.add(definition(format!("({round})")));
        }
        assert!(definitions.bytes > MAX_BYTES / 2 && serde_json::to_vec(&definitions).unwrap().len() <= MAX_BYTES);
    }

    #[test]
    fn definitions_are_the_same_after_serialization() {
        let mut definitions = Definitions::default();
        (0..5).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        definitions.count_dropped(3);
        let read: Definitions = serde_json::from_slice(&serde_json::to_vec(&definitions).unwrap()).unwrap();
        assert_eq!((codes(&read), read.end(), read.dropped()), (codes(&definitions), 5, 3));
        assert_eq!(read.bytes, definitions.bytes);
    }

    #[test]
    fn a_form_that_is_too_long_is_kept_by_its_beginning() {
        let long = definition(format!("(defvar *long* \"{}\")", "x".repeat(MAX_FORM))).bounded();
        assert_eq!(long.too_long, Some(MAX_FORM + 20));
        assert_eq!(long.form.code.len(), BEGINNING);
        assert_eq!(definition("(f)".to_owned()).bounded(), definition("(f)".to_owned()));
    }

    #[test]
    fn an_unrestored_form_is_resolved_once_all_its_names_are_defined_or_removed() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let form = |code: &str| DefiningForm { code: code.to_owned(), package: "APP".to_owned() };
        let defining = |defined: &[&str]| Changes { defined: names(defined), ..Changes::default() };
        let missing = |defined: &[&str]| {
            let changes = defining(defined);
            Unrestored::new(&Definition { changes, ..definition("(define-both)".to_owned()) }, "it failed")
        };
        let mut both = missing(&["FUNCTION APP::F", "VARIABLE APP::F"]);
        assert!(!both.is_resolved_by(&form("(defun f ())"), &defining(&["FUNCTION APP::F"])));
        assert!(!both.is_resolved_by(&form("(defun g ())"), &defining(&["FUNCTION APP::G"])));
        let removing = Changes { removed: names(&["VARIABLE APP::F"]), ..Changes::default() };
        assert!(both.is_resolved_by(&form("(unintern 'f)"), &removing));
        // An unrestored form without names is resolved only by an equal form.
        let mut load = missing(&[]);
        assert!(!load.is_resolved_by(&form("(load \"a\")"), &defining(&["FUNCTION APP::F"])));
        let same = definition("(define-both)".to_owned()).form;
        assert!(load.is_resolved_by(&same, &Changes::default()));
    }
}
