//! Which cache is mine: the thread-local part. Uses `claim`, `caches` and the global core.
//!
//! The thread's claim names one cache, read with one instruction in a program. It is
//!
//! - [`NONE`], before the thread's first allocation;
//! - [`ENDED`], after its end;
//! - [`INSIDE`], while the thread is inside the arenas, where devices may be called: it must not meet its own half-done work
//!   again, so what it allocates there comes from the internal heap, whose arenas are never registered;
//! - [`REVOKED`], while a drain pass has the thread's cache; and always, where the kernel has no barrier for that (`membarrier`):
//!   then every operation locks the cache's gate;
//! - else the thread's cache.
//!
//! The first four are caches that have nothing and own nothing, so the fast path needs no check: it finds no block and goes
//! the slow way ([`with_own`]), which locks the gate. The claim has no destructor, so it can be read as late as in the
//! destructors of other thread-locals. The thread's end is told by a pthread key, whose destructors run after those of
//! `thread_local!`. What a thread allocates still later comes from the global heap's shards: were it to take a cache again, it
//! would be told again only if there is another round of destructors, and there are but four.

use crate::cache::Cache;
use crate::caches::Owned;
use crate::claim::ThreadClaim;
use crate::global::GLOBAL;
use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::sync::asymmetric;
use std::sync::OnceLock;

/// A cache without anything, shared by all threads.
struct Empty(Cache);

// SAFETY: it owns no slab and no span, so every operation on it that does not fail at once is refused before it writes: `pop`
// finds `NO_SLAB`, which is never written, `pop_spare` finds no span; whatever else there is looks at the id first, and does
// not use it.
unsafe impl Sync for Empty {}

static NONE: Empty = Empty(Cache::new(0));
static ENDED: Empty = Empty(Cache::new(0));
static INSIDE: Empty = Empty(Cache::new(0));
static REVOKED: Empty = Empty(Cache::new(0));

/// What a thread has, and a drain pass looks at from outside.
pub(crate) struct Slot {
    claim: ThreadClaim<Cache>,
    /// The thread's cache, whatever the claim says now. Only the thread reads it.
    own: Cell<Option<&'static Cache>>,
}

thread_local! {
    static SLOT: Slot = const { Slot { claim: ThreadClaim::new(NonNull::from_ref(&NONE.0)), own: Cell::new(None) } };
}

fn place(cache: &Cache) -> *mut Cache {
    ptr::from_ref(cache).cast_mut()
}

/// A fast operation with the thread's cache, or one that has nothing: no lock, no call of the system, no wait.
#[inline(always)]
pub(crate) fn briefly<R>(operation: impl FnOnce(&Cache) -> R) -> R {
    SLOT.with(|slot| {
        let cache = slot.claim.enter(asymmetric::light);
        // SAFETY: statics, and caches, live for ever. That nobody else uses the cache until `leave` is the claim's promise.
        let result = operation(unsafe { &*cache });
        slot.claim.leave();
        result
    })
}

/// Whether the thread is inside the arenas.
pub(crate) fn is_inside() -> bool {
    SLOT.with(|slot| ptr::eq(slot.claim.current(), &INSIDE.0))
}

