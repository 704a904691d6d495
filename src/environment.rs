//! The environment variables that the program reads.

/// The log filter for stderr; `--log` has priority.
pub(crate) const LOG: &str = "SBCL_MCP_LOG";
pub(crate) const STATE_HOME: &str = "XDG_STATE_HOME";
pub(crate) const CACHE_HOME: &str = "XDG_CACHE_HOME";
pub(crate) const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";
pub(crate) const TEMPORARY: &str = "TMPDIR";
pub(crate) const NO_COLOUR: &str = "NO_COLOR";
pub(crate) const TERMINAL: &str = "TERM";
pub(crate) const PATH: &str = "PATH";
pub(crate) const SOURCE_REGISTRY: &str = "CL_SOURCE_REGISTRY";
const HOME: &str = "HOME";
const OUTPUT_TRANSLATIONS: &str = "ASDF_OUTPUT_TRANSLATIONS";

/// An environment variable, as docs/reference/environment.md describes it.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// The name.
    pub name: &'static str,
    /// The effect.
    pub effect: &'static str,
    /// The value that is used if the variable is not set.
    pub default: &'static str,
}

/// Every variable that the program reads, or that ASDF in its image reads.
pub const VARIABLES: [Variable; 11] = [
    Variable { name: LOG, effect: "Log filter for stderr, such as `debug`. `--log` has priority.", default: "`warn`" },
    Variable {
        name: STATE_HOME,
        effect: "Base directory for state: persistent sessions, checkpoints and the REPL's history are in its subdirectory `sbcl-mcp`.",
        default: "`~/.local/state`",
    },
    Variable {
        name: CACHE_HOME,
        effect: "Base directory for caches: ASDF's compiled files are in its subdirectory `common-lisp`, which stays writable with `--read-only`.",
        default: "`~/.cache`",
    },
    Variable {
        name: RUNTIME_DIRECTORY,
        effect: "Base directory for sockets: those by which clients attach are in its subdirectory `sbcl-mcp`.",
        default: "`sbcl-mcp-UID` in the directory for temporary files",
    },
    Variable { name: TEMPORARY, effect: "The directory for temporary files.", default: "`/tmp`" },
    Variable {
        name: HOME,
        effect: "The home directory, where `.sbclrc` and the defaults above are.",
        default: "the home directory in the user database",
    },
    Variable { name: PATH, effect: "`doctor` says which `sbcl-mcp` a client finds on it.", default: "" },
    Variable {
        name: SOURCE_REGISTRY,
        effect: "Where ASDF looks for systems, in its own syntax.",
        default: "ASDF's default directories",
    },
    Variable {
        name: OUTPUT_TRANSLATIONS,
        effect: "Where ASDF puts compiled files, in its own syntax.",
        default: "the cache directory",
    },
    Variable { name: NO_COLOUR, effect: "Turns off the REPL's colours, unless it is empty.", default: "" },
    Variable {
        name: TERMINAL,
        effect: "The kind of terminal; `dumb` turns off the REPL's colours.",
        default: "`dumb`",
    },
];
