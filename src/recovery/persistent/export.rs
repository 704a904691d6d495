//! The export of a session's definitions as a source file that any SBCL can load.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::outcome::{DefiningForm, FormRole};
use crate::recovery::definitions::{Definition, Definitions, UnrestoredForm};
use crate::recovery::state::RecoveryState;

/// The current package at the beginning of a source file.
const USER_PACKAGE: &str = "COMMON-LISP-USER";

/// Returns the definitions of the session `name` as source text: each form in its package, in the order of evaluation,
/// with `require` forms for the modules that the forms use. Forms that could not be restored or exported appear as
/// comments.
pub(super) fn export(name: &str, state: &RecoveryState) -> String {
    let definitions: Vec<&Definition> = state.definitions().collect();
    let dropped = state.definitions.as_ref().map_or(0, Definitions::dropped_count);
    let mut text = String::new();
    _ = writeln!(text, ";;;; The definitions of session {}, in order of evaluation.", without_control_characters(name));
    _ = writeln!(
        text,
        ";;;; Not included: threads, open files, and values assigned to variables after their definitions."
    );
    if dropped > 0 {
        let forms = if dropped == 1 { "form" } else { "forms" };
        _ = writeln!(text, "\n;;; Missing: {dropped} older {forms}, dropped to save space.");
    }
    for UnrestoredForm { form, reason, .. } in state.unrestored.iter() {
        push_missing(&mut text, &format!("this form could not be restored ({reason})."), form);
    }
    for UnrestoredForm { form, reason, .. } in
        state.definitions.iter().flat_map(|definitions| definitions.dropped_forms(0))
    {
        push_missing(&mut text, &format!("{reason}. The form, or its beginning:"), form);
    }
    let modules: BTreeSet<_> = definitions.iter().flat_map(|definition| &definition.changes.modules).collect();
    for (index, module) in modules.iter().enumerate() {
        _ = write!(text, "{}(require :{module})", if index == 0 { "\n" } else { "" });
        text.push('\n');
    }
    let mut package = USER_PACKAGE;
    for (index, definition) in definitions.iter().enumerate() {
        if let Some(obstacle) = definition.replay_obstacle() {
            let begins = if definition.too_long.is_some() { " It begins:" } else { "" };
            push_missing(&mut text, &format!("{obstacle}.{begins}"), &definition.form);
            continue;
        }
        // This function writes its own `in-package` forms.
        if definition.changes.role == FormRole::PackageSelection
            || definition.is_reload()
            || is_replaced(&definitions[index..], &definitions)
        {
            continue;
        }
        if definition.form.package != package {
            // The current package might not use COMMON-LISP.
            let prefix = if package == USER_PACKAGE { "" } else { "cl:" };
            package = &definition.form.package;
            _ = write!(text, "\n({prefix}in-package {})\n", package_designator(package));
        }
        _ = writeln!(text, "\n{}", definition.form.code.trim());
    }
    text
}

/// Appends a form as a comment, with the `reason` why the form is missing.
fn push_missing(text: &mut String, reason: &str, form: &DefiningForm) {
    _ = writeln!(text, "\n;;; Missing: {}", without_control_characters(reason));
    form.code.trim().lines().for_each(|line| _ = writeln!(text, ";; {line}"));
}

/// Returns a package designator for source text: a lower-case keyword, or a string for a name that such a keyword cannot
/// express without escapes.
fn package_designator(package: &str) -> String {
    let is_plain = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || "-./+*".contains(c);
    if package.chars().all(is_plain) && package.contains(|c: char| c.is_ascii_uppercase()) {
        format!(":{}", package.to_ascii_lowercase())
    } else {
        crate::session::quoted(package)
    }
}

