//! Everything that drives the server's binary: one module a theme. `cargo test --release --test mcp debugger::` runs one,
//! `cargo test --release --test mcp plain` what runs without a supervisor.

/// The tests run side by side in one process, and some of them time answers. With the allocator of glibc, a thread that
/// allocates without a pause can keep the lock of an arena from another thread for a second.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod client;
mod libraries;
mod mode;
mod processes;

mod answers;
mod ask;
mod attach;
mod away;
mod background;
#[cfg(target_os = "linux")]
mod book;
mod check;
mod checkpoint_copies;
mod checkpoints;
mod command_line;
mod commands;
mod confinement;
mod debugger;
mod differential;
mod error_details;
mod finding;
mod fuzz;
mod loading;
mod mcp_protocol;
mod places;
mod plain_process;
mod programs;
mod recording;
mod recovery;
#[cfg(target_os = "linux")]
mod reference;
mod reloading;
mod repl;
mod sessions;
mod soak;
mod stalls;
mod states;
mod structured;
mod supervisor;
mod survival;
mod testing;
mod tool_sets;
mod tracing;
mod transport;
