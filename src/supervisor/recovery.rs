//! The recovery state: what the next worker must know to go on where the last one stopped.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use super::Options;
use super::journal::Journal;
use super::requests::Requests;
use super::worker_process::WorkerProcess;
use crate::checkpoints::{self, Checkpoint, Checkpoints};
use crate::durable::Durable;
use crate::durable::log::{self, Log, Note};
use crate::handover::frame::{Frame, Kind};
use crate::handover::shared_status::{Status, WorkerStatus, last_number};
use crate::handover::{
    CrashReport, Entry, ErrorChange, Guest, Restored, Resumed, Return, Unrestored, WorkerInit, line_of_job,
};
use crate::interruption::Stuck;
use crate::outcome::Outcome;
use crate::rpc::framing::MAX_LINE;
use crate::session::recovery::Errors;

/// Messages that open a conversation, at most; and of all conversations, those that may, once they are answered.
const MAX_HANDSHAKE: usize = 4;
const MAX_KEPT: usize = 64;

/// How a worker was lost.
#[derive(Debug)]
pub(super) struct Crash {
    /// The rest of a sentence about the image.
    pub(super) cause: String,
    /// What can be said of the evaluation.
    outcome: Option<Box<Outcome>>,
    /// So many workers may be lost like this at the same form of a restore before that form is left out.
    tries: u32,
}

/// The tries of a form when the image ended, and when it was killed by a signal that others send: nobody can tell whether
/// it was the form, but a form does it each time.
const TRIES: u32 = 2;
const TRIES_IF_KILLED: u32 = 3;

impl Crash {
    pub(super) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), outcome: None, tries: TRIES }
    }

    /// The evaluation that ran came to `outcome`.
    pub(super) fn during(self, outcome: impl Into<Option<Outcome>>) -> Self {
        Self { outcome: outcome.into().map(Box::new), ..self }
    }

    /// It was the form that was being restored, not somebody from outside.
    pub(super) fn by_form(self) -> Self {
        Self { tries: 1, ..self }
    }

    /// What it did could not be stopped, an evaluation that came to the outcome in `payload` or what it restored.
    pub(super) fn stuck(payload: &[u8], restored: bool) -> Self {
        let (outcome, why) = serde_json::from_slice(payload).unwrap_or((None, Stuck::Unmoved));
        let crash = Self::new(format!("{} and was ended", why.verb())).during(outcome);
        if restored { crash } else { crash.by_form() }
    }

    /// It may have been somebody from outside.
    pub(super) fn killed(self) -> Self {
        Self { tries: TRIES_IF_KILLED, ..self }
    }

    /// Why a form is left out.
    fn reason(&self, times: u32) -> String {
        match self.tries {
            TRIES_IF_KILLED => format!("the image was killed {times} times while it was evaluated again"),
            _ => "it takes the image down".to_owned(),
        }
    }
}

/// Images that are being saved at the same time, and checkpoints that the next image may begin with.
const MAX_SAVING: usize = 64;
const MAX_BASES: usize = 8;
/// Forms that could not be restored and are remembered: the last ones.
const MAX_UNRESTORED: usize = 100;

/// A checkpoint that the session came through.
#[derive(Debug, Clone)]
struct Base {
    checkpoint: Checkpoint,
    /// What tells the forms that are in it from those that came later.
    mark: u64,
}

/// What outlives a worker.
#[derive(Debug)]
pub(super) struct RecoveryState {
    pub(super) requests: Requests,
    /// What belongs to the handshake once its line is answered.
    keep: Vec<(u64, String)>,
    /// `None` when nothing is to be restored.
    journal: Option<Journal>,
    /// Where checkpoints are.
    pub(super) checkpoints: Checkpoints,
    /// Images begin with them.
    begins_with_checkpoints: bool,
    /// What the next server of a session that lasts is told.
    log: Option<Log>,
    /// Files in which images are being saved, each with the mark of that moment.
    saving: VecDeque<(String, u64)>,
    /// What the next image may begin with: the last one, else the one before.
    bases: VecDeque<Base>,
    /// The form that was being restored when the last worker was lost, and how often in a row it was this one.
    suspect: Option<(usize, u32)>,
    /// What the next worker is told besides.
    next: WorkerInit,
}