/// Returns `text` in a form that fits into a comment on one line: control characters become spaces.
fn without_control_characters(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Returns true when the first of `definitions` is a function that a later form defines again, and no code can have called
/// the first version: only functions and methods lie between the two definitions, and no form in `all` can run code while
/// these functions are compiled.
fn is_replaced(definitions: &[&Definition], all: &[&Definition]) -> bool {
    let Some((first, rest)) = definitions.split_first() else { return false };
    let defines_same = |other: &&Definition| {
        other.changes.role == FormRole::Function && other.changes.defined == first.changes.defined
    };
    if first.changes.role != FormRole::Function || first.changes.defined.len() != 1 {
        return false;
    }
    let Some(again) = rest.iter().position(defines_same) else { return false };
    let is_function =
        |definition: &&Definition| matches!(definition.changes.role, FormRole::Function | FormRole::GenericFunction);
    let runs_early = |definition: &&Definition| {
        let kinds = ["MACRO ", "SYMBOL-MACRO ", "COMPILER-MACRO ", "SETF-EXPANDER ", "TYPE "];
        let expands = |name: &String| kinds.iter().any(|kind| name.starts_with(kind));
        definition.changes.role == FormRole::Unknown || definition.changes.defined.iter().any(expands)
    };
    rest[..again].iter().all(is_function) && !all.iter().any(runs_early)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Changes;
    use crate::recovery::event::SessionEvent;

    /// Returns the exported text of definitions, without the header and empty lines. Each definition is given by its
    /// package, its code, and its changes as Lisp reports them.
    fn exported(forms: &[(&str, &str, &str)]) -> String {
        let mut state = RecoveryState::new(true);
        for (package, code, changes) in forms {
            state.apply(SessionEvent::Defined(Definition {
                form: DefiningForm { code: (*code).to_owned(), package: (*package).to_owned() },
                changes: Changes::parse(changes.lines()),
                local: false,
                attached: false,
                evaluation: 1,
                took: 0,
                too_long: None,
            }));
        }
        let text = export("x", &state);
        text.lines().skip(2).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn forms_are_exported_in_their_packages_and_modules_are_required() {
        let text = exported(&[
            (USER_PACKAGE, "(defpackage :app (:use :cl))", "+PACKAGE APP"),
            (USER_PACKAGE, "(in-package :app)", "=in-package"),
            ("APP", "(defun pid () (sb-posix:getpid))", "=defun\n+FUNCTION APP::PID\n?sb-posix"),
            ("APP", "(defvar *x* 1)", "+VARIABLE APP::*X*"),
            ("My \"own\"", "(cl:defvar x 2)", ""),
            (USER_PACKAGE, "(defun my-asdf:f () \"my-uiop: none\")", "=defun\n+FUNCTION MY-ASDF::F"),
        ]);
        assert_eq!(
            text,
            "(require :sb-posix)\n(defpackage :app (:use :cl))\n(in-package :app)\n(defun pid () (sb-posix:getpid))\n\
             (defvar *x* 1)\n(cl:in-package \"My \\\"own\\\"\")\n(cl:defvar x 2)\n\
             (cl:in-package :common-lisp-user)\n(defun \
             my-asdf:f () \"my-uiop: none\")"
        );
    }

    #[test]
    fn in_package_is_qualified_in_packages_that_may_not_use_common_lisp() {
        let text = exported(&[
            (USER_PACKAGE, "(defpackage :bare (:use))", ""),
            ("BARE", "(cl:defvar x 1)", ""),
            (USER_PACKAGE, "(defvar *y* 1)", ""),
            ("BARE", "(cl:defvar z 1)", ""),
            ("APP", "(defvar *x* 1)", ""),
        ]);
        assert_eq!(
            text,
            "(defpackage :bare (:use))\n(in-package :bare)\n(cl:defvar x 1)\n(cl:in-package :common-lisp-user)\n\
             (defvar *y* 1)\n(in-package :bare)\n(cl:defvar z 1)\n(cl:in-package :app)\n(defvar *x* 1)"
        );
    }

    #[test]
    fn a_replaced_function_is_omitted_unless_other_forms_may_have_called_it() {
        let f = "=defun\n+FUNCTION COMMON-LISP-USER::F";
        let f1 = (USER_PACKAGE, "(defun f () 1)", f);
        let f2 = (USER_PACKAGE, "(defun f () 2)", f);
        let g = (USER_PACKAGE, "(defun g () (f))", "=defun\n+FUNCTION COMMON-LISP-USER::G");
        assert_eq!(exported(&[f1, g, f2]), "(defun g () (f))\n(defun f () 2)");
        let x = (USER_PACKAGE, "(defvar *x* (f))", "+VARIABLE COMMON-LISP-USER::*X*");
        assert_eq!(exported(&[f1, x, f2]).lines().count(), 3);
        let m = (USER_PACKAGE, "(defmacro m () (g))", "+MACRO COMMON-LISP-USER::M");
        assert_eq!(exported(&[f1, g, f2, m]).lines().count(), 4);
        let c = (USER_PACKAGE, "(define-compiler-macro g () (f))", "+COMPILER-MACRO COMMON-LISP-USER::G");
        assert_eq!(exported(&[f1, g, f2, c]).lines().count(), 4);
        let place = (USER_PACKAGE, "(defsetf g () (v) (f) v)", "+SETF-EXPANDER COMMON-LISP-USER::G");
        assert_eq!(exported(&[f1, g, f2, place]).lines().count(), 4);
        assert_eq!(exported(&[f1, ("APP", "(defun f () 2)", "=defun\n+FUNCTION APP::F")]).lines().count(), 3);
        let method = (USER_PACKAGE, "(defmethod f ((x t)) 2)", "=defmethod\n*METHOD COMMON-LISP-USER::F");
        assert_eq!(exported(&[f1, method]).lines().count(), 2);
    }
}
