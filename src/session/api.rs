//! The operations of a session, for this program's other modules and for programs that use the library.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::activity::{HandledErrors, Inspection, RequestBody, Submission};
use super::connection::Connection;
use super::events::{InspectionBuilder, JobEnd, OutcomeBuilder, Printed, part};
use super::operation::{Operation, RecordsBuilder};
use super::post_processing::{BoundPostProcessing, PostProcessing};
use super::reentry::{DEADLOCK, DEADLOCK_IN_BACKGROUND, FORKED, NO_THREADS};
use super::scheduler::{JobWait, Request, SchedulerState};
use super::{BRIEF_LOCK_TIME, INSPECTION_TIMEOUT, Inner, Reply, utf32};
use crate::config::{ImageConfig, Limits};
use crate::error::{BootError, HoldEnd, InspectError};
use crate::image::process::is_forked;
use crate::image::{self, InterruptReason, ItemKind, Job, JobKind, Lane};
use crate::os::helper_threads;
use crate::outcome::{
    DefinitionCount, DefinitionFilter, DefinitionQuery, Definitions, ErrorRecord, Image, Outcome, Record,
    SymbolDescription, of_kind,
};

/// The maximum size of output, in bytes, that is copied and rendered on the event loop.
const MAX_COPIED_AT_ONCE: usize = 64 << 10;
/// The notice that an outcome so far lacks output.
const OUTPUT_INCOMPLETE: &str = "Output is missing here: the evaluation ended while its output was being copied.";

/// The identity of a submitted evaluation, of a request about a held evaluation, or of an inspection, for
/// [`Session::cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId(pub(super) u64);

/// The time limit of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TimeLimit {
    /// The session's default limit; no limit for an evaluation that may be in the background.
    #[default]
    Default,
    /// No limit.
    None,
    /// A limit of this duration.
    Of(Duration),
}

impl TimeLimit {
    /// Returns the limit; `default` is the session's default limit. `None` means no limit.
    pub(super) fn resolve(self, default: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Default => default,
            Self::None => None,
            Self::Of(time) => Some(time),
        }
    }
}

/// The choice of whether later evaluations wait for an evaluation to end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Background {
    /// Later evaluations wait.
    #[default]
    Never,
    /// Later evaluations wait until [`Session::leave_foreground`] moves this evaluation to the background.
    Later,
    /// Later evaluations do not wait.
    AtOnce,
}

/// Code to evaluate, with the options of the evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The source text: one form or many.
    pub code: String,
    /// The package to read and evaluate in, for this evaluation alone.
    pub package: Option<String>,
    /// The time limit.
    pub timeout: TimeLimit,
    /// True to measure time and allocation.
    pub capture_time: bool,
    /// True to hold a failed evaluation where it failed, so that its restarts can be invoked and its frames inspected.
    /// Ignored for an evaluation that may be in the background.
    pub hold: bool,
    /// The choice of whether later evaluations wait for this evaluation to end. A background evaluation begins in its
    /// turn, on a thread of its own, with copies of the session's `*package*` and REPL variables; its changes to the
    /// copies are not written back. At most 16 evaluations are in the background. A further background evaluation waits
    /// until one of the 16 ends, and so do the evaluations queued behind it.
    pub background: Background,
    /// True to also record the errors that the code handles, where they are signalled. Of the errors of one kind at one
    /// place, only the first is recorded.
    pub record_errors: bool,
}

impl Evaluation {
    /// Creates an evaluation of `code` in the session's package, under the session's limits.
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

/// A handle to the image of this process, and to one connection to the image. Clones share the connection;
/// [`connect`](Self::connect) adds a connection.
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
    /// Boots SBCL in this process and starts a session with it, which takes 10 to 30 ms.
    ///
    /// # Errors
    /// Returns [`BootError`] when a size is out of range, no core is usable, this process has already booted an image or
    /// failed to start SBCL, or the system refuses memory, a library or a thread.
    pub fn start(image: &ImageConfig, limits: Limits) -> Result<Self, BootError> {
        Self::start_for_program(image, limits, None)
    }

