//! Has the shared core made by [`sbcl_core`] and puts it, with `libsbcl`, into the library's rlib, so that a program
//! linked with it is one file.
//!
//! Dependants' build scripts get the paths of the two files as `DEP_SBCL_LIBRARY` and `DEP_SBCL_CORE`. On docs.rs
//! nothing is built and nothing embedded; the code sees `cfg(docsrs_build)`.

use std::path::{Path, PathBuf};

use sbcl_core::{Built, Platform, Progress, Recipe, Settings, settings};

/// The assembly file that embeds both files.
const EMBED: &str = "ffi/embed.S";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(docsrs_build)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    #[cfg(feature = "bindgen")]
    bindings();
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

/// What cargo tells a build script, by name.
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for a build script"))
}

fn recipe() -> Recipe {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let fallback_cache = PathBuf::from(variable("OUT_DIR")).join("sbcl-core");
    Recipe {
        target: Platform { arch: variable("CARGO_CFG_TARGET_ARCH"), os: variable("CARGO_CFG_TARGET_OS") },
        settings: Settings::from_environment(&fallback_cache),
        progress: Progress::terminal(),
        ..Recipe::in_checkout(&root)
    }
}

fn declare_inputs(recipe: &Recipe) {
    for input in recipe.inputs() {
        println!("cargo::rerun-if-changed={}", input.display());
    }
    for variable in settings::VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
}

/// Assembles both files into a static library that goes into the rlib.
fn embed(built: &Built) {
    // Also where they are made again if someone clears the cache.
    for file in [&built.library, &built.core] {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    println!("cargo::metadata=library={}", built.library.display());
    println!("cargo::metadata=core={}", built.core.display());
    // What a core that this program saves is told by: no other program can boot it.
    let key = |file: &Path| file.parent().and_then(Path::file_name).unwrap_or_default().display().to_string();
    println!("cargo::rustc-env=SBCL_MCP_BUILD={} {}", key(&built.library), key(&built.core));
    cc::Build::new()
        .file(EMBED)
        .define("SBCL_CORE_FILE", Some(quoted(&built.core).as_str()))
        .define("SBCL_LIBRARY_FILE", Some(quoted(&built.library).as_str()))
        .cargo_debug(false)
        .compile("sbcl_embedded");
}

/// A path as a string of the assembler.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
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
