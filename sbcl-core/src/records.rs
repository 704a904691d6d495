//! Generates Rust structures from the table `lisp/build/records.sexp`. The beginning of that file describes its format.

use std::fmt::Write as _;

/// A form of the table, as Lisp would read it.
#[derive(Debug, PartialEq)]
enum Form {
    List(Vec<Form>),
    Symbol(String),
    Text(String),
}

impl Form {
    /// Reads all forms of `text`.
    fn read_all(text: &str) -> Result<Vec<Self>, String> {
        // The lists that are still open, innermost last. The first list collects the top-level forms.
        let mut open = vec![Vec::new()];
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            let form = match character {
                ';' => {
                    characters.by_ref().find(|character| *character == '\n');
                    continue;
                }
                '(' => {
                    open.push(Vec::new());
                    continue;
                }
                ')' => Self::List(open.pop().filter(|_| !open.is_empty()).ok_or("there is one `)` too many")?),
                '"' => {
                    let mut text = String::new();
                    loop {
                        match characters.next().ok_or("a string is not closed")? {
                            '"' => break,
                            '\\' => text.extend(characters.next()),
                            character => text.push(character),
                        }
                    }
                    Self::Text(text)
                }
                character if character.is_whitespace() => continue,
                character => {
                    let mut name = String::from(character);
                    while let Some(next) = characters.next_if(|next| !next.is_whitespace() && !"()\";".contains(*next))
                    {
                        name.push(next);
                    }
                    Self::Symbol(name)
                }
            };
            open.last_mut().ok_or("there is one `)` too many")?.push(form);
        }
        let all = open.pop().filter(|_| open.is_empty());
        all.ok_or_else(|| "a `)` is missing".to_owned())
    }
}

/// Returns the Rust type for the name of a field's type in the table, or `None` if the name is unknown.
fn rust_type(name: &str) -> Option<&'static str> {
    Some(match name {
        "text" => "String",
        "text?" => "Option<String>",
        "number" => "u64",
        "number?" => "Option<u64>",
        "flag" => "bool",
        "test-status" => "TestStatus",
        "call-end" => "CallEnd",
        "passing-image" => "PassingImage",
        _ => return None,
    })
}

/// Returns Rust source that defines the records of `table`, the text of a table of records. The source is an invocation
/// of the macro `records!`.
///
/// # Errors
/// Returns a description of the problem if the table's syntax is wrong, if a record or field is malformed, or if the
/// type of a field is unknown.
pub fn generate_rust(table: &str) -> Result<String, String> {
    let mut rust = String::from("records! {\n");
    for record in Form::read_all(table)? {
        let unknown = format!("not a record: {record:?}");
        let Form::List(parts) = record else { return Err(unknown) };
        let [Form::Symbol(kind), Form::Symbol(name), Form::Text(says), fields @ ..] = &parts[..] else {
            return Err(unknown);
        };
        _ = writeln!(rust, "    /// {says}\n    {} {name} {{", kind.replace('-', "_"));
        for field in fields {
            let unknown = || format!("not a field of {kind}: {field:?}");
            let Form::List(parts) = field else { return Err(unknown()) };
            let [Form::Symbol(name), Form::Symbol(of), Form::Text(says), other @ ..] = &parts[..] else {
                return Err(unknown());
            };
            _ = writeln!(rust, "        /// {says}");
            match other {
                [] => {}
                [Form::Text(other)] => _ = writeln!(rust, "        #[serde(rename = {other:?})]"),
                _ => return Err(unknown()),
            }
            _ = writeln!(rust, "        {}: {},", name.replace('-', "_"), rust_type(of).ok_or_else(unknown)?);
        }
        rust.push_str("    }\n");
    }
    rust.push_str("}\n");
    Ok(rust)
}

#[cfg(test)]
mod tests {
    use super::generate_rust;

    #[test]
    fn records_become_arguments_of_the_macro() {
        let table =
            ";; c\n(more-checks MoreChecks \"How \\\"many\\\".\" (count number \"It.\")\n (a-b text? \"That.\" \"c\"))";
        assert_eq!(
            generate_rust(table).unwrap(),
            "records! {\n    /// How \"many\".\n    more_checks MoreChecks {\n        /// It.\n        count: u64,\n        \
             /// That.\n        #[serde(rename = \"c\")]\n        a_b: Option<String>,\n    }\n}\n"
        );
        for (table, expected) in [
            ("(a", "a `)` is missing"),
            ("a)", "there is one `)` too many"),
            ("\"a", "a string is not closed"),
            ("(a B)", "not a record: List([Symbol(\"a\"), Symbol(\"B\")])"),
            ("(a B \"c\" (d odd \"e\"))", "not a field of a: List([Symbol(\"d\"), Symbol(\"odd\"), Text(\"e\")])"),
        ] {
            assert_eq!(generate_rust(table).unwrap_err(), expected);
        }
    }
}
