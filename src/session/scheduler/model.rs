//! A model of the session around the scheduler state: Lisp's threads, the control lane, the clock, and clients that
//! submit, hold, cancel and disconnect at random. Shuttle tries many schedules of their steps.

use std::collections::{HashMap, HashSet};

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::test_requests::{evaluation, release, request};
use super::*;

/// The number of clients, and of the requests that each of them sends.
const CLIENTS: u64 = 3;
const REQUESTS: u64 = 4;
/// The number of schedules to try, unless the environment variable `SCHEDULES` has another number.
const SCHEDULES: usize = 2_000;

/// The scheduler state, with the model's own record of its jobs.
struct ModelState {
    scheduler: SchedulerState,
    now: Instant,
    /// The submitted jobs, each with a flag: true once it has ended.
    jobs: Vec<(u64, bool)>,
    /// The last job that began in the foreground, by connection.
    begun: HashMap<u64, u64>,
    clients: u64,
    /// The connections that have ended.
    ended: Vec<u64>,
    /// The number of evaluating threads that were started.
    threads: u64,
}

struct Model {
    known: Mutex<ModelState>,
    /// The condition variables that wake the threads of each lane.
    changed: [Condvar; Lane::COUNT],
}

impl ModelState {
    fn end(&mut self, job: u64) {
        if let Some((_, has_ended)) = self.jobs.iter_mut().find(|(id, _)| *id == job) {
            assert!(!std::mem::replace(has_ended, true), "job {job} ended twice");
        }
    }

    fn cancel(&mut self, job: u64) {
        if self.scheduler.take_waiting(job).is_some() {
            self.end(job);
        } else if let Some(running) = self.scheduler.find(job) {
            running.interruption.request(Interrupt::Cancel, REACTION_TIME, Instant::now());
        }
    }

    /// Ends a connection, and returns its successor.
    fn replace(&mut self, connection: &Arc<Connection>) -> Arc<Connection> {
        for (_, request) in self.scheduler.take_waiting_of(connection.id) {
            self.end(request.job.id);
        }
        self.end_connection(connection);
        Connection::new(connection.id + 1)
    }

    /// Ends a connection: it sends nothing more, and evaluations that it holds now or later are released.
    fn end_connection(&mut self, connection: &Arc<Connection>) {
        if self.scheduler.hold_of(connection.id).is_some() {
            self.scheduler.push(Lane::Evaluation, release(connection));
        }
        self.ended.push(connection.id);
    }

    /// Ends a job on its thread. Returns whether the thread now holds an evaluation, or `None` if the job was
    /// abandoned.
    fn end_evaluation(&mut self, thread: u64, job: &Job) -> Option<bool> {
        let Some(mut running) = self.scheduler.take_running(job.id) else {
            assert!(self.scheduler.abandoned.ended(job.id), "job {} was taken by nobody", job.id);
            return None;
        };
        self.end(job.id);
        let fails = matches!(job.kind, JobKind::Evaluate { hold: true, .. } | JobKind::FrameLocals { .. });
        if fails && running.interrupted().is_none() {
            match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => about.effect = HoldEffect::Unchanged,
                Activity::Inspect(_) => unreachable!("it fails nowhere"),
            }
        }
        let Some(hold) = running.take_hold(None) else { return Some(false) };
        assert_eq!(hold.thread, thread);
        let connection = hold.connection.clone();
        self.scheduler.holds.push(hold);
        if self.ended.contains(&connection.id) {
            self.scheduler.push(Lane::Evaluation, release(&connection));
        }
        Some(true)
    }

    /// Returns true when no work is left.
    fn is_over(&self) -> bool {
        self.clients == 0 && self.jobs.iter().all(|(_, has_ended)| *has_ended) && self.scheduler.holds.is_empty()
    }

    fn check(&mut self) {
        let foreground = self.scheduler.running.iter().filter(|running| running.is_foreground()).count();
        assert!(foreground <= 1, "{foreground} are in the foreground");
        let holders: HashSet<_> = self.scheduler.holds.iter().map(|hold| hold.connection.id).collect();
        assert_eq!(holders.len(), self.scheduler.holds.len(), "two are held of one connection");
        for (job, has_ended) in &self.jobs {
            let waits =
                self.scheduler.waiting.iter().flatten().chain(&self.scheduler.ready).any(|it| it.job.id == *job);
            let runs = self.scheduler.running.iter().any(|running| running.id == *job);
            assert_eq!(usize::from(waits) + usize::from(runs) + usize::from(*has_ended), 1, "where is job {job}?");
        }
    }
}

impl Model {
    /// Applies a change, and unlocks the state as the session does.
    fn with<R>(&self, change: impl FnOnce(&mut ModelState) -> R) -> R {
        let mut known = self.known.lock().unwrap();
        let result = change(&mut known);
        self.unlock_and_notify(known);
        result
    }

