//! Soundness: neither safe Rust code nor malformed messages can damage the image that all tests of this file share.
//!
//! `SBCL_MCP_FUZZ_CASES` sets the number of messages that the decoder is fed. With the feature `guarded-messages`,
//! reading a message beyond its end or after its release is a memory fault.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use sbcl::{
    Condition, ConversionError, Error, Evaluation, FromLisp, Function, IntoLisp, Lisp, Reader, Restart,
    RestartDesignator, Serde, Shape, Symbol, TimeLimit, Value, Values, Writer, keyword,
};

fn lisp() -> Lisp {
    Lisp::get_or_boot().expect("SBCL boots")
}

fn conversion_error() -> ConversionError {
    ConversionError::new("something else", "this")
}

/// An object whose conversion to Lisp calls a closure.
struct WriteWith<F>(F);

impl<F: Fn(&mut Writer<'_>) -> Result<(), ConversionError>> IntoLisp for WriteWith<F> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        (self.0)(writer)
    }
}

fn write_with<F: Fn(&mut Writer<'_>) -> Result<(), ConversionError>>(write: F) -> WriteWith<F> {
    WriteWith(write)
}

fn printed(object: impl IntoLisp + Sync) -> String {
    lisp().value(object).expect("it is written").to_string()
}

// ---- Messages from Rust

/// An integer that a decoder at a wrong position would read as the token of a very long string.
const STRING_TOKEN: i64 = 0x4141_4141 << 8 | 7;

#[test]
fn panic_caught_while_writing_a_list_leaves_a_well_formed_message() {
    let list = write_with(|writer| {
        writer.list(|writer| {
            let inner = catch_unwind(AssertUnwindSafe(|| {
                writer.list(|writer| {
                    "lost".write(writer)?;
                    std::panic::resume_unwind(Box::new("on purpose"))
                })
            }));
            assert!(inner.is_err());
            STRING_TOKEN.write(writer)?;
            "tail".write(writer)
        })
    });
    assert_eq!(printed(list), format!("({STRING_TOKEN} \"tail\")"));
}

#[test]
fn error_ignored_while_writing_a_container_leaves_a_well_formed_message() {
    let list = write_with(|writer| {
        writer.list(|writer| {
            let handle = lisp().value("kept").map_err(|_| conversion_error())?;
            let fails = |writer: &mut Writer<'_>| {
                handle.write(writer)?;
                "lost".write(writer)?;
                Err(conversion_error())
            };
            assert!(writer.list(fails).is_err() && writer.vector(fails).is_err() && writer.table(fails).is_err());
            assert!(writer.table(|writer| "a key alone".write(writer)).is_err());
            writer.vector(|writer| STRING_TOKEN.write(writer))
        })
    });
    assert_eq!(printed(list), format!("(#({STRING_TOKEN}))"));
}

#[test]
fn object_that_writes_no_or_two_elements_changes_container_length() {
    let none = || write_with(|_| Ok(()));
    let two = || {
        write_with(|writer| {
            1.write(writer)?;
            2.write(writer)
        })
    };
    assert_eq!(printed(vec![none(), none()]), "NIL");
    assert_eq!(printed((two(), none(), "tail")), "(1 2 \"tail\")");
    assert_eq!(printed(write_with(|writer| writer.vector(|writer| (two(), 3).write(writer)))), "#((1 2 3))");
    let error = lisp().value(BTreeMap::from([("key", none())])).expect_err("a key without a value");
    assert!(error.to_string().contains("a value for each key"), "{error}");
    assert!(matches!(lisp().call::<i64>("+", (two(), 4)), Ok(7)));

    lisp().define("soundness:values", "Return values.", || Values((1, 2))).expect("it is defined");
    assert_eq!(lisp().eval::<(i64, i64)>("(soundness:values)").expect("values"), (1, 2));
}

#[test]
fn nested_messages_do_not_mix() {
    let outer = write_with(|writer| {
        writer.list(|writer| {
            "before".write(writer)?;
            let inner: i64 =
                lisp().call("+", (1, write_with(|writer| 2.write(writer)))).map_err(|_| conversion_error())?;
            inner.write(writer)?;
            lisp().value(vec!["inner"; 100]).map_err(|_| conversion_error())?.write(writer)
        })
    });
    let length = lisp().enter(|cx| cx.call::<i64>("length", (outer,)));
    assert_eq!(length.expect("a length"), 3);
}

#[test]
fn panic_while_writing_an_answer_signals_host_panic() {
    let lisp = lisp();
    let answer = || {
        write_with(|writer| {
            writer.list(|writer| {
                "lost".write(writer)?;
                std::panic::resume_unwind(Box::new("half written"))
            })
        })
    };
    lisp.define("soundness:half", "Panic within an answer.", answer).expect("it is defined");
    let code = "(handler-case (soundness:half) (rust:host-panic (c) (rust:host-error-message c)))";
    assert_eq!(lisp.eval::<String>(code).expect("a message"), "half written");
}

/// An object that contains itself: its number selects the container or serde variant that it is written as.
struct Endless(usize);

impl IntoLisp for Endless {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match self.0 {
            0 => writer.list(|writer| self.write(writer)),
            1 => writer.vector(|writer| self.write(writer)),
            2 => writer.table(|writer| self.write(writer)),
            // The box is dropped after the call, so this is no tail call, which the compiler could turn into a loop.
            _ => Box::new(Self(3)).write(writer),
        }
    }
}

impl serde::Serialize for Endless {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            0 => serializer.collect_seq([self]),
            1 => serializer.collect_map([(self, self)]),
            2 => serializer.serialize_some(self),
            3 => serializer.serialize_newtype_struct("Endless", self),
            _ => serializer.serialize_newtype_variant("Endless", 0, "More", self),
        }
    }
}

#[test]
fn writing_an_endless_object_is_a_conversion_error() {
    let lisp = lisp();
    let check = |error: Error| assert!(error.to_string().contains("nested too deeply"), "{error}");
    for kind in 0..4 {
        check(lisp.value(Endless(kind)).expect_err("no end"));
        check(lisp.enter(|cx| cx.call::<()>("list", (Endless(kind),))).expect_err("no end"));
    }
    for kind in 0..5 {
        check(lisp.value(Serde(Endless(kind))).expect_err("no end"));
    }
    lisp.define("soundness:endless", "Return what has no end.", || Endless(0)).expect("it is defined");
    let error = lisp.eval::<()>("(soundness:endless)").expect_err("no end");
    assert!(error.condition().is_some_and(|condition| condition.is("rust:host-error")), "{error}");
    check(error);
}

// ---- Conversions that fail

/// An object that cannot be converted, in lists nested to this depth.
struct Nested(usize);

impl IntoLisp for Nested {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        match self.0 {
            0 => Err(conversion_error()),
            depth => [Self(depth - 1)].write(writer),
        }
    }
}

#[test]
fn conversion_error_has_at_most_32_places() {
    for depth in [0, 1, 30, 31, 32, 33, 50] {
        let error = lisp().call::<()>("list", (1, Nested(depth))).expect_err("it cannot be converted");
        let Error::Conversion(conversion) = &error else { panic!("no conversion: {error:?}") };
        assert_eq!((conversion.place.len(), &*conversion.place[0]), ((depth + 1).min(32), "argument 2"), "{error}");
    }
}

#[test]
fn package_set_by_a_call_is_restored_after_the_call() {
    let lisp = lisp();
    lisp.load_str("(defpackage :elsewhere) (defun go-elsewhere () (setf *package* (find-package :elsewhere)) nil)")
        .expect("it is loaded");
    for _ in 0..20 {
        lisp.call::<()>("go-elsewhere", ()).expect("it is called");
        assert_eq!(lisp.eval::<String>("(package-name *package*)").expect("a name"), "COMMON-LISP-USER");
    }
}

