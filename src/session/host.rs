//! The host's side of the contract with Lisp, whose threads ask the host for jobs and report events.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Inner;
use super::activity::{Activity, HoldEffect};
use super::connection::Connection;
use super::events::{
    JobEnd, MAX_LOCATION, Printed, UnbalancedText, clip_line, clip_name, clip_notice, defining_form, first_chars,
};
use super::limits::HEAP_CHECK_INTERVAL;
use super::scheduler::{Instruction, Placement, RunningJob, SchedulerState};
use crate::image::interruption::REACTION_TIME;
use crate::image::{Event, Host, Job, Lane, Text};

/// The time limit of the search for the source locations where texts are unbalanced.
const HINT_SEARCH_TIME: Duration = Duration::from_millis(200);
/// The maximum number of characters that are kept of Lisp's reason for a refusal.
const MAX_REASON: usize = 10_000;

thread_local! {
    /// The last job for which this thread printed, and the job's output. If a thread finds its output here, it prints without
    /// the scheduler's lock.
    static PRINTED: RefCell<(u64, Weak<Printed>)> = const { RefCell::new((0, Weak::new())) };
}

impl Host for Inner {
    fn next_job(&self, lane: Lane, thread: u64, held: Option<u64>) -> Option<Job> {
        if lane == Lane::Evaluation {
            // The thread polls a counter, not the queue: polling the queue would keep its lock from the threads that
            // push requests.
            let changed = &self.changed[lane as usize];
            let seen = changed.current();
            if !self.scheduler.lock().has_waiting(lane) {
                crate::os::busy_poll::poll_briefly(20, || (changed.current() != seen).then_some(()));
            }
        }
        loop {
            if let Some(observer) = self.observer.get().filter(|_| matches!(lane, Lane::Evaluation | Lane::Inspection))
            {
                observer.wait_for_recipient();
            }
            let now = Instant::now();
            let mut scheduler = self.scheduler.lock();
            match scheduler.next(lane, thread, held, now) {
                Instruction::Run(job) => {
                    self.report_job_begun(scheduler.find(job.id), now);
                    if scheduler.find(job.id).is_some_and(|running| running.is_background()) {
                        self.report_background(&scheduler);
                    }
                    self.unlock_and_notify(scheduler);
                    return Some(job);
                }
                Instruction::Release(hold, reason) => {
                    let connection = hold.connection.clone();
                    // The hold must be in `holds`, where `prepare_release` looks for it to end the question to the
                    // user about the held evaluation.
                    scheduler.holds.push(*hold);
                    let request = self.prepare_release(&mut scheduler, &connection, reason);
                    let hold = scheduler.holds.pop().map(Box::new);
                    let job = scheduler.begin(lane, thread, request, hold, now);
                    self.report_job_begun(scheduler.find(job.id), now);
                    self.unlock_and_notify(scheduler);
                    return Some(job);
                }
                Instruction::Refuse(request) => {
                    let answer = Self::refuse(&mut scheduler, *request);
                    self.unlock_and_notify(scheduler);
                    self.deliver([answer]);
                }
                Instruction::Wait(until) => {
                    self.notify(scheduler.take_changed_lanes());
                    self.stop_idle_clock(&scheduler, now);
                    // Work that another thread adds after the lock is released changes the count.
                    let changed = &self.changed[lane as usize];
                    let seen = changed.current();
                    drop(scheduler);
                    changed.wait(seen, until);
                }
                Instruction::End => {
                    self.unlock_and_notify(scheduler);
                    return None;
                }
            }
        }
    }

    fn thread_ended(&self, thread: u64) {
        let mut scheduler = self.scheduler.lock();
        scheduler.thread_ended(thread);
        self.unlock_and_notify(scheduler);
    }

