//! The definitions of a session: the forms that are replayed to give the next image the definitions of the lost image.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::unrestored::UnrestoredForms;
use crate::outcome::{Changes, DefiningForm, FormRole, json_size};

/// The number of forms up to which all forms are kept, even repetitions.
const MAX_UNCOMPACTED_FORMS: usize = 2_000;
/// Maximum [size](Definition::size) of all forms together.
const MAX_BYTES: usize = 16 << 20;
/// Maximum size of one form, in bytes of JSON. The event that reports a form must fit into one frame, so the maximum is the
/// capacity of a frame minus room for the rest of the event, of which the names that the form defines take up to 300 KB, and
/// so do the paths of the files that the form loaded again: 50 lines of 1,000 characters, of up to 6 bytes each as JSON.
const MAX_FORM: usize = crate::rpc::frame::MAX_EVENT - (768 << 10);
/// Number of characters that are kept of a form over [`MAX_FORM`].
const EXCERPT_CHARS: usize = 200;
/// Maximum number of dropped forms that are kept, so that messages can name them. Older dropped forms are only counted.
const MAX_DROPPED: usize = 100;
/// Maximum size of the kept dropped forms together, in bytes of JSON.
const MAX_DROPPED_BYTES: usize = 1 << 20;
/// Size in bytes above which a dropped form is cut to [`EXCERPT_CHARS`] characters.
const MAX_DROPPED_FORM: usize = 4 << 10;
/// The reason why a dropped form is missing.
const DROPPED_REASON: &str = "the form was dropped to save space";
/// The code of a definition that only loads files, after which a form failed.
const RELOAD: &str = "(cl:values) ; a form that failed loaded files again";
/// Maximum number of names that a message lists for a form that failed after defining these names.
const MAX_LISTED_NAMES: usize = 3;
/// Upper bound of the size of a form's JSON without its strings, in bytes: field names and numbers.
const JSON_OVERHEAD: usize = 256;
/// The number of bytes that a name counts in addition to its JSON. Thus, [`MAX_BYTES`] bounds the number of names, and
/// so the time of a compaction, during which the supervisor does nothing else.
const NAME_OVERHEAD: usize = 64;
/// The beginning of a package's name in [`Changes`].
const PACKAGE_KIND: &str = "PACKAGE ";
/// The beginning of a system's name in [`Changes`].
pub(super) const SYSTEM_KIND: &str = "SYSTEM ";

/// A form that defined something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    /// The form and the package it was read in.
    pub(crate) form: DefiningForm,
    /// The changes that the form made, as Lisp reported them.
    #[serde(default)]
    pub(crate) changes: Changes,
    /// True when the form's package was the current package for this evaluation only.
    pub(crate) local: bool,
    /// True when an attached client evaluated the form. The form is replayed with the initial values of a connection's reader
    /// and printer variables.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) attached: bool,
    /// The number of the evaluation that contained the form.
    pub(crate) evaluation: u64,
    /// An upper bound of the form's first run time, in milliseconds.
    #[serde(default)]
    pub(crate) took: u64,
    /// The size of a form over [`MAX_FORM`], in bytes of JSON. If set, `form` contains only the beginning of the form and
    /// cannot be replayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) too_long: Option<usize>,
}

impl Definition {
    /// Returns the reason why the form cannot be replayed, as a clause; `None` if the form can be replayed.
    pub(crate) fn replay_obstacle(&self) -> Option<String> {
        if let Some(bytes) = self.too_long {
            return Some(format!("the form takes {bytes} bytes as JSON; the limit is {MAX_FORM} bytes"));
        }
        if self.changes.role != FormRole::Failed {
            return None;
        }
        let names: Vec<_> = self.changes.made().map(String::as_str).collect();
        let has_system = names.iter().any(|name| name.starts_with(SYSTEM_KIND));
        let action = if has_system { "defining or loading" } else { "defining" };
        Some(match names.len() {
            0 => "the form failed after defining or changing something".to_owned(),
            1..=MAX_LISTED_NAMES => format!("the form failed after {action} {}", names.join(", ")),
            many => {
                format!(
                    "the form failed after {action} {} and {} more",
                    names[..MAX_LISTED_NAMES].join(", "),
                    many - MAX_LISTED_NAMES
                )
            }
        })
    }