#[test]
fn more_than_10000_values_are_a_conversion_error() {
    let lisp = lisp();
    lisp.define("soundness:many", "Return values.", |count: usize| Values(vec![1; count])).expect("it is defined");
    let count = |count: usize| lisp.eval::<usize>(&format!("(length (multiple-value-list (soundness:many {count})))"));
    assert_eq!(count(10_000).expect("they fit"), 10_000);
    for many in [10_001, 25_000_000] {
        let text = count(many).expect_err("too many").to_string();
        assert!(text.ends_with(&format!("expected at most 10000 values, but found {many} values")), "{text}");
    }
}

#[test]
fn get_on_a_circular_list_finds_an_element_or_fails() {
    let list: Value = lisp().eval("'#1=(1 2 . #1#)").expect("a list");
    assert_eq!(list.get::<i64>(9_999).expect("it is searched"), Some(2));
    for error in [list.get::<i64>(10_001), list.get::<i64>("no key")].map(|found| found.expect_err("no end")) {
        let expected = "The list is circular: its elements can be found only by an index up to 10000.";
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn get_ignores_nil_in_an_association_list() {
    let lisp = lisp();
    let list: Value = lisp.eval("'(nil (\"a\" . 1) nil (\"b\" . 2))").expect("a list");
    assert_eq!(list.get::<i64>("a").expect("it is searched"), Some(1));
    assert_eq!(list.get::<i64>("b").expect("it is searched"), Some(2));
    assert_eq!(list.get::<i64>("c").expect("it is searched"), None);
    let list: Value = lisp.eval("'(nil 1 :b 2)").expect("a list");
    assert_eq!(list.get::<i64>(keyword("b")).expect("it is searched"), Some(2));
}

#[test]
fn get_with_a_circular_key_fails_if_the_key_would_be_compared_by_its_elements() {
    let lisp = lisp();
    let circular = "(let ((key (list 1 2))) (setf (cddr key) key))";
    let table = |test: &str| {
        format!("(let ((table (make-hash-table :test '{test}))) (setf (gethash {circular} table) 5) table)")
    };
    let key: Value = lisp.eval(circular).expect("a list");
    for code in [format!("(list (cons {circular} 5))"), table("equal"), table("equalp")] {
        let object: Value = lisp.eval(&code).expect("an object");
        let error = object.get::<i64>(&key).expect_err("the key has no end");
        assert!(error.to_string().contains("contains itself"), "{code}: {error}");
        assert_eq!(object.get::<i64>(vec![1, 2]).expect("it is searched"), None, "{code}");
    }
    let table: Value = lisp.eval(&table("eq")).expect("a table");
    lisp.call::<()>("(setf gethash)", (7, &key, &table)).expect("it is stored");
    assert_eq!(table.get::<i64>(&key).expect("it is found"), Some(7));
}

#[test]
fn circular_lists_are_equal_if_their_elements_are() {
    let lisp = lisp();
    let list = |text: &str| lisp.eval::<Value>(&format!("(quote {text})")).expect("a list");
    let (twice, six) = (list("#1=(1 (2) . #1#)"), list("(0 . #1=(1 (2) 1 (2) 1 (2) . #1#))"));
    assert!(twice.equal(&lisp.call("cdr", (&six,)).expect("the rest")).expect("they are compared"));
    assert!(twice.equal(&twice).expect("it is compared"));
    assert!(list("#1=(\"a\" . #1#)").equalp(&list("#1=(\"A\" \"a\" . #1#)")).expect("they are compared"));
    for (one, other) in [
        ("#1=(1 . #1#)", "#1=(1 1 2 . #1#)"),
        ("#1=(1 . #1#)", "(1 1 1)"),
        ("(1 1 1)", "#1=(1 . #1#)"),
        ("#1=(1 . #1#)", "(1 1 . 1)"),
        ("(#1=(1 . #1#))", "(#1=(1 2 . #1#))"),
    ] {
        assert!(!list(one).equal(&list(other)).expect("they are compared"), "{one} {other}");
    }
    assert!(list("(1 (2 3) . 4)").equal(&list("(1 (2 3) . 4)")).expect("they are compared"));
}

#[test]
fn symbol_keeps_its_package_under_a_package_local_nickname() {
    let lisp = lisp();
    lisp.load_str(
        "(defpackage :soundness-real (:use :cl)) (defpackage :soundness-other (:use :cl))
         (defpackage :soundness-app (:use :cl)
           (:local-nicknames (:soundness-real :soundness-other) (:soundness-nickname :soundness-other)))",
    )
    .expect("it is loaded");
    let symbol: Symbol = lisp.eval("(intern \"X\" :soundness-real)").expect("a symbol");
    let app = lisp.with_package("soundness-app");
    let package = |symbol: &Symbol| -> String {
        let package: Value = app.call("symbol-package", (symbol,)).expect("a package");
        app.call("package-name", (package,)).expect("a name")
    };
    assert_eq!(package(&symbol), "SOUNDNESS-REAL");
    assert_eq!(package(&Symbol::new("SOUNDNESS-NICKNAME", "X")), "SOUNDNESS-OTHER");
}

// ---- Objects on Lisp's stack

/// Overwrites the unused part of the Lisp stacks.
fn overwrite_stack() {
    lisp().eval::<()>("(labels ((down (n) (if (zerop n) 0 (1+ (down (1- n)))))) (down 1000))").expect("it returns");
}

#[test]
fn object_with_dynamic_extent_cannot_become_a_value() {
    let lisp = lisp();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = kept.clone();
    let keep = move |value: Value| keep.lock().unwrap_or_else(PoisonError::into_inner).push(value);
    lisp.define("soundness:keep-value", "Keep VALUE.", keep).expect("it is defined");
    for code in [
        "(with-output-to-string (s) (soundness:keep-value s))",
        "(with-input-from-string (s \"abc\") (soundness:keep-value s))",
        "((lambda (&rest arguments) (declare (dynamic-extent arguments)) (soundness:keep-value arguments)) 1 2)",
        "(let ((l (list 1 2))) (declare (dynamic-extent l)) (soundness:keep-value (copy-list l)) (soundness:keep-value l))",
    ] {
        let error = lisp.eval::<()>(code).expect_err(code);
        assert!(error.to_string().contains("object with dynamic extent"), "{code}: {error}");
    }
    let restarts = lisp.eval::<Vec<Value>>("(restart-case (list (find-restart 'foo)) (foo () 1))");
    assert!(restarts.expect_err("a dead restart").to_string().contains("object with dynamic extent"));
    overwrite_stack();
    let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(kept.iter().map(Value::to_string).collect::<Vec<_>>(), ["(1 2)"]);
}

#[test]
fn condition_keeps_text_in_place_of_slot_values_with_dynamic_extent() {
    let lisp = lisp();
    lisp.load_str("(define-condition soundness-error (error) ((things :initarg :things)))").expect("it is loaded");
    let stream = lisp.eval::<()>("(with-output-to-string (s) (car s))").expect_err("no list");
    let things = lisp
        .eval::<()>("(with-output-to-string (s) (error 'soundness-error :things (list 1 s)))")
        .expect_err("an error");
    let assigned = lisp
        .eval::<()>(
            "(let ((c (make-condition 'soundness-error)) (l (list 1 2)))
               (declare (dynamic-extent l))
               (setf (slot-value c 'things) l)
               (error c))",
        )
        .expect_err("an error");
    overwrite_stack();
    let slot = |error: &Error, name: &str| error.condition().expect("a condition").slot::<Value>(name).expect(name);
    let text: String = slot(&stream, "datum").to().expect("text");
    assert!(text.contains("STRING-OUTPUT-STREAM"), "{text}");
    assert_eq!(slot(&stream, "expected-type").to_string(), "LIST");
    assert!(slot(&things, "things").to_string().starts_with("(1 \"#<"));
    assert_eq!(slot(&assigned, "things").to_string(), "(1 2)");
    for error in [&stream, &things, &assigned] {
        let slots = error.condition().expect("a condition").slots().expect("slots");
        assert!(!slots.iter().any(|(_, value)| value.contains("unprintable")), "{slots:?}");
    }
}

#[test]
fn condition_keeps_text_in_place_of_objects_that_refer_to_the_stack() {
    let lisp = lisp();
    lisp.load_str(
        "(define-condition soundness-reference (error) ((thing :initarg :thing)))
         (defclass soundness-holder () ((held :initarg :held)))
         (defun soundness-fail (wrap &rest args)
           (declare (dynamic-extent args))
           (error 'soundness-reference :thing (funcall wrap args)))",
    )
    .expect("it is loaded");
    let thing = |wrap: &str| {
        let error = lisp.eval::<()>(&format!("(soundness-fail {wrap} 1 2 3)")).expect_err(wrap);
        overwrite_stack();
        error.condition().expect("a condition").slot::<Value>("thing").expect(wrap)
    };
    for (wrap, kept) in [
        ("(lambda (a) (list 'x (list :args a)))", "(X (:ARGS (1 2 3)))"),
        ("#'vector", "\"#((1 2 3))\""),
        ("(lambda (a) (list (vector a) \"y\"))", "(\"#((1 2 3))\" \"y\")"),
        ("(lambda (a) (make-array 1 :adjustable t :initial-element a))", "\"#((1 2 3))\""),
        ("(lambda (a) (make-array '(1 1) :initial-element a))", "\"#2A(((1 2 3)))\""),
    ] {
        assert_eq!(thing(wrap).to_string(), kept, "{wrap}");
    }
    for wrap in [
        "(lambda (a) (make-instance 'soundness-holder :held a))",
        "(lambda (a) (let ((table (make-hash-table))) (setf (gethash 1 table) a) table))",
        "(lambda (a) (let ((x 1)) (setf x a) (lambda (y) (prog1 x (setf x y)))))",
        "(lambda (a) (let ((cycle (list 1 a))) (setf (cddr cycle) cycle)))",
        // Too many references to be examined
        "(lambda (a) (declare (ignore a)) (make-list 200000 :initial-element \"x\"))",
    ] {
        assert!(thing(wrap).to::<String>().is_ok(), "{wrap}");
    }
    let table =
        thing("(lambda (a) (let ((table (make-hash-table))) (setf (gethash table table) (copy-list a)) table))");
    assert_eq!(table.len().expect("a table"), 1);
}

#[derive(serde::Serialize)]
struct Job {
    name: String,
    source: std::path::PathBuf,
}

fn job() -> Job {
    use std::os::unix::ffi::OsStringExt;
    Job { name: "one".to_owned(), source: std::ffi::OsString::from_vec(vec![0xff, 0x41]).into() }
}

#[test]
fn non_utf8_path_in_a_struct_is_a_conversion_error_naming_the_field() {
    let lisp = lisp();
    let error = lisp.value(Serde(job())).expect_err("it cannot be converted");
    let Error::Conversion(conversion) = &error else { panic!("no conversion: {error:?}") };
    assert_eq!(conversion.place, ["the field source"]);
    let text = error.to_string();
    assert!(text.contains("path contains invalid UTF-8") && text.ends_with("(in the field source)"), "{text}");
    let error = lisp.call::<()>("list", (1, vec![Serde(BTreeMap::from([("job", job())]))])).expect_err("neither");
    let text = error.to_string();
    assert!(text.ends_with("(in argument 2, element 0, the value of entry 0, the field source)"), "{text}");
    assert!(lisp.function("list").expect("a function").call::<()>([Serde(job())]).is_err());
}

/// A value whose serialization panics.
struct Panics;

impl serde::Serialize for Panics {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        std::panic::resume_unwind(Box::new("on purpose"))
    }
}

/// A value whose serialization ignores that a part fails. Its number selects the container and the failure.
struct Careless(usize);

impl serde::Serialize for Careless {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::{SerializeMap as _, SerializeStruct as _, SerializeTuple as _};
        match self.0 {
            0 => {
                let mut fields = serializer.serialize_struct("Careless", 2)?;
                assert!(fields.serialize_field("source", &job()).is_err());
                fields.serialize_field("next", &1)?;
                fields.end()
            }
            1 => {
                let mut fields = serializer.serialize_struct("Careless", 2)?;
                assert!(catch_unwind(AssertUnwindSafe(|| fields.serialize_field("source", &Panics))).is_err());
                fields.serialize_field("next", &1)?;
                fields.end()
            }
            2 => {
                let mut fields = serializer.serialize_struct("Careless", 2)?;
                fields.serialize_field("next", &1)?;
                assert!(fields.serialize_field("Next", &2).is_err());
                fields.end()
            }
            3 => {
                let mut entries = serializer.serialize_map(None)?;
                for number in [1, 2] {
                    assert!(entries.serialize_key(&job()).is_err());
                    entries.serialize_value(&number)?;
                }
                entries.end()
            }
            _ => {
                let mut elements = serializer.serialize_tuple(2)?;
                assert!(elements.serialize_element(&job()).is_err());
                elements.serialize_element(&1)?;
                elements.end()
            }
        }
    }
}

#[test]
fn serialize_implementation_that_ignores_an_error_writes_nothing() {
    let lisp = lisp();
    for number in 0..5 {
        let error = lisp.value(Serde(Careless(number))).expect_err("a part is missing");
        assert!(matches!(error, Error::Conversion(_)), "{number}: {error:?}");
        assert!(error.to_string().contains("ignored that a part could not be written"), "{number}: {error}");
    }
}

#[test]
fn unconvertible_result_of_a_rust_function_is_a_host_error() {
    let lisp = lisp();
    lisp.define("soundness:job", "Return a job.", || Serde(job())).expect("it is defined");
    let error = lisp.eval::<Value>("(soundness:job)").expect_err("an error");
    let condition = error.condition().expect("a condition");
    assert!(condition.is("rust:host-error"), "{condition}");
    assert!(condition.message().starts_with("soundness:job: ") && condition.message().contains("the field source"));
    lisp.define("soundness:job-or-error", "Return a job.", || Ok::<_, Error>(Serde(job()))).expect("it is defined");
    assert!(lisp.eval::<Value>("(soundness:job-or-error)").is_err());
}

#[test]
fn unconvertible_restart_argument_is_an_error() {
    let choose = |condition: &Condition| condition.is("error").then(|| Restart::invoke("use-value", Serde(job())));
    let careful = lisp().with_handler(choose);
    let error = careful.eval::<Value>("(restart-case (error \"no\") (use-value (v) v))").expect_err("an error");
    let text = error.to_string();
    assert!(text.contains("the argument of the restart use-value") && text.contains("the field source"), "{text}");
    assert_eq!(careful.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn restart_argument_that_lisp_cannot_read_is_an_error() {
    let choose = |condition: &Condition| {
        condition.is("error").then(|| Restart::invoke("use-value", Symbol::new("SOUNDNESS-NO-PACKAGE", "X")))
    };
    let careful = lisp().with_handler(choose);
    let error = careful.eval::<Value>("(restart-case (error \"no\") (use-value (v) v))").expect_err("an error");
    let condition = error.condition().expect("a condition");
    assert!(condition.is("rust:host-error") && condition.message().contains("SOUNDNESS-NO-PACKAGE"), "{condition}");
    assert_eq!(careful.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn map_whose_keys_become_the_same_object_is_an_error() {
    let map = HashMap::from([(None, 1), (Some(false), 2), (Some(true), 3)]);
    let error = lisp().call::<Value>("identity", (map,)).expect_err("an entry would be lost");
    assert!(error.to_string().contains("2 of 3 entries"), "{error}");
    let map = HashMap::from([(None, 1_i64), (Some(true), 3)]);
    assert_eq!(lisp().call::<HashMap<Option<bool>, i64>>("identity", (map.clone(),)).expect("a table"), map);
}

// ---- Destructors that panic while a panic unwinds

fn panic_with(text: &'static str) -> ! {
    std::panic::resume_unwind(Box::new(text))
}

/// A value that panics when it is dropped, written or displayed, and when it is read from NIL.
#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic_with("dropped")
    }
}

impl IntoLisp for Bomb {
    fn write(&self, _: &mut Writer<'_>) -> Result<(), ConversionError> {
        panic_with("written")
    }
}

impl std::fmt::Display for Bomb {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic_with("displayed")
    }
}

impl std::error::Error for Bomb {}

impl FromLisp for Bomb {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        if reader.read::<bool>()? { Ok(Self) } else { panic_with("read") }
    }
}

/// Returns the message of the host panic that `code` signals.
fn panic_message(code: &str) -> String {
    let code = format!("(handler-case {code} (rust:host-panic (c) (rust:host-error-message c)))");
    lisp().eval::<String>(&code).expect("a message")
}

/// The length of a list of bombs; reading it catches a panic and returns length 0.
#[derive(Debug, PartialEq)]
struct Caught(usize);

impl FromLisp for Caught {
    const SHAPE: Shape = <Vec<Bomb>>::SHAPE;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match catch_unwind(AssertUnwindSafe(|| reader.read::<Vec<Bomb>>())) {
            Ok(read) => read.map(|bombs| Self(std::mem::ManuallyDrop::new(bombs).len())),
            Err(_) => Ok(Self(0)),
        }
    }
}

#[test]
fn panic_caught_while_reading_an_object_does_not_shift_the_next_objects() {
    let lisp = lisp();
    let read: (Caught, i64, i64) = lisp.eval("(values '(nil t t) 100 200)").expect("it is read");
    assert_eq!(read, (Caught(0), 100, 200));
    let pay = |_: Caught, amount: i64, account: i64| format!("{amount} to {account}");
    lisp.define("soundness:pay", "Tell what is paid.", pay).expect("it is defined");
    assert_eq!(lisp.eval::<String>("(soundness:pay '(nil t t) 100 200)").expect("a text"), "100 to 200");
}

#[test]
fn panics_in_conversion_and_drop_of_a_result_or_error_are_a_host_panic() {
    let lisp = lisp();
    lisp.define("soundness:bad-error", "Fail.", || Err::<i64, _>(Bomb)).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-error)"), "displayed");
    let other = || Err::<i64, _>(Error::Other(Box::new(Bomb)));
    lisp.define("soundness:bad-other", "Fail.", other).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-other)"), "displayed");
    lisp.define("soundness:bad-result", "Return.", || Bomb).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-result)"), "written");
    lisp.define("soundness:bad-success", "Return.", || Ok::<_, Error>(Bomb)).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-success)"), "written");
    lisp.define("soundness:bad-values", "Return.", || Values((1, Bomb))).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-values)"), "written");
}

