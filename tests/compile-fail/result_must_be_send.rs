// What a call returns comes from another thread.
fn main() -> Result<(), sbcl::Error> {
    let lisp = sbcl::Lisp::get_or_boot()?;
    let shared = lisp.enter(|_| Ok(std::rc::Rc::new(1)))?;
    drop(shared);
    Ok(())
}
