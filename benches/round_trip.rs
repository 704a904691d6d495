//! Benchmarks of an MCP client over pipes to the release binary: round trips, start-up, a new image, memory.
//!
//! Calls of the different kinds alternate in one run, a few dozen of one kind at a time, so that their ratios mean
//! something on a noisy machine. Supervised and plain (`--no-supervisor`) servers alternate in the same way. `echo` is
//! `cat`, which returns the same line: the cost of the pipes and of the scheduler. Arguments are passed to `sbcl-mcp
//! serve`, except those that begin with `--bench`, which cargo adds.

#[path = "../tests/mcp/client.rs"]
mod client;

use std::process::Command;
use std::time::{Duration, Instant};

use client::Server;

const ROUNDS: usize = 3_000;
/// Consecutive calls of one kind: the unmeasured ones come first.
const UNMEASURED: usize = 10;
const MEASURED: usize = 30;
const STARTS: usize = 20;
const IMAGES: usize = 20;

/// Starts a program whose output is read by the calling thread.
fn start(program: &str, arguments: &[String]) -> Server {
    Server::start_direct(Command::new(program).args(arguments))
}

fn call(tool: &str, arguments: &str) -> String {
    format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"{tool}\",\"arguments\":{arguments}}}}}\n"
    )
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// Returns the worker process of a supervisor.
fn worker(supervisor: u32) -> Option<rustix::process::Pid> {
    let children = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    rustix::process::Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
}

/// Returns the time until `request` is answered. The answer must contain `expected`.
fn time(client: &mut Server, request: &str, expected: &str) -> Duration {
    let begin = Instant::now();
    let answer = client.round_trip(request);
    let time = begin.elapsed();
    assert!(answer.contains(expected), "{answer}");
    time
}

/// Returns the resident memory of a process and its children in bytes: the sum, and the sum with shared pages counted
/// once.
fn resident(process: u32) -> (u64, u64) {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    let rollup = read("smaps_rollup");
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().next().and_then(|kibibytes| kibibytes.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let children = read(&format!("task/{process}/children"));
    let children = children.split_whitespace().filter_map(|child| child.parse().ok()).map(resident);
    children.fold((field("Rss:"), field("Pss:")), |(rss, pss), (more, shared)| (rss + more, pss + shared))
}

fn main() {
    let server = env!("CARGO_BIN_EXE_sbcl-mcp");
    let mut arguments = vec!["serve".to_owned(), "--log=error".to_owned()];
    arguments.extend(std::env::args().skip(1).filter(|argument| !argument.starts_with("--bench")));
    assert!(!arguments.iter().any(|argument| argument == "--no-supervisor"), "both modes are always measured");

    let plus = call("evaluate-lisp", r#"{"code":"(+ 1 2)"}"#);
    let mut starts = Vec::new();
    let mut memory = (0, 0);
    for _ in 0..STARTS {
        let begin = Instant::now();
        let mut client = start(server, &arguments);
        client.initialize("2025-11-25");
        let answer = client.round_trip(&plus);
        assert!(answer.contains("=> 3"), "{answer}");
        starts.push(begin.elapsed());
        memory = resident(client.pid());
        client.finish();
    }

    let mut client = start(server, &arguments);
    client.initialize("2025-11-25");
    let mut alone = start(server, &[&arguments[..], &["--no-supervisor".to_owned()]].concat());
    alone.initialize("2025-11-25");
    let mut cat = start("cat", &[]);
    let requests = [
        ("echo (cat)", plus.clone(), ""),
        ("ping", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\n".to_owned(), "\"result\""),
        ("describe-last-error", call("describe-last-error", "{}"), "No error information"),
        ("evaluate-lisp (+ 1 2)", plus, "=> 3"),
        ("evaluate-lisp (let …)", call("evaluate-lisp", r#"{"code":"(let ((x 1)) (+ x 2))"}"#), "=> 3"),
    ];
    let mut times: Vec<Vec<Duration>> = vec![Vec::with_capacity(ROUNDS); requests.len()];
    let mut times_alone = times.clone();
    for _ in 0..ROUNDS / MEASURED {
        for (index, (name, request, expected)) in requests.iter().enumerate() {
            let echo = name.starts_with("echo");
            let targets = [(if echo { &mut cat } else { &mut client }, &mut times), (&mut alone, &mut times_alone)];
            for (target, times) in targets.into_iter().take(if echo { 1 } else { 2 }) {
                // The first calls warm up again what other kinds of calls have displaced.
                for call in 0..UNMEASURED + MEASURED {
                    let time = time(target, request, expected);
                    if call >= UNMEASURED {
                        times[index].push(time);
                    }
                }
            }
        }
    }
    let plus = &requests[3].1;
    let (mut resets, mut kills) = (Vec::new(), Vec::new());
    for _ in 0..IMAGES {
        resets.push(time(&mut client, &call("reset-session", "{}"), "Session reset"));
        let worker = worker(client.pid()).expect("a worker");
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).expect("it is ours");
        kills.push(time(&mut client, plus, "=> 3"));
    }
    cat.finish();
    client.finish();
    alone.finish();

    let medians: Vec<f64> = times.iter_mut().map(|times| median(times)).collect();
    println!("round trip, median of {ROUNDS}, and the same with --no-supervisor:");
    for (((name, ..), median), alone) in requests.iter().zip(&medians).zip(&mut times_alone) {
        let ratio = median / medians[2];
        print!("  {name:24} {median:8.1} µs   {ratio:5.2} × describe-last-error");
        println!("{}", if alone.is_empty() { String::new() } else { format!("   {:8.1} µs", self::median(alone)) });
    }
    println!("start to the first evaluation's answer, median of {STARTS}: {:.1} ms", median(&mut starts) / 1000.0);
    let (reset, kill) = (median(&mut resets) / 1000.0, median(&mut kills) / 1000.0);
    println!(
        "a new image, median of {IMAGES}: {reset:.1} ms by reset-session, {kill:.1} ms from its death to the next answer"
    );
    let (whole, once) = (memory.0 as f64 / 1e6, memory.1 as f64 / 1e6);
    println!("resident memory afterwards, both processes: {whole:.1} MB, {once:.1} MB with shared pages counted once");
}
