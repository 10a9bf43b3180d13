//! [`Flight`]: bytes on which a device may still work, owned and out of reach until it is done. Uses `word`, `slots`, `stable`,
//! and `hold`, `device` and `sge` of the crate.
//!
//! ```text
//! fly ->  Flight  -- into_id -->  id (wr_id)  -- from_id -->  Flight  -- complete, complete_send, reclaim -->  the value
//!            \-- dropped: leaked, counted                        (only this is unsafe)
//! ```
//!
//! What flies lies in a slot of a table (`slots`), so a flight is one word, and its id is the slot's index with a generation:
//! looking it up is checked, so an id that was completed before, or was never one, or is another type's, is an error, and not the
//! end of memory safety. That a device is done with the bytes no program can check: so getting the value back is what is unsafe.
//!
//! A flight holds its device, so a detach waits for it. It costs three locked instructions over all (hold, id looked up, hold
//! ended), and no memory is allocated for what fits a slot.

mod error;
pub(crate) mod slots;
mod stable;
mod word;

use crate::device::{Device, Hold};
use crate::sge::{Sge, SgeError, SgeMut};
use crate::sges::Sges;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Bound, RangeBounds};
use core::sync::atomic::Ordering::Relaxed;
pub use error::{FlyError, Grounded, IdError, Overrun};
use slots::{Manifest, Slot};
pub use stable::{StableBytes, StableBytesMut};
use word::{INDEX, Landing, MOST_COMPLETIONS, Seen, Word};

/// A value on whose bytes a device may work: from before its work request is posted until after its completion.
///
/// Nobody reaches the value meanwhile, but what it is the source of can be read. A flight that is dropped leaks the value,
/// since the device may still work on it, and is counted: [`Device::flights`].
///
/// | what came | what to call |
/// | --- | --- |
/// | the completion of a send or RDMA write | [`from_id`](Self::from_id), [`complete_send`](Self::complete_send) |
/// | that of a receive or RDMA read, with its `byte_len` | [`from_id`](Self::from_id), [`complete`](Self::complete) |
/// | one of several completions of an id of [`into_id_for`](Self::into_id_for) | [`landed`](Self::landed): the flight, with the last |
/// | one with an error status | as above, but [`complete_send`](Self::complete_send) in place of `complete`: the bytes do not count |
/// | a completion, and the value is not wanted | [`drop_flight`], for an id of any type |
/// | no completion, and none will: posting was refused, or the queue pair is destroyed | [`from_id`](Self::from_id) if it is an id, [`reclaim`](Self::reclaim) |
/// | none, and the id is not known any more, or the flight was dropped | [`Device::reclaim_flights`], after all queue pairs |
///
/// ```
/// # use rdmalloc_arenas::{Device, Flight};
/// # fn post(_id: u64, _addr: u64, _length: u32, _lkey: u32) -> bool { true }
/// # fn example(device: Device, message: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
/// let flight = device.fly(message)?;
/// let sge = flight.sge()?;
/// let (addr, length, lkey) = (sge.addr(), sge.length(), sge.lkey());
/// let id = flight.into_id(); // the wr_id
/// if !post(id, addr, length, lkey) {
///     // SAFETY: the work request was not taken, so no device works on it.
///     let message = unsafe { Flight::<Vec<u8>>::from_id(id)?.reclaim() };
/// }
/// // When the completion with this wr_id has come:
/// // SAFETY: it was the one work request of this flight.
/// let message = unsafe { Flight::<Vec<u8>>::from_id(id)?.complete_send() };
/// # Ok(()) }
/// ```
///
/// ```compile_fail
/// # fn example(device: rdmalloc_arenas::Device, message: Vec<u8>) -> Option<()> {
/// let flight = device.fly(message).ok()?;
/// flight.complete_send(); // only `unsafe`: the device may not be done
/// # Some(()) }
/// ```
#[must_use = "a flight that is dropped leaks what it has"]
pub struct Flight<B: StableBytes> {
    /// The flight has the slot, and there is a `B` in it.
    slot: &'static Slot,
    cargo: PhantomData<B>,
}

/// How many flights a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Flights {
    /// Under way: with a program as a [`Flight`], or as an id with a work request.
    pub under_way: usize,
    /// Dropped as a [`Flight`], so that what they had is lost, until [`Device::reclaim_flights`].
    pub leaked: usize,
}

