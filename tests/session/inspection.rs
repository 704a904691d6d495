//! Definitions of the session, descriptions of symbols, and resets.

use crate::support::{TestSession, fresh};
use sbcl::outcome::{DefinitionKind, SymbolDescription};
use sbcl::report::{self, DefinitionFilter};

const NONE: &str = "No definitions in this session.";
const NO_MATCH: &str = "No definition in this session matches the filter. Omit `type` to list all definitions.";

fn of_kind(lisp: &TestSession, kind: DefinitionKind) -> Vec<String> {
    let definitions = lisp.definitions().expect("definitions can be listed");
    definitions.into_iter().filter(|definition| definition.kind == kind).map(|definition| definition.text).collect()
}

fn functions(lisp: &TestSession) -> Vec<String> {
    of_kind(lisp, DefinitionKind::Function)
}

fn variables(lisp: &TestSession) -> Vec<String> {
    of_kind(lisp, DefinitionKind::Variable)
}

fn macros(lisp: &TestSession) -> Vec<String> {
    of_kind(lisp, DefinitionKind::Macro)
}

fn classes(lisp: &TestSession) -> Vec<String> {
    of_kind(lisp, DefinitionKind::Class)
}

fn packages(lisp: &TestSession) -> Vec<String> {
    of_kind(lisp, DefinitionKind::Package)
}

// list-definitions.

#[test]
fn fresh_session_lists_no_definitions() {
    let lisp = fresh();
    assert_eq!(lisp.definitions().expect("definitions"), []);
    assert_eq!(lisp.definitions_text(DefinitionFilter::All), NONE);
    assert_eq!(lisp.definitions_text(DefinitionFilter::Functions), NO_MATCH);
}

#[test]
fn expressions_and_local_functions_are_not_listed() {
    let lisp = fresh();
    lisp.values(
        "(+ 1 2) (let ((x 1)) (list x)) (mapcar (lambda (x) x) '(1)) (flet ((f () 1)) (f)) (macrolet ((m () 1)) (m))",
    );
    lisp.error("(error \"x\")");
    lisp.error("(no-such-function)");
    assert_eq!(lisp.definitions_text(DefinitionFilter::All), NONE);
}

