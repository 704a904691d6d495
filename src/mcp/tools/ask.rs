//! `on-error: "ask"`: the user chooses how a failed evaluation continues.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rmcp::model::{
    ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction, ElicitationSchema, EnumSchema, ErrorData,
    InputRequest, InputRequests, InputRequiredResult, InputResponses, JsonObject, StringSchema,
};

use super::{Call, CallHandler, Fault, ToolContext, handle_with};
use crate::mcp::client::Client;
use crate::os::helper_threads;
use crate::result_kind::CANCELLED;
use crate::rpc::inflight::NoAnswer;
use crate::session::recovery::{UserQuestion, failed_outcome};
use crate::{ErrorRecord, HoldEnd, HoldError, Outcome, Resumed, Session};

/// Key of the question among the inputs of a call.
const QUESTION_KEY: &str = "restart";
/// Maximum number of questions within one call.
const MAX_ROUNDS: usize = 20;
/// Maximum number of characters of the condition's report in a question.
const MAX_SHOWN_MESSAGE: usize = 1000;
/// The sentence of the answer if the user's choice came too late.
const HOLD_HAD_ENDED: &str = "The evaluation was no longer held.";
/// The reason why the user chose nothing when the time for the choice is over.
const NO_ANSWER_IN_TIME: &str = "the client did not answer in time";

/// The state of questions that a client answers by repeating the call.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// A secret key, so that clients cannot forge a request state.
    key: RandomState,
    pending: Option<PendingQuestion>,
}

/// A failed evaluation that waits for a repeated call with the user's choice.
#[derive(Debug)]
struct PendingQuestion {
    /// The lowest number for the jobs of the call that asked, which no other call has, not even in another image. A call asks
    /// at most one such question.
    number: u64,
    outcome: Arc<Outcome>,
    user_question: UserQuestion,
}

impl Questions {
    /// Returns the request state with which a client answers question `number` about a call. `arguments` is the hash of
    /// the call's arguments.
    fn request_state(&self, number: u64, arguments: u64) -> String {
        format!("{number}-{:016x}", self.key.hash_one((number, arguments)))
    }
}

/// The state of the questions to the user within one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct AskState {
    /// Hash of the call's arguments.
    arguments: u64,
    rounds: usize,
}

impl AskState {
    /// Creates the state before the first question.
    pub(super) fn new(context: &ToolContext, arguments: &JsonObject) -> Self {
        let text = serde_json::to_string(arguments).unwrap_or_default();
        Self { arguments: context.questions.lock().key.hash_one(text), rounds: 0 }
    }
}

/// A way to reach the user.
enum Channel {
    /// A request from the server to the client.
    Request,
    /// An answer that asks the client to repeat the call.
    Repeat,
    Nobody,
}

fn channel(client: &Client) -> Channel {
    match &client.elicitation {
        Some(modes) if modes.form.is_none() && modes.url.is_some() => Channel::Nobody,
        Some(_) if client.has_no_handshake() => Channel::Repeat,
        Some(_) => Channel::Request,
        None => Channel::Nobody,
    }
}

/// The user's decision.
enum Choice {
    Restart { number: u64, values: String },
    Decline,
}

/// Asks the user for restarts as long as the evaluation is held, then answers the call.
pub(super) fn answer_after_asking(call: Call, outcome: Arc<Outcome>) {
    match call.ask_state {
        Some(ask_state) => ask_or_answer(call, ask_state, outcome),
        None => call.reply(outcome),
    }
}

