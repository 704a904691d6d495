//! A living Common Lisp image (SBCL) in your process.
//!
//! ```no_run
//! use sbcl::{Evaluation, ImageConfig, Limits, Session};
//!
//! let session = Session::start(&ImageConfig::default(), Limits::default())?;
//! assert!(!session.evaluate(Evaluation::new("(defun square (x) (* x x))")).is_error());
//! let outcome = session.evaluate(Evaluation::new("(square 12)"));
//! assert_eq!(outcome.result.as_ref().unwrap()[0].text, "144");
//!
//! let outcome = session.evaluate(Evaluation::new("(/ 1 0)"));
//! let error = outcome.result.as_ref().unwrap_err();
//! assert_eq!(error.kind, "DIVISION-BY-ZERO");
//! println!("{}", sbcl::report::backtrace(Some(&error), 20));
//! # Ok::<(), sbcl::BootError>(())
//! ```
//!
//! There is one image a process: [`Session::start`] boots it, and a second boot is an error. A [`Session`] is cheap to
//! clone and may be used from any thread; evaluations run one after another on a thread of Lisp's own. A Lisp error is
//! not a Rust error: it is an [`Outcome`] that holds everything SBCL knows of it.
//!
//! Rust programs that want values, functions and conditions rather than text begin with [`Lisp`] and the [`guide`].
//!
//! Features: `mcp` (default) brings the server and the command line; without it the library has few dependencies. `core`
//! (default) has the program carry the plain core; without it the program carries one of its own, with its Lisp compiled
//! in, which the crate `sbcl-build` makes in a build script. `num-bigint` converts integers of any size.

#![deny(unsafe_code)]

mod alarm;
#[cfg(feature = "mcp")]
mod attach;
mod busy_poll;
pub mod check;
mod clock;
mod config;
#[cfg(feature = "mcp")]
mod confinement;
#[cfg(feature = "mcp")]
mod durable;
#[cfg(feature = "mcp")]
#[doc(hidden)]
pub mod environment;
mod error;
pub mod guide;
mod helper_threads;
#[cfg(feature = "mcp")]
mod id_scanner;
mod image;
mod interruption;
mod lisp;
mod listed;
pub mod outcome;
mod panics;
#[cfg_attr(not(feature = "mcp"), allow(dead_code, reason = "the library alone only reads"))]
mod poll_set;
#[cfg(feature = "mcp")]
mod recovery;
pub mod report;
#[doc(hidden)]
pub mod result_kind;
#[cfg(feature = "mcp")]
mod rpc;
#[cfg(feature = "mcp")]
mod scratch;
mod seal;
mod session;

#[cfg(feature = "mcp")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "mcp")]
pub mod mcp;
#[cfg(feature = "mcp")]
mod supervisor;
mod thread_supply;

pub use config::{ImageConfig, Limits, OnError};
pub use error::{BootError, EvaluationError, HoldError, InspectError, LimitError};
#[doc(hidden)]
pub use image::signals::exit_now;
pub use lisp::{
    Arguments, Builder, Call, Complex, Condition, ConversionError, Cx, Error, Frame, FromLisp, Function, HostFunction,
    HostResult, InterruptHandle, IntoLisp, Lisp, LocalFunction, Ratio, Reader, Restart, RestartOffer, Serde, Shape,
    Symbol, Value, Values, Writer, keyword,
};
pub use outcome::{ErrorRecord, EvaluationStatus, Outcome, Progress};
pub use session::{Background, Evaluation, JobId, RestartDesignator, Resumed, Session, TimeLimit, WaitId};

/// This crate's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of SBCL that this crate is built with.
pub const SBCL_VERSION: &str = "2.6.4";

/// What no other build of this crate and its SBCL is called: a core that one has saved boots in no other.
fn build() -> String {
    format!("{VERSION} {SBCL_VERSION} {}", env!("SBCL_MCP_BUILD"))
}
