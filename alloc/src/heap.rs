//! The core of a heap: its arenas, and the caches that have no thread: idle ones, and shards behind locks. Uses `cache`,
//! `caches`, `phase` and the arenas.
//!
//! The global heap's threads each have a cache; a heap that a program makes, and the internal heap, are served from shards.
//! Both do the same with a cache that they have to themselves. No lock is held while an arena is opened, since that calls
//! devices: a cache that finds no room says so, and the room is made after its lock is released.

use crate::cache::{Block, Cache, NoRoom, Swept};
use crate::caches::{self, Idle, Owned};
use crate::class::{Kind, kind_of};
use crate::global::GLOBAL;
use crate::phase::Phase;
use crate::slab::{self, Freed};
use crate::thread;
use core::alloc::Layout;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst, fence};
use crossbeam_utils::CachePadded;
use rdmalloc_arenas::bell::Bell;
use rdmalloc_arenas::sync::{Lock, asymmetric};
use rdmalloc_arenas::{Arenas, AttachError, CaughtUp, Closed, Config, DetachError, Device, Registrar, TakeError};
use std::io;
use std::time::Duration;

/// Shards of a heap. More than there are threads in the middle of an operation, mostly.
const SHARDS: usize = 8;

/// See the module.
pub(crate) struct Core {
    pub(crate) arenas: Arenas,
    /// Where the maintainer sleeps. Not the arenas': a late buffer may still read it when these are another heap's.
    pub(crate) bell: &'static Bell,
    idle: Lock<Idle>,
    shards: [CachePadded<Lock<Option<Owned>>>; SHARDS],
    /// Handles to a heap that a program made.
    pub(crate) handles: AtomicUsize,
    /// Where the heap is in its life; unused in the global and the internal heap, which have no end.
    pub(crate) phase: Phase,
}

impl Core {
    /// No arenas yet.
    pub(crate) const fn arenas(config: Config, bell: &'static Bell) -> Arenas {
        Arenas::with_bell(config, bell).helped_by(thread::help)
    }

    /// A core without arenas.
    pub(crate) const fn new(config: Config, bell: &'static Bell) -> Core {
        Core {
            arenas: Core::arenas(config, bell),
            bell,
            idle: Lock::new(Idle::new()),
            shards: [const { CachePadded::new(Lock::new(None)) }; SHARDS],
            handles: AtomicUsize::new(0),
            phase: Phase::unused(),
        }
    }

    /// A cache for a thread that begins: one that a thread has left, or a new one.
    pub(crate) fn adopt(&self) -> Option<Owned> {
        let idle = self.idle.lock().pop();
        idle.or_else(Owned::obtain)
    }

    /// Takes the cache of a thread that ends.
    pub(crate) fn leave(&self, cache: Owned) {
        cache.leave(&self.arenas);
        self.idle.lock().push(cache);
    }

    /// Has room made for what a cache could not serve.
    ///
    /// First what caches hold without need is given back; an arena is opened if that is not enough.
    pub(crate) fn make_room(&self, want: NoRoom) -> Result<(), TakeError> {
        thread::inside(|| {
            if self.sweep().slices >= want.slices {
                return Ok(());
            }
            self.arenas.make_room(want.seen, want.slices, want.align)
        })
    }

    /// Empties all caches of this heap: those of threads, idle ones, and shards.
    fn sweep(&self) -> Swept {
        let mut swept = Swept::default();
        self.arenas.choose_draining();
        for shard in &self.shards {
            if let Some(cache) = shard.lock().as_ref() {
                cache.sweep(&self.arenas, &mut swept);
            }
        }
        if self.serves_threads() {
            // One at a time, so that a cache asked for is drained by who asked.
            static SWEEPING: Lock<()> = Lock::new(());
            let _sweeping = SWEEPING.lock();
            caches::for_each(|cache| swept.busy += usize::from(!cache.ask()));
            let barrier = asymmetric::heavy() || !asymmetric::is_available();
            caches::for_each(|cache| cache.drain(&self.arenas, barrier, &mut swept));
        }
        swept
    }

    /// Empties all caches for a maintainer, which hears of who uses one after this.
    pub(crate) fn sweep_and_listen(&self) -> Swept {
        self.bell.listen();
        self.sweep()
    }

    fn serves_threads(&self) -> bool {
        core::ptr::eq(self, &GLOBAL)
    }

    /// Lets go of the shards' caches, which hold nothing any more: other heaps may use them.
    pub(crate) fn give_up_caches(&self) {
        for shard in &self.shards {
            if let Some(cache) = shard.lock().take() {
                caches::retire(cache);
            }
        }
    }

    /// A drain pass: all caches are emptied, and every arena without a block is closed. With what the caches are left with.
    pub(crate) fn drain(&self) -> (Closed, Swept) {
        thread::inside(|| {
            let swept = self.sweep();
            let closed = self.arenas.close_all_empty();
            self.arenas.purge_all();
            (closed, swept)
        })
    }

