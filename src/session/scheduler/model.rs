//! A model of the session around the scheduler state: Lisp's threads, the control lane, the clock, and clients that
//! submit, hold, cancel and disconnect at random. Shuttle tries many schedules of their steps.

use std::collections::{HashMap, HashSet};

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::test_requests::{evaluation_kind, release, request};
use super::*;

/// The number of clients, and of the requests that each of them sends.
const CLIENTS: u64 = 3;
const REQUESTS: u64 = 4;
/// The number of schedules to try, unless the environment variable `SCHEDULES` sets another number.
const SCHEDULES: usize = 2_000;

/// The scheduler state, and the model's own record of the submitted jobs.
struct ModelState {
    scheduler: SchedulerState,
    now: Instant,
    /// The submitted jobs, each with a flag: true once it has ended.
    jobs: Vec<(u64, bool)>,
    /// The number of the last evaluation job that began in the foreground, by connection.
    begun: HashMap<u64, u64>,
    clients: u64,
    /// The connections that have ended.
    ended: Vec<u64>,
    /// The number of evaluating threads that were started.
    threads: u64,
}

struct Model {
    state: Mutex<ModelState>,
    /// The event counts that wake the threads of each lane.
    changed: [EventCount; Lane::COUNT],
}

/// The model of [`EventCount`](crate::os::event_count::EventCount): like a futex, without spurious wake-ups that could
/// hide a lost one.
#[derive(Default)]
struct EventCount {
    count: Mutex<u32>,
    changed: Condvar,
}

impl EventCount {
    fn current(&self) -> u32 {
        *self.count.lock().unwrap()
    }

    fn notify_all(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    fn wait(&self, seen: u32) {
        let count = self.count.lock().unwrap();
        if *count == seen {
            drop(self.changed.wait(count).unwrap());
        }
    }
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
            running.interruption.request(InterruptReason::Cancel, REACTION_TIME, Instant::now());
        }
    }

    /// Ends a connection, and returns its successor.
    fn replace(&mut self, connection: &Arc<Connection>) -> Arc<Connection> {
        for (_, request) in self.scheduler.take_waiting_of_connection(connection.id) {
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
            assert!(self.scheduler.abandoned.record_end(job.id), "job {} was taken by nobody", job.id);
            return None;
        };
        self.end(job.id);
        let fails = matches!(job.kind, JobKind::Evaluate { hold: true, .. } | JobKind::FrameLocals { .. });
        if fails && running.interrupt_reason().is_none() {
            match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => about.effect = HoldEffect::Unchanged,
                Activity::Inspect(_) => unreachable!("it fails nowhere"),
            }
        }
        let until = thread_rng().gen_bool(0.5).then(|| self.now + Duration::from_secs(1));
        let Some(hold) = running.take_hold(until) else { return Some(false) };
        assert_eq!(hold.thread, thread);
        let connection = hold.connection.clone();
        self.scheduler.holds.push(hold);
        if self.ended.contains(&connection.id) {
            self.scheduler.push(Lane::Evaluation, release(&connection));
        }
        Some(true)
    }

    /// Returns the thread that holds an evaluation for a limited time, if `job` is in the foreground and the thread owns a
    /// lock that the job needs.
    fn lock_owner(&mut self, job: u64) -> Option<u64> {
        let is_foreground = self.scheduler.find(job).is_some_and(|running| running.is_foreground());
        let needs_lock = is_foreground && thread_rng().gen_bool(0.5);
        let mut owners = self.scheduler.holds.iter().filter(|hold| needs_lock && hold.until.is_some());
        owners.next().map(|hold| hold.thread)
    }

    /// Returns true while `job` waits for a lock that the thread `owner` owns.
    fn is_blocked(&mut self, job: u64, owner: u64) -> bool {
        self.scheduler.find(job).is_some_and(|running| running.interrupt_reason().is_none())
            && self.scheduler.holds.iter().any(|hold| hold.thread == owner)
    }

    /// Returns true when no work is left.
    fn is_over(&self) -> bool {
        self.clients == 0 && self.jobs.iter().all(|(_, has_ended)| *has_ended) && self.scheduler.holds.is_empty()
    }

    fn check_invariants(&mut self) {
        let foreground = self.scheduler.running.iter().filter(|running| running.is_foreground()).count();
        assert!(foreground <= 1, "{foreground} are in the foreground");
        let evaluating = || self.scheduler.running.iter().filter(|running| running.evaluates());
        if evaluating().any(|running| matches!(running.activity, Activity::Inspect(Inspection::Query(..)))) {
            let idle = evaluating().count() == 1 && self.scheduler.ready.is_empty() && self.scheduler.holds.is_empty();
            assert!(idle, "a query that needs an idle session runs beside an evaluation");
        }
        let holders: HashSet<_> = self.scheduler.holds.iter().map(|hold| hold.connection.id).collect();
        assert_eq!(holders.len(), self.scheduler.holds.len(), "a connection has more than one held evaluation");
        for (job, has_ended) in &self.jobs {
            let mut queues = self.scheduler.waiting.iter().chain([&self.scheduler.ready]);
            let waits = queues.any(|queue| queue.find_job(*job).is_some());
            let runs = self.scheduler.running.iter().any(|running| running.id == *job);
            assert_eq!(usize::from(waits) + usize::from(runs) + usize::from(*has_ended), 1, "where is job {job}?");
        }
    }
}

