//! Waiting for Lisp: the answer, the client's change of mind, and signs of life in between.

use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{ErrorData, ProgressNotificationParam};
use rmcp::service::RequestContext;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::{Instant, sleep_until};

use super::Fault;

/// Clients are promised a sign of life every five seconds; this leaves some room.
const PROGRESS_EVERY: Duration = Duration::from_secs(4);

/// How long to stay awake for an answer. Waking a thread that has gone to sleep takes longer than a short evaluation.
const STAY_AWAKE: Duration = Duration::from_micros(25);

/// The answer, if it comes before it is worth going to sleep. For a call that is alone: this blocks the
/// runtime.
pub(super) fn at_once<T>(reply: &mut oneshot::Receiver<T>) -> Option<T> {
    let begin = Instant::now();
    while begin.elapsed() < STAY_AWAKE {
        match reply.try_recv() {
            Ok(answer) => return Some(answer),
            Err(TryRecvError::Closed) => return None,
            // Yields, since Lisp's thread may have been woken on this very processor.
            Err(TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
    None
}

/// Waits for what `reply` brings. `cancel` is called when the client no longer wants it.
pub(super) async fn wait<T>(
    context: &RequestContext<RoleServer>,
    reply: oneshot::Receiver<T>,
    cancel: impl FnOnce(),
) -> Result<T, Fault> {
    tokio::select! {
        biased;
        result = reply => result.map_err(|_| internal("Lisp gave no answer")),
        () = context.ct.cancelled() => {
            cancel();
            // rmcp drops the answer to a cancelled request.
            Err(internal("cancelled"))
        }
        () = signs_of_life(context) => unreachable!("they go on for ever"),
    }
}

fn internal(reason: &'static str) -> Fault {
    Fault::Protocol(ErrorData::internal_error(reason, None))
}

/// Reports progress for ever, to a client that asked for it.
async fn signs_of_life(context: &RequestContext<RoleServer>) {
    let Some(token) = context.meta.get_progress_token() else {
        return std::future::pending().await;
    };
    let begin = Instant::now();
    let mut next = begin;
    loop {
        next += PROGRESS_EVERY;
        sleep_until(next).await;
        let seconds = begin.elapsed().as_secs_f64();
        let progress = ProgressNotificationParam::new(token.clone(), seconds)
            .with_message(format!("still running after {seconds:.0} seconds"));
        if let Err(error) = context.peer.notify_progress(progress).await {
            tracing::debug!(%error, "no progress could be reported");
        }
    }
}
