//! The log of a session that lasts: what its next server must know besides its image, a note of JSON a line.
//!
//! The supervisor adds a note as it hears of what happens, and writes the log anew where the session leaves its line: at
//! a start, a reset, a return to a checkpoint, and when the log has grown. A last line that a crash has cut off is none.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoints::write_whole;
use crate::handover::{Entry, ErrorChange, Unrestored};
use crate::rpc::framing::MAX_LINE;
use crate::session::recovery::Errors;

/// The file.
pub(super) const LOG: &str = "log";
/// A log that has grown by so many bytes is written anew.
const GROWTH: u64 = 64 << 20;

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Note {
    /// Where the log begins: the number of the last evaluation, and how many forms there was no room for.
    From { evaluations: u64, dropped: usize },
    /// The errors that there were.
    Errors(Errors),
    /// What could not be restored.
    Unrestored(Vec<Unrestored>),
    /// A form that defined something.
    Form(Entry),
    /// What an evaluation did to the errors.
    Error(ErrorChange),
    /// The image is being saved in a file of this name: it has all forms so far in it.
    Saving(String),
}

/// What a log says.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) entries: Vec<Entry>,
    /// The files that the image was saved in, each with how many forms came before.
    pub(crate) marks: Vec<(String, usize)>,
    pub(crate) errors: Errors,
    pub(crate) unrestored: Vec<Unrestored>,
    pub(crate) evaluations: u64,
    pub(crate) dropped: usize,
}

/// Reads the log in a session's directory; one that is not there says nothing.
pub(super) fn load(directory: &Path) -> Loaded {
    File::open(directory.join(LOG)).map_or_else(|_| Loaded::default(), |file| read(BufReader::new(file)))
}

/// True when there is one in a directory.
pub(super) fn is_in(directory: &Path) -> bool {
    let mut line = Vec::new();
    let file = File::open(directory.join(LOG)).map(|file| BufReader::new(file).take(MAX_LINE as u64));
    file.and_then(|mut file| file.read_until(b'\n', &mut line)).is_ok()
        && matches!(serde_json::from_slice(&line), Ok(Note::From { .. }))
}

/// Reads the forms that are in a checkpoint; `None` where they were not kept.
pub(crate) fn load_forms(path: &Path) -> Option<Loaded> {
    File::open(path).ok().map(|file| read(BufReader::new(file)))
}

fn read(mut file: impl BufRead) -> Loaded {
    let mut loaded = Loaded::default();
    let mut line = Vec::new();
    loop {
        line.clear();
        match file.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return loaded,
            Ok(_) => {}
        }
        match serde_json::from_slice(&line) {
            Ok(Note::From { evaluations, dropped }) => (loaded.evaluations, loaded.dropped) = (evaluations, dropped),
            Ok(Note::Errors(errors)) => loaded.errors = errors,
            Ok(Note::Unrestored(unrestored)) => loaded.unrestored = unrestored,
            Ok(Note::Form(entry)) => {
                // Some of them were defined before they could not be restored.
                loaded.unrestored.retain(|unrestored| !unrestored.is_made_good_by(&entry.form));
                loaded.evaluations = loaded.evaluations.max(entry.evaluation);
                loaded.entries.push(entry);
            }
            Ok(Note::Error(ErrorChange { added, last })) => loaded.errors.note(added, last),
            Ok(Note::Saving(file)) => loaded.marks.push((file, loaded.entries.len())),
            // The disk was full, or the machine stopped.
            Err(_) => {}
        }
    }
}

/// The forms of a log, and those that could not be restored, as a file of their own.
pub(crate) fn write_forms(path: &Path, entries: &[Entry], unrestored: &[Unrestored]) -> io::Result<()> {
    let last = std::iter::once(Note::Unrestored(unrestored.to_vec()));
    write_whole(path, &lines(entries.iter().cloned().map(Note::Form).chain(last)))
}

fn lines(notes: impl Iterator<Item = Note>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for note in notes {
        let before = bytes.len();
        match serde_json::to_writer(&mut bytes, &note) {
            Ok(()) => bytes.push(b'\n'),
            Err(_) => bytes.truncate(before),
        }
    }
    bytes
}