impl RecoveryState {
    /// Nothing is known yet.
    pub(super) fn new(options: &Options) -> Self {
        Self {
            requests: Requests::new(),
            keep: Vec::new(),
            journal: options.restore.then(Journal::default),
            checkpoints: options.checkpoints.clone(),
            begins_with_checkpoints: options.begins_with_checkpoints,
            log: None,
            saving: VecDeque::new(),
            bases: VecDeque::new(),
            suspect: None,
            next: WorkerInit::default(),
        }
    }

    /// Goes on where the last server of a session that lasts has stopped.
    ///
    /// # Errors
    /// A sentence: its image needs another heap, or its log cannot be written.
    pub(super) fn go_on(&mut self, durable: &Durable) -> Result<(), String> {
        let loaded = durable.load();
        let files: Vec<_> = loaded.marks.iter().map(|(file, _)| file.clone()).collect();
        let mut journal = Journal::default();
        for entry in loaded.entries {
            journal.add(entry);
        }
        journal.count_dropped(loaded.dropped);
        let all = checkpoints::manifests(durable.directory());
        let mut unusable = None;
        for (file, mark) in loaded.marks {
            let Some(checkpoint) = all.iter().find(|checkpoint| checkpoint.file == file).cloned() else { continue };
            unusable = None;
            if self.checkpoints.is_whole(&checkpoint) {
                self.add_base(Base { checkpoint, mark: mark as u64 });
            } else if let Some(heap) = self.checkpoints.other_heap(&checkpoint) {
                return Err(format!(
                    "The session {:?} was saved with another heap: start it with --heap {}M.",
                    durable.name,
                    heap >> 20
                ));
            } else if let Some(program) = checkpoint.other_program() {
                // Older ones would be a step back: the forms are more.
                self.bases.clear();
                unusable = Some(format!(
                    "Its image was saved by {program}. It cannot be booted here: only definitions come back."
                ));
            } else {
                unusable = Some(format!("The image that was saved last, {:?}, is not whole.", checkpoint.name));
            }
        }
        self.checkpoints.clear_up(&files);
        self.next.errors = loaded.errors;
        self.next.unrestored = loaded.unrestored;
        self.next.evaluations = loaded.evaluations.max(last_number(&durable.status_file()));
        if !self.bases.is_empty() || journal.mark() > 0 {
            self.next.resumed = Some(Resumed { session: durable.name.clone(), unusable });
        }
        self.journal = Some(journal);
        self.log = Some(Log::new(durable.directory()));
        self.write_log().map_err(|error| format!("The session {:?} cannot be written: {error}.", durable.name))
    }

    /// Writes the log anew, where there is one.
    fn write_log(&mut self) -> io::Result<()> {
        let (Some(log), Some(journal)) = (&mut self.log, &self.journal) else { return Ok(()) };
        let from = Note::From { evaluations: self.next.evaluations, dropped: journal.dropped() };
        let mut marks: Vec<_> = self.bases.iter().map(|base| (base.mark, &base.checkpoint.file)).collect();
        marks.extend(self.saving.iter().map(|(file, mark)| (*mark, file)));
        marks.sort_by_key(|(mark, _)| *mark);
        let mut marks = marks.into_iter().peekable();
        let unrestored = Note::Unrestored(self.next.unrestored.clone());
        let mut notes = vec![from, Note::Errors(self.next.errors.clone()), unrestored];
        for (place, entry) in journal.numbered() {
            while let Some((_, file)) = marks.next_if(|(mark, _)| *mark <= place) {
                notes.push(Note::Saving(file.clone()));
            }
            notes.push(Note::Form(entry.clone()));
        }
        notes.extend(marks.map(|(_, file)| Note::Saving(file.clone())));
        log.rewrite(notes.into_iter())
    }

    /// The same after the session has left its line.
    fn begin_log(&mut self) {
        if let Err(error) = self.write_log() {
            tracing::warn!("the session's log cannot be written: {error}");
        }
    }

