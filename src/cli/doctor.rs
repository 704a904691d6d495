//! The command `doctor`, which checks everything that the server needs and says how to fix problems.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::StatVfsMountFlags;
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::client::{CallError, Client};
use super::exit_status::{FAILED, SUCCEEDED};
use crate::audience::Audience;
use crate::environment;
use crate::image::{address_space, has_embedded_core};
use crate::os::temporary::ScratchDirectory;
use crate::recovery::checkpoint::store::state_directory;
use crate::{ImageConfig, mcp};

/// Maximum time for the start of the server, and for each evaluation.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Available memory, in bytes, below which the report has a note. Loading a small system needs this much.
const LOW_MEMORY: u64 = 512 << 20;
/// Free disk space, in bytes, below which the report has a note.
const LOW_SPACE: u64 = 256 << 20;
/// Number of file descriptors below which the report has a note.
const FEW_DESCRIPTORS: u64 = 256;
/// File size limit, in bytes, below which a checkpoint cannot be written.
const MIN_FILE_SIZE: u64 = 64 << 20;
/// Address space, in bytes, left free for malloc(3), which reserves 64 MiB for each thread if possible.
const MALLOC_MARGIN: u64 = 512 << 20;
/// Smallest heap, in bytes, that is suggested if the configured heap does not fit.
const MIN_HEAP: u64 = 256 << 20;
/// Sizes, in bytes, of the control stacks that are tried if the heap does not fit.
const SMALL_STACKS: [u64; 3] = [64 << 20, 16 << 20, 4 << 20];
/// Maximum number of directory entries whose sizes are added up.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of bytes of the init file that are searched.
const MAX_INIT_FILE: usize = 64 << 10;

/// The result of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckState {
    Fine,
    /// The checked feature works, but not as well as it could.
    Note,
    /// The checked feature does not work.
    Problem,
}

/// The report: one entry per check.
#[derive(Default)]
struct Findings {
    text: String,
    problems: usize,
}

impl Findings {
    fn push(&mut self, state: CheckState, what: &str, found: &str, remedy: Option<&str>) {
        let word = match state {
            CheckState::Fine => "ok",
            CheckState::Note => "note",
            CheckState::Problem => "FAILS",
        };
        self.problems += usize::from(state == CheckState::Problem);
        _ = writeln!(self.text, "{word:5}  {what:15}  {}", found.replace('\n', "\n                        "));
        if let Some(remedy) = remedy {
            _ = writeln!(self.text, "                        -> {remedy}");
        }
    }

    fn fine(&mut self, what: &str, found: &str) {
        self.push(CheckState::Fine, what, found, None);
    }

    fn note(&mut self, what: &str, found: &str, remedy: &str) {
        self.push(CheckState::Note, what, found, Some(remedy));
    }

    fn problem(&mut self, what: &str, found: &str, remedy: &str) {
        self.push(CheckState::Problem, what, found, Some(remedy));
    }
}

/// Runs all checks and prints the report. `config` describes the image that a server with `arguments` boots. Returns
/// the exit status, or a sentence if the report cannot be written.
pub(super) fn run(config: &ImageConfig, arguments: Vec<OsString>, output: OwnedFd) -> Result<i32, String> {
    let mut findings = Findings::default();
    check_program(&mut findings, config);
    check_limits(&mut findings, config);
    check_directories(&mut findings);
    check_init_files(&mut findings, config.user_init);
    check_start(&mut findings, arguments);
    let end = match findings.problems {
        0 => "Everything works.".to_owned(),
        1 => "1 check failed.".to_owned(),
        many => format!("{many} checks failed."),
    };
    let written = File::from(output).write_all(format!("{}\n{end}\n", findings.text).as_bytes());
    written.map_err(|error| format!("sbcl-mcp cannot write the findings to stdout: {error}"))?;
    Ok(if findings.problems == 0 { SUCCEEDED } else { FAILED })
}

