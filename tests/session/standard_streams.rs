//! The standard streams: where what is printed to them goes, and that they are what bare SBCL has.

use crate::support::fresh;
use sbcl::Evaluation;

#[test]
fn a_kept_stream_prints_into_the_evaluation_that_uses_it() {
    let lisp = fresh();
    lisp.values("(defvar *out* *standard-output*) (defvar *err* *error-output*) (defvar *raw* sb-sys:*stdout*)");
    let outcome = lisp.eval("(progn (format *out* \"a\") (format *err* \"b\") (format *raw* \"c\") 1)");
    assert_eq!((&*outcome.stdout.text, &*outcome.stderr.text), ("ac", "b"));
    assert!(lisp.eval("1").background.is_empty());
}

#[test]
fn what_is_set_stays_set() {
    let lisp = fresh();
    lisp.values("(setf *standard-output* (make-string-output-stream))");
    lisp.values("(princ :kept)");
    assert_eq!(
        lisp.value("(prog1 (get-output-stream-string *standard-output*) (setf *standard-output* sb-sys:*stdout*))"),
        "\"KEPT\""
    );
    assert_eq!(lisp.eval("(princ :shown)").stdout.text, "SHOWN");
    lisp.values("(setf *standard-output* (make-broadcast-stream))");
    lisp.reset();
    assert_eq!(lisp.eval("(princ :shown)").stdout.text, "SHOWN");
}

#[test]
fn sbcls_own_streams_stay_set_too_which_is_told_once() {
    let lisp = fresh();
    lisp.values("(setf sb-sys:*stdout* (make-string-output-stream))");
    let outcome = lisp.eval("(princ :kept)");
    assert_eq!(
        outcome.notices,
        ["SB-SYS:*STDOUT* stays set to another stream, so that answers do not show what is printed. To undo that: \
          (sbcl-host::install-standard-streams)"]
    );
    assert_eq!(outcome.stdout.text, "");
    assert_eq!(lisp.value("(get-output-stream-string sb-sys:*stdout*)"), "\"KEPT\"");
    assert!(lisp.eval("1").notices.is_empty());
    lisp.values("(sbcl-host::install-standard-streams)");
    assert_eq!(lisp.eval("(princ :shown)").stdout.text, "SHOWN");
    lisp.values("(setf sb-sys:*stdin* (make-string-input-stream \"1 2\"))");
    let outcome = lisp.eval("(read)");
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "1");
    assert!(outcome.notices[0].starts_with("SB-SYS:*STDIN* stays set to another stream, from which is read."));
    lisp.values("(close sb-sys:*stdin*)");
    let notices = lisp.eval("(close sb-sys:*stdin*)").notices;
    assert_eq!(notices, ["*STDIN* held no open stream any more: it is what it was at first again."]);
}

#[test]
fn the_terminal_stays_set_too() {
    let lisp = fresh();
    let typed = "(make-two-way-stream (make-string-input-stream (format nil \"y~%n~%\")) (make-broadcast-stream))";
    lisp.values(&format!("(setf sb-sys:*tty* {typed})"));
    let outcome = lisp.eval("(y-or-n-p \"Sure?\")");
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "T");
    assert!(outcome.notices[0].starts_with("SB-SYS:*TTY* stays set to another stream"), "{:?}", outcome.notices);
    assert_eq!(lisp.value("(sb-thread:join-thread (sb-thread:make-thread (lambda () (y-or-n-p \"Sure?\"))))"), "NIL");
    lisp.values("(close sb-sys:*tty*)");
    let outcome = lisp.eval("(print 1 *terminal-io*)");
    assert_eq!(outcome.notices, ["*TTY* held no open stream any more: it is what it was at first again."]);
    assert_eq!(outcome.stdout.text.trim(), "1");
}

