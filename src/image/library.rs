//! Where libsbcl and the core come from, and loading the former.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicUsize};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

use super::bindings::sbcl_host;
use super::heap::{self, Variables};
use super::signals::CatchStackLoss;
use crate::config::ImageConfig;
use crate::error::BootError;

unsafe extern "C" {
    // sbcl-build/src/embed.S
    static sbcl_embedded_core: usize;
    #[cfg(target_os = "linux")]
    static sbcl_embedded_library_start: u8;
    #[cfg(target_os = "linux")]
    static sbcl_embedded_library_end: u8;
}

type InitializeLisp = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) -> c_int;
type HostStart = unsafe extern "C" fn(*const sbcl_host) -> u32;

/// A core and where it is.
#[derive(Debug)]
pub(super) enum Core {
    /// A file of its own.
    File(PathBuf),
    /// In the ELF section `lisp.core` of this file, which SBCL maps in place.
    Section(PathBuf),
}

/// libsbcl, loaded for good.
pub(super) struct Runtime {
    library: &'static Library,
    pub(super) core: Core,
}

impl Runtime {
    /// Loads libsbcl from the configured directory, or the one that this program carries.
    pub(super) fn load(config: &ImageConfig) -> Result<Self, BootError> {
        let (path, core) = match &config.core_dir {
            Some(directory) => {
                let core = directory.join("sbcl.core");
                if !core.is_file() {
                    return Err(BootError::Core { path: core, reason: "no such file".to_owned() });
                }
                let library = directory.join(format!("libsbcl{}", std::env::consts::DLL_SUFFIX));
                (library, Core::File(core))
            }
            None => {
                let core = embedded_core().ok_or(BootError::NoCore)?;
                (embedded_library()?, Core::Section(containing_file(core)?))
            }
        };
        let core = match &config.image {
            Some(image) if image.is_file() => Core::File(image.clone()),
            Some(image) => return Err(BootError::Core { path: image.clone(), reason: "no such file".to_owned() }),
            None => core,
        };
        // SAFETY: libsbcl has no constructors with effects beyond its own data. RTLD_GLOBAL because SBCL looks its
        // variables up with dlsym(RTLD_DEFAULT, …).
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }
            .map_err(|error| BootError::Library { path: path.clone(), reason: error.to_string() })?;
        // Never unloaded: Lisp's threads run in it.
        let library = Box::leak(Box::new(library));
        Ok(Self { library, core })
    }

    fn symbol<T>(&self, name: &str) -> Result<Symbol<T>, BootError> {
        // SAFETY: the callers name the types of ffi/sbcl_host.h and of SBCL's runtime, pinned to one version.
        unsafe { self.library.get(name.as_bytes()) }
            .map_err(|error| BootError::Library { path: PathBuf::from(name), reason: error.to_string() })
    }

    /// The shim's `sbcl_host_is_lisp_thread`.
    pub(super) fn is_lisp_thread(&self) -> Result<unsafe extern "C" fn() -> i32, BootError> {
        Ok(*self.symbol("sbcl_host_is_lisp_thread")?)
    }

    /// The shim's `sbcl_host_catch_stack_loss`.
    pub(super) fn catch_stack_loss(&self) -> Result<CatchStackLoss, BootError> {
        Ok(*self.symbol("sbcl_host_catch_stack_loss")?)
    }

    /// Has the heap watched, and the end of SBCL told by the process' status.
    pub(super) fn watch(&self) -> Result<(), BootError> {
        let word = |name| {
            let variable: Symbol<*mut usize> = self.symbol(name)?;
            // SAFETY: the symbol is an aligned variable of the runtime's, as wide as usize, which is never unloaded.
            Ok::<_, BootError>(unsafe { AtomicUsize::from_ptr(*variable) })
        };
        let collecting: Symbol<*mut u8> = self.symbol("gc_active_p")?;
        heap::watch(Variables {
            allocated: word("bytes_allocated")?,
            size: word("dynamic_space_size")?,
            trigger: word("auto_gc_trigger")?,
            step: word("bytes_consed_between_gcs")?,
            // SAFETY: as above, but a C `bool`.
            collecting: unsafe { AtomicU8::from_ptr(*collecting) },
        });
        let on_lossage: Symbol<unsafe extern "C" fn(unsafe extern "C" fn())> = self.symbol("set_lossage_handler")?;
        // SAFETY: it stores the pointer, which stays valid.
        unsafe { on_lossage(heap::lost) };
        Ok(())
    }

    /// Runs `initialize_lisp` with these arguments. Its status.
    ///
    /// # Safety
    /// Once a process, on a thread that may get another signal mask.
    pub(super) unsafe fn initialize(&self, arguments: &[CString]) -> Result<c_int, BootError> {
        let initialize: Symbol<InitializeLisp> = self.symbol("initialize_lisp")?;
        let set_path: Symbol<unsafe extern "C" fn(*const c_char)> = self.symbol("sbcl_host_set_runtime_path")?;
        // SBCL keeps pointers into both arrays.
        let argv: &mut Vec<*const c_char> =
            Box::leak(Box::new(arguments.to_vec().leak().iter().map(|a| a.as_ptr()).collect()));
        let argc = c_int::try_from(argv.len()).expect("a few arguments");
        argv.push(std::ptr::null());
        // SAFETY: `environ` is the C library's own array, which SBCL reads during the call; the path and argv are
        // leaked, null-terminated and stay unchanged. The rest is the caller's.
        unsafe {
            set_path(argv[0]);
            Ok(initialize(argc, argv.as_ptr(), environ.cast()))
        }
    }

    /// Calls the core's `sbcl_host_start` and returns its contract version; `None` when the core has none.
    ///
    /// # Safety
    /// After [`initialize`](Self::initialize) has returned, with a table that lives for ever.
    pub(super) unsafe fn start(&self, host: &'static sbcl_host) -> Result<Option<u32>, BootError> {
        let start: Symbol<*mut Option<HostStart>> = self.symbol("sbcl_host_start")?;
        // SAFETY: the symbol is a variable of this type, set while SBCL started.
        let start = unsafe { **start };
        // SAFETY: the caller's.
        Ok(start.map(|start| unsafe { start(host) }))
    }
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// The address of the embedded core, if this program has one.
fn embedded_core() -> Option<NonZero<usize>> {
    // SAFETY: an aligned word of this program's data, which nothing writes to.
    NonZero::new(unsafe { sbcl_embedded_core })
}

