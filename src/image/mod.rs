//! The image: libsbcl and its core, loaded into this process once and never unloaded.
//!
//! All unsafe code of the crate is here, except that `Cx::borrow_bytes` calls [`borrow::borrow_octets`].
//! `ffi/sbcl_host.h` is the contract between Rust and Lisp.

mod answers;
#[allow(unsafe_code, dead_code, missing_docs, unreachable_pub, non_camel_case_types, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod bindings;
mod boot;
pub(crate) mod borrow;
#[cfg(all(feature = "mcp", target_os = "linux", target_env = "gnu"))]
pub(crate) mod c_stderr;
mod callbacks;
pub(crate) mod fingerprint;
mod float_traps;
pub(crate) mod heap;
pub(crate) mod interruption;
mod library;
mod machine;
pub(crate) mod message;
pub(crate) mod message_buffer;
mod outgoing;
pub(crate) mod process;
pub(crate) mod program;
mod protocol;
pub(crate) mod signals;

#[cfg(feature = "mcp")]
pub(crate) use boot::address_space;
pub(crate) use boot::{Embedding, boot};
pub(crate) use callbacks::current_lane_and_job;
#[cfg(feature = "mcp")]
pub(crate) use library::has_embedded_core;
pub(crate) use protocol::{Event, Host, InterruptReason, ItemKind, Job, JobKind, Lane, Text};
