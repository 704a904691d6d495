//! The build's check of the SBCL internals that the Lisp side uses: its table, the changes it detects, and its failures.

use std::path::{Path, PathBuf};
use std::process::Command;

use sbcl_core::{BareSbcl, Recipe, Settings};

/// Returns the SBCL that the core was built with. Returns `None` when it is prebuilt, or is not the SBCL that the table
/// describes.
fn bare() -> Option<BareSbcl> {
    if Settings::from_environment(root()).next.is_some() {
        println!("skipped: the table describes the pinned SBCL, not the SBCL that SBCL_MCP_NEXT names");
        return None;
    }
    let bare = Recipe::in_checkout(root()).sbcl().expect("the recipe builds or finds SBCL");
    if bare.is_none() {
        println!("skipped: SBCL_MCP_PREBUILT names no SBCL");
    }
    bare
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A temporary directory with a copy of the Lisp side and its header, removed when dropped.
struct LispSideCopy(PathBuf);

impl LispSideCopy {
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

    /// Writes the table of internal names for the copy's sources.
    fn write_table(&self, bare: &BareSbcl) {
        let (succeeded, output) = run(bare
            .command()
            .arg("--load")
            .arg(self.lisp().join("build/write-internals.lisp"))
            .env("SBCL_MCP_INTERNALS_OUTPUT", self.lisp().join("build/sbcl-internals.sexp"))
            .env("SBCL_MCP_FASL_DIR", self.0.join("fasls")));
        assert!(succeeded, "{output}");
    }

    /// Builds the core from the copy. Returns whether the build succeeded, and its output.
    fn build(&self, bare: &BareSbcl, before: &str) -> (bool, String) {
        run(bare
            .command()
            .args(["--eval", before, "--load"])
            .arg(self.lisp().join("build/build.lisp"))
            .env("SBCL_MCP_CORE_OUTPUT", self.0.join("core"))
            .env("SBCL_MCP_HOST_OUTPUT", self.0.join("host"))
            .env("SBCL_MCP_FASL_DIR", self.0.join("fasls")))
    }
}

impl Drop for LispSideCopy {
    fn drop(&mut self) {
        // A failed cleanup does not fail the test.
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

/// Runs a command. Returns whether it succeeded, and its output.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().expect("SBCL starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

/// Returns the lines of `new` that `old` lacks.
fn added_lines<'a>(old: &str, new: &'a str) -> Vec<&'a str> {
    new.lines().filter(|line| !old.lines().any(|other| other == *line)).collect()
}

#[test]
fn internals_table_lists_every_internal_name_used_by_the_sources() {
    let Some(bare) = bare() else { return };
    let copy = LispSideCopy::new("table");
    let committed = copy.read("build/sbcl-internals.sexp");
    copy.write_table(&bare);
    let written = copy.read("build/sbcl-internals.sexp");
    let (missing, unused) = (added_lines(&committed, &written), added_lines(&written, &committed));
    assert!(
        written == committed,
        "run make sbcl-internals: lisp/build/sbcl-internals.sexp lacks\n{missing:#?}\nand has too many\n{unused:#?}"
    );
    // A new name in a source adds one line to the table.
    let source = copy.read("core/threads.lisp") + "\n(defun find-it (name) (sb-int:%find-package-or-lose name))\n";
    std::fs::write(copy.lisp().join("core/threads.lisp"), source).unwrap();
    copy.write_table(&bare);
    let more = copy.read("build/sbcl-internals.sexp");
    let more = added_lines(&written, &more);
    assert!(more.len() == 1 && more[0].contains("%FIND-PACKAGE-OR-LOSE"), "{more:#?}");
}

#[test]
fn every_change_of_an_internal_name_is_detected() {
    let Some(bare) = bare() else { return };
    let (succeeded, output) = run(bare
        .command()
        .arg("--load")
        .arg(root().join("tests/sbcl_internals.lisp"))
        .env("SBCL_MCP_LISP_DIR", root().join("lisp")));
    assert!(succeeded && output.contains(" changes, 0 failed"), "{output}");
}

/// A form that turns the accessor of a slot into a macro, as SBCL 2.6.5 did with MUTEX-STATE.
const CHANGE_NAME: &str = "(progn (sb-ext:unlock-package \"SB-ALIEN\")
    (sb-int:clear-info :function :source-transform 'sb-alien::shared-object-namestring)
    (fmakunbound 'sb-alien::shared-object-namestring)
    (defmacro sb-alien::shared-object-namestring (object) `(slot-value ,object 'namestring)))";

/// The build's report of that change.
const CHANGED_NAME: &str = "  SB-ALIEN::SHARED-OBJECT-NAMESTRING was the slot NAMESTRING of SB-ALIEN::SHARED-OBJECT, of \
                            type T; is now a macro with the lambda list (OBJECT)";

#[test]
fn changed_internal_name_of_another_sbcl_is_reported_before_compiling() {
    let Some(bare) = bare() else { return };
    let copy = LispSideCopy::new("next");
    let (_, output) = copy.build(
        &bare,
        &format!(
            "(progn {CHANGE_NAME}
                    (alien-funcall (extern-alien \"setenv\" (function int c-string c-string int))
                                   \"SBCL_MCP_NEXT\" \"/next\" 1)
                    (sb-ext:without-package-locks
                      (defun compile-file (&rest arguments)
                        (declare (ignore arguments))
                        (error \"Compiling begins.\"))))"
        ),
    );
    let (report, rest) = output.split_once(&format!("// {CHANGED_NAME}\n")).expect(&output);
    assert!(report.contains("// In SBCL") && rest.contains("Compiling begins."), "{output}");
}

#[test]
fn changed_internal_name_fails_the_build_before_compiling() {
    let Some(bare) = bare() else { return };
    let copy = LispSideCopy::new("build");
    let (succeeded, output) = copy.build(&bare, CHANGE_NAME);
    assert!(!succeeded, "{output}");
    let moved: Vec<&str> = output.lines().filter(|line| line.contains("::")).collect();
    assert_eq!(moved, [CHANGED_NAME], "{output}");
    assert!(output.contains("docs/upgrading-sbcl.md"), "{output}");
    assert_eq!(copy.0.join("fasls").read_dir().unwrap().count(), 0, "{output}");
    assert!(!copy.0.join("core").exists());
}
