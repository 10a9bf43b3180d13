//! Who uses a device now: the count for which a detach waits, and whether the device is lost. Uses `sync`, and the futex of `os`.
//!
//! One word for each column of devices:
//!
//! ```text
//! bits  0..28  holds: whoever has one has a work request under way, or a memory window
//! bits 28..41  drainers: threads that are detaching the device from a heap; while there is one, nobody gets a hold
//! bit  41      open: the device is attached to a heap
//! bit  42      lost: nobody gets a hold any more, and nobody waits for those there are
//! bits 43..64  the low bits of the device's generation
//! ```
//!
//! It is one word, so either a hold comes before a drainer, who then sees it, or after, and is refused. The bits below the
//! generation are all zero before the next device is opened in the column: a hold that never ends (its work request was lost
//! with the device) keeps the column, and is counted for ever.

use crate::os;
use crate::sync::Atomic64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

const HOLDS: u64 = (1 << 28) - 1;
const DRAINER: u64 = 1 << 28;
const DRAINERS: u64 = ((1 << 13) - 1) << 28;
const OPEN: u64 = 1 << 41;
const LOST: u64 = 1 << 42;
const GENERATION: u32 = 43;

/// Why a device cannot be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HoldError {
    /// The device has been detached.
    Detached,
    /// A thread is detaching the device, and waits for the holds there are. If it gives up, there are holds again.
    Detaching,
    /// The device is lost ([`Device::mark_lost`](crate::Device::mark_lost)): nothing that is begun on it would end.
    Lost,
    /// The device has as many holds as can be counted.
    TooMany {
        /// How many that is.
        limit: usize,
    },
}

impl core::fmt::Display for HoldError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Detached => f.write_str("the device has been detached"),
            Self::Detaching => {
                f.write_str("the device is being detached: what is under way may end, nothing may begin")
            }
            Self::Lost => f.write_str("the device is lost; detach it, and attach it anew when it is back"),
            Self::TooMany { limit } => write!(f, "the device is held {limit} times, which is as far as is counted"),
        }
    }
}

impl std::error::Error for HoldError {}

/// The room in which drainers wait until they are woken: a count of calls, on which they sleep. Generic so that the model runs
/// the same code.
///
/// No wake is missed: who waits reads the count, looks whether what it waits for is so, and sleeps while the count is what it
/// was; who wakes has done what is waited for before it counts.
pub(crate) trait Room {
    /// How often it was called.
    fn calls(&self) -> u32;
    /// Counts a call, and wakes all who sleep.
    fn wake(&self);
    /// Sleeps while so many calls were made, for so long at most. May return early.
    fn sleep_while(&self, calls: u32, at_most: Option<Duration>);

    /// Waits until `done`, or the deadline; `None`: as long as it takes. What `done` said last.
    fn wait(&self, deadline: Option<Instant>, mut done: impl FnMut() -> bool) -> bool {
        loop {
            let calls = self.calls();
            if done() {
                return true;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return false;
            }
            self.sleep_while(calls, left);
        }
    }
}

/// The one room of the process: detaching is rare, so it serves all devices. Nothing in it that a child of fork could find
/// locked.
#[derive(Debug)]
pub(crate) struct OneRoom(AtomicU32);

pub(crate) static ROOM: OneRoom = OneRoom(AtomicU32::new(0));

impl Room for OneRoom {
    fn calls(&self) -> u32 {
        self.0.load(Acquire)
    }

    fn wake(&self) {
        self.0.fetch_add(1, Release);
        os::wake_all(&self.0);
    }

    fn sleep_while(&self, calls: u32, at_most: Option<Duration>) {
        os::sleep_while(&self.0, calls, at_most);
    }
}

/// Why a device could not be drained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Busy {
    /// It is attached to no heap any more.
    Detached,
    /// It has so many holds.
    Held(usize),
}

/// The word. Generic so that the model runs the same code.
#[derive(Debug)]
pub(crate) struct Holds<A = AtomicU64>(A);

impl Holds<AtomicU64> {
    /// Of a column that has no device.
    pub(crate) const fn none() -> Holds {
        Holds(AtomicU64::new(0))
    }
}

/// Whether the word is of the device of this generation.
fn is_of(word: u64, generation: u32) -> bool {
    word >> GENERATION == (u64::from(generation) << GENERATION) >> GENERATION
}

// Changes are AcqRel: what is done with a hold happens before the device is taken away, and what a device's next user finds
// happens after.
impl<A: Atomic64> Holds<A> {
    fn update<E>(&self, change: impl Fn(u64) -> Result<u64, E>) -> Result<u64, E> {
        let mut old = self.0.load(Relaxed);
        loop {
            match self.0.compare_exchange_weak(old, change(old)?, AcqRel, Relaxed) {
                Ok(_) => return Ok(old),
                Err(found) => old = found,
            }
        }
    }

