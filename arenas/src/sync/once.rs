//! A value that is made at its first use, by one thread. Uses `lock` and the standard library's `OnceLock`. If it cannot be made, the
//! next use tries again: whatever was missing may be there then.
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
    pub(crate) fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        match self.value.get() {
            Some(value) => Ok(value),
            None => self.make(make),
        }
    }

    #[cold]
    fn make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let _making = self.making.lock();
        match self.value.get() {
            Some(value) => Ok(value),
            None => make().map(|value| self.value.get_or_init(|| value)),
        }
    }
}
