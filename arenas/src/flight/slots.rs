//! The slots in which flights lie: a table of cache lines, beside the region. Uses `word`, `table` and `device`.
//!
//! A slot has what is flying if that fits ([`CARGO`] bytes), else a box of it; what it is; and the device that is held. Slots
//! are metadata: they lie in no registered memory, and stay when they are free. So an id can be looked up whoever made it up.

use super::word::{Free, INDEX, Word};
use crate::device::Device;
use crate::sync::{Lock, Once};
use crate::table::{Entry, Table};
use core::any::TypeId;
use core::cell::{Cell, UnsafeCell};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};
use crossbeam_utils::CachePadded;

/// What fits a slot, in bytes.
const CARGO: usize = 40;
/// How many slots are opened at once: 16 KiB of them.
const GROWTH: usize = 256;
/// How many lists of free slots there are. A thread has one, and looks into the others when it is empty.
const LISTS: usize = 8;
/// How many free slots a thread keeps at most: 1 KiB of them.
const SPARE: usize = 16;

/// One flight, or none. `hold` and `manifest` are written by who has the slot, before it becomes an id.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) word: AtomicU64,
    /// The hold of the device, as a number.
    pub(super) hold: AtomicU64,
    manifest: AtomicPtr<Manifest>,
    cargo: UnsafeCell<MaybeUninit<[u8; CARGO]>>,
}

// SAFETY: zero is valid; the cargo is in an UnsafeCell, the rest are atomics; nothing to drop.
unsafe impl Entry for Slot {}
// SAFETY: the cargo is touched by who has the slot, one at a time (`word`); it is `Send`, as `StableBytes` asks.
unsafe impl Sync for Slot {}

/// What lies in a slot.
#[derive(Debug)]
pub(super) struct Manifest {
    type_id: TypeId,
    type_name: fn() -> &'static str,
    /// Drops the cargo of a slot that the caller has.
    drop: unsafe fn(&Slot),
}

struct Of<B>(PhantomData<B>);

impl<B: Send + 'static> Of<B> {
    const MANIFEST: Manifest =
        Manifest { type_id: TypeId::of::<B>(), type_name: core::any::type_name::<B>, drop: Slot::unload_and_drop::<B> };
    /// A slot is aligned to 64 bytes, and the cargo begins at the 24th.
    const FITS: bool = size_of::<B>() <= CARGO && align_of::<B>() <= 8;
}

impl Manifest {
    pub(super) fn of<B: Send + 'static>() -> &'static Manifest {
        &Of::<B>::MANIFEST
    }

    pub(super) fn is_of<B: 'static>(&self) -> bool {
        self.type_id == TypeId::of::<B>()
    }

    pub(super) fn name(&self) -> &'static str {
        (self.type_name)()
    }
}

impl Slot {
    /// What lies in it, if anything ever did.
    pub(super) fn manifest(&self) -> Option<&'static Manifest> {
        // SAFETY: null, or from `load`.
        unsafe { self.manifest.load(Relaxed).as_ref() }
    }

    /// Puts `cargo` in.
    ///
    /// # Safety
    ///
    /// The caller has the slot, and it is empty.
    pub(super) unsafe fn load<B: Send + 'static>(&self, cargo: B) {
        self.manifest.store(ptr::from_ref(Manifest::of::<B>()).cast_mut(), Relaxed);
        // SAFETY: the slot is the caller's; what fits is written where it fits, and else the box is, which is a pointer.
        unsafe {
            if Of::<B>::FITS {
                self.cargo.get().cast::<B>().write(cargo);
            } else {
                self.cargo.get().cast::<*mut B>().write(Box::into_raw(Box::new(cargo)));
            }
        }
    }

    /// Where the cargo is.
    ///
    /// # Safety
    ///
    /// The caller has the slot, and a `B` was put in.
    pub(super) unsafe fn cargo<B: Send + 'static>(&self) -> *mut B {
        let place = self.cargo.get();
        if Of::<B>::FITS {
            place.cast()
        } else {
            // SAFETY: `load` has put the pointer there.
            unsafe { place.cast::<*mut B>().read() }
        }
    }

    /// Takes the cargo out; the slot is empty.
    ///
    /// # Safety
    ///
    /// The caller has the slot, and a `B` was put in.
    pub(super) unsafe fn unload<B: Send + 'static>(&self) -> B {
        // SAFETY: by the caller's word the cargo is there; it is taken out once, since the slot is empty then.
        unsafe {
            let cargo = self.cargo::<B>();
            if Of::<B>::FITS { cargo.read() } else { *Box::from_raw(cargo) }
        }
    }

    /// # Safety
    ///
    /// As [`unload`](Self::unload).
    unsafe fn unload_and_drop<B: Send + 'static>(&self) {
        // SAFETY: the caller's word.
        drop(unsafe { self.unload::<B>() });
    }

    /// Drops what is in the slot.
    ///
    /// # Safety
    ///
    /// The caller has the slot, and something was put in.
    pub(super) unsafe fn drop_cargo(&self) {
        if let Some(manifest) = self.manifest() {
            // SAFETY: the manifest is that of what was put in.
            unsafe { (manifest.drop)(self) }
        }
    }

    /// The device that is held.
    pub(super) fn device(&self) -> Device {
        Device::from_raw(self.hold.load(Relaxed))
    }
}