    fn add_note(&mut self, note: impl FnOnce() -> Option<Note>) {
        let Some(log) = &mut self.log else { return };
        if note().is_some_and(|note| log.add(note)) {
            self.begin_log();
        }
    }

    /// Notes that a worker is done with a line. The connection that it came by; `None` for one that nobody waits for.
    pub(super) fn finished(&mut self, line: u64) -> Option<u64> {
        let connection = self.requests.finish(line)?;
        for (_, text) in self.keep.extract_if(.., |(of, _)| *of == line) {
            let handshake = match self.next.guests.get_mut(&connection) {
                Some(guest) => &mut guest.handshake,
                None => &mut self.next.handshake,
            };
            if handshake.len() < MAX_HANDSHAKE {
                handshake.push(text);
            }
        }
        Some(connection)
    }

    /// A client has joined by this connection.
    pub(super) fn join(&mut self, connection: u64) {
        self.next.guests.insert(connection, Guest::default());
    }

    /// That client is gone.
    pub(super) fn leave(&mut self, connection: u64) {
        self.next.guests.remove(&connection);
        self.requests.forget(connection);
        self.requests.add(connection, b"");
    }

    /// Takes what is to be remembered.
    pub(super) fn note(&mut self, (kind, line, payload): Frame<'_>) {
        match kind {
            Kind::Keep if self.keep.len() < MAX_KEPT => {
                self.keep.push((line, String::from_utf8_lossy(payload).into_owned()));
            }
            Kind::Defined => {
                let entry: Option<Entry> = serde_json::from_slice(payload).ok();
                if let Some(entry) = &entry {
                    self.next.unrestored.retain(|unrestored| !unrestored.is_made_good_by(&entry.form));
                }
                match (&mut self.journal, entry.clone()) {
                    (Some(journal), Some(entry)) => journal.add(entry),
                    (Some(journal), None) => journal.count_dropped(1),
                    (None, _) => {}
                }
                self.add_note(|| entry.map(Note::Form));
            }
            Kind::Error => {
                let Ok(ErrorChange { added, last }) = serde_json::from_slice(payload) else { return };
                if line == 0 {
                    self.next.errors.note(added.clone(), last);
                    self.add_note(|| Some(Note::Error(ErrorChange { added, last })));
                } else if let Some(guest) = self.next.guests.get_mut(&line) {
                    guest.errors.note(added, last);
                }
            }
            Kind::Limits => self.next.limits = serde_json::from_slice(payload).ok(),
            Kind::Saving => {
                if let Ok(file) = serde_json::from_slice(payload) {
                    self.saves(file);
                }
            }
            Kind::Saved => self.saved(serde_json::from_slice(payload).ok()),
            _ => {}
        }
    }

    /// Takes a worker's word on what it could not restore, which will not be tried again. It is to get the lines now.
    pub(super) fn resume(&mut self, restored: &Restored) {
        let mark = self.bases.back().map_or(0, |base| base.mark);
        let mut unrestored = self.next.crash.as_ref().map_or(Vec::new(), |crash| crash.deadly.clone());
        if let Some(journal) = self.journal.as_mut().filter(|_| !restored.failed.is_empty()) {
            let since = journal.since(mark);
            let failed = restored.failed.iter();
            unrestored.extend(failed.filter_map(|(place, reason)| Some(Unrestored::new(since.get(*place)?, reason))));
            journal.remove(mark, &restored.failed.iter().map(|(place, _)| *place).collect());
        }
        if !unrestored.is_empty() {
            self.next.unrestored.append(&mut unrestored);
            let excess = self.next.unrestored.len().saturating_sub(MAX_UNRESTORED);
            self.next.unrestored.drain(..excess);
            self.begin_log();
        }
        self.suspect = None;
    }

