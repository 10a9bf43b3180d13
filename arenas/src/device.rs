//! The devices of the process, and the keys of every chunk on each of them. Uses `region`, `table`, `registrar` and `hold`.
//!
//! A device has one of [`MAX_DEVICES`] columns: a table with one word of keys for each chunk of the region. A chunk belongs
//! to one heap, so all heaps share the columns, and a heap's devices are a set of them. Finding the keys of an address is a
//! subtraction, a comparison, a shift and a load; the column's generation tells whether the device is still the one that was
//! asked. A device that is lost ends its generation: so its keys end at once, on all heaps.
//!
//! The tables lie outside registered memory, are never given back, and read as zeros in children of `fork`.

mod holding;

use crate::arena::{Arena, GLOBAL_TAG, State};
use crate::error::{AttachError, KeyError, NotRegistered};
use crate::held::Held;
use crate::hold::Holds;
use crate::name::{Name, NamePlace};
use crate::region::{CHUNK_SHIFT, Region};
use crate::registrar::Keys;
use crate::sync::Lock;
use crate::table::{Table, both};
use core::num::NonZeroUsize;
use core::ops::Range;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
use crossbeam_utils::CachePadded;
pub use holding::Hold;
pub(crate) use holding::without_lost;
use std::io;

/// How many devices a process can have attached at once: 64.
pub const MAX_DEVICES: usize = 64;

/// What is read when keys are looked up: a column's first cache line.
#[repr(C, align(128))]
#[derive(Debug)]
struct Column {
    /// The words of keys, null until the column is used the first time.
    keys: AtomicPtr<AtomicU64>,
    /// The region's begin and length, repeated here so that a look-up reads one line.
    base: AtomicUsize,
    len: AtomicUsize,
    /// Odd while a device is attached and not lost; one more at each attach, and at its loss or else its detach.
    generation: AtomicU32,
    /// The words of handles and errors, for those who ask why there are no keys.
    handles: AtomicPtr<AtomicU64>,
    /// In a child of fork: the generation of the device that the parent had here. Devices' generations are odd.
    parents: AtomicU32,
    /// What all heaps of the process have registered with the device.
    held: Held,
    name: NamePlace,
}

static COLUMNS: [Column; MAX_DEVICES] = [const {
    Column {
        keys: AtomicPtr::new(ptr::null_mut()),
        base: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        generation: AtomicU32::new(0),
        handles: AtomicPtr::new(ptr::null_mut()),
        parents: AtomicU32::new(0),
        held: Held::new(),
        name: NamePlace::new(),
    }
}; MAX_DEVICES];

/// Who uses the devices, apart from what is read when keys are looked up.
static HOLDS: [CachePadded<Holds>; MAX_DEVICES] = [const { CachePadded::new(Holds::none()) }; MAX_DEVICES];

/// Who has the columns, and what only registering needs to know.
pub(crate) static SLOTS: Lock<[Slot; MAX_DEVICES]> =
    Lock::new([const { Slot { identity: None, heaps: 0, generation: 0, tables: None } }; MAX_DEVICES]);

#[derive(Debug)]
pub(crate) struct Slot {
    identity: Option<NonZeroUsize>,
    /// How many heaps have the device attached.
    heaps: usize,
    /// Of the device that is attached. The column's has ended if the device is lost.
    generation: u32,
    tables: Option<&'static Tables>,
}

#[derive(Debug)]
struct Tables {
    keys: Table<AtomicU64>,
    /// In the first chunk of a registered piece: the registrar's handle. In that of an arena that was refused: the error.
    handles: Table<AtomicU64>,
}

/// An attached device: looks keys up. A plain value; dropping it does nothing, and one that outlives its attachment answers
/// [`KeyError::Detached`].
#[derive(Clone, Copy)]
pub struct Device {
    column: &'static Column,
    generation: u32,
}

impl Device {
    /// The keys of the memory at `address`.
    ///
    /// Any address may be asked for: this reads only the tables, never the address, and takes no lock. The answer holds as
    /// long as the block at the address lives and the device is attached.
    ///
    /// # Errors
    ///
    /// [`KeyError`] says why the device cannot reach the address.
    #[inline]
    pub fn key_of_address(self, address: usize) -> Result<Keys, KeyError> {
        let word = self.word(address);
        // The word first, then the generation: a word of the column's next device is only written after the generation
        // has changed, and the acquire of `word` makes that change visible here.
        if word != 0 && self.column.generation.load(Relaxed) == self.generation {
            Ok(decode(word))
        } else {
            let mut why = KeyError::Detached;
            self.note_why_not(address, &mut why);
            Err(why)
        }
    }

