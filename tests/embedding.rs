//! The library in a host program: one boot per process, and the host keeps its signal handlers and float arithmetic.
//!
//! A test that may end the process runs in a child: this test program, started again for that test alone.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use sbcl::{
    BootError, Cx, Error, Evaluation, ImageConfig, Limits, Lisp, Outcome, RestartDesignator, Session, Symbol,
    TimeLimit, Value, keyword,
};

static SESSION: LazyLock<Session> =
    LazyLock::new(|| Session::start(&ImageConfig::default(), Limits::default()).expect("SBCL boots"));

const CHILD: &str = "SBCL_TEST_CHILD";

fn value(code: &str) -> String {
    let outcome = SESSION.evaluate(Evaluation::new(code));
    outcome.result.as_ref().unwrap_or_else(|error| panic!("{code}: {error:?}"))[0].text.clone()
}

/// Runs the test `name` of this program in a child and returns the child's exit status.
fn run_in_child(name: &str) -> ExitStatus {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(CHILD, name)
        .output()
        .expect("it starts");
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{name}: {:?}\n{out}\n{errors}", output.status);
    output.status
}

fn is_child(name: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == name)
}

#[test]
fn second_session_start_fails_with_already_booted() {
    assert_eq!(value("(+ 1 2)"), "3");
    let again = Session::start(&ImageConfig::default(), Limits::default());
    assert!(matches!(again, Err(BootError::AlreadyBooted)), "{again:?}");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn heap_size_out_of_range_is_refused_before_boot() {
    let config = ImageConfig { heap: 1, ..ImageConfig::default() };
    let error = Session::start(&config, Limits::default()).unwrap_err();
    assert!(error.to_string().contains("heap 1 is out of range"), "{error}");
}

#[test]
fn missing_core_is_an_error_and_another_core_can_be_booted() {
    let name = "missing_core_is_an_error_and_another_core_can_be_booted";
    if is_child(name) {
        let config = ImageConfig { core_dir: Some("no/such/directory".into()), ..ImageConfig::default() };
        let error = Session::start(&config, Limits::default()).unwrap_err().to_string();
        assert!(error.contains("no/such/directory/sbcl.core"), "{error}");
        assert_eq!(value("(+ 1 2)"), "3");
        return;
    }
    assert!(run_in_child(name).success());
}

/// Fails to boot a file that is not a core. The failure is found after libsbcl has been loaded.
fn fail_to_boot_an_invalid_core() {
    let directory = Directory::new("invalid-core");
    std::fs::write(directory.0.join("sbcl.core"), "not a core").expect("it is written");
    let config = ImageConfig { core_dir: Some(directory.0.clone()), ..ImageConfig::default() };
    let error = Session::start(&config, Limits::default()).unwrap_err().to_string();
    assert!(error.contains("not an SBCL core"), "{error}");
}

#[test]
fn failed_boots_leave_no_copies_of_libsbcl_in_memory() {
    let name = "failed_boots_leave_no_copies_of_libsbcl_in_memory";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let copies = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("it can be read").flatten();
        let files = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
        files.filter(|file| file.to_string_lossy().contains("memfd:libsbcl.so")).count()
    };
    for _ in 0..3 {
        fail_to_boot_an_invalid_core();
        assert_eq!(copies(), 1, "the library that is loaded");
    }
    assert_eq!(value("(+ 1 2)"), "3");
    assert_eq!(copies(), 1);
}

/// A subscriber that calls a function with each event.
struct EventSubscriber<F>(F);

impl<F: Fn(&tracing::Event<'_>) + Send + Sync + 'static> tracing::Subscriber for EventSubscriber<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        (self.0)(event);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn tracing_subscriber_may_evaluate_when_a_record_is_of_unknown_kind() {
    let name = "tracing_subscriber_may_evaluate_when_a_record_is_of_unknown_kind";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let (sender, receiver) = mpsc::channel();
    let events = sender.clone();
    let subscriber = EventSubscriber(move |_: &tracing::Event<'_>| drop(events.send(value("(+ 1 2)"))));
    tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
    let code = "(progn (sbcl-host::event sbcl-host::*job-id* (sbcl-host::event-code :record) 0 \"no-such-kind\") 7)";
    std::thread::spawn(move || sender.send(value(code)));
    let mut values = [(); 2].map(|()| receiver.recv_timeout(Duration::from_secs(60)).expect("the evaluation ends"));
    values.sort();
    assert_eq!(values, ["3", "7"]);
}

/// The message of a `tracing` event.
#[derive(Default)]
struct Message(String);

impl tracing::field::Visit for Message {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

#[test]
fn the_end_of_a_thread_that_fills_the_heap_is_a_tracing_event() {
    let name = "the_end_of_a_thread_that_fills_the_heap_is_a_tracing_event";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let (sender, receiver) = mpsc::channel();
    let subscriber = EventSubscriber(move |event: &tracing::Event<'_>| {
        let mut message = Message::default();
        event.record(&mut message);
        let _ = sender.send(message.0);
    });
    tracing::subscriber::set_global_default(subscriber).expect("no other subscriber");
    let lisp = Lisp::builder().heap(256 << 20).boot().expect("SBCL boots");
    let code = r#"(progn (sb-thread:make-thread (lambda () (let ((kept '())) (loop (push (make-array 1000) kept))))
                                                 :name "filler")
                         nil)"#;
    lisp.eval::<()>(code).expect("it starts");
    let message = loop {
        let message = receiver.recv_timeout(Duration::from_secs(60)).expect("an event");
        if message.contains("heap") {
            break message;
        }
    };
    assert!(message.contains("filler"), "{message}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("Lisp works"), 3);
}

/// A stream that boots or finds the image when it is dropped, and reports whether that succeeded.
struct BootsOnDrop(mpsc::Sender<bool>);

impl std::io::Write for BootsOnDrop {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for BootsOnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(Lisp::get_or_boot().is_ok());
    }
}

#[test]
fn stream_of_a_failed_boot_may_use_the_image_when_dropped() {
    let name = "stream_of_a_failed_boot_may_use_the_image_when_dropped";
    if is_child(name) {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || Lisp::builder().core("no/such/core").stdout(BootsOnDrop(sender)).boot().is_err());
        let found = receiver.recv_timeout(Duration::from_secs(60));
        std::process::exit(if found == Ok(true) { 0 } else { 1 });
    }
    assert!(run_in_child(name).success());
}

#[test]
fn stream_whose_thread_cannot_be_started_may_boot_when_dropped() {
    let name = "stream_whose_thread_cannot_be_started_may_boot_when_dropped";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let (sender, receiver) = mpsc::channel();
    let (go, booting) = started_thread(move || Lisp::builder().stdout(BootsOnDrop(sender)).boot());
    leave_no_room_for_threads(true);
    go.send(()).expect("it listens");
    receiver.recv_timeout(Duration::from_secs(60)).expect("the destructor does not wait for the failing boot");
    assert!(matches!(booting.join().expect("it does not panic"), Err(Error::Io(_))));
}

#[test]
fn boot_whose_own_thread_cannot_be_started_can_be_tried_again() {
    let name = "boot_whose_own_thread_cannot_be_started_can_be_tried_again";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    // This boot loads libsbcl and starts a helper thread, so the next boot needs less memory.
    fail_to_boot_an_invalid_core();
    // The address space that a boot requires is reserved here: the limit then allows a boot, and leaves room for the stack
    // of the clock's thread, but not for the stack of 16 MiB of the thread that initialises SBCL.
    let size = 2 << 30;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the mapping is new, and nothing uses its memory.
    let reserved = unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(reserved, libc::MAP_FAILED);
    limit_memory(Some(12 << 20));
    let config = ImageConfig { heap: 128 << 20, control_stack: 8 << 20, ..ImageConfig::default() };
    let refused = Session::start(&config, Limits::default());
    limit_memory(None);
    // SAFETY: nothing uses the memory of the mapping.
    assert_eq!(unsafe { libc::munmap(reserved, size) }, 0);
    assert!(matches!(refused, Err(BootError::Os { what: "start a thread", .. })), "{refused:?}");
    assert_eq!(value("(+ 1 2)"), "3");
}

/// So many values or arguments, as a list on the stack, would reach past the guard pages.
#[test]
fn values_and_arguments_larger_than_the_stack_do_not_kill_the_process() {
    let name = "values_and_arguments_larger_than_the_stack_do_not_kill_the_process";
    if is_child(name) {
        let lisp = Lisp::builder().control_stack(2 << 20).threads(4).boot().expect("it boots");
        for count in [100_000, 130_000, 180_000, 240_000] {
            let numbers = vec![1_i64; count];
            for function in ["values", "list", "every"] {
                match lisp.call::<Value>(function, &numbers) {
                    Ok(_) | Err(Error::Condition(_)) => {}
                    other => panic!("{function} of {count}: {other:?}"),
                }
            }
            let values = lisp.eval::<i64>(&format!("(values-list (make-list {count} :initial-element 4))"));
            assert!(matches!(values, Ok(4) | Err(Error::Condition(_))), "{count}: {values:?}");
            lisp.eval::<()>("(gc)").expect("a collection");
        }
        assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a number"), 3);
        return;
    }
    assert!(run_in_child(name).success());
}

#[test]
fn arguments_larger_than_the_heap_do_not_kill_the_process() {
    let name = "arguments_larger_than_the_heap_do_not_kill_the_process";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(128 << 20).boot().expect("it boots");
    // The list of the arguments may fit in the heap, but not the list that the function makes of them.
    for count in [400_000, 1_600_000, 2_000_000, 2_400_000, 3_000_000] {
        for function in ["list", "vector"] {
            match lisp.call::<Value>(function, &vec![1_i64; count]) {
                Ok(value) => assert!(count < 3_000_000 && value.len().expect("a length") == count),
                Err(error) => {
                    let condition = error.condition().unwrap_or_else(|| panic!("{function} of {count}: {error}"));
                    assert!(count > 400_000 && condition.is("storage-condition"), "{function} of {count}: {condition}");
                }
            }
            let collected = lisp.eval::<()>("(gc)");
            assert!(matches!(collected, Ok(()) | Err(Error::Condition(_))), "{collected:?}");
        }
    }
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a number"), 3);
}

