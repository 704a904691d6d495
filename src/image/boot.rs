//! Booting, once a process.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::bindings::SBCL_HOST_CONTRACT;
use super::callbacks;
use super::library::{Core, Runtime};
use super::program::Program;
use super::protocol::Host;
use super::signals::Boot;
use crate::config::ImageConfig;
use crate::error::BootError;

/// How far the one boot of this process has come. It only ever moves forward.
static STATE: AtomicU8 = AtomicU8::new(State::Fresh as u8);

/// Threads with a control stack before the user makes any: the lanes, and SBCL's own.
const THREADS: u64 = 6;
/// Address space that is taken besides the heap and the stacks, in bytes: what a worker was seen to take (920 MiB with a
/// heap of 1 GiB), most of it by malloc, which reserves 64 MiB a thread.
const BESIDES: u64 = 1 << 30;
/// So much of the heap's size is taken for what SBCL keeps about it, pages and cards (2 MiB a GiB) and reserves: 1116 MiB
/// were taken besides a heap of 8 GiB.
const ABOUT_HEAP: u64 = 64;

#[repr(u8)]
enum State {
    Fresh,
    Booting,
    Running,
    Failed,
}

/// A program that embeds the image, and how many Lisp threads are to work for it.
pub(crate) type Embedding = (Arc<dyn Program>, u32);

/// Boots SBCL so that its threads serve `host`, and `program`, if there is one.
///
/// # Errors
/// See [`BootError`]. After one that comes from SBCL itself no further boot is possible in this process.
pub(crate) fn boot(config: &ImageConfig, host: Arc<dyn Host>, program: Option<Embedding>) -> Result<(), BootError> {
    config.check()?;
    check_address_space(config, program.as_ref().map_or(0, |(_, threads)| u64::from(*threads) + 1))?;
    STATE.compare_exchange(State::Fresh as u8, State::Booting as u8, Ordering::AcqRel, Ordering::Acquire).map_err(
        |state| {
            if state == State::Failed as u8 { BootError::BootFailed } else { BootError::AlreadyBooted }
        },
    )?;
    // What fails before SBCL is touched may be tried again.
    super::process::watch_forks();
    let runtime = Runtime::load(config).inspect_err(|_| STATE.store(State::Fresh as u8, Ordering::Release))?;
    let config = config.clone();
    // A thread of its own: SBCL changes the mask of the one that initialises it.
    let result = std::thread::Builder::new()
        .name("sbcl-boot".to_owned())
        .stack_size(16 << 20)
        .spawn(move || start(&runtime, &config, host, program))
        .map_err(|source| BootError::Os { what: "start a thread", source })
        .and_then(|thread| thread.join().unwrap_or(Err(BootError::BootFailed)));
    let state = if result.is_ok() { State::Running } else { State::Failed };
    STATE.store(state as u8, Ordering::Release);
    result
}

/// The address space that an image takes, in bytes, without threads of the user's.
pub(crate) fn address_space(config: &ImageConfig) -> u64 {
    config.heap + config.heap / ABOUT_HEAP + THREADS * config.control_stack + BESIDES
}

/// Looks whether SBCL will find room for its heap: it ends the process where it does not.
fn check_address_space(config: &ImageConfig, more_threads: u64) -> Result<(), BootError> {
    let needed = address_space(config) + more_threads * config.control_stack;
    match rustix::process::getrlimit(rustix::process::Resource::As).current {
        Some(limit) if limit < needed => Err(BootError::AddressSpace { needed, limit }),
        _ => Ok(()),
    }
}

fn start(
    runtime: &Runtime,
    config: &ImageConfig,
    host: Arc<dyn Host>,
    program: Option<Embedding>,
) -> Result<(), BootError> {
    let signals = Boot::begin(runtime.is_lisp_thread()?, runtime.catch_stack_loss()?);
    // SAFETY: once a process (STATE), on a thread made for it.
    let status = unsafe { runtime.initialize(&arguments(runtime, config)) }?;
    signals.end();
    if status != 0 {
        return Err(BootError::Runtime(status));
    }
    runtime.watch()?;
    runtime.guard_forks()?;
    let library = program.map_or(std::ptr::null_mut(), |(program, threads)| super::program::install(program, threads));
    let table = callbacks::install(host, random_seed(), config, library);
    // SAFETY: SBCL is initialised, and the table is leaked.
    match unsafe { runtime.start(table) }? {
        Some(SBCL_HOST_CONTRACT) => Ok(()),
        Some(0) => Err(BootError::Start(callbacks::refusal())),
        Some(found) => Err(BootError::Contract { expected: SBCL_HOST_CONTRACT, found }),
        None => Err(BootError::Core {
            path: match &runtime.core {
                Core::File(path) | Core::Section(path) => path.clone(),
            },
            reason: "it was not saved for this program (it exports no sbcl_host_start)".to_owned(),
        }),
    }
}

/// SBCL's command line: runtime options only.
fn arguments(runtime: &Runtime, config: &ImageConfig) -> Vec<CString> {
    let mut arguments = Vec::new();
    let (program, core): (PathBuf, Option<&Path>) = match &runtime.core {
        // SBCL looks for a section in the file that the first argument names, and must not find this program's.
        Core::File(core) => (core.with_file_name("libsbcl.so"), Some(core)),
        Core::Section(file) => (file.clone(), None),
    };
    arguments.push(path_argument(&program));
    if let Some(core) = core {
        arguments.push(c"--core".to_owned());
        arguments.push(path_argument(core));
    }
    for argument in [
        "--noinform",
        "--disable-ldb",
        "--dynamic-space-size",
        &format!("{}MB", config.heap >> 20),
        "--control-stack-size",
        &format!("{}MB", config.control_stack >> 20),
        "--end-runtime-options",
    ] {
        arguments.push(CString::new(argument).expect("no NUL in it"));
    }
    arguments
}

fn path_argument(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("paths hold no NUL")
}

/// Something that differs from start to start: the standard library seeds its hash maps from the system's randomness.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}
