//! Decides when a Lisp thread is started, and when to try again after a thread could not be started.

use std::time::{Duration, Instant};

/// The delay before the next attempt after a thread could not be started.
pub(crate) const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The number of threads that are being started, and the time of the next attempt after a failure.
#[derive(Debug, Default)]
pub(crate) struct ThreadSupply {
    starting: usize,
    retry_at: Option<Instant>,
}

impl ThreadSupply {
    /// Creates a supply while the first thread is being started without a claim.
    pub(crate) fn with_first_starting() -> Self {
        Self { starting: 1, retry_at: None }
    }

    /// Returns true if the caller must start a thread now, because fewer than `needed` threads are being started and the
    /// delay after a failure is over. The thread counts as being started until [`record_started`](Self::record_started) or
    /// [`record_failure`](Self::record_failure) is called.
    pub(crate) fn claim_start(&mut self, needed: usize, now: Instant) -> bool {
        let starts = self.starting < needed && self.retry_at.is_none_or(|time| time <= now);
        self.starting += usize::from(starts);
        starts
    }

    /// Records that a thread that was being started now runs.
    pub(crate) fn record_started(&mut self) {
        self.starting = self.starting.saturating_sub(1);
    }

    /// Records that a thread could not be started. Returns the time of the next attempt.
    pub(crate) fn record_failure(&mut self, now: Instant) -> Instant {
        self.record_started();
        *self.retry_at.insert(now + RETRY_DELAY)
    }

    /// Returns the time of the next attempt after a failure; `None` unless this time is still to come.
    pub(crate) fn next_attempt(&self, now: Instant) -> Option<Instant> {
        self.retry_at.filter(|time| *time > now)
    }

    /// Returns the number of threads that are being started.
    pub(crate) fn starting(&self) -> usize {
        self.starting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_could_not_be_started_is_retried_after_a_second() {
        let (mut supply, now) = (ThreadSupply::default(), Instant::now());
        assert!(supply.claim_start(1, now) && !supply.claim_start(1, now));
        assert_eq!(supply.record_failure(now), now + RETRY_DELAY);
        assert_eq!(supply.next_attempt(now), Some(now + RETRY_DELAY));
        assert!(!supply.claim_start(1, now) && supply.claim_start(1, now + RETRY_DELAY));
        assert_eq!(supply.next_attempt(now + RETRY_DELAY), None);
        supply.record_started();
        assert_eq!(supply.starting(), 0);
    }
}
