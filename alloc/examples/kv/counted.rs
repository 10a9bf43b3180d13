//! A registrar around a registrar that counts: how the demo knows what each way costs.

use rdmalloc::Access;
use rdmalloc_arenas::{Limits, Memlock, Registered, Registrar};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What heaps register: their arenas.
pub static BY_HEAPS: Counter = Counter::new();
/// What messages register, where they have to do it themselves.
pub static BY_MESSAGES: Counter = Counter::new();

/// Registrations of this process since its start.
pub struct Counter {
    registered: AtomicU64,
    ended: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Counter {
    const fn new() -> Counter {
        Counter { registered: AtomicU64::new(0), ended: AtomicU64::new(0), nanoseconds: AtomicU64::new(0) }
    }

    /// How many were made.
    pub fn registered(&self) -> u64 {
        self.registered.load(Relaxed)
    }

    /// How many of them have ended.
    pub fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// How long making and ending them took.
    pub fn time(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Relaxed))
    }

    /// Counts a call that succeeds.
    fn count<T>(&self, what: &AtomicU64, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let started = Instant::now();
        let result = call()?;
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        what.fetch_add(1, Relaxed);
        Ok(result)
    }
}

/// Passes everything on, and counts.
#[derive(Clone)]
pub struct Counted {
    pub inner: Arc<dyn Registrar>,
    pub counter: &'static Counter,
}

// SAFETY: every promise is that of the inner registrar, to which everything is passed unchanged.
unsafe impl Registrar for Counted {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        // SAFETY: the caller's duty is the same.
        self.counter.count(&self.counter.registered, || unsafe { self.inner.register(memory, access) })
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.counter.count(&self.counter.ended, || self.inner.deregister(registered, memory))
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.inner.identity()
    }

    fn memlock(&self) -> Option<Memlock> {
        self.inner.memlock()
    }

    fn is_memlocked(&self) -> bool {
        self.inner.is_memlocked()
    }

    fn hides_memory_from_children(&self) -> bool {
        self.inner.hides_memory_from_children()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }
}
