//! The blocks of a slab that threads other than its owner have freed: a list and a count in one atomic word. Uses the
//! atomics of the crate below.
//!
//! ```text
//! bits  0..16  head: 1 + the place of the newest block in the slab, in units of 16 bytes; 0 when the list is empty
//! bits 16..31  count of blocks in the list
//! bit  31      told: the slab is in its owner's list of slabs to look at, or on its way there
//! bits 32..64  owner
//! ```
//!
//! The first to free into a slab sets `told` and puts the slab into the owner's list ([`Freed::Tell`]); only the owner, having
//! taken the slab out of that list, clears it again. So a slab is in the list at most once, and a slab that was told of is
//! not given back before it has been taken out: nobody touches a slab's header that is not there any more.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use rdmalloc_arenas::sync::Atomic64;

const HEAD: u64 = 0xffff;
const ONE: u64 = 1 << 16;
const COUNT: u64 = 0x7fff << 16;
const TOLD: u64 = 1 << 31;

/// What freeing asks of the one who did it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// Nothing: the owner has been told already.
    Done,
    /// To put the slab into the list of this owner.
    Tell(u32),
    /// Nothing was done: the block is in the list already.
    Twice,
}

/// A list taken from the word: its head and how many blocks it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    /// As in the word: 0 when empty.
    pub(crate) head: u16,
    /// The number of blocks.
    pub(crate) count: u32,
}

/// The word. Generic so that the models run the same code.
#[derive(Debug, Default)]
pub(crate) struct Remote<A = AtomicU64>(A);

impl Remote<AtomicU64> {
    /// No list, no owner.
    pub(crate) const fn none() -> Remote {
        Remote(AtomicU64::new(0))
    }

    /// Makes `owner` the owner, when the slab is new: nobody else knows of it, and `told` is not set.
    pub(crate) fn own(&self, owner: u32) {
        self.0.store(u64::from(owner) << 32, Relaxed);
    }
}

impl<A: Atomic64> Remote<A> {
    /// The owner; never changes while the slab has blocks out.
    #[cfg(test)]
    pub(crate) fn owner(&self) -> u32 {
        (self.0.load(Relaxed) >> 32) as u32
    }

    /// Whether the list is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Relaxed) & COUNT == 0
    }

    /// Whether the slab is in its owner's list, or on its way there.
    pub(crate) fn is_told(&self) -> bool {
        self.0.load(Relaxed) & TOLD != 0
    }

    /// Puts a block into the list. `link` is told the head that shall follow it, before the block can be seen.
    #[inline]
    pub(crate) fn push(&self, place: u16, link: impl FnMut(u16)) -> Freed {
        self.push_run(place, 1, link)
    }

    /// Puts a run of `count` blocks into the list, which begins with that at `place`. `link` is told what shall follow the last.
    #[inline]
    pub(crate) fn push_run(&self, place: u16, count: u32, mut link: impl FnMut(u16)) -> Freed {
        let mut old = self.0.load(Relaxed);
        loop {
            if old & HEAD == u64::from(place) {
                return Freed::Twice;
            }
            link((old & HEAD) as u16);
            let new = (old & !HEAD | u64::from(place) | TOLD).wrapping_add(ONE * u64::from(count));
            // Release: the owner finds the link, and whatever the freeing thread did to the block before.
            match self.0.compare_exchange_weak(old, new, Release, Relaxed) {
                Ok(_) if old & TOLD == 0 => return Freed::Tell((old >> 32) as u32),
                Ok(_) => return Freed::Done,
                Err(found) => old = found,
            }
        }
    }

    /// The owner takes the whole list. Leaves `told` as it is.
    pub(crate) fn take(&self) -> Taken {
        self.take_and(!(HEAD | COUNT))
    }

    /// The owner, having taken the slab out of its list of slabs to look at, takes the list of blocks and clears `told`.
    pub(crate) fn take_told(&self) -> Taken {
        debug_assert!(self.is_told());
        self.take_and(!(HEAD | COUNT | TOLD))
    }

    fn take_and(&self, keep: u64) -> Taken {
        let mut old = self.0.load(Relaxed);
        loop {
            match self.0.compare_exchange_weak(old, old & keep, AcqRel, Acquire) {
                Ok(_) => return Taken { head: (old & HEAD) as u16, count: ((old & COUNT) / ONE) as u32 },
                Err(found) => old = found,
            }
        }
    }
}

