//! A guide to using Lisp in a Rust program, with one chapter for each topic. The crate's tests check all examples, and
//! run most of them.
//!
//! | chapter | topic |
//! |---|---|
//! | [`values`] | conversions between Lisp objects and Rust values, and handles |
//! | [`functions`] | calling Lisp functions, and redefining them while they run |
//! | [`host_functions`] | Rust functions that Lisp calls |
//! | [`conditions`] | errors, restarts, handlers, warnings |
//! | [`threads`] | threads, time limits, interruption, futures |
//! | [`output`] | the streams that Lisp prints to and reads from |
//! | [`own_core`] | a program that contains its own Lisp code |
//! | [`saving`] | saving the image to a file, and booting it in another process |
//! | [`safety`] | what safe Rust guarantees, and what Lisp code can do |
//! | [`what_ends_the_process`] | faults, and which of them end the process |
//! | [`mistakes`] | common mistakes, and what to do instead |
//! | [`performance`] | costs of calls and conversions, and how to avoid them |
//!
//! The crate's example `guided_tour` shows several of these topics in one file.

pub mod values {
    //! Conversions between Lisp objects and Rust values.
    //!
    //! [`FromLisp`](crate::FromLisp) and [`IntoLisp`](crate::IntoLisp) list the types that can be converted. The
    //! requested Rust type selects the conversion:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use std::collections::HashMap;
    //!
    //! let (quotient, remainder): (i64, i64) = lisp.eval("(floor 17 5)")?;
    //! let names: Vec<String> = lisp.eval(r#"(list "ada" "grace")"#)?;
    //! let ages: HashMap<String, u8> = lisp.eval(r#"'(("ada" . 36) ("grace" . 85))"#)?;
    //! let none: Option<f64> = lisp.eval("nil")?;
    //! assert_eq!((quotient, remainder, names.len(), ages["ada"], none), (3, 2, 2, 36, None));
    //!
    //! // An element that is not an `i8` causes an error that says what was expected, what was found, and where.
    //! let error = lisp.eval::<Vec<i8>>("(list 1 2 300)").unwrap_err();
    //! assert_eq!(error.to_string(), "expected an integer from -128 to 127, but found 300 (in element 2)");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! A conversion copies the object. To get a reference to the object instead, request a [`Value`](crate::Value): a
    //! handle that keeps the object alive, and that may be stored, sent to other threads, and dropped on any thread.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use sbcl::Value;
    //!
    //! let table: Value = lisp.eval("(make-hash-table :test 'equal)")?;
    //! lisp.call::<()>("(setf gethash)", ("value", "key", &table))?;
    //! assert_eq!(table.get::<String>("key")?.as_deref(), Some("value"));
    //! assert_eq!(table.type_of()?, "hash-table");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! [`Serde`](crate::Serde) converts structs to property lists, and enum variants to keywords or lists. Integers of
    //! any size convert to and from `num_bigint::BigInt` (feature `num-bigint`), and ratios whose parts fit an `i128`
    //! convert to and from [`Ratio`](crate::Ratio). [`Cx::copy_bytes`](crate::Cx::copy_bytes) copies octets as fast as
    //! memory allows. [`Cx::borrow_bytes`](crate::Cx::borrow_bytes) lends the octets to a closure without a copy.
    //! `borrow_bytes` is `unsafe`: the caller must ensure that nothing writes to the octets until the closure has
    //! returned.
}

pub mod functions {
    //! Calling Lisp functions, and redefining them while they run.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use sbcl::keyword;
    //!
    //! lisp.load_str(
    //!     "(defpackage :guide (:use :cl) (:export #:price))
    //!      (in-package :guide)
    //!      (defun price (n &key (rate 2)) (* n rate))",
    //! )?;
    //! assert_eq!(lisp.call::<i64>("guide:price", (21, keyword("rate"), 3))?, 63);
    //!
    //! // A function is looked up once and follows its redefinition, even while other threads call it.
    //! let price = lisp.function("guide:price")?;
    //! assert_eq!(price.call::<i64>((21,))?, 42);
    //! lisp.load_str("(in-package :guide) (defun price (n) n)")?;
    //! assert_eq!(price.call::<i64>((21,))?, 21);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! [`load_str`](crate::Lisp::load_str) and [`load_file`](crate::Lisp::load_file) load code as Lisp's `load` does.
    //! If a function is redefined while it runs, the calls that have already begun complete with the old definition.
    //!
    //! A call from an ordinary Rust thread is handed over to a Lisp thread. If you make many small calls, make them
    //! inside [`enter`](crate::Lisp::enter): its closure runs on a Lisp thread, where calls are direct.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! let sum: i64 = lisp.enter(|cx| {
    //!     let add = cx.function("+")?;
    //!     (1..=100).try_fold(0, |sum, n| add.call((sum, n)))
    //! })?;
    //! assert_eq!(sum, 5050);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
}

