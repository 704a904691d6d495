// Another thread is not a Lisp thread.
fn main() -> Result<(), sbcl::Error> {
    let lisp = sbcl::Lisp::get_or_boot()?;
    lisp.enter(|cx| {
        std::thread::scope(|scope| scope.spawn(|| cx.eval::<i64>("1")).join().unwrap())
    })?;
    Ok(())
}
