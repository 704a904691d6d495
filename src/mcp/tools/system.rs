//! ASDF systems: their names, and the search for their definitions.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Call, Fault};
use crate::os::panics;
use crate::session::{Operation, quoted};

/// Maximum number of entries read in one directory.
const MAX_ENTRIES: usize = 2_000;
/// Maximum size of an .asd file that is read, in bytes.
const MAX_ASD_FILE_BYTES: u64 = 1 << 20;
/// Maximum size of all .asd files that one request reads, in bytes.
const MAX_TOTAL_ASD_BYTES: u64 = 8 << 20;

/// Maximum duration of the search for the systems of one call.
const SEARCH_TIME: Duration = Duration::from_secs(5);
/// Maximum number of searches at the same time. A search that is blocked in the read of a file outlives its call.
const MAX_SEARCHES: usize = 32;

/// Runs `search` on a separate thread, because the read of a file may block, and returns its result. The wait for the
/// result ends after [`SEARCH_TIME`], or when the client cancels `call`.
///
/// # Errors
/// Returns the error of `search`, or an error if there was no result in time.
pub(super) fn run_search<T: Send + 'static>(
    call: &Call,
    search: impl FnOnce(&DefinitionCache) -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let (sender, result) = channel();
    let cancelled = sender.clone();
    // A cancelled call gets no answer, so its fault is never seen.
    let fault = || Err(Fault::Refusal("The call was cancelled.".to_owned()));
    if !call.pending().on_cancel(move || drop(cancelled.send(fault()))) {
        return fault();
    }
    run_search_within(SEARCH_TIME, sender, &result, search)
}

/// The number of threads that search.
static SEARCHES: AtomicUsize = AtomicUsize::new(0);

fn run_search_within<T: Send + 'static>(
    time: Duration,
    sender: Sender<Result<T, Fault>>,
    result: &Receiver<Result<T, Fault>>,
    search: impl FnOnce(&DefinitionCache) -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let stopped = Arc::new(AtomicBool::new(false));
    let is_stopped = stopped.clone();
    let run = move || {
        let known = DefinitionCache { stopped: is_stopped, ..DefinitionCache::default() };
        let found = panics::catch(|| search(&known));
        SEARCHES.fetch_sub(1, Ordering::Relaxed);
        let failed = || {
            Err(Fault::Refusal(
                "The search for the .asd file failed; the server's stderr has the details. Choose another directory to \
                 search first, such as the one that contains the .asd file."
                    .to_owned(),
            ))
        };
        let _ = sender.send(found.unwrap_or_else(failed));
    };
    if SEARCHES.fetch_add(1, Ordering::Relaxed) >= MAX_SEARCHES {
        SEARCHES.fetch_sub(1, Ordering::Relaxed);
        return Err(Fault::Refusal(format!(
            "{MAX_SEARCHES} searches for .asd files are still running: try again later."
        )));
    }
    if let Err(error) = std::thread::Builder::new().name("sbcl-mcp-search".to_owned()).spawn(run) {
        SEARCHES.fetch_sub(1, Ordering::Relaxed);
        return Err(Fault::Refusal(format!(
            "A thread to search for the .asd file could not be started: {error}. Try again later."
        )));
    }
    let found = result.recv_timeout(time);
    stopped.store(true, Ordering::Relaxed);
    found.unwrap_or_else(|_| {
        Err(Fault::Refusal(format!(
            "The search for the .asd file was stopped after {} seconds: there are too many .asd files in or near the \
             directory, or one of the files takes too long to read. Choose another directory to search first, such \
             as the one that contains the .asd file.",
            time.as_secs_f64()
        )))
    })
}

/// An ASDF system, and the file that defines it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::mcp) struct System {
    name: String,
    /// The definition, if the search found one.
    definition: Option<SystemDefinition>,
    /// True if the definition is used only when ASDF knows no system with this name.
    fallback: bool,
    /// Descriptions of the directories that were searched, for messages.
    looked: Vec<String>,
}

/// The file that defines a system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum SystemDefinition {
    /// The file in this directory that has the system's name.
    #[serde(rename = "In")]
    InDirectory(PathBuf),
    /// This file, which has another name.
    #[serde(rename = "By")]
    InFile(PathBuf),
}