pub mod host_functions {
    //! Rust functions that Lisp calls.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! lisp.define("host:read", "Return the text of the file PATH.", |path: String| std::fs::read_to_string(path))?;
    //! // An Err becomes an error in Lisp, with the restart USE-VALUE; so does a panic.
    //! let text: String = lisp.eval(
    //!     r#"(handler-bind ((rust:host-error (lambda (e) (declare (ignore e)) (use-value "none"))))
    //!          (host:read "/nowhere"))"#,
    //! )?;
    //! assert_eq!(text, "none");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! Lisp may call a host function on any Lisp thread, and on multiple threads at once, so the function must be
    //! `Send + Sync`. A host function that blocks does not delay garbage collections, and delays another Lisp thread
    //! only if that other thread needs a lock that the calling Lisp code holds. [`define_as`](crate::Lisp::define_as)
    //! accepts a lambda list with optional and keyword parameters; [`Values`](crate::Values) returns multiple values. A
    //! closure that cannot be sent to other threads can be a [local function](crate::Cx::local_function).
    //!
    //! The foreground evaluations of a session run one after another, so a host function that such an evaluation calls
    //! cannot wait for another foreground evaluation: in this function, [`Session::evaluate`](crate::Session::evaluate)
    //! immediately returns an outcome with an error of kind `DEADLOCK`. Instead, call Lisp directly
    //! ([`Lisp::eval`](crate::Lisp::eval) evaluates on the same thread), or queue the code with
    //! [`submit`](crate::Session::submit). A deadlock through another thread is not detected: if the host function
    //! waits for a thread, and that thread calls `evaluate`, both wait forever.
    //!
    //! If a non-local exit in Lisp (`throw`, `return-from`, a restart, an interruption) passes through a Rust function
    //! that Lisp has called, the function gets [`Error::Unwinding`](crate::Error::Unwinding) from its call of Lisp.
    //! Return this error from the function: destructors then run as usual, and the exit continues in Lisp.
}

pub mod conditions {
    //! Errors, restarts, handlers and warnings.
    //!
    //! If neither Lisp code within a call nor a handler of [`with_handler`](crate::Lisp::with_handler) handles an
    //! error, the call returns [`Error::Condition`](crate::Error::Condition), with the condition object, its classes
    //! and message and, except for a `storage-condition`, the restarts and the backtrace. The same holds for everything
    //! else that would invoke the debugger, such as `break`. Before Rust receives the condition, texts may [replace the
    //! values of some slots](crate::Condition::slot) in the condition object itself, also for Lisp code that uses the
    //! condition later.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use sbcl::{Condition, Restart};
    //!
    //! let error = lisp.eval::<i64>("(/ 1 0)").unwrap_err();
    //! let condition = error.condition().expect("a condition");
    //! assert!(condition.is("arithmetic-error") && condition.class() == "division-by-zero");
    //! assert!(condition.frames().iter().any(|frame| frame.call == "(/ 1 0)"));
    //! assert_eq!(condition.slot::<Vec<i64>>("operands")?, [1, 0]);
    //!
    //! // The handler decides at the error, before anything is unwound.
    //! let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("use-value", 0)));
    //! assert_eq!(careful.eval::<i64>("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))")?, 1);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! If no Lisp code handles a warning that is signalled while [`eval`](crate::Lisp::eval),
    //! [`load_str`](crate::Lisp::load_str) or [`load_file`](crate::Lisp::load_file) runs, the warning goes to the hook
    //! that [`on_warning`](crate::Builder::on_warning) sets or, without a hook, becomes a `tracing` event. Warnings
    //! about redefinitions are discarded. In other calls, `warn` prints to `*error-output*`.
}

