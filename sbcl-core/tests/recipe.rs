//! Tests of the whole recipe, through its command line. The source is a fake, whose `make.sh` counts its runs and makes
//! small stand-ins for SBCL's files.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use sbcl_core::{Error, Platform, Progress, Recipe, Settings, pin};

const FAKE_MAKE_SH: &str = r#"
set -e
echo built >> "$HOME/builds"
while [ -e "$HOME/wait" ]; do sleep 0.05; done
sleep 0.2
mkdir -p output src/runtime obj/sbcl-home/contrib
echo core > output/sbcl.core
echo 'int runtime_part(void) { return 1; }' > part.c
$CC -fPIC -c part.c -o src/runtime/runtime.pic.o
printf 'CFLAGS=-DSBCL_FLAG=1\nLIBS=-lm\n' > src/runtime/sbcl.mk
cat > src/runtime/sbcl <<'END'
#!/bin/sh
for last; do :; done
grep -q unbalanced "$last" && { echo end of file on "$last"; exit 1; }
cp "$last" "$SBCL_MCP_CORE_OUTPUT"
cp "$last" "$SBCL_MCP_HOST_OUTPUT"
END
chmod +x src/runtime/sbcl
"#;

const SHIM: &str = "#include \"shim.h\"\n#ifndef SBCL_FLAG\n#error SBCL's flags are missing\n#endif\nint shim_part;\n";

/// A checkout, a home directory and a fake source, in a directory of their own.
struct Fixture {
    root: PathBuf,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("sbcl-core-recipe-{name}-{}", std::process::id()));
        let fixture = Self { root };
        fixture.write("home/.keep", "");
        fixture.write("checkout/sbcl-core/.keep", "");
        fixture.write("checkout/ffi/shim.c", SHIM);
        fixture.write("checkout/ffi/shim.h", "");
        fixture.write("checkout/lisp/build/build.lisp", "(one)");
        fixture.write("source/make.sh", FAKE_MAKE_SH);
        fixture.write("source/make-shared-library.sh", "");
        fixture.write("source/version.lisp-expr", &format!("\"{}\"", pin::VERSION));
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sbcl-core"));
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.path("home"))
            .env("CARGO_MANIFEST_DIR", self.path("checkout/sbcl-core"))
            .env("SBCL_MCP_SOURCE", self.path("source"))
            .env("SBCL_MCP_BOOTSTRAP", "sh")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn start(&self) -> Child {
        self.command().spawn().unwrap()
    }

    /// Returns how often SBCL itself was built.
    fn builds(&self) -> usize {
        std::fs::read_to_string(self.path("home/builds")).unwrap_or_default().lines().count()
    }

    fn wait_for_builds(&self, count: usize) {
        let started = Instant::now();
        while self.builds() < count {
            assert!(started.elapsed() < Duration::from_secs(60), "no build has started");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // A test does not fail if it cannot clean up.
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// Returns the library and the core that a run printed.
fn printed_paths(output: &Output) -> (PathBuf, PathBuf) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let path = |label: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(label));
        PathBuf::from(line.unwrap_or_else(|| panic!("no {label:?} in {text:?}")))
    };
    (path("library: "), path("core: "))
}

