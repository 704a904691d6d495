//! The client's lines that no worker is done with yet.

use std::collections::{HashMap, VecDeque};

use super::messages;

/// What a line takes besides its own bytes.
const OVERHEAD: usize = 64;

/// Lines by number, in order.
#[derive(Debug)]
pub(super) struct Requests {
    lines: VecDeque<Pending>,
    next: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    /// With its newline.
    text: Box<[u8]>,
    /// Somebody waits for an answer. Not known before it is asked for: reading a line takes time.
    awaited: Option<bool>,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self { lines: VecDeque::new(), next: 1, bytes: 0 }
    }

    /// Takes a line and gives it the next number.
    pub(super) fn add(&mut self, line: &[u8]) {
        self.lines.push_back(Pending { number: self.next, text: line.into(), awaited: None });
        self.next += 1;
        self.bytes += line.len() + OVERHEAD;
    }

    /// Takes lines over, each under its number, from a process that had so many.
    pub(super) fn take_over(&mut self, lines: impl Iterator<Item = (u64, Box<[u8]>)>, next: u64) {
        for (number, text) in lines {
            self.bytes += text.len() + OVERHEAD;
            self.lines.push_back(Pending { number, text, awaited: None });
        }
        self.next = next;
    }

    /// Forgets a line that a worker is done with. False when there is none of this number.
    pub(super) fn finish(&mut self, number: u64) -> bool {
        let place = match self.lines.front() {
            Some(first) if first.number == number => Some(0),
            _ => self.place(number),
        };
        let line = place.and_then(|place| self.lines.remove(place));
        self.bytes -= line.as_ref().map_or(0, |line| line.text.len() + OVERHEAD);
        line.is_some()
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.lines.binary_search_by_key(&number, |line| line.number).ok()
    }

    /// True for a line that no worker is done with.
    pub(super) fn has(&self, number: u64) -> bool {
        self.place(number).is_some()
    }

    /// The lines.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.lines.iter().map(|line| (line.number, &*line.text))
    }

    /// The number of the first line that somebody waits for the answer to.
    pub(super) fn first_awaited(&mut self) -> Option<u64> {
        let waits =
            |line: &mut Pending| *line.awaited.get_or_insert_with(|| messages::refusal(&line.text, "").is_some());
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
                    asked.insert(id.to_string(), place);
                } else if let Some(id) = messages::cancelled_id(&message)
                    && let Some(place) = asked.remove(&id.to_string())
                    && let Some(text) = messages::silenced(&self.lines[place].text, id)
                {
                    let line = &mut self.lines[place];
                    self.bytes = self.bytes + text.len() - line.text.len();
                    (line.text, line.awaited) = (text.into(), None);
                }
            }
        }
    }

    /// The number of the next line.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// How many bytes the lines take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_finished_in_any_order() {
        let mut requests = Requests::new();
        for line in ["a\n", "bb\n", "c\n"] {
            requests.add(line.as_bytes());
        }
        assert!(requests.finish(2) && !requests.finish(2) && !requests.finish(4));
        assert_eq!(requests.iter().map(|(number, _)| number).collect::<Vec<_>>(), [1, 3]);
        assert!(requests.has(3) && !requests.has(2));
        assert_eq!((requests.next(), requests.bytes()), (4, 4 + 2 * OVERHEAD));
        assert!(requests.finish(1) && requests.finish(3));
        assert_eq!(requests.bytes(), 0);
    }

    #[test]
    fn only_requests_are_awaited_and_not_once_they_are_cancelled() {
        let mut requests = Requests::new();
        let cancel = |id: u32| format!(r#"{{"method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        requests.add(br#"{"method":"notifications/roots/list_changed"}"#);
        assert!(requests.may_be_awaited());
        assert_eq!(requests.first_awaited(), None);
        assert!(!requests.may_be_awaited());
        requests.add(br#"{"id":7,"method":"ping"}"#);
        requests.add(br#"[{"id":8,"method":"ping"},{"id":9,"method":"ping"}]"#);
        requests.add(cancel(8).as_bytes());
        requests.add(cancel(7).as_bytes());
        // The same id again, which the cancellation is not about.
        requests.add(br#"{"id":7,"method":"ping"}"#);
        assert_eq!(requests.first_awaited(), Some(2));
        requests.apply_cancellations();
        assert_eq!(requests.first_awaited(), Some(3));
        requests.apply_cancellations();
        let texts: Vec<_> = requests.iter().map(|(_, line)| std::str::from_utf8(line).unwrap().trim_end()).collect();
        assert_eq!(texts[1..3], [r#"{"method":"ping"}"#, r#"[{"method":"ping"},{"id":9,"method":"ping"}]"#]);
        assert_eq!(requests.bytes, requests.iter().map(|(_, line)| line.len() + OVERHEAD).sum::<usize>());
        (1..=3).for_each(|number| assert!(requests.finish(number)));
        assert_eq!(requests.first_awaited(), Some(6));
    }
}
