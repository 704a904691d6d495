//! Recovery: the reports of a worker, the state that outlives its image, and the replay that makes the next image like the
//! last one.
//!
//! A worker reports [events](event) by its [reporter]. Its supervisor folds them into the [recovery state](state), which is
//! kept in memory and, for a persistent session, in the [log] as well. When the worker is lost, the crash is recorded in
//! the state ([`RecoveryState::record_crash`](state::RecoveryState::record_crash)), and the next worker is given that state
//! and nothing else: it boots the last [checkpoint], [replays](restore) the definitions since, and [reports](messages) the
//! crash to its clients. The numbers that the supervisor must know of a worker at any moment are on the
//! [status page](status_page).

pub(crate) mod checkpoint;
pub(crate) mod definitions;
pub(crate) mod event;
pub(crate) mod log;
pub(crate) mod messages;
mod old_log;
pub(crate) mod persistent;
pub(crate) mod replay_policy;
pub(crate) mod reporter;
pub(crate) mod restore;
pub(crate) mod state;
pub(crate) mod status_page;
pub(crate) mod text;
