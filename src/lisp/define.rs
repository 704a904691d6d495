//! Rust functions in Lisp.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::convert::{ConversionError, FromLisp, IntoLisp, Reader, Shape, Writer};
use super::enter::{Cx, Entry};
use super::error::Error;
use super::function::Function;
use super::options::Options;
use super::pool::{self, Failure};
use crate::image::program::sbcl_program_function;
use crate::panics::Contained;

/// Numbers below are those of functions that are there from the beginning.
const FIRST: u64 = sbcl_program_function::SBCL_PROGRAM_FIRST as u64;

/// The functions that were defined, by number. A function that is defined again gets another one: what Lisp's function writes is for the
/// closure that it was compiled for, and for no other.
static DEFINED: RwLock<BTreeMap<u64, Definition>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(FIRST);
/// How often that has changed.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// What a Rust function returns that fails.
type AnyError = Box<dyn std::error::Error + Send + Sync>;
/// Reads the arguments and writes what the function returns.
type Body = dyn Fn(&mut Reader<'_>, &mut Writer<'_>) -> Result<(), AnyError> + Send + Sync;

struct Defined {
    name: String,
    body: Box<Body>,
}

struct Definition {
    defined: Arc<Defined>,
    /// Lisp calls it.
    is_taken: bool,
    /// The functions that this one has replaced, until Lisp is left: a closure may call Lisp when it is dropped.
    replaced: Vec<Arc<Defined>>,
}

/// Numbers from here on are those of functions that belong to a thread.
const FIRST_LOCAL: u64 = 1 << 32;

static NEXT_LOCAL: AtomicU64 = AtomicU64::new(FIRST_LOCAL);

type Local = Rc<dyn Fn(&mut Reader<'_>, &mut Writer<'_>) -> Result<(), AnyError>>;

/// The functions that were defined after so many changes, as one thread has seen them, in the order of their numbers: a look at
/// them takes no lock. They are not kept alive by it.
#[derive(Default)]
struct Known {
    changes: u64,
    defined: Vec<(u64, Weak<Defined>)>,
}

thread_local! {
    /// The functions that belong to this thread, by number.
    static LOCAL: RefCell<HashMap<u64, Local>> = RefCell::default();
    static KNOWN: RefCell<Known> = RefCell::default();
}

/// A parameter of a Rust function, as Lisp sees it.
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub struct Parameter {
    shape: Shape,
    /// Lisp may leave it out.
    optional: bool,
}

/// A Rust closure that Lisp can call: `Fn`, of up to eight arguments, each [`FromLisp`]. It returns something that is
/// [`IntoLisp`], or a `Result` of that and any error. One that is [defined](super::Lisp::define) is called on any thread of
/// Lisp's, and several times at once, so it has to be `Send + Sync`; others are [local](Cx::local_function):
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let count = std::cell::Cell::new(0_i64);
/// lisp.define("host:count", "Count.", move || count.replace(count.get() + 1)).unwrap();
/// ```
pub trait HostFunction<Arguments>: 'static {
    /// Its parameters.
    #[doc(hidden)]
    fn parameters() -> Vec<Parameter>;

    /// Calls it.
    #[doc(hidden)]
    fn invoke(&self, reader: &mut Reader<'_>, writer: &mut Writer<'_>) -> Result<(), AnyError>;
}

/// What such a closure may return.
pub trait HostResult {
    /// Writes it.
    #[doc(hidden)]
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError>;
}

impl<T: IntoLisp> HostResult for T {
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError> {
        Ok(Contained::new(self).write(writer)?)
    }
}

impl<T: IntoLisp, E: Into<AnyError>> HostResult for Result<T, E> {
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError> {
        self.map_err(Into::into)?.write_result(writer)
    }
}

/// Several values for Lisp, in what a Rust function returns: up to 10,000.
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
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError> {
        let values = Contained::new(self.0);
        Ok(writer.values(|writer| values.write_arguments(writer))?)
    }
}

