//! What can go wrong, with what was wanted, what the limit is, and what to do. Uses `os` for the memlock figures.

use crate::access::Access;
use crate::flight::Flights;
use crate::os::Memlock;
use crate::pinning::NoOnDemand;
use crate::refusal::{RAISE_MEMLOCK, Refusal};
use core::fmt;
use std::io;
use std::time::Duration;

/// Memory was not registered: a device refused it, or a limit does not allow it.
#[derive(Debug)]
#[non_exhaustive]
pub struct RegisterError {
    /// The device's name.
    pub device: String,
    /// The bytes that were to be registered.
    pub wanted: usize,
    /// How many devices this heap registers its memory with, this one counted; each pins it again.
    pub devices: usize,
    /// What may be pinned, and what is. `None` for a device that does not count against it.
    pub memlock: Option<Memlock>,
    /// Which limit it is, or what the device said.
    pub reason: Refusal,
}

impl RegisterError {
    /// Whether the memlock limit is the reason.
    #[must_use]
    pub fn is_memlock(&self) -> bool {
        let full = || self.memlock.is_some_and(|memlock| memlock.allows() < self.wanted as u64);
        match &self.reason {
            Refusal::OverMemlock { .. } => true,
            Refusal::Device(error) => {
                matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)) && full()
            }
            _ => false,
        }
    }
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, wanted, devices, reason, .. } = self;
        write!(f, "{} KiB are not registered with {device} (heap with {devices} device(s)): {reason}", wanted >> 10)?;
        let of_memory = match reason {
            Refusal::OverMemlock { .. } => true,
            Refusal::Device(error) => error.raw_os_error() == Some(libc::ENOMEM),
            _ => false,
        };
        if let Some(memlock) = self.memlock.filter(|_| of_memory) {
            write!(f, "; {memlock}")?;
        }
        if self.is_memlock() {
            write!(f, "; {RAISE_MEMLOCK}")?;
        } else if of_memory && self.memlock.is_some_and(|memlock| memlock.limit.is_some()) {
            write!(
                f,
                "; it may be this limit after all, since io_uring counts all processes of a user: {RAISE_MEMLOCK}"
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for RegisterError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.reason {
            Refusal::Device(error) => Some(error),
            _ => None,
        }
    }
}