    fn event(&self, job: u64, signalled: bool, event: Event<'_>) -> bool {
        match event {
            Event::Stdout(text) | Event::Stderr(text) => {
                self.print(job, matches!(event, Event::Stderr(_)), text);
                return false;
            }
            Event::Defined(start, description) => {
                self.record_defining_form(job, start, &description.to_owned());
                return false;
            }
            _ => {}
        }
        let mut scheduler = self.scheduler.lock();
        if let Event::ThreadRefused(lane, reason) = event {
            if lane == Lane::Inspection {
                scheduler.record_inspection_thread_refusal(Instant::now());
            } else {
                self.record_thread_refusal(scheduler, reason);
            }
            return false;
        }
        if let Event::Blocked(lock) = event {
            scheduler.abandoned.record_lock_check(&clip_name(lock));
            return false;
        }
        if let Event::Done { success } = event {
            if scheduler.abandoned.record_end(job) {
                return true;
            }
            if let Some((texts, end)) = scheduler.find(job).and_then(RunningJob::begin_hint_search) {
                // The search is slow, so the lock is released. The job still counts as running.
                drop(scheduler);
                let hints = find_hints(texts, &end);
                scheduler = self.scheduler.lock();
                if let Some(running) = scheduler.find(job) {
                    running.finish_hint_search(&hints);
                }
            }
            if let Some(answer) = scheduler.find(job).and_then(|running| running.take_query_answer(success)) {
                // The query counts as running until it is answered, so that no evaluation begins before the answer.
                drop(scheduler);
                self.deliver([answer]);
                scheduler = self.scheduler.lock();
            }
            let Some(mut running) = scheduler.take_running(job) else {
                scheduler.finish_control_job(job);
                scheduler.unwinding.retain(|unwinding| *unwinding != job);
                self.unlock_and_notify(scheduler);
                return false;
            };
            let end = running.end(success);
            let settled = running.take_error_queries();
            let answer = self.finish(&mut scheduler, running, end);
            // The outcome is recorded before other threads can see that nothing runs.
            self.unlock_and_notify(scheduler);
            self.deliver(std::iter::once(answer).chain(settled));
            return false;
        }
        let Some(running) = scheduler.find(job) else {
            if let Event::Refused(reason) = event
                && scheduler.abandoned.runs(job)
            {
                scheduler.abandoned.record_refusal(&first_chars(reason, MAX_REASON));
                return false;
            }
            if let Event::Notice(text) = event {
                let connection = self.connection_of_ended(&scheduler, job);
                drop(scheduler);
                connection.state().add_notice(clip_notice(text));
            }
            return false;
        };
        match event {
            Event::Held { unchanged } => match &mut running.activity {
                Activity::Evaluate(evaluate) => evaluate.held = true,
                Activity::Held(about) => {
                    about.effect = if unchanged { HoldEffect::Unchanged } else { HoldEffect::HeldAgain }
                }
                Activity::Inspect(_) => {}
            },
            Event::Refused(reason) => {
                if let Activity::Held(about) = &mut running.activity {
                    about.refused = Some(first_chars(reason, MAX_REASON));
                }
            }
            Event::Interrupted(_) => self.record_interruption(running, false),
            Event::Unwinding(_) => self.record_interruption(running, true),
            Event::Released => {
                let cleanup = self.limits.lock().cleanup;
                let end = Instant::now() + cleanup;
                running.deadline = Some(end);
                self.clock.arm(end);
                self.report_deadline(running, cleanup);
                if let Activity::Held(about) = &mut running.activity {
                    about.begin_unwinding();
                }
            }
            Event::Foreground => {
                if running.is_foreground() {
                    running.placement = Placement::Foreground;
                    return true;
                }
            }
            Event::Heap => {
                let (was_full, full) = (running.filled_heap, running.check_heap());
                if let Some(observer) = self.observer.get().filter(|_| running.is_foreground()) {
                    let now = Instant::now();
                    if full {
                        self.clock.arm(now + REACTION_TIME);
                    } else if was_full {
                        // The deadline for freeing the heap no longer applies: the job's own deadline applies again.
                        observer.deadline_changed(running.deadline.map(|end| end.saturating_duration_since(now)));
                    }
                }
                return full;
            }
            // A job that was interrupted begins no further step: it unwinds from the previous step.
            Event::Step(..) if running.interrupt_reason().is_some() => {}
            Event::Step(step, milliseconds) => {
                running.activity.handle_event(event);
                let time = (step.len() > 0).then(|| Duration::from_millis(milliseconds));
                running.deadline = time.map(|time| Instant::now() + time);
                if let Some(deadline) = running.deadline {
                    self.clock.arm(deadline);
                }
                if let Some(observer) = self.observer.get().filter(|_| running.is_foreground()) {
                    observer.deadline_changed(time);
                    observer.step_changed(time.map(|_| clip_line(step, MAX_LOCATION)).as_deref());
                }
            }
            Event::Notice(text) if running.is_background() => {
                return running.activity.handle_event(Event::Notice(text));
            }
            Event::Notice(text) => {
                running.connection.state().add_notice(clip_notice(text));
            }
            // With an empty text, Lisp asks whether it must describe the new definitions for other clients.
            Event::Definitions(text) if text.len() == 0 => {
                return self.has_other_connections(&running.connection) && !self.is_replaying();
            }
            Event::Definitions(text) => self.notify_others(&running.connection, &format!("{}.", clip_notice(text))),
            event => {
                let activity = &mut running.activity;
                return if signalled { activity.handle_signalled_event(event) } else { activity.handle_event(event) };
            }
        }
        false
    }
}

