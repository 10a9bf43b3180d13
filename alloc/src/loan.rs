//! How a thread uses caches of heaps that programs make, without a lock, and how they are taken away. Uses the atomics of
//! `claim`.
//!
//! A thread has one claim, for its cache of the global heap; of other heaps it may have several caches, and a block that it
//! frees leads to its slab and so to the slab's cache. So here the word that is revoked lies in the cache (a [`Loan`]: to which
//! thread), and in the thread lies which cache it is using now (a [`Use`]):
//!
//! ```text
//! thread     use = the cache;  light barrier;  read loan;  if it is to me, use the cache;  use = none
//! revoker    loan = nobody;  heavy barrier;  read use;  if it is not this cache, the cache is the revoker's
//! ```
//!
//! The barriers are those of `claim`, and so is the reason why the two never both miss the other. That the thread says which
//! cache it uses, and not only that it uses one, lets a revoker wait for nobody who is stopped in another heap's.
//!
//! The end of a heap must be exact: whoever frees its last block, when there is no handle any more, ends it. A thread that
//! freed a block looks at the loan once more after its use:
//!
//! ```text
//! thread     ...  free;  use = none;  light barrier;  read loan;  if it is not to me any more: is the heap ending?
//! who ends   phase = ending;  loan = nobody, for good;  heavy barrier;  read use, look for blocks
//! ```
//!
//! Either it finds the loan gone, then it sees the phase; or what it freed, and that it was done, is seen by who ends the heap.

use crate::claim::Place;
use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// To which thread (a pointer to an `S`) a cache is lent. Generic so that the model runs the same code.
#[derive(Debug)]
pub(crate) struct Loan<S, P = AtomicPtr<S>> {
    to: P,
    thread: PhantomData<*mut S>,
}

impl<S> Loan<S> {
    /// To nobody.
    pub(crate) const fn new() -> Self {
        Loan { to: AtomicPtr::new(ptr::null_mut()), thread: PhantomData }
    }
}

impl<S, P: Place<*mut S>> Loan<S, P> {
    /// Whether the cache is lent to this thread; the thread asks.
    #[inline(always)]
    pub(crate) fn is_to(&self, thread: *mut S) -> bool {
        // Acquire: with the release of a revoker who gives the cache back, and of who ends the heap.
        self.to.read(Acquire) == thread
    }

    /// Lends it to a thread. The cache's gate is held.
    pub(crate) fn lend(&self, thread: *mut S) {
        self.to.write(thread, Release);
    }

    /// Takes it away. The cache's gate is held. Followed by a heavy barrier, before [`Use::is_of`] is asked.
    pub(crate) fn revoke(&self) {
        self.to.write(ptr::null_mut(), Release);
    }
}

/// Which lent cache (a pointer to a `C`) a thread uses now.
#[derive(Debug)]
pub(crate) struct Use<C, P = AtomicPtr<C>> {
    of: P,
    cache: PhantomData<*mut C>,
}

impl<C> Use<C> {
    /// None.
    pub(crate) const fn new() -> Self {
        Use { of: AtomicPtr::new(ptr::null_mut()), cache: PhantomData }
    }
}

impl<C, P: Place<*mut C>> Use<C, P> {
    /// A fast operation of this thread, if the cache is lent to it.
    #[inline(always)]
    pub(crate) fn briefly<S, L: Place<*mut S>, R>(
        &self,
        (cache, loan): (*mut C, &Loan<S, L>),
        thread: *mut S,
        light: impl FnOnce(),
        operation: impl FnOnce() -> R,
    ) -> Option<R> {
        self.of.write(cache, Relaxed);
        light();
        let result = if loan.is_to(thread) { Some(operation()) } else { None };
        // Release: a revoker that reads this finds what was done.
        self.of.write(ptr::null_mut(), Release);
        result
    }

    /// Whether the thread uses that cache now.
    pub(crate) fn is_of(&self, cache: *mut C) -> bool {
        self.of.read(Acquire) == cache
    }
}

/// The models; as in `claim`, both barriers are fences here.
#[cfg(test)]
mod models {
    use super::*;
    use crate::model::Loom;
    use crate::phase::Phase;
    use core::sync::atomic::Ordering::SeqCst;
    use loom::cell::Cell;
    use loom::sync::atomic::{AtomicBool, AtomicPtr, fence};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    const CACHE: *mut u8 = ptr::without_provenance_mut(8);
    const OTHER: *mut u8 = ptr::without_provenance_mut(16);
    const THREAD: *mut u16 = ptr::without_provenance_mut(32);