    /// Boots SBCL as [`start`](Self::start) does. `program` is the program that embeds the image, if there is one.
    pub(crate) fn start_for_program(
        image: &ImageConfig,
        limits: Limits,
        program: Option<image::Embedding>,
    ) -> Result<Self, BootError> {
        let inner = Arc::new(Inner::new(limits));
        // The thread is started before SBCL, because a process can start SBCL only once. If the boot fails, the thread
        // receives nothing and ends.
        let (begin, begun) = mpsc::channel();
        let clock = inner.clone();
        std::thread::Builder::new()
            .name("sbcl-clock".to_owned())
            .spawn(move || {
                if begun.recv().is_ok() {
                    clock.clock.run(|now| clock.interrupt_overdue(now));
                }
            })
            .and_then(|_| helper_threads::start())
            .map_err(|source| BootError::Os { what: "start a thread", source })?;
        image::boot(image, inner.clone(), program)?;
        let _ = begin.send(());
        let connection = inner.own_connection.clone();
        Ok(Self { inner, connection })
    }

    /// Evaluates and waits for the outcome.
    ///
    /// Where the call would wait for itself, it evaluates nothing and returns an error of kind `DEADLOCK` at once: in a
    /// Rust function that a foreground evaluation of this session called, in a `reply` closure that an evaluation thread of
    /// Lisp calls, and in a stream or warning hook of [`Builder`](crate::Builder). In a Rust function or a `reply`, call
    /// Lisp directly ([`Lisp::eval`](crate::Lisp::eval)), or [`submit`](Self::submit) the code; in a stream or hook, only
    /// the latter.
    ///
    /// A background evaluation may wait for another evaluation. The call returns a `DEADLOCK` error only if the
    /// background is full and all evaluations there would wait for evaluations that cannot begin or end. When the
    /// waiting evaluation is interrupted, for instance by its time limit, the awaited evaluation is cancelled.
    ///
    /// Only the calling thread is checked. A deadlock through *another* thread, of Rust or Lisp, is not detected: if an
    /// evaluation waits for a thread that itself waits for this function, neither ends before the evaluation is interrupted,
    /// for example by its time limit. An interruption does not end a wait in Rust code.
    ///
    /// In a child process after `fork`, which has no Lisp threads, the outcome is an error of kind `FORKED`.
    #[must_use]
    pub fn evaluate(&self, evaluation: Evaluation) -> Arc<Outcome> {
        self.evaluate_with_options(None, evaluation, None)
    }

    /// Evaluates as [`evaluate`](Self::evaluate) does, with the `source` and the `operation` of
    /// [`submit_with_options`](Self::submit_with_options).
    pub(crate) fn evaluate_with_options(
        &self,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
    ) -> Arc<Outcome> {
        // In a forked process, a lock may be held by a thread that does not exist there.
        if is_forked() {
            return refusal(FORKED, NO_THREADS);
        }
        let deadlock = |reason| refusal(DEADLOCK, reason);
        match self.background_waiter() {
            Err(reason) => deadlock(reason),
            Ok(None) => wait(|reply| {
                self.submit_with_options(source, evaluation, operation, None, reply);
            }),
            Ok(Some(waiter)) => {
                let (sender, receiver) = mpsc::channel();
                let interrupt = sender.clone();
                let waiter = BackgroundWaiter { job: waiter, interrupt: Box::new(move || drop(interrupt.send(None))) };
                let reply: Reply<Arc<Outcome>> = Box::new(move |outcome| drop(sender.send(Some(outcome))));
                let Some(id) = self.submit_for_waiter(Some(waiter), source, evaluation, operation, None, reply) else {
                    return deadlock(DEADLOCK_IN_BACKGROUND);
                };
                receiver.recv().ok().flatten().unwrap_or_else(|| {
                    self.cancel(id);
                    Arc::new(OutcomeBuilder::blank(0).finish(JobEnd::Withdrawn))
                })
            }
        }
    }

