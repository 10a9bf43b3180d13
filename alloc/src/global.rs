//! The global heap: the `GlobalAlloc`. The path of every allocation begins here; uses everything below.
//!
//! ```text
//! alloc    thread's cache -> current slab of the class -> its first free block                      (inlined)
//!          else: what others freed, new blocks of the slab, another slab, a span of an open arena, a new arena
//! dealloc  block -> its slab, by arithmetic -> mine: first in its list                              (inlined)
//!          else: one compare-and-swap into the slab's list of blocks that others freed
//! large    a spare span of the thread's cache, by its length, to and fro; else a span of an arena
//! ```

use crate::cache::{Block, Pended};
use crate::class::{Kind, MEDIUM_MAX, SMALL_MAX, class_for, kind_of, size_of_class, slices_for};
use crate::heap::{Core, free_remote};
use crate::maintain::{MaintainError, Maintainer, Maintenance};
use crate::stats::{Stats, Trimmed};
use crate::{slab, thread};
use core::alloc::{GlobalAlloc, Layout};
use core::cmp::Ordering;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::bell::Bell;
use rdmalloc_arenas::{
    Access, ArenaInfo, Arenas, AttachError, Clock, Config, DetachError, Device, Policy, Registrar, Retention, SLICE,
};
use std::time::Duration;

/// The tag of the global heap's arenas.
const GLOBAL_TAG: u32 = Config::GLOBAL_TAG;
/// The tag of the internal heap's arenas.
const INTERNAL_TAG: u32 = 1;
/// The tag of the first heap that a program makes.
pub(crate) const FIRST_HEAP_TAG: u32 = 2;

/// From this size on, a block that moved may have left an arena that is worth closing.
const IDLE: usize = 64 << 20;

/// Where the global heap's maintainer sleeps.
static BELL: Bell = Bell::new();
/// Nobody maintains the internal heap.
static NOBODY: Bell = Bell::new();

/// The global heap. Memory that a device refuses is served all the same: a program must go on.
pub(crate) static GLOBAL: Core = Core::new(
    Config { access: Access::LOCAL_WRITE, policy: Policy::Prefer, serves_children: true, tag: GLOBAL_TAG },
    &BELL,
);

/// What threads allocate from while they are inside the arenas. No device is ever attached to it.
pub(crate) static INTERNAL: Core = Core::new(
    Config { access: Access::LOCAL_READ, policy: Policy::Prefer, serves_children: true, tag: INTERNAL_TAG },
    &NOBODY,
);

/// The global allocator.
///
/// Every allocation of the program comes from large arenas. Once a device is attached, all arenas are registered with it,
/// those that are open and those that will be; so whatever the program allocates can be sent and received from where it
/// lies. Until then nothing is pinned, and free memory goes back to the kernel as with any allocator.
///
/// Devices may read and write the memory of this heap, peers may not: remote access is for heaps that a program makes
/// ([`Heap`](crate::Heap)).
///
/// A value of no size: all of them are the same heap.
///
/// ```
/// use rdmalloc::Rdmalloc;
///
/// #[global_allocator]
/// static HEAP: Rdmalloc = Rdmalloc::new();
///
/// let greeting = String::from("from an arena");
/// assert_eq!(HEAP.arenas().iter().filter(|arena| arena.memory.contains(&greeting.as_ptr().addr())).count(), 1);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Rdmalloc(());

impl Rdmalloc {
    /// The global heap.
    #[must_use]
    pub const fn new() -> Rdmalloc {
        Rdmalloc(())
    }

    /// Attaches a device: registers every arena with it, and from now on every arena that is opened.
    ///
    /// Blocks that were allocated before are reached as well. Other threads may go on meanwhile; they wait only where they
    /// need a new arena. What is open is pinned, which faults it in.
    ///
    /// # Errors
    ///
    /// [`AttachError`] says what was wanted and what to do; nothing has changed then, and the registrar is dropped.
    pub fn attach(&self, device: impl Registrar) -> Result<Device, AttachError> {
        GLOBAL.attach(device)
    }

    /// Attaches several devices, all or none. They register what is open at once, each on a thread, where that pays; so this
    /// takes as long as the slowest of them does, where attaching one after the other takes the sum.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach), the first; no device is attached then, and all are dropped.
    pub fn attach_all<R: Registrar>(&self, devices: impl IntoIterator<Item = R>) -> Result<Vec<Device>, AttachError> {
        GLOBAL.attach_all(devices.into_iter().collect())
    }

