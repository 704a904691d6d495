//! What the rest of the program, and other programs, ask of a session.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::activity::{Asked, HandledErrors, Inspection, Submission};
use super::aftermath::{Aftermath, Due};
use super::connection::Connection;
use super::events::{InspectionBuilder, JobEnd, OutcomeBuilder};
use super::operation::{Operation, RecordsBuilder};
use super::reentry::{BY_BACKGROUND, DEADLOCK};
use super::scheduler::{Awaited, Board, Request};
use super::{INSPECTION_TIMEOUT, Inner, Reply, utf32};
use crate::config::{ImageConfig, Limits};
use crate::error::{BootError, InspectError};
use crate::image::{self, Interrupt, Item, Job, JobKind, Lane};
use crate::outcome::{
    DefinitionCount, DefinitionFilter, DefinitionQuery, Definitions, ErrorRecord, Image, Outcome, Record,
    SymbolDescription, of_kind,
};

/// Names an evaluation, so that it can be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId(pub(super) u64);

/// How long an evaluation may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TimeLimit {
    /// As long as the session's limits say, or any time where it may be in the background.
    #[default]
    Default,
    /// Any time.
    None,
    /// So long.
    Of(Duration),
}

impl TimeLimit {
    /// The limit, where `default` is the session's.
    pub(super) fn or(self, default: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Default => default,
            Self::None => None,
            Self::Of(time) => Some(time),
        }
    }
}

/// Whether an evaluation keeps those after it waiting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Background {
    /// It does.
    #[default]
    Never,
    /// It may be told not to, by [`Session::leave_foreground`].
    Later,
    /// It does not.
    AtOnce,
}

/// Code to evaluate, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// One form or many.
    pub code: String,
    /// The package to read and evaluate in, for this evaluation alone.
    pub package: Option<String>,
    /// Its time limit.
    pub timeout: TimeLimit,
    /// Measure time and allocation.
    pub capture_time: bool,
    /// When it fails, hold it where it failed, so that its restarts can be invoked and its frames looked at. Not for
    /// one that may be in the background.
    pub hold: bool,
    /// Whether those after it wait for its end. One in the background begins in its turn, with a copy of the session's
    /// `*package*` and REPL variables, and leaves none behind. It has a thread of its own. At most 16 are there; more
    /// of them wait for a place, and so does what comes after them.
    pub background: Background,
    /// Record the errors that the code handles, too, where they are signalled: the first of each kind and place.
    pub record_errors: bool,
}

impl Evaluation {
    /// Evaluates `code` in the session's package under its limits.
    pub fn new(code: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            package: None,
            timeout: TimeLimit::Default,
            capture_time: false,
            hold: false,
            background: Background::Never,
            record_errors: false,
        }
    }
}