    /// Queues an evaluation behind the evaluations submitted before; `reply` gets its outcome.
    ///
    /// `reply` usually runs on the Lisp thread that did the work. If the evaluation is cancelled before it begins, `reply`
    /// runs on the thread that cancels the evaluation. In a child process after `fork`, `reply` runs before this
    /// function returns, with an error of kind `FORKED`. `reply` must be quick and must not block.
    pub fn submit(&self, evaluation: Evaluation, reply: impl FnOnce(Arc<Outcome>) + Send + 'static) -> JobId {
        self.submit_with_options(None, evaluation, None, None, Box::new(reply))
    }

    /// Queues an evaluation. With a `source`, the evaluation gets no number of its own: Lisp records its definitions
    /// under the number `source`. An `operation` replaces the plain evaluation of the code, and the outcome has the
    /// operation's records. The `post_processing` runs after Lisp's part, and the evaluation is over when the
    /// post-processing is done.
    pub(crate) fn submit_with_options(
        &self,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
        post_processing: Option<PostProcessing>,
        reply: Reply<Arc<Outcome>>,
    ) -> JobId {
        if is_forked() {
            reply(refusal(FORKED, NO_THREADS));
            return JobId(self.inner.next_job_id());
        }
        self.submit_for_waiter(None, source, evaluation, operation, post_processing, reply)
            .expect("without a waiter, the evaluation is always accepted")
    }

    /// Queues an evaluation as [`submit_with_options`](Self::submit_with_options) does. `waiter` is the
    /// background job whose thread is about to wait for the evaluation. Returns `None`, with nothing queued, if that
    /// wait would never end.
    fn submit_for_waiter(
        &self,
        waiter: Option<BackgroundWaiter>,
        source: Option<u64>,
        evaluation: Evaluation,
        operation: Option<&Operation>,
        post_processing: Option<PostProcessing>,
        reply: Reply<Arc<Outcome>>,
    ) -> Option<JobId> {
        let Evaluation { code, package, timeout, capture_time, hold, background, record_errors } = evaluation;
        let code: Arc<str> = code.into();
        let limits = *self.inner.limits.lock();
        let detached = background != Background::Never;
        let timeout = timeout.resolve(limits.timeout.filter(|_| !detached));
        let hold = hold && !detached;
        let kind = JobKind::Evaluate { timing: capture_time, hold, record_errors, detached, background: false };
        let job = Job {
            text: utf32(&code),
            name: package.as_deref().map(utf32).unwrap_or_default(),
            operation: operation.map(|operation| utf32(&operation.to_string())).unwrap_or_default(),
            ..Job::without_texts(self.inner.next_job_id(), kind, source.unwrap_or(0))
        };
        let id = JobId(job.id);
        // Evaluations are numbered under the scheduler's lock, so that their numbers follow the order of the queue.
        let mut scheduler = self.inner.scheduler.lock();
        if let Some(waiter) = waiter {
            if scheduler.would_deadlock(waiter.job, background == Background::AtOnce) {
                return None;
            }
            scheduler.record_wait(waiter.job, JobWait { job: id.0, interrupt: waiter.interrupt });
        }
        let number = if source.is_some() { 0 } else { self.number_evaluation(&mut scheduler, job.id, &code) };
        let handled = match operation {
            Some(operation) if operation.has_errors => HandledErrors::InRecords,
            _ if record_errors => HandledErrors::Recorded,
            _ => HandledErrors::Ignored,
        };
        let binds_package = self.connection.is_attached() || !job.name.is_empty();
        let post_processing = post_processing
            .map(|post_processing| Box::new(BoundPostProcessing { post_processing, session: self.clone() }));
        let body = RequestBody::Evaluate(
            Submission { number, code, limits, timeout, handled, binds_package, post_processing },
            reply,
        );
        let mut request = Request::new(&self.connection, job, timeout, body);
        request.background = background == Background::AtOnce;
        if source.is_none() {
            request.job.evaluation = number;
        }
        if request.background && scheduler.releases_held(self.connection.id) {
            // The answer to the call may be sent before this background evaluation begins. The answer must contain the
            // notice of the release, so the held evaluation is released now.
            let release = self.inner.prepare_release(&mut scheduler, &self.connection, HoldEnd::Released);
            scheduler.push(Lane::Evaluation, release);
        }
        let in_background = request.background;
        scheduler.push(Lane::Evaluation, request);
        if in_background {
            self.inner.report_background(&scheduler);
        }
        self.inner.unlock_and_notify(scheduler);
        Some(id)
    }

