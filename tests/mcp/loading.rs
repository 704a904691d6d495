//! The load tool: systems through ASDF, and files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use crate::bare::bare;
use crate::client::{Scratch, Server, binary, call_err, call_ok};
use serde_json::json;

/// A working directory with systems, and a cache for their fasls.
struct Project {
    root: Scratch,
}

impl Project {
    fn new() -> Self {
        let root = Scratch::new();
        for directory in ["work", "cache", "home"] {
            root.directory(directory);
        }
        Self { root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join("work").join(name)
    }

    /// Writes a file in the working directory, creating its parent directories.
    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> &Self {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        std::fs::write(path, text).expect("a file");
        self
    }

    /// Writes a system of these files, loaded in this order.
    fn system(&self, name: &str, files: &[(&str, &str)]) -> &Self {
        let components: Vec<_> = files.iter().map(|(file, _)| format!("(:file \"{file}\")")).collect();
        let definition = format!("(defsystem \"{name}\" :serial t :components ({}))", components.join(" "));
        self.write(&format!("{name}/{name}.asd"), definition);
        for (file, text) in files {
            self.write(&format!("{name}/{file}.lisp"), text);
        }
        self
    }

    /// Returns a command that runs `program` in the working directory, with the project's cache and home.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.root.join("work"));
        command.env("XDG_CACHE_HOME", self.root.join("cache")).env("HOME", self.root.join("home"));
        command
    }

    /// Compiles a system in another image.
    fn build(&self, system: &str) -> &Self {
        load(&mut self.server(), json!({"system": system, "directory": system}));
        self
    }

    fn server(&self) -> Server {
        self.server_with(&[])
    }

    fn server_with(&self, arguments: &[&str]) -> Server {
        let mut server = Server::start_command(self.command(binary()).args(arguments));
        server.initialize("2025-11-25");
        server
    }
}

/// Loads a system or file, which must succeed, and returns the answer.
#[track_caller]
fn load(server: &mut Server, arguments: serde_json::Value) -> String {
    without_times(&call_ok(server, "load-system", arguments))
}

/// Loads a system or file, which must fail, and returns the report.
#[track_caller]
fn load_err(server: &mut Server, arguments: serde_json::Value) -> String {
    call_err(server, "load-system", arguments)
}

/// Returns an answer with its seconds replaced by `T s`.
fn without_times(text: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for line in &mut lines {
        if let Some((before, seconds)) = line.rsplit_once(", ").filter(|(_, last)| last.ends_with(" s"))
            && seconds.trim_end_matches(" s").parse::<f64>().is_ok()
        {
            *line = format!("{before}, T s");
        }
    }
    lines.join("\n")
}

/// Returns the part of an answer before its backtrace.
fn before_backtrace(text: &str) -> &str {
    text.split("\n\n[Backtrace]").next().unwrap_or(text)
}

const PACKAGE: &str = "(defpackage :app (:use :cl) (:export #:run))";

/// Writes a system that loads. No call in it that may fail is a tail call: SBCL has no frame for the caller of a tail call,
/// and on aarch64 generic arithmetic is an ordinary call.
fn app(project: &Project) {
    project.system(
        "app",
        &[
            ("package", PACKAGE),
            ("a", "(in-package :app)\n\n(defun add (x)\n  (abs (1+ x)))\n"),
            ("b", "(in-package :app)\n\n(defun run ()\n  (add 1))\n"),
        ],
    );
}

// ---- Systems

#[test]
fn system_loads_from_its_directory_and_recompiles_changed_files() {
    let project = Project::new();
    app(&project);
    let mut server = project.server();
    let text = load(&mut server, json!({"system": "app", "directory": "app"}));
    assert_eq!(text, "Loaded app: 3 files, 3 compiled, T s\nDefined in app/app.asd");
    assert_eq!(server.evaluate("(app:run)"), "=> 2");
    // Loaded functions have source locations.
    server.evaluate("(handler-bind ((error #'invoke-debugger)) 1)");
    let frames = call_err(&mut server, "evaluate-lisp", json!({"code": "(app::add :x)"}));
    assert!(frames.contains("(APP::ADD :X)"), "{frames}");
    let frames = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(frames.contains("at app/a.lisp:4: (abs (1+ x)))"), "{frames}");
    // An up-to-date system is reported as such, and its directory is remembered.
    assert_eq!(load(&mut server, json!({"system": "app"})), "app is up to date: 3 files, T s");
    let text = load(&mut server, json!({"system": "app", "force": "self"}));
    assert_eq!(text, "Loaded app: 3 files, 3 compiled, T s");
    // Another image finds the fasls.
    let mut server = project.server();
    let text = load(&mut server, json!({"path": "app/app.asd"}));
    assert_eq!(text, "Loaded app: 3 files, T s\nDefined in app/app.asd");
    assert_eq!(server.evaluate("(app:run)"), "=> 2");
    // A changed file and the files after it are compiled again.
    project.write("app/a.lisp", "(in-package :app)\n\n(defun add (x)\n  (+ 10 x))\n");
    let text = load(&mut server, json!({"system": ":APP"}));
    assert_eq!(text, "Loaded app: 2 files, 2 compiled, T s");
    assert_eq!(server.evaluate("(app:run)"), "=> 11");
}

#[test]
fn asd_file_is_found_above_and_below_the_directory_and_by_system_name() {
    let project = Project::new();
    app(&project);
    project.write("app/deep/down/x.txt", "");
    project.write(
        "several/several.asd",
        "(defsystem \"several\")\n(defsystem \"several/tests\" :components ((:file \"t\")))",
    );
    project.write("odd/odd.asd", "(defsystem \"odd\")\n(asdf:defsystem #:other-name)");
    project.write("several/t.lisp", "(defun cl-user::from-tests () :tests)");
    for arguments in [
        json!({"system": "app", "directory": "app/deep/down"}),
        json!({"system": "app", "directory": "."}),
        json!({"system": "app"}),
        json!({"path": "app"}),
        json!({"directory": "app"}),
        json!({"path": project.path("app/app.asd")}),
        json!({"system": "#:APP", "directory": project.path("app")}),
    ] {
        let text = load(&mut project.server(), arguments.clone());
        assert!(text.ends_with("\nDefined in app/app.asd"), "{arguments}: {text}");
    }
    let mut server = project.server();
    let text = load(&mut server, json!({"system": "several/tests", "directory": "several"}));
    assert_eq!(text, "Loaded several/tests: 1 file, 1 compiled, T s\nDefined in several/several.asd");
    assert_eq!(server.evaluate("(from-tests)"), "=> :TESTS");
    let text = load(&mut server, json!({"system": "other-name", "directory": "odd"}));
    assert!(
        text.starts_with("other-name is up to date: 0 files, T s\nDefined in odd/odd.asd\n\n[warnings]\n"),
        "{text}"
    );
    assert_eq!(text.matches("contains definition for system").count(), 1, "{text}");
    // Several system definitions in one directory.
    project.write("several/more.asd", "(defsystem \"more\")");
    let text = load_err(&mut server, json!({"path": "several"}));
    assert!(
        text.ends_with(
            "has several .asd files: name one of the systems more, several, and pass this directory as `directory`."
        ),
        "{text}"
    );
    for (arguments, message) in [
        (json!({}), "load-system needs system, path or directory."),
        (json!({"system": "a", "path": "b"}), "load-system takes system or path, not both."),
        (
            json!({"system": "app", "directory": "nowhere"}),
            "The argument directory must be an existing directory, not ",
        ),
        (json!({"system": "app", "force": "yes"}), "load-system: force must be one of none, self, all, not \"yes\"."),
    ] {
        let text = load_err(&mut server, arguments);
        assert!(text.starts_with(message), "{text}");
    }
}

