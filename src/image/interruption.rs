//! The interruption of whatever a Lisp thread runs: one is under way at most, and cleanup forms get their time.
//!
//! SBCL queues the interruptions of a thread that has them disabled, and ends the process when there are nine. So the next one is
//! sent only when the thread has taken the last, that is, begun to run it. One that is taken unwinds the code, whose cleanup
//! forms then have a grace period before they are interrupted, too.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How long interrupted code may take until it begins to unwind, and to end when its cleanup forms have used up their grace
/// period. After that it is stuck: nothing can be done about it from inside.
pub(crate) const REACTION: Duration = Duration::from_secs(2);

/// How long after an interruption was taken the next one is sent when the code does not end.
const AGAIN: Duration = Duration::from_secs(1);

/// The longest grace period: a day, like the longest time limit. A longer one might reach beyond what the clock can say.
const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// The reason why interrupted code did not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stuck {
    /// It never began to unwind.
    Unmoved,
    /// It began to unwind, and cleanup forms kept it from its end.
    Unwinding,
}

impl Stuck {
    /// What the Lisp image did, to follow its name.
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Self::Unmoved => {
                "did not react to being interrupted (interrupts are off in without-interrupts, and in what interrupt-thread \
                 or a timer runs unless that uses with-interrupts)"
            }
            Self::Unwinding => {
                "was kept running by cleanup forms, which do not end or leave the unwinding by a non-local exit \
                 (return-from, go, throw or a restart),"
            }
        }
    }
}

/// What a thread's code is to be interrupted for, and how far that has come.
#[derive(Debug)]
pub(crate) struct Interruption<R> {
    wanted: Option<Wanted<R>>,
    /// One is on its way: the thread has not taken it.
    sent: bool,
}

#[derive(Debug)]
struct Wanted<R> {
    reason: R,
    since: Instant,
    /// How long cleanup forms may take.
    grace: Duration,
    /// When the next one is to be sent, unless one is on its way.
    next: Instant,
    /// When the code began to unwind.
    unwinding: Option<Instant>,
}

/// What is to be done about an interruption now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Send it: it counts as sent.
    Send,
    /// Ask again at this time.
    Wait(Instant),
    /// Nothing, before something happens.
    Rest,
}

impl<R> Default for Interruption<R> {
    fn default() -> Self {
        Self { wanted: None, sent: false }
    }
}

impl<R: Copy> Interruption<R> {
    /// Wants the code interrupted; false when that was wanted before, for another reason perhaps, which stays.
    pub(crate) fn want(&mut self, reason: R, grace: Duration, now: Instant) -> bool {
        if self.wanted.is_some() {
            return false;
        }
        let grace = grace.min(MAX_GRACE);
        self.wanted = Some(Wanted { reason, since: now, grace, next: now, unwinding: None });
        true
    }

    /// Has the code go on, unless it unwinds. One that is on its way does no harm: it is known when it is taken.
    pub(crate) fn withdraw(&mut self) {
        self.wanted = None;
    }

    /// Interrupts cleanup forms from now on, too.
    pub(crate) fn end_grace(&mut self, now: Instant) {
        if let Some(wanted) = &mut self.wanted
            && !wanted.grace.is_zero()
        {
            wanted.grace = Duration::ZERO;
            wanted.next = now;
            // The time until it is stuck begins now.
            wanted.unwinding = wanted.unwinding.map(|_| now);
        }
    }

    /// Why it was first wanted, if it is.
    pub(crate) fn reason(&self) -> Option<R> {
        self.wanted.as_ref().map(|wanted| wanted.reason)
    }

