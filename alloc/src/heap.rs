//! The core of a heap: its arenas, its caches, and the shards: caches behind locks. Uses `cache`, `caches`, `phase` and the
//! arenas.
//!
//! Threads have caches of the global heap (`thread`) and of heaps that a program makes (`places`); where they cannot, and in the
//! internal heap, shards serve. All do the same with a cache that they have to themselves. No lock is held while an arena is opened, since that calls
//! devices: a cache that finds no room says so, and the room is made after its lock is released.

#[cfg(test)]
mod tests;

use crate::cache::{Block, Cache, NoRoom, Pass, Swept};
use crate::caches::{self, Idle, Owned};
use crate::class::{Kind, class_for, kind_of};
use crate::global::FIRST_HEAP_TAG;
use crate::phase::Phase;
use crate::places::{self, Left};
use crate::slab::{self, Freed, Slab};
use crate::{inside, misuse};
use crate::{pool, thread};
use core::alloc::Layout;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};
use crossbeam_utils::CachePadded;
use rdmalloc_arenas::bell::Bell;
use rdmalloc_arenas::sync::{Lock, LockGuard, asymmetric};
use rdmalloc_arenas::{
    Arenas, AttachError, CaughtUp, Closed, Config, DetachError, Device, Registrar, SLICE, TakeError,
};
use std::io;
use std::time::Duration;

/// Shards of a heap. More than there are threads in the middle of an operation, mostly.
const SHARDS: usize = 8;
/// So many caches without a thread keep their empty slabs. Where threads come and go, each class then has the same slab for long: given
/// back each time, they would change places, and in the end every page of them has been touched.
const IDLE_WITH_SLABS: usize = 8;
/// Milliseconds from one time that caches are emptied for want of an arena to the next: it takes some 20 us, and as much to refill them.
const SWEEP_PAUSE: u64 = 100;

