//! Clients on streams of their own: clients that attach to a server without a supervisor, and clients of a program that
//! embeds the image.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::ToolOptions;
use super::conversation::Conversation;
use super::server::SingleClient;
use super::tools::{Registry, ToolContext, ToolSet};
use crate::Lisp;
use crate::os::poll_set::PollSet;
use crate::rpc::attach::{Listener, MAX_ATTACHED};
use crate::rpc::inflight::Inflight;
use crate::rpc::output::{Output, Recipient};
use crate::rpc::stream;
use crate::rpc::waker::Waker;

/// A connection to an MCP client.
#[derive(Debug)]
pub struct Stream {
    input: OwnedFd,
    /// `None` if `input` carries both directions.
    output: Option<OwnedFd>,
}

impl Stream {
    /// Creates the connection to a client that writes to the other end of `input` and reads from the other end of
    /// `output`. `input` and `output` may be pipes, sockets, or anything else that can be polled.
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
    /// Returns the input, the output, and the waker of the thread that serves the client.
    fn open(self) -> io::Result<(OwnedFd, Arc<Output>, Arc<Waker>)> {
        let output = self.output.map_or_else(|| self.input.try_clone(), Ok)?;
        let waker = Arc::new(Waker::new()?);
        Ok((self.input, Arc::new(Output::new(output, Recipient::Client, waker.clone())?), waker))
    }
}

/// A client that [`spawn`] serves. Dropping this value has no effect on the client.
#[derive(Debug)]
pub struct Served {
    stop_requested: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: JoinHandle<io::Result<()>>,
}

impl Served {
    /// Waits until the client disconnects.
    ///
    /// # Errors
    /// Returns an error if reading from the client failed, or if the thread that served the client panicked.
    pub fn wait(self) -> io::Result<()> {
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that served the client panicked")))
    }

    /// Stops serving the client and cancels its requests.
    ///
    /// # Errors
    /// Returns an error if reading from the client failed, or if the thread that served the client panicked.
    pub fn stop(self) -> io::Result<()> {
        self.stop_requested.store(true, Ordering::Release);
        self.waker.wake();
        self.wait()
    }

    /// Returns true once the client is no longer served.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }
}

/// The tools that this program offers to clients of its image.
static REGISTRY: LazyLock<Registry> = LazyLock::new(|| Registry::changing(ToolSet::default().embedded()));

/// Chooses the tools for present and future MCP clients of this program's image: `all`, `core`, or a comma-separated
/// list of names, for example `list-definitions,describe-symbol`. The tools reset-session and checkpoint are never
/// offered. Connected clients that began with a handshake are notified (`notifications/tools/list_changed`). Calls of
/// tools that are not chosen are refused at once.
///
/// The choice does not restrict what code can do: a client with any tool that evaluates code has full access to the image.
///
/// # Errors
/// Returns a message that names the unknown tool and all known tools.
pub fn set_tools(tools: &str) -> Result<(), String> {
    REGISTRY.set(ToolSet::parse(tools)?.embedded());
    Ok(())
}

/// Serves an MCP client on this program's own image, so that the client can inspect and repair the running
/// application.
///
/// The client has all tools of the server ([`set_tools`] chooses some) except reset-session and checkpoint. run-tests lacks
/// the arguments `fresh` and `suspects`, which start the server's program. The client has a connection of its own
/// ([`Session::connect`](crate::Session::connect)): its error state, held evaluation and `*package*` affect no other client.
/// The program's calls into Lisp run concurrently with the client's evaluations.
///
/// Anybody who can write to `stream` has all rights of this process, so restrict access to the stream.
///
/// Returns at once. A separate thread serves the client until it disconnects.
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
/// Returns an error if the process has no descriptors or threads left.
pub fn spawn(lisp: &Lisp, stream: impl Into<Stream>) -> io::Result<Served> {
    let (input, output, waker) = stream.into().open()?;
    let session = lisp.session().connect();
    let options = ToolOptions { structured: false, registry: REGISTRY.clone(), attachable: false };
    let tools = ToolContext::new(session, Inflight::new(output.clone()), None, None, options);
    let client = SingleClient::new(Conversation::new(tools));
    let stop_requested = Arc::new(AtomicBool::new(false));
    let (is_over, waking) = (stop_requested.clone(), waker.clone());
    let serve = move || serve(input, &output, &waking, &client, || is_over.load(Ordering::Acquire));
    let thread = std::thread::Builder::new().name("sbcl-mcp-client".to_owned()).spawn(serve)?;
    Ok(Served { stop_requested, waker, thread })
}

fn serve(
    input: OwnedFd,
    output: &Arc<Output>,
    waker: &Waker,
    client: &SingleClient,
    is_over: impl Fn() -> bool,
) -> io::Result<()> {
    let served = stream::serve(input, output, waker, client, is_over);
    client.conversation.disconnect();
    served
}

/// The conversations with the clients attached through the socket.
#[derive(Debug, Clone, Default)]
pub(super) struct AttachedClients(Arc<Mutex<Vec<Arc<Conversation>>>>);

impl AttachedClients {
    /// Returns the conversations with all attached clients.
    pub(super) fn conversations(&self) -> Vec<Arc<Conversation>> {
        self.0.lock().clone()
    }

    /// Starts a thread that accepts clients from `listener` and attaches them to the session of `main`. Each client is
    /// served on a separate thread.
    pub(super) fn accept(self, listener: Arc<Listener>, main: Arc<Conversation>) -> io::Result<()> {
        let count = Arc::new(AtomicUsize::new(0));
        let accept = move || {
            let wait = || {
                let mut set = PollSet::new();
                set.add_read((), &*listener);
                set.wait(None)
            };
            while wait().is_ok() {
                let Some(stream) = listener.accept(count.load(Ordering::Acquire) >= MAX_ATTACHED) else {
                    listener.time_until_retry().into_iter().for_each(std::thread::sleep);
                    continue;
                };
                let (attached, main, open) = (self.clone(), main.clone(), count.clone());
                count.fetch_add(1, Ordering::AcqRel);
                let serve = move || {
                    if let Err(error) = attached.attach(stream, &main) {
                        tracing::debug!(%error, "the connection of an attached client failed");
                    }
                    open.fetch_sub(1, Ordering::AcqRel);
                };
                if std::thread::Builder::new().name("sbcl-mcp-client".to_owned()).spawn(serve).is_err() {
                    count.fetch_sub(1, Ordering::AcqRel);
                }
            }
        };
        std::thread::Builder::new().name("sbcl-mcp-accept".to_owned()).spawn(accept).map(drop)
    }

    /// Serves one attached client until it disconnects.
    fn attach(&self, stream: UnixStream, main: &Conversation) -> io::Result<()> {
        let (input, output, waker) = Stream::from(stream).open()?;
        let session = main.tools().session().connect();
        let conversation = main.for_attached(main.tools().for_attached(session, Inflight::new(output.clone())));
        self.0.lock().push(conversation.clone());
        let served = serve(input, &output, &waker, &SingleClient::new(conversation.clone()), || false);
        self.0.lock().retain(|other| !Arc::ptr_eq(other, &conversation));
        served
    }
}