pub mod threads {
    //! Threads, time limits, interruption and futures.
    //!
    //! A [`Lisp`](crate::Lisp) may be cloned, sent and used on any thread. Calls run on the program's Lisp threads;
    //! [`threads`](crate::Builder::threads) sets how many run in parallel (by default one). While a call runs Rust
    //! code, a [spare thread](crate::Builder::spare_threads) can run another call, so the Rust code may wait for
    //! threads that call Lisp. Calls from within `enter`, and from a function that Lisp has called, run on the current
    //! thread, except the asynchronous calls described below.
    //!
    //! Options such as a time limit belong to a `Lisp` and to the functions that are looked up with it, not to a
    //! thread. A nested call through another `Lisp` has the package and the error handler of that `Lisp`; the outer
    //! call's time limit and variable bindings also apply to the nested call.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use std::time::Duration;
    //! use sbcl::Error;
    //!
    //! let limited = lisp.with_timeout(Duration::from_millis(50));
    //! assert!(matches!(limited.eval::<()>("(loop)"), Err(Error::Timeout { .. })));
    //!
    //! let separate = lisp.separate();
    //! let stop = separate.interrupt_handle();
    //! std::thread::spawn(move || { std::thread::sleep(Duration::from_millis(50)); stop.interrupt() });
    //! assert!(matches!(separate.eval::<()>("(loop)"), Err(Error::Interrupted)));
    //!
    //! let hex = lisp.with_bindings(&[("*print-base*", lisp.value(16)?)])?;
    //! assert_eq!(hex.function("princ-to-string")?.call::<String>((255,))?, "FF");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! An interrupted call unwinds and runs its cleanup forms. After a grace period, by default [5
    //! seconds](crate::Builder::cleanup), the cleanup forms are interrupted, too. While the call is in a Rust function
    //! that Lisp has called, the interruption waits until the function returns or calls Lisp. Interrupting a call that
    //! is already being interrupted has no effect. [`eval_async`](crate::Lisp::eval_async),
    //! [`call_async`](crate::Lisp::call_async) and [`enter_async`](crate::Lisp::enter_async) return futures, which work
    //! with any async runtime. Dropping such a future interrupts its call.
    //!
    //! A timer (`sb-ext:make-timer`) runs its function in the thread that made the timer, also during a later call on that
    //! thread: an error in the function is an error of that call. With `:thread t`, a new thread runs the function.
    //!
    //! The compiler ensures that the [`Cx`](crate::Cx) of `enter` leaves neither the closure nor the thread, and that a
    //! closure that Lisp may call on any thread borrows no local variables and can be shared between threads:
    //!
    //! ```compile_fail,E0277
    //! fn is_send<T: Send>() {}
    //! is_send::<&sbcl::Cx>();
    //! ```
    //!
    //! ```compile_fail,E0373
    //! let lisp = sbcl::Lisp::get_or_boot().unwrap();
    //! let local = 7;
    //! lisp.define("host:seven", "Seven.", || local).unwrap();
    //! ```
    //!
    //! ```
    //! fn is_send_and_sync<T: Send + Sync + 'static>() {}
    //! is_send_and_sync::<sbcl::Lisp>();
    //! is_send_and_sync::<sbcl::Value>();
    //! is_send_and_sync::<sbcl::Function>();
    //! is_send_and_sync::<sbcl::InterruptHandle>();
    //! is_send_and_sync::<sbcl::Error>();
    //! ```
}