#[test]
fn warnings_name_file_line_column_and_form() {
    let project = Project::new();
    project.system(
        "notes",
        &[
            ("a", "(defpackage :notes (:use :cl))\n(in-package :notes)\n\n(defun pad (n)\n  (let ((m 1))\n    (nowhere)))\n"),
            (
                "b",
                "(in-package :notes)\n(format t \"progress~%\")\n(defun call ()\n  (pad))\n\
                 (define-condition mine (warning) ())\n(warn 'mine)",
            ),
        ],
    );
    let mut server = project.server();
    let text = load(&mut server, json!({"system": "notes", "directory": "notes"}));
    let expected = "Loaded notes: 2 files, 2 compiled, 5 warnings, T s
Defined in notes/notes.asd

[stdout]
progress

[warnings]
notes/a.lisp:5:9 in (DEFUN PAD): STYLE-WARNING: The variable M is defined but never used.
notes/a.lisp:4:1 in (DEFUN PAD): STYLE-WARNING: The variable N is defined but never used.
notes/b.lisp:4:3 in (DEFUN CALL): STYLE-WARNING: The function PAD is called with zero arguments, but wants exactly one.
notes/b.lisp:6:1 in (WARN): NOTES::MINE: Condition NOTES::MINE was signalled.
notes/a.lisp:6:5 in (DEFUN NOTES::PAD): STYLE-WARNING: undefined function: NOTES::NOWHERE";
    assert_eq!(text, expected);
    // Long output is cut; check-evaluation has all of it.
    project.write("notes/long.lisp", "(dotimes (i 1000) (format t \"line ~d~%\" i))");
    let text = load(&mut server, json!({"path": "notes/long.lisp"}));
    assert!(text.starts_with("Loaded notes/long.lisp: 1 file, T s\n\n[stdout]\nline 0\n"), "{text}");
    assert!(text.len() < 2_000 && text.contains("\"part\": \"output\"") && text.ends_with("line 999"), "{text}");
}

#[test]
fn failed_load_names_file_line_form_and_condition() {
    let project = Project::new();
    let mut server = project.server();
    let package = ("p", "(defpackage :broken (:use :cl))");
    let cases: &[(&str, &[u8], &[&str])] = &[
        (
            "unfinished",
            b"(in-package :broken)\n\n(defun f ()\n  (let ((x 1))\n    x)\n",
            &[
                "COMPILE-FILE-ERROR",
                "unfinished/a.lisp:3:1 in (DEFUN F): COMPILE-TIME-ERROR: READ error",
                "end of file",
                "\nBy the indentation, line 5: ",
            ],
        ),
        (
            "bad-macro",
            b"(in-package :broken)\n(defmacro bad () (error \"from the macro\"))\n(defun f ()\n  (list 1)\n  (bad))\n",
            &[
                "bad-macro/a.lisp:5:3 in (DEFUN F): COMPILE-TIME-ERROR: during macroexpansion of (BAD)",
                "from the macro",
            ],
        ),
        (
            "full-warning",
            b"(in-package :broken)\n(defun f ()\n  (car 2))\n",
            &["full-warning/a.lisp:3:3 in (DEFUN F): WARNING: Constant 2 conflicts with its asserted type LIST."],
        ),
        (
            "no-package",
            b"(in-package :broken)\n(defun f ()\n  (no-such-package:f))\n",
            &[
                "no-package/a.lisp:2:1 in (DEFUN F): COMPILE-TIME-ERROR: READ error",
                "Package NO-SUCH-PACKAGE does not exist",
            ],
        ),
        (
            "latin",
            b"(in-package :broken)\n(defun f ()\n  \"caf\xe9\")\n",
            &["latin/a.lisp:2:1 in (DEFUN F): COMPILE-TIME-ERROR: READ error", ":UTF-8 stream decoding error"],
        ),
        (
            "at-load",
            b"(in-package :broken)\n(defun f (x)\n  (/ 1 x))\n\n(defvar *f*\n  (f 0))\n",
            &["[ERROR] DIVISION-BY-ZERO", "\nIn at-load/a.lisp:6, in (DEFVAR *F*)."],
        ),
    ];
    for (name, text, expected) in cases {
        project.system(name, &[package, ("a", "")]);
        project.write(&format!("{name}/a.lisp"), text);
        let arguments = json!({"system": name, "directory": name});
        // The second attempt fails as well: a failed compilation leaves no fasl that loads.
        for _ in 0..2 {
            let answer = load_err(&mut server, arguments.clone());
            for part in *expected {
                assert!(before_backtrace(&answer).contains(part), "{name} lacks {part:?}:\n{answer}");
            }
            assert!(!answer.contains("EVAL"), "{answer}");
            assert!(answer.matches("in (DEFUN F)").count() <= 1, "each is told once:\n{answer}");
            let described = call_ok(&mut server, "describe-last-error", json!({}));
            let last = expected.last().unwrap().trim();
            assert!(described.contains(last), "{described}");
            assert!(described.contains(". RETRY - ") && described.contains(". ABORT - "), "{described}");
        }
        project.write(&format!("{name}/a.lisp"), "(in-package :broken)\n(defun f () :mended)\n");
        load(&mut server, arguments);
        assert_eq!(server.evaluate("(broken::f)"), "=> :MENDED", "{name}");
        assert!(crate::client::last_error(&mut server).starts_with("No error information available."));
    }
}

#[test]
fn missing_file_or_system_is_reported_with_the_requiring_system() {
    let project = Project::new();
    let mut server = project.server();
    project.write("no-file/no-file.asd", "(defsystem \"no-file\" :components ((:file \"gone\")))");
    let text = load_err(&mut server, json!({"system": "no-file", "directory": "no-file"}));
    assert!(before_backtrace(&text).contains("no-file/gone.lisp"), "{text}");
    assert!(before_backtrace(&text).contains("ASDF was compiling #<CL-SOURCE-FILE \"no-file\" \"gone\">."), "{text}");

    project.write("wants/wants.asd", "(defsystem \"wants\" :depends-on (\"no-fiel\"))");
    let text = load_err(&mut server, json!({"system": "wants", "directory": "wants"}));
    let expected = "[ERROR] ASDF/FIND-COMPONENT:MISSING-DEPENDENCY\n\
                    Component \"no-fiel\" not found, required by #<SYSTEM \"wants\">\nDid you mean no-file?\nNot found in ";
    assert!(text.starts_with(expected), "{text}");
    assert!(
        before_backtrace(&text).ends_with(
            "\nCheck the system's name and the directory of its .asd file. The system cannot be fetched, because neither \
             Quicklisp nor OCICL is loaded in this image or found in the user's home directory."
        ),
        "{text}"
    );

    let text = load_err(&mut server, json!({"system": "wnats"}));
    assert!(
        text.starts_with("[ERROR] ASDF/FIND-COMPONENT:MISSING-COMPONENT\nComponent \"wnats\" not found\n"),
        "{text}"
    );
    assert!(text.contains("\nDid you mean wants?\nNot found in "), "{text}");
    assert!(
        text.contains(&format!("{}, its parent directories", project.path("").display()).replace("/,", ",")),
        "{text}"
    );

    project.write(
        "circle/circle.asd",
        "(defsystem \"circle\" :components ((:file \"a\" :depends-on (\"b\")) (:file \"b\" :depends-on (\"a\"))))",
    );
    project.write("circle/a.lisp", "1").write("circle/b.lisp", "1");
    let text = load_err(&mut server, json!({"system": "circle", "directory": "circle"}));
    assert!(text.starts_with("[ERROR] ASDF/ACTION:CIRCULAR-DEPENDENCY\nCircular dependency: "), "{text}");

    project.write("bad-asd/bad-asd.asd", "(defsystem \"bad-asd\"\n  :components ((:file \"a\"))\n");
    let text = load_err(&mut server, json!({"system": "bad-asd", "directory": "bad-asd"}));
    assert!(text.starts_with("[ERROR] ASDF/FIND-SYSTEM:LOAD-SYSTEM-DEFINITION-ERROR\n"), "{text}");
    assert!(
        before_backtrace(&text).contains("bad-asd/bad-asd.asd") && before_backtrace(&text).contains("end of file"),
        "{text}"
    );
    server.assert_works();
}