#[test]
fn panics_in_reading_and_dropping_arguments_are_a_host_panic() {
    lisp().define("soundness:bad-arguments", "Read.", |_: Bomb, _: Bomb| 1).expect("it is defined");
    assert_eq!(panic_message("(soundness:bad-arguments t nil)"), "read");
}

#[test]
fn panics_of_a_self_redefining_function_and_its_captures_are_a_host_panic() {
    let lisp = lisp();
    let (bomb, inner) = (Bomb, lisp.clone());
    let panics = move || -> i64 {
        let _ = &bomb;
        inner.define("soundness:redefined", "Return 2.", || 2).expect("it is defined");
        panic_with("called")
    };
    lisp.define("soundness:redefined", "Panic.", panics).expect("it is defined");
    assert_eq!(panic_message("(soundness:redefined)"), "called");
    assert_eq!(lisp.eval::<i64>("(soundness:redefined)").expect("a value"), 2);
    // A local function that is dropped while a panic unwinds, too.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        lisp.enter(|cx| -> Result<(), Error> {
            let bomb = Bomb;
            let _local = cx.local_function(move || {
                let _ = &bomb;
            })?;
            panic_with("in the closure")
        })
    }));
    assert!(panicked.is_err());
}

#[test]
fn panicking_drop_of_restart_argument_or_handler_does_not_end_the_process() {
    let bomb = Bomb;
    let careful = lisp().with_handler(move |_| {
        let _ = &bomb;
        Some(Restart::invoke("use-value", Bomb))
    });
    let error = careful.eval::<Value>("(restart-case (error \"no\") (use-value (v) v))").expect_err("no choice");
    assert!(error.condition().is_some_and(|condition| condition.message() == "no"), "{error}");
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _careful = careful;
        panic_with("on purpose")
    }));
    assert!(panicked.is_err());
    assert_eq!(lisp().eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

// ---- Calls from replies

#[test]
fn reply_within_a_host_function_makes_its_calls_on_another_thread() {
    let lisp = lisp();
    let call = |function: Function| function.call::<i64>(()).unwrap_or(-1);
    lisp.define("soundness:call", "Call the function.", call).expect("defined");
    let thrower: Function = lisp.eval("(lambda () (throw 'inner 1))").expect("a function");
    let (sender, thrown) = mpsc::channel();
    // The evaluation is held in Lisp code that the host function has called, and the reply runs on the same thread. If the
    // reply called Lisp directly, its non-local exit would be resumed when the host function returns, without the catch tag.
    lisp.load_str("(defvar soundness::*ends* nil)").expect("loaded");
    let code = "(list (soundness:call (lambda () (catch 'inner (loop until soundness::*ends*) 5) 6)) 8)";
    let timeout = TimeLimit::Of(Duration::from_secs(2));
    // An evaluation of another test on the same connection would end the hold.
    let session = lisp.session().connect();
    session.submit(Evaluation { hold: true, timeout, ..Evaluation::new(code) }, move |outcome| {
        assert!(outcome.held, "{outcome:?}");
        sender.send(thrower.call::<()>(())).expect("somebody waits");
    });
    let error = thrown.recv_timeout(Duration::from_secs(20)).expect("a reply").expect_err("there is no such tag");
    assert!(error.condition().is_some_and(|condition| condition.is("control-error")), "{error:?}");
    lisp.eval::<()>("(progn (setf soundness::*ends* t) nil)").expect("done");
    let (sender, resumed) = mpsc::channel();
    session.invoke_restart(&RestartDesignator::Name("CONTINUE".into()), "", move |reply| {
        sender.send(format!("{reply:?}")).expect("somebody waits");
    });
    let outcome = resumed.recv_timeout(Duration::from_secs(20)).expect("a reply");
    assert!(outcome.contains("(6 8)"), "{outcome}");
}

#[test]
fn save_in_a_finalizer_is_refused_and_later_saves_work() {
    let lisp = lisp();
    let directory = std::env::temp_dir().join(format!("sbcl-finalizer-save-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("created");
    let path = directory.join("saved.core");
    let (sender, refused) = mpsc::channel();
    let (saver, target) = (lisp.clone(), path.clone());
    let save = move || _ = sender.send(saver.save(&target).map_err(|error| error.to_string()));
    lisp.define("soundness:save", "Save the image.", save).expect("defined");
    let finalize = "(progn (sb-ext:finalize (make-string 100000) (lambda () (soundness:save)) :dont-save t) nil)";
    lisp.eval::<()>(finalize).expect("done");
    let reason = loop {
        lisp.eval::<()>("(progn (sb-ext:gc :full t) nil)").expect("done");
        if let Ok(saved) = refused.recv_timeout(Duration::from_millis(50)) {
            break saved.expect_err("it is refused");
        }
    };
    assert!(reason.contains("A finalizer or an after-GC hook cannot save the image"), "{reason}");
    lisp.save(&path).expect("saved");
    std::fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn host_function_called_deep_in_a_recursion_has_240_kib_of_stack() {
    let lisp = lisp();
    // Writing all bytes would take a minute.
    let burn = || {
        let mut bytes = std::mem::MaybeUninit::<[u8; 240 << 10]>::uninit();
        std::hint::black_box(&mut bytes);
    };
    lisp.define("soundness:burn", "Use stack.", burn).expect("defined");
    // With the feature guarded-messages a call takes milliseconds, so only every sixteenth level makes one.
    lisp.load_str(
        "(defun soundness::down (n) (when (zerop (mod n 16)) (soundness:burn)) (1+ (soundness::down (1+ n))))",
    )
    .expect("loaded");
    // After an exhaustion, SBCL protects one page more.
    for code in ["(labels ((down () (1+ (down)))) (down))", "(soundness::down 0)"] {
        let error = lisp.eval::<i64>(code).expect_err("an endless recursion");
        assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{error:?}");
    }
}

// ---- Host function calls while an answer is read

/// Defines the host functions for the tests of answers. Those tests run one at a time, while each holds the returned
/// guard, because they intern the same symbol.
fn define_answers(lisp: &Lisp) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let makes_list = lisp.clone();
    let pair = move || {
        let kept = makes_list.value(vec!["kept"]).expect("a list");
        (Symbol::new("COMMON-LISP", "ZAP"), "tail", kept)
    };
    lisp.define("soundness:pair", "Return a list of a symbol that cannot be interned and more.", pair)
        .expect("defined");
    lisp.define("soundness:large", "Return a megabyte.", || vec![0x41_u8; 1 << 20]).expect("defined");
    turn
}

/// Uninterns the symbol, so that interning it fails again.
fn forget_symbol(lisp: &Lisp) {
    let code = r#"(sb-ext:without-package-locks (let ((zap (find-symbol "ZAP" :cl))) (when zap (unintern zap :cl))))"#;
    lisp.eval::<()>(code).expect("it is gone");
}

#[test]
fn handler_may_call_rust_while_an_answer_is_read() {
    let lisp = lisp();
    let _turn = define_answers(&lisp);
    let code = r#"(handler-bind ((package-error (lambda (condition)
                                    (dotimes (i 3) (soundness:large))
                                    (handler-case (soundness:pair) (package-error ()))
                                    (soundness:large)
                                    (continue condition))))
                    (values-list (rest (soundness:pair))))"#;
    for _ in 0..20 {
        let (tail, kept): (String, Vec<String>) = lisp.eval(code).expect("Lisp still works");
        assert_eq!((tail.as_str(), kept), ("tail", vec!["kept".to_owned()]));
        // New objects would reuse the handles of objects that were released too early.
        drop((0..50).map(|n| lisp.value(vec![n])).collect::<Vec<_>>());
        forget_symbol(&lisp);
    }
    let unlocking = {
        let lisp = lisp.clone();
        lisp.clone().with_handler(move |condition| {
            lisp.call::<()>("soundness:large", ()).expect("it is called");
            condition.is("package-error").then(|| Restart::named("continue"))
        })
    };
    assert_eq!(unlocking.eval::<String>("(second (soundness:pair))").expect("Lisp still works"), "tail");
    forget_symbol(&lisp);
    assert_eq!(lisp.eval::<i64>("sbcl-host/embedding::*answers-being-read*").expect("a number"), 0);
}

