//! The error state, compared with a model under random sequences of evaluations, inspections, queries, resets and waits.

use std::time::Duration;

use crate::support::{TestSession, check_error_response, fresh};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use sbcl::outcome::SymbolDescription;
use sbcl::report;

/// An operation on the session.
#[derive(Debug, Clone)]
enum Operation {
    /// Evaluates the failing code at this index of [`FAILURES`], with a number that makes its message distinct.
    Fail(usize, u32),
    /// Evaluates the code at this index of [`SUCCESSES`].
    Succeed(usize),
    /// Evaluates in a package that does not exist.
    UnknownPackage,
    /// Evaluates code that exceeds its time limit.
    TimeOut,
    /// Cancels an evaluation while it runs.
    Cancel,
    /// Lists the definitions.
    Definitions,
    /// Describes the symbol at this index of [`SYMBOLS`].
    Describe(usize),
    /// Describes a symbol in a package that does not exist.
    DescribeNowhere,
    /// Queries the last error this many times.
    Query(usize),
    /// Sets the output limit to this many characters.
    Limits(u64),
    /// Resets the session.
    Reset,
    /// Waits this many milliseconds.
    Wait(u64),
}

/// Code that fails, with `@` in place of a number, and the type of its error.
const FAILURES: [(&str, &str); 14] = [
    ("(error \"failure @\")", "SIMPLE-ERROR"),
    ("(/ @ 0)", "DIVISION-BY-ZERO"),
    ("(car '@)", "TYPE-ERROR"),
    ("unbound-@", "UNBOUND-VARIABLE"),
    ("(undefined-@ 1)", "UNDEFINED-FUNCTION"),
    ("(list @", "END-OF-FILE"),
    ("@ )", "SB-INT:SIMPLE-READER-ERROR"),
    ("(warn \"before @\") (error \"after @\")", "SIMPLE-ERROR"),
    ("(defun f@ (x) (if x (error \"in f@\") x)) (f@ 1)", "SIMPLE-ERROR"),
    ("(format t \"output @\") (let ((@ 1)) 2)", "SB-INT:COMPILED-PROGRAM-ERROR"),
    ("(defmacro m@ () (error \"expanding @\")) (m@)", "SIMPLE-ERROR"),
    ("(break \"at @\")", "SIMPLE-CONDITION"),
    (
        "(define-condition c@ (error) () (:report (lambda (c s) (declare (ignore c s)) (error \"report\")))) (error 'c@)",
        "C@",
    ),
    (
        "(handler-bind ((error (lambda (c) (declare (ignore c)) (error \"nested @\")))) (error \"outer\"))",
        "SIMPLE-ERROR",
    ),
];

/// Code that succeeds.
const SUCCESSES: [&str; 12] = [
    "(+ 1 2)",
    "",
    "; a comment",
    "(values)",
    "(warn \"only a warning\") :ok",
    "(defun model-function (x) (* x x))",
    "(defvar *model-variable* 1)",
    "(defmacro model-macro (x) x)",
    "(ignore-errors (error \"handled\"))",
    "(defun broken-by-the-compiler () (let ((1 2)) 3))",
    "(format t \"output\") (values 1 2 3)",
    "(defclass model-class () ()) (defmethod print-object ((o model-class) s) (declare (ignore s)) (error \"x\")) (make-instance 'model-class)",
];

const SYMBOLS: [&str; 8] =
    ["car", "*package*", "no-such-symbol-here", "model-function", "*model-variable*", "no-such-package:x", ")(", ""];

/// The model of the error state: the error that must be known after each operation.
#[derive(Debug, Default)]
struct Model {
    /// The type of the last error, and a part of its message.
    error: Option<(String, String)>,
}

impl Model {
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Fail(which, number) => {
                let kind = FAILURES[*which].1.replace('@', &number.to_string());
                let part = match *which {
                    0 => format!("failure {number}"),
                    2..=4 | 8 | 10 | 11 | 13 => number.to_string(),
                    7 => format!("after {number}"),
                    _ => String::new(),
                };
                self.error = Some((kind, part));
            }
            Operation::UnknownPackage => self.error = Some(("*PACKAGE*".to_owned(), "NO-SUCH-PACKAGE".to_owned())),
            Operation::TimeOut => self.error = Some(("TIMEOUT".to_owned(), String::new())),
            Operation::Cancel => self.error = Some(("CANCELLED".to_owned(), String::new())),
            Operation::Succeed(_) | Operation::Reset => self.error = None,
            Operation::Definitions
            | Operation::Describe(_)
            | Operation::DescribeNowhere
            | Operation::Query(_)
            | Operation::Limits(_)
            | Operation::Wait(_) => {}
        }
    }
}

