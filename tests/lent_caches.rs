//! Caches of heaps that a program makes, which are lent to threads: passes and the end of a heap are exact whatever the threads do
//! that have them.

use rdmalloc::{Access, Budget, Buffer, Device, Heap, KeyError, Rdmalloc};
use rdmalloc_tests::{Ledger, again_without_membarrier};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, OnceLock};
use std::thread::{self, JoinHandle};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// Of every kind: small, medium, large ones that a cache keeps, one that it does not.
const CAPACITIES: [usize; 6] = [64, 3000, 20_000, 64 << 10, 300 << 10, 5 << 20];

/// A buffer that can be told from others.
fn marked(heap: &Heap, number: usize) -> Buffer {
    let mut buffer = heap.buffer(CAPACITIES[number % CAPACITIES.len()]).unwrap();
    buffer.try_extend_from_slice(&[number as u8; 64]).unwrap();
    buffer
}

fn is_intact(buffer: &Buffer, number: usize) -> bool {
    buffer.len() == 64 && buffer.iter().all(|byte| *byte == number as u8)
}

/// A heap with a device: now with links of free blocks inside them, now outside.
fn heap_on(ledger: &Ledger) -> (Heap, Device) {
    static OUTSIDE: AtomicBool = AtomicBool::new(false);
    let access = if OUTSIDE.fetch_not(Relaxed) { Access::REMOTE_WRITE } else { Access::LOCAL_WRITE };
    let heap = Heap::builder().access(access).build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    (heap, device)
}

/// A thread that does what it is told, one thing after the other, and sleeps between.
struct Worker {
    jobs: Sender<Box<dyn FnOnce() + Send>>,
    done: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn new() -> Worker {
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        let (tell, done) = channel();
        let thread = thread::spawn(move || {
            for job in todo {
                job();
                tell.send(()).unwrap();
            }
        });
        Worker { jobs, done, thread }
    }

    fn begin(&self, job: impl FnOnce() + Send + 'static) {
        self.jobs.send(Box::new(job)).unwrap();
    }

    fn wait(&self) {
        self.done.recv().unwrap();
    }

    /// Does something that gives a result, and sleeps again.
    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (give, result) = channel();
        self.begin(move || give.send(job()).unwrap());
        self.wait();
        result.recv().unwrap()
    }

    fn end(self) {
        drop(self.jobs);
        self.thread.join().unwrap();
    }
}

#[test]
fn sleeping_threads_keep_no_empty_arena() {
    let ledger = Ledger::new();
    let (heap, _) = heap_on(&ledger);
    let workers: Vec<_> = (0..8).map(|_| Worker::new()).collect();
    for round in 0..3 {
        let take = |worker: &Worker| {
            let heap = heap.clone();
            worker.run(move || {
                // Some go back into its own cache.
                drop((0..40).map(|number| marked(&heap, number)).collect::<Vec<_>>());
                (0..40).map(|number| marked(&heap, number)).collect::<Vec<_>>()
            })
        };
        let taken: Vec<_> = workers.iter().map(take).collect();
        assert!(taken.iter().flatten().enumerate().all(|(index, buffer)| is_intact(buffer, index % 40)));
        assert!(ledger.live() > 0);
        drop(taken);
        let trimmed = heap.trim();
        assert_eq!((trimmed.busy_threads, trimmed.open_arenas, ledger.live()), (0, 0, 0), "round {round}: {trimmed}");
    }
    let kept = workers[3].run({
        let heap = heap.clone();
        move || marked(&heap, 3)
    });
    let trimmed = heap.trim();
    assert_eq!(trimmed.live.iter().collect::<Vec<_>>(), [(65536, 1)], "{trimmed}");
    assert!(is_intact(&kept, 3));
    drop((heap, kept));
    assert_eq!(ledger.live(), 0);
    workers.into_iter().for_each(Worker::end);
}

