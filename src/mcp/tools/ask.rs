//! `on-error: "ask"`: the person behind the client chooses how a failed evaluation goes on.

use std::ops::ControlFlow;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::{
    CancelledNotificationParam, ClientResult, ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction,
    ElicitationSchema, EnumSchema, InputRequest, InputRequests, InputRequiredResult, InputResponses, ProtocolVersion,
    ServerRequest, StringSchema,
};
use rmcp::service::{PeerRequestOptions, RequestContext};
use tokio::sync::oneshot;

use super::wait::wait;
use super::{Fault, Step};
use crate::{ErrorRecord, HoldError, Outcome, RestartDesignator, Session};

/// The question's name among the inputs of a call.
const QUESTION: &str = "restart";
/// How often a person is asked within one call.
const ROUNDS: usize = 20;
/// Characters of the condition's report that the person is shown.
const SHOWN_MESSAGE: usize = 1000;

/// A failed evaluation that waits for a repeated call with the person's choice.
#[derive(Debug)]
pub(super) struct Pending {
    state: String,
    outcome: Outcome,
}

/// How a person can be reached.
enum Way {
    /// By a request of the server's.
    Request,
    /// By an answer that asks for a repeated call.
    Repeat,
    Nobody,
}

fn way(context: &RequestContext<RoleServer>) -> Way {
    let elicitation = context.client_capabilities().and_then(|capabilities| capabilities.elicitation);
    match elicitation {
        Some(modes) if modes.form.is_some() || modes.url.is_none() => {
            if context.protocol_version().is_some_and(|version| version >= ProtocolVersion::V_2026_07_28) {
                Way::Repeat
            } else {
                Way::Request
            }
        }
        _ => Way::Nobody,
    }
}

/// What the person decided.
enum Choice {
    Restart { number: u64, values: String },
    Decline,
}

/// Lets the person decide for as long as the evaluation fails and is held.
pub(super) async fn settle(
    session: &Session,
    pending: &Mutex<Option<Pending>>,
    mut outcome: Outcome,
    context: &RequestContext<RoleServer>,
) -> Result<Step, Fault> {
    let way = way(context);
    for _ in 0..ROUNDS {
        let question = match &outcome.result {
            Err(error) if outcome.held => question(error)?,
            _ => return Ok(Step::Answer(outcome.into())),
        };
        match way {
            Way::Nobody => return Ok(Step::Answer(outcome.into())),
            Way::Repeat => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
                let state = format!("held-{now:x}");
                let request = InputRequest::Elicitation(ElicitRequest::new(question));
                let requests = InputRequests::from([(QUESTION.to_owned(), request)]);
                *pending.lock() = Some(Pending { state: state.clone(), outcome });
                return Ok(Step::Ask(Box::new(InputRequiredResult::new(Some(requests), Some(state)))));
            }
            Way::Request => {
                let result = match request(session, question, context).await? {
                    Ok(result) => result,
                    Err(reason) => {
                        outcome.notices.push(format!("The restart could not be asked for: {reason}."));
                        break;
                    }
                };
                match follow(session, outcome, &result, context).await? {
                    ControlFlow::Continue(next) => outcome = next,
                    ControlFlow::Break(last) => return Ok(Step::Answer(last.into())),
                }
            }
        }
    }
    Ok(Step::Answer(outcome.into()))
}

