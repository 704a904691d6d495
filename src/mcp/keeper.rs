//! Has the supervisor know what must outlive the image.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::worker::Worker;
use crate::handover::frame::Kind;
use crate::handover::shared_status::{Status, monotonic};
use crate::handover::{Entry, ErrorChange};
use crate::interruption::Stuck;
use crate::outcome::{DefiningForm, ErrorRecord, Outcome};
use crate::session::observer::Observer;
use crate::{Limits, report};

/// How long after its time an evaluation may take to end, or to be given up by this process.
const GRACE: Duration = Duration::from_secs(3);

/// When an evaluation must be over that has so much time from now on, for [`Status::Due`].
pub(super) fn due(time: Duration) -> u64 {
    u64::try_from((time + GRACE).as_nanos()).unwrap_or(u64::MAX).saturating_add(monotonic())
}

/// Tells the supervisor.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) worker: Worker,
    /// The number of each connection's last error as the supervisor knows it.
    pub(super) told: Mutex<HashMap<u64, Option<u64>>>,
    /// When the form that runs began, or one before it: the job's begin, or the last form that defined something.
    pub(super) since: Mutex<Instant>,
}

impl Observer for Keeper {
    fn restores(&self) -> bool {
        self.worker.restoring.evaluates()
    }

    fn begun(&self, job: u64, timeout: Option<Duration>) {
        if self.restores() {
            return;
        }
        *self.since.lock() = Instant::now();
        self.worker.status.set_step(None);
        self.worker.status.set(Status::Due, timeout.map_or(0, due));
        self.worker.status.set(Status::Begun, job);
    }

    fn extended(&self, more: Option<Duration>) {
        self.worker.status.set(Status::Due, more.map_or(0, due));
    }

    fn step(&self, step: Option<&str>) {
        self.worker.status.set_step(step);
    }

    fn asks(&self, yes: bool) {
        self.worker.status.count(Status::Asked, yes);
    }

    fn ended(&self, job: u64) {
        if self.restores() {
            return;
        }
        // One that was cancelled in the queue never began.
        if self.worker.status.get(Status::Begun) == job {
            self.worker.status.set(Status::Ended, job);
        }
        self.worker.activity.ended();
    }

    fn in_background(&self, evaluations: &mut dyn Iterator<Item = u64>) {
        self.worker.status.set_background(evaluations);
    }

    fn inspects(&self, job: Option<u64>) {
        self.worker.status.set(Status::Inspecting, job.unwrap_or(0));
    }

    fn errors(&self, connection: u64, added: Option<&Arc<ErrorRecord>>, last: Option<&Arc<ErrorRecord>>) {
        let last = last.map(|error| error.id);
        let mut told = self.told.lock();
        let known = told.entry(connection).or_default();
        if added.is_some() || *known != last {
            *known = last;
            self.worker.output.tell(Kind::Error, connection, &ErrorChange { added: added.cloned(), last });
        }
    }

    fn disconnected(&self, connection: u64) {
        self.told.lock().remove(&connection);
    }

    fn defined(&self, form: &DefiningForm, local: bool, evaluation: u64) {
        if self.restores() {
            return;
        }
        let now = Instant::now();
        let took = now - std::mem::replace(&mut *self.since.lock(), now);
        let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.worker.unrestored.lock().retain(|unrestored| !unrestored.is_made_good_by(form));
        self.worker.output.tell(Kind::Defined, 0, &Entry { form: form.clone(), local, evaluation, took });
    }

    fn numbered(&self, evaluation: u64) {
        self.worker.status.set(Status::Numbered, evaluation);
    }

    fn limits(&self, limits: &Limits) {
        self.worker.output.tell(Kind::Limits, 0, limits);
    }

    fn stuck(&self, outcome: Option<Outcome>, why: Stuck) {
        // No answer will have more of it.
        let most = usize::try_from(*Limits::MAX_ANSWER_RANGE.end()).unwrap_or(usize::MAX);
        let outcome = outcome.map(|outcome| report::fitted(&Outcome { kept: false, ..outcome }, most));
        self.worker.output.tell(Kind::Stuck, 0, &(outcome, why));
        self.worker.driver.pause();
    }
}
