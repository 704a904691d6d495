//! Messages between Lisp and a program: tokens, each a word (a tag in the low byte, a number in the others) and the words
//! and tokens that this one announces. `lisp/values.lisp` has the same. And the handles that they carry.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, LazyLock, OnceLock};

use parking_lot::Mutex;

use super::program::Words;

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

/// Keeps a Lisp object alive. Dropping it never blocks, and never calls Lisp: the image lets go of the object later.
#[derive(Debug)]
pub(crate) struct Handle(u64);

impl Handle {
    /// The number that Lisp knows it by.
    pub(crate) fn number(&self) -> u64 {
        self.0
    }
}

struct Released {
    sender: Sender<u64>,
    receiver: Mutex<Receiver<u64>>,
    /// How many wait.
    count: AtomicUsize,
}

static RELEASED: LazyLock<Released> = LazyLock::new(|| {
    let (sender, receiver) = mpsc::channel();
    Released { sender, receiver: Mutex::new(receiver), count: AtomicUsize::new(0) }
});

/// What has a Lisp thread that sleeps look for released handles.
static WAKE: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// How many handles may wait before a thread is woken for them.
const MANY: usize = 1024;

impl Drop for Handle {
    fn drop(&mut self) {
        let released = &*RELEASED;
        // Counted first: who takes it counts it off.
        let count = released.count.fetch_add(1, Ordering::AcqRel) + 1;
        // The receiver is never dropped.
        let _ = released.sender.send(self.0);
        if count.is_multiple_of(MANY)
            && let Some(wake) = WAKE.get()
        {
            wake();
        }
    }
}

/// From now on `wake` is called when there are many released handles. It must not block.
pub(crate) fn wake_with(wake: impl Fn() + Send + Sync + 'static) {
    let _ = WAKE.set(Box::new(wake));
}

/// True when handles wait to be let go of.
pub(crate) fn has_released() -> bool {
    RELEASED.count.load(Ordering::Acquire) > 0
}

/// Takes some of the handles that wait to be let go of, unless another thread is doing so.
pub(crate) fn take_released() -> Vec<u64> {
    let released = &*RELEASED;
    let Some(receiver) = released.receiver.try_lock() else { return Vec::new() };
    let numbers: Vec<u64> = receiver.try_iter().take(MANY).collect();
    released.count.fetch_sub(numbers.len(), Ordering::AcqRel);
    numbers
}

/// A message of NIL.
pub(crate) const NIL: &[u64] = &[tag::NIL];

/// Writes a message.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    words: Words,
    /// How many objects were written at this level.
    objects: usize,
    /// What the message mentions lives as long as it.
    kept: Vec<Arc<Handle>>,
}

impl Writer {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { words: Words::new(), objects: 0, kept: Vec::new() }
    }

    #[inline]
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// How many objects were written.
    #[inline]
    pub(crate) fn objects(&self) -> usize {
        self.objects
    }

    /// What has to live until Lisp has read the message.
    pub(crate) fn take_kept(&mut self) -> Vec<Arc<Handle>> {
        std::mem::take(&mut self.kept)
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

    /// An integer in two's complement, the lowest word first; at least one.
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

    /// That of this code, which may be a surrogate's.
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

    /// A symbol: interned in the package of that name, a keyword for `KEYWORD`, or fresh without one.
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

    fn numbers(&mut self, tag: u64, write: impl FnOnce(&mut Self)) {
        let before = self.objects;
        self.token(tag, 0);
        write(self);
        debug_assert_eq!(self.objects, before + 2);
        self.objects = before + 1;
    }

    /// A ratio, from two integers that `write` writes, the second one not 0.
    pub(crate) fn ratio(&mut self, write: impl FnOnce(&mut Self)) {
        self.numbers(tag::RATIO, write);
    }

    /// A complex number, from two real ones that `write` writes.
    pub(crate) fn complex(&mut self, write: impl FnOnce(&mut Self)) {
        self.numbers(tag::COMPLEX, write);
    }

    /// What `write` writes, as the elements of a container.
    fn container(&mut self, tag: u64, write: impl FnOnce(&mut Self)) {
        let (start, before) = (self.words.len(), self.objects);
        self.token(tag, 0);
        self.objects = 0;
        write(self);
        let mut count = self.objects as u64;
        if tag == tag::TABLE {
            // Of an even number.
            if !count.is_multiple_of(2) {
                self.nil();
                count += 1;
            }
            count /= 2;
        }
        self.words[start] = tag | count << 8;
        self.objects = before + 1;
    }

    /// A list of the objects that `write` writes.
    pub(crate) fn list(&mut self, write: impl FnOnce(&mut Self)) {
        self.container(tag::LIST, write);
    }

    /// A simple vector of the objects that `write` writes.
    pub(crate) fn vector(&mut self, write: impl FnOnce(&mut Self)) {
        self.container(tag::VECTOR, write);
    }

    /// A hash table (EQUAL) of the keys and values that `write` writes in turn.
    pub(crate) fn table(&mut self, write: impl FnOnce(&mut Self)) {
        self.container(tag::TABLE, write);
    }

    /// Several values, in an answer.
    pub(crate) fn values(&mut self, write: impl FnOnce(&mut Self)) {
        self.container(tag::VALUES, write);
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

    /// The objects of another message.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.objects += other.objects;
        self.words.extend_from_slice(&other.words);
        self.kept.append(&mut other.kept);
    }

    pub(crate) fn handle(&mut self, handle: &Arc<Handle>) {
        self.objects += 1;
        self.token(tag::HANDLE, handle.number());
        self.kept.push(handle.clone());
    }
}

