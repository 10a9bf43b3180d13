//! A peer with an rkey may write anything over memory that is free. The owner must not notice.

use rdmalloc::{Access, Buffer, Heap};
use std::collections::HashSet;

/// Overwrites freed memory as a peer would: by addresses it once was told.
fn scribble(places: &[(usize, usize)], seed: u8) {
    for (address, len) in places {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(*address);
        // SAFETY: not sound in Rust's terms, which is the point: a device writes without asking. The arena is open, since
        // the test holds a buffer in it.
        unsafe { start.write_bytes(seed, *len) };
    }
}

fn place(buffer: &Buffer) -> (usize, usize) {
    (buffer.as_ptr().expose_provenance(), buffer.capacity())
}

#[test]
fn garbage_over_free_blocks_gives_no_wrong_address_and_changes_no_other_buffer() {
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    let sizes = [1, 64, 100, 1000, 4000, 9000, 60_000];
    // One of each size stays, so that the arena and the slabs do; it is looked at every time.
    let kept: Vec<_> = sizes.iter().map(|size| filled(&heap, *size, 0x5a)).collect();
    for round in 0..200u32 {
        let buffers: Vec<_> = (0..300).map(|n| filled(&heap, sizes[n % sizes.len()], round as u8)).collect();
        let mut all: Vec<_> = buffers.iter().chain(&kept).map(place).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "two buffers share memory");
        assert!(buffers.iter().all(|buffer| buffer.iter().all(|byte| *byte == round as u8)));
        assert!(kept.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0x5a)));
        // Half are freed here, and half by another thread, onto the list of blocks that others freed.
        let (mut here, mut there): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for (number, buffer) in buffers.into_iter().enumerate() {
            if number % 2 == 0 { here.push(buffer) } else { there.push(buffer) }
        }
        let freed: Vec<_> = here.iter().chain(&there).map(place).collect();
        drop(here);
        std::thread::spawn(move || drop(there)).join().unwrap();
        scribble(&freed, !(round as u8));
    }
    let distinct: HashSet<_> = kept.iter().map(place).collect();
    assert_eq!(distinct.len(), sizes.len());
    drop(kept);
    assert_eq!(heap.trim().open_arenas, 0);
}

fn filled(heap: &Heap, size: usize, byte: u8) -> Buffer {
    let mut buffer = heap.buffer(size).unwrap();
    buffer.try_extend_from_slice(&vec![byte; size]).unwrap();
    buffer
}
