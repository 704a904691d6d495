//! Catches panics in the embedding program's code. The payload of a panic can be any object, even an object whose
//! destructor panics.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Returns the result of `work`, or `None` when it panics.
pub(crate) fn catch<R>(work: impl FnOnce() -> R) -> Option<R> {
    catch_as(work, |_| ()).ok()
}

/// Returns the result of `work`. If `work` panics, returns the error that `describe` returns. `describe` receives the
/// panic's text, or `None` if the payload is not text.
pub(crate) fn catch_as<R, E>(work: impl FnOnce() -> R, describe: impl FnOnce(Option<&str>) -> E) -> Result<R, E> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref().map(String::as_str));
        let error = describe(text);
        discard(panic);
        error
    })
}

/// Drops an object whose destructor may panic. A panic is ignored.
pub(crate) fn discard<T>(object: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(object))) {
        // The payload is leaked: its destructor may panic too, with a payload whose destructor panics, and so on.
        std::mem::forget(panic);
    }
}

/// Calls all functions, even when some of them panic. Then resumes the first panic, if any.
pub(crate) fn call_all(functions: impl IntoIterator<Item = Box<dyn FnOnce() + Send>>) {
    let mut panics = functions.into_iter().filter_map(|function| catch_unwind(AssertUnwindSafe(function)).err());
    let first = panics.next();
    panics.for_each(discard);
    if let Some(panic) = first {
        resume_unwind(panic);
    }
}

/// A value of the embedding program that our code may drop. A panic in the value's destructor is caught, because it would
/// end the process while another panic unwinds.
pub(crate) struct PanicSafeDrop<T>(Option<T>);

impl<T> PanicSafeDrop<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Returns the value. A panic in the value's destructor is no longer caught.
    pub(crate) fn into_inner(mut self) -> T {
        self.0.take().expect("the value is present until the drop")
    }
}

impl<T> Deref for PanicSafeDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("the value is present until the drop")
    }
}

impl<T> Drop for PanicSafeDrop<T> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            discard(self.0.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// An object that panics when it is dropped. The payload is a `Bomb` with the next lower number. A `Bomb` with number 0
    /// does not panic.
    struct Bomb(u32);

    impl Drop for Bomb {
        fn drop(&mut self) {
            if self.0 > 0 {
                panic_any(Bomb(self.0 - 1));
            }
        }
    }

    #[test]
    fn call_all_calls_every_function_even_when_one_panics() {
        static CALLED: AtomicU32 = AtomicU32::new(0);
        let functions = (0..3).map(|number| -> Box<dyn FnOnce() + Send> {
            Box::new(move || {
                CALLED.fetch_add(1, Ordering::Relaxed);
                panic!("{number}")
            })
        });
        let text = catch_as(|| call_all(functions), |text| text.map(str::to_owned));
        assert_eq!((text, CALLED.load(Ordering::Relaxed)), (Err(Some("0".to_owned())), 3));
        assert_eq!(catch(|| call_all([])), Some(()));
    }

    #[test]
    fn panic_safe_drop_catches_a_destructor_panic_during_unwinding() {
        let panicked = catch(|| {
            let contained = PanicSafeDrop::new(Bomb(3));
            assert_eq!(contained.0.as_ref().map(|bomb| bomb.0), Some(3));
            panic_any("on purpose")
        });
        assert!(panicked.is_none());
        assert_eq!(*PanicSafeDrop::new(7), 7);
        assert_eq!(PanicSafeDrop::new(7).into_inner(), 7);
    }

    #[test]
    fn a_panic_payload_whose_destructor_panics_is_caught() {
        for depth in 0..4 {
            assert!(catch(|| panic_any(Bomb(depth))).is_none());
            discard(Bomb(depth));
            assert_eq!(catch_as(|| panic_any(Bomb(depth)), |text| text.map(str::to_owned)), Err::<(), _>(None));
        }
        assert_eq!(catch(|| 7), Some(7));
        assert_eq!(
            catch_as(|| panic!("{}", "a text"), |text| text.map(str::to_owned)),
            Err::<(), _>(Some("a text".into()))
        );
    }
}
