//! Time limits and interruptions of library calls, and stack exhaustion. Each probe runs in a child process, because a
//! failure may end the process.

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, Cursor, Read, Write};
use std::panic::panic_any;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use sbcl::{
    Background, Builder, ConversionError, Error, Evaluation, FromLisp, Function, Lisp, Reader, Restart, Serde, Shape,
    Symbol, TimeLimit, Value, keyword,
};
use serde::de::IgnoredAny;

/// The environment variable that names the probe that a child runs.
const PROBE: &str = "SBCL_TEST_PROBE";
/// Longer than nine seconds: interruptions that are sent once a second and queue up end the process at the ninth.
const LONG: Duration = Duration::from_secs(12);
/// A time limit long enough that a call of compiled code has begun to run before it expires.
const LIMIT: Duration = Duration::from_millis(500);
/// The longest time that a call may take which should end at once. A save takes seconds of processor time, so beside other
/// tests it takes longer.
const SOON: Duration = Duration::from_secs(60);
/// The number of evaluations that may run in the background.
const MOST_IN_BACKGROUND: usize = 16;

fn builder() -> Builder {
    Lisp::builder().heap(1 << 30).control_stack(16 << 20)
}

fn boot() -> Lisp {
    builder().boot().expect("SBCL boots")
}

/// Starts the test `name` of this program in a child that runs `probe`.
fn start(name: &str, probe: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(PROBE, probe)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// Runs each probe in a child, all at once. In a child, runs the probe that it was started for.
fn run_probes(name: &str, probes: &[(&str, fn())]) {
    if let Ok(wanted) = std::env::var(PROBE) {
        let (_, probe) = probes.iter().find(|(probe, _)| *probe == wanted).expect("a probe of this test");
        return probe();
    }
    let children: Vec<_> = probes.iter().map(|(probe, _)| (probe, start(name, probe))).collect();
    let failed: Vec<_> = children
        .into_iter()
        .map(|(probe, child)| (probe, child.wait_with_output().expect("it ends")))
        .filter(|(_, output)| !output.status.success())
        .map(|(probe, output)| {
            let [out, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
            format!("{probe}: {}\n{out}\n{errors}", output.status)
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Runs `work` on another thread and returns its result. Panics when that takes longer than `SOON`.
fn soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    result.recv_timeout(SOON).expect("it ends in time")
}

fn is_timeout<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Timeout { .. }))
}

fn still_works(lisp: &Lisp) {
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

fn blocking_host_function() {
    let lisp = boot();
    lisp.define("host:pause", "Sleep.", || std::thread::sleep(LONG)).unwrap();
    let late = lisp.with_timeout(Duration::from_secs(1)).eval::<()>("(host:pause)");
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

fn blocking_closure_in_enter() {
    let lisp = boot();
    let late = lisp.with_timeout(Duration::from_secs(1)).enter(|cx| {
        std::thread::sleep(LONG);
        cx.eval::<()>("(loop)")
    });
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

fn code_with_interrupts_disabled() {
    let lisp = boot();
    let code = format!(
        "(let ((end (+ (get-internal-real-time) (* {} internal-time-units-per-second))))
           (sb-sys:without-interrupts (loop until (> (get-internal-real-time) end))) (loop))",
        LONG.as_secs()
    );
    let late = lisp.with_timeout(Duration::from_secs(1)).eval::<()>(&code);
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

fn dropped_future() {
    let lisp = boot();
    let (began, receiver) = mpsc::channel();
    let (returned, over) = mpsc::channel();
    lisp.define("host:pause", "Sleep.", move || {
        began.send(()).unwrap();
        std::thread::sleep(LONG);
        returned.send(()).unwrap();
    })
    .unwrap();
    let call = lisp.eval_async::<()>("(progn (host:pause) (loop))");
    receiver.recv_timeout(SOON).unwrap();
    drop(call);
    over.recv_timeout(LONG + SOON).unwrap();
    // Runs on the same thread, once that has ended the dropped call.
    still_works(&lisp);
}

fn nine_interrupts_at_once() {
    let lisp = boot();
    let (began, receiver) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let finished = Mutex::new(finished);
    lisp.define("host:wait", "Wait.", move || {
        began.send(()).unwrap();
        finished.lock().unwrap().recv_timeout(SOON).unwrap();
    })
    .unwrap();
    let separate = lisp.separate();
    let stop = separate.interrupt_handle();
    let caller = std::thread::spawn(move || separate.eval::<()>("(progn (host:wait) (loop))"));
    receiver.recv_timeout(SOON).unwrap();
    for _ in 0..9 {
        stop.interrupt();
        // The pause makes each interruption a separate one; simultaneous ones may be merged.
        std::thread::sleep(Duration::from_millis(5));
    }
    finish.send(()).unwrap();
    assert!(matches!(caller.join().unwrap(), Err(Error::Interrupted)));
    still_works(&lisp);
}

fn session_code_with_interrupts_disabled() {
    let lisp = boot();
    let code = format!(
        "(let ((end (+ (get-internal-real-time) (* {} internal-time-units-per-second))))
           (sb-sys:without-interrupts (loop until (> (get-internal-real-time) end))) (loop))",
        LONG.as_secs()
    );
    let timeout = TimeLimit::Of(Duration::from_secs(1));
    let outcome = lisp.session().evaluate(Evaluation { timeout, ..Evaluation::new(code) });
    assert_eq!(outcome.result.as_ref().unwrap_err().kind, "TIMEOUT");
    assert_eq!(lisp.session().evaluate(Evaluation::new("(+ 1 2)")).result.as_ref().unwrap()[0].text, "3");
}

/// A reset ends the session's threads, one of which has interrupts disabled here.
fn nine_resets_with_an_uninterruptible_thread() {
    let lisp = boot();
    let session = lisp.session();
    let code = "(defvar *thread*
               (sb-thread:make-thread (lambda () (sb-sys:without-interrupts (loop until (sb-posix:getenv \"STOP\"))))))";
    assert!(session.evaluate(Evaluation::new(code)).result.is_ok());
    let thread: Value = lisp.eval("*thread*").unwrap();
    for _ in 0..9 {
        let (reply, done) = mpsc::channel();
        session.reset(move |result| reply.send(result.is_ok()).unwrap());
        assert!(done.recv_timeout(SOON).unwrap());
    }
    let ended = "(lambda (thread) (sb-posix:setenv \"STOP\" \"1\" 1) (eq :ended (sb-thread:join-thread thread :default :ended)))";
    let ended: Function = lisp.eval(ended).unwrap();
    assert!(ended.call::<bool>((&thread,)).unwrap());
    still_works(&lisp);
}

fn sink_that_blocks() {
    struct Slow;
    impl Write for Slow {
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            std::thread::sleep(LONG);
            Ok(octets.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let lisp = builder().stdout(Slow).boot().unwrap();
    let late = lisp.with_timeout(Duration::from_secs(1)).eval::<()>("(progn (print 1) (finish-output) (loop))");
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

#[test]
fn undeliverable_interruptions_do_not_pile_up() {
    run_probes(
        "undeliverable_interruptions_do_not_pile_up",
        &[
            ("blocking_host_function", blocking_host_function),
            ("blocking_closure_in_enter", blocking_closure_in_enter),
            ("code_with_interrupts_disabled", code_with_interrupts_disabled),
            ("dropped_future", dropped_future),
            ("nine_interrupts_at_once", nine_interrupts_at_once),
            ("sink_that_blocks", sink_that_blocks),
            ("session_code_with_interrupts_disabled", session_code_with_interrupts_disabled),
            ("nine_resets_with_an_uninterruptible_thread", nine_resets_with_an_uninterruptible_thread),
        ],
    );
}

// ---- Closed descriptors

/// Closes all descriptors of this process but the standard ones, from Lisp.
fn close_descriptors(lisp: &Lisp) {
    lisp.eval::<()>("(require :sb-posix)").unwrap();
    lisp.eval::<()>("(loop for fd from 3 below 256 do (ignore-errors (sb-posix:close fd)))").unwrap();
}

#[test]
fn time_limits_and_interruptions_work_after_code_has_closed_all_descriptors() {
    fn closed_descriptors() {
        let lisp = boot();
        let limited = lisp.with_timeout(LIMIT);
        // The threads that enforce limits already wait when the descriptors are closed.
        assert!(is_timeout(&limited.eval::<()>("(loop)")));
        let mut evaluation = Evaluation::new("(loop)");
        evaluation.timeout = TimeLimit::Of(LIMIT);
        assert!(lisp.session().evaluate(evaluation.clone()).result.is_err());
        close_descriptors(&lisp);
        assert!(is_timeout(&soon(move || limited.eval::<()>("(loop)"))));
        let session = lisp.session().clone();
        assert!(soon(move || session.evaluate(evaluation).result.is_err()));
        let separate = lisp.separate();
        let stop = separate.interrupt_handle();
        let (began, receiver) = mpsc::channel();
        lisp.define("host:begin", "Report that the call runs.", move || began.send(()).unwrap()).unwrap();
        let result = std::thread::spawn(move || soon(move || separate.eval::<()>("(progn (host:begin) (loop))")));
        receiver.recv_timeout(SOON).unwrap();
        stop.interrupt();
        assert!(matches!(result.join().unwrap(), Err(Error::Interrupted)));
        still_works(&lisp);
    }
    run_probes(
        "time_limits_and_interruptions_work_after_code_has_closed_all_descriptors",
        &[("closed_descriptors", closed_descriptors)],
    );
}

// ---- Nested signal handlers, of which SBCL supports eight in a thread

fn repeated_terminations() {
    let lisp = boot();
    lisp.define("host:pause", "Sleep.", || std::thread::sleep(LIMIT)).unwrap();
    for body in
        ["(unwind-protect (progn (begin) (loop)) (sleep 0.2))", "(sb-sys:without-interrupts (begin) (host:pause))"]
    {
        lisp.eval::<()>(&format!(
            "(let* ((began (sb-thread:make-semaphore))
                    (thread (sb-thread:make-thread
                             (lambda () (flet ((begin () (sb-thread:signal-semaphore began))) {body})))))
               (sb-thread:wait-on-semaphore began)
               (dotimes (i 20) (ignore-errors (sb-thread:terminate-thread thread)))
               (sb-thread:join-thread thread :default nil)
               nil)"
        ))
        .unwrap();
    }
    still_works(&lisp);
}

fn interruptions_that_unwind() {
    let lisp = boot();
    lisp.load_str("(defvar *catching* nil)").unwrap();
    // Ends when every interruption has run, also those that had to wait.
    let code = "(let ((thread sb-thread:*current-thread*) (count 0) (queued nil))
                  (loop until (= count 20)
                        do (catch 'next
                             (let ((*catching* t))
                               (unless (shiftf queued t)
                                 (sb-sys:without-interrupts
                                   (dotimes (i 20)
                                     (sb-thread:interrupt-thread
                                      thread (lambda () (incf count) (when *catching* (throw 'next nil)))))))
                               (loop until (= count 20))))))";
    let caller = lisp.clone();
    soon(move || caller.eval::<()>(code)).unwrap();
    still_works(&lisp);
}

fn handlers_that_fill_the_heap() {
    let lisp = Lisp::builder().heap(512 << 20).boot().unwrap();
    lisp.load_str(
        "(defvar *keep* nil)
         (defun grow ()
           (handler-bind ((storage-condition (lambda (condition) (declare (ignore condition)) (grow))))
             (loop (push (make-array 100000) *keep*) (make-array 500000))))",
    )
    .unwrap();
    let full = lisp.eval::<()>("(grow)").unwrap_err();
    assert!(full.condition().is_some_and(|condition| condition.is("storage-condition")), "{full}");
    lisp.eval::<()>("(setf *keep* nil)").unwrap();
    still_works(&lisp);
}

fn float_traps_in_handlers() {
    let lisp = boot();
    let inner = lisp.clone();
    lisp.define("host:again", "Divide again.", move |x: f32| inner.call::<f32>("guarded", (x,))).unwrap();
    lisp.load_str(
        "(declaim (notinline inverse))
         (defun inverse (x) (declare (single-float x)) (/ 1.0 x))
         (defun guarded (x)
           (handler-bind ((arithmetic-error (lambda (condition) (declare (ignore condition)) (host:again x))))
             (inverse x)))",
    )
    .unwrap();
    let in_lisp = "(labels ((again (x)
                              (handler-bind ((arithmetic-error (lambda (condition) (declare (ignore condition)) (again x))))
                                (inverse x))))
                     (again 0.0))";
    for nested in [lisp.call::<f32>("guarded", (0.0f32,)), lisp.eval(in_lisp)] {
        let error = nested.unwrap_err();
        assert!(
            error.condition().is_some_and(|condition| condition.message().contains("nested too deeply")),
            "{error}"
        );
        still_works(&lisp);
    }
    let kind = lisp.session().evaluate(Evaluation::new(in_lisp)).result.as_ref().err().map(|error| error.kind.clone());
    assert!(kind.as_ref().is_some_and(|kind| kind.ends_with("INTERRUPT-CONTEXTS-EXHAUSTED")), "{kind:?}");
    still_works(&lisp);
}

fn loops_in_nested_handlers() {
    let lisp = boot();
    lisp.load_str(
        "(declaim (notinline inverse))
         (defun inverse (x) (declare (single-float x)) (/ 1.0 x))
         (defun again (depth)
           (handler-bind ((arithmetic-error (lambda (condition)
                                              (declare (ignore condition))
                                              (loop while (zerop depth))
                                              (again (1- depth)))))
             (inverse 0.0)))",
    )
    .unwrap();
    let limited = lisp.with_timeout(LIMIT);
    for depth in 0..8 {
        let limited = limited.clone();
        let error = soon(move || limited.eval::<()>(&format!("(again {depth})"))).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }) || error.condition().is_some(), "{depth}: {error}");
    }
    still_works(&lisp);
}

fn error_traps_in_interruptions() {
    let lisp = boot();
    lisp.load_str(
        "(defun again (x)
           (handler-bind ((error (lambda (condition) (declare (ignore condition)) (again x)))) (car x)))
         (defun nest (depth)
           (if (zerop depth)
               (again 7)
               (let ((thread sb-thread:*current-thread*) (end nil))
                 (sb-thread:interrupt-thread
                  thread (lambda () (sb-sys:with-interrupts (nest (1- depth))) (setf end t)))
                 (loop until end))))",
    )
    .unwrap();
    for depth in 1..5 {
        let error = lisp.eval::<()>(&format!("(nest {depth})")).unwrap_err();
        assert!(error.condition().is_some(), "{error}");
    }
    still_works(&lisp);
}

/// Functions that trap in a handler of the previous trap: AGAIN without end, and NEST to a depth at which an error of TYPE is
/// signalled.
const NESTED_TRAPS: &str = "
    (defun again (x)
      (handler-bind ((error (lambda (condition) (declare (ignore condition)) (again x)))) (car x)))
    (defun nest (depth x type)
      (if (zerop depth)
          (error type)
          (handler-bind ((error (lambda (condition) (declare (ignore condition)) (nest (1- depth) x type)))) (car x))))";

fn error_traps_in_reports() {
    let lisp = boot();
    lisp.load_str(NESTED_TRAPS).unwrap();
    lisp.load_str(
        "(define-condition unreportable (error) ()
           (:report (lambda (condition stream) (declare (ignore condition stream)) (again 7))))",
    )
    .unwrap();
    for depth in 0..8 {
        let code = format!("(nest {depth} 7 'unreportable)");
        let error = lisp.eval::<()>(&code).unwrap_err();
        assert!(error.condition().is_some(), "{depth}: {error}");
        assert!(lisp.session().evaluate(Evaluation::new(&code)).result.is_err(), "{depth}");
        still_works(&lisp);
    }
}

fn error_traps_in_the_programs_handler() {
    static CAREFUL: OnceLock<Lisp> = OnceLock::new();
    let lisp = boot();
    lisp.load_str(NESTED_TRAPS).unwrap();
    let careful = CAREFUL.get_or_init(|| {
        lisp.with_handler(|_| {
            // An error in this call is passed to this handler, too.
            let _ = CAREFUL.get().map(|careful| careful.call::<()>("car", (7,)));
            None
        })
    });
    for depth in 0..8 {
        let error = careful.eval::<()>(&format!("(nest {depth} 7 'program-error)")).unwrap_err();
        assert!(error.condition().is_some(), "{depth}: {error}");
        still_works(&lisp);
    }
    let error = careful.eval::<()>("(again 7)").unwrap_err();
    assert!(error.condition().is_some_and(|condition| condition.message().contains("nested too deeply")), "{error}");
    still_works(&lisp);
}

#[test]
fn nested_signal_handlers_do_not_end_the_process() {
    run_probes(
        "nested_signal_handlers_do_not_end_the_process",
        &[
            ("repeated_terminations", repeated_terminations),
            ("interruptions_that_unwind", interruptions_that_unwind),
            ("handlers_that_fill_the_heap", handlers_that_fill_the_heap),
            ("float_traps_in_handlers", float_traps_in_handlers),
            ("loops_in_nested_handlers", loops_in_nested_handlers),
            ("error_traps_in_interruptions", error_traps_in_interruptions),
            ("error_traps_in_reports", error_traps_in_reports),
            ("error_traps_in_the_programs_handler", error_traps_in_the_programs_handler),
        ],
    );
}

fn errors_nested_in_handlers() {
    let lisp = boot();
    lisp.load_str(
        "(defun standard-streams () (list sb-sys:*stdin* sb-sys:*stdout* sb-sys:*stderr* sb-sys:*tty*))
         (defvar *streams* (standard-streams))
         (defun again ()
           (handler-bind ((error (lambda (condition) (declare (ignore condition)) (again)))) (error \"outer\")))",
    )
    .unwrap();
    let (plain, messages) = (lisp.clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = messages.clone();
    let careful = lisp.with_handler(move |_| {
        let inner = plain.eval::<()>("(error \"inner\")").unwrap_err();
        seen.lock().unwrap().push(inner.condition().map(|condition| condition.message().to_owned()));
        None
    });
    let error = careful.eval::<()>("(again)").unwrap_err();
    assert!(error.condition().is_some_and(|condition| condition.message().contains("nesting depth")), "{error}");
    assert_eq!(*messages.lock().unwrap(), [Some("inner".to_owned())]);
    assert!(lisp.eval::<bool>("(every #'eq *streams* (standard-streams))").unwrap());
    still_works(&lisp);
}

#[test]
fn errors_nested_in_handlers_leave_the_standard_streams_alone() {
    run_probes(
        "errors_nested_in_handlers_leave_the_standard_streams_alone",
        &[("errors_nested_in_handlers", errors_nested_in_handlers)],
    );
}

fn cleanup_forms_of_three_seconds() {
    let lisp = boot();
    lisp.load_str(
        "(defvar *x* nil) (defvar *lock* (sb-thread:make-mutex))
         (defun spin () (sb-thread:with-mutex (*lock*) (unwind-protect (loop) (sleep 3) (setf *x* t))))",
    )
    .unwrap();
    let late = lisp.with_timeout(LIMIT).call::<()>("spin", ());
    assert!(is_timeout(&late), "{late:?}");
    assert!(lisp.eval::<bool>("(and *x* (null (sb-thread:mutex-owner *lock*)))").unwrap());
}

fn cleanup_forms_without_end() {
    let lisp = builder().cleanup(Duration::from_millis(200)).boot().unwrap();
    lisp.load_str(
        "(defvar *x* nil)
         (defun spin () (unwind-protect (unwind-protect (unwind-protect (loop) (loop)) (loop)) (setf *x* t)))",
    )
    .unwrap();
    let limited = lisp.with_timeout(LIMIT);
    let late = soon(move || limited.call::<()>("spin", ()));
    assert!(is_timeout(&late), "{late:?}");
    assert!(lisp.eval::<bool>("*x*").unwrap());
}

/// A call that a cleanup form makes has its own time limit, within the grace period of the interrupted call.
fn limited_call_in_a_cleanup_form() {
    let lisp = boot();
    let limited = lisp.with_timeout(LIMIT);
    let inner = limited.clone();
    lisp.define("host:limited", "Return true when a call is ended by its time limit.", move || {
        is_timeout(&inner.eval::<()>("(loop)"))
    })
    .unwrap();
    lisp.load_str("(defvar *x* nil) (defun spin () (unwind-protect (loop) (setf *x* (host:limited))))").unwrap();
    let late = soon(move || limited.call::<()>("spin", ()));
    assert!(is_timeout(&late), "{late:?}");
    assert!(lisp.eval::<bool>("*x*").unwrap());
}

#[test]
fn cleanup_forms_of_an_interrupted_call_have_a_grace_period() {
    run_probes(
        "cleanup_forms_of_an_interrupted_call_have_a_grace_period",
        &[
            ("cleanup_forms_of_three_seconds", cleanup_forms_of_three_seconds),
            ("cleanup_forms_without_end", cleanup_forms_without_end),
            ("limited_call_in_a_cleanup_form", limited_call_in_a_cleanup_form),
        ],
    );
}

/// A sink whose writes block until `open` receives a message or is disconnected.
struct BlockingSink {
    open: mpsc::Receiver<()>,
    reached: mpsc::Sender<()>,
    text: Arc<Mutex<String>>,
}

impl Write for BlockingSink {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        let _ = self.reached.send(());
        let _ = self.open.recv();
        self.text.lock().unwrap().push_str(&String::from_utf8_lossy(octets));
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn limit_while_a_sink_blocks() {
    let (open, gate) = mpsc::channel();
    let (reached, receiver) = mpsc::channel();
    let text = Arc::new(Mutex::new(String::new()));
    let sink = BlockingSink { open: gate, reached, text: text.clone() };
    let lisp = builder().stdout(sink).boot().unwrap();
    // On a busy machine, compiling the code may take a second.
    let limited = lisp.with_timeout(Duration::from_secs(3));
    // Output of cleanup forms does not wait for the sink either.
    let late = soon(move || {
        limited.eval::<()>("(unwind-protect (progn (princ \"one\") (finish-output) (loop)) (princ \" two\"))")
    });
    assert!(is_timeout(&late), "{late:?}");
    receiver.recv_timeout(SOON).unwrap();
    // The same holds for a call that is interrupted through its handle.
    let separate = lisp.separate();
    let stop = separate.interrupt_handle();
    let (printing, prints) = mpsc::channel();
    lisp.define("host:printing", "Tell.", move || printing.send(()).unwrap()).unwrap();
    let caller =
        std::thread::spawn(move || separate.eval::<()>("(host:printing) (princ \" three\") (finish-output) (loop)"));
    prints.recv_timeout(SOON).unwrap();
    stop.interrupt();
    let interrupted = soon(move || caller.join().unwrap());
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    assert_eq!(*text.lock().unwrap(), "");
    // A call without a time limit waits for the sink, and then all output has been written.
    drop(open);
    lisp.eval::<()>("(princ \" four\")").unwrap();
    let text = text.lock().unwrap();
    assert!(text.starts_with("one two") && text.ends_with(" four"), "{text}");
}

/// An input that blocks and delivers nothing.
struct BlockingInput(mpsc::Receiver<()>);

impl Read for BlockingInput {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        Ok(0)
    }
}

fn limit_while_an_input_blocks() {
    let (_open, gate) = mpsc::channel();
    let lisp = builder().stdin(BlockingInput(gate)).boot().unwrap();
    let limited = lisp.with_timeout(Duration::from_millis(200));
    let late = soon(move || limited.eval::<()>("(read-line)"));
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

fn input_in_a_cleanup_form() {
    let lisp = builder().stdin(Cursor::new("hello\n")).boot().unwrap();
    lisp.eval::<()>("(defvar *line* nil)").unwrap();
    let limited = lisp.with_timeout(LIMIT);
    let late = soon(move || limited.eval::<()>("(unwind-protect (loop) (setf *line* (read-line)))"));
    assert!(is_timeout(&late), "{late:?}");
    assert_eq!(lisp.eval::<Option<String>>("*line*").unwrap().as_deref(), Some("hello"));
}

fn input_after_the_limit_with_interrupts_disabled() {
    let lisp = builder().stdin(Cursor::new("hello\n")).boot().unwrap();
    lisp.eval::<()>("(defvar *line* nil)").unwrap();
    let limited = lisp.with_timeout(LIMIT);
    // The limit ends the call when interrupts are enabled again, unless the call has returned by then.
    let _ = soon(move || limited.eval::<()>("(sb-sys:without-interrupts (sleep 1) (setf *line* (read-line)))"));
    assert_eq!(lisp.eval::<Option<String>>("*line*").unwrap().as_deref(), Some("hello"));
}

/// Input that arrives in two reads.
fn input_without_waiting() {
    let lisp = builder().stdin(Cursor::new("a").chain(&b"b"[..])).boot().unwrap();
    let code = "(flet ((wait-for-input () (loop until (listen) do (sleep 0.001))))
                  (wait-for-input)
                  (let ((a (read-char-no-hang)))
                    ;; The next part of the input arrives before the character is put back.
                    (wait-for-input)
                    (unread-char a)
                    (list a (read-char-no-hang) (read-char-no-hang)
                          (loop (let ((end (read-char-no-hang *standard-input* nil :end)))
                                  (when end (return end))))
                          (listen))))";
    let read = soon(move || lisp.eval::<Value>(code).unwrap().to_string());
    assert_eq!(read, r"(#\a #\a #\b :END NIL)");
}

/// An input that blocks.
fn no_input_without_waiting() {
    let (_open, gate) = mpsc::channel();
    let lisp = builder().stdin(BlockingInput(gate)).boot().unwrap();
    let read = soon(move || lisp.eval::<(bool, bool)>("(values (listen) (read-char-no-hang))").unwrap());
    assert_eq!(read, (false, false));
}

#[test]
fn listen_and_read_char_no_hang_find_input_and_do_not_wait_for_it() {
    run_probes(
        "listen_and_read_char_no_hang_find_input_and_do_not_wait_for_it",
        &[("input_without_waiting", input_without_waiting), ("no_input_without_waiting", no_input_without_waiting)],
    );
}

#[test]
fn interrupted_call_can_read_input_in_cleanup_forms_and_without_interrupts() {
    run_probes(
        "interrupted_call_can_read_input_in_cleanup_forms_and_without_interrupts",
        &[
            ("input_in_a_cleanup_form", input_in_a_cleanup_form),
            ("input_after_the_limit_with_interrupts_disabled", input_after_the_limit_with_interrupts_disabled),
        ],
    );
}

static LISP: OnceLock<Lisp> = OnceLock::new();

/// A sink that calls Lisp code that prints.
struct SinkThatCallsLisp(Arc<Mutex<Vec<Result<(), Error>>>>);

impl Write for SinkThatCallsLisp {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if let Some(lisp) = LISP.get() {
            self.0.lock().unwrap().push(lisp.eval::<()>("(print :within)"));
        }
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn sink_that_calls_lisp() {
    let results = Arc::new(Mutex::new(Vec::new()));
    let lisp = builder().threads(2).stdout(SinkThatCallsLisp(results.clone())).boot().unwrap();
    LISP.set(lisp.clone()).unwrap();
    let printing = lisp.clone();
    soon(move || printing.eval::<()>("(princ 1)")).unwrap();
    let results = results.lock().unwrap();
    assert!(
        !results.is_empty() && results.iter().all(|result| matches!(result, Err(Error::CalledByStream))),
        "{results:?}"
    );
    still_works(&lisp);
}

#[test]
fn blocking_or_reentrant_stream_does_not_defeat_time_limits_or_deadlock() {
    run_probes(
        "blocking_or_reentrant_stream_does_not_defeat_time_limits_or_deadlock",
        &[
            ("limit_while_an_input_blocks", limit_while_an_input_blocks),
            ("limit_while_a_sink_blocks", limit_while_a_sink_blocks),
            ("sink_that_calls_lisp", sink_that_calls_lisp),
        ],
    );
}

/// Evaluates in the session on this thread, and returns the kind of the error, or "none".
fn session_kind(lisp: &Lisp) -> String {
    let outcome = lisp.session().evaluate(Evaluation::new("(+ 1 2)"));
    outcome.result.as_ref().map_or_else(|error| error.kind.clone(), |_| "none".to_owned())
}

/// Evaluates `code` in the session from another thread, and returns the text of its first value.
fn session_value(lisp: &Lisp, code: &'static str) -> String {
    let lisp = lisp.clone();
    let outcome = soon(move || lisp.session().evaluate(Evaluation::new(code)));
    outcome.result.as_ref().unwrap()[0].text.clone()
}

fn session_within_its_own_evaluation() {
    let lisp = boot();
    let (inner, nested) = (lisp.clone(), lisp.clone());
    lisp.define("host:kind", "Evaluate.", move || session_kind(&inner)).unwrap();
    lisp.define("host:nested", "Evaluate in Lisp.", move || {
        nested.with_timeout(SOON).eval::<String>("(funcall (lambda () (host:kind)))")
    })
    .unwrap();
    assert_eq!(session_value(&lisp, "(host:kind)"), "\"DEADLOCK\"");
    assert_eq!(session_value(&lisp, "(host:nested)"), "\"DEADLOCK\"");
    assert_eq!(session_value(&lisp.clone(), "(+ 1 2)"), "3");
    assert!(lisp.session().last_error().is_none());
    // An evaluation of another connection would wait forever as well.
    let other = lisp.session().connect();
    lisp.define("host:other", "Evaluate.", move || other.evaluate(Evaluation::new("1")).is_error()).unwrap();
    assert_eq!(session_value(&lisp, "(host:other)"), "T");
    // Where no evaluation in the foreground waits for it, the inner one runs.
    let pool = lisp.clone();
    assert_eq!(soon(move || pool.eval::<String>("(host:kind)")).unwrap(), "none");
    let background = Evaluation { background: Background::AtOnce, ..Evaluation::new("(host:kind)") };
    let (reply, receiver) = mpsc::channel();
    lisp.session().submit(background, move |outcome| reply.send(outcome).unwrap());
    let outcome = receiver.recv_timeout(SOON).unwrap();
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "\"none\"");
    let (thread, kind) = ("(sb-thread:join-thread (sb-thread:make-thread (function host:kind)))", "\"none\"");
    let pool = lisp.clone();
    assert_eq!(soon(move || pool.eval::<String>(thread)).unwrap(), kind.trim_matches('"'));
}

fn session_within_a_handler() {
    let lisp = boot();
    let (inner, kinds) = (lisp.clone(), Arc::new(Mutex::new(Vec::new())));
    let recorded = kinds.clone();
    let handled = lisp.with_handler(move |_| {
        recorded.lock().unwrap().push(session_kind(&inner));
        None
    });
    lisp.define("host:fail", "Fail.", move || handled.eval::<()>("(error \"on purpose\")").is_err()).unwrap();
    assert_eq!(session_value(&lisp, "(host:fail)"), "T");
    assert_eq!(*kinds.lock().unwrap(), ["DEADLOCK"]);
}

fn session_within_a_reply() {
    let lisp = boot();
    let (inner, (reply, receiver)) = (lisp.clone(), mpsc::channel());
    lisp.session().submit(Evaluation::new("1"), move |_| reply.send(session_kind(&inner)).unwrap());
    assert_eq!(receiver.recv_timeout(SOON).unwrap(), "DEADLOCK");
    assert_eq!(session_value(&lisp, "(+ 1 2)"), "3");
}

fn session_while_an_evaluation_leaves_the_foreground() {
    let lisp = boot();
    let (started, starts) = mpsc::channel();
    lisp.define("host:started", "Tell.", move || started.send(()).unwrap()).unwrap();
    let code = "(progn (host:started) (sleep 1) 7)";
    let evaluation = Evaluation { background: Background::Later, ..Evaluation::new(code) };
    let id = lisp.session().submit(evaluation, |_| ());
    starts.recv_timeout(SOON).unwrap();
    assert!(!lisp.session().leave_foreground(id).expect("it leaves").is_error());
    // Evaluations from here on do not wait for it.
    assert_eq!(session_kind(&lisp), "none");
    assert_eq!(session_value(&lisp, "(+ 1 2)"), "3");
}

/// Starts as many background evaluations of `code` as are allowed, each with the time limit `limit`. The receiver gets
/// the first value or the error kind of each.
fn fill_background(lisp: &Lisp, code: &str, limit: Duration) -> mpsc::Receiver<String> {
    let (reply, receiver) = mpsc::channel();
    for _ in 0..MOST_IN_BACKGROUND {
        let timeout = TimeLimit::Of(limit);
        let evaluation = Evaluation { background: Background::AtOnce, timeout, ..Evaluation::new(code) };
        let reply = reply.clone();
        lisp.session().submit(evaluation, move |outcome| {
            let end = outcome.result.as_ref().map_or_else(|error| error.kind.clone(), |values| values[0].text.clone());
            let _ = reply.send(end);
        });
    }
    receiver
}

/// Waits for background evaluations whose values are the kinds of inner outcomes. Returns how many inner evaluations
/// succeeded.
fn count_evaluated(receiver: &mpsc::Receiver<String>) -> usize {
    let ends: Vec<_> = (0..MOST_IN_BACKGROUND).map(|_| receiver.recv_timeout(SOON).expect("it ends")).collect();
    assert!(ends.iter().all(|end| ["\"none\"", "\"DEADLOCK\""].contains(&end.as_str())), "{ends:?}");
    ends.iter().filter(|end| *end == "\"none\"").count()
}

fn kind_of(outcome: &sbcl::Outcome) -> String {
    outcome.result.as_ref().map_or_else(|error| error.kind.clone(), |_| "none".to_owned())
}

fn session_within_every_background_evaluation() {
    let lisp = boot();
    let (inner, all) = (lisp.clone(), Barrier::new(MOST_IN_BACKGROUND));
    lisp.define("host:more", "Evaluate in the background.", move || {
        all.wait();
        let evaluation = Evaluation { background: Background::AtOnce, ..Evaluation::new("(+ 1 2)") };
        kind_of(&inner.session().evaluate(evaluation))
    })
    .unwrap();
    // Only the last of them would wait forever.
    let receiver = fill_background(&lisp, "(host:more)", 3 * SOON);
    assert_eq!(count_evaluated(&receiver), MOST_IN_BACKGROUND - 1);
    assert_eq!(session_value(&lisp, "(+ 1 2)"), "3");
}

/// Fills the background with evaluations that each wait `waits` times for the barrier, and then for a foreground
/// evaluation.
fn fill_background_with_waiters(lisp: &Lisp, waits: usize, limit: Duration) -> (Arc<Barrier>, mpsc::Receiver<String>) {
    let (inner, all) = (lisp.clone(), Arc::new(Barrier::new(MOST_IN_BACKGROUND + 1)));
    let begun = all.clone();
    lisp.define("host:kind", "Evaluate.", move || {
        for _ in 0..waits {
            begun.wait();
        }
        session_kind(&inner)
    })
    .unwrap();
    (all, fill_background(lisp, "(host:kind)", limit))
}

fn session_behind_a_queued_background_evaluation() {
    let lisp = boot();
    let (all, receiver) = fill_background_with_waiters(&lisp, 2, 3 * SOON);
    // The background is full; the next background evaluation waits in the queue.
    all.wait();
    let (reply, last) = mpsc::channel();
    let evaluation = Evaluation { background: Background::AtOnce, ..Evaluation::new("7") };
    lisp.session().submit(evaluation, move |outcome| reply.send(kind_of(&outcome)).unwrap());
    all.wait();
    assert_eq!(count_evaluated(&receiver), MOST_IN_BACKGROUND - 1);
    assert_eq!(last.recv_timeout(SOON).unwrap(), "none");
    assert_eq!(session_value(&lisp, "(+ 1 2)"), "3");
}

/// Background evaluations that wait for an endless foreground evaluation end by their time limits.
fn time_limit_while_the_session_waits() {
    let lisp = boot();
    let (all, receiver) = fill_background_with_waiters(&lisp, 1, Duration::from_secs(1));
    let busy = lisp.session().submit(Evaluation::new("(loop)"), |_| ());
    all.wait();
    for _ in 0..MOST_IN_BACKGROUND {
        assert_eq!(receiver.recv_timeout(SOON).expect("it ends"), "TIMEOUT");
    }
    lisp.session().cancel(busy);
    assert_eq!(session_value(&lisp, "(+ 1 2)"), "3");
}

/// A sink that evaluates in the session, which waits for the evaluation that prints.
struct SinkThatEvaluates(mpsc::Sender<String>);

impl Write for SinkThatEvaluates {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        if let Some(lisp) = LISP.get() {
            let _ = self.0.send(session_kind(lisp));
        }
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn session_within_a_stream() {
    let (kinds, receiver) = mpsc::channel();
    let lisp = builder().stdout(SinkThatEvaluates(kinds)).boot().unwrap();
    LISP.set(lisp.clone()).unwrap();
    let printing = lisp.clone();
    lisp.define("host:print", "Print on another thread.", move || {
        std::thread::scope(|scope| scope.spawn(|| printing.eval::<()>("(princ 1)")).join().unwrap()).is_ok()
    })
    .unwrap();
    assert_eq!(session_value(&lisp, "(host:print)"), "T");
    assert_eq!(receiver.recv_timeout(SOON).unwrap(), "DEADLOCK");
}

#[test]
fn evaluation_that_would_wait_for_itself_fails_with_deadlock() {
    run_probes(
        "evaluation_that_would_wait_for_itself_fails_with_deadlock",
        &[
            ("session_within_its_own_evaluation", session_within_its_own_evaluation),
            ("session_within_a_handler", session_within_a_handler),
            ("session_within_a_reply", session_within_a_reply),
            ("session_within_a_stream", session_within_a_stream),
            ("session_while_an_evaluation_leaves_the_foreground", session_while_an_evaluation_leaves_the_foreground),
        ],
    );
}

#[test]
fn background_evaluations_never_deadlock() {
    run_probes(
        "background_evaluations_never_deadlock",
        &[
            ("session_within_every_background_evaluation", session_within_every_background_evaluation),
            ("session_behind_a_queued_background_evaluation", session_behind_a_queued_background_evaluation),
            ("time_limit_while_the_session_waits", time_limit_while_the_session_waits),
        ],
    );
}

fn boot_after_a_failed_boot() {
    let nowhere = std::env::temp_dir().join("sbcl-no-core-here");
    std::fs::create_dir_all(&nowhere).unwrap();
    let failed = builder().threads(1).spare_threads(0).core(&nowhere).boot();
    std::fs::remove_dir(&nowhere).unwrap();
    assert!(matches!(failed, Err(Error::Boot(_))), "{failed:?}");
    let lisp = builder().threads(2).spare_threads(0).boot().unwrap();
    lisp.load_str("(defvar *one* (sb-thread:make-semaphore)) (defvar *other* (sb-thread:make-semaphore))").unwrap();
    let side = lisp.clone();
    let both = std::thread::spawn(move || {
        side.eval::<bool>(
            "(progn (sb-thread:signal-semaphore *one*) (sb-thread:wait-on-semaphore *other* :timeout 10))",
        )
    });
    let met = "(prog1 (sb-thread:wait-on-semaphore *one* :timeout 10) (sb-thread:signal-semaphore *other*))";
    assert!(lisp.eval::<bool>(met).unwrap() && both.join().unwrap().unwrap());
}

#[test]
fn boot_after_a_failed_boot_uses_its_own_thread_count() {
    run_probes(
        "boot_after_a_failed_boot_uses_its_own_thread_count",
        &[("boot_after_a_failed_boot", boot_after_a_failed_boot)],
    );
}

// ---- Program code that blocks

/// A value that blocks forever when it is dropped or called as a waker.
struct Blocking;

impl Blocking {
    fn block() {
        loop {
            std::thread::park();
        }
    }
}

impl Wake for Blocking {
    fn wake(self: Arc<Self>) {
        // Only the wake-up blocks, not the drop.
        std::mem::forget(self);
        Self::block();
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        Self::block();
    }
}

/// Checks that a running call still times out after the time limits of the calls that `submit` submits have expired in
/// the queue.
fn check_running_call_times_out_after(submit: impl FnOnce(Lisp) + Send + 'static) {
    let lisp = builder().threads(1).spare_threads(0).boot().unwrap();
    let (began, begins) = mpsc::channel();
    lisp.define("host:begin", "Tell.", move || began.send(()).unwrap()).unwrap();
    let limited = lisp.with_timeout(Duration::from_secs(2));
    let running = std::thread::spawn(move || limited.eval::<()>("(host:begin) (loop)"));
    begins.recv_timeout(SOON).unwrap();
    let queued = lisp.with_timeout(Duration::from_millis(300));
    soon(move || submit(queued));
    let late = soon(move || running.join().unwrap());
    assert!(is_timeout(&late), "{late:?}");
    still_works(&lisp);
}

fn poll<R>(call: &mut sbcl::Call<R>, waker: &Waker) -> Poll<Result<R, Error>> {
    std::pin::Pin::new(call).poll(&mut Context::from_waker(waker))
}

/// Polls a call of `lisp` with `waker` and leaks the call. Returns true when it is pending.
fn submit_with_waker(lisp: &Lisp, waker: &Waker) -> bool {
    let mut call = lisp.eval_async::<()>("1");
    let is_pending = poll(&mut call, waker).is_pending();
    std::mem::forget(call);
    is_pending
}

fn waker_that_blocks() {
    check_running_call_times_out_after(|lisp| {
        let waker = Waker::from(Arc::new(Blocking));
        assert!(submit_with_waker(&lisp, &waker));
        std::mem::forget(waker);
    });
}

fn many_wakers_that_block() {
    check_running_call_times_out_after(|lisp| {
        let waker = Waker::from(Arc::new(Blocking));
        // More calls than helper threads. Some may be over before they are polled.
        let pending = (0..200).filter(|_| submit_with_waker(&lisp, &waker)).count();
        assert!(pending > 1, "{pending}");
        std::mem::forget(waker);
    });
}

fn waker_that_panics() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic_any(Bomb(2));
        }
    }
    check_running_call_times_out_after(|lisp| assert!(submit_with_waker(&lisp, &Waker::from(Arc::new(Panics)))));
}

fn closure_whose_drop_blocks() {
    check_running_call_times_out_after(|lisp| {
        let blocking = Blocking;
        std::mem::forget(lisp.enter_async(move |_| {
            std::mem::forget(blocking);
            Ok(())
        }));
    });
}

fn handler_whose_drop_blocks() {
    check_running_call_times_out_after(|lisp| {
        let blocking = Blocking;
        let handled = lisp.with_handler(move |_| {
            let _kept = &blocking;
            None
        });
        std::mem::forget(handled.eval_async::<()>("1"));
        // Only the call keeps the handler alive from here on. When its time limit has expired already, the
        // spawned thread blocks.
        std::thread::spawn(move || drop(handled));
    });
}

fn handler_of_a_waiting_caller_whose_drop_blocks() {
    check_running_call_times_out_after(|lisp| {
        std::thread::spawn(move || {
            let blocking = Blocking;
            let handled = lisp.with_handler(move |_| {
                let _kept = &blocking;
                None
            });
            let late = handled.eval::<()>("1");
            assert!(is_timeout(&late), "{late:?}");
            drop(handled);
        });
    });
}

/// A call whose time limit expires wakes its task although the waker of another call blocks.
fn waker_after_a_waker_that_blocks() {
    struct NotifyingWaker(mpsc::Sender<()>);
    impl Wake for NotifyingWaker {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }
    let (woken, wakes) = mpsc::channel();
    check_running_call_times_out_after(|lisp| {
        let waker = Waker::from(Arc::new(Blocking));
        assert!(submit_with_waker(&lisp, &waker));
        std::mem::forget(waker);
        assert!(submit_with_waker(&lisp, &Waker::from(Arc::new(NotifyingWaker(woken)))));
    });
    wakes.recv_timeout(SOON).unwrap();
}

fn debug_writer_that_blocks() {
    /// A writer that blocks forever once it has written this many pieces of text.
    struct BlockingWriter(u32);
    impl std::fmt::Write for BlockingWriter {
        fn write_str(&mut self, _: &str) -> std::fmt::Result {
            match self.0.checked_sub(1) {
                Some(left) => self.0 = left,
                None => Blocking::block(),
            }
            Ok(())
        }
    }
    check_running_call_times_out_after(|lisp| {
        for pieces in 0..30 {
            let call = lisp.eval_async::<()>("1");
            std::thread::spawn(move || std::fmt::write(&mut BlockingWriter(pieces), format_args!("{call:?}")));
        }
    });
}

#[test]
fn blocking_or_panicking_code_of_the_program_does_not_stop_time_limits() {
    run_probes(
        "blocking_or_panicking_code_of_the_program_does_not_stop_time_limits",
        &[
            ("waker_that_blocks", waker_that_blocks),
            ("many_wakers_that_block", many_wakers_that_block),
            ("waker_that_panics", waker_that_panics),
            ("waker_after_a_waker_that_blocks", waker_after_a_waker_that_blocks),
            ("debug_writer_that_blocks", debug_writer_that_blocks),
            ("closure_whose_drop_blocks", closure_whose_drop_blocks),
            ("handler_whose_drop_blocks", handler_whose_drop_blocks),
            ("handler_of_a_waiting_caller_whose_drop_blocks", handler_of_a_waiting_caller_whose_drop_blocks),
        ],
    );
}

fn waker_that_calls_lisp_when_it_is_replaced() {
    /// A waker that, when dropped, lets the polled call end and calls Lisp on the same thread.
    struct Calls(Lisp, mpsc::Sender<()>, mpsc::Sender<Result<i64, Error>>);
    impl Wake for Calls {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Calls {
        fn drop(&mut self) {
            self.1.send(()).unwrap();
            let _ = self.2.send(self.0.eval("(+ 1 2)"));
        }
    }
    let lisp = builder().threads(1).spare_threads(0).boot().unwrap();
    let (open, gate) = mpsc::channel();
    let gate = Mutex::new(gate);
    lisp.define("host:wait", "Wait.", move || gate.lock().unwrap().recv().unwrap()).unwrap();
    let (sender, result) = mpsc::channel();
    let mut call = lisp.eval_async::<()>("(host:wait)");
    assert!(poll(&mut call, &Waker::from(Arc::new(Calls(lisp.clone(), open, sender)))).is_pending());
    assert!(poll(&mut call, Waker::noop()).is_pending());
    let result = result.recv_timeout(SOON).unwrap();
    assert!(matches!(result, Ok(3)), "{result:?}");
}

#[test]
fn replaced_waker_may_call_lisp_when_dropped() {
    run_probes(
        "replaced_waker_may_call_lisp_when_dropped",
        &[("waker_that_calls_lisp_when_it_is_replaced", waker_that_calls_lisp_when_it_is_replaced)],
    );
}

// ---- Panics whose payloads panic

/// A panic payload that panics when it is dropped, with another `Bomb` as payload, until its number is 0.
struct Bomb(u32);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            panic_any(Bomb(self.0 - 1));
        }
    }
}

/// A sink and input that panics on use.
struct PanickingStream;

impl Write for PanickingStream {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        panic_any(Bomb(2));
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for PanickingStream {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic_any(Bomb(2));
    }
}

fn streams_that_panic() {
    let lisp =
        builder().stdout(PanickingStream).stdin(PanickingStream).on_warning(|_, _| panic_any(Bomb(2))).boot().unwrap();
    let used = lisp.clone();
    soon(move || {
        for _ in 0..3 {
            used.eval::<()>("(princ 1) (finish-output) (warn \"on purpose\")").unwrap();
            let error = used.eval::<()>("(read-line)").unwrap_err();
            assert!(error.condition().is_some_and(|condition| condition.is("rust:host-panic")), "{error:?}");
        }
    });
    still_works(&lisp);
}

fn functions_that_panic() {
    let lisp = boot();
    lisp.define("host:panic", "Panic.", |depth: u32| -> () { panic_any(Bomb(depth)) }).unwrap();
    for depth in 0..4 {
        let error = lisp.call::<()>("host:panic", (depth,)).unwrap_err();
        assert!(error.condition().is_some_and(|condition| condition.is("rust:host-panic")), "{error:?}");
    }
    let handled = lisp.with_handler(|_| panic_any(Bomb(2)));
    assert!(handled.eval::<()>("(error \"on purpose\")").is_err());
    still_works(&lisp);
}

/// A result or capture that reports its drop and then panics.
struct PanicsOnDrop(mpsc::Sender<()>);

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
        panic_any(Bomb(2));
    }
}

fn results_of_dropped_calls() {
    let lisp = builder().threads(1).spare_threads(0).boot().unwrap();
    let (began, begins) = mpsc::channel();
    let (open, gate) = mpsc::channel();
    let (sender, dropped) = mpsc::channel();
    let (begin, fragile) = (began.clone(), PanicsOnDrop(sender.clone()));
    let call = lisp.enter_async(move |_| {
        begin.send(()).unwrap();
        gate.recv().unwrap();
        Ok(fragile)
    });
    begins.recv_timeout(SOON).unwrap();
    drop(call);
    open.send(()).unwrap();
    dropped.recv_timeout(SOON).unwrap();
    still_works(&lisp);
    let (open, gate) = mpsc::channel::<()>();
    let call = lisp.enter_async(move |_| -> Result<(), Error> {
        began.send(()).unwrap();
        gate.recv().unwrap();
        panic_any(Bomb(2))
    });
    begins.recv_timeout(SOON).unwrap();
    drop(call);
    open.send(()).unwrap();
    still_works(&lisp);
    // A handler that only the call keeps alive, and a closure that never runs.
    let kept = PanicsOnDrop(sender.clone());
    let handled = lisp.with_handler(move |_| {
        let _kept = &kept;
        None
    });
    let call = handled.eval_async::<()>("1");
    drop(handled);
    dropped.recv_timeout(SOON).unwrap();
    still_works(&lisp);
    drop(call);
}

#[test]
fn panic_payload_that_panics_on_drop_ends_no_thread() {
    run_probes(
        "panic_payload_that_panics_on_drop_ends_no_thread",
        &[
            ("streams_that_panic", streams_that_panic),
            ("functions_that_panic", functions_that_panic),
            ("results_of_dropped_calls", results_of_dropped_calls),
        ],
    );
}

// ---- Handles dropped within a call

fn handles_dropped_within_a_call() {
    let lisp = Lisp::builder().heap(256 << 20).threads(1).spare_threads(0).boot().unwrap();
    lisp.define("host:take", "Drop a handle.", |_: Value| ()).unwrap();
    // Several times as much as fits into the heap.
    let code = "(dotimes (i 200000) (host:take (make-array 1000)))";
    lisp.eval::<()>(code).unwrap();
    lisp.enter(|cx| (0..200_000).try_for_each(|_| cx.eval::<Value>("(make-array 1000)").map(drop))).unwrap();
    // Larger objects, of which only a few fit.
    lisp.eval::<()>("(dotimes (i 4000) (host:take (make-array 50000)))").unwrap();
    lisp.enter(|cx| (0..4000).try_for_each(|_| cx.eval::<Value>("(make-array 50000)").map(drop))).unwrap();
    still_works(&lisp);
}

fn handles_dropped_while_an_interruption_waits() {
    let lisp = boot();
    let stop = lisp.interrupt_handle();
    lisp.define("host:stop", "Interrupt the call.", move || stop.interrupt()).unwrap();
    lisp.define("host:take", "Drop a handle.", |_: Value| ()).unwrap();
    let inner = lisp.clone();
    let make = move |count: i64| inner.enter(|cx| (0..count).try_for_each(|n| cx.value(vec![n]).map(drop)));
    lisp.define("host:make", "Make handles and drop them.", make).unwrap();
    for _ in 0..50 {
        for code in [
            "(sb-sys:without-interrupts (host:stop) (dotimes (i 100) (host:take (list i)))) (loop)",
            "(dotimes (i 15) (host:take (list i))) (sb-sys:without-interrupts (host:stop) (host:make 40)) (loop)",
        ] {
            let interrupted = lisp.eval::<()>(code);
            assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
        }
    }
    // Each call releases some of the handles.
    let kept = (0..1000).map(|_| lisp.eval::<i64>("(count-if #'consp sbcl-host/embedding::**handle-table**)").unwrap());
    let fewest = kept.min();
    assert!(fewest.is_some_and(|kept| kept < 50), "{fewest:?}");
}

#[test]
fn handles_dropped_within_one_call_do_not_fill_the_heap() {
    run_probes(
        "handles_dropped_within_one_call_do_not_fill_the_heap",
        &[
            ("handles_dropped_within_a_call", handles_dropped_within_a_call),
            ("handles_dropped_while_an_interruption_waits", handles_dropped_while_an_interruption_waits),
        ],
    );
}

/// Boots Lisp, and defines circular and deeply nested objects.
fn boot_with_deep_objects() -> Lisp {
    let lisp = boot();
    lisp.load_str(
        "(defvar *circle* (let ((list (list nil))) (setf (first list) list)))
         (defvar *deep* (let ((list '())) (dotimes (level 3000000 list) (setf list (list list)))))
         (defstruct node next)
         (defvar *node* (let ((node (make-node))) (setf (node-next node) node)))",
    )
    .unwrap();
    lisp
}

/// Asserts that new handles and calls still work.
fn still_makes_handles(lisp: &Lisp) {
    let lisp = lisp.clone();
    soon(move || {
        let values: Vec<Value> = lisp.eval("(loop repeat 3000 collect (list 1))").unwrap();
        assert_eq!(values[2999].len().unwrap(), 1);
        still_works(&lisp);
    });
}

fn assert_stack_exhausted<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.unwrap_err();
    let condition = error.condition().unwrap_or_else(|| panic!("{error}"));
    assert!(condition.is("storage-condition") && condition.message().contains("stack exhausted"), "{error}");
}

fn assert_too_deep<T>(result: Result<T, Error>) {
    match result {
        Err(Error::Conversion(error)) => {
            assert!(error.found.contains("nested too deeply or contains itself"), "{error}");
            assert!(error.place.len() < 100, "{error}");
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("an object that has no end was read"),
    }
}

fn walk(value: &Value) -> Result<u64, Error> {
    value.elements()?.iter().try_fold(1, |count, element| Ok(count + walk(element)?))
}

fn rust_function_that_walks_a_circle() {
    let lisp = boot_with_deep_objects();
    lisp.define("host:walk", "Count the lists in VALUE.", |value: Value| walk(&value)).unwrap();
    for _ in 0..3 {
        let (one, other) = (lisp.clone(), lisp.clone());
        assert_stack_exhausted(soon(move || one.eval::<u64>("(host:walk *circle*)")));
        let handled = "(handler-case (host:walk *deep*) (storage-condition () 7))";
        assert_eq!(soon(move || other.eval::<u64>(handled)).unwrap(), 7);
        still_makes_handles(&lisp);
    }
}

fn rust_and_lisp_that_call_each_other() {
    let lisp = boot();
    let direct = lisp.clone();
    lisp.define("host:again", "Call this again.", move || direct.call::<()>("host:again", ())).unwrap();
    let by_lisp = lisp.clone();
    lisp.define("host:by-lisp", "Call what called this.", move || by_lisp.call::<u64>("again", ())).unwrap();
    lisp.load_str("(defun again () (1+ (host:by-lisp)))").unwrap();
    for code in ["(host:again)", "(again)"] {
        let lisp = lisp.clone();
        assert_stack_exhausted(soon(move || lisp.eval::<()>(code)));
    }
    still_makes_handles(&lisp);
}

/// Near the end of the stack, Lisp cannot write out a list that is an argument. The function must not receive the list as
/// an object of another type.
fn result_argument_near_the_end_of_the_stack() {
    let lisp = Lisp::builder().heap(1 << 30).control_stack(2 << 20).boot().unwrap();
    let direct = lisp.clone();
    let again = move |list: Result<Vec<i64>, Value>| match list {
        Ok(list) => direct.call::<i64>("host:again", (list,)).unwrap_or(0),
        Err(_) => 1,
    };
    lisp.define("host:again", "Call this again. Return 1 if LIST is no list of integers.", again).unwrap();
    assert_eq!(lisp.eval::<i64>("(host:again :other)").unwrap(), 1);
    lisp.load_str(
        "(defun call-again (depth) (if (plusp depth) (1+ (call-again (1- depth))) (host:again (list 1 2 3))))",
    )
    .unwrap();
    // At some of the depths, the stack is used up while the argument is read; at the others, before the next call.
    for depth in 0..100 {
        let lisp = lisp.clone();
        assert_eq!(soon(move || lisp.call::<i64>("call-again", (depth,))).unwrap(), depth);
    }
    still_makes_handles(&lisp);
}

/// Output is passed to Rust, which runs on Lisp's stack and must not be the code that first touches a guard page.
fn endless_recursion_that_prints() {
    let lisp = Lisp::builder().control_stack(2 << 20).stdout(io::sink()).stderr(io::sink()).boot().unwrap();
    lisp.load_str("(defun print-again () (terpri) (print-again) nil)").unwrap();
    for code in [
        "(print-again)",
        "(labels ((f () (write-char #\\Newline) (f) nil)) (f))",
        "(labels ((f (n) (print n) (f (1+ n)) nil)) (f 0))",
        "(labels ((f () (terpri *error-output*) (f) nil)) (f))",
    ] {
        for _ in 0..3 {
            let one = lisp.clone();
            assert_stack_exhausted(soon(move || one.eval::<()>(code)));
        }
    }
    // Handlers may print, and may exhaust the rest of the stack, too.
    let handled = "(handler-case (handler-bind ((storage-condition #'print)) (print-again)) (storage-condition () 7))";
    assert_eq!(lisp.eval::<u64>(handled).unwrap(), 7);
    for _ in 0..3 {
        let one = lisp.clone();
        let code = "(handler-bind ((storage-condition (lambda (c) (declare (ignore c)) (print-again)))) (print-again))";
        soon(move || one.eval::<()>(code)).unwrap_err();
        still_works(&lisp);
    }
    still_makes_handles(&lisp);
}

fn enter_again(lisp: &Lisp) -> Result<(), Error> {
    lisp.enter(|_| enter_again(lisp))
}

fn enter_within_enter() {
    let lisp = boot();
    let limited = lisp.with_timeout(Duration::from_secs(600));
    for lisp in [lisp.clone(), limited] {
        assert_stack_exhausted(soon(move || enter_again(&lisp)));
    }
    still_makes_handles(&lisp);
}

/// A list of lists of lists, and so on, decoded from elements that arrive as handles.
struct Nested(#[allow(dead_code, reason = "it is only read")] Vec<Nested>);

impl FromLisp for Nested {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        reader.read().map(Self)
    }
}

/// A list of lists like `Nested`, decoded from elements that Lisp encodes as deeply as it can.
struct Deep(#[allow(dead_code, reason = "it is only read")] Vec<Deep>);

impl FromLisp for Deep {
    const SHAPE: Shape = Shape::DEEP;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        reader.read().map(Self)
    }
}

#[derive(serde::Deserialize)]
struct Node {
    #[allow(dead_code, reason = "it is only read")]
    next: Option<Box<Node>>,
}

/// A newtype that serde reads from any object as itself again, without end.
#[derive(serde::Deserialize)]
struct EndlessNewtype(#[allow(dead_code, reason = "it is only read")] Option<Box<EndlessNewtype>>);

fn objects_without_end_that_are_read() {
    let lisp = boot_with_deep_objects();
    for code in ["*circle*", "*deep*"] {
        let (one, other) = (lisp.clone(), lisp.clone());
        assert_too_deep(soon(move || one.eval::<Nested>(code)));
        assert_too_deep(soon(move || other.eval::<Deep>(code)));
        still_makes_handles(&lisp);
    }
    let (one, other) = (lisp.clone(), lisp.clone());
    assert_too_deep(soon(move || one.eval::<Serde<Node>>("*node*")));
    assert_too_deep(soon(move || other.eval::<Serde<EndlessNewtype>>("1")));
    still_makes_handles(&lisp);
    // A deep object with an end is read.
    let chain = "(let (node) (dotimes (level 1000 node) (setf node (make-node :next node))))";
    let Serde(mut node) = lisp.eval::<Serde<Node>>(chain).unwrap();
    let mut count = 1;
    while let Some(next) = node.next.take() {
        (node, count) = (*next, count + 1);
    }
    assert_eq!(count, 1000);
}

#[test]
fn endless_recursion_that_prints_ends_with_stack_exhausted_error() {
    run_probes(
        "endless_recursion_that_prints_ends_with_stack_exhausted_error",
        &[("endless_recursion_that_prints", endless_recursion_that_prints)],
    );
}

#[test]
fn recursion_through_rust_and_lisp_ends_with_stack_exhausted_error() {
    run_probes(
        "recursion_through_rust_and_lisp_ends_with_stack_exhausted_error",
        &[
            ("rust_function_that_walks_a_circle", rust_function_that_walks_a_circle),
            ("rust_and_lisp_that_call_each_other", rust_and_lisp_that_call_each_other),
            ("result_argument_near_the_end_of_the_stack", result_argument_near_the_end_of_the_stack),
            ("enter_within_enter", enter_within_enter),
            ("objects_without_end_that_are_read", objects_without_end_that_are_read),
        ],
    );
}

/// Returns the lowest address of the mapping that contains `address`. For a Lisp stack, this is the end of its guard page.
fn mapping_start(address: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("it can be read");
    let number = |text: &str| usize::from_str_radix(text, 16).expect("an address");
    let mut ranges = maps.lines().filter_map(|line| line.split(' ').next()?.split_once('-'));
    let range = ranges.find(|(start, end)| (number(start)..number(end)).contains(&address));
    number(range.expect("the stack is mapped").0)
}

/// Calls `work` where fewer than `left` bytes of stack remain above `end`.
#[inline(never)]
fn descend(end: usize, left: usize, work: &mut dyn FnMut()) {
    let here = std::hint::black_box([0_u8; 16]);
    if here.as_ptr().addr() < end + left {
        work();
    } else {
        descend(end, left, work);
    }
    std::hint::black_box(&here);
}

/// A Rust function that has used nearly all of its stack calls Lisp. The process may end, as on any stack overflow in Rust. If
/// the process continues, the call has failed and no Rust frame was skipped.
#[test]
fn call_near_the_end_of_the_stack_fails_and_skips_no_rust_frame() {
    static IS_REFUSED: AtomicBool = AtomicBool::new(false);
    static IS_DROPPED: AtomicBool = AtomicBool::new(false);
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            IS_DROPPED.store(true, Ordering::Relaxed);
        }
    }
    if let Ok(left) = std::env::var(PROBE) {
        let left = left.parse().expect("a number of bytes");
        let lisp = Lisp::builder().heap(1 << 30).control_stack(2 << 20).boot().unwrap();
        let inner = lisp.clone();
        let deep = move || {
            let guard = Guard;
            let end = mapping_start((&raw const guard).addr());
            descend(end, left, &mut || {
                let refused = matches!(inner.eval::<i64>("1"), Err(Error::CannotCall));
                IS_REFUSED.store(refused, Ordering::Relaxed);
            });
            drop(guard);
            1_i64
        };
        lisp.define("host:deep", "Call Lisp with little stack left.", deep).unwrap();
        assert_eq!(lisp.eval::<i64>("(handler-case (host:deep) (storage-condition () 2))").unwrap(), 1);
        let [is_refused, is_dropped] = [&IS_REFUSED, &IS_DROPPED].map(|flag| flag.load(Ordering::Relaxed));
        std::process::exit(if is_refused && is_dropped { 0 } else { 3 });
    }
    let name = "call_near_the_end_of_the_stack_fails_and_skips_no_rust_frame";
    let ends: Vec<(usize, Option<i32>)> = (500..=24_000)
        .step_by(500)
        .collect::<Vec<usize>>()
        .chunks(8)
        .flat_map(|chunk| {
            let children: Vec<_> = chunk.iter().map(|left| (*left, start(name, &left.to_string()))).collect();
            children.into_iter().map(|(left, child)| (left, child.wait_with_output().expect("it ends").status.code()))
        })
        .collect();
    assert!(ends.iter().all(|(_, code)| code.is_none_or(|code| code == 0)), "{ends:?}");
    assert!(ends.iter().any(|(_, code)| code.is_some()), "{ends:?}");
}

/// Lisp code that sends the collecting thread a signal after each garbage collection, before POST-GC, as an
/// interruption of the thread would.
const SIGNAL_AFTER_COLLECTIONS: &str = "
    (defvar *signals* 0)
    (sb-int:encapsulate
     'sb-kernel::post-gc 'signal
     (lambda (post-gc)
       (incf *signals*)
       (sb-alien:alien-funcall
        (sb-alien:extern-alien \"pthread_kill\" (function sb-alien:int sb-alien:unsigned-long sb-alien:int))
        (sb-alien:alien-funcall (sb-alien:extern-alien \"pthread_self\" (function sb-alien:unsigned-long)))
        23)
       (funcall post-gc)))
    (setf (sb-ext:bytes-consed-between-gcs) 1000000)";

fn signal_after_a_collection() {
    let lisp = boot();
    lisp.load_str(SIGNAL_AFTER_COLLECTIONS).unwrap();
    // Collections while Lisp writes an answer.
    let table = "(let ((table (make-hash-table))) (dotimes (n 200000 table) (setf (gethash n table) n)))";
    assert_eq!(lisp.eval::<HashMap<i64, i64>>(table).unwrap().len(), 200_000);
    // Collections in Lisp code, where interrupts are disabled, allowed or enabled.
    for enabled in ["sb-sys:allow-with-interrupts", "sb-sys:with-local-interrupts", "progn"] {
        let code = format!("(sb-sys:without-interrupts ({enabled} (dotimes (n 100) (make-array 100000))))");
        lisp.eval::<()>(&code).unwrap();
    }
    assert!(lisp.eval::<i64>("*signals*").unwrap() > 10);
}

#[test]
fn interruption_during_garbage_collection_is_not_lost() {
    run_probes(
        "interruption_during_garbage_collection_is_not_lost",
        &[("signal_after_a_collection", signal_after_a_collection)],
    );
}

/// Time limits hold on a session thread whatever its readtable and reader variables.
fn limit_under_an_odd_reader() {
    let lisp = boot();
    let inner = lisp.with_timeout(LIMIT);
    lisp.define("host:limited", "Sleep.", move || inner.call::<()>("sleep", (60,)).is_err()).unwrap();
    for set in ["(setf (readtable-case *readtable*) :preserve)", "(setf *read-suppress* t)"] {
        let code = format!("(let ((*readtable* (copy-readtable)) (*read-suppress* nil)) {set} (host:limited))");
        let session = lisp.clone();
        let outcome = soon(move || session.session().evaluate(Evaluation::new(code)));
        assert_eq!(outcome.result.as_ref().unwrap()[0].text.to_lowercase(), "t");
    }
}

/// A value that cannot be converted signals an error in the call, whose handlers can be interrupted.
fn limit_in_a_handler_of_an_unwritable_value() {
    let lisp = boot();
    let circle = "(let ((list (list 1))) (setf (cdr list) list))";
    let inner = lisp.clone();
    lisp.define("host:circle", "Fail.", move || inner.eval::<Vec<i64>>(circle).map(drop)).unwrap();
    let limited = lisp.with_timeout(LIMIT);
    let handled = "(handler-bind ((error (lambda (failure) (declare (ignore failure)) (loop)))) (host:circle))";
    let result = soon(move || limited.eval::<()>(handled));
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    // The program's Rust code gets the error first.
    let inner = lisp.clone();
    lisp.define("host:seen", "True.", move || inner.eval::<Vec<i64>>(circle).is_err()).unwrap();
    assert_eq!(
        soon(move || lisp.eval::<Symbol>("(handler-case (if (host:seen) :seen :not) (error () :missed))")).unwrap(),
        keyword("seen")
    );
}

fn limit_in_a_finalizer() {
    let lisp = boot();
    let (sender, receiver) = mpsc::channel();
    let inner = lisp.with_timeout(LIMIT);
    lisp.define("host:finalize", "Loop.", move || sender.send(inner.eval::<()>("(loop)").is_err()).unwrap()).unwrap();
    let code = "(progn (defun finalize-something () (sb-ext:finalize (list 1) (lambda () (host:finalize))) nil)
                       (loop repeat 5 do (finalize-something)) (sb-ext:gc :full t))";
    lisp.eval::<()>(code).unwrap();
    assert_eq!(receiver.recv_timeout(SOON), Ok(true));
    assert_eq!(soon(move || lisp.eval::<i64>("(+ 1 2)")).unwrap(), 3);
}

/// A timer belongs to the thread that made it, which may be idle when the timer expires.
fn timer_of_an_idle_thread() {
    let lisp = Lisp::builder().heap(1 << 30).threads(1).boot().unwrap();
    let (sender, receiver) = mpsc::channel();
    let inner = lisp.with_timeout(LIMIT);
    lisp.define("host:time", "Loop.", move || sender.send(inner.eval::<()>("(loop)").is_err()).unwrap()).unwrap();
    lisp.eval::<()>("(sb-ext:schedule-timer (sb-ext:make-timer (lambda () (host:time))) 0.05)").unwrap();
    assert_eq!(receiver.recv_timeout(SOON), Ok(true));
    // A timer for a thread that is in a call interrupts the call.
    let limited = soon(move || lisp.eval::<()>("(sb-ext:with-timeout 0.2 (sleep 60))")).unwrap_err();
    assert!(limited.to_string().to_lowercase().contains("timeout"), "{limited}");
}

#[test]
fn time_limits_hold_in_handlers_finalizers_timers_and_with_any_reader_settings() {
    run_probes(
        "time_limits_hold_in_handlers_finalizers_timers_and_with_any_reader_settings",
        &[
            ("limit_under_an_odd_reader", limit_under_an_odd_reader),
            ("limit_in_a_handler_of_an_unwritable_value", limit_in_a_handler_of_an_unwritable_value),
            ("limit_in_a_finalizer", limit_in_a_finalizer),
            ("timer_of_an_idle_thread", timer_of_an_idle_thread),
        ],
    );
}

/// Boots an image in which the function `signal-second` signals an error with the restart `go-on`, which sets
/// `*went-on*`.
fn boot_with_errors_of_interruptions() -> Lisp {
    let lisp = boot();
    lisp.load_str(
        "(defvar *went-on* nil)
         (defun signal-second () (restart-case (error \"second\") (go-on () (setf *went-on* t))))
         (defun interrupt (thread) (sb-thread:interrupt-thread thread #'signal-second))",
    )
    .unwrap();
    lisp
}

/// The message of the condition with which a call failed.
fn message_of<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    let error = result.unwrap_err();
    error.condition().map_or_else(|| error.to_string(), |condition| condition.message().to_owned())
}

/// An interruption that arrives while the handler runs is taken when the handler has returned.
fn interruption_while_a_handler_runs() {
    let lisp = boot_with_errors_of_interruptions();
    lisp.load_str("(defvar *caller* nil) (defun interrupt-caller () (interrupt *caller*))").unwrap();
    let code = "(progn (setf *caller* sb-thread:*current-thread*)
                       (restart-case (error \"first\") (use-value (value) value)))";
    for answers_second in [true, false] {
        let other = lisp.clone();
        let handled = lisp.with_handler(move |condition| {
            if condition.message() == "second" {
                return answers_second.then(|| Restart::named("go-on"));
            }
            let other = other.clone();
            std::thread::spawn(move || other.call::<()>("interrupt-caller", ())).join().unwrap().unwrap();
            Some(Restart::invoke("use-value", 7))
        });
        let result = soon(move || handled.eval::<i64>(code));
        if answers_second {
            assert_eq!(result.unwrap(), 7);
            assert!(lisp.eval::<bool>("*went-on*").unwrap());
        } else {
            assert_eq!(message_of(result), "second");
        }
    }
}

/// An interruption that arrives while an error is described, before the handler is asked.
fn interruption_while_an_error_is_described() {
    let lisp = boot_with_errors_of_interruptions();
    lisp.load_str(
        "(define-condition first-error (error) ()
           (:report (lambda (condition stream)
                      (declare (ignore condition))
                      (interrupt sb-thread:*current-thread*)
                      (write-string \"first\" stream))))",
    )
    .unwrap();
    let code = "(restart-case (error 'first-error) (use-value (value) value))";
    let handled = lisp.with_handler(|condition| match condition.message() {
        "first" => Some(Restart::invoke("use-value", 7)),
        "second" => Some(Restart::named("go-on")),
        _ => None,
    });
    assert_eq!(soon(move || handled.eval::<i64>(code)).unwrap(), 7);
    let plain = lisp.clone();
    assert_eq!(message_of(soon(move || plain.eval::<i64>(code))), "second");
    // The code that is interrupted may handle the error.
    let code = format!("(handler-case {code} (simple-error () 8))");
    assert_eq!(soon(move || lisp.eval::<i64>(&code)).unwrap(), 8);
}

/// An interruption that arrives while Lisp writes the elements of a list for Rust.
fn interruption_while_values_are_written() {
    let lisp = boot_with_errors_of_interruptions();
    lisp.load_str(
        "(sb-ext:unlock-package :sbcl-host/embedding)
         (defvar *interrupts* nil)
         (sb-int:encapsulate 'sbcl-host/embedding::put-list 'interrupt
                             (lambda (put-list &rest arguments)
                               (when (shiftf *interrupts* nil)
                                 (interrupt sb-thread:*current-thread*))
                               (apply put-list arguments)))
         (defun texts () (setf *interrupts* t) (list \"a\" \"b\"))",
    )
    .unwrap();
    let plain = lisp.clone();
    let error = soon(move || plain.call::<Vec<String>>("texts", ())).unwrap_err();
    let condition = error.condition().expect("a condition");
    assert_eq!(condition.message(), "second");
    assert!(condition.backtrace().contains("(SIGNAL-SECOND)"), "{:?}", condition.frames());
    let handled = lisp.with_handler(|condition| (condition.message() == "second").then(|| Restart::named("go-on")));
    assert_eq!(soon(move || handled.call::<Vec<String>>("texts", ())).unwrap(), ["a", "b"]);
    // The error says nothing about the list.
    let plain = lisp.clone();
    let message = message_of(soon(move || plain.call::<Result<Vec<String>, Value>>("texts", ())));
    assert!(message.contains(": second"), "{message}");
    let circle = "(let ((list (list 1))) (setf (cdr list) list))";
    assert!(soon(move || lisp.eval::<Result<Vec<i64>, Value>>(circle)).unwrap().is_err());
}

#[test]
fn error_of_an_interruption_is_no_failure_of_the_code_that_it_interrupts() {
    run_probes(
        "error_of_an_interruption_is_no_failure_of_the_code_that_it_interrupts",
        &[
            ("interruption_while_a_handler_runs", interruption_while_a_handler_runs),
            ("interruption_while_an_error_is_described", interruption_while_an_error_is_described),
            ("interruption_while_values_are_written", interruption_while_values_are_written),
        ],
    );
}

/// A guard that calls its function when it is dropped.
struct CallOnDrop(Option<Box<dyn FnOnce()>>);

impl Drop for CallOnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// Runs `call` in a thread-local destructor of a thread that Lisp starts and that ends. Returns once `call` has begun.
fn call_at_the_end_of_a_thread(lisp: &Lisp, call: impl FnOnce() + Send + 'static) {
    thread_local!(static KEPT: std::cell::RefCell<Option<CallOnDrop>> = const { std::cell::RefCell::new(None) });
    let (begin, begun) = mpsc::channel();
    let kept = Mutex::new(Some(move || {
        begin.send(()).unwrap();
        call();
    }));
    let keep = move || {
        let call = kept.lock().unwrap().take().expect("once");
        KEPT.set(Some(CallOnDrop(Some(Box::new(call)))));
    };
    lisp.define("host:keep", "Keep something by thread.", keep).unwrap();
    lisp.eval::<()>("(sb-thread:join-thread (sb-thread:make-thread (lambda () (host:keep))))").unwrap();
    begun.recv_timeout(SOON).unwrap();
}

fn destructor_that_blocks() {
    let lisp = Lisp::builder().heap(1 << 30).threads(2).boot().unwrap();
    call_at_the_end_of_a_thread(&lisp, || {
        loop {
            std::thread::park();
        }
    });
    let started = lisp.with_timeout(SOON / 2);
    let start = "(sb-thread:join-thread (sb-thread:make-thread (lambda () 7)))";
    for _ in 0..3 {
        let started = started.clone();
        assert_eq!(soon(move || started.eval::<i64>(start)).unwrap(), 7);
    }
    // With both pool threads waiting, the calls below need a spare thread.
    let barrier = Arc::new(Barrier::new(3));
    let inside: Vec<_> = (0..2)
        .map(|_| {
            let (lisp, barrier) = (lisp.clone(), barrier.clone());
            std::thread::spawn(move || {
                lisp.enter(|_| {
                    barrier.wait();
                    barrier.wait();
                    Ok(())
                })
            })
        })
        .collect();
    barrier.wait();
    let limited = lisp.with_timeout(LIMIT);
    assert!(is_timeout(&soon(move || limited.eval::<()>("(loop)"))));
    let other = lisp.clone();
    assert_eq!(soon(move || other.eval::<i64>("(+ 1 2)")).unwrap(), 3);
    barrier.wait();
    inside.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
}

fn destructor_that_calls_lisp() {
    let lisp = Lisp::builder().heap(1 << 30).threads(1).boot().unwrap();
    let (sender, receiver) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let inner = lisp.clone();
    call_at_the_end_of_a_thread(&lisp, move || {
        gone.recv().unwrap();
        sender.send(inner.eval::<i64>("(+ 1 2)")).unwrap();
    });
    let value = soon(move || {
        lisp.enter(move |_| {
            go.send(()).unwrap();
            receiver.recv_timeout(SOON).expect("it is told")
        })
    });
    assert_eq!(value.unwrap(), 3);
}

fn handle_within_a_call_of_another_handle() {
    let lisp = boot();
    let separate = lisp.separate();
    let stop = separate.interrupt_handle();
    let (inside, is_inside) = mpsc::channel();
    lisp.define("host:tell", "Tell.", move || inside.send(()).unwrap()).unwrap();
    std::thread::spawn(move || {
        is_inside.recv().unwrap();
        stop.interrupt();
    });
    let interrupted = soon(move || lisp.enter(move |_| Ok(separate.eval::<()>("(progn (host:tell) (loop))"))));
    assert!(matches!(interrupted, Ok(Err(Error::Interrupted))), "{interrupted:?}");
}

fn waker_of_a_call_that_ended_its_thread() {
    struct EvaluatingWaker(Lisp, mpsc::Sender<Result<i64, Error>>);
    impl Wake for EvaluatingWaker {
        fn wake(self: Arc<Self>) {
            self.1.send(self.0.eval("(+ 1 2)")).unwrap();
        }
    }
    let lisp = boot();
    let (sender, receiver) = mpsc::channel();
    let waker = Waker::from(Arc::new(EvaluatingWaker(lisp.clone(), sender)));
    let mut call = lisp.eval_async::<()>("(progn (sleep 0.1) (sb-thread:abort-thread))");
    assert!(poll(&mut call, &waker).is_pending());
    assert_eq!(receiver.recv_timeout(SOON).unwrap().unwrap(), 3);
}

#[test]
fn thread_local_destructors_and_wakers_at_thread_end_delay_no_call() {
    run_probes(
        "thread_local_destructors_and_wakers_at_thread_end_delay_no_call",
        &[
            ("destructor_that_blocks", destructor_that_blocks),
            ("destructor_that_calls_lisp", destructor_that_calls_lisp),
            ("waker_of_a_call_that_ended_its_thread", waker_of_a_call_that_ended_its_thread),
        ],
    );
}

/// Evaluates `code`, which calls a host function that ends the process. On the thread of that function, a thread-local
/// destructor calls Lisp.
fn exit_in_a_host_function(code: &str) {
    thread_local!(static KEPT: std::cell::RefCell<Option<CallOnDrop>> = const { std::cell::RefCell::new(None) });
    fn call_lisp(lisp: &Lisp) {
        let limited = lisp.with_timeout(SOON);
        assert_eq!(lisp.eval::<i64>("(host:twice 21)").unwrap(), 42);
        assert_eq!(limited.eval::<i64>("(host:twice 21)").unwrap(), 42);
        assert_eq!(lisp.enter(|cx| cx.local_function(|| 7)?.call::<i64>(())).unwrap(), 7);
    }
    let lisp = boot();
    lisp.define("host:twice", "Return twice N.", |n: i64| 2 * n).unwrap();
    let inner = lisp.clone();
    let exit = move || -> i64 {
        let kept = inner.clone();
        // The destructor is registered before the first nested call, which uses the library's thread locals.
        KEPT.set(Some(CallOnDrop(Some(Box::new(move || call_lisp(&kept))))));
        call_lisp(&inner);
        std::process::exit(0)
    };
    lisp.define("host:exit", "End the process.", exit).unwrap();
    let ended = lisp.eval::<()>(code);
    panic!("the process continues: {ended:?}");
}

fn exit_on_a_thread_of_the_program() {
    exit_in_a_host_function("(host:exit)");
}

fn exit_on_a_thread_that_lisp_started() {
    exit_in_a_host_function("(sb-thread:join-thread (sb-thread:make-thread (lambda () (host:exit))))");
}

#[test]
fn thread_local_destructors_may_call_lisp_when_a_host_function_ends_the_process() {
    run_probes(
        "thread_local_destructors_may_call_lisp_when_a_host_function_ends_the_process",
        &[
            ("exit_on_a_thread_of_the_program", exit_on_a_thread_of_the_program),
            ("exit_on_a_thread_that_lisp_started", exit_on_a_thread_that_lisp_started),
        ],
    );
}

#[test]
fn interrupt_handle_ends_a_call_nested_in_another_call() {
    run_probes(
        "interrupt_handle_ends_a_call_nested_in_another_call",
        &[("handle_within_a_call_of_another_handle", handle_within_a_call_of_another_handle)],
    );
}

/// Evaluates endless loops of calls that use C's allocator, with 1,500 time limits of 0.2 to 1.7 ms.
fn limits_in(code: &'static str) {
    let lisp = boot();
    for round in 0..1_500 {
        let limited = lisp.with_timeout(Duration::from_micros(200 + round * 7919 % 1_500));
        let late = soon(move || limited.eval::<()>(code));
        assert!(is_timeout(&late), "{late:?}");
    }
    still_works(&lisp);
}

fn limits_in_probe_file() {
    limits_in("(loop (probe-file \"/usr/lib/os-release\"))");
}

fn limits_in_directory() {
    limits_in("(loop (directory \"/usr/lib/*\"))");
}

/// glob(3) does not return to Lisp before the time limit.
fn limits_in_glob() {
    limits_in(
        "(let ((result (make-array 128 :element-type '(unsigned-byte 8))))
           (sb-sys:with-pinned-objects (result)
             (loop (sb-alien:alien-funcall
                    (sb-alien:extern-alien \"glob\" (function sb-alien:int sb-alien:c-string sb-alien:int
                                                              sb-alien:unsigned-long sb-sys:system-area-pointer))
                    \"/usr/*/*/*\" 0 0 (sb-sys:vector-sap result)))))",
    );
}

/// An interruption must not leave C code that holds a lock of its own, such as malloc's.
#[test]
fn time_limits_in_foreign_code_leave_no_lock_held() {
    run_probes(
        "time_limits_in_foreign_code_leave_no_lock_held",
        &[
            ("limits_in_probe_file", limits_in_probe_file),
            ("limits_in_directory", limits_in_directory),
            ("limits_in_glob", limits_in_glob),
        ],
    );
}

/// Code that tries to replace the handlers of the signals that SBCL itself needs.
fn replaced_signal_handlers() {
    let lisp = boot();
    for signal in ["SIGURG", "SIGALRM"] {
        for handler in [":default", ":ignore", "(lambda (&rest arguments) arguments)"] {
            let replace = format!("(sb-sys:enable-interrupt sb-unix:{signal} {handler})");
            let refused = lisp.eval::<()>(&replace).unwrap_err().to_string();
            assert!(refused.contains(signal) && refused.contains("use another signal"), "{refused}");
        }
    }
    lisp.eval::<()>("(sb-sys:enable-interrupt sb-unix:sigint :default)").unwrap();
    let limited = lisp.with_timeout(LIMIT);
    assert!(is_timeout(&soon(move || limited.eval::<()>("(loop)"))));
    let timer = "(handler-case (sb-ext:with-timeout 0.1 (loop)) (sb-ext:timeout () 7))";
    assert_eq!(lisp.eval::<i64>(timer).unwrap(), 7);
}

#[test]
fn lisp_code_cannot_replace_the_handlers_of_interruptions_and_timers() {
    run_probes(
        "lisp_code_cannot_replace_the_handlers_of_interruptions_and_timers",
        &[("replaced_signal_handlers", replaced_signal_handlers)],
    );
}

/// A list of 80 conses that share structure: written out, it has 2^40 elements.
const SHARED: &str = "(let ((node nil)) (dotimes (level 40 node) (setf node (list node node))))";

/// Checks that a time limit ends the evaluation of `code`, which writes an object that is too large for a message, before the
/// message has reached its maximum size.
fn check_limit_of_large_message(lisp: &Lisp, code: &str) {
    let start = Instant::now();
    let large = lisp.eval::<Serde<IgnoredAny>>(code).map(drop).unwrap_err().to_string();
    assert!(large.contains("too large to be converted"), "{large}");
    let unlimited = start.elapsed();
    let limited = lisp.with_timeout(unlimited / 10);
    let ends_early = || {
        let start = Instant::now();
        is_timeout(&limited.eval::<Serde<IgnoredAny>>(code)) && start.elapsed() < unlimited / 2
    };
    // On a busy machine, an interruption may be late, or the call without a limit may have been the slowest by far.
    assert!((0..5).any(|_| ends_early()), "{unlimited:?}");
    still_works(lisp);
}

fn limit_while_values_are_written() {
    check_limit_of_large_message(&boot(), SHARED);
}

fn limit_while_arguments_are_written() {
    let lisp = boot();
    lisp.define("host:take", "Take an object.", |_: Serde<IgnoredAny>| ()).unwrap();
    check_limit_of_large_message(&lisp, &format!("(host:take {SHARED})"));
}

#[test]
fn time_limit_applies_while_values_and_arguments_are_written() {
    run_probes(
        "time_limit_applies_while_values_and_arguments_are_written",
        &[
            ("limit_while_values_are_written", limit_while_values_are_written),
            ("limit_while_arguments_are_written", limit_while_arguments_are_written),
        ],
    );
}

/// The C function runs for longer than all attempts to interrupt it outside foreign code.
fn long_computation_in_c() {
    let lisp = boot();
    let code = "(let ((bytes (make-array 100000000 :element-type '(unsigned-byte 8))))
                  (sb-sys:with-pinned-objects (bytes)
                    (loop (sb-alien:alien-funcall
                           (sb-alien:extern-alien \"memset\" (function sb-sys:system-area-pointer sb-sys:system-area-pointer
                                                                     sb-alien:int sb-alien:unsigned-long))
                           (sb-sys:vector-sap bytes) 0 100000000))))";
    for _ in 0..5 {
        let limited = lisp.with_timeout(Duration::from_millis(50));
        let late = soon(move || limited.eval::<()>(code));
        assert!(is_timeout(&late), "{late:?}");
    }
    still_works(&lisp);
}

#[test]
fn time_limit_ends_code_that_spends_its_time_in_c() {
    run_probes("time_limit_ends_code_that_spends_its_time_in_c", &[("long_computation_in_c", long_computation_in_c)]);
}

/// A finalizer that does not return delays a save only until the time limit. The finalizer continues afterwards.
fn save_beside_a_waiting_finalizer() {
    let lisp = boot();
    lisp.load_str(
        "(defvar *begun* nil)
         (defvar *ended* nil)
         (defvar *go* nil)
         (sb-ext:finalize (list 1) (lambda () (setf *begun* t) (loop until *go* do (sleep 0.01)) (setf *ended* t)))",
    )
    .unwrap();
    lisp.eval::<()>("(loop until *begun* do (sb-ext:gc :full t) (sleep 0.01))").unwrap();
    let path = std::env::temp_dir().join(format!("sbcl-finalizer-limit-{}", std::process::id()));
    let (limited, target) = (lisp.with_timeout(LIMIT), path.clone());
    let late = soon(move || limited.save(target));
    assert!(is_timeout(&late), "{late:?}");
    lisp.eval::<()>("(progn (setf *go* t) (loop until *ended* do (sleep 0.01)))").unwrap();
    let target = path.clone();
    soon(move || lisp.save(target)).unwrap();
    std::fs::remove_file(path).unwrap();
}

/// A finalizer ends SBCL's finalizer thread. A save starts another one.
fn save_after_a_finalizer_that_ends_its_thread() {
    let lisp = boot();
    let finalized = "(progn (defvar *run* nil) (sb-ext:finalize (list 1) (lambda () (setf *run* t))) nil)";
    lisp.load_str("(sb-ext:finalize (list 1) #'sb-thread:abort-thread)").unwrap();
    let ended =
        "(loop while (sb-thread:thread-alive-p sb-impl::*finalizer-thread*) do (sb-ext:gc :full t) (sleep 0.01))";
    lisp.eval::<()>(ended).unwrap();
    let path = std::env::temp_dir().join(format!("sbcl-finalizer-end-{}", std::process::id()));
    lisp.save(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    lisp.eval::<()>(finalized).unwrap();
    soon(move || lisp.eval::<()>("(loop until *run* do (sb-ext:gc :full t) (sleep 0.01))")).unwrap();
}

#[test]
fn save_waits_for_a_finalizer_within_its_time_limit() {
    run_probes(
        "save_waits_for_a_finalizer_within_its_time_limit",
        &[
            ("save_beside_a_waiting_finalizer", save_beside_a_waiting_finalizer),
            ("save_after_a_finalizer_that_ends_its_thread", save_after_a_finalizer_that_ends_its_thread),
        ],
    );
}

/// The handler of one definition waits for another definition.
fn definition_in_the_handler_of_a_definition() {
    let lisp = boot();
    lisp.load_str("(defpackage :locked (:use) (:export :name) (:lock t))").unwrap();
    let other = lisp.clone();
    let handled = lisp.with_handler(move |_| {
        let other = other.clone();
        soon(move || other.define("host:other", "Return 3.", || 3)).unwrap();
        Some(Restart::named("continue"))
    });
    soon(move || handled.define("locked:name", "Return 2.", || 2)).unwrap();
    assert_eq!(lisp.eval::<(i64, i64)>("(values (host:other) (locked:name))").unwrap(), (3, 2));
}

#[test]
fn handler_of_a_definition_may_wait_for_another_definition() {
    run_probes(
        "handler_of_a_definition_may_wait_for_another_definition",
        &[("definition_in_the_handler_of_a_definition", definition_in_the_handler_of_a_definition)],
    );
}

/// Calls `work` with about 200 bytes more of the stack in use for each of `levels`.
#[inline(never)]
fn deeper(levels: usize, work: &mut dyn FnMut()) {
    let space = std::hint::black_box([0_u8; 128]);
    if levels == 0 {
        work()
    } else {
        deeper(levels - 1, work)
    }
    std::hint::black_box(&space);
}

/// Defines a function again and again, with less and less stack left.
fn definitions_near_the_end_of_the_stack() {
    static LAST: AtomicI64 = AtomicI64::new(-1);
    static FAILURES: AtomicI64 = AtomicI64::new(0);
    static LEVEL: AtomicI64 = AtomicI64::new(0);
    let lisp = builder().control_stack(2 << 20).boot().unwrap();
    lisp.define("host:answer", "Answer.", || -1_i64).unwrap();
    let inner = lisp.clone();
    let recurse = move || -> Result<i64, Error> {
        let result = inner.eval::<i64>("(1+ (host:recurse))");
        // The innermost levels have too little stack for a definition, the outer levels have enough.
        let level = LEVEL.fetch_add(1, Ordering::Relaxed);
        for padding in (0..if level < 60 { 200 } else { 0 }).step_by(8) {
            deeper(padding, &mut || {
                let value = level * 1000 + padding as i64;
                match inner.define("host:answer", "Answer.", move || value) {
                    Ok(()) => LAST.store(value, Ordering::Relaxed),
                    Err(_) => _ = FAILURES.fetch_add(1, Ordering::Relaxed),
                }
            });
        }
        result
    };
    lisp.define("host:recurse", "Recurse.", recurse).unwrap();
    assert!(lisp.eval::<i64>("(host:recurse)").is_err());
    let (last, failures) = (LAST.load(Ordering::Relaxed), FAILURES.load(Ordering::Relaxed));
    assert!(last >= 0 && failures > 0, "{last} {failures}");
    assert_eq!(lisp.eval::<i64>("(host:answer)").unwrap(), last);
}

/// Defines a function again and again, with less and less of the binding stack left.
fn definitions_near_the_end_of_the_binding_stack() {
    // Calls on other threads might have other numbers of bindings.
    let lisp = builder().threads(1).boot().unwrap();
    let inner = lisp.clone();
    let redefine = move |value: i64| inner.define("host:answer", "Answer.", move || value).is_ok();
    lisp.define("host:redefine", "Define host:answer.", redefine).unwrap();
    let defines = |bindings: i64| {
        let variables = format!("(make-list {bindings} :initial-element '*padding*)");
        lisp.eval::<bool>(&format!("(progv {variables} '() (host:redefine {bindings}))")).unwrap_or(false)
    };
    assert!(defines(0));
    // The binding stack has 65,536 entries.
    let (mut most, mut too_many) = (0, 58_500);
    assert!(!defines(too_many));
    while too_many - most > 1 {
        let middle = (most + too_many) / 2;
        if defines(middle) {
            most = middle;
        } else {
            too_many = middle;
        }
    }
    assert!(defines(most));
    for bindings in too_many..too_many + 40 {
        assert!(!defines(bindings));
        assert_eq!(lisp.eval::<i64>("(host:answer)").unwrap(), most, "{bindings} bindings");
    }
}

/// The handles to be dropped, in batches of a thousand.
static BATCHES: Mutex<Vec<Vec<Value>>> = Mutex::new(Vec::new());

fn fill_batches(lisp: &Lisp, count: usize) {
    let batch = || lisp.eval::<Vec<Value>>("(loop repeat 1000 collect (list :dropped))").unwrap();
    *BATCHES.lock().unwrap() = std::iter::repeat_with(batch).take(count).collect();
}

fn drop_batch() {
    drop(BATCHES.lock().unwrap().pop());
}

/// Drops the remaining batches, and waits until Lisp has released all handles of all batches.
fn wait_until_batches_are_released(lisp: &Lisp) {
    BATCHES.lock().unwrap().clear();
    let count = "(count '(:dropped) sbcl-host/embedding::**handle-table** :test #'equal)";
    let end = Instant::now() + Duration::from_secs(20);
    while lisp.eval::<i64>(count).unwrap() > 0 {
        assert!(Instant::now() < end, "{} handles are never released", lisp.eval::<i64>(count).unwrap());
    }
}

/// Drops handles again and again on the way back from a recursion, where more and more of the control stack is left. Where a
/// call without arguments is just possible, Lisp refuses a call with a thousand arguments.
fn handles_dropped_near_the_end_of_the_control_stack() {
    static LEVEL: AtomicI64 = AtomicI64::new(0);
    let lisp = builder().control_stack(2 << 20).threads(1).boot().unwrap();
    let inner = lisp.clone();
    let recurse = move || {
        let result = inner.eval::<()>("(host:recurse)");
        if LEVEL.fetch_add(1, Ordering::Relaxed) < 60 {
            drop_batch();
            let _ = inner.eval::<()>("1");
        }
        result
    };
    lisp.define("host:recurse", "Recurse, then drop a thousand handles and call Lisp.", recurse).unwrap();
    fill_batches(&lisp, 60);
    assert!(lisp.eval::<()>("(host:recurse)").is_err());
    wait_until_batches_are_released(&lisp);
}

#[test]
fn handles_dropped_near_the_end_of_the_control_stack_are_released_later() {
    run_probes(
        "handles_dropped_near_the_end_of_the_control_stack_are_released_later",
        &[("handles_dropped_near_the_end_of_the_control_stack", handles_dropped_near_the_end_of_the_control_stack)],
    );
}

/// Drops handles in a host function that Lisp can just call, where too little of the binding stack is left for a call in the
/// other direction.
fn handles_dropped_near_the_end_of_the_binding_stack() {
    static ENTRIES: AtomicI64 = AtomicI64::new(0);
    // Calls on other threads might have other numbers of bindings.
    let lisp = builder().threads(1).boot().unwrap();
    let inner = lisp.clone();
    let drop_and_call = move || {
        ENTRIES.fetch_add(1, Ordering::Relaxed);
        drop_batch();
        inner.eval::<()>("1")
    };
    lisp.define("host:drop-handles", "Drop a thousand handles and call Lisp.", drop_and_call).unwrap();
    let is_entered = |bindings: i64| {
        let before = ENTRIES.load(Ordering::Relaxed);
        let variables = format!("(make-list {bindings} :initial-element '*padding*)");
        let _ = lisp.eval::<()>(&format!("(progv {variables} '() (host:drop-handles))"));
        ENTRIES.load(Ordering::Relaxed) > before
    };
    assert!(is_entered(0));
    // The binding stack has 65,536 entries.
    let (mut most, mut too_many) = (0, 58_500);
    assert!(!is_entered(too_many));
    while too_many - most > 1 {
        let middle = (most + too_many) / 2;
        if is_entered(middle) {
            most = middle;
        } else {
            too_many = middle;
        }
    }
    for bindings in most - 20..=most {
        fill_batches(&lisp, 1);
        assert!(is_entered(bindings), "{bindings} bindings");
    }
    wait_until_batches_are_released(&lisp);
}

#[test]
fn handles_dropped_near_the_end_of_the_binding_stack_are_released_later() {
    run_probes(
        "handles_dropped_near_the_end_of_the_binding_stack_are_released_later",
        &[("handles_dropped_near_the_end_of_the_binding_stack", handles_dropped_near_the_end_of_the_binding_stack)],
    );
}

/// Drops handles while Lisp has no room in the heap for a list of arguments.
fn handles_dropped_while_the_heap_is_full() {
    let lisp = builder().threads(1).boot().unwrap();
    fill_batches(&lisp, 3);
    lisp.load_str(
        "(sb-int:encapsulate 'sbcl-host/embedding::read-objects 'full
                             (lambda (read &rest arguments)
                               (declare (ignore read arguments))
                               (error 'storage-condition)))",
    )
    .unwrap();
    wait_until_batches_are_released(&lisp);
}

#[test]
fn handles_dropped_while_the_heap_is_full_are_released() {
    run_probes(
        "handles_dropped_while_the_heap_is_full_are_released",
        &[("handles_dropped_while_the_heap_is_full", handles_dropped_while_the_heap_is_full)],
    );
}

#[test]
fn definition_that_fails_for_lack_of_stack_keeps_the_old_function() {
    run_probes(
        "definition_that_fails_for_lack_of_stack_keeps_the_old_function",
        &[
            ("definitions_near_the_end_of_the_stack", definitions_near_the_end_of_the_stack),
            ("definitions_near_the_end_of_the_binding_stack", definitions_near_the_end_of_the_binding_stack),
        ],
    );
}
