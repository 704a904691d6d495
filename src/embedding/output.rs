//! What Lisp prints and warns of on the threads that work for the program.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};

use crate::image::Event;
use crate::os::panics;
use crate::session::reentry::serve_stream;

/// Bytes that wait to be written; calls that are being ended lose what they print beyond that.
const MAX_WAITING: usize = 1 << 20;

type Sink = Box<dyn Write + Send>;
/// Told of a warning's class and of what it reports.
type WarningHook = Box<dyn Fn(&str, &str) + Send + Sync>;

/// Where it all goes.
#[derive(Default)]
pub(super) struct Streams {
    pub(super) stdout: Option<Sink>,
    pub(super) stderr: Option<Sink>,
    pub(super) stdin: Option<Box<dyn Read + Send>>,
    pub(super) warnings: Option<WarningHook>,
}

/// A stream whose lines are events of `tracing`.
pub(super) struct Traced {
    line: String,
    event: fn(&str),
}

impl Traced {
    /// How long a line may become that does not end.
    const LONGEST: usize = 8192;

    pub(super) fn stdout() -> Self {
        Self { line: String::new(), event: |line| tracing::info!(target: "sbcl::stdout", "{line}") }
    }

    pub(super) fn stderr() -> Self {
        Self { line: String::new(), event: |line| tracing::warn!(target: "sbcl::stderr", "{line}") }
    }
}

impl Write for Traced {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.line.push_str(&String::from_utf8_lossy(octets));
        while let Some(end) = self.line.find('\n') {
            (self.event)(&self.line[..end]);
            self.line.drain(..=end);
        }
        if self.line.len() > Self::LONGEST {
            (self.event)(&std::mem::take(&mut self.line));
        }
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The threads that serve the streams, so that a Lisp thread which waits for one of them can stop waiting: no stream of a
/// program's can be interrupted. They end when this is dropped before it is installed.
pub(super) struct Served {
    output: Arc<Output>,
    input: Option<Arc<Input>>,
}

/// Of the one image of this process.
static SERVED: OnceLock<Served> = OnceLock::new();

thread_local! {
    /// The class of the warning whose text is to come.
    static WARNING: RefCell<String> = const { RefCell::new(String::new()) };
}

impl Served {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system has none.
    pub(super) fn start(mut streams: Streams) -> io::Result<Self> {
        let stdin = streams.stdin.take();
        // Whatever fails here, dropping it ends what was started.
        let served = Self { output: Arc::default(), input: stdin.is_some().then(Arc::default) };
        let output = served.output.clone();
        std::thread::Builder::new().name("sbcl-output".to_owned()).spawn(move || output.serve(streams))?;
        if let Some((input, stdin)) = served.input.clone().zip(stdin) {
            std::thread::Builder::new().name("sbcl-input".to_owned()).spawn(move || input.serve(stdin))?;
        }
        Ok(served)
    }

    /// Serves the image of this process from now on.
    pub(super) fn install(self) {
        let _ = SERVED.set(self);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.output.state.lock().closed = true;
        self.output.pushed.notify_one();
        if let Some(input) = &self.input {
            input.state.lock().closed = true;
            input.changed.notify_all();
        }
    }
}

/// Something that waits for the thread that serves the output.
enum Piece {
    Stdout(String),
    Stderr(String),
    /// A warning's class and text.
    Warning(String, String),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Stdout(text) | Self::Stderr(text) => text.len(),
            Self::Warning(class, text) => class.len() + text.len(),
        }
    }
}

#[derive(Default)]
struct Output {
    state: Mutex<OutputState>,
    pushed: Condvar,
    /// For those that wait: something was written, or a call is to end.
    changed: Condvar,
}

#[derive(Default)]
struct OutputState {
    pieces: VecDeque<Piece>,
    /// Bytes of the pieces, of the one that is being written too.
    size: usize,
    /// How many pieces there were, and how many of them are written.
    pushed: u64,
    written: u64,
    /// Number of lost bytes that no warning has reported yet.
    lost: usize,
    closed: bool,
}

impl Output {
    /// Writes what comes, for ever.
    fn serve(&self, mut streams: Streams) {
        serve_stream();
        let mut state = self.state.lock();
        while !state.closed {
            let Some(piece) = state.pieces.pop_front() else {
                self.pushed.wait(&mut state);
                continue;
            };
            let lost = std::mem::take(&mut state.lost);
            drop(state);
            // A panic of the stream has no caller to reach.
            panics::caught(|| write(&mut streams, &piece));
            if lost > 0 {
                panics::caught(|| {
                    tracing::warn!(
                        "{lost} bytes that interrupted calls printed were lost: the stream took none for too long"
                    );
                });
            }
            state = self.state.lock();
            state.size -= piece.len();
            state.written += 1;
            self.changed.notify_all();
        }
    }

