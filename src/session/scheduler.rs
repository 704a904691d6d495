//! The scheduler: jobs that wait and jobs that run. One lock guards both sets of jobs, so that a job is always found in
//! one of the two sets.
//!
//! Evaluating threads pull from one queue. One evaluation at a time is in the foreground
//! ([`SchedulerState::foreground`]), until it ends, is held, or continues in the background. The next evaluation begins
//! on the same thread, the *home*, if that thread is free, so that the evaluation finds the thread's own state (a mutex
//! that is held, a C library's state). Otherwise a new thread is started, which becomes the home. A request about a
//! held evaluation, such as a restart, runs in the foreground, too, but on the thread that holds the evaluation
//! ([`SchedulerState::next`] with `held`), whichever thread is the home. A thread that neither is the home nor holds an
//! evaluation ends when there is no work for it.
//!
//! A request that only reads a held evaluation's variables runs without waiting for the foreground. A held evaluation is
//! also released without waiting: the evaluation in the foreground may need a lock that the held evaluation owns.

mod waiting_requests;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::abandoned::AbandonedThreads;
use super::activity::{Activity, EvaluationActivity, HeldRequest, HoldEffect, Inspection, RequestBody};
use super::connection::Connection;
use super::evaluations::Evaluations;
use super::events::{JobEnd, OutcomeBuilder, UnbalancedText};
use super::limits::heap_limit;
use super::post_processing::FinishingEvaluation;
use super::{AnswerFn, HAND_OVER_TIME, Reply, bind_reply};
use crate::error::{HoldEnd, InspectError};
use crate::image::interruption::{Interruption, REACTION_TIME, StuckReason};
use crate::image::{InterruptReason, Job, JobKind, Lane};
use crate::os::thread_supply::{RETRY_DELAY, ThreadSupply};
use crate::outcome::{ErrorRecord, Outcome};
use waiting_requests::{Position, RequestClass, WaitingRequests};

/// The maximum number of evaluations in the background. Each such evaluation takes a thread with a control stack of its
/// own.
pub(crate) const MAX_BACKGROUND: usize = 16;

thread_local! {
    /// The lowest number for the jobs of the call that this thread handles; `None` while this thread handles no call.
    static FIRST_JOB_OF_CALL: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Calls `handle`. The requests that `handle` makes on this thread belong to the call whose jobs begin at `first_job`, even if
/// their jobs get numbers of a later call, which another thread handles at the same time.
pub(super) fn request_for_call(first_job: u64, handle: impl FnOnce()) {
    /// The value before the call, which the thread gets back even if `handle` panics.
    struct Previous(Option<u64>);
    impl Drop for Previous {
        fn drop(&mut self) {
            FIRST_JOB_OF_CALL.set(self.0);
        }
    }
    let _previous = Previous(FIRST_JOB_OF_CALL.replace(Some(first_job)));
    handle();
}

/// A job that waits, with the reply that gets its result.
pub(super) struct Request {
    /// The connection that sent the request.
    pub(super) connection: Arc<Connection>,
    pub(super) job: Job,
    pub(super) timeout: Option<Duration>,
    pub(super) body: RequestBody,
    /// True if the job begins in the background.
    pub(super) background: bool,
    /// The number of the question to the user that this request answers. The request is refused if the question is no
    /// longer open. `None` for a request that answers no question.
    pub(super) question: Option<u64>,
    /// The number of a job of the call that made the request. For a request that neither was made within
    /// [`request_for_call`] nor answers a question to the user, this is the job's own number.
    pub(super) job_of_call: u64,
    /// True if the request is refused unless the session is [idle](SchedulerState::check_idle) when its turn comes. Such a
    /// request releases no held evaluation.
    pub(super) needs_idle: bool,
    /// True for a job that the server runs although no client or program requested it.
    pub(super) is_internal: bool,
}

impl Request {
    /// Creates a request for the foreground, or for a lane other than the evaluation lane.
    pub(super) fn new(
        connection: &Arc<Connection>,
        mut job: Job,
        timeout: Option<Duration>,
        body: RequestBody,
    ) -> Self {
        (job.connection, job.audience) = (connection.id, connection.audience());
        Self {
            connection: connection.clone(),
            timeout,
            body,
            background: false,
            question: None,
            job_of_call: FIRST_JOB_OF_CALL.get().unwrap_or(job.id),
            job,
            needs_idle: false,
            is_internal: false,
        }
    }

    /// Creates the request to start a thread that serves `lane`.
    fn start_thread(connection: &Arc<Connection>, lane: Lane) -> Self {
        Self::new(connection, Job::without_texts(0, JobKind::StartThread(lane), 0), None, RequestBody::Control)
    }

    /// Moves the job out and leaves an empty job with the same number.
    fn take_job(&mut self) -> Job {
        let Job { id, evaluation, .. } = self.job;
        std::mem::replace(&mut self.job, Job::without_texts(id, JobKind::Reset, evaluation))
    }
}

/// The placement of a job: in the foreground, in the background, or in neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// In the foreground until its end.
    Foreground,
    /// In the foreground, until the job ends or a client moves it to the background.
    Detachable,
    Background,
    /// Neither in the foreground nor in the background, on the thread that holds an evaluation: the job reads the
    /// evaluation's variables, or releases the evaluation while another job is in the foreground.
    Beside,
}

/// A held evaluation. While a job works on the evaluation, the job owns this value; otherwise it is in
/// [`SchedulerState::holds`].
pub(super) struct Hold {
    pub(super) connection: Arc<Connection>,
    /// The number of the holding thread's last job, by which the thread identifies its hold.
    pub(super) job: u64,
    /// The time when the evaluation is released; `None` for no limit.
    pub(super) until: Option<Instant>,
    /// The builder with the evaluation's code and limits, from which a resumption makes its own builder.
    pub(super) builder: OutcomeBuilder,
    /// True if the package is bound for this evaluation alone.
    pub(super) binds_package: bool,
    /// The question that the user is being asked about this hold. Until the question is answered, the connection's
    /// requests wait, except resets and requests about the hold.
    pub(super) question: Option<OpenQuestion>,
    /// The thread that holds the evaluation.
    thread: u64,
}

/// A question to the user about a held evaluation.
pub(super) struct OpenQuestion {
    pub(super) number: u64,
    /// The lowest number for the jobs of the call that asks. The job of the user's choice has a higher number than the jobs
    /// of the calls that wait for the choice.
    pub(super) first_job: u64,
    /// The function to call if the hold ends before the user has answered; `None` once the user has answered.
    pub(super) on_withdrawal: Option<Reply<HoldEnd>>,
}

/// A job that Lisp has begun.
pub(super) struct RunningJob {
    pub(super) id: u64,
    /// The number of a job of the call that requested the job.
    job_of_call: u64,
    /// The connection that sent the request.
    pub(super) connection: Arc<Connection>,
    pub(super) lane: Lane,
    /// The number of the job's thread; 0 for a thread that serves a lane other than the evaluation lane.
    pub(super) thread: u64,
    pub(super) placement: Placement,
    /// The number of the evaluation that the job belongs to; 0 for none.
    pub(super) evaluation: u64,
    /// True for a job that the server runs although no client or program requested it.
    is_internal: bool,
    pub(super) activity: Activity,
    /// The time at which the job's time limit ends; `None` for no limit.
    pub(super) deadline: Option<Instant>,
    /// The time at which the job began; `None` if the job ends before it begins.
    pub(super) begun: Option<Instant>,
    /// For a job that inspects, the time from which another thread is requested for the inspection lane while an inspection of
    /// another connection waits; `None` once the thread is requested.
    hand_over_at: Option<Instant>,
    /// The part of the heap that the job may keep, in bytes; `None` for no limit.
    pub(super) heap_limit: Option<usize>,
    /// True from the time when the job is interrupted for exceeding `heap_limit` until a check finds room again.
    pub(super) filled_heap: bool,
    pub(super) interruption: Interruption<InterruptReason>,
    /// The time of the last check of this job's limits.
    pub(super) checked_at: Option<Instant>,
    /// The time of the last check that found the interrupted job delayed: a garbage collection was in progress, or the
    /// process had been stopped.
    pub(super) delayed_at: Option<Instant>,
    /// Queries for the error state that wait for the end of this job, which was cancelled.
    pub(super) error_queries: Vec<ErrorQuery>,
    /// The flag that cancels the search for hints: `Some` while unbalanced texts are being searched, after
    /// Lisp has done its part.
    pub(super) hint_search_cancelled: Option<Arc<AtomicBool>>,
    /// The last wait of the job's thread in `Session::evaluate`; the wait may be over already.
    pub(super) awaited: Option<JobWait>,
}

