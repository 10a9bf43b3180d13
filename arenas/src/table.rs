//! Flat tables: one entry for each chunk or slice of the region, found by arithmetic. Uses `os`.
//!
//! A table is as long as the region needs and costs nothing until it is used: it is mapped read-only, so that any entry can be
//! read at any time (an untouched one is zero) without a fault and without commit charge, and the pages whose entries are
//! about to be written are opened by [`Table::commit`].

use crate::os::{self, Reserve};
use core::marker::PhantomData;
use core::ops::Range;
use std::io;

/// What may stand in a table.
///
/// # Safety
///
/// All bytes zero is a valid value, every change goes through atomics or `UnsafeCell` (so that a shared reference to an
/// entry, even in read-only memory, is always right to form), and it needs no drop.
pub(crate) unsafe trait Entry: Sync {}

// SAFETY: an atomic integer; zero is valid.
unsafe impl Entry for core::sync::atomic::AtomicU64 {}

/// One entry of type `T` for each of `len` places.
#[derive(Debug)]
pub(crate) struct Table<T> {
    base: *mut T,
    len: usize,
    entry: PhantomData<T>,
}

// SAFETY: a table only hands out shared references to `T: Sync`, and its mapping lives for ever.
unsafe impl<T: Entry> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Entry> Sync for Table<T> {}

impl<T: Entry> Table<T> {
    /// Reserves a table, for ever.
    pub(crate) fn reserve(len: usize) -> io::Result<Table<T>> {
        Table::reserve_as(len, Reserve::Zeros)
    }

    /// Reserves a table of which nobody reads an entry before it has been opened, so that it need not be readable: a program
    /// that locks its memory (`mlockall`) faults in what is, which took 10 s for 32 GiB of zeros.
    pub(crate) fn reserve_unreadable(len: usize) -> io::Result<Table<T>> {
        Table::reserve_as(len, Reserve::Nothing)
    }

    fn reserve_as(len: usize, how: Reserve) -> io::Result<Table<T>> {
        let page = os::page_size();
        let bytes = (len * size_of::<T>()).next_multiple_of(page);
        Ok(Table { base: os::reserve(bytes, page.max(align_of::<T>()), how)?.cast(), len, entry: PhantomData })
    }

    /// Gives it back after all, as what was to be made with it cannot be.
    pub(crate) fn give_back(self) {
        let bytes = (self.len * size_of::<T>()).next_multiple_of(os::page_size());
        // SAFETY: the mapping that `reserve_as` made; nobody has an entry, since only the table leads to one.
        unsafe { libc::munmap(self.base.cast(), bytes) };
    }

    /// The address of the first entry, for those who do the arithmetic themselves.
    pub(crate) fn base(&self) -> *mut T {
        self.base
    }

    /// How many entries it has.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Opens the entries of `range` for writing. What they hold stays.
    pub(crate) fn commit(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.len);
        let page = os::page_size();
        let from = range.start * size_of::<T>() / page * page;
        let to = (range.end * size_of::<T>()).next_multiple_of(page);
        // SAFETY: whole pages of the reservation, whose length was rounded up to a page.
        unsafe { os::open(self.base.cast::<u8>().add(from), to - from) }
    }

    /// Lets children of `fork` read zeros instead of the entries.
    pub(crate) fn wipe_on_fork(&self) {
        let bytes = (self.len * size_of::<T>()).next_multiple_of(os::page_size());
        // SAFETY: the whole reservation, private and anonymous.
        unsafe { os::wipe_on_fork(self.base.cast(), bytes) }
    }

    /// The entry at `index`. Writing needs [`commit`](Self::commit) first; so does reading where the table is unreadable.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> &T {
        debug_assert!(index < self.len);
        assert!(index < self.len);
        // SAFETY: in bounds of a mapping that lives for ever and is readable; `Entry` makes any content and any shared
        // reference valid.
        unsafe { &*self.base.add(index) }
    }
}

/// Two tables, or none.
pub(crate) fn both<A: Entry, B: Entry>(
    first: io::Result<Table<A>>,
    second: impl FnOnce() -> io::Result<Table<B>>,
) -> io::Result<(Table<A>, Table<B>)> {
    let first = first?;
    match second() {
        Ok(second) => Ok((first, second)),
        Err(error) => {
            first.give_back();
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn untouched_entries_read_as_zero_and_committed_ones_keep_what_is_written() {
        let table = Table::<AtomicU64>::reserve(1 << 30).unwrap();
        assert_eq!(table.get((1 << 30) - 1).load(Relaxed), 0);
        table.commit(1000..1001).unwrap();
        table.get(1000).store(5, Relaxed);
        table.commit(900..1100).unwrap();
        assert_eq!(table.get(1000).load(Relaxed), 5);
        assert_eq!(table.get(0).load(Relaxed), 0);
    }
}