    /// Returns true when `before` reports that this form failed in the same evaluation. If the form failed while it was read,
    /// `before` has only the beginning of the form.
    fn follows_failure_of(&self, before: &Self) -> bool {
        before.changes.role == FormRole::Failed
            && (before.evaluation, before.local) == (self.evaluation, self.local)
            && before.form.package == self.form.package
            && self.form.code.starts_with(&before.form.code)
    }

    /// If the form failed after it had loaded files again, takes the files and returns a definition that only loads these
    /// files: the failed form is not replayed, but the files have replaced definitions.
    fn take_reload(&mut self) -> Option<Self> {
        if self.changes.role != FormRole::Failed || self.changes.reloaded.is_empty() {
            return None;
        }
        let reloaded = std::mem::take(&mut self.changes.reloaded);
        let form = DefiningForm { code: RELOAD.to_owned(), package: self.form.package.clone() };
        let changes = Changes { reloaded, role: FormRole::Other, ..Changes::default() };
        Some(Self { form, changes, too_long: None, ..self.clone() })
    }

    /// Returns true if the definition only loads the files that a failed form had loaded again.
    pub(crate) fn is_reload(&self) -> bool {
        self.form.code == RELOAD
    }

    /// Returns the key by which repetitions of a form are recognized. A form that loads other files than before is no
    /// repetition.
    fn key(&self) -> (&DefiningForm, bool, &[String]) {
        (&self.form, self.local, &self.changes.reloaded[..])
    }

    /// Returns the packages that the form defined or removed, as [`Changes`] names them.
    fn packages(&self) -> impl Iterator<Item = &String> {
        let Changes { defined, removed, .. } = &self.changes;
        defined.iter().chain(removed).filter(|name| name.starts_with(PACKAGE_KIND))
    }

    /// Returns an upper bound of the definition's size in bytes of JSON, plus [`NAME_OVERHEAD`] for each name.
    fn size(&self) -> usize {
        let Changes { removed, modules, reloaded, .. } = &self.changes;
        let changes = self.changes.made().chain(removed).chain(modules).chain(reloaded);
        let changes: usize = changes.map(|name| json_size(name) + 3 + NAME_OVERHEAD).sum();
        JSON_OVERHEAD + json_size(&self.form.code) + json_size(&self.form.package) + changes
    }
}

/// A form that could not be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnrestoredForm {
    pub(crate) form: DefiningForm,
    /// The names that are missing without the form ([`Changes::made`]).
    #[serde(default)]
    pub(super) missing: BTreeSet<String>,
    /// The reason why the form could not be restored, as one line.
    pub(crate) reason: String,
}

impl UnrestoredForm {
    /// Creates the record of a definition that could not be restored for this reason.
    pub(crate) fn new(definition: &Definition, reason: &str) -> Self {
        let Definition { form, changes, .. } = definition;
        Self { form: form.clone(), missing: changes.made().cloned().collect(), reason: reason.to_owned() }
    }

    /// Creates the record of a form that was dropped for lack of room; a long form is cut to its beginning.
    fn from_dropped(mut definition: Definition) -> Self {
        let reason = definition.replay_obstacle().unwrap_or_else(|| DROPPED_REASON.to_owned());
        if definition.form.code.len() > MAX_DROPPED_FORM {
            definition.form.code = definition.form.code.chars().take(EXCERPT_CHARS).collect();
        }
        let Changes { defined, methods, .. } = definition.changes;
        Self { missing: defined.into_iter().chain(methods).collect(), form: definition.form, reason }
    }

    /// Returns an upper bound of the size, in bytes of JSON.
    pub(crate) fn size(&self) -> usize {
        let texts = [&self.form.code, &self.form.package, &self.reason];
        JSON_OVERHEAD + texts.into_iter().chain(&self.missing).map(|text| json_size(text) + 3).sum::<usize>()
    }
}

/// Returns a copy of the form. If the form is over [`MAX_FORM`], returns a copy of its beginning, and its size in bytes of
/// JSON.
pub(crate) fn bounded_copy(form: &DefiningForm) -> (DefiningForm, Option<usize>) {
    let size = json_size(&form.code);
    if size <= MAX_FORM {
        return (form.clone(), None);
    }
    let code = form.code.chars().take(EXCERPT_CHARS).collect();
    (DefiningForm { code, package: form.package.clone() }, Some(size))
}

