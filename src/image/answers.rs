//! The program's answers to Lisp, each kept as long as Lisp may be reading it.
//!
//! Reading one can run any code of Lisp's: to intern a symbol signals an error where its package is locked, and whoever
//! handles that may call the program again before the rest is read. So a thread has an answer for each level of that. The
//! level is a variable that Lisp binds while it reads: whatever it leaves the answer by, it is what it was before.

use std::cell::RefCell;
use std::sync::Arc;

use super::bindings::sbcl_message;
use super::buffer::Buffer;
use super::message::{Handle, Writer, fixed_strings};

#[derive(Debug, Default)]
struct Answer {
    words: Buffer,
    /// The objects that the message mentions live as long as it.
    kept: Vec<Arc<Handle>>,
}

thread_local! {
    /// The answers that Lisp may be reading in this thread, the outermost first.
    static ANSWERS: RefCell<Vec<Answer>> = const { RefCell::new(Vec::new()) };
}

/// Keeps `message` for Lisp, which is still reading the first `being_read` answers of this thread, and no others.
pub(super) fn keep(being_read: u64, message: Writer) -> sbcl_message {
    let (words, kept) = message.into_parts();
    let keep = |answers: &RefCell<Vec<Answer>>| {
        let mut answers = answers.borrow_mut();
        let level = usize::try_from(being_read).map_or(answers.len(), |level| level.min(answers.len()));
        answers.truncate(level + 1);
        if answers.len() == level {
            answers.push(Answer::default());
        }
        let answer = &mut answers[level];
        answer.words.fill(&words);
        answer.kept = kept;
        sbcl_message { words: answer.words.as_ptr(), count: answer.words.len() as u64 }
    };
    // A thread that ends has none any more.
    ANSWERS.try_with(keep).unwrap_or_default()
}

/// The answer in a copy of this process that C code made (`fork`): it has none of the threads, and may have copied any lock
/// while somebody held it, so nothing is allocated or looked up there.
pub(super) fn of_forked_process() -> sbcl_message {
    const TEXTS: [&str; 2] =
        ["a Rust function", "it was called in a copy of its process (fork), where no Rust function can be called"];
    const COUNT: usize = TEXTS[0].len().div_ceil(2) + TEXTS[1].len().div_ceil(2) + 3;
    static WORDS: [u64; COUNT] = fixed_strings(TEXTS);
    sbcl_message { words: WORDS.as_ptr(), count: COUNT as u64 }
}
