//! The handle on the image.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::convert::{Arguments, FromLisp, IntoLisp, Symbol};
use super::define::{self, HostFunction};
use super::enter::{Cx, Entry};
use super::error::{Condition, Error};
use super::function::Function;
use super::options::{Options, Restart};
use super::output::{Served, Streams, Traced};
use super::pool::{self, Pool};
use super::save;
use super::value::Value;
use crate::config::{ImageConfig, Limits};
use crate::error::BootError;
use crate::os::panics::Contained;
use crate::session::Session;

/// Common Lisp in this process. Clones are handles on the same image; they may be used from any thread.
///
/// Calls from threads of Rust's go to one of the Lisp threads that work for the program, of which there are
/// [`threads`](Builder::threads); from within [`enter`](Self::enter), and from a Rust function that Lisp has called, they
/// are direct.
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

/// The image of this process, if it was booted for a program.
static LISP: OnceCell<Lisp> = OnceCell::new();

/// Locked by the thread that boots.
static BOOTING: Mutex<()> = Mutex::new(());

/// How an image is booted.
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
    /// The heap in bytes: 128 MiB to 64 GiB, 8 GiB unless it is set, or that of the saved core that is booted. It is
    /// address space until it is used.
    pub fn heap(mut self, bytes: u64) -> Self {
        self.heap = Some(bytes);
        self
    }

    /// The control stack of each Lisp thread in bytes: 2 MiB to 4 GiB, 256 MiB unless it is set. Address space as well.
    pub fn control_stack(mut self, bytes: u64) -> Self {
        self.image.control_stack = bytes;
        self
    }

    /// What to boot in place of the core that this program carries: a file that [`Lisp::save`] has made, or a directory
    /// with an `sbcl.core`.
    ///
    /// The runtime is always the `libsbcl` that the program was built with. Another one in the directory is refused, and so
    /// is a core of another build of SBCL, before any of their code has run. A core that passes is Lisp code, which can do
    /// what [evaluated code](crate::guide::safety) can: boot none that you would not load.
    pub fn core(mut self, path: impl Into<PathBuf>) -> Self {
        self.core = Some(path.into());
        self
    }

    /// How many Lisp threads work for the program, side by side: at least 1, at most 256; 1 unless it is set.
    ///
    /// One that is inside a Rust function, or the closure of an [`enter`](Lisp::enter), runs no Lisp meanwhile: when calls
    /// wait for some 10 ms and fewer threads than these are in Lisp, another one is started. So a closure may wait for a thread
    /// that calls Lisp itself.
    pub fn threads(mut self, count: u32) -> Self {
        self.threads = count;
        self
    }

    /// How many more threads than [`threads`](Self::threads) there may be while those are inside Rust: at most 256; 64
    /// unless it is set. One is started when it is needed, and rests when it no longer is. Where there are no more, calls
    /// wait; when none has begun for five seconds, they fail with [`Error::NoThread`].
    pub fn spare_threads(mut self, count: u32) -> Self {
        self.spare_threads = count;
        self
    }

    /// The grace period of cleanup forms: how long they may take when a call is interrupted, by its time limit or otherwise;
    /// 5 seconds unless it is set. Then they are interrupted, too, and so are those further out.
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

    /// Where what Lisp prints to `*standard-output*` goes: to this process' own standard output unless it is set.
    ///
    /// A thread of the library's own writes to it, and whoever prints waits until that is done, so a call that has returned has
    /// its output written. One that is interrupted, by its time limit or otherwise, waits no longer: what it prints
    /// from then on is written later, up to 1 MiB; what is more is lost. Calls of Lisp from there fail with
    /// [`Error::CalledByStream`].
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().stdout(std::fs::File::create("lisp.log")?).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn stdout(mut self, stream: impl Write + Send + 'static) -> Self {
        self.streams.stdout = Some(Box::new(stream));
        self
    }

    /// Where what Lisp prints to `*error-output*` goes: to this process' own standard error unless it is set. The rest is as
    /// of [`stdout`](Self::stdout).
    pub fn stderr(mut self, stream: impl Write + Send + 'static) -> Self {
        self.streams.stderr = Some(Box::new(stream));
        self
    }

    /// What Lisp prints to `*standard-output*` and `*error-output*` are events of `tracing`, one a line: of the target
    /// `sbcl::stdout` and level `INFO`, and of `sbcl::stderr` and level `WARN`. A line is one when it has ended, or is longer
    /// than 8 KiB. The subscriber runs where a [`stdout`](Self::stdout) would.
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().trace_output().boot()?;
    /// lisp.eval::<()>(r#"(format t "an event~%")"#)?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn trace_output(self) -> Self {
        self.stdout(Traced::stdout()).stderr(Traced::stderr())
    }

    /// Where `*standard-input*` comes from, as UTF-8; it is empty unless it is set. A thread of the library's own reads from
    /// it; a call that waits for that can be interrupted. Calls of Lisp from there fail with [`Error::CalledByStream`].
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().stdin(std::io::stdin()).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn stdin(mut self, stream: impl Read + Send + 'static) -> Self {
        self.streams.stdin = Some(Box::new(stream));
        self
    }

    /// What is told of the warnings of code that is evaluated or loaded: their class and what they report. Unless it is
    /// set they are events of `tracing`, of the target `sbcl`. It runs where a [`stdout`](Self::stdout) does, one
    /// after the other with that.
    ///
    /// ```no_run
    /// let lisp = sbcl::Lisp::builder().on_warning(|class, text| eprintln!("{class}: {text}")).boot()?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    pub fn on_warning(mut self, hook: impl Fn(&str, &str) + Send + Sync + 'static) -> Self {
        self.streams.warnings = Some(Box::new(hook));
        self
    }

    /// Boots, which takes 10 to 30 ms.
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
    /// [`Error::Boot`]: [`BootError::AlreadyBooted`](crate::BootError::AlreadyBooted) when this process has an image, which [`Lisp::get_or_boot`] gives;
    /// sizes out of range; no usable core; of a saved one [`OtherBuild`](crate::BootError::OtherBuild),
    /// [`OtherHeap`](crate::BootError::OtherHeap), or [`Core`](crate::BootError::Core) when it is no saved core or not
    /// whole. After these another boot may be tried.
    pub fn boot(mut self) -> Result<Lisp, Error> {
        let booting = BOOTING.lock();
        let booted = self.boot_alone();
        // Before the streams and the hook of a boot that failed are dropped, which may use the image.
        drop(booting);
        booted
    }

    /// Boots while [`BOOTING`] is locked.
    fn boot_alone(&mut self) -> Result<Lisp, Error> {
        let saved = match self.core.take() {
            Some(file) if file.is_file() => Some(file),
            Some(path) if !path.is_dir() => {
                let reason = if path.exists() { "neither a file nor a directory" } else { "no such file or directory" };
                return Err(BootError::Core { path, reason: reason.to_owned() }.into());
            }
            directory => {
                self.image.core_dir = directory;
                None
            }
        };
        if let Some(file) = saved {
            let heap = save::check(&file, self.heap)?;
            self.image.image = Some(file);
            self.heap = Some(heap);
        }
        self.image.heap = self.heap.unwrap_or(self.image.heap);
        let threads = self.threads.clamp(1, 256);
        let cleanup = self.cleanup.min(Duration::from_secs_f64(Limits::MAX_TIMEOUT_SECONDS));
        let pool = Arc::new(Pool::new(threads, self.spare_threads.min(256), cleanup));
        let limits = Limits { cleanup, ..Limits::default() };
        let served = Served::start(std::mem::take(&mut self.streams))?;
        let session = Session::start_with(&self.image, limits, Some((pool.clone(), threads)))?;
        // Not before: when it fails, another boot may be tried.
        served.install();
        pool::install(pool);
        let options = Options { group: Options::new_group(), ..Options::default() };
        let lisp = Lisp { session, options: Arc::new(options) };
        Ok(LISP.get_or_init(|| lisp).clone())
    }
}

