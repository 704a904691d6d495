//! `on-error: "ask"`: the person behind the client chooses how a failed evaluation goes on.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use rmcp::model::{
    ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction, ElicitationSchema, EnumSchema, ErrorData,
    InputRequest, InputRequests, InputRequiredResult, InputResponses, JsonObject, StringSchema,
};

use super::{Call, Fault, Step, ToolContext, later};
use crate::mcp::peer::Peer;
use crate::result_kind::CANCELLED;
use crate::rpc::inflight::NoAnswer;
use crate::session::recovery::{Asking, failed};
use crate::{ErrorRecord, HoldError, Outcome, RestartDesignator, Resumed, Session};

/// The question's name among the inputs of a call.
const QUESTION: &str = "restart";
/// How often a person is asked within one call.
const ROUNDS: usize = 20;
/// Characters of the condition's report that the person is shown.
const SHOWN_MESSAGE: usize = 1000;

/// The questions that repeated calls answer.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Secret: what is hashed with it is ours.
    key: RandomState,
    last: u64,
    pending: Option<Pending>,
}

/// A failed evaluation that waits for a repeated call with the person's choice.
#[derive(Debug)]
struct Pending {
    number: u64,
    outcome: Arc<Outcome>,
    asking: Asking,
}

impl Questions {
    /// What a client hands back to answer question `number` about a call with these arguments.
    fn state(&self, number: u64, arguments: u64) -> String {
        format!("{number}-{:016x}", self.key.hash_one((number, arguments)))
    }
}

/// How far asking has come within one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// The call's arguments, hashed.
    arguments: u64,
    rounds: usize,
}

impl Asked {
    /// Nothing has been asked yet.
    pub(super) fn new(context: &ToolContext, arguments: &JsonObject) -> Self {
        let text = serde_json::to_string(arguments).unwrap_or_default();
        Self { arguments: context.questions.lock().key.hash_one(text), rounds: 0 }
    }
}

/// How a person can be reached.
enum Way {
    /// By a request of the server's.
    Request,
    /// By an answer that asks for a repeated call.
    Repeat,
    Nobody,
}

fn way(peer: &Peer) -> Way {
    match peer.capabilities().and_then(|capabilities| capabilities.elicitation) {
        Some(modes) if modes.form.is_none() && modes.url.is_some() => Way::Nobody,
        Some(_) if peer.is_modern() => Way::Repeat,
        Some(_) => Way::Request,
        None => Way::Nobody,
    }
}

/// What the person decided.
enum Choice {
    Restart { number: u64, values: String },
    Decline,
}

/// Lets the person decide for as long as the evaluation fails and is held; then answers.
pub(super) fn settle(call: Call, outcome: Arc<Outcome>) {
    match call.asked {
        Some(asked) => settle_round(call, asked, outcome),
        None => call.reply(outcome),
    }
}

fn settle_round(call: Call, asked: Asked, outcome: Arc<Outcome>) {
    let question = match &outcome.result {
        Err(error) if outcome.held && asked.rounds < ROUNDS => question(error),
        _ => return call.reply(outcome),
    };
    let question = match question {
        Ok(question) => question,
        Err(fault) => return call.refuse(fault),
    };
    match way(&call.peer) {
        Way::Nobody => call.reply(outcome),
        Way::Repeat => {
            let state = {
                let mut questions = call.context.questions.lock();
                questions.last += 1;
                let number = questions.last;
                let asking = call.session().asking();
                questions.pending = Some(Pending { number, outcome, asking });
                questions.state(number, asked.arguments)
            };
            let request = InputRequest::Elicitation(ElicitRequest::new(question));
            let requests = InputRequests::from([(QUESTION.to_owned(), request)]);
            call.ask_again(InputRequiredResult::new(Some(requests), Some(state)));
        }
        Way::Request => request(call, Asked { rounds: asked.rounds + 1, ..asked }, outcome, question),
    }
}

/// Goes on where a call ended that asked for its repetition.
pub(super) fn go_on(call: &Call, state: &str, responses: Option<InputResponses>) -> Result<Step, Fault> {
    let Some(asked) = call.asked else { return Err(Fault::Value("This tool asks nothing.".to_owned())) };
    let known = {
        let mut questions = call.context.questions.lock();
        let number = state.split_once('-').and_then(|(number, _)| number.parse().ok());
        if number.is_none_or(|number| questions.state(number, asked.arguments) != state) {
            let reason = "the requestState is none that this image has given for these arguments: call without it";
            return Err(Fault::Protocol(ErrorData::invalid_params(reason, None)));
        }
        questions.pending.take_if(|pending| Some(pending.number) == number)
    };
    let Some(Pending { outcome, asking, .. }) = known.filter(|pending| is_held(call.session(), &pending.outcome))
    else {
        return Err(Fault::Value(
            "The evaluation that this input was asked for is no longer held. Evaluate the code again.".to_owned(),
        ));
    };
    let response = responses.and_then(|mut responses| responses.remove(QUESTION));
    let result = response.and_then(|response| serde_json::from_value(response).ok());
    later(move |call| match result {
        Some(result) => follow(call, asked, outcome, &result, asking),
        None => settle_round(call, asked, outcome),
    })
}

