//! Blocks that grow and shrink where they are. Uses `block`, `slab`, `class` and the heap's arenas.

use crate::class::{Kind, kind_of};
use crate::heap::Core;
use crate::{block, slab};
use core::alloc::Layout;
use core::ptr::NonNull;
use rdmalloc_arenas::{LINK_UNIT, SLICE};

/// Whether the block serves for a longer layout, perhaps after it took the slices behind it: its size then, and from where on it is
/// known to be zero.
///
/// # Safety
///
/// The block was allocated from `core`, was not given back since, and is the caller's.
pub(super) unsafe fn grow(core: &Core, block: NonNull<u8>, layout: Layout) -> Option<(usize, usize)> {
    let address = block.addr().get();
    // SAFETY: the caller's promise.
    let size = unsafe { block::size(block) };
    match (kind_of_block(size), kind_of(layout)) {
        _ if !address.is_multiple_of(layout.align()) => None,
        _ if layout.size() <= size => Some((size, size)),
        (Kind::Large(from), Kind::Large(to)) => {
            let zero = core.arenas.grow(address, from, to)?;
            // SAFETY: the caller's promise; it is large.
            unsafe { resized(core, block, to) };
            Some((to * SLICE, if zero { size } else { to * SLICE }))
        }
        _ => None,
    }
}

/// Whether the block serves for a shorter layout without wasting more than half of itself, perhaps after its tail was given back:
/// its size then. What it holds beyond the layout's size is lost.
///
/// # Safety
///
/// As [`grow`].
pub(super) unsafe fn shrink(core: &Core, block: NonNull<u8>, layout: Layout) -> Option<usize> {
    let address = block.addr().get();
    // SAFETY: the caller's promise.
    let size = unsafe { block::size(block) };
    match (kind_of_block(size), kind_of(layout)) {
        _ if !address.is_multiple_of(layout.align()) => None,
        (Kind::Large(from), Kind::Large(to)) if to < from => {
            if core.arenas.is_free_memory_zero() {
                // SAFETY: the tail of the block, which is the caller's.
                unsafe { block.add(to * SLICE).write_bytes(0, size - to * SLICE) };
            }
            if !core.arenas.shrink(address, from, to) {
                return Some(size);
            }
            // SAFETY: the caller's promise; it is large.
            unsafe { resized(core, block, to) };
            Some(to * SLICE)
        }
        (Kind::Large(_), Kind::Large(_)) => Some(size),
        (Kind::Large(_), _) => None,
        _ => (layout.size() > size / 2 || size <= LINK_UNIT).then_some(size),
    }
}

fn kind_of_block(size: usize) -> Kind {
    // SAFETY: a block's size is no more than the region has.
    kind_of(unsafe { Layout::from_size_align_unchecked(size, 1) })
}

/// Marks a large block that has other slices now.
///
/// # Safety
///
/// The block is the caller's, and large.
unsafe fn resized(core: &Core, block: NonNull<u8>, slices: usize) {
    core.bell.touch();
    // SAFETY: a block lies in an open arena.
    unsafe { slab::header(block.addr().get()) }.set_large(slices);
}
