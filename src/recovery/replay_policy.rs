//! The replay policy: which form is suspected when images are lost during a replay, and when it is given up.

use serde::{Deserialize, Serialize};

use super::state::Suspicion;

/// The form, or the boot, at which the last image was lost before its replay had ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Suspect {
    /// The index of the form that it replayed; `None` while it booted.
    replaying: Option<usize>,
    /// The number of images in a row that were lost there.
    losses: u32,
}

/// Decides what the next image does after one was lost during its replay. Pure: no clock, no files, no processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplayPolicy {
    suspect: Option<Suspect>,
}

/// The next step after an image was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Replay the same definitions again.
    Retry {
        /// A form became the suspect when there was none, or is closer to its last try.
        progress: bool,
    },
    /// Leave out the definition at this index, which is poisoned.
    Skip {
        index: usize,
        /// The reason, in a line.
        reason: String,
    },
    /// Boot the checkpoint before this one, which did not come up.
    PreviousCheckpoint,
}

impl Suspicion {
    /// Returns the number of images that may be lost at a form before the form is left out; at `None`, the number that may be
    /// lost while booting a checkpoint.
    fn tries(self, replaying: Option<usize>) -> u32 {
        match self {
            Self::Certain => 1,
            // Booting does the same each time.
            Self::Likely => 1 + u32::from(replaying.is_some()),
            Self::Possible => 3,
        }
    }
}

impl ReplayPolicy {
    /// An image was lost before it had replayed its definitions, at the one with this index; `None` when it had not begun to.
    pub(crate) fn after_crash(&mut self, replaying: Option<usize>, suspicion: Suspicion) -> Step {
        let before = self.suspect.filter(|suspect| suspect.replaying == replaying).map_or(0, |suspect| suspect.losses);
        let losses = before + 1;
        if losses < suspicion.tries(replaying) {
            let progress = replaying.is_some() && (before > 0 || self.suspect.is_none());
            self.suspect = Some(Suspect { replaying, losses });
            return Step::Retry { progress };
        }
        self.suspect = None;
        let Some(index) = replaying else { return Step::PreviousCheckpoint };
        let reason = match suspicion {
            Suspicion::Possible => format!("the image was killed {losses} times while it was evaluated again"),
            Suspicion::Certain | Suspicion::Likely => "it takes the image down".to_owned(),
        };
        Step::Skip { index, reason }
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
        /// Images in which the forms at `poisoned` indices always crash end up replaying all the others, each poisoned form
        /// having been tried no more often than its suspicion allows.
        #[test]
        fn a_replay_ends_without_the_poisoned_forms(
            poisoned in prop::collection::vec(any::<bool>(), 0..30),
            suspicion in suspicion(),
        ) {
            let mut policy = ReplayPolicy::default();
            let mut forms = poisoned.clone();
            let mut losses = 0;
            while let Some(index) = forms.iter().position(|poisoned| *poisoned) {
                losses += 1;
                match policy.after_crash(Some(index), suspicion) {
                    // The supervisor counts a loss without progress against the server.
                    Step::Retry { progress } => prop_assert!(progress),
                    Step::Skip { index: skipped, .. } => {
                        prop_assert_eq!(skipped, index);
                        forms.remove(index);
                    }
                    Step::PreviousCheckpoint => prop_assert!(false, "the checkpoint came up"),
                }
            }
            let bad = poisoned.iter().filter(|poisoned| **poisoned).count();
            prop_assert_eq!(losses, bad * suspicion.tries(Some(0)) as usize);
            prop_assert_eq!(forms.len(), poisoned.len() - bad);
        }

        /// Only the form or the checkpoint at which images were lost is left out, and never at a first loss
        /// that somebody else may have caused.
        #[test]
        fn only_what_images_were_lost_at_is_left_out(
            losses in prop::collection::vec((prop::option::of(0..4_usize), suspicion()), 0..60),
        ) {
            let mut policy = ReplayPolicy::default();
            let mut in_a_row: Option<(Option<usize>, u32)> = None;
            for (replaying, suspicion) in losses {
                let step = policy.after_crash(replaying, suspicion);
                let count = in_a_row.filter(|(known, _)| *known == replaying).map_or(0, |(_, count)| count) + 1;
                let is_last = count >= suspicion.tries(replaying);
                match step {
                    Step::Skip { index, .. } => prop_assert!(is_last && Some(index) == replaying),
                    Step::PreviousCheckpoint => prop_assert!(is_last && replaying.is_none()),
                    Step::Retry { progress } => {
                        prop_assert!(!is_last);
                        // Two forms that take turns make no progress, nor does booting: the restart policy ends that.
                        prop_assert_eq!(progress, replaying.is_some() && (count > 1 || in_a_row.is_none()));
                    }
                }
                in_a_row = (!is_last).then_some((replaying, count));
            }
        }
    }
}
