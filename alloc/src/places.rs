//! Which caches of heaps that programs make are lent to this thread. Uses `loan`, `thread` and `heap`.
//!
//! A thread has a few places, and a heap may use one of them, by its tag. A place names a cache that was lent to the thread for
//! its heap, or was once: whether it is now, and of which heap it is, stands in the cache, so a place needs no care when a heap
//! ends or a drain pass comes. A thread asks its heap for a cache when it first takes something. Where two heaps want one
//! place, the second is served from its shards, unless it goes on asking: then the first one's cache goes back to its heap,
//! and waits there, whole, for the next thread.
//!
//! Who frees a block needs no place: the block leads to its slab, and that to its cache.
//!
//! No cache is lent to a thread that is inside the arenas or at its end, or where the kernel has no barrier to take it away
//! (`membarrier`): shards serve them.

use crate::cache::Cache;
use crate::heap::Core;
use crate::loan::Use;
use crate::slab::Slab;
use crate::thread::{self, Slot};
use core::cell::Cell;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::sync::{LockGuard, asymmetric};

/// How many heaps a thread can use at once without a lock. 8 bytes each in every thread.
const PLACES: usize = 8;
/// How often a place is wanted by others before it changes hands, which takes two locks and more.
const PATIENCE: u8 = 16;

/// What a thread has of heaps that programs make.
pub(crate) struct Places {
    using: Use<Cache>,
    caches: [Cell<NonNull<Cache>>; PLACES],
    /// How often a place was wanted and not to be had.
    wanted: Cell<u8>,
}

impl Places {
    /// Without caches.
    pub(crate) const fn new() -> Places {
        let caches = [const { Cell::new(thread::nobody()) }; PLACES];
        Places { using: Use::new(), caches, wanted: Cell::new(0) }
    }
}

fn pointer<T>(of: &T) -> *mut T {
    ptr::from_ref(of).cast_mut()
}

fn place(slot: &Slot, tag: u32) -> &Cell<NonNull<Cache>> {
    // The remainder is in bounds.
    &slot.places.caches[tag as usize % PLACES]
}

/// The cache that a place names.
fn cache_at(place: &Cell<NonNull<Cache>>) -> &'static Cache {
    // SAFETY: statics, and caches, live for ever. What the reference is used for is the loan's business.
    unsafe { place.get().as_ref() }
}

#[inline(always)]
fn use_briefly<R>(slot: &Slot, cache: &Cache, operation: impl FnOnce() -> R) -> Option<R> {
    slot.places.using.briefly((pointer(cache), &cache.loan), pointer(slot), asymmetric::light, operation)
}

/// A fast operation with this thread's cache of the heap with this tag, if it has one: no lock, no call of the system, no wait.
#[inline(always)]
pub(crate) fn briefly<R>(tag: u32, operation: impl FnOnce(&Cache) -> Option<R>) -> Option<R> {
    thread::with_slot(|slot| {
        let cache = cache_at(place(slot, tag));
        use_briefly(slot, cache, || if cache.tag() == tag { operation(cache) } else { None })?
    })
}

/// What is left to do after a block was freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// Nothing.
    Nothing,
    /// The cache was taken away meanwhile: its heap may be ending.
    IsItEnding,
    /// To see to the books of the slab, and that.
    Books,
}

/// Frees a block of a slab of that cache, if the cache is lent to this thread: a fast operation.
///
/// # Safety
///
/// `block` is a block of `slab`, of a heap that a program made, and the caller's; `cache` is the slab's owner.
#[inline(always)]
pub(crate) unsafe fn push(cache: &'static Cache, slab: &'static Slab, block: NonNull<u8>) -> Option<Left> {
    thread::with_slot(|slot| {
        // SAFETY: the block is the caller's; the slab is this cache's, which is the thread's now.
        let books = use_briefly(slot, cache, || unsafe { slab.push_any(block) })?;
        Some(if books { Left::Books } else { left(slot, cache) })
    })
}

/// Keeps a large block of the heap with this tag as a spare span, if this thread has a cache of it in which there is a place:
/// a fast operation.
#[inline(always)]
pub(crate) fn push_spare(tag: u32, address: usize, slices: usize) -> Option<Left> {
    thread::with_slot(|slot| {
        let cache = cache_at(place(slot, tag));
        let kept = use_briefly(slot, cache, || cache.tag() == tag && cache.push_spare(address, slices))?;
        kept.then(|| left(slot, cache))
    })
}

/// After something was freed into a cache that was lent to this thread.
#[inline(always)]
fn left(slot: &Slot, cache: &Cache) -> Left {
    asymmetric::light();
    if cache.loan.is_to(pointer(slot)) { Left::Nothing } else { Left::IsItEnding }
}

