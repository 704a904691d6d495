//! The check of SBCL's internal names that the Lisp side uses: its table, what it notices, and that it fails the build.

use std::path::{Path, PathBuf};
use std::process::Command;

use sbcl_core::{Bare, Recipe};

/// The SBCL that the core was made with, where there is one.
fn bare() -> Option<Bare> {
    let bare = Recipe::in_checkout(root()).sbcl().expect("the recipe builds or finds SBCL");
    if bare.is_none() {
        println!("skipped: SBCL_MCP_PREBUILT names no SBCL");
    }
    bare
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A directory of this test's own, with a copy of the Lisp side and of its contract; removed with it.
struct Copy(PathBuf);

impl Copy {
    fn new(name: &str) -> Self {
        let copy = Self(std::env::temp_dir().join(format!("sbcl-internals-{name}-{}", std::process::id())));
        std::fs::create_dir_all(copy.0.join("fasls")).unwrap();
        copy_directory(&root().join("lisp"), &copy.lisp());
        copy_directory(&root().join("ffi"), &copy.0.join("ffi"));
        copy
    }

    fn lisp(&self) -> PathBuf {
        self.0.join("lisp")
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.lisp().join(name)).unwrap()
    }

    /// Writes the table that the copy's sources have.
    fn write_table(&self, bare: &Bare) {
        let (succeeded, said) = said(
            bare.command()
                .arg("--load")
                .arg(self.lisp().join("build/write-internals.lisp"))
                .env("SBCL_MCP_INTERNALS_OUTPUT", self.lisp().join("build/sbcl-internals.sexp"))
                .env("SBCL_MCP_FASL_DIR", self.0.join("fasls")),
        );
        assert!(succeeded, "{said}");
    }

    /// Builds the core from the copy, and returns whether that succeeded and what it said.
    fn build(&self, bare: &Bare, before: &str) -> (bool, String) {
        said(
            bare.command()
                .args(["--eval", before, "--load"])
                .arg(self.lisp().join("build/build.lisp"))
                .env("SBCL_MCP_CORE_OUTPUT", self.0.join("core"))
                .env("SBCL_MCP_HOST_OUTPUT", self.0.join("host"))
                .env("SBCL_MCP_FASL_DIR", self.0.join("fasls")),
        )
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // A test that cannot clean up has not failed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Copies a directory with everything below it.
fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in from.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_directory(&path, &target);
        } else {
            std::fs::copy(&path, target).unwrap();
        }
    }
}

/// Whether a command succeeded, and what it printed.
fn said(command: &mut Command) -> (bool, String) {
    let output = command.output().expect("SBCL starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

/// The lines that `new` has and `old` has not.
fn added<'a>(old: &str, new: &'a str) -> Vec<&'a str> {
    new.lines().filter(|line| !old.lines().any(|other| other == *line)).collect()
}

#[test]
fn the_table_has_every_internal_name_that_the_sources_use() {
    let Some(bare) = bare() else { return };
    let copy = Copy::new("table");
    let committed = copy.read("build/sbcl-internals.sexp");
    copy.write_table(&bare);
    let written = copy.read("build/sbcl-internals.sexp");
    let (missing, unused) = (added(&committed, &written), added(&written, &committed));
    assert!(
        written == committed,
        "run make sbcl-internals: lisp/build/sbcl-internals.sexp lacks\n{missing:#?}\nand has too many\n{unused:#?}"
    );
    // Another name in a source is another line.
    let source = copy.read("core/threads.lisp") + "\n(defun find-it (name) (sb-int:%find-package-or-lose name))\n";
    std::fs::write(copy.lisp().join("core/threads.lisp"), source).unwrap();
    copy.write_table(&bare);
    let more = copy.read("build/sbcl-internals.sexp");
    let more = added(&written, &more);
    assert!(more.len() == 1 && more[0].contains("%FIND-PACKAGE-OR-LOSE"), "{more:#?}");
}

#[test]
fn every_change_of_an_internal_name_is_noticed() {
    let Some(bare) = bare() else { return };
    let (succeeded, said) = said(
        bare.command()
            .arg("--load")
            .arg(root().join("tests/sbcl_internals.lisp"))
            .env("SBCL_MCP_LISP_DIR", root().join("lisp")),
    );
    assert!(succeeded && said.contains(" changes, 0 failed"), "{said}");
}

#[test]
fn a_moved_name_fails_the_build_before_anything_is_compiled() {
    let Some(bare) = bare() else { return };
    let copy = Copy::new("build");
    // As in SBCL 2.6.5.
    let (succeeded, said) = copy.build(
        &bare,
        "(progn (sb-ext:unlock-package \"SB-THREAD\")
                (sb-int:clear-info :function :source-transform 'sb-thread::mutex-state)
                (fmakunbound 'sb-thread::mutex-state)
                (defmacro sb-thread::mutex-state (mu) `(logand (slot-value ,mu '%state) 3)))",
    );
    assert!(!succeeded, "{said}");
    let moved: Vec<&str> = said.lines().filter(|line| line.contains("::")).collect();
    let expected = "  SB-THREAD::MUTEX-STATE was the slot STATE of SB-THREAD::MUTEX, a WORD; is a macro of (MU)";
    assert_eq!(moved, [expected], "{said}");
    assert!(said.contains("CONTRIBUTING.md, Moving the pin"), "{said}");
    assert_eq!(copy.0.join("fasls").read_dir().unwrap().count(), 0, "{said}");
    assert!(!copy.0.join("core").exists());
}
