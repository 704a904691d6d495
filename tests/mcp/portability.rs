//! The binary on a machine that did not build it: alone in an empty directory, without the build's cache and this
//! source tree, without an environment, for users with and without a home directory.
//!
//! Each server runs in a mount namespace that hides all files of the build. Where the system grants none, the tests
//! report that and pass; in CI they fail.

#![cfg(target_os = "linux")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

use crate::client::{DEADLINE, Scratch, Server, binary, call_err, call_ok, evaluate_err};
use serde_json::json;

/// The contribs in the core.
const CONTRIBS: [&str; 12] = [
    "sb-bsd-sockets",
    "sb-cltl2",
    "sb-concurrency",
    "sb-cover",
    "sb-grovel",
    "sb-introspect",
    "sb-md5",
    "sb-posix",
    "sb-queue",
    "sb-rotate-byte",
    "sb-rt",
    "sb-sprof",
];

/// Sets up the namespace and executes the program in it. Arguments: `self` or `nobody`, `writable` or `read-only`, the
/// directories to hide, `--`, the one to keep writable, and the program with its environment.
const SCRIPT: &str = r#"
set -e
user=$1 temporary=$2
shift 2
while [ "$1" != -- ]; do
    mount -t tmpfs -o mode=755 none "$1"
    shift
done
writable=$2
shift 2
if [ $temporary = read-only ]; then
    mount --bind /tmp /tmp
    mount --bind "$writable" "$writable" 2>/dev/null || true
    mount -o remount,bind,ro /tmp
    [ ! -d /dev/shm ] || mount -t tmpfs -o ro,mode=000 none /dev/shm
fi
if [ $user = nobody ]; then
    if setpriv --reuid 54321 --regid 54321 --clear-groups true 2>/dev/null; then
        exec setpriv --reuid 54321 --regid 54321 --clear-groups env -i "$@"
    fi
    exec unshare --user --map-user=54321 --map-group=54321 env -i "$@"
fi
exec env -i "$@"
"#;

/// Returns the `unshare` options that give a mount namespace, as root or in a user namespace, or `None`.
fn unshare() -> Option<&'static [&'static str]> {
    static FOUND: OnceLock<Option<&'static [&'static str]>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let ways: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];
        let works = |way: &&&[&str]| {
            let mut try_it = Command::new("unshare");
            try_it.args(**way).args(["mount", "-t", "tmpfs", "none", "/mnt"]).stderr(Stdio::null());
            try_it.status().is_ok_and(|status| status.success())
        };
        let found = ways.iter().find(works).copied();
        if found.is_none() {
            let complaint = "this system grants no mount namespace (unshare --mount): nothing is tested of the binary \
                             away from the machine that built it";
            assert!(std::env::var_os("CI").is_none(), "{complaint}");
            eprintln!("SKIPPED: {complaint}");
        }
        found
    })
}

/// The user that runs the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum User {
    /// The user that runs the tests, with an empty home directory.
    Current,
    /// A user without a passwd entry.
    Nobody,
}

/// A directory with nothing but the binary, and the directories of its user.
struct Installation {
    root: Scratch,
    user: User,
    read_only: bool,
    variables: Vec<(&'static str, PathBuf)>,
}

impl Installation {
    /// Copies the binary to a new directory. Returns `None` where no mount namespace can be had.
    fn new(user: User) -> Option<Self> {
        unshare()?;
        let root = Scratch::new();
        std::fs::set_permissions(&*root, Permissions::from_mode(0o755)).expect("the file is writable");
        let installation = Self { root, user, read_only: false, variables: Vec::new() };
        for directory in ["bin", "home", "tmp", "work"] {
            let directory = installation.path(directory);
            std::fs::create_dir_all(&directory).expect("the directory is ours");
            std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("the file is writable");
        }
        // `cp` writes the file: a descriptor of this process could still be open for writing in a child of another
        // test, and the file could not be executed then (ETXTBSY).
        let copied = Command::new("cp").arg(binary()).arg(installation.binary()).status();
        assert!(copied.expect("cp starts").success(), "there is no room for a copy");
        installation.write_system();
        Some(installation)
    }

