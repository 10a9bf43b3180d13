//! A registration cache: buffers are registered when they are first used and stay registered afterwards.
//!
//! In the shape that communication libraries give it: an ordered map of registered intervals under a read-write lock, a
//! use count for each, the least recently used given up when there are too many. What they need besides, and what is
//! not measured here, is to hear of every unmapping of a cached address ([`Cache::forget`] is what their hooks call).

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use rdmalloc_arenas::{Access, Keys, Registered, Registrar};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, RwLock};

/// The grain of registrations: pages of 4 KiB.
const PAGE: usize = 4096;

/// Registered intervals of the program's memory, none overlapping another.
pub struct Cache<R: Registrar> {
    registrar: Arc<R>,
    most: usize,
    /// By start address.
    intervals: RwLock<BTreeMap<usize, Arc<Interval<R>>>>,
    /// Counts uses, and so orders them.
    clock: AtomicU64,
}

/// A registered interval. It is in use while there is a reference to it besides the cache's, and is deregistered with the
/// last one.
pub struct Interval<R: Registrar> {
    registrar: Arc<R>,
    memory: Range<usize>,
    registered: Registered,
    used: AtomicU64,
}

impl<R: Registrar> Cache<R> {
    /// A cache that keeps at most `most` intervals that are not in use.
    pub fn new(registrar: R, most: usize) -> Cache<R> {
        Cache { registrar: Arc::new(registrar), most, intervals: RwLock::default(), clock: AtomicU64::new(0) }
    }

    /// The interval in which all of `memory` lies, if there is one.
    pub fn find(&self, memory: &Range<usize>) -> Option<Arc<Interval<R>>> {
        let intervals = self.intervals.read().expect("not poisoned");
        let (_, interval) = intervals.range(..=memory.start).next_back()?;
        (memory.end <= interval.memory.end).then(|| {
            interval.used.store(self.clock.fetch_add(1, Relaxed), Relaxed);
            Arc::clone(interval)
        })
    }

    /// The interval in which all of `memory` lies, registered now if there is none.
    ///
    /// # Errors
    ///
    /// The registrar's.
    pub fn get(&self, memory: &Range<usize>) -> io::Result<Arc<Interval<R>>> {
        if let Some(interval) = self.find(memory) {
            return Ok(interval);
        }
        let mut intervals = self.intervals.write().expect("not poisoned");
        // One registration takes the place of all that it overlaps; those are deregistered as their last use ends.
        let mut whole = memory.start / PAGE * PAGE..memory.end.next_multiple_of(PAGE);
        while let Some((&start, old)) = intervals.range(..whole.end).next_back()
            && old.memory.end > whole.start
        {
            whole = whole.start.min(start)..whole.end.max(old.memory.end);
            intervals.remove(&start);
        }
        while intervals.len() >= self.most {
            let idle = intervals.iter().filter(|(_, interval)| Arc::strong_count(interval) == 1);
            let Some((&start, _)) = idle.min_by_key(|(_, interval)| interval.used.load(Relaxed)) else { break };
            intervals.remove(&start);
        }
        let interval = Arc::new(Interval {
            registrar: Arc::clone(&self.registrar),
            // SAFETY: memory of a caller who forgets it here before it is unmapped: the promise of every such cache.
            registered: unsafe { self.registrar.register(whole.clone(), Access::LOCAL_WRITE) }?,
            memory: whole.clone(),
            used: AtomicU64::new(self.clock.fetch_add(1, Relaxed)),
        });
        intervals.insert(whole.start, Arc::clone(&interval));
        Ok(interval)
    }

    /// Forgets every interval that touches `memory`, which is about to be unmapped.
    pub fn forget(&self, memory: &Range<usize>) {
        let mut intervals = self.intervals.write().expect("not poisoned");
        while let Some((&start, old)) = intervals.range(..memory.end).next_back()
            && old.memory.end > memory.start
        {
            intervals.remove(&start);
        }
    }
}

impl<R: Registrar> Interval<R> {
    /// The keys of the interval.
    pub fn keys(&self) -> Keys {
        self.registered.keys
    }
}

impl<R: Registrar> Drop for Interval<R> {
    fn drop(&mut self) {
        self.registrar.deregister(self.registered, self.memory.clone()).expect("deregistered");
    }
}

#[cfg(test)]
mod tests {
    use super::Cache;
    use rdmalloc_tests::Null;
    use std::sync::Arc;

    #[test]
    fn hits_misses_and_overlaps() {
        let cache = Cache::new(Null::default(), 3);
        let first = cache.get(&(0x10_100..0x11_000)).unwrap();
        assert!(Arc::ptr_eq(&first, &cache.get(&(0x10_000..0x10_fff)).unwrap()), "its whole pages");
        assert!(cache.find(&(0xf_000..0x10_001)).is_none());
        assert!(cache.find(&(0x10_fff..0x11_001)).is_none());
        let wider = cache.get(&(0x10_f00..0x12_000)).unwrap();
        assert_ne!(wider.keys(), first.keys());
        assert_eq!(cache.find(&(0x10_000..0x12_000)).unwrap().keys(), wider.keys(), "took the first one's place");
        cache.forget(&(0x11_fff..0x20_000));
        assert!(cache.find(&(0x10_000..0x10_001)).is_none());
    }

    #[test]
    fn the_least_recently_used_goes_unless_in_use() {
        let cache = Cache::new(Null::default(), 2);
        let page = |i: usize| i * 0x1000..i * 0x1000 + 0x1000;
        let held = cache.get(&page(1)).unwrap();
        cache.get(&page(2)).unwrap();
        cache.get(&page(3)).unwrap();
        assert!(cache.find(&page(2)).is_none());
        assert_eq!(cache.find(&page(1)).unwrap().keys(), held.keys());
        assert!(cache.find(&page(3)).is_some());
    }
}
