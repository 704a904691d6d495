//! Attaching to a running server: the directory of sockets (`serve --socket`), the list of running servers, and
//! connecting.
//!
//! A socket carries MCP as stdin and stdout do, with a connection of its own for each client. The directory and the
//! sockets belong to the user alone, and the kernel reports the user of each connection.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde_json::{Value, json};

use crate::rpc::descriptors::to_private_number;

/// Maximum number of attached clients.
pub(crate) const MAX_ATTACHED: usize = 16;
/// The method that lists the clients of a server. Only this program uses the method, which is undocumented.
pub(crate) const STATUS_METHOD: &str = "sbcl-mcp/status";
/// The method that moves a held evaluation from another client to the calling client. Its parameter `id`, the number of the
/// evaluation, is required if several evaluations are held. The result reports the error of the held evaluation.
pub(crate) const ADOPT_HELD_METHOD: &str = "sbcl-mcp/take-over";
/// The method that lists packages. The property `packages` of its result has the names and nicknames of all packages in the
/// image.
pub(crate) const PACKAGES_METHOD: &str = "sbcl-mcp/packages";
/// The notification about actions of other clients. Its parameters are `text` and `held`: the number of an evaluation that
/// another client now holds in the debugger, or null. Clients that have this name among their experimental capabilities
/// get the notification; other clients get the text as part of their next answer.
pub(crate) const NOTICE_METHOD: &str = "sbcl-mcp/notice";
/// The experimental capability of clients that serve a person. The value of its property `name` is the
/// [`Audience`](crate::audience::Audience) of the server's messages.
pub(crate) const AUDIENCE_CAPABILITY: &str = "sbcl-mcp/audience";
/// Number of descriptors that stay free when a client is accepted: the server needs some to start another worker.
const RESERVED_DESCRIPTORS: usize = 16;
/// Time until the next attempt to accept clients after the process or the system had no descriptor left.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for the answer to [`STATUS_METHOD`].
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of characters in a server's name.
const MAX_NAME_CHARS: usize = 64;
/// The end of a socket's file name.
const SOCKET_SUFFIX: &str = ".sock";

/// A running server that accepts clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunningServer {
    /// Name of the server: the name of its persistent session, or else its process id.
    pub(crate) name: String,
    /// Process id.
    pub(crate) pid: u32,
    /// Name of the server's first client, if the client has given a name.
    pub(crate) client: Option<String>,
    /// Names of the attached clients.
    pub(crate) attached: Vec<String>,
    /// Reason why the server did not list its clients.
    pub(crate) refusal: Option<String>,
    /// Path of the socket.
    pub(crate) path: PathBuf,
}

fn io_error(kind: io::ErrorKind, reason: impl Into<String>) -> io::Error {
    io::Error::new(kind, reason.into())
}

/// Returns the path of the directory for sockets, which may not exist yet: `sbcl-mcp` in XDG_RUNTIME_DIR, else a directory
/// of this user in the directory for temporary files.
fn socket_directory() -> PathBuf {
    match std::env::var_os(crate::environment::RUNTIME_DIRECTORY).map(PathBuf::from).filter(|path| path.is_absolute()) {
        Some(runtime) => runtime.join("sbcl-mcp"),
        None => std::env::temp_dir().join(format!("sbcl-mcp-{}", geteuid().as_raw())),
    }
}

/// Returns an error if `directory` does not exist, or if another user could create a socket in it.
fn check_directory(directory: &Path) -> io::Result<()> {
    // Links are not followed: any user may create a link in a directory for temporary files.
    let metadata = std::fs::symlink_metadata(directory)
        .map_err(|error| io_error(error.kind(), format!("{}: {error}", directory.display())))?;
    if metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let reason = format!(
        "{} must be a directory that belongs to this user and that no other user can write to: correct its \
         owner and mode, or set XDG_RUNTIME_DIR to another directory",
        directory.display()
    );
    Err(io_error(io::ErrorKind::PermissionDenied, reason))
}

/// Returns an error if another user could create a socket in the directory for sockets, in which clients then look for no
/// server.
pub(crate) fn check_socket_directory() -> io::Result<()> {
    match check_directory(&socket_directory()) {
        // Without the directory, no server is running.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        checked => checked,
    }
}