    /// Remembers that the image of a worker was lost, which had restored what there was or not. True when that is a step
    /// forward: a form that is being restored is suspected of it, or found guilty.
    pub(super) fn lose(&mut self, status: &WorkerStatus, restored: bool, lost: &Crash) -> bool {
        self.keep.clear();
        self.take_finished();
        let begun = self.begun(status);
        let in_flight = begun > status.get(Status::Ended);
        let background = status.background();
        // A job that no line asked for is the server's own.
        let connection = self.requests.connection(line_of_job(begun)).unwrap_or(0);
        // Nobody has asked for what is restored.
        let stuck = lost.outcome.clone().filter(|_| restored);
        let cause = match status.step().filter(|_| in_flight && restored && stuck.is_none()) {
            Some(step) => format!("{}; it was at {step}", lost.cause),
            None => lost.cause.clone(),
        };
        let mut crash = CrashReport { cause, in_flight, connection, background, stuck, deadly: Vec::new() };
        let mut further = false;
        if restored {
            self.next.notices.clear();
            self.next.resumed = None;
        } else {
            // The crash that this one was to make good is what the client must hear of.
            crash = self.next.crash.take().unwrap_or(crash);
            let restoring = usize::try_from(status.get(Status::Restoring)).unwrap_or(0);
            let mark = self.bases.back().map_or(0, |base| base.mark);
            match restoring.checked_sub(1) {
                Some(place) => {
                    let before = self.suspect.filter(|(suspect, _)| *suspect == place).map_or(0, |(_, times)| times);
                    let times = before + 1;
                    if times < lost.tries {
                        further = before > 0 || self.suspect.is_none();
                        self.suspect = Some((place, times));
                    } else {
                        self.suspect = None;
                        let form = self.journal.as_mut().and_then(|journal| journal.take(mark, place));
                        crash.deadly.extend(form.map(|form| Unrestored::new(&form, &lost.reason(times))));
                        further = true;
                    }
                }
                // The checkpoint did not come up: the one before it may.
                None => drop(self.bases.pop_back()),
            }
        }
        self.note_numbers(status);
        self.note_question(status);
        self.next.crash = Some(crash);
        further
    }

    /// Remembers nothing of the image but the limits, as `line` asks for, and what there was yet to be said.
    pub(super) fn forget(&mut self, status: &WorkerStatus, line: u64, notices: Vec<String>) {
        self.begin_anew(status, line, notices);
        self.errors_of(line).reset();
        self.journal = self.journal.take().map(|_| Journal::default());
        self.bases.clear();
        self.next.returned = None;
        self.next.unrestored.clear();
        self.begin_log();
        self.checkpoints.forget_since(None);
    }

    /// Forgets what was going on in the image that `line` puts aside, which had this to say yet.
    fn begin_anew(&mut self, status: &WorkerStatus, line: u64, notices: Vec<String>) {
        self.keep.clear();
        self.saving.clear();
        self.note_numbers(status);
        (self.next.crash, self.next.resumed) = (None, None);
        self.next.reset = Some(line);
        self.next.reset_by = self.requests.connection(line).unwrap_or(0);
        self.next.notices = notices;
    }

    /// What the client knows of errors that has sent a line.
    fn errors_of(&mut self, line: u64) -> &mut Errors {
        let guest = self.requests.connection(line).and_then(|connection| self.next.guests.get_mut(&connection));
        guest.map_or(&mut self.next.errors, |guest| &mut guest.errors)
    }

    /// Notes which line's question the worker was about to answer.
    fn note_question(&mut self, status: &WorkerStatus) {
        let line = line_of_job(status.get(Status::Inspecting));
        if self.requests.has(line) {
            let before = self.next.inspected.filter(|(known, _)| *known == line).map_or(0, |(_, times)| times);
            self.next.inspected = Some((line, before + 1));
        }
    }

    /// Goes back to a checkpoint, as `line` asks for: what came later is forgotten, but for the history of errors.
    pub(super) fn go_back(&mut self, status: &WorkerStatus, line: u64, to: Return) {
        let Return { checkpoint, notices } = to;
        self.begin_anew(status, line, notices);
        self.errors_of(line).last = None;
        // What is beside it: the session may not have come through it.
        let forms = log::load_forms(&self.checkpoints.forms_path(&checkpoint.file)).unwrap_or_default();
        self.next.unrestored = forms.unrestored;
        match self.bases.iter().position(|base| base.checkpoint.file == checkpoint.file) {
            Some(place) => {
                self.bases.truncate(place + 1);
                if let Some(journal) = &mut self.journal {
                    journal.go_back(self.bases[place].mark);
                }
            }
            None => {
                let mut journal = Journal::default();
                forms.entries.into_iter().for_each(|entry| journal.add(entry));
                self.bases = VecDeque::from([Base { checkpoint: checkpoint.clone(), mark: journal.mark() }]);
                self.journal = self.journal.take().map(|_| journal);
            }
        }
        self.next.returned = Some((checkpoint.clone(), self.next.evaluations.saturating_sub(checkpoint.evaluation)));
        self.begin_log();
        self.checkpoints.forget_since(Some(&checkpoint));
    }