/// Searches the texts for the source locations where they are probably unbalanced. Takes at most 200 ms for all texts, and
/// stops when `end` is set. Returns the texts for which a location was found, each with its hint.
fn find_hints(texts: Vec<UnbalancedText>, end: &AtomicBool) -> Vec<(UnbalancedText, String)> {
    let begin = Instant::now();
    let stop = || end.load(Ordering::Relaxed) || begin.elapsed() >= HINT_SEARCH_TIME;
    let found = texts.into_iter().map_while(|text| (!stop()).then(|| text.hint(stop).map(|hint| (text, hint))));
    found.flatten().collect()
}

impl Inner {
    /// Stops the clock when nothing runs and no thread must be started later, so that the clock's thread checks no limits
    /// for a job that is over. Called only before a Lisp thread sleeps, so that the clock keeps running when one evaluation
    /// directly follows another.
    fn stop_idle_clock(&self, scheduler: &SchedulerState, now: Instant) {
        if scheduler.running.is_empty()
            && scheduler.finishing.is_empty()
            && scheduler.abandoned.is_empty()
            && scheduler.next_thread_attempt(now).is_none()
        {
            self.clock.stop();
        }
    }

    /// Reports the beginning of a job on an evaluating thread to the observer, and sets the clock for the limits of any job.
    fn report_job_begun(&self, running: Option<&mut RunningJob>, now: Instant) {
        let Some(running) = running else { return };
        if let Some(observer) = self.observer.get().filter(|_| running.evaluates())
            && let Some(job) = running.requested_by()
        {
            observer.call_begun(job);
        }
        if let Some(observer) = self.observer.get().filter(|_| running.is_foreground()) {
            let timeout = running.deadline.map(|end| end.saturating_duration_since(now));
            observer.job_begun(running.id, running.requested_by(), running.is_query(), running.connection.id, timeout);
        }
        if running.evaluates() {
            self.evaluations_begun.fetch_add(1, Ordering::Relaxed);
        } else if let (Some(deadline), Some(observer)) = (running.deadline, self.observer.get()) {
            observer.inspection_begun(running.observed_number(), deadline - now);
        }
        let watch = running.heap_limit.map(|_| now + HEAP_CHECK_INTERVAL);
        if let Some(at) = running.deadline.into_iter().chain(watch).min() {
            self.clock.arm(at);
        }
    }

    /// Records a form of `job` that has defined something. `start` and `description` are arguments of [`defining_form`].
    ///
    /// Copying and reporting a long form takes time, so the scheduler's lock is not held meanwhile. The observer still gets
    /// the forms of the job in order, and before the end of the job, because the thread that calls this function runs the
    /// job. An image is saved only while no evaluation runs.
    fn record_defining_form(&self, job: u64, start: u64, description: &str) {
        let read = |running: &mut RunningJob| {
            let was_background = running.is_background();
            // The end of an evaluation in the background leaves the connection's package as it is.
            let binds_package = running.activity.binds_package() || was_background;
            let attached = running.connection.is_attached();
            let builder = running.activity.current_builder()?;
            Some((builder.code().clone(), builder.evaluation(), was_background, binds_package, attached))
        };
        let read = self.scheduler.lock().find(job).and_then(read);
        let Some((code, evaluation, was_background, binds_package, attached)) = read else { return };
        let Some((form, changes)) = defining_form(&code, start, description) else { return };
        if let Some(observer) = self.observer.get() {
            observer.form_defined(&form, &changes, binds_package, attached, evaluation);
        }
        let mut scheduler = self.scheduler.lock();
        let Some(running) = scheduler.find(job) else { return };
        if running.is_background()
            && !was_background
            && let Some(observer) = self.observer.get()
        {
            // The observer may have learnt that the evaluation moved to the background before it got the form.
            observer.evaluation_detached(evaluation);
        }
        if let Some(builder) = running.activity.current_builder() {
            builder.add_defined(code, form, &changes);
        }
    }

