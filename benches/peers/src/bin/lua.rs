//! Measures the implementation of Lua that mlua was built for, under the given name: `lua engine NAME`.

use std::process::ExitCode;
use std::time::Instant;

use peers::{AnyError, expect_three, measure, report};

/// Converts an error of mlua, which may not leave its thread, to an error with the same text.
fn plain(error: mlua::Error) -> AnyError {
    error.to_string().into()
}

fn run(engine: &str) -> Result<(), AnyError> {
    let started = Instant::now();
    let lua = mlua::Lua::new();
    expect_three(lua.load("return 1 + 2").eval().map_err(plain)?)?;
    report(engine, "start", started.elapsed().as_secs_f64());
    let version = lua.load("return jit and jit.version or _VERSION").eval::<String>().map_err(plain)?;
    report(engine, "version", version);

    let add = lua.create_function(|_, (a, b): (i64, i64)| Ok(a + b)).map_err(plain)?;
    lua.globals().set("host_add", add).map_err(plain)?;
    lua.load(include_str!("../programs.lua")).exec().map_err(plain)?;
    measure(
        engine,
        |program| lua.globals().get::<mlua::Function>(format!("run_{program}")).map_err(plain),
        |function, argument| function.call(argument).map_err(plain),
    )
}

fn main() -> ExitCode {
    match std::env::args().nth(2).ok_or_else(|| "usage: lua engine NAME".into()).and_then(|engine| run(&engine)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lua: {error}");
            ExitCode::FAILURE
        }
    }
}
