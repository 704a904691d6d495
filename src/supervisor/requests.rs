//! The client's lines that are not answered yet.

use std::collections::VecDeque;

/// What a line takes besides its own bytes.
const OVERHEAD: usize = 64;

/// Lines by number, in order, with their newlines.
#[derive(Debug)]
pub(super) struct Requests {
    lines: VecDeque<(u64, Box<[u8]>)>,
    next: u64,
    bytes: usize,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self { lines: VecDeque::new(), next: 1, bytes: 0 }
    }

    /// Takes a line and gives it the next number.
    pub(super) fn add(&mut self, line: &[u8]) {
        self.lines.push_back((self.next, line.into()));
        self.next += 1;
        self.bytes += line.len() + OVERHEAD;
    }

    /// Forgets a line that is answered. False when there is none of this number.
    pub(super) fn finish(&mut self, number: u64) -> bool {
        let place = match self.lines.front() {
            Some((first, _)) if *first == number => 0,
            _ => match self.lines.binary_search_by_key(&number, |(number, _)| *number) {
                Ok(place) => place,
                Err(_) => return false,
            },
        };
        let line = self.lines.remove(place);
        self.bytes -= line.map_or(0, |(_, line)| line.len() + OVERHEAD);
        true
    }

    /// True while a line waits.
    pub(super) fn has(&self, number: u64) -> bool {
        self.lines.binary_search_by_key(&number, |(number, _)| *number).is_ok()
    }

    /// The lines that wait.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.lines.iter().map(|(number, line)| (*number, &**line))
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
}