    /// Records that no evaluating thread could be started. A background evaluation that needed the thread fails.
    fn record_thread_refusal(&self, mut scheduler: MutexGuard<'_, SchedulerState>, reason: Text<'_>) {
        match scheduler.record_thread_refusal(&first_chars(reason, MAX_REASON), Instant::now()) {
            Ok(request) => {
                let answer = RunningJob::unstarted(request, Lane::Evaluation).map(|mut running| {
                    if let Some(builder) = running.activity.current_builder() {
                        builder.fail("STORAGE-CONDITION", reason);
                    }
                    self.finish(&mut scheduler, running, JobEnd::Failed)
                });
                self.unlock_and_notify(scheduler);
                self.deliver(answer);
            }
            Err(again) => {
                self.clock.arm(again);
                self.unlock_and_notify(scheduler);
            }
        }
    }

    /// Adds text that `job` prints to its output.
    fn print(&self, job: u64, is_stderr: bool, text: Text<'_>) {
        loop {
            let cached = PRINTED.with_borrow(|(of, printed)| if *of == job { printed.upgrade() } else { None });
            if cached.is_some_and(|printed| printed.push(is_stderr, text)) {
                return;
            }
            let Some(printed) = self.find_printed(job) else { return };
            PRINTED.set((job, Arc::downgrade(&printed)));
        }
    }

    /// Returns the output that gets the text that `job` prints: the current builder's or, if the job is over, the output that
    /// waits for the connection's next answer. Returns `None` if the text is not kept.
    fn find_printed(&self, job: u64) -> Option<Arc<Printed>> {
        let mut scheduler = self.scheduler.lock();
        if let Some(running) = scheduler.find(job) {
            return running.activity.current_builder().map(|builder| builder.printed().clone());
        }
        let connection = self.connection_of_ended(&scheduler, job);
        drop(scheduler);
        let limit = self.limits.lock().max_output;
        Some(connection.state().pending_output(limit).clone())
    }

