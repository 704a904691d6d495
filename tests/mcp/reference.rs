//! The pages of docs/reference/ match the program: they are generated from the tools' schemas, clap's definitions and
//! the tables in src/, with examples that the real server answers.
//!
//! The tests compare; `make reference` (`SBCL_MCP_UPDATE_REFERENCE=1`) writes the pages.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use regex::Regex;
use sbcl::cli::exit_status::EXIT_STATUSES;
use sbcl::environment::VARIABLES;
use sbcl::result_kind::RESULT_KINDS;
use serde_json::{Value, json};

use crate::book::{ROOT, Run, Step, is_updating, run, settled, steps};
use crate::client::Server;

/// The project that the examples of the tools work on.
const SHOP: [(&str, &str); 3] = [
    (
        "shop.asd",
        "(defsystem \"shop\" :components ((:file \"shop\")))\n\n\
         (defsystem \"shop/tests\"\n  :depends-on (\"shop\" \"sb-rt\")\n  :components ((:file \"tests\"))\n  \
         :perform (test-op (o c) (uiop:symbol-call :sb-rt :do-tests)))\n",
    ),
    (
        "shop.lisp",
        "(defpackage :shop (:use :cl) (:export #:price #:total))\n(in-package :shop)\n\n\
         (defun price (item)\n  \"The price of ITEM in cents.\"\n  (ecase item (:apple 30) (:pear 45)))\n\n\
         (defun total (items)\n  \"The price of all ITEMS.\"\n  (reduce #'+ (mapcar #'price items)))\n",
    ),
    (
        "tests.lisp",
        "(defpackage :shop-tests (:use :cl :sb-rt))\n(in-package :shop-tests)\n\n\
         (deftest one-apple (shop:total '(:apple)) 30)\n(deftest no-items (shop:total '()) 0)\n\
         (deftest both (shop:total '(:apple :pear)) 57)\n",
    ),
];

/// The examples of the tools, one story in the order of the page, in the notation of the examples in `docs/`
/// (tests/mcp/book.rs).
const EXAMPLES: [(&str, &str); 20] = [
    ("evaluate-lisp", "→ evaluate-lisp\n  (defun square (x) (* x x))\n  (format t \"Squaring.~%\")\n  (square 12)\n"),
    ("load-system", "→ load-system {\"system\": \"shop\"}\n"),
    ("run-tests", "→ run-tests {\"system\": \"shop/tests\"}\n"),
    ("list-definitions", "→ list-definitions {}\n"),
    ("describe-symbol", "→ describe-symbol {\"name\": \"shop:total\", \"source\": true}\n"),
    ("find-symbols", "→ find-symbols {\"query\": \"with-open\", \"package\": \"cl\"}\n"),
    ("find-references", "→ find-references {\"name\": \"shop:price\"}\n"),
    ("macroexpand", "→ macroexpand {\"form\": \"(push :pear items)\"}\n"),
    (
        "describe-last-error",
        "→ evaluate-lisp {\"on-error\": \"debug\"}\n  (shop:total '(:apple :plum))\n\n→ describe-last-error {}\n",
    ),
    ("get-backtrace", "→ get-backtrace {\"from\": 1, \"max-frames\": 1, \"locals\": true}\n"),
    ("invoke-restart", "→ invoke-restart {\"restart\": \"ABORT\"}\n"),
    (
        "eval-in-frame",
        "→ evaluate-lisp {\"on-error\": \"debug\"}\n  (shop:total '(:apple :fig))\n\n\
         → eval-in-frame {\"frame\": 1, \"code\": \"(list (square 5) shop::items)\"}\n",
    ),
    ("resume-from-frame", "→ resume-from-frame {\"frame\": 0, \"return\": \"45\"}\n"),
    ("abort-evaluation", "→ evaluate-lisp {\"wait\": 0.2}\n  (sleep 60)\n\n→ abort-evaluation {\"id\": 7}\n"),
    (
        "check-evaluation",
        "→ evaluate-lisp {\"background\": true}\n  (progn (sleep 0.1) (square 13))\n\n\
         → check-evaluation {\"id\": 8, \"wait\": 60}\n",
    ),
    (
        "trace-calls",
        "→ trace-calls {\"functions\": [\"shop:total\", \"shop:price\"]}\n  (shop:total '(:apple :pear))\n",
    ),
    (
        "profile",
        "→ profile {\"limit\": 1}\n  (defun spin (n) (declare (fixnum n)) (loop while (plusp n) do (decf n)))\n  (spin 300000000)\n",
    ),
    ("checkpoint", "→ checkpoint {\"action\": \"save\", \"name\": \"before the sale\"}\n"),
    ("reset-session", "→ reset-session {}\n"),
    ("configure-limits", "→ configure-limits {\"timeout\": 120}\n"),
];

