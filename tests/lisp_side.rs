//! The Lisp side in the stock SBCL that the core was built with: its own tests, and loading the embedding core alone.

use std::path::Path;
use std::process::{Command, Output};

use sbcl_core::Recipe;

/// Evaluates a form where ASDF finds the systems of the Lisp side; `None` where there is no SBCL to do so. `name` is that of a
/// directory for compiled files.
fn evaluate(name: &str, form: &str) -> Option<Output> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Recipe::in_checkout(root).build().expect("the recipe builds or finds SBCL");
    let Some(bare) = built.bare else {
        println!("skipped: SBCL_MCP_PREBUILT names no SBCL to run them in");
        return None;
    };
    let fasls = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(&bare.program);
    command.arg("--core").arg(&bare.core).env("SBCL_HOME", &bare.home);
    command.args(["--noinform", "--no-sysinit", "--no-userinit", "--non-interactive"]);
    for form in [
        "(require :asdf)",
        &format!(
            "(asdf:initialize-output-translations '(:output-translations (t {:?}) :ignore-inherited-configuration))",
            format!("{}/", fasls.display())
        ),
        &format!("(asdf:load-asd {:?})", root.join("lisp/sbcl-host.asd").display().to_string()),
        form,
    ] {
        command.args(["--eval", form]);
    }
    Some(command.output().expect("SBCL starts"))
}

#[test]
fn sbcl_host_system_passes_its_asdf_tests_in_stock_sbcl() {
    let Some(output) = evaluate("lisp-fasls", "(asdf:test-system \"sbcl-host\")") else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(" passed, 0 failed"), "{text}");
}

#[test]
fn embedding_core_loads_without_debugger_tools_and_testing() {
    // The compiler would warn if loaded code called an undefined function.
    let load = "(progn (handler-bind ((warning #'error))
                         (asdf:load-system \"sbcl-host/embedding\" :force '(\"sbcl-host/core\" \"sbcl-host/embedding\")))
                       (format t \"~&loaded: ~{~A~^, ~}~%\"
                               (sort (remove \"SBCL-HOST\" (mapcar #'package-name (list-all-packages))
                                             :test-not (lambda (prefix name) (eql 0 (search prefix name))))
                                     #'string<)))";
    let Some(output) = evaluate("embedding-fasls", load) else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let loaded: Vec<&str> = text.lines().filter(|line| line.starts_with("loaded: ")).collect();
    assert_eq!(loaded, ["loaded: SBCL-HOST, SBCL-HOST/EMBEDDING"], "{text}");
}
