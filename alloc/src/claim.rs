//! How a thread uses its cache without a lock, and how another takes it away for a moment. Uses nothing below it.
//!
//! A [`Claim`] is thread-local: which cache the thread may use, and whether it is using it now. The owner's fast operations
//!
//! ```text
//! owner      busy = true;  light barrier;  read current;  use that cache;  busy = false
//! revoker    current: the cache -> one that has nothing;  heavy barrier;  read busy;  if not busy, the cache is the revoker's
//! ```
//!
//! are plain loads and stores. The light barrier only keeps the compiler from moving them; the heavy one
//! (`membarrier(PRIVATE_EXPEDITED)`) is a full barrier on every processor that runs a thread of this process. So either the
//! revoker sees `busy`, or the owner reads `current` after the revoker wrote it: never both miss the other.
//!
//! Everything that is not fast (it waits, locks, or calls the system) is done with the cache's gate locked, and not busy.
//! Whoever holds the gate and finds the cache's thread not busy after having revoked has the cache to himself; the thread gets
//! it back by locking the gate, or from the revoker.

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// The atomics of a claim; what the model swaps.
pub(crate) trait Place<T> {
    /// Reads it.
    fn read(&self, order: Ordering) -> T;
    /// Writes it.
    fn write(&self, value: T, order: Ordering);
    /// Replaces `old` by `new`, if it is `old`.
    fn replace(&self, old: T, new: T) -> bool;
}

macro_rules! place {
    ($atomic:ty, $value:ty $(, $parameter:ident)?) => {
        impl$(<$parameter>)? Place<$value> for $atomic {
            #[inline(always)]
            fn read(&self, order: Ordering) -> $value {
                self.load(order)
            }
            #[inline(always)]
            fn write(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }
            fn replace(&self, old: $value, new: $value) -> bool {
                self.compare_exchange(old, new, AcqRel, Relaxed).is_ok()
            }
        }
    };
}

place!(AtomicPtr<T>, *mut T, T);
place!(AtomicBool, bool);
#[cfg(test)]
place!(loom::sync::atomic::AtomicPtr<T>, *mut T, T);
#[cfg(test)]
place!(loom::sync::atomic::AtomicBool, bool);

/// See the module. Generic so that the model runs the same code.
#[derive(Debug)]
pub(crate) struct Claim<C, P, B> {
    current: P,
    busy: B,
    cache: core::marker::PhantomData<C>,
}

/// A claim as threads have it.
pub(crate) type ThreadClaim<C> = Claim<C, AtomicPtr<C>, AtomicBool>;

impl<C> ThreadClaim<C> {
    /// A claim on a cache.
    pub(crate) const fn new(cache: NonNull<C>) -> Self {
        let current = AtomicPtr::new(cache.as_ptr());
        Claim { current, busy: AtomicBool::new(false), cache: core::marker::PhantomData }
    }
}

impl<C, P: Place<*mut C>, B: Place<bool>> Claim<C, P, B> {
    /// The owner begins a fast operation: the cache to use until [`leave`](Self::leave).
    #[inline(always)]
    pub(crate) fn enter(&self, light: impl FnOnce()) -> *mut C {
        self.busy.write(true, Relaxed);
        light();
        // Acquire: with the release of a revoker who gives the cache back. (The model fails without it.)
        self.current.read(Acquire)
    }

    /// The owner ends it.
    #[inline(always)]
    pub(crate) fn leave(&self) {
        // Release: a revoker that reads this finds what was done.
        self.busy.write(false, Release);
    }

    /// Which cache the thread may use now, for the thread itself.
    #[inline(always)]
    pub(crate) fn current(&self) -> *mut C {
        self.current.read(Relaxed)
    }

    /// The thread chooses: a cache whose gate it holds, or one that has nothing.
    pub(crate) fn set(&self, cache: *mut C) {
        self.current.write(cache, Relaxed);
    }

    /// Another thread, which holds the gate of `cache`, takes it away. If the thread may not use it now anyhow, that stays.
    /// Followed by a heavy barrier, before [`is_busy`](Self::is_busy) is asked.
    pub(crate) fn revoke(&self, cache: *mut C, nothing: *mut C) {
        self.current.replace(cache, nothing);
    }

    /// Another thread, which holds the gate of `cache`, gives it back, if the thread has not taken it back itself.
    pub(crate) fn restore(&self, cache: *mut C, nothing: *mut C) {
        self.current.replace(nothing, cache);
    }

    /// Whether the thread is in a fast operation.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.read(Acquire)
    }
}

/// The model. loom knows no membarrier, so both barriers are fences here; that the real pair is as strong rests on
/// membarrier(2): "all running threads … pass through a state where all memory accesses to user-space addresses match program
/// order".
#[cfg(test)]
mod model {
    use super::*;
    use core::sync::atomic::Ordering::SeqCst;
    use loom::cell::Cell;
    use loom::sync::atomic::fence;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// A cache: a count that each operation raises, in a cell that reports two who touch it at once.
    struct Model {
        claim: Claim<u8, loom::sync::atomic::AtomicPtr<u8>, loom::sync::atomic::AtomicBool>,
        count: Cell<u32>,
        gate: Mutex<bool>,
    }

    const CACHE: *mut u8 = core::ptr::without_provenance_mut(8);
    const NOTHING: *mut u8 = core::ptr::without_provenance_mut(16);

    impl Model {
        fn raise(&self) {
            self.count.set(self.count.get() + 1);
        }

        /// An operation of the owner: fast, or with the gate where it is refused.
        fn operate(&self) {
            let current = self.claim.enter(|| fence(SeqCst));
            if current == CACHE {
                self.raise();
            }
            self.claim.leave();
            if current != CACHE {
                let mut asked = self.gate.lock().unwrap();
                *asked = false;
                self.claim.set(CACHE);
                self.raise();
            }
        }

        /// A revocation; whether the cache was the revoker's.
        fn revoke(&self) -> bool {
            {
                let mut asked = self.gate.lock().unwrap();
                *asked = true;
                self.claim.revoke(CACHE, NOTHING);
            }
            fence(SeqCst);
            let mut asked = self.gate.lock().unwrap();
            let mine = core::mem::take(&mut *asked) && !self.claim.is_busy();
            if mine {
                self.raise();
            }
            self.claim.restore(CACHE, NOTHING);
            mine
        }
    }

    #[test]
    fn owner_and_revoker_never_use_a_cache_at_once() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(|| {
            let claim = Claim {
                current: loom::sync::atomic::AtomicPtr::new(CACHE),
                busy: loom::sync::atomic::AtomicBool::new(false),
                cache: core::marker::PhantomData,
            };
            let model = Arc::new(Model { claim, count: Cell::new(0), gate: Mutex::new(false) });
            let owner = thread::spawn({
                let model = model.clone();
                move || {
                    model.operate();
                    model.operate();
                }
            });
            let taken = model.revoke();
            owner.join().unwrap();
            assert_eq!(model.count.get(), 2 + u32::from(taken));
            assert_eq!(model.claim.current(), CACHE);
        });
    }
}
