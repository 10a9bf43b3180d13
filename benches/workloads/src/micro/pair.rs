//! A block is taken and given back at once: what a temporary costs.

use crate::Scale;
use crate::block::Block;
use crate::reach::Reach;

/// One of each power of two from 16 bytes to 4 MiB, in turn.
pub fn mixed<R: Reach>(scale: Scale) -> u64 {
    let mut bytes = 0;
    for round in 0..scale.of(1_000) {
        for power in 4..=22 {
            for turn in 0..12 {
                let block = Block::new(1 << power, turn);
                bytes += block.len() as u64;
                if turn == 0 && round % 256 == 0 {
                    R::check(block.start(), block.len());
                }
            }
        }
    }
    bytes
}

/// Pairs of one size, which the program knows when it is compiled.
fn of<R: Reach, const SIZE: usize>(count: usize) -> u64 {
    let mut bytes = 0;
    for turn in 0..count.div_ceil(4096) {
        R::check(Block::new(SIZE, 0).start(), SIZE);
        for serial in 0..4096 {
            bytes += Block::new(SIZE, serial + turn as u32).len() as u64;
        }
    }
    bytes
}

/// Of 16 bytes.
pub fn small<R: Reach>(scale: Scale) -> u64 {
    of::<R, 16>(scale.of(256 << 10))
}

/// Of 64 KiB.
pub fn medium<R: Reach>(scale: Scale) -> u64 {
    of::<R, { 64 << 10 }>(scale.of(256 << 10))
}

/// Of 4 MiB.
pub fn large<R: Reach>(scale: Scale) -> u64 {
    of::<R, { 4 << 20 }>(scale.of(96 << 10))
}
