//! The watchdog, which detects a worker process that is alive but makes no progress, because a signal has stopped the
//! process or because its threads are deadlocked (an evaluation was interrupted inside foreign code, for example).

use std::time::{Duration, Instant};

use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::os::processes;
use crate::recovery::state::Crash;
use crate::recovery::status_page::{StatusField, monotonic_nanoseconds};
use crate::result_kind::TIMEOUT;
use crate::session::recovery::failed_outcome;

// Each limit is the number of checks in a row that must find the same fault before the worker is ended. Checks are
// counted, not timed, since the supervisor may have been stopped too, or the machine may be busy.

/// Limit for a worker that does not read its input. A garbage collection of a large heap may stop reading for a while.
const NOT_READING_LIMIT: u32 = 10;
/// Limit for a worker that reads requests but runs nothing while a client waits.
const STALLED_LIMIT: u32 = 20;
/// Limit for a worker that a signal has stopped: a SIGCONT may follow.
const STOPPED_LIMIT: u32 = 10;
/// Limit for an evaluation that still runs after its deadline, by which the worker should have ended it or asked to be
/// replaced.
const OVERDUE_LIMIT: u32 = 2;
/// Limit for a frame that the worker has begun to write and does not finish.
const UNFINISHED_LIMIT: u32 = 5;
/// Limit for a worker that has not finished its start or the replay of definitions. A check counts unless the form
/// that is being replayed still has time left.
const UNREADY_LIMIT: u32 = 45;
/// The shortest time between two checks of such a worker. However short the interval, a slow machine can boot SBCL.
const UNREADY_INTERVAL: Duration = Duration::from_secs(1);
/// The number of unread bytes from the worker that shows that the supervisor is behind with the worker's reports. Until the
/// supervisor has caught up, the worker reads no requests.
const MANY_BYTES: u64 = 16 << 10;

/// The watchdog of one worker process.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    /// The time between two checks while a client waits for a worker that is ready.
    pub(super) interval: Duration,
    /// The time of the last check.
    last_check: Option<Instant>,
    /// The number of the last line that the worker had read at the last check.
    last_read: u64,
    /// The number of the oldest line whose client waited at the last check, and the number of the foreground job that
    /// had begun last.
    waits: (Option<u64>, u64),
    /// The number of bytes that were read from the worker by the last check, if they ended within a frame.
    unfinished_at: Option<u64>,
    // The counters of the faults: for each fault, the number of checks in a row that found it.
    not_reading: u32,
    stalled: u32,
    stopped: u32,
    overdue: u32,
    unfinished: u32,
    unready: u32,
}