pub mod output {
    //! The streams that Lisp prints to and reads from.
    //!
    //! `*standard-output*` is the standard output of this process unless the program sets
    //! [`stdout`](crate::Builder::stdout). [`stderr`](crate::Builder::stderr) sets `*error-output*` and
    //! `*trace-output*`, and [`stdin`](crate::Builder::stdin) sets `*standard-input*`, which is empty by default. The
    //! streams are set at boot, for all calls. In threads that Lisp code starts, and in the evaluations of a session,
    //! `*standard-input*` is empty.
    //!
    //! ```no_run
    //! use std::io::{Cursor, sink};
    //!
    //! let lisp = sbcl::Lisp::builder().stdout(sink()).stdin(Cursor::new("(1 2 3)")).boot()?;
    //! assert_eq!(lisp.eval::<Vec<i64>>("(read)")?, [1, 2, 3]);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! [`trace_output`](crate::Builder::trace_output) turns each printed line into a `tracing` event. Warnings are
    //! `tracing` events by default, so the log of a service can contain output and warnings.
    //!
    //! A thread of the library writes all output in order, and a Lisp thread that prints waits for this thread, so the
    //! output of a call has been written when the call returns. A call that is interrupted, or that has exceeded its
    //! time limit, does not wait, so a stream that blocks cannot delay the end of the call. At most 1 MiB of output
    //! then waits in a queue, from which it is written later; output that does not fit in the queue is lost. A stream
    //! whose code calls Lisp gets [`Error::CalledByStream`](crate::Error::CalledByStream), because Lisp may be waiting
    //! for the stream; a stream that calls [`Session::evaluate`](crate::Session::evaluate) gets an outcome with an
    //! error of kind `DEADLOCK`. A stream may wait for another thread that calls Lisp, if that call does not print,
    //! warn or read input. A stream must not wait for a lock that a caller of Lisp may hold: `println!("{value}")`, for
    //! example, calls Lisp while it holds the lock of [`std::io::stdout`].
    //!
    //! By default Lisp writes to the file descriptors of this process, without the locks and buffers of [`std::io`]. To
    //! print an incomplete line before Lisp's output, flush the buffer: `print!("> "); std::io::stdout().flush()?;`.
    //!
    //! To get the output of a single call, capture the output in Lisp:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! assert_eq!(lisp.eval::<String>("(with-output-to-string (*standard-output*) (princ 1/3))")?, "1/3");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
}

pub mod own_core {
    //! A program that contains its own Lisp code.
    //!
    //! The crate `sbcl-build`, called by the program's build script, compiles ASDF systems and directories of Lisp
    //! files into a core that the program contains: see the example `bundled`. Disable the default feature `core` in
    //! such a program, because a program contains only one core. [`Builder::core`](crate::Builder::core) boots a core
    //! from a directory, or a saved core, instead of the core that the program contains.
}

pub mod saving {
    //! Saving the image to a file, and booting it in another process.
    //!
    //! [`Lisp::save`](crate::Lisp::save) writes the image, including the values of variables, while the program
    //! continues. [`Builder::core`](crate::Builder::core) boots the saved core. This boot takes no longer than a boot
    //! of the plain core, unless the file is a copy or its modification time has changed: then the boot first reads the
    //! whole file to check the contents.
    //!
    //! ```no_run
    //! use sbcl::{BootError, Error, Lisp};
    //!
    //! let lisp = match Lisp::builder().core("app.core").boot() {
    //!     // There is no usable saved core, or another build of the crate saved it: boot the program's own core.
    //!     Err(Error::Boot(BootError::OtherBuild { .. } | BootError::Core { .. })) => Lisp::boot()?,
    //!     booted => booted?,
    //! };
    //! lisp.define("host:now", "Return the time.", || 7)?; // Functions in Rust are defined at each boot.
    //! lisp.eval::<()>("(defvar *visits* 0) (incf *visits*)")?;
    //! lisp.save("app.core")?;
    //! # Ok::<(), Error>(())
    //! ```
    //!
    //! | object | in the saved core |
    //! |---|---|
    //! | variables, functions, closures, macros, packages, hash tables, classes, instances, loaded systems | unchanged |
    //! | a [`Value`](crate::Value), a [`Function`](crate::Function) | invalid; objects that only such handles kept alive are not saved |
    //! | a function [defined](crate::Lisp::define) in Rust | signals a `rust:host-error` until it is defined again |
    //! | a [local function](crate::Cx::local_function) | always signals a `rust:host-error` |
    //! | calls on other threads | not continued; their cleanup forms do not run, and their locks are free |
    //! | threads, timers, open files, sockets, foreign memory | not saved |
    //!
    //! A forked copy of the process saves the image. The copy has a single thread, a Lisp thread, which runs none of
    //! the program's Rust code and waits for none of the program's locks. If a call changes an object, such as a hash
    //! table, at the moment of the copy, the saved object may be inconsistent. To prevent this, hold a lock of your own
    //! while you change the object, and hold the same lock while you save.
    //!
    //! SBCL saves an image by moving every object, and then ends the process, so saving without a copy would end the
    //! program. Therefore `save` fails if the process cannot be copied. `save` works only on Linux.
    //!
    //! A saved core boots only in a program with the same build of the crate and of SBCL as the program that saved the
    //! core, and only with the same heap size. The file may contain secrets, so only the file's owner can read it.
}

