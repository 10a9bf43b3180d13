//! Why memory is not registered: told as an error when it happens, and kept as one word for those who ask later. Uses `os` for
//! the memlock figures and `held` for budgets.

use crate::error::NotRegistered;
use crate::held::{Budget, Over};
use crate::os::Memlock;
use core::fmt;
use std::io;

/// Why a registration was not made.
#[derive(Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// The device was called, and said no.
    Device(io::Error),
    /// It would exceed the heap's budget in bytes. The device was not called.
    OverBudget {
        /// The budget, in bytes.
        limit: u64,
        /// Bytes that the heap has registered, summed over its devices.
        registered: u64,
    },
    /// It would exceed the heap's budget in registrations. The device was not called.
    TooManyRegistrations {
        /// The budget, in registrations.
        limit: u64,
        /// Registrations that the heap has, summed over its devices.
        registered: u64,
    },
    /// It would exceed what the device registers at once. The device was not called.
    DeviceFull {
        /// How many registrations the device takes.
        limit: u64,
        /// How many this process has made on it.
        registered: u64,
    },
    /// It would exceed the memlock limit. The device was not called.
    OverMemlock {
        /// `RLIMIT_MEMLOCK`, in bytes.
        limit: u64,
        /// Bytes that are pinned.
        pinned: u64,
    },
    /// It would pin more memory than the machine, or the container, has to give: the kernel would end some process for it. The
    /// device was not called.
    OutOfMemory {
        /// Bytes that were to be pinned.
        wanted: u64,
        /// Bytes that are available.
        available: u64,
    },
}

/// The kinds, as they are counted and kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Device = 0,
    Budget = 1,
    Registrations = 2,
    Full = 3,
    Memlock = 4,
    Memory = 5,
}

/// How many kinds there are.
pub(crate) const KINDS: usize = 6;

impl Refusal {
    /// By a heap's budget.
    pub(crate) fn by_budget(over: Over, budget: Budget) -> Refusal {
        match over {
            Over::Bytes { registered } => Refusal::OverBudget { limit: budget.bytes, registered },
            Over::Registrations { registered } => {
                Refusal::TooManyRegistrations { limit: budget.registrations, registered }
            }
        }
    }

    /// By the memlock limit, if it does not allow so many bytes more.
    pub(crate) fn by_memlock(memlock: Memlock, wanted: u64) -> Option<Refusal> {
        let limit = memlock.limit?;
        (memlock.allows() < wanted).then_some(Refusal::OverMemlock { limit, pinned: memlock.pinned })
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Refusal::Device(_) => Kind::Device,
            Refusal::OverBudget { .. } => Kind::Budget,
            Refusal::TooManyRegistrations { .. } => Kind::Registrations,
            Refusal::DeviceFull { .. } => Kind::Full,
            Refusal::OverMemlock { .. } => Kind::Memlock,
            Refusal::OutOfMemory { .. } => Kind::Memory,
        }
    }

    /// Whether it is a limit that says no, and not the device: it may be lifted, or the memory under it freed.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        !matches!(self, Refusal::Device(_))
    }

    /// As a word that is not 0: four bits of kind, and two numbers of 30 bits, of which bytes are in KiB.
    pub(crate) fn word(&self) -> u64 {
        let number = |number: u64| number.min(NUMBER);
        let (first, second) = match *self {
            // The code alone, in the lower bits.
            Refusal::Device(ref error) => (0, u64::from(error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs())),
            Refusal::OverBudget { limit, registered } => (limit >> 10, registered >> 10),
            Refusal::TooManyRegistrations { limit, registered } | Refusal::DeviceFull { limit, registered } => {
                (limit, registered)
            }
            Refusal::OverMemlock { limit, pinned } => (limit >> 10, pinned >> 10),
            Refusal::OutOfMemory { wanted, available } => (wanted >> 10, available >> 10),
        };
        (1 + self.kind() as u64) << 60 | number(first) << 30 | number(second)
    }
}

const NUMBER: u64 = (1 << 30) - 1;

impl NotRegistered {
    /// From a word of [`Refusal::word`].
    pub(crate) fn from_word(word: u64) -> NotRegistered {
        let (first, second) = ((word >> 30 & NUMBER) as u32, (word & NUMBER) as u32);
        match (word >> 60).wrapping_sub(1) {
            1 => NotRegistered::OverBudget { limit_kib: first, registered_kib: second },
            2 => NotRegistered::TooManyRegistrations { limit: first, registered: second },
            3 => NotRegistered::DeviceFull { limit: first, registered: second },
            4 => NotRegistered::OverMemlock { limit_kib: first, pinned_kib: second },
            5 => NotRegistered::OutOfMemory { wanted_kib: first, available_kib: second },
            _ => NotRegistered::Refused { code: second as i32 },
        }
    }
}

/// What to do about the memlock limit.
pub(crate) const RAISE_MEMLOCK: &str = "raise the limit with `ulimit -l`, LimitMEMLOCK= in a systemd unit, \
    `--ulimit memlock=-1` in docker, or /etc/security/limits.conf";

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Device(error) => error.fmt(f),
            Refusal::OverBudget { limit, registered } => write!(
                f,
                "the heap's budget is {} KiB, of which {} KiB are registered; raise it with set_budget, or free memory and trim",
                limit >> 10,
                registered >> 10
            ),
            Refusal::TooManyRegistrations { limit, registered } => write!(
                f,
                "the heap's budget is {limit} registration(s), of which {registered} are made; raise it with set_budget, or free \
                 memory and trim"
            ),
            Refusal::DeviceFull { limit, registered } => write!(
                f,
                "the device takes {limit} registration(s), and {registered} are made; free memory and trim, or use larger arenas"
            ),
            Refusal::OverMemlock { .. } => f.write_str("the memlock limit does not allow it"),
            Refusal::OutOfMemory { available, .. } => write!(
                f,
                "all of it would be pinned, and {} KiB of memory are available; ask for less, or free memory and trim",
                available >> 10
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_survives_its_word_with_its_numbers() {
        let os = |code| Refusal::Device(io::Error::from_raw_os_error(code));
        for (refusal, reason) in [
            (os(libc::ENOMEM), NotRegistered::Refused { code: libc::ENOMEM }),
            (Refusal::Device(io::Error::other("no code")), NotRegistered::Refused { code: libc::EIO }),
            (
                Refusal::OverBudget { limit: 8 << 20, registered: 6 << 20 },
                NotRegistered::OverBudget { limit_kib: 8 << 10, registered_kib: 6 << 10 },
            ),
            (
                Refusal::TooManyRegistrations { limit: 3, registered: 0 },
                NotRegistered::TooManyRegistrations { limit: 3, registered: 0 },
            ),
            (
                Refusal::DeviceFull { limit: u64::MAX, registered: 7 },
                NotRegistered::DeviceFull { limit: NUMBER as u32, registered: 7 },
            ),
            (
                Refusal::OverMemlock { limit: 64 << 10, pinned: 0 },
                NotRegistered::OverMemlock { limit_kib: 64, pinned_kib: 0 },
            ),
            (
                Refusal::OutOfMemory { wanted: 8 << 30, available: 3 << 30 },
                NotRegistered::OutOfMemory { wanted_kib: 8 << 20, available_kib: 3 << 20 },
            ),
        ] {
            assert_ne!(refusal.word(), 0);
            assert_eq!(NotRegistered::from_word(refusal.word()), reason);
        }
    }
}
