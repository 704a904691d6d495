//! The library in a host program: one boot a process, and the host's signals and arithmetic stay its own.
//!
//! What ends a process is done by a child: this test program, started again for one of its tests.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, mpsc};
use std::time::{Duration, Instant};

use sbcl::{BootError, Error, Evaluation, ImageConfig, Limits, Lisp, Session, TimeLimit, Value};

static SESSION: LazyLock<Session> =
    LazyLock::new(|| Session::start(&ImageConfig::default(), Limits::default()).expect("SBCL boots"));

const CHILD: &str = "SBCL_TEST_CHILD";

fn value(code: &str) -> String {
    let outcome = SESSION.evaluate(Evaluation::new(code));
    outcome.result.as_ref().unwrap_or_else(|error| panic!("{code}: {error:?}"))[0].text.clone()
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
    assert_eq!(outcome.result.as_ref().unwrap_err().kind, "SB-SYS:MEMORY-FAULT-ERROR");
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
    assert_eq!(outcome.result.as_ref().unwrap_err().kind, "DIVISION-BY-ZERO");
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
fn what_was_cancelled_before_it_began_was_not_done() {
    let session = SESSION.connect();
    let blocker = session.submit(Evaluation::new("(loop)"), |_| ());
    let (send, answers) = mpsc::channel();
    let (aborted, locals, continued) = (send.clone(), send.clone(), send);
    let queued = [
        session.abort_held(move |reply| aborted.send(reply.unwrap_err().to_string()).expect("somebody waits")),
        session.frame_locals(0, move |reply| locals.send(reply.unwrap_err().to_string()).expect("somebody waits")),
        session.restart_frame(0, move |reply| {
            let outcome = reply.expect("an outcome of its own");
            continued.send(outcome.result.as_ref().unwrap_err().kind.clone()).expect("somebody waits");
        }),
    ];
    let expected = ["It was cancelled before it was done.", "It was cancelled before it was done.", "CANCELLED"];
    for (job, expected) in queued.into_iter().zip(expected) {
        session.cancel(job);
        assert_eq!(answers.recv_timeout(Duration::from_secs(20)).expect("a reply"), expected);
    }
    assert!(session.last_error().is_none());
    session.cancel(blocker);
    assert_eq!(session.evaluate(Evaluation::new("(+ 1 2)")).result.as_ref().expect("it succeeds")[0].text, "3");
}

#[test]
fn no_time_is_too_long() {
    let evaluation = Evaluation { timeout: TimeLimit::Of(Duration::MAX), ..Evaluation::new("(+ 1 2)") };
    assert_eq!(SESSION.evaluate(evaluation).result.as_ref().expect("it succeeds")[0].text, "3");
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
    // The signal of its end may come to any thread, a moment before or after.
    for _ in 0..20 {
        assert!(Command::new("true").status().expect("it runs").success());
        assert_eq!(mask("after a child has ended"), before);
    }
}

#[test]
fn threads_that_all_wait_for_another_one_that_calls_lisp_do_not_wait_for_ever() {
    let name = "threads_that_all_wait_for_another_one_that_calls_lisp_do_not_wait_for_ever";
    if !is_child(name) {
        assert!(child(name).success());
        return;
    }
    let lisp = Lisp::builder().threads(2).spare_threads(3).boot().expect("SBCL boots");
    // Each level waits in Rust for a thread of the host's, which calls Lisp.
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
    // By way of a function that Lisp calls.
    let inner = lisp.clone();
    lisp.define("host:elsewhere", "Evaluate CODE on another thread.", move |code: String| {
        let inner = inner.clone();
        std::thread::spawn(move || inner.eval::<Value>(&code)).join().expect("it does not panic")
    })
    .expect("it is defined");
    let deep = "(host:elsewhere \"(host:elsewhere \\\"(host:elsewhere \\\\\\\"(+ 1 2)\\\\\\\")\\\")\")";
    assert_eq!(lisp.eval::<i64>(deep).expect("a value"), 3);
    // More than there may be.
    assert!(matches!(nested(&lisp, 5), Err(Error::NoThread)));
    assert_eq!(nested(&lisp, 4).expect("they are free again"), 7);
    // That threads are in Lisp is no reason for more.
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
fn a_call_that_fills_the_heap_fails_and_the_process_lives() {
    let name = "a_call_that_fills_the_heap_fails_and_the_process_lives";
    if !is_child(name) {
        assert!(child(name).success());
        return;
    }
    let lisp = Lisp::builder().heap(512 << 20).threads(2).boot().expect("SBCL boots");
    for code in [
        "(let ((all '())) (loop (push (list 1 2 3) all)))",
        "(let ((table (make-hash-table))) (loop for n from 0 do (setf (gethash n table) (make-string 10))))",
        "(ignore-errors (loop for all = (list (make-string 1000)) then (cons (make-string 1000) all)))",
        "(make-array 1000000000)",
        "(let ((all '())) (handler-case (loop (push (make-array 100000) all)) (error () 1)))",
    ] {
        let error = lisp.eval::<()>(code).expect_err(code);
        assert!(error.condition().is_some_and(|condition| condition.is("storage-condition")), "{code}: {error}");
        assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("it goes on"), 3);
    }
    // By a function that was looked up, within enter, and on both threads at once.
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
    // What is kept on purpose leaves room to let go of it.
    lisp.eval::<()>("(defvar *kept* (loop repeat 100 collect (make-array 100000))) (sb-ext:gc :full t)")
        .expect("it fits");
    assert_eq!(lisp.eval::<i64>("(length (make-array 1000000))").expect("there is room"), 1_000_000);
    lisp.eval::<()>("(setf *kept* nil)").expect("it is let go of");
}

/// What is logged.
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
fn what_lisp_prints_and_warns_of_goes_to_tracing() {
    let name = "what_lisp_prints_and_warns_of_goes_to_tracing";
    if !is_child(name) {
        assert!(child(name).success());
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

/// What the host's handlers have seen.
static FAULTS: AtomicUsize = AtomicUsize::new(0);
static CHILDREN: AtomicUsize = AtomicUsize::new(0);
static PIPES: AtomicUsize = AtomicUsize::new(0);
static SAMPLES: AtomicUsize = AtomicUsize::new(0);
/// Where a fault of the host's own goes on.
static FAULT_PAGE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn note_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    match signal {
        libc::SIGCHLD => _ = CHILDREN.fetch_add(1, Ordering::SeqCst),
        libc::SIGPIPE => _ = PIPES.fetch_add(1, Ordering::SeqCst),
        libc::SIGPROF => _ = SAMPLES.fetch_add(1, Ordering::SeqCst),
        _ => {
            FAULTS.fetch_add(1, Ordering::SeqCst);
            let page = FAULT_PAGE.load(Ordering::SeqCst);
            // SAFETY: the kernel's structure; the page is one that the test has mapped. Anything else is a real fault.
            unsafe {
                if (*info).si_addr() as usize & !4095 != page {
                    libc::_exit(99);
                }
                libc::mprotect(page as *mut libc::c_void, 4096, libc::PROT_READ | libc::PROT_WRITE);
            }
        }
    }
}

/// Has SIGPROF come each time this process has used the processor for so long; never, when that is zero.
fn sample_every(time: Duration) {
    let time = libc::timeval { tv_sec: 0, tv_usec: time.subsec_micros().into() };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: a valid timer.
    let set = unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

#[test]
fn a_host_with_handlers_of_its_own_and_a_runtime_keeps_them() {
    let name = "a_host_with_handlers_of_its_own_and_a_runtime_keeps_them";
    if !is_child(name) {
        let status = child(name);
        assert!(status.success(), "{status:?}");
        return;
    }
    for signal in [libc::SIGSEGV, libc::SIGCHLD, libc::SIGPIPE, libc::SIGPROF] {
        // SAFETY: a valid action, whose handler does what a handler may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    let lisp = Lisp::boot().expect("SBCL boots");
    // A fault of the host's is handled by the host and gone on with: on a thread of its own, and on one of Lisp's.
    // SAFETY: a fresh mapping.
    let page = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    } as usize;
    FAULT_PAGE.store(page, Ordering::SeqCst);
    let touch = move || {
        // SAFETY: this test's own page, which nothing else uses; the handler makes it writable.
        unsafe {
            libc::mprotect(page as *mut libc::c_void, 4096, libc::PROT_NONE);
            std::ptr::with_exposed_provenance_mut::<u8>(page).write_volatile(1);
        }
    };
    touch();
    lisp.define("host:touch", "Fault, and go on.", touch).expect("it is defined");
    lisp.eval::<()>("(host:touch)").expect("it goes on");
    assert_eq!(FAULTS.load(Ordering::SeqCst), 2);
    // One in Lisp is Lisp's.
    let fault = lisp.eval::<()>("(sb-sys:sap-ref-8 (sb-sys:int-sap 0) 0)").expect_err("an error");
    assert!(fault.condition().is_some_and(|condition| condition.is("sb-sys:memory-fault-error")), "{fault}");
    assert_eq!(FAULTS.load(Ordering::SeqCst), 2);
    // Stack and heap of Lisp's are guarded by faults as well.
    assert!(lisp.eval::<()>("(labels ((deep (n) (1+ (deep n)))) (deep 0))").is_err());

    // SAFETY: descriptors of this test's own.
    unsafe {
        let mut ends = [0; 2];
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        libc::close(ends[0]);
        assert_eq!(libc::write(ends[1], c"x".as_ptr().cast(), 1), -1);
        libc::close(ends[1]);
    }
    assert_eq!(PIPES.load(Ordering::SeqCst), 1);

    // Children of the host's, of Lisp's, and of a runtime that takes the signal over from here.
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
    // A profiler samples whatever uses the processor: that is Lisp, which allocates and collects.
    sample_every(Duration::from_millis(1));
    let before = SAMPLES.load(Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(20);
    while SAMPLES.load(Ordering::SeqCst) < before + 50 && Instant::now() < end {
        let sum = lisp.eval::<i64>("(loop for list = (loop for n below 10000 collect n) repeat 20 sum (length list))");
        assert_eq!(sum.expect("a sum"), 200_000);
        lisp.eval::<()>("(sb-ext:gc)").expect("it goes on");
    }
    sample_every(Duration::ZERO);
    assert!(SAMPLES.load(Ordering::SeqCst) >= before + 50, "{} samples", SAMPLES.load(Ordering::SeqCst) - before);
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("it goes on"), 3);
}