pub mod safety {
    //! Memory safety: what safe Rust guarantees, and what Lisp code can do.
    //!
    //! The Rust API is memory safe: safe Rust can neither corrupt memory nor take one Lisp object for another, whatever
    //! an implementation of [`IntoLisp`](crate::IntoLisp) writes, and whatever a callback calls, returns, forgets or
    //! panics with. The only `unsafe` function is [`Cx::borrow_bytes`](crate::Cx::borrow_bytes).
    //!
    //! There are two exceptions. Crates such as `stacker` and `corosensei` switch stacks in safe functions: do not use
    //! them on a Lisp thread, that is, in a function that Lisp calls or in the closure of
    //! [`enter`](crate::Lisp::enter). The garbage collector scans only the thread's own stack, and a collection while
    //! the thread runs on another stack usually [ends the process](crate::guide::what_ends_the_process). On such a
    //! stack, a call through [`Lisp`](crate::Lisp) runs on another Lisp thread, and a call through a [`Cx`](crate::Cx)
    //! fails with [`Error::CannotCall`](crate::Error::CannotCall). The other exception is a [`Value`](crate::Value) of
    //! an object that itself refers to an object with dynamic extent: drop this `Value` before the Lisp code that made
    //! the object with dynamic extent returns.
    //!
    //! Lisp code can be unsafe. Code run by [`eval`](crate::Lisp::eval) or [`load_file`](crate::Lisp::load_file), a
    //! function called by name, a binding of a variable of SBCL's or this crate's internal packages
    //! ([`with_bindings`](crate::Lisp::with_bindings)), and a booted core can do anything that this process can do, as
    //! foreign code can:
    //!
    //! ```no_run
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! // Writes to this address of the process, whatever is stored there.
    //! lisp.eval::<()>("(setf (sb-sys:sap-ref-8 (sb-sys:int-sap #x7f0000000000) 0) 1)")?;
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! Other unsafe features are `(safety 0)`, `sb-ext:truly-the`, false declarations of `dynamic-extent`, `sb-alien`,
    //! and symbols of internal packages (such as SBCL's `sb-kernel` and `sb-sys`, and this crate's `sbcl-host`). If
    //! several threads change an object at the same time without a lock, SBCL guarantees nothing. The image is not a
    //! sandbox: evaluate only code that you trust, just as you link only code that you trust. SBCL checks code that
    //! uses no unsafe feature: a wrong index, type or number of arguments signals a condition.
}

