//! Which jobs wait and which run. One lock guards it all, so that a job is always found: it waits, or it runs.
//!
//! One evaluation at a time is in the foreground, on the evaluation lane's thread. Those in the background have a thread
//! each: of the background lane, or the one on which they began in the foreground; another one takes its place there.
//!
//! An evaluation that is held keeps its thread, too. As long as nobody else wants to evaluate, that stays the evaluation
//! lane's; then it is *parked*: another thread takes the lane over, and it goes on by itself when its turn comes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::abandoned::Abandoned;
use super::aftermath::{Due, Finishing};
use super::connection::Connection;
use super::evaluations::Evaluations;
use super::events::{OutcomeBuilder, Unbalanced};
use super::hold::{RELEASED, TIME_UP};
use super::limits::heap_limit;
use super::pending::PendingReply;
use super::{Answer, Reply};
use crate::image::{Interrupt, Job, JobKind, Lane};
use crate::interruption::{Interruption, REACTION};
use crate::outcome::Outcome;

/// How many evaluations may be in the background. Each has a thread of its own, with a control stack.
pub(crate) const MAX_BACKGROUND: usize = 16;

/// How long after a thread could not be started the next one is tried.
const START_AGAIN: Duration = Duration::from_secs(1);

/// A job that waits, with what is to become of its answer.
pub(super) struct Request {
    /// Whose it is.
    pub(super) connection: Arc<Connection>,
    pub(super) job: Job,
    pub(super) timeout: Option<Duration>,
    pub(super) reply: PendingReply,
    /// It is to be done in the background.
    pub(super) background: bool,
    /// What is to be done after it.
    pub(super) due: Option<Box<Due>>,
}

impl Request {
    /// One for the foreground, or for another lane than that of evaluations.
    pub(super) fn new(
        connection: &Arc<Connection>,
        mut job: Job,
        timeout: Option<Duration>,
        reply: PendingReply,
    ) -> Self {
        job.connection = connection.id;
        Self { connection: connection.clone(), job, timeout, reply, background: false, due: None }
    }

    /// The start of a thread that pulls from `lane`; the job `instead` is refused when that cannot be done.
    fn start(connection: &Arc<Connection>, lane: Lane, instead: u64) -> Self {
        let job = Job::empty(0, JobKind::StartThread { lane, instead }, 0);
        Self::new(connection, job, None, PendingReply::Nobody)
    }

    /// Moves the job out and leaves its number.
    fn take_job(&mut self) -> Job {
        let Job { id, evaluation, .. } = self.job;
        std::mem::replace(&mut self.job, Job::empty(id, JobKind::Reset, evaluation))
    }
}

/// Where an evaluation is being done.
pub(super) enum Place {
    Foreground,
    /// In the foreground until another thread is there for that; then this gets what it has printed so far.
    Leaving(Reply<Arc<Outcome>>),
    Background,
}

/// An evaluation that is held, with nothing being done about it.
pub(super) struct Hold {
    pub(super) connection: Arc<Connection>,
    /// The job that its thread did last, by which that thread names it.
    pub(super) job: u64,
    /// When it is released at last.
    pub(super) until: Option<Instant>,
    /// What it comes to is built from this when it goes on: its code, under its limits.
    pub(super) builder: OutcomeBuilder,
    /// Its evaluation binds the package.
    local: bool,
    /// The number of the question that a person is asked about it: until that is over, only what concerns it is done of
    /// its connection's requests.
    question: Option<u64>,
    /// Its thread is no more that of the evaluation lane.
    parked: bool,
    /// No thread could be started in its stead; not again before this time.
    start_again: Option<Instant>,
}

