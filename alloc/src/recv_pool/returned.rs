//! Buffers that come back to a pool, from whichever thread drops their last user: a lock-free list that only the pool takes
//! from. Uses the atomics of the crate below.
//!
//! Every buffer has a place of its own in a table, which nobody else writes while it is away. The list goes through the places,
//! and one word has its head:
//!
//! ```text
//! bits 0..32  head: 1 + the place of what came last; 0: nothing is there
//! bit  32     wanted: the pool found nothing, and is to be woken by the next that comes
//! bit  33     closed: the pool is gone; what comes is kept by who brings it
//! ```
//!
//! It is one word, so whoever brings something either is seen by a pool that is about to wait, or sees that it waits. Things are
//! only added one at a time and taken all at once, so a head that is met again is no danger.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use rdmalloc_arenas::sync::Atomic64;

const HEAD: u64 = u32::MAX as u64;
const WANTED: u64 = 1 << 32;
const CLOSED: u64 = 1 << 33;

/// What became of what was brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Brought {
    Done,
    /// And the pool waits for it.
    Wake,
    /// It was not taken.
    Closed,
}

/// The word. Generic so that the models run the same code.
struct Word<A = AtomicU64>(A);

impl<A: Atomic64> Word<A> {
    fn update(&self, mut change: impl FnMut(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut old = self.0.load(Acquire);
        loop {
            let Some(new) = change(old) else { return Err(old) };
            // Release: who takes finds what was brought. Acquire: what was brought is found.
            match self.0.compare_exchange_weak(old, new, AcqRel, Acquire) {
                Ok(_) => return Ok(old),
                Err(found) => old = found,
            }
        }
    }

    /// Puts a place (from 0) into the list. `link` is told the head that shall follow it, before the place can be seen.
    fn bring(&self, place: u32, mut link: impl FnMut(u32)) -> Brought {
        let before = self.update(|old| {
            (old & CLOSED == 0).then(|| {
                link((old & HEAD) as u32);
                u64::from(place) + 1
            })
        });
        match before {
            Ok(old) if old & WANTED != 0 => Brought::Wake,
            Ok(_) => Brought::Done,
            Err(_) => Brought::Closed,
        }
    }

    /// Takes the list: its head.
    fn take(&self) -> u32 {
        (self.update(|old| Some(old & CLOSED)).unwrap_or_default() & HEAD) as u32
    }

    /// Takes the list; or, where there is none, asks to be woken.
    fn take_or_want(&self) -> u32 {
        let want = |old: u64| Some(if old & HEAD == 0 { old | WANTED } else { old & CLOSED });
        (self.update(want).unwrap_or_default() & HEAD) as u32
    }

    /// Takes the list, and nothing is put into it any more.
    fn close(&self) -> u32 {
        (self.update(|_| Some(CLOSED)).unwrap_or_default() & HEAD) as u32
    }

    /// Whether there is nothing to take: a look that costs no more than that.
    fn is_empty(&self) -> bool {
        self.0.load(Relaxed) & HEAD == 0
    }
}

/// A place in the table: the place that follows in the list, plus 1, and what has come back.
type Place<T> = UnsafeCell<(u32, MaybeUninit<T>)>;

/// The table, its list, and who is to be woken.
pub(super) struct Returned<T> {
    word: Word,
    places: Box<[Place<T>]>,
    waker: Option<Box<dyn Fn() + Send + Sync>>,
}

// SAFETY: a place is written by the one who brings what belongs there, before it is in the list, and read by the one who has
// taken the list; the word orders both. What is brought goes from thread to thread, so it must be Send.
unsafe impl<T: Send> Sync for Returned<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Returned<T> {}

impl<T> Returned<T> {
    /// So many places, and nothing in them.
    pub(super) fn new(places: usize, waker: Option<Box<dyn Fn() + Send + Sync>>) -> Returned<T> {
        let places = (0..places).map(|_| UnsafeCell::new((0, MaybeUninit::uninit()))).collect();
        Returned { word: Word(AtomicU64::new(0)), places, waker }
    }

    /// Brings back what belongs to a place; wakes the pool if it waits.
    ///
    /// # Errors
    ///
    /// Gives it back when the pool is gone.
    ///
    /// # Safety
    ///
    /// The place is the caller's: what is brought was taken from it, or it is the first, and it comes once.
    pub(super) unsafe fn bring(&self, place: u32, value: T) -> Result<(), T> {
        let cell = self.places[place as usize].get();
        // SAFETY: nobody else looks at the place before it is in the list.
        unsafe { (*cell).1.write(value) };
        // SAFETY: as above: the word is not changed yet when the link is written.
        match self.word.bring(place, |next| unsafe { (*cell).0 = next }) {
            Brought::Done => Ok(()),
            Brought::Wake => {
                self.waker.iter().for_each(|wake| wake());
                Ok(())
            }
            // SAFETY: written above, and not seen by anyone.
            Brought::Closed => Err(unsafe { (*cell).1.assume_init_read() }),
        }
    }

