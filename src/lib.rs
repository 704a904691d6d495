//! Steel Bank Common Lisp (SBCL) inside a Rust process.
//!
//! ```
//! use sbcl::{Error, Lisp};
//!
//! let lisp = Lisp::get_or_boot()?;
//! lisp.load_str("(defun price (n &key (rate 2)) (* n rate))")?;
//! assert_eq!(lisp.call::<i64>("price", (21,))?, 42);
//!
//! lisp.define("host:shout", "Return TEXT in upper case.", |text: String| text.to_uppercase())?;
//! assert_eq!(lisp.eval::<String>(r#"(host:shout "lisp")"#)?, "LISP");
//!
//! match lisp.eval::<i64>("(/ 1 0)") {
//!     Err(Error::Condition(condition)) => assert!(condition.is("arithmetic-error")),
//!     other => panic!("{other:?}"),
//! }
//! # Ok::<(), Error>(())
//! ```
//!
//! [`Lisp`] is the handle to the image, the running Lisp system in this process. The functions of `Lisp` boot SBCL,
//! evaluate code, call Lisp functions, define Rust functions for Lisp, convert values, and save the image. The
//! [`guide`] explains the library by topic, beginning with [values](guide::values) and ending with [common
//! mistakes](guide::mistakes) and [performance](guide::performance). A process has at most one image, and some faults
//! in Lisp code end the process: see [what ends the process](guide::what_ends_the_process).
//!
//! A [`Session`] is for programs that exchange text instead of values, such as the MCP server: a session evaluates code
//! as a REPL does, records an error's message, backtrace and restarts, and can hold a failed evaluation for debugging.
//! [`mcp`] serves an image's session to MCP clients.
//!
//! To use the crate without the server, from a clone of the crate's repository:
//!
//! ```toml
//! [dependencies]
//! sbcl-mcp = { path = "/path/to/clone", default-features = false, features = ["core"] }
//! ```
//!
//! # Features
//!
//! | feature | default | effect |
//! |---|---|---|
//! | `core` | yes | The program contains the plain core, into which none of the program's Lisp code is loaded. Without this feature, the program needs another core: a core that the program's build script makes from Lisp code with the crate `sbcl-build`, a saved core, or a directory with a core. [`Builder::core`] names the saved core or the directory. |
//! | `mcp` | yes | The module [`mcp`], which is the MCP server, and the program `sbcl-mcp`. Without this feature, the library has fewer dependencies. |
//! | `num-bigint` | no | Conversions between Lisp integers and the integers of the crate `num-bigint`, which have any size. |
//!
//! # Platforms
//!
//! | platform | status |
//! |---|---|
//! | x86-64 Linux, glibc 2.31 or newer | tested |
//! | aarch64 Linux | the server has run in QEMU only; the library has never run there |
//! | macOS, Windows | not supported |
//!
//! The crate needs Rust 1.89 or newer. The first build compiles SBCL, which takes some minutes; later builds use the
//! result from a cache.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod audience;
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
#[cfg_attr(docsrs, doc(cfg(feature = "mcp")))]
pub mod mcp;
#[cfg(feature = "mcp")]
mod supervisor;

pub use config::{ImageConfig, Limits, OnError};
pub use embedding::{
    Arguments, Builder, Call, Complex, Condition, ConversionError, Cx, Error, Frame, FromLisp, Function, HostFunction,
    HostResult, InterruptHandle, IntoLisp, Lisp, LocalFunction, Ratio, Reader, Restart, RestartOffer, Serde, Shape,
    Symbol, Value, Values, Writer, keyword,
};
pub use error::{BootError, EndedHold, EvaluationError, HoldEnd, HoldError, InspectError, LimitError};
#[doc(hidden)]
pub use image::signals::exit_now;
pub use outcome::{ErrorRecord, EvaluationStatus, Outcome, Progress};
pub use session::{Background, Evaluation, JobId, RestartDesignator, Resumed, Session, TimeLimit, WaitId};

/// The version of this crate.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of SBCL that this crate is built with.
pub const SBCL_VERSION: &str = env!("SBCL_MCP_VERSION");

/// Returns the identity of this build of the crate and its SBCL. A saved core boots only in a program whose build has
/// the same identity as the build that saved the core.
fn build_id() -> String {
    format!("{VERSION} {SBCL_VERSION} {}", env!("SBCL_MCP_BUILD"))
}