#[test]
fn interruption_may_call_rust_while_an_answer_is_read() {
    let lisp = lisp();
    lisp.define("soundness:count", "Return a list of the integers from FROM.", |from: i64| {
        (from..from + 3000).collect::<Vec<i64>>()
    })
    .expect("it is defined");
    let (wrong, interrupts): (i64, i64) = lisp
        .eval(
            r#"(let* ((self sb-thread:*current-thread*)
                      (over nil) (wrong 0) (interrupts 0)
                      (taken (sb-thread:make-semaphore)))
                 (flet ((check (from)
                          (unless (loop for number in (soundness:count from)
                                        for expected from from
                                        always (= number expected)
                                        finally (return (= expected (+ from 2999))))
                            (incf wrong))))
                   (let ((other (sb-thread:make-thread
                                 (lambda ()
                                   (loop until over
                                         do (sb-thread:interrupt-thread
                                             self (lambda ()
                                                    (check 7000)
                                                    (incf interrupts)
                                                    (sb-thread:signal-semaphore taken)))
                                            (sb-thread:wait-on-semaphore taken :timeout 10))))))
                     (loop repeat 1000 do (check 0))
                     (setf over t)
                     (sb-thread:join-thread other)
                     (values wrong interrupts))))"#,
        )
        .expect("it is counted");
    assert_eq!(wrong, 0, "of 1000 and {interrupts} answers");
    assert!(interrupts > 10, "{interrupts} interrupts");
    assert_eq!(lisp.eval::<i64>("sbcl-host/embedding::*answers-being-read*").expect("a number"), 0);
}

