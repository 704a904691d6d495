//! The recovery state: what the next worker must know to go on where the last one stopped.

use std::io;

use super::journal::Journal;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::handover::frame::{Frame, Kind};
use crate::handover::shared_status::Status;
use crate::handover::{CrashReport, ErrorChange, Restored, WorkerInit, line_of_job};
use crate::outcome::Outcome;
use crate::rpc::framing::MAX_LINE;

/// Messages that open a conversation, at most.
const MAX_HANDSHAKE: usize = 4;

/// How a worker was lost.
#[derive(Debug)]
pub(super) struct Crash {
    /// The rest of a sentence about the image.
    pub(super) cause: String,
    /// What can be said of the evaluation.
    outcome: Option<Box<Outcome>>,
}

impl Crash {
    pub(super) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), outcome: None }
    }

    /// The evaluation that ran came to `outcome`.
    pub(super) fn during(self, outcome: impl Into<Option<Outcome>>) -> Self {
        Self { outcome: outcome.into().map(Box::new), ..self }
    }
}

/// What outlives a worker.
#[derive(Debug)]
pub(super) struct RecoveryState {
    pub(super) requests: Requests,
    /// What belongs to the handshake once its line is answered.
    keep: Vec<(u64, String)>,
    /// `None` when nothing is to be restored.
    journal: Option<Journal>,
    /// What the next worker is told besides.
    next: WorkerInit,
}

impl RecoveryState {
    /// `restore`: definitions come back when an image is lost.
    pub(super) fn new(restore: bool) -> Self {
        let journal = restore.then(Journal::default);
        Self { requests: Requests::new(), keep: Vec::new(), journal, next: WorkerInit::default() }
    }

    /// Notes that a worker is done with a line. False for one that nobody waits for.
    pub(super) fn finished(&mut self, line: u64) -> bool {
        let waited = self.requests.finish(line);
        for (_, text) in self.keep.extract_if(.., |(of, _)| waited && *of == line) {
            self.next.handshake.push(text);
        }
        waited
    }

    /// Takes what is to be remembered.
    pub(super) fn note(&mut self, (kind, line, payload): Frame<'_>) {
        match kind {
            Kind::Keep if self.keep.len() + self.next.handshake.len() < MAX_HANDSHAKE => {
                self.keep.push((line, String::from_utf8_lossy(payload).into_owned()));
            }
            Kind::Defined => {
                if let Some(journal) = &mut self.journal {
                    match serde_json::from_slice(payload) {
                        Ok(entry) => journal.add(entry),
                        Err(_) => journal.miss(),
                    }
                }
            }
            Kind::Error => {
                if let Ok(ErrorChange { added, last }) = serde_json::from_slice(payload) {
                    self.next.errors.note(added, last);
                }
            }
            Kind::Limits => self.next.limits = serde_json::from_slice(payload).ok(),
            _ => {}
        }
    }

    /// Takes a worker's word on what it could not restore, which will not be tried again, and gives it the lines.
    pub(super) fn resume(&mut self, worker: &mut WorkerProcess, restored: &Restored) {
        if let Some(journal) = &mut self.journal {
            journal.remove(&restored.failed);
        }
        self.requests.apply_cancellations();
        if let Some(input) = &mut worker.input {
            for (_, line) in self.requests.iter() {
                // One that is gone already is noticed elsewhere.
                let _ = input.put(line);
            }
        }
    }

    /// Remembers that an image was lost.
    pub(super) fn lose(&mut self, worker: &WorkerProcess, Crash { cause, outcome }: Crash) {
        self.keep.clear();
        let begun = self.begun(worker);
        let in_flight = begun > worker.status.get(Status::Ended);
        let background = worker.status.background();
        let mut crash = CrashReport { cause, in_flight, background, stuck: outcome, deadly: Vec::new() };
        if worker.ready {
            self.next.notices.clear();
        } else {
            // The crash that this one was to make good is what the client must hear of.
            crash = self.next.crash.take().unwrap_or(crash);
            let restoring = usize::try_from(worker.status.get(Status::Restoring)).unwrap_or(0);
            let deadly = restoring.checked_sub(1).and_then(|place| self.journal.as_mut()?.take(place));
            crash.deadly.extend(deadly);
        }
        self.note_numbers(worker);
        self.next.crash = Some(crash);
    }

    /// Remembers nothing of the image but the limits, as `line` asks for, and what there was yet to be said.
    pub(super) fn forget(&mut self, worker: &WorkerProcess, line: u64, notices: Vec<String>) {
        self.keep.clear();
        self.next.errors.reset();
        self.next.crash = None;
        self.journal = self.journal.take().map(|_| Journal::default());
        self.note_numbers(worker);
        self.next.reset = Some(line);
        self.next.notices = notices;
    }

    /// Notes how far the worker's jobs and evaluations have come.
    fn note_numbers(&mut self, worker: &WorkerProcess) {
        self.next.through = self.next.through.max(self.begun(worker));
        self.next.evaluations = self.next.evaluations.max(worker.status.get(Status::Numbered).min(u64::MAX / 2));
    }

    /// The last job that the worker began, if a line asked for it: anything may have written to the memory that says
    /// so.
    fn begun(&self, worker: &WorkerProcess) -> u64 {
        Some(worker.status.get(Status::Begun)).filter(|job| line_of_job(*job) < self.requests.next()).unwrap_or(0)
    }

    /// True when `line` may ask for a fresh image: it waits, and has not got one.
    pub(super) fn may_reset(&self, line: u64) -> bool {
        self.requests.has(line) && self.next.reset != Some(line)
    }

    /// Tells a new worker where the last one stopped. It gets the lines once it is ready.
    pub(super) fn hand_over(&self, worker: &mut WorkerProcess) -> io::Result<()> {
        let mut init = WorkerInit {
            resent: self.requests.iter().map(|(number, _)| number).collect(),
            next: self.requests.next(),
            journal: self.journal.as_ref().map(|journal| journal.entries().to_vec()),
            dropped: self.journal.as_ref().map_or(0, Journal::dropped),
            ..self.next.clone()
        };
        let mut line = serde_json::to_vec(&init)?;
        if line.len() >= MAX_LINE {
            // Control characters take six bytes each. The definitions always fit.
            init.errors.history = Default::default();
            line = serde_json::to_vec(&init)?;
        }
        line.push(b'\n');
        worker.input.as_mut().map_or(Ok(()), |input| input.put(&line))
    }
}