pub mod what_ends_the_process {
    //! Faults, and which of them end the process.
    //!
    //! Unlike the server, your program has no supervisor: a fault that the process cannot handle itself ends the
    //! process.
    //!
    //! | fault | consequence |
    //! |---|---|
    //! | endless recursion in Lisp | a `storage-condition`; but if the stack is exhausted during an allocation, as in about one of several hundred recursions that allocate, SBCL ends the process |
    //! | a handler of such a `storage-condition` exhausts the stack again | the thread ends, as with `abort-thread`, and another thread replaces it: the call returns [`Error::Aborted`](crate::Error::Aborted) |
    //! | endless recursion through Rust functions | a `storage-condition`: each call between Lisp and Rust checks that 288 KiB of the control stack besides its guard pages, and (on x86-64) 128 KiB of each of the stacks for bindings and for `with-alien`, are left |
    //! | a type with a recursive `FromLisp` or `Deserialize` reads an object that contains itself or is very deeply nested | [`Error::Conversion`](crate::Error::Conversion). With serde's `untagged`, `tag` or `flatten`, serde goes through the object a second time without a check of the stack, so a type with many levels of its own for each level of the object can end the process, as on any stack overflow in Rust. For such a type, check the depth of the object in Lisp first, set a larger [`control_stack`](crate::Builder::control_stack) (on x86-64), or use an enum in serde's default representation |
    //! | a recursive `IntoLisp` or `Serialize` implementation recurses endlessly | [`Error::Conversion`](crate::Error::Conversion) |
    //! | `apply` spreads a list whose elements take more than half of the control stack (with its default size, some 16 million elements) over the arguments of a function that copies them on the stack, such as `values` | the stack pointer skips the guard pages: a memory fault, a hang, or SBCL ends the process with status 86. If [`call`](crate::Lisp::call) itself has so many arguments, it returns a `storage-condition` |
    //! | a Rust function that Lisp calls needs more stack than is left, which may be as little as 256 KiB | the process ends, as on any stack overflow in Rust |
    //! | a Rust function calls Lisp when less than 16 KiB of the stack are left, not counting the guard pages | [`Error::CannotCall`](crate::Error::CannotCall) |
    //! | garbage is collected while code on a Lisp thread runs on another stack, as in a coroutine of `corosensei` or the closure of `stacker::grow` | SBCL usually ends the process with status 86 |
    //! | after a garbage collection that a call causes, more than 40 % of the heap is in use, and the amount in use has grown by more than a sixth of the heap since the call began | a `storage-condition`, `heap-nearly-exhausted` |
    //! | after a garbage collection, so much of the heap is in use that the next collection might lack room, and no call fills the heap | the threads that Lisp code has started are ended, and a `tracing` event of the target `sbcl` says so |
    //! | handlers of such a `storage-condition` keep filling the heap until six collections are nested | no further handler runs: the call fails with the condition |
    //! | a single object does not fit in the heap | a `storage-condition` |
    //! | the heap is exhausted during a collection, because several calls together keep too much memory in use, or because code cannot be interrupted | SBCL ends the process with status 87 |
    //! | the list of a `(make-list n)`, or of the `&rest` arguments of a function, which SBCL allocates in one piece, does not fit in the heap | SBCL ends the process with status 87. If [`call`](crate::Lisp::call) itself has so many arguments, it returns a `storage-condition`, `heap-nearly-exhausted` |
    //! | handlers of floating-point traps (such as a division by 0.0), other errors, garbage collections and interruptions are nested six deep in a thread, directly or through calls of Rust | the next error calls no handler: the call fails with a `storage-condition`, `interrupt-contexts-exhausted` |
    //! | a thread is interrupted many times at once, for example by `terminate-thread` | interruptions that would be nested too deeply wait |
    //! | more than about 15,000 different special variables are bound while the process runs, including by [`with_bindings`](crate::Lisp::with_bindings) and `progv` | SBCL ends the process with status 86 |
    //! | on x86-64, more than about a million keywords and interned symbols with names such as `*name*` exist, for example keywords made from data | SBCL ends the process with status 86: convert such data to strings |
    //! | Lisp code starts a thread while 1,000 of its threads exist (with a heap of less than 500 MiB, one thread for every 512 KiB of heap) | an error in Lisp |
    //! | SBCL detects that memory is corrupted (by `(safety 0)` or foreign code) | SBCL ends the process with status 86 |
    //! | a panic in a Rust function that Lisp calls | a `rust:host-panic` in Lisp |
    //! | a panic in the closure of `enter` | the panic continues in the caller of `enter` |
    //! | a panic in the destructor of an argument, a result or an error of a host function, of an argument of a restart, or of a function or handler that is replaced or dropped | the panic is caught and ignored |
    //! | a closure that is called once (the closure of `enter`, the `reply` of `Session::submit`) panics, and during the unwinding the destructor of a captured value panics, too | Rust ends the process, as after any panic during unwinding |
    //! | two destructors panic during the same drop, for example the destructors of two elements of a container whose conversion failed, of two streams of a `Builder`, or of an argument and a local variable of a host function | Rust ends the process, as after any panic during unwinding |
    //! | a value of a recursive Rust type is so deeply nested that its destructor needs more stack than the thread has | the process ends, as on any stack overflow in Rust |
    //! | an invalid address in Lisp | `sb-sys:memory-fault-error` |
    //! | an invalid address in Rust, on any thread | the program's own handler of SIGSEGV runs if it has one; otherwise the process ends |
    //! | endless recursion in Rust on an ordinary Rust thread, on aarch64 | SIGSEGV ends the process without Rust's message about the overflow, and the program's own handler does not run: on this processor, SBCL's handlers use no alternate signal stack (`sigaltstack`) |
    //! | `(sb-ext:exit)` | an error in Lisp, "EXIT was called, but the program that this image is part of continues." |
    //! | `(sb-sys:enable-interrupt …)` for SIGURG or SIGALRM | an error in Lisp: SBCL needs its own handlers of these signals |
    //! | `(sb-ext:save-lisp-and-die …)` | an error in Lisp: [`Lisp::save`](crate::Lisp::save) saves the image |
    //! | `abort` in C code, SIGKILL | the process ends |
    //! | code ends one of the program's Lisp threads, for example with `abort-thread` | another thread replaces the ended thread; if no thread can be started, the thread continues |
    //!
    //! SBCL handles the fault signals (SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGABRT) only in Lisp code: in Rust
    //! code, and on threads that are not Lisp threads, these signals go to the handlers that were installed before
    //! boot. On Linux, so do these signals when another process sends them. SIGCHLD and SIGALRM go both to SBCL and to these handlers. SIGUSR2 and SIGURG are reserved for SBCL; such
    //! signals from other processes are ignored. SBCL leaves all other signals to the program, unless Lisp code installs
    //! a handler with `sb-sys:enable-interrupt`: whichever thread receives the signal, that handler runs on SBCL's thread
    //! for signals, and the handler that was installed before boot is called, too. SIGPROF is an exception: its handler
    //! runs on the thread that receives it. A handler that is installed after boot for one of the signals that SBCL
    //! handles must call the previous handler, as the handlers of tokio and `signal-hook` do.
    //!
    //! Code that runs on a Lisp thread, such as a host function or the closure of [`enter`](crate::Lisp::enter), may
    //! change the thread's signal mask, but must restore the mask before it calls Lisp or returns. While a fault signal
    //! is blocked, an error in Lisp that raises this signal ends the process; while SIGUSR2 is blocked, garbage
    //! collections wait; and while SIGURG is blocked, SBCL may end the process.
    //!
    //! A Lisp thread has the signal mask of the thread that booted Lisp, except that SBCL needs these signals
    //! unblocked: the fault signals, SIGUSR2, SIGURG, SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGQUIT, SIGTSTP,
    //! SIGIO, SIGXCPU, SIGXFSZ, SIGVTALRM and SIGWINCH. So a program cannot block one of these signals in all threads
    //! and wait for it with `sigwait` or `signalfd`: a Lisp thread may receive the signal, and the signal's action
    //! applies, which for SIGTERM is by default the end of the process. Install a handler, for example with
    //! `signal-hook`; the handler may run on a Lisp thread.
    //!
    //! An image cannot be unloaded: it ends with the process. To end the program, return from `main` or call
    //! `process::exit`. Calls that still run are then cut off, and their cleanup forms do not run.
    //!
    //! After a `fork` without `exec`, the child process can neither use nor boot Lisp: boots and calls fail with
    //! [`Error::Forked`](crate::Error::Forked), and evaluations of a [`Session`](crate::Session) with an error of kind
    //! `FORKED`; the replies to other requests of a session are dropped. A child that a Lisp thread has forked ends
    //! with status 0 when the Rust code that forked returns to Lisp.
}

