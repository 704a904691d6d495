//! Waiting for Lisp: the answer, the client's change of mind, and signs of life in between.

use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{ErrorData, ProgressNotification, ProgressNotificationParam, ServerNotification};
use rmcp::service::RequestContext;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::Fault;
use crate::mcp::wire::Concerning;

/// Clients are promised a sign of life every five seconds; this leaves some room.
const PROGRESS_EVERY: Duration = Duration::from_secs(4);

/// How often output is looked for.
const OUTPUT_EVERY: Duration = Duration::from_millis(250);

/// Bytes of output in one report.
const MESSAGE_BYTES: usize = 1000;

/// Waits for what `reply` brings. `cancel` is called when the client no longer wants it.
pub(super) async fn wait<T>(
    context: &RequestContext<RoleServer>,
    reply: oneshot::Receiver<T>,
    cancel: impl FnOnce(),
) -> Result<T, Fault> {
    wait_reporting(context, reply, cancel, |_| None).await
}

/// Waits as [`wait`] does, and meanwhile reports what `printed` brings: the output from a byte on, if there is more.
pub(super) async fn wait_reporting<T>(
    context: &RequestContext<RoleServer>,
    reply: oneshot::Receiver<T>,
    cancel: impl FnOnce(),
    printed: impl Fn(usize) -> Option<String>,
) -> Result<T, Fault> {
    tokio::select! {
        biased;
        result = reply => result.map_err(|_| internal("Lisp gave no answer")),
        () = context.ct.cancelled() => {
            cancel();
            // rmcp drops the answer to a cancelled request.
            Err(internal("cancelled"))
        }
        () = signs_of_life(context, printed) => unreachable!("they go on for ever"),
    }
}

/// Waits as [`wait`] does, but not for longer than `time`.
pub(super) async fn wait_for<T>(
    context: &RequestContext<RoleServer>,
    reply: oneshot::Receiver<T>,
    time: Duration,
) -> Result<Option<T>, Fault> {
    match tokio::time::timeout(time, wait(context, reply, || ())).await {
        Ok(result) => result.map(Some),
        Err(_) => Ok(None),
    }
}

fn internal(reason: &'static str) -> Fault {
    Fault::Protocol(ErrorData::internal_error(reason, None))
}

/// Reports progress for ever, to a client that asked for it: output as it comes, and now and then that it goes on.
async fn signs_of_life(context: &RequestContext<RoleServer>, printed: impl Fn(usize) -> Option<String>) {
    let Some(token) = context.meta.get_progress_token() else {
        return std::future::pending().await;
    };
    let begin = Instant::now();
    let (mut told, mut next, mut seen) = (begin, begin, 0);
    loop {
        next += OUTPUT_EVERY;
        sleep_until(next).await;
        let seconds = begin.elapsed().as_secs_f64();
        let message = match printed(seen) {
            Some(output) => {
                seen += output.len();
                tail(&output).to_owned()
            }
            None if told.elapsed() >= PROGRESS_EVERY => format!("still running after {seconds:.0} seconds"),
            None => continue,
        };
        told = Instant::now();
        let progress = ProgressNotificationParam::new(token.clone(), seconds).with_message(message);
        let mut progress = ProgressNotification::new(progress);
        progress.extensions.insert(Concerning(context.id.clone()));
        let progress = ServerNotification::ProgressNotification(progress);
        if let Err(error) = context.peer.send_notification(progress).await {
            tracing::debug!(%error, "no progress could be reported");
        }
    }
}

/// The end of `output`, as much as fits a message.
fn tail(output: &str) -> &str {
    let start = output.len().saturating_sub(MESSAGE_BYTES);
    let start = (start..output.len()).find(|index| output.is_char_boundary(*index)).unwrap_or(0);
    output[start..].trim_end()
}
