//! A program that contains its compiled Lisp code: `cargo run` in this directory. The binary can be copied elsewhere,
//! because it needs neither an installed Lisp nor the Lisp source.

use sbcl::{Error, Lisp};

fn main() -> Result<(), Error> {
    let lisp = Lisp::builder().heap(1 << 30).boot()?;
    let total: i64 = lisp.call("shop:total", (vec![("apple", 3), ("pear", 4)],))?;
    let native: bool = lisp.eval("(compiled-function-p #'shop:total)")?;
    println!("total: {total}, compiled: {native}");
    Ok(())
}