impl System {
    /// Finds the system with this name, which may be written as a string or symbol. If nothing defines exactly this
    /// name, letter case is ignored. The search begins in `directory`, or else in the working directory. A definition found
    /// from `directory` takes precedence over ASDF's. `known` caches the directories and files that the searches of one
    /// request read.
    ///
    /// # Errors
    /// Returns an error if `directory` does not exist, or if there is no `directory` and no working directory.
    pub(super) fn find(name: &str, directory: Option<&str>, known: &DefinitionCache) -> Result<Self, Fault> {
        let name = system_name(name);
        let begin = directory.map_or_else(|| absolute_path("."), existing_directory)?;
        let found = find_definition(&name, &begin, known);
        let looked = vec![format!("{}, its parent directories and its direct subdirectories", begin.display())];
        let (name, definition) = found.map_or((name, None), |(name, definition)| (name, Some(definition)));
        Ok(Self { name, definition, fallback: directory.is_none(), looked })
    }

    /// Returns true if `self` and `other` are the same system. If neither has a definition, their names may differ in
    /// case, since ASDF is also asked for the lower-case name.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let alike =
            self.definition.is_none() && other.definition.is_none() && eq_ignoring_case(&self.name, &other.name);
        self.name == other.name || alike
    }

    /// Returns the system that has the name of the .asd file at `path`.
    pub(super) fn from_asd_file(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        Self { name, definition: Some(SystemDefinition::InDirectory(directory)), fallback: false, looked: Vec::new() }
    }

    /// Returns the system of the only .asd file in a directory.
    ///
    /// # Errors
    /// Returns an error if the directory has no .asd file or more than one.
    pub(super) fn from_directory(directory: &Path) -> Result<Self, Fault> {
        match &asd_files_in(directory)[..] {
            [path] => Ok(Self::from_asd_file(path)),
            [] => Err(Fault::Refusal(match fs::read_dir(directory) {
                Ok(_) => {
                    format!("There is no .asd file in {}: name a Lisp file or another directory.", directory.display())
                }
                Err(error) => format!("The directory {} cannot be read: {error}.", directory.display()),
            })),
            paths => {
                let names: Vec<_> = paths.iter().filter_map(|path| path.file_stem()?.to_str()).collect();
                let names = names.join(", ");
                Err(Fault::Refusal(format!(
                    "{} has several .asd files: name one of the systems {names}, and pass this directory as `directory`.",
                    directory.display()
                )))
            }
        }
    }

    /// Returns code that loads the system and can be read in any package. `force` is `self` to compile the system again, or
    /// `all` for its dependencies too. Without `force`, only changed files are compiled again.
    pub(in crate::mcp) fn code(&self, force: Option<&str>) -> String {
        let name = quoted(&self.name);
        let lower = quoted(&self.name.to_lowercase());
        let name = match &self.definition {
            None if name != lower => format!("(cl:if (asdf:find-system {name} cl:nil) {name} {lower})"),
            _ => name,
        };
        let load = match force {
            None => format!("(asdf:load-system {name})"),
            Some("all") => format!("(asdf:load-system {name} :force :all)"),
            Some(_) => format!("(asdf:load-system {name} :force cl:t)"),
        };
        let primary = primary_name(&self.name);
        let directory_pathname = |directory: &Path| pathname(&format!("{}/", directory.display()));
        let file_pathname = |file: &Path| pathname(&file.display().to_string());
        let (file, entry, definition) = match &self.definition {
            None => return load,
            Some(SystemDefinition::InDirectory(directory)) => {
                (directory.join(format!("{primary}.asd")), directory_pathname(directory), String::new())
            }
            Some(SystemDefinition::InFile(file)) => {
                let directory = directory_pathname(file.parent().unwrap_or(Path::new("/")));
                let (primary, path) = (quoted(primary), file_pathname(file));
                // A plain SBCL that loads an export does not search the entry, and needs the other steps.
                let definition = format!(
                    "\n(cl:when (asdf:registered-system {primary})\n  (cl:setf (asdf:system-source-file \
                     (asdf:registered-system {primary})) {path}))\n(asdf:load-asd {path} :name {primary})"
                );
                (file.clone(), format!("(cl:list 'cl:values {directory} {primary} {path})"), definition)
            }
        };
        let path = file_pathname(&file);
        // The code does what the Lisp function REGISTER-DEFINITION does. If the file is missing, the code fails: ASDF would
        // load a system with the same name from elsewhere.
        let known = format!(
            "(cl:setf asdf:*central-registry*\n  (cl:cons {entry} (cl:remove {entry} asdf:*central-registry* :test \
             #'cl:equal)))\n(cl:truename {path}){definition}"
        );
        // Lists of forms show only the beginning of the code.
        let title = format!("; load-system {} from {}", self.name, file.display()).replace('\n', " ");
        if self.fallback {
            format!("{title}\n(cl:unless (asdf:find-system {name} cl:nil)\n  {known})\n{load}")
        } else {
            format!("{title}\n{known}\n{load}")
        }
    }

    /// Adds the system's name, and the location of its definition, to an operation.
    pub(in crate::mcp) fn add_to(&self, operation: Operation) -> Operation {
        let (directory, file) = match &self.definition {
            Some(SystemDefinition::InDirectory(directory)) => (Some(directory), None),
            Some(SystemDefinition::InFile(file)) => (None, Some(file)),
            None => (None, None),
        };
        let text = |path: Option<&PathBuf>| path.map(|path| path.display().to_string());
        operation
            .with("system", self.name.as_str())
            .with_optional("directory", text(directory))
            .with_optional("definition", text(file))
            .with("fallback", self.fallback)
            .with("looked", self.looked.clone())
    }
}

