//! Children of fork: they live on with their copy of the heap, and never call a device, which is their parent's. What happens at a
//! chosen moment; `fork_storm` forks at any.

use rdmalloc::{
    Access, AttachError, Buffer, Heap, KeyError, Keys, NotRegistered, Rdmalloc, Registered, Registrar, Retention,
    TakeError,
};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
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

/// A device in which calls wait for each other: the test is told that one is inside, and lets it go on.
struct Gated {
    strays: Witness,
    inside: Mutex<Sender<(&'static str, Range<usize>)>>,
    go_on: Mutex<Receiver<()>>,
}

impl Gated {
    fn pass(&self, call: &'static str, memory: Range<usize>) {
        if self.inside.lock().unwrap().send((call, memory)).is_ok() {
            let _ = self.go_on.lock().unwrap().recv();
        }
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Gated {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        self.pass("register", memory.clone());
        // SAFETY: the caller's promise.
        unsafe { self.strays.register(memory, access) }
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.pass("deregister", memory.clone());
        self.strays.deregister(registered, memory)
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "gated"
    }
}

#[test]
fn a_child_gives_up_arenas_that_its_parent_was_opening_or_closing() {
    let _alone = alone();
    let (strays, calls) = Witness::new();
    let (inside, is_inside) = channel();
    let (let_go, go_on) = channel();
    let heap = Heap::builder().serves_children(true).retention(Retention::NONE).build().unwrap();
    let device = heap.attach(Gated { strays, inside: Mutex::new(inside), go_on: Mutex::new(go_on) }).unwrap();
    const SIZE: usize = 100 << 20;
    let heap = &heap;
    // With what lets the other thread go on, so that it does if this fails.
    std::thread::scope(move |scope| {
        let other = scope.spawn(move || {
            drop(heap.buffer(SIZE).unwrap());
            heap.trim();
        });
        for wanted in ["register", "deregister"] {
            let (call, memory) = is_inside.recv().unwrap();
            assert_eq!(call, wanted);
            let before = calls.load(Relaxed);
            in_child(|| {
                // The chunks are free again, so they are the first that a block of the size gets.
                let buffer = heap.buffer(SIZE).unwrap();
                assert_eq!(buffer.as_ptr().addr(), memory.start, "while the parent was in {call}");
                let stats = heap.stats();
                assert_eq!((stats.open_bytes, stats.opening_arenas, stats.closing_arenas), (memory.len(), 0, 0));
                drop(buffer);
                heap.trim().closed_arenas == 1
            });
            assert_eq!(calls.load(Relaxed), before, "the child called the device");
            let_go.send(()).unwrap();
        }
        drop(let_go);
        other.join().unwrap();
    });
    heap.detach(device).unwrap();
}

#[test]
fn a_heap_that_is_left_out_of_children_is_not_mapped_there_and_nobody_gets_its_addresses() {
    let _alone = alone();
    let (out, copied) = [false, true]
        .map(|serves| {
            let heap = Heap::builder().serves_children(serves).build().unwrap();
            let mut buffer = heap.buffer(1000).unwrap();
            buffer.try_extend_from_slice(b"here").unwrap();
            // What grows keeps its arena's setting.
            let large = heap.buffer(40 << 20).unwrap();
            (heap, buffer, large)
        })
        .into();
    let is_readable = |address: *const u8| {
        let mut byte = 0u8;
        let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: address.cast_mut().cast(), iov_len: 1 };
        // SAFETY: reads this process's own memory, or fails where there is none; writes one byte to a local.
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) == 1 }
    };
    let is_mapped = |address: *const u8| {
        let mut page = 0u8;
        let start = ptr::without_provenance_mut::<libc::c_void>(address.addr() / 4096 * 4096);
        // SAFETY: one page's state is written to a local.
        unsafe { libc::mincore(start, 4096, &raw mut page) == 0 }
    };
    let places = |(_, small, large): &(Heap, Buffer, Buffer)| [small.as_ptr(), large.as_ptr()];
    assert!(places(&out).into_iter().chain(places(&copied)).all(is_readable));
    let mut all = Some((out, copied));
    in_child(|| {
        let (out, copied) = all.take().unwrap();
        assert!(!places(&out).into_iter().any(is_readable), "a child reads what is left out of it");
        assert!(places(&out).into_iter().all(is_mapped), "the addresses are anybody's");
        assert!(places(&copied).into_iter().all(is_readable) && copied.1[..] == *b"here");
        assert!(matches!(out.0.buffer(100), Err(TakeError::NotInChild)));
        copied.0.buffer(100).unwrap();
        true
    });
}