pub mod mistakes {
    //! Common mistakes, and what to do instead.
    //!
    //! **Names in the wrong case.** A name in a string is read as Lisp's reader reads it, so `price` means `PRICE`. The
    //! package and the name of a [`Symbol`](crate::Symbol) are case-sensitive:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! use sbcl::Symbol;
    //!
    //! assert_eq!(lisp.eval::<Symbol>("'car")?, Symbol::new("COMMON-LISP", "CAR"));
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! **`nil` is false, the empty list and the absence of a value.** An `Option` reads `nil` as `None`. To distinguish
    //! an absent value from an empty list, let Lisp return a second value, as `gethash` does:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! assert_eq!(lisp.eval::<Option<Vec<i64>>>("nil")?, None);
    //! assert!(lisp.eval::<Vec<i64>>("nil")?.is_empty());
    //! lisp.load_str("(defvar *lists* (list (cons :empty nil)))")?;
    //! let (list, found): (Vec<i64>, bool) =
    //!     lisp.eval("(let ((entry (assoc :empty *lists*))) (values (cdr entry) (consp entry)))")?;
    //! assert!(list.is_empty() && found);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! **A number that does not fit.** No conversion truncates an integer: if an integer is out of the type's range,
    //! the result is an [`Error::Conversion`](crate::Error::Conversion). A conversion to `f64` accepts any real number
    //! in the range of `f64` and rounds it to the nearest double.
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! assert!(lisp.eval::<u8>("256").is_err());
    //! assert_eq!(lisp.eval::<f64>("1/2")?, 0.5);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! **Code as a string for each call.** If values are inserted into code, the code must be built, read and usually
    //! compiled for each call, and breaks if, for example, a value contains a quotation mark that is not escaped.
    //! Define a function once, and call the function with arguments.
    //!
    //! **A lock held while calling Lisp.** The call may run a Rust function that takes the same lock, or wait for
    //! another thread that takes this lock: a deadlock. Copy the data that the call needs, release the lock, then make
    //! the call.
    //!
    //! **A handler that waits for another thread.** The closure of [`with_handler`](crate::Lisp::with_handler) runs
    //! where the error is signalled. SBCL may hold a lock of its own there, for example while it interns a symbol or
    //! defines a class, and a thread that needs the lock waits until the closure has returned. Call Lisp on the
    //! closure's own thread.
    //!
    //! **A time limit for Rust code.** [`with_timeout`](crate::Lisp::with_timeout) interrupts Lisp. A Rust function
    //! that Lisp has called is not interrupted: the call ends only after this function has returned.
    //!
    //! **A second boot.** A process has only one image, so the tests in one process share this image:
    //! [`Lisp::get_or_boot`](crate::Lisp::get_or_boot) returns a handle to this image in all tests.
}