/// A job in Lisp's hands.
pub(super) struct Running {
    pub(super) id: u64,
    /// Whose it is.
    pub(super) connection: Arc<Connection>,
    /// What was held, if this is about that.
    pub(super) hold: Option<Box<Hold>>,
    pub(super) lane: Lane,
    pub(super) place: Place,
    /// The evaluation that it belongs to; 0 for none.
    pub(super) evaluation: u64,
    pub(super) reply: PendingReply,
    /// The package was bound for it alone.
    pub(super) local: bool,
    /// When its time is up.
    pub(super) deadline: Option<Instant>,
    /// How much of the heap it may keep, in bytes.
    pub(super) heap_limit: Option<usize>,
    /// It was interrupted because it keeps more.
    pub(super) filled_heap: bool,
    pub(super) interruption: Interruption<Interrupt>,
    /// When garbage was last seen being collected while it was interrupted.
    pub(super) collected_at: Option<Instant>,
    /// What is to be done after it.
    pub(super) due: Option<Box<Due>>,
    /// When it is over, an evaluation is held.
    pub(super) holds: bool,
    /// It is held as it was before this job.
    pub(super) unchanged: bool,
    /// It unwinds what was held.
    pub(super) released: bool,
    /// What the cleanup forms of that print and fail with.
    pub(super) unwinding: Option<Box<OutcomeBuilder>>,
    /// Why what was asked cannot be done.
    pub(super) refused: Option<String>,
    /// Questions about the error state that wait for its end, since it was cancelled.
    pub(super) questions: Vec<Question>,
    /// Present while Lisp is done and the errors are looked into: set to end that.
    pub(super) end_search: Option<Arc<AtomicBool>>,
    /// The last wait of its thread in `Session::evaluate`; it may be over.
    pub(super) awaited: Option<Awaited>,
}

/// A wait for another job.
pub(super) struct Awaited {
    pub(super) job: u64,
    /// Ends the wait because of an interruption, or because the waiting job is given up.
    pub(super) interrupt: Box<dyn FnOnce() + Send>,
}

/// A question about the error state, which a cancelled evaluation is yet to become part of.
pub(super) struct Question {
    /// When it is answered without that.
    pub(super) until: Instant,
    /// Answers it. The argument is the number of the evaluation when that has not ended.
    pub(super) answer: Box<dyn FnOnce(Option<u64>) + Send>,
}

impl Question {
    fn settle(self, unended: Option<u64>) -> Answer {
        Box::new(move || (self.answer)(unended))
    }
}

impl Running {
    pub(super) fn new(request: Request, lane: Lane, deadline: Option<Instant>) -> Self {
        Self {
            id: request.job.id,
            connection: request.connection,
            hold: None,
            lane,
            place: if request.background { Place::Background } else { Place::Foreground },
            evaluation: request.job.evaluation,
            reply: request.reply.begun(),
            local: false,
            deadline,
            heap_limit: None,
            filled_heap: false,
            interruption: Interruption::default(),
            collected_at: None,
            due: request.due,
            holds: false,
            unchanged: false,
            released: false,
            unwinding: None,
            refused: None,
            questions: Vec::new(),
            end_search: None,
            awaited: None,
        }
    }

    /// The builders of what its events come to.
    fn builders(&mut self) -> impl Iterator<Item = &mut OutcomeBuilder> {
        self.reply.outcome_mut().into_iter().chain(self.unwinding.as_deref_mut())
    }

    /// Returns the unbalanced texts that are to be searched before the job is over, and what is set to end the search;
    /// `None` if there are none. The job is interrupted for nothing but a cancellation from here on.
    pub(super) fn begin_search(&mut self) -> Option<(Vec<Unbalanced>, Arc<AtomicBool>)> {
        let mut texts = Vec::new();
        self.builders().for_each(|builder| builder.unbalanced(&mut texts));
        if texts.is_empty() {
            return None;
        }
        (self.deadline, self.heap_limit) = (None, None);
        let end = self.end_search.insert(Arc::new(AtomicBool::new(self.interrupted().is_some())));
        Some((texts, end.clone()))
    }

    /// Takes what a search has found.
    pub(super) fn end_search(&mut self, hints: &[(Unbalanced, String)]) {
        self.end_search = None;
        self.builders().for_each(|builder| builder.add_hints(hints));
    }

    /// Ends the search for hints, if there is one, without a result.
    pub(super) fn give_up_search(&self) {
        if let Some(end) = &self.end_search {
            end.store(true, Ordering::Relaxed);
        }
    }