#[test]
fn dribble_goes_on_from_call_to_call() {
    let lisp = fresh();
    lisp.values("(defvar *file* (uiop:with-temporary-file (:pathname p :keep t) (namestring p)))");
    lisp.values("(dribble *file*)");
    assert_eq!(lisp.eval("(princ \"dribbled\")").stdout.text, "dribbled");
    lisp.values("(dribble)");
    assert_eq!(lisp.value("(prog1 (uiop:read-file-string *file*) (delete-file *file*))"), "\"dribbled\"");
}

#[test]
fn they_take_octets() {
    let lisp = fresh();
    let outcome = lisp.eval("(progn (write-sequence #(195 164) *standard-output*) (write-byte 33 *standard-output*) (write-byte 226 *standard-output*) (princ :x) 1)");
    assert_eq!(outcome.stdout.text, "ä!\u{fffd}X");
    let octets = lisp.eval("(write-sequence (sb-ext:string-to-octets \"grüße\") *standard-output*)");
    assert_eq!(octets.stdout.text, "grüße");
}

#[test]
fn input_is_at_its_end() {
    let lisp = fresh();
    assert_eq!(lisp.error("(read-line)").kind, "END-OF-FILE");
    assert_eq!(lisp.value("(list (read-char nil nil :eof) (read-byte *standard-input* nil :eof) (listen) (read-line *query-io* nil :eof))"), "(:EOF :EOF NIL :EOF)");
    assert_eq!(lisp.value("(read-sequence (make-string 3) *standard-input*)"), "0");
    assert_eq!(
        lisp.value("(list (stream-element-type *standard-input*) (stream-element-type *standard-output*))"),
        "(CHARACTER CHARACTER)"
    );
}

#[test]
fn output_keeps_the_order_in_which_it_was_printed_within_a_line() {
    let lisp = fresh();
    let outcome = lisp.eval("(progn (princ \"a\") (fresh-line) (princ \"b\") (fresh-line *error-output*) (princ \"c\" *error-output*) (fresh-line) 1)");
    assert_eq!((&*outcome.stdout.text, &*outcome.stderr.text), ("a\nb\n", "c"));
}

#[test]
fn what_is_no_octet_is_refused_as_by_bare_sbcl() {
    let lisp = fresh();
    for (code, datum) in [
        ("(write-byte 256 *standard-output*)", "256"),
        ("(write-byte -1 *error-output*)", "-1"),
        ("(write-sequence #(300) *standard-output*)", "300"),
        ("(write-byte (car '(:a)) sb-sys:*stdout*)", ":A"),
    ] {
        let error = lisp.run(Evaluation::new(code)).result.expect_err(code);
        let expected = format!("The value {datum} is not of type (UNSIGNED-BYTE 8)");
        assert_eq!((&*error.kind, &*error.message.text), ("TYPE-ERROR", &*expected), "{code}");
    }
}

#[test]
fn a_stream_kept_from_printing_a_value_prints_nowhere() {
    let lisp = fresh();
    lisp.values("(defvar *kept* nil) (defstruct thing) (defmethod print-object ((x thing) s) (setf *kept* s) (princ \"thing\" s))");
    lisp.values("(make-thing)");
    assert_eq!(lisp.value("(progn (princ \"late\" *kept*) (finish-output *kept*) 2)"), "2");
}

#[test]
fn the_advice_that_is_given_satisfies() {
    let lisp = fresh();
    lisp.eval("(setf *standard-output* (make-broadcast-stream))");
    let advice = lisp.eval("1").notices.concat();
    let form = &advice[advice.find("(setf").expect("advice")..];
    lisp.eval(form);
    let outcome = lisp.eval("(princ :back)");
    assert!(outcome.notices.is_empty() && outcome.stdout.text == "BACK", "{outcome:?}");
}

#[test]
fn what_a_thread_prints_comes_after_what_was_printed_before_it_was_started() {
    let code =
        "(progn (princ \"a\") (sb-thread:join-thread (sb-thread:make-thread (lambda () (princ \"b\")))) (princ \"c\"))";
    assert_eq!(fresh().eval(code).stdout.text, "abc");
}