/// Returns the absolute path of a directory.
///
/// # Errors
/// Returns an error if the directory does not exist.
pub(super) fn existing_directory(directory: &str) -> Result<PathBuf, Fault> {
    let directory = absolute_path(directory)?;
    if directory.is_dir() {
        return Ok(directory);
    }
    Err(Fault::Refusal(format!("The argument directory must be an existing directory, not {}.", directory.display())))
}

/// Returns an absolute path. `~/` stands for the user's home directory, and relative paths begin in the working
/// directory.
pub(super) fn absolute_path(path: &str) -> Result<PathBuf, Fault> {
    let path = match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    };
    let path = std::path::absolute(path).map_err(|error| {
        Fault::Refusal(format!(
            "The server's working directory cannot be found: {error}. Pass an absolute `directory`."
        ))
    })?;
    // ASDF needs a path without `.` and `..`.
    Ok(path.canonicalize().unwrap_or(path))
}

/// Returns the name of a system that may be written as a string or symbol: `"my-app"`, `:my-app`, `#:MY-APP`.
fn system_name(written: &str) -> String {
    let name = written.trim().trim_matches('"');
    match name.strip_prefix("#:").or_else(|| name.strip_prefix(':')) {
        Some(symbol) => symbol.to_lowercase(),
        None => name.to_owned(),
    }
}

/// Finds the name and the definition of the system `written`: in `begin`, above it, or one level below.
fn find_definition(written: &str, begin: &Path, known: &DefinitionCache) -> Option<(String, SystemDefinition)> {
    let lower = written.to_lowercase();
    let names = std::iter::once(written).chain((lower != written).then_some(lower.as_str()));
    names.into_iter().find_map(|name| find_as_written(name, begin, known)).or_else(|| {
        // Neither `written` nor its lower-case spelling was found, so letter case is ignored. Above `begin`, a file must
        // have the system's name, since ASDF finds no other file.
        begin.ancestors().find_map(|directory| {
            let paths = known.asd_files(directory);
            let found = paths.iter().filter(|path| {
                directory == begin
                    || path
                        .file_stem()
                        .is_some_and(|stem| eq_ignoring_case(&stem.to_string_lossy(), primary_name(&lower)))
            });
            only_item(found.filter_map(|path| known.defined_by(path, written)).collect())
        })
    })
}

/// Finds a system whose definition, or whose .asd file, has exactly this name.
fn find_as_written(name: &str, begin: &Path, known: &DefinitionCache) -> Option<(String, SystemDefinition)> {
    let file = format!("{}.asd", primary_name(name));
    let in_directory = |directory: &Path| {
        let path = directory.join(&file);
        let found = !primary_name(name).is_empty() && path.is_file();
        // The file may define the system by code that [`defined_names`] does not understand.
        found.then(|| {
            known
                .defined_by(&path, name)
                .unwrap_or_else(|| (name.to_owned(), SystemDefinition::InDirectory(directory.to_owned())))
        })
    };
    let by_content = || {
        let paths = known.asd_files(begin);
        let mut with_name = paths.iter().filter(|path| known.names(path).iter().any(|known| known == name));
        with_name.find_map(|path| known.defined_by(path, name))
    };
    let below = || known.subdirectories(begin).iter().find_map(|directory| in_directory(directory));
    let found = in_directory(begin).or_else(by_content);
    found.or_else(|| begin.ancestors().find_map(in_directory)).or_else(below)
}

/// Returns the part of a system's name before the slash: the primary system name, which is the name of the .asd file.
fn primary_name(name: &str) -> &str {
    name.split('/').next().unwrap_or(name)
}

fn eq_ignoring_case(one: &str, other: &str) -> bool {
    one.to_lowercase() == other.to_lowercase()
}