    /// Takes out the questions that wait for its end, which has come.
    pub(super) fn take_questions(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.questions).into_iter().map(|question| question.settle(None)).collect()
    }

    /// Takes out the questions that wait for its end no longer.
    pub(super) fn take_overdue_questions(&mut self, now: Instant) -> Vec<Answer> {
        let unended = Some(self.evaluation);
        self.questions.extract_if(.., |question| question.until <= now).map(|overdue| overdue.settle(unended)).collect()
    }

    /// True for what the user's code is evaluated by.
    pub(super) fn evaluates(&self) -> bool {
        matches!(self.lane, Lane::Evaluation | Lane::Background)
    }

    pub(super) fn is_background(&self) -> bool {
        matches!(self.place, Place::Background)
    }

    /// True when its thread is not the one that the next job of its lane is for.
    pub(super) fn is_parked(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.parked)
    }

    /// Nobody is asked any more about what this is about.
    pub(super) fn end_question(&mut self) -> bool {
        self.hold.as_mut().is_some_and(|hold| hold.question.take().is_some())
    }

    /// The evaluation is held from here on, as before or for the first time.
    pub(super) fn take_hold(&mut self, until: Option<Instant>) -> Option<Box<Hold>> {
        let hold = self.hold.take().or_else(|| {
            Some(Box::new(Hold {
                connection: self.connection.clone(),
                job: self.id,
                until,
                builder: self.reply.outcome()?.anew(),
                local: self.local,
                question: None,
                parked: false,
                start_again: None,
            }))
        });
        hold.map(|hold| Box::new(Hold { job: self.id, until, ..*hold }))
    }

    /// Ends the wait of its thread for another job, so that Lisp takes an interruption.
    pub(super) fn end_wait(&mut self) {
        if let Some(awaited) = self.awaited.take() {
            (awaited.interrupt)();
        }
    }

    /// Why it was first interrupted, if it was.
    pub(super) fn interrupted(&self) -> Option<Interrupt> {
        self.interruption.reason()
    }
}

/// What a thread that asks for a job is to do.
pub(super) enum Next {
    /// This job, which runs from now on.
    Run(Job),
    /// Ask again: this cannot be done, since nothing is held.
    Refuse(Box<Request>),
    /// Ask again when what this thread holds is to be released, which this says why.
    Release(Box<Hold>, &'static str),
    /// Ask again when something changes, or it is this time.
    Wait(Option<Instant>),
    /// End.
    End,
}

/// What waits and what runs.
#[derive(Default)]
pub(super) struct Board {
    waiting: [VecDeque<Request>; Lane::COUNT],
    pub(super) running: Vec<Running>,
    /// The lanes whose threads have something new to look at.
    changed: [bool; Lane::COUNT],
    pub(super) evaluations: Evaluations,
    /// The evaluations that Lisp has done its part of.
    pub(super) finishing: Vec<Finishing>,
    /// What is held and nothing is being done about; at most one of a connection.
    pub(super) holds: Vec<Hold>,
    /// The job of the parked thread in whose stead one of the evaluation lane's is being started, and whose it is.
    relieving: Option<(u64, Arc<Connection>)>,
    /// The interruptions that are yet to be sent: the job of the control lane that does it, and the interrupted job.
    sending: Vec<(u64, u64)>,
    /// The jobs that were answered when their image was to be replaced, and that are still being unwound.
    pub(super) unwinding: Vec<u64>,
    /// The threads that serve no lane any more.
    pub(super) abandoned: Abandoned,
    /// Until when a reset waits for the evaluations in the background.
    reset_at: Option<Instant>,
}

impl Board {
    /// Adds a request at the end of its lane's queue.
    pub(super) fn push(&mut self, lane: Lane, request: Request) {
        self.waiting[lane as usize].push_back(request);
        self.changed[lane as usize] = true;
    }

    /// True when something waits for this lane.
    pub(super) fn has_waiting(&self, lane: Lane) -> bool {
        !self.waiting[lane as usize].is_empty()
    }

    /// Returns true while an evaluation runs, in the background too.
    pub(super) fn is_evaluating(&self) -> bool {
        let evaluates = |running: &Running| running.evaluates() && !matches!(running.reply, PendingReply::Query(..));
        self.background() > 0 || !self.finishing.is_empty() || self.running.iter().any(evaluates)
    }

    /// True while something is evaluated, in the background too, or held.
    pub(super) fn is_busy(&self) -> bool {
        !self.holds.is_empty()
            || self.background() > 0
            || !self.finishing.is_empty()
            || self.running.iter().any(Running::evaluates)
    }

    /// The lanes that have something new to look at, once.
    pub(super) fn take_changed(&mut self) -> [bool; Lane::COUNT] {
        std::mem::take(&mut self.changed)
    }