    /// Takes an evaluation off the queue, or interrupts it if it runs. The evaluation's `reply` still gets an outcome:
    /// an error of kind `CANCELLED`, which becomes the last error if the evaluation was running in the foreground. Does
    /// nothing if the evaluation is over.
    ///
    /// Cancels an inspection in the same way; its `reply` gets [`InspectError::Cancelled`].
    pub fn cancel(&self, id: JobId) {
        let mut scheduler = self.inner.scheduler.lock();
        let waiting = scheduler.take_waiting(id.0);
        let withdrawn = waiting.map(|(lane, request)| self.inner.withdraw(&mut scheduler, lane, request));
        if withdrawn.is_none() {
            match scheduler.finishing.iter_mut().find(|finishing| finishing.job == id.0) {
                Some(finishing) => finishing.cancel(&self.inner.clock),
                None => drop(self.inner.interrupt(&mut scheduler, id.0, InterruptReason::Cancel)),
            }
        }
        self.inner.unlock_and_notify(scheduler);
        self.inner.deliver(withdrawn);
    }

    /// Moves an evaluation to the background if it [may be there](Background::Later), so that later evaluations need
    /// not wait. Returns its outcome so far. Returns `None` if the evaluation stays where it is, because it is over,
    /// about to end or already in the background, or because the background is full.
    #[must_use = "`None` means that the evaluation was not moved"]
    pub fn leave_foreground(&self, id: JobId) -> Option<Outcome> {
        self.move_to_background(id).map(|so_far| self.complete(so_far))
    }

    /// Moves an evaluation to the background as [`leave_foreground`](Self::leave_foreground) does, without copying output.
    pub(crate) fn move_to_background(&self, id: JobId) -> Option<OutcomeSoFar> {
        let mut scheduler = self.inner.scheduler.lock();
        if !scheduler.move_to_background(id.0) {
            return None;
        }
        self.inner.report_background(&scheduler);
        if let (Some(running), Some(observer)) = (scheduler.find(id.0), self.inner.observer.get()) {
            observer.job_ended(id.0);
            observer.evaluation_detached(running.evaluation);
        }
        let so_far = outcome_so_far(&mut scheduler, &self.connection, id);
        self.inner.unlock_and_notify(scheduler);
        Some(so_far)
    }

    /// Returns the outcome so far of an evaluation that is not over. Moves the output and notices that wait for the next
    /// answer into this outcome.
    #[must_use]
    pub fn so_far(&self, id: JobId) -> Outcome {
        self.complete(self.so_far_without_output(id))
    }

    /// Returns the same outcome as [`so_far`](Self::so_far), without copying output.
    pub(crate) fn so_far_without_output(&self, id: JobId) -> OutcomeSoFar {
        outcome_so_far(&mut self.inner.scheduler.lock(), &self.connection, id)
    }

    /// Returns the outcome with its output. If the evaluation ends while its output is being copied, takes the output from
    /// the evaluation's kept outcome, or adds a notice that output is missing.
    ///
    /// If there is output, this function must not be called on the event loop: a garbage collection may have stopped a thread
    /// that prints.
    pub(crate) fn complete(&self, so_far: OutcomeSoFar) -> Outcome {
        let OutcomeSoFar { mut outcome, printed, background } = so_far;
        if let Some(printed) = printed {
            let (text, is_complete) = printed.copy();
            (outcome.stdout, outcome.stderr, outcome.turns) = (text.stdout, text.stderr, text.turns);
            if !is_complete {
                let kept = self.inner.scheduler.lock().evaluations.outcome(outcome.evaluation);
                match kept {
                    Some(kept) => {
                        (outcome.stdout, outcome.stderr) = (kept.stdout.clone(), kept.stderr.clone());
                        (outcome.turns, outcome.printed_before) = (kept.turns.clone(), kept.printed_before);
                    }
                    None => outcome.notices.push(OUTPUT_INCOMPLETE.to_owned()),
                }
            }
        }
        if let Some(background) = background {
            outcome.background = background.take().stdout;
        }
        outcome
    }

