//! The one large address range in which all arenas lie, and the arithmetic from an address to its slice and chunk. Uses
//! `os`, `table` and `sync`.
//!
//! ```text
//! region   16 TiB of address space (less where it is limited), reserved at first use, never given back
//! chunk    2 MiB, the grain in which arenas are cut from the region, and of the tables of keys
//! slice    64 KiB, the grain in which an arena is cut into spans
//! ```
//!
//! Since the region is one range, "is this address ours" is one comparison, and what belongs to an address is found by a
//! shift and an index, with no search and no lock.

use crate::os::{self, Reserve};
use crate::sync::{Lock, Once};
use crate::table::{Entry, Table, both};
use core::cell::UnsafeCell;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::io;

/// Bytes in a slice: 64 KiB.
pub const SLICE: usize = 1 << SLICE_SHIFT;
/// log2 of [`SLICE`].
pub const SLICE_SHIFT: u32 = 16;
/// Bytes in a chunk: 2 MiB, a huge page of x86-64 and of arm64 with 4 KiB pages.
pub const CHUNK: usize = 1 << CHUNK_SHIFT;
/// log2 of [`CHUNK`].
pub const CHUNK_SHIFT: u32 = 21;
/// Slices in a chunk: 32, one bit each in a 32-bit word.
pub const SLICES_PER_CHUNK: usize = CHUNK / SLICE;
/// Bytes of out-of-line metadata for each slice: two cache lines.
pub const SLICE_META: usize = 128;

/// The largest region that is asked for: 16 of the 128 TiB that a process has.
const LARGEST: usize = 1 << 44;
/// The smallest region that is worth having.
const SMALLEST: usize = 1 << 25;
/// The alignment of a region that is not small, so that huge pages of every size may lie in it.
const ALIGN: usize = 1 << 30;

/// Metadata of a slice, for whoever holds the span in which the slice lies. Never in registered memory.
///
/// Zero before the first use of its slice; afterwards it keeps whatever the last holder left.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct SliceMeta(UnsafeCell<[u8; SLICE_META]>);

// SAFETY: bytes, reached only through raw pointers that the holder of the span answers for.
unsafe impl Sync for SliceMeta {}
// SAFETY: zero is valid, changes go through the UnsafeCell.
unsafe impl Entry for SliceMeta {}

/// What is known of a chunk. `used` and `touched` change only under the lock of their arena.
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    /// 1 + the first chunk of the arena that this chunk belongs to; 0: of none.
    owner: AtomicU32,
    /// In the first chunk of an arena: how many chunks it has.
    run: AtomicU32,
    /// A bit for each slice that is in a span.
    pub(crate) used: AtomicU32,
    /// A bit for each slice that may hold something else than zeros.
    pub(crate) touched: AtomicU32,
}

// SAFETY: atomics; zero is valid.
unsafe impl Entry for Chunk {}

/// The region. There is one in a process: [`Region::get`].
#[derive(Debug)]
pub(crate) struct Region {
    base: usize,
    len: usize,
    chunks: Table<Chunk>,
    meta: Table<SliceMeta>,
    #[cfg(feature = "hardened")]
    marks: crate::marks::Marks,
    pub(crate) free: Lock<Free>,
}

/// Every chunk below `low` is owned; none at or above `top` is.
#[derive(Debug)]
pub(crate) struct Free {
    low: usize,
    top: usize,
}

/// `address of the metadata of slice 0 - (base >> 16) * 128`, so that [`meta_of`] is a shift, a mask and an addition.
static META: AtomicUsize = AtomicUsize::new(0);
static REGION: Once<Region> = Once::new();
/// Held while the region is made.
pub(crate) static MAKING: &Lock<()> = &REGION.making;

