//! Marks of blocks, for the feature `hardened`: a word for each 32 bytes of the region, outside the arenas. Uses `table`.
//!
//! What they mean is the business of who hands out blocks. Without the feature there are none.

use crate::os;
use crate::region::CHUNK;
use crate::table::{Entry, Table};
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::io;

/// Bytes of memory for each mark. Blocks have at least so many, so no two begin in one.
pub const MARK_UNIT: usize = 32;

// SAFETY: an atomic integer; zero is valid.
unsafe impl Entry for AtomicU32 {}

/// `address of the mark of the region's first unit - 4 * (base >> 5)`, so that [`mark_of`] is a shift and an addition.
static MARKS: AtomicUsize = AtomicUsize::new(0);

/// The marks of a region.
#[derive(Debug)]
pub(crate) struct Marks(Table<AtomicU32>);

impl Marks {
    /// Reserves those of a region of so many bytes.
    pub(crate) fn reserve(len: usize) -> io::Result<Marks> {
        Table::reserve_unreadable(len / MARK_UNIT).map(Marks)
    }

    /// Says where the region begins, and that it is the process's.
    pub(crate) fn publish(&self, base: usize) {
        let first = base / MARK_UNIT * size_of::<AtomicU32>();
        MARKS.store(self.0.base().expose_provenance().wrapping_sub(first), Relaxed);
    }

    fn units(run: &Range<usize>) -> Range<usize> {
        run.start * (CHUNK / MARK_UNIT)..run.end * (CHUNK / MARK_UNIT)
    }

    /// Makes the marks of a run of chunks writable, before a block is taken from it.
    pub(crate) fn commit(&self, run: &Range<usize>) -> io::Result<()> {
        self.0.commit(Marks::units(run))
    }

    /// Takes the marks of a run of chunks away, after it was closed.
    pub(crate) fn forget(&self, run: &Range<usize>) {
        let units = Marks::units(run);
        // SAFETY: within the table; whole pages, since a chunk has 256 KiB of marks; never registered, and nobody's until the
        // chunks are another arena's.
        let _ = unsafe { os::purge(self.0.base().add(units.start).cast(), units.len() * size_of::<AtomicU32>()) };
    }
}

/// The mark for `address`: pure arithmetic.
///
/// # Safety
///
/// The address lies in an open arena.
#[inline]
#[must_use]
pub unsafe fn mark_of(address: usize) -> &'static AtomicU32 {
    let at = MARKS.load(Relaxed).wrapping_add(address / MARK_UNIT * size_of::<AtomicU32>());
    // SAFETY: the marks of such an arena were made readable and writable before it was opened, for as long as it is; the table
    // is never unmapped.
    unsafe { &*core::ptr::with_exposed_provenance::<AtomicU32>(at) }
}
