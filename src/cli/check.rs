//! The command `check`, which reports syntax errors in files without starting Lisp.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use lisp_syntax::{CheckResult, Severity, check, packages};

use super::exit_status::{CANNOT_RUN, FAILED, SUCCEEDED};

/// Extensions of files with Lisp source.
const EXTENSIONS: [&str; 4] = ["lisp", "lsp", "cl", "asd"];
/// Number of directories, from a file's own directory upwards, that are searched for a system definition.
const MAX_PARENTS: usize = 4;
/// Maximum number of files that are searched for the packages that a system defines.
const MAX_FILES: usize = 1_000;
/// Maximum size, in bytes, of a file that is searched for packages.
const MAX_FILE_SIZE: u64 = 2 << 20;

/// Checks files, the Lisp source in directories and, for `-`, stdin. With `fix`, repairs the texts that can be repaired.
/// `known` names packages that exist even if no file defines them. Returns the exit status, or a sentence if the output
/// cannot be written.
pub(super) fn run(
    paths: &[PathBuf],
    fix: bool,
    known: Vec<String>,
    input: OwnedFd,
    output: OwnedFd,
) -> Result<i32, String> {
    let mut stdin = Some(File::from(input));
    let mut report = String::new();
    let mut status = SUCCEEDED;
    let mut repaired = None;
    let mut context = PackageContext { known, packages_by_directory: Vec::new() };
    for path in paths {
        if path.as_os_str() == "-" {
            let Some(mut stdin) = stdin.take() else { continue };
            let mut bytes = Vec::new();
            if let Err(error) = stdin.read_to_end(&mut bytes) {
                super::print_to_stderr(&format!("sbcl-mcp check: cannot read stdin: {error}"));
                status = status.max(CANNOT_RUN);
                continue;
            }
            let (text, exact) = decode(&bytes);
            let checked = check(&text, &context.known);
            let is_repaired = fix && exact && checked.repaired.is_some();
            if checked.is_error() && !is_repaired {
                status = status.max(FAILED);
            }
            push_findings(&mut report, "<stdin>", &checked);
            if fix {
                repaired = Some(checked.repaired.filter(|_| exact).map_or(bytes, String::into_bytes));
            }
            continue;
        }
        for file in source_files(path) {
            match file.and_then(|file| check_file(&file, fix, &mut context, &mut report)) {
                Ok(found) => status = status.max(found),
                Err(reason) => {
                    super::print_to_stderr(&format!("sbcl-mcp check: {reason}"));
                    status = status.max(CANNOT_RUN);
                }
            }
        }
    }
    let mut output = File::from(output);
    let written = match repaired {
        // Stdout gets the text from stdin, repaired if possible, so the report goes to stderr.
        Some(text) => {
            super::print_to_stderr(report.trim_end());
            output.write_all(&text)
        }
        None => output.write_all(report.as_bytes()),
    };
    written.map_err(|error| format!("cannot write to stdout: {error}"))?;
    Ok(status)
}

fn check_file(file: &Path, fix: bool, context: &mut PackageContext, report: &mut String) -> Result<i32, String> {
    let name = file.display().to_string();
    let bytes = fs::read(file).map_err(|error| format!("cannot read {name}: {error}"))?;
    let (text, exact) = decode(&bytes);
    let mut checked = check(&text, &[]);
    // Other files are searched for packages only if a finding depends on them.
    if checked.findings.iter().any(|finding| finding.severity == Severity::Note) {
        let known = [context.packages_of_related_files(file), context.known.clone()].concat();
        checked = check(&text, &known);
    }
    push_findings(report, &name, &checked);
    if !checked.is_error() {
        return Ok(SUCCEEDED);
    }
    match checked.repaired.filter(|_| fix && exact) {
        Some(repaired) => {
            replace_contents(file, &repaired).map_err(|error| format!("cannot write {name}: {error}"))?;
            report.push_str(&format!("{name}: repaired\n"));
            Ok(SUCCEEDED)
        }
        None => Ok(FAILED),
    }
}

