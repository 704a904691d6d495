//! The status page: numbers and one short text in memory that a worker shares with its supervisor. The worker writes to
//! the page without a system call, and the supervisor can read the page after the worker's death.

use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::process::Pid;

use crate::image::process::{SharedPage, map_shared_page};
use crate::os::files;
use crate::rpc::route::call_of_job;
use crate::session::MAX_BACKGROUND;

/// A number on the page. The discriminant is the number's index on the page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StatusField {
    /// The number of the foreground job that began last. Job numbers do not always rise.
    Begun,
    /// The number of the connection whose foreground job began last.
    Client,
    /// The number of the foreground job that ended last; equal to [`Begun`](Self::Begun) unless a foreground job runs.
    Ended,
    /// The deadline of the foreground job that began last, or of the replayed form, in nanoseconds of
    /// [`monotonic_nanoseconds`]; 0 for none.
    Deadline,
    /// The number of the form that is being replayed, from 1; 0 for none.
    ReplayedForm,
    /// The highest call number among the lines that the worker has read.
    LastLineRead,
    /// The number of answers that wait for a person, for another process, or for a thread that handles slow lines or
    /// continues calls after a replay.
    PendingAnswers,
    /// The number of the newest evaluation.
    NewestEvaluation,
    /// The number of a job of the call whose inspection began last among the running inspections; 0 for none.
    Inspecting,
    /// The call number of a line that has not reached the worker, `u64::MAX` if the number is unknown; 0 for none.
    LostLine,
    /// The last deadline of the running inspections, in nanoseconds of [`monotonic_nanoseconds`]; 0 for none.
    InspectionDeadline,
    /// The id of the process that saves the persistent session at the end, and outlives the worker; 0 for none.
    Saver,
    /// The number of a job of the call that requested the foreground evaluation that began last; 0 for the server's own job,
    /// and for a query, such as the save of a checkpoint.
    RequestedBy,
    /// The highest job number of a call that has begun, as [`StatusPage::record_begun`] records it.
    HighestBegun,
    /// The number of the newest error.
    NewestError,
    /// The call number of a line that a thread for slow lines is decoding; 0 for none.
    LineBeingDecoded,
}

/// The number of [`StatusField`]s.
const FIELD_COUNT: usize = 16;

/// The indices on the page of the background evaluations' numbers. The number at an unused index is 0.
const BACKGROUND_INDICES: std::ops::Range<usize> = FIELD_COUNT..FIELD_COUNT + MAX_BACKGROUND;

/// The index of the foreground job's current step. The number there is the step's length in bytes; the bytes follow.
const STEP_INDEX: usize = BACKGROUND_INDICES.end;
/// Maximum length of a step, in bytes.
const MAX_STEP: usize = 248;

/// The indices of the marks of calls that have begun. A number there has marks for a block of 32 calls: the number of the
/// block in the upper half, and a bit for each call in the lower half. Blocks whose numbers have the same remainder modulo
/// [`BLOCK_COUNT`] share an index, where the page has the marks of the highest block.
const BEGUN_INDICES: std::ops::Range<usize> = STEP_INDEX + 1 + MAX_STEP / 8..512;
/// The number of blocks that the page has room for.
const BLOCK_COUNT: usize = BEGUN_INDICES.end - BEGUN_INDICES.start;

/// Returns the time of the monotonic clock, which all processes share, in nanoseconds.
pub(crate) fn monotonic_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// The grace period after a time limit, in which the evaluation ends or the worker abandons it.
const GRACE_PERIOD: Duration = Duration::from_secs(3);

/// Returns the [deadline](StatusField::Deadline) of an evaluation, or of an inspection, that may run for `time` from now:
/// now plus `time` plus the grace period.
pub(crate) fn deadline(time: Duration) -> u64 {
    u64::try_from((time + GRACE_PERIOD).as_nanos()).unwrap_or(u64::MAX).saturating_add(monotonic_nanoseconds())
}

/// The worker's side of the page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatusPage(SharedPage);

impl StatusPage {
    /// Maps the page of file descriptor `number`, which the supervisor passed.
    pub(crate) fn map(number: i32) -> io::Result<Self> {
        map_shared_page(number).map(Self)
    }

