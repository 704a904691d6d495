//! The clients' lines that no worker has finished yet.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use serde_json::Value;

use super::messages::{self, LineIds, MAX_PARSED_LINE, MAX_REWRITTEN_LINE};
use crate::os::helper_threads;
use crate::rpc::id_scanner::IdScanner;
use crate::rpc::inflight::MAX_REQUESTS;
use crate::rpc::route;

/// Maximum number of a client's lines that are read in one step of the event loop, so that other clients do not wait.
pub(super) const MAX_LINES_PER_STEP: usize = 1_000;
/// The number of bytes that each line adds to its connection's total in addition to its text: a queue may be half empty,
/// and the smallest allocation takes 32 bytes.
const LINE_OVERHEAD: usize = 2 * size_of::<PendingLine>() + 32;
/// Maximum number of workers that may stall at a line or be lost while they decode it. After that, no other worker gets
/// the line.
const MAX_STALLS: u32 = 2;
/// Maximum number of a client's waiting cancellations that are applied to its waiting requests when a new worker gets
/// the lines: as many as a client may have pending requests. Further cancellations take effect when the worker reads
/// them.
const MAX_APPLIED_CANCELLATIONS: usize = MAX_REQUESTS;
/// Maximum size of a piece, in bytes. A longer line is sent in pieces, so that lines of other clients can pass
/// between the pieces.
pub(super) const MAX_PIECE: usize = 64 << 10;

/// The lines of all clients that no worker has finished. A line gets its number when its beginning is sent, so that
/// jobs begin in the order of their numbers, in whatever order the clients take turns.
#[derive(Debug)]
pub(super) struct Requests {
    /// The open lines, which were sent to the worker at least in part, by number.
    open: BTreeMap<u64, PendingLine>,
    /// The lines that are not sent yet, by connection.
    waiting: BTreeMap<u64, VecDeque<PendingLine>>,
    /// The connections with something to send, in the order of their turns.
    turns: VecDeque<u64>,
    /// The lines that are partly sent, by connection: the number of each line, and the number of its bytes that are
    /// sent.
    partial: BTreeMap<u64, (u64, usize)>,
    /// The number of the next line.
    next: u64,
    /// The totals of each connection's lines.
    totals: BTreeMap<u64, Totals>,
    /// The ids that waiting lines cancel, as JSON, each with the number of these lines, by connection.
    cancelled: BTreeMap<u64, HashMap<String, usize>>,
}

/// The totals of one connection's lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    /// The size in bytes, with [`LINE_OVERHEAD`] added for each line.
    bytes: usize,
    /// The number of lines that require an answer.
    awaited: usize,
}

/// A line that no worker has finished.
#[derive(Debug)]
struct PendingLine {
    /// The time when the line arrived.
    arrived: Instant,
    /// True once another worker has received the line, at least in part.
    is_resent: bool,
    /// The number under which the line is sent again to another worker; `None` when the line gets a new number.
    number: Option<u64>,
    /// The connection of the line's client.
    connection: u64,
    /// The text with its newline; empty for the end of the connection.
    text: Box<[u8]>,
    /// True when a client waits for an answer.
    is_awaited: bool,
    /// The number of workers that stalled at the line, were lost while they decoded it, or that the line did not reach.
    stalls: u32,
    /// True when the line did not reach the last worker, at least not as a whole.
    is_undelivered: bool,
    /// The ids of the requests that the line cancels, as JSON.
    cancels: Vec<String>,
}

