//! A session's definitions as a file that any SBCL loads.

use std::fmt::Write as _;

use super::log::Loaded;
use crate::handover::{Entry, Unrestored};

/// The package that a file begins in.
const USER: &str = "COMMON-LISP-USER";

/// What has to be required where a form names a package of it: packages, and their module. This program's image has
/// them all.
const MODULES: [(&[&str], &str); 14] = [
    (&["asdf", "uiop"], "asdf"),
    (&["sb-bsd-sockets"], "sb-bsd-sockets"),
    (&["sb-cltl2"], "sb-cltl2"),
    (&["sb-concurrency"], "sb-concurrency"),
    (&["sb-cover"], "sb-cover"),
    (&["sb-graph"], "sb-graph"),
    (&["sb-grovel"], "sb-grovel"),
    (&["sb-introspect"], "sb-introspect"),
    (&["sb-manual"], "sb-manual"),
    (&["sb-md5"], "sb-md5"),
    (&["sb-posix"], "sb-posix"),
    (&["sb-rotate-byte"], "sb-rotate-byte"),
    (&["sb-rt"], "sb-rt"),
    (&["sb-sprof"], "sb-sprof"),
];

/// The forms in their order, each in its package; what cannot be a form is said in comments.
pub(super) fn export(name: &str, loaded: &Loaded) -> String {
    let mut text = String::new();
    _ = writeln!(text, ";;;; The session {}: what its forms defined, in their order.", commented(name));
    _ = writeln!(text, ";;;; Values that were assigned later, threads and open files are not in a file of source.");
    if loaded.dropped > 0 {
        _ = writeln!(text, "\n;;; Missing: the {} oldest forms, for which there was no room.", loaded.dropped);
    }
    for Unrestored { form, reason } in &loaded.unrestored {
        _ = writeln!(text, "\n;;; Missing: it could not be restored ({}).", commented(reason));
        form.code.trim().lines().for_each(|line| _ = writeln!(text, ";; {line}"));
    }
    let mut modules = MODULES.iter().filter(|(packages, _)| packages.iter().any(|package| is_named(package, loaded)));
    if let Some((_, first)) = modules.next() {
        _ = write!(text, "\n(require :{first})");
        modules.for_each(|(_, module)| _ = write!(text, "\n(require :{module})"));
        text.push('\n');
    }
    let mut package = USER;
    for (index, entry) in loaded.entries.iter().enumerate() {
        if is_in_package(&entry.form.code) || is_replaced(&loaded.entries[index..], &loaded.entries) {
            continue;
        }
        if entry.form.package != package {
            // The package that is left may use nothing.
            let prefix = if package == USER { "" } else { "cl:" };
            package = &entry.form.package;
            _ = write!(text, "\n({prefix}in-package {})\n", designator(package));
        }
        _ = writeln!(text, "\n{}", entry.form.code.trim());
    }
    text
}

/// True when some form writes a symbol of this package with its prefix.
fn is_named(package: &str, loaded: &Loaded) -> bool {
    let prefix = format!("{package}:");
    loaded.entries.iter().any(|entry| {
        let code = entry.form.code.to_ascii_lowercase();
        code.match_indices(&prefix).any(|(at, _)| {
            !code[..at].ends_with(|before: char| before.is_alphanumeric() || matches!(before, '-' | ':' | '/'))
        })
    })
}

/// True for what only chooses a package: each form is in its own anyway.
fn is_in_package(code: &str) -> bool {
    let operator = code.trim_start().strip_prefix('(').and_then(|rest| rest.split_whitespace().next());
    operator.is_some_and(|name| ["in-package", "cl:in-package"].iter().any(|known| name.eq_ignore_ascii_case(known)))
}

/// How a package is named in source.
fn designator(package: &str) -> String {
    let is_plain = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || "-./+*".contains(c);
    if package.chars().all(is_plain) && package.contains(|c: char| c.is_ascii_uppercase()) {
        format!(":{}", package.to_ascii_lowercase())
    } else {
        crate::session::quoted(package)
    }
}

/// A text that ends no comment.
fn commented(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// True when the first of these, a function, is defined again further on, and nothing before that can have called it:
/// there are but functions between, and no macro in `all` whose expansion might.
fn is_replaced(entries: &[Entry], all: &[Entry]) -> bool {
    let Some((first, rest)) = entries.split_first() else { return false };
    let Some(name) = function_name(first) else { return false };
    let again =
        rest.iter().position(|entry| function_name(entry) == Some(name) && entry.form.package == first.form.package);
    let Some(again) = again else { return false };
    let is_function =
        |entry: &Entry| ["(defun ", "(defmethod ", "(defgeneric "].iter().any(|op| entry.form.code.starts_with(op));
    let expands = |entry: &Entry| {
        ["macro", "eval-when", "#."].iter().any(|word| entry.form.code.to_ascii_lowercase().contains(word))
    };
    rest[..again].iter().all(is_function) && !all.iter().any(expands)
}

/// The name of the function that a form is the plain definition of.
fn function_name(entry: &Entry) -> Option<&str> {
    let rest = entry.form.code.strip_prefix("(defun ")?.trim_start();
    let end = rest.find(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ';' | '"' | '|'))?;
    rest.get(..end).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::DefiningForm;

    fn exported(forms: &[(&str, &str)]) -> String {
        let entry = |(package, code): &(&str, &str)| Entry {
            form: DefiningForm { code: (*code).to_owned(), package: (*package).to_owned() },
            local: false,
            evaluation: 1,
            took: 0,
        };
        let text = export("x", &Loaded { entries: forms.iter().map(entry).collect(), ..Loaded::default() });
        text.lines().skip(2).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn forms_are_in_their_packages_and_modules_required() {
        let text = exported(&[
            (USER, "(defpackage :app (:use :cl))"),
            (USER, "(in-package :app)"),
            ("APP", "(defun pid () (sb-posix:getpid))"),
            ("APP", "(defvar *x* 1)"),
            ("My \"own\"", "(cl:defvar x 2)"),
            (USER, "(defun my-asdf:f () \"my-uiop: none\")"),
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
    fn a_package_is_left_that_does_not_use_common_lisp() {
        let text = exported(&[
            (USER, "(defpackage :bare (:use))"),
            ("BARE", "(cl:defvar x 1)"),
            (USER, "(defvar *y* 1)"),
            ("BARE", "(cl:defvar z 1)"),
            ("APP", "(defvar *x* 1)"),
        ]);
        assert_eq!(
            text,
            "(defpackage :bare (:use))\n(in-package :bare)\n(cl:defvar x 1)\n(cl:in-package :common-lisp-user)\n\
             (defvar *y* 1)\n(in-package :bare)\n(cl:defvar z 1)\n(cl:in-package :app)\n(defvar *x* 1)"
        );
    }

    #[test]
    fn a_function_is_there_once_where_nothing_can_tell() {
        let f1 = (USER, "(defun f () 1)");
        let f2 = (USER, "(defun f () 2)");
        let g = (USER, "(defun g () (f))");
        assert_eq!(exported(&[f1, g, f2]), "(defun g () (f))\n(defun f () 2)");
        assert_eq!(exported(&[f1, (USER, "(defvar *x* (f))"), f2]).lines().count(), 3);
        assert_eq!(exported(&[f1, g, f2, (USER, "(defmacro m () (g))")]).lines().count(), 4);
        assert_eq!(exported(&[f1, ("APP", "(defun f () 2)")]).lines().count(), 3);
    }
}
