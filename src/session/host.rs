//! What Lisp's threads ask for and tell.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Inner;
use super::activity::{Activity, Then};
use super::connection::Connection;
use super::events::{ClippedBuffer, JobEnd, Unbalanced, on_one_line};
use super::limits::HEAP_WATCH;
use super::scheduler::{Board, Next, Place, Running};
use crate::image::interruption::REACTION;
use crate::image::{Event, Host, Job, Lane, Text};

/// Time for finding out where the texts are unbalanced that an evaluation failed on.
const SEARCH_TIME: Duration = Duration::from_millis(200);

impl Host for Inner {
    fn next_job(&self, lane: Lane, thread: u64, held: Option<u64>) -> Option<Job> {
        if lane == Lane::Evaluation {
            // Not by looking at the board itself: whoever pushes would wait for its lock.
            let pushes = self.pushes.load(Ordering::Acquire);
            if !self.board.lock().has_waiting(lane) {
                crate::os::busy_poll::look(20, || (self.pushes.load(Ordering::Acquire) != pushes).then_some(()));
            }
        }
        loop {
            let now = Instant::now();
            let mut board = self.board.lock();
            match board.next(lane, thread, held, now) {
                Next::Run(job) => {
                    self.begun(board.find(job.id), now);
                    if board.find(job.id).is_some_and(|running| running.is_background()) {
                        self.report_background(&board);
                    }
                    if let (Lane::Inspection, Some(observer)) = (lane, self.observer.get()) {
                        observer.inspects(Some(job.id));
                    }
                    self.leave_board(board);
                    return Some(job);
                }
                Next::Release(hold, notice) => {
                    let connection = hold.connection.clone();
                    // With the question that somebody may be asked about it.
                    board.holds.push(*hold);
                    let request = self.release(&mut board, &connection, notice);
                    let hold = board.holds.pop().map(Box::new);
                    let job = board.begin(lane, thread, request, hold, now);
                    self.begun(board.find(job.id), now);
                    self.leave_board(board);
                    return Some(job);
                }
                Next::Refuse(request) => {
                    let answer = Self::refuse(&mut board, *request);
                    self.leave_board(board);
                    self.deliver([answer]);
                }
                Next::Wait(until) => {
                    self.notify(board.take_changed());
                    self.rest(&board);
                    match until {
                        None => self.changed[lane as usize].wait(&mut board),
                        Some(until) => drop(self.changed[lane as usize].wait_until(&mut board, until)),
                    }
                }
                Next::End => {
                    self.leave_board(board);
                    return None;
                }
            }
        }
    }

    fn thread_ended(&self, thread: u64) {
        let mut board = self.board.lock();
        board.thread_ended(thread);
        self.leave_board(board);
    }

    fn event(&self, job: u64, signalled: bool, event: Event<'_>) -> bool {
        let mut board = self.board.lock();
        if let Event::ThreadRefused(reason) = event {
            self.thread_refused(board, reason);
            return false;
        }
        if let Event::Blocked(lock) = event {
            board.abandoned.looked(&lock.to_owned());
            return false;
        }
        if let Event::Done { success } = event {
            if board.abandoned.ended(job) {
                return true;
            }
            if let Some((texts, end)) = board.find(job).and_then(Running::begin_search) {
                // The search is slow: without the lock, while the job still counts as running.
                drop(board);
                let hints = hints(texts, &end);
                board = self.board.lock();
                if let Some(running) = board.find(job) {
                    running.end_search(&hints);
                }
            }
            let Some(mut running) = board.take_running(job) else {
                board.control_done(job);
                board.unwinding.retain(|unwinding| *unwinding != job);
                self.leave_board(board);
                return false;
            };
            let end = match running.interrupted() {
                _ if success => JobEnd::Succeeded,
                Some(reason) => JobEnd::Interrupted(reason),
                None => JobEnd::Failed,
            };
            let settled = running.take_questions();
            let answer = self.finish(&mut board, running, end);
            // Whoever finds that nothing runs finds what came of it.
            self.leave_board(board);
            self.deliver(std::iter::once(answer).chain(settled));
            return false;
        }
        let Some(running) = board.find(job) else {
            if let Event::Refused(reason) = event
                && board.abandoned.is_of(job)
            {
                board.abandoned.refused(&reason.to_owned());
                return false;
            }
            let connection = board.evaluations.connection(job).unwrap_or_else(|| self.main.clone());
            drop(board);
            self.stray(&connection, event);
            return false;
        };
        match event {
            Event::Held { unchanged } => match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => about.then = if unchanged { Then::Unchanged } else { Then::HeldAgain },
                Activity::Inspect(_) => {}
            },
            Event::Refused(reason) => {
                if let Activity::Held(about) = &mut running.activity {
                    about.refused = Some(reason.to_owned());
                }
            }
            Event::Interrupted(_) => self.interrupted(running, false),
            Event::Unwinding(_) => self.interrupted(running, true),
            Event::Released => {
                let end = Instant::now() + self.limits.lock().cleanup;
                running.deadline = Some(end);
                self.clock.arm(end);
                if let Activity::Held(about) = &mut running.activity {
                    about.release();
                }
            }
            Event::Foreground => {
                if !running.is_background() {
                    running.place = Place::Foreground;
                    return true;
                }
            }
            Event::Heap => {
                let (was_full, full) = (running.filled_heap, running.judge_heap());
                if let Some(observer) = self.observer.get().filter(|_| !running.is_background()) {
                    let now = Instant::now();
                    if full {
                        self.clock.arm(now + REACTION);
                    } else if was_full {
                        // The time it had for its end is its own again.
                        observer.extended(running.deadline.map(|end| end.saturating_duration_since(now)));
                    }
                }
                return full;
            }
            // It is being ended in the one before.
            Event::Step(..) if running.interrupted().is_some() => {}
            Event::Step(step, milliseconds) => {
                running.activity.event(event);
                let time = (step.len() > 0).then(|| Duration::from_millis(milliseconds));
                running.deadline = time.map(|time| Instant::now() + time);
                if let Some(deadline) = running.deadline {
                    self.clock.arm(deadline);
                }
                if let Some(observer) = self.observer.get().filter(|_| !running.is_background()) {
                    observer.extended(time);
                    observer.step(time.map(|_| step.to_owned()).as_deref());
                }
            }
            Event::Notice(text) if running.is_background() => return running.activity.event(Event::Notice(text)),
            Event::Notice(text) => {
                running.connection.state().notice(on_one_line(&text.to_owned()));
            }
            // Asked before it is told.
            Event::Definitions(text) if text.len() == 0 => {
                return self.is_shared(&running.connection) && !self.restores();
            }
            Event::Definitions(text) => self.tell_others(&running.connection, &format!("{}.", text.to_owned())),
            Event::Defined(..) => {
                let (local, observer) = (running.activity.is_local(), self.observer.get());
                let Some(builder) = running.activity.current_builder() else { return false };
                builder.event(event);
                if let (Some(observer), Some((form, changes))) = (observer, builder.last_defined()) {
                    observer.defined(form, changes, local, builder.evaluation());
                }
            }
            event => {
                let activity = &mut running.activity;
                return if signalled { activity.signalled(event) } else { activity.event(event) };
            }
        }
        false
    }
}

