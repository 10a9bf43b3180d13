//! An arena closes in the next drain pass after its last block is freed, whoever freed it.

use rdmalloc::Rdmalloc;
use rdmalloc_tests::{Ledger, again_without_membarrier, is_alone, is_without_membarrier};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

type Blocks = Vec<Vec<u8>>;

/// Arenas, in no memory of the heap's.
#[derive(Clone, Copy)]
struct Set {
    begins: [usize; 64],
    count: usize,
}

impl Set {
    fn open() -> Set {
        let mut set = Set { begins: [0; 64], count: 0 };
        HEAP.arenas().iter().for_each(|arena| set.add(arena.memory.start));
        set
    }

    fn add(&mut self, begin: usize) {
        self.begins[self.count] = begin;
        self.count += 1;
    }

    fn has(&self, begin: usize) -> bool {
        self.begins[..self.count].contains(&begin)
    }
}

/// Blocks of all kinds, 60 MiB in all, and the arenas that were opened for them, in which nothing else is.
fn planted() -> (Blocks, Set) {
    HEAP.trim();
    let before = Set::open();
    let block = |number: usize| vec![number as u8; 1 << (4 + number % 17)];
    let blocks: Blocks = (0..4096).map(block).collect();
    let (all, mut new) = (Set::open(), Set { begins: [0; 64], count: 0 });
    all.begins[..all.count].iter().filter(|begin| !before.has(**begin)).for_each(|begin| new.add(*begin));
    assert!(new.count > 0);
    (blocks, new)
}

/// They are freed now, by whoever did: their arenas close in one pass, and their registrations end.
fn are_gone(planted: &Set, ledger: &Ledger) {
    let trimmed = HEAP.trim();
    let arenas = HEAP.arenas();
    assert_eq!((trimmed.busy_threads, trimmed.stuck_arenas), (0, 0));
    let open: Vec<_> = arenas.iter().filter(|arena| planted.has(arena.memory.start)).collect();
    assert!(open.is_empty(), "open after the pass: {open:?}");
    assert_eq!(ledger.live_bytes(), arenas.iter().map(|arena| arena.memory.len()).sum::<usize>());
    assert_eq!(ledger.live(), arenas.len());
}

/// A test of how blocks are freed, with a device attached.
fn freed_by(free: impl FnOnce(Blocks)) {
    if !is_alone() {
        return;
    }
    let _ = is_without_membarrier();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    let (blocks, arenas) = planted();
    free(blocks);
    are_gone(&arenas, &ledger);
    HEAP.detach(device).unwrap();
}

#[test]
fn an_arena_closes_in_the_pass_after_its_owner_freed_its_last_block() {
    freed_by(drop);
}

#[test]
fn an_arena_closes_in_the_pass_after_another_thread_freed_its_last_block() {
    freed_by(|blocks| {
        thread::spawn(|| {
            drop(Box::new(1));
            drop(blocks);
        })
        .join()
        .unwrap();
    });
}

#[test]
fn an_arena_closes_in_the_pass_after_a_thread_that_sleeps_since_freed_its_last_block() {
    static HANDED: Mutex<Option<Blocks>> = Mutex::new(None);
    static STATE: AtomicU32 = AtomicU32::new(0);
    let wait_for = |state| {
        while STATE.load(Acquire) != state {
            thread::yield_now();
        }
    };
    // Begun before, since what it is made of lives as long as it does. A thread with a cache of its own.
    thread::spawn(move || {
        drop(Box::new(1));
        STATE.store(1, Release);
        wait_for(2);
        drop(HANDED.lock().unwrap().take());
        STATE.store(3, Release);
        loop {
            thread::park();
        }
    });
    wait_for(1);
    freed_by(|blocks| {
        *HANDED.lock().unwrap() = Some(blocks);
        STATE.store(2, Release);
        wait_for(3);
    });
}

