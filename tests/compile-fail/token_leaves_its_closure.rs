// The proof that this is a Lisp thread is lent for the closure's time.
fn main() -> Result<(), sbcl::Error> {
    let lisp = sbcl::Lisp::get_or_boot()?;
    let mut kept = None;
    lisp.enter(|cx| {
        kept = Some(cx);
        Ok(())
    })
}
