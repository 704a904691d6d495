//! The forms that could not be restored and have not been defined again.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize, Serializer};

use super::definitions::UnrestoredForm;
use crate::outcome::{Changes, DefiningForm, FormRole};

/// Forms that could not be restored, each at a position, with an index of their missing names. Thus, the time to record an
/// evaluation depends on the number of names that it defined, not on the number of missing names.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(from = "Vec<UnrestoredForm>")]
pub(crate) struct UnrestoredForms {
    forms: BTreeMap<u64, UnrestoredForm>,
    /// For each missing name, the positions of the forms that made it; `None` until an evaluation is recorded. The index may
    /// contain positions of forms that have been removed.
    index: Option<HashMap<String, Vec<u64>>>,
}

impl UnrestoredForms {
    /// Records an evaluation. Removes each form for which nothing is missing any more: the evaluated form is the unrestored
    /// form and did not fail, or every missing name has been defined or removed since. Further methods of a generic function
    /// do not count.
    pub(crate) fn record(&mut self, evaluated: &DefiningForm, changes: &Changes) {
        let Self { forms, index } = self;
        if changes.role != FormRole::Failed {
            forms.retain(|_, unrestored| unrestored.form != *evaluated);
        }
        if forms.is_empty() {
            *index = None;
            return;
        }
        let index = index.get_or_insert_with(|| index_names(forms));
        for name in changes.defined.iter().chain(&changes.removed) {
            for position in index.remove(name).into_iter().flatten() {
                if let Entry::Occupied(mut form) = forms.entry(position) {
                    let missing = &mut form.get_mut().missing;
                    if missing.remove(name) && missing.is_empty() {
                        form.remove();
                    }
                }
            }
        }
    }

    /// Adds forms at these positions.
    pub(super) fn extend(&mut self, forms: impl IntoIterator<Item = (u64, UnrestoredForm)>) {
        self.forms.extend(forms);
        self.index = None;
    }

    /// Adds forms after all others.
    pub(crate) fn append(&mut self, forms: Vec<UnrestoredForm>) {
        let next = self.forms.last_key_value().map_or(0, |(last, _)| last + 1);
        self.extend((next..).zip(forms));
    }

    /// Keeps only the newest forms: at most `max_forms`, which together take at most `max_bytes` bytes of JSON. Returns the
    /// positions of the other forms, in order.
    pub(super) fn keep_newest(&mut self, max_forms: usize, max_bytes: usize) -> Vec<u64> {
        let mut bytes = 0;
        let fits = |form: &&UnrestoredForm| {
            bytes += form.size();
            bytes <= max_bytes
        };
        let kept = self.forms.values().rev().take(max_forms).take_while(fits).count();
        let excess = self.forms.len() - kept;
        self.index = None;
        (0..excess).filter_map(|_| self.forms.pop_first()).map(|(position, _)| position).collect()
    }

    /// Removes the forms from `position` on.
    pub(super) fn truncate(&mut self, position: u64) {
        drop(self.forms.split_off(&position));
        self.index = None;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.forms.is_empty()
    }

    /// Returns the forms in the order of their positions.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &UnrestoredForm> {
        self.forms.values()
    }

    /// Returns the forms from `position` on, each with its position.
    pub(super) fn iter_from(&self, position: u64) -> impl Iterator<Item = (u64, &UnrestoredForm)> {
        self.forms.range(position..).map(|(at, form)| (*at, form))
    }

    /// Serializes the forms with their positions.
    pub(super) fn serialize_with_positions<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.forms)
    }
}

/// Returns the positions of the forms that made each missing name.
fn index_names(forms: &BTreeMap<u64, UnrestoredForm>) -> HashMap<String, Vec<u64>> {
    let mut index: HashMap<String, Vec<u64>> = HashMap::new();
    for (position, form) in forms {
        for name in &form.missing {
            index.entry(name.clone()).or_default().push(*position);
        }
    }
    index
}

impl FromIterator<UnrestoredForm> for UnrestoredForms {
    fn from_iter<I: IntoIterator<Item = UnrestoredForm>>(forms: I) -> Self {
        Self { forms: (0..).zip(forms).collect(), index: None }
    }
}

impl From<Vec<UnrestoredForm>> for UnrestoredForms {
    fn from(forms: Vec<UnrestoredForm>) -> Self {
        forms.into_iter().collect()
    }
}

impl Serialize for UnrestoredForms {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::recovery::definitions::Definition;

    fn form(code: &str) -> DefiningForm {
        DefiningForm { code: code.to_owned(), package: "APP".to_owned() }
    }

    fn changes(lines: &str) -> Changes {
        Changes::parse(lines.lines())
    }