impl Model {
    /// Applies a change, and unlocks the state as the session does.
    fn update<R>(&self, change: impl FnOnce(&mut ModelState) -> R) -> R {
        let mut state = self.state.lock().unwrap();
        let result = change(&mut state);
        self.unlock_and_notify(state);
        result
    }

    fn unlock_and_notify(&self, mut state: MutexGuard<'_, ModelState>) {
        state.check_invariants();
        let now = state.now;
        state.scheduler.reschedule(now);
        let changed = state.scheduler.take_changed_lanes();
        let is_over = state.is_over();
        drop(state);
        self.notify(if is_over { [true; Lane::COUNT] } else { changed });
    }

    fn notify(&self, changed: [bool; Lane::COUNT]) {
        for (lane, _) in changed.iter().enumerate().filter(|(_, changed)| **changed) {
            self.changed[lane].notify_all();
        }
    }

    /// Sleeps on the event count of the lane after the state is unlocked, as the session does.
    fn wait<'a>(&'a self, lane: Lane, mut state: MutexGuard<'a, ModelState>) -> MutexGuard<'a, ModelState> {
        self.notify(state.scheduler.take_changed_lanes());
        let changed = &self.changed[lane as usize];
        let seen = changed.current();
        drop(state);
        changed.wait(seen);
        self.state.lock().unwrap()
    }