#[cfg(feature = "guarded-messages")]
#[test]
fn reading_a_replaced_answer_is_a_memory_fault() {
    let lisp = lisp();
    let _turn = define_answers(&lisp);
    // Simulates a lost count: the program does not learn that the first answer is still being read.
    let error = lisp.eval::<Value>(
        "(handler-bind ((package-error (lambda (condition)
                           (let ((sbcl-host/embedding::*answers-being-read* 0))
                             (soundness:large) (soundness:large))
                           (continue condition))))
           (soundness:pair))",
    );
    let error = error.expect_err("a fault");
    assert!(error.condition().is_some_and(|condition| condition.is("memory-fault-error")), "{error:?}");
    forget_symbol(&lisp);
}

// ---- Serde

/// A type whose visitor forgets the elements.
struct Forgetful;

impl<'de> serde::Deserialize<'de> for Forgetful {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Forgets;

        impl<'de> serde::de::Visitor<'de> for Forgets {
            type Value = Forgetful;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("anything")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, elements: A) -> Result<Forgetful, A::Error> {
                std::mem::forget(elements);
                Ok(Forgetful)
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, entries: A) -> Result<Forgetful, A::Error> {
                std::mem::forget(entries);
                Ok(Forgetful)
            }
        }

        deserializer.deserialize_any(Forgets)
    }
}

/// True if reading a [`Forgetful`] succeeded.
#[derive(Debug, PartialEq)]
struct Forgot(bool);

impl sbcl::FromLisp for Forgot {
    const SHAPE: sbcl::Shape = <Serde<Forgetful> as sbcl::FromLisp>::SHAPE;

    fn from_lisp(reader: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        Ok(Self(reader.read::<Serde<Forgetful>>().is_ok()))
    }
}

