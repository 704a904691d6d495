//! Panics of code that is the program's. What it panics with is any object, whose destructor may panic in turn.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the result of `work`, or `None` when it panics.
pub(crate) fn caught<R>(work: impl FnOnce() -> R) -> Option<R> {
    caught_as(work, |_| ()).ok()
}

/// Returns the result of `work`, or, when it panics, what `describe` makes of the text of the panic, if that has one.
pub(crate) fn caught_as<R, E>(work: impl FnOnce() -> R, describe: impl FnOnce(Option<&str>) -> E) -> Result<R, E> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref().map(String::as_str));
        let error = describe(text);
        discard(panic);
        error
    })
}

/// Drops what may panic when it is dropped.
pub(crate) fn discard<T>(object: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(object))) {
        // Its own destructor may panic as well, and so on: leaked, it ends here.
        std::mem::forget(panic);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    /// Panics when it is dropped, with another one until the number is 0.
    struct Bomb(u32);

    impl Drop for Bomb {
        fn drop(&mut self) {
            if self.0 > 0 {
                panic_any(Bomb(self.0 - 1));
            }
        }
    }

    #[test]
    fn a_payload_whose_destructor_panics_ends_where_it_is_caught() {
        for depth in 0..4 {
            assert!(caught(|| panic_any(Bomb(depth))).is_none());
            discard(Bomb(depth));
            assert_eq!(caught_as(|| panic_any(Bomb(depth)), |text| text.map(str::to_owned)), Err::<(), _>(None));
        }
        assert_eq!(caught(|| 7), Some(7));
        assert_eq!(
            caught_as(|| panic!("{}", "a text"), |text| text.map(str::to_owned)),
            Err::<(), _>(Some("a text".into()))
        );
    }
}
