//! The requests that wait in one queue, with indexes for the scheduler's searches. The scheduler's lock is held during
//! a search, and clients may have many thousands of waiting requests, so no search visits all requests.

use std::collections::{BTreeMap, BTreeSet};

use super::Request;
use crate::image::JobKind;
use crate::session::activity::RequestBody;

/// The class of a request, on which it depends whether the request may begin while its connection holds an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestClass {
    Reset,
    /// A request about a held evaluation.
    Held,
    Evaluation,
    /// A query or another inspection.
    Query,
}

impl RequestClass {
    pub(super) const ALL: [Self; 4] = [Self::Reset, Self::Held, Self::Evaluation, Self::Query];

    fn of(request: &Request) -> Self {
        match request.job.kind {
            JobKind::Reset => Self::Reset,
            kind if kind.is_for_held_evaluation() => Self::Held,
            _ if matches!(request.body, RequestBody::Inspect(_)) => Self::Query,
            _ => Self::Evaluation,
        }
    }
}

/// The position of a request in its queue. A request that is added later has a higher position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64);

/// The positions of one connection's requests, by the class of the requests.
type ConnectionPositions = [BTreeSet<Position>; RequestClass::ALL.len()];

/// A queue of requests. Adding, finding or removing a request takes logarithmic time.
#[derive(Default)]
pub(super) struct WaitingRequests {
    /// The requests, in the order in which they were added.
    requests: BTreeMap<Position, Request>,
    next_position: u64,
    /// The job number and the position of each request.
    jobs: BTreeSet<(u64, Position)>,
    /// The positions of each connection's requests. Only connections with requests have an entry.
    connections: BTreeMap<u64, ConnectionPositions>,
    /// The position of the first request of each connection.
    heads: BTreeSet<Position>,
    /// The positions of the requests for the background.
    background: BTreeSet<Position>,
}

/// Returns the first position of a request in one of these classes.
fn first_in(positions: &ConnectionPositions, classes: &[RequestClass]) -> Option<Position> {
    classes.iter().filter_map(|class| positions[*class as usize].first()).min().copied()
}

