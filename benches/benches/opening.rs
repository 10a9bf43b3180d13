//! How fast memory is registered as arenas are opened, against the bare call of the device on the same kind of memory.
//!
//! Twice: memory that was never touched, so that opening an arena faults it in as well (the bare call does too, since it pins);
//! and memory that is there, which a heap registers as a device is attached. With pages of 4 KiB and of 2 MiB. A tool of its own, since
//! what counts are ratios of what is measured in turn: `cargo bench -p rdmalloc-benches --features uring --bench opening`, with
//! `-- --rounds 21` for more than 11.

use core::ops::Range;
use io_uring::IoUring;
use rdmalloc::{Access, Heap, Registrar, Retention, registrar::uring::Uring};
use std::time::Duration;

/// The lengths of the arenas, in bytes.
const SIZES: [usize; 2] = [64 << 20, 256 << 20];
const HUGE: usize = 2 << 20;

/// What is measured, in the order of the rows.
const WAYS: [&str; 4] = ["untouched: bare call", "untouched: arena opened", "there: bare call", "there: attached"];

/// Whether this process may have huge pages, from now on.
fn allow_huge(yes: bool) {
    // SAFETY: takes numbers only.
    let result = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, libc::c_ulong::from(!yes), 0, 0, 0) };
    assert_eq!(result, 0, "prctl");
}

/// Memory of our own, on a boundary of huge pages, never touched, advised to be in huge pages.
struct Mapping {
    start: *mut libc::c_void,
    whole: usize,
    memory: Range<usize>,
}

impl Mapping {
    fn new(size: usize) -> Mapping {
        let whole = size + HUGE;
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, where the kernel likes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, rights, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "no memory");
        let first = start.expose_provenance().next_multiple_of(HUGE);
        // SAFETY: within the mapping.
        unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(first), size, libc::MADV_HUGEPAGE) };
        Mapping { start, whole, memory: first..first + size }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, registered no more (`register`), and nobody refers to it.
        unsafe { libc::munmap(self.start, self.whole) };
    }
}

/// The processor time of this thread so far. All that is measured is done by the kernel for the thread that asks; and what others
/// want of the machine meanwhile counts for nothing.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the local only.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "clock_gettime");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Registers and deregisters; how long the former took.
fn register(uring: &Uring, memory: &Range<usize>) -> Duration {
    let begin = now();
    // SAFETY: mapped until it is deregistered, which is the next step.
    let registered = unsafe { uring.register(memory.clone(), Access::LOCAL_WRITE) }.expect("registered");
    let time = now() - begin;
    uring.deregister(registered, memory.clone()).expect("deregistered");
    time
}

/// Each way once, beginning with the `first`; seconds.
fn round(ring: [&IoUring; 2], size: usize, first: usize) -> [f64; 4] {
    let bare = Uring::new(ring[0]).expect("it worked before");
    let heap = Heap::builder().retention(Retention::NONE).build().expect("a heap");
    let device = heap.attach(Uring::new(ring[1]).expect("it worked before")).expect("attached");
    let mut times = [0.0; 4];
    for turn in 0..WAYS.len() {
        let way = (first + turn) % WAYS.len();
        let time = match way {
            0 => register(&bare, &Mapping::new(size).memory),
            1 => {
                let begin = now();
                let buffer = heap.buffer(size).expect("a buffer");
                let time = now() - begin;
                device.key(buffer.as_ptr()).expect("registered");
                drop(buffer);
                heap.trim();
                time
            }
            _ => {
                // A heap's memory, which has been faulted in for its device: registered anew, by the bare call or by an attachment.
                let buffer = heap.buffer(size).expect("a buffer");
                let start = buffer.as_ptr().expose_provenance();
                if way == 2 {
                    register(&bare, &(start..start + size))
                } else {
                    let begin = now();
                    let second = heap.attach(bare.clone()).expect("attached");
                    let time = now() - begin;
                    second.key(buffer.as_ptr()).expect("registered");
                    heap.detach(second).expect("detached");
                    time
                }
            }
        };
        times[way] = time.as_secs_f64();
    }
    times
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let rounds = std::env::args().skip_while(|argument| argument != "--rounds").nth(1);
    let rounds = rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(if quick { 3 } else { 11 }).max(1);
    let rings = [IoUring::new(8), IoUring::new(8)];
    let rings = match &rings {
        [Ok(first), Ok(second)] => [first, second],
        [Err(error), _] | [_, Err(error)] => return println!("skipped: no io_uring: {error}"),
    };
    if let Err(error) = Uring::new(rings[0]) {
        return println!("skipped: {error}");
    }
    println!("GiB a second of processor time, medians of {rounds} rounds in rotation; and the ratio to the bare call");
    let mut rates = Vec::new();
    for (huge, pages) in [(false, "4 KiB"), (true, "2 MiB")] {
        allow_huge(huge);
        for size in SIZES {
            let all: Vec<[f64; 4]> = (0..rounds).map(|number| round(rings, size, number)).collect();
            let of = |way: usize| all.iter().map(|times| times[way]).collect::<Vec<f64>>();
            for (way, name) in WAYS.iter().enumerate() {
                let rate = size as f64 / f64::from(1 << 30) / median(of(way));
                print!("  pages of {pages}, {:>3} MiB  {name:<26}{rate:>10.2}", size >> 20);
                match rates.last() {
                    Some(bare) if way % 2 == 1 => println!("{:>8.2}", rate / bare),
                    _ => println!(),
                }
                rates.push(rate);
            }
        }
    }
    allow_huge(true);
    for (number, size) in SIZES.iter().enumerate() {
        let at = |huge: usize, way: usize| rates[(huge * SIZES.len() + number) * WAYS.len() + way];
        print!("  {} MiB, 2 MiB pages to 4 KiB pages: ", size >> 20);
        let ratio = |way: usize| format!("{} {:.1}", WAYS[way], at(1, way) / at(0, way));
        println!("{}", [0, 1, 2, 3].map(ratio).join("; "));
    }
}
