//! Which jobs wait and which run. One lock guards it all, so that a job is always found: it waits, or it runs.
//!
//! Threads that evaluate pull from one queue. One evaluation at a time is in the foreground ([`Board::foreground`]), until it
//! ends, is held, or goes on in the background. The next one begins on the same thread, the *home*, if that is free: what
//! belongs to a thread (a mutex, a C library's state) is there again. Else a thread is started for it, which is the home from
//! then on. What concerns a held evaluation, such as a restart, runs in the foreground, too, but on the thread that holds it
//! ([`Board::next`] with `held`), whichever is the home. A thread that asks for work when there is none for it ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Answer;
use super::abandoned::Abandoned;
use super::activity::{Activity, Asked, Evaluate, HeldRequest, Inspection, Then};
use super::aftermath::Finishing;
use super::connection::Connection;
use super::evaluations::Evaluations;
use super::events::{OutcomeBuilder, Unbalanced};
use super::hold::{RELEASED, TIME_UP};
use super::limits::heap_limit;
use crate::image::interruption::{Interruption, REACTION};
use crate::image::{Interrupt, Job, JobKind, Lane};
use crate::os::thread_supply::ThreadSupply;

/// How many evaluations may be in the background. Each has a thread of its own, with a control stack.
pub(crate) const MAX_BACKGROUND: usize = 16;

/// A job that waits, with whoever asked for it.
pub(super) struct Request {
    /// Whose it is.
    pub(super) connection: Arc<Connection>,
    pub(super) job: Job,
    pub(super) timeout: Option<Duration>,
    pub(super) asked: Asked,
    /// It is to be done in the background.
    pub(super) background: bool,
}

impl Request {
    /// One for the foreground, or for another lane than that of evaluations.
    pub(super) fn new(connection: &Arc<Connection>, mut job: Job, timeout: Option<Duration>, asked: Asked) -> Self {
        job.connection = connection.id;
        Self { connection: connection.clone(), job, timeout, asked, background: false }
    }

    /// The start of a thread that evaluates.
    fn start(connection: &Arc<Connection>) -> Self {
        Self::new(connection, Job::empty(0, JobKind::StartThread, 0), None, Asked::Control)
    }

    /// Moves the job out and leaves its number.
    fn take_job(&mut self) -> Job {
        let Job { id, evaluation, .. } = self.job;
        std::mem::replace(&mut self.job, Job::empty(id, JobKind::Reset, evaluation))
    }
}

/// Where an evaluation is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the foreground, to its end.
    Foreground,
    /// In the foreground, as long as nobody has it leave.
    Leavable,
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
    pub(super) local: bool,
    /// The number of the question that a person is asked about it: until that is over, only what concerns it is done of
    /// its connection's requests.
    question: Option<u64>,
    /// The thread that holds it.
    thread: u64,
}

/// A job in Lisp's hands.
pub(super) struct Running {
    pub(super) id: u64,
    /// Whose it is.
    pub(super) connection: Arc<Connection>,
    pub(super) lane: Lane,
    /// The number of its thread; 0 for one that does not evaluate.
    pub(super) thread: u64,
    pub(super) place: Place,
    /// The evaluation that it belongs to; 0 for none.
    pub(super) evaluation: u64,
    pub(super) activity: Activity,
    /// When its time is up.
    pub(super) deadline: Option<Instant>,
    /// How much of the heap it may keep, in bytes.
    pub(super) heap_limit: Option<usize>,
    /// It was interrupted because it keeps more.
    pub(super) filled_heap: bool,
    pub(super) interruption: Interruption<Interrupt>,
    /// When garbage was last seen being collected while it was interrupted.
    pub(super) collected_at: Option<Instant>,
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
    /// What runs from here on, `hold` being what it is about; `None` for what nobody waits for.
    pub(super) fn new(
        request: Request,
        lane: Lane,
        hold: Option<Box<Hold>>,
        deadline: Option<Instant>,
    ) -> Option<Self> {
        Some(Self {
            id: request.job.id,
            connection: request.connection,
            lane,
            thread: 0,
            place: if request.background { Place::Background } else { Place::Foreground },
            evaluation: request.job.evaluation,
            activity: request.asked.begun(hold)?,
            deadline,
            heap_limit: None,
            filled_heap: false,
            interruption: Interruption::default(),
            collected_at: None,
            questions: Vec::new(),
            end_search: None,
            awaited: None,
        })
    }

