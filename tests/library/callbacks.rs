//! Host functions, and non-local exits and errors that unwind through them.

use super::*;

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
    // A Lisp condition that the function returns as its error is signalled unchanged.
    let inner = lisp.clone();
    lisp.define("host:divide", "Divide.", move |a: i64, b: i64| inner.call::<i64>("/", (a, b))).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:divide 6 3)").unwrap(), 2);
    assert_eq!(
        lisp.eval::<Symbol>("(handler-case (host:divide 6 0) (division-by-zero () :caught))").unwrap(),
        keyword("caught")
    );
    // A redefinition takes effect.
    lisp.define("host:add", "Return the difference.", |a: i64, b: i64| a - b).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:add 1 2)").unwrap(), -1);
    // Host functions can be called on a thread that Lisp created.
    assert_eq!(
        lisp.eval::<i64>("(sb-thread:join-thread (sb-thread:make-thread (lambda () (host:add 5 2))))").unwrap(),
        3
    );
}

#[test]
fn define_as_gives_a_rust_function_its_lambda_list() {
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
    // Without an explicit lambda list, `Option` parameters are optional.
    lisp.define("host:sum", "Add up.", |a: i64, b: Option<i64>| a + b.unwrap_or(10)).unwrap();
    assert_eq!(lisp.eval::<(i64, i64)>("(values (host:sum 1) (host:sum 1 2))").unwrap(), (11, 3));
    assert!(described("host:sum").contains("Lambda-list: (ARGUMENT-1 &OPTIONAL ARGUMENT-2)"));
}

#[test]
fn eval_as_result_t_value_returns_other_types_as_err() {
    let lisp = lisp();
    type Found<T> = Result<T, Value>;
    let found: Vec<Found<i64>> = lisp.eval(r#"(list 1 :no -3 "x" (list 4))"#).unwrap();
    let text = |found: &Found<i64>| match found {
        Ok(number) => number.to_string(),
        Err(other) => format!("no: {other}"),
    };
    assert_eq!(found.iter().map(text).collect::<Vec<_>>(), ["1", "no: :NO", "-3", "no: \"x\"", "no: (4)"]);
    assert_eq!(lisp.eval::<Found<Vec<u8>>>("(list 1 2)").unwrap().ok(), Some(vec![1, 2]));
    // The `Err` value is the object itself, not a copy.
    lisp.eval::<()>("(defparameter *mixed* (list 1 :x))").unwrap();
    let other = lisp.eval::<Found<Vec<i64>>>("*mixed*").unwrap().unwrap_err();
    assert!(other.eql(&lisp.eval("*mixed*").unwrap()).unwrap());
    // Multiple values, one of them a condition.
    let (quotient, failure): (Found<i64>, Found<i64>) =
        lisp.eval("(values (/ 6 2) (handler-case (/ 1 0) (error (condition) condition)))").unwrap();
    assert_eq!((quotient.ok(), failure.unwrap_err().type_of().unwrap().as_str()), (Some(3), "division-by-zero"));
    assert_eq!(lisp.eval::<Found<Option<i64>>>("nil").unwrap().ok(), Some(None));
}

/// An object whose reading starts a non-local exit in Lisp.
struct Throws;

impl sbcl::FromLisp for Throws {
    const SHAPE: sbcl::Shape = sbcl::Shape::OPAQUE;

    fn from_lisp(reader: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        reader.read::<Value>()?;
        assert!(matches!(lisp().eval::<()>("(throw 'away 7)"), Err(Error::Unwinding)));
        Ok(Self)
    }
}

#[test]
fn eval_as_result_t_value_or_function_fails_if_lisp_unwinds_while_values_are_read() {
    /// Evaluates `code`, which returns two values. Returns true if the evaluation fails with `Error::Unwinding` when a
    /// non-local exit starts before the second value is read as a `T`.
    fn is_unwinding<T: sbcl::FromLisp + 'static>(code: &'static str) -> bool {
        let is_unwinding = Arc::new(AtomicBool::new(false));
        let observed = is_unwinding.clone();
        let read = move || -> Result<(), Error> {
            lisp().enter(|cx| {
                let values = cx.eval::<(Throws, T)>(code);
                observed.store(matches!(values, Err(Error::Unwinding)), Ordering::SeqCst);
                values.map(|_| ())
            })
        };
        lisp().define("host:read-values", "Read two values.", read).unwrap();
        assert_eq!(lisp().eval::<i64>("(catch 'away (host:read-values) 0)").unwrap(), 7);
        is_unwinding.load(Ordering::SeqCst)
    }
    assert!(is_unwinding::<Result<i64, Value>>("(values 1 2)"));
    assert!(is_unwinding::<Result<Vec<i64>, Value>>("(values 1 (list 2))"));
    assert!(is_unwinding::<Function>("(values 1 #'car)"));
}

