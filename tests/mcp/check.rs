//! `sbcl-mcp check`: locates and repairs unbalanced parentheses, strings and comments.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::client::{Scratch, binary};
use lisp_syntax::{Severity, check};

fn run(arguments: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut child = Command::new(binary())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Writing fails if the command exits without reading its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    child.wait_with_output().unwrap()
}

/// Runs `check` and returns its exit status, stdout and stderr.
fn checked(arguments: &[&str], input: &str) -> (i32, String, String) {
    let output = run(&[&["check"], arguments].concat(), input);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Returns the findings in a text as `line:column: message`, notes after `note: `.
fn findings(text: &str) -> Vec<String> {
    let show = |finding: lisp_syntax::Finding| {
        let note = if finding.severity == Severity::Note { "note: " } else { "" };
        format!("{}:{}: {note}{}", finding.line, finding.column, finding.message)
    };
    check(text, &[]).findings.into_iter().map(show).collect()
}

#[test]
fn indentation_locates_missing_and_extra_delimiters() {
    for (text, expected, repaired) in [
        (
            "(defun f (x)\n  (let ((y 1)))\n    (foo x y)))\n\n(defun g ())\n",
            "2:15: the form that begins at line 2 is probably closed too early: one ) too many at 2:15",
            "(defun f (x)\n  (let ((y 1))\n    (foo x y)))\n\n(defun g ())\n",
        ),
        (
            "(defun f (x)\n  (list x\n  (g x))\n\n(defun g ())\n",
            "2:10: the form that begins at line 2 is probably not closed: one ) missing at 2:10",
            "(defun f (x)\n  (list x)\n  (g x))\n\n(defun g ())\n",
        ),
        (
            "(defun f (x)\n  (when x\n    (let ((a 1))\n      (list a x",
            "4:16: the form that begins at line 1 is probably not closed: 4 ) missing at 4:16",
            "(defun f (x)\n  (when x\n    (let ((a 1))\n      (list a x))))",
        ),
        (
            "(defun f (x)\n  (print \"one)\n  (print \"two\"))\n\n(defun g () \"three\")\n",
            "2:14: a string probably begins or ends here: one \" missing at 2:14",
            "(defun f (x)\n  (print \"one\")\n  (print \"two\"))\n\n(defun g () \"three\")\n",
        ),
        (
            "(defun f (x)\n  x)\n|#\n(defun g ()\n  1)\n",
            "3:1: one |# too many at 3:1",
            "(defun f (x)\n  x)\n\n(defun g ()\n  1)\n",
        ),
    ] {
        assert_eq!(findings(text), [expected], "{text}");
        assert_eq!(check(text, &[]).repaired.as_deref(), Some(repaired), "{text}");
    }
}

/// A single quote in the first function would balance these texts, but hide the second function in a string.
#[test]
fn two_faults_in_neighbouring_functions_are_both_repaired() {
    let text = "(defun a (x)\n  (list x)\n\n(defun b () (list \"unclosed))\n\n(defun c () \"ok\")\n";
    let expected = [
        "2:11: the form that begins at line 1 is probably not closed: one ) missing at 2:11",
        "4:28: a string probably begins or ends here: one \" missing at 4:28",
    ];
    assert_eq!(findings(text), expected);
    let repaired = "(defun a (x)\n  (list x))\n\n(defun b () (list \"unclosed\"))\n\n(defun c () \"ok\")\n";
    assert_eq!(check(text, &[]).repaired.as_deref(), Some(repaired));
}

/// Two quotes would make the definitions in the docstring code.
#[test]
fn definitions_in_a_docstring_stay_in_it_when_its_function_is_repaired() {
    let text = "(defun greet (x)\n  \"Greet X:\n\n(defun hello () (greet 1))\n(defun bye () (greet 2))\n\"\n  (list x)\n\n\
                (defun c () \"ok\")\n";
    assert_eq!(check(text, &[]).repaired, Some(text.replace("(list x)\n", "(list x))\n")));
}

#[test]
fn readable_code_has_no_findings() {
    for text in [
        "",
        "\n",
        "; ( \" |#\n",
        "(list #\\( #\\\" #\\; #\\| '|a ( b| \"( ; \\\" )\" #| ( #| \" |# ( |# 1)",
        "(a . b) #(1 2) #2A((1 2) (3 4)) #'car #.(+ 1 2) #c(1 2) #*0101 #x-ff #1=(a . #1#) #:g #p\"x\" `(a ,b ,@c ,.d)",
        "  (indented\noddly\n      (but) balanced)\n",
        "(a #+x b) '#+x b c #+(or x y) #-z b c",
        "(a . #+x b #-x c) (a . 'b #+x c) (a . b #| c |#) `(a . ,b) #+x (a . b c)",
        "#+nosuch (a ,b #<c> d:e:f #?x) 1",
        "(defun λ (ü) \"λ(\" ü)",
        "(eval-when (:load-toplevel)\n(defun f ())\n)\n",
        "(foo\\(bar a\\;b)\r\n(crlf)\r\n",
        "(sb-ext:gc) (cl:car x) (uiop:getenv \"x\") (asdf/system:system-source-file 1) :a:b",
        "(defpackage #:my-app (:use :cl) (:local-nicknames (#:a #:alexandria)))(my-app::f)(a:flatten alexandria:x)",
        "(set-dispatch-macro-character #\\# #\\? #'f) #?x ,y",
    ] {
        assert_eq!(findings(text), [""; 0], "{text}");
        assert_eq!(check(text, &[]).repaired, None, "{text}");
    }
}

#[test]
fn syntax_errors_and_unknown_packages_are_reported() {
    for (text, expected) in [
        ("(a ,b)", "1:4: a comma outside a backquote"),
        ("`(a ,(b ,c))", "1:9: a comma outside a backquote"),
        ("(list #<foo>)", "1:7: #< begins the printed form of an unreadable object"),
        ("(list cl:a:b)", "1:7: too many colons in cl:a:b"),
        ("(a ...)", "1:4: a token that consists only of dots"),
        ("(. a)", "1:2: a dot with nothing before it in its list"),
        ("(a ')", "1:4: ' with nothing after it"),
        ("(a #+sbcl)", "1:4: a feature expression with nothing after it"),
        ("(a #+)", "1:4: #+ with nothing after it"),
        ("(a #\n b)", "1:4: # at the end of a line cannot be read"),
        ("(a #+(sbcl) b)", "1:6: a list in a feature expression must begin with AND, OR or NOT"),
        ("(a . )", "1:4: a dot with nothing after it in its list"),
        ("(a . b c d)", "1:8: a second form after the dot in its list"),
        ("(a . (b) . c)", "1:10: a second form after the dot in its list"),
        ("(a\n #?b #?c)", "2:2: note: SBCL has no reader macro #?: define it before this form is read"),
        (
            "(defpackage :my-app (:use :cl)) (my-ap::f) (my-ap::g)",
            "1:34: note: no package MY-AP is known here: load its definition before this form is read \
             (did you mean MY-APP?)",
        ),
    ] {
        assert_eq!(findings(text), [expected], "{text}");
    }
    assert_eq!(findings(")"), ["1:1: one ) too many at 1:1"]);
    // A file with its own readtable may be valid: the finding is not an error.
    let own = check("(in-readtable :mine)\n(a", &[]);
    assert!(!own.is_error() && own.repaired.is_none() && own.findings.len() == 1, "{own:?}");
}

#[test]
fn fix_repairs_files_and_keeps_their_permissions_and_links() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let directory = Scratch::new();
    let file = |name: &str| directory.join(name);
    let name = |path: &Path| path.display().to_string();
    let (bad, good, link) = (file("bad.lisp"), file("good.lisp"), file("link.lisp"));
    std::fs::write(&bad, "(defun f (x)\n  (list x\n  (g x))\n(defun g ())\n").unwrap();
    std::fs::write(&good, "(defun f (x)\n  x)\n").unwrap();
    std::fs::set_permissions(&bad, std::fs::Permissions::from_mode(0o640)).unwrap();
    symlink(&bad, &link).unwrap();

    let line = "2:10: error: the form that begins at line 2 is probably not closed: one ) missing at 2:10\n";
    assert_eq!(checked(&[&name(&bad), &name(&good)], ""), (1, format!("{}:{line}", name(&bad)), String::new()));
    assert_eq!(checked(&[&name(&good)], ""), (0, String::new(), String::new()));
    // The link is in the directory as well and is listed after the file.
    let (status, out, _) = checked(&[&name(&directory)], "");
    assert_eq!((status, out), (1, format!("{}:{line}{}:{line}", name(&bad), name(&link))));
    let missing = name(&file("missing.lisp"));
    let (status, out, complaint) = checked(&[&missing, &name(&good)], "");
    assert_eq!((status, out.as_str()), (3, ""));
    assert!(complaint.contains(&missing), "{complaint}");

    let before = std::fs::metadata(&good).unwrap().modified().unwrap();
    let (status, out, _) = checked(&["--fix", &name(&link), &name(&good)], "");
    assert_eq!((status, out), (0, format!("{0}:{line}{0}: repaired\n", name(&link))));
    assert_eq!(std::fs::read_to_string(&bad).unwrap(), "(defun f (x)\n  (list x)\n  (g x))\n(defun g ())\n");
    assert_eq!(std::fs::metadata(&bad).unwrap().permissions().mode() & 0o7777, 0o640);
    assert!(link.is_symlink());
    assert_eq!(std::fs::metadata(&good).unwrap().modified().unwrap(), before);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 3, "no file is left");

    // A file that is not UTF-8 is checked and left unchanged.
    std::fs::write(&bad, b"(list \"\xe4\"\n").unwrap();
    let (status, out, _) = checked(&["--fix", &name(&bad)], "");
    assert_eq!(
        (status, out),
        (
            1,
            format!(
                "{}:1:10: error: the form that begins at line 1 is probably not closed: one ) missing at 1:10\n",
                name(&bad)
            )
        )
    );
    assert_eq!(std::fs::read(&bad).unwrap(), b"(list \"\xe4\"\n");
}

