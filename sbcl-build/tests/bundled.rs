//! Builds `examples/bundled` as a user would: outside the workspace, with the crates as cargo packages them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The example as cargo names it in messages. All our crates have one version.
const BUNDLED: &str = concat!("bundled@", env!("CARGO_PKG_VERSION"));

/// Returns the workspace's root.
fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns a cargo command without the variables that cargo sets for tests, which a user's environment does not have.
fn cargo(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).current_dir(directory);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("CARGO_") && !["CARGO_HOME", "CARGO_TARGET_DIR"].contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
    command
}

fn run_successfully(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{out}\n{err}");
    output
}

/// Makes the directory `to` equal to `from`, but writes only the files that differ. Packaged files all have the same
/// modification time, by which cargo decides what to rebuild.
fn mirror_directory(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(to).unwrap() {
        let path = entry.unwrap().path();
        if from.join(path.file_name().unwrap()).exists() {
            continue;
        }
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            mirror_directory(&entry.path(), &target);
        } else {
            let contents = fs::read(entry.path()).unwrap();
            if fs::read(&target).ok().as_ref() != Some(&contents) {
                fs::write(target, contents).unwrap();
            }
        }
    }
}

/// A program outside the workspace, which depends on the unpacked packages.
struct Program {
    directory: PathBuf,
    target: PathBuf,
    patches: Vec<String>,
}

impl Program {
    fn new() -> Self {
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let directory = std::env::temp_dir().join(format!("sbcl-build-bundled-{}", std::process::id()));
        let packages = scratch.join("packages");
        let names = ["lisp-syntax", "sbcl-build", "sbcl-core", "sbcl-mcp"];
        let mut package =
            cargo(workspace_root(), &["package", "--no-verify", "--offline", "--allow-dirty", "--target-dir"]);
        package.arg(&packages);
        for name in names {
            package.args(["--package", name]);
        }
        run_successfully(&mut package);
        let mut patches = Vec::new();
        for name in names {
            let unpacked = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
            let archive = packages.join("package").join(format!("{unpacked}.crate"));
            run_successfully(Command::new("tar").args(["-xzf"]).arg(archive).arg("-C").arg(&packages));
            // The crates are unpacked into a permanent directory, so that cargo need not rebuild everything the next
            // time.
            let crates = scratch.join("crates");
            mirror_directory(&packages.join(&unpacked), &crates.join(&unpacked));
            patches.push("--config".to_owned());
            patches.push(format!("patch.crates-io.{name}.path={:?}", crates.join(&unpacked)));
        }
        let program = Self { directory, target: scratch.join("bundled"), patches };
        program.copy(&workspace_root().join("examples/bundled"), Path::new(""));
        // The rest of the manifest applies only within the repository.
        let manifest = program.read("Cargo.toml");
        let (own, _) = manifest.split_once("# In the repository").unwrap();
        program.write("Cargo.toml", own);
        // The workspace's lock file pins versions that have been downloaded already.
        fs::copy(workspace_root().join("Cargo.lock"), program.directory.join("Cargo.lock")).unwrap();
        program
    }

