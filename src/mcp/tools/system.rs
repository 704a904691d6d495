//! Systems of ASDF: what they are called, and where they are defined.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::Fault;
use crate::session::{Operation, quoted};

/// Maximum number of entries that are looked at in one directory, maximum size of an .asd file that is read, and of all that
/// one request reads.
const MAX_ENTRIES: usize = 2_000;
const MAX_DEFINITION: u64 = 1 << 20;
const MAX_DEFINITIONS: u64 = 8 << 20;

/// A system, and where it is defined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::mcp) struct System {
    name: String,
    /// Where its definition is, if that was found.
    definition: Option<Definition>,
    /// The definition counts only if ASDF knows no system of that name.
    fallback: bool,
    /// Where it was looked for.
    looked: Vec<String>,
}

/// Where a system is defined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Definition {
    /// In this directory, in the file of its name.
    In(PathBuf),
    /// In this file.
    By(PathBuf),
}

impl System {
    /// The system of this name, however it is written, in another case too unless there is one in that. Its definition is
    /// looked for in and near `directory`, and then it comes before what ASDF knows of that name; without a directory, in
    /// and near the working directory. `known` is what the searches of one request have read.
    ///
    /// # Errors
    /// There is no such directory.
    pub(super) fn find(name: &str, directory: Option<&str>, known: &Definitions) -> Result<Self, Fault> {
        let name = system_name(name);
        let begin = directory.map_or_else(|| absolute("."), existing)?;
        let found = find(&name, &begin, known);
        let looked = vec![format!("{}, above it and one level below", begin.display())];
        let (name, definition) = found.map_or((name, None), |(name, definition)| (name, Some(definition)));
        Ok(Self { name, definition, fallback: directory.is_none(), looked })
    }

    /// True when both are the same, as far as is known here: ASDF is asked for what was not found in any case.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let alike = self.definition.is_none() && other.definition.is_none() && in_any_case(&self.name, &other.name);
        self.name == other.name || alike
    }

    /// The system that the .asd file at `path` is named after.
    pub(super) fn of_definition(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        Self { name, definition: Some(Definition::In(directory)), fallback: false, looked: Vec::new() }
    }

    /// The system whose .asd file is the only one in a directory.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub(super) fn of_directory(directory: &Path) -> Result<Self, Fault> {
        match &definitions(directory)[..] {
            [path] => Ok(Self::of_definition(path)),
            [] => Err(Fault::Value(format!("There is no .asd file in {}: name a file.", directory.display()))),
            paths => {
                let names: Vec<_> = paths.iter().filter_map(|path| path.file_stem()?.to_str()).collect();
                let names = names.join(", ");
                Err(Fault::Value(format!("{} has several .asd files: name a system of {names}.", directory.display())))
            }
        }
    }

    /// Code that loads it, by `force` (`self` or `all`, if any), in whatever package it is read.
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
        let known = match &self.definition {
            None => return load,
            Some(Definition::In(directory)) => {
                let directory = format!("{}/", directory.display());
                format!("(cl:pushnew {} asdf:*central-registry* :test #'cl:equal)", pathname(&directory))
            }
            Some(Definition::By(file)) => format!("(asdf:load-asd {})", pathname(&file.display().to_string())),
        };
        if self.fallback {
            format!("(cl:unless (asdf:find-system {name} cl:nil)\n  {known})\n{load}")
        } else {
            format!("{known}\n{load}")
        }
    }

    /// The operation, of this system.
    pub(in crate::mcp) fn of(&self, operation: Operation) -> Operation {
        let (directory, file) = match &self.definition {
            Some(Definition::In(directory)) => (Some(directory), None),
            Some(Definition::By(file)) => (None, Some(file)),
            None => (None, None),
        };
        let text = |path: Option<&PathBuf>| path.map(|path| path.display().to_string());
        operation
            .with("system", self.name.as_str())
            .maybe("directory", text(directory))
            .maybe("definition", text(file))
            .with("fallback", self.fallback)
            .with("looked", self.looked.clone())
    }
}

/// The directory of this name.
///
/// # Errors
/// There is none.
pub(super) fn existing(directory: &str) -> Result<PathBuf, Fault> {
    let directory = absolute(directory)?;
    if directory.is_dir() {
        return Ok(directory);
    }
    Err(Fault::Value(format!("directory: there is no directory {}.", directory.display())))
}

