//! The environment variables that the program reads.

/// The name of the environment variable with the log filter for stderr; the option `--log` has priority.
pub(crate) const LOG_FILTER: &str = "SBCL_MCP_LOG";
pub(crate) const STATE_HOME: &str = "XDG_STATE_HOME";
pub(crate) const CACHE_HOME: &str = "XDG_CACHE_HOME";
pub(crate) const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";
pub(crate) const TEMPORARY_DIRECTORY: &str = "TMPDIR";
pub(crate) const NO_COLOUR: &str = "NO_COLOR";
pub(crate) const TERMINAL: &str = "TERM";
pub(crate) const PATH: &str = "PATH";
pub(crate) const SOURCE_REGISTRY: &str = "CL_SOURCE_REGISTRY";
const HOME: &str = "HOME";
const OUTPUT_TRANSLATIONS: &str = "ASDF_OUTPUT_TRANSLATIONS";

/// An environment variable, as docs/reference/environment.md describes it.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// The name of the environment variable.
    pub name: &'static str,
    /// A description of the effect, in Markdown.
    pub effect: &'static str,
    /// A description, in Markdown, of the value that is used if the environment variable is not set. Empty if the variable
    /// has no default.
    pub default: &'static str,
}

/// The environment variables that the program reads, and the most important ones that ASDF reads in the program's
/// image.
pub const VARIABLES: [Variable; 11] = [
    Variable {
        name: LOG_FILTER,
        effect: "Log filter for stderr, such as `debug`. `--log` overrides this variable.",
        default: "`warn`; `error` for `load`, `test` and `repl`",
    },
    Variable {
        name: STATE_HOME,
        effect: "Base directory for state, an absolute path: persistent sessions, checkpoints and the REPL's history are in its subdirectory `sbcl-mcp`.",
        default: "`~/.local/state`",
    },
    Variable {
        name: CACHE_HOME,
        effect: "Base directory for caches: ASDF's compiled files are in its subdirectory `common-lisp`, which stays writable with `--read-only`.",
        default: "`~/.cache`",
    },
    Variable {
        name: RUNTIME_DIRECTORY,
        effect: "Base directory for sockets, an absolute path: the sockets that clients attach to are in its subdirectory `sbcl-mcp`.",
        default: "none; the sockets are then in `sbcl-mcp-UID` in the directory for temporary files",
    },
    Variable { name: TEMPORARY_DIRECTORY, effect: "The directory for temporary files.", default: "`/tmp`" },
    Variable {
        name: HOME,
        effect: "The home directory, which contains `.sbclrc`; `~` in the defaults above.",
        default: "the home directory in the user database",
    },
    Variable { name: PATH, effect: "The search path, in which `doctor` looks for `sbcl-mcp`.", default: "" },
    Variable {
        name: SOURCE_REGISTRY,
        effect: "The directories in which ASDF looks for systems, in ASDF's own syntax.",
        default: "ASDF's default directories",
    },
    Variable {
        name: OUTPUT_TRANSLATIONS,
        effect: "The directories for ASDF's compiled files, in ASDF's own syntax.",
        default: "the cache directory",
    },
    Variable { name: NO_COLOUR, effect: "Turns off the REPL's colours if set and not empty.", default: "" },
    Variable {
        name: TERMINAL,
        effect: "The type of the terminal; `dumb` turns off the REPL's colours, line editing, completion and history.",
        default: "`dumb`",
    },
];
