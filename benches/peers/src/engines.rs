//! The engines that run in this process. Each function starts an engine, loads the four programs, and measures them.

use std::time::Instant;

use peers::{AnyError, PROGRAMS, evaluations, expect_three, measure, report};

/// Measures `engine`. The start time ends with the first answer.
pub fn run(engine: &str) -> Result<(), AnyError> {
    match engine {
        "sbcl" => sbcl(),
        "python" => python(),
        "rhai" => rhai(),
        "steel" => steel(),
        _ => Err(format!("unknown engine {engine}").into()),
    }
}

fn sbcl() -> Result<(), AnyError> {
    let started = Instant::now();
    let lisp = sbcl::Lisp::builder().boot()?;
    expect_three(lisp.eval("(+ 1 2)")?)?;
    report("sbcl", "start", started.elapsed().as_secs_f64());
    report("sbcl", "version", lisp.eval::<String>("(lisp-implementation-version)")?);

    lisp.define("host:add", "Return the sum.", |a: i64, b: i64| a + b)?;
    lisp.load_str(include_str!("programs.lisp"))?;
    lisp.enter(|cx| {
        measure(
            "sbcl",
            |program| Ok(cx.function(&format!("run-{program}"))?),
            |function, argument| Ok(function.call((argument,))?),
        )
        .map_err(sbcl::Error::Other)?;
        let time = evaluations(|| expect_three(cx.eval("(+ 1 2)")?)).map_err(sbcl::Error::Other)?;
        report("sbcl", "evaluation inside enter", time);
        Ok(())
    })?;
    let time = evaluations(|| expect_three(lisp.eval("(+ 1 2)")?))?;
    report("sbcl", "evaluation", time);
    Ok(())
}

#[pyo3::pyfunction]
fn host_add(a: i64, b: i64) -> i64 {
    a + b
}

fn python() -> Result<(), AnyError> {
    use pyo3::prelude::*;

    let started = Instant::now();
    Python::initialize();
    Python::attach(|py| {
        expect_three(py.eval(c"1 + 2", None, None)?.extract()?)?;
        report("python", "start", started.elapsed().as_secs_f64());
        report("python", "version", Python::version_str().split(' ').next().unwrap_or_default());

        let code = std::ffi::CString::new(include_str!("programs.py"))?;
        let module = PyModule::from_code(py, &code, c"programs.py", c"programs")?;
        module.add_function(pyo3::wrap_pyfunction!(host_add, &module)?)?;
        measure(
            "python",
            |program| Ok(module.getattr(format!("run_{program}").as_str())?),
            |function, argument| Ok(function.call1((argument,))?.extract()?),
        )
    })
}

fn rhai() -> Result<(), AnyError> {
    let started = Instant::now();
    let mut engine = rhai::Engine::new();
    expect_three(engine.eval("1 + 2").map_err(|error| error.to_string())?)?;
    report("rhai", "start", started.elapsed().as_secs_f64());

    engine.register_fn("host_add", |a: i64, b: i64| a + b);
    let ast = engine.compile(include_str!("programs.rhai")).map_err(|error| error.to_string())?;
    let mut scope = rhai::Scope::new();
    measure(
        "rhai",
        // Rhai has no handles for a script's functions, so they are called by name.
        |program| Ok(format!("run_{program}")),
        |function, argument| {
            Ok(engine.call_fn(&mut scope, &ast, function, (argument,)).map_err(|error| error.to_string())?)
        },
    )
}

fn steel() -> Result<(), AnyError> {
    use steel::SteelVal;
    use steel::steel_vm::engine::Engine;
    use steel::steel_vm::register_fn::RegisterFn;

    fn integer(value: &SteelVal) -> Result<i64, AnyError> {
        match value {
            SteelVal::IntV(integer) => Ok(*integer as i64),
            other => Err(format!("not an integer: {other}").into()),
        }
    }

    let started = Instant::now();
    let mut engine = Engine::new();
    let values = engine.run("(+ 1 2)").map_err(|error| error.to_string())?;
    expect_three(integer(values.last().ok_or("no value")?)?)?;
    report("steel", "start", started.elapsed().as_secs_f64());

    engine.register_fn("host-add", |a: isize, b: isize| a + b);
    engine.run(include_str!("programs.scm")).map_err(|error| error.to_string())?;
    let mut functions = Vec::new();
    for (program, ..) in PROGRAMS {
        let function = engine.extract_value(&format!("run-{program}")).map_err(|error| error.to_string())?;
        functions.push((program, function));
    }
    measure(
        "steel",
        |program| {
            let found = functions.iter().find(|(name, _)| *name == program).ok_or("no such program")?;
            Ok(found.1.clone())
        },
        |function, argument| {
            let value = engine
                .call_function_with_args(function.clone(), vec![SteelVal::IntV(argument as isize)])
                .map_err(|error| error.to_string())?;
            integer(&value)
        },
    )
}