    /// A request that ends before it has begun; `None` for what nobody waits for.
    pub(super) fn unbegun(request: Request, lane: Lane) -> Option<Self> {
        Self::new(request, lane, None, None)
    }

    /// Returns the unbalanced texts that are to be searched before the job is over, and what is set to end the search;
    /// `None` if there are none. The job is interrupted for nothing but a cancellation from here on.
    pub(super) fn begin_search(&mut self) -> Option<(Vec<Unbalanced>, Arc<AtomicBool>)> {
        let mut texts = Vec::new();
        self.activity.builders().for_each(|builder| builder.unbalanced(&mut texts));
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
        self.activity.builders().for_each(|builder| builder.add_hints(hints));
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
        self.lane == Lane::Evaluation
    }

    pub(super) fn is_foreground(&self) -> bool {
        self.evaluates() && !self.is_background()
    }

    pub(super) fn is_background(&self) -> bool {
        self.place == Place::Background
    }

    /// Nobody is asked any more about what this is about.
    pub(super) fn end_question(&mut self) -> bool {
        self.activity.hold_mut().is_some_and(|hold| hold.question.take().is_some())
    }

    /// What is held once this is over, as before or for the first time.
    pub(super) fn take_hold(&mut self, until: Option<Instant>) -> Option<Hold> {
        let hold = match &mut self.activity {
            Activity::Evaluate(Evaluate { builder, local, held: true, .. }) => Hold {
                connection: self.connection.clone(),
                job: self.id,
                until,
                builder: builder.anew(),
                local: *local,
                question: None,
                thread: self.thread,
            },
            Activity::Held(about) if about.then != Then::Over => *about.hold.take()?,
            Activity::Evaluate(_) | Activity::Held(_) | Activity::Inspect(_) => return None,
        };
        Some(Hold { job: self.id, until, ..hold })
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

/// What is to be done about the first request that waits for the foreground.
enum Turn {
    /// Nothing yet.
    Wait,
    /// It concerns what is held, and nothing is.
    Refuse,
    /// The thread of this hold is to do it, or to release what it holds before it is done.
    Held(usize),
    /// A thread that holds nothing is to do it.
    Begin,
    /// The same, from this time on.
    BeginAt(Instant),
}

/// The threads that evaluate, by their numbers.
#[derive(Debug, Default)]
struct Threads {
    all: Vec<u64>,
    /// The one that the foreground stays with.
    home: Option<u64>,
    supply: ThreadSupply,
}

impl Threads {
    /// One asks for work. True when it is new.
    fn asks(&mut self, thread: u64) -> bool {
        let is_new = !self.all.contains(&thread);
        if is_new {
            self.all.push(thread);
        }
        is_new
    }

    /// It is not the one any more that the foreground stays with.
    fn leave_home(&mut self, thread: u64) {
        self.home.take_if(|home| *home == thread);
    }
}

/// What waits and what runs.
#[derive(Default)]
pub(super) struct Board {
    waiting: [VecDeque<Request>; Lane::COUNT],
    /// What is to begin in the background, and has had its turn.
    ready: VecDeque<Request>,
    pub(super) running: Vec<Running>,
    threads: Threads,
    /// The lanes whose threads have something new to look at.
    changed: [bool; Lane::COUNT],
    pub(super) evaluations: Evaluations,
    /// The evaluations that Lisp has done its part of.
    pub(super) finishing: Vec<Finishing>,
    /// What is held and nothing is being done about; at most one of a connection.
    pub(super) holds: Vec<Hold>,
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
        let evaluates = |running: &Running| {
            running.evaluates() && !matches!(running.activity, Activity::Inspect(Inspection::Query(..)))
        };
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

    /// What `thread`, one of `lane`, is to do. `held`: it holds an evaluation, and this is the job that it did last.
    pub(super) fn next(&mut self, lane: Lane, thread: u64, held: Option<u64>, now: Instant) -> Next {
        match lane {
            Lane::Evaluation => {
                let is_new = self.threads.asks(thread);
                self.settle(now);
                let next = match held {
                    None => self.next_evaluation(thread, now),
                    Some(job) => self.next_held(job, now),
                };
                if is_new {
                    self.threads.supply.arrived();
                    self.settle(now);
                }
                next
            }
            Lane::Signals => Next::End,
            Lane::Inspection | Lane::Control => match self.waiting[lane as usize].pop_front() {
                Some(request) => Next::Run(self.begin(lane, 0, request, None, now)),
                None => Next::Wait(None),
            },
        }
    }

    /// Has what is to be in the background be ready when its turn has come, threads that have something to do look at it, and
    /// threads started for what no thread is free for. Called whenever the board has changed.
    pub(super) fn settle(&mut self, now: Instant) {
        let mut turn = self.turn(now);
        while let Turn::Begin = turn
            && self.background() < MAX_BACKGROUND
            && let Some(first) = self.first_evaluation()
            && self.waiting[Lane::Evaluation as usize][first].background
        {
            let request = self.pop_evaluation();
            self.ready.push_back(request);
            turn = self.turn(now);
        }
        self.changed[Lane::Evaluation as usize] |= !matches!(turn, Turn::Wait) || !self.ready.is_empty();
        let needs_home = !matches!(turn, Turn::Wait | Turn::Held(_)) && !self.is_home_free();
        let needed = self.ready.len() + usize::from(needs_home);
        while let Some(first) = self.waiting[Lane::Evaluation as usize].iter().chain(&self.ready).next()
            && self.threads.supply.start(needed, now)
        {
            let start = Request::start(&first.connection);
            self.push(Lane::Control, start);
        }
    }

    /// What is to be done about the first request that waits for the foreground.
    fn turn(&mut self, now: Instant) -> Turn {
        if self.foreground().is_some() {
            return Turn::Wait;
        }
        let Some(first) = self.first_evaluation().map(|first| &self.waiting[Lane::Evaluation as usize][first]) else {
            return Turn::Wait;
        };
        let (kind, background) = (first.job.kind, first.background);
        if let Some(hold) = self.hold_for(first) {
            return Turn::Held(hold);
        }
        if kind != JobKind::Reset {
            self.reset_at = None;
        }
        if kind.concerns_held() {
            return Turn::Refuse;
        }
        if background && self.background() >= MAX_BACKGROUND {
            return Turn::Wait;
        }
        if kind == JobKind::Reset && self.background() > 0 {
            // They are being ended, and would go on in what is reset.
            let unwinding = self.running.iter().filter(|running| running.is_background());
            let due = unwinding.filter_map(|running| running.interruption.due()).max();
            let until = *self.reset_at.get_or_insert(now + REACTION);
            let until = due.map_or(until, |due| due.max(until));
            if now < until {
                return Turn::BeginAt(until);
            }
        }
        Turn::Begin
    }

    /// True when the home is there and holds nothing.
    fn is_home_free(&self) -> bool {
        self.threads.home.is_some_and(|home| self.holds.iter().all(|hold| hold.thread != home))
    }

    /// What a thread is to do that holds an evaluation.
    fn next_held(&mut self, job: u64, now: Instant) -> Next {
        let Some(own) = self.holds.iter().position(|hold| hold.job == job) else { return Next::Wait(None) };
        let until = self.holds[own].until;
        match self.turn(now) {
            Turn::Refuse => Next::Refuse(Box::new(self.pop_evaluation())),
            Turn::Held(target) if target == own => {
                let first = self.first_evaluation().map(|first| &self.waiting[Lane::Evaluation as usize][first]);
                if !first.is_some_and(|first| first.job.kind.concerns_held()) {
                    return Next::Release(Box::new(self.holds.swap_remove(own)), RELEASED);
                }
                let mut request = self.pop_evaluation();
                let hold = Box::new(self.holds.swap_remove(own));
                if let Asked::Held(HeldRequest::Resume(builder, _)) = &mut request.asked {
                    // What was held goes on under its own limits. An error is in a form of its code.
                    request.timeout = hold.builder.timeout();
                    **builder = hold.builder.anew();
                    request.job.evaluation = builder.evaluation();
                }
                Next::Run(self.begin(Lane::Evaluation, hold.thread, request, Some(hold), now))
            }
            _ if self.foreground().is_some() => Next::Wait(None),
            _ if until.is_some_and(|until| until <= now) => {
                Next::Release(Box::new(self.holds.swap_remove(own)), TIME_UP)
            }
            _ => Next::Wait(until),
        }
    }

    /// Which of the holds a request is for; `None` when it is for a thread that holds nothing. What is held comes to its end
    /// before a reset.
    fn hold_for(&self, request: &Request) -> Option<usize> {
        match request.job.kind {
            JobKind::Reset if self.holds.is_empty() => None,
            JobKind::Reset => Some(0),
            _ => self.holds.iter().position(|hold| hold.connection.id == request.connection.id),
        }
    }

    /// What a thread is to do that holds nothing.
    fn next_evaluation(&mut self, thread: u64, now: Instant) -> Next {
        let is_home = self.threads.home == Some(thread);
        let until = if is_home || !self.is_home_free() {
            match self.turn(now) {
                Turn::Refuse => return Next::Refuse(Box::new(self.pop_evaluation())),
                Turn::Begin => {
                    self.threads.home = Some(thread);
                    self.reset_at = None;
                    let request = self.pop_evaluation();
                    return Next::Run(self.begin(Lane::Evaluation, thread, request, None, now));
                }
                Turn::BeginAt(time) => Some(time),
                Turn::Wait | Turn::Held(_) => None,
            }
        } else {
            None
        };
        if *self.threads.home.get_or_insert(thread) == thread {
            return Next::Wait(until);
        }
        match self.ready.pop_front() {
            Some(request) => Next::Run(self.begin(Lane::Evaluation, thread, request, None, now)),
            None => Next::End,
        }
    }

    /// A thread that evaluates is gone.
    pub(super) fn thread_ended(&mut self, thread: u64) {
        self.threads.all.retain(|other| *other != thread);
        self.threads.leave_home(thread);
    }

    /// No thread could be started. Takes out the request that gets none, if it was for the background; what waits for the
    /// foreground gets one later, from the time on that this returns, or the home when that is free again.
    pub(super) fn thread_refused(&mut self, reason: &str, now: Instant) -> Result<Request, Instant> {
        if self.ready.len() >= self.threads.supply.starting()
            && let Some(request) = self.ready.pop_back()
        {
            self.threads.supply.arrived();
            return Ok(request);
        }
        if self.threads.home.is_none() {
            self.abandoned.refused(reason);
        }
        Err(self.threads.supply.refused(now))
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
        let busy = self.running.iter_mut().filter_map(|running| running.activity.hold_mut());
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
        hold.is_some_and(|hold| hold.question.take().is_some())
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

    /// Returns all holds but those that are being resumed or released.
    fn standing_holds(&self) -> impl Iterator<Item = &Hold> {
        let in_use = self.running.iter().filter_map(|running| match &running.activity {
            Activity::Held(about) if about.request.leaves_it_held() => about.hold.as_deref(),
            _ => None,
        });
        self.holds.iter().chain(in_use)
    }

    /// Returns true while this evaluation is held, also while code runs in one of its frames.
    pub(super) fn is_held(&self, evaluation: u64) -> bool {
        self.standing_holds().any(|hold| hold.builder.evaluation() == evaluation)
    }

    /// Returns the evaluation that a connection holds, also while code runs in one of its frames.
    pub(super) fn held_by(&self, connection: u64) -> Option<u64> {
        let hold = self.standing_holds().find(|hold| hold.connection.id == connection);
        hold.map(|hold| hold.builder.evaluation())
    }

    /// Returns true when a connection holds nothing and has nothing under way that could be held by the time that it is over.
    pub(super) fn can_hold_nothing(&self, connection: u64) -> bool {
        let lane = &self.waiting[Lane::Evaluation as usize];
        self.holds.iter().all(|hold| hold.connection.id != connection)
            && self.running.iter().all(|running| running.connection.id != connection)
            && lane.iter().all(|request| request.connection.id != connection)
    }

    /// Has a request run from now on; `hold` is what it is about.
    pub(super) fn begin(
        &mut self,
        lane: Lane,
        thread: u64,
        mut request: Request,
        hold: Option<Box<Hold>>,
        now: Instant,
    ) -> Job {
        let deadline = request.timeout.and_then(|timeout| now.checked_add(timeout));
        // Lisp gets the job, the rest stays here.
        let mut job = request.take_job();
        let background = request.background;
        let evaluation = request.asked.evaluation();
        let Some(mut running) = Running::new(request, lane, hold, deadline) else { return job };
        if let JobKind::Evaluate { background: begins_there, detached, .. } = &mut job.kind {
            *begins_there = background;
            if *detached && !background {
                running.place = Place::Leavable;
            }
        }
        running.thread = thread;
        if running.evaluates() {
            running.heap_limit = heap_limit();
        }
        if let Some(evaluation) = evaluation {
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
        // Those that hold something look at their time again.
        self.changed[Lane::Evaluation as usize] |= running.is_foreground() && !self.holds.is_empty();
        Some(running)
    }

    /// Takes out the evaluation that waits under this number.
    pub(super) fn take_waiting(&mut self, job: u64) -> Option<Request> {
        [&mut self.waiting[Lane::Evaluation as usize], &mut self.ready].into_iter().find_map(|queue| {
            let index = queue.iter().position(|request| request.job.id == job)?;
            queue.remove(index)
        })
    }

    /// Takes out what a connection has waiting, with the lane that it waits for.
    pub(super) fn take_waiting_of(&mut self, connection: u64) -> Vec<(Lane, Request)> {
        let mut taken = Vec::new();
        for (lane, queue) in self.queues() {
            let (of_it, others): (VecDeque<_>, _) =
                std::mem::take(queue).into_iter().partition(|request| request.connection.id == connection);
            *queue = others;
            taken.extend(of_it.into_iter().map(|request| (lane, request)));
        }
        taken
    }

    /// Takes out all that waits, with the lane that it waits for.
    pub(super) fn take_all_waiting(&mut self) -> Vec<(Lane, Request)> {
        let queues = self.queues().into_iter();
        queues.flat_map(|(lane, queue)| std::mem::take(queue).into_iter().map(move |request| (lane, request))).collect()
    }

    /// Where a connection's requests wait.
    fn queues(&mut self) -> [(Lane, &mut VecDeque<Request>); 3] {
        let [evaluations, inspections, ..] = &mut self.waiting;
        [(Lane::Evaluation, evaluations), (Lane::Evaluation, &mut self.ready), (Lane::Inspection, inspections)]
    }

    /// What runs in the foreground.
    pub(super) fn foreground(&mut self) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.is_foreground())
    }

    /// How many evaluations are in the background, or are about to begin there.
    pub(super) fn background(&self) -> usize {
        let running = self.running.iter().filter(|running| running.is_background()).count();
        running + self.ready.len()
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
        let waiting = self.ready.iter().chain(behind);
        let waiting = waiting.map(|request| request.job.evaluation);
        let running = self.running.iter().filter(|running| running.is_background()).map(|running| running.evaluation);
        let finishing = self.finishing.iter().filter(|finishing| finishing.background);
        running.chain(waiting).chain(finishing.map(|finishing| finishing.evaluation))
    }

    /// Has an evaluation that may be in the background go on or begin there, unless there are too many or it is about to end.
    /// False when it does not.
    pub(super) fn leave(&mut self, job: u64) -> bool {
        let full = self.background_and_waiting() >= MAX_BACKGROUND;
        let waiting = &mut self.waiting[Lane::Evaluation as usize];
        let may_leave = |it: &Request| matches!(it.job.kind, JobKind::Evaluate { detached: true, .. });
        if let Some(request) = waiting.iter_mut().find(|it| it.job.id == job && may_leave(it) && !full) {
            request.background = true;
        } else if let Some(finishing) = self.finishing.iter_mut().find(|finishing| finishing.job == job) {
            finishing.background = true;
        } else if let Some(running) =
            self.foreground().filter(|it| it.id == job && it.place == Place::Leavable && !full)
        {
            running.place = Place::Background;
            let thread = running.thread;
            self.threads.leave_home(thread);
        } else {
            return false;
        }
        true
    }

    /// The thread of this job, which was taken out, serves no lane any more. It ends when the job does.
    pub(super) fn abandon_thread(&mut self, running: &Running) {
        self.abandoned.add(running.id);
        self.threads.leave_home(running.thread);
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod unheard;

#[cfg(test)]
mod tests {
    use super::*;

    fn reset(id: u64, background: bool) -> Request {
        Request { background, ..unheard::request(&Connection::new(0), id, JobKind::Reset) }
    }

    /// Else it would be Lisp's main thread, and in the background.
    #[test]
    fn first_thread_does_not_begin_in_the_background() {
        let mut board = Board::default();
        let now = Instant::now();
        board.push(Lane::Evaluation, reset(1, true));
        board.settle(now);
        let next = |board: &mut Board, thread| board.next(Lane::Evaluation, thread, None, now);
        assert!(matches!(next(&mut board, 1), Next::Wait(None)));
        assert!(matches!(board.next(Lane::Control, 0, None, now), Next::Run(Job { kind: JobKind::StartThread, .. })));
        assert!(matches!(next(&mut board, 2), Next::Run(Job { id: 1, .. })));
        board.push(Lane::Evaluation, reset(2, false));
        board.take_running(1).unwrap();
        assert!(matches!(next(&mut board, 2), Next::End));
        assert!(matches!(next(&mut board, 1), Next::Run(Job { id: 2, .. })));
    }

    /// The order of the numbers is that of beginning, in the background too. The foreground stays with its thread.
    #[test]
    fn background_jobs_begin_in_their_turn() {
        let mut board = Board::default();
        let now = Instant::now();
        for (id, background) in [(1, false), (2, true), (3, false)] {
            board.push(Lane::Evaluation, reset(id, background));
        }
        let next = |board: &mut Board, thread| board.next(Lane::Evaluation, thread, None, now);
        assert!(matches!(next(&mut board, 1), Next::Run(Job { id: 1, .. })));
        assert!(matches!(next(&mut board, 2), Next::End));
        board.take_running(1).unwrap();
        // Another evaluation would begin; a reset waits for the one in the background.
        assert!(matches!(next(&mut board, 1), Next::Wait(Some(time)) if time > now));
        assert!(matches!(board.next(Lane::Control, 0, None, now), Next::Run(Job { kind: JobKind::StartThread, .. })));
        assert!(matches!(next(&mut board, 3), Next::Run(Job { id: 2, .. })));
        assert!(board.take_running(2).unwrap().is_background());
        assert!(matches!(next(&mut board, 3), Next::End));
        assert!(matches!(next(&mut board, 1), Next::Run(Job { id: 3, .. })));
    }
}
