//! Heaps that a program makes: [`Heap`], with access flags of its own. Uses `heap`.

use crate::cache::Cache;
use crate::fork;
use crate::global::FIRST_HEAP_TAG;
use crate::heap::Core;
use crate::limits::Limited;
use crate::maintain::{MaintainError, Maintainer, Maintenance};
use crate::memory::Memory;
use crate::places::{self, Left};
use crate::slab::{self, Slab};
use crate::stats::{Stats, Trimmed};
use crate::thread;
use core::fmt;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicPtr, fence};
use memmap2::MmapOptions;
use rdmalloc_arenas::bell::Bell;
use rdmalloc_arenas::sync::Lock;
use rdmalloc_arenas::{
    Access, ArenaInfo, AttachError, Clock, Config, DetachError, Device, Policy, Registrar, Retention, SLICE, tag_of,
};
use std::time::Duration;

/// How many heaps a program can have at once, beside the global one.
const MAX_HEAPS: usize = 4096;

/// The cores of all heaps that were ever made; a core whose heap has ended serves another. Metadata, so in mappings of
/// their own, for ever.
static CORES: [AtomicPtr<Core>; MAX_HEAPS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_HEAPS];
/// Where the maintainers of these heaps sleep.
static BELLS: [Bell; MAX_HEAPS] = [const { Bell::new() }; MAX_HEAPS];
/// Held while a heap is made.
pub(crate) static CHANGE: Lock<()> = Lock::new(());

/// A heap of its own: arenas with access flags of their own, out of which a program takes buffers.
///
/// A handle: cloning it gives another for the same heap. When the last is dropped, no new buffers can be had; the arenas
/// close, deregistered, as the last buffer goes, and then the heap's devices are detached.
///
/// Unlike the global heap, a heap with a device attached serves registered memory or none ([`TakeError::Register`](crate::TakeError::Register)), unless its
/// [`Policy`] says otherwise.
///
/// ```
/// use rdmalloc::{Access, Heap};
///
/// let heap = Heap::builder().access(Access::REMOTE_READ | Access::REMOTE_WRITE).build()?;
/// let mut buffer = heap.buffer(64 << 10)?;
/// buffer.try_extend_from_slice(b"hello")?;
/// assert_eq!((&buffer[..], buffer.capacity()), (&b"hello"[..], 64 << 10));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Heap {
    pub(crate) core: &'static Core,
}

/// Makes a [`Heap`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    access: Access,
    pub(crate) limited: Limited,
    retention: Retention,
    pub(crate) memory: Memory,
    zero_on_free: bool,
    serves_children: bool,
}

/// Why a heap could not be made.
#[derive(Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// There are as many heaps as a process can have.
    TooManyHeaps {
        /// How many that is.
        limit: usize,
    },
    /// No memory for the heap's own books.
    NoMemory(std::io::Error),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyHeaps { limit } => {
                write!(f, "{limit} heaps exist, which is the limit of a process; drop handles and buffers of some")
            }
            Self::NoMemory(error) => write!(f, "no memory for a heap's books: {error}"),
        }
    }
}

impl std::error::Error for BuildError {}

impl Builder {
    /// What devices and peers may do with the heap's memory; [`Access::LOCAL_WRITE`] unless said.
    pub fn access(mut self, access: Access) -> Builder {
        self.access = access;
        self
    }

    /// Which empty arenas are kept for the next demand, and for how long; see [`Heap::set_retention`].
    pub fn retention(mut self, retention: Retention) -> Builder {
        self.retention = retention;
        self
    }