    /// Whether the column can be given to another device: nobody holds or drains the one it had.
    pub(crate) fn is_quiet(&self) -> bool {
        self.0.load(Acquire) & (HOLDS | DRAINERS) == 0
    }

    /// A device is attached, in a column that is quiet.
    pub(crate) fn open(&self, generation: u32) {
        let _ = self.update::<()>(|_| Ok(OPEN | u64::from(generation) << GENERATION));
    }

    /// The device is attached nowhere any more. Holds that are left are counted on.
    pub(crate) fn close(&self) {
        let _ = self.update::<()>(|word| Ok(word & !OPEN));
    }

    /// Counts a hold, if the device of this generation may be held.
    pub(crate) fn hold(&self, generation: u32) -> Result<(), HoldError> {
        let counted = self.update(|word| match word {
            _ if word & OPEN == 0 || !is_of(word, generation) => Err(HoldError::Detached),
            _ if word & LOST != 0 => Err(HoldError::Lost),
            _ if word & DRAINERS != 0 => Err(HoldError::Detaching),
            _ if word & HOLDS == HOLDS => Err(HoldError::TooMany { limit: HOLDS as usize }),
            _ => Ok(word + 1),
        });
        counted.map(drop)
    }

    /// Counts a hold less; wakes drainers after the last.
    pub(crate) fn release(&self, room: &impl Room) {
        let before = self.0.fetch_sub(1, AcqRel);
        debug_assert!(before & HOLDS != 0);
        if before & HOLDS == 1 && before & DRAINERS != 0 {
            room.wake();
        }
    }

    /// Waits until nobody holds the device of this generation, or it is lost or detached, or `deadline` has come (`None`:
    /// never). `Ok`: from here on nobody gets a hold until [`end_drain`](Self::end_drain). Else the device is as it was.
    pub(crate) fn drain(&self, generation: u32, room: &impl Room, deadline: Option<Instant>) -> Result<(), Busy> {
        let held = |word: u64| Busy::Held((word & HOLDS) as usize);
        self.update(|word| match word {
            _ if word & OPEN == 0 || !is_of(word, generation) => Err(Busy::Detached),
            _ if word & DRAINERS == DRAINERS => Err(held(word)),
            _ => Ok(word + DRAINER),
        })?;
        let free = |word: u64| word & HOLDS == 0 || word & LOST != 0 || word & OPEN == 0;
        if room.wait(deadline, || free(self.0.load(Acquire))) {
            return Ok(());
        }
        // The last hold may have gone since.
        match self.update(|word| if free(word) { Err(()) } else { Ok(word - DRAINER) }) {
            Ok(word) => Err(held(word)),
            Err(()) => {
                // After what was done with the holds. (The model fails without it.)
                self.0.load(Acquire);
                Ok(())
            }
        }
    }

    /// The drainer is done.
    pub(crate) fn end_drain(&self) {
        let before = self.0.fetch_sub(DRAINER, AcqRel);
        debug_assert!(before & DRAINERS != 0);
    }

    /// The device of this generation is lost: nobody waits for its holds any more.
    pub(crate) fn lose(&self, generation: u32, room: &impl Room) {
        let lose = |word| if word & OPEN != 0 && is_of(word, generation) { Ok(word | LOST) } else { Err(()) };
        if self.update(lose).is_ok() {
            room.wake();
        }
    }

    /// Whether the device of this generation is lost. Until the column has another, this is known of one that is detached.
    pub(crate) fn is_lost(&self, generation: u32) -> bool {
        let word = self.0.load(Acquire);
        word & LOST != 0 && is_of(word, generation)
    }

    /// Whether the device that the column has, or had last, is lost.
    pub(crate) fn has_lost(&self) -> bool {
        self.0.load(Acquire) & LOST != 0
    }

    /// Whether the device of this generation is attached to a heap.
    pub(crate) fn is_open(&self, generation: u32) -> bool {
        let word = self.0.load(Acquire);
        word & OPEN != 0 && is_of(word, generation)
    }

