//! Interruption of the code that a Lisp thread runs: at most one interruption is under way per thread, and cleanup forms
//! have a grace period.
//!
//! SBCL queues interruptions of a thread that has interrupts disabled, and ends the process when nine are queued. So the
//! next interruption is sent only once the thread has taken the last interruption, that is, runs it. An interruption
//! unwinds the code. The code's cleanup forms have a grace period, after which they are interrupted, too.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Time in which interrupted code must begin to unwind, and time in which it must end once its grace period is over. Code
/// that takes longer counts as stuck, and cannot be ended from inside the process.
pub(crate) const REACTION_TIME: Duration = Duration::from_secs(2);

/// Time after a thread has taken an interruption until the next interruption is sent, if the code has not ended.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The longest grace period: one day, like the longest time limit. With a longer grace period, a deadline might overflow
/// the clock.
const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// The reason why interrupted code did not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StuckReason {
    /// The code never began to unwind.
    // Recovery logs contain the variant under this name.
    #[serde(rename = "Unmoved")]
    Unresponsive,
    /// The code began to unwind, but cleanup forms keep running.
    Unwinding,
}

impl StuckReason {
    /// Returns the predicate of a sentence whose subject is the Lisp image or an evaluation.
    pub(crate) fn predicate(self) -> &'static str {
        match self {
            Self::Unresponsive => {
                "did not respond to an interrupt (interrupts are off inside without-interrupts, and in code that \
                 interrupt-thread or a timer runs, except inside with-interrupts)"
            }
            Self::Unwinding => {
                "could not finish unwinding, because cleanup forms keep running or end the unwinding with a non-local \
                 exit (return-from, go, throw or a restart),"
            }
        }
    }
}

/// The request to interrupt a thread's code, and the progress of the request. `R` is the type of the request's reason.
#[derive(Debug)]
pub(crate) struct Interruption<R> {
    request: Option<InterruptRequest<R>>,
    /// True from sending an interruption until the thread takes it.
    sent: bool,
}

#[derive(Debug)]
struct InterruptRequest<R> {
    reason: R,
    requested_at: Instant,
    /// Time that cleanup forms may take.
    grace: Duration,
    /// Earliest time at which the next interruption may be sent.
    next: Instant,
    /// Time at which the code began to unwind.
    unwinding_since: Option<Instant>,
}

/// The next action for an interruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InterruptionAction {
    /// Send an interruption, which already counts as sent.
    Send,
    /// Ask again at this time.
    Wait(Instant),
    /// Do nothing until the state changes.
    Idle,
}

impl<R> Default for Interruption<R> {
    fn default() -> Self {
        Self { request: None, sent: false }
    }
}

impl<R: Copy> Interruption<R> {
    /// Requests an interruption of the code. Returns false, and changes nothing, if an interruption was already requested.
    pub(crate) fn request(&mut self, reason: R, grace: Duration, now: Instant) -> bool {
        if self.request.is_some() {
            return false;
        }
        let grace = grace.min(MAX_GRACE);
        self.request = Some(InterruptRequest { reason, requested_at: now, grace, next: now, unwinding_since: None });
        true
    }

    /// Cancels the request. Code that has begun to unwind continues to unwind. An interruption that was sent stays under
    /// way until the thread takes it.
    pub(crate) fn withdraw(&mut self) {
        self.request = None;
    }

    /// Ends the grace period: from now on cleanup forms are interrupted, too.
    pub(crate) fn end_grace(&mut self, now: Instant) {
        if let Some(request) = &mut self.request
            && !request.grace.is_zero()
        {
            request.grace = Duration::ZERO;
            request.next = now;
            // The time until the code counts as stuck starts again now.
            request.unwinding_since = request.unwinding_since.map(|_| now);
        }
    }

    /// Returns the reason for the request, if there is a request.
    pub(crate) fn reason(&self) -> Option<R> {
        self.request.as_ref().map(|request| request.reason)
    }

    /// Returns the time of the request, if there is a request.
    pub(crate) fn request_time(&self) -> Option<Instant> {
        self.request.as_ref().map(|request| request.requested_at)
    }

    /// Returns true while an interruption is under way. Until the thread takes it, no other interruption may be sent.
    pub(crate) fn is_under_way(&self) -> bool {
        self.sent
    }

    /// Returns the next action. [`InterruptionAction::Send`] marks an interruption as sent.
    pub(crate) fn next_action(&mut self, now: Instant) -> InterruptionAction {
        match &self.request {
            Some(request) if !self.sent => {
                if request.next > now {
                    return InterruptionAction::Wait(request.next);
                }
                self.sent = true;
                InterruptionAction::Send
            }
            _ => InterruptionAction::Idle,
        }
    }

    /// Records that the thread has taken the interruption that was sent, or that no thread was there to take it.
    pub(crate) fn record_taken(&mut self, now: Instant) {
        self.sent = false;
        if let Some(request) = &mut self.request {
            request.next = request.next.max(now + RETRY_INTERVAL);
        }
    }

    /// Records that the code begins to unwind. The first call of this function for a request starts the grace period.
    pub(crate) fn record_unwinding(&mut self, now: Instant) {
        if let Some(request) = &mut self.request
            && request.unwinding_since.is_none()
        {
            request.unwinding_since = Some(now);
            request.next = now + if request.grace.is_zero() { RETRY_INTERVAL } else { request.grace };
        }
    }