fn failure_message(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn concurrent_builds_build_sbcl_once() {
    let fixture = Fixture::new("concurrent");
    let builds = [fixture.start(), fixture.start(), fixture.start()];
    let outputs = builds.map(|build| printed_paths(&build.wait_with_output().unwrap()));
    assert_eq!(fixture.builds(), 1);
    assert_eq!(outputs[0], outputs[1]);
    assert_eq!(outputs[1], outputs[2]);
    let (library, core) = &outputs[0];
    assert!(library.starts_with(fixture.path("home/.cache/sbcl-mcp")));
    let library = std::fs::read(library).unwrap();
    for symbol in ["runtime_part", "shim_part"] {
        assert!(library.windows(symbol.len()).any(|bytes| bytes == symbol.as_bytes()), "{symbol}");
    }
    assert_eq!(std::fs::read_to_string(core).unwrap(), "(one)");
}

#[test]
fn changed_file_rebuilds_only_the_stages_that_depend_on_the_file() {
    let fixture = Fixture::new("change");
    let run = || printed_paths(&fixture.command().output().unwrap());
    let (library, core) = run();
    fixture.write("checkout/lisp/build/build.lisp", "(two)");
    let (same_library, other_core) = run();
    assert_eq!(library, same_library);
    assert_ne!(core, other_core);
    assert_eq!(std::fs::read_to_string(&other_core).unwrap(), "(two)");
    fixture.write("checkout/ffi/shim.h", "extern int shim_part;\n");
    let (other_library, same_core) = run();
    assert_ne!(library, other_library);
    assert_eq!(other_core, same_core);
    assert_eq!(fixture.builds(), 1);
    fixture.write("source/make.sh", &format!("{FAKE_MAKE_SH}# changed\n"));
    run();
    assert_eq!(fixture.builds(), 2);
}

#[test]
fn killed_build_is_redone_by_the_next_run() {
    let fixture = Fixture::new("killed");
    fixture.write("home/wait", "");
    let mut build = fixture.start();
    fixture.wait_for_builds(1);
    build.kill().unwrap();
    build.wait().unwrap();
    std::fs::remove_file(fixture.path("home/wait")).unwrap();
    let (library, core) = printed_paths(&fixture.command().output().unwrap());
    assert_eq!(fixture.builds(), 2);
    assert!(library.is_file() && core.is_file());
}

#[test]
fn failing_lisp_build_reports_its_output_and_the_log_path() {
    let fixture = Fixture::new("lisp");
    fixture.write("checkout/lisp/build/build.lisp", "(unbalanced");
    let message = failure_message(&fixture.command().output().unwrap());
    assert!(message.contains("saving the core failed"), "{message}");
    assert!(message.contains("end of file on"), "{message}");
    let log = message.trim().rsplit_once("The full output is in ").unwrap().1;
    assert!(std::fs::read_to_string(log).unwrap().contains("end of file on"));
    // Once the error is corrected, the build continues from the stages that were finished.
    fixture.write("checkout/lisp/build/build.lisp", "(balanced)");
    printed_paths(&fixture.command().output().unwrap());
    assert_eq!(fixture.builds(), 1);
}

#[test]
fn a_source_of_another_version_is_refused() {
    let fixture = Fixture::new("version");
    fixture.write("source/version.lisp-expr", "\"2.6.3\"");
    let message = failure_message(&fixture.command().output().unwrap());
    assert!(message.contains("is SBCL 2.6.3"), "{message}");
    assert!(message.contains("SBCL_MCP_SOURCE"), "{message}");
    assert_eq!(fixture.builds(), 0);
}

#[test]
fn another_sbcl_is_built_with_its_version_in_a_separate_cache() {
    let fixture = Fixture::new("next");
    let make = format!("{FAKE_MAKE_SH}cp version.lisp-expr \"$HOME/version\"\n");
    fixture.write("next/make.sh", &make);
    fixture.write("next/make-shared-library.sh", "");
    fixture.write("next/NEWS", "changes in sbcl-9.0.1 relative to sbcl-9.0.0:\n");
    let run = || fixture.command().env("SBCL_MCP_NEXT", fixture.path("next")).output().unwrap();
    for file in <[PathBuf; 2]>::from(printed_paths(&run())) {
        assert!(file.starts_with(fixture.path("home/.cache/sbcl-mcp/next")), "{}", file.display());
    }
    assert_eq!(std::fs::read_to_string(fixture.path("home/version")).unwrap(), "\"9.0.1\"\n");
    fixture.write("next/NEWS", "");
    let message = failure_message(&run());
    assert!(message.contains("SBCL_MCP_NEXT") && message.contains("version"), "{message}");
    assert_eq!(fixture.builds(), 1);
}

#[test]
fn cache_is_in_the_checkout_target_when_home_is_unset() {
    let fixture = Fixture::new("homeless");
    // The fake build counts its runs in a file in HOME, which is unset here.
    fixture.write("source/make.sh", &FAKE_MAKE_SH.replace("echo built >> \"$HOME/builds\"\n", ""));
    let output = fixture.command().env_remove("HOME").output().unwrap();
    let (library, _) = printed_paths(&output);
    assert!(library.starts_with(fixture.path("checkout/target")), "{}", library.display());
}

fn recipe(fixture: &Fixture) -> Recipe {
    let root = fixture.path("checkout");
    let mut settings = Settings::from_environment(&root);
    settings.prebuilt = None;
    Recipe { settings, progress: Progress::silent(), ..Recipe::in_checkout(&root) }
}

#[test]
fn prebuilt_directory_needs_both_library_and_core() {
    let fixture = Fixture::new("prebuilt");
    let mut recipe = recipe(&fixture);
    let mut build = |directory: &Path| {
        recipe.settings.prebuilt = Some(directory.to_owned());
        recipe.build()
    };
    let ready = fixture.path("ready");
    let message = build(&ready).unwrap_err().to_string();
    assert!(message.contains("SBCL_MCP_PREBUILT"), "{message}");
    let library = ready.join(Platform::host().library_name());
    assert!(message.contains(&format!("{} does not exist", library.display())), "{message}");
    assert!(message.contains(&format!("holds {} and sbcl.core.", Platform::host().library_name())), "{message}");

    std::fs::create_dir(&ready).unwrap();
    std::fs::write(&library, "").unwrap();
    let message = build(&ready).unwrap_err().to_string();
    assert!(message.contains("sbcl.core does not exist"), "{message}");

    std::fs::write(ready.join("sbcl.core"), "").unwrap();
    let built = build(&ready).unwrap();
    assert_eq!(built.library, library);
    assert_eq!(built.core, ready.join("sbcl.core"));
    assert_eq!(built.bare, None);

    let message = build(Path::new("relative")).unwrap_err().to_string();
    assert!(message.contains("this path is not absolute"), "{message}");
    assert_eq!(fixture.builds(), 0);
}

#[test]
#[cfg(all(target_os = "linux", not(target_arch = "aarch64")))]
fn a_cross_build_without_its_tools_names_their_packages() {
    let fixture = Fixture::new("packages");
    let mut command = fixture.command();
    command.args(["--target", "aarch64-unknown-linux-gnu"]).env("PATH", fixture.path("home"));
    let message = failure_message(&command.output().unwrap());
    for package in ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "binutils-aarch64-linux-gnu", "qemu-user-static"]
    {
        assert!(message.contains(package), "{package} is not in {message}");
    }
    assert_eq!(fixture.builds(), 0);
}

#[test]
fn cross_build_without_prebuilt_files_is_refused() {
    let fixture = Fixture::new("cross");
    let mut recipe = recipe(&fixture);
    recipe.target.arch = "pdp10".to_owned();
    let error = recipe.build().unwrap_err();
    assert!(matches!(error, Error::CrossBuild { .. }), "{error}");
    assert!(error.to_string().contains("SBCL_MCP_PREBUILT"), "{error}");
}
