//! Locates libsbcl and the core, and loads libsbcl.
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
use super::heap::{self, HeapVariables};
use super::machine::HEAP_PAGE_BYTES;
use super::signals::{SignalFunctions, intercept_action};
use crate::config::ImageConfig;
use crate::error::BootError;

unsafe extern "C" {
    // These symbols are defined in sbcl-build/src/embed.S.
    static sbcl_embedded_core: usize;
    static sbcl_embedded_library_start: u8;
    static sbcl_embedded_library_end: u8;
}

type InitializeLisp = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) -> c_int;
type InterceptAction = unsafe extern "C" fn(i32, *const c_void) -> i32;
type HostStart = unsafe extern "C" fn(*const sbcl_host) -> u32;

/// The only libsbcl of this process. If another attempt to boot loaded a second copy, the copy's symbols would resolve to
/// the variables of the first copy.
static LIBSBCL: OnceCell<LoadedLibrary> = OnceCell::new();

/// A loaded libsbcl, which is never unloaded, because Lisp's threads run its code.
struct LoadedLibrary {
    library: Library,
    file: LibraryFile,
}

/// The file from which the loader loads libsbcl.
struct LibraryFile {
    path: PathBuf,
    /// The copy in memory that `path` names, if libsbcl is loaded from such a copy. The copy stays open as long as the
    /// library is loaded, because code that prints backtraces opens `path`.
    _copy: Option<File>,
}

/// The location of a core.
#[derive(Debug)]
pub(super) enum CoreLocation {
    /// A separate core file.
    File(PathBuf),
    /// The ELF section `lisp.core` of this file, which SBCL maps in place.
    Section(PathBuf),
}

/// The loaded libsbcl, which is never unloaded, and the core to boot.
pub(super) struct Runtime {
    library: &'static Library,
    pub(super) core: CoreLocation,
}

