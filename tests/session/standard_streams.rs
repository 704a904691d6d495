//! The standard streams: where output goes, and that they behave as in bare SBCL.

use crate::support::fresh;
use sbcl::Evaluation;

#[test]
fn stream_saved_in_a_variable_prints_into_the_current_evaluation() {
    let lisp = fresh();
    lisp.values("(defvar *out* *standard-output*) (defvar *err* *error-output*) (defvar *raw* sb-sys:*stdout*)");
    let outcome = lisp.eval("(progn (format *out* \"a\") (format *err* \"b\") (format *raw* \"c\") 1)");
    assert_eq!((&*outcome.stdout.text, &*outcome.stderr.text), ("ac", "b"));
    assert!(lisp.eval("1").background.is_empty());
}

#[test]
fn standard_output_set_by_the_user_stays_set_until_a_reset() {
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
fn sb_sys_stdout_and_stdin_set_by_the_user_stay_set_with_one_notice() {
    let lisp = fresh();
    lisp.values("(setf sb-sys:*stdout* (make-string-output-stream))");
    let outcome = lisp.eval("(princ :kept)");
    assert_eq!(
        outcome.notices,
        ["SB-SYS:*STDOUT* stays set to another stream, so answers may not show its output. To reset the standard \
             streams: (sbcl-host::install-standard-streams)"]
    );
    assert_eq!(outcome.stdout.text, "");
    assert_eq!(lisp.value("(get-output-stream-string sb-sys:*stdout*)"), "\"KEPT\"");
    assert!(lisp.eval("1").notices.is_empty());
    lisp.values("(sbcl-host::install-standard-streams)");
    assert_eq!(lisp.eval("(princ :shown)").stdout.text, "SHOWN");
    lisp.values("(setf sb-sys:*stdin* (make-string-input-stream \"1 2\"))");
    let outcome = lisp.eval("(read)");
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "1");
    assert!(outcome.notices[0].starts_with("SB-SYS:*STDIN* stays set to another stream, so input is read from there."));
    lisp.values("(close sb-sys:*stdin*)");
    let notices = lisp.eval("(close sb-sys:*stdin*)").notices;
    assert_eq!(notices, ["SB-SYS:*STDIN* held no usable stream and was reset to its initial value."]);
}

#[test]
fn sb_sys_tty_set_by_the_user_stays_set_until_closed() {
    let lisp = fresh();
    let typed = "(make-two-way-stream (make-string-input-stream (format nil \"y~%n~%\")) (make-broadcast-stream))";
    lisp.values(&format!("(setf sb-sys:*tty* {typed})"));
    let outcome = lisp.eval("(y-or-n-p \"Sure?\")");
    assert_eq!(outcome.result.as_ref().unwrap()[0].text, "T");
    assert!(outcome.notices[0].starts_with("SB-SYS:*TTY* stays set to another stream"), "{:?}", outcome.notices);
    assert_eq!(lisp.value("(sb-thread:join-thread (sb-thread:make-thread (lambda () (y-or-n-p \"Sure?\"))))"), "NIL");
    lisp.values("(close sb-sys:*tty*)");
    let outcome = lisp.eval("(print 1 *terminal-io*)");
    assert_eq!(outcome.notices, ["SB-SYS:*TTY* held no usable stream and was reset to its initial value."]);
    assert_eq!(outcome.stdout.text.trim(), "1");
}

#[test]
fn dribble_records_output_across_evaluations() {
    let lisp = fresh();
    lisp.values("(defvar *file* (uiop:with-temporary-file (:pathname p :keep t) (namestring p)))");
    lisp.values("(dribble *file*)");
    assert_eq!(lisp.eval("(princ \"dribbled\")").stdout.text, "dribbled");
    lisp.values("(dribble)");
    assert_eq!(lisp.value("(prog1 (uiop:read-file-string *file*) (delete-file *file*))"), "\"dribbled\"");
}

#[test]
fn standard_output_accepts_octets_and_decodes_utf8() {
    let lisp = fresh();
    let outcome = lisp.eval("(progn (write-sequence #(195 164) *standard-output*) (write-byte 33 *standard-output*) (write-byte 226 *standard-output*) (princ :x) 1)");
    assert_eq!(outcome.stdout.text, "ä!\u{fffd}X");
    let octets = lisp.eval("(write-sequence (sb-ext:string-to-octets \"grüße\") *standard-output*)");
    assert_eq!(octets.stdout.text, "grüße");
}

#[test]
fn standard_input_is_at_end_of_file() {
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
fn fresh_line_tracks_stdout_and_stderr_columns_separately() {
    let lisp = fresh();
    let outcome = lisp.eval("(progn (princ \"a\") (fresh-line) (princ \"b\") (fresh-line *error-output*) (princ \"c\" *error-output*) (fresh-line) 1)");
    assert_eq!((&*outcome.stdout.text, &*outcome.stderr.text), ("a\nb\n", "c"));
}

#[test]
fn write_byte_of_a_non_octet_signals_type_error() {
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
fn stream_saved_from_print_object_discards_later_output() {
    let lisp = fresh();
    lisp.values("(defvar *kept* nil) (defstruct thing) (defmethod print-object ((x thing) s) (setf *kept* s) (princ \"thing\" s))");
    lisp.values("(make-thing)");
    assert_eq!(lisp.value("(progn (princ \"late\" *kept*) (finish-output *kept*) 2)"), "2");
}

#[test]
fn suggested_form_restores_a_redirected_standard_output() {
    let lisp = fresh();
    lisp.eval("(setf *standard-output* (make-broadcast-stream))");
    let advice = lisp.eval("1").notices.concat();
    let form = &advice[advice.find("(setf").expect("advice")..];
    lisp.eval(form);
    let outcome = lisp.eval("(princ :back)");
    assert!(outcome.notices.is_empty() && outcome.stdout.text == "BACK", "{outcome:?}");
}

#[test]
fn thread_output_comes_after_output_printed_before_the_thread_started() {
    let code =
        "(progn (princ \"a\") (sb-thread:join-thread (sb-thread:make-thread (lambda () (princ \"b\")))) (princ \"c\"))";
    assert_eq!(fresh().eval(code).stdout.text, "abc");
}
