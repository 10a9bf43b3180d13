//! What is registered now: so that a region is deregistered once, and a protection domain with regions is not dropped.
//!
//! Uses [`Registered`] only. A list behind a lock: there are fewer than a hundred registrations, each takes
//! microseconds at least, and nothing is allocated or freed while the lock is held (allocating may lead back to here).

use crate::registrar::{Keys, Registered};
use core::ops::Range;
use core::ptr::NonNull;
use rdma_sys::ibv_mr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One memory region, and what it is known by.
pub(super) struct Registration {
    pub mr: NonNull<ibv_mr>,
    pub keys: Keys,
    pub memory: Range<usize>,
}

impl Registration {
    /// How the outside names it.
    pub fn registered(&self) -> Registered {
        Registered { keys: self.keys, handle: self.mr.as_ptr().expose_provenance() as u64 }
    }
}

/// A registration with its place in the list, so that it can be taken out and put back without allocating.
pub(super) struct Entry {
    registration: Registration,
    next: Option<Box<Entry>>,
}

impl Entry {
    pub fn mr(&self) -> NonNull<ibv_mr> {
        self.registration.mr
    }
}

// SAFETY: the `ibv_mr` pointer is what keeps the type from being Send by itself. It is a verbs object, which any thread
// may use (ibv_alloc_td(3)); this module never follows it.
unsafe impl Send for Entry {}

/// The registrations that have not ended.
#[derive(Default)]
pub(super) struct Live(Mutex<Option<Box<Entry>>>);

impl Live {
    /// Adds what was registered.
    pub fn insert(&self, registration: Registration) {
        self.put_back(Box::new(Entry { registration, next: None }));
    }

    /// Adds an entry that was taken out.
    pub fn put_back(&self, mut entry: Box<Entry>) {
        let mut head = self.lock();
        entry.next = head.take();
        *head = Some(entry);
    }

    /// Takes out the registration that has this handle, these keys and this memory, if there is one. All three, since
    /// the library may give the address of an ended `ibv_mr` to a new one.
    pub fn take(&self, registered: Registered, memory: &Range<usize>) -> Option<Box<Entry>> {
        let mut head = self.lock();
        let mut link = &mut *head;
        while link
            .as_ref()
            .is_some_and(|e| e.registration.registered() != registered || e.registration.memory != *memory)
        {
            link = &mut link.as_mut()?.next;
        }
        let mut entry = link.take()?;
        *link = entry.next.take();
        Some(entry)
    }

    /// Whether all registrations have ended.
    pub fn is_empty(&mut self) -> bool {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// A panic cannot leave the list half changed: nothing between taking and giving back the lock panics.
    fn lock(&self) -> MutexGuard<'_, Option<Box<Entry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Live {
    /// One after the other: the drop that comes by itself would go as deep as the list is long.
    fn drop(&mut self) {
        let mut head = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        while let Some(mut entry) = head {
            head = entry.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(n: usize) -> Registration {
        let keys = Keys { lkey: n as u32, rkey: n as u32 };
        Registration { mr: NonNull::without_provenance(n.try_into().unwrap()), keys, memory: n << 21..(n + 1) << 21 }
    }

    #[test]
    fn registration_is_taken_once() {
        let mut live = Live::default();
        (1..=3).for_each(|n| live.insert(registration(n)));
        for n in [2, 3, 1] {
            let (registered, memory) = (registration(n).registered(), registration(n).memory);
            assert!(!live.is_empty());
            assert!(live.take(registered, &(0..1 << 21)).is_none(), "other memory");
            let entry = live.take(registered, &memory).unwrap();
            assert_eq!(entry.mr(), registration(n).mr);
            assert!(live.take(registered, &memory).is_none(), "a second time");
            live.put_back(entry);
            assert!(live.take(registered, &memory).is_some(), "after it was put back");
        }
        assert!(live.is_empty());
    }

    #[test]
    fn address_of_an_ended_region_does_not_name_a_new_one() {
        let live = Live::default();
        let old = registration(1);
        let new = Registration { keys: Keys { lkey: 9, rkey: 9 }, ..registration(1) };
        live.insert(new);
        assert!(live.take(old.registered(), &old.memory).is_none());
    }

    #[test]
    fn long_list_does_not_overflow_the_stack() {
        let live = Live::default();
        (1..=200_000).for_each(|n| live.insert(registration(n)));
        drop(live);
    }
}
