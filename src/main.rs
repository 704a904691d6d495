//! The command `sbcl-mcp`: an MCP server for SBCL, with a command line for people.

use std::thread;

use rustix::process::{Resource, getrlimit};

/// The stack size in bytes that the command needs. The main thread has less if `ulimit -s` is lower.
const STACK_SIZE: u64 = 8 << 20;

fn main() {
    if getrlimit(Resource::Stack).current.is_none_or(|limit| limit >= STACK_SIZE) {
        sbcl::cli::main();
    }
    let thread = thread::Builder::new().stack_size(STACK_SIZE as usize).spawn(|| -> () { sbcl::cli::main() });
    match thread.map(thread::JoinHandle::join) {
        // `cli::main` ends the process, so the thread ends only after a panic, which has been reported.
        Ok(_) => std::process::exit(101),
        Err(error) => {
            eprintln!(
                "sbcl-mcp cannot start a thread with a stack of {} MiB: {error}. Raise the stack limit instead: \
                 ulimit -s {}",
                STACK_SIZE >> 20,
                STACK_SIZE >> 10
            );
            std::process::exit(1);
        }
    }
}