    /// What a thread of `lane` is to do. `held`: one that holds an evaluation, with the job that it did last.
    pub(super) fn next(&mut self, lane: Lane, held: Option<u64>, now: Instant) -> Next {
        match lane {
            Lane::Evaluation => match held {
                None => self.next_evaluation(now),
                Some(job) => self.next_held(job, now),
            },
            Lane::Background => match self.waiting[lane as usize].pop_front() {
                Some(request) => Next::Run(self.begin(lane, request, None, now)),
                // It was cancelled meanwhile.
                None => Next::End,
            },
            Lane::Signals => Next::End,
            Lane::Inspection | Lane::Control => match self.waiting[lane as usize].pop_front() {
                Some(request) => Next::Run(self.begin(lane, request, None, now)),
                None => Next::Wait(None),
            },
        }
    }

    /// What a thread is to do that holds an evaluation.
    fn next_held(&mut self, job: u64, now: Instant) -> Next {
        let Some(own) = self.holds.iter().position(|hold| hold.job == job) else { return Next::Wait(None) };
        if self.foreground().is_some() {
            return Next::Wait(None);
        }
        let first = self.first_evaluation().map(|first| &self.waiting[Lane::Evaluation as usize][first]);
        let (until, parked, start_again) = {
            let hold = &self.holds[own];
            (hold.until, hold.parked, hold.start_again)
        };
        match first.map(|first| (self.thread_for(first), first.job.kind.concerns_held())) {
            Some((Some(target), concerns_held)) if target == own => {
                if !concerns_held {
                    return Next::Release(Box::new(self.holds.swap_remove(own)), RELEASED);
                }
                let mut request = self.pop_evaluation();
                let hold = Box::new(self.holds.swap_remove(own));
                if let PendingReply::Resumed(builder, _) = &mut request.reply {
                    // What was held goes on under its own limits. An error is in a form of its code.
                    request.timeout = hold.builder.timeout();
                    **builder = hold.builder.anew();
                    request.job.evaluation = builder.evaluation();
                }
                Next::Run(self.begin(Lane::Evaluation, request, Some(hold), now))
            }
            _ if until.is_some_and(|until| until <= now) => {
                Next::Release(Box::new(self.holds.swap_remove(own)), TIME_UP)
            }
            Some((None, _)) if !parked => {
                if let Some(time) = start_again.filter(|time| now < *time) {
                    return Next::Wait(Some(until.map_or(time, |until| until.min(time))));
                }
                let hold = &mut self.holds[own];
                hold.parked = true;
                let start = Request::start(&hold.connection, Lane::Evaluation, job);
                self.relieving = Some((job, hold.connection.clone()));
                self.push(Lane::Control, start);
                Next::Wait(until)
            }
            _ => Next::Wait(until),
        }
    }

    /// Which of the holds a request is for; `None` when it is for the thread of the evaluation lane. What is held comes
    /// to its end before a reset.
    fn thread_for(&self, request: &Request) -> Option<usize> {
        match request.job.kind {
            JobKind::Reset if self.holds.is_empty() => None,
            JobKind::Reset => Some(0),
            _ => self.holds.iter().position(|hold| hold.connection.id == request.connection.id),
        }
    }

    /// What the evaluation lane's thread is to do, which holds nothing.
    fn next_evaluation(&mut self, now: Instant) -> Next {
        // One at a time: what was held goes on by itself.
        let Some(first) = self.first_evaluation() else { return Next::Wait(None) };
        if self.foreground().is_some() {
            return Next::Wait(None);
        }
        let background = self.background();
        let first = &self.waiting[Lane::Evaluation as usize][first];
        if self.thread_for(first).is_some() {
            return Next::Wait(None);
        }
        if first.job.kind.concerns_held() {
            return Next::Refuse(Box::new(self.pop_evaluation()));
        }
        if first.job.kind == JobKind::Reset && background > 0 {
            // They are being ended, and would go on in what is reset.
            let unwinding = self.running.iter().filter(|running| running.is_background());
            let due = unwinding.filter_map(|running| running.interruption.due()).max();
            let until = *self.reset_at.get_or_insert(now + REACTION);
            let until = due.map_or(until, |due| due.max(until));
            if now < until {
                return Next::Wait(Some(until));
            }
        }
        if first.background {
            if background < MAX_BACKGROUND {
                let request = self.pop_evaluation();
                let start = Request::start(&request.connection, Lane::Background, request.job.id);
                self.push(Lane::Background, request);
                self.push(Lane::Control, start);
                return self.next_evaluation(now);
            }
            return Next::Wait(None);
        }
        self.reset_at = None;
        let request = self.pop_evaluation();
        Next::Run(self.begin(Lane::Evaluation, request, None, now))
    }

