//! Blocks as a collection in a heap has them: by `&Heap`, which is an allocator. Uses `world`.

use super::held::{Held, Root, byte, fill, first_not_zero, spots};
use super::world::{Check, World, check};
use allocator_api2::alloc::Allocator;
use rdmalloc::Heap;
use std::alloc::Layout;
use std::ptr::NonNull;

/// A block, with the handle of the heap that it goes back to as it is dropped.
pub struct Loose {
    /// Where it begins.
    pub start: NonNull<u8>,
    /// What was asked for.
    pub layout: Layout,
    /// None: the block has become another.
    heap: Option<Heap>,
}

// SAFETY: a block is owned by its value alone.
unsafe impl Send for Loose {}

impl Drop for Loose {
    fn drop(&mut self) {
        let Some(heap) = &self.heap else { return };
        // SAFETY: it was allocated by this heap with this layout, and is the value's.
        unsafe { heap.deallocate(self.start, self.layout) };
    }
}

impl World {
    /// `allocate` or `allocate_zeroed`.
    pub fn allocate_in(&mut self, name: usize, layout: Layout, zeroed: bool) -> Check {
        let number = self.named(name)?;
        let seed = self.seed();
        let place = self.place(number);
        let Some(heap) = place.handles.last().cloned() else { return Ok(()) };
        let zero_on_free = place.zero_on_free;
        let block = if zeroed { heap.allocate_zeroed(layout) } else { heap.allocate(layout) };
        let Ok(block) = block else {
            return check(place.requires && place.is_limited(), || format!("no memory for {layout:?}"));
        };
        let loose = Loose { start: block.cast(), layout, heap: Some(heap) };
        // SAFETY: a new block, this long.
        let soiled =
            unsafe { first_not_zero(loose.start.as_ptr(), if zeroed || zero_on_free { block.len() } else { 0 }) };
        check(soiled.is_none(), || format!("byte {soiled:?} of {} zeros is not, for {layout:?}", block.len()))?;
        self.keep(number, loose, block.len(), seed)
    }

    /// `grow`, `grow_zeroed` or `shrink`.
    pub fn resize_in(&mut self, address: usize, loose: Loose, size: usize, zeroed: bool) -> Check {
        let (old, seed) = (self.roots[&address].clone(), self.seed());
        let place = self.place(old.heap);
        let may_fail = place.requires && place.is_limited();
        let held = Held::Loose(loose);
        held.check(address, &old)?;
        let Held::Loose(mut loose) = held else { return Ok(()) };
        let Some(heap) = loose.heap.take() else { return Ok(()) };
        let new = Layout::from_size_align(size, loose.layout.align()).map_err(|error| error.to_string())?;
        let grows = size >= loose.layout.size();
        // SAFETY: the block is the heap's, of this layout; the new one is longer, or shorter, as is asked.
        let block = unsafe {
            match (grows, zeroed) {
                (true, true) => heap.grow_zeroed(loose.start, loose.layout, new),
                (true, false) => heap.grow(loose.start, loose.layout, new),
                (false, _) => heap.shrink(loose.start, loose.layout, new),
            }
        };
        let Ok(block) = block else {
            self.held
                .push((address, Held::Loose(Loose { start: loose.start, layout: loose.layout, heap: Some(heap) })));
            return check(may_fail, || format!("no memory for {new:?}"));
        };
        // Perhaps the heap's last, which is not its end.
        self.roots.remove(&address);
        self.place(old.heap).blocks -= 1;
        let loose = Loose { start: block.cast(), layout: new, heap: Some(heap) };
        for at in spots(old.len).flatten().filter(|at| *at < size) {
            // SAFETY: within the block; what was written before was kept.
            let (found, kept) = (unsafe { loose.start.add(at).read() }, byte(old.seed, at));
            check(found == kept, || format!("byte {at} of {old:x?} was not kept as it became {size} bytes"))?;
        }
        if grows && zeroed {
            // SAFETY: the block is this long.
            let soiled = unsafe { first_not_zero(loose.start.as_ptr().add(old.len), block.len() - old.len) };
            check(soiled.is_none(), || format!("byte {soiled:?} behind {} is not zero, for {new:?}", old.len))?;
        }
        self.keep(old.heap, loose, block.len(), seed)
    }

    fn keep(&mut self, heap: u32, loose: Loose, size: usize, seed: u8) -> Check {
        let Loose { start, layout, .. } = loose;
        let (address, len) = (start.addr().get(), layout.size());
        check(size >= len, || format!("{size} bytes for {layout:?}"))?;
        check(address.is_multiple_of(layout.align()), || format!("{address:x} for {layout:?}"))?;
        self.adopt(address, Root { end: address + size, len, seed, owners: 1, heap }, Held::Loose(loose))?;
        // SAFETY: a block of this size, nobody else's; the last byte of what it has beyond the layout is its own as well.
        unsafe {
            fill(start.as_ptr(), seed, 0..len, len);
            if size > len {
                start.add(size - 1).write(0xee);
            }
        }
        Ok(())
    }
}
