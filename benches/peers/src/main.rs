//! The languages that a Rust program can embed, and Lisp in another process, beside this library: the same four programs,
//! starting, one evaluation. `make bench-peers` measures; `make bench` has `draw` make the table and the plot, too.
//!
//! Each measurement is a process of its own, which runs everything once to warm up and looks at the results; the engines
//! take turns, for several rounds, and medians of all samples count. Lua has two implementations, for one of which mlua is
//! built: so they are two builds of another program, `lua`. One that does not end is ended, and told of.

mod engines;
mod remote;

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use peers::AnyError;
use peers::samples::Samples;

/// Every engine, by the name that it is measured by.
const ENGINES: [&str; 8] = ["sbcl", "luajit", "lua54", "python", "steel", "rhai", "pipes", "swank"];

/// How long one engine may take for a round.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs an engine and returns what it reports: as far as it came, when it takes longer than it may.
fn run_engine(engine: &str, command: &mut Command) -> Result<String, AnyError> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut output = child.stdout.take().ok_or("no pipe")?;
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let read = output.read_to_string(&mut text);
        // Nobody waits for it any more, when it comes too late.
        let _ = sender.send(());
        read.map(|_| text)
    });
    let in_time = receiver.recv_timeout(LIMIT).is_ok();
    if !in_time {
        child.kill()?;
    }
    let status = child.wait()?;
    let mut text = reader.join().map_err(|_| "reading panicked")??;
    if !in_time {
        // What it was at comes without its end.
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        text.push_str(&format!("{engine}\tnote\tnot at its end after {} s\n", LIMIT.as_secs()));
    } else if !status.success() {
        return Err(format!("{engine}: {status}").into());
    }
    Ok(text)
}

fn run() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["engine", engine] => match engine {
            "pipes" | "swank" => remote::run(engine)?,
            _ => engines::run(engine)?,
        },
        ["measure", rounds, lua54, luajit, file] => {
            let own = std::env::current_exe()?;
            let mut samples = Samples::default();
            for round in 1..=rounds.parse::<u32>()? {
                for engine in ENGINES {
                    eprintln!("round {round}: {engine}");
                    let program = match engine {
                        "lua54" => lua54.as_ref(),
                        "luajit" => luajit.as_ref(),
                        _ => own.as_path(),
                    };
                    let mut command = Command::new(program);
                    // Steel wants a place for its packages.
                    command.args(["engine", engine]).env("STEEL_HOME", own.with_file_name("steel-home"));
                    samples.read(&run_engine(engine, &mut command)?)?;
                }
                // What was measured before stays: the rounds of several runs count together.
                samples.append_to(file)?;
                samples = Samples::default();
            }
        }
        _ => {
            return Err("usage: peers engine NAME
       peers measure ROUNDS LUA-OF-5.4 LUA-OF-LUAJIT SAMPLES"
                .into());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peers: {error}");
            ExitCode::FAILURE
        }
    }
}
