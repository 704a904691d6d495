//! The effects of `--no-network` and `--read-only` on Lisp code.

#![cfg(target_os = "linux")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use crate::client::{Scratch, Server};
use serde_json::json;

const ABORT: &str = r#"(sb-alien:alien-funcall (sb-alien:extern-alien "abort" (function sb-alien:void)))"#;

/// The directories of a test: `temporary`, `cache`, and `elsewhere`, which the server does not own.
struct Directories(Scratch);

impl Directories {
    fn new() -> Self {
        let root = Scratch::new();
        root.directory("temporary");
        root.directory("cache");
        root.write("elsewhere/old", "old");
        Self(root)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    fn server(&self, arguments: &[&str]) -> Server {
        let (temporary, cache) = (self.path("temporary"), self.path("cache"));
        let variables: [(&str, &Path); 2] = [("TMPDIR", &temporary), ("XDG_CACHE_HOME", &cache)];
        let mut server = Server::start_with_environment(arguments, &variables);
        server.initialize("2025-06-18");
        server.evaluate("(defun f () 7)");
        server
    }
}

/// Evaluates code that must fail and returns the type of its error.
fn error_type(server: &mut Server, code: &str) -> String {
    let (text, is_error) = server.call_tool("evaluate-lisp", json!({"code": code}));
    assert!(is_error, "{code}: {text}");
    let kind = text.split("[ERROR] ").nth(1).and_then(|text| text.lines().next()).expect("a report").to_owned();
    server.assert_works();
    assert_eq!(server.evaluate("(f)"), "=> 7");
    kind
}

fn write(path: &Path) -> String {
    format!("(with-open-file (s {path:?} :direction :output :if-exists :supersede) (write-line \"new\" s) 1)")
}

fn connect(kind: &str, port: u16) -> String {
    let address = if kind == "inet" { "#(127 0 0 1)" } else { "#(0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1)" };
    format!(
        "(let ((s (make-instance 'sb-bsd-sockets:{kind}-socket :type :stream :protocol :tcp))) \
         (unwind-protect (progn (sb-bsd-sockets:socket-connect s {address} {port}) :connected) \
         (sb-bsd-sockets:socket-close s)))"
    )
}

/// Returns true if a program that Lisp starts can connect to the port.
fn shell_connects(server: &mut Server, port: u16) -> bool {
    let code = format!(
        "(sb-ext:process-exit-code (sb-ext:run-program \"/bin/bash\" '(\"-c\" \"exec 3<>/dev/tcp/127.0.0.1/{port}\")))"
    );
    server.evaluate(&code) == "=> 0"
}

#[test]
fn server_without_confinement_may_connect_and_write() {
    let directories = Directories::new();
    let mut server = directories.server(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    server.evaluate("(require :sb-bsd-sockets)");
    assert_eq!(server.evaluate(&connect("inet", port)), "=> :CONNECTED");
    assert!(shell_connects(&mut server, port));
    assert_eq!(server.evaluate(&write(&directories.path("elsewhere/new"))), "=> 1");
}

#[test]
fn no_network_denies_tcp_and_udp_and_allows_local_sockets() {
    let directories = Directories::new();
    for arguments in [&["--no-network"][..], &["serve", "--no-network", "--no-supervisor"]] {
        let mut server = directories.server(arguments);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        server.evaluate("(require :sb-bsd-sockets)");
        for kind in ["inet", "inet6"] {
            let error = error_type(&mut server, &connect(kind, port));
            assert_eq!(error, "SB-BSD-SOCKETS:OPERATION-NOT-PERMITTED-ERROR", "{kind}");
        }
        let udp = "(make-instance 'sb-bsd-sockets:inet-socket :type :datagram :protocol :udp)";
        assert_eq!(error_type(&mut server, udp), "SB-BSD-SOCKETS:OPERATION-NOT-PERMITTED-ERROR");
        assert!(!shell_connects(&mut server, port));
        // Code in another thread is refused as well.
        let code = format!(
            "(sb-thread:join-thread (sb-thread:make-thread (lambda () \
             (handler-case {} (sb-bsd-sockets:socket-error () :refused)))))",
            connect("inet", port)
        );
        assert_eq!(server.evaluate(&code), "=> :REFUSED");
        let local = "(let ((s (make-instance 'sb-bsd-sockets:local-socket :type :stream))) \
                     (sb-bsd-sockets:socket-close s) :there)";
        assert_eq!(server.evaluate(local), "=> :THERE");
        assert_eq!(server.evaluate(&write(&directories.path("elsewhere/new"))), "=> 1");
        assert!(server.finish().status.success());
    }
}

#[test]
fn read_only_denies_writes_except_to_temporary_and_cache_directories() {
    let directories = Directories::new();
    for arguments in [&["--read-only"][..], &["serve", "--no-supervisor", "--read-only", "--no-network"]] {
        let mut server = directories.server(arguments);
        let (old, new) = (directories.path("elsewhere/old"), directories.path("elsewhere/new"));
        for code in [
            write(&new),
            write(&old),
            format!("(with-open-file (s {old:?} :direction :output :if-exists :append) (write-line \"more\" s))"),
            format!("(delete-file {old:?})"),
            format!("(rename-file {old:?} {:?})", directories.path("elsewhere/moved")),
            format!("(ensure-directories-exist {:?})", directories.path("elsewhere/directory/")),
        ] {
            let error = error_type(&mut server, &code);
            assert!(error.ends_with("FILE-ERROR"), "{code}: {error}");
        }
        assert_eq!(server.evaluate(&format!("(handler-case {} (file-error () :refused))", write(&new))), "=> :REFUSED");
        let touch = format!("(sb-ext:process-exit-code (sb-ext:run-program \"/usr/bin/touch\" '({new:?})))");
        assert_ne!(server.evaluate(&touch), "=> 0");
        let read = format!("(with-open-file (s {old:?}) (read-line s))");
        assert_eq!(server.evaluate(&read), "=> \"old\"\n=> T");
        assert!(!new.exists());

        // Temporary files, compiled files and output to /dev/null are still allowed.
        assert_eq!(server.evaluate(&write(&directories.path("temporary/new"))), "=> 1");
        assert_eq!(server.evaluate(&write(&directories.path("cache/common-lisp/new"))), "=> 1");
        assert_eq!(error_type(&mut server, &write(&directories.path("cache/new"))), "SB-INT:SIMPLE-FILE-ERROR");
        server.evaluate("(sb-ext:run-program \"/bin/sh\" '(\"-c\" \"echo x >/dev/null\") :output nil)");
        assert!(server.finish().status.success());
    }
}

#[test]
fn image_after_a_crash_or_reset_is_still_confined() {
    let directories = Directories::new();
    let mut server = directories.server(&["--read-only", "--no-network"]);
    let (text, _) = server.call_tool("evaluate-lisp", json!({"code": ABORT}));
    assert!(text.contains("IMAGE-LOST"), "{text}");
    let new = write(&directories.path("elsewhere/new"));
    assert_eq!(error_type(&mut server, &new), "SB-INT:SIMPLE-FILE-ERROR");
    server.call_tool("reset-session", json!({}));
    server.evaluate("(defun f () 7)");
    assert_eq!(error_type(&mut server, &new), "SB-INT:SIMPLE-FILE-ERROR");
    server.evaluate("(require :sb-bsd-sockets)");
    assert_eq!(error_type(&mut server, &connect("inet", 1)), "SB-BSD-SOCKETS:OPERATION-NOT-PERMITTED-ERROR");
}
