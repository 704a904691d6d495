//! A model of the session around the board: Lisp's threads, the control lane, the clock, and clients that submit, hold, cancel
//! and leave at random. Shuttle tries many schedules of their steps.

use std::collections::{HashMap, HashSet};

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::unheard::{evaluation, release, request};
use super::*;

/// The number of clients, and of what each of them asks.
const CLIENTS: u64 = 3;
const REQUESTS: u64 = 4;
/// Schedules that are tried, unless the environment variable `SCHEDULES` says how many.
const SCHEDULES: usize = 2_000;

/// What is known beside the board.
struct Known {
    board: Board,
    now: Instant,
    /// The submitted jobs, each with whether it has ended.
    jobs: Vec<(u64, bool)>,
    /// The last that began in the foreground, by connection.
    begun: HashMap<u64, u64>,
    clients: u64,
    /// The connections that have ended.
    ended: Vec<u64>,
    /// The number of evaluating threads that were started.
    threads: u64,
}

struct Model {
    known: Mutex<Known>,
    /// For the threads of each lane.
    changed: [Condvar; Lane::COUNT],
}

impl Known {
    fn end(&mut self, job: u64) {
        if let Some((_, has_ended)) = self.jobs.iter_mut().find(|(id, _)| *id == job) {
            assert!(!std::mem::replace(has_ended, true), "job {job} ended twice");
        }
    }

    fn cancel(&mut self, job: u64) {
        if self.board.take_waiting(job).is_some() {
            self.end(job);
        } else if let Some(running) = self.board.find(job) {
            running.interruption.want(Interrupt::Cancel, REACTION, Instant::now());
        }
    }

    /// A connection ends, what it holds is released, and another one comes.
    fn replace(&mut self, connection: &Arc<Connection>) -> Arc<Connection> {
        for (_, request) in self.board.take_waiting_of(connection.id) {
            self.end(request.job.id);
        }
        self.end_connection(connection);
        Connection::new(connection.id + 1)
    }

    /// Nothing more comes from a connection, and what it holds now or later is released.
    fn end_connection(&mut self, connection: &Arc<Connection>) {
        if self.board.hold_of(connection.id).is_some() {
            self.board.push(Lane::Evaluation, release(connection));
        }
        self.ended.push(connection.id);
    }