    /// Detaches a device that nobody holds: [`detach_within`](Self::detach_within) no time.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn detach(&self, device: Device) -> Result<(), DetachError> {
        self.detach_within(device, Duration::ZERO)
    }

    /// Detaches a device: waits, at most as long as said, until nobody holds it ([`Device::hold`]), then deregisters every arena
    /// from it. Blocks live on; the device's keys are dead.
    ///
    /// While it waits, nobody gets a hold on the device any more; everything else goes on. A device that is lost
    /// ([`Device::mark_lost`]) is detached at once. The caller sees to it that no work request that uses the keys is under way
    /// without a hold.
    ///
    /// # Errors
    ///
    /// [`DetachError`]: it is not attached; or still in use, then it stays attached; or would not let go of an arena, which is
    /// then kept for ever.
    pub fn detach_within(&self, device: Device, patience: Duration) -> Result<(), DetachError> {
        GLOBAL.detach_within(device, patience)
    }

    /// A drain pass: closes every arena in which nothing is in use. A closed arena is deregistered with every device first.
    ///
    /// The caches of all threads are emptied first, also of those that sleep; only a thread that was stopped by the system in
    /// the middle of an allocation keeps its cache, and is counted.
    pub fn trim(&self) -> Trimmed {
        // Pinned by nobody, but its address space is the global heap's as well.
        INTERNAL.drain();
        Trimmed::of(&GLOBAL)
    }

    /// The devices that are attached, with their names.
    #[must_use]
    pub fn devices(&self) -> Vec<(Device, String)> {
        thread::inside(|| GLOBAL.arenas.devices())
    }

    /// Starts a thread that looks after the heap: it opens and registers arenas before they are needed, closes what nobody needs
    /// any more, and tries again what was refused. Without it, who allocates does so when it is needed, and waits.
    ///
    /// # Errors
    ///
    /// [`MaintainError`]: there is one already, or no thread can be had.
    pub fn maintain(&self, maintenance: Maintenance) -> Result<Maintainer, MaintainError> {
        Maintainer::start(&GLOBAL, None, maintenance)
    }

    /// Sets which empty arenas are kept for the next demand, and for how long; from now on.
    pub fn set_retention(&self, retention: Retention) {
        GLOBAL.arenas.set_retention(retention);
    }

    /// Sets the clock by which empty arenas age, in place of the system's: for tests, and for programs that are simulated. Once,
    /// and before the first arena is opened; whether it was set.
    pub fn set_clock(&self, clock: Clock) -> bool {
        GLOBAL.arenas.set_clock(clock)
    }

    /// Figures of the heap's arenas.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&GLOBAL)
    }

    /// Each arena of the heap, lowest address first.
    #[must_use]
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        thread::inside(|| GLOBAL.arenas.arenas())
    }
}

/// The allocator without checks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

#[cfg(not(feature = "hardened"))]
const PATH: Plain = Plain;
#[cfg(feature = "hardened")]
const PATH: crate::hardened::Hardened = crate::hardened::Hardened;