#[test]
fn arguments_larger_than_the_free_pages_of_the_heap_signal_a_condition() {
    let name = "arguments_larger_than_the_free_pages_of_the_heap_signal_a_condition";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let size = 512 << 20;
    let lisp = Lisp::builder().heap(size).control_stack(1 << 30).boot().expect("it boots");
    lisp.load_str("(defvar *kept* '())").expect("it is loaded");
    // Each array leaves most of its fifth page empty. Collections do not copy arrays of this size.
    let code = "(loop repeat 200 do (push (make-array 131088 :element-type '(unsigned-byte 8)) *kept*))
                (sb-ext:gc)
                (values (sbcl-host::heap-use) (sb-kernel:dynamic-usage))";
    let (mut pages, mut objects) = (0, 0);
    while pages < size / 5 * 3 {
        (pages, objects) = lisp.eval::<(u64, u64)>(code).expect("two numbers");
    }
    assert!(pages - objects > 24 << 20, "{pages} {objects}");
    // An argument takes 16 bytes in the heap, and a function with &REST arguments may need 48 more. The arguments would have
    // room if pages had no empty parts.
    let count = (size - (pages + objects) / 2) / 64;
    let error = lisp.call::<Value>("car", &vec![1_i64; count as usize]).expect_err("no room").to_string();
    assert!(error.contains("The heap is nearly used up"), "{error}");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a number"), 3);
}

#[test]
fn reading_a_list_as_large_elements_does_not_reserve_memory_for_all_of_them() {
    let name = "reading_a_list_as_large_elements_does_not_reserve_memory_for_all_of_them";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(1).boot().expect("SBCL boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a number"), 3);
    // The elements of the requested type would take 512 MiB.
    limit_memory(Some(128 << 20));
    let error = lisp.eval::<Vec<[f64; 1024]>>("(make-list 65536)").expect_err("the elements are nil");
    assert!(matches!(error, Error::Conversion(_)), "{error:?}");
}

#[test]
fn cleanup_time_is_clamped_to_one_day() {
    let name = "cleanup_time_is_clamped_to_one_day";
    if is_child(name) {
        let lisp = Lisp::builder().cleanup(Duration::MAX).boot().expect("it boots");
        assert_eq!(lisp.session().limits().cleanup(), Duration::from_secs(86_400));
        let limited = lisp.with_timeout(Duration::from_millis(20));
        assert!(matches!(limited.eval::<()>("(unwind-protect (loop) (list 1))"), Err(Error::Timeout { .. })));
        return;
    }
    assert!(run_in_child(name).success());
}

#[test]
fn segfault_in_a_host_thread_kills_the_process_with_sigsegv() {
    let name = "segfault_in_a_host_thread_kills_the_process_with_sigsegv";
    if is_child(name) {
        assert_eq!(value("(+ 1 2)"), "3");
        // SAFETY: none. The fault is what this test provokes; it ends this process.
        unsafe { std::hint::black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1) };
        unreachable!("a fault does not return");
    }
    assert_eq!(run_in_child(name).signal(), Some(libc::SIGSEGV));
}

#[test]
fn segfault_of_host_code_on_a_lisp_thread_kills_the_process() {
    let name = "segfault_of_host_code_on_a_lisp_thread_kills_the_process";
    if is_child(name) {
        SESSION.submit(Evaluation::new("(+ 1 2)"), |_| {
            // SAFETY: none. The fault is what this test provokes; it ends this process.
            unsafe { std::hint::black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1) };
        });
        std::thread::sleep(Duration::from_secs(20));
        std::process::exit(0);
    }
    assert_eq!(run_in_child(name).signal(), Some(libc::SIGSEGV));
}

/// SBCL would take the signal for a fault of the instruction that it interrupts, and signal an error there.
#[cfg(target_os = "linux")]
#[test]
fn sigsegv_that_another_process_sends_during_lisp_code_ends_the_process() {
    const FILE: &str = "SBCL_TEST_FILE";
    let name = "sigsegv_that_another_process_sends_during_lisp_code_ends_the_process";
    if is_child(name) {
        let code = r#"(with-open-file (file (sb-posix:getenv "SBCL_TEST_FILE") :direction :output)
                        (format file "~D~%" (sb-thread::thread-os-tid sb-thread:*current-thread*)))
                      (defvar *spin* 1) (loop (setf *spin* 2))"#;
        let timeout = TimeLimit::Of(Duration::from_secs(60));
        let _ = SESSION.evaluate(Evaluation { timeout, ..Evaluation::new(code) });
        std::process::exit(0);
    }
    let file = std::env::temp_dir().join(format!("sbcl-spinning-{}", std::process::id()));
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1"])
        .env(CHILD, name)
        .env(FILE, &file)
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let thread = loop {
        assert_eq!(child.try_wait().expect("its status"), None);
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        if let Some(line) = text.strip_suffix('\n') {
            break line.parse::<libc::c_long>().expect("a thread's number");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    std::fs::remove_file(&file).expect("it exists");
    // SAFETY: tgkill(2) has no preconditions.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::c_long::from(child.id()), thread, libc::SIGSEGV) };
    assert_eq!(sent, 0);
    assert_eq!(child.wait().expect("its status").signal(), Some(libc::SIGSEGV));
}

#[test]
fn memory_fault_in_lisp_signals_memory_fault_error() {
    let outcome = SESSION.evaluate(Evaluation::new("(sb-sys:sap-ref-8 (sb-sys:int-sap 0) 0)"));
    assert_eq!(outcome.result.as_ref().unwrap_err().kind, "SB-SYS:MEMORY-FAULT-ERROR");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn host_float_arithmetic_on_a_lisp_thread_does_not_trap() {
    let (send, receive) = mpsc::channel();
    SESSION.submit(Evaluation::new("(/ 1d0 3d0)"), move |_| {
        let zero = std::hint::black_box(0.0_f64);
        send.send((1.0 / zero, zero / zero, std::hint::black_box(f64::MAX) * 2.0)).expect("somebody waits");
    });
    let (infinity, nan, overflow) = receive.recv_timeout(Duration::from_secs(20)).expect("a reply");
    assert!(infinity.is_infinite() && nan.is_nan() && overflow.is_infinite());
    // Lisp code still traps on float errors.
    let outcome = SESSION.evaluate(Evaluation::new("(/ 1d0 (- 1d0 1d0))"));
    assert_eq!(outcome.result.as_ref().unwrap_err().kind, "DIVISION-BY-ZERO");
}

#[test]
fn panic_in_a_reply_callback_does_not_reach_lisp() {
    SESSION.submit(Evaluation::new("1"), |_| panic!("on purpose: in a reply"));
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn panic_in_a_reply_does_not_prevent_later_await_stop_callbacks() {
    let session = SESSION.connect();
    session.submit(Evaluation::new("(sleep 0.5)"), |_| panic!("on purpose: before others are told"));
    let id = session.evaluation(None).expect("it was submitted").id;
    let (send, over) = mpsc::channel();
    session.await_stop(id, move || send.send(()).expect("somebody waits")).expect("it is known");
    assert_eq!(over.recv_timeout(Duration::from_secs(20)), Ok(()));
}

#[test]
fn panic_in_reply_of_cancelled_refused_or_inspection_job_ends_no_thread() {
    let (started, running) = mpsc::channel();
    // The replies of a cancelled job and of an abort with nothing held both run where the thread picks its next job.
    SESSION.submit(Evaluation::new("(sleep 0.2)"), move |_| started.send(()).expect("somebody waits"));
    let withdrawn = SESSION.submit(Evaluation::new("1"), |_| panic!("on purpose: withdrawn"));
    SESSION.abort_held(|_| panic!("on purpose: refused"));
    SESSION.describe_symbol("CAR", None, false, |_| panic!("on purpose: an inspection"));
    let cancelled = std::panic::catch_unwind(|| SESSION.cancel(withdrawn));
    assert!(cancelled.is_ok());
    running.recv_timeout(Duration::from_secs(20)).expect("a reply");
    let (send, described) = mpsc::channel();
    SESSION.describe_symbol("CDR", None, false, move |reply| send.send(reply.is_ok()).expect("somebody waits"));
    assert_eq!(described.recv_timeout(Duration::from_secs(20)), Ok(true));
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn queued_abort_held_locals_and_restart_frame_can_be_cancelled() {
    let session = SESSION.connect();
    let blocker = session.submit(Evaluation::new("(loop)"), |_| ());
    let (send, answers) = mpsc::channel();
    let (aborted, locals, continued) = (send.clone(), send.clone(), send);
    let queued = [
        session.abort_held(move |reply| aborted.send(reply.unwrap_err().to_string()).expect("somebody waits")),
        session.held_locals(0, 1, move |reply| locals.send(reply.unwrap_err().to_string()).expect("somebody waits")),
        session.restart_frame(0, move |reply| {
            let outcome = reply.expect("an outcome of its own");
            continued.send(outcome.result.as_ref().unwrap_err().kind.clone()).expect("somebody waits");
        }),
    ];
    let expected =
        ["The request was cancelled before it finished.", "The request was cancelled before it finished.", "CANCELLED"];
    for (job, expected) in queued.into_iter().zip(expected) {
        session.cancel(job);
        assert_eq!(answers.recv_timeout(Duration::from_secs(20)).expect("a reply"), expected);
    }
    assert!(session.last_error().is_none());
    session.cancel(blocker);
    assert_eq!(session.evaluate(Evaluation::new("(+ 1 2)")).result.as_ref().expect("it succeeds")[0].text, "3");
}

#[test]
fn timeout_of_duration_max_is_accepted() {
    let evaluation = Evaluation { timeout: TimeLimit::Of(Duration::MAX), ..Evaluation::new("(+ 1 2)") };
    assert_eq!(SESSION.evaluate(evaluation).result.as_ref().expect("it succeeds")[0].text, "3");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn sigint_sigterm_and_sighup_still_kill_the_host_after_boot() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let name = "sigint_sigterm_and_sighup_still_kill_the_host_after_boot";
        if is_child(name) {
            let signal = std::env::var("SIGNAL").expect("set").parse().expect("a number");
            // A process that a shell starts in the background ignores SIGINT.
            // SAFETY: SIG_DFL installs no handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            assert_eq!(value("(+ 1 2)"), "3");
            // SAFETY: kill(2) on this process has no preconditions.
            unsafe { libc::kill(libc::getpid(), signal) };
            std::thread::sleep(Duration::from_secs(20));
            std::process::exit(0);
        }
        let status = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name, "--test-threads=1"])
            .env(CHILD, name)
            .env("SIGNAL", signal.to_string())
            .output()
            .expect("it starts")
            .status;
        assert_eq!(status.signal(), Some(signal));
    }
}

#[test]
fn host_threads_keep_their_signal_mask_after_child_processes_end() {
    assert_eq!(value("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/true\" nil))"), "0");
    let mask = |when: &str| {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("proc");
        let line = status.lines().find(|line| line.starts_with("SigBlk:")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no mask {when}"))
    };
    let before = mask("before");
    // SIGCHLD may reach any thread, slightly before or after the child is reaped.
    for _ in 0..20 {
        assert!(Command::new("true").status().expect("it runs").success());
        assert_eq!(mask("after a child has ended"), before);
    }
}

#[test]
fn signals_during_boot_do_not_change_host_signal_masks() {
    let name = "signals_during_boot_do_not_change_host_signal_masks";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let is_booted = AtomicBool::new(false);
    let lisp = std::thread::scope(|scope| {
        // SIGCHLD, as when children end: any thread may receive it, and the main thread does while it waits.
        scope.spawn(|| {
            while !is_booted.load(Ordering::Relaxed) {
                // SAFETY: kill(2) takes plain numbers; an unhandled SIGCHLD is ignored.
                assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGCHLD) }, 0);
                std::thread::yield_now();
            }
        });
        let lisp = Lisp::boot().expect("SBCL boots");
        is_booted.store(true, Ordering::Relaxed);
        lisp
    });
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a sum"), 3);
    let mask = |status: String| status.lines().find(|line| line.starts_with("SigBlk:")).map(str::to_owned);
    for thread in ["/proc/self/status", "/proc/thread-self/status"] {
        let status = std::fs::read_to_string(thread).expect("it can be read");
        assert_eq!(mask(status).as_deref(), Some("SigBlk:\t0000000000000000"), "{thread}");
    }
}