/// Why a device could not be attached. Nothing has changed then.
#[derive(Debug)]
#[non_exhaustive]
pub enum AttachError {
    /// The heap has this device (the same protection domain) already.
    AlreadyAttached {
        /// Its name.
        device: String,
    },
    /// The device, the same protection domain, is lost, on another heap or from the beginning.
    Lost {
        /// Its name.
        device: String,
    },
    /// The process has as many devices attached as it can have. One that was lost counts as long as it is held.
    TooManyDevices {
        /// [`MAX_DEVICES`](crate::MAX_DEVICES).
        limit: usize,
    },
    /// The device cannot register even the smallest arena.
    LengthLimit {
        /// Its name.
        device: String,
        /// The longest registration it takes, in bytes.
        max_len: u64,
        /// The shortest that is of use, in bytes.
        wanted: u64,
    },
    /// The device has no such access to give ([`Registrar::supports`](crate::Registrar::supports)): an io_uring has no peers, some
    /// adapters have no memory windows.
    Access {
        /// Its name.
        device: String,
        /// What the heap was made with.
        access: Access,
    },
    /// Memory that the heap has open already was not registered: not all of it where the heap requires that, or none.
    Register(RegisterError),
    /// The heap shall register on demand ([`Pinning::OnDemand`](crate::Pinning::OnDemand)), and the device cannot.
    OnDemand {
        /// Its name.
        device: String,
        /// Why.
        why: NoOnDemand,
    },
    /// The device's library hides registered memory from children of fork (`MADV_DONTFORK`); a child would lose its heap.
    HidesMemoryFromChildren {
        /// Its name.
        device: String,
    },
    /// This process is a child of the one that owns the heap, made without calling what `pthread_atfork` has installed (`clone`).
    ForkedChild,
    /// This process is a child of fork, and the heap's memory is not in children.
    NotInChild,
    /// There is no address space or memory for the tables.
    NoMemory(io::Error),
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyAttached { device } => write!(
                f,
                "{device} is attached to this heap already (the same protection domain, or ring); use the Device that attach returned"
            ),
            Self::Lost { device } => {
                write!(f, "{device} is lost; open it anew when it is back, and attach what was opened")
            }
            Self::TooManyDevices { limit } => {
                write!(f, "{limit} devices are attached already, which is the limit of a process; detach one first")
            }
            Self::LengthLimit { device, max_len, wanted } => {
                write!(f, "{device} registers at most {max_len} bytes at once, but an arena has at least {wanted}")
            }
            Self::Access { device, access } => write!(
                f,
                "{device} cannot register memory with {access:?}, which the heap was made for (an io_uring has no peers, some adapters \
                 have no memory windows); use another device, or make a heap with less"
            ),
            Self::Register(error) => error.fmt(f),
            Self::OnDemand { device, why } => {
                write!(
                    f,
                    "{device} does not register the heap's memory on demand: {why}; attach it under Pinning::Auto or Pinned"
                )
            }
            Self::HidesMemoryFromChildren { device } => write!(
                f,
                "{device}'s library was told to hide registered memory from forked children (ibv_fork_init), which would take the \
                 whole heap from them; unset RDMAV_FORK_SAFE and IBV_FORK_SAFE and do not call ibv_fork_init: Linux 5.12 and later \
                 need neither"
            ),
            Self::ForkedChild => f.write_str(
                "a child made by clone cannot attach devices to its parent's heap; call exec first, or use fork",
            ),
            Self::NotInChild => f.write_str(NOT_IN_CHILD),
            Self::NoMemory(error) => write!(f, "no memory for the tables of a device: {error}"),
        }
    }
}

impl std::error::Error for AttachError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // It is printed already; what is beneath it, whoever wants the code can have.
            Self::Register(error) => error.source(),
            Self::NoMemory(error) => Some(error),
            _ => None,
        }
    }
}

/// Why a device could not be detached as wanted.
#[derive(Debug)]
#[non_exhaustive]
pub enum DetachError {
    /// The device is not attached to this heap, or not any more.
    NotAttached,
    /// The device is in use, and stays attached. What is under way may still end: try again, with more time.
    InUse {
        /// How many holds there are: work requests under way, and memory windows. They are the device's, whichever heap's
        /// memory they are about.
        holds: usize,
        /// How long the detach has waited for them.
        waited: Duration,
        /// How many of them are flights ([`Device::flights`](crate::Device::flights)).
        flights: Flights,
    },
    /// The device is detached, but would not end some registrations. Their memory is kept mapped for ever, since the device
    /// may still write to it; so is the registrar.
    Kept {
        /// How many arenas it is.
        arenas: usize,
        /// Their bytes.
        bytes: usize,
        /// What the device said of the last one.
        source: io::Error,
    },
}

impl fmt::Display for DetachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAttached => f.write_str("the device is not attached to this heap"),
            Self::InUse { holds, waited, flights: Flights { under_way, leaked } } => write!(
                f,
                "the device stays attached: after {} ms it has {holds} hold(s), of all heaps: {under_way} flight(s) under \
                 way, {leaked} leaked, {} for pools, windows and what else holds. Complete flights; once their queue pairs are \
                 destroyed, device.reclaim_flights(). For pools, RecvPool::close and PostedBuffers::reclaim; windows are dropped or \
                 revoked. Or say that the device is lost (mark_lost)",
                waited.as_millis(),
                holds.saturating_sub(under_way + leaked)
            ),
            Self::Kept { arenas, bytes, source } => write!(
                f,
                "the device would not let go of {arenas} arena(s), {} KiB, which stay mapped: {source}",
                bytes >> 10
            ),
        }
    }
}

impl std::error::Error for DetachError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Kept { source, .. } => Some(source),
            Self::NotAttached | Self::InUse { .. } => None,
        }
    }
}

