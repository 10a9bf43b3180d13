//! After a peak, survivors that lie scattered keep little registered: a reduced form of the example `placement` of the benches.

use rdmalloc::Rdmalloc;
use rdmalloc_arenas::Arenas;
use rdmalloc_tests::{Null, Trace};

/// Called by the trace alone: the test's own memory is the system's.
static HEAP: Rdmalloc = Rdmalloc::new();

#[test]
fn scattered_survivors_do_not_keep_the_peak_registered() {
    let device = HEAP.attach(Null::default()).unwrap();
    let mut trace = Trace::new(&HEAP, 1 << 30);
    trace.fill(1 << 30);
    assert!(HEAP.stats().registered_bytes >= 1 << 30);
    trace.free_most(95);
    let live = trace.live();
    for _ in 0..10 {
        HEAP.trim();
        trace.churn(live, live);
    }
    HEAP.trim();
    let registered = HEAP.stats().registered_bytes;
    println!("{} MiB live, {} MiB registered", live >> 20, registered >> 20);
    // An arena has 32 MiB, so that much may be missing to twice as much.
    assert!(registered <= 2 * live + (32 << 20), "{live} bytes live, {registered} registered");
    drop(trace);
    HEAP.trim();
    assert!(!Arenas::may_drain(), "arenas that are gone are still counted");
    let stats = HEAP.stats();
    assert_eq!((stats.arenas, stats.spans, stats.registered_bytes), (0, 0, 0));
    HEAP.detach(device).unwrap();
}
