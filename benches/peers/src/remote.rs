//! One evaluation in another process: in a child `sbcl` over pipes, and in Swank over TCP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use peers::{AnyError, evaluations, report};

/// A child process that is killed when this guard is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the program that the environment variable `SBCL` names, or `sbcl`.
fn sbcl() -> String {
    std::env::var("SBCL").unwrap_or_else(|_| "sbcl".to_owned())
}

/// Starts an `sbcl` that evaluates `code`.
fn start(code: &str) -> Result<Killed, AnyError> {
    let child = Command::new(sbcl())
        .args(["--noinform", "--no-sysinit", "--no-userinit", "--disable-debugger", "--eval", code])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{}: {error}", sbcl()))?;
    Ok(Killed(child))
}

/// Measures `engine`. The start time ends with the first answer.
pub fn run(engine: &str) -> Result<(), AnyError> {
    let version = Command::new(sbcl()).arg("--version").output()?;
    report(engine, "version", String::from_utf8_lossy(&version.stdout).trim());
    if engine == "pipes" { pipes() } else { swank() }
}

fn pipes() -> Result<(), AnyError> {
    let started = Instant::now();
    let mut child = start("(loop (format t \"~s~%\" (eval (read))) (finish-output))")?;
    let mut input = child.0.stdin.take().ok_or("no pipe")?;
    let mut output = BufReader::new(child.0.stdout.take().ok_or("no pipe")?);
    let mut evaluate = || -> Result<(), AnyError> {
        input.write_all(b"(+ 1 2)\n")?;
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.trim() == "3" { Ok(()) } else { Err(format!("sbcl answered {line:?}").into()) }
    };
    evaluate()?;
    report("pipes", "start", started.elapsed().as_secs_f64());
    report("pipes", "evaluation", evaluations(evaluate)?);
    Ok(())
}

/// Measures Swank. The environment variable `SWANK` names Swank's loader; the default is the loader of Debian's package.
fn swank() -> Result<(), AnyError> {
    let loader =
        std::env::var("SWANK").unwrap_or_else(|_| "/usr/share/common-lisp/source/slime/swank-loader.lisp".to_owned());
    // READ-FROM-STRING reads symbols whose packages do not exist before the loader has run.
    let code = format!(
        "(progn
           (let ((*standard-output* (make-broadcast-stream)))
             (load {loader:?})
             (funcall (read-from-string \"swank-loader:init\")))
           (format t \"~&port ~d~%\" (funcall (read-from-string \"swank:create-server\") :port 0 :dont-close t))
           (finish-output)
           (read-char *standard-input* nil))"
    );
    let started = Instant::now();
    let mut child = start(&code)?;
    let mut lines = BufReader::new(child.0.stdout.take().ok_or("no pipe")?).lines();
    let port = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("port ").and_then(|port| port.trim().parse::<u16>().ok()))
        .ok_or("Swank did not start")?;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let mut number = 0;
    let mut evaluate = || -> Result<(), AnyError> {
        number += 1;
        let form = format!("(:emacs-rex (swank:eval-and-grab-output \"(+ 1 2)\") \"COMMON-LISP-USER\" t {number})\n");
        stream.write_all(format!("{:06x}{form}", form.len()).as_bytes())?;
        loop {
            let mut length = [0; 6];
            stream.read_exact(&mut length)?;
            let mut message = vec![0; usize::from_str_radix(std::str::from_utf8(&length)?, 16)?];
            stream.read_exact(&mut message)?;
            // Skip Swank's other messages.
            if message.starts_with(b"(:return") {
                let answer = String::from_utf8_lossy(&message);
                let expected = format!("(:return (:ok (\"\" \"3\")) {number})");
                return if answer.trim() == expected { Ok(()) } else { Err(answer.into()) };
            }
        }
    };
    evaluate()?;
    report("swank", "start", started.elapsed().as_secs_f64());
    report("swank", "evaluation", evaluations(evaluate)?);
    Ok(())
}