impl Runtime {
    /// Finds the core, and loads the libsbcl that this program was built with. A libsbcl of another build is refused before
    /// it is loaded, because loading a library runs its constructors.
    pub(super) fn load(config: &ImageConfig) -> Result<Self, BootError> {
        let core = locate_core(config, embedded_core_address())?;
        let path = config.core_dir.as_deref().map(check_library_for_core).transpose()?;
        let loaded = LIBSBCL.get_or_try_init(|| {
            let file = library_file(path.as_deref())?;
            // SAFETY: libsbcl has no constructors with effects beyond its own data. RTLD_GLOBAL is needed because SBCL
            // looks up its variables with dlsym(RTLD_DEFAULT, …).
            match unsafe { Library::open(Some(&file.path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => Ok(LoadedLibrary { library, file }),
                Err(error) => Err(BootError::Library { path: file.path, reason: error.to_string() }),
            }
        })?;
        let runtime = Self { library: &loaded.library, core };
        runtime.check_machine(&loaded.file.path)?;
        if let CoreLocation::File(path) = &runtime.core {
            // The end of a saved image (`config.image`) is not checked, because a trailer may follow the core. The image's
            // fingerprint shows whether the core is complete.
            runtime.check_core(path, config.image.is_none())?;
        }
        Ok(runtime)
    }

    /// Checks the page size of [`machine`](super::machine) against the page size of SBCL's runtime.
    fn check_machine(&self, path: &Path) -> Result<(), BootError> {
        let page_bytes: Symbol<*const usize> = self.symbol("os_vm_page_size")?;
        // SAFETY: the symbol is an aligned variable of the runtime, as wide as usize, which never changes.
        match unsafe { **page_bytes } {
            HEAP_PAGE_BYTES => Ok(()),
            found => Err(BootError::Library {
                path: path.to_owned(),
                reason: format!(
                    "the library's heap pages have {found} bytes instead of {HEAP_PAGE_BYTES}; use the files of this \
                     program's build"
                ),
            }),
        }
    }

    /// Checks that a core belongs to this build of SBCL and, with `check_end`, that it is complete. Without these
    /// checks, SBCL's runtime would end the process if it could not use the core.
    fn check_core(&self, path: &Path, check_end: bool) -> Result<(), BootError> {
        let build_id: Symbol<*const c_char> = self.symbol("build_id")?;
        // SAFETY: the symbol is a zero-terminated array of characters in the runtime's data, which never changes.
        let build_id = unsafe { CStr::from_ptr(*build_id) }.to_bytes();
        let unusable = |reason: String| BootError::Core { path: path.to_owned(), reason };
        match core_build_id(path, check_end).map_err(|error| unusable(error.to_string()))? {
            None => Err(unusable("the file is not an SBCL core, or is incomplete".to_owned())),
            Some(found) if found != build_id => Err(unusable(format!(
                "the core belongs to another build of SBCL ({}, not {}): use a core of this program's build",
                String::from_utf8_lossy(&found),
                String::from_utf8_lossy(build_id)
            ))),
            Some(_) => Ok(()),
        }
    }

    fn symbol<T>(&self, name: &str) -> Result<Symbol<T>, BootError> {
        // SAFETY: each caller gives the symbol the type that ffi/sbcl_host.h or SBCL's runtime declares. The runtime is
        // pinned to one version.
        unsafe { self.library.get(name.as_bytes()) }
            .map_err(|error| BootError::Library { path: PathBuf::from(name), reason: error.to_string() })
    }

    /// Returns the functions of `ffi/shim.c`, which is part of libsbcl, for signal handlers.
    pub(super) fn signal_functions(&self) -> Result<SignalFunctions, BootError> {
        Ok(SignalFunctions {
            is_lisp_thread: *self.symbol("sbcl_host_is_lisp_thread")?,
            may_be_stopping: *self.symbol("sbcl_host_may_be_stopping")?,
            catch_stack_loss: *self.symbol("sbcl_host_catch_stack_loss")?,
        })
    }

    /// Passes SBCL's variables about the heap to [`heap`], and installs the lossage handler, which ends the process with
    /// an exit status from [`heap`] when SBCL cannot continue.
    pub(super) fn install_heap_hooks(&self) -> Result<(), BootError> {
        let word = |name| {
            let variable: Symbol<*mut usize> = self.symbol(name)?;
            // SAFETY: the symbol is an aligned variable of the runtime, as wide as usize, and the runtime is never
            // unloaded.
            Ok::<_, BootError>(unsafe { AtomicUsize::from_ptr(*variable) })
        };
        let collecting: Symbol<*mut u8> = self.symbol("gc_active_p")?;
        heap::set_variables(HeapVariables {
            use_of_pages: *self.symbol("sbcl_host_heap_use")?,
            allocated: word("bytes_allocated")?,
            size: word("dynamic_space_size")?,
            trigger: word("auto_gc_trigger")?,
            bytes_between_collections: word("bytes_consed_between_gcs")?,
            // SAFETY: the symbol is a C `bool` of the runtime, as wide as u8, and the runtime is never unloaded.
            collecting: unsafe { AtomicU8::from_ptr(*collecting) },
        });
        let set_handler: Symbol<unsafe extern "C" fn(unsafe extern "C" fn())> = self.symbol("set_lossage_handler")?;
        // SAFETY: the function only stores the pointer, and this program's code stays loaded.
        unsafe { set_handler(heap::on_lossage) };
        Ok(())
    }

    /// Makes it possible to allocate Lisp objects in processes that C code forks, whatever other threads were doing at the
    /// fork.
    pub(super) fn guard_forks(&self) -> Result<(), BootError> {
        let guard: Symbol<unsafe extern "C" fn() -> i32> = self.symbol("sbcl_host_guard_forks")?;
        // SAFETY: the call registers functions that take and release statically initialised locks of a library that is
        // never unloaded.
        match unsafe { guard() } {
            0 => Ok(()),
            error => Err(BootError::Os { what: "register fork handlers", source: io::Error::from_raw_os_error(error) }),
        }
    }

    /// Runs `initialize_lisp` with these arguments and returns its status.
    ///
    /// # Safety
    /// Must be called once per process, within a [`BootPhase`](super::signals::BootPhase), on a thread whose signal mask
    /// may change.
    pub(super) unsafe fn initialize(&self, arguments: &[CString]) -> Result<c_int, BootError> {
        let initialize: Symbol<InitializeLisp> = self.symbol("initialize_lisp")?;
        let set_path: Symbol<unsafe extern "C" fn(*const c_char)> = self.symbol("sbcl_host_set_runtime_path")?;
        let give_actions: Symbol<unsafe extern "C" fn(InterceptAction)> = self.symbol("sbcl_host_give_actions")?;
        // Leaked: SBCL keeps pointers to argv and to its strings.
        let argv: &mut Vec<*const c_char> =
            Box::leak(Box::new(arguments.to_vec().leak().iter().map(|a| a.as_ptr()).collect()));
        let argc = c_int::try_from(argv.len()).expect("the number of arguments fits a C int");
        argv.push(std::ptr::null());
        // SAFETY: `environ` is the C library's own array, which SBCL reads during the call. `argv` and its strings are
        // leaked, null-terminated and never change. The caller guarantees that SBCL may be initialised on this thread.
        unsafe {
            set_path(argv[0]);
            give_actions(intercept_action);
            Ok(initialize(argc, argv.as_ptr(), environ.cast()))
        }
    }

    /// Calls the core's `sbcl_host_start`. Returns the version of the core's contract, or 0 if Lisp could not start. Returns
    /// `None` if the core exports no such function.
    ///
    /// # Safety
    /// [`initialize`](Self::initialize) must have returned.
    pub(super) unsafe fn start(&self, host: &'static sbcl_host) -> Result<Option<u32>, BootError> {
        let start: Symbol<*mut Option<HostStart>> = self.symbol("sbcl_host_start")?;
        // SAFETY: the symbol is a variable of this type. SBCL changes the variable only during its initialisation.
        let start = unsafe { **start };
        // SAFETY: the caller guarantees that SBCL is initialised, and the table is `'static`.
        Ok(start.map(|start| unsafe { start(host) }))
    }
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Returns the location of the core to boot: a saved image, which is a complete core; or the core in a directory; or the core
/// at the address `embedded` in this program.
fn locate_core(config: &ImageConfig, embedded: Option<NonZero<usize>>) -> Result<CoreLocation, BootError> {
    let core = match (&config.image, &config.core_dir) {
        (Some(image), _) => image.clone(),
        (None, Some(directory)) => directory.join("sbcl.core"),
        (None, None) => return Ok(CoreLocation::Section(containing_file(embedded.ok_or(BootError::NoCore)?)?)),
    };
    match std::fs::metadata(&core) {
        Ok(metadata) if metadata.is_file() => Ok(CoreLocation::File(core)),
        Ok(_) => Err(BootError::Core { path: core, reason: "not a regular file".to_owned() }),
        Err(error) => Err(BootError::Core { path: core, reason: error.to_string() }),
    }
}

/// Returns the address of the embedded core, if this program has one.
fn embedded_core_address() -> Option<NonZero<usize>> {
    // SAFETY: the symbol is an aligned word of this program's data, which nothing writes to.
    NonZero::new(unsafe { sbcl_embedded_core })
}

/// Returns true if this program contains a core.
#[cfg(feature = "mcp")]
pub(crate) fn has_embedded_core() -> bool {
    embedded_core_address().is_some()
}

/// The first and the last word of a core: `CORE_MAGIC` of SBCL's `core.h`.
const CORE_MAGIC: u64 = 0x5342_434c;
/// Number of words read from the beginning of a core to find its build identifier.
const HEADER_WORDS: usize = 64;

/// Reads the build identifier in a core's header (`src/runtime/coreparse.c`). Returns `None` if the file is not a core or,
/// with `check_end`, is an incomplete core.
fn core_build_id(path: &Path, check_end: bool) -> io::Result<Option<Vec<u8>>> {
    const BUILD_ID_ENTRY: u64 = 3860;
    let mut file = File::open(path)?;
    let mut header = Vec::new();
    Read::by_ref(&mut file).take(8 * HEADER_WORDS as u64).read_to_end(&mut header)?;
    let words: Vec<u64> = header.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    // The magic number is followed by an entry: its type, its length, three numbers, the length of its text, and the text.
    let [CORE_MAGIC, BUILD_ID_ENTRY, _, _, _, _, length, ..] = words[..] else { return Ok(None) };
    let text = usize::try_from(length).ok().and_then(|length| header.get(56..)?.get(..length));
    if check_end {
        let mut last = [0; 8];
        file.seek(SeekFrom::End(-8))?;
        file.read_exact(&mut last)?;
        if u64::from_le_bytes(last) != CORE_MAGIC {
            return Ok(None);
        }
    }
    Ok(text.map(<[u8]>::to_vec))
}

/// Returns the bytes of the libsbcl that this program was built with.
fn embedded_library_bytes() -> &'static [u8] {
    // SAFETY: the symbols delimit bytes that sbcl-build/src/embed.S put into this program.
    unsafe {
        let start = &raw const sbcl_embedded_library_start;
        std::slice::from_raw_parts(start, (&raw const sbcl_embedded_library_end).offset_from_unsigned(start))
    }
}

/// Checks that the libsbcl in `directory` is the libsbcl that this program was built with, and returns its path. On Linux,
/// `directory` need not contain a libsbcl.
fn check_library_for_core(directory: &Path) -> Result<PathBuf, BootError> {
    let path = directory.join(format!("libsbcl{}", std::env::consts::DLL_SUFFIX));
    let refused = |reason: String| BootError::Library { path: path.clone(), reason };
    // To open a FIFO may block, and to read a device may never end. So only a regular file of the right length is read.
    let content = std::fs::metadata(&path).and_then(|metadata| {
        let may_match = metadata.is_file() && metadata.len() == embedded_library_bytes().len() as u64;
        may_match.then(|| std::fs::read(&path)).transpose()
    });
    match content {
        Ok(Some(bytes)) if bytes == embedded_library_bytes() => Ok(path),
        Ok(_) => {
            let reason = "this program was built with another libsbcl: use the files of this program's build";
            Err(refused(reason.to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && cfg!(target_os = "linux") => Ok(path),
        Err(error) => Err(refused(error.to_string())),
    }
}

/// Returns the file from which to load libsbcl: a copy of the embedded library. A libsbcl beside the core is not loaded, so
/// a change of that file after its check has no effect.
#[cfg(target_os = "linux")]
fn library_file(_checked: Option<&Path>) -> Result<LibraryFile, BootError> {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    let os = |source| BootError::Os { what: "copy libsbcl into memory (memfd_create)", source };
    let file = rustix::fs::memfd_create(c"libsbcl.so", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(file.map_err(|error| os(error.into()))?);
    file.write_all(embedded_library_bytes()).map_err(os)?;
    Ok(LibraryFile { path: PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), _copy: Some(file) })
}

/// Returns the file from which to load libsbcl: the `checked` file beside the core.
#[cfg(not(target_os = "linux"))]
fn library_file(checked: Option<&Path>) -> Result<LibraryFile, BootError> {
    match checked {
        Some(path) => Ok(LibraryFile { path: path.to_owned(), _copy: None }),
        None => Err(BootError::Library {
            path: PathBuf::from("(embedded)"),
            reason: "the embedded libsbcl can be loaded only on Linux: set the option core to a directory that has a \
                     libsbcl and an sbcl.core"
                .to_owned(),
        }),
    }
}

/// Returns the file that contains this address: the program, or the shared object that this crate is linked into.
fn containing_file(address: NonZero<usize>) -> Result<PathBuf, BootError> {
    // SAFETY: Dl_info is plain data for which zero is valid, and dladdr reads nothing at the address.
    let (found, info) = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address.get() as *const c_void, &raw mut info), info)
    };
    if found == 0 || info.dli_fname.is_null() {
        return std::env::current_exe().map_err(|source| BootError::Os { what: "find this program's file", source });
    }
    // SAFETY: dladdr returned a C string that lives as long as the object is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    // For the main program the loader returns argv[0], which need not be a path.
    if std::env::args_os().next().is_some_and(|program| program == path) {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_image_is_located_in_a_program_without_a_core() {
        let image = std::env::current_exe().unwrap();
        let config = ImageConfig { image: Some(image.clone()), ..ImageConfig::default() };
        assert!(matches!(locate_core(&config, None), Ok(CoreLocation::File(path)) if path == image));
        assert!(matches!(locate_core(&ImageConfig::default(), None), Err(BootError::NoCore)));
    }
}