    /// Returns the text that a running evaluation has printed to `*standard-output*` so far, from byte `from` on.
    /// Returns `None` when the evaluation does not run, or has printed nothing more.
    #[must_use]
    pub fn output_so_far(&self, id: JobId, from: usize) -> Option<String> {
        let printed = printed_by(&mut self.inner.scheduler.lock(), id)?;
        printed.stdout_part(from, usize::MAX, None)
    }

    /// Returns the same text as [`output_so_far`](Self::output_so_far), up to the end of a character, but at most `max`
    /// bytes. Also returns `None` while another thread keeps the scheduler's lock or the output's lock.
    pub(crate) fn output_part(&self, id: JobId, from: usize, max: usize) -> Option<String> {
        let mut scheduler = self.inner.lock_briefly()?;
        let printed = printed_by(&mut scheduler, id)?;
        drop(scheduler);
        printed.stdout_part(from, max, Some(BRIEF_LOCK_TIME))
    }

    /// Returns the progress messages of a running evaluation so far, one per line, from byte `from` on, at most `max` bytes.
    /// Returns `None` when the evaluation does not run, or has no further messages, or while another thread keeps the
    /// scheduler's lock.
    pub(crate) fn progress_part(&self, id: JobId, from: usize, max: usize) -> Option<String> {
        let mut scheduler = self.inner.lock_briefly()?;
        let text = scheduler.find(id.0)?.activity.outcome_builder()?.progress();
        part(&text, from, max).map(str::to_owned)
    }

