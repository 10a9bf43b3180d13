//! A lock of one word. Uses the futex of `os`.
//!
//! The standard library's would do but for two things: it asks at each lock whether the thread panics, for poison that nobody here
//! wants; and it cannot be made anew in a child of `fork`, where the thread that had it is not.
//!
//! ```text
//! 0  open        1  locked        2  locked, and perhaps somebody sleeps
//! ```
//!
//! Who finds it locked makes it 2 before it sleeps, and takes it as 2, since there may be others who sleep; who opens it and
//! finds 2 wakes one of them. So nobody sleeps while it is open: the word was 2 when they lay down (the kernel compares), and
//! whoever changes that wakes.

use crate::os;
use core::cell::UnsafeCell;
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, Ordering};

const OPEN: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// How often who finds the lock taken looks again before it sleeps: what is guarded takes moments.
const SPINS: u32 = 100;

/// The word's operations; what the model swaps.
trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn swap(&self, new: u32, order: Ordering) -> u32;
    /// Makes an open lock locked; whether it was open.
    fn take(&self) -> bool;
    /// Sleeps while the word is `value`. May return early.
    fn sleep_while(&self, value: u32);
    /// Wakes one who sleeps.
    fn wake(&self);
    fn spins() -> u32;
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn swap(&self, new: u32, order: Ordering) -> u32 {
        self.swap(new, order)
    }
    #[inline]
    fn take(&self) -> bool {
        self.compare_exchange(OPEN, LOCKED, Acquire, Relaxed).is_ok()
    }
    fn sleep_while(&self, value: u32) {
        os::sleep_while(self, value, None);
    }
    fn wake(&self) {
        os::wake(self);
    }
    fn spins() -> u32 {
        SPINS
    }
}

#[inline]
fn lock(word: &impl Word) {
    if !word.take() {
        lock_contended(word);
    }
}

#[cold]
fn lock_contended<W: Word>(word: &W) {
    for _ in 0..W::spins() {
        match word.load(Relaxed) {
            OPEN if word.take() => return,
            // Others sleep, so this is not over in moments.
            CONTENDED => break,
            _ => core::hint::spin_loop(),
        }
    }
    while word.swap(CONTENDED, Acquire) != OPEN {
        word.sleep_while(CONTENDED);
    }
}

#[inline]
fn unlock(word: &impl Word) {
    if word.swap(OPEN, Release) == CONTENDED {
        word.wake();
    }
}

/// A mutex without poison: nothing panics while it holds one, and an allocator has nobody to tell. It never allocates. All
/// bytes zero are an open lock around whatever zeros are.
#[repr(C)]
#[derive(Default)]
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time, which the lock sees to, and handed on with release and acquire.
unsafe impl<T: Send> Sync for Lock<T> {}

/// A [`Lock`] that is held.
#[must_use]
pub struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

// SAFETY: a shared guard gives shared references to the value, no more.
unsafe impl<T: Sync> Sync for LockGuard<'_, T> {}

impl<T> Lock<T> {
    /// An open lock around `value`.
    pub const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(OPEN), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_, T> {
        lock(&self.word);
        LockGuard { lock: self }
    }

    /// Waits for the lock, and keeps it without a guard: over a fork, where many are held at once. Opened by
    /// [`release`](Self::release).
    pub fn hold(&self) -> &T {
        lock(&self.word);
        // SAFETY: this thread has the lock.
        unsafe { &*self.value.get() }
    }

    /// What a held lock guards.
    ///
    /// # Safety
    ///
    /// As [`release`](Self::release); and the reference is gone when that is called.
    pub unsafe fn held(&self) -> &T {
        // SAFETY: this thread has the lock.
        unsafe { &*self.value.get() }
    }

    /// Opens a lock that [`hold`](Self::hold) has taken.
    ///
    /// # Safety
    ///
    /// This thread has taken it so (or, in a child of fork, the thread of which it is a copy), and has not opened it since.
    pub unsafe fn release(&self) {
        unlock(&self.word);
    }

    /// Makes it an open lock around `value`, whoever had it. What was in it is not dropped: it may be in any state.
    ///
    /// # Safety
    ///
    /// Nobody has the lock, or who had it is a thread that this process, a child of fork, does not have; and this is its only
    /// thread.
    pub unsafe fn renew(&self, value: T) {
        // SAFETY: nobody has a guard, nor gets one meanwhile, so nobody reaches the value.
        unsafe { self.value.get().write(value) };
        self.word.store(OPEN, Release);
    }

    /// The value, for who has it all to himself: without the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Takes the lock if nobody has it.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        // Not `then_some`: a guard that is made is dropped, and opens the lock that another has.
        self.word.take().then(|| LockGuard { lock: self })
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        unlock(&self.lock.word);
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock, so nobody else reaches the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("locked", &(self.word.load(Relaxed) != OPEN)).finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for LockGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_guarded_is_changed_by_one_at_a_time() {
        const TURNS: u64 = 20_000;
        let lock = Lock::new((0, 0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        let mut both = lock.lock();
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (4 * TURNS, 4 * TURNS));
    }

    #[test]
    fn a_lock_whose_holder_is_gone_can_be_made_anew_and_one_that_is_held_opened() {
        let lock = Lock::new(1);
        core::mem::forget(lock.lock());
        // SAFETY: the guard was forgotten, and nobody else knows the lock.
        unsafe { lock.renew(2) };
        assert_eq!(*lock.lock(), 2);
        lock.hold();
        assert!(lock.try_lock().is_none());
        // SAFETY: held above.
        unsafe { lock.release() };
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn a_lock_that_is_taken_is_not_taken_again_nor_opened_by_who_tries() {
        let lock = Lock::new(());
        let guard = lock.lock();
        assert!(lock.try_lock().is_none() && lock.try_lock().is_none());
        drop(guard);
        assert!(lock.try_lock().is_some());
    }
}

/// The model. The futex is a lock and a condition variable: the kernel, too, compares the word under a lock that who wakes takes.
/// Who is never woken is a deadlock, which loom reports.
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
        fn swap(&self, new: u32, order: Ordering) -> u32 {
            self.word.swap(new, order)
        }
        fn take(&self) -> bool {
            self.word.compare_exchange(OPEN, LOCKED, Acquire, Relaxed).is_ok()
        }
        fn sleep_while(&self, value: u32) {
            let kernel = self.kernel.lock().unwrap();
            if self.word.load(SeqCst) == value {
                drop(self.woken.wait(kernel).unwrap());
            }
        }
        fn wake(&self) {
            let _kernel = self.kernel.lock().unwrap();
            self.woken.notify_one();
        }
        fn spins() -> u32 {
            1
        }
    }

    #[test]
    fn three_come_one_after_the_other_and_nobody_sleeps_for_ever() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let word = Loom { word: AtomicU32::new(OPEN), kernel: Mutex::new(()), woken: Condvar::new() };
            let shared = Arc::new((word, UnsafeCell::new(0)));
            let add = |shared: &(Loom, UnsafeCell<u32>)| {
                lock(&shared.0);
                // SAFETY: the lock is held; loom reports two who touch the cell at once.
                shared.1.with_mut(|value| unsafe { *value += 1 });
                unlock(&shared.0);
            };
            let threads = [(); 2].map(|()| {
                let shared = shared.clone();
                thread::spawn(move || add(&shared))
            });
            add(&shared);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            // SAFETY: nobody else is left.
            assert_eq!(shared.1.with(|value| unsafe { *value }), 3);
        });
    }
}
