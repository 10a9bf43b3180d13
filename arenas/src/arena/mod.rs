//! One arena: a run of chunks that is mapped as one piece and registered as one piece (or a few, where a device limits the
//! length), its state and its bitmap of slices. Uses `region`, `sync` and `word`.
//!
//! An arena's description lies in a table, at the index of its first chunk; so it is found from any address in the arena, and
//! never goes away, only vacant.

mod word;

use crate::numa::Placed;
use crate::pages::{Fallback, Pages};
use crate::region::{CHUNK, Region, SLICES_PER_CHUNK};
use crate::sync::{Lock, Once};
use crate::table::{Entry, Table};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::io;
pub use word::State;
pub(crate) use word::Word;

/// The longest piece in which memory is registered, unless a device wants shorter ones: 1 GiB, which is io_uring's limit.
/// Blocks that are no longer never cross a multiple of it, so that a device with this limit may come at any time.
pub(crate) const PIECE: usize = 1 << 30;

/// The tag of the global heap's arenas.
pub(crate) const GLOBAL_TAG: u32 = 0;

/// How far around freed slices is looked, at most, for what else is free: 64 MiB, 32 words of the bitmap.
const LOOK_AROUND: usize = 1024;

/// The description of an arena.
#[derive(Debug)]
pub(crate) struct Arena {
    /// State, pin, purgers, live spans.
    pub(crate) word: Word,
    /// A bit for each device slot with which the arena is registered. Changes only under the heap's role.
    pub(crate) registered: AtomicU64,
    /// How many slices are free, for those who choose an arena; exact only under `search`.
    free: AtomicUsize,
    /// How many free slices may hold something else than zeros: what a purge would give back.
    dirty: AtomicUsize,
    /// No run of free slices is longer than this; spares those who choose an arena a vain search. Changes under `search`.
    longest: AtomicUsize,
    /// The lowest slice that may be free. Holding it, one may change the bitmaps.
    pub(crate) search: Lock<usize>,
    /// First chunk.
    first: AtomicU32,
    /// Number of chunks. Grows only, under the heap's role and `search`, while the arena is Live.
    chunks: AtomicU32,
    /// Since when it has no span, in nanoseconds of its heap's clock; means something only then.
    pub(crate) empty_since: AtomicU64,
    /// Since when many of its free slices are dirty, or when they were purged last; likewise. 0: they were never many.
    pub(crate) dirty_since: AtomicU64,
    /// The next arena of the heap: 1 + its first chunk, 0 at the end. Guarded by the heap's list lock.
    pub(crate) next: AtomicU32,
    /// Whose arena it is.
    tag: AtomicU32,
    /// Whether devices may write it, as its heap was made. Written by `prepare`.
    writable: AtomicBool,
    /// What pages it has, as a number of [`Pages`], and why, as one of [`Fallback`]. Written when it is opened.
    pages: AtomicU32,
    fallback: AtomicU32,
    /// Where it was placed, as a number of [`Placed`]. Changes under the heap's role.
    placed: AtomicU64,
    /// Whether it shall run empty: a hint for those who choose an arena.
    pub(crate) draining: AtomicBool,
}

// SAFETY: atomics, and a lock of which all-zero bytes are a valid open one, with the value 0; nothing to drop.
unsafe impl Entry for Arena {}

static TABLE: Once<Table<Arena>> = Once::new();
/// Held while the table is made.
pub(crate) static MAKING: &Lock<()> = &TABLE.making;

/// The place in `arenas` where an address is: the arena's description, found by a chunk of its.
fn table() -> io::Result<&'static Table<Arena>> {
    TABLE.get_or_make(|| Table::reserve(Region::get()?.chunks()))
}

