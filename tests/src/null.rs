//! A registrar that registers nothing, for what lies above the device: its cost, and heaps larger than the machine.

use rdmalloc_arenas::{Access, Keys, Registered, Registrar};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Hands out increasing keys and pins nothing, so nothing is faulted in for it either. Each value is a device of its own,
/// unless it was made by [`Null::of`].
#[derive(Debug, Default)]
pub struct Null {
    next: AtomicU32,
    identity: Option<NonZeroUsize>,
}

impl Null {
    /// A handle of the device of this number.
    #[must_use]
    pub fn of(device: NonZeroUsize) -> Null {
        Null { identity: Some(device), ..Null::default() }
    }
}

// SAFETY: there is no device, so nothing ever reaches the memory.
unsafe impl Registrar for Null {
    unsafe fn register(&self, _memory: Range<usize>, _access: Access) -> io::Result<Registered> {
        let key = self.next.fetch_add(1, Relaxed) + 1;
        Ok(Registered { keys: Keys { lkey: key, rkey: key }, handle: key.into() })
    }

    fn deregister(&self, _registered: Registered, _memory: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.identity
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn pins_pages(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "null"
    }
}
