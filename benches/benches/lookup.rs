//! From an address to its keys: rdmalloc's arithmetic against a registration cache's ordered map, on one and two threads.
//!
//! Both look up the same number of different blocks. The device registers nothing (`null`), since only the way to the keys
//! is measured.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rdmalloc::Heap;
use rdmalloc_benches::peers::cache::Cache;
use rdmalloc_tests::Null;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// How many blocks are looked up in turn, and how long each is: a pool of buffers as a server has it.
const BLOCKS: usize = 1024;
const BLOCK: usize = 16 << 10;

/// Makes `count` calls, beginning with the `first`; from when to when.
fn timed(first: usize, count: u64, call: &impl Fn(usize)) -> (Instant, Instant) {
    let start = Instant::now();
    (first..first + count as usize).for_each(|i| call(i % BLOCKS));
    (start, Instant::now())
}

/// Makes `count` calls in each of two threads; how long, from when the first begins to when the last is done.
fn on_two_threads(count: u64, call: &(impl Fn(usize) + Sync)) -> Duration {
    let ready = Barrier::new(2);
    let work = |first| {
        ready.wait();
        timed(first, count, call)
    };
    std::thread::scope(|scope| {
        // Each begins elsewhere, so that they do not walk in step.
        let other = scope.spawn(|| work(BLOCKS / 2));
        let here = work(0);
        let other = other.join().expect("no panic");
        here.1.max(other.1) - here.0.min(other.0)
    })
}

/// One bench, compiled for its `call`, so that the call itself is free.
fn bench(criterion: &mut Criterion, kind: &str, name: &str, call: impl Fn(usize) + Sync) {
    criterion.benchmark_group("lookup").bench_function(BenchmarkId::new(format!("{kind}/1-thread"), name), |bencher| {
        bencher.iter_custom(|count| {
            let (start, end) = timed(0, count, &call);
            end - start
        });
    });
    criterion.benchmark_group("lookup").bench_function(
        BenchmarkId::new(format!("{kind}/2-threads"), name),
        |bencher| {
            // In thousands, so that starting a thread does not weigh when few are asked for.
            bencher.iter_custom(|count| on_two_threads(1000 * count, &call) / 1000);
        },
    );
}

fn lookup(criterion: &mut Criterion) {
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(Null::default()).expect("attached");
    let buffers: Vec<_> = (0..BLOCKS).map(|_| heap.buffer(BLOCK).expect("a buffer")).collect();
    let own: Vec<usize> = buffers.iter().map(|buffer| buffer.as_ptr().addr() + BLOCK / 2).collect();

    let cache = Cache::new(Null::default(), BLOCKS);
    let memory = vec![0u8; 2 * BLOCKS * BLOCK];
    // Every second block, so that none touches another.
    let cached: Vec<_> = (0..BLOCKS).map(|i| memory.as_ptr().addr() + 2 * i * BLOCK).map(|at| at..at + 64).collect();
    for block in &cached {
        drop(cache.get(block).expect("registered"));
    }
    let foreign: Vec<usize> = cached.iter().map(|block| block.start + BLOCK).collect();

    bench(criterion, "own", "rdmalloc", |i| {
        black_box(device.key(own[i] as *const u8).expect("registered"));
    });
    bench(criterion, "own", "cache", |i| {
        black_box(cache.get(&cached[i]).expect("registered").keys());
    });
    bench(criterion, "foreign", "rdmalloc", |i| {
        black_box(device.key(foreign[i] as *const u8).expect_err("foreign"));
    });
    bench(criterion, "foreign", "cache", |i| {
        assert!(black_box(cache.find(&(foreign[i]..foreign[i] + 64))).is_none());
    });
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = lookup);
criterion_main!(benches);
