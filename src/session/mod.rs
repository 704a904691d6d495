//! A session: the queue of jobs, the limits and the error state in front of one image.

mod builder;
mod clock;
mod queue;
mod running;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::config::{ImageConfig, Limits};
use crate::error::{BootError, InspectError};
use crate::image::{self, Event, Host, Interrupt, Job, JobKind, Lane};
use crate::outcome::{Clipped, Definition, ErrorRecord, Outcome, SymbolDescription};
use builder::{ClippedBuffer, InspectionBuilder, OutcomeBuilder};
use clock::Clock;
use queue::Queue;
use running::{Build, Running};

/// How long an inspection may take.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the evaluation thread looks out for the next job before it sleeps: the time in which a program that
/// evaluates one thing after another comes back.
const AWAKE: Duration = Duration::from_micros(50);

/// Names an evaluation, so that it can be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId(u64);

/// Code to evaluate, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// One form or many.
    pub code: String,
    /// The package to read and evaluate in, for this evaluation alone.
    pub package: Option<String>,
    /// `None`: the session's time limit; `Some(None)`: no limit.
    pub timeout: Option<Option<Duration>>,
    /// Measure time and allocation.
    pub capture_time: bool,
}

impl Evaluation {
    /// Evaluates `code` in the session's package under its limits.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), package: None, timeout: None, capture_time: false }
    }
}

/// A handle on the one image of this process. Clones are the same session.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// A job that waits, with what is to become of its answer.
pub(crate) struct Request {
    job: Job,
    timeout: Option<Duration>,
    build: Build,
}

struct Inner {
    lanes: [Queue<Request>; Lane::COUNT],
    /// What the evaluation lane and the inspection lane work on.
    running: [Mutex<Option<Running>>; 2],
    limits: Mutex<Limits>,
    state: Mutex<State>,
    clock: Clock,
    next_id: AtomicU64,
}

/// What outlives an evaluation.
#[derive(Default)]
struct State {
    last_error: Option<Arc<ErrorRecord>>,
    /// Output of threads that outlived their evaluation, until the next answer.
    background: Option<ClippedBuffer>,
    notices: Vec<String>,
}

impl Session {
    /// Boots SBCL in this process and starts a session with it: 10 to 30 ms.
    ///
    /// # Errors
    /// [`BootError`]: sizes out of range, no usable core, or an image that is there already.
    pub fn start(image: &ImageConfig, limits: Limits) -> Result<Self, BootError> {
        let inner = Arc::new(Inner {
            lanes: Default::default(),
            running: Default::default(),
            limits: Mutex::new(limits),
            state: Mutex::default(),
            clock: Clock::default(),
            next_id: AtomicU64::new(1),
        });
        image::boot(image, inner.clone())?;
        let clock = inner.clone();
        std::thread::Builder::new()
            .name("sbcl-clock".to_owned())
            .spawn(move || clock.clock.run(|now| clock.interrupt_overdue(now)))
            .map_err(|source| BootError::Os { what: "start a thread", source })?;
        Ok(Self(inner))
    }

    /// Evaluates and waits for the outcome.
    ///
    /// Must not be called from a `reply` closure: that runs on the thread that would do the work.
    #[must_use]
    pub fn evaluate(&self, evaluation: Evaluation) -> Outcome {
        wait(|reply| {
            self.submit(evaluation, reply);
        })
    }

    /// Queues an evaluation behind those submitted before; `reply` gets its outcome.
    ///
    /// `reply` runs on the Lisp thread that evaluated: it must be quick and must not block.
    pub fn submit(&self, evaluation: Evaluation, reply: impl FnOnce(Outcome) + Send + 'static) -> JobId {
        let limits = *self.0.limits.lock();
        let timeout = evaluation.timeout.unwrap_or(limits.timeout);
        let Evaluation { code, package, capture_time, .. } = evaluation;
        let text = utf32(&code);
        self.0.enqueue(
            Lane::Evaluation,
            JobKind::Evaluate { timing: capture_time },
            text,
            package.as_deref().map(utf32).unwrap_or_default(),
            timeout,
            Build::Outcome(Box::new(OutcomeBuilder::new(code, limits, timeout)), Box::new(reply)),
        )
    }

