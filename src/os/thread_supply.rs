//! Threads that are started for Lisp's sake: how many are on their way, and when the next one is tried after one could not be.

use std::time::{Duration, Instant};

/// How long after a thread could not be started the next one is tried.
const START_AGAIN: Duration = Duration::from_secs(1);

/// What was asked for and is not there yet.
#[derive(Debug, Default)]
pub(crate) struct ThreadSupply {
    starting: usize,
    start_again: Option<Instant>,
}

impl ThreadSupply {
    /// True when one more is to be started now, so that as many as are needed are on their way. It counts as one of these from
    /// here on, until [`arrived`](Self::arrived) or [`refused`](Self::refused).
    pub(crate) fn start(&mut self, needed: usize, now: Instant) -> bool {
        let starts = self.starting < needed && self.start_again.is_none_or(|time| time <= now);
        self.starting += usize::from(starts);
        starts
    }

    /// One that was started is there.
    pub(crate) fn arrived(&mut self) {
        self.starting = self.starting.saturating_sub(1);
    }

    /// One could not be started. When the next one may be.
    pub(crate) fn refused(&mut self, now: Instant) -> Instant {
        self.arrived();
        *self.start_again.insert(now + START_AGAIN)
    }

    /// How many are on their way.
    pub(crate) fn starting(&self) -> usize {
        self.starting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_thread_is_tried_again_after_a_second() {
        let (mut supply, now) = (ThreadSupply::default(), Instant::now());
        assert!(supply.start(1, now) && !supply.start(1, now));
        assert_eq!(supply.refused(now), now + START_AGAIN);
        assert!(!supply.start(1, now) && supply.start(1, now + START_AGAIN));
        supply.arrived();
        assert_eq!(supply.starting(), 0);
    }
}
