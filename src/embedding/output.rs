//! Output, warnings and input of the Lisp threads that run the program's calls.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock, mpsc};

use parking_lot::{Condvar, Mutex};

use crate::image::Event;
use crate::image::program::{has_stack_room, wait_outside_lisp};
use crate::os::{helper_threads, panics};
use crate::session::reentry::mark_stream_thread;

/// Size of the queued output, in bytes, above which a call that is being interrupted leaves no chunk in the queue: the
/// chunk is lost, unless it is the only one. The other calls wait until their chunks are written, so these calls have at
/// most one chunk each in the queue.
const MAX_QUEUED_BYTES: usize = 1 << 20;

type Sink = Box<dyn Write + Send>;
/// A function that receives a warning's class and text.
type WarningHook = Box<dyn Fn(&str, &str) + Send + Sync>;

/// The program's streams and warning hook. If an output stream is not set, the output goes to the process's standard
/// output or standard error. If the hook is not set, warnings become `tracing` events.
#[derive(Default)]
pub(super) struct Streams {
    pub(super) stdout: Option<Sink>,
    pub(super) stderr: Option<Sink>,
    pub(super) stdin: Option<Box<dyn Read + Send>>,
    pub(super) warning_hook: Option<WarningHook>,
}

/// A writer that turns each line into a `tracing` event.
pub(super) struct TracingWriter {
    line: String,
    event: fn(&str),
}

impl TracingWriter {
    /// Maximum length of an unfinished line, in bytes. A longer unfinished line becomes an event of its own.
    const MAX_LINE_BYTES: usize = 8192;

    pub(super) fn stdout() -> Self {
        Self { line: String::new(), event: |line| tracing::info!(target: "sbcl::stdout", "{line}") }
    }

    pub(super) fn stderr() -> Self {
        Self { line: String::new(), event: |line| tracing::warn!(target: "sbcl::stderr", "{line}") }
    }
}

