//! What a heap counts: atomics that are written where it happens, and read at any time. Uses `held`, `refusal` and
//! `flight`.

use super::Arenas;
use crate::Device;
use crate::device::MAX_DEVICES;
use crate::error::TakeError;
use crate::flight::Flights;
use crate::held::Held;
use crate::name::Name;
use crate::refusal::{KINDS, Refusal};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::time::Instant;

/// How long something took, over all the times that it was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Times {
    /// How often.
    pub count: u64,
    /// All times together.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Times {
    /// The mean; zero if it was never done.
    #[must_use]
    pub fn mean(&self) -> Duration {
        self.total.checked_div(u32::try_from(self.count).unwrap_or(u32::MAX)).unwrap_or_default()
    }
}

/// How often memory was not registered, by the reason: see [`Refusal`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Refusals {
    /// The device was called and said no.
    pub by_device: u64,
    /// The heap's budget in bytes.
    pub over_budget: u64,
    /// The heap's budget in registrations.
    pub too_many_registrations: u64,
    /// The device's number of registrations.
    pub device_full: u64,
    /// The memlock limit.
    pub over_memlock: u64,
    /// The memory that there was.
    pub out_of_memory: u64,
}

/// How often something else failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Failures {
    /// An arena was not opened for want of address space.
    pub address_space: u64,
    /// An arena was not opened for want of memory.
    pub no_memory: u64,
    /// An arena was not opened since a device did not register it ([`Policy::Require`](crate::Policy)).
    pub not_registered: u64,
    /// A device did not end a registration; its memory is kept for ever.
    pub deregistrations: u64,
}

/// Figures of one device on one heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceStats {
    /// The device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub device: Device,
    /// What its registrar calls itself.
    pub name: Name,
    /// Registrations there are.
    pub registrations: u64,
    /// Their bytes.
    pub registered_bytes: u64,
    /// Registrations made since it was attached, and how long the calls took.
    pub registering: Times,
    /// Registrations ended since it was attached, and how long the calls took.
    pub deregistering: Times,
    /// How often it, or a limit, refused an arena since it was attached.
    pub refusals: u64,
    /// How often it did not end a registration since it was attached.
    pub failures: u64,
    /// How often it is held ([`Device::hold`]), on whichever heap's memory: flights, and what else uses it.
    pub holds: usize,
    /// Its flights, on whichever heap's memory.
    pub flights: Flights,
}

/// Counts times.
#[derive(Debug)]
pub(super) struct Timer {
    count: AtomicU64,
    total: AtomicU64,
    longest: AtomicU64,
}

impl Timer {
    const fn new() -> Timer {
        Timer { count: AtomicU64::new(0), total: AtomicU64::new(0), longest: AtomicU64::new(0) }
    }

    /// Counts what began then and has ended now.
    pub(super) fn since(&self, begin: Instant) {
        let time = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.count.fetch_add(1, Relaxed);
        self.total.fetch_add(time, Relaxed);
        self.longest.fetch_max(time, Relaxed);
    }

    fn reset(&self) {
        [&self.count, &self.total, &self.longest].iter().for_each(|word| word.store(0, Relaxed));
    }

    pub(super) fn times(&self) -> Times {
        Times {
            count: self.count.load(Relaxed),
            total: Duration::from_nanos(self.total.load(Relaxed)),
            longest: Duration::from_nanos(self.longest.load(Relaxed)),
        }
    }
}

/// What is counted for a device of a heap, by the device's slot.
#[derive(Debug)]
pub(super) struct DeviceCounts {
    pub(super) held: Held,
    pub(super) registering: Timer,
    pub(super) deregistering: Timer,
    pub(super) refusals: AtomicU64,
    pub(super) failures: AtomicU64,
}

