//! A lock of one word that many may have for reading, or one for writing. Uses the futex of `os`.
//!
//! As `lock` it knows no poison, and can be held over a fork without a guard.
//!
//! ```text
//! bits 0..31  readers
//! bit  31     a writer has it, or waits for the readers to go; no reader comes in meanwhile
//! ```
//!
//! Who must wait sleeps while the word is what it was when they looked. A writer that is done wakes all, and the last reader
//! to go wakes all if a writer waits: those who still must wait lie down again. Writers are few, so that is cheap enough.

use crate::os;
use core::cell::UnsafeCell;
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, Ordering};

const WRITER: u32 = 1 << 31;

/// How often a reader looks again before it sleeps.
const SPINS: u32 = 100;

/// The word's operations; what the model swaps.
trait Word {
    fn load(&self, order: Ordering) -> u32;
    /// Replaces `old` by `new`, acquiring. May fail for no reason.
    fn replace(&self, old: u32, new: u32) -> bool;
    /// Subtracts, releasing; what there was.
    fn subtract(&self, less: u32) -> u32;
    /// Sleeps while the word is `value`. May return early.
    fn sleep_while(&self, value: u32);
    /// Wakes all who sleep.
    fn wake_all(&self);
    fn spins() -> u32;
}

impl Word for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    #[inline]
    fn replace(&self, old: u32, new: u32) -> bool {
        self.compare_exchange_weak(old, new, Acquire, Relaxed).is_ok()
    }
    #[inline]
    fn subtract(&self, less: u32) -> u32 {
        self.fetch_sub(less, Release)
    }
    fn sleep_while(&self, value: u32) {
        os::sleep_while(self, value, None);
    }
    fn wake_all(&self) {
        os::wake_all(self);
    }
    fn spins() -> u32 {
        SPINS
    }
}

#[inline]
fn begin_read(word: &impl Word) {
    let seen = word.load(Relaxed);
    if seen & WRITER != 0 || !word.replace(seen, seen + 1) {
        begin_read_contended(word);
    }
}

#[cold]
fn begin_read_contended<W: Word>(word: &W) {
    let mut spins = 0;
    loop {
        let seen = word.load(Relaxed);
        if seen & WRITER == 0 {
            if word.replace(seen, seen + 1) {
                return;
            }
        } else if spins < W::spins() {
            spins += 1;
            core::hint::spin_loop();
        } else {
            word.sleep_while(seen);
        }
    }
}

#[inline]
fn end_read(word: &impl Word) {
    if word.subtract(1) == WRITER + 1 {
        word.wake_all();
    }
}

fn begin_write(word: &impl Word) {
    loop {
        let seen = word.load(Relaxed);
        if seen & WRITER != 0 {
            word.sleep_while(seen);
        } else if word.replace(seen, seen | WRITER) {
            break;
        }
    }
    loop {
        match word.load(Acquire) {
            WRITER => return,
            seen => word.sleep_while(seen),
        }
    }
}

fn end_write(word: &impl Word) {
    word.subtract(WRITER);
    word.wake_all();
}

/// See the module.
pub(crate) struct SharedLock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one writer, or by readers that only read; handed on with release and acquire.
unsafe impl<T: Send + Sync> Sync for SharedLock<T> {}

/// A [`SharedLock`] that is held for reading.
#[must_use]
pub(crate) struct ReadGuard<'a, T> {
    lock: &'a SharedLock<T>,
}

/// A [`SharedLock`] that is held for writing.
#[must_use]
pub(crate) struct WriteGuard<'a, T> {
    lock: &'a SharedLock<T>,
}

impl<T> SharedLock<T> {
    /// An open lock around `value`.
    pub(crate) const fn new(value: T) -> SharedLock<T> {
        SharedLock { word: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock, to read. A thread that has it for reading must not ask again.
    #[inline]
    pub(crate) fn read(&self) -> ReadGuard<'_, T> {
        begin_read(&self.word);
        ReadGuard { lock: self }
    }

    /// Waits for the lock, to write.
    pub(crate) fn write(&self) -> WriteGuard<'_, T> {
        begin_write(&self.word);
        WriteGuard { lock: self }
    }