    /// The keys of the memory that `pointer` points to; any pointer, null and dangling ones too.
    ///
    /// # Errors
    ///
    /// As [`key_of_address`](Self::key_of_address).
    #[inline]
    pub fn key<T: ?Sized>(self, pointer: *const T) -> Result<Keys, KeyError> {
        self.key_of_address(pointer.addr())
    }

    /// The keys of the memory at `address`, and the handle of the registration that it lies in: for verbs, the address of the
    /// `ibv_mr`. Slower than [`key_of_address`](Self::key_of_address), and for fewer: binding a memory window takes it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn registration_of(self, address: usize) -> Result<(Keys, u64), KeyError> {
        let keys = self.key_of_address(address)?;
        let (Some(arena), handles) = (Arena::of(address), self.column.handles.load(Relaxed)) else {
            return Err(KeyError::Foreign);
        };
        // The handle stands at the first chunk of the piece: mostly the arena's, or else going back as long as the keys are
        // the same.
        let (base, word) = (self.column.base.load(Relaxed), self.word(address));
        let starts = |chunk: usize| self.word(base + (chunk << CHUNK_SHIFT)) == word;
        let (first, own) = (arena.run().start, (address - base) >> CHUNK_SHIFT);
        let piece = if starts(first) {
            first
        } else {
            (first..=own).rev().take_while(|chunk| starts(*chunk)).last().unwrap_or(own)
        };
        // SAFETY: as in `word`; the table of handles is as long.
        let handle = unsafe { &*handles.add(piece) }.load(Relaxed);
        Ok((keys, handle))
    }

    /// What its registrar says makes it this device ([`Registrar::identity`](crate::Registrar::identity)); `None` if nothing
    /// does, or it is not attached.
    #[must_use]
    pub fn identity(self) -> Option<NonZeroUsize> {
        let slots = SLOTS.lock();
        let slot = &slots[self.slot()];
        slot.identity.filter(|_| slot.heaps > 0 && slot.generation == self.generation)
    }

    /// Whether `first` and `last` are reached by the same keys, so that one scatter-gather entry can span them.
    #[inline]
    #[must_use]
    pub fn is_one_registration(self, first: usize, last: usize) -> bool {
        // Within a chunk there is never more than one.
        (first ^ last) >> CHUNK_SHIFT == 0 || self.word(first) == self.word(last)
    }

    #[inline]
    fn word(self, address: usize) -> u64 {
        let offset = address.wrapping_sub(self.column.base.load(Relaxed));
        if offset >= self.column.len.load(Relaxed) {
            return 0;
        }
        let keys = self.column.keys.load(Relaxed);
        // SAFETY: a Device exists only after its column's fields were set for ever (`acquire`, before the Device was made);
        // the table has a word for each chunk of the region, is always readable, and is never unmapped.
        unsafe { &*keys.add(offset >> CHUNK_SHIFT) }.load(Acquire)
    }

    /// In this form, the arguments lie in the registers where the look-up has them; returning what is longer than a word would
    /// shift them, ahead of the branch (3 instructions).
    #[cold]
    #[inline(never)]
    fn note_why_not(self, address: usize, why: &mut KeyError) {
        *why = self.why_not(address);
    }

    fn why_not(self, address: usize) -> KeyError {
        let child = KeyError::NotRegistered(NotRegistered::ForkedChild);
        if !self.is_current() {
            return if self.is_parents() {
                child
            } else if self.is_lost() && self.is_attached() {
                KeyError::Lost
            } else {
                KeyError::Detached
            };
        }
        let Some(arena) = Arena::of(address) else { return KeyError::Foreign };
        if crate::os::is_forked_child() {
            return child;
        }
        let other = if arena.tag() == GLOBAL_TAG { NotRegistered::GlobalHeap } else { NotRegistered::OtherHeap };
        KeyError::NotRegistered(match arena.word.state() {
            State::Live => self.reason(arena).unwrap_or(other),
            State::Opening => other,
            _ => NotRegistered::Closed,
        })
    }

    /// Why the device has not registered an arena, if that was noted.
    pub(crate) fn reason(self, arena: &Arena) -> Option<NotRegistered> {
        let handles = self.column.handles.load(Relaxed);
        if handles.is_null() || arena.registered.load(Relaxed) & (1 << self.slot()) != 0 {
            return None;
        }
        // SAFETY: as in `word`; the table of handles is as long, and an arena's first chunk is one of the region's.
        let word = unsafe { &*handles.add(arena.run().start) }.load(Relaxed);
        (word != 0).then(|| NotRegistered::from_word(word))
    }

    /// The device that has a slot now.
    pub(crate) fn in_slot(slot: usize) -> Device {
        let column = &COLUMNS[slot];
        Device { column, generation: column.generation.load(Acquire) }
    }

    /// The device as a number: its slot and its generation. Never 0, since the generation of a device is odd.
    pub(crate) fn raw(self) -> u64 {
        (self.slot() as u64) << 32 | u64::from(self.generation)
    }

    /// The device of that number.
    pub(crate) fn from_raw(raw: u64) -> Device {
        Device { column: &COLUMNS[(raw >> 32) as usize], generation: raw as u32 }
    }

    /// How many bytes from `address` on, at most `len`, are reached by the keys of the first.
    pub(crate) fn reach(self, address: usize, len: usize) -> usize {
        if len == 0 || self.is_one_registration(address, address + (len - 1)) {
            return len;
        }
        let (word, end) = (self.word(address), address + len);
        let mut next = ((address >> CHUNK_SHIFT) + 1) << CHUNK_SHIFT;
        while next < end && self.word(next) == word {
            next += 1 << CHUNK_SHIFT;
        }
        next.min(end) - address
    }

    /// What its registrar calls itself, such as `mlx5_0`; empty once the device is detached.
    #[must_use]
    pub fn name(self) -> Name {
        let name = self.column.name.get();
        // A name that is written meanwhile belongs to the next generation, which is told first.
        fence(Acquire);
        if self.is_current() || self.is_lost() { name } else { Name::default() }
    }

    /// The device's number, below [`MAX_DEVICES`].
    #[must_use]
    pub fn slot(self) -> usize {
        let first = COLUMNS.as_ptr().addr();
        (ptr::from_ref(self.column).addr() - first) / size_of::<Column>()
    }
}

