//! reset-session.

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::{Arguments, Call, Fault, Reply, Step, ask, define, later};
use crate::rpc::route::call_of_job;

pub(super) const NAME: &str = "reset-session";

/// Why a user is asked no more.
const WITHDRAWN: &str = "the session was reset";

pub(super) fn tool() -> Tool {
    define(
        NAME,
        "Reset session",
        "Start over: definitions, variables, packages, classes, threads and the last error are gone; limits[[checkpoint| and \
        named checkpoints]] stay. Cannot be undone.",
        json!({}),
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false),
    )
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    Arguments::new(NAME, &[], 0, arguments)?;
    later(|call| {
        let session = call.session().clone();
        let answer = |call: Call, ended: Vec<String>| {
            let notices = ended.into_iter().chain(call.session().take_notices()).collect();
            call.reply(Reply::Reset(notices));
        };
        if let Some(recovery) = call.context.recovery.clone() {
            let number = call_of_job(call.number);
            if recovery.is_fresh_for(number) {
                return answer(call, Vec::new());
            }
            // The next worker answers.
            let context = call.context.clone();
            call.leave();
            recovery.give_up_restoring(&session);
            session.abandon();
            ask::withdraw(&context, WITHDRAWN);
            return recovery.request_reset(number, &session);
        }
        let ended = session.end_all();
        ask::withdraw(&call.context, WITHDRAWN);
        // Half a reset is worse than one that nobody waits for: it is not cancelled.
        session.reset(move |result| {
            // What had just failed may have asked since.
            ask::withdraw(&call.context, WITHDRAWN);
            match result {
                Ok(()) => answer(call, ended),
                Err(error) => call.refuse(error),
            }
        });
    })
}
