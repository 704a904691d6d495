//! `sbcl-mcp check`: what the reader would say of files, without Lisp.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::exit_status::{FAILED, FINE, IMPOSSIBLE};
use crate::check::{Checked, Severity, check, packages};

/// What Lisp source is called.
const EXTENSIONS: [&str; 4] = ["lisp", "lsp", "cl", "asd"];
/// How many directories up a system definition is looked for.
const LEVELS: usize = 4;
/// Files of a system that are looked through for the packages they define, and how large one may be.
const MOST_FILES: usize = 1_000;
const LARGEST: u64 = 2 << 20;

/// Checks files, directories (for the Lisp source in them) and, for `-`, stdin; and repairs what can be. Returns the exit
/// status, or a sentence that says what went wrong with the output.
/// `known`: packages that there are, whatever the files say.
pub(super) fn run(
    paths: &[PathBuf],
    fix: bool,
    known: Vec<String>,
    input: OwnedFd,
    output: OwnedFd,
) -> Result<i32, String> {
    let mut stdin = Some(File::from(input));
    let mut report = String::new();
    let mut status = FINE;
    let mut repaired = None;
    let mut context = Context { known, looked: Vec::new() };
    for path in paths {
        if path.as_os_str() == "-" {
            let Some(mut stdin) = stdin.take() else { continue };
            let mut bytes = Vec::new();
            if let Err(error) = stdin.read_to_end(&mut bytes) {
                super::say(&format!("sbcl-mcp cannot read stdin: {error}"));
                status = status.max(IMPOSSIBLE);
                continue;
            }
            let (text, exact) = text_of(bytes);
            let checked = check(&text, &context.known);
            let mends = fix && exact && checked.repaired.is_some();
            if checked.is_error() && !mends {
                status = status.max(FAILED);
            }
            print(&mut report, "<stdin>", &checked);
            if fix {
                repaired = Some(checked.repaired.filter(|_| exact).unwrap_or(text));
            }
            continue;
        }
        for file in source_files(path) {
            match check_file(&file, fix, &mut context, &mut report) {
                Ok(found) => status = status.max(found),
                Err(error) => {
                    super::say(&format!("sbcl-mcp check: {}: {error}", file.display()));
                    status = status.max(IMPOSSIBLE);
                }
            }
        }
    }
    let mut output = File::from(output);
    let written = match repaired {
        // The text is the output: what there is to say of it goes elsewhere.
        Some(text) => {
            super::say(report.trim_end());
            output.write_all(text.as_bytes())
        }
        None => output.write_all(report.as_bytes()),
    };
    written.map_err(|error| format!("it cannot write: {error}"))?;
    Ok(status)
}

fn check_file(file: &Path, fix: bool, context: &mut Context, report: &mut String) -> io::Result<i32> {
    let (text, exact) = text_of(fs::read(file)?);
    let mut checked = check(&text, &[]);
    // Only where something depends on it are other files looked at.
    if checked.findings.iter().any(|finding| finding.severity == Severity::Note) {
        let known = [context.packages_around(file), context.known.clone()].concat();
        checked = check(&text, &known);
    }
    let name = file.display().to_string();
    print(report, &name, &checked);
    if !checked.is_error() {
        return Ok(FINE);
    }
    match checked.repaired.filter(|_| fix && exact) {
        Some(repaired) => {
            replace(file, &repaired)?;
            report.push_str(&format!("{name}: repaired\n"));
            Ok(FINE)
        }
        None => Ok(FAILED),
    }
}

/// A file's text, and whether it is exactly that: what is not UTF-8 is taken for Latin-1.
fn text_of(bytes: Vec<u8>) -> (String, bool) {
    match String::from_utf8(bytes) {
        Ok(text) => (text, true),
        Err(error) => (error.as_bytes().iter().map(|&byte| char::from(byte)).collect(), false),
    }
}

fn print(report: &mut String, name: &str, checked: &Checked) {
    for finding in &checked.findings {
        let severity = match finding.severity {
            Severity::Error => "error",
            Severity::Note => "note",
        };
        let (line, column, message) = (finding.line, finding.column, &finding.message);
        report.push_str(&format!("{name}:{line}:{column}: {severity}: {message}\n"));
    }
}

/// The file itself, or the Lisp source below a directory, in order.
fn source_files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    let mut files = Vec::new();
    collect(path, usize::MAX, &mut files);
    files
}

/// Adds the Lisp source below a directory, but what is hidden, until there are `most`. Links to directories are not
/// followed: they may lead around in circles.
fn collect(directory: &Path, most: usize, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden || files.len() >= most {
            continue;
        }
        if path.is_dir() {
            if !path.is_symlink() {
                collect(&path, most, files);
            }
        } else if path.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known)) {
            files.push(path);
        }
    }
}

/// What is known of the files around those that are checked.
struct Context {
    /// Packages that there are anyway.
    known: Vec<String>,
    /// The packages of a directory's files.
    looked: Vec<(PathBuf, Vec<String>)>,
}

impl Context {
    /// The packages that the files of the same system define or ask for; without one, those of the same directory.
    fn packages_around(&mut self, file: &Path) -> Vec<String> {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let mut directories = file.ancestors().skip(1);
        let own = directories.next().unwrap_or(Path::new("/"));
        let root = file.ancestors().skip(1).take(LEVELS).find(|directory| has_system(directory)).unwrap_or(own);
        if let Some((_, packages)) = self.looked.iter().find(|(looked, _)| looked == root) {
            return packages.clone();
        }
        let mut files = Vec::new();
        collect(root, MOST_FILES, &mut files);
        let small = |file: &PathBuf| fs::metadata(file).is_ok_and(|data| data.len() <= LARGEST);
        let found: BTreeSet<String> = files
            .iter()
            .filter(|file| small(file))
            .filter_map(|file| fs::read(file).ok())
            .flat_map(|bytes| packages(&text_of(bytes).0))
            .collect();
        let found: Vec<String> = found.into_iter().collect();
        self.looked.push((root.to_owned(), found.clone()));
        found
    }
}

fn has_system(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| {
        entries
            .any(|entry| entry.is_ok_and(|entry| entry.path().extension().is_some_and(|extension| extension == "asd")))
    })
}

/// Puts `text` in the place of what a file has, at once or not at all, with the file's permissions. A link stays one.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    let file = file.canonicalize()?;
    let directory = file.parent().unwrap_or(Path::new("/"));
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let temporary = directory.join(format!(".{name}.{}.tmp", std::process::id()));
    let permissions = fs::metadata(&file)?.permissions();
    let written = File::create_new(&temporary).and_then(|mut new| {
        new.set_permissions(permissions)?;
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        fs::rename(&temporary, &file)
    });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}
