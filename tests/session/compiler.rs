//! Compiler diagnostics agree with bare SBCL: for COMPILE, COMPILE-FILE and ASDF, and on rebound streams.

use crate::support::{TestSession, fresh, warnings};

/// Returns the values of `form` after the first one, as a list.
#[track_caller]
fn secondary_values(lisp: &TestSession, form: &str) -> String {
    lisp.value(&format!("(rest (multiple-value-list {form}))"))
}

/// Returns a form that writes `source` to a file and compiles the file.
fn compile_file_form(source: &str) -> String {
    format!(
        "(uiop:with-temporary-file (:stream s :pathname p :type \"lisp\" :direction :output)
           (write-string {source:?} s) (finish-output s) :close-stream
           (uiop:with-temporary-file (:pathname fasl :type \"fasl\")
             (let ((values (multiple-value-list (compile-file p :output-file fasl))))
               (cons (and (first values) t) (rest values)))))"
    )
}

#[test]
fn compile_returns_warnings_p_and_failure_p_as_in_bare_sbcl() {
    let lisp = fresh();
    assert_eq!(secondary_values(&lisp, "(compile nil '(lambda () (car 1 2)))"), "(T T)");
    assert_eq!(secondary_values(&lisp, "(compile nil '(lambda (x) 1))"), "(T NIL)");
    assert_eq!(secondary_values(&lisp, "(compile nil '(lambda () (let ((1 2)) 3)))"), "(T T)");
    assert_eq!(secondary_values(&lisp, "(compile nil '(lambda () 1))"), "(NIL NIL)");
    // The session does not defer undefined-function warnings.
    assert_eq!(secondary_values(&lisp, "(compile nil '(lambda () (nobody-defines-this)))"), "(T NIL)");
    assert_eq!(
        secondary_values(&lisp, "(with-compilation-unit () (compile nil '(lambda () (nor-this))))"),
        "(NIL NIL)"
    );
}

#[test]
fn compile_file_returns_warnings_p_and_failure_p_as_in_bare_sbcl() {
    let lisp = fresh();
    for (source, expected) in [
        ("(defun fine (x) x)", "(T NIL NIL)"),
        ("(defun f (x) 1)", "(T T NIL)"),
        ("(defun f () (car 1 2))", "(T T T)"),
        ("(defmacro bad () (error \"no\")) (defun f () (bad))", "(T T T)"),
        ("(defun f (", "(NIL T T)"),
    ] {
        assert_eq!(lisp.value(&compile_file_form(source)), expected, "{source}");
    }
}

#[test]
fn asdf_system_that_does_not_compile_is_not_loaded() {
    let lisp = fresh();
    let code = r#"
        (let ((directory (uiop:ensure-directory-pathname
                          (format nil "~Asbcl-mcp-broken-~36R/" (uiop:temporary-directory) (random (expt 36 10))))))
          (ensure-directories-exist directory)
          (flet ((file (name text)
                   (with-open-file (s (merge-pathnames name directory) :direction :output) (write-string text s))))
            (file "broken.asd" "(asdf:defsystem :broken :components ((:file \"a\")))")
            (file "a.lisp" "(defmacro bad () (error \"no\")) (defun use-bad () (bad))"))
          (unwind-protect
               (progn
                 (asdf:load-asd (merge-pathnames "broken.asd" directory))
                 (asdf:initialize-output-translations
                  (list :output-translations (list t (merge-pathnames "cache/**/*.*" directory)) :ignore-inherited-configuration))
                 (list (handler-case (asdf:load-system :broken) (error (c) (type-of c)))
                       ;; It fails again, because no fasl was left to load.
                       (handler-case (asdf:load-system :broken) (error (c) (type-of c)))))
            (asdf:clear-output-translations)
            (uiop:delete-directory-tree directory :validate t)))"#;
    assert_eq!(lisp.value(code), "(UIOP/LISP-BUILD:COMPILE-FILE-ERROR UIOP/LISP-BUILD:COMPILE-FILE-ERROR)");
}

#[test]
fn rebound_error_output_receives_warning_and_compiler_text() {
    let lisp = fresh();
    let warned = lisp.value("(with-output-to-string (*error-output*) (warn \"x\"))");
    assert_eq!(warned, "\"WARNING: x\n\"");
    let compiled = lisp.value("(with-output-to-string (*error-output*) (compile nil '(lambda (unused) (car 1 2))))");
    for part in ["caught STYLE-WARNING", "UNUSED", "caught WARNING", "compilation unit finished"] {
        assert!(compiled.contains(part), "{part} in {compiled}");
    }
    let outcome = lisp.eval("(progn (compile nil '(lambda (unused) (car 1 2))) 1)");
    assert!(outcome.stderr.is_empty(), "{outcome:?}");
    assert_eq!(warnings(&outcome).len(), 2, "{outcome:?}");
}

