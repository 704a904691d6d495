//! A session: the queue of jobs, the limits and the error state in front of one image.

mod builder;
mod clock;
mod evaluations;
mod history;
mod hold;
pub(crate) mod idle;
pub(crate) mod operation;
mod queue;
#[cfg(feature = "mcp")]
pub(crate) mod restore;
mod running;
mod state;
mod watch;
pub(crate) mod witness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use crate::config::{ImageConfig, Limits};
use crate::error::{BootError, HoldError, InspectError};
use crate::image::{self, Event, Host, Interrupt, Item, Job, JobKind, Lane};
use crate::outcome::{
    Clipped, DefinitionFilter, DefinitionQuery, Definitions, ErrorRecord, Outcome, Record, SymbolDescription,
    TestCounts,
};
use builder::{ClippedBuffer, InspectionBuilder, OutcomeBuilder};
use clock::Clock;
use evaluations::Evaluations;
use hold::{Held, RELEASE_TIMEOUT};
pub(crate) use operation::Operation;
use operation::RecordsBuilder;
use queue::Queue;
use running::{Build, Running};
use state::State;
use watch::{HEAP_WATCH, INTERRUPT_AGAIN, INTERRUPTION_GRACE, heap_limit};
use witness::Witness;

pub use evaluations::WaitId;
pub use hold::RestartDesignator;

/// How long an inspection may take.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// What is said when local variables cannot be shown in time.
const LOCALS_UNPRINTED: &str =
    "Printing the local variables did not end within the time limit: a print method of the session's may not end.";

/// How long a thread looks out for the next job, or the answer, before it sleeps: the time in which a small evaluation
/// is over, and a program that does one after another comes back.
const AWAKE: Duration = Duration::from_micros(100);

/// How often it looks before it gives way to other threads.
const LOOKS: usize = 20;

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
    /// When it fails, hold it where it failed, so that its restarts can be invoked and its frames looked at.
    pub hold: bool,
    /// Record the errors that the code handles, too, where they are signalled: the first of each kind and place.
    pub record_errors: bool,
}