    /// Takes an evaluation off the queue, or interrupts it if it runs. Its `reply` is called all the same, with an
    /// error of kind `CANCELLED`, which becomes the last error. Does nothing for one that is over.
    pub fn cancel(&self, id: JobId) {
        let queued = self.0.lanes[Lane::Evaluation as usize].remove(|request| request.job.id == id.0);
        if let Some(request) = queued {
            self.0.finish(Running::new(request, None), Ok(Interrupt::Cancel));
        } else {
            self.0.interrupt(Lane::Evaluation, id.0, Interrupt::Cancel);
        }
    }

    /// The error that the last evaluation ended with; `None` once one has succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<ErrorRecord>> {
        self.0.state.lock().last_error.clone()
    }

    /// Lists what the session defined. Works while an evaluation runs; `reply` as in [`submit`](Self::submit).
    pub fn definitions(&self, reply: impl FnOnce(Result<Vec<Definition>, InspectError>) + Send + 'static) {
        self.inspect(
            JobKind::Definitions,
            "",
            "",
            Build::Definitions(InspectionBuilder::default(), Box::new(reply)),
        );
    }

    /// Says what a symbol means. Works while an evaluation runs; `reply` as in [`submit`](Self::submit).
    pub fn describe_symbol(
        &self,
        name: &str,
        package: Option<&str>,
        reply: impl FnOnce(Result<SymbolDescription, InspectError>) + Send + 'static,
    ) {
        self.inspect(
            JobKind::Describe,
            name,
            package.unwrap_or(""),
            Build::Symbol(InspectionBuilder::default(), Box::new(reply)),
        );
    }

    /// Removes what the session defined, in order with the evaluations, and clears the error state. The limits stay.
    pub fn reset(&self, reply: impl FnOnce(Result<(), InspectError>) + Send + 'static) {
        self.0.enqueue(
            Lane::Evaluation,
            JobKind::Reset,
            Vec::new(),
            Vec::new(),
            None,
            Build::Reset(InspectionBuilder::default(), Box::new(reply)),
        );
    }

    /// The limits of evaluations to come.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.0.limits.lock()
    }

    /// Sets the limits of evaluations to come.
    pub fn set_limits(&self, limits: Limits) {
        *self.0.limits.lock() = limits;
    }

    fn inspect(&self, kind: JobKind, text: &str, name: &str, build: Build) {
        self.0.enqueue(Lane::Inspection, kind, utf32(text), utf32(name), Some(INSPECTION_TIMEOUT), build);
    }
}

/// Text as Lisp takes it.
fn utf32(text: &str) -> Vec<u32> {
    text.chars().map(u32::from).collect()
}

/// Calls `submit` with a reply and waits until that is called.
fn wait<T: Send + 'static>(submit: impl FnOnce(Reply<T>)) -> T {
    let slot = Arc::new((Mutex::new(None), parking_lot::Condvar::new()));
    let reply = slot.clone();
    submit(Box::new(move |value| {
        *reply.0.lock() = Some(value);
        reply.1.notify_one();
    }));
    let mut value = slot.0.lock();
    loop {
        match value.take() {
            Some(value) => return value,
            None => slot.1.wait(&mut value),
        }
    }
}

impl Inner {
    fn enqueue(
        &self,
        lane: Lane,
        kind: JobKind,
        text: Vec<u32>,
        name: Vec<u32>,
        timeout: Option<Duration>,
        build: Build,
    ) -> JobId {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let job = Job { id, kind, text, name };
        self.lanes[lane as usize].push(Request { job, timeout, build });
        JobId(id)
    }