impl Write for TracingWriter {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.line.push_str(&String::from_utf8_lossy(octets));
        // The complete lines are removed before the events: if the subscriber panics, the next write must not repeat them.
        let rest = self.line.split_off(self.line.rfind('\n').map_or(0, |end| end + 1));
        let complete = std::mem::replace(&mut self.line, rest);
        complete.split_terminator('\n').for_each(self.event);
        if self.line.len() > Self::MAX_LINE_BYTES {
            (self.event)(&std::mem::take(&mut self.line));
        }
        Ok(octets.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The threads that serve the program's streams.
///
/// Lisp threads do not call the streams themselves, but wait for these threads, because a wait can be interrupted,
/// while a stream that blocks cannot. The threads end if this value is dropped instead of being installed.
pub(super) struct StreamThreads {
    output: Arc<OutputQueue>,
    input: Option<Arc<InputRequests>>,
}

/// The stream threads of the image in this process.
static STREAM_THREADS: OnceLock<StreamThreads> = OnceLock::new();

thread_local! {
    /// The class of the warning whose text comes with the next event.
    static WARNING_CLASS: RefCell<String> = const { RefCell::new(String::new()) };
}

impl StreamThreads {
    /// Starts a thread for output, and a thread for input if the program has set a source of input. Takes the streams
    /// out of `streams` only when the threads have started: a failed boot must not drop the streams before the boot
    /// lock is released.
    ///
    /// # Errors
    /// Returns the error if the system cannot start a thread.
    pub(super) fn start(streams: &mut Streams) -> io::Result<Self> {
        let threads = Self { output: Arc::default(), input: streams.stdin.is_some().then(Arc::default) };
        let (give_streams, given_streams) = mpsc::channel();
        let (give_stdin, given_stdin) = mpsc::channel();
        let output = threads.output.clone();
        // If the second thread cannot be started, the first thread is given no streams and ends.
        std::thread::Builder::new()
            .name("sbcl-output".to_owned())
            .spawn(move || given_streams.recv().map(|streams| output.serve(streams)))?;
        if let Some(input) = threads.input.clone() {
            std::thread::Builder::new()
                .name("sbcl-input".to_owned())
                .spawn(move || given_stdin.recv().map(|stdin| input.serve(stdin)))?;
        }
        let _ = streams.stdin.take().map(|stdin| give_stdin.send(stdin));
        let _ = give_streams.send(std::mem::take(streams));
        Ok(threads)
    }

    /// Makes these threads serve the streams of the image in this process.
    pub(super) fn install(self) {
        let _ = STREAM_THREADS.set(self);
    }
}

impl Drop for StreamThreads {
    fn drop(&mut self) {
        self.output.state.lock().closed = true;
        self.output.pushed.notify_one();
        if let Some(input) = &self.input {
            input.state.lock().closed = true;
            input.changed.notify_all();
        }
    }
}

/// A piece of output that is queued for the output thread.
enum Chunk {
    Stdout(String),
    Stderr(String),
    /// A warning's class and text.
    Warning(String, String),
}

impl Chunk {
    fn len(&self) -> usize {
        match self {
            Self::Stdout(text) | Self::Stderr(text) => text.len(),
            Self::Warning(class, text) => class.len() + text.len(),
        }
    }
}

#[derive(Default)]
struct OutputQueue {
    state: Mutex<OutputState>,
    pushed: Condvar,
    /// Notified when a chunk has been written, and when waiting calls must check whether they are being interrupted.
    changed: Condvar,
}

#[derive(Default)]
struct OutputState {
    /// The queued chunks with their numbers, in ascending order.
    chunks: VecDeque<(u64, Chunk)>,
    /// Size of all chunks that are not completely written, in bytes.
    size: usize,
    /// Number of the chunk that was queued last.
    queued: u64,
    /// Number of the chunk that was written last.
    written: u64,
    /// Number of lost bytes that no warning has reported yet.
    lost: usize,
    closed: bool,
}

impl OutputState {
    /// Removes the chunk with the number `number` if the queue is too full for a chunk whose call does not wait. A chunk
    /// that is being written stays.
    fn remove_if_full(&mut self, number: u64) {
        let Ok(index) = self.chunks.binary_search_by_key(&number, |(number, _)| *number) else { return };
        let size = self.chunks[index].1.len();
        if self.size > MAX_QUEUED_BYTES.max(size) {
            self.chunks.remove(index);
            self.size -= size;
            self.lost += size;
        }
    }
}

impl OutputQueue {
    /// Writes queued chunks until the output is closed.
    fn serve(&self, mut streams: Streams) {
        mark_stream_thread();
        let mut state = self.state.lock();
        while !state.closed {
            let Some((number, chunk)) = state.chunks.pop_front() else {
                self.pushed.wait(&mut state);
                continue;
            };
            let lost = std::mem::take(&mut state.lost);
            drop(state);
            // A panic of the stream or the hook is caught, because this thread must write the next chunks.
            panics::catch(|| write_chunk(&mut streams, &chunk));
            if lost > 0 {
                panics::catch(|| {
                    let bytes = if lost == 1 { "byte" } else { "bytes" };
                    tracing::warn!(
                        "output of interrupted calls was lost ({lost} {bytes}), because the stream accepted no output \
                         for too long"
                    );
                });
            }
            state = self.state.lock();
            state.size -= chunk.len();
            state.written = number;
            self.changed.notify_all();
        }
    }

    /// Queues a chunk and waits until the chunk is written. Stops waiting if `is_ending` returns true, because the
    /// caller's call is being interrupted; then the chunk is lost if the queue is too full.
    fn write(&self, chunk: Chunk, is_ending: &dyn Fn() -> bool) {
        let mut state = self.state.lock();
        state.size += chunk.len();
        state.queued += 1;
        let number = state.queued;
        state.chunks.push_back((number, chunk));
        self.pushed.notify_one();
        while state.written < number {
            if is_ending() {
                state.remove_if_full(number);
                return;
            }
            self.changed.wait(&mut state);
        }
    }
}

/// A standard stream of the process, written without the lock of [`io::stdout`] or [`io::stderr`]. `println!` holds
/// that lock while it formats a [`Value`](super::Value), and formatting may run Lisp code that prints.
struct StandardStream(BorrowedFd<'static>);

impl Write for StandardStream {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, octets)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a chunk. Errors of the stream are ignored: no caller could handle them.
fn write_chunk(streams: &mut Streams, chunk: &Chunk) {
    fn write_text(sink: Option<&mut Sink>, standard: BorrowedFd<'static>, text: &str) {
        let _ = match sink {
            Some(sink) => sink.write_all(text.as_bytes()).and_then(|()| sink.flush()),
            None => StandardStream(standard).write_all(text.as_bytes()),
        };
    }
    match chunk {
        Chunk::Stdout(text) => write_text(streams.stdout.as_mut(), rustix::stdio::stdout(), text),
        Chunk::Stderr(text) => write_text(streams.stderr.as_mut(), rustix::stdio::stderr(), text),
        Chunk::Warning(class, text) => match &streams.warning_hook {
            Some(hook) => hook(class, text),
            None => tracing::warn!(target: "sbcl", "{class}: {text}"),
        },
    }
}

/// Passes a Lisp thread's output, warning or notice to the program. Waits until output or a warning is written, or
/// until `is_ending` returns true because the thread's call is being interrupted. Other events are ignored.
pub(super) fn write_event(event: Event<'_>, is_ending: &dyn Fn() -> bool) {
    let chunk = match event {
        Event::Stdout(text) => Chunk::Stdout(text.to_owned()),
        Event::Stderr(text) => Chunk::Stderr(text.to_owned()),
        Event::Warning(class, _) => return WARNING_CLASS.set(class.to_owned()),
        Event::WarningText { text, .. } => Chunk::Warning(WARNING_CLASS.take().to_lowercase(), text.to_owned()),
        Event::Notice(text) => {
            let text = text.to_owned();
            let trace = move || tracing::info!(target: "sbcl", "{text}");
            // The subscriber is code of the program, for which a nearly exhausted stack has no room.
            return if has_stack_room() { trace() } else { helper_threads::run(trace) };
        }
        _ => return,
    };
    match STREAM_THREADS.get() {
        Some(threads) => wait_outside_lisp(|| threads.output.write(chunk, is_ending)),
        // The image is still booting, so the stream threads are not installed.
        None => write_chunk(&mut Streams::default(), &chunk),
    }
}

/// Makes threads that wait for a stream check whether their call is being interrupted.
pub(super) fn wake_calls_waiting_for_streams() {
    let Some(threads) = STREAM_THREADS.get() else { return };
    // Taking the lock ensures that a thread which has just checked now waits, and so receives the notification.
    drop(threads.output.state.lock());
    threads.output.changed.notify_all();
    if let Some(input) = &threads.input {
        drop(input.state.lock());
        input.changed.notify_all();
    }
}

#[derive(Default)]
struct InputRequests {
    state: Mutex<InputState>,
    changed: Condvar,
}

/// The result of one read: a chunk of input, `None` at the end of the input or after an error, or the stream's panic.
type ReadResult = std::thread::Result<Option<String>>;

#[derive(Default)]
struct InputState {
    /// True from a Lisp thread's request for input until a read begins or a result is taken.
    wanted: bool,
    /// The result of the last read, until a Lisp thread takes it.
    result: Option<ReadResult>,
    closed: bool,
}

impl InputRequests {
    /// Reads a chunk whenever a Lisp thread wants input, until the input is closed.
    fn serve(&self, mut stdin: Box<dyn Read + Send>) {
        mark_stream_thread();
        let mut state = self.state.lock();
        while !state.closed {
            if !state.wanted || state.result.is_some() {
                self.changed.wait(&mut state);
                continue;
            }
            state.wanted = false;
            drop(state);
            let result = catch_unwind(AssertUnwindSafe(|| read_chunk(&mut *stdin)));
            state = self.state.lock();
            state.result = Some(result);
            self.changed.notify_all();
        }
    }

    /// Requests the next chunk and waits for this chunk. If `must_return` returns true, does not wait, and returns
    /// `None` unless the chunk is already there. The caller may then call again.
    fn read(&self, must_return: &dyn Fn() -> bool) -> Option<ReadResult> {
        let mut state = self.state.lock();
        loop {
            if let Some(result) = state.result.take() {
                // Other waiting threads request the next chunk themselves.
                state.wanted = false;
                return Some(result);
            }
            state.wanted = true;
            self.changed.notify_all();
            if must_return() {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Returns the next chunk of input, or `None` if the program has no input, or its input has ended or failed. Returns an
/// empty chunk if no chunk has arrived and `must_return` returns true: the caller does not wait for input, or the
/// caller's call is being interrupted. Resumes a panic of the stream.
pub(super) fn read_input(must_return: &dyn Fn() -> bool) -> Option<String> {
    match STREAM_THREADS.get()?.input.as_ref()?.read(must_return) {
        None => Some(String::new()),
        Some(result) => result.unwrap_or_else(|panic| resume_unwind(panic)),
    }
}

/// Reads the next chunk of input. Returns `None` if the input has ended or failed.
fn read_chunk(stdin: &mut dyn Read) -> Option<String> {
    let mut octets = Vec::new();
    let mut buffer = [0; 4096];
    // If the first read ends within a character, up to three further octets complete the character.
    for room in [buffer.len(), 1, 1, 1] {
        let count = loop {
            match stdin.read(&mut buffer[..room]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // After a failure within a character, the octets before it are delivered.
                count => break count.unwrap_or(0),
            }
        };
        octets.extend_from_slice(&buffer[..count]);
        if count == 0 || !ends_within_character(&octets) {
            break;
        }
    }
    (!octets.is_empty()).then(|| String::from_utf8_lossy(&octets).into_owned())
}

/// Returns true if `octets` end in the middle of a UTF-8 character.
fn ends_within_character(octets: &[u8]) -> bool {
    // An incomplete character has at most three octets.
    let end = &octets[octets.len().saturating_sub(3)..];
    let last = end.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    /// A stream that queues another chunk before it has written one, as threads do that keep printing.
    struct RefillingStream {
        queue: Arc<OutputQueue>,
        large_written: mpsc::Sender<()>,
    }

    impl Write for RefillingStream {
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            self.queue.write(Chunk::Stdout("small".to_owned()), &|| true);
            if octets.len() > MAX_QUEUED_BYTES {
                let _ = self.large_written.send(());
            }
            Ok(octets.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn large_chunk_is_written_while_other_output_keeps_coming() {
        let queue = Arc::new(OutputQueue::default());
        let (sender, large_written) = mpsc::channel();
        let stream = RefillingStream { queue: queue.clone(), large_written: sender };
        let streams = Streams { stdout: Some(Box::new(stream)), ..Streams::default() };
        queue.write(Chunk::Stdout("small".to_owned()), &|| true);
        let [server, printer] = [(); 2].map(|()| queue.clone());
        std::thread::spawn(move || server.serve(streams));
        std::thread::spawn(move || printer.write(Chunk::Stdout("x".repeat(MAX_QUEUED_BYTES + 1)), &|| false));
        let written = large_written.recv_timeout(Duration::from_secs(60));
        queue.state.lock().closed = true;
        queue.pushed.notify_one();
        written.expect("the large chunk gets its turn");
    }

    #[test]
    fn interrupted_calls_leave_only_so_much_output_in_the_queue() {
        const SIZE: usize = MAX_QUEUED_BYTES / 2;
        let chunk = || Chunk::Stdout("x".repeat(SIZE));
        let queue = Arc::new(OutputQueue::default());
        for _ in 0..3 {
            queue.write(chunk(), &|| true);
        }
        let ending = Arc::new(AtomicBool::new(false));
        let waiting = {
            let (queue, ending) = (queue.clone(), ending.clone());
            std::thread::spawn(move || queue.write(chunk(), &|| ending.load(Ordering::Relaxed)))
        };
        while queue.state.lock().chunks.len() < 3 {
            std::thread::yield_now();
        }
        ending.store(true, Ordering::Relaxed);
        while !waiting.is_finished() {
            queue.changed.notify_all();
            std::thread::yield_now();
        }
        let state = queue.state.lock();
        assert_eq!((state.chunks.len(), state.size, state.lost), (2, 2 * SIZE, 2 * SIZE));
    }

    #[test]
    fn line_whose_event_panics_is_not_repeated() {
        thread_local! {
            static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        }
        let event = |line: &str| {
            LINES.with_borrow_mut(|lines| lines.push(line.to_owned()));
            assert_ne!(line, "panics");
        };
        let mut writer = TracingWriter { line: String::new(), event };
        assert!(panics::catch(|| writer.write_all(b"one\n\npanics\nbeg")).is_none());
        writer.write_all(b"in\nend").unwrap();
        writer.write_all(b"\n").unwrap();
        assert_eq!(LINES.take(), ["one", "", "panics", "begin", "end"]);
    }

    #[test]
    fn bytes_that_each_begin_a_character_are_delivered_in_chunks() {
        for byte in [0xC3, 0xE9, 0xF0] {
            let mut input = io::repeat(byte).take(10_000);
            let chunks: Vec<_> = std::iter::from_fn(|| read_chunk(&mut input)).collect();
            assert!(chunks.len() > 1 && chunks.concat() == "\u{fffd}".repeat(10_000), "{byte:#x}: {}", chunks.len());
        }
    }

    #[test]
    fn character_that_arrives_in_several_reads_is_delivered_whole() {
        let mut input = (&b"x\xf0"[..]).chain(&b"\x9f"[..]).chain(&b"\x98\x80y"[..]);
        assert_eq!(read_chunk(&mut input).as_deref(), Some("x\u{1f600}"));
        assert_eq!(read_chunk(&mut input).as_deref(), Some("y"));
        assert_eq!(read_chunk(&mut input), None);
    }

    #[test]
    fn input_before_a_failure_within_a_character_is_delivered() {
        struct Failure;

        impl Read for Failure {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }

        let mut input = (&b"x\xf0\x9f"[..]).chain(Failure);
        assert_eq!(read_chunk(&mut input).as_deref(), Some("x\u{fffd}"));
        assert_eq!(read_chunk(&mut input), None);
    }
}
