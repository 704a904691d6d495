//! A tour of the library's API in ten minutes: `cargo run --example guided_tour`.

use std::collections::HashMap;
use std::time::Duration;

use sbcl::{Condition, Error, Function, Lisp, Restart, Value, keyword};

fn main() -> Result<(), Error> {
    // A process has one image, and handles on it are cheap to clone. A second boot is an error that can be matched; tests
    // share an image with get_or_boot().
    let lisp = Lisp::builder().heap(2 << 30).threads(2).boot()?;

    // Single values, multiple values, and nil as None.
    let three: i64 = lisp.eval("(+ 1 2)")?;
    let (quotient, remainder): (i64, i64) = lisp.eval("(floor 17 5)")?;
    let names: Vec<String> = lisp.eval(r#"(list "ada" "grace")"#)?;
    let none: Option<f64> = lisp.eval("nil")?;
    println!("{three}, {quotient} remainder {remainder}, {names:?}, {none:?}");

    // A conversion error says what was expected and what was found.
    println!("{}", lisp.eval::<Vec<i8>>("(list 1 2 300)").unwrap_err());

    // A function is looked up once and follows its redefinition.
    lisp.load_str(
        "(defpackage :shop (:use :cl) (:export #:price))
         (in-package :shop)
         (defun price (n &key (rate 2)) (* n rate))",
    )?;
    let price: Function = lisp.function("shop:price")?;
    assert_eq!(price.call::<i64>((21,))?, 42);
    assert_eq!(lisp.call::<i64>("shop:price", (21, keyword("rate"), 3))?, 63);

    // A handle of any object may be stored, sent to other threads, and dropped anywhere.
    let table: Value = lisp.eval("(make-hash-table :test 'equal)")?;
    lisp.call::<()>("(setf gethash)", ("value", "key", &table))?;
    println!("{:?}", table.to::<HashMap<String, String>>()?);
    drop(std::thread::spawn(move || drop(table)).join());

    // On a Lisp thread calls are direct, without a hand-over. Octets are copied as fast as memory allows.
    let sum: u64 = lisp.enter(|cx| {
        let bytes = cx.eval::<Value>("(make-array 1000000 :element-type '(unsigned-byte 8) :initial-element 1)")?;
        let mut copy = vec![0; cx.len(&bytes)?];
        cx.copy_bytes(&bytes, &mut copy)?;
        Ok(copy.iter().map(|&b| u64::from(b)).sum())
    })?;
    println!("{sum}");

    // Rust functions for Lisp: arguments are typed, and errors become conditions.
    lisp.define("host:read", "Return the text of the file PATH.", |path: String| std::fs::read_to_string(path))?;
    let handled: String = lisp.eval(r#"(handler-case (host:read "/nowhere") (error (e) (format nil "no: ~a" e)))"#)?;
    println!("{handled}");

    // Conditions are matched by class, and contain the message, the restarts and the backtrace.
    match lisp.eval::<i64>("(/ 1 0)") {
        Err(Error::Condition(condition)) if condition.is("arithmetic-error") => {
            println!("{condition}\n{}", condition.backtrace());
        }
        other => println!("unexpected: {other:?}"),
    }

    // A handler decides where the error is signalled, before anything is unwound. Options belong to a handle, not to a
    // thread.
    let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("use-value", 0)));
    let safe: i64 = careful.eval("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))")?;
    assert_eq!(safe, 1);

    // Dynamic variables can be bound for a handle's calls.
    let hex = lisp.with_bindings(&[("*print-base*", lisp.value(16)?)])?;
    println!("{}", hex.eval::<String>("(princ-to-string 255)")?);

    // Time limits, interruption, and futures for any runtime.
    let late = lisp.with_timeout(Duration::from_millis(100)).eval::<()>("(loop)");
    assert!(matches!(late, Err(Error::Timeout { .. })));
    let stop = lisp.interrupt_handle();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        stop.interrupt();
    });
    assert!(matches!(lisp.eval::<()>("(loop)"), Err(Error::Interrupted)));
    let later = lisp.eval_async::<i64>("(progn (sleep 0.1) 7)");
    println!("{}", smol::block_on(later)?);
    Ok(())
}