impl Arena {
    /// The arena whose first chunk is `first`. Vacant if there is none.
    pub(crate) fn at(first: usize) -> &'static Arena {
        match table() {
            Ok(table) => table.get(first),
            // A chunk has an owner only once `prepare` has had the table.
            Err(_) => unreachable!(),
        }
    }

    /// The same, unless there is no table yet.
    pub(crate) fn existing(first: usize) -> Option<&'static Arena> {
        TABLE.get().map(|table| table.get(first))
    }

    /// The arena in which `address` lies.
    pub(crate) fn of(address: usize) -> Option<&'static Arena> {
        let region = Region::existing()?;
        region.owner_of(region.chunk_of(address)?).map(Arena::at)
    }

    /// Makes a description for the chunks of `run`, which the caller has taken from the region.
    pub(crate) fn prepare(run: Range<usize>, tag: u32, writable: bool) -> io::Result<&'static Arena> {
        table()?.commit(run.start..run.start + 1)?;
        let arena = Arena::at(run.start);
        assert!(arena.word.begin_open(), "chunks were handed out twice");
        *arena.search.lock() = 0;
        arena.first.store(run.start as u32, Relaxed);
        arena.chunks.store(run.len() as u32, Relaxed);
        arena.tag.store(tag, Relaxed);
        arena.writable.store(writable, Relaxed);
        arena.registered.store(0, Relaxed);
        arena.dirty.store(0, Relaxed);
        arena.dirty_since.store(0, Relaxed);
        arena.free.store(arena.slices(), Relaxed);
        arena.longest.store(arena.slices(), Relaxed);
        Ok(arena)
    }

    /// Whether devices may write it; of use to who has a block in it.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable.load(Relaxed)
    }

    /// What pages it has, and why it has no others.
    pub(crate) fn pages(&self) -> (Pages, Option<Fallback>) {
        (Pages::from_number(self.pages.load(Relaxed) as u8), Fallback::from_number(self.fallback.load(Relaxed)))
    }

    /// Sets what it has. By who opens it.
    pub(crate) fn set_pages(&self, pages: Pages, fallback: Option<Fallback>) {
        self.pages.store(pages as u32, Relaxed);
        self.fallback.store(Fallback::number(fallback), Relaxed);
    }

    /// Where it was placed.
    pub(crate) fn placed(&self) -> Placed {
        Placed::from_number(self.placed.load(Relaxed))
    }

    /// Sets where it was placed. By who has the heap's role.
    pub(crate) fn set_placed(&self, placed: Placed) {
        self.placed.store(placed.number(), Relaxed);
    }

    /// Makes it longer by so many chunks, which are open. Under the heap's role.
    pub(crate) fn extend(&self, chunks: usize) {
        let _lowest = self.search.lock();
        self.chunks.fetch_add(chunks as u32, Relaxed);
        self.free.fetch_add(chunks * SLICES_PER_CHUNK, Relaxed);
        self.longest.store(self.slices(), Relaxed);
    }

    /// Its chunks.
    pub(crate) fn run(&self) -> Range<usize> {
        let first = self.first.load(Relaxed) as usize;
        first..first + self.chunks.load(Relaxed) as usize
    }

    /// Its addresses.
    pub(crate) fn memory(&self, region: &Region) -> Range<usize> {
        let run = self.run();
        region.base() + run.start * CHUNK..region.base() + run.end * CHUNK
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.chunks.load(Relaxed) as usize * CHUNK
    }

    /// How many slices it has.
    pub(crate) fn slices(&self) -> usize {
        self.chunks.load(Relaxed) as usize * SLICES_PER_CHUNK
    }

    /// About how many slices are free.
    pub(crate) fn free_slices(&self) -> usize {
        self.free.load(Relaxed)
    }

    /// About how many slices are in spans.
    pub(crate) fn taken_slices(&self) -> usize {
        // The arena may be growing.
        self.slices().saturating_sub(self.free_slices())
    }

    /// About how many free slices a purge would give back.
    pub(crate) fn dirty_slices(&self) -> usize {
        self.dirty.load(Relaxed)
    }

    /// Whose arena it is.
    pub(crate) fn tag(&self) -> u32 {
        self.tag.load(Relaxed)
    }

    /// Takes `count` slices at a multiple of `align` slices in the address space (a power of two), not across a multiple of
    /// `piece` bytes from the arena's begin. Returns the first, as an index in the region, and whether all of it is still
    /// zero. Lowest addresses first, so that the high ones run empty.
    ///
    /// The caller has counted a live span.
    pub(crate) fn claim(&self, region: &Region, count: usize, align: usize, piece: usize) -> Option<(usize, bool)> {
        let piece = piece / crate::SLICE;
        if self.free_slices() < count || count <= piece && self.longest.load(Relaxed) < count {
            return None;
        }
        let mut lowest = self.search.lock();
        let bits = self.bits(region);
        *lowest = bits.next(*lowest, bits.slices, false);
        let Some(start) = bits.find_run(*lowest, count, align, piece) else {
            // Longer ones do not fit either. (Those longer than a piece are free to cross one.)
            if align == 1 && count <= piece {
                self.longest.fetch_min(count - 1, Relaxed);
            }
            return None;
        };
        Some((bits.first + start, self.mark(&bits, start..start + count)))
    }

    /// Takes the slices from `range.start` to `range.end` (indices in the region) if all are free and the arena's; returns
    /// whether they are still zero. The caller holds a span that ends at `range.start`.
    pub(crate) fn claim_exactly(&self, region: &Region, range: Range<usize>) -> Option<bool> {
        let _lowest = self.search.lock();
        let bits = self.bits(region);
        let range = range.start - bits.first..range.end - bits.first;
        let free = range.end <= bits.slices && bits.next(range.start, range.end, true) == range.end;
        free.then(|| self.mark(&bits, range))
    }

    /// Marks free slices as used and touched; returns whether all were untouched. Under the lock.
    fn mark(&self, bits: &Bits<'_>, range: Range<usize>) -> bool {
        let touched = bits.count_touched(range.clone());
        bits.set_used(range.clone(), true);
        bits.set_touched(range.clone(), true);
        self.free.fetch_sub(range.len(), Relaxed);
        self.dirty.fetch_sub(touched, Relaxed);
        touched == 0
    }

    /// Frees slices. The caller's span is still counted, and is uncounted afterwards.
    pub(crate) fn free(&self, region: &Region, range: Range<usize>) {
        let mut lowest = self.search.lock();
        let bits = self.bits(region);
        let range = range.start - bits.first..range.end - bits.first;
        debug_assert_eq!(bits.next(range.start, range.end, false), range.end, "freed a slice that was free");
        self.unmark(&bits, &mut lowest, range.clone());
        self.dirty.fetch_add(range.len(), Relaxed);
    }

    /// Marks slices as free. Under the lock.
    fn unmark(&self, bits: &Bits<'_>, lowest: &mut usize, range: Range<usize>) {
        bits.set_used(range.clone(), false);
        *lowest = (*lowest).min(range.start);
        self.free.fetch_add(range.len(), Relaxed);
        let longest = self.longest.load(Relaxed);
        if longest >= bits.slices {
            return;
        }
        // What is free around them makes one run with them. Where it may be long, a search is no worse than looking here.
        let fits = longest <= LOOK_AROUND && {
            let end = bits.next(range.end, bits.slices.min(range.start + longest + 1), true);
            end - bits.after_last_used(range.start, end.saturating_sub(longest + 1)) <= longest
        };
        if !fits {
            self.longest.store(bits.slices, Relaxed);
        }
    }

    /// Calls `purge` with each run of free, touched slices (indices in the region), which belong to the callee until it
    /// returns whether they are zero now. The caller counts as a purger of the arena. Returns how many became zero.
    pub(crate) fn purge(&self, region: &Region, mut purge: impl FnMut(Range<usize>) -> bool) -> usize {
        let (mut from, mut purged) = (0, 0);
        loop {
            let lowest = self.search.lock();
            let bits = self.bits(region);
            let Some(run) = bits.next_dirty(from) else { return purged };
            bits.set_used(run.clone(), true);
            self.free.fetch_sub(run.len(), Relaxed);
            self.dirty.fetch_sub(run.len(), Relaxed);
            // No system call under the lock.
            drop(lowest);
            let zero = purge(bits.first + run.start..bits.first + run.end);
            let mut lowest = self.search.lock();
            // Anew, as the arena may be longer now.
            let bits = self.bits(region);
            self.unmark(&bits, &mut lowest, run.clone());
            if zero {
                bits.set_touched(run.clone(), false);
                purged += run.len();
            } else {
                self.dirty.fetch_add(run.len(), Relaxed);
            }
            from = run.end;
        }
    }

    fn bits<'a>(&self, region: &'a Region) -> Bits<'a> {
        let run = self.run();
        Bits { region, chunk: run.start, first: run.start * SLICES_PER_CHUNK, slices: run.len() * SLICES_PER_CHUNK }
    }
}

