//! A model of the session around the board: Lisp's threads, the control lane, the clock, and clients that submit, hold, cancel
//! and leave at random. Shuttle tries many schedules of their steps.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::*;
use crate::config::Limits;
use crate::session::activity::{HandledErrors, Submission};
use crate::session::events::InspectionBuilder;

/// The number of clients, and of what each of them asks.
const CLIENTS: u64 = 3;
const REQUESTS: u64 = 4;
/// Schedules that are tried, unless the environment variable `SCHEDULES` says how many.
const SCHEDULES: usize = 2_000;

/// What is known beside the board.
struct Known {
    board: Board,
    now: Instant,
    /// What was submitted, and whether it has ended.
    jobs: Vec<(u64, bool)>,
    /// Those that began in the foreground, with the connection, in their order.
    begun: Vec<(u64, u64)>,
    clients: usize,
    /// The connections that have ended.
    ended: Vec<u64>,
    next_thread: u64,
}

struct Model {
    known: Mutex<Known>,
    /// For the threads of each lane.
    changed: [Condvar; Lane::COUNT],
    /// For whoever waits for the end.
    ended: Condvar,
}

impl Known {
    fn end(&mut self, job: u64) {
        if let Some((_, has_ended)) = self.jobs.iter_mut().find(|(id, _)| *id == job) {
            assert!(!std::mem::replace(has_ended, true), "job {job} ended twice");
        }
    }

    /// True when nothing is to be done any more.
    fn is_over(&self) -> bool {
        self.clients == 0 && self.jobs.iter().all(|(_, has_ended)| *has_ended) && self.board.holds.is_empty()
    }

    fn check(&mut self) {
        let foreground = self.board.running.iter().filter(|running| running.is_foreground()).count();
        assert!(foreground <= 1, "{foreground} are in the foreground");
        assert!(self.board.background() <= MAX_BACKGROUND);
        let holders: HashSet<_> = self.board.holds.iter().map(|hold| hold.connection.id).collect();
        assert_eq!(holders.len(), self.board.holds.len(), "two are held of one connection");
        for (job, has_ended) in &self.jobs {
            let waits = self.board.waiting.iter().flatten().chain(&self.board.ready).any(|it| it.job.id == *job);
            let runs = self.board.running.iter().any(|running| running.id == *job);
            assert_eq!(usize::from(waits) + usize::from(runs) + usize::from(*has_ended), 1, "where is job {job}?");
        }
    }
}

