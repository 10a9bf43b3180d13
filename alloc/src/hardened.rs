//! The global allocator with checks, for the feature `hardened`: misuse is told, and ends the program. Uses `global`, `misuse`
//! and the marks of the crate below.
//!
//! A block gets 16 bytes more than were asked for, at its end: a seal, made of its address and size. Outside, at a place that
//! follows from its address, stands a mark: whether a block begins there, whether it is out, and its size. What is freed
//! is filled, as far as [`FILL`] goes, and looked at when it is handed out again.
//!
//! | misuse | seen when |
//! | --- | --- |
//! | freed twice | at once; unless the block is out again |
//! | a pointer that is not ours, or not to a block's begin | at once |
//! | another size than it was allocated with | at once |
//! | another alignment, of the same kind of memory | never |
//! | written behind the end | when it is freed |
//! | written after it was freed, from its 17th byte to its 1024th | when it is handed out again, if its slab is still there |
//!
//! Blocks of a `Heap` are not looked after: their owners are types that cannot do any of this without `unsafe`.

use crate::class::{Kind, kind_of};
use crate::global::Plain;
use crate::misuse;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use rdmalloc_arenas::{MARK_UNIT, SLICE, mark_of, memory_of};

/// Bytes of the seal.
const SEAL: usize = 16;
/// What freed memory is filled with.
const FILLING: u8 = 0xdb;
/// How much of a block is filled, from its begin: more costs more than it finds.
const FILL: usize = 1024;
/// What is not filled: a free block's first bytes may be a link.
const LINK: usize = 16;

/// A mark: `00` nothing, `01` out, `10` freed; whether the block begins in the upper half of its unit; its size, in bytes.
const OUT: u32 = 1 << 30;
const FREED: u32 = 2 << 30;
const STATE: u32 = 3 << 30;
const UPPER: u32 = 1 << 29;
/// The largest size that a mark can tell; larger ones are told as this.
const SIZE: u32 = UPPER - 1;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardened;

/// What the plain allocator is asked for. `None`: no layout is that large.
fn sealed(layout: Layout) -> Option<Layout> {
    Layout::from_size_align(layout.size().checked_add(SEAL)?, layout.align()).ok()
}

fn mark(block: usize, size: usize, state: u32) -> u32 {
    let upper = if block.is_multiple_of(MARK_UNIT) { 0 } else { UPPER };
    state | upper | u32::try_from(size).unwrap_or(SIZE).min(SIZE)
}

/// The seal of a block. Not a secret: it finds faults, not attacks.
fn seal(block: usize, size: usize) -> [u8; SEAL] {
    let mixed = (block as u64 ^ (size as u64).rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (mixed ^ mixed >> 29) | 1;
    let (low, high) = (word.to_le_bytes(), (!word).to_le_bytes());
    core::array::from_fn(|index| if index < 8 { low[index] } else { high[index - 8] })
}

/// The bytes of a block that are filled while it is free.
fn filled(size: usize) -> core::ops::Range<usize> {
    LINK..(size + SEAL).min(FILL)
}

/// Whether all bytes are this one; eight at a time.
fn is_all(bytes: &[u8], byte: u8) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| *word == [byte; 8]) && rest.iter().all(|other| *other == byte)
}

/// Takes the marks in a slab that is made now: they tell of what was there before.
///
/// # Safety
///
/// The range lies in an open arena, and is the caller's.
pub(crate) unsafe fn clear_marks(address: usize, len: usize) {
    for unit in (address..address + len).step_by(MARK_UNIT) {
        // SAFETY: the caller's promise.
        unsafe { mark_of(unit) }.store(0, Relaxed);
    }
}

