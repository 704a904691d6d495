//! Compiles the Lisp of this program into the core that it carries.

fn main() -> Result<(), sbcl_build::Error> {
    sbcl_build::core().system("shop", "lisp/").build()
}