/// The examples of the kinds of failure.
const FAILURES: [(&str, &str); 5] = [
    ("TIMEOUT", "→ evaluate-lisp {\"timeout\": 0.2}\n  (loop)\n"),
    (
        "CANCELLED",
        "→ evaluate-lisp {\"wait\": 0.2}\n  (sleep 60)\n\n→ abort-evaluation {\"id\": 2}\n\n\
         → check-evaluation {\"id\": 2, \"wait\": 60}\n",
    ),
    (
        "HEAP-EXHAUSTED",
        "<!-- server: --heap 256M -->\n→ evaluate-lisp\n  (let ((all '())) (loop (push (make-array 100000) all)))\n",
    ),
    (
        "THREAD-TERMINATED",
        "→ evaluate-lisp {\"background\": true}\n  (sb-thread:abort-thread)\n\n→ check-evaluation {\"wait\": 60}\n",
    ),
    (
        "IMAGE-LOST",
        "→ evaluate-lisp\n  (defun twice (x) (* 2 x))\n\n\
         → evaluate-lisp\n  (alien-funcall (extern-alien \"abort\" (function void)))\n\n→ evaluate-lisp\n  (twice 21)\n",
    ),
];

/// Commands that show exit statuses.
const STATUSES: &str = "$ sbcl-mcp eval '(+ 1 2)'; echo \"status $?\"\n$ sbcl-mcp eval '(error \"no\")' >report; echo \"status $?\"\n\
                        $ sbcl-mcp eval --no-such-option 1 2>report; echo \"status $?\"\n\
                        $ sbcl-mcp test no-such-system >report; echo \"status $?\"\n\
                        $ echo '(car (list 1 2)' | sbcl-mcp check - >report; echo \"status $?\"\n";

/// Variables that only builds, tests and scripts of the repository use.
const OF_THE_REPOSITORY: [(&str, &str); 20] = [
    ("SBCL_MCP_BIN", "tests of the server and of the SDKs: the absolute path of the program under test"),
    ("SBCL_MCP_BUILD", "the build: the identity of library and core, compiled into the program"),
    ("SBCL_MCP_CHECKPOINT_CASES", "`make checkpoint-model`: the number of sequences"),
    ("SBCL_MCP_CHECK_SOURCES", "tests: directories with Lisp source that `check` must accept, separated by colons"),
    ("SBCL_MCP_CORE_OUTPUT", "the build: the core to write"),
    ("SBCL_MCP_FASL_DIR", "the build: the directory for compiled files"),
    ("SBCL_MCP_FUZZ_CASES", "`make fuzz`: the number of random cases of each test"),
    ("SBCL_MCP_HOST_OUTPUT", "the build: the compiled Lisp side to write"),
    ("SBCL_MCP_INTERNALS_OUTPUT", "`make sbcl-internals`: the table to write"),
    ("SBCL_MCP_KILLS", "`make kill`: the number of workers to kill"),
    ("SBCL_MCP_LISP_DIR", "tests: the directory of the Lisp side"),
    ("SBCL_MCP_LISP_LIBRARIES", "tests: a directory with Parachute, Rove, lisp-unit2 and their dependencies"),
    ("SBCL_MCP_LOADED_SAVES", "`make checkpoint-load`: the number of checkpoints"),
    ("SBCL_MCP_MUTANTS", "`make mutants`: the number of mutants for each library"),
    ("SBCL_MCP_OLDEST_GLIBC", "`make dist`: the oldest C library that packages must run with"),
    ("SBCL_MCP_ROUNDS", "`make flaky`, `make bench`: the number of rounds"),
    ("SBCL_MCP_SESSION_KILLS", "`make kill`: the number of servers with a session to kill"),
    ("SBCL_MCP_SOAK_EVALUATIONS", "`make soak`: the number of evaluations"),
    (
        "SBCL_MCP_UPDATE_REFERENCE",
        "`make reference`: if 1, tests write the generated pages and the answers of examples",
    ),
    ("SBCL_MCP_VERSION", "the build: SBCL's version, compiled into the program"),
];

