//! Some jobs at once, on threads that live no longer. Uses `os`.
//!
//! The caller has the role of a heap, so these threads must not take memory of that heap: they would wait for the role. The
//! standard library's threads allocate before they run what they were given; so these are the system's own, and the first
//! thing each does is what its [`Helper`] does: to see to it that what it allocates comes from elsewhere.

use crate::os;
use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Calls what it is given, and sees to it that what the thread allocates meanwhile does not come from the heap that is being
/// worked on. Given to [`Arenas::helped_by`](crate::Arenas::helped_by).
pub type Helper = fn(&mut dyn FnMut());

/// For heaps that are not below the global allocator: there is nothing to see to.
pub(crate) fn no_help(job: &mut dyn FnMut()) {
    job();
}

/// How many threads have not done their job.
struct Latch {
    left: Mutex<usize>,
    none: Condvar,
}

impl Latch {
    fn done(&self) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left -= 1;
        if *left == 0 {
            self.none.notify_all();
        }
    }

    fn wait(&self) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        while *left > 0 {
            left = self.none.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What a thread is given.
struct Packet {
    /// Valid until the latch is told.
    job: *const (dyn Fn() + Sync),
    helper: Helper,
    latch: Arc<Latch>,
}

/// What `job` returns for each index below `count`, in order, done by up to `most` threads at once, this one among them.
///
/// `job` must not unwind: on another thread, that would abort.
pub(crate) fn map<T: Send>(count: usize, most: usize, helper: Helper, job: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    // Each thread takes what is next, so a thread that could not be started is only missing.
    let work = || {
        loop {
            let index = next.fetch_add(1, Relaxed);
            let Some(place) = results.get(index) else { return };
            let result = job(index);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        }
    };
    let latch = Arc::new(Latch { left: Mutex::new(0), none: Condvar::new() });
    for _ in 1..most.min(count) {
        *latch.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let job: *const (dyn Fn() + Sync + '_) = &raw const work;
        // SAFETY: only the lifetime changes. The job is called before the latch is told, and `work` lives until `wait` has
        // seen that it was.
        let job = unsafe { core::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(job) };
        let packet = Box::into_raw(Box::new(Packet { job, helper, latch: latch.clone() }));
        // SAFETY: `run` takes the packet, once.
        if unsafe { os::spawn(run, packet.cast()) }.is_err() {
            // SAFETY: made above, and nobody has taken it.
            drop(unsafe { Box::from_raw(packet) });
            latch.done();
            break;
        }
    }
    work();
    latch.wait();
    results.into_iter().filter_map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

/// A thread's whole life. Nothing is allocated before the helper is called.
extern "C" fn run(packet: *mut c_void) -> *mut c_void {
    // SAFETY: `map` made it a box of this type and gave it up to this thread.
    let packet = unsafe { Box::from_raw(packet.cast::<Packet>()) };
    let helper = packet.helper;
    let mut packet = Some(packet);
    helper(&mut || {
        if let Some(packet) = packet.take() {
            // SAFETY: valid, as the latch has not been told.
            unsafe { (*packet.job)() };
            packet.latch.done();
        }
    });
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn jobs_run_at_once_and_their_results_are_in_order() {
        let barrier = Barrier::new(4);
        let results = map(4, 4, no_help, |index| {
            barrier.wait();
            index * 10
        });
        assert_eq!(results, [0, 10, 20, 30]);
        assert_eq!(map(3, 1, no_help, |index| index), [0, 1, 2]);
        assert_eq!(map(0, 5, no_help, |index| index), []);
    }

    #[test]
    fn every_thread_but_the_callers_is_helped() {
        static HELPED: AtomicUsize = AtomicUsize::new(0);
        fn helper(job: &mut dyn FnMut()) {
            HELPED.fetch_add(1, Relaxed);
            job();
        }
        let barrier = Barrier::new(3);
        map(3, 3, helper, |_| {
            barrier.wait();
        });
        assert_eq!(HELPED.load(Relaxed), 2);
    }
}