    /// How many holds the device of this generation has; those that outlived its attachment too.
    pub(crate) fn count(&self, generation: u32) -> usize {
        let word = self.0.load(Acquire);
        if is_of(word, generation) { (word & HOLDS) as usize } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_generation_gets_no_hold_and_loses_nothing() {
        let holds = Holds::none();
        assert_eq!(holds.hold(0), Err(HoldError::Detached));
        holds.open(7);
        assert_eq!(holds.hold(5), Err(HoldError::Detached));
        holds.lose(5, &ROOM);
        holds.hold(7).unwrap();
        assert!(!holds.is_quiet());
        assert_eq!((holds.count(7), holds.count(5), holds.is_lost(7)), (1, 0, false));
        holds.close();
        assert_eq!((holds.hold(7), holds.count(7)), (Err(HoldError::Detached), 1));
        holds.release(&ROOM);
        assert!(holds.is_quiet());
    }

    #[test]
    fn a_refused_drain_leaves_no_trace() {
        let holds = Holds::none();
        holds.open(1);
        holds.hold(1).unwrap();
        assert_eq!(holds.drain(3, &ROOM, None), Err(Busy::Detached));
        assert_eq!(holds.drain(1, &ROOM, Some(Instant::now())), Err(Busy::Held(1)));
        holds.hold(1).unwrap();
        assert_eq!(holds.count(1), 2);
        holds.lose(1, &ROOM);
        holds.drain(1, &ROOM, None).unwrap();
        assert_eq!((holds.hold(1), holds.count(1), holds.is_quiet()), (Err(HoldError::Lost), 2, false));
        holds.end_drain();
    }

    #[test]
    fn the_parts_of_the_word_do_not_meet() {
        let parts = [HOLDS, DRAINERS, OPEN, LOST, u64::MAX << GENERATION];
        assert_eq!(parts.iter().fold(0, |all, part| all ^ part), u64::MAX);
        assert_eq!(parts.iter().map(|part| part.count_ones()).sum::<u32>(), 64);
    }
}

/// The models: every interleaving of small scripts, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use loom::cell::Cell;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// The kernel compares the count under a lock that who wakes takes.
    #[derive(Default)]
    struct LoomRoom {
        calls: loom::sync::atomic::AtomicU32,
        kernel: Mutex<()>,
        woken: Condvar,
    }

    impl Room for LoomRoom {
        fn calls(&self) -> u32 {
            self.calls.load(Acquire)
        }

        fn wake(&self) {
            self.calls.fetch_add(1, Release);
            let _kernel = self.kernel.lock().unwrap();
            self.woken.notify_all();
        }

        fn sleep_while(&self, calls: u32, at_most: Option<Duration>) {
            assert!(at_most.is_none(), "the models' deadlines are over: loom knows no clock");
            let kernel = self.kernel.lock().unwrap();
            if self.calls.load(Acquire) == calls {
                drop(self.woken.wait(kernel).unwrap());
            }
        }
    }

    /// A device: registered or not. loom's cell reports a use that is not ordered with the end of the registration.
    struct Model {
        holds: Holds<AtomicU64>,
        room: LoomRoom,
        registered: Cell<bool>,
    }

    impl Model {
        fn attached() -> Arc<Model> {
            let holds = Holds(AtomicU64::new(0));
            holds.open(1);
            Arc::new(Model { holds, room: LoomRoom::default(), registered: Cell::new(true) })
        }

        /// A work request, from post to completion. Whether it was begun.
        fn fly(&self) -> bool {
            let held = self.holds.hold(1).is_ok();
            if held {
                assert!(self.registered.get(), "a flight on a device that is detached");
                self.holds.release(&self.room);
            }
            held
        }

        fn detach(&self, deadline: Option<Instant>) -> bool {
            let drained = self.holds.drain(1, &self.room, deadline).is_ok();
            if drained {
                self.registered.set(false);
                self.holds.close();
                self.holds.end_drain();
            }
            drained
        }
    }

    fn model(script: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(script);
    }

    fn flying(model: &Arc<Model>) -> thread::JoinHandle<bool> {
        let model = model.clone();
        thread::spawn(move || model.fly())
    }

    #[test]
    fn a_detach_that_waits_is_woken_and_ends_no_registration_under_a_flight() {
        model(|| {
            let model = Model::attached();
            let flights = [flying(&model), flying(&model)];
            assert!(model.detach(None));
            flights.into_iter().for_each(|flight| {
                flight.join().unwrap();
            });
            assert!(model.holds.is_quiet());
            assert!(!model.fly());
        });
    }

    #[test]
    fn a_detach_that_does_not_wait_is_refused_or_done_and_a_refused_one_leaves_the_device_as_it_was() {
        model(|| {
            let model = Model::attached();
            let flight = flying(&model);
            let detached = model.detach(Some(Instant::now()));
            let flown = flight.join().unwrap();
            assert!(detached || flown, "refused, and nobody held the device");
            assert_eq!(model.fly(), !detached);
            assert_eq!(model.registered.get(), !detached);
        });
    }

    #[test]
    fn a_detach_that_waits_for_what_never_ends_is_woken_by_the_loss() {
        model(|| {
            let model = Model::attached();
            model.holds.hold(1).unwrap();
            let detacher = {
                let model = model.clone();
                thread::spawn(move || model.detach(None))
            };
            model.holds.lose(1, &model.room);
            assert!(detacher.join().unwrap());
            assert_eq!((model.holds.count(1), model.holds.is_quiet()), (1, false));
        });
    }
}
