//! Drain passes, step by step.

use super::SWEEP_PAUSE;
use crate::global::{GLOBAL, Rdmalloc};
use crate::{Heap, slab, thread};
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::Duration;

const HEAP: Rdmalloc = Rdmalloc::new();
/// Of such blocks 819 fit a slab (682 where each has a seal), so some are left when they go to it 32 at a time.
const LAYOUT: Layout = Layout::new::<[u64; 10]>();
const IN_A_SLAB: usize = (64 << 10) / (LAYOUT.size() + if cfg!(feature = "hardened") { 16 } else { 0 });

/// A pass of one test would meet the threads of the other.
static ONE: Mutex<()> = Mutex::new(());

fn alloc() -> usize {
    // SAFETY: the layout has a size.
    unsafe { HEAP.alloc(LAYOUT) }.expose_provenance()
}

fn free(block: usize) {
    // SAFETY: each block of the test is freed once.
    unsafe { HEAP.dealloc(ptr::with_exposed_provenance_mut(block), LAYOUT) }
}

fn slab_of(block: usize) -> &'static slab::Slab {
    // SAFETY: blocks of this size lie in slabs of one slice.
    unsafe { slab::of_small(NonNull::new(ptr::with_exposed_provenance_mut(block)).unwrap()) }
}

#[test]
fn caches_are_not_emptied_again_and_again_in_a_heap_as_large_as_what_they_hold() {
    static NOW: AtomicU64 = AtomicU64::new(1_000);
    let heap = Heap::builder().build().unwrap();
    assert!(heap.set_clock(|| Duration::from_millis(NOW.load(Relaxed))));
    // Each is kept spare, and none of another length fits beside it.
    let arenas_after = |mib: usize| {
        drop(heap.buffer(mib << 20).unwrap());
        heap.arenas().len()
    };
    assert_eq!(arenas_after(4), 1);
    NOW.fetch_add(SWEEP_PAUSE, Relaxed);
    assert_eq!(arenas_after(3), 1, "what the cache holds is given back for it");
    assert_eq!(arenas_after(4), 2, "a moment later that would go on for ever");
    NOW.fetch_add(SWEEP_PAUSE, Relaxed);
    assert_eq!([arenas_after(2), arenas_after(4)], [2, 2]);
}

#[test]
fn a_slab_whose_owner_flushes_before_what_waits_elsewhere_has_come_is_met_by_the_same_pass() {
    let _one = ONE.lock();
    let ((send, blocks), (go, told), (say, done)) = (channel(), channel(), channel());
    let owner = std::thread::spawn(move || {
        send.send((0..3 * IN_A_SLAB).map(|_| alloc()).collect::<Vec<_>>()).unwrap();
        // In the middle of a pass this comes the slow way, and does what the pass has asked for.
        while told.recv().is_ok() {
            free(alloc());
            say.send(()).unwrap();
        }
    });
    let mut slabs = HashMap::<_, Vec<usize>>::new();
    blocks.recv().unwrap().into_iter().for_each(|block| slabs.entry(block >> 16).or_default().push(block));
    let whole = slabs.into_values().find(|blocks| blocks.len() == IN_A_SLAB).expect("a slab of these blocks alone");
    let slab = slab_of(whole[0]);
    let name = slab.owner();
    assert!(name != 0 && !IN_A_SLAB.is_multiple_of(32));
    // This thread has a cache, in which the last blocks wait.
    free(alloc());
    whole.into_iter().for_each(free);
    let owner_flushes = || {
        go.send(()).unwrap();
        done.recv().unwrap();
    };
    let swept = thread::inside(|| GLOBAL.visit_when(owner_flushes, |cache, swept| cache.sweep(&GLOBAL.arenas, swept)));
    assert!(slab.owner() != name || swept.busy > 0, "the pass has left an empty slab where it was, and not said so");
    drop(go);
    owner.join().unwrap();
}

#[test]
fn a_pass_that_meets_a_thread_in_the_middle_of_a_free_says_so_though_it_is_done_when_its_cache_is_looked_at() {
    let _one = ONE.lock();
    let ((say, is_in), (go, told), (leave, left)) = (channel(), channel::<()>(), channel());
    let late = std::thread::spawn(move || {
        free(alloc());
        thread::briefly(|_| {
            say.send(()).unwrap();
            let _ = told.recv();
        });
        leave.send(()).unwrap();
    });
    is_in.recv().unwrap();
    // A later cache, which is looked at before.
    let (begin, end) = (channel(), channel::<()>());
    let other = std::thread::spawn(move || {
        free(alloc());
        begin.0.send(()).unwrap();
        let _ = end.1.recv();
    });
    begin.1.recv().unwrap();
    let mut go = Some(go);
    let swept = thread::inside(|| {
        GLOBAL.visit(|cache, swept| {
            if go.take().is_some() {
                left.recv().unwrap();
            }
            cache.sweep(&GLOBAL.arenas, swept);
        })
    });
    assert!(swept.busy > 0, "what it has just freed may have come to a slab that was looked at before");
    drop((go, end.0));
    late.join().unwrap();
    other.join().unwrap();
}
