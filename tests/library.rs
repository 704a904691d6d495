//! The embedding API against one image, which all tests of this file share.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use sbcl::{BootError, Complex, Condition, Error, Function, Lisp, Ratio, Restart, Symbol, Value, keyword};

fn lisp() -> Lisp {
    Lisp::get_or_boot().expect("SBCL boots")
}

fn condition(error: Error) -> Box<Condition> {
    match error {
        Error::Condition(condition) => condition,
        other => panic!("no condition: {other:?}"),
    }
}

#[test]
fn a_second_boot_is_an_error_to_match_on() {
    let lisp = lisp();
    let again = Lisp::boot();
    assert!(matches!(again, Err(Error::Boot(BootError::AlreadyBooted))), "{again:?}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn values_are_read_as_what_rust_asks_for() {
    let lisp = lisp();
    assert_eq!(lisp.eval::<(i64, i64)>("(floor 17 5)").unwrap(), (3, 2));
    assert_eq!(lisp.eval::<i64>("(floor 17 5)").unwrap(), 3);
    assert_eq!(lisp.eval::<Vec<String>>(r#"(list "ada" "grace")"#).unwrap(), ["ada", "grace"]);
    assert_eq!(lisp.eval::<Vec<Vec<u8>>>("'((1 2) #(3))").unwrap(), [vec![1, 2], vec![3]]);
    assert_eq!(lisp.eval::<Option<f64>>("nil").unwrap(), None);
    assert_eq!(lisp.eval::<Option<f64>>("1/4").unwrap(), Some(0.25));
    assert_eq!(lisp.eval::<(String, char)>(r#"(values "größe λ😀" #\λ)"#).unwrap(), ("größe λ😀".to_owned(), 'λ'));
    assert_eq!(lisp.eval::<(bool, bool)>("(values nil 7)").unwrap(), (false, true));
    assert_eq!(lisp.eval::<Vec<(String, i64)>>(r#"'(("a" . 1) ("b" 2))"#).unwrap(), [("a".into(), 1), ("b".into(), 2)]);
    assert_eq!(lisp.eval::<Symbol>("'car").unwrap(), Symbol::new("COMMON-LISP", "CAR"));
    assert_eq!(lisp.eval::<Symbol>(":rate").unwrap(), keyword("rate"));
    assert_eq!(lisp.eval::<Ratio>("(/ 6 -4)").unwrap(), Ratio { numerator: -3, denominator: 2 });
    assert_eq!(lisp.eval::<Complex>("#c(1 2.5d0)").unwrap(), Complex { re: 1.0, im: 2.5 });
    assert_eq!(lisp.eval::<u128>("(1- (expt 2 128))").unwrap(), u128::MAX);
    assert_eq!(lisp.eval::<i128>("(- (expt 2 127))").unwrap(), i128::MIN);
    assert_eq!(lisp.eval::<u64>("(1- (expt 2 64))").unwrap(), u64::MAX);
    assert_eq!(
        lisp.eval::<Vec<f64>>("(make-array 2 :element-type 'double-float :initial-element 1d0)").unwrap(),
        [1.0; 2]
    );
    assert_eq!(lisp.eval::<[i64; 2]>("#(1 2)").unwrap(), [1, 2]);
    let map: HashMap<String, i64> =
        lisp.eval(r#"(let ((h (make-hash-table :test 'equal))) (setf (gethash "x" h) 1) h)"#).unwrap();
    assert_eq!(map, HashMap::from([("x".to_owned(), 1)]));
    lisp.eval::<()>("(values)").unwrap();
    assert_eq!(lisp.eval::<Option<i64>>("(values)").unwrap(), None);
}

#[test]
fn what_is_given_to_lisp_comes_back() {
    let lisp = lisp();
    macro_rules! same {
        ($($value:expr),* $(,)?) => {$({
            let value = $value;
            assert_eq!(lisp.call("identity", (&value,)).ok(), Some(value));
        })*};
    }
    same!(i64::MIN, u64::MAX, i128::MIN, i128::MAX, u128::MAX, -1_i8, 1.5_f32, f64::MIN_POSITIVE, 'ß', true, false);
    same!(String::new(), "odd".to_owned(), "größe 😀".to_owned(), "nul\0".to_owned(), "x".repeat(5000));
    same!(vec![1_i64, 2, 3], Vec::<i64>::new(), vec![1_u8, 2, 3], (0..=255).collect::<Vec<u8>>());
    same!(Some(3_i32), None::<i32>, vec![(1_i64, "a".to_owned(), 'c')], vec![vec!["deep".to_owned()]]);
    same!(BTreeMap::from([("a".to_owned(), vec![1_i64]), ("b".to_owned(), vec![])]), keyword("k"), [1.5_f64, 2.5]);
    same!(Ratio { numerator: 1, denominator: 3 }, Complex { re: 1.0, im: -1.0 });
    assert!(
        lisp.call::<bool>("typep", (vec![1_u8], lisp.eval::<Value>("'(vector (unsigned-byte 8))").unwrap())).unwrap()
    );
}

#[test]
fn a_conversion_says_what_was_expected_what_came_and_where() {
    let lisp = lisp();
    let text = |error: Error| error.to_string();
    assert_eq!(
        text(lisp.eval::<i64>(r#""abc""#).unwrap_err()),
        r#"expected an integer from -9223372036854775808 to 9223372036854775807, but found the string "abc""#
    );
    assert_eq!(
        text(lisp.eval::<Vec<(String, u8)>>(r#"'(("a" 1) ("b" 256))"#).unwrap_err()),
        "expected an integer from 0 to 255, but found 256 (in element 1, element 1)"
    );
    assert_eq!(text(lisp.eval::<String>("'(1 2)").unwrap_err()), "expected a string, but found (1 2)");
    assert_eq!(text(lisp.eval::<(i64, i64)>("1").unwrap_err()), "expected 2 values, but found one value");
    assert_eq!(
        text(lisp.eval::<String>("(string (code-char #xd800))").unwrap_err()),
        "expected text, but found a string with the surrogate code point 0xd800"
    );
    assert!(text(lisp.eval::<i64>("(make-hash-table)").unwrap_err()).contains("#<HASH-TABLE"));
    // What holds itself has an end.
    assert!(lisp.eval::<Vec<i64>>("(let ((l (list 1))) (setf (cdr l) l))").is_err());
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn a_condition_has_classes_message_restarts_frames_and_slots() {
    let lisp = lisp();
    let condition = condition(lisp.eval::<i64>("(/ 1 0)").unwrap_err());
    assert_eq!(condition.class(), "division-by-zero");
    assert!(condition.is("arithmetic-error") && condition.is("ERROR") && !condition.is("type-error"));
    assert!(condition.message().contains("DIVISION-BY-ZERO"), "{condition}");
    assert!(condition.frames().iter().any(|frame| frame.call == "(/ 1 0)"), "{:?}", condition.frames());
    assert!(!condition.backtrace().contains("SBCL-HOST"), "{}", condition.backtrace());
    assert_eq!(condition.slot::<Vec<i64>>("operands").unwrap(), [1, 0]);
    assert!(condition.slots().unwrap().iter().any(|(name, value)| name == "operands" && value == "(1 0)"));

    let missing = lisp.call::<()>("no-such-function-at-all", ()).unwrap_err();
    assert!(missing.to_string().contains("NO-SUCH-FUNCTION-AT-ALL"), "{missing}");
    let undefined = lisp.eval::<()>("(undefined-in-this-test 1)").unwrap_err();
    let undefined = undefined.condition().unwrap();
    assert!(undefined.is("undefined-function"));
    assert!(undefined.restarts().iter().any(|restart| restart.name == "USE-VALUE"), "{undefined:?}");

    // It is an ordinary error of Rust's.
    fn ordinary(lisp: &Lisp) -> Result<i64, Box<dyn std::error::Error + Send + Sync>> {
        Ok(lisp.eval("(error \"on purpose: ~a\" 7)")?)
    }
    assert_eq!(ordinary(&lisp).unwrap_err().to_string(), "simple-error: on purpose: 7");
}

#[test]
fn functions_follow_their_redefinition() {
    let lisp = lisp();
    lisp.load_str(
        "(defpackage :shop (:use :cl) (:export #:price))
         (in-package :shop)
         (defun price (n &key (rate 2)) (* n rate))",
    )
    .unwrap();
    let price: Function = lisp.function("shop:price").unwrap();
    assert_eq!(price.call::<i64>((21,)).unwrap(), 42);
    assert_eq!(lisp.call::<i64>("shop:price", (21, keyword("rate"), 3)).unwrap(), 63);
    lisp.load_str("(in-package :shop) (defun price (n) n)").unwrap();
    assert_eq!(price.call::<i64>((21,)).unwrap(), 21);
    assert_eq!(lisp.eval::<String>("(package-name *package*)").unwrap(), "COMMON-LISP-USER");
    assert_eq!(lisp.call::<i64>("+", [1, 2, 3]).unwrap(), 6);
    assert_eq!(lisp.call::<i64>("+", &vec![1; 50]).unwrap(), 50);
    assert!(lisp.function("when").is_err());
}

#[test]
fn a_function_is_redefined_under_load_and_no_call_is_lost() {
    let lisp = lisp();
    let define = |version: i64| {
        format!(
            "(defpackage :live (:use :cl) (:export #:version)) (in-package :live)
             (defun version (text) (values text {version} (helper)))
             (defun helper () {version})"
        )
    };
    lisp.load_str(&define(0)).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let newest = Arc::new(AtomicI64::new(0));
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (over, newest) = (over.clone(), newest.clone());
            let version = lisp.function("live:version").unwrap();
            std::thread::spawn(move || {
                let mut calls = 0;
                while !over.load(Ordering::SeqCst) {
                    let least = newest.load(Ordering::SeqCst);
                    let (text, outer, inner): (String, i64, i64) = version.call(("same",)).expect("no call is lost");
                    // What was there when the call began, or something newer.
                    assert!(text == "same" && outer >= least && inner >= least, "{outer} {inner} {least}");
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    for version in 1..=50 {
        lisp.load_str(&define(version)).unwrap();
        newest.store(version, Ordering::SeqCst);
    }
    over.store(true, Ordering::SeqCst);
    for caller in callers {
        assert!(caller.join().unwrap() > 0);
    }
    assert_eq!(lisp.call::<(String, i64, i64)>("live:version", ("x",)).unwrap(), ("x".to_owned(), 50, 50));
}

#[test]
fn files_are_loaded() {
    let lisp = lisp();
    let file = std::env::temp_dir().join(format!("sbcl library [{}]*.lisp", std::process::id()));
    std::fs::write(
        &file,
        "(defpackage :of-file (:use :cl)) (in-package :of-file) (defun λ () 1) (car 1) (defun no () 2)",
    )
    .unwrap();
    let failed = condition(lisp.load_file(&file).unwrap_err());
    std::fs::remove_file(&file).unwrap();
    assert!(failed.is("type-error"), "{failed}");
    // The forms before are done, those after are not.
    assert_eq!(lisp.call::<i64>("of-file::λ", ()).unwrap(), 1);
    assert!(lisp.function("of-file::no").is_err());
    assert_eq!(lisp.eval::<String>("(package-name *package*)").unwrap(), "COMMON-LISP-USER");
    assert!(condition(lisp.load_file(&file).unwrap_err()).is("file-error"));
}

#[test]
fn handles_keep_objects_alive_and_let_go_of_them() {
    let lisp = lisp();
    let table: Value = lisp.eval("(make-hash-table :test 'equal)").unwrap();
    lisp.call::<()>("(setf gethash)", ("value", "key", &table)).unwrap();
    assert_eq!(table.get::<String>("key").unwrap().as_deref(), Some("value"));
    assert_eq!(table.get::<String>("none").unwrap(), None);
    assert_eq!(table.type_of().unwrap(), "hash-table");
    assert_eq!(table.to::<HashMap<String, String>>().unwrap().len(), 1);
    std::thread::spawn(move || drop(table)).join().unwrap();

    let list: Value = lisp.eval("(list 1 \"two\" '(3))").unwrap();
    assert_eq!(list.len().unwrap(), 3);
    assert_eq!(list.to_string(), "(1 \"two\" (3))");
    let elements = list.elements().unwrap();
    assert_eq!(elements[1].to::<String>().unwrap(), "two");
    assert!(elements[0].eql(&lisp.value(1).unwrap()).unwrap());
    assert!(elements[2].equal(&lisp.value(vec![3]).unwrap()).unwrap());
    assert!(!elements[2].eql(&lisp.value(vec![3]).unwrap()).unwrap());
    // A handle and something that is written out, of one call.
    let (object, numbers): (Value, Vec<i64>) = lisp.eval("(values (list 1) (list 2 3))").unwrap();
    assert_eq!((object.to_string(), numbers), ("(1)".to_owned(), vec![2, 3]));

    let weak: Value = lisp.eval("(defparameter *kept* (list 1)) (sb-ext:make-weak-pointer *kept*)").unwrap();
    let kept: Value = lisp.eval("(prog1 *kept* (setf *kept* nil))").unwrap();
    lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
    let alive = |weak: &Value| !lisp.call::<Value>("sb-ext:weak-pointer-value", (weak,)).unwrap().is_nil();
    assert!(alive(&weak));
    drop(kept);
    // What is on a stack is taken for a reference: other calls have to overwrite it, on each of the threads.
    for _ in 0..50 {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    lisp.eval::<()>(
                        "(labels ((deep (n) (if (plusp n) (1+ (deep (1- n))) 0))) (dotimes (i 1000) (deep 500)))",
                    )
                });
            }
        });
        lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
        if !alive(&weak) {
            return;
        }
    }
    panic!("what a dropped handle kept is still there");
}

#[test]
fn calls_on_a_lisp_thread_are_direct_and_nest() {
    let lisp = lisp();
    let sum: u64 = lisp
        .enter(|cx| {
            let bytes = cx.eval::<Value>("(make-array 1000000 :element-type '(unsigned-byte 8) :initial-element 1)")?;
            let mut copy = vec![0; cx.len(&bytes)?];
            cx.copy_bytes(&bytes, &mut copy)?;
            assert!(cx.copy_bytes(&bytes, &mut [0; 3]).is_err());
            Ok(copy.iter().map(|&b| u64::from(b)).sum())
        })
        .unwrap();
    assert_eq!(sum, 1_000_000);
    let nested: i64 = lisp
        .enter(|_| {
            let thread = std::thread::current().id();
            lisp.enter(|_| {
                assert_eq!(std::thread::current().id(), thread);
                lisp.eval("(+ 1 2)")
            })
        })
        .unwrap();
    assert_eq!(nested, 3);
    // A closure may borrow, and panics as if it had been called here.
    let text = String::from("borrowed");
    assert_eq!(lisp.enter(|cx| cx.call::<usize>("length", (&text,))).unwrap(), 8);
    let panic = std::panic::catch_unwind(|| lisp.enter::<()>(|_| panic!("on purpose")));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn rust_functions_are_called_by_lisp() {
    let lisp = lisp();
    lisp.define("host:add", "Return the sum.", |a: i64, b: i64| a + b).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:add 1 2)").unwrap(), 3);
    assert_eq!(lisp.eval::<String>("(documentation 'host:add 'function)").unwrap(), "Return the sum.");
    let described: String = lisp.eval("(with-output-to-string (*standard-output*) (describe 'host:add))").unwrap();
    assert!(described.contains("(ARGUMENT-1 ARGUMENT-2)") && described.contains("Return the sum."), "{described}");
    lisp.define_as(
        "host:join",
        "first &optional second &rest more",
        "Join.",
        |a: String, b: Option<String>, more: Vec<String>| a + &b.unwrap_or_default() + &more.concat(),
    )
    .unwrap();
    assert_eq!(lisp.eval::<String>(r#"(host:join "a")"#).unwrap(), "a");
    assert_eq!(lisp.eval::<String>(r#"(host:join "a" "b" "c" "d")"#).unwrap(), "abcd");

    lisp.define("host:read", "Return the text of the file PATH.", |path: String| std::fs::read_to_string(path))
        .unwrap();
    let handled: String =
        lisp.eval(r#"(handler-case (host:read "/nowhere") (rust:host-error (e) (format nil "no: ~a" e)))"#).unwrap();
    assert!(handled.starts_with("no: host:read: No such file"), "{handled}");
    assert_eq!(
        lisp.eval::<String>(
            r#"(handler-bind ((error (lambda (e) (declare (ignore e)) (use-value "instead")))) (host:read "/nowhere"))"#
        )
        .unwrap(),
        "instead"
    );
    lisp.define("host:panic", "Panic.", |text: String| -> i64 { panic!("on purpose: {text}") }).unwrap();
    let panic = condition(lisp.eval::<i64>(r#"(host:panic "x")"#).unwrap_err());
    assert!(panic.is("rust:host-panic") && panic.message().contains("on purpose: x"), "{panic}");
    let wrong = condition(lisp.eval::<i64>(r#"(host:add 1 "x")"#).unwrap_err());
    assert!(wrong.message().contains(r#"but found the string "x" (in argument 2)"#), "{wrong}");
    // What Lisp signalled is passed on as what it is.
    let inner = lisp.clone();
    lisp.define("host:divide", "Divide.", move |a: i64, b: i64| inner.call::<i64>("/", (a, b))).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:divide 6 3)").unwrap(), 2);
    assert_eq!(
        lisp.eval::<Symbol>("(handler-case (host:divide 6 0) (division-by-zero () :caught))").unwrap(),
        keyword("caught")
    );
    // Defined anew.
    lisp.define("host:add", "Return the difference.", |a: i64, b: i64| a - b).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:add 1 2)").unwrap(), -1);
    // On a thread of Lisp's own.
    assert_eq!(
        lisp.eval::<i64>("(sb-thread:join-thread (sb-thread:make-thread (lambda () (host:add 5 2))))").unwrap(),
        3
    );
}

#[test]
fn rust_functions_have_the_lambda_list_that_they_are_defined_with() {
    let lisp = lisp();
    lisp.define_as(
        "host:pad",
        "text &key (width (+ 3 5)) fill",
        "Return TEXT, padded on the left.",
        |text: String, width: usize, fill: Option<char>| {
            let missing = width.saturating_sub(text.chars().count());
            std::iter::repeat_n(fill.unwrap_or('-'), missing).chain(text.chars()).collect::<String>()
        },
    )
    .unwrap();
    let pad = |code: &str| lisp.eval::<String>(code).unwrap();
    assert_eq!(pad(r#"(host:pad "x")"#), "-------x");
    assert_eq!(pad(r#"(host:pad "x" :fill #\. :width 3)"#), "..x");
    assert_eq!(pad(r#"(apply #'host:pad "x" '(:width 2 :width 5))"#), "-x");
    assert_eq!(lisp.call::<String>("host:pad", ("x", keyword("width"), 2)).unwrap(), "-x");
    for wrong in [r#"(host:pad "x" :other 1)"#, r#"(host:pad "x" :width)"#, "(host:pad)"] {
        let code = format!("(funcall (compile nil '(lambda () (declare (notinline host:pad)) {wrong})))");
        assert!(condition(lisp.eval::<String>(&code).unwrap_err()).is("program-error"), "{wrong}");
    }
    let wrong = condition(lisp.eval::<String>(r#"(host:pad "x" :width "wide")"#).unwrap_err());
    assert!(wrong.message().ends_with(r#"but found the string "wide" (in argument 2)"#), "{wrong}");
    let described = |name: &str| {
        lisp.eval::<String>(&format!("(with-output-to-string (*standard-output*) (describe '{name}))")).unwrap()
    };
    let text = described("host:pad");
    assert!(text.contains("Lambda-list: (TEXT &KEY (WIDTH (+ 3 5)) FILL)"), "{text}");
    assert!(text.contains("Return TEXT, padded on the left."), "{text}");
    // Without one, what may be left out is told by the types.
    lisp.define("host:sum", "Add up.", |a: i64, b: Option<i64>| a + b.unwrap_or(10)).unwrap();
    assert_eq!(lisp.eval::<(i64, i64)>("(values (host:sum 1) (host:sum 1 2))").unwrap(), (11, 3));
    assert!(described("host:sum").contains("Lambda-list: (ARGUMENT-1 &OPTIONAL ARGUMENT-2)"));
}

#[test]
fn what_is_no_t_stays_what_it_is_in_a_result() {
    let lisp = lisp();
    type Found<T> = Result<T, Value>;
    let found: Vec<Found<i64>> = lisp.eval(r#"(list 1 :no -3 "x" (list 4))"#).unwrap();
    let text = |found: &Found<i64>| match found {
        Ok(number) => number.to_string(),
        Err(other) => format!("no: {other}"),
    };
    assert_eq!(found.iter().map(text).collect::<Vec<_>>(), ["1", "no: :NO", "-3", "no: \"x\"", "no: (4)"]);
    assert_eq!(lisp.eval::<Found<Vec<u8>>>("(list 1 2)").unwrap().ok(), Some(vec![1, 2]));
    // It is the same object, not a copy.
    lisp.eval::<()>("(defparameter *mixed* (list 1 :x))").unwrap();
    let other = lisp.eval::<Found<Vec<i64>>>("*mixed*").unwrap().unwrap_err();
    assert!(other.eql(&lisp.eval("*mixed*").unwrap()).unwrap());
    // Several values, one of them a condition.
    let (quotient, failure): (Found<i64>, Found<i64>) =
        lisp.eval("(values (/ 6 2) (handler-case (/ 1 0) (error (condition) condition)))").unwrap();
    assert_eq!((quotient.ok(), failure.unwrap_err().type_of().unwrap().as_str()), (Some(3), "division-by-zero"));
    assert_eq!(lisp.eval::<Found<Option<i64>>>("nil").unwrap().ok(), Some(None));
}

#[test]
#[allow(unsafe_code)]
fn octets_are_borrowed_where_they_are() {
    let lisp = lisp();
    lisp.eval::<()>("(defvar *throws* nil)").unwrap();
    lisp.enter(|cx| {
        let borrow = |octets: &Value| {
            // SAFETY: what is borrowed here is new each time, and nothing writes to it.
            unsafe { cx.borrow_bytes(octets, <[u8]>::to_vec) }
        };
        let octets = |code: &str| cx.eval::<Value>(code);
        assert_eq!(borrow(&octets("(coerce '(1 2 3) '(vector (unsigned-byte 8)))")?)?, [1, 2, 3]);
        assert_eq!(borrow(&octets("(make-array 0 :element-type '(unsigned-byte 8))")?)?, Vec::<u8>::new());
        assert_eq!(
            borrow(&octets(
                "(make-array 2 :element-type '(unsigned-byte 8) :displaced-index-offset 1 :displaced-to
                   (make-array 4 :element-type '(unsigned-byte 8) :initial-contents '(7 8 9 10)))"
            )?)?,
            [8, 9]
        );
        assert_eq!(
            borrow(&octets("(make-array 3 :element-type '(unsigned-byte 8) :fill-pointer 1 :initial-element 5)")?)?,
            [5]
        );
        for wrong in ["7", "'(1 2)", "\"abc\"", "(vector 1 2)"] {
            let error = borrow(&octets(wrong)?).unwrap_err();
            assert!(error.condition().is_some_and(|condition| condition.is("type-error")), "{wrong}: {error}");
        }
        // Collections do not move it while it is lent, and move others.
        let large = octets("(coerce (loop for n below 5000 collect (mod n 251)) '(vector (unsigned-byte 8)))")?;
        // SAFETY: nothing writes to it: collections and what else runs here do not.
        let is_there = unsafe {
            cx.borrow_bytes(&large, |octets| {
                let is_whole = || octets.iter().zip(0..5000).all(|(&octet, n)| i32::from(octet) == n % 251);
                let all = (0..5).all(|_| {
                    cx.eval::<()>("(make-array 100000) (sb-ext:gc)").is_ok()
                        && cx.eval::<()>("(sb-ext:gc :full t)").is_ok()
                        && is_whole()
                });
                all && octets.len() == 5000
            })
        }?;
        assert!(is_there);
        // Nested, with a panic, and with an exit of Lisp's.
        // SAFETY: as above.
        let nested =
            unsafe { cx.borrow_bytes(&large, |one| cx.borrow_bytes(&large, |other| std::ptr::eq(one, other))) };
        assert!(nested??);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: as above.
            unsafe { cx.borrow_bytes(&large, |_| panic!("on purpose")) }
        }));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
        assert_eq!(cx.eval::<i64>("(+ 1 2)")?, 3);
        let throws = cx.local_function({
            let lisp = lisp.clone();
            let large = large.clone();
            move |out: Function| {
                // SAFETY: as above.
                lisp.enter(|cx| unsafe { cx.borrow_bytes(&large, |_| out.call::<()>(())) })?
            }
        })?;
        cx.call::<()>("set", (cx.eval::<Value>("'*throws*")?, &throws))?;
        assert_eq!(cx.eval::<i64>("(catch 'out (funcall *throws* (lambda () (throw 'out 6))) 7)")?, 6);
        cx.eval::<()>("(setf *throws* nil)")
    })
    .unwrap();
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

/// Counts how many are dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn exits_of_lisp_run_the_destructors_of_the_rust_frames_that_they_cross() {
    let lisp = lisp();
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    lisp.define("host:through", "Call FUNCTION.", move |function: Function| -> Result<Value, Error> {
        let _dropped = Dropped(count.clone());
        let value = function.call::<Value>(());
        if let Err(Error::Unwinding) = &value {
            // Lisp is on its way out: it does nothing else for us.
            assert!(matches!(function.call::<Value>(()), Err(Error::Unwinding)));
        }
        value
    })
    .unwrap();
    assert_eq!(lisp.eval::<i64>("(host:through (lambda () 7))").unwrap(), 7);
    assert_eq!(dropped.swap(0, Ordering::SeqCst), 1);
    assert_eq!(
        lisp.eval::<(i64, i64, i64, i64)>("(block nil (host:through (lambda () (return (values 1 2 3 4)))) 9)")
            .unwrap(),
        (1, 2, 3, 4)
    );
    assert_eq!(lisp.eval::<i64>("(block nil (host:through (lambda () (return 5))) 9)").unwrap(), 5);
    assert_eq!(
        lisp.eval::<i64>("(catch 'out (host:through (lambda () (host:through (lambda () (throw 'out 8))))) 9)")
            .unwrap(),
        8
    );
    assert_eq!(dropped.swap(0, Ordering::SeqCst), 4);
    assert_eq!(
        lisp.eval::<Vec<i64>>(
            "(let ((seen '()))
               (catch 'out
                 (unwind-protect
                     (host:through (lambda () (unwind-protect (throw 'out nil) (push 1 seen))))
                   (push 2 seen)))
               (reverse seen))"
        )
        .unwrap(),
        [1, 2]
    );
    // Restarts, and tagbodies.
    assert_eq!(
        lisp.eval::<i64>("(restart-case (host:through (lambda () (invoke-restart 'mine 3))) (mine (n) (1+ n)))")
            .unwrap(),
        4
    );
    assert_eq!(
        lisp.eval::<i64>(
            "(let ((n 0)) (tagbody again (incf n) (host:through (lambda () (when (< n 3) (go again))))) n)"
        )
        .unwrap(),
        3
    );
    assert_eq!(dropped.swap(0, Ordering::SeqCst), 5);
    // Errors are the Rust function's, which passes them on; signals are for whoever listens outside.
    assert_eq!(lisp.eval::<i64>("(handler-case (host:through (lambda () (error \"x\"))) (error () 6))").unwrap(), 6);
    assert_eq!(
        lisp.eval::<i64>("(let ((n 0)) (handler-bind ((condition (lambda (c) (declare (ignore c)) (incf n)))) (host:through (lambda () (signal 'condition)))) n)").unwrap(),
        1
    );
    // And none of that has hurt the thread.
    lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn an_exhausted_stack_is_a_condition_even_with_rust_in_between() {
    let lisp = lisp();
    let overflow = condition(lisp.eval::<i64>("(labels ((deep (n) (1+ (deep n)))) (deep 0))").unwrap_err());
    assert!(overflow.is("storage-condition"), "{overflow}");
    let inner = lisp.clone();
    lisp.define("host:recurse", "Recurse.", move |n: i64| inner.call::<i64>("recurse-by-host", (n,))).unwrap();
    lisp.load_str("(defun recurse-by-host (n) (1+ (host:recurse (1+ n))))").unwrap();
    let overflow = lisp.call::<i64>("recurse-by-host", (0,)).unwrap_err();
    assert!(overflow.condition().is_some_and(|condition| condition.is("storage-condition")), "{overflow}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn a_host_function_that_waits_delays_no_collection() {
    let lisp = lisp();
    // Microseconds that the middle one of so many collections takes.
    let collect = || -> i64 {
        lisp.eval(
            "(let ((times (loop repeat 21
                                collect (let ((start (get-internal-real-time)))
                                          (sb-ext:gc)
                                          (- (get-internal-real-time) start)))))
               (nth 10 (sort times #'<)))",
        )
        .unwrap()
    };
    let before = collect();
    let (entered, told) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    lisp.define("host:wait", "Wait until it may go on.", move || {
        entered.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).is_ok()
    })
    .unwrap();
    // On a Lisp thread of its own: the collections are asked for by one of the program's.
    let thread: Value = lisp.eval("(sb-thread:make-thread (lambda () (host:wait)))").unwrap();
    told.recv_timeout(Duration::from_secs(20)).unwrap();
    let during = collect();
    assert!(during <= before + 50_000, "{during} µs while a host function waits, {before} before");
    // It has waited all the time.
    finish.send(()).unwrap();
    assert!(lisp.call::<bool>("sb-thread:join-thread", (&thread,)).unwrap());
}

#[test]
fn a_function_has_the_options_of_the_handle_that_looked_it_up() {
    let lisp = lisp();
    lisp.load_str("(defun runs-for-ever () (loop))").unwrap();
    // Time enough to look it up on a busy machine.
    let limited = lisp.with_timeout(Duration::from_secs(1)).function("runs-for-ever").unwrap();
    assert!(matches!(limited.call::<()>(()), Err(Error::Timeout { .. })));
    // From a Lisp thread as well.
    let inside = lisp.enter(|_| Ok(matches!(limited.clone().call::<()>(()), Err(Error::Timeout { .. }))));
    assert!(inside.unwrap());
    let sixteen = lisp.with_bindings(&[("*print-base*", lisp.value(16).unwrap())]).unwrap();
    assert_eq!(sixteen.function("princ-to-string").unwrap().call::<String>((255,)).unwrap(), "FF");
    assert_eq!(lisp.function("princ-to-string").unwrap().call::<String>((255,)).unwrap(), "255");
}

#[test]
fn a_local_function_is_its_threads() {
    let lisp = lisp();
    let kept = lisp
        .enter(|cx| {
            let sum = Rc::new(Cell::new(0));
            let of_closure = sum.clone();
            let add = cx.local_function(move |n: i64, twice: Option<bool>| {
                of_closure.set(of_closure.get() + if twice == Some(true) { 2 * n } else { n });
                of_closure.get()
            })?;
            cx.call::<()>("mapc", (&add, vec![1, 2, 3]))?;
            assert_eq!((sum.get(), add.call::<i64>((4, true))?), (6, 14));
            assert!(add.call::<i64>(()).unwrap_err().condition().unwrap().is("program-error"));
            assert!(add.call::<i64>((1, 2, 3)).unwrap_err().condition().unwrap().is("program-error"));
            // Another thread of Lisp's.
            let elsewhere = cx.call::<Value>(
                "sb-thread:make-thread",
                (
                    cx.eval::<Function>(
                        "(lambda (f) (handler-case (funcall f 1) (rust:host-error (e) (princ-to-string e))))",
                    )?,
                    keyword("arguments"),
                    vec![add.value()],
                ),
            )?;
            let refused: String = cx.call("sb-thread:join-thread", (&elsewhere,))?;
            assert!(refused.contains("belongs to another thread"), "{refused}");
            assert_eq!(sum.get(), 14);
            let kept = add.value().clone();
            drop(add);
            assert_eq!(Rc::strong_count(&sum), 1);
            Ok(kept)
        })
        .unwrap();
    let gone = lisp.call::<i64>("funcall", (&kept, 1)).unwrap_err();
    assert!(gone.condition().unwrap().is("rust:host-error"), "{gone}");
}

#[test]
fn handles_are_derived_with_options_of_their_own() {
    let lisp = lisp();
    let start = Instant::now();
    let late = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop)");
    assert!(matches!(late, Err(Error::Timeout { limit }) if limit == Duration::from_millis(100)), "{late:?}");
    let late = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop (ignore-errors (sleep 1)))");
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert!(start.elapsed() < Duration::from_secs(20));

    let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("USE-VALUE", 0)));
    assert_eq!(careful.eval::<i64>("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))").unwrap(), 1);
    // It is asked before anything is unwound, and once.
    assert_eq!(
        careful
            .eval::<i64>(
                "(let ((n 0)) (unwind-protect (restart-case (progn (/ 1 0) 5) (use-value (v) (+ n v))) (setf n 7)))"
            )
            .unwrap(),
        0
    );
    assert!(careful.eval::<i64>("(/ 1 0)").is_err());
    assert!(careful.eval::<i64>("(error \"other\")").is_err());
    // Errors that Lisp handles are Lisp's.
    assert_eq!(careful.eval::<i64>("(restart-case (handler-case (/ 1 0) (error () 3)) (use-value (v) v))").unwrap(), 3);

    lisp.load_str("(defpackage :elsewhere (:use :cl)) (in-package :elsewhere) (defun here () :here)").unwrap();
    let elsewhere = lisp.with_package("elsewhere");
    assert_eq!(elsewhere.eval::<Symbol>("(here)").unwrap(), keyword("here"));
    assert_eq!(elsewhere.call::<Symbol>("here", ()).unwrap(), keyword("here"));
    assert!(lisp.with_package("no-such").eval::<()>("1").is_err());

    lisp.load_str("(defvar *level* 1)").unwrap();
    let bound = lisp.with_bindings(&[("*level*", lisp.value(5).unwrap())]).unwrap();
    assert_eq!(bound.eval::<i64>("*level*").unwrap(), 5);
    assert_eq!(lisp.eval::<i64>("*level*").unwrap(), 1);
    assert!(lisp.with_bindings(&[("*no-such-variable*", Value::nil())]).is_err());
    // Together, and on a Lisp thread.
    let both = bound.with_timeout(Duration::from_secs(1));
    assert_eq!(lisp.enter(|_| both.eval::<i64>("(1+ *level*)")).unwrap(), 6);
    let late = lisp.enter(|_| both.eval::<()>("(loop)"));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn a_call_is_interrupted_from_another_thread() {
    let lisp = lisp().separate();
    let stop = lisp.interrupt_handle();
    let (began, told) = mpsc::channel();
    lisp.define("host:began", "Tell that it has begun.", move || began.send(()).unwrap()).unwrap();
    let caller = {
        let lisp = lisp.clone();
        std::thread::spawn(move || lisp.eval::<()>("(host:began) (loop)"))
    };
    told.recv_timeout(Duration::from_secs(20)).unwrap();
    stop.interrupt();
    assert!(matches!(caller.join().unwrap(), Err(Error::Interrupted)));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn a_host_function_that_blocks_is_waited_for_and_then_its_call_ends() {
    let lisp = lisp();
    let (began, told) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    let returned = Arc::new(AtomicBool::new(false));
    let is_returned = returned.clone();
    lisp.define("host:block", "Wait until it may go on.", move || {
        began.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        is_returned.store(true, Ordering::SeqCst);
    })
    .unwrap();
    let separate = lisp.separate();
    let stop = separate.interrupt_handle();
    let caller = std::thread::spawn(move || separate.eval::<()>("(host:block) (loop)"));
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    stop.interrupt();
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
    assert!(!caller.is_finished());
    finish.send(()).unwrap();
    assert!(matches!(caller.join().unwrap(), Err(Error::Interrupted)));
    assert!(returned.load(Ordering::SeqCst));
}

#[test]
fn a_call_that_lisp_aborts_ends_and_so_does_nothing_else() {
    let lisp = lisp();
    assert!(matches!(lisp.eval::<()>("(abort)"), Err(Error::Aborted)));
    assert!(matches!(lisp.eval::<()>("(sb-thread:abort-thread)"), Err(Error::Aborted)));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn exit_is_an_error_and_the_program_goes_on() {
    let lisp = lisp();
    for code in ["(sb-ext:exit)", "(sb-ext:exit :code 3 :abort t)", "(sb-ext:quit)", "(unwind-protect (sb-ext:exit) 1)"]
    {
        let error = lisp.eval::<()>(code).unwrap_err();
        assert_eq!(
            error.to_string(),
            "sbcl-host::exit-refused: EXIT was called: the program that this image is part of goes on.",
            "{code}"
        );
        assert!(condition(error).is("error"));
    }
    // A function that Lisp calls, and another thread of Lisp's.
    assert!(lisp.function("sb-ext:exit").unwrap().call::<()>(()).is_err());
    assert_eq!(
        lisp.eval::<Symbol>(
            "(sb-thread:join-thread (sb-thread:make-thread (lambda () (handler-case (exit) (error () :goes-on)))))"
        )
        .unwrap(),
        keyword("goes-on")
    );
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

/// A client of `sbcl::mcp::spawn`.
#[cfg(feature = "mcp")]
mod agent {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use sbcl::Lisp;
    use sbcl::mcp::Served;
    use serde_json::{Value, json};

    pub(crate) struct Agent {
        stream: UnixStream,
        lines: BufReader<UnixStream>,
        last: i64,
    }

    impl Agent {
        pub(crate) fn join(lisp: &Lisp) -> (Self, Served) {
            let (agent, served, _) = Self::join_and_be_told(lisp);
            (agent, served)
        }

        /// The same, with what the server says of itself.
        pub(crate) fn join_and_be_told(lisp: &Lisp) -> (Self, Served, String) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let served = sbcl::mcp::spawn(lisp, ours).unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut agent = Self { lines: BufReader::new(theirs.try_clone().unwrap()), stream: theirs, last: 0 };
            let client = json!({"name": "test", "version": "1"});
            agent.post(
                "initialize",
                &json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}),
            );
            let answer = agent.answer();
            assert_eq!(answer["result"]["protocolVersion"], "2025-11-25");
            agent.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
            let instructions = answer["result"]["instructions"].as_str().expect("instructions");
            (agent, served, instructions.to_owned())
        }

        fn send(&mut self, message: &Value) {
            self.stream.write_all(format!("{message}\n").as_bytes()).unwrap();
        }

        pub(crate) fn post(&mut self, method: &str, params: &Value) {
            self.last += 1;
            self.send(&json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}));
        }

        /// The answer to what was posted last.
        pub(crate) fn answer(&mut self) -> Value {
            loop {
                let message = self.next().expect("an answer");
                if message["id"] == self.last {
                    return message;
                }
            }
        }

        /// The next message; `None` at the end.
        pub(crate) fn next(&mut self) -> Option<Value> {
            let mut line = String::new();
            match self.lines.read_line(&mut line) {
                // What was sent last had not been read when the other end was closed.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                read => _ = read.expect("it is not silent"),
            }
            (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
        }

        pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> String {
            self.post("tools/call", &json!({"name": tool, "arguments": arguments}));
            self.answer()["result"]["content"][0]["text"].as_str().expect("text").to_owned()
        }

        pub(crate) fn evaluate(&mut self, code: &str) -> String {
            self.call("evaluate-lisp", json!({"code": code}))
        }

        pub(crate) fn tools(&mut self) -> Vec<String> {
            self.post("tools/list", &json!({}));
            let answer = self.answer();
            let tools = answer["result"]["tools"].as_array().expect("tools").iter();
            tools.map(|tool| tool["name"].as_str().expect("a name").to_owned()).collect()
        }
    }
}

#[cfg(feature = "mcp")]
#[test]
fn agents_are_served_on_the_programs_own_image() {
    use agent::Agent;

    let lisp = lisp();
    lisp.load_str("(defvar *of-program* 12) (defun answer () 41)").unwrap();
    let (mut one, served_one, instructions) = Agent::join_and_be_told(&lisp);
    let (mut other, served_other) = Agent::join(&lisp);
    let tools = one.tools();
    assert!(tools.iter().any(|tool| tool == "evaluate-lisp"), "{tools:?}");
    assert!(!tools.iter().any(|tool| tool == "reset-session" || tool == "checkpoint"), "{tools:?}");
    for other in ["reset-session", "checkpoint", "IMAGE-LOST"] {
        assert!(!instructions.contains(other), "{instructions}");
    }
    assert!(instructions.contains("part of a running program"), "{instructions}");

    // Both are on the program's image, and it sees what they do.
    assert!(one.evaluate("(list *of-program* (answer))").contains("(12 41)"));
    one.evaluate("(defun answer () 42)");
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
    assert!(other.evaluate("(answer)").contains("42"));
    // Nor is it told of such tools where something is wrong.
    let fault = one.evaluate("(sb-sys:sap-ref-8 (sb-sys:int-sap 8) 0)");
    assert!(fault.contains("may be damaged") && !fault.contains("reset-session"), "{fault}");
    let running = one.evaluate(
        "(defvar *gate* (sb-thread:make-semaphore))
         (defvar *stays* (sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore *gate*))))",
    );
    assert!(running.contains("Still running") && !running.contains("reset-session"), "{running}");
    one.evaluate("(sb-thread:signal-semaphore *gate*) (sb-thread:join-thread *stays*)");
    // Each has its own package and errors.
    one.evaluate("(defpackage :agents (:use :cl)) (in-package :agents)");
    assert!(one.evaluate("(package-name *package*)").contains("AGENTS"));
    assert!(other.evaluate("(package-name *package*)").contains("COMMON-LISP-USER"));
    assert!(one.evaluate("(error \"of one\")").contains("of one"));
    assert!(!other.call("describe-last-error", serde_json::json!({})).contains("of one"));
    // The program's calls go on while one of them waits in an evaluation.
    let (began, told) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    lisp.define("host:agent-waits", "Wait until it may go on.", move || {
        began.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).is_ok()
    })
    .unwrap();
    one.post("tools/call", &serde_json::json!({"name": "evaluate-lisp", "arguments": {"code": "(host:agent-waits)"}}));
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
    finish.send(()).unwrap();
    assert!(one.answer()["result"]["content"][0]["text"].as_str().unwrap().contains('T'));

    // One leaves; the other one stays, until it is served no longer.
    assert!(!served_one.is_over());
    drop(one);
    served_one.wait().unwrap();
    assert!(other.evaluate("(+ 1 2)").contains('3'));
    let endless = serde_json::json!({"name": "evaluate-lisp", "arguments": {"code": "(host:agent-waits) (loop)"}});
    other.post("tools/call", &endless);
    // What is not read yet when the stream is closed would reset it.
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    finish.send(()).unwrap();
    served_other.stop().unwrap();
    while other.next().is_some() {}
    // What it was at does not go on, and a new one may come.
    let (mut third, served) = Agent::join(&lisp);
    assert!(third.evaluate("(answer)").contains("42"));
    served.stop().unwrap();
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
}

#[test]
fn the_session_is_on_the_same_image() {
    let lisp = lisp();
    lisp.load_str("(defparameter *shared* 12)").unwrap();
    let outcome = lisp.session().evaluate(sbcl::Evaluation::new("*shared*"));
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "12");
    lisp.define("host:twice", "Double.", |n: i64| 2 * n).unwrap();
    let outcome = lisp.session().evaluate(sbcl::Evaluation::new("(host:twice *shared*)"));
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "24");
}

#[test]
fn futures_are_of_no_particular_runtime() {
    let lisp = lisp();
    let tokio = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    assert_eq!(tokio.block_on(lisp.eval_async::<i64>("(progn (sleep 0.05) 7)")).unwrap(), 7);
    assert_eq!(tokio.block_on(lisp.call_async::<i64>("+", (1, 2))).unwrap(), 3);
    assert_eq!(smol::block_on(lisp.eval_async::<i64>("(+ 1 2)")).unwrap(), 3);
    assert!(smol::block_on(lisp.eval_async::<i64>("(/ 1 0)")).is_err());
    let limited = lisp.with_timeout(Duration::from_millis(50));
    assert!(matches!(smol::block_on(limited.eval_async::<()>("(loop)")), Err(Error::Timeout { .. })));
    // Dropping one ends it, running or waiting.
    let late = tokio
        .block_on(async { tokio::time::timeout(Duration::from_millis(50), lisp.eval_async::<()>("(loop)")).await });
    assert!(late.is_err());
    drop(lisp.eval_async::<()>("(loop)"));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Order {
    id: i64,
    line_items: Vec<String>,
    state: State,
    note: Option<String>,
    by_name: BTreeMap<String, f64>,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
enum State {
    InStock,
    SentBy(String),
    Moved { from: i64, to_place: i64 },
    Pair(i64, bool),
}

#[test]
fn structs_and_enums_are_property_lists_and_keywords() {
    use sbcl::Serde;
    let lisp = lisp();
    for state in
        [State::InStock, State::SentBy("post".into()), State::Moved { from: 1, to_place: 2 }, State::Pair(3, true)]
    {
        let order = Order {
            id: 7,
            line_items: vec!["a".into(), "b".into()],
            state,
            note: None,
            by_name: BTreeMap::from([("x".to_owned(), 1.5)]),
        };
        assert_eq!(lisp.call::<Serde<Order>>("identity", (Serde(&order),)).unwrap().0, order);
    }
    let printed = lisp.value(Serde(State::Moved { from: 1, to_place: 2 })).unwrap().to_string();
    assert_eq!(printed, "(:MOVED :FROM 1 :TO-PLACE 2)");
    lisp.load_str(
        "(defstruct order id line-items state note by-name)
         (defclass parcel () ((from :initarg :from) (to-place :initarg :to-place)))",
    )
    .unwrap();
    let order: Serde<Order> =
        lisp.eval("(make-order :id 1 :line-items #(\"x\") :state :in-stock :note \"n\" :by-name '(:a 1/2))").unwrap();
    assert_eq!((order.0.id, order.0.note.as_deref(), order.0.by_name["a"]), (1, Some("n"), 0.5));
    #[derive(serde::Deserialize)]
    struct Parcel {
        from: i64,
        to_place: i64,
    }
    let parcel: Serde<Parcel> = lisp.eval("(make-instance 'parcel :from 1 :to-place 2)").unwrap();
    assert_eq!((parcel.0.from, parcel.0.to_place), (1, 2));
    let missing = lisp.eval::<Serde<Order>>("'(:id 1)").unwrap_err().to_string();
    assert!(missing.contains("missing field"), "{missing}");
    assert!(lisp.eval::<Serde<Order>>("7").is_err());
}

mod identity {
    use proptest::prelude::*;

    #[cfg(feature = "num-bigint")]
    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn integers_of_any_size_come_back(octets in any::<Vec<u8>>(), zeros in 0_usize..40) {
            use num_bigint::{BigInt, BigUint};
            let lisp = super::lisp();
            let signed = BigInt::from_signed_bytes_le(&octets) << (8 * zeros);
            let unsigned = BigUint::from_bytes_be(&octets);
            prop_assert_eq!(&lisp.call::<BigInt>("identity", (&signed,)).unwrap(), &signed);
            prop_assert_eq!(&lisp.call::<BigUint>("identity", (&unsigned,)).unwrap(), &unsigned);
            // It is the same number to Lisp.
            prop_assert_eq!(lisp.call::<String>("princ-to-string", (&signed,)).unwrap(), signed.to_string());
            prop_assert_eq!(&lisp.call::<BigInt>("-", (&signed,)).unwrap(), &-&signed);
            prop_assert_eq!(lisp.call::<BigUint>("1-", (&signed,)).is_ok(), signed > BigInt::ZERO);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_goes_to_lisp_comes_back(
            text in any::<String>(),
            numbers in any::<Vec<i128>>(),
            octets in any::<Vec<u8>>(),
            nested in prop::collection::vec(any::<(u64, Option<char>, Vec<String>)>(), 0..5),
            float in any::<f64>().prop_filter("NaN is not itself", |float| !float.is_nan()),
            map in any::<std::collections::BTreeMap<String, (bool, i8)>>(),
        ) {
            let lisp = super::lisp();
            prop_assert_eq!(&lisp.call::<String>("identity", (&text,)).unwrap(), &text);
            prop_assert_eq!(&lisp.call::<Vec<i128>>("identity", (&numbers,)).unwrap(), &numbers);
            prop_assert_eq!(&lisp.call::<Vec<u8>>("identity", (&octets,)).unwrap(), &octets);
            prop_assert_eq!(&lisp.call::<Vec<(u64, Option<char>, Vec<String>)>>("identity", (&nested,)).unwrap(), &nested);
            prop_assert_eq!(lisp.call::<f64>("identity", (float,)).unwrap(), float);
            prop_assert_eq!(&lisp.call::<std::collections::BTreeMap<String, (bool, i8)>>("identity", (&map,)).unwrap(), &map);
            // And once more through handles.
            prop_assert_eq!(&lisp.value(&nested).unwrap().to::<Vec<(u64, Option<char>, Vec<String>)>>().unwrap(), &nested);
        }
    }
}

#[test]
fn what_has_no_f64_of_its_own_is_the_nearest_one() {
    let lisp = lisp();
    let numbers: Vec<Value> = lisp
        .eval(
            "(let ((*random-state* (sb-ext:seed-random-state 1)))
               (flet ((any (bits) (- (random (ash 1 bits)) (ash 1 (1- bits)))))
                 (append (list (/ (expt 10 400) (1+ (expt 10 399))) (1- (ash 1 1024)) (/ (1+ (ash 1 54)) 3))
                         (loop repeat 50 collect (any 200))
                         (loop repeat 50 collect (/ (any 80) (1+ (random (ash 1 80)))))
                         (loop repeat 50 collect (/ (any 62) (1+ (random (ash 1 62))))))))",
        )
        .unwrap();
    for number in &numbers[2..] {
        let nearest: f64 = lisp.call("coerce", (number, Symbol::new("COMMON-LISP", "DOUBLE-FLOAT"))).unwrap();
        assert_eq!(number.to::<f64>().unwrap().to_bits(), nearest.to_bits(), "{number}");
    }
    assert_eq!(numbers[0].to::<f64>().unwrap(), 10.0);
    // Near 0 fewer bits are left.
    for (code, nearest) in [("(expt 2 -1074)", 5e-324), ("(/ 3 (ash 1 1076))", 5e-324), ("(expt 10 -320)", 1e-320)] {
        assert_eq!(lisp.eval::<f64>(code).unwrap(), nearest, "{code}");
        assert_eq!(lisp.eval::<f64>(&format!("(- {code})")).unwrap(), -nearest, "{code}");
    }
    assert_eq!(lisp.eval::<f64>("(expt 10 -400)").unwrap(), 0.0);
    assert_eq!(lisp.eval::<f64>("(expt 2 1023)").unwrap(), 2_f64.powi(1023));
    for beyond in [&numbers[1], &lisp.eval("(expt 10 400)").unwrap()] {
        assert!(matches!(beyond.to::<f64>(), Err(Error::Conversion(_))), "{beyond}");
    }
    assert_eq!(lisp.eval::<Complex>("1/2").unwrap(), Complex { re: 0.5, im: 0.0 });
    assert_eq!(lisp.eval::<Complex>("(expt 10 30)").unwrap(), Complex { re: 1e30, im: 0.0 });
}

#[test]
fn what_no_string_of_rusts_can_hold_is_an_error_or_replaced_where_people_read_it() {
    let lisp = lisp();
    let surrogate = "(string (code-char #xd800))";
    let character: Value = lisp.eval("(code-char #xd800)").unwrap();
    assert_eq!(lisp.call::<i64>("char-code", (&character,)).unwrap(), 0xd800);
    for failed in [
        lisp.eval::<String>(surrogate).map(drop),
        lisp.eval::<sbcl::Serde<String>>(surrogate).map(drop),
        lisp.eval::<Symbol>(&format!("(make-symbol {surrogate})")).map(drop),
    ] {
        assert!(matches!(failed, Err(Error::Conversion(_))), "{failed:?}");
    }
    assert_eq!(lisp.eval::<Value>(surrogate).unwrap().to_string(), "\"\u{fffd}\"");
    let condition = condition(lisp.eval::<()>(&format!("(error \"bad ~a\" {surrogate})")).unwrap_err());
    assert_eq!(condition.message(), "bad \u{fffd}");
}

#[test]
fn a_keyword_is_the_one_that_lisp_reads() {
    for name in ["rate", "straße", "élan", "ǰ", "ς"] {
        assert_eq!(lisp().eval::<Symbol>(&format!(":{name}")).unwrap(), keyword(name));
    }
}

#[test]
fn a_pair_may_end_in_nil() {
    let pairs = "'((\"a\" . 1) (\"b\" . nil))";
    let map: BTreeMap<String, Option<i64>> = lisp().eval(pairs).unwrap();
    assert_eq!(map, BTreeMap::from([("a".to_owned(), Some(1)), ("b".to_owned(), None)]));
    assert_eq!(lisp().eval::<Vec<(String, bool)>>(pairs).unwrap(), [("a".to_owned(), true), ("b".to_owned(), false)]);
    assert!(matches!(lisp().eval::<Vec<(i64, i64)>>("'((1))"), Err(Error::Conversion(_))));
}

#[test]
fn a_list_without_end_is_an_error_wherever_it_is_looked_through() {
    let lisp = lisp();
    for code in ["(let ((l (list :a 1 :b))) (setf (cdddr l) l))", "(let ((l (list (cons 1 2)))) (setf (cdr l) l))"] {
        let list: Value = lisp.eval(code).unwrap();
        assert!(condition(list.len().unwrap_err()).is("type-error"), "{code}");
        assert!(list.get::<Value>(keyword("other")).is_err(), "{code}");
        assert!(list.to::<Vec<Value>>().is_err(), "{code}");
    }
    assert!(condition(lisp.value(5).unwrap().len().unwrap_err()).is("type-error"));
}

#[test]
fn an_object_is_printed_as_far_as_the_limit_lets_it() {
    let numbers: Vec<i64> = (0..100).collect();
    let text = format!("({})", numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(" "));
    assert_eq!(lisp().value(&numbers).unwrap().to_string(), text);
    let nested: Value = lisp().eval("(let ((x nil)) (dotimes (i 50 x) (setf x (list x))))").unwrap();
    assert_eq!(nested.to_string(), format!("{}NIL{}", "(".repeat(50), ")".repeat(50)));
    let circular: Value = lisp().eval("(let ((x (list 1))) (setf (car x) x))").unwrap();
    assert_eq!(circular.print(30).unwrap(), format!("{}…", "(".repeat(30)));
}

#[test]
fn a_handler_that_fails_in_lisp_is_not_asked_about_that() {
    let lisp = lisp();
    let (plain, asked) = (lisp.clone(), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    let careful = lisp.with_handler(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let inner = plain.eval::<i64>("(car 7)").unwrap_err();
        Some(Restart::invoke("use-value", inner.condition().is_some_and(|inner| inner.is("type-error"))))
    });
    assert!(careful.eval::<bool>("(restart-case (/ 1 0) (use-value (v) v))").unwrap());
    assert_eq!(asked.load(Ordering::SeqCst), 1);

    // Another one is asked about calls of its own.
    let inner = lisp.with_handler(|_| Some(Restart::invoke("use-value", 1)));
    let outer = lisp.with_handler(move |_| {
        let value = inner.eval::<i64>("(restart-case (car 7) (use-value (v) (1+ v)))");
        Some(Restart::invoke("use-value", value.unwrap()))
    });
    assert_eq!(outer.eval::<i64>("(restart-case (/ 1 0) (use-value (v) (1+ v)))").unwrap(), 3);

    // And by the handle that it is a handler of, not for ever.
    let itself: Arc<Mutex<Option<Lisp>>> = Arc::default();
    let handle = itself.clone();
    let circular = lisp.with_handler(move |_| {
        let handle = handle.lock().unwrap().clone().unwrap();
        assert!(handle.eval::<i64>("(car 7)").unwrap_err().condition().is_some());
        None
    });
    *itself.lock().unwrap() = Some(circular.clone());
    assert!(condition(circular.eval::<i64>("(/ 1 0)").unwrap_err()).is("division-by-zero"));
    itself.lock().unwrap().take();
}

#[test]
fn what_cannot_be_defined_leaves_what_was_there() {
    let lisp = lisp();
    lisp.define("host:kept", "As it was.", |n: i64| n + 1).unwrap();
    for (lambda_list, why) in [("n &key &key", "lambda list"), ("(", "end of file"), ("n m", "2 parameters")] {
        let failed = lisp.define_as("host:kept", lambda_list, "Wrong.", |n: i64| -n).unwrap_err();
        assert!(condition(failed).message().contains(why), "{lambda_list}");
        assert_eq!(lisp.eval::<i64>("(host:kept 1)").unwrap(), 2);
    }
    assert!(lisp.define("cl:car", "Locked.", || 1).is_err());
    lisp.define_as("host:kept", "n &optional (m 2 m-p) &aux (k (if m-p 1 0))", "Two.", |n: i64, m: i64| n + m).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:kept 1)").unwrap(), 3);
}

#[test]
fn functions_whose_names_differ_in_case_are_two() {
    let lisp = lisp();
    for (name, value) in [("host:|odd|", "lower"), ("host:|ODD|", "upper"), ("|Mixed|:|Odd|", "mixed")] {
        lisp.define(name, "Its case.", move || value).unwrap();
    }
    for (name, value) in [("host:|odd|", "lower"), ("host:odd", "upper"), ("|Mixed|:|Odd|", "mixed")] {
        assert_eq!(lisp.call::<String>(name, ()).unwrap(), value);
        assert_eq!(lisp.eval::<String>(&format!("({name})")).unwrap(), value);
    }
}

#[test]
fn a_file_is_loaded_from_where_the_program_is() {
    // No path at all.
    assert!(matches!(lisp().load_file(""), Err(Error::Io(_))));
    let name = std::os::unix::ffi::OsStrExt::from_bytes(&b"no-utf-8-\xff.lisp"[..]);
    assert!(matches!(lisp().load_file(std::ffi::OsStr::to_os_string(name)), Err(Error::Io(_))));
}

#[test]
fn a_function_is_read_of_nothing_else() {
    let lisp = lisp();
    for code in ["\"text\"", "(list 1 2)", "(make-hash-table)", "5", "nil"] {
        let failed = lisp.eval::<Function>(code).unwrap_err();
        assert!(matches!(&failed, Error::Conversion(error) if error.expected.contains("function")), "{failed:?}");
    }
    assert_eq!(lisp.eval::<Function>("'car").unwrap().call::<i64>((vec![1, 2],)).unwrap(), 1);
    let put: Function = lisp.eval("'(setf gethash)").unwrap();
    let table: Value = lisp.eval("(make-hash-table)").unwrap();
    put.call::<()>((1, 2, &table)).unwrap();
    assert_eq!(table.get::<i64>(2).unwrap(), Some(1));
}