    /// Registers what was refused, as far as that can be done now, and tells the listener of the limits.
    pub(crate) fn catch_up(&self) -> CaughtUp {
        let done = thread::inside(|| self.arenas.register_what_was_refused());
        self.arenas.tell();
        done
    }

    /// Bytes of spare spans in caches.
    pub(crate) fn cached_bytes(&self) -> usize {
        let shards = self.shards.iter().map(|shard| shard.lock().as_ref().map_or(0, |cache| cache.spare_bytes()));
        let mut bytes = shards.sum();
        if self.serves_threads() {
            caches::for_each(|cache| bytes += if cache.is_threaded() { cache.spare_bytes() } else { 0 });
        }
        bytes
    }

    /// Attaches a device; what caches hold without need is given back first, and not pinned.
    pub(crate) fn attach(&self, device: impl Registrar) -> Result<Device, AttachError> {
        let attached = thread::inside(|| {
            self.sweep();
            // The maintainer has headroom to open.
            self.arenas.attach(Box::new(device)).inspect(|_| self.bell.call())
        });
        self.arenas.tell();
        attached
    }

    /// Attaches several, all or none.
    pub(crate) fn attach_all<R: Registrar>(&self, devices: Vec<R>) -> Result<Vec<Device>, AttachError> {
        thread::inside(|| {
            self.sweep();
            // Boxed here: in the global heap, a device would keep an arena open.
            self.arenas.attach_all(devices.into_iter().map(|device| Box::new(device) as Box<dyn Registrar>).collect())
        })
    }

    /// Detaches a device, waiting so long for what uses it.
    pub(crate) fn detach_within(&self, device: Device, patience: Duration) -> Result<(), DetachError> {
        thread::inside(|| self.arenas.detach_within(device, patience))
    }

    /// Memory for a layout, from a shard.
    pub(crate) fn allocate(&self, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
        let kind = kind_of(layout);
        loop {
            let result = {
                let mut shard = self.shards[thread::shard(SHARDS)].lock();
                self.bell.touch();
                let Some(cache) = shard.as_ref() else {
                    let out_of_memory = || TakeError::NoMemory {
                        wanted: size_of::<Cache>(),
                        source: io::ErrorKind::OutOfMemory.into(),
                    };
                    *shard = Some(Owned::obtain().ok_or_else(out_of_memory)?);
                    continue;
                };
                let quick = match kind {
                    Kind::Small(class) | Kind::Medium(class) => cache.pop_any(class),
                    Kind::Large(_) => None,
                };
                match quick {
                    Some(start) => Ok(Block { start, zero: false }),
                    None => cache.allocate(&self.arenas, kind, layout.align(), zeroed),
                }
            };
            match result {
                Ok(block) => {
                    if let Kind::Large(slices) = kind {
                        // SAFETY: the block is new, and lies in an open arena.
                        unsafe { slab::header(block.start.addr().get()) }.set_large(slices);
                    }
                    return Ok(block);
                }
                Err(want) => self.make_room(want)?,
            }
        }
    }

    /// Takes back memory of this core's. Whether the heap is ending, and this may have been its last block.
    ///
    /// # Safety
    ///
    /// `block` was allocated from this core with a layout of the same kind, and is the caller's.
    pub(crate) unsafe fn free(&self, block: NonNull<u8>, layout: Layout) -> bool {
        let shard = &self.shards[thread::shard(SHARDS)];
        match kind_of(layout) {
            Kind::Small(_) | Kind::Medium(_) => {
                // SAFETY: the layout is the block's, so it is in a slab.
                let slab = unsafe { slab::of_block(block) };
                let owner = slab.owner();
                if let Some(shard) = shard.try_lock()
                    && let Some(cache) = shard.as_ref()
                    && cache.name() == owner
                {
                    self.bell.touch();
                    // SAFETY: the block is the caller's, the slab this cache's, and the lock gives the cache to us.
                    if unsafe { slab.push_any(block) } {
                        cache.rebook(&self.arenas, slab);
                    }
                    // Read under the lock that who ends the heap takes after it has set the phase.
                    return self.phase.is_ending();
                }
                // SAFETY: the block is the caller's.
                unsafe { free_remote(slab, block) };
                // Without the lock: either who ends the heap sees the block, or this sees the phase.
                fence(SeqCst);
                self.bell.touch();
                self.phase.is_ending()
            }
            Kind::Large(slices) => {
                let shard = shard.lock();
                self.bell.touch();
                match shard.as_ref() {
                    Some(cache) => cache.give(&self.arenas, block.addr().get(), slices),
                    None => self.arenas.give(block.addr().get(), slices),
                }
                drop(shard);
                fence(SeqCst);
                self.phase.is_ending()
            }
        }
    }
}

/// Frees a block into the slab of another owner. Whether it was the first since the owner has looked.
///
/// # Safety
///
/// `block` is a block of `slab`, and the caller's.
#[inline]
pub(crate) unsafe fn free_remote(slab: &'static slab::Slab, block: NonNull<u8>) -> bool {
    // SAFETY: the caller's promise.
    let Freed::Tell(owner) = (unsafe { slab.push_remote(block) }) else { return false };
    slab.tell(caches::told(owner));
    true
}