#[test]
fn quicklisp_fetches_systems_not_found_by_asdf() {
    let project = Project::new();
    app(&project);
    project.write("app/app.asd", "(defsystem \"app\" :depends-on (\"fetched\"))");
    project.write("dist/fetched/fetched.asd", "(defsystem \"fetched\" :components ((:file \"f\")))");
    project.write("dist/fetched/f.lisp", "(defun cl-user::fetched () :fetched)");
    let dist = project.path("dist/fetched/");
    std::fs::write(
        project.root.join("home/.sbclrc"),
        format!(
            "(defpackage :ql (:use :cl) (:export #:quickload))
             (defun ql:quickload (name &key silent)
               (unless (and silent (string= name \"fetched\")) (error \"~a is in no dist\" name))
               (push #p\"{}\" asdf:*central-registry*)
               (asdf:load-system name))",
            dist.display()
        ),
    )
    .expect("the home is ours");
    let mut server = project.server_with(&["--user-init"]);
    let text = load(&mut server, json!({"system": "app", "directory": "app"}));
    assert!(text.starts_with("Loaded app: 1 file, 1 compiled, T s\nWith fetched\n"), "{text}");
    assert_eq!(server.evaluate("(fetched)"), "=> :FETCHED");
    let text = load_err(&mut server, json!({"system": "unheard-of"}));
    assert!(text.contains("unheard-of is in no dist"), "{text}");
}

// ---- Files

#[test]
fn a_source_file_is_compiled_form_by_form() {
    let project = Project::new();
    project.write("one.lisp", "(defun later ()\n  (defined-below))\n\n(defun defined-below ()\n  (error \"here\"))\n");
    let mut server = project.server();
    assert_eq!(load(&mut server, json!({"path": "one.lisp"})), "Loaded one.lisp: 1 file, T s");
    assert_eq!(server.evaluate("(compiled-function-p #'later)"), "=> T");
    call_err(&mut server, "evaluate-lisp", json!({"code": "(later)"}));
    let frames = call_ok(&mut server, "get-backtrace", json!({}));
    assert!(frames.contains("(DEFINED-BELOW)\n     at one.lisp:5: (error \"here\"))"), "{frames}");
    // A form that the compiler replaces by a run-time error loads, as in bare SBCL.
    project.write("two.lisp", "(defmacro bad () (error \"macro\"))\n(defun two ()\n  (bad))\n");
    let text = load(&mut server, json!({"path": "two.lisp"}));
    assert!(text.starts_with("Loaded two.lisp: 1 file, 1 compile-time error, T s\n\n[warnings]\ntwo.lisp:3:3 in (DEFUN TWO): COMPILE-TIME-ERROR: "), "{text}");
    // Errors have a source location.
    project.write("three.lisp", "(defvar *a* 1)\n\n(defun three ()\n  (car *a*))\n(defvar *b*\n  (three))\n");
    let text = load_err(&mut server, json!({"path": "three.lisp"}));
    assert!(
        before_backtrace(&text)
            .contains("[ERROR] TYPE-ERROR\nThe value 1 is not of type LIST\nIn three.lisp:5, in (DEFVAR *B*)."),
        "{text}"
    );
    let text = load_err(&mut server, json!({"path": "nowhere.lisp"}));
    assert!(text.starts_with("[ERROR] ") && text.contains("nowhere.lisp"), "{text}");
    // The `package` argument applies to this call only.
    project.write("four.lisp", "(defun four () 4)");
    server.evaluate("(defpackage :other (:use :cl))");
    load(&mut server, json!({"path": "four.lisp", "package": "OTHER"}));
    assert_eq!(server.evaluate("(list (other::four) (package-name *package*))"), "=> (4 \"COMMON-LISP-USER\")");
}

#[test]
fn fasl_of_another_sbcl_or_incomplete_fasl_is_rebuilt_from_source() {
    let project = Project::new();
    project.write("one.lisp", "(defun one () 1)");
    let mut server = project.server();
    server.evaluate(&format!("(compile-file {:?})", project.path("one.lisp")));
    assert_eq!(load(&mut server, json!({"path": "one.fasl"})), "Loaded one.fasl: 1 file, T s");
    assert_eq!(server.evaluate("(one)"), "=> 1");
    let date = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).expect("a date");
    // The date must not change: files that depend on a newer fasl would be compiled, too.
    let overwrite = |path: &Path, bytes: &[u8], date: SystemTime| {
        std::fs::write(path, bytes).expect("the file is writable");
        File::options().append(true).open(path).expect("a file").set_modified(date).expect("the file is writable");
    };
    let spoil = |path: &Path| {
        let mut fasl = std::fs::read(path).expect("a fasl");
        let version = sbcl::SBCL_VERSION.as_bytes();
        let places: Vec<_> = (0..fasl.len()).filter(|&at| fasl[at..].starts_with(version)).collect();
        assert!(!places.is_empty());
        for at in places {
            fasl[at..at + version.len()].fill(b'0');
        }
        overwrite(path, &fasl, date(path));
    };
    spoil(&project.path("one.fasl"));
    project.write("one.lisp", "(defun one () :anew)");
    let text = load(&mut server, json!({"path": "one.fasl"}));
    assert!(text.contains("one.fasl was made by another SBCL: its source is loaded instead."), "{text}");
    assert_eq!(server.evaluate("(one)"), "=> :ANEW");

    app(&project);
    load(&mut server, json!({"system": "app", "directory": "app"}));
    let find = Command::new("find").arg(project.root.join("cache")).args(["-name", "a.fasl"]).output().expect("find");
    let fasl = String::from_utf8(find.stdout).expect("a name");
    let fasl = Path::new(fasl.trim());
    let compiled = date(fasl);
    spoil(fasl);
    let mut server = project.server();
    let text = load(&mut server, json!({"system": "app", "directory": "app"}));
    assert!(text.starts_with("Loaded app: 3 files, 1 compiled, T s"), "{text}");
    assert_eq!(server.evaluate("(app:run)"), "=> 2");

    // An empty file, a part of the header, and code that ends too early.
    let whole = std::fs::read(fasl).expect("a fasl");
    for length in [0, 20, 200, whole.len() / 2, whole.len() - 1] {
        overwrite(fasl, &whole[..length], compiled);
        let mut server = project.server();
        let text = load(&mut server, json!({"system": "app", "directory": "app"}));
        assert!(text.starts_with("Loaded app: 3 files, 1 compiled, T s"), "{length}: {text}");
        assert_eq!(server.evaluate("(app:run)"), "=> 2");
    }
    overwrite(fasl, &whole[..200], compiled);
    let text = load_err(&mut project.server(), json!({"path": fasl}));
    assert!(before_backtrace(&text).contains("a.fasl"), "{text}");
    overwrite(&project.path("one.fasl"), &whole[..200], compiled);
    let text = load(&mut server, json!({"path": "one.fasl"}));
    assert!(text.contains("one.fasl is incomplete: its source is loaded instead."), "{text}");
    assert_eq!(server.evaluate("(one)"), "=> :ANEW");
}

#[test]
fn unbalanced_file_error_hints_at_the_misplaced_parenthesis() {
    let project = Project::new();
    let mut server = project.server();
    project.write("few.lisp", "(defun a (x)\n  (list x)\n\n(defun b (y)\n  (list y))\n");
    project.write("many.lisp", "(defun a (x)\n  (list x)))\n\n(defun b (y)\n  (list y))\n");
    project.write("fine.lisp", "(defun a () (with-input-from-string (in \"(\") (read in)))\n(a)\n");
    for (file, hint) in [
        ("few.lisp", Some("line 2: the form that begins at line 1 is probably not closed: one ) missing at 2:11")),
        ("many.lisp", Some("line 2: one ) too many at 2:12")),
        ("fine.lisp", None),
    ] {
        let text = load_err(&mut server, json!({"path": file}));
        let said = text.lines().find_map(|line| line.strip_prefix("By the indentation, "));
        assert_eq!(said, hint, "{text}");
    }
}

// ---- Loading again

#[test]
fn reload_names_stale_definitions_and_defvars_with_old_values() {
    let project = Project::new();
    let before = "(in-package :app)
(defvar *limit* 10)
(defvar *same* 1)
(defparameter *parameter* 1)
(defun gone () 1)
(defun old-name () 2)
(defmacro gone-macro () 3)
(defgeneric meth (x))
(defmethod meth ((x integer)) 1)
(defmethod meth ((x string)) 2)
(defclass shape () ())
(define-method-combination combined)
(defun moved () 1)
";
    let after = "(in-package :app)
;; (defvar *limit* 15)
(defvar *limit* (* 2
                   10))
(defvar *same*   1 \"Documented.\")
(defparameter *parameter* 2)
(defun new-name () 2)
(defgeneric meth (x))
(defmethod meth ((x integer)) 1)
";
    project.system("app", &[("package", PACKAGE), ("a", before), ("b", "(in-package :app)")]).build("app");
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    project.write("app/a.lisp", after).write("app/b.lisp", "(in-package :app)\n(defun moved () 2)");
    let text = load(&mut server, json!({"system": "app"}));
    let expected = "[notice]
APP::*LIMIT* keeps its value: its DEFVAR in app/a.lisp has changed, but DEFVAR does not reassign a bound \
                    variable. To assign the new value, in the file's package: (setf APP::*LIMIT* (* 2                    10)).
The image still has definitions that app/a.lisp no longer contains: function APP::GONE, function APP::OLD-NAME, macro \
                    APP::GONE-MACRO, method APP::METH (STRING), class APP::SHAPE, method combination APP::COMBINED.

Loaded app: 2 files, 2 compiled, T s";
    assert_eq!(text, expected);
    assert_eq!(server.evaluate("(list app::*limit* app::*parameter* (app::moved))"), "=> (10 2 2)");
    // The notice comes once, since nothing has changed afterwards.
    let text = load(&mut server, json!({"system": "app", "force": "self"}));
    assert_eq!(text, "Loaded app: 3 files, 3 compiled, T s");
    // The same holds for files; and definitions that were removed from the image are not named.
    project.write("f.lisp", "(defvar *v* 1)\n(defun f () 1)\n(defun g () 1)");
    load(&mut server, json!({"path": "f.lisp"}));
    server.evaluate("(makunbound '*v*) (fmakunbound 'g)");
    project.write("f.lisp", "(defvar *v* 2)");
    let text = load(&mut server, json!({"path": "f.lisp"}));
    insta::assert_snapshot!(text, @r"
    [notice]
    The image still has definitions that f.lisp no longer contains: function F.

    Loaded f.lisp: 1 file, T s
    ");
    assert_eq!(server.evaluate("*v*"), "=> 2");
}

#[test]
fn load_of_an_unchanged_file_names_no_obsolete_definition() {
    let project = Project::new();
    let mut server = project.server();
    // The file makes its definitions only once, by means that its text does not show.
    project.write(
        "once.lisp",
        "(defgeneric kind (x))
         (defmethod kind ((x (eql '#1=(1 . #1#)))) :circular)
         (defvar *made* nil)
         (unless *made* (setf *made* t) (eval (read-from-string \"(defun made () 1)\")))
         (defvar *fail* nil)
         (when *fail* (error \"at load\"))",
    );
    let loaded = "Loaded once.lisp: 1 file, T s";
    assert_eq!(load(&mut server, json!({"path": "once.lisp"})), loaded);
    server.evaluate("(setf *fail* t)");
    let text = load_err(&mut server, json!({"path": "once.lisp"}));
    assert!(text.contains("at load"), "{text}");
    server.evaluate("(setf *fail* nil)");
    for _ in 0..2 {
        assert_eq!(load(&mut server, json!({"path": "once.lisp"})), loaded);
    }
    project.write("once.lisp", "(defvar *made* nil)");
    let text = load(&mut server, json!({"path": "once.lisp"}));
    assert!(text.contains("no longer contains: function KIND"), "{text}");
    assert!(text.contains("method KIND ((EQL #1=(1 . #1#)))"), "{text}");
}

#[test]
fn load_names_definitions_of_files_that_their_system_no_longer_contains() {
    let project = Project::new();
    let package = ("package", PACKAGE);
    let removed = "(in-package :app)
(defun gone () 1)
(defun moved () 1)
(defun redefined () 1)
(when t
  (defun conditional () 1))
(defclass shape () ((sides :accessor sides)))
(define-method-combination combined)
";
    project.system("app", &[package, ("a", removed), ("b", "(in-package :app)")]);
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    server.evaluate("(defun app::redefined () 2)");
    project.system("app", &[package, ("b", "(in-package :app)\n(defun moved () 2)")]);
    let text = load(&mut server, json!({"system": "app"}));
    let expected = "[notice]
The image still has definitions of app/a.lisp, a file that the system app no longer contains: function APP::GONE, function \
                    APP::CONDITIONAL, class APP::SHAPE, method combination APP::COMBINED.

Loaded app: 2 files, 2 compiled, T s";
    assert_eq!(text, expected);
    // The notice comes once.
    let text = load(&mut server, json!({"system": "app", "force": "self"}));
    assert_eq!(text, "Loaded app: 2 files, 2 compiled, T s");
    // A file of a dependency is named, too. After a failed load, the next load names the file, because the definitions may have
    // moved to a file that is not loaded yet.
    project.system("app", &[package]);
    project.write("top/top.asd", "(defsystem \"top\" :depends-on (\"app\") :components ((:file \"top\")))");
    project.write("top/top.lisp", "(error \"not yet\")");
    let text = load_err(&mut server, json!({"system": "top", "directory": "top"}));
    assert!(!text.contains("no longer contains"), "{text}");
    project.write("top/top.lisp", "");
    let text = load(&mut server, json!({"system": "top"}));
    let expected = "definitions of app/b.lisp, a file that the system app no longer contains: function APP::MOVED.\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn load_names_definitions_of_a_deleted_file_of_a_package_inferred_system() {
    let project = Project::new();
    project.write("app/app.asd", "(defsystem \"app\" :class :package-inferred-system :depends-on (\"app/a\"))");
    let importing = |imports: &str| format!("(defpackage :app/a (:use :cl){imports})\n(in-package :app/a)\n");
    project.write("app/a.lisp", importing(" (:import-from :app/b)"));
    project.write("app/b.lisp", "(defpackage :app/b (:use :cl))\n(in-package :app/b)\n(defun gone () 1)\n");
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    // The file is still a system of its own, although no other system depends on it.
    project.write("app/a.lisp", importing(""));
    let text = load(&mut server, json!({"system": "app"}));
    assert!(!text.contains("no longer contains"), "{text}");
    std::fs::remove_file(project.path("app/b.lisp")).expect("the file is there");
    let text = load(&mut server, json!({"system": "app"}));
    let expected = "definitions of app/b.lisp, a file that the system app no longer contains: package \"APP/B\", function \
                    APP/B::GONE.\n";
    assert!(text.contains(expected), "{text}");
    // The notice comes once.
    let text = load(&mut server, json!({"system": "app", "force": "self"}));
    assert!(!text.contains("no longer contains"), "{text}");
}

#[test]
fn file_that_another_loaded_system_contains_is_not_reported_as_removed() {
    let project = Project::new();
    let define = |name: &str, files: &[&str]| {
        let components: String = files.iter().map(|file| format!("(:file \"{file}\")")).collect();
        project.write(&format!("app/{name}.asd"), format!("(defsystem \"{name}\" :components ({components}))"));
    };
    for file in ["shared", "other", "rest"] {
        project.write(&format!("app/{file}.lisp"), format!("(defun {file}-function () 1)"));
    }
    define("one", &["shared"]);
    define("two", &["shared", "other", "rest"]);
    let mut server = project.server();
    for system in ["one", "two"] {
        load(&mut server, json!({"system": system, "directory": "app"}));
    }
    define("two", &["rest"]);
    let text = load(&mut server, json!({"system": "two"}));
    let expected =
        "definitions of app/other.lisp, a file that the system two no longer contains: function OTHER-FUNCTION.\n";
    assert!(text.contains(expected), "{text}");
    assert_eq!(text.matches("no longer contains").count(), 1, "{text}");
}

#[test]
fn reload_names_variables_with_old_values_whatever_the_spelling_of_the_operator() {
    let project = Project::new();
    let file = |value: u8| {
        let former_parameter = if value == 1 { "defparameter" } else { "defvar" };
        format!(
            "(defpackage :app (:use :cl :sb-ext))
(in-package :app)
(cl:defvar *a* {value})
  ( DefVar
      *b* {value})
(defglobal *c* {value})
(SB-EXT:DEFGLOBAL *d* {value})
(sb-ext:define-load-time-global *e* {value})
(#| |# defvar *f* {value})
(list '(defvar *g* {value}))
(defparameter *h* {value}) (defvar *i* {value}) (defvar *j* {value})
({former_parameter} *k* {value})
"
        )
    };
    project.write("f.lisp", file(1));
    let mut server = project.server();
    load(&mut server, json!({"path": "f.lisp"}));
    project.write("f.lisp", file(2));
    let text = load(&mut server, json!({"path": "f.lisp"}));
    let expected = [
        ("A", "DEFVAR"),
        ("B", "DEFVAR"),
        ("C", "DEFGLOBAL"),
        ("D", "DEFGLOBAL"),
        ("E", "DEFINE-LOAD-TIME-GLOBAL"),
        ("F", "DEFVAR"),
        ("I", "DEFVAR"),
        ("J", "DEFVAR"),
        ("K", "DEFVAR"),
    ];
    for (name, operator) in expected {
        let kept = format!(
            "APP::*{name}* keeps its value: its {operator} in f.lisp has changed, but {operator} does not reassign a bound \
             variable. To assign the new value, in the file's package: (setf APP::*{name}* 2).\n"
        );
        assert!(text.contains(&kept), "{text}");
    }
    assert_eq!(text.matches(" keeps its value: ").count(), expected.len(), "{text}");
}

#[test]
fn reload_gives_at_most_eleven_notices_of_variables_with_old_values() {
    let project = Project::new();
    let file = |value: u8| (0..13).map(|n| format!("(defvar *v{n}* {value})\n")).collect::<String>();
    project.write("f.lisp", file(1));
    let mut server = project.server();
    load(&mut server, json!({"path": "f.lisp"}));
    project.write("f.lisp", file(2));
    let text = load(&mut server, json!({"path": "f.lisp"}));
    assert_eq!(text.matches(" keeps its value: ").count(), 10, "{text}");
    let others = "The same applies to these variables: *V10*, *V11*, *V12*.";
    assert!(text.contains(others), "{text}");
}

#[test]
fn reload_names_dozens_of_removed_definitions_and_counts_the_others() {
    let project = Project::new();
    let mut server = project.server();
    let name = |n: usize| format!("removed-{n:04}");
    for (count, is_complete) in [(30_usize, true), (200, false)] {
        let forms = (0..count).map(|n| format!("(defun {} () 1)\n", name(n))).collect::<String>();
        project.write("f.lisp", forms);
        load(&mut server, json!({"path": "f.lisp"}));
        project.write("f.lisp", "(defun kept () 1)");
        let text = load(&mut server, json!({"path": "f.lisp"}));
        let named = (0..count).filter(|n| text.contains(&format!("function {}", name(*n).to_uppercase()))).count();
        assert_eq!(named == count, is_complete, "{text}");
        assert!(named >= 30, "{text}");
        assert_eq!(text.contains(&format!(" and {} more.", count - named)), !is_complete, "{text}");
    }
}

#[test]
fn reload_reports_no_variable_whose_name_the_file_defines_in_two_packages() {
    let project = Project::new();
    let file = |value: u8| format!("(in-package :app)\n(defvar *v* 1)\n(defvar cl-user::*v* {value})\n");
    project.system("app", &[("package", PACKAGE), ("a", &file(1))]).build("app");
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    project.write("app/a.lisp", file(2));
    let text = load(&mut server, json!({"system": "app"}));
    assert!(!text.contains("keeps its value"), "{text}");
}

// ---- Error state and recovery

#[test]
fn load_sets_the_error_state_like_an_evaluation() {
    let project = Project::new();
    app(&project);
    project
        .write("bad.lisp", "(error \"first\")")
        .write("held.lisp", "(defvar *x* (restart-case (error \"held\") (use-value (v) v)))");
    let mut server = project.server();
    load_err(&mut server, json!({"path": "bad.lisp"}));
    assert!(crate::client::last_error(&mut server).starts_with("Error: SIMPLE-ERROR\n  first\n"));
    let shown = call_ok(&mut server, "check-evaluation", json!({}));
    assert!(shown.contains("(cl:load #P\"") && shown.contains("bad.lisp"), "{shown}");
    load(&mut server, json!({"system": "app", "directory": "app"}));
    assert!(crate::client::last_error(&mut server).starts_with("No error information available."));
    // A load can be held where it fails, and resumed.
    let text = load_err(&mut server, json!({"path": "held.lisp", "on-error": "debug"}));
    assert!(text.contains("\n[Debugger]\nHeld. Restarts:\n  1. USE-VALUE"), "{text}");
    // This restart loads the whole file again; SBCL's own RETRY evaluates only the form.
    assert!(text.contains(". RETRY - Run this call again from the start.\n"), "{text}");
    let text = call_ok(&mut server, "invoke-restart", json!({"restart": "USE-VALUE", "values": "7"}));
    assert!(without_times(&text).ends_with("Loaded held.lisp: 1 file, T s"), "{text}");
    assert_eq!(server.evaluate("*x*"), "=> 7");
    // A time limit, and unusual printer variables.
    project.write("slow.lisp", "(loop)");
    let text = load_err(&mut server, json!({"path": "slow.lisp", "timeout": 0.3}));
    assert!(text.starts_with("[ERROR] TIMEOUT\n"), "{text}");
    server.evaluate("(setf *print-base* 2 *print-radix* t *print-case* :capitalize *print-length* 1 *read-base* 3)");
    let text = load(&mut server, json!({"system": "app", "force": "all"}));
    assert_eq!(text, "Loaded app: 3 files, 3 compiled, T s");
    // A reset forgets the loaded files.
    call_ok(&mut server, "reset-session", json!({}));
    let text = load(&mut server, json!({"system": "app", "directory": "app"}));
    assert_eq!(text, "Loaded app: 3 files, T s\nDefined in app/app.asd");
}

/// Writes two checkouts of the system `app` in the directories `main` and `fix`, with .asd files of these names. Its function
/// `value` returns 1 in `main` and 2 in `fix`. The file project.asd also defines a system of its own name.
fn checkouts(project: &Project, [main, fix]: [&str; 2]) {
    for (checkout, definition, value) in [("main", main, 1), ("fix", fix, 2)] {
        let other = if definition == "project.asd" { "(defsystem \"project\")\n" } else { "" };
        let system = format!("{other}(defsystem \"app\" :components ((:file \"app\")))");
        project.write(&format!("{checkout}/{definition}"), system);
        project.write(&format!("{checkout}/app.lisp"), format!("(defun value () {value})"));
    }
}

/// Names of the .asd files of two checkouts, for [`checkouts`].
const CHECKOUTS: [[&str; 2]; 4] =
    [["app.asd", "app.asd"], ["project.asd", "project.asd"], ["app.asd", "project.asd"], ["project.asd", "app.asd"]];

#[test]
fn the_directory_of_a_call_takes_precedence_over_directories_of_earlier_calls() {
    for definitions in CHECKOUTS {
        let project = Project::new();
        checkouts(&project, definitions);
        let [main, fix] = definitions;
        let mut server = project.server();
        let by_name = |checkout: &str| json!({"system": "app", "directory": checkout});
        let mut calls = vec![("main", by_name("main"), 1), ("fix", by_name("fix"), 2), ("main", by_name("main"), 1)];
        if definitions == ["app.asd", "app.asd"] {
            calls.push(("fix", json!({"path": "fix/app.asd"}), 2));
            calls.push(("main", json!({"path": "main"}), 1));
        }
        for (checkout, arguments, value) in calls {
            let text = load(&mut server, arguments.clone());
            let definition = if checkout == "main" { main } else { fix };
            assert!(text.contains(&format!("\nDefined in {checkout}/{definition}")), "{checkout}: {text}");
            assert_eq!(server.evaluate("(value)"), format!("=> {value}"), "{checkout}/{definition}");
            let text = load(&mut server, arguments);
            assert!(text.starts_with("app is up to date: 1 file"), "{checkout}/{definition}: {text}");
        }
        // A directory that the user adds takes precedence, too.
        if fix == "app.asd" {
            server.evaluate("(push (truename \"fix/\") asdf:*central-registry*)");
            load(&mut server, json!({"system": "app"}));
            assert_eq!(server.evaluate("(value)"), "=> 2", "{definitions:?}");
        }
    }
}

#[test]
fn loading_another_checkout_names_variables_with_old_values() {
    let project = Project::new();
    checkouts(&project, ["app.asd"; 2]);
    for (checkout, value) in [("main", 1), ("fix", 2)] {
        let variables = format!("(defvar *kept* {value})\n(defvar *same* 0)\n(defparameter *new* {value})");
        project.write(&format!("{checkout}/app.lisp"), variables);
    }
    let mut server = project.server();
    let text = load(&mut server, json!({"system": "app", "directory": "main"}));
    assert!(!text.contains("keeps its value"), "{text}");
    let text = load(&mut server, json!({"system": "app", "directory": "fix"}));
    let kept = "*KEPT* may keep an earlier value: its DEFVAR in fix/app.lisp differs from that in main/app.lisp, but \
                DEFVAR does not reassign a bound variable. To assign the new value, in the file's package: \
                (setf *KEPT* 2).\n";
    assert!(text.contains(kept), "{text}");
    assert_eq!(text.matches("value: ").count(), 1, "{text}");
    assert_eq!(server.evaluate("(list *kept* *new*)"), "=> (1 2)");
    // The notice comes once.
    let text = load(&mut server, json!({"system": "app", "force": "self"}));
    assert!(!text.contains("value: "), "{text}");
    // The variable already has the first checkout's value.
    let text = load(&mut server, json!({"system": "app", "directory": "main"}));
    assert!(!text.contains("value: "), "{text}");
    assert_eq!(server.evaluate("(list *kept* *new*)"), "=> (1 1)");
    // If the value may come from anywhere, no file is said to have changed.
    server.evaluate("(setf *kept* 3)");
    let text = load(&mut server, json!({"system": "app", "directory": "fix"}));
    assert!(text.contains(kept), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_system_is_restored_only_from_the_directory_from_which_it_was_loaded() {
    for definitions in CHECKOUTS {
        let project = Project::new();
        checkouts(&project, definitions);
        let mut server = project.server();
        load(&mut server, json!({"system": "app", "directory": "fix"}));
        load(&mut server, json!({"system": "app", "directory": "main"}));
        load(&mut server, json!({"system": "app", "directory": "fix"}));
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(value)");
        assert!(text.contains("Restored: all 3 defining forms.") && text.ends_with("=> 2"), "{definitions:?}: {text}");
        std::fs::remove_file(project.path("fix").join(definitions[1])).expect("a file");
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(value)");
        assert!(
            text.contains("Not restored:") && text.contains("- ; load-system app from /"),
            "{definitions:?}: {text}"
        );
        assert!(text.ends_with("=> 1"), "{definitions:?}: {text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_failed_reload_is_not_listed_as_not_restored_when_the_system_is_restored() {
    let project = Project::new();
    project.system("app", &[("a", "(defun a () 1)"), ("b", "(defun b () 1)")]);
    let mut server = project.server();
    let arguments = json!({"system": "app", "directory": "app"});
    load(&mut server, arguments.clone());
    for broken in ["(error \"at load time\")", "(defun b ("] {
        project.write("app/a.lisp", "(defun a () 2)").write("app/b.lisp", broken);
        load_err(&mut server, arguments.clone());
        project.write("app/b.lisp", "(defun b () 2)");
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(list (a) (b))");
        assert!(!text.contains("Not restored:") && text.ends_with("=> (2 2)"), "{broken}: {text}");
        let text = call_ok(&mut server, "list-definitions", json!({}));
        assert!(!text.contains("[Not Restored]"), "{broken}: {text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn an_unrestored_load_is_resolved_by_a_load_that_finds_the_dependencies_in_the_image() {
    let project = Project::new();
    project
        .write("app/dep.asd", "(defsystem \"dep\" :components ((:file \"d\")))")
        .write("app/d.lisp", "(defun d () 1)")
        .write("app/app.asd", "(defsystem \"app\" :depends-on (\"dep\") :components ((:file \"a\")))")
        .write("app/a.lisp", "(defun a () 1)");
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    project.write("app/a.lisp", "(error \"broken\")");
    crate::processes::kill_worker(&server);
    let text = server.evaluate("(d)");
    assert!(text.contains("The one defining form was not restored:") && text.ends_with("=> 1"), "{text}");
    project.write("app/a.lisp", "(defun a () 2)");
    load(&mut server, json!({"system": "app"}));
    assert_eq!(server.evaluate("(a)"), "=> 2");
    let text = call_ok(&mut server, "list-definitions", json!({}));
    assert!(!text.contains("[Not Restored]"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_failed_load_of_a_system_is_listed_as_not_restored_until_the_system_is_loaded() {
    let (failing_load, failing_form) =
        ("(asdf:load-system \"app\")", "(progn (asdf:load-system \"app\") (error \"then\"))");
    for (end, code) in [("(error \"unfinished\")", failing_load), ("", failing_form)] {
        let project = Project::new();
        let write = |end: &str| {
            project.system("app", &[("package", PACKAGE), ("a", &format!("(in-package :app)\n(defun a () 1)\n{end}"))]);
        };
        write(end);
        let mut server = project.server();
        server.evaluate("(push (truename \"app/\") asdf:*central-registry*)");
        call_err(&mut server, "evaluate-lisp", json!({"code": code}));
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(find-package :app)");
        assert!(text.contains("(the form failed after defining or loading SYSTEM app)"), "{text}");
        assert!(text.ends_with("=> NIL"), "{text}");
        write("");
        load(&mut server, json!({"system": "app"}));
        let text = call_ok(&mut server, "list-definitions", json!({}));
        assert!(text.contains("- app (") && !text.contains("[Not Restored]"), "{text}");
        // The same holds if the system is loaded before the loss.
        write(end);
        call_err(&mut server, "evaluate-lisp", json!({"code": code.replace("\"app\"", "\"app\" :force t")}));
        write("");
        load(&mut server, json!({"system": "app", "force": "self"}));
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(app::a)");
        assert!(text.contains("Restored: all ") && !text.contains("Still missing"), "{text}");
        assert!(text.ends_with("=> 1"), "{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn loaded_systems_and_files_are_restored_after_image_loss() {
    let project = Project::new();
    app(&project);
    project.write("one.lisp", "(defun one () 1)");
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    load(&mut server, json!({"path": "one.lisp"}));
    crate::processes::kill_worker(&server);
    assert!(server.evaluate("(list (app:run) (one))").ends_with("=> (2 1)"));
    assert_eq!(load(&mut server, json!({"system": "app"})), "app is up to date: 3 files, T s");
}

/// The load of the other system fails, so a restored image does not repeat it.
#[cfg(target_os = "linux")]
#[test]
fn system_that_only_a_failed_form_loaded_is_restored_if_a_later_form_found_it_up_to_date() {
    let project = Project::new();
    app(&project);
    project.write("top/top.asd", "(defsystem \"top\" :depends-on (\"app\") :components ((:file \"top\")))");
    project.write("top/top.lisp", "(error \"not yet\")");
    for by_tool in [false, true] {
        let mut server = project.server();
        server.evaluate("(dolist (name '(\"app/\" \"top/\")) (push (truename name) asdf:*central-registry*))");
        call_err(&mut server, "evaluate-lisp", json!({"code": "(asdf:load-system \"top\")"}));
        if by_tool {
            assert_eq!(load(&mut server, json!({"system": "app"})), "app is up to date: 3 files, T s");
        } else {
            assert_eq!(server.evaluate("(asdf:load-system \"app\")"), "=> T");
        }
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(app:run)");
        assert!(text.contains("(the form failed after defining or loading SYSTEM top)"), "{text}");
        assert!(text.ends_with("=> 2"), "{text}");
    }
}

/// Without the later form, a restored image lacks the system.
#[cfg(target_os = "linux")]
#[test]
fn system_is_restored_if_a_form_found_it_up_to_date_after_a_failed_form_had_loaded_it_by_any_operation() {
    let project = Project::new();
    app(&project);
    project.write("all/all.asd", "(defsystem \"all\" :depends-on (\"app\"))");
    for load in [
        "(asdf:load-system \"all\")",
        "(asdf:make \"app\")",
        "(asdf:operate 'asdf:load-source-op \"app\")",
        "(asdf:operate 'asdf:load-bundle-op \"app\")",
        "(asdf:require-system \"app\")",
        "(require \"app\")",
    ] {
        let mut server = project.server();
        server.evaluate("(dolist (name '(\"app/\" \"all/\")) (push (truename name) asdf:*central-registry*))");
        call_err(&mut server, "evaluate-lisp", json!({"code": format!("(progn {load} (error \"not yet\"))")}));
        call_ok(&mut server, "evaluate-lisp", json!({"code": load}));
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(app:run)");
        assert!(text.ends_with("=> 2"), "{load}: {text}");
    }
}

/// The image is lost before the form in the background has ended, so a restored image does not repeat this form.
#[cfg(target_os = "linux")]
#[test]
fn system_that_a_running_background_form_loaded_is_restored_if_a_later_form_found_it_up_to_date() {
    let project = Project::new();
    app(&project);
    let mut server = project.server();
    server.evaluate("(push (truename \"app/\") asdf:*central-registry*)");
    server.evaluate("(defvar *loaded* (sb-thread:make-semaphore))");
    let code = "(progn (asdf:load-system \"app\") (sb-thread:signal-semaphore *loaded*) (loop (sleep 60)))";
    call_ok(&mut server, "evaluate-lisp", json!({"code": code, "background": true}));
    server.evaluate("(sb-thread:wait-on-semaphore *loaded*)");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(asdf:load-system \"app\")"}));
    crate::processes::kill_worker(&server);
    let text = server.evaluate("(app:run)");
    assert!(text.ends_with("=> 2"), "{text}");
}

/// ASDF knows no .asd file for a system that it infers from a source file.
#[cfg(target_os = "linux")]
#[test]
fn system_inferred_from_a_source_file_loads_from_its_directory_and_is_restored_after_image_loss() {
    let project = Project::new();
    project.write("app/app.asd", "(defsystem \"app\" :class :package-inferred-system)");
    project.write("app/a.lisp", "(defpackage :app/a (:use :cl) (:export #:a))\n(in-package :app/a)\n(defun a () 1)");
    for arguments in [json!({"system": "app/a"}), json!({"system": "app/a", "directory": "app"})] {
        let mut server = project.server();
        let text = load(&mut server, arguments.clone());
        let (loaded, definition) = text.split_once('\n').unwrap_or_default();
        assert!(loaded.starts_with("Loaded app/a: 1 file, "), "{arguments}: {text}");
        assert_eq!(definition, "Defined in app/app.asd", "{arguments}");
        crate::processes::kill_worker(&server);
        let text = server.evaluate("(app/a:a)");
        assert!(text.ends_with("=> 1"), "{arguments}: {text}");
        assert_eq!(load(&mut server, json!({"system": "app/a"})), "app/a is up to date: 1 file, T s");
    }
}

#[test]
fn progress_notifications_name_files_being_compiled_and_loaded() {
    let project = Project::new();
    app(&project);
    // Progress is reported every quarter of a second.
    project
        .write("app/b.lisp", "(in-package :app)\n(eval-when (:compile-toplevel) (sleep 1.5))\n(defun run () (add 1))");
    let mut server = project.server();
    let arguments = json!({"system": "app", "directory": "app"});
    let id = server
        .post("tools/call", json!({"name": "load-system", "arguments": arguments, "_meta": {"progressToken": 5}}));
    let mut lines = Vec::new();
    let answer = loop {
        let message = server.receive().expect("an answer");
        if message["id"] == id {
            break message;
        }
        assert_eq!(message["method"], "notifications/progress", "{message}");
        lines.extend(message["params"]["message"].as_str().unwrap_or_default().lines().map(str::to_owned));
    };
    assert!(answer["result"]["content"][0]["text"].as_str().unwrap().starts_with("Loaded app: 3 files"), "{answer}");
    let expected = ["compiling app/a.lisp", "loading app/a.lisp", "compiling app/b.lisp"];
    assert!(lines.windows(3).any(|window| window == expected), "{lines:?}");
}

#[test]
fn load_answers_with_structured_content() {
    let project = Project::new();
    app(&project);
    let mut server = project.server_with(&["--structured-content"]);
    let call = |server: &mut Server, arguments| {
        server.request("tools/call", json!({"name": "load-system", "arguments": arguments}))
    };
    let answer = call(&mut server, json!({"system": "app", "directory": "app"}));
    let mut loaded = answer["result"]["structuredContent"]["loaded"].clone();
    assert!(loaded["seconds"].take().as_f64().is_some_and(|seconds| seconds >= 0.0));
    let expected = json!({"name": "app", "files": 3, "compiled": 3, "upToDate": false, "seconds": null, "systems": [],
                          "definition": "app/app.asd"});
    assert_eq!(loaded, expected);
    let answer = call(&mut server, json!({"system": "app"}));
    assert_eq!(answer["result"]["structuredContent"]["loaded"]["upToDate"], true);
    project.write("app/b.lisp", "(in-package :app)\n(defun run () (car 1))");
    let answer = call(&mut server, json!({"system": "app", "force": "self"}));
    let content = &answer["result"]["structuredContent"];
    assert!(
        content.get("loaded").is_none() && content["error"]["type"] == "UIOP/LISP-BUILD:COMPILE-FILE-ERROR",
        "{content}"
    );
    let warning = &content["warnings"][0];
    assert_eq!(
        (&warning["file"], &warning["line"], &warning["column"], &warning["form"], &warning["type"]),
        (&json!("app/b.lisp"), &json!(2), &json!(15), &json!("(DEFUN RUN)"), &json!("WARNING"))
    );
}

// ---- Unwritable directories

#[test]
fn systems_load_without_a_writable_home_or_cache() {
    let project = Project::new();
    app(&project);
    // Fasls go to the cache: the system's directory may be read-only, and there may be no home directory.
    let mut command = project.command(binary());
    command.env_remove("HOME").env("XDG_CACHE_HOME", project.path("app/app.asd/no-directory"));
    let mut server = Server::start_command(&mut command);
    server.initialize("2025-11-25");
    let text = load(&mut server, json!({"system": "app", "directory": "app"}));
    assert!(text.starts_with("Loaded app: 3 files, 3 compiled, T s"), "{text}");
    let mut names: Vec<_> =
        std::fs::read_dir(project.path("app")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.lisp", "app.asd", "b.lisp", "package.lisp"]);
    // The user's output translations apply.
    let translations = project.root.join("home/.config/common-lisp");
    std::fs::create_dir_all(&translations).unwrap();
    let fasls = project.root.join("fasls");
    std::fs::write(
        translations.join("asdf-output-translations.conf"),
        format!("(:output-translations (t {fasls:?}) :ignore-inherited-configuration)"),
    )
    .unwrap();
    let mut server = project.server();
    load(&mut server, json!({"system": "app", "directory": "app"}));
    assert!(fasls.is_dir());
}

// ---- Comparison with bare SBCL

/// Defines (load-verdict), which returns bare SBCL's outcome of loading a system.
const VERDICT: &str = "(defun load-verdict (directory name)
  (let ((asdf:*central-registry* (list directory))
        (*standard-output* (make-broadcast-stream))
        (*error-output* (make-broadcast-stream)))
    (handler-case (progn (asdf:load-system name)
                         (format nil \"loaded~{ ~a~}\"
                                 (sort (loop for symbol being the present-symbols of (or (find-package :v) :keyword)
                                             when (and (find-package :v) (fboundp symbol)) collect (symbol-name symbol))
                                       #'string<)))
      (error (condition) (let ((*package* (find-package :keyword))) (format nil \"~s\" (type-of condition)))))))";

#[test]
fn load_verdicts_agree_with_bare_sbcl() {
    let Some(bare) = bare() else { return };
    let package = "(defpackage :v (:use :cl))\n(in-package :v)\n";
    for (name, text) in [
        ("fine", "(defun f () 1)\n(defmacro m () 2)"),
        ("style", "(defun f (x) (g))"),
        ("warned", "(defun f () (car 1))"),
        ("macro", "(defmacro m () (error \"x\"))\n(defun f () (m))"),
        ("reader", "(defun f () (nowhere:f))"),
        ("unfinished", "(defun f () (list 1)"),
        ("loading", "(defun f () (/ 1 0))\n(f)"),
        ("compile-time", "(eval-when (:compile-toplevel) (error \"x\"))"),
        ("full-warn", "(eval-when (:compile-toplevel) (warn \"x\"))\n(defun f () 1)"),
        ("load-warn", "(warn \"x\")\n(defun f () 1)"),
        ("redefines", "(defun f () 1)\n(defun f () 2)"),
        ("arguments", "(defun f (x) x)\n(defun g () (f))"),
        ("constant", "(defconstant +c+ (list 1))\n(defconstant +c+ (list 2))"),
        ("inline-type", "(declaim (ftype (function (fixnum) fixnum) f))\n(defun f (x) \"no\")"),
    ] {
        let project = Project::new();
        project.system(name, &[("a", &format!("{package}{text}"))]);
        let directory = format!("{}/", project.path(name).display());
        let code = format!("{VERDICT} (load-verdict #p{directory:?} {name:?})");
        let output = project
            .command(&bare.program)
            .arg("--core")
            .arg(&bare.core)
            .args(["--noinform", "--disable-ldb", "--no-sysinit", "--no-userinit", "--non-interactive"])
            .args(["--eval", "(require :asdf)", "--eval"])
            .arg(format!("(progn {VERDICT})"))
            .arg("--eval")
            .arg(format!("(progn (terpri) (princ (load-verdict #p{directory:?} {name:?})) (terpri))"))
            .env("SBCL_HOME", &bare.home)
            .env("XDG_CACHE_HOME", project.root.join("bare"))
            .stderr(Stdio::null())
            .output()
            .expect("bare SBCL starts");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let verdict = printed.lines().rev().find(|line| !line.is_empty()).unwrap_or_default().to_owned();
        let mut server = project.server();
        let (text, is_error) = server.call_tool("load-system", json!({"system": name, "directory": name}));
        if is_error {
            let kind = text.split("[ERROR] ").nth(1).and_then(|rest| rest.lines().next()).expect("an error");
            let kind =
                server.evaluate(&format!("(let ((*package* (find-package :keyword))) (prin1-to-string '{kind}))"));
            assert_eq!(kind, format!("=> {verdict:?}"), "{name}:\n{text}");
        } else {
            // The system is loaded already, so only the verdict is compared.
            assert_eq!(server.evaluate(&code).lines().last(), Some(&*format!("=> {verdict:?}")), "{name}:\n{text}");
        }
    }
}

#[test]
fn installed_libraries_load_without_output_and_are_then_up_to_date() {
    let libraries = [
        ("alexandria", "(alexandria:flatten '(1 (2)))", "=> (1 2)"),
        ("cl-ppcre", "(cl-ppcre:scan \"b\" \"abc\")", "=> 1"),
    ];
    let there =
        libraries.iter().filter(|(name, ..)| Path::new(&format!("/usr/share/common-lisp/systems/{name}.asd")).exists());
    let mut count = 0;
    for (name, code, value) in there {
        let project = Project::new();
        let mut server = project.server();
        let text = load(&mut server, json!({"system": name}));
        assert!(text.contains(&format!("Loaded {name}: ")) && text.contains(" compiled, "), "{text}");
        assert!(!text.contains("[stdout]") && !text.contains("[stderr]"), "{text}");
        assert!(server.evaluate(code).starts_with(value));
        let text = load(&mut server, json!({"system": name}));
        assert!(text.starts_with(&format!("{name} is up to date: ")), "{text}");
        count += 1;
    }
    if count == 0 {
        eprintln!("skipped: none of these libraries is installed");
    }
}

#[test]
fn load_with_background_answers_at_once_and_can_be_waited_for() {
    let project = Project::new();
    app(&project);
    let mut server = project.server();
    let text = call_ok(&mut server, "load-system", json!({"system": "app", "directory": "app", "background": true}));
    assert!(text.starts_with("Evaluation 1 continues in the background."), "{text}");
    let text = without_times(&call_ok(&mut server, "check-evaluation", json!({"id": 1, "wait": 60})));
    assert_eq!(text, "Loaded app: 3 files, 3 compiled, T s\nDefined in app/app.asd");
    assert_eq!(server.evaluate("(app:run)"), "=> 2");
    // A load that ends within `wait` is answered as usual.
    let text = load(&mut server, json!({"system": "app", "wait": 60}));
    assert_eq!(text, "app is up to date: 3 files, T s");
}
