//! What a flight costs beside the work request: taken, made an id, found again, given back. And what a piece of a message costs
//! that is sent in place, or copied (`gather`): one that is in the processor's cache, and one that is not.
//!
//! `slot` is what rdmalloc does. `box` is what programs do: hold the device, put the buffer into a box, and make its address the
//! `wr_id`; nothing is checked then. The device registers nothing (`null`).

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rdmalloc::{Buffer, Device, Flight, Gathering, Heap, Rdmalloc};
use rdmalloc_tests::Null;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// Work requests under way at once.
const DEPTH: usize = 64;

trait Way: Sync {
    fn post(&self, buffer: Buffer) -> u64;
    fn complete(&self, id: u64) -> Buffer;
}

struct Slot(Device);

impl Way for Slot {
    fn post(&self, buffer: Buffer) -> u64 {
        let flight = self.0.fly(buffer).expect("it flies");
        black_box(flight.sge().expect("registered"));
        flight.into_id()
    }

    fn complete(&self, id: u64) -> Buffer {
        // SAFETY: nothing was posted.
        unsafe { Flight::<Buffer>::from_id(id).expect("under way").complete_send() }
    }
}

struct Boxed(Device);

impl Way for Boxed {
    fn post(&self, buffer: Buffer) -> u64 {
        let hold = self.0.hold().expect("held").into_raw();
        black_box(self.0.sge(&buffer).expect("registered"));
        Box::into_raw(Box::new((buffer, hold))).expose_provenance() as u64
    }

    fn complete(&self, id: u64) -> Buffer {
        // SAFETY: from `post`, once.
        let (buffer, hold) =
            *unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<(Buffer, u64)>(id as usize)) };
        // SAFETY: from `post`, once.
        drop(unsafe { rdmalloc::Hold::from_raw(hold) });
        buffer
    }
}

/// `count` buffers through `way`, `DEPTH` at a time.
fn run(way: &impl Way, heap: &Heap, count: u64) -> Duration {
    let mut idle: Vec<Buffer> = (0..DEPTH).map(|_| filled(heap)).collect();
    let mut posted = VecDeque::with_capacity(DEPTH);
    let begin = Instant::now();
    for _ in 0..count {
        if let Some(buffer) = idle.pop() {
            posted.push_back(way.post(buffer));
        } else if let Some(id) = posted.pop_front() {
            posted.push_back(way.post(way.complete(id)));
        }
    }
    let time = begin.elapsed();
    posted.into_iter().for_each(|id| drop(way.complete(id)));
    time
}

fn filled(heap: &Heap) -> Buffer {
    let mut buffer = heap.buffer(4096).expect("a buffer");
    buffer.try_extend_from_slice(&[1; 64]).expect("room");
    buffer
}

fn bench(criterion: &mut Criterion, name: &str, way: &impl Way, heap: &Heap) {
    let mut group = criterion.benchmark_group("flight");
    group.bench_function(BenchmarkId::new("1-thread", name), |bencher| {
        bencher.iter_custom(|count| run(way, heap, count));
    });
    group.bench_function(BenchmarkId::new("2-threads", name), |bencher| {
        bencher.iter_custom(|count| {
            let ready = Barrier::new(2);
            let work = || {
                ready.wait();
                run(way, heap, 100 * count)
            };
            let both = std::thread::scope(|scope| {
                let other = scope.spawn(work);
                work().max(other.join().expect("no panic"))
            });
            both / 100
        });
    });
}

fn flight(criterion: &mut Criterion) {
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(Null::default()).expect("attached");
    bench(criterion, "slot", &Slot(device), &heap);
    bench(criterion, "box", &Boxed(device), &heap);
}

/// Pieces in a message.
const PIECES: usize = 8;

/// Messages of pieces that lie apart in `memory`; the time is that of a message.
fn pieces(criterion: &mut Criterion, device: Device, header: &mut Buffer, memory: &[u8], cache: &str) {
    let mut group = criterion.benchmark_group("gather");
    for len in [64, 128, 256, 512, 1024, 2048, 4096] {
        for (name, threshold) in [("in-place", 0), ("copied", usize::MAX)] {
            let gathering = Gathering::new(PIECES + 1).threshold(threshold);
            let mut at = 0;
            group.bench_function(BenchmarkId::new(format!("{cache}/{name}"), len), |bencher| {
                bencher.iter(|| {
                    let pieces = (0..PIECES).map(|_| {
                        // Apart by pages and a bit, so that they are not foreseen.
                        at = (at + 5 * 4096 + 64) % (memory.len() - 4096);
                        &memory[at..at + len]
                    });
                    let room = header.spare_capacity_mut();
                    black_box(gathering.gather(device, room, pieces).expect("it fits").entries().len());
                });
            });
        }
    }
}

fn gather(criterion: &mut Criterion) {
    let heap = Heap::builder().build().expect("a heap");
    let device = heap.attach(Null::default()).expect("attached");
    let mut header = heap.buffer(PIECES * 4096).expect("a buffer");
    for (cache, len) in [("warm", 64 << 10), ("cold", 256 << 20)] {
        let mut memory = heap.buffer(len).expect("a buffer");
        memory.try_extend_from_slice(&vec![1; len]).expect("room");
        pieces(criterion, device, &mut header, &memory, cache);
    }
}

criterion_group!(name = benches; config = rdmalloc_benches::criterion(); targets = flight, gather);
criterion_main!(benches);
