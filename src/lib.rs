//! A running Common Lisp image (SBCL) inside a Rust process.
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
//! A process has one image: [`Session::start`] boots it, and a second boot is an error. A [`Session`] is cheap to clone
//! and may be used from any thread; its evaluations run one after another on a Lisp thread. A Lisp error is not a Rust
//! error: it is an [`Outcome`] that contains everything SBCL knows about the error.
//!
//! A [`Session`] exchanges text. To exchange values, functions and conditions, start with [`Lisp`] and the [`guide`].
//!
//! # Features
//!
//! - `mcp` (default): the MCP server and the command line. Without this feature the library has few dependencies.
//! - `core` (default): the program contains the plain core. Without this feature, the program needs a core of its own,
//!   which its build script makes from the program's Lisp code with the crate `sbcl-build`.
//! - `num-bigint`: conversions of integers of any size.

#![deny(unsafe_code)]

mod config;
mod embedding;
#[cfg(feature = "mcp")]
#[doc(hidden)]
pub mod environment;
mod error;
pub mod guide;
mod image;
mod os;
pub mod outcome;
#[cfg(feature = "mcp")]
mod recovery;
pub mod report;
#[doc(hidden)]
pub mod result_kind;
#[cfg(feature = "mcp")]
mod rpc;
#[cfg(feature = "mcp")]
mod sandbox;
#[cfg(feature = "mcp")]
mod schema;
mod session;
mod tool_names;

#[cfg(feature = "mcp")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "mcp")]
pub mod mcp;
#[cfg(feature = "mcp")]
mod supervisor;

pub use config::{ImageConfig, Limits, OnError};
pub use embedding::{
    Arguments, Builder, Call, Complex, Condition, ConversionError, Cx, Error, Frame, FromLisp, Function, HostFunction,
    HostResult, InterruptHandle, IntoLisp, Lisp, LocalFunction, Ratio, Reader, Restart, RestartOffer, Serde, Shape,
    Symbol, Value, Values, Writer, keyword,
};
pub use error::{BootError, EvaluationError, HoldError, InspectError, LimitError};
#[doc(hidden)]
pub use image::signals::exit_now;
pub use outcome::{ErrorRecord, EvaluationStatus, Outcome, Progress};
pub use session::{Background, Evaluation, JobId, RestartDesignator, Resumed, Session, TimeLimit, WaitId};

/// The version of this crate.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of SBCL that this crate is built with.
pub const SBCL_VERSION: &str = "2.6.4";

/// Returns the identity of this build of the crate and its SBCL. A saved core boots only in the build that saved it.
fn build_id() -> String {
    format!("{VERSION} {SBCL_VERSION} {}", env!("SBCL_MCP_BUILD"))
}