#[test]
fn a_heap_ends_beneath_threads_that_have_its_caches_and_its_core_serves_another() {
    let ledger = Ledger::new();
    let workers: Vec<_> = (0..4).map(|_| Worker::new()).collect();
    for round in 0..60 {
        // More than there are places; caches of those that end go to those that begin, whatever their places.
        let heaps: Vec<_> = (0..1 + round % 11).map(|_| heap_on(&ledger)).collect();
        for worker in &workers {
            let heaps: Vec<_> = heaps.iter().map(|(heap, _)| heap.clone()).collect();
            worker.begin(move || {
                for number in 0..24 {
                    let heap = &heaps[number % heaps.len()];
                    let (first, second) = (marked(heap, number), marked(heap, number + 1));
                    assert!(is_intact(&first, number) && is_intact(&second, number + 1));
                    let at = first.as_ptr().addr();
                    assert!(heap.arenas().iter().any(|arena| arena.memory.contains(&at)), "another heap's buffer");
                }
            });
        }
        workers.iter().for_each(Worker::wait);
        // In any order, while the threads sleep on what they have.
        let devices: Vec<_> = heaps.into_iter().map(|(_, device)| device).collect();
        assert_eq!(ledger.live(), 0, "round {round}: an arena is open still");
        assert!(
            devices.iter().all(|device| device.key_of_address(1 << 20) == Err(KeyError::Detached)),
            "round {round}"
        );
    }
    workers.into_iter().for_each(Worker::end);
}

#[test]
fn a_heap_ends_once_whether_its_handle_or_a_buffer_in_a_lent_cache_goes_last() {
    let ledger = Ledger::new();
    let worker = Worker::new();
    let begin: &'static Barrier = Box::leak(Box::new(Barrier::new(2)));
    for round in 0..600 {
        let (heap, device) = heap_on(&ledger);
        let ours = marked(&heap, round);
        let theirs = heap.clone();
        worker.begin(move || {
            let buffers = [marked(&theirs, round + 1), marked(&theirs, round + 2)];
            drop(theirs);
            begin.wait();
            drop(buffers);
        });
        begin.wait();
        if round % 3 == 0 {
            heap.trim();
        }
        if round % 2 == 0 {
            drop((heap, ours));
        } else {
            drop((ours, heap));
        }
        worker.wait();
        assert_eq!(ledger.live(), 0, "round {round}: an arena is open still");
        assert_eq!(device.key_of_address(1 << 20), Err(KeyError::Detached), "round {round}: the heap has not ended");
    }
    worker.end();
}

#[test]
fn threads_that_end_leave_their_caches_to_others() {
    const THREADS: usize = 400;
    let heap = Heap::builder().build().unwrap();
    let kept: Vec<_> = (0..THREADS)
        .map(|number| {
            let heap = heap.clone();
            thread::spawn(move || {
                drop(heap.buffer(1 << 20).unwrap());
                let mut buffer = heap.buffer(64 << 10).unwrap();
                buffer.try_extend_from_slice(&[number as u8; 64]).unwrap();
                buffer
            })
            .join()
            .unwrap()
        })
        .collect();
    // Each found the slab of the one before it, eight buffers of which are in a slab; and there are eight shards, at most.
    let taken = heap.stats().taken_bytes;
    assert!(taken <= (THREADS + 8 * 8) * (64 << 10), "{taken} bytes for {THREADS} buffers of 64 KiB");
    assert!(kept.iter().enumerate().all(|(number, buffer)| is_intact(buffer, number)));
    drop(kept);
    assert_eq!(heap.trim().open_arenas, 0);
}

#[test]
fn a_budget_serves_many_threads_that_have_a_slab_each() {
    const THREADS: usize = 48;
    let ledger = Ledger::new();
    let heap = Heap::builder().budget(Budget { bytes: 8 << 20, ..Budget::NONE }).build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let workers: Vec<_> = (0..THREADS).map(|_| Worker::new()).collect();
    // Slabs of 512 KiB: sixteen of them fill the budget, and have room for 128 buffers.
    let take = |(number, worker): (usize, &Worker)| {
        let heap = heap.clone();
        worker.run(move || {
            let mut buffer = heap.buffer(64 << 10).unwrap();
            buffer.try_extend_from_slice(&[number as u8; 64]).unwrap();
            buffer
        })
    };
    let mut taken: Vec<_> = workers.iter().chain(&workers).enumerate().map(take).collect();
    assert!(taken.iter().enumerate().all(|(number, buffer)| is_intact(buffer, number)));
    // To the last one, whoever asks for it.
    let rest: Vec<_> = (0..128).map_while(|_| heap.buffer(64 << 10).ok()).collect();
    assert_eq!(taken.len() + rest.len(), 128);
    heap.buffer(64 << 10).expect_err("over the budget");
    // Each goes back to whose slab it is of.
    for worker in &workers {
        let buffer = taken.pop().unwrap();
        worker.run(move || drop(buffer));
    }
    drop((taken, rest));
    let trimmed = heap.trim();
    assert_eq!((trimmed.open_arenas, ledger.live()), (0, 0), "{trimmed}");
    workers.into_iter().for_each(Worker::end);
}

