//! Which indices of the table are free: a bitmap of atomic words. Uses nothing below it.
//!
//! Without a lock, since it is called from inside an allocator; without any cleverness, since filling a slot costs a system
//! call that pins at least 2 MiB.

use core::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Relaxed};

/// The indices `0..count` of a table, each free or taken.
pub(super) struct Slots {
    /// Bit `i % 64` of word `i / 64` is set while index `i` is taken. Bits from `count` on are always set.
    words: Box<[AtomicU64]>,
    count: u32,
}

impl Slots {
    /// All free.
    pub(super) fn new(count: u32) -> Slots {
        let words: Box<[AtomicU64]> = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        if let (Some(last), rest @ 1..) = (words.last(), count % 64) {
            last.store(u64::MAX << rest, Relaxed);
        }
        Slots { words, count }
    }

    /// Takes the lowest index that is seen free. `None`: every index was seen taken.
    pub(super) fn take(&self) -> Option<u32> {
        for (word, index) in self.words.iter().zip(0u32..) {
            let mut seen = word.load(Relaxed);
            while seen != u64::MAX {
                let bit = (!seen).trailing_zeros();
                // AcqRel with the one in `give_back`: whoever gets the index comes after whoever had it.
                let before = word.fetch_or(1 << bit, AcqRel);
                if before & 1 << bit == 0 {
                    return Some(index * 64 + bit);
                }
                seen = before | 1 << bit;
            }
        }
        None
    }

    /// Frees an index that `take` gave.
    pub(super) fn give_back(&self, index: u32) {
        let before = self.words[index as usize / 64].fetch_and(!(1 << (index % 64)), AcqRel);
        debug_assert!(before & 1 << (index % 64) != 0, "slot {index} was not taken");
    }

    /// The size of the table.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// How many are taken.
    pub(super) fn taken(&self) -> u32 {
        let set: u32 = self.words.iter().map(|word| word.load(Relaxed).count_ones()).sum();
        set - (self.words.len() as u32 * 64 - self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::Slots;
    use std::collections::HashSet;

    #[test]
    fn no_index_outside_the_table() {
        for count in [1, 2, 63, 64, 65, 1000, 16384] {
            let slots = Slots::new(count);
            assert_eq!(slots.taken(), 0, "of {count}");
            let all: Vec<u32> = core::iter::from_fn(|| slots.take()).collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            assert_eq!(slots.taken(), count);
            slots.give_back(count / 2);
            assert_eq!((slots.take(), slots.take()), (Some(count / 2), None));
        }
    }

    #[test]
    fn no_index_twice_at_once() {
        let slots = Slots::new(100);
        let mut seen: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..2000 {
                            let mine: Vec<u32> = (0..5).filter_map(|_| slots.take()).collect();
                            assert_eq!(mine.iter().collect::<HashSet<_>>().len(), 5);
                            mine.into_iter().for_each(|index| slots.give_back(index));
                        }
                        (0..25).filter_map(|_| slots.take()).collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>(), "each index once");
    }
}
