//! How much is registered, and may be: two numbers in one atomic word, so that nobody sees the one without the other, and
//! several who register at once never exceed a budget together. Uses `sync`.
//!
//! ```text
//! bits  0..32  registrations
//! bits 32..64  chunks (2 MiB) that they cover; 16 TiB on 64 devices are 2^29
//! ```

use crate::region::CHUNK;
use crate::sync::Atomic64;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// What a heap may have registered, over all its devices: each device counts by itself, as it does for the kernel.
///
/// ```
/// use rdmalloc_arenas::Budget;
/// let budget = Budget { bytes: 4 << 30, ..Budget::NONE };
/// assert_eq!(budget.registrations, u64::MAX);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Budget {
    /// Bytes, summed over the devices: memory that two devices have registered counts twice.
    pub bytes: u64,
    /// Registrations (memory regions), summed over the devices.
    pub registrations: u64,
}

impl Budget {
    /// No limit.
    pub const NONE: Budget = Budget { bytes: u64::MAX, registrations: u64::MAX };
}

impl Default for Budget {
    fn default() -> Budget {
        Budget::NONE
    }
}

/// An amount of registered memory. Bytes are whole chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    pub(crate) registrations: u64,
}

impl Amount {
    /// So many bytes in so many registrations.
    pub(crate) fn new(bytes: usize, registrations: usize) -> Amount {
        Amount { bytes: bytes as u64, registrations: registrations as u64 }
    }

    fn word(self) -> u64 {
        self.bytes / CHUNK as u64 * CHUNKS + self.registrations
    }

    fn of(word: u64) -> Amount {
        Amount { bytes: word / CHUNKS * CHUNK as u64, registrations: word % CHUNKS }
    }
}

const CHUNKS: u64 = 1 << 32;

/// What a budget leaves no room for; with what is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Over {
    Bytes { registered: u64 },
    Registrations { registered: u64 },
}

/// See the module. Generic so that the model runs the same code.
#[derive(Debug)]
pub(crate) struct Held<A = AtomicU64>(A);

impl Held {
    /// Nothing.
    pub(crate) const fn new() -> Held {
        Held(AtomicU64::new(0))
    }

    /// Forgets what is held.
    pub(crate) fn reset(&self) {
        self.0.store(0, Relaxed);
    }
}

impl<A: Atomic64> Held<A> {
    /// What is held now.
    pub(crate) fn now(&self) -> Amount {
        Amount::of(self.0.load(Acquire))
    }

    /// Whether a budget has room for so much more now.
    pub(crate) fn has_room(&self, more: Amount, budget: Budget) -> Result<(), Over> {
        room(self.now(), more, budget)
    }

    /// Holds so much more, if the budget has room for it.
    pub(crate) fn take(&self, more: Amount, budget: Budget) -> Result<(), Over> {
        let mut old = self.0.load(Relaxed);
        loop {
            room(Amount::of(old), more, budget)?;
            match self.0.compare_exchange_weak(old, old + more.word(), AcqRel, Relaxed) {
                Ok(_) => return Ok(()),
                Err(found) => old = found,
            }
        }
    }

    /// Holds so much less.
    pub(crate) fn give(&self, less: Amount) {
        let old = self.0.fetch_sub(less.word(), AcqRel);
        debug_assert!(old >= less.word());
    }
}

fn room(held: Amount, more: Amount, budget: Budget) -> Result<(), Over> {
    if budget.bytes.saturating_sub(held.bytes) < more.bytes {
        return Err(Over::Bytes { registered: held.bytes });
    }
    if budget.registrations.saturating_sub(held.registrations) < more.registrations {
        return Err(Over::Registrations { registered: held.registrations });
    }
    Ok(())
}

#[cfg(test)]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn two_who_register_at_once_never_exceed_a_budget_and_one_of_them_gets_it() {
        loom::model(|| {
            let held = Arc::new(Held(loom::sync::atomic::AtomicU64::new(0)));
            let budget = Budget { bytes: 3 * CHUNK as u64, registrations: 10 };
            let more = Amount::new(2 * CHUNK, 1);
            let register = move |held: &Held<_>| {
                let taken = held.take(more, budget).is_ok();
                assert!(held.now().bytes <= budget.bytes, "over the budget");
                taken
            };
            let other = thread::spawn({
                let held = held.clone();
                move || register(&held)
            });
            let mine = register(&held);
            assert!(mine ^ other.join().unwrap(), "both, or neither");
            held.give(more);
            assert_eq!(held.now(), Amount::default());
        });
    }

    #[test]
    fn either_number_is_a_limit() {
        let held = Held::new();
        let budget = Budget { bytes: 8 << 20, registrations: 2 };
        held.take(Amount::new(2 << 20, 1), budget).unwrap();
        assert_eq!(held.take(Amount::new(8 << 20, 1), budget), Err(Over::Bytes { registered: 2 << 20 }));
        assert_eq!(held.take(Amount::new(4 << 20, 2), budget), Err(Over::Registrations { registered: 1 }));
        assert_eq!(held.has_room(Amount::new(6 << 20, 1), budget), Ok(()));
        held.take(Amount::new(6 << 20, 1), budget).unwrap();
        assert_eq!(held.now(), Amount::new(8 << 20, 2));
        held.take(Amount::new(16 << 40, 0), Budget::NONE).unwrap();
        assert_eq!(held.now().registrations, 2);
    }
}