/// Checks versions, the binary, PATH and the core.
fn check_program(findings: &mut Findings, config: &ImageConfig) {
    let revisions = mcp::revisions().join(", ");
    findings.fine("versions", &format!("sbcl-mcp {}, SBCL {}, MCP {revisions}", crate::VERSION, crate::SBCL_VERSION));
    let kernel = first_line("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let processors = if processors == 1 { "1 processor".to_owned() } else { format!("{processors} processors") };
    let (system, processor) = (std::env::consts::OS, std::env::consts::ARCH);
    findings.fine("system", &format!("{system} {kernel} {processor}, {processors}"));
    let binary = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("?"));
    match fs::metadata(&binary) {
        Ok(data) => findings.fine("binary", &format!("{} ({})", binary.display(), format_bytes(data.len()))),
        Err(error) => findings.note(
            "binary",
            &format!("{}: {error}", binary.display()),
            "if the program was moved or replaced while running, start the new program",
        ),
    }
    match find_on_path("sbcl-mcp") {
        Some(found) if is_same_file(&found, &binary) => {
            findings.fine("PATH", &format!("{} is this program", found.display()))
        }
        Some(found) => findings.note(
            "PATH",
            &format!("another sbcl-mcp is first on the PATH: {}", found.display()),
            "use this program's full path in the client's configuration",
        ),
        None => findings.note(
            "PATH",
            "sbcl-mcp is not on the PATH",
            "use this program's full path in the client's configuration",
        ),
    }
    check_core(findings, config.core_dir.as_deref(), has_embedded_core());
}

/// Checks the core: the core in `directory` or, without a directory, the core in the binary. `is_embedded` is true if
/// the binary contains a core.
fn check_core(findings: &mut Findings, directory: Option<&Path>, is_embedded: bool) {
    match directory {
        None if is_embedded => findings.fine("core", "in the binary"),
        None => findings.problem(
            "core",
            "this binary contains no core",
            "add --core with a directory that has sbcl.core to the server's arguments",
        ),
        Some(directory) => {
            let core = directory.join("sbcl.core");
            match fs::metadata(&core) {
                Ok(data) => findings.fine("core", &format!("{} ({})", core.display(), format_bytes(data.len()))),
                Err(error) => {
                    let remedy = match is_embedded {
                        true => "omit --core, or name the directory that has sbcl.core",
                        false => "name the directory that has sbcl.core: this binary contains no core",
                    };
                    findings.problem("core", &format!("{}: {error}", core.display()), remedy);
                }
            }
        }
    }
}

/// Checks the resource limits of the process, the memory of the system, and /proc.
fn check_limits(findings: &mut Findings, config: &ImageConfig) {
    let needed = address_space(config);
    let needed_for = format!("needed: {} for a heap of {}", format_bytes(needed), format_bytes(config.heap));
    match getrlimit(Resource::As).current {
        None => findings.fine("address space", &format!("no limit; {needed_for}")),
        Some(limit) => {
            let found = format!("at most {}; {needed_for}", format_bytes(limit));
            let state = match limit {
                _ if limit < needed => CheckState::Problem,
                _ if limit < needed + MALLOC_MARGIN => CheckState::Note,
                _ => CheckState::Fine,
            };
            let raise = "raise the limit (ulimit -v)";
            let remedy = (state != CheckState::Fine).then(|| suggest_smaller_image(config, limit, raise));
            findings.push(state, "address space", &found, remedy.as_deref());
        }
    }
    check_overcommit(findings, config, needed);
    check_memory(findings, config.heap);
    let proc = ["/proc/self/exe", "/proc/self/fd", "/proc/self/maps"];
    match proc.iter().find(|path| fs::symlink_metadata(path).is_err()) {
        None => findings.fine("/proc", "mounted"),
        Some(path) => findings.problem("/proc", &format!("{path} is missing"), "as root: mount -t proc proc /proc"),
    }
    let descriptors = getrlimit(Resource::Nofile).current;
    let allowed = descriptors.map_or("no limit".to_owned(), |limit| format!("at most {limit} at a time"));
    if descriptors.is_some_and(|limit| limit < FEW_DESCRIPTORS) {
        findings.note("open files", &allowed, "for code that opens many files: ulimit -n 1024");
    } else {
        findings.fine("open files", &allowed);
    }
    // Memory shared between processes is a file without a name (memfd), so the limit of the file size applies to
    // this memory.
    if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < MIN_FILE_SIZE) {
        let found = format!("at most {} per file; needed: {}", format_bytes(limit), format_bytes(MIN_FILE_SIZE));
        findings.problem("file size", &found, "raise the limit (ulimit -f)");
    }
}