    /// Returns the connection's last error; `None` once a later evaluation has succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<ErrorRecord>> {
        self.connection.state().last_error.clone()
    }

    /// Finds an error by its number; `None` if the history does not have it.
    #[must_use]
    pub fn error(&self, id: u64) -> Option<Arc<ErrorRecord>> {
        self.connection.state().history.get(id).cloned()
    }

    /// Returns the recorded errors, newest first.
    #[must_use]
    pub fn error_history(&self) -> Vec<Arc<ErrorRecord>> {
        self.connection.state().history.newest_first().cloned().collect()
    }

    /// Lists the session's definitions. Works while an evaluation runs; `reply` runs as in [`submit`](Self::submit).
    pub fn definitions(
        &self,
        query: &DefinitionQuery,
        reply: impl FnOnce(Result<Definitions, InspectError>) + Send + 'static,
    ) -> JobId {
        let only = match query.filter {
            DefinitionFilter::All => None,
            DefinitionFilter::Functions => Some(ItemKind::Function),
            DefinitionFilter::Variables => Some(ItemKind::Variable),
            DefinitionFilter::Macros => Some(ItemKind::Macro),
            DefinitionFilter::Classes => Some(ItemKind::Class),
        };
        let job = self.inner.job(
            JobKind::Definitions { kind: only, limit: query.limit },
            "",
            query.package.as_deref().unwrap_or(""),
        );
        let of_one_kind = only.is_some();
        let in_one_package = query.package.as_ref().is_some_and(|package| !package.is_empty());
        let reply = move |found: Result<Definitions, InspectError>| {
            reply(found.map(|definitions| Definitions { of_one_kind, in_one_package, ..definitions }));
        };
        self.inspect(job, Inspection::Definitions(InspectionBuilder::default(), Box::new(reply)))
    }

    /// Describes a symbol; with `source`, includes the text of its definitions. Works while an evaluation runs; `reply`
    /// runs as in [`submit`](Self::submit).
    pub fn describe_symbol(
        &self,
        name: &str,
        package: Option<&str>,
        source: bool,
        reply: impl FnOnce(Result<SymbolDescription, InspectError>) + Send + 'static,
    ) -> JobId {
        let job = self.inner.job(JobKind::Describe { source }, name, package.unwrap_or(""));
        self.inspect(job, Inspection::Symbol(InspectionBuilder::default(), Box::new(reply)))
    }

    /// Runs a query that the Lisp side knows by name. Works while an evaluation runs; `reply` runs as in
    /// [`submit`](Self::submit).
    pub(crate) fn query(
        &self,
        operation: &Operation,
        reply: impl FnOnce(Result<Vec<Record>, InspectError>) + Send + 'static,
    ) -> JobId {
        self.inspect(self.inner.query_job(operation), Inspection::Query(RecordsBuilder::default(), Box::new(reply)))
    }

    /// Runs a query on an evaluating thread, in order with the evaluations and without a time limit. The query is refused
    /// unless the session is [idle](Self::check_idle) when the query's turn comes. No evaluation begins before `reply` has
    /// returned. The first argument of `reply` is the number of the newest evaluation that was submitted before the query.
    /// `is_internal` is true if no client requested the query.
    pub(crate) fn query_when_idle(
        &self,
        operation: &Operation,
        is_internal: bool,
        reply: impl FnOnce(u64, Result<Vec<Record>, InspectError>) + Send + 'static,
    ) -> JobId {
        let job = self.inner.query_job(operation);
        let id = JobId(job.id);
        // The number is read under the lock under which the query is queued: all evaluations up to this number have ended
        // when the query begins.
        let mut scheduler = self.inner.scheduler.lock();
        let newest = scheduler.evaluations.last();
        let reply = Box::new(move |records| reply(newest, records));
        let body = RequestBody::Inspect(Inspection::Query(RecordsBuilder::default(), reply));
        let mut request = Request::new(&self.connection, job, None, body);
        (request.needs_idle, request.is_internal) = (true, is_internal);
        scheduler.push(Lane::Evaluation, request);
        self.inner.unlock_and_notify(scheduler);
        id
    }

    /// Collects all garbage. Returns the name of the checkpoint from which the image was booted, and the counts of the
    /// session's definitions, as in `2 functions, 1 class`. Either string may be empty.
    pub(crate) fn collect_garbage_and_describe(&self) -> (String, String) {
        let operation = Operation::new("image-name").with("collect", 1_u64);
        let records = wait(|reply| _ = self.query(&operation, reply)).unwrap_or_default();
        let name = of_kind(&records).find_map(|image: &Image| image.name.clone()).unwrap_or_default();
        let counts = of_kind(&records).map(|DefinitionCount { count, kind }| {
            let plural = if *count == 1 { "" } else { "s" };
            format!("{count} {kind}{plural}")
        });
        let counts: Vec<_> = counts.collect();
        (name, counts.join(", ").replace("classs", "classes"))
    }

    /// Returns the number of the newest evaluation; 0 before the first evaluation.
    pub(crate) fn newest_evaluation_number(&self) -> u64 {
        self.inner.scheduler.lock().evaluations.last()
    }

    /// Returns true while an evaluation runs, in the background too, or is held.
    pub(crate) fn is_busy(&self) -> bool {
        self.inner.scheduler.lock().is_busy()
    }

    /// Checks that no evaluation of any connection runs, in the background too, or is held. The server's own queries do not
    /// count, and neither do evaluations that wait for the foreground.
    ///
    /// # Errors
    /// Returns [`InspectError::Held`] or [`InspectError::Running`].
    pub(crate) fn check_idle(&self) -> Result<(), InspectError> {
        self.inner.scheduler.lock().check_idle()
    }

    fn inspect(&self, job: Job, inspection: Inspection) -> JobId {
        self.enqueue(Lane::Inspection, job, Some(INSPECTION_TIMEOUT), RequestBody::Inspect(inspection))
    }

    /// Removes the functions, macros, variables, types, classes, methods and packages defined since the image was booted,
    /// and clears the error state. The limits stay. The reset waits for its turn in the queue of evaluations. Functions that
    /// the program defined by [`Lisp::define`](crate::Lisp::define) and code that the program loaded are removed, too: no
    /// call of the program may use them during the reset.
    pub fn reset(&self, reply: impl FnOnce(Result<(), InspectError>) + Send + 'static) {
        let job = self.inner.job(JobKind::Reset, "", "");
        let body = RequestBody::Inspect(Inspection::Reset(InspectionBuilder::default(), Box::new(reply)));
        self.enqueue(Lane::Evaluation, job, None, body);
    }

    /// Returns the limits of future evaluations.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.inner.limits.lock()
    }

    /// Sets the limits of future evaluations. The hold's time limit and the grace period of cleanup forms also apply to
    /// evaluations that already run.
    pub fn set_limits(&self, limits: Limits) {
        *self.inner.limits.lock() = limits;
        if let Some(observer) = self.inner.observer.get() {
            observer.limits_changed(&limits);
        }
    }
}

