//! The global heap: the `GlobalAlloc`. The path of every allocation begins here; uses everything below.
//!
//! ```text
//! alloc    thread's cache -> current slab of the class -> its first free block                      (inlined)
//!          else: what others freed, new blocks of the slab, another slab, a span of an open arena, a new arena
//! dealloc  block -> its slab, by arithmetic -> mine: first in its list                              (inlined)
//!          else: one compare-and-swap into the slab's list of blocks that others freed
//! ```

use crate::cache::{Block, Cache};
use crate::class::{Kind, MEDIUM_MAX, SMALL_MAX, kind_of, size_of_class};
use crate::heap::{Core, free_remote};
use crate::{slab, thread};
use core::alloc::{GlobalAlloc, Layout};
use core::cmp::Ordering;
use core::ptr::{self, NonNull};
use rdmalloc_arenas::{Access, ArenaInfo, ArenaStats, AttachError, Config, DetachError, Device, Registrar, SLICE};

/// The tag of the global heap's arenas.
const GLOBAL_TAG: u32 = 0;
/// The tag of the internal heap's arenas.
const INTERNAL_TAG: u32 = 1;
/// The tag of the first heap that a program makes.
pub(crate) const FIRST_HEAP_TAG: u32 = 2;

/// The global heap. Memory that a device refuses is served all the same: a program must go on.
pub(crate) static GLOBAL: Core = Core::new(Config {
    access: Access::LOCAL_WRITE,
    require_registration: false,
    serves_children: true,
    tag: GLOBAL_TAG,
});

/// What threads allocate from while they are inside the arenas. No device is ever attached to it.
static INTERNAL: Core = Core::new(Config {
    access: Access::LOCAL_READ,
    require_registration: false,
    serves_children: true,
    tag: INTERNAL_TAG,
});

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

/// What a drain pass has closed, and what it left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Trimmed {
    /// Arenas that were closed: deregistered with every device, and given back to the kernel.
    pub closed_arenas: usize,
    /// Their bytes.
    pub closed_bytes: usize,
    /// Arenas that are open still, since something in them is in use.
    pub open_arenas: usize,
    /// Their bytes.
    pub open_bytes: usize,
    /// Arenas that a device would not let go of; mapped for ever.
    pub stuck_arenas: usize,
}

impl Trimmed {
    pub(crate) fn of(core: &Core, own: Option<&Cache>) -> Trimmed {
        let closed = core.drain(own);
        let stats = core.arenas.stats();
        Trimmed {
            closed_arenas: closed.arenas,
            closed_bytes: closed.bytes,
            open_arenas: stats.arenas,
            open_bytes: stats.open_bytes,
            stuck_arenas: stats.stuck_arenas,
        }
    }
}

impl Rdmalloc {
    /// The global heap.
    #[must_use]
    pub const fn new() -> Rdmalloc {
        Rdmalloc(())
    }

    /// Attaches a device: registers every arena with it, and from now on every arena that is opened.
    ///
    /// Blocks that were allocated before are reached as well. Other threads may go on meanwhile; they wait only where they
    /// need a new arena. What is open is faulted in and pinned, which takes some 50 us per MiB with 4 KiB pages.
    ///
    /// # Errors
    ///
    /// [`AttachError`] says what was wanted and what to do; nothing has changed then, and the registrar is dropped.
    pub fn attach(&self, device: impl Registrar) -> Result<Device, AttachError> {
        GLOBAL.attach(device, thread::existing())
    }

    /// Detaches a device: deregisters every arena from it. Blocks live on; the device's keys are dead.
    ///
    /// The caller sees to it that no work request that uses them is under way.
    ///
    /// # Errors
    ///
    /// [`DetachError`], when it is not attached, or would not let go of an arena (which is then kept for ever).
    pub fn detach(&self, device: Device) -> Result<(), DetachError> {
        thread::inside(|| GLOBAL.arenas.detach(device))
    }

