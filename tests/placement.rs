//! After a peak, survivors that lie scattered keep little registered: a reduced form of the example `placement` of the benches.

use rdmalloc::{Rdmalloc, registrar::Registrar};
use rdmalloc_arenas::Arenas;
use rdmalloc_tests::{Null, Trace};
use std::sync::{Mutex, PoisonError};

/// Called by the trace alone: the tests' own memory is the system's.
static HEAP: Rdmalloc = Rdmalloc::new();

/// Runs the trace on a device; `registered` says how many bytes are.
fn scattered_survivors(registrar: impl Registrar, peak: usize, registered: impl Fn() -> usize) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = HEAP.attach(registrar).unwrap();
    let mut trace = Trace::new(&HEAP, peak);
    trace.fill(peak);
    assert!(registered() >= peak);
    trace.free_most(95);
    let live = trace.live();
    for _ in 0..10 {
        HEAP.trim();
        trace.churn(live, live);
    }
    HEAP.trim();
    let held = registered();
    println!("{} MiB live, {} MiB registered", live >> 20, held >> 20);
    // An arena has up to 32 MiB here, so that much may be missing to twice as much.
    assert!(held <= 2 * live + (32 << 20), "{live} bytes live, {held} registered");
    drop(trace);
    HEAP.trim();
    assert!(!Arenas::may_drain(), "arenas that are gone are still counted");
    let stats = HEAP.stats();
    assert_eq!((stats.arenas, stats.spans, stats.registered_bytes, registered()), (0, 0, 0, 0));
    HEAP.detach(device).unwrap();
}

#[test]
fn scattered_survivors_do_not_keep_the_peak_registered() {
    scattered_survivors(Null::default(), 1 << 30, || HEAP.stats().registered_bytes);
}

#[cfg(feature = "verbs")]
#[test]
fn verbs_scattered_survivors_do_not_keep_the_peak_pinned() {
    use rdmalloc::registrar::verbs::Verbs;
    use rdmalloc_tests::{pinned_bytes, rig::domain_or_skip};
    let Some(domain) = domain_or_skip() else { return };
    let before = pinned_bytes() as usize;
    scattered_survivors(Verbs::new(domain), 512 << 20, || pinned_bytes() as usize - before);
}
