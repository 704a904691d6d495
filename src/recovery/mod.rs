//! Recovery: what a worker reports, what of it outlives the image, and how the next image is made like the last one.
//!
//! A worker reports [events](event) by its [reporter]. Its supervisor folds them into the [recovery state](state), which is
//! kept in memory and, for a persistent session, in the [log] as well. When the worker is lost, the crash is recorded in
//! the state ([`RecoveryState::lost`](state::RecoveryState::lost)), and the next worker is given that state and nothing
//! else: it boots the last [checkpoint], [replays](restore) the definitions since, and [tells](messages) its clients.
//! Numbers that must be known even of a worker that is gone from one instruction to the next are on the
//! [status page](status_page).

pub(crate) mod checkpoint;
pub(crate) mod definitions;
pub(crate) mod event;
pub(crate) mod log;
pub(crate) mod messages;
mod old_log;
pub(crate) mod replay_policy;
pub(crate) mod reporter;
pub(crate) mod restore;
pub(crate) mod state;
pub(crate) mod status_page;
