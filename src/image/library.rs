//! Where libsbcl and the core come from, and loading the former.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicUsize};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use once_cell::sync::OnceCell;

use super::bindings::sbcl_host;
use super::heap::{self, Variables};
use super::signals::{CatchStackLoss, take_action};
use crate::config::ImageConfig;
use crate::error::BootError;

unsafe extern "C" {
    // sbcl-build/src/embed.S
    static sbcl_embedded_core: usize;
    static sbcl_embedded_library_start: u8;
    static sbcl_embedded_library_end: u8;
}

type InitializeLisp = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) -> c_int;
type TakeAction = unsafe extern "C" fn(i32, *const c_void) -> i32;
type HostStart = unsafe extern "C" fn(*const sbcl_host) -> u32;

/// The one libsbcl of this process. A second copy would find the variables of the first, by whichever boot it was loaded.
static LIBRARY: OnceCell<&'static Library> = OnceCell::new();

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
    /// Loads the libsbcl that this program was built with, and no other: what code of another one does, nobody knows
    /// before it has run.
    pub(super) fn load(config: &ImageConfig) -> Result<Self, BootError> {
        let (path, core) = match &config.core_dir {
            Some(directory) => {
                let core = directory.join("sbcl.core");
                if !core.is_file() {
                    return Err(BootError::Core { path: core, reason: "no such file".to_owned() });
                }
                (library_beside(directory)?, Core::File(core))
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
        let library = LIBRARY.get_or_try_init(|| {
            // SAFETY: libsbcl has no constructors with effects beyond its own data. RTLD_GLOBAL because SBCL looks its
            // variables up with dlsym(RTLD_DEFAULT, …).
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }
                .map_err(|error| BootError::Library { path: path.clone(), reason: error.to_string() })?;
            // Never unloaded: Lisp's threads run in it.
            Ok::<&Library, BootError>(Box::leak(Box::new(library)))
        })?;
        let runtime = Self { library, core };
        if let Core::File(path) = &runtime.core {
            // Behind one that an image of this program has saved there may be a label, and a seal says whether it is complete.
            runtime.check_core(path, config.image.is_none())?;
        }
        Ok(runtime)
    }

    /// Looks whether a core is of this very build of SBCL, and complete where nothing else says so: the runtime ends the
    /// process where it is not.
    fn check_core(&self, path: &Path, look_at_end: bool) -> Result<(), BootError> {
        let build_id: Symbol<*const c_char> = self.symbol("build_id")?;
        // SAFETY: the symbol is an array of characters in the runtime's data, which end with a zero and never change.
        let build_id = unsafe { CStr::from_ptr(*build_id) }.to_bytes();
        let unusable = |reason: String| BootError::Core { path: path.to_owned(), reason };
        match core_build_id(path, look_at_end).map_err(|error| unusable(error.to_string()))? {
            None => Err(unusable("it is not an SBCL core, or it is not complete".to_owned())),
            Some(found) if found != build_id => Err(unusable(format!(
                "it is of another build of SBCL ({}, not {})",
                String::from_utf8_lossy(&found),
                String::from_utf8_lossy(build_id)
            ))),
            Some(_) => Ok(()),
        }
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

    /// Has processes that C code forks be able to allocate in Lisp, whatever other threads did at that time.
    pub(super) fn guard_forks(&self) -> Result<(), BootError> {
        let guard: Symbol<unsafe extern "C" fn() -> i32> = self.symbol("sbcl_host_guard_forks")?;
        // SAFETY: the functions that it registers take locks that are initialised statically, in a library that is never
        // unloaded.
        match unsafe { guard() } {
            0 => Ok(()),
            error => Err(BootError::Os { what: "guard forks", source: io::Error::from_raw_os_error(error) }),
        }
    }

    /// Runs `initialize_lisp` with these arguments. Its status.
    ///
    /// # Safety
    /// Once a process, on a thread that may get another signal mask, within a [`Boot`](super::signals::Boot).
    pub(super) unsafe fn initialize(&self, arguments: &[CString]) -> Result<c_int, BootError> {
        let initialize: Symbol<InitializeLisp> = self.symbol("initialize_lisp")?;
        let set_path: Symbol<unsafe extern "C" fn(*const c_char)> = self.symbol("sbcl_host_set_runtime_path")?;
        let give_actions: Symbol<unsafe extern "C" fn(TakeAction)> = self.symbol("sbcl_host_give_actions")?;
        // SBCL keeps pointers into both arrays.
        let argv: &mut Vec<*const c_char> =
            Box::leak(Box::new(arguments.to_vec().leak().iter().map(|a| a.as_ptr()).collect()));
        let argc = c_int::try_from(argv.len()).expect("a few arguments");
        argv.push(std::ptr::null());
        // SAFETY: `environ` is the C library's own array, which SBCL reads during the call; the path and argv are
        // leaked, null-terminated and stay unchanged. The rest is the caller's.
        unsafe {
            set_path(argv[0]);
            give_actions(take_action);
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

/// What a core of SBCL's begins and ends with: `CORE_MAGIC` of its `core.h`.
const CORE_MAGIC: u64 = 0x5342_434c;
/// How many words of a core are looked at for the build that it is of.
const HEADER_WORDS: usize = 64;

/// Which build of SBCL a core is of, as its header says (`src/runtime/coreparse.c`); `None` when it is no core, or, with
/// `look_at_end`, not complete.
fn core_build_id(path: &Path, look_at_end: bool) -> io::Result<Option<Vec<u8>>> {
    const BUILD_ID_ENTRY: u64 = 3860;
    let mut file = File::open(path)?;
    let mut header = Vec::new();
    Read::by_ref(&mut file).take(8 * HEADER_WORDS as u64).read_to_end(&mut header)?;
    let words: Vec<u64> = header.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    // The magic number, and an entry: its type, its length, three numbers, how long the text is, and the text.
    let [CORE_MAGIC, BUILD_ID_ENTRY, _, _, _, _, length, ..] = words[..] else { return Ok(None) };
    let text = usize::try_from(length).ok().and_then(|length| header.get(56..)?.get(..length));
    if look_at_end {
        let mut last = [0; 8];
        file.seek(SeekFrom::End(-8))?;
        file.read_exact(&mut last)?;
        if u64::from_le_bytes(last) != CORE_MAGIC {
            return Ok(None);
        }
    }
    Ok(text.map(<[u8]>::to_vec))
}

/// The library that this program was built with.
fn embedded_library_bytes() -> &'static [u8] {
    // SAFETY: the symbols delimit bytes that sbcl-build/src/embed.S put into this program.
    unsafe {
        let start = &raw const sbcl_embedded_library_start;
        std::slice::from_raw_parts(start, (&raw const sbcl_embedded_library_end).offset_from_unsigned(start))
    }
}

/// The library to use with the core in `directory`. One that lies there must be the one that this program was built with.
fn library_beside(directory: &Path) -> Result<PathBuf, BootError> {
    let path = directory.join(format!("libsbcl{}", std::env::consts::DLL_SUFFIX));
    let refused = |reason: String| BootError::Library { path: path.clone(), reason };
    match std::fs::read(&path) {
        Ok(bytes) if bytes == embedded_library_bytes() => {}
        Ok(_) => return Err(refused("it is not the one that this program was built with".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound && cfg!(target_os = "linux") => {}
        Err(error) => return Err(refused(error.to_string())),
    }
    // What the file has become meanwhile, if anything, is not loaded.
    if cfg!(target_os = "linux") { embedded_library() } else { Ok(path) }
}

/// The embedded library as a file that the loader can open.
#[cfg(target_os = "linux")]
fn embedded_library() -> Result<PathBuf, BootError> {
    use std::io::Write;
    use std::os::fd::IntoRawFd;

    let os = |source| BootError::Os { what: "copy libsbcl into memory (memfd_create)", source };
    let file = rustix::fs::memfd_create(c"libsbcl.so", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(file.map_err(|error| os(error.into()))?);
    file.write_all(embedded_library_bytes()).map_err(os)?;
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
