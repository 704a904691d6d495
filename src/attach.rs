//! Joining a server that runs: where the sockets are (`serve --socket`), which servers there are, and connecting.
//!
//! MCP is spoken on such a socket as on stdin and stdout, by each client under a connection of its own. The directory is
//! the user's alone, so are the sockets, and whoever connects is asked of the kernel who he is.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde_json::{Value, json};

use crate::rpc::descriptors::out_of_the_way;

/// How many may have joined at a time.
pub(crate) const MAX_GUESTS: usize = 16;
/// The method by which a server says who its clients are. It is for this program, and listed nowhere.
pub(crate) const STATUS: &str = "sbcl-mcp/status";
/// The method by which a client takes over what another one holds for debugging: `id`, an evaluation's number, where
/// there is more than one. It answers as `evaluation` would about that.
pub(crate) const TAKE_OVER: &str = "sbcl-mcp/take-over";
/// The method by which a server names the packages of its image and their nicknames: `packages`.
pub(crate) const PACKAGES: &str = "sbcl-mcp/packages";
/// The notification by which a client is told at once what others do: `text`, and `held`, the number of an evaluation that
/// somebody holds for debugging from now on. A client gets it that names it among its experimental capabilities; what it
/// says is in no answer then.
pub(crate) const NOTICE: &str = "sbcl-mcp/notice";
/// How long a server may take to say who its clients are.
const STATUS_TIME: Duration = Duration::from_secs(1);
/// Characters of a server's name.
const MAX_NAME: usize = 64;
/// What a socket's name ends with.
const SUFFIX: &str = ".sock";

/// A server that can be joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    /// What it is called: its process' number, unless it was given a name.
    pub(crate) name: String,
    /// Its process.
    pub(crate) pid: u32,
    /// What its own client calls itself, if that has said so.
    pub(crate) client: Option<String>,
    /// What those call themselves that have joined.
    pub(crate) guests: Vec<String>,
    /// Why it did not say who its clients are, if it refused to.
    pub(crate) refused: Option<String>,
    /// Its socket.
    pub(crate) path: PathBuf,
}

fn refused(kind: io::ErrorKind, reason: impl Into<String>) -> io::Error {
    io::Error::new(kind, reason.into())
}

/// The directory of the sockets: `sbcl-mcp` in XDG_RUNTIME_DIR, else one of the user's in the directory for temporary
/// files. It need not exist.
fn directory() -> PathBuf {
    match std::env::var_os(crate::environment::RUNTIME_DIRECTORY).map(PathBuf::from).filter(|path| path.is_absolute()) {
        Some(runtime) => runtime.join("sbcl-mcp"),
        None => std::env::temp_dir().join(format!("sbcl-mcp-{}", geteuid().as_raw())),
    }
}

/// Refuses a directory in which somebody else could put a socket.
fn check_directory(directory: &Path) -> io::Result<()> {
    // Not what a link leads to: anybody may make one in a directory for temporary files.
    let metadata = std::fs::symlink_metadata(directory)?;
    if metadata.is_dir() && metadata.uid() == geteuid().as_raw() && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let reason = format!("{} is no directory that only its owner, this user, can write to", directory.display());
    Err(refused(io::ErrorKind::PermissionDenied, reason))
}

/// Where the socket of the server with this name is, or would be.
///
/// # Errors
/// When the name is none for a file: letters, digits, `-`, `_` and `.`, at most 64, no dot first.
pub(crate) fn socket_path(name: &str) -> io::Result<PathBuf> {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || name.chars().count() > MAX_NAME || !name.chars().all(fits) {
        let reason = format!(
            "{name:?} cannot be a session's name: that has letters, digits, -, _ and ., {MAX_NAME} at most, and no dot first"
        );
        return Err(refused(io::ErrorKind::InvalidInput, reason));
    }
    Ok(directory().join(format!("{name}{SUFFIX}")))
}

/// Connects to the server of this name, or to the only one that runs.
///
/// # Errors
/// In words for a person: there is none, there is more than one, or it cannot be reached.
pub(crate) fn connect(name: Option<&str>) -> io::Result<UnixStream> {
    let named = |running: &[Running]| running.iter().map(|one| one.name.clone()).collect::<Vec<_>>().join(", ");
    let Some(name) = name else {
        return match &running()[..] {
            [] => Err(refused(
                io::ErrorKind::NotFound,
                "no session runs that can be joined: sbcl-mcp serve --socket starts one",
            )),
            [one] => UnixStream::connect(&one.path),
            several => {
                let reason = format!("several sessions run: name one of {}", named(several));
                Err(refused(io::ErrorKind::InvalidInput, reason))
            }
        };
    };
    UnixStream::connect(socket_path(name)?).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            let running = running();
            let others =
                if running.is_empty() { "none does".to_owned() } else { format!("these do: {}", named(&running)) };
            refused(io::ErrorKind::NotFound, format!("no session {name:?} runs that can be joined; {others}"))
        }
        kind => refused(kind, format!("the session {name:?} cannot be joined: {error}")),
    })
}