/// A thread's wait for another job.
pub(super) struct JobWait {
    pub(super) job: u64,
    /// The function that ends the wait when the waiting job is interrupted or removed from the running jobs.
    pub(super) interrupt: Box<dyn FnOnce() + Send>,
}

/// A query for the error state that waits until the state includes the end of a cancelled evaluation.
pub(super) struct ErrorQuery {
    /// The time when the query is answered even if the evaluation has not ended.
    pub(super) until: Instant,
    /// The function that answers the query. The argument is the number of the evaluation, or `None` if the evaluation
    /// has ended.
    pub(super) answer: Box<dyn FnOnce(Option<u64>) + Send>,
}

impl Hold {
    /// Returns true while the user is being asked this question about the hold.
    fn is_asked(&self, question: u64) -> bool {
        self.question.as_ref().is_some_and(|asked| asked.number == question)
    }
}

impl ErrorQuery {
    fn into_answer(self, unended: Option<u64>) -> AnswerFn {
        Box::new(move || (self.answer)(unended))
    }
}

impl RunningJob {
    /// Makes a running job from a request. `hold` is the held evaluation that the request is about. Returns `None` for a
    /// job of the control lane, which has no result.
    pub(super) fn new(
        request: Request,
        lane: Lane,
        hold: Option<Box<Hold>>,
        deadline: Option<Instant>,
    ) -> Option<Self> {
        let audience = request.connection.audience();
        Some(Self {
            id: request.job.id,
            job_of_call: request.job_of_call,
            connection: request.connection,
            lane,
            thread: 0,
            placement: match request.body {
                RequestBody::Held(HeldRequest::Locals(..)) => Placement::Beside,
                _ if request.background => Placement::Background,
                _ => Placement::Foreground,
            },
            evaluation: request.job.evaluation,
            is_internal: request.is_internal,
            activity: request.body.begin(hold, audience)?,
            deadline,
            begun: None,
            hand_over_at: None,
            heap_limit: None,
            filled_heap: false,
            interruption: Interruption::default(),
            checked_at: None,
            delayed_at: None,
            error_queries: Vec::new(),
            hint_search_cancelled: None,
            awaited: None,
        })
    }

    /// Makes a running job from a request that ends before its job begins. Returns `None` for a job of the control lane,
    /// which has no result.
    pub(super) fn unstarted(request: Request, lane: Lane) -> Option<Self> {
        Self::new(request, lane, None, None)
    }

    /// Returns the unbalanced texts that must be searched for hints before the job is over, and the flag that cancels
    /// the search; `None` if there are no such texts. The time limit and the heap limit no longer apply to the job:
    /// only a cancellation interrupts the search.
    pub(super) fn begin_hint_search(&mut self) -> Option<(Vec<UnbalancedText>, Arc<AtomicBool>)> {
        let mut texts = Vec::new();
        self.activity.builders().for_each(|builder| builder.collect_unbalanced_texts(&mut texts));
        if texts.is_empty() {
            return None;
        }
        (self.deadline, self.heap_limit) = (None, None);
        let end = self.hint_search_cancelled.insert(Arc::new(AtomicBool::new(self.interrupt_reason().is_some())));
        Some((texts, end.clone()))
    }

    /// Records the end of the search for hints, and adds the hints to the errors.
    pub(super) fn finish_hint_search(&mut self, hints: &[(UnbalancedText, String)]) {
        self.hint_search_cancelled = None;
        self.activity.builders().for_each(|builder| builder.add_hints(hints));
    }

    /// Returns the way in which the job ends when Lisp is done with it. `success` is Lisp's report.
    pub(super) fn end(&self, success: bool) -> JobEnd {
        match self.interrupt_reason() {
            _ if success => JobEnd::Succeeded,
            Some(reason) => JobEnd::Interrupted(reason),
            None => JobEnd::Failed,
        }
    }

    /// Takes the answer to a query on an evaluating thread. Returns `None` for any other job.
    pub(super) fn take_query_answer(&mut self, success: bool) -> Option<AnswerFn> {
        let end = self.end(success);
        let evaluates = self.evaluates();
        match &mut self.activity {
            Activity::Inspect(Inspection::Query(builder, reply)) if evaluates => {
                let reply = std::mem::replace(reply, Box::new(drop));
                Some(bind_reply(reply, std::mem::take(builder).finish(end)))
            }
            _ => None,
        }
    }