/// A handle on the one image of this process, and on one connection to it: clones are the same, another one is to be had
/// by [`connect`](Self::connect).
#[derive(Clone)]
pub struct Session {
    pub(super) inner: Arc<Inner>,
    pub(super) connection: Arc<Connection>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Session {
    /// Boots SBCL in this process and starts a session with it: 10 to 30 ms.
    ///
    /// # Errors
    /// [`BootError`]: sizes out of range, no usable core, or an image that is there already.
    pub fn start(image: &ImageConfig, limits: Limits) -> Result<Self, BootError> {
        Self::start_with(image, limits, None)
    }

    /// Boots as [`start`](Self::start) does, for a program that embeds the image, too.
    pub(crate) fn start_with(
        image: &ImageConfig,
        limits: Limits,
        program: Option<image::Embedding>,
    ) -> Result<Self, BootError> {
        let inner = Arc::new(Inner::new(limits));
        image::boot(image, inner.clone(), program)?;
        let clock = inner.clone();
        std::thread::Builder::new()
            .name("sbcl-clock".to_owned())
            .spawn(move || clock.clock.run(|now| clock.interrupt_overdue(now)))
            .map_err(|source| BootError::Os { what: "start a thread", source })?;
        let connection = inner.main.clone();
        Ok(Self { inner, connection })
    }

    /// Evaluates and waits for the outcome.
    ///
    /// Where it would wait for itself, nothing is evaluated, and the outcome is an error of kind `DEADLOCK` at once: in a Rust
    /// function that an evaluation of this session called, in a `reply` closure, and in a stream or warning hook of the
    /// [`Builder`](crate::Builder)'s. There, call Lisp directly ([`Lisp::eval`](crate::Lisp::eval)), or
    /// [`submit`](Self::submit) the code. A background evaluation may wait for another evaluation, unless the background is
    /// full and all evaluations there wait for a place in it. When the waiting evaluation is interrupted, for instance by its
    /// time limit, the other one is cancelled. Only the calling thread is looked at: an evaluation that waits for *another*
    /// thread, be it Rust's or Lisp's, that waits for this function is not recognised, and neither of them ends.
    #[must_use]
    pub fn evaluate(&self, evaluation: Evaluation) -> Arc<Outcome> {
        self.evaluate_as(None, evaluation, None)
    }

    /// The same by an operation, or from `source`, as [`submit_as`](Self::submit_as) does.
    pub(crate) fn evaluate_as(
        &self,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
    ) -> Arc<Outcome> {
        let deadlock = |reason: &str| Arc::new(OutcomeBuilder::blank(0).failed(DEADLOCK, reason.to_owned()));
        match self.waiting_job() {
            Err(reason) => deadlock(reason),
            Ok(None) => wait(|reply| {
                self.submit_as(source, evaluation, operation, None, reply);
            }),
            Ok(Some(waiter)) => {
                let (sender, receiver) = mpsc::channel();
                let interrupt = sender.clone();
                let waiter = Waiter { job: waiter, interrupt: Box::new(move || drop(interrupt.send(None))) };
                let reply: Reply<Arc<Outcome>> = Box::new(move |outcome| drop(sender.send(Some(outcome))));
                let Some(id) = self.submit_for(Some(waiter), source, evaluation, operation, None, reply) else {
                    return deadlock(BY_BACKGROUND);
                };
                receiver.recv().ok().flatten().unwrap_or_else(|| {
                    self.cancel(id);
                    Arc::new(OutcomeBuilder::blank(0).finish(JobEnd::Withdrawn))
                })
            }
        }
    }

    /// Queues an evaluation behind those submitted before; `reply` gets its outcome.
    ///
    /// `reply` runs on the Lisp thread that evaluated: it must be quick and must not block.
    pub fn submit(&self, evaluation: Evaluation, reply: impl FnOnce(Arc<Outcome>) + Send + 'static) -> JobId {
        self.submit_as(None, evaluation, None, None, Box::new(reply))
    }

    /// Queues an evaluation; with a `source`, under no number of its own: Lisp takes its definitions for those of
    /// evaluation `source`. An `operation` may evaluate the code, or do what the code stands for: the outcome has its
    /// records. The `aftermath` is done before the evaluation is over.
    pub(crate) fn submit_as(
        &self,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
        aftermath: Option<Aftermath>,
        reply: Reply<Arc<Outcome>>,
    ) -> JobId {
        self.submit_for(None, source, evaluation, operation, aftermath, reply).expect("nobody waits who must not")
    }

    /// Queues an evaluation as [`submit_as`](Self::submit_as) does. `waiter` is the background job whose thread is about to
    /// wait for the evaluation, if there is one; returns `None`, with nothing queued, if that wait would never end.
    fn submit_for(
        &self,
        waiter: Option<Waiter>,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
        aftermath: Option<Aftermath>,
        reply: Reply<Arc<Outcome>>,
    ) -> Option<JobId> {
        let Evaluation { code, package, timeout, capture_time, hold, background, record_errors } = evaluation;
        let code: Arc<str> = code.into();
        let limits = *self.inner.limits.lock();
        let detached = background != Background::Never;
        let timeout = timeout.or(limits.timeout.filter(|_| !detached));
        let hold = hold && !detached;
        let kind = JobKind::Evaluate { timing: capture_time, hold, record_errors, detached, background: false };
        let job = Job {
            text: utf32(&code),
            name: package.as_deref().map(utf32).unwrap_or_default(),
            operation: operation.map(|operation| utf32(&operation.to_string())).unwrap_or_default(),
            ..Job::empty(self.inner.next_job_id(), kind, source.unwrap_or(0))
        };
        let id = JobId(job.id);
        // The order of the numbers is that of the queue.
        let mut board = self.inner.board.lock();
        if let Some(waiter) = waiter {
            if board.would_deadlock(waiter.job, background == Background::AtOnce) {
                return None;
            }
            board.wait_for(waiter.job, Awaited { job: id.0, interrupt: waiter.interrupt });
        }
        let number = if source.is_some() { 0 } else { self.number_evaluation(&mut board, job.id, &code) };
        let handled = match operation {
            Some(operation) if operation.has_errors => HandledErrors::InRecords,
            _ if record_errors => HandledErrors::Recorded,
            _ => HandledErrors::Ignored,
        };
        let local = self.connection.is_guest() || !job.name.is_empty();
        let due = aftermath.map(|aftermath| Box::new(Due { aftermath, session: self.clone() }));
        let asked = Asked::Evaluate(Submission { number, code, limits, timeout, handled, local, due }, reply);
        let mut request = Request::new(&self.connection, job, timeout, asked);
        request.background = background == Background::AtOnce;
        if source.is_none() {
            request.job.evaluation = number;
        }
        if request.background && board.releases_held(self.connection.id) {
            // Its call is answered before it begins, and tells of this.
            let release = self.inner.release(&mut board, &self.connection, super::hold::RELEASED);
            board.push(Lane::Evaluation, release);
        }
        let in_background = request.background;
        board.push(Lane::Evaluation, request);
        if in_background {
            self.inner.report_background(&board);
        }
        self.inner.leave_board(board);
        Some(id)
    }

    /// Takes an evaluation off the queue, or interrupts it if it runs. Its `reply` is called all the same, with an
    /// error of kind `CANCELLED`, which becomes the last error if it had begun. Does nothing for one that is over.
    pub fn cancel(&self, id: JobId) {
        let mut board = self.inner.board.lock();
        let waiting = board.take_waiting(id.0);
        let withdrawn = waiting.map(|request| self.inner.withdraw(&mut board, Lane::Evaluation, request));
        if withdrawn.is_none() {
            match board.finishing.iter_mut().find(|finishing| finishing.job == id.0) {
                Some(finishing) => finishing.cancel(),
                None => drop(self.inner.interrupt(&mut board, id.0, Interrupt::Cancel)),
            }
        }
        self.inner.leave_board(board);
        self.inner.deliver(withdrawn);
    }

    /// Has an evaluation that [may](Background::Later) go on in the background, so that those after it need not wait. Returns
    /// what there is of it; `None` when it stays, since it is over or about to end, or as many are there as may be.
    #[must_use = "it may have stayed"]
    pub fn leave_foreground(&self, id: JobId) -> Option<Outcome> {
        let mut board = self.inner.board.lock();
        if !board.leave(id.0) {
            return None;
        }
        self.inner.report_background(&board);
        if let (true, Some(observer)) = (board.find(id.0).is_some(), self.inner.observer.get()) {
            observer.ended(id.0);
        }
        let mut outcome = so_far(&mut board, id);
        self.inner.leave_board(board);
        self.connection.state().tell(&mut outcome);
        Some(outcome)
    }

    /// What there is of an evaluation that is not over, and what else the next answer has to say.
    #[must_use]
    pub fn so_far(&self, id: JobId) -> Outcome {
        let mut outcome = so_far(&mut self.inner.board.lock(), id);
        self.connection.state().tell(&mut outcome);
        outcome
    }

    /// What a running evaluation has printed to `*standard-output*` so far, from byte `from` on. `None` when it does
    /// not run, or has printed nothing more.
    #[must_use]
    pub fn output_so_far(&self, id: JobId, from: usize) -> Option<String> {
        let mut board = self.inner.board.lock();
        let printed = board.find(id.0)?.activity.outcome()?.stdout();
        printed.get(from..).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    /// What a running evaluation has said of how far it is, in lines, from byte `from` on. `None` as of
    /// [`output_so_far`](Self::output_so_far).
    pub(crate) fn progress_so_far(&self, id: JobId, from: usize) -> Option<String> {
        let mut board = self.inner.board.lock();
        let text = board.find(id.0)?.activity.outcome()?.progress();
        text.get(from..).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    /// The error that the last evaluation ended with; `None` once one has succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<ErrorRecord>> {
        self.connection.state().last_error.clone()
    }

    /// An error by its number; `None` when the history does not have it.
    #[must_use]
    pub fn error(&self, id: u64) -> Option<Arc<ErrorRecord>> {
        self.connection.state().history.get(id).cloned()
    }

    /// The last errors, newest first.
    #[must_use]
    pub fn error_history(&self) -> Vec<Arc<ErrorRecord>> {
        self.connection.state().history.newest_first().cloned().collect()
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
        let job = self.inner.job(
            JobKind::Definitions { only, limit: query.limit },
            "",
            query.package.as_deref().unwrap_or(""),
        );
        self.inspect(job, Inspection::Definitions(InspectionBuilder::default(), Box::new(reply)));
    }

    /// Says what a symbol means; with `source`, with the text of its definitions too. Works while an evaluation runs;
    /// `reply` as in [`submit`](Self::submit).
    pub fn describe_symbol(
        &self,
        name: &str,
        package: Option<&str>,
        source: bool,
        reply: impl FnOnce(Result<SymbolDescription, InspectError>) + Send + 'static,
    ) {
        let job = self.inner.job(JobKind::Describe { source }, name, package.unwrap_or(""));
        self.inspect(job, Inspection::Symbol(InspectionBuilder::default(), Box::new(reply)));
    }

    /// Asks a question that the Lisp side knows by name. Works while an evaluation runs; `reply` as in
    /// [`submit`](Self::submit).
    pub(crate) fn query(
        &self,
        operation: &Operation,
        reply: impl FnOnce(Result<Vec<Record>, InspectError>) + Send + 'static,
    ) {
        self.inspect(self.inner.query(operation), Inspection::Query(RecordsBuilder::default(), Box::new(reply)));
    }

    /// The same, on the thread that evaluates, in order with the evaluations, and for as long as it takes.
    pub(crate) fn query_in_order(
        &self,
        operation: &Operation,
        reply: impl FnOnce(Result<Vec<Record>, InspectError>) + Send + 'static,
    ) {
        let asked = Asked::Inspect(Inspection::Query(RecordsBuilder::default(), Box::new(reply)));
        self.enqueue(Lane::Evaluation, self.inner.query(operation), None, asked);
    }

    /// Collects all garbage. Returns the name of the checkpoint that the image was booted from, and what the session has
    /// defined, in words; empty for none.
    pub(crate) fn collect_and_name(&self) -> (String, String) {
        let operation = Operation::new("image-name").with("collect", 1_u64);
        let records = wait(|reply| self.query(&operation, reply)).unwrap_or_default();
        let name = of_kind(&records).find_map(|image: &Image| image.name.clone()).unwrap_or_default();
        let counts = of_kind(&records).map(|DefinitionCount { count, kind }| {
            let plural = if *count == 1 { "" } else { "s" };
            format!("{count} {kind}{plural}")
        });
        let counts: Vec<_> = counts.collect();
        (name, counts.join(", ").replace("classs", "classes"))
    }

    /// The number of the last evaluation.
    pub(crate) fn evaluations_so_far(&self) -> u64 {
        self.inner.board.lock().evaluations.last()
    }

    /// True while something is evaluated, in the background too, or held.
    pub(crate) fn is_busy(&self) -> bool {
        self.inner.board.lock().is_busy()
    }

    /// Returns true while an evaluation runs, in the background too. What the server asks the image meanwhile does not count.
    pub(crate) fn is_evaluating(&self) -> bool {
        self.inner.board.lock().is_evaluating()
    }

    /// True while a failed evaluation of any connection is held.
    pub(crate) fn is_anything_held(&self) -> bool {
        !self.inner.board.lock().holds.is_empty()
    }

    fn inspect(&self, job: Job, inspection: Inspection) {
        self.enqueue(Lane::Inspection, job, Some(INSPECTION_TIMEOUT), Asked::Inspect(inspection));
    }

    /// Removes what has been defined since the image was booted, in order with the evaluations, and clears the error state. The
    /// limits stay. The functions that a program defined by [`Lisp::define`](crate::Lisp::define) and code that it loaded are
    /// removed, too: no call of the program may use them meanwhile.
    pub fn reset(&self, reply: impl FnOnce(Result<(), InspectError>) + Send + 'static) {
        let job = self.inner.job(JobKind::Reset, "", "");
        let asked = Asked::Inspect(Inspection::Reset(InspectionBuilder::default(), Box::new(reply)));
        self.enqueue(Lane::Evaluation, job, None, asked);
    }

    /// The limits of evaluations to come.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.inner.limits.lock()
    }

    /// Sets the limits of evaluations to come.
    pub fn set_limits(&self, limits: Limits) {
        *self.inner.limits.lock() = limits;
        if let Some(observer) = self.inner.observer.get() {
            observer.limits(&limits);
        }
    }
}

/// What there is of an evaluation.
fn so_far(board: &mut Board, id: JobId) -> Outcome {
    let number = board.evaluations.by_job(id.0).unwrap_or(0);
    let running = board.find(id.0).and_then(|running| running.activity.outcome());
    running.map_or_else(|| OutcomeBuilder::blank(number).so_far(), OutcomeBuilder::so_far)
}

/// A background job whose thread is about to wait for another one, and what ends the wait.
struct Waiter {
    job: u64,
    interrupt: Box<dyn FnOnce() + Send>,
}

/// Calls `submit` with a reply and waits until that is called.
fn wait<T: Send + 'static>(submit: impl FnOnce(Reply<T>)) -> T {
    let (sender, receiver) = oneshot::channel();
    submit(Box::new(move |value| drop(sender.send(value))));
    receive(receiver)
}

/// Waits for what a reply is called with.
fn receive<T>(receiver: oneshot::Receiver<T>) -> T {
    match crate::os::busy_poll::look(20, || receiver.try_recv().ok()) {
        Some(value) => value,
        None => receiver.recv().expect("every job is answered"),
    }
}