pub mod performance {
    //! Costs of calls and conversions, and how to avoid them.
    //!
    //! **The hand-over.** A call from an ordinary Rust thread is handed over to a Lisp thread, and the result is handed
    //! back. Inside [`enter`](crate::Lisp::enter), calls are direct and therefore several times as fast. Use `enter`
    //! for many small calls:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! lisp.load_str("(defun square (n) (declare (fixnum n)) (* n n))")?;
    //! let sum: i64 = lisp.enter(|cx| {
    //!     let square = cx.function("square")?;
    //!     (1..=1000).map(|n| square.call::<i64>((n,))).sum()
    //! })?;
    //! assert_eq!(sum, 333_833_500);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! **Looking up names, and compiling.** [`Lisp::function`](crate::Lisp::function) looks a name up once, and the
    //! returned [`Function`](crate::Function) follows redefinitions; [`Lisp::call`](crate::Lisp::call) looks the name
    //! up for each call. [`Lisp::eval`](crate::Lisp::eval) reads the text each time, and compiles each form unless the
    //! form is simple, such as a variable or a call with simple arguments.
    //!
    //! **Conversions.** A conversion copies the object. Keep large objects in Lisp and pass a [`Value`](crate::Value)
    //! instead: passing a `Value` costs the same for objects of any size. [`Cx::copy_bytes`](crate::Cx::copy_bytes)
    //! copies vectors of octets as fast as memory allows.
    //!
    //! **Generic arithmetic.** Without declarations, Lisp arithmetic works on numbers of all types. Type declarations
    //! (`fixnum`, `double-float`) can make inner loops many times faster. SBCL checks these declarations, except in
    //! code that is compiled with `(safety 0)`.
    //!
    //! **Garbage.** A garbage collection stops all Lisp threads, even in host functions and closures of
    //! [`enter`](crate::Lisp::enter), for a time that grows with the amount of live data: usually a few milliseconds.
    //! Other Rust threads continue, until they wait for a Lisp thread.
    //!
    //! **One thread.** By default only one call at a time runs Lisp code. [`Builder::threads`](crate::Builder::threads)
    //! sets how many calls run Lisp code in parallel.
    //!
    //! The repository's `docs/benchmarks.md` lists measured times of calls and conversions; `make bench` repeats the
    //! measurements.
}
