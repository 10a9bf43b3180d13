//! Devices of a sequence: [`Ledger`]s that keep books, of several kinds.

use super::operation::DeviceKind;
use rdmalloc::{Access, Device, Hold, Limits, Memlock, Registered, Registrar};
use rdmalloc_tests::Ledger;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;

/// How long a registration of a short device is at most, in bytes.
pub const SHORT: u64 = 2 << 20;
/// How many registrations a device takes that takes few.
pub const FEW: usize = 3;
/// How much may be pinned on a limited device, in bytes.
pub const LIMITED: usize = 24 << 20;

/// A device that is attached, and what the sequence has of it.
pub struct Attached {
    /// The device.
    pub device: Device,
    /// Its books.
    pub ledger: Ledger,
    /// What it is like.
    pub kind: DeviceKind,
    /// Whether it refuses, or will.
    pub refuses: bool,
    /// Kept to keep it attached.
    pub hold: Option<Hold>,
}

impl Attached {
    /// Whether there may be memory that it has not registered.
    pub fn is_excused(&self) -> bool {
        self.refuses || matches!(self.kind, DeviceKind::Few | DeviceKind::Limited)
    }
}

/// The registrar of one.
pub struct Books(pub Ledger, DeviceKind);

impl Books {
    /// Empty books.
    pub fn new(kind: DeviceKind) -> Books {
        let ledger = match kind {
            DeviceKind::Short => Ledger::with_max_len(SHORT),
            DeviceKind::Few => Ledger::with_max_registrations(FEW as u64),
            _ => Ledger::new(),
        };
        if kind == DeviceKind::Limited {
            ledger.set_memlock(Some(LIMITED as u64));
        }
        Books(ledger, kind)
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Books {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        // SAFETY: the caller's promise; the ledger does nothing with the memory.
        unsafe { self.0.register(memory, access) }
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.0.deregister(registered, memory)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.0.identity()
    }

    fn memlock(&self) -> Option<Memlock> {
        self.0.memlock()
    }

    fn is_memlocked(&self) -> bool {
        self.0.is_memlocked()
    }

    fn pins_pages(&self) -> bool {
        matches!(self.1, DeviceKind::Pins | DeviceKind::Limited)
    }

    fn name(&self) -> &str {
        "books"
    }
}
