//! Messages between Lisp and an embedding program, and the handles in them.
//!
//! A message is a sequence of tokens. A token is one word (tag in the low byte, number in the rest), followed by the
//! words and tokens that it announces. `lisp/embedding/values.lisp` implements this encoding in Lisp.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, LazyLock, OnceLock};

use parking_lot::Mutex;

use super::message_buffer::MessageBuffer;
use super::process;

mod tag {
    pub(super) const NIL: u64 = 0;
    pub(super) const TRUE: u64 = 1;
    pub(super) const INTEGER: u64 = 2;
    pub(super) const BIGNUM: u64 = 3;
    pub(super) const SINGLE: u64 = 4;
    pub(super) const DOUBLE: u64 = 5;
    pub(super) const CHARACTER: u64 = 6;
    pub(super) const STRING: u64 = 7;
    pub(super) const SYMBOL: u64 = 8;
    pub(super) const KEYWORD: u64 = 9;
    pub(super) const RATIO: u64 = 10;
    pub(super) const COMPLEX: u64 = 11;
    pub(super) const LIST: u64 = 12;
    pub(super) const DOTTED: u64 = 13;
    pub(super) const VECTOR: u64 = 14;
    pub(super) const OCTETS: u64 = 15;
    pub(super) const TABLE: u64 = 16;
    pub(super) const HANDLE: u64 = 17;
    pub(super) const DOUBLES: u64 = 18;
    pub(super) const VALUES: u64 = 19;
}

/// A reference that keeps a Lisp object alive. Dropping the reference neither blocks nor calls Lisp: the image releases
/// the object later.
#[derive(Debug)]
pub(crate) struct Handle(u64);

impl Handle {
    /// Returns the object's number in Lisp's handle table.
    pub(crate) fn number(&self) -> u64 {
        self.0
    }
}

struct ReleaseQueue {
    sender: Sender<u64>,
    receiver: Mutex<Receiver<u64>>,
}

static RELEASE_QUEUE: LazyLock<ReleaseQueue> = LazyLock::new(|| {
    let (sender, receiver) = mpsc::channel();
    ReleaseQueue { sender, receiver: Mutex::new(receiver) }
});

/// Number of dropped handles that no thread has taken from the queue yet.
static DROPPED_HANDLE_COUNT: AtomicUsize = AtomicUsize::new(0);

/// The function that wakes a sleeping Lisp thread to release handles.
static RELEASE_WAKER: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Number of handles in the release queue at which a sleeping thread is woken; each multiple of this number wakes a thread
/// again. A thread takes at most this many handles at a time.
pub(crate) const WAKE_THRESHOLD: usize = 1024;

/// Number of handles in the release queue at which even a running call releases handles, since their objects may be large.
const RELEASE_THRESHOLD_IN_CALL: usize = 16;

impl Drop for Handle {
    fn drop(&mut self) {
        // In a forked child no thread releases handles, and a missing thread may have been changing the queue.
        if process::is_forked() {
            return;
        }
        let queue = &*RELEASE_QUEUE;
        // The handle is counted before it is sent, because a thread that takes it from the queue lowers the count.
        let count = DROPPED_HANDLE_COUNT.fetch_add(1, Ordering::AcqRel) + 1;
        // Sending cannot fail: the receiver is never dropped.
        let _ = queue.sender.send(self.0);
        if count.is_multiple_of(WAKE_THRESHOLD)
            && let Some(wake) = RELEASE_WAKER.get()
        {
            wake();
        }
    }
}

/// Registers `wake`, which must not block. `wake` is called whenever [`WAKE_THRESHOLD`] more dropped handles are queued.
pub(crate) fn register_release_waker(wake: impl Fn() + Send + Sync + 'static) {
    let _ = RELEASE_WAKER.set(Box::new(wake));
}

/// Returns the number of dropped handles that wait to be released.
pub(crate) fn dropped_handle_count() -> usize {
    DROPPED_HANDLE_COUNT.load(Ordering::Acquire)
}

/// Returns true if so many handles wait to be released that a running call should release them.
#[inline]
pub(crate) fn has_many_dropped_handles() -> bool {
    DROPPED_HANDLE_COUNT.load(Ordering::Relaxed) >= RELEASE_THRESHOLD_IN_CALL
}

