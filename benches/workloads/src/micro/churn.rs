//! 4096 live blocks of mixed sizes; each step replaces one at random: a program's heap in steady use.

use crate::Scale;
use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut random = Random::new(1);
    let mut bytes = 0;
    let mut block = |serial: usize| {
        let size = random.doubling(4, 13);
        bytes += size as u64;
        (random.below(4096), Block::new(size, serial as u32))
    };
    let mut live: Vec<Block> = (0..4096).map(|serial| block(serial).1).collect();
    for serial in 0..scale.of(64 << 10) {
        let (at, new) = block(serial);
        if serial % 65_536 == 0 {
            R::check(new.start(), new.len());
        }
        live[at] = new;
    }
    live.iter().for_each(|block| R::check(block.start(), block.len()));
    bytes
}