    /// Notes that the image is being saved from here on.
    fn saves(&mut self, file: String) {
        let mark = self.journal.as_ref().map_or(0, Journal::mark);
        if let Some(journal) = &self.journal
            && (mark > 0 || !self.next.unrestored.is_empty())
        {
            // Without them going back to it from elsewhere still brings the image.
            let path = self.checkpoints.forms_path(&file);
            let _ = log::write_forms(&path, &journal.since(0), &self.next.unrestored);
        }
        self.add_note(|| Some(Note::Saving(file.clone())));
        self.saving.push_back((file, mark));
        if self.saving.len() > MAX_SAVING {
            // It came to nothing, which nobody says.
            self.saving.pop_front();
        }
    }

    /// Has the next image begin with a checkpoint that was just finished.
    fn saved(&mut self, checkpoint: Option<Checkpoint>) {
        let Some(checkpoint) = checkpoint else { return };
        let Some(place) = self.saving.iter().position(|(file, _)| *file == checkpoint.file) else { return };
        if let Some((_, mark)) = self.saving.remove(place) {
            self.bases.retain(|base| base.checkpoint.name != checkpoint.name);
            // Not before this: until now the image would have begun with it.
            self.checkpoints.delete_replaced(&checkpoint);
            self.add_base(Base { checkpoint, mark });
        }
    }

    /// Has the next image begin with what the last one has finished without a word: it was lost in between. True when
    /// there is such a one.
    pub(super) fn take_finished(&mut self) -> bool {
        let finished: Vec<_> = self.saving.iter().filter_map(|(file, _)| self.checkpoints.of_file(file)).collect();
        let any = !finished.is_empty();
        finished.into_iter().for_each(|checkpoint| self.saved(Some(checkpoint)));
        any
    }

    fn add_base(&mut self, base: Base) {
        // One that was begun before another may be finished after it.
        let place = self.bases.partition_point(|other| other.mark <= base.mark);
        self.bases.insert(place, base);
        if self.bases.len() > MAX_BASES {
            self.bases.pop_front();
        }
    }

    /// The core that the next image begins with, if that is not the plain one.
    pub(super) fn image(&mut self) -> Option<PathBuf> {
        let checkpoints = &self.checkpoints;
        // Named ones may have been deleted since.
        self.bases.retain(|base| self.begins_with_checkpoints && checkpoints.path(&base.checkpoint).is_file());
        self.bases.back().map(|base| checkpoints.path(&base.checkpoint))
    }

    /// Notes how far the worker's jobs and evaluations have come.
    fn note_numbers(&mut self, status: &WorkerStatus) {
        self.next.through = self.next.through.max(self.begun(status));
        self.next.evaluations = self.next.evaluations.max(status.get(Status::Numbered).min(u64::MAX / 2));
    }

    /// The last job that the worker began, if a line asked for it: anything may have written to the memory that says
    /// so.
    fn begun(&self, status: &WorkerStatus) -> u64 {
        Some(status.get(Status::Begun)).filter(|job| line_of_job(*job) < self.requests.next()).unwrap_or(0)
    }

    /// True when `line` may ask for a fresh image: it waits, and has not got one.
    pub(super) fn may_reset(&self, line: u64) -> bool {
        self.requests.has(line) && self.next.reset != Some(line)
    }