    /// Has the control lane interrupt a job, if the lane still works on it.
    fn interrupt(&self, lane: Lane, target: u64, reason: Interrupt) {
        if let Some(running) = self.running[lane as usize].lock().as_mut()
            && running.id == target
        {
            running.interrupted.get_or_insert(reason);
        } else {
            return;
        }
        self.enqueue(Lane::Control, JobKind::Interrupt { target, reason }, Vec::new(), Vec::new(), None, Build::Nothing);
    }

    /// Interrupts what has run too long by now. When to look again.
    fn interrupt_overdue(&self, now: std::time::Instant) -> Option<std::time::Instant> {
        let mut next = None;
        for lane in [Lane::Evaluation, Lane::Inspection] {
            let mut overdue = None;
            if let Some(running) = self.running[lane as usize].lock().as_mut()
                && let Some(deadline) = running.deadline
            {
                if deadline <= now {
                    overdue = Some(running.id);
                    // Cleanup forms may hold on: ask again.
                    running.deadline = Some(now + Duration::from_secs(1));
                }
                next = next.into_iter().chain(running.deadline).min();
            }
            if let Some(id) = overdue {
                self.interrupt(lane, id, Interrupt::Timeout);
            }
        }
        next
    }

    /// Turns what ran into an answer: `Ok` for a job that was interrupted before it began.
    fn finish(&self, running: Running, end: Result<Interrupt, bool>) {
        let interrupted = end.ok().or(running.interrupted);
        let success = end == Err(true);
        match running.build {
            Build::Nothing => {}
            Build::Outcome(builder, reply) => {
                let mut outcome = builder.finish(success, interrupted);
                {
                    let mut state = self.state.lock();
                    state.last_error = outcome.result.as_ref().err().cloned();
                    outcome.background = state.background.take().map(Clipped::from).unwrap_or_default();
                    outcome.notices = std::mem::take(&mut state.notices);
                }
                reply(outcome);
            }
            Build::Definitions(builder, reply) => reply(builder.definitions(success, interrupted)),
            Build::Symbol(builder, reply) => reply(builder.symbol(success, interrupted)),
            Build::Reset(builder, reply) => {
                if success {
                    *self.state.lock() = State::default();
                }
                reply(builder.reset(success, interrupted));
            }
        }
    }
}

impl Host for Inner {
    fn next_job(&self, lane: Lane) -> Option<Job> {
        let awake = if lane == Lane::Evaluation { AWAKE } else { Duration::ZERO };
        let mut request = self.lanes[lane as usize].pop(awake);
        if lane != Lane::Control {
            let deadline = request.timeout.map(|timeout| std::time::Instant::now() + timeout);
            // Lisp gets the job, the rest stays here.
            let job = request.take_job();
            *self.running[lane as usize].lock() = Some(Running::new(request, deadline));
            if let Some(deadline) = deadline {
                self.clock.arm(deadline);
            }
            return Some(job);
        }
        Some(request.job)
    }

    fn event(&self, job: u64, event: Event<'_>) -> bool {
        for lane in &self.running {
            let mut slot = lane.lock();
            if let Some(running) = slot.as_mut()
                && running.id == job
            {
                if let Event::Done { success } = event {
                    let running = slot.take();
                    drop(slot);
                    if let Some(running) = running {
                        self.finish(running, Err(success));
                    }
                    return false;
                }
                return running.build.event(event);
            }
        }
        self.background(event);
        false
    }
}

impl Inner {
    /// Takes what comes from nothing that runs now.
    fn background(&self, event: Event<'_>) {
        match event {
            Event::Stdout(text) | Event::Stderr(text) => {
                let limit = self.limits.lock().max_output;
                let mut state = self.state.lock();
                state.background.get_or_insert_with(|| ClippedBuffer::new(limit)).push(text);
            }
            Event::Notice(text) => self.state.lock().notices.push(text.to_owned()),
            _ => {}
        }
    }
}
