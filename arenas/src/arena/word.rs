//! The state of an arena in one atomic word. Uses `sync`.
//!
//! ```text
//! bits  0..3   state
//! bit   3      pinned: registered, or about to be; nothing may be purged
//! bit   4      kept: a deregistration failed; never to be closed
//! bits  8..24  purgers: threads that are giving pages of free slices back to the kernel
//! bits 32..64  live spans
//!
//! Vacant -> Opening -> Live -> Closing -> Vacant          Closing -> Stuck, when a deregistration fails
//! ```
//!
//! It changes only when a span is taken or given back, never for a block. What must hold:
//!
//! - a span is only taken from a Live arena, and an arena only leaves Live when it has no live span and no purger;
//! - `pinned` and `purgers > 0` never hold together once [`Word::pin`] has returned.

use crate::sync::Atomic64;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// Where an arena is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum State {
    /// No memory.
    Vacant = 0,
    /// Being mapped and registered; spans cannot be taken yet.
    Opening = 1,
    /// Spans can be taken.
    Live = 2,
    /// Empty, being deregistered and unmapped.
    Closing = 3,
    /// Empty, but a device would not let go: the memory is kept for ever.
    Stuck = 4,
}

const STATE: u64 = 0b111;
const PINNED: u64 = 1 << 3;
const KEPT: u64 = 1 << 4;
const PURGER: u64 = 1 << 8;
const PURGERS: u64 = 0xffff << 8;
const SPAN: u64 = 1 << 32;

/// The word. Generic so that the models run the same code.
#[derive(Debug, Default)]
pub(crate) struct Word<A = AtomicU64>(pub(crate) A);

// All successful changes are AcqRel: each step of an arena's life happens after the one before it, whoever does them.
impl<A: Atomic64> Word<A> {
    fn update(&self, change: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut old = self.0.load(Relaxed);
        loop {
            let Some(new) = change(old) else { return Err(old) };
            match self.0.compare_exchange_weak(old, new, AcqRel, Relaxed) {
                Ok(_) => return Ok(new),
                Err(found) => old = found,
            }
        }
    }

    fn state_bits(word: u64) -> State {
        match word & STATE {
            1 => State::Opening,
            2 => State::Live,
            3 => State::Closing,
            4 => State::Stuck,
            _ => State::Vacant,
        }
    }

    /// The state now.
    pub(crate) fn state(&self) -> State {
        Self::state_bits(self.0.load(Acquire))
    }

    /// How many spans are taken now.
    pub(crate) fn live_spans(&self) -> usize {
        (self.0.load(Acquire) / SPAN) as usize
    }

    /// Whether the arena is registered, or about to be.
    pub(crate) fn is_pinned(&self) -> bool {
        self.0.load(Acquire) & PINNED != 0
    }

    /// Whether the arena must never be closed.
    pub(crate) fn is_kept(&self) -> bool {
        self.0.load(Acquire) & KEPT != 0
    }

    /// Vacant to Opening. Only the opener of the arena's chunks calls it.
    pub(crate) fn begin_open(&self) -> bool {
        self.update(|word| (Self::state_bits(word) == State::Vacant).then_some(State::Opening as u64)).is_ok()
    }

    /// Opening to Live; to Vacant when opening failed, to Stuck when it failed and a device would not let go.
    pub(crate) fn end_open(&self, state: State, pinned: bool) -> bool {
        let new = state as u64 | if pinned { PINNED } else { 0 };
        self.update(|word| (Self::state_bits(word) == State::Opening).then_some(new)).is_ok()
    }

    /// Counts a span more, if the arena is Live and not kept. While it is counted, the arena stays Live.
    pub(crate) fn take_span(&self) -> bool {
        self.update(|word| (word & (STATE | KEPT) == State::Live as u64).then_some(word + SPAN)).is_ok()
    }