    /// Whether memory is cleared when it is given back, so that nobody finds what was in it: not who gets it next, and no peer that
    /// reads it by the heap's rkey. Not unless said.
    ///
    /// All of a block is cleared, whatever its owner has used of it, since a peer may have written anywhere; by the thread that
    /// drops it, before anybody can have it. That touches all of it, as if it were written once: a turn of a 64 KiB buffer takes
    /// 0.4 us in place of 0.02, one of 4 MiB 35 us (`cargo bench -p rdmalloc-benches --profile dev --bench buffer`). Every byte of
    /// the heap's free memory is zero then, unless a peer writes there.
    ///
    /// ```
    /// use rdmalloc::{Access, Heap};
    ///
    /// let heap = Heap::builder().access(Access::REMOTE_READ).zero_on_free(true).build()?;
    /// let secret = heap.buffer_from_slice(b"of one peer")?;
    /// drop(secret); // no other peer reads it
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn zero_on_free(mut self, zero: bool) -> Builder {
        self.zero_on_free = zero;
        self
    }

    /// Whether children of `fork` have the heap; they do not, unless said.
    ///
    /// A heap that they do not have costs a fork nothing (the kernel copies pinned memory at once, some 100 ms for each 64 MiB
    /// of 4 KiB pages), and its memory is not there in a child: buffers that it inherits can be dropped, and are not to be looked at
    /// (that is a segmentation fault); new ones, and devices, are refused ([`TakeError::NotInChild`](crate::TakeError::NotInChild)).
    /// Collections of such a heap must not be dropped in a child, since they look at what they hold. A child may make heaps of its
    /// own.
    pub fn serves_children(mut self, serves: bool) -> Builder {
        self.serves_children = serves;
        self
    }

    /// Makes the heap. Memory is taken when the first buffer is.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn build(self) -> Result<Heap, BuildError> {
        fork::install();
        end_what_was_left();
        let _change = CHANGE.lock();
        let config = |index: usize| Config {
            access: self.access,
            policy: Policy::Require,
            serves_children: self.serves_children,
            tag: FIRST_HEAP_TAG + index as u32,
        };
        for (index, slot) in CORES.iter().enumerate() {
            let mut place = slot.load(Acquire);
            let fresh = || Core::arenas(config(index), &BELLS[index]);
            // SAFETY: a core that is in its slot lives for ever.
            match unsafe { place.as_ref() } {
                Some(core) if !core.phase.is_unused() => continue,
                // SAFETY: the core is of a heap that has ended: it has no arena, no device, no cache, and nobody who looks at
                // its arenas. Its phase, which a late buffer may still read, stays in place.
                Some(_) => drop(unsafe { ptr::replace(&raw mut (*place).arenas, fresh()) }),
                None => {
                    let mut map = MmapOptions::new().len(size_of::<Core>()).map_anon().map_err(BuildError::NoMemory)?;
                    place = map.as_mut_ptr().cast();
                    core::mem::forget(map);
                    // SAFETY: the new mapping is as large as a core, and aligned to a page.
                    unsafe { place.write(Core::new(config(index), &BELLS[index])) };
                }
            }
            // SAFETY: written above, or before; lives for ever.
            let core = unsafe { &*place };
            self.limited.apply(&core.arenas);
            core.arenas.set_retention(self.retention);
            self.memory.apply(&core.arenas);
            core.arenas.set_free_memory_zero(self.zero_on_free);
            core.begin();
            core.handles.store(1, Relaxed);
            core.phase.open();
            slot.store(place, Release);
            return Ok(Heap { core });
        }
        Err(BuildError::TooManyHeaps { limit: MAX_HEAPS })
    }
}

impl Heap {
    /// Begins a new heap.
    pub fn builder() -> Builder {
        let (limited, memory) = Default::default();
        let retention = Retention::new();
        let (zero_on_free, serves_children) = (false, false);
        Builder { access: Access::default(), limited, retention, memory, zero_on_free, serves_children }
    }

    /// What devices and peers may do with the heap's memory.
    #[must_use]
    pub fn access(&self) -> Access {
        self.core.arenas.config().access
    }

    /// Attaches a device: registers every arena with it, and from now on every arena that is opened.
    ///
    /// # Errors
    ///
    /// [`AttachError`] says what was wanted and what to do; nothing has changed then, and the registrar is dropped.
    pub fn attach(&self, device: impl Registrar) -> Result<Device, AttachError> {
        self.core.attach(device)
    }