impl Model {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap()
    }

    /// Gives up the board as the session does.
    fn leave(&self, mut known: MutexGuard<'_, Known>) {
        known.check();
        self.tell_changes(&mut known);
        let is_over = known.is_over();
        drop(known);
        self.ended.notify_all();
        if is_over {
            self.changed.iter().for_each(Condvar::notify_all);
        }
    }

    fn tell_changes(&self, known: &mut Known) {
        let now = known.now;
        known.board.settle(now);
        for (lane, _) in known.board.take_changed().iter().enumerate().filter(|(_, changed)| **changed) {
            self.changed[lane].notify_all();
        }
    }

    /// A thread of Lisp's that evaluates.
    fn evaluate(self: &Arc<Self>) {
        let mut known = self.lock();
        known.next_thread += 1;
        let thread = known.next_thread;
        drop(known);
        let mut held = None;
        while let Some(job) = self.next(thread, held) {
            let holds = match job.kind {
                JobKind::Evaluate { hold, .. } => hold,
                JobKind::FrameLocals(_) => true,
                _ => false,
            };
            // What it does takes a while. It may be over before its interruption, or because of that.
            (0..thread_rng().gen_range(0..3)).for_each(|_| thread::yield_now());
            let mut known = self.lock();
            held = None;
            match known.board.take_running(job.id) {
                Some(mut running) => {
                    if holds && running.interrupted().is_none() {
                        match &mut running.activity {
                            Activity::Evaluate(evaluate) => evaluate.held = true,
                            Activity::Held(about) => about.then = Then::Unchanged,
                            Activity::Inspect(_) => unreachable!("it fails nowhere"),
                        }
                    }
                    if let Some(hold) = running.take_hold(None) {
                        assert_eq!(hold.thread, thread);
                        let connection = hold.connection.clone();
                        known.board.holds.push(hold);
                        if known.ended.contains(&connection.id) {
                            known.board.push(Lane::Evaluation, release(&connection));
                        }
                        held = Some(job.id);
                    }
                    known.end(job.id);
                    self.leave(known);
                }
                None => {
                    assert!(known.board.abandoned.ended(job.id), "job {} was taken by nobody", job.id);
                    self.leave(known);
                    break;
                }
            }
            // The user's code may end its thread.
            if held.is_none() && thread_rng().gen_bool(0.05) {
                break;
            }
        }
        let mut known = self.lock();
        known.board.thread_ended(thread);
        self.leave(known);
    }

    fn next(&self, thread: u64, held: Option<u64>) -> Option<Job> {
        let mut known = self.lock();
        loop {
            let now = known.now;
            let home = known.board.threads.home.filter(|_| known.board.is_home_free());
            match known.board.next(Lane::Evaluation, thread, held, now) {
                Next::Run(job) => {
                    let running = known.board.find(job.id).expect("it runs");
                    let connection = running.connection.id;
                    if running.is_foreground() && matches!(job.kind, JobKind::Evaluate { .. }) {
                        assert!(home.is_none_or(|home| home == thread), "the foreground left a free thread");
                        known.begun.push((connection, job.id));
                    }
                    self.leave(known);
                    return Some(job);
                }
                Next::Release(hold, _) => {
                    let release = release(&hold.connection);
                    let job = known.board.begin(Lane::Evaluation, thread, release, Some(hold), now);
                    self.leave(known);
                    return Some(job);
                }
                Next::Refuse(request) => {
                    known.end(request.job.id);
                    self.leave(known);
                    known = self.lock();
                }
                Next::Wait(until) => {
                    if known.is_over() {
                        return None;
                    }
                    self.tell_changes(&mut known);
                    let Some(until) = until else {
                        known = self.changed[Lane::Evaluation as usize].wait(known).unwrap();
                        continue;
                    };
                    // The time comes some day.
                    drop(known);
                    thread::yield_now();
                    known = self.lock();
                    known.now = known.now.max(until);
                }
                Next::End => {
                    self.leave(known);
                    return None;
                }
            }
        }
    }

    /// The control lane's thread. Where it fails to start one, the clock tries again later.
    fn control(self: &Arc<Self>) {
        let mut known = self.lock();
        loop {
            let now = known.now;
            match known.board.next(Lane::Control, 0, None, now) {
                Next::Run(Job { kind: JobKind::StartThread, .. }) => {
                    if thread_rng().gen_bool(0.1) {
                        match known.board.thread_refused("there is no room", now) {
                            Ok(request) => known.end(request.job.id),
                            Err(again) => known.now = again,
                        }
                    } else {
                        let model = self.clone();
                        thread::spawn(move || model.evaluate());
                    }
                    self.leave(known);
                    known = self.lock();
                }
                Next::Run(_) => {}
                _ if known.is_over() => return,
                _ => known = self.changed[Lane::Control as usize].wait(known).unwrap(),
            }
        }
    }

    /// A client, with a connection of its own that may end and be followed by another.
    fn client(&self, number: u64) {
        let mut connection = Connection::new(number * 100);
        for request in 0..REQUESTS {
            let id = number * 100 + request;
            let mut known = self.lock();
            let detached = thread_rng().gen_bool(0.5);
            let kind = match thread_rng().gen_range(0..8) {
                0 => JobKind::InvokeRestart(1),
                1 => JobKind::FrameLocals(0),
                2 => JobKind::Reset,
                _ => evaluation(detached),
            };
            let mut request = Request::new(&connection, Job::empty(id, kind, 0), None, asked(kind));
            request.background = matches!(kind, JobKind::Evaluate { detached: true, .. }) && thread_rng().gen_bool(0.5);
            known.jobs.push((id, false));
            known.board.push(Lane::Evaluation, request);
            self.leave(known);
            let mut known = self.lock();
            match thread_rng().gen_range(0..6) {
                0 => match known.board.take_waiting(id) {
                    Some(_) => known.end(id),
                    None => {
                        if let Some(running) = known.board.find(id) {
                            running.interruption.want(Interrupt::Cancel, REACTION, Instant::now());
                        }
                    }
                },
                1 => drop(known.board.leave(id)),
                // It does not react to being interrupted.
                2 => {
                    if let Some(running) = known.board.take_running(id) {
                        known.board.abandon_thread(&running);
                        known.end(id);
                    }
                }
                3 => {
                    // It leaves, and what it holds is released; another one comes.
                    for (_, request) in known.board.take_waiting_of(connection.id) {
                        known.end(request.job.id);
                    }
                    if known.board.hold_of(connection.id).is_some() {
                        known.board.push(Lane::Evaluation, release(&connection));
                    }
                    known.ended.push(connection.id);
                    connection = Connection::new(connection.id + 1);
                }
                _ => {}
            }
            self.leave(known);
        }
        let mut known = self.lock();
        known.clients -= 1;
        self.leave(known);
    }
}