struct Slots {
    table: Table<Slot>,
    /// How many are open: only these are read.
    open: AtomicUsize,
    growing: Lock<()>,
    free: [CachePadded<Free<AtomicU64>>; LISTS],
}

static SLOTS: Once<Slots> = Once::new();

/// Before a fork: waits for who makes or opens slots.
pub(crate) fn hold() {
    SLOTS.making.hold();
    if let Some(slots) = SLOTS.get() {
        slots.growing.hold();
    }
}

/// After it, in parent and child.
///
/// # Safety
///
/// This thread, or the one of which it is a copy, has called [`hold`], and not this since.
pub(crate) unsafe fn release() {
    // SAFETY: `hold` took them; slots are there now if they were there then, since they were not made meanwhile.
    unsafe {
        if let Some(slots) = SLOTS.get() {
            slots.growing.release();
        }
        SLOTS.making.release();
    }
}

/// `None` where there is no address space.
fn slots() -> Option<&'static Slots> {
    let reserve = || {
        let mut len = INDEX as usize + 1;
        loop {
            match Table::reserve_unreadable(len) {
                Err(_) if len > GROWTH => len /= 2,
                result => break result,
            }
        }
    };
    let make = |table| Slots {
        table,
        open: AtomicUsize::new(0),
        growing: Lock::new(()),
        free: [const { CachePadded::new(Free(AtomicU64::new(0))) }; LISTS],
    };
    SLOTS.get_or_make(|| reserve().map(make)).ok()
}

/// Slots that a thread keeps: taking and giving one is no locked instruction then. Given back in halves when it is full, and
/// when the thread ends.
struct Spare {
    slots: Cell<[Option<&'static Slot>; SPARE]>,
    len: Cell<usize>,
    /// The list of this thread.
    list: Cell<usize>,
}

thread_local!(static SPARES: Spare = const {
    Spare { slots: Cell::new([None; SPARE]), len: Cell::new(0), list: Cell::new(usize::MAX) }
});

impl Spare {
    fn list(&self) -> usize {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        if self.list.get() == usize::MAX {
            self.list.set(THREADS.fetch_add(1, Relaxed) % LISTS);
        }
        self.list.get()
    }

    fn places(&self) -> &[Cell<Option<&'static Slot>>] {
        (&self.slots as &Cell<[_]>).as_slice_of_cells()
    }

    fn pop(&self) -> Option<&'static Slot> {
        let len = self.len.get().checked_sub(1)?;
        self.len.set(len);
        self.places()[len].take()
    }

    fn push(&self, slot: &'static Slot) {
        if self.len.get() == SPARE {
            self.give_back(SPARE / 2);
        }
        self.places()[self.len.get()].set(Some(slot));
        self.len.set(self.len.get() + 1);
    }

