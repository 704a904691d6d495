//! What Lisp prints and warns of on the threads that work for the program.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::image::Event;

type Sink = Mutex<Box<dyn Write + Send>>;
/// Told of a warning's class and of what it reports.
type WarningHook = Box<dyn Fn(&str, &str) + Send + Sync>;

/// Where it all goes.
#[derive(Default)]
pub(super) struct Streams {
    pub(super) stdout: Option<Sink>,
    pub(super) stderr: Option<Sink>,
    pub(super) stdin: Option<Mutex<Box<dyn Read + Send>>>,
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

/// Of the one image of this process.
pub(super) static STREAMS: OnceLock<Streams> = OnceLock::new();

thread_local! {
    /// The class of the warning whose text is to come.
    static WARNING: RefCell<String> = const { RefCell::new(String::new()) };
}

fn write(sink: Option<&Sink>, mut standard: impl Write, text: &str) {
    // There is nobody to tell of a stream that takes nothing.
    let _ = match sink {
        Some(sink) => {
            let mut sink = sink.lock();
            sink.write_all(text.as_bytes()).and_then(|()| sink.flush())
        }
        None => standard.write_all(text.as_bytes()).and_then(|()| standard.flush()),
    };
}

/// Takes what a thread prints, or warns of.
pub(super) fn take(event: Event<'_>) {
    let streams = STREAMS.get();
    match event {
        Event::Stdout(text) => {
            write(streams.and_then(|streams| streams.stdout.as_ref()), io::stdout(), &text.to_owned());
        }
        Event::Stderr(text) => {
            write(streams.and_then(|streams| streams.stderr.as_ref()), io::stderr(), &text.to_owned());
        }
        Event::Warning(class, _) => WARNING.set(class.to_owned()),
        Event::WarningText { text, .. } => {
            let (class, text) = (WARNING.take().to_lowercase(), text.to_owned());
            match streams.and_then(|streams| streams.warnings.as_ref()) {
                Some(hook) => hook(&class, &text),
                None => tracing::warn!(target: "sbcl", "{class}: {text}"),
            }
        }
        Event::Notice(text) => tracing::info!(target: "sbcl", "{}", text.to_owned()),
        _ => {}
    }
}

/// The next part of the input; `None` at its end, or where there is none.
pub(super) fn read() -> Option<String> {
    let stdin = STREAMS.get()?.stdin.as_ref()?;
    let mut octets = Vec::new();
    let mut stdin = stdin.lock();
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
