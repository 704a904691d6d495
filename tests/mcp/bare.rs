//! Bare SBCL: the SBCL that made the server's core, without the Lisp side.

use std::path::Path;
use std::sync::LazyLock;

use sbcl_core::{BareSbcl, Platform, Recipe};

use crate::client::server_arch;

/// Returns bare SBCL for the server's processor, or `None` with `SBCL_MCP_PREBUILT`, which provides only a library and a
/// core. If QEMU runs the server, it also runs bare SBCL.
pub(crate) fn bare() -> Option<&'static BareSbcl> {
    static BARE: LazyLock<Option<BareSbcl>> = LazyLock::new(|| {
        let target = Platform { arch: server_arch().to_owned(), ..Platform::host() };
        let recipe = Recipe { target, ..Recipe::in_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))) };
        recipe.sbcl().expect("SBCL is cached since the server was built")
    });
    if BARE.is_none() {
        eprintln!("skipped: with {}, there is no bare SBCL", sbcl_core::settings::PREBUILT);
    }
    BARE.as_ref()
}
