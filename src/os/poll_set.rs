//! Sets of descriptors to poll. The caller chooses a name for each descriptor. All code in this program polls descriptors
//! with a [`PollSet`].

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use crate::os::busy_poll::wait_for_descriptors;

/// A set of descriptors to wait for, each with a name of type `T`.
#[derive(Debug)]
pub(crate) struct PollSet<'a, T> {
    names: Vec<T>,
    fds: Vec<PollFd<'a>>,
    /// The names that are ready without a poll.
    ready: Vec<T>,
}

/// The descriptors that are ready, by name, with their poll(2) events.
#[derive(Debug)]
pub(crate) struct ReadyDescriptors<T>(Vec<(T, PollFlags)>);

impl<'a, T: Copy + PartialEq> PollSet<'a, T> {
    pub(crate) fn new() -> Self {
        Self { names: Vec::with_capacity(8), fds: Vec::with_capacity(8), ready: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.fds.is_empty() && self.ready.is_empty()
    }

    /// Adds `fd`, which counts as ready when it can be read, or its other end is closed.
    pub(crate) fn add_read(&mut self, name: T, fd: &'a impl AsFd) {
        self.add(name, PollFd::new(fd, PollFlags::IN));
    }

    /// Adds `fd`, which counts as ready when it can be written, or its other end is closed.
    pub(crate) fn add_write(&mut self, name: T, fd: &'a impl AsFd) {
        self.add(name, PollFd::new(fd, PollFlags::OUT));
    }

    /// Adds `fd`, which counts as ready when its other end is closed.
    pub(crate) fn add_hangup(&mut self, name: T, fd: &'a impl AsFd) {
        self.add(name, PollFd::new(fd, PollFlags::empty()));
    }

    /// Adds a name that is ready at once, for instance because input from its descriptor is left in a buffer.
    pub(crate) fn add_ready(&mut self, name: T) {
        self.ready.push(name);
    }

    fn add(&mut self, name: T, fd: PollFd<'a>) {
        self.names.push(name);
        self.fds.push(fd);
    }

    /// Waits until a descriptor is ready, at most for `timeout`. Does not wait if a name is [ready](Self::add_ready). After
    /// the timeout or a signal, only these names are ready.
    ///
    /// # Errors
    /// Returns the error of poll(2) if the set exceeds the process's limit of descriptors, or the system is out of memory.
    pub(crate) fn wait(mut self, timeout: Option<Duration>) -> io::Result<ReadyDescriptors<T>> {
        let timeout = if self.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
        let count = wait_for_descriptors(&mut self.fds, timeout)?;
        let events = self.names.iter().zip(&self.fds).map(|(name, fd)| (*name, fd.revents()));
        let polled = events.filter(|(_, events)| count > 0 && !events.is_empty());
        let buffered = self.ready.iter().map(|name| (*name, PollFlags::IN));
        Ok(ReadyDescriptors(polled.chain(buffered).collect()))
    }
}

impl<T: Copy + PartialEq> ReadyDescriptors<T> {
    /// Returns the names of the ready descriptors, in the order in which the descriptors were added.
    pub(crate) fn names(&self) -> impl Iterator<Item = T> {
        self.0.iter().map(|(name, _)| *name)
    }

    pub(crate) fn has(&self, name: T) -> bool {
        self.names().any(|ready| ready == name)
    }

    /// Returns true if the descriptor was not open.
    pub(crate) fn is_invalid(&self, name: T) -> bool {
        self.0.iter().any(|(ready, events)| *ready == name && events.contains(PollFlags::NVAL))
    }

    /// Returns true if the other end of the descriptor has been closed.
    pub(crate) fn is_closed(&self, name: T) -> bool {
        self.0.iter().any(|(ready, events)| *ready == name && events.contains(PollFlags::HUP))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn ready_descriptors_are_listed_in_the_order_of_the_set() {
        let (reader, mut writer) = io::pipe().unwrap();
        let (other, closed) = io::pipe().unwrap();
        let wait = |time| {
            let mut set = PollSet::new();
            set.add_read("reader", &reader);
            set.add_hangup("other", &other);
            set.wait(Some(time)).unwrap()
        };
        assert_eq!(wait(Duration::ZERO).names().count(), 0);
        writer.write_all(b"x").unwrap();
        drop(closed);
        // A child process that another test is starting may have a copy of the closed end for a moment.
        let ready = loop {
            let ready = wait(Duration::MAX);
            if ready.is_closed("other") {
                break ready;
            }
        };
        assert_eq!(ready.names().collect::<Vec<_>>(), ["reader", "other"]);
        assert!(ready.has("reader") && !ready.is_closed("reader"));
        assert!(!ready.is_invalid("reader"));
    }
}
