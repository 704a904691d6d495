//! Checkpoints: saved images, as files ([store]), and how a running image comes to be one: when a client asks for it ([save]),
//! and without being asked ([autosave]).

pub(crate) mod autosave;
pub(crate) mod save;
pub(crate) mod store;
