//! A value that is made at its first use, by one thread. Uses `lock` and the standard library's `OnceLock`.
//!
//! Beside the `OnceLock` there is a lock around the making, which can be held over a fork: so no child finds a value half
//! made, by a thread that it does not have, and waits for it for ever.

use super::Lock;
use std::sync::OnceLock;

/// See the module.
#[derive(Debug)]
pub(crate) struct Once<T> {
    value: OnceLock<T>,
    pub(crate) making: Lock<()>,
}

impl<T> Once<T> {
    /// Not made yet.
    pub(crate) const fn new() -> Once<T> {
        Once { value: OnceLock::new(), making: Lock::new(()) }
    }

    /// The value, if it is made.
    #[inline]
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value; made now if it is not. `make` does not come here again.
    #[inline]
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        match self.value.get() {
            Some(value) => value,
            None => self.make(make),
        }
    }

    #[cold]
    fn make(&self, make: impl FnOnce() -> T) -> &T {
        let _making = self.making.lock();
        self.value.get_or_init(make)
    }
}