    /// Gives all but `left` to the list of the thread, linked.
    fn give_back(&self, left: usize) {
        let Some(slots) = slots() else { return };
        let index = |slot| index_of(slots, slot);
        let Some(last) = (self.len.get() > left).then(|| self.pop()).flatten() else { return };
        let mut first = last;
        while self.len.get() > left {
            let Some(slot) = self.pop() else { break };
            slot.word.link(index(first));
            first = slot;
        }
        slots.free[self.list()].push(index(first), index(last), |index| slots.word(index));
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        self.give_back(0);
    }
}

impl Slots {
    fn word(&self, index: u64) -> &AtomicU64 {
        &self.table.get(index as usize).word
    }

    fn pop(&self, own: usize) -> Option<u64> {
        (own..own + LISTS).find_map(|list| self.free[list % LISTS].pop(|index| self.word(index)))
    }

    /// Opens more slots, and takes one of them.
    #[cold]
    fn grow(&self, own: usize) -> Option<u64> {
        let _growing = self.growing.lock();
        // Another thread may have done so.
        if let Some(index) = self.pop(own) {
            return Some(index);
        }
        // Index 0 is none.
        let from = self.open.load(Relaxed);
        let to = (from + GROWTH).min(self.table.len());
        self.table.commit(from..to).ok()?;
        let first = from.max(1) as u64;
        if first >= to as u64 {
            return None;
        }
        (first + 1..to as u64).for_each(|index| self.word(index - 1).link(index));
        self.open.store(to, Release);
        let last = to as u64 - 1;
        if last > first {
            self.free[own].push(first + 1, last, |index| self.word(index));
        }
        Some(first)
    }
}

/// A slot that is empty and the caller's; `None`: there is no memory for more.
pub(super) fn take() -> Option<&'static Slot> {
    // Without what the thread keeps, where it is ending already.
    let (spare, own) = SPARES.try_with(|spare| (spare.pop(), spare.list())).unwrap_or((None, 0));
    spare.or_else(|| {
        let slots = slots()?;
        let index = slots.pop(own).or_else(|| slots.grow(own))?;
        Some(slots.table.get(index as usize))
    })
}

/// Gives an empty slot of the caller's back.
pub(super) fn give(slot: &'static Slot) {
    // It is free from here on.
    slot.word.link(0);
    if SPARES.try_with(|spare| spare.push(slot)).is_err()
        && let Some(slots) = slots()
    {
        let index = index_of(slots, slot);
        slots.free[0].push(index, index, |index| slots.word(index));
    }
}

fn index_of(slots: &Slots, slot: &Slot) -> u64 {
    ((ptr::from_ref(slot).addr() - slots.table.base().addr()) / size_of::<Slot>()) as u64
}

/// The index of a slot.
pub(super) fn index(slot: &'static Slot) -> u64 {
    slots().map_or(0, |slots| index_of(slots, slot))
}

/// The slot of that index, whatever is in it.
pub(super) fn find(index: u64) -> Option<&'static Slot> {
    let slots = slots()?;
    (index != 0 && index < slots.open.load(Acquire) as u64).then(|| slots.table.get(index as usize))
}

/// Every slot there is, in use or not.
pub(super) fn all() -> impl Iterator<Item = &'static Slot> {
    (1..).map_while(find)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_end_give_back_the_slots_that_they_kept() {
        for _ in 0..200 {
            let work = || {
                let taken: Vec<_> = (0..SPARE + 3).filter_map(|_| take()).collect();
                assert_eq!(taken.len(), SPARE + 3);
                taken.into_iter().for_each(give);
            };
            std::thread::spawn(work).join().unwrap();
        }
        // What other tests have at the same time included; without it, there would be 3,200.
        assert!(all().count() < 4 * GROWTH, "{}", all().count());
    }

    #[test]
    fn slots_that_one_thread_takes_and_another_gives_go_round() {
        let (give_them, taken) = std::sync::mpsc::sync_channel::<&'static Slot>(64);
        let giver = std::thread::spawn(move || taken.into_iter().for_each(give));
        (0..20_000).for_each(|_| give_them.send(take().unwrap()).unwrap());
        drop(give_them);
        giver.join().unwrap();
        assert!(all().count() < 4 * GROWTH, "{}", all().count());
    }
}
