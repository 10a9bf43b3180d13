//! Gives the pages of free memory back to the kernel, where no device has pinned them. Uses the list of arenas.
//!
//! Giving them back costs a system call, and a fault for each page that is used again: 60 times what taking and giving a span costs.
//! So a little is never given back without being asked for, and what is more, at most so often.

use super::Arenas;
use crate::arena::Arena;
use crate::os;
use crate::region::{Region, SLICE};
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

/// Dirty free bytes of an arena that nobody gives back unless asked to.
const MUCH: usize = 16 << 20;
/// How long there is more than that before it is given back.
const DELAY: Duration = Duration::from_millis(250);

impl Arenas {
    /// Gives dirty pages of an unpinned arena back if they have been many for a while. The caller holds a span of the arena.
    pub(super) fn purge_if_due(&self, region: &Region, arena: &Arena) {
        if arena.dirty_slices() * SLICE <= MUCH || arena.word.is_pinned() {
            return;
        }
        let (now, since) = (self.now().max(1), arena.dirty_since.load(Relaxed));
        if since == 0 {
            arena.dirty_since.store(now, Relaxed);
        } else if now.saturating_sub(since) >= DELAY.as_nanos() as u64 {
            // Before, so that others do not come as well.
            arena.dirty_since.store(now, Relaxed);
            self.purge(region, arena);
        }
    }

    /// Gives all dirty pages of free memory back that no device has pinned. Bytes that went.
    pub fn purge_all(&self) -> usize {
        let Some(region) = Region::existing() else { return 0 };
        // Only who has the role changes the list, so it can be walked without its lock.
        let _role = self.role();
        let mut next = self.read().head;
        let mut purged = 0;
        while let Some(first) = (next as usize).checked_sub(1) {
            let arena = Arena::at(first);
            if arena.dirty_slices() > 0 && !arena.word.is_pinned() {
                purged += self.purge(region, arena);
            }
            next = arena.next.load(Relaxed);
        }
        purged
    }

    fn purge(&self, region: &Region, arena: &Arena) -> usize {
        if !arena.word.begin_purge() {
            return 0;
        }
        let purged = SLICE
            * arena.purge(region, |slices| {
                // SAFETY: the slices are free and marked as used, so nobody has them; the arena is not pinned, nor will be
                // before `end_purge`; and it stays mapped as long.
                unsafe { os::purge(region.slice_address(slices.start), slices.len() * SLICE) }.is_ok()
            });
        arena.word.end_purge();
        self.counts.purged.fetch_add(purged as u64, Relaxed);
        purged
    }
}
