//! Checkpoints: saved images as files ([store]), the saving of a running image ([save]), and automatic saves ([autosave]).

pub(crate) mod autosave;
pub(crate) mod save;
pub(crate) mod store;
