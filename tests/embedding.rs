//! The library in a host program: one boot a process, and the host's signals and arithmetic stay its own.
//!
//! What ends a process is done by a child: this test program, started again for one of its tests.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::{LazyLock, mpsc};
use std::time::Duration;

use sbcl::{BootError, Evaluation, ImageConfig, Limits, Session, TimeLimit};

static SESSION: LazyLock<Session> =
    LazyLock::new(|| Session::start(&ImageConfig::default(), Limits::default()).expect("SBCL boots"));

const CHILD: &str = "SBCL_TEST_CHILD";

fn value(code: &str) -> String {
    let outcome = SESSION.evaluate(Evaluation::new(code));
    outcome.result.unwrap_or_else(|error| panic!("{code}: {error:?}"))[0].text.clone()
}

/// Runs the test `name` of this program in a child, which ends as it ends.
fn child(name: &str) -> ExitStatus {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--test-threads=1"])
        .env(CHILD, name)
        .output()
        .expect("it starts")
        .status
}

fn is_child(name: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|child| child == name)
}

#[test]
fn a_second_boot_is_an_error() {
    assert_eq!(value("(+ 1 2)"), "3");
    let again = Session::start(&ImageConfig::default(), Limits::default());
    assert!(matches!(again, Err(BootError::AlreadyBooted)), "{again:?}");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn sizes_are_checked_before_anything_is_booted() {
    let config = ImageConfig { heap: 1, ..ImageConfig::default() };
    let error = Session::start(&config, Limits::default()).unwrap_err();
    assert!(error.to_string().contains("heap 1 is out of range"), "{error}");
}

#[test]
fn a_core_that_is_not_there_is_an_error_and_another_may_be_tried() {
    let name = "a_core_that_is_not_there_is_an_error_and_another_may_be_tried";
    if is_child(name) {
        let config = ImageConfig { core_dir: Some("no/such/directory".into()), ..ImageConfig::default() };
        let error = Session::start(&config, Limits::default()).unwrap_err().to_string();
        assert!(error.contains("no/such/directory/sbcl.core"), "{error}");
        assert_eq!(value("(+ 1 2)"), "3");
        return;
    }
    assert!(child(name).success());
}

#[test]
fn a_fault_in_a_thread_of_the_host_is_the_hosts() {
    let name = "a_fault_in_a_thread_of_the_host_is_the_hosts";
    if is_child(name) {
        assert_eq!(value("(+ 1 2)"), "3");
        // SAFETY: none: the fault is what is tested, and ends this process.
        unsafe { std::hint::black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1) };
        unreachable!("a fault does not go on");
    }
    assert_eq!(child(name).signal(), Some(libc::SIGSEGV));
}

#[test]
fn a_fault_of_the_host_on_a_lisp_thread_is_the_hosts() {
    let name = "a_fault_of_the_host_on_a_lisp_thread_is_the_hosts";
    if is_child(name) {
        SESSION.submit(Evaluation::new("(+ 1 2)"), |_| {
            // SAFETY: none: the fault is what is tested, and ends this process.
            unsafe { std::hint::black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1) };
        });
        std::thread::sleep(Duration::from_secs(20));
        std::process::exit(0);
    }
    assert_eq!(child(name).signal(), Some(libc::SIGSEGV));
}

#[test]
fn a_fault_in_lisp_is_a_lisp_error() {
    let outcome = SESSION.evaluate(Evaluation::new("(sb-sys:sap-ref-8 (sb-sys:int-sap 0) 0)"));
    assert_eq!(outcome.result.unwrap_err().kind, "SB-SYS:MEMORY-FAULT-ERROR");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn arithmetic_of_the_host_does_not_trap_on_a_lisp_thread() {
    let (send, receive) = mpsc::channel();
    SESSION.submit(Evaluation::new("(/ 1d0 3d0)"), move |_| {
        let zero = std::hint::black_box(0.0_f64);
        send.send((1.0 / zero, zero / zero, std::hint::black_box(f64::MAX) * 2.0)).expect("somebody waits");
    });
    let (infinity, nan, overflow) = receive.recv_timeout(Duration::from_secs(20)).expect("a reply");
    assert!(infinity.is_infinite() && nan.is_nan() && overflow.is_infinite());
    // Lisp's own traps are as they were.
    let outcome = SESSION.evaluate(Evaluation::new("(/ 1d0 (- 1d0 1d0))"));
    assert_eq!(outcome.result.unwrap_err().kind, "DIVISION-BY-ZERO");
}

#[test]
fn a_panicking_reply_does_not_reach_lisp() {
    SESSION.submit(Evaluation::new("1"), |_| panic!("on purpose: in a reply"));
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn a_panic_in_any_reply_ends_no_thread() {
    let (started, running) = mpsc::channel();
    // Of one that is withdrawn, and of one that nothing is held for: both run where the next job is looked for.
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
fn no_time_is_too_long() {
    let evaluation = Evaluation { timeout: TimeLimit::Of(Duration::MAX), ..Evaluation::new("(+ 1 2)") };
    assert_eq!(SESSION.evaluate(evaluation).result.expect("it succeeds")[0].text, "3");
    assert_eq!(value("(+ 1 2)"), "3");
}

#[test]
fn the_hosts_signals_are_the_hosts_again() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let name = "the_hosts_signals_are_the_hosts_again";
        if is_child(name) {
            assert_eq!(value("(+ 1 2)"), "3");
            // SAFETY: kill(2) on this process has no preconditions.
            unsafe { libc::kill(libc::getpid(), std::env::var("SIGNAL").expect("set").parse().expect("a number")) };
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
fn threads_of_the_host_keep_their_signal_mask() {
    assert_eq!(value("(sb-ext:process-exit-code (sb-ext:run-program \"/bin/true\" nil))"), "0");
    let mask = |when: &str| {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("proc");
        let line = status.lines().find(|line| line.starts_with("SigBlk:")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no mask {when}"))
    };
    let before = mask("before");
    assert!(Command::new("true").status().expect("it runs").success());
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(mask("after a child has ended"), before);
}
