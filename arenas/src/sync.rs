//! The primitives under the protocols. Uses `os` for sleeping, and for the one barrier that is a system call.
//!
//! A protocol (the arena's word, the list of blocks that others freed) is written once, generic over [`Atomic64`]: the
//! program runs it on the standard library's atomics, the models run the same code on loom's. So no `cfg` tells them apart.

mod lock;
mod once;
mod shared;

use core::sync::atomic::{AtomicU64, Ordering};
pub use lock::{Lock, LockGuard};
pub(crate) use once::Once;
pub(crate) use shared::{ReadGuard, SharedLock, WriteGuard};

/// A number of this thread's, which no other has while it lives; not 0.
pub(crate) fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| core::ptr::from_ref(here).addr())
}

/// The operations that the protocols use of a 64-bit atomic word.
pub trait Atomic64 {
    /// Reads the word.
    fn load(&self, order: Ordering) -> u64;
    /// Writes the word.
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `old` by `new`, or returns what is there. May fail for no reason.
    ///
    /// # Errors
    ///
    /// The value found, when it is not `old`, and now and then when it is.
    fn compare_exchange_weak(&self, old: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;
    /// Adds, wrapping, and returns what was there.
    fn fetch_add(&self, more: u64, order: Ordering) -> u64;
    /// Subtracts, wrapping, and returns what was there.
    fn fetch_sub(&self, less: u64, order: Ordering) -> u64;
}

macro_rules! atomic64 {
    ($type:ty) => {
        impl $crate::sync::Atomic64 for $type {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                <$type>::load(self, order)
            }
            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                <$type>::store(self, value, order);
            }
            #[inline]
            fn compare_exchange_weak(&self, old: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64> {
                <$type>::compare_exchange_weak(self, old, new, yes, no)
            }
            #[inline]
            fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
                <$type>::fetch_add(self, more, order)
            }
            #[inline]
            fn fetch_sub(&self, less: u64, order: Ordering) -> u64 {
                <$type>::fetch_sub(self, less, order)
            }
        }
    };
}

atomic64!(AtomicU64);
#[cfg(test)]
atomic64!(loom::sync::atomic::AtomicU64);

/// Barriers of two weights: one that costs nothing on a path that runs always, and one that pays for both on a path that runs
/// seldom. A store before the one and a load after it are ordered against a store and a load around the other.
pub mod asymmetric {
    use crate::os;
    use core::sync::atomic::{Ordering, compiler_fence, fence};
    use std::sync::OnceLock;

    /// Whether the pair works here; where it does not (seccomp, kernels before 4.14), neither may be relied on.
    #[must_use]
    pub fn is_available() -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(os::register_heavy_barrier)
    }

    /// Sees to it that [`is_available`] is known, so that nobody is about to find out.
    pub fn settle() {
        let _ = is_available();
    }

    /// The light one: keeps the compiler from moving memory accesses across.
    #[inline(always)]
    pub fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    /// The light one, or a full fence where the pair does not work: for paths that may cost a little, opposite a [`heavy`] one
    /// or a fence.
    #[inline]
    pub fn light_or_fence() {
        if is_available() {
            light();
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// The heavy one, `membarrier(PRIVATE_EXPEDITED)`. Whether it was done.
    #[must_use]
    pub fn heavy() -> bool {
        is_available() && os::heavy_barrier()
    }
}
