//! Tests that drive the server's binary, one module per theme. `cargo test --test mcp debugger::` runs one
//! theme, `cargo test --test mcp plain` the tests without a supervisor.

/// The tests run concurrently in one process, and some of them time answers. With glibc's allocator, a thread that
/// allocates without a pause can keep another thread waiting for the lock of an arena for a second.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod bare;
mod client;
mod libraries;
mod processes;
mod server_mode;

mod answer_limits;
mod attach;
mod background;
#[cfg(target_os = "linux")]
mod book;
mod check;
mod checkpoint_fork;
mod checkpoints;
mod code_search;
mod command_line;
mod commands;
mod confinement;
mod debugger;
mod differential;
mod elicitation;
mod error_details;
mod fuzz;
mod hostile_code;
mod loading;
mod mcp_protocol;
mod plain_process;
mod portability;
mod recording;
mod recovery;
#[cfg(target_os = "linux")]
mod reference;
mod reloading;
mod repl;
mod run_program;
mod run_tests;
mod session_states;
mod sessions;
mod soak;
mod source_locations;
mod stalls;
mod structured;
mod supervisor;
mod tool_sets;
mod tracing;
mod transport;