/// Why there is no memory to be had.
#[derive(Debug)]
#[non_exhaustive]
pub enum TakeError {
    /// The address space that was reserved has no such run left.
    AddressSpace {
        /// Bytes wanted.
        wanted: usize,
        /// Bytes in the region.
        region: usize,
    },
    /// There is no memory like that, on any machine: the alignment is no power of two, or the bytes, rounded up to it, are more
    /// than `isize::MAX`.
    NotALayout {
        /// Bytes wanted.
        wanted: usize,
        /// Alignment wanted, in bytes.
        align: usize,
    },
    /// The operating system has no memory (address space, commit charge).
    NoMemory {
        /// Bytes wanted.
        wanted: usize,
        /// What it said.
        source: io::Error,
    },
    /// The new arena was not registered with a device, and the heap only serves registered memory.
    Register(RegisterError),
    /// This process is a child of fork, and the heap's memory is not in children.
    NotInChild,
}

const NOT_IN_CHILD: &str = "the heap was made to be left out of children of fork, of which this process is one; make a heap here, or \
                            make that one with `serves_children(true)`, which lets fork copy it";

/// In which unit to print sizes that are compared, by the smaller of them: as what shift, and how it is called.
fn unit_of(bytes: usize) -> (u32, &'static str) {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    units.into_iter().find(|(shift, _)| bytes >> shift > 0).unwrap_or((10, "KiB"))
}

impl fmt::Display for TakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressSpace { wanted, region } => {
                let (shift, unit) = unit_of(*wanted.min(region));
                write!(
                    f,
                    "no free run of {} {unit} in the region of {} {unit}; it is reserved at the first use and is smaller where \
                     `ulimit -v` is set",
                    wanted.div_ceil(1 << shift),
                    region >> shift
                )
            }
            Self::NotALayout { align, .. } if !align.is_power_of_two() => {
                write!(f, "an alignment of {align} bytes: it must be a power of two, 4096 for direct I/O, say")
            }
            Self::NotALayout { wanted, align } => write!(
                f,
                "{wanted} bytes at a multiple of {align}: rounded up to that, they must not be more than {}",
                isize::MAX
            ),
            Self::NoMemory { wanted, source } => write!(f, "no memory for an arena of {} KiB: {source}", wanted >> 10),
            Self::NotInChild => f.write_str(NOT_IN_CHILD),
            Self::Register(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TakeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::AddressSpace { .. } | Self::NotALayout { .. } | Self::NotInChild => None,
            Self::NoMemory { source, .. } => Some(source),
            // It is printed already.
            Self::Register(error) => error.source(),
        }
    }
}

/// Why a device has no keys for an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KeyError {
    /// The device has been detached.
    Detached,
    /// The device is lost ([`Device::mark_lost`](crate::Device::mark_lost)): it was removed, or has failed.
    Lost,
    /// The address is not in any arena: memory of another allocator, a stack, a static, or memory given back long ago.
    Foreign,
    /// The address lies in an arena that the device has not registered.
    NotRegistered(NotRegistered),
}

