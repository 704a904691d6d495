//! Host functions: Rust closures that Lisp calls by number.

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
use super::pool::{self, HostFailure};
use crate::image::process;
use crate::image::program::sbcl_program_function;
use crate::os::panics::PanicSafeDrop;

/// The lowest number of a defined function: `SBCL_PROGRAM_FIRST`. Built-in functions have lower numbers.
const FIRST_FUNCTION_NUMBER: u64 = sbcl_program_function::SBCL_PROGRAM_FIRST as u64;

/// The defined functions by number. A function that is redefined gets a new number: the Lisp stub that calls a closure
/// by number writes the arguments as this closure's parameters require, and a new closure may have other parameters.
static DEFINED_FUNCTIONS: RwLock<BTreeMap<u64, DefinedFunction>> = RwLock::new(BTreeMap::new());
static NEXT_FUNCTION_NUMBER: AtomicU64 = AtomicU64::new(FIRST_FUNCTION_NUMBER);
/// A number that increases after each change of [`DEFINED_FUNCTIONS`].
static DEFINED_FUNCTIONS_VERSION: AtomicU64 = AtomicU64::new(0);

/// An error of any type that a host function returns.
type AnyError = Box<dyn std::error::Error + Send + Sync>;
/// A closure that reads the arguments, runs the host function and writes the function's values.
type ClosureBody = dyn Fn(&mut Reader<'_>, &mut Writer<'_>) -> Result<(), AnyError> + Send + Sync;

struct HostClosure {
    name: String,
    body: Box<ClosureBody>,
}

struct DefinedFunction {
    closure: Arc<HostClosure>,
    /// True once Lisp has installed the function under its name.
    is_installed: bool,
    /// The closures that Lisp no longer calls since this definition. The closures are kept until the defining call has
    /// left Lisp, because their destructors may call Lisp.
    unused: Vec<Arc<HostClosure>>,
}

/// The lowest number of a local function, which belongs to one thread.
const FIRST_LOCAL_NUMBER: u64 = 1 << 32;

static NEXT_LOCAL_NUMBER: AtomicU64 = AtomicU64::new(FIRST_LOCAL_NUMBER);

type LocalClosure = Rc<dyn Fn(&mut Reader<'_>, &mut Writer<'_>) -> Result<(), AnyError>>;

/// A thread's own copy of the defined functions, sorted by number, so that a call needs no lock. The copy does not keep
/// the closures alive.
#[derive(Default)]
struct DefinitionCache {
    version: u64,
    closures: Vec<(u64, Weak<HostClosure>)>,
}

impl DefinitionCache {
    fn refresh(&mut self) {
        let all = DEFINED_FUNCTIONS.read();
        // Every change is made before the version is increased, so `all` is at least as new as this version.
        self.version = DEFINED_FUNCTIONS_VERSION.load(Ordering::Acquire);
        self.closures = all.iter().map(|(number, definition)| (*number, Arc::downgrade(&definition.closure))).collect();
    }

    fn find(&self, function: u64) -> Option<Arc<HostClosure>> {
        let index = self.closures.binary_search_by_key(&function, |(number, _)| *number).ok()?;
        self.closures[index].1.upgrade()
    }
}

thread_local! {
    /// This thread's local functions by number.
    static LOCAL_CLOSURES: RefCell<HashMap<u64, LocalClosure>> = RefCell::default();
    static DEFINITION_CACHE: RefCell<DefinitionCache> = RefCell::default();
}

/// Initializes this thread's [`LOCAL_CLOSURES`] and [`DEFINITION_CACHE`], unless they are initialized. Returns false if
/// one of the two has been destroyed.
pub(super) fn initialize_thread_locals() -> bool {
    LOCAL_CLOSURES.try_with(|_| ()).is_ok() && DEFINITION_CACHE.try_with(|_| ()).is_ok()
}

/// A parameter of a host function. Lisp needs this description to pass arguments.
#[derive(Debug, Clone, Copy)]
#[doc(hidden)]
pub struct Parameter {
    shape: Shape,
    /// True if the parameter's type has a value for an argument that a call omits.
    optional: bool,
}

/// A Rust closure that Lisp can call: an `Fn` of up to eight arguments, each [`FromLisp`].
///
/// The closure returns a value that is [`IntoLisp`], [`Values`], or a `Result` of one of these and an error that
/// converts to `Box<dyn std::error::Error + Send + Sync>`. A [defined](super::Lisp::define) function may be called on
/// any Lisp thread, and on multiple threads at once, so its closure must be `Send + Sync`. The closure of a [local
/// function](Cx::local_function) need not be. The definition of this closure, which is not `Sync`, does not compile:
///
/// ```compile_fail,E0277
/// let lisp = sbcl::Lisp::get_or_boot().unwrap();
/// let count = std::cell::Cell::new(0_i64);
/// lisp.define("host:count", "Count.", move || count.replace(count.get() + 1)).unwrap();
/// ```
pub trait HostFunction<Arguments>: 'static {
    /// Returns the closure's parameters.
    #[doc(hidden)]
    fn parameters() -> Vec<Parameter>;

    /// Reads the arguments, calls the closure and writes the closure's values.
    #[doc(hidden)]
    fn invoke(&self, reader: &mut Reader<'_>, writer: &mut Writer<'_>) -> Result<(), AnyError>;
}