/// Takes the numbers of up to [`WAKE_THRESHOLD`] dropped handles from the queue. Returns no numbers while another thread
/// takes handles.
pub(crate) fn take_dropped_handles() -> Vec<u64> {
    let queue = &*RELEASE_QUEUE;
    let Some(receiver) = queue.receiver.try_lock() else { return Vec::new() };
    let numbers: Vec<u64> = receiver.try_iter().take(WAKE_THRESHOLD).collect();
    DROPPED_HANDLE_COUNT.fetch_sub(numbers.len(), Ordering::AcqRel);
    numbers
}

/// The message that consists of NIL.
pub(crate) const NIL: &[u64] = &[tag::NIL];

/// A writer of a message. The message is well-formed after any sequence of calls, even if a call panics: an incomplete
/// container is removed.
#[derive(Debug, Default)]
pub(crate) struct MessageWriter {
    words: MessageBuffer,
    /// Number of objects written at the current nesting level.
    objects: usize,
    /// Handles in the message, kept alive as long as the message.
    handles: Vec<Arc<Handle>>,
}

/// The error for a table whose last key has no value.
#[derive(Debug)]
pub(crate) struct KeyWithoutValue;

/// A container being written. Dropping the container before [`complete`](Self::complete) removes it from the message.
struct Container<'w> {
    writer: &'w mut MessageWriter,
    tag: u64,
    /// Index of the container's own token.
    start: usize,
    /// Number of objects at the enclosing level before the container began.
    objects: usize,
    /// Number of handles in the message before the container began.
    handles: usize,
}

impl<'w> Container<'w> {
    fn begin(writer: &'w mut MessageWriter, tag: u64) -> Self {
        let (start, handles) = (writer.words.len(), writer.handles.len());
        writer.token(tag, 0);
        let objects = std::mem::take(&mut writer.objects);
        Self { writer, tag, start, objects, handles }
    }

    /// Completes the container: stores `count` in its token.
    fn complete(self, count: usize) {
        self.writer.words[self.start] = self.tag | (count as u64) << 8;
        self.writer.objects = self.objects + 1;
        std::mem::forget(self);
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        self.writer.words.truncate(self.start);
        self.writer.handles.truncate(self.handles);
        self.writer.objects = self.objects;
    }
}

