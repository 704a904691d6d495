//! run-tests.

use std::time::Duration;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::json;

use super::{Arguments, Fault, Step, background, define, later};
use crate::session::operation::Operation;
use crate::{Evaluation, Limits, TimeLimit};

pub(super) const NAME: &str = "run-tests";

/// Seconds that a test may take unless asked otherwise.
const TIMEOUT: f64 = 60.0;

const DESCRIPTION: &str = "Run the tests of a system, of a package, or the test or suite of a name, and see at once what \
    is wrong: the counts; then, for each test that failed, file and line, the form, what was expected and what came, or \
    the error with the first frames of the code where it was signalled, which describe-last-error and get-backtrace tell \
    more of by its identifier. Knows FiveAM, Parachute, Rove, lisp-unit2, sb-rt and RT; of other frameworks runs the \
    system's ASDF test-op as a single test. A system is loaded first if it is not. Example: {\"system\": \"my-app\"}.";

pub(super) fn tool() -> Tool {
    let mut properties = json!({
        "system": {
            "type": "string",
            "description": "ASDF system whose tests to run, by its test-op: `my-app` or `my-app/tests`. One of system, package and name is needed.",
        },
        "package": {
            "type": "string",
            "description": "Run the tests whose names belong to this package.",
        },
        "name": {
            "type": "string",
            "description": "Run this test, or the tests of this suite or tag, as `my-app-tests::parse-empty` or `parse-empty`.",
        },
        "timeout": {
            "type": "number",
            "minimum": 0.1,
            "maximum": Limits::MAX_TIMEOUT_SECONDS,
            "default": TIMEOUT,
            "description": "Seconds that each test may take; one that takes longer fails, and the others go on.",
        },
        "reload": {
            "type": "boolean",
            "default": false,
            "description": "First load what has changed on disk of the system and its tests.",
        },
    });
    background::add_properties(&mut properties);
    define(
        NAME,
        "Run tests",
        DESCRIPTION,
        properties,
        &[],
        ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true),
    )
}

/// What to run.
enum Selection {
    System(String),
    Package(String),
    Name(String),
}

impl Selection {
    fn take(arguments: &mut Arguments) -> Result<Self, Fault> {
        let mut given = Vec::new();
        for (name, make) in
            [("system", Self::System as fn(String) -> Self), ("package", Self::Package), ("name", Self::Name)]
        {
            given.extend(arguments.optional_text(name)?.map(make));
        }
        match (given.pop(), given.is_empty()) {
            (Some(selection), true) => Ok(selection),
            _ => Err(Fault::Value(format!("{NAME} needs one of system, package and name."))),
        }
    }

    /// The argument of the operation.
    fn argument(&self) -> (&'static str, &str) {
        match self {
            Self::System(name) => ("system", name),
            Self::Package(name) => ("package", name),
            Self::Name(name) => ("name", name),
        }
    }

    /// What makes another image that the same can be run in, as code: tests need not be run again for that.
    fn code(&self) -> String {
        match self {
            Self::System(name) => format!("(asdf:load-system {:?}) ; and run-tests", name.to_lowercase()),
            Self::Package(name) | Self::Name(name) => format!("(values) ; run-tests {}", name.replace('\n', " ")),
        }
    }
}

pub(super) fn call(arguments: JsonObject) -> Result<Step, Fault> {
    let known = &["system", "package", "name", "timeout", "reload", "background", "wait"];
    let mut arguments = Arguments::new(NAME, known, 0, arguments)?;
    let selection = Selection::take(&mut arguments)?;
    let allowed = || format!("a number of seconds from 0.1 to {}", Limits::MAX_TIMEOUT_SECONDS);
    let timeout = arguments.number("timeout", 0.1..=Limits::MAX_TIMEOUT_SECONDS, allowed)?.unwrap_or(TIMEOUT);
    let timeout = u64::try_from(Duration::from_secs_f64(timeout).as_millis()).unwrap_or(u64::MAX);
    let (kind, name) = selection.argument();
    let operation = Operation::new("run-tests")
        .with(kind, name)
        .with("timeout", timeout)
        .with("reload", arguments.flag("reload")?)
        .with_errors();
    let mut evaluation = Evaluation::new(selection.code());
    // Each test has a limit of its own.
    evaluation.timeout = TimeLimit::None;

    let patience = background::patience(&mut arguments)?;
    later(move |call| {
        background::evaluate(call, background::Job::operation(evaluation, operation), patience, |call, outcome| {
            call.answer(Ok::<_, Fault>(outcome));
        });
    })
}