/// Returns a suggestion of options with which an image fits into `limit` bytes of address space, or `otherwise`, which raises
/// the limit.
fn suggest_smaller_image(config: &ImageConfig, limit: u64, otherwise: &str) -> String {
    let stacks = std::iter::once(config.control_stack).chain(SMALL_STACKS);
    for control_stack in stacks.filter(|stack| *stack <= config.control_stack) {
        let besides = address_space(&ImageConfig { control_stack, heap: 0, ..config.clone() });
        // The heap is rounded down to a multiple of 128 MiB.
        let heap = limit.saturating_sub(besides + MALLOC_MARGIN) & !((128 << 20) - 1);
        if heap >= MIN_HEAP {
            let stack = match control_stack == config.control_stack {
                true => String::new(),
                false => format!(" --control-stack {}M", control_stack >> 20),
            };
            return format!("start the server with --heap {}M{stack}, or {otherwise}", heap >> 20);
        }
    }
    otherwise.to_owned()
}

/// Checks whether the system reserves memory for all allocated address space (proc_sys_vm(5)).
fn check_overcommit(findings: &mut Findings, config: &ImageConfig, needed: u64) {
    let mode = first_line("/proc/sys/vm/overcommit_memory");
    let left = meminfo("CommitLimit").zip(meminfo("Committed_AS")).map(|(limit, taken)| limit.saturating_sub(taken));
    match (mode.as_deref(), left) {
        (Some("2"), Some(left)) if left < needed => {
            let found = format!(
                "not allowed (vm.overcommit_memory is 2): {} can still be allocated, but {} is needed",
                format_bytes(left),
                format_bytes(needed)
            );
            let remedy = suggest_smaller_image(config, left, "as root: sysctl vm.overcommit_memory=0");
            findings.problem("overcommit", &found, &remedy);
        }
        (Some(mode), _) => findings.fine("overcommit", &format!("vm.overcommit_memory is {mode}")),
        (None, _) => {}
    }
}

fn check_memory(findings: &mut Findings, heap: u64) {
    let Some((total, available)) = meminfo("MemTotal").zip(meminfo("MemAvailable")) else { return };
    let limit = cgroup_memory_limit().filter(|limit| *limit < total);
    let mut found = format!("{}, {} available", format_bytes(total), format_bytes(available));
    if let Some(limit) = limit {
        _ = write!(found, "; limited to {} by the control group", format_bytes(limit));
    }
    let room = limit.unwrap_or(total);
    if room < LOW_MEMORY && limit.is_some() {
        findings.note("memory", &found, "raise the control group's memory limit: large Lisp systems need more memory");
    } else if available.min(room) < LOW_MEMORY {
        findings.note("memory", &found, "end other programs: large Lisp systems need more memory");
    } else if room < heap / 2 {
        // The server stops an evaluation that nearly fills the heap, but the kernel would kill the process first.
        let remedy = format!(
            "start the server with --heap {}M, so that a full heap causes a Lisp error before the kernel kills the image",
            room >> 21
        );
        findings.note("memory", &found, &remedy);
    } else {
        findings.fine("memory", &found);
    }
}

/// Returns the smallest memory limit of this process's control group and the group's ancestors, in bytes.
fn cgroup_memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = groups.lines().flat_map(|line| {
        // The format is hierarchy:controllers:path (cgroups(7)); version 2 has no controllers.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => ("/nonexistent", ""),
        };
        // In a container, the path may be the host's, while the mounted root is the process's own group. Reading the limits
        // of all ancestors includes the root's limit in this case, too.
        let own = Path::new(root).join(path.trim_start_matches('/'));
        let above: Vec<_> = own.ancestors().take_while(|group| group.starts_with(root)).map(Path::to_owned).collect();
        above.into_iter().filter_map(move |group| first_line(group.join(file))?.parse().ok())
    });
    limits.min()
}