/// Variables of the build, by sbcl-core's settings.
const OF_THE_BUILD: [(&str, &str); 9] = [
    (
        sbcl_core::settings::PREBUILT,
        "The absolute path of a directory with a ready `libsbcl.so` and `sbcl.core`, which are then not built.",
    ),
    (
        sbcl_core::settings::SOURCE,
        "The absolute path of SBCL's source: the pinned archive, or a directory with SBCL of the pinned version.",
    ),
    (
        sbcl_core::settings::NEXT,
        "The absolute path of a directory with SBCL of any version, which is built in place of the pinned SBCL.",
    ),
    (
        sbcl_core::settings::BOOTSTRAP,
        "The command that starts the Lisp that builds SBCL (default `sbcl`), split at spaces.",
    ),
    (sbcl_core::settings::COMPILER, "The C compiler (default `cc`)."),
    (
        sbcl_core::settings::CROSS_COMPILER,
        "The C compiler for aarch64 Linux on other machines (default `aarch64-linux-gnu-gcc`).",
    ),
    (
        sbcl_core::settings::SYSROOT,
        "The directory with an aarch64 Linux system, whose C library programs in QEMU use (default \
         `/usr/aarch64-linux-gnu`).",
    ),
    (
        "XDG_CACHE_HOME",
        "Base directory for caches (default `~/.cache`); the build's cache is its subdirectory `sbcl-mcp`.",
    ),
    ("HOME", "The home directory, which contains the default base directory for caches."),
];

/// Returns the lines of a page. In its examples, parts that differ from run to run are masked, and the backtraces of
/// interrupted evaluations omitted: the innermost frames depend on the moment of the interruption.
fn settled_examples(page: &str) -> Vec<String> {
    let (mut is_example, mut is_interrupted) = (false, false);
    let mut lines = Vec::new();
    for line in page.lines() {
        is_example ^= line.starts_with("```");
        if !is_example {
            lines.push(line.to_owned());
            continue;
        }
        if let Some(kind) = line.strip_prefix("[ERROR] ") {
            is_interrupted = ["TIMEOUT", "CANCELLED", "HEAP-EXHAUSTED"].contains(&kind);
        }
        let is_frame = line.split_once(": ").is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        if !(is_interrupted && is_frame) {
            lines.push(settled(line));
        }
    }
    lines
}

/// Compares a page with its file, or writes the file (`make reference`).
#[track_caller]
fn page(name: &str, title: &str, source: &str, text: &str) {
    let path = Path::new(ROOT).join("docs/reference").join(name);
    let page = format!(
        "# {title}\n\n<!-- Generated by `make reference` from {source}. Change these, not this page. -->\n\n{text}"
    );
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    if settled_examples(&old) == settled_examples(&page) {
        return;
    }
    assert!(is_updating(), "docs/reference/{name} is out of date: run `make reference`. It should be:\n{page}");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, page).unwrap();
}

