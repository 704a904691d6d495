//! The arguments `background` and `wait`, and evaluations that may continue after their call is answered.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::arguments::{Flag, parse_seconds};
use super::{Call, Fault};
use crate::os::helper_threads;
use crate::session::{Operation, OutcomeSoFar, PostProcessing};
use crate::{Background, Evaluation, JobId, OnError, Outcome, Session};

/// Maximum value of `wait`, in seconds.
const MAX_WAIT_SECONDS: f64 = 86_400.0;

/// Time that a call waits before its evaluation continues in the background.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Wait(Duration);

impl<'de> Deserialize<'de> for Wait {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let seconds = parse_seconds(
            &value,
            &(0.0..=MAX_WAIT_SECONDS),
            format!("a number of seconds from 0 to {MAX_WAIT_SECONDS}"),
        )?;
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

impl JsonSchema for Wait {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Wait".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0})
    }
}

/// Returns the time that a call waits for its evaluation; `None` for no limit.
pub(super) fn wait_limit(background: Flag, wait: Option<Wait>) -> Option<Duration> {
    if background.0 { Some(Duration::ZERO) } else { wait.map(|wait| wait.0) }
}

/// Returns the reaction to a failure: the argument `asked`, or else the session's setting. An evaluation that may run in
/// the background is never held: without `asked`, its reaction is to abort.
///
/// # Errors
/// Returns an error if the evaluation may run in the background and `asked` is a reaction other than to abort.
pub(super) fn resolve_on_error(
    session: &Session,
    asked: Option<OnError>,
    wait_limit: Option<Duration>,
) -> Result<OnError, Fault> {
    match (asked, wait_limit) {
        (Some(asked), Some(_)) if asked != OnError::Abort => Err(Fault::Refusal(format!(
            "A background evaluation is not held when it fails: with background or wait, on-error can only be \
             \"abort\", not {:?}.",
            asked.name()
        ))),
        (_, Some(_)) => Ok(OnError::Abort),
        (asked, None) => Ok(asked.unwrap_or(session.limits().on_error)),
    }
}

/// An evaluation to submit for a call, with its operation, post-processing and progress reports.
pub(super) struct Job {
    evaluation: Evaluation,
    operation: Option<Operation>,
    post_processing: Option<PostProcessing>,
    /// The function that returns the progress text of the job so far, from a byte index on, up to a number of bytes.
    progress_text: fn(&Session, JobId, usize, usize) -> Option<String>,
}

impl Job {
    /// Returns a job that evaluates code and reports its output.
    pub(super) fn new(evaluation: Evaluation) -> Self {
        Self { evaluation, operation: None, post_processing: None, progress_text: Session::output_part }
    }

    /// Returns a job that performs an operation. `evaluation` has the job's limits, and the code to log.
    pub(super) fn operation(evaluation: Evaluation, operation: Operation) -> Self {
        Self { operation: Some(operation), ..Self::new(evaluation) }
    }

    /// Adds post-processing, which runs before the job is over.
    pub(super) fn with_post_processing(self, post_processing: PostProcessing) -> Self {
        Self { post_processing: Some(post_processing), ..self }
    }

    /// Sets the function that returns the progress text of the job so far, from a byte index on, up to a number of bytes.
    pub(super) fn with_progress_text(self, progress_text: fn(&Session, JobId, usize, usize) -> Option<String>) -> Self {
        Self { progress_text, ..self }
    }
}

/// Evaluates `job` and answers the call with `answer`. If the evaluation takes longer than `wait_limit`, it continues
/// in the background, and the call is answered with the evaluation's progress.
pub(super) fn evaluate(
    call: Call,
    job: Job,
    wait_limit: Option<Duration>,
    answer: impl FnOnce(Call, Arc<Outcome>) + Send + 'static,
) {
    let Job { mut evaluation, operation, post_processing, progress_text } = job;
    let session = call.session().clone();
    if wait_limit.is_some()
        && let Err(error) = session.check_background_capacity()
    {
        return call.refuse(error);
    }
    let submit =
        |evaluation, reply| session.submit_with_options(None, evaluation, operation.as_ref(), post_processing, reply);
    if wait_limit == Some(Duration::ZERO) {
        evaluation.background = Background::AtOnce;
        let job = submit(evaluation, Box::new(drop));
        let so_far = session.so_far_without_output(job);
        if so_far.lacks_output() {
            return reply_on_helper(call, session, so_far);
        }
        return call.reply(session.complete(so_far));
    }
    if wait_limit.is_some() {
        evaluation.background = Background::Later;
    }
    let pending = call.pending();
    let call = call.shared();
    let ended = call.clone();
    let reply = move |outcome| {
        if let Some(call) = ended.take() {
            answer(call, outcome);
        }
    };
    let job = pending.submit(&session, || submit(evaluation, Box::new(reply)));
    pending.report_job(&session, job, progress_text);
    if let Some(time) = wait_limit {
        let session = session.clone();
        pending.set_deadline(time, move || {
            // The outcome has the notices and the output that the connection's next answer must contain, so the evaluation
            // must not answer the call once the outcome exists.
            if let Some((call, so_far)) = call.take_if(|| session.move_to_background(job)) {
                reply_on_helper(call, session, so_far);
            }
        });
    }
}

/// Answers a call on another thread: copying and rendering a large output on the event loop would delay other clients. One
/// answer is rendered at a time, so that the client can read the answers as fast as they come.
fn reply_on_helper(call: Call, session: Session, so_far: OutcomeSoFar) {
    static RENDERING: Mutex<()> = Mutex::new(());
    helper_threads::run(move || {
        let outcome = session.complete(so_far);
        let _rendering = RENDERING.lock();
        call.context.inflight.output.wait_for_supervisor();
        call.reply(outcome);
    });
}
