//! Cores that were not made for this program, in a process that boots the right one at the end.

use std::path::{Path, PathBuf};
use std::process::Command;

use sbcl::{BootError, Error, Lisp};
use sbcl_core::Recipe;

/// A directory of the test's own, removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("sbcl-foreign-core-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).expect("it is made");
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn boot(directory: &Path) -> Error {
    Lisp::builder().core(directory).boot().expect_err("it is refused")
}

#[test]
fn no_code_of_a_foreign_library_runs_and_no_foreign_core_ends_the_process() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name);
    let built = Recipe::in_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))).build().expect("the recipe finds SBCL");
    let (core, library) = (path("sbcl.core"), path(&format!("libsbcl{}", std::env::consts::DLL_SUFFIX)));
    std::fs::copy(&built.core, &core).expect("it is copied");

    // A library that says when it is loaded, by the name that SBCL's runtime has.
    let marker = path("loaded");
    let source = path("foreign.c");
    let code = format!(
        "#include <stdio.h>\n__attribute__((constructor)) static void loaded(void) {{ fclose(fopen({:?}, \"w\")); }}\n",
        marker.to_str().expect("a path of ASCII")
    );
    std::fs::write(&source, code).expect("it is written");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(compiled.expect("there is a C compiler").success());
    let error = boot(&directory.0);
    assert!(!marker.exists(), "code of the foreign library has run: {error}");
    assert!(matches!(&error, Error::Boot(BootError::Library { path, .. }) if *path == library), "{error:?}");
    assert!(error.to_string().ends_with("it is not the one that this program was built with"), "{error}");

    // Beside the right library, cores that are cut short, of another build, or none.
    std::fs::copy(&built.library, &library).expect("it is copied");
    let bytes = std::fs::read(&core).expect("it is read");
    let mut other_build = bytes.clone();
    // A letter of the build that its header names.
    other_build[56] ^= 1;
    for (content, reason) in [
        (&b""[..], "not complete"),
        (b"no core", "not complete"),
        (&bytes[..bytes.len() - 1], "not complete"),
        (&bytes[..bytes.len() / 2], "not complete"),
        (&bytes[8..], "not complete"),
        (&other_build, "of another build of SBCL"),
    ] {
        std::fs::write(&core, content).expect("it is written");
        let error = boot(&directory.0);
        assert!(matches!(&error, Error::Boot(BootError::Core { path, .. }) if *path == core), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
    }

    // After all these another one may be tried.
    std::fs::write(&core, &bytes).expect("it is written");
    let lisp = Lisp::builder().core(&directory.0).boot().expect("it boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}
