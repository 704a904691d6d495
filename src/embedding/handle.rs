//! [`Lisp`], the handle to the image, and [`Builder`], which boots the image.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::OnceCell;
use parking_lot::{Mutex, MutexGuard};

use super::convert::{Arguments, FromLisp, IntoLisp, Symbol};
use super::define::{self, HostFunction};
use super::enter::{Cx, Entry};
use super::error::{Condition, Error};
use super::function::Function;
use super::options::{Options, Restart, Variable};
use super::output::{StreamThreads, Streams, TracingWriter};
use super::pool::{self, Pool};
use super::save;
use super::value::Value;
use crate::config::{ImageConfig, Limits};
use crate::error::BootError;
use crate::image::process;
use crate::image::signals::is_lisp_thread;
use crate::os::panics::PanicSafeDrop;
use crate::session::Session;

/// A handle to the Lisp image of this process.
///
/// Clones are handles to the same image and may be used from any thread. A call from an ordinary Rust thread runs on
/// one of the program's Lisp threads; [`threads`](Builder::threads) sets how many such calls run in parallel. Calls
/// from within [`enter`](Self::enter), and from a Rust function that Lisp has called, run on the current thread, unless
/// the call is a [future](super::Call). Besides the errors that the called method lists, each call can fail with the
/// errors of [`enter`](Self::enter).
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let three: i64 = lisp.eval("(+ 1 2)")?;
/// let (quotient, remainder): (i64, i64) = lisp.eval("(floor 17 5)")?;
/// let names: Vec<String> = lisp.eval(r#"(list "ada" "grace")"#)?;
/// assert_eq!((three, quotient, remainder, names.len()), (3, 3, 2, 2));
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Lisp {
    session: Session,
    options: Arc<Options>,
}

/// The handle to this process's image, if a [`Builder`] booted the image.
static LISP: OnceCell<Lisp> = OnceCell::new();

/// A lock held while an image is being booted.
static BOOT_LOCK: Mutex<()> = Mutex::new(());

/// Locks [`BOOT_LOCK`]. On a Lisp thread, returns `None`: no image can be booted there, and a boot in progress may be
/// waiting for the code that this thread runs.
///
/// # Errors
/// Returns [`Error::Forked`] in a forked child, where a missing thread may hold the lock.
fn lock_boot() -> Result<Option<MutexGuard<'static, ()>>, Error> {
    if process::is_forked() {
        return Err(Error::Forked);
    }
    Ok((!is_lisp_thread()).then(|| BOOT_LOCK.lock()))
}

/// A builder that sets the options of an image and boots the image.
///
/// ```no_run
/// let lisp = sbcl::Lisp::builder().heap(2 << 30).threads(2).boot()?;
/// # Ok::<(), sbcl::Error>(())
/// ```
#[must_use = "nothing is booted before `boot` is called"]
pub struct Builder {
    image: ImageConfig,
    heap: Option<u64>,
    core: Option<PathBuf>,
    threads: u32,
    spare_threads: u32,
    cleanup: Duration,
    streams: Streams,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("image", &self.image).field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            image: ImageConfig::default(),
            heap: None,
            core: None,
            threads: 1,
            spare_threads: 64,
            cleanup: Limits::default().cleanup,
            streams: Streams::default(),
        }
    }
}

impl Builder {
    /// Sets the size of the heap in bytes: 128 MiB to 64 GiB.
    ///
    /// The default is 8 GiB, or for a saved core the heap size of the image that was saved. Unused parts of the heap
    /// take address space, but no memory.
    pub fn heap(mut self, bytes: u64) -> Self {
        self.heap = Some(bytes);
        self
    }

    /// Sets the size of each Lisp thread's control stack in bytes: 2 MiB to 4 GiB, 256 MiB by default.
    ///
    /// Unused parts of a stack take address space, but no memory. On x86-64, Rust code that Lisp calls runs on the same
    /// stack; on aarch64, this Rust code runs on another stack, of 1 MiB.
    pub fn control_stack(mut self, bytes: u64) -> Self {
        self.image.control_stack = bytes;
        self
    }