/// Why a device has not registered an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotRegistered {
    /// The arena belongs to the global heap ([`Config::GLOBAL_TAG`](crate::Config::GLOBAL_TAG)), to which the device is not attached.
    GlobalHeap,
    /// The arena belongs to another heap, to which the device is not attached (or it was taken while a device was being called).
    OtherHeap,
    /// The device refused the arena when it was opened.
    Refused {
        /// The operating system's error number; 12 (`ENOMEM`) is mostly the memlock limit.
        code: i32,
    },
    /// It would have exceeded the heap's budget in bytes.
    OverBudget {
        /// The budget, in KiB; 2^30 - 1 stands for more.
        limit_kib: u32,
        /// What the heap had registered then, summed over its devices, in KiB.
        registered_kib: u32,
    },
    /// It would have exceeded the heap's budget in registrations.
    TooManyRegistrations {
        /// The budget; 2^30 - 1 stands for more.
        limit: u32,
        /// The registrations that the heap had then, summed over its devices.
        registered: u32,
    },
    /// The device takes no more registrations.
    DeviceFull {
        /// How many it takes; 2^30 - 1 stands for more.
        limit: u32,
        /// How many this process had made on it then.
        registered: u32,
    },
    /// It would have exceeded the memlock limit.
    OverMemlock {
        /// `RLIMIT_MEMLOCK`, in KiB; 2^30 - 1 stands for more.
        limit_kib: u32,
        /// What was pinned then, in KiB.
        pinned_kib: u32,
    },
    /// It would have pinned more memory than there was.
    OutOfMemory {
        /// What was to be pinned, in KiB; 2^30 - 1 stands for more.
        wanted_kib: u32,
        /// What was available then, in KiB.
        available_kib: u32,
    },
    /// The arena is being closed: nothing that is alive lies in it.
    Closed,
    /// This process is a child of fork, and the registrations are its parent's.
    ForkedChild,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Detached => f.write_str("the device has been detached"),
            Self::Lost => f.write_str("the device is lost; detach it, and attach it anew when it is back"),
            Self::Foreign => f.write_str(
                "the memory is not rdmalloc's: only blocks of its heaps are registered; copy it to a Vec or Buffer, or send it by \
                 Gathering",
            ),
            Self::NotRegistered(reason) => reason.fmt(f),
        }
    }
}

impl fmt::Display for NotRegistered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GlobalHeap => f.write_str(
                "the memory belongs to the global heap, to which the device is not attached: attach it there too",
            ),
            Self::OtherHeap => f.write_str(
                "the memory belongs to a heap of the program's, to which the device is not attached: call that heap's attach",
            ),
            Self::Refused { code } => {
                write!(f, "the device refused to register the arena: {}", io::Error::from_raw_os_error(*code))?;
                if *code == libc::ENOMEM {
                    write!(f, "; mostly the memlock limit: {RAISE_MEMLOCK}")?;
                }
                Ok(())
            }
            Self::OverBudget { limit_kib, registered_kib } => write!(
                f,
                "the heap's budget of {limit_kib} KiB, of which {registered_kib} KiB were registered, left no room for the arena; \
                 raise it with set_budget"
            ),
            Self::TooManyRegistrations { limit, registered } => write!(
                f,
                "the heap's budget of {limit} registration(s), of which {registered} were made, left no room for the arena; raise \
                 it with set_budget"
            ),
            Self::DeviceFull { limit, registered } => {
                write!(f, "the device takes {limit} registration(s), and {registered} were made")
            }
            Self::OverMemlock { limit_kib, pinned_kib } => write!(
                f,
                "the memlock limit of {limit_kib} KiB, of which {pinned_kib} KiB were pinned, left no room for the arena; \
                 {RAISE_MEMLOCK}"
            ),
            Self::OutOfMemory { wanted_kib, available_kib } => write!(
                f,
                "the arena's {wanted_kib} KiB would have been pinned, and {available_kib} KiB of memory were available"
            ),
            Self::Closed => f.write_str("the arena is being closed: the block is freed"),
            Self::ForkedChild => {
                f.write_str("this process is a child of fork, and its parent's registrations are not its own")
            }
        }
    }
}

impl std::error::Error for KeyError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_are_compared_are_in_one_unit() {
        let text = |wanted, region| TakeError::AddressSpace { wanted, region }.to_string();
        assert!(text(64 << 40, 16 << 40).contains("run of 64 TiB in the region of 16 TiB;"));
        assert!(text((64 << 40) + 1, 16 << 40).contains("run of 65 TiB in the region of 16 TiB;"));
        assert!(text(4 << 20, 3 << 30).contains("run of 4 MiB in the region of 3072 MiB;"));
        assert!(text(5000, 1 << 20).contains("run of 5 KiB in the region of 1024 KiB;"));
        assert!(text(usize::MAX, 0).contains("in the region of 0 KiB;"));
    }
}
