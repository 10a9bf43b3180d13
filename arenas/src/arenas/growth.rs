//! Blocks that grow: the arena of a block that has it to itself becomes longer, where no device has it. Uses `arena`, `region`.
//!
//! A registered arena never becomes longer: the block would lie in two registrations. (There is no call that makes a
//! registration longer and keeps its keys while they are in use.) So there a block that outgrows its arena moves.

use super::{Arenas, crosses_piece};
use crate::arena::{Arena, State};
use crate::region::{CHUNK, Region, SLICE, SLICES_PER_CHUNK};
use crate::{os, pages};
use core::sync::atomic::Ordering::Relaxed;

impl Arenas {
    /// Lengthens a span in place beyond its arena, which becomes longer for it: if the span begins the arena, no device is
    /// attached, and the address space behind is free. Whether what was added is zero, or `None`.
    ///
    /// Waits for whoever opens an arena or attaches a device now, so not to be called from within a registrar.
    #[must_use]
    pub fn grow_arena(&self, address: usize, old: usize, new: usize) -> Option<bool> {
        let (region, arena) = Region::existing().zip(Arena::of(address))?;
        let first = (address - region.base()) / SLICE;
        let begins = first == arena.run().start * SLICES_PER_CHUNK;
        // Where links lie outside, an arena has as many as it was opened for.
        let outside = self.has_links_outside();
        if !begins || outside || arena.word.is_pinned() || crosses_piece(arena, first, new) {
            return None;
        }
        {
            // Under the role no arena is pinned, opened or closed.
            let role = self.role();
            if !role.attached.is_empty() || arena.word.state() != State::Live || arena.word.is_kept() {
                return None;
            }
            let run = arena.run();
            let more = run.start + new.div_ceil(SLICES_PER_CHUNK);
            let more = run.end..more.max(run.end);
            if !more.is_empty() {
                region.extend_run(run.clone(), more.len())?;
                let at = region.slice_address(more.start * SLICES_PER_CHUNK);
                // SAFETY: the chunks were just taken: they lie in the region, are closed, and nobody else has them.
                if unsafe { pages::open_base(at, more.len() * CHUNK, arena.pages().0) }.is_err() {
                    region.shorten_run(run, more);
                    return None;
                }
                if !self.config.serves_children {
                    // SAFETY: just opened, and in no block yet.
                    unsafe { os::keep_from_children(at, more.len() * CHUNK) };
                }
                arena.extend(more.len());
                self.open.fetch_add(more.len() * CHUNK, Relaxed);
            }
        }
        self.grow(address, old, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Config, Policy};

    #[test]
    fn an_arena_grows_with_its_span_is_whole_and_closes_whole() {
        let heap =
            Arenas::new(Config { access: Access::default(), policy: Policy::Require, serves_children: false, tag: 5 });
        // Other tests open arenas meanwhile, perhaps right behind.
        let (address, small, large) = (0..100)
            .find_map(|_| {
                let span = heap.take(1 << 10, 1).unwrap();
                let grown = heap.grow_arena(span.address, 1 << 10, 3 << 9);
                (grown == Some(true)).then_some((span.address, 1 << 10, 3 << 9))
            })
            .expect("one of a hundred grows");
        let arena = Arena::of(address).unwrap();
        assert_eq!((arena.slices(), arena.free_slices()), (large, 0));
        let last = address + large * SLICE - 1;
        assert!(core::ptr::eq(Arena::of(last).unwrap(), arena));
        // SAFETY: the last byte of the span.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(last).write(1) };
        assert!(heap.shrink(address, large, small));
        assert_eq!(arena.free_slices(), large - small);
        heap.purge_all();
        let behind = heap.take(large - small, 1).unwrap();
        // Nobody pins it, so what was dirty could be given back to the kernel.
        assert_eq!((behind.address, behind.zero), (address + small * SLICE, true));
        // SAFETY: as above.
        assert_eq!(unsafe { core::ptr::with_exposed_provenance::<u8>(last).read() }, 0);
        assert_eq!(heap.grow_arena(behind.address, behind.slices, large), None, "it does not begin the arena");
        heap.give(behind.address, behind.slices);
        heap.give(address, small);
        assert_eq!(heap.close_all_empty().stuck, 0);
        assert!(
            Arena::of(address).is_none_or(|arena| arena.tag() != 5) && Arena::of(last).is_none_or(|a| a.tag() != 5)
        );
    }
}
