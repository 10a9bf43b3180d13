//! A cache at a fork. Uses `thread`.
//!
//! Before it, the gate is locked, and the thread that has the cache is kept from its fast operations as a drain pass keeps it: so
//! the child knows whether the cache is whole. One that is whole serves on there: this thread's as its own, others' as idle
//! ones. One whose thread was stopped in the middle of a fast operation is lost to the child: what it has stays where it is, no
//! drain pass comes to it, and blocks of its slabs that are freed are put into lists that nobody looks at. Those of a heap that is
//! left out of children are all lost.

use super::Cache;
use crate::thread::{self, Slot};
use core::sync::atomic::Ordering::Relaxed;
use rdmalloc_arenas::sync::asymmetric;

/// What becomes of a cache in a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// Nothing: it is the child's thread's, or a shard's, or idle already.
    AsItIs,
    /// It is whole, and its thread is not in this process.
    Orphan,
    /// It must not be used.
    Lost,
}

impl Cache {
    /// Before a fork: waits for the gate, keeps it, and takes the cache from its thread. A heavy barrier comes between this and
    /// [`note_whole`](Self::note_whole).
    pub(crate) fn hold(&self) {
        self.gate.hold();
        if let Some(slot) = self.others() {
            // If a drain pass has taken it already, it stays so.
            self.taken.set(thread::has(self, slot));
            thread::revoke(self, slot);
        }
    }

    /// Notes whether the cache is whole. The gate is held.
    pub(crate) fn note_whole(&self, barrier: bool) {
        let is_revoked = |slot| barrier && thread::is_revoked(self, slot);
        // Without the barrier's system call every operation holds the gate.
        self.whole.set(!asymmetric::is_available() || self.others().is_none_or(is_revoked));
    }

    /// The thread that has it, if it is not this one. The gate is held.
    fn others(&self) -> Option<&Slot> {
        self.user().filter(|slot| !thread::is_mine(*slot))
    }

    /// After the fork, in the parent: gives the cache back to its thread, and opens the gate.
    ///
    /// # Safety
    ///
    /// This thread has called [`hold`](Self::hold), and not this since.
    pub(crate) unsafe fn release(&self) {
        if let Some(slot) = self.others()
            && self.taken.take()
        {
            thread::restore(self, slot);
        }
        // SAFETY: `hold` took it.
        unsafe { self.gate.release() };
    }

    /// After the fork, in the child: takes the cache from a thread that is not in this process, and opens the gate. `is_gone`: the
    /// heap is left out of children.
    ///
    /// # Safety
    ///
    /// This thread is a copy of one that has called [`hold`](Self::hold), and has not called this.
    pub(crate) unsafe fn release_in_child(&self, is_gone: bool) -> Fate {
        let user = self.user.get();
        // Another's slot is not looked at: its memory may be used for something else already.
        let fate = match () {
            () if is_gone || !self.whole.get() => Fate::Lost,
            () if user.is_null() || thread::is_mine(user) => Fate::AsItIs,
            () => Fate::Orphan,
        };
        if fate != Fate::AsItIs {
            self.loan.revoke();
            self.forget_user();
            self.asked.set(false);
        }
        if fate == Fate::Lost {
            self.whole.set(false);
            self.tag.store(0, Relaxed);
        }
        // SAFETY: `hold` took it.
        unsafe { self.gate.release() };
        fate
    }

    /// In a child of fork: whether it is [`Fate::Lost`].
    pub(crate) fn is_lost(&self) -> bool {
        !self.whole.get()
    }
}