    /// Adds an environment variable that names a directory.
    fn with_variable(mut self, name: &'static str, directory: &str) -> Self {
        self.variables.push((name, self.path(directory)));
        self
    }

    /// Makes /tmp read-only except for `work` and `home`, and removes /dev/shm.
    fn with_read_only_tmp(mut self) -> Self {
        self.read_only = true;
        self
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn binary(&self) -> PathBuf {
        self.path("bin/sbcl-mcp")
    }

    /// Writes a system that depends on all contribs and uses some.
    fn write_system(&self) {
        let dependencies: String = CONTRIBS.iter().map(|name| format!("\"{name}\" ")).collect();
        let system = format!("(defsystem \"app\" :depends-on ({dependencies}) :components ((:file \"app\")))");
        let code = "(defpackage :app (:use :cl) (:export #:user #:digits #:broken))
(in-package :app)
(defun user () (sb-posix:getuid))
(defun digits () (length (sb-md5:md5sum-string \"1\")))
(defun broken (x)
  (1+ (/ x (- x x))))
";
        std::fs::write(self.path("work/app.asd"), system).expect("the directory is ours");
        std::fs::write(self.path("work/app.lisp"), code).expect("the directory is ours");
    }

    /// Returns the directories of the build: the home directory with all caches, this source tree, the target
    /// directory.
    fn hidden(&self) -> Vec<PathBuf> {
        let target = Path::new(binary()).ancestors().nth(2).map(Path::to_owned);
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let candidates = [std::env::home_dir(), cache, Some(PathBuf::from(env!("CARGO_MANIFEST_DIR"))), target]
            .into_iter()
            .flatten();
        let mut hidden: Vec<PathBuf> = Vec::new();
        for directory in candidates.filter_map(|directory| directory.canonicalize().ok()) {
            assert!(!self.root.starts_with(&directory), "TMPDIR is within {directory:?}, which is to be hidden");
            // A directory inside a hidden one is hidden already.
            if directory != Path::new("/") && !hidden.iter().any(|outer| directory.starts_with(outer)) {
                hidden.push(directory);
            }
        }
        hidden
    }

    /// Returns the command that runs the binary in its namespace.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.args(unshare().expect("namespaces are available")).args(["sh", "-c", SCRIPT, "away"]);
        command.arg(if self.user == User::Nobody { "nobody" } else { "self" });
        command.arg(if self.read_only { "read-only" } else { "writable" });
        command.args(self.hidden()).arg("--").arg(self.path("home"));
        command.args(self.variables.iter().map(|(name, value)| format!("{name}={}", value.display())));
        command.arg(self.binary()).args(arguments).current_dir(self.path("work"));
        command
    }

    fn server(&self, arguments: &[&str]) -> Server {
        let mut server = Server::start_command(&mut self.command(arguments));
        server.initialize("2025-06-18");
        server
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().expect("unshare starts")
    }

    /// Returns the entries of the temporary directory.
    fn temporary_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path("tmp")).expect("the directory exists");
        entries.map(|entry| entry.expect("the entry can be read").path()).collect()
    }
}

fn kill(pid: &str) {
    assert!(Command::new("kill").args(["-9", pid]).status().expect("kill starts").success());
}

/// Returns the process id of the worker, as Lisp reports it.
fn worker(server: &mut Server) -> String {
    server.evaluate("(sb-posix:getpid)").trim_start_matches("=> ").to_owned()
}

/// Checks what a session does, from the first evaluation to a new image.
fn check_session(server: &mut Server, installation: &Installation) {
    server.assert_works();
    check_contribs(server);
    check_system(server, installation);
    check_errors(server);

    assert_eq!(
        call_ok(server, "reset-session", json!({})).lines().next(),
        Some("Session reset. All definitions cleared.")
    );
    assert_eq!(server.evaluate("(list (find-package :app) (fboundp 'broken))"), "=> (NIL NIL)");
    server.evaluate("(defun answer () 42)");
    let pid = worker(server);
    kill(&pid);
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": "(answer)"}));
    assert!(text.ends_with("=> 42"), "{text}");
    assert_ne!(worker(server), pid);
    assert_eq!(server.evaluate("(asdf:load-system :sb-posix)"), "=> T");
    load_app(server, installation);
}

/// Loads every contrib by REQUIRE and by ASDF. A contrib that the core lacks is refused with the reason.
fn check_contribs(server: &mut Server) {
    for name in CONTRIBS {
        let code = format!(
            "(list (require {name:?}) (require {:?}) (require :{name}) (asdf:component-name (asdf:find-system {name:?})) \
             (asdf:system-source-file {name:?}) (asdf:load-system {name:?}) (asdf:load-system {name:?} :force t) \
             (asdf:component-version (asdf:find-system :{name})))",
            name.to_uppercase()
        );
        let version = sbcl::SBCL_VERSION;
        assert_eq!(server.evaluate(&code), format!("=> (NIL NIL NIL {name:?} NIL T T {version:?})"));
    }
    for code in ["(require :sb-gmp)", "(asdf:load-system \"sb-gmp\")", "(asdf:find-system :sb-gmp)"] {
        let report = evaluate_err(server, code);
        let reason = "\nSB-GMP is a contrib of SBCL that this image does not contain: it needs the foreign library GMP. The \
                      image contains: sb-bsd-sockets, ";
        assert!(report.contains(reason.trim_start()), "{report}");
    }
    for code in ["(require :sb-nothing)", "(require \"SB-NOTHING\")", "(asdf:load-system :sb-nothing)"] {
        let report = evaluate_err(server, code);
        let reason =
            format!("SB-NOTHING is not a contrib of SBCL {}. The image contains: sb-bsd-sockets, ", sbcl::SBCL_VERSION);
        assert!(report.contains(&reason), "{report}");
    }
    // ASDF rejects a contrib that the image contains.
    let code = "(progn (asdf:defsystem \"demanding\" :depends-on ((:version \"sb-posix\" \"99\")))
                       (asdf:load-system \"demanding\"))";
    let report = evaluate_err(server, code);
    assert!(report.contains("Component \"sb-posix\" does not match version 99"), "{report}");
    assert!(!report.contains("not a contrib of SBCL"), "{report}");
    assert_eq!(server.evaluate("(asdf:find-system :sb-gmp nil)"), "=> NIL");
    assert!(!evaluate_err(server, "(require :no-such-module)").contains("contrib of SBCL"));
}

fn load_app(server: &mut Server, installation: &Installation) {
    let code = format!("(progn (asdf:load-asd {:?}) (asdf:load-system \"app\"))", installation.path("work/app.asd"));
    assert_eq!(server.evaluate(&code), "=> T");
}

/// Compiles and loads a system that depends on contribs, and compiles a file in the directory of its source.
fn check_system(server: &mut Server, installation: &Installation) {
    load_app(server, installation);
    let user = server.evaluate("(app:user)");
    assert_eq!(server.evaluate("(app:digits)"), "=> 16");
    assert_eq!(user == "=> 54321", installation.user == User::Nobody, "{user}");
    let source = installation.path("work/app.lisp");
    let answer = server.evaluate(&format!("(progn (load (compile-file {source:?})) (app:user))"));
    assert!(answer.ends_with(&user), "{answer}");
    let code = "(progn (format uiop:*stdout* \"hello~%\") (finish-output uiop:*stdout*) (uiop:command-line-arguments))";
    insta::allow_duplicates! { insta::assert_snapshot!(server.evaluate(code), @r"
    [stdout]
    hello

    => NIL
    "); }
    // SBCL's own directories name nothing of the machine that built it.
    let code = "(list (sb-int:sbcl-homedir-pathname) (remove-if (lambda (name) (search \"nonexistent\" name)) \
                (mapcar #'namestring (mapcar #'second (logical-pathname-translations \"SYS\")))) \
                (remove nil (mapcar #'asdf:system-source-file (remove \"app\" (asdf:registered-systems) :test #'equal))))";
    assert_eq!(server.evaluate(code), "=> (NIL NIL NIL)");
    let code = "(let ((found '())) (dolist (code (sb-vm:list-allocated-objects :all :type sb-vm:code-header-widetag) found) \
                (dotimes (i (sb-kernel:code-n-entries code)) \
                (let ((name (princ-to-string (sb-kernel:%simple-fun-name (sb-kernel:%code-entry-point code i))))) \
                (when (search \"/contrib/\" name) (push name found))))))";
    assert_eq!(server.evaluate(code), "=> NIL");
}

/// Checks the frames and source locations of errors in a file and within ASDF.
fn check_errors(server: &mut Server) {
    let report = evaluate_err(server, "(app:broken 5)");
    assert!(report.starts_with("[ERROR] DIVISION-BY-ZERO\n"), "{report}");
    assert!(report.contains(": (APP:BROKEN 5)\n"), "{report}");
    let backtrace = call_ok(server, "get-backtrace", json!({"locals": true}));
    assert!(backtrace.contains("app.lisp:6: (1+ (/ x (- x x))))"), "{backtrace}");
    let report = evaluate_err(server, "(asdf:load-system \"no-such-system\")");
    assert!(report.contains("MISSING-COMPONENT"), "{report}");
    call_ok(server, "get-backtrace", json!({"max-frames": 100, "locals": true}));
    for name in ["car", "asdf:load-system", "sb-posix:getuid", "app:broken"] {
        call_ok(server, "describe-symbol", json!({"name": name}));
    }
}

/// Asserts that no output names a directory of the machine that built the binary.
fn assert_names_no_builder(server: Server, installation: &Installation) {
    let end = server.finish();
    assert!(end.status.success(), "{}", end.stderr);
    let said = end.transcript.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n") + &end.stderr;
    for directory in installation.hidden() {
        // The slash avoids false matches: in a container, the name of a home directory may be very short.
        let inner = format!("{}/", directory.display());
        if let Some(at) =
            said.find(&format!("{inner}.cache/sbcl-mcp")).or_else(|| said.find(env!("CARGO_MANIFEST_DIR")))
        {
            panic!("{}", &said[at.saturating_sub(200)..(at + 200).min(said.len())]);
        }
    }
}

#[test]
fn server_runs_with_an_empty_environment() {
    let Some(installation) = Installation::new(User::Current) else { return };
    let mut server = installation.server(&[]);
    check_session(&mut server, &installation);
    assert_names_no_builder(server, &installation);
    let output = installation.run(&["eval", "(asdf:load-system :sb-posix)"]);
    assert_eq!((String::from_utf8_lossy(&output.stdout).as_ref(), output.status.code()), ("=> T\n", Some(0)));
}

#[test]
fn confined_server_runs_with_an_empty_environment() {
    let Some(installation) = Installation::new(User::Current) else { return };
    let mut server = installation.server(&["--no-network", "--read-only"]);
    check_contribs(&mut server);
    load_app(&mut server, &installation);
    assert_names_no_builder(server, &installation);
}

#[test]
fn server_runs_for_a_user_without_passwd_entry_and_home() {
    let Some(installation) =
        Installation::new(User::Nobody).map(|installation| installation.with_variable("TMPDIR", "tmp"))
    else {
        return;
    };
    let mut server = installation.server(&[]);
    assert_eq!(server.evaluate("(sb-posix:getenv \"HOME\")"), "=> NIL");
    assert!(installation.temporary_files().is_empty(), "nothing is made before it is needed");
    let temporary = format!("=> {:?}", format!("{}/", installation.path("tmp").display()));
    assert_eq!(server.evaluate("(namestring (uiop:temporary-directory))"), temporary);
    check_session(&mut server, &installation);
    // Compiled files are in one temporary directory, which outlives the worker and is removed with the server.
    let made = installation.temporary_files();
    assert_eq!(made.len(), 1, "{made:?}");
    let home = format!("=> {:?}\n=> T", format!("{}/", made[0].display()));
    let code = "(values (namestring (user-homedir-pathname)) \
                (not (null (directory (merge-pathnames \"**/app.fasl\" uiop:*user-cache*)))))";
    assert_eq!(server.evaluate(code), home);
    assert_names_no_builder(server, &installation);
    assert_eq!(installation.temporary_files(), [] as [PathBuf; 0]);

    let code = format!("(progn (asdf:load-asd {:?}) (asdf:load-system \"app\"))", installation.path("work/app.asd"));
    for arguments in [&["eval", &code][..], &["eval", "--core", "/nonexistent", "1"]] {
        let output = installation.run(arguments);
        assert_eq!(output.status.code(), Some(if arguments.len() > 2 { 3 } else { 0 }), "{output:?}");
        assert_eq!(installation.temporary_files(), [] as [PathBuf; 0]);
    }
    let mut server = installation.server(&["--no-supervisor"]);
    load_app(&mut server, &installation);
    assert_eq!(installation.temporary_files().len(), 1);
    assert!(server.finish().status.success());
    assert_eq!(installation.temporary_files(), [] as [PathBuf; 0]);
}

#[test]
fn temporary_files_are_removed_after_the_server_is_killed() {
    let Some(installation) =
        Installation::new(User::Nobody).map(|installation| installation.with_variable("TMPDIR", "tmp"))
    else {
        return;
    };
    let mut server = installation.server(&[]);
    load_app(&mut server, &installation);
    assert_eq!(installation.temporary_files().len(), 1);
    kill(&server.pid().to_string());
    let deadline = Instant::now() + DEADLINE;
    while !installation.temporary_files().is_empty() {
        assert!(Instant::now() < deadline, "{:?}", installation.temporary_files());
        std::thread::yield_now();
    }
}

#[test]
fn server_runs_for_a_user_with_an_unwritable_home() {
    let Some(installation) = Installation::new(User::Nobody) else { return };
    std::fs::set_permissions(installation.path("home"), Permissions::from_mode(0o555)).expect("the file is writable");
    let installation = installation.with_variable("TMPDIR", "tmp").with_variable("HOME", "home");
    let mut server = installation.server(&[]);
    assert_eq!(
        server.evaluate("(namestring (user-homedir-pathname))"),
        format!("=> {:?}", format!("{}/", installation.path("home").display()))
    );
    load_app(&mut server, &installation);
    assert_eq!(installation.temporary_files().len(), 1);
    assert!(server.finish().status.success());
    assert_eq!(installation.temporary_files(), [] as [PathBuf; 0]);
}

#[test]
fn server_runs_with_a_read_only_tmp_and_without_dev_shm() {
    let Some(installation) = Installation::new(User::Current) else { return };
    std::fs::set_permissions(installation.path("home"), Permissions::from_mode(0o777)).expect("the file is writable");
    let installation = installation.with_read_only_tmp().with_variable("HOME", "home");
    let mut server = installation.server(&[]);
    assert!(
        call_err(&mut server, "evaluate-lisp", json!({"code": "(open \"/tmp/no-sbcl-mcp-file\" :direction :output)"}))
            .contains("Read-only")
    );
    let fasl = "(merge-pathnames \"app.fasl\" (user-homedir-pathname))";
    let code = format!("(namestring (compile-file {:?} :output-file {fasl}))", installation.path("work/app.lisp"));
    let compiled = server.evaluate(&code);
    assert!(compiled.ends_with(&format!("=> {:?}", installation.path("home/app.fasl"))), "{compiled}");
    check_contribs(&mut server);
    load_app(&mut server, &installation);
    check_errors(&mut server);
    assert_names_no_builder(server, &installation);
}

#[test]
fn server_runs_with_a_read_only_tmp_and_without_a_home() {
    let Some(installation) = Installation::new(User::Nobody).map(Installation::with_read_only_tmp) else { return };
    let mut server = installation.server(&[]);
    server.assert_works();
    check_contribs(&mut server);
    let report = evaluate_err(
        &mut server,
        &format!("(asdf:load-asd {:?}) (asdf:load-system \"app\")", installation.path("work/app.asd")),
    );
    assert!(report.contains("/tmp/sbcl-mcp-"), "what cannot be made is named: {report}");
    let report = evaluate_err(&mut server, "(error \"boom\")");
    assert!(report.starts_with("[ERROR] SIMPLE-ERROR\nboom\n"), "{report}");
    let pid = worker(&mut server);
    kill(&pid);
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": "(+ 1 2)"}));
    assert!(text.ends_with("=> 3"), "{text}");
    assert!(server.finish().status.success());
}
