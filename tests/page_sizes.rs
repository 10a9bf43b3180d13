//! Base pages of 4, 16 and 64 KiB: their size is a fact of the running kernel. Larger ones than there are can be pretended, since
//! whatever is cut at their multiples is cut right for the real ones; debug builds check each cut in the layer of system calls.

use rdmalloc::{Access, Heap, Rdmalloc, Retention};
use rdmalloc_tests::{Ledger, is_alone};
use std::alloc::{GlobalAlloc, Layout};

/// Blocks of every kind, before and after a device is there; what is written stays, what is called zero is.
fn exercise(global: &Rdmalloc) {
    let sizes = [1, 100, 1024, 5000, 40_000, 70_000, 300_000, 3 << 20, 40 << 20];
    let layout = |size: usize, align| Layout::from_size_align(size, align).unwrap();
    let round = |align| {
        let blocks = sizes.map(|size| {
            // SAFETY: the size is not 0; what is read was zeroed, and what is written is within the block.
            unsafe {
                let block = global.alloc_zeroed(layout(size, align));
                assert!(!block.is_null() && block.addr() % align == 0);
                assert_eq!((block.read(), block.add(size - 1).read()), (0, 0));
                block.write_bytes(7, size);
                block
            }
        });
        for (block, size) in blocks.into_iter().zip(sizes) {
            // SAFETY: as above; the layout is the block's, and after growing the new one.
            unsafe {
                let block = global.realloc(block, layout(size, align), size * 2);
                assert_eq!((block.read(), block.add(size - 1).read()), (7, 7));
                global.dealloc(block, layout(size * 2, align));
            }
        }
    };
    // SAFETY: the size is not 0, and the block is freed with this layout.
    let held = unsafe { global.alloc(layout(1, 1)) };
    [8, 4096, 1 << 16, 4 << 20].into_iter().for_each(round);
    global.trim();
    assert!(global.stats().purged_bytes > 0, "free pages beside the block go back");
    // SAFETY: as above.
    unsafe { global.dealloc(held, layout(1, 1)) };
    let books = Ledger::new();
    let device = global.attach(books.clone()).unwrap();
    [8, 4096, 1 << 16, 4 << 20].into_iter().for_each(round);
    global.detach(device).unwrap();
    assert_eq!(books.live(), 0);
    global.trim();

    let books = Ledger::new();
    let retention = Retention::new().bytes(0);
    let heap = Heap::builder().access(Access::REMOTE_WRITE).retention(retention).build().unwrap();
    let device = heap.attach(books.clone()).unwrap();
    let buffers: Vec<_> = sizes.iter().map(|size| heap.buffer(*size).unwrap()).collect();
    assert!(buffers.iter().all(|buffer| device.key(buffer.as_ptr()).is_ok()));
    assert!(books.live_bytes() >= sizes.iter().sum());
    drop(buffers);
    assert_eq!(heap.trim().open_arenas, 0);
    assert_eq!(books.live(), 0);
}

fn with_pages_of(size: usize) {
    if !is_alone() {
        return;
    }
    // SAFETY: sysconf has no preconditions.
    let real = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    if real > size {
        return println!("skipped: pages have {real} bytes here");
    }
    assert!(rdmalloc_arenas::pretend_page_size(size), "something has asked before");
    assert_eq!(rdmalloc::Pages::Base.bytes(), size);
    exercise(&Rdmalloc::new());
}

#[test]
fn pages_of_4_kib_are_a_fact_of_the_running_kernel() {
    with_pages_of(4 << 10);
}

#[test]
fn pages_of_16_kib_are_a_fact_of_the_running_kernel() {
    with_pages_of(16 << 10);
}

#[test]
fn pages_of_64_kib_are_a_fact_of_the_running_kernel() {
    with_pages_of(64 << 10);
}