#[test]
fn stdin_is_checked_and_repaired() {
    assert_eq!(checked(&["-"], "(a b)\n"), (0, String::new(), String::new()));
    let message = "<stdin>:1:5: error: the form that begins at line 1 is probably not closed: one ) missing at \
                   1:5\n";
    assert_eq!(checked(&["-"], "(a b\n"), (1, message.to_owned(), String::new()));
    assert_eq!(checked(&["--fix", "-"], "(a b\n"), (0, "(a b)\n".to_owned(), message.to_owned()));
    assert_eq!(checked(&[], "").0, 2);
}

#[test]
fn fix_keeps_the_bytes_of_stdin_that_is_not_utf_8() {
    for (input, status) in [(&b"(list \"\xe4\")\n"[..], 0), (b"(list \"\xe4\"\n", 1)] {
        let output = run(&["check", "--fix", "-"], input);
        assert_eq!((&*output.stdout, output.status.code()), (input, Some(status)), "{output:?}");
    }
}

#[test]
fn unreadable_directories_are_reported_with_an_error_status() {
    use std::os::unix::fs::PermissionsExt;
    let directory = Scratch::new();
    let closed = directory.join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::write(directory.join("open.lisp"), "(a b\n").unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::read_dir(&closed).is_ok() {
        println!("left out: this user can read every directory");
        return;
    }
    for path in [&*directory, &*closed] {
        let (status, found, complaint) = checked(&[&path.display().to_string()], "");
        assert_eq!((status, found.contains("open.lisp:1:5: error: ")), (3, path != closed), "{found}");
        let reason = format!("sbcl-mcp check: cannot read {}: Permission denied", closed.display());
        assert!(complaint.starts_with(&reason) && complaint.lines().count() == 1, "{complaint}");
    }
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn packages_of_the_same_system_are_known() {
    let directory = Scratch::new();
    std::fs::create_dir(directory.join("src")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    write("app.asd", "(defsystem \"app\" :depends-on (\"alexandria\") :components ((:file \"src/package\")))\n");
    write("src/package.lisp", "(defpackage #:app.core (:use #:cl) (:export #:run))\n");
    write("src/main.lisp", "(in-package #:app.core)\n(app.core:run)\n(alexandria:flatten 1)\n(app.coer:run)\n");
    let main = directory.join("src/main.lisp").display().to_string();
    let expected = format!(
        "{main}:4:2: note: no package APP.COER is known here: load its definition before this form is read \
         (did you mean APP.CORE?)\n"
    );
    assert_eq!(checked(&[&main], ""), (0, expected, String::new()));
}

/// A random number generator (xorshift) with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }

    fn place(&mut self, text: &str) -> usize {
        loop {
            let at = self.below(text.len() + 1);
            if text.is_char_boundary(at) {
                return at;
            }
        }
    }
}

const MARKS: [(&str, &[&str]); 4] =
    [("parenthesis", &["(", ")"]), ("quote", &["\""]), ("comment mark", &["|#"]), ("parenthesis moved", &["(", ")"])];

/// Damages a text and returns it with the lines of the damage. Kinds 0 to 8 delete, insert or duplicate one of the
/// first three [`MARKS`] (three kinds for each); kind 9 moves a parenthesis.
fn damage(text: &str, kind: usize, random: &mut Random) -> Option<(String, Vec<usize>)> {
    let marks = MARKS[kind / 3].1;
    let line = |text: &str, at: usize| 1 + text[..at].matches('\n').count();
    let mut damaged = text.to_owned();
    if kind < 9 && kind % 3 == 1 {
        let at = random.place(text);
        damaged.insert_str(at, marks[random.below(marks.len())]);
        return Some((damaged, vec![line(text, at)]));
    }
    let places: Vec<_> = marks.iter().flat_map(|mark| text.match_indices(mark)).collect();
    if places.is_empty() {
        return None;
    }
    let (at, mark) = places[random.below(places.len())];
    if kind % 3 == 2 {
        damaged.insert_str(at, mark);
        return Some((damaged, vec![line(text, at)]));
    }
    damaged.replace_range(at..at + mark.len(), "");
    let mut lines = vec![line(text, at)];
    if kind == 9 {
        let to = random.place(&damaged);
        lines.push(line(&damaged, to));
        damaged.insert_str(to, mark);
    }
    Some((damaged, lines))
}

fn lisp_files(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            lisp_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "lisp") {
            files.push(path);
        }
    }
}