    /// Cancels the search for hints, if there is one.
    pub(super) fn cancel_hint_search(&self) {
        if let Some(end) = &self.hint_search_cancelled {
            end.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the queries that waited for the end of this job, as answers to send.
    pub(super) fn take_error_queries(&mut self) -> Vec<AnswerFn> {
        std::mem::take(&mut self.error_queries).into_iter().map(|query| query.into_answer(None)).collect()
    }

    /// Takes the queries whose wait is over although this job has not ended, as answers to send.
    pub(super) fn take_overdue_error_queries(&mut self, now: Instant) -> Vec<AnswerFn> {
        let unended = Some(self.evaluation);
        self.error_queries
            .extract_if(.., |query| query.until <= now)
            .map(|overdue| overdue.into_answer(unended))
            .collect()
    }

    /// Returns true if a client or a program requested the job.
    pub(super) fn is_requested(&self) -> bool {
        !self.is_internal && self.activity.is_requested()
    }

    /// Returns the number of a job of the call that requested this job; `None` for the server's own job, whose number
    /// exceeds the numbers of requests that wait.
    pub(super) fn requested_by(&self) -> Option<u64> {
        self.is_requested().then_some(self.job_of_call)
    }

    /// Returns the number by which the observer knows this inspection.
    pub(super) fn observed_number(&self) -> u64 {
        self.requested_by().unwrap_or(self.id)
    }

    /// Returns true for a job on an evaluating thread.
    pub(super) fn evaluates(&self) -> bool {
        self.lane == Lane::Evaluation
    }

    pub(super) fn is_foreground(&self) -> bool {
        self.evaluates() && matches!(self.placement, Placement::Foreground | Placement::Detachable)
    }

    pub(super) fn is_background(&self) -> bool {
        self.placement == Placement::Background
    }

    /// Returns true for a query, which evaluates no code of a client, even on an evaluating thread.
    pub(super) fn is_query(&self) -> bool {
        matches!(self.activity, Activity::Inspect(Inspection::Query(..)))
    }

    /// Takes the hold that remains when this job is over, and makes it end at the time `until`. The evaluation may have
    /// been held before, or may have failed in this job. Returns `None` if no evaluation stays held.
    pub(super) fn take_hold(&mut self, until: Option<Instant>) -> Option<Hold> {
        let hold = match &mut self.activity {
            Activity::Evaluate(EvaluationActivity { builder, binds_package, held: true, .. }) => {
                // No thread may print more before the outcome gets the output: the resumption keeps what is left now.
                builder.renew_printed();
                Hold {
                    connection: self.connection.clone(),
                    job: self.id,
                    until,
                    builder: builder.resumption_builder(),
                    binds_package: *binds_package,
                    question: None,
                    thread: self.thread,
                }
            }
            Activity::Held(about) if about.effect != HoldEffect::Ended => *about.hold.take()?,
            Activity::Evaluate(_) | Activity::Held(_) | Activity::Inspect(_) => return None,
        };
        Some(Hold { job: self.id, until, ..hold })
    }

    /// Ends the wait of the job's thread for another job, so that the thread can take an interruption.
    pub(super) fn end_wait(&mut self) {
        if let Some(awaited) = self.awaited.take() {
            (awaited.interrupt)();
        }
    }

    /// Returns the reason why the job was interrupted; `None` for a job that was not interrupted.
    pub(super) fn interrupt_reason(&self) -> Option<InterruptReason> {
        self.interruption.reason()
    }

    /// Returns the reason why the job, which was interrupted, has not ended.
    pub(super) fn stuck_reason(&self) -> StuckReason {
        if self.interruption.is_unwinding() { StuckReason::Unwinding } else { StuckReason::Unresponsive }
    }
}

/// The instruction to a thread that asks for a job.
pub(super) enum Instruction {
    /// Run this job, which already counts as running.
    Run(Job),
    /// Answer this request with an error, since it is about a held evaluation and none is held, or needs an idle session;
    /// then ask again.
    Refuse(Box<Request>),
    /// Release this hold, which belongs to the thread, for this reason.
    Release(Box<Hold>, HoldEnd),
    /// Wait until another thread notifies the lane, or until this time if it is given; then ask again.
    Wait(Option<Instant>),
    /// End the thread.
    End,
}

/// The next step for the first request that waits for the foreground.
enum Turn {
    /// Do nothing yet.
    Wait,
    /// Refuse the request: it is about a held evaluation and none is held, or it needs an idle session.
    Refuse,
    /// Leave the request to a thread that holds an evaluation: the thread serves the request, or first releases its
    /// hold. The number is the index of the hold.
    Held(usize),
    /// Begin the request on a thread that holds nothing.
    Begin,
    /// Begin the request at this time on a thread that holds nothing.
    BeginAt(Instant),
}

/// The work of a thread that holds an evaluation, if the work does not wait for the foreground.
enum WorkBeside {
    /// Serve the waiting request at this position: it reads the evaluation's variables, or aborts the evaluation.
    Serve(Position),
    /// Release the evaluation, because the next request of its connection begins an evaluation.
    Release,
}

/// The evaluating threads, by their numbers.
#[derive(Debug)]
struct Threads {
    all: Vec<u64>,
    /// The thread on which the next foreground evaluation begins, if the thread is free.
    home: Option<u64>,
    supply: ThreadSupply,
}

impl Default for Threads {
    /// Lisp starts the first thread itself. No other thread is started before the first thread asks for work, because the
    /// thread that asks first becomes the home, and must be Lisp's main thread.
    fn default() -> Self {
        Self { all: Vec::new(), home: None, supply: ThreadSupply::with_first_starting() }
    }
}

impl Threads {
    /// Records a thread that asks for work. Returns true if the thread is new.
    fn register(&mut self, thread: u64) -> bool {
        let is_new = !self.all.contains(&thread);
        if is_new {
            self.all.push(thread);
        }
        is_new
    }

    /// Clears the home thread if it is this thread.
    fn clear_home(&mut self, thread: u64) {
        self.home.take_if(|home| *home == thread);
    }
}

/// The scheduler state: the jobs that wait and the jobs that run.
#[derive(Default)]
pub(super) struct SchedulerState {
    waiting: [WaitingRequests; Lane::COUNT],
    /// Background requests whose turn has come, and that wait for a thread.
    ready: WaitingRequests,
    /// The lowest number of the connections whose turn to inspect comes next.
    next_inspector: u64,
    pub(super) running: Vec<RunningJob>,
    threads: Threads,
    /// The lanes whose threads must be woken.
    changed: [bool; Lane::COUNT],
    pub(super) evaluations: Evaluations,
    /// The withdrawals of questions to the user whose holds have ended. [`Inner::unlock_and_notify`] runs the
    /// withdrawals.
    ///
    /// [`Inner::unlock_and_notify`]: super::Inner::unlock_and_notify
    pub(super) withdrawals: Vec<AnswerFn>,
    /// The evaluations whose Lisp part is done and whose post-processing runs.
    pub(super) finishing: Vec<FinishingEvaluation>,
    /// The held evaluations that no job works on; at most one per connection.
    pub(super) holds: Vec<Hold>,
    /// The interruptions that are queued but not sent: for each, the control job that sends it and the job to interrupt.
    queued_interruptions: Vec<(u64, u64)>,
    /// The jobs that were answered because their image will be replaced, and that still unwind.
    pub(super) unwinding: Vec<u64>,
    /// The abandoned threads, which no longer serve a lane.
    pub(super) abandoned: AbandonedThreads,
    /// The time until which a reset waits for the evaluations in the background.
    reset_at: Option<Instant>,
}

/// Returns true if an inspection of this connection is among the running jobs.
fn is_served(running: &[RunningJob], connection: u64) -> bool {
    running.iter().any(|job| job.lane == Lane::Inspection && job.connection.id == connection)
}

impl SchedulerState {
    /// Adds a request at the end of its lane's queue.
    pub(super) fn push(&mut self, lane: Lane, request: Request) {
        self.waiting[lane as usize].push(request);
        // `reschedule` wakes the evaluating threads if there is work for them. While the foreground is busy, there usually
        // is none, and the threads of all held evaluations would wake in vain.
        self.changed[lane as usize] |= lane != Lane::Evaluation;
    }

    /// Returns true if a request waits for this lane.
    pub(super) fn has_waiting(&self, lane: Lane) -> bool {
        !self.waiting[lane as usize].is_empty()
    }

    /// Checks that no evaluation runs, in the background too, or is held. Queries on an evaluating thread do not count, and
    /// neither do evaluations that wait for the foreground.
    ///
    /// # Errors
    /// Returns [`InspectError::Held`] or [`InspectError::Running`].
    pub(super) fn check_idle(&self) -> Result<(), InspectError> {
        let evaluates = |running: &RunningJob| running.evaluates() && !running.is_query();
        if self.kept_holds().next().is_some() {
            Err(InspectError::Held)
        } else if self.background_count() > 0 || !self.finishing.is_empty() || self.running.iter().any(evaluates) {
            Err(InspectError::Running)
        } else {
            Ok(())
        }
    }

    /// Returns true while an evaluation runs, in the background too, or is held.
    pub(super) fn is_busy(&self) -> bool {
        !self.holds.is_empty()
            || self.background_count() > 0
            || !self.finishing.is_empty()
            || self.running.iter().any(RunningJob::evaluates)
    }

    /// Returns, for each lane, whether its threads must be woken, and clears these flags.
    pub(super) fn take_changed_lanes(&mut self) -> [bool; Lane::COUNT] {
        std::mem::take(&mut self.changed)
    }

    /// Returns the next instruction for `thread`, which serves `lane`. `held` is the number of the thread's last job if
    /// the thread holds an evaluation.
    pub(super) fn next(&mut self, lane: Lane, thread: u64, held: Option<u64>, now: Instant) -> Instruction {
        match lane {
            Lane::Evaluation => {
                let was_changed = self.changed[lane as usize];
                let is_new = self.threads.register(thread);
                self.reschedule(now);
                let next = match held {
                    None => self.next_evaluation(thread, now),
                    Some(job) => self.next_held(job, now),
                };
                if is_new {
                    self.threads.supply.record_started();
                    self.reschedule(now);
                }
                if let Instruction::Wait(_) = next {
                    // If there is work for another thread, that thread was woken when the work appeared. Woken again by
                    // this thread, it might wake this thread in turn, and so on until the work begins.
                    self.changed[lane as usize] = was_changed;
                }
                next
            }
            Lane::Signals => Instruction::End,
            Lane::Inspection | Lane::Control => {
                let request = match lane {
                    Lane::Inspection => self.take_next_inspection(),
                    _ => self.waiting[lane as usize].take_first(),
                };
                match request {
                    Some(request) => Instruction::Run(self.begin(lane, 0, request, None, now)),
                    None => Instruction::Wait(None),
                }
            }
        }
    }

    /// Takes the next inspection. The connections take turns, so that a connection's slow inspections do not all come before
    /// an inspection of another connection. The inspections of a connection run one after another.
    fn take_next_inspection(&mut self) -> Option<Request> {
        let is_free = |connection| !is_served(&self.running, connection);
        let mut request = self.waiting[Lane::Inspection as usize].take_in_turn(self.next_inspector, is_free)?;
        self.next_inspector = request.connection.id.wrapping_add(1);
        // Lisp has forgotten the variables of a connection that has ended, and would create them again.
        if request.connection.has_ended() {
            request.job.connection = 0;
        }
        Some(request)
    }

    /// Requests another thread for the inspection lane if an inspection has run for [`HAND_OVER_TIME`] while an inspection
    /// of another connection waits. The thread of the running inspection ends with the inspection. If no thread can be started,
    /// the thread is requested again after [`RETRY_DELAY`].
    pub(super) fn hand_over_inspection_lane(&mut self, now: Instant) {
        let is_free = |connection| !is_served(&self.running, connection);
        if !self.waiting[Lane::Inspection as usize].has_connection(is_free) {
            return;
        }
        let serving = self.running.iter_mut().find(|running| running.hand_over_at.is_some_and(|time| time <= now));
        if let Some(serving) = serving {
            serving.hand_over_at = None;
            let start = Request::start_thread(&serving.connection, Lane::Inspection);
            self.push(Lane::Control, start);
        }
    }

    /// Records that no thread could be started for the inspection lane. The thread of the inspection that began last still
    /// serves the lane.
    pub(super) fn record_inspection_thread_refusal(&mut self, now: Instant) {
        let inspections = self.running.iter_mut().filter(|running| running.lane == Lane::Inspection);
        if let Some(serving) = inspections.max_by_key(|running| running.begun) {
            serving.hand_over_at.get_or_insert(now + RETRY_DELAY);
        }
    }

    /// Returns the running inspections.
    fn inspections(&self) -> impl Iterator<Item = &RunningJob> {
        self.running.iter().filter(|running| running.lane == Lane::Inspection)
    }

    /// Returns the number by which the observer knows the running inspection that began last, and the last deadline of all
    /// running inspections.
    pub(super) fn observed_inspections(&self) -> Option<(u64, Option<Instant>)> {
        let newest = self.inspections().max_by_key(|running| running.begun)?;
        let deadline =
            self.inspections().filter_map(|running| running.deadline.or(running.interruption.deadline())).max();
        Some((newest.observed_number(), deadline))
    }

    /// Moves background requests whose turn has come to the `ready` queue, marks the evaluation lane as changed if
    /// there is work for it, and requests new threads where no thread is free. Must be called whenever the state has
    /// changed.
    pub(super) fn reschedule(&mut self, now: Instant) {
        let mut turn = self.turn(now);
        while let Turn::Begin = turn
            && self.background_count() < MAX_BACKGROUND
            && self.next_request().is_some_and(|first| first.background)
        {
            let request = self.take_next_request();
            self.ready.push(request);
            turn = self.turn(now);
        }
        self.changed[Lane::Evaluation as usize] |= !matches!(turn, Turn::Wait)
            || !self.ready.is_empty()
            || self.holds.iter().any(|hold| self.find_work_beside(hold).is_some());
        let needs_home = !matches!(turn, Turn::Wait | Turn::Held(_)) && !self.is_home_free();
        let needed = self.ready.len() + usize::from(needs_home);
        while let Some(first) = self.waiting[Lane::Evaluation as usize].first().or_else(|| self.ready.first())
            && self.threads.supply.claim_start(needed, now)
        {
            let start = Request::start_thread(&first.connection, Lane::Evaluation);
            self.push(Lane::Control, start);
        }
    }

    /// Returns the next step for the first request that waits for the foreground.
    fn turn(&mut self, now: Instant) -> Turn {
        if self.foreground().is_some() {
            return Turn::Wait;
        }
        let Some(first) = self.next_request() else { return Turn::Wait };
        let (kind, background) = (first.job.kind, first.background);
        if first.needs_idle && self.check_idle().is_err() {
            return Turn::Refuse;
        }
        if let Some(hold) = self.hold_index_for(first) {
            return Turn::Held(hold);
        }
        if kind != JobKind::Reset {
            self.reset_at = None;
        }
        if kind.is_for_held_evaluation() {
            return Turn::Refuse;
        }
        if background && self.background_count() >= MAX_BACKGROUND {
            return Turn::Wait;
        }
        if kind == JobKind::Reset && self.works_beside(None) {
            return Turn::Wait;
        }
        if kind == JobKind::Reset && self.background_count() > 0 {
            // Background evaluations that are being cancelled must not continue in the reset image, so the reset waits
            // for their end.
            let unwinding = self.running.iter().filter(|running| running.is_background());
            let deadline = unwinding.filter_map(|running| running.interruption.deadline()).max();
            let until = *self.reset_at.get_or_insert(now + REACTION_TIME);
            let until = deadline.map_or(until, |deadline| deadline.max(until));
            if now < until {
                return Turn::BeginAt(until);
            }
        }
        Turn::Begin
    }

    /// Returns true if there is a home thread, and the thread neither holds an evaluation nor runs a job.
    fn is_home_free(&self) -> bool {
        self.threads.home.is_some_and(|home| {
            self.holds.iter().all(|hold| hold.thread != home)
                && self.running.iter().all(|running| running.thread != home)
        })
    }

    /// Returns true while the variables of an evaluation that this connection holds are being read, or the evaluation is
    /// being released beside the foreground. `None` stands for any connection.
    fn works_beside(&self, connection: Option<u64>) -> bool {
        self.running.iter().any(|running| {
            running.placement == Placement::Beside && connection.is_none_or(|id| running.connection.id == id)
        })
    }

    /// Returns the work for the thread of a hold that does not wait for the foreground, if there is such work now.
    fn find_work_beside(&self, hold: &Hold) -> Option<WorkBeside> {
        let waiting = &self.waiting[Lane::Evaluation as usize];
        let connection = hold.connection.id;
        let first = waiting.find_first_of(connection, self.served_classes(connection))?;
        let request = waiting.get(first);
        match request.job.kind {
            JobKind::FrameLocals { .. } | JobKind::Release => {
                let is_open = request.question.is_none_or(|question| hold.is_asked(question));
                is_open.then_some(WorkBeside::Serve(first))
            }
            kind if kind == JobKind::Reset || kind.is_for_held_evaluation() || request.needs_idle => None,
            _ => Some(WorkBeside::Release),
        }
    }

    /// Returns the next instruction for a thread that holds an evaluation. `job` is the number of the thread's last
    /// job.
    fn next_held(&mut self, job: u64, now: Instant) -> Instruction {
        let Some(own) = self.holds.iter().position(|hold| hold.job == job) else { return Instruction::Wait(None) };
        match self.find_work_beside(&self.holds[own]) {
            Some(WorkBeside::Serve(position)) => {
                let request = self.waiting[Lane::Evaluation as usize].take(position);
                let hold = Box::new(self.holds.swap_remove(own));
                return Instruction::Run(self.begin(Lane::Evaluation, hold.thread, request, Some(hold), now));
            }
            Some(WorkBeside::Release) => {
                return Instruction::Release(Box::new(self.holds.swap_remove(own)), HoldEnd::Released);
            }
            None => {}
        }
        let until = self.holds[own].until;
        match self.turn(now) {
            Turn::Refuse => Instruction::Refuse(Box::new(self.take_next_request())),
            Turn::Held(target) if target == own => {
                if !self.next_request().is_some_and(|first| first.job.kind.is_for_held_evaluation()) {
                    return Instruction::Release(Box::new(self.holds.swap_remove(own)), HoldEnd::Released);
                }
                let mut request = self.take_next_request();
                let hold = Box::new(self.holds.swap_remove(own));
                if let RequestBody::Held(HeldRequest::Resume(builder, _)) = &mut request.body {
                    // A resumed evaluation keeps its own limits, and its errors refer to its own code.
                    request.timeout = hold.builder.timeout();
                    **builder = hold.builder.resumption_builder();
                    request.job.evaluation = builder.evaluation();
                }
                Instruction::Run(self.begin(Lane::Evaluation, hold.thread, request, Some(hold), now))
            }
            _ if until.is_some_and(|until| until <= now) => {
                Instruction::Release(Box::new(self.holds.swap_remove(own)), HoldEnd::TimedOut)
            }
            _ => Instruction::Wait(until),
        }
    }

    /// Returns the index of the hold whose thread must serve the request, or must release the hold before the request
    /// begins. Returns `None` if a thread that holds nothing must serve the request, or if the request answers a question
    /// that is no longer open. A reset waits until all holds are released.
    fn hold_index_for(&self, request: &Request) -> Option<usize> {
        match request.job.kind {
            JobKind::Reset if self.holds.is_empty() => None,
            JobKind::Reset => Some(0),
            _ => self.holds.iter().position(|hold| {
                hold.connection.id == request.connection.id
                    && request.question.is_none_or(|question| hold.is_asked(question))
            }),
        }
    }

    /// Returns the next instruction for a thread that holds nothing.
    fn next_evaluation(&mut self, thread: u64, now: Instant) -> Instruction {
        let is_home = self.threads.home == Some(thread);
        let until = if is_home || !self.is_home_free() {
            match self.turn(now) {
                Turn::Refuse => return Instruction::Refuse(Box::new(self.take_next_request())),
                Turn::Begin => {
                    self.threads.home = Some(thread);
                    self.reset_at = None;
                    let request = self.take_next_request();
                    return Instruction::Run(self.begin(Lane::Evaluation, thread, request, None, now));
                }
                Turn::BeginAt(time) => Some(time),
                Turn::Wait | Turn::Held(_) => None,
            }
        } else {
            None
        };
        if *self.threads.home.get_or_insert(thread) == thread {
            return Instruction::Wait(until);
        }
        match self.ready.take_first() {
            Some(request) => Instruction::Run(self.begin(Lane::Evaluation, thread, request, None, now)),
            None => Instruction::End,
        }
    }

    /// Removes an evaluating thread that has ended.
    pub(super) fn thread_ended(&mut self, thread: u64) {
        self.threads.all.retain(|other| *other != thread);
        self.threads.clear_home(thread);
    }

    /// Records that a thread could not be started, for this reason. If no thread is left for the last ready background
    /// request, removes and returns this request, so that it can fail. Otherwise returns the time of the next attempt,
    /// as an error: the foreground request waits until then, or until the home thread is free.
    pub(super) fn record_thread_refusal(&mut self, reason: &str, now: Instant) -> Result<Request, Instant> {
        if self.ready.len() >= self.threads.supply.starting()
            && let Some(request) = self.ready.take_last()
        {
            self.threads.supply.record_started();
            return Ok(request);
        }
        if self.threads.home.is_none() {
            self.abandoned.record_refusal(reason);
        }
        Err(self.threads.supply.record_failure(now))
    }

    /// Returns the time of the next attempt to start a thread after one could not be started; `None` unless this time is
    /// still to come.
    pub(super) fn next_thread_attempt(&self, now: Instant) -> Option<Instant> {
        self.threads.supply.next_attempt(now)
    }

    /// Returns the classes of the connection's requests on the evaluation lane that may be served now.
    fn served_classes(&self, connection: u64) -> &'static [RequestClass] {
        if self.works_beside(Some(connection)) {
            &[RequestClass::Reset]
        } else if self.hold_of(connection).is_some_and(|hold| hold.question.is_some()) {
            &[RequestClass::Reset, RequestClass::Held]
        } else {
            &RequestClass::ALL
        }
    }

    /// Returns the position of the first waiting request on the evaluation lane that may be served now.
    fn find_next_request(&self) -> Option<Position> {
        self.waiting[Lane::Evaluation as usize].find_first(|connection| self.served_classes(connection))
    }

    /// Returns the first waiting request on the evaluation lane that may be served now.
    fn next_request(&self) -> Option<&Request> {
        Some(self.waiting[Lane::Evaluation as usize].get(self.find_next_request()?))
    }

    fn take_next_request(&mut self) -> Request {
        let first = self.find_next_request().expect("the caller found a first evaluation");
        self.waiting[Lane::Evaluation as usize].take(first)
    }

    /// Returns the hold of a connection, if no job works on it.
    pub(super) fn hold_of(&self, connection: u64) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.connection.id == connection)
    }

    /// Returns true if an evaluation that the connection submits now will release the connection's hold.
    pub(super) fn releases_held(&self, connection: u64) -> bool {
        self.hold_of(connection).is_some_and(|hold| hold.question.is_none())
            && self.waiting[Lane::Evaluation as usize].find_first_of(connection, &RequestClass::ALL).is_none()
    }

    /// Returns all holds, including those that a job works on.
    fn all_holds(&mut self) -> impl Iterator<Item = &mut Hold> {
        let busy = self.running.iter_mut().filter_map(|running| running.activity.hold_mut());
        self.holds.iter_mut().chain(busy)
    }

    /// Returns the hold of a connection whose evaluation failed with `error`, even if a job works on the hold.
    pub(super) fn hold_of_error(&mut self, connection: u64, error: &ErrorRecord) -> Option<&mut Hold> {
        let held = self.evaluations.outcome(error.evaluation);
        let is_same = |held: &Outcome| held.result.as_ref().is_err_and(|last| last.id == error.id);
        // An outcome that was too large to keep cannot be compared.
        held.is_none_or(|held| is_same(&held)).then_some(())?;
        self.all_holds().find(|hold| hold.connection.id == connection && hold.builder.evaluation() == error.evaluation)
    }

    /// Returns the hold about which the user is being asked this question.
    pub(super) fn hold_of_question(&mut self, question: u64) -> Option<&mut Hold> {
        self.all_holds().find(|hold| hold.is_asked(question))
    }

    /// Takes the question about the connection's hold.
    pub(super) fn take_question_of(&mut self, connection: u64) -> Option<OpenQuestion> {
        self.all_holds().find(|hold| hold.connection.id == connection)?.question.take()
    }

    /// Transfers a held evaluation to another connection, which holds it until `until`. Returns the former connection.
    /// Returns `None` if the evaluation is not held, or a job works on it, or the user is being asked about it.
    pub(super) fn transfer_hold(
        &mut self,
        evaluation: u64,
        to: &Arc<Connection>,
        until: Option<Instant>,
    ) -> Option<Arc<Connection>> {
        let hold = self.holds.iter_mut().find(|hold| hold.builder.evaluation() == evaluation)?;
        if hold.question.is_some() {
            return None;
        }
        hold.until = until;
        let before = std::mem::replace(&mut hold.connection, to.clone());
        self.evaluations.set_connection(evaluation, to);
        self.changed[Lane::Evaluation as usize] = true;
        Some(before)
    }

    /// Returns all holds except those that are being resumed or released.
    fn kept_holds(&self) -> impl Iterator<Item = &Hold> {
        let in_use = self.running.iter().filter_map(|running| match &running.activity {
            Activity::Held(about) if about.request.keeps_hold() => about.hold.as_deref(),
            _ => None,
        });
        self.holds.iter().chain(in_use)
    }

    /// Returns true while this evaluation is held, even while code runs in one of its frames.
    pub(super) fn is_held(&self, evaluation: u64) -> bool {
        self.kept_holds().any(|hold| hold.builder.evaluation() == evaluation)
    }

    /// Returns the evaluation that a connection holds, even while code runs in one of its frames.
    pub(super) fn held_by(&self, connection: u64) -> Option<u64> {
        let hold = self.kept_holds().find(|hold| hold.connection.id == connection);
        hold.map(|hold| hold.builder.evaluation())
    }

    /// Returns true if the connection holds no evaluation, and none of its jobs can end in a hold: no evaluation of
    /// the connection, and no request about a held evaluation, waits for its turn or runs outside the background.
    /// Queries and resets do not count.
    pub(super) fn cannot_hold(&self, connection: u64) -> bool {
        let may_hold = |running: &RunningJob| {
            running.evaluates() && !running.is_background() && !matches!(running.activity, Activity::Inspect(_))
        };
        let counted = [RequestClass::Held, RequestClass::Evaluation];
        self.holds.iter().all(|hold| hold.connection.id != connection)
            && !self.running.iter().any(|running| running.connection.id == connection && may_hold(running))
            && self.waiting[Lane::Evaluation as usize].find_first_of(connection, &counted).is_none()
    }

    /// Begins a request on this thread; `hold` is the held evaluation that the request is about. Returns the job for
    /// Lisp.
    pub(super) fn begin(
        &mut self,
        lane: Lane,
        thread: u64,
        mut request: Request,
        hold: Option<Box<Hold>>,
        now: Instant,
    ) -> Job {
        let deadline = request.timeout.and_then(|timeout| now.checked_add(timeout));
        let mut job = request.take_job();
        let background = request.background;
        let evaluation = request.body.evaluation();
        let releases = matches!(request.body, RequestBody::Held(HeldRequest::Release(_)));
        let Some(mut running) = RunningJob::new(request, lane, hold, deadline) else { return job };
        if let JobKind::Evaluate { background: begins_there, detached, .. } = &mut job.kind {
            *begins_there = background;
            if *detached && !background {
                running.placement = Placement::Detachable;
            }
        }
        if releases && self.foreground().is_some() {
            running.placement = Placement::Beside;
        }
        running.begun = Some(now);
        running.hand_over_at = (lane == Lane::Inspection).then(|| now + HAND_OVER_TIME);
        running.thread = thread;
        running.heap_limit = heap_limit();
        if let Some(evaluation) = evaluation {
            self.evaluations.begin(evaluation, job.id, now);
        }
        self.running.push(running);
        job
    }

    /// Finds a running job by its number.
    pub(super) fn find(&mut self, job: u64) -> Option<&mut RunningJob> {
        self.running.iter_mut().find(|running| running.id == job)
    }

    /// Removes and returns a running job by its number. Ends the wait of the job's thread for another job.
    pub(super) fn take_running(&mut self, job: u64) -> Option<RunningJob> {
        let index = self.running.iter().position(|running| running.id == job)?;
        let mut running = self.running.swap_remove(index);
        running.end_wait();
        // The job's thread may have been replaced, and the other thread must then take the connection's next inspection.
        self.changed[Lane::Inspection as usize] |=
            running.lane == Lane::Inspection && self.has_waiting(Lane::Inspection);
        Some(running)
    }

    /// Removes and returns all running jobs of a lane.
    pub(super) fn take_running_of_lane(&mut self, lane: Lane) -> Vec<RunningJob> {
        self.running.extract_if(.., |running| running.lane == lane).collect()
    }

    /// Removes and returns a client's waiting request by its job number, with its lane.
    pub(super) fn take_waiting(&mut self, job: u64) -> Option<(Lane, Request)> {
        self.queues().into_iter().find_map(|(lane, queue)| Some((lane, queue.take_job(job)?)))
    }

    /// Removes and returns all waiting requests of a connection, with their lanes.
    pub(super) fn take_waiting_of_connection(&mut self, connection: u64) -> Vec<(Lane, Request)> {
        let mut taken = Vec::new();
        for (lane, queue) in self.queues() {
            taken.extend(queue.take_all_of(connection).into_iter().map(|request| (lane, request)));
        }
        taken
    }

    /// Removes and returns all waiting requests of clients for these lanes, with their lanes.
    pub(super) fn take_all_waiting(&mut self, lanes: &[Lane]) -> Vec<(Lane, Request)> {
        let queues = self.queues().into_iter().filter(|(lane, _)| lanes.contains(lane));
        queues.flat_map(|(lane, queue)| queue.take_all().map(move |request| (lane, request))).collect()
    }

    /// Returns the queues in which clients' requests wait, with their lanes.
    fn queues(&mut self) -> [(Lane, &mut WaitingRequests); 3] {
        let [evaluations, inspections, ..] = &mut self.waiting;
        [(Lane::Evaluation, evaluations), (Lane::Evaluation, &mut self.ready), (Lane::Inspection, inspections)]
    }

    /// Returns the job in the foreground.
    pub(super) fn foreground(&mut self) -> Option<&mut RunningJob> {
        self.running.iter_mut().find(|running| running.is_foreground())
    }

    /// Returns the number of evaluations that are in the background or about to begin there.
    pub(super) fn background_count(&self) -> usize {
        let running = self.running.iter().filter(|running| running.is_background()).count();
        running + self.ready.len()
    }

    /// Returns the number of evaluations that are in the background or wait to begin there.
    pub(super) fn background_and_waiting_count(&self) -> usize {
        self.background_count() + self.waiting[Lane::Evaluation as usize].background_count()
    }

    /// Returns true if the thread of `job`, which is in the background, must not wait for an evaluation that is
    /// submitted now: the background is full, and every evaluation there would wait for an evaluation that cannot begin
    /// or end. `in_background` is true if the submitted evaluation is for the background.
    pub(super) fn would_deadlock(&self, job: u64, in_background: bool) -> bool {
        let waiting = &self.waiting[Lane::Evaluation as usize];
        // Neither this request nor a later request begins before a background evaluation ends.
        let blocked = waiting.find_first_for_background();
        let background = || self.running.iter().filter(|running| running.is_background());
        let never_begins = |awaited| {
            let is_blocked = |position: Position| blocked.is_some_and(|blocked| blocked <= position);
            waiting.find_job(awaited).is_some_and(is_blocked) || background().any(|running| running.id == awaited)
        };
        (blocked.is_some() || in_background)
            && background().count() >= MAX_BACKGROUND
            && background().all(|running| {
                running.id == job || running.awaited.as_ref().is_some_and(|awaited| never_begins(awaited.job))
            })
    }

    /// Queues a request by which the control lane interrupts the thread of job `target`.
    pub(super) fn send_interruption(&mut self, target: u64, request: Request) {
        self.queued_interruptions.push((request.job.id, target));
        self.push(Lane::Control, request);
    }

    /// Records the end of a control job. If the job sent an interruption to a thread that waits for another job, ends
    /// that wait.
    pub(super) fn finish_control_job(&mut self, job: u64) {
        let sent = self.queued_interruptions.extract_if(.., |(sender, _)| *sender == job).next();
        if let Some((_, target)) = sent
            && let Some(running) = self.find(target)
        {
            running.end_wait();
        }
    }

    /// Records that the thread of job `waiter` waits for another job. Ends the wait at once if job `waiter` no longer
    /// runs, or if an interruption has been sent to its thread. While an interruption is still queued, the wait
    /// continues: otherwise Lisp could continue without noticing the interruption.
    pub(super) fn record_wait(&mut self, waiter: u64, awaited: JobWait) {
        let is_queued = self.queued_interruptions.iter().any(|(_, target)| *target == waiter);
        let Some(waiter) = self.find(waiter) else { return (awaited.interrupt)() };
        waiter.awaited = Some(awaited);
        if !is_queued && waiter.interruption.is_under_way() {
            waiter.end_wait();
        }
    }

    /// Returns the numbers of the evaluations in the background, including those that have not begun.
    pub(super) fn background_numbers(&self) -> impl Iterator<Item = u64> {
        let behind = self.waiting[Lane::Evaluation as usize].for_background();
        let waiting = self.ready.for_background().chain(behind);
        let waiting = waiting.map(|request| request.job.evaluation);
        let running = self.running.iter().filter(|running| running.is_background()).map(|running| running.evaluation);
        let finishing = self.finishing.iter().filter(|finishing| finishing.background);
        running.chain(waiting).chain(finishing.map(|finishing| finishing.evaluation))
    }

    /// Moves a running detachable evaluation to the background. A waiting evaluation is marked to begin in the
    /// background, and an evaluation in post-processing counts as a background evaluation from now on, even beyond the
    /// limit. Returns false if the limit of background evaluations is reached, or the evaluation has ended or is not
    /// detachable.
    pub(super) fn move_to_background(&mut self, job: u64) -> bool {
        let full = self.background_and_waiting_count() >= MAX_BACKGROUND;
        let waiting = &mut self.waiting[Lane::Evaluation as usize];
        if !full
            && let Some(position) = waiting.find_job(job)
            && matches!(waiting.get(position).job.kind, JobKind::Evaluate { detached: true, .. })
        {
            waiting.move_to_background(position);
        } else if let Some(finishing) = self.finishing.iter_mut().find(|finishing| finishing.job == job) {
            finishing.background = true;
        } else if let Some(running) =
            self.foreground().filter(|it| it.id == job && it.placement == Placement::Detachable && !full)
        {
            running.placement = Placement::Background;
            let thread = running.thread;
            self.threads.clear_home(thread);
        } else {
            return false;
        }
        true
    }

    /// Abandons the thread of this job, which was removed from the running jobs. The thread no longer serves a
    /// lane, and ends with its job.
    pub(super) fn abandon_thread(&mut self, running: &RunningJob) {
        self.abandoned.add(running.id);
        self.threads.clear_home(running.thread);
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod test_requests;

#[cfg(test)]
mod tests {
    use super::*;

    fn reset(id: u64, background: bool) -> Request {
        Request { background, ..test_requests::request(&Connection::new(0), id, JobKind::Reset) }
    }

    /// Ends a running evaluation, which stays held until `until`.
    fn hold(scheduler: &mut SchedulerState, job: u64, until: Option<Instant>) {
        let mut running = scheduler.take_running(job).unwrap();
        let Activity::Evaluate(evaluate) = &mut running.activity else { unreachable!("it evaluates") };
        evaluate.held = true;
        scheduler.holds.push(running.take_hold(until).unwrap());
    }

    /// The first thread is Lisp's main thread, which must stay free for the foreground.
    #[test]
    fn the_first_thread_runs_no_background_evaluation() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        scheduler.push(Lane::Evaluation, reset(1, true));
        scheduler.reschedule(now);
        let next = |scheduler: &mut SchedulerState, thread| scheduler.next(Lane::Evaluation, thread, None, now);
        // If another thread were started before the first thread asks for work, the other thread might ask first.
        assert!(matches!(scheduler.next(Lane::Control, 0, None, now), Instruction::Wait(None)));
        assert!(matches!(next(&mut scheduler, 1), Instruction::Wait(None)));
        assert!(matches!(
            scheduler.next(Lane::Control, 0, None, now),
            Instruction::Run(Job { kind: JobKind::StartThread(_), .. })
        ));
        assert!(matches!(next(&mut scheduler, 2), Instruction::Run(Job { id: 1, .. })));
        scheduler.push(Lane::Evaluation, reset(2, false));
        scheduler.take_running(1).unwrap();
        assert!(matches!(next(&mut scheduler, 2), Instruction::End));
        assert!(matches!(next(&mut scheduler, 1), Instruction::Run(Job { id: 2, .. })));
    }

    /// A request that reads a held evaluation's variables waits neither for the foreground nor for a request of another
    /// connection. The next request of the connection that holds the evaluation waits until the variables are read.
    #[test]
    fn held_variables_are_read_while_the_foreground_is_busy() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        let (holder, other) = (Connection::new(1), Connection::new(2));
        let push = |scheduler: &mut SchedulerState, connection: &Arc<Connection>, id, kind| {
            scheduler.push(Lane::Evaluation, test_requests::request(connection, id, kind));
            scheduler.reschedule(now);
        };
        let run = |scheduler: &mut SchedulerState, thread, held, expected| {
            assert!(
                matches!(scheduler.next(Lane::Evaluation, thread, held, now), Instruction::Run(job) if job.id == expected)
            );
        };
        let hold = |scheduler: &mut SchedulerState, job| {
            let mut running = scheduler.take_running(job).unwrap();
            match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => about.effect = HoldEffect::Unchanged,
                Activity::Inspect(_) => unreachable!("it holds nothing"),
            }
            let hold = running.take_hold(None).unwrap();
            scheduler.holds.push(hold);
            scheduler.reschedule(now);
        };
        push(&mut scheduler, &holder, 1, test_requests::evaluation_kind(false));
        run(&mut scheduler, 1, None, 1);
        hold(&mut scheduler, 1);
        push(&mut scheduler, &other, 2, test_requests::evaluation_kind(false));
        push(&mut scheduler, &other, 3, test_requests::evaluation_kind(false));
        run(&mut scheduler, 2, None, 2);
        scheduler.take_changed_lanes();
        push(&mut scheduler, &holder, 4, JobKind::FrameLocals { from: 0, count: 1 });
        push(&mut scheduler, &holder, 5, JobKind::InvokeRestart(1));
        assert!(scheduler.take_changed_lanes()[Lane::Evaluation as usize], "nobody wakes the thread");
        run(&mut scheduler, 1, Some(1), 4);
        scheduler.take_running(2).unwrap();
        // Request 4 still reads variables: the restart waits for it, but evaluation 3 begins.
        run(&mut scheduler, 2, None, 3);
        hold(&mut scheduler, 4);
        scheduler.take_running(3).unwrap();
        run(&mut scheduler, 1, Some(4), 5);
    }

    /// Each thread that holds an evaluation would take the scheduler's lock in vain.
    #[test]
    fn a_request_that_waits_for_the_foreground_wakes_no_evaluating_thread() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        let connection = Connection::new(1);
        let push = |scheduler: &mut SchedulerState, id| {
            let request = test_requests::request(&connection, id, test_requests::evaluation_kind(true));
            scheduler.push(Lane::Evaluation, request);
            scheduler.reschedule(now);
            scheduler.take_changed_lanes()[Lane::Evaluation as usize]
        };
        assert!(push(&mut scheduler, 1));
        let next = scheduler.next(Lane::Evaluation, 1, None, now);
        assert!(matches!(next, Instruction::Run(Job { id: 1, .. })));
        scheduler.take_changed_lanes();
        assert!(!push(&mut scheduler, 2));
        assert!(scheduler.move_to_background(1));
        scheduler.reschedule(now);
        assert!(scheduler.take_changed_lanes()[Lane::Evaluation as usize], "nobody wakes the thread");
    }

    /// Two such threads would wake each other again and again until the new thread runs.
    #[test]
    fn a_thread_that_holds_an_evaluation_wakes_no_other_while_a_new_thread_starts() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        let (holder, other) = (Connection::new(1), Connection::new(2));
        let push = |scheduler: &mut SchedulerState, connection: &Arc<Connection>, id| {
            let request = test_requests::request(connection, id, test_requests::evaluation_kind(false));
            scheduler.push(Lane::Evaluation, request);
            scheduler.reschedule(now);
            scheduler.take_changed_lanes()[Lane::Evaluation as usize]
        };
        assert!(push(&mut scheduler, &holder, 1));
        let next = scheduler.next(Lane::Evaluation, 1, None, now);
        assert!(matches!(next, Instruction::Run(Job { id: 1, .. })));
        hold(&mut scheduler, 1, None);
        assert!(push(&mut scheduler, &other, 2));
        let next = scheduler.next(Lane::Evaluation, 1, Some(1), now);
        assert!(matches!(next, Instruction::Wait(None)));
        assert!(!scheduler.take_changed_lanes()[Lane::Evaluation as usize]);
        let next = scheduler.next(Lane::Evaluation, 2, None, now);
        assert!(matches!(next, Instruction::Run(Job { id: 2, .. })));
    }

    /// The evaluation in the foreground may need a lock that a held evaluation owns.
    #[test]
    fn held_evaluations_are_released_while_the_foreground_is_busy() {
        let mut scheduler = SchedulerState::default();
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let [expiring, aborting, evaluating, other] = [1, 2, 3, 4].map(Connection::new);
        let push = |scheduler: &mut SchedulerState, connection: &Arc<Connection>, id, kind| {
            scheduler.push(Lane::Evaluation, test_requests::request(connection, id, kind));
            scheduler.reschedule(now);
        };
        let evaluation = || test_requests::evaluation_kind(false);
        for (id, connection) in [(1, &expiring), (2, &aborting), (3, &evaluating), (4, &other)] {
            push(&mut scheduler, connection, id, evaluation());
            let next = scheduler.next(Lane::Evaluation, id, None, now);
            assert!(matches!(next, Instruction::Run(job) if job.id == id));
            if id < 4 {
                hold(&mut scheduler, id, Some(now + second));
            }
        }
        push(&mut scheduler, &expiring, 5, JobKind::InvokeRestart(1));
        let next = |scheduler: &mut SchedulerState, held, now| scheduler.next(Lane::Evaluation, held, Some(held), now);
        assert!(matches!(next(&mut scheduler, 1, now), Instruction::Wait(Some(until)) if until == now + second));
        assert!(matches!(next(&mut scheduler, 1, now + second), Instruction::Release(_, HoldEnd::TimedOut)));

        scheduler.take_changed_lanes();
        push(&mut scheduler, &aborting, 6, JobKind::Release);
        assert!(scheduler.take_changed_lanes()[Lane::Evaluation as usize], "nobody wakes the thread");
        push(&mut scheduler, &aborting, 7, evaluation());
        assert!(matches!(next(&mut scheduler, 2, now), Instruction::Run(Job { id: 6, .. })));
        push(&mut scheduler, &evaluating, 8, evaluation());
        assert!(matches!(next(&mut scheduler, 3, now), Instruction::Release(_, HoldEnd::Released)));
        assert_eq!(scheduler.foreground().map(|running| running.id), Some(4));

        // Evaluation 7 waits until evaluation 2 is released, but evaluation 8 begins.
        scheduler.take_running(4).unwrap();
        let next = scheduler.next(Lane::Evaluation, 4, None, now);
        assert!(matches!(next, Instruction::Refuse(request) if request.job.id == 5));
        let next = scheduler.next(Lane::Evaluation, 4, None, now);
        assert!(matches!(next, Instruction::Run(Job { id: 8, .. })));
        scheduler.take_running(6).unwrap();
        scheduler.take_running(8).unwrap();
        let next = scheduler.next(Lane::Evaluation, 4, None, now);
        assert!(matches!(next, Instruction::Run(Job { id: 7, .. })));
    }

    /// A query that needs an idle session may be submitted before an evaluation moves to the background or is held.
    /// Refusing the query does not release the hold.
    #[test]
    fn a_query_that_needs_an_idle_session_is_refused_while_an_evaluation_runs_or_is_held() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        let connection = Connection::new(1);
        let push = |scheduler: &mut SchedulerState, id, kind| {
            scheduler.push(Lane::Evaluation, test_requests::request(&connection, id, kind));
            scheduler.reschedule(now);
        };
        let next = |scheduler: &mut SchedulerState, thread, held| scheduler.next(Lane::Evaluation, thread, held, now);
        let is_refusal_of =
            |instruction: Instruction, id| matches!(instruction, Instruction::Refuse(request) if request.job.id == id);
        push(&mut scheduler, 1, test_requests::evaluation_kind(true));
        push(&mut scheduler, 2, JobKind::Query);
        assert!(matches!(next(&mut scheduler, 1, None), Instruction::Run(Job { id: 1, .. })));
        assert!(scheduler.move_to_background(1));
        assert!(is_refusal_of(next(&mut scheduler, 2, None), 2));
        scheduler.take_running(1).unwrap();

        push(&mut scheduler, 3, test_requests::evaluation_kind(false));
        push(&mut scheduler, 4, JobKind::Query);
        assert!(matches!(next(&mut scheduler, 2, None), Instruction::Run(Job { id: 3, .. })));
        hold(&mut scheduler, 3, None);
        assert!(is_refusal_of(next(&mut scheduler, 2, Some(3)), 4));
        assert_eq!(scheduler.check_idle(), Err(InspectError::Held));

        scheduler.holds.clear();
        push(&mut scheduler, 5, JobKind::Query);
        assert!(matches!(next(&mut scheduler, 2, None), Instruction::Run(Job { id: 5, .. })));
    }

    #[test]
    fn queries_and_resets_cannot_end_in_a_hold() {
        let mut scheduler = SchedulerState::default();
        let connection = Connection::new(1);
        for (id, kind) in [(1, JobKind::Query), (2, JobKind::Reset)] {
            scheduler.push(Lane::Evaluation, test_requests::request(&connection, id, kind));
        }
        assert!(scheduler.cannot_hold(1));
        let next = scheduler.next(Lane::Evaluation, 1, None, Instant::now());
        assert!(matches!(next, Instruction::Run(Job { id: 1, .. })));
        assert!(scheduler.cannot_hold(1));
        scheduler.push(Lane::Evaluation, test_requests::request(&connection, 3, test_requests::evaluation_kind(false)));
        assert!(!scheduler.cannot_hold(1));
    }

    /// The connections' inspections take turns, and each connection's inspections stay in order.
    #[test]
    fn connections_take_turns_to_inspect() {
        let mut scheduler = SchedulerState::default();
        let connections = [0, 1, 7].map(Connection::new);
        for (id, connection) in [(1, 1), (2, 1), (3, 1), (4, 2), (5, 0), (6, 0)] {
            let request = test_requests::request(&connections[connection], id, JobKind::Query);
            scheduler.push(Lane::Inspection, request);
        }
        let order = std::iter::from_fn(|| match scheduler.next(Lane::Inspection, 0, None, Instant::now()) {
            Instruction::Run(job) => scheduler.take_running(job.id).map(|ended| ended.id),
            _ => None,
        });
        assert_eq!(order.collect::<Vec<_>>(), [5, 1, 4, 6, 2, 3]);
    }

    /// Each thread of the inspection lane takes inspections of other connections than the threads that still inspect.
    #[test]
    fn inspection_lane_gets_another_thread_when_an_inspection_delays_another_connection() {
        let mut scheduler = SchedulerState::default();
        let [first, second, third] = [1, 2, 3].map(Connection::new);
        let (now, long) = (Instant::now(), HAND_OVER_TIME);
        let push = |scheduler: &mut SchedulerState, connection, job| {
            scheduler.push(Lane::Inspection, test_requests::request(connection, job, JobKind::Query));
        };
        let next = |scheduler: &mut SchedulerState, now| match scheduler.next(Lane::Inspection, 0, None, now) {
            Instruction::Run(job) => Some(job.id),
            _ => None,
        };
        let starts_thread = |scheduler: &mut SchedulerState, now| {
            scheduler.hand_over_inspection_lane(now);
            matches!(
                scheduler.next(Lane::Control, 0, None, now),
                Instruction::Run(Job { kind: JobKind::StartThread(Lane::Inspection), .. })
            )
        };
        push(&mut scheduler, &first, 1);
        assert_eq!(next(&mut scheduler, now), Some(1));
        push(&mut scheduler, &first, 2);
        assert!(!starts_thread(&mut scheduler, now + long));
        push(&mut scheduler, &second, 3);
        push(&mut scheduler, &third, 4);
        assert!(!starts_thread(&mut scheduler, now + long / 2));
        assert!(starts_thread(&mut scheduler, now + long));
        assert!(!starts_thread(&mut scheduler, now + 2 * long));
        assert_eq!(next(&mut scheduler, now + 2 * long), Some(3));
        assert!(!starts_thread(&mut scheduler, now + 5 * long / 2));
        assert!(starts_thread(&mut scheduler, now + 3 * long));
        assert_eq!(next(&mut scheduler, now + 3 * long), Some(4));
        assert_eq!(next(&mut scheduler, now + 3 * long), None);
        assert_eq!(scheduler.observed_inspections().map(|(job, _)| job), Some(4));
        // The thread that waits must wake when the end of a job on another thread frees the job's connection.
        for (ended, next_job) in [(1, Some(2)), (4, None)] {
            scheduler.take_changed_lanes();
            scheduler.take_running(ended);
            assert_eq!(scheduler.take_changed_lanes()[Lane::Inspection as usize], next_job.is_some());
            assert_eq!(next(&mut scheduler, now + 4 * long), next_job);
        }
        push(&mut scheduler, &second, 5);
        assert_eq!(next(&mut scheduler, now + 4 * long), None);
        scheduler.take_changed_lanes();
        scheduler.take_running(3);
        assert!(scheduler.take_changed_lanes()[Lane::Inspection as usize]);
        assert_eq!(scheduler.observed_inspections().map(|(job, _)| job), Some(2));
    }

    #[test]
    fn a_thread_that_could_not_be_started_for_the_inspection_lane_is_requested_again_after_a_second() {
        let mut scheduler = SchedulerState::default();
        let begin = Instant::now();
        for (job, connection) in [(1, Connection::new(1)), (2, Connection::new(2))] {
            scheduler.push(Lane::Inspection, test_requests::request(&connection, job, JobKind::Query));
        }
        let next = scheduler.next(Lane::Inspection, 0, None, begin);
        assert!(matches!(next, Instruction::Run(Job { id: 1, .. })));
        let requests_thread = |scheduler: &mut SchedulerState, now| {
            scheduler.hand_over_inspection_lane(now);
            !matches!(scheduler.next(Lane::Control, 0, None, now), Instruction::Wait(_))
        };
        let now = begin + HAND_OVER_TIME;
        assert!(requests_thread(&mut scheduler, now) && !requests_thread(&mut scheduler, now + 2 * RETRY_DELAY));
        scheduler.record_inspection_thread_refusal(now);
        assert!(!requests_thread(&mut scheduler, now + RETRY_DELAY / 2));
        assert!(requests_thread(&mut scheduler, now + RETRY_DELAY));
        assert!(!requests_thread(&mut scheduler, now + 2 * RETRY_DELAY));
        // The inspection may have ended before the refusal.
        scheduler.take_running(1);
        scheduler.record_inspection_thread_refusal(now);
    }

    #[test]
    fn evaluations_that_wait_for_the_background_count_towards_its_limit() {
        let mut scheduler = SchedulerState::default();
        let connection = Connection::new(1);
        let count = MAX_BACKGROUND as u64;
        for id in 0..=count {
            let request = test_requests::request(&connection, id, test_requests::evaluation_kind(true));
            scheduler.push(Lane::Evaluation, request);
        }
        assert!((0..count).all(|id| scheduler.move_to_background(id)));
        assert!(!scheduler.move_to_background(count));
        scheduler.take_waiting(0).unwrap();
        assert!(scheduler.move_to_background(count));
    }

    /// Evaluations begin in the order of their numbers, in the background too. All foreground evaluations begin on the same
    /// thread.
    #[test]
    fn background_jobs_begin_in_the_order_of_submission() {
        let mut scheduler = SchedulerState::default();
        let now = Instant::now();
        for (id, background) in [(1, false), (2, true), (3, false)] {
            scheduler.push(Lane::Evaluation, reset(id, background));
        }
        let next = |scheduler: &mut SchedulerState, thread| scheduler.next(Lane::Evaluation, thread, None, now);
        assert!(matches!(next(&mut scheduler, 1), Instruction::Run(Job { id: 1, .. })));
        assert!(matches!(next(&mut scheduler, 2), Instruction::End));
        scheduler.take_running(1).unwrap();
        // An evaluation would begin now, but job 3 is a reset, which waits for the evaluation in the background.
        assert!(matches!(next(&mut scheduler, 1), Instruction::Wait(Some(time)) if time > now));
        assert!(matches!(
            scheduler.next(Lane::Control, 0, None, now),
            Instruction::Run(Job { kind: JobKind::StartThread(_), .. })
        ));
        assert!(matches!(next(&mut scheduler, 3), Instruction::Run(Job { id: 2, .. })));
        assert!(scheduler.take_running(2).unwrap().is_background());
        assert!(matches!(next(&mut scheduler, 3), Instruction::End));
        assert!(matches!(next(&mut scheduler, 1), Instruction::Run(Job { id: 3, .. })));
    }
}
