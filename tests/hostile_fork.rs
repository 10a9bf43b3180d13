//! Children of fork: they live on with their copy of the heap, and never call a device, which is their parent's.

use rdmalloc::{Access, Heap, KeyError, Keys, NotRegistered, Rdmalloc, Registered, Registrar};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{io, ptr};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// One test at a time, so that no other thread is inside the heap when one forks.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registrar that counts every call, its drop too, where parent and child both see it.
struct Witness(&'static AtomicU32);

impl Witness {
    fn new() -> (Witness, &'static AtomicU32) {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, zero, shared with children, and never unmapped.
        let calls = unsafe {
            let page = libc::mmap(ptr::null_mut(), 4096, access, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            &*page.cast::<AtomicU32>()
        };
        (Witness(calls), calls)
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Witness {
    unsafe fn register(&self, _: Range<usize>, _: Access) -> io::Result<Registered> {
        let handle = self.0.fetch_add(1, Relaxed);
        Ok(Registered { keys: Keys { lkey: handle, rkey: handle }, handle: 1 })
    }

    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        self.0.fetch_add(1, Relaxed);
        Ok(())
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "witness"
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Runs `action` in a child; fails unless it returns true in twenty seconds.
fn in_child(action: impl FnOnce() -> bool) {
    // SAFETY: the child runs `action` and leaves, with nothing of the parent's unwound.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no preconditions.
            unsafe { libc::alarm(20) };
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(action));
            // SAFETY: no preconditions.
            unsafe { libc::_exit(if matches!(done, Ok(true)) { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child's wait status");
        }
    }
}

#[test]
fn a_child_opens_and_closes_arenas_without_the_device() {
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let device = HEAP.attach(witness).unwrap();
    let held = vec![5u8; 100 << 20];
    let before = calls.load(Relaxed);
    in_child(|| {
        let child = KeyError::NotRegistered(NotRegistered::ForkedChild);
        let fresh = vec![7u8; 200 << 20];
        let keys = (device.key(held.as_ptr()), device.key(fresh.as_ptr()));
        drop(held);
        drop(fresh);
        HEAP.trim().closed_arenas > 0 && keys == (Err(child), Err(child))
    });
    assert_eq!(calls.load(Relaxed), before, "the child called the device");
    HEAP.detach(device).unwrap();
}

#[test]
fn a_child_that_detaches_leaves_the_parents_device_alone() {
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let device = HEAP.attach(witness).unwrap();
    let held = vec![5u8; 10000];
    let before = calls.load(Relaxed);
    in_child(|| HEAP.detach(device).is_ok() && device.key(held.as_ptr()) == Err(KeyError::Detached));
    assert_eq!(calls.load(Relaxed), before, "the child called the device, or dropped the registrar");
    assert!(device.key(held.as_ptr()).is_ok());
    HEAP.detach(device).unwrap();
}

#[test]
fn a_child_that_drops_heap_and_buffers_leaves_the_parents_device_alone() {
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    let device = heap.attach(witness).unwrap();
    let buffers: Vec<_> = [100, 100_000, 100 << 20].map(|capacity| heap.buffer(capacity).unwrap()).into();
    let before = calls.load(Relaxed);
    let (place, mut kept) = (buffers[0].as_ptr(), Some((heap, buffers)));
    in_child(|| {
        drop(kept.take());
        true
    });
    assert_eq!(calls.load(Relaxed), before, "the child called the device, or dropped the registrar");
    assert!(device.key(place).is_ok());
    drop(kept);
    assert_eq!(device.key(place), Err(KeyError::Detached));
}

#[test]
fn a_child_gets_no_unregistered_buffer_from_a_heap_with_a_device() {
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(witness).unwrap();
    let before = calls.load(Relaxed);
    in_child(|| heap.buffer(100).is_err_and(|error| error.to_string().contains("child of fork")));
    assert_eq!(calls.load(Relaxed), before, "the child called the device");
    heap.detach(device).unwrap();
}