/// Runs the calls of an example with the server of `run`. Returns the example with its answers.
fn answered(run: &mut Run, text: &str) -> String {
    let page = format!("```text\n{text}```\n");
    let (page, _) = crate::book::run_with(run, "an example", &page, |_, _, _| false, |_, _| false);
    page
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Returns the type of an argument, or its choices.
fn type_of(schema: &Value) -> String {
    let name = schema["type"].as_str().expect("a type");
    match schema["enum"].as_array() {
        Some(choices) => {
            choices.iter().map(|choice| format!("`{}`", choice.as_str().unwrap())).collect::<Vec<_>>().join(", ")
        }
        None if name == "array" => format!("array of {}s", schema["items"]["type"].as_str().unwrap()),
        None => name.to_owned(),
    }
}

/// Returns the range of an argument.
fn range_of(schema: &Value) -> String {
    let number = |key: &str| schema.get(key).map(|value| value.to_string().trim_end_matches(".0").to_owned());
    match (number("minimum"), number("maximum")) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        (Some(least), None) => format!("{least} or more"),
        (None, Some(most)) => format!("at most {most}"),
        (None, None) => String::new(),
    }
}

/// Returns the table of a tool's arguments.
fn arguments(tool: &Value) -> String {
    let schema = &tool["inputSchema"];
    let properties = schema["properties"].as_object().unwrap();
    if properties.is_empty() {
        return "The tool has no arguments.\n".to_owned();
    }
    let required: Vec<_> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut text = "| argument | type | default | range | meaning |\n|---|---|---|---|---|\n".to_owned();
    let (first, rest): (Vec<_>, Vec<_>) = properties.iter().partition(|(name, _)| required.contains(&name.as_str()));
    for (name, property) in first.into_iter().chain(rest) {
        let default = match property.get("default") {
            _ if required.contains(&name.as_str()) => "required".to_owned(),
            Some(default) => format!("`{}`", default.to_string().trim_matches('"').trim_end_matches(".0")),
            None if property["type"] == "boolean" => "`false`".to_owned(),
            None => String::new(),
        };
        let meaning = property["description"].as_str().unwrap();
        let row = [type_of(property).as_str(), &default, &range_of(property), meaning].map(cell).join(" | ");
        _ = writeln!(text, "| `{name}` | {row} |");
    }
    text
}

/// Returns the effect of a tool on the session, as its annotations declare it.
fn effect(tool: &Value) -> &'static str {
    match (&tool["annotations"]["readOnlyHint"], &tool["annotations"]["destructiveHint"]) {
        (Value::Bool(true), _) => "Read-only: the tool itself changes nothing.",
        (_, Value::Bool(false)) => "The tool changes settings only.",
        _ => "This tool can change anything: a client that asks for confirmation should ask before calling it.",
    }
}

#[test]
fn the_reference_of_the_tools_is_up_to_date() {
    let mut server = Server::ready();
    let listed = server.request("tools/list", json!({}));
    let tools = listed["result"]["tools"].as_array().unwrap();
    let names: BTreeSet<_> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, EXAMPLES.iter().map(|(name, _)| *name).collect(), "each tool has its example");
    let mut run = Run::new();
    for (name, text) in SHOP {
        run.perform(&Step::File(name.to_owned(), text.to_owned()));
    }
    let mut text = String::from(
        "Each tool with its arguments, and an example that the real server has answered. The examples form one session, in \
         this order. A line `→ TOOL {…}` is a call; indented lines below it are the argument `code`.\n\n\
         When a client connects, the server sends instructions on how to use the tools. Explanations are in \
         [How the tools work together](../explanation/tools.md).\n",
    );
    for (name, example) in EXAMPLES {
        let tool = tools.iter().find(|tool| tool["name"] == name).unwrap();
        let description = tool["description"].as_str().unwrap().replace('<', "\\<");
        let table = arguments(tool);
        let example = answered(&mut run, example);
        _ = write!(text, "\n## {name}\n\n{description}\n\n{}\n\n{table}\n{example}", effect(tool));
    }
    page("tools.md", "Tools", "the tools' schemas", &text);
}

#[test]
fn the_reference_of_the_options_is_up_to_date() {
    let text = format!(
        "`sbcl-mcp` without a command serves an MCP client on stdin and stdout. `sbcl-mcp COMMAND --help` prints what this \
         page says about a command.\n\n{}",
        sbcl::cli::reference::options()
    );
    page("options.md", "Options and commands", "the definitions of the command line", &text);
}