/// Searches unbalanced texts for where they went wrong, for up to 200 ms in all, or until `end` is set.
fn hints(texts: Vec<Unbalanced>, end: &AtomicBool) -> Vec<(Unbalanced, String)> {
    let begin = Instant::now();
    let stop = || end.load(Ordering::Relaxed) || begin.elapsed() >= SEARCH_TIME;
    let found = texts.into_iter().map_while(|text| (!stop()).then(|| text.hint(stop).map(|hint| (text, hint))));
    found.flatten().collect()
}

impl Inner {
    /// Spares the clock's thread to wake for what is over, as it would soon. Called before a thread sleeps, not whenever
    /// nothing runs: where one evaluation follows another the clock stays as it is.
    fn rest(&self, board: &Board) {
        if board.running.is_empty() && board.abandoned.is_empty() {
            self.clock.rest();
        }
    }

    /// Takes note of a job that begins to run.
    fn begun(&self, running: Option<&mut Running>, now: Instant) {
        let Some(running) = running else { return };
        if running.is_foreground()
            && running.activity.is_asked_for()
            && let Some(observer) = self.observer.get()
        {
            // What the server does of its own accord has a number of its own, above those of what waits.
            let timeout = running.deadline.map(|end| end.saturating_duration_since(now));
            observer.begun(running.id, running.connection.id, timeout);
        }
        if running.evaluates() {
            self.begun.fetch_add(1, Ordering::Relaxed);
        }
        let watch = running.heap_limit.map(|_| now + HEAP_WATCH);
        if let Some(at) = running.deadline.into_iter().chain(watch).min() {
            self.clock.arm(at);
        }
    }

    /// No thread could be started that evaluates. What was to have it in the background fails.
    fn thread_refused(&self, mut board: MutexGuard<'_, Board>, reason: Text<'_>) {
        match board.thread_refused(&reason.to_owned(), Instant::now()) {
            Ok(request) => {
                let answer = Running::unbegun(request, Lane::Evaluation).map(|mut running| {
                    if let Some(builder) = running.activity.current_builder() {
                        builder.fail("STORAGE-CONDITION", reason);
                    }
                    self.finish(&mut board, running, JobEnd::Failed)
                });
                self.leave_board(board);
                self.deliver(answer);
            }
            Err(again) => {
                self.clock.arm(again);
                self.leave_board(board);
            }
        }
    }

    /// Takes what comes from nothing that runs now, but once did for `connection`.
    fn stray(&self, connection: &Connection, event: Event<'_>) {
        match event {
            Event::Stdout(text) | Event::Stderr(text) => {
                let limit = self.limits.lock().max_output;
                let mut state = connection.state();
                state.background.get_or_insert_with(|| ClippedBuffer::new(limit)).push(text);
            }
            Event::Notice(text) => connection.state().notice(on_one_line(&text.to_owned())),
            _ => {}
        }
    }
}