/// Returns the path of the socket of the server with this name.
///
/// # Errors
/// Returns an error if the name is not valid. A valid name has 1 to 64 letters, digits, `-`, `_` and `.`, and does not
/// begin with a dot.
pub(crate) fn socket_path(name: &str) -> io::Result<PathBuf> {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || name.chars().count() > MAX_NAME_CHARS || !name.chars().all(fits) {
        let reason = format!(
            "{name:?} cannot be the name of a server to attach to: use 1 to {MAX_NAME_CHARS} letters, digits, -, _ and \
             ., without a leading dot"
        );
        return Err(io_error(io::ErrorKind::InvalidInput, reason));
    }
    Ok(socket_directory().join(format!("{name}{SOCKET_SUFFIX}")))
}

/// Connects to the server with this name, or to the only running server.
///
/// # Errors
/// Returns a message for the user if the name is not valid, if no such server is running, if no name is given and several
/// servers are running, if another user could create a socket in the directory, or if the server cannot be reached.
pub(crate) fn connect(name: Option<&str>) -> io::Result<UnixStream> {
    check_socket_directory().map_err(|error| io_error(error.kind(), format!("cannot attach to a server: {error}")))?;
    let named =
        |running: &[RunningServer]| running.iter().map(|server| server.name.clone()).collect::<Vec<_>>().join(", ");
    let Some(name) = name else {
        return match &running_servers()[..] {
            [] => Err(io_error(
                io::ErrorKind::NotFound,
                "no server to attach to is running: start one with sbcl-mcp serve --socket",
            )),
            [server] => UnixStream::connect(&server.path),
            servers => {
                let reason =
                    format!("several servers are running; name one of them (--attach=NAME): {}", named(servers));
                Err(io_error(io::ErrorKind::InvalidInput, reason))
            }
        };
    };
    UnixStream::connect(socket_path(name)?).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            let running = running_servers();
            let others = if running.is_empty() {
                "no server is running: start one with sbcl-mcp serve --socket, and attach without a name".to_owned()
            } else {
                format!("running: {}", named(&running))
            };
            io_error(io::ErrorKind::NotFound, format!("there is no server {name:?} to attach to; {others}"))
        }
        kind => io_error(kind, format!("cannot attach to the server {name:?}: {error}")),
    })
}

/// Returns the running servers, sorted by name; none if [`check_socket_directory`] fails. Removes sockets of servers that are
/// gone.
pub(crate) fn running_servers() -> Vec<RunningServer> {
    let directory = socket_directory();
    let Ok(entries) = check_directory(&directory).and_then(|()| std::fs::read_dir(&directory)) else {
        return Vec::new();
    };
    let mut running: Vec<_> = entries.flatten().filter_map(|entry| probe_socket(&entry.path())).collect();
    running.sort_by(|one, other| one.name.cmp(&other.name));
    running
}

/// Returns the server that listens on a socket; `None` if no server of this user listens, or if the path is not a socket.
/// Removes the socket of a server that is gone.
fn probe_socket(path: &Path) -> Option<RunningServer> {
    let name = path.file_name()?.to_str()?.strip_suffix(SOCKET_SUFFIX)?;
    if !std::fs::symlink_metadata(path).ok()?.file_type().is_socket() {
        return None;
    }
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) => {
            if error.kind() == io::ErrorKind::ConnectionRefused {
                let _ = remove_stale_socket(path);
            }
            return None;
        }
    };
    let peer = socket_peercred(&stream).ok()?;
    if peer.uid != geteuid() {
        return None;
    }
    let status = request_status(stream);
    let refusal = match &status {
        Some(status) => status["error"]["message"].as_str().map(str::to_owned),
        None => Some("the server does not answer".to_owned()),
    };
    let status = status.unwrap_or_default();
    let mut names = status["result"]["clients"].as_array().into_iter().flatten();
    let mut next = || Some(names.next()?.as_str()?.to_owned());
    let client = next().filter(|name| !name.is_empty());
    let attached = std::iter::from_fn(next).collect();
    let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
    Some(RunningServer { name: name.to_owned(), pid, client, attached, refusal, path: path.to_owned() })
}

