//! A registrar without a device: it keeps books of what is registered, and fails when a test asks it to.

use rdmalloc_arenas::{Access, Keys, Limits, Memlock, Registered, Registrar};
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The books. A handle: clones share them, and a test keeps one while a heap has another.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Books>>);

#[derive(Default)]
struct Books {
    live: BTreeMap<u64, Range<usize>>,
    registrations: u64,
    refuse_after: Option<u64>,
    max_len: Option<u64>,
    max_registrations: Option<u64>,
    memlock: Option<u64>,
}

impl Ledger {
    /// Empty books.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// Empty books of a device that registers at most `max_len` bytes at once.
    pub fn with_max_len(max_len: u64) -> Ledger {
        let ledger = Ledger::default();
        ledger.books().max_len = Some(max_len);
        ledger
    }

    /// Empty books of a device that takes at most so many registrations.
    pub fn with_max_registrations(max_registrations: u64) -> Ledger {
        let ledger = Ledger::default();
        ledger.books().max_registrations = Some(max_registrations);
        ledger
    }

    /// Says how many bytes may be pinned here from now on; nothing is refused for that when it is tried.
    pub fn set_memlock(&self, limit: Option<u64>) {
        self.books().memlock = limit;
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses, with `ENOMEM`, every registration after the first `count` from now on; `None`: none.
    pub fn refuse_after(&self, count: Option<u64>) {
        let mut books = self.books();
        books.refuse_after = count.map(|count| books.registrations + count);
    }

    /// How many registrations there are.
    pub fn live(&self) -> usize {
        self.books().live.len()
    }

    /// Their bytes.
    pub fn live_bytes(&self) -> usize {
        self.books().live.values().map(Range::len).sum()
    }

    /// How many registrations were made.
    pub fn registrations(&self) -> u64 {
        self.books().registrations
    }

    /// Whether all of `memory` is in the registration of this lkey.
    pub fn covers(&self, lkey: u32, memory: Range<usize>) -> bool {
        let books = self.books();
        books.live.get(&lkey.into()).is_some_and(|live| live.start <= memory.start && memory.end <= live.end)
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Ledger {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        let mut books = self.books();
        if books.refuse_after.is_some_and(|count| books.registrations >= count) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let overlap = books.live.values().any(|live| live.start < memory.end && memory.start < live.end);
        assert!(!overlap, "{memory:x?} is registered already, in part");
        books.registrations += 1;
        let handle = books.registrations;
        books.live.insert(handle, memory);
        Ok(Registered { keys: Keys { lkey: handle as u32, rkey: handle as u32 }, handle })
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        let found = self.books().live.remove(&registered.handle);
        assert_eq!(found, Some(memory), "not a live registration");
        Ok(())
    }

    fn limits(&self) -> Limits {
        let books = self.books();
        let none = Limits::NONE;
        Limits {
            max_len: books.max_len.unwrap_or(none.max_len),
            max_registrations: books.max_registrations.unwrap_or(none.max_registrations),
        }
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        // Where clones share a limit they have to be one device.
        let shares = self.books().max_registrations.is_some();
        NonZeroUsize::new(Arc::as_ptr(&self.0).addr()).filter(|_| shares)
    }

    fn memlock(&self) -> Option<Memlock> {
        let books = self.books();
        let pinned = books.live.values().map(|live| live.len() as u64).sum();
        books.memlock.map(|limit| Memlock { limit: Some(limit), pinned })
    }

    fn is_memlocked(&self) -> bool {
        self.books().memlock.is_some()
    }

    fn name(&self) -> &str {
        "ledger"
    }
}
