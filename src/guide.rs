//! Lisp in a Rust program, a chapter a theme. Every example compiles and runs.
//!
//! | chapter | says |
//! |---|---|
//! | [`values`] | what becomes of what: conversions, handles, your own types |
//! | [`functions`] | calling Lisp, and changing it while it runs |
//! | [`host_functions`] | Rust functions that Lisp calls |
//! | [`conditions`] | errors, restarts, handlers, warnings |
//! | [`threads`] | what runs where, time limits, cancelling, futures |
//! | [`output`] | what Lisp prints, and what it reads |
//! | [`own_core`] | a program that has its Lisp compiled in |
//! | [`saving`] | the image as a file, and going on with it in another process |
//! | [`safety`] | what safe Rust is promised, and what Lisp code can do |
//! | [`what_ends_the_process`] | the dangers, and what is done about each |
//!
//! The example `guided_tour` has it all on a page.

pub mod values {
    //! What becomes of what.
    //!
    //! [`FromLisp`](crate::FromLisp) and [`IntoLisp`](crate::IntoLisp) list the types. What is asked for decides:
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
    //! // What is something else is an error that says what was expected, what came, and where.
    //! let error = lisp.eval::<Vec<i8>>("(list 1 2 300)").unwrap_err();
    //! assert_eq!(error.to_string(), "expected an integer from -128 to 127, but found 300 (in element 2)");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! Conversions copy. An object that stays what it is, is a [`Value`](crate::Value): a handle that keeps it alive, and may
    //! be stored, sent and dropped anywhere.
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
    //! Structs and enums go through serde, as property lists and keywords: [`Serde`](crate::Serde). Integers beyond 128 bits
    //! are `num_bigint::BigInt`, with the feature `num-bigint`; quotients are [`Ratio`](crate::Ratio). Octets are copied at
    //! the speed of memory by [`Cx::copy_bytes`](crate::Cx::copy_bytes); [`Cx::borrow_bytes`](crate::Cx::borrow_bytes) lends
    //! them where they are, which is `unsafe`, as another Lisp thread may write there.
}

pub mod functions {
    //! Calling Lisp, and changing it while it runs.
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
    //! // Looked up once; it follows its redefinition, also while other threads call it.
    //! let price = lisp.function("guide:price")?;
    //! assert_eq!(price.call::<i64>((21,))?, 42);
    //! lisp.load_str("(in-package :guide) (defun price (n) n)")?;
    //! assert_eq!(price.call::<i64>((21,))?, 21);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! [`load_str`](crate::Lisp::load_str) and [`load_file`](crate::Lisp::load_file) load as `load` does. A call that runs
    //! while its function is defined anew ends with the definition that it began with: none is lost.
    //!
    //! Each call from a thread of Rust's is handed to a Lisp thread. Many small ones are better made there: the closure of
    //! [`enter`](crate::Lisp::enter) runs on a Lisp thread, and what it calls, it calls directly.
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
    //! // An Err is an error in Lisp, with the restart USE-VALUE; a panic is one, too.
    //! let text: String = lisp.eval(
    //!     r#"(handler-bind ((rust:host-error (lambda (e) (declare (ignore e)) (use-value "none"))))
    //!          (host:read "/nowhere"))"#,
    //! )?;
    //! assert_eq!(text, "none");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! Lisp calls them on any of its threads, and several times at once, so they are `Send + Sync`. While one waits, neither
    //! collections nor other Lisp threads wait for it. [`define_as`](crate::Lisp::define_as) takes a lambda list, with
    //! optional and keyword arguments; [`Values`](crate::Values) are several. A closure that must stay on its thread is a
    //! [local function](crate::Cx::local_function).
    //!
    //! A session's evaluations run one after the other, so a function that one of them calls cannot wait for the next:
    //! [`Session::evaluate`](crate::Session::evaluate) gives an error of kind `DEADLOCK` there, at once. Call Lisp as any
    //! function does ([`Lisp::eval`](crate::Lisp::eval) evaluates on the same thread), or
    //! [`submit`](crate::Session::submit) the code. A function that waits for a thread which calls `evaluate` is not
    //! recognised: it waits for ever.
    //!
    //! What Lisp does to leave (`throw`, `return-from`, a restart) passes Rust functions that it has called by way of
    //! [`Error::Unwinding`](crate::Error::Unwinding): pass that on, and the destructors run as they should.
}

pub mod conditions {
    //! Errors, restarts, handlers, warnings.
    //!
    //! An error that nothing in Lisp handles is an [`Error::Condition`](crate::Error::Condition), with everything that SBCL
    //! knows of it.
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
    //! // Decided where it happens, before anything is unwound.
    //! let careful = lisp.with_handler(|c: &Condition| c.is("division-by-zero").then(|| Restart::invoke("use-value", 0)));
    //! assert_eq!(careful.eval::<i64>("(+ 1 (restart-case (/ 1 0) (use-value (v) v)))")?, 1);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! Warnings of what is compiled and loaded go to [`on_warning`](crate::Builder::on_warning), or to `tracing`.
}

