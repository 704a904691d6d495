//! Tests of the order of providers, and of the messages if no provider has the source.

use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::pin;
use crate::scratch::Scratch;

struct FakeProvider {
    name: &'static str,
    outcome: fn() -> LookupOutcome,
    lookups: Rc<Cell<u32>>,
}

impl Provider for FakeProvider {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn find(&self, _: &Progress) -> LookupOutcome {
        self.lookups.set(self.lookups.get() + 1);
        (self.outcome)()
    }
}

/// The name of a fake provider, and a function that returns the result of its lookup.
type FakeSpec = (&'static str, fn() -> LookupOutcome);

/// Looks for the source with these fake providers. Also returns the number of providers that were asked.
fn try_providers(outcomes: &[FakeSpec]) -> (Result<Source, Error>, u32) {
    let lookups = Rc::new(Cell::new(0));
    let providers: Vec<Box<dyn Provider>> = outcomes
        .iter()
        .map(|&(name, outcome)| {
            let lookups = Rc::clone(&lookups);
            Box::new(FakeProvider { name, outcome, lookups }) as Box<dyn Provider>
        })
        .collect();
    (search_providers(&providers, &Progress::silent()), lookups.get())
}

fn missing() -> LookupOutcome {
    LookupOutcome::Missing("not there".to_owned())
}

fn found() -> LookupOutcome {
    LookupOutcome::Found(Source::Archive("a".into()))
}

#[test]
fn lookup_order_is_variable_cache_git_then_debian() {
    let settings = Settings::from_environment(Path::new("/nowhere"));
    let names: Vec<_> = providers(&settings, Path::new("/nowhere")).iter().map(|provider| provider.name()).collect();
    let expected = ["SBCL_MCP_SOURCE", "the cache", "upstream's git repository", "Debian's pool"];
    assert_eq!(names.len(), expected.len());
    for (name, expected) in names.iter().zip(expected) {
        assert!(name.starts_with(expected), "{name} is not {expected}");
    }
}

#[test]
fn search_stops_at_the_first_provider_that_has_the_source() {
    let (source, lookups) = try_providers(&[("one", missing), ("two", found), ("three", missing)]);
    assert_eq!(source.unwrap(), Source::Archive("a".into()));
    assert_eq!(lookups, 2);
}

#[test]
fn refused_source_ends_the_search_with_an_error() {
    let refused = || LookupOutcome::Refused("of version 1".to_owned());
    let (source, lookups) = try_providers(&[("one", refused), ("two", found)]);
    assert_eq!(lookups, 1);
    let message = source.unwrap_err().to_string();
    assert!(message.contains("(one): of version 1"), "{message}");
    assert!(message.contains(pin::ARCHIVE_SHA256), "{message}");
}

#[test]
fn error_for_a_missing_source_lists_every_provider_and_the_remedies() {
    let (source, lookups) = try_providers(&[("one", missing), ("two", missing)]);
    assert_eq!(lookups, 2);
    let message = source.unwrap_err().to_string();
    for part in ["one: not there", "two: not there", "SBCL_MCP_SOURCE", pin::ARCHIVE, pin::GIT_TAG] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[test]
fn identity_of_a_named_directory_depends_on_its_contents() {
    let directory = Scratch::new("identity");
    let mut settings = Settings::from_environment(Path::new("/nowhere"));
    let identity = |settings: &Settings| identity(settings, &Progress::silent());
    (settings.source, settings.next) = (None, None);
    assert_eq!(identity(&settings).unwrap(), "pinned");
    settings.source = Some(directory.to_path_buf());
    assert!(matches!(identity(&settings), Err(Error::SourceRefused { .. })));
    std::fs::write(directory.join("version.lisp-expr"), format!("\"{}\"", pin::VERSION)).unwrap();
    std::fs::write(directory.join("make.sh"), "one").unwrap();
    let one = identity(&settings).unwrap();
    std::fs::write(directory.join("make.sh"), "two").unwrap();
    assert_ne!(one, identity(&settings).unwrap());
}
