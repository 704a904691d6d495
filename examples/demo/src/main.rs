//! A demonstration of the server from an MCP client's side: `make demo`, or
//! `cargo run -p demo -- PATH-OF-SBCL-MCP`.
//!
//! The program starts the binary, speaks MCP over its stdin and stdout, prints each tool call and its answer, and fails if
//! an answer lacks an expected text.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A tool call and the texts that its answer must contain.
struct Step {
    why: &'static str,
    tool: &'static str,
    arguments: Value,
    fails: bool,
    expected: &'static [&'static str],
}

fn steps() -> Vec<Step> {
    let evaluate = |why, code: &str, fails, expected| Step {
        why,
        tool: "evaluate-lisp",
        arguments: json!({ "code": code }),
        fails,
        expected,
    };
    let ask = |why, tool, arguments, expected| Step { why, tool, arguments, fails: false, expected };
    vec![
        evaluate(
            "Define a function. The definition stays for the whole session.",
            "(defun average (numbers)\n  \"The arithmetic mean.\"\n  (/ (reduce #'+ numbers) (length numbers)))",
            false,
            &["=> AVERAGE"],
        ),
        evaluate(
            "Call the function. The answer contains its output and its value.",
            "(format t \"Averaging...~%\")\n(average '(1 2 3 4))",
            false,
            &["[stdout]\nAveraging...\n", "=> 5/2"],
        ),
        ask(
            "List the definitions of the session.",
            "list-definitions",
            json!({}),
            &["[Functions]\n- AVERAGE (NUMBERS)"],
        ),
        evaluate(
            "Make a mistake.",
            "(defun averages (samples)\n  (mapcar #'average samples))\n(averages '((1 2 3) ()))",
            true,
            &["[ERROR] DIVISION-BY-ZERO\n", "[Backtrace]\n0: ", "(AVERAGE NIL)", "(AVERAGES ((1 2 3) NIL))"],
        ),
        ask(
            "Describe the error and the available restarts.",
            "describe-last-error",
            json!({}),
            &["Error: DIVISION-BY-ZERO\n", "Available Restarts:\n", "Backtrace (top 5 frames):\n"],
        ),
        ask(
            "Show the call stack with the arguments.",
            "get-backtrace",
            json!({ "max-frames": 4 }),
            &["Backtrace for DIVISION-BY-ZERO (4 of ", "(AVERAGE NIL)", " more frames; pass max-frames "],
        ),
        evaluate(
            "Repair the function in the same image.",
            "(defun average (numbers)\n  (if numbers (/ (reduce #'+ numbers) (length numbers)) 0))\n(averages '((1 2 3) ()))",
            false,
            &["=> (2 0)"],
        ),
        ask(
            "The next successful evaluation has cleared the error.",
            "describe-last-error",
            json!({}),
            &["No error information available."],
        ),
    ]
}

/// A connection to a server that this program started.
struct Client {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    last_id: u64,
}

impl Client {
    fn start(binary: &str) -> Result<Self> {
        let mut child = Command::new(binary).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = child.stdin.take().ok_or("no pipe to the server")?;
        let from = BufReader::new(child.stdout.take().ok_or("no pipe from the server")?);
        Ok(Self { child, to, from, last_id: 0 })
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        Ok(writeln!(self.to, "{message}")?)
    }

    fn request(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last_id += 1;
        self.send(&json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params }))?;
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            return Err("the server has gone".into());
        }
        let mut answer: Value = serde_json::from_str(&line)?;
        if answer["id"] != self.last_id || !answer["result"].is_object() {
            return Err(format!("no result: {line}").into());
        }
        Ok(answer["result"].take())
    }

    /// Closes the connection, which ends the session, and waits for the server to exit.
    fn finish(self) -> Result<()> {
        let Self { mut child, to, from, .. } = self;
        drop((to, from));
        let status = child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the server ended with {status}").into()) }
    }
}

fn print_after(first: &str, text: &str) {
    for (index, line) in text.lines().enumerate() {
        let before = if index == 0 { first } else { "  " };
        println!("{}", format!("{before}{line}").trim_end());
    }
}

fn perform(client: &mut Client, step: &Step) -> Result<()> {
    println!("\n; {}", step.why);
    // Code is easier to read as plain text than as JSON.
    match step.arguments["code"].as_str() {
        Some(code) => print_after(&format!("→ {} ", step.tool), code),
        None => println!("→ {} {}", step.tool, step.arguments),
    }
    let result = client.request("tools/call", json!({ "name": step.tool, "arguments": step.arguments }))?;
    let text = result["content"][0]["text"].as_str().ok_or("an answer without text")?;
    print_after("  ", text);
    if result["isError"].as_bool().unwrap_or(false) != step.fails {
        return Err(format!("{}: isError is not {}", step.tool, step.fails).into());
    }
    match step.expected.iter().find(|part| !text.contains(**part)) {
        Some(part) => Err(format!("{}: {part:?} is missing", step.tool).into()),
        None => Ok(()),
    }
}

fn main() -> ExitCode {
    match session() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn session() -> Result<()> {
    let binary = std::env::args().nth(1).unwrap_or_else(|| "target/release/sbcl-mcp".to_owned());
    let begin = Instant::now();
    let mut client = Client::start(&binary)?;
    let opened = client.request(
        "initialize",
        json!({
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": { "name": "demo", "version": env!("CARGO_PKG_VERSION") },
        }),
    )?;
    client.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))?;
    let (name, version) = (&opened["serverInfo"]["name"], &opened["serverInfo"]["version"]);
    println!(
        "{} {} is there after {} ms; protocol {}",
        name.as_str().unwrap_or("?"),
        version.as_str().unwrap_or("?"),
        begin.elapsed().as_millis(),
        opened["protocolVersion"].as_str().unwrap_or("?"),
    );
    for step in steps() {
        perform(&mut client, &step)?;
    }
    client.finish()?;
    println!("\nAll answers are as expected.");
    Ok(())
}
