//! The protocol of the slots in which flights lie: whose a slot is, by one word; which are free, by lists. Uses `sync`.
//!
//! The word of a slot:
//!
//! ```text
//! bits  0..24  the next free slot, while this one is in a list; 0: none
//! bits 24..48  generation: one more with each flight, and each time that it becomes an id; so no id is met twice
//! bits 48..64  state   0               free, or being filled
//!                      1 ..= 0xfffd    an id: so many completions are to come
//!                      ABOARD          a `Flight` value has it
//!                      LEAKED          a `Flight` value was dropped
//! ```
//!
//! Whoever changes the state from an id's last completion to ABOARD has the slot alone; so the same id gives one flight, whoever
//! asks. A list is a stack, whose head counts its changes in the bits above the index: what was read of a slot that another
//! has taken meanwhile is not used.

use crate::sync::Atomic64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// An index into the slots; 0 is none.
pub(super) const INDEX: u64 = (1 << 24) - 1;
const GENERATION: u64 = INDEX << 24;
const ONE_GENERATION: u64 = 1 << 24;
const STATE: u32 = 48;
const ABOARD: u64 = 0xfffe;
const LEAKED: u64 = 0xffff;
/// The most completions that one id can stand for.
pub(super) const MOST_COMPLETIONS: u16 = 0xfffd;

/// What is known of a slot by its word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    Free,
    UnderWay,
    Leaked,
}

/// What a completion found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Landing {
    /// No flight under way has this id.
    Unknown,
    /// This completion is counted, and so many are to come.
    More(u16),
    /// It stands for more than one completion, which only the last was wanted of: nothing has changed.
    NotTheLast(u16),
    /// It was the last: the caller has the slot.
    Last,
}

/// The slot's word, as the protocol uses it. Implemented for every atomic.
pub(super) trait Word: Atomic64 {
    /// Who has just taken the slot from a list, and filled it, is aboard.
    fn board(&self) {
        let generation = self.load(Relaxed).wrapping_add(ONE_GENERATION) & GENERATION;
        self.store(generation | ABOARD << STATE, Release);
    }

    /// Who is aboard gives the slot to an id, which it returns without the index.
    fn depart(&self, completions: u16) -> u64 {
        debug_assert!((1..=MOST_COMPLETIONS).contains(&completions));
        let generation = self.load(Relaxed).wrapping_add(ONE_GENERATION) & GENERATION;
        // Release: who lands finds the slot as it was filled.
        self.store(generation | u64::from(completions) << STATE, Release);
        generation
    }

    /// A completion of the id of this generation has come. With `fits`, which may look at what is atomic in the slot, false:
    /// nothing changes.
    fn land<E>(&self, generation: u64, fits: impl Fn() -> Result<(), E>) -> Result<Landing, E> {
        self.land_as(generation, false, fits)
    }

    /// As [`land`](Self::land) if it is the last completion of the id; else nothing changes.
    fn land_last<E>(&self, generation: u64, fits: impl Fn() -> Result<(), E>) -> Result<Landing, E> {
        self.land_as(generation, true, fits)
    }

    fn land_as<E>(&self, generation: u64, last: bool, fits: impl Fn() -> Result<(), E>) -> Result<Landing, E> {
        let mut word = self.load(Acquire);
        loop {
            let left = word >> STATE;
            if word & GENERATION != generation & GENERATION || !(1..=u64::from(MOST_COMPLETIONS)).contains(&left) {
                return Ok(Landing::Unknown);
            }
            fits()?;
            let (next, landing) = match left {
                1 => (word & GENERATION | ABOARD << STATE, Landing::Last),
                left if last => return Ok(Landing::NotTheLast(left as u16)),
                left => (word - (1 << STATE), Landing::More(left as u16 - 1)),
            };
            // Acquire: what others did with the flight before their completions. Release: what this one did.
            match self.compare_exchange_weak(word, next, AcqRel, Acquire) {
                Ok(_) => return Ok(landing),
                Err(found) => word = found,
            }
        }
    }