impl Device {
    /// Takes a value on whose bytes the device shall work. It holds the device: a detach waits until the flight is over.
    ///
    /// Its bytes have to be registered with the device; its room is asked for when there is an entry of it. Several values, as
    /// array, tuple or `Vec`, can be one flight: where work requests are posted unsignalled and the last one is signalled, its
    /// completion retires all.
    ///
    /// # Errors
    ///
    /// [`FlyError`] has the value, and the reason.
    pub fn fly<B: StableBytes>(self, value: B) -> Result<Flight<B>, FlyError<B>> {
        let hold = match self.hold() {
            Ok(hold) => hold,
            Err(error) => return Err(FlyError { value, reason: Grounded::Hold(error) }),
        };
        let pieces = value.pieces();
        for piece in 0..pieces {
            let bytes = value.piece(piece);
            if let Some(Err(error)) = (!bytes.is_empty()).then(|| self.key(bytes.as_ptr())) {
                return Err(FlyError { value, reason: Grounded::Key { piece, pieces, error } });
            }
        }
        let Some(slot) = slots::take() else { return Err(FlyError { value, reason: Grounded::TooMany }) };
        slot.hold.store(hold.into_raw(), Relaxed);
        // SAFETY: just taken, and empty.
        unsafe { slot.load(value) };
        slot.word.board();
        Ok(Flight { slot, cargo: PhantomData })
    }

    /// How many flights the device has; a walk over all flights there ever were at once, which waits for nobody.
    #[must_use]
    pub fn flights(self) -> Flights {
        let raw = self.raw();
        let mut flights = Flights::default();
        for slot in slots::all() {
            // The state first: what it tells of was written before.
            let seen = slot.word.seen();
            if slot.hold.load(Relaxed) == raw {
                flights.under_way += usize::from(seen == Seen::UnderWay);
                flights.leaked += usize::from(seen == Seen::Leaked);
            }
        }
        flights
    }

    /// Ends every flight of the device that is an id or was leaked, and drops what they had. Flights that the program has as
    /// [`Flight`] are left alone. How many were ended.
    ///
    /// For the time after all queue pairs of the device were destroyed, or the device is lost and has let go of its
    /// registrations: no completion comes any more.
    ///
    /// # Safety
    ///
    /// No device works on the bytes of these flights, or ever will; no work request of theirs is posted.
    pub unsafe fn reclaim_flights(self) -> usize {
        let raw = self.raw();
        let mut reclaimed = 0;
        for slot in slots::all() {
            if slot.word.seize(|| slot.hold.load(Relaxed) == raw) {
                // SAFETY: the slot was seized, so it is ours, with what is in it; nobody works on that, by the caller's word.
                unsafe { slot.drop_cargo() };
                end(slot);
                reclaimed += 1;
            }
        }
        reclaimed
    }
}

/// Ends the flight of an id, of whatever type, and drops what it had: where the value is not wanted any more, and where one
/// completion tells of many work requests, each a flight of its own.
///
/// # Errors
///
/// [`IdError`], as [`Flight::landed`], but for another type; and [`IdError::MoreToCome`], where a completion was counted, and was not
/// the last.
///
/// # Safety
///
/// As [`Flight::complete_send`].
pub unsafe fn drop_flight(id: u64) -> Result<(), IdError> {
    let slot = slots::find(id & INDEX).ok_or(IdError::Unknown { id })?;
    match slot.word.land::<IdError>(id, || Ok(()))? {
        Landing::Unknown => return Err(IdError::Unknown { id }),
        Landing::More(left) | Landing::NotTheLast(left) => return Err(IdError::MoreToCome { left }),
        Landing::Last => {}
    }
    // SAFETY: the slot is ours now, with what is in it; no device works on that, by the caller's word.
    unsafe { slot.drop_cargo() };
    end(slot);
    Ok(())
}

/// The slot is empty and the caller's: gives it back, and ends the hold.
fn end(slot: &'static Slot) {
    // SAFETY: the number was put there by `fly`, and the slot is used once.
    let hold = unsafe { Hold::from_raw(slot.hold.load(Relaxed)) };
    slots::give(slot);
    drop(hold);
}

