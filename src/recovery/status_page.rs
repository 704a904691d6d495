//! The status page: numbers, and one short text, in memory that a worker shares with its supervisor. A write needs no
//! system call, and its effect outlasts the worker.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::FdFlags;

use crate::image::process::{SharedPage, share};
use crate::session::MAX_BACKGROUND;

/// The index of a number on the page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Status {
    /// The last foreground job that began.
    Begun,
    /// The client of the last foreground job that began.
    Client,
    /// The last foreground job that ended.
    Ended,
    /// The deadline of the last foreground job that began, in nanoseconds of [`monotonic`]; 0 for none.
    Due,
    /// The number of the form that is being replayed, from 1; 0 for none.
    Restoring,
    /// The highest number of a line that the worker has read.
    Heard,
    /// The number of answers that wait for a person or for another process.
    Asked,
    /// The number of the newest evaluation.
    Numbered,
    /// The inspection job that is running; 0 for none.
    Inspecting,
    /// The number of a line that has not reached the worker, `u64::MAX` when it is not known; 0 for none.
    Missed,
}

const COUNT: usize = 10;

/// The places of the numbers of background evaluations, after the numbers above; 0 for an empty place.
const BACKGROUND: std::ops::Range<usize> = COUNT..COUNT + MAX_BACKGROUND;

/// The place of the foreground job's current step, after the background evaluations: the length in bytes, then the bytes.
const STEP: usize = BACKGROUND.end;
const MAX_STEP: usize = 248;

/// Returns the time of the monotonic clock, which all processes share, in nanoseconds.
pub(crate) fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Grace period after the deadline, in which the evaluation ends or the worker itself abandons it.
const GRACE: Duration = Duration::from_secs(3);

/// Returns the [deadline](Status::Due) of an evaluation that has this much time from now on, plus the grace period.
pub(crate) fn deadline(time: Duration) -> u64 {
    u64::try_from((time + GRACE).as_nanos()).unwrap_or(u64::MAX).saturating_add(monotonic())
}

/// The worker's side of the page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatusPage(SharedPage);

impl StatusPage {
    /// Maps the page whose file descriptor the supervisor passed under this number.
    pub(crate) fn take(number: i32) -> io::Result<Self> {
        share(number).map(Self)
    }

    /// Writes a number.
    pub(crate) fn set(self, what: Status, value: u64) {
        self.0[what as usize].store(value, Ordering::Release);
    }

    /// Writes a number unless the page has a higher one.
    pub(crate) fn raise(self, what: Status, value: u64) {
        self.0[what as usize].fetch_max(value, Ordering::AcqRel);
    }

    /// Writes the numbers of the background evaluations.
    pub(crate) fn set_background(self, evaluations: &mut dyn Iterator<Item = u64>) {
        for place in BACKGROUND {
            self.0[place].store(evaluations.next().unwrap_or(0), Ordering::Release);
        }
    }

    /// Writes the current step of the foreground job, cut to [`MAX_STEP`] bytes.
    pub(crate) fn set_step(self, step: Option<&str>) {
        let step = step.unwrap_or_default();
        let end = (0..=step.len().min(MAX_STEP)).rev().find(|end| step.is_char_boundary(*end)).unwrap_or(0);
        let step = &step.as_bytes()[..end];
        self.0[STEP].store(0, Ordering::Release);
        for (place, chunk) in step.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0[STEP + 1 + place].store(u64::from_ne_bytes(word), Ordering::Release);
        }
        self.0[STEP].store(step.len() as u64, Ordering::Release);
    }

    /// Adds one to a number, or subtracts one.
    pub(crate) fn count(self, what: Status, more: bool) {
        let number = &self.0[what as usize];
        // No overflow: foreign code may have written any value to the page.
        let _ = number.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            if more { count.checked_add(1) } else { count.checked_sub(1) }
        });
    }

    /// Reads a number.
    pub(crate) fn get(self, what: Status) -> u64 {
        self.0[what as usize].load(Ordering::Acquire)
    }
}

/// The supervisor's side of the page, one for each worker process.
#[derive(Debug)]
pub(crate) struct WorkerStatus(OwnedFd);

impl WorkerStatus {
    /// Creates a page of zeros: in memory, or in the file `path`, which it replaces and where it outlives the supervisor.
    pub(crate) fn new(path: Option<&Path>) -> io::Result<Self> {
        let Some(path) = path else {
            let fd = unnamed_file()?;
            rustix::fs::ftruncate(&fd, 4096)?;
            return Ok(Self(fd));
        };
        let draft = path.with_extension("draft");
        let mut options = std::fs::File::options();
        let file = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.set_len(4096)?;
        std::fs::rename(draft, path)?;
        Ok(Self(file.into()))
    }

    /// Sets whether child processes inherit the page's file descriptor, and returns the number of the descriptor.
    pub(crate) fn inherit(&self, yes: bool) -> io::Result<i32> {
        rustix::io::fcntl_setfd(&self.0, if yes { FdFlags::empty() } else { FdFlags::CLOEXEC })?;
        Ok(self.0.as_raw_fd())
    }

    /// Reads a number.
    pub(crate) fn get(&self, what: Status) -> u64 {
        self.read::<1>(what as usize)[0]
    }

    /// Reads the numbers of the background evaluations.
    pub(crate) fn background(&self) -> Vec<u64> {
        let numbers = self.read::<MAX_BACKGROUND>(BACKGROUND.start);
        numbers.into_iter().filter(|number| *number != 0).collect()
    }

    /// Reads the current step of the foreground job.
    pub(crate) fn step(&self) -> Option<String> {
        let length = usize::try_from(self.read::<1>(STEP)[0]).ok().filter(|length| (1..=MAX_STEP).contains(length))?;
        let words = self.read::<{ MAX_STEP / 8 }>(STEP + 1);
        let bytes: Vec<_> = words.iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
        String::from_utf8(bytes).ok()
    }

    fn read<const N: usize>(&self, place: usize) -> [u64; N] {
        let mut bytes = [[0; 8]; N];
        // After an error the numbers are 0, as on a new page.
        let _ = rustix::io::pread(&self.0, bytes.as_flattened_mut(), place as u64 * 8);
        bytes.map(u64::from_ne_bytes)
    }
}

/// Returns the number of the newest evaluation of the last worker whose page is in this file; 0 without a file.
pub(crate) fn last_number(path: &Path) -> u64 {
    let file = std::fs::File::open(path).map(|file| WorkerStatus(file.into()));
    file.map_or(0, |status| status.get(Status::Numbered)).min(u64::MAX / 2)
}

/// Creates a file in memory.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn unnamed_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(c"sbcl-mcp-status", rustix::fs::MemfdFlags::CLOEXEC)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn unnamed_file() -> io::Result<OwnedFd> {
    let path = std::env::temp_dir().join(format!("sbcl-mcp-status-{}-{}", std::process::id(), monotonic()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file.into())
}