impl core::fmt::Debug for Device {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Device").field("slot", &self.slot()).field("generation", &self.generation).finish()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        ptr::eq(self.column, other.column) && self.generation == other.generation
    }
}

impl Eq for Device {}

/// Keys as one word. Zero means none, so the keys are stored inverted: the one pair that cannot be told apart from none is
/// two times `u32::MAX`, which no device hands out; a registrar that does is refused.
fn encode(keys: Keys) -> u64 {
    !(u64::from(keys.lkey) << 32 | u64::from(keys.rkey))
}

#[inline]
fn decode(word: u64) -> Keys {
    Keys { lkey: (!word >> 32) as u32, rkey: !word as u32 }
}

/// In a child of fork: all devices are the parent's, and their columns free. One that is held stays so until its last hold
/// goes: where the holders are threads of the parent's, for ever.
pub(crate) fn forget_all() {
    let mut slots = SLOTS.lock();
    for (index, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| slot.heaps > 0) {
        (slot.heaps, slot.identity) = (0, None);
        let device = Device { column: &COLUMNS[index], generation: slot.generation };
        device.column.parents.store(device.generation, Relaxed);
        device.holds().close();
        device.end_generation();
    }
}

/// A column that a heap has taken; the heap's role keeps it. Only the role's holder calls its methods.
#[derive(Debug)]
pub(crate) struct Slotted {
    pub(crate) device: Device,
    tables: &'static Tables,
}

