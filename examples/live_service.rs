//! A service that keeps running while an agent repairs one of its rules: `cargo run --example live_service`.
//!
//! The rules are Lisp code in this program's own image, and a thread serves orders without a pause. The agent, here a few
//! lines that speak MCP over a socket pair, learns that customers complain, finds the wrong rule, and redefines the rule.
//! No order is lost, and nothing is restarted.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sbcl::Lisp;
use serde_json::{Value, json};

/// The rules. According to the price list, ten or more pieces cost a tenth less; the rule `discount` gets this wrong.
const RULES: &str = r#"
(defpackage :shop (:use :cl) (:export #:total))
(in-package :shop)
(defun discount (pieces)
  "What is taken off, in percent."
  (if (> pieces 10) 10 0))
(defun total (pieces price)
  (floor (* pieces price (- 100 (discount pieces))) 100))
"#;

/// The time limit of each step.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Counters {
    served: AtomicU64,
    lost: AtomicU64,
    complaints: AtomicU64,
    closing: AtomicBool,
}

/// Returns the price according to the price list.
fn expected(pieces: i64, price: i64) -> i64 {
    pieces * price * if pieces >= 10 { 90 } else { 100 } / 100
}

/// Serves orders until the shop closes.
fn serve(lisp: &Lisp, counters: &Counters) {
    let mut order = 0_i64;
    while !counters.closing.load(Ordering::Relaxed) {
        order += 1;
        let (pieces, price) = (order % 20 + 1, 100 + order % 7);
        match lisp.call::<i64>("shop:total", (pieces, price)) {
            Ok(total) if total == expected(pieces, price) => {}
            Ok(_) => _ = counters.complaints.fetch_add(1, Ordering::Relaxed),
            Err(_) => _ = counters.lost.fetch_add(1, Ordering::Relaxed),
        }
        counters.served.fetch_add(1, Ordering::Relaxed);
    }
}

/// An MCP client on the agent's end of the socket pair.
struct Agent {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    last: u64,
}

impl Agent {
    fn new(stream: UnixStream) -> Result<Self, Box<dyn Error>> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut agent = Self { lines: BufReader::new(stream.try_clone()?), stream, last: 0 };
        let client = json!({"name": "live-service-agent", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
        agent.request("initialize", &params)?;
        Ok(agent)
    }

    fn request(&mut self, method: &str, params: &Value) -> Result<Value, Box<dyn Error>> {
        self.last += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params});
        self.stream.write_all(format!("{request}\n").as_bytes())?;
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line)? == 0 {
                return Err("the service has hung up".into());
            }
            let message: Value = serde_json::from_str(&line)?;
            if message["id"] == self.last {
                return Ok(message["result"].clone());
            }
        }
    }

    /// Calls a tool and prints the call and its result.
    fn tool(&mut self, name: &str, arguments: &Value) -> Result<String, Box<dyn Error>> {
        let result = self.request("tools/call", &json!({"name": name, "arguments": arguments}))?;
        let text = result["content"][0]["text"].as_str().ok_or("no text")?.to_owned();
        println!("agent> {name} {arguments}\n{text}\n");
        Ok(text)
    }
}

/// Finds the rule that computes wrong totals, and redefines it.
fn repair(agent: &mut Agent) -> Result<(), Box<dyn Error>> {
    let code = "(loop for pieces from 8 to 12 collect (list pieces (shop:total pieces 100)))";
    let totals = agent.tool("evaluate-lisp", &json!({"code": code}))?;
    // The wrong rule gives the discount from eleven pieces on, so only the total for ten pieces differs.
    let totals: HashMap<i64, bool> =
        (8..=12).map(|pieces| (pieces, totals.contains(&format!("({pieces} {})", expected(pieces, 100))))).collect();
    let wrong: Vec<_> = totals.iter().filter(|(_, right)| !**right).map(|(pieces, _)| *pieces).collect();
    if wrong != [10] {
        return Err(format!("something else is wrong: {wrong:?}").into());
    }
    agent.tool("find-references", &json!({"name": "shop::total", "relation": "callees"}))?;
    agent.tool("evaluate-lisp", &json!({"code": "(mapcar #'shop::discount '(9 10 11))"}))?;
    let rule = "(defun discount (pieces) \"What is taken off, in percent.\" (if (>= pieces 10) 10 0))";
    agent.tool("evaluate-lisp", &json!({"code": rule, "package": "shop"}))?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let lisp = Lisp::boot()?;
    lisp.load_str(RULES)?;
    let (ours, theirs) = UnixStream::pair()?;
    let served = sbcl::mcp::spawn(&lisp, ours)?;
    let counters = Counters::default();

    let repaired = std::thread::scope(|scope| {
        scope.spawn(|| serve(&lisp, &counters));
        let repaired = (|| {
            let mut agent = Agent::new(theirs)?;
            until("somebody complains", || counters.complaints.load(Ordering::Relaxed) > 0)?;
            repair(&mut agent)?;
            let (complaints, orders) =
                (counters.complaints.load(Ordering::Relaxed), counters.served.load(Ordering::Relaxed));
            // An order that was being computed during the repair may have used the old rule.
            until("a thousand orders more", || counters.served.load(Ordering::Relaxed) > orders + 1000)?;
            let since = counters.complaints.load(Ordering::Relaxed) - complaints;
            if since > 1 { Err(format!("{since} complaints since").into()) } else { Ok(()) }
        })();
        counters.closing.store(true, Ordering::Relaxed);
        repaired
    });
    served.wait()?;
    println!(
        "{} orders served, {} of them at a wrong price before the repair, {} lost",
        counters.served.load(Ordering::Relaxed),
        counters.complaints.load(Ordering::Relaxed),
        counters.lost.load(Ordering::Relaxed)
    );
    repaired.and(match counters.lost.into_inner() {
        0 => Ok(()),
        lost => Err(format!("{lost} orders were lost").into()),
    })
}

fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + TIMEOUT;
    while !holds() {
        if Instant::now() > end {
            return Err(format!("not in time: {what}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