#[test]
fn objects_after_a_forgotten_sequence_or_map_are_read_correctly() {
    let lisp = lisp();
    for code in ["(values '(111 222) 7)", "(values '((111) (222 (333))) 7)", "(values #(111 222) 7)"] {
        // The objects that the visitor has not read are an error.
        assert_eq!(lisp.eval::<(Forgot, i64)>(code).expect(code), (Forgot(false), 7), "{code}");
    }
    assert_eq!(lisp.eval::<(Forgot, i64)>("(values #() 7)").expect("a list"), (Forgot(true), 7));
    let code = "(let ((table (make-hash-table))) (setf (gethash 1 table) 111) (values table 7))";
    assert_eq!(lisp.eval::<(Forgot, i64)>(code).expect(code), (Forgot(false), 7));
}

// ---- Octets

#[test]
fn copying_octets_of_a_concurrently_adjusted_vector_reads_no_other_memory() {
    let lisp = lisp();
    // Memory behind a shrunken vector is filled with the octet 9.
    lisp.load_str(
        "(defpackage :adjusting (:use :cl))
         (in-package :adjusting)
         (defvar *vector* (make-array 4096 :element-type '(unsigned-byte 8) :initial-element 7 :adjustable t))
         (defvar *over* nil)
         (defvar *around* (make-array 64))
         (defun adjust ()
           (loop for i from 0 until *over*
                 do (adjust-array *vector* 16)
                    (setf (svref *around* (mod i 64))
                          (make-array 8192 :element-type '(unsigned-byte 8) :initial-element 9))
                    (adjust-array *vector* 4096 :initial-element 7)))
         (defvar *thread* (sb-thread:make-thread #'adjust))",
    )
    .expect("it is loaded");
    let vector: Value = lisp.eval("adjusting::*vector*").expect("a vector");
    let begin = Instant::now();
    let (mut copies, mut foreign) = (0, 0);
    // On a busy machine, most attempts find the vector while it is short.
    while begin.elapsed() < Duration::from_secs(if copies > 10 { 5 } else { 60 }) {
        let counts = lisp.enter(|cx| {
            let mut target = vec![0; 4096];
            let (mut copies, mut foreign) = (0, 0);
            for _ in 0..100 {
                if cx.copy_bytes(&vector, &mut target).is_ok() {
                    copies += 1;
                    foreign += i32::from(target.iter().any(|&octet| octet != 7));
                }
                // The same copy, through a message.
                if let Ok(octets) = vector.to::<Vec<u8>>() {
                    foreign += i32::from(octets.iter().any(|&octet| octet != 7));
                }
            }
            Ok((copies, foreign))
        });
        let counts = counts.expect("they are counted");
        (copies, foreign) = (copies + counts.0, foreign + counts.1);
    }
    lisp.eval::<()>("(setf adjusting::*over* t) (sb-thread:join-thread adjusting::*thread*)").expect("it ends");
    assert!(copies > 10, "{copies} copies");
    assert_eq!(foreign, 0, "of {copies} copies");
}

// ---- Forks

#[test]
fn calling_a_rust_function_in_a_forked_child_is_a_host_error() {
    let lisp = lisp();
    lisp.define("soundness:one", "Return 1.", || 1).expect("it is defined");
    let status: i64 = lisp
        .eval(
            r#"(let ((child (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int)))))
                 (if (zerop child)
                     (sb-alien:alien-funcall
                      (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int))
                      (handler-case (progn (soundness:one) 1)
                        (rust:host-panic () 2)
                        (rust:host-error (c) (if (search "forked copy of the program" (rust:host-error-message c)) 42 3))
                        (error () 4)))
                     (loop
                       (multiple-value-bind (ended status) (sb-posix:waitpid child sb-posix:wnohang)
                         (when (plusp ended) (return (ash status -8)))
                         (when (> (get-universal-time) (+ 60 (load-time-value (get-universal-time))))
                           (sb-posix:kill child sb-posix:sigkill))
                         (sleep 0.01)))))"#,
        )
        .expect("the child ends");
    assert_eq!(status, 42);
}

#[test]
fn forks_do_not_stop_threads_that_allocate_in_rust_and_in_lisp() {
    let lisp = lisp();
    lisp.define("soundness:text", "Return a text.", || "x".repeat(100_000)).expect("it is defined");
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                lisp.eval::<()>("(loop repeat 300 do (make-list 10000) (soundness:text) finally (return nil))")
                    .expect("it ends")
            });
        }
        scope.spawn(|| lisp.eval::<()>("(loop repeat 50 do (gc :gen 0) finally (return nil))").expect("it ends"));
        for _ in 0..50 {
            // With another PATH, the standard library starts the program with fork(3).
            let status = std::process::Command::new("true").env("PATH", "/usr/bin:/bin").status();
            assert!(status.expect("the program is started").success());
        }
    });
}

// ---- Definitions

#[test]
fn concurrent_defines_of_a_name_do_not_mix_lambda_list_and_body() {
    let lisp = lisp();
    for round in 0..300 {
        let name = &format!("soundness:race-{}", round % 3);
        let both = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                lisp.define(name, "Return 1.", |_: i64| 1).expect("it is defined");
            });
            both.wait();
            lisp.define(name, "Return 2.", |_: i64, _: i64| 2).expect("it is defined");
        });
        let code = format!(
            "(let ((count (length (sb-kernel:%fun-lambda-list #'{name}))))
               (values count (apply #'{name} (make-list count :initial-element 0))))"
        );
        let (parameters, body) = lisp.eval::<(i64, i64)>(&code).expect("it is called");
        assert_eq!(parameters, body, "round {round}");
    }
}

#[test]
fn earlier_function_object_calls_the_new_definition() {
    let lisp = lisp();
    lisp.define("soundness:again", "Return 1.", |_: i64| 1).expect("it is defined");
    lisp.load_str("(defvar *earlier* #'soundness:again)").expect("it is kept");
    lisp.define("soundness:again", "Return 2.", |_: i64| 2).expect("it is defined");
    assert_eq!(lisp.eval::<i64>("(funcall *earlier* 0)").expect("a value"), 2);
}

#[test]
fn calls_during_redefinition_with_another_lambda_list_use_one_definition() {
    let lisp = lisp();
    let define = |round: i64| {
        if round % 2 == 0 {
            lisp.define_as("soundness:varied", "a &optional (b 7)", "Return the sum.", |a: i64, b: i64| a + b)
        } else {
            lisp.define("soundness:varied", "Return it.", |a: Value| a)
        }
        .expect("it is defined");
    };
    define(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        let value: i64 = lisp.eval("(funcall 'soundness:varied 5)").expect("no call is lost");
                        assert!(value == 5 || value == 12, "{value}");
                    }
                })
            })
            .collect();
        (1..200).for_each(define);
        over.store(true, Ordering::SeqCst);
        callers.into_iter().for_each(|caller| caller.join().expect("it ends"));
    });
}

#[test]
fn interrupted_define_leaks_no_closure() {
    let lisp = lisp();
    let captured = Arc::new(());
    for round in 0..400 {
        let limited = lisp.with_timeout(Duration::from_micros(50 + round * 3));
        let kept = captured.clone();
        let define =
            |lisp: &Lisp| lisp.define("soundness:hasty", "Return 1.", move || i64::try_from(Arc::strong_count(&kept)));
        let defined = if round % 2 == 0 { define(&limited) } else { limited.enter(|_| define(&lisp)) };
        assert!(matches!(defined, Ok(()) | Err(Error::Timeout { .. })), "{defined:?}");
    }
    lisp.define("soundness:hasty", "Return 1.", || 1).expect("it is defined");
    assert_eq!(Arc::strong_count(&captured), 1);
}