    /// A heap with one cache, lent to one thread; the cache has a span, and `blocks` of it are out.
    struct Heap {
        phase: Phase<Loom>,
        loan: Loan<u16, AtomicPtr<u16>>,
        using: Use<u8, AtomicPtr<u8>>,
        /// Reports two who touch it at once.
        blocks: Cell<u32>,
        /// Whether a pass has asked for the cache.
        gate: Mutex<bool>,
        has_span: AtomicBool,
        ended: AtomicBool,
    }

    impl Heap {
        fn new(blocks: u32) -> Arc<Heap> {
            Arc::new(Heap {
                phase: Phase::of_open_heap(Loom::new),
                loan: Loan { to: AtomicPtr::new(THREAD), thread: PhantomData },
                using: Use { of: AtomicPtr::new(ptr::null_mut()), cache: PhantomData },
                blocks: Cell::new(blocks),
                gate: Mutex::new(false),
                has_span: AtomicBool::new(true),
                ended: AtomicBool::new(false),
            })
        }

        fn free_one(&self) {
            self.blocks.set(self.blocks.get() - 1);
        }

        fn flush(&self) {
            if self.blocks.get() == 0 {
                self.has_span.store(false, Release);
            }
        }

        /// The thread frees a block.
        fn free(&self) {
            let light = || fence(SeqCst);
            match self.using.briefly((CACHE, &self.loan), THREAD, light, || self.free_one()) {
                Some(()) => {
                    light();
                    if self.loan.is_to(THREAD) {
                        return;
                    }
                }
                None => {
                    let mut asked = self.gate.lock().unwrap();
                    if core::mem::take(&mut *asked) {
                        self.flush();
                    }
                    self.loan.lend(THREAD);
                    self.free_one();
                }
            }
            light();
            if self.phase.is_ending() {
                self.end_if_empty();
            }
        }

        fn pass(&self) {
            {
                let mut asked = self.gate.lock().unwrap();
                *asked = true;
                self.loan.revoke();
            }
            fence(SeqCst);
            let mut asked = self.gate.lock().unwrap();
            if core::mem::take(&mut *asked) {
                if !self.using.is_of(CACHE) {
                    self.flush();
                }
                if !self.phase.is_ending() {
                    self.loan.lend(THREAD);
                }
            }
        }

        fn end_if_empty(&self) {
            if !self.phase.begin_drain() {
                return;
            }
            loop {
                self.pass();
                if !self.has_span.load(Acquire) {
                    break;
                }
                if self.phase.end_drain() {
                    return;
                }
            }
            self.phase.end();
            assert!(!self.ended.swap(true, SeqCst), "ended twice");
        }
    }

    fn check(script: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(script);
    }

    #[test]
    fn thread_and_revoker_never_use_a_lent_cache_at_once() {
        check(|| {
            let heap = Heap::new(2);
            let thread = thread::spawn({
                let heap = heap.clone();
                move || {
                    heap.free();
                    heap.free();
                }
            });
            heap.pass();
            thread.join().unwrap();
            assert!(heap.loan.is_to(THREAD) && heap.blocks.get() == 0);
        });
    }

    #[test]
    fn a_heap_ends_when_its_last_block_is_freed_in_a_lent_cache() {
        check(|| {
            let heap = Heap::new(1);
            let thread = thread::spawn({
                let heap = heap.clone();
                move || {
                    heap.free();
                    // It goes on with the cache of another heap.
                    heap.using.of.write(OTHER, Relaxed);
                }
            });
            heap.phase.begin_end();
            fence(SeqCst);
            heap.end_if_empty();
            thread.join().unwrap();
            assert!(heap.ended.load(Acquire), "the heap has not ended");
        });
    }

    #[test]
    fn a_heap_ends_that_was_trimmed_just_before() {
        check(|| {
            let heap = Heap::new(1);
            let thread = thread::spawn({
                let heap = heap.clone();
                move || heap.free()
            });
            heap.pass();
            heap.phase.begin_end();
            fence(SeqCst);
            heap.end_if_empty();
            thread.join().unwrap();
            assert!(heap.ended.load(Acquire), "the heap has not ended");
        });
    }
}
