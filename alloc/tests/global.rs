//! The global allocator under programs that use the standard library, and alone.

use rdmalloc::Rdmalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc;
use std::thread;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// A sequence of numbers that look random: the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }
}

/// A block with contents that can be checked.
struct Block {
    start: *mut u8,
    layout: Layout,
    mark: u8,
}

// SAFETY: a block is used by whoever has it.
unsafe impl Send for Block {}

impl Block {
    fn new(size: usize, align: usize, mark: u8) -> Block {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the size is not 0.
        let start = unsafe { HEAP.alloc(layout) };
        assert!(!start.is_null(), "{layout:?}");
        assert!(start.addr().is_multiple_of(align), "{layout:?} at {start:p}");
        Block { start, layout, mark }.fill(0)
    }

    fn zeroed(size: usize, align: usize, mark: u8) -> Block {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the size is not 0.
        let start = unsafe { HEAP.alloc_zeroed(layout) };
        assert!(!start.is_null() && start.addr().is_multiple_of(align), "{layout:?} at {start:p}");
        let block = Block { start, layout, mark };
        for at in block.places() {
            // SAFETY: within the block, initialised.
            assert_eq!(unsafe { start.add(at).read() }, 0, "{layout:?} is not zero at {at}");
        }
        block.fill(0)
    }

    /// Some places in the block: all of a small one, each page of a large one.
    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.layout.size();
        let step = if size <= 8192 { 1 } else { 1021 };
        (0..size).step_by(step).chain([size - 1])
    }

    fn fill(self, from: usize) -> Block {
        self.places().filter(|at| *at >= from).for_each(|at| {
            // SAFETY: within the block.
            unsafe { self.start.add(at).write(self.mark ^ (at >> 3) as u8) }
        });
        self
    }

    fn check(&self, upto: usize) {
        for at in self.places().filter(|at| *at < upto) {
            // SAFETY: within the block, initialised by `fill`.
            assert_eq!(unsafe { self.start.add(at).read() }, self.mark ^ (at >> 3) as u8, "{:?} at {at}", self.layout);
        }
    }

    fn resize(self, size: usize) -> Block {
        let kept = self.layout.size().min(size);
        // SAFETY: the block is of this allocator and layout; the size is not 0.
        let start = unsafe { HEAP.realloc(self.start, self.layout, size) };
        assert!(!start.is_null() && start.addr().is_multiple_of(self.layout.align()));
        let block =
            Block { start, layout: Layout::from_size_align(size, self.layout.align()).unwrap(), mark: self.mark };
        let before = Block { start, layout: self.layout, mark: self.mark };
        // The places of the old layout that are still there.
        before.check(kept);
        block.fill(0)
    }

    fn free(self) {
        self.check(self.layout.size());
        // SAFETY: the block is of this allocator and layout, and gone after this.
        unsafe { HEAP.dealloc(self.start, self.layout) };
    }
}

fn any_size(random: &mut Random) -> usize {
    let bits = random.below(22);
    1 + random.below(1 << bits)
}

#[test]
fn every_size_and_alignment_is_aligned_apart_and_kept() {
    for align in (0..=26).map(|shift| 1 << shift) {
        let sizes = [1, 7, 8, 16, 17, 100, 256, 1000, 1024, 1025, 4096, 8192, 8193, 65536, 65537, 200_000, 3 << 20];
        let blocks: Vec<_> = sizes.iter().map(|size| Block::new(*size, align, *size as u8)).collect();
        let zeroed: Vec<_> = sizes.iter().map(|size| Block::zeroed(*size, align, 3)).collect();
        blocks.into_iter().chain(zeroed).for_each(Block::free);
    }
}

#[test]
fn zeroed_memory_is_zero_after_any_use() {
    for size in [16, 1000, 4096, 5000, 8192, 60_000, 70_000, 1 << 20] {
        for _ in 0..4 {
            let blocks: Vec<_> = (0..20).map(|mark| Block::new(size, 8, 0xa5 ^ mark)).collect();
            blocks.into_iter().for_each(Block::free);
            let blocks: Vec<_> = (0..30).map(|mark| Block::zeroed(size, 8, mark)).collect();
            blocks.into_iter().for_each(Block::free);
        }
    }
}

#[test]
fn realloc_keeps_contents_and_alignment_across_all_kinds() {
    let sizes =
        [1, 16, 40, 1000, 5000, 8192, 8200, 30_000, 65_536, 65_537, 100_000, 131_072, 1 << 20, 5 << 20, 40 << 20];
    for align in [1, 16, 64, 4096, 1 << 17] {
        for from in sizes {
            for to in sizes {
                Block::new(from, align, 9).resize(to).resize(from).free();
            }
        }
    }
}

#[test]
fn shrinking_then_growing_zeroed_memory_shows_no_garbage() {
    let block = Block::new(1 << 20, 8, 0xff).resize(70_000);
    let zeroed = Block::zeroed(900_000, 8, 1);
    zeroed.free();
    block.free();
}

#[test]
fn huge_blocks_up_to_four_gibibytes() {
    let block = Block { mark: 1, ..Block::zeroed_untouched(4 << 30) };
    let last = block.layout.size() - 1;
    // SAFETY: within the block.
    unsafe {
        assert_eq!((block.start.read(), block.start.add(last).read()), (0, 0));
        block.start.add(last).write(1);
        HEAP.dealloc(block.start, block.layout);
    }
}

impl Block {
    fn zeroed_untouched(size: usize) -> Block {
        let layout = Layout::from_size_align(size, 8).unwrap();
        // SAFETY: the size is not 0.
        let start = unsafe { HEAP.alloc_zeroed(layout) };
        assert!(!start.is_null());
        Block { start, layout, mark: 0 }
    }
}

