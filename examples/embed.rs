//! The text API in one file: boots an image, evaluates code, and shows an error and its backtrace.
//!
//! Run the example with `cargo run --example embed`, or with your own code: `cargo run --example embed -- '(+ 1 2)'`.

use sbcl::{Evaluation, ImageConfig, Limits, Session, report};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let session = Session::start(&ImageConfig::default(), Limits::default())?;
    let given: Vec<String> = std::env::args().skip(1).collect();
    let code = if given.is_empty() {
        ["(defun square (x) (* x x))", "(square 12)", "(format t \"hello~%\") (values 1 2)", "(square \"no number\")"]
            .map(str::to_owned)
            .to_vec()
    } else {
        given
    };
    for code in code {
        println!("> {code}");
        let outcome = session.evaluate(Evaluation::new(code));
        println!("{}\n", report::evaluation(&outcome));
    }
    println!("{}\n", report::last_error(session.last_error().as_deref()));
    println!("{}", report::backtrace(session.last_error().as_deref(), 3));
    Ok(())
}