// SAFETY: the path is a global allocator.
unsafe impl GlobalAlloc for Rdmalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { PATH.alloc(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { PATH.dealloc(block, layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { PATH.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { PATH.realloc(block, layout, new_size) }
    }
}

// SAFETY: blocks are apart from each other and lie in mapped memory until they are freed: slabs hand a block out once until it
// is back, and spans are apart (the arenas' bitmaps). Sizes and alignments are those of the layout's kind (`class`). Nothing
// unwinds: nothing here panics, and calls of registrars are guarded.
unsafe impl GlobalAlloc for Plain {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class_for(layout) else { return allocate_large(layout) };
        match thread::briefly(|cache| cache.pop(class)) {
            Some(block) => block.as_ptr(),
            None => allocate_next(layout),
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's block came from `alloc`, which never returns null for one.
        let block = unsafe { NonNull::new_unchecked(block) };
        let slab = match kind_of(layout) {
            // SAFETY: of this layout, so of such a slab.
            Kind::Small(_) => unsafe { slab::of_small(block) },
            // SAFETY: as above.
            Kind::Medium(_) => unsafe { slab::of_block(block) },
            Kind::Large(slices) => return free_large(block, slices),
        };
        let freed = thread::briefly(|cache| {
            // SAFETY: the block is the caller's; the slab is this thread's cache's, which is the thread's now.
            (slab.owner() == cache.name()).then(|| unsafe { slab.push(block) })
        });
        match freed {
            Some(false) => {}
            Some(true) => rebook(slab),
            // SAFETY: the block is the caller's.
            None => unsafe { free_elsewhere(slab, block) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let quick = match kind_of(layout) {
            // From a page on, memory that was never used may be at hand; the slow way knows.
            Kind::Small(class) if size_of_class(class) < 4096 => thread::briefly(|cache| cache.pop(class)),
            _ => None,
        };
        let block = match quick {
            Some(start) => Some(Block { start, zero: false }),
            None => allocate(layout, true),
        };
        let Some(block) = block else { return ptr::null_mut() };
        if !block.zero {
            // SAFETY: the block is new, and of this size.
            unsafe { block.start.write_bytes(0, layout.size()) };
        }
        block.start.as_ptr()
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise: it does not overflow when rounded up.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: the caller's block came from `alloc`.
        let start = unsafe { NonNull::new_unchecked(block) };
        // SAFETY: the block is the caller's, of this layout.
        if unsafe { fits_in_place(start, layout, new_layout) } {
            return block;
        }
        // SAFETY: the new size is not 0; the old block is valid for its size, the new one for the new size.
        unsafe {
            let new = self.alloc(new_layout);
            if !new.is_null() {
                ptr::copy_nonoverlapping(block, new, layout.size().min(new_size));
                self.dealloc(block, layout);
                if layout.size() >= IDLE {
                    close_idle();
                }
            }
            new
        }
    }
}

/// Closes the arena that a growing block has left, lest it stay registered until the next demand.
#[cold]
#[inline(never)]
fn close_idle() {
    if !thread::is_inside() {
        thread::inside(|| GLOBAL.arenas.close_idle());
    }
}

/// A large block: from the spare spans, or the slow way.
#[inline(never)]
fn allocate_large(layout: Layout) -> *mut u8 {
    if layout.align() <= SLICE
        && let Some(address) = thread::briefly(|cache| cache.pop_spare(slices_for(layout)))
    {
        return ptr::with_exposed_provenance_mut(address);
    }
    allocate_slow(layout)
}

/// The middle way of `alloc`: what is inlined into programs ends in a jump here.
#[cold]
#[inline(never)]
fn allocate_next(layout: Layout) -> *mut u8 {
    match class_for(layout).and_then(|class| thread::briefly(|cache| cache.pop_next(&GLOBAL.arenas, class))) {
        Some(block) => block.as_ptr(),
        None => allocate_slow(layout),
    }
}

/// The slow way of `alloc`.
#[cold]
#[inline(never)]
fn allocate_slow(layout: Layout) -> *mut u8 {
    allocate(layout, false).map_or(ptr::null_mut(), |block| block.start.as_ptr())
}

/// The slow way of an allocation.
#[cold]
fn allocate(layout: Layout, zeroed: bool) -> Option<Block> {
    let kind = kind_of(layout);
    loop {
        match thread::with_own(|cache| cache.allocate(&GLOBAL.arenas, kind, layout.align(), zeroed)) {
            Some(Ok(block)) => return Some(block),
            Some(Err(want)) => GLOBAL.make_room(want).ok()?,
            None => {
                let core = if thread::is_inside() { &INTERNAL } else { &GLOBAL };
                return core.allocate_from_shards(layout, zeroed).ok();
            }
        }
    }
}

/// Sees to the books of a slab of this thread's, of which a block was freed.
#[cold]
#[inline(never)]
fn rebook(slab: &'static slab::Slab) {
    if thread::briefly(|cache| cache.rebook_briefly(slab)) {
        return;
    }
    // A drain pass may have come between; `rebook` looks whose the slab is now.
    thread::with_own(|cache| cache.rebook(&GLOBAL.arenas, slab));
}

/// Frees a block whose slab is another's, or this thread's that a drain pass has now.
///
/// # Safety
///
/// As [`free_remote`].
#[inline(never)]
unsafe fn free_elsewhere(slab: &'static slab::Slab, block: NonNull<u8>) {
    // SAFETY: the block is the caller's; in the global heap, links lie in blocks.
    let told = match thread::briefly(|cache| unsafe { cache.pend(slab, block) }) {
        Pended::Yes => return,
        Pended::YesAndTold => true,
        // SAFETY: as above.
        Pended::No => unsafe { free_afar(slab, block) },
    };
    if told {
        GLOBAL.bell.touch_after_fence();
    }
}

/// The same of a block that is not kept back: it is this thread's after all, or large, or the thread has no cache now. Whether the
/// owner was told.
///
/// # Safety
///
/// As [`free_remote`].
#[cold]
#[inline(never)]
unsafe fn free_afar(slab: &'static slab::Slab, block: NonNull<u8>) -> bool {
    let own = thread::with_own_named(slab.owner(), |cache| {
        // SAFETY: the block is the caller's; the slab is this cache's, whose gate is held.
        if unsafe { slab.push(block) } {
            cache.rebook(&GLOBAL.arenas, slab);
        }
    });
    // SAFETY: the block is the caller's, and the slab another's.
    !own && unsafe { free_remote(slab, block) }
}

/// Frees a large block.
#[inline(never)]
fn free_large(block: NonNull<u8>, slices: usize) {
    let address = block.addr().get();
    // SAFETY: a live block lies in an open arena.
    let tag = unsafe { slab::header(address) }.tag();
    if Arenas::may_drain() {
        return free_large_after_peak(address, slices, tag);
    }
    if tag == INTERNAL_TAG || !thread::briefly(|cache| cache.id != 0 && cache.push_spare(address, slices)) {
        give_large(address, slices, tag);
    }
}

/// Frees a large block while some arenas shall run empty: spans in these are not kept.
#[cold]
#[inline(never)]
fn free_large_after_peak(address: usize, slices: usize, tag: u32) {
    let keep = tag != INTERNAL_TAG && !Arenas::is_draining(address);
    if !(keep && thread::briefly(|cache| cache.id != 0 && cache.push_spare(address, slices))) {
        give_large(address, slices, tag);
    }
}

/// Gives the span of a large block back to its arena.
#[cold]
#[inline(never)]
fn give_large(address: usize, slices: usize, tag: u32) {
    let core = if tag == INTERNAL_TAG { &INTERNAL } else { &GLOBAL };
    core.arenas.give(address, slices);
}

/// Whether a block serves for a new layout where it is; large ones grow and shrink for it.
///
/// The kind must stay, since what frees the block looks for it by the new layout.
///
/// # Safety
///
/// The block is the caller's, of layout `old`, which has the alignment of `new`.
unsafe fn fits_in_place(block: NonNull<u8>, old: Layout, new: Layout) -> bool {
    let in_slab = || {
        // SAFETY: called for kinds that lie in slabs.
        let size = unsafe { slab::of_block(block) }.block_size();
        // Half a block may be wasted by shrinking, no more.
        new.size() <= size && new.size() > size / 2
    };
    match (kind_of(old), kind_of(new)) {
        (Kind::Small(from), Kind::Small(to)) => from == to || in_slab(),
        (Kind::Medium(from), Kind::Medium(to)) => from == to || in_slab(),
        (Kind::Large(from), Kind::Large(to)) => resize_large(block, from, to),
        _ => false,
    }
}

/// Gives slices back at the end of a large block, or takes those behind it if they are free. Whether it was done.
#[inline(never)]
fn resize_large(block: NonNull<u8>, from: usize, to: usize) -> bool {
    let address = block.addr().get();
    // SAFETY: a live block lies in an open arena.
    let tag = unsafe { slab::header(address) }.tag();
    let arenas = if tag == INTERNAL_TAG { &INTERNAL.arenas } else { &GLOBAL.arenas };
    match to.cmp(&from) {
        Ordering::Less => arenas.shrink(address, from, to),
        Ordering::Equal => true,
        Ordering::Greater => {
            arenas.grow(address, from, to).is_some()
                // Waits for who has the role, which may be this thread if it is inside.
                || !thread::is_inside() && arenas.grow_arena(address, from, to).is_some()
        }
    }
}

const _: () = assert!(SMALL_MAX < MEDIUM_MAX && MEDIUM_MAX == SLICE);