    /// Since when it is wanted.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.wanted.as_ref().map(|wanted| wanted.since)
    }

    /// True while one is on its way, so that no other may be sent to the same thread.
    pub(crate) fn is_under_way(&self) -> bool {
        self.sent
    }

    /// What is to be done now.
    pub(crate) fn step(&mut self, now: Instant) -> Step {
        match &self.wanted {
            Some(wanted) if !self.sent => {
                if wanted.next > now {
                    return Step::Wait(wanted.next);
                }
                self.sent = true;
                Step::Send
            }
            _ => Step::Rest,
        }
    }

    /// Notes that the thread has taken the one that was sent, or that there was no thread to take it.
    pub(crate) fn taken(&mut self, now: Instant) {
        self.sent = false;
        if let Some(wanted) = &mut self.wanted {
            wanted.next = wanted.next.max(now + AGAIN);
        }
    }

    /// Notes that the code begins to unwind: the first time its cleanup forms get their grace period.
    pub(crate) fn unwinds(&mut self, now: Instant) {
        if let Some(wanted) = &mut self.wanted
            && wanted.unwinding.is_none()
        {
            wanted.unwinding = Some(now);
            wanted.next = now + if wanted.grace.is_zero() { AGAIN } else { wanted.grace };
        }
    }

    /// True when the code has begun to unwind.
    pub(crate) fn is_unwinding(&self) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| wanted.unwinding.is_some())
    }

    /// When the code is stuck, unless it begins to unwind, or ends, before.
    pub(crate) fn due(&self) -> Option<Instant> {
        let wanted = self.wanted.as_ref()?;
        Some(wanted.unwinding.map_or(wanted.since, |unwinding| unwinding + wanted.grace) + REACTION)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn is_stuck(interruption: &Interruption<u8>, now: Instant) -> bool {
        interruption.due().is_some_and(|due| due <= now)
    }

    fn wanted(now: Instant) -> Interruption<u8> {
        let mut interruption = Interruption::default();
        assert!(interruption.want(1, GRACE, now));
        interruption
    }

    #[test]
    fn the_longest_duration_is_a_grace_period_of_a_day() {
        let start = Instant::now();
        let mut interruption = Interruption::default();
        assert!(interruption.want(1_u8, Duration::MAX, start));
        interruption.unwinds(start);
        assert_eq!(interruption.due(), Some(start + MAX_GRACE + REACTION));
    }

    #[test]
    fn the_next_one_is_sent_when_the_last_was_taken() {
        let start = Instant::now();
        let mut interruption = wanted(start);
        assert_eq!(interruption.step(start), Step::Send);
        for second in 0..100 {
            assert_eq!(interruption.step(start + Duration::from_secs(second)), Step::Rest);
        }
        let taken = start + Duration::from_secs(100);
        interruption.taken(taken);
        assert_eq!(interruption.step(taken), Step::Wait(taken + AGAIN));
        assert_eq!(interruption.step(taken + AGAIN), Step::Send);
    }

    #[test]
    fn cleanup_forms_have_their_grace_period_once() {
        let start = Instant::now();
        let mut interruption = wanted(start);
        assert_eq!(interruption.step(start), Step::Send);
        assert!(!is_stuck(&interruption, start + REACTION / 2) && is_stuck(&interruption, start + REACTION));
        interruption.taken(start);
        interruption.unwinds(start);
        let end = start + GRACE;
        assert_eq!(interruption.step(end - AGAIN), Step::Wait(end));
        assert_eq!(interruption.step(end), Step::Send);
        interruption.taken(end);
        interruption.unwinds(end);
        assert_eq!(interruption.step(end + AGAIN), Step::Send);
        assert!(!is_stuck(&interruption, end + AGAIN) && is_stuck(&interruption, end + REACTION));
    }

    #[test]
    fn a_full_heap_ends_the_grace_period() {
        let start = Instant::now();
        let mut interruption = wanted(start);
        interruption.step(start);
        interruption.taken(start);
        interruption.unwinds(start);
        let later = start + AGAIN;
        interruption.end_grace(later);
        assert_eq!(interruption.step(later), Step::Send);
        assert!(!is_stuck(&interruption, later + AGAIN) && is_stuck(&interruption, later + REACTION));
        interruption.end_grace(later + REACTION);
        assert!(is_stuck(&interruption, later + REACTION));
    }

    #[derive(Debug, Clone)]
    enum Happens {
        Want,
        Withdraw,
        EndGrace,
        Step,
        /// The thread takes what was sent to it, and unwinds or not.
        Take {
            unwinds: bool,
        },
    }

    fn happens() -> impl Strategy<Value = Happens> {
        prop_oneof![
            Just(Happens::Want),
            Just(Happens::Withdraw),
            Just(Happens::EndGrace),
            Just(Happens::Step),
            any::<bool>().prop_map(|unwinds| Happens::Take { unwinds }),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order, there is one on its way at most, the code is not interrupted in its grace
        /// period, and it has an end.
        #[test]
        fn one_is_under_way_at_most(events in proptest::collection::vec((happens(), 0..3000_u64), 1..200)) {
            let mut interruption = Interruption::default();
            let mut now = Instant::now();
            let mut pending = 0;
            // Until when cleanup forms run undisturbed.
            let mut undisturbed = None;
            for (event, milliseconds) in events {
                now += Duration::from_millis(milliseconds);
                match event {
                    Happens::Want => _ = interruption.want(1, GRACE, now),
                    Happens::Withdraw => {
                        interruption.withdraw();
                        undisturbed = None;
                    }
                    Happens::EndGrace => {
                        interruption.end_grace(now);
                        undisturbed = None;
                    }
                    Happens::Step => match interruption.step(now) {
                        Step::Send => {
                            pending += 1;
                            prop_assert!(undisturbed.is_none_or(|end| end <= now));
                        }
                        Step::Wait(until) => prop_assert!(until > now && until <= now + GRACE),
                        Step::Rest => prop_assert!(pending == 1 || interruption.reason().is_none()),
                    },
                    Happens::Take { unwinds } if pending > 0 => {
                        pending -= 1;
                        interruption.taken(now);
                        if unwinds {
                            let first = interruption.wanted.as_ref()
                                .is_some_and(|wanted| wanted.unwinding.is_none() && !wanted.grace.is_zero());
                            interruption.unwinds(now);
                            if first {
                                undisturbed = Some(now + GRACE);
                            }
                        }
                    }
                    Happens::Take { .. } => {}
                }
                prop_assert!(pending <= 1);
                prop_assert_eq!(pending == 1, interruption.is_under_way());
                prop_assert_eq!(interruption.due().is_some(), interruption.reason().is_some());
                prop_assert!(interruption.due().is_none_or(|due| due <= now + GRACE + REACTION));
            }
        }
    }
}