impl MessageWriter {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { words: MessageBuffer::new(), objects: 0, handles: Vec::new() }
    }

    #[inline]
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the number of objects written at the current nesting level.
    #[inline]
    pub(crate) fn object_count(&self) -> usize {
        self.objects
    }

    /// Returns the message and the handles that must live until Lisp has read it.
    pub(super) fn into_parts(self) -> (MessageBuffer, Vec<Arc<Handle>>) {
        (self.words, self.handles)
    }

    #[inline]
    fn token(&mut self, tag: u64, number: u64) {
        self.words.push(tag | number << 8);
    }

    pub(crate) fn nil(&mut self) {
        self.objects += 1;
        self.token(tag::NIL, 0);
    }

    pub(crate) fn boolean(&mut self, value: bool) {
        self.objects += 1;
        self.token(if value { tag::TRUE } else { tag::NIL }, 0);
    }

    #[inline]
    pub(crate) fn integer(&mut self, value: i64) {
        self.objects += 1;
        self.words.push(tag::INTEGER);
        self.words.push(value.cast_unsigned());
    }

    /// Writes an integer. `words` is its two's complement, lowest word first, and must not be empty.
    pub(crate) fn bignum(&mut self, words: &[u64]) {
        self.objects += 1;
        self.token(tag::BIGNUM, words.len() as u64);
        self.words.extend_from_slice(words);
    }

    pub(crate) fn single(&mut self, value: f32) {
        self.objects += 1;
        self.token(tag::SINGLE, u64::from(value.to_bits()));
    }

    pub(crate) fn double(&mut self, value: f64) {
        self.objects += 1;
        self.words.extend_from_slice(&[tag::DOUBLE, value.to_bits()]);
    }

    /// Writes the character with this code, which may be a surrogate.
    pub(crate) fn character(&mut self, code: u32) {
        self.objects += 1;
        self.token(tag::CHARACTER, u64::from(code));
    }

    fn text(&mut self, text: &str) {
        let length = if text.is_ascii() { text.len() } else { text.chars().count() };
        self.token(tag::STRING, length as u64);
        if length == text.len() {
            self.words.extend_from_halves(length, text.bytes().map(u32::from));
        } else {
            self.words.extend_from_halves(length, text.chars().map(u32::from));
        }
    }

    pub(crate) fn string(&mut self, text: &str) {
        self.objects += 1;
        self.text(text);
    }

    /// Writes a symbol that is interned in `package` (`KEYWORD` for a keyword), or uninterned if `package` is `None`.
    pub(crate) fn symbol(&mut self, package: Option<&str>, name: &str) {
        self.objects += 1;
        match package {
            Some("KEYWORD") => self.token(tag::KEYWORD, 0),
            Some(package) => {
                self.token(tag::SYMBOL, 1);
                self.text(package);
            }
            None => self.token(tag::SYMBOL, 0),
        }
        self.text(name);
    }

    /// Writes an integer that may need two words.
    pub(crate) fn long_integer(&mut self, value: i128) {
        match i64::try_from(value) {
            Ok(value) => self.integer(value),
            Err(_) => {
                let bits = value.cast_unsigned();
                self.bignum(&[bits as u64, (bits >> 64) as u64]);
            }
        }
    }

    /// Writes a ratio. A denominator of 0 is replaced by 1.
    pub(crate) fn ratio(&mut self, numerator: i128, denominator: i128) {
        let objects = self.objects;
        self.token(tag::RATIO, 0);
        self.long_integer(numerator);
        self.long_integer(if denominator == 0 { 1 } else { denominator });
        self.objects = objects + 1;
    }

    /// Writes a complex number whose parts are double floats.
    pub(crate) fn complex(&mut self, re: f64, im: f64) {
        let objects = self.objects;
        self.token(tag::COMPLEX, 0);
        self.double(re);
        self.double(im);
        self.objects = objects + 1;
    }

    /// Writes a container of the objects that `write` writes.
    fn container<E>(&mut self, tag: u64, write: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        let container = Container::begin(self, tag);
        write(container.writer)?;
        let count = container.writer.objects;
        container.complete(count);
        Ok(())
    }

    /// Writes a list of the objects that `write` writes.
    pub(crate) fn list<E>(&mut self, write: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        self.container(tag::LIST, write)
    }

    /// Writes a list of two strings.
    pub(crate) fn string_pair(&mut self, one: &str, other: &str) {
        let objects = self.objects;
        self.token(tag::LIST, 2);
        self.string(one);
        self.string(other);
        self.objects = objects + 1;
    }

    /// Writes a simple vector of the objects that `write` writes.
    pub(crate) fn vector<E>(&mut self, write: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        self.container(tag::VECTOR, write)
    }

    /// Writes multiple values. Only an answer may contain them.
    pub(crate) fn values<E>(&mut self, write: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        self.container(tag::VALUES, write)
    }

    /// Writes a hash table (EQUAL) of the keys and values that `write` writes alternately. A last key without a value is an
    /// error.
    pub(crate) fn table<E: From<KeyWithoutValue>>(
        &mut self,
        write: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let container = Container::begin(self, tag::TABLE);
        write(container.writer)?;
        let count = container.writer.objects;
        if !count.is_multiple_of(2) {
            return Err(KeyWithoutValue.into());
        }
        container.complete(count / 2);
        Ok(())
    }

    pub(crate) fn octets(&mut self, octets: &[u8]) {
        self.objects += 1;
        self.token(tag::OCTETS, octets.len() as u64);
        let start = self.words.len();
        self.words.reserve(octets.len().div_ceil(8));
        self.words.resize(start + octets.len().div_ceil(8), 0);
        let (chunks, rest) = octets.as_chunks::<8>();
        self.words[start..].iter_mut().zip(chunks).for_each(|(word, chunk)| *word = u64::from_le_bytes(*chunk));
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.words[start + chunks.len()] = u64::from_le_bytes(last);
        }
    }

    /// Appends the objects of another message.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.objects += other.objects;
        self.words.extend_from_slice(&other.words);
        self.handles.append(&mut other.handles);
    }

    pub(crate) fn handle(&mut self, handle: &Arc<Handle>) {
        self.objects += 1;
        self.token(tag::HANDLE, handle.number());
        self.handles.push(handle.clone());
    }
}