/// Asks a server for the list of its clients.
fn request_status(mut stream: UnixStream) -> Option<Value> {
    stream.set_read_timeout(Some(STATUS_TIMEOUT)).ok()?;
    // A server that refuses the connection has written its answer already and reads nothing.
    let _ = stream.write_all(format!("{}\n", json!({"jsonrpc": "2.0", "id": 1, "method": STATUS_METHOD})).as_bytes());
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

/// Locks `directory`: until the returned file is dropped, no other process creates or removes a socket there.
fn lock_directory(directory: &Path) -> io::Result<std::fs::File> {
    let file = std::fs::File::open(directory)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Removes a socket on which no server listens. Tries to connect again under the lock, since a new server may have bound
/// the socket meanwhile.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    let _lock = path.parent().map(lock_directory).transpose()?;
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

/// The socket of this server. Dropping the listener removes the socket's file.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, by which the file is recognized before it is removed.
    file_id: (u64, u64),
    /// Time of the next attempt to accept clients, once no descriptor was left.
    retry_at: Mutex<Option<Instant>>,
}

impl Listener {
    /// Listens on the socket with this name.
    ///
    /// # Errors
    /// Returns an error if the name is not valid, if a server with this name is running, if another user can write to
    /// the directory, or if the socket cannot be created.
    pub(crate) fn bind(name: &str) -> io::Result<Self> {
        let path = socket_path(name)?;
        let directory = socket_directory();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        check_directory(&directory)?;
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700))?;
        let _lock = lock_directory(&directory)?;
        match UnixStream::connect(&path) {
            Ok(_) => {
                let reason = format!(
                    "a server {name:?} is already running ({}): end that server, or start this server with another \
                     --session NAME",
                    path.display()
                );
                return Err(io_error(io::ErrorKind::AddrInUse, reason));
            }
            // No server listens on this socket, so its server was killed and left the file.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(&path)?,
            Err(_) => {}
        }
        let socket = UnixListener::bind(&path).map_err(|error| {
            io_error(error.kind(), format!("cannot create a socket at {}: {error}", path.display()))
        })?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
        let metadata = std::fs::symlink_metadata(&path)?;
        let socket = UnixListener::from(to_private_number(&socket)?);
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path, file_id: (metadata.dev(), metadata.ino()), retry_at: Mutex::default() })
    }

    /// Returns the time for which the socket must not be polled, because no descriptor was left for a client that waits: a
    /// poll would return at once. Returns `None` if the socket may be polled.
    pub(crate) fn time_until_retry(&self) -> Option<Duration> {
        let left = (*self.retry_at.lock())?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Accepts the next client of this user. A client of another user, and any client if `full` or if too few descriptors
    /// would be left, is refused with an error. Returns `None` after a refusal, since clients may connect faster than they are
    /// refused, and if no client waits or can be accepted now.
    pub(crate) fn accept(&self, full: bool) -> Option<UnixStream> {
        let stream = match self.socket.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                if matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE)) {
                    *self.retry_at.lock() = Some(Instant::now() + RETRY_INTERVAL);
                }
                return None;
            }
        };
        let reason = match socket_peercred(&stream) {
            Ok(peer) if peer.uid != geteuid() => "this session belongs to another user".to_owned(),
            Ok(_) if full => format!(
                "client limit reached: {MAX_ATTACHED} clients are attached to this session; one must disconnect first"
            ),
            Ok(_) if !has_reserve(&stream) => {
                "too few file descriptors are left for another client: raise the server's limit (ulimit -n)".to_owned()
            }
            Ok(_) => return UnixStream::from(to_private_number(&stream).ok()?).into(),
            Err(error) => format!("the server cannot determine the client's user: {error}"),
        };
        let _ = stream.set_nonblocking(true);
        let error = json!({"code": -32600, "message": reason});
        let _ = (&stream).write_all(format!("{}\n", json!({"jsonrpc": "2.0", "id": null, "error": error})).as_bytes());
        None
    }
}

/// Returns true if this process can open [`RESERVED_DESCRIPTORS`] more descriptors.
fn has_reserve(stream: &UnixStream) -> bool {
    (0..RESERVED_DESCRIPTORS).map(|_| stream.try_clone()).collect::<io::Result<Vec<_>>>().is_ok()
}

impl std::os::fd::AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Removes the socket file, so that no client finds the server.
    pub(crate) fn remove(&self) {
        // Another server may have replaced the file.
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.file_id);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove();
    }
}
