//! What the evaluation thread does while there is nothing to evaluate.

use std::time::Instant;

/// Something useful to do instead of sleeping.
pub(crate) trait Idle: Send + Sync {
    /// Called on the evaluation thread. Returns once [`Self::wake`] has been called since the last return, or the time
    /// has come, or for no reason. Calls `rest` before it sleeps.
    fn idle(&self, until: Option<Instant>, rest: &dyn Fn());
    /// Ends [`Self::idle`]. Called on any thread, while that runs or before it begins.
    fn wake(&self);
}