/// The embedded library as a file that the loader can open.
#[cfg(target_os = "linux")]
fn embedded_library() -> Result<PathBuf, BootError> {
    use std::io::Write;
    use std::os::fd::IntoRawFd;

    // SAFETY: the symbols delimit bytes that sbcl-build/src/embed.S put into this program.
    let bytes = unsafe {
        let start = &raw const sbcl_embedded_library_start;
        std::slice::from_raw_parts(start, (&raw const sbcl_embedded_library_end).offset_from_unsigned(start))
    };
    let os = |source| BootError::Os { what: "copy libsbcl into memory (memfd_create)", source };
    let file = rustix::fs::memfd_create(c"libsbcl.so", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = std::fs::File::from(file.map_err(|error| os(error.into()))?);
    file.write_all(bytes).map_err(os)?;
    // The mapping outlives the descriptor, but the descriptor must live until the library is opened.
    Ok(PathBuf::from(format!("/proc/self/fd/{}", file.into_raw_fd())))
}

#[cfg(not(target_os = "linux"))]
fn embedded_library() -> Result<PathBuf, BootError> {
    Err(BootError::Library {
        path: PathBuf::from("(embedded)"),
        reason: "on this platform, name the directory that holds libsbcl and sbcl.core (--core)".to_owned(),
    })
}

/// The file that has what is at this address: the program, or the shared object that it is linked into.
fn containing_file(address: NonZero<usize>) -> Result<PathBuf, BootError> {
    // SAFETY: Dl_info is plain data, and nothing is read at the address.
    let (found, info) = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address.get() as *const c_void, &raw mut info), info)
    };
    if found == 0 || info.dli_fname.is_null() {
        return std::env::current_exe().map_err(|source| BootError::Os { what: "find this program's file", source });
    }
    // SAFETY: dladdr returned it as a C string that lives as long as the object is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    // For the main program the loader gives argv[0], which need not be a path.
    if std::env::args_os().next().is_some_and(|program| program == path) {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    Ok(path.to_owned())
}
