//! Measurements that are the same for all engines and programs.

pub mod samples;

use std::fmt::Display;
use std::time::Instant;

use samples::Samples;

pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The programs, each with its argument and its expected result.
pub const PROGRAMS: [(&str, i64, i64); 4] = [
    ("fib", 30, 832_040),
    ("mandelbrot", 160, 1_126_475),
    ("table", 200_000, 19_999_900_000),
    ("host", 1_000_000, 499_999_500_000),
];
/// Number of measured runs of each program, after one run that warms up the engine.
const RUNS: u32 = 3;
/// Number of evaluations of which the median is reported.
const EVALUATIONS: usize = 2000;

/// Prints a line of [`Samples`] immediately, so that earlier measurements count even if the engine fails later.
pub fn report(engine: &str, what: &str, value: impl Display) {
    println!("{engine}\t{what}\t{value}");
}

/// Measures the programs of `engine`. `find` looks up each program once, and `call` runs it.
pub fn measure<F>(
    engine: &str,
    mut find: impl FnMut(&str) -> Result<F, AnyError>,
    mut call: impl FnMut(&F, i64) -> Result<i64, AnyError>,
) -> Result<(), AnyError> {
    for (program, argument, expected) in PROGRAMS {
        let function = find(program)?;
        for run in 0..=RUNS {
            let begun = Instant::now();
            let result = call(&function, argument)?;
            let seconds = begun.elapsed().as_secs_f64();
            if result != expected {
                return Err(format!("{program} returned {result}, not {expected}").into());
            }
            // A run that takes this long has also warmed up the engine.
            let is_long = seconds > 2.0;
            if run > 0 || is_long {
                report(engine, program, seconds);
            }
            if is_long {
                break;
            }
        }
    }
    Ok(())
}

/// Returns the median time of many evaluations of `(+ 1 2)`.
pub fn evaluations(mut evaluate: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
    let mut all = Samples::default();
    for _ in 0..EVALUATIONS {
        let begun = Instant::now();
        evaluate()?;
        all.push("", "", begun.elapsed().as_secs_f64());
    }
    all.median("", "").ok_or_else(|| "no evaluations".into())
}

/// Returns an error unless `value` is 3.
pub fn expect_three(value: i64) -> Result<(), AnyError> {
    if value == 3 { Ok(()) } else { Err(format!("1 + 2 is {value}").into()) }
}