/// The definitions of a session in the order of their evaluation, within bounds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "StoredDefinitions")]
pub(crate) struct Definitions {
    /// The definitions, each with its position: the number of definitions that were added before it.
    entries: Vec<(u64, Definition)>,
    /// The number of definitions that were ever added.
    count: u64,
    /// The newest definitions that were dropped for lack of room and have not been defined again, each at its position.
    #[serde(serialize_with = "UnrestoredForms::serialize_with_positions")]
    dropped_forms: UnrestoredForms,
    /// The number of dropped definitions for which `dropped_forms` had no room, so that they are only counted.
    dropped: usize,
    /// The [size](Definition::size) of all entries together.
    #[serde(skip)]
    bytes: usize,
    /// The number of entries above which repetitions are removed again.
    #[serde(skip)]
    limit: usize,
}

/// The serialized fields of [`Definitions`].
#[derive(Deserialize)]
struct StoredDefinitions {
    entries: Vec<(u64, Definition)>,
    count: u64,
    #[serde(default)]
    dropped_forms: Vec<(u64, UnrestoredForm)>,
    dropped: usize,
}

impl From<StoredDefinitions> for Definitions {
    fn from(StoredDefinitions { entries, count, dropped_forms: stored, dropped }: StoredDefinitions) -> Self {
        let bytes = entries.iter().map(|(_, definition)| definition.size()).sum();
        let limit = entries.len();
        let mut dropped_forms = UnrestoredForms::default();
        dropped_forms.extend(stored);
        Self { entries, count, dropped_forms, dropped, bytes, limit }
    }
}

/// The rank of a form: forms of lower ranks are dropped first for lack of room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum DropRank {
    /// A form that only defines names. Other forms define all of these names earlier, and define them again or remove them
    /// later.
    Intermediate,
    /// A form that only defines names. Other forms define all of these names again or remove them later.
    Replaced,
    /// A form that may do more than define names, but defines no package. Other forms define all of its names again or
    /// remove them later.
    SideEffecting,
    /// Any other form. A definition of a package counts as live even if it is replaced: forms before the next definition
    /// may be readable only with this one.
    Live,
}

impl Definitions {
    /// Adds a definition. If definitions are dropped to make room, returns the positions of the dropped definitions that
    /// are only counted from now on.
    pub(crate) fn add(&mut self, mut definition: Definition) -> Vec<u64> {
        // If the last entry records that this form failed in the same evaluation, the form was resumed: replace the entry.
        if let Some((_, failed)) = self.entries.pop_if(|(_, last)| definition.follows_failure_of(last)) {
            self.bytes -= failed.size();
        }
        let mut dropped = definition.take_reload().map(|reload| self.push(reload)).unwrap_or_default();
        dropped.extend(self.push(definition));
        dropped
    }

    fn push(&mut self, definition: Definition) -> Vec<u64> {
        self.dropped_forms.record(&definition.form, &definition.changes);
        self.bytes += definition.size();
        self.entries.push((self.count, definition));
        self.count += 1;
        if self.entries.len() <= self.limit.max(MAX_UNCOMPACTED_FORMS) && self.bytes <= MAX_BYTES {
            return Vec::new();
        }
        let dropped = self.compact();
        self.limit = self.entries.len() * 2;
        dropped
    }

    /// Makes the definitions of this evaluation [local](Definition::local).
    pub(crate) fn make_local(&mut self, evaluation: u64) {
        let of_evaluation = self.entries.iter_mut().filter(|(_, definition)| definition.evaluation == evaluation);
        of_evaluation.for_each(|(_, definition)| definition.local = true);
    }

    /// Keeps only the first and the last occurrence of a repeated form, since other forms may depend on the first, and the
    /// occurrences that [other forms need to be read](Self::keep_package_states). If the remaining forms still take too
    /// much room, drops forms by their [`DropRank`], the oldest first. Returns the positions of the dropped definitions that
    /// are only counted from now on.
    fn compact(&mut self) -> Vec<u64> {
        let mut occurrences: HashMap<(&DefiningForm, bool, &[String]), (usize, usize)> = HashMap::new();
        for (index, (_, definition)) in self.entries.iter().enumerate() {
            occurrences.entry(definition.key()).or_insert((index, index)).1 = index;
        }
        let mut keep = vec![false; self.entries.len()];
        for (first, last) in occurrences.into_values() {
            keep[first] = true;
            keep[last] = true;
        }
        self.keep_package_states(&mut keep);
        let mut keep = keep.into_iter();
        let bytes = &mut self.bytes;
        self.entries.retain(|(_, definition)| {
            let stays = keep.next().unwrap_or(true);
            if !stays {
                *bytes -= definition.size();
            }
            stays
        });
        if self.bytes <= MAX_BYTES {
            return Vec::new();
        }
        let ranks = self.ranks();
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        order.sort_by_key(|index| ranks[*index]);
        let mut is_dropped = vec![false; ranks.len()];
        for index in order {
            // Some room is left free, since otherwise every further form would cause another compaction.
            if self.bytes <= MAX_BYTES / 4 * 3 {
                break;
            }
            self.bytes -= self.entries[index].1.size();
            is_dropped[index] = true;
        }
        let mut dropped_forms = Vec::new();
        for (index, (position, definition)) in std::mem::take(&mut self.entries).into_iter().enumerate() {
            if !is_dropped[index] {
                self.entries.push((position, definition));
            } else if ranks[index] >= DropRank::SideEffecting {
                dropped_forms.push((position, UnrestoredForm::from_dropped(definition)));
            }
        }
        self.dropped_forms.extend(dropped_forms);
        let excess = self.dropped_forms.keep_newest(MAX_DROPPED, MAX_DROPPED_BYTES);
        self.dropped += excess.len();
        excess
    }

