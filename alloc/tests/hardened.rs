//! The feature `hardened`: each misuse ends the program with a message that names the block, its class and its arena. A misuse
//! is made in a process of its own: this test's program, called again with the misuse's name.

#![cfg(feature = "hardened")]

use rdmalloc::Rdmalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MISUSE: &str = "RDMALLOC_TEST_MISUSE";

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).unwrap()
}

/// Does what no program may. Blocks are written, so that nothing here is optimised away.
fn misuse(name: &str, size: usize) {
    // SAFETY: none; that is the point. What is touched is mapped all the same.
    unsafe {
        // Neighbours, lest the slab goes with its last block, and with it what was known of it.
        let [_before, block, _after] = [(); 3].map(|()| black_box(HEAP.alloc(layout(size))));
        block.write_bytes(7, size);
        match name {
            "twice" => {
                HEAP.dealloc(block, layout(size));
                HEAP.dealloc(black_box(block), layout(size));
            }
            "twice_elsewhere" => {
                HEAP.dealloc(block, layout(size));
                let block = block.addr();
                let again = move || HEAP.dealloc(std::ptr::with_exposed_provenance_mut(block), layout(size));
                std::thread::spawn(again).join().unwrap();
            }
            "interior" => HEAP.dealloc(block.add(16), layout(size - 16)),
            "odd" => HEAP.dealloc(block.add(1), layout(size)),
            "foreign" => {
                let mut local = [0u8; 64];
                HEAP.dealloc(black_box(local.as_mut_ptr()), layout(64));
            }
            "size" => HEAP.dealloc(block, layout(size + 1)),
            "behind" => {
                block.add(size).write(0);
                HEAP.dealloc(block, layout(size));
            }
            "resized_behind" => {
                block.add(size).write(0);
                HEAP.realloc(block, layout(size), size * 2);
            }
            "after" => {
                HEAP.dealloc(block, layout(size));
                block.add(50).write(1);
                for _ in 0..10_000 {
                    black_box(HEAP.alloc(layout(size)));
                }
            }
            _ => panic!("no misuse has the name {name}"),
        }
    }
}

/// Ends by the misuse, if this process was made for one.
#[test]
fn the_misuse_that_was_asked_for() {
    let Ok(what) = std::env::var(MISUSE) else { return };
    let (name, size) = what.split_once(' ').unwrap();
    misuse(name, size.parse().unwrap());
    panic!("nobody saw it");
}

fn expect(name: &str, size: usize, words: &str) {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args(["--exact", "the_misuse_that_was_asked_for", "--nocapture"])
        .env(MISUSE, format!("{name} {size}"))
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{name} of {size} bytes: {} {told}", output.status);
    let line = told.lines().find(|line| line.starts_with("rdmalloc: ")).unwrap_or_else(|| panic!("{told}"));
    assert!(line.contains(words), "{name} of {size} bytes: {line}");
    assert!(line.contains("arena"), "{line}");
}

const SIZES: [usize; 5] = [64, 1000, 20_000, 100_000, 5 << 20];

#[test]
fn a_block_that_is_freed_twice() {
    SIZES.iter().for_each(|size| expect("twice", *size, "is freed a second time"));
    expect("twice_elsewhere", 3000, "is freed a second time");
}

#[test]
fn a_pointer_that_is_no_block() {
    SIZES.iter().for_each(|size| expect("interior", *size, "is not the begin of a block"));
    SIZES.iter().for_each(|size| expect("odd", *size, "is not the begin of a block"));
    expect("foreign", 64, "is not of this allocator");
}

#[test]
fn a_block_that_is_freed_with_another_size() {
    SIZES.iter().for_each(|size| expect("size", *size, "bytes, but was allocated with"));
}

#[test]
fn a_block_that_is_written_behind_its_end() {
    SIZES.iter().for_each(|size| expect("behind", *size, "was written to behind its end"));
    SIZES.iter().for_each(|size| expect("resized_behind", *size, "was written to behind its end"));
}

#[test]
fn a_block_that_is_written_after_it_was_freed() {
    SIZES[..3].iter().for_each(|size| expect("after", *size, "was written to after it was freed"));
}

/// Nothing is told of a program that is right: blocks of all sizes come and go, change size, threads and contents.
#[test]
fn right_use_is_not_disturbed() {
    let work = |seed: u64| {
        let mut state = seed;
        let mut next = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let mut live: Vec<Vec<u8>> = Vec::new();
        for turn in 0..60_000 {
            let size = 1 + match next(100) {
                0 => next(8 << 20),
                1..5 => next(200_000),
                _ => next(3000),
            };
            match next(4) {
                0 => live.push(vec![0; size]),
                1 => live.push(Vec::from_iter(std::iter::repeat_n(turn as u8, size.min(5000)))),
                2 if !live.is_empty() => {
                    let at = next(live.len());
                    let block = &mut live[at];
                    let (first, len) = (block.first().copied(), block.len());
                    block.resize(size.min(100_000), 9);
                    assert!(len == 0 || block.first().copied() == first);
                }
                _ if !live.is_empty() => drop(live.swap_remove(next(live.len()))),
                _ => {}
            }
            if live.len() > 200 {
                live.truncate(100);
                if next(20) == 0 {
                    HEAP.trim();
                }
            }
        }
        live
    };
    let handed_on = std::thread::scope(|scope| {
        [1, 2, 3].map(|seed| scope.spawn(move || work(seed))).map(|thread| thread.join().unwrap())
    });
    drop(handed_on);
    assert_eq!(HEAP.trim().stuck_arenas, 0);
}
