//! What a program is told about a heap's limits: once, and never from inside an allocation. Uses `sync`, and the list of arenas.
//!
//! Whatever happens inside only marks a [`Notice`]; a callback runs where the program has called: see [`Arenas::tell`].
//!
//! ```text
//! Quiet --raise--> Due --tell--> Told --resolve--> Over --tell--> Quiet
//!                  Due --resolve--> Quiet          Over --raise--> Told
//! ```
//!
//! So what has begun is told once, its end is told once and only if the beginning was, and what has come and gone between two
//! tellings is not told at all.

use super::{Arenas, arenas};
use crate::Device;
use crate::arena::State;
use crate::error::NotRegistered;
use crate::sync::{Atomic64, Lock};
use core::fmt;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::Arc;

/// What a heap has to say of its limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The heap serves memory that a device has not registered ([`Policy::Prefer`](crate::Policy)). Told once, until all is
    /// registered again.
    Unregistered {
        /// Arenas that are not registered with every device.
        arenas: usize,
        /// Their bytes.
        bytes: usize,
        /// A device that has not registered one of them.
        device: Device,
        /// Why.
        reason: NotRegistered,
    },
    /// All of the heap is registered with every device again.
    Registered,
    /// More is registered than the soft limit says. Told once, until it is not.
    AboveSoftLimit {
        /// The soft limit, in bytes.
        limit: u64,
        /// Bytes registered, summed over the devices.
        registered: u64,
    },
    /// No more is registered than the soft limit says, again.
    BelowSoftLimit {
        /// The soft limit, in bytes.
        limit: u64,
        /// Bytes registered, summed over the devices.
        registered: u64,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Unregistered { arenas, bytes, device, reason } => {
                write!(f, "{arenas} arena(s), {} KiB, are not registered with {}: {reason}", bytes >> 10, device.name())
            }
            Event::Registered => f.write_str("all memory is registered again"),
            Event::AboveSoftLimit { limit, registered } => {
                write!(f, "{} KiB are registered, more than the soft limit of {} KiB", registered >> 10, limit >> 10)
            }
            Event::BelowSoftLimit { limit, registered } => {
                write!(f, "{} KiB are registered, within the soft limit of {} KiB again", registered >> 10, limit >> 10)
            }
        }
    }
}

/// Who is told. It may allocate, and use the heap.
pub type Listener = Arc<dyn Fn(&Event) + Send + Sync>;

const QUIET: u64 = 0;
const DUE: u64 = 1;
const TOLD: u64 = 2;
const OVER: u64 = 3;

/// What is to be told of a notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tell {
    Begin,
    End,
}

/// See the module. Generic so that the model runs the same code.
#[derive(Debug)]
pub(super) struct Notice<A = AtomicU64>(A);

impl Notice {
    /// Quiet.
    pub(super) const fn new() -> Notice {
        Notice(AtomicU64::new(QUIET))
    }
}

impl<A: Atomic64> Notice<A> {
    fn change(&self, to: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut old = self.0.load(Relaxed);
        loop {
            match self.0.compare_exchange_weak(old, to(old)?, AcqRel, Relaxed) {
                Ok(_) => return Some(old),
                Err(found) => old = found,
            }
        }
    }

    /// It has begun, or still is.
    pub(super) fn raise(&self) {
        self.change(|old| match old {
            QUIET => Some(DUE),
            OVER => Some(TOLD),
            _ => None,
        });
    }

    /// It has ended, or never was.
    pub(super) fn resolve(&self) {
        self.change(|old| match old {
            DUE => Some(QUIET),
            TOLD => Some(OVER),
            _ => None,
        });
    }

    /// What the caller shall tell.
    pub(super) fn take(&self) -> Option<Tell> {
        let old = self.change(|old| match old {
            DUE => Some(TOLD),
            OVER => Some(QUIET),
            _ => None,
        })?;
        Some(if old == DUE { Tell::Begin } else { Tell::End })
    }

    /// Whether it is: raised and not resolved.
    pub(super) fn is_raised(&self) -> bool {
        matches!(self.0.load(Acquire), DUE | TOLD)
    }

    fn is_pending(&self) -> bool {
        matches!(self.0.load(Acquire), DUE | OVER)
    }
}

/// What is noted, and who is told.
pub(super) struct Notices {
    /// Arenas are open that a device has not registered.
    pub(super) unregistered: Notice,
    /// More is registered than the soft limit says.
    pub(super) above_soft_limit: Notice,
    listener: Lock<Option<Listener>>,
    /// Held by who tells, so that the listener hears one thing after the other.
    telling: Lock<()>,
}

impl Notices {
    pub(super) const fn new() -> Notices {
        Notices {
            unregistered: Notice::new(),
            above_soft_limit: Notice::new(),
            listener: Lock::new(None),
            telling: Lock::new(()),
        }
    }
}

impl Notices {
    /// Before a fork.
    pub(super) fn hold(&self) {
        self.listener.hold();
    }

