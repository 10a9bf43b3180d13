//! A registrar around a registrar that counts: how the demo knows what each loop costs.

use rdmalloc::Access;
use rdmalloc_arenas::{Limits, Registered, Registrar};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

static REGISTERED: AtomicU64 = AtomicU64::new(0);
static DEREGISTERED: AtomicU64 = AtomicU64::new(0);
static NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// How many registrations this process has made so far, with any device.
pub fn registered() -> u64 {
    REGISTERED.load(Relaxed)
}

/// How many of them have ended.
pub fn deregistered() -> u64 {
    DEREGISTERED.load(Relaxed)
}

/// How much time all of that has taken.
pub fn time() -> Duration {
    Duration::from_nanos(NANOSECONDS.load(Relaxed))
}

fn timed<T>(call: impl FnOnce() -> io::Result<T>, count: &AtomicU64) -> io::Result<T> {
    let started = Instant::now();
    let result = call()?;
    NANOSECONDS.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
    count.fetch_add(1, Relaxed);
    Ok(result)
}

/// Passes everything on, and counts what succeeds.
#[derive(Clone)]
pub struct Counted(pub Arc<dyn Registrar>);

// SAFETY: every promise is that of the inner registrar, to which everything is passed unchanged.
unsafe impl Registrar for Counted {
    fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        timed(|| self.0.register(memory, access), &REGISTERED)
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        timed(|| self.0.deregister(registered, memory), &DEREGISTERED)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.0.identity()
    }

    fn is_memlocked(&self) -> bool {
        self.0.is_memlocked()
    }

    fn hides_memory_from_children(&self) -> bool {
        self.0.hides_memory_from_children()
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}
