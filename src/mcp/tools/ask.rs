//! `on-error: "ask"`: the user chooses how a failed evaluation continues.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use rmcp::model::{
    ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction, ElicitationSchema, EnumSchema, ErrorData,
    InputRequest, InputRequests, InputRequiredResult, InputResponses, JsonObject, StringSchema,
};

use super::{Call, CallHandler, Fault, ToolContext, handle_with};
use crate::mcp::client::Client;
use crate::result_kind::CANCELLED;
use crate::rpc::inflight::NoAnswer;
use crate::session::recovery::{UserQuestion, failed_outcome};
use crate::{ErrorRecord, HoldError, Outcome, RestartDesignator, Resumed, Session};

/// Key of the question among the inputs of a call.
const QUESTION_KEY: &str = "restart";
/// Maximum number of questions within one call.
const MAX_ROUNDS: usize = 20;
/// Maximum number of characters of the condition's report in a question.
const MAX_SHOWN_MESSAGE: usize = 1000;

/// The state of questions that a client answers by repeating the call.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// A secret key, so that clients cannot forge a request state.
    key: RandomState,
    last: u64,
    pending: Option<PendingQuestion>,
}

/// A failed evaluation that waits for a repeated call with the user's choice.
#[derive(Debug)]
struct PendingQuestion {
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
    match client.capabilities().and_then(|capabilities| capabilities.elicitation) {
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
    let question = match &outcome.result {
        Err(error) if outcome.held && ask_state.rounds < MAX_ROUNDS => restart_question(error),
        _ => return call.reply(outcome),
    };
    let question = match question {
        Ok(question) => question,
        Err(fault) => return call.refuse(fault),
    };
    match channel(&call.client) {
        Channel::Nobody => call.reply(outcome),
        Channel::Repeat => {
            let state = {
                let mut questions = call.context.questions.lock();
                questions.last += 1;
                let number = questions.last;
                let user_question = call.session().begin_user_question();
                questions.pending = Some(PendingQuestion { number, outcome, user_question });
                questions.request_state(number, ask_state.arguments)
            };
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
pub(super) fn resume(call: &Call, state: &str, responses: Option<InputResponses>) -> Result<CallHandler, Fault> {
    let Some(ask_state) = call.ask_state else {
        return Err(Fault::Refusal(
            "This tool asks no questions: call it without \
        requestState."
                .to_owned(),
        ));
    };
    let known = {
        let mut questions = call.context.questions.lock();
        let number = state.split_once('-').and_then(|(number, _)| number.parse().ok());
        if number.is_none_or(|number| questions.request_state(number, ask_state.arguments) != state) {
            let reason = "unknown requestState for these arguments: call again without it";
            return Err(Fault::Protocol(ErrorData::invalid_params(reason, None)));
        }
        questions.pending.take_if(|pending| Some(pending.number) == number)
    };
    let Some(PendingQuestion { outcome, user_question, .. }) =
        known.filter(|pending| is_held(call.session(), &pending.outcome))
    else {
        return Err(Fault::Refusal(
            "The evaluation to which this answer belongs is no longer held. Evaluate the code again.".to_owned(),
        ));
    };
    let response = responses.and_then(|mut responses| responses.remove(QUESTION_KEY));
    let result = response.and_then(|response| serde_json::from_value(response).ok());
    handle_with(move |call| match result {
        Some(result) => apply_choice(call, ask_state, outcome, &result, user_question),
        None => ask_or_answer(call, ask_state, outcome),
    })
}

/// Withdraws all questions to the user, because the session is reset. Clients are notified of `reason`.
pub(super) fn withdraw(context: &ToolContext, reason: &str) {
    context.questions.lock().pending = None;
    context.inflight.withdraw_all(reason);
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
    let values = StringSchema::new()
        .title("Values")
        .description("Lisp expressions for the restart's arguments: `41`, or `1 (list 2)`.");
    let schema = ElicitationSchema::builder()
        .required_enum_schema("restart", restarts)
        .property("values", rmcp::model::PrimitiveSchemaDefinition::String(values))
        .build()
        .map_err(|reason| Fault::Refusal(reason.to_owned()))?;
    Ok(ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: format!("The Lisp evaluation failed with {}:\n{message}\nHow should it continue?", error.kind),
        requested_schema: schema,
    })
}

/// Asks the user through a request to the client.
fn ask_by_request(call: Call, ask_state: AskState, outcome: Arc<Outcome>, question: ElicitRequestParams) {
    let params = serde_json::to_value(ElicitRequest::new(question)).unwrap_or_default()["params"].take();
    let (session, pending) = (call.session().clone(), call.pending());
    let (user_question, hold) = (session.begin_user_question(), session.limits().hold);
    let held = session.clone();
    if !pending.on_cancel(move || _ = held.abort_held(drop)) {
        // The call was cancelled while the evaluation failed.
        session.abort_held(drop);
        return;
    }
    // The question expires together with the hold.
    pending.ask("elicitation/create", &params, hold, move |result| {
        let reason = match result.map(serde_json::from_value::<ElicitResult>) {
            Ok(Ok(result)) => return apply_choice(call, ask_state, outcome, &result, user_question),
            Ok(Err(_)) => "the client's answer does not fit the question".to_owned(),
            Err(NoAnswer::Refused(reason)) => reason,
            Err(NoAnswer::TimedOut) => "the client did not answer in time".to_owned(),
            Err(NoAnswer::Withdrawn) => {
                let text = "The session was reset while the user was asked how the evaluation should continue.";
                return call.reply(failed_outcome(CANCELLED, text.to_owned()));
            }
        };
        let mut outcome = Arc::unwrap_or_clone(outcome);
        outcome.notices.push(format!("The user could not be asked for a restart: {reason}."));
        outcome.held &= is_held(call.session(), &outcome);
        call.reply(outcome);
    });
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
    let (session, pending) = (call.session().clone(), call.pending());
    let mut before = Arc::unwrap_or_clone(before);
    let job = match parse_choice(result) {
        None => {
            // Asking again would get the same answer.
            before.notices.push("The client's answer names no restart.".to_owned());
            return call.reply(before);
        }
        Some(Choice::Decline) => session.abort_held(move |result| {
            drop(user_question);
            before.notices.push(match result {
                Ok(()) => "The user chose no restart: the evaluation was aborted.".to_owned(),
                Err(error) => format!("The user chose no restart. {error}"),
            });
            call.reply(Outcome { held: false, ..before });
        }),
        Some(Choice::Restart { number, values }) => {
            session.invoke_restart(&RestartDesignator::Number(number), &values, move |after| {
                drop(user_question);
                continue_after_restart(call, ask_state, before, number, after);
            })
        }
    };
    pending.on_cancel(move || session.cancel(job));
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
            before.held &= error != HoldError::NothingHeld;
            before.notices.push(format!("The user chose restart {number}. {error}"));
            return call.reply(before);
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
        after.notices.push(format!("After {kind} the evaluation continued with the user's restart: {number}. {name}."));
    }
    ask_or_answer(call, ask_state, Arc::new(before.followed_by(after)));
}
