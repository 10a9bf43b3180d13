//! How an arena gets its memory: in which pages, on which node. Uses `pages` and `numa`, and the heap's devices for what they need.

use super::attach::Attached;
use super::{Arenas, Role, usual_size};
use crate::arena::Arena;
use crate::numa::{self, Node, Placed};
use crate::os::{self, NotLarge};
use crate::pages::{self, Fallback, Pages};
use crate::pinning::Pinning;
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

    /// Sets from which memory node arenas get their memory that are opened from now on.
    pub fn set_node(&self, node: Node) {
        self.settings.node.store(node.number(), Relaxed);
    }

    /// From which memory node arenas get their memory.
    #[must_use]
    pub fn node(&self) -> Node {
        Node::from_number(self.settings.node.load(Relaxed))
    }

    /// Sets whether devices pin the memory that are attached from now on.
    pub fn set_pinning(&self, pinning: Pinning) {
        self.settings.pinning.store(pinning as u8, Relaxed);
    }

    /// Whether devices pin the memory.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        Pinning::from_number(self.settings.pinning.load(Relaxed))
    }

    /// Whether an arena must stay as it is, page by page: a device has pinned it, or its pages cannot be given back.
    pub(super) fn is_fixed(&self, arena: &Arena) -> bool {
        arena.registered.load(Relaxed) & self.limits.pinning.load(Relaxed) != 0 || !is_purgeable(arena)
    }

    /// Lets an arena be purged again, once no device has it pinned. The caller has the role.
    pub(super) fn unpin_if_nobody_pins(&self, arena: &Arena) {
        if !self.is_fixed(arena) && !arena.word.is_kept() {
            arena.word.unpin();
        }
    }

    /// The node that arenas shall have now; or that none was asked for, or none is known.
    fn wanted_node(&self, role: &Role) -> Result<u32, Placed> {
        match self.node() {
            Node::Any => Err(Placed::Anywhere),
            Node::Fixed(node) => Ok(node),
            Node::OfDevice => {
                let nodes = role.attached.iter().filter(|attached| !attached.is_lost());
                nodes.filter_map(|attached| attached.node).next().ok_or(Placed::Unknown)
            }
        }
    }

    /// Places an arena that has been opened, and of which nothing is in memory.
    fn place(&self, region: &Region, role: &Role, arena: &Arena) {
        let start = region.slice_address(arena.run().start * SLICES_PER_CHUNK);
        // SAFETY: the arena's memory is open.
        let place = |node| unsafe { numa::place(start, arena.len(), node, false) };
        arena.set_placed(self.wanted_node(role).map_or_else(|unplaced| unplaced, place));
    }

    /// Places a live arena on the node of the first device, and moves there what is in memory, before the device pins it.
    pub(super) fn place_late(&self, region: &Region, role: &Role, arena: &Arena) {
        if self.node() != Node::OfDevice || arena.registered.load(Relaxed) != 0 {
            return;
        }
        if let Ok(node) = self.wanted_node(role)
            && arena.placed() != Placed::On(node)
        {
            let start = region.slice_address(arena.run().start * SLICES_PER_CHUNK);
            // SAFETY: a live arena's memory is open, and stays so: closing needs the role, which the caller has.
            arena.set_placed(unsafe { numa::place(start, arena.len(), node, true) });
        }
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
        let limited = size < usual_size(region.len(), self.open.load(Relaxed)) || page > region.len() / 8;
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
                        match unsafe { pages::open_hugetlb(start, len, shift, || self.place(region, role, arena)) } {
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
        self.place(region, role, arena);
        // Not for memory that nobody will register.
        let some = |attached: &Attached| self.will_be_pinned(attached, len);
        if role.attached.iter().any(some) && !os::is_forked_child() {
            // SAFETY: just opened, so it is writable.
            unsafe { pages::advise(start, len, pages) };
        }
        Ok(())
    }

    /// Asks for huge pages for a live arena before it is pinned.
    pub(super) fn advise(&self, region: &Region, arena: &Arena) {
        let (pages, _) = arena.pages();
        if !pages.is_hugetlb() {
            let start = region.slice_address(arena.run().start * SLICES_PER_CHUNK);
            // SAFETY: a live arena is writable, and stays open: closing needs the role, which the caller has.
            unsafe { pages::advise(start, arena.len(), pages) };
        }
    }
}

/// Whether free pages of an arena can be given back while it is open: not those of the hugetlb pool. (Linux does it, since 5.18, in
/// whole pages, and rounds a shorter range down in silence: what is said to be zero then is not.)
fn is_purgeable(arena: &Arena) -> bool {
    !arena.pages().0.is_hugetlb()
}