/// Returns the token for the object of `handle`.
pub(crate) fn handle_token(handle: &Handle) -> u64 {
    tag::HANDLE | handle.number() << 8
}

/// Returns the message that consists of `octet` as an integer.
#[inline]
pub(crate) fn octet_message(octet: u8) -> [u64; 2] {
    [tag::INTEGER, octet.into()]
}

/// Returns the message that consists of the double float with these bits.
#[inline]
pub(crate) fn double_message(bits: u64) -> [u64; 2] {
    [tag::DOUBLE, bits]
}

/// Builds, at compile time, a message that consists of a list of ASCII strings. `COUNT` is the message's length in words.
pub(super) const fn encode_string_list<const TEXTS: usize, const COUNT: usize>(texts: [&str; TEXTS]) -> [u64; COUNT] {
    let mut words = [0; COUNT];
    words[0] = tag::LIST | (TEXTS as u64) << 8;
    let (mut place, mut text) = (1, 0);
    while text < TEXTS {
        let octets = texts[text].as_bytes();
        words[place] = tag::STRING | (octets.len() as u64) << 8;
        place += 1;
        let mut index = 0;
        while index < octets.len() {
            assert!(octets[index].is_ascii(), "the text must be ASCII: one octet for each character");
            // Each word holds two characters of 32 bits, the first at the lower address.
            let first_half = (index % 2 == 0) == cfg!(target_endian = "little");
            words[place + index / 2] |= (octets[index] as u64) << if first_half { 0 } else { 32 };
            index += 1;
        }
        place += octets.len().div_ceil(2);
        text += 1;
    }
    assert!(place == COUNT, "the text fills exactly COUNT words");
    words
}

/// Returns the character codes in `words`, two to a word.
fn codes(words: &[u64]) -> &[u32] {
    // SAFETY: every bit pattern is a valid u32. A word has the size of two u32, and at least their alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() * 2) }
}

/// Characters in Lisp's representation, two codes to a word.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Characters<'m> {
    words: &'m [u64],
    length: usize,
}

impl Characters<'_> {
    fn codes(&self) -> &[u32] {
        let codes = codes(self.words);
        &codes[..self.length.min(codes.len())]
    }

    /// Returns the first `count` characters, or all characters if there are fewer.
    pub(crate) fn first(self, count: usize) -> Self {
        Self { length: self.length.min(count), ..self }
    }

    /// Returns the text, or the first code that a Rust string cannot hold, such as a surrogate's.
    pub(crate) fn to_text(self) -> Result<String, u32> {
        let codes = self.codes();
        if codes.iter().fold(0, |seen, code| seen | code) < 0x80 {
            return Ok(String::from_utf8(codes.iter().map(|&code| code as u8).collect()).unwrap_or_default());
        }
        codes.iter().map(|&code| char::from_u32(code).ok_or(code)).collect()
    }

    /// Returns the text, with U+FFFD for each code that a Rust string cannot hold, such as a surrogate's.
    pub(crate) fn to_text_lossy(self) -> String {
        self.codes().iter().map(|&code| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }
}

