//! A buffer made usable for a device in four ways; the body of `registration` (io_uring) and `registration_verbs`.
//!
//! The peers are given their buffer: it is allocated and touched once, outside the measurement, as in a program that keeps
//! its buffers. rdmalloc's is taken and given back each time.

use crate::peers::{bounce::Bounce, cache::Cache};
use core::hint::black_box;
use criterion::{BenchmarkId, Criterion};
use rdmalloc::Heap;
use rdmalloc_arenas::{Access, Registrar};

/// The sizes of the buffers, in bytes.
pub const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// Runs the four on a device, of which `handle` makes handles.
///
/// # Panics
///
/// If the device refuses: the message says what, and which locked-memory limit there is.
pub fn bench<R: Registrar>(criterion: &mut Criterion, handle: impl Fn() -> R) {
    let registrar = handle();
    let mut group = criterion.benchmark_group(format!("registration/{}", registrar.name()));
    let cache = Cache::new(handle(), 1024);
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(handle()).expect("attached");

    for size in SIZES {
        let mut message = vec![1u8; size + 4096];
        // A peer registers whole pages, and should not pay for one more than its message has.
        let unaligned = message.as_mut_ptr().align_offset(4096);
        let message = &mut message[unaligned..unaligned + size];
        let start = message.as_mut_ptr().expose_provenance();
        let range = start..start + size;

        group.bench_function(BenchmarkId::new("each-time", size), |bencher| {
            bencher.iter(|| {
                // SAFETY: the message outlives the registration.
                let registered = unsafe { registrar.register(range.clone(), Access::LOCAL_WRITE) }.expect("registered");
                black_box(registered.keys);
                registrar.deregister(registered, range.clone()).expect("deregistered");
            });
        });

        group.bench_function(BenchmarkId::new("cache-hit", size), |bencher| {
            cache.get(&range).expect("registered");
            bencher.iter(|| black_box(cache.get(&range).expect("registered").keys()));
        });
        cache.forget(&range);

        group.bench_function(BenchmarkId::new("bounce-copy", size), |bencher| {
            let bounce = Bounce::new(handle(), 2, size).expect("registered");
            bencher.iter(|| bounce.send(black_box(message), |buffer, keys| black_box((buffer, keys))));
        });

        group.bench_function(BenchmarkId::new("rdmalloc", size), |bencher| {
            bencher.iter(|| {
                let buffer = heap.buffer(size).expect("a buffer");
                black_box(device.key(buffer.as_ptr()).expect("registered"));
            });
        });
    }
}
