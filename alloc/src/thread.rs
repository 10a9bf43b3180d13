//! Which cache is mine: the thread-local part. Uses `caches` and the global core.
//!
//! One pointer per thread, read with one instruction in a program. It points to
//!
//! - [`NONE`], before the thread's first allocation;
//! - [`ENDED`], after its end;
//! - [`INSIDE`], while the thread is inside the arenas, where devices may be called: it must not meet its own half-done work
//!   again, so what it allocates there comes from the internal heap, whose arenas are never registered;
//! - else the thread's cache.
//!
//! The first three are caches that have nothing and own nothing, so the fast path needs no check: it finds no block and goes
//! the slow way. The pointer has no destructor, so it can be read as late as in the destructors of other thread-locals. The
//! thread's end is told by a pthread key, whose destructors run after those of `thread_local!`. What a thread allocates still
//! later comes from the global heap's shards: were it to take a cache again, it would be told again only if there is another
//! round of destructors, and there are but four.

use crate::cache::Cache;
use crate::caches::Owned;
use crate::global::GLOBAL;
use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::{self, NonNull};
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

thread_local! {
    static CURRENT: Cell<NonNull<Cache>> = const { Cell::new(NonNull::from_ref(&NONE.0)) };
}

/// The thread's cache, or one of the three that have nothing.
#[inline(always)]
pub(crate) fn current() -> &'static Cache {
    // SAFETY: statics, and caches, live for ever.
    unsafe { CURRENT.get().as_ref() }
}

/// Whether the thread is inside the arenas.
pub(crate) fn is_inside() -> bool {
    ptr::eq(current(), &INSIDE.0)
}

/// The thread's cache, if it has one and may use it now; takes one if the thread has none yet. `None`: it is inside the
/// arenas, or at its end, or there is no memory, or no way to learn of the end.
pub(crate) fn own() -> Option<&'static Cache> {
    let cache = current();
    if cache.id != 0 {
        return Some(cache);
    }
    if ptr::eq(cache, &NONE.0) { adopt() } else { None }
}

/// The thread's cache, if it has one and may use it now.
pub(crate) fn existing() -> Option<&'static Cache> {
    Some(current()).filter(|cache| cache.id != 0)
}

#[cold]
fn adopt() -> Option<&'static Cache> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the pointer is to a local; `end` has the signature and may run on any thread.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
    });
    let key = key?;
    let cache = inside(|| GLOBAL.adopt())?.into_raw();
    CURRENT.set(cache);
    // With the cache in place: glibc may allocate for this (in a C program, from us).
    // SAFETY: the key was made above and is never deleted.
    if unsafe { libc::pthread_setspecific(key, cache.as_ptr().cast_const().cast()) } != 0 {
        CURRENT.set(NonNull::from_ref(&NONE.0));
        // SAFETY: given up above, and not taken up since.
        GLOBAL.leave(unsafe { Owned::from_raw(cache) });
        return None;
    }
    // SAFETY: caches live for ever.
    Some(unsafe { cache.as_ref() })
}

/// The end of a thread that had a cache.
extern "C" fn end(cache: *mut c_void) {
    CURRENT.set(NonNull::from_ref(&ENDED.0));
    if let Some(cache) = NonNull::new(cache.cast()) {
        // SAFETY: the value that `adopt` set, of a thread that uses it no more.
        GLOBAL.leave(unsafe { Owned::from_raw(cache) });
    }
}

/// Does something inside the arenas.
pub(crate) fn inside<R>(action: impl FnOnce() -> R) -> R {
    struct Back(NonNull<Cache>);
    impl Drop for Back {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _back = Back(CURRENT.replace(NonNull::from_ref(&INSIDE.0)));
    action()
}

/// Which of `count` shards (a power of two) this thread uses.
pub(crate) fn shard(count: usize) -> usize {
    // The address of a thread-local differs by at least a page between threads; the product's upper bits mix all of it.
    let address = CURRENT.with(|current| ptr::from_ref(current).addr());
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) & (count - 1)
}
