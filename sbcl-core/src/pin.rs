//! The pinned SBCL: its version, and the source that every build must use.

/// SBCL's version.
pub const VERSION: &str = "2.6.4";

/// The version's tag in upstream's git repository.
pub const GIT_TAG: &str = "sbcl-2.6.4";

/// The commit that the tag names.
pub const GIT_COMMIT: &str = "1a0e4afd51c0d6e5c608ddae7fd154e2b5045619";

/// Upstream's git repository, then its mirror.
pub const GIT_REMOTES: [&str; 2] = ["git://git.code.sf.net/p/sbcl/sbcl", "https://github.com/sbcl/sbcl"];

/// File name of Debian's archive of the pinned version's source.
pub const ARCHIVE: &str = "sbcl_2.6.4.orig.tar.xz";

/// The archive's SHA-256, in lower-case hexadecimal digits.
pub const ARCHIVE_SHA256: &str = "57421bfa0d4d94a5f9743aa9c5e28628162c92b3f8b410f784ede308d1460324";

/// The archive's directory, relative to the base address of a Debian mirror.
pub const ARCHIVE_POOL: &str = "pool/main/s/sbcl";
