//! Blocks that this cache's thread has freed into slabs of others, and has not put there yet. Uses `slab`.
//!
//! Each needs a locked instruction on a word that the slab's owner reads too. So a few blocks of the same slab are linked here first, with
//! plain stores, and go there as one. They count as used meanwhile. Whoever empties the cache puts them where they belong, so no drain pass
//! misses one; a drain pass does so with all caches before it looks at the first.

use super::Cache;
use crate::slab::{Freed, Slab};
use core::cell::Cell;
use core::ptr::{self, NonNull};

/// Slabs at once, chosen by their address.
const SLABS: usize = 8;
/// Blocks of a slab.
const BLOCKS: u32 = 32;
/// Larger blocks go at once: they are few to a slab, and much that nobody can use meanwhile.
const LARGEST: usize = 1024;

/// Blocks of one slab.
struct Run {
    slab: Cell<Option<&'static Slab>>,
    first: Cell<NonNull<u8>>,
    last: Cell<NonNull<u8>>,
    count: Cell<u32>,
}

/// See the module.
pub(super) struct Pending([Run; SLABS]);

/// What became of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pended {
    /// It waits here.
    Yes,
    /// It waits here, and an owner was told of others: the maintainer wants to know.
    YesAndTold,
    /// It must go to its slab at once.
    No,
}

impl Pending {
    pub(super) const fn new() -> Pending {
        Pending(
            [const {
                Run {
                    slab: Cell::new(None),
                    first: Cell::new(NonNull::dangling()),
                    last: Cell::new(NonNull::dangling()),
                    count: Cell::new(0),
                }
            }; SLABS],
        )
    }
}

impl Run {
    /// Puts the blocks where they belong. Whether the owner was told.
    fn post(&self) -> bool {
        let Some(slab) = self.slab.take() else { return false };
        // SAFETY: the blocks were freed, and linked from the first to the last.
        match unsafe { slab.push_remote_run(self.first.get(), self.last.get(), self.count.get()) } {
            Freed::Tell(owner) => {
                slab.tell(crate::caches::told(owner));
                true
            }
            Freed::Done => false,
            Freed::Twice => slab.freed_too_often(),
        }
    }
}

impl Cache {
    /// Keeps a block of a slab of another for a while; in a fast operation of the cache's thread.
    ///
    /// # Safety
    ///
    /// `block` is a block of `slab`, which has its links in its blocks, and the caller's.
    #[inline(always)]
    pub(crate) unsafe fn pend(&self, slab: &'static Slab, block: NonNull<u8>) -> Pended {
        let run = &self.pending.0[ptr::from_ref(slab).addr() / size_of::<Slab>() % SLABS];
        if !run.slab.get().is_some_and(|other| ptr::eq(other, slab)) {
            // SAFETY: the caller's promise.
            return unsafe { self.pend_first(run, slab, block) };
        }
        // As long as blocks of it wait here, they count as used: so it is a slab, and of the same owner.
        if run.first.get() == block {
            slab.freed_too_often();
        }
        // SAFETY: the caller's promise.
        unsafe { Slab::chain(block, Some(run.first.get())) };
        run.first.set(block);
        let count = run.count.get() + 1;
        run.count.set(count);
        if count >= BLOCKS && run.post() { Pended::YesAndTold } else { Pended::Yes }
    }

    /// The first block of a slab.
    ///
    /// # Safety
    ///
    /// As [`pend`](Self::pend).
    #[inline(never)]
    unsafe fn pend_first(&self, run: &Run, slab: &'static Slab, block: NonNull<u8>) -> Pended {
        // What is no slab any more has no owner; that is told elsewhere. And a drain pass may have had this cache until now.
        let owner = slab.owner();
        if self.id == 0 || slab.block_size() > LARGEST || owner == 0 || owner == self.name() {
            return Pended::No;
        }
        let told = run.post();
        // SAFETY: the caller's promise.
        unsafe { Slab::chain(block, None) };
        run.slab.set(Some(slab));
        run.first.set(block);
        run.last.set(block);
        run.count.set(1);
        if told { Pended::YesAndTold } else { Pended::Yes }
    }

    /// Puts all blocks that wait where they belong.
    pub(super) fn post(&self) {
        for run in &self.pending.0 {
            run.post();
        }
    }
}
