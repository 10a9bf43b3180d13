//! All caches of the process, by number. Uses `cache`.
//!
//! Caches are metadata: they lie in mappings of their own, outside every arena, and stay where they are for ever, since a
//! thread that frees a block may come late to tell its owner.

use crate::cache::{Cache, Fate};
use core::ops::{Deref, Range};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Release};
use memmap2::MmapOptions;
use rdmalloc_arenas::sync::{Lock, asymmetric};

/// Caches in a mapping.
const BATCH: usize = 64;
/// Mappings there can be: for 262,144 caches, more than Linux allows threads by default.
const BATCHES: usize = 4096;

static ALL: [AtomicPtr<Cache>; BATCHES] = [const { AtomicPtr::new(ptr::null_mut()) }; BATCHES];
/// The number of the next cache; 0 is nobody's.
static NEXT: Lock<u32> = Lock::new(1);

/// Caches of heaps that have ended: they own no slab.
static RETIRED: Lock<Idle> = Lock::new(Idle::new());

/// Keeps a cache that owns no slab for whoever needs one.
pub(crate) fn retire(cache: Owned) {
    RETIRED.lock().push(cache);
}

/// The right to use a cache: there is one for each, and whoever has it is the cache's one user.
pub(crate) struct Owned(&'static Cache);

// SAFETY: the one right to use a cache may move to another thread; with it goes the use, ordered by whatever hands it over.
unsafe impl Send for Owned {}

impl Owned {
    /// A cache that has nothing: a retired one, or a new one. `None`: no memory, or no numbers left.
    pub(crate) fn obtain() -> Option<Owned> {
        let retired = RETIRED.lock().pop();
        retired.or_else(Owned::create)
    }

    fn create() -> Option<Owned> {
        let mut next = NEXT.lock();
        let (batch, place) = (*next as usize / BATCH, *next as usize % BATCH);
        let slot = ALL.get(batch)?;
        if slot.load(Acquire).is_null() {
            let mut map = MmapOptions::new().len(BATCH * size_of::<Cache>()).map_anon().ok()?;
            // A cache is found by its address, which slabs name; see `Cache::of_name`.
            let _ = map.as_mut_ptr().expose_provenance();
            slot.store(map.as_mut_ptr().cast(), Release);
            core::mem::forget(map);
        }
        // SAFETY: place < BATCH, within the mapping, which is aligned to a page; nobody knows the place yet.
        let cache = unsafe {
            let cache = slot.load(Acquire).add(place);
            cache.write(Cache::new(*next));
            &*cache
        };
        *next += 1;
        Some(Owned(cache))
    }

    /// Gives the right up, for a place where it cannot be kept.
    pub(crate) fn into_raw(self) -> NonNull<Cache> {
        NonNull::from(self.0)
    }

    /// Takes the right up again.
    ///
    /// # Safety
    ///
    /// `raw` is from [`into_raw`](Self::into_raw), and taken up once.
    pub(crate) unsafe fn from_raw(raw: NonNull<Cache>) -> Owned {
        // SAFETY: caches live for ever.
        Owned(unsafe { raw.as_ref() })
    }
}

impl Deref for Owned {
    type Target = Cache;
    fn deref(&self) -> &Cache {
        self.0
    }
}

/// The list of slabs to look at of the cache with this number, which owns a slab.
pub(crate) fn told(id: u32) -> &'static AtomicPtr<crate::slab::Slab> {
    let (batch, place) = (id as usize / BATCH, id as usize % BATCH);
    // SAFETY: a number that a slab's word names was given to a cache, so it has been written there, for ever. Only the list,
    // which is everyone's, is reached through the reference. (The remainder changes nothing; it spares a panic's code.)
    unsafe { &*ALL[batch % BATCHES].load(Acquire).add(place) }.told()
}

fn each(numbers: Range<u32>, mut action: impl FnMut(&'static Cache)) {
    for number in numbers.start as usize..numbers.end as usize {
        // SAFETY: the callers' numbers are below the next, so they were given to caches, which were written before that, and live
        // for ever. What the reference is used for is the business of the caches' gates.
        action(unsafe { &*ALL[number / BATCH].load(Acquire).add(number % BATCH) });
    }
}

/// Before a fork: takes the caches from this number on from their threads, and keeps them; the number after the last.
pub(crate) fn hold_from(first: u32) -> u32 {
    let end = *NEXT.lock();
    each(first..end, Cache::hold);
    end
}

/// Then, if these are all caches (nobody makes one meanwhile): keeps the lists still, and finds out which caches no thread is just
/// using. If there are more, nothing.
pub(crate) fn hold_lists(end: u32) -> bool {
    RETIRED.hold();
    if *NEXT.hold() != end {
        // SAFETY: held just before.
        unsafe {
            NEXT.release();
            RETIRED.release();
        }
        return false;
    }
    let barrier = asymmetric::heavy();
    each(1..end, |cache| cache.note_whole(barrier));
    true
}

/// After the fork, in the parent.
///
/// # Safety
///
/// This thread has called [`hold_lists`], which returned true, and not this since.
pub(crate) unsafe fn release() {
    // SAFETY: all that is released is held.
    unsafe {
        each(1..*NEXT.held(), |cache| cache.release());
        NEXT.release();
        RETIRED.release();
    }
}

/// After it, in the child: `orphan` is given each cache that is whole and has no thread here. `is_gone`: whether the heap with
/// a tag is left out of children.
///
/// # Safety
///
/// This thread is a copy of one that has called [`hold_lists`], which returned true, and has not called this.
pub(crate) unsafe fn release_in_child(is_gone: impl Fn(u32) -> bool, mut orphan: impl FnMut(Owned)) {
    // SAFETY: all that is released is held. The right to use a cache was its thread's, which is not in this process.
    unsafe {
        each(1..*NEXT.held(), |cache| {
            if cache.release_in_child(is_gone(cache.tag())) == Fate::Orphan {
                orphan(Owned(cache));
            }
        });
        NEXT.release();
        RETIRED.release();
    }
}

/// Caches that have no user now, and how many.
pub(crate) struct Idle(Option<Owned>, usize);

impl Idle {
    /// None.
    pub(crate) const fn new() -> Idle {
        Idle(None, 0)
    }

    /// Takes one out.
    pub(crate) fn pop(&mut self) -> Option<Owned> {
        let first = self.0.take()?;
        self.0 = first.next.take().map(Owned);
        self.1 -= 1;
        Some(first)
    }

    /// Puts one in.
    pub(crate) fn push(&mut self, cache: Owned) {
        cache.next.set(self.0.take().map(|first| first.0));
        self.0 = Some(cache);
        self.1 += 1;
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.1
    }
}
