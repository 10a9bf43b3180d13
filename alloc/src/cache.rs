//! A cache: all slabs and spare spans of one owner. Uses `slab`, `class` and the heap's arenas.
//!
//! A cache has one user at a time: a thread (which a drain pass may displace for a moment, see `claim` and `loan`), or whoever holds the
//! lock of a shard. Only that user touches it, but for the list of slabs that others freed into, and so its fast operations
//! need no lock and no atomic read-modify-write. A cache outlives its users: when a thread ends, its cache waits for the next thread with all its
//! slabs, so a slab has the same owner for as long as it is a slab.
//!
//! A cache never opens an arena: it answers [`NoRoom`], and its user has room made while the cache is whole and unlocked.

mod fork;
mod pending;

use crate::class::{self, CLASSES, Kind, LiveBlocks};
use crate::loan::Loan;
use crate::slab::{self, NO_SLAB, Slab, State};
use crate::thread::{self, Slot};
use core::cell::Cell;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize};
use crossbeam_utils::{Backoff, CachePadded};
pub(crate) use fork::Fate;
pub(crate) use pending::Pended;
use pending::Pending;
use rdmalloc_arenas::sync::{Lock, LockGuard};
use rdmalloc_arenas::{Arenas, SLICE, Seen, Span};

/// Spare spans up to this many slices (4 MiB) are kept, by their exact length.
const SPARE_SLICES: usize = 64;
/// How many bytes of spare spans a cache keeps.
const SPARE_BYTES: usize = 8 << 20;
/// How often a drain pass tries for a gate, mostly yielding its processor in between: some milliseconds.
const GATE_TRIES: usize = 2000;

/// No open arena has room for a span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    /// Slices wanted.
    pub(crate) slices: usize,
    /// Alignment wanted, in slices.
    pub(crate) align: usize,
    /// For [`Arenas::make_room`].
    pub(crate) seen: Seen,
}

/// How a drain pass goes about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// It waits for gates as long as it takes, since nobody comes again.
    pub(crate) patient: bool,
    /// There was a barrier since the caches were asked for, or none is needed.
    pub(crate) barrier: bool,
    /// Threads get their caches back; if not, they come the slow way when they want them.
    pub(crate) restores: bool,
}

/// What a sweep over caches has done, and has found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Swept {
    /// Slices that went back to their arenas.
    pub(crate) slices: usize,
    /// Caches that were passed over, since their threads were stopped in the middle of an operation.
    pub(crate) busy: usize,
    /// Caches that were not counted: these, and those that their threads emptied themselves.
    pub(crate) uncounted: usize,
    /// Blocks that are out, of the caches that were in the sweep's hands.
    pub(crate) live: LiveBlocks,
    /// Their slabs.
    pub(crate) slabs: usize,
    /// The slabs' slices.
    pub(crate) slab_slices: usize,
}

/// Memory that was allocated, and whether it is zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) start: NonNull<u8>,
    pub(crate) zero: bool,
}