#[test]
fn buffers_that_go_as_their_thread_ends_end_the_heap() {
    thread_local!(static KEPT: RefCell<Vec<Buffer>> = const { RefCell::new(Vec::new()) });
    static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();
    extern "C" fn late(buffer: *mut c_void) {
        // SAFETY: the box that the thread has set; its destructor is called once with it.
        drop(unsafe { Box::from_raw(buffer.cast::<Buffer>()) });
    }
    let ledger = Ledger::new();
    for round in 0..100 {
        let (heap, device) = heap_on(&ledger);
        thread::spawn(move || {
            KEPT.with_borrow_mut(|kept| kept.extend((0..6).map(|number| marked(&heap, number))));
            let key = *KEY.get_or_init(|| {
                let mut key = 0;
                // SAFETY: the pointer is to a local, the destructor has the signature.
                assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(late)) }, 0);
                key
            });
            // A key that was made after the thread had caches, so its destructor comes after they are gone.
            let last = Box::into_raw(Box::new(marked(&heap, round)));
            // SAFETY: the key is never deleted; the box is the destructor's.
            unsafe { libc::pthread_setspecific(key, last.cast()) };
        })
        .join()
        .unwrap();
        assert_eq!(ledger.live(), 0, "round {round}: an arena is open still");
        assert_eq!(device.key_of_address(1 << 20), Err(KeyError::Detached), "round {round}");
    }
}

#[test]
fn passes_disturb_no_running_thread_and_no_buffer_that_is_handed_on() {
    let ledger = Ledger::new();
    let (heap, _) = heap_on(&ledger);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (first, mut hands) = channel::<(usize, Buffer)>();
        for index in 0..3 {
            let (next, received) = channel();
            let (mine, heap, stop) = (std::mem::replace(&mut hands, received), &heap, &stop);
            scope.spawn(move || {
                let mut own = Vec::new();
                let mut number = index;
                while !stop.load(Relaxed) {
                    own.push((number, marked(heap, number)));
                    number += 1;
                    for (number, buffer) in mine.try_iter() {
                        assert!(is_intact(&buffer, number), "a buffer was changed");
                        // Freed by another than took it, or handed on.
                        if number % 2 == 0 {
                            let _ = next.send((number, buffer));
                        }
                    }
                    if own.len() > 20 {
                        let (number, buffer) = own.swap_remove(number * 7 % 20);
                        assert!(is_intact(&buffer, number), "a buffer was changed");
                        if number % 3 == 0 {
                            let _ = next.send((number, buffer));
                        }
                    }
                }
            });
        }
        for number in 0..300 {
            let _ = first.send((number, marked(&heap, number)));
            heap.trim();
            for (number, buffer) in hands.try_iter() {
                assert!(is_intact(&buffer, number), "a buffer was changed");
            }
        }
        stop.store(true, Relaxed);
    });
    let trimmed = heap.trim();
    assert_eq!((trimmed.open_arenas, ledger.live()), (0, 0), "{trimmed}");
}

#[test]
fn a_child_of_fork_uses_and_trims_a_heap_whose_other_threads_it_does_not_have() {
    let heap = Heap::builder().build().unwrap();
    let worker = Worker::new();
    let (ours, theirs) = (marked(&heap, 1), heap.clone());
    let kept = worker.run(move || {
        drop(marked(&theirs, 4));
        marked(&theirs, 3)
    });
    // SAFETY: the child uses the heap alone, and leaves with nothing unwound.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no preconditions.
            unsafe { libc::alarm(20) };
            let again: Vec<_> = (0..20).map(|number| marked(&heap, number)).collect();
            let intact = again.iter().enumerate().all(|(number, buffer)| is_intact(buffer, number));
            drop((again, kept, ours));
            let trimmed = heap.trim();
            // SAFETY: no preconditions.
            unsafe { libc::_exit(i32::from(!intact || (trimmed.open_arenas, trimmed.busy_threads) != (0, 0))) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child's wait status");
        }
    }
    assert!(is_intact(&ours, 1) && is_intact(&kept, 3));
    worker.end();
}

#[test]
fn without_membarrier_shards_serve_and_all_is_as_exact() {
    again_without_membarrier("without_membarrier");
}
