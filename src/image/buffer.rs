//! Where Lisp reads the messages that it gets.
//!
//! With the feature `guarded-messages`, which is for tests, each has pages of its own: behind its last word begins memory
//! that nobody may read, and so becomes the message itself when it is over. What Lisp reads too far or too late is a fault.
#![allow(unsafe_code)]

#[cfg(not(feature = "guarded-messages"))]
pub(super) use plain::Buffer;

#[cfg(feature = "guarded-messages")]
pub(super) use guarded::Buffer;

#[cfg(not(feature = "guarded-messages"))]
mod plain {
    use crate::image::words::SPARE_WORDS;

    /// The words of a message.
    #[derive(Debug, Default)]
    pub(in crate::image) struct Buffer(Vec<u64>);

    impl Buffer {
        /// Replaces the message.
        pub(in crate::image) fn fill(&mut self, words: &[u64]) {
            if self.0.capacity() > SPARE_WORDS.max(words.len()) {
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

    /// A multiple of any page's size, in bytes.
    const PAGE: usize = 1 << 16;
    /// How many messages that are over keep their addresses.
    const KEPT: usize = 1024;

    /// The addresses and sizes of messages that are over.
    static OVER: Mutex<VecDeque<(usize, usize)>> = Mutex::new(VecDeque::new());

    /// The words of a message, in pages of its own.
    #[derive(Debug)]
    pub(in crate::image) struct Buffer {
        /// The address of the first page.
        pages: usize,
        /// The size of all of them in bytes, the guard included.
        size: usize,
        count: usize,
    }

    impl Buffer {
        pub(in crate::image) fn of(words: &[u64]) -> Self {
            let bytes = size_of_val(words);
            let size = bytes.next_multiple_of(PAGE) + PAGE;
            // SAFETY: the mapping is new, and as large as what is protected and written of it.
            let pages = unsafe {
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let pages = mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE).expect("memory");
                let guard = pages.byte_add(size - PAGE);
                mprotect(guard, PAGE, MprotectFlags::empty()).expect("it is protected");
                guard.byte_sub(bytes).cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), words.len());
                pages.expose_provenance()
            };
            Self { pages, size, count: words.len() }
        }

        /// Replaces the message.
        pub(in crate::image) fn fill(&mut self, words: &[u64]) {
            *self = Self::of(words);
        }

        pub(in crate::image) fn as_ptr(&self) -> *const u64 {
            std::ptr::with_exposed_provenance(self.pages + self.size - PAGE - 8 * self.count)
        }

        pub(in crate::image) fn len(&self) -> usize {
            self.count
        }
    }

    impl Default for Buffer {
        fn default() -> Self {
            Self::of(&[])
        }
    }

    impl Drop for Buffer {
        fn drop(&mut self) {
            // SAFETY: the pages are this buffer's, and nothing in Rust refers to them any more.
            unsafe {
                let pages = std::ptr::with_exposed_provenance_mut(self.pages);
                mprotect(pages, self.size, MprotectFlags::empty()).expect("it is protected");
            }
            let mut over = OVER.lock();
            over.push_back((self.pages, self.size));
            if over.len() > KEPT
                && let Some((pages, size)) = over.pop_front()
            {
                // SAFETY: nothing refers to a message that is over.
                unsafe { munmap(std::ptr::with_exposed_provenance_mut(pages), size) }.expect("it is unmapped");
            }
        }
    }
}