/// Checks the directories for temporary files, HOME, checkpoints and sockets.
fn check_directories(findings: &mut Findings) {
    let temporary = std::env::temp_dir();
    let what = if std::env::var_os(environment::TEMPORARY_DIRECTORY).is_some() {
        environment::TEMPORARY_DIRECTORY
    } else {
        "temporary files"
    };
    match probe_existing_directory(&temporary) {
        Err(error) => findings.problem(
            what,
            &format!("{} is not writable: {error}", temporary.display()),
            "set TMPDIR to a writable directory",
        ),
        Ok(()) => {
            let (space, runs) = file_system_info(&temporary);
            let found = format!("{}, {} free", temporary.display(), format_bytes(space));
            if space < LOW_SPACE {
                findings.note(what, &found, "free some space in this directory, or set TMPDIR to another directory");
            } else if !runs {
                let found = format!("{found}; mounted noexec");
                findings.note(
                    what,
                    &found,
                    "to let Lisp code run programs or load libraries from there, set TMPDIR to a directory that is not \
                    mounted noexec",
                );
            } else {
                findings.fine(what, &found);
            }
        }
    }
    let home = std::env::home_dir().filter(|home| !home.as_os_str().is_empty());
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| Path::new(&value).is_absolute());
    match &home {
        Some(home) if home.is_dir() => findings.fine("home", &home.display().to_string()),
        other => {
            let found = other
                .as_ref()
                .map_or("HOME is not set".to_owned(), |home| format!("{} is not a directory", home.display()));
            if is_set(environment::CACHE_HOME) && is_set(environment::STATE_HOME) {
                findings.fine("home", &format!("{found}; XDG_CACHE_HOME and XDG_STATE_HOME replace it"));
            } else {
                findings.note(
                    "home",
                    &found,
                    "set HOME to an existing directory; or set XDG_CACHE_HOME, without which compiled files may be \
                     temporary, and XDG_STATE_HOME, without which --session needs a path",
                );
            }
        }
    }
    let state = state_directory();
    match state.as_deref().map(|directory| (directory, probe_directory(directory))) {
        None => {}
        Some((directory, Ok(()))) => {
            let (space, _) = file_system_info(directory);
            let taken = directory_size(directory);
            let found = format!("{} ({} used), {} free", directory.display(), format_bytes(taken), format_bytes(space));
            findings.fine("checkpoints", &found);
        }
        Some((directory, Err(error))) => findings.problem(
            "checkpoints",
            &format!("{} is not writable: {error}", directory.display()),
            "set XDG_STATE_HOME to a writable directory",
        ),
    }
    let runtime = std::env::var_os(environment::RUNTIME_DIRECTORY).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = |data: &fs::Metadata| data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o077 == 0;
    let note = |findings: &mut Findings, found: &str| {
        findings.note(
            "runtime",
            found,
            "to put the sockets for attached clients into a private directory: mkdir -m 700 DIR && export \
             XDG_RUNTIME_DIR=DIR",
        );
    };
    match runtime.as_deref().map(|directory| (directory, fs::metadata(directory))) {
        Some((directory, Ok(data))) if data.is_dir() && own(&data) => {
            findings.fine("runtime", &directory.display().to_string());
        }
        Some((directory, Ok(_))) => {
            note(findings, &format!("{} is not a private directory of this user", directory.display()))
        }
        Some((directory, Err(error))) => note(findings, &format!("{}: {error}", directory.display())),
        None => {
            let found = match std::env::var_os(environment::RUNTIME_DIRECTORY) {
                Some(value) if !value.is_empty() => "is not an absolute path",
                _ => "is not set",
            };
            note(findings, &format!("XDG_RUNTIME_DIR {found}: sockets are in the directory for temporary files"));
        }
    }
}

