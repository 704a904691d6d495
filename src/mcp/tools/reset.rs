//! reset-session.

use rmcp::RoleServer;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio::sync::oneshot;

use super::wait::wait;
use super::{Answer, Arguments, Desk, Reply, Ticket, define};
use crate::handover::line_of_job;

pub(super) const NAME: &str = "reset-session";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Reset session",
        "Start over: all definitions, variables, packages, classes, threads and the last error are gone, and the \
         current package is COMMON-LISP-USER. Limits stay as configured. Cannot be undone. Use it when the session is \
         in a state you no longer understand.",
        json!({}),
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false),
    )
}

pub(super) async fn call(desk: &Desk, arguments: JsonObject, context: &RequestContext<RoleServer>) -> Answer {
    Arguments::new(NAME, &[], 0, arguments)?;
    let (answer, reply) = oneshot::channel();
    if let (Some(worker), Some(Ticket(number))) = (&desk.worker, context.extensions.get()) {
        let (worker, line) = (worker.clone(), line_of_job(*number));
        if worker.is_fresh_for(line) {
            return Ok(Reply::Reset(desk.session.take_notices()));
        }
        // The next worker answers. Nobody's waiting, nor its end, changes anything about it.
        let (turn, comes) = oneshot::channel();
        let session = desk.session.clone();
        desk.session.reset(move |result| drop(turn.send(result)));
        tokio::spawn(async move {
            if comes.await.is_ok() {
                worker.make_way(line, &session).await;
            }
            std::future::pending::<()>().await;
            drop(answer);
        });
    } else {
        desk.session.reset(move |result| drop(answer.send(result)));
    }
    // Half a reset is worse than one that nobody waits for: it is not cancelled.
    wait(context, reply, || ()).await??;
    Ok(Reply::Reset(desk.session.take_notices()))
}
