//! Writes the page of figures and the plot: `draw SAMPLES CRITERION ROOT`. SAMPLES is the file that `peers measure` has
//! written, CRITERION is criterion's directory, and ROOT is the repository.

use std::fmt::Write;
use std::path::Path;

use peers::AnyError;
use peers::samples::Samples;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// The engines that run in the process, with their names in the plot.
const ENGINES: [(&str, &str); 6] = [
    ("sbcl", "this crate"),
    ("luajit", "LuaJIT (mlua)"),
    ("lua54", "Lua 5.4 (mlua)"),
    ("python", "CPython (PyO3)"),
    ("steel", "steel"),
    ("rhai", "rhai"),
];
const OTHERS: [(&str, &str); 2] = [("pipes", "child sbcl, pipes"), ("swank", "Swank, TCP")];

/// The benchmarks of each engine, with their titles.
const BENCHMARKS: [(&str, &str); 5] = [
    ("fib", "fib(30)"),
    ("mandelbrot", "mandelbrot, 160 × 160"),
    ("table", "hash table, 200,000 updates"),
    ("host", "1,000,000 host calls"),
    ("start", "start"),
];

/// A figure from criterion's measurements, with the names in `benches/library.rs`.
enum Figure {
    /// The time of one call, if the benchmark of this name makes this number of calls.
    Time(&'static str, f64),
    /// The factor times the ratio of the first benchmark's time to the second benchmark's time.
    Ratio(f64, &'static str, &'static str),
}

const CALLS: [(&str, Figure, &str); 15] = [
    (
        "direct call of a function of two fixnums, inside `enter`",
        Figure::Time("function.call of two fixnums, inside enter", 1.0),
        "≤ 100 ns",
    ),
    (
        "`function.call::<i64>((1, 2))` from another thread",
        Figure::Time("function.call of two fixnums, another thread", 1.0),
        "≤ 4 µs, and ≤ 1 µs more than the bare hand-over",
    ),
    (
        "for comparison: a bare hand-over to another thread and back, with the same polling",
        Figure::Time("bare hand-over with the same waiting", 1.0),
        "",
    ),
    (
        "a Rust function of two fixnums called from compiled Lisp",
        Figure::Time("1000 calls of a host function from compiled Lisp", 1000.0),
        "≤ 150 ns",
    ),
    (
        "a string of 1 KB to Lisp and back, inside `enter`",
        Figure::Time("1 KB string there and back, inside enter", 1.0),
        "≤ 1 µs",
    ),
    (
        "copying 1 MB of octets, relative to `memcpy`",
        Figure::Ratio(1.0, "1 MB copied, inside enter", "1 MB copied by memcpy"),
        "≤ 1.2",
    ),
    ("`eval` of `(+ 1 2)`, inside `enter`", Figure::Time("eval of (+ 1 2), inside enter", 1.0), ""),
    ("`eval` of `(+ 1 2)` from another thread", Figure::Time("eval of (+ 1 2), another thread", 1.0), ""),
    (
        "an error caught in Rust, with its condition, restarts and frames, inside `enter`",
        Figure::Time("error with its condition, inside enter", 1.0),
        "≤ 15 µs",
    ),
    (
        "an error caught in Rust, with its condition, restarts and frames, from another thread",
        Figure::Time("error with its condition, another thread", 1.0),
        "",
    ),
    (
        "throughput of two threads relative to one thread, with calls of 1 ms",
        Figure::Ratio(2.0, "a call of 1 ms, one thread", "a call of 1 ms, two threads at once"),
        "≥ 1.8",
    ),
    (
        "throughput of two threads relative to one thread, with calls of 100 µs",
        Figure::Ratio(2.0, "a call of 100 µs, one thread", "a call of 100 µs, two threads at once"),
        "",
    ),
    (
        "throughput of two threads relative to one thread, with calls of 10 µs",
        Figure::Ratio(2.0, "a call of 10 µs, one thread", "a call of 10 µs, two threads at once"),
        "",
    ),
    (
        "throughput of two threads relative to one thread, with calls that return at once",
        Figure::Ratio(
            2.0,
            "a call that returns at once, one thread",
            "a call that returns at once, two threads at once",
        ),
        "",
    ),
    ("`Lisp::builder().boot()` and the first evaluation", Figure::Time("", 1.0), "≤ 20 ms"),
];

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s if s >= 1e-4 => format!("{:.0} µs", s * 1e6),
        s if s >= 1e-6 => format!("{:.1} µs", s * 1e6),
        s => format!("{:.0} ns", s * 1e9),
    }
}

/// Returns the version of a dependency of this program.
fn locked_version(name: &str) -> &str {
    let mut lines = include_str!("../../Cargo.lock").lines();
    let own = format!("name = \"{name}\"");
    lines.by_ref().find(|line| *line == own);
    lines.next().and_then(|line| line.split('"').nth(1)).unwrap_or_default()
}

