//! The two ways in which a server runs, and the tests that hold in both.

use std::path::Path;

use rstest_reuse::template;

use crate::client::Server;
use crate::processes::worker;

/// How a server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As two processes: a supervisor, and a worker that holds Lisp.
    Supervised,
    /// As one process that serves MCP and holds Lisp.
    Plain,
}

/// Runs a test in each mode: `#[apply(both_modes)] fn name(mode: Mode)`. The names of the two tests end with `supervised`
/// and `plain`, by which they can be chosen.
#[template]
#[rstest::rstest]
#[case::supervised(crate::mode::Mode::Supervised)]
#[case::plain(crate::mode::Mode::Plain)]
pub(crate) fn both_modes(#[case] mode: crate::mode::Mode) {}

impl Mode {
    /// The options that this mode adds.
    pub(crate) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Supervised => &[],
            Self::Plain => &["--no-supervisor"],
        }
    }

    /// True for [`Mode::Plain`].
    pub(crate) fn is_plain(self) -> bool {
        self == Self::Plain
    }

    /// Starts the server; nothing has been said yet.
    pub(crate) fn start(self) -> Server {
        self.start_with(&[])
    }

    /// Starts the server with arguments.
    pub(crate) fn start_with(self, arguments: &[&str]) -> Server {
        self.start_with_environment(arguments, &[])
    }

    /// Starts the server with arguments and environment variables.
    pub(crate) fn start_with_environment(self, arguments: &[&str], variables: &[(&str, &Path)]) -> Server {
        Server::start_with_environment(&[arguments, self.options()].concat(), variables)
    }

    /// Starts the server without reading from it.
    pub(crate) fn start_unread(self, arguments: &[&str]) -> Server {
        Server::start_unread(&[arguments, self.options()].concat())
    }

    /// Starts the server and shakes hands.
    pub(crate) fn ready(self) -> Server {
        let mut server = self.start();
        server.initialize("2025-06-18");
        server
    }

    /// The process that holds Lisp.
    pub(crate) fn lisp(self, server: &Server) -> u32 {
        match self {
            Self::Supervised => worker(server),
            Self::Plain => server.pid(),
        }
    }
}
