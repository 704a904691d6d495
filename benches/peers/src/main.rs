//! Compares this library with other languages that a Rust program can embed, and with Lisp in another process: four
//! programs, the start, and one evaluation. `make bench-peers` measures; `make bench` also draws the table and the plot
//! (`draw`).
//!
//! Each measurement runs in its own process, which runs each program once to warm up, and checks the results. The engines
//! take turns for several rounds, and the medians of all samples are reported. mlua supports one implementation of Lua for
//! each build, so the program `lua` is built twice. An engine that does not end in time is killed and reported.

mod engines;
mod remote;

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use peers::AnyError;
use peers::samples::Samples;

/// The names of all engines.
const ENGINES: [&str; 8] = ["sbcl", "luajit", "lua54", "python", "steel", "rhai", "pipes", "swank"];

/// Time limit of an engine in one round.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs an engine and returns its report, which is incomplete if the engine exceeds its time limit.
fn run_engine(engine: &str, command: &mut Command) -> Result<String, AnyError> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut output = child.stdout.take().ok_or("no pipe")?;
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let read = output.read_to_string(&mut text);
        // The receiver has stopped waiting if the time limit has passed.
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
        // The last line may be incomplete.
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        text.push_str(&format!("{engine}\tnote\tdid not end within {} s\n", LIMIT.as_secs()));
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
                    // Steel needs a directory for its packages.
                    command.args(["engine", engine]).env("STEEL_HOME", own.with_file_name("steel-home"));
                    samples.read(&run_engine(engine, &mut command)?)?;
                }
                // Earlier samples stay in the file, so that the rounds of several runs count together.
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