    /// Returns the connection of a job that is over, or the session's own connection if the job's connection is unknown.
    fn connection_of_ended(&self, scheduler: &SchedulerState, job: u64) -> Arc<Connection> {
        scheduler.evaluations.connection_of_job(job).unwrap_or_else(|| self.own_connection.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::{Barrier, mpsc};

    use parking_lot::Mutex;

    use super::*;
    use crate::outcome::{Changes, DefiningForm, ErrorRecord};
    use crate::session::observer::Observer;
    use crate::{Background, Evaluation, JobId, Limits, Session};

    /// An observer that moves an evaluation to the background while it gets a form of the evaluation.
    struct DetachingObserver {
        session: Session,
        evaluation: Mutex<Option<JobId>>,
        events: Mutex<Vec<String>>,
    }

    impl Observer for DetachingObserver {
        fn form_defined(&self, form: &DefiningForm, _: &Changes, binds_package: bool, _: bool, evaluation: u64) {
            assert!(self.session.inner.scheduler.try_lock().is_some(), "the scheduler's lock is held");
            let job = self.evaluation.lock().take();
            assert!(self.session.leave_foreground(job.expect("one form")).is_some());
            self.events.lock().push(format!("{} in {evaluation}, local: {binds_package}", form.code));
        }

        fn evaluation_detached(&self, evaluation: u64) {
            self.events.lock().push(format!("{evaluation} in the background"));
        }
    }

    /// The report of a long form takes time. A report that its evaluation is in the background applies to forms before it.
    #[test]
    fn evaluation_may_move_to_the_background_while_its_form_is_reported() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let evaluation = Evaluation { background: Background::Later, ..Evaluation::new("(defun f ())") };
        let id = session.submit(evaluation, drop);
        let observer =
            Arc::new(DetachingObserver { session, evaluation: Mutex::new(Some(id)), events: Mutex::default() });
        let _ = inner.observer.set(observer.clone());
        let job = inner.next_job(Lane::Evaluation, 1, None).expect("a job");
        inner.record_defining_form(job.id, 0, "12\n+FUNCTION F\n@COMMON-LISP-USER");
        assert_eq!(
            *observer.events.lock(),
            ["1 in the background", "(defun f ()) in 1, local: false", "1 in the background"]
        );
    }

    /// A garbage collection may stop a thread that prints, and the event loop would wait for the lock that the thread holds.
    #[test]
    fn threads_print_without_the_schedulers_lock() {
        let inner = Arc::new(Inner::new(Limits { max_output: 5, ..Limits::default() }));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let (send, receive) = mpsc::channel();
        let id =
            session.submit(Evaluation::new("(print-much)"), move |outcome| send.send(outcome).expect("a receiver"));
        let job = inner.next_job(Lane::Evaluation, 1, None).expect("a job").id;
        let text = [u32::from('x'); 4].map(AtomicU32::new);
        let print = || inner.event(job, false, Event::Stdout(Text::new(&text)));
        let step = Barrier::new(2);
        std::thread::scope(|scope| {
            let printing = scope.spawn(|| {
                print();
                step.wait();
                step.wait();
                print();
                print();
                inner.event(job, false, Event::Stderr(Text::new(&text)));
            });
            step.wait();
            let lock = inner.scheduler.lock();
            step.wait();
            let end = Instant::now() + Duration::from_secs(20);
            while !printing.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            let is_finished = printing.is_finished();
            drop(lock);
            assert!(is_finished, "the thread waits for the lock");
        });
        print();
        inner.event(job, false, Event::Done { success: true });
        let outcome = receive.recv().expect("an outcome");
        assert_eq!((&*outcome.stdout.text, outcome.stdout.omitted, outcome.stderr.omitted), ("xxxxx", 11, 4));
        // Output after the end is for the connection's next answer, and has a limit of its own.
        for (prints, expected) in [(3, ("xxxxx".to_owned(), 7)), (1, ("xxxx".to_owned(), 0))] {
            for _ in 0..prints {
                print();
            }
            let background = session.so_far(id).background;
            assert_eq!((background.text, background.omitted), expected);
        }
    }

    /// An observer that queues its reports of errors.
    struct QueueingObserver {
        session: Session,
        calls: Mutex<Vec<&'static str>>,
    }

    impl Observer for QueueingObserver {
        fn errors_changed(&self, _: u64, _: Option<&Arc<ErrorRecord>>, _: Option<&Arc<ErrorRecord>>) {
            self.calls.lock().push("changed");
        }

        fn send_queued_reports(&self) {
            assert!(self.session.inner.scheduler.try_lock().is_some(), "the scheduler's lock is held");
            self.calls.lock().push("sent");
        }
    }

    /// The next image must know each error that an answer has named, although the report of a large error takes time.
    #[test]
    fn errors_are_reported_without_the_lock_and_before_the_answer() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let session = Session { connection: inner.own_connection.clone(), inner: inner.clone() };
        let observer = Arc::new(QueueingObserver { session: session.clone(), calls: Mutex::default() });
        let _ = inner.observer.set(observer.clone());
        let answered = observer.clone();
        session.submit(Evaluation::new("(f)"), move |_| answered.calls.lock().push("answered"));
        let job = inner.next_job(Lane::Evaluation, 1, None).expect("a job");
        inner.event(job.id, false, Event::Done { success: false });
        assert_eq!(*observer.calls.lock(), ["changed", "sent", "answered"]);
    }

    /// An evaluation may wait for the thread while nothing else happens.
    #[test]
    fn the_clock_wakes_for_the_next_attempt_to_start_a_thread() {
        let inner = Arc::new(Inner::new(Limits::default()));
        let now = Instant::now();
        let Err(again) = inner.scheduler.lock().record_thread_refusal("there is no room", now) else {
            unreachable!("no request waits for the background")
        };
        assert_eq!(inner.interrupt_overdue(now), Some(again));
        inner.clock.arm(again);
        inner.stop_idle_clock(&inner.scheduler.lock(), now);
        let waiting = inner.clone();
        let (wake, woken) = mpsc::channel();
        std::thread::spawn(move || wake.send(waiting.clock.wait()));
        assert!(woken.recv_timeout(Duration::from_secs(20)).expect("the clock wakes") >= again);
    }
}