    /// The thread of a job has done it: whether it holds an evaluation now; `None` when it is abandoned.
    fn end_evaluation(&mut self, thread: u64, job: &Job) -> Option<bool> {
        let Some(mut running) = self.board.take_running(job.id) else {
            assert!(self.board.abandoned.ended(job.id), "job {} was taken by nobody", job.id);
            return None;
        };
        self.end(job.id);
        let fails = matches!(job.kind, JobKind::Evaluate { hold: true, .. } | JobKind::FrameLocals { .. });
        if fails && running.interrupted().is_none() {
            match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => about.then = Then::Unchanged,
                Activity::Inspect(_) => unreachable!("it fails nowhere"),
            }
        }
        let Some(hold) = running.take_hold(None) else { return Some(false) };
        assert_eq!(hold.thread, thread);
        let connection = hold.connection.clone();
        self.board.holds.push(hold);
        if self.ended.contains(&connection.id) {
            self.board.push(Lane::Evaluation, release(&connection));
        }
        Some(true)
    }

    /// True when nothing is to be done any more.
    fn is_over(&self) -> bool {
        self.clients == 0 && self.jobs.iter().all(|(_, has_ended)| *has_ended) && self.board.holds.is_empty()
    }

    fn check(&mut self) {
        let foreground = self.board.running.iter().filter(|running| running.is_foreground()).count();
        assert!(foreground <= 1, "{foreground} are in the foreground");
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
    /// Applies a change, and unlocks the board as the session does.
    fn with<R>(&self, change: impl FnOnce(&mut Known) -> R) -> R {
        let mut known = self.known.lock().unwrap();
        let result = change(&mut known);
        self.leave(known);
        result
    }

    fn leave(&self, mut known: MutexGuard<'_, Known>) {
        known.check();
        self.tell_changes(&mut known);
        let is_over = known.is_over();
        drop(known);
        if is_over {
            self.changed.iter().for_each(Condvar::notify_all);
        }
    }

    fn tell_changes(&self, known: &mut Known) {
        known.board.settle(known.now);
        for (lane, _) in known.board.take_changed().iter().enumerate().filter(|(_, changed)| **changed) {
            self.changed[lane].notify_all();
        }
    }

    /// A thread of Lisp's that evaluates.
    fn evaluate(&self, thread: u64) {
        let mut held = None;
        while let Some(job) = self.next(thread, held) {
            // What it does takes a while. It may be over before its interruption, or because of that.
            (0..thread_rng().gen_range(0..3)).for_each(|_| thread::yield_now());
            match self.with(|known| known.end_evaluation(thread, &job)) {
                Some(holds) => held = holds.then_some(job.id),
                // What does not react may never end.
                None if thread_rng().gen_bool(0.5) => return,
                None => break,
            }
            // The user's code may end its thread.
            if held.is_none() && thread_rng().gen_bool(0.05) {
                break;
            }
        }
        self.with(|known| known.board.thread_ended(thread));
    }

    fn next(&self, thread: u64, held: Option<u64>) -> Option<Job> {
        let mut known = self.known.lock().unwrap();
        loop {
            let now = known.now;
            let home = known.board.threads.home.filter(|_| known.board.is_home_free());
            let job = match known.board.next(Lane::Evaluation, thread, held, now) {
                Next::Run(job) => {
                    let running = known.board.find(job.id).expect("it runs");
                    let connection = running.connection.id;
                    if running.is_foreground() && matches!(job.kind, JobKind::Evaluate { .. }) {
                        assert!(home.is_none_or(|home| home == thread), "the foreground left a free thread");
                        assert!(known.begun.insert(connection, job.id) < Some(job.id), "job {} began late", job.id);
                    }
                    Some(job)
                }
                Next::Release(hold, _) => {
                    let release = release(&hold.connection);
                    Some(known.board.begin(Lane::Evaluation, thread, release, Some(hold), now))
                }
                Next::Refuse(request) => {
                    known.end(request.job.id);
                    self.leave(known);
                    known = self.known.lock().unwrap();
                    continue;
                }
                Next::Wait(_) if known.is_over() => return None,
                Next::Wait(until) => {
                    self.tell_changes(&mut known);
                    let Some(until) = until else {
                        known = self.changed[Lane::Evaluation as usize].wait(known).unwrap();
                        continue;
                    };
                    // The time comes some day.
                    drop(known);
                    thread::yield_now();
                    known = self.known.lock().unwrap();
                    known.now = known.now.max(until);
                    continue;
                }
                Next::End => None,
            };
            self.leave(known);
            return job;
        }
    }

    /// The control lane's thread. Where it fails to start one, the clock tries again later.
    fn control(self: &Arc<Self>) {
        let mut known = self.known.lock().unwrap();
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
                        known.threads += 1;
                        let (model, thread) = (self.clone(), known.threads);
                        thread::spawn(move || model.evaluate(thread));
                    }
                    self.leave(known);
                    known = self.known.lock().unwrap();
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
        for id in number * 100..number * 100 + REQUESTS {
            let detached = thread_rng().gen_bool(0.5);
            let kind = match thread_rng().gen_range(0..8) {
                0 => JobKind::InvokeRestart(1),
                1 => JobKind::FrameLocals { from: 0, count: 1 },
                2 => JobKind::Reset,
                _ => evaluation(detached),
            };
            let mut request = request(&connection, id, kind);
            request.background = matches!(kind, JobKind::Evaluate { detached: true, .. }) && thread_rng().gen_bool(0.5);
            self.with(|known| {
                known.jobs.push((id, false));
                known.board.push(Lane::Evaluation, request);
            });
            self.with(|known| match thread_rng().gen_range(0..6) {
                0 => known.cancel(id),
                1 => drop(known.board.leave(id)),
                // It does not react to being interrupted.
                2 => {
                    if let Some(running) = known.board.take_running(id) {
                        known.board.abandon_thread(&running);
                        known.end(id);
                    }
                }
                3 => connection = known.replace(&connection),
                _ => {}
            });
        }
        self.with(|known| {
            known.end_connection(&connection);
            known.clients -= 1;
        });
    }
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
                begun: HashMap::new(),
                clients: CLIENTS,
                ended: Vec::new(),
                threads: 1,
            };
            let model = Arc::new(Model { known: Mutex::new(known), changed: Default::default() });
            let spawn = |run: fn(&Arc<Model>, u64), number| {
                let model = model.clone();
                thread::spawn(move || run(&model, number))
            };
            let mut threads =
                vec![spawn(|model, number| model.evaluate(number), 1), spawn(|model, _| model.control(), 0)];
            threads.extend((1..=CLIENTS).map(|number| spawn(|model, number| model.client(number), number)));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        },
        schedules,
    );
}
