//! The memory in which Lisp reads the messages that it receives.
//!
//! With the feature `guarded-messages`, for tests, each message has pages of its own. An inaccessible guard follows the
//! message's last word, and the message itself becomes inaccessible when it is retired, so a read beyond the message's end
//! or after its lifetime faults.
#![allow(unsafe_code)]

#[cfg(not(feature = "guarded-messages"))]
pub(super) use plain::OutgoingBuffer;

#[cfg(feature = "guarded-messages")]
pub(super) use guarded::OutgoingBuffer;

#[cfg(not(feature = "guarded-messages"))]
mod plain {
    use crate::image::message_buffer::MAX_SPARE_WORDS;

    /// The words of a message.
    #[derive(Debug, Default)]
    pub(in crate::image) struct OutgoingBuffer(Vec<u64>);

    impl OutgoingBuffer {
        /// Replaces the message.
        pub(in crate::image) fn replace(&mut self, words: &[u64]) {
            if self.0.capacity() > MAX_SPARE_WORDS.max(words.len()) {
                self.0 = Vec::new();
            }
            self.0.clear();
            self.0.extend_from_slice(words);
        }

        pub(in crate::image) fn as_ptr(&self) -> *const u64 {
            self.0.as_ptr()
        }

        pub(in crate::image) fn len(&self) -> usize {
            self.0.len()
        }
    }
}

#[cfg(feature = "guarded-messages")]
mod guarded {
    use std::collections::VecDeque;

    use parking_lot::Mutex;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    /// Size of the guard, in bytes: a multiple of the page size on every platform.
    const GUARD_BYTES: usize = 1 << 16;
    /// Maximum number of retired messages whose addresses stay reserved.
    const MAX_RETIRED_MESSAGES: usize = 1024;

    /// Addresses and sizes of retired messages, oldest first.
    static RETIRED_MESSAGES: Mutex<VecDeque<(usize, usize)>> = Mutex::new(VecDeque::new());

    /// The words of a message, in pages of its own.
    #[derive(Debug)]
    pub(in crate::image) struct OutgoingBuffer {
        /// Address of the first page.
        pages: usize,
        /// Size of all pages in bytes, including the guard.
        size: usize,
        count: usize,
    }

    impl OutgoingBuffer {
        pub(in crate::image) fn from_words(words: &[u64]) -> Self {
            let bytes = size_of_val(words);
            let size = bytes.next_multiple_of(GUARD_BYTES) + GUARD_BYTES;
            // SAFETY: the mapping is new and has `size` bytes. The guard is its last `GUARD_BYTES` bytes. The words end
            // where the guard begins, and the bytes before the guard suffice for them.
            let pages = unsafe {
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let pages = mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE).expect("memory");
                let guard = pages.byte_add(size - GUARD_BYTES);
                mprotect(guard, GUARD_BYTES, MprotectFlags::empty()).expect("mprotect succeeds");
                guard.byte_sub(bytes).cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), words.len());
                pages.expose_provenance()
            };
            Self { pages, size, count: words.len() }
        }

        /// Replaces the message.
        pub(in crate::image) fn replace(&mut self, words: &[u64]) {
            *self = Self::from_words(words);
        }

        pub(in crate::image) fn as_ptr(&self) -> *const u64 {
            std::ptr::with_exposed_provenance(self.pages + self.size - GUARD_BYTES - 8 * self.count)
        }

        pub(in crate::image) fn len(&self) -> usize {
            self.count
        }
    }

    impl Default for OutgoingBuffer {
        fn default() -> Self {
            Self::from_words(&[])
        }
    }

    impl Drop for OutgoingBuffer {
        fn drop(&mut self) {
            // SAFETY: this buffer owns the pages, and Rust code holds no reference into them.
            unsafe {
                let pages = std::ptr::with_exposed_provenance_mut(self.pages);
                mprotect(pages, self.size, MprotectFlags::empty()).expect("mprotect succeeds");
            }
            let mut retired = RETIRED_MESSAGES.lock();
            retired.push_back((self.pages, self.size));
            if retired.len() > MAX_RETIRED_MESSAGES
                && let Some((pages, size)) = retired.pop_front()
            {
                // SAFETY: the pages belonged to a retired message, to which nothing refers.
                unsafe { munmap(std::ptr::with_exposed_provenance_mut(pages), size) }.expect("munmap succeeds");
            }
        }
    }
}
