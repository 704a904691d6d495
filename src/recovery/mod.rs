//! Recovery: the events that a worker reports, the state that outlives its image, and the replay that gives the next image
//! the definitions of the last image.
//!
//! A worker reports [events](event) through its [reporter]. The supervisor folds the events into the
//! [recovery state](state), which it keeps in memory and, for a persistent session, also in the [log]. When a worker is
//! lost, the supervisor records the crash in the state
//! ([`RecoveryState::record_crash`](state::RecoveryState::record_crash)) and sends only this state to the next worker,
//! which boots the last [checkpoint], [replays](replay) the definitions since the checkpoint, and [reports](messages) the
//! crash to its clients. Numbers that the supervisor must be able to read at any moment are on the
//! [status page](status_page).

pub(crate) mod checkpoint;
pub(crate) mod definitions;
pub(crate) mod event;
pub(crate) mod log;
pub(crate) mod messages;
mod old_log;
pub(crate) mod persistent;
pub(crate) mod replay;
pub(crate) mod replay_policy;
pub(crate) mod reporter;
pub(crate) mod state;
pub(crate) mod status_page;
pub(crate) mod text;
pub(crate) mod unrestored;