impl DeviceCounts {
    const fn new() -> DeviceCounts {
        DeviceCounts {
            held: Held::new(),
            registering: Timer::new(),
            deregistering: Timer::new(),
            refusals: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// A device comes into the slot.
    pub(super) fn reset(&self) {
        self.held.reset();
        self.registering.reset();
        self.deregistering.reset();
        self.refusals.store(0, Relaxed);
        self.failures.store(0, Relaxed);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) registrations: AtomicU64,
    pub(super) deregistrations: AtomicU64,
    pub(super) purged: AtomicU64,
    pub(super) opening: Timer,
    pub(super) closing: Timer,
    pub(super) opening_now: AtomicU64,
    pub(super) closing_now: AtomicU64,
    refusals: [AtomicU64; KINDS],
    address_space: AtomicU64,
    no_memory: AtomicU64,
    not_registered: AtomicU64,
    deregister_failures: AtomicU64,
    devices: [DeviceCounts; MAX_DEVICES],
}

impl Counts {
    pub(super) const fn new() -> Counts {
        Counts {
            registrations: AtomicU64::new(0),
            deregistrations: AtomicU64::new(0),
            purged: AtomicU64::new(0),
            opening: Timer::new(),
            closing: Timer::new(),
            opening_now: AtomicU64::new(0),
            closing_now: AtomicU64::new(0),
            refusals: [const { AtomicU64::new(0) }; KINDS],
            address_space: AtomicU64::new(0),
            no_memory: AtomicU64::new(0),
            not_registered: AtomicU64::new(0),
            deregister_failures: AtomicU64::new(0),
            devices: [const { DeviceCounts::new() }; MAX_DEVICES],
        }
    }

    /// What is counted for a device.
    pub(super) fn of(&self, device: Device) -> &DeviceCounts {
        &self.devices[device.slot()]
    }

    /// Counts a registration that was not made.
    pub(super) fn refused(&self, device: Device, reason: &Refusal) {
        self.refusals[reason.kind() as usize].fetch_add(1, Relaxed);
        self.of(device).refusals.fetch_add(1, Relaxed);
    }

    /// Counts a registration that a device did not end.
    pub(super) fn not_ended(&self, device: Device) {
        self.deregister_failures.fetch_add(1, Relaxed);
        self.of(device).failures.fetch_add(1, Relaxed);
    }

    /// Counts an arena that was wanted and not opened.
    pub(super) fn not_opened(&self, error: &TakeError) {
        let count = match error {
            TakeError::AddressSpace { .. } | TakeError::NotALayout { .. } => &self.address_space,
            TakeError::NoMemory { .. } => &self.no_memory,
            TakeError::Register(_) => &self.not_registered,
            TakeError::NotInChild => return,
        };
        count.fetch_add(1, Relaxed);
    }

    pub(super) fn refusals(&self) -> Refusals {
        let [by_device, over_budget, too_many_registrations, device_full, over_memlock, out_of_memory] =
            [0, 1, 2, 3, 4, 5].map(|kind| self.refusals[kind].load(Relaxed));
        Refusals { by_device, over_budget, too_many_registrations, device_full, over_memlock, out_of_memory }
    }

    pub(super) fn failures(&self) -> Failures {
        Failures {
            address_space: self.address_space.load(Relaxed),
            no_memory: self.no_memory.load(Relaxed),
            not_registered: self.not_registered.load(Relaxed),
            deregistrations: self.deregister_failures.load(Relaxed),
        }
    }
}

impl Refusals {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_device
            + self.over_budget
            + self.too_many_registrations
            + self.device_full
            + self.over_memlock
            + self.out_of_memory
    }
}

impl Arenas {
    /// Figures of each device that is attached. Takes no lock.
    #[must_use]
    pub fn device_stats(&self) -> Vec<DeviceStats> {
        let attached = self.limits.attached.load(Relaxed);
        let slots = (0..MAX_DEVICES).filter(|slot| attached & 1 << slot != 0);
        let stats = |slot| {
            let device = Device::in_slot(slot);
            let counts = self.counts.of(device);
            let held = counts.held.now();
            DeviceStats {
                device,
                name: device.name(),
                registrations: held.registrations,
                registered_bytes: held.bytes,
                registering: counts.registering.times(),
                deregistering: counts.deregistering.times(),
                refusals: counts.refusals.load(Relaxed),
                failures: counts.failures.load(Relaxed),
                holds: device.hold_count(),
                flights: device.flights(),
            }
        };
        slots.map(stats).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up() {
        let timer = Timer::new();
        assert_eq!(timer.times().mean(), Duration::ZERO);
        let begin = Instant::now();
        (0..3).for_each(|_| timer.since(begin));
        let times = timer.times();
        assert!(times.count == 3 && times.longest <= times.total && times.mean() <= times.longest);
        timer.reset();
        assert_eq!(timer.times(), Times::default());
    }
}
