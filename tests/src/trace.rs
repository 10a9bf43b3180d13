//! A trace of a server's memory, the same for every allocator: it grows to a peak of mixed blocks, most requests end, and
//! what is left is replaced bit by bit.
//!
//! Blocks belong to requests, which allocate some tens of blocks each, eight requests at a time. Sizes: 70 % from 16 to 512
//! bytes, 25 % to 8 KiB, 4 % to 64 KiB, 1 % to 1 MiB, each evenly over the logarithm; about 5 KiB in the mean.

use std::alloc::{GlobalAlloc, Layout};

/// How many blocks a request has at most.
const BLOCKS: usize = 64;
/// How many requests are under way at once.
const AT_ONCE: usize = 8;

#[derive(Clone, Copy)]
struct Block {
    start: *mut u8,
    size: usize,
}

/// The blocks of a request.
#[derive(Clone, Copy)]
struct Request {
    blocks: [Block; BLOCKS],
    /// How many it has now.
    count: usize,
    /// How many it shall have.
    wanted: usize,
}

impl Request {
    const NONE: Request =
        Request { blocks: [Block { start: std::ptr::null_mut(), size: 0 }; BLOCKS], count: 0, wanted: 0 };
}

/// The trace, on an allocator. Frees all when it is dropped.
pub struct Trace<'a, A: GlobalAlloc> {
    allocator: &'a A,
    random: u64,
    live: usize,
    done: Vec<Request>,
    under_way: [Request; AT_ONCE],
}

impl<'a, A: GlobalAlloc> Trace<'a, A> {
    /// Nothing allocated yet. The books for `peak` bytes are written at once, so that they do not show in what is measured
    /// later.
    pub fn new(allocator: &'a A, peak: usize) -> Trace<'a, A> {
        let mut done = vec![Request { wanted: 1, ..Request::NONE }; peak / (64 << 10) + 4 * AT_ONCE];
        done.clear();
        Trace { allocator, random: 0x9e37_79b9_7f4a_7c15, live: 0, done, under_way: [Request::NONE; AT_ONCE] }
    }

    /// Bytes in live blocks, as they were asked for.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live
    }

    /// Allocates until `bytes` are live.
    pub fn fill(&mut self, bytes: usize) {
        while self.live < bytes {
            self.step();
        }
    }

    /// Frees `percent` of the requests, any of them.
    pub fn free_most(&mut self, percent: usize) {
        let left = self.done.len() - self.done.len() * percent / 100;
        while self.done.len() > left {
            self.end_any();
        }
    }

    /// Replaces requests until `bytes` have been allocated, with `live` bytes live, or a request less.
    pub fn churn(&mut self, bytes: usize, live: usize) {
        let mut done = 0;
        while done < bytes {
            done += self.step();
            while self.live > live && !self.done.is_empty() {
                self.end_any();
            }
        }
    }

    fn next(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize
    }

    /// A block more for one of the requests under way; its size.
    fn step(&mut self) -> usize {
        let (from, doublings) = match self.next() % 100 {
            0..70 => (16, 5),
            70..95 => (512, 4),
            95..99 => (8 << 10, 3),
            _ => (64 << 10, 4),
        };
        let from = from << (self.next() % doublings);
        let size = from + self.next() % from;
        let layout = layout(size);
        // SAFETY: the size is not zero.
        let start = unsafe { self.allocator.alloc(layout) };
        assert!(!start.is_null(), "no memory for {size} bytes");
        // SAFETY: just allocated with this size.
        unsafe { start.write_bytes(size as u8, size) };
        self.live += size;
        let index = self.next() % AT_ONCE;
        if self.under_way[index].wanted == 0 {
            self.under_way[index].wanted = 16 + self.next() % (BLOCKS - 16);
        }
        let request = &mut self.under_way[index];
        request.blocks[request.count] = Block { start, size };
        request.count += 1;
        if request.count == request.wanted {
            self.done.push(*request);
            self.under_way[index] = Request::NONE;
        }
        size
    }

    /// Frees a request that is done.
    fn end_any(&mut self) {
        let index = self.next() % self.done.len();
        let request = self.done.swap_remove(index);
        self.end(&request);
    }

    fn end(&mut self, request: &Request) {
        for block in &request.blocks[..request.count] {
            // SAFETY: the block was allocated with this layout, has been written whole, and is freed once.
            unsafe {
                assert_eq!(block.start.add(block.size - 1).read(), block.size as u8, "a block has changed");
                self.allocator.dealloc(block.start, layout(block.size));
            }
            self.live -= block.size;
        }
    }
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 8).expect("a size below 2 MiB")
}

impl<A: GlobalAlloc> Drop for Trace<'_, A> {
    fn drop(&mut self) {
        for request in std::mem::take(&mut self.done)
            .iter()
            .chain(&std::mem::replace(&mut self.under_way, [Request::NONE; AT_ONCE]))
        {
            self.end(request);
        }
    }
}
