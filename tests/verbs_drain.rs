//! Drain passes and maintainers on a real verbs device: what the kernel counts as pinned is what the open arenas have.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{Device, Heap, Maintenance, Rdmalloc, Retention};
use rdmalloc_tests::rig::domain_or_skip;
use rdmalloc_tests::{again_without_membarrier, is_alone, is_without_membarrier, pinned_bytes};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use std::{ptr, thread};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MIB: usize = 1 << 20;

type Blocks = Vec<Vec<u8>>;
type Free = fn(Blocks);

/// Blocks of many kinds, some 24 MiB.
fn blocks() -> Blocks {
    (0..1800).map(|number| vec![number as u8; 1 << (4 + number % 16)]).collect()
}

/// A device on the global heap, and what was pinned before; alone in the process.
fn attached() -> Option<(Device, u64)> {
    let domain = domain_or_skip()?;
    if !is_alone() {
        return None;
    }
    let unpinned = pinned_bytes();
    Some((HEAP.attach(Verbs::new(domain)).unwrap(), unpinned))
}

/// After a pass, exactly the open arenas are pinned, and something lives in each of them.
fn exactly_what_lives_is_pinned(unpinned: u64) -> u64 {
    let trimmed = HEAP.trim();
    assert_eq!((trimmed.busy_threads, trimmed.stuck_arenas), (0, 0));
    let pinned = pinned_bytes() - unpinned;
    let arenas = HEAP.arenas();
    assert!(arenas.iter().all(|arena| arena.spans > 0), "an empty arena is open: {arenas:?}");
    let open: usize = arenas.iter().map(|arena| arena.memory.len()).sum();
    assert_eq!((pinned, trimmed.open_bytes), (open as u64, open));
    pinned
}

#[test]
fn verbs_threads_parked_for_ever_keep_nothing_pinned_that_others_freed() {
    let Some((device, unpinned)) = attached() else { return };
    let _ = is_without_membarrier();
    let (sender, receiver) = channel();
    for _ in 0..8 {
        let sender = sender.clone();
        thread::spawn(move || {
            let mut blocks = blocks();
            // Some are freed into its own cache.
            blocks.truncate(1500);
            sender.send(blocks).unwrap();
            drop(sender);
            loop {
                thread::park();
            }
        });
    }
    drop(sender);
    let mut all: Vec<Blocks> = receiver.iter().collect();
    let full = exactly_what_lives_is_pinned(unpinned);
    let kept = all[3].pop().unwrap();
    drop(all);
    let left = exactly_what_lives_is_pinned(unpinned);
    assert!(left < full && full > 100 * MIB as u64, "{left} of {full} bytes are pinned");
    assert!(device.key(kept.as_ptr()).is_ok());
    HEAP.detach(device).unwrap();
    assert_eq!(pinned_bytes(), unpinned);
}

#[test]
fn verbs_memory_is_unpinned_whoever_freed_it() {
    thread_local!(static KEPT: RefCell<Blocks> = const { RefCell::new(Vec::new()) });
    extern "C" fn free(blocks: *mut c_void) -> *mut c_void {
        // SAFETY: the blocks that the test gave to this thread; it waits for its end.
        drop(unsafe { blocks.cast::<Option<Blocks>>().as_mut() }.and_then(Option::take));
        ptr::null_mut()
    }
    let Some((device, unpinned)) = attached() else { return };
    let by: [(&str, Free); 4] = [
        ("its owner", drop),
        ("another thread", |blocks| thread::spawn(|| drop(blocks)).join().unwrap()),
        ("a destructor at a thread's exit", |blocks| thread::spawn(|| KEPT.replace(blocks)).join().map(drop).unwrap()),
        ("a thread that never allocates", |blocks| {
            let mut blocks = Some(blocks);
            // SAFETY: the thread ends before `blocks` goes.
            unsafe {
                let mut thread = std::mem::zeroed();
                let begun = libc::pthread_create(&mut thread, ptr::null(), free, (&raw mut blocks).cast());
                assert_eq!((begun, libc::pthread_join(thread, ptr::null_mut())), (0, 0));
            }
        }),
    ];
    // What the first of each way leaves for ever (a thread's key, and such) is there before.
    by.iter().for_each(|(_, free)| free(blocks()));
    let before = exactly_what_lives_is_pinned(unpinned);
    for (who, free) in by {
        let blocks = (0..4).flat_map(|_| blocks()).collect();
        assert!(pinned_bytes() - unpinned > before + 50 * MIB as u64);
        free(blocks);
        assert_eq!(exactly_what_lives_is_pinned(unpinned), before, "freed by {who}");
    }
    HEAP.detach(device).unwrap();
}

#[test]
fn verbs_headroom_is_pinned_before_it_is_needed_and_goes_when_nobody_needs_it() {
    let Some(domain) = domain_or_skip() else { return };
    if !is_alone() {
        return;
    }
    let unpinned = pinned_bytes();
    let pinned = || (pinned_bytes() - unpinned) as usize;
    let until = |what: &str, is: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !is() {
            assert!(begin.elapsed() < Duration::from_secs(100), "{what}: {} bytes are pinned", pinned());
            thread::yield_now();
        }
    };
    let heap = Heap::builder().retention(Retention::NONE).build().unwrap();
    let maintenance = Maintenance::new().headroom(80 * MIB).growth(Duration::ZERO).interval(Duration::from_secs(3600));
    let maintainer = heap.maintain(maintenance).unwrap();
    let device = heap.attach(Verbs::new(domain)).unwrap();
    until("headroom without a request", &|| pinned() >= 80 * MIB);
    let buffers: Vec<_> = (1..=100)
        .map(|taken| {
            let buffer = heap.buffer(MIB).unwrap();
            assert!(device.key(buffer.as_ptr()).is_ok());
            until("headroom again", &|| pinned() >= (taken + 80) * MIB);
            buffer
        })
        .collect();
    // First the round: the last arena is pinned before it is counted.
    let by_maintainer = maintainer.round().opened_arenas;
    assert_eq!(heap.stats().opened, by_maintainer, "an arena was opened by who needed it");
    drop(buffers);
    let done = maintainer.round();
    assert!(done.closed_arenas > 0 && (80 * MIB..=96 * MIB).contains(&pinned()), "{done:?}, {} bytes", pinned());
    maintainer.stop();
    heap.trim();
    assert_eq!(pinned(), 0);
}

#[test]
fn verbs_without_membarrier_passes_are_as_exact() {
    if domain_or_skip().is_some() {
        again_without_membarrier("without_membarrier");
    }
}
