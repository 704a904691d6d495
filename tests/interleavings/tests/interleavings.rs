//! Runs every scenario under random schedules from a fixed seed.

use interleavings::scenarios;
use shuttle::scheduler::RandomScheduler;
use shuttle::{Config, Runner};

fn check(scenario: fn(), schedules: usize) {
    Runner::new(RandomScheduler::new_from_seed(1, schedules), Config::new()).run(scenario);
}

#[test]
fn call_gets_at_most_one_answer_under_cancellation_and_id_reuse() {
    check(scenarios::at_most_one_answer_under_cancellation_and_id_reuse, 2000);
}

#[test]
fn question_gets_at_most_one_reply_from_answer_cancel_or_timeout() {
    check(scenarios::at_most_one_reply_to_a_question, 2000);
}

#[test]
fn event_loop_answers_all_requests_before_the_end() {
    check(scenarios::all_calls_are_answered_before_the_end, 300);
}
