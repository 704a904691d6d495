//! find-symbols, find-references and macroexpand: searching the image without evaluating code.

use std::collections::BTreeSet;

use std::path::Path;
use std::time::Duration;

use crate::client::{Scratch, Server, call_err, call_ok, server_arch};
use crate::libraries::{self, installed};
use crate::processes::kill_worker;
use serde_json::{Value, json};

fn ask(server: &mut Server, tool: &str, arguments: Value) -> Vec<String> {
    call_ok(server, tool, arguments).lines().map(str::to_owned).collect()
}

fn symbols(server: &mut Server, arguments: Value) -> Vec<String> {
    ask(server, "find-symbols", arguments)
}

/// Returns the names in the lines of find-symbols.
fn names(lines: &[String]) -> Vec<&str> {
    lines.iter().map(|line| line.split_once("  ").map_or(&**line, |(name, _)| name)).collect()
}

fn references(server: &mut Server, name: &str, relation: &str) -> Vec<String> {
    ask(server, "find-references", json!({"name": name, "relation": relation}))
}

fn expand(server: &mut Server, form: &str, depth: &str) -> String {
    call_ok(server, "macroexpand", json!({"form": form, "depth": depth}))
}

/// Evaluates to the number of symbols in all packages.
const COUNT_SYMBOLS: &str =
    "(let ((n 0)) (dolist (p (list-all-packages) n) (do-symbols (s p) (when (eq (symbol-package s) p) (incf n)))))";

// ---- find-symbols

#[test]
fn find_symbols_ranks_matches_and_prints_names_as_typed_in_the_package() {
    let mut server = Server::ready();
    server.evaluate(
        "(defpackage :my-lib (:use :cl) (:export #:flatten))
         (in-package :my-lib)
         (defun flatten (tree) \"Make it flat.
         And more.\" tree)
         (defun flatten-deep (tree) tree)
         (defmacro with-flatten ((x) &body body) `(let (,x) ,@body))
         (defvar *unflatten* 1 \"How flat.\")
         (defclass reflattened () ())
         (in-package :cl-user)",
    );
    let found = symbols(&mut server, json!({"query": "flatten", "package": "my-lib"}));
    assert_eq!(
        found,
        [
            "my-lib:flatten  function (TREE)  Make it flat.",
            "my-lib::flatten-deep  function (TREE)",
            "my-lib::with-flatten  macro ((X) &BODY BODY)",
            "my-lib::*unflatten*  variable  How flat.",
            "my-lib::reflattened  class",
        ]
    );
    // Queries from within the package, and from a package with a nickname for it, print shorter names.
    server.evaluate("(in-package :my-lib)");
    let found = symbols(&mut server, json!({"query": "FLATTEN-", "limit": 1}));
    assert_eq!(found[0], "flatten-deep  function (TREE)");
    server.evaluate("(defpackage :other (:use :cl) (:local-nicknames (:l :my-lib))) (in-package :other)");
    let found = symbols(&mut server, json!({"query": "l:flat"}));
    assert_eq!(names(&found)[..2], ["l:flatten", "l::flatten-deep"]);
    server.assert_works();
}

#[test]
fn find_symbols_filters_by_kind_package_and_external() {
    let mut server = Server::ready();
    server.evaluate(
        "(defpackage :shop (:nicknames :shp) (:use :cl) (:export #:price #:price-error)) (in-package :shop)
         (defgeneric price (x)) (defun price-of (x) x) (defvar *price* 1) (defconstant +price+ 2)
         (define-condition price-error (error) ()) (defstruct price-tag) (deftype price-range () 'integer)
         (defmacro with-price (&body body) `(progn ,@body)) (define-symbol-macro the-price 3) (in-package :cl-user)",
    );
    let mut kind = |kind: &str| {
        let found = symbols(&mut server, json!({"query": "price", "package": "shop", "type": kind}));
        let mut found: Vec<_> = names(&found).into_iter().map(str::to_owned).collect();
        found.sort();
        found
    };
    let functions =
        ["shop:price", "shop::copy-price-tag", "shop::make-price-tag", "shop::price-of", "shop::price-tag-p"];
    let mut sorted: Vec<_> = functions.to_vec();
    sorted.sort_unstable();
    assert_eq!(kind("function"), sorted);
    assert_eq!(kind("variable"), ["shop::*price*", "shop::+price+", "shop::the-price"]);
    assert_eq!(kind("macro"), ["shop::with-price"]);
    assert_eq!(kind("class"), ["shop::price-range", "shop::price-tag", "shop:price-error"]);
    let found = symbols(&mut server, json!({"query": "price", "package": "SHOP", "external": true}));
    assert_eq!(names(&found), ["shop:price", "shop:price-error"]);
    let found = symbols(&mut server, json!({"query": "sh*p", "type": "package"}));
    assert_eq!(found, ["shop  package shp: 2 exported"]);
    let found = symbols(&mut server, json!({"query": "with-*-file", "external": true, "limit": 1}));
    assert!(found[0].starts_with("with-open-file  macro "), "{found:?}");
    let found = symbols(&mut server, json!({"query": "table hash make"}));
    assert!(found[0].starts_with("make-hash-table  function "), "{found:?}");
    let found = symbols(&mut server, json!({"query": "shop:"}));
    assert!(found.len() > 10, "{found:?}");
    let wrong = call_err(&mut server, "find-symbols", json!({"query": "x", "type": "thing"}));
    assert!(wrong.contains("one of function, macro, variable, class, package"), "{wrong}");
    let nowhere = call_err(&mut server, "find-symbols", json!({"query": "x", "package": "shpo"}));
    assert!(nowhere.contains("no package named \"shpo\"") && nowhere.contains("SHOP"), "{nowhere}");
}

#[test]
fn find_symbols_reports_omitted_matches_and_near_names() {
    let mut server = Server::ready();
    let found = symbols(&mut server, json!({"query": "hash-table", "limit": 2}));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[2].starts_with("... ") && found[2].contains("more; pass limit"), "{found:?}");
    let many = symbols(&mut server, json!({"query": "e", "limit": 1000}));
    let text = many.join("\n");
    assert!(text.chars().count() <= 9_500, "{}", text.chars().count());
    assert!(many.last().unwrap().contains("more; not enough room: narrow the list by `type`"), "{:?}", many.last());
    assert_eq!(
        symbols(&mut server, json!({"query": "stirng-upcase"})),
        ["Nothing matches \"stirng-upcase\".", "Similar names: string-upcase, nstring-upcase."]
    );
    let excluded = symbols(&mut server, json!({"query": "string-upcase", "type": "variable"}));
    assert_eq!(excluded[..2], ["Nothing matches \"string-upcase\" (only kind variable).", "Filtered out: 2 matches."]);
}

