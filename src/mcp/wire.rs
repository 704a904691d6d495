//! rmcp's transport over the client's stdin and stdout.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, ready};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rmcp::RoleServer;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ClientRequest, ErrorCode, GetExtensions, JsonRpcMessage, RequestId,
};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;

use super::event_loop::EventLoop;
use super::incoming::{Incoming, Refusal, decode};
use super::lines::{Line, Lines, MAX_LINE};
use super::link::{Batch, Link};
use super::output::Output;
use super::pipe::Pipe;
use super::stdio::Stdio;
use crate::handover::board::{Board, Slot};
use crate::handover::{self, AWAKE, Handover};

/// With this much unread by the client, no more of its requests are taken.
const MAX_BACKLOG: usize = 64 << 20;

/// A message's place in a batch.
type Place<'a> = (usize, &'a Arc<Mutex<Batch>>);

/// The wire to the client. What comes in is checked before rmcp sees it: rmcp drops what it cannot read, and ends
/// when a notification comes before the opening request.
pub(super) struct Wire {
    lines: Lines,
    link: Arc<Link>,
    /// The rest of a batch.
    ready: VecDeque<ClientJsonRpcMessage>,
    /// The numbers of the lines that come next, and of those after them.
    resent: VecDeque<u64>,
    next: u64,
    event_loop: Arc<EventLoop>,
    /// Where a supervisor sees which line was read last.
    board: Option<Board>,
}

/// The least number for the job that a request asks for, among the request's extensions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket(pub(super) u64);

/// The request that a notification is about, among the notification's extensions.
#[derive(Debug, Clone)]
pub(super) struct Concerning(pub(super) RequestId);

impl Wire {
    /// Opens both directions, on `event_loop`. `supervised`: a supervisor is between this end and the client.
    pub(super) fn open(stdio: Stdio, supervised: bool, event_loop: Arc<EventLoop>) -> io::Result<(Self, Arc<Link>)> {
        let link = Arc::new(Link::new(Output::new(Pipe::writer(stdio.output)?), supervised));
        let lines = Lines::new(Pipe::reader(stdio.input)?);
        let (ready, resent) = (VecDeque::new(), VecDeque::new());
        let wire = Self { lines, link: link.clone(), ready, resent, next: 1, event_loop, board: None };
        Ok((wire, link))
    }

    /// Reads where the last worker stopped, and goes on there.
    pub(super) async fn take_over(&mut self, board: Option<Board>) -> io::Result<Handover> {
        self.board = board;
        let Line::Text(line) = self.lines.next(Duration::ZERO).await? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let handover: Handover = serde_json::from_slice(self.lines.text(line))?;
        self.resent = handover.resent.iter().copied().collect();
        self.next = handover.next;
        for line in &handover.handshake {
            if let Incoming::Message(message) = decode(line.as_bytes()) {
                if let JsonRpcMessage::Request(request) = &*message {
                    self.link.expect_again(&request.id);
                }
                self.ready.push_back(*message);
            }
        }
        Ok(handover)
    }

    /// The number of the line that was just read.
    fn number(&mut self) -> u64 {
        let number = self.resent.pop_front().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        if let Some(board) = self.board {
            board.set(Slot::Heard, number);
        }
        number
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
        let line = self.number();
        match incoming {
            Incoming::Batch(messages) => {
                let batch = Link::batch(line);
                for (part, message) in messages.into_iter().enumerate() {
                    self.take_one(message, line, Some((part, &batch)));
                }
                self.link.batch_read(&batch);
            }
            one => self.take_one(one, line, None),
        }
    }

    fn take_one(&mut self, incoming: Incoming, line: u64, place: Option<Place<'_>>) {
        match incoming {
            Incoming::Message(mut message) => {
                if let JsonRpcMessage::Request(request) = &mut *message
                    && matches!(request.request, ClientRequest::CallToolRequest(_))
                {
                    let ticket = handover::job_number(line, place.map_or(0, |(part, _)| part));
                    request.request.extensions_mut().insert(Ticket(ticket));
                }
                if self.admit(&message, line, place.map(|(_, batch)| batch)) {
                    self.ready.push_back(*message);
                }
            }
            Incoming::Refused(refusal) => self.link.refuse(&refusal, line, place.map(|(_, batch)| batch)),
            Incoming::Batch(_) | Incoming::Nothing => {
                if place.is_none() {
                    self.link.done(line);
                }
            }
        }
    }

    fn admit(&self, message: &ClientJsonRpcMessage, line: u64, batch: Option<&Arc<Mutex<Batch>>>) -> bool {
        let admitted = self.looks_right(message, line, batch);
        let opens = match message {
            JsonRpcMessage::Request(request) => matches!(request.request, ClientRequest::InitializeRequest(_)),
            JsonRpcMessage::Notification(notification) => {
                matches!(notification.notification, ClientNotification::InitializedNotification(_))
            }
            _ => false,
        };
        if admitted && opens {
            self.link.keep(line, message);
        }
        if batch.is_none() && !matches!(message, JsonRpcMessage::Request(_)) {
            self.link.done(line);
        }
        admitted
    }

    fn looks_right(&self, message: &ClientJsonRpcMessage, line: u64, batch: Option<&Arc<Mutex<Batch>>>) -> bool {
        match message {
            JsonRpcMessage::Request(request) => {
                let admitted = self.link.expect(&request.id, line, batch);
                if !admitted {
                    let id = Some(request.id.clone().into_json_value());
                    let reason = "not a valid request: another one of this id is not answered yet";
                    self.link.refuse(&Refusal::new(id, ErrorCode::INVALID_REQUEST, reason), line, batch);
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
            JsonRpcMessage::Notification(notification) => match notification.notification.extensions().get() {
                Some(Concerning(id)) => self.link.send_before_answer(id, &message),
                None => self.link.send(&message),
            },
            _ => self.link.send(&message),
        }
        ready(Ok(()))
    }

    /// Nothing is lost when the future is dropped, which rmcp does whenever something else happens first.
    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        let link = self.link.clone();
        loop {
            if link.is_ahead() {
                tokio::select! {
                    biased;
                    () = link.stop.notified() => return None,
                    () = link.caught_up() => {}
                }
            }
            if let Some(message) = self.ready.pop_front() {
                return Some(message);
            }
            // While something is to be answered, that comes first.
            let awake = if link.is_idle() { AWAKE } else { Duration::ZERO };
            let begin = Instant::now();
            let line = tokio::select! {
                biased;
                () = link.stop.notified() => return None,
                line = async {
                    if !link.output.is_drained_to(MAX_BACKLOG) {
                        link.output.drained_to(MAX_BACKLOG).await;
                    }
                    self.lines.next(awake).await
                } => line,
            };
            if begin.elapsed() < awake {
                self.event_loop.stay_awake();
            }
            match line {
                Ok(Line::Text(line)) => {
                    let incoming = decode(self.lines.text(line));
                    self.take(incoming);
                }
                Ok(Line::TooLong(id)) => {
                    let reason = format!("the message is longer than {} MiB", MAX_LINE >> 20);
                    let line = self.number();
                    link.refuse(&Refusal::new(id, ErrorCode::INVALID_REQUEST, reason), line, None);
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