#[test]
fn define_uses_the_package_of_its_handle() {
    let lisp = lisp();
    lisp.load_str("(defpackage :soundness-inner (:use :cl))").expect("it is defined");
    let inner = lisp.with_package("soundness-inner");
    inner.define("within", "Return 1.", || 1).expect("it is defined");
    assert_eq!(inner.eval::<i64>("(within)").expect("a value"), 1);
    assert_eq!(lisp.eval::<i64>("(soundness-inner::within)").expect("a value"), 1);
}

#[test]
fn failed_define_keeps_the_documentation() {
    let lisp = lisp();
    let before: String = lisp.eval("(documentation 'car 'function)").expect("a text");
    assert!(lisp.define("car", "Return 1.", || 1).is_err());
    assert_eq!(lisp.eval::<String>("(documentation 'car 'function)").expect("a text"), before);
}

// ---- Object lifetimes

/// Evaluates `code` after a full garbage collection.
fn eval_after_collection(code: &str) -> i64 {
    lisp().eval(&format!("(progn (sb-ext:gc :full t) {code})")).expect("a number")
}

const BYTES: &str = "(sb-kernel:dynamic-usage)";

#[test]
fn failed_message_keeps_no_objects_alive() {
    let lisp = lisp();
    lisp.define("soundness:two", "Take two.", |_: Value, _: Vec<i64>| ()).expect("it is defined");
    let before = eval_after_collection(BYTES);
    // The first argument has 100 KB; the second, an array of element type NIL, cannot be read.
    let arguments =
        "(loop repeat 500 do (ignore-errors (soundness:two (make-array 12500) (make-array 3 :element-type nil))))";
    lisp.eval::<()>(arguments).expect("they fail");
    let values = "(lambda () (values (list (make-array 12500)) (make-array 3 :element-type nil)))";
    let values: Function = lisp.eval(values).expect("a function");
    for _ in 0..500 {
        values.call::<(Vec<Value>, String)>(()).expect_err("it cannot be written");
    }
    let kept = eval_after_collection(BYTES) - before;
    assert!(kept < 10_000_000, "{kept} bytes");
}

#[test]
fn interrupted_message_keeps_no_objects_alive() {
    let lisp = lisp();
    lisp.define("soundness:take", "Take an object.", |_: Serde<serde::de::IgnoredAny>| ()).expect("it is defined");
    // A handle to 1.6 MB, and a list that shares structure: written out, it has 2^40 elements.
    let object = "(let ((vector (make-array 200000)) (node nil))
                    (dotimes (level 40) (setf node (list node node)))
                    (list (lambda () vector) node))";
    let limited = lisp.with_timeout(Duration::from_millis(50));
    let before = eval_after_collection(BYTES);
    for code in [object, &format!("(soundness:take {object})")] {
        let results: Vec<_> = (0..20).map(|_| limited.eval::<Serde<serde::de::IgnoredAny>>(code)).collect();
        // On a busy machine, an interruption may come so late that the message has reached its maximum size.
        assert!(results.iter().all(Result::is_err), "{results:?}");
        assert!(results.iter().any(|result| matches!(result, Err(Error::Timeout { .. }))), "{results:?}");
    }
    let kept = eval_after_collection(BYTES) - before;
    assert!(kept < 10_000_000, "{kept} bytes");
}

#[test]
fn dropped_values_are_collected_while_all_threads_sleep() {
    let lisp = lisp();
    let (sender, collected) = mpsc::channel();
    let report = move || _ = sender.send(());
    lisp.define("soundness:report-collection", "Report that most vectors were collected.", report)
        .expect("it is defined");
    lisp.eval::<()>("(defvar cl-user::*vectors* '())").expect("a variable");
    let vector = "(let ((vector (make-array 1000000)))
                    (push (sb-ext:make-weak-pointer vector) cl-user::*vectors*)
                    vector)";
    let values: Vec<Value> = (0..5).map(|_| lisp.eval(vector).expect("a vector")).collect();
    // A call would release the values. The stack of a sleeping thread may still have the address of one vector.
    let collect = "(sb-thread:make-thread
                     (lambda ()
                       (loop (sb-ext:gc :full t)
                             (when (<= (count-if #'sb-ext:weak-pointer-value cl-user::*vectors*) 1)
                               (return (soundness:report-collection)))
                             (sleep 0.05))))";
    lisp.eval::<()>(collect).expect("a thread");
    // All threads need time to fall asleep. The test also passes if one is still awake.
    std::thread::sleep(Duration::from_millis(50));
    drop(values);
    collected
        .recv_timeout(Duration::from_secs(60))
        .expect("the vectors are collected although the program makes no call");
}

// ---- Errors