/// Models: every interleaving of small scripts, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use crate::model::Loom;
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    /// A slab of three blocks, all out, and its owner's list, which has room for this one slab.
    struct Slab {
        word: Remote<Loom>,
        links: [Cell<u16>; 4],
        told: loom::sync::atomic::AtomicU32,
    }

    impl Slab {
        fn new() -> Arc<Slab> {
            let word = Remote(Loom::new(7 << 32));
            let links = [Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0)];
            Arc::new(Slab { word, links, told: loom::sync::atomic::AtomicU32::new(0) })
        }

        fn free(&self, place: u16) {
            if let Freed::Tell(owner) = self.word.push(place, |next| self.links[place as usize].set(next)) {
                assert_eq!(owner, 7);
                assert_eq!(self.told.fetch_add(1, AcqRel), 0, "told twice");
            }
        }

        /// Walks a list that was taken: each block once.
        fn walk(&self, taken: Taken, seen: &mut [bool; 4]) -> u32 {
            let mut at = taken.head;
            for _ in 0..taken.count {
                assert!(!core::mem::replace(&mut seen[at as usize], true), "block twice");
                at = self.links[at as usize].get();
            }
            assert_eq!(at, 0, "count and list differ");
            taken.count
        }

        fn look(&self, seen: &mut [bool; 4]) -> u32 {
            if self.told.swap(0, AcqRel) == 0 {
                return 0;
            }
            self.walk(self.word.take_told(), seen)
        }
    }

    #[test]
    fn two_threads_free_while_the_owner_looks() {
        loom::model(|| {
            let slab = Slab::new();
            let threads = [1, 2].map(|place| {
                let slab = slab.clone();
                thread::spawn(move || slab.free(place))
            });
            let mut seen = [false; 4];
            let mut back = slab.look(&mut seen);
            // The owner may also take from its current slab, without having looked at its list.
            back += slab.walk(slab.word.take(), &mut seen);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            back += slab.look(&mut seen);
            assert_eq!((back, slab.word.is_told(), slab.word.owner()), (2, false, 7));
        });
    }

    #[test]
    fn a_run_and_a_block_are_freed_while_the_owner_looks() {
        loom::model(|| {
            let slab = Slab::new();
            let run = thread::spawn({
                let slab = slab.clone();
                move || {
                    slab.links[2].set(1);
                    if let Freed::Tell(_) = slab.word.push_run(2, 2, |next| slab.links[1].set(next)) {
                        assert_eq!(slab.told.fetch_add(1, AcqRel), 0, "told twice");
                    }
                }
            });
            let block = thread::spawn({
                let slab = slab.clone();
                move || slab.free(3)
            });
            let mut seen = [false; 4];
            let mut back = slab.look(&mut seen);
            back += slab.walk(slab.word.take(), &mut seen);
            [run, block].into_iter().for_each(|thread| thread.join().unwrap());
            back += slab.look(&mut seen);
            assert_eq!((back, slab.word.is_told()), (3, false));
        });
    }

    #[test]
    fn a_thread_frees_two_while_the_owner_looks_twice() {
        loom::model(|| {
            let slab = Slab::new();
            let thread = thread::spawn({
                let slab = slab.clone();
                move || {
                    slab.free(3);
                    slab.free(1);
                }
            });
            let mut seen = [false; 4];
            let mut back = slab.look(&mut seen) + slab.look(&mut seen);
            thread.join().unwrap();
            back += slab.look(&mut seen);
            assert_eq!((back, slab.word.is_told()), (2, false));
            assert!(seen[3] && seen[1]);
        });
    }
}
