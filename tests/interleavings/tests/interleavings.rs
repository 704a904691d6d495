//! Every scenario under random schedules, the same ones each time.

use interleavings::scenarios;
use shuttle::scheduler::RandomScheduler;
use shuttle::{Config, Runner};

fn check(scenario: fn(), schedules: usize) {
    Runner::new(RandomScheduler::new_from_seed(1, schedules), Config::new()).run(scenario);
}

#[test]
fn one_answer_whatever_comes_first() {
    check(scenarios::one_answer_whatever_comes_first, 2000);
}

#[test]
fn one_reply_to_a_question() {
    check(scenarios::one_reply_to_a_question, 2000);
}

#[test]
fn all_is_answered_whoever_leads() {
    check(scenarios::all_is_answered_whoever_leads, 300);
}
