//! The restart policy: when a lost worker is replaced, and when the server stops instead.

use std::time::{Duration, Instant};

/// The number of losses within [`LOSS_WINDOW`] at which the server stops. An answer between the losses restarts the count.
pub(super) const MAX_LOSSES: usize = 20;
/// The number of losses of workers that had not served yet, within [`LOSS_WINDOW`], at which the server stops.
const MAX_EARLY_LOSSES: usize = 5;
/// The time within which losses are counted.
const LOSS_WINDOW: Duration = Duration::from_secs(10);
/// The delay after the first worker that could not be started, so that its remaining processes can end. The delay doubles
/// with each further failed start.
const BACKOFF: Duration = Duration::from_millis(50);

/// The stage that a worker had reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerStage {
    /// The worker could not be started, or reported that it cannot serve.
    Unstarted,
    /// The worker was booting or replaying definitions.
    Starting,
    /// The worker served.
    Serving,
}

/// The restart policy, with the recent losses that no answer has followed: the time of each loss, and the stage that the
/// lost worker had reached.
#[derive(Debug, Default)]
pub(super) struct RestartPolicy {
    losses: Vec<(Instant, WorkerStage)>,
}

impl RestartPolicy {
    /// Records that a worker has answered a request.
    pub(super) fn record_answer(&mut self) {
        self.losses.clear();
    }

    /// Records that a worker was lost at `now`. Returns the time to start the next worker.
    ///
    /// # Errors
    /// Returns the number of losses and their time span, worded as "5 times within 10 seconds", if too many workers
    /// were lost.
    pub(super) fn record_loss(&mut self, stage: WorkerStage, now: Instant) -> Result<Instant, String> {
        self.losses.retain(|(at, _)| now - *at < LOSS_WINDOW);
        self.losses.push((now, stage));
        let count = |stage: WorkerStage| self.losses.iter().filter(|(_, other)| *other == stage).count();
        let unstarted = count(WorkerStage::Unstarted);
        if self.losses.len() >= MAX_LOSSES || unstarted + count(WorkerStage::Starting) >= MAX_EARLY_LOSSES {
            return Err(format!("{} times within {} seconds", self.losses.len(), LOSS_WINDOW.as_secs()));
        }
        Ok(if stage == WorkerStage::Unstarted { now + BACKOFF * (1 << unstarted) / 2 } else { now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_clears_the_count_of_losses() {
        let now = Instant::now();
        let mut policy = RestartPolicy::default();
        for _ in 0..3 {
            for _ in 1..MAX_LOSSES {
                assert_eq!(policy.record_loss(WorkerStage::Serving, now), Ok(now));
            }
            policy.record_answer();
        }
        for _ in 1..MAX_EARLY_LOSSES {
            assert_eq!(policy.record_loss(WorkerStage::Starting, now), Ok(now));
        }
        assert!(policy.record_loss(WorkerStage::Starting, now).unwrap_err().starts_with("5 times"));
        assert_eq!(policy.record_loss(WorkerStage::Starting, now + LOSS_WINDOW), Ok(now + LOSS_WINDOW));
    }

    #[test]
    fn the_delay_doubles_while_workers_cannot_be_started() {
        let now = Instant::now();
        let mut policy = RestartPolicy::default();
        let delays = [1, 2, 4, 8].map(|times| Ok(now + BACKOFF * times));
        assert_eq!([0; 4].map(|_| policy.record_loss(WorkerStage::Unstarted, now)), delays);
        assert!(policy.record_loss(WorkerStage::Unstarted, now).is_err());
    }
}