/// An operation with the thread's cache, locked against drain passes; takes a cache if the thread has none yet. `None`: the
/// thread is inside the arenas, or at its end, or there is no memory, or no way to learn of the end.
///
/// The operation neither opens arenas nor comes here again.
pub(crate) fn with_own<R>(operation: impl FnOnce(&'static Cache) -> R) -> Option<R> {
    SLOT.with(|slot| {
        let current = slot.claim.current();
        if ptr::eq(current, &INSIDE.0) {
            return None;
        }
        let own = slot.own.get();
        let cache = if own.is_some() { own } else { adopt(slot) }?;
        let _gate = cache.gate.lock();
        take_back(slot, cache);
        Some(operation(cache))
    })
}

/// Like [`with_own`], but only if the thread has a cache already and it is the one of that name.
pub(crate) fn with_own_named(name: usize, operation: impl FnOnce(&'static Cache)) -> bool {
    let own = SLOT.with(|slot| slot.own.get());
    own.is_some_and(|cache| cache.name() == name) && with_own(operation).is_some()
}

/// Makes the cache whose gate is held the thread's current one again; does what a drain pass has asked for meanwhile.
fn take_back(slot: &Slot, cache: &'static Cache) {
    GLOBAL.bell.touch();
    if cache.asked.take() {
        cache.flush(&GLOBAL.arenas);
    }
    slot.claim.set(place(if asymmetric::is_available() { cache } else { &REVOKED.0 }));
}

#[cold]
fn adopt(slot: &Slot) -> Option<&'static Cache> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    if ptr::eq(slot.claim.current(), &ENDED.0) {
        return None;
    }
    let key = *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the pointer is to a local; `end` has the signature and may run on any thread.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
    });
    let key = key?;
    let raw = inside(|| GLOBAL.adopt())?.into_raw();
    // SAFETY: caches live for ever.
    let cache = unsafe { raw.as_ref() };
    slot.own.set(Some(cache));
    cache.set_user(ptr::from_ref(slot));
    // With the cache in place: glibc may allocate for this (in a C program, from us).
    // SAFETY: the key was made above and is never deleted.
    if unsafe { libc::pthread_setspecific(key, raw.as_ptr().cast_const().cast()) } != 0 {
        part(slot, raw, &NONE.0);
        return None;
    }
    Some(cache)
}

/// The end of a thread that had a cache.
extern "C" fn end(cache: *mut c_void) {
    if let Some(raw) = NonNull::new(cache.cast()) {
        SLOT.with(|slot| part(slot, raw, &ENDED.0));
    }
}

/// Takes the cache from the thread for good.
fn part(slot: &Slot, raw: NonNull<Cache>, then: &'static Cache) {
    slot.claim.set(place(then));
    slot.own.set(None);
    // SAFETY: the cache that `adopt` gave up for this thread, which uses it no more.
    let cache = unsafe { Owned::from_raw(raw) };
    // After this no drain pass looks at the slot, which is about to go.
    cache.set_user(ptr::null());
    GLOBAL.leave(cache);
}

/// Does something inside the arenas. No gate is held.
pub(crate) fn inside<R>(action: impl FnOnce() -> R) -> R {
    struct Back<'a>(&'a Slot, *mut Cache);
    impl Drop for Back<'_> {
        fn drop(&mut self) {
            let Back(slot, before) = *self;
            match slot.own.get() {
                Some(cache) if !ptr::eq(before, &INSIDE.0) => {
                    // A drain pass may have the cache now.
                    let _gate = cache.gate.lock();
                    take_back(slot, cache);
                }
                _ => slot.claim.set(before),
            }
        }
    }
    SLOT.with(|slot| {
        let before = slot.claim.current();
        slot.claim.set(place(&INSIDE.0));
        let _back = Back(slot, before);
        action()
    })
}

/// For threads that the arenas start: all they do is done inside.
pub(crate) fn help(job: &mut dyn FnMut()) {
    inside(job);
}

/// The first half of taking a cache from its thread: from here on the thread goes the slow way. The gate is held.
pub(crate) fn revoke(cache: &Cache, slot: &Slot) {
    slot.claim.revoke(place(cache), place(&REVOKED.0));
}

/// The second half, after a heavy barrier, with the gate held: whether the cache is the caller's until [`restore`].
pub(crate) fn is_revoked(slot: &Slot) -> bool {
    // A fast operation takes nanoseconds, unless its thread has been put off its processor.
    (0..1000).any(|_| {
        core::hint::spin_loop();
        !slot.claim.is_busy()
    })
}

/// Gives the cache back to its thread. The gate is held.
///
/// Not while a maintainer listens: the thread comes the slow way when it wants the cache, and touches the bell.
pub(crate) fn restore(cache: &Cache, slot: &Slot) {
    if asymmetric::is_available() && !GLOBAL.bell.is_listening() {
        slot.claim.restore(place(cache), place(&REVOKED.0));
    }
}

/// Which of `count` shards (a power of two) this thread uses.
pub(crate) fn shard(count: usize) -> usize {
    // The address of a thread-local differs by at least a page between threads; the product's upper bits mix all of it.
    let address = SLOT.with(|slot| ptr::from_ref(slot).addr());
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) & (count - 1)
}