    /// Marks more definitions in `keep`, which is true for each definition that stays: a repeated definition of a package
    /// stays if a form after it stays and if, without the repetition, this form would be read with another definition of the
    /// package.
    fn keep_package_states(&self, keep: &mut [bool]) {
        let is_same = |a: usize, b: usize| self.entries[a].1.key() == self.entries[b].1.key();
        // For each package, the index of its last definition so far, and the index of its last definition so far that stays.
        let (mut current, mut kept): (HashMap<&String, usize>, HashMap<&String, usize>) = Default::default();
        // The packages that were defined after the last form that stays.
        let mut changed: HashSet<&String> = HashSet::new();
        for (index, (_, definition)) in self.entries.iter().enumerate() {
            if definition.replay_obstacle().is_some() {
                continue;
            }
            for name in definition.packages() {
                current.insert(name, index);
                changed.insert(name);
            }
            if !keep[index] {
                continue;
            }
            let is_lost = |name: &&String| !kept.get(name).is_some_and(|at| is_same(*at, current[name]));
            let mut needed: BTreeSet<usize> = changed.drain().filter(is_lost).map(|name| current[name]).collect();
            needed.insert(index);
            while let Some(at) = needed.pop_first() {
                keep[at] = true;
                for name in self.entries[at].1.packages() {
                    kept.insert(name, at);
                    // A form may define several packages, of which later forms have defined some again.
                    if !is_same(at, current[name]) {
                        needed.insert(current[name]);
                    }
                }
            }
        }
    }

    /// Returns the rank of each definition.
    fn ranks(&self) -> Vec<DropRank> {
        // The index of each defined name in `first` and `last`. The table has room for all names: growth takes time.
        let count = self.entries.iter().map(|(_, definition)| definition.changes.defined.len()).sum();
        let mut indices: HashMap<&String, usize> = HashMap::with_capacity(count);
        // For each name, the first form that defines it, and the last form that replaces its earlier definitions.
        let (mut first, mut last): (Vec<usize>, Vec<Option<usize>>) = Default::default();
        // For each form, the indices of the names that it defines.
        let mut defined_names: Vec<Vec<usize>> = Vec::with_capacity(self.entries.len());
        for (form, (_, definition)) in self.entries.iter().enumerate() {
            let Changes { defined, removed, role, .. } = &definition.changes;
            // A redefined generic function keeps the methods of other forms.
            let replaces = *role != FormRole::GenericFunction && definition.replay_obstacle().is_none();
            let mut names = Vec::with_capacity(defined.len());
            for name in defined {
                let index = *indices.entry(name).or_insert(first.len());
                if index == first.len() {
                    first.push(form);
                    last.push(None);
                }
                if replaces {
                    last[index] = Some(form);
                }
                names.push(index);
            }
            if replaces {
                removed.iter().filter_map(|name| indices.get(name)).for_each(|index| last[*index] = Some(form));
            }
            defined_names.push(names);
        }
        let rank = |form: usize| {
            let definition = &self.entries[form].1;
            let Changes { defined, methods, role, .. } = &definition.changes;
            let names = &defined_names[form];
            // A redefined generic function keeps the methods of other forms, and a method replaces no other method. Forms before
            // the next load of a system may need the system.
            let is_replaced = *role != FormRole::GenericFunction
                && methods.is_empty()
                && !defined.iter().any(|name| name.starts_with(SYSTEM_KIND))
                && !names.is_empty()
                && names.iter().all(|name| last[*name] > Some(form))
                && definition.packages().next().is_none();
            let is_intermediate = || names.iter().all(|name| first[*name] < form);
            match role {
                _ if !is_replaced => DropRank::Live,
                // A form that failed is not replayed, so dropping the form loses no side effects.
                FormRole::Function | FormRole::Failed if is_intermediate() => DropRank::Intermediate,
                FormRole::Function | FormRole::Failed => DropRank::Replaced,
                _ => DropRank::SideEffecting,
            }
        };
        (0..self.entries.len()).map(rank).collect()
    }