#[test]
fn an_arena_closes_in_the_pass_after_its_owner_ended_and_another_freed_its_last_block() {
    if !is_alone() {
        return;
    }
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    let (blocks, arenas) = thread::spawn(planted).join().unwrap();
    drop(blocks);
    are_gone(&arenas, &ledger);
    HEAP.detach(device).unwrap();
}

#[test]
fn an_arena_closes_in_the_pass_after_a_thread_that_never_allocates_freed_its_last_block() {
    extern "C" fn free(blocks: *mut c_void) -> *mut c_void {
        // SAFETY: the blocks that the test gave to this thread; it waits for its end.
        drop(unsafe { blocks.cast::<Option<Blocks>>().as_mut() }.and_then(Option::take));
        ptr::null_mut()
    }
    freed_by(|blocks| {
        let mut blocks = Some(blocks);
        // A thread of the C library's: the standard library would allocate in it.
        // SAFETY: the thread ends before `blocks` goes.
        unsafe {
            let mut thread = std::mem::zeroed();
            let begun = libc::pthread_create(&mut thread, ptr::null(), free, (&raw mut blocks).cast());
            assert_eq!((begun, libc::pthread_join(thread, ptr::null_mut())), (0, 0));
        }
        assert!(blocks.is_none());
    });
}

#[test]
fn an_arena_closes_in_the_pass_after_a_destructor_at_thread_exit_freed_its_last_block() {
    thread_local!(static KEPT: RefCell<Blocks> = const { RefCell::new(Vec::new()) });
    freed_by(|blocks| thread::spawn(|| KEPT.replace(blocks)).join().map(drop).unwrap());
}

#[test]
fn an_arena_closes_in_the_pass_after_the_last_destructor_of_all_freed_its_last_block() {
    static KEY: std::sync::OnceLock<libc::pthread_key_t> = std::sync::OnceLock::new();
    extern "C" fn late(blocks: *mut c_void) {
        // SAFETY: the box that the thread has set; its destructor is called once with it.
        drop(unsafe { Box::from_raw(blocks.cast::<Blocks>()) });
    }
    freed_by(|blocks| {
        let end = || {
            let key = *KEY.get_or_init(|| {
                let mut key = 0;
                // SAFETY: the pointer is to a local, the destructor has the signature.
                assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(late)) }, 0);
                key
            });
            // Made after the thread has a cache, and so the key after the allocator's: its destructor comes later.
            // SAFETY: the key is never deleted; the box is the destructor's.
            unsafe { libc::pthread_setspecific(key, Box::into_raw(Box::new(blocks)).cast()) };
        };
        thread::spawn(end).join().unwrap();
    });
}

#[test]
fn arenas_close_beneath_threads_that_are_parked_for_ever() {
    if !is_alone() {
        return;
    }
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    for _ in 0..8 {
        let sender = sender.clone();
        thread::spawn(move || {
            let block = |number: usize| vec![number as u8; 1 << (4 + number % 14)];
            let mut blocks: Blocks = (0..2600).map(block).collect();
            // Some are freed into its own cache.
            blocks.truncate(2000);
            sender.send(blocks).unwrap();
            drop(sender);
            loop {
                thread::park();
            }
        });
    }
    drop(sender);
    let blocks: Vec<Blocks> = receiver.iter().collect();
    let full = ledger.live_bytes();
    drop(blocks);
    let trimmed = HEAP.trim();
    let arenas = HEAP.arenas();
    assert_eq!(trimmed.busy_threads, 0);
    assert!(arenas.iter().all(|arena| arena.spans > 0), "{arenas:?}");
    let open = arenas.iter().map(|arena| arena.memory.len()).sum::<usize>();
    assert!(ledger.live_bytes() == open && open < full, "{open} of {full}");
    HEAP.detach(device).unwrap();
}

#[test]
fn without_membarrier_a_pass_is_as_exact() {
    again_without_membarrier("without_membarrier");
}
