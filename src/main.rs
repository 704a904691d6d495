//! The command `sbcl-mcp`: SBCL for MCP clients, and for a person's one-liners.

use std::thread;

use rustix::process::{Resource, getrlimit};

/// The stack in bytes that what runs here gets, whatever `ulimit -s` leaves the main thread.
const STACK: u64 = 8 << 20;

fn main() {
    if getrlimit(Resource::Stack).current.is_none_or(|limit| limit >= STACK) {
        sbcl::cli::main();
    }
    let thread = thread::Builder::new().stack_size(STACK as usize).spawn(|| -> () { sbcl::cli::main() });
    match thread.map(thread::JoinHandle::join) {
        // It has ended the process, or has said why it cannot.
        Ok(_) => std::process::exit(101),
        Err(error) => {
            eprintln!("sbcl-mcp cannot start a thread: {error}; ulimit -s {} does without one", STACK >> 10);
            std::process::exit(1);
        }
    }
}
