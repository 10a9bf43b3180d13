//! How long single allocations take while a heap grows from nothing to 4 GiB: without a device, with one, and with one and a
//! maintainer.
//!
//! A tool of its own, since criterion's means say nothing of the slowest. Blocks of 64 KiB are allocated and written, as fast
//! as that goes, and at 512 MiB a second. Only the allocation is timed: an unregistered heap's page faults come
//! later, when the block is written. The ways are measured in turns, so that the machine's moods hit all of them;
//! `cargo bench -p rdmalloc-benches --features uring --bench growth -- --rounds 5` for more than one turn.

use core::ops::Range;
use io_uring::IoUring;
use rdmalloc::{Access, Heap, Maintenance, Registered, Registrar, Retention, registrar::uring::Uring};
use std::io;
use std::time::{Duration, Instant};

const BLOCK: usize = 64 << 10;
const TOTAL: usize = 4 << 30;
/// The pace is kept from batch to batch.
const BATCH: usize = 4 << 20;

/// Where there is no io_uring: a device that is as slow as registering on adapters is said to be, 16 us and 0.06 ns a byte.
struct Model;

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Model {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        std::thread::sleep(Duration::from_nanos(16_000 + memory.len() as u64 * 6 / 100));
        Ok(Registered { keys: rdmalloc::Keys { lkey: 1, rkey: 1 }, handle: 1 })
    }
    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }
    fn is_memlocked(&self) -> bool {
        false
    }
    fn name(&self) -> &str {
        "model"
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Unregistered,
    Inline,
    Maintained,
}

impl Way {
    const ALL: [(Way, &'static str); 3] =
        [(Way::Unregistered, "no device"), (Way::Inline, "registered inline"), (Way::Maintained, "registered ahead")];
}

/// The times of all allocations in nanoseconds, in one growth; and the whole of it. `pace`: bytes a second.
fn grow(way: Way, ring: Option<&IoUring>, total: usize, pace: Option<usize>) -> (Vec<u64>, Duration) {
    let heap = Heap::builder().retention(Retention::NONE).build().expect("a heap");
    let maintenance = Maintenance::new().headroom(256 << 20);
    let maintainer = (way == Way::Maintained).then(|| heap.maintain(maintenance).expect("a maintainer"));
    if way != Way::Unregistered {
        match ring {
            Some(ring) => drop(heap.attach(Uring::new(ring).expect("it worked before")).expect("attached")),
            None => drop(heap.attach(Model).expect("attached")),
        }
    }
    // A program starts its maintainer some time before it works.
    if let Some(maintainer) = &maintainer {
        maintainer.round();
    }
    let mut times = Vec::with_capacity(total / BLOCK);
    let mut buffers = Vec::with_capacity(total / BLOCK);
    let begin = Instant::now();
    for number in 0..total / BLOCK {
        let before = Instant::now();
        let mut buffer = heap.buffer(BLOCK).expect("memory");
        times.push(before.elapsed().as_nanos() as u64);
        buffer.spare_capacity_mut().fill(core::mem::MaybeUninit::new(number as u8));
        buffers.push(buffer);
        let bytes = (number + 1) * BLOCK;
        if let Some(pace) = pace.filter(|_| bytes.is_multiple_of(BATCH)) {
            let due = Duration::from_secs_f64(bytes as f64 / pace as f64);
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
    }
    let whole = begin.elapsed();
    drop(maintainer);
    drop(buffers);
    (times, whole)
}

fn main() {
    // What `cargo bench` passes on is criterion's; only this one means something here.
    let quick = std::env::args().any(|argument| argument == "--quick");
    let total = if quick { TOTAL / 8 } else { TOTAL };
    let rounds = std::env::args().skip_while(|argument| argument != "--rounds").nth(1);
    let rounds = rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(1).max(1);
    let ring = IoUring::new(8).ok().filter(|ring| Uring::new(ring).is_ok());
    let device = if ring.is_some() { "io_uring" } else { "a model: 16 us and 0.06 ns a byte" };
    println!("growth to {} MiB in blocks of {} KiB, {rounds} rounds, device: {device}", total >> 20, BLOCK >> 10);
    println!("allocation, us:                       p50     p99   p99.9  p99.99     max   whole, s");
    for (pace, pace_name) in [(None, "full speed"), (Some(512 << 20), "512 MiB/s")] {
        let mut all = Way::ALL.map(|_| (Vec::new(), Vec::new(), Vec::new()));
        for round in 0..rounds {
            // Each way after each other: what one leaves the kernel with (huge pages, or pieces of them) is the next one's start.
            for turn in 0..Way::ALL.len() {
                let index = (round + turn) % Way::ALL.len();
                let (times, largest, wholes) = &mut all[index];
                let (these, whole) = grow(Way::ALL[index].0, ring.as_ref(), total, pace);
                largest.push(these.iter().copied().max().unwrap_or(0));
                wholes.push(whole);
                times.extend(these);
            }
        }
        for ((_, name), (times, largest, wholes)) in Way::ALL.iter().zip(&mut all) {
            times.sort_unstable();
            largest.sort_unstable();
            wholes.sort_unstable();
            let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
            let max = largest[largest.len() / 2] as f64 / 1000.0;
            let whole = wholes[wholes.len() / 2].as_secs_f64();
            print!("  {pace_name:<12} {name:<18}");
            println!("{:8.2}{:8.2}{:8.2}{:8.0}{max:8.0}{whole:11.2}", at(0.5), at(0.99), at(0.999), at(0.9999));
        }
    }
    println!("max and whole: the median of the rounds'");
}
