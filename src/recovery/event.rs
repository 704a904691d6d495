//! The events that a worker reports to its supervisor.
//!
//! A [`WorkerEvent`] travels as JSON in a [frame](crate::rpc::frame). Every event has a bound: the worker shortens or refuses
//! what would exceed it, and whatever the supervisor cannot read is reported, never replaced by a default.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::checkpoint::store::Checkpoint;
use super::definitions::Definition;
use crate::Limits;
use crate::interruption::Stuck;
use crate::outcome::{ErrorRecord, Outcome};
use crate::rpc::frame::MAX_EVENT;

/// The largest message of an opening handshake, in bytes.
pub(crate) const MAX_HANDSHAKE_MESSAGE: usize = 1 << 20;
/// Bytes of an error: what is more is left out.
pub(crate) const MAX_ERROR: usize = 64 << 10;
/// Notices that a replaced image hands on, at most, and the characters of each.
const MAX_NOTICES: usize = 100;
const MAX_NOTICE: usize = 10_000;
/// Forms that one replay reports as failed, at most, and the characters of each reason.
const MAX_FAILED: usize = 10_000;
const MAX_REASON: usize = 130;

/// An event of a worker's life.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerEvent {
    /// The worker serves, though it may still have definitions to replay. The first event of every worker that can serve.
    Ready,
    /// The worker has replayed the definitions that it was given.
    Restored {
        /// The forms that failed, as indices into those definitions, each with the reason.
        failed: Vec<(usize, String)>,
    },
    /// Something changed that the next worker must know.
    Changed(SessionEvent),
    /// A call asks for a fresh image.
    ResetRequested {
        /// The call's number.
        call: u64,
        /// Notices that the client has not seen yet.
        notices: Vec<String>,
    },
    /// A call asks for the image of a checkpoint.
    RestoreRequested {
        /// The call's number.
        call: u64,
        checkpoint: Box<Checkpoint>,
        /// Notices that the client has not seen yet.
        notices: Vec<String>,
    },
    /// Lisp does something that cannot be interrupted; the image must be replaced.
    Stuck {
        /// The outcome of the evaluation that is stuck, if one is.
        outcome: Option<Box<Outcome>>,
        why: Stuck,
    },
    /// A process saves the persistent session and outlives all others.
    SaverStarted {
        /// The id of the process.
        pid: i32,
    },
    /// The worker ends.
    Leaving {
        /// Its exit status.
        status: i32,
        /// The reason why it cannot serve, in a sentence; `None` when its input ended.
        reason: Option<String>,
    },
}

/// A change of the session that outlives the image. [`RecoveryState`](super::state::RecoveryState) is the fold over these.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SessionEvent {
    /// A message belongs to the handshake of its client, once the call is answered.
    Handshake {
        /// The call's number.
        call: u64,
        /// The message, as JSON: at most [`MAX_HANDSHAKE_MESSAGE`] bytes.
        message: String,
    },
    /// A form defined something.
    Defined(Definition),
    /// An evaluation changed the errors of a client.
    Errors {
        /// The number of the client's connection.
        client: u64,
        /// The error that was added to the history: about [`MAX_ERROR`] bytes at most.
        added: Option<Arc<ErrorRecord>>,
        /// The number of the last error; `None` when the last evaluation succeeded.
        last: Option<u64>,
    },
    /// The limits were set.
    Limits(Limits),
    /// The image is being saved in a file of this name, from here on.
    Saving { file: String },
    /// The save is complete: the file is a checkpoint.
    Saved(Box<Checkpoint>),
}

impl SessionEvent {
    /// True when a new server that continues the session must know of the event: its clients and limits are new.
    pub(crate) fn outlives_server(&self) -> bool {
        match self {
            Self::Handshake { .. } | Self::Limits(_) => false,
            Self::Errors { client, .. } => *client == 0,
            Self::Defined(_) | Self::Saving { .. } | Self::Saved(_) => true,
        }
    }
}

/// The error for an event that is too large to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it takes {bytes} bytes, and {MAX_EVENT} is the limit")]
pub(crate) struct TooLarge {
    bytes: usize,
}

impl WorkerEvent {
    /// The end of a replay: the first [`MAX_FAILED`] forms that failed, each reason cut to [`MAX_REASON`] characters.
    pub(crate) fn restored(failed: &[(usize, String)]) -> Self {
        let failed = failed.iter().take(MAX_FAILED).map(|(index, reason)| (*index, cut(reason, MAX_REASON)));
        Self::Restored { failed: failed.collect() }
    }

    /// A request for a fresh image; the first [`MAX_NOTICES`] notices, each cut to [`MAX_NOTICE`] characters.
    pub(crate) fn reset_requested(call: u64, notices: &[String]) -> Self {
        Self::ResetRequested { call, notices: bounded(notices) }
    }

