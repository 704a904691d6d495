//! `background` and `wait`: evaluations whose calls need not wait for their end.

use std::sync::Arc;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::arguments::{Flag, seconds_of};
use super::{Call, Fault};
use crate::session::Aftermath;
use crate::session::Operation;
use crate::{Background, Evaluation, JobId, OnError, Outcome, Session};

/// The longest that a call may wait, in seconds.
const MAX_WAIT: f64 = 86_400.0;

/// For how long a call waits before its evaluation continues in the background.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Wait(Duration);

impl<'de> Deserialize<'de> for Wait {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let seconds = seconds_of(&value, &(0.0..=MAX_WAIT), format!("a number of seconds from 0 to {MAX_WAIT}"))?;
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

/// For how long a call waits for its evaluation: `None` to the end.
pub(super) fn patience(background: Flag, wait: Option<Wait>) -> Option<Duration> {
    if background.0 { Some(Duration::ZERO) } else { wait.map(|wait| wait.0) }
}

/// What a failure comes to: what was asked for, or what the session does. One that may be in the background is unwound.
pub(super) fn on_error(
    session: &Session,
    asked: Option<OnError>,
    patience: Option<Duration>,
) -> Result<OnError, Fault> {
    match (asked, patience) {
        (Some(asked), Some(_)) if asked != OnError::Abort => Err(Fault::Value(format!(
            "An evaluation that may be in the background is not held when it fails: with background or wait, on-error \
             can only be \"abort\", not {:?}.",
            asked.name()
        ))),
        (_, Some(_)) => Ok(OnError::Abort),
        (asked, None) => Ok(asked.unwrap_or(session.limits().on_error)),
    }
}

/// What a call evaluates.
pub(super) struct Job {
    evaluation: Evaluation,
    operation: Option<Operation>,
    aftermath: Option<Aftermath>,
    /// What progress reports say.
    reports: fn(&Session, JobId, usize) -> Option<String>,
}

impl Job {
    /// Code, whose output is reported.
    pub(super) fn new(evaluation: Evaluation) -> Self {
        Self { evaluation, operation: None, aftermath: None, reports: Session::output_so_far }
    }

    /// An operation.
    pub(super) fn operation(evaluation: Evaluation, operation: Operation) -> Self {
        Self { operation: Some(operation), ..Self::new(evaluation) }
    }

    /// The same with something to do before it is over.
    pub(super) fn before_end(self, aftermath: Aftermath) -> Self {
        Self { aftermath: Some(aftermath), ..self }
    }

    /// The same with other reports.
    pub(super) fn reporting(self, reports: fn(&Session, JobId, usize) -> Option<String>) -> Self {
        Self { reports, ..self }
    }
}

/// Evaluates, and has `answer` answer the call with what that comes to, unless the call's patience ends before.
pub(super) fn evaluate(
    call: Call,
    job: Job,
    patience: Option<Duration>,
    answer: impl FnOnce(Call, Arc<Outcome>) + Send + 'static,
) {
    let Job { mut evaluation, operation, aftermath, reports } = job;
    let session = call.session().clone();
    if patience.is_some()
        && let Err(error) = session.check_background()
    {
        return call.refuse(error);
    }
    let submit = |evaluation, reply| session.submit_as(None, evaluation, operation.as_ref(), aftermath, reply);
    if patience == Some(Duration::ZERO) {
        evaluation.background = Background::AtOnce;
        let job = submit(evaluation, Box::new(drop));
        return call.reply(session.so_far(job));
    }
    if patience.is_some() {
        evaluation.background = Background::Later;
    }
    let waiting = call.waiting();
    let call = call.shared();
    let ended = call.clone();
    let reply = move |outcome| {
        if let Some(call) = ended.take() {
            answer(call, outcome);
        }
    };
    let job = submit(evaluation, Box::new(reply));
    waiting.report_job(&session, job, reports);
    if let Some(time) = patience {
        let session = session.clone();
        waiting.after(time, move || {
            if let Some(outcome) = session.leave_foreground(job)
                && let Some(call) = call.take()
            {
                call.reply(outcome);
            }
        });
    }
    waiting.on_cancel(move || session.cancel(job));
}