impl Watchdog {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, ..Self::default() }
    }

    /// Checks the worker if the interval has passed. Returns the crash to record if the worker must be ended.
    /// `is_serving` is false while the server shuts down: the worker then need not read its input or write answers.
    pub(super) fn check(&mut self, worker: &WorkerProcess, requests: &Requests, is_serving: bool) -> Option<Crash> {
        let interval = if worker.replayed { self.interval } else { self.interval.max(UNREADY_INTERVAL) };
        if self.last_check.get_or_insert_with(Instant::now).elapsed() < interval {
            return None;
        }
        self.last_check = Some(Instant::now());
        let count = |counter: &mut u32, is_faulty: bool| {
            *counter = if is_faulty { *counter + 1 } else { 0 };
            *counter
        };
        if !worker.replayed {
            // Each replayed form has a deadline of its own.
            let deadline = worker.status.get(StatusField::Deadline);
            // The last form has no deadline any more once it is replayed.
            let overdue =
                worker.status.get(StatusField::ReplayedForm) > 0 && deadline != 0 && deadline < monotonic_nanoseconds();
            if count(&mut self.overdue, overdue) >= OVERDUE_LIMIT {
                return Some(Crash::new("could not be interrupted and was terminated").caused_by_form());
            }
            return (count(&mut self.unready, deadline < monotonic_nanoseconds()) >= UNREADY_LIMIT)
                .then(|| Crash::new("did not become ready in time and was terminated"));
        }
        // `Ended` is read before `Begun`: a job that begins between the two reads counts as running.
        let ended = worker.status.get(StatusField::Ended);
        let (begun, deadline) = (worker.status.get(StatusField::Begun), worker.status.get(StatusField::Deadline));
        let running = begun != ended;
        let is_stopped = processes::is_stopped(worker.pid);
        let is_overdue = running && deadline != 0 && deadline < monotonic_nanoseconds();
        // The deadline may be the end of a step, or the time by which an interrupted evaluation should have unwound.
        let timeout = || {
            let during = worker.status.step().map_or_else(String::new, |step| format!(" during {step}"));
            failed_outcome(TIMEOUT, format!("The evaluation did not end in time{during}"))
        };
        // A stopped worker cannot end the evaluation, but may continue soon.
        if count(&mut self.overdue, is_overdue && !is_stopped) >= OVERDUE_LIMIT {
            return Some(Crash::new("could not be interrupted and was terminated").with_outcome(timeout()));
        }
        if count(&mut self.stopped, is_stopped) >= STOPPED_LIMIT {
            let crash = Crash::new("was stopped by a signal and was terminated");
            return Some(if is_overdue { crash.with_outcome(timeout()) } else { crash });
        }
        let lost_line = worker.status.get(StatusField::LostLine);
        if lost_line > 0 {
            let cause =
                "lost a request because code had read from a file descriptor that the server uses, and was terminated";
            return Some(Crash::new(cause).stalled_at(Some(lost_line)));
        }
        let unfinished_at = worker.unfinished_frame_at();
        let unfinished =
            is_serving && self.stopped == 0 && unfinished_at.is_some() && unfinished_at == self.unfinished_at;
        self.unfinished_at = unfinished_at;
        if count(&mut self.unfinished, unfinished) >= UNFINISHED_LIMIT {
            let cause = "stopped in the middle of a message to the server and was terminated (code may have written to a \
                         file descriptor that the server uses)";
            return Some(Crash::new(cause));
        }
        let supervisor_is_behind = worker.unread_bytes() >= MANY_BYTES;
        // Only requests count: a notification may stay open until a request before it is answered.
        let waits = (requests.first_awaited(), begun);
        let inspecting = monotonic_nanoseconds() < worker.status.get(StatusField::InspectionDeadline);
        let busy = running
            || inspecting
            || worker.status.get(StatusField::PendingAnswers) > 0
            || !worker.status.background().is_empty();
        let stalled = is_serving && !supervisor_is_behind && !busy && waits.0.is_some() && waits == self.waits;
        self.waits = waits;
        if count(&mut self.stalled, stalled) >= STALLED_LIMIT {
            return Some(Crash::new("stopped answering and was terminated").stalled_at(waits.0));
        }
        let last_read = worker.status.get(StatusField::LastLineRead);
        let not_reading = is_serving
            && !supervisor_is_behind
            && last_read == self.last_read
            && requests.has_open_line_after(last_read);
        self.last_read = last_read;
        (count(&mut self.not_reading, not_reading) >= NOT_READING_LIMIT).then(|| {
            Crash::new("stopped reading requests and was terminated")
                .stalled_at(requests.first_open_line_from(last_read))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::recovery::status_page::WorkerStatus;
    use crate::rpc::WriteBuffer;
    use crate::rpc::frame::{FrameKind, encode_header};

    /// Makes a worker that has replayed its definitions. Its process is this process.
    pub(crate) fn replayed_worker() -> WorkerProcess {
        let status = WorkerStatus::new(None, Default::default()).expect("memory");
        let (output, input) = std::io::pipe().expect("a pipe");
        let this_process = rustix::process::getpid();
        let mut worker = WorkerProcess::new(this_process, status, WriteBuffer::new(input.into()), output.into());
        worker.replayed = true;
        worker
    }

    /// A job that waited while its client's user was asked a question begins after jobs with higher numbers.
    #[test]
    fn a_job_that_begins_after_a_job_with_a_higher_number_keeps_the_worker_alive() {
        let worker = replayed_worker();
        let page = worker.status.map();
        let mut requests = Requests::new();
        requests.add(0, *b"{\"id\":7,\"method\":\"tools/call\"}");
        assert!(requests.next_piece().is_some());
        page.set(StatusField::LastLineRead, 1);
        let mut watchdog = Watchdog::new(Duration::ZERO);
        let mut check = |begun, ended| {
            page.set(StatusField::Begun, begun);
            page.set(StatusField::Ended, ended);
            (0..2 * STALLED_LIMIT).find_map(|_| watchdog.check(&worker, &requests, true))
        };
        assert!(check(5, 6).is_none());
        assert!(check(5, 5).expect("nothing runs").cause.starts_with("stopped answering"));
    }

    /// The worker reads no requests while many reports to the supervisor wait.
    #[test]
    fn a_worker_is_kept_while_the_supervisor_is_behind_with_its_reports() {
        let mut worker = replayed_worker();
        let mut requests = Requests::new();
        requests.add(0, *b"{\"id\":7,\"method\":\"ping\"}");
        assert!(requests.next_piece().is_some());
        let mut watchdog = Watchdog::new(Duration::ZERO);
        worker.input.as_mut().expect("a pipe").put(&[0; MANY_BYTES as usize]).expect("room in the pipe");
        assert!((0..2 * STALLED_LIMIT).all(|_| watchdog.check(&worker, &requests, true).is_none()));
        // A few bytes may come from a thread that prints.
        let mut worker = replayed_worker();
        worker.input.as_mut().expect("a pipe").put(&[0; 100]).expect("room in the pipe");
        let crash = (0..NOT_READING_LIMIT).find_map(|_| watchdog.check(&worker, &requests, true));
        assert!(crash.expect("nothing is read").cause.starts_with("stopped reading"));
    }

    #[test]
    fn a_worker_that_does_not_finish_a_frame_is_ended_without_a_claim_about_the_cause() {
        let mut worker = replayed_worker();
        let header = encode_header(FrameKind::Answer, 1, 100);
        worker.input.as_mut().expect("a pipe").put(&header).expect("room in the pipe");
        worker.read();
        let (mut watchdog, requests) = (Watchdog::new(Duration::ZERO), Requests::new());
        let crash = (0..=UNFINISHED_LIMIT).find_map(|_| watchdog.check(&worker, &requests, true));
        let cause = crash.expect("the frame is unfinished").cause;
        assert!(cause.starts_with("stopped in the middle of a message") && cause.contains("code may have"), "{cause}");
    }

    #[test]
    fn an_overdue_evaluation_is_not_said_to_have_exceeded_a_time_limit_and_its_step_is_named() {
        for (step, expected) in [
            (None, "The evaluation did not end in time"),
            (Some("the load of demo"), "The evaluation did not end in time during the load of demo"),
        ] {
            let worker = replayed_worker();
            let page = worker.status.map();
            page.set(StatusField::Begun, 1);
            page.set(StatusField::Deadline, 1);
            page.set_step(step);
            let (mut watchdog, requests) = (Watchdog::new(Duration::ZERO), Requests::new());
            let crash = (0..OVERDUE_LIMIT).find_map(|_| watchdog.check(&worker, &requests, true));
            let outcome = crash.and_then(|crash| crash.outcome).expect("the outcome of the evaluation");
            assert_eq!(outcome.result.expect_err("an error").message.text, expected);
        }
    }
}