#[test]
fn error_unwinding_without_a_non_local_exit_is_a_host_error() {
    let lisp = lisp();
    lisp.define("soundness:unwinding", "Fail.", || Err::<(), _>(Error::Unwinding)).expect("it is defined");
    let error = lisp.eval::<()>("(soundness:unwinding)").expect_err("an error");
    assert!(error.condition().is_some_and(|condition| condition.is("rust:host-error")), "{error}");
    assert!(error.to_string().contains("soundness:unwinding: "), "{error}");
    let result = lisp.enter(|cx| {
        let local = cx.local_function(|| Err::<(), _>(Error::Unwinding))?;
        local.call::<()>(())
    });
    let error = result.expect_err("an error");
    assert!(error.condition().is_some_and(|condition| condition.is("rust:host-error")), "{error}");
    assert!(matches!(lisp.enter(|_| Err::<(), _>(Error::Unwinding)), Err(Error::Unwinding)));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

// ---- The decoder

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoded {
    Objects,
    Refused,
    Fault,
}

/// Decodes `words` on the Lisp side, from memory that ends at an unreadable page.
fn decode(function: &Function, words: &[u64]) -> Decoded {
    let answer = function.call::<Symbol>((words.to_vec(),)).expect("it returns");
    [(keyword("objects"), Decoded::Objects), (keyword("refused"), Decoded::Refused), (keyword("fault"), Decoded::Fault)]
        .into_iter()
        .find_map(|(name, decoded)| (name == answer).then_some(decoded))
        .expect("one of the three")
}

fn decoder() -> Function {
    let lisp = lisp();
    lisp.load_str(
        r#"(defpackage :decoding (:use :cl :sb-sys) (:export #:decode))
           (in-package :decoding)
           (defconstant +size+ 65536)
           (defvar *end*
             (let ((memory (sb-posix:mmap nil (* 2 +size+) (logior sb-posix:prot-read sb-posix:prot-write)
                                          (logior sb-posix:map-private sb-posix:map-anon) -1 0)))
               (sb-alien:alien-funcall
                (sb-alien:extern-alien "mprotect" (function sb-alien:int system-area-pointer sb-alien:size-t sb-alien:int))
                (sap+ memory +size+) +size+ 0)
               (+ (sap-int memory) +size+)))
           (defun decode (words)
             (let ((start (- *end* (* 8 (length words)))))
               (loop for word in words
                     for place from start by 8
                     do (setf (sap-ref-64 (int-sap place) 0) word))
               (handler-case (progn (sbcl-host/embedding::read-objects start *end*) :objects)
                 (memory-fault-error () :fault)
                 (error () :refused))))"#,
    )
    .expect("it is loaded");
    lisp.function("decoding:decode").expect("a function")
}

fn cases(usual: u32) -> u32 {
    match std::env::var("SBCL_MCP_FUZZ_CASES") {
        Ok(text) => text.parse().expect("SBCL_MCP_FUZZ_CASES is a number"),
        Err(_) => usual,
    }
}

fn runner() -> TestRunner {
    TestRunner::new(Config { cases: cases(500), failure_persistence: None, ..Config::default() })
}

#[test]
fn random_words_are_refused_by_the_decoder() {
    let decoder = decoder();
    // Hardly any random word begins an object, because its number is too large for every kind of token.
    let outcome = runner().run(&proptest::collection::vec(any::<u64>(), 1..20), |words| {
        prop_assert_eq!(decode(&decoder, &words), Decoded::Refused);
        Ok(())
    });
    outcome.expect("they are refused");
}

#[test]
fn random_tokens_are_never_decoded_beyond_the_end_of_the_message() {
    let decoder = decoder();
    let numbers = prop_oneof![
        6 => 0..5_u64,
        2 => 0..2000_u64,
        1 => Just((1 << 56) - 1),
        1 => any::<u64>().prop_map(|number| number >> 8),
        1 => select(vec![1 << 55, (1 << 53) + 1, (1 << 31) + 1, 0x11_0000]),
    ];
    let token = (0..22_u64, numbers).prop_map(|(tag, number)| tag | number << 8);
    let word = prop_oneof![5 => token, 1 => any::<u64>(), 1 => 0..200_u64];
    let outcome = runner().run(&proptest::collection::vec(word, 0..24), |words| {
        prop_assert_ne!(decode(&decoder, &words), Decoded::Fault);
        Ok(())
    });
    outcome.expect("no fault");
}

#[test]
fn truncated_messages_are_refused_at_every_length() {
    let decoder = decoder();
    let text = |text: &str| {
        let codes: Vec<u32> = text.chars().map(u32::from).collect();
        let words = codes.chunks(2).map(|two| u64::from(two[0]) | u64::from(two.get(1).copied().unwrap_or(0)) << 32);
        std::iter::once(7 | (codes.len() as u64) << 8).chain(words).collect::<Vec<_>>()
    };
    let messages = [
        vec![2, 7],
        vec![3 | 2 << 8, 1, 1],
        vec![5, 0],
        text("größe λ😀"),
        [vec![8 | 1 << 8], text("COMMON-LISP"), text("CAR")].concat(),
        [vec![9], text("KEY")].concat(),
        vec![10, 2, 1, 2, 2],
        vec![11, 5, 0, 5, 0],
        vec![12 | 2 << 8, 2, 1, 12 | 1 << 8, 0],
        vec![13 | 1 << 8, 2, 1, 2, 2],
        vec![14 | 2 << 8, 0, 1],
        vec![15 | 9 << 8, 0, 0],
        vec![16 | 1 << 8, 2, 1, 0],
        vec![18 | 2 << 8, 0, 0],
    ];
    for message in messages {
        assert_eq!(decode(&decoder, &message), Decoded::Objects, "{message:x?}");
        // An empty message is valid, so the shortest prefix has one word.
        for length in 1..message.len() {
            let cut = decode(&decoder, &message[..length]);
            assert_eq!(cut, Decoded::Refused, "{message:x?} cut to {length}");
        }
    }
    for refused in [
        vec![17 | 1_000_000 << 8],
        vec![17],
        vec![6 | 0x11_0000 << 8],
        vec![7 | 1 << 8, 0x11_0000],
        vec![7 | 2 << 8, 0xffff_ffff_0000_0041],
        vec![10, 2, 1, 2, 0],
        vec![10, 2, 1, 5, 0],
        vec![11, 0, 0],
        vec![3],
        vec![13, 0],
        vec![19 | 1 << 8, 0],
        vec![20],
        vec![9, 2, 7],
    ] {
        assert_eq!(decode(&decoder, &refused), Decoded::Refused, "{refused:x?}");
    }
}

// ---- Misuse: leaks, panics, ignored errors

#[test]
fn forgotten_handles_and_calls_only_leak() {
    let lisp = lisp();
    let (local, handle) = lisp
        .enter(|cx| {
            let count = std::rc::Rc::new(Cell::new(0));
            let counted = count.clone();
            let local = cx.local_function(move || counted.set(counted.get() + 1))?;
            let function = Function::clone(&local);
            function.call::<()>(())?;
            std::mem::forget(local);
            function.call::<()>(())?;
            assert_eq!(count.get(), 2);
            let handle = cx.value(vec![1, 2])?;
            std::mem::forget(handle.clone());
            Ok((function, handle))
        })
        .expect("it is done");
    drop(handle);
    // Called on another thread, the closure either still exists or the call is an error.
    let elsewhere = std::thread::spawn(move || local.call::<()>(()));
    let _ = elsewhere.join().expect("no panic");
    let call = lisp.eval_async::<i64>("(+ 1 2)");
    std::mem::forget(call);
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn calls_still_work_after_a_panic_at_any_depth() {
    let lisp = lisp();
    lisp.define("soundness:nest", "Call Rust by way of Lisp, N times.", |n: i64| -> Result<i64, Error> {
        if n == 0 {
            std::panic::resume_unwind(Box::new("at the bottom"));
        }
        let lisp = Lisp::get_or_boot()?;
        let inner = catch_unwind(AssertUnwindSafe(|| lisp.enter(|cx| cx.call::<i64>("soundness:nest", (n - 1,)))));
        match inner {
            Ok(Ok(depth)) => Ok(depth + 1),
            Ok(Err(error)) if n > 20 => Err(error),
            _ => Ok(0),
        }
    })
    .expect("it is defined");
    assert_eq!(lisp.call::<i64>("soundness:nest", (5,)).expect("a depth"), 4);
    assert_eq!(lisp.call::<i64>("soundness:nest", (30,)).expect("a depth"), 29);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        lisp.enter(|cx| -> Result<(), Error> {
            cx.eval::<()>("(values)")?;
            std::panic::resume_unwind(Box::new("in the closure"))
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn calls_after_ignoring_error_unwinding_fail_and_the_throw_still_arrives() {
    let lisp = lisp();
    let thrown = RefCell::new(Vec::new());
    let result = lisp.enter(|cx| {
        let local = cx.local_function(move || -> Result<i64, Error> {
            let lisp = Lisp::get_or_boot()?;
            let first = lisp.enter(|cx| cx.eval::<i64>("(throw 'soundness 7)"));
            // Code that ignores the error cannot call Lisp again.
            for _ in 0..3 {
                thrown.borrow_mut().push(matches!(lisp.enter(|cx| cx.eval::<i64>("1")), Err(Error::Unwinding)));
            }
            assert!(thrown.borrow().iter().all(|unwinding| *unwinding));
            drop(first);
            Ok(1)
        })?;
        cx.eval::<()>("(defun catching (f) (list (catch 'soundness (funcall f)) 8))")?;
        cx.call::<Vec<i64>>("catching", (&local,))
    });
    assert_eq!(result.expect("values"), [7, 8]);
}

// ---- Interruptions

/// Checks that every variable that interruptions read is bound from the start of its thread. An interruption during the
/// outermost binding would read SBCL's marker for "no value" and fault: once in a million interruptions, too rarely to test.
#[test]
fn variables_read_by_interruptions_are_always_bound_in_their_thread() {
    const UNBOUND: &str =
        "(loop for variable in (cons 'sbcl-host/embedding::*program-calls* sbcl-host::**thread-variables**)
                                 unless (nth-value 1 (sb-thread:symbol-value-in-thread
                                                      variable sb-thread:*current-thread* nil))
                                   collect variable)";
    let lisp = lisp();
    assert_eq!(lisp.eval::<Vec<Symbol>>(UNBOUND).unwrap(), []);
    assert_eq!(
        lisp.eval::<Vec<Symbol>>(&format!("(sb-thread:join-thread (sb-thread:make-thread (lambda () {UNBOUND})))"))
            .unwrap(),
        []
    );
    let outcome = lisp.session().evaluate(sbcl::Evaluation::new(UNBOUND));
    assert_eq!(outcome.result.as_ref().expect("it succeeds")[0].text, "NIL");
}
