//! The languages that a Rust program can embed, and Lisp in another process, beside this library: the same four programs,
//! starting, one evaluation. `make bench-peers` measures; `make bench` has `draw` make the table and the plot, too.
//!
//! Each measurement is a process of its own, which runs everything once to warm up and looks at the results; the engines
//! take turns, for several rounds, and medians of all samples count. Lua has two implementations, for one of which mlua is
//! built: so they are two builds of another program, `lua`.

mod engines;
mod remote;

use std::process::{Command, ExitCode};

use peers::AnyError;
use peers::samples::Samples;

/// Every engine, by the name that it is measured by.
const ENGINES: [&str; 8] = ["sbcl", "luajit", "lua54", "python", "steel", "rhai", "pipes", "swank"];

fn run() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["engine", engine] => {
            let samples = match engine {
                "pipes" | "swank" => remote::run(engine)?,
                _ => engines::run(engine)?,
            };
            print!("{samples}");
        }
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
                    let output = Command::new(program)
                        .args(["engine", engine])
                        // Steel wants a place for its packages.
                        .env("STEEL_HOME", own.with_file_name("steel-home"))
                        .output()?;
                    if !output.status.success() {
                        let message = String::from_utf8_lossy(&output.stderr);
                        return Err(format!("{engine}: {}: {}", output.status, message.trim()).into());
                    }
                    samples.read(&String::from_utf8(output.stdout)?)?;
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