/// Returns the texts that the tools give for the error state.
fn error_state_texts(lisp: &TestSession) -> (String, String, String) {
    (lisp.last_error_text(), lisp.backtrace_text(3), lisp.backtrace_text(1_000))
}

fn perform(lisp: &TestSession, operation: &Operation) -> Result<(), TestCaseError> {
    let before = error_state_texts(lisp);
    let mut changes = false;
    match operation {
        Operation::Fail(which, number) => {
            let outcome = lisp.eval(&FAILURES[*which].0.replace('@', &number.to_string()));
            prop_assert!(outcome.is_error());
            let text = report::evaluation(&outcome);
            let checked = check_error_response(&text);
            prop_assert!(checked.is_ok(), "{:?}\n{}", checked, text);
            prop_assert_eq!(lisp.session().last_error(), outcome.result.err());
            changes = true;
        }
        Operation::Succeed(which) => {
            let outcome = lisp.eval(SUCCESSES[*which]);
            prop_assert!(!outcome.is_error(), "{}", report::evaluation(&outcome));
            changes = true;
        }
        Operation::UnknownPackage => {
            prop_assert!(lisp.eval_in("no-such-package", "(+ 1 2)").is_error());
            changes = true;
        }
        Operation::TimeOut => {
            prop_assert!(lisp.eval_for(Duration::from_millis(20), "(loop)").is_error());
            changes = true;
        }
        Operation::Cancel => {
            let (id, outcome) = lisp.start("(loop (sleep 1))");
            lisp.await_running();
            lisp.session().cancel(id);
            prop_assert!(outcome.recv_timeout(crate::support::DEADLINE).expect("an answer").is_error());
            changes = true;
        }
        Operation::Definitions => prop_assert!(lisp.definitions().is_ok()),
        Operation::Describe(which) => _ = lisp.describe_in(SYMBOLS[*which], None),
        Operation::DescribeNowhere => {
            let answer = lisp.describe_in("car", Some("no-such-package"));
            prop_assert!(matches!(answer, Ok(SymbolDescription::NotFound(_))));
        }
        Operation::Query(times) => {
            for _ in 0..*times {
                prop_assert_eq!(&error_state_texts(lisp), &before);
            }
        }
        Operation::Limits(characters) => {
            let mut limits = lisp.session().limits();
            limits.set_max_output(*characters).expect("it is in range");
            lisp.session().set_limits(limits);
        }
        Operation::Reset => {
            lisp.reset();
            changes = true;
        }
        Operation::Wait(milliseconds) => std::thread::sleep(Duration::from_millis(*milliseconds)),
    }
    if !changes {
        prop_assert_eq!(error_state_texts(lisp), before, "an inspection changed the error state");
    }
    Ok(())
}

/// Compares the error state with the model.
fn compare(lisp: &TestSession, model: &Model) -> Result<(), TestCaseError> {
    let state = lisp.session().last_error();
    let (described, short, _) = error_state_texts(lisp);
    match &model.error {
        None => {
            prop_assert!(state.is_none(), "{}", described);
            prop_assert!(described.starts_with("No error information available.\n"), "{}", described);
            prop_assert_eq!(&short, &described);
        }
        Some((kind, part)) => {
            prop_assert!(state.is_some(), "the error {} is lost", kind);
            let error = state.expect("checked");
            if kind == "*PACKAGE*" {
                prop_assert!(error.kind.contains("PACKAGE"), "{}", error.kind);
            } else {
                prop_assert_eq!(&error.kind, kind);
            }
            prop_assert!(error.message.text.to_uppercase().contains(&part.to_uppercase()), "{}", error.message.text);
            prop_assert!(described.starts_with(&format!("Error: {}\n", error.kind)), "{}", described);
            prop_assert!(short.starts_with(&format!("Backtrace for {} (", error.kind)), "{}", short);
        }
    }
    prop_assert_eq!(lisp.last_error_text(), described);
    Ok(())
}

fn run(lisp: &TestSession, operations: &[Operation]) -> Result<(), TestCaseError> {
    lisp.reset();
    let mut model = Model::default();
    compare(lisp, &model)?;
    for operation in operations {
        perform(lisp, operation)?;
        model.apply(operation);
        compare(lisp, &model)?;
    }
    Ok(())
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (0..FAILURES.len(), 1..100_u32).prop_map(|(which, number)| Operation::Fail(which, number)),
        6 => (0..SUCCESSES.len()).prop_map(Operation::Succeed),
        1 => Just(Operation::UnknownPackage),
        1 => Just(Operation::TimeOut),
        1 => Just(Operation::Cancel),
        2 => Just(Operation::Definitions),
        3 => (0..SYMBOLS.len()).prop_map(Operation::Describe),
        1 => Just(Operation::DescribeNowhere),
        3 => (1..10_usize).prop_map(Operation::Query),
        1 => (1..200_000_u64).prop_map(Operation::Limits),
        2 => Just(Operation::Reset),
        1 => (1..10_u64).prop_map(Operation::Wait),
    ]
}

