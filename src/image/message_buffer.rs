//! The buffer for a message that Rust code writes, or that is copied from Lisp's memory.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

/// Number of words that a message holds without heap memory.
const INLINE_WORDS: usize = 16;
/// Maximum number of spare buffers that a thread keeps.
const MAX_SPARE_BUFFERS: usize = 8;
/// Largest capacity, in words, of a buffer that is kept for reuse.
pub(super) const MAX_SPARE_WORDS: usize = 1 << 16;

thread_local! {
    /// Buffers of dropped messages, for reuse by the next large messages.
    static SPARE_BUFFERS: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// The words of a message. A small message, such as a call with a few numbers, stays on the stack; a large message reuses
/// the buffer of an earlier message.
#[derive(Debug, Default)]
pub(crate) struct MessageBuffer(SmallVec<[u64; INLINE_WORDS]>);

impl MessageBuffer {
    /// Creates an empty buffer.
    #[inline]
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

    /// Ensures capacity for `more` further words.
    #[inline]
    pub(crate) fn reserve(&mut self, more: usize) {
        if self.0.len() + more > self.0.capacity() {
            self.grow(more);
        }
    }

    #[cold]
    fn grow(&mut self, more: usize) {
        if !self.0.spilled()
            && let Some(mut spare) = SPARE_BUFFERS.try_with(|spare| spare.borrow_mut().pop()).ok().flatten()
        {
            spare.extend_from_slice(&self.0);
            self.0 = SmallVec::from_vec(spare);
        }
        self.0.reserve(more);
    }

    pub(crate) fn extend_from_slice(&mut self, words: &[u64]) {
        self.reserve(words.len());
        self.0.extend_from_slice(words);
    }

    /// Appends `count` half words, two to a word, the first at the lower address. Halves that the iterator does not
    /// provide, and the padding, are 0.
    #[inline]
    pub(crate) fn extend_from_halves(&mut self, count: usize, halves: impl Iterator<Item = u32>) {
        let words = count.div_ceil(2);
        self.reserve(words + 1);
        let length = self.0.len();
        // SAFETY: `reserve` made room for more than `words` further words. Before `set_len` includes those words, all of
        // their halves are initialised: the first loop writes at most `count` halves, and the second loop the rest.
        unsafe {
            let start = self.0.as_mut_ptr().add(length).cast::<MaybeUninit<u32>>();
            let target = std::slice::from_raw_parts_mut(start, words * 2);
            let mut written = 0;
            for (half, value) in target[..count].iter_mut().zip(halves) {
                half.write(value);
                written += 1;
            }
            for half in &mut target[written..] {
                half.write(0);
            }
            self.0.set_len(length + words);
        }
    }
}

impl Drop for MessageBuffer {
    #[inline]
    fn drop(&mut self) {
        if self.0.spilled() && self.0.capacity() <= MAX_SPARE_WORDS {
            let mut words = std::mem::take(&mut self.0).into_vec();
            words.clear();
            // A thread that is ending keeps no buffers.
            let _ = SPARE_BUFFERS.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < MAX_SPARE_BUFFERS {
                    spare.push(words);
                }
            });
        }
    }
}

impl Deref for MessageBuffer {
    type Target = SmallVec<[u64; INLINE_WORDS]>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for MessageBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extend_from_halves_packs_two_per_word_and_fills_with_zeros() {
        for count in 0..40 {
            for given in 0..=count + 2 {
                let mut words = MessageBuffer::new();
                words.extend_from_slice(&[7]);
                words.extend_from_halves(count, (1..).take(given));
                assert_eq!(words.len(), 1 + count.div_ceil(2));
                let halves = words[1..].iter().flat_map(|word| {
                    let bytes = word.to_ne_bytes();
                    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                    [half(0), half(4)]
                });
                let expected = (1..).take(given.min(count)).chain(std::iter::repeat(0));
                assert!(halves.zip(expected).all(|(half, expected)| half == expected), "{count} {given}");
            }
        }
    }

    #[test]
    fn the_buffer_of_a_large_message_is_reused_by_the_next_message() {
        let large: Vec<u64> = (0..1000).collect();
        for _ in 0..3 {
            let mut words = MessageBuffer::new();
            words.extend_from_slice(&large);
            words.extend_from_slice(&large[..10]);
            assert_eq!(words[..1000], large[..]);
            assert_eq!(words[1000..], large[..10]);
        }
    }
}