fn ask_or_answer(call: Call, ask_state: AskState, outcome: Arc<Outcome>) {
    let error = match &outcome.result {
        Err(error) if outcome.held && ask_state.rounds < MAX_ROUNDS => error,
        _ => return call.reply(outcome),
    };
    let question = match restart_question(error) {
        Ok(question) => question,
        Err(fault) => return call.refuse(fault),
    };
    match channel(&call.client) {
        Channel::Nobody => helper_threads::run(move || call.reply(outcome)),
        Channel::Repeat => {
            let Some(user_question) = call.session().begin_user_question(error, call.first_job, drop) else {
                return answer_with_current_outcome(call, outcome, None);
            };
            let (number, state) = {
                let mut questions = call.context.questions.lock();
                let number = call.first_job;
                questions.pending = Some(PendingQuestion { number, outcome, user_question });
                (number, questions.request_state(number, ask_state.arguments))
            };
            let abort = {
                let context = call.context.clone();
                move || {
                    let taken = context.questions.lock().pending.take_if(|pending| pending.number == number);
                    if let Some(pending) = taken {
                        pending.user_question.abort(drop);
                    }
                }
            };
            if !call.pending().on_cancel(abort.clone()) {
                // The call was cancelled, so nobody will answer the question.
                return abort();
            }
            let request = InputRequest::Elicitation(ElicitRequest::new(question));
            let requests = InputRequests::from([(QUESTION_KEY.to_owned(), request)]);
            call.request_input(InputRequiredResult::new(Some(requests), Some(state)));
        }
        Channel::Request => {
            ask_by_request(call, AskState { rounds: ask_state.rounds + 1, ..ask_state }, outcome, question)
        }
    }
}

/// Continues a repeated call with the user's answer.
pub(super) fn resume(
    call: &Call,
    ask_state: AskState,
    state: &str,
    responses: Option<InputResponses>,
) -> Result<CallHandler, Fault> {
    let known = {
        let mut questions = call.context.questions.lock();
        let number = state.split_once('-').and_then(|(number, _)| number.parse().ok());
        let is_known = number.is_some_and(|number| questions.request_state(number, ask_state.arguments) == state);
        // The key of an earlier image is lost, so such a state cannot be checked, but its question is not open.
        let recovery = call.context.recovery.as_ref();
        let is_earlier = number.zip(recovery).is_some_and(|(number, recovery)| recovery.began_in_earlier_image(number));
        if !is_known && !is_earlier {
            let reason = "unknown requestState for these arguments: call again without it";
            return Err(Fault::Protocol(ErrorData::invalid_params(reason, None)));
        }
        questions.pending.take_if(|pending| is_known && Some(pending.number) == number)
    };
    let Some(PendingQuestion { outcome, user_question, .. }) = known.filter(|pending| pending.user_question.is_open())
    else {
        return Err(Fault::Refusal(
            "This answer belongs to no open question: the question was answered before, the hold timed out, the \
             session was reset or restored, the image was lost, or another request resumed, aborted or took over the \
             evaluation. To evaluate the code again, call without requestState."
                .to_owned(),
        ));
    };
    let response = responses.and_then(|mut responses| responses.remove(QUESTION_KEY));
    let result = response.and_then(|response| serde_json::from_value(response).ok());
    handle_with(move |call| {
        user_question.pass_to_call(call.first_job);
        match result {
            Some(result) => apply_choice(call, ask_state, outcome, &result, user_question),
            None => ask_or_answer(call, ask_state, outcome),
        }
    })
}

/// Returns true if the evaluation with this outcome is still held.
fn is_held(session: &Session, outcome: &Outcome) -> bool {
    let last = session.last_error();
    session.is_held() && outcome.result.as_ref().err().map(|error| error.id) == last.map(|error| error.id)
}

fn restart_question(error: &ErrorRecord) -> Result<ElicitRequestParams, Fault> {
    let mut message: String = error.message.text.chars().take(MAX_SHOWN_MESSAGE).collect();
    if message.len() < error.message.text.len() {
        message.push('…');
    }
    let restarts = error.restarts.iter();
    let restarts = restarts.map(|restart| format!("{}. {} - {}", restart.number, restart.name, restart.description));
    let restarts = EnumSchema::builder(restarts.collect()).title("Restart").build();
    let values = StringSchema::new().title("Values").description(
        "Lisp expressions for the restart's arguments: `41`, or `1 (list 2)`; empty if the restart takes none.",
    );
    let schema = ElicitationSchema::builder()
        .required_enum_schema("restart", restarts)
        .property("values", rmcp::model::PrimitiveSchemaDefinition::String(values))
        .build()
        .map_err(|reason| Fault::Refusal(reason.to_owned()))?;
    Ok(ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: format!(
            "The Lisp evaluation failed with {}:\n{message}\nHow should the evaluation continue?",
            error.kind
        ),
        requested_schema: schema,
    })
}

