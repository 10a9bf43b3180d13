//! What a sequence holds of the allocator's memory: where it lies, and what has to be in it. Uses `collection`.

use super::collection::Loose;
use bytes::Bytes;
use rdmalloc::{Buffer, Rdmalloc, SharedBuffer};
use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::ptr::NonNull;

/// Memory that somebody holds: a block, or a buffer with all that is shared of it.
#[derive(Clone, Debug)]
pub struct Root {
    /// Where it ends: its capacity counts.
    pub end: usize,
    /// How much of it has contents.
    pub len: usize,
    /// Which contents.
    pub seed: u8,
    /// By how many things it is held.
    pub owners: usize,
    /// Of which heap it is.
    pub heap: u32,
}

/// What holds it.
pub enum Held {
    /// A block of the global heap.
    Block(Block),
    /// A block of another.
    Loose(Loose),
    /// A buffer.
    Buffer(Buffer),
    /// A part of one.
    Shared(SharedBuffer),
    /// The same, as others have it.
    Bytes(Bytes),
}

/// A block of the global heap, which is freed as it is dropped.
pub struct Block {
    /// Where it begins.
    pub start: NonNull<u8>,
    /// What was asked for.
    pub layout: Layout,
}

// SAFETY: a block is owned by its value alone.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and is the value's.
        unsafe { Rdmalloc::new().dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl Held {
    /// Where it is, as far as it has contents: the first `len` bytes of a block.
    fn memory(&self) -> (*const u8, usize) {
        match self {
            Held::Block(block) => (block.start.as_ptr(), block.layout.size()),
            Held::Loose(loose) => (loose.start.as_ptr(), loose.layout.size()),
            Held::Buffer(buffer) => (buffer.as_ptr(), buffer.len()),
            Held::Shared(shared) => (shared.as_ptr(), shared.len()),
            Held::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }

    /// Whether what it shows is what has to be in its root, which begins at `start`.
    pub fn check(&self, start: usize, root: &Root) -> Result<(), String> {
        let (memory, len) = self.memory();
        let from = memory.addr().wrapping_sub(start);
        if from > root.len || len > root.len - from {
            return Err(format!("{len} bytes at {memory:p} are not within {root:x?} at {start:x}"));
        }
        for spot in spots(root.len) {
            let within = spot.start.max(from)..spot.end.min(from + len);
            for at in within {
                // SAFETY: within what it holds, which is initialised at the spots.
                let found = unsafe { memory.add(at - from).read() };
                if found != byte(root.seed, at) {
                    let expected = byte(root.seed, at);
                    return Err(format!("{found:#x} in place of {expected:#x} at {at} of {root:x?} at {start:x}"));
                }
            }
        }
        Ok(())
    }
}

/// What has to be at a place.
pub fn byte(seed: u8, at: usize) -> u8 {
    seed ^ (at as u8).wrapping_mul(31) ^ (at >> 8) as u8
}

/// Where contents are written and looked at: everywhere in what is short, here and there in what is long.
pub fn spots(len: usize) -> impl Iterator<Item = Range<usize>> {
    const WHOLE: usize = 16 << 10;
    let ends = [0..len.min(WHOLE), len.saturating_sub(1 << 10).max(len.min(WHOLE))..len];
    let between = (1..len >> 18).map(|number| (number << 18)..(number << 18) + 64);
    ends.into_iter().chain(between.filter(move |spot| spot.start >= WHOLE && spot.end <= len))
}

/// Writes them.
///
/// # Safety
///
/// `start` has so many bytes, which are the caller's.
pub unsafe fn fill(start: *mut u8, seed: u8, range: Range<usize>, len: usize) {
    for spot in spots(len) {
        for at in spot.start.max(range.start)..spot.end.min(range.end) {
            // SAFETY: within the caller's bytes.
            unsafe { start.add(at).write(byte(seed, at)) };
        }
    }
}

/// The first byte that is not zero.
///
/// # Safety
///
/// `start` has so many bytes, which are mapped and nobody else's.
pub unsafe fn first_not_zero(start: *const u8, len: usize) -> Option<usize> {
    const WORDS: usize = 4096;
    let mut at = 0;
    while at < len {
        let count = (len - at).min(WORDS);
        // SAFETY: within the caller's bytes; what the allocator left there is read as bytes.
        let piece = unsafe { std::slice::from_raw_parts(start.add(at), count) };
        if piece.iter().fold(0, |all, byte| all | byte) != 0 {
            return piece.iter().position(|byte| *byte != 0).map(|within| at + within);
        }
        at += count;
    }
    None
}
