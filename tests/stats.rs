//! A drain pass says what holds the rest. One test in this process, so that nobody else allocates while it counts.

use rdmalloc::{LiveBlocks, Rdmalloc, Trimmed};
use std::sync::mpsc::channel;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn of_size(live: &LiveBlocks, size: usize) -> u64 {
    live.iter().find(|(block, _)| *block == size).map_or(0, |(_, blocks)| blocks)
}

/// What has come since, of blocks of these sizes.
fn come(before: &Trimmed, after: &Trimmed, sizes: &[usize]) -> Vec<u64> {
    sizes.iter().map(|size| of_size(&after.live, *size) - of_size(&before.live, *size)).collect()
}

#[test]
fn a_pass_names_the_blocks_that_hold_the_rest_whoever_has_them() {
    const SIZES: [usize; 4] = [880, 3584, 9216, 65536];
    let blocks = |count: usize| SIZES.map(|size| (0..count).map(|_| vec![1u8; size]).collect::<Vec<_>>());
    // The harness has just started this test, and may not be asleep yet.
    let before = loop {
        let passes = [HEAP.trim(), HEAP.trim()];
        if passes[0] == passes[1] {
            break passes[0];
        }
    };
    assert_eq!((before.busy_threads, before.uncounted_threads), (0, 0));

    // Of a thread that sleeps, of one that has ended, and of this one; full slabs and half-full ones.
    let (sender, receiver) = channel();
    let (waker, sleep) = channel::<()>();
    let sleeper = std::thread::spawn(move || {
        sender.send(blocks(100)).unwrap();
        let _ = sleep.recv();
    });
    let ended = std::thread::spawn(move || blocks(50)).join().unwrap();
    let (mut asleep, own, large) = (receiver.recv().unwrap(), blocks(25), vec![1u8; 3 << 20]);
    let after = HEAP.trim();
    assert_eq!((after.uncounted_threads, come(&before, &after, &SIZES)), (0, vec![175; 4]), "{after}");
    assert_eq!(after.large_blocks, before.large_blocks + 1, "{after}");
    assert_eq!(after.large_bytes, before.large_bytes + large.len());
    assert!(after.open_arenas >= 1 && after.to_string().contains("3584 B  175 in use"), "{after}");

    // Freed by another thread than the one that has them; and by nobody who looks.
    asleep.iter_mut().for_each(|blocks| blocks.truncate(13));
    drop((ended, large));
    let after = HEAP.trim();
    assert_eq!(come(&before, &after, &SIZES), [38; 4], "{after}");
    assert_eq!(after.large_blocks, before.large_blocks);
    drop((asleep, own));
    let after = HEAP.trim();
    assert_eq!(come(&before, &after, &SIZES), [0; 4], "{after}");
    drop(waker);
    sleeper.join().unwrap();
}
