//! Compiles an application's Lisp by running SBCL.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use sbcl_core::{BareSbcl, Progress};

use crate::diagnostics::Diagnostics;
use crate::error::Error;

/// The Lisp program that SBCL loads.
const BUNDLE_PROGRAM: &str = include_str!("bundle.lisp");

/// Number of lines, from the end of SBCL's output, that an error shows.
const LINES_SHOWN: usize = 40;

/// The Lisp code of an application.
#[derive(Debug, Clone, Default)]
pub(crate) struct Application {
    /// The name of each ASDF system, and the directory of its definition.
    pub(crate) systems: Vec<(String, PathBuf)>,
    /// Directories whose `.lisp` files are compiled and loaded.
    pub(crate) directories: Vec<PathBuf>,
    /// Directories in which ASDF searches for libraries, at any depth.
    pub(crate) search: Vec<PathBuf>,
}

impl Application {
    /// Returns the directories whose changes require another core.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &PathBuf> {
        self.systems.iter().map(|(_, directory)| directory).chain(&self.directories).chain(&self.search)
    }

    /// Runs the SBCL `bare`, which loads the compiled Lisp side from the file `host`, compiles and loads the
    /// application, and saves the image as the file `core`. All other files go to the directory `out`.
    pub(crate) fn compile(
        &self,
        bare: &BareSbcl,
        host: &Path,
        out: &Path,
        core: &Path,
        progress: &Progress,
    ) -> Result<(), Error> {
        let (program, log, report) = (out.join("bundle.lisp"), out.join("sbcl.log"), out.join("diagnostics"));
        let application = out.join("application.sexp");
        write(&program, BUNDLE_PROGRAM)?;
        write(&application, &self.property_list(host, &report, &out.join("fasl"), core)?)?;
        write(&report, "")?;
        let output = File::create(&log).map_err(io_error("creating", &log))?;
        let errors = output.try_clone().map_err(io_error("creating", &log))?;
        progress.say(format_args!("compiling the application's Lisp into a core; log: {}", log.display()));
        // SBCL runs in the package's root, like the build script, and reports file names relative to this directory.
        let mut command = bare.command();
        command.arg("--load").arg(&program).env("SBCL_BUILD_APPLICATION", &application);
        let status = command.stdin(Stdio::null()).stdout(output).stderr(errors).status();
        let status = status.map_err(io_error("starting", &bare.program))?;
        let diagnostics = Diagnostics::parse(&read(&report)?);
        diagnostics.report_to_cargo();
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

    /// Returns the property list that `bundle.lisp` reads.
    fn property_list(&self, host: &Path, report: &Path, fasls: &Path, core: &Path) -> Result<String, Error> {
        let absolute = |path: &Path| {
            path.canonicalize().map_err(io_error("looking for", path)).map(|path| directory_literal(&path))
        };
        let list = |paths: &[PathBuf]| -> Result<String, Error> {
            let paths: Vec<String> = paths.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?;
            Ok(format!("({})", paths.join(" ")))
        };
        let systems: Vec<String> = self
            .systems
            .iter()
            .map(|(name, path)| Ok(format!("({} {})", string_literal(name.as_ref()), absolute(path)?)))
            .collect::<Result<_, Error>>()?;
        Ok(format!(
            "(:host {} :diagnostics {} :fasls {} :core {}\n :systems ({})\n :directories {}\n :search {})\n",
            string_literal(host.as_os_str()),
            string_literal(report.as_os_str()),
            directory_literal(fasls),
            string_literal(core.as_os_str()),
            systems.join(" "),
            list(&self.directories)?,
            list(&self.search)?,
        ))
    }
}

/// Returns the text as a Lisp string literal.
fn string_literal(text: &OsStr) -> String {
    format!("\"{}\"", text.to_string_lossy().replace('\\', r"\\").replace('"', "\\\""))
}

/// Returns a directory's name as a Lisp string literal.
fn directory_literal(path: &Path) -> String {
    // Joining an empty path adds the trailing slash by which Lisp recognizes a directory.
    string_literal(path.join("").as_os_str())
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(io_error("writing", path))
}

fn read(path: &Path) -> Result<String, Error> {
    let bytes = std::fs::read(path).map_err(io_error("reading", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
