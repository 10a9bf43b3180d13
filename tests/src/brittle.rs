//! A registrar whose device breaks when a test says so. Uses [`Ledger`] for its books.

use crate::Ledger;
use rdmalloc_arenas::{Access, Limits, Registered, Registrar};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A handle: clones share the device, and a test keeps one while heaps have others.
#[derive(Clone, Default)]
pub struct Brittle {
    /// What is registered.
    pub ledger: Ledger,
    state: Arc<State>,
    identity: Option<NonZeroUsize>,
}

#[derive(Default)]
struct State {
    failing: AtomicBool,
    gone: AtomicBool,
    clinging: AtomicBool,
    offered: AtomicU64,
}

impl Brittle {
    /// A whole device of its own.
    pub fn new() -> Brittle {
        Brittle::default()
    }

    /// A device that is the same for several heaps.
    pub fn of_identity(identity: usize) -> Brittle {
        Brittle { identity: NonZeroUsize::new(identity), ..Brittle::default() }
    }

    /// From now on it answers `EIO` to registrations, and says that this is for ever, or only a command that failed.
    pub fn fail(&self, for_ever: bool) {
        self.state.failing.store(true, Relaxed);
        self.state.gone.store(for_ever, Relaxed);
    }

    /// From now on it lets go of nothing: it answers `EIO` to that too.
    pub fn cling(&self) {
        self.state.clinging.store(true, Relaxed);
    }

    /// How many registrations it was asked for, granted or not.
    pub fn offered(&self) -> u64 {
        self.state.offered.load(Relaxed)
    }

    /// Whether this is the only handle: all heaps have dropped theirs.
    pub fn is_let_go(&self) -> bool {
        Arc::strong_count(&self.state) == 1
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Brittle {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        self.state.offered.fetch_add(1, Relaxed);
        if self.state.failing.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        // SAFETY: the caller's promise; the ledger does nothing with the memory.
        unsafe { self.ledger.register(memory, access) }
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        if self.state.clinging.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.ledger.deregister(registered, memory)
    }

    fn limits(&self) -> Limits {
        self.ledger.limits()
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.identity
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn is_lost(&self) -> bool {
        self.state.gone.load(Relaxed)
    }

    fn name(&self) -> &str {
        "brittle0"
    }
}