/// A line or a piece of a line, marked for the worker.
#[derive(Debug)]
pub(super) struct Piece {
    /// A mark with the connection and the line's number, followed by the bytes of the line or piece.
    pub(super) marked: Vec<u8>,
    /// The marked time since the line arrived, at the beginning of a line that an earlier worker has received.
    pub(super) age: Option<Vec<u8>>,
    /// The number of bytes that the line lost because its requests are cancelled. Finding these requests took time.
    pub(super) dropped: usize,
    /// True for a whole line and for the last piece of a line.
    pub(super) is_last: bool,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self {
            open: BTreeMap::new(),
            waiting: BTreeMap::new(),
            turns: VecDeque::new(),
            partial: BTreeMap::new(),
            next: 1,
            totals: BTreeMap::new(),
            cancelled: BTreeMap::new(),
        }
    }

    /// Adds a line of a client. An empty line marks the end of the connection.
    pub(super) fn add(&mut self, connection: u64, line: impl Into<Box<[u8]>>) {
        let text: Box<[u8]> = line.into();
        // The ids are found when the line arrives: a search in all lines at once would take too long.
        let (is_awaited, cancels) = find_ids(&text);
        let totals = self.totals.entry(connection).or_default();
        totals.bytes += text.len() + LINE_OVERHEAD;
        totals.awaited += usize::from(is_awaited);
        let line = PendingLine {
            arrived: Instant::now(),
            is_resent: false,
            number: None,
            connection,
            text,
            is_awaited,
            stalls: 0,
            is_undelivered: false,
            cancels,
        };
        self.waiting.entry(connection).or_default().push_back(line);
        self.give_turn(connection);
    }

    /// Queues a connection for its turn, if it is not queued yet.
    fn give_turn(&mut self, connection: u64) {
        if !self.turns.contains(&connection) {
            self.turns.push_back(connection);
        }
    }

    /// Returns true when there is something to send.
    pub(super) fn has_unsent_lines(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Returns the next line, or the next piece of a line, of the client whose turn it is; `None` if there is nothing
    /// to send.
    pub(super) fn next_piece(&mut self) -> Option<Piece> {
        let connection = self.turns.pop_front()?;
        let waiting = self.waiting.get_mut(&connection);
        let (mut age, mut dropped) = (None, 0);
        let (number, done) = match self.partial.remove(&connection) {
            Some(partial) => partial,
            None => {
                let mut line = waiting?.pop_front()?;
                let length = line.text.len();
                self.silence_if_cancelled(&mut line);
                dropped = length.saturating_sub(line.text.len());
                let number = line.number.unwrap_or(self.next);
                self.next = self.next.max(number + 1);
                age = line.is_resent.then(|| route::mark_age(connection, number, line.arrived.elapsed()));
                self.open.insert(number, line);
                (number, 0)
            }
        };
        // If the worker has finished the line already, or the client has disconnected, the text is gone, but the worker
        // must still read the line's end.
        let rest = self.open.get(&number).and_then(|line| line.text.get(done..)).unwrap_or(b"\n");
        let is_last = rest.len() <= MAX_PIECE;
        let marked = if is_last {
            route::mark_line(connection, number, rest)
        } else {
            self.partial.insert(connection, (number, done + MAX_PIECE));
            route::mark_piece(connection, number, &rest[..MAX_PIECE])
        };
        let waits = self.waiting.get(&connection).is_some_and(|lines| !lines.is_empty());
        if waits || self.partial.contains_key(&connection) {
            self.turns.push_back(connection);
        } else {
            self.waiting.remove(&connection);
        }
        Some(Piece { marked, age, dropped, is_last })
    }

    /// Queues all open lines for the next worker, before the waiting lines of each client. The clients take turns in the
    /// order of their first open lines: a call that replaced the image is answered before another client's call replaces the
    /// image again. Lines that an earlier worker may have begun, or the last worker according to `may_have_begun`, keep their
    /// numbers.
    pub(super) fn requeue_open_lines(&mut self, may_have_begun: impl Fn(u64) -> bool) {
        for (number, _) in std::mem::take(&mut self.partial).into_values() {
            self.record_undelivered(number);
        }
        let (open, turns) = (std::mem::take(&mut self.open), std::mem::take(&mut self.turns));
        open.values().map(|line| line.connection).chain(turns).for_each(|connection| self.give_turn(connection));
        // A line that has kept its number may have arrived after a line that got a new, higher number.
        let mut open: Vec<_> = open.into_iter().collect();
        open.sort_by_key(|(_, line)| line.arrived);
        for (number, mut line) in open.into_iter().rev() {
            // The jobs of a line that no worker has begun must not count as begun. An earlier worker may have begun a line
            // that has kept its number.
            let keeps_number = line.number.is_some() || !line.is_undelivered && may_have_begun(number);
            line.number = keeps_number.then_some(number);
            (line.is_undelivered, line.is_resent) = (false, true);
            self.waiting.entry(line.connection).or_default().push_front(line);
        }
    }

    /// Removes a line that the worker has finished. Returns the line's connection; `None` when no open line has this
    /// number.
    pub(super) fn finish(&mut self, number: u64) -> Option<u64> {
        let line = self.open.remove(&number)?;
        self.uncount(&line);
        Some(line.connection)
    }

    /// Subtracts a removed line from the totals.
    fn uncount(&mut self, line: &PendingLine) {
        let Some(totals) = self.totals.get_mut(&line.connection) else { return };
        totals.bytes -= line.text.len() + LINE_OVERHEAD;
        totals.awaited -= usize::from(line.is_awaited);
        if totals.bytes == 0 {
            self.totals.remove(&line.connection);
        }
    }

    /// Removes the waiting lines of a client that has disconnected, and queues the end of the connection for the
    /// worker. Open lines stay without their text until the worker has finished them.
    pub(super) fn disconnect(&mut self, connection: u64) {
        let waiting = self.waiting.remove(&connection);
        self.partial.remove(&connection);
        self.cancelled.remove(&connection);
        let (mut totals, mut texts) = (Totals::default(), Vec::new());
        for line in self.open.values_mut().filter(|line| line.connection == connection) {
            texts.push(std::mem::replace(&mut line.text, Box::from(*b"\n")));
            line.is_awaited = false;
            totals.bytes += line.text.len() + LINE_OVERHEAD;
        }
        // Other clients would wait while many or long lines are freed.
        helper_threads::run(move || drop((waiting, texts)));
        self.totals.insert(connection, totals);
        self.add(connection, *b"");
    }

    /// Returns the connection of an open line.
    pub(super) fn connection(&self, number: u64) -> Option<u64> {
        Some(self.open.get(&number)?.connection)
    }

    /// Returns the text of an open line.
    pub(super) fn text(&self, number: u64) -> Option<&[u8]> {
        Some(&self.open.get(&number)?.text)
    }

    /// Returns true for the number of an open line.
    pub(super) fn is_open(&self, number: u64) -> bool {
        self.open.contains_key(&number)
    }

    /// Returns the number of the first open line whose number is at least `number`.
    pub(super) fn first_open_line_from(&self, number: u64) -> Option<u64> {
        self.open.range(number..).next().map(|(number, _)| *number)
    }

    /// Records that a worker stalled at an open line, or was lost while it decoded the line.
    pub(super) fn record_stall(&mut self, number: u64) {
        if let Some(line) = self.open.get_mut(&number) {
            line.stalls += 1;
        }
    }

    /// Records that an open line did not reach the worker, at least not as a whole.
    pub(super) fn record_undelivered(&mut self, number: u64) {
        if let Some(line) = self.open.get_mut(&number) {
            line.is_undelivered = true;
        }
    }

    /// Removes an open line at which [`MAX_STALLS`] workers have stalled. Returns the line's connection and text.
    pub(super) fn take_stalling_line(&mut self) -> Option<(u64, Box<[u8]>)> {
        let number = self.open.iter().find(|(_, line)| line.stalls >= MAX_STALLS).map(|(number, _)| *number)?;
        let line = self.open.remove(&number)?;
        self.uncount(&line);
        Some((line.connection, line.text))
    }

    /// Returns true when an open line, which may have been sent only in part, has a number above `number`.
    pub(super) fn has_open_line_after(&self, number: u64) -> bool {
        self.open.last_key_value().is_some_and(|(last, _)| *last > number)
    }

    /// Returns the texts of a client's lines, in order.
    pub(super) fn texts_of(&self, connection: u64) -> impl Iterator<Item = &[u8]> {
        let open = self.open.values().filter(move |line| line.connection == connection);
        open.chain(self.waiting.get(&connection).into_iter().flatten()).map(|line| &*line.text)
    }

    /// Returns the number of the first open line whose client waits for an answer. Returns 0 if only waiting lines
    /// require answers, and `None` if no client waits.
    pub(super) fn first_awaited(&self) -> Option<u64> {
        let open = self.open.iter().find(|(_, line)| line.is_awaited).map(|(number, _)| *number);
        open.or_else(|| self.has_awaited_lines().then_some(0))
    }

    /// Returns true when a client waits for an answer.
    pub(super) fn has_awaited_lines(&self) -> bool {
        self.totals.values().any(|totals| totals.awaited > 0)
    }

    /// Turns waiting requests that a later waiting line cancels into notifications when they are sent. Must be called before
    /// a new worker gets the lines: the lost worker might not have handled the cancellation. Only the first
    /// [`MAX_APPLIED_CANCELLATIONS`] of each client are applied, because other clients wait meanwhile.
    pub(super) fn apply_cancellations(&mut self) {
        self.cancelled.clear();
        for (connection, lines) in &self.waiting {
            for id in lines.iter().flat_map(|line| &line.cancels).take(MAX_APPLIED_CANCELLATIONS) {
                *self.cancelled.entry(*connection).or_default().entry(id.clone()).or_default() += 1;
            }
        }
    }

    /// Turns the requests of a line that is about to be sent into notifications if a later line cancels them. Only this line
    /// is parsed: parsing all waiting lines at once would take too long.
    fn silence_if_cancelled(&mut self, line: &mut PendingLine) {
        let Some(cancelled) = self.cancelled.get_mut(&line.connection) else { return };
        for id in &line.cancels {
            if let Some(later) = cancelled.get_mut(id) {
                *later -= 1;
                if *later == 0 {
                    cancelled.remove(id);
                }
            }
        }
        if cancelled.is_empty() {
            self.cancelled.remove(&line.connection);
            return;
        }
        let is_cancelled = |id: &Value| cancelled.contains_key(&id.to_string());
        let text = if line.text.len() > MAX_REWRITTEN_LINE {
            // A long line is scanned, not parsed. `IdScanner` finds no id in a batch.
            IdScanner::scan(&line.text).request_id().filter(is_cancelled).map(|_| b"\n".to_vec())
        } else {
            messages::as_notifications(&line.text, is_cancelled)
        };
        let Some(text) = text else { return };
        let Some(totals) = self.totals.get_mut(&line.connection) else { return };
        totals.bytes = totals.bytes + text.len() - line.text.len();
        totals.awaited -= usize::from(line.is_awaited);
        (line.is_awaited, line.text) = (find_ids(&text).0, text.into());
        totals.awaited += usize::from(line.is_awaited);
    }

    /// Returns the call number that the next new line from a client will get.
    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    /// Returns the total size of a connection's lines in bytes, with [`LINE_OVERHEAD`] added for each line.
    pub(super) fn bytes(&self, connection: u64) -> usize {
        self.totals.get(&connection).map_or(0, |totals| totals.bytes)
    }
}

