//! Compiles this program's Lisp code into the core that the program contains.

fn main() -> Result<(), sbcl_build::Error> {
    sbcl_build::core().system("shop", "lisp/").build()
}
