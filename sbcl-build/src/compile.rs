//! Running SBCL over the application's Lisp.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use sbcl_core::{Bare, Progress};

use crate::diagnostics::Diagnostics;
use crate::error::Error;

/// What SBCL loads.
const PROGRAM: &str = include_str!("bundle.lisp");

/// How many of its last lines an error shows.
const LINES_SHOWN: usize = 40;

/// An application's Lisp.
#[derive(Debug, Clone, Default)]
pub(crate) struct Application {
    /// ASDF systems, by name, and the directories of their definitions.
    pub(crate) systems: Vec<(String, PathBuf)>,
    /// Directories whose files are compiled and loaded.
    pub(crate) directories: Vec<PathBuf>,
    /// Directories with libraries somewhere below them.
    pub(crate) search: Vec<PathBuf>,
}

impl Application {
    /// The directories whose change makes another core.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &PathBuf> {
        self.systems.iter().map(|(_, directory)| directory).chain(&self.directories).chain(&self.search)
    }

    /// Compiles and loads it in `bare` with the compiled Lisp side `host`, and saves the core `core`. Whatever else is
    /// written goes into `out`; what was compiled stays there for the next time.
    pub(crate) fn compile(
        &self,
        bare: &Bare,
        host: &Path,
        out: &Path,
        core: &Path,
        progress: &Progress,
    ) -> Result<(), Error> {
        let (program, log, told) = (out.join("bundle.lisp"), out.join("sbcl.log"), out.join("diagnostics"));
        let application = out.join("application.sexp");
        write(&program, PROGRAM)?;
        write(&application, &self.expression(host, &told, &out.join("fasl"), core)?)?;
        write(&told, "")?;
        let output = File::create(&log).map_err(io("making", &log))?;
        let errors = output.try_clone().map_err(io("making", &log))?;
        progress
            .say(format_args!("compiling the application's Lisp into a core, some seconds; log: {}", log.display()));
        // In the package's root, where cargo runs build scripts: places are told relative to it.
        let mut command = bare.command();
        command.arg("--load").arg(&program).env("SBCL_BUILD_APPLICATION", &application);
        let status = command.stdin(Stdio::null()).stdout(output).stderr(errors).status();
        let status = status.map_err(io("starting", &bare.program))?;
        let diagnostics = Diagnostics::read(&read(&told)?);
        diagnostics.tell();
        match diagnostics.errors.len() {
            0 if status.success() && core.is_file() => Ok(()),
            0 => {
                let text = read(&log)?;
                let lines: Vec<&str> = text.lines().collect();
                let output = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
                Err(Error::Sbcl { status: status.to_string(), output, log })
            }
            1 => Err(Error::Lisp { errors: "one error".to_owned(), log }),
            count => Err(Error::Lisp { errors: format!("{count} errors"), log }),
        }
    }

    /// What `bundle.lisp` reads: a property list.
    fn expression(&self, host: &Path, told: &Path, fasls: &Path, core: &Path) -> Result<String, Error> {
        let absolute = |path: &Path| path.canonicalize().map_err(io("looking for", path)).map(|path| directory(&path));
        let list = |paths: &[PathBuf]| -> Result<String, Error> {
            let paths: Vec<String> = paths.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?;
            Ok(format!("({})", paths.join(" ")))
        };
        let systems: Vec<String> = self
            .systems
            .iter()
            .map(|(name, path)| Ok(format!("({} {})", string(name.as_ref()), absolute(path)?)))
            .collect::<Result<_, Error>>()?;
        Ok(format!(
            "(:host {} :diagnostics {} :fasls {} :core {}\n :systems ({})\n :directories {}\n :search {})\n",
            string(host.as_os_str()),
            string(told.as_os_str()),
            directory(fasls),
            string(core.as_os_str()),
            systems.join(" "),
            list(&self.directories)?,
            list(&self.search)?,
        ))
    }
}

/// A string of Lisp's.
fn string(text: &OsStr) -> String {
    format!("\"{}\"", text.to_string_lossy().replace('\\', r"\\").replace('"', "\\\""))
}

/// A directory's name as a string of Lisp's.
fn directory(path: &Path) -> String {
    // With a slash at its end.
    string(path.join("").as_os_str())
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(io("writing", path))
}

fn read(path: &Path) -> Result<String, Error> {
    let bytes = std::fs::read(path).map_err(io("reading", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