/// A log that is being written.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: Option<File>,
    grown: u64,
    /// The last line may not be whole, and what else could not be written is not there.
    torn: bool,
}

impl Log {
    /// The log in a session's directory, which is [written anew](Self::rewrite) before all else.
    pub(crate) fn new(directory: &Path) -> Self {
        Self { path: directory.join(LOG), file: None, grown: 0, torn: false }
    }

    /// Puts these notes in place of all that there are.
    ///
    /// # Errors
    /// The file cannot be written; it is as it was.
    pub(crate) fn rewrite(&mut self, notes: impl Iterator<Item = Note>) -> io::Result<()> {
        self.torn = self.file.is_some();
        write_whole(&self.path, &lines(notes))?;
        self.file = Some(OpenOptions::new().append(true).mode(0o600).open(&self.path)?);
        (self.grown, self.torn) = (0, false);
        Ok(())
    }

    /// Adds a note. True when it is time to write the log anew: it has grown, or some could not be written before.
    pub(crate) fn add(&mut self, note: Note) -> bool {
        let mut line = lines(std::iter::once(note));
        let was_torn = self.torn;
        if was_torn {
            line.insert(0, b'\n');
        }
        if let Some(file) = &mut self.file {
            self.grown += line.len() as u64;
            let written = file.write_all(&line);
            if let (false, Err(error)) = (was_torn, &written) {
                tracing::warn!("the session's log cannot be written: {error}");
            }
            self.torn = written.is_err();
        }
        self.grown > GROWTH || was_torn && !self.torn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::DefiningForm;

    fn form(code: &str, evaluation: u64) -> Note {
        let form = DefiningForm { code: code.to_owned(), package: "COMMON-LISP-USER".to_owned() };
        Note::Form(Entry { form, local: false, evaluation, took: 1 })
    }

    #[test]
    fn what_is_written_is_read_up_to_where_it_was_cut_off() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-log-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut log = Log::new(&directory);
        log.rewrite([Note::From { evaluations: 7, dropped: 1 }, form("(a)", 3)].into_iter()).unwrap();
        log.add(Note::Saving("x.core".to_owned()));
        log.add(form("(b)", 9));
        let whole = std::fs::read(&log.path).unwrap();
        let mut seen = 0;
        for end in 0..=whole.len() {
            std::fs::write(&log.path, &whole[..end]).unwrap();
            let loaded = load(&directory);
            assert!(loaded.entries.len() >= seen, "{end}");
            seen = loaded.entries.len();
        }
        let loaded = load(&directory);
        let codes: Vec<_> = loaded.entries.iter().map(|entry| &*entry.form.code).collect();
        assert_eq!(codes, ["(a)", "(b)"]);
        assert_eq!(loaded.marks, [("x.core".to_owned(), 1)]);
        assert_eq!((loaded.evaluations, loaded.dropped), (9, 1));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_a_full_disk_has_cost_is_written_later() {
        let directory = std::env::temp_dir().join(format!("sbcl-mcp-full-log-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut log = Log::new(&directory);
        log.rewrite([form("(a)", 1)].into_iter()).unwrap();
        assert!(!log.add(form("(b)", 2)));
        let file = log.file.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
        assert!(!log.add(form("(c)", 3)) && !log.add(form("(d)", 4)));
        log.file = file;
        // There is room again, perhaps for a line and no more.
        assert!(log.add(form("(e)", 5)));
        let draft = log.path.with_extension("draft");
        std::os::unix::fs::symlink("/dev/full", &draft).unwrap();
        assert!(log.rewrite((1..6).map(|number| form("(f)", number))).is_err());
        assert_eq!(load(&directory).entries.len(), 3);
        assert!(log.add(form("(g)", 6)));
        log.rewrite((1..8).map(|number| form("(h)", number))).unwrap();
        assert_eq!(load(&directory).entries.len(), 7);
        assert!(!log.add(form("(i)", 8)));
        assert_eq!(load(&directory).entries.len(), 8);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
