//! JSON-RPC over file descriptors: lines, frames, pending requests and the event loop. The server and the supervisor
//! share most of these modules.

pub(crate) mod attach;
pub(crate) mod descriptors;
pub(crate) mod event_loop;
pub(crate) mod frame;
pub(crate) mod framing;
pub(crate) mod id_scanner;
pub(crate) mod inflight;
pub(crate) mod output;
pub(crate) mod recorder;
pub(crate) mod route;
pub(crate) mod signals;
pub(crate) mod stream;
pub(crate) mod waker;
mod write_buffer;

pub(crate) use write_buffer::WriteBuffer;
