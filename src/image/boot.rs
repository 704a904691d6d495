//! Boot: initialises SBCL and starts its threads, once per process.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::bindings::SBCL_HOST_CONTRACT;
use super::callbacks;
use super::library::{CoreLocation, Runtime};
use super::program::Program;
use super::protocol::Host;
use super::signals::BootPhase;
use crate::config::ImageConfig;
use crate::error::BootError;

/// The progress of this process's only boot. The state only advances, except that a boot may be retried if it failed before
/// SBCL was initialised.
static BOOT_STATE: AtomicU8 = AtomicU8::new(BootState::Fresh as u8);

/// Number of threads with a control stack before the user's code starts any: one for each of the four lanes, and two
/// threads of SBCL's own.
const INITIAL_THREADS: u64 = 6;
/// Address space that an image needs besides its heap and stacks, in bytes. In a worker with a heap of 1 GiB, 920 MiB were
/// measured; malloc had reserved most of them, 64 MiB per thread.
const BASE_BYTES: u64 = 1 << 30;
/// The size of the heap divided by the size of SBCL's tables for the heap: page tables, the garbage collector's cards
/// (2 MiB per GiB) and reserves. With a heap of 8 GiB, 1116 MiB of address space were measured besides the heap.
const HEAP_OVERHEAD_DIVISOR: u64 = 64;

/// Maximum number of special variables that are ever bound in an image. SBCL ends the process when the next variable is
/// bound. Each variable takes 16 bytes in every Lisp thread, which SBCL initialises when the thread starts. SBCL's default is
/// 4096.
const TLS_LIMIT: u32 = 1 << 14;

#[repr(u8)]
enum BootState {
    Fresh,
    Booting,
    Running,
    Failed,
}

/// An embedding program, and the number of Lisp threads that work for it.
pub(crate) type Embedding = (Arc<dyn Program>, u32);

/// Boots SBCL so that its threads serve `host`, and `program` if there is one.
///
/// # Errors
/// Returns a [`BootError`] if `config` is invalid, the limit on address space is too low, this process has booted before,
/// or SBCL cannot be loaded or started. If the initialisation of SBCL has begun, this process cannot boot again.
pub(crate) fn boot(config: &ImageConfig, host: Arc<dyn Host>, program: Option<Embedding>) -> Result<(), BootError> {
    config.check()?;
    check_address_space(config, program.as_ref().map_or(0, |(_, threads)| u64::from(*threads) + 1))?;
    BOOT_STATE
        .compare_exchange(BootState::Fresh as u8, BootState::Booting as u8, Ordering::AcqRel, Ordering::Acquire)
        .map_err(
            |state| {
                if state == BootState::Failed as u8 { BootError::BootFailed } else { BootError::AlreadyBooted }
            },
        )?;
    // Until the thread runs that initialises SBCL, a boot that fails may be retried.
    let allow_retry = |_: &BootError| BOOT_STATE.store(BootState::Fresh as u8, Ordering::Release);
    super::process::detect_forks();
    let runtime = Runtime::load(config).inspect_err(allow_retry)?;
    let config = config.clone();
    // SBCL changes the signal mask of the thread that initialises it, so a new thread initialises SBCL.
    let thread = std::thread::Builder::new()
        .name("sbcl-boot".to_owned())
        .stack_size(16 << 20)
        .spawn(move || start_runtime(&runtime, &config, host, program))
        .map_err(|source| BootError::Os { what: "start a thread", source })
        .inspect_err(allow_retry)?;
    let result = thread.join().unwrap_or(Err(BootError::BootFailed));
    let state = if result.is_ok() { BootState::Running } else { BootState::Failed };
    BOOT_STATE.store(state as u8, Ordering::Release);
    result
}

/// Returns the address space that an image needs, in bytes, not counting threads that the user's code starts.
pub(crate) fn address_space(config: &ImageConfig) -> u64 {
    config.heap + config.heap / HEAP_OVERHEAD_DIVISOR + INITIAL_THREADS * config.control_stack + BASE_BYTES
}

/// Checks that the process's limit on address space suffices for the image and for `more_threads` threads besides the
/// initial ones. SBCL would end the process if it could not allocate its heap.
fn check_address_space(config: &ImageConfig, more_threads: u64) -> Result<(), BootError> {
    let needed = address_space(config) + more_threads * config.control_stack;
    match rustix::process::getrlimit(rustix::process::Resource::As).current {
        Some(limit) if limit < needed => Err(BootError::AddressSpace { needed, limit }),
        _ => Ok(()),
    }
}

fn start_runtime(
    runtime: &Runtime,
    config: &ImageConfig,
    host: Arc<dyn Host>,
    program: Option<Embedding>,
) -> Result<(), BootError> {
    let signals = BootPhase::begin(runtime.signal_functions()?);
    // SAFETY: BOOT_STATE admits one boot per process. The boot phase `signals` has begun. This thread was started for the
    // boot, so its signal mask may change.
    let status = unsafe { runtime.initialize(&runtime_arguments(runtime, config)) }?;
    signals.end();
    if status != 0 {
        return Err(BootError::Runtime(status));
    }
    runtime.install_heap_hooks()?;
    runtime.guard_forks()?;
    let library = program.map_or(std::ptr::null_mut(), |(program, threads)| super::program::install(program, threads));
    let table = callbacks::install(host, random_seed(), config, library);
    // SAFETY: SBCL is initialised, and the table is leaked.
    match unsafe { runtime.start(table) }? {
        Some(SBCL_HOST_CONTRACT) => Ok(()),
        Some(0) => Err(BootError::Start(callbacks::start_refusal())),
        Some(found) => Err(BootError::Contract { expected: SBCL_HOST_CONTRACT, found }),
        None => Err(BootError::Core {
            path: match &runtime.core {
                CoreLocation::File(path) | CoreLocation::Section(path) => path.clone(),
            },
            reason: "the core lacks sbcl-mcp's Lisp code: use a core that sbcl-core or sbcl-build has built".to_owned(),
        }),
    }
}

/// Returns SBCL's command line, which has runtime options only.
fn runtime_arguments(runtime: &Runtime, config: &ImageConfig) -> Vec<CString> {
    let mut arguments = Vec::new();
    let (program, core): (PathBuf, Option<&Path>) = match &runtime.core {
        // SBCL looks for a core section in the file that argv[0] names. This program may contain another core, so argv[0]
        // must not name this program.
        CoreLocation::File(core) => (core.with_file_name("libsbcl.so"), Some(core)),
        CoreLocation::Section(file) => (file.clone(), None),
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
        "--tls-limit",
        &TLS_LIMIT.to_string(),
        "--end-runtime-options",
    ] {
        arguments.push(CString::new(argument).expect("the arguments contain no NUL"));
    }
    arguments
}

fn path_argument(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("paths contain no NUL")
}

/// Returns a random number: the standard library seeds `RandomState` from the system's randomness.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}
