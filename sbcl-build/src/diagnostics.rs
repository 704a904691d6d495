//! What SBCL says of the application's Lisp, line by line.

/// What is said at most.
const MOST: usize = 100;

/// The errors and warnings in what `bundle.lisp` wrote: a line each, which begins with `error` or `warning`, a colon and a
/// space.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Diagnostics {
    /// The errors.
    pub(crate) errors: Vec<String>,
    /// The warnings.
    pub(crate) warnings: Vec<String>,
}

impl Diagnostics {
    /// Reads them.
    pub(crate) fn read(text: &str) -> Self {
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

    /// Tells cargo, which shows each. After an error the build does not go on.
    pub(crate) fn tell(&self) {
        for (what, lines) in [("warning", &self.warnings), ("error", &self.errors)] {
            for line in lines.iter().take(MOST) {
                println!("cargo::{what}={line}");
            }
            if lines.len() > MOST {
                println!("cargo::{what}=and {} more", lines.len() - MOST);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_classified_by_error_and_warning_prefix() {
        let read = Diagnostics::read("error: a.lisp:1:2: WARNING: x\nnoise\nwarning: b.lisp:3:4: STYLE-WARNING: y\n");
        assert_eq!(read.errors, ["a.lisp:1:2: WARNING: x"]);
        assert_eq!(read.warnings, ["b.lisp:3:4: STYLE-WARNING: y"]);
    }
}