    /// Has a piece written and waits until that is done, or the caller's call is to end.
    fn write(&self, piece: Piece, is_ending: &dyn Fn() -> bool) {
        let size = piece.len();
        let mut state = self.state.lock();
        while state.size > 0 && state.size + size > MAX_WAITING {
            if is_ending() {
                state.lost += size;
                return;
            }
            self.changed.wait(&mut state);
        }
        state.size += size;
        state.pieces.push_back(piece);
        state.pushed += 1;
        let number = state.pushed;
        self.pushed.notify_one();
        while state.written < number && !is_ending() {
            self.changed.wait(&mut state);
        }
    }
}

/// Writes a piece. Errors of the stream are ignored: no caller could handle them.
fn write(streams: &mut Streams, piece: &Piece) {
    fn to(sink: Option<&mut Sink>, mut standard: impl Write, text: &str) {
        let _ = match sink {
            Some(sink) => sink.write_all(text.as_bytes()).and_then(|()| sink.flush()),
            None => standard.write_all(text.as_bytes()).and_then(|()| standard.flush()),
        };
    }
    match piece {
        Piece::Stdout(text) => to(streams.stdout.as_mut(), io::stdout(), text),
        Piece::Stderr(text) => to(streams.stderr.as_mut(), io::stderr(), text),
        Piece::Warning(class, text) => match &streams.warnings {
            Some(hook) => hook(class, text),
            None => tracing::warn!(target: "sbcl", "{class}: {text}"),
        },
    }
}

/// Takes what a thread prints, or warns of, and waits until it is written; not while `is_ending` says that the thread's call
/// is to end.
pub(super) fn take(event: Event<'_>, is_ending: &dyn Fn() -> bool) {
    let piece = match event {
        Event::Stdout(text) => Piece::Stdout(text.to_owned()),
        Event::Stderr(text) => Piece::Stderr(text.to_owned()),
        Event::Warning(class, _) => return WARNING.set(class.to_owned()),
        Event::WarningText { text, .. } => Piece::Warning(WARNING.take().to_lowercase(), text.to_owned()),
        Event::Notice(text) => return tracing::info!(target: "sbcl", "{}", text.to_owned()),
        _ => return,
    };
    match SERVED.get() {
        Some(served) => served.output.write(piece, is_ending),
        // It still boots.
        None => write(&mut Streams::default(), &piece),
    }
}

/// Has those who wait for a stream look whether their call is to end.
pub(super) fn stop_waiting() {
    let Some(served) = SERVED.get() else { return };
    // With the locks: who has just looked waits by then.
    drop(served.output.state.lock());
    served.output.changed.notify_all();
    if let Some(input) = &served.input {
        drop(input.state.lock());
        input.changed.notify_all();
    }
}

#[derive(Default)]
struct Input {
    state: Mutex<InputState>,
    changed: Condvar,
}

/// What came of reading: the next part of the input, or `None` at its end.
type Part = std::thread::Result<Option<String>>;

#[derive(Default)]
struct InputState {
    /// Somebody waits for it.
    wanted: bool,
    /// What was read and nobody has taken.
    part: Option<Part>,
    closed: bool,
}

impl Input {
    /// Reads when that is wanted, for ever.
    fn serve(&self, mut stdin: Box<dyn Read + Send>) {
        serve_stream();
        let mut state = self.state.lock();
        while !state.closed {
            if !state.wanted || state.part.is_some() {
                self.changed.wait(&mut state);
                continue;
            }
            state.wanted = false;
            drop(state);
            let part = catch_unwind(AssertUnwindSafe(|| read_part(&mut *stdin)));
            state = self.state.lock();
            state.part = Some(part);
            self.changed.notify_all();
        }
    }

    /// The next part. `None` when the caller's call is to end.
    fn read(&self, is_ending: &dyn Fn() -> bool) -> Option<Part> {
        let mut state = self.state.lock();
        loop {
            if let Some(part) = state.part.take() {
                return Some(part);
            }
            if is_ending() {
                return None;
            }
            state.wanted = true;
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
    }
}

/// The next part of the input; `None` at its end, or where there is none. It is empty when the thread's call is to end, which
/// `is_ending` says.
pub(super) fn read(is_ending: &dyn Fn() -> bool) -> Option<String> {
    match SERVED.get()?.input.as_ref()?.read(is_ending) {
        None => Some(String::new()),
        Some(part) => part.unwrap_or_else(|panic| resume_unwind(panic)),
    }
}

fn read_part(stdin: &mut dyn Read) -> Option<String> {
    let mut octets = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let room = if octets.is_empty() { buffer.len() } else { 1 };
        let count = match stdin.read(&mut buffer[..room]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count.ok()?,
        };
        octets.extend_from_slice(&buffer[..count]);
        if count > 0 && is_unfinished(&octets) {
            continue;
        }
        return (!octets.is_empty()).then(|| String::from_utf8_lossy(&octets).into_owned());
    }
}

/// True when the last character is one of which more octets have to follow.
fn is_unfinished(octets: &[u8]) -> bool {
    let last = octets.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none())
}