/// Decodes the content of a file. Returns true with the text if the content is UTF-8. Otherwise reads the content as
/// Latin-1 and returns false: the file must not be rewritten.
fn decode(bytes: &[u8]) -> (Cow<'_, str>, bool) {
    match str::from_utf8(bytes) {
        Ok(text) => (text.into(), true),
        Err(_) => (bytes.iter().map(|&byte| char::from(byte)).collect(), false),
    }
}

fn push_findings(report: &mut String, name: &str, checked: &CheckResult) {
    for finding in &checked.findings {
        let severity = match finding.severity {
            Severity::Error => "error",
            Severity::Note => "note",
        };
        let (line, column, message) = (finding.line, finding.column, &finding.message);
        report.push_str(&format!("{name}:{line}:{column}: {severity}: {message}\n"));
    }
}

/// Returns the file itself, or the Lisp source files in a directory, sorted. In place of the files in a directory that cannot
/// be read, returns the reason.
fn source_files(path: &Path) -> Vec<Result<PathBuf, String>> {
    if !path.is_dir() {
        return vec![Ok(path.to_owned())];
    }
    let mut files = Vec::new();
    collect_sources(path, usize::MAX, &mut files);
    files
}

/// Adds the Lisp source files in a directory, up to `max_files` in total, and the reason for each directory that cannot be
/// read. Skips hidden files, and links to directories, which may be circular.
fn collect_sources(directory: &Path, max_files: usize, files: &mut Vec<Result<PathBuf, String>>) {
    let entries = fs::read_dir(directory).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = match entries {
        Ok(entries) => entries,
        Err(error) => return files.push(Err(format!("cannot read {}: {error}", directory.display()))),
    };
    let mut paths: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden || files.len() >= max_files {
            continue;
        }
        if path.is_dir() {
            if !path.is_symlink() {
                collect_sources(&path, max_files, files);
            }
        } else if path.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known)) {
            files.push(Ok(path));
        }
    }
}

/// The packages that checked files may refer to.
struct PackageContext {
    /// Packages known to exist even if no file defines them.
    known: Vec<String>,
    /// The packages found so far, by the directory that was searched.
    packages_by_directory: Vec<(PathBuf, Vec<String>)>,
}

impl PackageContext {
    /// Returns the packages that related files define or refer to. The related files are the files below the directory with
    /// the system definition, or else below the directory of `file`.
    fn packages_of_related_files(&mut self, file: &Path) -> Vec<String> {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let mut directories = file.ancestors().skip(1);
        let own = directories.next().unwrap_or(Path::new("/"));
        let root = file
            .ancestors()
            .skip(1)
            .take(MAX_PARENTS)
            .find(|directory| has_system_definition(directory))
            .unwrap_or(own);
        if let Some((_, packages)) = self.packages_by_directory.iter().find(|(directory, _)| directory == root) {
            return packages.clone();
        }
        let mut files = Vec::new();
        collect_sources(root, MAX_FILES, &mut files);
        let small = |file: &PathBuf| fs::metadata(file).is_ok_and(|data| data.len() <= MAX_FILE_SIZE);
        let found: BTreeSet<String> = files
            .iter()
            .flatten()
            .filter(|file| small(file))
            .filter_map(|file| fs::read(file).ok())
            .flat_map(|bytes| packages(&decode(&bytes).0))
            .collect();
        let found: Vec<String> = found.into_iter().collect();
        self.packages_by_directory.push((root.to_owned(), found.clone()));
        found
    }
}

fn has_system_definition(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| {
        entries
            .any(|entry| entry.is_ok_and(|entry| entry.path().extension().is_some_and(|extension| extension == "asd")))
    })
}

/// Replaces the contents of a file atomically and keeps its permissions. If `file` is a symbolic link, its target
/// changes.
fn replace_contents(file: &Path, text: &str) -> io::Result<()> {
    let file = file.canonicalize()?;
    let directory = file.parent().unwrap_or(Path::new("/"));
    let mut new = tempfile::NamedTempFile::new_in(directory)?;
    new.as_file().set_permissions(fs::metadata(&file)?.permissions())?;
    new.write_all(text.as_bytes())?;
    new.as_file().sync_all()?;
    new.persist(&file)?;
    Ok(())
}