    /// Sets the core to boot in place of the core in this program: a file that [`Lisp::save`] wrote, or a directory
    /// with an `sbcl.core`.
    ///
    /// The runtime is always the `libsbcl` that the program was built with. If the directory has a different `libsbcl`,
    /// or the core comes from another build of SBCL, the boot fails before any code of that library or core runs. A
    /// core that is accepted is Lisp code and can do what [evaluated code](crate::guide::safety) can: boot no core that
    /// you do not trust.
    pub fn core(mut self, path: impl Into<PathBuf>) -> Self {
        self.core = Some(path.into());
        self
    }

    /// Sets the number of Lisp threads that run the program's calls in parallel: 1 to 256, 1 by default. 0 counts as 1,
    /// and a number above 256 as 256.
    ///
    /// A thread does not count while it runs Rust code, in a function that Lisp has called or in the closure of
    /// [`enter`](Lisp::enter), or while it waits for a stream. When calls wait, none of them has begun for about 20 ms,
    /// and fewer than `count` threads are in Lisp, a [spare thread](Self::spare_threads) is started or woken. So Rust
    /// code on a Lisp thread may wait for another thread that calls Lisp.
    pub fn threads(mut self, count: u32) -> Self {
        self.threads = count;
        self
    }

    /// Sets the maximum number of spare Lisp threads in addition to [`threads`](Self::threads): at most 256, 64 by
    /// default. A number above 256 counts as 256.
    ///
    /// Spare threads run calls while other threads are inside Rust. Spare threads are started or woken when they are
    /// needed, and sleep when they are not needed. If a spare thread is needed, but no more threads are allowed or can
    /// be started, calls wait. When none of the waiting calls has begun for five seconds, the waiting calls fail with
    /// [`Error::NoThread`]. Calls that wait because [`threads`](Self::threads) threads are in Lisp do not fail.
    pub fn spare_threads(mut self, count: u32) -> Self {
        self.spare_threads = count;
        self
    }