/// If `none` is true, limits the address space of this process so that it is too small for the stacks of another thread;
/// otherwise removes the limit.
fn leave_no_room_for_threads(none: bool) {
    limit_memory(none.then_some(1 << 20));
}

/// Limits the address space of this process to `more` bytes beyond what it has now. `None` removes the limit.
fn limit_memory(more: Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").expect("it can be read");
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB"));
    let kilobytes: u64 = size.and_then(|size| size.parse().ok()).expect("a size");
    let bytes = more.map_or(libc::RLIM_INFINITY, |more| (kilobytes << 10) + more);
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: setrlimit(2) reads a valid `rlimit`.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}

/// Starts a thread that calls `task` when the sender sends. The thread already runs, and has all memory a start needs, when
/// this function returns.
fn started_thread<T: Send + 'static>(
    task: impl FnOnce() -> T + Send + 'static,
) -> (mpsc::Sender<()>, std::thread::JoinHandle<T>) {
    let (go, gone) = mpsc::channel();
    let (started, has_started) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        started.send(()).expect("it is awaited");
        gone.recv().expect("it is told");
        task()
    });
    has_started.recv().expect("the thread starts");
    (go, thread)
}

#[test]
fn nested_call_fails_when_no_thread_can_be_started() {
    let name = "nested_call_fails_when_no_thread_can_be_started";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(1).spare_threads(2).boot().expect("SBCL boots");
    let (answer, answered) = mpsc::channel();
    let caller = lisp.clone();
    let (go, _) = started_thread(move || answer.send(caller.eval::<i64>("7")));
    let nested = lisp.enter(move |_| {
        leave_no_room_for_threads(true);
        go.send(()).expect("it listens");
        let nested = answered.recv_timeout(Duration::from_secs(30));
        leave_no_room_for_threads(false);
        nested.expect("an answer")
    });
    assert!(matches!(nested, Err(Error::NoThread)), "{nested:?}");
    assert_eq!(lisp.eval::<i64>("8").expect("the thread is free again"), 8);
}

#[test]
fn ended_thread_that_cannot_be_replaced_serves_the_next_call() {
    let name = "ended_thread_that_cannot_be_replaced_serves_the_next_call";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(1).spare_threads(2).boot().expect("SBCL boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
    leave_no_room_for_threads(true);
    let ended = lisp.eval::<()>("(sb-thread:abort-thread)");
    assert!(matches!(ended, Err(Error::Aborted)), "{ended:?}");
    let next = lisp.with_timeout(Duration::from_secs(30)).eval::<i64>("(+ 1 2)");
    leave_no_room_for_threads(false);
    assert_eq!(next.expect("the thread continues"), 3);
}

#[test]
fn call_in_a_forked_child_fails_with_error_forked() {
    let name = "call_in_a_forked_child_fails_with_error_forked";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
    assert!(holds_in_forked_child(|| {
        let is_forked = |outcome: &Outcome| outcome.result.as_ref().is_err_and(|error| error.kind == "FORKED");
        let (sender, replied) = mpsc::channel();
        lisp.session().submit(Evaluation::new("(+ 1 2)"), move |outcome| _ = sender.send(is_forked(&outcome)));
        matches!(lisp.eval::<i64>("(+ 1 2)"), Err(Error::Forked))
            && is_forked(&lisp.session().evaluate(Evaluation::new("(+ 1 2)")))
            && replied.try_recv() == Ok(true)
    }));
    let begun = lisp.eval_async::<i64>("(sleep 600)");
    assert!(holds_in_forked_child(|| {
        let mut begun = std::pin::pin!(begun);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        matches!(begun.as_mut().poll(&mut context), std::task::Poll::Ready(Err(Error::Forked)))
    }));
    assert!(holds_in_forked_child(|| {
        let (sender, replied) = mpsc::channel();
        lisp.session().reset(move |_| _ = sender.send(()));
        replied.recv().is_err()
    }));
    assert!(holds_in_forked_child(|| {
        let session = lisp.session();
        let (sender, dropped) = mpsc::channel();
        let [first, second, third, fourth] = [(); 4].map(|()| SessionUser(session.clone(), sender.clone()));
        session.abort_held(move |_| drop(first));
        session.invoke_restart(&RestartDesignator::Number(1), "", move |_| drop(second));
        session.held_locals(0, 1, move |_| drop(third));
        session.eval_in_frame(0, "1", TimeLimit::Default, move |_| drop(fourth));
        drop(sender);
        dropped.iter().count() == 4
    }));
}

/// A value that uses the session when it is dropped, and then sends a message.
struct SessionUser(Session, mpsc::Sender<()>);

impl Drop for SessionUser {
    fn drop(&mut self) {
        let _ = self.0.is_held();
        let _ = self.1.send(());
    }
}

#[test]
fn lisp_thread_that_forked_cannot_call_lisp_in_the_child() {
    let name = "lisp_thread_that_forked_cannot_call_lisp_in_the_child";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let refused = lisp.enter(|cx| {
        Ok(holds_in_forked_child(|| {
            matches!(cx.eval::<i64>("(+ 1 2)"), Err(Error::Forked))
                && matches!(lisp.eval::<i64>("(+ 1 2)"), Err(Error::Forked))
        }))
    });
    assert!(refused.expect("the process forks"));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn child_that_a_lisp_thread_has_forked_ends_when_rust_returns_to_lisp() {
    let name = "child_that_a_lisp_thread_has_forked_ends_when_rust_returns_to_lisp";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let value = lisp.eval::<Value>("(list 1)").expect("a value");
    let child = lisp.enter(move |_| {
        // SAFETY: the child only returns to the library, which ends it.
        let child = unsafe { libc::fork() };
        drop(value);
        Ok(child)
    });
    assert_eq!(exit_status(child.expect("the process forks")), Some(0));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

#[test]
fn child_that_a_host_function_has_forked_does_not_continue_the_lisp_code() {
    let name = "child_that_a_host_function_has_forked_does_not_continue_the_lisp_code";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let fork = || {
        // SAFETY: the child only returns to the library, which ends it.
        unsafe { libc::fork() }
    };
    lisp.define("host:fork", "Fork this process.", fork).expect("it is defined");
    let exit = "(sb-alien:alien-funcall (sb-alien:extern-alien \"_exit\" (function sb-alien:void sb-alien:int)) 7)";
    let child = lisp.eval::<i32>(&format!("(let ((child (host:fork))) (when (zerop child) {exit}) child)"));
    assert_eq!(exit_status(child.expect("the process forks")), Some(0));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

/// A waker that forks this process and sends the number of the child.
struct ForkingWaker(mpsc::Sender<libc::pid_t>);

impl Wake for ForkingWaker {
    fn wake(self: Arc<Self>) {
        // SAFETY: the child only returns to the library, which ends it.
        let child = unsafe { libc::fork() };
        if child != 0 {
            self.0.send(child).expect("the test waits");
        }
    }
}

#[test]
fn child_that_a_waker_has_forked_on_a_lisp_thread_ends() {
    let name = "child_that_a_waker_has_forked_on_a_lisp_thread_ends";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let mut call = std::pin::pin!(lisp.eval_async::<()>("(sleep 0.2)"));
    let (sender, forked) = mpsc::channel();
    let waker = Waker::from(Arc::new(ForkingWaker(sender)));
    assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    let child = forked.recv().expect("the call ends and wakes the task");
    assert_eq!(exit_status(child), Some(0));
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}

/// Forks this process, and returns true if `check` returns true in the child within 60 seconds.
fn holds_in_forked_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only calls the library, which makes no use of other threads, and _exit(2).
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status = if check() { 42 } else { 1 };
        // SAFETY: _exit(2) takes a number.
        unsafe { libc::_exit(status) };
    }
    exit_status(child) == Some(42)
}

/// Waits for the end of a child process and returns its exit status. Kills the child after 60 seconds, and returns `None` if
/// a signal ended the child.
fn exit_status(child: libc::pid_t) -> Option<i32> {
    let end = Instant::now() + Duration::from_secs(60);
    let mut status = 0;
    // SAFETY: `status` is writable.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > end {
            // SAFETY: kill(2) takes numbers.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}

#[test]
fn spare_threads_serve_nested_calls_while_all_lisp_threads_wait() {
    let name = "spare_threads_serve_nested_calls_while_all_lisp_threads_wait";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(2).spare_threads(3).boot().expect("SBCL boots");
    // Each level waits in Rust for a host thread that calls Lisp.
    fn nested(lisp: &Lisp, levels: u32) -> Result<u32, Error> {
        if levels == 0 {
            return lisp.eval("7");
        }
        lisp.enter(|_| {
            let lisp = lisp.clone();
            std::thread::spawn(move || nested(&lisp, levels - 1)).join().expect("it does not panic")
        })
    }
    for _ in 0..3 {
        assert_eq!(nested(&lisp, 4).expect("a fifth thread"), 7);
    }
    // Nested calls through a host function.
    let inner = lisp.clone();
    lisp.define("host:elsewhere", "Evaluate CODE on another thread.", move |code: String| {
        let inner = inner.clone();
        std::thread::spawn(move || inner.eval::<Value>(&code)).join().expect("it does not panic")
    })
    .expect("it is defined");
    let deep = "(host:elsewhere \"(host:elsewhere \\\"(host:elsewhere \\\\\\\"(+ 1 2)\\\\\\\")\\\")\")";
    assert_eq!(lisp.eval::<i64>(deep).expect("a value"), 3);
    // More levels than spare threads allow.
    assert!(matches!(nested(&lisp, 5), Err(Error::NoThread)));
    assert_eq!(nested(&lisp, 4).expect("they are free again"), 7);
    // Threads that are busy in Lisp, not waiting in Rust, do not cause spare threads to start.
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let lisp = lisp.clone();
            std::thread::spawn(move || {
                lisp.eval::<i64>(
                    "(defvar *inside* (list 0))
                     (prog1 (sb-ext:atomic-incf (car *inside*)) (sleep 0.05) (sb-ext:atomic-decf (car *inside*)))",
                )
            })
        })
        .collect();
    let most = threads.into_iter().map(|thread| thread.join().expect("it ends").expect("a number")).max();
    assert!(most < Some(4), "{most:?}");
}

#[test]
fn blocking_thread_local_destructor_of_a_spare_thread_blocks_no_call() {
    let name = "blocking_thread_local_destructor_of_a_spare_thread_blocks_no_call";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    struct Blocks;
    impl Drop for Blocks {
        fn drop(&mut self) {
            loop {
                std::thread::park();
            }
        }
    }
    thread_local!(static BLOCKS: RefCell<Option<Blocks>> = const { RefCell::new(None) });
    let lisp = Lisp::builder().threads(1).boot().expect("SBCL boots");
    // Runs on a spare thread, because the only pool thread waits for it.
    let elsewhere = |work: fn(&Cx) -> Result<i64, Error>| {
        lisp.enter(|_| {
            std::thread::spawn({
                let lisp = lisp.clone();
                move || lisp.enter(work)
            })
            .join()
            .expect("no panic")
        })
    };
    let count = "(length (sb-thread:list-all-threads))";
    assert_eq!(
        elsewhere(|_| {
            BLOCKS.set(Some(Blocks));
            Ok(1)
        })
        .expect("a spare thread"),
        1
    );
    let threads = lisp.eval::<usize>(count).expect("a number");
    for _ in 0..3 {
        assert_eq!(elsewhere(|cx| cx.eval("7")).expect("a spare thread"), 7);
        assert_eq!(lisp.eval::<i64>("(sb-thread:join-thread (sb-thread:make-thread (lambda () 8)))").expect("8"), 8);
        let limited = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop)");
        assert!(matches!(limited, Err(Error::Timeout { .. })));
    }
    assert_eq!(lisp.eval::<usize>(count).expect("a number"), threads);
}

