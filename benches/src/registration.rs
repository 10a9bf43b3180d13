//! A buffer made usable for a device in five ways; the body of `registration` (io_uring) and `registration_verbs`.
//!
//! The peers are given their buffer: it is allocated and touched once, outside the measurement, as in a program that keeps
//! its buffers. rdmalloc's is taken and given back each time, from a heap that a program made and from the global one.

use crate::peers::{bounce::Bounce, cache::Cache};
use core::hint::black_box;
use criterion::{BenchmarkId, Criterion};
use rdmalloc::{Heap, Rdmalloc};
use rdmalloc_arenas::{Access, Registrar};
use std::alloc::{GlobalAlloc, Layout};
use std::error::Error;

/// The sizes of the buffers, in bytes.
pub const SIZES: [usize; 6] = [64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

static GLOBAL: Rdmalloc = Rdmalloc::new();

/// Runs the five on a device, of which `handle` makes handles.
///
/// # Panics
///
/// If the device refuses to be attached.
pub fn bench<R: Registrar>(criterion: &mut Criterion, handle: impl Fn() -> R) {
    let registrar = handle();
    let mut group = criterion.benchmark_group(format!("registration/{}", registrar.name()));
    let cache = Cache::new(handle(), 1024);
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(handle()).expect("attached");
    let global = GLOBAL.attach(handle()).expect("attached");

    for size in SIZES {
        let mut message = vec![1u8; size + 4096];
        // A peer registers whole pages, and should not pay for one more than its message has.
        let unaligned = message.as_mut_ptr().align_offset(4096);
        let message = &mut message[unaligned..unaligned + size];
        let start = message.as_mut_ptr().expose_provenance();
        let range = start..start + size;
        let layout = Layout::from_size_align(black_box(size), 8).expect("a small size");

        // Each once, so that a small limit on locked memory skips a size and does not end the benches.
        let once = || -> Result<(), Box<dyn Error>> {
            // SAFETY: the message outlives the registration.
            let registered = unsafe { registrar.register(range.clone(), Access::LOCAL_WRITE)? };
            registrar.deregister(registered, range.clone())?;
            Bounce::new(handle(), 2, size)?;
            device.key(heap.buffer(size)?.as_ptr())?;
            // SAFETY: the size is not zero.
            let block = unsafe { GLOBAL.alloc(layout) };
            let keys = global.key(block);
            // SAFETY: just allocated with this layout.
            unsafe { GLOBAL.dealloc(block, layout) };
            keys?;
            cache.get(&range)?;
            Ok(())
        };
        if let Err(error) = once() {
            println!("skipped: {size} bytes: {error}");
            continue;
        }

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

        group.bench_function(BenchmarkId::new("rdmalloc-buffer", size), |bencher| {
            bencher.iter(|| {
                let buffer = heap.buffer(size).expect("a buffer");
                black_box(device.key(buffer.as_ptr()).expect("registered"));
            });
        });

        group.bench_function(BenchmarkId::new("rdmalloc-global", size), |bencher| {
            bencher.iter(|| {
                // SAFETY: the size is not zero.
                let block = black_box(unsafe { GLOBAL.alloc(layout) });
                black_box(global.key(block).expect("registered"));
                // SAFETY: just allocated with this layout.
                unsafe { GLOBAL.dealloc(block, layout) };
            });
        });
    }
    group.finish();
    GLOBAL.detach(global).expect("detached");
    heap.detach(device).expect("detached");
}