    /// Sets the grace period of cleanup forms in an interrupted call, 5 seconds by default.
    ///
    /// The cleanup forms of a call share the grace period. A period of more than a day counts as a day. When the grace
    /// period is over, the running cleanup form is interrupted; then the cleanup forms of outer frames run, and are
    /// interrupted in turn, at intervals of about a second. The grace period also applies to a call that reached its
    /// time limit.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// let lisp = sbcl::Lisp::builder().cleanup(Duration::from_secs(30)).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn cleanup(mut self, grace: Duration) -> Self {
        self.cleanup = grace;
        self
    }

    /// Sets the destination of `*standard-output*`, by default this process's standard output.
    ///
    /// A thread of the library writes to the stream, and a Lisp thread that prints waits for the library's thread, so
    /// the output of a call has been written when the call returns. A call that is being interrupted, by its time limit
    /// or otherwise, does not wait: up to 1 MiB of output is queued and written later, and the rest is lost. If the
    /// stream calls Lisp, the stream's call fails with [`Error::CalledByStream`]. The stream must not wait for a lock
    /// that a caller of Lisp may hold: `println!("{value}")` holds the lock of [`std::io::stdout`] while Lisp prints
    /// the value. By default output is written without that lock and without a buffer, so the output can precede
    /// earlier text that `print!` has buffered.
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().stdout(std::fs::File::create("lisp.log")?).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn stdout(mut self, stream: impl Write + Send + 'static) -> Self {
        self.streams.stdout = Some(Box::new(stream));
        self
    }

    /// Sets the destination of `*error-output*` and `*trace-output*`, by default this process's standard error.
    ///
    /// Output is written as described for [`stdout`](Self::stdout).
    pub fn stderr(mut self, stream: impl Write + Send + 'static) -> Self {
        self.streams.stderr = Some(Box::new(stream));
        self
    }

    /// Turns each line that Lisp prints into a `tracing` event.
    ///
    /// Lines of `*standard-output*` have the target `sbcl::stdout` and level `INFO`; lines of `*error-output*` and
    /// `*trace-output*` have the target `sbcl::stderr` and level `WARN`. A line that is not yet complete becomes an
    /// event when the line is longer than 8 KiB. The subscriber runs on the library's thread that writes the output
    /// (see [`stdout`](Self::stdout)).
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().trace_output().boot()?;
    /// lisp.eval::<()>(r#"(format t "an event~%")"#)?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn trace_output(self) -> Self {
        self.stdout(TracingWriter::stdout()).stderr(TracingWriter::stderr())
    }

    /// Sets the source of `*standard-input*`, read as UTF-8; empty by default.
    ///
    /// A thread of the library reads from the stream, so a call that waits for input can be interrupted. If the stream
    /// calls Lisp, the stream's call fails with [`Error::CalledByStream`]. All calls share `*standard-input*`, which,
    /// like other Lisp streams, is not synchronised: calls that read at the same time, without a lock of their own, may
    /// lose input.
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().stdin(std::io::stdin()).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn stdin(mut self, stream: impl Read + Send + 'static) -> Self {
        self.streams.stdin = Some(Box::new(stream));
        self
    }

    /// Sets the function that receives the class and the text of each warning that Lisp signals, and that no Lisp code
    /// muffles, while code is evaluated or loaded. Warnings about redefinitions are discarded.
    ///
    /// By default warnings are `tracing` events of the target `sbcl`. The hook runs on the thread that writes to
    /// [`stdout`](Self::stdout), in order with the output. If the hook calls Lisp, the hook's call fails with
    /// [`Error::CalledByStream`].
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().on_warning(|class, text| eprintln!("{class}: {text}")).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn on_warning(mut self, hook: impl Fn(&str, &str) + Send + Sync + 'static) -> Self {
        self.streams.warning_hook = Some(Box::new(hook));
        self
    }

    /// Boots the image. The boot usually takes 10 to 30 ms. A saved core takes longer if the file was copied or has
    /// another modification time: then the whole file is read, to check that the core is unchanged.
    ///
    /// ```no_run
    /// use sbcl::{BootError, Error};
    ///
    /// match sbcl::Lisp::builder().boot() {
    ///     Err(Error::Boot(BootError::AlreadyBooted)) => println!("there is one"),
    ///     other => drop(other?),
    /// }
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Boot`] with [`AlreadyBooted`](crate::BootError::AlreadyBooted) if this process has an image
    /// ([`Lisp::get_or_boot`] returns an image that a `Builder` booted), and with the reason why the new image cannot
    /// be booted, such as a size out of range or no usable core. A saved core can be refused with
    /// [`OtherBuild`](crate::BootError::OtherBuild), [`OtherHeap`](crate::BootError::OtherHeap), or
    /// [`Core`](crate::BootError::Core) if the file is not a saved core, is incomplete, or was changed after the save.
    /// Returns [`Error::Forked`] in a forked child of a process that has booted Lisp or tried to. Returns
    /// [`Error::Io`] if the threads for the streams cannot be started. After an error that is found before
    /// SBCL's runtime is started, such as a size out of range or a missing core, another boot may be tried. If SBCL's
    /// runtime or the preparation of the image fails, each further boot fails with
    /// [`BootFailed`](crate::BootError::BootFailed).
    pub fn boot(mut self) -> Result<Lisp, Error> {
        let booting = lock_boot()?;
        let booted = self.boot_without_locking();
        // Unlock before the streams and the hook of a failed boot are dropped, because their destructors may use the
        // image.
        drop(booting);
        booted
    }

    /// Boots the image; the caller has called [`lock_boot`].
    fn boot_without_locking(&mut self) -> Result<Lisp, Error> {
        let saved = match self.core.take().map(|path| (std::fs::metadata(&path), path)) {
            None => None,
            Some((Ok(metadata), file)) if metadata.is_file() => Some(file),
            Some((Ok(metadata), directory)) if metadata.is_dir() => {
                self.image.core_dir = Some(directory);
                None
            }
            Some((Ok(_), path)) => {
                return Err(BootError::Core { path, reason: "neither a file nor a directory".to_owned() }.into());
            }
            Some((Err(error), path)) => return Err(BootError::Core { path, reason: error.to_string() }.into()),
        };
        if let Some(file) = saved {
            let heap = save::check_core(&file, self.heap)?;
            self.image.image = Some(file);
            self.heap = Some(heap);
        }
        self.image.heap = self.heap.unwrap_or(self.image.heap);
        let threads = self.threads.clamp(1, 256);
        let cleanup = self.cleanup.min(Duration::from_secs_f64(Limits::MAX_TIMEOUT_SECONDS));
        let pool = Arc::new(Pool::new(threads, self.spare_threads.min(256), cleanup));
        let limits = Limits { cleanup, ..Limits::default() };
        let stream_threads = StreamThreads::start(&mut self.streams)?;
        let session = Session::start_for_program(&self.image, limits, Some((pool.clone(), threads)))?;
        // The streams and the pool are installed only after a successful start: after a failure, another boot may be
        // tried.
        stream_threads.install();
        pool::install(pool);
        let options = Options { group: Options::new_group(), ..Options::default() };
        let lisp = Lisp { session, options: Arc::new(options) };
        Ok(LISP.get_or_init(|| lisp).clone())
    }
}

impl Lisp {
    /// Returns a [`Builder`] with the default settings.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Boots an image with the default settings.
    ///
    /// # Errors
    /// Returns the errors of [`Builder::boot`].
    pub fn boot() -> Result<Self, Error> {
        Self::builder().boot()
    }

    /// Returns a handle to the image that a [`Builder`] booted in this process. If there is no such image, boots an
    /// image with the default settings.
    ///
    /// This function is for tests, and for libraries that share one image.
    ///
    /// ```
    /// let (one, other) = (sbcl::Lisp::get_or_boot()?, sbcl::Lisp::get_or_boot()?);
    /// one.load_str("(defparameter *of-all* 7)")?;
    /// assert_eq!(other.eval::<i64>("*of-all*")?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Builder::boot`], for example if [`Session::start`] booted the image. Foreign code that Lisp
    /// calls during the boot, for example in a hook of a saved core, gets
    /// [`AlreadyBooted`](crate::BootError::AlreadyBooted).
    pub fn get_or_boot() -> Result<Self, Error> {
        let _booting = lock_boot()?;
        match LISP.get() {
            Some(lisp) => Ok(lisp.clone()),
            None => Self::builder().boot_without_locking(),
        }
    }

    /// Returns the session of this handle's image.
    ///
    /// A session evaluates code given as text, returns outcomes as text, and has a debugger.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let outcome = lisp.session().evaluate(sbcl::Evaluation::new("(list 1 2)"));
    /// assert_eq!(outcome.result.as_ref().unwrap()[0].text, "(1 2)");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Runs `work` on a Lisp thread, where calls are direct.
    ///
    /// If the current thread is a Lisp thread that has called Rust, `work` runs on the current thread.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let sum: i64 = lisp.enter(|cx| {
    ///     let add = cx.function("+")?;
    ///     (1..=100).try_fold(0, |sum, n| add.call((sum, n)))
    /// })?;
    /// assert_eq!(sum, 5050);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of `work`; [`Error::Timeout`], [`Error::Interrupted`], [`Error::Aborted`] or
    /// [`Error::Unwinding`] if the call is ended early, even if `work` still returns a value; [`Error::NoThread`],
    /// [`Error::CalledByStream`], [`Error::CannotCall`], [`Error::Forked`] or [`Error::Condition`] if the call cannot
    /// begin.
    ///
    /// # Panics
    /// Panics if `work` panics.
    pub fn enter<R: Send>(&self, work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
        pool::run_with_options(&self.options, work)
    }

    /// Evaluates the forms in `code` and reads the values of the last form.
    ///
    /// The forms are read in the handle's [package](Self::with_package), `COMMON-LISP-USER` by default. In a Rust
    /// function that Lisp has called, the default is the current package (`*package*`) of the calling Lisp code, unless
    /// the handle of the innermost surrounding call has a package.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<(i64, i64)>("(defvar *n* 17) (floor *n* 5)")?, (3, 2));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if a form cannot be read or fails; [`Error::Conversion`] if the values cannot be
    /// read as a `T`.
    pub fn eval<T: FromLisp + Send>(&self, code: &str) -> Result<T, Error> {
        self.enter(|cx| cx.eval(code))
    }

    /// Calls the function `name` with `arguments` and reads the values that it returns.
    ///
    /// The name is written as in Lisp code: `name`, `package:name`, `(setf name)` or `(setf package:name)`, in upper or
    /// lower case.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.call::<String>("string-upcase", ("shout", sbcl::keyword("end"), 1))?, "Shout");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if the function does not exist or fails, or if Lisp cannot read an argument, such
    /// as a symbol of a package that does not exist; [`Error::Conversion`] if an argument has no Lisp counterpart, or
    /// the values cannot be read as a `T`.
    pub fn call<T: FromLisp + Send>(&self, name: &str, arguments: impl Arguments + Sync) -> Result<T, Error> {
        self.enter(|cx| cx.call(name, &arguments))
    }

    /// Looks up the function `name`, written as for [`call`](Self::call).
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let upcase = lisp.function("string-upcase")?;
    /// assert_eq!(upcase.call::<String>(("shout",))?, "SHOUT");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if `name` is not the name of a function, for example because a macro has this name.
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        self.enter(|cx| cx.function(name)).map(|function| function.with_options(&self.options))
    }

    /// Converts `object` to a Lisp object and returns a handle to it.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let list = lisp.value(vec![(1, "one"), (2, "two")])?;
    /// assert_eq!(list.to_string(), r#"((1 "one") (2 "two"))"#);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if Lisp cannot read `object`, for example because a symbol's package does not
    /// exist, or some keys of a map become `equal`; [`Error::Conversion`] if `object` has no Lisp counterpart.
    pub fn value(&self, object: impl IntoLisp + Sync) -> Result<Value, Error> {
        self.enter(|cx| cx.value(&object))
    }

    /// Loads the forms in `code` as `load` loads a file: an `(in-package …)` applies to the rest of `code`.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.load_str("(defpackage :rules (:use :cl)) (in-package :rules) (defun vat (n) (* n 1/5))")?;
    /// assert_eq!(lisp.call::<i64>("rules::vat", (10,))?, 2);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if a form cannot be read or fails. The effects of the forms before this form
    /// remain.
    pub fn load_str(&self, code: &str) -> Result<(), Error> {
        self.enter(|cx| cx.call_entry(Entry::LoadText, |writer| code.write(writer)))
    }

    /// Loads a file that contains Lisp source code or the output of `compile-file`.
    ///
    /// ```no_run
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.load_file("rules.lisp")?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if there is no such file or a form in the file fails; [`Error::Io`] if the path is
    /// not UTF-8, contains a NUL, or is empty or otherwise cannot be made absolute.
    pub fn load_file(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        // A relative name refers to this process's current directory; Lisp would use the directory in which it was
        // booted.
        let path = std::path::absolute(path.as_ref())?;
        let name = path.to_str().ok_or_else(|| {
            let text = format!("the path {} is not valid UTF-8", path.display());
            io::Error::new(io::ErrorKind::InvalidFilename, text)
        })?;
        // The system would open the file whose name ends before the NUL.
        if name.contains('\0') {
            let text = format!("the path {name:?} contains a NUL");
            return Err(io::Error::new(io::ErrorKind::InvalidFilename, text).into());
        }
        self.enter(|cx| cx.call_entry(Entry::LoadFile, |writer| name.write(writer)))
    }

    /// Defines the Lisp function `name` as a Rust closure.
    ///
    /// The name is written as for [`call`](Self::call); a function `(setf name)` receives the new value as its first
    /// argument. If the name's package does not exist, the package is created. Any package but `COMMON-LISP-USER` then
    /// exports the name. Lisp may call the function on any thread, and on multiple threads at once. While the function
    /// runs, garbage collections do not wait for the function, and other Lisp threads wait only if they need a lock
    /// that the calling Lisp code holds. An interruption waits until the function returns or calls Lisp.
    ///
    /// The closure is dropped when the function is redefined with this method. If Lisp can no longer call the function,
    /// for example because its package was deleted, and a garbage collection has found this out, the next definition of
    /// any function drops the closure.
    ///
    /// An `Err` is signalled in Lisp as a `rust:host-error`, and so is an argument or a result that cannot be
    /// converted. For an [`Error::Condition`], Lisp signals the condition that the error contains. Lisp's handlers find
    /// the texts that may have [replaced the values of slots](Condition::slot). A panic is signalled as a
    /// `rust:host-panic`. In each of these cases, the restart `use-value` supplies the value of the call instead.
    /// While Lisp [is unwinding](Error::Unwinding), an `Err` is ignored, and Lisp continues to unwind.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.define("host:read", "Return the text of the file PATH.", |path: String| std::fs::read_to_string(path))?;
    /// let text: String = lisp.eval(r#"(handler-case (host:read "/nowhere") (error () "none"))"#)?;
    /// assert_eq!(text, "none");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if `name` does not spell a function name, or Lisp does not allow the function to be
    /// defined.
    pub fn define<Arguments, F: HostFunction<Arguments> + Send + Sync>(
        &self,
        name: &str,
        documentation: &str,
        function: F,
    ) -> Result<(), Error> {
        define::define(&self.options, name, None, documentation, function)
    }

    /// Defines the Lisp function `name` as a Rust closure, with a lambda list.
    ///
    /// The variables of `lambda_list` correspond to the closure's parameters in order. The parameter for a variable
    /// after `&optional` or `&key` is best declared as `Option`, unless the variable has a default. The parameter for
    /// the variable after `&rest` is best declared as `Vec`. Variables after `&aux`, and supplied-p variables, have no
    /// parameter. Everything else is as for [`define`](Self::define).
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.define_as("host:pad", "text &key (width 8)", "Return TEXT, padded.", |text: String, width: usize| {
    ///     format!("{text:>width$}")
    /// })?;
    /// assert_eq!(lisp.eval::<String>(r#"(host:pad "x" :width 3)"#)?, "  x");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`define`](Self::define), and an error if `lambda_list` is not a lambda list, or the
    /// number of variables that have a parameter is not the number of the closure's parameters. After such an error, an
    /// existing function of that name is unchanged. New symbols and a new package remain, as after a `defun` that
    /// fails.
    pub fn define_as<Arguments, F: HostFunction<Arguments> + Send + Sync>(
        &self,
        name: &str,
        lambda_list: &str,
        documentation: &str,
        function: F,
    ) -> Result<(), Error> {
        define::define(&self.options, name, Some(lambda_list), documentation, function)
    }

    fn derive(&self, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = (*self.options).clone();
        change(&mut options);
        Self { session: self.session.clone(), options: Arc::new(options) }
    }

    /// Returns a handle whose calls fail with [`Error::Timeout`] after `limit`, which includes the wait for a thread.
    ///
    /// Lisp unwinds and runs cleanup forms, which have a [grace period](Builder::cleanup). While a call is in a Rust
    /// function that Lisp has called, its interruption waits until the function returns or calls Lisp.
    ///
    /// The limit does not end code whose cleanup forms always stop the unwinding by another non-local exit, such as
    /// `(loop (block a (unwind-protect (loop) (return-from a))))`. The limit has no effect in these cases:
    ///
    /// - SBCL has interrupts disabled: in `without-interrupts`, and in a function that `interrupt-thread` or a timer
    ///   runs in a thread that is in a call.
    /// - Code has set `sb-thread:*interrupt-handler*` to a function that does not call its argument.
    /// - A thread runs four functions for `interrupt-thread` or timers, each of which has interrupted the previous
    ///   function and has enabled interrupts again.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// use std::time::Duration;
    ///
    /// let limited = lisp.with_timeout(Duration::from_millis(50));
    /// assert!(matches!(limited.eval::<()>("(loop)"), Err(sbcl::Error::Timeout { .. })));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn with_timeout(&self, limit: Duration) -> Self {
        self.derive(|options| options.timeout = Some(limit))
    }

    /// Returns a handle whose calls evaluate code and look up functions in the package `name`. Calls of other handles
    /// within such a call do not use the package.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.load_str("(defpackage :inner (:use :cl)) (in-package :inner) (defun here () 7)")?;
    /// assert_eq!(lisp.with_package("inner").call::<i64>("here", ())?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn with_package(&self, name: &str) -> Self {
        self.derive(|options| options.package = Some(name.to_owned()))
    }

    /// Returns a handle whose calls pass an error to `handler` if no Lisp code handles the error.
    ///
    /// `handler` is called where the error is signalled, before anything is unwound, and may choose a restart. The call
    /// fails if `handler` returns `None` or panics, or if no restart has the chosen name. `handler` may call Lisp;
    /// errors in those calls are not passed to `handler` unless the calls are made through this handle. Errors in calls
    /// of other handles within a call of this handle are not passed to `handler`, either. An error in the fourth nested
    /// call of a handler is passed to no handler. Before `handler` is called, texts may [replace the values of
    /// slots](Condition::slot) in the condition, and Lisp code that uses the condition after a restart finds the texts.
    ///
    /// SBCL may hold a lock of its own while `handler` runs, such as the lock of all packages in `intern`, or of all
    /// classes in `defclass`. Calls of Lisp on this thread work even then. But a `handler` that waits for another thread
    /// may wait forever, because calls on that thread may need the lock.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// use sbcl::{Condition, Restart};
    ///
    /// let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("use-value", 0)));
    /// let safe: i64 = careful.eval("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))")?;
    /// assert_eq!(safe, 1);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    #[must_use]
    pub fn with_handler(&self, handler: impl Fn(&Condition) -> Option<Restart> + Send + Sync + 'static) -> Self {
        let handler = PanicSafeDrop::new(handler);
        self.derive(|options| options.handler = Some(Arc::new(move |condition| handler(condition))))
    }

    /// Returns a handle whose calls bind special variables. The bindings also apply to calls of other handles within
    /// such a call.
    ///
    /// Each binding has the name of a variable, with a package prefix if necessary, and the variable's value during the
    /// calls.
    ///
    /// Do not bind variables of internal packages, which are [unsafe](crate::guide::safety). While a call binds
    /// `sb-kernel:*gc-inhibit*` to `t`, for example, each thread that needs a garbage collection waits for the end of
    /// the call, and no time limit ends the call.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let hex = lisp.with_bindings(&[("*print-base*", lisp.value(16)?)])?;
    /// assert_eq!(hex.eval::<String>("(princ-to-string 255)")?, "FF");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Condition`] if a name does not spell a symbol, or there is no such symbol.
    pub fn with_bindings(&self, bindings: &[(&str, Value)]) -> Result<Self, Error> {
        let variables: Vec<Variable> = self.enter(|cx| {
            let find = |(name, _): &(&str, Value)| {
                let symbol: Symbol = cx.call_entry(Entry::Symbol, |writer| name.write(writer))?;
                Ok(if symbol.package.is_some() {
                    Variable::Named(symbol)
                } else {
                    Variable::Homeless(cx.call_entry(Entry::Symbol, |writer| name.write(writer))?)
                })
            };
            bindings.iter().map(find).collect::<Result<_, Error>>()
        })?;
        Ok(self.derive(|options| {
            options.variables.extend(variables);
            options.values.extend(bindings.iter().map(|(_, value)| value.clone()));
        }))
    }

    /// Returns a handle that interrupts the calls of this handle and of all related handles, and the calls of the
    /// functions that were looked up with these handles. All handles that were cloned or derived from one handle,
    /// directly or by way of other handles, are related to that handle and to each other. So all handles that
    /// [`get_or_boot`](Self::get_or_boot) returns are related. [`separate`](Self::separate) makes an unrelated handle.
    #[must_use]
    pub fn interrupt_handle(&self) -> InterruptHandle {
        InterruptHandle { group: self.options.group }
    }

    /// Returns a handle with the same options that is not related to this handle: the [interrupt
    /// handles](Self::interrupt_handle) of the two handles interrupt different calls.
    #[must_use]
    pub fn separate(&self) -> Self {
        self.derive(|options| options.group = Options::new_group())
    }

    pub(super) fn options(&self) -> &Arc<Options> {
        &self.options
    }
}