#[test]
#[allow(unsafe_code)]
fn borrow_bytes_lends_octets_without_copying() {
    let lisp = lisp();
    lisp.eval::<()>("(defvar *throws* nil)").unwrap();
    lisp.enter(|cx| {
        let borrow = |octets: &Value| {
            // SAFETY: each vector is fresh, and nothing writes to it.
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
        // Collections move other objects, but not a vector while it is borrowed.
        let large = octets("(coerce (loop for n below 5000 collect (mod n 251)) '(vector (unsigned-byte 8)))")?;
        // SAFETY: nothing writes to the vector; garbage collections do not either.
        let is_there = unsafe {
            cx.borrow_bytes(&large, |octets| {
                let is_intact = || octets.iter().zip(0..5000).all(|(&octet, n)| i32::from(octet) == n % 251);
                let all = (0..5).all(|_| {
                    cx.eval::<()>("(make-array 100000) (sb-ext:gc)").is_ok()
                        && cx.eval::<()>("(sb-ext:gc :full t)").is_ok()
                        && is_intact()
                });
                all && octets.len() == 5000
            })
        }?;
        assert!(is_there);
        // Nested borrows, a panic, and a non-local exit.
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

/// A value that counts drops.
struct DropCounter(Arc<AtomicUsize>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn closures_of_functions_whose_package_was_deleted_are_dropped() {
    const CYCLES: usize = 20;
    let lisp = lisp();
    let dropped = Arc::new(AtomicUsize::new(0));
    for _ in 0..CYCLES {
        for name in ["host-of-one-cycle:one", "(setf host-of-one-cycle:one)"] {
            let counter = DropCounter(dropped.clone());
            let one = move || {
                let _kept = &counter;
                1_i64
            };
            lisp.define(name, "Return 1.", one).unwrap();
        }
        assert_eq!(lisp.eval::<i64>("(host-of-one-cycle:one)").unwrap(), 1);
        lisp.eval::<()>("(delete-package :host-of-one-cycle)").unwrap();
    }
    // The stacks of threads may still refer to some of the functions.
    let end = Instant::now() + Duration::from_secs(60);
    while dropped.load(Ordering::SeqCst) < CYCLES {
        assert!(Instant::now() < end, "only {dropped:?} closures were dropped");
        lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
        lisp.define("host:after-cycles", "Return 1.", || 1_i64).unwrap();
    }
}

#[test]
fn replaced_function_that_lisp_still_has_calls_the_newest_definition() {
    let lisp = lisp();
    lisp.define("host:replaced", "Return 1.", || 1_i64).unwrap();
    let first: Function = lisp.eval("#'host:replaced").unwrap();
    assert_eq!(first.call::<i64>(()).unwrap(), 1);
    lisp.define("host:replaced", "Return 2.", || 2_i64).unwrap();
    // From here on, only the replaced function leads to the newest definition.
    lisp.eval::<()>("(fmakunbound 'host:replaced) (sb-ext:gc :full t)").unwrap();
    lisp.define("host:after-replaced", "Return 3.", || 3_i64).unwrap();
    assert_eq!(first.call::<i64>(()).unwrap(), 2);
}

#[test]
fn non_local_exit_through_rust_frames_runs_their_destructors() {
    let lisp = lisp();
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    lisp.define("host:through", "Call FUNCTION.", move |function: Function| -> Result<Value, Error> {
        let _dropped = DropCounter(count.clone());
        let value = function.call::<Value>(());
        if let Err(Error::Unwinding) = &value {
            // While Lisp unwinds, further calls fail.
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
    // Exits through a restart and to a TAGBODY tag.
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
    // An error arrives in the Rust function, which returns it. A signal reaches the handlers outside directly.
    assert_eq!(lisp.eval::<i64>("(handler-case (host:through (lambda () (error \"x\"))) (error () 6))").unwrap(), 6);
    assert_eq!(
        lisp.eval::<i64>("(let ((n 0)) (handler-bind ((condition (lambda (c) (declare (ignore c)) (incf n)))) (host:through (lambda () (signal 'condition)))) n)").unwrap(),
        1
    );
    // The thread is still usable.
    lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn stack_overflow_through_rust_frames_is_a_storage_condition() {
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
fn blocking_host_function_does_not_delay_garbage_collection() {
    let lisp = lisp();
    // Returns the median duration of 21 garbage collections, in microseconds.
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
    let (entered, receiver) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    lisp.define("host:wait", "Wait until the test continues.", move || {
        entered.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).is_ok()
    })
    .unwrap();
    // The host function blocks on a new Lisp thread; a pool thread requests the collections.
    let thread: Value = lisp.eval("(sb-thread:make-thread (lambda () (host:wait)))").unwrap();
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    let during = collect();
    assert!(during <= before + 50_000, "{during} µs while a host function waits, {before} before");
    // The host function was blocked all the time.
    finish.send(()).unwrap();
    assert!(lisp.call::<bool>("sb-thread:join-thread", (&thread,)).unwrap());
}

#[test]
fn any_number_of_values_can_be_thrown_past_a_rust_function() {
    let lisp = lisp();
    let inner = lisp.clone();
    lisp.define("host:throw-values", "Throw N values.", move |n: i64| {
        inner.eval::<i64>(&format!("(throw 'past-rust (values-list (loop for value below {n} collect value)))"))
    })
    .unwrap();
    for n in [0, 1, 2, 99, 100, 101, 1_000, 20_000] {
        let code = format!("(multiple-value-list (catch 'past-rust (host:throw-values {n})))");
        assert_eq!(lisp.eval::<Vec<i64>>(&code).unwrap(), (0..n).collect::<Vec<_>>());
    }
}
