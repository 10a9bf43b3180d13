//! Where a heap that a program made is in its life. Uses the atomics of the crate below.
//!
//! ```text
//! Unused -> Open -> Ending <-> Draining <-> Again,  Draining -> Ended -> Unused
//! ```
//!
//! The last handle to go makes it Ending. From then on whoever frees a block looks whether it was the last; one at a time,
//! and without a lock, since a heap's end calls devices: who has made it Draining looks, and who comes meanwhile makes it
//! Again, which has the first look again. Between what a thread frees and its look at the phase, and between the change to
//! Ending or Draining and the look for blocks, there is a barrier, light there and heavy here (or a fence in both places, where that
//! pair is not to be had): so either the one sees the phase, or the other the block. In a cache that is lent to a thread, the look at
//! the phase can be spared; see `loan`.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use rdmalloc_arenas::sync::Atomic64;

/// Nobody's.
const UNUSED: u64 = 0;
/// The heap has handles.
const OPEN: u64 = 1;
/// The last handle is gone; the heap ends with its last block.
const ENDING: u64 = 2;
/// And a thread is looking whether a block is left.
const DRAINING: u64 = 3;
/// And a block has gone since it began to look.
const AGAIN: u64 = 4;
/// The last block is gone; devices are being detached.
const ENDED: u64 = 5;

/// The phase. Generic so that the model runs the same code.
#[derive(Debug)]
pub(crate) struct Phase<A = AtomicU64>(A);

impl Phase<AtomicU64> {
    /// Of a core that is nobody's.
    pub(crate) const fn unused() -> Phase {
        Phase(AtomicU64::new(UNUSED))
    }
}

#[cfg(test)]
impl<A: Atomic64> Phase<A> {
    /// Of a heap that has handles, for models.
    pub(crate) fn of_open_heap(word: impl FnOnce(u64) -> A) -> Phase<A> {
        Phase(word(OPEN))
    }
}

// All changes are AcqRel: who looks for blocks sees what was freed before it was asked to look.
impl<A: Atomic64> Phase<A> {
    fn change(&self, to: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut old = self.0.load(Relaxed);
        loop {
            match self.0.compare_exchange_weak(old, to(old)?, AcqRel, Relaxed) {
                Ok(_) => return Some(old),
                Err(found) => old = found,
            }
        }
    }

    /// Whether no heap uses the core.
    pub(crate) fn is_unused(&self) -> bool {
        self.0.load(Acquire) == UNUSED
    }

    /// A heap begins in a core that was unused.
    pub(crate) fn open(&self) {
        self.change(|_| Some(OPEN));
    }

    /// The last handle is gone.
    pub(crate) fn begin_end(&self) {
        self.change(|_| Some(ENDING));
    }

    /// Whether the last handle is gone, so that a block that was freed just now may have been the last.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.0.load(Relaxed), ENDING | DRAINING | AGAIN)
    }

    /// Whether the last block is gone, and nobody may use the heap.
    pub(crate) fn is_ended(&self) -> bool {
        self.0.load(Acquire) == ENDED
    }

    /// Whether the caller shall look for blocks. If not, somebody does after this, or need not.
    pub(crate) fn begin_drain(&self) -> bool {
        let drain = |phase| match phase {
            ENDING => Some(DRAINING),
            DRAINING | AGAIN => Some(AGAIN),
            _ => None,
        };
        self.change(drain) == Some(ENDING)
    }

    /// The caller, who has looked and found blocks, is done; `false`: it shall look again.
    pub(crate) fn end_drain(&self) -> bool {
        self.change(|phase| Some(if phase == AGAIN { DRAINING } else { ENDING })) != Some(AGAIN)
    }

    /// The caller has looked and found no block.
    pub(crate) fn end(&self) {
        self.change(|_| Some(ENDED));
    }

    /// In a child of fork: who was looking for blocks is not in this process. The next block that is freed has somebody look.
    pub(crate) fn renew(&self) {
        self.change(|phase| matches!(phase, DRAINING | AGAIN).then_some(ENDING));
    }

    /// The core may be used again.
    pub(crate) fn reuse(&self) {
        self.change(|_| Some(UNUSED));
    }
}

/// A model: every interleaving of a small script, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use crate::model::Loom;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering::Release, Ordering::SeqCst, fence};
    use loom::thread;

    /// A heap of two blocks and one handle.
    struct Heap {
        phase: Phase<Loom>,
        freed: AtomicU64,
        ended: AtomicBool,
    }

    impl Heap {
        fn end_if_empty(&self) {
            if !self.phase.begin_drain() {
                return;
            }
            fence(SeqCst);
            while self.freed.load(Acquire) < 2 {
                if self.phase.end_drain() {
                    return;
                }
                fence(SeqCst);
            }
            self.phase.end();
            assert!(!self.ended.swap(true, AcqRel), "ended twice");
        }

        fn free(&self) {
            self.freed.fetch_add(1, Release);
            fence(SeqCst);
            if self.phase.is_ending() {
                self.end_if_empty();
            }
        }

        fn drop_handle(&self) {
            self.phase.begin_end();
            fence(SeqCst);
            self.end_if_empty();
        }
    }

    #[test]
    fn a_heap_ends_once_whether_a_block_or_the_handle_goes_last() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let phase = Phase::of_open_heap(Loom::new);
            let heap = Arc::new(Heap { phase, freed: AtomicU64::new(0), ended: AtomicBool::new(false) });
            let threads = [(); 2].map(|()| {
                let heap = heap.clone();
                thread::spawn(move || heap.free())
            });
            heap.drop_handle();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(heap.ended.load(Acquire), "the heap has not ended");
        });
    }
}