/// A handle that any thread can use to interrupt calls: the calls fail with [`Error::Interrupted`].
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let separate = lisp.separate();
/// let stop = separate.interrupt_handle();
/// let caller = std::thread::spawn(move || separate.eval::<()>("(loop)"));
/// while !caller.is_finished() {
///     stop.interrupt();
///     std::thread::yield_now();
/// }
/// assert!(matches!(caller.join().unwrap(), Err(sbcl::Error::Interrupted)));
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct InterruptHandle {
    group: u64,
}

impl InterruptHandle {
    /// Interrupts the calls that wait or run now, without waiting for the end of these calls.
    /// [`Lisp::interrupt_handle`] describes which calls belong to this handle.
    ///
    /// Lisp unwinds and runs cleanup forms, which have a [grace period](Builder::cleanup). While a call is in a Rust
    /// function that Lisp has called, its interruption waits until the function returns or calls Lisp. Interrupting a
    /// call again has no effect. [`Lisp::with_timeout`] lists code that cannot be interrupted.
    pub fn interrupt(&self) {
        pool::interrupt_group(self.group);
    }
}

// `Lisp` is unwind-safe: a panic leaves the image in a state that any other thread might see at any time.
impl std::panic::UnwindSafe for Lisp {}
impl std::panic::RefUnwindSafe for Lisp {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::process::tests::holds_in_forked_child;

    #[test]
    fn boot_in_a_forked_child_fails_and_does_not_wait_for_a_boot_in_the_parent() {
        let booting = BOOT_LOCK.lock();
        let are_refused = holds_in_forked_child(|| {
            matches!(Lisp::boot(), Err(Error::Forked)) && matches!(Lisp::get_or_boot(), Err(Error::Forked))
        });
        drop(booting);
        assert!(are_refused);
    }
}