impl Region {
    /// The region, reserved at the first call.
    ///
    /// # Errors
    ///
    /// When not even [`SMALLEST`] bytes of address space are to be had.
    pub(crate) fn get() -> io::Result<&'static Region> {
        REGION.get_or_make(Region::reserve)
    }

    /// The region, if it has been reserved.
    #[inline]
    pub(crate) fn existing() -> Option<&'static Region> {
        REGION.get()
    }

    fn reserve() -> io::Result<Region> {
        // Where address space is limited, the program needs some of it for itself: at most half is ours.
        let most = os::address_space_limit().map_or(LARGEST, |limit| (limit / 2).min(LARGEST as u64) as usize);
        let mut len = most / CHUNK * CHUNK;
        loop {
            match Region::reserve_exactly(len) {
                Err(_) if len > SMALLEST => len = len / 2 / CHUNK * CHUNK,
                result => return result,
            }
        }
    }

    fn reserve_exactly(len: usize) -> io::Result<Region> {
        // The alignment costs as much address space while it is made, so a small region has a small one.
        let align = ALIGN.min(1 << (len / 16).max(CHUNK).ilog2());
        let base = os::reserve(len, align, Reserve::Nothing)?;
        // Only arenas that are, or once were, open have metadata that anybody reads.
        let tables = both(Table::reserve(len / CHUNK), || Table::<SliceMeta>::reserve_unreadable(len / SLICE));
        #[cfg(feature = "hardened")]
        let tables = tables.and_then(|tables| match crate::marks::Marks::reserve(len) {
            Ok(marks) => Ok((tables, marks)),
            Err(error) => {
                tables.0.give_back();
                tables.1.give_back();
                Err(error)
            }
        });
        let tables = match tables {
            Ok(tables) => tables,
            Err(error) => {
                // SAFETY: the reservation made above, which nobody knows yet.
                unsafe { libc::munmap(base.cast(), len) };
                return Err(error);
            }
        };
        #[cfg(feature = "hardened")]
        let (tables, marks) = tables;
        let (chunks, meta) = tables;
        let base = base.expose_provenance();
        #[cfg(feature = "hardened")]
        marks.publish(base);
        META.store(meta.base().expose_provenance().wrapping_sub((base >> SLICE_SHIFT) * SLICE_META), Relaxed);
        Ok(Region {
            base,
            len,
            chunks,
            meta,
            #[cfg(feature = "hardened")]
            marks,
            free: Lock::new(Free { low: 0, top: 0 }),
        })
    }

    /// The first address.
    #[inline]
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Bytes in the region.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The index of the chunk that `address` lies in, if it is in the region.
    #[inline]
    pub(crate) fn chunk_of(&self, address: usize) -> Option<usize> {
        let offset = address.wrapping_sub(self.base);
        (offset < self.len).then_some(offset >> CHUNK_SHIFT)
    }

    /// What is known of a chunk.
    #[inline]
    pub(crate) fn chunk(&self, index: usize) -> &Chunk {
        self.chunks.get(index)
    }

    /// How many chunks the region has.
    pub(crate) fn chunks(&self) -> usize {
        self.len / CHUNK
    }

    /// The first chunk of the arena to which the chunk `index` belongs, if it belongs to one.
    #[inline]
    pub(crate) fn owner_of(&self, index: usize) -> Option<usize> {
        // Acquire: with the release in `take_run`, whoever finds the owner finds the arena written.
        (self.chunk(index).owner.load(core::sync::atomic::Ordering::Acquire) as usize).checked_sub(1)
    }

    /// The address of a slice.
    #[inline]
    pub(crate) fn slice_address(&self, slice: usize) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.base + (slice << SLICE_SHIFT))
    }

    /// Finds `count` free chunks, the first at a multiple of `align` chunks in the address space, lowest addresses first,
    /// and opens their entries in the tables. They are owned from [`own`](Self::own) on.
    ///
    /// `None`: the region has no such run. `Some(Err)`: no memory for the tables.
    pub(crate) fn take_run(&self, count: usize, align: usize) -> io::Result<Option<usize>> {
        let mut free = self.free.lock();
        let base = self.base >> CHUNK_SHIFT;
        let mut first = free.low;
        let first = loop {
            first = (base + first).next_multiple_of(align) - base;
            let Some(end) = first.checked_add(count).filter(|end| *end <= self.chunks()) else { return Ok(None) };
            let blocked = (first..end.min(free.top)).find_map(|chunk| self.owner_of(chunk));
            match blocked {
                None => break first,
                Some(owner) => first = owner + self.chunk(owner).run.load(Relaxed) as usize,
            }
        };
        let run = first..first + count;
        self.chunks.commit(run.clone())?;
        self.meta.commit(run.start * SLICES_PER_CHUNK..run.end * SLICES_PER_CHUNK)?;
        #[cfg(feature = "hardened")]
        self.marks.commit(&run)?;
        self.own(run.clone());
        if first == free.low {
            free.low = run.end;
        }
        free.top = free.top.max(run.end);
        Ok(Some(first))
    }

    fn own(&self, run: Range<usize>) {
        self.own_more(run.start, run);
    }

    /// Adds `more`, right behind what is owned already, to the run that begins at `first`.
    fn own_more(&self, first: usize, more: Range<usize>) {
        self.chunk(first).run.store((more.end - first) as u32, Relaxed);
        for chunk in more.map(|index| self.chunk(index)) {
            chunk.used.store(0, Relaxed);
            chunk.touched.store(0, Relaxed);
            chunk.owner.store(1 + first as u32, core::sync::atomic::Ordering::Release);
        }
    }

    /// Adds `count` chunks to the end of a run, if they are free, as [`take_run`](Self::take_run) would have.
    pub(crate) fn extend_run(&self, run: Range<usize>, count: usize) -> Option<()> {
        let mut free = self.free.lock();
        let more = run.end..run.end.checked_add(count).filter(|end| *end <= self.chunks())?;
        if more.clone().any(|chunk| self.owner_of(chunk).is_some()) {
            return None;
        }
        self.chunks.commit(more.clone()).ok()?;
        self.meta.commit(more.start * SLICES_PER_CHUNK..more.end * SLICES_PER_CHUNK).ok()?;
        #[cfg(feature = "hardened")]
        self.marks.commit(&more).ok()?;
        self.own_more(run.start, more.clone());
        if free.low == more.start {
            free.low = more.end;
        }
        free.top = free.top.max(more.end);
        Some(())
    }

    /// Undoes [`extend_run`](Self::extend_run): `more` is given back, `run` is what is left.
    pub(crate) fn shorten_run(&self, run: Range<usize>, more: Range<usize>) {
        self.chunk(run.start).run.store(run.len() as u32, Relaxed);
        self.give_run(more);
    }

    /// All runs that are taken, lowest first.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let (mut at, top) = (0, self.free.lock().top);
        core::iter::from_fn(move || {
            let first = (at..top).find_map(|chunk| self.owner_of(chunk))?;
            at = first + self.chunk(first).run.load(Relaxed) as usize;
            Some(first..at)
        })
    }

    /// Gives a run back, whose memory is closed.
    pub(crate) fn give_run(&self, run: Range<usize>) {
        #[cfg(feature = "hardened")]
        self.marks.forget(&run);
        let mut free = self.free.lock();
        for chunk in run.clone().map(|index| self.chunk(index)) {
            chunk.owner.store(0, Relaxed);
        }
        free.low = free.low.min(run.start);
        if free.top == run.end {
            free.top = run.start;
        }
    }
}

