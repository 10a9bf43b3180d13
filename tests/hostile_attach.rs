//! A process of its own: it counts what the global heap has registered.

use rdmalloc::Rdmalloc;
use rdmalloc_tests::Ledger;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

#[test]
fn attaching_does_not_pin_what_is_free() {
    let blocks: Vec<_> = (0..40).map(|_| vec![1u8; 4 << 20]).collect();
    let opened = HEAP.stats().open_bytes;
    // On a thread that ends: its cache is full of spans.
    std::thread::spawn(move || drop(blocks)).join().unwrap();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    let registered = ledger.live_bytes();
    assert!(registered + (60 << 20) < opened, "{} of {} MiB are registered", registered >> 20, opened >> 20);
    HEAP.detach(device).unwrap();
}