    /// Where the first request is that may be done now.
    fn first_evaluation(&self) -> Option<usize> {
        let asks = |request: &Request| self.hold_of(request.connection.id).is_some_and(|hold| hold.question.is_some());
        let mut waiting = self.waiting[Lane::Evaluation as usize].iter();
        waiting.position(|request| {
            request.job.kind.concerns_held() || request.job.kind == JobKind::Reset || !asks(request)
        })
    }

    fn pop_evaluation(&mut self) -> Request {
        let first = self.first_evaluation().expect("it was looked at");
        self.waiting[Lane::Evaluation as usize].remove(first).expect("it is there")
    }

    /// What a connection holds, with nothing being done about it.
    pub(super) fn hold_of(&self, connection: u64) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.connection.id == connection)
    }

    /// True when what comes next of a connection releases what it holds.
    pub(super) fn releases_held(&self, connection: u64) -> bool {
        self.hold_of(connection).is_some_and(|hold| hold.question.is_none())
            && self.waiting[Lane::Evaluation as usize].iter().all(|request| request.connection.id != connection)
    }

    /// All that is held, also while something is being done about it.
    fn all_holds(&mut self) -> impl Iterator<Item = &mut Hold> {
        let busy = self.running.iter_mut().filter_map(|running| running.hold.as_deref_mut());
        self.holds.iter_mut().chain(busy)
    }

    /// A person is asked about what a connection holds: `question` is the number of that, perhaps in place of one that is
    /// asked again. True for the first one.
    pub(super) fn ask(&mut self, connection: u64, question: u64) -> bool {
        let hold = self.holds.iter_mut().find(|hold| hold.connection.id == connection);
        hold.is_some_and(|hold| hold.question.replace(question).is_none())
    }

    /// True while this is what a person is asked.
    pub(super) fn asks(&mut self, question: u64) -> bool {
        self.all_holds().any(|hold| hold.question == Some(question))
    }

    /// Nobody is asked any more about what a connection holds. False when nobody was.
    pub(super) fn end_question(&mut self, connection: u64) -> bool {
        let hold = self.all_holds().find(|hold| hold.connection.id == connection);
        let ended = hold.is_some_and(|hold| hold.question.take().is_some());
        self.changed[Lane::Evaluation as usize] |= ended;
        ended
    }

    /// Makes a held evaluation another connection's, until this time. Whose it was; `None` when a person is asked about it.
    pub(super) fn hand_over(
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

    /// True while nothing is being done about this evaluation, which is held.
    pub(super) fn is_held(&self, evaluation: u64) -> bool {
        self.holds.iter().any(|hold| hold.builder.evaluation() == evaluation)
    }

    /// Has a request run from now on; `hold` is what it is about.
    pub(super) fn begin(&mut self, lane: Lane, mut request: Request, hold: Option<Box<Hold>>, now: Instant) -> Job {
        let deadline = request.timeout.and_then(|timeout| now.checked_add(timeout));
        // Lisp gets the job, the rest stays here.
        let job = request.take_job();
        if lane == Lane::Control {
            return job;
        }
        let mut running = Running::new(request, lane, deadline);
        if job.kind == JobKind::Release {
            running.unwinding = hold.as_ref().map(|hold| Box::new(hold.builder.anew()));
        }
        if running.evaluates() {
            running.heap_limit = heap_limit();
            running.local = running.connection.is_guest()
                || match job.kind {
                    JobKind::Evaluate { .. } => !job.name.is_empty(),
                    _ => hold.as_ref().is_some_and(|hold| hold.local),
                };
        }
        running.hold = hold;
        if let Some(evaluation) = running.reply.evaluation() {
            self.evaluations.begin(evaluation, job.id, now);
        }
        self.running.push(running);
        job
    }

    /// The job that runs under this number.
    pub(super) fn find(&mut self, job: u64) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.id == job)
    }

    /// Takes out what runs under this number. Who waits for its end may go on.
    pub(super) fn take_running(&mut self, job: u64) -> Option<Running> {
        let index = self.running.iter().position(|running| running.id == job)?;
        let mut running = self.running.swap_remove(index);
        running.end_wait();
        if running.is_background() || running.hold.is_some() || !self.holds.is_empty() {
            self.changed[Lane::Evaluation as usize] = true;
        }
        Some(running)
    }

    /// Takes out what waits under this number.
    pub(super) fn take_waiting(&mut self, job: u64) -> Option<(Lane, Request)> {
        [Lane::Evaluation, Lane::Background].into_iter().find_map(|lane| {
            let queue = &mut self.waiting[lane as usize];
            let index = queue.iter().position(|request| request.job.id == job)?;
            Some((lane, queue.remove(index)?))
        })
    }

    /// Takes out what a connection has waiting, with the lane that it waits for.
    pub(super) fn take_waiting_of(&mut self, connection: u64) -> Vec<(Lane, Request)> {
        let mut taken = Vec::new();
        for lane in [Lane::Evaluation, Lane::Inspection, Lane::Background] {
            let (of_it, others): (VecDeque<_>, _) = std::mem::take(&mut self.waiting[lane as usize])
                .into_iter()
                .partition(|request| request.connection.id == connection);
            self.waiting[lane as usize] = others;
            taken.extend(of_it.into_iter().map(|request| (lane, request)));
        }
        taken
    }

    /// Takes out all that waits for this lane.
    pub(super) fn take_all(&mut self, lane: Lane) -> VecDeque<Request> {
        std::mem::take(&mut self.waiting[lane as usize])
    }

    /// What runs in the foreground.
    pub(super) fn foreground(&mut self) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.lane == Lane::Evaluation)
    }

    /// How many evaluations are in the background, or have a thread being made for that.
    pub(super) fn background(&self) -> usize {
        let running = self.running.iter().filter(|running| running.is_background()).count();
        running + self.waiting[Lane::Background as usize].len()
    }

    /// How many are there, or wait to be.
    pub(super) fn background_and_waiting(&self) -> usize {
        self.background() + self.waiting[Lane::Evaluation as usize].iter().filter(|request| request.background).count()
    }

    /// True when the thread of `job`, in the background, must not wait for an evaluation that is submitted now: as many are
    /// in the background as may be, and all of them would wait for one another to end.
    pub(super) fn would_deadlock(&self, job: u64, in_background: bool) -> bool {
        let waiting = &self.waiting[Lane::Evaluation as usize];
        // Nothing begins from there on before one in the background ends.
        let blocked = waiting.iter().position(|request| request.background);
        let Some(blocked) = blocked.or(in_background.then_some(waiting.len())) else { return false };
        let background = || self.running.iter().filter(|running| running.is_background());
        let never_begins = |awaited| {
            waiting.iter().skip(blocked).any(|request| request.job.id == awaited)
                || background().any(|running| running.id == awaited)
        };
        background().count() >= MAX_BACKGROUND
            && background().all(|running| {
                running.id == job || running.awaited.as_ref().is_some_and(|awaited| never_begins(awaited.job))
            })
    }

    /// Has the control lane interrupt a thread by this request.
    pub(super) fn send_interruption(&mut self, target: u64, request: Request) {
        self.sending.push((request.job.id, target));
        self.push(Lane::Control, request);
    }

    /// The control lane has done a job. If the job sent an interruption to a thread that waits for another job, ends that wait.
    pub(super) fn control_done(&mut self, job: u64) {
        let sent = self.sending.extract_if(.., |(sender, _)| *sender == job).next();
        if let Some((_, target)) = sent
            && let Some(running) = self.find(target)
        {
            running.end_wait();
        }
    }

    /// Notes that the thread of job `waiter` waits for another job. Ends the wait at once if an interruption has been sent to the
    /// thread. Before the interruption is sent, Lisp could go on without it.
    pub(super) fn wait_for(&mut self, waiter: u64, awaited: Awaited) {
        let is_queued = self.sending.iter().any(|(_, target)| *target == waiter);
        let Some(waiter) = self.find(waiter) else { return (awaited.interrupt)() };
        waiter.awaited = Some(awaited);
        if !is_queued && waiter.interruption.is_under_way() {
            waiter.end_wait();
        }
    }

    /// The numbers of the evaluations in the background, including those that have not begun.
    pub(super) fn background_numbers(&self) -> impl Iterator<Item = u64> {
        let behind = self.waiting[Lane::Evaluation as usize].iter().filter(|request| request.background);
        let waiting = self.waiting[Lane::Background as usize].iter().chain(behind);
        let waiting = waiting.map(|request| request.job.evaluation);
        let running = self.running.iter().filter(|running| running.is_background()).map(|running| running.evaluation);
        let finishing = self.finishing.iter().filter(|finishing| finishing.background);
        running.chain(waiting).chain(finishing.map(|finishing| finishing.evaluation))
    }

    /// A thread is there to take over the evaluation lane. False when the lane's last one was neither abandoned nor holds an
    /// evaluation.
    pub(super) fn relieve_held(&mut self) -> bool {
        self.abandoned.relieve() || self.relieving.take().is_some()
    }

    /// True when the thread that holds an evaluation after this job is not the evaluation lane's any more.
    pub(super) fn is_parked(&self, job: u64) -> bool {
        self.holds.iter().any(|hold| hold.job == job && hold.parked)
    }

    /// No thread could be started that would relieve the one that holds an evaluation after this job: it stays the
    /// evaluation lane's. False when there is no such thread.
    pub(super) fn stay(&mut self, job: u64, now: Instant) -> bool {
        let Some((_, connection)) = self.relieving.take_if(|(of, _)| *of == job) else { return false };
        self.changed[Lane::Evaluation as usize] = true;
        match self.holds.iter_mut().find(|hold| hold.job == job) {
            Some(hold) => (hold.parked, hold.start_again) = (false, Some(now + START_AGAIN)),
            // It goes on, and its thread will end with it: somebody must be there then.
            None => {
                self.push(Lane::Control, Request::start(&connection, Lane::Evaluation, job));
                self.relieving = Some((job, connection));
            }
        }
        true
    }

    /// A thread is there to take over the foreground: the evaluation there goes on in the background, and this gets what
    /// there is of it. `None` when there is none any more that is to leave.
    pub(super) fn relieve(&mut self) -> Option<(u64, Reply<Arc<Outcome>>)> {
        let running = self.foreground()?;
        match std::mem::replace(&mut running.place, Place::Background) {
            Place::Leaving(reply) => {
                running.lane = Lane::Background;
                Some((running.id, reply))
            }
            place => {
                running.place = place;
                None
            }
        }
    }

    /// Has an evaluation in the foreground leave that as soon as there is another thread for it, unless there are too many
    /// in the background; or begin there if it waits: then the reply is given back.
    pub(super) fn leave(&mut self, job: u64, reply: Reply<Arc<Outcome>>) -> Option<Reply<Arc<Outcome>>> {
        let full = self.background_and_waiting() >= MAX_BACKGROUND;
        let waiting = &mut self.waiting[Lane::Evaluation as usize];
        if let Some(request) = waiting.iter_mut().find(|request| request.job.id == job && !full) {
            request.background = true;
            self.changed[Lane::Evaluation as usize] = true;
            return Some(reply);
        }
        if let Some(finishing) = self.finishing.iter_mut().find(|finishing| finishing.job == job) {
            finishing.background = true;
            return Some(reply);
        }
        let running = self.find(job).filter(|running| running.lane == Lane::Evaluation && !full)?;
        running.place = Place::Leaving(reply);
        let start = Request::start(&running.connection, Lane::Evaluation, job);
        self.push(Lane::Control, start);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc as Shared;

    use shuttle::sync::{Condvar, Mutex};
    use shuttle::thread;

    use super::*;

    const JOBS: u64 = 4;

    /// A board as the session's threads use it, and how each job ended.
    #[derive(Default)]
    struct Model {
        board: Mutex<Board>,
        changed: Condvar,
        ends: Mutex<Vec<(u64, End)>>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum End {
        Withdrawn,
        Interrupted,
        Done,
    }

    impl Model {
        fn submit(&self, id: u64, background: bool) {
            let mut board = self.board.lock().unwrap();
            let number = board.evaluations.add(&Connection::new(0), id, &"code".into());
            assert_eq!(number, id);
            let kind = JobKind::Evaluate { timing: false, hold: false, record_errors: false, detached: background };
            let builder = Box::new(OutcomeBuilder::blank(id));
            let reply = PendingReply::Evaluation(builder, Box::new(|_| ()));
            board.push(
                Lane::Evaluation,
                Request { background, ..Request::new(&Connection::new(0), Job::empty(id, kind, id), None, reply) },
            );
            drop(board);
            self.changed.notify_all();
        }

        /// What the session does to cancel: it withdraws what waits, or interrupts what runs. Nothing else is there but
        /// what is over.
        fn cancel(&self, id: u64) {
            let mut board = self.board.lock().unwrap();
            if board.take_waiting(id).is_some() {
                self.ends.lock().unwrap().push((id, End::Withdrawn));
            } else if let Some(running) = board.find(id) {
                running.interruption.want(Interrupt::Cancel, REACTION, Instant::now());
            } else {
                assert!(self.ends.lock().unwrap().iter().any(|(over, _)| *over == id), "{id} is nowhere");
            }
            drop(board);
            self.changed.notify_all();
        }

        /// A thread of Lisp's, until nothing is left to do.
        fn pull(self: &Shared<Self>, lane: Lane) {
            loop {
                let mut board = self.board.lock().unwrap();
                let job = loop {
                    let next = board.next(lane, None, Instant::now());
                    match next {
                        Next::Run(job) => break job,
                        Next::Wait(_) => {
                            if self.ends.lock().unwrap().len() as u64 == JOBS {
                                return;
                            }
                            self.changed.notify_all();
                            board = self.changed.wait(board).unwrap();
                        }
                        Next::End => return,
                        Next::Refuse(_) | Next::Release(..) => unreachable!("nothing is held"),
                    }
                };
                drop(board);
                if let JobKind::StartThread { lane, .. } = job.kind {
                    let model = self.clone();
                    thread::spawn(move || {
                        if lane == Lane::Background || model.board.lock().unwrap().relieve().is_some() {
                            model.pull(lane);
                        }
                    });
                    continue;
                }
                thread::yield_now();
                let mut board = self.board.lock().unwrap();
                let running = board.take_running(job.id).expect("it runs");
                let foreground = board.running.iter().filter(|other| other.lane == Lane::Evaluation).count();
                assert!(foreground <= 1 && board.background() <= MAX_BACKGROUND);
                let end = if running.interrupted().is_some() { End::Interrupted } else { End::Done };
                self.ends.lock().unwrap().push((job.id, end));
                let ends = running.is_background();
                drop(board);
                self.changed.notify_all();
                if ends {
                    return;
                }
            }
        }
    }

    /// Whatever is cancelled and sent to the background meanwhile, each job ends once, and none is cancelled in vain.
    #[test]
    fn a_job_waits_or_runs_or_is_over() {
        shuttle::check_random(
            || {
                let model = Shared::new(Model::default());
                let pullers = [Lane::Evaluation, Lane::Control].map(|lane| {
                    let model = model.clone();
                    thread::spawn(move || model.pull(lane))
                });
                let cancelling = model.clone();
                for id in 1..=JOBS {
                    model.submit(id, id % 2 == 0);
                }
                let canceller = thread::spawn(move || (1..JOBS).for_each(|id| cancelling.cancel(id)));
                drop(model.board.lock().unwrap().leave(3, Box::new(|_| ())));
                model.changed.notify_all();
                canceller.join().unwrap();
                for puller in pullers {
                    puller.join().unwrap();
                }
                let mut ends: Vec<_> = model.ends.lock().unwrap().iter().map(|(id, _)| *id).collect();
                ends.sort_unstable();
                assert_eq!(ends, (1..=JOBS).collect::<Vec<_>>());
                assert_eq!(model.ends.lock().unwrap().iter().find(|(id, _)| *id == JOBS), Some(&(JOBS, End::Done)));
            },
            500,
        );
    }

    /// The order of the numbers is that of beginning, in the background too.
    #[test]
    fn what_is_to_be_in_the_background_begins_in_its_turn() {
        let mut board = Board::default();
        let job = |id| Job::empty(id, JobKind::Reset, 0);
        let (now, main) = (Instant::now(), Connection::new(0));
        board.push(Lane::Evaluation, Request::new(&main, job(1), None, PendingReply::Nobody));
        let background = Request { background: true, ..Request::new(&main, job(2), None, PendingReply::Nobody) };
        board.push(Lane::Evaluation, background);
        board.push(Lane::Evaluation, Request::new(&main, job(3), None, PendingReply::Nobody));
        assert!(matches!(board.next(Lane::Evaluation, None, now), Next::Run(Job { id: 1, .. })));
        assert!(matches!(board.next(Lane::Background, None, now), Next::End));
        board.take_running(1).unwrap();
        // Another evaluation would begin; a reset waits for the one in the background.
        assert!(matches!(board.next(Lane::Evaluation, None, now), Next::Wait(Some(_))));
        assert!(matches!(
            board.next(Lane::Control, None, now),
            Next::Run(Job { kind: JobKind::StartThread { .. }, .. })
        ));
        assert!(matches!(board.next(Lane::Background, None, now), Next::Run(Job { id: 2, .. })));
        assert!(board.take_running(2).unwrap().is_background());
        assert!(matches!(board.next(Lane::Evaluation, None, now), Next::Run(Job { id: 3, .. })));
    }
}