    /// A drain pass: closes every arena in which nothing is in use. A closed arena is deregistered with every device first.
    ///
    /// Caches of this thread and of threads that have ended are emptied. A thread that lives keeps its cache: what others
    /// have freed into it is seen when that thread allocates again, or ends.
    pub fn trim(&self) -> Trimmed {
        // Pinned by nobody, but its address space is the global heap's as well.
        INTERNAL.drain(None);
        Trimmed::of(&GLOBAL, thread::existing())
    }

    /// Figures of the heap's arenas.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        GLOBAL.arenas.stats()
    }

    /// Each arena of the heap, newest first.
    #[must_use]
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        thread::inside(|| GLOBAL.arenas.arenas())
    }
}

// SAFETY: blocks are apart from each other and lie in mapped memory until they are freed: slabs hand a block out once until it
// is back, and spans are apart (the arenas' bitmaps). Sizes and alignments are those of the layout's kind (`class`). Nothing
// unwinds: nothing here panics, and calls of registrars are guarded.
unsafe impl GlobalAlloc for Rdmalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Kind::Small(class) | Kind::Medium(class) = kind_of(layout)
            && let Some(block) = thread::current().pop(class)
        {
            return block.as_ptr();
        }
        allocate(layout, false).map_or(ptr::null_mut(), |block| block.start.as_ptr())
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
        let cache = thread::current();
        if slab.owner() == cache.id {
            // SAFETY: the block is the caller's; the slab is this thread's cache's, and so this thread's.
            if unsafe { slab.push(block) } {
                cache.rebook(&GLOBAL.arenas, slab);
            }
        } else {
            // SAFETY: the block is the caller's.
            unsafe { free_elsewhere(slab, block) };
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let quick = match kind_of(layout) {
            // From a page on, memory that was never used may be at hand; the slow way knows.
            Kind::Small(class) if size_of_class(class) < 4096 => thread::current().pop(class),
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
            }
            new
        }
    }
}

/// The slow way of an allocation.
#[cold]
#[inline(never)]
fn allocate(layout: Layout, zeroed: bool) -> Option<Block> {
    let Some(cache) = thread::own() else {
        let core = if thread::is_inside() { &INTERNAL } else { &GLOBAL };
        return core.allocate(layout, zeroed).ok();
    };
    let kind = kind_of(layout);
    loop {
        match cache.allocate(&GLOBAL.arenas, kind, layout.align(), zeroed) {
            Ok(block) => return Some(block),
            Err(want) => GLOBAL.make_room(want, Some(cache)).ok()?,
        }
    }
}

/// Frees a block whose slab is not this thread's.
///
/// # Safety
///
/// As [`free_remote`].
#[cold]
#[inline(never)]
unsafe fn free_elsewhere(slab: &'static slab::Slab, block: NonNull<u8>) {
    // SAFETY: the caller's promise.
    unsafe { free_remote(slab, block) };
}

/// Frees a large block.
#[inline(never)]
fn free_large(block: NonNull<u8>, slices: usize) {
    let address = block.addr().get();
    // SAFETY: a live block lies in an open arena.
    if unsafe { slab::header(address) }.tag() == INTERNAL_TAG {
        return INTERNAL.arenas.give(address, slices);
    }
    match thread::existing() {
        Some(cache) => cache.give(&GLOBAL.arenas, address, slices),
        None => GLOBAL.arenas.give(address, slices),
    }
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
        (Kind::Large(from), Kind::Large(to)) => {
            let address = block.addr().get();
            // SAFETY: a live block lies in an open arena.
            let tag = unsafe { slab::header(address) }.tag();
            let arenas = if tag == INTERNAL_TAG { &INTERNAL.arenas } else { &GLOBAL.arenas };
            match to.cmp(&from) {
                Ordering::Less => arenas.shrink(address, from, to),
                Ordering::Equal => true,
                Ordering::Greater => arenas.grow(address, from, to).is_some(),
            }
        }
        _ => false,
    }
}

const _: () = assert!(SMALL_MAX < MEDIUM_MAX && MEDIUM_MAX == SLICE);
