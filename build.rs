//! Has the shared core made by [`sbcl_core`] and puts it, with `libsbcl`, into the library's rlib, so that a program
//! linked with it is one file.
//!
//! Without the feature `core` the library alone goes there, and the program brings a core of its own. Dependants' build
//! scripts get paths in `DEP_SBCL_LIBRARY` and `DEP_SBCL_CORE` (what is embedded) and those that `sbcl-build` makes a core
//! with. On docs.rs nothing is built and nothing embedded; the code sees `cfg(docsrs_build)`.

use std::path::{Path, PathBuf};

use sbcl_build::Contents;
use sbcl_core::{Built, Platform, Progress, Recipe, Settings, settings};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(docsrs_build)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    #[cfg(feature = "bindgen")]
    bindings();
    records();
    if std::env::var_os("DOCS_RS").is_some() {
        println!("cargo::rustc-cfg=docsrs_build");
        return;
    }
    let recipe = recipe();
    declare_inputs(&recipe);
    match recipe.build() {
        Ok(built) => embed(&built),
        Err(error) => {
            // Cargo shows each line; after one of these the build does not go on.
            for line in error.to_string().lines() {
                println!("cargo::error={line}");
            }
        }
    }
}

/// Writes the Rust side of `lisp/build/records.sexp`.
fn records() {
    const TABLE: &str = "lisp/build/records.sexp";
    println!("cargo::rerun-if-changed={TABLE}");
    let table = std::fs::read_to_string(TABLE).expect("the table of records can be read");
    let rust = sbcl_core::records::rust(&table).unwrap_or_else(|reason| panic!("{TABLE}: {reason}"));
    let file = PathBuf::from(variable("OUT_DIR")).join("records.rs");
    std::fs::write(file, rust).expect("the records can be written");
}

/// What cargo tells a build script, by name.
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for a build script"))
}

fn recipe() -> Recipe {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let fallback_cache = PathBuf::from(variable("OUT_DIR")).join("sbcl-core");
    Recipe {
        target: Platform { arch: variable("CARGO_CFG_TARGET_ARCH"), os: variable("CARGO_CFG_TARGET_OS") },
        wants_core: wants_core(),
        settings: Settings::from_environment(&fallback_cache),
        progress: Progress::terminal(),
        ..Recipe::in_checkout(&root)
    }
}

/// Whether the program is to carry the plain core.
fn wants_core() -> bool {
    std::env::var_os("CARGO_FEATURE_CORE").is_some()
}

fn declare_inputs(recipe: &Recipe) {
    for input in recipe.inputs() {
        println!("cargo::rerun-if-changed={}", input.display());
    }
    for variable in settings::VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
}

/// Puts both files, or the library alone, into the rlib.
fn embed(built: &Built) {
    let core = wants_core().then_some(built.core.as_path());
    let metadata = |key: &str, path: &Path| println!("cargo::metadata={key}={}", path.display());
    metadata("library", &built.library);
    if let Some(core) = core {
        metadata("core", core);
    }
    if let (Some(bare), Some(host)) = (&built.bare, &built.host) {
        metadata("bare_program", &bare.program);
        metadata("bare_core", &bare.core);
        metadata("bare_home", &bare.home);
        metadata("host", host);
        println!("cargo::rerun-if-changed={}", host.display());
    }
    // What a core that this program saves is told by: no other program can boot it.
    let key = |file: &Path| file.parent().and_then(Path::file_name).unwrap_or_default().display().to_string();
    println!("cargo::rustc-env=SBCL_MCP_BUILD={} {}", key(&built.library), key(&built.core));
    sbcl_build::embed("sbcl_embedded", &Contents { core, library: Some(&built.library) });
}

/// Writes the Rust side of `ffi/sbcl_host.h` anew.
#[cfg(feature = "bindgen")]
fn bindings() {
    const HEADER: &str = "ffi/sbcl_host.h";
    const TARGET: &str = "src/image/bindings.rs";
    println!("cargo::rerun-if-changed={HEADER}");
    println!("cargo::rerun-if-changed={TARGET}");
    let bindings = bindgen::Builder::default()
        .header(HEADER)
        .allowlist_type("sbcl_.*")
        .allowlist_var("SBCL_.*")
        .default_enum_style(bindgen::EnumVariation::ModuleConsts)
        .derive_default(true)
        .generate_comments(false)
        .use_core()
        .generate()
        .expect("bindgen reads ffi/sbcl_host.h");
    let text = bindings.to_string();
    // Written only when it changes: else every build would see a newer file and start again.
    if std::fs::read_to_string(TARGET).ok().as_deref() != Some(&text) {
        std::fs::write(TARGET, text).expect("the bindings can be written");
    }
}
