//! Foreign or damaged cores and libraries, in a process that boots the right ones at the end.

use std::path::{Path, PathBuf};
use std::process::Command;

use sbcl::{BootError, Error, Lisp};
use sbcl_core::Recipe;

/// The temporary directory of the test, removed when dropped.
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
fn foreign_library_is_not_run_and_foreign_core_does_not_end_the_process() {
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name);
    let built = Recipe::in_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))).build().expect("the recipe finds SBCL");
    let (core, library) = (path("sbcl.core"), path(&format!("libsbcl{}", std::env::consts::DLL_SUFFIX)));
    std::fs::copy(&built.core, &core).expect("it is copied");

    // A library under the name of SBCL's runtime, with a constructor that creates a marker file when it is loaded.
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
    assert!(error.to_string().contains("this program was built with another libsbcl"), "{error}");

    // Files that cannot be read to their end.
    std::fs::remove_file(&library).expect("it is removed");
    assert!(Command::new("mkfifo").arg(&library).status().expect("mkfifo runs").success());
    assert!(boot(&directory.0).to_string().contains("this program was built with another libsbcl"));
    std::fs::remove_file(&library).expect("it is removed");
    std::os::unix::fs::symlink("/dev/zero", &library).expect("it is linked");
    assert!(boot(&directory.0).to_string().contains("this program was built with another libsbcl"));
    std::fs::remove_file(&library).expect("it is removed");

    // The right library with cores that are empty, truncated, from another build, or no cores at all.
    std::fs::copy(&built.library, &library).expect("it is copied");
    let bytes = std::fs::read(&core).expect("it is read");
    let mut other_build = bytes.clone();
    // Changes one letter of the build ID in the header.
    other_build[56] ^= 1;
    for (content, reason) in [
        (&b""[..], "is incomplete"),
        (b"no core", "is incomplete"),
        (&bytes[..bytes.len() - 1], "is incomplete"),
        (&bytes[..bytes.len() / 2], "is incomplete"),
        (&bytes[8..], "is incomplete"),
        (&other_build, "belongs to another build of SBCL"),
    ] {
        std::fs::write(&core, content).expect("it is written");
        let error = boot(&directory.0);
        assert!(matches!(&error, Error::Boot(BootError::Core { path, .. }) if *path == core), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
    }

    // After all these failures the intact core still boots.
    std::fs::write(&core, &bytes).expect("it is written");
    let lisp = Lisp::builder().core(&directory.0).boot().expect("it boots");
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").expect("a value"), 3);
}