    /// Takes the slot of an id, however many completions are to come, or of a flight that was dropped, if it is one that is
    /// `wanted`, which may look at what is atomic in the slot. Whether it did.
    fn seize(&self, wanted: impl Fn() -> bool) -> bool {
        let mut word = self.load(Acquire);
        loop {
            // What is wanted is that of this word: with another flight in the slot it would be another generation.
            if matches!(word >> STATE, 0 | ABOARD) || !wanted() {
                return false;
            }
            match self.compare_exchange_weak(word, word & GENERATION | ABOARD << STATE, AcqRel, Acquire) {
                Ok(_) => return true,
                Err(found) => word = found,
            }
        }
    }

    /// Who is aboard leaves, and what is in the slot stays.
    fn leak(&self) {
        let word = self.load(Relaxed);
        self.store(word & GENERATION | LEAKED << STATE, Release);
    }

    fn seen(&self) -> Seen {
        match self.load(Acquire) >> STATE {
            0 => Seen::Free,
            LEAKED => Seen::Leaked,
            _ => Seen::UnderWay,
        }
    }

    /// Links it before another in a list; it is free.
    fn link(&self, next: u64) {
        let word = self.load(Relaxed);
        self.store(word & GENERATION | next, Relaxed);
    }
}

impl<A: Atomic64> Word for A {}

/// A list of free slots: `count << 24 | index of the first`.
#[derive(Debug)]
pub(super) struct Free<A>(pub(super) A);

