//! A registrar that registers nothing, for benches of what lies above the device.

use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use rdmalloc_arenas::{Access, Keys, Registered, Registrar};
use std::io;

/// Hands out increasing keys and pins nothing. Each value is a device of its own.
#[derive(Debug, Default)]
pub struct Null {
    next: AtomicU32,
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

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "null"
    }
}
