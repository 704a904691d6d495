//! The lines (or frames) that go to the client (or the supervisor): written at once when it reads, kept for it when it
//! does not.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::pipe::Pipe;

/// Whole lines, in order.
#[derive(Debug)]
pub(super) struct Output {
    pipe: Pipe,
    /// Lines come from Lisp's threads, too.
    runtime: Handle,
    waiting: Mutex<Waiting>,
    /// How many bytes wait for the client to read.
    backlog: watch::Sender<usize>,
    /// The client has closed its end.
    gone: Notify,
}

/// What the client has not taken yet.
#[derive(Debug, Default)]
struct Waiting {
    bytes: Vec<u8>,
    /// A task writes what came before; nothing may overtake it.
    draining: bool,
    broken: bool,
}

impl Output {
    pub(super) fn new(pipe: Pipe) -> Self {
        let (backlog, _) = watch::channel(0);
        Self { pipe, runtime: Handle::current(), waiting: Mutex::default(), backlog, gone: Notify::new() }
    }

    /// Sends a line, its newline included. Never waits.
    pub(super) fn put(self: &Arc<Self>, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        if waiting.broken {
            return;
        }
        let written = if waiting.draining {
            0
        } else {
            match self.pipe.try_write(line) {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => return self.broke(&mut waiting, &error),
            }
        };
        let rest = &line[written..];
        if !rest.is_empty() {
            waiting.bytes.extend_from_slice(rest);
            self.backlog.send_modify(|backlog| *backlog += rest.len());
            if !std::mem::replace(&mut waiting.draining, true) {
                self.runtime.spawn(self.clone().drain());
            }
        }
    }

    /// Waits until no more than `bytes` wait for the client.
    pub(super) async fn drained_to(&self, bytes: usize) {
        // The sender is ours, so it is there.
        let _ = self.backlog.subscribe().wait_for(|backlog| *backlog <= bytes).await;
    }

    /// True when no more than `bytes` wait for the client.
    pub(super) fn is_drained_to(&self, bytes: usize) -> bool {
        *self.backlog.borrow() <= bytes
    }

    /// Waits until the client has closed its end.
    pub(super) async fn gone(&self) {
        self.gone.notified().await;
    }

    async fn drain(self: Arc<Self>) {
        loop {
            let bytes = {
                let mut waiting = self.waiting.lock();
                waiting.draining = !waiting.bytes.is_empty();
                std::mem::take(&mut waiting.bytes)
            };
            if bytes.is_empty() {
                return;
            }
            let mut done = 0;
            while done < bytes.len() {
                match self.pipe.write(&bytes[done..]).await {
                    Ok(written) => {
                        done += written;
                        self.backlog.send_modify(|backlog| *backlog -= written);
                    }
                    Err(error) => return self.broke(&mut self.waiting.lock(), &error),
                }
            }
        }
    }

    fn broke(&self, waiting: &mut Waiting, error: &io::Error) {
        tracing::debug!(%error, "the client no longer reads");
        *waiting = Waiting { broken: true, ..Waiting::default() };
        self.backlog.send_replace(0);
        self.gone.notify_one();
    }
}
