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
use super::pool::{self, End};
use crate::image::program::{Inside, Rest, Task};
use crate::os::panics;

/// A call that is under way since it was made. Dropping it interrupts it.
///
/// A Lisp thread wakes its waker, or a thread of the library's own when the call has ended without having begun. Where that
/// blocks, time limits of other calls are enforced all the same.
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
    /// `None` once the call is settled.
    shared: Option<Arc<Mutex<Shared<R>>>>,
    limit: Option<Duration>,
}

impl<R> Shared<R> {
    /// Ends the call, and returns who is to be woken.
    fn end(&mut self, result: std::thread::Result<Result<R, Error>>) -> Option<Waker> {
        self.result = Some(result);
        self.over = true;
        self.waker.take()
    }
}

impl<F, R> Task<Error> for Work<F, R>
where
    F: FnOnce(&Cx) -> Result<R, Error> + Send + 'static,
    R: Send + 'static,
{
    fn run(&mut self, inside: &Inside) {
        if let Some(work) = self.work.take() {
            let cx = Cx::new(*inside);
            self.result = Some(catch_unwind(AssertUnwindSafe(|| work(&cx))));
        }
    }

    fn settle(&mut self, end: End) -> Option<Rest> {
        let shared = self.shared.take()?;
        let waker = shared.lock().end(pool::settled(end, &mut self.result, self.limit));
        let (work, result) = (self.work.take(), self.result.take());
        Some(Box::new(move || {
            // Each by itself: a second panic while one unwinds would end the process.
            panics::caught(|| waker.map(Waker::wake));
            panics::discard(work);
            panics::discard(result);
            panics::discard(shared);
        }))
    }
}

impl<F, R> Drop for Work<F, R> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            let waker = shared.lock().end(Ok(Err(Error::Aborted)));
            panics::caught(|| waker.map(Waker::wake));
        }
    }
}

impl<R> Future for Call<R> {
    type Output = Result<R, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = &mut self.call {
            return Poll::Ready(Err(error.take().unwrap_or(Error::Aborted)));
        }
        // Wakers are cloned and dropped without the lock: both run code of the program's.
        let waker = context.waker().clone();
        let mut shared = self.shared.lock();
        if !shared.over {
            let before = shared.waker.replace(waker);
            drop(shared);
            drop(before);
            return Poll::Pending;
        }
        let result = shared.result.take();
        drop(shared);
        drop(waker);
        match result {
            Some(Ok(result)) => Poll::Ready(result),
            Some(Err(panic)) => resume_unwind(panic),
            // It was taken before.
            None => Poll::Ready(Err(Error::Aborted)),
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
        let task = Work { work: Some(work), result: None, shared: Some(shared.clone()), limit };
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
