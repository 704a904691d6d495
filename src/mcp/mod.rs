//! The MCP server: the session's tools over the client's stdin and stdout.

mod event_loop;
mod incoming;
mod lines;
mod link;
mod output;
mod pipe;
mod server;
mod signals;
pub(crate) mod stdio;
mod structured;
mod tools;
mod unwind;
mod wire;
mod worker;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use rmcp::ServiceExt;
use rmcp::service::ServerInitializeError;
use tokio::time::timeout;

use crate::Session;
use crate::handover::board::Board;
use crate::handover::frame::Kind;
use event_loop::EventLoop;
use incoming::Refusal;
use link::Link;
use server::Server;
use signals::Signals;
use stdio::Stdio;
use tools::Desk;
use wire::Wire;

/// How long what was asked before the end may still take. The process is gone within a second of the end.
const GRACE: Duration = Duration::from_millis(700);
/// How long the client may take to read the last answers.
const FAREWELL: Duration = Duration::from_millis(150);
/// How long a client may take to say its first word when all that waits for it is bad news.
const BAD_NEWS: Duration = Duration::from_secs(2);

/// Serves until the client closes its end or a signal comes. `structured`: results have structured content, too.
///
/// Returns the exit status: 0 at the end of input, 128 + the signal's number for SIGTERM, SIGINT and SIGHUP.
pub(crate) fn serve(stdio: Stdio, session: Session, structured: bool) -> io::Result<i32> {
    let event_loop = EventLoop::new()?;
    let (signals, wire, link) = event_loop.prepare(async {
        let signals = Signals::new()?;
        let (wire, link) = Wire::open(stdio, false, event_loop.clone())?;
        io::Result::Ok((signals, wire, link))
    })?;
    let desk = Desk::new(session.clone(), link.clone(), structured);
    event_loop.serve(&session, converse(signals, wire, link, desk))
}

/// Serves a supervisor's client, going on where another worker stopped. Returns as [`serve`] does.
pub(crate) fn serve_supervised(stdio: Stdio, session: Session, board: Board, structured: bool) -> io::Result<i32> {
    let event_loop = EventLoop::new()?;
    let (signals, wire, link, worker) = event_loop.prepare(async {
        let signals = Signals::new()?;
        let (mut wire, link) = Wire::open(stdio, true, event_loop.clone())?;
        let handover = wire.take_over(Some(board)).await?;
        let worker = worker::take_over(&session, handover, link.clone(), board);
        io::Result::Ok((signals, wire, link, worker))
    })?;
    let desk = Desk::new(session.clone(), link.clone(), structured).of_worker(worker);
    event_loop.serve(&session, converse(signals, wire, link, desk))
}

async fn converse(mut signals: Signals, wire: Wire, link: Arc<Link>, desk: Desk) -> io::Result<i32> {
    let mut service = pin!(serve_over(Server::new(desk), wire, || link.open()));
    let status = tokio::select! {
        // The end of input ends it as well, once everything is answered.
        status = &mut service => return finish(&link, status).await,
        signal = signals.next() => 128 + signal,
        () = link.input_ended.notified() => 0,
        () = link.output.gone() => return Ok(0),
    };
    if link.is_orphaned() {
        return Ok(status);
    }
    link.stop.notify_one();
    let _ = timeout(GRACE, service).await;
    finish(&link, status).await
}

/// Tells the client, when it asks for the first time, why there is no server.
pub(crate) fn refuse(stdio: Stdio, reason: &str, supervised: bool) -> io::Result<()> {
    let event_loop = EventLoop::new()?;
    event_loop.prepare(async {
        let (mut wire, link) = Wire::open(stdio, supervised, event_loop.clone())?;
        if supervised {
            wire.take_over(None).await?;
        }
        if let Ok(Some(id)) = timeout(BAD_NEWS, wire.first_request()).await {
            let code = rmcp::model::ErrorCode::INTERNAL_ERROR;
            link.answer(&id, &Refusal::new(Some(id.clone().into_json_value()), code, reason));
        }
        finish(&link, 1).await.map(|_| ())
    })
}

/// Runs rmcp's loop to its end; the status is 0 unless it broke.
async fn serve_over(server: Server, wire: Wire, opened: impl FnOnce()) -> i32 {
    match server.serve(wire).await {
        Ok(running) => {
            opened();
            running.waiting().await.map_or_else(broken, |_| 0)
        }
        Err(ServerInitializeError::ConnectionClosed(_)) => 0,
        Err(error) => broken(error),
    }
}

fn broken(error: impl std::fmt::Display) -> i32 {
    tracing::error!(%error, "the protocol loop broke");
    1
}

async fn finish(link: &Link, status: i32) -> io::Result<i32> {
    link.abandon();
    link.tell(Kind::Bye, u64::try_from(status).unwrap_or(1), &());
    let _ = timeout(FAREWELL, link.output.drained_to(0)).await;
    Ok(status)
}
