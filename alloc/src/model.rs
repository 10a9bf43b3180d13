//! loom's 64-bit atomic behind the crate's own face, for the models of this crate.

use core::sync::atomic::Ordering;
use loom::sync::atomic::AtomicU64;
use rdmalloc_arenas::sync::Atomic64;

/// A newtype, since neither the trait nor the atomic is this crate's.
pub(crate) struct Loom(AtomicU64);

impl Loom {
    pub(crate) fn new(value: u64) -> Loom {
        Loom(AtomicU64::new(value))
    }
}

impl Atomic64 for Loom {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
    fn compare_exchange_weak(&self, old: u64, new: u64, yes: Ordering, no: Ordering) -> Result<u64, u64> {
        self.0.compare_exchange_weak(old, new, yes, no)
    }
    fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
        self.0.fetch_add(more, order)
    }
    fn fetch_sub(&self, less: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(less, order)
    }
}
