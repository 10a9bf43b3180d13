//! How much stays registered, or resident, after a peak: the trace of `rdmalloc_tests::Trace`, on one allocator.
//!
//! ```text
//! cargo run --release -p rdmalloc-benches --example placement -- rdmalloc|mimalloc|jemalloc|system [MiB of the peak]
//! ```
//!
//! Each in a process of its own. A line for each volume of the live heap that was replaced; `held` is what is registered, or
//! for the others resident, after each has given back what it can: rdmalloc by `trim`, mimalloc by `mi_collect`, jemalloc by
//! having no decay times, the system's by `malloc_trim`.

use mimalloc::MiMalloc;
use rdmalloc::Rdmalloc;
use rdmalloc_tests::{Null, Trace};
use std::alloc::{GlobalAlloc, System};
use std::time::Instant;
use tikv_jemallocator::Jemalloc;

static RDMALLOC: Rdmalloc = Rdmalloc::new();

/// jemalloc's options, found by this name.
#[unsafe(export_name = "_rjem_malloc_conf")]
static CONFIGURATION: &[u8; 35] = b"dirty_decay_ms:0,muzzy_decay_ms:0\0\0";

unsafe extern "C" {
    fn mi_collect(force: bool);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let peak = arguments.next().map_or(4096, |text| text.parse().expect("MiB")) << 20;
    let nothing = || ();
    match name.as_str() {
        "rdmalloc" => {
            RDMALLOC.attach(Null::default()).expect("attached");
            let registered = |_| RDMALLOC.stats().registered_bytes;
            run(&RDMALLOC, peak, registered, || {
                RDMALLOC.trim();
            });
        }
        // SAFETY: it has no preconditions.
        "mimalloc" => run(&MiMalloc, peak, resident, || unsafe { mi_collect(true) }),
        "jemalloc" => run(&Jemalloc, peak, resident, nothing),
        // SAFETY: as above.
        "system" => run(&System, peak, resident, || unsafe {
            libc::malloc_trim(0);
        }),
        _ => println!("rdmalloc, mimalloc, jemalloc or system?"),
    }
}

fn run<A: GlobalAlloc>(allocator: &A, peak: usize, held: impl Fn(usize) -> usize, give_back: impl Fn()) {
    let mut trace = Trace::new(allocator, peak);
    let (base, start) = (resident(0), Instant::now());
    let line = |volume: i32, live: usize| {
        let held = held(base);
        let (time, ratio) = (start.elapsed(), held as f64 / live as f64);
        println!("{volume:3}   live {:5} MiB   held {:5} MiB   {ratio:5.2}   {time:.2?}", live >> 20, held >> 20);
    };
    trace.fill(peak);
    line(-1, trace.live());
    trace.free_most(95);
    let live = trace.live();
    for volume in 0..=12 {
        give_back();
        line(volume, trace.live());
        trace.churn(live, live);
    }
}

/// The resident bytes of the process beyond `base`.
fn resident(base: usize) -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("/proc is there");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    (pages * 4096).saturating_sub(base)
}