/// Returns the only item, or `None` if there is not exactly one.
fn only_item<T>(mut items: Vec<T>) -> Option<T> {
    if items.len() == 1 { items.pop() } else { None }
}

/// Returns the .asd files in a directory, sorted.
fn asd_files_in(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    let mut paths: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new("asd")) && path.is_file())
        .collect();
    paths.sort();
    paths
}

/// Reads a directory and returns the entries that may be directories and are not hidden, sorted.
fn subdirectories_of(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    let hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let seen = entries.filter(|entry| !hidden(entry) && !is_file(entry));
    let mut directories: Vec<_> = seen.map(|entry| entry.path()).collect();
    directories.sort();
    directories
}

/// The directories and .asd files that the searches of one request have read: each is read once, up to a total size.
#[derive(Default)]
pub(super) struct DefinitionCache {
    directories: RefCell<HashMap<PathBuf, Rc<[PathBuf]>>>,
    paths: RefCell<HashMap<PathBuf, Rc<[PathBuf]>>>,
    names: RefCell<HashMap<PathBuf, Rc<[String]>>>,
    bytes_read: Cell<u64>,
    /// True once nothing waits for the searches any more. The rest of the directories and files are then not read.
    stopped: Arc<AtomicBool>,
}

impl DefinitionCache {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Returns the .asd files in a directory, sorted.
    fn asd_files(&self, directory: &Path) -> Rc<[PathBuf]> {
        if self.is_stopped() {
            return Rc::default();
        }
        let mut paths = self.paths.borrow_mut();
        paths.entry(directory.to_owned()).or_insert_with(|| asd_files_in(directory).into()).clone()
    }

    /// Returns the entries of a directory that may be directories and are not hidden, sorted.
    fn subdirectories(&self, directory: &Path) -> Rc<[PathBuf]> {
        if self.is_stopped() {
            return Rc::default();
        }
        let mut known = self.directories.borrow_mut();
        known.entry(directory.to_owned()).or_insert_with(|| subdirectories_of(directory).into()).clone()
    }

    /// Returns the names of the systems that the .asd file at `path` seems to define, or no names once the request has
    /// read more than [`MAX_TOTAL_ASD_BYTES`].
    fn names(&self, path: &Path) -> Rc<[String]> {
        if self.is_stopped() {
            return Rc::default();
        }
        let mut names = self.names.borrow_mut();
        let read = || {
            self.bytes_read.update(|read| read + fs::metadata(path).map_or(0, |file| file.len()));
            if self.bytes_read.get() > MAX_TOTAL_ASD_BYTES { Vec::new() } else { defined_names(path) }.into()
        };
        names.entry(path.to_owned()).or_insert_with(read).clone()
    }

    /// Returns the name and definition of the system `written` if the .asd file at `path` seems to define this system,
    /// or defines exactly one system whose name differs only in case.
    fn defined_by(&self, path: &Path, written: &str) -> Option<(String, SystemDefinition)> {
        let names = self.names(path);
        let name = if names.iter().any(|name| name == written) {
            written.to_owned()
        } else {
            let lower = written.to_lowercase();
            let mut alike: Vec<_> = names.iter().filter(|name| name.to_lowercase() == lower).cloned().collect();
            alike.sort();
            alike.dedup();
            only_item(alike)?
        };
        let is_named_so = path.file_stem().and_then(OsStr::to_str) == Some(primary_name(&name));
        let definition = match path.parent() {
            Some(directory) if is_named_so => SystemDefinition::InDirectory(directory.to_owned()),
            _ => SystemDefinition::InFile(path.to_owned()),
        };
        Some((name, definition))
    }
}