    /// Runs an evaluating thread.
    fn run_evaluating_thread(&self, thread: u64) {
        let mut held = None;
        while let Some(job) = self.next_job(thread, held) {
            // The job runs for a while. Another thread may interrupt the job meanwhile.
            (0..thread_rng().gen_range(0..3)).for_each(|_| thread::yield_now());
            if let Some(owner) = self.update(|state| state.lock_owner(job.id)) {
                while self.update(|state| state.is_blocked(job.id, owner)) {
                    thread::yield_now();
                }
            }
            match self.update(|state| state.end_evaluation(thread, &job)) {
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
        self.update(|state| state.scheduler.thread_ended(thread));
    }

    fn next_job(&self, thread: u64, held: Option<u64>) -> Option<Job> {
        let mut state = self.state.lock().unwrap();
        loop {
            let now = state.now;
            let home = state.scheduler.threads.home.filter(|_| state.scheduler.is_home_free());
            let job = match state.scheduler.next(Lane::Evaluation, thread, held, now) {
                Instruction::Run(job) => {
                    let running = state.scheduler.find(job.id).expect("it runs");
                    let connection = running.connection.id;
                    if running.is_foreground() && matches!(job.kind, JobKind::Evaluate { .. }) {
                        assert!(
                            home.is_none_or(|home| home == thread),
                            "job {} began away from its home thread",
                            job.id
                        );
                        assert!(state.begun.insert(connection, job.id) < Some(job.id), "job {} began late", job.id);
                    }
                    Some(job)
                }
                Instruction::Release(hold, _) => {
                    let release = release(&hold.connection);
                    Some(state.scheduler.begin(Lane::Evaluation, thread, release, Some(hold), now))
                }
                Instruction::Refuse(request) => {
                    state.end(request.job.id);
                    self.unlock_and_notify(state);
                    state = self.state.lock().unwrap();
                    continue;
                }
                Instruction::Wait(_) if state.is_over() => return None,
                Instruction::Wait(until) => {
                    let Some(until) = until else {
                        state = self.wait(Lane::Evaluation, state);
                        continue;
                    };
                    self.notify(state.scheduler.take_changed_lanes());
                    // Waiting moves the model's clock to the time `until`.
                    drop(state);
                    thread::yield_now();
                    state = self.state.lock().unwrap();
                    state.now = state.now.max(until);
                    continue;
                }
                Instruction::End => None,
            };
            self.unlock_and_notify(state);
            return job;
        }
    }

    /// Runs the thread of the control lane. When this thread fails to start another, a background request fails, or
    /// the clock moves to the next attempt.
    fn run_control_lane(self: &Arc<Self>) {
        let mut state = self.state.lock().unwrap();
        loop {
            let now = state.now;
            match state.scheduler.next(Lane::Control, 0, None, now) {
                Instruction::Run(Job { kind: JobKind::StartThread(_), .. }) => {
                    if thread_rng().gen_bool(0.1) {
                        match state.scheduler.record_thread_refusal("there is no room", now) {
                            Ok(request) => state.end(request.job.id),
                            Err(again) => state.now = again,
                        }
                    } else {
                        state.threads += 1;
                        let (model, thread) = (self.clone(), state.threads);
                        thread::spawn(move || model.run_evaluating_thread(thread));
                    }
                    self.unlock_and_notify(state);
                    state = self.state.lock().unwrap();
                }
                Instruction::Run(_) => {}
                _ if state.is_over() => return,
                _ => state = self.wait(Lane::Control, state),
            }
        }
    }

    /// Runs a client. The client's connection may end and be replaced.
    fn run_client(&self, number: u64) {
        let mut connection = Connection::new(number * 100);
        for id in number * 100..number * 100 + REQUESTS {
            let detached = thread_rng().gen_bool(0.5);
            let kind = match thread_rng().gen_range(0..8) {
                0 => JobKind::InvokeRestart(1),
                1 => JobKind::FrameLocals { from: 0, count: 1 },
                2 => JobKind::Reset,
                3 => JobKind::Query,
                _ => evaluation_kind(detached),
            };
            let mut request = request(&connection, id, kind);
            request.background = matches!(kind, JobKind::Evaluate { detached: true, .. }) && thread_rng().gen_bool(0.5);
            self.update(|state| {
                state.jobs.push((id, false));
                state.scheduler.push(Lane::Evaluation, request);
            });
            self.update(|state| match thread_rng().gen_range(0..6) {
                0 => state.cancel(id),
                1 => drop(state.scheduler.move_to_background(id)),
                // This job ignores its interruption.
                2 => {
                    if let Some(running) = state.scheduler.take_running(id) {
                        state.scheduler.abandon_thread(&running);
                        state.end(id);
                    }
                }
                3 => connection = state.replace(&connection),
                _ => {}
            });
        }
        self.update(|state| {
            state.end_connection(&connection);
            state.clients -= 1;
        });
    }
}

/// Checks, for random requests of the clients, that at most one evaluation is in the foreground, that no evaluation runs or is
/// held beside a query that needs an idle session, that each job waits or runs until it ends once, that the jobs of a
/// connection begin in order, and that all jobs end, even a foreground job that waits for a lock of a held evaluation.
#[test]
fn every_job_ends_exactly_once_under_random_schedules() {
    let schedules = std::env::var("SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(SCHEDULES);
    shuttle::check_random(
        || {
            let state = ModelState {
                scheduler: SchedulerState::default(),
                now: Instant::now(),
                jobs: Vec::new(),
                begun: HashMap::new(),
                clients: CLIENTS,
                ended: Vec::new(),
                threads: 1,
            };
            let model = Arc::new(Model { state: Mutex::new(state), changed: Default::default() });
            let spawn = |run: fn(&Arc<Model>, u64), number| {
                let model = model.clone();
                thread::spawn(move || run(&model, number))
            };
            let mut threads = vec![
                spawn(|model, number| model.run_evaluating_thread(number), 1),
                spawn(|model, _| model.run_control_lane(), 0),
            ];
            threads.extend((1..=CLIENTS).map(|number| spawn(|model, number| model.run_client(number), number)));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        },
        schedules,
    );
}