pub mod threads {
    //! What runs where, time limits, cancelling, futures.
    //!
    //! A [`Lisp`](crate::Lisp) may be cloned, sent and used anywhere. Calls run on
    //! [`threads`](crate::Builder::threads) of Lisp's, side by side; one that is inside Rust leaves its place to a
    //! [spare one](crate::Builder::spare_threads), so that Rust may wait there for threads that call Lisp. Calls from within
    //! `enter`, and from a function that Lisp has called, run on the thread that they are made on.
    //!
    //! Options are a handle's, and of the functions that it looks up; they are no thread's.
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
    //! An interrupted call unwinds and runs its cleanup forms, which have a grace period of
    //! [5 seconds](crate::Builder::cleanup) before they are interrupted, too; a Rust function that Lisp has called is waited
    //! for. Interrupting a call again changes nothing: one interruption is under way at most.
    //! [`eval_async`](crate::Lisp::eval_async), [`call_async`](crate::Lisp::call_async) and
    //! [`enter_async`](crate::Lisp::enter_async) give futures of no particular runtime, which interrupt the call when they are
    //! dropped.
    //!
    //! The token of `enter` cannot leave its closure or its thread, nor can what Lisp may call on any thread be bound to one:
    //! the compiler sees to that.
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
    //! What Lisp prints, and what it reads.
    //!
    //! `*standard-output*` is this process' standard output until [`stdout`](crate::Builder::stdout) says otherwise, and so
    //! with [`stderr`](crate::Builder::stderr) and [`stdin`](crate::Builder::stdin). They are chosen at boot, for all threads.
    //!
    //! ```no_run
    //! use std::io::{Cursor, sink};
    //!
    //! let lisp = sbcl::Lisp::builder().stdout(sink()).stdin(Cursor::new("(1 2 3)")).boot()?;
    //! assert_eq!(lisp.eval::<Vec<i64>>("(read)")?, [1, 2, 3]);
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! [`trace_output`](crate::Builder::trace_output) makes events of `tracing` of what is printed, a line each, beside those
    //! that warnings are already: so it is in the log of a service, with the rest.
    //!
    //! A thread of the library's own serves them, one piece after the other, and who prints waits for it. So a call that has
    //! returned has its output written. A call that is interrupted, as by its time limit, waits no longer: a stream that
    //! blocks does not keep it, and what it prints from then on is written later, up to 1 MiB. A stream that calls Lisp gets
    //! [`Error::CalledByStream`](crate::Error::CalledByStream), since Lisp may be waiting for it; one that calls
    //! [`Session::evaluate`](crate::Session::evaluate) gets an outcome of kind `DEADLOCK`.
    //!
    //! What one call prints is best had from Lisp itself:
    //!
    //! ```
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! assert_eq!(lisp.eval::<String>("(with-output-to-string (*standard-output*) (princ 1/3))")?, "1/3");
    //! # Ok::<(), sbcl::Error>(())
    //! ```
}

pub mod own_core {
    //! A program that has its Lisp compiled in.
    //!
    //! The crate `sbcl-build`, called by a program's build script, compiles an ASDF system or a directory of Lisp into the
    //! core that the program carries: the example `bundled` does so. Without the default feature `core` the plain one is not
    //! carried, too. [`Builder::core`](crate::Builder::core) names a directory with a core in place of either.
}

pub mod saving {
    //! The image as a file, and going on with it in another process.
    //!
    //! [`Lisp::save`](crate::Lisp::save) writes the whole image, values included, while the program goes on;
    //! [`Builder::core`](crate::Builder::core) boots it, in the time of any other boot.
    //!
    //! ```no_run
    //! use sbcl::{BootError, Error, Lisp};
    //!
    //! let lisp = match Lisp::builder().core("app.core").boot() {
    //!     // There is none, or another build of this program saved it: begin anew.
    //!     Err(Error::Boot(BootError::OtherBuild { .. } | BootError::Core { .. })) => Lisp::boot()?,
    //!     booted => booted?,
    //! };
    //! lisp.define("host:now", "Return the time.", || 7)?; // Functions in Rust are defined at each boot.
    //! lisp.eval::<()>("(defvar *visits* 0) (incf *visits*)")?;
    //! lisp.save("app.core")?;
    //! # Ok::<(), Error>(())
    //! ```
    //!
    //! | | in the core |
    //! |---|---|
    //! | variables, functions, closures, macros, packages, tables, classes, instances, loaded systems | as they were |
    //! | a [`Value`](crate::Value), a [`Function`](crate::Function) | means nothing there; what only they kept is gone |
    //! | a function that was [defined](crate::Lisp::define) in Rust | a `rust:host-error`, until it is defined again |
    //! | a [local function](crate::Cx::local_function) | a `rust:host-error` for good |
    //! | calls that other threads are in | cut off where they are, without cleanup forms; locks are free |
    //! | threads, timers, files, sockets, foreign memory | gone |
    //!
    //! A copy of the process saves (`fork`). In it there is one thread, of Lisp's; nothing of the host runs there, and
    //! no lock of the host's is waited for. The program may go on with whatever it does, but what calls change at that
    //! moment, a hash table for instance, may be in the core half changed: have them and whoever saves hold a lock.
    //!
    //! There is no saving without a copy: it is refused where the process cannot be copied. It would end the process, with
    //! the host's threads and Rust's frames on Lisp's stacks.
    //!
    //! A core is for the very build that saved it (of the crate, and of SBCL), under a heap of the same size. It may
    //! hold secrets: its file is its owner's alone.
}