    /// After it, in parent and child.
    ///
    /// # Safety
    ///
    /// As [`Lock::release`], of [`hold`](Self::hold).
    pub(super) unsafe fn release(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.listener.release() }
    }

    /// In a child of fork: nobody tells now, and what there was to be told was of the parent's devices.
    ///
    /// # Safety
    ///
    /// There is no other thread.
    pub(super) unsafe fn renew(&self) {
        // SAFETY: who told, if it is not this thread, is not in this process. If it is, it opens an open lock.
        unsafe { self.telling.renew(()) };
        self.unregistered.0.store(QUIET, Relaxed);
        self.above_soft_limit.0.store(QUIET, Relaxed);
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Notices { unregistered, above_soft_limit, .. } = self;
        f.debug_tuple("Notices").field(unregistered).field(above_soft_limit).finish()
    }
}

impl Arenas {
    /// Says who is told of the heap's limits; replaces who was.
    pub fn set_listener(&self, listener: Option<Listener>) {
        let before = core::mem::replace(&mut *self.notices.listener.lock(), listener);
        // Without the lock: it is the program's, and does what it likes as it goes.
        drop(before);
    }

    /// Whether there is something to [`tell`](Self::tell), and somebody who listens.
    #[must_use]
    pub fn has_to_tell(&self) -> bool {
        let notices = &self.notices;
        let is_pending = notices.unregistered.is_pending() || notices.above_soft_limit.is_pending();
        is_pending && notices.listener.lock().is_some()
    }

    /// Tells the listener what has happened since, if anything; cheap if nothing has. Without a listener nothing is told, and
    /// nothing forgotten.
    ///
    /// Must not be called inside an allocation: the listener may allocate, and use the heap. It may itself come here; who comes
    /// while another tells leaves it to that one.
    pub fn tell(&self) {
        let notices = &self.notices;
        while notices.unregistered.is_pending() || notices.above_soft_limit.is_pending() {
            let Some(_telling) = notices.telling.try_lock() else { return };
            let Some(listener) = notices.listener.lock().clone() else { return };
            if let Some(tell) = notices.unregistered.take() {
                match tell {
                    Tell::Begin => self.unregistered().iter().for_each(|event| listener(event)),
                    Tell::End => listener(&Event::Registered),
                }
            }
            if let Some(tell) = notices.above_soft_limit.take() {
                let (limit, registered) = (self.soft_limit().unwrap_or(u64::MAX), self.registered_bytes());
                listener(&match tell {
                    Tell::Begin => Event::AboveSoftLimit { limit, registered },
                    Tell::End => Event::BelowSoftLimit { limit, registered },
                });
            }
        }
    }

    /// What is not registered now.
    fn unregistered(&self) -> Option<Event> {
        let list = self.read();
        let attached = self.limits.attached.load(Relaxed);
        let (mut count, mut bytes, mut first) = (0, 0, None);
        for arena in arenas(&list).filter(|arena| arena.word.state() == State::Live && !arena.word.is_kept()) {
            let missing = attached & !arena.registered.load(Relaxed);
            if missing != 0 {
                (count, bytes) = (count + 1, bytes + arena.len());
                first = first.or_else(|| {
                    let device = Device::in_slot(missing.trailing_zeros() as usize);
                    Some((device, device.reason(arena)?))
                });
            }
        }
        let (device, reason) = first?;
        Some(Event::Unregistered { arenas: count, bytes, device, reason })
    }
}

#[cfg(test)]
mod model {
    use super::*;
    use loom::sync::atomic::{AtomicU64, AtomicUsize};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    type Noted = Notice<AtomicU64>;

    #[test]
    fn what_has_begun_is_told_once_whoever_tells() {
        loom::model(|| {
            let shared = Arc::new((Notice(AtomicU64::new(QUIET)), AtomicUsize::new(0)));
            let tell = |shared: &(Noted, AtomicUsize)| match shared.0.take() {
                Some(Tell::Begin) => drop(shared.1.fetch_add(1, Relaxed)),
                Some(Tell::End) => panic!("the end of what has not ended"),
                None => {}
            };
            let tellers = [(); 2].map(|()| {
                let shared = shared.clone();
                thread::spawn(move || tell(&shared))
            });
            shared.0.raise();
            shared.0.raise();
            tellers.into_iter().for_each(|teller| teller.join().unwrap());
            tell(&shared);
            assert_eq!(shared.1.load(Relaxed), 1);
        });
    }

    #[test]
    fn beginning_and_end_are_told_in_turn() {
        loom::model(|| {
            let shared = Arc::new((Notice(AtomicU64::new(QUIET)), Mutex::new(Vec::new())));
            let tell = |shared: &(Noted, Mutex<Vec<Tell>>)| {
                let mut told = shared.1.lock().unwrap();
                told.extend(shared.0.take());
            };
            let teller = {
                let shared = shared.clone();
                thread::spawn(move || (0..2).for_each(|_| tell(&shared)))
            };
            shared.0.raise();
            shared.0.resolve();
            shared.0.raise();
            teller.join().unwrap();
            tell(&shared);
            let told = shared.1.lock().unwrap();
            assert!(told.iter().enumerate().all(|(at, tell)| (*tell == Tell::Begin) == (at % 2 == 0)), "{told:?}");
            assert_eq!(told.len() % 2, 1, "it is raised, and that is not told: {told:?}");
        });
    }
}