impl WaitingRequests {
    /// Adds a request at the end.
    pub(super) fn push(&mut self, request: Request) {
        let position = Position(self.next_position);
        self.next_position += 1;
        self.jobs.insert((request.job.id, position));
        let positions = self.connections.entry(request.connection.id).or_default();
        if first_in(positions, &RequestClass::ALL).is_none() {
            self.heads.insert(position);
        }
        positions[RequestClass::of(&request) as usize].insert(position);
        if request.background {
            self.background.insert(position);
        }
        self.requests.insert(position, request);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns the first request.
    pub(super) fn first(&self) -> Option<&Request> {
        self.requests.values().next()
    }

    /// Returns the request at a position that a search has returned.
    pub(super) fn get(&self, position: Position) -> &Request {
        &self.requests[&position]
    }

    /// Returns the position of the request with this job number.
    pub(super) fn find_job(&self, job: u64) -> Option<Position> {
        let (found, position) = self.jobs.range((job, Position(0))..).next()?;
        (*found == job).then_some(*position)
    }

    /// Returns the position of the first request of a connection in one of these classes.
    pub(super) fn find_first_of(&self, connection: u64, classes: &[RequestClass]) -> Option<Position> {
        first_in(self.connections.get(&connection)?, classes)
    }

    /// Returns true if a request of a connection that `is_wanted` accepts waits.
    pub(super) fn has_connection(&self, is_wanted: impl Fn(u64) -> bool) -> bool {
        self.connections.keys().any(|connection| is_wanted(*connection))
    }

    /// Returns the position of the first request whose class is among the classes that `classes` returns for its
    /// connection. Visits only connections whose first request is not in such a class, and one other connection.
    pub(super) fn find_first(&self, classes: impl Fn(u64) -> &'static [RequestClass]) -> Option<Position> {
        let mut first: Option<Position> = None;
        for head in &self.heads {
            // The other connections have no request before `head`.
            if first.is_some_and(|first| first < *head) {
                break;
            }
            let connection = self.get(*head).connection.id;
            first = first.into_iter().chain(self.find_first_of(connection, classes(connection))).min();
        }
        first
    }

    /// Returns the position of the first request for the background.
    pub(super) fn find_first_for_background(&self) -> Option<Position> {
        self.background.first().copied()
    }

    /// Returns the requests for the background, in their order.
    pub(super) fn for_background(&self) -> impl Iterator<Item = &Request> {
        self.background.iter().map(move |position| self.get(*position))
    }

    pub(super) fn background_count(&self) -> usize {
        self.background.len()
    }

    /// Makes the request at this position begin in the background.
    pub(super) fn move_to_background(&mut self, position: Position) {
        if let Some(request) = self.requests.get_mut(&position) {
            request.background = true;
            self.background.insert(position);
        }
    }

    /// Removes and returns the request at a position that a search has returned.
    pub(super) fn take(&mut self, position: Position) -> Request {
        let request = self.requests.remove(&position).expect("a request waits at this position");
        self.jobs.remove(&(request.job.id, position));
        self.background.remove(&position);
        let connection = request.connection.id;
        if let Some(positions) = self.connections.get_mut(&connection) {
            positions[RequestClass::of(&request) as usize].remove(&position);
            let next = first_in(positions, &RequestClass::ALL);
            if self.heads.remove(&position) {
                self.heads.extend(next);
            }
            if next.is_none() {
                self.connections.remove(&connection);
            }
        }
        request
    }

    /// Removes and returns the first request.
    pub(super) fn take_first(&mut self) -> Option<Request> {
        let first = *self.requests.keys().next()?;
        Some(self.take(first))
    }

    /// Removes and returns the last request.
    pub(super) fn take_last(&mut self) -> Option<Request> {
        let last = *self.requests.keys().next_back()?;
        Some(self.take(last))
    }

    /// Removes and returns the request with this job number.
    pub(super) fn take_job(&mut self, job: u64) -> Option<Request> {
        let position = self.find_job(job)?;
        Some(self.take(position))
    }

    /// Removes and returns the first request of connection number `connection`, or else of the connection with the next
    /// higher number. After the highest number comes the lowest. Skips connections that `is_wanted` refuses.
    pub(super) fn take_in_turn(&mut self, connection: u64, is_wanted: impl Fn(u64) -> bool) -> Option<Request> {
        let mut in_turn = self.connections.range(connection..).chain(self.connections.range(..connection));
        let (_, positions) = in_turn.find(|(connection, _)| is_wanted(**connection))?;
        let first = first_in(positions, &RequestClass::ALL)?;
        Some(self.take(first))
    }

    /// Removes and returns all requests of a connection, in their order.
    pub(super) fn take_all_of(&mut self, connection: u64) -> Vec<Request> {
        let next = || {
            let position = self.find_first_of(connection, &RequestClass::ALL)?;
            Some(self.take(position))
        };
        std::iter::from_fn(next).collect()
    }

    /// Removes and returns all requests, in their order.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Request> + use<> {
        std::mem::take(self).requests.into_values()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::session::connection::Connection;
    use crate::session::scheduler::test_requests::{evaluation_kind, request};

    /// The number of connections; their numbers begin with 0.
    const CONNECTIONS: u64 = 4;

    /// The sets of classes to search for.
    const CLASS_SETS: [&[RequestClass]; 4] = [
        &RequestClass::ALL,
        &[RequestClass::Reset],
        &[RequestClass::Reset, RequestClass::Held],
        &[RequestClass::Held, RequestClass::Evaluation],
    ];

    /// A step of a random sequence. `Take` and `MoveToBackground` have the index of a request, and the other steps the
    /// number of a connection.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Push {
            connection: u64,
            class: RequestClass,
            background: bool,
        },
        Take(usize),
        TakeJob(usize),
        TakeFirst,
        TakeLast,
        /// The numbers of the first connection and of a connection that is skipped.
        TakeInTurn(u64, u64),
        TakeAllOf(u64),
        TakeAll,
        MoveToBackground(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (index, connection) = (|| 0_usize..30, || 0..CONNECTIONS);
        let class = prop::sample::select(RequestClass::ALL.to_vec());
        prop_oneof![
            20 => (connection(), class, any::<bool>())
                .prop_map(|(connection, class, background)| Step::Push { connection, class, background }),
            2 => index().prop_map(Step::Take),
            2 => index().prop_map(Step::TakeJob),
            2 => Just(Step::TakeFirst),
            1 => Just(Step::TakeLast),
            2 => (connection(), connection()).prop_map(|(from, refused)| Step::TakeInTurn(from, refused)),
            1 => connection().prop_map(Step::TakeAllOf),
            1 => Just(Step::TakeAll),
            4 => index().prop_map(Step::MoveToBackground),
        ]
    }

    /// A request in the model, which is a vector of such entries.
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Entry {
        job: u64,
        connection: u64,
        class: RequestClass,
        background: bool,
    }

    impl Entry {
        fn of(request: &Request) -> Self {
            Self {
                job: request.job.id,
                connection: request.connection.id,
                class: RequestClass::of(request),
                background: request.background,
            }
        }
    }

    fn kind(class: RequestClass) -> JobKind {
        match class {
            RequestClass::Reset => JobKind::Reset,
            RequestClass::Held => JobKind::InvokeRestart(1),
            RequestClass::Evaluation => evaluation_kind(true),
            RequestClass::Query => JobKind::Query,
        }
    }

    fn nth(waiting: &WaitingRequests, index: usize) -> Option<Position> {
        waiting.requests.keys().nth(index).copied()
    }

