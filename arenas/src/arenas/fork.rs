//! What becomes of a heap's arenas at a fork. Uses the list of arenas, and the devices.
//!
//! Before it, the short locks are taken, so that what they guard is whole in the child. The role is not waited for: it is held
//! while devices are called. In the child nobody has it (unless the very thread that had it forked, inside a registrar), no
//! device is attached, and arenas that were being opened or closed are given up: see [`crate::fork`].

use super::{Arenas, Role, arenas};
use crate::arena::{Arena, State};
use crate::sync::this_thread;
use core::sync::atomic::Ordering::Relaxed;

impl Arenas {
    /// Before a fork: waits for the locks of the heap that are held for moments, and keeps them.
    pub fn before_fork(&self) {
        let list = self.list.hold();
        arenas(list).for_each(|arena| {
            arena.search.hold();
        });
        self.notices.hold();
    }

    /// After a fork, in parent and child: opens the locks again.
    ///
    /// # Safety
    ///
    /// This thread has called [`before_fork`](Self::before_fork), and not this since; or is the child's copy of such a thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: `before_fork` took them, all and once: the list has not changed since, as its lock is held.
        unsafe {
            self.notices.release();
            arenas(self.list.held()).for_each(|arena| arena.search.release());
            self.list.release();
        }
    }

    /// In a child of fork, with the locks open: forgets the parent's devices and whoever was about to do something. A heap that
    /// children do not have ([`Config::serves_children`](crate::Config)) has no arena from here on, and never will.
    ///
    /// # Safety
    ///
    /// This is a child of fork, with no other thread yet, and the memory of such a heap is never touched again.
    pub unsafe fn in_child(&self) {
        // SAFETY: there is no other thread.
        unsafe { self.notices.renew() };
        self.end_headroom();
        self.counts.opening_now.store(0, Relaxed);
        self.counts.closing_now.store(0, Relaxed);
        if !self.config.serves_children {
            self.gone.store(true, Relaxed);
            self.list.write().head = 0;
        }
        if self.is_role_mine() {
            // It was forked inside a registrar, to which it returns if it does not exec: all it works with stays. The devices
            // know that they are the parent's (`Attached::is_parents`).
            return;
        }
        // SAFETY: who had it, if anybody, is not in this process. The registrars are not dropped: they are the parent's.
        unsafe { self.role.renew(Role { attached: Vec::new() }) };
        self.role_holder.store(0, Relaxed);
        self.limits.held.reset();
        self.limits.attached.store(0, Relaxed);
        self.limits.pinning.store(0, Relaxed);
        let mut open = 0;
        for arena in arenas(&self.read()) {
            arena.registered.store(0, Relaxed);
            arena.word.forget_purgers();
            self.unpin_if_nobody_pins(arena);
            open += if arena.word.state() == State::Live { arena.len() } else { 0 };
        }
        self.open.store(open, Relaxed);
    }

    /// Whether this thread has the role now: it is inside a registrar.
    #[must_use]
    pub fn is_role_mine(&self) -> bool {
        self.role_holder.load(Relaxed) == this_thread()
    }

    /// Whether this process is a child of fork that does not have this heap's memory.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }
}

impl Arena {
    /// In a child of fork: nobody opens or closes it any more, nor looks for slices in it.
    ///
    /// # Safety
    ///
    /// This is a child of fork, with no other thread yet.
    pub(crate) unsafe fn abandon(&self) {
        // SAFETY: there is no other thread.
        unsafe { self.search.renew(0) };
        self.word.end_open(State::Vacant, false);
        self.word.end_close(State::Vacant);
    }
}
