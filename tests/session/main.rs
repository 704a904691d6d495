//! Tests of the session, in this process: they share one image, and run one at a time.

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
