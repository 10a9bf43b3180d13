//! Allocating and freeing, against the system's allocator and mimalloc, each called through `GlobalAlloc`.
//!
//! Nothing is attached: what a registered heap costs beyond this is measured in `lookup` and `registration`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mimalloc::MiMalloc;
use rdmalloc::Rdmalloc;
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::mpsc;
use std::time::Instant;

static RDMALLOC: Rdmalloc = Rdmalloc::new();

/// Sizes of single pairs, in bytes.
const SIZES: [usize; 9] = [16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20];

/// Runs a bench, generic over the allocator, for each of them.
macro_rules! for_each_allocator {
    ($bench:ident($($argument:expr),*)) => {
        $bench("rdmalloc", &RDMALLOC, $($argument),*);
        $bench("system", &System, $($argument),*);
        $bench("mimalloc", &MiMalloc, $($argument),*);
    };
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).expect("a small size")
}

/// Allocates, and writes one byte, as every user would.
fn take<A: GlobalAlloc>(allocator: &A, layout: Layout) -> *mut u8 {
    // SAFETY: no layout here has size zero.
    let block = black_box(unsafe { allocator.alloc(layout) });
    assert!(!block.is_null());
    // SAFETY: the block has at least one byte.
    unsafe { block.write(1) };
    block
}

/// Frees.
///
/// # Safety
///
/// `block` came from `take` with the same allocator and layout, and is not used afterwards.
unsafe fn give_back<A: GlobalAlloc>(allocator: &A, block: *mut u8, layout: Layout) {
    // SAFETY: the caller's promise.
    unsafe { allocator.dealloc(black_box(block), layout) }
}

fn pairs(criterion: &mut Criterion) {
    fn bench<A: GlobalAlloc>(name: &str, allocator: &A, criterion: &mut Criterion, size: usize) {
        let layout = layout(black_box(size));
        criterion.benchmark_group("pair").bench_function(BenchmarkId::new(size.to_string(), name), |bencher| {
            bencher.iter(|| {
                let block = take(allocator, layout);
                // SAFETY: just taken.
                unsafe { give_back(allocator, block, layout) };
            });
        });
    }
    for size in SIZES {
        for_each_allocator!(bench(criterion, size));
    }
}

/// 1000 blocks of 64 bytes out, then in, in the order they came.
fn batch(criterion: &mut Criterion) {
    fn bench<A: GlobalAlloc>(name: &str, allocator: &A, criterion: &mut Criterion) {
        let mut group = criterion.benchmark_group("batch");
        let layout = layout(64);
        let mut blocks = Vec::with_capacity(1000);
        group.throughput(Throughput::Elements(1000));
        group.bench_function(BenchmarkId::new("1000x64", name), |bencher| {
            bencher.iter(|| {
                blocks.extend((0..1000).map(|_| take(allocator, layout)));
                // SAFETY: each was just taken, and leaves the vector.
                blocks.drain(..).for_each(|block| unsafe { give_back(allocator, block, layout) });
            });
        });
    }
    for_each_allocator!(bench(criterion));
}

/// A small pseudo-random generator (xorshift), the same sequence for each allocator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Mostly small: a size of 16 bytes to 8 KiB, each power of two as likely as the next.
    fn layout(&mut self) -> Layout {
        let next = self.next();
        let below = 16 << ((next >> 32) % 9);
        layout(below + (next as usize & (below - 1)))
    }
}

/// 4096 live blocks of mixed sizes; each step replaces one at random.
fn churn(criterion: &mut Criterion) {
    fn bench<A: GlobalAlloc>(name: &str, allocator: &A, criterion: &mut Criterion) {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let block = |random: &mut Random| {
            let layout = random.layout();
            (take(allocator, layout), layout)
        };
        let mut live: Vec<_> = (0..4096).map(|_| block(&mut random)).collect();
        criterion.benchmark_group("churn").bench_function(BenchmarkId::new("4096-live", name), |bencher| {
            bencher.iter(|| {
                let at = random.next() as usize % live.len();
                let (old, layout) = core::mem::replace(&mut live[at], block(&mut random));
                // SAFETY: taken with this layout, and just replaced.
                unsafe { give_back(allocator, old, layout) };
            });
        });
        for (block, layout) in live {
            // SAFETY: each is taken with its layout, and given back once.
            unsafe { give_back(allocator, block, layout) };
        }
    }
    for_each_allocator!(bench(criterion));
}

/// Blocks of 64 bytes that another thread frees; they are handed over in batches, so that the handing over costs little.
fn freed_elsewhere(criterion: &mut Criterion) {
    const BATCH: usize = 256;
    fn bench<A: GlobalAlloc + Sync>(name: &str, allocator: &A, criterion: &mut Criterion) {
        let mut group = criterion.benchmark_group("freed-by-another-thread");
        group.throughput(Throughput::Elements(BATCH as u64));
        let layout = layout(64);
        group.bench_function(BenchmarkId::new("256x64", name), |bencher| {
            bencher.iter_custom(|batches| {
                // A pointer is not `Send`, its address is.
                let (full, to_free) = mpsc::sync_channel::<Vec<usize>>(8);
                let (empty, to_fill) = mpsc::sync_channel::<Vec<usize>>(16);
                (0..8).for_each(|_| empty.send(Vec::with_capacity(BATCH)).expect("room for 16"));
                std::thread::scope(|scope| {
                    let freeing = scope.spawn(move || {
                        for mut batch in to_free {
                            for address in batch.drain(..) {
                                let block = std::ptr::with_exposed_provenance_mut(address);
                                // SAFETY: taken by the other thread with this layout, and handed over.
                                unsafe { give_back(allocator, block, layout) };
                            }
                            empty.send(batch).expect("the allocating thread keeps the other end");
                        }
                    });
                    let start = Instant::now();
                    for _ in 0..batches {
                        let mut batch = to_fill.recv().expect("the freeing thread lives");
                        batch.extend((0..BATCH).map(|_| take(allocator, layout).expose_provenance()));
                        full.send(batch).expect("the freeing thread lives");
                    }
                    drop(full);
                    freeing.join().expect("no panic");
                    start.elapsed()
                })
            });
        });
    }
    for_each_allocator!(bench(criterion));
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = pairs, batch, churn, freed_elsewhere);
criterion_main!(benches);