/// Asks the user through a request to the client. The question is withdrawn when the hold ends in another way.
fn ask_by_request(call: Call, ask_state: AskState, outcome: Arc<Outcome>, question: ElicitRequestParams) {
    let params = serde_json::to_value(ElicitRequest::new(question)).unwrap_or_default()["params"].take();
    let (session, pending) = (call.session().clone(), call.pending());
    let hold_end = Arc::new(OnceLock::new());
    let begun = outcome.result.as_ref().err().and_then(|error| {
        let (hold_end, pending) = (hold_end.clone(), pending.clone());
        session.begin_user_question(error, call.first_job, move |end| {
            _ = hold_end.set(end);
            pending.withdraw_question(withdrawal_reason(end));
        })
    });
    let Some(user_question) = begun else { return answer_with_current_outcome(call, outcome, None) };
    // The answer and the cancellation of the call both take the question; the first to do so decides.
    let user_question = Arc::new(Mutex::new(Some(user_question)));
    let abort = {
        let user_question = user_question.clone();
        move || {
            let taken = user_question.lock().take();
            if let Some(question) = taken {
                question.abort(drop);
            }
        }
    };
    if !pending.on_cancel(abort.clone()) {
        // The call was cancelled while the evaluation failed.
        return abort();
    }
    let withdrawn = hold_end.clone();
    // The question expires together with the hold.
    pending.ask("elicitation/create", &params, session.limits().hold, move |result| {
        let Some(user_question) = user_question.lock().take() else { return };
        let notice = match (result.map(serde_json::from_value::<ElicitResult>), hold_end.get().copied()) {
            (Ok(Ok(result)), _) => return apply_choice(call, ask_state, outcome, &result, user_question),
            (Err(NoAnswer::Withdrawn), Some(HoldEnd::Released)) => {
                let text = "A reset or restore ended the evaluation while the user was asked how the evaluation should \
                    continue.";
                return call.reply(failed_outcome(CANCELLED, text.to_owned()));
            }
            (Err(NoAnswer::Withdrawn), Some(end @ (HoldEnd::Resumed | HoldEnd::Aborted))) => {
                format!("The user chose no restart: {}.", withdrawal_reason(end))
            }
            (Ok(Err(_)), _) => {
                "The user could not be asked to choose a restart: the client's answer must have an action (accept, \
                 decline or cancel) and, after accept, an object as content."
                    .to_owned()
            }
            (Err(NoAnswer::Refused(reason)), _) => {
                // The reason comes from the client, and may end with a period.
                format!("The user could not be asked to choose a restart: {}.", reason.trim_end_matches('.'))
            }
            (Err(NoAnswer::TimedOut | NoAnswer::Withdrawn), _) => {
                format!("The user chose no restart: {NO_ANSWER_IN_TIME}.")
            }
        };
        answer_with_current_outcome(call, outcome, Some(notice));
    });
    if let Some(end) = withdrawn.get() {
        // The hold ended before the request was sent.
        pending.withdraw_question(withdrawal_reason(*end));
    }
}

/// Returns the reason why a question is withdrawn when its hold ends.
fn withdrawal_reason(end: HoldEnd) -> &'static str {
    match end {
        HoldEnd::Resumed => "another request resumed the evaluation",
        HoldEnd::Aborted => "another request aborted the evaluation",
        HoldEnd::TimedOut => NO_ANSWER_IN_TIME,
        HoldEnd::Released => "the session was reset or restored",
        HoldEnd::TakenOver => "another client took over the evaluation",
    }
}

/// Answers a call whose question to the user had no effect, with the current outcome of the evaluation, which failed with
/// the outcome `before`: another request may have resumed or aborted the evaluation. While another request resumes the
/// evaluation, the answer waits for the evaluation's end or next error. A helper thread renders the answer: this function
/// runs on the event loop when the client replies or its time is over.
fn answer_with_current_outcome(call: Call, before: Arc<Outcome>, notice: Option<String>) {
    let mut before = Arc::unwrap_or_clone(before);
    before.notices.extend(notice);
    let id_of = |outcome: &Outcome| outcome.result.as_ref().err().map(|error| error.id);
    let evaluation = before.result.as_ref().err().map_or(0, |error| error.evaluation);
    let (session, shared) = (call.session().clone(), call.shared());
    let answer = {
        let (before, shared) = (before.clone(), shared.clone());
        move |now: Arc<Outcome>| {
            let Some(call) = shared.take() else { return };
            // Another client may have taken over the evaluation.
            let held = now.held && call.session().held_evaluation() == Some(evaluation);
            let outcome = if id_of(&now) == id_of(&before) {
                Outcome { held, ..before }
            } else {
                // The notices of `now`, and its output of other threads, were sent with another answer.
                let Outcome { notices, background, .. } = before;
                Outcome { notices, background, held, ..Arc::unwrap_or_clone(now) }
            };
            helper_threads::run(move || call.reply(outcome));
        }
    };
    if session.await_outcome(evaluation, answer).is_err()
        && let Some(call) = shared.take()
    {
        // The later outcome was too large to keep.
        let held = is_held(&session, &before);
        helper_threads::run(move || call.reply(Outcome { held, ..before }));
    }
}

