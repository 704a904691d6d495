//! Which jobs wait and which run. One lock guards it all, so that a job is always found: it waits, or it runs.
//!
//! One evaluation at a time is in the foreground, on the evaluation lane's thread. Those in the background have a thread
//! each: of the background lane, or the one on which they began in the foreground; another one takes its place there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::aftermath::{Due, Finishing};
use super::evaluations::Evaluations;
use super::events::OutcomeBuilder;
use super::hold::{RELEASED, TIME_UP};
use super::limits::{INTERRUPTION_GRACE, Interruption, heap_limit};
use super::pending::PendingReply;
use super::{Answer, Reply};
use crate::image::{Interrupt, Job, JobKind, Lane};
use crate::outcome::Outcome;

/// How many evaluations may be in the background. Each has a thread of its own, with a control stack.
pub(crate) const MAX_BACKGROUND: usize = 16;

/// A job that waits, with what is to become of its answer.
pub(super) struct Request {
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
    pub(super) fn new(job: Job, timeout: Option<Duration>, reply: PendingReply) -> Self {
        Self { job, timeout, reply, background: false, due: None }
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
    Leaving(Reply<Outcome>),
    Background,
}

/// A job in Lisp's hands.
pub(super) struct Running {
    pub(super) id: u64,
    pub(super) lane: Lane,
    pub(super) place: Place,
    /// The evaluation that it belongs to; 0 for none.
    pub(super) evaluation: u64,
    pub(super) reply: PendingReply,
    /// The package was bound for it alone.
    pub(super) local: bool,
    /// When it is interrupted (again).
    pub(super) deadline: Option<Instant>,
    /// How much of the heap it may keep, in bytes.
    pub(super) heap_limit: Option<usize>,
    /// It was interrupted because it keeps more.
    pub(super) filled_heap: bool,
    pub(super) interruption: Option<Interruption>,
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
    /// Questions about the error state, which wait for its end because it was cancelled.
    pub(super) settled: Vec<Answer>,
}

impl Running {
    pub(super) fn new(request: Request, lane: Lane, deadline: Option<Instant>) -> Self {
        Self {
            id: request.job.id,
            lane,
            place: if request.background { Place::Background } else { Place::Foreground },
            evaluation: request.job.evaluation,
            reply: request.reply,
            local: false,
            deadline,
            heap_limit: None,
            filled_heap: false,
            interruption: None,
            due: request.due,
            holds: false,
            unchanged: false,
            released: false,
            unwinding: None,
            refused: None,
            settled: Vec::new(),
        }
    }

    /// True for what the user's code is evaluated by.
    pub(super) fn evaluates(&self) -> bool {
        matches!(self.lane, Lane::Evaluation | Lane::Background)
    }

    pub(super) fn is_background(&self) -> bool {
        matches!(self.place, Place::Background)
    }