    /// Applies a step to the queue and to the model. Returns the requests that the step removes from either.
    fn apply(
        step: Step,
        job: u64,
        waiting: &mut WaitingRequests,
        model: &mut Vec<Entry>,
        connections: &[Arc<Connection>],
    ) -> (Vec<Entry>, Vec<Entry>) {
        let (taken, expected): (Vec<Request>, Vec<Entry>) = match step {
            Step::Push { connection, class, background } => {
                model.push(Entry { job, connection, class, background });
                let owner = connections.iter().find(|owner| owner.id == connection).expect("a connection");
                waiting.push(Request { background, ..request(owner, job, kind(class)) });
                (Vec::new(), Vec::new())
            }
            Step::Take(index) => {
                let found = nth(waiting, index).map(|position| waiting.take(position));
                let expected = (index < model.len()).then(|| model.remove(index));
                (found.into_iter().collect(), expected.into_iter().collect())
            }
            Step::TakeJob(index) => {
                let job = model.get(index).map_or(u64::MAX, |entry| entry.job);
                let expected = model.extract_if(.., |entry| entry.job == job).collect();
                (waiting.take_job(job).into_iter().collect(), expected)
            }
            Step::TakeFirst => {
                let expected = (!model.is_empty()).then(|| model.remove(0));
                (waiting.take_first().into_iter().collect(), expected.into_iter().collect())
            }
            Step::TakeLast => (waiting.take_last().into_iter().collect(), model.pop().into_iter().collect()),
            Step::TakeInTurn(from, refused) => {
                let turn = |entry: &Entry| entry.connection.wrapping_sub(from);
                let wanted = model.iter().enumerate().filter(|(_, entry)| entry.connection != refused);
                let next = wanted.min_by_key(|(_, entry)| turn(entry)).map(|(index, _)| index);
                let expected = next.map(|index| model.remove(index));
                let taken = waiting.take_in_turn(from, |connection| connection != refused);
                (taken.into_iter().collect(), expected.into_iter().collect())
            }
            Step::TakeAllOf(connection) => {
                let expected = model.extract_if(.., |entry| entry.connection == connection).collect();
                (waiting.take_all_of(connection), expected)
            }
            Step::TakeAll => (waiting.take_all().collect(), std::mem::take(model)),
            Step::MoveToBackground(index) => {
                if let Some(position) = nth(waiting, index) {
                    waiting.move_to_background(position);
                }
                if let Some(entry) = model.get_mut(index) {
                    entry.background = true;
                }
                (Vec::new(), Vec::new())
            }
        };
        (taken.iter().map(Entry::of).collect(), expected)
    }

    proptest! {
        /// After any sequence of steps, each search finds the request that a search through all requests finds.
        #[test]
        fn searches_find_the_same_requests_as_in_a_list(steps in prop::collection::vec(step(), 0..60)) {
            let connections: Vec<_> = (0..CONNECTIONS).map(Connection::new).collect();
            let (mut waiting, mut model) = (WaitingRequests::default(), Vec::new());
            for (number, step) in (0_u64..).zip(steps) {
                // Job numbers are unique, but are not in the order of the queue.
                let job = number * 41 % 61;
                let (taken, expected) = apply(step, job, &mut waiting, &mut model, &connections);
                prop_assert_eq!(taken, expected);

                let entry_at = |position| Entry::of(waiting.get(position));
                prop_assert_eq!(waiting.requests.values().map(Entry::of).collect::<Vec<_>>(), model.clone());
                prop_assert_eq!((waiting.len(), waiting.is_empty()), (model.len(), model.is_empty()));
                prop_assert_eq!(waiting.first().map(Entry::of), model.first().copied());
                let background: Vec<_> = model.iter().copied().filter(|entry| entry.background).collect();
                prop_assert_eq!(waiting.find_first_for_background().map(entry_at), background.first().copied());
                prop_assert_eq!(waiting.background_count(), background.len());
                prop_assert_eq!(waiting.for_background().map(Entry::of).collect::<Vec<_>>(), background);
                for job in 0..61 {
                    let expected = model.iter().copied().find(|entry| entry.job == job);
                    prop_assert_eq!(waiting.find_job(job).map(entry_at), expected);
                }
                for connection in 0..CONNECTIONS {
                    let is_other = |entry: &Entry| entry.connection != connection;
                    prop_assert_eq!(waiting.has_connection(|other| other != connection), model.iter().any(is_other));
                    for classes in CLASS_SETS {
                        let is_wanted =
                            |entry: &Entry| entry.connection == connection && classes.contains(&entry.class);
                        let found = waiting.find_first_of(connection, classes).map(entry_at);
                        prop_assert_eq!(found, model.iter().copied().find(is_wanted));
                    }
                }
                for shift in 0..4 {
                    let classes = |connection: u64| CLASS_SETS[(connection as usize + shift) % CLASS_SETS.len()];
                    let is_wanted = |entry: &Entry| classes(entry.connection).contains(&entry.class);
                    let found = waiting.find_first(classes).map(entry_at);
                    prop_assert_eq!(found, model.iter().copied().find(is_wanted));
                }
            }
        }
    }
}
