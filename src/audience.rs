//! The audience of messages. Advice names tools for an agent, and commands for a person.

use std::cell::Cell;

use serde::{Deserialize, Serialize};

/// The audience of a client's messages. A client names its audience in the handshake.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Audience {
    /// An agent, which calls tools.
    #[default]
    Agent,
    /// A person at a shell, whose command has an image of its own. The image ends with the command.
    Shell,
    /// A person at a shell, whose command is attached to the image of a running server.
    AttachedShell,
    /// A person at the prompt of the REPL.
    Repl,
}

thread_local! {
    /// The audience of the messages that this thread writes.
    static CURRENT: Cell<Audience> = const { Cell::new(Audience::Agent) };
}

impl Audience {
    /// All audiences.
    #[cfg(feature = "mcp")]
    pub(crate) const ALL: [Self; 4] = [Self::Agent, Self::Shell, Self::AttachedShell, Self::Repl];

    /// Returns the audience of the messages that this thread writes: an agent, except within
    /// [`address`](Self::address).
    pub(crate) fn current() -> Self {
        CURRENT.get()
    }

    /// Calls `write`. The messages that `write` creates on this thread are for this audience.
    #[cfg(feature = "mcp")]
    pub(crate) fn address<T>(self, write: impl FnOnce() -> T) -> T {
        /// The audience before the call, which becomes the thread's audience again even if `write` panics.
        struct Previous(Audience);
        impl Drop for Previous {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _previous = Previous(CURRENT.replace(self));
        write()
    }
}

#[cfg(all(test, feature = "mcp"))]
mod tests {
    use super::Audience;
    use crate::os::panics;
    use crate::tool_names::{if_usable, name_of};

    #[test]
    fn messages_for_a_person_name_commands_instead_of_tools() {
        let advice = || (if_usable(&["get-backtrace"], "use get-backtrace"), name_of("get-backtrace"));
        assert_eq!(Audience::Shell.address(advice), ("", None));
        assert_eq!(Audience::AttachedShell.address(advice), ("", None));
        assert_eq!(Audience::Repl.address(advice), ("", Some(":bt")));
    }

    #[test]
    fn an_audience_ends_with_its_messages_even_after_a_panic() {
        Audience::Repl.address(|| {
            assert_eq!(Audience::Shell.address(Audience::current), Audience::Shell);
            let panicked = panics::catch(|| Audience::Shell.address(|| -> u8 { panic!("while a message is written") }));
            assert_eq!(panicked, None);
            assert_eq!(Audience::current(), Audience::Repl);
        });
        assert_eq!(Audience::current(), Audience::Agent);
    }
}
