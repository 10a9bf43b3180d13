//! Size classes, and which kind of memory a layout gets. Pure arithmetic; uses nothing below it.
//!
//! ```text
//! kind     size                    lies in
//! small    up to 8 KiB             a slab of one slice (64 KiB)
//! medium   up to 64 KiB            a slab of several slices, 8 blocks or more
//! large    more, or aligned more   a span of its own
//! ```
//!
//! Classes go in steps of 16 bytes to 1 KiB, then in eight steps per doubling, so that a block wastes at most an eighth; a layout that is
//! aligned beyond 64 bytes and is larger than 1 KiB gets the next power of two.
//! The kind and the class follow from the layout alone: what frees a block knows where to look without having looked.

use core::alloc::Layout;
use rdmalloc_arenas::{SLICE, SLICE_SHIFT};

/// How many classes there are.
pub(crate) const CLASSES: usize = 64 + 8 * (MEDIUM_MAX.ilog2() as usize - 10);
/// The largest small block: a slab of one slice holds eight of it.
pub(crate) const SMALL_MAX: usize = SLICE / 8;
/// The largest block in a slab.
pub(crate) const MEDIUM_MAX: usize = SLICE;
/// The last size of the classes in steps of 16.
const FINE_MAX: usize = 1024;

/// What a layout gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A block of this class, in a slab of one slice.
    Small(usize),
    /// A block of this class, in a slab of several.
    Medium(usize),
    /// A span of so many slices.
    Large(usize),
}

/// The kind of a layout.
#[inline(always)]
pub(crate) fn kind_of(layout: Layout) -> Kind {
    let size = effective(layout.size(), layout.align());
    if size <= SMALL_MAX {
        Kind::Small(class_of(size))
    } else if size <= MEDIUM_MAX {
        Kind::Medium(class_of(size))
    } else {
        Kind::Large(slices_for(layout))
    }
}

/// The size whose class holds `size` bytes at `align`, or more than [`MEDIUM_MAX`] if none does.
///
/// A slab begins at a multiple of 64 KiB and holds block after block, so a class is aligned to whatever divides its size; but beyond
/// [`FINE_MAX`], where the room that is left is put before the first block or behind the last, in lines: only to a line, unless none is left.
#[inline(always)]
fn effective(size: usize, align: usize) -> usize {
    if align <= 16 {
        size
    } else if align <= LINE {
        // Buffers are aligned to 64, and this asks for no search.
        size.max(1).next_multiple_of(align)
    } else {
        aligned(size, align)
    }
}

/// The grain of where in its slab the first block lies: a line of the processor's caches.
pub(crate) const LINE: usize = 64;

fn aligned(size: usize, align: usize) -> usize {
    if align > MEDIUM_MAX {
        // Large, whatever the size: spans alone are aligned beyond a slice.
        return size.max(MEDIUM_MAX + 1);
    }
    // A layout's size, rounded up to its alignment, does not overflow. Up to 1 KiB, the class of a multiple of an alignment is as
    // large, and so one too. Above, powers of two leave no room in a slab (the test has all of them).
    let size = size.max(1).next_multiple_of(align);
    if FINE_MAX < size && size <= MEDIUM_MAX { size.next_power_of_two() } else { size }
}

/// The slices of the span of a large layout.
#[inline(always)]
pub(crate) fn slices_for(layout: Layout) -> usize {
    effective(layout.size(), layout.align()).div_ceil(SLICE)
}

/// The class of a layout, if it is small or medium: what the fast path of an allocation asks.
#[inline(always)]
pub(crate) fn class_for(layout: Layout) -> Option<usize> {
    let size = effective(layout.size(), layout.align());
    // In this order, a fine class takes one comparison.
    if size <= FINE_MAX { Some(fine_class(size)) } else { (size <= MEDIUM_MAX).then(|| coarse_class(size)) }
}

/// The class that holds `size` bytes; `size` is at most [`MEDIUM_MAX`].
#[inline(always)]
pub(crate) fn class_of(size: usize) -> usize {
    if size <= FINE_MAX { fine_class(size) } else { coarse_class(size) }
}

#[inline(always)]
fn fine_class(size: usize) -> usize {
    size.saturating_sub(1) >> 4
}

#[inline(always)]
fn coarse_class(size: usize) -> usize {
    let last = size - 1;
    let doubling = last.ilog2();
    // `last >> (doubling - 3)` is 8 to 15: a bit for the doubling, three for the step in it.
    64 + ((doubling as usize - 10) << 3) + (last >> (doubling - 3)) - 8
}

/// The bytes of a block of a class.
#[inline(always)]
pub(crate) const fn size_of_class(class: usize) -> usize {
    if class < 64 {
        (class + 1) << 4
    } else {
        let (doubling, step) = ((class - 64) >> 3, (class - 64) & 7);
        (step + 9) << (doubling + 7)
    }
}

