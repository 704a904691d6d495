//! Calls as futures, independent of any asynchronous runtime.

use std::fmt;
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
use super::pool::{self, RequestEnd};
use crate::image::process;
use crate::image::program::{CallContext, Followup, Task};
use crate::os::panics;

/// A future of a call that has been started. Dropping the future interrupts the call.
///
/// The future's waker is called on the Lisp thread that ran the call. If this thread is unwinding at the end of the
/// call, or the call could not begin in time, the waker is called on a helper thread of the library. If the call was
/// interrupted before the call began, the waker is called on the interrupting thread. A waker that blocks does not
/// delay the time limits of other calls. But the library has at most 64 helper threads: while 64 wakers and destructors
/// block on these threads, later wakers and destructors wait.
#[must_use = "dropping the future interrupts the call"]
pub struct Call<R> {
    state: Arc<Mutex<CallState<R>>>,
    /// The number of the call, or the error that prevented the call from being submitted. Once `poll` has returned the
    /// error, `None` takes the error's place.
    call: Result<u64, Option<Error>>,
}

struct CallState<R> {
    result: Option<std::thread::Result<Result<R, Error>>>,
    is_over: bool,
    waker: Option<Waker>,
}

struct CallTask<F, R> {
    work: Option<F>,
    result: Option<std::thread::Result<Result<R, Error>>>,
    /// The state shared with [`Call`], or `None` once the call is settled.
    state: Option<Arc<Mutex<CallState<R>>>>,
    limit: Option<Duration>,
}

impl<R> CallState<R> {
    /// Records the call's result, and returns the waker to be called.
    fn end(&mut self, result: std::thread::Result<Result<R, Error>>) -> Option<Waker> {
        self.result = Some(result);
        self.is_over = true;
        self.waker.take()
    }
}

impl<F, R> Task<Error> for CallTask<F, R>
where
    F: FnOnce(&Cx) -> Result<R, Error> + Send + 'static,
    R: Send + 'static,
{
    fn run(&mut self, context: &CallContext) {
        if let Some(work) = self.work.take() {
            let cx = Cx::new(*context);
            self.result = Some(catch_unwind(AssertUnwindSafe(|| work(&cx))));
        }
    }

    fn settle(&mut self, end: RequestEnd) -> Option<Followup> {
        let state = self.state.take()?;
        let waker = state.lock().end(pool::call_result(end, &mut self.result, self.limit));
        let (work, result) = (self.work.take(), self.result.take());
        Some(Box::new(move || {
            // Each panic is caught separately: a second panic during unwinding would end the process.
            panics::catch(|| waker.map(Waker::wake));
            panics::discard(work);
            panics::discard(result);
            panics::discard(state);
        }))
    }
}

impl<F, R> Drop for CallTask<F, R> {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            let waker = state.lock().end(Ok(Err(Error::Aborted)));
            panics::catch(|| waker.map(Waker::wake));
        }
    }
}

impl<R> fmt::Debug for Call<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state is left out: its lock, which the monitor needs, would be held while code of the program, which may
        // block or call Lisp, writes the text.
        f.debug_struct("Call").field("call", &self.call).finish_non_exhaustive()
    }
}

impl<R> Future for Call<R> {
    type Output = Result<R, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = &mut self.call {
            return Poll::Ready(Err(error.take().unwrap_or(Error::Aborted)));
        }
        // In a forked process no thread ends the call, and a missing thread may hold the lock.
        if process::is_forked() {
            return Poll::Ready(Err(Error::Forked));
        }
        // The lock is not held while a waker is cloned or dropped, because cloning and dropping run code of the
        // program.
        let waker = context.waker().clone();
        let mut state = self.state.lock();
        if !state.is_over {
            let before = state.waker.replace(waker);
            drop(state);
            drop(before);
            return Poll::Pending;
        }
        let result = state.result.take();
        drop(state);
        drop(waker);
        match result {
            Some(Ok(result)) => Poll::Ready(result),
            Some(Err(panic)) => resume_unwind(panic),
            // An earlier `poll` returned the result.
            None => Poll::Ready(Err(Error::Aborted)),
        }
    }
}

impl<R> Drop for Call<R> {
    fn drop(&mut self) {
        if let Ok(call) = self.call
            && !process::is_forked()
            && !self.state.lock().is_over
        {
            pool::interrupt_call(call);
        }
    }
}

impl Lisp {
    /// Starts [`enter`](Self::enter) and returns a future of its result. `work` is queued for the threads that run the
    /// program's calls, even if the current thread is a Lisp thread that has called Rust.
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
        let state = Arc::new(Mutex::new(CallState { result: None, is_over: false, waker: None }));
        let limit = self.options().timeout;
        let task = CallTask { work: Some(work), result: None, state: Some(state.clone()), limit };
        let call = pool::submit(self.options(), Box::new(task)).map_err(Some);
        Call { state, call }
    }

    /// Starts [`eval`](Self::eval) and returns a future of its result.
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

    /// Starts [`call`](Self::call) and returns a future of its result.
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
