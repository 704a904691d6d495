//! The two modes of a server, and the template for tests that hold in both.

use std::path::Path;

use rstest_reuse::template;

use crate::client::Server;
use crate::processes::worker;

/// The number of processes of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Two processes: a supervisor, and a worker that holds Lisp.
    Supervised,
    /// One process that serves MCP and holds Lisp.
    Plain,
}

/// Runs a test in each mode: `#[apply(both_modes)] fn name(mode: Mode)`. The names of the two resulting tests end with
/// `supervised` and `plain`, so that a filter can select them.
#[template]
#[rstest::rstest]
#[case::supervised(crate::server_mode::Mode::Supervised)]
#[case::plain(crate::server_mode::Mode::Plain)]
pub(crate) fn both_modes(#[case] mode: crate::server_mode::Mode) {}

impl Mode {
    /// Returns the options for this mode.
    pub(crate) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Supervised => &[],
            Self::Plain => &["--no-supervisor"],
        }
    }

    /// Returns true for [`Mode::Plain`].
    pub(crate) fn is_plain(self) -> bool {
        self == Self::Plain
    }

    /// Starts the server without sending anything.
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

    /// Starts the server; its output is not read yet.
    pub(crate) fn start_unread(self, arguments: &[&str]) -> Server {
        Server::start_unread(&[arguments, self.options()].concat())
    }

    /// Starts and initializes the server.
    pub(crate) fn ready(self) -> Server {
        let mut server = self.start();
        server.initialize("2025-06-18");
        server
    }

    /// Returns the process that holds Lisp.
    pub(crate) fn lisp_process(self, server: &Server) -> u32 {
        match self {
            Self::Supervised => worker(server),
            Self::Plain => server.pid(),
        }
    }
}