/// See the module.
pub(crate) struct Core {
    pub(crate) arenas: Arenas,
    /// Where the maintainer sleeps. Not the arenas': a late buffer may still read it when these are another heap's.
    pub(crate) bell: &'static Bell,
    /// The tag of its arenas. On a line that is not written, since every operation reads it.
    tag: CachePadded<u32>,
    /// All caches that threads have, or had: linked by `sibling`. Grows until the heap ends.
    caches: AtomicPtr<Cache>,
    /// Those that no thread has. Locked by who adds to `caches`.
    idle: Lock<Idle>,
    /// One drain pass over the caches of threads at a time, so that a cache asked for is drained by who asked.
    sweeping: Lock<()>,
    /// When caches were emptied because an arena was missing, in milliseconds of the heap's clock, from 1 on; 0: they may be now.
    swept: AtomicU64,
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
            tag: CachePadded::new(config.tag),
            caches: AtomicPtr::new(ptr::null_mut()),
            sweeping: Lock::new(()),
            idle: Lock::new(Idle::new()),
            swept: AtomicU64::new(0),
            shards: [const { CachePadded::new(Lock::new(None)) }; SHARDS],
            handles: AtomicUsize::new(0),
            phase: Phase::unused(),
        }
    }

    /// Forgets what is left of the heap before, whose clock may have been another.
    pub(crate) fn begin(&self) {
        self.swept.store(0, Relaxed);
    }

    /// The tag of its arenas.
    #[inline(always)]
    pub(crate) fn tag(&self) -> u32 {
        *self.tag
    }

    /// Whether a program made it, so that its caches are lent to threads.
    fn lends(&self) -> bool {
        self.tag() >= FIRST_HEAP_TAG
    }

    /// A cache for a thread that begins to use the heap: one that a thread has left, or a new one.
    pub(crate) fn adopt(&self) -> Option<Owned> {
        let mut idle = self.idle.lock();
        if let Some(cache) = idle.pop() {
            return Some(cache);
        }
        let cache = Owned::obtain()?;
        if self.lends() {
            cache.set_tag(self.tag());
        }
        // SAFETY: null, or a cache, which lives for ever.
        cache.sibling.set(unsafe { self.caches.load(Acquire).as_ref() });
        // Release: who walks the list finds the cache written.
        self.caches.store(ptr::from_ref(&*cache).cast_mut(), Release);
        Some(cache)
    }

    /// Takes the cache of a thread that ends.
    pub(crate) fn leave(&self, cache: Owned) {
        let keeps = self.idle.lock().len() < IDLE_WITH_SLABS;
        cache.leave(&self.arenas, keeps);
        self.idle.lock().push(cache);
    }

    /// Takes a lent cache from its thread, which gives it back, or ends: then it is flushed, too. The gate is held.
    pub(crate) fn take_back(cache: &'static Cache, flush: bool) {
        // Its heap has not ended, since its caches are taken under their gates then.
        let Some(core) = pool::core_of_tag(cache.tag()) else { return };
        if flush {
            cache.asked.set(false);
            cache.flush(&core.arenas);
        }
        cache.forget_user();
        // SAFETY: the right that `adopt` gave to the thread, which gives it up here.
        core.idle.lock().push(unsafe { Owned::from_raw(NonNull::from_ref(cache)) });
    }

    /// Each cache that a thread has, or had. (Who adds one to them while this begins comes before or after it, by the lock.)
    fn each_cache(&self, mut action: impl FnMut(&'static Cache)) {
        let first = {
            let _idle = self.idle.lock();
            self.caches.load(Acquire)
        };
        // SAFETY: null, or a cache, which lives for ever. Links change only when the heap ends, and then nobody walks.
        let mut next = unsafe { first.as_ref() };
        while let Some(cache) = next {
            next = cache.sibling.get();
            action(cache);
        }
    }

    /// Before a fork, first: waits for who has a shard or a drain pass, and keeps them.
    pub(crate) fn hold_shards(&self) {
        self.sweeping.hold();
        self.shards.iter().for_each(|shard| {
            shard.hold();
        });
    }

    /// After it, in parent and child.
    ///
    /// # Safety
    ///
    /// This thread, or the one of which it is a copy, has called [`hold_shards`](Self::hold_shards), and not this since.
    pub(crate) unsafe fn release_shards(&self) {
        // SAFETY: `hold_shards` took them.
        unsafe {
            self.shards.iter().for_each(|shard| shard.release());
            self.sweeping.release();
        }
    }

    /// Before a fork, after the caches' gates: keeps the idle ones.
    pub(crate) fn hold_idle(&self) {
        self.idle.hold();
    }

    /// After it, in parent and child; or when there are more gates.
    ///
    /// # Safety
    ///
    /// As [`release_shards`](Self::release_shards), of [`hold_idle`](Self::hold_idle).
    pub(crate) unsafe fn release_idle(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.idle.release() }
    }

    /// In a child of fork: takes a cache that no thread has.
    pub(crate) fn take_in(&self, orphan: Owned) {
        self.idle.lock().push(orphan);
    }

    /// In a child of fork, with all locks open, and after the caches have been told.
    ///
    /// # Safety
    ///
    /// As [`Arenas::in_child`].
    pub(crate) unsafe fn in_child(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.arenas.in_child() };
        // The maintainer is not in this process, nor who looked whether a block is left.
        self.bell.end();
        self.phase.renew();
        if self.arenas.is_gone() || self.phase.is_ended() {
            // Whatever caches there were is left to itself. (Of a heap that was just ending, they may be anywhere.)
            // SAFETY: the caller's promise: there is no other thread.
            unsafe {
                self.shards.iter().for_each(|shard| shard.renew(None));
                self.idle.renew(Idle::new());
            }
            self.caches.store(ptr::null_mut(), Release);
            return;
        }
        // Drain passes shall not come to those that are lost.
        // SAFETY: null, or a cache, which lives for ever.
        let mut next = unsafe { self.caches.swap(ptr::null_mut(), Acquire).as_ref() };
        while let Some(cache) = next {
            next = cache.sibling.take();
            if !cache.is_lost() {
                // SAFETY: as above.
                cache.sibling.set(unsafe { self.caches.load(Acquire).as_ref() });
                self.caches.store(ptr::from_ref(cache).cast_mut(), Release);
            }
        }
    }

    /// Has room made for what a cache could not serve.
    ///
    /// First what caches hold without need is given back; an arena is opened if that is not enough, or was done a moment ago: caches
    /// are refilled with what was taken from them, so a heap that is as large as what lives and what they hold would do little else.
    /// Where no arena can be had, they are emptied each time.
    pub(crate) fn make_room(&self, want: NoRoom) -> Result<(), TakeError> {
        let sweeps = self.may_sweep_for_room();
        thread::inside(|| {
            if !sweeps && self.make_registered_room(want) {
                return Ok(());
            }
            if self.sweep().slices >= want.slices {
                return Ok(());
            }
            if self.arenas.has_devices() {
                inside::see_to_room()?;
            }
            self.arenas.make_room(want.seen, want.slices, want.align).inspect_err(|_| self.swept.store(0, Relaxed))
        })
    }

    /// Opens an arena without a look at the caches, if every device registers it: else what they hold comes first, and next time, too.
    fn make_registered_room(&self, want: NoRoom) -> bool {
        let ready = !self.arenas.has_devices() || inside::see_to_room().is_ok();
        let made = ready && self.arenas.make_registered_room(want.seen, want.slices, want.align);
        if !made {
            self.swept.store(0, Relaxed);
        }
        made
    }

    /// Whether the last time was not a moment ago; this is one then.
    fn may_sweep_for_room(&self) -> bool {
        let (now, last) = (self.arenas.time().as_millis() as u64 + 1, self.swept.load(Relaxed));
        let may = last == 0 || now.saturating_sub(last) >= SWEEP_PAUSE;
        if may {
            self.swept.store(now, Relaxed);
        }
        may
    }

    /// Empties all caches of this heap: those of threads, idle ones, and shards.
    fn sweep(&self) -> Swept {
        self.arenas.choose_draining();
        self.visit(|cache, swept| cache.sweep(&self.arenas, swept))
    }

    /// Does something with all caches of this heap: those of threads, idle ones, and shards.
    fn visit(&self, action: impl FnMut(&Cache, &mut Swept)) -> Swept {
        self.visit_when(|| {}, action)
    }

    /// The same. `asked`: what happens after all caches were asked for; in tests.
    fn visit_when(&self, asked: impl FnOnce(), mut action: impl FnMut(&Cache, &mut Swept)) -> Swept {
        let mut swept = Swept::default();
        let _sweeping = self.sweeping.lock();
        // The maintainer wants to hear of who uses a cache after this; who ends the heap, of every block that is freed.
        let (patient, listens) = (self.phase.is_ending(), self.bell.is_listening());
        self.each_cache(|cache| swept.busy += usize::from(!cache.ask(patient)));
        asked();
        // Also for those who free into slabs of shards and of others, without a lock.
        let needless = patient && self.is_without_caches();
        let barrier = needless || asymmetric::heavy() || !asymmetric::is_available();
        let mut pass = Pass { patient, barrier, restores: !patient && !listens };
        let late = !self.lends() && self.post_pending(&mut pass);
        for shard in &self.shards {
            if let Some(cache) = shard.lock().as_ref() {
                action(cache, &mut swept);
            }
        }
        self.each_cache(|cache| cache.visit(pass, &mut swept, &mut action));
        // Whoever was late may have been met since, and his blocks may have come to slabs that were looked at before.
        swept.busy = swept.busy.max(usize::from(late));
        swept
    }

    /// Has the blocks that wait in caches put into the slabs that they are of, before any of these is looked at. Whether it missed
    /// some.
    fn post_pending(&self, pass: &mut Pass) -> bool {
        let (mut late, mut again) = (false, false);
        self.each_cache(|cache| late |= !cache.visit_pending(*pass));
        self.each_cache(|cache| match cache.ask_again(pass.patient) {
            Some(had) => again |= had,
            None => late = true,
        });
        if again {
            pass.barrier = asymmetric::heavy() || !asymmetric::is_available();
        }
        late
    }

    /// Whether nothing has been taken from it yet.
    fn is_without_caches(&self) -> bool {
        self.caches.load(Acquire).is_null() && self.shards.iter().all(|shard| shard.lock().is_none())
    }

    /// Empties all caches for a maintainer, which hears of who uses one after this.
    pub(crate) fn sweep_and_listen(&self) -> Swept {
        self.bell.listen();
        self.sweep()
    }

    /// Lets go of all caches, which hold nothing any more: other heaps may use them. The heap has ended.
    pub(crate) fn give_up_caches(&self) {
        for shard in &self.shards {
            if let Some(cache) = shard.lock().take() {
                caches::retire(cache);
            }
        }
        self.each_cache(Cache::expel);
        // No thread has one now, or puts one here.
        *self.idle.lock() = Idle::new();
        // SAFETY: null, or a cache, which lives for ever.
        let mut next = unsafe { self.caches.swap(ptr::null_mut(), Acquire).as_ref() };
        while let Some(cache) = next {
            next = cache.sibling.take();
            // SAFETY: the right that a thread had, or the list of idle ones: both have lost it.
            caches::retire(unsafe { Owned::from_raw(NonNull::from_ref(cache)) });
        }
    }

    /// A drain pass: all caches are emptied, and every arena without a block is closed. With what the caches are left with.
    pub(crate) fn drain(&self) -> (Closed, Swept) {
        if self.arenas.has_devices() {
            // Perhaps there is enough all the same.
            let _ = inside::see_to_room();
        }
        thread::inside(|| {
            let swept = self.sweep();
            let closed = self.arenas.close_all_empty();
            self.arenas.purge_all();
            (closed, swept)
        })
    }

    /// Registers what was refused, as far as that can be done now, and tells the listener of the limits.
    pub(crate) fn catch_up(&self) -> CaughtUp {
        // Without memory for the lists, as without memory to register.
        let done = match inside::see_to_room() {
            Ok(()) => thread::inside(|| self.arenas.register_what_was_refused()),
            Err(_) => CaughtUp::default(),
        };
        self.arenas.tell();
        done
    }

    /// Bytes of spare spans in caches.
    pub(crate) fn cached_bytes(&self) -> usize {
        let shards = self.shards.iter().map(|shard| shard.lock().as_ref().map_or(0, |cache| cache.spare_bytes()));
        let mut bytes = shards.sum();
        self.each_cache(|cache| bytes += cache.spare_bytes());
        bytes
    }

    /// Attaches a device; what caches hold without need is given back first, and not pinned.
    pub(crate) fn attach(&self, device: impl Registrar) -> Result<Device, AttachError> {
        inside::see_to_room().map_err(no_memory)?;
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
        inside::see_to_room().map_err(no_memory)?;
        thread::inside(|| {
            self.sweep();
            // Boxed here: in the global heap, a device would keep an arena open.
            self.arenas.attach_all(devices.into_iter().map(|device| Box::new(device) as Box<dyn Registrar>).collect())
        })
    }

    /// Detaches a device, waiting so long for what uses it.
    pub(crate) fn detach_within(&self, device: Device, patience: Duration) -> Result<(), DetachError> {
        // Perhaps there is enough all the same.
        let _ = inside::see_to_room();
        thread::inside(|| self.arenas.detach_within(device, patience))
    }

    /// Memory for a layout, of a heap that a program made: from this thread's cache of it, or a shard.
    #[inline]
    pub(crate) fn allocate(&self, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
        match class_for(layout) {
            // From a page on, memory that was never used may be at hand; the slow way knows.
            Some(class) if !zeroed || layout.size() < 4096 => {
                match places::briefly(self.tag(), |cache| cache.pop_any(class)) {
                    Some(start) => Ok(Block { start, zero: false }),
                    None => self.allocate_slow(layout, zeroed),
                }
            }
            Some(_) => self.allocate_slow(layout, zeroed),
            None => self.allocate_large(layout, zeroed),
        }
    }

    #[inline(never)]
    fn allocate_large(&self, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
        let Kind::Large(slices) = kind_of(layout) else { return self.allocate_slow(layout, zeroed) };
        let spare =
            if layout.align() <= SLICE { places::briefly(self.tag(), |cache| cache.pop_spare(slices)) } else { None };
        let block = match spare.and_then(|address| NonNull::new(ptr::with_exposed_provenance_mut(address))) {
            Some(start) => Block { start, zero: false },
            None => self.allocate_slow(layout, zeroed)?,
        };
        // SAFETY: the block is new, and lies in an open arena.
        unsafe { slab::header(block.start.addr().get()) }.set_large(slices);
        Ok(block)
    }

    #[cold]
    #[inline(never)]
    fn allocate_slow(&self, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
        let (kind, align) = (kind_of(layout), layout.align());
        if self.arenas.is_gone() {
            return Err(TakeError::NotInChild);
        }
        if let Kind::Small(class) | Kind::Medium(class) = kind
            && !(zeroed && layout.size() >= 4096)
            && let Some(start) = places::briefly(self.tag(), |cache| cache.pop_next(&self.arenas, class))
        {
            return Ok(Block { start, zero: false });
        }
        loop {
            let result = places::with_own(self, true, |cache| cache.allocate(&self.arenas, kind, align, zeroed));
            match result.map_or_else(|| self.allocate_from_shard(kind, align, zeroed), Ok)? {
                Ok(block) => return Ok(block),
                Err(want) => match self.make_room(want) {
                    Ok(()) => {}
                    Err(error) => return self.allocate_from_others(kind).ok_or(error),
                },
            }
        }
    }

    /// Before a refusal, what is free in slabs of other threads serves: with many threads and a small budget, that can be most.
    fn allocate_from_others(&self, kind: Kind) -> Option<Block> {
        let (Kind::Small(class) | Kind::Medium(class)) = kind else { return None };
        let mut found = None;
        self.visit(|cache, _| found = found.or_else(|| cache.spare_block(class)));
        found.map(|start| Block { start, zero: false })
    }

    /// Memory for a layout, from a shard.
    pub(crate) fn allocate_from_shards(&self, layout: Layout, zeroed: bool) -> Result<Block, TakeError> {
        loop {
            match self.allocate_from_shard(kind_of(layout), layout.align(), zeroed)? {
                Ok(block) => return Ok(block),
                Err(want) => self.make_room(want)?,
            }
        }
    }

    /// A shard that has a cache: this thread's, or another if there is no memory for a cache of its.
    fn shard_with_cache(&self) -> Result<LockGuard<'_, Option<Owned>>, TakeError> {
        let mut own = self.shards[thread::shard(SHARDS)].lock();
        if own.is_none() {
            *own = Owned::obtain();
        }
        if own.is_some() {
            return Ok(own);
        }
        drop(own);
        self.shards.iter().map(|shard| shard.lock()).find(|shard| shard.is_some()).ok_or_else(no_memory_for_cache)
    }

    /// Sees to it that there is a shard with a cache.
    pub(crate) fn see_to_shard(&self) -> Result<(), TakeError> {
        self.shard_with_cache().map(drop)
    }

    fn allocate_from_shard(&self, kind: Kind, align: usize, zeroed: bool) -> Result<Result<Block, NoRoom>, TakeError> {
        let shard = self.shard_with_cache()?;
        self.bell.touch();
        let Some(cache) = &*shard else { return Err(no_memory_for_cache()) };
        let quick = match kind {
            Kind::Small(class) | Kind::Medium(class) => cache.pop_any(class),
            Kind::Large(_) => None,
        };
        Ok(match quick {
            Some(start) => Ok(Block { start, zero: false }),
            None => cache.allocate(&self.arenas, kind, align, zeroed),
        })
    }

    /// Takes back a large block; whether the heap is ending, and this may have been its last block.
    #[inline]
    pub(crate) fn take_large_back(&self, address: usize, slices: usize) -> bool {
        // Spans in arenas that shall run empty are not kept.
        let left = if Arenas::may_drain() { None } else { places::push_spare(self.tag(), address, slices) };
        match left {
            Some(left) => left != Left::Nothing && self.phase.is_ending(),
            None => self.take_large_back_slow(address, slices),
        }
    }

    /// Does what is left after a fast free into a slab of this cache; answers as [`take_large_back`](Self::take_large_back).
    #[cold]
    #[inline(never)]
    pub(crate) fn settle(&self, cache: &Cache, slab: &'static Slab, left: Left) -> bool {
        if left == Left::Books {
            // A drain pass may have come between; `rebook` looks whose the slab is now.
            places::with_own_same(self, cache, |cache| cache.rebook(&self.arenas, slab));
        }
        asymmetric::light();
        self.phase.is_ending()
    }

    /// Frees a block that is not in a cache which is lent to this thread now; answers as [`take_large_back`](Self::take_large_back).
    ///
    /// # Safety
    ///
    /// `block` is a block of `slab`, of this heap, and the caller's.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn free_slow(&self, slab: &'static Slab, block: NonNull<u8>) -> bool {
        let push = |cache: &Cache| {
            // SAFETY: the block is the caller's, the slab this cache's, and a lock gives the cache to us.
            if unsafe { slab.push_any(block) } {
                cache.rebook(&self.arenas, slab);
            }
        };
        if self.arenas.is_gone() {
            return false;
        }
        let owner = slab.cache();
        if !places::with_own_same(self, owner, push) {
            let shard = self.shards[thread::shard(SHARDS)].try_lock();
            match shard.as_ref().and_then(|shard| shard.as_ref()).filter(|cache| cache.name() == owner.name()) {
                Some(cache) => {
                    self.bell.touch();
                    push(cache);
                }
                None => {
                    drop(shard);
                    // SAFETY: the block is the caller's.
                    unsafe { free_remote(slab, block) };
                    // Without a lock: either who ends the heap, and the maintainer, see the block; or it is seen here that they look.
                    asymmetric::light_or_fence();
                    self.bell.touch();
                }
            }
        }
        asymmetric::light_or_fence();
        self.phase.is_ending()
    }

    #[cold]
    #[inline(never)]
    fn take_large_back_slow(&self, address: usize, slices: usize) -> bool {
        if places::with_own(self, false, |cache| cache.give(&self.arenas, address, slices)).is_none() {
            let shard = self.shards[thread::shard(SHARDS)].lock();
            self.bell.touch();
            match shard.as_ref() {
                Some(cache) => cache.give(&self.arenas, address, slices),
                None => self.arenas.give(address, slices),
            }
        }
        asymmetric::light_or_fence();
        self.phase.is_ending()
    }
}

