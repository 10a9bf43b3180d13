//! Blocks of 1 to 32 MiB, four of them alive, every page touched.

use crate::Scale;
use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut random = Random::new(4);
    let mut live: [Option<Block>; 4] = [const { None }; 4];
    let mut bytes = 0;
    for serial in 0..scale.of(1).div_ceil(2) {
        let size = random.doubling(20, 25);
        bytes += size as u64;
        let place = &mut live[random.below(4)];
        *place = None;
        let mut block = Block::new(size, serial as u32);
        block.touch();
        R::check(block.start(), block.len());
        *place = Some(block);
    }
    bytes
}
