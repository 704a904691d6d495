//! SBCL's diagnostics about the application's Lisp.

/// Maximum number of errors, and of warnings, passed to cargo.
const MAX_LINES: usize = 100;

/// The errors and warnings that `bundle.lisp` wrote, one per line, with the prefix `error: ` or `warning: `.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Diagnostics {
    /// Texts of the errors, without the prefix.
    pub(crate) errors: Vec<String>,
    /// Texts of the warnings, without the prefix.
    pub(crate) warnings: Vec<String>,
}

impl Diagnostics {
    /// Parses the lines that begin with `error: ` or `warning: `, and ignores all other lines.
    pub(crate) fn parse(text: &str) -> Self {
        let mut read = Self::default();
        for line in text.lines() {
            if let Some(error) = line.strip_prefix("error: ") {
                read.errors.push(error.to_owned());
            } else if let Some(warning) = line.strip_prefix("warning: ") {
                read.warnings.push(warning.to_owned());
            }
        }
        read
    }

    /// Passes the errors and warnings to cargo, which shows each of them. An error makes the build fail.
    pub(crate) fn report_to_cargo(&self) {
        for (what, lines) in [("warning", &self.warnings), ("error", &self.errors)] {
            for line in lines.iter().take(MAX_LINES) {
                println!("cargo::{what}={line}");
            }
            if lines.len() > MAX_LINES {
                println!("cargo::{what}=and {} more", lines.len() - MAX_LINES);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_classified_by_error_and_warning_prefix() {
        let read = Diagnostics::parse("error: a.lisp:1:2: WARNING: x\nnoise\nwarning: b.lisp:3:4: STYLE-WARNING: y\n");
        assert_eq!(read.errors, ["a.lisp:1:2: WARNING: x"]);
        assert_eq!(read.warnings, ["b.lisp:3:4: STYLE-WARNING: y"]);
    }
}