/// A decoded token. The tokens of a container's elements follow the container's own token.
#[derive(Debug)]
pub(crate) enum Token<'m> {
    Nil,
    True,
    Integer(i64),
    /// An integer in two's complement, lowest word first.
    Bignum(&'m [u64]),
    Single(f32),
    Double(f64),
    /// A character's code, which may be a surrogate.
    Character(u32),
    String(Characters<'m>),
    /// A symbol, whose name follows as a string. If the flag is true, the name of the symbol's package precedes the
    /// symbol's name.
    Symbol(bool),
    /// A keyword; its name follows as a string.
    Keyword,
    /// A ratio; two integers follow.
    Ratio,
    /// A complex number; two real numbers follow.
    Complex,
    List(usize),
    /// A dotted list of this many elements; the elements and the last CDR follow.
    Dotted(usize),
    Vector(usize),
    /// Octets packed in words, and the number of octets.
    Octets(&'m [u64], usize),
    /// A hash table of this many pairs; keys and values follow alternately.
    Table(usize),
    Handle(Handle),
    Doubles(&'m [u64]),
    Values(usize),
}

/// A reader of a message. Dropping the reader releases the handles that were not read.
#[derive(Debug)]
pub(crate) struct MessageReader<'m> {
    words: &'m [u64],
    position: usize,
    /// The start and the end of the last object whose rest was skipped. When the rest of the enclosing object is skipped
    /// next, this object need not be walked again.
    skipped: Option<(usize, usize)>,
}

impl<'m> MessageReader<'m> {
    #[inline]
    pub(crate) fn new(words: &'m [u64]) -> Self {
        Self { words, position: 0, skipped: None }
    }

    /// Returns the index of the next token, in words.
    #[inline]
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    #[inline]
    fn take(&mut self, count: usize) -> &'m [u64] {
        let end = self.position.saturating_add(count).min(self.words.len());
        let taken = &self.words[self.position..end];
        self.position = end;
        taken
    }

    #[inline]
    fn word(&mut self) -> u64 {
        self.take(1).first().copied().unwrap_or_default()
    }

    /// Reads the next token; NIL at the end of the message.
    #[inline]
    pub(crate) fn token(&mut self) -> Token<'m> {
        match self.word() {
            tag::INTEGER => Token::Integer(self.word().cast_signed()),
            word => self.decode_token(word),
        }
    }

    /// Decodes the token whose first word is `word`.
    fn decode_token(&mut self, word: u64) -> Token<'m> {
        let number = usize::try_from(word >> 8).unwrap_or(usize::MAX);
        match word & 0xff {
            tag::TRUE => Token::True,
            tag::INTEGER => Token::Integer(self.word().cast_signed()),
            tag::BIGNUM => Token::Bignum(self.take(number)),
            tag::SINGLE => Token::Single(f32::from_bits((word >> 8 & 0xffff_ffff) as u32)),
            tag::DOUBLE => Token::Double(f64::from_bits(self.word())),
            tag::CHARACTER => Token::Character((word >> 8 & 0xffff_ffff) as u32),
            tag::STRING => Token::String(Characters { words: self.take(number.div_ceil(2)), length: number }),
            tag::SYMBOL => Token::Symbol(number == 1),
            tag::KEYWORD => Token::Keyword,
            tag::RATIO => Token::Ratio,
            tag::COMPLEX => Token::Complex,
            tag::LIST => Token::List(number),
            tag::DOTTED => Token::Dotted(number),
            tag::VECTOR => Token::Vector(number),
            tag::OCTETS => Token::Octets(self.take(number.div_ceil(8)), number),
            tag::TABLE => Token::Table(number),
            tag::HANDLE => Token::Handle(Handle(word >> 8)),
            tag::DOUBLES => Token::Doubles(self.take(number)),
            tag::VALUES => Token::Values(number),
            _ => Token::Nil,
        }
    }

    /// Returns true if the next token is a handle.
    pub(crate) fn is_at_handle(&self) -> bool {
        self.words.get(self.position).is_some_and(|word| word & 0xff == tag::HANDLE)
    }

    /// Returns true if the next token is NIL, or if the whole message has been read.
    pub(crate) fn is_at_nil(&self) -> bool {
        self.words.get(self.position).is_none_or(|word| word & 0xff == tag::NIL)
    }

    /// Returns true if the next object is a symbol or a keyword.
    pub(crate) fn is_at_name(&self) -> bool {
        self.words.get(self.position).is_some_and(|word| [tag::SYMBOL, tag::KEYWORD].contains(&(word & 0xff)))
    }

    /// Skips the next object, however large.
    pub(crate) fn skip(&mut self) {
        self.skip_to(self.end_of_object(self.position));
    }

    /// Skips the rest of the object that begins at the word with index `start`. Handles in the part already read are not
    /// released: the caller owns them.
    pub(crate) fn skip_rest(&mut self, start: usize) {
        let end = self.end_of_object(start);
        self.skipped = Some((start, end));
        self.skip_to(end);
    }

    fn skip_to(&mut self, end: usize) {
        while self.position < end {
            // Dropping a token releases its handle.
            drop(self.token());
        }
    }

    /// Returns the words of the next object without reading it.
    pub(crate) fn peek(&self) -> &'m [u64] {
        &self.words[self.position..self.end_of_object(self.position)]
    }

    /// Returns the text of the next object, which remains to be read. Returns `None` unless the object is a string that a
    /// Rust string can hold.
    pub(crate) fn peek_text(&self) -> Option<String> {
        let (&word, words) = self.words.get(self.position..)?.split_first()?;
        if word & 0xff != tag::STRING {
            return None;
        }
        Characters { words, length: usize::try_from(word >> 8).ok()? }.to_text().ok()
    }

    /// Returns the index of the word after the object that begins at the word with index `start`.
    fn end_of_object(&self, start: usize) -> usize {
        // This reader owns none of the handles that it passes.
        let mut reader = ManuallyDrop::new(Self { words: self.words, position: start, skipped: None });
        let mut left = 1_usize;
        while left > 0 && reader.position < reader.words.len() {
            if let Some((_, end)) = self.skipped.filter(|(start, _)| *start == reader.position) {
                reader.position = end;
                left -= 1;
                continue;
            }
            let more = match *ManuallyDrop::new(reader.token()) {
                Token::Symbol(true) | Token::Ratio | Token::Complex => 2,
                Token::Symbol(false) | Token::Keyword => 1,
                Token::List(count) | Token::Vector(count) | Token::Values(count) => count,
                Token::Dotted(count) => count.saturating_add(1),
                Token::Table(count) => count.saturating_mul(2),
                _ => 0,
            };
            left = (left - 1).saturating_add(more);
        }
        reader.position
    }

    /// Reads the next token if it is a handle.
    pub(crate) fn take_handle(&mut self) -> Option<Handle> {
        if !self.is_at_handle() {
            return None;
        }
        if let Token::Handle(handle) = self.token() { Some(handle) } else { None }
    }
}

