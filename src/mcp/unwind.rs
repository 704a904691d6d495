//! A panic in a tool is an answer, too.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Runs a future to its end or to its panic, whose message it returns.
pub(super) async fn caught<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
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
        assert_eq!(super::caught(async { 1 }).await, Ok(1));
        assert_eq!(super::caught(async { panic!("no {}", "way") }).await, Err::<(), _>("no way".to_owned()));
    }
}
