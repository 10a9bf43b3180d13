//! A block of the global allocator, marked with a word of its owner's, so that memory handed out twice is found out.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::hint::black_box;
use std::ptr::NonNull;

const ALIGN: usize = 8;
/// How much of a block is written when everything is checked: each word up to here, then some sixteen words.
const WHOLE: usize = 4096;

/// A block that is written when it is made, and checked and freed when it is dropped.
///
/// Its first word is its size and serial number. With debug assertions it is filled with that, and checked: each word of its first
/// page, and some beyond. That is what finds blocks that overlap; a measured run would measure it instead of the
/// allocator.
pub struct Block {
    /// Valid for `size` bytes, which were allocated with `ALIGN`; the words that `words` names are initialised.
    start: NonNull<u64>,
    size: u32,
    serial: u32,
}

// SAFETY: a block owns its memory, and the global allocator frees from any thread.
unsafe impl Send for Block {}

impl Block {
    /// Allocates `size` bytes, 8 to `u32::MAX`.
    #[inline]
    pub fn new(size: usize, serial: u32) -> Block {
        debug_assert!(size >= 8 && u32::try_from(size).is_ok());
        let layout = layout(size);
        // SAFETY: the size is not 0.
        let start = black_box(unsafe { alloc(layout) });
        let Some(start) = NonNull::new(start.cast()) else { handle_alloc_error(layout) };
        let block = Block { start, size: size as u32, serial };
        for at in block.words() {
            // SAFETY: within the block, by `words`, and aligned, since the start is to 8 and `at` is a multiple of 8.
            unsafe { block.start.byte_add(at).write(block.tag()) };
        }
        block
    }

    /// Where it begins.
    #[inline]
    pub fn start(&self) -> *const u8 {
        self.start.as_ptr().cast()
    }

    /// How long it is.
    #[inline]
    pub fn len(&self) -> usize {
        self.size as usize
    }

    /// Writes a byte to every page.
    pub fn touch(&mut self) {
        for at in (WHOLE..self.len() - 7).step_by(WHOLE) {
            // SAFETY: within the block, and aligned, as in `new`; what is written is what stands there with debug assertions.
            unsafe { self.start.byte_add(at).write_volatile(self.tag()) };
        }
    }

    #[inline]
    fn tag(&self) -> u64 {
        u64::from(self.serial) << 32 | u64::from(self.size)
    }

    /// The offsets of the words that are written: always the first one, never one that is not whole.
    #[inline]
    fn words(&self) -> impl Iterator<Item = usize> {
        let (first, other) = if cfg!(debug_assertions) { (self.len().min(WHOLE), self.len()) } else { (8, 0) };
        let step = WHOLE.max(other / 16 / 8 * 8);
        (0..first - 7).step_by(8).chain((WHOLE..other.max(WHOLE + 7) - 7).step_by(step))
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        for at in self.words() {
            // SAFETY: written in `new`, at the same place.
            let word = unsafe { self.start.byte_add(at).read() };
            assert!(word == self.tag(), "a block of {} bytes was written by another at {at}", self.size);
        }
        // SAFETY: allocated in `new` with this layout, and not used any more.
        unsafe { dealloc(black_box(self.start.as_ptr().cast()), layout(self.len())) };
    }
}

#[inline]
fn layout(size: usize) -> Layout {
    // SAFETY: the alignment is a power of two, and a size of 32 bits does not overflow when rounded up to it.
    unsafe { Layout::from_size_align_unchecked(size, ALIGN) }
}

#[cfg(test)]
mod tests {
    use super::Block;

    #[test]
    #[should_panic(expected = "written by another")]
    fn a_block_that_somebody_wrote_to_is_found_out() {
        let block = Block::new(24, 7);
        // SAFETY: the block's own last word; nothing else refers to it.
        unsafe { block.start.as_ptr().add(2).write(0) };
    }
}
