//! Calls as futures, of no particular runtime.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;

use super::convert::{Arguments, FromLisp};
use super::enter::Cx;
use super::error::Error;
use super::handle::Lisp;
use super::pool;
use crate::image::program::{End, Inside, Task};

/// A call that is under way since it was made. Dropping it interrupts it.
#[derive(Debug)]
#[must_use = "dropping it interrupts the call"]
pub struct Call<R> {
    shared: Arc<Mutex<Shared<R>>>,
    /// Its number; an error where it could not begin.
    call: Result<u64, Option<Error>>,
}

#[derive(Debug)]
struct Shared<R> {
    result: Option<std::thread::Result<Result<R, Error>>>,
    over: bool,
    waker: Option<Waker>,
}

struct Work<F, R> {
    work: Option<F>,
    result: Option<std::thread::Result<Result<R, Error>>>,
    shared: Arc<Mutex<Shared<R>>>,
    limit: Option<Duration>,
}

impl<F, R> Work<F, R> {
    fn finish(&mut self, result: std::thread::Result<Result<R, Error>>) {
        let waker = {
            let mut shared = self.shared.lock();
            if shared.over {
                return;
            }
            shared.result = Some(result);
            shared.over = true;
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<F: FnOnce(&Cx) -> Result<R, Error> + Send, R: Send> Task for Work<F, R> {
    fn run(&mut self, inside: &Inside) {
        if let Some(work) = self.work.take() {
            let cx = Cx::new(*inside);
            self.result = Some(catch_unwind(AssertUnwindSafe(|| work(&cx))));
        }
    }

    fn settle(&mut self, end: End) {
        let (work, result) = (self.work.take(), self.result.take());
        // What a waker panics with, or what is dropped here, ends no thread.
        let _ = catch_unwind(AssertUnwindSafe(move || {
            self.finish(pool::settled(end, result, self.limit));
            drop(work);
        }));
    }
}

impl<F, R> Drop for Work<F, R> {
    fn drop(&mut self) {
        self.finish(Ok(Err(Error::Aborted)));
    }
}

impl<R> Future for Call<R> {
    type Output = Result<R, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = &mut self.call {
            return Poll::Ready(Err(error.take().unwrap_or(Error::Aborted)));
        }
        let mut shared = self.shared.lock();
        match shared.result.take() {
            Some(Ok(result)) => Poll::Ready(result),
            Some(Err(panic)) => {
                drop(shared);
                resume_unwind(panic)
            }
            // It was taken before.
            None if shared.over => Poll::Ready(Err(Error::Aborted)),
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<R> Drop for Call<R> {
    fn drop(&mut self) {
        if let Ok(call) = self.call
            && !self.shared.lock().over
        {
            pool::interrupt_call(call);
        }
    }
}

impl Lisp {
    /// Begins [`enter`](Self::enter) and does not wait for it.
    ///
    /// ```
    /// # fn block_on<T>(future: impl std::future::Future<Output = T>) -> T {
    /// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// #     let mut future = std::pin::pin!(future);
    /// #     loop {
    /// #         if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) { return value }
    /// #         std::thread::yield_now();
    /// #     }
    /// # }
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let later = lisp.enter_async(|cx| cx.function("+")?.call::<i64>((1, 2)));
    /// assert_eq!(block_on(later)?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn enter_async<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Cx) -> Result<R, Error> + Send + 'static,
    ) -> Call<R> {
        let shared = Arc::new(Mutex::new(Shared { result: None, over: false, waker: None }));
        let limit = self.options().timeout;
        let task = Work { work: Some(work), result: None, shared: shared.clone(), limit };
        let call = pool::submit(self.options(), Box::new(task)).map_err(Some);
        Call { shared, call }
    }

    /// Begins [`eval`](Self::eval) and does not wait for it.
    ///
    /// ```
    /// # fn block_on<T>(future: impl std::future::Future<Output = T>) -> T {
    /// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// #     let mut future = std::pin::pin!(future);
    /// #     loop {
    /// #         if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) { return value }
    /// #         std::thread::yield_now();
    /// #     }
    /// # }
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let later = lisp.eval_async::<i64>("(progn (sleep 0.01) 7)");
    /// assert_eq!(block_on(later)?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn eval_async<T: FromLisp + Send + 'static>(&self, code: &str) -> Call<T> {
        let code = code.to_owned();
        self.enter_async(move |cx| cx.eval(&code))
    }

    /// Begins [`call`](Self::call) and does not wait for it.
    ///
    /// ```
    /// # fn block_on<T>(future: impl std::future::Future<Output = T>) -> T {
    /// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// #     let mut future = std::pin::pin!(future);
    /// #     loop {
    /// #         if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) { return value }
    /// #         std::thread::yield_now();
    /// #     }
    /// # }
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let later = lisp.call_async::<i64>("+", (1, 2));
    /// assert_eq!(block_on(later)?, 3);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn call_async<T: FromLisp + Send + 'static>(
        &self,
        name: &str,
        arguments: impl Arguments + Send + 'static,
    ) -> Call<T> {
        let name = name.to_owned();
        self.enter_async(move |cx| cx.call(&name, arguments))
    }
}
