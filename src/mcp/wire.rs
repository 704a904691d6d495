//! rmcp's transport over the client's stdin and stdout.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, ready};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::{ClientJsonRpcMessage, ClientNotification, ErrorCode, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;

use super::incoming::{Incoming, Refusal, decode};
use super::lines::{Line, Lines, MAX_LINE};
use super::link::{Batch, Link};
use super::output::Output;
use super::pipe::Pipe;
use super::stdio::Stdio;

/// With this much unread by the client, no more of its requests are taken.
const MAX_BACKLOG: usize = 64 << 20;

/// The wire to the client. What comes in is checked before rmcp sees it: rmcp drops what it cannot read, and ends
/// when a notification comes before the opening request.
#[derive(Debug)]
pub(super) struct Wire {
    lines: Lines,
    link: Arc<Link>,
    /// The rest of a batch.
    ready: VecDeque<ClientJsonRpcMessage>,
}

impl Wire {
    /// Opens both directions.
    pub(super) fn open(stdio: Stdio) -> io::Result<(Self, Arc<Link>)> {
        let link = Arc::new(Link::new(Output::new(Pipe::writer(stdio.output)?)));
        let lines = Lines::new(Pipe::reader(stdio.input)?);
        Ok((Self { lines, link: link.clone(), ready: VecDeque::new() }, link))
    }

    /// The id of the first request that comes; `None` when none does.
    pub(super) async fn first_request(&mut self) -> Option<RequestId> {
        loop {
            if let JsonRpcMessage::Request(request) = self.receive().await? {
                return Some(request.id);
            }
        }
    }

    fn take(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Batch(messages) => {
                let batch = Link::batch();
                for message in messages {
                    self.take_one(message, Some(&batch));
                }
                self.link.batch_read(&batch);
            }
            one => self.take_one(one, None),
        }
    }

    fn take_one(&mut self, incoming: Incoming, batch: Option<&Arc<Mutex<Batch>>>) {
        match incoming {
            Incoming::Message(message) => {
                if self.admit(&message, batch) {
                    self.ready.push_back(*message);
                }
            }
            Incoming::Refused(refusal) => self.link.refuse(&refusal, batch),
            Incoming::Batch(_) | Incoming::Nothing => {}
        }
    }

    fn admit(&self, message: &ClientJsonRpcMessage, batch: Option<&Arc<Mutex<Batch>>>) -> bool {
        match message {
            JsonRpcMessage::Request(request) => {
                let admitted = self.link.expect(&request.id, batch);
                if !admitted {
                    let id = Some(request.id.clone().into_json_value());
                    let reason = "not a valid request: another one of this id is not answered yet";
                    self.link.refuse(&Refusal::new(id, ErrorCode::INVALID_REQUEST, reason), batch);
                }
                admitted
            }
            JsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) = &notification.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    self.link.forget(id);
                }
                self.link.is_open()
            }
            JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_) => self.link.is_open(),
        }
    }
}

impl Transport<RoleServer> for Wire {
    type Error = Infallible;

    /// The line is written here and now; the future has nothing left to do.
    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Infallible>> + Send + 'static {
        match &message {
            JsonRpcMessage::Response(response) => self.link.answer(&response.id, &message),
            JsonRpcMessage::Error(error) if error.id.is_some() => {
                error.id.iter().for_each(|id| self.link.answer(id, &message));
            }
            _ => self.link.send(&message),
        }
        ready(Ok(()))
    }

    /// Nothing is lost when the future is dropped, which rmcp does whenever something else happens first.
    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let link = self.link.clone();
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Some(message);
            }
            let line = tokio::select! {
                biased;
                () = link.stop.notified() => return None,
                line = async {
                    if !link.output.is_drained_to(MAX_BACKLOG) {
                        link.output.drained_to(MAX_BACKLOG).await;
                    }
                    self.lines.next().await
                } => line,
            };
            match line {
                Ok(Line::Text(line)) => {
                    let incoming = decode(self.lines.text(line));
                    self.take(incoming);
                }
                Ok(Line::TooLong(id)) => {
                    let reason = format!("the message is longer than {} MiB", MAX_LINE >> 20);
                    link.refuse(&Refusal::new(id, ErrorCode::INVALID_REQUEST, reason), None);
                }
                Ok(Line::End) => break,
                Err(error) => {
                    tracing::debug!(%error, "the client's input broke off");
                    break;
                }
            }
        }
        link.input_ended.notify_one();
        None
    }

    async fn close(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}