/// Returns an engine's name and version, as the page shows them.
fn version(samples: &Samples, engine: &str) -> String {
    match engine {
        "sbcl" => format!("this crate, SBCL {}", samples.version(engine)),
        "luajit" | "lua54" => format!("{}, mlua {}", samples.version(engine), locked_version("mlua")),
        "python" => format!("CPython {}, PyO3 {}", samples.version(engine), locked_version("pyo3")),
        "steel" => format!("steel {}", locked_version("steel-core")),
        _ => format!("rhai {}", locked_version("rhai")),
    }
}

/// Returns a table with a row for each engine. Each time is followed by its ratio to this crate's time.
fn peers(samples: &Samples) -> String {
    let mut text = String::from("| |");
    for (_, name) in BENCHMARKS {
        let _ = write!(text, " {name} |");
    }
    let _ = writeln!(text, "\n|---|{}", "---|".repeat(BENCHMARKS.len()));
    for (engine, _) in ENGINES {
        let _ = write!(text, "| {} |", version(samples, engine));
        for (benchmark, _) in BENCHMARKS {
            match samples.median(engine, benchmark).zip(samples.median(ENGINES[0].0, benchmark)) {
                Some((own, _)) if engine == ENGINES[0].0 => {
                    let _ = write!(text, " {} |", time(own));
                }
                Some((own, first)) => {
                    let ratio = own / first;
                    let ratio = if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") };
                    let _ = write!(text, " {} ({ratio}) |", time(own));
                }
                None => text.push_str(" – |"),
            }
        }
        text.push('\n');
    }
    text
}

fn calls(samples: &Samples) -> String {
    let of = |name| samples.median("criterion", name);
    let mut text = String::from("| operation | time or ratio | goal |\n|---|---|---|\n");
    for (label, figure, goal) in CALLS {
        let value = match figure {
            Figure::Time("", _) => samples.median("sbcl", "start").map(time),
            Figure::Time(name, calls) => of(name).map(|seconds| time(seconds / calls)),
            Figure::Ratio(factor, one, other) => {
                of(one).zip(of(other)).map(|(one, other)| format!("{:.2}", factor * one / other))
            }
        };
        let _ = writeln!(text, "| {label} | {} | {goal} |", value.as_deref().unwrap_or("–"));
    }
    text
}

fn evaluations(samples: &Samples) -> String {
    let mut text = String::from("| `(+ 1 2)` | start and first answer | each later evaluation |\n|---|---|---|\n");
    let rows = [
        ("sbcl", "evaluation inside enter", "this crate, inside `enter`".to_owned()),
        ("sbcl", "evaluation", "this crate, from another thread".to_owned()),
        ("pipes", "evaluation", format!("a child process of {}, pipes", samples.version("pipes"))),
        ("swank", "evaluation", format!("Swank in {}, TCP", samples.version("swank"))),
    ];
    for (engine, benchmark, label) in rows {
        let of = |benchmark| samples.median(engine, benchmark).map_or_else(|| "–".to_owned(), time);
        let _ = writeln!(text, "| {label} | {} | {} |", of("start"), of(benchmark));
    }
    text
}

/// Returns the note that explains the dashes in the tables; an empty text if there are none.
fn notes(samples: &Samples) -> String {
    let notes: Vec<String> = samples.notes().map(|(engine, note)| format!("{engine} {note}")).collect();
    if notes.is_empty() {
        String::new()
    } else {
        format!("\nA dash marks a figure that was not measured: {}.", notes.join("; "))
    }
}

/// Returns the page: the text and the tables.
fn page(samples: &Samples) -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "# Benchmarks of the library

`make bench` measures all figures in one run, and writes this page and the plot. The figures below were measured on
{arch} {os} with {processors} processors.

## Comparison with other languages for Rust programs

{peers}
![The figures of this table and of one evaluation as plots, with logarithmic scales](benchmarks.svg)

The figures are medians; the ratio to this crate's time is in parentheses. Each round runs one process for each engine, one
process after another. In each process, each program runs once to warm up, and then three times for the measurement; each
result is checked. The programs are written in the style that is usual for fast code in each language. The Lisp programs
therefore have type declarations, which SBCL checks, and a declaration makes `fib` inline, which unrolls the recursion once;
LuaJIT unrolls the recursion without a declaration. The keys of the hash table are widely spaced integers, so that no engine
can use a vector in place of the table. Rhai's maps accept only strings as keys, so the rhai program converts the integers.
Steel's tables are immutable, but are changed in place if nothing else refers to them. Each step of the mandelbrot program is
a chain of three dependent floating-point operations, so all engines that compile to machine code are limited by the latency
of these operations. The host function adds two integers, and is registered as each crate's guide recommends. The start time
includes the first evaluation, `1 + 2`. [benches/peers](../benches/peers) contains the programs. If other work shares the
processors, times can double, and ratios are inaccurate.{notes}

