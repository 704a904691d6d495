//! The client's lines that no worker is done with yet.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::messages::{self, LONG};

/// What a line takes besides its own bytes.
const OVERHEAD: usize = 64;

/// Lines by number, in order.
#[derive(Debug)]
pub(super) struct Requests {
    lines: VecDeque<Pending>,
    next: u64,
    /// How many bytes the lines of each connection take.
    bytes: BTreeMap<u64, usize>,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    /// The connection that it came by.
    connection: u64,
    /// With its newline; empty when that has ended.
    text: Box<[u8]>,
    /// Somebody waits for an answer. Not known before it is asked for: reading a line takes time.
    awaited: Option<bool>,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self { lines: VecDeque::new(), next: 1, bytes: BTreeMap::new() }
    }

    /// Takes a line of a client's, nothing when that is gone, and gives it the next number.
    pub(super) fn add(&mut self, connection: u64, line: &[u8]) {
        self.lines.push_back(Pending { number: self.next, connection, text: line.into(), awaited: None });
        self.next += 1;
        *self.bytes.entry(connection).or_default() += line.len() + OVERHEAD;
    }

    /// Forgets a line that a worker is done with. The connection that it came by; `None` when there is none of this number.
    pub(super) fn finish(&mut self, number: u64) -> Option<u64> {
        let place = match self.lines.front() {
            Some(first) if first.number == number => Some(0),
            _ => self.place(number),
        };
        let Pending { connection, text, .. } = self.lines.remove(place?)?;
        if let Some(bytes) = self.bytes.get_mut(&connection) {
            *bytes -= text.len() + OVERHEAD;
            if *bytes == 0 {
                self.bytes.remove(&connection);
            }
        }
        Some(connection)
    }

    /// Forgets what a client has asked for that is gone. Its lines stay, as empty ones: a worker may have been told of their
    /// numbers.
    pub(super) fn forget(&mut self, connection: u64) {
        for line in self.lines.iter_mut().filter(|line| line.connection == connection) {
            if let Some(bytes) = self.bytes.get_mut(&connection) {
                *bytes -= line.text.len() - 1;
            }
            (line.text, line.awaited) = (Box::from(*b"\n"), Some(false));
        }
    }

    /// The connection that a line came by.
    pub(super) fn connection(&self, number: u64) -> Option<u64> {
        Some(self.lines[self.place(number)?].connection)
    }

    /// The text of a line that no worker is done with.
    pub(super) fn text(&self, number: u64) -> Option<&[u8]> {
        Some(&self.lines[self.place(number)?].text)
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.lines.binary_search_by_key(&number, |line| line.number).ok()
    }

    /// True for a line that no worker is done with.
    pub(super) fn has(&self, number: u64) -> bool {
        self.place(number).is_some()
    }

    /// The lines: number, connection and text.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64, &[u8])> {
        self.lines.iter().map(|line| (line.number, line.connection, &*line.text))
    }

    /// The number of the first line that somebody waits for the answer to.
    pub(super) fn first_awaited(&mut self) -> Option<u64> {
        // To read a long line would take too long.
        let waits = |line: &mut Pending| {
            let text = &line.text;
            *line.awaited.get_or_insert_with(|| text.len() > LONG || messages::refusal(text, "").is_some())
        };
        self.lines.iter_mut().find_map(|line| waits(line).then_some(line.number))
    }

    /// True unless it is known that nobody waits.
    pub(super) fn may_be_awaited(&self) -> bool {
        self.lines.iter().any(|line| line.awaited != Some(false))
    }

    /// Has nobody wait any more for what a later line cancels, which no worker may have come to do.
    pub(super) fn apply_cancellations(&mut self) {
        if !self.lines.iter().any(|line| memchr::memmem::find(&line.text, b"cancelled").is_some()) {
            return;
        }
        let mut asked = HashMap::new();
        for place in 0..self.lines.len() {
            for message in messages::messages(&self.lines[place].text) {
                if let Some(id) = messages::request_id(&message) {
                    asked.insert((self.lines[place].connection, id.to_string()), place);
                } else if let Some(id) = messages::cancelled_id(&message)
                    && let Some(place) = asked.remove(&(self.lines[place].connection, id.to_string()))
                    && let Some(text) = messages::silenced(&self.lines[place].text, id)
                {
                    let line = &mut self.lines[place];
                    if let Some(bytes) = self.bytes.get_mut(&line.connection) {
                        *bytes = *bytes + text.len() - line.text.len();
                    }
                    (line.text, line.awaited) = (text.into(), None);
                }
            }
        }
    }

    /// The number of the next line.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// How many bytes the lines of a connection take.
    pub(super) fn bytes(&self, connection: u64) -> usize {
        self.bytes.get(&connection).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Requests {
        fn counts_right(&self) -> bool {
            let mut bytes = BTreeMap::new();
            for (_, connection, line) in self.iter() {
                *bytes.entry(connection).or_default() += line.len() + OVERHEAD;
            }
            bytes == self.bytes
        }
    }

    #[test]
    fn lines_are_finished_in_any_order() {
        let mut requests = Requests::new();
        for line in ["a\n", "bb\n", "c\n"] {
            requests.add(u64::from(line == "bb\n"), line.as_bytes());
        }
        assert_eq!([2, 2, 4].map(|number| requests.finish(number)), [Some(1), None, None]);
        assert_eq!(requests.iter().map(|(number, ..)| number).collect::<Vec<_>>(), [1, 3]);
        assert!(requests.has(3) && !requests.has(2));
        assert_eq!((requests.next(), requests.bytes(0), requests.bytes(1)), (4, 4 + 2 * OVERHEAD, 0));
        assert_eq!([1, 3].map(|number| requests.finish(number)), [Some(0), Some(0)]);
        assert!(requests.bytes.is_empty());
    }

    #[test]
    fn what_one_client_cancels_another_may_have_asked_for() {
        let mut requests = Requests::new();
        let cancel = br#"{"method":"notifications/cancelled","params":{"requestId":7}}"#;
        for (connection, line) in [(0, &br#"{"id":7,"method":"a"}"#[..]), (3, br#"{"id":7,"method":"b"}"#), (3, cancel)]
        {
            requests.add(connection, line);
        }
        requests.apply_cancellations();
        let texts: Vec<_> = requests.iter().map(|(.., line)| std::str::from_utf8(line).unwrap().trim_end()).collect();
        assert_eq!(texts[..2], [r#"{"id":7,"method":"a"}"#, r#"{"method":"b"}"#]);
        requests.forget(3);
        let texts: Vec<_> = requests.iter().map(|(.., line)| std::str::from_utf8(line).unwrap()).collect();
        assert_eq!(texts, [r#"{"id":7,"method":"a"}"#, "\n", "\n"]);
        assert!(requests.counts_right());
    }

    #[test]
    fn only_requests_are_awaited_and_not_once_they_are_cancelled() {
        let mut requests = Requests::new();
        let cancel = |id: u32| format!(r#"{{"method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        requests.add(0, br#"{"method":"notifications/roots/list_changed"}"#);
        assert!(requests.may_be_awaited());
        assert_eq!(requests.first_awaited(), None);
        assert!(!requests.may_be_awaited());
        requests.add(0, br#"{"id":7,"method":"ping"}"#);
        requests.add(0, br#"[{"id":8,"method":"ping"},{"id":9,"method":"ping"}]"#);
        requests.add(0, cancel(8).as_bytes());
        requests.add(0, cancel(7).as_bytes());
        // The same id again, which the cancellation is not about.
        requests.add(0, br#"{"id":7,"method":"ping"}"#);
        assert_eq!(requests.first_awaited(), Some(2));
        requests.apply_cancellations();
        assert_eq!(requests.first_awaited(), Some(3));
        requests.apply_cancellations();
        let texts: Vec<_> = requests.iter().map(|(.., line)| std::str::from_utf8(line).unwrap().trim_end()).collect();
        assert_eq!(texts[1..3], [r#"{"method":"ping"}"#, r#"[{"method":"ping"},{"id":9,"method":"ping"}]"#]);
        assert!(requests.counts_right());
        (1..=3).for_each(|number| assert_eq!(requests.finish(number), Some(0)));
        assert_eq!(requests.first_awaited(), Some(6));
    }
}