/// The word that is a token of this handle.
pub(crate) fn handle_token(handle: &Handle) -> u64 {
    tag::HANDLE | handle.number() << 8
}

/// The codes of characters in `words`, as Lisp holds them: two to a word.
fn codes(words: &[u64]) -> &[u32] {
    // SAFETY: any bits are integers, and a word is two of the others in size, and more than aligned for them: nothing is
    // left before or after.
    unsafe { words.align_to().1 }
}

/// Characters as Lisp holds them, two to a word.
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

    /// The text, or the code of the first character that is a surrogate, which no string of Rust's can hold.
    pub(crate) fn to_text(self) -> Result<String, u32> {
        let codes = self.codes();
        if codes.iter().fold(0, |seen, code| seen | code) < 0x80 {
            return Ok(String::from_utf8(codes.iter().map(|&code| code as u8).collect()).unwrap_or_default());
        }
        codes.iter().map(|&code| char::from_u32(code).ok_or(code)).collect()
    }

    /// The text, with surrogates replaced.
    pub(crate) fn to_text_lossy(self) -> String {
        self.codes().iter().map(|&code| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    }
}

/// What a token says. The containers are followed by their elements' tokens.
#[derive(Debug)]
pub(crate) enum Token<'m> {
    Nil,
    True,
    Integer(i64),
    /// In two's complement, the lowest word first.
    Bignum(&'m [u64]),
    Single(f32),
    Double(f64),
    /// Its code, which may be a surrogate.
    Character(u32),
    String(Characters<'m>),
    /// Its name follows, after that of its package if this is true, as strings.
    Symbol(bool),
    /// Its name follows, as a string.
    Keyword,
    /// Two integers follow.
    Ratio,
    /// Two real numbers follow.
    Complex,
    List(usize),
    /// So many elements, and what comes after the last one.
    Dotted(usize),
    Vector(usize),
    /// Octets in words, and how many.
    Octets(&'m [u64], usize),
    /// So many pairs of key and value.
    Table(usize),
    Handle(Handle),
    Doubles(&'m [u64]),
    Values(usize),
}

/// Reads a message, and lets go of what it does not read.
#[derive(Debug)]
pub(crate) struct Reader<'m> {
    words: &'m [u64],
    position: usize,
}

impl<'m> Reader<'m> {
    #[inline]
    pub(crate) fn new(words: &'m [u64]) -> Self {
        Self { words, position: 0 }
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

    /// The next token; NIL at the end.
    #[inline]
    pub(crate) fn token(&mut self) -> Token<'m> {
        match self.word() {
            tag::INTEGER => Token::Integer(self.word().cast_signed()),
            word => self.token_of(word),
        }
    }

    /// The token that begins with `word`.
    fn token_of(&mut self, word: u64) -> Token<'m> {
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

    /// True when the next token is that of a handle.
    pub(crate) fn is_at_handle(&self) -> bool {
        self.words.get(self.position).is_some_and(|word| word & 0xff == tag::HANDLE)
    }

    /// True when the next token is NIL, or there is none.
    pub(crate) fn is_at_nil(&self) -> bool {
        self.words.get(self.position).is_none_or(|word| word & 0xff == tag::NIL)
    }

    /// Skips the next object, however large.
    pub(crate) fn skip(&mut self) {
        let mut left = 1_usize;
        while left > 0 && self.position < self.words.len() {
            left = left - 1
                + match self.token() {
                    Token::Symbol(true) | Token::Ratio | Token::Complex => 2,
                    Token::Symbol(false) | Token::Keyword => 1,
                    Token::List(count) | Token::Vector(count) | Token::Values(count) => count,
                    Token::Dotted(count) => count + 1,
                    Token::Table(count) => count * 2,
                    _ => 0,
                };
        }
    }
}

impl Drop for Reader<'_> {
    #[inline]
    fn drop(&mut self) {
        while self.position < self.words.len() {
            // Handles are let go of.
            drop(self.token());
        }
    }
}