/// Returns the names of the files in `directory` that SBCL's reader can read completely.
fn readable(directory: &Path) -> Vec<String> {
    let code = format!(
        "(let ((*read-suppress* t) (*readtable* (copy-readtable nil)))
           ;; SBCL skips the two characters while it suppresses, and takes the string's end for its beginning.
           (set-dispatch-macro-character
            #\\# #\\\" (lambda (stream quote argument)
                      (declare (ignore argument))
                      (unread-char quote stream)
                      (read stream t nil t)))
           ;; The repaired text of `#+((sbcl)` is balanced, but not a feature expression.
           (flet ((skip-two (stream sign argument)
                    (declare (ignore sign argument))
                    (read stream t nil t)
                    (read stream t nil t)))
             (set-dispatch-macro-character #\\# #\\+ #'skip-two)
             (set-dispatch-macro-character #\\# #\\- #'skip-two))
           (dolist (file (directory \"{}/*.lisp\"))
             (when (ignore-errors
                    (with-open-file (stream file :external-format :utf-8)
                      (loop until (eq stream (read stream nil stream))))
                    t)
               (write-line (pathname-name file)))))",
        directory.display()
    );
    let output = run(&["eval", "--timeout", "0", "--max-answer", "1000000", &code], "");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    text.lines().map(str::to_owned).collect()
}

/// Damages each file in ten ways and counts how often the damage is located within three lines and repaired. Files that
/// SBCL's reader can read must have no error, and so must every repaired file.
fn check_damaged_files(files: &[PathBuf]) {
    let directory = Scratch::new();
    let repaired_directory = Scratch::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut broken, mut located, mut repaired) = ([0; 4], [0; 4], 0);
    // The damaged files for which a repair is offered.
    let mut changed = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        assert!(!check(&text, &[]).is_error(), "{}", file.display());
        std::fs::write(directory.join(format!("{number}-whole.lisp")), &text).unwrap();
        for kind in 0..10 {
            // Damage in a comment may be no error: try again.
            for _ in 0..5 {
                let Some((damaged, lines)) = damage(&text, kind, &mut random) else { break };
                let id = format!("{number}-{kind}");
                std::fs::write(directory.join(format!("{id}.lisp")), &damaged).unwrap();
                let checked = check(&damaged, &[]);
                if !checked.is_error() {
                    assert_eq!(checked.repaired, None);
                    continue;
                }
                broken[kind / 3] += 1;
                let first = checked.findings[0].line;
                located[kind / 3] += usize::from(lines.iter().any(|line| line.abs_diff(first) <= 3));
                if let Some(text) = checked.repaired {
                    repaired += 1;
                    std::fs::write(repaired_directory.join(format!("{id}.lisp")), text).unwrap();
                    changed.push(id);
                }
                break;
            }
        }
    }
    let read = readable(&directory);
    let wrongly_changed: Vec<_> = changed.iter().filter(|id| read.contains(id)).collect();
    let repairable = readable(&repaired_directory);
    // A few files cannot be read without their packages.
    let was_readable = |id: &&String| read.contains(&format!("{}-whole", id.split('-').next().unwrap()));
    let unrepaired: Vec<_> = changed.iter().filter(was_readable).filter(|id| !repairable.contains(id)).collect();
    let all: usize = broken.iter().sum();
    let near: usize = located.iter().sum();
    for ((kind, _), (broken, located)) in MARKS.iter().zip(broken.iter().zip(located)) {
        println!("{kind}: {located} of {broken} within three lines");
    }
    println!(
        "{} files, {all} broken, {near} placed, {repaired} repaired, {} of them not readable",
        files.len(),
        unrepaired.len()
    );
    assert_eq!(wrongly_changed, [""; 0], "the reader gets through these: {}", directory.display());
    assert_eq!(unrepaired, [""; 0], "{}", repaired_directory.display());
    assert!(near * 10 >= all * 9, "{near} of {all}");
    assert!(repaired * 10 >= all * 9, "{repaired} of {all}");
    std::fs::remove_dir_all(&repaired_directory).unwrap();
}

#[test]
fn damage_to_a_sample_of_files_is_located_and_repaired() {
    let mut files = Vec::new();
    lisp_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("lisp"), &mut files);
    files.sort();
    let mut libraries = Vec::new();
    lisp_files(Path::new("/usr/share/common-lisp/source"), &mut libraries);
    libraries.sort();
    // The same files are chosen wherever the checkout is.
    files.append(&mut libraries);
    // Some of them: a debug build takes its time.
    let files: Vec<_> = files.iter().step_by(files.len().div_ceil(16)).cloned().collect();
    check_damaged_files(&files);
}

