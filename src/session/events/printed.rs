//! The printed output of an evaluation, which the threads that print share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::text::part;
use crate::image::Text;
use crate::outcome::{Clipped, interleave};

/// The number of bytes of the output that are copied while the output's lock is held. The output that is kept by default
/// rarely takes more.
const OUTPUT_PART: usize = 6 << 20;

/// The output of an evaluation, or the output that waits for a connection's next answer.
///
/// The threads that print add their text under this output's own lock, not under the scheduler's lock: a garbage collection
/// may stop a thread that prints at any point, and the event loop often needs the scheduler's lock. The event loop never
/// waits long for an output's lock. A thread that holds the lock takes no other lock of the session.
#[derive(Debug)]
pub(crate) struct Printed {
    /// The maximum number of characters to keep.
    limit: u64,
    /// True if text for stderr is added to stdout.
    has_one_stream: bool,
    /// The number of characters printed so far, without those that were omitted from clipped text. The number changes only
    /// under the lock of `text`.
    total: AtomicU64,
    /// The kept text; `None` once the text has been [taken](Self::take) or [moved](Self::moved).
    text: Mutex<Option<PrintedText>>,
}

/// The kept text of an output.
#[derive(Debug, Clone, Default)]
pub(crate) struct PrintedText {
    pub(crate) stdout: Clipped,
    pub(crate) stderr: Clipped,
    /// The order of the text, in the format of [`Outcome::turns`](crate::outcome::Outcome::turns).
    pub(crate) turns: Vec<u32>,
}

impl PrintedText {
    /// Returns the length of the text, in bytes.
    fn len(&self) -> usize {
        self.stdout.text.len() + self.stderr.text.len()
    }

    /// Returns stdout and stderr in the order printed.
    pub(crate) fn interleaved(&self) -> Clipped {
        Clipped {
            text: interleave(&self.stdout.text, &self.stderr.text, &self.turns),
            omitted: self.stdout.omitted + self.stderr.omitted,
        }
    }
}

impl Default for Printed {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Printed {
    /// Creates an output that keeps the first `limit` characters and counts the rest.
    pub(crate) fn new(limit: u64) -> Self {
        let text = Mutex::new(Some(PrintedText::default()));
        Self { limit, has_one_stream: false, total: AtomicU64::new(0), text }
    }

    /// Creates an output as [`new`](Self::new) does, in which all text is added to stdout.
    pub(crate) fn with_one_stream(limit: u64) -> Self {
        Self { has_one_stream: true, ..Self::new(limit) }
    }

    /// Adds text to stderr if `is_stderr` is true and the output has two streams, and to stdout otherwise. Returns false, and
    /// adds nothing, if the output has been taken or moved.
    pub(crate) fn push(&self, is_stderr: bool, text: Text<'_>) -> bool {
        self.add(is_stderr, text.len() as u64, 0, |kept, count| text.append_to(kept, count))
    }

    /// Adds text that was clipped before to stdout. The characters omitted from the text count as omitted here, too.
    pub(crate) fn push_clipped(&self, clipped: &Clipped) {
        let length = clipped.text.chars().count() as u64;
        self.add(false, length, clipped.omitted, |kept, count| kept.extend(clipped.text.chars().take(count)));
    }

    /// Adds a text of `length` characters and counts `omitted` further characters. `append` appends as many characters of the
    /// text as its second argument says. Returns false, and does nothing, if the output has been taken or moved.
    fn add(&self, is_stderr: bool, length: u64, omitted: u64, append: impl FnOnce(&mut String, usize)) -> bool {
        let is_stderr = is_stderr && !self.has_one_stream;
        let mut printed = self.text.lock();
        let Some(PrintedText { stdout, stderr, turns }) = printed.as_mut() else { return false };
        let stream = if is_stderr { stderr } else { stdout };
        let keep = length.min(self.left());
        if keep > 0 {
            append(&mut stream.text, usize::try_from(keep).unwrap_or(usize::MAX));
            let kept = u32::try_from(keep).unwrap_or(u32::MAX);
            // Turns of stdout have even indices, and turns of stderr have odd indices.
            let last_is_stderr = turns.len().is_multiple_of(2);
            match turns.last_mut() {
                Some(turn) if last_is_stderr == is_stderr => *turn += kept,
                last => {
                    if last.is_none() && is_stderr {
                        turns.push(0);
                    }
                    turns.push(kept);
                }
            }
        }
        stream.omitted += length - keep + omitted;
        self.total.store(self.total() + length, Ordering::Relaxed);
        true
    }

    /// Returns the number of characters printed so far. Takes no lock.
    fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns true if nothing has been printed so far. Takes no lock.
    pub(crate) fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// Returns the number of characters that are kept so far. Takes no lock.
    pub(crate) fn kept(&self) -> u64 {
        self.total().min(self.limit)
    }

    /// Returns the number of further characters to keep. Takes no lock.
    pub(crate) fn left(&self) -> u64 {
        self.limit - self.kept()
    }

    /// Takes the text. Threads that print must then find another output.
    pub(crate) fn take(&self) -> PrintedText {
        self.text.lock().take().unwrap_or_default()
    }

    /// Takes the text as [`take`](Self::take) does, if no other thread keeps the lock and the text has at most `max` bytes.
    pub(crate) fn try_take(&self, max: usize) -> Option<PrintedText> {
        self.text.try_lock()?.take_if(|text| text.len() <= max)
    }

    /// Copies the text so far, if no other thread keeps the lock and the text has at most `max` bytes.
    pub(crate) fn try_copy(&self, max: usize) -> Option<PrintedText> {
        self.text.try_lock()?.as_ref().filter(|text| text.len() <= max).cloned()
    }

