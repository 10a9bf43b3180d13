//! Whether several devices should register an arena at once: the body of the second group of `registration_verbs`.
//!
//! The memory is an arena's: in 2 MiB pages where the kernel has them, and faulted in.

use criterion::{BenchmarkId, Criterion};
use rdmalloc::Heap;
use rdmalloc_arenas::{Access, Registrar};
use rdmalloc_tests::Ledger;
use std::ops::Range;

/// The sizes of the arenas, in bytes.
const SIZES: [usize; 3] = [8 << 20, 32 << 20, 256 << 20];

/// Registers and deregisters arenas on two devices, of which `handle` makes handles: on the first alone, on one after the other,
/// on both at once; and opens and closes them by a heap that has both.
///
/// # Panics
///
/// If a device refuses.
pub fn bench<R: Registrar>(criterion: &mut Criterion, handle: impl Fn(usize) -> R) {
    let devices = [handle(0), handle(1)];
    let mut group = criterion.benchmark_group(format!("devices/{}+{}", devices[0].name(), devices[1].name()));
    let source = Heap::builder().build().expect("a heap");
    source.attach(Ledger::new()).expect("attached");
    let heap = Heap::builder().build().expect("a heap");
    heap.attach_all([handle(0), handle(1)]).expect("attached");
    let both = |device: &R, memory: Range<usize>| {
        // SAFETY: the memory outlives the registration.
        let registered = unsafe { device.register(memory.clone(), Access::LOCAL_WRITE) }.expect("registered");
        device.deregister(registered, memory).expect("deregistered");
    };
    for size in SIZES {
        // Faulted in as it is registered, with a device that registers nothing.
        let buffer = source.buffer(size).expect("a buffer");
        let start = buffer.as_ptr().expose_provenance();
        let memory = start..start + size;
        let mib = size >> 20;
        group.bench_function(BenchmarkId::new("one-device", mib), |bencher| {
            bencher.iter(|| both(&devices[0], memory.clone()));
        });
        group.bench_function(BenchmarkId::new("two-in-turn", mib), |bencher| {
            bencher.iter(|| devices.iter().for_each(|device| both(device, memory.clone())));
        });
        group.bench_function(BenchmarkId::new("two-at-once", mib), |bencher| {
            bencher.iter(|| {
                std::thread::scope(|scope| {
                    let second = scope.spawn(|| both(&devices[1], memory.clone()));
                    both(&devices[0], memory.clone());
                    second.join().expect("registered");
                });
            });
        });
        group.bench_function(BenchmarkId::new("open-and-close", mib), |bencher| {
            bencher.iter(|| {
                drop(heap.buffer(size).expect("a buffer"));
                heap.trim()
            });
        });
    }
    group.finish();
}
