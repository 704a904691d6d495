//! What must not compile: the Lisp thread's token elsewhere, and what cannot be sent.

#[test]
fn what_must_not_compile_does_not() {
    trybuild::TestCases::new().compile_fail("tests/compile-fail/*.rs");
}