/// Returns the outcome of an evaluation that was not queued, with an error of this kind.
fn refusal(kind: &str, reason: &str) -> Arc<Outcome> {
    Arc::new(OutcomeBuilder::blank(0).finish_with_error(kind, reason.to_owned()))
}

/// The outcome so far of an evaluation. [`Session::complete`] adds the output that it lacks.
pub(crate) struct OutcomeSoFar {
    outcome: Outcome,
    /// The output of the evaluation; `None` if the outcome has it.
    printed: Option<Arc<Printed>>,
    /// The output that waited for the connection's next answer; `None` if the outcome has it.
    background: Option<Arc<Printed>>,
}

impl OutcomeSoFar {
    /// Returns true if there is output to add.
    pub(crate) fn lacks_output(&self) -> bool {
        self.printed.is_some() || self.background.is_some()
    }
}

/// Returns the output of a running evaluation; `None` if it does not run.
fn printed_by(scheduler: &mut SchedulerState, id: JobId) -> Option<Arc<Printed>> {
    Some(scheduler.find(id.0)?.activity.outcome_builder()?.printed().clone())
}

/// Returns the outcome so far of an evaluation. The outcome is empty while the evaluation does not run. Takes the output and
/// the notices that wait for the connection's next answer.
fn outcome_so_far(scheduler: &mut SchedulerState, connection: &Connection, id: JobId) -> OutcomeSoFar {
    let number = scheduler.evaluations.find_by_job(id.0).unwrap_or(0);
    let running = scheduler.find(id.0).and_then(|running| running.activity.outcome_builder());
    let mut printed = running.map(OutcomeBuilder::printed).filter(|printed| !printed.is_empty()).cloned();
    let mut outcome =
        running.map_or_else(|| OutcomeBuilder::blank(number).outcome_so_far(), OutcomeBuilder::outcome_so_far);
    let mut background = connection.state().take_pending(&mut outcome);
    // Short text is copied at once: later, the evaluation may be over and its outcome not yet recorded.
    if let Some(text) = printed.as_ref().and_then(|printed| printed.try_copy(MAX_COPIED_AT_ONCE)) {
        printed = None;
        (outcome.stdout, outcome.stderr, outcome.turns) = (text.stdout, text.stderr, text.turns);
    }
    if let Some(text) = background.as_ref().and_then(|background| background.try_take(MAX_COPIED_AT_ONCE)) {
        background = None;
        outcome.background = text.stdout;
    }
    OutcomeSoFar { outcome, printed, background }
}

/// A background job whose thread is about to wait for another job, and the function that ends the wait.
struct BackgroundWaiter {
    job: u64,
    interrupt: Box<dyn FnOnce() + Send>,
}

/// Calls `submit` with a reply, waits until the reply is called, and returns the reply's argument.
fn wait<T: Send + 'static>(submit: impl FnOnce(Reply<T>)) -> T {
    let (sender, receiver) = oneshot::channel();
    submit(Box::new(move |value| drop(sender.send(value))));
    receive(receiver)
}

