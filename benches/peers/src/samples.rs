//! The results of measurements.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::AnyError;

/// The measured seconds for each engine and benchmark, the engines' versions, and notes on engines that did not end. In text
/// form, each line has an engine, a benchmark and seconds, or an engine, the word "version" or "note" and its text, separated
/// by tabs.
#[derive(Default)]
pub struct Samples {
    times: BTreeMap<(String, String), Vec<f64>>,
    versions: BTreeMap<String, String>,
    notes: BTreeMap<String, String>,
}

impl Samples {
    pub fn push(&mut self, engine: &str, benchmark: &str, seconds: f64) {
        self.times.entry((engine.to_owned(), benchmark.to_owned())).or_default().push(seconds);
    }

    /// Returns the version that an engine reports.
    pub fn version(&self, engine: &str) -> &str {
        self.versions.get(engine).map_or("", String::as_str)
    }

    /// Returns the engines that did not end, each with its note.
    pub fn notes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.notes.iter().map(|(engine, note)| (engine.as_str(), note.as_str()))
    }

    /// Returns the median of a benchmark's samples, in seconds.
    pub fn median(&self, engine: &str, benchmark: &str) -> Option<f64> {
        let mut times = self.times.get(&(engine.to_owned(), benchmark.to_owned()))?.clone();
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        Some(if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2.0 })
    }

    /// Adds the samples in `text`.
    pub fn read(&mut self, text: &str) -> Result<(), AnyError> {
        for line in text.lines() {
            match line.split('\t').collect::<Vec<_>>()[..] {
                [engine, "version", version] => _ = self.versions.insert(engine.to_owned(), version.to_owned()),
                [engine, "note", note] => _ = self.notes.insert(engine.to_owned(), note.to_owned()),
                [engine, benchmark, seconds] => self.push(engine, benchmark, seconds.parse()?),
                _ => return Err(format!("not a sample: {line}").into()),
            }
        }
        Ok(())
    }

    pub fn append_to(&self, file: &str) -> Result<(), AnyError> {
        Ok(write!(OpenOptions::new().create(true).append(true).open(file)?, "{self}")?)
    }

    /// Adds the medians in criterion's directory, as samples of the engine "criterion".
    pub fn read_criterion(&mut self, directory: &Path) -> Result<(), AnyError> {
        for entry in std::fs::read_dir(directory).map_err(|error| format!("{}: {error}", directory.display()))? {
            let newest = entry?.path().join("new");
            let (Ok(name), Ok(estimates)) =
                (File::open(newest.join("benchmark.json")), File::open(newest.join("estimates.json")))
            else {
                continue;
            };
            let (name, estimates): (Value, Value) =
                (serde_json::from_reader(name)?, serde_json::from_reader(estimates)?);
            if let (Some(name), Some(nanoseconds)) =
                (name["full_id"].as_str(), estimates["median"]["point_estimate"].as_f64())
            {
                self.push("criterion", name, nanoseconds / 1e9);
            }
        }
        Ok(())
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (engine, version) in &self.versions {
            writeln!(f, "{engine}\tversion\t{version}")?;
        }
        for (engine, note) in &self.notes {
            writeln!(f, "{engine}\tnote\t{note}")?;
        }
        for ((engine, benchmark), times) in &self.times {
            for seconds in times {
                writeln!(f, "{engine}\t{benchmark}\t{seconds:e}")?;
            }
        }
        Ok(())
    }
}