/// A waker that sends a message and then panics, as that of a broken runtime might.
struct PanickingWaker(mpsc::SyncSender<()>);

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        self.0.send(()).expect("it is listened to");
        panic!("on purpose: a waker");
    }
}

#[test]
fn panicking_waker_ends_no_thread() {
    let name = "panicking_waker_ends_no_thread";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().boot().expect("SBCL boots");
    let (wake, woken) = mpsc::sync_channel(1);
    let waker = Arc::new(PanickingWaker(wake)).into();
    let mut threads = HashSet::new();
    for _ in 0..20 {
        let (go, gone) = mpsc::channel::<()>();
        let mut call = Box::pin(lisp.enter_async(move |_| Ok((gone.recv().is_ok(), std::thread::current().id()))));
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        go.send(()).expect("it waits");
        woken.recv().expect("it is woken");
        let Poll::Ready(Ok((true, thread))) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("it is not over");
        };
        threads.insert(thread);
    }
    // Spare threads may have started for calls that had to wait.
    assert!(threads.len() < 10, "{threads:?}");
}

#[test]
fn interrupted_timed_out_or_dropped_call_in_the_queue_never_starts() {
    let name = "interrupted_timed_out_or_dropped_call_in_the_queue_never_starts";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(1).boot().expect("SBCL boots");
    let (sender, receiver) = mpsc::channel();
    lisp.define("host:tell", "Tell of N.", move |n: i64| sender.send(n).expect("it is heard")).expect("it is defined");
    let (busy, waiting) = (lisp.separate(), lisp.separate());
    let begun = std::env::temp_dir().join(format!("sbcl-busy-{}", std::process::id()));
    let running = busy.eval_async::<()>(&format!("(close (open {begun:?} :direction :output)) (loop)"));
    while std::fs::remove_file(&begun).is_err() {
        std::thread::yield_now();
    }
    // The only thread is busy in Lisp, which starts no spare thread, so other calls stay in the queue.
    let interrupted = waiting.eval_async::<()>("(host:tell 2)");
    waiting.interrupt_handle().interrupt();
    assert!(matches!(smol::block_on(interrupted), Err(Error::Interrupted)));
    let late = lisp.with_timeout(Duration::from_millis(20)).eval::<()>("(host:tell 3)");
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    drop(waiting.eval_async::<()>("(host:tell 4)"));
    let last = waiting.eval_async::<i64>("(host:tell 5) 7");
    busy.interrupt_handle().interrupt();
    assert!(matches!(smol::block_on(running), Err(Error::Interrupted)));
    assert_eq!(smol::block_on(last).expect("a value"), 7);
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [5]);
}

#[test]
fn ten_thousand_special_variables_can_be_bound() {
    let name = "ten_thousand_special_variables_can_be_bound";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let bind = "(progv (loop for n below 10000 collect (intern (format nil \"PARAMETER-~D\" n)))
                       (loop for n below 10000 collect n)
                  (symbol-value (intern \"PARAMETER-9999\")))";
    assert_eq!(lisp.eval::<i64>(bind).expect("they are bound"), 9_999);
}

#[test]
fn calls_that_start_too_many_threads_get_an_error() {
    let name = "calls_that_start_too_many_threads_get_an_error";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(128 << 20).threads(2).boot().expect("SBCL boots");
    let start = "(let ((end (sb-thread:make-semaphore)))
                   (loop (sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore end)))))";
    let error = lisp.eval::<()>(start).expect_err("too many");
    assert!(error.to_string().contains("Thread limit reached: 256 threads."), "{error}");
    // The program's own threads do not count: one ends itself, and another replaces it.
    assert!(lisp.eval::<()>("(sb-thread:abort-thread)").is_err());
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("Lisp still works"), 3);
}

#[test]
fn exhausting_the_binding_or_alien_stack_again_in_a_handler_ends_only_the_call() {
    let name = "exhausting_the_binding_or_alien_stack_again_in_a_handler_ends_only_the_call";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    lisp.load_str(
        "(defvar *bound* 0)
         (defun bind (n) (let ((*bound* n)) (1+ (bind (1+ n)))))
         (defun allocate (n)
           (sb-alien:with-alien ((x (array char 1000))) (setf (sb-alien:deref x 0) 1) (1+ (allocate (1+ n)))))
         (defun again (f)
           (handler-bind ((storage-condition (lambda (c) (declare (ignore c)) (again f)))) (funcall f 0)))",
    )
    .expect("it is loaded");
    // Unwinding never skips frames of the program.
    let (depth, inner) = (Arc::new(AtomicUsize::new(0)), lisp.clone());
    let counter = depth.clone();
    lisp.define("host:bind", "Call BIND-AND-CALL.", move |function: Value| {
        counter.fetch_add(1, Ordering::SeqCst);
        let result = inner.call::<()>("bind-and-call", (function,));
        counter.fetch_sub(1, Ordering::SeqCst);
        result
    })
    .expect("it is defined");
    lisp.load_str(
        "(defun bind-and-call (f)
           (handler-bind ((storage-condition (lambda (c) (declare (ignore c)) (again f)))) (host:bind f)))",
    )
    .expect("it is loaded");
    for function in ["bind", "allocate"] {
        lisp.eval::<()>(&format!("(bind-and-call #'{function})")).expect_err("endless");
        assert_eq!(depth.load(Ordering::SeqCst), 0);
        for _ in 0..3 {
            let error = lisp.eval::<()>(&format!("({function} 0)")).expect_err("endless");
            assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{error}");
            lisp.eval::<()>(&format!("(again #'{function})")).expect_err("endless");
            lisp.eval::<()>(&format!("(unwind-protect (again #'{function}) (again #'{function}))"))
                .expect_err("endless");
            assert_eq!(lisp.eval::<i64>("(progn (sb-ext:gc) *bound*)").expect("Lisp still works"), 0);
        }
    }
}

#[test]
fn heap_exhaustion_is_a_storage_condition_and_the_process_survives() {
    let name = "heap_exhaustion_is_a_storage_condition_and_the_process_survives";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(512 << 20).threads(2).boot().expect("SBCL boots");
    for code in [
        "(let ((all '())) (loop (push (list 1 2 3) all)))",
        "(let ((table (make-hash-table))) (loop for n from 0 do (setf (gethash n table) (make-string 10))))",
        "(ignore-errors (loop for all = (list (make-string 1000)) then (cons (make-string 1000) all)))",
        "(make-array 1000000000)",
        "(let ((all '())) (handler-case (loop (push (make-array 100000) all)) (error () 1)))",
        // Each array takes two pages of the heap.
        "(let ((all '())) (loop (push (make-array (floor sb-c:+backend-page-bytes+ 8)) all)))",
    ] {
        let error = lisp.eval::<()>(code).expect_err(code);
        assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{code}: {error}");
        assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("Lisp still works"), 3);
    }
    // Within `enter`, and on both threads at once.
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let lisp = lisp.clone();
            std::thread::spawn(move || lisp.enter(|cx| cx.eval::<()>("(let ((all '())) (loop (push (list 1 2) all)))")))
        })
        .collect();
    for thread in threads {
        let error = thread.join().expect("it ends").expect_err("an error");
        assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{error}");
    }
    // Objects that are kept on purpose leave enough room for the code that releases them.
    lisp.eval::<()>("(defvar *kept* (loop repeat 100 collect (make-array 100000))) (sb-ext:gc :full t)")
        .expect("it fits");
    assert_eq!(lisp.eval::<i64>("(length (make-array 1000000))").expect("there is room"), 1_000_000);
    lisp.eval::<()>("(setf *kept* nil)").expect("it is let go of");
}