/// Waits for the value that a reply sends, and returns the value.
fn receive<T>(receiver: oneshot::Receiver<T>) -> T {
    match crate::os::busy_poll::poll_briefly(20, || receiver.try_recv().ok()) {
        Some(value) => value,
        None => receiver.recv().expect("every job is answered"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::image::{Event, Host, Text};

    /// The number of characters that are printed at once.
    const PRINTED_AT_ONCE: usize = 1 << 20;

    /// Returns the outcome so far of an evaluation that prints `mebibytes` MiB, and ends before its output is copied.
    fn outcome_of_evaluation_that_ends_meanwhile(mebibytes: usize) -> Outcome {
        let inner = Arc::new(Inner::new(Limits { max_output: 64 << 20, ..Limits::default() }));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let evaluation = Evaluation { background: Background::Later, ..Evaluation::new("(print-much)") };
        let id = session.submit(evaluation, drop);
        inner.next_job(Lane::Evaluation, 1, None).expect("a job");
        let characters: Vec<_> =
            std::iter::repeat_with(|| AtomicU32::new(u32::from('x'))).take(PRINTED_AT_ONCE).collect();
        for _ in 0..mebibytes {
            inner.event(id.0, false, Event::Stdout(Text::new(&characters)));
        }
        let so_far = session.move_to_background(id).expect("it moves");
        inner.event(id.0, false, Event::Done { success: true });
        session.complete(so_far)
    }

    /// A garbage collection may have stopped a thread that prints.
    #[test]
    fn event_loop_does_not_wait_for_a_thread_that_prints() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let evaluation = Evaluation { background: Background::Later, ..Evaluation::new("(print-x)") };
        let id = session.submit(evaluation, drop);
        inner.next_job(Lane::Evaluation, 1, None).expect("a job");
        inner.event(id.0, false, Event::Stdout(Text::new(&[AtomicU32::new(u32::from('x'))])));
        let printed = printed_by(&mut inner.scheduler.lock(), id).expect("output");
        let lock = printed.lock();
        let (send, receive) = mpsc::channel();
        let calling = session.clone();
        std::thread::spawn(move || {
            let report = calling.output_part(id, 0, 10);
            let status = calling.evaluation(Some(1)).map(|status| status.printed);
            send.send((report, status.ok(), calling.move_to_background(id))).expect("the test waits");
        });
        let answers = receive.recv_timeout(Duration::from_secs(20));
        drop(lock);
        let (report, kept, so_far) = answers.expect("the thread waits for the lock");
        assert_eq!((report, kept), (None, Some(1)));
        assert_eq!(session.complete(so_far.expect("it moves")).stdout.text, "x");
        assert_eq!(session.output_part(id, 0, 10).as_deref(), Some("x"));
    }

    /// A garbage collection may have stopped the thread that holds the lock.
    #[test]
    fn progress_report_does_not_wait_for_the_schedulers_lock() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let id = session.submit(Evaluation::new("(print-x)"), drop);
        inner.next_job(Lane::Evaluation, 1, None).expect("a job");
        inner.event(id.0, false, Event::Stdout(Text::new(&[AtomicU32::new(u32::from('x'))])));
        let (send, receive) = mpsc::channel();
        let lock = inner.scheduler.lock();
        let reporting = session.clone();
        std::thread::spawn(move || send.send(reporting.output_part(id, 0, 10)));
        let report = receive.recv_timeout(Duration::from_secs(20));
        drop(lock);
        assert_eq!(report, Ok(None));
        assert_eq!(session.output_part(id, 0, 10).as_deref(), Some("x"));
    }

    #[test]
    fn output_so_far_is_complete_although_the_evaluation_ends_while_it_is_copied() {
        let outcome = outcome_of_evaluation_that_ends_meanwhile(7);
        assert_eq!(outcome.printed().len(), 7 * PRINTED_AT_ONCE);
        assert!(outcome.in_background && outcome.notices.is_empty(), "{:?}", outcome.notices);
    }

    /// The outcome of the evaluation is too large to be kept.
    #[test]
    fn outcome_so_far_says_that_output_is_missing() {
        let outcome = outcome_of_evaluation_that_ends_meanwhile(17);
        assert!(outcome.stdout.text.is_empty());
        assert_eq!(outcome.notices, [OUTPUT_INCOMPLETE]);
    }
}
