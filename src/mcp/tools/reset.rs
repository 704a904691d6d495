//! The tool reset-session.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Call, CallHandler, CallPolicy, Fault, ToolResult, ToolSpec, handle_with};
use crate::report;
use crate::schema::json;

/// The tool reset-session.
pub(super) struct ResetSession;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {}

impl ToolSpec for ResetSession {
    const NAME: &'static str = "reset-session";
    const TITLE: &'static str = "Reset session";
    const DESCRIPTION: &'static str = "Start over: discard definitions, variables, packages, classes, threads and the \
        last error; keep limits[[checkpoint| and named checkpoints]]. Cannot be undone.";
    // Not slow, so that a reset needs no new thread: code in the image may have set the limit of memory or threads to 0.
    const POLICY: CallPolicy = CallPolicy { repeatable: true, during_restore: true, core: true, ..CallPolicy::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false)
    }

    fn call(_: &Call, _: Arguments) -> Result<CallHandler, Fault> {
        handle_with(|call| {
            let session = call.session().clone();
            let answer = |call: Call, ended: Vec<String>| {
                let notices = ended.into_iter().chain(call.session().take_notices()).collect();
                call.reply(ResetResult { notices });
            };
            if let Some(recovery) = call.context.recovery.clone() {
                let job = call.first_job;
                if recovery.has_replaced_image(job) {
                    return answer(call, Vec::new());
                }
                if let Some(obstacle) = recovery.replacement_obstacle(job) {
                    return call.refuse(Fault::Refusal(obstacle));
                }
                // The next worker answers the call. A cancelled call changes nothing.
                if !call.leave_unanswered() {
                    return;
                }
                return recovery.request_reset(job, &session);
            }
            let ended = session.cancel_all();
            // The reset has no cancellation handler: an incomplete reset is worse than a reset that nobody waits for.
            session.reset(move |result| match result {
                Ok(()) => answer(call, ended),
                Err(error) => call.refuse(error),
            });
        })
    }
}

/// The result of a reset. `notices` include a notice about the evaluations that the reset ended.
#[derive(Debug)]
struct ResetResult {
    notices: Vec<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Content {
    reset: bool,
    package: String,
    notices: Vec<String>,
}

impl ToolResult for ResetResult {
    fn text(&self, _: usize) -> String {
        report::reset(&self.notices)
    }

    fn structured_content(&self, _: usize) -> Value {
        json(&Content { reset: true, package: "COMMON-LISP-USER".to_owned(), notices: self.notices.clone() })
    }
}
