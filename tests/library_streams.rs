//! Output, input, warnings and multiple threads. These are boot options, so this test is a program of its own.

use std::io::{self, Cursor, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sbcl::{Error, Lisp};

#[derive(Clone, Default)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A stream that answers "?" with the result of a call that another thread makes.
struct Answering(SharedBuffer);

impl Write for Answering {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.contains(&b'?') {
            let call = || Lisp::get_or_boot().unwrap().with_timeout(Duration::from_secs(20)).eval::<i64>("(+ 1 1)");
            write!(self.0, "{:?} ", std::thread::spawn(call).join().unwrap())?;
            return Ok(bytes.len());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An empty input whose first read is interrupted by a signal.
#[derive(Default)]
struct InterruptedInput(bool);

impl Read for InterruptedInput {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        if std::mem::replace(&mut self.0, true) { Ok(0) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

impl SharedBuffer {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[test]
fn builder_streams_on_warning_heap_and_threads_options_take_effect() {
    let (stdout, stderr, warnings) = (SharedBuffer::default(), SharedBuffer::default(), SharedBuffer::default());
    let mut warned = warnings.clone();
    let printed = stdout.clone();
    let warned = Mutex::new(move |class: &str, text: &str| {
        writeln!(warned, "{class}: {text} (after {:?})", printed.text()).unwrap();
    });
    let lisp = Lisp::builder()
        .heap(1 << 30)
        .control_stack(16 << 20)
        .threads(2)
        .stdout(Answering(stdout.clone()))
        .stderr(stderr.clone())
        .stdin(
            InterruptedInput::default()
                .chain(Cursor::new("first line\nzweite größe\n(:a 1)"))
                // An invalid octet, and a character that arrives in two reads: neither damages the other.
                .chain(&b" \xff\xc3"[..])
                .chain(&b"\xa9"[..]),
        )
        .on_warning(move |class, text| warned.lock().unwrap()(class, text))
        .boot()
        .unwrap();

    let stack = "(- (sb-sys:sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-control-stack-end-slot))
                    (sb-sys:sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-control-stack-start-slot)))";
    let (stack, heap) = lisp.eval::<(i64, i64)>(&format!("(values {stack} (sb-ext:dynamic-space-size))")).unwrap();
    // A part of the control stack is reserved.
    assert!(((16 << 20) - 65536..=16 << 20).contains(&stack) && heap == 1 << 30, "{stack} {heap}");

    lisp.eval::<()>(r#"(format t "to stdout ~a" "λ") (warn "in order")"#).unwrap();
    assert!(warnings.text().contains("simple-warning: in order (after \"to stdout λ\")"), "{}", warnings.text());
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

    // A warning in a nested call first reaches the handlers of the Lisp code that made the call.
    let inner = lisp.clone();
    lisp.define("host:warned", "Warn in a nested call.", move || inner.eval::<()>("(warn \"nested\")")).unwrap();
    lisp.eval::<()>("(handler-bind ((warning #'muffle-warning)) (host:warned))").unwrap();
    assert!(!warnings.text().contains("nested"), "{}", warnings.text());
    let seen = lisp.eval::<i64>(
        "(let ((count 0))
           (handler-bind ((warning (lambda (warning) (declare (ignore warning)) (incf count))))
             (host:warned))
           count)",
    );
    assert_eq!(seen.unwrap(), 1);
    assert_eq!(warnings.text().matches("nested").count(), 1, "{}", warnings.text());

    // A thread that Lisp started prints to the same stream, even after the call that started it.
    lisp.eval::<()>(
        r#"(defvar *over* (sb-thread:make-semaphore))
           (defvar *late* (sb-thread:make-thread (lambda () (sb-thread:wait-on-semaphore *over*) (princ " and late"))))"#,
    )
    .unwrap();
    lisp.eval::<()>("(sb-thread:signal-semaphore *over*) (sb-thread:join-thread *late*)").unwrap();
    assert_eq!(stdout.text(), "to stdout λ and late");

    // A change to the readtable applies to all threads.
    lisp.load_str("(set-macro-character #\\! (lambda (stream character) character (list 'quote (read stream))))")
        .unwrap();
    let both = [(); 2].map(|()| lisp.separate());
    let read = lisp.enter(|_| {
        let other = both[1].clone();
        let elsewhere = std::thread::spawn(move || other.eval::<Vec<i64>>("!(1 2)")).join().unwrap()?;
        Ok((both[0].eval::<Vec<i64>>("!(1 2)")?, elsewhere))
    });
    assert_eq!(read.unwrap(), (vec![1, 2], vec![1, 2]));

    // Two concurrent calls, each of which waits for the other.
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

    // All threads wait for a stream that waits for a call: a spare thread runs the call.
    stdout.0.lock().unwrap().clear();
    let printers = ["*one* *other*", "*other* *one*"].map(|semaphores| {
        let lisp = lisp.separate();
        let code = format!(
            "(destructuring-bind (mine other) (list {semaphores})
               (sb-thread:signal-semaphore other) (sb-thread:wait-on-semaphore mine) (write-string \"?\"))"
        );
        std::thread::spawn(move || lisp.eval::<()>(&code))
    });
    printers.into_iter().for_each(|printer| printer.join().unwrap().unwrap());
    assert_eq!(stdout.text(), "Ok(2) Ok(2) ");

    // Many concurrent callers, with errors, callbacks, garbage collections and drops.
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

    // A million dropped handles leave no more entries in the handle table than existed at the same time.
    lisp.enter(|cx| {
        let make = cx.function("list")?;
        for _ in 0..1000 {
            let handles: Result<Vec<sbcl::Value>, Error> = (0..1000).map(|n| make.call((n,))).collect();
            drop(handles?);
        }
        Ok(())
    })
    .unwrap();
    // Each call releases some handles.
    for _ in 0..2000 {
        lisp.eval::<()>("1").unwrap();
    }
    let kept: i64 = lisp.eval("(count-if #'consp sbcl-host/embedding::**handle-table**)").unwrap();
    assert!(kept < 2000, "{kept}");
}
