//! Embeds `libsbcl` and the core made by [`sbcl_core`] in the library's rlib, so that a program that links the library
//! is a single file.
//!
//! Without the feature `core` only `libsbcl` is embedded, and the program supplies its own core. Build scripts of
//! dependent crates receive the paths of the embedded files in `DEP_SBCL_LIBRARY` and `DEP_SBCL_CORE`. Further
//! environment variables `DEP_SBCL_…` have the paths that `sbcl-build` needs to make a core. On docs.rs, and wherever else
//! `DOCS_RS` is set, nothing is built or embedded: the crate can be documented and checked, but not linked.

use std::path::{Path, PathBuf};

use sbcl_build::EmbeddedFiles;
use sbcl_core::{BuildOutput, Platform, Progress, Recipe, Settings, settings};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    #[cfg(feature = "bindgen")]
    generate_bindings();
    generate_records();
    if std::env::var_os("DOCS_RS").is_some() {
        println!("cargo::rustc-env=SBCL_MCP_VERSION={}", sbcl_core::pin::VERSION);
        println!("cargo::rustc-env=SBCL_MCP_BUILD=none");
        return;
    }
    let recipe = recipe();
    declare_inputs(&recipe);
    match recipe.build() {
        Ok(built) => embed(&built),
        Err(error) => {
            // Cargo shows each of these lines and then fails the build.
            for line in error.to_string().lines() {
                println!("cargo::error={line}");
            }
        }
    }
}

/// Generates `records.rs`, the Rust definitions of the records that the table `lisp/build/records.sexp` lists.
fn generate_records() {
    const TABLE: &str = "lisp/build/records.sexp";
    println!("cargo::rerun-if-changed={TABLE}");
    let table = std::fs::read_to_string(TABLE).expect("the table of records can be read");
    let rust = sbcl_core::records::generate_rust(&table).unwrap_or_else(|reason| panic!("{TABLE}: {reason}"));
    let file = PathBuf::from(env_var("OUT_DIR")).join("records.rs");
    std::fs::write(file, rust).expect("the records can be written");
}

/// Returns the value of the environment variable `name`, which cargo sets for build scripts.
fn env_var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; cargo sets it for build scripts"))
}

fn recipe() -> Recipe {
    let root = PathBuf::from(env_var("CARGO_MANIFEST_DIR"));
    let fallback_cache = PathBuf::from(env_var("OUT_DIR")).join("sbcl-core");
    Recipe {
        target: Platform { arch: env_var("CARGO_CFG_TARGET_ARCH"), os: env_var("CARGO_CFG_TARGET_OS") },
        wants_core: wants_core(),
        settings: Settings::from_environment(&fallback_cache),
        progress: Progress::terminal(),
        ..Recipe::in_checkout(&root)
    }
}

/// Returns true if the feature `core` is on, so that the plain core is embedded, too.
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

/// Embeds `libsbcl`, and with the feature `core` the plain core, in the rlib. Passes the paths of the built files to the
/// build scripts of dependent crates.
fn embed(built: &BuildOutput) {
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
    // The cache keys of the library and the core, which are the names of their directories, identify this build. A saved
    // core records the keys, because only the build that saved the core can boot it.
    let key = |file: &Path| file.parent().and_then(Path::file_name).unwrap_or_default().display().to_string();
    println!("cargo::rustc-env=SBCL_MCP_VERSION={}", built.version);
    println!("cargo::rustc-env=SBCL_MCP_BUILD={} {}", key(&built.library), key(&built.core));
    sbcl_build::embed("sbcl_embedded", &EmbeddedFiles { core, library: Some(&built.library) });
}

/// Regenerates the Rust bindings of `ffi/sbcl_host.h`.
#[cfg(feature = "bindgen")]
fn generate_bindings() {
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
    // The file is written only when its text changes: a newer file would make the next build run this script again.
    if std::fs::read_to_string(TARGET).ok().as_deref() != Some(&text) {
        std::fs::write(TARGET, text).expect("the bindings can be written");
    }
}