    /// A request for the image of a checkpoint, its notices bounded like those of a reset.
    pub(crate) fn restore_requested(call: u64, checkpoint: Checkpoint, notices: &[String]) -> Self {
        Self::RestoreRequested { call, checkpoint: Box::new(checkpoint), notices: bounded(notices) }
    }

    /// The worker's end, its reason cut to [`MAX_NOTICE`] characters.
    pub(crate) fn leaving(status: i32, reason: Option<&str>) -> Self {
        Self::Leaving { status, reason: reason.map(|reason| cut(reason, MAX_NOTICE)) }
    }

    /// Returns the event as JSON.
    ///
    /// # Errors
    /// [`TooLarge`] when it exceeds what a frame holds.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, TooLarge> {
        // Strings, numbers, lists and maps with keys of text: serializing them cannot fail.
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        if bytes.len() > MAX_EVENT { Err(TooLarge { bytes: bytes.len() }) } else { Ok(bytes) }
    }

    /// Reads an event that a worker sent.
    ///
    /// # Errors
    /// [`encode`](Self::encode) did not write these bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

fn bounded(notices: &[String]) -> Vec<String> {
    notices.iter().take(MAX_NOTICES).map(|notice| cut(notice, MAX_NOTICE)).collect()
}

/// The first `characters` of a text.
fn cut(text: &str, characters: usize) -> String {
    text.chars().take(characters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Clipped, Frame};

    #[test]
    fn an_error_is_cut_to_its_bound_and_says_what_is_left_out() {
        let call = format!("(f {})", "\u{1}".repeat(300));
        let frame = |number| Frame {
            number,
            call: call.clone(),
            source: None,
            code: None,
            machinery: None,
            locals: Vec::new(),
        };
        let record = |characters, frames| {
            Arc::new(ErrorRecord {
                id: 7,
                kind: "SIMPLE-ERROR".to_owned(),
                message: Clipped { text: "\u{1}".repeat(characters), omitted: 5 },
                time: jiff::Timestamp::UNIX_EPOCH,
                form: None,
                slots: Vec::new(),
                restarts: Vec::new(),
                frames: (0..frames).map(frame).collect(),
                total_frames: frames,
                slots_omitted: 0,
                evaluation: 1,
            })
        };
        let whole = record(10, 3);
        assert!(Arc::ptr_eq(&whole.within(MAX_ERROR), &whole));
        let cut = record(10_000, 1_000).within(MAX_ERROR);
        let bytes = serde_json::to_vec(&cut).expect("JSON").len();
        assert!((MAX_ERROR * 9 / 10..MAX_ERROR * 11 / 10).contains(&bytes), "{bytes} bytes");
        assert_eq!(cut.message.characters(), 10_005);
        assert!(cut.message.text.len() > 5_000 && cut.frames.len() > 10, "{} frames", cut.frames.len());
        assert_eq!((cut.id, cut.total_frames), (7, 1_000));
    }

    #[test]
    fn texts_and_lists_of_an_event_are_cut_to_their_bounds() {
        let notices = vec!["\u{1}".repeat(2 * MAX_NOTICE); 2 * MAX_NOTICES];
        let failed: Vec<_> = (0..2 * MAX_FAILED).map(|index| (index, "x".repeat(2 * MAX_REASON))).collect();
        let WorkerEvent::ResetRequested { notices: kept, .. } = WorkerEvent::reset_requested(1, &notices) else {
            unreachable!("the constructor says which event")
        };
        assert_eq!((kept.len(), kept[0].len()), (MAX_NOTICES, MAX_NOTICE));
        let restored = WorkerEvent::restored(&failed);
        let WorkerEvent::Restored { failed } = &restored else { unreachable!("the constructor says which event") };
        assert_eq!((failed.len(), failed[0].1.len()), (MAX_FAILED, MAX_REASON));
    }

    #[test]
    fn every_bounded_event_fits_into_a_frame() {
        let notices = vec!["\u{1}".repeat(MAX_NOTICE); MAX_NOTICES];
        let failed: Vec<_> = (0..MAX_FAILED).map(|index| (index, "\u{1}".repeat(MAX_REASON))).collect();
        for event in [
            WorkerEvent::Ready,
            WorkerEvent::reset_requested(u64::MAX, &notices),
            WorkerEvent::restored(&failed),
            WorkerEvent::leaving(1, Some(&"\u{1}".repeat(2 * MAX_NOTICE))),
        ] {
            let bytes = event.encode().unwrap();
            assert_eq!(WorkerEvent::decode(&bytes).unwrap().encode(), Ok(bytes));
        }
        let message = "x".repeat(MAX_EVENT);
        let event = WorkerEvent::Changed(SessionEvent::Handshake { call: 1, message });
        assert!(event.encode().unwrap_err().to_string().starts_with("it takes 8"));
        assert!(WorkerEvent::decode(b"{\"changed\":{\"limits\":null}}").is_err());
    }
}