pub mod safety {
    //! What safe Rust is promised, and what Lisp code can do.
    //!
    //! Memory safety is promised for the Rust API. Whatever safe Rust writes in an
    //! [`IntoLisp`](crate::IntoLisp), returns, forgets, panics with or calls from within a callback, no memory is corrupted
    //! and no object is taken for another one. [`Cx::borrow_bytes`](crate::Cx::borrow_bytes) is the one `unsafe` function.
    //!
    //! It is not promised for Lisp code that asks for the opposite. [`eval`](crate::Lisp::eval),
    //! [`load_file`](crate::Lisp::load_file), a function that is called by name and a core that is booted can do anything
    //! that this process can, as foreign code in it could:
    //!
    //! ```no_run
    //! # let lisp = sbcl::Lisp::get_or_boot()?;
    //! // Writes into this process, wherever that is.
    //! lisp.eval::<()>("(setf (sb-sys:sap-ref-8 (sb-sys:int-sap #x7f0000000000) 0) 1)")?;
    //! # Ok::<(), sbcl::Error>(())
    //! ```
    //!
    //! So do `(safety 0)`, declarations that are not true in such code, `sb-alien`, symbols of SBCL's internal packages
    //! (`sb-kernel`, `sb-sys`, `sbcl-host`), and threads that change one object at once without a lock, where SBCL itself
    //! promises nothing. Evaluate only what you trust, as you link only what you trust: the image is no sandbox. Ordinary
    //! Lisp is checked by SBCL: a wrong index, type or number of arguments is a condition.
}

pub mod what_ends_the_process {
    //! The dangers, and what is done about each. There is no supervisor around a program of yours, as there is one around the
    //! server: what cannot be survived from inside ends it.
    //!
    //! | what | what happens |
    //! |---|---|
    //! | recursion without end in Lisp | a `storage-condition` |
    //! | the same by way of Rust functions | a `storage-condition`: the stack is looked at where Lisp and Rust call each other, and 256 KiB must be left |
    //! | a type whose `FromLisp` or `Deserialize` is recursive reads an object that holds itself, or is nested very deeply | [`Error::Conversion`](crate::Error::Conversion) |
    //! | a type whose `IntoLisp` or `Serialize` is recursive has no end | the same |
    //! | a Rust function that Lisp calls uses more stack than that | the process ends, as at any other overflow in Rust |
    //! | a call keeps more than 40 % of the heap, or a sixth of it more than there was | a `storage-condition`, `heap-nearly-exhausted`; it is looked at after each collection |
    //! | a single object that does not fit | a `storage-condition` |
    //! | the heap runs out during a collection all the same: several calls at once each keep a good part of it, or code lets nothing interrupt it; or `(make-list n)` does not fit, which SBCL makes in one piece | SBCL ends the process, with status 87 |
    //! | SBCL finds itself damaged (by `(safety 0)`, or foreign code) | the process ends, with status 86 |
    //! | a panic in a Rust function that Lisp calls | a `rust:host-panic` in Lisp |
    //! | a panic in the closure of an `enter` | goes on in the caller |
    //! | a panic in the destructor of what such a function was given, returns or fails with, of a function or handler that is replaced or dropped, or of a restart's argument | ends there |
    //! | one in the destructor of what a closure holds that is called once (`enter`, a reply), while the closure's own panic unwinds | Rust ends the process, as anywhere |
    //! | a wrong address in Lisp | `sb-sys:memory-fault-error` |
    //! | one in Rust, on whatever thread | the program's own handler of SIGSEGV, if it has one; else its end |
    //! | `(sb-ext:exit)` | an error in Lisp, "EXIT was called: the program that this image is part of goes on." |
    //! | `abort` in C code, SIGKILL | the end |
    //! | a Lisp thread that ends by itself | another one takes its place |
    //!
    //! Signals: SBCL needs the faults (SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGABRT), SIGUSR2 and SIGURG, all on its own
    //! threads only; what comes elsewhere goes to the handlers that were there before boot. SIGCHLD and SIGALRM go to both.
    //! All others are the program's. A handler that is installed after boot has to call the one that was there before, as the
    //! runtimes do (tokio, `signal-hook`).
    //!
    //! Lisp threads may hold locks anywhere, so a program ends best by returning from `main`, or by `process::exit`; images
    //! cannot be unloaded. After `fork` without `exec` there is no Lisp in the child.
}