    /// Returns true if the code has begun to unwind.
    pub(crate) fn is_unwinding(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.unwinding_since.is_some())
    }

    /// Returns the time after which the code counts as stuck: by then it must have begun to unwind or, if it unwinds
    /// already, must have ended. Returns `None` if there is no request.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let request = self.request.as_ref()?;
        Some(
            request.unwinding_since.map_or(request.requested_at, |unwinding| unwinding + request.grace) + REACTION_TIME,
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn is_stuck(interruption: &Interruption<u8>, now: Instant) -> bool {
        interruption.deadline().is_some_and(|deadline| deadline <= now)
    }

    fn requested_interruption(now: Instant) -> Interruption<u8> {
        let mut interruption = Interruption::default();
        assert!(interruption.request(1, GRACE, now));
        interruption
    }

    #[test]
    fn grace_periods_are_capped_at_one_day() {
        let start = Instant::now();
        let mut interruption = Interruption::default();
        assert!(interruption.request(1_u8, Duration::MAX, start));
        interruption.record_unwinding(start);
        assert_eq!(interruption.deadline(), Some(start + MAX_GRACE + REACTION_TIME));
    }

    #[test]
    fn the_next_interruption_is_sent_only_after_the_last_was_taken() {
        let start = Instant::now();
        let mut interruption = requested_interruption(start);
        assert_eq!(interruption.next_action(start), InterruptionAction::Send);
        for second in 0..100 {
            assert_eq!(interruption.next_action(start + Duration::from_secs(second)), InterruptionAction::Idle);
        }
        let taken = start + Duration::from_secs(100);
        interruption.record_taken(taken);
        assert_eq!(interruption.next_action(taken), InterruptionAction::Wait(taken + RETRY_INTERVAL));
        assert_eq!(interruption.next_action(taken + RETRY_INTERVAL), InterruptionAction::Send);
    }

    #[test]
    fn cleanup_forms_get_one_grace_period() {
        let start = Instant::now();
        let mut interruption = requested_interruption(start);
        assert_eq!(interruption.next_action(start), InterruptionAction::Send);
        assert!(!is_stuck(&interruption, start + REACTION_TIME / 2) && is_stuck(&interruption, start + REACTION_TIME));
        interruption.record_taken(start);
        interruption.record_unwinding(start);
        let end = start + GRACE;
        assert_eq!(interruption.next_action(end - RETRY_INTERVAL), InterruptionAction::Wait(end));
        assert_eq!(interruption.next_action(end), InterruptionAction::Send);
        interruption.record_taken(end);
        interruption.record_unwinding(end);
        assert_eq!(interruption.next_action(end + RETRY_INTERVAL), InterruptionAction::Send);
        assert!(!is_stuck(&interruption, end + RETRY_INTERVAL) && is_stuck(&interruption, end + REACTION_TIME));
    }

    #[test]
    fn a_full_heap_ends_the_grace_period() {
        let start = Instant::now();
        let mut interruption = requested_interruption(start);
        interruption.next_action(start);
        interruption.record_taken(start);
        interruption.record_unwinding(start);
        let later = start + RETRY_INTERVAL;
        interruption.end_grace(later);
        assert_eq!(interruption.next_action(later), InterruptionAction::Send);
        assert!(!is_stuck(&interruption, later + RETRY_INTERVAL) && is_stuck(&interruption, later + REACTION_TIME));
        interruption.end_grace(later + REACTION_TIME);
        assert!(is_stuck(&interruption, later + REACTION_TIME));
    }

    #[derive(Debug, Clone)]
    enum Action {
        Request,
        Withdraw,
        EndGrace,
        Ask,
        /// The thread takes the interruption that was sent to it, and unwinds or not.
        Take {
            unwinds: bool,
        },
    }

    fn any_action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Request),
            Just(Action::Withdraw),
            Just(Action::EndGrace),
            Just(Action::Ask),
            any::<bool>().prop_map(|unwinds| Action::Take { unwinds }),
        ]
    }

    proptest! {
        /// Under any sequence of actions, at most one interruption is under way, the code is not interrupted during its
        /// grace period, and a request has a deadline.
        #[test]
        fn at_most_one_interruption_is_under_way(actions in proptest::collection::vec((any_action(), 0..3000_u64), 1..200)) {
            let mut interruption = Interruption::default();
            let mut now = Instant::now();
            let mut pending = 0;
            // End of the time in which cleanup forms must not be interrupted.
            let mut undisturbed = None;
            for (action, milliseconds) in actions {
                now += Duration::from_millis(milliseconds);
                match action {
                    Action::Request => _ = interruption.request(1, GRACE, now),
                    Action::Withdraw => {
                        interruption.withdraw();
                        undisturbed = None;
                    }
                    Action::EndGrace => {
                        interruption.end_grace(now);
                        undisturbed = None;
                    }
                    Action::Ask => match interruption.next_action(now) {
                        InterruptionAction::Send => {
                            pending += 1;
                            prop_assert!(undisturbed.is_none_or(|end| end <= now));
                        }
                        InterruptionAction::Wait(until) => prop_assert!(until > now && until <= now + GRACE),
                        InterruptionAction::Idle => prop_assert!(pending == 1 || interruption.reason().is_none()),
                    },
                    Action::Take { unwinds } if pending > 0 => {
                        pending -= 1;
                        interruption.record_taken(now);
                        if unwinds {
                            let first = interruption.request.as_ref()
                                .is_some_and(|request| request.unwinding_since.is_none() && !request.grace.is_zero());
                            interruption.record_unwinding(now);
                            if first {
                                undisturbed = Some(now + GRACE);
                            }
                        }
                    }
                    Action::Take { .. } => {}
                }
                prop_assert!(pending <= 1);
                prop_assert_eq!(pending == 1, interruption.is_under_way());
                prop_assert_eq!(interruption.deadline().is_some(), interruption.reason().is_some());
                prop_assert!(interruption.deadline().is_none_or(|deadline| deadline <= now + GRACE + REACTION_TIME));
            }
        }
    }
}
