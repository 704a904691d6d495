//! The restart policy: when a lost worker is replaced, and when the server gives up.

use std::time::{Duration, Instant};

/// So many workers may be lost without an answer in between, as long as each of them got as far as serving.
const MAX_LOSSES: usize = 20;
/// So many may be lost before they serve.
const MAX_EARLY_LOSSES: usize = 5;
/// The time within which losses are counted.
const WITHIN: Duration = Duration::from_secs(10);
/// How long after a worker that could not be started the next one is, at first: what the last one left behind may still
/// be going.
const BACKOFF: Duration = Duration::from_millis(50);

/// The stage that a worker had reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The worker could not be started, or reported that it cannot serve.
    Unstarted,
    /// The worker was booting or replaying definitions.
    Starting,
    /// The worker served.
    Serving,
}

/// The losses that no answer has followed yet.
#[derive(Debug, Default)]
pub(super) struct RestartPolicy {
    losses: Vec<(Instant, Stage)>,
}

impl RestartPolicy {
    /// Notes that a worker answers.
    pub(super) fn answered(&mut self) {
        self.losses.clear();
    }

    /// Notes that a worker is lost. Returns when to start the next one; `Err`, how many were lost, when there is no
    /// point in that.
    pub(super) fn after_loss(&mut self, stage: Stage, now: Instant) -> Result<Instant, String> {
        self.losses.retain(|(at, _)| now - *at < WITHIN);
        self.losses.push((now, stage));
        let count = |stage: Stage| self.losses.iter().filter(|(_, other)| *other == stage).count();
        let unstarted = count(Stage::Unstarted);
        if self.losses.len() >= MAX_LOSSES || unstarted + count(Stage::Starting) >= MAX_EARLY_LOSSES {
            return Err(format!("{} times within {} seconds", self.losses.len(), WITHIN.as_secs()));
        }
        Ok(if stage == Stage::Unstarted { now + BACKOFF * (1 << unstarted) / 2 } else { now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_counted_until_there_is_an_answer() {
        let now = Instant::now();
        let mut policy = RestartPolicy::default();
        for _ in 0..3 {
            for _ in 1..MAX_LOSSES {
                assert_eq!(policy.after_loss(Stage::Serving, now), Ok(now));
            }
            policy.answered();
        }
        for _ in 1..MAX_EARLY_LOSSES {
            assert_eq!(policy.after_loss(Stage::Starting, now), Ok(now));
        }
        assert!(policy.after_loss(Stage::Starting, now).unwrap_err().starts_with("5 times"));
        assert_eq!(policy.after_loss(Stage::Starting, now + WITHIN), Ok(now + WITHIN));
    }

    #[test]
    fn what_cannot_be_started_is_tried_again_later() {
        let now = Instant::now();
        let mut policy = RestartPolicy::default();
        let delays = [1, 2, 4, 8].map(|times| Ok(now + BACKOFF * times));
        assert_eq!([0; 4].map(|_| policy.after_loss(Stage::Unstarted, now)), delays);
        assert!(policy.after_loss(Stage::Unstarted, now).is_err());
    }
}
