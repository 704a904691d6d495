//! Systems of ASDF: what they are called, and where they are defined.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Fault;
use crate::session::{Operation, quoted};

/// Directories and files that are looked at in one directory, and the size of an .asd file that is looked into.
const MAX_ENTRIES: usize = 2_000;
const MAX_DEFINITION: u64 = 1 << 20;

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
    /// The system of this name, however it is written. Its definition is looked for in and near `directory`, and then it
    /// comes before what ASDF knows of that name; without a directory, in and near the working directory.
    ///
    /// # Errors
    /// There is no such directory.
    pub(super) fn find(name: &str, directory: Option<&str>) -> Result<Self, Fault> {
        let name = system_name(name);
        let begin = directory.map_or_else(|| absolute("."), existing)?;
        let (definition, looked) = find(&name, &begin);
        Ok(Self { name, definition, fallback: directory.is_none(), looked })
    }

    /// What it is called.
    pub(super) fn name(&self) -> &str {
        &self.name
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

/// Where `system` is defined: in `begin`, or above it, or one level below; and where it was looked for.
fn find(system: &str, begin: &Path) -> (Option<Definition>, Vec<String>) {
    let primary = system.split('/').next().unwrap_or(system);
    let file = format!("{primary}.asd");
    let in_directory = |directory: &Path| {
        let found = !primary.is_empty() && directory.join(&file).is_file();
        found.then(|| Definition::In(directory.to_owned()))
    };
    let by_content = || definitions(begin).into_iter().find(|path| defines(path, system)).map(Definition::By);
    let below = || {
        let entries = fs::read_dir(begin).ok()?.take(MAX_ENTRIES).flatten();
        let hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
        let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
        let seen = entries.filter(|entry| !hidden(entry) && !is_file(entry));
        let mut directories: Vec<_> = seen.map(|entry| entry.path()).collect();
        directories.sort();
        directories.iter().find_map(|directory| in_directory(directory))
    };
    let found = in_directory(begin).or_else(by_content);
    let found = found.or_else(|| begin.ancestors().find_map(in_directory)).or_else(below);
    let looked = vec![format!("{}, above it and one level below", begin.display())];
    (found, looked)
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

/// True when the .asd file at `path` seems to define `system`.
fn defines(path: &Path, system: &str) -> bool {
    let small = fs::metadata(path).is_ok_and(|metadata| metadata.len() <= MAX_DEFINITION);
    let Some(text) = small.then(|| fs::read(path).ok()).flatten() else { return false };
    let text = String::from_utf8_lossy(&text).to_lowercase();
    text.split("defsystem").skip(1).any(|rest| {
        let rest = rest.trim_start();
        let name = rest.strip_prefix('"').or_else(|| rest.strip_prefix("#:")).or_else(|| rest.strip_prefix(':'));
        let name = name.unwrap_or(rest);
        let after = name.strip_prefix(&system.to_lowercase());
        after.is_some_and(|after| after.starts_with(|next: char| next == '"' || next == ')' || next.is_whitespace()))
    })
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
    use super::{pathname, system_name};

    #[test]
    fn names_and_paths_are_written_as_lisp() {
        for (written, name) in [("a", "a"), (":A", "a"), ("#:My-App/Tests", "my-app/tests"), ("\"B\"", "B")] {
            assert_eq!(system_name(written), name);
        }
        assert_eq!(pathname("/a b/"), "#P\"/a b/\"");
        assert_eq!(pathname("/a*\"/"), "(sb-ext:parse-native-namestring \"/a*\\\"/\")");
    }
}
