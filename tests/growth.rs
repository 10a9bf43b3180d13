//! A vector that doubles beyond arenas: how often it is registered, and what is pinned at once.

use rdmalloc::Rdmalloc;
use rdmalloc_arenas::{Access, Registered, Registrar};
use rdmalloc_tests::Null;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MIB: usize = 1 << 20;
/// How large the vector becomes.
const LARGE: usize = 512 * MIB;
/// How much is added at once.
const PIECE: usize = 32 << 10;

/// One test at a time: they count what the one global heap has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

static REGISTERED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Registers nothing, and remembers the most bytes that were registered at once.
#[derive(Default)]
struct Peak(Null);

// SAFETY: as `Null`.
unsafe impl Registrar for Peak {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        let now = REGISTERED.fetch_add(memory.len(), Relaxed) + memory.len();
        PEAK.fetch_max(now, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.0.register(memory, access) }
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        REGISTERED.fetch_sub(memory.len(), Relaxed);
        self.0.deregister(registered, memory)
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn pins_pages(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "peak"
    }
}

/// Grows a vector as a program does that does not know how much will come; how often it moved.
fn grow(vector: &mut Vec<u8>) -> usize {
    grow_to(vector, LARGE)
}

fn grow_to(vector: &mut Vec<u8>, len: usize) -> usize {
    let piece = vec![7; PIECE];
    let (mut moves, mut at) = (0, vector.as_ptr());
    while vector.len() < len {
        vector.extend_from_slice(&piece);
        moves += usize::from(vector.as_ptr() != at && vector.capacity() > MIB);
        at = vector.as_ptr();
    }
    assert!(vector.iter().step_by(4096).all(|byte| *byte == 7));
    moves
}

#[test]
fn a_doubling_vector_on_a_registered_heap_leaves_its_old_arenas() {
    let _alone = alone();
    HEAP.trim();
    let device = HEAP.attach(Peak::default()).unwrap();
    let before = (HEAP.stats().registrations, REGISTERED.load(Relaxed));
    PEAK.store(before.1, Relaxed);
    let start = Instant::now();
    let mut vector = Vec::new();
    let moves = grow(&mut vector);
    let (time, registrations) = (start.elapsed(), HEAP.stats().registrations - before.0);
    let (peak, end) = (PEAK.load(Relaxed) - before.1, REGISTERED.load(Relaxed) - before.1);
    println!(
        "doubling: {registrations} registrations, {moves} moves, {} MiB at most, {} at the end, {time:.0?}",
        peak >> 20,
        end >> 20
    );
    device.key(vector.as_ptr()).unwrap();
    // The old and the new one, and what is kept for the next demand.
    assert!(peak <= LARGE + LARGE / 2 + 128 * MIB, "{peak} bytes registered at once");
    assert!(end <= LARGE + 128 * MIB, "{end} bytes registered in the end");

    drop(vector);
    HEAP.trim();
    // In whose slab there is room for another: it is not the vector that a new arena would be for.
    let _piece = vec![7u8; PIECE];
    let before = (HEAP.stats().registrations, REGISTERED.load(Relaxed));
    PEAK.store(before.1, Relaxed);
    let start = Instant::now();
    let mut vector = Vec::with_capacity(LARGE);
    assert_eq!(grow(&mut vector), 0);
    let (time, registrations) = (start.elapsed(), HEAP.stats().registrations - before.0);
    let peak = PEAK.load(Relaxed) - before.1;
    println!("reserved: {registrations} registrations, {} MiB at most, {time:.0?}", peak >> 20);
    assert!(registrations == 1 && peak <= LARGE, "{registrations} registrations, {peak} bytes");
    drop(vector);
    HEAP.detach(device).unwrap();
}

#[test]
fn a_doubling_vector_without_a_device_stays_where_it_is() {
    let _alone = alone();
    HEAP.trim();
    let start = Instant::now();
    let mut vector = Vec::new();
    let moves = grow(&mut vector);
    println!("without a device: {moves} moves beyond 1 MiB, {:.0?}", start.elapsed());
    assert!(moves <= 8, "{moves} moves");
    // What it has grown into is registered like anything else, and given back.
    let device = HEAP.attach(Peak::default()).unwrap();
    let (first, last) = (vector.as_ptr(), &raw const vector[LARGE - 1]);
    assert_eq!(device.key(first).unwrap(), device.key(last).unwrap());
    drop(vector);
    HEAP.detach(device).unwrap();
    HEAP.trim();
    assert!(HEAP.stats().open_bytes <= 64 * MIB, "{:?}", HEAP.stats());
}

#[cfg(feature = "verbs")]
#[test]
fn verbs_a_doubling_vector_leaves_its_old_arenas_unpinned() {
    use rdmalloc::registrar::verbs::Verbs;
    use rdmalloc_tests::{pinned_bytes, rig::domain_or_skip};
    let Some(domain) = domain_or_skip() else { return };
    let _alone = alone();
    HEAP.trim();
    let unpinned = pinned_bytes();
    let device = HEAP.attach(Verbs::new(domain)).unwrap();
    let pinned = || pinned_bytes() - unpinned;
    let before = HEAP.stats().registrations;
    let mut vector = Vec::new();
    grow_to(&mut vector, 128 * MIB);
    let stats = HEAP.stats();
    // What the statistics say is what the kernel has pinned.
    assert_eq!(stats.registered_bytes as u64, pinned(), "{stats}");
    // One for each doubling from 2 MiB on, and one for what else there is.
    assert!(stats.registrations - before <= 8, "{} registrations", stats.registrations - before);
    // The vector's arena, and the first one, and what may be kept for the next demand.
    assert!(pinned() <= (vector.capacity() + 96 * MIB) as u64, "{} MiB pinned", pinned() >> 20);
    drop(vector);
    HEAP.trim();
    HEAP.detach(device).unwrap();
    assert_eq!(pinned(), 0);
}