/// Checks the Lisp files in the directories of `SBCL_MCP_CHECK_SOURCES` (separated by colons).
#[test]
#[ignore = "takes minutes, and sources to break"]
fn damage_to_all_given_source_files_is_located_and_repaired() {
    let directories = std::env::var("SBCL_MCP_CHECK_SOURCES").expect("SBCL_MCP_CHECK_SOURCES");
    let mut files = Vec::new();
    for directory in directories.split(':') {
        lisp_files(Path::new(directory), &mut files);
    }
    files.sort();
    check_damaged_files(&files);
}

/// The time grows at most with the square of the line's length.
#[test]
fn line_of_many_open_parentheses_is_checked_at_once() {
    // Processor time, and the shortest of several: on a busy machine the elapsed time is longer, and the processors are slower.
    let now = || Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)).expect("a time");
    let spent = |count: usize| {
        let once = |_| {
            let begin = now();
            assert!(!check(&"(a ".repeat(count), &[]).findings.is_empty());
            now() - begin
        };
        (0..3).map(once).min().expect("three times")
    };
    let short = spent(100);
    for (count, factor) in [(400, 16), (800, 64), (1_200, 144)] {
        let long = spent(count);
        assert!(long < 2 * factor * short, "{count}: {long:?}, 100: {short:?}");
    }
}