impl Drop for MessageReader<'_> {
    #[inline]
    fn drop(&mut self) {
        while self.position < self.words.len() {
            // Dropping a token releases its handle.
            drop(self.token());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::{Duration, Instant};

    use super::*;

    type Infallible = std::convert::Infallible;

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot fork")]
    fn handle_that_is_dropped_in_a_forked_child_is_not_queued() {
        assert!(process::tests::holds_in_forked_child(|| {
            let before = dropped_handle_count();
            drop(Handle(900_004));
            dropped_handle_count() == before
        }));
    }

    /// A handle that was read belongs to the caller. A handle that was skipped or never read is released once.
    #[test]
    fn handles_in_a_partly_read_object_are_released_once() {
        let (first, second, after) = (900_001, 900_002, 900_003);
        let handle = |number: u64| tag::HANDLE | number << 8;
        let words = [tag::LIST | 3 << 8, handle(first), tag::LIST | 1 << 8, handle(second), tag::NIL, handle(after)];
        let mut reader = MessageReader::new(&words);
        let start = reader.position();
        assert!(matches!(reader.token(), Token::List(3)));
        let Token::Handle(kept) = reader.token() else { panic!("no handle") };
        reader.skip_rest(start);
        let Token::Handle(next) = reader.token() else { panic!("the rest was not skipped") };
        assert_eq!((kept.number(), next.number()), (first, after));
        drop((kept, next, reader));
        let mut released = Vec::new();
        while released.len() < 3 {
            released.extend(take_dropped_handles().into_iter().filter(|number| (first..=after).contains(number)));
        }
        released.sort_unstable();
        assert_eq!(released, [first, second, after]);
    }

    /// Skips the rest of each of many nested objects, innermost first, as a failed conversion does.
    #[test]
    fn skipping_nested_objects_walks_each_object_once() {
        let (depth, count) = if cfg!(miri) { (20, 20) } else { (10_000, 1_000_000) };
        let innermost = std::iter::once(tag::LIST | count << 8).chain((0..count).flat_map(|_| [tag::INTEGER, 7]));
        let before = (0..depth).flat_map(|_| [tag::LIST | 3 << 8, tag::INTEGER, 1]);
        let after = (0..depth).flat_map(|_| [tag::INTEGER, 2]);
        let words: Vec<u64> = before.chain(innermost).chain(after).chain([tag::INTEGER, 3]).collect();
        let mut reader = MessageReader::new(&words);
        let mut starts = Vec::new();
        for _ in 0..depth {
            starts.push(reader.position());
            assert!(matches!((reader.token(), reader.token()), (Token::List(3), Token::Integer(1))));
        }
        starts.push(reader.position());
        assert!(matches!((reader.token(), reader.token()), (Token::List(_), Token::Integer(7))));
        let begun = Instant::now();
        for (level, start) in starts.into_iter().enumerate().rev() {
            reader.skip_rest(start);
            assert_eq!(words[reader.position()..][..2], [tag::INTEGER, if level > 0 { 2 } else { 3 }]);
            // Walking the innermost object again at each level would take minutes.
            assert!(begun.elapsed() < Duration::from_secs(30), "{level} levels are left");
        }
        assert!(matches!(reader.token(), Token::Integer(3)));
        assert_eq!(reader.position(), words.len());
    }

    impl From<KeyWithoutValue> for &'static str {
        fn from(_: KeyWithoutValue) -> Self {
            "a key without a value"
        }
    }

    /// Reads the next object, which must be complete, and returns its nesting depth.
    fn read_nesting_depth(reader: &mut MessageReader<'_>) -> usize {
        assert!(reader.position < reader.words.len(), "an object is missing");
        let start = reader.position;
        let word = reader.words[start];
        let number = usize::try_from(word >> 8).unwrap();
        let payload = match word & 0xff {
            tag::INTEGER | tag::DOUBLE => 1,
            tag::BIGNUM => number,
            tag::STRING => number.div_ceil(2),
            tag::OCTETS => number.div_ceil(8),
            _ => 0,
        };
        assert!(start + 1 + payload <= reader.words.len(), "it is cut short");
        let elements = match reader.token() {
            Token::List(count) | Token::Vector(count) | Token::Values(count) => count,
            Token::Table(count) => 2 * count,
            Token::Ratio | Token::Complex | Token::Symbol(true) => 2,
            Token::Symbol(false) | Token::Keyword => 1,
            Token::Handle(handle) => {
                // The writer still owns this handle.
                std::mem::forget(handle);
                0
            }
            _ => 0,
        };
        1 + (0..elements).map(|_| read_nesting_depth(reader)).max().unwrap_or(0)
    }

    /// Asserts that the message has exactly the objects that the writer counted.
    fn assert_well_formed(writer: &MessageWriter) {
        let mut reader = MessageReader::new(writer.words());
        for _ in 0..writer.objects {
            read_nesting_depth(&mut reader);
        }
        assert_eq!(reader.position, reader.words.len(), "there are words that belong to no object");
        let handles = writer.handles.len();
        assert!(handles <= writer.words().len());
    }

    /// A pseudorandom number generator (xorshift).
    struct RandomNumbers(u64);

    impl RandomNumbers {
        fn next_below(&mut self, limit: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % limit
        }
    }

    /// Writes a random object. Writing some of the containers fails or panics.
    fn write_random_object(
        writer: &mut MessageWriter,
        numbers: &mut RandomNumbers,
        level: u64,
    ) -> Result<(), &'static str> {
        match numbers.next_below(if level > 4 { 10 } else { 16 }) {
            0 => writer.nil(),
            1 => writer.long_integer(i128::from(numbers.0) << numbers.next_below(60)),
            2 => writer.string(["", "a", "größe λ😀", "abc"][numbers.next_below(4) as usize]),
            3 => writer.symbol([None, Some("KEYWORD"), Some("CL-USER")][numbers.next_below(3) as usize], "NAME"),
            4 => writer.octets(&vec![7; numbers.next_below(20) as usize]),
            5 => writer.ratio(i128::from(numbers.next_below(9)), i128::from(numbers.next_below(3))),
            6 => writer.complex(1.0, 2.0),
            7 => {
                let handle = Arc::new(Handle(5));
                writer.handle(&handle);
            }
            8 => writer.double(0.5),
            9 => {
                let mut other = MessageWriter::new();
                let written = write_random_object(&mut other, numbers, level + 1);
                writer.append(other);
                written?;
            }
            kind => {
                let count = numbers.next_below(5);
                let content = |writer: &mut MessageWriter| {
                    for _ in 0..count {
                        // Some failures and panics are propagated, and the rest are ignored.
                        let attempt =
                            catch_unwind(AssertUnwindSafe(|| write_random_object(writer, numbers, level + 1)));
                        match (attempt, numbers.next_below(3)) {
                            (Ok(Err(failure)), 0) => return Err(failure),
                            (Err(panic), 0) => std::panic::resume_unwind(panic),
                            _ => {}
                        }
                    }
                    match numbers.next_below(6) {
                        0 => Err("on purpose"),
                        1 => std::panic::resume_unwind(Box::new("on purpose")),
                        _ => Ok(()),
                    }
                };
                match kind % 3 {
                    0 => writer.list(content)?,
                    1 => writer.vector(content)?,
                    _ => writer.table(content)?,
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_message_stays_well_formed_when_writing_fails_or_panics() {
        for seed in 1..if cfg!(miri) { 40 } else { 4000 } {
            let mut numbers = RandomNumbers(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let mut writer = MessageWriter::new();
            for _ in 0..4 {
                let _ = catch_unwind(AssertUnwindSafe(|| write_random_object(&mut writer, &mut numbers, 0)));
                assert_well_formed(&writer);
            }
        }
    }

    #[test]
    fn a_container_is_removed_from_the_message_when_writing_it_panics() {
        let mut writer = MessageWriter::new();
        let written: Result<(), Infallible> = writer.list(|writer| {
            let left = catch_unwind(AssertUnwindSafe(|| {
                writer.list(|writer| {
                    writer.integer(1);
                    writer.handle(&Arc::new(Handle(5)));
                    if true { panic!("on purpose") } else { Ok::<(), Infallible>(()) }
                })
            }));
            assert!(left.is_err());
            writer.integer(2);
            Ok(())
        });
        assert!(written.is_ok());
        assert_eq!(writer.words(), [tag::LIST | 1 << 8, tag::INTEGER, 2]);
        assert!(writer.handles.is_empty());
    }

    #[test]
    fn a_table_with_a_key_and_no_value_is_refused() {
        let mut writer = MessageWriter::new();
        let written: Result<(), &str> = writer.table(|writer| {
            writer.integer(1);
            Ok(())
        });
        assert_eq!(written, Err("a key without a value"));
        assert!(writer.words().is_empty());
    }

    #[test]
    fn encode_string_list_writes_the_same_words_as_the_message_writer() {
        const WORDS: [u64; 6] = encode_string_list(["abc", "de"]);
        let mut writer = MessageWriter::new();
        let written: Result<(), Infallible> = writer.list(|writer| {
            writer.string("abc");
            writer.string("de");
            Ok(())
        });
        assert!(written.is_ok());
        assert_eq!(writer.words(), WORDS);
    }

    #[test]
    fn strings_survive_a_round_trip_through_a_message() {
        for text in ["", "a", "ab", "größe", "λ😀x"] {
            let mut writer = MessageWriter::new();
            writer.string(text);
            let Token::String(characters) = MessageReader::new(writer.words()).token() else { panic!("no string") };
            assert_eq!(characters.to_text().as_deref(), Ok(text));
            assert_eq!(characters.to_text_lossy(), text);
            assert_eq!(characters.first(2).to_text_lossy(), text.chars().take(2).collect::<String>());
        }
    }

    #[test]
    fn reading_random_words_terminates() {
        for seed in 1..if cfg!(miri) { 200 } else { 20_000 } {
            let mut numbers = RandomNumbers(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let words: Vec<u64> = (0..numbers.next_below(12))
                .map(|_| {
                    let number = numbers.next_below([3, 1 << 20, u64::MAX >> 8][(numbers.0 % 3) as usize]);
                    // No handle tags: a handle that Lisp never gave out would be released.
                    [number << 8 | numbers.next_below(17), numbers.0 & !0xff][numbers.next_below(2) as usize]
                })
                .collect();
            let mut reader = MessageReader::new(&words);
            reader.skip();
            while reader.position < words.len() {
                if let Token::String(characters) = reader.token() {
                    let _ = (characters.to_text(), characters.to_text_lossy());
                }
            }
        }
    }
}