/// An operation with this thread's cache of a heap, locked against drain passes. If it has none, it asks for one, or does
/// without, as the caller wants it. `None`: there is none, and a shard has to do it.
///
/// The operation neither opens arenas nor comes here again.
pub(crate) fn with_own<R>(core: &Core, asks: bool, operation: impl FnOnce(&'static Cache) -> R) -> Option<R> {
    thread::with_slot(|slot| {
        if !asymmetric::is_available() || !thread::may_have_caches(slot) {
            return None;
        }
        let place = place(slot, core.tag());
        let mut cache = cache_at(place);
        let is_ours = |cache: &Cache| cache.tag() == core.tag();
        let mut gate = lock_own(slot, cache, is_ours);
        if gate.is_none() && asks {
            cache = adopt(slot, core)?;
            gate = lock_own(slot, cache, is_ours);
        }
        let _gate = gate?;
        core.bell.touch();
        if cache.asked.take() {
            cache.flush(&core.arenas);
        }
        cache.loan.lend(pointer(slot));
        Some(operation(cache))
    })
}

/// As [`with_own`], but only if the thread has a cache already and it is this one.
pub(crate) fn with_own_same(core: &Core, cache: &Cache, operation: impl FnOnce(&'static Cache)) -> bool {
    let is_own = thread::with_slot(|slot| ptr::eq(cache_at(place(slot, core.tag())), cache));
    // Between the two, only this thread could change the place.
    is_own && with_own(core, false, operation).is_some()
}

/// The gate of a cache that a place names, if it is this thread's, and what the caller thinks it is.
fn lock_own<'a>(slot: &Slot, cache: &'a Cache, is_so: impl Fn(&Cache) -> bool) -> Option<LockGuard<'a, ()>> {
    // Mostly spares the lock of a cache that is another's by now.
    if !is_so(cache) {
        return None;
    }
    let gate = cache.gate.lock();
    (cache.is_used_by(slot) && is_so(cache)).then_some(gate)
}

/// Has the heap lend a cache to this thread, if there is a place for it.
#[cold]
fn adopt(slot: &Slot, core: &Core) -> Option<&'static Cache> {
    let place = place(slot, core.tag());
    if is_taken(slot, place) {
        let wanted = slot.places.wanted.get().wrapping_add(1);
        slot.places.wanted.set(wanted);
        if !wanted.is_multiple_of(PATIENCE) {
            return None;
        }
        give_back(slot, place, false);
    }
    if !thread::tells_its_end(slot) {
        return None;
    }
    let raw = thread::inside(|| core.adopt())?.into_raw();
    place.set(raw);
    let cache = cache_at(place);
    cache.set_user(slot);
    Some(cache)
}

/// Whether the cache that a place names is this thread's, by this place.
fn is_taken(slot: &Slot, place: &Cell<NonNull<Cache>>) -> bool {
    lock_own(slot, cache_at(place), |cache| names(slot, place, cache)).is_some()
}

fn names(slot: &Slot, at: &Cell<NonNull<Cache>>, cache: &Cache) -> bool {
    cache.is_lent() && ptr::eq(place(slot, cache.tag()), at)
}

/// Gives the cache that a place names back to its heap, if it is this thread's.
fn give_back(slot: &Slot, place: &Cell<NonNull<Cache>>, flush: bool) {
    let cache = cache_at(place);
    // Under the gate, the heap cannot end; and when it has, the cache is not this thread's any more.
    let Some(gate) = lock_own(slot, cache, |cache| names(slot, place, cache)) else { return };
    place.set(thread::nobody());
    cache.loan.revoke();
    Core::take_back(cache, flush);
    drop(gate);
}

/// At the end of the thread: its caches wait for others.
pub(crate) fn leave(slot: &Slot) {
    slot.places.caches.iter().for_each(|place| give_back(slot, place, true));
}

/// The first half of taking a lent cache from its thread; see [`thread::revoke`].
pub(crate) fn revoke(cache: &Cache) {
    cache.loan.revoke();
}

/// Whether the thread may use the cache now.
pub(crate) fn has(cache: &Cache, slot: &Slot) -> bool {
    cache.loan.is_to(pointer(slot))
}

/// Whether the thread is in a fast operation with the cache.
pub(crate) fn is_using(slot: &Slot, cache: &Cache) -> bool {
    slot.places.using.is_of(pointer(cache))
}

/// Gives the cache back to its thread. The gate is held.
pub(crate) fn restore(cache: &Cache, slot: &Slot) {
    cache.loan.lend(pointer(slot));
}