    /// Counts a span less; its slices are free already. Whether it was the last. After this the arena may be gone.
    ///
    /// `last` is called before the last span is uncounted (and, when others meddle, now and then in vain): what it notes is
    /// seen by whoever finds the arena empty. What it notes is too old by as long as this thread is stopped after it, while
    /// others take a span and give it back.
    pub(crate) fn give_span(&self, last: impl Fn()) -> bool {
        let given = self.update(|word| {
            debug_assert!(word >= SPAN && word & STATE == State::Live as u64);
            if word / SPAN == 1 {
                last();
            }
            Some(word - SPAN)
        });
        given.is_ok_and(|word| word < SPAN)
    }

    /// Live and empty to Closing: from here on no span can be taken.
    pub(crate) fn begin_close(&self) -> bool {
        let new = |word: u64| State::Closing as u64 | word & PINNED;
        self.update(|word| (word & !PINNED == State::Live as u64).then(|| new(word))).is_ok()
    }

    /// Closing to Vacant, or to Stuck for ever.
    pub(crate) fn end_close(&self, state: State) -> bool {
        self.update(|word| (Self::state_bits(word) == State::Closing).then_some(state as u64)).is_ok()
    }

    /// Forbids purging, and waits for the purgers there are, by `wait`.
    pub(crate) fn pin(&self, mut wait: impl FnMut()) {
        let _ = self.update(|word| Some(word | PINNED));
        while self.0.load(Acquire) & PURGERS != 0 {
            wait();
        }
    }

    /// Allows purging again: no device has the arena registered any more.
    pub(crate) fn unpin(&self) {
        let _ = self.update(|word| Some(word & !PINNED));
    }

    /// Marks the arena as never to be closed.
    pub(crate) fn keep(&self) {
        let _ = self.update(|word| Some(word | KEPT));
    }

    /// In a child of fork: no thread gives its pages back.
    pub(crate) fn forget_purgers(&self) {
        let _ = self.update(|word| Some(word & !PURGERS));
    }

    /// Counts a purger, if the arena is Live and not pinned. While it is counted, the arena is neither closed nor registered.
    pub(crate) fn begin_purge(&self) -> bool {
        let may = |word: u64| Self::state_bits(word) == State::Live && word & PINNED == 0 && word & PURGERS != PURGERS;
        self.update(|word| may(word).then_some(word + PURGER)).is_ok()
    }

    /// Counts a purger less.
    pub(crate) fn end_purge(&self) {
        let old = self.0.fetch_sub(PURGER, AcqRel);
        debug_assert!(old & PURGERS != 0);
    }
}

/// Models: every interleaving of small scripts, by loom, over the same code that runs in the program.
#[cfg(test)]
mod models {
    use super::*;
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    /// Runs every interleaving with at most three preemptions, which is where the faults of such protocols show (and beyond
    /// which three threads and a spin take minutes).
    fn model(script: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(script);
    }

    /// An arena as the model sees it: memory that is there or not, registered or not. loom's cells report any access that
    /// is not ordered with a change of them.
    struct Model {
        word: Word<AtomicU64>,
        mapped: Cell<bool>,
        registered: Cell<bool>,
        role: loom::sync::Mutex<()>,
    }

    impl Model {
        fn live() -> Arc<Model> {
            let word = Word(AtomicU64::new(0));
            assert!(word.begin_open() && word.end_open(State::Live, false));
            let role = loom::sync::Mutex::new(());
            Arc::new(Model { word, mapped: Cell::new(true), registered: Cell::new(false), role })
        }

        fn close(&self) -> bool {
            let _role = self.role.lock().unwrap();
            if !self.word.begin_close() {
                return false;
            }
            self.registered.set(false);
            self.mapped.set(false);
            assert!(self.word.end_close(State::Vacant));
            true
        }

        fn attach(&self) {
            let _role = self.role.lock().unwrap();
            if self.word.state() != State::Live {
                return;
            }
            self.word.pin(thread::yield_now);
            assert!(self.mapped.get());
            self.registered.set(true);
        }

