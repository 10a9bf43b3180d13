//! Devices go: detached when nobody uses them any more, or lost underneath. The half of [`Arenas`] beside `attach`.
//!
//! A detach waits for holds without the role, since whoever has a hold may need an arena to end it.

use super::Arenas;
use super::attach::{Attached, guard};
use crate::arena::Arena;
use crate::device::Device;
use crate::error::DetachError;
use crate::hold::Busy;
use crate::os;
use crate::region::Region;
use crate::registrar::Registrar;
use core::sync::atomic::Ordering::Relaxed;
use std::io;
use std::time::{Duration, Instant};

/// How an attachment ended, and what is left to drop.
type TakenOut = (Result<(), DetachError>, Option<Box<dyn Registrar>>);

impl Attached {
    /// Whether nothing will come of the device any more.
    pub(super) fn is_lost(&self) -> bool {
        self.slotted.device.is_lost()
    }

    /// Looks, after the device has answered with an error, whether it is lost; from then on all know.
    pub(super) fn look_if_lost(&self, error: &io::Error) {
        let telling = matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV));
        if telling && guard(|| Ok(self.registrar.is_lost())).unwrap_or(false) {
            self.slotted.device.mark_lost();
        }
    }
}

impl Arenas {
    /// Detaches a device that nobody holds: [`detach_within`](Self::detach_within) no time.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn detach(&self, device: Device) -> Result<(), DetachError> {
        self.detach_within(device, Duration::ZERO)
    }

    /// Detaches a device: waits until nobody holds it ([`Device::hold`]), at most as long as said, and deregisters every
    /// arena from it. Blocks live on; the device's keys are dead.
    ///
    /// While it waits, nobody gets a hold any more, and everything else goes on. The holds of a device that is lost are not
    /// waited for. The caller sees to it that no work request that uses the keys is under way without a hold.
    ///
    /// # Errors
    ///
    /// [`DetachError::InUse`], when the time is over: nothing has changed then. [`DetachError::Kept`], when the device would
    /// not let go of arenas, now or when they were closed: these are kept for ever.
    pub fn detach_within(&self, device: Device, patience: Duration) -> Result<(), DetachError> {
        if device.is_parents() {
            // Its parent's, here it is attached to nothing.
            return Ok(());
        }
        if !self.role().attached.iter().any(|attached| attached.slotted.device == device) {
            return Err(DetachError::NotAttached);
        }
        if os::is_forked_child() {
            // Whoever held it is in the parent.
            return self.take_out_of(device);
        }
        let began = Instant::now();
        let drained = device.drain(patience).map_err(|held| match held {
            Busy::Detached => DetachError::NotAttached,
            Busy::Held(holds) => DetachError::InUse { holds, waited: began.elapsed(), flights: device.flights() },
        });
        // Until after the keys are gone.
        let _drained = drained?;
        self.take_out_of(device)
    }

    /// Detaches all devices, held or not: the end of a heap that has no arena. What is held is not this heap's then.
    pub fn detach_all(&self) {
        for (device, _) in self.devices() {
            // Without an arena nothing can be kept.
            let _ = self.take_out_of(device);
        }
    }

    fn take_out_of(&self, device: Device) -> Result<(), DetachError> {
        let region = Region::existing().ok_or(DetachError::NotAttached)?;
        let mut role = self.role();
        // Another thread may have been faster.
        let index = role.attached.iter().position(|attached| attached.slotted.device == device);
        let attached = role.attached.remove(index.ok_or(DetachError::NotAttached)?);
        self.limits.attached.fetch_and(!attached.slotted.bit(), Relaxed);
        let all: Vec<_> = self.all(&role).collect();
        let (result, registrar) = self.take_out(region, attached, &all);
        self.review();
        drop(role);
        drop(registrar);
        result
    }

    /// The end of an attachment that is out of the role's list; and its registrar, to be dropped without the role.
    pub(super) fn take_out(&self, region: &Region, attached: Attached, all: &[&'static Arena]) -> TakenOut {
        let mut last = None;
        for arena in all {
            if let Err(source) = self.unregister(region, &attached, arena) {
                last = Some(source);
            }
            attached.slotted.forgive(arena.run().start);
            self.unpin_if_nobody_pins(arena);
        }
        self.limits.pinning.fetch_and(!attached.slotted.bit(), Relaxed);
        let (arenas, bytes) = (attached.kept.load(Relaxed), attached.kept_bytes.load(Relaxed));
        let is_parents = attached.is_parents();
        let Attached { slotted, registrar, .. } = attached;
        slotted.release();
        if is_parents {
            // What it would end is the parent's.
            core::mem::forget(registrar);
            return (Ok(()), None);
        }
        if arenas == 0 {
            return (Ok(()), Some(registrar));
        }
        // It may own the protection domain, which the memory regions that are left still need.
        core::mem::forget(registrar);
        let source = last.unwrap_or_else(|| io::Error::other("it kept them when they were closed"));
        (Err(DetachError::Kept { arenas, bytes, source }), None)
    }
}