impl<B: StableBytes> Flight<B> {
    /// The device that may work on it.
    #[must_use]
    pub fn device(&self) -> Device {
        self.slot.device()
    }

    fn value(&self) -> &B {
        // SAFETY: the flight has the slot, with a `B` in it; and it is borrowed.
        unsafe { &*self.slot.cargo::<B>() }
    }

    /// How many pieces it is: one, unless it is an array, a tuple or a `Vec` of values.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.value().pieces()
    }

    /// The bytes of a piece, which a device may read at the same time; not what it may write. Empty if there is no such piece.
    #[must_use]
    pub fn piece(&self, index: usize) -> &[u8] {
        self.value().piece(index)
    }

    /// The entry for the device to read all bytes of the first piece.
    ///
    /// # Errors
    ///
    /// [`SgeError`].
    pub fn sge(&self) -> Result<Sge<'_>, SgeError> {
        self.device().sge(self.piece(0))
    }

    /// The entry for the device to read a part of a piece.
    ///
    /// # Errors
    ///
    /// [`SgeError`].
    pub fn part(&self, piece: usize, range: impl RangeBounds<usize>) -> Result<Sge<'_>, SgeError> {
        let bytes = self.piece(piece);
        let (begin, len) = within(range, bytes.len())?;
        self.device().sge(&bytes[begin..begin + len])
    }

    /// The entries for the device to read all pieces, in their order, as [`Device::sges`] has them.
    pub fn sges(&self) -> Sges<impl Iterator<Item = &[u8]>> {
        self.device().sges((0..self.pieces()).map(|index| self.piece(index)))
    }

    /// Becomes the id of a work request, its `wr_id`, for one completion. Never 0, and below 2^48: the upper 16 bits are the
    /// program's own, for which [`from_id`](Self::from_id) does not care.
    #[must_use = "without its id, a flight is not found again"]
    pub fn into_id(self) -> u64 {
        let slot = ManuallyDrop::new(self).slot;
        slot.word.depart(1) | slots::index(slot)
    }

    /// Becomes an id for so many completions, at least 1 and at most 65,533: one value to several replicas, each work request with the same
    /// `wr_id`. The last completion brings it back ([`landed`](Self::landed)).
    ///
    /// # Errors
    ///
    /// The flight, if that is too few or too many.
    pub fn into_id_for(self, completions: u16) -> Result<u64, Flight<B>> {
        if !(1..=MOST_COMPLETIONS).contains(&completions) {
            return Err(self);
        }
        let slot = ManuallyDrop::new(self).slot;
        Ok(slot.word.depart(completions) | slots::index(slot))
    }

    /// One completion of the id has come: the flight, if it was the last.
    ///
    /// # Errors
    ///
    /// [`IdError::Unknown`], [`IdError::OtherType`].
    #[must_use = "the last completion gives the flight, and a flight that is dropped leaks what it has"]
    pub fn landed(id: u64) -> Result<Option<Flight<B>>, IdError> {
        match Self::land(id, false) {
            Ok(flight) => Ok(Some(flight)),
            Err(IdError::MoreToCome { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn land(id: u64, last: bool) -> Result<Flight<B>, IdError> {
        let slot = slots::find(id & INDEX).ok_or(IdError::Unknown { id })?;
        let fits = || match slot.manifest() {
            Some(manifest) if manifest.is_of::<B>() => Ok(()),
            other => {
                Err(IdError::OtherType { flies: other.map_or("", Manifest::name), asked: core::any::type_name::<B>() })
            }
        };
        match if last { slot.word.land_last(id, fits)? } else { slot.word.land(id, fits)? } {
            Landing::Unknown => Err(IdError::Unknown { id }),
            Landing::More(left) => Err(IdError::MoreToCome { left }),
            Landing::NotTheLast(left) => Err(IdError::Several { left }),
            Landing::Last => {
                // What was asked before the slot was ours may have been of another flight, 2^24 generations ago.
                if let Err(error) = fits() {
                    slot.word.leak();
                    return Err(error);
                }
                Ok(Flight { slot, cargo: PhantomData })
            }
        }
    }

    /// The flight that became this id, whose completion has come. Each id gives its flight once. Of an id for several
    /// completions it takes the last only; the others are [`landed`](Self::landed)'s.
    ///
    /// # Errors
    ///
    /// [`IdError`], and nothing has changed: no completion is counted.
    pub fn from_id(id: u64) -> Result<Flight<B>, IdError> {
        Self::land(id, true)
    }

    /// Ends a flight whose bytes were only read: sends, RDMA writes. Also one that was to be written, if what was written
    /// shall not count.
    ///
    /// # Safety
    ///
    /// Every work request that was posted for the flight has completed (one that is signalled completes those before it on its
    /// send queue), with or without success; or its queue pair was destroyed since.
    #[must_use = "dropping it frees the memory"]
    pub unsafe fn complete_send(self) -> B {
        let slot = ManuallyDrop::new(self).slot;
        // SAFETY: the flight has the slot, with a `B` in it, and ends here.
        let value = unsafe { slot.unload::<B>() };
        end(slot);
        value
    }

    /// Ends a flight that has no completion: nothing was posted, or its queue pair was destroyed.
    ///
    /// # Safety
    ///
    /// No device works on the bytes, or ever will: nothing was posted; or each queue pair on which something was is destroyed, or
    /// the device is lost and has let go of its registrations.
    #[must_use = "dropping it frees the memory"]
    pub unsafe fn reclaim(self) -> B {
        // SAFETY: no device works on it, which is all that completions are asked for.
        unsafe { self.complete_send() }
    }
}

impl<B: StableBytesMut> Flight<B> {
    fn room(&mut self, index: usize) -> *mut [core::mem::MaybeUninit<u8>] {
        // SAFETY: the flight has the slot, with a `B` in it; and it is borrowed alone.
        unsafe { &mut *self.slot.cargo::<B>() }.room(index)
    }

    /// The entry for the device to write to the room behind the bytes of the first piece: all of its spare capacity.
    ///
    /// # Errors
    ///
    /// [`SgeError`].
    pub fn sge_mut(&mut self) -> Result<SgeMut<'_>, SgeError> {
        self.part_mut(0, ..)
    }

    /// The entry for the device to write to a part of the room of a piece, counted from the begin of the room.
    ///
    /// # Errors
    ///
    /// [`SgeError`].
    pub fn part_mut(&mut self, piece: usize, range: impl RangeBounds<usize>) -> Result<SgeMut<'_>, SgeError> {
        let room = self.room(piece);
        let (begin, len) = within(range, room.len())?;
        self.device().sge_mut_at(room.addr() + begin, len)
    }

    /// Ends a flight into whose room `byte_len` bytes were written, as the completion tells: receives, RDMA reads. They are
    /// bytes of the value then. Those of several pieces filled their rooms in order.
    ///
    /// # Errors
    ///
    /// [`Overrun`] has the value: there was not so much room.
    ///
    /// # Safety
    ///
    /// As [`complete_send`](Self::complete_send); and so many bytes were written, from the begin of the room of the first
    /// piece, and on from that of the next where one is full.
    pub unsafe fn complete(mut self, byte_len: u32) -> Result<B, Overrun<B>> {
        let rooms: usize = (0..self.pieces()).map(|index| self.room(index).len()).fold(0, usize::saturating_add);
        let fits = byte_len as usize <= rooms;
        let mut left = if fits { byte_len as usize } else { 0 };
        let mut index = 0;
        while left > 0 {
            let len = left.min(self.room(index).len());
            // SAFETY: the flight has the slot, with a `B` in it. So much of the room was written, by the caller's word.
            unsafe { (*self.slot.cargo::<B>()).fill(index, len) };
            left -= len;
            index += 1;
        }
        // SAFETY: the caller's word.
        let value = unsafe { self.complete_send() };
        if fits { Ok(value) } else { Err(Overrun { value, byte_len, room: rooms }) }
    }
}

/// A range as begin and length, if it is within `len`.
fn within(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize), SgeError> {
    let begin = match range.start_bound() {
        Bound::Included(&begin) => begin,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if end > len || begin > end {
        Err(SgeError::OutOfRange { end: end.max(begin), len })
    } else {
        Ok((begin, end - begin))
    }
}

impl<B: StableBytes> Drop for Flight<B> {
    fn drop(&mut self) {
        self.slot.word.leak();
    }
}

impl<B: StableBytes> fmt::Debug for Flight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flight").field("of", &core::any::type_name::<B>()).field("device", &self.device()).finish()
    }
}
