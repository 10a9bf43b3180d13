//! In which arena a span comes to lie, so that after a peak arenas run empty and can be closed. Uses `arena`.
//!
//! Spans are taken lowest address first: the list of arenas is in that order, and so is each arena's bitmap. The arenas that
//! were opened first are the lowest, mostly, and the smallest. That alone empties few arenas: what is replaced bit by bit (the
//! one slab of a rare class, a spare span) stays where it is for ever. So each drain pass decides anew which arenas shall run
//! empty, and users of spans ask [`Arenas::is_draining`] before they keep one for later use.
//!
//! An arena is draining while the arenas below it have room enough for a part of all that is taken ([`ROOM`]). It is a hint: a
//! draining arena serves when nothing else has room, before another is opened, and is not draining any more then.

use super::{Arenas, List, Seen, Span, arenas};
use crate::arena::{Arena, State};
use crate::region::Region;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Which part of what is taken shall have room in the arenas that are not draining: a quarter. With an eighth as with a
/// quarter the trace of `rdmalloc-tests` ends with the same arenas; more keeps more of them open.
const ROOM: usize = 4;

/// How many arenas of the process are draining. Zero in a program that has not seen a peak, and then nobody looks further.
static DRAINING: AtomicUsize = AtomicUsize::new(0);

impl Arena {
    /// Says whether the arena shall run empty.
    pub(super) fn set_draining(&self, draining: bool) {
        if self.draining.swap(draining, Relaxed) != draining {
            if draining {
                DRAINING.fetch_add(1, Relaxed)
            } else {
                DRAINING.fetch_sub(1, Relaxed)
            };
        }
    }
}

impl Arenas {
    /// Takes a span from an arena that is open. Calls no device, and allocates nothing.
    ///
    /// # Errors
    ///
    /// When no arena has room: what was seen, for [`make_room`](Self::make_room).
    pub fn try_take(&self, slices: usize, align: usize) -> Result<Span, Seen> {
        let list = self.read();
        let seen = Seen(list.opened);
        let region = Region::existing().ok_or(seen)?;
        if let Some(span) = self.take_lasting(&list, region, slices, align) {
            return Ok(span);
        }
        let serve = |arena: &'static Arena| {
            let span = self.take_from(region, arena, slices, align)?;
            arena.set_draining(false);
            Some(span)
        };
        arenas(&list).filter(|arena| arena.draining.load(Relaxed)).find_map(serve).ok_or(seen)
    }

    /// Takes a span from an arena that is open and shall stay so.
    #[must_use]
    pub fn try_take_lasting(&self, slices: usize, align: usize) -> Option<Span> {
        self.take_lasting(&self.read(), Region::existing()?, slices, align)
    }

    fn take_lasting(&self, list: &List, region: &Region, slices: usize, align: usize) -> Option<Span> {
        let lasting = || arenas(list).filter(|arena| !arena.draining.load(Relaxed));
        let take = |arena: &'static Arena| self.take_from(region, arena, slices, align);
        // What a device has not registered serves last.
        let registered =
            self.has_unregistered().then(|| lasting().filter(|arena| self.is_registered(arena)).find_map(take));
        registered.flatten().or_else(|| lasting().find_map(take))
    }

    /// Decides which arenas shall run empty: the beginning of a drain pass, since what is kept for later is sorted by it.
    pub fn choose_draining(&self) {
        let list = self.read();
        let live = || arenas(&list).filter(|arena| arena.word.state() == State::Live && !arena.word.is_kept());
        let taken: usize = live().map(Arena::taken_slices).sum();
        let mut room = 0;
        for arena in live() {
            arena.set_draining(room > taken / ROOM);
            room += arena.free_slices();
        }
    }

    /// Whether any arena of the process is draining: one load, for those who are in a hurry.
    #[inline(always)]
    #[must_use]
    pub fn may_drain() -> bool {
        DRAINING.load(Relaxed) != 0
    }

    /// Whether the span at `address`, which the caller holds, lies in an arena that shall run empty: then it is better given
    /// back than kept for later use.
    #[inline(always)]
    #[must_use]
    pub fn is_draining(address: usize) -> bool {
        Arenas::may_drain() && is_draining_there(address)
    }
}

#[cold]
#[inline(never)]
fn is_draining_there(address: usize) -> bool {
    Arena::of(address).is_some_and(|arena| arena.draining.load(Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arenas::LARGEST_STEP;
    use crate::{Access, Config, Policy, SLICE};

    /// A heap with an arena that is full, and four of which so many 32nds are taken, or a slice; their spans, lowest first,
    /// and how many slices an arena has.
    fn heap(part: usize) -> (Arenas, Vec<Span>, usize) {
        let heap =
            Arenas::new(Config { access: Access::default(), policy: Policy::Require, serves_children: false, tag: 6 });
        let whole = LARGEST_STEP / SLICE;
        assert_eq!(Arena::of(heap.take(whole, 1).unwrap().address).unwrap().slices(), whole);
        let mut spans: Vec<_> = (0..4).map(|_| heap.take(whole, 1).unwrap()).collect();
        spans.sort_unstable_by_key(|span| span.address);
        spans.iter_mut().for_each(|span| {
            span.slices = (whole * part / 32).max(1);
            assert!(heap.shrink(span.address, whole, span.slices));
        });
        (heap, spans, whole)
    }

    #[test]
    fn a_draining_arena_serves_before_another_is_opened_and_is_draining_no_more() {
        let (heap, spans, whole) = heap(0);
        let opened = heap.stats().opened;
        heap.choose_draining();
        let draining = || spans.iter().map(|span| Arenas::is_draining(span.address)).collect::<Vec<_>>();
        assert!(draining().iter().filter(|draining| **draining).count() >= 3 && draining()[3], "{:?}", draining());
        assert!(Arenas::may_drain());
        // All that has room and lasts is used up, then one of the others at a time; the lowest first.
        let mut more = Vec::new();
        while let Some(span) = heap.try_take_lasting(1, 1) {
            more.push(span);
            assert!(more.len() <= 2 * whole);
        }
        let before = draining();
        more.push(heap.take(1, 1).unwrap());
        let after = draining();
        let changed: Vec<_> = (0..4).filter(|index| before[*index] != after[*index]).collect();
        assert_eq!(changed, [before.iter().position(|draining| *draining).unwrap()]);
        assert_eq!(heap.stats().opened, opened);
        // When it is full, and all that is left is needed, nothing is draining.
        while let Ok(span) = heap.try_take(1, 1) {
            more.push(span);
        }
        heap.choose_draining();
        assert_eq!(draining(), [false; 4]);
        assert_eq!(heap.stats().opened, opened);
    }

    #[test]
    fn a_full_heap_has_nothing_to_drain_and_an_empty_one_keeps_its_lowest_arena() {
        let (heap, spans, whole) = heap(25);
        heap.choose_draining();
        assert!(spans.iter().all(|span| !Arenas::is_draining(span.address)), "a quarter has room only in all");
        spans.iter().for_each(|span| heap.give(span.address, span.slices));
        heap.choose_draining();
        let lasting = heap.try_take_lasting(1, 1).unwrap();
        assert!(lasting.address < spans[3].address + whole * SLICE);
        assert!(!Arenas::is_draining(lasting.address));
    }
}
