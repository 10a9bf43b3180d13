//! Collections in heaps that a program made: what `Allocator` promises, at every size and alignment, and how such a heap ends.

use allocator_api2::alloc::Allocator;
use allocator_api2::boxed::Box;
use allocator_api2::vec::Vec;
use core::alloc::Layout;
use core::ptr::NonNull;
use hashbrown::{DefaultHashBuilder, HashMap};
use rdmalloc::{Access, Builder, Heap};
use rdmalloc_tests::Ledger;
use std::thread;

const MIB: usize = 1 << 20;

fn every_kind_of_heap() -> [Builder; 3] {
    [
        Heap::builder(),
        Heap::builder().access(Access::REMOTE_WRITE),
        Heap::builder().access(Access::REMOTE_READ).zero_on_free(true),
    ]
}

/// A block, and the byte that all of it was filled with.
struct Filled {
    block: NonNull<[u8]>,
    layout: Layout,
    mark: u8,
}

impl Filled {
    fn new(block: NonNull<[u8]>, layout: Layout, mark: u8) -> Filled {
        assert!(block.len() >= layout.size() && block.cast::<u8>().addr().get().is_multiple_of(layout.align()));
        // SAFETY: the block is this test's.
        unsafe { block.cast::<u8>().write_bytes(mark, layout.size()) };
        Filled { block, layout, mark }
    }

    fn start(&self) -> NonNull<u8> {
        self.block.cast()
    }

    /// Whether the first bytes are as they were.
    fn check(block: NonNull<[u8]>, len: usize, mark: u8) {
        // SAFETY: the block is this test's, and these bytes were written.
        let bytes = unsafe { core::slice::from_raw_parts(block.cast::<u8>().as_ptr(), len) };
        assert!(bytes.iter().all(|byte| *byte == mark), "a block of {len} was changed");
    }
}

/// Numbers that look random, the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    /// Mostly small, some large; of every alignment.
    fn layout(&mut self) -> Layout {
        let bits = self.below(22);
        let size = self.below(1 + (1 << bits));
        let align = if self.below(50) == 0 { 1 << self.below(21) } else { 1 << self.below(9) };
        Layout::from_size_align(if self.below(20) == 0 { 0 } else { size }, align).unwrap()
    }
}

/// Grows or shrinks a block, which then has another layout.
fn resize(heap: &Heap, old: &Filled, new: Layout, zeroed: bool) -> NonNull<[u8]> {
    // SAFETY: the block is the heap's, of this layout; the new one is longer, or shorter, as is asked.
    let block = unsafe {
        if new.size() < old.layout.size() {
            heap.shrink(old.start(), old.layout, new)
        } else if zeroed {
            heap.grow_zeroed(old.start(), old.layout, new)
        } else {
            heap.grow(old.start(), old.layout, new)
        }
    };
    let block = block.unwrap();
    Filled::check(block, new.size().min(old.layout.size()), old.mark);
    if zeroed && new.size() > old.layout.size() {
        // SAFETY: as in `check`; zeroed.
        let all = unsafe { core::slice::from_raw_parts(block.cast::<u8>().as_ptr(), block.len()) };
        assert!(all[old.layout.size()..].iter().all(|byte| *byte == 0), "{:?} to {new:?} is not zero", old.layout);
    }
    block
}