        fn open(&self) {
            let _role = self.role.lock().unwrap();
            if self.word.begin_open() {
                self.mapped.set(true);
                self.registered.set(true);
                assert!(self.word.end_open(State::Live, true));
            }
        }

        /// Takes a span, uses it, gives it back.
        fn use_span(&self) -> bool {
            let taken = self.word.take_span();
            if taken {
                assert!(self.mapped.get(), "span in memory that is gone");
                self.word.give_span(|| {});
            }
            taken
        }

        fn purge(&self) -> bool {
            let may = self.word.begin_purge();
            if may {
                assert!(self.mapped.get(), "purge of memory that is gone");
                assert!(!self.registered.get(), "purge of pinned memory");
                self.word.end_purge();
            }
            may
        }
    }

    #[test]
    fn close_against_take_and_give() {
        model(|| {
            let model = Model::live();
            let user = thread::spawn({
                let model = model.clone();
                move || model.use_span()
            });
            let closed = model.close();
            let used = user.join().unwrap();
            assert!(closed || used, "an empty arena that nobody used was not closed");
            assert_eq!(model.word.state(), if closed { State::Vacant } else { State::Live });
            assert_eq!(model.word.live_spans(), 0);
        });
    }

    #[test]
    fn an_arena_with_a_live_span_is_never_closed() {
        model(|| {
            let model = Model::live();
            assert!(model.word.take_span());
            let closer = thread::spawn({
                let model = model.clone();
                move || model.close()
            });
            model.use_span();
            assert!(!closer.join().unwrap());
            model.word.give_span(|| {});
            assert!(model.close());
        });
    }

    #[test]
    fn who_finds_an_arena_empty_finds_when_it_became_so() {
        model(|| {
            let word = Word(AtomicU64::new(0));
            assert!(word.begin_open() && word.end_open(State::Live, false));
            assert!(word.take_span() && word.take_span());
            let shared = Arc::new((word, AtomicU64::new(0)));
            let givers = [(); 2].map(|()| {
                let shared = shared.clone();
                thread::spawn(move || shared.0.give_span(|| shared.1.store(1, Relaxed)))
            });
            if shared.0.live_spans() == 0 {
                assert_eq!(shared.1.load(Relaxed), 1, "empty, and nobody has noted it");
            }
            let last = givers.map(|giver| giver.join().unwrap());
            assert!(last[0] ^ last[1], "one of them gave the last");
            assert_eq!(shared.1.load(Relaxed), 1);
        });
    }

    #[test]
    fn attach_against_purge_and_take() {
        model(|| {
            let model = Model::live();
            let purger = thread::spawn({
                let model = model.clone();
                move || model.purge()
            });
            let user = thread::spawn({
                let model = model.clone();
                move || model.use_span()
            });
            model.attach();
            assert!(!model.purge(), "purged after attach");
            purger.join().unwrap();
            assert!(user.join().unwrap());
            assert!(model.registered.get());
        });
    }

    #[test]
    fn attach_against_close_and_purge() {
        model(|| {
            let model = Model::live();
            let closer = thread::spawn({
                let model = model.clone();
                move || model.close()
            });
            let purger = thread::spawn({
                let model = model.clone();
                move || model.purge()
            });
            model.attach();
            let closed = closer.join().unwrap();
            let purged = purger.join().unwrap();
            assert!(closed || purged, "only a purger may keep an empty arena open");
            let (mapped, registered) = (model.mapped.get(), model.registered.get());
            assert_eq!((mapped, registered), (!closed, !closed), "registered exactly when it is there");
        });
    }

    #[test]
    fn attach_against_close_and_open() {
        model(|| {
            let model = Model::live();
            let other = thread::spawn({
                let model = model.clone();
                move || {
                    model.close();
                    model.open();
                    assert!(model.use_span());
                }
            });
            model.attach();
            model.use_span();
            other.join().unwrap();
            assert!(model.registered.get());
        });
    }
}
