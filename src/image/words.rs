//! The buffers of messages.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

/// How many words a message has without taking memory but the stack.
const SMALL: usize = 16;
/// How many spare buffers a thread keeps.
const SPARE_BUFFERS: usize = 8;
/// How many words a buffer may have room for that is kept for the next message.
pub(super) const SPARE_WORDS: usize = 1 << 16;

thread_local! {
    /// Buffers that no large message uses now.
    static SPARE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// A message. A small one, such as that of a call with some numbers, is on the stack; the buffer of a large one goes to
/// the next one when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Words(SmallVec<[u64; SMALL]>);

impl Words {
    /// An empty one.
    #[inline]
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

    /// Makes room for so many words more.
    #[inline]
    pub(crate) fn reserve(&mut self, more: usize) {
        if self.0.len() + more > self.0.capacity() {
            self.grow(more);
        }
    }

    #[cold]
    fn grow(&mut self, more: usize) {
        if !self.0.spilled()
            && let Some(mut spare) = SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten()
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

    /// Adds as many words as hold `count` halves of them, which `halves` gives, the first of them at the lower address.
    /// Where it gives fewer, the others are 0.
    #[inline]
    pub(crate) fn extend_from_halves(&mut self, count: usize, halves: impl Iterator<Item = u32>) {
        let words = count.div_ceil(2);
        self.reserve(words + 1);
        let length = self.0.len();
        // SAFETY: there is room for that many words after those that there are, and one more. All of them are written
        // before they count: the zip does not write past `count`, and what it does not reach is filled up.
        unsafe {
            let place = self.0.as_mut_ptr().add(length).cast::<MaybeUninit<u32>>();
            let target = std::slice::from_raw_parts_mut(place, words * 2);
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

impl Drop for Words {
    #[inline]
    fn drop(&mut self) {
        if self.0.spilled() && self.0.capacity() <= SPARE_WORDS {
            let mut words = std::mem::take(&mut self.0).into_vec();
            words.clear();
            // A thread that ends keeps none.
            let _ = SPARE.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < SPARE_BUFFERS {
                    spare.push(words);
                }
            });
        }
    }
}

impl Deref for Words {
    type Target = SmallVec<[u64; SMALL]>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Words {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_packed_two_to_a_word_and_missing_ones_are_zero() {
        for count in 0..40 {
            for given in 0..=count + 2 {
                let mut words = Words::new();
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
    fn a_buffer_that_a_large_message_had_serves_the_next_one() {
        let large: Vec<u64> = (0..1000).collect();
        for _ in 0..3 {
            let mut words = Words::new();
            words.extend_from_slice(&large);
            words.extend_from_slice(&large[..10]);
            assert_eq!(words[..1000], large[..]);
            assert_eq!(words[1000..], large[..10]);
        }
    }
}