/// The bitmaps of an arena; slices are counted from its begin here.
struct Bits<'a> {
    region: &'a Region,
    chunk: usize,
    first: usize,
    slices: usize,
}

impl Bits<'_> {
    /// The words that hold `range`, each with the mask of its bits in it.
    fn words(&self, range: Range<usize>) -> impl Iterator<Item = (&crate::region::Chunk, u32)> {
        let mut at = range.start;
        core::iter::from_fn(move || {
            let chunk = at / SLICES_PER_CHUNK;
            let end = range.end.min((chunk + 1) * SLICES_PER_CHUNK);
            let count = end.checked_sub(at).filter(|count| *count > 0)?;
            let mask = (u32::MAX >> (32 - count)) << (at % SLICES_PER_CHUNK);
            at = end;
            Some((self.region.chunk(self.chunk + chunk), mask))
        })
    }

    fn set_used(&self, range: Range<usize>, to: bool) {
        for (chunk, mask) in self.words(range) {
            set(&chunk.used, mask, to);
        }
    }

    fn set_touched(&self, range: Range<usize>, to: bool) {
        for (chunk, mask) in self.words(range) {
            set(&chunk.touched, mask, to);
        }
    }

    fn count_touched(&self, range: Range<usize>) -> usize {
        self.words(range).map(|(chunk, mask)| (chunk.touched.load(Relaxed) & mask).count_ones() as usize).sum()
    }

    /// The first of `count` free slices from `from` on, at a multiple of `align` slices in the address space and not across
    /// a multiple of `piece`, unless `count` is more.
    fn find_run(&self, from: usize, count: usize, align: usize, piece: usize) -> Option<usize> {
        let base = self.region.base() / crate::SLICE + self.first;
        let mut from = from;
        loop {
            let mut start = (base + from).next_multiple_of(align) - base;
            // Asked before the piece is: perhaps no multiple of the alignment has a piece's worth behind it.
            if start + count > self.slices {
                return None;
            }
            if count <= piece && start / piece != (start + count - 1) / piece {
                // A multiple of `piece` is one of `align` too, unless the alignment is the larger one; then look again.
                start = start.next_multiple_of(piece);
                if !(base + start).is_multiple_of(align) {
                    from = start;
                    continue;
                }
            }
            if start + count > self.slices {
                return None;
            }
            let blocked = self.next(start, start + count, true);
            if blocked == start + count {
                return Some(start);
            }
            from = self.next(blocked, self.slices, false);
        }
    }

    /// Where the free slices that end at `end` begin; not before `from`.
    fn after_last_used(&self, end: usize, from: usize) -> usize {
        let mut at = end;
        while at > from {
            let (chunk, count) = ((at - 1) / SLICES_PER_CHUNK, (at - 1) % SLICES_PER_CHUNK + 1);
            // The slices of the chunk before `at`, the last of them in the highest bit.
            let bits = self.region.chunk(self.chunk + chunk).used.load(Relaxed) << (SLICES_PER_CHUNK - count);
            if bits != 0 {
                return from.max(at - bits.leading_zeros() as usize);
            }
            at -= count;
        }
        from
    }

    /// The first slice from `from` on that is `used` (or free), `end` if there is none before it.
    fn next(&self, from: usize, end: usize, used: bool) -> usize {
        self.find(from, end, |chunk| {
            let word = chunk.used.load(Relaxed);
            if used { word } else { !word }
        })
    }

    /// The first run from `from` on that is free and touched.
    fn next_dirty(&self, from: usize) -> Option<Range<usize>> {
        let dirty = |chunk: &crate::region::Chunk| !chunk.used.load(Relaxed) & chunk.touched.load(Relaxed);
        let start = self.find(from, self.slices, dirty);
        (start < self.slices).then(|| start..self.find(start, self.slices, |chunk| !dirty(chunk)))
    }

    fn find(&self, from: usize, end: usize, word: impl Fn(&crate::region::Chunk) -> u32) -> usize {
        let mut at = from;
        while at < end {
            let bits = word(self.region.chunk(self.chunk + at / SLICES_PER_CHUNK)) >> (at % SLICES_PER_CHUNK);
            if bits != 0 {
                return end.min(at + bits.trailing_zeros() as usize);
            }
            at = (at / SLICES_PER_CHUNK + 1) * SLICES_PER_CHUNK;
        }
        end
    }
}