/// Sees to a block that the plain allocator has handed out.
///
/// # Safety
///
/// The block is new, of `sealed(layout)`; the caller's alone.
unsafe fn hand_out(block: *mut u8, layout: Layout, is_zeroed: bool) {
    let (address, size) = (block.addr(), layout.size());
    // SAFETY: a block lies in an open arena.
    let place = unsafe { mark_of(address) };
    let before = place.load(Acquire);
    if before & STATE == OUT {
        report(address, layout, "is handed out a second time: something has written over free memory");
    }
    if before & STATE == FREED && before & UPPER == mark(address, 0, 0) && !is_zeroed {
        let was = (before & SIZE) as usize;
        // SAFETY: a block of this size began here, and what is there now has the same block of memory: it is valid that far.
        let bytes = unsafe { core::slice::from_raw_parts(block.add(LINK), filled(was.min(size)).len()) };
        // Zeros: its pages were given back to the kernel since.
        if !is_all(bytes, FILLING) && !is_all(bytes, 0) {
            report(address, layout, "was written to after it was freed");
        }
    }
    if let Some(Kind::Large(slices)) = sealed(layout).map(kind_of) {
        // Large blocks and slabs begin at slices, and slabs see to themselves: where one began is written over now.
        for slice in 1..slices {
            // SAFETY: a large block is a span of its own.
            unsafe { mark_of(address + slice * SLICE) }.store(0, Relaxed);
        }
    }
    place.store(mark(address, size, OUT), Relaxed);
    // SAFETY: the block has room for it.
    unsafe { block.add(size).cast::<[u8; SEAL]>().write_unaligned(seal(address, size)) };
}

/// Looks at a block that somebody wants to free, or to resize. Does not return if it may not be.
fn check(block: *mut u8, layout: Layout) -> &'static AtomicU32 {
    let (address, size) = (block.addr(), layout.size());
    if memory_of(address).is_none() {
        report(address, layout, "is freed, and is not of this allocator");
    }
    // SAFETY: it lies in an open arena.
    let place = unsafe { mark_of(address) };
    let found = place.load(Acquire);
    if found & STATE == 0 || found & UPPER != mark(address, 0, 0) || address % 16 != 0 {
        report(address, layout, "is freed, and is not the begin of a block");
    }
    if found & STATE == FREED {
        report(address, layout, "is freed a second time");
    }
    if found != mark(address, size, OUT) {
        report_size(address, layout, (found & SIZE) as usize);
    }
    // SAFETY: a block of this size, which is out, has a seal at its end.
    if unsafe { block.add(size).cast::<[u8; SEAL]>().read_unaligned() } != seal(address, size) {
        report(address, layout, "was written to behind its end");
    }
    place
}

// SAFETY: as the plain allocator, of which it asks a little more each time.
unsafe impl GlobalAlloc for Hardened {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(more) = sealed(layout) else { return ptr::null_mut() };
        // SAFETY: of a size that is not 0.
        let block = unsafe { Plain.alloc(more) };
        if !block.is_null() {
            // SAFETY: just allocated.
            unsafe { hand_out(block, layout, false) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let place = check(block, layout);
        let out = mark(block.addr(), layout.size(), OUT);
        let freed = mark(block.addr(), layout.size(), FREED);
        // Two who free it at once: one of them is late.
        if place.compare_exchange(out, freed, AcqRel, Relaxed).is_err() {
            report(block.addr(), layout, "is freed a second time, by another thread");
        }
        let filled = filled(layout.size());
        // SAFETY: within the block, which is nobody's any more. Its layout fits, since it was allocated.
        unsafe {
            block.add(filled.start).write_bytes(FILLING, filled.len());
            Plain.dealloc(block, sealed(layout).unwrap_unchecked());
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(more) = sealed(layout) else { return ptr::null_mut() };
        if !matches!(kind_of(more), Kind::Large(_)) {
            // So that it is looked at before it is cleared.
            // SAFETY: the caller's promise; then the block is as long as is cleared.
            unsafe {
                let block = self.alloc(layout);
                if !block.is_null() {
                    block.write_bytes(0, layout.size());
                }
                return block;
            }
        }
        // SAFETY: of a size that is not 0.
        let block = unsafe { Plain.alloc_zeroed(more) };
        if !block.is_null() {
            // SAFETY: just allocated.
            unsafe { hand_out(block, layout, true) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // It always moves: who keeps the old pointer is found out.
        // SAFETY: the caller's promise: the new layout is one, and the block is of the old.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
            if !new.is_null() {
                check(block, layout);
                ptr::copy_nonoverlapping(block, new, layout.size().min(new_size));
                self.dealloc(block, layout);
            }
            new
        }
    }
}

#[cold]
#[inline(never)]
fn report(address: usize, layout: Layout, what: &str) -> ! {
    misuse::end(address, sealed(layout), format_args!("{what}, as one of {} bytes", layout.size()))
}

#[cold]
#[inline(never)]
fn report_size(address: usize, layout: Layout, was: usize) -> ! {
    let what = format_args!("is freed as one of {} bytes, but was allocated with {was}", layout.size());
    misuse::end(address, sealed(layout), what)
}
