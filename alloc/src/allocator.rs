//! Containers in a heap that a program made: the `Allocator` of the crate `allocator-api2`. Uses `block` and `pool`.
//!
//! That crate's 0.2, which is what hashbrown takes. Its own feature `nightly` puts the standard library's unstable trait in place of
//! its own; to implement that takes a crate attribute which stable compilers refuse, so a feature for it would break every build
//! with all features on stable.

mod in_place;

use crate::{Heap, block, pool};
use allocator_api2::alloc::{AllocError, Allocator};
use core::alloc::Layout;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::LINK_UNIT;

/// Collections live in a heap: `Vec`, `Box` of `allocator-api2`, hashbrown's maps, whatever takes an `Allocator` of that crate's.
///
/// By reference (`&heap`), a collection cannot outlive the handle; with a handle of its own (`heap.clone()`) it keeps the heap.
/// What it holds can be sent from where it lies, and never lies in the program's other memory. Blocks grow in place where what lies
/// behind is free, and move otherwise: an address that a peer was told, or that a work request names, holds until the collection grows.
/// Blocks of any size and alignment are served; in a heap that peers can write, the smallest have 64 bytes.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use hashbrown::{DefaultHashBuilder, HashMap};
/// use rdmalloc::Heap;
///
/// let heap = Heap::builder().build()?;
/// let mut values = HashMap::with_hasher_in(DefaultHashBuilder::default(), &heap);
/// for key in 0..1000_u32 {
///     let mut value = Vec::new_in(&heap);
///     value.extend_from_slice(&key.to_le_bytes());
///     values.insert(key, value);
/// }
/// let at = values[&7].as_ptr().addr();
/// assert!(heap.arenas().iter().any(|arena| arena.memory.contains(&at)));
/// # Ok::<(), rdmalloc::BuildError>(())
/// ```
// SAFETY: blocks are apart from each other and mapped until they are given back, even longer than the last handle: an arena is
// closed after its last block only. A clone is a handle to the same heap. All methods take a block by its address.
unsafe impl Allocator for Heap {
    #[inline]
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        take(self, layout, false).map(|(block, _)| block)
    }

    #[inline]
    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let (block, zero) = take(self, layout, true)?;
        if !zero {
            // SAFETY: the block is new, and this long.
            unsafe { block.cast::<u8>().write_bytes(0, block.len()) };
        }
        Ok(block)
    }

    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() != 0 {
            // SAFETY: the caller's promise: a block of this heap, since the size is not 0.
            unsafe { pool::give_back(block) };
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller's promise.
        unsafe { grow(self, block, old, new, false) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller's promise.
        unsafe { grow(self, block, old, new, true) }
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() != 0 && new.size() != 0 {
            // SAFETY: the caller's promise: a block of this heap, since the size is not 0.
            if let Some(size) = unsafe { in_place::shrink(self.core, block, new) } {
                return Ok(NonNull::slice_from_raw_parts(block, size));
            }
        }
        let moved = take(self, new, false);
        if moved.is_err() && block.addr().get().is_multiple_of(new.align()) {
            // SAFETY: as above: a layout of size 0 is always served, so neither size is.
            let size = unsafe { block::size(block) };
            return Ok(NonNull::slice_from_raw_parts(block, size));
        }
        let (shorter, _) = moved?;
        // SAFETY: both have the new size at least, and are apart; the caller gives the old one up.
        unsafe {
            ptr::copy_nonoverlapping(block.as_ptr(), shorter.cast().as_ptr(), new.size());
            self.deallocate(block, old);
        }
        Ok(shorter)
    }
}

/// A block, all of it, and whether it is zero.
fn take(heap: &Heap, layout: Layout, zeroed: bool) -> Result<(NonNull<[u8]>, bool), AllocError> {
    if layout.size() == 0 {
        let dangling = NonNull::without_provenance(layout.align().try_into().map_err(|_| AllocError)?);
        return Ok((NonNull::slice_from_raw_parts(dangling, 0), true));
    }
    // Where links lie outside, each block must have one of its own.
    let unit = if heap.core.arenas.has_links_outside() { LINK_UNIT } else { 1 };
    let layout = layout.align_to(unit).map_err(|_| AllocError)?;
    let block = heap.core.allocate(layout, zeroed).map_err(|_| AllocError)?;
    // SAFETY: just taken.
    let size = unsafe { block::size(block.start) };
    Ok((NonNull::slice_from_raw_parts(block.start, size), block.zero))
}

/// # Safety
///
/// As [`Allocator::grow`].
unsafe fn grow(
    heap: &Heap,
    block: NonNull<u8>,
    old: Layout,
    new: Layout,
    zeroed: bool,
) -> Result<NonNull<[u8]>, AllocError> {
    let clear = |block: NonNull<u8>, to: usize| {
        if zeroed && old.size() < to {
            // SAFETY: the block is at least `to` bytes long, and what lies behind the old size is nobody's.
            unsafe { block.add(old.size()).write_bytes(0, to - old.size()) };
        }
    };
    if old.size() != 0 {
        // SAFETY: the caller's promise: a block of this heap, since the size is not 0.
        if let Some((size, zero_from)) = unsafe { in_place::grow(heap.core, block, new) } {
            clear(block, zero_from);
            return Ok(NonNull::slice_from_raw_parts(block, size));
        }
    }
    let (longer, zero) = take(heap, new, zeroed)?;
    // SAFETY: both have the old size at least, and are apart; the caller gives the old one up.
    unsafe {
        ptr::copy_nonoverlapping(block.as_ptr(), longer.cast().as_ptr(), old.size());
        heap.deallocate(block, old);
    }
    if !zero {
        clear(longer.cast(), longer.len());
    }
    Ok(longer)
}
