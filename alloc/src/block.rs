//! Blocks of a heap that a program made, for buffers and containers alike: known by their address, and given back by it
//! ([`pool::give_back`](crate::pool::give_back)). Uses `slab`.
//!
//! In a heap with `zero_on_free` whoever gives memory back clears it first: a block there, the tail of one that shrinks in
//! `allocator::in_place`. A peer, or a device by its error, may have written anywhere, so all of the block is cleared, not what the
//! owner has used. Such heaps keep the links of free blocks outside, so there every byte of free memory is zero.

use crate::slab;
use core::ptr::NonNull;

/// The bytes of a block of a heap that a program made.
///
/// # Safety
///
/// It was not given back, and is the caller's.
#[inline]
pub(crate) unsafe fn size(block: NonNull<u8>) -> usize {
    // SAFETY: `Core::allocate` marks large blocks, and who resizes one here marks it anew.
    unsafe { slab::size_of_block(block) }
}
