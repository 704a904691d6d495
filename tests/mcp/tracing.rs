//! trace-calls and profile; and `--tools`, which selects the available tools.

use crate::client::{Server, call_err, call_ok, outcome, server_arch};
use crate::server_mode::{Mode, both_modes};
use crate::stalls::make_fifo;
use rstest_reuse::apply;
use serde_json::{Value, json};

/// Functions to trace.
const FUNCTIONS: &str = "
    (defun fact (n) (if (< n 2) 1 (* n (fact (1- n)))))
    (defun divide (a b) (/ a b))
    (defun spoil (list) (setf (car list) :spoilt) list)
    (defun leave () (throw :out 3))
    (defun several () (values 1 :two \"3\"))
    (defun none () (values))
    (defgeneric area (shape))
    (defmethod area ((side integer)) (* side side))
    (defmethod area ((radius float)) (call-next-method))
    (defmethod area (other) (list :area other))
    (defun (setf zap) (value place) (list value place))
    (defmacro twice (form) `(progn ,form ,form))";

fn server() -> Server {
    let mut server = Server::ready();
    call_ok(&mut server, "evaluate-lisp", json!({"code": FUNCTIONS}));
    server
}

/// Returns a tree of calls without the times.
fn untimed(text: &str) -> String {
    let line = |line: &str| match line.rfind("  [") {
        Some(at) if line.ends_with(" ms]") => line[..at].to_owned(),
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn traced(server: &mut Server, arguments: Value) -> String {
    untimed(&call_ok(server, "trace-calls", arguments))
}

/// Asserts that the server's instrumentation is removed from all functions.
#[track_caller]
fn assert_untraced(server: &mut Server) {
    let code = "(append (loop for name in '(fact divide spoil leave several none)
                              for info = (sb-impl::encapsulation-info (sb-kernel:%symbol-function name))
                              when (and info (not (eq 'trace (sb-impl::encapsulation-info-type info)))) collect name)
                        (sb-pcl::generic-function-encapsulations #'area)
                        sbcl-host/tools::**traced-methods** sbcl-host/tools::**breakpoint-functions** sbcl-host::**thread-start-hooks**)";
    // The user may print in any case.
    assert_eq!(call_ok(server, "evaluate-lisp", json!({"code": code})).to_uppercase(), "=> NIL");
}

#[test]
fn trace_calls_shows_calls_as_a_tree_within_depth_and_limit() {
    let mut server = server();
    let code = "(list (fact 3) (ignore-errors (divide 1 0)) (spoil (list 1 2)) (area 3) (area 1.5)
                      (setf (zap 1) 2) (catch :out (leave)) (multiple-value-list (several)) (none))";
    let functions = json!(["fact", "cl-user::divide", "SPOIL", "area", "(setf zap)", "leave", "several", "none"]);
    let cas = "(defun (sb-ext:cas cell) (old new x) (list old new x))";
    call_ok(&mut server, "evaluate-lisp", json!({"code": cas}));
    for name in ["(cas cell)", "(sb-ext:cas cell)"] {
        let arguments = json!({"code": "(funcall #'(sb-ext:cas cell) 1 2 3)", "functions": [name]});
        let text = traced(&mut server, arguments);
        assert!(text.contains("\n  ((CAS CELL) 1 2 3) => (1 2 3)\n"), "{text}");
    }
    // The functions may be given in one string.
    let text = json!("fact, cl-user::divide SPOIL,area, (setf zap) leave several none");
    let arguments = json!({"code": code, "functions": text});
    assert!(traced(&mut server, arguments).starts_with("11 calls to the 8 traced functions:\n"));
    insta::assert_snapshot!(traced(&mut server, json!({"code": code, "functions": functions})), @r#"
    11 calls to the 8 traced functions:
      (FACT 3) => 6
        (FACT 2) => 2
          (FACT 1) => 1
      (DIVIDE 1 0) failed: DIVISION-BY-ZERO: arithmetic error DIVISION-BY-ZERO signalled Operation was (/ 1 0).
      (SPOIL (1 2)) => (:SPOILT 2)
      (AREA 3) => 9
      (AREA 1.5) => (:AREA 1.5)
      ((SETF ZAP) 2 1) => (2 1)
      (LEAVE) was left by a non-local exit
      (SEVERAL) => 1, :TWO, "3"
      (NONE) => (no values)

    => (6 NIL (:SPOILT 2) 9 (:AREA 1.5) (2 1) 3 (1 :TWO "3") NIL)
    "#);
    assert_untraced(&mut server);

    let text = traced(&mut server, json!({"code": "(fact 6)", "functions": "fact", "depth": 2}));
    let expected =
        "6 calls to the traced function:\n  (FACT 6) => 720\n    (FACT 5) => 120\n      ... 4 deeper calls\n\n=> 720";
    assert_eq!(text.replace("2 calls", "6 calls"), expected);
    let text = traced(&mut server, json!({"code": "(dotimes (i 9) (fact 1))", "functions": ["fact"], "limit": 2}));
    insta::assert_snapshot!(text, @r"
    9 calls to the traced function:
      (FACT 1) => 1
      (FACT 1) => 1
    ... calls beyond `limit`, not recorded: 7; pass a larger `limit`

    => NIL
    ");
    // Calls that do not fit into the answer are counted.
    let many = json!({"code": "(dotimes (i 5000) (fact 1))", "functions": ["fact"], "limit": 4999});
    let text = traced(&mut server, many);
    assert!(text.starts_with("5000 calls to the traced function:\n"), "{text}");
    let lines = text.lines().filter(|line| *line == "  (FACT 1) => 1").count();
    assert!((200..=400).contains(&lines), "{lines} {text}");
    let rest = format!(
        "\n... recorded calls that do not fit here: {}; raise max-answer (configure-limits)\n\
         ... calls beyond `limit`, not recorded: 1; pass a larger `limit`\n\n=> NIL",
        4999 - lines
    );
    assert!(text.ends_with(&rest), "{text}");
    // Arguments are printed at the call, before the function modifies them.
    server
        .evaluate("(progn (defpackage :other) (defun shout (string symbol) (values (nstring-upcase string) symbol)))");
    let code = "(let ((*package* (find-package :other)) (text (copy-seq \"abc\")))
                  (cl-user::shout text :k) (cl-user::shout text 'a) (cl-user::shout text '(a)) (fill text #\\z) 1)";
    insta::assert_snapshot!(traced(&mut server, json!({"code": code, "functions": ["shout"]})), @r#"
    3 calls to the traced function:
      (COMMON-LISP-USER::SHOUT "abc" :K) => "ABC", :K
      (COMMON-LISP-USER::SHOUT "ABC" COMMON-LISP-USER::A) => "ABC", COMMON-LISP-USER::A
      (COMMON-LISP-USER::SHOUT "ABC" (COMMON-LISP-USER::A)) => "ABC", (COMMON-LISP-USER::A)

    => 1
    "#);
    let text = traced(&mut server, json!({"code": "1", "functions": ["fact"]}));
    assert!(
        text.starts_with("No calls to the traced function were recorded (") && text.ends_with("\n\n=> 1"),
        "{text}"
    );
}

#[test]
fn trace_calls_tree_agrees_with_sbcl_trace() {
    let mut server = server();
    call_ok(
        &mut server,
        "evaluate-lisp",
        json!({"code": "(defun even-p (n) (if (zerop n) t (odd-p (1- n)))) (defun odd-p (n) (if (zerop n) nil (even-p (1- n))))
                        (defun tree (n) (if (< n 2) n (list (tree (- n 1)) (tree (- n 2)))))"}),
    );
    for (functions, code) in [
        ("fact", "(fact 5)"),
        ("even-p odd-p", "(even-p 6)"),
        ("tree fact", "(list (tree 5) (fact 2))"),
        ("several none area", "(list (several) (none) (area 2) (mapcar #'area '(1 2)))"),
    ] {
        let names: Vec<_> = functions.split(' ').collect();
        let ours = traced(&mut server, json!({"code": code, "functions": names, "depth": 50}));
        let ours: Vec<String> = ours
            .lines()
            .filter(|line| line.starts_with("  "))
            .map(|line| {
                let indent = line.len() - line.trim_start().len();
                let call = line.trim_start().split(" => ").next().unwrap();
                format!("{}: {call}", indent / 2 - 1)
            })
            .collect();
        let bare = format!(
            "(progn (trace {functions})
               (unwind-protect (let ((*print-pretty* nil)) {code}) (untrace {functions})))"
        );
        let bare = call_ok(&mut server, "evaluate-lisp", json!({"code": bare}));
        let bare: Vec<&str> =
            bare.lines().map(str::trim).filter(|line| line.contains(": (") && !line.contains(" returned")).collect();
        assert!(!bare.is_empty());
        assert_eq!(ours, bare, "{code}");
    }
}

#[test]
fn functions_are_untraced_after_errors_timeouts_and_redefinition() {
    let mut server = server();
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(trace divide)"}));
    let text = untimed(&call_err(
        &mut server,
        "trace-calls",
        json!({"code": "(divide 1 0)", "functions": ["divide", "fact"]}),
    ));
    assert!(text.starts_with("1 call to the 2 traced functions:\n  (DIVIDE 1 0) failed: DIVISION-BY-ZERO: "), "{text}");
    assert!(text.contains("\n\n[ERROR] DIVISION-BY-ZERO\n") && text.contains("2: (DIVIDE 1 0)\n"), "{text}");
    assert!(!text.contains("SBCL-HOST"), "{text}");
    // The error becomes the session's last error, as after evaluate-lisp.
    let described = call_ok(&mut server, "describe-last-error", json!({}));
    assert!(described.contains("Error: DIVISION-BY-ZERO\n"), "{described}");
    assert_untraced(&mut server);

    let text = untimed(&call_err(
        &mut server,
        "trace-calls",
        json!({"code": "(loop (fact 1))", "functions": ["fact"], "limit": 1, "timeout": 0.3}),
    ));
    assert!(text.contains("  (FACT 1) => 1\n") && text.contains("\n[ERROR] TIMEOUT\n"), "{text}");
    assert_untraced(&mut server);

    let text = untimed(&call_err(
        &mut server,
        "trace-calls",
        json!({"code": "(defun forever () (loop)) (defun outer () (forever)) (outer)", "functions": ["fact"], "timeout": 0.3}),
    ));
    assert!(text.starts_with("No calls"), "{text}");
    let text = untimed(&call_err(
        &mut server,
        "trace-calls",
        json!({"code": "(outer)", "functions": ["outer", "forever"], "timeout": 0.3}),
    ));
    assert!(
        text.contains("  (OUTER) was left by a non-local exit\n    (FOREVER) was left by a non-local exit\n"),
        "{text}"
    );

    // The user's own traces stay.
    assert_eq!(call_ok(&mut server, "evaluate-lisp", json!({"code": "(prog1 (trace) (untrace))"})), "=> (DIVIDE)");
    // Functions that the tracer itself calls can be traced, too.
    let functions = json!(["format", "sb-unix:clock-gettime", "prin1", "fact"]);
    let text = traced(&mut server, json!({"code": "(fact 1) (format nil \"~a\" 1)", "functions": functions}));
    assert!(text.contains("\n  (FACT 1) => 1\n") && text.ends_with("=> \"1\""), "{text}");
    // A function that is redefined during the call keeps its new definition.
    call_ok(
        &mut server,
        "trace-calls",
        json!({"code": "(fact 2) (defun fact (n) (list :new n))", "functions": ["fact"]}),
    );
    assert_eq!(call_ok(&mut server, "evaluate-lisp", json!({"code": "(fact 2)"})), "=> (:NEW 2)");
    assert_untraced(&mut server);
}

#[test]
fn cancelled_trace_calls_leaves_no_function_traced() {
    let mut server = server();
    let code = "(progn (format t \"here~%\") (finish-output) (loop (fact 1)))";
    server.send(&json!({"jsonrpc": "2.0", "id": "t", "method": "tools/call", "params": {
        "name": "trace-calls", "arguments": {"code": code, "functions": ["fact"], "timeout": 0}}}));
    while !call_ok(&mut server, "check-evaluation", json!({"part": "output"})).contains("here") {}
    server.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "t"}}));
    assert_untraced(&mut server);
}

#[test]
fn trace_calls_shows_threads_and_survives_hostile_print_methods() {
    let mut server = server();
    let code = "(sb-thread:join-thread (sb-thread:make-thread (lambda () (fact 2)) :name \"[ERROR] worker\"))";
    insta::assert_snapshot!(traced(&mut server, json!({"code": code, "package": "cl-user"})), @r"
    2 calls to the 8 traced functions:
    In thread [ERROR\] worker:
      (FACT 2) => 2
        (FACT 1) => 1

    => 2
    ");
    let code = "
        (defclass bad () ()) (defmethod print-object ((bad bad) stream) (error \"no\"))
        (defclass lengthy () ()) (defmethod print-object ((it lengthy) stream) (loop (write-string \"long \" stream)))
        (defclass tracing () ()) (defmethod print-object ((it tracing) stream) (prin1 (fact 3) stream))
        (defvar *circle* (let ((list (list 1))) (setf (cdr list) list)))
        (defun take (x) (length (list x)))
        (setf *print-base* 2 *print-length* 1 *print-case* :downcase)";
    call_ok(&mut server, "evaluate-lisp", json!({"code": code}));
    let code =
        "(mapc #'take (list (make-instance 'bad) (make-instance 'lengthy) (make-instance 'tracing) *circle* (format nil
                \"a~%=> [ERROR] b\") 10)) nil";
    let text = traced(&mut server, json!({"code": code, "functions": ["take", "fact"]}));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "6 calls to the 2 traced functions:");
    assert!(lines[1].starts_with("  #<unprintable CONS>") || lines[1].starts_with("  (TAKE "), "{text}");
    assert!(lines[2].starts_with("  (TAKE long long") && lines[2].ends_with("… => 1"), "{text}");
    assert_eq!(lines[3], "  (TAKE 6) => 1");
    assert_eq!(lines[4], "  (TAKE (1 1 1 1 1 1 1 1 1 1 ...)) => 1");
    assert_eq!(lines[5], "  (TAKE \"a => [ERROR\\] b\") => 1");
    assert_eq!(lines[6], "  (TAKE 10) => 1");
    assert_untraced(&mut server);
}

#[test]
fn untraceable_functions_and_bad_arguments_are_refused() {
    let mut server = server();
    for (arguments, expected) in [
        (
            json!({"code": "1"}),
            "trace-calls needs either functions (a list of names) or trace-package (a package whose functions are traced).",
        ),
        (json!({"code": "1", "functions": ["car"], "trace-package": "cl-user"}), "trace-calls needs either functions"),
        (json!({"code": "1", "functions": [1]}), "trace-calls: functions must be an array of strings, not 1."),
        (json!({"code": "1", "functions": ["fact"], "depth": 0}), "depth must be a whole number from 1 to 100"),
        (
            json!({"code": "1", "functions": ["fakt"]}),
            "There is no function FAKT in package COMMON-LISP-USER. Similar names: \
            FACT. Names of local functions have the form (labels",
        ),
        (
            json!({"code": "1", "functions": ["fa|ct"]}),
            "fa|ct does not spell a symbol: a vertical bar in it is not closed.",
        ),
        (
            json!({"code": "1", "functions": ["fact\\"]}),
            "fact\\ does not spell a symbol: no character follows the backslash at its end.",
        ),
        (json!({"code": "1", "functions": ["twice"]}), "twice is a macro: only functions can be traced."),
        (json!({"code": "1", "functions": ["if"]}), "if is a special operator: only functions can be traced."),
        (
            json!({"code": "1", "trace-package": "cl"}),
            "Package COMMON-LISP is locked, so it cannot be traced as a whole",
        ),
        (json!({"code": "1", "trace-package": "no-such"}), "There is no package named \"no-such\"."),
    ] {
        let text = call_err(&mut server, "trace-calls", arguments.clone());
        assert!(text.contains(expected), "{arguments}: {text}");
    }
    assert!(
        call_ok(&mut server, "evaluate-lisp", json!({"code": "(find-symbol \"FAKT\")"})).ends_with("=> NIL\n=> NIL")
    );
}

/// Local functions to trace.
const LOCALS: &str = "
    (defun outer (n) (labels ((fact (k) (if (< k 2) 1 (* k (fact (1- k)))))) (fact n)))
    (defun square-all (list) (flet ((square (n) (* n n))) (list (square (first list)) (mapcar #'square list))))
    (defun thrower (list)
      (labels ((walk (x) (if (consp x) (progn (walk (car x)) (walk (cdr x))) (when (eql x 2) (throw :out x)))))
        (catch :out (walk list))
        (list (after 1))))
    (defun after (x) x)
    (defun inlined (n) (flet ((twice (n) (* 2 n))) (declare (inline twice)) (+ (twice n) (twice 1))))
    (defmethod area ((side ratio)) (labels ((sum (n) (if (plusp n) (+ n (sum (1- n))) 0))) (sum (numerator side))))
    (defmethod area :around ((side ratio)) (list (call-next-method)))
    (defun |an odd one| (x) x)";

#[test]
fn trace_calls_traces_single_methods_and_local_functions() {
    let mut server = server();
    call_ok(&mut server, "evaluate-lisp", json!({"code": LOCALS}));
    for (code, functions, expected) in [
        (
            "(list (outer 3) (square-all '(1 2)))",
            json!(["(labels fact :in outer)", "(flet square :in square-all)"]),
            "6 calls to the 2 traced functions:\n  ((LABELS FACT :IN OUTER) 3) => 6\n    \
             ((LABELS FACT :IN OUTER) 2) => 2\n      ((LABELS FACT :IN OUTER) 1) => 1\n  \
             ((FLET SQUARE :IN SQUARE-ALL) 1) => 1\n  ((FLET SQUARE :IN SQUARE-ALL) 1) => 1\n  \
             ((FLET SQUARE :IN SQUARE-ALL) 2) => 4\n\n=> (6 (1 (1 4)))",
        ),
        (
            "(list (area 2/3) (area 2))",
            json!([
                "(method area (ratio))",
                "(method area :around (cl:ratio))",
                "(labels sum :in (method area (ratio)))"
            ]),
            "5 calls to the 3 traced functions:\n  ((METHOD AREA :AROUND (RATIO)) 2/3) => (3)\n    \
             ((METHOD AREA (RATIO)) 2/3) => 3\n      ((LABELS SUM :IN (METHOD AREA (RATIO))) 2) => 3\n        \
             ((LABELS SUM :IN (METHOD AREA (RATIO))) 1) => 1\n          \
             ((LABELS SUM :IN (METHOD AREA (RATIO))) 0) => 0\n\n=> ((3) 4)",
        ),
        // Later calls are not nested in a function that was left.
        (
            "(thrower '(1 2))",
            json!(["(labels walk :in thrower)", "after"]),
            "5 calls to the 2 traced functions:\n  ((LABELS WALK :IN THROWER) (1 2)) was left by a non-local exit\n    \
             ((LABELS WALK :IN THROWER) 1) => NIL\n    \
             ((LABELS WALK :IN THROWER) (2)) was left by a non-local exit\n      \
             ((LABELS WALK :IN THROWER) 2) was left by a non-local exit\n  (AFTER 1) => 1\n\n=> (1)",
        ),
        // A method as frames and references name it, and a symbol with spaces.
        (
            "(list (area 2/3) (|an odd one| 1))",
            json!(["(:method area :around (ratio))", "|an odd one|"]),
            "2 calls to the 2 traced functions:\n  ((METHOD AREA :AROUND (RATIO)) 2/3) => (3)\n  \
             (|an odd one| 1) => 1\n\n=> ((3) 1)",
        ),
        // Breakpoints work in one thread only.
        (
            "(outer 1) (sb-thread:join-thread (sb-thread:make-thread (lambda () (outer 2))))",
            json!(["(labels fact :in outer)"]),
            "1 call to the traced function:\n  ((LABELS FACT :IN OUTER) 1) => 1\nA thread was started: local functions \
             were traced only until then, since SBCL's breakpoints work in only one thread.\n\n=> 2",
        ),
    ] {
        assert_eq!(traced(&mut server, json!({"code": code, "functions": functions})), expected);
        assert_untraced(&mut server);
    }
    // The user's own traces stay.
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(trace (method area (ratio)))"}));
    let text = traced(&mut server, json!({"code": "(area 1/2)", "functions": ["(method area (ratio))"]}));
    assert!(
        text.starts_with("1 call to the traced function:\n  ((METHOD AREA (RATIO)) 1/2) => 1\n\n[stderr]\n"),
        "{text}"
    );
    assert!(call_ok(&mut server, "evaluate-lisp", json!({"code": "(area 1/2)"})).contains("returned 1\n"), "still");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(untrace) (trace (labels fact :in outer))"}));
    let text =
        call_err(&mut server, "trace-calls", json!({"code": "(outer 1)", "functions": ["(labels fact :in outer)"]}));
    assert!(text.contains("(LABELS FACT :IN OUTER) cannot be traced while TRACE traces it: SBCL traces"), "{text}");
}

#[test]
fn untraceable_local_functions_and_methods_are_refused() {
    let mut server = server();
    call_ok(&mut server, "evaluate-lisp", json!({"code": LOCALS}));
    for (name, expected) in [
        ("(flet twice :in inlined)", "INLINED has no local function twice in its compiled code. SBCL merges a"),
        (
            "(labels fect :in outer)",
            "OUTER has no local function fect in its compiled code, only (labels fact :in outer)",
        ),
        ("(labels sum :in area)", "AREA is a generic function: name the method that sum is in"),
        ("(method area (string))", "(method area (string)) is not defined. The methods of AREA:\n  (method area "),
        ("(method fact (t))", "FACT is not a generic function: it has no methods."),
        (
            "(labels fact)",
            "(labels fact) is not the name of a local function. Such names have the form (labels bar :in foo).",
        ),
        ("(labels fact :in outer", "is not the name of a function."),
        ("(lambda x)", "(lambda x) is not the name of a function. Names have the form foo, (setf foo), (method foo"),
    ] {
        let text = call_err(&mut server, "trace-calls", json!({"code": "1", "functions": [name]}));
        assert!(text.contains(expected), "{name}: {text}");
    }
    let arguments = json!({"code": "(outer 3)", "functions": ["(labels fact :in outer)"], "wait": 50});
    let text = call_err(&mut server, "trace-calls", arguments);
    assert!(text.contains("cannot be traced in a call with `wait` or `background`: SBCL traces"), "{text}");
    assert_untraced(&mut server);
}

#[test]
fn trace_calls_and_profile_work_in_the_background_and_when_held() {
    let mut server = server();
    call_ok(&mut server, "evaluate-lisp", json!({"code": WORK}));
    let arguments = json!({"code": "(fact 3)", "functions": ["fact"], "background": true});
    assert_eq!(call_ok(&mut server, "trace-calls", arguments), "Evaluation 3 continues in the background.");
    let text = untimed(&call_ok(&mut server, "check-evaluation", json!({"id": 3, "wait": 25})));
    insta::assert_snapshot!(text, @r"
    3 calls to the traced function:
      (FACT 3) => 6
        (FACT 2) => 2
          (FACT 1) => 1

    => 6
    ");
    assert_untraced(&mut server);

    let path = server.home().join("background.svg");
    let arguments = json!({"code": "(work) 1", "save-to": path, "wait": 0.05, "package": "cl-user"});
    assert_eq!(call_ok(&mut server, "profile", arguments), "Evaluation 5 continues in the background.");
    let text = call_ok(&mut server, "check-evaluation", json!({"wait": 25}));
    assert!(text.starts_with("Samples ") && text.contains("   BURN  evaluation 2, line 2"), "{text}");
    assert!(text.ends_with(&format!("\n\n[notice]\nFlame graph: {}\n\n=> 1", path.display())), "{text}");
    assert!(std::fs::read_to_string(&path).unwrap().contains("<title>BURN ("));
    std::fs::remove_file(&path).unwrap();

    // A held evaluation is traced, and its release ends the tracing.
    let arguments =
        json!({"code": "(fact 3) (divide 1 0) (fact 2)", "functions": ["fact", "divide"], "on-error": "debug"});
    let text = call_err(&mut server, "trace-calls", arguments.clone());
    assert!(text.contains("[Debugger]\nHeld."), "{text}");
    let text = untimed(&call_ok(&mut server, "resume-from-frame", json!({"frame": 2, "return": "7"})));
    assert!(text.contains("  (DIVIDE 1 0) => 7\n  (FACT 2) => 2\n    (FACT 1) => 1\n\n=> 2"), "{text}");
    call_err(&mut server, "trace-calls", arguments.clone());
    call_ok(&mut server, "abort-evaluation", json!({}));
    assert_untraced(&mut server);
    let mut refused = arguments;
    refused["background"] = true.into();
    assert!(call_err(&mut server, "trace-calls", refused).contains("on-error can only be \"abort\""), "not both");
}

/// Functions to profile.
const WORK: &str = "
    (defun burn (n) (declare (optimize speed) (fixnum n))
      (let ((sum 0d0)) (declare (double-float sum)) (dotimes (i n sum) (incf sum (sqrt (coerce i 'double-float))))))
    (defun work () (loop with end = (+ (get-internal-real-time) (* 4/10 internal-time-units-per-second))
                         while (< (get-internal-real-time) end) do (burn 100000)))
    (defun waste () (let ((kept '())) (dotimes (i 300 (length kept)) (setf kept (make-list 10000)))))";

#[test]
fn profile_names_functions_places_and_threads() {
    let mut server = Server::ready();
    call_ok(&mut server, "evaluate-lisp", json!({"code": WORK}));
    let text = call_ok(&mut server, "profile", json!({"code": "(work) :done"}));
    let mut lines = text.lines();
    let first = lines.next().unwrap();
    assert!(first.starts_with("Samples ") && first.ends_with(" s, 1 thread"), "{text}");
    assert_eq!(lines.next(), Some("self%  total%  calls   function"));
    let burn =
        lines.clone().find(|line| line.contains("   BURN  evaluation 1, line 2")).unwrap_or_else(|| panic!("{text}"));
    let share: f64 = burn.split_whitespace().next().unwrap().parse().unwrap();
    assert!(share > 50.0, "{text}");
    // A sample may fall into the reading of the code, so the share need not be 100 %.
    let work = lines.clone().find(|line| line.contains("   WORK  evaluation 1, line "));
    let total: f64 =
        work.and_then(|line| line.split_whitespace().nth(1)).unwrap_or_else(|| panic!("{text}")).parse().unwrap();
    assert!(total > 50.0, "{text}");
    assert!(!text.contains("SBCL-HOST") && text.ends_with("\n\n=> :DONE"), "{text}");

    let threads = "(let ((thread (sb-thread:make-thread #'work))) (work) (sb-thread:join-thread thread) 1)";
    for mode in ["cpu", "time"] {
        let text = call_ok(&mut server, "profile", json!({"code": threads, "mode": mode, "limit": 2}));
        assert!(text.lines().next().unwrap().ends_with("2 threads"), "{text}");
        let (_, rest) = text.rsplit_once("\n... ").unwrap_or_else(|| panic!("{text}"));
        assert!(text.contains("BURN  evaluation") && rest.contains(" more function"), "{text}");
        assert!(rest.contains("; pass limit ") && rest.ends_with("\n\n=> 1"), "{text}");
    }
    let text = call_ok(&mut server, "profile", json!({"code": "(waste)", "mode": "alloc"}));
    // On aarch64, SBCL leaves out the function that allocates.
    let innermost =
        if server_arch() == "aarch64" { "   SB-INT:SIMPLE-EVAL-IN-LEXENV" } else { "   WASTE  evaluation 1, line " };
    assert!(text.contains(innermost) && text.ends_with("=> 10000"), "{text}");
    let text = call_ok(&mut server, "profile", json!({"code": "1"}));
    assert!(text.starts_with("Samples 0 over 0.0 s, 0 threads\nNo samples: ") && text.ends_with("\n\n=> 1"), "{text}");
}

#[test]
fn profile_locates_functions_whose_names_are_lists() {
    let mut server = Server::ready();
    let file = server.home().join("cell.lisp");
    let code = "(defvar *cell* nil)
(defun (setf cell) (value)
  (loop with end = (+ (get-internal-real-time) (* 3/10 internal-time-units-per-second))
        while (< (get-internal-real-time) end))
  (setf *cell* value))";
    std::fs::write(&file, code).unwrap();
    call_ok(&mut server, "load-system", json!({"path": file}));
    let text = call_ok(&mut server, "profile", json!({"code": "(setf (cell) 1)"}));
    let line = text.lines().find(|line| line.contains("   (SETF CELL)  ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("cell.lisp:2"), "{text}");
}

#[test]
fn profiling_stops_after_errors_and_timeouts() {
    let mut server = Server::ready();
    call_ok(&mut server, "evaluate-lisp", json!({"code": WORK}));
    let idle = |server: &mut Server| {
        let state = "(list sb-sprof::*profiling* sb-sprof::*samples* sb-sprof::*timer*)";
        assert_eq!(call_ok(server, "evaluate-lisp", json!({"code": state})), "=> (NIL NIL NIL)");
    };
    for mode in ["cpu", "time", "alloc"] {
        let text = call_err(&mut server, "profile", json!({"code": "(work) (error \"no\")", "mode": mode}));
        assert!(text.starts_with("Samples ") && text.contains("\n\n[ERROR] SIMPLE-ERROR\nno\n"), "{text}");
        idle(&mut server);
        let text = call_err(&mut server, "profile", json!({"code": "(loop (work))", "mode": mode, "timeout": 0.3}));
        assert!(text.starts_with("Samples ") && text.contains("\n\n[ERROR] TIMEOUT\n"), "{text}");
        idle(&mut server);
    }
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(sb-sprof:start-profiling)"}));
    let text = call_err(&mut server, "profile", json!({"code": "1"}));
    let said = "SB-SPROF is already profiling, in mode :CPU. If another evaluation profiles, wait until the evaluation has \
                ended. Otherwise, stop the profiler: (sb-sprof:stop-profiling)\n";
    assert!(text.contains(said), "{text}");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(sb-sprof:stop-profiling)"}));
}

/// SB-SPROF keeps the samples of only one profile.
#[test]
fn profile_is_refused_while_another_evaluation_reports_its_samples() {
    let mut server = Server::ready();
    let code = "(defvar *reporting* nil)
                (defvar *proceed* nil)
                (sb-ext:without-package-locks
                  (sb-int:encapsulate (find-symbol \"PUSH-PROFILE\" \"SBCL-HOST/TOOLS\") 'wait
                                      (lambda (push &rest arguments)
                                        (setf *reporting* t)
                                        (loop until *proceed* do (sleep 0.01))
                                        (apply push arguments))))";
    call_ok(&mut server, "evaluate-lisp", json!({"code": code}));
    let text = call_ok(&mut server, "profile", json!({"code": ":first", "background": true}));
    assert_eq!(text, "Evaluation 2 continues in the background.");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(loop until *reporting* do (sleep 0.01))"}));
    let text = call_err(&mut server, "profile", json!({"code": ":second"}));
    assert!(text.contains("SB-SPROF is already profiling. If another evaluation profiles, wait"), "{text}");
    call_ok(&mut server, "evaluate-lisp", json!({"code": "(setf *proceed* t)"}));
    let text = call_ok(&mut server, "check-evaluation", json!({"id": 2, "wait": 25}));
    assert!(text.ends_with("=> :FIRST"), "{text}");
    let text = call_ok(&mut server, "profile", json!({"code": ":third"}));
    assert!(text.ends_with("=> :THIRD"), "{text}");
}

/// SB-SPROF signals all threads that SBCL counts as running.
#[test]
fn every_thread_that_sbcl_counts_as_running_exists() {
    let mut server = Server::ready();
    let code = r#"(loop for thread in (sb-thread::%list-all-threads)
                        for id = (sb-thread::thread-os-tid thread)
                        unless (probe-file (format nil "/proc/self/task/~D" id))
                          collect (list thread id))"#;
    // SB-THREAD:LIST-ALL-THREADS leaves out the host's threads.
    let text = server.evaluate(&format!("(list (length (sb-thread::%list-all-threads)) {code})"));
    assert!(text.ends_with(" NIL)"), "{text}");
}

#[test]
fn profile_save_to_writes_a_flame_graph() {
    let mut server = Server::ready();
    call_ok(&mut server, "evaluate-lisp", json!({"code": WORK}));
    let path = server.home().join("flames.svg");
    let text = call_ok(&mut server, "profile", json!({"code": "(work) 1", "save-to": path}));
    assert!(text.contains(&format!("\n\n[notice]\nFlame graph: {}\n\n=> 1", path.display())), "{text}");
    let graph = std::fs::read_to_string(&path).unwrap();
    assert!(graph.contains("<svg") && graph.trim_end().ends_with("</svg>"), "{graph}");
    assert!(graph.contains("<title>BURN (") && graph.contains("<title>WORK ("), "{graph}");
    std::fs::remove_file(&path).unwrap();
    // The directory does not exist, so the file cannot be written.
    let nowhere = path.join("x.svg");
    let text = call_ok(&mut server, "profile", json!({"code": "(work)", "save-to": nowhere}));
    let expected = format!("No flame graph was written to {}: No such file or directory", nowhere.display());
    assert!(text.contains(&expected), "{text}");
}

/// A FIFO that no process reads would block a write forever.
#[apply(both_modes)]
fn profile_save_to_a_fifo_is_refused_and_prevents_no_save(mode: Mode) {
    let mut server = mode.ready();
    server.evaluate(WORK);
    let fifo = server.home().join("flames.svg");
    make_fifo(&fifo);
    let text = call_ok(&mut server, "profile", json!({"code": "(work) 1", "save-to": fifo}));
    let expected = format!("No flame graph was written to {}: not a regular file", fifo.display());
    assert!(text.contains(&expected), "{text}");
    call_ok(&mut server, "checkpoint", json!({"action": "save", "name": "a"}));
}

/// Returns the names in tools/list and the length of the result.
fn listed(server: &mut Server) -> (Vec<String>, usize) {
    let result = &server.request("tools/list", json!({}))["result"];
    let names = result["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned());
    (names.collect(), result.to_string().len())
}

#[test]
fn tools_option_selects_the_available_tools() {
    for arguments in [
        &["--tools", "reset-session,evaluate_lisp"][..],
        &["--tools", "evaluate-lisp,reset-session", "--no-supervisor"],
    ] {
        let mut server = Server::start_with(arguments);
        server.initialize("2025-11-25");
        // The tools are listed in the usual order.
        assert_eq!(listed(&mut server).0, ["evaluate-lisp", "reset-session"]);
        assert_eq!(call_ok(&mut server, "evaluate-lisp", json!({"code": "1"})), "=> 1");
        // A tool that is not listed cannot be called.
        let refused = server.request("tools/call", json!({"name": "list-definitions", "arguments": {}}));
        assert_eq!(refused["error"]["code"], -32602);
        let message = refused["error"]["message"].as_str().unwrap();
        assert_eq!(message, "There is no tool \"list-definitions\". Tools: evaluate-lisp, reset-session.");
    }
    let mut core = Server::start_with(&["--tools", "core"]);
    core.initialize("2025-11-25");
    let (core, _) = listed(&mut core);
    let mut all = Server::start_with(&["--tools", "all"]);
    all.initialize("2025-11-25");
    let (all, _) = listed(&mut all);
    assert!(core.len() < all.len() && core.iter().all(|name| all.contains(name)), "{core:?}");
    assert!(core.contains(&"get-backtrace".to_owned()) && !core.contains(&"profile".to_owned()), "{core:?}");

    let output = std::process::Command::new(crate::client::binary())
        .args(["serve", "--tools", "evaluate-lisp,nix"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("There is no tool \"nix\"."));
}

#[test]
fn tools_list_is_stable_and_at_most_18_kilobytes() {
    let mut server = Server::ready();
    let (names, length) = listed(&mut server);
    assert_eq!(listed(&mut server).0, names);
    println!("{} tools, {length} bytes", names.len());
    assert!(length <= 18_000, "{length} bytes");
    let answer = server.request("tools/call", json!({"name": "trace_calls", "arguments": {}}));
    assert_eq!(answer["error"]["code"], -32602);
    assert!(outcome(&server.request("tools/call", json!({"name": "profile", "arguments": {}}))).1);
}