/// A path from the working directory, or the user's home directory, on.
pub(super) fn absolute(path: &str) -> Result<PathBuf, Fault> {
    let path = match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    };
    let path = std::path::absolute(path)?;
    // `.` and `..` have no meaning for what ASDF is to know.
    Ok(path.canonicalize().unwrap_or(path))
}

/// A system's name, however it is written: `"my-app"`, `:my-app`, `#:MY-APP`.
fn system_name(written: &str) -> String {
    let name = written.trim().trim_matches('"');
    match name.strip_prefix("#:").or_else(|| name.strip_prefix(':')) {
        Some(symbol) => symbol.to_lowercase(),
        None => name.to_owned(),
    }
}

/// What the system that was `written` is called, and where it is defined: in `begin`, or above it, or one level below.
fn find(written: &str, begin: &Path, known: &Definitions) -> Option<(String, Definition)> {
    let lower = written.to_lowercase();
    let names = std::iter::once(written).chain((lower != written).then_some(lower.as_str()));
    names.into_iter().find_map(|name| find_as_written(name, begin, known)).or_else(|| {
        // As neither: ASDF finds what is called like its file.
        begin.ancestors().find_map(|directory| {
            let paths = known.definitions(directory);
            let found = paths.iter().filter(|path| {
                directory == begin
                    || path.file_stem().is_some_and(|stem| in_any_case(&stem.to_string_lossy(), primary(&lower)))
            });
            only(found.filter_map(|path| known.defined_by(path, written)).collect())
        })
    })
}

/// The same for a name that is written as the definition's file, or the definition, has it.
fn find_as_written(name: &str, begin: &Path, known: &Definitions) -> Option<(String, Definition)> {
    let file = format!("{}.asd", primary(name));
    let in_directory = |directory: &Path| {
        let path = directory.join(&file);
        let found = !primary(name).is_empty() && path.is_file();
        // What it defines may be written in a way that is not understood here.
        found.then(|| {
            known.defined_by(&path, name).unwrap_or_else(|| (name.to_owned(), Definition::In(directory.to_owned())))
        })
    };
    let by_content = || {
        let paths = known.definitions(begin);
        let mut with_name = paths.iter().filter(|path| known.names(path).iter().any(|known| known == name));
        with_name.find_map(|path| known.defined_by(path, name))
    };
    let below = || known.directories(begin).iter().find_map(|directory| in_directory(directory));
    let found = in_directory(begin).or_else(by_content);
    found.or_else(|| begin.ancestors().find_map(in_directory)).or_else(below)
}

/// The name of the system whose .asd file has the system `name`, too.
fn primary(name: &str) -> &str {
    name.split('/').next().unwrap_or(name)
}

fn in_any_case(one: &str, other: &str) -> bool {
    one.to_lowercase() == other.to_lowercase()
}

/// The only one of them.
fn only<T>(mut several: Vec<T>) -> Option<T> {
    if several.len() == 1 { several.pop() } else { None }
}

/// The .asd files in a directory, sorted.
fn definitions(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    let mut paths: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new("asd")) && path.is_file())
        .collect();
    paths.sort();
    paths
}

/// The directories that [`directories`](Definitions::directories) returns.
fn directories(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    let hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let seen = entries.filter(|entry| !hidden(entry) && !is_file(entry));
    let mut directories: Vec<_> = seen.map(|entry| entry.path()).collect();
    directories.sort();
    directories
}

/// Everything that the searches of one request have read: each directory and each .asd file is read once, and not too much in
/// all.
#[derive(Default)]
pub(super) struct Definitions {
    directories: RefCell<HashMap<PathBuf, Rc<[PathBuf]>>>,
    paths: RefCell<HashMap<PathBuf, Rc<[PathBuf]>>>,
    names: RefCell<HashMap<PathBuf, Rc<[String]>>>,
    read: Cell<u64>,
}

impl Definitions {
    /// Returns the .asd files in a directory, sorted.
    fn definitions(&self, directory: &Path) -> Rc<[PathBuf]> {
        let mut paths = self.paths.borrow_mut();
        paths.entry(directory.to_owned()).or_insert_with(|| definitions(directory).into()).clone()
    }