/// Goes on where a call ended that asked for its repetition.
pub(super) async fn go_on(
    session: &Session,
    pending: &Mutex<Option<Pending>>,
    state: &str,
    responses: Option<InputResponses>,
    context: &RequestContext<RoleServer>,
) -> Result<Step, Fault> {
    let known = pending.lock().take_if(|pending| pending.state == state);
    let Some(Pending { mut outcome, .. }) = known.filter(|pending| is_held(session, &pending.outcome)) else {
        return Err(Fault::Value(
            "The evaluation that this input was asked for is no longer held. Evaluate the code again.".to_owned(),
        ));
    };
    let response = responses.and_then(|mut responses| responses.remove(QUESTION));
    if let Some(result) = response.and_then(|response| serde_json::from_value(response).ok()) {
        match follow(session, outcome, &result, context).await? {
            ControlFlow::Continue(next) => outcome = next,
            ControlFlow::Break(last) => return Ok(Step::Answer(last.into())),
        }
    }
    settle(session, pending, outcome, context).await
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
    let restarts = error.restarts.iter().zip(1..);
    let restarts = restarts.map(|(restart, number)| format!("{number}. {} - {}", restart.name, restart.description));
    let restarts = EnumSchema::builder(restarts.collect()).title("Restart").build();
    let values = StringSchema::new()
        .title("Values")
        .description("Lisp expressions for the restart's arguments, if it takes any: `41`, or `1 (list 2)`.");
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

/// Asks the client. The inner error says why it could not.
async fn request(
    session: &Session,
    question: ElicitRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<Result<ElicitResult, String>, Fault> {
    let request = ServerRequest::ElicitRequest(ElicitRequest::new(question));
    // The hold ends then, whatever the person does.
    let options = PeerRequestOptions::with_timeout(session.limits().hold);
    let handle = match context.peer.send_cancellable_request(request, options).await {
        Ok(handle) => handle,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let id = handle.id.clone();
    let _asking = session.asking();
    tokio::select! {
        response = handle.await_response() => Ok(match response {
            Ok(ClientResult::ElicitResult(result)) => Ok(result),
            Ok(_) => Err("the client's answer is none to this question".to_owned()),
            Err(error) => Err(error.to_string()),
        }),
        () = context.ct.cancelled() => {
            let cancelled = CancelledNotificationParam::new(Some(id), Some("the evaluation was cancelled".to_owned()));
            let _ = context.peer.notify_cancelled(cancelled).await;
            session.abort_held(|_| ());
            Err(Fault::Protocol(rmcp::ErrorData::internal_error("cancelled", None)))
        }
    }
}

fn choice(result: &ElicitResult) -> Option<Choice> {
    if result.action != ElicitationAction::Accept {
        return Some(Choice::Decline);
    }
    let field = |name| result.content.as_ref().and_then(|content| content.get(name)?.as_str());
    let number = field("restart")?.split('.').next()?.trim().parse().ok()?;
    Some(Choice::Restart { number, values: field("values").unwrap_or_default().to_owned() })
}

/// Does what the person chose with the held evaluation that has this outcome. It continues with what that came to, or
/// breaks with what is to be answered.
async fn follow(
    session: &Session,
    mut before: Outcome,
    result: &ElicitResult,
    context: &RequestContext<RoleServer>,
) -> Result<ControlFlow<Outcome, Outcome>, Fault> {
    let kind = before.result.as_ref().err().map_or_else(String::new, |error| error.kind.clone());
    match choice(result) {
        None => {
            // Not asked again: the same answer would come.
            before.notices.push("The client's answer names no restart.".to_owned());
            Ok(ControlFlow::Break(before))
        }
        Some(Choice::Decline) => {
            let (answer, reply) = oneshot::channel();
            let job = session.abort_held(move |result| drop(answer.send(result)));
            let said = match wait(context, reply, || session.cancel(job)).await? {
                Ok(()) => "The user chose no restart: the evaluation was aborted.".to_owned(),
                Err(error) => format!("The user chose no restart. {error}"),
            };
            before.notices.push(said);
            Ok(ControlFlow::Break(Outcome { held: false, ..before }))
        }
        Some(Choice::Restart { number, values }) => {
            let name = before.result.as_ref().err().and_then(|error| {
                let index = usize::try_from(number).ok()?.checked_sub(1)?;
                Some(error.restarts.get(index)?.name.clone())
            });
            let (answer, reply) = oneshot::channel();
            let job = session.invoke_restart(&RestartDesignator::Number(number), &values, move |outcome| {
                drop(answer.send(outcome));
            });
            let mut after = match wait(context, reply, || session.cancel(job)).await? {
                Ok(Some(outcome)) => outcome,
                Ok(None) => {
                    let name = name.unwrap_or_default();
                    before.notices.push(format!("The user chose {number}. {name}: the evaluation was aborted."));
                    return Ok(ControlFlow::Break(Outcome { held: false, ..before }));
                }
                Err(error) => {
                    before.held &= error != HoldError::NothingHeld;
                    before.notices.push(format!("The user chose restart {number}. {error}"));
                    return Ok(ControlFlow::Break(before));
                }
            };
            if is_held(session, &before) {
                // The values failed, or the restart returned: the question is still the same.
                if let Err(error) = after.result {
                    after.notices.push(format!("What failed is {}: {}", error.kind, error.message.text));
                }
                after.result = before.result.clone();
                after.held = true;
            } else {
                let name = name.unwrap_or_default();
                after.notices.push(format!("After {kind} the evaluation went on as the user chose: {number}. {name}."));
            }
            Ok(ControlFlow::Continue(before.followed_by(after)))
        }
    }
}