#[test]
fn a_registrar_runs_a_program_by_fork() {
    struct Forks(Witness);
    // SAFETY: there is no device, so nothing touches the memory.
    unsafe impl Registrar for Forks {
        unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
            let mut command = Command::new("true");
            // SAFETY: does nothing. That there is something makes the standard library fork.
            let status = unsafe { command.pre_exec(|| Ok(())) }.status()?;
            assert!(status.success());
            // And a child that does not exec, but returns: it finds its copy of the heap in order.
            in_child(|| vec![1u8; 1 << 20].iter().all(|byte| *byte == 1));
            // SAFETY: the caller's promise.
            unsafe { self.0.register(memory, access) }
        }

        fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
            self.0.deregister(registered, memory)
        }

        fn is_memlocked(&self) -> bool {
            false
        }

        fn name(&self) -> &str {
            "forks"
        }
    }
    let _alone = alone();
    let (witness, _) = Witness::new();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Forks(witness)).unwrap();
    let buffer = heap.buffer(100).unwrap();
    assert!(device.key(buffer.as_ptr()).is_ok());
    drop(buffer);
    heap.trim();
    heap.detach(device).unwrap();
}

/// The way of a `popen` that forgets to exec.
#[test]
fn a_child_that_is_forked_inside_a_registrar_and_returns_from_it_gets_no_registration() {
    struct Forks(Witness, AtomicI32);
    // SAFETY: there is no device, so nothing touches the memory.
    unsafe impl Registrar for Forks {
        unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
            // SAFETY: the test ends the child.
            self.1.store(unsafe { libc::fork() }, Relaxed);
            if self.1.load(Relaxed) == 0 {
                return Ok(Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: 1 });
            }
            // SAFETY: the caller's promise.
            unsafe { self.0.register(memory, access) }
        }

        fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
            self.0.deregister(registered, memory)
        }

        fn is_memlocked(&self) -> bool {
            false
        }

        fn name(&self) -> &str {
            "forks"
        }
    }
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let heap = Heap::builder().serves_children(true).build().unwrap();
    let parent = std::process::id();
    let device = heap.attach(Forks(witness, AtomicI32::new(-1))).unwrap();
    let buffer = heap.buffer(100);
    if std::process::id() != parent {
        // SAFETY: no preconditions.
        unsafe { libc::alarm(20) };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert!(matches!(buffer, Err(TakeError::Register(_))));
            assert_eq!(heap.stats().registered, 0);
            heap.detach(device).unwrap();
            drop(heap);
            drop(vec![1u8; 100 << 20]);
            HEAP.trim();
        }));
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the one child that this process has.
    assert!(unsafe { libc::wait(&raw mut status) } > 0);
    assert_eq!(status, 0, "the child's wait status");
    assert!(device.key(buffer.unwrap().as_ptr()).is_ok());
    heap.trim();
    heap.detach(device).unwrap();
    assert_eq!(calls.load(Relaxed), 3, "the child called the device, or dropped the registrar");
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
    let child = KeyError::NotRegistered(NotRegistered::ForkedChild);
    in_child(|| HEAP.detach(device).is_ok() && HEAP.devices().is_empty() && device.key(held.as_ptr()) == Err(child));
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
fn a_child_gets_nothing_from_a_heap_that_is_left_out_of_children_but_may_make_its_own() {
    let _alone = alone();
    let (witness, calls) = Witness::new();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(witness).unwrap();
    let before = calls.load(Relaxed);
    in_child(|| {
        assert!(matches!(heap.buffer(100), Err(TakeError::NotInChild)));
        assert!(matches!(heap.attach(Witness::new().0), Err(AttachError::NotInChild)));
        assert_eq!((heap.stats().open_bytes, heap.trim().closed_arenas), (0, 0));
        let own = Heap::builder().build().unwrap();
        let device = own.attach(Witness::new().0).unwrap();
        let mut buffer = own.buffer(100).unwrap();
        buffer.try_extend_from_slice(b"the child's").unwrap();
        device.key(buffer.as_ptr()).is_ok()
    });
    assert_eq!(calls.load(Relaxed), before, "the child called the device");
    heap.detach(device).unwrap();
}
