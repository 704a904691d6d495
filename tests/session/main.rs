//! The session in this process: one image, which all tests share and take in turns.

mod support;

mod backtraces;
mod compiler;
mod connections;
mod corpus;
mod error_state;
mod evaluation;
mod forward_references;
mod inspection;
mod standard_streams;
mod threads;
mod unwinding;