/// A value that a [`HostFunction`] may return.
pub trait HostResult {
    /// Writes the values, or returns the error.
    #[doc(hidden)]
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError>;
}

impl<T: IntoLisp> HostResult for T {
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError> {
        Ok(PanicSafeDrop::new(self).write(writer)?)
    }
}

impl<T: IntoLisp, E: Into<AnyError>> HostResult for Result<T, E> {
    fn write_result(self, writer: &mut Writer<'_>) -> Result<(), AnyError> {
        self.map_err(Into::into)?.write_result(writer)
    }
}

/// Multiple values, up to 10,000, returned by a host function to Lisp.
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
        let values = PanicSafeDrop::new(self.0);
        Ok(writer.values(|writer| values.write_arguments(writer))?)
    }
}

macro_rules! impl_host_functions {
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
                    let $name = reader.read::<$name>().map_err(|error| error.with_argument_place(number))?;
                    let $name = PanicSafeDrop::new($name);
                )*
                self($($name.into_inner()),*).write_result(writer)
            }
        }
    )*};
}

impl_host_functions! {
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

/// Defines the Lisp function `name` as the closure `function`. `options` apply to the call into Lisp that makes the
/// definition.
///
/// `lambda_list` is written as in `defun`, with or without parentheses. If `lambda_list` is `None`, the lambda list is
/// derived from the closure's parameters.
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
        None => derive_lambda_list(&parameters),
    };
    // A panic in the closure's destructor must be contained: the last owner to drop the closure may be a call that
    // panics.
    let function = PanicSafeDrop::new(function);
    let closure = Arc::new(HostClosure {
        name: name.to_owned(),
        body: Box::new(move |reader, writer| function.invoke(reader, writer)),
    });
    // In a forked child, a missing thread may hold the lock of the defined functions.
    if process::is_forked() {
        return Err(Error::Forked);
    }
    let number = register(closure);
    let shapes: Vec<u16> = parameters.iter().map(|parameter| parameter.shape.code()).collect();
    let result = pool::run_with_options(options, |cx| {
        cx.call_entry_with(Entry::DefineFunction, &(number, name, &lambda_list, documentation, &shapes))
    });
    // The closure may be in use even if the call failed: Lisp may have installed the function before the failure.
    drop_unused_closures(number);
    result
}

/// Registers a closure and returns its new number.
fn register(closure: Arc<HostClosure>) -> u64 {
    let number = NEXT_FUNCTION_NUMBER.fetch_add(1, Ordering::Relaxed);
    DEFINED_FUNCTIONS.write().insert(number, DefinedFunction { closure, is_installed: false, unused: Vec::new() });
    DEFINED_FUNCTIONS_VERSION.fetch_add(1, Ordering::AcqRel);
    number
}

