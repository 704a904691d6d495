//! The replay policy, which decides which form may be poisoned when images are lost during a replay, and when this form
//! is left out.

use serde::{Deserialize, Serialize};

use super::state::Suspicion;

/// The form that was being replayed, or the boot that was under way, when the last image was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct ReplaySuspect {
    /// The index of the form that was being replayed; `None` for the boot.
    replaying: Option<usize>,
    /// The number of images in a row that were lost at this form, or while booting.
    losses: u32,
}

/// The policy that decides about the next replay after an image was lost during a replay. The policy uses no clock, files
/// or processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplayPolicy {
    suspect: Option<ReplaySuspect>,
}

/// A decision about the next replay, after an image was lost during the last replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReplayDecision {
    /// Replay all definitions again.
    Retry {
        /// True when a form may be poisoned and nothing was recorded as the possible cause before, or when the recorded
        /// form has fewer tries left.
        progress: bool,
    },
    /// Leave out the definition at this index, which is poisoned.
    Skip {
        index: usize,
        /// The reason, as one line.
        reason: String,
    },
    /// Boot the previous checkpoint, since the last checkpoint does not boot.
    PreviousCheckpoint,
}

impl Suspicion {
    /// Returns the number of lost images after which a form is left out. If `replaying` is `None`, returns the number of
    /// images lost during boot after which the checkpoint is left out.
    fn max_losses(self, replaying: Option<usize>) -> u32 {
        match self {
            Self::Certain => 1,
            // A checkpoint that failed to boot once is expected to fail again.
            Self::Likely => 1 + u32::from(replaying.is_some()),
            Self::Possible => 3,
        }
    }
}

impl ReplayPolicy {
    /// Records that an image was lost before its replay had ended, and decides about the next replay. `replaying` is the
    /// index of the definition that was being replayed; `None` if the replay had not reached a form. `cause` is the cause of
    /// the loss, as the rest of a sentence about the image.
    pub(crate) fn decide_after_crash(
        &mut self,
        replaying: Option<usize>,
        suspicion: Suspicion,
        cause: &str,
    ) -> ReplayDecision {
        let before = self.suspect.filter(|suspect| suspect.replaying == replaying).map_or(0, |suspect| suspect.losses);
        let losses = before + 1;
        if losses < suspicion.max_losses(replaying) {
            let progress = replaying.is_some() && (before > 0 || self.suspect.is_none());
            self.suspect = Some(ReplaySuspect { replaying, losses });
            return ReplayDecision::Retry { progress };
        }
        self.suspect = None;
        let Some(index) = replaying else { return ReplayDecision::PreviousCheckpoint };
        let reason = match suspicion {
            Suspicion::Possible => format!("the image was killed {losses} times while this form was replayed"),
            Suspicion::Certain | Suspicion::Likely => format!("while this form was replayed, the image {cause}"),
        };
        ReplayDecision::Skip { index, reason }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn suspicion() -> impl Strategy<Value = Suspicion> {
        prop_oneof![Just(Suspicion::Certain), Just(Suspicion::Likely), Just(Suspicion::Possible)]
    }

    proptest! {
        /// Forms marked in `poisoned` kill every image. In the end all other forms are replayed, and no poisoned form
        /// was tried more often than the `suspicion` allows.
        #[test]
        fn a_replay_leaves_out_exactly_the_poisoned_forms(
            poisoned in prop::collection::vec(any::<bool>(), 0..30),
            suspicion in suspicion(),
        ) {
            let mut policy = ReplayPolicy::default();
            let mut forms = poisoned.clone();
            let mut losses = 0;
            while let Some(index) = forms.iter().position(|poisoned| *poisoned) {
                losses += 1;
                match policy.decide_after_crash(Some(index), suspicion, "died") {
                    // Losses without progress count for the restart policy, which ends the server after too many
                    // losses.
                    ReplayDecision::Retry { progress } => prop_assert!(progress),
                    ReplayDecision::Skip { index: skipped, .. } => {
                        prop_assert_eq!(skipped, index);
                        forms.remove(index);
                    }
                    ReplayDecision::PreviousCheckpoint => prop_assert!(false, "the checkpoint came up"),
                }
            }
            let bad = poisoned.iter().filter(|poisoned| **poisoned).count();
            prop_assert_eq!(losses, bad * suspicion.max_losses(Some(0)) as usize);
            prop_assert_eq!(forms.len(), poisoned.len() - bad);
        }

        /// Only the form or checkpoint at which images were lost is left out, and never at the first loss if another
        /// process may have caused that loss.
        #[test]
        fn only_a_form_or_checkpoint_at_which_images_were_lost_is_left_out(
            losses in prop::collection::vec((prop::option::of(0..4_usize), suspicion()), 0..60),
        ) {
            let mut policy = ReplayPolicy::default();
            let mut in_a_row: Option<(Option<usize>, u32)> = None;
            for (replaying, suspicion) in losses {
                let step = policy.decide_after_crash(replaying, suspicion, "died");
                let count = in_a_row.filter(|(known, _)| *known == replaying).map_or(0, |(_, count)| count) + 1;
                let is_last = count >= suspicion.max_losses(replaying);
                match step {
                    ReplayDecision::Skip { index, .. } => prop_assert!(is_last && Some(index) == replaying),
                    ReplayDecision::PreviousCheckpoint => prop_assert!(is_last && replaying.is_none()),
                    ReplayDecision::Retry { progress } => {
                        prop_assert!(!is_last);
                        // Losses that alternate between two forms, and losses while booting, are no progress: the
                        // restart policy ends the server after too many such losses.
                        prop_assert_eq!(progress, replaying.is_some() && (count > 1 || in_a_row.is_none()));
                    }
                }
                in_a_row = (!is_last).then_some((replaying, count));
            }
        }
    }
}
