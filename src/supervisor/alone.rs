//! A process that is its own supervisor: it remembers what another image must know, and becomes the process that boots
//! that (execve). The client notices nothing: it is the same process, with the same ends of the conversation, and what was
//! read and not answered, or answered and not sent, goes along in a file in memory.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::Mode;
use serde::{Deserialize, Serialize};

use super::recovery::{Crash, RecoveryState, Remembered};
use super::{Options, processes};
use crate::checkpoints::this_program;
use crate::durable::Durable;
use crate::durable::lock::Lock;
use crate::handover::WorkerInit;
use crate::handover::frame::{Frame, Kind};
use crate::handover::shared_status::{SharedStatus, WorkerStatus};
use crate::id_scanner::IdScanner;
use crate::image::process::{become_program, heed_own_signals, inherited, keep_only};
use crate::rpc::framing::Unread;
use crate::rpc::output::Memory;

/// The option with the number of the file that a process hands to its successor, and the one with the image.
pub(crate) const HANDOVER: &str = "--handover-fd=";
const IMAGE: &str = "--image=";

/// How this process was started, before code of the user's could change any of that.
#[derive(Debug)]
pub(crate) struct Origin {
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    directory: Option<PathBuf>,
    umask: Mode,
}

impl Origin {
    /// Takes note of it.
    pub(crate) fn here() -> Self {
        let is_ours = |argument: &OsString| {
            let text = argument.to_string_lossy();
            text.starts_with(HANDOVER) || text.starts_with(IMAGE)
        };
        let umask = rustix::process::umask(Mode::empty());
        rustix::process::umask(umask);
        Self {
            arguments: std::env::args_os().skip(1).filter(|argument| !is_ours(argument)).collect(),
            environment: std::env::vars_os().collect(),
            directory: std::env::current_dir().ok(),
            umask,
        }
    }
}

/// What a process hands to its successor, before the bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    input: i32,
    output: i32,
    lock: Option<i32>,
    scratch: PathBuf,
    checkpoints: PathBuf,
    remembered: Remembered,
    /// The numbers of the lines that are not answered, and how many bytes each has.
    requests: Vec<(u64, usize)>,
    /// The number of the next line.
    next: u64,
    /// Bytes that were read and are no line yet.
    unread: usize,
    /// They are within a line that is too long.
    too_long: Option<IdScanner>,
    /// Bytes that were not written yet.
    unsent: usize,
}

/// What a process takes over from the one that it was.
#[derive(Debug)]
pub(crate) struct Inheritance {
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
    pub(crate) lock: Option<Lock>,
    pub(crate) scratch: PathBuf,
    pub(crate) checkpoints: PathBuf,
    remembered: Remembered,
    requests: Vec<(u64, Box<[u8]>)>,
    next: u64,
    unread: (Vec<u8>, Option<IdScanner>),
    unsent: Vec<u8>,
}

impl Inheritance {
    /// Reads it from the open file of this number.
    ///
    /// # Errors
    /// There is no such file, or something else is in it.
    pub(crate) fn take(number: i32) -> io::Result<Self> {
        heed_own_signals()?;
        let mut file = std::fs::File::from(inherited(number)?);
        file.rewind()?;
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let bytes = |file: &mut std::fs::File, length: usize| {
            let mut bytes = vec![0; length];
            file.read_exact(&mut bytes).map(|()| bytes)
        };
        let header = bytes(&mut file, usize::try_from(u64::from_le_bytes(length)).map_err(io::Error::other)?)?;
        let header: Header = serde_json::from_slice(&header)?;
        let mut requests = Vec::new();
        for (number, length) in header.requests {
            requests.push((number, bytes(&mut file, length)?.into()));
        }
        Ok(Self {
            input: inherited(header.input)?,
            output: inherited(header.output)?,
            lock: header.lock.map(inherited).transpose()?.map(Lock::inherited),
            scratch: header.scratch,
            checkpoints: header.checkpoints,
            remembered: header.remembered,
            requests,
            next: header.next,
            unread: (bytes(&mut file, header.unread)?, header.too_long),
            unsent: bytes(&mut file, header.unsent)?,
        })
    }
}

/// What the process begins to serve with.
#[derive(Debug)]
pub(crate) struct Beginning {
    /// Where the image before stopped.
    pub(crate) init: WorkerInit,
    /// The lines that are not answered, and what was read besides.
    pub(crate) unread: Unread,
    /// What is to be written before all else.
    pub(crate) unsent: Vec<u8>,
}

/// The memory of a process that is its own supervisor.
#[derive(Debug)]
pub(crate) struct Alone {
    state: Mutex<State>,
    origin: Origin,
    scratch: PathBuf,
    checkpoints: PathBuf,
    durable: Option<(Durable, Lock)>,
}

#[derive(Debug)]
struct State {
    recovery: RecoveryState,
    status: WorkerStatus,
    /// The image is as it was.
    restored: bool,
}