    /// Writes a number.
    pub(crate) fn set(self, field: StatusField, value: u64) {
        self.0[field as usize].store(value, Ordering::Release);
    }

    /// Writes a number unless the current value is higher.
    pub(crate) fn raise(self, field: StatusField, value: u64) {
        self.0[field as usize].fetch_max(value, Ordering::AcqRel);
    }

    /// Writes `new` if the current value is `old`.
    pub(crate) fn replace(self, field: StatusField, old: u64, new: u64) {
        let _ = self.0[field as usize].compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Records that a call has begun: a job of the call begins on an evaluating thread, or the call changes something
    /// without a job. `job` is the number of a job of the call.
    pub(crate) fn record_begun(self, job: u64) {
        self.raise(StatusField::HighestBegun, job);
        let (offset, mark) = begun_mark(call_of_job(job));
        let marks = &self.0[BEGUN_INDICES.start + offset];
        let _ = marks.fetch_update(Ordering::AcqRel, Ordering::Acquire, |known| {
            match block_of(known).cmp(&block_of(mark)) {
                std::cmp::Ordering::Less => Some(mark),
                std::cmp::Ordering::Equal => Some(known | mark),
                std::cmp::Ordering::Greater => None,
            }
        });
    }

    /// Writes the numbers of the background evaluations, at most [`MAX_BACKGROUND`].
    pub(crate) fn set_background(self, evaluations: &mut dyn Iterator<Item = u64>) {
        for index in BACKGROUND_INDICES {
            self.0[index].store(evaluations.next().unwrap_or(0), Ordering::Release);
        }
    }

    /// Writes the current step of the foreground job, cut to [`MAX_STEP`] bytes. `None` means that there is no step.
    pub(crate) fn set_step(self, step: Option<&str>) {
        let step = step.unwrap_or_default();
        let end = (0..=step.len().min(MAX_STEP)).rev().find(|end| step.is_char_boundary(*end)).unwrap_or(0);
        let step = &step.as_bytes()[..end];
        self.0[STEP_INDEX].store(0, Ordering::Release);
        for (index, chunk) in step.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0[STEP_INDEX + 1 + index].store(u64::from_ne_bytes(word), Ordering::Release);
        }
        self.0[STEP_INDEX].store(step.len() as u64, Ordering::Release);
    }

    /// Increments the number in `field` if `more` is true, else decrements it. A number that would overflow or become
    /// negative stays.
    pub(crate) fn adjust(self, field: StatusField, more: bool) {
        let number = &self.0[field as usize];
        // The arithmetic is checked, since foreign code may have written any value to the page.
        let _ = number.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            if more { count.checked_add(1) } else { count.checked_sub(1) }
        });
    }

    /// Returns the number in `field`.
    pub(crate) fn get(self, field: StatusField) -> u64 {
        self.0[field as usize].load(Ordering::Acquire)
    }

    /// Returns the process that saves the session at the end.
    pub(crate) fn saver(self) -> Option<Pid> {
        process_id(self.get(StatusField::Saver))
    }
}

/// A session's newest numbers, from which the next image continues to count. A worker's page has them from its creation on:
/// if the server is killed while the worker boots, the session's next server reads them from the page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NewestNumbers {
    /// The number of the newest evaluation.
    pub(crate) evaluation: u64,
    /// The number of the newest error, of any client.
    pub(crate) error: u64,
}

/// The supervisor's side of the page. Each worker process has a page of its own.
#[derive(Debug)]
pub(crate) struct WorkerStatus(OwnedFd);