#[test]
fn the_reference_of_the_exit_statuses_is_up_to_date() {
    let mut text = "| command | status | meaning |\n|---|---|---|\n".to_owned();
    for status in EXIT_STATUSES {
        _ = writeln!(text, "| `{}` | {} | {} |", status.command, status.status, cell(status.meaning));
    }
    let (examples, _) = run("statuses", &format!("```console\n{STATUSES}```\n"), |_, _, _| false, |_, _| false);
    _ = write!(text, "\nFor instance:\n\n{examples}");
    page("exit-statuses.md", "Exit statuses", "src/cli/exit_status.rs", &text);
}

#[test]
fn the_reference_of_the_environment_is_up_to_date() {
    let mut text = "## The program\n\n| variable | effect | default |\n|---|---|---|\n".to_owned();
    for variable in VARIABLES {
        _ = writeln!(text, "| `{}` | {} | {} |", variable.name, cell(variable.effect), cell(variable.default));
    }
    text += "\nBy default, programs that Lisp code starts get the server's environment.\n";
    text += "\n## Building\n\n| variable | effect |\n|---|---|\n";
    for (name, effect) in OF_THE_BUILD {
        _ = writeln!(text, "| `{name}` | {effect} |");
    }
    text += "\n## Work on this repository\n\n| variable | used by |\n|---|---|\n";
    for (name, user) in OF_THE_REPOSITORY {
        _ = writeln!(text, "| `{name}` | {user} |");
    }
    page("environment.md", "Environment variables", "src/environment.rs and tests/mcp/reference.rs", &text);
}

/// Returns the repository's own files below these directories.
fn sources(directories: &[&str]) -> Vec<PathBuf> {
    let mut waiting: Vec<_> = directories.iter().map(|name| Path::new(ROOT).join(name)).collect();
    let mut files = Vec::new();
    while let Some(path) = waiting.pop() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !["node_modules", "target", "__pycache__"].contains(&&*name) {
            waiting.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.is_file() {
            files.push(path);
        }
    }
    files
}

