//! Rust functions in Lisp.

use std::sync::Arc;

use parking_lot::RwLock;

use super::convert::{ConversionError, FromLisp, IntoLisp, Reader, Shape, Writer};
use super::enter::{Cx, Entry};
use super::error::Error;
use super::pool::{self, Failure};

/// Numbers below are those of functions that are there from the beginning: `SBCL_PROGRAM_FIRST`.
const FIRST: u64 = 16;

/// What was defined, by number. A name that is defined again keeps its number.
static DEFINED: RwLock<Vec<Arc<Defined>>> = RwLock::new(Vec::new());

type Body = Box<
    dyn Fn(&Cx, &mut Reader<'_>, &mut Writer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + Sync,
>;

struct Defined {
    name: String,
    body: Body,
}

/// A parameter of a Rust function, as Lisp sees it.
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub struct Parameter {
    shape: Shape,
    /// Lisp may leave it out.
    optional: bool,
}

/// A Rust closure that Lisp can call: `Fn`, `Send + Sync`, of up to eight arguments, each [`FromLisp`]. It returns
/// something that is [`IntoLisp`], or a `Result` of that and any error. Lisp calls it on any of its threads, and several times
/// at once:
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let count = std::cell::Cell::new(0_i64);
/// lisp.define("host:count", "Count.", move || count.replace(count.get() + 1)).unwrap();
/// ```
pub trait HostFunction<Arguments>: Send + Sync + 'static {
    /// Its parameters.
    #[doc(hidden)]
    fn parameters() -> Vec<Parameter>;

    /// Calls it.
    #[doc(hidden)]
    fn invoke(
        &self,
        reader: &mut Reader<'_>,
        writer: &mut Writer,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// What such a closure may return.
pub trait HostResult {
    /// Writes it.
    #[doc(hidden)]
    fn write_result(self, writer: &mut Writer) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

impl<T: IntoLisp> HostResult for T {
    fn write_result(self, writer: &mut Writer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.write(writer);
        Ok(())
    }
}

impl<T: IntoLisp, E: Into<Box<dyn std::error::Error + Send + Sync>>> HostResult for Result<T, E> {
    fn write_result(self, writer: &mut Writer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.map_err(Into::into)?.write(writer);
        Ok(())
    }
}

/// Several values for Lisp, in what a Rust function returns.
///
/// ```
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// lisp.define("host:divide", "Return quotient and remainder.", |a: i64, b: i64| sbcl::Values((a / b, a % b)))?;
/// assert_eq!(lisp.eval::<(i64, i64)>("(host:divide 17 5)")?, (3, 2));
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values<T>(pub T);

impl<T: super::convert::Arguments> HostResult for Values<T> {
    fn write_result(self, writer: &mut Writer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        writer.values(|writer| self.0.write_arguments(writer));
        Ok(())
    }
}

macro_rules! functions {
    ($($($name:ident),*;)*) => {$(
        impl<Function, Output, $($name),*> HostFunction<($($name,)*)> for Function
        where
            Function: Fn($($name),*) -> Output + Send + Sync + 'static,
            Output: HostResult,
            $($name: FromLisp),*
        {
            fn parameters() -> Vec<Parameter> {
                vec![$(Parameter { shape: $name::SHAPE, optional: $name::OPTIONAL }),*]
            }

            #[allow(non_snake_case, unused_variables, unused_mut, unused_assignments)]
            fn invoke(
                &self,
                reader: &mut Reader<'_>,
                writer: &mut Writer,
            ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
                let mut number = 0;
                $(
                    number += 1;
                    let $name = reader.read::<$name>().map_err(|error| error.of_argument(number))?;
                )*
                self($($name),*).write_result(writer)
            }
        }
    )*};
}

functions! {
    ;
    A;
    A, B;
    A, B, C;
    A, B, C, D;
    A, B, C, D, E;
    A, B, C, D, E, F;
    A, B, C, D, E, F, G;
    A, B, C, D, E, F, G, H;
}

/// Defines `name` as `function`. `lambda_list` is as in `defun`; without one it is made from the parameters.
pub(super) fn define<Arguments, F: HostFunction<Arguments>>(
    name: &str,
    lambda_list: Option<&str>,
    documentation: &str,
    function: F,
) -> Result<(), Error> {
    let parameters = F::parameters();
    let lambda_list = match lambda_list {
        Some(given) => {
            let given = given.trim();
            if given.starts_with('(') { given.to_owned() } else { format!("({given})") }
        }
        None => lambda_list_of(&parameters),
    };
    let defined = Arc::new(Defined {
        name: name.to_owned(),
        body: Box::new(move |_, reader, writer| function.invoke(reader, writer)),
    });
    let number = {
        let mut all = DEFINED.write();
        match all.iter().position(|known| known.name.eq_ignore_ascii_case(name)) {
            Some(place) => {
                all[place] = defined;
                place
            }
            None => {
                all.push(defined);
                all.len() - 1
            }
        }
    } as u64
        + FIRST;
    let shapes: Vec<u16> = parameters.iter().map(|parameter| parameter.shape.code()).collect();
    pool::run(|cx| cx.ask_with(Entry::DefineFunction, &(number, name, &lambda_list, documentation, &shapes)))
}

fn lambda_list_of(parameters: &[Parameter]) -> String {
    // Those that Lisp may leave out are the last ones.
    let required = parameters.iter().rposition(|parameter| !parameter.optional).map_or(0, |last| last + 1);
    let mut text = String::from("(");
    for (index, _) in parameters.iter().enumerate() {
        if index == required {
            text.push_str("&optional ");
        }
        text.push_str(&format!("argument-{} ", index + 1));
    }
    text.trim_end().to_owned() + ")"
}

/// The name of a function.
pub(super) fn name(function: u64) -> String {
    find(function).map_or_else(|| "the program".to_owned(), |defined| defined.name.clone())
}

fn find(function: u64) -> Option<Arc<Defined>> {
    let place = usize::try_from(function.checked_sub(FIRST)?).ok()?;
    DEFINED.read().get(place).cloned()
}

/// Calls a function for Lisp.
pub(super) fn call(cx: &Cx, function: u64, message: &[u64], writer: &mut Writer) -> Result<(), Failure> {
    let Some(defined) = find(function) else {
        return Err(Failure::of("the program".to_owned(), "there is no such function".into()));
    };
    let mut reader = Reader::new(cx, message);
    let result = (defined.body)(cx, &mut reader, writer);
    if cx.inside().is_unwinding() {
        return Err(Failure::Unwinding);
    }
    result.map_err(|error| Failure::of(defined.name.clone(), error))
}

impl ConversionError {
    fn of_argument(mut self, number: i32) -> Self {
        self.place.insert(0, format!("argument {number}"));
        self
    }
}