#[test]
fn each_warn_call_is_recorded_once_and_muffled_warnings_are_not() {
    let lisp = fresh();
    let outcome = lisp.eval("(handler-bind ((warning (lambda (c) (signal c) (format t \"after\")))) (warn \"twice\"))");
    assert_eq!(outcome.stdout.text, "after");
    assert_eq!(warnings(&outcome), ["SIMPLE-WARNING: twice"]);
    let own = lisp.eval("(restart-case (progn (signal 'simple-warning :format-control \"own\") :signalled) (muffle-warning () :muffled))");
    assert_eq!(crate::support::values("own", &own), [":SIGNALLED"]);
    let handled = lisp.eval("(handler-bind ((warning #'muffle-warning)) (warn \"not told\"))");
    assert!(handled.warnings.is_empty(), "{handled:?}");
    let muffled = lisp.eval("(let ((sb-ext:*muffled-warnings* 'warning)) (warn \"not told\"))");
    assert!(muffled.warnings.is_empty(), "{muffled:?}");
    let again = lisp.eval("(let ((c (make-condition 'simple-warning :format-control \"c\"))) (warn c) (warn c))");
    assert_eq!(again.warnings.len(), 2, "{again:?}");
}

#[test]
fn declaim_of_muffle_conditions_and_package_locks_takes_effect() {
    let lisp = fresh();
    assert_eq!(lisp.eval("(defun f1 (x) 1)").warnings.len(), 1);
    lisp.values("(declaim (sb-ext:muffle-conditions style-warning))");
    assert!(lisp.eval("(defun f2 (x) 1)").warnings.is_empty());
    lisp.values("(declaim (sb-ext:unmuffle-conditions style-warning))");
    assert_eq!(lisp.eval("(defun f3 (x) 1)").warnings.len(), 1);
    assert_eq!(lisp.error("(flet ((second (x) x)) (second 1))").kind, "SB-INT:COMPILED-PROGRAM-ERROR");
    lisp.values("(declaim (sb-ext:disable-package-locks cl:second))");
    assert_eq!(lisp.value("(flet ((second (x) x)) (second 1))"), "1");
    lisp.values("(declaim (sb-ext:enable-package-locks cl:second))");
    assert_eq!(lisp.error("(flet ((second (x) x)) (second 1))").kind, "SB-INT:COMPILED-PROGRAM-ERROR");
}

#[test]
fn function_defined_later_in_the_same_call_gives_no_undefined_warning() {
    let lisp = fresh();
    assert!(
        lisp.eval("(defun even (n) (or (= n 0) (odd (1- n)))) (defun odd (n) (and (> n 0) (even (1- n))))")
            .warnings
            .is_empty()
    );
    let later = lisp.eval("(defun uses () (later-defined)) (setf (symbol-function 'later-defined) #'list)");
    assert!(later.warnings.is_empty(), "{later:?}");
    // A variable that is made special later was not special when the function was compiled.
    let variable = lisp.eval("(defun uses-variable () *later-variable*) (defvar *later-variable* 1)");
    assert_eq!(warnings(&variable), ["SIMPLE-WARNING: undefined variable: COMMON-LISP-USER::*LATER-VARIABLE*"]);
    // The warning is reported when the evaluation fails, too.
    let failed = lisp.eval("(undefined-here)");
    assert_eq!(warnings(&failed).len(), 1, "{failed:?}");
    // The function is defined within a compilation unit of its own, as in LOAD.
    let loaded =
        lisp.eval("(defun uses-2 () (in-a-unit)) (with-compilation-unit (:override t) (eval '(defun in-a-unit () 1)))");
    assert!(loaded.warnings.is_empty(), "{loaded:?}");
    assert_eq!(lisp.eval("(defun uses-3 () (never-defined)) (uses-2)").warnings.len(), 1);
}

#[test]
fn a_compile_time_error_is_recorded_once() {
    let outcome = fresh().eval("(defun q () (let ((1 2)) 3))");
    let recorded = warnings(&outcome);
    assert_eq!(recorded.len(), 1, "{recorded:?}");
    assert!(recorded[0].starts_with("COMPILE-TIME-ERROR: "), "{recorded:?}");
}

#[test]
fn call_of_warn_is_in_the_backtrace() {
    let error = fresh()
        .error("(handler-bind ((warning (lambda (c) (declare (ignore c)) (error \"inside\")))) (warn \"a ~A\" 1))");
    assert!(error.frames.iter().any(|frame| frame.call == "(WARN \"a ~A\" 1)"), "{error:?}");
}
