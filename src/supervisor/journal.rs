//! The forms that make another image like the one that was lost.

use std::collections::{HashMap, HashSet};

use crate::handover::Entry;
use crate::outcome::DefiningForm;

/// Up to so many forms everything is kept as it was evaluated.
const EXACT: usize = 2_000;
/// Bytes that the forms may take when they are handed over.
const MAX_BYTES: usize = 16 << 20;
/// What a form takes besides.
const OVERHEAD: usize = 64;

/// Forms in the order of their evaluation.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// Each with how many had come before it.
    entries: Vec<(u64, Entry)>,
    /// How many have come.
    count: u64,
    bytes: usize,
    /// How many forms were dropped for want of room.
    dropped: usize,
    /// How many entries there may be before they are looked through again.
    limit: usize,
}

impl Journal {
    /// Adds a form.
    pub(super) fn add(&mut self, entry: Entry) {
        self.bytes += size(&entry);
        self.entries.push((self.count, entry));
        self.count += 1;
        if self.entries.len() > self.limit.max(EXACT) || self.bytes > MAX_BYTES {
            self.compact();
            self.limit = self.entries.len() * 2;
        }
    }

    /// Drops what was evaluated again since, but for its first time, which others may rest on; then, if there is still
    /// too much, the oldest.
    fn compact(&mut self) {
        let mut last: HashMap<(&DefiningForm, bool), usize> = HashMap::new();
        for (index, (_, entry)) in self.entries.iter().enumerate() {
            last.insert(entry.key(), index);
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
        self.bytes = self.entries.iter().map(|(_, entry)| size(entry)).sum();
        let mut excess = 0;
        // With room for some more, lest every form from here on is work.
        let room = if self.bytes > MAX_BYTES { MAX_BYTES / 4 * 3 } else { MAX_BYTES };
        while self.bytes > room && excess < self.entries.len() {
            self.bytes -= size(&self.entries[excess].1);
            excess += 1;
        }
        self.entries.drain(..excess);
        self.dropped += excess;
    }

    /// Notes that there were so many more that are not kept.
    pub(super) fn count_dropped(&mut self, count: usize) {
        self.dropped += count;
    }

    /// Forgets the forms at these places after `mark`.
    pub(super) fn remove(&mut self, mark: u64, places: &HashSet<usize>) {
        let first = self.first_since(mark);
        let places: HashSet<usize> = places.iter().map(|place| place.saturating_add(first)).collect();
        let mut index = 0;
        self.entries.retain(|(_, entry)| {
            let stays = !places.contains(&index);
            index += 1;
            if !stays {
                self.bytes -= size(entry);
            }
            stays
        });
    }

    /// Takes out the form at a place after `mark`.
    pub(super) fn take(&mut self, mark: u64, place: usize) -> Option<Entry> {
        let place = self.first_since(mark).saturating_add(place);
        let (_, entry) = (place < self.entries.len()).then(|| self.entries.remove(place))?;
        self.bytes -= size(&entry);
        Some(entry)
    }

    /// How many forms were dropped for want of room.
    pub(super) fn dropped(&self) -> usize {
        self.dropped
    }

    /// What tells the forms so far from those to come.
    pub(super) fn mark(&self) -> u64 {
        self.count
    }

    fn first_since(&self, mark: u64) -> usize {
        self.entries.partition_point(|(place, _)| *place < mark)
    }

    /// The forms that came after `mark`, 0 for all.
    pub(super) fn since(&self, mark: u64) -> Vec<Entry> {
        self.entries[self.first_since(mark)..].iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// All forms, each with how many had come before it.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.entries.iter().map(|(place, entry)| (*place, entry))
    }

    /// Forgets the forms that came after `mark`.
    pub(super) fn go_back(&mut self, mark: u64) {
        for (_, entry) in self.entries.drain(self.first_since(mark)..) {
            self.bytes -= size(&entry);
        }
    }
}

/// What a form takes: at most six bytes a character, as JSON has it.
fn size(entry: &Entry) -> usize {
    let escaped = |text: &str| {
        text.bytes()
            .map(|byte| if byte < b' ' { 6 } else { 1 + usize::from(byte == b'"' || byte == b'\\') })
            .sum::<usize>()
    };
    OVERHEAD + escaped(&entry.form.code) + escaped(&entry.form.package)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(code: String) -> Entry {
        Entry {
            form: DefiningForm { code, package: "COMMON-LISP-USER".to_owned() },
            local: false,
            evaluation: 1,
            took: 0,
        }
    }

    #[test]
    fn what_is_repeated_does_not_grow() {
        let mut journal = Journal::default();
        for round in 0..100_000 {
            journal.add(entry(format!("(defun f{} ())", round % 10)));
        }
        assert!(journal.since(0).len() <= 2 * EXACT);
        journal.compact();
        assert_eq!(journal.since(0).len(), 20);
        assert_eq!(journal.since(0)[19].form.code, "(defun f9 ())");
        journal.remove(0, &HashSet::from([0, 18]));
        assert_eq!(journal.take(0, 16).unwrap().form.code, "(defun f7 ())");
        assert_eq!(journal.take(0, 17), None);
        assert_eq!(journal.bytes, journal.entries.iter().map(|(_, entry)| size(entry)).sum::<usize>());
    }

    #[test]
    fn it_goes_back_to_a_mark() {
        let mut journal = Journal::default();
        (0..5).for_each(|round| journal.add(entry(format!("(defun f{round} ())"))));
        let mark = journal.mark();
        (5..8).for_each(|round| journal.add(entry(format!("(defun f{round} ())"))));
        assert_eq!(journal.since(mark).len(), 3);
        assert_eq!(journal.take(mark, 1).unwrap().form.code, "(defun f6 ())");
        journal.remove(mark, &HashSet::from([0]));
        assert_eq!(journal.since(mark), [entry("(defun f7 ())".to_owned())]);
        assert_eq!(journal.since(0).len(), 6);
        journal.go_back(mark);
        assert_eq!((journal.since(0).len(), journal.since(mark).len()), (5, 0));
        assert_eq!(journal.bytes, journal.entries.iter().map(|(_, entry)| size(entry)).sum::<usize>());
    }

    #[test]
    fn there_is_an_end_to_it() {
        let mut journal = Journal::default();
        for round in 0..40 {
            journal.add(entry(format!("(defvar *v{round}* \"{}\")", "x".repeat(1 << 20))));
        }
        assert!(journal.bytes <= MAX_BYTES);
        assert_eq!(journal.dropped() + journal.since(0).len(), 40);
        assert!(journal.since(0).last().unwrap().form.code.contains("*v39*"));
        // Six bytes a character, when it is handed over.
        journal.add(entry("\u{1}".repeat(4 << 20)));
        assert!(serde_json::to_vec(&journal.since(0)).unwrap().len() <= MAX_BYTES);
    }
}
