//! Threads that evaluations start.

use super::*;

#[test]
fn output_of_a_joined_thread_is_captured() {
    let outcome = fresh()
        .eval("(sb-thread:join-thread (sb-thread:make-thread (lambda () (write-string \"from a thread\") :joined)))");
    assert_eq!(values("thread", &outcome), [":JOINED"]);
    assert_eq!(outcome.stdout.text, "from a thread");
}

#[test]
fn output_of_a_thread_that_outlived_its_evaluation_is_background() {
    let lisp = fresh();
    let outcome =
        lisp.eval("(defvar *th* (sb-thread:make-thread (lambda () (sleep 0.3) (write-string \"late\")))) :started");
    assert_eq!(values("start", &outcome), [":STARTED"]);
    assert!(outcome.stdout.is_empty(), "{}", outcome.stdout.text);
    let text = lisp.text("(sb-thread:join-thread *th*) (write-string \"now\") 1");
    insta::assert_snapshot!(text, @r"
    [background]
    late

    [stdout]
    now

    => 1
    ");
    assert_eq!(lisp.text("1"), "=> 1");
}

#[test]
fn an_error_in_a_thread_ends_neither_the_process_nor_the_session() {
    let lisp = fresh();
    let outcome = lisp
        .eval("(sb-thread:join-thread (sb-thread:make-thread (lambda () (error \"in a thread\"))) :default :failed)");
    assert_eq!(values("thread", &outcome), [":FAILED", ":ABORT"]);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

#[test]
fn an_unprintable_argument_in_a_threads_backtrace_is_not_reported_as_a_failed_condition_report() {
    let lisp = fresh();
    let definitions = "(defclass bad () ()) (defvar *kept* nil)
        (defmethod print-object ((object bad) stream) (declare (ignore stream)) (error \"unprintable\"))
        (defun keep (x) (unwind-protect (error \"in a thread\") (setf *kept* x)))";
    lisp.eval(definitions);
    let code =
        "(sb-thread:join-thread (sb-thread:make-thread (lambda () (keep (make-instance 'bad)))) :default :failed)";
    let text = lisp.text(code);
    assert!(text.contains("\nin a thread\n0: (ERROR \"in a thread\")\n1: (KEEP "), "{text}");
    assert!(text.contains("\n(printing this report failed: SIMPLE-ERROR)\n"), "{text}");
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}

/// SBCL would send the signal to an invalid thread, which ends the process.
#[test]
fn thread_that_the_system_has_not_started_yet_cannot_be_interrupted() {
    let code = "(let ((thread (sb-thread::%make-thread \"starting\" nil (sb-thread:make-semaphore))))
                  (setf (sb-thread::thread-primitive-thread thread) 8)
                  (unwind-protect
                       (handler-case (sb-thread:interrupt-thread thread #'list)
                         (sb-thread:interrupt-thread-error () :refused))
                    (setf (sb-thread::thread-primitive-thread thread) 0)))";
    assert_eq!(fresh().value(code), ":REFUSED");
}

/// The kernel sends the timers' signal to any thread that does not block it. An idle thread must pass it on.
#[test]
fn timer_runs_even_when_sigalrm_reaches_an_idle_thread() {
    let lisp = fresh();
    assert_eq!(
        lisp.value(
            "(let ((ran nil)
                   (idle (svref sbcl-host/embedding::**lane-threads** sbcl-host::+inspection-lane+)))
               (sb-ext:schedule-timer (sb-ext:make-timer (lambda () (setf ran t)) :thread nil) 0.05)
               (sb-impl::%clear-system-timer)
               (sleep 0.06)
               (sb-alien:alien-funcall
                (sb-alien:extern-alien \"pthread_kill\" (function sb-alien:int sb-alien:unsigned-long sb-alien:int))
                (sb-thread::thread-os-thread idle) sb-unix:sigalrm)
               (loop until ran do (sleep 0.01))
               ran)"
        ),
        "T"
    );
}

#[test]
fn timer_error_is_reported_as_background_and_later_timers_still_run() {
    let lisp = fresh();
    for (place, thread) in [("t", "Timer tick"), ("nil", "signals")] {
        let code = format!(
            "(defvar *done* nil) (defun tick () (unwind-protect (error \"from a timer\") (setf *done* t)))\n\
             (setf *done* nil) (sb-ext:schedule-timer (sb-ext:make-timer 'tick :name \"tick\" :thread {place}) 0.05)\n\
             (loop until *done* do (sleep 0.01)) (sleep 0.1)"
        );
        let text = lisp.text(&code);
        let report = format!(
            "[background]\nError in thread {thread}: SIMPLE-ERROR\nfrom a timer\n0: (ERROR \"from a timer\")\n1: (TICK)\n"
        );
        assert!(text.starts_with(&report) && text.ends_with("\n\n=> NIL"), "{text}");
        assert!(!text.contains("debugger") && !text.contains("quitting"), "{text}");
    }
    // A timer that unwinds its thread does not stop later timers.
    for place in ["t", "nil"] {
        for does in ["(throw 'out 1)", "(sb-thread:abort-thread)", "(setf *done* t)"] {
            let code = format!(
                "(setf *done* nil)\n\
                 (sb-ext:schedule-timer (sb-ext:make-timer (lambda () (unwind-protect {does} (setf *done* t))) :thread {place}) 0.05)\n\
                 (loop until *done* do (sleep 0.01)) :done"
            );
            assert!(lisp.text(&code).ends_with("=> :DONE"), "{does}");
        }
    }
}

#[test]
fn a_stack_exhausted_in_a_thread_ends_neither_the_process_nor_the_session() {
    let lisp = fresh();
    let code = "(defun dive (x) (list (dive x))) (sb-thread:join-thread (sb-thread:make-thread #'dive :arguments '(1)) :default :failed)";
    assert_eq!(values("dive", &lisp.eval(code)), [":FAILED", ":ABORT"]);
    assert_eq!(lisp.value("(+ 1 2)"), "3");
}