/// Checks the init file, and lists the places where ASDF looks for Lisp systems.
fn check_init_files(findings: &mut Findings, user_init: bool) {
    let Some(home) = std::env::home_dir() else { return };
    let init = home.join(".sbclrc");
    let text = fs::read(&init).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_INIT_FILE)]).to_ascii_lowercase();
    let brings: Vec<_> = ["quicklisp", "ocicl"].into_iter().filter(|name| text.contains(name)).collect();
    let loaded = if user_init { "loaded (--user-init)" } else { "not loaded" };
    if !init.exists() {
        findings.fine("init file", "no ~/.sbclrc");
    } else if brings.is_empty() || user_init {
        findings.fine("init file", &format!("{} is {loaded}", init.display()));
    } else {
        let found = format!("{} mentions {}, but is {loaded}", init.display(), brings.join(" and "));
        findings.note("init file", &found, "to load this file, add --user-init to the server's arguments");
    }
    let registries = [".config/common-lisp/source-registry.conf", ".config/common-lisp/source-registry.conf.d"];
    let trees = ["common-lisp", ".local/share/common-lisp/source", "quicklisp/local-projects"];
    let known = registries.into_iter().chain(trees).map(|path| home.join(path));
    let known = known.chain([PathBuf::from("/usr/share/common-lisp/source")]).filter(|path| path.exists());
    let known: Vec<_> = known.map(|path| path.display().to_string()).collect();
    let variable = std::env::var(environment::SOURCE_REGISTRY).ok().filter(|value| !value.is_empty());
    let known: Vec<_> = variable.map(|value| format!("CL_SOURCE_REGISTRY={value}")).into_iter().chain(known).collect();
    findings.fine(
        "Lisp systems",
        &if known.is_empty() { "none found in the usual directories".to_owned() } else { known.join(", ") },
    );
}

/// Starts a server as a client does, evaluates a form there, and checks ASDF.
fn check_start(findings: &mut Findings, arguments: Vec<OsString>) {
    let started = Instant::now();
    let mut client = match Client::start(arguments) {
        Ok(client) => client,
        Err(error) => {
            let found = format!("cannot start a process: {error}");
            return findings.problem("start", &found, "if the limit of processes is reached, raise it (ulimit -u)");
        }
    };
    if let Err(failure) = client.initialize(Audience::Agent, TIMEOUT) {
        return push_request_failure(findings, "start", failure, client);
    }
    findings.fine("start", &format_milliseconds(started.elapsed()));
    let started = Instant::now();
    match client.call("evaluate-lisp", &json!({"code": "(+ 1 2)"}), Some(TIMEOUT)) {
        Ok(answer) if answer.text == "=> 3" => {
            findings.fine("evaluation", &format!("(+ 1 2) => 3 in {}", format_milliseconds(started.elapsed())));
        }
        Ok(answer) => {
            let found = format!("(+ 1 2) returned:\n{}", answer.text);
            findings.problem("evaluation", &found, "if this answer does not name the cause, please report this bug");
        }
        Err(failure) => return push_request_failure(findings, "evaluation", failure, client),
    }
    let code = "(values (asdf:asdf-version) (uiop:native-namestring (asdf:apply-output-translations #p\"/\")))";
    let text = match client.call("evaluate-lisp", &json!({"code": code}), Some(TIMEOUT)) {
        Ok(answer) => answer.text,
        Err(failure) => return push_request_failure(findings, "ASDF", failure, client),
    };
    let values: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("=> \"")?.strip_suffix('"')).collect();
    let [version, cache] = values[..] else {
        let remedy = "check what ASDF reads: CL_SOURCE_REGISTRY, ASDF_OUTPUT_TRANSLATIONS and ~/.config/common-lisp";
        return findings.problem("ASDF", &format!("the query for ASDF's version failed:\n{text}"), remedy);
    };
    if cache == "/" {
        // ASDF's output translations are turned off.
        return findings.fine("ASDF", &format!("{version}, compiled files beside their sources"));
    }
    let found = format!("{version}, compiled files below {cache}");
    let cache = Path::new(cache);
    match probe_directory(cache) {
        Ok(()) if cache.starts_with(std::env::temp_dir()) => {
            findings.note(
                "ASDF",
                &found,
                "to keep compiled files from one session to the next, choose a permanent directory with HOME, \
                XDG_CACHE_HOME or, if this variable is set, ASDF_OUTPUT_TRANSLATIONS",
            );
        }
        Ok(()) => findings.fine("ASDF", &found),
        Err(error) => {
            let found = format!("{found}, which is not writable: {error}");
            let remedy = "make this directory writable, or choose another directory with XDG_CACHE_HOME or, if this \
                          variable is set, ASDF_OUTPUT_TRANSLATIONS";
            findings.problem("ASDF", &found, remedy);
        }
    }
}