/// Changes bits of a word that only the holder of the arena's lock changes.
fn set(word: &AtomicU32, mask: u32, to: bool) {
    let old = word.load(Relaxed);
    word.store(if to { old | mask } else { old & !mask }, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SLICE;

    fn arena(chunks: usize) -> (&'static Region, &'static Arena) {
        let region = Region::get().unwrap();
        let first = region.take_run(chunks, 1).unwrap().unwrap();
        (region, Arena::prepare(first..first + chunks, 0, true).unwrap())
    }

    #[test]
    fn claims_are_apart_aligned_and_lowest_first() {
        let (region, arena) = arena(4);
        let first = arena.run().start * SLICES_PER_CHUNK;
        let slot = |at: Option<(usize, bool)>| at.map(|(slice, _)| slice - first);
        assert_eq!(slot(arena.claim(region, 3, 1, PIECE)), Some(0));
        assert_eq!(slot(arena.claim(region, 40, 1, PIECE)), Some(3));
        assert_eq!(slot(arena.claim(region, 16, 16, PIECE)), Some(48));
        assert_eq!(slot(arena.claim(region, 5, 1, PIECE)), Some(43));
        assert_eq!(arena.free_slices(), 128 - 64);
        arena.free(region, first..first + 3);
        assert_eq!(slot(arena.claim(region, 4, 1, PIECE)), Some(64));
        assert_eq!(slot(arena.claim(region, 3, 1, PIECE)), Some(0));
        assert_eq!(slot(arena.claim(region, 60, 1, PIECE)), Some(68));
        assert_eq!(arena.free_slices(), 0);
        assert_eq!(arena.claim(region, 1, 1, PIECE), None);
    }

    #[test]
    fn no_claim_crosses_a_piece_unless_it_is_longer() {
        let (region, arena) = arena(4);
        let first = arena.run().start * SLICES_PER_CHUNK;
        let piece = 32 * SLICE;
        assert_eq!(arena.claim(region, 20, 1, piece), Some((first, true)));
        assert_eq!(arena.claim(region, 20, 1, piece), Some((first + 32, true)));
        assert_eq!(arena.claim(region, 12, 1, piece), Some((first + 20, true)));
        assert_eq!(arena.claim(region, 13, 1, piece), Some((first + 64, true)));
        assert_eq!(arena.claim(region, 40, 1, piece), Some((first + 77, true)));
    }

    #[test]
    fn a_claim_that_fits_no_piece_at_its_alignment_ends() {
        let region = Region::get().unwrap();
        let first = region.take_run(9, 2).unwrap().unwrap() + 1;
        let arena = Arena::prepare(first..first + 8, 0, true).unwrap();
        // Two chunks, aligned to two, in an arena that begins between: each multiple of the alignment is amid a piece.
        let align = 2 * SLICES_PER_CHUNK;
        assert_eq!(arena.claim(region, align, align, align * SLICE), None);
        assert!(arena.claim(region, align / 2, align, align * SLICE).is_some());
    }

    #[test]
    fn only_untouched_slices_are_called_zero() {
        let (region, arena) = arena(1);
        let (slice, zero) = arena.claim(region, 4, 1, PIECE).unwrap();
        assert!(zero);
        arena.free(region, slice..slice + 4);
        assert_eq!(arena.dirty_slices(), 4);
        assert_eq!(arena.claim(region, 6, 1, PIECE), Some((slice, false)));
        arena.free(region, slice..slice + 6);
        let mut runs = Vec::new();
        let purged = arena.purge(region, |run| {
            assert_eq!(arena.claim(region, 27, 1, PIECE), None, "slices under purge are handed out");
            runs.push(run);
            true
        });
        assert_eq!((purged, runs.len(), runs[0].clone()), (6, 1, slice..slice + 6));
        assert_eq!(arena.dirty_slices(), 0);
        assert_eq!(arena.claim(region, 6, 1, PIECE), Some((slice, true)));
    }

    #[test]
    fn room_is_found_again_however_it_came_to_be() {
        let (region, arena) = arena(4);
        let first = arena.run().start * SLICES_PER_CHUNK;
        // Every order in which the three between two taken slices are freed, across a chunk's end, and by a purge.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]] {
            assert_eq!(arena.claim(region, 128, 1, PIECE).map(|(slice, _)| slice), Some(first));
            for (number, slice) in order.into_iter().map(|slice| first + 31 + slice).enumerate() {
                assert_eq!(arena.claim(region, number + 1, 1, PIECE), None, "{number} of {order:?}");
                arena.free(region, slice..slice + 1);
            }
            assert_eq!(arena.claim(region, 4, 1, PIECE), None);
            assert_eq!(arena.claim(region, 3, 1, PIECE), Some((first + 31, false)));
            arena.free(region, first + 31..first + 34);
            arena.purge(region, |run| {
                assert_eq!(arena.claim(region, 1, 1, PIECE), None, "{run:?} is under purge");
                true
            });
            assert_eq!(arena.claim(region, 3, 1, PIECE), Some((first + 31, true)));
            arena.free(region, first..first + 128);
        }
    }

    #[test]
    fn growing_takes_exactly_the_free_neighbours() {
        let (region, arena) = arena(1);
        let (slice, _) = arena.claim(region, 4, 1, PIECE).unwrap();
        let (other, _) = arena.claim(region, 4, 1, PIECE).unwrap();
        assert_eq!(arena.claim_exactly(region, slice + 4..slice + 5), None);
        assert_eq!(arena.claim_exactly(region, other + 4..slice + 32), Some(true));
        assert_eq!(arena.claim_exactly(region, slice + 32..slice + 33), None, "past the end");
    }
}