macro_rules! functions {
    ($($($name:ident),*;)*) => {$(
        impl<Function, Output, $($name),*> HostFunction<($($name,)*)> for Function
        where
            Function: Fn($($name),*) -> Output + 'static,
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
                writer: &mut Writer<'_>,
            ) -> Result<(), AnyError> {
                let mut number = 0;
                $(
                    number += 1;
                    let $name = reader.read::<$name>().map_err(|error| error.of_argument(number))?;
                    let $name = Contained::new($name);
                )*
                self($($name.into_inner()),*).write_result(writer)
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

/// Defines `name` as `function`, under `options`. `lambda_list` is as in `defun`; without one it is made from the parameters.
pub(super) fn define<Arguments, F: HostFunction<Arguments> + Send + Sync>(
    options: &Arc<Options>,
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
    // The last one to have it may be a call that panics.
    let function = Contained::new(function);
    let defined = Arc::new(Defined {
        name: name.to_owned(),
        body: Box::new(move |reader, writer| function.invoke(reader, writer)),
    });
    let number = add(defined);
    let shapes: Vec<u16> = parameters.iter().map(|parameter| parameter.shape.code()).collect();
    let result = pool::run_under(options, |cx| {
        cx.ask_with(Entry::DefineFunction, &(number, name, &lambda_list, documentation, &shapes))
    });
    // Lisp may have taken it before something went wrong.
    settle(number);
    result
}

/// Gives a function a number.
fn add(defined: Arc<Defined>) -> u64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    DEFINED.write().insert(number, Definition { defined, is_taken: false, replaced: Vec::new() });
    CHANGES.fetch_add(1, Ordering::AcqRel);
    number
}

/// Notes that Lisp calls one function from now on, and another one no more: the two numbers that `reader` has.
pub(super) fn note_taken(mut reader: Reader<'_>) -> Result<(), Failure> {
    let (taken, replaced): (u64, u64) = (reader.read().unwrap_or(0), reader.read().unwrap_or(0));
    let mut all = DEFINED.write();
    let replaced: Option<Definition> = all.remove(&replaced);
    // Whoever defines it has not returned.
    if let Some(definition) = all.get_mut(&taken) {
        definition.is_taken = true;
        definition.replaced = replaced.into_iter().flat_map(|it| it.replaced.into_iter().chain([it.defined])).collect();
    }
    CHANGES.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// Drops what nobody calls any more when a definition is over: the closure itself, if Lisp has not taken it, or the one that
/// it has replaced.
fn settle(number: u64) {
    let unused = {
        let mut all = DEFINED.write();
        match all.get_mut(&number) {
            Some(definition) if definition.is_taken => (std::mem::take(&mut definition.replaced), None),
            _ => (Vec::new(), all.remove(&number)),
        }
    };
    CHANGES.fetch_add(1, Ordering::AcqRel);
    // Outside: what a closure holds may use others.
    drop(unused);
}

fn lambda_list_of(parameters: &[Parameter]) -> String {
    let required = required(parameters);
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
    if function >= FIRST_LOCAL {
        return "a local function".to_owned();
    }
    find(function).map_or_else(|| "the program".to_owned(), |defined| defined.name.clone())
}

fn find(function: u64) -> Option<Arc<Defined>> {
    KNOWN.with_borrow_mut(|known| {
        if known.changes != CHANGES.load(Ordering::Acquire) {
            let all = DEFINED.read();
            // No change is made meanwhile.
            known.changes = CHANGES.load(Ordering::Acquire);
            known.defined = all.iter().map(|(number, it)| (*number, Arc::downgrade(&it.defined))).collect();
        }
        let place = known.defined.binary_search_by_key(&function, |(number, _)| *number).ok()?;
        known.defined[place].1.upgrade()
    })
}

/// Calls a function for Lisp.
pub(super) fn call(cx: &Cx, function: u64, message: &[u64], writer: &mut Writer<'_>) -> Result<(), Failure> {
    let mut reader = Reader::new(cx, message);
    let result = if function >= FIRST_LOCAL {
        match LOCAL.with_borrow(|local| local.get(&function).cloned()) {
            Some(local) => local(&mut reader, writer),
            None => Err("it belongs to another thread, or is dropped".into()),
        }
    } else {
        match find(function) {
            Some(defined) => (defined.body)(&mut reader, writer),
            None => return Err(Failure::Missing),
        }
    };
    if cx.inside().is_unwinding() {
        return Err(Failure::Unwinding);
    }
    result.map_err(|error| Failure::of(name(function), error))
}

/// A Lisp function that is a Rust closure of this thread's, as [`Cx::local_function`] makes one. When it is dropped, so is
/// the closure, and calls of the function fail from then on.
#[derive(Debug)]
pub struct LocalFunction<'cx> {
    function: Function,
    number: u64,
    thread: PhantomData<(&'cx Cx, *mut ())>,
}

impl LocalFunction<'_> {
    pub(super) fn new<Arguments, F: HostFunction<Arguments>>(cx: &Cx, function: F) -> Result<Self, Error> {
        let number = NEXT_LOCAL.fetch_add(1, Ordering::Relaxed);
        let parameters = F::parameters();
        let shapes: Vec<u16> = parameters.iter().map(|parameter| parameter.shape.code()).collect();
        let function = Contained::new(function);
        let function_object = cx.ask_with(Entry::LocalFunction, &(number, required(&parameters), &shapes))?;
        LOCAL.with_borrow_mut(|local| {
            local.insert(number, Rc::new(move |reader, writer| function.invoke(reader, writer)));
        });
        Ok(Self { function: Function::of(function_object), number, thread: PhantomData })
    }
}

impl Drop for LocalFunction<'_> {
    fn drop(&mut self) {
        // Dropped outside: what the closure holds may use others.
        let closure = LOCAL.with_borrow_mut(|local| local.remove(&self.number));
        drop(closure);
    }
}

impl Deref for LocalFunction<'_> {
    type Target = Function;

    fn deref(&self) -> &Function {
        &self.function
    }
}

impl IntoLisp for LocalFunction<'_> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.function.write(writer)
    }
}

/// How many of `parameters` Lisp may not leave out: those are the last ones.
fn required(parameters: &[Parameter]) -> usize {
    parameters.iter().rposition(|parameter| !parameter.optional).map_or(0, |last| last + 1)
}

impl ConversionError {
    pub(super) fn of_argument(mut self, number: usize) -> Self {
        self.place.insert(0, format!("argument {number}"));
        self
    }
}
