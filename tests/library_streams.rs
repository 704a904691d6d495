//! Output, input, warnings and several threads: chosen at boot, so this is a program of its own.

use std::io::{self, Cursor, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sbcl::{Error, Lisp};

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Empty, but for a signal that comes first.
#[derive(Default)]
struct Interrupted(bool);

impl Read for Interrupted {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        if std::mem::replace(&mut self.0, true) { Ok(0) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

impl Kept {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[test]
fn builder_streams_on_warning_heap_and_threads_options_take_effect() {
    let (stdout, stderr, warnings) = (Kept::default(), Kept::default(), Kept::default());
    let mut warned = warnings.clone();
    let warned = Mutex::new(move |class: &str, text: &str| writeln!(warned, "{class}: {text}").unwrap());
    let lisp = Lisp::builder()
        .heap(1 << 30)
        .control_stack(16 << 20)
        .threads(2)
        .stdout(stdout.clone())
        .stderr(stderr.clone())
        .stdin(
            Interrupted::default()
                .chain(Cursor::new("first line\nzweite größe\n(:a 1)"))
                // Neither is lost by the other: what is no UTF-8, and a character that comes in two parts.
                .chain(&b" \xff\xc3"[..])
                .chain(&b"\xa9"[..]),
        )
        .on_warning(move |class, text| warned.lock().unwrap()(class, text))
        .boot()
        .unwrap();

    let stack = "(- (sb-sys:sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-control-stack-end-slot))
                    (sb-sys:sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-control-stack-start-slot)))";
    let (stack, heap) = lisp.eval::<(i64, i64)>(&format!("(values {stack} (sb-ext:dynamic-space-size))")).unwrap();
    // Some of it is not for calls.
    assert!(((16 << 20) - 65536..=16 << 20).contains(&stack) && heap == 1 << 30, "{stack} {heap}");

    lisp.eval::<()>(r#"(format t "to stdout ~a" "λ")"#).unwrap();
    lisp.eval::<()>(r#"(format *error-output* "to stderr")"#).unwrap();
    assert_eq!((stdout.text().as_str(), stderr.text().as_str()), ("to stdout λ", "to stderr"));

    assert_eq!(
        lisp.eval::<(String, String)>("(values (read-line) (read-line))").unwrap(),
        ("first line".into(), "zweite größe".into())
    );
    assert_eq!(lisp.eval::<String>("(prin1-to-string (read))").unwrap(), "(:A 1)");
    assert_eq!(lisp.eval::<String>("(read-line)").unwrap(), "\u{fffd}é");
    assert!(lisp.eval::<()>("(read)").unwrap_err().condition().unwrap().is("end-of-file"));

    lisp.load_str("(defun unwarned () (undefined-in-streams)) (warn \"by hand\")").unwrap();
    let text = warnings.text();
    assert!(text.contains("simple-warning: by hand") && text.contains("undefined function"), "{text}");
    assert_eq!(stderr.text(), "to stderr");

    // A thread of Lisp's own prints there as well, also when the call that has made it is over.
    lisp.eval::<()>(
        r#"(defvar *over* (sb-thread:make-semaphore))
           (defvar *late* (sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore *over*) (princ " and late"))))"#,
    )
    .unwrap();
    lisp.eval::<()>("(sb-thread:signal-semaphore *over*) (sb-thread:join-thread *late*)").unwrap();
    assert_eq!(stdout.text(), "to stdout λ and late");

    // What changes the syntax changes it for all threads.
    lisp.load_str("(set-macro-character #\\! (lambda (stream character) character (list 'quote (read stream))))")
        .unwrap();
    let both = [(); 2].map(|()| lisp.separate());
    let read = lisp.enter(|_| {
        let other = both[1].clone();
        let elsewhere = std::thread::spawn(move || other.eval::<Vec<i64>>("!(1 2)")).join().unwrap()?;
        Ok((both[0].eval::<Vec<i64>>("!(1 2)")?, elsewhere))
    });
    assert_eq!(read.unwrap(), (vec![1, 2], vec![1, 2]));

    // Two calls at once: each waits for what the other one does.
    lisp.load_str("(defvar *one* (sb-thread:make-semaphore)) (defvar *other* (sb-thread:make-semaphore))").unwrap();
    let caller = {
        let lisp = lisp.clone();
        std::thread::spawn(move || {
            lisp.eval::<bool>(
                "(progn (sb-thread:signal-semaphore *one*) (sb-thread:wait-on-semaphore *other* :timeout 20))",
            )
        })
    };
    let met = lisp
        .eval::<bool>("(prog1 (sb-thread:wait-on-semaphore *one* :timeout 20) (sb-thread:signal-semaphore *other*))")
        .unwrap();
    assert!(met && caller.join().unwrap().unwrap());

    // Many callers, errors, callbacks, collections and drops at once.
    let inner = lisp.clone();
    lisp.define("host:half", "Half of N.", move |n: i64| -> Result<i64, Error> {
        if n % 2 == 0 { inner.call("floor", (n, 2)) } else { Err(Error::Other(format!("{n} is odd").into())) }
    })
    .unwrap();
    let seconds = std::env::var("SBCL_STRESS_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(2);
    let end = Instant::now() + Duration::from_secs(seconds);
    let threads: Vec<_> = (0..16_i64)
        .map(|number| {
            let lisp = lisp.clone();
            std::thread::spawn(move || {
                let mut calls = 0;
                while Instant::now() < end {
                    let n = number + calls;
                    let half = lisp.eval::<i64>(&format!("(host:half {n})"));
                    assert_eq!(half.ok(), (n % 2 == 0).then_some(n / 2));
                    let list = lisp.value(vec![n; 10]).unwrap();
                    assert_eq!(lisp.call::<i64>("reduce", (lisp.function("+").unwrap(), &list)).unwrap(), 10 * n);
                    std::thread::spawn(move || drop(list)).join().unwrap();
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    let mut collections = 0;
    while Instant::now() < end {
        lisp.eval::<()>("(sb-ext:gc)").unwrap();
        collections += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(collections > 1, "{collections}");
    let calls: i64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert!(calls > 16, "{calls}");
    println!("{calls} rounds of calls and {collections} collections in {seconds} s");

    // A million handles leave no more behind than there were at once.
    lisp.enter(|cx| {
        let make = cx.function("list")?;
        for _ in 0..1000 {
            let handles: Result<Vec<sbcl::Value>, Error> = (0..1000).map(|n| make.call((n,))).collect();
            drop(handles?);
        }
        Ok(())
    })
    .unwrap();
    // Each call lets go of some.
    for _ in 0..2000 {
        lisp.eval::<()>("1").unwrap();
    }
    let kept: i64 = lisp.eval("(count-if #'consp sbcl-host/embedding::**handle-table**)").unwrap();
    assert!(kept < 2000, "{kept}");
}