/// How many slices a slab of a class has: enough for eight blocks.
pub(crate) const fn slices_of_class(class: usize) -> usize {
    (size_of_class(class) * 8).div_ceil(1 << SLICE_SHIFT)
}

/// How many blocks a slab of a class has.
pub(crate) const fn capacity_of_class(class: usize) -> usize {
    slices_of_class(class) * SLICE / size_of_class(class)
}

/// How many bytes lie before the first block of a slab that begins at `address`. Not the same in neighbouring slabs, where the blocks
/// leave room: else the blocks of many sizes lie at few offsets of their pages, and so in few sets of the processor's caches.
pub(crate) fn bytes_before(class: usize, address: usize) -> usize {
    let block = size_of_class(class);
    if block <= FINE_MAX {
        return 0;
    }
    let left = slices_of_class(class) * SLICE - capacity_of_class(class) * block;
    (address >> SLICE_SHIFT) % (left / LINE + 1) * LINE
}

/// How many blocks of each size class are in use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LiveBlocks([u64; CLASSES]);

impl LiveBlocks {
    pub(crate) fn add(&mut self, class: usize, blocks: u64) {
        self.0[class] += blocks;
    }

    /// The size of a block, and how many there are, of each class that has any; smallest first. A block serves whatever is no
    /// larger than it and larger than the class before.
    pub fn iter(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let classes = self.0.iter().enumerate().filter(|(_, blocks)| **blocks > 0);
        classes.map(|(class, blocks)| (size_of_class(class), *blocks))
    }

    /// All of them.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.iter().map(|(size, blocks)| size as u64 * blocks).sum()
    }
}

impl Default for LiveBlocks {
    fn default() -> LiveBlocks {
        LiveBlocks([0; CLASSES])
    }
}

impl core::fmt::Debug for LiveBlocks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for LiveBlocks {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_fits_its_class_and_not_the_one_before() {
        for size in 1..=MEDIUM_MAX {
            let class = class_of(size);
            assert!(size_of_class(class) >= size, "{size}");
            assert!(class == 0 || size_of_class(class - 1) < size, "{size}");
            assert!(size <= FINE_MAX || size_of_class(class) * 8 <= size * 9 + 8, "{size} wastes over an eighth");
        }
        assert_eq!(class_of(MEDIUM_MAX), CLASSES - 1);
        assert_eq!(class_of(0), 0);
    }

    #[test]
    fn small_classes_have_slabs_of_one_slice_and_no_slab_is_larger_than_eight() {
        for class in 0..CLASSES {
            assert_eq!(slices_of_class(class) == 1, size_of_class(class) <= SMALL_MAX);
            assert!(slices_of_class(class) <= 8 && slices_of_class(class) * SLICE / size_of_class(class) >= 8);
        }
    }

    #[test]
    fn slabs_leave_the_same_room_whatever_lies_before_their_first_block() {
        for class in 0..CLASSES {
            let (block, bytes) = (size_of_class(class), slices_of_class(class) * SLICE);
            let before = |slab: usize| bytes_before(class, slab * SLICE);
            let most = (0..200).map(before).max().unwrap();
            assert!(most + capacity_of_class(class) * block <= bytes, "{block}");
            assert!(block > FINE_MAX || most == 0, "fine classes are aligned to what divides them");
            assert!(!block.is_power_of_two() || most == 0, "{block}");
            assert!((0..200).all(|slab| before(slab).is_multiple_of(LINE)));
        }
        assert_eq!(
            [6 << 10, 3 << 10, 2 << 10].map(|size| {
                let mut places: Vec<_> = (0..64).map(|slab| bytes_before(class_of(size), slab * SLICE)).collect();
                places.sort_unstable();
                places.dedup();
                places.len()
            }),
            [64, 17, 1]
        );
    }

    #[test]
    fn blocks_are_aligned_as_their_layout_asks() {
        for shift in 0..=26 {
            let align = 1 << shift;
            for size in (0..200).chain((0..=1 << 17).step_by(487)) {
                match kind_of(Layout::from_size_align(size, align).unwrap()) {
                    Kind::Small(class) | Kind::Medium(class) => {
                        assert!(
                            size_of_class(class) >= size && size_of_class(class).is_multiple_of(align),
                            "{size} at {align}"
                        );
                        assert!(
                            (0..200).all(|slab| bytes_before(class, slab * SLICE).is_multiple_of(align)),
                            "{size} at {align}"
                        );
                    }
                    Kind::Large(slices) => assert!(slices * SLICE >= size && (size > MEDIUM_MAX || align > MEDIUM_MAX)),
                }
            }
        }
        assert_eq!(kind_of(Layout::new::<[u8; 64]>()), Kind::Small(3));
        assert_eq!(kind_of(Layout::from_size_align(isize::MAX as usize - 4095, 4096).unwrap()), Kind::Large(1 << 47));
    }
}