/// Returns the names of the systems that the .asd file at `path` seems to define.
fn defined_names(path: &Path) -> Vec<String> {
    let Ok(text) = read_small_file(path) else { return Vec::new() };
    let text = String::from_utf8_lossy(&text);
    // ASCII lowercase keeps the byte offsets.
    let searched = text.to_ascii_lowercase();
    let ends = searched.match_indices("defsystem").map(|(at, word)| at + word.len());
    let names = ends.filter_map(|at| {
        let rest = text[at..].trim_start();
        if let Some(string) = rest.strip_prefix('"') {
            return string.split_once('"').map(|(name, _)| name.to_owned());
        }
        let symbol = rest.strip_prefix("#:").or_else(|| rest.strip_prefix(':')).unwrap_or(rest);
        symbol.split(|next: char| next == ')' || next.is_whitespace()).next().map(str::to_lowercase)
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// Reads a regular file, or nothing of a file of more than [`MAX_ASD_FILE_BYTES`]. No more is read than the size of the
/// file, since the read of a kernel's file, whose size is 0, may block.
fn read_small_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.len() <= MAX_ASD_FILE_BYTES {
        file.take(metadata.len()).read_to_end(&mut text)?;
    }
    Ok(text)
}

/// Returns a Lisp pathname for a native path.
pub(super) fn pathname(path: &str) -> String {
    if path.contains(['*', '?', '[', '\\', '"', '~']) {
        format!("(sb-ext:parse-native-namestring {})", quoted(path))
    } else {
        format!("#P{}", quoted(path))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::{DefinitionCache, System, SystemDefinition, defined_names, pathname, run_search_within, system_name};
    use crate::mcp::tools::Fault;

    #[test]
    fn a_search_that_takes_too_long_is_refused_and_stopped() {
        let (sender, result) = channel();
        let (stopped, is_stopped) = channel();
        let search = move |known: &DefinitionCache| {
            while !known.is_stopped() {
                std::thread::yield_now();
            }
            assert!(known.asd_files(std::path::Path::new("/")).is_empty());
            stopped.send(()).expect("the test waits");
            Ok(())
        };
        let Err(Fault::Refusal(reason)) = run_search_within(Duration::from_millis(10), sender, &result, search) else {
            panic!("the search ended in time")
        };
        assert!(reason.contains("was stopped after 0.01 seconds"), "{reason}");
        is_stopped.recv_timeout(Duration::from_secs(60)).expect("the search stops");
    }

    #[test]
    fn nothing_is_read_of_a_file_of_the_kernel() {
        assert!(defined_names(std::path::Path::new("/proc/self/status")).is_empty());
        assert_eq!(super::read_small_file(std::path::Path::new("/proc/self/status")).expect("a file"), b"");
    }

    #[test]
    fn system_names_and_paths_become_lisp() {
        for (written, name) in [("a", "a"), (":A", "a"), ("#:My-App/Tests", "my-app/tests"), ("\"B\"", "B")] {
            assert_eq!(system_name(written), name);
        }
        assert_eq!(pathname("/a b/"), "#P\"/a b/\"");
        assert_eq!(pathname("/a*\"/"), "(sb-ext:parse-native-namestring \"/a*\\\"/\")");
    }

    #[test]
    fn a_system_is_found_by_exact_name_first_then_in_any_case() {
        let root = std::env::temp_dir().join(format!("sbcl-mcp-case-{}", std::process::id()));
        let inner = root.join("inner");
        std::fs::create_dir_all(&inner).expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(root.join(name), text).expect("a file");
        write("Mixed.asd", "(defsystem \"Mixed\") (DEFSYSTEM \"Mixed/Tests\") (asdf:defsystem #:Symbol)");
        write("lower.asd", "(defsystem :LOWER)");
        write("two.asd", "(defsystem \"Two\") (defsystem \"TWO\") (defsystem two/tests)");
        assert_eq!(defined_names(&root.join("Mixed.asd")), ["Mixed", "Mixed/Tests", "symbol"]);
        let root = root.canonicalize().expect("it is there");
        let (directory, by) =
            (SystemDefinition::InDirectory(root.clone()), |file: &str| SystemDefinition::InFile(root.join(file)));
        for (written, name, definition) in [
            ("Mixed", "Mixed", Some(directory.clone())),
            ("mixed", "Mixed", Some(directory.clone())),
            ("mixed/TESTS", "Mixed/Tests", Some(directory.clone())),
            (":MIXED", "Mixed", Some(directory.clone())),
            ("SYMBOL", "symbol", Some(by("Mixed.asd"))),
            ("Lower", "lower", Some(directory.clone())),
            ("TWO", "TWO", Some(by("two.asd"))),
            ("Two", "Two", Some(by("two.asd"))),
            ("Two/Tests", "two/tests", Some(directory.clone())),
            // No system is named exactly `two`, but two.asd has this name, so the file is used.
            ("two", "two", Some(directory)),
            ("None", "None", None),
        ] {
            for begin in [&root, &root.join("inner")] {
                let found = System::find(written, begin.to_str(), &DefinitionCache::default()).expect("a directory");
                let near = begin == &root || !matches!(definition, Some(SystemDefinition::InFile(_)));
                if near {
                    assert_eq!((&*found.name, &found.definition), (name, &definition), "{written} in {begin:?}");
                }
            }
        }
        std::fs::remove_dir_all(&root).expect("it is there");
    }
}