    /// Why it was first interrupted, if it was.
    pub(super) fn interrupted(&self) -> Option<Interrupt> {
        self.interruption.as_ref().map(|interruption| interruption.reason)
    }
}

/// What a thread that asks for a job is to do.
pub(super) enum Next {
    /// This job, which runs from now on.
    Run(Job),
    /// Ask again: this cannot be done, since nothing is held.
    Refuse(Request),
    /// Ask again when what is held is to be released, which this says why.
    Release(&'static str),
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
    /// Set while an evaluation is held and nothing is being done with it: when it is released at last.
    pub(super) held_until: Option<Option<Instant>>,
    /// The number of the question that a person is asked about it: until that is over, only what concerns it is done.
    question: Option<u64>,
    /// What the evaluation that was held last comes to is built from this when it goes on: its code, under its limits.
    pub(super) held_as: Option<OutcomeBuilder>,
    /// The evaluation in the foreground, or held, binds the package.
    local: bool,
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

    /// The lanes that have something new to look at, once.
    pub(super) fn take_changed(&mut self) -> [bool; Lane::COUNT] {
        std::mem::take(&mut self.changed)
    }

    /// What a thread of `lane` is to do. `begin` says, of an evaluation that begins, when it is to be interrupted.
    pub(super) fn next(&mut self, lane: Lane, now: Instant) -> Next {
        match lane {
            Lane::Evaluation => self.next_evaluation(now),
            Lane::Background => match self.waiting[lane as usize].pop_front() {
                Some(request) => Next::Run(self.begin(lane, request, now)),
                // It was cancelled meanwhile.
                None => Next::End,
            },
            Lane::Signals => Next::End,
            Lane::Inspection | Lane::Control => match self.waiting[lane as usize].pop_front() {
                Some(request) => Next::Run(self.begin(lane, request, now)),
                None => Next::Wait(None),
            },
        }
    }

    fn next_evaluation(&mut self, now: Instant) -> Next {
        let first = self.first_evaluation();
        let concerns_held = first.map(|first| self.waiting[Lane::Evaluation as usize][first].job.kind.concerns_held());
        match (self.held_until, concerns_held) {
            (Some(_), Some(true)) => {
                let mut request = self.pop_evaluation();
                self.held_until = None;
                if let (PendingReply::Resumed(builder, _), Some(held)) = (&mut request.reply, &self.held_as) {
                    // What was held goes on under its own limits. An error is in a form of its code.
                    request.timeout = held.timeout();
                    **builder = held.anew();
                    request.job.evaluation = builder.evaluation();
                }
                Next::Run(self.begin(Lane::Evaluation, request, now))
            }
            (Some(until), None) if until.is_none_or(|until| now < until) => Next::Wait(until),
            (Some(_), waits) => {
                self.held_until = None;
                Next::Release(if waits.is_some() { RELEASED } else { TIME_UP })
            }
            (None, None) => Next::Wait(None),
            (None, Some(true)) => Next::Refuse(self.pop_evaluation()),
            (None, Some(false)) => self.next_new(now),
        }
    }

    /// What is to be done about the first evaluation that waits, or reset, when nothing runs or is held.
    fn next_new(&mut self, now: Instant) -> Next {
        let background = self.background();
        let Some(first) = self.waiting[Lane::Evaluation as usize].front() else { return Next::Wait(None) };
        if first.job.kind == JobKind::Reset && background > 0 {
            // They are being ended, and would go on in what is reset.
            let until = *self.reset_at.get_or_insert(now + INTERRUPTION_GRACE);
            if now < until {
                return Next::Wait(Some(until));
            }
        }
        if first.background {
            if background < MAX_BACKGROUND {
                let request = self.pop_evaluation();
                let thread = JobKind::StartThread { lane: Lane::Background, instead: request.job.id };
                self.push(Lane::Background, request);
                self.push(Lane::Control, Request::new(Job::empty(0, thread, 0), None, PendingReply::Nobody));
                return self.next_evaluation(now);
            }
            return Next::Wait(None);
        }
        self.reset_at = None;
        let request = self.pop_evaluation();
        Next::Run(self.begin(Lane::Evaluation, request, now))
    }

    /// Where the first request is that may be done now.
    fn first_evaluation(&self) -> Option<usize> {
        let asks = self.held_until.is_some() && self.question.is_some();
        let mut waiting = self.waiting[Lane::Evaluation as usize].iter();
        waiting.position(|request| !asks || request.job.kind.concerns_held() || request.job.kind == JobKind::Reset)
    }

    fn pop_evaluation(&mut self) -> Request {
        let first = self.first_evaluation().expect("it was looked at");
        self.waiting[Lane::Evaluation as usize].remove(first).expect("it is there")
    }

    /// True when what comes next releases what is held.
    pub(super) fn releases_held(&self) -> bool {
        self.held_until.is_some() && self.question.is_none() && self.waiting[Lane::Evaluation as usize].is_empty()
    }

    /// A person is asked about what is held: `question` is the number of that, perhaps in place of one that is asked
    /// again. True for the first one.
    #[cfg(feature = "mcp")]
    pub(super) fn ask(&mut self, question: u64) -> bool {
        self.held_until.is_some() && self.question.replace(question).is_none()
    }

    /// True while this is what a person is asked.
    #[cfg(feature = "mcp")]
    pub(super) fn asks(&self, question: u64) -> bool {
        self.question == Some(question)
    }

    /// Nobody is asked any more. False when nobody was.
    pub(super) fn end_question(&mut self) -> bool {
        let ended = self.question.take().is_some();
        self.changed[Lane::Evaluation as usize] |= ended;
        ended
    }

    /// Has a request run from now on.
    pub(super) fn begin(&mut self, lane: Lane, mut request: Request, now: Instant) -> Job {
        let deadline = request.timeout.and_then(|timeout| now.checked_add(timeout));
        // Lisp gets the job, the rest stays here.
        let job = request.take_job();
        if lane == Lane::Control {
            return job;
        }
        let mut running = Running::new(request, lane, deadline);
        if job.kind == JobKind::Release {
            running.unwinding = self.held_as.as_ref().map(|held| Box::new(held.anew()));
        }
        if running.evaluates() {
            running.heap_limit = heap_limit();
            running.local = match job.kind {
                JobKind::Evaluate { .. } => !job.name.is_empty(),
                _ => self.local,
            };
            if lane == Lane::Evaluation {
                self.local = running.local;
            }
        }
        if let Some(evaluation) = running.reply.evaluation() {
            self.evaluations.begin(evaluation, job.id);
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
        let running = self.running.swap_remove(index);
        if running.is_background() {
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

    /// Takes out all that waits for this lane.
    #[cfg(feature = "mcp")]
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

    /// The numbers of the evaluations in the background.
    pub(super) fn background_numbers(&self) -> impl Iterator<Item = u64> {
        let waiting = self.waiting[Lane::Background as usize].iter().map(|request| request.job.evaluation);
        let running = self.running.iter().filter(|running| running.is_background()).map(|running| running.evaluation);
        let finishing = self.finishing.iter().filter(|finishing| finishing.background);
        running.chain(waiting).chain(finishing.map(|finishing| finishing.evaluation))
    }

    /// A thread is there to take over the foreground: the evaluation there goes on in the background, and this gets what
    /// there is of it. `None` when there is none any more that is to leave.
    pub(super) fn relieve(&mut self) -> Option<(u64, Reply<Outcome>)> {
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

    /// Has an evaluation in the foreground leave that as soon as there is another thread for it, or begin in the
    /// background if it waits: then the reply is given back.
    pub(super) fn leave(&mut self, job: u64, reply: Reply<Outcome>) -> Leave {
        let full = self.background_and_waiting() >= MAX_BACKGROUND;
        let waiting = &mut self.waiting[Lane::Evaluation as usize];
        if let Some(request) = waiting.iter_mut().find(|request| request.job.id == job && !full) {
            request.background = true;
            self.changed[Lane::Evaluation as usize] = true;
            return Leave::Waiting(reply);
        }
        if let Some(finishing) = self.finishing.iter_mut().find(|finishing| finishing.job == job) {
            finishing.background = true;
            return Leave::Waiting(reply);
        }
        let Some(running) = self.find(job).filter(|running| running.lane == Lane::Evaluation && !full) else {
            return Leave::Stays;
        };
        running.place = Place::Leaving(reply);
        let thread = JobKind::StartThread { lane: Lane::Evaluation, instead: job };
        self.push(Lane::Control, Request::new(Job::empty(0, thread, 0), None, PendingReply::Nobody));
        Leave::Soon
    }
}

/// What becomes of an evaluation that is to leave the foreground.
pub(super) enum Leave {
    /// It does when there is a thread for that.
    Soon,
    /// It has not begun, and will not in the foreground.
    Waiting(Reply<Outcome>),
    /// It is over, or there are too many in the background.
    Stays,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc as Shared;

    use shuttle::sync::{Condvar, Mutex};
    use shuttle::thread;

    use super::super::limits::Interruption;
    use super::*;
    use crate::config::Limits;

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
            let number = board.evaluations.add(id, "code");
            assert_eq!(number, id);
            let kind = JobKind::Evaluate { timing: false, hold: false, record_errors: false, detached: background };
            let builder = Box::new(OutcomeBuilder::new(id, String::new(), Limits::default(), None));
            let reply = PendingReply::Evaluation(builder, Box::new(|_| ()));
            board.push(Lane::Evaluation, Request { background, ..Request::new(Job::empty(id, kind, id), None, reply) });
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
                running.interruption = Some(Interruption::new(Interrupt::Cancel));
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
                    let next = board.next(lane, Instant::now());
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
                        Next::Refuse(_) | Next::Release(_) => unreachable!("nothing is held"),
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
                let end = if running.interruption.is_some() { End::Interrupted } else { End::Done };
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
        let now = Instant::now();
        board.push(Lane::Evaluation, Request::new(job(1), None, PendingReply::Nobody));
        let background = Request { background: true, ..Request::new(job(2), None, PendingReply::Nobody) };
        board.push(Lane::Evaluation, background);
        board.push(Lane::Evaluation, Request::new(job(3), None, PendingReply::Nobody));
        assert!(matches!(board.next(Lane::Evaluation, now), Next::Run(Job { id: 1, .. })));
        assert!(matches!(board.next(Lane::Background, now), Next::End));
        board.take_running(1).unwrap();
        // Another evaluation would begin; a reset waits for the one in the background.
        assert!(matches!(board.next(Lane::Evaluation, now), Next::Wait(Some(_))));
        assert!(matches!(board.next(Lane::Control, now), Next::Run(Job { kind: JobKind::StartThread { .. }, .. })));
        assert!(matches!(board.next(Lane::Background, now), Next::Run(Job { id: 2, .. })));
        assert!(board.take_running(2).unwrap().is_background());
        assert!(matches!(board.next(Lane::Evaluation, now), Next::Run(Job { id: 3, .. })));
    }
}