#[test]
fn blocks_are_apart_aligned_kept_and_zeroed_whatever_becomes_of_them() {
    for (seed, builder) in every_kind_of_heap().into_iter().enumerate() {
        let heap = builder.build().unwrap();
        let mut numbers = Numbers(seed as u64);
        let mut live: std::vec::Vec<Filled> = std::vec::Vec::new();
        for step in 0..20_000 {
            let (layout, mark) = (numbers.layout(), 1 + numbers.below(255) as u8);
            let at = numbers.below(live.len().max(1));
            match numbers.below(5) {
                0 | 1 if live.len() < 200 => {
                    let zeroed = step % 2 == 0;
                    let block = if zeroed { heap.allocate_zeroed(layout) } else { heap.allocate(layout) }.unwrap();
                    if zeroed {
                        Filled::check(block, block.len(), 0);
                    }
                    live.push(Filled::new(block, layout, mark));
                }
                2 | 3 if !live.is_empty() => {
                    let block = resize(&heap, &live[at], layout, step % 2 == 0);
                    live[at] = Filled::new(block, layout, mark);
                }
                _ if !live.is_empty() => {
                    let old = live.swap_remove(at);
                    Filled::check(old.block, old.layout.size(), old.mark);
                    // Any size between what was asked for and what was got fits.
                    let fits = old.layout.size() + numbers.below(1 + old.block.len() - old.layout.size());
                    let fits = if old.layout.size() == 0 { 0 } else { fits };
                    let layout = Layout::from_size_align(fits, old.layout.align()).unwrap();
                    // SAFETY: the block is the heap's, and the layout fits it.
                    unsafe { heap.deallocate(old.start(), layout) };
                }
                _ => {}
            }
        }
        for old in live {
            Filled::check(old.block, old.layout.size(), old.mark);
            // SAFETY: the block is the heap's, of this layout.
            unsafe { heap.deallocate(old.start(), old.layout) };
        }
        heap.trim();
        assert_eq!(heap.open_bytes(), 0, "blocks are lost");
    }
}

#[test]
fn sizes_that_nobody_can_have_are_refused_and_the_block_stays() {
    for builder in every_kind_of_heap() {
        let heap = builder.build().unwrap();
        let layout = |size, align| Layout::from_size_align(size, align).unwrap();
        for size in [0, 1, 63, 65_535, 65_536, 65_537, 4 * MIB - 1, 4 * MIB + 1, 32 * MIB, 100 * MIB] {
            let block = heap.allocate(layout(size, 1)).unwrap();
            let block = Filled::new(block, layout(size, 1), 7);
            for huge in [layout(isize::MAX as usize, 1), layout(isize::MAX as usize - 63, 64), layout(1 << 46, 1 << 40)]
            {
                heap.allocate(huge).expect_err("more than there is");
                // SAFETY: the block is the heap's, of this layout, and the new one is longer.
                unsafe { heap.grow(block.start(), block.layout, huge) }.expect_err("more than there is");
            }
            Filled::check(block.block, size, 7);
            // A shorter one is always to be had, were it the same.
            let shorter = resize(&heap, &block, layout(size / 3, 1), false);
            // SAFETY: the block is the heap's, of this layout.
            unsafe { heap.deallocate(shorter.cast(), layout(size / 3, 1)) };
        }
        // An alignment of 4 TiB has no place, or one.
        let _ = heap.allocate(layout(1, 1 << 42)).map(|block| {
            // SAFETY: as above.
            unsafe { heap.deallocate(block.cast(), layout(1, 1 << 42)) }
        });
        heap.trim();
        assert_eq!(heap.open_bytes(), 0);
    }
}

#[test]
fn a_large_block_grows_and_shrinks_where_it_is() {
    let heap = Heap::builder().build().unwrap();
    // An arena that has room for it, and is kept: what lies behind an arena may be another heap's.
    drop(heap.buffer(32 * MIB).unwrap());
    let mut vector: Vec<u8, &Heap> = Vec::new_in(&heap);
    vector.resize(MIB, 1);
    let at = vector.as_ptr();
    for size in 2..16 {
        vector.resize(size * MIB, size as u8);
    }
    assert_eq!(vector.as_ptr(), at, "what lies behind it was free");
    vector.truncate(2 * MIB);
    vector.shrink_to_fit();
    assert_eq!((vector.as_ptr(), vector[MIB - 1], vector[2 * MIB - 1]), (at, 1, 2));
    // The tail is another's.
    let other = heap.buffer(4 * MIB).unwrap();
    assert!(other.as_ptr() > at && other.as_ptr() < at.wrapping_add(16 * MIB));
}