/// Adds a problem for a failed request to the server, with the server's stderr.
fn push_request_failure(findings: &mut Findings, what: &str, failure: CallError, client: Client) {
    let said = client.end();
    let found = match failure {
        CallError::Refused(reason) => reason,
        CallError::TimedOut => format!("no answer within {} seconds\n{said}", TIMEOUT.as_secs()),
        CallError::Closed => format!("the server ended\n{said}"),
    };
    let remedy = "the cause may be a failure above or an option; otherwise please report this bug";
    findings.problem(what, found.trim_end(), remedy);
}

/// Checks that files can be created in a directory, or in its closest existing ancestor if the directory does not
/// exist.
fn probe_directory(directory: &Path) -> io::Result<()> {
    probe_existing_directory(directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")))
}

fn probe_existing_directory(directory: &Path) -> io::Result<()> {
    let name = ScratchDirectory::new().path().file_name().unwrap_or_default().to_owned();
    let file = directory.join(name);
    File::create_new(&file)?;
    fs::remove_file(&file)
}

/// Returns the free bytes of the file system that holds a path, and true if programs on this file system can be
/// executed.
fn file_system_info(path: &Path) -> (u64, bool) {
    let found = path.ancestors().find_map(|path| rustix::fs::statvfs(path).ok());
    found.map_or((u64::MAX, true), |found| {
        (found.f_bavail.saturating_mul(found.f_frsize), !found.f_flag.contains(StatVfsMountFlags::NOEXEC))
    })
}

/// Returns the total size of the files in a directory, in bytes. Counts at most [`MAX_ENTRIES`] entries.
fn directory_size(directory: &Path) -> u64 {
    let mut directories = vec![directory.to_owned()];
    let (mut bytes, mut seen) = (0, 0);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            seen += 1;
            match entry.metadata() {
                _ if seen > MAX_ENTRIES => return bytes,
                Ok(data) if data.is_dir() => directories.push(entry.path()),
                Ok(data) => bytes += data.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

/// Returns the path of the program that a shell would run for this name.
fn find_on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os(environment::PATH)?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|data| (data.dev(), data.ino())).ok();
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

fn first_line(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.lines().next()?.to_owned())
}

/// Returns a field of /proc/meminfo, in bytes.
fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// Formats a number of bytes with a unit.
fn format_bytes(bytes: u64) -> String {
    match bytes {
        0..1_024 => format!("{bytes} bytes"),
        1_024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn format_milliseconds(time: Duration) -> String {
    let milliseconds = time.as_secs_f64() * 1000.0;
    if milliseconds < 10.0 { format!("{milliseconds:.1} ms") } else { format!("{milliseconds:.0} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_a_core_needs_a_directory_with_a_core() {
        for (is_embedded, expected) in [(true, "ok     core "), (false, "FAILS  core ")] {
            let mut findings = Findings::default();
            check_core(&mut findings, None, is_embedded);
            assert!(findings.text.starts_with(expected), "{}", findings.text);
        }
    }

    #[test]
    fn omitting_the_option_core_is_suggested_only_if_the_program_has_a_core() {
        for is_embedded in [true, false] {
            let mut findings = Findings::default();
            check_core(&mut findings, Some(Path::new("/nonexistent")), is_embedded);
            assert!(findings.text.starts_with("FAILS  core "), "{}", findings.text);
            assert_eq!(findings.text.contains("omit --core"), is_embedded, "{}", findings.text);
        }
    }
}