## One evaluation, compared with other ways to evaluate

{evaluations}
## Calls between Rust and Lisp

{calls}
The figures are criterion's medians and ratios of these medians, from [benches/library.rs](../benches/library.rs), except the
last figure, which is from the first table. A call from another thread is handed over to a Lisp thread. While calls follow
one another within a few milliseconds, the Lisp thread polls for 50 µs before it sleeps. A call that has to wake a sleeping
processor takes longer: on a virtual machine, 10 to 40 µs longer were measured.
",
        arch = std::env::consts::ARCH.replace('_', "-"),
        os = match std::env::consts::OS {
            "linux" => "Linux",
            "macos" => "macOS",
            other => other,
        },
        notes = notes(samples),
        peers = peers(samples),
        evaluations = evaluations(samples),
        calls = calls(samples),
    )
}

/// Writes the page and the plot below `root`.
fn draw(samples: &Samples, root: &Path) -> Result<(), AnyError> {
    std::fs::write(root.join("docs/benchmarks.md"), page(samples))?;
    Ok(plot(samples, &root.join("docs/benchmarks.svg")).map_err(|error| error.to_string())?)
}

fn main() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, criterion, root] = &arguments[..] else {
        return Err("usage: draw SAMPLES CRITERION ROOT".into());
    };
    let mut samples = Samples::default();
    samples.read(&std::fs::read_to_string(file)?)?;
    samples.read_criterion(criterion.as_ref())?;
    draw(&samples, root.as_ref())
}

const SIZE: (u32, u32) = (900, 500);
const FONT: &str = "sans-serif";
const OWN: RGBColor = RGBColor(0xc0, 0x39, 0x2b);
const PEERS: RGBColor = RGBColor(0x34, 0x6d, 0xa8);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);

/// Draws a panel for each benchmark, with a dot for each engine on a logarithmic scale of time.
fn plot(samples: &Samples, file: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let one_evaluation = [("sbcl", "this crate")].into_iter().chain(OTHERS).collect::<Vec<_>>();
    let panels = BENCHMARKS.iter().map(|(benchmark, title)| (*benchmark, *title, ENGINES.to_vec())).chain([(
        "evaluation",
        "one evaluation",
        one_evaluation,
    )]);
    for ((benchmark, title, engines), area) in panels.zip(root.split_evenly((3, 2))) {
        let dots: Vec<(&str, &str, f64)> = engines
            .into_iter()
            .filter_map(|(engine, label)| Some((engine, label, samples.median(engine, benchmark)?)))
            .collect();
        let least = dots.iter().map(|dot| dot.2).fold(f64::INFINITY, f64::min);
        let most = dots.iter().map(|dot| dot.2).fold(0.0, f64::max);
        // The axis covers whole powers of ten.
        let (low, high) = (10_f64.powf(least.log10().floor()), 10_f64.powf(most.log10().ceil()));
        let mut chart = ChartBuilder::on(&area)
            .caption(title, (FONT, 15))
            .margin(6)
            .margin_right(60)
            .set_label_area_size(LabelAreaPosition::Left, 120)
            .set_label_area_size(LabelAreaPosition::Bottom, 22)
            .build_cartesian_2d((low..high).log_scale(), 0.0..ENGINES.len() as f64)?;
        let decades = (high / low).log10().round() as usize;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_labels(decades + 1)
            .x_max_light_lines(0)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .label_style((FONT, 11))
            .x_label_formatter(&|seconds| scale(*seconds))
            .draw()?;
        for (place, (engine, label, seconds)) in dots.into_iter().enumerate() {
            let y = ENGINES.len() as f64 - place as f64 - 0.5;
            let colour = if engine == "sbcl" { OWN } else { PEERS };
            let (left, dot) = (chart.backend_coord(&(low, y)), chart.backend_coord(&(seconds, y)));
            chart.draw_series([PathElement::new([(low, y), (seconds, y)], colour.mix(0.4).stroke_width(2))])?;
            chart.draw_series([Circle::new((seconds, y), 4, colour.filled())])?;
            let style = |side| (FONT, 12).into_font().color(&BLACK).pos(Pos::new(side, VPos::Center));
            root.draw(&Text::new(label, (left.0 - 8, left.1), style(HPos::Right)))?;
            root.draw(&Text::new(time(seconds), (dot.0 + 8, dot.1), style(HPos::Left)))?;
        }
    }
    root.present()?;
    Ok(())
}

/// Returns a power of ten seconds as a time with a unit.
fn scale(seconds: f64) -> String {
    let power = seconds.log10().round() as i32;
    let (unit, power) = match power {
        0.. => ("s", power),
        -3..0 => ("ms", power + 3),
        -6..-3 => ("µs", power + 6),
        _ => ("ns", power + 9),
    };
    format!("{} {unit}", 10_f64.powi(power))
}