/// Returns whether a client waits for the answer to a line, and the ids of the requests that the line cancels, as JSON.
/// A line over [`MAX_PARSED_LINE`] counts as a request.
fn find_ids(line: &[u8]) -> (bool, Vec<String>) {
    if line.len() > MAX_PARSED_LINE {
        return (true, Vec::new());
    }
    let LineIds { requests, cancelled } = LineIds::find(line);
    (!requests.is_empty(), cancelled.iter().map(Value::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::route::MarkedContent;

    impl Requests {
        /// Returns true when the totals equal those computed from all lines.
        fn counts_match(&self) -> bool {
            let mut computed = BTreeMap::<u64, Totals>::new();
            for line in self.open.values().chain(self.waiting.values().flatten()) {
                let totals = computed.entry(line.connection).or_default();
                totals.bytes += line.text.len() + LINE_OVERHEAD;
                totals.awaited += usize::from(line.is_awaited);
            }
            computed == self.totals
        }

        /// Sends all waiting lines, and returns the connection and the line number of each piece.
        fn send_all(&mut self) -> Vec<(u64, u64)> {
            let pieces = std::iter::from_fn(|| self.next_piece());
            let parse = |piece: Piece| match route::parse(&piece.marked).unwrap() {
                (
                    connection,
                    MarkedContent::Line(number, _) | MarkedContent::Piece(number, _) | MarkedContent::End(number),
                ) => (connection, number),
                (_, MarkedContent::Notice(_) | MarkedContent::Age(..)) => panic!("nobody has written one"),
            };
            pieces.map(parse).collect()
        }

        fn texts(&self, connection: u64) -> Vec<&str> {
            self.texts_of(connection).map(|line| std::str::from_utf8(line).unwrap().trim_end()).collect()
        }
    }

    #[test]
    fn lines_are_finished_in_any_order() {
        let mut requests = Requests::new();
        for line in ["a\n", "bb\n", "c\n"] {
            requests.add(u64::from(line == "bb\n"), line.as_bytes());
        }
        assert_eq!(requests.send_all(), [(0, 1), (1, 2), (0, 3)]);
        assert_eq!([2, 2, 4].map(|number| requests.finish(number)), [Some(1), None, None]);
        assert_eq!((requests.texts(0), requests.texts(1).len()), (vec!["a", "c"], 0));
        assert!(requests.is_open(3) && !requests.is_open(2));
        assert_eq!((requests.next_number(), requests.bytes(0), requests.bytes(1)), (4, 4 + 2 * LINE_OVERHEAD, 0));
        assert_eq!([1, 3].map(|number| requests.finish(number)), [Some(0), Some(0)]);
        assert!(requests.totals.is_empty() && requests.waiting.is_empty());
    }

    #[test]
    fn clients_take_turns_with_lines_and_pieces_of_lines() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(2 * MAX_PIECE));
        for (connection, line) in [(1, &*long), (1, "a\n"), (2, "b\n"), (2, "c\n"), (3, "d\n")] {
            requests.add(connection, line.as_bytes());
        }
        assert_eq!(requests.send_all(), [(1, 1), (2, 2), (3, 3), (1, 1), (2, 4), (1, 1), (1, 5)]);
        assert!(!requests.has_unsent_lines() && requests.counts_match());
    }

    #[test]
    fn lines_of_a_client_are_sent_again_in_their_order_although_the_first_line_got_a_higher_number() {
        let mut requests = Requests::new();
        for line in ["a\n", "b\n"] {
            requests.add(1, line.as_bytes());
        }
        assert_eq!(requests.send_all(), [(1, 1), (1, 2)]);
        requests.requeue_open_lines(|line| line == 2);
        assert_eq!(requests.send_all(), [(1, 3), (1, 2)]);
        requests.requeue_open_lines(|_| false);
        assert_eq!(requests.texts(1), ["a", "b"]);
        assert_eq!(requests.send_all(), [(1, 4), (1, 2)]);
    }

    #[test]
    fn the_next_worker_gets_all_lines_and_begun_lines_keep_their_numbers() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(MAX_PIECE));
        for (connection, line) in [(1, "a\n"), (2, "b\n"), (1, &*long), (1, "c\n")] {
            requests.add(connection, line.as_bytes());
        }
        let begun: Vec<_> = (0..3).filter_map(|_| requests.next_piece()).collect();
        assert_eq!(begun.len(), 3);
        assert!(begun.iter().all(|piece| piece.age.is_none()));
        requests.requeue_open_lines(|line| line <= 1);
        let first = requests.next_piece().expect("a line");
        assert!(first.age.is_some_and(|age| age.starts_with(b"@1:1^")));
        assert_eq!(requests.send_all(), [(2, 4), (1, 5), (1, 5), (1, 6)]);
        assert_eq!(requests.texts(1), ["a", long.trim_end(), "c"]);
        assert!(requests.counts_match());
    }

    #[test]
    fn lines_that_no_worker_has_begun_get_new_numbers() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(2 * MAX_PIECE));
        for (connection, line) in [(1, "a\n"), (1, "b\n"), (2, &*long), (3, "c\n")] {
            requests.add(connection, line.as_bytes());
        }
        let begun: Vec<_> = (0..4).filter_map(|_| requests.next_piece()).collect();
        assert_eq!(begun.len(), 4);
        // The line of client 2 has number 2, and is sent only in part.
        requests.record_undelivered(4);
        requests.requeue_open_lines(|line| line <= 4);
        assert_eq!(requests.send_all(), [(1, 1), (2, 5), (3, 3), (1, 6), (2, 5), (2, 5)]);
        // The first worker may have begun line 1, although the second worker has not.
        for number in [1, 3, 6] {
            requests.record_undelivered(number);
        }
        requests.requeue_open_lines(|line| line <= 6);
        assert_eq!(requests.send_all(), [(1, 1), (3, 3), (2, 5), (1, 7), (2, 5), (2, 5)]);
        assert!(requests.counts_match());
    }

    #[test]
    fn clients_take_turns_with_the_next_worker_in_the_order_of_their_first_lines() {
        let mut requests = Requests::new();
        for connection in [4, 2, 4] {
            requests.add(connection, *b"a\n");
        }
        assert_eq!(requests.send_all(), [(4, 1), (2, 2), (4, 3)]);
        requests.add(1, *b"a\n");
        requests.requeue_open_lines(|line| line <= 1);
        assert_eq!(requests.send_all(), [(4, 1), (2, 4), (1, 5), (4, 6)]);
    }

    #[test]
    fn only_a_line_at_which_two_workers_stalled_is_removed() {
        let mut requests = Requests::new();
        for line in ["a\n", "b\n", "c\n"] {
            requests.add(5, line.as_bytes());
        }
        for expected in [None, Some((5, Box::from(*b"b\n")))] {
            let numbers: Vec<_> = requests.send_all().into_iter().map(|(_, number)| number).collect();
            assert_eq!(requests.first_open_line_from(numbers[1]), Some(numbers[1]));
            requests.record_stall(numbers[1]);
            assert_eq!(requests.take_stalling_line(), expected);
            requests.requeue_open_lines(|_| false);
        }
        requests.record_stall(99);
        assert!(requests.take_stalling_line().is_none() && requests.counts_match());
        assert_eq!(requests.texts(5), ["a", "c"]);
    }

    /// The event loop asks in each turn, and a client may have many waiting lines.
    #[test]
    fn whether_a_line_is_awaited_is_known_when_it_arrives() {
        let mut requests = Requests::new();
        let progress = br#"{"method":"notifications/progress","params":{"id":1}}"#;
        for line in [&progress[..], progress] {
            requests.add(3, line);
            assert!(requests.first_awaited().is_none() && !requests.has_awaited_lines());
        }
        for line in [&br#"{"\u0069d":7,"method":"ping"}"#[..], b"{\"method\":\"x\"}"] {
            requests.add(3, line);
        }
        assert_eq!((requests.first_awaited(), requests.totals[&3].awaited), (Some(0), 1));
        requests.send_all();
        assert_eq!((requests.first_awaited(), requests.totals[&3].awaited), (Some(3), 1));
        assert!(requests.counts_match());
        requests.disconnect(3);
        assert!(requests.first_awaited().is_none() && !requests.has_awaited_lines() && requests.counts_match());
    }

    #[test]
    fn a_disconnected_client_loses_its_waiting_lines_and_the_text_of_its_open_lines() {
        let mut requests = Requests::new();
        let long = format!("{}\n", "x".repeat(MAX_PIECE));
        for line in ["a\n", &*long, "b\n"] {
            requests.add(3, line.as_bytes());
        }
        let begun: Vec<_> = (0..2).filter_map(|_| requests.next_piece()).collect();
        assert_eq!(begun.len(), 2);
        requests.disconnect(3);
        assert!(requests.counts_match());
        assert_eq!(requests.send_all(), [(3, 3)]);
        assert_eq!(requests.texts(3), ["", "", ""]);
        assert_eq!([1, 2, 3].map(|number| requests.finish(number)), [Some(3); 3]);
        assert!(requests.totals.is_empty() && requests.waiting.is_empty());
    }

    #[test]
    fn a_cancellation_does_not_affect_another_clients_request_with_the_same_id() {
        let mut requests = Requests::new();
        let cancel = br#"{"method":"notifications/cancelled","params":{"requestId":7}}"#;
        for (connection, line) in [(0, &br#"{"id":7,"method":"a"}"#[..]), (3, br#"{"id":7,"method":"b"}"#), (3, cancel)]
        {
            requests.add(connection, line);
        }
        requests.apply_cancellations();
        requests.send_all();
        assert_eq!((requests.texts(0)[0], requests.texts(3)[0]), (r#"{"id":7,"method":"a"}"#, r#"{"method":"b"}"#));
        assert!(requests.counts_match());
    }

    #[test]
    fn a_cancelled_request_too_long_to_rewrite_loses_its_text() {
        for length in [MAX_REWRITTEN_LINE, MAX_PARSED_LINE] {
            let mut requests = Requests::new();
            requests.add(0, format!(r#"{{"id":7,"method":"{}"}}"#, "x".repeat(length)).as_bytes());
            requests.add(0, *br#"{"method":"notifications/cancelled","params":{"requestId":7}}"#);
            requests.apply_cancellations();
            let piece = requests.next_piece().expect("a line");
            assert!(piece.marked.len() < 100 && piece.dropped > length && piece.is_last);
            assert_eq!(requests.texts(0)[0], "");
            assert!(requests.counts_match());
        }
    }

    #[test]
    fn a_bounded_number_of_each_clients_cancellations_is_applied_to_waiting_requests() {
        let mut requests = Requests::new();
        let last = MAX_APPLIED_CANCELLATIONS;
        for id in [last - 1, last] {
            requests.add(0, format!(r#"{{"id":{id},"method":"ping"}}"#).as_bytes());
        }
        for id in 0..=last {
            let cancel = format!(r#"{{"method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
            requests.add(0, cancel.as_bytes());
        }
        requests.apply_cancellations();
        assert_eq!(requests.cancelled[&0].len(), MAX_APPLIED_CANCELLATIONS);
        requests.send_all();
        let last = format!(r#"{{"id":{last},"method":"ping"}}"#);
        assert_eq!(requests.texts(0)[..2], [r#"{"method":"ping"}"#, &*last]);
        assert!(requests.cancelled.is_empty() && requests.counts_match());
    }

    #[test]
    fn notifications_and_cancelled_requests_are_not_awaited() {
        let mut requests = Requests::new();
        let cancel = |id: u32| format!(r#"{{"method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        requests.add(0, *br#"{"method":"notifications/roots/list_changed"}"#);
        assert_eq!(requests.first_awaited(), None);
        requests.add(0, *br#"{"id":7,"method":"ping"}"#);
        requests.add(0, *br#"[{"id":8,"method":"ping"},{"id":9,"method":"ping"}]"#);
        requests.add(0, cancel(8).as_bytes());
        requests.add(0, cancel(7).as_bytes());
        // A later request with the same id is not cancelled.
        requests.add(0, *br#"{"id":7,"method":"ping"}"#);
        assert_eq!(requests.first_awaited(), Some(0));
        requests.send_all();
        assert_eq!(requests.first_awaited(), Some(2));
        requests.requeue_open_lines(|_| false);
        requests.apply_cancellations();
        requests.send_all();
        assert_eq!(requests.first_awaited(), Some(9));
        assert_eq!(
            requests.texts(0)[1..3],
            [r#"{"method":"ping"}"#, r#"[{"method":"ping"},{"id":9,"method":"ping"}]"#]
        );
        assert!(requests.counts_match());
        (7..=9).for_each(|number| assert_eq!(requests.finish(number), Some(0)));
        assert_eq!(requests.first_awaited(), Some(12));
    }
}
