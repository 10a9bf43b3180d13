//! Blocks that are freed twice, as far as it costs nothing to see that: the program ends with a message. Each is done in a
//! process of its own: this test's program, called again.

use rdmalloc::Rdmalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const HOW: &str = "RDMALLOC_TEST_FREED_TWICE";

/// Of a size that nothing else here has.
const LAYOUT: Layout = Layout::new::<[u64; 900]>();

fn free_twice(how: &str) {
    // SAFETY: none; that is the point.
    unsafe {
        let blocks = [(); 5].map(|()| black_box(HEAP.alloc(LAYOUT)).expose_provenance());
        let free = |block: usize| HEAP.dealloc(std::ptr::with_exposed_provenance_mut(black_box(block)), LAYOUT);
        match how {
            "by_another_thread" => {
                let again = move || {
                    [blocks[1], blocks[1]]
                        .map(|block| HEAP.dealloc(std::ptr::with_exposed_provenance_mut(block), LAYOUT))
                };
                let _ = std::thread::spawn(again).join();
            }
            "more_than_were_out" => blocks.iter().chain(&blocks[..1]).for_each(|block| free(*block)),
            "after_its_slab" => {
                blocks.iter().for_each(|block| free(*block));
                HEAP.trim();
                // The arena is still open: this program's other blocks are in it.
                free(blocks[0]);
            }
            _ => panic!("nothing has the name {how}"),
        }
    }
}

#[test]
fn as_it_was_asked_for() {
    let Ok(how) = std::env::var(HOW) else { return };
    free_twice(&how);
    panic!("nobody saw it");
}

#[test]
fn a_block_that_is_freed_twice_is_told_where_that_is_free() {
    for how in ["by_another_thread", "more_than_were_out", "after_its_slab"] {
        let program = std::env::current_exe().unwrap();
        let output = Command::new(program)
            .args(["--exact", "as_it_was_asked_for", "--nocapture"])
            .env(HOW, how)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{how}: {told}");
        assert!(told.contains("rdmalloc: the block at") && told.contains("freed a second time"), "{how}: {told}");
    }
}
