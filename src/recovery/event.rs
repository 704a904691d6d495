//! The events that a worker reports to its supervisor.
//!
//! A [`WorkerEvent`] is sent as JSON in a [frame](crate::rpc::frame). The worker shortens the texts and lists of an event to
//! fixed maximums, and does not send an event that is still too large. The supervisor reports an event that it cannot read,
//! and never substitutes a default for such an event.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::checkpoint::store::Checkpoint;
use super::definitions::Definition;
use crate::Limits;
use crate::image::interruption::StuckReason;
use crate::outcome::{ErrorRecord, Outcome};
use crate::rpc::frame::MAX_EVENT;
use crate::rpc::inflight::ServerRequests;

/// Maximum size of a client's `initialize` request, in bytes.
pub(crate) const MAX_HANDSHAKE_MESSAGE: usize = 1 << 20;
/// Approximate maximum size of an error in an event, in bytes of JSON. A larger error is cut.
pub(crate) const MAX_ERROR_BYTES: usize = 64 << 10;
/// Maximum number of notices that a replaced image passes to the next image.
const MAX_NOTICES: usize = 100;
/// Maximum length of a notice, in characters.
const MAX_NOTICE: usize = 10_000;
/// Maximum number of forms that a replay reports as failed.
const MAX_FAILED_FORMS: usize = 10_000;
/// Maximum length of the reason for a failed form, in characters.
const MAX_REASON: usize = 130;

/// An event that a worker reports.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerEvent {
    /// The worker serves its clients, though it may still have definitions to replay. This is the first event of every
    /// worker that serves.
    Ready,
    /// The worker has replayed the definitions that it was given.
    #[serde(rename = "restored")]
    Replayed {
        /// The indices of the definitions that failed, each with the reason.
        failed: Vec<(usize, String)>,
    },
    /// A change of the session, which the next worker must know.
    Changed(SessionEvent),
    /// A call requested a reset.
    ResetRequested {
        /// The lowest number for the call's jobs.
        job: u64,
        /// Notices that the client has not seen yet.
        notices: Vec<String>,
    },
    /// A call requested the restore of a checkpoint.
    RestoreRequested {
        /// The lowest number for the call's jobs.
        job: u64,
        checkpoint: Box<Checkpoint>,
        /// Notices that the client has not seen yet.
        notices: Vec<String>,
    },
    /// Lisp could not be interrupted; the image must be replaced.
    Stuck {
        /// The outcome of the stuck evaluation, if a call still waits for its answer.
        outcome: Option<Box<Outcome>>,
        why: StuckReason,
    },
    /// The worker is about to exit.
    #[serde(rename = "leaving")]
    Exiting {
        /// The worker's exit status.
        status: i32,
        /// The reason why the worker cannot serve, as a sentence; `None` when the worker's input has ended.
        reason: Option<String>,
    },
}

/// A change of the session that outlives the image. [`RecoveryState`](super::state::RecoveryState) is the fold over
/// session events.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SessionEvent {
    /// A client sent an `initialize` request, with which the next worker resumes the conversation once the request is
    /// answered.
    Handshake {
        /// The request's call number.
        call: u64,
        /// The request as JSON, at most [`MAX_HANDSHAKE_MESSAGE`] bytes.
        message: String,
    },
    /// A form defined something.
    Defined(Definition),
    /// The foreground evaluation with this number continues in the background. The package of each of its forms counts
    /// as the current package for this evaluation only.
    Detached { evaluation: u64 },
    /// An evaluation changed the error state or history of a client.
    Errors {
        /// The number of the client's connection.
        client: u64,
        /// The error that was added to the history, cut to about [`MAX_ERROR_BYTES`] bytes.
        added: Option<Arc<ErrorRecord>>,
        /// The number of the last error; `None` when the last evaluation succeeded.
        last: Option<u64>,
    },
    /// The server sent a request to a client, or such a request was answered or withdrawn.
    ServerRequests {
        /// The number of the client's connection.
        client: u64,
        requests: ServerRequests,
    },
    /// A client set the limits.
    Limits(Limits),
    /// A save of the image has begun. `file` is the name of the core's file. The core contains no definition that is
    /// reported after this event.
    Saving { file: String },
    /// A save is complete. The next image may boot from this checkpoint.
    Saved(Box<Checkpoint>),
    /// A save has failed, and its files except `.forms` are deleted. `file` is the name of the core's file.
    SaveFailed { file: String },
}

impl SessionEvent {
    /// Returns true when a new server that continues the session needs the event. Handshakes, the server's requests, limits,
    /// and the errors of attached clients end with their server. A new server looks for the files of each save, and needs no
    /// report of a failure.
    pub(crate) fn outlives_server(&self) -> bool {
        match self {
            Self::Handshake { .. } | Self::ServerRequests { .. } | Self::Limits(_) | Self::SaveFailed { .. } => false,
            Self::Errors { client, .. } => *client == 0,
            Self::Defined(_) | Self::Detached { .. } | Self::Saving { .. } | Self::Saved(_) => true,
        }
    }
}

/// The error for an event that does not fit into a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the report takes {bytes} bytes; the limit is {MAX_EVENT} bytes")]
pub(crate) struct EventTooLarge {
    bytes: usize,
}

impl WorkerEvent {
    /// Creates the event for the end of a replay, with the first [`MAX_FAILED_FORMS`] forms that failed, each reason cut to
    /// [`MAX_REASON`] characters.
    pub(crate) fn replayed(failed: &[(usize, String)]) -> Self {
        let failed = failed.iter().take(MAX_FAILED_FORMS).map(|(index, reason)| (*index, cut(reason, MAX_REASON)));
        Self::Replayed { failed: failed.collect() }
    }

