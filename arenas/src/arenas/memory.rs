//! How an arena gets its memory: in which pages. Uses `pages`, and the heap's devices for what they need of them.

use super::attach::Attached;
use super::{Arenas, FIRST_ARENA, Role};
use crate::arena::Arena;
use crate::os::{self, NotLarge};
use crate::pages::{self, Fallback, Pages};
use crate::region::{CHUNK, Region, SLICES_PER_CHUNK};
use core::sync::atomic::Ordering::Relaxed;
use std::io;

/// Why an arena has no memory.
pub(super) enum NoMemory {
    /// Its range is closed, as before.
    Refused(io::Error),
    /// Its range may be another's, and is never to be used again.
    Lost(io::Error),
}

impl Arenas {
    /// Sets what pages arenas get that are opened from now on. Those that are open keep what they have.
    pub fn set_pages(&self, pages: Pages) {
        self.settings.pages.store(pages as u8, Relaxed);
    }

    /// What pages arenas get.
    #[must_use]
    pub fn pages(&self) -> Pages {
        Pages::from_number(self.settings.pages.load(Relaxed))
    }

    /// How many bytes the next arena shall have, and at a multiple of how many chunks, where `needed` and `align` are the least:
    /// whole pages, as far as the limits that made the usual `size` allow so much.
    pub(super) fn in_whole_pages(
        &self,
        region: &Region,
        role: &Role,
        size: usize,
        needed: usize,
        align: usize,
    ) -> (usize, usize) {
        let bytes = size.max(needed);
        let page = self.pages().bytes().max(CHUNK);
        let rounded = bytes.next_multiple_of(page);
        // Smaller than the first arena is only what a limit has made so.
        let limited = size < FIRST_ARENA.min(region.len() / 8) || page > region.len() / 8;
        let may =
            |attached: &Attached| attached.is_lost() || self.may_register(attached, attached.amount(rounded)).is_ok();
        if page == CHUNK || limited && rounded > bytes || !role.attached.iter().all(may) {
            return (bytes, align);
        }
        (rounded, align.max(page / CHUNK))
    }

    /// Opens the memory of an arena, which is closed, and faults it in if a device will pin it.
    ///
    /// # Safety
    ///
    /// The arena's chunks are the caller's alone.
    pub(super) unsafe fn open_memory(&self, region: &Region, role: &Role, arena: &Arena) -> Result<(), NoMemory> {
        let (start, len) = (region.slice_address(arena.run().start * SLICES_PER_CHUNK), arena.len());
        let (wanted, mut why) = (self.pages(), None);
        for &pages in wanted.hugetlb() {
            let tried = match pages.shift() {
                Some(shift) if (start.addr() | len).is_multiple_of(1 << shift) => {
                    if role.attached.iter().any(|attached| attached.piece() < 1 << shift && !attached.is_lost()) {
                        Err(Fallback::Device)
                    } else {
                        // SAFETY: the caller's promise; aligned, as was just seen.
                        match unsafe { pages::open_hugetlb(start, len, shift, || {}) } {
                            Ok(()) => Ok(()),
                            Err(NotLarge::Refused(error)) => Err(Fallback::System(error.raw_os_error().unwrap_or(0))),
                            Err(NotLarge::Lost(error)) => return Err(NoMemory::Lost(error)),
                        }
                    }
                }
                _ => Err(Fallback::Size),
            };
            match tried {
                Ok(()) => {
                    arena.set_pages(pages, why);
                    return Ok(());
                }
                // The first: it is about what was asked for.
                Err(reason) => why = why.or(Some(reason)),
            }
        }
        let pages = if wanted == Pages::Base { wanted } else { Pages::Transparent };
        // SAFETY: the caller's promise.
        unsafe { pages::open_base(start, len, pages) }.map_err(NoMemory::Refused)?;
        arena.set_pages(pages, why);
        // Not for memory that nobody will register.
        let some = |attached: &Attached| self.is_to_be_faulted_in(attached, len);
        if role.attached.iter().any(some) && !os::is_forked_child() {
            // SAFETY: just opened, so it is writable.
            unsafe { pages::prefault(start, len, pages) };
        }
        Ok(())
    }

    /// Faults a live arena in before it is pinned.
    pub(super) fn prefault(&self, region: &Region, arena: &Arena) {
        let (pages, _) = arena.pages();
        if !pages.is_hugetlb() {
            let start = region.slice_address(arena.run().start * SLICES_PER_CHUNK);
            // SAFETY: a live arena is writable, and stays open: closing needs the role, which the caller has.
            unsafe { pages::prefault(start, arena.len(), pages) };
        }
    }
}

/// Whether free pages of an arena can be given back while it is open: not those of the hugetlb pool. (Linux does it, since 5.18, in
/// whole pages, and rounds a shorter range down in silence: what is said to be zero then is not.)
pub(super) fn is_purgeable(arena: &Arena) -> bool {
    !arena.pages().0.is_hugetlb()
}