    /// What a new worker is told of where the last one stopped. It gets the lines once it is ready.
    pub(super) fn init(&self) -> WorkerInit {
        WorkerInit {
            resent: self.requests.iter().map(|(number, ..)| number).collect(),
            next: self.requests.next(),
            journal: self.journal.as_ref().map(|journal| journal.since(self.bases.back().map_or(0, |base| base.mark))),
            checkpoint: self.bases.back().map(|base| base.checkpoint.clone()),
            dropped: self.journal.as_ref().map_or(0, Journal::dropped),
            ..self.next.clone()
        }
    }

    /// Tells it.
    pub(super) fn hand_over(&self, worker: &mut WorkerProcess) -> io::Result<()> {
        let mut init = self.init();
        let mut line = serde_json::to_vec(&init)?;
        if line.len() >= MAX_LINE {
            // Control characters take six bytes each. The definitions always fit.
            let guests = init.guests.values_mut().map(|guest| &mut guest.errors);
            guests.chain([&mut init.errors]).for_each(|errors| errors.history = Default::default());
            line = serde_json::to_vec(&init)?;
        }
        line.push(b'\n');
        worker.input.as_mut().map_or(Ok(()), |input| input.put(&line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoints::tests::Place;
    use crate::supervisor::Options;

    /// What is known of a session that goes on with checkpoints in this place, and the numbers of its worker.
    fn session(place: &Place) -> (RecoveryState, WorkerStatus) {
        let options = Options {
            arguments: Vec::new(),
            restore: true,
            checkpoints: place.0.clone(),
            begins_with_checkpoints: true,
            durable: None,
            listener: None,
            watch_interval: std::time::Duration::from_secs(1),
            recorder: None,
        };
        (RecoveryState::new(&options), WorkerStatus::new(None).expect("memory"))
    }

    fn note(state: &mut RecoveryState, kind: Kind, what: &impl serde::Serialize) {
        state.note((kind, 0, &serde_json::to_vec(what).expect("JSON")));
    }

    #[test]
    fn what_was_finished_without_a_word_is_what_the_next_image_begins_with() {
        let place = Place::new("finished");
        let (mut state, status) = session(&place);
        let [first, second] = [("auto-1", 1), ("auto-2", 2)].map(|(name, seconds)| place.add(name, seconds, 10));
        note(&mut state, Kind::Saving, &first.file);
        note(&mut state, Kind::Saved, &first);
        note(&mut state, Kind::Saving, &"of which nothing came.core");
        note(&mut state, Kind::Saving, &second.file);
        assert_eq!(state.image(), Some(place.0.path(&first)));
        state.lose(&status, true, &Crash::new("died"));
        assert_eq!(state.image(), Some(place.0.path(&second)));
        // It is taken once: if it does not come up, it is the one before.
        state.lose(&status, false, &Crash::new("died"));
        assert_eq!(state.image(), Some(place.0.path(&first)));
    }

    #[test]
    fn what_is_finished_as_the_image_is_lost_counts_too_and_however_many_are_being_saved() {
        let place = Place::new("late");
        let (mut state, status) = session(&place);
        let late = place.add("auto-1", 1, 10);
        let manifest = place.0.path(&late).with_extension("json");
        let unfinished = manifest.with_extension("draft");
        std::fs::rename(&manifest, &unfinished).expect("it is there");
        note(&mut state, Kind::Saving, &late.file);
        for number in 1..MAX_SAVING {
            note(&mut state, Kind::Saving, &format!("{number}.core"));
        }
        state.lose(&status, true, &Crash::new("died"));
        assert_eq!(state.image(), None);
        assert!(!state.take_finished());
        std::fs::rename(&unfinished, &manifest).expect("it is there");
        assert!(state.take_finished());
        assert_eq!(state.image(), Some(place.0.path(&late)));
        assert!(!state.take_finished());
    }

    #[test]
    fn those_of_which_nothing_comes_keep_no_later_one_from_counting() {
        let place = Place::new("nothing");
        let (mut state, _) = session(&place);
        for number in 0..2 * MAX_SAVING {
            note(&mut state, Kind::Saving, &format!("{number}.core"));
        }
        let saved = place.add("auto-1", 1, 10);
        note(&mut state, Kind::Saving, &saved.file);
        note(&mut state, Kind::Saved, &saved);
        assert_eq!(state.image(), Some(place.0.path(&saved)));
    }
}