#[test]
fn heap_exhaustion_by_lists_from_a_host_function_is_a_storage_condition() {
    let name = "heap_exhaustion_by_lists_from_a_host_function_is_a_storage_condition";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(256 << 20).threads(2).boot().expect("SBCL boots");
    lisp.define("host:list", "Return a list.", || vec![1_i64; 1000]).expect("it is defined");
    lisp.define("host:long", "Return a long list.", || vec![1_i64; 30_000_000]).expect("it is defined");
    for code in ["(let ((all '())) (loop (push (host:list) all)))", "(length (host:long))"] {
        let error = lisp.eval::<()>(code).expect_err(code);
        assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{code}: {error}");
        // On a busy machine the garbage collections of a full heap may take longer than the default limit.
        let unlimited = Evaluation { timeout: TimeLimit::None, ..Evaluation::new(code) };
        let outcome = lisp.session().evaluate(unlimited);
        let error = outcome.result.as_ref().expect_err(code);
        assert_eq!(error.kind, "HEAP-EXHAUSTED", "{code}");
        assert_eq!(lisp.eval::<i64>("(length (host:list))").expect("Lisp still works"), 1000);
    }
}

#[test]
fn printing_a_circular_list_without_a_limit_does_not_fill_the_heap() {
    let name = "printing_a_circular_list_without_a_limit_does_not_fill_the_heap";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(256 << 20).threads(1).boot().expect("SBCL boots");
    let list: Value = lisp.eval("'#1=(1 2 . #1#)").expect("a list");
    assert_eq!(list.print(usize::MAX).expect("a substitute"), "#<unprintable CONS>");
    // The text is garbage at once, so that the next collection does not end the call.
    let text = lisp.enter(|cx| {
        let text = cx.print(&list, usize::MAX)?;
        cx.eval::<()>("(gc)")?;
        Ok(text)
    });
    assert_eq!(text.expect("a substitute"), "#<unprintable CONS>");
    assert_eq!(list.print(10).expect("its beginning"), "(1 2 1 2 1…");
}

/// A log writer that collects its text in memory.
#[cfg(feature = "mcp")]
#[derive(Clone, Default)]
struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