impl Alone {
    /// One that goes on where a session that lasts was left, begins with nothing, or takes over what it was.
    ///
    /// # Errors
    /// A sentence: that session cannot be gone on with, or there is no memory for it.
    pub(crate) fn new(
        options: Options,
        origin: Origin,
        scratch: &Path,
        checkpoints: &Path,
        inheritance: Option<Inheritance>,
    ) -> Result<(Self, Beginning), String> {
        let mut recovery = RecoveryState::new(&options);
        let durable = options.durable.as_ref().map(|(durable, _)| durable);
        let (mut unread, mut unsent) = (Unread::default(), Vec::new());
        match inheritance {
            Some(inheritance) => {
                unsent = inheritance.unsent;
                unread.lines = inheritance.requests.iter().map(|(_, line)| line.clone()).collect();
                (unread.rest, unread.too_long) = inheritance.unread;
                recovery.requests.take_over(inheritance.requests.into_iter(), inheritance.next);
                recovery.remember(inheritance.remembered, durable);
            }
            None => {
                if let Some(durable) = durable {
                    recovery.go_on(durable)?;
                    recovery.try_images();
                }
            }
        }
        let status = WorkerStatus::new(durable.map(Durable::status_file).as_deref());
        let status = status.map_err(|error| format!("there is no memory for the session's numbers: {error}"))?;
        // It finds out which checkpoints there still are.
        let _ = recovery.image();
        let beginning = Beginning { init: recovery.init(), unread, unsent };
        let alone = Self {
            state: Mutex::new(State { recovery, status, restored: false }),
            origin,
            scratch: scratch.to_owned(),
            checkpoints: checkpoints.to_owned(),
            durable: options.durable,
        };
        Ok((alone, beginning))
    }

    /// The core that the image begins with, if that is not the plain one.
    pub(crate) fn image(&self) -> Option<PathBuf> {
        self.state.lock().recovery.image()
    }

    /// The numbers of the one worker that there is.
    ///
    /// # Errors
    /// They cannot be mapped.
    pub(crate) fn status(&self) -> io::Result<SharedStatus> {
        self.state.lock().status.here()
    }

    fn become_another(
        &self,
        state: &mut State,
        input: BorrowedFd<'_>,
        unread: (&[u8], Option<&IdScanner>),
        output: BorrowedFd<'_>,
        unsent: &[u8],
    ) -> io::Result<Infallible> {
        // What was being saved is whole by now, or never will be.
        processes::end_all();
        if state.recovery.take_finished() {
            state.recovery.try_images();
        }
        state.recovery.requests.apply_cancellations();
        let lock = self.durable.as_ref().map(|(_, lock)| lock.as_fd());
        let requests = &state.recovery.requests;
        let header = Header {
            input: input.as_raw_fd(),
            output: output.as_raw_fd(),
            lock: lock.map(|lock| lock.as_raw_fd()),
            scratch: self.scratch.clone(),
            checkpoints: self.checkpoints.clone(),
            remembered: state.recovery.remembered(),
            requests: requests.iter().map(|(number, _, line)| (number, line.len())).collect(),
            next: requests.next(),
            unread: unread.0.len(),
            too_long: unread.1.cloned(),
            unsent: unsent.len(),
        };
        let header = serde_json::to_vec(&header)?;
        let mut file = std::fs::File::from(crate::handover::shared_status::unnamed_file()?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for (_, _, line) in requests.iter() {
            file.write_all(line)?;
        }
        file.write_all(unread.0)?;
        file.write_all(unsent)?;
        let image = state.recovery.image();
        // What the user's code has started meanwhile would otherwise be the successor's.
        processes::end_all();
        state.recovery.checkpoints.remove_torn();
        rustix::process::umask(self.origin.umask);
        let kept: Vec<_> = [Some(input), Some(output), Some(file.as_fd()), lock].into_iter().flatten().collect();
        keep_only(&kept)?;
        let mut arguments = vec![OsString::from("sbcl-mcp")];
        arguments.extend_from_slice(&self.origin.arguments);
        arguments.push(format!("{HANDOVER}{}", file.as_raw_fd()).into());
        if let Some(image) = image {
            let mut argument = OsString::from(IMAGE);
            argument.push(image);
            arguments.push(argument);
        }
        if let Some(directory) = &self.origin.directory {
            std::env::set_current_dir(directory)?;
        }
        become_program(&this_program()?, &arguments, &self.origin.environment)
    }
}

impl Memory for Alone {
    fn add(&self, line: &[u8]) {
        self.state.lock().recovery.requests.add(0, line);
    }

    fn finished(&self, line: u64) -> bool {
        self.state.lock().recovery.finished(line).is_some()
    }

    fn note(&self, frame: Frame<'_>) {
        let state = &mut *self.state.lock();
        let (kind, line, payload) = frame;
        match kind {
            Kind::Restored if !state.restored => {
                state.restored = true;
                state.recovery.resume(&serde_json::from_slice(payload).unwrap_or_default());
            }
            Kind::Reset if state.recovery.may_reset(line) => {
                let notices = serde_json::from_slice(payload).unwrap_or_default();
                // Whatever is still being restored is forgotten.
                state.restored = true;
                state.recovery.forget(&state.status, line, notices);
            }
            Kind::Return if state.recovery.may_reset(line) => {
                if let Ok(to) = serde_json::from_slice(payload) {
                    state.recovery.go_back(&state.status, line, to);
                }
            }
            Kind::Stuck => {
                state.recovery.lose(&state.status, state.restored, &Crash::stuck(payload, state.restored));
                state.recovery.try_images();
            }
            _ => state.recovery.note(frame),
        }
    }

    fn replace(
        &self,
        input: BorrowedFd<'_>,
        unread: (&[u8], Option<&IdScanner>),
        output: BorrowedFd<'_>,
        unsent: &[u8],
    ) -> ! {
        // Kept: whatever would still be noted belongs to nobody.
        let mut state = self.state.lock();
        let Err(error) = self.become_another(&mut state, input, unread, output, unsent);
        tracing::error!("the image cannot be replaced: {error}");
        crate::exit_now(1)
    }
}