impl WorkerStatus {
    /// Creates a page with the session's newest numbers, otherwise of zeros. With a `path`, the page is a file, which
    /// replaces any file at `path` and outlives the supervisor. Without a `path`, or if the file cannot be written, the page
    /// is in memory.
    pub(crate) fn new(path: Option<&Path>, newest: NewestNumbers) -> io::Result<Self> {
        let mut page = [0; 4096];
        for (field, number) in
            [(StatusField::NewestEvaluation, newest.evaluation), (StatusField::NewestError, newest.error)]
        {
            page[field as usize * 8..][..8].copy_from_slice(&number.to_ne_bytes());
        }
        let in_file = |path| {
            Self::create_in_file(path, &page).inspect_err(|error| {
                tracing::warn!(
                    "the file {} cannot be written: {error}; if the server is killed, the session's next server may use \
                     numbers of evaluations and errors again",
                    Path::display(path)
                );
            })
        };
        if let Some(page) = path.and_then(|path| in_file(path).ok()) {
            return Ok(page);
        }
        let fd = unnamed_file()?;
        let mut file = std::fs::File::from(fd);
        file.write_all(&page)?;
        Ok(Self(file.into()))
    }

    /// Creates a status page in a file, which replaces the file at `path`.
    fn create_in_file(path: &Path, page: &[u8]) -> io::Result<Self> {
        let draft = path.with_extension("draft");
        let file = files::create(&draft)?;
        // The zeros are written, too, so that the file has a disk block. On a full disk, a store to a mapped page without a
        // block would raise SIGBUS.
        let written = (&file).write_all(page).and_then(|()| std::fs::rename(&draft, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&draft);
        }
        written.map(|()| Self(file.into()))
    }

    /// Sets whether child processes inherit the page's file descriptor. Returns the descriptor's number.
    pub(crate) fn set_inheritable(&self, yes: bool) -> io::Result<i32> {
        rustix::io::fcntl_setfd(&self.0, if yes { FdFlags::empty() } else { FdFlags::CLOEXEC })?;
        Ok(self.0.as_raw_fd())
    }

    /// Returns the number in `field`.
    pub(crate) fn get(&self, field: StatusField) -> u64 {
        let read = || self.read::<1>(field as usize)[0];
        // Some kernels may copy a number in pieces while the worker writes it, so two reads must agree.
        let mut number = read();
        for _ in 0..3 {
            let again = read();
            if again == number {
                break;
            }
            number = again;
        }
        number
    }

    /// Returns the newest numbers. They are limited to `u64::MAX / 2`, since foreign code may have written any value to the
    /// page.
    pub(crate) fn newest_numbers(&self) -> NewestNumbers {
        let number = |field| self.get(field).min(u64::MAX / 2);
        NewestNumbers { evaluation: number(StatusField::NewestEvaluation), error: number(StatusField::NewestError) }
    }

    /// Returns the process that saves the session at the end.
    pub(crate) fn saver(&self) -> Option<Pid> {
        process_id(self.get(StatusField::Saver))
    }

    /// Maps the page as a worker does.
    #[cfg(test)]
    pub(crate) fn map(&self) -> StatusPage {
        use std::os::fd::IntoRawFd;
        StatusPage::map(self.0.try_clone().expect("a descriptor is free").into_raw_fd())
            .expect("the page can be mapped")
    }

    /// Reads the marks of the calls that have begun.
    pub(crate) fn begun_calls(&self) -> BegunCalls {
        let marks = self.read::<BLOCK_COUNT>(BEGUN_INDICES.start);
        BegunCalls { marks, highest_block: marks.into_iter().map(block_of).max().unwrap_or(0) }
    }

    /// Reads the numbers of the background evaluations.
    pub(crate) fn background(&self) -> Vec<u64> {
        let numbers = self.read::<MAX_BACKGROUND>(BACKGROUND_INDICES.start);
        numbers.into_iter().filter(|number| *number != 0).collect()
    }

    /// Reads the current step of the foreground job.
    pub(crate) fn step(&self) -> Option<String> {
        let length =
            usize::try_from(self.read::<1>(STEP_INDEX)[0]).ok().filter(|length| (1..=MAX_STEP).contains(length))?;
        let words = self.read::<{ MAX_STEP / 8 }>(STEP_INDEX + 1);
        let bytes: Vec<_> = words.iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
        String::from_utf8(bytes).ok()
    }

