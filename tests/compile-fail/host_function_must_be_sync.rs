// Lisp calls a function on any thread, and several times at once.
use std::cell::Cell;

fn main() -> Result<(), sbcl::Error> {
    let lisp = sbcl::Lisp::get_or_boot()?;
    let count = Cell::new(0_i64);
    lisp.define("host:count", "Count.", move || {
        count.set(count.get() + 1);
        count.get()
    })
}