    /// Returns the entries of a directory that may be directories and are not hidden, sorted.
    fn directories(&self, directory: &Path) -> Rc<[PathBuf]> {
        let mut known = self.directories.borrow_mut();
        known.entry(directory.to_owned()).or_insert_with(|| directories(directory).into()).clone()
    }

    /// Returns the systems that the .asd file at `path` seems to define; none when too much has been read.
    fn names(&self, path: &Path) -> Rc<[String]> {
        let mut names = self.names.borrow_mut();
        let read = || {
            self.read.update(|read| read + fs::metadata(path).map_or(0, |file| file.len()));
            if self.read.get() > MAX_DEFINITIONS { Vec::new() } else { defined_names(path) }.into()
        };
        names.entry(path.to_owned()).or_insert_with(read).clone()
    }

    /// The system that was `written`, if the .asd file at `path` seems to define it, or one of that name in another case alone.
    fn defined_by(&self, path: &Path, written: &str) -> Option<(String, Definition)> {
        let names = self.names(path);
        let name = if names.iter().any(|name| name == written) {
            written.to_owned()
        } else {
            let lower = written.to_lowercase();
            let mut alike: Vec<_> = names.iter().filter(|name| name.to_lowercase() == lower).cloned().collect();
            alike.sort();
            alike.dedup();
            only(alike)?
        };
        let is_named_so = path.file_stem().and_then(OsStr::to_str) == Some(primary(&name));
        let definition = match path.parent() {
            Some(directory) if is_named_so => Definition::In(directory.to_owned()),
            _ => Definition::By(path.to_owned()),
        };
        Some((name, definition))
    }
}

/// The systems that the .asd file at `path` seems to define.
fn defined_names(path: &Path) -> Vec<String> {
    let small = fs::metadata(path).is_ok_and(|metadata| metadata.len() <= MAX_DEFINITION);
    let Some(text) = small.then(|| fs::read(path).ok()).flatten() else { return Vec::new() };
    let text = String::from_utf8_lossy(&text);
    // In whichever case: as long in bytes.
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

/// A pathname of Lisp, from a native one.
pub(super) fn pathname(path: &str) -> String {
    if path.contains(['*', '?', '[', '\\', '"', '~']) {
        format!("(sb-ext:parse-native-namestring {})", quoted(path))
    } else {
        format!("#P{}", quoted(path))
    }
}

#[cfg(test)]
mod tests {
    use super::{Definition, Definitions, System, defined_names, pathname, system_name};

    #[test]
    fn names_and_paths_are_written_as_lisp() {
        for (written, name) in [("a", "a"), (":A", "a"), ("#:My-App/Tests", "my-app/tests"), ("\"B\"", "B")] {
            assert_eq!(system_name(written), name);
        }
        assert_eq!(pathname("/a b/"), "#P\"/a b/\"");
        assert_eq!(pathname("/a*\"/"), "(sb-ext:parse-native-namestring \"/a*\\\"/\")");
    }

    #[test]
    fn a_system_is_found_in_any_case_and_as_it_is_written_first() {
        let root = std::env::temp_dir().join(format!("sbcl-mcp-case-{}", std::process::id()));
        let inner = root.join("inner");
        std::fs::create_dir_all(&inner).expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(root.join(name), text).expect("a file");
        write("Mixed.asd", "(defsystem \"Mixed\") (DEFSYSTEM \"Mixed/Tests\") (asdf:defsystem #:Symbol)");
        write("lower.asd", "(defsystem :LOWER)");
        write("two.asd", "(defsystem \"Two\") (defsystem \"TWO\") (defsystem two/tests)");
        assert_eq!(defined_names(&root.join("Mixed.asd")), ["Mixed", "Mixed/Tests", "symbol"]);
        let root = root.canonicalize().expect("it is there");
        let (directory, by) = (Definition::In(root.clone()), |file: &str| Definition::By(root.join(file)));
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
            // Whatever that is, the file has its name.
            ("two", "two", Some(directory)),
            ("None", "None", None),
        ] {
            for begin in [&root, &root.join("inner")] {
                let found = System::find(written, begin.to_str(), &Definitions::default()).expect("a directory");
                let near = begin == &root || !matches!(definition, Some(Definition::By(_)));
                if near {
                    assert_eq!((&*found.name, &found.definition), (name, &definition), "{written} in {begin:?}");
                }
            }
        }
        std::fs::remove_dir_all(&root).expect("it is there");
    }
}
