//! How a heap's maintainer sleeps, and who uses the heap wakes it: one word. Uses the futex of `os`.
//!
//! ```text
//! bit 0  there is a maintainer
//! bit 1  it listens: it wants to be told when anybody does anything that could let an arena run empty
//! bit 2  touched: somebody has, since it listens
//! bit 3  called: there is something to do now
//! bit 4  stop
//! ```
//!
//! Who uses the heap reads the word, which seldom changes; only the first touch after the maintainer has begun to listen
//! writes it and calls the system. So a program that is idle is left alone for ever, and one that is busy pays one load.
//!
//! No touch is missed: who touches does so after what it tells of, and the maintainer looks after it began to listen. Between
//! the two steps of each there is a lock that both take (a cache's gate, a shard's lock), or a fence on both sides
//! ([`Bell::touch_after_fence`]), or a light barrier there and the heavy one of the maintainer's pass here.

use crate::os;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, Ordering, fence};
use core::time::Duration;

const PRESENT: u32 = 1;
const LISTENING: u32 = 1 << 1;
const TOUCHED: u32 = 1 << 2;
const CALLED: u32 = 1 << 3;
const STOP: u32 = 1 << 4;

/// The word's operations; what the model swaps.
pub trait Bits {
    /// Reads it.
    fn load(&self, order: Ordering) -> u32;
    /// Replaces `old` by `new`, or returns what is there. May fail for no reason.
    ///
    /// # Errors
    ///
    /// The value found.
    fn replace(&self, old: u32, new: u32) -> Result<u32, u32>;
    /// A fence between what was done before and what is read after, `SeqCst`.
    fn fence(&self);
    /// Sleeps while the word is `value`, for so long at most. May return early.
    fn sleep(&self, value: u32, at_most: Option<Duration>);
    /// Wakes who sleeps.
    fn wake(&self);
}

impl Bits for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn replace(&self, old: u32, new: u32) -> Result<u32, u32> {
        self.compare_exchange_weak(old, new, AcqRel, Relaxed)
    }
    fn fence(&self) {
        fence(SeqCst);
    }
    fn sleep(&self, value: u32, at_most: Option<Duration>) {
        os::sleep_while(self, value, at_most);
    }
    fn wake(&self) {
        os::wake(self);
    }
}

/// Why a maintainer was woken; nothing of it: the time is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rung {
    /// Somebody has used the heap since the maintainer began to listen; it does not listen any more.
    pub touched: bool,
    /// There is something to do now.
    pub called: bool,
    /// It shall end.
    pub stop: bool,
}

/// See the module. Generic so that the model runs the same code.
#[derive(Debug)]
pub struct Bell<A = AtomicU32>(A);

impl Bell {
    /// Of a heap without a maintainer.
    #[must_use]
    pub const fn new() -> Bell {
        Bell(AtomicU32::new(0))
    }
}

impl Default for Bell {
    fn default() -> Self {
        Bell::new()
    }
}

impl<A: Bits> Bell<A> {
    fn update(&self, change: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        let mut old = self.0.load(Relaxed);
        loop {
            match self.0.replace(old, change(old)?) {
                Ok(_) => return Some(old),
                Err(found) => old = found,
            }
        }
    }

    #[cold]
    fn ring(&self, bit: u32, listening_before: u32) {
        let rung = self.update(|word| {
            let wanted = word & PRESENT != 0 && word & bit == 0 && word & listening_before == listening_before;
            wanted.then_some(word & !listening_before | bit)
        });
        if rung.is_some() {
            self.0.wake();
        }
    }

    /// The heap was used in a way that could let an arena run empty. Costs a load, mostly.
    #[inline]
    pub fn touch(&self) {
        if self.0.load(Relaxed) & LISTENING != 0 {
            self.ring(TOUCHED, LISTENING);
        }
    }

    /// The same, where there is no lock that the maintainer takes too when it looks for what was done.
    #[inline]
    pub fn touch_after_fence(&self) {
        self.0.fence();
        self.touch();
    }

