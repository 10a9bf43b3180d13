//! Heaps that clear memory as it is given back: nothing old is found in a block that is taken, nor by a peer in the memory that is
//! free, whatever was done with it.

use allocator_api2::vec::Vec;
use rdmalloc::{Access, Buffer, Heap};
use rdmalloc_tests::Null;
use std::thread;

const SECRET: u8 = 0xa5;
const SIZES: [usize; 16] = [
    0,
    1,
    63,
    64,
    65,
    1000,
    4096,
    8192,
    10_000,
    65_535,
    65_536,
    65_537,
    300_000,
    (4 << 20) - 1,
    (4 << 20) + 1,
    33 << 20,
];

/// A heap without devices, one with, one that peers read and one that they write.
fn heaps(zero: bool) -> [Heap; 4] {
    let of = |access| Heap::builder().access(access).zero_on_free(zero).build().unwrap();
    let heaps = [Access::LOCAL_WRITE, Access::LOCAL_WRITE, Access::REMOTE_READ, Access::REMOTE_WRITE].map(of);
    heaps[1..].iter().for_each(|heap| assert!(heap.attach(Null::default()).is_ok()));
    heaps
}

/// How many bytes of memory are not zero. Read as a peer would.
fn dirty(start: usize, len: usize) -> usize {
    let word = |at| core::ptr::with_exposed_provenance::<u64>(start + at);
    // SAFETY: the callers' memory is in open arenas, so mapped; whoever writes there has ended before.
    (0..len).step_by(8).filter(|at| unsafe { word(*at).read_volatile() } != 0).count()
}

/// How many words of the heap's memory that is not in `live` are not zero.
fn dirty_free(heap: &Heap, live: &[(usize, usize)]) -> usize {
    let arenas = heap.arenas();
    let all: usize = arenas.iter().map(|arena| dirty(arena.memory.start, arena.memory.len())).sum();
    all - live.iter().map(|(start, len)| dirty(*start, *len)).sum::<usize>()
}

/// Writes all of a buffer, as a peer does that was told of it.
fn soil(buffer: &mut Buffer) {
    buffer.spare_capacity_mut().fill(core::mem::MaybeUninit::new(SECRET));
}

/// Takes blocks of every size and gives them back full, some by another thread; one of each stays.
fn use_it(heap: &Heap) -> std::vec::Vec<Buffer> {
    SIZES
        .iter()
        .map(|size| {
            let count = if *size < 100_000 { 40 } else { 2 };
            let mut buffers: std::vec::Vec<_> = (0..count).map(|_| heap.buffer(*size).unwrap()).collect();
            buffers.iter_mut().for_each(soil);
            let kept = buffers.pop().unwrap();
            let others = buffers.split_off(count / 2);
            thread::spawn(move || drop(others)).join().unwrap();
            kept
        })
        .collect()
}

#[test]
fn nothing_old_is_read_from_a_block_that_is_taken() {
    for heap in heaps(true) {
        let _kept = use_it(&heap);
        for size in SIZES {
            for _ in 0..60.min(1 + (64 << 20) / (size + 1)) {
                let mut buffer = heap.buffer(size).unwrap();
                assert_eq!(dirty(buffer.as_ptr().addr(), buffer.capacity()), 0, "{size}");
                soil(&mut buffer);
            }
        }
    }
}

#[test]
fn a_peer_finds_nothing_in_memory_that_is_free() {
    for heap in heaps(true) {
        let kept = use_it(&heap);
        let live: std::vec::Vec<_> = kept.iter().map(|buffer| (buffer.as_ptr().addr(), buffer.capacity())).collect();
        assert_eq!(dirty_free(&heap, &live), 0);
        drop(kept);
        assert_eq!(dirty_free(&heap, &[]), 0);
    }
}

#[test]
fn what_a_collection_leaves_behind_as_it_grows_and_shrinks_is_cleared() {
    for heap in heaps(true) {
        let of = |vector: &Vec<u8, &Heap>| (vector.as_ptr().addr(), vector.capacity().max(64));
        let mut vector: Vec<u8, &Heap> = Vec::new_in(&heap);
        // In the way, so that it must move. (A block has 64 bytes here, which are its own.)
        let mut others = std::vec::Vec::new();
        for shift in 0..24 {
            vector.resize(1 << shift, SECRET);
            others.push(heap.buffer(1 << shift).unwrap());
            assert_eq!(dirty_free(&heap, &[of(&vector)]), 0, "grown to {}", vector.len());
        }
        for shift in (0..24).rev() {
            vector.truncate(1 << shift);
            vector.shrink_to_fit();
            assert_eq!(dirty_free(&heap, &[of(&vector)]), 0, "shrunk to {}", vector.len());
        }
        vector.push(SECRET);
        drop(vector);
        assert_eq!(dirty_free(&heap, &[]), 0);
    }
}

/// That the tests above look where something would be: without the option, old bytes are there.
#[test]
fn without_it_old_bytes_are_found() {
    for heap in heaps(false) {
        drop(use_it(&heap));
        if !heap.arenas().is_empty() {
            assert!(dirty_free(&heap, &[]) > 1000);
        }
    }
}