    /// Records that `count` more definitions were dropped and are only counted.
    pub(crate) fn count_dropped(&mut self, count: usize) {
        self.dropped += count;
    }

    /// Removes the definitions at these indices, which are counted from the first definition at `position` or later.
    pub(crate) fn remove(&mut self, position: u64, indices: &HashSet<usize>) {
        let first = self.first_index_since(position);
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

    /// Removes and returns the definition at `index`, which is counted from the first definition at `position` or later.
    pub(crate) fn take(&mut self, position: u64, index: usize) -> Option<Definition> {
        let index = self.first_index_since(position).saturating_add(index);
        let (_, definition) = (index < self.entries.len()).then(|| self.entries.remove(index))?;
        self.bytes -= definition.size();
        Some(definition)
    }

    /// Returns the dropped definitions from `position` on that are kept, so that messages can name them.
    pub(crate) fn dropped_forms(&self, position: u64) -> impl Iterator<Item = &UnrestoredForm> {
        self.dropped_forms.iter_from(position).map(|(_, form)| form)
    }

    /// Forgets the dropped definitions from `position` on that were kept for messages.
    pub(crate) fn forget_dropped_forms(&mut self, position: u64) {
        self.dropped_forms.truncate(position);
    }

    /// Returns the number of definitions that were dropped for lack of room and are not among
    /// [`dropped_forms`](Self::dropped_forms).
    pub(crate) fn dropped_count(&self) -> usize {
        self.dropped
    }

    /// Returns the position of the next definition.
    pub(crate) fn next_position(&self) -> u64 {
        self.count
    }

    /// Returns the index of the first entry at `position` or later.
    fn first_index_since(&self, position: u64) -> usize {
        self.entries.partition_point(|(at, _)| *at < position)
    }

    /// Returns the definitions from `position` on, in order.
    pub(crate) fn iter_from(&self, position: u64) -> impl Iterator<Item = &Definition> {
        self.entries[self.first_index_since(position)..].iter().map(|(_, definition)| definition)
    }

    /// Returns a copy of the definitions from `position` on.
    pub(crate) fn suffix_from(&self, position: u64) -> Self {
        let entries = self.entries[self.first_index_since(position)..].to_vec();
        let dropped_forms = self.dropped_forms.iter_from(position).map(|(at, form)| (at, form.clone())).collect();
        StoredDefinitions { entries, count: self.count, dropped_forms, dropped: self.dropped }.into()
    }

    /// Removes the definitions from `position` on. `dropped` is the number of these definitions that were already dropped
    /// and are only counted.
    pub(crate) fn truncate(&mut self, position: u64, dropped: usize) {
        self.forget_dropped_forms(position);
        self.dropped = self.dropped.saturating_sub(dropped);
        for (_, definition) in self.entries.drain(self.first_index_since(position)..) {
            self.bytes -= definition.size();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn definition(code: String) -> Definition {
        Definition {
            form: DefiningForm { code, package: "COMMON-LISP-USER".to_owned() },
            changes: Changes::default(),
            local: false,
            attached: false,
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
        assert!(definitions.entries.len() <= 2 * MAX_UNCOMPACTED_FORMS);
        definitions.compact();
        assert_eq!(definitions.entries.len(), 20);
        assert_eq!(codes(&definitions)[19], "(defun f9 ())");
        definitions.remove(0, &HashSet::from([0, 18]));
        assert_eq!(definitions.take(0, 16).unwrap().form.code, "(defun f7 ())");
        assert_eq!(definitions.take(0, 17), None);
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn files_that_a_failed_form_loaded_again_are_loaded_by_a_form_of_their_own() {
        let mut definitions = Definitions::default();
        let changes = Changes::parse("=failed\n+FUNCTION F\n!/a.lisp".lines());
        definitions.add(Definition { changes, ..definition("(asdf:load-system \"app\")".to_owned()) });
        let kept: Vec<_> =
            definitions.iter_from(0).map(|kept| (kept.replay_obstacle().is_some(), &kept.changes)).collect();
        assert_eq!(kept.len(), 2);
        assert_eq!((kept[0].0, kept[0].1.reloaded.concat()), (false, "/a.lisp".to_owned()));
        assert_eq!((kept[1].0, kept[1].1.reloaded.len()), (true, 0));
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn forms_that_loaded_different_files_again_are_not_repetitions() {
        let mut definitions = Definitions::default();
        for file in ["", "\n!/a.lisp", "\n!/b.lisp", "\n!/b.lisp", "\n!/b.lisp"] {
            let changes = Changes::parse(format!("=other{file}").lines());
            definitions.add(Definition { changes, ..definition("(asdf:load-system \"app\")".to_owned()) });
        }
        definitions.compact();
        let reloaded: Vec<_> = definitions.iter_from(0).map(|kept| kept.changes.reloaded.concat()).collect();
        assert_eq!(reloaded, ["", "/a.lisp", "/b.lisp", "/b.lisp"]);
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn repeated_package_definitions_stay_where_other_forms_are_read_with_them() {
        let package = |exports: &str| Definition {
            changes: Changes::parse("=other\n+PACKAGE P".lines()),
            ..definition(format!("(defpackage :p (:export {exports}))"))
        };
        let mut definitions = Definitions::default();
        for round in 0..3 {
            for exports in ["#:a", "#:b"] {
                definitions.add(package(exports));
                definitions.add(definition(format!("(use {exports} {round})")));
            }
        }
        definitions.compact();
        assert_eq!(definitions.entries.len(), 12);
        // No form is read between these repetitions, so only the last occurrence of each definition stays.
        for exports in ["#:a", "#:b"].into_iter().cycle().take(100) {
            definitions.add(package(exports));
        }
        definitions.add(definition("(last)".to_owned()));
        definitions.compact();
        assert_eq!(definitions.entries.len(), 15);
        let used = ["(use #:b 2)", "(defpackage :p (:export #:a))", "(defpackage :p (:export #:b))", "(last)"];
        assert_eq!(codes(&definitions)[11..], used);
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    proptest! {
        /// Each step evaluates either a definition of one or both of two packages, or another form.
        #[test]
        fn compaction_keeps_the_package_definitions_with_which_forms_are_read(
            steps in proptest::collection::vec((1..4_u8, 0..3_u8, any::<bool>()), 0..60)
        ) {
            /// The states of the packages: the definition that each package has, if any.
            #[derive(Debug, Clone, Default, PartialEq)]
            struct Packages([Option<String>; 2]);
            impl Packages {
                /// Records the evaluation of `code`, whose second word is the set of the defined packages as a bit mask.
                fn define(&mut self, code: &str) {
                    let set: u8 = code.split(' ').nth(1).and_then(|set| set.parse().ok()).expect("a set");
                    (0..2).filter(|package| (set >> package) & 1 != 0).for_each(|package| {
                        self.0[package] = Some(code.to_owned());
                    });
                }
            }
            let mut definitions = Definitions::default();
            let (mut packages, mut before) = (Packages::default(), Vec::new());
            for (index, (set, variant, is_definition)) in steps.into_iter().enumerate() {
                if is_definition {
                    let code = format!("(defpackages {set} {variant})");
                    packages.define(&code);
                    let names = ["", "\n+PACKAGE 0", "\n+PACKAGE 1", "\n+PACKAGE 0\n+PACKAGE 1"];
                    let changes = Changes::parse(format!("=other{}", names[usize::from(set)]).lines());
                    definitions.add(Definition { changes, ..definition(code) });
                } else {
                    before.push(packages.clone());
                    definitions.add(definition(format!("(form {index})")));
                }
            }
            definitions.compact();
            let (mut packages, mut after) = (Packages::default(), Vec::new());
            for code in codes(&definitions) {
                if code.starts_with("(defpackages ") {
                    packages.define(code);
                } else {
                    after.push(packages.clone());
                }
            }
            prop_assert_eq!(after, before);
        }
    }

    #[test]
    fn replaced_package_definitions_and_repeated_loads_are_not_dropped_before_live_forms() {
        let mut definitions = Definitions::default();
        let mut add = |code: String, changes: &str| {
            let changes = Changes::parse(changes.lines());
            definitions.add(Definition { changes, ..definition(code) });
        };
        let large = "x".repeat(5_000_000);
        add("(act)".to_owned(), "=other\n+VARIABLE *A*");
        add("(defpackage :p (:export #:a))".to_owned(), "=other\n+PACKAGE P");
        add("(asdf:load-system :s)".to_owned(), "=other\n+SYSTEM s");
        for round in 0..3 {
            add(format!("(defvar *v* {round} {large})"), "=other\n+VARIABLE *V*");
        }
        add("(defpackage :p)".to_owned(), "=other\n+PACKAGE P");
        add("(asdf:load-system \"s\")".to_owned(), "=other\n+SYSTEM s");
        add(format!("(defvar *w* {large})"), "=other\n+VARIABLE *W*");
        assert!(codes(&definitions).contains(&"(defpackage :p (:export #:a))"));
        assert!(codes(&definitions).contains(&"(asdf:load-system :s)"));
        assert!(definitions.dropped_forms(0).all(|form| form.form.code.starts_with("(defvar *v*")));
    }

    #[test]
    fn resumed_form_replaces_its_failure_even_if_only_its_beginning_had_been_read() {
        let mut definitions = Definitions::default();
        let failed = |code: &str| Definition {
            changes: Changes::parse("=failed\n+FUNCTION F".lines()),
            ..definition(code.to_owned())
        };
        definitions.add(failed("(list #.(defun f () 1) #.(cerror"));
        definitions.add(definition("(list #.(defun f () 1) #.(cerror \"go on\" \"x\"))".to_owned()));
        assert_eq!(codes(&definitions), ["(list #.(defun f () 1) #.(cerror \"go on\" \"x\"))"]);
        // Another evaluation or form replaces nothing.
        definitions.add(failed("(g"));
        definitions.add(Definition { evaluation: 2, ..definition("(g)".to_owned()) });
        definitions.add(failed("(h"));
        definitions.add(definition("(i)".to_owned()));
        assert_eq!(codes(&definitions).len(), 5);
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn definitions_from_a_position_can_be_copied_removed_and_truncated() {
        let mut definitions = Definitions::default();
        (0..5).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        let position = definitions.next_position();
        (5..8).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        assert_eq!(definitions.suffix_from(position).entries.len(), 3);
        assert_eq!(definitions.take(position, 1).unwrap().form.code, "(defun f6 ())");
        definitions.remove(position, &HashSet::from([0]));
        assert_eq!(codes(&definitions.suffix_from(position)), ["(defun f7 ())"]);
        assert_eq!(definitions.entries.len(), 6);
        definitions.truncate(position, 0);
        assert_eq!((definitions.entries.len(), definitions.suffix_from(position).entries.len()), (5, 0));
        assert_eq!(definitions.bytes, bytes(&definitions));
    }

    #[test]
    fn the_oldest_definitions_are_dropped_over_the_total_size_limit() {
        let mut definitions = Definitions::default();
        let mut dropped = Vec::new();
        for round in 0..40 {
            dropped.extend(definitions.add(definition(format!("(defvar *v{round}* \"{}\")", "x".repeat(1 << 20)))));
        }
        assert!(dropped.is_empty() && definitions.dropped_count() == 0 && definitions.bytes <= MAX_BYTES);
        assert!(definitions.dropped_forms.iter_from(0).map(|(position, _)| position).eq(0..definitions.entries[0].0));
        assert_eq!(definitions.dropped_forms.iter().len() + definitions.entries.len(), 40);
        assert!(
            definitions
                .dropped_forms(0)
                .all(|form| form.form.code.len() == EXCERPT_CHARS && form.reason == DROPPED_REASON)
        );
        assert!(codes(&definitions).last().unwrap().contains("*v39*"));
        // JSON takes six bytes for this character.
        definitions.add(definition("\u{1}".repeat(4 << 20)));
        assert!(serde_json::to_vec(&definitions).unwrap().len() <= MAX_BYTES);
        // The JSON of these forms consists mostly of field names.
        for round in 0..200_000 {
            dropped.extend(definitions.add(definition(format!("({round})"))));
        }
        assert!(definitions.bytes > MAX_BYTES / 2 && serde_json::to_vec(&definitions).unwrap().len() <= MAX_BYTES);
        // Only the newest dropped forms are kept. Older dropped forms are only counted.
        assert_eq!(definitions.dropped_forms.iter().len(), MAX_DROPPED);
        assert!(dropped.iter().copied().eq(0..definitions.dropped_count() as u64));
        assert_eq!(definitions.dropped_count() + MAX_DROPPED + definitions.entries.len(), 200_041);
    }

    /// Each name takes less than 20 bytes of JSON, so all names together would take 5 MB.
    #[test]
    fn the_number_of_short_names_is_bounded() {
        let mut definitions = Definitions::default();
        for form in 0..5_000 {
            let names = (0..50).map(|name| format!("VARIABLE V{}", form * 50 + name)).collect();
            let changes = Changes { defined: names, ..Changes::default() };
            definitions.add(Definition { changes, ..definition(format!("(define {form})")) });
        }
        assert!(definitions.bytes <= MAX_BYTES);
        let names: usize = definitions.iter_from(0).map(|definition| definition.changes.defined.len()).sum();
        assert!((100_000..MAX_BYTES / NAME_OVERHEAD * 4 / 5).contains(&names), "{names} names");
    }

    #[test]
    fn replaced_definitions_are_dropped_before_live_ones() {
        let mut definitions = Definitions::default();
        let large = "x".repeat(4_000_000);
        let mut add = |code: String, changes: &str| {
            let changes = Changes::parse(changes.lines());
            definitions.add(Definition { changes, ..definition(code) });
        };
        add("(defun keep ())".to_owned(), "=defun\n+FUNCTION KEEP");
        add("(defmethod m ((x integer)))".to_owned(), "=defmethod\n+FUNCTION M\n*METHOD M");
        add(format!("(progn (act) (defun both () {large}))"), "=other\n+FUNCTION BOTH");
        for round in 0..4 {
            add(format!("(defun f () {round} {large})"), "=defun\n+FUNCTION F");
            add(format!("(defmethod m ((x (eql {round}))))"), "=other\n*METHOD M");
        }
        add("(defun both ())".to_owned(), "=defun\n+FUNCTION BOTH");
        let beginnings =
            |definitions: &Definitions| codes(definitions).iter().map(|code| code[..10].to_owned()).collect::<Vec<_>>();
        // The first and the last definition of `f` stay longest.
        let methods = codes(&definitions).iter().filter(|code| code.starts_with("(defmethod m")).count();
        assert_eq!((methods, definitions.dropped_forms(0).count()), (5, 0));
        let functions = beginnings(&definitions).iter().filter(|code| *code == "(defun f (").count();
        assert_eq!((functions, definitions.entries.len()), (2, 10));
        assert!(codes(&definitions)[3].starts_with("(defun f () 0 "));
        let mut add = |code: String, changes: &str| {
            let changes = Changes::parse(changes.lines());
            definitions.add(Definition { changes, ..definition(code) });
        };
        // A form with the rank `SideEffecting` is dropped before live forms. `dropped_forms` contains the dropped form
        // until its names are defined again.
        add(format!("(defvar *a* {large})"), "=other\n+VARIABLE *A*");
        add(format!("(defvar *b* {large})"), "=other\n+VARIABLE *B*");
        let named = |definitions: &Definitions| {
            definitions.dropped_forms(0).map(|form| form.form.code[..12].to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(named(&definitions), ["(progn (act)"]);
        assert_eq!(codes(&definitions)[0], "(defun keep ())");
        let read: Definitions = serde_json::from_slice(&serde_json::to_vec(&definitions).unwrap()).unwrap();
        assert_eq!(named(&read), named(&definitions));
        definitions.add(Definition {
            changes: Changes::parse("=defun\n+FUNCTION BOTH".lines()),
            ..definition("(defun both () 2)".to_owned())
        });
        assert!(named(&definitions).is_empty());
    }

    #[test]
    fn definitions_survive_serialization() {
        let mut definitions = Definitions::default();
        (0..5).for_each(|round| drop(definitions.add(definition(format!("(defun f{round} ())")))));
        definitions.count_dropped(3);
        let read: Definitions = serde_json::from_slice(&serde_json::to_vec(&definitions).unwrap()).unwrap();
        assert_eq!((codes(&read), read.next_position(), read.dropped_count()), (codes(&definitions), 5, 3));
        assert_eq!(read.bytes, definitions.bytes);
    }

    #[test]
    fn a_form_over_the_size_limit_is_cut_to_its_beginning() {
        let (long, size) = bounded_copy(&definition(format!("(defvar *long* \"{}\")", "x".repeat(MAX_FORM))).form);
        assert_eq!((long.code.len(), size), (EXCERPT_CHARS, Some(MAX_FORM + 20)));
        let short = definition("(f)".to_owned()).form;
        assert_eq!(bounded_copy(&short), (short, None));
    }
}
