//! reset-session.

use rmcp::model::ToolAnnotations;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Call, Fault, Finding, Offered, Step, Traits, ask, later};
use crate::report;
use crate::rpc::route::call_of_job;
use crate::schema::json;

/// Why a user is asked no more.
const WITHDRAWN: &str = "the session was reset";

/// The tool.
pub(super) struct ResetSession;

#[derive(Deserialize, JsonSchema)]
pub(super) struct Arguments {}

impl Offered for ResetSession {
    const NAME: &'static str = "reset-session";
    const TITLE: &'static str = "Reset session";
    const DESCRIPTION: &'static str = "Start over: definitions, variables, packages, classes, threads and the last error are gone; \
        limits[[checkpoint| and named checkpoints]] stay. Cannot be undone.";
    const TRAITS: Traits = Traits { repeatable: true, meanwhile: true, core: true, ..Traits::NONE };
    type Arguments = Arguments;
    type Content = Content;

    fn hints() -> ToolAnnotations {
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(true).open_world(false)
    }

    fn call(_: &Call, _: Arguments) -> Result<Step, Fault> {
        later(|call| {
            let session = call.session().clone();
            let answer = |call: Call, ended: Vec<String>| {
                let notices = ended.into_iter().chain(call.session().take_notices()).collect();
                call.reply(Reset { notices });
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
}

/// The session is as new; what there is to say of what it was.
#[derive(Debug)]
struct Reset {
    notices: Vec<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Content {
    reset: bool,
    package: String,
    notices: Vec<String>,
}

impl Finding for Reset {
    fn text(&self, _: usize) -> String {
        report::reset(&self.notices)
    }

    fn content(&self, _: usize) -> Value {
        json(&Content { reset: true, package: "COMMON-LISP-USER".to_owned(), notices: self.notices.clone() })
    }
}