#[cfg(feature = "mcp")]
impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panics").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(feature = "mcp")]
#[test]
fn trace_output_sends_lisp_output_and_warnings_to_tracing() {
    let name = "trace_output_sends_lisp_output_and_warnings_to_tracing";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).without_time().init();
    let lisp = Lisp::builder().trace_output().boot().expect("SBCL boots");
    lisp.eval::<()>(r#"(format t "one λ~%and ")"#).expect("it prints");
    lisp.eval::<()>(r#"(format t "a half~%~%")"#).expect("it prints");
    lisp.eval::<()>(r#"(format *error-output* "to stderr~%")"#).expect("it prints");
    lisp.eval::<()>(r#"(warn "by hand: ~a" 7)"#).expect("it warns");
    lisp.load_str("(defun unwarned () (undefined-in-tracing))").expect("it loads");
    lisp.eval::<()>(r#"(princ (make-string 9000 :initial-element #\x))"#).expect("it prints");
    let text = String::from_utf8(log.0.lock().expect("nobody panics").clone()).expect("text");
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("sbcl") && !line.contains("undefined")).collect();
    let (long, short) = lines.split_last().expect("lines");
    assert_eq!(
        short,
        [
            " INFO sbcl::stdout: one λ",
            " INFO sbcl::stdout: and a half",
            " INFO sbcl::stdout: ",
            " WARN sbcl::stderr: to stderr",
            " WARN sbcl: simple-warning: by hand: 7"
        ]
    );
    assert!(long.starts_with(" INFO sbcl::stdout: xxx") && long.len() > 8192, "{long}");
    assert!(
        text.contains(
            " WARN sbcl: sb-int:simple-style-warning: undefined function: COMMON-LISP-USER::UNDEFINED-IN-TRACING"
        ),
        "{text}"
    );
}

#[cfg(all(feature = "mcp", target_arch = "x86_64"))]
#[test]
fn notice_near_the_end_of_the_stack_is_traced_on_another_thread() {
    let name = "notice_near_the_end_of_the_stack_is_traced_on_another_thread";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let (sender, threads) = mpsc::channel();
    let writer = move || {
        let thread = std::thread::current();
        let _ = sender.send(thread.name() == Some("sbcl-helper"));
        std::io::sink()
    };
    tracing_subscriber::fmt().with_writer(writer).init();
    let lisp = Lisp::builder().control_stack(2 << 20).boot().expect("SBCL boots");
    lisp.load_str(
        "(defun notice-at-end (room)
           (if (< (sbcl-host::control-stack-room) room)
               (sbcl-host::push-notice \"near the end\")
               (not (notice-at-end room))))",
    )
    .expect("it is loaded");
    for (code, on_helper) in [
        ("(sbcl-host::push-notice \"far from the end\")", false),
        ("(notice-at-end (+ (* 3 sb-c:+backend-page-bytes+) 65536))", true),
    ] {
        lisp.eval::<()>(code).expect("it gives a notice");
        assert_eq!(threads.recv_timeout(Duration::from_secs(60)), Ok(on_helper), "{code}");
    }
}

/// The number of signals that the host's handlers have received, by kind.
static FAULTS: AtomicUsize = AtomicUsize::new(0);
static CHILDREN: AtomicUsize = AtomicUsize::new(0);
static PIPES: AtomicUsize = AtomicUsize::new(0);
static SAMPLES: AtomicUsize = AtomicUsize::new(0);
/// The page on which the host faults on purpose; the handler makes it writable.
static FAULT_PAGE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    match signal {
        libc::SIGCHLD => _ = CHILDREN.fetch_add(1, Ordering::SeqCst),
        libc::SIGPIPE => _ = PIPES.fetch_add(1, Ordering::SeqCst),
        libc::SIGPROF => _ = SAMPLES.fetch_add(1, Ordering::SeqCst),
        _ => {
            FAULTS.fetch_add(1, Ordering::SeqCst);
            let page = FAULT_PAGE.load(Ordering::SeqCst);
            // SAFETY: `info` comes from the kernel, and the test has mapped `page`. A fault at any other address is a
            // real one and ends the process.
            unsafe {
                if (*info).si_addr() as usize & !4095 != page {
                    libc::_exit(99);
                }
                libc::mprotect(page as *mut libc::c_void, 4096, libc::PROT_READ | libc::PROT_WRITE);
            }
        }
    }
}

/// Requests a SIGPROF each time this process has used `time` of processor time. Zero turns sampling off.
fn sample_every(time: Duration) {
    let time = libc::timeval { tv_sec: 0, tv_usec: time.subsec_micros().into() };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: setitimer(2) reads a valid timer.
    let set = unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

#[test]
fn host_signal_handlers_and_tokio_runtime_keep_working_after_boot() {
    let name = "host_signal_handlers_and_tokio_runtime_keep_working_after_boot";
    if !is_child(name) {
        let status = run_in_child(name);
        assert!(status.success(), "{status:?}");
        return;
    }
    for signal in [libc::SIGSEGV, libc::SIGCHLD, libc::SIGPIPE, libc::SIGPROF] {
        // SAFETY: the action is valid, and its handler is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = count_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    // The host handles its own faults and continues, on its own threads and on Lisp threads.
    // SAFETY: a fresh mapping.
    let page = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    } as usize;
    FAULT_PAGE.store(page, Ordering::SeqCst);
    let touch = move || {
        // SAFETY: the page belongs to this test, nothing else uses it, and the handler makes it writable.
        unsafe {
            libc::mprotect(page as *mut libc::c_void, 4096, libc::PROT_NONE);
            std::ptr::with_exposed_provenance_mut::<u8>(page).write_volatile(1);
        }
    };
    touch();
    lisp.define("host:touch", "Cause a fault and continue.", touch).expect("it is defined");
    lisp.eval::<()>("(host:touch)").expect("Lisp still works");
    assert_eq!(FAULTS.load(Ordering::SeqCst), 2);
    // Lisp handles a fault in Lisp code.
    let fault = lisp.eval::<()>("(sb-sys:sap-ref-8 (sb-sys:int-sap 0) 0)").expect_err("an error");
    assert!(fault.condition().is_some_and(|condition| condition.is("sb-sys:memory-fault-error")), "{fault}");
    assert_eq!(FAULTS.load(Ordering::SeqCst), 2);
    // Lisp's stack and heap guards rely on faults, too.
    assert!(lisp.eval::<()>("(labels ((deep (n) (1+ (deep n)))) (deep 0))").is_err());

    // SAFETY: the descriptors belong to this test.
    unsafe {
        let mut ends = [0; 2];
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        libc::close(ends[0]);
        assert_eq!(libc::write(ends[1], c"x".as_ptr().cast(), 1), -1);
        libc::close(ends[1]);
    }
    assert_eq!(PIPES.load(Ordering::SeqCst), 1);

    // Children of the host, of Lisp, and of a tokio runtime, which installs its own SIGCHLD handler below.
    assert!(Command::new("true").status().expect("it runs").success());
    let seen = || CHILDREN.load(Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(20);
    while seen() == 0 && Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(seen() > 0);
    assert_eq!(
        lisp.eval::<i64>("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/true\" nil))").expect("it runs"),
        0
    );
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let before = seen();
    runtime.block_on(async {
        for _ in 0..5 {
            let (status, sum, exit) = tokio::join!(
                tokio::process::Command::new("true").status(),
                lisp.eval_async::<i64>("(progn (sb-ext:gc) (+ 1 2))"),
                lisp.eval_async::<i64>("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/false\" nil))"),
            );
            assert!(status.expect("it runs").success());
            assert_eq!((sum.expect("a sum"), exit.expect("it runs")), (3, 1));
            let late = tokio::time::timeout(Duration::from_millis(20), lisp.eval_async::<()>("(loop)")).await;
            assert!(late.is_err());
        }
    });
    assert!(seen() > before, "the handler of before the runtime is still called");
    // A profiler samples the threads that use the processor, here Lisp code that allocates and collects garbage.
    sample_every(Duration::from_millis(1));
    let before = SAMPLES.load(Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(20);
    while SAMPLES.load(Ordering::SeqCst) < before + 50 && Instant::now() < end {
        let sum = lisp.eval::<i64>("(loop for list = (loop for n below 10000 collect n) repeat 20 sum (length list))");
        assert_eq!(sum.expect("a sum"), 200_000);
        lisp.eval::<()>("(sb-ext:gc)").expect("Lisp still works");
    }
    sample_every(Duration::ZERO);
    assert!(SAMPLES.load(Ordering::SeqCst) >= before + 50, "{} samples", SAMPLES.load(Ordering::SeqCst) - before);
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("Lisp still works"), 3);
}

/// The handlers that [`call_previous_handler`] replaced, by signal.
static PREVIOUS_HANDLERS: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

extern "C" fn call_previous_handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS_HANDLERS[signal as usize].load(Ordering::SeqCst);
    // SAFETY: the test has checked that the previous handler takes three arguments. The arguments come from the kernel.
    unsafe {
        let previous: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            std::mem::transmute(previous);
        previous(signal, info, context);
    }
}

/// The handlers of signal-hook block no other signals, but SBCL ends the process if its own handlers are called without
/// its signals blocked.
#[test]
fn lisp_handles_signals_behind_a_handler_installed_after_boot_that_blocks_no_signals() {
    let name = "lisp_handles_signals_behind_a_handler_installed_after_boot_that_blocks_no_signals";
    if !is_child(name) {
        let status = run_in_child(name);
        assert!(status.success(), "{status:?}");
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    for signal in [libc::SIGCHLD, libc::SIGALRM, libc::SIGUSR2] {
        // SAFETY: the actions are valid, and the new handler is async-signal-safe.
        unsafe {
            let (mut previous, mut action): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut previous);
            assert_ne!(previous.sa_flags & libc::SA_SIGINFO, 0);
            PREVIOUS_HANDLERS[signal as usize].store(previous.sa_sigaction, Ordering::SeqCst);
            action.sa_sigaction = call_previous_handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    let status = lisp.eval::<i64>("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/false\" nil))");
    assert_eq!(status.expect("it runs"), 1);
    let timer = "(let ((expired (sb-thread:make-semaphore)))
                   (sb-ext:schedule-timer (sb-ext:make-timer (lambda () (sb-thread:signal-semaphore expired))) 0.01)
                   (sb-thread:wait-on-semaphore expired :timeout 60))";
    assert!(lisp.eval::<bool>(timer).expect("it returns"), "the timer has not expired");
    // Each collection stops the other thread.
    let collections =
        "(let* ((end nil) (thread (sb-thread:make-thread (lambda () (loop until end do (make-list 1000))))))
           (loop repeat 20 do (sb-ext:gc))
           (setf end t)
           (sb-thread:join-thread thread))";
    lisp.eval::<()>(collections).expect("the thread ends");
}

/// Returns the signals that this thread blocks.
fn blocked_signals() -> Vec<libc::c_int> {
    let mut mask = std::mem::MaybeUninit::zeroed();
    // SAFETY: `mask` is writable, every bit pattern is a valid set, and a null pointer for the new mask is allowed.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
        (1..=64).filter(|signal| libc::sigismember(mask.as_ptr(), *signal) == 1).collect()
    }
}

/// SBCL's own handler would block most signals permanently on the thread of the program that receives the signal.
#[test]
fn handler_that_lisp_code_installs_runs_in_lisp_and_leaves_the_receiving_threads_mask() {
    let name = "handler_that_lisp_code_installs_runs_in_lisp_and_leaves_the_receiving_threads_mask";
    if !is_child(name) {
        let status = run_in_child(name);
        assert!(status.success(), "{status:?}");
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    lisp.load_str("(defvar *received* (sb-thread:make-semaphore))").expect("it is loaded");
    let blocked = blocked_signals();
    // The last signal has the largest number that there is.
    for signal in [libc::SIGINT, libc::SIGUSR1, libc::SIGWINCH, 64] {
        let enable = format!(
            "(sb-sys:enable-interrupt {signal} (lambda (&rest arguments)
                                                 (declare (ignore arguments))
                                                 (sb-thread:signal-semaphore *received*)))"
        );
        lisp.eval::<()>(&enable).expect("it is installed");
        // SAFETY: pthread_kill(3) sends this thread a signal that has a handler.
        let send = move || unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
        let is_received = || lisp.eval::<bool>("(sb-thread:wait-on-semaphore *received* :timeout 60)");
        assert_eq!((send(), blocked_signals()), (0, blocked.clone()), "signal {signal}");
        assert!(is_received().expect("it returns"), "signal {signal}");
        let on_lisp_thread = lisp.enter(move |_| {
            let before = blocked_signals();
            Ok(send() == 0 && blocked_signals() == before)
        });
        assert!(on_lisp_thread.expect("it returns") && is_received().expect("it returns"), "signal {signal}");
    }
}

/// The first access to a library's thread local may allocate, and the thread that the signal interrupts may be inside
/// the allocator.
#[test]
fn signal_to_an_allocating_host_thread_does_not_deadlock() {
    use std::os::unix::thread::JoinHandleExt;
    // SBCL's own handler is the only one for SIGPROF.
    value("(progn (require :sb-sprof) (eval (read-from-string \"(sb-sprof:start-profiling :mode :time)\")) t)");
    for signal in [libc::SIGCHLD, libc::SIGALRM, libc::SIGPROF, libc::SIGUSR2].into_iter().cycle().take(400) {
        let (rounds, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (rounds, over) = (rounds.clone(), over.clone());
            std::thread::spawn(move || {
                // The allocator serves its per-thread cache without a lock. These boxes empty the cache, and the vectors
                // below are too large for it.
                let _small: Vec<_> = (0_u64..64).map(|number| std::hint::black_box(Box::new(number))).collect();
                while !over.load(Ordering::Relaxed) {
                    std::hint::black_box(Vec::<u8>::with_capacity(3000));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let end = Instant::now() + Duration::from_secs(20);
        let wait_for_progress = |from: usize| {
            while rounds.load(Ordering::Relaxed) <= from + 100 {
                assert!(Instant::now() < end, "the thread that got signal {signal} is stuck");
                std::thread::yield_now();
            }
        };
        wait_for_progress(0);
        // SAFETY: the thread is not joined yet.
        assert_eq!(unsafe { libc::pthread_kill(thread.as_pthread_t(), signal) }, 0);
        wait_for_progress(rounds.load(Ordering::Relaxed) + 1000);
        over.store(true, Ordering::Relaxed);
        thread.join().expect("it ends");
    }
    value("(progn (sb-sprof:stop-profiling) t)");
}

/// A host that receives its signals with sigwait(3) or signalfd(2) blocks all signals before it starts any thread. The kernel
/// ends a process in which a thread with blocked fault signals causes a fault.
#[test]
fn lisp_handles_faults_after_a_boot_with_all_signals_blocked() {
    let name = "lisp_handles_faults_after_a_boot_with_all_signals_blocked";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let mut all = std::mem::MaybeUninit::uninit();
    // SAFETY: `all` is writable, sigfillset(3) initialises it, and a null pointer for the old mask is allowed.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let recursion = "(labels ((f () (+ 1 (f)))) (f))";
    for code in ["(car (first '(1)))", "(funcall 'no-such-function)", "(apply '/ '(1.0 0.0))", recursion] {
        assert!(matches!(lisp.eval::<()>(code), Err(Error::Condition(_))), "{code}");
        let handled = format!("(handler-case {code} (serious-condition () 7))");
        let in_thread = format!("(sb-thread:join-thread (sb-thread:make-thread (lambda () {handled})))");
        assert_eq!(lisp.eval::<i64>(&in_thread).expect("the thread ends"), 7, "{code}");
    }
    lisp.eval::<()>("(sb-thread:join-thread (sb-thread:make-thread (lambda () (gc :full t))))").expect("it ends");
}

/// SBCL ends the process when only some of its deferrable signals, such as SIGTERM and SIGURG, are blocked in Lisp code.
#[test]
fn lisp_threads_have_the_programs_signal_mask_except_for_the_signals_that_sbcl_needs() {
    let name = "lisp_threads_have_the_programs_signal_mask_except_for_the_signals_that_sbcl_needs";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let signals = [libc::SIGUSR1, libc::SIGTERM, libc::SIGHUP, libc::SIGURG, libc::SIGUSR2];
    let mut blocked = std::mem::MaybeUninit::uninit();
    // SAFETY: `blocked` is writable, sigemptyset(3) initialises it, and a null pointer for the old mask is allowed.
    unsafe {
        libc::sigemptyset(blocked.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(blocked.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), std::ptr::null_mut());
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let are_blocked = lisp.enter(move |_| {
        let mut mask = std::mem::MaybeUninit::zeroed();
        // SAFETY: `mask` is writable, every bit pattern is a valid set, and a null pointer for the new mask is allowed.
        Ok(unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            signals.map(|signal| libc::sigismember(mask.as_ptr(), signal))
        })
    });
    assert_eq!(are_blocked.expect("the closure returns"), [1, 0, 0, 0, 0]);
}

/// SIGUSR2 stops a Lisp thread until the end of a collection, but a signal from the program announces no collection.
#[test]
fn stop_signal_that_the_program_raises_on_a_lisp_thread_is_ignored() {
    let name = "stop_signal_that_the_program_raises_on_a_lisp_thread_is_ignored";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let (sender, raised) = mpsc::channel();
    let inner = lisp.clone();
    std::thread::spawn(move || {
        // SAFETY: raise(3) takes a number.
        let statuses = inner.enter(|_| Ok([0; 3].map(|_| unsafe { libc::raise(libc::SIGUSR2) })));
        sender.send(statuses.expect("the closure returns"))
    });
    assert_eq!(raised.recv_timeout(Duration::from_secs(60)).expect("the thread is not stopped"), [0; 3]);
    assert_eq!(lisp.eval::<i64>("(progn (sb-ext:gc :full t) 3)").expect("Lisp still works"), 3);
}

/// A reply runs on the thread of a held evaluation, within a host function's call of Lisp. A crate such as `scoped-tls` can
/// give the reply the `Cx` of the host function. A non-local exit of a call through this `Cx` would be resumed when the host
/// function returns, and its target may be gone by then.
#[test]
fn call_through_the_context_of_a_host_function_fails_in_a_reply() {
    let name = "call_through_the_context_of_a_host_function_fails_in_a_reply";
    if !is_child(name) {
        assert!(run_in_child(name).success());
        return;
    }
    thread_local! {
        static KEPT: std::cell::Cell<Option<*const Cx>> = const { std::cell::Cell::new(None) };
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    let inner = lisp.clone();
    let wait = move || {
        inner.enter(|cx| {
            KEPT.set(Some(std::ptr::from_ref(cx)));
            let result = cx.eval::<i64>("(loop until *ends* finally (return 6))");
            KEPT.set(None);
            result
        })
    };
    lisp.define("host:wait", "Wait for the end.", wait).expect("it is defined");
    lisp.load_str("(defvar *ends* nil)").expect("it is loaded");
    let session = lisp.session().connect();
    let (sender, refused) = mpsc::channel();
    let timeout = TimeLimit::Of(Duration::from_secs(2));
    session.submit(Evaluation { hold: true, timeout, ..Evaluation::new("(list (host:wait) 8)") }, move |outcome| {
        assert!(outcome.held, "{outcome:?}");
        // SAFETY: the closure to which the `Cx` was lent has not returned: its call of Lisp is held on this thread.
        let result = KEPT.get().map(|kept| unsafe { &*kept }.eval::<i64>("(throw 'nowhere 1)"));
        sender.send(result).expect("somebody waits");
    });
    let refused = refused.recv_timeout(Duration::from_secs(60)).expect("a reply");
    assert!(matches!(refused, Some(Err(Error::CannotCall))), "{refused:?}");
    lisp.eval::<()>("(progn (setf *ends* t) nil)").expect("done");
    let (sender, resumed) = mpsc::channel();
    session.invoke_restart(&RestartDesignator::Name("CONTINUE".into()), "", move |reply| {
        sender.send(format!("{reply:?}")).expect("somebody waits");
    });
    let outcome = resumed.recv_timeout(Duration::from_secs(60)).expect("a reply");
    assert!(outcome.contains("(6 8)"), "{outcome}");
}

/// Runs one `part` of the test `name` in a child, which saves or boots `core`.
fn run_part_in_child(name: &str, part: &str, core: &Path) {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1", "--nocapture"])
        .env(CHILD, name)
        .env("SBCL_TEST_PART", part)
        .env("SBCL_TEST_CORE", core)
        .output()
        .expect("it starts");
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{part}: {:?}\n{out}\n{errors}", output.status);
}

/// The part of the test that this child runs, and the path of its core.
fn part() -> (String, PathBuf) {
    let core = std::env::var_os("SBCL_TEST_CORE").expect("a child has one");
    (std::env::var("SBCL_TEST_PART").expect("a child has one"), core.into())
}

/// A temporary directory of one test, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sbcl-saved-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).expect("it is made");
        Self(path)
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("it is there").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Asserts that `code` fails because the host function that it calls is not defined in this process.
fn assert_host_function_is_missing(lisp: &Lisp, code: &str) {
    let error = lisp.eval::<Value>(code).expect_err("it is not there");
    let condition = error.condition().expect("a condition");
    assert!(condition.is("rust:host-error"), "{condition}");
    assert!(condition.message().contains("this program does not"), "{condition}");
}

#[test]
fn saved_image_keeps_its_state_when_booted_in_another_process() {
    let name = "saved_image_keeps_its_state_when_booted_in_another_process";
    if !is_child(name) {
        let directory = Directory::new("goes-on");
        let core = directory.0.join("größe *[1].core");
        run_part_in_child(name, "save", &core);
        assert_eq!(directory.files(), ["größe *[1].core"]);
        assert_eq!(std::fs::metadata(&core).expect("it is there").permissions().mode() & 0o777, 0o600);
        run_part_in_child(name, "boot", &core);
        run_part_in_child(name, "again", &core);
        return;
    }
    let (part, core) = part();
    let host = |lisp: &Lisp| lisp.define("host:twice", "Return twice N.", |n: i64| n * 2).expect("it is defined");
    if part == "save" {
        let lisp = Lisp::builder().heap(1 << 30).threads(3).boot().expect("SBCL boots");
        host(&lisp);
        lisp.load_str(
            r#"(require :sb-md5)
               (defpackage :shop (:use :cl) (:export #:price #:*table* #:*counter* #:basket #:*basket* #:items))
               (in-package :shop)
               (defvar *table* (make-hash-table :test 'equal))
               (setf (gethash "pear" *table*) 3)
               (defvar *objects* (make-hash-table :test 'eq))
               (setf (gethash *table* *objects*) :the-table)
               (defvar *counter* (let ((n 40)) (lambda () (incf n))))
               (defun price (name &optional (count 1)) (* count (gethash name *table*)))
               (defclass basket () ((items :initarg :items :accessor items)))
               (defmethod describe-object :after ((basket basket) stream) (princ "a basket" stream))
               (defvar *basket* (make-instance 'basket :items (list 1/3 2.5d0 "λ")))
               (defvar *twice* (list #'host:twice))
               (defun doubled (n) (host:twice n))
               (defvar *hooked* nil)
               (push (lambda () (setf *hooked* (list :ran (ignore-errors (host:twice 1))))) sb-ext:*save-hooks*)"#,
        )
        .expect("it is loaded");
        lisp.enter(|cx| {
            let local = cx.local_function(|| 7)?;
            cx.call::<()>("set", (cx.eval::<Value>("(intern \"*LOCAL*\" :shop)")?, &local))
        })
        .expect("a local function is kept");
        // Saving does not affect handles.
        let handle = lisp.eval::<Value>("(list 1 2)").expect("a handle");
        let function = lisp.function("shop:price").expect("a function");
        lisp.save(&core).expect("it is saved");
        assert_eq!(function.call::<i64>(("pear", 2)).expect("a price"), 6);
        assert_eq!(handle.to_string(), "(1 2)");
        assert_eq!(lisp.eval::<i64>("(shop::doubled 21)").expect("the function is here"), 42);
        assert!(lisp.eval::<Value>("shop::*hooked*").expect("a value").is_nil(), "hooks run in the copy only");
        return;
    }
    // The heap size comes from the core. Another host function is defined first, because function numbers differ
    // between processes.
    let lisp = Lisp::builder().core(&core).threads(2).boot().expect("it boots");
    lisp.define("host:wrong", "Not the one.", |_: Value| "wrong").expect("it is defined");
    assert_eq!(lisp.eval::<u64>("(sb-ext:dynamic-space-size)").expect("a size"), 1 << 30);
    assert_eq!(lisp.call::<i64>("shop:price", ("pear", 2)).expect("a price"), 6);
    assert_eq!(lisp.eval::<i64>("(funcall shop:*counter*)").expect("a closure"), 41);
    assert_eq!(
        lisp.eval::<String>("(prin1-to-string (shop:items shop:*basket*))").expect("an object"),
        "(1/3 2.5d0 \"λ\")"
    );
    assert_eq!(
        lisp.eval::<Symbol>("(gethash shop:*table* shop::*objects*)").expect("an address"),
        keyword("the-table")
    );
    assert!(
        lisp.eval::<String>("(with-output-to-string (*standard-output*) (describe shop:*basket*))")
            .expect("a method")
            .contains("a basket")
    );
    assert_eq!(lisp.eval::<i64>("(length (sb-md5:md5sum-string \"a\"))").expect("a system"), 16);
    assert_eq!(lisp.eval::<Value>("shop::*hooked*").expect("a value").to_string(), "(:RAN NIL)");
    for code in
        ["(shop::doubled 21)", "(host:twice 21)", "(funcall (first shop::*twice*) 21)", "(funcall shop::*local*)"]
    {
        assert_host_function_is_missing(&lisp, code);
    }
    assert_eq!(
        lisp.eval::<i64>("(handler-bind ((rust:host-error (lambda (c) c (use-value 7)))) (host:twice 21))").expect("7"),
        7
    );
    host(&lisp);
    for code in ["(shop::doubled 21)", "(host:twice 21)", "(funcall (first shop::*twice*) 21)"] {
        assert_eq!(lisp.eval::<i64>(code).expect("it is there again"), 42);
    }
    let local = lisp.enter(|cx| {
        let _local = cx.local_function(|| "another's")?;
        Ok(cx.eval::<Value>("(funcall shop::*local*)").is_err())
    });
    assert!(local.expect("it is asked"));
    if part == "boot" {
        // An image that was booted from a saved core can be saved again.
        lisp.eval::<()>("(setf (gethash \"pear\" shop:*table*) 3) (setf shop::*hooked* nil)").expect("a value");
        lisp.eval::<()>("(setf shop:*counter* (let ((n 40)) (lambda () (incf n))))").expect("a value");
        lisp.save(&core).expect("it is saved over the one that it was booted from");
    }
}

#[test]
fn foreign_code_called_by_a_restore_hook_gets_already_booted_from_a_second_boot() {
    let name = "foreign_code_called_by_a_restore_hook_gets_already_booted_from_a_second_boot";
    if !is_child(name) {
        let directory = Directory::new("boots-again");
        let core = directory.0.join("image.core");
        run_part_in_child(name, "save", &core);
        run_part_in_child(name, "boot", &core);
        return;
    }
    let (part, core) = part();
    if part == "save" {
        let lisp = Lisp::builder().heap(512 << 20).boot().expect("SBCL boots");
        lisp.load_str(
            r#"(defvar *results* '())
               (defun boot-again ()
                 (let* ((file (concatenate 'string (sb-ext:posix-getenv "SBCL_TEST_CORE") ".address"))
                        (address (with-open-file (stream file) (read stream))))
                   (flet ((call ()
                            (push (sb-alien:alien-funcall (sb-alien:sap-alien (sb-sys:int-sap address)
                                                                              (function sb-alien:int)))
                                  *results*)))
                     (call)
                     (sb-thread:join-thread (sb-thread:make-thread #'call)))))
               (uiop:register-image-restore-hook 'boot-again nil)"#,
        )
        .expect("it is loaded");
        lisp.save(&core).expect("it is saved");
        return;
    }
    extern "C" fn boot_again() -> i32 {
        let is_refused = |result: Result<Lisp, Error>| matches!(result, Err(Error::Boot(BootError::AlreadyBooted)));
        i32::from(is_refused(Lisp::get_or_boot()) && is_refused(Lisp::boot()))
    }
    let address = boot_again as *const () as usize;
    std::fs::write(core.with_extension("core.address"), address.to_string()).expect("it is written");
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(Lisp::builder().core(&core).boot()));
    let lisp = receiver.recv_timeout(Duration::from_secs(60)).expect("the boot ends").expect("it boots");
    assert_eq!(lisp.eval::<Value>("*results*").expect("a list").to_string(), "(1 1)");
}

#[test]
fn save_while_threads_work_runs_no_host_atexit_handler_or_destructor_in_the_copy() {
    let name = "save_while_threads_work_runs_no_host_atexit_handler_or_destructor_in_the_copy";
    if !is_child(name) {
        let directory = Directory::new("meanwhile");
        let core = directory.0.join("image.core");
        run_part_in_child(name, "save", &core);
        assert_eq!(directory.files(), ["image.core", "image.core.at-exit"], "one end of the host's, and no drafts");
        assert_eq!(std::fs::read(core.with_extension("core.at-exit")).expect("it was written"), b"x");
        run_part_in_child(name, "boot", &core);
        return;
    }
    let (part, core) = part();
    if part == "boot" {
        let lisp = Lisp::builder().core(&core).boot().expect("it boots");
        assert!(lisp.eval::<bool>("(and (= 1000 (hash-table-count *kept*)) (plusp *rounds*))").expect("a value"));
        let entries = "(sb-ext:gc :full t) (loop for i below 1000 always (equal (gethash i *kept*) (list i)))";
        assert!(lisp.eval::<bool>(entries).expect("a value"));
        return;
    }
    static AT_EXIT: OnceLock<PathBuf> = OnceLock::new();
    extern "C" fn at_exit() {
        use std::io::Write;
        let file = std::fs::File::options().append(true).create(true).open(AT_EXIT.get().expect("it is set"));
        file.and_then(|mut file| file.write_all(b"x")).expect("it is written");
    }
    extern "C" fn reap(_: libc::c_int) {
        // SAFETY: with a null pointer, waitpid(2) writes nothing.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }
    /// The process that made this value. Dropping the value in another process counts as an end of the host's.
    struct Maker(u32);
    impl Drop for Maker {
        fn drop(&mut self) {
            if std::process::id() != self.0 {
                at_exit();
            }
        }
    }
    thread_local! {
        static MAKER: Maker = Maker(std::process::id());
    }
    AT_EXIT.set(core.with_extension("core.at-exit")).expect("once");
    // SAFETY: the handlers are plain functions, which live forever.
    unsafe {
        libc::atexit(at_exit);
        // The host's SIGCHLD handler reaps every child, including the one that saves.
        libc::signal(libc::SIGCHLD, reap as extern "C" fn(libc::c_int) as libc::sighandler_t);
    }
    let lisp = Lisp::builder().heap(1 << 30).threads(6).boot().expect("SBCL boots");
    lisp.load_str(
        "(defvar *kept* (make-hash-table)) (dotimes (i 1000) (setf (gethash i *kept*) (list i)))
         (defvar *rounds* 0) (defvar *over* nil)
         (defvar *mutex* (sb-thread:make-mutex))
         (defun work ()
           (loop until *over*
                 do (dotimes (i 50)
                      (sb-thread:with-mutex (*mutex*) (incf *rounds*))
                      (make-array (random 5000)) (make-list 100)
                      (intern (format nil \"S~D\" (random 1000)) :keyword))
                    ;; Leaves processor time for the copy, which saves meanwhile.
                    (sleep 0.002)))",
    )
    .expect("it is loaded");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| lisp.eval::<()>("(work)").expect("it ends"));
        }
        // A thread that compiles, and a host thread that allocates.
        let compile =
            "(loop until *over* do (eval '(defclass c () (a))) (compile nil '(lambda (x) (1+ x))) (sleep 0.01))";
        scope.spawn(|| lisp.eval::<()>(compile).expect("it ends"));
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                std::hint::black_box(vec![0_u8; 1 << 16]);
            }
        });
        // Saves from a host thread and from a Lisp thread.
        let from_host = lisp.save(&core);
        let from_lisp = lisp.enter(|_| {
            MAKER.with(|_| ());
            lisp.save(&core)
        });
        let before = lisp.eval::<i64>("*rounds*").expect("others work");
        while lisp.eval::<i64>("*rounds*").expect("others work") == before {}
        over.store(true, Ordering::SeqCst);
        lisp.eval::<()>("(setf *over* t)").expect("a value");
        from_lisp.and(from_host).expect("both are saved");
    });
}

#[test]
fn core_save_and_boot_failures_return_distinct_errors() {
    let name = "core_save_and_boot_failures_return_distinct_errors";
    if !is_child(name) {
        let directory = Directory::new("errors");
        let core = directory.0.join("image.core");
        run_part_in_child(name, "save", &core);
        run_part_in_child(name, "boot", &core);
        return;
    }
    let (part, core) = part();
    if part == "save" {
        let lisp = Lisp::builder().heap(512 << 20).boot().expect("SBCL boots");
        let nowhere = lisp.save(core.with_file_name("no").join("such")).expect_err("there is no such directory");
        assert!(matches!(&nowhere, Error::Io(error) if error.kind() == std::io::ErrorKind::NotFound), "{nowhere:?}");
        assert!(nowhere.to_string().contains("no/such"), "{nowhere}");
        for place in ["no/", "no/."] {
            let unnamed = lisp.save(core.parent().expect("one").join(place)).expect_err("it names a directory");
            assert!(
                matches!(&unnamed, Error::Io(error) if error.kind() == std::io::ErrorKind::InvalidFilename),
                "{unnamed:?}"
            );
        }
        // A path that is not a regular file is left alone.
        let link = core.with_file_name("link");
        std::os::unix::fs::symlink("/dev/null", &link).expect("it is made");
        for place in [link.as_path(), core.parent().expect("one")] {
            let refused = lisp.save(place).expect_err("it is no file");
            assert!(
                matches!(&refused, Error::Io(error) if error.kind() == std::io::ErrorKind::AlreadyExists),
                "{refused:?}"
            );
        }
        assert!(link.is_symlink());
        std::fs::remove_file(&link).expect("it is removed");
        std::fs::write(&core, "what was there").expect("it is written");
        // Writing beyond this size fails, as on a full disk.
        let limit = |bytes| {
            // SAFETY: the calls take plain numbers and a struct that setrlimit(2) only reads.
            unsafe {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
                assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
            }
        };
        limit(4 << 20);
        let full = lisp.save(&core).expect_err("it does not fit");
        assert!(matches!(&full, Error::Save { path, .. } if *path == core), "{full:?}");
        limit(libc::RLIM_INFINITY);
        // A save whose hook prints to standard error and does not end.
        lisp.load_str(
            "(sb-ext:unlock-package :sbcl-host) (setf sbcl-host::**saving-seconds** 1)
             (push (lambda ()
                     (sb-unix:unix-write 2 (sb-ext:string-to-octets \"printed\") 0 7)
                     (sb-ext:schedule-timer (sb-ext:make-timer #'list) 60)
                     (loop))
                   sb-ext:*save-hooks*)",
        )
        .expect("it is loaded");
        let late = lisp.save(&core).expect_err("it has no end");
        assert!(matches!(&late, Error::Save { reason, .. } if reason.contains("took longer")), "{late:?}");
        lisp.eval::<()>("(pop sb-ext:*save-hooks*) (setf sbcl-host::**saving-seconds** 300)").expect("it is reset");
        // A save that is interrupted after the fork, before the caller learns the child's process id.
        lisp.load_str(
            "(sb-int:encapsulate
              'sbcl-host::fork-when-unblocked 'interrupted
              (lambda (function &rest arguments)
                (multiple-value-bind (process stopped) (apply function arguments)
                  (when (typep process '(integer 1))
                    (sb-thread:interrupt-thread sb-thread:*current-thread* (lambda () (error \"interrupted\"))))
                  (values process stopped))))",
        )
        .expect("it is loaded");
        let interrupted = lisp.save(&core).expect_err("it is interrupted");
        assert!(interrupted.condition().is_some_and(|one| one.message() == "interrupted"), "{interrupted:?}");
        lisp.eval::<()>("(sb-int:unencapsulate 'sbcl-host::fork-when-unblocked 'interrupted)").expect("it is reset");
        assert_eq!(std::fs::read_to_string(&core).expect("it is there"), "what was there");
        assert_eq!(std::fs::read_dir(core.parent().expect("one")).expect("it is there").count(), 1, "no draft is left");
        // SAFETY: with a null pointer, waitpid(2) writes nothing.
        let child = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) };
        assert_eq!(child, -1, "a child is left");
        // This process is unharmed.
        assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
        lisp.save(&core).expect("it is saved");
        return;
    }
    let boot = |path: &Path| Lisp::builder().core(path).boot().expect_err("it is refused");
    let missing = core.with_extension("missing");
    let error = boot(&missing);
    assert!(matches!(&error, Error::Boot(BootError::Core { path, .. }) if *path == missing), "{error:?}");
    let error = boot(&core.join("below")).to_string();
    assert!(error.contains("/below: Not a directory"), "{error}");
    let bytes = std::fs::read(&core).expect("it is there");
    let other = core.with_extension("other");
    let is_unusable = |error: &Error| matches!(error, Error::Boot(BootError::Core { path, .. }) if *path == other);
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    for content in [&b""[..], b"no core", &bytes[..bytes.len() - 1], &bytes[bytes.len() / 2..], &damaged] {
        std::fs::write(&other, content).expect("it is written");
        let error = boot(&other);
        assert!(is_unusable(&error), "{error:?}");
    }
    let version = format!("{} {}", sbcl::VERSION, sbcl::SBCL_VERSION);
    let place = bytes.windows(version.len()).rposition(|window| window == version.as_bytes()).expect("its label");
    let mut foreign = bytes.clone();
    foreign[place] = b'9';
    std::fs::write(&other, foreign).expect("it is written");
    let error = boot(&other);
    assert!(
        matches!(&error, Error::Boot(BootError::OtherBuild { saved_by, .. }) if saved_by.starts_with('9')),
        "{error:?}"
    );
    let error = Lisp::builder().heap(1 << 30).core(&core).boot().expect_err("another heap");
    assert!(
        matches!(error, Error::Boot(BootError::OtherHeap { saved, asked, .. }) if saved < asked && asked == 1 << 30),
        "{error:?}"
    );
    assert!(error.to_string().ends_with(
        "was saved with a heap of 512 MiB and does not boot with 1024 MiB: set the option \
        heap to the saved size"
    ));
    // After all these failures an intact core still boots, also from a copy.
    std::fs::copy(&core, &other).expect("it is copied");
    let lisp = Lisp::builder().core(&other).boot().expect("it boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}