    /// Creates the request for a reset, with the first [`MAX_NOTICES`] notices, each cut to [`MAX_NOTICE`] characters.
    pub(crate) fn reset_requested(job: u64, notices: &[String]) -> Self {
        Self::ResetRequested { job, notices: bounded_notices(notices) }
    }

    /// Creates the request for the restore of a checkpoint, with the notices bounded as for a reset.
    pub(crate) fn restore_requested(job: u64, checkpoint: Checkpoint, notices: &[String]) -> Self {
        Self::RestoreRequested { job, checkpoint: Box::new(checkpoint), notices: bounded_notices(notices) }
    }

    /// Creates the event for the end of the worker, with the reason cut to [`MAX_NOTICE`] characters.
    pub(crate) fn exiting(status: i32, reason: Option<&str>) -> Self {
        Self::Exiting { status, reason: reason.map(|reason| cut(reason, MAX_NOTICE)) }
    }

    /// Returns the name of the core's file that the event is about; `None` for an event about no core.
    pub(crate) fn core_file(&self) -> Option<&str> {
        match self {
            Self::Changed(SessionEvent::Saving { file } | SessionEvent::SaveFailed { file }) => Some(file),
            Self::Changed(SessionEvent::Saved(checkpoint)) | Self::RestoreRequested { checkpoint, .. } => {
                Some(&checkpoint.file)
            }
            _ => None,
        }
    }

    /// Returns the event as JSON.
    ///
    /// # Errors
    /// Returns [`EventTooLarge`] if the event does not fit into a frame.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, EventTooLarge> {
        // Serializing cannot fail: events consist of strings, numbers, lists, and maps with string keys.
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        if bytes.len() > MAX_EVENT { Err(EventTooLarge { bytes: bytes.len() }) } else { Ok(bytes) }
    }

    /// Reads an event that a worker sent.
    ///
    /// # Errors
    /// Returns the parser's error if the bytes are not an event that [`encode`](Self::encode) has written.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

/// Returns the first [`MAX_NOTICES`] notices, each cut to [`MAX_NOTICE`] characters.
fn bounded_notices(notices: &[String]) -> Vec<String> {
    notices.iter().take(MAX_NOTICES).map(|notice| cut(notice, MAX_NOTICE)).collect()
}

/// Returns the first `characters` characters of `text`.
fn cut(text: &str, characters: usize) -> String {
    text.chars().take(characters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Clipped, FrameRecord};

    #[test]
    fn an_oversized_error_is_cut_and_counts_the_omitted_parts() {
        let call = format!("(f {})", "\u{1}".repeat(300));
        let frame = |number| FrameRecord {
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
        let small = record(10, 3);
        assert!(Arc::ptr_eq(&small.truncated(MAX_ERROR_BYTES), &small));
        let cut = record(10_000, 1_000).truncated(MAX_ERROR_BYTES);
        let bytes = serde_json::to_vec(&cut).expect("JSON").len();
        assert!((MAX_ERROR_BYTES * 9 / 10..MAX_ERROR_BYTES * 11 / 10).contains(&bytes), "{bytes} bytes");
        assert_eq!(cut.message.char_count(), 10_005);
        assert!(cut.message.text.len() > 5_000 && cut.frames.len() > 10, "{} frames", cut.frames.len());
        assert_eq!((cut.id, cut.total_frames), (7, 1_000));
    }

    #[test]
    fn texts_and_lists_in_events_are_cut_to_their_limits() {
        let notices = vec!["\u{1}".repeat(2 * MAX_NOTICE); 2 * MAX_NOTICES];
        let failed: Vec<_> = (0..2 * MAX_FAILED_FORMS).map(|index| (index, "x".repeat(2 * MAX_REASON))).collect();
        let WorkerEvent::ResetRequested { notices: kept, .. } = WorkerEvent::reset_requested(1, &notices) else {
            unreachable!("the constructor says which event")
        };
        assert_eq!((kept.len(), kept[0].len()), (MAX_NOTICES, MAX_NOTICE));
        let restored = WorkerEvent::replayed(&failed);
        let WorkerEvent::Replayed { failed } = &restored else { unreachable!("the constructor says which event") };
        assert_eq!((failed.len(), failed[0].1.len()), (MAX_FAILED_FORMS, MAX_REASON));
    }

    #[test]
    fn events_with_maximum_contents_fit_into_a_frame() {
        let notices = vec!["\u{1}".repeat(MAX_NOTICE); MAX_NOTICES];
        let failed: Vec<_> = (0..MAX_FAILED_FORMS).map(|index| (index, "\u{1}".repeat(MAX_REASON))).collect();
        for event in [
            WorkerEvent::Ready,
            WorkerEvent::reset_requested(u64::MAX, &notices),
            WorkerEvent::replayed(&failed),
            WorkerEvent::exiting(1, Some(&"\u{1}".repeat(2 * MAX_NOTICE))),
        ] {
            let bytes = event.encode().unwrap();
            assert_eq!(WorkerEvent::decode(&bytes).unwrap().encode(), Ok(bytes));
        }
        let message = "x".repeat(MAX_EVENT);
        let event = WorkerEvent::Changed(SessionEvent::Handshake { call: 1, message });
        assert!(event.encode().unwrap_err().to_string().starts_with("the report takes 8"));
        assert!(WorkerEvent::decode(b"{\"changed\":{\"limits\":null}}").is_err());
    }
}