impl Slotted {
    /// Takes a column for a device: the one it has already, if another heap has it attached, else a vacant one.
    pub(crate) fn acquire(identity: Option<NonZeroUsize>, name: &str) -> Result<Slotted, AttachError> {
        let region = Region::get().map_err(AttachError::NoMemory)?;
        // Tables are made before the lock is taken: whatever allocates does so without it.
        let fresh = || -> io::Result<&'static Tables> {
            let (keys, handles) = both(Table::reserve(region.chunks()), || Table::reserve(region.chunks()))?;
            keys.wipe_on_fork();
            handles.wipe_on_fork();
            Ok(Box::leak(Box::new(Tables { keys, handles })))
        };
        let mut spare = None;
        loop {
            let mut slots = SLOTS.lock();
            let known = slots.iter().position(|slot| slot.heaps > 0 && identity.is_some() && slot.identity == identity);
            // Not one whose last device is still held: its holds will be counted as long as they are.
            let vacant = |index: &usize| slots[*index].heaps == 0 && HOLDS[*index].is_quiet();
            let Some(index) = known.or_else(|| (0..MAX_DEVICES).find(vacant)) else {
                return Err(AttachError::TooManyDevices { limit: MAX_DEVICES });
            };
            let (slot, column) = (&mut slots[index], &COLUMNS[index]);
            let Some(tables) = slot.tables.or_else(|| spare.take()) else {
                drop(slots);
                spare = Some(fresh().map_err(AttachError::NoMemory)?);
                continue;
            };
            slot.tables = Some(tables);
            slot.identity = identity;
            slot.heaps += 1;
            if slot.heaps == 1 {
                column.keys.store(tables.keys.base(), Relaxed);
                column.handles.store(tables.handles.base(), Relaxed);
                column.base.store(region.base(), Relaxed);
                column.len.store(region.len(), Relaxed);
                // Even before, as it ended in `release` at the latest.
                let generation = column.generation.load(Relaxed).wrapping_add(1);
                HOLDS[index].open(generation);
                slot.generation = generation;
                column.generation.store(generation, Release);
                column.held.reset();
                // After the generation, for who reads the name of the one before.
                fence(Release);
                column.name.set(Name::new(name));
            }
            let generation = slot.generation;
            return Ok(Slotted { device: Device { column, generation }, tables });
        }
    }

    /// Gives the column back; the last heap to do so ends the device's generation. No keys of this heap are left in it.
    pub(crate) fn release(self) {
        let mut slots = SLOTS.lock();
        let slot = &mut slots[self.device.slot()];
        if self.device.is_parents() {
            return;
        }
        slot.heaps -= 1;
        if slot.heaps == 0 {
            slot.identity = None;
            self.device.holds().close();
            self.device.end_generation();
        }
    }

    /// What all heaps have registered with the device.
    pub(crate) fn held(&self) -> &Held {
        &self.device.column.held
    }

    /// The bit of this column in a set.
    pub(crate) fn bit(&self) -> u64 {
        1 << self.device.slot()
    }

    /// Opens the words of `chunks` for writing.
    pub(crate) fn prepare(&self, chunks: Range<usize>) -> io::Result<()> {
        self.tables.keys.commit(chunks.clone())?;
        self.tables.handles.commit(chunks)
    }

    /// Shows the keys of `chunks`, and keeps the handle. `false`: keys that cannot be told from none.
    pub(crate) fn publish(&self, chunks: Range<usize>, keys: Keys, handle: u64) -> bool {
        let word = encode(keys);
        self.tables.handles.get(chunks.start).store(handle, Relaxed);
        chunks.for_each(|chunk| self.tables.keys.get(chunk).store(word, Release));
        word != 0
    }

    /// Hides the keys of `chunks`; returns them and the handle.
    pub(crate) fn withdraw(&self, chunks: Range<usize>) -> (Keys, u64) {
        let (word, handle) = (self.tables.keys.get(chunks.start), self.tables.handles.get(chunks.start));
        let before = (decode(word.load(Relaxed)), handle.load(Relaxed));
        handle.store(0, Relaxed);
        chunks.for_each(|chunk| self.tables.keys.get(chunk).store(0, Relaxed));
        before
    }

    /// Remembers why an arena is not registered, where its handle would be: a word of [`Refusal`](crate::Refusal).
    pub(crate) fn refuse(&self, first: usize, word: u64) {
        // Without memory for the table there is no reason to be told either.
        if self.tables.handles.commit(first..first + 1).is_ok() {
            self.tables.handles.get(first).store(word, Relaxed);
        }
    }

    /// Forgets it, as the arena is closed.
    pub(crate) fn forgive(&self, first: usize) {
        let error = self.tables.handles.get(first);
        // An entry that is not zero was written, so its page is writable.
        if error.load(Relaxed) != 0 {
            error.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_the_word_and_zero_means_none() {
        for keys in [Keys { lkey: 0, rkey: 0 }, Keys { lkey: 7, rkey: u32::MAX }, Keys { lkey: u32::MAX, rkey: 0 }] {
            assert_ne!(encode(keys), 0);
            assert_eq!(decode(encode(keys)), keys);
        }
        assert_eq!(encode(Keys { lkey: u32::MAX, rkey: u32::MAX }), 0);
    }
}
