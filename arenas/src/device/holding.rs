//! Devices in use, and devices that are lost: what [`Device`] does beside looking keys up. Uses `hold`.

use super::{Device, HOLDS};
use crate::hold::{Busy, HoldError, Holds, ROOM};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::{Duration, Instant};

impl Device {
    /// Holds the device: until the [`Hold`] is dropped, it is not detached, unless it is lost.
    ///
    /// For whoever has a work request under way, or a memory window, on the device. Costs two locked instructions, one for
    /// each end, on a line that all holds of the device share.
    ///
    /// # Errors
    ///
    /// [`HoldError`]: the device is detached, or being detached, or lost.
    ///
    /// ```
    /// # use rdmalloc_arenas::Device;
    /// # fn example(device: Device) -> Result<(), rdmalloc_arenas::HoldError> {
    /// let hold = device.hold()?;
    /// // ... post a work request; after its completion:
    /// drop(hold);
    /// # Ok(())
    /// # }
    /// ```
    pub fn hold(self) -> Result<Hold, HoldError> {
        self.holds().hold(self.generation)?;
        let hold = Hold(self);
        // The word has only the low bits of the generation.
        if self.is_current() {
            Ok(hold)
        } else {
            Err(if self.is_lost() { HoldError::Lost } else { HoldError::Detached })
        }
    }

    /// How many holds there are now, on whichever heap's memory. After a detach: those that the loss of the device left behind.
    #[must_use]
    pub fn hold_count(self) -> usize {
        self.holds().count(self.generation)
    }

    /// Tells that the device is lost: it was removed, or has failed for good (`IBV_EVENT_DEVICE_FATAL`, or `EIO` from posting
    /// to it). Heaps find out by themselves when the device answers so to a registration.
    ///
    /// From here on all its keys are gone ([`KeyError::Lost`](crate::KeyError::Lost)), on every heap; heaps go on without it and do not offer it new
    /// arenas. Work requests on it may never complete: [`hold_count`](Self::hold_count) counts their holds, and a detach does not wait for
    /// them. Memory that was registered is given back as far as the device still confirms that it has let go of it, and
    /// otherwise kept. There is no way back but to detach the device and attach it anew. Nothing happens if it is detached.
    pub fn mark_lost(self) {
        if self.is_current() {
            self.holds().lose(self.generation, &ROOM);
            // After it, so that who finds the generation ended finds the reason.
            self.end_generation();
        }
    }

    /// Whether the device is lost. Known until another device has taken its place.
    #[must_use]
    pub fn is_lost(self) -> bool {
        self.holds().is_lost(self.generation)
    }

    /// Whether keys may be shown: attached and not lost.
    pub(super) fn is_current(self) -> bool {
        self.column.generation.load(Acquire) == self.generation
    }

    /// Whether this process is a child of fork, and the device was attached in its parent.
    pub(crate) fn is_parents(self) -> bool {
        self.generation & 1 == 1 && self.column.parents.load(Relaxed) == self.generation
    }

    pub(super) fn is_attached(self) -> bool {
        self.holds().is_open(self.generation)
    }

    pub(super) fn end_generation(self) {
        let (old, new) = (self.generation, self.generation.wrapping_add(1));
        // If it has ended already, it has.
        let _ = self.column.generation.compare_exchange(old, new, AcqRel, Relaxed);
    }

    pub(super) fn holds(self) -> &'static Holds {
        &HOLDS[self.slot()]
    }

    /// Waits until nobody holds the device, or it is lost; from then on nobody gets a hold while the result lives.
    ///
    /// # Errors
    ///
    /// How many holds there still were when `patience` was at its end.
    pub(crate) fn drain(self, patience: Duration) -> Result<Drained, Busy> {
        // A time beyond all clocks: as long as it takes.
        let deadline = Instant::now().checked_add(patience);
        self.holds().drain(self.generation, &ROOM, deadline).map(|()| Drained(self))
    }
}

/// Keeps a device from being detached: one for each work request that is under way, or memory window. Ends when dropped.
///
/// If the device is lost, holds no longer keep it, but they are still counted.
#[must_use = "the device is held until this is dropped"]
#[derive(PartialEq, Eq, Debug)]
pub struct Hold(Device);

impl Hold {
    /// The device that is held.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0
    }

    /// The hold as a number, which goes where a value cannot. Never 0. It goes on until [`from_raw`](Self::from_raw) brings
    /// it back.
    #[must_use = "the device is held until this is a hold again"]
    pub fn into_raw(self) -> u64 {
        let raw = self.0.raw();
        core::mem::forget(self);
        raw
    }

    /// The hold that became a number.
    ///
    /// # Safety
    ///
    /// `raw` is from [`into_raw`](Self::into_raw) of this process, and has not been made a hold since.
    pub unsafe fn from_raw(raw: u64) -> Hold {
        Hold(Device::from_raw(raw))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.holds().release(&ROOM);
    }
}

/// A device that nobody holds, nor will while this lives; or one that is lost.
#[derive(Debug)]
pub(crate) struct Drained(Device);

impl Drop for Drained {
    fn drop(&mut self) {
        self.0.holds().end_drain();
    }
}

/// A set of slots without those whose devices are lost.
pub(crate) fn without_lost(set: u64) -> u64 {
    let lost = |slot: &u32| HOLDS[*slot as usize].has_lost();
    (0..u64::BITS).filter(|slot| set >> slot & 1 == 1 && lost(slot)).fold(set, |set, slot| set & !(1 << slot))
}
