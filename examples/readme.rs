//! The program in the section "The library" of README.md: `cargo run --example readme`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    use sbcl::{Error, Function, Lisp};

    let lisp = Lisp::builder().threads(2).boot()?;
    let (quotient, remainder): (i64, i64) = lisp.eval("(floor 17 5)")?;
    lisp.load_str("(defun price (n &key (rate 2)) (* n rate))")?;
    let price: Function = lisp.function("price")?; // follows redefinition
    assert_eq!(price.call::<i64>((21,))?, 42);
    lisp.define("host:read", "Return the text of a file.", |path: String| std::fs::read_to_string(path))?;
    match lisp.eval::<i64>("(/ 1 0)") {
        Err(Error::Condition(condition)) if condition.is("arithmetic-error") => println!("{}", condition.backtrace()),
        other => println!("{other:?}"),
    }
    assert_eq!((quotient, remainder), (3, 2));
    Ok(())
}
