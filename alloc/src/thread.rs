//! Which cache is mine: the thread-local part. Uses `claim`, `caches` and the global core; the caches of other heaps are the
//! business of `places`.
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
use crate::fork;
use crate::global::GLOBAL;
use crate::places::{self, Places};
use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use rdmalloc_arenas::sync::asymmetric;

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
    /// Whether [`end`] will be called. Only the thread reads it.
    tells_its_end: Cell<bool>,
    /// What it has of other heaps.
    pub(crate) places: Places,
}

thread_local! {
    static SLOT: Slot = const {
        Slot {
            claim: ThreadClaim::new(NonNull::from_ref(&NONE.0)),
            own: Cell::new(None),
            tells_its_end: Cell::new(false),
            places: Places::new(),
        }
    };
}

/// A cache that has nothing and is never lent.
pub(crate) const fn nobody() -> NonNull<Cache> {
    NonNull::from_ref(&NONE.0)
}

/// Something with the thread's slot.
#[inline(always)]
pub(crate) fn with_slot<R>(action: impl FnOnce(&Slot) -> R) -> R {
    SLOT.with(action)
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

/// Whether the thread may have caches now: it is neither inside the arenas nor at its end.
pub(crate) fn may_have_caches(slot: &Slot) -> bool {
    let current = slot.claim.current();
    !ptr::eq(current, &INSIDE.0) && !ptr::eq(current, &ENDED.0)
}

#[cold]
fn adopt(slot: &Slot) -> Option<&'static Cache> {
    if ptr::eq(slot.claim.current(), &ENDED.0) {
        return None;
    }
    fork::install();
    let raw = inside(|| GLOBAL.adopt())?.into_raw();
    // SAFETY: caches live for ever.
    let cache = unsafe { raw.as_ref() };
    slot.own.set(Some(cache));
    cache.set_user(slot);
    // With the cache in place: the system may allocate for this.
    if tells_its_end(slot) { Some(cache) } else { None }
}

/// Sees to it that the thread's end is told, which a thread that has a cache must. Whether it will be; if not, the thread has
/// no cache after this.
pub(crate) fn tells_its_end(slot: &Slot) -> bool {
    // Before it is so: glibc may allocate for it (in a C program, from us), which shall not begin the same again.
    if slot.tells_its_end.replace(true) {
        return true;
    }
    // SAFETY: the key was made above and is never deleted.
    let done = key().is_some_and(|key| unsafe { libc::pthread_setspecific(key, ptr::from_ref(slot).cast()) } == 0);
    if !done {
        slot.tells_its_end.set(false);
        part(slot, &NONE.0);
    }
    done
}

/// One more than the key by which the system tells of a thread's end; 0: there is none yet.
static KEY: AtomicU64 = AtomicU64::new(0);

/// The key by which the system tells of a thread's end; `None`: it has no more now. It may have one later.
fn key() -> Option<libc::pthread_key_t> {
    let known = |key: u64| key.checked_sub(1).map(|key| key as libc::pthread_key_t);
    if let Some(key) = known(KEY.load(Relaxed)) {
        return Some(key);
    }
    let mut key = 0;
    // SAFETY: the pointer is to a local; `end` has the signature and may run on any thread.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } != 0 {
        return None;
    }
    match KEY.compare_exchange(0, u64::from(key) + 1, Relaxed, Relaxed) {
        Ok(_) => Some(key),
        Err(first) => {
            // SAFETY: made above, and no thread has set it: another's was first.
            unsafe { libc::pthread_key_delete(key) };
            known(first)
        }
    }
}

/// Whether a slot is this thread's.
pub(crate) fn is_mine(slot: *const Slot) -> bool {
    SLOT.with(|mine| ptr::eq(mine, slot))
}

/// Whether a thread may use the cache now, which it has. The gate is held.
pub(crate) fn has(cache: &Cache, slot: &Slot) -> bool {
    if cache.is_lent() { places::has(cache, slot) } else { ptr::eq(slot.claim.current(), cache) }
}

/// The end of a thread that had a cache.
extern "C" fn end(_: *mut c_void) {
    SLOT.with(|slot| part(slot, &ENDED.0));
}

/// Takes its caches from the thread for good.
fn part(slot: &Slot, then: &'static Cache) {
    slot.claim.set(place(then));
    if let Some(own) = slot.own.take() {
        // SAFETY: the cache that `adopt` gave up for this thread, which uses it no more.
        let cache = unsafe { Owned::from_raw(NonNull::from_ref(own)) };
        // After this no drain pass looks at the slot, which is about to go.
        cache.set_user(ptr::null());
        GLOBAL.leave(cache);
    }
    places::leave(slot);
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
    if cache.is_lent() {
        places::revoke(cache);
    } else {
        slot.claim.revoke(place(cache), place(&REVOKED.0));
    }
}

/// The second half, after a heavy barrier, with the gate held: whether the cache is the caller's until [`restore`].
pub(crate) fn is_revoked(cache: &Cache, slot: &Slot) -> bool {
    // A fast operation takes nanoseconds, unless its thread has been put off its processor.
    (0..1000).any(|_| {
        core::hint::spin_loop();
        if cache.is_lent() { !places::is_using(slot, cache) } else { !slot.claim.is_busy() }
    })
}

/// Gives the cache back to its thread. The gate is held.
pub(crate) fn restore(cache: &Cache, slot: &Slot) {
    if cache.is_lent() {
        places::restore(cache, slot);
    } else if asymmetric::is_available() {
        slot.claim.restore(place(cache), place(&REVOKED.0));
    }
}

/// Which of `count` shards (a power of two) this thread uses.
pub(crate) fn shard(count: usize) -> usize {
    // The address of a thread-local differs by at least a page between threads; the product's upper bits mix all of it.
    let address = SLOT.with(|slot| ptr::from_ref(slot).addr());
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) & (count - 1)
}
