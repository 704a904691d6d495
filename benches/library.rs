//! Benchmarks of calls between a Rust program and its image.
//!
//! `make bench` writes the figures to docs/benchmarks.md, each with its goal; benches/peers finds the figures by name.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{Bencher, Criterion, criterion_group, criterion_main};
use sbcl::{Function, Lisp, Value};

/// Returns a `Criterion` for a Lisp thread, which cannot borrow the `Criterion` of the thread that entered Lisp.
fn lisp_thread_criterion() -> Criterion {
    Criterion::default().configure_from_args()
}

fn lisp() -> Lisp {
    Lisp::builder().threads(2).boot().or_else(|_| Lisp::get_or_boot()).expect("SBCL boots")
}

fn calls(c: &mut Criterion) {
    let lisp = lisp();
    lisp.load_str("(defun add-fixnums (a b) (declare (optimize speed) (type (signed-byte 60) a b)) (+ a b))")
        .expect("it loads");
    lisp.define("host:add", "Return the sum.", |a: i64, b: i64| a + b).expect("it is defined");
    lisp.load_str("(defun call-host (n) (declare (type fixnum n)) (loop repeat n do (host:add 1 2)))")
        .expect("it loads");
    let add = lisp.function("add-fixnums").expect("it is there");
    let text = "x".repeat(1024);

    c.bench_function("bare hand-over with the same waiting", bench_handover);
    c.bench_function("function.call of two fixnums, another thread", |b| {
        b.iter(|| add.call::<i64>((black_box(1), 2)).expect("a sum"));
    });
    c.bench_function("eval of (+ 1 2), another thread", |b| {
        b.iter(|| lisp.eval::<i64>(black_box("(+ 1 2)")).expect("a sum"));
    });
    c.bench_function("error with its condition, another thread", |b| {
        b.iter(|| lisp.eval::<i64>(black_box("(/ 1 0)")).expect_err("an error"));
    });
    // These benchmarks run on a Lisp thread.
    lisp.enter(|cx| {
        let mut c = lisp_thread_criterion();
        c.bench_function("function.call of two fixnums, inside enter", |b| {
            b.iter(|| add.call::<i64>((black_box(1), 2)).expect("a sum"));
        });
        c.bench_function("eval of (+ 1 2), inside enter", |b| {
            b.iter(|| cx.eval::<i64>(black_box("(+ 1 2)")).expect("a sum"));
        });
        c.bench_function("error with its condition, inside enter", |b| {
            b.iter(|| cx.eval::<i64>(black_box("(/ 1 0)")).expect_err("an error"));
        });
        let identity = cx.function("identity")?;
        c.bench_function("1 KB string there and back, inside enter", |b| {
            b.iter(|| identity.call::<String>((black_box(&text),)).expect("a string"));
        });
        let octets: Value = cx.eval("(make-array 1000000 :element-type '(unsigned-byte 8) :initial-element 1)")?;
        let mut target = vec![0; 1_000_000];
        c.bench_function("1 MB copied, inside enter", |b| {
            b.iter(|| cx.copy_bytes(&octets, black_box(&mut target)).expect("it is copied"));
        });
        let source = vec![1_u8; 1_000_000];
        c.bench_function("1 MB copied by memcpy", |b| b.iter(|| target.copy_from_slice(black_box(&source))));
        let host = cx.function("call-host")?;
        c.bench_function("1000 calls of a host function from compiled Lisp", |b| {
            b.iter(|| host.call::<()>((1000,)).expect("it returns"));
        });
        Ok(())
    })
    .expect("it runs");
}

/// Measures a handover between two threads that wait as a call's threads do: each polls for 50 µs and yields between the polls.
fn bench_handover(b: &mut Bencher<'_>) {
    fn wait_for(cell: &AtomicU64, wanted: u64) {
        let mut polls = 0;
        while cell.load(Ordering::Acquire) != wanted {
            polls += 1;
            if polls < 50 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
    const END: u64 = u64::MAX;
    let (there, back) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1.. {
                let mut polls = 0;
                let arrived = loop {
                    match there.load(Ordering::Acquire) {
                        END => return,
                        arrived if arrived == number => break arrived,
                        _ => {}
                    }
                    polls += 1;
                    if polls < 50 { std::hint::spin_loop() } else { std::thread::yield_now() }
                };
                back.store(arrived, Ordering::Release);
            }
        });
        let mut number = 0;
        b.iter(|| {
            number += 1;
            there.store(number, Ordering::Release);
            wait_for(&back, number);
        });
        there.store(END, Ordering::Release);
    });
}

/// Returns the time in which `threads` concurrent threads each make `count` calls of `function`.
fn time_concurrent_calls(threads: usize, function: &Function, argument: i64, count: u64) -> Duration {
    let barrier = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..count {
                    function.call::<i64>((black_box(argument), 2)).expect("a sum");
                }
                barrier.wait();
            });
        }
        barrier.wait();
        let begun = Instant::now();
        barrier.wait();
        begun.elapsed()
    })
}

fn concurrent_calls(c: &mut Criterion) {
    let lisp = lisp();
    // Each step takes some nanoseconds and stays in a register.
    lisp.load_str(
        "(defun spin (steps b)
           (declare (optimize speed) (type (unsigned-byte 60) steps b))
           (let ((x b))
             (declare (type (unsigned-byte 62) x))
             (dotimes (i steps x)
               (setf x (ldb (byte 62 0) (logxor (* x 25214903917) (ash x -7) i))))))",
    )
    .expect("it loads");
    let spin = lisp.function("spin").expect("it is there");
    let steps = |time: Duration| {
        let (begun, probe) = (Instant::now(), 10_000_000);
        spin.call::<i64>((probe, 2)).expect("it returns");
        (probe as f64 * time.as_secs_f64() / begun.elapsed().as_secs_f64()) as i64
    };
    for (name, steps) in [
        ("that returns at once", 0),
        ("of 10 µs", steps(Duration::from_micros(10))),
        ("of 100 µs", steps(Duration::from_micros(100))),
        ("of 1 ms", steps(Duration::from_millis(1))),
    ] {
        for (threads, who) in [(1, "one thread"), (2, "two threads at once")] {
            c.bench_function(&format!("a call {name}, {who}"), |b| {
                b.iter_custom(|count| time_concurrent_calls(threads, &spin, steps, count));
            });
        }
    }
}

criterion_group!(benches, calls, concurrent_calls);
criterion_main!(benches);