/// Small blocks would share the links that lie outside of them, were they not made larger there.
#[test]
fn small_blocks_are_apart_where_links_lie_outside() {
    for builder in every_kind_of_heap() {
        let heap = builder.build().unwrap();
        let boxes = |count: u64| (0..count).map(|number| Box::new_in(number, &heap)).collect::<std::vec::Vec<_>>();
        let mut kept = boxes(10_000);
        // Every third goes, by another thread or this one; so that lists of free blocks are long, and used again.
        let mut gone: std::vec::Vec<_> = kept.extract_if(.., |number| **number % 3 == 0).collect();
        let half = gone.split_off(1500);
        thread::scope(|scope| scope.spawn(move || drop(half)).join()).unwrap();
        drop(gone);
        let more = boxes(10_000);
        assert!(kept.iter().all(|number| **number % 3 != 0));
        assert!(more.iter().map(|number| **number).eq(0..10_000));
        let mut places: std::vec::Vec<_> =
            kept.iter().chain(&more).map(|number| (&raw const **number).addr()).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0] + size_of::<u64>() <= pair[1]), "two have the same block");
    }
}

#[test]
fn a_heap_ends_with_the_last_collection_in_it_and_not_before() {
    let ledger = Ledger::new();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    let mut vector = Vec::new_in(heap.clone());
    vector.extend((0..100_000_u32).map(u64::from));
    let mut map = HashMap::with_hasher_in(DefaultHashBuilder::default(), heap.clone());
    for key in 0..10_000_u32 {
        map.insert(key, Box::new_in([key; 8], heap.clone()));
    }
    let words: Vec<Vec<u8, Heap>, Heap> = {
        let mut words = Vec::new_in(heap.clone());
        words.extend(["a", "b"].map(|word| {
            let mut bytes = Vec::new_in(heap.clone());
            bytes.extend_from_slice(word.as_bytes());
            bytes
        }));
        words
    };
    let buffer = heap.buffer(100).unwrap();
    // SAFETY: u64s are bytes.
    let bytes = unsafe { core::slice::from_raw_parts(vector.as_ptr().cast::<u8>(), 8 * vector.len()) };
    let sge = device.sge(bytes).unwrap();
    assert_eq!(sge.length(), 800_000);
    assert!(map.values().all(|value| device.key(&raw const **value).is_ok()));
    drop(heap);
    assert_eq!((vector[99_999], map[&77][7], &words[1][..]), (99_999, 77, &b"b"[..]));
    drop(vector);
    thread::spawn(move || drop(map)).join().unwrap();
    assert!(ledger.live() > 0 && device.key(words.as_ptr()).is_ok());
    drop(words);
    assert!(ledger.live() > 0 && device.key(buffer.as_ptr()).is_ok());
    drop(buffer);
    assert_eq!(ledger.live(), 0);
    // Leaked, so that its handle is as well: the heap lives as long as the program.
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    let leaked: &'static mut [u8; 100] = Box::leak(Box::new_in([1; 100], heap));
    assert!(ledger.live() == 1 && device.sge(leaked).is_ok());
}

#[test]
fn threads_share_a_heap_and_end_it_together() {
    let ledger = Ledger::new();
    for _ in 0..50 {
        let heap = Heap::builder().build().unwrap();
        heap.attach(ledger.clone()).unwrap();
        let threads = [1, 2, 3].map(|mark: u8| {
            let heap = heap.clone();
            thread::spawn(move || {
                let mut vectors: std::vec::Vec<Vec<u8, Heap>> = std::vec::Vec::new();
                for len in (0..20).map(|shift| 1 << shift) {
                    let mut vector = Vec::new_in(heap.clone());
                    vector.resize(len, mark);
                    vectors.push(vector);
                }
                drop(heap);
                assert!(vectors.iter().flatten().all(|byte| *byte == mark));
            })
        });
        drop(heap);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
    assert_eq!(ledger.live(), 0);
}