/// Asks nobody any more, with this reason, about a session that begins anew.
pub(super) fn withdraw(context: &ToolContext, reason: &str) {
    context.questions.lock().pending = None;
    context.inflight.withdraw_all(reason);
}

/// True while the evaluation with this outcome, and no other, is held.
fn is_held(session: &Session, outcome: &Outcome) -> bool {
    let last = session.last_error();
    session.is_held() && outcome.result.as_ref().err().map(|error| error.id) == last.map(|error| error.id)
}

fn question(error: &ErrorRecord) -> Result<ElicitRequestParams, Fault> {
    let mut message: String = error.message.text.chars().take(SHOWN_MESSAGE).collect();
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
        .map_err(|reason| Fault::Value(reason.to_owned()))?;
    Ok(ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: format!("The Lisp evaluation failed with {}:\n{message}\nHow shall it go on?", error.kind),
        requested_schema: schema,
    })
}

/// Asks the client.
fn request(call: Call, asked: Asked, outcome: Arc<Outcome>, question: ElicitRequestParams) {
    let params = serde_json::to_value(ElicitRequest::new(question)).unwrap_or_default()["params"].take();
    let (session, waiting) = (call.session().clone(), call.waiting());
    let (asking, hold) = (session.asking(), session.limits().hold);
    let held = session.clone();
    if !waiting.on_cancel(move || _ = held.abort_held(drop)) {
        // It was cancelled as the evaluation failed.
        session.abort_held(drop);
        return;
    }
    // The hold ends then, whatever the person does.
    waiting.ask("elicitation/create", &params, hold, move |result| {
        let reason = match result.map(serde_json::from_value::<ElicitResult>) {
            Ok(Ok(result)) => return follow(call, asked, outcome, &result, asking),
            Ok(Err(_)) => "the client's answer is none to this question".to_owned(),
            Err(NoAnswer::Refused(reason)) => reason,
            Err(NoAnswer::Late) => "nobody answered in time".to_owned(),
            Err(NoAnswer::Moot) => {
                let text = "The session was reset while its user was asked how the evaluation should go on.";
                return call.reply(failed(CANCELLED, text.to_owned()));
            }
        };
        let mut outcome = Arc::unwrap_or_clone(outcome);
        outcome.notices.push(format!("The restart could not be asked for: {reason}."));
        outcome.held &= is_held(call.session(), &outcome);
        call.reply(outcome);
    });
}

fn choice(result: &ElicitResult) -> Option<Choice> {
    if result.action != ElicitationAction::Accept {
        return Some(Choice::Decline);
    }
    let field = |name| result.content.as_ref().and_then(|content| content.get(name)?.as_str());
    let number = field("restart")?.split('.').next()?.trim().parse().ok()?;
    Some(Choice::Restart { number, values: field("values").unwrap_or_default().to_owned() })
}

/// Does what the person chose with the held evaluation that has this outcome; then asks again, or answers. What has waited
/// for the answer to the question comes after that.
fn follow(call: Call, asked: Asked, before: Arc<Outcome>, result: &ElicitResult, asking: Asking) {
    let (session, waiting) = (call.session().clone(), call.waiting());
    let mut before = Arc::unwrap_or_clone(before);
    let job = match choice(result) {
        None => {
            // Not asked again: the same answer would come.
            before.notices.push("The client's answer names no restart.".to_owned());
            return call.reply(before);
        }
        Some(Choice::Decline) => session.abort_held(move |result| {
            drop(asking);
            before.notices.push(match result {
                Ok(()) => "The user chose no restart: the evaluation was aborted.".to_owned(),
                Err(error) => format!("The user chose no restart. {error}"),
            });
            call.reply(Outcome { held: false, ..before });
        }),
        Some(Choice::Restart { number, values }) => {
            session.invoke_restart(&RestartDesignator::Number(number), &values, move |after| {
                drop(asking);
                followed(call, asked, before, number, after);
            })
        }
    };
    waiting.on_cancel(move || session.cancel(job));
}

/// Goes on when the restart that the person chose came to this.
fn followed(call: Call, asked: Asked, mut before: Outcome, number: u64, after: Result<Resumed, HoldError>) {
    let error = before.result.as_ref().err();
    let kind = error.map_or_else(String::new, |error| error.kind.clone());
    let restart = error.and_then(|error| error.restarts.iter().find(|restart| restart.number == number));
    let name = restart.map_or_else(String::new, |restart| restart.name.clone());
    let mut after = match after {
        Ok(Resumed::Outcome(outcome)) => Arc::unwrap_or_clone(outcome),
        Ok(Resumed::Aborted) => {
            before.notices.push(format!("The user chose {number}. {name}: the evaluation was aborted."));
            return call.reply(Outcome { held: false, ..before });
        }
        Err(error) => {
            before.held &= error != HoldError::NothingHeld;
            before.notices.push(format!("The user chose restart {number}. {error}"));
            return call.reply(before);
        }
    };
    if is_held(call.session(), &before) {
        // The values failed, or the restart returned: the question is still the same.
        if let Err(error) = after.result {
            after.notices.push(format!("What failed is {}: {}", error.kind, error.message.text));
        }
        after.result = before.result.clone();
        after.held = true;
    } else {
        after.notices.push(format!("After {kind} the evaluation went on as the user chose: {number}. {name}."));
    }
    settle_round(call, asked, Arc::new(before.followed_by(after)));
}
