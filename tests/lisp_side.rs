//! The Lisp side's own tests, run in the stock SBCL that the core was built with.

use std::path::Path;
use std::process::Command;

use sbcl_core::Recipe;

#[test]
fn sbcl_host_system_passes_its_asdf_tests_in_stock_sbcl() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Recipe::in_checkout(root).build().expect("the recipe builds or finds SBCL");
    let Some(bare) = built.bare else {
        println!("skipped: SBCL_MCP_PREBUILT names no SBCL to run them in");
        return;
    };
    let fasls = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lisp-fasls");
    let output = Command::new(&bare.program)
        .arg("--core")
        .arg(&bare.core)
        .args([
            "--noinform",
            "--no-sysinit",
            "--no-userinit",
            "--non-interactive",
            "--eval",
            "(require :asdf)",
            "--eval",
        ])
        .arg(format!(
            "(asdf:initialize-output-translations '(:output-translations (t {:?}) :ignore-inherited-configuration))",
            format!("{}/", fasls.display())
        ))
        .arg("--eval")
        .arg(format!("(asdf:load-asd {:?})", root.join("lisp/sbcl-host.asd").display().to_string()))
        .args(["--eval", "(asdf:test-system \"sbcl-host\")"])
        .env("SBCL_HOME", &bare.home)
        .output()
        .expect("SBCL starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(" passed, 0 failed"), "{text}");
}