/// The servers that can be joined, by name. Sockets that nobody listens to any more are removed.
pub(crate) fn running() -> Vec<Running> {
    let directory = directory();
    let Ok(entries) = check_directory(&directory).and_then(|()| std::fs::read_dir(&directory)) else {
        return Vec::new();
    };
    let mut running: Vec<_> = entries.flatten().filter_map(|entry| look_at(&entry.path())).collect();
    running.sort_by(|one, other| one.name.cmp(&other.name));
    running
}

/// The server that listens at a socket; `None` when it is no socket, or nobody does.
fn look_at(path: &Path) -> Option<Running> {
    let name = path.file_name()?.to_str()?.strip_suffix(SUFFIX)?;
    if !std::fs::symlink_metadata(path).ok()?.file_type().is_socket() {
        return None;
    }
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) => {
            if error.kind() == io::ErrorKind::ConnectionRefused {
                let _ = remove_stale(path);
            }
            return None;
        }
    };
    let peer = socket_peercred(&stream).ok()?;
    if peer.uid != geteuid() {
        return None;
    }
    let status = status(stream).unwrap_or_default();
    let mut names = status["result"]["clients"].as_array().into_iter().flatten();
    let mut next = || Some(names.next()?.as_str()?.to_owned());
    let client = next().filter(|name| !name.is_empty());
    let guests = std::iter::from_fn(next).collect();
    let refused = status["error"]["message"].as_str().map(str::to_owned);
    let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
    Some(Running { name: name.to_owned(), pid, client, guests, refused, path: path.to_owned() })
}

/// What a server answers that is asked who its clients are.
fn status(mut stream: UnixStream) -> Option<Value> {
    stream.set_read_timeout(Some(STATUS_TIME)).ok()?;
    // One that refuses has said so, and does not read.
    let _ = stream.write_all(format!("{}\n", json!({"jsonrpc": "2.0", "id": 1, "method": STATUS})).as_bytes());
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

/// Nobody else makes or removes a socket in `directory` until what this returns is dropped.
fn lock(directory: &Path) -> io::Result<std::fs::File> {
    let file = std::fs::File::open(directory)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Removes a socket that nobody listens to, if that is still so.
fn remove_stale(path: &Path) -> io::Result<()> {
    let _lock = path.parent().map(lock).transpose()?;
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

/// The socket of this server: dropping it removes it.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// The device and number of its file.
    file: (u64, u64),
}

impl Listener {
    /// Listens under this name.
    ///
    /// # Errors
    /// When another server of that name runs, or the socket cannot be made.
    pub(crate) fn bind(name: &str) -> io::Result<Self> {
        let path = socket_path(name)?;
        let directory = directory();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        check_directory(&directory)?;
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700))?;
        let _lock = lock(&directory)?;
        match UnixStream::connect(&path) {
            Ok(_) => {
                let reason = format!("a session {name:?} runs already ({})", path.display());
                return Err(refused(io::ErrorKind::AddrInUse, reason));
            }
            // One that was killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(&path)?,
            Err(_) => {}
        }
        let socket = UnixListener::bind(&path)
            .map_err(|error| refused(error.kind(), format!("no socket can be made at {}: {error}", path.display())))?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
        let metadata = std::fs::symlink_metadata(&path)?;
        let socket = UnixListener::from(out_of_the_way(&socket)?);
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path, file: (metadata.dev(), metadata.ino()) })
    }

    /// Whoever connects next and is this very user; `None` when nobody is there now. `full`: no more can be taken, which
    /// is said.
    pub(crate) fn accept(&self, full: bool) -> Option<UnixStream> {
        loop {
            let (stream, _) = match self.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return None,
            };
            let reason = match socket_peercred(&stream) {
                Ok(peer) if peer.uid != geteuid() => "this session is another user's".to_owned(),
                Ok(_) if full => format!(
                    "{MAX_GUESTS} clients have joined this session, which is as many as may: one of them has to leave first"
                ),
                Ok(_) => return UnixStream::from(out_of_the_way(&stream).ok()?).into(),
                Err(error) => format!("it is not known who you are: {error}"),
            };
            let _ = stream.set_nonblocking(true);
            let error = json!({"code": -32600, "message": reason});
            let _ =
                (&stream).write_all(format!("{}\n", json!({"jsonrpc": "2.0", "id": null, "error": error})).as_bytes());
        }
    }
}

impl std::os::fd::AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Has nobody find it any more.
    pub(crate) fn remove(&self) {
        // Somebody may have put another one there.
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.file);
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
