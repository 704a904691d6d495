//! What calls between a Rust program and its image cost.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use sbcl::{Lisp, Value};

fn calls(c: &mut Criterion) {
    let lisp = Lisp::get_or_boot().expect("SBCL boots");
    lisp.load_str("(defun add-fixnums (a b) (declare (optimize speed) (type (signed-byte 60) a b)) (+ a b))")
        .expect("it loads");
    lisp.define("host:add", "Return the sum.", |a: i64, b: i64| a + b).expect("it is defined");
    lisp.load_str("(defun call-host (n) (declare (type fixnum n)) (loop repeat n do (host:add 1 2)))")
        .expect("it loads");
    let add = lisp.function("add-fixnums").expect("it is there");
    let text = "x".repeat(1024);

    c.bench_function("function.call of two fixnums, another thread", |b| {
        b.iter(|| add.call::<i64>((black_box(1), 2)).expect("a sum"));
    });
    c.bench_function("eval of (+ 1 2), another thread", |b| {
        b.iter(|| lisp.eval::<i64>(black_box("(+ 1 2)")).expect("a sum"));
    });
    c.bench_function("error with its condition, another thread", |b| {
        b.iter(|| lisp.eval::<i64>(black_box("(/ 1 0)")).expect_err("an error"));
    });
    // On a Lisp thread: the benchmark runs there.
    lisp.enter(|cx| {
        let mut c = Criterion::default();
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

criterion_group!(benches, calls);
criterion_main!(benches);