    /// Moves the text to a new output, which continues this output. Threads that print must then find another output.
    pub(crate) fn moved(&self) -> Self {
        self.move_text(self.text.lock())
    }

    /// Moves the text as [`moved`](Self::moved) does. Returns `None` if another thread keeps the lock.
    pub(crate) fn try_moved(&self) -> Option<Self> {
        Some(self.move_text(self.text.try_lock()?))
    }

    fn move_text(&self, mut text: MutexGuard<'_, Option<PrintedText>>) -> Self {
        let (limit, has_one_stream, total) = (self.limit, self.has_one_stream, AtomicU64::new(self.total()));
        Self { limit, has_one_stream, total, text: Mutex::new(text.take()) }
    }

    /// Returns stdout so far, from byte `from` on, up to the end of a character, but at most `max` bytes. Returns `None` if
    /// there is no such text, or if another thread keeps the lock for longer than `time`.
    pub(crate) fn stdout_part(&self, from: usize, max: usize, time: Option<Duration>) -> Option<String> {
        let printed = match time {
            Some(time) => self.text.try_lock_for(time)?,
            None => self.text.lock(),
        };
        part(&printed.as_ref()?.stdout.text, from, max).map(str::to_owned)
    }

    /// Copies the text so far, in parts: copying much text takes time, so the lock is released in between. Returns the copy,
    /// and true if it is complete: the text may be taken or moved meanwhile. Must not be called on the event loop, because a
    /// garbage collection may have stopped the thread that holds the lock.
    pub(crate) fn copy(&self) -> (PrintedText, bool) {
        let mut copy = PrintedText::default();
        loop {
            match self.copy_part(&mut copy) {
                Some(false) => {}
                result => return (copy, result.is_some()),
            }
        }
    }

    /// Adds to `copy`, which has the beginning of the text, a part of the text that it lacks: at most [`OUTPUT_PART`] bytes.
    /// Returns true if `copy` then has all text so far, and `None` if the text has been taken or moved.
    fn copy_part(&self, copy: &mut PrintedText) -> Option<bool> {
        let printed = self.text.lock();
        let PrintedText { stdout, stderr, turns } = printed.as_ref()?;
        let mut left = OUTPUT_PART;
        for (stream, copy) in [(stdout, &mut copy.stdout), (stderr, &mut copy.stderr)] {
            copy.text.reserve(stream.text.len().saturating_sub(copy.text.len()));
            let added = part(&stream.text, copy.text.len(), left).unwrap_or_default();
            copy.text.push_str(added);
            copy.omitted = stream.omitted;
            left -= added.len();
        }
        // The turn that was copied last may have become longer.
        copy.turns.pop();
        copy.turns.reserve(turns.len().saturating_sub(copy.turns.len()));
        let rest = turns.get(copy.turns.len()..).unwrap_or_default();
        copy.turns.extend_from_slice(&rest[..rest.len().min(left / size_of::<u32>())]);
        Some(
            copy.stdout.text.len() == stdout.text.len()
                && copy.stderr.text.len() == stderr.text.len()
                && copy.turns.len() == turns.len(),
        )
    }
}

#[cfg(test)]
impl Printed {
    /// Takes the lock, as a thread that prints does.
    pub(crate) fn lock(&self) -> parking_lot::MutexGuard<'_, Option<PrintedText>> {
        self.text.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// The output's lock is held while a part is copied.
    #[test]
    fn output_so_far_is_copied_in_parts() {
        let printed = Printed::new(u64::MAX);
        *printed.lock() = Some(PrintedText {
            stdout: "aλ".repeat(OUTPUT_PART / 2).into(),
            stderr: "é".repeat(OUTPUT_PART).into(),
            turns: vec![1; 2 * OUTPUT_PART],
        });
        let all = || printed.lock().as_ref().map(PrintedText::interleaved);
        let mut copy = PrintedText::default();
        let mut copied = 0;
        loop {
            let is_complete = printed.copy_part(&mut copy).expect("the text was not taken");
            let total = copy.stdout.text.len() + copy.stderr.text.len() + 4 * copy.turns.len();
            assert!(total - copied <= 2 * OUTPUT_PART, "{} bytes", total - copied);
            copied = total;
            if is_complete {
                break;
            }
        }
        assert!(all() == Some(copy.interleaved()));
        // The last turn, which was copied before, becomes longer.
        assert!(printed.push(true, Text::new(&[AtomicU32::new(u32::from('e'))])));
        assert_eq!(printed.copy_part(&mut copy), Some(true));
        assert!(all() == Some(copy.interleaved()));
        assert!(copy.interleaved().text.ends_with("λéaéλée"), "both streams alternate");
    }

    /// A thread may have found the output before its text is taken, and print afterwards.
    #[test]
    fn output_whose_text_was_taken_or_moved_accepts_no_text() {
        let characters = [u32::from('x'); 4].map(AtomicU32::new);
        let text = Text::new(&characters);
        let printed = Printed::new(6);
        assert!(printed.push(false, text) && printed.push(true, text));
        let moved = printed.moved();
        assert!(!printed.push(false, text));
        assert_eq!((moved.kept(), moved.left()), (6, 0));
        assert!(moved.push(false, text));
        let taken = moved.take();
        assert!(!moved.push(false, text));
        assert_eq!((&*taken.stdout.text, taken.stdout.omitted), ("xxxx", 4));
        assert_eq!((&*taken.stderr.text, taken.stderr.omitted), ("xx", 2));
        assert_eq!(taken.turns, [4, 2]);
    }
}
