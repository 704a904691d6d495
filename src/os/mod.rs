//! Threads, timers, descriptors and processes. Nothing here depends on Lisp or MCP.

pub(crate) mod busy_poll;
pub(crate) mod clock;
pub(crate) mod event_count;
#[cfg(feature = "mcp")]
pub(crate) mod files;
pub(crate) mod helper_threads;
pub(crate) mod panics;
#[cfg_attr(
    not(feature = "mcp"),
    allow(dead_code, reason = "without the server, descriptors are polled only for reading")
)]
pub(crate) mod poll_set;
#[cfg(feature = "mcp")]
pub(crate) mod processes;
#[cfg(feature = "mcp")]
pub(crate) mod temporary;
pub(crate) mod thread_supply;