/// Records that Lisp has installed a new function under its name. `reader` has the new function's number, and then the
/// numbers of the functions that Lisp will not call any more: the function that the new function replaces, and functions
/// that a garbage collection has found to be unreachable, for example because their package was deleted.
pub(super) fn record_installed(mut reader: Reader<'_>) -> Result<(), HostFailure> {
    let installed: u64 = reader.read().unwrap_or(0);
    let unused: Vec<u64> = std::iter::from_fn(|| reader.read().ok()).collect();
    let mut all = DEFINED_FUNCTIONS.write();
    let unused: Vec<DefinedFunction> = unused.iter().filter_map(|number| all.remove(number)).collect();
    // The defining call has not returned yet: its `drop_unused_closures` drops the unused closures, outside Lisp.
    if let Some(definition) = all.get_mut(&installed) {
        definition.is_installed = true;
        definition.unused = unused.into_iter().flat_map(|old| old.unused.into_iter().chain([old.closure])).collect();
    }
    DEFINED_FUNCTIONS_VERSION.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// Drops the closures that Lisp does not call after the definition of function `number`: the closures of
/// [`DefinedFunction::unused`], or the function's own closure if Lisp has not installed the function.
fn drop_unused_closures(number: u64) {
    let unused = {
        let mut all = DEFINED_FUNCTIONS.write();
        match all.get_mut(&number) {
            Some(definition) if definition.is_installed => (std::mem::take(&mut definition.unused), None),
            _ => (Vec::new(), all.remove(&number)),
        }
    };
    DEFINED_FUNCTIONS_VERSION.fetch_add(1, Ordering::AcqRel);
    // The closures are dropped after the lock is released: a destructor may define or call other functions.
    drop(unused);
}

fn derive_lambda_list(parameters: &[Parameter]) -> String {
    let required = required_count(parameters);
    let mut text = String::from("(");
    for (index, _) in parameters.iter().enumerate() {
        if index == required {
            text.push_str("&optional ");
        }
        text.push_str(&format!("argument-{} ", index + 1));
    }
    text.trim_end().to_owned() + ")"
}

/// Returns the name of a host function, for messages.
pub(super) fn function_name(function: u64) -> String {
    if function >= FIRST_LOCAL_NUMBER {
        return "a local function".to_owned();
    }
    // In a child that the function has forked, a missing thread may hold the lock of the defined functions.
    let closure = if process::is_forked() { None } else { find_closure(function) };
    closure.map_or_else(|| "the program".to_owned(), |closure| closure.name.clone())
}

fn find_closure(function: u64) -> Option<Arc<HostClosure>> {
    DEFINITION_CACHE.with_borrow_mut(|cache| {
        if cache.version != DEFINED_FUNCTIONS_VERSION.load(Ordering::Acquire) {
            cache.refresh();
        }
        // Lisp publishes a function's number without a lock, so a thread may see the number before the new version. The
        // lock that `refresh` takes orders the second search after the definition.
        cache.find(function).or_else(|| {
            cache.refresh();
            cache.find(function)
        })
    })
}

/// Runs the host function that Lisp called by the number `function`. `message` has the arguments; `writer` gets the
/// values.
pub(super) fn call(cx: &Cx, function: u64, message: &[u64], writer: &mut Writer<'_>) -> Result<(), HostFailure> {
    let mut reader = Reader::new(cx, message);
    let result = if function >= FIRST_LOCAL_NUMBER {
        match LOCAL_CLOSURES.with_borrow(|local| local.get(&function).cloned()) {
            Some(local) => local(&mut reader, writer),
            None => Err("the local function belongs to another thread or was dropped".into()),
        }
    } else {
        match find_closure(function) {
            Some(closure) => (closure.body)(&mut reader, writer),
            None => return Err(HostFailure::Missing),
        }
    };
    if cx.context().is_unwinding() {
        return Err(HostFailure::Unwinding);
    }
    result.map_err(|error| HostFailure::from_error(function_name(function), error))
}

/// A Lisp function, made by [`Cx::local_function`], that runs a Rust closure. Only the thread that made the function
/// can call the function.
///
/// Dropping a `LocalFunction` drops the closure. From then on, calls of the Lisp function fail.
#[derive(Debug)]
pub struct LocalFunction<'cx> {
    function: Function,
    number: u64,
    thread: PhantomData<(&'cx Cx, *mut ())>,
}

impl LocalFunction<'_> {
    pub(super) fn new<Arguments, F: HostFunction<Arguments>>(cx: &Cx, function: F) -> Result<Self, Error> {
        let number = NEXT_LOCAL_NUMBER.fetch_add(1, Ordering::Relaxed);
        let parameters = F::parameters();
        let shapes: Vec<u16> = parameters.iter().map(|parameter| parameter.shape.code()).collect();
        let function = PanicSafeDrop::new(function);
        let function_object =
            cx.call_entry_with(Entry::LocalFunction, &(number, required_count(&parameters), &shapes))?;
        LOCAL_CLOSURES.with_borrow_mut(|local| {
            local.insert(number, Rc::new(move |reader, writer| function.invoke(reader, writer)));
        });
        Ok(Self { function: Function::from_value(function_object), number, thread: PhantomData })
    }
}

impl Drop for LocalFunction<'_> {
    fn drop(&mut self) {
        // The closure is dropped after the borrow has ended: its destructor may use other local functions.
        let closure = LOCAL_CLOSURES.with_borrow_mut(|local| local.remove(&self.number));
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

/// Returns the number of leading parameters that a call must supply.
fn required_count(parameters: &[Parameter]) -> usize {
    parameters.iter().rposition(|parameter| !parameter.optional).map_or(0, |last| last + 1)
}

impl ConversionError {
    pub(super) fn with_argument_place(self, number: usize) -> Self {
        self.with_outer_place(|| format!("argument {number}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::process::tests::holds_in_forked_child;

    #[test]
    fn forked_child_does_not_wait_for_a_thread_that_was_defining_a_function() {
        let defining = DEFINED_FUNCTIONS.write();
        let is_refused = holds_in_forked_child(|| {
            matches!(define(&Options::none(), "host:one", None, "Return 1.", || 1_i64), Err(Error::Forked))
        });
        let is_named = holds_in_forked_child(|| function_name(FIRST_FUNCTION_NUMBER) == "the program");
        drop(defining);
        assert!(is_refused && is_named, "{is_refused} {is_named}");
    }
}
