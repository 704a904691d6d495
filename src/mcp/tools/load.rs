//! load.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::ask::{self, Asked};
use super::{Arguments, Call, Fault, Step, background, define, later};
use crate::session::Operation;
use crate::{Evaluation, OnError, Session, TimeLimit, report};

pub(super) const NAME: &str = "load";

const DESCRIPTION: &str = "Load an ASDF system and what it depends on, or a Lisp file, into the session: what \
    changed on disk is compiled and loaded again. Use it after editing files, in place of asdf:load-system and load. \
    A system is found by name, or by the .asd file in or near `directory`. Answers with one line, and [warnings] \
    with file, line, column and form; [notice] names variables that keep an old value, and definitions that a file \
    no longer has. A failure names file, line, form and condition. Example: {\"system\": \
    \"my-app\"}.";

/// The time limit where none is given.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Directories and files that are looked at in one directory, and the size of an .asd file that is looked into.
const MAX_ENTRIES: usize = 2_000;
const MAX_DEFINITION: u64 = 1 << 20;

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "system": {
            "type": "string",
            "description": "Name of an ASDF system, as `my-app` or `my-app/tests`.",
        },
        "path": {
            "type": "string",
            "description": "In place of system: a .lisp, .fasl or .asd file, or a directory with an .asd.",
        },
        "force": {
            "type": "string",
            "enum": ["none", "self", "all"],
            "default": "none",
            "description": "Load again what is up to date: the system's `self`, or `all` it depends on.",
        },
        "directory": {
            "type": "string",
            "description": "Where to look for the .asd file first.",
        },
        "package": {
            "type": "string",
            "description": "Package that is current meanwhile.",
        },
        "timeout": super::limits::timeout_schema_with("600"),
        "on-error": {
            "type": "string",
            "enum": super::limits::on_error_names(),
            "description": "As of evaluate-lisp.",
        },
    });
    background::add_properties(&mut properties);
    define(
        NAME,
        "Load a system or file",
        DESCRIPTION,
        properties,
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

pub(super) fn call(call: &Call, arguments: JsonObject) -> Result<Step, Fault> {
    let session = call.session().clone();
    let asked = Asked::new(&call.context, &arguments);
    let known = &["system", "path", "force", "directory", "package", "timeout", "on-error", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 0, arguments)?;
    let force = arguments.choice("force", &[("none", None), ("self", Some("self")), ("all", Some("all"))])?.flatten();
    let system = arguments.optional_text("system")?;
    let path = arguments.optional_text("path")?;
    let directory = arguments.optional_text("directory")?;
    let target = Target::of(system.as_deref(), path.as_deref(), directory.as_deref())?;
    let mut evaluation = Evaluation::new(target.code(force));
    let operation = target.operation(force);
    evaluation.package = arguments.optional_text("package")?;
    let patience = background::patience(&mut arguments)?;
    evaluation.timeout = match super::limits::timeout(&mut arguments)? {
        TimeLimit::Default if patience.is_none() => TimeLimit::Of(TIMEOUT),
        limit => limit,
    };
    let on_error = background::on_error(&session, super::limits::on_error(&mut arguments)?, patience)?;
    evaluation.hold = on_error != OnError::Abort;
    let asks = on_error == OnError::Ask;
    let job = background::Job::operation(evaluation, operation).reporting(Session::progress_so_far);
    later(move |call| {
        background::evaluate(call, job, patience, move |call, outcome| {
            let outcome = if outcome.is_error() { outcome } else { Arc::new(report::with_brief_output(&outcome)) };
            if asks { ask::settle(call, asked, outcome) } else { call.answer(Ok::<_, Fault>(outcome)) }
        });
    })
}

/// What is to be loaded.
#[derive(Debug, PartialEq)]
enum Target {
    /// A system, and where its definition is, if that was looked for.
    System {
        name: String,
        definition: Option<Definition>,
        /// The definition counts only if ASDF knows no system of that name.
        fallback: bool,
        /// Where it was looked for.
        looked: Vec<String>,
    },
    /// A file.
    File(PathBuf),
}

/// Where a system is defined.
#[derive(Debug, PartialEq)]
enum Definition {
    /// In this directory, in the file of its name.
    In(PathBuf),
    /// In this file.
    By(PathBuf),
}

impl Target {
    fn of(system: Option<&str>, path: Option<&str>, directory: Option<&str>) -> Result<Self, Fault> {
        let directory = directory.map(absolute).transpose()?;
        if let Some(directory) = directory.as_deref().filter(|directory| !directory.is_dir()) {
            return Err(Fault::Value(format!("directory: there is no directory {}.", directory.display())));
        }
        match (system, path) {
            (Some(_), Some(_)) => Err(Fault::Value("load takes system or path, not both.".to_owned())),
            (Some(system), None) => {
                let name = system_name(system);
                let fallback = directory.is_none();
                let begin = directory.map_or_else(|| absolute("."), Ok)?;
                let (definition, looked) = find(&name, &begin);
                Ok(Self::System { name, definition, fallback, looked })
            }
            (None, Some(path)) => {
                let path = directory.map_or_else(|| absolute(path), |directory| Ok(directory.join(path)))?;
                if path.is_dir() {
                    Self::of_directory(&path)
                } else if path.extension() == Some(OsStr::new("asd")) && path.is_file() {
                    Ok(Self::of_definition(&path))
                } else {
                    Ok(Self::File(path))
                }
            }
            (None, None) => match directory {
                Some(directory) => Self::of_directory(&directory),
                None => Err(Fault::Value(
                    "load needs the argument system or path. It takes: system, path, force, directory, package, \
                     timeout, on-error."
                        .to_owned(),
                )),
            },
        }
    }

    /// The system that the .asd file at `path` is named after.
    fn of_definition(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        Self::System { name, definition: Some(Definition::In(directory)), fallback: false, looked: Vec::new() }
    }

    /// The system whose .asd file is the only one in a directory.
    fn of_directory(directory: &Path) -> Result<Self, Fault> {
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

    /// What evaluates to the same.
    fn code(&self, force: Option<&str>) -> String {
        match self {
            Self::System { name, definition, fallback, .. } => {
                let load = match force {
                    None => format!("(asdf:load-system {})", string(name)),
                    Some("all") => format!("(asdf:load-system {} :force :all)", string(name)),
                    Some(_) => format!("(asdf:load-system {} :force t)", string(name)),
                };
                let known = match definition {
                    None => return load,
                    Some(Definition::In(directory)) => {
                        let directory = format!("{}/", directory.display());
                        format!("(pushnew {} asdf:*central-registry* :test #'equal)", pathname(&directory))
                    }
                    Some(Definition::By(file)) => {
                        format!("(asdf:load-asd {})", pathname(&file.display().to_string()))
                    }
                };
                if *fallback {
                    format!("(unless (asdf:find-system {} nil)\n  {known})\n{load}", string(name))
                } else {
                    format!("{known}\n{load}")
                }
            }
            Self::File(path) => format!("(load {})", pathname(&path.display().to_string())),
        }
    }

    fn operation(&self, force: Option<&str>) -> Operation {
        match self {
            Self::System { name, definition, fallback, looked } => {
                let (directory, file) = match definition {
                    Some(Definition::In(directory)) => (Some(directory), None),
                    Some(Definition::By(file)) => (None, Some(file)),
                    None => (None, None),
                };
                let text = |path: Option<&PathBuf>| path.map(|path| path.display().to_string());
                Operation::new("load")
                    .with("system", name.as_str())
                    .maybe("force", force)
                    .maybe("directory", text(directory))
                    .maybe("definition", text(file))
                    .with("fallback", *fallback)
                    .with("looked", looked.clone())
            }
            Self::File(path) => Operation::new("load").with("path", path.display().to_string()),
        }
    }
}

/// A path from the working directory, or the user's home directory, on.
fn absolute(path: &str) -> Result<PathBuf, Fault> {
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

/// A string of Lisp.
fn string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// A pathname of Lisp, from a native one.
fn pathname(path: &str) -> String {
    if path.contains(['*', '?', '[', '\\', '"', '~']) {
        format!("(sb-ext:parse-native-namestring {})", string(path))
    } else {
        format!("#P{}", string(path))
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