#[test]
fn every_environment_variable_of_the_sources_is_in_the_reference() {
    let known: BTreeSet<_> = VARIABLES
        .iter()
        .map(|variable| variable.name)
        .chain(OF_THE_BUILD.iter().chain(&OF_THE_REPOSITORY).map(|(name, _)| *name))
        .collect();
    for name in sbcl_core::settings::VARIABLES {
        assert!(known.contains(name), "{name} is not in the reference");
    }
    let own = Regex::new(r"SBCL_MCP_[A-Z_]+[A-Z]").unwrap();
    let read = Regex::new(r#"env::var(?:_os)?\([ \n]*"([A-Z_]+)""#).unwrap();
    let places = [
        "src",
        "lisp",
        "ffi",
        "build.rs",
        "sbcl-core/src",
        "lisp-syntax/src",
        "sbcl-build/src",
        "tests",
        "scripts",
        "Makefile",
    ];
    let mut unknown = BTreeSet::new();
    for path in sources(&places) {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let in_program = path.starts_with(Path::new(ROOT).join("src"));
        let names = own.find_iter(&text).map(|found| found.as_str());
        let names =
            names.chain(read.captures_iter(&text).filter(|_| in_program).map(|found| found.get(1).unwrap().as_str()));
        // `SCHEDULES` belongs to a unit test.
        let names = names.filter(|name| !known.contains(*name) && *name != "SCHEDULES");
        unknown.extend(names.map(|name| format!("{name} in {}", path.display())));
    }
    assert!(unknown.is_empty(), "not in the reference: {unknown:#?}");
}

#[test]
fn the_reference_of_the_result_kinds_is_up_to_date() {
    let mut text = String::from(
        "A failed evaluation is reported as `[ERROR]` with a name. The name is usually the type of a Lisp condition, \
         such as `DIVISION-BY-ZERO`. The following names come from the server instead:\n\n\
         | name | cause | afterwards | remedy |\n|---|---|---|---|\n",
    );
    for kind in RESULT_KINDS {
        let row = [kind.cause, kind.afterwards, kind.remedy].map(cell).join(" | ");
        _ = writeln!(text, "| [`{}`](#{}) | {row} |", kind.name, kind.name.to_lowercase());
    }
    assert_eq!(RESULT_KINDS.map(|kind| kind.name), FAILURES.map(|(name, _)| name), "each kind has its example");
    for (name, example) in FAILURES {
        let mut run = Run::new();
        let example =
            example.strip_prefix("<!-- server: ").map_or(("", example), |rest| rest.split_once(" -->\n").unwrap());
        let (options, example) = example;
        if !options.is_empty() {
            run.perform(&Step::Server(options.split(' ').map(str::to_owned).collect()));
        }
        if name == "CANCELLED" {
            run.perform(&steps("```text\n→ evaluate-lisp {\"code\": \"1\"}\n```\n")[0].1);
        }
        let with = if options.is_empty() { String::new() } else { format!("With `{options}`:\n\n") };
        let example = answered(&mut run, example);
        _ = write!(text, "\n## {name}\n\n{with}{example}");
    }
    page("result-kinds.md", "Result kinds", "src/result_kind.rs", &text);
}

#[test]
fn failures_that_the_server_reports_itself_are_in_the_table() {
    let failed = Regex::new(r#"failed_outcome\([ \n]*"([A-Z-]+)""#).unwrap();
    let known: BTreeSet<_> = RESULT_KINDS.iter().map(|kind| kind.name).chain(["SIMPLE-ERROR"]).collect();
    let mut count = 0;
    for path in sources(&["src"]) {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for found in failed.captures_iter(text.split("#[cfg(test)]").next().unwrap_or_default()) {
            assert!(known.contains(&found[1]), "{}: {}", path.display(), &found[1]);
            count += 1;
        }
    }
    assert!(count > 0, "the function that makes such a failure has another name");
}

/// Returns the SVG of a badge: white text, on grey for the label and on blue for the value.
fn badge(label: &str, value: &str) -> String {
    let width = |text: &str| 7 * text.chars().count() + 12;
    let (left, right) = (width(label), width(value));
    let text = |center: usize, length: usize, text: &str| {
        format!("<text x=\"{center}\" y=\"14\" textLength=\"{}\">{text}</text>", length - 12)
    };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"20\" role=\"img\" aria-label=\"{label}: {value}\">\n\
         <title>{label}: {value}</title>\n\
         <clipPath id=\"r\"><rect width=\"{0}\" height=\"20\" rx=\"3\"/></clipPath>\n\
         <g clip-path=\"url(#r)\"><rect width=\"{left}\" height=\"20\" fill=\"#555\"/>\
         <rect x=\"{left}\" width=\"{right}\" height=\"20\" fill=\"#1f6a96\"/></g>\n\
         <g fill=\"#fff\" text-anchor=\"middle\" font-family=\"Verdana, DejaVu Sans, sans-serif\" font-size=\"11\">\n\
         {1}\n{2}\n</g>\n</svg>\n",
        left + right,
        text(left / 2, left, label),
        text(left + right / 2, right, value),
    )
}

#[test]
fn the_badges_of_the_readme_are_up_to_date() {
    let manifest = std::fs::read_to_string(Path::new(ROOT).join("Cargo.toml")).unwrap();
    let field = |name: &str| {
        let value = manifest.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
        value.unwrap_or_else(|| panic!("Cargo.toml has {name}")).trim_matches('"').to_owned()
    };
    let readme = std::fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap();
    for (name, label, value) in [
        ("licence", "licence", field("license").replace(" OR ", " or ")),
        ("sbcl", "SBCL", sbcl_core::pin::VERSION.to_owned()),
        ("platform", "platform", "Linux x86-64".to_owned()),
        ("rust", "Rust", format!("{} or newer", field("rust-version"))),
    ] {
        let file = format!("docs/badges/{name}.svg");
        assert!(readme.contains(&format!("![{label}]({file})")), "README.md lacks {file}");
        let path = Path::new(ROOT).join(&file);
        let badge = badge(label, &value);
        if std::fs::read_to_string(&path).is_ok_and(|old| old == badge) {
            continue;
        }
        assert!(is_updating(), "{file} is out of date: run `make reference`");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, badge).unwrap();
    }
}
