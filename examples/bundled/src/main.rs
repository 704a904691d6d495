//! A program with its Lisp compiled in: `cargo run` in this directory. The binary can be copied elsewhere: it needs neither
//! Lisp nor source to run.

use sbcl::{Error, Lisp};

fn main() -> Result<(), Error> {
    let lisp = Lisp::builder().heap(1 << 30).boot()?;
    let total: i64 = lisp.call("shop:total", (vec![("apple", 3), ("pear", 4)],))?;
    let native: bool = lisp.eval("(compiled-function-p #'shop:total)")?;
    println!("total: {total}, compiled: {native}");
    Ok(())
}
