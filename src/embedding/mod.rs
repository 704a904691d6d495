//! The embedding API: Lisp's values, functions and conditions in Rust, and Rust's functions in Lisp.

#[cfg(feature = "num-bigint")]
mod bigint;
mod convert;
mod define;
mod enter;
mod error;
mod function;
mod future;
mod handle;
mod options;
mod output;
mod pool;
mod rounding;
mod save;
mod serde;
mod value;

pub use self::serde::Serde;
pub use convert::{
    Arguments, Complex, ConversionError, FromLisp, IntoLisp, Ratio, Reader, Shape, Symbol, Writer, keyword,
};
pub use define::{HostFunction, HostResult, LocalFunction, Values};
pub use enter::Cx;
pub use error::{Condition, Error, Frame, RestartOffer};
pub use function::Function;
pub use future::Call;
pub use handle::{Builder, InterruptHandle, Lisp};
pub use options::Restart;
pub use value::Value;