    /// Attaches several devices, all or none. They register what is open at once, each on a thread, where that pays; so this
    /// takes as long as the slowest of them does, where attaching one after the other takes the sum.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach), the first; no device is attached then, and all are dropped.
    pub fn attach_all<R: Registrar>(&self, devices: impl IntoIterator<Item = R>) -> Result<Vec<Device>, AttachError> {
        self.core.attach_all(devices.into_iter().collect())
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
    /// from it. Buffers live on; the device's keys are dead.
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
        self.core.detach_within(device, patience)
    }

    /// A drain pass: closes every arena in which nothing is in use. A closed arena is deregistered with every device first.
    pub fn trim(&self) -> Trimmed {
        Trimmed::of(self.core)
    }

    /// The devices that are attached, with their names.
    #[must_use]
    pub fn devices(&self) -> Vec<(Device, String)> {
        thread::inside(|| self.core.arenas.devices())
    }

    /// Starts a thread that looks after the heap: it opens and registers arenas before they are needed, closes what nobody needs
    /// any more, and tries again what was refused. Without it, who allocates does so when it is needed, and waits.
    ///
    /// # Errors
    ///
    /// [`MaintainError`]: there is one already, or no thread can be had.
    pub fn maintain(&self, maintenance: Maintenance) -> Result<Maintainer, MaintainError> {
        Maintainer::start(self.core, Some(self.clone()), maintenance)
    }

    /// Sets which empty arenas are kept for the next demand, and for how long; from now on.
    pub fn set_retention(&self, retention: Retention) {
        self.core.arenas.set_retention(retention);
    }

    /// Sets the clock by which empty arenas age, in place of the system's: for tests, and for programs that are simulated. Once,
    /// and before the first arena is opened; whether it was set.
    pub fn set_clock(&self, clock: Clock) -> bool {
        self.core.arenas.set_clock(clock)
    }

    /// Figures of the heap's arenas.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(self.core)
    }

    /// Each arena of the heap, lowest address first.
    #[must_use]
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        thread::inside(|| self.core.arenas.arenas())
    }
}

impl Clone for Heap {
    fn clone(&self) -> Heap {
        self.core.handles.fetch_add(1, Relaxed);
        Heap { core: self.core }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if self.core.handles.fetch_sub(1, AcqRel) == 1 {
            self.core.phase.begin_end();
            // Either a buffer that goes meanwhile sees the phase, or its block is seen here.
            fence(SeqCst);
            end_if_empty(self.core);
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("access", &self.access()).field("stats", &*self.stats()).finish()
    }
}

/// The core of the heap that made the buffer at `address`.
pub(crate) fn core_of(address: usize) -> Option<&'static Core> {
    core_of_tag(tag_of(address)?)
}

/// The core of the heap whose arenas have this tag.
pub(crate) fn core_of_tag(tag: u32) -> Option<&'static Core> {
    let index = tag.checked_sub(FIRST_HEAP_TAG)?;
    // SAFETY: cores live for ever.
    unsafe { CORES.get(index as usize)?.load(Acquire).as_ref() }
}