#[test]
fn random_operation_sequences_agree_with_the_model() {
    let lisp = fresh();
    let config = Config { cases: 120, max_shrink_iters: 500, failure_persistence: None, ..Config::default() };
    let operations = prop::collection::vec(operation(), 1..20);
    let result = TestRunner::new(config).run(&operations, |operations| run(&lisp, &operations));
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn every_pair_of_operations_agrees_with_the_model() {
    let lisp = fresh();
    let all: Vec<Operation> = (0..FAILURES.len())
        .map(|which| Operation::Fail(which, 7))
        .chain((0..SUCCESSES.len()).map(Operation::Succeed))
        .chain((0..SYMBOLS.len()).map(Operation::Describe))
        .chain([
            Operation::UnknownPackage,
            Operation::Definitions,
            Operation::DescribeNowhere,
            Operation::Query(3),
            Operation::Reset,
        ])
        .collect();
    for first in &all {
        for second in &all {
            let sequence = [first.clone(), second.clone()];
            run(&lisp, &sequence).unwrap_or_else(|failure| panic!("{sequence:?}: {failure}"));
        }
    }
}

#[test]
fn wrong_model_is_detected_and_shrunk_to_one_operation() {
    let lisp = fresh();
    let config = Config { cases: 200, max_shrink_iters: 2_000, failure_persistence: None, ..Config::default() };
    let operations = prop::collection::vec(operation(), 1..12);
    let result = TestRunner::new(config).run(&operations, |operations| {
        lisp.reset();
        for operation in &operations {
            perform(&lisp, operation)?;
        }
        prop_assert!(lisp.session().last_error().is_none(), "this model knows of no errors");
        Ok(())
    });
    match result {
        Err(proptest::test_runner::TestError::Fail(_, minimal)) => assert_eq!(minimal.len(), 1, "{minimal:?}"),
        other => panic!("the wrong model was not caught: {other:?}"),
    }
}

#[test]
fn last_error_persists_through_100_queries_and_one_second() {
    let lisp = fresh();
    lisp.error("(defun test () (error \"x\")) (test)");
    let first = error_state_texts(&lisp);
    for _ in 0..100 {
        assert_eq!(error_state_texts(&lisp), first);
    }
    // The test needs real time to pass.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(error_state_texts(&lisp), first);
}

#[test]
fn last_error_is_replaced_by_a_new_error_and_cleared_by_success() {
    let lisp = fresh();
    assert_eq!(lisp.error("(/ 1 0)").kind, "DIVISION-BY-ZERO");
    assert_eq!(lisp.session().last_error().expect("an error").kind, "DIVISION-BY-ZERO");
    assert_eq!(lisp.error("(car 'not-a-cons)").kind, "TYPE-ERROR");
    assert_eq!(lisp.session().last_error().expect("an error").kind, "TYPE-ERROR");
    lisp.values("(+ 1 2)");
    assert!(lisp.session().last_error().is_none());
}

#[test]
fn last_error_is_already_updated_when_the_reply_arrives() {
    let lisp = fresh();
    for number in 0..200 {
        let failure = lisp.error(&format!("(error \"number {number}\")"));
        assert_eq!(lisp.session().last_error(), Some(failure));
        lisp.values("nil");
        assert!(lisp.session().last_error().is_none());
    }
}

#[test]
fn last_error_can_be_queried_while_an_evaluation_runs() {
    let lisp = fresh();
    let failure = lisp.error("(error \"before\")");
    let (_, outcome) = lisp.start("(sleep 0.3) :done");
    assert_eq!(lisp.session().last_error(), Some(failure));
    assert!(lisp.definitions().is_ok());
    assert!(outcome.try_recv().is_err(), "the evaluation still runs");
    assert!(!outcome.recv_timeout(crate::support::DEADLINE).expect("an answer").is_error());
    assert!(lisp.session().last_error().is_none());
}

#[test]
fn error_record_is_not_changed_by_redefinition_or_garbage_collection() {
    let lisp = fresh();
    let failure = lisp.error("(defclass c () ()) (defun f (o) (error \"with ~A\" (type-of o))) (f (make-instance 'c))");
    let copy = (*failure).clone();
    lisp.values("(defmethod print-object ((o c) s) (write-string \"NEW\" s)) (fmakunbound 'f) (sb-ext:gc :full t)");
    assert_eq!(*failure, copy);
}
