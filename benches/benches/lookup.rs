//! From an address to its keys: rdmalloc's arithmetic against a registration cache's ordered map, on one and two threads.
//!
//! Both look up the same number of different blocks. The device registers nothing (`null`), since only the way to the keys
//! is measured.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rdmalloc::Heap;
use rdmalloc_benches::{null::Null, peers::cache::Cache};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

type Group<'a> = criterion::BenchmarkGroup<'a, criterion::measurement::WallTime>;

/// How many blocks are looked up in turn, and how long each is: a pool of buffers as a server has it.
const BLOCKS: usize = 1024;
const BLOCK: usize = 16 << 10;

/// Times `count` calls in each of `threads` threads, from when all stand ready to when the last is done.
fn on_threads(threads: usize, count: u64, call: impl Fn(usize) + Sync) -> Duration {
    let ready = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let work = |thread: usize| {
            let (ready, call) = (&ready, &call);
            scope.spawn(move || {
                ready.wait();
                // Each thread begins elsewhere, so that they do not walk in step.
                (0..count as usize).for_each(|i| call((i + thread * BLOCKS / 2) % BLOCKS));
                Instant::now()
            })
        };
        let running: Vec<_> = (0..threads).map(work).collect();
        ready.wait();
        let start = Instant::now();
        running.into_iter().map(|thread| thread.join().expect("no panic") - start).max().expect("a thread")
    })
}

/// One bench, compiled for its `call`, so that the call itself is free.
fn bench(group: &mut Group<'_>, threads: usize, kind: &str, name: &str, call: impl Fn(usize) + Sync) {
    group.bench_function(BenchmarkId::new(kind, name), |bencher| {
        bencher.iter_custom(|count| on_threads(threads, count, &call));
    });
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

    for threads in [1, 2] {
        let mut group = criterion.benchmark_group(format!("lookup/{threads}-threads"));
        bench(&mut group, threads, "own", "rdmalloc", |i| {
            black_box(device.key(own[i] as *const u8).expect("registered"));
        });
        bench(&mut group, threads, "own", "cache", |i| {
            black_box(cache.get(&cached[i]).expect("registered").keys());
        });
        bench(&mut group, threads, "foreign", "rdmalloc", |i| {
            black_box(device.key(foreign[i] as *const u8).expect_err("foreign"));
        });
        bench(&mut group, threads, "foreign", "cache", |i| {
            assert!(black_box(cache.find(&(foreign[i]..foreign[i] + 64))).is_none());
        });
    }
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = lookup);
criterion_main!(benches);