/// See the module. `repr(C)`: what the fast path reads stands first.
#[repr(C, align(128))]
pub(crate) struct Cache {
    /// Its number, by which slabs name their owner. 0: of a cache that owns nothing and never will.
    pub(crate) id: u32,
    /// The tag of the heap that a program made, of which the cache is one that threads have; 0 of any other cache. Changes
    /// only while the heap has no block, under the gate.
    tag: AtomicU32,
    /// To whom it is lent: for caches with a tag.
    pub(crate) loan: Loan<Slot>,
    current: [Cell<&'static Slab>; CLASSES],
    partial: [Cell<Option<&'static Slab>>; CLASSES],
    /// Partial slabs in arenas that shall run empty, as the last pass saw it: used when nothing else has room.
    parting: [Cell<Option<&'static Slab>>; CLASSES],
    /// Spare spans by their number of slices, linked through their headers.
    spare: [Cell<Option<&'static Slab>>; SPARE_SLICES + 1],
    /// Written by the user alone; statistics read it, and the next but one.
    spare_bytes: AtomicUsize,
    /// Blocks that the user has freed into slabs of others, and has not put there yet.
    pending: Pending,
    /// How many slabs of each class are Full: those are in no list.
    full: [Cell<u32>; CLASSES],
    /// The next cache in a list of caches without a user.
    pub(crate) next: Cell<Option<&'static Cache>>,
    /// The next of the caches that threads have of the same heap, or had.
    pub(crate) sibling: Cell<Option<&'static Cache>>,
    /// Locked by whoever uses the cache and is not its thread in a fast operation. Guards the next two.
    pub(crate) gate: Lock<()>,
    /// The slot of the thread that uses it now, which lives as long as this is not null.
    user: Cell<*const Slot>,
    /// A drain pass has asked for the cache to be flushed, and it has not been yet.
    pub(crate) asked: Cell<bool>,
    /// At a fork: it was taken from its thread.
    taken: Cell<bool>,
    /// At a fork: no thread is in the middle of an operation with it. In a child: it can be used.
    whole: Cell<bool>,
    /// Slabs that others freed into.
    told: CachePadded<AtomicPtr<Slab>>,
}

impl Cache {
    /// A cache that has nothing yet.
    pub(crate) const fn new(id: u32) -> Cache {
        Cache {
            id,
            tag: AtomicU32::new(0),
            loan: Loan::new(),
            current: [const { Cell::new(&NO_SLAB.0) }; CLASSES],
            partial: [const { Cell::new(None) }; CLASSES],
            parting: [const { Cell::new(None) }; CLASSES],
            spare: [const { Cell::new(None) }; SPARE_SLICES + 1],
            spare_bytes: AtomicUsize::new(0),
            pending: Pending::new(),
            full: [const { Cell::new(0) }; CLASSES],
            next: Cell::new(None),
            sibling: Cell::new(None),
            gate: Lock::new(()),
            user: Cell::new(ptr::null()),
            asked: Cell::new(false),
            taken: Cell::new(false),
            whole: Cell::new(true),
            told: CachePadded::new(AtomicPtr::new(ptr::null_mut())),
        }
    }

    /// What its slabs know it by: its address, which is at hand when a block is freed. Caches live for ever.
    #[inline(always)]
    pub(crate) fn name(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// The cache of that name.
    ///
    /// # Safety
    ///
    /// It is the name of a cache, which [`name`](Self::name) gave.
    #[inline(always)]
    pub(crate) unsafe fn of_name(name: usize) -> &'static Cache {
        // SAFETY: caches live for ever, in mappings whose provenance was exposed. What the reference is used for is the
        // business of whoever uses the cache.
        unsafe { &*ptr::with_exposed_provenance(name) }
    }

    /// Of which heap it is; anyone may ask, and may find that it has changed.
    #[inline(always)]
    pub(crate) fn tag(&self) -> u32 {
        self.tag.load(Relaxed)
    }

    /// Whether it is of a heap that lends it to threads.
    pub(crate) fn is_lent(&self) -> bool {
        self.tag() != 0
    }

    /// Makes it one that a heap lends to threads; by its one user, before a thread has it.
    pub(crate) fn set_tag(&self, tag: u32) {
        self.tag.store(tag, Relaxed);
    }

    /// Says which thread uses the cache from now on; null: none.
    pub(crate) fn set_user(&self, slot: *const Slot) {
        let _gate = self.gate.lock();
        self.user.set(slot);
    }

    /// Says that no thread uses it any more. The gate is held.
    pub(crate) fn forget_user(&self) {
        self.user.set(ptr::null());
    }

    /// Whether it is this thread's. The gate is held.
    pub(crate) fn is_used_by(&self, slot: &Slot) -> bool {
        ptr::eq(self.user.get(), slot)
    }

    /// Takes it from its heap, which has ended. Whoever has it finds so when he comes with the gate locked; a fast operation is
    /// not under way, since there is no block and no handle.
    pub(crate) fn expel(&self) {
        let _gate = self.gate.lock();
        self.loan.revoke();
        self.forget_user();
        self.asked.set(false);
        self.tag.store(0, Relaxed);
    }

    /// Puts the cache in order as its thread goes. `keeps`: what it has of slabs waits for the next thread, empty ones as well, unless a
    /// drain pass has just asked for them.
    pub(crate) fn leave(&self, arenas: &Arenas, keeps: bool) {
        let _gate = self.gate.lock();
        if self.asked.take() || !keeps {
            self.flush(arenas);
        } else {
            self.post();
            self.give_spare(arenas);
        }
    }

    /// Bytes of spare spans that the cache keeps for a thread, or for a shard; anyone may ask.
    pub(crate) fn spare_bytes(&self) -> usize {
        self.spare_bytes.load(Relaxed)
    }

    fn user(&self) -> Option<&Slot> {
        // SAFETY: the caller holds the gate, and a slot is there until its thread has locked the gate to say that it goes.
        unsafe { self.user.get().as_ref() }
    }

    /// The first half of a drain pass's visit: asks for the cache. A heavy barrier comes between this and [`visit`](Self::visit).
    /// Whether it could ask. `patient`: it waits as long as it takes.
    pub(crate) fn ask(&self, patient: bool) -> bool {
        let Some(_gate) = self.gate_soon(patient) else { return false };
        self.asked.set(true);
        if let Some(slot) = self.user() {
            thread::revoke(self, slot);
        }
        true
    }

    /// The gate, or none if whoever has it does not part with it soon, since it was stopped by the system.
    fn gate_soon(&self, patient: bool) -> Option<LockGuard<'_, ()>> {
        if patient {
            return Some(self.gate.lock());
        }
        let backoff = Backoff::new();
        (0..GATE_TRIES).find_map(|_| {
            let gate = self.gate.try_lock();
            if gate.is_none() {
                backoff.snooze();
            }
            gate
        })
    }

    /// Between the two: puts what its thread has freed into slabs of others where it belongs, for those who come to these slabs after.
    /// Whether it is there.
    pub(crate) fn visit_pending(&self, pass: Pass) -> bool {
        let Some(_gate) = self.gate_soon(pass.patient) else { return false };
        // If it is not asked any more, its thread has done so.
        if self.asked.get() {
            if self.user().is_some_and(|slot| !pass.barrier || !thread::is_revoked(self, slot)) {
                return false;
            }
            self.post();
        }
        true
    }

    /// Then: asks once more, if its thread has taken the cache back and flushed it: that was perhaps before what others had freed
    /// into its slabs was there. Whether it had; `None`: it could not ask.
    pub(crate) fn ask_again(&self, patient: bool) -> Option<bool> {
        let _gate = self.gate_soon(patient)?;
        let had = !self.asked.replace(true);
        if had && let Some(slot) = self.user() {
            thread::revoke(self, slot);
        }
        Some(had)
    }

    /// The second half: does something with the cache, unless its thread has taken it back and flushed it itself, or is in the middle
    /// of an operation.
    pub(crate) fn visit(&self, pass: Pass, swept: &mut Swept, action: impl FnOnce(&Cache, &mut Swept)) {
        let Some(_gate) = self.gate_soon(pass.patient) else {
            // Its thread does it when it takes the cache back.
            swept.busy += 1;
            swept.uncounted += 1;
            return;
        };
        if !self.asked.take() {
            swept.uncounted += 1;
            return;
        }
        match self.user() {
            Some(slot) => {
                if pass.barrier && thread::is_revoked(self, slot) {
                    action(self, swept);
                } else {
                    swept.busy += 1;
                    swept.uncounted += 1;
                }
                if pass.restores {
                    thread::restore(self, slot);
                }
            }
            None => action(self, swept),
        }
    }

    /// Flushes the cache, and counts what is left.
    pub(crate) fn sweep(&self, arenas: &Arenas, swept: &mut Swept) {
        swept.slices += self.flush(arenas);
        for class in 0..CLASSES {
            let full = self.full[class].get() as usize;
            let (mut slabs, mut blocks) = (full, full * class::capacity_of_class(class));
            let current = self.current[class].get();
            if !ptr::eq(current, &NO_SLAB.0) {
                (slabs, blocks) = (slabs + 1, blocks + current.used() as usize);
            }
            for list in [&self.partial[class], &self.parting[class]] {
                let mut at = list.get();
                while let Some(slab) = at {
                    (slabs, blocks) = (slabs + 1, blocks + slab.used() as usize);
                    at = slab.next.get();
                }
            }
            swept.slabs += slabs;
            swept.slab_slices += slabs * class::slices_of_class(class);
            swept.live.add(class, blocks as u64);
        }
    }

    /// A block of `class`, if the current slab has a free one: the fast path.
    #[inline(always)]
    pub(crate) fn pop(&self, class: usize) -> Option<NonNull<u8>> {
        // `get`, since every class is in bounds, and a panic has no place here.
        self.current.get(class)?.get().pop()
    }

    /// As [`pop`](Self::pop), wherever the links of free blocks are.
    pub(crate) fn pop_any(&self, class: usize) -> Option<NonNull<u8>> {
        self.current.get(class)?.get().pop_any()
    }

    /// A block of `class`, if one is at hand in what the cache has, in whatever slab: the middle way, in a fast operation. New memory is not
    /// touched here, since the kernel may take its time to find it.
    pub(crate) fn pop_next(&self, arenas: &Arenas, class: usize) -> Option<NonNull<u8>> {
        let current = self.current.get(class)?;
        let slab = current.get();
        slab.collect();
        if let Some(block) = slab.pop_touched() {
            return Some(block);
        }
        // What others have freed is looked at first.
        if !slab.is_carved() || !self.told.load(Relaxed).is_null() {
            return None;
        }
        let next = match self.partial.get(class)?.get() {
            Some(slab) => self.resume(slab),
            None => self.create_from_spare(arenas, class)?,
        };
        self.put_away(class);
        current.set(next);
        next.pop_touched()
    }

    /// Memory for a layout, which is of this kind and wants this alignment in bytes.
    pub(crate) fn allocate(&self, arenas: &Arenas, kind: Kind, align: usize, zeroed: bool) -> Result<Block, NoRoom> {
        match kind {
            Kind::Small(class) | Kind::Medium(class) => self.allocate_class(arenas, class, zeroed),
            Kind::Large(slices) => {
                let span = self.take(arenas, slices, align.div_ceil(SLICE))?;
                // SAFETY: a span is not at address 0.
                let start = unsafe { NonNull::new_unchecked(ptr::with_exposed_provenance_mut(span.address)) };
                Ok(Block { start, zero: span.zero })
            }
        }
    }

    /// A block of `class` from wherever there is one.
    fn allocate_class(&self, arenas: &Arenas, class: usize, zeroed: bool) -> Result<Block, NoRoom> {
        // Below a page, clearing is cheaper than keeping new blocks apart.
        let apart = zeroed && class::size_of_class(class) >= 4096;
        loop {
            let slab = self.current[class].get();
            slab.collect();
            if let Some(start) = slab.pop_any() {
                return Ok(Block { start, zero: false });
            }
            if apart && let Some((start, zero)) = slab.carve_one() {
                return Ok(Block { start, zero });
            }
            if !slab.carve() {
                self.next_slab(arenas, class)?;
            }
        }
    }

    /// Replaces the current slab of a class, which is full.
    #[cold]
    fn next_slab(&self, arenas: &Arenas, class: usize) -> Result<(), NoRoom> {
        self.put_away(class);
        self.look(arenas);
        let slices = class::slices_of_class(class);
        let next = match self.partial[class].get() {
            Some(slab) => self.resume(slab),
            None => match self.create_from_spare(arenas, class) {
                Some(slab) => slab,
                None => self.slab_elsewhere(arenas, class, slices)?,
            },
        };
        self.current[class].set(next);
        Ok(())
    }

    /// Leaves a class without a current slab; the one that it has is full.
    fn put_away(&self, class: usize) {
        let full = self.current[class].replace(&NO_SLAB.0);
        if !ptr::eq(full, &NO_SLAB.0) {
            full.set_state(State::Full);
            self.full[class].set(self.full[class].get() + 1);
        }
    }

    /// A block of `class` from the slabs that the cache has, for who has no room for another.
    pub(crate) fn spare_block(&self, class: usize) -> Option<NonNull<u8>> {
        loop {
            let slab = self.current[class].get();
            slab.collect();
            if let Some(block) = slab.pop_any() {
                return Some(block);
            }
            if !slab.carve() {
                let next = self.partial[class].get().or(self.parting[class].get())?;
                self.put_away(class);
                self.current[class].set(self.resume(next));
            }
        }
    }

    /// A slab when the cache has neither a usual one nor a span for it. One in an arena that shall run empty comes last, but
    /// before another arena is opened.
    #[cold]
    #[inline(never)]
    fn slab_elsewhere(&self, arenas: &Arenas, class: usize, slices: usize) -> Result<&'static Slab, NoRoom> {
        if let Some(span) = arenas.try_take_lasting(slices, 1) {
            return Ok(self.create(arenas, class, span));
        }
        match self.parting[class].get() {
            Some(slab) => Ok(self.resume(slab)),
            None => Ok(self.create(arenas, class, self.take(arenas, slices, 1)?)),
        }
    }

    /// Makes a Partial slab the current one.
    fn resume(&self, slab: &'static Slab) -> &'static Slab {
        self.unlist(slab);
        slab.set_state(State::Current);
        slab
    }

    /// Makes a spare span a slab.
    fn create_from_spare(&self, arenas: &Arenas, class: usize) -> Option<&'static Slab> {
        let slices = class::slices_of_class(class);
        let address = self.pop_spare(slices)?;
        Some(self.create(arenas, class, Span { address, slices, zero: false }))
    }

    /// Makes a span, which was just taken and has the slices for it, a slab.
    fn create(&self, arenas: &Arenas, class: usize, span: Span) -> &'static Slab {
        debug_assert_eq!(span.slices, class::slices_of_class(class));
        // SAFETY: the callers have just taken the span, with the slices of this class.
        let slab = unsafe { Slab::create(span, class, self.name(), self.id, arenas.has_links_outside()) };
        slab.set_zero_on_free(arenas.is_free_memory_zero());
        // For the day when the span is a large block.
        slab.set_tag(arenas.config().tag);
        slab
    }

    /// The same as [`rebook`](Self::rebook), in a fast operation, where no arena has to be asked. Whether it is done.
    pub(crate) fn rebook_briefly(&self, slab: &'static Slab) -> bool {
        if slab.owner() != self.name() || slab.used() == u32::MAX {
            return false;
        }
        match slab.state() {
            State::Full => self.enlist(slab),
            State::Partial if slab.is_unused() => {
                let keeps = self.place_for_spare(slab.slices()).is_some() && !Arenas::is_draining(slab.address());
                if !keeps || slab.is_told() {
                    return false;
                }
                self.unlist(slab);
                slab.disown();
                return self.push_spare(slab.address(), slab.slices());
            }
            _ => {}
        }
        true
    }

    /// Sees to the books of a slab of which a block was taken back: the slow end of a free. The slab may be another's by now,
    /// or none: a drain pass may have come between.
    #[cold]
    pub(crate) fn rebook(&self, arenas: &Arenas, slab: &'static Slab) {
        if slab.owner() != self.name() {
            return;
        }
        // Of a Current slab, the alarm is one below none.
        if slab.used() == u32::MAX {
            slab.freed_too_often();
        }
        if slab.state() == State::Full {
            self.enlist(slab);
        } else if slab.state() == State::Partial && slab.is_unused() {
            self.retire(arenas, slab);
        }
    }

    /// Takes back what others have freed.
    pub(crate) fn look(&self, arenas: &Arenas) {
        // SAFETY: the list holds headers, which are never unmapped. Acquire: with the release of who put them in.
        let mut told = unsafe { self.told.swap(ptr::null_mut(), Acquire).as_ref() };
        while let Some(slab) = told {
            told = slab.next_told();
            slab.look();
            match slab.state() {
                State::Current => {}
                State::Full => {
                    self.enlist(slab);
                    if slab.is_unused() {
                        self.retire(arenas, slab);
                    }
                }
                State::Partial if slab.is_unused() => self.retire(arenas, slab),
                State::Partial => {}
            }
        }
    }

    /// The list of slabs that others freed into.
    pub(crate) fn told(&self) -> &AtomicPtr<Slab> {
        &self.told
    }

    fn enlist(&self, slab: &'static Slab) {
        let lists = if Arenas::is_draining(slab.address()) { &self.parting } else { &self.partial };
        let list = &lists[slab.class()];
        let next = list.replace(Some(slab));
        if slab.state() == State::Full {
            let full = &self.full[slab.class()];
            full.set(full.get() - 1);
        }
        slab.set_state(State::Partial);
        slab.prev.set(None);
        slab.next.set(next);
        if let Some(next) = next {
            next.prev.set(Some(slab));
        }
    }

    fn unlist(&self, slab: &'static Slab) {
        match slab.prev.get() {
            Some(prev) => prev.next.set(slab.next.get()),
            None => {
                let partial = &self.partial[slab.class()];
                let is_partial = partial.get().is_some_and(|first| ptr::eq(first, slab));
                if is_partial { partial } else { &self.parting[slab.class()] }.set(slab.next.get());
            }
        }
        if let Some(next) = slab.next.get() {
            next.prev.set(slab.prev.get());
        }
    }

    /// Gives up a Partial slab that is empty, unless it is still in the list of slabs to look at: it is met there again.
    fn retire(&self, arenas: &Arenas, slab: &'static Slab) {
        if !slab.is_told() {
            self.unlist(slab);
            slab.disown();
            self.give(arenas, slab.address(), slab.slices());
        }
    }

    /// A span of the spare ones, or of an open arena.
    pub(crate) fn take(&self, arenas: &Arenas, slices: usize, align: usize) -> Result<Span, NoRoom> {
        if align == 1
            && let Some(address) = self.pop_spare(slices)
        {
            return Ok(Span { address, slices, zero: false });
        }
        let span = arenas.try_take(slices, align).map_err(|seen| NoRoom { slices, align, seen })?;
        // SAFETY: the span was just taken.
        unsafe { slab::header(span.address) }.set_tag(arenas.config().tag);
        Ok(span)
    }

    /// A spare span of so many slices, aligned to one: its address.
    #[inline]
    pub(crate) fn pop_spare(&self, slices: usize) -> Option<usize> {
        let list = self.spare.get(slices)?;
        let spare = list.get()?;
        list.set(spare.next.get());
        self.spare_bytes.store(self.spare_bytes() - slices * SLICE, Relaxed);
        Some(spare.address())
    }

    /// Where a span would be kept, and how many bytes there would be then; `None`: there is no place for it.
    #[inline(always)]
    fn place_for_spare(&self, slices: usize) -> Option<(&Cell<Option<&'static Slab>>, usize)> {
        let bytes = self.spare_bytes() + slices * SLICE;
        self.spare.get(slices).filter(|_| bytes <= SPARE_BYTES).map(|list| (list, bytes))
    }

    /// Keeps a span as a spare one, if there is a place for it. It is this cache's then.
    #[inline]
    pub(crate) fn push_spare(&self, address: usize, slices: usize) -> bool {
        let Some((list, bytes)) = self.place_for_spare(slices) else { return false };
        // SAFETY: a span lies in an open arena, and its header is nobody's but its holder's.
        let header = unsafe { slab::header(address) };
        header.next.set(list.replace(Some(header)));
        self.spare_bytes.store(bytes, Relaxed);
        true
    }

    /// Keeps a span as a spare one, or gives it back to its arena.
    pub(crate) fn give(&self, arenas: &Arenas, address: usize, slices: usize) {
        if Arenas::is_draining(address) || !self.push_spare(address, slices) {
            arenas.give(address, slices);
        }
    }

    /// Gives back all that holds no block: what others freed is taken back, empty slabs and spare spans go to their arenas.
    /// Slabs in arenas that shall run empty are put apart. Returns how many slices went.
    pub(crate) fn flush(&self, arenas: &Arenas) -> usize {
        self.post();
        self.look(arenas);
        for current in &self.current {
            let slab = current.get();
            if ptr::eq(slab, &NO_SLAB.0) {
                continue;
            }
            slab.collect();
            if slab.is_unused() {
                current.set(&NO_SLAB.0);
                self.enlist(slab);
                self.retire(arenas, slab);
            } else if Arenas::is_draining(slab.address()) && !slab.is_full() {
                current.set(&NO_SLAB.0);
                self.enlist(slab);
            }
        }
        // A slab that was told of since is retired now; and one of which the last block was freed, if its thread has not come
        // to see to its books yet.
        self.look(arenas);
        for list in
            self.partial.iter().zip(&self.parting).flat_map(|(partial, parting)| [partial.take(), parting.take()])
        {
            let mut at = list;
            while let Some(slab) = at {
                at = slab.next.get();
                self.enlist(slab);
                if slab.is_unused() {
                    self.retire(arenas, slab);
                }
            }
        }
        self.give_spare(arenas)
    }

    /// Gives the spare spans back. Returns how many slices they had.
    fn give_spare(&self, arenas: &Arenas) -> usize {
        let mut given = 0;
        for (slices, list) in self.spare.iter().enumerate() {
            while let Some(spare) = list.get() {
                list.set(spare.next.get());
                arenas.give(spare.address(), slices);
                given += slices;
            }
        }
        self.spare_bytes.store(0, Relaxed);
        given
    }
}