impl Evaluation {
    /// Evaluates `code` in the session's package under its limits.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), package: None, timeout: None, capture_time: false, hold: false, record_errors: false }
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

/// Calls a [`Reply`] with what it waits for.
type Answer = Box<dyn FnOnce() + Send>;

fn answer<T: Send + 'static>(reply: Reply<T>, value: T) -> Answer {
    Box::new(move || reply(value))
}

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
    /// Where both are locked, this comes first.
    evaluations: Mutex<Evaluations>,
    /// What the evaluation that was held last comes to is built from this when it goes on: its code, under its limits.
    held_as: Mutex<Option<OutcomeBuilder>>,
    /// Set while an evaluation is held and nothing is being done with it.
    held: Mutex<Option<Held>>,
    /// The number of the question that a person is asked about it: until that is over, only what concerns it is done.
    question: Mutex<Option<u64>>,
    clock: Clock,
    /// Evaluations so far, and how many there were when the heap was last looked at.
    begun: AtomicU64,
    watched: AtomicU64,
    next_id: AtomicU64,
    /// Who takes care that a lost image is replaced.
    witness: OnceCell<Arc<dyn Witness>>,
    /// The evaluation that runs, or is held, binds the package.
    local: AtomicBool,
    /// The highest number of a job that was cancelled when it neither waited nor ran.
    cancelled: AtomicU64,
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
            evaluations: Mutex::default(),
            held_as: Mutex::default(),
            held: Mutex::default(),
            question: Mutex::default(),
            clock: Clock::default(),
            begun: AtomicU64::new(0),
            watched: AtomicU64::new(0),
            next_id: AtomicU64::new(1),
            witness: OnceCell::new(),
            local: AtomicBool::new(false),
            cancelled: AtomicU64::new(0),
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
        let job = self.0.next_job_id();
        let number = self.0.add_evaluation(job, &evaluation.code);
        self.submit_as(job, number, 0, evaluation, None, Box::new(reply))
    }

    /// Queues an operation, which is an evaluation of its own: it may evaluate the code, or do what the code stands for.
    /// The outcome has its records.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn submit_operation(
        &self,
        operation: &Operation,
        evaluation: Evaluation,
        reply: impl FnOnce(Outcome) + Send + 'static,
    ) -> JobId {
        let job = self.0.next_job_id();
        let number = self.0.add_evaluation(job, &evaluation.code);
        self.submit_as(job, number, 0, evaluation, Some(operation), Box::new(reply))
    }

    /// Does an operation and waits for the outcome, as [`evaluate`](Self::evaluate) does.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn evaluate_operation(&self, operation: &Operation, evaluation: Evaluation) -> Outcome {
        wait(|reply| {
            self.submit_operation(operation, evaluation, reply);
        })
    }

    /// Takes the outcome of an evaluation that another image did in this session's stead: its errors go into the history,
    /// and the error state is as if this one had done it.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn adopt(&self, outcome: &mut Outcome) {
        self.0.adopt(outcome);
    }

    /// Queues evaluation `number`, whose definitions Lisp takes for those of evaluation `source`, or of this one if
    /// that is 0.
    fn submit_as(
        &self,
        job: u64,
        number: u64,
        source: u64,
        evaluation: Evaluation,
        operation: Option<&Operation>,
        reply: Reply<Outcome>,
    ) -> JobId {
        let limits = *self.0.limits.lock();
        let timeout = evaluation.timeout.unwrap_or(limits.timeout);
        let Evaluation { code, package, capture_time, hold, record_errors, .. } = evaluation;
        let job = Job {
            id: job,
            kind: JobKind::Evaluate { timing: capture_time, hold, record_errors },
            evaluation: if source == 0 { number } else { source },
            text: utf32(&code),
            name: package.as_deref().map(utf32).unwrap_or_default(),
            operation: operation.map(|operation| utf32(&operation.to_string())).unwrap_or_default(),
        };
        let mut builder = Box::new(OutcomeBuilder::new(number, code, limits, timeout));
        let has_errors = operation.is_some_and(|operation| operation.has_errors);
        if record_errors || has_errors {
            builder.record_errors();
        }
        builder.errors_are_records(has_errors);
        self.0.enqueue(Lane::Evaluation, job, timeout, Build::Outcome(builder, reply))
    }

    /// Takes an evaluation off the queue, or interrupts it if it runs. Its `reply` is called all the same, with an
    /// error of kind `CANCELLED`, which becomes the last error if it had begun. Does nothing for one that is over.
    pub fn cancel(&self, id: JobId) {
        let queued = self.0.lanes[Lane::Evaluation as usize].remove(|request| request.job.id == id.0);
        if let Some(request) = queued {
            self.0.finish(Running::new(request, None), Ok(Interrupt::Cancel))();
        } else if !self.0.interrupt(Lane::Evaluation, id.0, Interrupt::Cancel) {
            // It is about to run, or over: jobs run in the order of their numbers.
            self.0.cancelled.fetch_max(id.0, Ordering::AcqRel);
            self.0.interrupt(Lane::Evaluation, id.0, Interrupt::Cancel);
        }
    }

    /// What a running evaluation has printed to `*standard-output*` so far, from byte `from` on. `None` when it is not
    /// the one that runs, or has printed nothing more.
    #[must_use]
    pub fn output_so_far(&self, id: JobId, from: usize) -> Option<String> {
        let running = self.0.running[Lane::Evaluation as usize].lock();
        let running = running.as_ref().filter(|running| running.id == id.0)?;
        running.build.stdout().get(from..).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    /// What a running evaluation has said of how far it is, in lines, from byte `from` on. `None` as of
    /// [`output_so_far`](Self::output_so_far).
    #[cfg(feature = "mcp")]
    pub(crate) fn progress_so_far(&self, id: JobId, from: usize) -> Option<String> {
        let running = self.0.running[Lane::Evaluation as usize].lock();
        let running = running.as_ref().filter(|running| running.id == id.0)?;
        let text = running.build.progress();
        text.get(from..).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    /// The error that the last evaluation ended with; `None` once one has succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<ErrorRecord>> {
        self.0.state.lock().last_error.clone()
    }

    /// An error by its number; `None` when the history does not have it.
    #[must_use]
    pub fn error(&self, id: u64) -> Option<Arc<ErrorRecord>> {
        self.0.state.lock().error(id)
    }

    /// The last errors, newest first.
    #[must_use]
    pub fn error_history(&self) -> Vec<Arc<ErrorRecord>> {
        self.0.state.lock().history()
    }

    /// Lists what the session defined. Works while an evaluation runs; `reply` as in [`submit`](Self::submit).
    pub fn definitions(
        &self,
        query: &DefinitionQuery,
        reply: impl FnOnce(Result<Definitions, InspectError>) + Send + 'static,
    ) {
        let only = match query.filter {
            DefinitionFilter::All => None,
            DefinitionFilter::Functions => Some(Item::Function),
            DefinitionFilter::Variables => Some(Item::Variable),
            DefinitionFilter::Macros => Some(Item::Macro),
            DefinitionFilter::Classes => Some(Item::Class),
        };
        self.inspect(
            JobKind::Definitions { only, limit: query.limit },
            "",
            query.package.as_deref().unwrap_or(""),
            Build::Definitions(InspectionBuilder::default(), Box::new(reply)),
        );
    }

    /// Says what a symbol means; with `source`, with the text of its definitions too. Works while an evaluation runs; `reply` as in [`submit`](Self::submit).
    pub fn describe_symbol(
        &self,
        name: &str,
        package: Option<&str>,
        source: bool,
        reply: impl FnOnce(Result<SymbolDescription, InspectError>) + Send + 'static,
    ) {
        self.inspect(
            JobKind::Describe { source },
            name,
            package.unwrap_or(""),
            Build::Symbol(InspectionBuilder::default(), Box::new(reply)),
        );
    }

    /// Asks a question that the Lisp side knows by name. Works while an evaluation runs; `reply` as in
    /// [`submit`](Self::submit).
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn query(
        &self,
        operation: &Operation,
        reply: impl FnOnce(Result<Vec<Record>, InspectError>) + Send + 'static,
    ) {
        let mut job = self.0.job(JobKind::Query, "", "");
        job.operation = utf32(&operation.to_string());
        let build = Build::Query(RecordsBuilder::default(), Box::new(reply));
        self.0.enqueue(Lane::Inspection, job, Some(INSPECTION_TIMEOUT), build);
    }

    /// The same, on the thread that evaluates, in order with the evaluations, and for as long as it takes.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn query_in_order(
        &self,
        operation: &Operation,
        reply: impl FnOnce(Result<Vec<Record>, InspectError>) + Send + 'static,
    ) {
        let mut job = self.0.job(JobKind::Query, "", "");
        job.operation = utf32(&operation.to_string());
        self.0.enqueue(Lane::Evaluation, job, None, Build::Query(RecordsBuilder::default(), Box::new(reply)));
    }

    /// The name of the checkpoint that the image was booted from.
    #[cfg(feature = "mcp")]
    pub(crate) fn image_name(&self) -> Option<String> {
        let records = wait(|reply| self.query(&Operation::new("image-name"), reply)).ok()?;
        records.first()?.text("name").map(str::to_owned)
    }

    /// The number of the last evaluation.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn evaluations_so_far(&self) -> u64 {
        self.0.evaluations.lock().last()
    }

    /// True while something is evaluated, or held, or waits for that.
    #[allow(dead_code, reason = "only the tools of feature mcp ask so")]
    pub(crate) fn is_busy(&self) -> bool {
        self.is_held() || self.0.running[Lane::Evaluation as usize].lock().is_some()
    }

    /// Removes what the session defined, in order with the evaluations, and clears the error state. The limits stay.
    pub fn reset(&self, reply: impl FnOnce(Result<(), InspectError>) + Send + 'static) {
        let job = self.0.job(JobKind::Reset, "", "");
        let build = Build::Reset(InspectionBuilder::default(), Box::new(reply));
        self.0.enqueue(Lane::Evaluation, job, None, build);
    }

    /// The limits of evaluations to come.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.0.limits.lock()
    }

    /// Sets the limits of evaluations to come.
    pub fn set_limits(&self, limits: Limits) {
        *self.0.limits.lock() = limits;
        if let Some(witness) = self.0.witness.get() {
            witness.limits(&limits);
        }
    }

    fn inspect(&self, kind: JobKind, text: &str, name: &str, build: Build) {
        self.0.enqueue(Lane::Inspection, self.0.job(kind, text, name), Some(INSPECTION_TIMEOUT), build);
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
    if let Some(value) = stay_awake(AWAKE, || slot.0.try_lock()?.take()) {
        return value;
    }
    let mut value = slot.0.lock();
    loop {
        match value.take() {
            Some(value) => return value,
            None => slot.1.wait(&mut value),
        }
    }
}