    fn copy(&self, from: &Path, name: &Path) {
        fs::create_dir_all(self.directory.join(name)).unwrap();
        for entry in fs::read_dir(from.join(name)).unwrap() {
            let name = name.join(entry.unwrap().file_name());
            match from.join(&name) {
                path if path.ends_with("target") || path.ends_with("Cargo.lock") => {}
                path if path.is_dir() => self.copy(from, &name),
                path => _ = fs::copy(path, self.directory.join(&name)).unwrap(),
            }
        }
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.directory.join(name), text).unwrap();
    }

    /// Returns a `cargo build` command that does not use the network.
    fn build(&self) -> Command {
        let mut build = cargo(&self.directory, &["build", "--offline"]);
        build.args(["--config", "profile.dev.debug=false", "--config", "profile.dev.strip=true"]);
        build.arg("--target-dir").arg(&self.target).args(&self.patches);
        build
    }

    /// Runs a build that must fail, and returns cargo's stderr.
    fn build_failure(&self) -> String {
        let output = self.build().output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }

    /// Returns the core that the last build made.
    fn core(&self) -> PathBuf {
        let directories = fs::read_dir(self.target.join("debug/build")).unwrap();
        let cores = directories.map(|directory| directory.unwrap().path().join("out/bundled.core"));
        cores.filter(|core| core.is_file()).max_by_key(|core| core.metadata().unwrap().modified().unwrap()).unwrap()
    }

    fn size_of(&self, binary: &str) -> u64 {
        self.target.join("debug").join(binary).metadata().unwrap().len()
    }

    /// Copies the program to another directory and runs it with an empty environment.
    fn run(&self) -> String {
        let binary = self.directory.join("elsewhere");
        fs::copy(self.target.join("debug/bundled"), &binary).unwrap();
        let output = run_successfully(Command::new(&binary).env_clear().current_dir("/"));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// This is a single test, because all builds share a target directory, and each build continues from the previous one.
#[test]
fn bundled_example_contains_its_compiled_lisp_and_reports_build_errors() {
    let program = Program::new();
    run_successfully(&mut program.build());
    assert_eq!(program.run(), "total: 280, compiled: true\n");
    // The program is too small to contain the plain core besides its own.
    let (size, core) = (program.size_of("bundled"), program.core().metadata().unwrap().len());
    assert!(size > core && size < core + (16 << 20), "{size} bytes, of which the core has {core}");
    let text = program.read("lisp/prices.lisp");

    // The next build contains a change of the Lisp code.
    program.write("lisp/prices.lisp", &text.replace("(\"pear\" . 60)", "(\"pear\" . 61)"));
    run_successfully(&mut program.build());
    assert_eq!(program.run(), "total: 283, compiled: true\n");

    // Errors and warnings in the Lisp code make the build fail, and are reported with their positions. Style warnings are
    // only reported as warnings.
    program
        .write("lisp/prices.lisp", &text.replace("(error \"There is no ~A.\" article)", "(error \"None.\" artikle)"));
    let failure = program.build_failure();
    assert!(
        failure
            .contains(&format!("error: {BUNDLED}: lisp/prices.lisp:10:7: WARNING: undefined variable: SHOP::ARTIKLE")),
        "{failure}"
    );
    program.write("lisp/prices.lisp", &format!("{text}\n(defun open-ended ("));
    let failure = program.build_failure();
    assert!(failure.contains(&format!("error: {BUNDLED}: lisp/prices.lisp:17:1: ")), "{failure}");
    program.write("lisp/prices.lisp", &format!("{text}\n(defun odd (x) 1)\n"));
    let output = run_successfully(&mut program.build());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains(&format!("warning: {BUNDLED}: lisp/prices.lisp:17:1: STYLE-WARNING: The variable")),
        "{stderr}"
    );

    // A library may have warnings. The files of a directory are loaded in the order of their names.
    fs::create_dir_all(program.directory.join("vendor/deep")).unwrap();
    program.write("vendor/deep/taxes.asd", "(defsystem \"taxes\" :components ((:file \"taxes\")))");
    program.write(
        "vendor/deep/taxes.lisp",
        "(defpackage \"TAXES\" (:use \"CL\") (:export \"TAX\"))\n(in-package \"TAXES\")\n\
         (defun tax (x) (* 2 x))\n(defun never () (+ 1 \"a\"))\n",
    );
    fs::create_dir(program.directory.join("rules")).unwrap();
    program.write("rules/a-package.lisp", "(defpackage \"RULES\" (:use \"CL\"))");
    program.write("rules/b-rules.lisp", "(in-package \"RULES\")\n(defun cost (x) (taxes:tax (+ x 1)))\n");
    program
        .write("lisp/shop.asd", &program.read("lisp/shop.asd").replace(":serial", ":depends-on (\"taxes\") :serial"));
    let script = program.read("build.rs");
    let core = "sbcl_build::core().search(\"vendor\").directory(\"rules\")";
    program.write("build.rs", &script.replace("sbcl_build::core()", core));
    let source = program.read("src/main.rs");
    program.write(
        "src/main.rs",
        &source.replace(
            "lisp.call(\"shop:total\", (vec![(\"apple\", 3), (\"pear\", 4)],))",
            "lisp.eval(\"(rules::cost 20)\")",
        ),
    );
    program.write("lisp/prices.lisp", &text);
    let output = run_successfully(&mut program.build());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains(&format!("warning: {BUNDLED}: vendor/deep/taxes.lisp:4:17: WARNING: Constant")),
        "{stderr}"
    );
    assert_eq!(program.run(), "total: 42, compiled: true\n");
    // Without a search directory the library is not found, even if the machine has it installed.
    program.write("build.rs", &script);
    let failure = program.build_failure();
    assert!(
        failure.contains(&format!("error: {BUNDLED}: ")) && failure.contains("Component \"taxes\" not found"),
        "{failure}"
    );
    program.write("build.rs", &script.replace("sbcl_build::core()", core));

    // With a prebuilt core nothing is compiled, not even code with errors.
    let prebuilt = program.directory.join("prebuilt");
    fs::create_dir(&prebuilt).unwrap();
    fs::copy(program.core(), prebuilt.join("bundled.core")).unwrap();
    let library = format!("libsbcl{}", std::env::consts::DLL_SUFFIX);
    let recipe = sbcl_core::Recipe::in_checkout(workspace_root());
    if let Some(directory) = &recipe.settings.prebuilt {
        fs::copy(directory.join(&library), prebuilt.join(&library)).unwrap();
    } else {
        fs::copy(recipe.build().unwrap().library, prebuilt.join(&library)).unwrap();
    }
    program.write("lisp/prices.lisp", "(");
    run_successfully(program.build().env("SBCL_MCP_PREBUILT", &prebuilt));
    assert_eq!(program.run(), "total: 42, compiled: true\n");
    fs::remove_file(prebuilt.join("bundled.core")).unwrap();
    let failure = program.build().env("SBCL_MCP_PREBUILT", &prebuilt).output().unwrap();
    let stderr = String::from_utf8_lossy(&failure.stderr);
    assert!(!failure.status.success() && stderr.contains("prebuilt/bundled.core"), "{stderr}");

    // A program without a core ends with an error when it starts.
    program.write("build.rs", "fn main() {}");
    run_successfully(&mut program.build());
    let output = Command::new(program.target.join("debug/bundled")).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("NoCore"), "{stderr}");

    // A program cannot contain two cores.
    program.write("build.rs", &script);
    program.write("Cargo.toml", &program.read("Cargo.toml").replace("= false }", "= false, features = [\"core\"] }"));
    let failure = program.build_failure();
    assert!(failure.contains("the program would contain two cores"), "{failure}");
}
