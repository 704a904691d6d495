//! Serving clients on streams of their own: those that join a server that has no supervisor, and those of a program that
//! embeds the image.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::Offer;
use super::conversation::Conversation;
use super::server::SingleClient;
use super::tools::{Registry, ToolContext, ToolSet};
use crate::Lisp;
use crate::os::poll_set::PollSet;
use crate::rpc::attach::{Listener, MAX_GUESTS};
use crate::rpc::inflight::Inflight;
use crate::rpc::output::{Output, Reader};
use crate::rpc::stream;
use crate::rpc::waker::Waker;

/// The two directions of a connection to an MCP client: what it writes and what it reads.
#[derive(Debug)]
pub struct Stream {
    input: OwnedFd,
    /// `None` when that is the same.
    output: Option<OwnedFd>,
}

impl Stream {
    /// A client that writes to the other end of `input` and reads from that of `output`: pipes, sockets, anything that
    /// can be waited for.
    pub fn new(input: impl Into<OwnedFd>, output: impl Into<OwnedFd>) -> Self {
        Self { input: input.into(), output: Some(output.into()) }
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self { input: stream.into(), output: None }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self { input: stream.into(), output: None }
    }
}

impl Stream {
    /// What is read from, what is written to, and what wakes the thread that does both.
    fn open(self) -> io::Result<(OwnedFd, Arc<Output>, Arc<Waker>)> {
        let output = self.output.map_or_else(|| self.input.try_clone(), Ok)?;
        let waker = Arc::new(Waker::new()?);
        Ok((self.input, Arc::new(Output::new(output, Reader::Client, waker.clone())?), waker))
    }
}

/// A client that is being served, by [`spawn`]. Dropping this changes nothing.
#[derive(Debug)]
pub struct Served {
    over: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: JoinHandle<io::Result<()>>,
}

impl Served {
    /// Waits until the client has closed its end.
    ///
    /// # Errors
    /// Why it could not be heard any more.
    pub fn wait(self) -> io::Result<()> {
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that served the client panicked")))
    }

    /// Serves the client no longer: what it has asked for is cancelled.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn stop(self) -> io::Result<()> {
        self.over.store(true, Ordering::Release);
        self.waker.wake();
        self.wait()
    }

    /// True when the client is served no more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }
}

/// The tools of the clients of this program's image.
static OFFERED: LazyLock<Registry> = LazyLock::new(|| Registry::changing(ToolSet::default().embedded()));

/// Chooses the tools that the MCP clients of this program's image have, those that are connected and those to come: `all`,
/// `core`, or names with commas between them, as `list-definitions,describe-symbol`. reset-session and checkpoint are never among
/// them. Connected clients are told (`notifications/tools/list_changed`), and calls of other tools are refused at once.
///
/// This is no protection from a client that has a tool which evaluates.
///
/// # Errors
/// A sentence that names an unknown tool and all that there are.
pub fn set_tools(tools: &str) -> Result<(), String> {
    OFFERED.set(ToolSet::parse(tools)?.embedded());
    Ok(())
}

/// Serves an MCP client on this program's own image: what it looks at and repairs is the application that runs. It has
/// all tools of the server except reset-session and checkpoint, which would remove the program's own definitions
/// ([`set_tools`] chooses some),
/// and a connection of its own ([`Session::connect`](crate::Session::connect)): its error state, held evaluation and
/// `*package*` concern nobody else, and the program's calls go on beside its evaluations.
///
/// Whoever can write to `stream` can do what this process can: make sure of who that is.
///
/// Returns at once; a thread of its own serves the client, until it closes its end.
///
/// ```no_run
/// let lisp = sbcl::Lisp::boot()?;
/// let socket = std::os::unix::net::UnixListener::bind("agent.socket")?;
/// for stream in socket.incoming() {
///     sbcl::mcp::spawn(&lisp, stream?)?;
/// }
/// # Ok::<(), sbcl::Error>(())
/// ```
///
/// # Errors
/// When the process has no descriptors or threads left.
pub fn spawn(lisp: &Lisp, stream: impl Into<Stream>) -> io::Result<Served> {
    let (input, output, waker) = stream.into().open()?;
    let session = lisp.session().connect();
    let offer = Offer { structured: false, registry: OFFERED.clone(), joinable: false };
    let tools = ToolContext::new(session, Inflight::new(output.clone()), None, None, offer);
    let guest = SingleClient::new(Conversation::new(tools));
    let over = Arc::new(AtomicBool::new(false));
    let (is_over, waking) = (over.clone(), waker.clone());
    let serve = move || serve(input, &output, &waking, &guest, || is_over.load(Ordering::Acquire));
    let thread = std::thread::Builder::new().name("sbcl-mcp-client".to_owned()).spawn(serve)?;
    Ok(Served { over, waker, thread })
}

fn serve(
    input: OwnedFd,
    output: &Arc<Output>,
    waker: &Waker,
    guest: &SingleClient,
    is_over: impl Fn() -> bool,
) -> io::Result<()> {
    let served = stream::serve(input, output, waker, guest, is_over);
    guest.conversation.end();
    served
}

/// The conversations with those that have joined by the socket.
#[derive(Debug, Clone, Default)]
pub(super) struct Guests(Arc<Mutex<Vec<Arc<Conversation>>>>);

impl Guests {
    /// Gives the last answer to whatever still waits.
    pub(super) fn abandon(&self, reason: &'static str) {
        let conversations = self.0.lock().clone();
        conversations.iter().for_each(|conversation| conversation.inflight().abandon(reason));
    }

    /// Serves whoever joins `main`'s session, each on a thread of its own.
    pub(super) fn accept(self, listener: Arc<Listener>, main: Arc<Conversation>) -> io::Result<()> {
        let count = Arc::new(AtomicUsize::new(0));
        let accept = move || {
            let wait = || {
                let mut set = PollSet::new();
                set.read((), &*listener);
                set.wait(None)
            };
            while wait().is_ok() {
                let Some(stream) = listener.accept(count.load(Ordering::Acquire) >= MAX_GUESTS) else { continue };
                let (guests, main, left) = (self.clone(), main.clone(), count.clone());
                count.fetch_add(1, Ordering::AcqRel);
                let join = move || {
                    if let Err(error) = guests.join(stream, &main) {
                        tracing::debug!(%error, "a client that had joined is lost");
                    }
                    left.fetch_sub(1, Ordering::AcqRel);
                };
                if std::thread::Builder::new().name("sbcl-mcp-client".to_owned()).spawn(join).is_err() {
                    count.fetch_sub(1, Ordering::AcqRel);
                }
            }
        };
        std::thread::Builder::new().name("sbcl-mcp-accept".to_owned()).spawn(accept).map(drop)
    }

    /// Serves a client that has joined.
    fn join(&self, stream: UnixStream, main: &Conversation) -> io::Result<()> {
        let (input, output, waker) = Stream::from(stream).open()?;
        let session = main.tools().session().connect();
        let conversation = main.beside(main.tools().beside(session, Inflight::new(output.clone())));
        self.0.lock().push(conversation.clone());
        let served = serve(input, &output, &waker, &SingleClient::new(conversation.clone()), || false);
        self.0.lock().retain(|other| !Arc::ptr_eq(other, &conversation));
        served
    }
}