impl Lisp {
    /// What can be chosen for an image.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Boots an image as it is by default.
    ///
    /// # Errors
    /// As [`Builder::boot`].
    pub fn boot() -> Result<Self, Error> {
        Self::builder().boot()
    }

    /// The image of this process; it is booted if there is none. For tests, and libraries that share one.
    ///
    /// ```
    /// let (one, other) = (sbcl::Lisp::get_or_boot()?, sbcl::Lisp::get_or_boot()?);
    /// one.load_str("(defparameter *of-all* 7)")?;
    /// assert_eq!(other.eval::<i64>("*of-all*")?, 7);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::boot`].
    pub fn get_or_boot() -> Result<Self, Error> {
        let _booting = BOOTING.lock();
        match LISP.get() {
            Some(lisp) => Ok(lisp.clone()),
            None => Self::builder().boot_alone(),
        }
    }

    /// The session that the same image serves: code and outcomes as text, one evaluation after another, with the debugger.
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

    /// Does `work` on a Lisp thread, where calls are direct: on this one, if it is one that has called Rust.
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
    /// What `work` returns; [`Error::Timeout`] and the like of this handle's options.
    ///
    /// # Panics
    /// When `work` does.
    pub fn enter<R: Send>(&self, work: impl FnOnce(&Cx) -> Result<R, Error> + Send) -> Result<R, Error> {
        pool::run_under(&self.options, work)
    }