#[test]
fn what_cannot_be_had_is_null_and_nothing_panics() {
    for size in [1 << 46, isize::MAX as usize - 4096] {
        let layout = Layout::from_size_align(size, 4096).unwrap();
        // SAFETY: the size is not 0.
        assert!(unsafe { HEAP.alloc(layout) }.is_null());
    }
    let block = Block::new(100, 8, 1);
    // SAFETY: the block is of this allocator; it stays as it is when the new size cannot be had.
    assert!(unsafe { HEAP.realloc(block.start, block.layout, 1 << 46) }.is_null());
    block.free();
}

#[test]
fn alignments_without_bound_are_kept_or_refused() {
    for shift in 27..=62 {
        for size in [1, 100_000, isize::MAX as usize + 1 - (1 << shift)] {
            let Ok(layout) = Layout::from_size_align(size, 1 << shift) else { continue };
            // SAFETY: the size is not 0; the block is freed with its layout.
            unsafe {
                let start = HEAP.alloc(layout);
                assert!(start.addr().is_multiple_of(1 << shift));
                assert!(!start.is_null() || shift > 40 || size > 1 << 40, "2^{shift}");
                if !start.is_null() {
                    start.write(1);
                    HEAP.dealloc(start, layout);
                }
            }
        }
    }
}

#[test]
fn a_block_of_a_piece_at_an_alignment_above_a_chunk() {
    // Arenas that begin between the multiples of the alignment, with room for the block, and none where it may lie.
    let layouts = [(1025 << 20, 8), (1 << 30, 4 << 20), (1 << 30, 64 << 20), (600 << 20, 1 << 30)];
    for (size, align) in layouts.into_iter().chain(layouts) {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the size is not 0; the block is freed with its layout.
        unsafe {
            let start = HEAP.alloc(layout);
            assert!(!start.is_null() && start.addr().is_multiple_of(align));
            HEAP.dealloc(start, layout);
        }
    }
}

#[test]
fn threads_hand_blocks_on_and_none_is_lost_or_changed() {
    let threads = 4;
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..threads).map(|_| mpsc::channel::<Block>()).unzip();
    thread::scope(|scope| {
        for (number, receiver) in receivers.into_iter().enumerate() {
            let senders = senders.clone();
            scope.spawn(move || {
                let mut random = Random(number as u64 + 1);
                let mut mine = Vec::new();
                for _ in 0..20_000 {
                    match random.below(4) {
                        0 | 1 => {
                            mine.push(Block::new(any_size(&mut random), 1 << random.below(7), random.below(256) as u8))
                        }
                        2 if !mine.is_empty() => mine.swap_remove(random.below(mine.len())).free(),
                        _ if !mine.is_empty() => {
                            let block = mine.swap_remove(random.below(mine.len()));
                            let _ = senders[random.below(threads)].send(block).map_err(|unsent| unsent.0.free());
                        }
                        _ => {}
                    }
                    receiver.try_iter().for_each(Block::free);
                    if mine.len() > 400 {
                        mine.drain(..200).for_each(Block::free);
                    }
                }
                mine.into_iter().for_each(Block::free);
                drop(senders);
                receiver.try_iter().for_each(Block::free);
            });
        }
        drop(senders);
    });
}

#[test]
fn std_collections_on_eight_threads() {
    thread::scope(|scope| {
        for number in 0..8u64 {
            scope.spawn(move || {
                let mut random = Random(number);
                let (mut map, mut tree) = (HashMap::new(), BTreeMap::new());
                let mut queue = VecDeque::new();
                for round in 0..3000 {
                    let key = format!("{number}-{}", random.below(500));
                    map.insert(key.clone(), vec![round as u8; 1 + random.below(3000)]);
                    tree.insert(random.below(500), key);
                    queue.push_back(Box::new([round; 20]));
                    if round % 3 == 0 {
                        let value = map.iter().next().map(|(key, value)| (key.clone(), value[0])).unwrap();
                        assert_eq!(map.remove(&value.0).unwrap()[0], value.1);
                        queue.pop_front();
                    }
                }
                assert!(map.values().all(|value| value.iter().all(|byte| *byte == value[0])));
                assert!(tree.values().all(|key| key.starts_with(&number.to_string())));
            });
        }
    });
}

#[test]
fn allocation_in_thread_local_destructors() {
    struct Late(Vec<String>);
    impl Drop for Late {
        fn drop(&mut self) {
            let grown: Vec<_> = (0..100).map(|number| format!("{number} {}", self.0[0])).collect();
            assert_eq!(grown[99], "99 late");
            LATER.with(|later| later.borrow_mut().push(grown.concat()));
        }
    }
    struct Later;
    thread_local! {
        static LATER: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
    }
    for _ in 0..50 {
        thread::spawn(|| {
            LATE.with(|late| *late.borrow_mut() = Some(Late(vec!["late".to_owned()])));
            let _ = Later;
        })
        .join()
        .unwrap();
    }
}

#[test]
fn ten_thousand_threads_come_and_go_without_growth() {
    let round = |count| {
        for first in (0..count).step_by(8) {
            let threads: Vec<_> = (first..first + 8)
                .map(|number| {
                    thread::spawn(move || {
                        let values: Vec<_> = (0..200).map(|size| vec![number as u8; size * 40]).collect();
                        values.iter().map(Vec::len).sum::<usize>()
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), 199 * 100 * 40));
        }
    };
    round(400);
    let before = HEAP.stats().taken_bytes;
    round(10_000);
    let after = HEAP.stats().taken_bytes;
    // Other tests of this process run beside this one, hence the room.
    assert!(after < before + (192 << 20), "taken bytes grew from {before} to {after}");
}