/// Each core that a heap has, or had. (They are made one after the other.)
pub(crate) fn each_core(action: impl FnMut(&'static Core)) {
    // SAFETY: cores live for ever.
    CORES.iter().map_while(|slot| unsafe { slot.load(Acquire).as_ref() }).for_each(action);
}

/// Gives a block back to its heap, which is found by its address; ends the heap with it, if nothing else is left of it.
///
/// # Safety
///
/// `block` was allocated by [`Core::allocate`], was marked anew if it was resized, and is the caller's.
#[inline]
pub(crate) unsafe fn give_back(block: NonNull<u8>) {
    // SAFETY: the block lies in a slab, or is marked as a large one.
    let slab = unsafe { slab::of_block(block) };
    let large = slab.large();
    if large > 0 {
        // SAFETY: the block is large, has so many slices, and is the caller's.
        unsafe { give_back_large(block, large, slab.tag()) };
        return;
    }
    if slab.zero_on_free() {
        // SAFETY: the block lies in this slab, and is the caller's.
        unsafe { clear_and_give_back(slab, block) };
    } else {
        // SAFETY: as above.
        unsafe { give_back_to(slab, block) };
    }
}

/// # Safety
///
/// `block` lies in `slab`, of a heap that a program made, and is the caller's.
#[inline(always)]
unsafe fn give_back_to(slab: &'static Slab, block: NonNull<u8>) {
    let cache = slab.cache();
    // SAFETY: the caller's promise.
    match unsafe { places::push(cache, slab, block) } {
        Some(Left::Nothing) => {}
        Some(left) => settle(cache, slab, left),
        // SAFETY: as above.
        None => unsafe { give_back_slow(slab, block) },
    }
}

/// Apart, since a call in the middle of the usual way costs it ten instructions.
///
/// # Safety
///
/// As [`give_back_to`].
#[inline(never)]
unsafe fn clear_and_give_back(slab: &'static Slab, block: NonNull<u8>) {
    if core_of(block.addr().get()).is_none_or(|core| core.arenas.is_gone()) {
        // A child of fork does not have it.
        return;
    }
    // SAFETY: the block is the caller's, and this long.
    unsafe { block.write_bytes(0, slab.block_size()) };
    // SAFETY: the caller's promise.
    unsafe { give_back_to(slab, block) };
}

/// # Safety
///
/// It is a large block of so many slices, of the heap with that tag, and the caller's.
#[inline(never)]
unsafe fn give_back_large(block: NonNull<u8>, slices: usize, tag: u32) {
    let Some(core) = core_of_tag(tag).filter(|core| !core.arenas.is_gone()) else { return };
    if core.arenas.is_free_memory_zero() {
        // SAFETY: the block is the caller's, and this long.
        unsafe { block.write_bytes(0, slices * SLICE) };
    }
    if core.take_large_back(block.addr().get(), slices) {
        end_if_empty(core);
    }
}

#[cold]
#[inline(never)]
fn settle(cache: &'static Cache, slab: &'static Slab, left: Left) {
    // If the cache is another heap's by now, then the block's heap has ended.
    if let Some(core) = core_of_tag(cache.tag())
        && core.settle(cache, slab, left)
    {
        end_if_empty(core);
    }
}

/// # Safety
///
/// As [`Core::free_slow`].
#[cold]
#[inline(never)]
unsafe fn give_back_slow(slab: &'static Slab, block: NonNull<u8>) {
    if let Some(core) = core_of(block.addr().get())
        // SAFETY: the caller's promise.
        && unsafe { core.free_slow(slab, block) }
    {
        end_if_empty(core);
    }
}

/// A heap may have nothing left, and yet could not be ended.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Ends heaps that could not be ended when their last block went.
pub(crate) fn end_what_was_left() {
    if LEFT.load(Relaxed) && LEFT.swap(false, Relaxed) {
        each_core(end_if_empty);
    }
}

/// Ends a heap whose last handle is gone, once its last buffer is: closes its arenas, detaches its devices, and frees the
/// core for another heap. A heap with memory that a device would not let go of stays as it is.
///
/// Devices are called, so no lock is held; see `phase`.
#[cold]
pub(crate) fn end_if_empty(core: &Core) {
    // In a child of fork that does not have the heap, its core is never another's: buffers may be left that lead to it.
    if core.arenas.is_gone() || !core.phase.begin_drain() {
        return;
    }
    loop {
        fence(SeqCst);
        if core.drain().1.busy > 0 {
            // Where the kernel had no barrier, nobody comes after this one.
            LEFT.store(true, Relaxed);
        }
        let stats = core.arenas.stats();
        if stats.arenas + stats.stuck_arenas == 0 {
            break;
        }
        if core.phase.end_drain() {
            return;
        }
    }
    core.phase.end();
    // The phase makes this thread the only one to get here.
    thread::inside(|| core.arenas.detach_all());
    core.give_up_caches();
    core.arenas.set_listener(None);
    core.phase.reuse();
}
