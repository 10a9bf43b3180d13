//! 1000 blocks out, then in: in the order they came, or the other way round, small sizes in turn.

use crate::Scale;
use crate::block::Block;
use crate::reach::Reach;

const SIZES: [usize; 8] = [16, 32, 48, 64, 96, 128, 256, 512];

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut blocks: Vec<Block> = Vec::with_capacity(1000);
    let mut bytes = 0;
    for round in 0..scale.of(192) {
        let size = SIZES[round % SIZES.len()];
        blocks.extend((0..1000).map(|serial| Block::new(size, serial)));
        bytes += blocks.iter().map(|block| block.len() as u64).sum::<u64>();
        if round % 1024 == 0 {
            blocks.iter().for_each(|block| R::check(block.start(), block.len()));
        }
        if (round / SIZES.len()).is_multiple_of(2) {
            blocks.clear();
        } else {
            while blocks.pop().is_some() {}
        }
    }
    bytes
}