#[test]
fn find_symbols_escapes_names_with_spaces_and_lower_case() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun |a b| () 1) (defun |MiXed| () 2) (defvar naïve 1) (defpackage \"lower\" (:use)) \
         (defun |lower|::x () 1) (defun |[ERROR]| () 1) (setf (symbol-function '|two
lines|) #'car)",
    );
    assert_eq!(symbols(&mut server, json!({"query": "|a b|"})), ["|a b|  function ()"]);
    assert_eq!(names(&symbols(&mut server, json!({"query": "mixed", "package": "cl-user"}))), ["|MiXed|"]);
    assert_eq!(names(&symbols(&mut server, json!({"query": "NAÏVE"}))), ["naïve"]);
    assert_eq!(names(&symbols(&mut server, json!({"query": "lower", "type": "package"})))[0], "|lower|");
    assert_eq!(names(&symbols(&mut server, json!({"query": "x", "package": "lower"}))), ["|lower|::x"]);
    assert_eq!(names(&symbols(&mut server, json!({"query": "|[error]|"}))), ["[error]"]);
    assert_eq!(symbols(&mut server, json!({"query": "two lines"})).len(), 1);
    let keywords = symbols(&mut server, json!({"query": ":external-form"}));
    assert!(names(&keywords).contains(&":external-format"), "{keywords:?}");
}