    /// Returns the `N` numbers from `index` on.
    fn read<const N: usize>(&self, index: usize) -> [u64; N] {
        let mut bytes = [[0; 8]; N];
        // After an error the numbers are 0, as on a new page.
        let _ = rustix::io::pread(&self.0, bytes.as_flattened_mut(), index as u64 * 8);
        // The worker may be writing: numbers that are read later must not be older.
        fence(Ordering::Acquire);
        bytes.map(u64::from_ne_bytes)
    }
}

/// The calls that have begun, as far as the page has their marks.
#[derive(Debug)]
pub(crate) struct BegunCalls {
    marks: [u64; BLOCK_COUNT],
    highest_block: u64,
}

impl BegunCalls {
    /// Returns false if this call has not begun. Returns true if the call has begun, and also if the marks of a higher block
    /// may have replaced the marks of the call's block.
    pub(crate) fn may_include(&self, call: u64) -> bool {
        let (offset, mark) = begun_mark(call);
        let known = self.marks[offset];
        (block_of(known) == block_of(mark) && known & mark == mark)
            || block_of(mark) + BLOCK_COUNT as u64 <= self.highest_block
    }
}

/// Returns the offset among the [`BEGUN_INDICES`] of a call's block, and the marks of this block if no other call has begun.
fn begun_mark(call: u64) -> (usize, u64) {
    let block = call / 32;
    ((block % BLOCK_COUNT as u64) as usize, (block << 32) | (1_u64 << (call % 32)))
}

/// Returns the number of the block to which these marks belong.
fn block_of(marks: u64) -> u64 {
    marks >> 32
}

/// Returns the process with this id; `None` for 0, and for numbers that are not process ids.
fn process_id(number: u64) -> Option<Pid> {
    Pid::from_raw(i32::try_from(number).ok()?)
}

/// Returns the newest numbers from the page in this file; zeros without a file.
pub(crate) fn newest_numbers(path: &Path) -> NewestNumbers {
    let file = files::open(path).map(|file| WorkerStatus(file.into()));
    file.map(|status| status.newest_numbers()).unwrap_or_default()
}

/// Creates a file in memory, or an unlinked temporary file on systems without memfd_create(2).
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn unnamed_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(c"sbcl-mcp-status", rustix::fs::MemfdFlags::CLOEXEC)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn unnamed_file() -> io::Result<OwnedFd> {
    let path = std::env::temp_dir().join(format!("sbcl-mcp-status-{}-{}", std::process::id(), monotonic_nanoseconds()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::route::job_number;

    #[test]
    fn calls_that_have_not_begun_are_known_among_the_last_calls() {
        const COUNT: u64 = 32 * BLOCK_COUNT as u64;
        let status = WorkerStatus::new(None, NewestNumbers::default()).unwrap();
        let page = status.map();
        let begun = || {
            let begun = status.begun_calls();
            (1..=2 * COUNT).filter(|call| begun.may_include(*call)).collect::<Vec<_>>()
        };
        assert!(begun().is_empty());
        for call in [40, 7, 3, COUNT - 1] {
            page.record_begun(job_number(call, 1));
        }
        assert_eq!(begun(), [3, 7, 40, COUNT - 1]);
        assert_eq!(status.get(StatusField::HighestBegun), job_number(COUNT - 1, 1));
        // The blocks of calls 3 and `COUNT + 3` have the same index.
        page.record_begun(job_number(COUNT + 3, 0));
        page.record_begun(job_number(3, 0));
        assert_eq!(begun(), (1..32).chain([40, COUNT - 1, COUNT + 3]).collect::<Vec<_>>());
    }

    #[test]
    fn new_page_has_the_newest_numbers_before_a_worker_writes_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("status");
        assert_eq!(newest_numbers(&path), NewestNumbers::default());
        for newest in [NewestNumbers { evaluation: 7, error: 3 }, NewestNumbers { evaluation: 9, error: 4 }] {
            let page = WorkerStatus::new(Some(&path), newest).unwrap();
            assert_eq!((page.newest_numbers(), newest_numbers(&path)), (newest, newest));
            assert_eq!(WorkerStatus::new(None, newest).unwrap().newest_numbers(), newest);
            assert_eq!(page.get(StatusField::Begun), 0);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
        }
    }
}