    /// Evaluates the forms in `code`, in `COMMON-LISP-USER` or the handle's package, and reads the values of the last one.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.eval::<(i64, i64)>("(defvar *n* 17) (floor *n* 5)")?, (3, 2));
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when it fails, [`Error::Conversion`] when its values are no `T`.
    pub fn eval<T: FromLisp + Send>(&self, code: &str) -> Result<T, Error> {
        self.enter(|cx| cx.eval(code))
    }

    /// Calls the function `name`, `package:name` or `(setf name)`, in any case.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// assert_eq!(lisp.call::<String>("string-upcase", ("shout", sbcl::keyword("end"), 1))?, "Shout");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when there is no such function, or it fails; [`Error::Conversion`] when what it returns is no
    /// `T`.
    pub fn call<T: FromLisp + Send>(&self, name: &str, arguments: impl Arguments + Sync) -> Result<T, Error> {
        self.enter(|cx| cx.call(name, &arguments))
    }

    /// Looks up the function `name`, as [`call`](Self::call) takes it.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let upcase = lisp.function("string-upcase")?;
    /// assert_eq!(upcase.call::<String>(("shout",))?, "SHOUT");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when there is none.
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        self.enter(|cx| cx.function(name)).map(|function| function.under(&self.options))
    }

    /// Makes a Lisp object of `object` and returns its handle.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let list = lisp.value(vec![(1, "one"), (2, "two")])?;
    /// assert_eq!(list.to_string(), r#"((1 "one") (2 "two"))"#);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when it names a package that there is none of, [`Error::Conversion`] when no object can be made
    /// of it.
    pub fn value(&self, object: impl IntoLisp + Sync) -> Result<Value, Error> {
        self.enter(|cx| cx.value(&object))
    }

    /// Loads the forms in `code` as `load` does those of a file: `(in-package …)` holds until its end.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.load_str("(defpackage :rules (:use :cl)) (in-package :rules) (defun vat (n) (* n 1/5))")?;
    /// assert_eq!(lisp.call::<i64>("rules::vat", (10,))?, 2);
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when one of them fails; those before it are done.
    pub fn load_str(&self, code: &str) -> Result<(), Error> {
        self.enter(|cx| cx.ask(Entry::LoadText, |writer| code.write(writer)))
    }

    /// Loads a file, source or compiled.
    ///
    /// ```no_run
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// lisp.load_file("rules.lisp")?;
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when there is no such file, or one of its forms fails; [`Error::Io`] when its name is no UTF-8.
    pub fn load_file(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        // Of this process' directory, not of the one that Lisp was booted in.
        let path = std::path::absolute(path.as_ref())?;
        let name = path.to_str().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidFilename, "no UTF-8"))?;
        self.enter(|cx| cx.ask(Entry::LoadFile, |writer| name.write(writer)))
    }

    /// Defines a Lisp function in Rust. Its package is made if there is none of that name, and the name exported.
    ///
    /// Lisp may call it on any thread, and several at once. What it returns as `Err` is signalled there, as a
    /// `rust:host-error` with the restart `use-value`, or, when it is an [`Error::Condition`] that came from Lisp, as that
    /// condition; a panic is a `rust:host-panic`. While it runs, neither garbage collection nor other Lisp threads wait
    /// for it. It cannot be interrupted before it returns.
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
    /// [`Error::Condition`] when Lisp does not let that name be defined.
    pub fn define<Arguments, F: HostFunction<Arguments> + Send + Sync>(
        &self,
        name: &str,
        documentation: &str,
        function: F,
    ) -> Result<(), Error> {
        define::define(&self.options, name, None, documentation, function)
    }

    /// The same with a lambda list, whose variables are the closure's parameters in their order: those after `&optional`
    /// and `&key` are best an `Option`, that after `&rest` a `Vec`. There are as many of them as there are parameters, but for
    /// those after `&aux` and those that say whether there was an argument.
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
    /// As [`define`](Self::define); and when it is no lambda list, or one of more or fewer variables. A function that was
    /// there stays then.
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

    /// A handle whose calls take at most `limit`, waiting for a thread included: then they fail with [`Error::Timeout`].
    /// Lisp unwinds, with its cleanup forms, which have a [grace period](Builder::cleanup); a Rust function that Lisp has
    /// called is waited for.
    ///
    /// The limit does not end code that always leaves the unwinding, as `(loop (block a (unwind-protect (loop) (return-from a))))`
    /// does. It has no effect where SBCL has interrupts disabled, as within `without-interrupts`, or in a function
    /// that `interrupt-thread` or a timer has a busy thread call.
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

    /// A handle whose calls evaluate, and look functions up, in this package.
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

    /// A handle whose calls ask `handler` about each error that nothing in Lisp handles, where it is signalled and before
    /// anything is unwound. It may choose a restart; with `None`, or when it panics, the call fails. It may call Lisp; it is
    /// not asked about errors of that.
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
        let handler = Contained::new(handler);
        self.derive(|options| options.handler = Some(Arc::new(move |condition| handler(condition))))
    }

    /// A handle whose calls have these dynamic variables bound: pairs of a symbol's name, with its package, and a value.
    ///
    /// ```
    /// # let lisp = sbcl::Lisp::get_or_boot()?;
    /// let hex = lisp.with_bindings(&[("*print-base*", lisp.value(16)?)])?;
    /// assert_eq!(hex.eval::<String>("(princ-to-string 255)")?, "FF");
    /// # Ok::<(), sbcl::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Condition`] when there is no such symbol.
    pub fn with_bindings(&self, bindings: &[(&str, Value)]) -> Result<Self, Error> {
        let symbols: Vec<Symbol> = self.enter(|cx| {
            bindings.iter().map(|(name, _)| cx.ask(Entry::Symbol, |writer| name.write(writer))).collect()
        })?;
        Ok(self.derive(|options| {
            options.variables.extend(symbols);
            options.values.extend(bindings.iter().map(|(_, value)| value.clone()));
        }))
    }

    /// What ends the calls that are made by this handle, its clones, and those derived from it.
    #[must_use]
    pub fn interrupt_handle(&self) -> InterruptHandle {
        InterruptHandle { group: self.options.group }
    }

    /// A handle with an interrupt handle of its own.
    #[must_use]
    pub fn separate(&self) -> Self {
        self.derive(|options| options.group = Options::new_group())
    }

    pub(super) fn options(&self) -> &Arc<Options> {
        &self.options
    }
}

/// Ends calls from any thread: they fail with [`Error::Interrupted`].
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
    /// Ends what waits or runs now. Lisp unwinds, with its cleanup forms, which have a [grace period](Builder::cleanup); a
    /// Rust function that Lisp has called is waited for. Returns at once; once more does nothing more.
    pub fn interrupt(&self) {
        pool::interrupt_group(self.group);
    }
}

// What a panic leaves is what another thread may see at any time.
impl std::panic::UnwindSafe for Lisp {}
impl std::panic::RefUnwindSafe for Lisp {}
