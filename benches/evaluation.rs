//! Benchmarks of evaluations by a Rust program, through a `Session`.
//!
//! `bare_handover` only passes a message to another thread and back, with the primitives that the session uses. Read
//! the other figures as ratios to it, taken in one run.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::{Arc, LazyLock};

use criterion::{Criterion, criterion_group, criterion_main};
use parking_lot::{Condvar, Mutex};
use sbcl::{Evaluation, ImageConfig, Limits, Session};

static SESSION: LazyLock<Session> =
    LazyLock::new(|| Session::start(&ImageConfig::default(), Limits::default()).expect("SBCL boots"));

fn evaluate(code: &str) -> bool {
    SESSION.evaluate(Evaluation::new(black_box(code))).is_error()
}

/// A queue with a lock and a condition variable, on which the session's queue and its callers also wait.
#[derive(Default)]
struct Channel {
    items: Mutex<VecDeque<u64>>,
    pushed: Condvar,
}

impl Channel {
    fn push(&self, item: u64) {
        self.items.lock().push_back(item);
        self.pushed.notify_one();
    }

    fn pop(&self) -> u64 {
        let mut items = self.items.lock();
        loop {
            match items.pop_front() {
                Some(item) => return item,
                None => self.pushed.wait(&mut items),
            }
        }
    }
}

fn handover(criterion: &mut Criterion) {
    let (there, back) = (Arc::new(Channel::default()), Arc::new(Channel::default()));
    let (inbox, outbox) = (there.clone(), back.clone());
    let echo = std::thread::spawn(move || {
        loop {
            let item = inbox.pop();
            outbox.push(item);
            if item == 0 {
                return;
            }
        }
    });
    criterion.bench_function("bare_handover", |b| {
        b.iter(|| {
            there.push(black_box(1));
            back.pop()
        });
    });
    there.push(0);
    echo.join().expect("the echo thread ends");
}

fn evaluations(criterion: &mut Criterion) {
    for (name, code, fails) in [
        ("evaluate_plus", "(+ 1 2)", false),
        ("evaluate_let", "(let ((x 1)) (+ x 2))", false),
        ("evaluate_output", "(format t \"hello~%\")", false),
        ("error_division", "(/ 1 0)", true),
    ] {
        assert_eq!(evaluate(code), fails, "{code}");
        criterion.bench_function(name, |b| b.iter(|| evaluate(code)));
    }
}

fn errors_at_depth(criterion: &mut Criterion) {
    assert!(!evaluate("(defun deep (n) (if (= n 0) (error \"bottom\") (1+ (deep (1- n)))))"));
    for depth in [10, 1000] {
        let code = format!("(deep {depth})");
        assert!(evaluate(&code));
        criterion.bench_function(&format!("error_at_depth_{depth}"), |b| b.iter(|| evaluate(&code)));
    }
}

criterion_group!(benches, handover, evaluations, errors_at_depth);
criterion_main!(benches);
