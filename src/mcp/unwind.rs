//! A panic in a tool is an answer, too.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;

/// Runs the future that `begin` makes to its end, or to its panic or that of `begin`, whose message it returns.
pub(super) async fn caught<T, F: Future<Output = T> + Unpin>(begin: impl FnOnce() -> F) -> Result<T, String> {
    let mut future = catch_unwind(AssertUnwindSafe(begin)).map_err(|panic| message(&*panic))?;
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| Pin::new(&mut future).poll(context))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(message(&*panic))),
    })
    .await
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown reason").to_owned()
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_panic_becomes_its_message() {
        assert_eq!(super::caught(|| Box::pin(async { 1 })).await, Ok(1));
        let late = super::caught(|| Box::pin(async { panic!("no {}", "way") }));
        assert_eq!(late.await, Err::<(), _>("no way".to_owned()));
        let early = super::caught(|| -> std::future::Ready<()> { panic!("not even that") });
        assert_eq!(early.await, Err("not even that".to_owned()));
    }
}