/// Looks for something until it is there, or `awake` is over.
fn stay_awake<T>(awake: Duration, look: impl Fn() -> Option<T>) -> Option<T> {
    if awake.is_zero() {
        return None;
    }
    let until = Instant::now() + awake;
    loop {
        for _ in 0..LOOKS {
            if let Some(found) = look() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= until {
            return None;
        }
        // Gives way where there is but one processor for both threads.
        std::thread::yield_now();
    }
}

impl Inner {
    fn next_job_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// A job that belongs to no evaluation.
    fn job(&self, kind: JobKind, text: &str, name: &str) -> Job {
        Job { id: self.next_job_id(), kind, evaluation: 0, text: utf32(text), name: utf32(name), operation: Vec::new() }
    }

    /// Gives an evaluation of `code`, done by `job`, its number.
    fn add_evaluation(&self, job: u64, code: &str) -> u64 {
        let number = self.evaluations.lock().add(job, code);
        if let Some(witness) = self.witness.get() {
            witness.numbered(number);
        }
        number
    }

    fn enqueue(&self, lane: Lane, job: Job, timeout: Option<Duration>, build: Build) -> JobId {
        let id = JobId(job.id);
        self.lanes[lane as usize].push(Request { job, timeout, build });
        id
    }

    /// Has the control lane interrupt a job, if the lane works on it; false if not.
    fn interrupt(&self, lane: Lane, target: u64, reason: Interrupt) -> bool {
        if let Some(running) = self.running[lane as usize].lock().as_mut()
            && running.id == target
        {
            running.interrupted.get_or_insert(reason);
            let since = *running.interrupted_at.get_or_insert_with(Instant::now);
            // It may come too early, or be held up by cleanup forms: ask again. Collecting a large heap's garbage,
            // which follows when that is full, is not to be disturbed.
            if reason != Interrupt::Heap {
                let again = Instant::now() + INTERRUPT_AGAIN;
                running.deadline = Some(again);
                self.clock.arm(again);
            }
            if self.witness.get().is_some() {
                self.clock.arm(since + INTERRUPTION_GRACE);
            }
        } else {
            return false;
        }
        let job = self.job(JobKind::Interrupt { target, reason }, "", "");
        self.enqueue(Lane::Control, job, None, Build::Nothing);
        true
    }

    /// Turns what ran into an answer, which is given when what this returns is called. `end` is `Ok` for a job that was
    /// interrupted before it began.
    #[must_use]
    fn finish(&self, running: Running, end: Result<Interrupt, bool>) -> Answer {
        let interrupted = end.ok().or(running.interrupted);
        let success = end == Err(true);
        if running.holds {
            *self.held.lock() = Some(Held { until: Instant::now() + self.limits.lock().hold });
        }
        // Whatever was asked about what was held, it has gone on.
        if matches!(running.build, Build::Resumed(..) | Build::Release(..)) && end.is_err() && !running.unchanged {
            self.end_question();
        }
        if let Some(witness) = self.witness.get() {
            witness.ended(running.id);
            if running.build.is_inspection() {
                witness.inspects(None);
            }
        }
        if let Some(builder) = running.unwinding {
            self.unwound(*builder);
        }
        let refused = running.refused.map(HoldError::Refused);
        match running.build {
            Build::Nothing => Box::new(|| ()),
            Build::Outcome(mut builder, reply) => {
                if running.holds {
                    *self.held_as.lock() = Some(builder.anew());
                }
                let (signalled, superseded) = (builder.take_signalled(), builder.take_superseded());
                let mut outcome = builder.finish(success, interrupted);
                outcome.held = running.holds;
                // One that was cancelled before it began did nothing.
                if end.is_err() {
                    self.evaluated(signalled, superseded, &mut outcome);
                }
                self.keep(outcome, reply)
            }
            Build::Resumed(mut builder, reply) => {
                let id = builder.evaluation();
                if refused.is_some() || running.released || running.unchanged {
                    self.evaluations.lock().rest(id);
                }
                match refused {
                    Some(error) => answer(reply, Err(error)),
                    None if running.released => answer(reply, Ok(None)),
                    // The restart's arguments or the code to return failed, or the restart returned.
                    None if running.unchanged => {
                        builder.detach();
                        let mut outcome = builder.finish(success, interrupted);
                        self.evaluated_inside(&mut outcome);
                        answer(reply, Ok(Some(outcome)))
                    }
                    None => {
                        let (signalled, superseded) = (builder.take_signalled(), builder.take_superseded());
                        let mut outcome = builder.finish(success, interrupted);
                        outcome.held = running.holds;
                        self.evaluated(signalled, superseded, &mut outcome);
                        self.keep(outcome, Box::new(|outcome| reply(Ok(Some(outcome)))))
                    }
                }
            }
            Build::Inside(builder, reply) => {
                if let Some(error) = refused {
                    self.evaluations.lock().remove(builder.evaluation());
                    return answer(reply, Err(error));
                }
                let mut outcome = builder.finish(success, interrupted);
                self.evaluated_inside(&mut outcome);
                self.keep(outcome, Box::new(|outcome| reply(Ok(outcome))))
            }
            Build::Locals(builder, reply) => answer(
                reply,
                match refused {
                    Some(error) => Err(error),
                    None if success => Ok(builder.locals()),
                    None => Err(HoldError::Refused(LOCALS_UNPRINTED.to_owned())),
                },
            ),
            Build::Release(reply) => answer(reply, refused.map_or(Ok(()), Err)),
            Build::Definitions(builder, reply) => answer(reply, builder.definitions(success, interrupted)),
            Build::Symbol(builder, reply) => answer(reply, builder.symbol(success, interrupted)),
            Build::Query(builder, reply) => answer(reply, builder.finish(success, interrupted)),
            Build::Reset(builder, reply) => {
                if success {
                    self.evaluations.lock().reset();
                    self.state.lock().reset();
                }
                answer(reply, builder.reset(success, interrupted))
            }
        }
    }

    /// Takes the outcome of an evaluation that another image did in this session's stead.
    fn adopt(&self, outcome: &mut Outcome) {
        (outcome.evaluation, outcome.kept, outcome.defined) = (0, false, Vec::new());
        outcome.notices.clear();
        self.evaluated(None, Vec::new(), outcome);
    }

    /// Sets the error state by the outcome of an evaluation, in which these errors were handled, if they are recorded,
    /// and these reached the debugger before.
    fn evaluated(
        &self,
        signalled: Option<Vec<Arc<ErrorRecord>>>,
        superseded: Vec<Arc<ErrorRecord>>,
        outcome: &mut Outcome,
    ) {
        let mut state = self.state.lock();
        if let Some(errors) = signalled {
            self.record_signalled(&mut state, errors);
        }
        self.record_superseded(&mut state, superseded, "A cleanup form failed in turn, or left, while it was unwound");
        for error in &mut outcome.errors {
            state.record(error);
            if let Some(witness) = self.witness.get() {
                witness.errors(Some(error), state.last_error.as_ref());
            }
        }
        if let Err(error) = &mut outcome.result {
            state.record(error);
        }
        state.last_error = match &outcome.result {
            Err(error) => Some(error.clone()),
            // Tests: the state is that of the first one that failed.
            Ok(_) if TestCounts::of(outcome).is_some_and(|counts| counts.failed > 0 || counts.errors > 0) => {
                outcome.errors.first().cloned().or_else(|| state.last_error.take())
            }
            Ok(_) => None,
        };
        self.tell_witness(&state, outcome);
        tell(&mut state, outcome);
    }

    /// Puts errors into the history that no answer is about, and has the next one say so, and why there were more.
    fn record_superseded(&self, state: &mut State, errors: Vec<Arc<ErrorRecord>>, why: &str) {
        for mut error in errors {
            state.record(&mut error);
            if let Some(witness) = self.witness.get() {
                witness.errors(Some(&error), state.last_error.as_ref());
            }
            state.notice(format!("E{} reached the debugger before: {}. {why}.", error.id, error.kind));
        }
    }

    /// Puts errors into the history that the code handled, and has the next answer list them.
    fn record_signalled(&self, state: &mut State, errors: Vec<Arc<ErrorRecord>>) {
        state.notice(match errors.len() {
            0 => "No error was signalled that the code handled.".to_owned(),
            _ => "Errors that the code handled (get-backtrace and describe-last-error take their error-id):".to_owned(),
        });
        for mut error in errors {
            state.record(&mut error);
            if let Some(witness) = self.witness.get() {
                witness.errors(Some(&error), state.last_error.as_ref());
            }
            state.notice(crate::report::signalled_error(&error));
        }
    }

    /// Takes note of what the cleanup forms of a held evaluation did that was released.
    fn unwound(&self, builder: OutcomeBuilder) {
        let (errors, printed) = builder.unwound();
        let limit = self.limits.lock().max_output;
        let mut state = self.state.lock();
        if !printed.is_empty() {
            state.background.get_or_insert_with(|| ClippedBuffer::new(limit)).push_clipped(&printed);
        }
        self.record_superseded(&mut state, errors, "It was signalled while what was held was unwound");
    }

    /// Takes note of the outcome of an evaluation inside a held one, which leaves the error state alone.
    fn evaluated_inside(&self, outcome: &mut Outcome) {
        let mut state = self.state.lock();
        if let Err(error) = &mut outcome.result {
            state.record(error);
        }
        self.tell_witness(&state, outcome);
        tell(&mut state, outcome);
    }

    /// Keeps an outcome. What this returns gives it to whoever waits for it.
    fn keep(&self, mut outcome: Outcome, reply: Reply<Outcome>) -> Answer {
        let waiting = self.evaluations.lock().end(&mut outcome);
        if waiting.is_empty() {
            return answer(reply, outcome);
        }
        Box::new(move || {
            reply(outcome);
            waiting.into_iter().for_each(|answer| answer());
        })
    }

    /// Has another image know of this one's error, should it come to that.
    fn tell_witness(&self, state: &State, outcome: &Outcome) {
        if let Some(witness) = self.witness.get() {
            witness.errors(outcome.result.as_ref().err(), state.last_error.as_ref());
        }
    }

    /// Lets the witness know that a job of the evaluation lane begins.
    fn witnessed(&self, request: &Request) {
        if let JobKind::Evaluate { .. } = request.job.kind {
            self.local.store(!request.job.name.is_empty(), Ordering::Relaxed);
        }
        // What the server does of its own accord has a number of its own, above those of what waits.
        if let (Some(witness), false) = (self.witness.get(), matches!(request.build, Build::Nothing)) {
            witness.begun(request.job.id, request.timeout);
        }
    }
}

/// Adds what waited for the next answer.
fn tell(state: &mut State, outcome: &mut Outcome) {
    outcome.background = state.background.take().map(Clipped::from).unwrap_or_default();
    outcome.notices = state.take_notices();
}

impl Host for Inner {
    fn next_job(&self, lane: Lane) -> Option<Job> {
        let mut request = match lane {
            Lane::Evaluation => self.next_evaluation(),
            Lane::Signals => return None,
            Lane::Inspection | Lane::Control => self.lanes[lane as usize].pop(None, Duration::ZERO, |_| true)?,
        };
        let now = Instant::now();
        match (lane, self.witness.get()) {
            (Lane::Evaluation, _) => self.witnessed(&request),
            (Lane::Inspection, Some(witness)) => witness.inspects(Some(request.job.id)),
            _ => {}
        }
        if lane != Lane::Control {
            let mut slot = self.running[lane as usize].lock();
            if lane == Lane::Evaluation && self.cancelled.load(Ordering::Acquire) == request.job.id {
                drop(slot);
                self.finish(Running::new(request, None), Ok(Interrupt::Cancel))();
                return self.next_job(lane);
            }
            let deadline = request.timeout.map(|timeout| now + timeout);
            // Lisp gets the job, the rest stays here.
            let job = request.take_job();
            let evaluation = request.build.evaluation();
            let mut running = Running::new(request, deadline);
            if job.kind == JobKind::Release {
                running.unwinding = self.held_as.lock().as_ref().map(|held| Box::new(held.anew()));
            }
            if lane == Lane::Evaluation {
                running.heap_limit = heap_limit();
                self.begun.fetch_add(1, Ordering::Relaxed);
            }
            let watch = running.heap_limit.map(|_| now + HEAP_WATCH);
            *slot = Some(running);
            drop(slot);
            // From now on it can be interrupted.
            if let Some(evaluation) = evaluation {
                self.evaluations.lock().begin(evaluation, job.id);
            }
            if let Some(at) = deadline.into_iter().chain(watch).min() {
                self.clock.arm(at);
            }
            return Some(job);
        }
        Some(request.job)
    }

    fn event(&self, job: u64, signalled: bool, event: Event<'_>) -> bool {
        for lane in &self.running {
            let mut slot = lane.lock();
            if let Some(running) = slot.as_mut()
                && running.id == job
            {
                if let Event::Done { success } = event {
                    if let Some(mut running) = slot.take() {
                        let settled = std::mem::take(&mut running.settled);
                        let answer = self.finish(running, Err(success));
                        // Whoever finds that nothing runs finds what came of it.
                        drop(slot);
                        answer();
                        settled.into_iter().for_each(|question| question());
                    }
                    return false;
                }
                match event {
                    Event::Held { unchanged } => {
                        running.holds = true;
                        running.unchanged = unchanged;
                    }
                    Event::Refused(reason) => running.refused = Some(reason.to_owned()),
                    Event::Released => {
                        let end = Instant::now() + RELEASE_TIMEOUT;
                        running.released = true;
                        running.unwinding = self.held_as.lock().as_ref().map(|held| Box::new(held.anew()));
                        running.deadline = Some(end);
                        self.clock.arm(end);
                    }
                    Event::Heap => {
                        let (was_full, full) = (running.filled_heap, running.judge_heap());
                        if let Some(witness) = self.witness.get() {
                            let now = Instant::now();
                            if full {
                                self.clock.arm(now + INTERRUPTION_GRACE);
                            } else if was_full {
                                // The time it had for its end is its own again.
                                witness.extended(running.deadline.map(|end| end.saturating_duration_since(now)));
                            }
                        }
                        return full;
                    }
                    Event::Notice(text) => {
                        drop(slot);
                        self.state.lock().notice(text.to_owned());
                    }
                    Event::Defined(..) => {
                        running.build.event(event);
                        if let (Some(witness), Some(form)) = (self.witness.get(), running.build.last_defined()) {
                            witness.defined(form, self.local.load(Ordering::Relaxed), running.evaluation);
                        }
                    }
                    event => {
                        return match &mut running.unwinding {
                            _ if signalled => running.build.signalled(event),
                            Some(unwinding) => unwinding.event(event),
                            None => running.build.event(event),
                        };
                    }
                }
                return false;
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
            Event::Notice(text) => self.state.lock().notice(text.to_owned()),
            _ => {}
        }
    }
}