impl<A: Atomic64> Free<A> {
    /// Takes a slot, whose word `of` finds. What its last user did is visible.
    pub(super) fn pop<'s>(&self, of: impl Fn(u64) -> &'s A) -> Option<u64>
    where
        A: 's,
    {
        let mut head = self.0.load(Acquire);
        loop {
            let index = head & INDEX;
            if index == 0 {
                return None;
            }
            // It may be another's by now: then the head has changed, and this is not used.
            let next = of(index).load(Relaxed) & INDEX;
            match self.0.compare_exchange_weak(head, changed(head) | next, AcqRel, Acquire) {
                Ok(_) => return Some(index),
                Err(found) => head = found,
            }
        }
    }

    /// Gives slots, linked from `first` to `last`, which are the caller's.
    pub(super) fn push<'s>(&self, first: u64, last: u64, of: impl Fn(u64) -> &'s A)
    where
        A: 's,
    {
        let mut head = self.0.load(Relaxed);
        loop {
            of(last).link(head & INDEX);
            // Release: the next user finds the link, and what was done in the slots. Acquire keeps earlier ones visible to him.
            match self.0.compare_exchange_weak(head, changed(head) | first, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }
}

/// The head's count, one more.
fn changed(head: u64) -> u64 {
    (head & !INDEX).wrapping_add(INDEX + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;

    const ALWAYS: fn() -> Result<(), ()> = || Ok(());

    #[test]
    fn an_id_lands_as_often_as_it_has_completions_and_is_then_unknown() {
        let word = AtomicU64::new(0);
        word.board();
        let id = word.depart(3);
        assert_eq!(word.land(id, ALWAYS), Ok(Landing::More(2)));
        assert_eq!(word.land(id, || Err("another type")), Err("another type"));
        assert_eq!([(); 2].map(|()| word.land_last(id, ALWAYS)), [Ok(Landing::NotTheLast(2)); 2]);
        assert_eq!(word.land(id, ALWAYS), Ok(Landing::More(1)));
        assert_eq!((word.land(id, ALWAYS), word.seen()), (Ok(Landing::Last), Seen::UnderWay));
        assert_eq!(word.land(id, ALWAYS), Ok(Landing::Unknown));
        let again = word.depart(1);
        assert_eq!((again == id, word.land(id, ALWAYS)), (false, Ok(Landing::Unknown)));
        assert_eq!(word.land(again, ALWAYS), Ok(Landing::Last));
        word.leak();
        assert_eq!((word.land(again, ALWAYS), word.seen()), (Ok(Landing::Unknown), Seen::Leaked));
        assert_eq!((word.seize(|| false), word.seize(|| true), word.seize(|| true)), (false, true, false));
        word.link(5);
        assert_eq!((word.seen(), word.land(again, ALWAYS)), (Seen::Free, Ok(Landing::Unknown)));
    }

    #[test]
    fn generations_wrap_and_touch_nothing_else() {
        let word = AtomicU64::new(GENERATION);
        word.board();
        assert_eq!(word.depart(MOST_COMPLETIONS), ONE_GENERATION);
        assert_eq!(word.land(ONE_GENERATION, ALWAYS), Ok(Landing::More(MOST_COMPLETIONS - 1)));
    }

    #[test]
    fn a_list_gives_each_slot_once() {
        let words: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let (list, of) = (Free(AtomicU64::new(u64::MAX << 24)), |index: u64| &words[index as usize]);
        assert_eq!(list.pop(of), None);
        words[1].link(2);
        list.push(1, 2, of);
        list.push(3, 3, of);
        assert_eq!([(); 4].map(|()| list.pop(of)), [Some(3), Some(1), Some(2), None]);
    }
}

/// The models: every interleaving of small scripts, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    /// Two slots. loom's cells report two who have one at once, or a use that is not ordered after the one before.
    struct Model {
        words: [AtomicU64; 3],
        cargo: [UnsafeCell<u64>; 3],
        free: Free<AtomicU64>,
    }

    impl Model {
        fn new() -> Arc<Model> {
            let words = [(); 3].map(|()| AtomicU64::new(0));
            let model = Model { words, cargo: [(); 3].map(|()| UnsafeCell::new(0)), free: Free(AtomicU64::new(0)) };
            model.words[1].link(2);
            model.free.push(1, 2, |index| &model.words[index as usize]);
            Arc::new(model)
        }

        fn word(&self, index: u64) -> &AtomicU64 {
            &self.words[index as usize]
        }

        fn set(&self, index: u64, value: u64) {
            // SAFETY: the caller has the slot; loom checks that.
            self.cargo[index as usize].with_mut(|cargo| unsafe { *cargo = value });
        }

        fn get(&self, index: u64) -> u64 {
            // SAFETY: as above.
            self.cargo[index as usize].with(|cargo| unsafe { *cargo })
        }

        fn take(&self, value: u64) -> Option<u64> {
            let index = self.free.pop(|index| self.word(index))?;
            self.set(index, value);
            self.word(index).board();
            Some(index)
        }

        fn give(&self, index: u64) {
            self.set(index, 0);
            self.free.push(index, index, |index| self.word(index));
        }

        fn land(&self, index: u64, id: u64) -> Landing {
            self.word(index).land::<()>(id, || Ok(())).unwrap()
        }
    }

    fn model(script: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(script);
    }

    #[test]
    fn a_free_slot_is_one_thread_s() {
        model(|| {
            let model = Model::new();
            let other = thread::spawn({
                let model = model.clone();
                // The list is as it was, but for the second slot, when the one stands between reading a link and using it.
                move || {
                    let [first, second] = [7, 8].map(|value| model.take(value));
                    first.into_iter().for_each(|index| model.give(index));
                    if let Some(index) = second {
                        assert_eq!(model.get(index), 8);
                        model.give(index);
                    }
                }
            });
            let mine: Vec<_> = [20, 21].into_iter().filter_map(|value| Some((model.take(value)?, value))).collect();
            mine.iter().for_each(|(index, value)| assert_eq!(model.get(*index), *value));
            other.join().unwrap();
            mine.iter().for_each(|(index, _)| model.give(*index));
            let all = [(); 3].map(|()| model.take(1));
            assert!(all[0].is_some() && all[1].is_some() && all[0] != all[1] && all[2].is_none(), "{all:?}");
        });
    }

    #[test]
    fn an_id_that_two_complete_is_one_thread_s() {
        model(|| {
            let model = Model::new();
            let index = model.take(5).unwrap();
            let id = model.word(index).depart(1);
            let land = move |model: &Model| match model.land(index, id) {
                Landing::Last => {
                    assert_eq!(model.get(index), 5);
                    model.give(index);
                    true
                }
                _ => false,
            };
            let other = thread::spawn({
                let model = model.clone();
                move || land(&model)
            });
            let mine = land(&model);
            assert!(mine != other.join().unwrap());
            assert_eq!(model.land(index, id), Landing::Unknown);
        });
    }

    #[test]
    fn the_last_of_several_completions_finds_what_the_others_did() {
        model(|| {
            let model = Model::new();
            let index = model.take(0).unwrap();
            let id = model.word(index).depart(2);
            // Each looks at the cargo before its completion; the last writes.
            let land = move |model: &Model| {
                assert_eq!(model.get(index), 0);
                let last = model.land(index, id) == Landing::Last;
                if last {
                    model.set(index, 9);
                }
                last
            };
            let other = thread::spawn({
                let model = model.clone();
                move || land(&model)
            });
            let mine = land(&model);
            assert!(mine != other.join().unwrap());
            assert_eq!(model.get(index), 9);
        });
    }

    #[test]
    fn who_wants_only_the_last_completion_takes_no_other_s() {
        model(|| {
            let model = Model::new();
            let index = model.take(0).unwrap();
            let id = model.word(index).depart(2);
            let other = thread::spawn({
                let model = model.clone();
                move || {
                    let landing = model.word(index).land_last::<()>(id, || Ok(())).unwrap();
                    if landing == Landing::Last {
                        assert_eq!(model.get(index), 0);
                        model.set(index, 9);
                    }
                    landing
                }
            });
            assert_eq!(model.get(index), 0);
            assert_eq!(model.land(index, id), Landing::More(1), "the other has counted what was not its own");
            match other.join().unwrap() {
                Landing::NotTheLast(left) => {
                    assert_eq!(left, 2, "1 is the last");
                    assert_eq!(model.land(index, id), Landing::Last);
                    assert_eq!(model.get(index), 0);
                }
                landing => {
                    assert_eq!((landing, model.land(index, id)), (Landing::Last, Landing::Unknown));
                }
            }
        });
    }

    #[test]
    fn a_flight_that_is_reclaimed_while_it_lands_is_one_thread_s() {
        model(|| {
            let model = Model::new();
            let index = model.take(3).unwrap();
            let id = model.word(index).depart(1);
            let other = thread::spawn({
                let model = model.clone();
                move || {
                    let seized = model.word(index).seize(|| true);
                    if seized {
                        assert_eq!(model.get(index), 3);
                        model.give(index);
                    }
                    seized
                }
            });
            let landed = model.land(index, id) == Landing::Last;
            if landed {
                assert_eq!(model.get(index), 3);
                model.set(index, 4);
            }
            assert!(landed != other.join().unwrap());
        });
    }

    #[test]
    fn the_next_flight_in_a_slot_is_not_reclaimed_for_the_one_before() {
        model(|| {
            let model = Model::new();
            // Whose device it is, as the slots have it: written before the flight is aboard.
            let device = Arc::new(AtomicU64::new(1));
            let index = model.take(1).unwrap();
            model.word(index).leak();
            let other = thread::spawn({
                let (model, device) = (model.clone(), device.clone());
                move || {
                    let seized = model.word(index).seize(|| device.load(Relaxed) == 1);
                    if seized {
                        assert_eq!(model.get(index), 1, "the flight of another device");
                    }
                    seized
                }
            });
            if model.word(index).seize(|| device.load(Relaxed) == 1) {
                model.give(index);
                // The list gives it again.
                assert_eq!(model.free.pop(|index| model.word(index)), Some(index));
                model.set(index, 2);
                device.store(2, Relaxed);
                model.word(index).board();
                model.word(index).leak();
                assert!(!other.join().unwrap());
            } else {
                assert!(other.join().unwrap());
            }
        });
    }
}
