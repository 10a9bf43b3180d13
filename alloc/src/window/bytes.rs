//! Copying out of and into memory that peers change at any time: nothing here makes a reference to it.
//!
//! Reads and writes are volatile, in ascending order, whole words where both ends allow. What another machine writes meanwhile
//! may be seen in part; a word of 8 bytes that is aligned is seen whole (`load_u64`).

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes were asked for that do not lie in what is exposed, or a word that is not aligned to its 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfRange {
    /// Where they would begin.
    pub offset: usize,
    /// How many they are.
    pub wanted: usize,
    /// How many there are in all.
    pub len: usize,
}

impl fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, wanted, len } = self;
        write!(
            f,
            "{wanted} bytes at {offset} do not lie in the {len} that are exposed, or are a word that is not aligned"
        )
    }
}

impl std::error::Error for OutOfRange {}

/// Memory that others change.
#[derive(Clone, Copy)]
pub(super) struct Bytes {
    start: *mut u8,
    len: usize,
}

impl Bytes {
    /// # Safety
    ///
    /// While the value is used, the `len` bytes at `start` are initialised, may be read and written, and nobody has a reference
    /// to them. Whoever calls its methods sees to it that no thread of this program writes while another reads or writes.
    pub(super) unsafe fn new(start: *mut u8, len: usize) -> Bytes {
        Bytes { start, len }
    }

    fn at(self, offset: usize, wanted: usize) -> Result<*mut u8, OutOfRange> {
        match offset.checked_add(wanted) {
            // SAFETY: within the bytes.
            Some(end) if end <= self.len => Ok(unsafe { self.start.add(offset) }),
            _ => Err(OutOfRange { offset, wanted, len: self.len }),
        }
    }

    pub(super) fn read(self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        let from = self.at(offset, to.len())?;
        let head = from.align_offset(8).min(to.len());
        let (first, rest) = to.split_at_mut(head);
        let (words, last) = rest.as_chunks_mut::<8>();
        let tail = head + words.len() * 8;
        // SAFETY: all within `at`, words aligned, by what `new` was promised.
        unsafe {
            first.iter_mut().enumerate().for_each(|(n, byte)| *byte = from.add(n).read_volatile());
            let middle = from.add(head).cast::<u64>();
            words.iter_mut().enumerate().for_each(|(n, word)| *word = middle.add(n).read_volatile().to_ne_bytes());
            last.iter_mut().enumerate().for_each(|(n, byte)| *byte = from.add(tail + n).read_volatile());
        }
        Ok(())
    }

    pub(super) fn write(self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        let to = self.at(offset, from.len())?;
        let head = to.align_offset(8).min(from.len());
        let (first, rest) = from.split_at(head);
        let (words, last) = rest.as_chunks::<8>();
        let tail = head + words.len() * 8;
        // SAFETY: all within `at`, words aligned, by what `new` was promised.
        unsafe {
            first.iter().enumerate().for_each(|(n, byte)| to.add(n).write_volatile(*byte));
            let middle = to.add(head).cast::<u64>();
            words.iter().enumerate().for_each(|(n, word)| middle.add(n).write_volatile(u64::from_ne_bytes(*word)));
            last.iter().enumerate().for_each(|(n, byte)| to.add(tail + n).write_volatile(*byte));
        }
        Ok(())
    }

    /// The word at `offset`, as an atomic: what was read from it happened before what the caller reads next (acquire), what the
    /// caller wrote before is there first (release).
    pub(super) fn word(&self, offset: usize) -> Result<&AtomicU64, OutOfRange> {
        let at = self.at(offset, 8)?;
        if !at.addr().is_multiple_of(8) {
            return Err(OutOfRange { offset, wanted: 8, len: self.len });
        }
        // SAFETY: aligned and within the bytes; an atomic may change beneath its reference.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    pub(super) fn load(self, offset: usize) -> Result<u64, OutOfRange> {
        self.word(offset).map(|word| word.load(Ordering::Acquire))
    }

    pub(super) fn store(self, offset: usize, value: u64) -> Result<(), OutOfRange> {
        self.word(offset).map(|word| word.store(value, Ordering::Release))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_is_copied_and_nothing_beside_it() {
        let mut memory = [0u64; 8];
        // SAFETY: the memory is this test's, and only reached through `bytes` until it is read at the end of each turn.
        let bytes = unsafe { Bytes::new(memory.as_mut_ptr().cast(), 64) };
        for offset in 0..=20 {
            for len in 0..=44 {
                let (mut before, mut after, mut part) = ([0; 64], [0; 64], vec![0; len]);
                bytes.write(0, &[0x11; 64]).unwrap();
                let from: Vec<u8> = (0..len as u8).map(|n| n ^ 0xa5).collect();
                bytes.write(offset, &from).unwrap();
                bytes.read(offset, &mut part).unwrap();
                assert_eq!(part, from, "{offset} {len}");
                before[..].fill(0x11);
                before[offset..offset + len].copy_from_slice(&from);
                bytes.read(0, &mut after).unwrap();
                assert_eq!(after, before, "{offset} {len}");
            }
        }
    }

    #[test]
    fn nothing_outside_is_touched() {
        let mut memory = [0u64; 2];
        // SAFETY: the memory is this test's.
        let bytes = unsafe { Bytes::new(memory.as_mut_ptr().cast(), 16) };
        for (offset, wanted) in [(0, 17), (16, 1), (17, 0), (usize::MAX, 2)] {
            let error = OutOfRange { offset, wanted, len: 16 };
            assert_eq!(bytes.read(offset, &mut vec![0; wanted]), Err(error));
            assert_eq!(bytes.write(offset, &vec![0; wanted]), Err(error));
        }
        for offset in [4, 9, 16, usize::MAX] {
            assert_eq!(bytes.load(offset), Err(OutOfRange { offset, wanted: 8, len: 16 }));
        }
        bytes.store(8, 7).unwrap();
        assert_eq!((bytes.load(8), bytes.load(0)), (Ok(7), Ok(0)));
    }
}