fn parse_choice(result: &ElicitResult) -> Option<Choice> {
    if result.action != ElicitationAction::Accept {
        return Some(Choice::Decline);
    }
    let field = |name| result.content.as_ref().and_then(|content| content.get(name)?.as_str());
    let number = field("restart")?.split('.').next()?.trim().parse().ok()?;
    Some(Choice::Restart { number, values: field("values").unwrap_or_default().to_owned() })
}

/// Applies the user's choice to the held evaluation that has the outcome `before`, then asks again or answers the call.
/// Other evaluations wait until the choice has taken effect.
fn apply_choice(
    call: Call,
    ask_state: AskState,
    before: Arc<Outcome>,
    result: &ElicitResult,
    user_question: UserQuestion,
) {
    match parse_choice(result) {
        // Asking again would get the same answer.
        None => {
            let notice = "The client's answer names no restart: `restart` in its content must be one of the choices.";
            answer_with_current_outcome(call, before, Some(notice.to_owned()));
        }
        Some(Choice::Decline) => user_question.abort(move |result| {
            let notice = match result {
                Ok(()) => "The user chose no restart: the evaluation was aborted.".to_owned(),
                Err(HoldError::NothingHeld { .. }) => format!("The user chose no restart. {HOLD_HAD_ENDED}"),
                Err(error) => format!("The user chose no restart. {error}"),
            };
            answer_with_current_outcome(call, before, Some(notice));
        }),
        Some(Choice::Restart { number, values }) => {
            let (session, pending) = (call.session().clone(), call.pending());
            let before = Arc::unwrap_or_clone(before);
            pending.submit(&session, || {
                user_question.invoke_restart(number, &values, move |after| {
                    continue_after_restart(call, ask_state, before, number, after);
                })
            });
        }
    }
}

/// Asks again if the evaluation is still held after the chosen restart, otherwise answers the call.
fn continue_after_restart(
    call: Call,
    ask_state: AskState,
    mut before: Outcome,
    number: u64,
    after: Result<Resumed, HoldError>,
) {
    let error = before.result.as_ref().err();
    let kind = error.map_or_else(String::new, |error| error.kind.clone());
    let restart = error.and_then(|error| error.restarts.iter().find(|restart| restart.number == number));
    let name = restart.map_or_else(String::new, |restart| restart.name.clone());
    let mut after = match after {
        Ok(Resumed::Outcome(outcome)) => Arc::unwrap_or_clone(outcome),
        Ok(Resumed::Aborted) => {
            before.notices.push(format!("The user chose restart {number} ({name}): the evaluation was aborted."));
            return call.reply(Outcome { held: false, ..before });
        }
        Err(error) => {
            let reason = match error {
                HoldError::NothingHeld { .. } => HOLD_HAD_ENDED.to_owned(),
                error => error.to_string(),
            };
            let notice = format!("The user chose restart {number}. {reason}");
            return answer_with_current_outcome(call, Arc::new(before), Some(notice));
        }
    };
    if is_held(call.session(), &before) {
        // The evaluation of the restart's values failed, or the restart returned: the same question is asked again.
        if let Err(error) = after.result {
            after.notices.push(format!("Resuming the evaluation failed with {}: {}", error.kind, error.message.text));
        }
        after.result = before.result.clone();
        after.held = true;
    } else {
        after.notices.push(format!(
            "The evaluation failed with {kind}. The user chose restart {number} ({name}), and the evaluation continued."
        ));
    }
    ask_or_answer(call, ask_state, Arc::new(before.followed_by(after)));
}