    /// Gives everything that has come to `each`, with its place. `wants`: if there is nothing, the next to come wakes. Whether
    /// there was something. One thread at a time.
    ///
    /// # Safety
    ///
    /// By the pool only, which has no other call of these under way.
    pub(super) unsafe fn take(&self, wants: bool, each: impl FnMut(u32, T)) -> bool {
        let head = match wants {
            true => self.word.take_or_want(),
            false if self.word.is_empty() => 0,
            false => self.word.take(),
        };
        self.walk(head, each)
    }

    /// The same, for the last time.
    ///
    /// # Safety
    ///
    /// As [`take`](Self::take).
    pub(super) unsafe fn close(&self, each: impl FnMut(u32, T)) -> bool {
        self.walk(self.word.close(), each)
    }

    fn walk(&self, head: u32, mut each: impl FnMut(u32, T)) -> bool {
        let mut at = head;
        while let Some(place) = at.checked_sub(1) {
            let cell = self.places[place as usize].get();
            // SAFETY: the place was in the list that was taken, so it was written before, and belongs to who took.
            let (next, value) = unsafe { ((*cell).0, (*cell).1.assume_init_read()) };
            at = next;
            each(place, value);
        }
        head != 0
    }
}

/// Models: every interleaving of small scripts, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use crate::model::Loom;
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    struct Model {
        word: Word<Loom>,
        links: [Cell<u32>; 2],
        woken: AtomicU32,
    }

    impl Model {
        fn new() -> Arc<Model> {
            let links = [Cell::new(9), Cell::new(9)];
            Arc::new(Model { word: Word(Loom::new(0)), links, woken: AtomicU32::new(0) })
        }

        /// Whether it was taken.
        fn bring(&self, place: u32) -> bool {
            match self.word.bring(place, |next| self.links[place as usize].set(next)) {
                Brought::Done => true,
                Brought::Wake => {
                    self.woken.fetch_add(1, AcqRel);
                    true
                }
                Brought::Closed => false,
            }
        }

        fn walk(&self, head: u32, seen: &mut [bool; 2]) -> bool {
            let mut at = head;
            while at != 0 {
                let place = at as usize - 1;
                assert!(!core::mem::replace(&mut seen[place], true), "twice");
                at = self.links[place].get();
            }
            head != 0
        }
    }

    /// Three threads, three preemptions.
    fn model(script: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(script);
    }

    fn two(model: &Arc<Model>) -> [thread::JoinHandle<bool>; 2] {
        [0, 1].map(|place| {
            let model = model.clone();
            thread::spawn(move || model.bring(place))
        })
    }

    #[test]
    fn what_two_threads_bring_back_is_taken_once_each_and_a_pool_that_waits_is_woken() {
        model(|| {
            let (model, mut seen) = (Model::new(), [false; 2]);
            let threads = two(&model);
            model.walk(model.word.take(), &mut seen);
            let waits = !model.walk(model.word.take_or_want(), &mut seen);
            threads.into_iter().for_each(|thread| assert!(thread.join().unwrap()));
            model.walk(model.word.take(), &mut seen);
            assert_eq!(seen, [true; 2]);
            // Who waits has found nothing, so what it has not seen before wakes it.
            let woken = model.woken.load(Acquire);
            assert!(woken <= u32::from(waits));
        });
    }

    #[test]
    fn a_pool_that_waits_for_one_is_woken_by_it_or_has_it() {
        model(|| {
            let (model, mut seen) = (Model::new(), [false; 2]);
            let thread = {
                let model = model.clone();
                thread::spawn(move || model.bring(1))
            };
            let waits = !model.walk(model.word.take_or_want(), &mut seen);
            assert!(thread.join().unwrap());
            assert_eq!(model.woken.load(Acquire), u32::from(waits));
            assert_eq!(model.walk(model.word.take(), &mut seen), waits);
        });
    }

    #[test]
    fn a_pool_that_ends_meanwhile_has_it_or_who_brings_it_does() {
        model(|| {
            let (model, mut seen) = (Model::new(), [false; 2]);
            let threads = two(&model);
            model.walk(model.word.close(), &mut seen);
            let taken = threads.map(|thread| thread.join().unwrap());
            assert_eq!(taken, seen);
        });
    }
}
