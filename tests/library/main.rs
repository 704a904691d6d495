//! The embedding API; all tests of this program share one image.

#[cfg(feature = "mcp")]
mod agent;
mod callbacks;
mod conversions;
mod identity;

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
fn second_lisp_boot_fails_with_already_booted() {
    let lisp = lisp();
    let again = Lisp::boot();
    assert!(matches!(again, Err(Error::Boot(BootError::AlreadyBooted))), "{again:?}");
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

    // `Error` converts to a boxed standard error.
    fn ordinary(lisp: &Lisp) -> Result<i64, Box<dyn std::error::Error + Send + Sync>> {
        Ok(lisp.eval("(error \"on purpose: ~a\" 7)")?)
    }
    assert_eq!(ordinary(&lisp).unwrap_err().to_string(), "simple-error: on purpose: 7");
}

#[test]
fn function_handle_calls_the_redefined_function() {
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
fn redefinition_during_concurrent_calls_loses_no_call() {
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
                    // Each function is the version from the start of the call, or a newer one.
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
fn load_file_stops_at_the_first_error_and_keeps_earlier_definitions() {
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
    // The forms before the error were evaluated, those after it were not.
    assert_eq!(lisp.call::<i64>("of-file::λ", ()).unwrap(), 1);
    assert!(lisp.function("of-file::no").is_err());
    assert_eq!(lisp.eval::<String>("(package-name *package*)").unwrap(), "COMMON-LISP-USER");
    assert!(condition(lisp.load_file(&file).unwrap_err()).is("file-error"));
}

#[test]
fn value_handles_keep_objects_alive_until_dropped() {
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
    // One call returns a handle and a converted value.
    let (object, numbers): (Value, Vec<i64>) = lisp.eval("(values (list 1) (list 2 3))").unwrap();
    assert_eq!((object.to_string(), numbers), ("(1)".to_owned(), vec![2, 3]));

    let weak: Value = lisp.eval("(defparameter *kept* (list 1)) (sb-ext:make-weak-pointer *kept*)").unwrap();
    let kept: Value = lisp.eval("(prog1 *kept* (setf *kept* nil))").unwrap();
    lisp.eval::<()>("(sb-ext:gc :full t)").unwrap();
    let alive = |weak: &Value| !lisp.call::<Value>("sb-ext:weak-pointer-value", (weak,)).unwrap().is_nil();
    assert!(alive(&weak));
    drop(kept);
    // Stale words on a control stack count as references, so other calls must overwrite them, on every thread.
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
fn handles_dropped_inside_enter_are_released_inside_enter() {
    let kept: usize = lisp()
        .enter(|cx| {
            for _ in 0..50 {
                drop(cx.eval::<Vec<Value>>("(loop repeat 10000 collect (list :dropped))")?);
            }
            cx.eval("(count '(:dropped) sbcl-host/embedding::**handle-table** :test #'equal)")
        })
        .unwrap();
    // Another thread may be releasing the last handles.
    assert!(kept <= 100_000, "{kept} of 500000 objects were kept");
}

#[test]
fn lisp_prints_while_rust_holds_the_locks_of_the_standard_streams() {
    let lisp = lisp().with_timeout(Duration::from_secs(20));
    let (_stdout, _stderr) = (std::io::stdout().lock(), std::io::stderr().lock());
    lisp.eval::<()>("(terpri) (finish-output) (terpri *error-output*) (finish-output *error-output*)").unwrap();
}

#[test]
fn enter_runs_closures_on_a_lisp_thread_and_nests() {
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
    // A closure may borrow, and its panic continues in the caller.
    let text = String::from("borrowed");
    assert_eq!(lisp.enter(|cx| cx.call::<usize>("length", (&text,))).unwrap(), 8);
    let panic = std::panic::catch_unwind(|| lisp.enter::<()>(|_| panic!("on purpose")));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn function_keeps_the_timeout_and_bindings_of_its_lisp_handle() {
    let lisp = lisp();
    lisp.load_str("(defun runs-for-ever () (loop))").unwrap();
    // The limit leaves time for the look-up on a busy machine.
    let limited = lisp.with_timeout(Duration::from_secs(1)).function("runs-for-ever").unwrap();
    assert!(matches!(limited.call::<()>(()), Err(Error::Timeout { .. })));
    // The limit also holds for a call from a Lisp thread.
    let inside = lisp.enter(|_| Ok(matches!(limited.clone().call::<()>(()), Err(Error::Timeout { .. }))));
    assert!(inside.unwrap());
    let sixteen = lisp.with_bindings(&[("*print-base*", lisp.value(16).unwrap())]).unwrap();
    assert_eq!(sixteen.function("princ-to-string").unwrap().call::<String>((255,)).unwrap(), "FF");
    assert_eq!(lisp.function("princ-to-string").unwrap().call::<String>((255,)).unwrap(), "255");
}

#[test]
fn local_function_can_be_called_only_on_its_own_thread() {
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
            // A call from another Lisp thread is refused.
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
fn with_timeout_handler_package_and_bindings_derive_handles() {
    let lisp = lisp();
    let start = Instant::now();
    let late = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop)");
    assert!(matches!(late, Err(Error::Timeout { limit }) if limit == Duration::from_millis(100)), "{late:?}");
    let late = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop (ignore-errors (sleep 1)))");
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert!(start.elapsed() < Duration::from_secs(20));

    let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("USE-VALUE", 0)));
    assert_eq!(careful.eval::<i64>("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))").unwrap(), 1);
    // The handler is called once, before anything is unwound.
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
    // The handler is not called for errors that Lisp code handles.
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
    // The binding has the variable's name: a later symbol of this name counts.
    lisp.load_str("(unintern '*level*)").unwrap();
    lisp.load_str("(defvar *level* 1)").unwrap();
    assert_eq!(bound.eval::<i64>("*level*").unwrap(), 5);
    // The symbol of this variable has no home package.
    lisp.load_str(
        "(defpackage :former-home (:use :cl) (:export \"*MOVED*\")) (defvar former-home:*moved* 1)
         (import 'former-home:*moved* :cl-user) (unintern 'former-home:*moved* :former-home)",
    )
    .unwrap();
    let moved = lisp.with_bindings(&[("*moved*", lisp.value(5).unwrap())]).unwrap();
    assert_eq!(moved.eval::<i64>("*moved*").unwrap(), 5);
    assert_eq!(lisp.eval::<i64>("*moved*").unwrap(), 1);
    // Both options together, and on a Lisp thread.
    let both = bound.with_timeout(Duration::from_secs(1));
    assert_eq!(lisp.enter(|_| both.eval::<i64>("(1+ *level*)")).unwrap(), 6);
    let late = lisp.enter(|_| both.eval::<()>("(loop)"));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn interrupt_handle_interrupts_a_call_from_another_thread() {
    let lisp = lisp().separate();
    let stop = lisp.interrupt_handle();
    let (began, receiver) = mpsc::channel();
    lisp.define("host:began", "Tell that it has begun.", move || began.send(()).unwrap()).unwrap();
    let caller = {
        let lisp = lisp.clone();
        std::thread::spawn(move || lisp.eval::<()>("(host:began) (loop)"))
    };
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    stop.interrupt();
    assert!(matches!(caller.join().unwrap(), Err(Error::Interrupted)));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn interrupt_waits_for_a_blocking_host_function_to_return() {
    let lisp = lisp();
    let (began, receiver) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    let returned = Arc::new(AtomicBool::new(false));
    let is_returned = returned.clone();
    lisp.define("host:block", "Wait until the test continues.", move || {
        began.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        is_returned.store(true, Ordering::SeqCst);
    })
    .unwrap();
    let separate = lisp.separate();
    let stop = separate.interrupt_handle();
    let caller = std::thread::spawn(move || separate.eval::<()>("(host:block) (loop)"));
    receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    stop.interrupt();
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
    assert!(!caller.is_finished());
    finish.send(()).unwrap();
    assert!(matches!(caller.join().unwrap(), Err(Error::Interrupted)));
    assert!(returned.load(Ordering::SeqCst));
}

#[test]
fn abort_and_abort_thread_end_only_the_call_with_error_aborted() {
    let lisp = lisp();
    assert!(matches!(lisp.eval::<()>("(abort)"), Err(Error::Aborted)));
    assert!(matches!(lisp.eval::<()>("(sb-thread:abort-thread)"), Err(Error::Aborted)));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn exit_signals_an_error_and_the_program_continues() {
    let lisp = lisp();
    for code in ["(sb-ext:exit)", "(sb-ext:exit :code 3 :abort t)", "(sb-ext:quit)", "(unwind-protect (sb-ext:exit) 1)"]
    {
        let error = lisp.eval::<()>(code).unwrap_err();
        let operator = if code.contains("quit") { "QUIT" } else { "EXIT" };
        assert_eq!(
            error.to_string(),
            format!(
                "sbcl-host::exit-refused: {operator} was called, but the program that this image is part of continues."
            ),
            "{code}"
        );
        assert!(condition(error).is("error"));
    }
    // The same for EXIT called as a function, and on another Lisp thread.
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

#[test]
fn save_lisp_and_die_is_refused_and_the_program_continues() {
    let lisp = lisp();
    let path = std::env::temp_dir().join(format!("sbcl-refused-{}.core", std::process::id()));
    let refused = lisp.call::<()>("sb-ext:save-lisp-and-die", (path.to_str().unwrap(),)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "simple-error: SAVE-LISP-AND-DIE was called, but the program that this image is part of continues. To save the \
         image, use Lisp::save in Rust."
    );
    assert!(!path.exists());
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[cfg(feature = "mcp")]
#[test]
fn mcp_spawn_serves_multiple_clients_on_the_program_image() {
    use agent::Agent;

    let lisp = lisp();
    lisp.load_str("(defvar *of-program* 12) (defun answer () 41)").unwrap();
    let (mut one, served_one, instructions) = Agent::join_with_instructions(&lisp);
    let (mut other, served_other) = Agent::join(&lisp);
    let tools = one.tools();
    assert!(tools.iter().any(|tool| tool == "evaluate-lisp"), "{tools:?}");
    assert!(!tools.iter().any(|tool| tool == "reset-session" || tool == "checkpoint"), "{tools:?}");
    for other in ["reset-session", "checkpoint", "IMAGE-LOST"] {
        assert!(!instructions.contains(other), "{instructions}");
    }
    assert!(instructions.contains("part of a running program"), "{instructions}");

    // The program may change the clients' tools at run time.
    let all = tools.len();
    let wrong = sbcl::mcp::set_tools("evaluate-lips").unwrap_err();
    assert!(wrong.contains("Did you mean evaluate-lisp"), "{wrong}");
    sbcl::mcp::set_tools("describe-symbol,reset-session").unwrap();
    for agent in [&mut one, &mut other] {
        assert_eq!(agent.next().expect("a message")["method"], "notifications/tools/list_changed");
        assert_eq!(agent.tools(), ["describe-symbol"]);
        agent.post("tools/call", &serde_json::json!({"name": "evaluate-lisp", "arguments": {"code": "1"}}));
        let refused = agent.answer()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(refused.ends_with("Tools: describe-symbol."), "{refused}");
    }
    sbcl::mcp::set_tools("all").unwrap();
    for agent in [&mut one, &mut other] {
        assert_eq!(agent.next().expect("a message")["method"], "notifications/tools/list_changed");
        assert_eq!(agent.tools().len(), all);
    }

    // Both clients share the program's image, and the program sees their definitions.
    assert!(one.evaluate("(list *of-program* (answer))").contains("(12 41)"));
    one.evaluate("(defun answer () 42)");
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
    assert!(other.evaluate("(answer)").contains("42"));
    // Notices do not mention tools that clients of a program lack.
    let fault = one.evaluate("(sb-sys:sap-ref-8 (sb-sys:int-sap 8) 0)");
    assert!(fault.contains("may be damaged") && !fault.contains("reset-session"), "{fault}");
    let running = one.evaluate(
        "(defvar *gate* (sb-thread:make-semaphore))
         (defvar *stays* (sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore *gate*))))",
    );
    assert!(running.contains("Still running") && !running.contains("reset-session"), "{running}");
    one.evaluate("(sb-thread:signal-semaphore *gate*) (sb-thread:join-thread *stays*)");
    // Each client has its own package and errors.
    one.evaluate("(defpackage :agents (:use :cl)) (in-package :agents)");
    assert!(one.evaluate("(package-name *package*)").contains("AGENTS"));
    assert!(other.evaluate("(package-name *package*)").contains("COMMON-LISP-USER"));
    assert!(one.evaluate("(error \"of one\")").contains("of one"));
    assert!(!other.call("describe-last-error", serde_json::json!({})).contains("of one"));
    // The program can call Lisp while a client's evaluation waits.
    let (began, receiver) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    lisp.define("host:agent-waits", "Wait until the test continues.", move || {
        began.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(Duration::from_secs(60)).is_ok()
    })
    .unwrap();
    one.post("tools/call", &serde_json::json!({"name": "evaluate-lisp", "arguments": {"code": "(host:agent-waits)"}}));
    receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
    finish.send(()).unwrap();
    assert!(one.answer()["result"]["content"][0]["text"].as_str().unwrap().contains('T'));

    // One client disconnects. The other one is served until the program stops it.
    assert!(!served_one.is_over());
    drop(one);
    served_one.wait().unwrap();
    assert!(other.evaluate("(+ 1 2)").contains('3'));
    let endless = serde_json::json!({"name": "evaluate-lisp", "arguments": {"code": "(host:agent-waits) (loop)"}});
    other.post("tools/call", &endless);
    // The server must have read the request: closing a stream with unread input would reset the connection.
    receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    finish.send(()).unwrap();
    served_other.stop().unwrap();
    while other.next().is_some() {}
    // Stopping ended the client's evaluation, and a new client may connect.
    let (mut third, served) = Agent::join(&lisp);
    assert!(third.evaluate("(answer)").contains("42"));
    served.stop().unwrap();
    assert_eq!(lisp.call::<i64>("answer", ()).unwrap(), 42);
}

#[test]
fn session_shares_the_image_with_the_lisp_handle() {
    let lisp = lisp();
    lisp.load_str("(defparameter *shared* 12)").unwrap();
    let outcome = lisp.session().evaluate(sbcl::Evaluation::new("*shared*"));
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "12");
    lisp.define("host:twice", "Double.", |n: i64| 2 * n).unwrap();
    let outcome = lisp.session().evaluate(sbcl::Evaluation::new("(host:twice *shared*)"));
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "24");
}

#[test]
fn async_calls_run_under_tokio_and_smol_and_end_when_dropped() {
    let lisp = lisp();
    let tokio = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    assert_eq!(tokio.block_on(lisp.eval_async::<i64>("(progn (sleep 0.05) 7)")).unwrap(), 7);
    assert_eq!(tokio.block_on(lisp.call_async::<i64>("+", (1, 2))).unwrap(), 3);
    assert_eq!(smol::block_on(lisp.eval_async::<i64>("(+ 1 2)")).unwrap(), 3);
    assert!(smol::block_on(lisp.eval_async::<i64>("(/ 1 0)")).is_err());
    let limited = lisp.with_timeout(Duration::from_millis(50));
    assert!(matches!(smol::block_on(limited.eval_async::<()>("(loop)")), Err(Error::Timeout { .. })));
    // Dropping a call ends it, whether it runs or waits in the queue.
    let late = tokio
        .block_on(async { tokio::time::timeout(Duration::from_millis(50), lisp.eval_async::<()>("(loop)")).await });
    assert!(late.is_err());
    drop(lisp.eval_async::<()>("(loop)"));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[test]
fn handler_is_not_called_for_errors_of_its_own_lisp_calls() {
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

    // A handler is called for errors of its own handle, also within another handler.
    let inner = lisp.with_handler(|_| Some(Restart::invoke("use-value", 1)));
    let outer = lisp.with_handler(move |_| {
        let value = inner.eval::<i64>("(restart-case (car 7) (use-value (v) (1+ v)))");
        Some(Restart::invoke("use-value", value.unwrap()))
    });
    assert_eq!(outer.eval::<i64>("(restart-case (/ 1 0) (use-value (v) (1+ v)))").unwrap(), 3);

    // A handler that calls Lisp through its own handle does not recurse.
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
fn restart_that_returns_to_the_handlers_call_leaves_the_error_unhandled() {
    let lisp = lisp();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let careful = lisp.with_handler(move |condition: &Condition| {
        count.fetch_add(1, Ordering::SeqCst);
        condition.is("simple-error").then(|| Restart::named("note"))
    });
    for value in ["1", "(make-condition 'simple-error :format-control \"returned\")", "nil"] {
        let code = format!("(restart-bind ((note (lambda () {value}))) (error \"signalled\"))");
        assert_eq!(condition(careful.eval::<()>(&code).unwrap_err()).message(), "signalled");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 3);
}

#[test]
fn call_within_a_call_of_another_handle_has_the_package_and_handler_of_its_own_handle() {
    let lisp = lisp();
    lisp.load_str("(defpackage :nesting (:use :cl))").unwrap();
    let inner = lisp.with_package("nesting");
    let limited = lisp.with_timeout(Duration::from_secs(60));
    let (user, nesting) = (Symbol::new("COMMON-LISP-USER", "NESTED"), Symbol::new("NESTING", "NESTED"));
    inner
        .enter(|cx| {
            for other in [&lisp, &limited, &lisp.separate()] {
                assert_eq!(other.eval::<Symbol>("'nested")?, user);
                assert_eq!(other.enter(|cx| cx.eval::<Symbol>("'nested"))?, user);
                assert_eq!(other.enter(|_| inner.eval::<Symbol>("'nested"))?, nesting);
            }
            assert_eq!(cx.eval::<Symbol>("'nested")?, nesting);
            Ok(())
        })
        .unwrap();

    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let careful = lisp.with_handler(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Some(Restart::invoke("use-value", 1))
    });
    let code = "(restart-case (/ 1 0) (use-value (v) v))";
    careful
        .enter(|cx| {
            for other in [&lisp, &inner, &limited] {
                assert!(other.eval::<i64>(code).is_err());
                assert_eq!(other.enter(|_| careful.eval::<i64>(code))?, 1);
            }
            assert_eq!(asked.load(Ordering::SeqCst), 3);
            assert_eq!((cx.eval::<i64>(code)?, careful.eval::<i64>(code)?), (1, 1));
            Ok(())
        })
        .unwrap();
}

#[test]
fn failed_define_keeps_the_previous_host_function() {
    let lisp = lisp();
    lisp.define("host:kept", "As it was.", |n: i64| n + 1).unwrap();
    for (lambda_list, why) in [
        ("n &key &key", "lambda list"),
        ("(", "is not closed"),
        ("n|", "is not closed"),
        ("n m", "2 parameters"),
        ("n)", "unmatched close parenthesis"),
        ("(n) m", "more text follows"),
        ("n . m", "lambda list"),
        ("1", "lambda list"),
        ("#1=(n . #1#)", "contains itself"),
        ("(n . #1=(m . #1#))", "contains itself"),
        ("&optional (n '#1=(m . #1#))", "contains itself"),
    ] {
        let failed = lisp.define_as("host:kept", lambda_list, "Wrong.", |n: i64| -n).unwrap_err();
        let message = condition(failed).message().to_owned();
        assert!(message.contains(why) && message.contains("host:kept"), "{lambda_list}: {message}");
        assert_eq!(lisp.eval::<i64>("(host:kept 1)").unwrap(), 2);
    }
    assert!(lisp.define("cl:car", "Locked.", || 1).is_err());
    lisp.define_as("host:kept", "n &optional (m 2 m-p) &aux (k (if m-p 1 0))", "Two.", |n: i64, m: i64| n + m).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:kept 1)").unwrap(), 3);
}

#[test]
fn define_works_after_a_definition_of_the_same_name_has_failed() {
    let lisp = lisp();
    for lambda_list in ["n m", "n &key &key", "n (m"] {
        lisp.define_as("failed-first:f", lambda_list, "Wrong.", |n: i64| n).unwrap_err();
        assert!(!lisp.eval::<bool>("(fboundp (find-symbol \"F\" \"FAILED-FIRST\"))").unwrap());
    }
    lisp.define_as("failed-first:f", "n", "Right.", |n: i64| n).unwrap();
    assert_eq!(lisp.eval::<i64>("(failed-first:f 4)").unwrap(), 4);
}

#[test]
fn host_functions_whose_names_differ_in_case_are_distinct() {
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
fn define_refuses_text_that_is_not_a_function_name() {
    let lisp = lisp();
    let not_symbols = ["", " ", "a)", "(a", "a b", "'a", "host:", ":", "host:::a", "host:a:b", "#:a"];
    for name in not_symbols.into_iter().chain(["(setf)", "(setf a b)", "(setf host:a))", "(cas host:a)"]) {
        let message = condition(lisp.define(name, "Wrong.", || 1).unwrap_err()).message().to_owned();
        assert!(message.contains("does not spell a symbol: write NAME or PACKAGE:NAME"), "{name:?}: {message}");
    }
    for (name, why) in [
        ("host:|a", "host:|a does not spell a symbol: a vertical bar in it is not closed."),
        ("a|b", "a|b does not spell a symbol: a vertical bar in it is not closed."),
        (r"host:a\", r"host:a\ does not spell a symbol: no character follows the backslash at its end."),
        (r"(setf host:a\)", r"host:a\ does not spell a symbol: no character follows the backslash at its end."),
    ] {
        let message = condition(lisp.define(name, "Wrong.", || 1).unwrap_err()).message().to_owned();
        assert!(message.starts_with(why), "{name:?}: {message}");
        assert!(condition(lisp.call::<i64>(name, ()).unwrap_err()).message().starts_with(why), "{name:?}");
    }
    assert!(!lisp.eval::<bool>(r#"(or (find-package "(SETF HOST") (find-package "(CAS HOST"))"#).unwrap());
}

#[test]
fn define_accepts_setf_functions_keywords_and_new_packages() {
    let lisp = lisp();
    let level = Arc::new(AtomicUsize::new(0));
    let (set, get) = (level.clone(), level);
    let set = move |new: usize, extra: Option<usize>| {
        set.store(new + extra.unwrap_or(0), Ordering::SeqCst);
        new
    };
    lisp.define("(setf levels:level)", "Set the level.", set).unwrap();
    lisp.define(" levels:level ", "Return the level.", move |_: Option<usize>| get.load(Ordering::SeqCst)).unwrap();
    assert_eq!(lisp.eval::<(i64, i64)>("(values (setf (levels:level) 3) (levels:level))").unwrap(), (3, 3));
    assert_eq!(lisp.eval::<i64>("(incf (levels:level 10) 4)").unwrap(), 7);
    assert_eq!(lisp.call::<i64>("levels:level", ()).unwrap(), 17);
    assert_eq!(lisp.call::<i64>("(setf levels:level)", (5,)).unwrap(), 5);
    assert_eq!(lisp.eval::<String>("(documentation '(setf levels:level) 'function)").unwrap(), "Set the level.");
    // A redefinition takes effect, and does not change the function without SETF.
    lisp.define("(SETF levels::level)", "Set nothing.", |new: usize| new).unwrap();
    assert_eq!(lisp.eval::<(i64, i64)>("(values (setf (levels:level) 9) (levels:level))").unwrap(), (9, 5));

    lisp.define(":level", "Return it.", |n: i64| n).unwrap();
    assert_eq!(lisp.eval::<i64>("(:level 8)").unwrap(), 8);
}

#[test]
fn load_file_of_an_empty_or_invalid_path_is_an_io_error() {
    // The empty path.
    assert!(matches!(lisp().load_file(""), Err(Error::Io(_))));
    assert!(matches!(lisp().load_file("Cargo.toml\0.lisp"), Err(Error::Io(_))));
    let name = std::os::unix::ffi::OsStrExt::from_bytes(&b"no-utf-8-\xff.lisp"[..]);
    assert!(matches!(lisp().load_file(std::ffi::OsStr::to_os_string(name)), Err(Error::Io(_))));
}

#[test]
fn converting_a_non_function_to_function_is_a_conversion_error() {
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
