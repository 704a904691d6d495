//! Answers of host functions to Lisp, each kept for as long as Lisp may read it.
//!
//! Reading an answer can run arbitrary Lisp code: interning a symbol in a locked package signals an error, and the
//! handler may call a host function again before the rest is read. So each thread keeps a stack of answers, one per
//! nested read. Lisp counts the depth of the stack in a special variable, which each read binds, so a non-local exit
//! restores the depth.

use std::cell::RefCell;
use std::sync::Arc;

use super::bindings::sbcl_message;
use super::message::{Handle, MessageWriter, encode_string_list};
use super::outgoing::OutgoingBuffer;

#[derive(Debug, Default)]
struct RetainedAnswer {
    words: OutgoingBuffer,
    /// Handles in the message, kept alive until Lisp has read it.
    handles: Vec<Arc<Handle>>,
}

thread_local! {
    /// The answers that Lisp may be reading in this thread, outermost first.
    static RETAINED_ANSWERS: RefCell<Vec<RetainedAnswer>> = const { RefCell::new(Vec::new()) };
}

/// Initializes this thread's [`RETAINED_ANSWERS`], unless they are initialized. Returns false if they have been destroyed.
pub(super) fn initialize_thread_local() -> bool {
    RETAINED_ANSWERS.try_with(|_| ()).is_ok()
}

/// Stores `message` until Lisp has read it, and returns the address and the length of the stored words. `being_read` is
/// the number of this thread's answers that Lisp is still reading; all later answers are discarded.
pub(super) fn store(being_read: u64, message: MessageWriter) -> sbcl_message {
    let (words, handles) = message.into_parts();
    let store = |answers: &RefCell<Vec<RetainedAnswer>>| {
        let mut answers = answers.borrow_mut();
        let level = usize::try_from(being_read).map_or(answers.len(), |level| level.min(answers.len()));
        answers.truncate(level + 1);
        if answers.len() == level {
            answers.push(RetainedAnswer::default());
        }
        let answer = &mut answers[level];
        answer.words.replace(&words);
        answer.handles = handles;
        sbcl_message { words: answer.words.as_ptr(), count: answer.words.len() as u64 }
    };
    // In a thread that is ending, the thread local may be destroyed already. Lisp then gets an empty message.
    RETAINED_ANSWERS.try_with(store).unwrap_or_default()
}

/// Returns the error for a host function called in a process that C code forked. Such a process has only the thread that
/// forked it, and any lock may have been copied while another thread held it, so this function neither allocates nor uses
/// a thread local.
pub(super) fn forked_process_error() -> sbcl_message {
    const TEXTS: [&str; 2] =
        ["a Rust function", "the function was called in a forked copy of the program, where no Rust function can run"];
    const COUNT: usize = TEXTS[0].len().div_ceil(2) + TEXTS[1].len().div_ceil(2) + 3;
    static WORDS: [u64; COUNT] = encode_string_list(TEXTS);
    sbcl_message { words: WORDS.as_ptr(), count: COUNT as u64 }
}