    fn unrestored(code: &str, changes: Changes) -> UnrestoredForm {
        let definition = Definition {
            form: form(code),
            changes,
            local: false,
            attached: false,
            evaluation: 1,
            took: 0,
            too_long: None,
        };
        UnrestoredForm::new(&definition, "it failed")
    }

    /// Returns true if the evaluation resolves the only unrestored form.
    fn resolves(forms: &mut UnrestoredForms, code: &str, lines: &str) -> bool {
        assert_eq!(forms.iter().len(), 1);
        forms.record(&form(code), &changes(lines));
        forms.is_empty()
    }

    #[test]
    fn an_unrestored_form_is_resolved_once_all_its_names_are_defined_or_removed() {
        let missing = |lines| UnrestoredForms::from(vec![unrestored("(define-both)", changes(lines))]);
        let mut both = missing("=other\n+FUNCTION APP::F\n+VARIABLE APP::F");
        assert!(!resolves(&mut both, "(defun f ())", "=defun\n+FUNCTION APP::F"));
        assert!(!resolves(&mut both, "(defun f ())", "=defun\n+FUNCTION APP::F"));
        assert!(!resolves(&mut both, "(defun g ())", "=defun\n+FUNCTION APP::G"));
        assert!(resolves(&mut both, "(unintern 'f)", "=other\n-VARIABLE APP::F"));
        // An unrestored form without names is resolved only by an equal form that does not fail.
        let mut load = missing("=other");
        assert!(!resolves(&mut load, "(load \"a\")", "=other\n+FUNCTION APP::F"));
        assert!(!resolves(&mut load, "(define-both)", "=failed\n+FUNCTION APP::F"));
        assert!(resolves(&mut load, "(define-both)", "=other"));
    }

    #[test]
    fn an_unrestored_method_is_resolved_by_the_same_form_or_the_removal_of_its_function() {
        let method = "(defmethod m ((x string)))";
        let missing = || UnrestoredForms::from(vec![unrestored(method, changes("=defmethod\n+FUNCTION M\n*METHOD M"))]);
        let mut lost = missing();
        for further in ["=defmethod\n+FUNCTION M\n*METHOD M", "=defmethod\n*METHOD M", "=defmethod\n+FUNCTION M"] {
            assert!(!resolves(&mut lost, "(further)", further), "{further}");
        }
        assert!(resolves(&mut lost, method, "=defmethod\n*METHOD M"));
        assert!(resolves(&mut missing(), "(fmakunbound 'm)", "=other\n-FUNCTION M\n-MACRO M\n-METHOD M"));
    }

    #[test]
    fn forms_that_are_added_after_a_removal_are_resolved_only_by_their_own_names() {
        let mut forms: UnrestoredForms =
            ["(f)", "(g)"].into_iter().map(|code| unrestored(code, changes("=other\n+FUNCTION F"))).collect();
        // This removes the form at the last position, which the next form gets.
        forms.record(&form("(g)"), &changes("=other"));
        forms.append(vec![unrestored("(load)", changes("=other"))]);
        forms.record(&form("(defun g ())"), &changes("=defun\n+FUNCTION G"));
        assert_eq!(forms.iter().len(), 2);
        forms.record(&form("(defun f ())"), &changes("=defun\n+FUNCTION F"));
        assert!(forms.iter().map(|form| &*form.form.code).eq(["(load)"]));
        assert!(forms.iter_from(1).map(|(position, _)| position).eq([1]));
        forms.extend([(7, unrestored("(h)", changes("=other\n+FUNCTION H")))]);
        assert_eq!(forms.keep_newest(1, usize::MAX), [1]);
        forms.record(&form("(defun h ())"), &changes("=defun\n+FUNCTION H"));
        assert!(forms.is_empty());
    }

    #[test]
    fn the_time_to_record_an_evaluation_does_not_depend_on_the_number_of_missing_names() {
        let time = |names: usize| {
            let lines = |form: usize| (0..names).map(move |name| format!("+VARIABLE {:0100}", form * names + name));
            let missing = |form| lines(form).collect::<Vec<_>>().join("\n");
            let forms = (0..100).map(|form| unrestored(&form.to_string(), changes(&missing(form))));
            let mut forms: UnrestoredForms = forms.collect();
            let evaluated: Vec<_> = (0..500).map(|number| changes(&format!("+VARIABLE X{number}"))).collect();
            // The first evaluation makes the index.
            forms.record(&form("(first)"), &Changes::default());
            let begin = Instant::now();
            evaluated.iter().for_each(|changes| forms.record(&form("(defvar x 1)"), changes));
            assert_eq!(forms.iter().len(), 100);
            begin.elapsed()
        };
        let (few, many) = (time(10), time(500));
        assert!(many < few * 5 + Duration::from_millis(100), "few names: {few:?}, many names: {many:?}");
    }
}