fn no_memory_for_cache() -> TakeError {
    TakeError::NoMemory { wanted: size_of::<Cache>(), source: io::ErrorKind::OutOfMemory.into() }
}

/// What there is no memory for, if it is for attaching a device.
fn no_memory(error: TakeError) -> AttachError {
    match error {
        TakeError::NoMemory { source, .. } => AttachError::NoMemory(source),
        TakeError::NotInChild => AttachError::NotInChild,
        other => AttachError::NoMemory(io::Error::new(io::ErrorKind::OutOfMemory, other)),
    }
}

/// Frees a block into the slab of another owner. Whether it was the first since the owner has looked.
///
/// # Safety
///
/// `block` is a block of `slab`, and the caller's.
#[inline]
pub(crate) unsafe fn free_remote(slab: &'static slab::Slab, block: NonNull<u8>) -> bool {
    // What is not a slab any more has no owner, and no block that is out.
    if slab.owner() == 0 {
        freed_twice(block);
    }
    // SAFETY: the caller's promise.
    let owner = match unsafe { slab.push_remote(block) } {
        Freed::Tell(owner) => owner,
        Freed::Done => return false,
        Freed::Twice => freed_twice(block),
    };
    slab.tell(caches::told(owner));
    true
}

#[cold]
#[inline(never)]
fn freed_twice(block: NonNull<u8>) -> ! {
    misuse::end(block.addr().get(), None, format_args!("is freed a second time"))
}