#[test]
fn list_definitions_has_a_section_per_kind_and_can_be_filtered() {
    let lisp = fresh();
    lisp.values("(defun square (x) (* x x)) (defvar *counter* 0) (defmacro with-timing (&body body) `(progn ,@body))");
    lisp.values("(defclass point () ()) (defpackage :my-app (:use :cl))");
    insta::assert_snapshot!(lisp.definitions_text(DefinitionFilter::All), @r"
    [Functions]
    - SQUARE (X)

    [Variables]
    - *COUNTER* = 0

    [Macros]
    - WITH-TIMING (&BODY BODY)

    [Classes]
    - POINT

    [Packages]
    - MY-APP
    ");
    assert_eq!(lisp.definitions_text(DefinitionFilter::Functions), "[Functions]\n- SQUARE (X)");
    assert_eq!(lisp.definitions_text(DefinitionFilter::Variables), "[Variables]\n- *COUNTER* = 0");
    assert_eq!(lisp.definitions_text(DefinitionFilter::Macros), "[Macros]\n- WITH-TIMING (&BODY BODY)");
    assert_eq!(lisp.definitions_text(DefinitionFilter::Classes), "[Classes]\n- POINT");
}

#[test]
fn definitions_are_listed_in_order_of_name() {
    let lisp = fresh();
    lisp.values("(defun zebra ()) (defun apple ()) (defun mango ()) (defvar *z* 1) (defvar *a* 2)");
    assert_eq!(functions(&lisp), ["APPLE ()", "MANGO ()", "ZEBRA ()"]);
    assert_eq!(variables(&lisp), ["*A* = 2", "*Z* = 1"]);
}

#[test]
fn lambda_lists_are_shown_as_written() {
    let lisp = fresh();
    lisp.values("(defun f (a &optional (b 1) &key (c 2 c-p) &rest-like) (list a b c c-p &rest-like))");
    lisp.values("(defun g (&rest args) args) (defun h ()) (defmacro m ((a b) &body body) `(list ,a ,b ,@body))");
    let found = functions(&lisp);
    assert!(found.contains(&"F (A &OPTIONAL (B 1) &KEY (C 2 C-P) &REST-LIKE)".to_owned()), "{found:?}");
    assert!(found.contains(&"G (&REST ARGS)".to_owned()), "{found:?}");
    assert!(found.contains(&"H ()".to_owned()), "{found:?}");
    assert_eq!(macros(&lisp), ["M ((A B) &BODY BODY)"]);
}

#[test]
fn generic_functions_are_listed_under_functions() {
    let lisp = fresh();
    lisp.values("(defgeneric area (shape)) (defmethod area ((shape integer)) shape)");
    assert_eq!(functions(&lisp), ["AREA (SHAPE)"]);
    lisp.values("(defmethod implicit ((x string) y) (list x y))");
    assert_eq!(functions(&lisp), ["AREA (SHAPE)", "IMPLICIT (X Y)"]);
}

#[test]
fn variables_constants_and_globals_are_listed_with_their_values() {
    let lisp = fresh();
    lisp.values("(defvar *v* '(1 2)) (defparameter *p* \"text\") (defconstant +c+ :const) (sb-ext:defglobal **g** 1.5) (defvar *unbound*)");
    let found = variables(&lisp);
    for expected in ["*V* = (1 2)", "*P* = \"text\"", "+C+ = :CONST", "**G** = 1.5"] {
        assert!(found.contains(&expected.to_owned()), "{expected}: {found:?}");
    }
    let unbound: Vec<&String> = found.iter().filter(|text| text.starts_with("*UNBOUND*")).collect();
    assert_eq!(unbound.len(), 1, "{found:?}");
    assert!(!unbound[0].contains("NIL"), "{unbound:?}");
}

#[test]
fn variable_is_listed_with_its_current_value() {
    let lisp = fresh();
    lisp.values("(defvar *n* 1) (setf *n* 2)");
    assert_eq!(variables(&lisp), ["*N* = 2"]);
}

#[test]
fn unprintable_long_or_circular_value_does_not_break_list_definitions() {
    let lisp = fresh();
    lisp.values("(defclass bad () ()) (defmethod print-object ((o bad) s) (declare (ignore s)) (error \"no\"))");
    lisp.values("(defvar *bad* (make-instance 'bad)) (defvar *long* (make-list 100000)) (defvar *good* 1) (defvar *circular* (let ((l (list 1))) (setf (cdr l) l)))");
    lisp.values("(defvar *lines* (format nil \"a~%b\"))");
    let found = variables(&lisp);
    assert_eq!(found.len(), 5, "{found:?}");
    assert!(found.contains(&"*GOOD* = 1".to_owned()), "{found:?}");
    assert!(found.iter().any(|text| text.starts_with("*BAD* = #<")), "{found:?}");
    assert!(found.iter().all(|text| !text.contains('\n') && text.chars().count() < 1_000), "{found:?}");
}

/// Defines variables whose values never finish printing: `*endless*`, and `*endless-0*` to `*endless-23*`.
const ENDLESS_VALUES: &str = "(defclass endless () ((name :initform :a-name) (part :accessor part)))
    (defmethod print-object ((o endless) s) (write-string \"begun\" s) (loop (sleep 0.01)))
    (defvar *endless* (make-instance 'endless) \"Never ends.\")
    (setf (part *endless*) (make-instance 'endless))
    (dotimes (i 24) (eval `(defvar ,(intern (format nil \"*ENDLESS-~D*\" i)) *endless*)))";

#[test]
fn values_that_never_finish_printing_do_not_break_list_definitions() {
    let lisp = fresh();
    lisp.values(ENDLESS_VALUES);
    lisp.values("(defvar *good* '(1 2)) (defun f () 1)");
    let text = lisp.definitions_text(DefinitionFilter::All);
    assert!(text.starts_with("[Functions]\n- F ()\n\n[Variables]\n- *ENDLESS* = "), "{text}");
    assert!(text.ends_with("\n- *GOOD* = (1 2)\n\n[Classes]\n- ENDLESS (PART)"), "{text}");
    assert_eq!(text.matches(" = #<unprintable ENDLESS: printing took too long>\n").count(), 25, "{text}");
}

#[test]
fn integer_that_takes_long_to_print_does_not_break_list_definitions() {
    let lisp = fresh();
    lisp.values("(defvar *good* 1) (defvar *huge* (ash 1 20000000))");
    assert_eq!(variables(&lisp), ["*GOOD* = 1", "*HUGE* = #<unprintable BIGNUM: printing took too long>"]);
}

/// After a time limit has unwound from malloc(3), each further call might wait for a lock that is never released.
#[test]
fn values_whose_printing_allocates_foreign_memory_without_end_leave_malloc_usable() {
    let lisp = fresh();
    lisp.values(
        "(defvar *allocations* 0)
         (defclass allocating () ())
         (defmethod print-object ((o allocating) s)
           (loop (let ((memory (loop repeat 50 collect (sb-alien:make-alien char (+ 2000 (random 100000))))))
                   (incf *allocations* 50)
                   (mapc #'sb-alien:free-alien memory))))
         (defvar *value* (make-instance 'allocating))",
    );
    for _ in 0..3 {
        lisp.values("(setf *allocations* 0)");
        let text = lisp.definitions_text(DefinitionFilter::Variables);
        assert!(text.contains("- *VALUE* = #<unprintable ALLOCATING: printing took too long>"), "{text}");
        assert_eq!(lisp.value("(> *allocations* 100)"), "T");
    }
}

#[test]
fn printer_variables_of_the_user_do_not_change_list_definitions() {
    let lisp = fresh();
    lisp.values("(defun f (x y) (list x y)) (defvar *n* 255) (setf *print-base* 16 *print-length* 0 *print-level* 0 *print-case* :downcase)");
    assert_eq!(functions(&lisp), ["F (X Y)"]);
    assert_eq!(variables(&lisp), ["*N* = 255"]);
}

#[test]
fn classes_structures_and_conditions_are_listed_under_classes() {
    let lisp = fresh();
    lisp.values("(defclass k () ()) (defstruct s a) (define-condition c (error) ())");
    assert_eq!(classes(&lisp), ["C", "K", "S (COPY-S, MAKE-S, S-A, S-P)"]);
}

#[test]
fn functions_of_a_structure_are_listed_with_the_structure() {
    let lisp = fresh();
    lisp.values("(defstruct pt x) (defun pt-y (pt) pt)");
    assert_eq!(functions(&lisp), ["PT-Y (PT)"]);
    assert_eq!(classes(&lisp), ["PT (COPY-PT, MAKE-PT, PT-P, PT-X)"]);
}

#[test]
fn slot_accessors_are_listed_with_the_class() {
    let lisp = fresh();
    lisp.values("(defclass k () ((a :accessor k-a) (b :reader k-b) (c :reader more))) (defmethod more ((x list)) x)");
    assert_eq!(classes(&lisp), ["K (K-A, K-B)"]);
    // This method does more than read a slot.
    assert_eq!(functions(&lisp), ["MORE (OBJECT)"]);
}

#[test]
fn setf_functions_are_listed_under_functions() {
    let lisp = fresh();
    lisp.values("(defun (setf place) (value key) (list value key))");
    assert_eq!(functions(&lisp), ["(SETF PLACE) (VALUE KEY)"]);
}

#[test]
fn symbol_macros_are_listed_under_macros() {
    let lisp = fresh();
    lisp.values("(define-symbol-macro now (get-universal-time))");
    let found = macros(&lisp);
    assert!(found.len() == 1 && found[0].starts_with("NOW"), "{found:?}");
}

#[test]
fn compiler_macros_are_listed_under_macros() {
    let lisp = fresh();
    lisp.values("(defun fast (x) x) (define-compiler-macro fast (x) x)");
    let found = macros(&lisp);
    assert!(found.len() == 1 && found[0].starts_with("FAST"), "{found:?}");
    assert_eq!(functions(&lisp), ["FAST (X)"]);
}

#[test]
fn classes_and_compiler_macros_that_are_set_to_nil_are_removed() {
    let lisp = fresh();
    lisp.values("(defclass spot () ()) (defun fast (x) x) (define-compiler-macro fast (x) x)");
    assert_eq!((classes(&lisp).len(), macros(&lisp).len()), (1, 1));
    lisp.values("(setf (find-class 'spot) nil (compiler-macro-function 'fast) nil)");
    assert_eq!((classes(&lisp).len(), macros(&lisp).len()), (0, 0));
}

#[test]
fn setf_expanders_and_method_combinations_are_listed() {
    let lisp = fresh();
    lisp.values("(defsetf spot set-spot) (define-setf-expander place () (values '() '() '() nil nil))");
    lisp.values("(define-method-combination joined :operator list)");
    lisp.values("(define-method-combination each () ((methods *)) `(list ,@methods))");
    assert_eq!(macros(&lisp), ["PLACE (setf expander)", "SPOT (setf expander)"]);
    assert_eq!(classes(&lisp), ["EACH (method combination)", "JOINED (method combination)"]);
    lisp.values("(unintern 'spot) (unintern 'each)");
    assert_eq!((macros(&lisp).len(), classes(&lisp).len()), (1, 1));
    lisp.reset();
    assert_eq!(lisp.definitions_text(DefinitionFilter::All), NONE);
    assert!(lisp.describe_text("place").contains("[SYMBOL]"));
    assert!(lisp.describe_text("joined").contains("[SYMBOL]"));
}

#[test]
fn definitions_made_by_a_macro_are_listed() {
    let lisp = fresh();
    lisp.values(
        "(defmacro make-both (name) `(progn (defun ,name (x) x) (defvar ,(intern (format nil \"*~A*\" name)) 1)))",
    );
    lisp.values("(make-both generated)");
    assert_eq!(functions(&lisp), ["GENERATED (X)"]);
    assert_eq!(variables(&lisp), ["*GENERATED* = 1"]);
}

#[test]
fn definitions_made_inside_a_let_are_listed() {
    let lisp = fresh();
    lisp.values(
        "(let ((count 0)) (defun next () (incf count)) (defparameter *inside* count) (defmacro inside-macro (a) a))",
    );
    assert_eq!(functions(&lisp), ["NEXT ()"]);
    assert_eq!(variables(&lisp), ["*INSIDE* = 0"]);
    assert_eq!(macros(&lisp), ["INSIDE-MACRO (A)"]);
    assert_eq!(lisp.value("(list (next) (next))"), "(1 2)");
}

#[test]
fn definitions_made_by_setf_of_fdefinition_are_listed() {
    let lisp = fresh();
    lisp.values("(setf (fdefinition 'by-fdefinition) (lambda (a b) (list a b)))");
    lisp.values("(setf (symbol-function 'by-symbol-function) (lambda (c) c))");
    let found = functions(&lisp);
    assert_eq!(found, ["BY-FDEFINITION (A B)", "BY-SYMBOL-FUNCTION (C)"]);
}

#[test]
fn a_macro_made_by_setf_of_macro_function_is_listed() {
    let lisp = fresh();
    lisp.values("(setf (macro-function 'by-setf) (lambda (form env) (declare (ignore env)) `(list ,@(cdr form))))");
    let found = macros(&lisp);
    assert!(found.len() == 1 && found[0].starts_with("BY-SETF"), "{found:?}");
}

#[test]
fn definitions_made_by_eval_and_compile_are_listed() {
    let lisp = fresh();
    lisp.values("(eval '(defun by-eval () 1)) (compile 'by-compile '(lambda (x) x)) (funcall (compile nil '(lambda () (defun by-funcall () 2))))");
    assert_eq!(functions(&lisp), ["BY-COMPILE (X)", "BY-EVAL ()", "BY-FUNCALL ()"]);
}

#[test]
fn definitions_loaded_from_a_file_are_listed() {
    let lisp = fresh();
    let path = std::env::temp_dir().join(format!("sbcl-inspection-{}.lisp", std::process::id()));
    std::fs::write(
        &path,
        "(defun from-file (x) x)\n(defvar *from-file* :loaded)\n(defpackage :from-file (:use :cl))\n",
    )
    .expect("a file");
    lisp.values(&format!("(load {:?})", path.to_str().expect("a path")));
    assert_eq!(functions(&lisp), ["FROM-FILE (X)"]);
    assert_eq!(variables(&lisp), ["*FROM-FILE* = :LOADED"]);
    assert_eq!(packages(&lisp), ["FROM-FILE"]);
    std::fs::remove_file(path).expect("the file can be removed");
}

#[test]
fn definitions_loaded_from_a_compiled_file_are_listed() {
    let lisp = fresh();
    let base = std::env::temp_dir().join(format!("sbcl-inspection-compiled-{}", std::process::id()));
    let (source, fasl) = (base.with_extension("lisp"), base.with_extension("fasl"));
    std::fs::write(
        &source,
        "(in-package :cl-user)\n(defun from-fasl (x) x)\n(defmacro fasl-macro (y) y)\n(defstruct fasl-struct a)\n",
    )
    .expect("a file");
    let outcome = lisp.eval(&format!("(load (compile-file {:?}))", source.to_str().expect("a path")));
    assert!(!outcome.is_error(), "{}", report::evaluation(&outcome));
    assert!(functions(&lisp).contains(&"FROM-FASL (X)".to_owned()), "{:?}", functions(&lisp));
    assert_eq!(macros(&lisp), ["FASL-MACRO (Y)"]);
    assert_eq!(classes(&lisp), ["FASL-STRUCT (COPY-FASL-STRUCT, FASL-STRUCT-A, FASL-STRUCT-P, MAKE-FASL-STRUCT)"]);
    std::fs::remove_file(source).expect("the file can be removed");
    std::fs::remove_file(fasl).expect("the fasl can be removed");
}

#[test]
fn definitions_made_by_a_thread_are_listed() {
    let lisp = fresh();
    lisp.values("(sb-thread:join-thread (sb-thread:make-thread (lambda () (eval '(defun by-thread (x) x)))))");
    assert_eq!(functions(&lisp), ["BY-THREAD (X)"]);
}

#[test]
fn definitions_outside_cl_user_are_listed_with_their_package() {
    let lisp = fresh();
    lisp.values("(defpackage :my-app (:use :cl) (:export #:public)) (in-package :my-app) (defun public (x) x) (defun hidden (y) y) (defvar *v* 'sym)");
    let found = functions(&lisp);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("MY-APP::HIDDEN (") && found[1].starts_with("MY-APP:PUBLIC ("), "{found:?}");
    assert_eq!(variables(&lisp), ["MY-APP::*V* = MY-APP::SYM"]);
}

#[test]
fn a_redefinition_is_listed_once() {
    let lisp = fresh();
    lisp.values("(defun f (a) a)");
    lisp.values("(defun f (a b) (list a b))");
    assert_eq!(functions(&lisp), ["F (A B)"]);
}

#[test]
fn definitions_removed_by_fmakunbound_or_delete_package_are_not_listed() {
    let lisp = fresh();
    lisp.values("(defun gone () 1) (defvar *gone* 1) (defmacro gone-macro () 1) (defpackage :gone-package (:use)) (defclass gone-class () ())");
    lisp.values("(fmakunbound 'gone) (fmakunbound 'gone-macro) (delete-package :gone-package) (setf (find-class 'gone-class) nil)");
    assert_eq!(functions(&lisp), Vec::<String>::new());
    assert_eq!(macros(&lisp), Vec::<String>::new());
    assert_eq!(packages(&lisp), Vec::<String>::new());
    assert_eq!(classes(&lisp), Vec::<String>::new());
}

#[test]
fn renamed_packages_are_listed_under_their_new_names() {
    let lisp = fresh();
    lisp.values("(defpackage :former (:use)) (rename-package :former :renamed)");
    assert_eq!(packages(&lisp), ["RENAMED"]);
    lisp.values("(rename-package :renamed :again '(:renamed)) (defpackage :former (:use))");
    assert_eq!(packages(&lisp), ["AGAIN", "FORMER"]);
    lisp.values("(rename-package :former :former '(:alias))");
    assert_eq!(packages(&lisp), ["AGAIN", "FORMER"]);
}

#[test]
fn slot_accessors_removed_by_fmakunbound_are_not_listed_with_the_class() {
    let lisp = fresh();
    lisp.values("(defclass k () ((a :accessor k-a) (b :reader k-b)))");
    lisp.values("(fmakunbound 'k-a)");
    assert_eq!(classes(&lisp), ["K (K-B)"]);
}

#[test]
fn function_redefined_as_a_macro_is_listed_under_macros() {
    let lisp = fresh();
    lisp.values("(defun chameleon (x) x)");
    lisp.values("(fmakunbound 'chameleon) (defmacro chameleon (y) y)");
    assert_eq!(functions(&lisp), Vec::<String>::new());
    assert_eq!(macros(&lisp), ["CHAMELEON (Y)"]);
}

#[test]
fn definitions_made_before_an_error_are_listed() {
    let lisp = fresh();
    lisp.error("(defun made () 1) (error \"x\") (defun not-made () 2)");
    assert_eq!(functions(&lisp), ["MADE ()"]);
}

#[test]
fn function_named_by_a_gensym_does_not_break_list_definitions() {
    let lisp = fresh();
    lisp.values("(eval `(defun ,(gensym \"G\") () 1)) (defun plain () 1)");
    assert!(functions(&lisp).contains(&"PLAIN ()".to_owned()));
}

#[test]
fn packages_made_by_make_package_are_listed() {
    let lisp = fresh();
    lisp.values("(make-package \"MADE\" :use nil) (defpackage \"mixed Case\" (:use))");
    let found = packages(&lisp);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.contains(&"MADE".to_owned()), "{found:?}");
}

#[test]
fn definitions_of_a_required_system_module_are_not_listed() {
    let lisp = fresh();
    lisp.values("(require :sb-posix) (require :asdf)");
    assert_eq!(functions(&lisp), Vec::<String>::new());
    assert_eq!(classes(&lisp), Vec::<String>::new());
}

#[test]
fn list_definitions_and_describe_symbol_work_while_an_evaluation_runs() {
    let lisp = fresh();
    lisp.values("(defun there () 1)");
    let (_, outcome) = lisp.start("(sleep 0.5) :slept");
    assert_eq!(functions(&lisp), ["THERE ()"]);
    assert!(lisp.describe_text("there").contains("THERE [FUNCTION]"));
    assert!(outcome.try_recv().is_err(), "the evaluation still runs");
    assert!(!outcome.recv_timeout(crate::support::DEADLINE).expect("an answer").is_error());
}

#[test]
fn section_markers_in_definitions_are_escaped() {
    let lisp = fresh();
    lisp.values("(defvar *forged* \"[Functions] [ERROR] [Backtrace]\")");
    let text = lisp.definitions_text(DefinitionFilter::All);
    assert!(!text.contains("[ERROR]") && !text.contains("[Backtrace]"), "{text}");
}

// describe-symbol.

#[test]
fn function_description_shows_arglist_type_and_documentation() {
    let text = fresh().describe_text("car");
    assert!(text.starts_with("COMMON-LISP:CAR [FUNCTION]\n  Arglist: (LIST)\n"), "{text}");
    assert!(text.contains("\n  Type: (FUNCTION (LIST) (VALUES T &OPTIONAL))"), "{text}");
    assert!(text.contains("\n  Documentation: Return the 1st object in a list."), "{text}");
}

#[test]
fn user_defined_function_is_described_with_arglist_and_documentation() {
    let lisp = fresh();
    lisp.values("(defun square (x) \"The square of X.\" (* x x))");
    let text = lisp.describe_text("square");
    assert!(text.starts_with("COMMON-LISP-USER::SQUARE [FUNCTION]\n  Arglist: (X)"), "{text}");
    assert!(text.contains("\n  Documentation: The square of X."), "{text}");
}

#[test]
fn documentation_of_several_lines_is_indented() {
    let lisp = fresh();
    lisp.values("(defun documented () \"First.\nSecond.\" 1)");
    assert!(lisp.describe_text("documented").contains("Documentation: First.\n    Second."));
}

#[test]
fn a_variable_is_described_with_its_value() {
    let lisp = fresh();
    lisp.values("(defvar *counter* 42 \"Counts.\")");
    let text = lisp.describe_text("*counter*");
    assert!(text.starts_with("COMMON-LISP-USER::*COUNTER* [VARIABLE]\n"), "{text}");
    assert!(text.contains("Value: 42"), "{text}");
    assert!(text.contains("Documentation: Counts."), "{text}");
}

#[test]
fn description_title_names_the_kind_of_definition() {
    let lisp = fresh();
    lisp.values("(defclass k () ()) (defgeneric g (x)) (defmacro m (x) x) (defconstant +c+ 3) (deftype ty () 'integer) (defstruct st a) (define-condition co (error) ()) (define-symbol-macro sm 1)");
    for (name, title) in [
        ("k", "COMMON-LISP-USER::K [CLASS]"),
        ("g", "COMMON-LISP-USER::G [GENERIC FUNCTION]"),
        ("m", "COMMON-LISP-USER::M [MACRO]"),
        ("+c+", "COMMON-LISP-USER::+C+ [CONSTANT]"),
        ("ty", "COMMON-LISP-USER::TY [TYPE]"),
        ("if", "COMMON-LISP:IF [SPECIAL OPERATOR]"),
        ("when", "COMMON-LISP:WHEN [MACRO]"),
        ("pi", "COMMON-LISP:PI [CONSTANT]"),
        ("*package*", "COMMON-LISP:*PACKAGE* [VARIABLE]"),
        ("print-object", "COMMON-LISP:PRINT-OBJECT [GENERIC FUNCTION]"),
        ("st", "COMMON-LISP-USER::ST ["),
        ("co", "COMMON-LISP-USER::CO ["),
        ("sm", "COMMON-LISP-USER::SM ["),
    ] {
        let text = lisp.describe_text(name);
        assert!(text.contains(title), "{name}: {text}");
    }
}

#[test]
fn symbol_with_several_definitions_is_described_once_for_each_kind() {
    let lisp = fresh();
    lisp.values("(defun many (x) x) (defvar many 5) (defclass many () ())");
    let text = lisp.describe_text("many");
    for role in ["[FUNCTION]", "[VARIABLE]", "[CLASS]"] {
        assert_eq!(text.matches(&format!("COMMON-LISP-USER::MANY {role}")).count(), 1, "{role}: {text}");
    }
    let list = lisp.describe_text("list");
    assert!(list.contains("COMMON-LISP:LIST [FUNCTION]"), "{list}");
    assert!(list.contains("COMMON-LISP:LIST [BUILT-IN CLASS]") || list.contains("COMMON-LISP:LIST [CLASS]"), "{list}");
}

#[test]
fn alien_types_and_alien_variables_are_described() {
    let lisp = fresh();
    lisp.values("(define-alien-type whole int) (define-alien-type nil (struct pair (a int) (next (* (struct pair)))))");
    lisp.values(
        "(define-alien-type nil (enum color red)) (define-alien-variable (\"environ\" the-environ) (* c-string))",
    );
    for (name, description) in [
        ("whole", "COMMON-LISP-USER::WHOLE [ALIEN TYPE]\n  Definition: (SIGNED 32)\n  Source: "),
        ("pair", "COMMON-LISP-USER::PAIR [ALIEN STRUCTURE]\n  Definition: (STRUCT PAIR (A (SIGNED 32) :OFFSET 0)"),
        ("color", "COMMON-LISP-USER::COLOR [ALIEN ENUMERATION]\n  Definition: (ENUM COLOR RED)"),
        (
            "the-environ",
            "COMMON-LISP-USER::THE-ENVIRON [ALIEN VARIABLE]\n  Type: (* C-STRING)\n  Foreign name: environ",
        ),
    ] {
        let text = lisp.describe_text(name);
        assert!(text.starts_with(description), "{name}: {text}");
    }
    // A type is shown with all its parts, at any depth.
    lisp.values("(define-alien-type nil (struct outer (inner (struct part (x int)))))");
    let text = lisp.describe_text("outer");
    assert!(text.contains("(INNER (STRUCT PART (X (SIGNED 32) :OFFSET 0)) :OFFSET 0)"), "{text}");
}

#[test]
fn methods_of_a_generic_function_named_in_are_accepted_as_names() {
    let lisp = fresh();
    lisp.values("(defgeneric in (x) (:method ((x t)) x))");
    for name in ["(:method in (t))", "(METHOD IN (T))", "(flet f :in in)"] {
        let text = lisp.describe_text(name);
        assert!(text.starts_with("COMMON-LISP-USER::IN [GENERIC FUNCTION]"), "{name}: {text}");
    }
}

#[test]
fn symbol_names_are_parsed_as_by_the_lisp_reader() {
    let lisp = fresh();
    lisp.values("(defvar |mixed Case| 1) (defpackage :p (:use :cl) (:export #:x)) (defvar p:x 2) (defvar p::y 3)");
    for name in ["car", "CAR", "Car", "cl:car", "common-lisp:car", "cl::car"] {
        assert!(lisp.describe_text(name).starts_with("COMMON-LISP:CAR [FUNCTION]"), "{name}");
    }
    assert!(lisp.describe_text("|mixed Case|").contains("|mixed Case| [VARIABLE]"));
    assert!(lisp.describe_text("p:x").starts_with("P:X [VARIABLE]"));
    assert!(lisp.describe_text("p::y").starts_with("P::Y [VARIABLE]"));
    assert!(lisp.describe_text(":test").contains(":TEST"));
}

#[test]
fn describe_symbol_looks_in_the_package_argument() {
    let lisp = fresh();
    lisp.values("(defpackage :p (:use :cl)) (defvar p::only-there 1)");
    let described = lisp.describe_in("only-there", Some("p")).expect("a description");
    assert!(report::symbol(&described).starts_with("P::ONLY-THERE [VARIABLE]"), "{described:?}");
    assert!(matches!(lisp.describe_in("only-there", None), Ok(SymbolDescription::NotFound(_))));
}

#[test]
fn describe_symbol_in_an_unknown_package_suggests_similar_names() {
    let lisp = fresh();
    let not_found = |name: &str, package| match lisp.describe_in(name, package) {
        Ok(SymbolDescription::NotFound(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(not_found("car", Some("no-such-package")), "There is no package named \"no-such-package\".");
    assert_eq!(not_found("asfd:foo", None), "There is no package named \"asfd\". Did you mean ASDF?");
    let text = not_found("asfd", None);
    assert!(text.ends_with("\nPackages with similar names: ASDF."), "{text}");
}

#[test]
fn describe_symbol_says_why_a_text_does_not_spell_a_symbol() {
    let lisp = fresh();
    for (name, why) in [
        (r"car\", r"car\ does not spell a symbol: no character follows the backslash at its end."),
        ("a|b", "a|b does not spell a symbol: a vertical bar in it is not closed."),
        ("cl:|CAR", "cl:|CAR does not spell a symbol: a vertical bar in it is not closed."),
    ] {
        match lisp.describe_in(name, None) {
            Ok(SymbolDescription::NotFound(text)) => assert!(text.starts_with(why), "{name}: {text}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    // A name that is written as it is, without escapes, still finds its symbol or package.
    lisp.values(r#"(defvar |a\|b| 1) (defpackage "C|D")"#);
    assert!(lisp.describe_text("a|b").contains("[VARIABLE]"));
    assert!(lisp.describe_text("C|D").contains("[PACKAGE]"));
}

#[test]
fn describe_symbol_looks_in_the_current_package_by_default() {
    let lisp = fresh();
    lisp.values("(defpackage :p (:use :cl)) (in-package :p) (defun here () 1)");
    let text = lisp.describe_text("here");
    assert!(text.starts_with("P::HERE [FUNCTION]"), "{text}");
}

#[test]
fn symbol_not_found_names_the_package_and_similar_symbols() {
    let lisp = fresh();
    lisp.values("(defun frobnicate () 1)");
    let SymbolDescription::NotFound(text) = lisp.describe_in("frobnicat", None).expect("a description") else {
        panic!("FROBNICAT was found");
    };
    assert!(text.contains("COMMON-LISP-USER") && text.to_uppercase().contains("FROBNICATE"), "{text}");
}

#[test]
fn describe_symbol_never_interns_a_symbol() {
    let lisp = fresh();
    for name in [
        "never-interned-1",
        "cl-user::never-interned-1",
        "keyword:never-interned-1",
        ":never-interned-1",
        "cl::never-interned-1",
    ] {
        _ = lisp.describe_in(name, None);
        _ = lisp.describe_in(name, Some("cl-user"));
    }
    assert_eq!(lisp.value("(find-all-symbols (concatenate 'string \"NEVER-\" \"INTERNED-1\"))"), "NIL");
}

#[test]
fn describe_symbol_with_an_unreadable_name_leaves_the_session_usable() {
    let lisp = fresh();
    for name in [
        "",
        " ",
        ")",
        "(",
        "a b",
        "\"string\"",
        "42",
        "#.(error \"evaluated\")",
        "a:b:c",
        "|never closed",
        "\\",
        "nil",
        "'car",
        "#'car",
        "\0",
        "λ",
    ] {
        _ = lisp.describe_in(name, None);
        assert_eq!(lisp.value("(+ 1 2)"), "3", "after {name:?}");
    }
}

#[test]
fn describe_symbol_does_not_evaluate_read_time_forms() {
    let lisp = fresh();
    lisp.values("(defvar *evaluated* nil)");
    _ = lisp.describe_in("#.(setf cl-user::*evaluated* t)", None);
    assert_eq!(lisp.value("*evaluated*"), "NIL");
}

#[test]
fn symbol_without_definitions_is_found() {
    let lisp = fresh();
    lisp.values("'just-a-symbol");
    let described = lisp.describe_in("just-a-symbol", None).expect("a description");
    assert!(matches!(described, SymbolDescription::Found(_)), "{described:?}");
    assert!(report::symbol(&described).contains("JUST-A-SYMBOL"), "{}", report::symbol(&described));
}

#[test]
fn unprintable_or_circular_value_does_not_break_a_description() {
    let lisp = fresh();
    lisp.values("(defclass bad () ()) (defmethod print-object ((o bad) s) (declare (ignore s)) (error \"no\")) (defvar *bad* (make-instance 'bad))");
    assert!(lisp.describe_text("*bad*").contains("*BAD* [VARIABLE]"));
    lisp.values("(defvar *circular* (let ((l (list 1))) (setf (cdr l) l))) (defvar *long* (make-list 1000000))");
    assert!(lisp.describe_text("*circular*").contains("*CIRCULAR* [VARIABLE]"));
    let long = lisp.describe_text("*long*");
    assert!(long.chars().count() < 60_000, "{} characters", long.chars().count());
}

#[test]
fn values_that_never_finish_printing_do_not_break_a_description() {
    let lisp = fresh();
    lisp.values(ENDLESS_VALUES);
    let text = lisp.describe_text("*endless*");
    let expected = "COMMON-LISP-USER::*ENDLESS* [VARIABLE]
  Value: #<unprintable ENDLESS: printing took too long>
  Contents: 2 slots
    NAME: :A-NAME
    PART: #<unprintable ENDLESS: printing took too long>
  Documentation: Never ends.
";
    assert!(text.starts_with(expected), "{text}");
    assert!(lisp.describe_text("car").starts_with("COMMON-LISP:CAR [FUNCTION]"));
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn describe_symbol_does_not_change_the_star_variable() {
    let lisp = fresh();
    lisp.values(":kept");
    lisp.describe_text("car");
    assert_eq!(lisp.value("*"), ":KEPT");
}

// reset-session.

#[test]
fn a_reset_removes_definitions() {
    let lisp = fresh();
    lisp.values("(defun f () 1) (defvar *v* 1) (defmacro m () 1) (defclass k () ()) (defstruct s a) (defconstant +c+ 1) (defgeneric g (x)) (define-condition co (error) ()) (deftype ty () 'integer) (define-symbol-macro sm 1) (defun (setf f) (v) v)");
    lisp.reset();
    assert_eq!(lisp.definitions_text(DefinitionFilter::All), NONE);
    let bound = "(list (fboundp 'f) (boundp '*v*) (macro-function 'm) (find-class 'k nil) (find-class 's nil) (boundp '+c+) (fboundp 'g) (find-class 'co nil) (fboundp '(setf f)) (fboundp 'make-s))";
    assert_eq!(lisp.value(bound), "(NIL NIL NIL NIL NIL NIL NIL NIL NIL NIL)");
    assert_eq!(lisp.error("sm").kind, "UNBOUND-VARIABLE");
    assert_eq!(lisp.error("(f)").kind, "UNDEFINED-FUNCTION");
}

#[test]
fn a_reset_removes_setf_expanders_and_slot_accessors() {
    let lisp = fresh();
    lisp.values(
        "(defun spot (x) x) (defsetf spot (x) (v) `(list ,x ,v)) (defclass k () ((a :accessor a-of) (b :writer set-b)))
         (define-condition co (error) ((c :reader c-of)))",
    );
    lisp.reset();
    assert_eq!(
        lisp.value("(list (fboundp 'a-of) (fboundp '(setf a-of)) (fboundp 'set-b) (fboundp 'c-of))"),
        "(NIL NIL NIL NIL)"
    );
    assert_eq!(lisp.error("(setf (spot 1) 2)").kind, "UNDEFINED-FUNCTION");
}

#[test]
fn a_reset_removes_packages_and_returns_to_cl_user() {
    let lisp = fresh();
    lisp.values("(defpackage :app (:use :cl) (:export #:x)) (defpackage :user-of-app (:use :cl :app)) (in-package :user-of-app) (defun g () 1)");
    lisp.reset();
    assert_eq!(lisp.value("(package-name *package*)"), "\"COMMON-LISP-USER\"");
    assert_eq!(lisp.value("(list (find-package :app) (find-package :user-of-app))"), "(NIL NIL)");
}

#[test]
fn a_reset_removes_renamed_packages() {
    let lisp = fresh();
    lisp.values(
        "(defpackage :former (:use :cl)) (rename-package :former :renamed) (in-package :renamed) (defun f () 1)",
    );
    lisp.reset();
    assert_eq!(lisp.value("(list (package-name *package*) (find-package :renamed))"), "(\"COMMON-LISP-USER\" NIL)");
}

#[test]
fn a_reset_untraces_functions() {
    let lisp = fresh();
    lisp.values("(defpackage :app (:use :cl)) (defun app::f () 1) (trace app::f)");
    lisp.reset();
    assert_eq!(lisp.value("(trace)"), "NIL");
}

#[test]
fn a_reset_removes_variables_set_without_a_defvar() {
    let lisp = fresh();
    lisp.eval("(setf *only-set* 1)");
    lisp.reset();
    assert_eq!(lisp.value("(boundp '*only-set*)"), "NIL");
}

#[test]
fn a_reset_clears_the_error_state() {
    let lisp = fresh();
    lisp.error("(error \"x\")");
    lisp.reset();
    assert!(lisp.session().last_error().is_none());
}

#[test]
fn a_reset_restores_printer_variables_and_readtable() {
    let lisp = fresh();
    lisp.eval("(setf *print-base* 2 *print-radix* t *print-length* 1 *print-case* :downcase)");
    lisp.reset();
    assert_eq!(lisp.value("'(ten 10 20)"), "(TEN 10 20)");
    lisp.eval("(setf *read-base* 8)");
    lisp.reset();
    assert_eq!(lisp.value("10"), "10");
    lisp.eval("(set-macro-character #\\$ (lambda (s c) (declare (ignore s c)) (error \"dollar\")))");
    lisp.reset();
    assert_eq!(lisp.value("'a$b"), "A$B");
    assert_eq!(lisp.value("(values (get-macro-character #\\$))"), "NIL");
}

#[test]
fn a_reset_clears_the_star_variable() {
    let lisp = fresh();
    lisp.values(":remembered");
    lisp.reset();
    assert_eq!(lisp.value("*"), "NIL");
}

#[test]
fn a_reset_ends_threads() {
    let lisp = fresh();
    lisp.values(
        "(let ((begun (sb-thread:make-semaphore))) \
           (sb-thread:make-thread (lambda () (sb-thread:signal-semaphore begun) (loop (sleep 0.05) (write-string \"still alive\"))) \
                                  :name \"of-the-user\") \
           (sb-thread:wait-on-semaphore begun))",
    );
    lisp.reset();
    assert_eq!(
        lisp.value("(find \"of-the-user\" (sb-thread:list-all-threads) :key #'sb-thread:thread-name :test #'equal)"),
        "NIL"
    );
    assert_eq!(lisp.text("1"), "=> 1");
}

#[test]
fn a_reset_waits_for_the_running_evaluation() {
    let lisp = fresh();
    let (_, outcome) = lisp.start("(sleep 0.3) (defun late () 1) :done");
    lisp.reset();
    assert!(!outcome.recv_timeout(crate::support::DEADLINE).expect("an answer").is_error());
    assert_eq!(lisp.value("(fboundp 'late)"), "NIL");
}

#[test]
fn resets_can_be_repeated() {
    let lisp = fresh();
    for _ in 0..20 {
        lisp.values("(defpackage :again (:use :cl)) (defun again::f () 1) (defclass again::k () ())");
        lisp.reset();
    }
    assert_eq!(lisp.definitions_text(DefinitionFilter::All), NONE);
}

#[test]
fn constants_and_structures_can_be_redefined_after_a_reset() {
    let lisp = fresh();
    for value in 0..3 {
        let text = lisp.text(&format!("(defconstant +k+ {value}) (defstruct st (a {value}) {}) (defclass cl () ((s :initform {value}))) (list +k+ (st-a (make-st)) (slot-value (make-instance 'cl) 's))", ["", "b", "b c"][value]));
        assert_eq!(text, format!("=> ({value} {value} {value})"));
        lisp.reset();
    }
}

#[test]
fn a_reset_removes_user_methods_on_system_generic_functions() {
    let lisp = fresh();
    lisp.values("(defclass mine () ()) (defmethod print-object ((o mine) s) (write-string \"MINE\" s)) (defmethod describe-object :before ((o integer) s) (write-string \"BEFORE\" s))");
    lisp.reset();
    assert_eq!(lisp.value("(with-output-to-string (s) (describe 5 s))").matches("BEFORE").count(), 0);
}

#[test]
fn reset_message_names_the_current_package() {
    assert_eq!(report::reset(&[]), "Session reset. All definitions cleared.\nCurrent package: COMMON-LISP-USER");
}

#[test]
fn packages_of_the_lisp_side_are_locked_and_export_nothing() {
    let lisp = fresh();
    let packages = "(sort (loop for package in (list-all-packages)
                                when (and (eql 0 (search \"SBCL-HOST\" (package-name package)))
                                          (sb-ext:package-locked-p package)
                                          (loop for symbol being the external-symbols of package never t))
                                  collect (subseq (package-name package) 9))
                          #'string<)";
    assert_eq!(lisp.value(packages), "(\"\" \"/DEBUGGER\" \"/EMBEDDING\" \"/TESTING\" \"/TOOLS\")");
}