/// The metadata of the slice in which `address` lies: pure arithmetic.
///
/// The pointer is good to follow when the address lies in an arena that is, or once was, open.
#[inline(always)]
#[must_use]
pub fn meta_of(address: usize) -> *mut SliceMeta {
    let offset = (address >> SLICE_SHIFT).wrapping_mul(SLICE_META);
    core::ptr::with_exposed_provenance_mut(META.load(Relaxed).wrapping_add(offset))
}

/// The address where a slice begins, from the address of its metadata: the inverse of [`meta_of`].
#[inline(always)]
#[must_use]
pub fn slice_of(meta: *const SliceMeta) -> usize {
    (meta.addr().wrapping_sub(META.load(Relaxed)) / SLICE_META) << SLICE_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_outside_the_region_have_no_chunk() {
        let region = Region::get().unwrap();
        let local = 0;
        for foreign in [0, 1, usize::MAX, region.base - 1, region.base + region.len, (&raw const local).addr()] {
            assert_eq!(region.chunk_of(foreign), None, "{foreign:#x}");
        }
        assert_eq!(region.chunk_of(region.base), Some(0));
        assert_eq!(region.chunk_of(region.base + region.len - 1), Some(region.chunks() - 1));
    }

    #[test]
    fn runs_are_aligned_apart_and_reused_lowest_first() {
        let region = Region::reserve_exactly(1 << 30).unwrap();
        let a = region.take_run(3, 1).unwrap().unwrap();
        let b = region.take_run(5, 8).unwrap().unwrap();
        let c = region.take_run(1, 1).unwrap().unwrap();
        assert_eq!((a, c), (0, 3));
        assert_eq!((region.base + b * CHUNK) % (8 * CHUNK), 0);
        assert_eq!(region.owner_of(b + 4), Some(b));
        assert_eq!(region.owner_of(b + 5), None);
        region.give_run(a..a + 3);
        assert_eq!(region.owner_of(a), None);
        assert_eq!(region.take_run(3, 1).unwrap(), Some(a));
        assert_eq!(region.take_run(region.chunks(), 1).unwrap(), None);
        let rest = region.take_run(region.chunks() - 13, 1).unwrap();
        assert_eq!(rest, Some(13));
        assert_eq!(region.take_run(4, 1).unwrap(), Some(4));
        assert_eq!(region.take_run(1, 1).unwrap(), None);
    }

    #[test]
    fn a_run_grows_into_what_is_free_behind_it_and_no_further() {
        let region = Region::reserve_exactly(1 << 30).unwrap();
        let a = region.take_run(3, 1).unwrap().unwrap();
        let b = region.take_run(4, 1).unwrap().unwrap();
        assert_eq!(region.extend_run(a..a + 3, 1), None);
        region.give_run(b..b + 4);
        assert_eq!(region.extend_run(a..a + 3, 2), Some(()));
        assert_eq!((region.owner_of(a + 4), region.owner_of(a + 5)), (Some(a), None));
        assert_eq!(region.take_run(2, 1).unwrap(), Some(a + 5));
        assert_eq!(region.extend_run(a..a + 5, 1), None);
        assert_eq!(region.extend_run(a + 5..a + 7, region.chunks()), None, "beyond the region");
        region.shorten_run(a..a + 3, a + 3..a + 5);
        assert_eq!(region.take_run(2, 1).unwrap(), Some(a + 3));
    }

    #[test]
    fn metadata_and_slices_are_found_from_each_other() {
        let region = Region::get().unwrap();
        let address = region.base() + 77 * SLICE + 5;
        assert_eq!(slice_of(meta_of(address)), region.base() + 77 * SLICE);
        assert_ne!(meta_of(address).addr(), meta_of(address + SLICE).addr());
    }
}
