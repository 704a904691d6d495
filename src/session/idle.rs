//! What the evaluation thread does while there is nothing to evaluate.

use std::time::{Duration, Instant};

/// How long this may rest because of an evaluation, before [`Idle::look`] is called.
pub(crate) const PATIENCE: Duration = Duration::from_millis(2);

/// Something useful to do instead of sleeping.
pub(crate) trait Idle: Send + Sync {
    /// Called on the evaluation thread. Returns once [`Self::wake`] has been called since the last return, or the time
    /// has come, or for no reason.
    fn idle(&self, until: Option<Instant>);
    /// Called on the evaluation thread. Does a little of it between two jobs.
    fn pass(&self);
    /// Called on the evaluation thread at the end of a job. Calls `work`, if possible as the first thing of
    /// [`Self::idle`] or [`Self::pass`], one of which follows unless the thread is interrupted: what that wakes is done
    /// sooner so.
    fn soon(&self, work: Box<dyn FnOnce() + Send>);
    /// Called on the clock's thread while jobs are done: takes care that nothing rests for too long. When to look
    /// again, if nothing begins until then.
    fn look(&self, now: Instant) -> Option<Instant>;
    /// Ends [`Self::idle`]. Called on any thread, while that runs or before it begins.
    fn wake(&self);
}
