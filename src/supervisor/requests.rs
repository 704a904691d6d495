//! The clients' lines that no worker is done with yet.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::messages::{self, LONG};
use crate::id_scanner::IdScanner;
use crate::rpc::route;

/// Bytes that a line takes besides its own.
const OVERHEAD: usize = 64;
/// A line longer than this is handed on in pieces of this size, so that those of other clients need not wait for all of it.
pub(super) const PIECE: usize = 64 << 10;

/// The lines that the worker has, by number, and those that it does not have yet, by connection. A line gets its number when
/// the worker gets its beginning: so jobs begin in the order of their numbers, however the clients take turns.
#[derive(Debug)]
pub(super) struct Requests {
    open: BTreeMap<u64, Pending>,
    waiting: BTreeMap<u64, VecDeque<Pending>>,
    /// The connections of which something is to be handed on, in turn.
    turns: VecDeque<u64>,
    /// The lines that the worker has a part of, by connection: their numbers, and how much of them.
    partial: BTreeMap<u64, (u64, usize)>,
    next: u64,
    /// The bytes that the lines of each connection take.
    bytes: BTreeMap<u64, usize>,
}

#[derive(Debug)]
struct Pending {
    /// `None` before it is handed on for the first time.
    number: Option<u64>,
    /// The connection that it came by.
    connection: u64,
    /// With its newline; empty when the connection has ended.
    text: Box<[u8]>,
    /// Somebody waits for an answer. Not known before it is asked for: reading a line takes time.
    awaited: Option<bool>,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self {
            open: BTreeMap::new(),
            waiting: BTreeMap::new(),
            turns: VecDeque::new(),
            partial: BTreeMap::new(),
            next: 1,
            bytes: BTreeMap::new(),
        }
    }

    /// Queues a line of a client.
    pub(super) fn add(&mut self, connection: u64, line: &[u8]) {
        *self.bytes.entry(connection).or_default() += line.len() + OVERHEAD;
        let line = Pending { number: None, connection, text: line.into(), awaited: None };
        self.waiting.entry(connection).or_default().push_back(line);
        self.give_turn(connection);
    }

    fn give_turn(&mut self, connection: u64) {
        if !self.turns.contains(&connection) {
            self.turns.push_back(connection);
        }
    }

    /// True when there is something to be handed on.
    pub(super) fn is_waiting(&self) -> bool {
        !self.turns.is_empty()
    }

    /// The next line to hand on, or piece of one, marked for the worker: of the client whose turn it is.
    pub(super) fn next_piece(&mut self) -> Option<Vec<u8>> {
        let connection = self.turns.pop_front()?;
        let waiting = self.waiting.get_mut(&connection);
        let (number, done) = match self.partial.remove(&connection) {
            Some(partial) => partial,
            None => {
                let line = waiting?.pop_front()?;
                let number = line.number.unwrap_or(self.next);
                self.next = self.next.max(number + 1);
                self.open.insert(number, line);
                (number, 0)
            }
        };
        // The worker must see an end of a line that it has said to be done with.
        let rest = self.open.get(&number).and_then(|line| line.text.get(done..)).unwrap_or(b"\n");
        let piece = if rest.len() <= PIECE {
            route::line(connection, number, rest)
        } else {
            self.partial.insert(connection, (number, done + PIECE));
            route::piece(connection, number, &rest[..PIECE])
        };
        let waits = self.waiting.get(&connection).is_some_and(|lines| !lines.is_empty());
        if waits || self.partial.contains_key(&connection) {
            self.turns.push_back(connection);
        } else if self.is_end(number) {
            self.waiting.remove(&connection);
        }
        Some(piece)
    }

    /// True for the line that says that a client is gone.
    fn is_end(&self, number: u64) -> bool {
        self.open.get(&number).is_some_and(|line| line.text.is_empty())
    }

    /// Queues all lines for another worker, those of each client in their order. The numbers up to `known` stay.
    pub(super) fn resend(&mut self, known: u64) {
        self.partial.clear();
        for (number, mut line) in std::mem::take(&mut self.open).into_iter().rev() {
            let connection = line.connection;
            line.number = Some(number).filter(|number| *number <= known);
            self.waiting.entry(connection).or_default().push_front(line);
            self.give_turn(connection);
        }
    }

    /// Forgets a line that a worker is done with. The connection that it came by; `None` when there is none of this number.
    pub(super) fn finish(&mut self, number: u64) -> Option<u64> {
        let line = self.open.remove(&number)?;
        self.forget_bytes(&line);
        Some(line.connection)
    }

    fn forget_bytes(&mut self, line: &Pending) {
        if let Some(bytes) = self.bytes.get_mut(&line.connection) {
            *bytes -= line.text.len() + OVERHEAD;
            if *bytes == 0 {
                self.bytes.remove(&line.connection);
            }
        }
    }

    /// Forgets what a client has asked for that is gone, and has the worker told of that. Lines that the worker has stay, as
    /// empty ones.
    pub(super) fn end(&mut self, connection: u64) {
        for line in self.waiting.remove(&connection).into_iter().flatten() {
            self.forget_bytes(&line);
        }
        self.partial.remove(&connection);
        for line in self.open.values_mut().filter(|line| line.connection == connection) {
            if let Some(bytes) = self.bytes.get_mut(&connection) {
                *bytes -= line.text.len() - 1;
            }
            (line.text, line.awaited) = (Box::from(*b"\n"), Some(false));
        }
        self.add(connection, b"");
    }

    /// The connection that a line came by.
    pub(super) fn connection(&self, number: u64) -> Option<u64> {
        Some(self.open.get(&number)?.connection)
    }

    /// The text of a line that the worker is not done with.
    pub(super) fn text(&self, number: u64) -> Option<&[u8]> {
        Some(&self.open.get(&number)?.text)
    }

    /// True for a line that the worker is not done with.
    pub(super) fn has(&self, number: u64) -> bool {
        self.open.contains_key(&number)
    }

    /// True when the worker has a line with a number above this one, or a part of it.
    pub(super) fn is_any_after(&self, number: u64) -> bool {
        self.open.last_key_value().is_some_and(|(last, _)| *last > number)
    }

    /// The texts of a client's lines, in order.
    pub(super) fn of(&self, connection: u64) -> impl Iterator<Item = &[u8]> {
        let open = self.open.values().filter(move |line| line.connection == connection);
        open.chain(self.waiting.get(&connection).into_iter().flatten()).map(|line| &*line.text)
    }

    /// The number of the first line that somebody waits for the answer to; 0 for one that has none yet.
    pub(super) fn first_awaited(&mut self) -> Option<u64> {
        // To read a long line would take too long.
        let waits = |line: &mut Pending| {
            let text = &line.text;
            *line.awaited.get_or_insert_with(|| text.len() > LONG || messages::refusal(text, "").is_some())
        };
        let open = self.open.iter_mut().find_map(|(number, line)| waits(line).then_some(*number));
        open.or_else(|| self.waiting.values_mut().flatten().any(waits).then_some(0))
    }

    /// True unless it is known that nobody waits.
    pub(super) fn may_be_awaited(&self) -> bool {
        self.open.values().chain(self.waiting.values().flatten()).any(|line| line.awaited != Some(false))
    }

    /// Silences the requests that later lines cancel: no worker may have read those lines.
    pub(super) fn apply_cancellations(&mut self) {
        for (connection, lines) in &mut self.waiting {
            let cancels =
                |line: &Pending| line.text.len() <= LONG && memchr::memmem::find(&line.text, b"cancelled").is_some();
            if !lines.iter().any(cancels) {
                continue;
            }
            let mut asked = HashMap::new();
            for place in 0..lines.len() {
                if lines[place].text.len() > LONG {
                    // Nor is it a batch, whose requests have ids of their own.
                    if let Some(id) = IdScanner::scan(&lines[place].text) {
                        asked.insert(id.to_string(), place);
                    }
                    continue;
                }
                for message in messages::messages(&lines[place].text) {
                    if let Some(id) = messages::request_id(&message) {
                        asked.insert(id.to_string(), place);
                    } else if let Some(id) = messages::cancelled_id(&message)
                        && let Some(place) = asked.remove(&id.to_string())
                    {
                        let line = &mut lines[place];
                        let is_long = line.text.len() > LONG;
                        let silenced = if is_long { Some(b"\n".to_vec()) } else { messages::silenced(&line.text, id) };
                        let Some(text) = silenced else { continue };
                        if let Some(bytes) = self.bytes.get_mut(connection) {
                            *bytes = *bytes + text.len() - line.text.len();
                        }
                        (line.text, line.awaited) = (text.into(), None);
                    }
                }
            }
        }
    }

    /// The number of the next line.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the bytes that the lines of a connection take.
    pub(super) fn bytes(&self, connection: u64) -> usize {
        self.bytes.get(&connection).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::route::Part;

    impl Requests {
        fn counts_right(&self) -> bool {
            let mut bytes = BTreeMap::new();
            for line in self.open.values().chain(self.waiting.values().flatten()) {
                *bytes.entry(line.connection).or_default() += line.text.len() + OVERHEAD;
            }
            bytes == self.bytes
        }

        /// Hands on all that waits; the connection and the number of each piece.
        fn hand_on(&mut self) -> Vec<(u64, u64)> {
            let pieces = std::iter::from_fn(|| self.next_piece());
            let parse = |piece: Vec<u8>| match route::parse(&piece).unwrap() {
                (connection, Part::Line(number, _) | Part::Piece(number, _) | Part::End(number)) => {
                    (connection, number)
                }
                (_, Part::Notice(_)) => panic!("nobody has written one"),
            };
            pieces.map(parse).collect()
        }

        fn texts(&self, connection: u64) -> Vec<&str> {
            self.of(connection).map(|line| std::str::from_utf8(line).unwrap().trim_end()).collect()
        }
    }

    #[test]
    fn lines_are_finished_in_any_order() {
        let mut requests = Requests::new();
        for line in ["a\n", "bb\n", "c\n"] {
            requests.add(u64::from(line == "bb\n"), line.as_bytes());
        }
        assert_eq!(requests.hand_on(), [(0, 1), (1, 2), (0, 3)]);
        assert_eq!([2, 2, 4].map(|number| requests.finish(number)), [Some(1), None, None]);
        assert_eq!((requests.texts(0), requests.texts(1).len()), (vec!["a", "c"], 0));
        assert!(requests.has(3) && !requests.has(2));
        assert_eq!((requests.next(), requests.bytes(0), requests.bytes(1)), (4, 4 + 2 * OVERHEAD, 0));
        assert_eq!([1, 3].map(|number| requests.finish(number)), [Some(0), Some(0)]);
        assert!(requests.bytes.is_empty());
    }

    #[test]
    fn clients_take_turns_with_lines_and_pieces_of_lines() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(2 * PIECE));
        for (connection, line) in [(1, &*long), (1, "a\n"), (2, "b\n"), (2, "c\n"), (3, "d\n")] {
            requests.add(connection, line.as_bytes());
        }
        assert_eq!(requests.hand_on(), [(1, 1), (2, 2), (3, 3), (1, 1), (2, 4), (1, 1), (1, 5)]);
        assert!(!requests.is_waiting() && requests.counts_right());
    }

    #[test]
    fn another_worker_gets_all_lines_and_those_that_were_begun_under_their_numbers() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(PIECE));
        for (connection, line) in [(1, "a\n"), (2, "b\n"), (1, &*long), (1, "c\n")] {
            requests.add(connection, line.as_bytes());
        }
        let begun: Vec<_> = (0..3).filter_map(|_| requests.next_piece()).collect();
        assert_eq!(begun.len(), 3);
        requests.resend(1);
        assert_eq!(requests.hand_on(), [(1, 1), (2, 4), (1, 5), (1, 5), (1, 6)]);
        assert_eq!(requests.texts(1), ["a", long.trim_end(), "c"]);
        assert!(requests.counts_right());
    }

    #[test]
    fn the_lines_of_a_client_that_is_gone_are_forgotten() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(PIECE));
        for line in ["a\n", &*long, "b\n"] {
            requests.add(3, line.as_bytes());
        }
        let begun: Vec<_> = (0..2).filter_map(|_| requests.next_piece()).collect();
        assert_eq!(begun.len(), 2);
        requests.end(3);
        assert!(requests.counts_right());
        assert_eq!(requests.hand_on(), [(3, 3)]);
        assert_eq!(requests.texts(3), ["", "", ""]);
        assert_eq!([1, 2, 3].map(|number| requests.finish(number)), [Some(3); 3]);
        assert!(requests.bytes.is_empty() && requests.waiting.is_empty());
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
        assert_eq!((requests.texts(0)[0], requests.texts(3)[0]), (r#"{"id":7,"method":"a"}"#, r#"{"method":"b"}"#));
        assert!(requests.counts_right());
    }

    #[test]
    fn a_long_request_that_is_cancelled_is_forgotten() {
        let mut requests = Requests::new();
        requests.add(0, format!(r#"{{"id":7,"method":"{}"}}"#, "x".repeat(LONG)).as_bytes());
        requests.add(0, br#"{"method":"notifications/cancelled","params":{"requestId":7}}"#);
        requests.apply_cancellations();
        assert_eq!(requests.texts(0)[0], "");
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
        assert_eq!(requests.first_awaited(), Some(0));
        requests.hand_on();
        assert_eq!(requests.first_awaited(), Some(2));
        requests.resend(0);
        requests.apply_cancellations();
        requests.hand_on();
        assert_eq!(requests.first_awaited(), Some(9));
        assert_eq!(
            requests.texts(0)[1..3],
            [r#"{"method":"ping"}"#, r#"[{"method":"ping"},{"id":9,"method":"ping"}]"#]
        );
        assert!(requests.counts_right());
        (7..=9).for_each(|number| assert_eq!(requests.finish(number), Some(0)));
        assert_eq!(requests.first_awaited(), Some(12));
    }
}