#[test]
fn symbol_name_arguments_follow_the_reader_escape_rules() {
    let mut server = Server::ready();
    server.evaluate(
        r"(defun |a\|b| () 1) (defun |a:b| () 2) (defun |Foo|bar () 3) (defun x\y () 4)
          (defun calls () (list (|a\|b|) (cl-user::|a:b|) (|Foo|bar) (x\y)))"
            .replace(r"\\", r"\")
            .as_str(),
    );
    for name in [r"|a\|b|", "|a:b|", "cl-user::|a:b|", "|Foo|bar", "|FooBAR|", r"x\y", "|Xy|"] {
        let callers = references(&mut server, name, "callers");
        assert!(callers[0].starts_with("CALLS  evaluation 1, line 2: "), "{name}: {callers:?}");
        let described = call_ok(&mut server, "describe-symbol", json!({"name": name}));
        assert!(described.contains("[FUNCTION]"), "{name}: {described}");
    }
}

#[test]
fn find_references_says_where_sbcl_keeps_no_cross_references() {
    let mut server = Server::ready();
    server.evaluate(
        "(define-symbol-macro brief (car (list 1 2))) (deftype small () '(integer 0 9)) (define-condition odd (error) ())
         (defun user (x) (declare (type small x)) (if (= x brief) (error 'odd) x))
         (deftype both () '(integer 0 9)) (defvar both 0) (defun user-of-both () both)
         (defsetf place (x) (v) `(rplaca ,x ,v)) (define-method-combination combined)
         (sb-alien:define-alien-type foreign sb-alien:int) (sb-alien:define-alien-variable environ (* t))
         (defun user-of-others (x) (setf (place x) environ brief 2))",
    );
    for (name, relation, expected) in [
        ("brief", "references", "BRIEF is a symbol macro: SBCL keeps no records of where it is used."),
        ("small", "callers", "SMALL is a type: SBCL keeps no records of where it is used."),
        ("brief", "sets", "BRIEF is a symbol macro: SBCL keeps no records of where it is used."),
        ("environ", "callers", "ENVIRON is an alien variable: SBCL keeps no records of where it is used."),
        ("environ", "references", "ENVIRON is an alien variable: SBCL keeps no records of where it is used."),
        ("foreign", "callers", "FOREIGN is an alien type: SBCL keeps no records of where it is used."),
        ("(setf place)", "callers", "(SETF PLACE) is a setf expander: SBCL keeps no records of where it is used."),
        ("combined", "callers", "COMBINED is a method combination: SBCL keeps no records of where it is used."),
        (
            "odd",
            "methods",
            "No method specialises on ODD. Not searched: other code that names the class. The relation `references` \
             finds some of that code.",
        ),
    ] {
        assert_eq!(references(&mut server, name, relation)[0], expected);
    }
    assert!(references(&mut server, "odd", "references")[0].starts_with("USER  evaluation 1, line 2: "));
    // A type and a variable may have the same name.
    let both = references(&mut server, "both", "references");
    assert!(both.iter().any(|line| line.starts_with("USER-OF-BOTH  evaluation 1, line 3: ")), "{both:?}");
    let default = call_ok(&mut server, "find-references", json!({"name": "environ"}));
    assert_eq!(default, "ENVIRON is an alien variable: SBCL keeps no records of where it is used.");
    assert_eq!(expand(&mut server, "brief", "all"), "BRIEF → CAR\n\n(car (list 1 2))");
    // Code that only sets a variable refers to the variable, but does not read it.
    server.evaluate("(defvar *only-set* nil) (defun sets-it (x) (setf *only-set* x)) (defun same (x) x)");
    assert_eq!(references(&mut server, "*only-set*", "references")[0], "No loaded code reads *ONLY-SET*.");
    let sets = references(&mut server, "*only-set*", "sets");
    assert!(sets[0].starts_with("SETS-IT  evaluation 2, line 1: "), "{sets:?}");
    assert!(
        sets[1].contains(" quoted lists, top-level code outside functions, code compiled with (space 3), and files"),
        "{sets:?}"
    );
    assert_eq!(references(&mut server, "same", "callees")[0], "The compiled code of SAME calls nothing by name.");
    // The package KEYWORD uses no packages.
    let text = call_ok(&mut server, "describe-symbol", json!({"name": ":quite-unknown-keyword"}));
    assert!(text.starts_with("Symbol QUITE-UNKNOWN-KEYWORD not found in package KEYWORD."), "{text}");
}

#[test]
fn expansions_of_compiler_macros_are_listed_with_the_calls() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun twice (x) (* 2 x)) (define-compiler-macro twice (x) `(+ ,x ,x))
         (defun (setf part) (new x) (list new x)) (define-compiler-macro (setf part) (new x) `(list ,new ,x))
         (defun user (x) (twice x))
         (defun setter (x) (setf (part x) 1))",
    );
    for (name, user) in [("twice", "USER  evaluation 1, line 3: "), ("(setf part)", "SETTER  evaluation 1, line 4: ")] {
        let found = references(&mut server, name, "expansions");
        assert!(found[0].starts_with(user), "{name}: {found:?}");
        assert_eq!(
            found[1],
            "SBCL records the expansions of a compiler macro as calls: the list may have calls that are not expanded."
        );
    }
    let described = call_ok(&mut server, "describe-symbol", json!({"name": "(setf part)"}));
    assert!(described.contains("\n\n(SETF COMMON-LISP-USER::PART) [COMPILER MACRO]\n"), "{described}");
}

#[test]
fn find_symbols_finds_alien_names_setf_expanders_method_combinations_and_compiler_macros() {
    let mut server = Server::ready();
    server.evaluate(
        "(defsetf rare-place (x) (v) `(rplaca ,x ,v)) (define-compiler-macro rare-call () 1)
         (define-method-combination rare-combination :documentation \"Seldom.\")
         (sb-alien:define-alien-type rare-integer sb-alien:int)
         (sb-alien:define-alien-variable (\"environ\" rare-environ) (* t))",
    );
    let mut found = symbols(&mut server, json!({"query": "rare-", "package": "cl-user"}));
    found.sort();
    assert_eq!(
        found,
        [
            "rare-call  compiler macro",
            "rare-combination  method combination  Seldom.",
            "rare-environ  alien variable",
            "rare-integer  alien type",
            "rare-place  setf expander",
        ]
    );
    for (kind, name) in [("variable", "rare-environ"), ("class", "rare-integer"), ("macro", "rare-place")] {
        let found = symbols(&mut server, json!({"query": name, "type": kind}));
        assert_eq!(names(&found), [name]);
    }
}

#[test]
fn searching_forty_thousand_symbols_interns_no_symbol() {
    let mut server = Server::ready();
    server.evaluate(
        "(let ((p (make-package :many :use '())))
           (dotimes (i 20000)
             (let ((s (intern (format nil \"GENERATED-NAME-~36R\" i) p)))
               (when (zerop (mod i 2)) (setf (symbol-function s) #'car)))))",
    );
    let before = server.evaluate(COUNT_SYMBOLS);
    assert!(before.trim_start_matches("=> ").parse::<u64>().unwrap() > 40_000, "{before}");
    for query in ["generated-name-zz", "nothing-like-that", "many:generated", "*-name-zz*", "brand new words", "#:x"] {
        let found = symbols(&mut server, json!({"query": query}));
        assert!(!found.is_empty());
    }
    references(&mut server, "quite-unknown-name", "callers");
    assert_eq!(server.evaluate(COUNT_SYMBOLS), before);
    // Symbols without a definition are not listed when others match.
    let found = symbols(&mut server, json!({"query": "generated-name-rs"}));
    assert!(found[0].starts_with("many::generated-name-rs"), "{found:?}");
}

// ---- find-references

const CALLERS: &str = "(defun target (x) x)
(defun direct (x) (target x))
(defun by-name (x)
  (list
   (mapcar #'target x)))
(defun local (x) (labels ((in (y) (target y))) (in x)))
(defgeneric gen (x))
(defmethod gen ((x integer)) (target x))
(defmethod gen :around ((x integer)) (target (call-next-method)))
(defmacro mac (x) `(target ,x))
(defun expanding (x) (mac x))
(defvar *level* 0)
(defun reads () *level*)
(defun sets () (setf *level* 1))
(defun binds (x) (let ((*level* x)) (funcall x)))
(defun (setf place) (new) (target new))
(defun sets-place () (setf (place) 2))
(defclass animal () ((name :accessor name-of)))
(defclass dog (animal) ())
(defclass poodle (dog) ())
(defmethod gen ((x dog)) x)
(defun quiet (x) (declare (optimize (space 3) (debug 0))) (target x))
(declaim (inline small))
(defun small (x) (target x))
(defun big (x) (small x))
(defun data () 'target)";

#[test]
fn callees_exclude_functions_from_expansions_of_standard_macros() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun target (x) x)
         (defclass slotted () ((slot)))
         (defgeneric macros (x))
         (defmethod macros ((x slotted))
           (with-slots (slot) x (destructuring-bind (a &key b) slot (ecase a (1 (target b))))))
         (defun internals (list) (sb-impl::%putf list :a (destructuring-bind (a) list a)))",
    );
    let found = |server: &mut Server, name: &str| {
        let found = references(server, name, "callees");
        found.iter().filter_map(|line| Some(line.split_once("  ")?.0.to_owned())).collect::<Vec<_>>()
    };
    // On aarch64, the expansion calls GETF, which is not an internal function.
    let getf = (server_arch() == "aarch64").then_some("GETF");
    assert_eq!(found(&mut server, "macros"), ["TARGET"].into_iter().chain(getf).collect::<Vec<_>>());
    assert_eq!(found(&mut server, "internals"), ["SB-IMPL::%PUTF"]);
    for (name, reason) in [
        ("", "find-references: name must be a function, variable, macro or class, such as my-app:run, not \"\"."),
        (" ", "find-references: name must be a function, variable, macro or class, such as my-app:run, not \"\"."),
        ("#:c", "find-references: nothing can refer to #:c: the reader makes a new symbol for each #: name."),
    ] {
        assert_eq!(call_err(&mut server, "find-references", json!({"name": name})), reason);
    }
    let text = call_err(&mut server, "find-references", json!({"name": "a|b"}));
    assert!(text.contains("a|b does not spell a symbol: a vertical bar in it is not closed."), "{text}");
}

#[test]
fn find_references_lists_callers_with_place_and_source_line() {
    let mut server = Server::ready();
    server.evaluate(CALLERS);
    let found = references(&mut server, "target", "callers");
    assert_eq!(
        found,
        [
            "DIRECT  evaluation 1, line 2: (defun direct (x) (target x))",
            "BY-NAME  evaluation 1, line 5: (mapcar #'target x)))",
            "LOCAL  evaluation 1, line 6: (defun local (x) (labels ((in (y) (target y))) (in x)))",
            "(:METHOD GEN (INTEGER))  evaluation 1, line 8: (defmethod gen ((x integer)) (target x))",
            "(:METHOD GEN :AROUND (INTEGER))  evaluation 1, line 9: (defmethod gen :around ((x integer)) (target (call-next-method)))",
            "(MACRO-FUNCTION MAC)  evaluation 1, line 10: (defmacro mac (x) `(target ,x))  (as data)",
            "EXPANDING  evaluation 1, line 11: (defun expanding (x) (mac x))",
            "(SETF PLACE)  evaluation 1, line 16: (defun (setf place) (new) (target new))",
            "QUIET  evaluation 1, line 22: (defun quiet (x) (declare (optimize (space 3) (debug 0))) (target x))",
            "SMALL  evaluation 1, line 24: (defun small (x) (target x))",
            "BIG  evaluation 1, line 25: (defun big (x) (small x))",
            "DATA  evaluation 1, line 26: (defun data () 'target)  (as data)",
            "Not searched: TARGET in quoted lists, names computed for FUNCALL, recursive calls, top-level code outside functions and files that are not \
             loaded.",
        ]
    );
    // Further relations of the same definitions.
    let one = |found: Vec<String>| found[0].clone();
    assert_eq!(
        one(references(&mut server, "mac", "callers")),
        "EXPANDING  evaluation 1, line 11: (defun expanding (x) (mac x))"
    );
    assert_eq!(
        one(references(&mut server, "mac", "expansions")),
        "EXPANDING  evaluation 1, line 11: (defun expanding (x) (mac x))"
    );
    assert_eq!(
        one(references(&mut server, "(setf place)", "callers")),
        "SETS-PLACE  evaluation 1, line 17: (defun sets-place () (setf (place) 2))"
    );
    assert_eq!(
        one(references(&mut server, "small", "callers")),
        "BIG  evaluation 1, line 25: (defun big (x) (small x))"
    );
    assert_eq!(
        one(references(&mut server, "*level*", "references")),
        "READS  evaluation 1, line 13: (defun reads () *level*)"
    );
    assert_eq!(
        one(references(&mut server, "*level*", "sets")),
        "SETS  evaluation 1, line 14: (defun sets () (setf *level* 1))"
    );
    assert_eq!(
        one(references(&mut server, "*level*", "binds")),
        "BINDS  evaluation 1, line 15: (defun binds (x) (let ((*level* x)) (funcall x)))"
    );
    let variable = call_ok(&mut server, "find-references", json!({"name": "*level*"}));
    assert!(
        variable.contains("(setf *level* 1))  (sets)") && variable.contains("(funcall x)))  (binds)"),
        "{variable}"
    );
    let callees = references(&mut server, "expanding", "callees");
    assert_eq!(
        callees[..2],
        [
            "MAC  evaluation 1, line 11: (defun expanding (x) (mac x))  (macro)",
            "TARGET  evaluation 1, line 11: (defun expanding (x) (mac x))",
        ]
    );
    let methods = references(&mut server, "gen", "methods");
    assert_eq!(methods.len(), 3, "{methods:?}");
    assert!(methods.contains(&"(:METHOD GEN (DOG))  evaluation 1, line 21: (defmethod gen ((x dog)) x)".to_owned()));
    let on_class = references(&mut server, "animal", "methods");
    assert_eq!(on_class.len(), 2, "{on_class:?}");
    assert!(on_class.iter().all(|line| line.contains("(defclass animal ()")), "{on_class:?}");
    assert_eq!(
        references(&mut server, "animal", "subclasses"),
        [
            "DOG  evaluation 1, line 19: (defclass dog (animal) ())",
            "POODLE  evaluation 1, line 20: (defclass poodle (dog) ())"
        ]
    );
    assert_eq!(references(&mut server, "poodle", "subclasses"), ["POODLE has no subclasses."]);
    assert_eq!(references(&mut server, "direct", "sets"), ["DIRECT names no variable."]);
    let limited = ask(&mut server, "find-references", json!({"name": "target", "limit": 3}));
    assert_eq!(limited[3], "... 9 more; pass limit 12 to see them all.");
    let unknown = references(&mut server, "tragte", "callers");
    assert_eq!(unknown[1], "Similar names: TARGET, TRACE.");
}

#[test]
fn names_in_lists_of_references_are_accepted_as_names() {
    let mut server = Server::ready();
    server.evaluate(CALLERS);
    server.evaluate("(defun uses-gen () (gen 1)) (defun uses-local () (local 1))");
    server.evaluate(
        "(defun (sb-ext:cas cell) (old new x) (list old new x)) (defun uses-cas () (sb-ext:cas (cell 1) 2 3))",
    );
    for line in references(&mut server, "target", "callers") {
        let Some((name, _)) = line.split_once("  evaluation ") else { continue };
        let text = call_ok(&mut server, "find-references", json!({"name": name}));
        assert!(!text.contains("not found"), "{name}: {text}");
    }
    for (name, caller) in [
        ("(:METHOD GEN :AROUND (INTEGER))", "USES-GEN  "),
        ("(flet inner :in (:method gen ((eql #\\a))))", "USES-GEN  "),
        ("(LAMBDA (X) :IN LOCAL)", "USES-LOCAL  "),
        ("(MACRO-FUNCTION MAC)", "EXPANDING  "),
        ("#'(setf place)", "SETS-PLACE  "),
        ("(CAS CELL)", "USES-CAS  "),
        ("(sb-ext:cas cell)", "USES-CAS  "),
    ] {
        let found = references(&mut server, name, "callers");
        assert!(found[0].starts_with(caller), "{name}: {found:?}");
        let is_whole =
            found.contains(&"References are recorded for global names only: the list is for GEN.".to_owned());
        assert_eq!(is_whole, caller == "USES-GEN  ", "{name}: {found:?}");
    }
    let described = call_ok(&mut server, "describe-symbol", json!({"name": "(:METHOD GEN (INTEGER))"}));
    assert!(described.starts_with("COMMON-LISP-USER::GEN [GENERIC FUNCTION]"), "{described}");
    let described = call_ok(&mut server, "describe-symbol", json!({"name": "(cas cell)"}));
    assert!(described.starts_with("(CAS COMMON-LISP-USER::CELL) [FUNCTION]\n  Arglist: (OLD NEW X)\n"), "{described}");
    let wrong = call_err(&mut server, "find-references", json!({"name": "(LAMBDA (X) :IN \"a.lisp\")"}));
    assert!(
        wrong.contains("(LAMBDA (X) :IN \"a.lisp\") is not a name. Names have the form foo, (setf foo), "),
        "{wrong}"
    );
    server.assert_works();
}

#[test]
fn callers_follow_redefinition_and_fmakunbound() {
    let mut server = Server::ready();
    server.evaluate("(defun target (x) x) (defun caller (x) (target x)) (defun gone (x) (target x))");
    assert_eq!(references(&mut server, "target", "callers").len(), 3);
    server.evaluate("(defun caller (x)\n  (list (target x)))");
    server.evaluate("(fmakunbound 'gone)");
    let found = references(&mut server, "target", "callers");
    assert_eq!(found[0], "CALLER  evaluation 2, line 2: (list (target x)))");
    assert!(found[1].starts_with("Not searched"), "{found:?}");
    server.evaluate("(defun caller (x) x)");
    assert_eq!(references(&mut server, "target", "callers")[0], "No loaded code calls TARGET.");
    // The garbage collector moves code, which changes no result.
    server.evaluate("(defun late (x) (target x)) (dotimes (i 200) (compile nil `(lambda () ,i))) (gc :full t)");
    assert_eq!(
        references(&mut server, "target", "callers")[0],
        "LATE  evaluation 5, line 1: (defun late (x) (target x))"
    );
    // A top-level form that ran once is not listed as a caller.
    server.evaluate("(let ((x 1)) (target x)) (target 2)");
    assert_eq!(references(&mut server, "target", "callers").len(), 2);
}

#[test]
fn lambda_expressions_in_evaluated_forms_are_listed_as_callers() {
    let mut server = Server::ready();
    server.evaluate("(defun target (x) x)");
    let stored = [
        "(defvar *hooks* (list (lambda () (target 1))))",
        "(defparameter *hook* #'(lambda () (list (target 2))))",
        "(setf (symbol-value '*other-hook*) (lambda () (target 3)))",
        "(defvar *closure* (let ((x 4)) (lambda () (list x (target x)))))",
        "(setf (fdefinition 'also-target) (lambda () (target 5)))",
    ];
    for form in stored {
        server.evaluate(form);
    }
    // These forms ran once. (TIME, for example, is not among them: newer SBCLs compile its lambda expression with the form.)
    server.evaluate("(let ((x 6)) (target x)) (progn (target 7)) (target 8)");
    let found = references(&mut server, "target", "callers");
    let places: Vec<_> = found.iter().filter_map(|line| Some(line.split_once("  evaluation ")?.1.to_owned())).collect();
    let expected: Vec<_> =
        stored.iter().enumerate().rev().map(|(index, form)| format!("{}, line 1: {form}", index + 2)).collect();
    assert_eq!(places, expected, "{found:?}");
    assert_eq!(
        references(&mut server, "also-target", "callees")[0],
        format!("TARGET  evaluation 6, line 1: {}", stored[4])
    );
}

/// Every result of SB-INTROSPECT, which SLIME uses, is reported.
#[test]
fn find_references_includes_every_result_of_sb_introspect() {
    let mut server = Server::ready();
    server.evaluate(CALLERS);
    for (function, name, relation) in [
        ("who-calls", "target", "callers"),
        ("who-calls", "small", "callers"),
        ("who-references", "*level*", "references"),
        ("who-sets", "*level*", "sets"),
        ("who-binds", "*level*", "binds"),
        ("who-macroexpands", "mac", "expansions"),
    ] {
        let listing = server.evaluate(&format!(
            "(let ((*print-pretty* nil))
               (dolist (entry (sb-introspect:{function} '{name}))
                 (let ((name (car entry)))
                   (format t \"~s~%\" (if (typep name '(cons (eql sb-pcl::fast-method))) `(:method ,@(rest name)) name)))))"
        ));
        let slime: Vec<_> = listing.lines().skip(1).take_while(|line| !line.is_empty()).collect();
        assert!(!slime.is_empty(), "{listing}");
        let found = references(&mut server, name, relation);
        let ours: Vec<_> =
            found.iter().filter_map(|line| line.split_once("  evaluation ").map(|(name, _)| name)).collect();
        let missing: Vec<_> = slime.iter().filter(|caller| !ours.contains(caller)).collect();
        assert!(missing.is_empty(), "{relation} of {name}: {missing:?}\n{found:?}");
        // Code without cross-references is found through the functions that it calls, and data by containing the
        // symbol.
        let more: Vec<_> = ours.iter().filter(|caller| !slime.contains(caller)).copied().collect();
        let expected: &[_] = if name == "target" { &["(MACRO-FUNCTION MAC)", "QUIET", "BIG", "DATA"] } else { &[] };
        assert_eq!(more, expected, "{relation} of {name}");
    }
}

#[test]
fn callers_in_compiled_files_have_file_and_line_or_changed_since() {
    let directory = Scratch::new();
    let file = directory.join("lib.lisp");
    std::fs::write(
        &file,
        ";;; A library.\n(defpackage :lib (:use :cl))\n(in-package :lib)\n\n(eval-when (:compile-toplevel :load-toplevel :execute)\n  \
         (defvar *fast* '(optimize (speed 1) (safety 1) (debug 1))))\n\n(defun base (x)\n  x)\n\n(defun user (x y)\n  \
         \"Not the base of it.\"\n  (declare #.*fast*)\n  (when y\n    (base\n     x)))\n",
    )
    .unwrap();
    let mut server = Server::ready();
    server.evaluate(&format!("(load (compile-file {file:?}))"));
    let found = references(&mut server, "lib::base", "callers");
    assert_eq!(found[0], format!("LIB::USER  {}:15: (base", file.display()));
    // A caller in a file that changed after its compilation is marked.
    std::fs::write(&file, "(in-package :lib) (defun something-else ())").unwrap();
    let found = references(&mut server, "lib::base", "callers");
    assert!(found[0].starts_with(&format!("LIB::USER  {} (file has changed)", file.display())), "{found:?}");
}

#[test]
fn tests_relation_lists_tests_that_reach_a_function() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun parse (x) x) (defun evaluate (x) (parse x)) (defun unrelated (x) x)
         (defvar *tests* '())
         (defmacro deftest (name &body body) `(push (cons ',name (lambda () ,@body)) *tests*))
         (deftest parse-empty (assert (null (parse nil))))
         (deftest evaluate-one
           (assert (eql 1 (evaluate 1))))
         (deftest nothing (unrelated 1))
         (sb-rt:deftest by-rt (evaluate 2) 2)",
    );
    let found = references(&mut server, "parse", "tests");
    assert_eq!(
        found[..3],
        [
            "(DEFTEST PARSE-EMPTY)  evaluation 1, line 4: (deftest parse-empty (assert (null (parse nil))))",
            "BY-RT  source unknown  (via EVALUATE)",
            "(DEFTEST EVALUATE-ONE)  evaluation 1, line 5: (deftest evaluate-one  (via EVALUATE)",
        ]
    );
    assert!(found[3].starts_with("Not searched: "), "{found:?}");
    assert_eq!(references(&mut server, "*tests*", "tests")[0], "No loaded test is known to call *TESTS*.");
}

/// Uses the real framework if Debian's package is installed.
#[test]
fn tests_relation_lists_fiveam_tests_that_reach_a_function() {
    let installed = Path::new("/usr/share/common-lisp/source/fiveam").exists();
    assert!(installed || std::env::var_os("CI").is_none(), "scripts/setup.sh test installs fiveam");
    if !installed {
        eprintln!("fiveam is not installed: left out");
        return;
    }
    let mut server = Server::ready();
    let load = json!({"code": "(asdf:load-system :fiveam)", "timeout": 120});
    call_ok(&mut server, "evaluate-lisp", load);
    server.evaluate(
        "(defpackage :my (:use :cl :fiveam)) (in-package :my)
         (defun parse (x) x) (defun run-it (x) (parse x))
         (def-suite all) (in-suite all)
         (test parses (is (eql 1 (parse 1))))
         (test runs
           (is (eql 1 (run-it 1))))
         (test (late :compile-at :run-time) (is (eql 2 (run-it 2))))
         (test other (is (eql 1 1)))",
    );
    let found = references(&mut server, "parse", "tests");
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!(found[0], "MY::PARSES  evaluation 2, line 4: (test parses (is (eql 1 (parse 1))))");
    assert!(found.contains(&"MY::RUNS  evaluation 2, line 5: (test runs  (via MY::RUN-IT)".to_owned()), "{found:?}");
    assert!(found.iter().any(|line| line.starts_with("MY::LATE  evaluation 2, line 7: (test (late ")), "{found:?}");
}

// ---- macroexpand

#[test]
fn macroexpand_shows_the_steps_and_a_readable_expansion() {
    let mut server = Server::ready();
    insta::assert_snapshot!(expand(&mut server, "(cond (a b) (c d))", "full"), @r"
    COND → IF

    (if a
        b
        (if c
            d
            nil))
    ");
    server.evaluate(
        "(defmacro one (x) `(two ,x)) (defmacro two (x) (let ((g (gensym)) (h (gensym)) (v (gensym \"VALUE\")))
           `(let ((,g ,x) (,h 2) (,v 3)) (list ,g ,h ,v ,g))))",
    );
    server.evaluate("(define-symbol-macro symbolic (one 1))");
    for depth in ["full", "all"] {
        let text = expand(&mut server, "symbolic", depth);
        assert!(text.starts_with("SYMBOLIC → ONE → TWO → LET\n\n"), "{depth}: {text}");
    }
    assert!(expand(&mut server, "not-symbolic", "all").starts_with("The form contains no macro form.\n\n"));
    let whole = "ONE → TWO → LET\n\n(let ((#:g1 (f 'x)) (#:g2 2) (#:value1 3))\n  (list #:g1 #:g2 #:value1 #:g1))";
    assert_eq!(expand(&mut server, "(one (f 'x))", "full"), whole);
    assert_eq!(expand(&mut server, "(one (f 'x))", "full"), whole);
    insta::assert_snapshot!(expand(&mut server, "(one 1)", "once"), @r"
    ONE → TWO

    (two 1)
    ");
    insta::assert_snapshot!(expand(&mut server, "(macrolet ((m (x) `(list ,x))) (symbol-macrolet ((y 'z)) (m y) (when a (one b))))", "all"), @r"
    M → LIST, WHEN → IF, ONE → TWO → LET

    (macrolet ((m (x)
                 `(list ,x)))
      (symbol-macrolet ((y 'z))
        (list 'z)
        (if a
            (let ((#:g1 b) (#:g2 2) (#:value1 3))
              (list #:g1 #:g2 #:value1 #:g1)))))
    ");
    insta::assert_snapshot!(expand(&mut server, "(car x)", "full"), @r"
    CAR is a function, so the form is not a macro form. Pass depth `all` to expand the form's subforms.

    (car x)
    ");
    insta::assert_snapshot!(expand(&mut server, "(wehn x)", "full"), @r"
    WEHN names no function or macro, so the form is not a macro form. Macros with similar names: WHEN.

    (wehn x)
    ");
    assert!(expand(&mut server, "(or a b) (and c d)", "once").ends_with("\n\nOnly the first form was expanded."));
}

/// Apart from the names of gensyms, the results equal those of `macroexpand` in the image.
#[test]
fn macroexpand_agrees_with_lisp_at_every_depth() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun same (a b)
           (let ((names (make-hash-table)))
             (labels ((same (a b)
                        (cond ((and (consp a) (consp b)) (and (same (car a) (car b)) (same (cdr a) (cdr b))))
                              ((and (symbolp a) (symbolp b) a (null (symbol-package a)) (null (symbol-package b))))
                              (t (equalp a b)))))
               (same a b))))",
    );
    for form in [
        "(with-open-file (s \"x\" :direction :output) (print 1 s))",
        "(push (f) (car (g)))",
        "(defun f (x) \"doc\" (declare (fixnum x)) (1+ x))",
        "(case x ((1 2) :a) (#\\b \"str\") (t 'z))",
        "(do ((i 0 (1+ i))) ((> i 3) i) (print i))",
        "(handler-case (f) (error (e) (list e)))",
        "(multiple-value-setq (a b) (floor 1 2))",
        "(setf (gethash 'a h) #c(1 2))",
    ] {
        for (depth, function) in
            [("full", "macroexpand"), ("once", "macroexpand-1"), ("all", "sb-cltl2:macroexpand-all")]
        {
            let text = expand(&mut server, form, depth);
            let expansion = text.split_once("\n\n").unwrap().1;
            let read = expansion.replace("#<", "#.(error) ");
            if read == expansion {
                let code = format!("(same ({function} '{form}) '{expansion})");
                let same = server.evaluate(&code);
                assert!(same == "=> T", "{form} {depth}\n{expansion}\n{same}");
            }
        }
    }
}

/// Macro functions may keep the symbols of the form that they expand, so these must be the symbols that evaluations read.
#[test]
fn macroexpand_reads_the_symbols_of_the_session() {
    let mut server = Server::ready();
    server.evaluate("(defvar *kept* '()) (defmacro keep (&rest names) (push names *kept*) `(list ,@names))");
    assert!(expand(&mut server, "(keep new-1 :new-2 cl-user::new-3)", "once").starts_with("KEEP → LIST\n\n"));
    assert_eq!(server.evaluate("(equal '((new-1 :new-2 cl-user::new-3)) *kept*)"), "=> T");
}

#[test]
fn macroexpand_of_a_string_with_many_colons_ends_within_its_time_limit() {
    let mut server = Server::ready();
    let form = format!("(when a (f \"{}\"))", "de:".repeat(30_000));
    let text = expand(&mut server, &form, "full");
    assert!(text.starts_with("WHEN → IF\n\n"), "{text}");
}

#[test]
fn macroexpand_reports_errors_and_evaluates_only_macro_functions() {
    let mut server = Server::ready();
    server.evaluate(
        "(defvar *n* 0) (defmacro bad (x) (error \"no ~a here\" x)) (defmacro endless (x) `(endless (,x)))
         (defmacro noisy () (print :noise) (warn \"noise\") '(incf *n*)) (defmacro deep () (labels ((f () (1+ (f)))) (f)))",
    );
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(bad 7)"}));
    insta::assert_snapshot!(failed, @r"
    [ERROR] SIMPLE-ERROR
    no 7 here
    While expanding (BAD 7).
    ");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(progn #.(incf *n*))"}));
    assert!(failed.starts_with("[ERROR] SB-INT:SIMPLE-READER-ERROR\n") && failed.contains("*READ-EVAL*"), "{failed}");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(let (("}));
    assert!(failed.starts_with("[ERROR] END-OF-FILE\n"), "{failed}");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(list\n  nowhere:x)"}));
    assert!(failed.contains("Package NOWHERE does not exist. Line: 2, Column: "), "{failed}");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(endless 1)"}));
    assert!(failed.contains("10000 macro forms"), "{failed}");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(deep)"}));
    assert!(failed.contains("CONTROL-STACK-EXHAUSTED"), "{failed}");
    assert!(expand(&mut server, "(noisy)", "full").starts_with("NOISY → INCF"), "the macro is expanded again");
    assert_eq!(server.evaluate("*n*"), "=> 0");
    // The error is not recorded as the session's last error.
    assert!(call_ok(&mut server, "describe-last-error", json!({})).starts_with("No error information"));
}

#[test]
fn endless_macro_expansion_times_out_after_10_seconds() {
    let mut server = Server::ready();
    server.evaluate("(defmacro stuck () (loop))");
    let failed = call_err(&mut server, "macroexpand", json!({"form": "(stuck)"}));
    assert!(failed.contains("did not finish within 10 seconds"), "{failed}");
    assert_eq!(names(&symbols(&mut server, json!({"query": "stuck"}))), ["stuck"]);
    server.assert_works();
}

/// A query that kills the image is repeated once and then answered with an error.
#[test]
fn macro_or_print_method_that_kills_the_image_answers_image_lost() {
    let mut server = Server::ready();
    server.evaluate(
        "(defmacro deadly () (sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void sb-alien:int)) 1))",
    );
    let lost = call_err(&mut server, "macroexpand", json!({"form": "(deadly)"}));
    assert!(
        lost.starts_with("[ERROR] IMAGE-LOST\nTwo images were lost during this request, so it is not retried.\n"),
        "{lost}"
    );
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
    assert!(call_ok(&mut server, "describe-last-error", json!({})).starts_with("No error information"));
    assert_eq!(names(&symbols(&mut server, json!({"query": "deadly"}))), ["deadly"]);
    // A value whose printing kills the image is printed at most twice, too.
    server.evaluate(
        "(defclass mine () ()) (defmethod print-object ((m mine) s) (sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void sb-alien:int)) 1)) (defvar *mine*) (setf *mine* nil)",
    );
    server.evaluate("(defparameter *mine* (make-instance 'mine))");
    let lost = call_err(&mut server, "describe-symbol", json!({"name": "*mine*"}));
    assert!(lost.starts_with("[ERROR] IMAGE-LOST\n"), "{lost}");
    assert!(server.evaluate("(+ 1 2)").ends_with("=> 3"));
}

#[test]
fn long_macro_expansion_is_truncated_after_its_beginning() {
    let mut server = Server::ready();
    server.evaluate(
        "(defmacro large () `(list ,@(loop for i below 20000 collect `(f ,i)))) (defmacro round-about () ''#1=(a . #1#))",
    );
    let text = expand(&mut server, "(large)", "full");
    assert!(text.chars().count() <= 9_500, "{}", text.chars().count());
    assert!(text.starts_with("LARGE → LIST\n\n(list (f 0)") && text.ends_with(" characters omitted]"), "{text}");
    assert!(expand(&mut server, "(round-about)", "full").ends_with("'#1=(a . #1#)"));
}

// ---- All search tools

#[test]
fn search_tools_ignore_printer_settings_and_running_evaluations() {
    let mut server = Server::ready();
    server.evaluate(
        "(defun target (x) x) (defun caller (x) (target x)) (defmacro mac (x) `(target ,x)) (defstruct (odd (:print-object (lambda (o s) (error \"no ~a ~a\" o s)))) a)",
    );
    let all = |server: &mut Server| {
        [
            call_ok(server, "find-symbols", json!({"query": "caller", "package": "cl-user"})),
            call_ok(server, "find-references", json!({"name": "target"})),
            call_ok(server, "macroexpand", json!({"form": "(mac (list 10 'x))"})),
        ]
    };
    let before = all(&mut server);
    assert_eq!(before[0], "caller  function (X)");
    insta::assert_snapshot!(before[2], @r"
    MAC → TARGET

    (target (list 10 'x))
    ");
    // The user's printer variables have unusual values.
    server.evaluate(
        "(setf *print-base* 2 *print-radix* t *print-case* :capitalize *print-length* 0 *print-level* 0 *print-circle* t \
         *print-pretty* t *print-right-margin* 1 *print-lines* 1 *print-readably* t *print-escape* nil *print-gensym* nil)",
    );
    assert_eq!(all(&mut server), before);
    // The current package is locked, then deleted.
    server.evaluate("(defpackage :locked (:use :cl) (:lock t)) (in-package :locked)");
    let expansion = expand(&mut server, "(or locked-new 1)", "full");
    assert_eq!(expansion.lines().next(), Some("OR → LET"));
    server.evaluate("(in-package :cl-user)");
    // The queries during an evaluation.
    let running = server.post_running("", "(loop)", 60.0);
    assert_eq!(all(&mut server), before);
    server.notify("notifications/cancelled", json!({"requestId": running}));
    // A reset removes the definitions from the results.
    call_ok(&mut server, "reset-session", json!({}));
    assert!(symbols(&mut server, json!({"query": "caller", "package": "cl-user"}))[0].starts_with("Nothing matches"));
    assert!(references(&mut server, "target", "callers")[0].starts_with("Symbol TARGET not found"));
    insta::assert_snapshot!(expand(&mut server, "(when a b)", "full"), @r"
    WHEN → IF

    (if a
        b)
    ");
}

#[test]
fn search_tools_answer_after_image_loss() {
    let mut server = Server::ready();
    server.evaluate("(defun target (x) x) (defun caller (x) (target x))");
    kill_worker(&server);
    let found = references(&mut server, "target", "callers");
    assert!(found[0].starts_with("CALLER  evaluation "), "{found:?}");
    assert_eq!(symbols(&mut server, json!({"query": "caller", "package": "cl-user"})), ["caller  function (X)"]);
    insta::assert_snapshot!(expand(&mut server, "(unless a b)", "full"), @r"
    UNLESS → IF

    (if a
        nil
        b)
    ");
    server.assert_silent_for(Duration::from_millis(1));
}

// ---- Values

#[test]
fn describe_symbol_previews_contents_of_unreadably_printed_values() {
    let mut server = Server::ready();
    let value = server.evaluate(
        "(defclass account () ((owner :initform \"Ann\") (log :initform (make-list 1000)) (open))) (make-instance 'account)",
    );
    assert!(value.starts_with("=> #<ACCOUNT {"), "{value}");
    let described = call_ok(&mut server, "describe-symbol", json!({"name": "*"}));
    let (_, variable) = described.split_once("COMMON-LISP:* [VARIABLE]").expect("a variable, too");
    let contents = variable.split_once("\n  Contents: ").expect(variable).1;
    assert!(contents.starts_with("3 slots\n    OWNER: \"Ann\"\n    LOG: (NIL NIL "), "{variable}");
    assert!(contents.contains("...)\n    OPEN: unbound\n") && contents.len() < 1_000, "{variable}");
    server.evaluate(
        "(defvar *table* (let ((h (make-hash-table :test 'equal))) (dotimes (i 30 h) (setf (gethash (format nil \"k~d\" i) h) (* i i)))))",
    );
    let described = call_ok(&mut server, "describe-symbol", json!({"name": "*table*"}));
    assert!(described.contains("\n  Contents: 30 entries\n    \"k0\": 0\n    \"k1\": 1\n"), "{described}");
    assert!(described.contains("\n    ... 20 more"), "{described}");
    // A value that prints completely needs no preview.
    server.evaluate("(defvar *whole* (list 1 2))");
    assert!(!call_ok(&mut server, "describe-symbol", json!({"name": "*whole*"})).contains("Contents"));
    // Values with broken print methods.
    server.evaluate(
        "(defclass hostile () ((a :initform 1))) (defmethod print-object ((h hostile) s) (error \"no\")) (defvar *h* (make-instance 'hostile))
         (defclass nested () ((h :initform (make-instance 'hostile)))) (defvar *n* (make-instance 'nested))",
    );
    assert!(call_ok(&mut server, "describe-symbol", json!({"name": "*n*"})).contains("    H: #<unprintable HOSTILE>"));
    server.assert_works();
}

/// Returns the names in the result of a form of SLIME's server.
fn names_from_slime(server: &mut Server, form: &str) -> BTreeSet<String> {
    let code = format!(
        "(labels ((outermost (name)
                    (cond ((atom name) name)
                          ((member :in name) (outermost (second (member :in name))))
                          ((member (first name) '(defmethod method)) (second name))
                          (t name))))
           (let ((*package* (find-package :cl-user)) (swank::*buffer-package* (find-package :cl-user))
                 (swank::*buffer-readtable* *readtable*))
             (handler-bind ((warning #'muffle-warning))
               (dolist (name (mapcar #'outermost {form}))
                 (format t \"~A~%\" (if (stringp name) name (prin1-to-string name)))))))"
    );
    let text = server.evaluate(&code);
    let names = text.lines().skip(1).take_while(|line| !line.is_empty());
    names.map(str::to_ascii_uppercase).collect()
}

/// Returns the outermost function of the one that a line of find-references begins with.
fn outermost(line: &str) -> String {
    let name = line.split("  ").next().unwrap_or_default();
    let inner = name.rsplit_once(":IN ").map(|(_, outer)| outer.trim_end_matches(')'));
    let method = name.strip_prefix("(:METHOD ").and_then(|rest| rest.split(' ').next());
    inner.or(method).unwrap_or(name).to_owned()
}

#[test]
fn references_expansions_and_symbols_agree_with_slime() {
    if !installed("slime") || !installed("esrap") {
        return;
    }
    let mut server = libraries::start_with(&[]);
    server.initialize("2025-06-18");
    let load = "(require :asdf)
                (let ((*standard-output* (make-broadcast-stream)) (*error-output* (make-broadcast-stream)))
                  (handler-bind ((warning #'muffle-warning))
                    (asdf:load-system \"swank\") (asdf:load-system \"esrap\")))";
    call_ok(&mut server, "evaluate-lisp", json!({"code": load, "timeout": 600}));
    for (relation, question, name) in [
        ("callers", "who-calls", "alexandria:ensure-list"),
        ("callers", "who-calls", "esrap::find-rule-cell"),
        ("callers", "who-calls", "esrap::result-position"),
        ("expansions", "who-macroexpands", "alexandria:when-let"),
        ("expansions", "who-macroexpands", "esrap::expression-case"),
        ("references", "who-references", "esrap::*rules*"),
        ("binds", "who-binds", "esrap::*current-rule*"),
    ] {
        let theirs = names_from_slime(&mut server, &format!("(mapcar #'first (swank/backend:{question} '{name}))"));
        let text = call_ok(&mut server, "find-references", json!({"name": name, "relation": relation, "limit": 200}));
        let lines = text.lines().take_while(|line| !line.starts_with("Not searched"));
        let ours: BTreeSet<_> = lines.map(outermost).collect();
        assert!(!theirs.is_empty() && theirs.is_subset(&ours), "{relation} of {name}:\n{theirs:?}\n{ours:?}");
        // Callers that SLIME does not report come from the constants of code and from calls by name.
        assert!(ours.len() <= theirs.len() + 3, "{relation} of {name}:\n{theirs:?}\n{ours:?}");
    }
    // Normalizes whitespace and the numbers of gensyms.
    let spaced = |text: &str| {
        let mut unnumbered = String::new();
        let mut of_gensym = false;
        for character in text.chars() {
            of_gensym = unnumbered.ends_with("#:") || of_gensym && (character.is_alphanumeric() || character == '-');
            if !(of_gensym && character.is_ascii_digit()) {
                unnumbered.push(character);
            }
        }
        unnumbered.split_whitespace().collect::<Vec<_>>().join(" ").to_ascii_uppercase()
    };
    for form in ["(when a (push b c))", "(loop for x in y collect (incf x))", "(cond ((f) 1) (t (return 2)))"] {
        let code = format!(
            "(let ((swank::*buffer-package* (find-package :cl-user)) (swank::*buffer-readtable* *readtable*))
               (princ (swank:swank-macroexpand-all {form:?})) 1)"
        );
        let theirs = server.evaluate(&code);
        let theirs = spaced(theirs.strip_prefix("[stdout]\n").and_then(|text| text.split("\n\n=> ").next()).unwrap());
        let text = call_ok(&mut server, "macroexpand", json!({"form": form, "depth": "all"}));
        let ours = text.split_once("\n\n").map_or(text.as_str(), |(_, expansion)| expansion);
        assert_eq!(spaced(ours), theirs, "{form}");
    }
    for query in ["flatten", "ensure-list", "rule-cell"] {
        let form = format!("(mapcar #'second (swank:apropos-list-for-emacs {query:?}))");
        let theirs = names_from_slime(&mut server, &form);
        let text = call_ok(&mut server, "find-symbols", json!({"query": query, "limit": 200}));
        // SLIME names a symbol's home package even where another package exports the symbol.
        let bare = |name: &str| name.rsplit(':').next().unwrap_or_default().to_ascii_uppercase();
        let theirs: BTreeSet<_> = theirs.iter().map(|name| bare(name)).collect();
        let ours: BTreeSet<_> = text.lines().filter_map(|line| line.split("  ").next()).map(bare).collect();
        assert!(theirs.is_subset(&ours), "{query}:\n{theirs:?}\n{ours:?}");
    }
}
