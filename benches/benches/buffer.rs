//! A registered buffer of 64 KiB: taken, its key looked up, given back. A heap that threads share, the global path, and a free list as
//! programs make it: buffers that were registered once, in crossbeam's lock-free queue.
//!
//! By one thread, and by two at once. A figure is how long a turn takes of a processor's time, of the slower thread: with equal
//! figures, two threads get twice as much done. (None of the ways sleeps; and so a machine that does something else beside
//! changes little.) Nothing is written to the buffers, and the device registers nothing: only the way to the buffer is measured.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use rdmalloc::{Heap, Rdmalloc};
use rdmalloc_tests::Null;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Duration;

#[global_allocator]
static GLOBAL: Rdmalloc = Rdmalloc::new();

/// Bytes in a buffer.
const SIZE: usize = 64 << 10;
/// Larger ones: a span of their own, kept by the cache; and one that no cache keeps.
const LARGER: [(&str, usize); 3] = [("1MiB", 1 << 20), ("4MiB", 4 << 20), ("16MiB", 16 << 20)];
/// Buffers in the free list.
const LISTED: usize = 64;

/// How long this thread has been on a processor.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "Linux has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// How long `count` turns take the slower one of the threads, each making so many.
fn turns(threads: usize, count: u64, turn: &(impl Fn() + Sync)) -> Duration {
    let ready = Barrier::new(threads);
    let work = || {
        ready.wait();
        let start = processor_time();
        (0..count).for_each(|_| turn());
        processor_time() - start
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let here = work();
        others.into_iter().map(|other| other.join().expect("no panic")).fold(here, Duration::max)
    })
}

/// Measures a turn by one and by two threads. Compiled for its `turn`, so that the call is free.
fn bench(criterion: &mut Criterion, name: &str, turn: impl Fn() + Sync) {
    for threads in [1, 2] {
        let mut group = criterion.benchmark_group("buffer");
        group.bench_function(BenchmarkId::new(name, format!("{threads}-threads")), |bencher| {
            // In thousands, so that starting a thread does not weigh when few are asked for.
            bencher.iter_custom(|count| turns(threads, 1000 * count, &turn) / 1000);
        });
    }
}

fn buffer(criterion: &mut Criterion) {
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(Null::default()).expect("attached");
    let global = GLOBAL.attach(Null::default()).expect("attached");

    bench(criterion, "heap", || {
        let buffer = heap.buffer(SIZE).expect("a buffer");
        black_box(device.key(buffer.as_ptr()).expect("registered"));
        drop(black_box(buffer));
    });
    bench(criterion, "global", || {
        let buffer = black_box(Vec::<u8>::with_capacity(SIZE));
        black_box(global.key(buffer.as_ptr()).expect("registered"));
    });
    let list = ArrayQueue::new(LISTED);
    (0..LISTED).for_each(|_| list.push(heap.buffer(SIZE).expect("a buffer")).expect("room"));
    bench(criterion, "array-queue", || {
        let buffer = list.pop().expect("two threads have two at most");
        black_box(device.key(buffer.as_ptr()).expect("registered"));
        list.push(black_box(buffer)).expect("room");
    });
    for (name, size) in LARGER {
        bench(criterion, &format!("heap-{name}"), || {
            let buffer = heap.buffer(size).expect("a buffer");
            black_box(device.key(buffer.as_ptr()).expect("registered"));
            drop(black_box(buffer));
        });
    }
    let clearing = Heap::builder().zero_on_free(true).build().expect("a heap");
    for (name, size) in [("64-KiB", SIZE), ("4-MiB", 4 << 20)] {
        bench(criterion, &format!("zero-on-free-{name}"), || {
            drop(black_box(clearing.buffer(size).expect("a buffer")));
        });
    }
    drop(list);
    GLOBAL.detach(global).expect("detached");
    heap.detach(device).expect("detached");
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = buffer);
criterion_main!(benches);
