//! Registrars that do what they may, and more than one would think of: allocate without measure, free what others allocated,
//! start threads, end heaps.

use rdmalloc::{Access, Buffer, Device, Heap, KeyError, Keys, NotRegistered, Rdmalloc, Registered, Registrar};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// One test at a time: they share the global heap's devices.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `action` on a thread; fails if it is not done after a quarter of a minute.
fn without_deadlock(action: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        action();
        let _ = done.send(());
    });
    let result = wait.recv_timeout(Duration::from_secs(15));
    assert!(result != Err(mpsc::RecvTimeoutError::Timeout), "deadlock");
    thread.join().unwrap();
}

type Action = Box<dyn Fn() + Send + Sync>;

/// Does as it is told when it registers, deregisters and is dropped.
#[derive(Default)]
struct Doing {
    at_register: Option<Action>,
    at_deregister: Option<Action>,
    _at_drop: AtDrop,
    calls: AtomicU32,
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Doing {
    unsafe fn register(&self, _: Range<usize>, _: Access) -> io::Result<Registered> {
        self.at_register.iter().for_each(|action| action());
        let handle = self.calls.fetch_add(1, Relaxed);
        Ok(Registered { keys: Keys { lkey: handle, rkey: handle }, handle: handle.into() })
    }

    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        self.at_deregister.iter().for_each(|action| action());
        Ok(())
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "doing"
    }
}

#[derive(Default)]
struct AtDrop(Option<Action>);

impl Drop for AtDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(|action| action());
    }
}

/// Blocks of every kind.
fn blocks() -> Vec<Vec<u8>> {
    (0..21).map(|shift| vec![shift as u8; (1 << shift) + 1]).collect()
}

#[test]
fn a_registrar_allocates_a_lot_and_frees_what_the_attaching_thread_has() {
    let _alone = alone();
    without_deadlock(|| {
        let theirs = Mutex::new(Vec::from_iter((0..20).map(|_| blocks())));
        let kept = Arc::new(Mutex::new(Vec::new()));
        let mine = kept.clone();
        let at_register: Action = Box::new(move || {
            theirs.lock().unwrap().pop();
            mine.lock().unwrap().push(blocks());
            drop((0..3).map(|_| vec![1u8; 10 << 20]).collect::<Vec<_>>());
        });
        let device = HEAP.attach(Doing { at_register: Some(at_register), ..Doing::default() }).unwrap();
        let large: Vec<_> = (0..4).map(|number| vec![number; 40 << 20]).collect();
        assert!(large.iter().all(|block| device.key(block.as_ptr()).is_ok()));
        let kept = std::mem::take(&mut *kept.lock().unwrap());
        let reason = Err(KeyError::NotRegistered(NotRegistered::OtherHeap));
        for block in kept.iter().flatten() {
            assert!(block.iter().all(|byte| *byte == block[0]));
            assert_eq!(device.key(block.as_ptr()), reason);
        }
        HEAP.detach(device).unwrap();
    });
}

#[test]
fn a_registrar_waits_for_threads_that_allocate_while_there_is_room() {
    let _alone = alone();
    without_deadlock(|| {
        let room: Vec<_> = (0..64).map(|_| vec![1u8; 300_000]).collect();
        drop(room);
        let at_register: Action = Box::new(|| {
            let sum = std::thread::spawn(|| vec![1u8; 1000].iter().map(|byte| u64::from(*byte)).sum::<u64>());
            assert_eq!(sum.join().unwrap(), 1000);
        });
        let device = HEAP.attach(Doing { at_register: Some(at_register), ..Doing::default() }).unwrap();
        HEAP.detach(device).unwrap();
    });
}

#[test]
fn a_registrar_looks_at_its_heap_as_it_is_dropped() {
    let _alone = alone();
    without_deadlock(|| {
        let at_drop = || AtDrop(Some(Box::new(|| assert!(!HEAP.arenas().is_empty()))));
        let device: Device = HEAP.attach(Doing { _at_drop: at_drop(), ..Doing::default() }).unwrap();
        HEAP.detach(device).unwrap();
        let panics: Action = Box::new(|| panic!("the test asked for it"));
        let refusing = Doing { _at_drop: at_drop(), at_register: Some(panics), ..Doing::default() };
        HEAP.attach(refusing).unwrap_err();
    });
}

#[test]
fn a_heap_ends_while_another_does_and_heaps_are_made_meanwhile() {
    let _alone = alone();
    without_deadlock(|| {
        let last_of_other = || {
            let other = Heap::builder().build().unwrap();
            other.attach(Doing::default()).unwrap();
            other.buffer(100).unwrap()
        };
        let held: Arc<Mutex<Option<Buffer>>> = Arc::new(Mutex::new(Some(last_of_other())));
        let heap = Heap::builder().build().unwrap();
        let at_deregister: Action = Box::new({
            let held = held.clone();
            move || {
                drop(held.lock().unwrap().take());
                drop(Heap::builder().build().unwrap().buffer(70_000).unwrap());
            }
        });
        let device = heap.attach(Doing { at_deregister: Some(at_deregister), ..Doing::default() }).unwrap();
        let buffer = heap.buffer(5000).unwrap();
        let place = buffer.as_ptr();
        drop(heap);
        assert!(device.key(place).is_ok());
        drop(buffer);
        assert!(held.lock().unwrap().is_none());
        assert_eq!(device.key(place), Err(KeyError::Detached));
    });
}

#[test]
fn what_a_registrar_has_freed_goes_back_to_the_kernel_by_trim() {
    let _alone = alone();
    let data = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
    };
    HEAP.trim();
    let before = data();
    let at_register: Action = Box::new(|| drop(vec![1u8; 200 << 20]));
    let device = HEAP.attach(Doing { at_register: Some(at_register), ..Doing::default() }).unwrap();
    HEAP.detach(device).unwrap();
    HEAP.trim();
    let after = data();
    assert!(after < before + 100, "{before} MiB of data before, {after} after");
}
