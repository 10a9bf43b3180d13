//! Links of free blocks, outside the blocks. Uses `table`, `region` and `sync`.
//!
//! In a heap whose memory peers can write, nothing that the allocator trusts may lie in it. So the links between free blocks of
//! such a heap are kept here: two bytes for each 64 of the region, at a place that follows from the block's address; and those of
//! a heap whose free memory is zero. Other heaps have no use for this, and the table is only reserved once a heap has.

use crate::os;
use crate::region::{CHUNK, Region};
use crate::sync::{Lock, Once};
use crate::table::{Entry, Table};
use core::ops::Range;
use core::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::io;

/// Bytes of memory for each link: the smallest block, and the alignment of all blocks, where links are kept outside.
pub const LINK_UNIT: usize = 64;

// SAFETY: an atomic integer; zero is valid.
unsafe impl Entry for AtomicU16 {}

/// `address of the link of the region's first unit - 2 * (base >> 6)`, so that [`link_of`] is a shift and an addition.
static LINKS: AtomicUsize = AtomicUsize::new(0);

static TABLE: Once<Table<AtomicU16>> = Once::new();
/// Held while the table is made.
pub(crate) static MAKING: &Lock<()> = &TABLE.making;

fn table() -> io::Result<&'static Table<AtomicU16>> {
    TABLE.get_or_make(|| {
        let region = Region::get()?;
        let table = Table::<AtomicU16>::reserve_unreadable(region.len() / LINK_UNIT)?;
        let first = region.base() / LINK_UNIT * size_of::<AtomicU16>();
        LINKS.store(table.base().expose_provenance().wrapping_sub(first), Relaxed);
        Ok(table)
    })
}

/// The units of a run of chunks, as indices of the table.
fn units(run: &Range<usize>) -> Range<usize> {
    run.start * (CHUNK / LINK_UNIT)..run.end * (CHUNK / LINK_UNIT)
}

/// Makes the links of an arena's chunks writable, before a block is taken from it.
pub(crate) fn prepare(run: &Range<usize>) -> io::Result<()> {
    table()?.commit(units(run))
}

/// Gives the pages of the links of an arena's chunks back, after it was closed.
pub(crate) fn forget(run: &Range<usize>) {
    if let Some(table) = TABLE.get() {
        let units = units(run);
        // SAFETY: within the table; whole pages, since a chunk has 64 KiB of links; never registered, and nobody's until the
        // chunks are another arena's.
        let _ = unsafe { os::purge(table.base().add(units.start).cast(), units.len() * size_of::<AtomicU16>()) };
    }
}

/// The link of the block at `address`: pure arithmetic.
///
/// # Safety
///
/// The address is a multiple of [`LINK_UNIT`] in an open arena of a heap that
/// [has its links outside](crate::Arenas::has_links_outside).
#[inline]
#[must_use]
pub unsafe fn link_of(address: usize) -> &'static AtomicU16 {
    let at = LINKS.load(Relaxed).wrapping_add(address / LINK_UNIT * size_of::<AtomicU16>());
    // SAFETY: `prepare` made the links of such an arena readable and writable, for as long as it is open; the table is never
    // unmapped.
    unsafe { &*core::ptr::with_exposed_provenance::<AtomicU16>(at) }
}
