//! Buffers fly: the traits of flights for what this crate has. Uses `buffer` and `shared`.

use crate::buffer::Buffer;
use crate::shared::SharedBuffer;
use core::mem::MaybeUninit;
use core::ptr;
use rdmalloc_arenas::{StableBytes, StableBytesMut};

// SAFETY: a buffer owns a block of a heap alone, which does not move with it, and whose bytes change by `&mut Buffer` only.
unsafe impl StableBytes for Buffer {
    fn piece(&self, index: usize) -> &[u8] {
        if index == 0 { self } else { &[] }
    }
}

// SAFETY: the room is what is left of the block; the pointer is raw, as the buffer keeps it.
unsafe impl StableBytesMut for Buffer {
    fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>] {
        let (len, room) = (self.len(), if index == 0 { self.capacity() - self.len() } else { 0 });
        // SAFETY: `len` bytes from the begin is within the block, or at its end.
        ptr::slice_from_raw_parts_mut(unsafe { self.as_mut_ptr().add(len) }.cast(), room)
    }

    unsafe fn fill(&mut self, index: usize, len: usize) {
        debug_assert!(index == 0);
        // SAFETY: the caller's word.
        unsafe { self.set_len(self.len() + len) }
    }
}

// SAFETY: a part of the bytes of a buffer, which nobody writes as long as there is an owner: the flight is one.
unsafe impl StableBytes for SharedBuffer {
    fn piece(&self, index: usize) -> &[u8] {
        if index == 0 { self } else { &[] }
    }
}