    fn unlock_and_notify(&self, mut known: MutexGuard<'_, ModelState>) {
        known.check();
        self.notify_changed(&mut known);
        let is_over = known.is_over();
        drop(known);
        if is_over {
            self.changed.iter().for_each(Condvar::notify_all);
        }
    }

    fn notify_changed(&self, known: &mut ModelState) {
        known.scheduler.reschedule(known.now);
        for (lane, _) in known.scheduler.take_changed().iter().enumerate().filter(|(_, changed)| **changed) {
            self.changed[lane].notify_all();
        }
    }

    /// Runs an evaluating thread.
    fn evaluate(&self, thread: u64) {
        let mut held = None;
        while let Some(job) = self.next(thread, held) {
            // A job takes a while. It may end before it is interrupted, or because it is interrupted.
            (0..thread_rng().gen_range(0..3)).for_each(|_| thread::yield_now());
            match self.with(|known| known.end_evaluation(thread, &job)) {
                Some(holds) => held = holds.then_some(job.id),
                // A job that ignores interruptions may never end.
                None if thread_rng().gen_bool(0.5) => return,
                None => break,
            }
            // The user's code may end its thread.
            if held.is_none() && thread_rng().gen_bool(0.05) {
                break;
            }
        }
        self.with(|known| known.scheduler.thread_ended(thread));
    }

    fn next(&self, thread: u64, held: Option<u64>) -> Option<Job> {
        let mut known = self.known.lock().unwrap();
        loop {
            let now = known.now;
            let home = known.scheduler.threads.home.filter(|_| known.scheduler.is_home_free());
            let job = match known.scheduler.next(Lane::Evaluation, thread, held, now) {
                Next::Run(job) => {
                    let running = known.scheduler.find(job.id).expect("it runs");
                    let connection = running.connection.id;
                    if running.is_foreground() && matches!(job.kind, JobKind::Evaluate { .. }) {
                        assert!(home.is_none_or(|home| home == thread), "the foreground left a free thread");
                        assert!(known.begun.insert(connection, job.id) < Some(job.id), "job {} began late", job.id);
                    }
                    Some(job)
                }
                Next::Release(hold, _) => {
                    let release = release(&hold.connection);
                    Some(known.scheduler.begin(Lane::Evaluation, thread, release, Some(hold), now))
                }
                Next::Refuse(request) => {
                    known.end(request.job.id);
                    self.unlock_and_notify(known);
                    known = self.known.lock().unwrap();
                    continue;
                }
                Next::Wait(_) if known.is_over() => return None,
                Next::Wait(until) => {
                    self.notify_changed(&mut known);
                    let Some(until) = until else {
                        known = self.changed[Lane::Evaluation as usize].wait(known).unwrap();
                        continue;
                    };
                    // Waiting moves the model's clock to the time `until`.
                    drop(known);
                    thread::yield_now();
                    known = self.known.lock().unwrap();
                    known.now = known.now.max(until);
                    continue;
                }
                Next::End => None,
            };
            self.unlock_and_notify(known);
            return job;
        }
    }

    /// Runs the thread of the control lane. When it fails to start a thread, a background request fails, or the clock
    /// moves to the next attempt.
    fn control(self: &Arc<Self>) {
        let mut known = self.known.lock().unwrap();
        loop {
            let now = known.now;
            match known.scheduler.next(Lane::Control, 0, None, now) {
                Next::Run(Job { kind: JobKind::StartThread, .. }) => {
                    if thread_rng().gen_bool(0.1) {
                        match known.scheduler.thread_refused("there is no room", now) {
                            Ok(request) => known.end(request.job.id),
                            Err(again) => known.now = again,
                        }
                    } else {
                        known.threads += 1;
                        let (model, thread) = (self.clone(), known.threads);
                        thread::spawn(move || model.evaluate(thread));
                    }
                    self.unlock_and_notify(known);
                    known = self.known.lock().unwrap();
                }
                Next::Run(_) => {}
                _ if known.is_over() => return,
                _ => known = self.changed[Lane::Control as usize].wait(known).unwrap(),
            }
        }
    }

    /// Runs a client. Its connection may end and be replaced.
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
                known.scheduler.push(Lane::Evaluation, request);
            });
            self.with(|known| match thread_rng().gen_range(0..6) {
                0 => known.cancel(id),
                1 => drop(known.scheduler.move_to_background(id)),
                // This job ignores its interruption.
                2 => {
                    if let Some(running) = known.scheduler.take_running(id) {
                        known.scheduler.abandon_thread(&running);
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

/// Checks, for random requests of the clients, that at most one evaluation is in the foreground, that each job waits or
/// runs until it ends once, that the jobs of a connection begin in order, and that all jobs end.
#[test]
fn every_job_waits_or_runs_or_has_ended_once() {
    let schedules = std::env::var("SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(SCHEDULES);
    shuttle::check_random(
        || {
            let known = ModelState {
                scheduler: SchedulerState::default(),
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