    /// There is something to do now.
    #[inline]
    pub fn call(&self) {
        if self.0.load(Relaxed) & (PRESENT | CALLED) == PRESENT {
            self.ring(CALLED, 0);
        }
    }

    /// A maintainer begins; `false`: there is one.
    pub fn begin(&self) -> bool {
        self.update(|word| (word == 0).then_some(PRESENT)).is_some()
    }

    /// Asks the maintainer to end.
    pub fn stop(&self) {
        self.ring(STOP, 0);
    }

    /// The maintainer has ended.
    pub fn end(&self) {
        self.update(|_| Some(0));
    }

    /// The maintainer listens from now on. It looks for what was done after this.
    pub fn listen(&self) {
        self.update(|word| Some(word & !TOUCHED | LISTENING));
        self.0.fence();
    }

    /// The maintainer sleeps until something happens that it wants to know, for so long at most.
    pub fn wait(&self, at_most: Option<Duration>) -> Rung {
        let any = TOUCHED | CALLED | STOP;
        let seen = self.0.load(Acquire);
        if seen & any == 0 && at_most != Some(Duration::ZERO) {
            self.0.sleep(seen, at_most);
        }
        let word = self.update(|word| Some(word & !(TOUCHED | CALLED))).unwrap_or(0);
        Rung { touched: word & TOUCHED != 0, called: word & CALLED != 0, stop: word & STOP != 0 }
    }

    /// Whether the maintainer listens, that is: has seen all that was done.
    pub fn is_listening(&self) -> bool {
        self.0.load(Acquire) & LISTENING != 0
    }
}

/// The model: every interleaving of small scripts, by loom. A touch that is missed leaves the maintainer asleep for ever, which
/// loom reports as a deadlock.
#[cfg(test)]
mod model {
    use super::*;
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    struct Loom {
        word: AtomicU32,
        lock: Mutex<()>,
        woken: Condvar,
    }

    impl Bits for Loom {
        fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }
        fn replace(&self, old: u32, new: u32) -> Result<u32, u32> {
            self.word.compare_exchange_weak(old, new, AcqRel, Relaxed)
        }
        fn fence(&self) {
            loom::sync::atomic::fence(SeqCst);
        }
        fn sleep(&self, value: u32, _: Option<Duration>) {
            // As the kernel's: compared under the lock that who wakes takes.
            let mut guard = self.lock.lock().unwrap();
            while self.word.load(SeqCst) == value {
                guard = self.woken.wait(guard).unwrap();
            }
        }
        fn wake(&self) {
            let _guard = self.lock.lock().unwrap();
            self.woken.notify_all();
        }
    }

    fn model(script: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(script);
    }

    fn bell() -> Arc<Bell<Loom>> {
        let bell = Bell(Loom { word: AtomicU32::new(0), lock: Mutex::new(()), woken: Condvar::new() });
        assert!(bell.begin() && !bell.begin());
        Arc::new(bell)
    }

    #[test]
    fn what_was_done_is_seen_or_the_maintainer_is_woken() {
        model(|| {
            let shared = Arc::new((bell(), AtomicU32::new(0)));
            let users = [(); 2].map(|()| {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.1.fetch_add(1, Relaxed);
                    shared.0.touch_after_fence();
                })
            });
            let (bell, done) = &*shared;
            loop {
                bell.listen();
                // The look.
                if done.load(Relaxed) == 2 {
                    break;
                }
                bell.wait(None);
            }
            users.into_iter().for_each(|user| user.join().unwrap());
        });
    }

    #[test]
    fn a_call_and_a_stop_are_heard_whatever_else_happens() {
        model(|| {
            let bell = bell();
            let caller = thread::spawn({
                let bell = bell.clone();
                move || {
                    bell.call();
                    bell.touch();
                    bell.stop();
                }
            });
            bell.listen();
            let mut called = false;
            loop {
                let rung = bell.wait(None);
                called |= rung.called;
                if rung.stop {
                    break;
                }
            }
            assert!(called);
            caller.join().unwrap();
        });
    }
}
