//! A drain pass is exact whatever the owners of caches do: asleep for ever, ended, or running.

use rdmalloc::Rdmalloc;
use rdmalloc_tests::Ledger;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// One test at a time: they count what the one global heap has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

type Blocks = Vec<Vec<u8>>;

/// Blocks of many classes, some 40 MiB in all, and some that are gone again.
fn blocks() -> Blocks {
    let block = |number: usize| vec![number as u8; 1 << (4 + number % 14)];
    drop((0..1000).map(block).collect::<Blocks>());
    (0..2600).map(block).collect()
}

/// Threads that have allocated what is returned, and sleep since.
fn sleepers(count: usize) -> (Vec<Blocks>, Vec<Sender<()>>, Vec<JoinHandle<()>>) {
    let (sender, receiver) = channel();
    let (mut wakers, mut threads) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (waker, sleep) = channel();
        let sender = sender.clone();
        wakers.push(waker);
        threads.push(std::thread::spawn(move || {
            let mut blocks = blocks();
            // Some of its own are freed by itself, into its cache.
            blocks.truncate(2000);
            sender.send(blocks).unwrap();
            drop(sender);
            let _ = sleep.recv();
            // It goes on with its cache as if nothing had happened.
            let again = self::blocks();
            assert!(again.iter().enumerate().all(|(number, block)| block.iter().all(|byte| *byte == number as u8)));
        }));
    }
    (receiver.iter().take(count).collect(), wakers, threads)
}

#[test]
fn sleeping_owners_keep_no_empty_arena() {
    let _alone = alone();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    HEAP.trim();
    let before = (HEAP.stats().spans, ledger.live_bytes());
    let (blocks, wakers, threads) = sleepers(8);
    assert!(ledger.live_bytes() > before.1 + (100 << 20));
    // Freed by this thread, into the caches of those who sleep.
    drop(blocks);
    let trimmed = HEAP.trim();
    let after = (HEAP.stats().spans, ledger.live_bytes());
    assert_eq!(trimmed.busy_threads, 0);
    // The sleepers' own small things (handles, channels) live on: a few slabs, in an arena that they had to themselves.
    assert!(after.0 <= before.0 + 8 * 12, "{before:?} {after:?} {trimmed:?}");
    let arenas = HEAP.arenas();
    assert!(arenas.iter().all(|arena| arena.spans > 0), "an empty arena is open: {arenas:?}");
    assert_eq!(after.1, arenas.iter().map(|arena| arena.memory.len()).sum::<usize>());
    drop(wakers);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    HEAP.detach(device).unwrap();
}

#[test]
fn sleeping_owners_of_one_block_keep_one_arena() {
    let _alone = alone();
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    let (mut blocks, wakers, threads) = sleepers(8);
    let kept = blocks[3].pop().unwrap();
    drop(blocks);
    HEAP.trim();
    let sge = device.sge(&kept).unwrap();
    assert!(ledger.covers(sge.lkey(), kept.as_ptr().addr()..kept.as_ptr().addr() + kept.len()));
    assert!(kept.iter().all(|byte| *byte == kept[0]));
    drop(wakers);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    HEAP.detach(device).unwrap();
}

#[test]
fn passes_disturb_no_running_owner() {
    let _alone = alone();
    let churn = rdmalloc_tests::Churn::start(8);
    let ledger = Ledger::new();
    let device = HEAP.attach(ledger.clone()).unwrap();
    for _ in 0..2000 {
        HEAP.trim();
    }
    churn.wait_for(1000);
    // Finds out whether a block was changed.
    churn.stop();
    HEAP.detach(device).unwrap();
    assert_eq!(ledger.live(), 0);
}

#[test]
fn two_passes_at_once_agree() {
    let _alone = alone();
    let (blocks, wakers, threads) = sleepers(4);
    let passes: Vec<_> =
        (0..4).map(|_| std::thread::spawn(|| (0..200).for_each(|_| assert_eq!(HEAP.trim().stuck_arenas, 0)))).collect();
    drop(blocks);
    passes.into_iter().for_each(|pass| pass.join().unwrap());
    drop(wakers);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn without_membarrier_passes_are_as_exact() {
    rdmalloc_tests::again_without_membarrier("without_membarrier");
}
