//! Blocks of a heap that a program made, for buffers and containers alike: taken for a layout, given back by their address
//! ([`pool::give_back`](crate::pool::give_back)). Uses `slab` and `heap`.
//!
//! In a heap with `zero_on_free` whoever gives memory back clears it first: a block there, the tail of one that shrinks in
//! `allocator::in_place`. A peer, or a device by its error, may have written anywhere, so all of the block is cleared, not what the
//! owner has used. Such heaps keep the links of free blocks outside, so there every byte of free memory is zero.

use crate::cache::Block;
use crate::heap::Core;
use crate::slab;
use core::alloc::Layout;
use core::ptr::NonNull;
use rdmalloc_arenas::{LINK_UNIT, TakeError};

/// Takes a block. Where links lie outside, blocks are larger and more aligned than asked, so that each has a link of its own.
#[inline]
pub(crate) fn take(core: &Core, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
    let unit = if core.arenas.has_links_outside() { LINK_UNIT } else { 1 };
    let not_a_layout = |_| TakeError::NotALayout { wanted: layout.size(), align: layout.align() };
    core.allocate(layout.align_to(unit).map_err(not_a_layout)?, zeroed)
}

/// The bytes of a block that [`take`] has taken.
///
/// # Safety
///
/// It was not given back, and is the caller's.
#[inline]
pub(crate) unsafe fn size(block: NonNull<u8>) -> usize {
    // SAFETY: `Core::allocate` marks large blocks, and who resizes one here marks it anew.
    unsafe { slab::size_of_block(block) }
}