fn evaluation(detached: bool) -> JobKind {
    JobKind::Evaluate { timing: false, hold: !detached, record_errors: false, detached, background: false }
}

/// What is asked by a job of this kind, by somebody who does not listen.
fn asked(kind: JobKind) -> Asked {
    let blank = || Box::new(OutcomeBuilder::blank(0));
    match kind {
        JobKind::Evaluate { .. } => {
            let (limits, handled) = (Limits::default(), HandledErrors::Ignored);
            let submission =
                Submission { number: 0, code: "".into(), limits, timeout: None, handled, local: false, due: None };
            Asked::Evaluate(submission, Box::new(|_| ()))
        }
        JobKind::InvokeRestart(_) => Asked::Held(HeldRequest::Resume(blank(), Box::new(|_| ()))),
        JobKind::FrameLocals(_) => Asked::Held(HeldRequest::Locals(InspectionBuilder::default(), Box::new(|_| ()))),
        JobKind::Release => Asked::Held(HeldRequest::Release(None)),
        _ => Asked::Inspect(Inspection::Reset(InspectionBuilder::default(), Box::new(|_| ()))),
    }
}

/// What releases what a connection holds.
fn release(connection: &Arc<Connection>) -> Request {
    Request::new(connection, Job::empty(0, JobKind::Release, 0), None, asked(JobKind::Release))
}

/// Whatever is submitted, held, cancelled, sent to the background and abandoned meanwhile: one evaluation at a time is in the
/// foreground, each job is somewhere until it ends, once, in the order of its connection, and everything comes to its end.
#[test]
fn every_job_waits_or_runs_or_has_ended_once() {
    let schedules = std::env::var("SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(SCHEDULES);
    shuttle::check_random(
        || {
            let known = Known {
                board: Board::default(),
                now: Instant::now(),
                jobs: Vec::new(),
                begun: Vec::new(),
                clients: CLIENTS as usize,
                ended: Vec::new(),
                next_thread: 0,
            };
            let model =
                Arc::new(Model { known: Mutex::new(known), changed: Default::default(), ended: Condvar::new() });
            let (evaluating, controlling) = (model.clone(), model.clone());
            let mut threads =
                vec![thread::spawn(move || evaluating.evaluate()), thread::spawn(move || controlling.control())];
            for number in 1..=CLIENTS {
                let model = model.clone();
                threads.push(thread::spawn(move || model.client(number)));
            }
            // What is held in the end is released as when the session ends.
            let mut known = model.lock();
            while !known.is_over() {
                if known.clients == 0 && !known.board.holds.is_empty() && !known.board.has_waiting(Lane::Evaluation) {
                    let holders: Vec<_> = known.board.holds.iter().map(|hold| hold.connection.clone()).collect();
                    holders.iter().for_each(|it| known.board.push(Lane::Evaluation, release(it)));
                    model.leave(known);
                    known = model.lock();
                    continue;
                }
                known = model.ended.wait(known).unwrap();
            }
            let begun = known.begun.clone();
            model.leave(known);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            for (connection, _) in &begun {
                let own: Vec<_> = begun.iter().filter(|(of, _)| of == connection).map(|(_, job)| *job).collect();
                assert!(own.is_sorted(), "connection {connection} began {own:?}");
            }
        },
        schedules,
    );
}