    /// Waits for the lock as a writer does, and keeps it without a guard: over a fork.
    pub(crate) fn hold(&self) -> &T {
        begin_write(&self.word);
        // SAFETY: this thread has the lock, until `release`, which it calls with no reference left.
        unsafe { &*self.value.get() }
    }

    /// What a held lock guards.
    ///
    /// # Safety
    ///
    /// As [`release`](Self::release); and the reference is gone when that is called.
    pub(crate) unsafe fn held(&self) -> &T {
        // SAFETY: this thread has the lock.
        unsafe { &*self.value.get() }
    }

    /// Makes it an open lock, whoever had it. What it guards is as it was.
    ///
    /// # Safety
    ///
    /// Nobody has the lock, or who had it is a thread that this process, a child of fork, does not have; and this is its only
    /// thread. What it guards is whole.
    #[cfg(feature = "verbs")]
    pub(crate) unsafe fn renew(&self) {
        self.word.store(0, Release);
    }

    /// Opens a lock that [`hold`](Self::hold) has taken.
    ///
    /// # Safety
    ///
    /// This thread has taken it so (or, in a child of fork, the thread of which it is a copy), and has not opened it since.
    pub(crate) unsafe fn release(&self) {
        end_write(&self.word);
    }
}

impl<T> Drop for ReadGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        end_read(&self.lock.word);
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        end_write(&self.lock.word);
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock, so nobody writes.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock alone.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> fmt::Debug for SharedLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedLock").field("word", &self.word.load(Relaxed)).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_see_what_a_writer_has_done_whole_or_not_at_all() {
        const TURNS: u64 = 5_000;
        let lock = SharedLock::new((0, 0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        let mut both = lock.write();
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        let both = lock.read();
                        assert_eq!(both.0, both.1);
                    }
                });
            }
        });
        assert_eq!(*lock.read(), (2 * TURNS, 2 * TURNS));
        let first = lock.read();
        // A second reader does not wait for the first.
        assert_eq!(std::thread::scope(|scope| scope.spawn(|| lock.read().0).join().unwrap()), first.0);
    }
}

/// The model; the futex as in `lock`'s. Who is never woken is a deadlock, which loom reports.
#[cfg(test)]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    struct Loom {
        word: AtomicU32,
        kernel: Mutex<()>,
        woken: Condvar,
    }

    impl Word for Loom {
        fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }
        fn replace(&self, old: u32, new: u32) -> bool {
            self.word.compare_exchange(old, new, Acquire, Relaxed).is_ok()
        }
        fn subtract(&self, less: u32) -> u32 {
            self.word.fetch_sub(less, Release)
        }
        fn sleep_while(&self, value: u32) {
            let kernel = self.kernel.lock().unwrap();
            if self.word.load(SeqCst) == value {
                drop(self.woken.wait(kernel).unwrap());
            }
        }
        fn wake_all(&self) {
            let _kernel = self.kernel.lock().unwrap();
            self.woken.notify_all();
        }
        fn spins() -> u32 {
            0
        }
    }

    type Shared = (Loom, UnsafeCell<u32>);

    fn add(shared: &Shared) {
        begin_write(&shared.0);
        // SAFETY: the lock is held; loom reports two who touch the cell at once.
        shared.1.with_mut(|value| unsafe { *value += 1 });
        end_write(&shared.0);
    }

    fn read(shared: &Shared) -> u32 {
        begin_read(&shared.0);
        // SAFETY: as above, of a writer and a reader.
        let value = shared.1.with(|value| unsafe { *value });
        end_read(&shared.0);
        value
    }

    fn check(others: [fn(&Shared); 2], mine: fn(&Shared), writers: u32) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let word = Loom { word: AtomicU32::new(0), kernel: Mutex::new(()), woken: Condvar::new() };
            let shared = Arc::new((word, UnsafeCell::new(0)));
            let threads = others.map(|other| {
                let shared = shared.clone();
                thread::spawn(move || other(&shared))
            });
            mine(&shared);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(read(&shared), writers);
        });
    }

    fn look(shared: &Shared) {
        read(shared);
    }

    #[test]
    fn a_writer_is_alone_and_nobody_sleeps_for_ever() {
        check([look, look], add, 1);
        check([look, add], add, 2);
    }
}
